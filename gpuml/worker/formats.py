"""Bytes of one image file -> a Pillow image that has read only its header, or a reason.

Each format's opener hands Pillow's own plugin no more than one picture needs: `Image.open` would apply a
process-wide pixel limit and try some forty plugins, and what is left out here (comments, profiles, further
frames, damaged EXIF) is what makes those plugins warn, allocate or fail. A warning cannot be silenced around
the call: `warnings.catch_warnings` is not thread-safe, and this runs in many threads.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable

from PIL import Image, ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from gpuml.errors import RowError
from gpuml.worker.exif import SIZES, Directory, read_directory

#: Formats by their first bytes: those that are read, then those that are only named.
_PREFIXES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "BigTIFF"),
    (b"MM\0+", "BigTIFF"),
    (b"II\xbc\1", "JPEG XR"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "PSD"),
    (b"%PDF-", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"DDS ", "DDS"),
    (b"qoif", "QOI"),
    (b"SIMPLE  =", "FITS"),
)
_DIB_HEADERS = (12, 40, 52, 56, 64, 108, 124)
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """Read the header of one image file: its size is within `max_pixels`, its pixels are not read yet.

    ``image.info["exif"]`` holds the raw EXIF bytes, if there are any, whose orientation is still to be applied.

    Raises
    ------
    RowError
        ``not_image``, ``unsupported``, ``too_large``, ``truncated`` or ``corrupt``.
    Exception
        Whatever Pillow raises for a damaged header; `decode` makes a RowError of it.
    """
    name = sniff(data)
    if name is None:
        raise RowError("not_image", f"{len(data)} bytes of no known image format; they start with {data[:16]!r}")
    if name not in _OPENERS:
        raise RowError("unsupported", f"{name} is not read; convert it to JPEG, PNG or WebP")
    image = _OPENERS[name](data, max_pixels)
    check_pixels(*image.size, max_pixels)
    return image


def check_pixels(width: int, height: int, max_pixels: int, what: str = "image") -> None:
    """Raise RowError ``too_large`` when width x height is over `max_pixels`."""
    if width * height > max_pixels:
        raise RowError(
            "too_large",
            f"{what} of {width}x{height} = {width * height} pixels is over maxPixels={max_pixels}; raise it to read it",
        )


def sniff(data: bytes) -> str | None:
    """Name of the format that the first bytes tell, or None; file names are never asked."""
    for prefix, name in _PREFIXES:
        if data.startswith(prefix):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    # "BM" alone is also how text may begin.
    if data[:2] == b"BM" and len(data) >= 18 and int.from_bytes(data[14:18], "little") in _DIB_HEADERS:
        return "BMP"
    if data[4:8] == b"ftyp":
        brands = [data[at : at + 4] for at in range(8, min(int.from_bytes(data[:4], "big"), 256), 4)]
        if b"avif" in brands or b"avis" in brands:
            return "AVIF"
        return "HEIF" if any(brand in _HEIF_BRANDS for brand in brands) else None
    if data[128:132] == b"DICM":
        return "DICOM"
    return "SVG" if data.lstrip()[:1] == b"<" and b"<svg" in data[:1024] else None


def ended_early(data: bytes) -> bool:
    """Whether the file's own structure says that bytes are missing at the end."""
    name = sniff(data)
    if name == "JPEG":
        return _jpeg_ended_early(data)
    if name == "PNG":
        return _walk(data, 8, lambda at: int.from_bytes(data[at : at + 4], "big") + 12, b"IEND")
    if name == "WebP":
        return int.from_bytes(data[4:8], "little") + 8 > len(data)
    if name == "BMP":
        return int.from_bytes(data[2:6], "little") > len(data)
    if name == "AVIF":
        # A box of length 0 runs to the end of the file; 1 means a length of 8 bytes, which no cell can need.
        return _walk(data, 0, lambda at: int.from_bytes(data[at : at + 4], "big") or len(data) - at)
    return False  # GIF: Pillow says so itself; TIFF: its opener has checked


def _walk(data: bytes, at: int, size: Callable[[int], int], last: bytes | None = None) -> bool:
    """Whether blocks of `size(at)` bytes run past the end of `data`, or end before the block named `last`."""
    while at + 8 <= len(data):
        if data[at + 4 : at + 8] == last:
            return False
        at += max(size(at), 8)
    return at > len(data) or last is not None


def _jpeg_ended_early(data: bytes) -> bool:
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return False  # damaged, not short
        if data[at + 1] == 0xDA:  # start of scan: an end-of-image marker must follow
            return data.find(b"\xff\xd9", at) < 0
        # Markers without a length: fill bytes, restarts, start of image.
        bare = data[at + 1] in (0x01, 0xFF) or 0xD0 <= data[at + 1] <= 0xD8
        at += (1 if data[at + 1] == 0xFF else 2) if bare else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return True


