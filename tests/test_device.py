"""The device of a task: the table of decisions, what reads the machine, and what is said about it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PLAIN

from gpuml.errors import DeviceError, GpumlError
from gpuml.models.cards import Card
from gpuml.spec import Spec
from gpuml.worker import cache, device, serve
from gpuml.worker.device import Decision, Task, bind, resolve

# As torch writes UUIDs; nvidia-smi, and so Spark's discovery script, puts "GPU-" or "MIG-" in front.
A = "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
B = "2d4d8a24-d9b1-4be9-95b6-3d64f2a5a3f1"
C = "c6dc1234-d33d-4be9-95b6-000000000002"


def decide(visible, addresses, uuids=(A, B), policy="auto", partition_id=0):
    return resolve(policy, addresses, visible, uuids, partition_id)


@pytest.mark.parametrize("policy", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("visible", "address", "uuids", "index"),
    [
        # unset: the address is torch's index
        (None, "0", (A,), 0),
        (None, "1", (A, B), 1),
        (None, "10", tuple(map(str, range(11))), 10),
        # an entry: its place in the list
        ("1", "1", (A,), 0),
        ("2,3", "3", (A, B), 1),
        ("2,3", "2", (A, B), 0),
        ("3,2", "2", (A, B), 1),
        ("1,0", "1", (A, B), 0),
        (" 2 , 3 ", "3", (A, B), 1),
        ("2,3", " 3 ", (A, B), 1),
        # one entry: whatever number was given is this process's only device
        ("3", "3", (A,), 0),
        ("3", "0", (A,), 0),
        ("3", "7", (A,), 0),
        (f"GPU-{A}", "5", (A,), 0),
        # CUDA reads up to the first "-1"
        ("0,-1,1", "0", (A,), 0),
        ("0,-1,1", "1", (A,), 0),
        ("4,5,-1", "5", (A, B), 1),
        # UUIDs, as strings or against what torch says, in any case, with or without the prefix
        (None, f"GPU-{B}", (A, B), 1),
        (None, B, (A, B), 1),
        (None, f"gpu-{B.upper()}", (A, B), 1),
        (None, f"GPU-{B}", (f"GPU-{A}", f"GPU-{B}"), 1),
        ("2,3", f"GPU-{B}", (A, B), 1),
        (f"GPU-{B},GPU-{A}", f"GPU-{A}", (B, A), 1),
        ("GPU-2d4d,GPU-5d5b", f"GPU-{A}", (B, A), 1),
        (f"MIG-{C}", f"MIG-{C}", (C,), 0),
        (None, f"MIG-{C}", (C,), 0),
        ("0", f"MIG-{C}", (C,), 0),
        # drivers before 470 name a MIG device by its GPU and instance numbers: equal strings are equal
        (f"MIG-GPU-{A}/1/0,MIG-GPU-{A}/2/0", f"MIG-GPU-{A}/2/0", (A, B), 1),
    ],
)
def test_an_address_names_one_visible_device(policy, visible, address, uuids, index):
    assert decide(visible, [address], uuids, policy) == Decision(index, address)


@pytest.mark.parametrize(
    ("visible", "address", "index"),
    [("2,3", "0", 0), ("2,3", "1", 1), ("0,2", "1", 1), ("3,2", "0", 0), (f"GPU-{A},GPU-{B}", "1", 1)],
)
def test_a_relative_index_is_taken_and_noted(visible, address, index):
    decision = decide(visible, [address])
    assert (decision.index, decision.address, decision.warning) == (index, address, "")
    assert repr(visible) in decision.note
    assert repr(address) in decision.note
    assert "relative" in decision.note


@pytest.mark.parametrize("policy", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("visible", "address", "uuids"),
    [
        (None, "2", (A, B)),
        (None, "1", (A,)),
        ("2,3", "7", (A, B)),
        ("2,3,4", "5", (A, B, C)),
        ("4,9", "9", (A,)),  # CUDA stops at an entry that does not exist: 9 is not among torch's devices
        ("4,9", "1", (A,)),
        (None, f"GPU-{C}", (A, B)),
        ("2,3", f"GPU-{C}", (A, B)),
        (f"GPU-{A},GPU-{B}", f"GPU-{C}", (A, B)),
        (f"GPU-{A}", f"GPU-{C}", (A,)),  # one entry serves any number, not another card's name
        (None, f"GPU-{A}", (A, A)),  # ambiguous
        (None, "GPU-5d5b", (A, B)),  # an abbreviation is CUDA's, not an address
        (None, "GPU-", (A, B)),
        (None, "-1", (A, B)),
        ("2,3", "-1", (A, B)),
        (None, "1.0", (A, B)),
        (None, "cuda:1", (A, B)),
        (None, "", (A, B)),
        ("2,3", "first", (A, B)),
        ("3", "first", (A,)),
        (None, "1" * 30, (A, B)),
    ],
)
def test_an_address_that_names_no_device_is_an_error_with_both_sides_and_the_count(policy, visible, address, uuids):
    with pytest.raises(DeviceError) as caught:
        decide(visible, [address], uuids, policy)
    message = str(caught.value)
    assert f"address {address!r}" in message
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in message
    assert f"{len(uuids)} device" in message
    assert all(uuid in message for uuid in uuids)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [("", ()), ("-1", ()), ("-1,0", ()), (" ", ()), (",", ()), ("NoDevFiles", ()), ("7", ()), (None, ()), ("", (A, B))],
)
class TestNoGpu:
    def test_auto_runs_on_the_cpu(self, visible, uuids):
        decision = decide(visible, [], uuids)
        assert (decision.index, decision.address, decision.warning) == (None, None, "")
        assert "CPU" in decision.note

    def test_auto_warns_when_the_task_was_given_an_address(self, visible, uuids):
        decision = decide(visible, ["3"], uuids)
        assert (decision.index, decision.address, str(decision)) == (None, "3", "cpu (address 3)")
        for part in ("address '3'", f"CUDA_VISIBLE_DEVICES={visible!r}", torch.__version__, "CPU"):
            assert part in decision.warning

    @pytest.mark.parametrize("addresses", [[], ["3"]])
    def test_cuda_is_an_error_that_says_what_to_type(self, visible, uuids, addresses):
        with pytest.raises(DeviceError) as caught:
            decide(visible, addresses, uuids, "cuda")
        for part in (f"CUDA_VISIBLE_DEVICES={visible!r}", repr(addresses[0] if addresses else None), "device='cpu'"):
            assert part in str(caught.value)


@pytest.mark.parametrize("visible", [None, "", "-1", "2,3", "nonsense"])
@pytest.mark.parametrize("addresses", [(), ("1",), ("nonsense",), ("7", "8")])
@pytest.mark.parametrize("uuids", [(), (A, B)])
def test_cpu_is_always_the_cpu_and_nothing_is_said(visible, addresses, uuids):
    address = addresses[0] if addresses else None
    assert decide(visible, addresses, uuids, "cpu") == Decision(None, address)


@pytest.mark.parametrize("policy", ["auto", "cuda"])
@pytest.mark.parametrize("visible", [None, "2,3,4", f"GPU-{A},GPU-{B},GPU-{C}"])
def test_without_addresses_partitions_spread_over_the_gpus(policy, visible):
    decisions = [decide(visible, [], (A, B, C), policy, partition) for partition in range(7)]
    assert [decision.index for decision in decisions] == [0, 1, 2, 0, 1, 2, 0]
    assert {decision.address for decision in decisions} == {None}
    assert all(f"cuda:{decision.index}" in decision.note for decision in decisions)


def test_of_several_addresses_the_first_is_used_and_noted():
    decision = decide(None, ["1", "0"])
    assert (decision.index, decision.address) == (1, "1")
    assert "['1', '0']" in decision.note


def test_several_addresses_of_which_the_first_is_relative_note_both():
    decision = decide("2,3", ["1", "0"])
    assert (decision.index, decision.address) == (1, "1")
    assert "['1', '0']" in decision.note
    assert "relative" in decision.note


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Decision(1, "3"), "cuda:1 (address 3)"),
        (Decision(0), "cuda:0"),
        (Decision(None), "cpu"),
        (Decision(None, "3"), "cpu (address 3)"),
    ],
)
def test_a_decision_prints_as_the_device_column_has_it(decision, text):
    assert str(decision) == text


def test_a_device_error_is_a_runtime_error():
    with pytest.raises(RuntimeError) as caught:
        decide(None, ["9"])
    assert isinstance(caught.value, GpumlError)


# --- bind: what reads the machine ---------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine with devices of these UUIDs, which counts how often it is asked."""

    def build(*uuids):
        asked = []
        monkeypatch.setattr(device, "uuids", lambda: asked.append(1) or uuids)
        return asked

    return build


