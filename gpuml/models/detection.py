"""A network that finds objects, in memory -> a model file: TorchScript, from pictures of any sizes to their boxes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from gpuml.errors import ModelError
from gpuml.models.cards import DetectionCard, checked_labels
from gpuml.models.export import evaluation_copy, jit, plain_torch, telling_lines
from gpuml.models.file import write

#: (height, width) of the pictures that a network is tried on: it must take different ones at once. The first is
#: one that a scale in float32 makes too small (see `_Transform`).
_SIZES = ((100, 150), (160, 112))


def save_detector(net: nn.Module, path: str | os.PathLike[str], labels: Sequence[str] = ()) -> None:
    """Write a network that finds objects as a model file, for the ``model`` Param of an `ObjectDetector`.

    The network is scripted as a copy, on the CPU and in evaluation mode; `net` itself stays as it is. Of torchvision's
    networks for masks and keypoints the boxes are kept: what makes the rest is left out.

    Parameters
    ----------
    net : of torchvision's convention, as its own detection models are: takes a list of float32 pictures (3, height,
        width), 0..1, each of its own size; gives a list of dicts of ``boxes`` float (n, 4), x1, y1, x2, y2 in pixels of
        that picture, ``labels`` int64 (n,) and ``scores`` float (n,). ``torch.jit.script`` must take it.
    path : local file to write, usually ``*.pt2``.
    labels : one name per number in its ``labels``, from 0 on, which is the background in torchvision's; none: the
        number is the label.

    Raises
    ------
    ModelError
        The network cannot be scripted, gives something else, or gives other boxes once it is scripted.

    Examples
    --------
    >>> from torchvision.models.detection import ssdlite320_mobilenet_v3_large
    >>> net = ssdlite320_mobilenet_v3_large(weights_backbone=None, num_classes=3)
    >>> save_detector(net, "net.pt2", labels=["background", "cat", "dog"])
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise ModelError(f"save_detector: path={str(path)!r} is a folder; name a file in it: {path / 'net.pt2'}")
    if not isinstance(net, nn.Module):
        raise ModelError(f"save_detector: {type(net).__name__} is not a torch.nn.Module")
    card = DetectionCard(checked_labels(labels))
    with plain_torch():
        module = evaluation_copy(net)
        expected = _found(_Boxes(module), module)
        program = _scripted(_for_boxes(module))
        _check_same(_found(program, module), expected, card, type(net).__name__)
        write(program, path, card)


class _Boxes(nn.Module):
    """A network of torchvision's convention, giving its detections alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        made = self.net(images)
        if isinstance(made, tuple):  # a scripted network of torchvision's: losses, then detections
            return made[1]  # type: ignore[no-any-return]
        else:  # TorchScript compiles one of two branches, not what follows one
            return made  # type: ignore[no-any-return]


class _Transform(GeneralizedRCNNTransform):  # type: ignore[misc]  # torchvision has no types
    """torchvision's transform, whose size once scripted is that of its eager one.

    Where it is scripted, torchvision (0.29) computes the scale in float32, and of 600x400 pixels a network of 320 makes
    479x319 instead of 480x320: other boxes.
    """

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        fixed = self.fixed_size
        if fixed is not None:
            resized = interpolate(image[None], size=[fixed[1], fixed[0]], mode="bilinear", align_corners=False)
        else:
            height, width = image.shape[-2], image.shape[-1]
            scale = min(self.min_size[-1] / min(height, width), self.max_size / max(height, width))
            resized = interpolate(
                image[None], scale_factor=scale, mode="bilinear", recompute_scale_factor=True, align_corners=False
            )
        return resized[0], target


class _DefaultBoxes(DefaultBoxGenerator):  # type: ignore[misc]  # torchvision has no types
    """torchvision's default boxes of an SSD, made on the device of their widths and heights.

    Those are tensors of the file, which torch.jit.load takes to the GPU. torchvision (0.29) makes their centres on the
    CPU always, and would fail to join the two.
    """

    def _grid_default_boxes(self, grid_sizes: list[list[int]], image_size: list[int], dtype: torch.dtype) -> Tensor:
        made: list[Tensor] = []
        for k, size in enumerate(grid_sizes):
            pairs = self._wh_pairs[k].clamp(min=0, max=1) if self.clip else self._wh_pairs[k]
            if self.steps is not None:
                height, width = image_size[0] / self.steps[k], image_size[1] / self.steps[k]
            else:
                height, width = float(size[0]), float(size[1])
            y = ((torch.arange(0, size[0], device=pairs.device) + 0.5) / height).to(dtype=dtype)
            x = ((torch.arange(0, size[1], device=pairs.device) + 0.5) / width).to(dtype=dtype)
            centres = torch.stack([x.repeat(size[0]), y.repeat_interleave(size[1])], dim=1)
            every = centres.repeat_interleave(pairs.shape[0], dim=0)  # each centre with each pair
            made.append(torch.cat([every, pairs.repeat(size[0] * size[1], 1)], dim=1))
        return torch.cat(made, dim=0)


def _for_boxes(module: nn.Module) -> _Boxes:
    """A network for its boxes alone: without heads for masks and keypoints, and with nothing to warn of."""
    heads: Any = getattr(module, "roi_heads", None)
    if isinstance(heads, RoIHeads):
        heads.mask_roi_pool = heads.keypoint_roi_pool = None
    transform: Any = getattr(module, "transform", None)
    if type(transform) is GeneralizedRCNNTransform:
        transform.__class__ = _Transform
    for part in module.modules():
        if type(part) is DefaultBoxGenerator:
            part.__class__ = _DefaultBoxes
    if hasattr(module, "_has_warned"):
        module._has_warned = True  # type: ignore[assignment]  # a plain attribute: that losses are given as well
    return _Boxes(module).eval()


def _scripted(boxes: _Boxes) -> torch.jit.ScriptModule:
    """Frozen: only what an evaluation runs is left. Training's part has operators that no model file may have."""
    try:
        scripted = jit("script", boxes)
        # Operators stay as they are: with batch normalisations folded, boxes of nearly equal scores change places.
        frozen: torch.jit.ScriptModule = jit("freeze", scripted, optimize_numerics=False)
        return frozen
    except Exception as error:  # of nearly any type
        raise ModelError(
            f"{type(boxes.net).__name__} cannot become a file: torch.jit.script refuses it ({telling_lines(error)}). "
            f"It must be of torchvision's convention: forward(images: List[Tensor]) -> List[Dict[str, Tensor]], and "
            f"TorchScript (torchvision.models.detection has networks to start from)"
        ) from error