class _Jpeg(JpegImageFile):
    def _open(self) -> None:
        # Pillow parses all of the EXIF for a resolution, with a warning where it is damaged, unless there is one.
        self.info["dpi"] = (72, 72)
        super()._open()


def _open_jpeg(data: bytes, max_pixels: int) -> Image.Image:
    image = _Jpeg(io.BytesIO(data))  # never MPO's class: the first picture is the picture
    # Each scan of a progressive JPEG passes over the whole image: 0.1 s at the default maxPixels, however few its
    # bytes, so a small file could keep a thread busy for hours. Encoders write about ten.
    scans = data.count(b"\xff\xda") if image.info.get("progressive") else 0
    if scans > 200:
        raise RowError("corrupt", f"a progressive JPEG of {scans} scans; more than 200 are refused")
    return image


def _open_png(data: bytes, max_pixels: int) -> Image.Image:
    view, exif, coded, at = memoryview(data), None, 0, 8
    kept: list[bytes | memoryview] = [data[:8]]
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if name in (b"IHDR", b"PLTE", b"tRNS", b"IDAT"):  # all that the first picture needs
            kept.append(view[at:end])
            coded += length if name == b"IDAT" else 0
        elif name == b"eXIf" and end <= len(data):  # before IDAT or after
            exif = data[at + 8 : end - 4]
        elif name == b"IEND":
            break
        at = end
    image = PngImageFile(io.BytesIO(b"".join(kept)))
    check_pixels(*image.size, max_pixels)
    bits = data[24] * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[data[25]]
    # Deflate expands at most 1032 times, so a shorter stream cannot fill the picture: nothing is allocated.
    if image.width * bits // 8 * image.height > 1032 * coded:
        raise RowError("truncated", f"{coded} bytes of pixel data cannot fill {image.width}x{image.height} pixels")
    if exif is not None:
        image.info["exif"] = exif
    return image


def _open_gif(data: bytes, max_pixels: int) -> Image.Image:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = start = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    control = b""
    while data[at] != 0x2C:  # "," begins the first picture
        if data[at] != 0x21:  # "!" begins an extension
            at += 1
            continue
        extension = at
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
        if data[extension + 1 : extension + 3] == b"\xf9\x04":
            # Keep the transparent index. The rest says what follows this picture: Pillow would allocate for it.
            control = bytes((0x21, 0xF9, 4, data[extension + 3] & 1, 0, 0, data[extension + 6], 0))
    x, y, w, h = struct.unpack_from("<4H", data, at + 1)
    # A picture may reach over the screen; Pillow then enlarges the screen, under its own limit.
    width, height = max(width, x + w), max(height, y + h)
    check_pixels(width, height, max_pixels)
    head = data[:6] + struct.pack("<HH", width, height) + data[10:start]
    return GifImageFile(io.BytesIO(head + control + data[at:]))


class _Short(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        # Pillow 13 reads 30 bytes and holds the size in them against its own limit. A read may come back short, and
        # 16 bytes are enough for Pillow to know the format; the rest it reads as a whole.
        return super().read(size if size is None else min(size, 16))


def _open_webp(data: bytes, max_pixels: int) -> Image.Image:
    # The decoder allocates its canvas when it is made, so the size is read before.
    name, head = struct.unpack_from("<4s4x10s", data, 12)
    if name == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (4, 7))
    elif name == b"VP8L":
        packed = int.from_bytes(head[1:5], "little")
        width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    else:
        width, height = (value & 0x3FFF for value in struct.unpack_from("<HH", head, 6))
    check_pixels(width, height, max_pixels)
    return WebPImageFile(_Short(data))


#: What libavif opens at most: its defaults, which Pillow has no way to change.
_AVIF_PIXELS, _AVIF_SIDE = 16384 * 16384, 32768


def _open_avif(data: bytes, max_pixels: int) -> Image.Image:
    # In AVIF the boxes "irot" and "imir" alone turn the picture, and Pillow reports them as EXIF. EXIF of the
    # file itself would be parsed and rewritten for that, so its item gets a type that nobody reads.
    data = re.sub(rb"(infe\x02.{7}|infe\x03.{9})Exif", rb"\1skip", data, flags=re.DOTALL)
    try:
        return AvifImageFile(io.BytesIO(data))
    except SyntaxError:  # "BMFF parsing failed", also where only the size is refused
        _check_avif(data, max_pixels)
        raise


def _check_avif(data: bytes, max_pixels: int) -> None:
    """Raise RowError ``too_large`` when an "ispe" box, which holds a picture's size, is over libavif's limits."""
    for box in re.findall(rb"\0\0\0\x14ispe.{4}(.{8})", data, flags=re.DOTALL):
        width, height = struct.unpack(">II", box)
        if width * height > _AVIF_PIXELS or max(width, height) > _AVIF_SIDE:
            check_pixels(width, height, max_pixels)
            limits = f"{_AVIF_PIXELS} pixels or {_AVIF_SIDE} a side"
            raise RowError("too_large", f"AVIF of {width}x{height} pixels; libavif opens none over {limits}")


