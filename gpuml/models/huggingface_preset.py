"""An image processor of Hugging Face's transformers -> a Preprocess, or why there is none."""

from __future__ import annotations

import re
from typing import Any

from gpuml.errors import ModelError
from gpuml.spec import Preprocess

#: Image processors whose code was read (transformers 5.24). All resize, centre-crop, rescale and normalise, in this
#: order, on uint8 until the rescale; the last four by rules of their own, in `_geometry` and `_normalisation`.
PROCESSORS = (
    *("Beit", "Bit", "CLIP", "DeiT", "MobileNetV1", "MobileNetV2", "Pvt", "Siglip", "ViT"),
    *("ConvNext", "EfficientNet", "PoolFormer", "Segformer"),
)

#: Pillow's numbers for the interpolations that a Preprocess has.
_RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}


def preset(processor: Any) -> Preprocess:
    """An image processor of transformers as a Preprocess.

    The pixels are the processor's but for rounding, and for one pixel of the crop's place: where the length to cut off
    is odd, processors round its half down, a Preprocess rounds it to even, as torchvision does.

    Raises
    ------
    ModelError
        The processor is none of `PROCESSORS`, or does what no Preprocess does.
    """
    name = type(processor).__name__
    kind = re.sub("ImageProcessor(Pil|Fast)?$", "", name)
    if kind not in PROCESSORS:
        raise ModelError(f"its image processor {name} is none of those that gpuml reads: {', '.join(PROCESSORS)}")
    if getattr(processor, "do_pad", None):
        raise ModelError(f"its {name} pads (do_pad=True), which no Preprocess does")
    resize, crop = _geometry(kind, processor)
    mean, std = _normalisation(kind, processor)
    resample = 2 if processor.resample is None else int(processor.resample)  # None: bilinear, as the backends read it
    if resample not in _RESAMPLE:
        raise ModelError(f"its {name} resizes with Pillow's filter {resample}; a Preprocess has {_RESAMPLE}")
    try:
        return Preprocess(resize, crop, mean, std, _RESAMPLE[resample])
    except ValueError as error:  # no crop of many sizes; a crop larger than the resize, which is padded
        raise ModelError(f"its {name} maps onto no Preprocess ({error})") from error


def _geometry(kind: str, processor: Any) -> tuple[int | tuple[int, int], tuple[int, int] | None]:
    """(resize, crop) of a Preprocess."""
    size = dict(processor.size or {})
    # Segformer's processor has the setting, and does not read it.
    crop = dict(processor.crop_size or {}) if processor.do_center_crop and kind != "Segformer" else None
    reason = (
        f"its image processor has do_resize={processor.do_resize}, size={size}, crop_size={crop}, which is no rule "
    )
    reason += "of a Preprocess"
    if not processor.do_resize or set(size) not in ({"height", "width"}, {"shortest_edge"}):
        raise ModelError(reason)
    if crop is not None and set(crop) != {"height", "width"}:
        raise ModelError(reason)
    edge = size.get("shortest_edge")
    box = None if crop is None else (crop["height"], crop["width"])
    if kind == "ConvNext":
        if edge is None or box:
            raise ModelError(reason)
        return (int(edge / processor.crop_pct), (edge, edge)) if edge < 384 else ((edge, edge), None)
    if kind == "PoolFormer" and processor.crop_pct is not None:
        if edge is None and size["height"] != size["width"]:
            raise ModelError(reason)
        edge = int((edge or size["height"]) / processor.crop_pct)
    return (edge or (size["height"], size["width"])), box


def _normalisation(kind: str, processor: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(mean, std) for pixels scaled to 0..1 of what is computed on 0..255: (x * factor - offset - mean) / std."""
    factor = float(processor.rescale_factor) if processor.do_rescale else 1.0
    means = _three(processor.image_mean if processor.do_normalize else 0.0)
    stds = _three(processor.image_std if processor.do_normalize else 1.0)
    offset = 0.0
    if kind == "EfficientNet":
        offset = 1.0 if processor.do_rescale and processor.rescale_offset else 0.0
        if processor.include_top:  # it divides by the standard deviation once more
            stds = tuple(std * again for std, again in zip(stds, _three(processor.image_std), strict=True))
    if not factor:
        raise ModelError("its image processor has rescale_factor=0")
    scale = 255 * factor
    return tuple((mean + offset) / scale for mean in means), tuple(std / scale for std in stds)


def _three(value: Any) -> tuple[Any, ...]:
    """One number per channel, of a number for all or a list."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3
    if len(numbers) != 3 or not all(isinstance(number, (int, float)) for number in numbers):
        raise ModelError(f"its image processor normalises with {value!r}, not one number per channel")
    return numbers
