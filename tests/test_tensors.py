"""Arrow columns through a user's function on tensors: what goes in, what comes out, and what is refused. No Spark."""

import io
import pickle
import re
import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch

from gpuml.errors import DeviceMemoryError, TensorError
from gpuml.spec import Function
from gpuml.worker import device, states, tensors
from gpuml.worker.arrow import to_column, to_tensor
from gpuml.worker.device import Task

CPU = torch.device("cpu")
LISTS = pa.list_(pa.float32())


def tensor(values, kind):
    return to_tensor(pa.array(values, kind), "f: argument 1 ('x')", CPU)


def refused(values, kind):
    with pytest.raises(TensorError) as caught:
        tensor(values, kind)
    message = str(caught.value)
    assert message.startswith("f: argument 1 ('x'): ")
    return message


# --- a column becomes a tensor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (pa.float64(), torch.float64),
        (pa.float32(), torch.float32),
        (pa.int64(), torch.int64),
        (pa.int32(), torch.int32),
        (pa.int16(), torch.int16),
        (pa.int8(), torch.int8),
        (pa.bool_(), torch.bool),
    ],
)
def test_a_column_keeps_its_type_as_numbers_and_as_arrays(kind, dtype):
    yes, no = (True, False) if kind == pa.bool_() else (1, 0)
    made = tensor([yes, no, yes], kind)
    assert (made.dtype, made.tolist()) == (dtype, [yes, no, yes])
    for nested in (pa.list_(kind), pa.large_list(kind), pa.list_(kind, 2)):
        made = tensor([[yes, no], [no, no], [yes, yes]], nested)
        assert (made.dtype, made.tolist()) == (dtype, [[yes, no], [no, no], [yes, yes]])


def test_arrays_of_arrays_are_three_dimensions():
    values = np.arange(24).reshape(2, 3, 4).tolist()
    made = tensor(values, pa.list_(pa.list_(pa.int32())))
    assert made.shape == (2, 3, 4)
    assert made.tolist() == values


def test_a_part_of_a_column_is_that_part():
    """Arrow cuts without copying: the buffers hold more than the column."""
    whole = pa.array([[0, 0], [1, 2], [3, 4], [9, 9]], LISTS)
    assert to_tensor(whole[1:3], "f", CPU).tolist() == [[1, 2], [3, 4]]
    holes = pa.array([None, 1.0, 2.0], pa.float64())
    assert to_tensor(holes[1:], "f", CPU).tolist() == [1, 2]


def test_nan_is_a_number():
    assert np.isnan(tensor([float("nan"), 1], pa.float64()).tolist()[0])


def test_the_function_may_write_to_its_tensors_and_the_column_stays():
    column = pa.array([1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_tensor(column, "f", CPU).zero_()
    assert column.to_pylist() == [1, 2]


def test_no_rows_and_no_elements_make_tensors_too():
    assert tensor([], pa.float64()).shape == (0,)
    assert tensor([], pa.list_(LISTS)).shape == (0, 0, 0)
    assert tensor([[], []], LISTS).shape == (2, 0)


def test_a_null_is_refused_with_its_row_and_what_to_do():
    message = refused([1, 2, None, None], pa.int32())
    assert "row 2 of a batch of 4 is null" in message
    assert "coalesce" in message
    assert "isNotNull" in message


def test_a_null_inside_an_array_is_refused_with_the_row_of_the_batch():
    assert "row 1 of a batch of 3 is null" in refused([[1, 2], None, [3, 4]], LISTS)
    assert "row 2 of a batch of 3 holds a null" in refused([[1, 2], [3, 4], [5, None]], LISTS)
    nested = [[[1], [2]], [[3], None]]
    assert "row 1 of a batch of 2 holds a null" in refused(nested, pa.list_(LISTS))


def test_an_array_of_another_length_is_refused_with_both_lengths():
    message = refused([[1, 2], [3, 4], [5]], LISTS)
    assert "row 2 of a batch of 3 has an array of length 1, the first one 2" in message
    assert "pad or cut" in message
    assert "row 1 of a batch of 2 has an array of length 3" in refused([[[1], [2]], [[3], [4, 5, 6]]], pa.list_(LISTS))


@pytest.mark.parametrize(
    ("kind", "named", "hint"),
    [
        (pa.string(), "string", "cast"),
        (pa.binary(), "binary", "cast"),
        (pa.decimal128(10, 2), "decimal128(10, 2)", "cast"),
        (pa.date32(), "date32[day]", "cast"),
        (pa.list_(pa.string()), "array<string>", "cast"),
        (pa.struct([("size", pa.int32())]), "struct<size: int32>", "vector_to_array"),
    ],
)
def test_a_column_of_no_numbers_is_refused_with_its_type_and_what_to_give(kind, named, hint):
    message = refused([None], kind)
    assert f"of type {named};" in message
    assert hint in message


# --- what a function gave becomes a column ----------------------------------------------------------------------------


def column(given, kind, rows=2):
    return to_column(given, kind, rows, "f")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool])
