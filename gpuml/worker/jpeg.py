"""Bytes of a JPEG whose header Pillow has read -> its pixels by simplejpeg, or None: Pillow shall decode it.

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


def jpeg_pixels(image: Image.Image, data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """uint8 (height, width, 3), RGB, without the orientation applied; of damaged files Pillow has the last word.

    Parameters
    ----------
    image : opened from `data`, its size checked, not loaded.
    """
    if _simplejpeg is None or image.format != "JPEG" or image.mode != "RGB" or ImageFile.LOAD_TRUNCATED_IMAGES:
        return None
    try:
        pixels: np.ndarray[Any, np.dtype[np.uint8]] = _simplejpeg.decode_jpeg(data, "RGB", strict=True)
    except Exception:  # of a damaged file; a warning of libjpeg's is one too: Pillow reads on behind most
        return None
    return pixels
