"""Bytes of one image, or an image struct -> uint8 CHW tensor, or a reason."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFile

from gpuml.errors import RowError
from gpuml.worker.exif import orientation
from gpuml.worker.formats import check_pixels, ended_early, open_image
from gpuml.worker.jpeg import jpeg_pixels, jpeg_scale

#: OpenCV's type number, as Spark's image source writes it -> (channels, Pillow's mode, its name of that byte order).
_STRUCT_MODES = {0: (1, "L", "L"), 16: (3, "RGB", "BGR"), 24: (4, "RGBA", "BGRA")}

#: What undoes each EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

#: 16-bit grey -> 8 bits, rounded. Pillow's own conversion clips: all but the darkest 1/256 becomes white.
_EIGHT_BITS = ((np.arange(65536, dtype=np.uint32) + 128) // 257).astype(np.uint8)

#: Grey samples and RGB samples in a PNG -> what Pillow did to the pixels, and so must be done to their colour key.
_KEY_SCALES: dict[object, tuple[int, int, int]] = {
    # mask, factor, shift
    "1": (1, 255, 0),
    "L;2": (3, 85, 0),
    "L;4": (15, 17, 0),
    "L": (255, 1, 0),
    "RGB": (255, 1, 0),
    "RGB;16B": (65535, 1, 8),  # Pillow keeps the high byte only, so colours that differ below it match too
}


def decode(data: Any, *, max_pixels: int, alpha: str) -> torch.Tensor:
    """Decode one encoded image; the format is told by its content.

    Orientation is applied, transparency flattened, and of several pictures in a file the first is taken.

    Parameters
    ----------
    data : bytes, bytearray or memoryview of a JPEG, PNG, GIF, WebP, AVIF, BMP or TIFF file; or None.
    max_pixels : larger images are refused from their header, before any allocation.
    alpha : transparency over ``"white"``, over ``"black"``, or ``"drop"``: the colours as stored beneath it.

    Returns
    -------
    torch.Tensor
        uint8 of shape (3, height, width), RGB, in channels-last memory.

    Raises
    ------
    RowError
        The row is bad; nothing else is raised, and no warning is given.

    Examples
    --------
    >>> decode(b"GIF", max_pixels=1000, alpha="white")
    Traceback (most recent call last):
    gpuml.errors.RowError: not_image: 3 bytes of no known image format; they start with b'GIF'
    """
    return decode_scaled(data, max_pixels=max_pixels, alpha=alpha, least=None)[0]


def decode_scaled(
    data: Any, *, max_pixels: int, alpha: str, least: tuple[float, float] | None
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Decode as `decode` does, but a JPEG at 1/8, 1/4 or 1/2 of its size where it still has as many pixels as asked.

    Parameters
    ----------
    data, max_pixels, alpha : as for `decode`; `max_pixels` counts at full size.
    least : (height, width) that the upright picture keeps, at the smallest scale that does; None: full size always.

    Returns
    -------
    torch.Tensor
        As of `decode`; decoded smaller, its height and width are rounded up.
    (int, int)
        Height and width of the upright picture at full size.
    """
    if _missing(data):
        raise RowError("null_input", "the cell is null")
    data = bytes(data)  # no copy where it is bytes already
    if not data:
        raise RowError("empty", "no bytes")
    try:
        image = open_image(data, max_pixels)
        if ImageFile.LOAD_TRUNCATED_IMAGES and ended_early(data):  # set by others in this process: not our rule
            raise RowError("truncated", f"the file of {len(data)} bytes ends too early")
        if least is not None and image.format == "JPEG":
            size = _upright(image)
            return _tensor(image, alpha, data, jpeg_scale(data, size, least)), size
        pixels = _tensor(image, alpha, data)
        return pixels, (pixels.shape[1], pixels.shape[2])
    except Exception as error:  # Pillow's plugins raise nearly anything on damaged files
        reason = _reason(error, data)
    raise reason


def decode_pil(image: Image.Image, *, max_pixels: int, alpha: str) -> torch.Tensor:
    """Decode a Pillow image, opened or in memory, by the rules of `decode`; it is loaded, else left as it is.

    Returns and raises as `decode`.
    """
    try:
        check_pixels(*image.size, max_pixels)
        return _tensor(image, alpha)
    except Exception as error:
        reason = _reason(error, b"")
    raise reason


def decode_struct(
    data: Any, height: Any, width: Any, n_channels: Any, mode: Any, *, max_pixels: int, alpha: str
) -> torch.Tensor:
    """Decode the fields of a row of Spark's image source: raw BGR(A) or grey pixels, row by row.

    Each field may be None or NaN, and the numbers numpy's or floats, as pandas makes them of columns with nulls.
    Returns and raises as `decode`, with ``bad_struct`` where the fields contradict one another.
    """
    numbers = (height, width, n_channels, mode)
    if _missing(data) and all(_missing(number) for number in numbers):
        raise RowError("null_input", "the image struct is null")
    if any(_missing(number) or not float(number).is_integer() for number in numbers):
        raise RowError("bad_struct", f"height, width, nChannels, mode = {numbers} are not four whole numbers")
    height, width, n_channels, mode = (int(number) for number in numbers)
    if mode == -1 or height == -1:
        raise RowError("not_image", "the undefined row of Spark's image source, which could not read the file")
    if mode not in _STRUCT_MODES:
        raise RowError("bad_struct", f"mode {mode} is none of 0 (grey), 16 (BGR) and 24 (BGRA), 8 bits each")
    channels, pil_mode, byte_order = _STRUCT_MODES[mode]
    found = 0 if _missing(data) else len(data)
    if n_channels != channels or height < 1 or width < 1 or found != height * width * channels:
        raise RowError(
            "bad_struct",
            f"{found} bytes do not make height {height} x width {width} x nChannels {n_channels} in mode {mode}",
        )
    check_pixels(width, height, max_pixels)
    image = Image.frombuffer(pil_mode, (width, height), bytes(data), "raw", byte_order, 0, 1)
    return decode_pil(image, max_pixels=max_pixels, alpha=alpha)


