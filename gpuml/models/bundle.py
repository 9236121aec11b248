"""A zip of a network and its ``synset.txt``, as the Deep Java Library packs models -> the two, apart."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

from gpuml.errors import ModelFileError

_NETWORK = re.compile(r"(?i).*\.(pt|pt2|pth)")

#: torch's own archives are zips too, with one of these below their root folder; the last is torch.export's before 2.8.
_TORCHS = re.compile(r"[^/]+/(archive_format|constants\.pkl|data\.pkl)|([^/]+/)?serialized_exported_program\.json")

#: A network is numbers, which hardly compress. Above this size and ratio a zip is a bomb.
_MOST_UNPACKED, _MOST_RATIO = 1 << 28, 100
_MOST_SYNSET = 1 << 24


def is_bundle(path: Path) -> bool:
    """Whether a file is a zip, and none of torch's."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False  # the check of archives says it better
    return not any(map(_TORCHS.fullmatch, names))


def unpack(path: Path, network: Path) -> tuple[str, ...]:
    """Write the network's file to `network`, whatever its name in the zip; returns the lines of synset.txt, or none.

    Raises
    ------
    ModelFileError
        There is no network or more than one, or the zip is damaged or a bomb, or there is no room.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            networks = [member for member in members if _NETWORK.fullmatch(member.filename)]
            synsets = [member for member in members if Path(member.filename).name == "synset.txt"]
            if len(networks) != 1 or len(synsets) > 1:
                found = ", ".join(member.filename for member in members)
                raise ModelFileError(
                    f"{path} must hold one network (.pt, .pt2) and at most one synset.txt; it holds {found[:300]}"
                )
            for member in networks + synsets:
                # A zip may say of a member that it has more bytes than the file.
                unpacked, packed = member.file_size, max(1, min(member.compress_size, path.stat().st_size))
                too_large = unpacked > _MOST_UNPACKED and unpacked > _MOST_RATIO * packed
                if too_large or (member in synsets and unpacked > _MOST_SYNSET):
                    raise ModelFileError(
                        f"{path}: {packed} bytes of {member.filename} would become {unpacked}: refused"
                    )
            with archive.open(networks[0]) as packed_network, network.open("wb") as out:
                shutil.copyfileobj(packed_network, out, 1 << 20)
            if is_bundle(network):
                raise ModelFileError(f"{path}: its {networks[0].filename} is a zip of others again: refused")
            if not synsets:
                return ()
            lines = archive.read(synsets[0]).decode("utf-8-sig").rstrip().split("\n")
            return tuple(line.rstrip("\r") for line in lines)
    except ModelFileError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path} cannot be unpacked to {network.parent}: {error.strerror or error}") from error
    except Exception as error:  # what zlib, zipfile and text raise on damaged bytes
        raise ModelFileError(f"{path} is damaged ({type(error).__name__}: {error}); fetch it again") from error