def _found(network: Callable[[list[Tensor]], Any], module: nn.Module) -> list[dict[str, Tensor]]:
    """What a network finds in two fixed pictures of different sizes; errors call it by the module's class."""
    name = type(module).__name__
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.rand((3, *size), generator=generator) for size in _SIZES]
    try:
        with torch.inference_mode():
            given = network(pictures)
    except Exception as error:
        raise ModelError(
            f"{name} fails on a list of two float32 pictures (3, height, width) of {' and '.join(map(str, _SIZES))} "
            f"pixels: {telling_lines(error)}. A network that gives numbers for whole images is for gpuml.save_model"
        ) from error
    check_detections(given, len(_SIZES), name)
    found: list[dict[str, Tensor]] = given
    return found


def _check_same(
    given: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], card: DetectionCard, name: str
) -> None:
    """The scripted network finds what the network finds, of labels that the card names.

    Raises
    ------
    ModelError
        It does not.
    """
    if not all(map(_close, given, expected)):
        raise ModelError(f"{name}: the scripted network does not give the boxes that forward() gives; is it random?")
    highest = max((int(found["labels"].max()) for found in expected if len(found["labels"])), default=0)
    if card.labels and highest >= len(card.labels):
        raise ModelError(
            f"{name} gives the label {highest}, and there are {len(card.labels)} names; give one per label from 0 on. "
            f"torchvision's networks count the background as 0: labels=['background', ...]"
        )


def check_detections(given: Any, count: int, name: str) -> None:
    """Refuse what is no list of `count` dicts of boxes, labels and scores.

    Raises
    ------
    ModelError
        Saying what was given.
    """
    if not isinstance(given, list) or len(given) != count or not all(isinstance(found, dict) for found in given):
        what = f"a list of {len(given)}" if isinstance(given, list) else f"a {type(given).__name__}"
        raise ModelError(f"{name} gives {what} for a list of {count} picture(s); it must give as many dicts")
    for found in given:
        boxes, labels, scores = (found.get(key) for key in ("boxes", "labels", "scores"))
        told = ", ".join(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in found.items())
        if (
            boxes is None or labels is None or scores is None
            or tuple(boxes.shape) != (len(scores), 4) or labels.shape != scores.shape or scores.ndim != 1
            or not (boxes.is_floating_point() and scores.is_floating_point()) or labels.dtype != torch.int64
        ):  # fmt: skip
            raise ModelError(
                f"{name} gives {told or 'nothing'} for a picture; it must give boxes (n, 4) and scores (n,), both "
                f"float, and labels (n,), int64"
            )


def _close(given: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """The same boxes in the same order, to a hundredth of a pixel or a thousandth of their place."""
    if given["boxes"].shape != expected["boxes"].shape or not torch.equal(given["labels"], expected["labels"]):
        return False
    return torch.allclose(given["boxes"], expected["boxes"], rtol=1e-3, atol=1e-2, equal_nan=True) and torch.allclose(
        given["scores"], expected["scores"], rtol=1e-3, atol=1e-4, equal_nan=True
    )