def _missing(value: Any) -> bool:
    """None, NaN or pandas' NA: what pandas makes of None in a column of numbers, by Spark's settings."""
    return (
        value is None
        or type(value).__name__ == "NAType"
        or (isinstance(value, (float, np.floating)) and value != value)
    )


def _reason(error: Exception, data: bytes) -> RowError:
    """The RowError for whatever Pillow raised on `data`."""
    if isinstance(error, RowError):
        return error
    text = str(error) or type(error).__name__
    file = f"the file of {len(data)} bytes" if data else "the file"
    if isinstance(error, MemoryError):
        return RowError("too_large", f"no memory for its pixels: {text}")
    if isinstance(error, Image.DecompressionBombError):  # only from an image that the caller opened
        return RowError("too_large", f"Pillow's own limit, twice PIL.Image.MAX_IMAGE_PIXELS, refuses it: {text}")
    if text.startswith(("cannot handle ", "Unsupported BMP", "unknown pixel mode")):
        return RowError("unsupported", f"pixels of a kind that Pillow does not read: {text}")
    # struct.error and IndexError come raw from our own walk over the header only: it ran off the end.
    if "truncat" in text.lower() or isinstance(error, (struct.error, IndexError)) or ended_early(data):
        return RowError("truncated", f"{file} ends too early: {text}")
    return RowError("corrupt", f"{file} is damaged: {text}")


def _upright(image: Image.Image) -> tuple[int, int]:
    """(height, width) of an opened JPEG once its orientation is applied."""
    width, height = image.size
    return (width, height) if orientation(image.info.get("exif")) >= 5 else (height, width)


def _tensor(image: Image.Image, alpha: str, data: bytes = b"", scale: int = 1) -> torch.Tensor:
    """Pixels of an image whose size has been checked; `data` is the file that it was opened from, if there is one."""
    key = _colour_key(image)
    pixels = jpeg_pixels(image, data, scale) if data else None
    if pixels is None:
        if scale > 1:  # draft takes the largest of 8, 4 and 2 that both quotients reach, which is this one
            image.draft(None, (image.width // scale, image.height // scale))
        image.load()
    turn = _TURNS.get(orientation(image.info.get("exif")))  # after loading: an opened PNG may have it after its pixels
    if pixels is not None:
        if turn is None:
            return torch.from_numpy(pixels).permute(2, 0, 1)
        image = Image.fromarray(pixels)
    if turn is not None:
        image = image.transpose(turn)
    if image.mode != "RGB" or key is not None:
        image = _flatten(image, key, alpha)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _flatten(image: Image.Image, key: int | tuple[int, ...] | None, alpha: str) -> Image.Image:
    """An image of any mode, and the colour that stands for transparent -> mode RGB."""
    mode = image.mode
    mask = None
    if mode == "1":
        image = image.convert("L")
    if key is not None:
        opaque = np.asarray(image) != np.array(key)
        mask = Image.fromarray(np.where(opaque.any(-1) if opaque.ndim == 3 else opaque, 255, 0).astype(np.uint8))
    if mode.startswith("I;16"):
        image = Image.fromarray(_EIGHT_BITS[np.asarray(image)])
    if image.mode == "L":
        image = Image.merge("RGB", (image, image, image))
    elif mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") and image.has_transparency_data:
        # Two steps for the premultiplied ones; the others convert to RGBA as they are.
        image = image.convert({"La": "LA", "RGBa": "RGBA"}.get(mode, mode)).convert("RGBA")
        mask = image.getchannel("A")
    if mask is not None and alpha != "drop":
        # paste() rounds pixel * a + background * (255 - a) over 255 to the nearest, in C.
        canvas = Image.new("RGB", image.size, alpha)
        canvas.paste(image, mask=mask)
        return canvas
    if image.mode in ("RGBA", "P", "CMYK", "YCbCr", "RGBX"):
        return image.convert("RGB")
    if image.mode != "RGB":
        raise RowError("unsupported", f"pixels of Pillow's mode {mode!r} have no agreed 8-bit RGB; convert them first")
    return image


def _colour_key(image: Image.Image) -> int | tuple[int, ...] | None:
    """The pixel value that stands for transparent in an image without alpha, in terms of Pillow's pixels."""
    key = image.info.get("transparency")
    if not (isinstance(key, int) and image.mode in ("1", "L", "I;16")) and not (
        isinstance(key, tuple) and len(key) == 3 and image.mode == "RGB"
    ):
        return None
    tiles = getattr(image, "tile", None)  # before loading: how the samples lie in the file
    mask, factor, shift = _KEY_SCALES.get(tiles[0][3] if tiles else None, (65535, 1, 0))
    if isinstance(key, tuple):
        return tuple((part & mask) * factor >> shift for part in key)
    return (key & mask) * factor >> shift
