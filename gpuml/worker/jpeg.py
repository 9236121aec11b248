"""A JPEG whose header Pillow has read -> the scale to decode it at, and its pixels by simplejpeg, or None: by Pillow.

Both are libjpeg-turbo, and give the same pixels; Pillow keeps four bytes a pixel, and copies them. What the extra
``gpuml[fast]`` saves is a third of the CPU time of a decode.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from PIL import Image, ImageFile

try:
    _simplejpeg: Any = importlib.import_module("simplejpeg")
except ImportError:
    _simplejpeg = None

#: Start of a frame of blocks, by marker: baseline, extended and progressive with Huffman codes.
_BLOCKS = (0xC0, 0xC1, 0xC2)


def jpeg_scale(data: bytes, size: tuple[int, int], least: tuple[float, float]) -> int:
    """By how much a JPEG may be decoded smaller: 8, 4 or 2 where each axis keeps as many whole pixels as `least` says.

    libjpeg does it in the inverse DCT: of each block of 8x8 pixels it makes 1, 4 or 16.

    Parameters
    ----------
    size, least : of the same two axes, in the same order.

    Returns
    -------
    int
        8, 4, 2, or 1: full size.
    """
    fitting = (scale for scale in (8, 4, 2) if all(side >= scale * n for side, n in zip(size, least, strict=True)))
    scale = next(fitting, 1)
    return scale if scale > 1 and _has_blocks(data) else 1


def jpeg_pixels(image: Image.Image, data: bytes, scale: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """uint8 (height, width, 3), RGB, without the orientation applied; of damaged files Pillow has the last word.

    Parameters
    ----------
    image : opened from `data`, its size checked, not loaded.
    scale : from `jpeg_scale`; sizes are rounded up.
    """
    if _simplejpeg is None or image.format != "JPEG" or image.mode != "RGB" or ImageFile.LOAD_TRUNCATED_IMAGES:
        return None
    least = {}
    if scale > 1:
        # TurboJPEG finds the scale from the size that it gives; of 3x3 and 5x5 pixels, more than one gives the same.
        if max(image.size) < 8:
            return None
        width, height = (-(-side // scale) for side in image.size)
        least = {"min_width": width, "min_height": height}
    try:
        pixels: np.ndarray[Any, np.dtype[np.uint8]] = _simplejpeg.decode_jpeg(data, "RGB", strict=True, **least)
    except Exception:  # of a damaged file; a warning of libjpeg's is one too: Pillow reads on behind most
        return None
    return pixels


def _has_blocks(data: bytes) -> bool:
    """Whether the frame of a JPEG surely is one of 8x8 blocks.

    A lossless one has none, and no scales. Asked for one, simplejpeg 1.9 takes memory for the smaller size, writes all
    pixels into it, and ends the process (signal 11); Pillow 13 calls the file damaged. So what is not understood here
    counts as no: only segments with a length may stand before the frame's.
    """
    at = 2
    while data[at : at + 1] == b"\xff" and at + 4 <= len(data):
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in (0xC4, 0xCC, 0xDB, 0xDD, 0xFE) or 0xE0 <= marker <= 0xEF:  # tables, comments, applications
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        else:
            return marker in _BLOCKS
    return False
