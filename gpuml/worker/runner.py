"""Images of one call -> arrays of model outputs; the next slice is decoded while the device works on this one."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gpuml.errors import ModelError, RowError
from gpuml.spec import Preprocess, Spec
from gpuml.worker.cache import Network
from gpuml.worker.decode import decode_pil, decode_scaled, decode_struct
from gpuml.worker.files import read_file
from gpuml.worker.passes import Passes
from gpuml.worker.preprocess import normalise, resize_crop
from gpuml.worker.timing import Moment, Part, now, wait

#: Pixels in a forward pass on the CPU, per torch thread: 8 rows of 224x224. glibc maps every block above 32 MiB anew
#: and gives it back at once, so larger passes lose their time in page faults. How much faster than passes of 64 rows,
#: with one thread and with two (torch 2.14): mobilenet_v3_small 1.7 and 1.9 times, efficientnet_b0 1.6 and 1.4,
#: resnet18 1.2 and 1.1. With fewer rows per thread, threads wait for one another more often.
_CPU_PIXELS = 8 * 224 * 224


@dataclass(frozen=True)
class Scores:
    """Outputs of the rows that could be read, and why the others could not.

    Parameters
    ----------
    outputs : float32 (len(good), width), the model's output before any activation.
    good : indices of those rows, ascending.
    reasons : per row, None or ``"kind: message"``.
    seconds : float64 (len(good), 4), what each of those rows took in each of `timing.STAGES`.
    """

    outputs: np.ndarray[Any, np.dtype[np.float32]]
    good: list[int]
    reasons: list[str | None]
    seconds: np.ndarray[Any, np.dtype[np.float64]]


class Runner(Passes):
    """A model file on a device, run over the rows of one call.

    Parameters
    ----------
    network : from `gpuml.worker.cache`.
    spec : batch size and how rows are decoded.
    threads : that decode one slice ahead; 0 = none, rows are decoded when it is their turn.
    """

    def __init__(self, network: Network, spec: Spec, threads: int) -> None:
        super().__init__(network, spec)
        self.threads = threads
        self._least = least_pixels(network.card.preprocess, spec)
        self._loading: dict[int, threading.Lock] = {}
        #: When the last copy to the GPU has left its staging memory.
        self._copied: Moment = 0.0

    def run(self, rows: Sequence[Any]) -> Scores:
        """Each row exactly once, computed once unless memory ran out. At most two slices of pixels are alive.

        Parameters
        ----------
        rows : per row, what `read` takes.

        Raises
        ------
        DeviceMemoryError
            One row alone does not fit into the device's memory.
        """
        reasons: list[str | None] = [None] * len(rows)
        good: list[int] = []
        prepared: list[tuple[float, float]] = []
        parts: list[Part] = []
        shape = (len(rows), self.network.card.width)
        # Names the device for pinned memory, streams and events: none of them may touch another card.
        with torch.cuda.device(self.network.device) if self._on_cuda else contextlib.nullcontext():
            # One allocation for the whole call. Small ones that outlive a slice, in between its large ones, keep glibc
            # from using the large ones' memory again: 0.5 MB lost per row was seen, with 224x224 inputs.
            outputs = torch.empty(shape, dtype=torch.float32, pin_memory=self._on_cuda)
            for pixels, indices in self._decoded(rows, reasons, prepared):
                launched = self._launch(pixels, outputs[len(good) : len(good) + len(indices)])
                good += indices
                if parts:
                    wait(parts[-1].compute[1])
                parts += launched
            if parts:
                wait(parts[-1].compute[1])
            shares = np.array([part.shares() for part in parts]).reshape(-1, 2)
            computed = shares.repeat([part.rows for part in parts], axis=0)
            seconds = np.hstack([np.array(prepared).reshape(-1, 2), computed])
            # Pinned memory is not for keeping.
            return Scores(outputs[: len(good)].clone().numpy(), good, reasons, seconds)

    def _decoded(
        self, rows: Sequence[Any], reasons: list[str | None], prepared: list[tuple[float, float]]
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Slices of pixels, uint8 (n, 3, h, w), and the indices of their rows; threads are one slice ahead.

        Of every row it notes the reason why there are no pixels, or else the seconds of its decoding and resizing.
        """
        # Without threads, slices are as small as what is computed at once: pixels are in the processor's cache then.
        size = self.spec.batch_size if self.threads else min(self.spec.batch_size, self._most_rows())
        starts = range(0, len(rows), size)
        buffers = 2 if self.threads or self._on_cuda else 1
        staging = [self._staging(min(size, len(rows))) for _ in starts[:buffers]]
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="gpuml-decode") if self.threads else None
        # The pool's map begins at once, Python's own when it is asked for results.
        each: Any = pool.map if pool else map
        try:
            ahead = each(self._prepare, rows[:size], staging[0]) if rows else ()
            for number, start in enumerate(starts):
                pixels = staging[number % len(staging)]
                indices: list[int] = []
                for slot, (reason, seconds) in enumerate(ahead):
                    reasons[start + slot] = reason
                    if reason is None:
                        if len(indices) < slot:  # close the gap that a failed row left
                            pixels[len(indices)].copy_(pixels[slot])
                        indices.append(start + slot)
                        prepared.append(seconds)
                if start + size < len(rows):
                    wait(self._copied)  # of the slice before this one
                    ahead = each(
                        self._prepare, rows[start + size : start + 2 * size], staging[(number + 1) % len(staging)]
                    )
                if indices:
                    yield pixels[: len(indices)], indices
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _staging(self, rows: int) -> Tensor:
        """Memory for the pixels of a slice: uint8 (rows, 3, h, w) in channels-last order, pinned for a GPU's copies."""
        height, width = self.network.card.preprocess.size
        return torch.empty((rows, height, width, 3), dtype=torch.uint8, pin_memory=self._on_cuda).permute(0, 3, 1, 2)

    def _prepare(self, row: Any, slot: Tensor) -> tuple[str | None, tuple[float, float]]:
        """Decode one row into its slot: the reason why not, and the seconds of its decoding and resizing."""
        begin = decoded = time.perf_counter()
        reason = None
        try:
            with alone(row, self._loading):
                pixels, full = read(row, self.spec, self._least)
            decoded = time.perf_counter()
            resize_crop(pixels, self.network.card.preprocess, out=slot, full=full)
        except RowError as error:
            reason = str(error)
        return reason, (decoded - begin, time.perf_counter() - decoded)

    def _most_rows(self) -> int:
        """In a forward pass."""
        height, width = self.network.card.preprocess.size
        return sys.maxsize if self._on_cuda else max(1, _CPU_PIXELS * torch.get_num_threads() // (height * width))

    def _launch(self, pixels: Tensor, outputs: Tensor) -> list[Part]:
        """Start the forward passes of a slice, in parts that fit into memory; with the last, `outputs` are there."""
        return self._in_parts(len(pixels), self._most_rows(), lambda part: self._forward(pixels[part], outputs[part]))

    def _forward(self, pixels: Tensor, outputs: Tensor) -> Part:
        """uint8 (n, 3, h, w) on the host -> float32 (n, width) on the host; on a GPU only started."""
        network = self.network
        stream = torch.cuda.current_stream(network.device) if self._on_cuda else None
        with torch.inference_mode():
            copy = copied = begin = now(network.copies)
            if stream is not None:
                with torch.cuda.stream(network.copies):
                    pixels = pixels.to(network.device, non_blocking=True)
                pixels.record_stream(stream)  # allocated on the copying stream, read by the computing one
                self._copied = copied = now(network.copies)
                stream.wait_event(copied)  # type: ignore[arg-type]  # an event, as the stream is one
                begin = now(stream)
            inputs = normalise(pixels, network.card.preprocess)
            if network.card.memory_format == "contiguous":
                inputs = inputs.contiguous()
            dtype = getattr(torch, network.dtype)
            with torch.autocast(network.device.type, dtype=dtype, enabled=dtype != torch.float32):
                output = self._call(inputs)
            if not isinstance(output, Tensor) or tuple(output.shape) != (len(pixels), network.card.width):
                shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise ModelError(
                    f"the model gave {shape} for {len(pixels)} rows; its card promises "
                    f"({len(pixels)}, {network.card.width}): write the model file again with gpuml.save_model"
                )
            # A copy on the CPU too: a network may give a view of something large, or a buffer that it writes again.
            outputs.copy_(output.float(), non_blocking=self._on_cuda)
        return Part(len(pixels), (copy, copied), (begin, now(stream)))


def least_pixels(preprocess: Preprocess, spec: Spec) -> tuple[float, float] | None:
    """(height, width) that a JPEG keeps when it is decoded smaller; None: it never is."""
    if not spec.scaled_decode:
        return None
    resize = preprocess.resize
    height, width = (resize, resize) if isinstance(resize, int) else resize  # one length: both sides reach it
    return spec.scaled_decode * height, spec.scaled_decode * width


def alone(row: Any, loading: dict[int, threading.Lock]) -> contextlib.AbstractContextManager[Any]:
    """Within it no other thread reads the row.

    Pillow loads an opened image in place: two threads must not, where one image stands in two rows.
    """
    return loading.setdefault(id(row), threading.Lock()) if isinstance(row, Image.Image) else contextlib.nullcontext()


def read(row: Any, spec: Spec, least: tuple[float, float] | None = None) -> tuple[Tensor, tuple[int, int] | None]:
    """One input -> uint8 (3, H, W), and (height, width) of the picture where that may be more.

    Parameters
    ----------
    row : encoded bytes (or None), the fields (data, height, width, nChannels, mode) of an image struct as a tuple, a
        PIL image, or what `read_file` takes: a path or a URL.
    least : from `least_pixels`. A PIL image is the caller's: a scale would change its size, so it has none.

    Raises
    ------
    RowError
        The row cannot be read.
    ParamError
        A URL for which this Python lacks a package.
    """
    if isinstance(row, tuple):
        return decode_struct(*row, max_pixels=spec.max_pixels, alpha=spec.alpha), None
    if isinstance(row, Image.Image):
        return decode_pil(row, max_pixels=spec.max_pixels, alpha=spec.alpha), None
    if isinstance(row, (str, Path)):
        row = read_file(row)
    return decode_scaled(row, max_pixels=spec.max_pixels, alpha=spec.alpha, least=least)