def test_numbers_of_any_type_become_those_that_were_promised(dtype):
    made = column(torch.tensor([[1, 0], [0, 1]]).to(dtype), LISTS)
    assert made.type == LISTS
    assert made.to_pylist() == [[1, 0], [0, 1]]


def test_whole_numbers_fit_or_are_refused():
    assert column(torch.tensor([1, 2]), pa.int8()).to_pylist() == [1, 2]
    assert column(torch.tensor([1.0, 2.0]), pa.int32()).to_pylist() == [1, 2]
    for given, kind, said in (
        (torch.tensor([1, 300]), pa.int8(), "gave int64, but promised tinyint, and not every value is one .*300"),
        (torch.tensor([1, 2.5]), pa.int32(), r"gave float32, but promised int, .*2\.5.*round or clamp"),
        (torch.tensor([1, float("nan")]), pa.int32(), "gave float32, but promised int"),
        (torch.tensor([1j, 2]), pa.float32(), "gave complex64, but promised float"),
        (torch.tensor([1.0, 0.2]), pa.bool_(), "gave float32, but promised bool: compare"),
    ):
        with pytest.raises(TensorError, match=said):
            column(given, kind)


def test_numpy_arrays_and_tensors_that_are_no_block_of_memory_are_taken():
    assert column(np.array([[1, 2], [3, 4]]).T, LISTS).to_pylist() == [[1, 3], [2, 4]]
    assert column(torch.tensor([[1, 2], [3, 4]]).T, LISTS).to_pylist() == [[1, 3], [2, 4]]
    assert column(torch.tensor([1.0]).expand(2), pa.float64()).to_pylist() == [1, 1]
    assert column(torch.nn.Parameter(torch.ones(2)), pa.float64()).to_pylist() == [1, 1]


def test_arrays_of_arrays_and_of_no_elements_come_back():
    values = np.arange(24.0).reshape(2, 3, 4)
    assert column(torch.from_numpy(values), pa.list_(pa.list_(pa.float64()))).to_pylist() == values.tolist()
    assert column(torch.zeros(2, 0), LISTS).to_pylist() == [[], []]
    assert column(torch.zeros(2, 3, 0), pa.list_(LISTS)).to_pylist() == [[[], [], []]] * 2


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (
            torch.zeros(3),
            pa.float64(),
            "gave shape (3,) for a batch of 2 rows; it promised double, which is a tensor of shape (2,)",
        ),
        (torch.tensor(1.0), pa.float64(), "gave shape () for a batch of 2 rows"),
        (torch.zeros(2, 1), pa.float64(), "gave shape (2, 1) for a batch of 2 rows; it promised double"),
        (torch.zeros(2), LISTS, "promised array<float>, which is a tensor of shape (2, k)"),
        (torch.zeros(2, 2), pa.list_(LISTS), "promised array<array<float>>, which is a tensor of shape (2, k, m)"),
        ([1.0, 2.0], pa.float64(), "gave a list, not a tensor"),
        (None, pa.float64(), "gave a NoneType, not a tensor"),
    ],
)
def test_another_shape_or_no_tensor_is_refused_with_what_was_promised(given, kind, said):
    with pytest.raises(TensorError, match=re.escape(said)):
        column(given, kind)


PAIR = pa.struct([("a", pa.float64()), ("b", LISTS)])


