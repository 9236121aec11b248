"""The networks of a process: loaded once, three at most, freed when dropped, frozen out of the collector's sight."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref

import pytest
import torch
from conftest import PLAIN, Pooled
from torch import nn

from gpuml import DeviceMemoryError, ModelFileError, save_model
from gpuml.models import store
from gpuml.models.cards import Card
from gpuml.worker import cache

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Cyclic(nn.Module):
    """Its parts hold one another, as an exported program's do: reference counts alone never free it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))
        self.register_buffer("kept", torch.zeros(1))
        object.__setattr__(self, "itself", self)

    def forward(self, x):
        return x.mean((2, 3))


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process that holds nothing and has frozen nothing."""
    monkeypatch.setattr(cache, "_networks", type(cache._networks)())
    monkeypatch.setattr(cache, "_frozen", False)
    yield
    gc.unfreeze()


@pytest.fixture
def loads(monkeypatch):
    """Replaces loading by making a network; the paths that were loaded, in order."""
    paths = []

    def load(path, device):
        paths.append(path)
        return Cyclic(), Card(PLAIN, 3)

    monkeypatch.setattr(cache, "load", load)
    return paths


def get(name, device=CPU, dtype="float32"):
    return cache.network(name, device, dtype, lambda: name)


def test_the_same_content_device_and_dtype_are_loaded_once(loads):
    first = get("a")
    assert get("a") is first
    assert loads == ["a"]
    assert (first.device, first.dtype, first.batch_limit) == (CPU, "float32", None)


def test_another_device_or_dtype_is_another_network(loads):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    networks = [get("a", first), get("a", second), get("a", first, "bfloat16")]
    assert [(network.device, network.dtype) for network in networks] == [
        (first, "float32"),
        (second, "float32"),
        (first, "bfloat16"),
    ]
    assert get("a", second) is networks[1]
    assert len(loads) == 3


def test_the_path_is_not_looked_for_when_the_network_is_held(loads):
    get("a")
    cache.network("a", CPU, "float32", lambda: pytest.fail("looked for"))
    assert loads == ["a"]


def test_three_networks_are_held_and_the_least_recently_used_goes(loads):
    for name in ("a", "b", "c", "a", "d"):  # "b" is the oldest when "d" comes
        get(name)
    assert loads == ["a", "b", "c", "d"]
    for name in ("a", "c", "d"):
        get(name)
    assert loads == ["a", "b", "c", "d"]
    get("b")
    assert loads == ["a", "b", "c", "d", "b"]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_dropped_network_is_freed_before_the_next_is_loaded(loads, frozen, monkeypatch):
    parameter = weakref.ref(get("a").forward.weight)
    if frozen:
        cache.freeze()
        assert gc.get_freeze_count() > 0
    gc.disable()  # what is freed must be freed by the cache
    try:
        get("b")
        get("c")
        assert parameter() is not None
        alive = []
        load = cache.load
        monkeypatch.setattr(cache, "load", lambda *args: alive.append(parameter()) or load(*args))
        get("d")
    finally:
        gc.enable()
    assert alive == [None]


def test_a_dropped_network_of_a_gpu_gives_its_memory_back_whatever_device_the_next_is_on(loads, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    get("a", torch.device("cuda", 0))
    for name in ("b", "c", "d"):
        get(name)
    assert emptied == [True]
    get("e")
    assert emptied == [True]


def test_freezing_happens_once_until_something_frozen_was_dropped(loads, monkeypatch):
    frozen = []
    freeze = gc.freeze
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True) or freeze())
    for name in ("a", "b", "c"):
        get(name)
        cache.freeze()
    assert len(frozen) == 1
    get("d")  # drops "a", which was frozen: the rest was thawed with it
    cache.freeze()
    cache.freeze()
    assert len(frozen) == 2


def test_nothing_is_frozen_that_the_cache_did_not_freeze(loads):
    gc.collect()
    gc.freeze()  # the user's own
    before = gc.get_freeze_count()
    for name in "abcd":
        get(name)
    # Networks that are freed may leave the count a little lower; thawing would make it zero.
    assert gc.get_freeze_count() > before / 2


def test_threads_that_ask_at_once_share_one_load(loads, monkeypatch):
    threads = 4
    together = threading.Barrier(threads, timeout=30)
    found = []

    def ask():
        together.wait()
        found.append(get("a"))

    asking = [threading.Thread(target=ask) for _ in range(threads)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(30)
    assert len(found) == threads
    assert set(map(id, found)) == {id(found[0])}
    assert loads == ["a"]


def test_a_load_that_fails_is_tried_again_and_blocks_nobody(loads, monkeypatch):
    load = cache.load

    def fail(path, device):
        raise ModelFileError("damaged")

    monkeypatch.setattr(cache, "load", fail)
    for _ in range(2):
        with pytest.raises(ModelFileError):
            get("a")
    monkeypatch.setattr(cache, "load", load)
    assert get("a") is get("a")
    assert loads == ["a"]


def accelerator_error(code=None):
    """What torch raises for an error of CUDA: its C++ adds the code as an attribute."""
    error = torch.AcceleratorError(f"CUDA error: {code}")
    if code is not None:
        error.error_code = code
    return error


class SmallDevice:
    """A cuda:0 with room for so many networks: what was loaded onto it counts until it is freed."""

    def __init__(self, room, error):
        self.room = room
        self.error = error
        self.tried = []
        self._weights = []

    def load(self, path, device):
        self.tried.append(path)
        network = Cyclic()
        if device == CUDA:
            self._weights.append(weakref.ref(network.weight))
            if sum(weight() is not None for weight in self._weights) > self.room:
                raise self.error()
        return network, Card(PLAIN, 3)


#: Made anew for each load: an error that is kept keeps its traceback, and so what the load has allocated.
OUT_OF_MEMORY = {"torch's": torch.OutOfMemoryError, "CUDA's": lambda: accelerator_error(2)}


@pytest.fixture
def small(monkeypatch):
    def make(room, error=torch.OutOfMemoryError):
        device = SmallDevice(room, error)
        monkeypatch.setattr(cache, "load", device.load)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        return device

    gc.disable()  # what is freed must be freed by the cache
    yield make
    gc.enable()


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_network_that_does_not_fit_beside_the_others_of_its_device_takes_their_place(small, frozen, error):
    device = small(room=1, error=OUT_OF_MEMORY[error])
    get("a", CUDA)
    on_cpu = get("b")
    if frozen:
        cache.freeze()
    assert get("c", CUDA) is get("c", CUDA)
    assert device.tried == ["a", "b", "c", "c"]
    assert get("b") is on_cpu
    get("a", CUDA)
    assert device.tried == ["a", "b", "c", "c", "a", "a"]


def test_a_network_that_does_not_fit_alone_is_an_error_that_says_what_to_do_and_may_fit_later(small):
    device = small(room=0)
    on_cpu = get("b")
    with pytest.raises(DeviceMemoryError) as caught:
        cache.network("0123456789abcdef" * 4, CUDA, "float32", lambda: "a")
    assert device.tried == ["b", "a", "a"]
    for part in ("0123456789ab", "cuda:0", "spark.task.resource.gpu.amount", "nvidia-smi"):
        assert part in str(caught.value)
    device.room = 1
    assert get("a", CUDA) is get("a", CUDA)
    assert get("b") is on_cpu


@pytest.mark.parametrize(
    "error", [accelerator_error(700), accelerator_error(), RuntimeError("out of memory")], ids=repr
)
def test_another_failure_to_load_drops_no_network_and_reaches_the_caller(small, error):
    device = small(room=1, error=lambda: error)
    held = get("a", CUDA)
    with pytest.raises(type(error)) as caught:
        get("c", CUDA)
    assert caught.value is error
    assert device.tried == ["a", "c"]
    assert get("a", CUDA) is held


def test_the_stream_of_a_networks_copies_is_made_once_and_only_on_a_gpu(loads, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    network = get("a", CUDA)
    assert made == []  # loading does not need it
    assert network.copies is network.copies
    assert get("b").copies is None
    assert made == [CUDA]


def test_equal_content_under_two_paths_is_one_load_and_other_content_under_one_path_another(tmp_path, monkeypatch):
    one, two = tmp_path / "one.pt2", tmp_path / "two.pt2"
    save_model(Pooled(), one, preprocess=PLAIN)
    shutil.copy(one, two)
    load, loaded = cache.load, []
    monkeypatch.setattr(cache, "load", lambda path, device: loaded.append(path) or load(path, device))

    def network(path):
        return cache.network(store.hash_of(path), CPU, "float32", lambda: path)

    assert network(one) is network(two)
    assert loaded == [one]
    x = torch.rand(2, 3, 32, 32)
    assert torch.allclose(network(one).forward(x), Pooled()(x), atol=1e-6)
    save_model(Pooled(seed=1), one, preprocess=PLAIN)
    assert torch.allclose(network(one).forward(x), Pooled(seed=1)(x), atol=1e-6)
    assert loaded == [one, one]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loaded_model_file_is_freed_when_dropped(tmp_path, frozen):
    path = tmp_path / "net.pt2"
    save_model(Pooled(), path, preprocess=PLAIN)
    networks = [cache.network(name, CPU, "float32", lambda: path) for name in "abc"]
    parameters = [weakref.ref(next(network.forward.parameters())) for network in networks]
    del networks
    if frozen:
        cache.freeze()
    cache.network("d", CPU, "float32", lambda: path)
    assert [parameter() is None for parameter in parameters] == [True, False, False]
