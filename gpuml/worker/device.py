"""The device Param, the task's GPU address and CUDA_VISIBLE_DEVICES -> the device that serves this call.

`resolve` decides and is pure. `uuids` and `place` are all that touches CUDA. `bind` puts them together, and logs.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpuml.errors import DeviceError

_log = logging.getLogger("gpuml")
_said: set[str] = set()


@dataclass(frozen=True)
class Task:
    """What Spark gave the task: its GPU addresses (none in local mode), cpus and partition.

    `waited` is for how many seconds the worker had nothing to do since it answered the task's last rows, None for its
    first ones.
    """

    addresses: tuple[str, ...] = ()
    cpus: int = 1
    partition_id: int = 0
    waited: float | None = None


@dataclass(frozen=True)
class Decision:
    """The outcome of `resolve`: a CUDA index or None for the CPU, the address it came from, and what to tell.

    `note` is worth a line in the log; `warning` is something that the user would not expect.
    """

    index: int | None
    address: str | None = None
    note: str = ""
    warning: str = ""

    def __str__(self) -> str:
        name = "cpu" if self.index is None else f"cuda:{self.index}"
        return name if self.address is None else f"{name} (address {self.address})"


def resolve(
    policy: str,
    addresses: Sequence[str],
    visible: str | None,
    uuids: Sequence[str],
    partition_id: int,
) -> Decision:
    """Which device a task uses. Pure.

    Parameters
    ----------
    policy : ``"auto"``, ``"cuda"`` or ``"cpu"``.
    addresses : what Spark gave the task; empty where Spark schedules no GPUs.
    visible : CUDA_VISIBLE_DEVICES of this process, None when unset.
    uuids : UUIDs of the devices that torch sees, in torch's order; their number is the device count.
    partition_id : spreads tasks over the GPUs where Spark gave no address.

    Raises
    ------
    DeviceError
        ``"cuda"`` without a usable GPU, or an address that names none of the visible devices.
    """
    address = addresses[0] if addresses else None
    note = f"the task has several GPU addresses {list(addresses)}; the first is used" if len(addresses) > 1 else ""
    entries = _entries(visible)
    if policy == "cpu":
        return Decision(None, address)
    if not uuids or entries == []:
        if policy == "cuda":
            raise DeviceError(
                f"device='cuda', but torch sees no GPU (CUDA_VISIBLE_DEVICES={visible!r}, task address {address!r}, "
                f"torch {torch.__version__}). Install a CUDA build of torch and a driver on the node, or set "
                f"device='auto' or device='cpu'."
            )
        warning = (
            f"the task was given GPU address {address!r}, but torch sees no GPU "
            f"(CUDA_VISIBLE_DEVICES={visible!r}, torch {torch.__version__}): running on the CPU"
            if address is not None
            else ""
        )
        return Decision(None, address, note or "no GPU: running on the CPU", warning)
    if address is None:
        index = partition_id % len(uuids)
        return Decision(index, None, f"Spark gave no GPU address: running on cuda:{index}, by the partition id")
    index, relative = _index_of(address.strip(), entries, visible, uuids)
    if relative:
        how = f"GPU address {address!r} is no entry of CUDA_VISIBLE_DEVICES={visible!r}: taken as a relative index"
        note = f"{note}; {how}" if note else how
    return Decision(index, address, note)


def _entries(visible: str | None) -> list[str] | None:
    """Entries of CUDA_VISIBLE_DEVICES; None when unset. CUDA reads no further than an entry "-1" (nor do we)."""
    if visible is None:
        return None
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return entries[: entries.index("-1")] if "-1" in entries else entries


def _index_of(address: str, entries: list[str] | None, visible: str | None, uuids: Sequence[str]) -> tuple[int, bool]:
    """(torch index, whether the address was taken as relative) of one address."""
    count = len(uuids)
    numeric = re.fullmatch(r"\d+", address) is not None
    if entries is not None and address in entries[:count]:
        return entries.index(address), False
    if not numeric:
        matches = [index for index, uuid in enumerate(uuids) if _bare(uuid) == _bare(address)]
        if len(matches) == 1:
            return matches[0], False
    elif entries is None:
        if int(address) < count:
            return int(address), False
    elif len(entries) == 1 and count == 1:
        return 0, False
    elif int(address) < count:
        return int(address), True
    raise DeviceError(
        f"GPU address {address!r} names none of this worker's devices: CUDA_VISIBLE_DEVICES={visible!r}, "
        f"torch sees {count} device(s) {list(uuids)}. Let the discovery script and CUDA_VISIBLE_DEVICES name the same "
        f"GPUs (unset the variable for the workers, or list its entries as the addresses)."
    )


def _bare(uuid: str) -> str:
    """A UUID as torch (bare) and nvidia-smi ("GPU-...", "MIG-...") write it, made comparable."""
    return re.sub(r"^(gpu|mig)-", "", uuid.lower())


def uuids() -> tuple[str, ...]:
    """UUIDs of the devices that torch sees, in torch's order. Makes no CUDA context."""
    if not torch.cuda.is_available():
        return ()
    try:
        return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
    except RuntimeError as error:
        if torch.cuda._is_in_bad_fork():
            raise DeviceError(
                "CUDA was already initialised in the process that Spark forked this worker from, so it cannot be used "
                "here. Make no CUDA call in a custom spark.python.daemon.module or in sitecustomize, nor in a driver "
                "that forks."
            ) from error
        raise


def place(index: int) -> torch.device:
    """The torch device of a resolved index."""
    return torch.device("cuda", index)


def bind(policy: str, task: Task) -> tuple[torch.device, Decision]:
    """The device of this call; what is worth telling is logged once per process.

    Never sets CUDA_VISIBLE_DEVICES, which a running process ignores.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = () if policy == "cpu" else uuids()
    decision = resolve(policy, task.addresses, visible, seen, task.partition_id)
    # One warning is enough, whatever address the next task has; each note is another fact.
    for text, say, key in ((decision.warning, _log.warning, "warning"), (decision.note, _log.info, decision.note)):
        if text and key not in _said:
            _said.add(key)
            say("gpuml: %s", text)
    return (torch.device("cpu") if decision.index is None else place(decision.index)), decision