def test_a_struct_is_made_of_a_dict_by_name_and_of_a_tuple_in_order():
    a, b = torch.tensor([1, 2]), torch.tensor([[3.0], [4.0]])
    for given in ({"b": b, "a": a}, (a, b), [a, b.numpy()]):
        made = column(given, PAIR)
        assert made.type == PAIR
        assert made.to_pylist() == [{"a": 1, "b": [3]}, {"a": 2, "b": [4]}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": 1, "c": 2}, "f: gave a dict of 'a', 'c'; it promised a struct of 'a', 'b'"),
        ({}, "f: gave a dict of nothing; it promised"),
        ((torch.zeros(2),), "f: gave 1 values; it promised a struct of 'a', 'b': .* a tuple of 2 in this order"),
        (torch.zeros(2, 2), "f: gave a Tensor; it promised a struct"),
        ((torch.zeros(2), torch.zeros(2)), "f, field 'b': gave shape"),
    ],
)
def test_a_struct_of_other_fields_is_refused_with_both(given, said):
    with pytest.raises(TensorError, match=said):
        column(given, PAIR)


# --- a batch through a function ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process that holds no state."""
    monkeypatch.setattr(states, "_states", type(states._states)())


def function(predict, returns=None, **fields):
    return Function(predict, ("x", "y"), returns or pa.float64(), name="f", **fields)


def test_a_function_gets_a_tensor_for_each_column_and_nothing_is_differentiated():
    def predict(x, y):
        assert torch.is_inference_mode_enabled()
        return x + y

    made = tensors.answer([pa.array([1.0, 2.0]), pa.array([3, 4])], function(predict), Task())
    assert made.to_pylist() == [4, 6]


def test_a_batch_of_no_rows_gives_none_and_never_reaches_the_function():
    def predict(*columns):
        raise AssertionError

    for kind in (pa.float64(), LISTS, PAIR):
        made = tensors.answer([pa.array([], LISTS)], function(predict, kind, setup=b"", sha256="0"), Task())
        assert (len(made), made.type) == (0, kind)


def test_an_error_names_the_argument():
    with pytest.raises(TensorError, match=r"^f: argument 2 \('y'\): row 0 of a batch of 1 is null"):
        tensors.answer([pa.array([1.0]), pa.array([None], pa.int8())], function(lambda x, y: x), Task())
    with pytest.raises(TensorError, match=r"^f: argument 3: "):
        tensors.answer([pa.array([1.0])] * 2 + [pa.array(["a"])], function(lambda x, y, z: x), Task())
    with pytest.raises(TensorError, match="without a column"):
        tensors.answer([], function(lambda: 1), Task())


def test_a_full_device_says_how_to_make_batches_smaller():
    def predict(x):
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(DeviceMemoryError, match=r"f: a batch of 1 rows .* cpu.*maxRecordsPerBatch"):
        tensors.answer([pa.array([1.0])], function(predict), Task())
    with pytest.raises(DeviceMemoryError, match=r"reduce: a batch of 1 rows"):
        tensors.fold(batches([1]), ["x"], predict, None, "cpu", Task())


def test_each_call_is_bound_to_the_device_of_its_task(monkeypatch):
    """As a stage's is: the addresses of a reused worker change, and the state is that of the device."""
    seen, asked = [], []
    monkeypatch.setattr(device, "uuids", lambda: ("a", "b"))
    monkeypatch.setattr(device, "place", lambda index: asked.append(index) or CPU)
    monkeypatch.setattr(device, "_said", set())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(states, "state", lambda sha256, setup, place: seen.append(place))
    for address in ("1", "0"):
        tensors.answer([pa.array([1.0])], function(lambda state, x: x, setup=b"", sha256="0"), Task((address,)))
        tensors.fold(batches([1]), ["x"], torch.sum, None, "auto", Task((address,)))
    assert asked == [1, 1, 0, 0]
    assert seen == [CPU, CPU]


# --- states -----------------------------------------------------------------------------------------------------------

made = []


def setup(device):
    made.append(str(device))
    return len(made)


def broken(device):
    made.append("broken")
    raise OSError("no file")


def ask(sha256, place="cpu"):
    return states.state(sha256, pickle.dumps(setup), torch.device(place))


def test_a_state_is_made_once_for_its_content_and_device():
    made.clear()
    assert [ask("a"), ask("a"), ask("b"), ask("a", "cuda:1"), ask("a")] == [1, 1, 2, 3, 1]
    assert made == ["cpu", "cpu", "cuda:1"]


