"""Raw EXIF bytes, or a TIFF file (its layout is the same) -> the tags of the first directory, and the orientation.

Pillow's reader parses every directory, warns in each thread about what does not fit, and to turn a picture writes
the EXIF anew, which fails on what cameras and editors really write. One tag is needed here, and no error.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

_ORIENTATION = 0x0112

#: Bytes of one value, by TIFF type.
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}


@dataclass(frozen=True)
class Tag:
    """One entry of a directory; `at` is where its values lie, `entry` its 12 bytes as they stand."""

    kind: int
    count: int
    at: int
    entry: bytes

    @property
    def end(self) -> int:
        """Where its values end."""
        return self.at + self.count * SIZES.get(self.kind, 1)


@dataclass(frozen=True)
class Directory:
    """The first directory of a TIFF: struct's sign for its byte order, its tags, and whether none is cut off."""

    data: bytes
    order: str = "<"
    tags: dict[int, Tag] = field(default_factory=dict)
    complete: bool = False

    def values(self, number: int) -> tuple[int, ...]:
        """The whole numbers (SHORT or LONG) of a tag; empty where it is absent, of another type, or cut off."""
        tag = self.tags.get(number)
        if tag is None or tag.kind not in (3, 4) or tag.end > len(self.data):
            return ()
        return struct.unpack_from(f"{self.order}{tag.count}{'H' if tag.kind == 3 else 'I'}", self.data, tag.at)

    def value(self, number: int) -> int:
        """The first whole number of a tag, or 0."""
        return next(iter(self.values(number)), 0)


def read_directory(data: bytes) -> Directory:
    """Read the first directory of a TIFF file, or of EXIF bytes without their header; as far as it goes if damaged."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None or len(data) < 8:
        return Directory(data)
    (start,) = struct.unpack_from(order + "I", data, 4)
    if start + 2 > len(data):
        return Directory(data, order)
    (number,) = struct.unpack_from(order + "H", data, start)
    tags: dict[int, Tag] = {}
    for at in range(start + 2, min(start + 2 + 12 * number, len(data) - 11), 12):
        name, kind, count, offset = struct.unpack_from(order + "HHII", data, at)
        inline = count * SIZES.get(kind, 1) <= 4
        tags.setdefault(name, Tag(kind, count, at + 8 if inline else offset, data[at : at + 12]))
    return Directory(data, order, tags, complete=start + 2 + 12 * number <= len(data))


def orientation(exif: object) -> int:
    """The orientation (1..8) that EXIF bytes hold; 1 for whatever cannot be read or has no meaning."""
    if not isinstance(exif, bytes):
        return 1
    while exif.startswith(b"Exif\0\0"):  # some writers repeat it
        exif = exif[6:]
    value = read_directory(exif).value(_ORIENTATION)
    return value if 1 <= value <= 8 else 1
