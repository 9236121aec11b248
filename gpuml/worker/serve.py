"""The rows of one call and the task that they belong to -> output columns: bind, load, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpuml.models import python_source
from gpuml.models.cards import DetectionCard
from gpuml.spec import Spec
from gpuml.worker import boxes, cache, device, outputs
from gpuml.worker.detector import Detector
from gpuml.worker.runner import Runner


def serve(rows: Sequence[Any], spec: Spec, task: device.Task, find: Callable[[], Path]) -> dict[str, Any]:
    """Run the rows of one Arrow batch (or of one `predict`) through the spec's model file.

    Parameters
    ----------
    rows : what `gpuml.worker.runner.read` takes, per row.
    spec : what the stage asks.
    task : what Spark gave the task; the device is decided here, at every call: a reused worker may have another.
    find : path of the model file on this node, called only when this process does not hold the network yet.

    Returns
    -------
    The columns that ``spec.outputs`` names, each with one value per row, in order.
    """
    place, decision = device.bind(spec.device, task)
    if spec.preprocess is None:
        network = cache.network(spec.model, place, spec.dtype, find)
    else:
        made_by = (spec.model, spec.labels, spec.preprocess)
        network = cache.network(made_by, place, spec.dtype, find, partial(python_source.load, *made_by))
    threads = decode_threads(spec, task, place)
    if isinstance(network.card, DetectionCard):
        found = Detector(network, spec, threads).run(rows)
        return boxes.columns(found, network.card, spec, str(decision), task.waited)
    scores = Runner(network, spec, threads).run(rows)
    return outputs.columns(scores, network.card, spec, str(decision), task.waited)


def decode_threads(spec: Spec, task: device.Task, place: torch.device) -> int:
    """How many threads decode one slice ahead.

    None beside a network that computes on the task's only core: two threads that take turns there are a tenth slower.
    A ``python:`` network may compute elsewhere, so it is not waited for.

    ``readPaths`` changes nothing. With files 20 ms away, on one core, a row took 22.4 ms without a thread, 22.6 with
    one, 1.9 with 16; but so many hold as many decoded pictures, and whether these fit only the user knows.
    """
    if not spec.decode_threads and task.cpus == 1 and place.type == "cpu" and spec.preprocess is None:
        return 0
    return spec.decode_threads or task.cpus