def test_bind_reads_the_environment_at_every_call_and_leaves_it_as_it_was(machine, monkeypatch):
    machine(A, B)
    for visible, address, index in (("2,3", "3", 1), ("3,2", "3", 0), (None, "1", 1)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        before = dict(os.environ)
        place, decision = bind("auto", Task((address,)))
        assert dict(os.environ) == before
        assert place == torch.device("cuda", index)
        assert decision == Decision(index, address)


def test_bind_leaves_the_environment_as_it_was_when_it_fails(machine, monkeypatch):
    machine(A, B)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    before = dict(os.environ)
    with pytest.raises(DeviceError):
        bind("auto", Task(("7",)))
    assert dict(os.environ) == before


def test_bind_asks_the_machine_once_and_for_cpu_never(machine, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = machine(A)
    assert bind("cpu", Task(("0",)))[0] == torch.device("cpu")
    assert asked == []
    for count, policy in enumerate(("auto", "cuda"), 1):
        assert bind(policy, Task())[0] == torch.device("cuda", 0)
        assert len(asked) == count


def test_bind_spreads_by_the_partition_of_the_task(machine, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine(A, B)
    assert [bind("auto", Task(partition_id=id))[0].index for id in range(3)] == [0, 1, 0]


def fake_cuda(monkeypatch, count, *, bad_fork=False):
    """torch.cuda on a machine with `count` devices; in a bad fork only the count, which torch keeps, is to be had."""

    def properties(index):
        if bad_fork:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        return SimpleNamespace(uuid=(A, B)[index])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: bad_fork)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_uuids_are_in_the_order_of_torch(monkeypatch):
    fake_cuda(monkeypatch, 2)
    assert device.uuids() == (A, B)


def test_uuids_are_none_without_a_usable_gpu(monkeypatch):
    fake_cuda(monkeypatch, 0)
    assert device.uuids() == ()


@pytest.mark.parametrize("policy", ["auto", "cuda"])
def test_a_fork_after_cuda_was_used_is_explained(monkeypatch, policy):
    fake_cuda(monkeypatch, 2, bad_fork=True)
    with pytest.raises(DeviceError) as caught:
        bind(policy, Task(("0",)))
    for part in ("forked", "already initialised", "spark.python.daemon.module"):
        assert part in str(caught.value)


def test_a_fork_on_a_machine_without_gpus_runs_on_the_cpu(monkeypatch):
    fake_cuda(monkeypatch, 0, bad_fork=True)
    assert bind("auto", Task())[0] == torch.device("cpu")


def test_another_cuda_failure_keeps_its_own_words(monkeypatch):
    fake_cuda(monkeypatch, 2)

    def fail(index):
        raise RuntimeError("uncorrectable ECC error")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
        device.uuids()


# --- serve: what a worker says ------------------------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch):
    """A worker process that has said nothing yet; its networks give zeros, on the CPU whatever the device is called."""

    def network(sha256, place, dtype, find):
        card = Card(PLAIN, 2)
        return cache.Network(lambda x: torch.zeros(len(x), 2), card, torch.device("cpu"), dtype)

    monkeypatch.setattr(serve.cache, "network", network)
    monkeypatch.setattr(device, "_said", set())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def call(task, policy="auto"):
        spec = Spec("0" * 64, device=policy, outputs=("device", "error"))
        return serve.serve([None, None], spec, task, lambda: Path("unused"))

    return call


def said(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_the_fall_to_the_cpu_is_warned_of_once_whatever_addresses_follow(worker, machine, caplog):
    machine()
    caplog.set_level(logging.INFO, "gpuml")
    for address in ("3", "3", "2"):
        assert worker(Task((address,)))["device"] == [f"cpu (address {address})"] * 2
    (warning,) = said(caplog, logging.WARNING)
    assert "address '3'" in warning
    assert "CPU" in warning


def test_the_device_of_local_mode_is_said_once_and_is_no_warning(worker, machine, caplog):
    machine()
    caplog.set_level(logging.INFO, "gpuml")
    for partition in range(3):
        assert worker(Task(partition_id=partition))["device"] == ["cpu"] * 2
    assert len(said(caplog, logging.INFO)) == 1
    assert said(caplog, logging.WARNING) == []


def test_a_relative_address_is_said_once(worker, machine, monkeypatch, caplog):
    machine(A, B)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    caplog.set_level(logging.INFO, "gpuml")
    for _ in range(2):
        assert worker(Task(("1",)))["device"] == ["cuda:1 (address 1)"] * 2
    (note,) = said(caplog, logging.INFO)
    assert "relative" in note


def test_an_exact_address_says_nothing(worker, machine, caplog):
    machine(A, B)
    caplog.set_level(logging.DEBUG, "gpuml")
    worker(Task(("1",)))
    worker(Task(("1",)), policy="cpu")
    assert caplog.records == []


def test_the_network_is_asked_for_on_the_device_of_each_call(worker, machine, monkeypatch):
    machine(A, B)
    places = []
    network = serve.cache.network
    monkeypatch.setattr(
        serve.cache, "network", lambda sha, place, *more: places.append(place) or network(sha, place, *more)
    )
    for address in ("0", "1", "0"):
        worker(Task((address,)))
    assert places == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]


def test_decode_threads_are_the_specs_or_else_the_cpus_of_the_task(worker, machine, monkeypatch):
    machine()
    asked = []

    class Runner(serve.Runner):
        def __init__(self, network, spec, threads):
            asked.append(threads)
            super().__init__(network, spec, threads)

    monkeypatch.setattr(serve, "Runner", Runner)
    worker(Task(cpus=3))
    spec = Spec("0" * 64, decode_threads=2, outputs=("prediction",))
    made = serve.serve([None], spec, Task(cpus=3), lambda: Path("unused"))
    assert asked == [3, 2]
    assert np.isnan(made["prediction"]).all()


@pytest.mark.parametrize(
    ("fields", "cpus", "place", "threads"),
    [
        ({}, 1, "cpu", 0),  # the network computes on that core
        ({"decode_threads": 1}, 1, "cpu", 1),
        ({}, 2, "cpu", 2),
        ({}, 1, "cuda:0", 1),
        ({"decode_threads": 5}, 1, "cuda:0", 5),
        ({"preprocess": PLAIN}, 1, "cpu", 1),  # a python: network may compute elsewhere
    ],
)
def test_a_task_of_one_cpu_decodes_beside_the_network_only_where_that_computes_elsewhere(fields, cpus, place, threads):
    assert serve.decode_threads(Spec("0" * 64, **fields), Task(cpus=cpus), torch.device(place)) == threads
