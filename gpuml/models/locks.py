"""Files that several processes share -> one process alone, or many that keep what they read, as flock(2) has it.

Where there are no such locks (Windows, some network file systems, a folder for reading only) nothing fails and nothing
is locked. A lock ends with its process, however that ends.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

#: To open a FIFO would wait for its other end.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)


@contextmanager
def exclusive(lock: Path) -> Iterator[bool]:
    """Hold a lock file alone, waiting for others; False where there are no locks or the file cannot be made.

    Not twice in one thread: it would wait for itself.
    """
    descriptor = _locked(lock)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def shared(path: Path) -> int | None:
    """A descriptor of a file, open for reading, that holds a shared lock; None if there is no such file.

    Raises
    ------
    OSError
        The file is there and cannot be opened, or it is a folder, a FIFO or the like.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _AT_ONCE | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def in_use(path: Path) -> bool:
    """Whether a process holds a lock on a file, this one included. Two that ask at once would see one another."""
    if sys.platform == "win32":
        return False  # what is open cannot be deleted there
    descriptor = _opened(path, 0)
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _locked(lock: Path) -> int | None:
    if sys.platform == "win32":
        return None
    while (descriptor := _opened(lock, os.O_CREAT)) is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(descriptor)
            break
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        os.close(descriptor)  # deleted while we waited: whoever comes next makes another
    return None


def _opened(path: Path, create: int) -> int | None:
    """A descriptor to lock alone: for writing, as NFS wants it, or for reading if the file is another user's."""
    for flags in (os.O_RDWR | create, os.O_RDONLY):
        with suppress(OSError):
            return os.open(path, flags | _AT_ONCE, 0o666)
    return None
