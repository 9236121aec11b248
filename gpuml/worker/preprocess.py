"""A decoded image -> the model's uint8 input (CPU, per image); a batch of them -> normalised float32 (its device)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from gpuml.spec import Preprocess

#: A resize to more pixels than this, and than the image has, is done for the cropped part only: 12 MiB of RGB.
_LARGE = 1 << 22

_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def resize_crop(
    pixels: torch.Tensor,
    preprocess: Preprocess,
    out: torch.Tensor | None = None,
    full: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Resize and centre-crop one image, as torchvision's transforms do with a Pillow image.

    Parameters
    ----------
    pixels : uint8 of shape (3, height, width) in channels-last memory, as `decode` gives it; any size from 1x1.
    preprocess : the lengths, in pixels, and the interpolation.
    out : uint8 of shape (3, *preprocess.size) to write into, such as a slot of a batch.
    full : (height, width) of the picture where `pixels` were decoded smaller; None: theirs. Sizes rounded up have
        another aspect ratio: the crop of their resize would lie beside that of the whole picture's.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor like it in channels-last memory.
    """
    height, width = preprocess.size
    if out is None:
        out = torch.empty((height, width, 3), dtype=torch.uint8).permute(2, 0, 1)
    size = _resized(*(full or (pixels.shape[1], pixels.shape[2])), preprocess.resize)
    # torchvision's center_crop rounds half to even, as round() does.
    top, left = round((size[0] - height) / 2.0), round((size[1] - width) / 2.0)
    part = (top, left, height, width)
    if size == tuple(pixels.shape[1:]):
        result = pixels[:, top : top + height, left : left + width]
    elif preprocess.interpolation == "nearest":
        result = _nearest(pixels, size, part)
    elif size[0] * size[1] > max(_LARGE, pixels.shape[1] * pixels.shape[2]):
        result = _resize_part(pixels, size, part, preprocess.interpolation)
    else:
        result = _resize(pixels, size, preprocess)[:, top : top + height, left : left + width]
    # Not torch's copy_: from 32,768 elements on it starts a team of OpenMP threads in each thread that decodes.
    np.copyto(_rows(out), _rows(result))
    return out


def normalise(batch: torch.Tensor, preprocess: Preprocess) -> torch.Tensor:
    """Scale a batch to 0..1 and normalise it on its own device: ``(pixel / 255 - mean) / std``.

    Parameters
    ----------
    batch : uint8 of shape (n, 3, height, width), on any device.

    Returns
    -------
    torch.Tensor
        float32 of the same shape and device, in channels-last memory.
    """
    # In memory, a line of pixels is r, g, b, r, g, b: with constants as long as a line torch's loops are 8 times
    # faster on a CPU than with three constants, over which they would step three numbers at a time.
    lines = batch.permute(0, 2, 3, 1).flatten(2)
    scale, shift = _scale_shift(preprocess.mean, preprocess.std, batch.shape[3], batch.device)
    values = lines.to(torch.float32)
    torch.addcmul(shift, values, scale, out=values)
    return values.view(len(batch), *batch.shape[2:], 3).permute(0, 3, 1, 2)


@lru_cache(maxsize=64)
def _scale_shift(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """For a line of pixels, what each is multiplied by and what is added; kept, as a copy to a GPU waits for it."""
    means, stds = (torch.tensor(values, dtype=torch.float64).repeat(width) for values in (mean, std))
    scale, shift = 1 / (255 * stds), -means / stds
    return scale.to(device, torch.float32), shift.to(device, torch.float32)


def _resized(height: int, width: int, resize: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) after the resize; one length is the shorter side's, the other rounds down."""
    if not isinstance(resize, int):
        return resize
    if height <= width:
        return resize, int(resize * width / height)
    return int(resize * height / width), resize


def _rows(pixels: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same memory as an array of shape (height, width, 3)."""
    return pixels.permute(1, 2, 0).numpy()


def _nearest(pixels: torch.Tensor, size: tuple[int, int], part: tuple[int, int, int, int]) -> torch.Tensor:
    """The (top, left, height, width) `part` of the image resized to `size` by picking pixels, as Pillow picks them."""
    top, left, height, width = part
    rows = (np.arange(top, top + height) + 0.5) * (pixels.shape[1] / size[0])
    columns = (np.arange(left, left + width) + 0.5) * (pixels.shape[2] / size[1])
    picked = _rows(pixels)[rows.astype(np.int64)[:, None], columns.astype(np.int64)]
    return torch.from_numpy(picked).permute(2, 0, 1)


def _resize(pixels: torch.Tensor, size: tuple[int, int], preprocess: Preprocess) -> torch.Tensor:
    """The whole image. With antialias, torch's uint8 kernels agree with Pillow's to 2 of 255, with no float copy."""
    # pixels[None] would not count as channels-last (its first stride is 3), and the kernel be half as fast.
    batch = pixels.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    if preprocess.antialias:
        return interpolate(batch, size, mode=preprocess.interpolation, align_corners=False, antialias=True)[0]
    # Without, they do not round (bilinear) or are off by up to 9 of 255 (bicubic): torch 2.14. Its float kernels start
    # OpenMP teams; few models ask for this, and a Spark task has one OpenMP thread per cpu.
    values = interpolate(batch.float(), size, mode=preprocess.interpolation, align_corners=False)
    return values.round_().clamp_(0, 255).to(torch.uint8)[0]


def _resize_part(
    pixels: torch.Tensor, size: tuple[int, int], part: tuple[int, int, int, int], interpolation: str
) -> torch.Tensor:
    """Only the (top, left, height, width) `part` of the image resized to `size`; for enlarging.

    A 4000x1 image resized to a shorter side of 256 would be 262 million pixels. Pillow's `box` may lie between
    source pixels, and its filter reads over the box's edge, so the result is that of the whole resize, cropped.
    """
    y0, y1, lines = _source(part[0], part[2], pixels.shape[1], size[0])
    x0, x1, columns = _source(part[1], part[3], pixels.shape[2], size[1])
    image = Image.fromarray(pixels[:, lines, columns].permute(1, 2, 0).numpy())
    image = image.resize((part[3], part[2]), _FILTERS[interpolation], box=(x0, y0, x1, y1))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _source(start: int, length: int, source: int, resized: int) -> tuple[float, float, slice]:
    """Where `length` resized pixels from `start` lie along one axis: begin and end within a slice of the source."""
    scale = source / resized
    begin, end = start * scale, (start + length) * scale
    # What the filters read around, 2 pixels at most and more when shrinking. Cutting it out first keeps the numbers
    # small: Pillow holds a box in 32-bit floats.
    margin = math.ceil(2 * max(scale, 1)) + 1
    first = max(math.floor(begin) - margin, 0)
    kept = slice(first, min(math.ceil(end) + margin, source))
    return begin - first, min(end - first, kept.stop - first), kept
