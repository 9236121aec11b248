"""Columns of an Arrow batch through a model file of tensors: rows that fit, reasons for the others. No Spark."""

import logging

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import WideAndDeep
from torch import nn

from gpuml import DeviceMemoryError, ModelError, save_model
from gpuml.models.cards import Port, TensorCard
from gpuml.spec import Spec
from gpuml.worker import cache, passes
from gpuml.worker.cache import Network
from gpuml.worker.device import Task
from gpuml.worker.score import TensorRunner, score
from gpuml.worker.table import around, tensors_of

CPU = torch.device("cpu")
FLOATS = pa.list_(pa.float32())
X = Port("x", "float32", ())
PAIR = Port("pair", "float32", (2,))
GRID = Port("grid", "float32", (2, 3))
ID = Port("id", "int64", ())

INPUTS = {"wide": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "ids": torch.tensor([1, 2, 3])}
ALL = pa.struct(
    [
        ("device", pa.string()),
        ("error", pa.string()),
        ("output0", FLOATS),
        ("output1", pa.list_(FLOATS)),
        ("output2", pa.int64()),
        ("predictedLabel", pa.string()),
        ("prediction", pa.float64()),
        ("probability", FLOATS),
        ("rawPrediction", FLOATS),
    ]
)


def taken(*columns_and_ports):
    columns, ports = columns_and_ports[::2], columns_and_ports[1::2]
    rows, tensors, reasons = tensors_of(columns, ports)
    return rows.tolist(), [tensor.tolist() for tensor in tensors], reasons


# --- columns become tensors -------------------------------------------------------------------------------------------


def test_whole_columns_become_tensors_of_the_inputs_types_and_shapes():
    grid = np.arange(18, dtype=np.float32).reshape(3, 2, 3)
    columns = [
        pa.array([1.5, float("nan"), 3], pa.float32()),
        pa.array(grid.reshape(3, 6).tolist(), FLOATS),
        pa.array(grid.tolist(), pa.list_(FLOATS)),
        pa.array([True, False, True]),
        pa.array([2**53 + 1, 0, -1]),
    ]
    ports = [X, Port("six", "float32", (6,)), GRID, Port("b", "bool", ()), ID]
    rows, (x, six, cube, b, i), reasons = tensors_of(columns, ports)
    assert (rows.tolist(), reasons) == ([0, 1, 2], [None] * 3)
    assert [each.dtype for each in (x, six, cube, b, i)] == [torch.float32] * 3 + [torch.bool, torch.int64]
    assert x.isnan().tolist() == [False, True, False]  # NaN is a number
    assert torch.equal(six, torch.from_numpy(grid.reshape(3, 6)))
    assert torch.equal(cube, torch.from_numpy(grid))
    assert (b.tolist(), i.tolist()) == ([True, False, True], [2**53 + 1, 0, -1])


def test_a_slice_of_a_column_is_what_it_shows():
    whole = pa.array([[0, 1], None, [2, 3], [4], [5, 6], [7, 8]], FLOATS)
    assert taken(whole[2:5], PAIR)[:2] == ([0, 2], [[[2, 3], [5, 6]]])


def test_each_row_that_does_not_fit_has_its_reason_and_the_others_stay_in_order():
    pair = pa.array([[1, 2], None, [3], [4, None], [5, 6, 7], [8, 9], []], FLOATS)
    rows, (numbers,), reasons = taken(pair, PAIR)
    assert (rows, numbers) == ([0, 5], [[1, 2], [8, 9]])
    assert reasons == [
        None,
        "null_input: input 'pair' is null",
        "bad_shape: input 'pair' takes an array of length 2, and was given 1",
        "bad_value: input 'pair' has a null in its array",
        "bad_shape: input 'pair' takes an array of length 2, and was given 3",
        None,
        "bad_shape: input 'pair' takes an array of length 2, and was given 0",
    ]


def test_nested_arrays_are_told_by_depth():
    full = [1, 2, 3]
    cells = [[full, full], [full], [full, None], [full, [1, 2]], [full, [1, None, 3]], None, [[], full], [full, full]]
    rows, (numbers,), reasons = taken(pa.array(cells, pa.list_(FLOATS)), GRID)
    assert (rows, numbers) == ([0, 7], [[full, full]] * 2)
    wrong, null = "bad_shape: input 'grid' takes an array of", "bad_value: input 'grid' has a null in its array"
    assert reasons == [
        None,
        f"{wrong} length 2, and was given 1",
        null,
        f"{wrong} length 3 within its array, and was given 2",
        null,
        "null_input: input 'grid' is null",
        f"{wrong} length 3 within its array, and was given 0",
        None,
    ]


