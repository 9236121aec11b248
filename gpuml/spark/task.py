"""The Spark task that this worker serves -> what gpuml.worker is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import TaskContext

if TYPE_CHECKING:
    from gpuml.worker.device import Task


def this_task(waited: float | None = None) -> Task:
    """The task; `waited` as `gpuml.worker.device.Task` has it."""
    from gpuml.worker.device import Task

    context = TaskContext.get()
    assert context is not None, "a UDF runs in a task"
    resources = context.resources()
    addresses = tuple(resources["gpu"].addresses) if "gpu" in resources else ()
    return Task(addresses, context.cpus(), context.partitionId(), waited)