def _open_bmp(data: bytes, max_pixels: int) -> Image.Image:
    image = BmpImageFile(io.BytesIO(data))
    if image.info.get("compression") in (1, 2):
        # Pillow expands it in Python, a byte at a time: 40 kB can keep a thread, and the GIL, for a minute.
        raise RowError("unsupported", "a run-length compressed BMP is not read; convert it to PNG")
    return image


class _Tiff(TiffImageFile):
    def load_prepare(self) -> None:
        ImageFile.ImageFile.load_prepare(self)  # TiffImageFile's adds Pillow's own pixel limit

    def load_end(self) -> None:
        pass  # TiffImageFile's turns the picture, by way of all of the EXIF


#: What a TIFF's pixels need: size, layout, compression, colours. No other tag reaches Pillow.
_TIFF_PIXELS = frozenset(
    (256, 257, 258, 259, 262, 266, 273, 277, 278, 279, 284, 292, 293, 317, 320, 322, 323, 324, 325, 338, 339, 347)
    + (512, 513, 514, 515, 517, 518, 519, 520, 521, 529, 530, 531, 532)
)
#: Of these, the ones with a single value, where Pillow warns about more.
_TIFF_SINGLE = frozenset((256, 257, 259, 262, 266, 277, 278, 284, 317, 322, 323))


def _open_tiff(data: bytes, max_pixels: int) -> Image.Image:
    directory = read_directory(data)
    if not directory.complete:
        raise RowError("truncated", f"the directory of the TIFF lies beyond the end of the file of {len(data)} bytes")
    tags = {number: tag for number, tag in sorted(directory.tags.items()) if number in _TIFF_PIXELS}
    for number, tag in tags.items():
        if tag.end > len(data):
            raise RowError("truncated", f"TIFF tag {number} lies beyond the end of the file of {len(data)} bytes")
        if tag.kind not in SIZES or tag.count < 1 or (number in _TIFF_SINGLE and tag.count > 1):
            raise RowError("corrupt", f"TIFF tag {number} has type {tag.kind} and {tag.count} values")
    if directory.value(254) & 1:
        raise RowError("unsupported", "the first page of this TIFF is a preview, as in camera raw files")
    check_pixels(directory.value(256), directory.value(257), max_pixels)
    _check_strips(directory, max_pixels)
    # A directory of these tags only, after the old file: offsets stay true, and it is the last page.
    head = data[:4] + struct.pack(directory.order + "I", len(data))
    tail = struct.pack(directory.order + "H", len(tags)) + b"".join(tag.entry for tag in tags.values()) + bytes(4)
    image = _Tiff(io.BytesIO(head + data[8:] + tail))
    image.info["exif"] = data  # its first directory holds the orientation, as EXIF's does
    return image


def _check_strips(tiff: Directory, max_pixels: int) -> None:
    """Raise RowError unless the strips or tiles of a TIFF fit its size and its file."""
    width, height, samples = tiff.value(256), tiff.value(257), tiff.value(277) or 1
    across = tiff.value(322) or width
    down = tiff.value(323) or min(tiff.value(278) or height, height)
    check_pixels(across, down, max_pixels, "TIFF tile")  # libtiff allocates one, however small the picture
    offsets, counts = (tiff.values(strip) or tiff.values(tile) for strip, tile in ((273, 324), (279, 325)))
    most = math.ceil(width / max(across, 1)) * math.ceil(height / max(down, 1)) * samples
    if len(offsets) > most:
        raise RowError("corrupt", f"TIFF with {len(offsets)} strips or tiles where its size makes {most}")
    bits = tiff.values(258) or (1,)
    raw = width * (sum(bits) if len(bits) == samples else bits[0] * samples) // 8 * height
    if tiff.value(259) in (0, 1):  # uncompressed: Pillow reads on past the counts, into whatever follows
        counts = counts or (raw,)
        if sum(counts) < raw:
            raise RowError("truncated", f"TIFF with {sum(counts)} bytes of pixels where its size makes {raw}")
    if any(offset + count > len(tiff.data) for offset, count in zip(offsets, counts, strict=False)):
        raise RowError("truncated", f"the pixels of the TIFF lie beyond the end of the file of {len(tiff.data)} bytes")


_OPENERS: dict[str, Callable[[bytes, int], Image.Image]] = {
    "JPEG": _open_jpeg,
    "PNG": _open_png,
    "GIF": _open_gif,
    "BMP": _open_bmp,
    "TIFF": _open_tiff,
}
if features.check("webp"):  # a Pillow built from source may lack these two
    _OPENERS["WebP"] = _open_webp
if features.check("avif"):
    _OPENERS["AVIF"] = _open_avif