def test_a_row_must_fit_every_input_and_is_told_the_first_that_it_does_not():
    x = pa.array([1, None, 3, None, 5], pa.float32())
    pair = pa.array([[1, 1], [2, 2], [3], [4], [5, 5]], FLOATS)
    ids = pa.array([1, 2, 3, 4, None], pa.int64())
    rows, tensors, reasons = taken(x, X, pair, PAIR, ids, ID)
    assert (rows, tensors) == ([0], [[1], [[1, 1]], [1]])
    assert [reason and reason.split("'")[1] for reason in reasons] == [None, "x", "pair", "x", "id"]


@pytest.mark.parametrize("kind", [pa.large_list(pa.float32()), pa.list_(pa.float32(), 2)])
def test_lists_of_every_layout_are_read(kind):
    column = pa.array([[1, 2], None, [3, 4]], kind)
    assert taken(column, PAIR)[:2] == ([0, 2], [[[1, 2], [3, 4]]])


def test_no_row_and_no_good_row_are_tensors_of_no_rows():
    for cells in ([], [None, [1], [1, None]]):
        grids = pa.array([None] * len(cells), pa.list_(FLOATS))
        rows, (pair, grid), reasons = tensors_of([pa.array(cells, FLOATS), grids], [PAIR, GRID])
        assert rows.tolist() == []
        assert (pair.shape, grid.shape) == ((0, 2), (0, 2, 3))
        assert len(reasons) == len(cells)
        assert all(reasons)


def test_nan_among_integers_is_a_null():
    made = taken(pa.array([1.0, float("nan"), 3.0]), ID)
    assert made == ([0, 2], [[1, 3]], [None, "null_input: input 'id' is null", None])


@pytest.mark.parametrize("cells", [[None, None], [None, []], [[], [None]], [[[]], [None]], [[None, None]]])
def test_a_column_without_a_number_needs_no_type(cells):
    """Through pandas, before Spark 4.1, an array has the type of what it holds."""
    rows, (grid,), reasons = tensors_of([pa.array(cells)], [GRID])
    assert (rows.tolist(), grid.shape) == ([], (0, 2, 3))
    assert all(reasons)


def test_values_are_laid_around_the_rows_that_failed():
    values = pa.array([[1.0], [2.0]])
    assert around(values, np.array([1, 3]), 4).to_pylist() == [None, [1.0], None, [2.0]]
    assert around(values, np.array([0, 1]), 2) is values
    assert around(values[:0], np.array([], int), 2).to_pylist() == [None, None]


# --- a batch through a model file -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_and_deep(tmp_path_factory):
    """A model file, and its network."""
    path = tmp_path_factory.mktemp("models") / "net.pt2"
    save_model(WideAndDeep(), path, inputs=INPUTS, labels=["ant", "bee", "cat"])
    return path, WideAndDeep().eval()


def batch(rows):
    wide = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return wide, torch.arange(rows) % 10


def columns(wide, ids, bad=()):
    keep = [i not in bad for i in range(len(ids))]
    return [
        pa.array([row if good else None for row, good in zip(wide.tolist(), keep, strict=True)], FLOATS),
        pa.array(ids.tolist(), pa.int64()),
    ]


@pytest.mark.parametrize("bad", [(), (0, 3, 9), tuple(range(10))])
@pytest.mark.parametrize("size", [4, 64])
def test_every_field_is_that_of_the_network_in_memory_in_the_rows_that_fit(wide_and_deep, bad, size):
    path, net = wide_and_deep
    wide, ids = batch(10)
    made = score(columns(wide, ids, bad), Spec("t" * 64, batch_size=size), ALL, Task(), lambda: path)
    assert made.type == ALL
    with torch.inference_mode():
        logits, hidden, doubled = net(wide, ids).values()
    good = [i for i in range(10) if i not in bad]
    wanted = {
        "output0": logits,
        "output1": hidden,
        "output2": doubled,
        "rawPrediction": logits,
        "probability": logits.softmax(1),
        "prediction": logits.argmax(1),
    }
    for name, values in wanted.items():
        given = made.field(name).to_pylist()
        assert [i for i in range(10) if given[i] is not None] == good
        if good:
            np.testing.assert_allclose([given[i] for i in good], values[good], rtol=1e-5, atol=1e-6)
    names = [["ant", "bee", "cat"][i] for i in logits.argmax(1)]
    assert made.field("predictedLabel").to_pylist() == [names[i] if i in good else None for i in range(10)]
    told = "null_input: input 'wide' is null"
    assert made.field("error").to_pylist() == [told if i in bad else None for i in range(10)]
    assert made.field("device").to_pylist() == ["cpu"] * 10


def test_a_batch_of_no_rows_is_a_struct_of_none(wide_and_deep):
    made = score(columns(*batch(0)), Spec("t" * 64), ALL, Task(), lambda: wide_and_deep[0])
    assert (made.type, len(made)) == (ALL, 0)


