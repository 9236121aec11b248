"""Pictures of one call, each of its own size -> the boxes that a network finds in each."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuml.errors import RowError
from gpuml.models.detection import check_detections
from gpuml.models.export import telling_lines
from gpuml.spec import Spec
from gpuml.worker.cache import Network
from gpuml.worker.passes import Passes
from gpuml.worker.runner import alone, read
from gpuml.worker.timing import Part, now


@dataclass(frozen=True)
class Boxes:
    """What was found in one picture, by falling score.

    Parameters
    ----------
    corners : float32 (n, 4): x1, y1, x2, y2 in pixels of the upright picture.
    labels : int64 (n,).
    scores : float32 (n,).
    seconds : that the picture took in each of `timing.STAGES`; NaN for its resizing, which the network does.
    """

    corners: np.ndarray[Any, np.dtype[np.float32]]
    labels: np.ndarray[Any, np.dtype[np.int64]]
    scores: np.ndarray[Any, np.dtype[np.float32]]
    seconds: tuple[float, float, float, float]


#: What one picture becomes before its seconds are known: corners, labels and scores; or the reason why not.
_Found = tuple[Any, Any, Any] | str


class Detector(Passes):
    """A model file of a detector on a device, run over the rows of one call.

    Parameters
    ----------
    network : from `gpuml.worker.cache`.
    spec : batch size, how rows are decoded, and the least score.
    threads : that decode one slice ahead; 0 = none, rows are decoded when it is their turn.
    """

    def __init__(self, network: Network, spec: Spec, threads: int) -> None:
        super().__init__(network, spec)
        self.threads = threads
        self._loading: dict[int, threading.Lock] = {}

    def run(self, rows: Sequence[Any]) -> list[Boxes | str]:
        """Per row its boxes, or ``"kind: message"``. At most two slices of pictures are alive.

        Parameters
        ----------
        rows : per row, what `gpuml.worker.runner.read` takes.

        Raises
        ------
        DeviceMemoryError
            One row alone does not fit into the device's memory.
        """
        made: list[Boxes | str] = []
        with torch.cuda.device(self.network.device) if self._on_cuda else contextlib.nullcontext():
            for slice_ in self._decoded(rows):
                pictures = [decoded for decoded, _ in slice_ if isinstance(decoded, Tensor)]
                found = iter(self._found(pictures))
                for decoded, seconds in slice_:
                    if isinstance(decoded, str):
                        made.append(decoded)
                        continue
                    what, (copy, compute) = next(found)
                    made.append(what if isinstance(what, str) else Boxes(*what, (seconds, np.nan, copy, compute)))
        return made

    def _decoded(self, rows: Sequence[Any]) -> Iterator[list[tuple[Tensor | str, float]]]:
        """Slices of what `_read` gives; threads are one slice ahead."""
        size = self.spec.batch_size
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="gpuml-decode") if self.threads else None
        # The pool's map begins at once, Python's own when it is asked for results.
        each: Any = pool.map if pool else map
        try:
            ahead = each(self._read, rows[:size])
            for start in range(0, len(rows), size):
                slice_ = list(ahead)
                ahead = each(self._read, rows[start + size : start + 2 * size])
                yield slice_
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _read(self, row: Any) -> tuple[Tensor | str, float]:
        """Decode one row: uint8 (3, height, width), or the reason why not; and the seconds that it took."""
        begin = time.perf_counter()
        try:
            with alone(row, self._loading):
                decoded: Tensor | str = read(row, self.spec)[0]
        except RowError as error:
            decoded = str(error)
        return decoded, time.perf_counter() - begin

    def _found(self, pictures: list[Tensor]) -> list[tuple[_Found, tuple[float, float]]]:
        """Per picture what was found, and its seconds of the copy and of the computation.

        Only pictures of one size share a forward pass: torchvision's networks pad a batch to its largest picture, and
        the padding changes what is found in the others.
        """
        laid: dict[int, tuple[_Found, tuple[float, float]]] = {}
        alike: dict[torch.Size, list[int]] = {}
        for place, picture in enumerate(pictures):
            alike.setdefault(picture.shape, []).append(place)
        for places in alike.values():
            same = [pictures[place] for place in places]
            passes = self._in_parts(len(same), sys.maxsize, partial(self._part, same))
            found = [(what, part.shares()) for part, given in passes for what in given]
            laid.update(zip(places, found, strict=True))
        return [laid[place] for place in range(len(pictures))]

    def _part(self, pictures: list[Tensor], part: slice) -> tuple[Part, list[_Found]]:
        return self._pass(pictures[part])

    def _pass(self, pictures: list[Tensor]) -> tuple[Part, list[_Found]]:
        """One forward pass; where it fails, one for each picture, to see which of them the network cannot take."""
        begin = time.perf_counter()
        try:
            return self._forward(pictures)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the device's trouble; the pictures are not at fault
        except (RuntimeError, torch.jit.Error) as error:
            reason = telling_lines(error)
            if len(pictures) == 1:
                # Any other picture at all: what fails on that one too is the network's fault, and fails the task.
                self._forward([torch.full((3, 64, 64), 128, dtype=torch.uint8)])
        if len(pictures) > 1:
            given = [found for picture in pictures for found in self._pass([picture])[1]]
        else:
            height, width = pictures[0].shape[1:]
            given = [str(RowError("bad_value", f"the model fails on this image of {width}x{height}: {reason}"))]
        end = time.perf_counter()
        return Part(len(pictures), (begin, begin), (begin, end)), given

    def _forward(self, pictures: list[Tensor]) -> tuple[Part, list[_Found]]:
        """uint8 (3, height, width) each on the host -> what the network finds in each, on the host."""
        device = self.network.device
        stream = torch.cuda.current_stream(device) if self._on_cuda else None
        with torch.inference_mode():
            copy = now(stream)
            copied = [picture.to(device) for picture in pictures]
            begin = now(stream)
            # As torchvision's to_tensor does it: planes of floats, 0..1.
            inputs = [picture.to(torch.float32).contiguous().div_(255) for picture in copied]
            given = self._call(inputs)
            check_detections(given, len(pictures), "the model")
            host = [[found[key].cpu() for key in ("boxes", "labels", "scores")] for found in given]
            end = now(stream)
        if stream is not None:
            stream.synchronize()
        part = Part(len(pictures), (copy, begin), (begin, end))
        return part, [_kept(found, self.spec.score_threshold) for found in host]


def _kept(found: Sequence[Tensor], threshold: float) -> _Found:
    """Boxes, labels and scores of at least a score, by falling score; or the reason why these are none."""
    boxes, labels, scores = found
    corners, levels = boxes.float().numpy(), scores.float().numpy()
    if np.isnan(corners).any() or np.isnan(levels).any():
        return str(RowError("bad_value", "the model gave NaN for this image"))
    order = np.argsort(-levels, kind="stable")
    order = order[levels[order] >= threshold]
    return corners[order], labels.numpy()[order], levels[order]