def test_a_process_keeps_the_last_three_states_and_gives_their_memory_back(monkeypatch):
    made.clear()
    released = []
    monkeypatch.setattr(states, "release", lambda place: released.append(str(place)))
    for sha256, place in (("a", "cpu"), ("b", "cuda:1"), ("c", "cpu"), ("a", "cpu"), ("d", "cpu")):
        ask(sha256, place)
    assert released == ["cuda:1"]
    assert ask("a") == 1
    assert ask("b", "cuda:1") == 5


def test_a_setup_that_fails_is_tried_again():
    made.clear()
    for _ in range(2):
        with pytest.raises(OSError, match="no file"):
            states.state("a", pickle.dumps(broken), CPU)
    assert made == ["broken", "broken"]


# --- results of batches -----------------------------------------------------------------------------------------------


def batches(*columns):
    return [pa.record_batch([pa.array(values, pa.float64())], ["0"]) for values in columns]


def reduced(*partitions, reduce, combine=None):
    folded = [tensors.fold(batches(*partition), ["x"], reduce, combine, "cpu", Task()) for partition in partitions]
    return tensors.merge([packed for packed in folded if packed is not None], combine)


def test_results_are_added_by_element_over_batches_and_partitions():
    made = reduced([[1, 2], [3]], [], [[], [4]], reduce=lambda x: x.sum())
    assert (type(made), made.dtype, made.shape, made.item()) == (np.ndarray, np.float64, (), 10)


def test_a_result_keeps_its_form_and_its_types():
    pair = reduced([[1], [2]], [[3]], reduce=lambda x: (x.sum(), len(x)))
    assert (type(pair), pair[0], pair[1], pair[1].dtype) == (tuple, 6, 3, np.int64)
    named = reduced([[1], [2]], [[3]], reduce=lambda x: {"b": x.float().sum(), "a": torch.ones(1, 2, dtype=torch.int8)})
    assert list(named) == ["b", "a"]
    assert (named["b"].dtype, named["a"].dtype, named["a"].tolist()) == (np.float32, np.int8, [[3, 3]])
    assert reduced([[1], [2]], reduce=lambda x: x.bfloat16()).dtype == np.float32
    assert reduced([[0.1]], reduce=lambda x: float(x)) == 0.1  # not a float32
    assert reduced([[1], [2]], reduce=lambda x: x.numpy()).tolist() == [3]
    assert reduced([[1]], reduce=lambda x: ()) == ()


def test_combine_folds_in_the_order_of_the_rows():
    assert reduced([[1], [2]], [[3]], reduce=lambda x: x.sum(), combine=lambda a, b: a * 10 + b) == 123


def test_what_travels_holds_no_pickle():
    form, cells = tensors.fold(batches([1]), ["x"], lambda x: {"a": x, "b": 1}, None, "cpu", Task())
    assert form == '["a", "b"]'
    assert [cell[:6] for cell in cells] == [b"\x93NUMPY"] * 2
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        tensors.merge([("null", [file.getvalue()])], None)


@pytest.mark.parametrize(
    ("reduce", "combine", "said"),
    [
        (lambda x: x, None, "gave torch.float64 of shape (1,), then torch.float64 of shape (2,)"),
        (lambda x: x.sum() > 0, None, "gave torch.bool of shape ()"),
        (lambda x: (x,) * len(x), None, "reduce: gave a tuple of 2 after a tuple of 1; its result has one form"),
        (lambda x: x.sum(), lambda a, b: {"a": a}, "combine: gave a dict of 'a' after a tensor"),
        (lambda x: {"a": x} if len(x) == 1 else x, max, "reduce: gave a tensor after a dict of 'a'"),
        (lambda x: "sum", None, "reduce: gave a str, not a tensor"),
        (lambda x: {1: x}, None, "reduce: gave a dict with the key 1"),
        (lambda x: (x, None), None, "reduce, value 1: gave a NoneType"),
    ],
)
def test_results_that_do_not_fit_each_other_are_refused_with_both(reduce, combine, said):
    with pytest.raises(TensorError, match=re.escape(said)):
        tensors.fold(batches([1], [2, 3]), ["x"], reduce, combine, "cpu", Task())


def test_a_column_of_a_frame_is_named_by_its_name():
    with pytest.raises(TensorError, match=r"^column 'x': row 1 of a batch of 2 is null"):
        tensors.fold(batches([1, None]), ["x"], torch.sum, None, "cpu", Task())