def test_nan_passes_but_is_no_class(tmp_path):
    class Log(nn.Module):
        def forward(self, x):
            return x.log(), x

    save_model(Log(), tmp_path / "net.pt2", inputs={"x": INPUTS["wide"].abs()})
    rows = pa.array([[1, 2, 3, 4], [1, 2, 3, -4], [4, 3, 2, 1]], FLOATS)
    plain = pa.struct([("error", pa.string()), ("output0", FLOATS), ("output1", FLOATS)])
    made = score([rows], Spec("n" * 64), plain, Task(), lambda: tmp_path / "net.pt2")
    assert made.field("error").to_pylist() == [None] * 3
    assert np.isnan(made.field("output0").to_pylist()[1][3])
    kind = pa.struct([("error", pa.string()), ("output1", FLOATS), ("prediction", pa.float64())])
    made = score([rows], Spec("n" * 64), kind, Task(), lambda: tmp_path / "net.pt2")
    assert made.field("prediction").to_pylist() == [3, None, 0]
    assert made.field("output1").to_pylist()[1] is None
    assert made.field("error").to_pylist()[1] == "bad_value: the model gave NaN as 'output_0' of this row"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_autocast_outputs_keep_the_files_types(wide_and_deep, dtype):
    path, net = wide_and_deep
    wide, ids = batch(6)
    made = score(columns(wide, ids), Spec("t" * 64, dtype=dtype), ALL, Task(), lambda: path)
    assert made.type == ALL
    with torch.inference_mode():
        exact = net(wide, ids)["logits"]
    given = torch.tensor(made.field("output0").to_pylist())
    torch.testing.assert_close(given, exact, rtol=5e-2, atol=5e-2)
    assert not torch.allclose(given, exact, rtol=1e-6, atol=1e-6)


# --- memory -----------------------------------------------------------------------------------------------------------

CARD = TensorCard((X, ID), (Port("y", "float32", ()),))


class Small:
    """A network on a device that holds so many rows."""

    def __init__(self, fits):
        self.fits, self.calls = fits, []

    def __call__(self, x, ids):
        self.calls.append(len(x))
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("no room")
        return (x + ids,)


def test_out_of_memory_halves_the_slice_and_loses_no_row(caplog):
    device = Small(fits=3)
    runner = TensorRunner(Network(device, CARD, CPU, "float32"), Spec("0" * 64, batch_size=8))
    x = torch.arange(10.0)
    with caplog.at_level(logging.WARNING, "gpuml"):
        made = runner.run([x, torch.arange(10)], {0})
    assert torch.equal(made[0], 2 * x)
    assert device.calls == [8, 4, 2, 2, 2, 2, 2]
    assert "ran out of memory at 8 rows" in caplog.text
    assert runner.network.batch_limit == 2


def test_out_of_memory_within_torchscript_halves_the_slice_too(monkeypatch):
    """Its interpreter makes a plain RuntimeError of it."""
    failures = []
    monkeypatch.setattr(passes, "_failed_allocations", lambda device: len(failures))

    def forward(x, ids):
        if len(x) > 3:
            failures.append(len(x))
            raise RuntimeError("as TorchScript's interpreter says it")
        return (x + ids,)

    made = TensorRunner(Network(forward, CARD, CPU, "float32"), Spec("0" * 64)).run([torch.ones(8), torch.ones(8)], {0})
    assert (made[0].tolist(), failures) == ([2.0] * 8, [8, 4])


def test_another_failure_of_the_network_is_not_taken_for_it():
    def forward(x, ids):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        TensorRunner(Network(forward, CARD, CPU, "float32"), Spec("0" * 64)).run([torch.ones(8), torch.ones(8)], {0})


def test_a_row_that_does_not_fit_alone_is_an_error_with_advice():
    runner = TensorRunner(Network(Small(0), CARD, CPU, "float32"), Spec("0" * 64, batch_size=8))
    with pytest.raises(DeviceMemoryError, match=r"one row alone.*batchSize=8.*spark\.task\.resource\.gpu\.amount"):
        runner.run([torch.zeros(2), torch.zeros(2)], {0})


def test_an_output_of_another_shape_than_the_card_promises_is_an_error():
    network = Network(lambda x, ids: (x[:1],), CARD, CPU, "float32")
    with pytest.raises(ModelError, match=r"gave \(1,\) for 2 rows; its card promises y: float32 \(batch\)"):
        TensorRunner(network, Spec("0" * 64)).run([torch.zeros(2), torch.zeros(2)], {0})


def test_a_file_is_loaded_once(wide_and_deep, monkeypatch):
    found = []
    for _ in range(2):
        score(columns(*batch(2)), Spec("u" * 64), ALL, Task(), lambda: found.append(1) or wide_and_deep[0])
    assert found == [1]
    assert isinstance(cache.network("u" * 64, CPU, "float32", None).card, TensorCard)
