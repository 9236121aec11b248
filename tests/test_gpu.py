"""On a CUDA device: the same answers as on the CPU, and what the memory does. Needs neither Java nor PySpark.

Not part of `make test`; examples/benchmarks/gpu_check.sh runs it.
"""

import gc
import pickle

import numpy as np
import pytest
import torch
from conftest import PLAIN, WideAndDeep, encoded
from torch import nn

from gpuml import Preprocess, save_detector, save_model
from gpuml.spec import Spec
from gpuml.worker import cache, device
from gpuml.worker.runner import Runner
from gpuml.worker.serve import serve

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Convolutions(nn.Module):
    """Convolution, batch norm, a constant of its own, a view and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2))
        self.head = nn.Linear(32 * 4, 10)

    def forward(self, x):
        pooled = nn.functional.adaptive_avg_pool2d(self.layers(x), 2).flatten(1)
        return self.head(pooled) + torch.arange(10, dtype=torch.float32, device=x.device) * torch.tensor(0.1)


@pytest.fixture
def model(tmp_path):
    save_model(Convolutions(), tmp_path / "net.pt2", preprocess=PLAIN)
    return tmp_path / "net.pt2"


def run(model, where, rows, *, batch=8, dtype="float32"):
    network = cache.network(f"{model}", where, dtype, lambda: model)
    return Runner(network, Spec("0" * 64, batch_size=batch, dtype=dtype), threads=4).run(rows)


def test_scores_equal_those_of_the_cpu_in_order_with_bad_rows_among_them(model):
    rows = [b"broken" if i % 7 == 3 else encoded(i) for i in range(150)]
    on_cpu = run(model, CPU, rows)
    for batch in (1, 8, 64):
        on_gpu = run(model, CUDA, rows, batch=batch)
        assert on_gpu.good == on_cpu.good
        assert on_gpu.reasons == on_cpu.reasons
        np.testing.assert_allclose(on_gpu.outputs, on_cpu.outputs, atol=2e-3)  # TF32 convolutions


def test_the_seconds_of_copies_and_passes_are_the_gpus(model):
    seconds = run(model, CUDA, [encoded(i) for i in range(64)], batch=16).seconds
    assert seconds.shape == (64, 4)
    assert (seconds > 0).all()
    assert (seconds < 1).all()


def test_many_runs_give_the_same_bits(model):
    """A staging slot that is overwritten before its copy has left would show here."""
    rows = [encoded(i) for i in range(256)]
    first = run(model, CUDA, rows, batch=16).outputs
    for _ in range(20):
        np.testing.assert_array_equal(run(model, CUDA, rows, batch=16).outputs, first)


def test_a_view_after_a_convolution_is_served_in_contiguous_memory(tmp_path):
    class Flat(Convolutions):
        def forward(self, x):
            return self.layers(x).view(x.shape[0], -1)[:, :10]

    save_model(Flat(), tmp_path / "flat.pt2", preprocess=PLAIN)
    rows = [encoded(i) for i in range(20)]
    got, wanted = (run(tmp_path / "flat.pt2", where, rows).outputs for where in (CUDA, CPU))
    assert cache.network(f"{tmp_path / 'flat.pt2'}", CUDA, "float32", None).card.memory_format == "contiguous"
    np.testing.assert_allclose(got, wanted, atol=2e-3)  # TF32 convolutions


def test_a_region_without_autocast_stays_in_float32(tmp_path):
    """Its export on the CPU names the CPU: on the GPU that would switch nothing off."""

    class Precise(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(3, 10)

        def forward(self, x):
            with torch.autocast(x.device.type, enabled=False):
                return self.head(x.float().mean((2, 3)))

    save_model(Precise(), tmp_path / "precise.pt2", preprocess=PLAIN)
    rows = [encoded(i) for i in range(20)]
    got = run(tmp_path / "precise.pt2", CUDA, rows, dtype="bfloat16").outputs
    np.testing.assert_allclose(got, run(tmp_path / "precise.pt2", CPU, rows).outputs, atol=1e-5)


def test_memory_stays_flat_over_many_runs(tmp_path):
    """With a stream for each run, 32 in turn, each keeps two slices of 9 MiB: 20 MiB segments, 0.6 GiB and more."""
    save_model(Convolutions(), tmp_path / "net.pt2", preprocess=Preprocess((224, 224), None))
    rows = [encoded(i) for i in range(128)]
    for _ in range(5):
        run(tmp_path / "net.pt2", CUDA, rows, batch=64)
    before = torch.cuda.memory_reserved(0)
    for _ in range(40):
        run(tmp_path / "net.pt2", CUDA, rows, batch=64)
    assert torch.cuda.memory_reserved(0) - before <= 40 << 20  # a slice more where the GPU lags behind


def test_a_network_that_does_not_fit_beside_the_others_takes_their_place(tmp_path):
    class Large(nn.Module):
        """256 MiB of weights."""

        def __init__(self, seed):
            super().__init__()
            self.weight = nn.Parameter(torch.full((1 << 26,), float(seed)))

        def forward(self, x):
            return x.mean((2, 3)) + self.weight[:3]

    rows, networks = [encoded(i) for i in range(4)], []
    cache._networks.clear()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved(0) + (600 << 20)) / total), 0)
    try:
        for seed in range(3):
            save_model(Large(seed), tmp_path / f"{seed}.pt2", preprocess=PLAIN)
            networks.append(run(tmp_path / f"{seed}.pt2", CUDA, rows).outputs)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        cache._networks.clear()
    np.testing.assert_allclose(networks[2] - networks[0], 2, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_gives_float32_near_the_cpus(model, dtype):
    rows = [encoded(i) for i in range(32)]
    got = run(model, CUDA, rows, dtype=dtype).outputs
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, run(model, CPU, rows).outputs, atol=0.05)


def test_memory_that_runs_out_halves_the_batch_and_loses_no_row(tmp_path):
    class Hungry(nn.Module):
        """64 MiB of activations per row."""

        def forward(self, x):
            wide = x.mean((2, 3)).repeat(1, 1 << 22)
            return wide[:, :3] * 2

    save_model(Hungry(), tmp_path / "hungry.pt2", preprocess=PLAIN)
    rows = [encoded(i) for i in range(40)]
    network = cache.network("hungry", CUDA, "float32", lambda: tmp_path / "hungry.pt2")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (1 << 30) / total), 0)
    try:
        scores = Runner(network, Spec("0" * 64, batch_size=40), threads=4).run(rows)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert network.batch_limit is not None
    assert network.batch_limit < 40
    np.testing.assert_allclose(scores.outputs, run(tmp_path / "hungry.pt2", CPU, rows).outputs, atol=1e-5)


def test_dropping_a_network_gives_its_memory_back(tmp_path):
    class Large(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.weight = nn.Parameter(torch.full((1 << 24,), float(seed)))  # 64 MiB

        def forward(self, x):
            return x.mean((2, 3)) + self.weight[:3]

    cache._networks.clear()
    for seed in range(cache.CAPACITY + 2):
        path = tmp_path / f"{seed}.pt2"
        save_model(Large(seed), path, preprocess=PLAIN)
        cache.network(f"large{seed}", CUDA, "float32", lambda path=path: path)
        cache.freeze()
    assert torch.cuda.memory_allocated(0) < (cache.CAPACITY + 1) * (64 << 20)
    cache._networks.clear()


def test_a_task_binds_to_its_address_and_leaves_the_other_cards_alone(model):
    last = torch.cuda.device_count() - 1
    spec = Spec("0" * 64, device="cuda", outputs=("device", "error", "prediction"))
    made = serve([encoded(i) for i in range(4)], spec, device.Task((str(last),), 4, 0), lambda: model)
    assert made["device"] == [f"cuda:{last} (address {last})"] * 4
    assert made["error"] == [None] * 4


def test_a_zoo_network_runs_as_it_does_on_the_cpu(tmp_path):
    from torchvision.models import mobilenet_v3_small

    torch.manual_seed(0)
    save_model(mobilenet_v3_small(), tmp_path / "zoo.pt2", preprocess=Preprocess())
    rows = [encoded(i, width=300, height=260) for i in range(16)]
    got, wanted = (run(tmp_path / "zoo.pt2", where, rows).outputs for where in (CUDA, CPU))
    np.testing.assert_allclose(got, wanted, atol=5e-3 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large"]
)
def test_a_detector_finds_boxes_on_the_gpu(name, tmp_path):
    """Not those of the CPU: TF32 moves scores, and with them which boxes are suppressed."""
    import torchvision

    from gpuml.worker.detector import Detector

    torch.manual_seed(0)
    least = {"box_score_thresh" if "rcnn" in name else "score_thresh": 0.0}
    net = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4, **least)
    save_detector(net, tmp_path / "net.pt2")
    network = cache.network(name, CUDA, "float32", lambda: tmp_path / "net.pt2")
    first, broken, last = Detector(network, Spec("0" * 64), 2).run([encoded(0), b"broken", encoded(1, width=90)])
    assert broken.startswith("not_image")
    for found, width in ((first, 60), (last, 90)):
        assert len(found.corners) > 5
        assert ((found.corners >= 0) & (found.corners <= width)).all()


def test_a_network_of_tensors_runs_as_it_does_on_the_cpu(tmp_path):
    pytest.importorskip("pyarrow")
    from gpuml.worker.score import TensorRunner

    sample = {"wide": torch.randn(3, 4), "ids": torch.tensor([1, 2, 3])}
    save_model(WideAndDeep(), tmp_path / "net.pt2", inputs=sample)
    rows = [torch.randn(100, 4), torch.arange(100) % 10]
    got, wanted = (
        TensorRunner(
            cache.network("tensors", where, "float32", lambda: tmp_path / "net.pt2"), Spec("0" * 64, batch_size=32)
        ).run(rows, {0, 1, 2})
        for where in (CUDA, CPU)
    )
    for i in range(3):
        torch.testing.assert_close(got[i], wanted[i], rtol=1e-3, atol=2e-3)


def test_a_users_function_gets_tensors_on_its_device_which_is_the_current_one():
    pa = pytest.importorskip("pyarrow")
    from gpuml.spec import Function
    from gpuml.worker import tensors

    last = torch.cuda.device_count() - 1
    where, task = torch.device("cuda", last), device.Task((str(last),))

    def predict(state, x, y):
        assert (state, x.device, y.device, torch.zeros(1, device="cuda").device) == (where,) * 4
        return x + y.sum(1)

    columns = [pa.array([1.0, 2.0]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int32()))]
    function = Function(predict, (), pa.float64(), pickle.dumps(_itself), "0", "cuda")
    assert tensors.answer(columns, function, task).to_pylist() == [4, 9]

    batch = pa.record_batch([pa.array(range(1000), pa.float64())], ["0"])
    packed = tensors.fold([batch] * 3, ["x"], lambda x: (x.sum(), len(x)), None, "cuda", task)
    assert [each.item() for each in tensors.merge([packed, packed], None)] == [6 * 499500, 6000]


def _itself(device):
    return device
