"""Preprocess and Spec: values that check themselves, hash, and come back from JSON as they went in."""

import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from gpuml import GpumlError, errors
from gpuml.spec import INTERPOLATIONS, Preprocess, Spec


def test_defaults_are_the_ones_of_the_contract():
    assert Preprocess() == Preprocess(256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear", True)
    assert Spec("0" * 64) == Spec("0" * 64, 64, "auto", "float32", 0, 178956970, "white", 0.0, False, (), 5, False)


@pytest.mark.parametrize(
    ("resize", "crop", "size"),
    [
        (256, 224, (224, 224)),
        (256, (224, 192), (224, 192)),
        ((256, 128), 128, (128, 128)),
        ((256, 128), None, (256, 128)),
        ((224, 224), (224, 224), (224, 224)),
        (1, 1, (1, 1)),
    ],
)
def test_size_is_the_crop_or_else_the_resized_pair(resize, crop, size):
    assert Preprocess(resize, crop).size == size


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(("resize", "crop"), [(256, 224), ((256, 128), None), ((64, 64), (32, 16))])
def test_json_brings_back_an_equal_value_with_an_equal_hash(resize, crop, interpolation):
    value = Preprocess(resize, crop, (0, 0.1, 1e-9), (1, 2, 0.3), interpolation, antialias=False)
    again = Preprocess.from_json(value.to_json())
    assert again == value
    assert hash(again) == hash(value)
    assert again.to_json() == value.to_json()


def test_lists_and_integers_are_the_same_value_as_tuples_and_floats():
    listed = Preprocess([32, 16], [8, 8], [0, 0, 0], [1, 1, 1])
    assert listed == Preprocess((32, 16), (8, 8), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    assert {listed: 1}[Preprocess((32, 16), (8, 8), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))] == 1
    assert all(type(number) is float for number in listed.mean + listed.std)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"resize": 0}, "resize=0"),
        ({"resize": -256}, "resize=-256"),
        ({"resize": 256.0}, "resize=256.0"),
        ({"resize": True}, "resize=True"),
        ({"resize": "256"}, "resize='256'"),
        ({"resize": None}, "resize=None"),
        ({"resize": (256,)}, "resize="),
        ({"resize": (256, 256, 3)}, "resize="),
        ({"resize": (256, 0)}, "resize="),
        ({"resize": 10**9, "crop": None}, "resize=1000000000"),
        ({"crop": 0}, "crop=0"),
        ({"crop": (224, False)}, "crop="),
        ({"crop": []}, "crop="),
        ({"crop": None}, "crop=None"),
        ({"crop": 257}, "crop=257"),
        ({"resize": (64, 256), "crop": 65}, "crop=65"),
        ({"resize": (256, 64), "crop": (64, 65)}, "crop="),
        ({"mean": (0, 0)}, "mean="),
        ({"mean": 0.5}, "mean=0.5"),
        ({"mean": "abc"}, "mean='abc'"),
        ({"mean": (0, 0, float("nan"))}, "mean="),
        ({"mean": (0, 0, float("inf"))}, "mean="),
        ({"mean": (0, 0, 10**400)}, "mean="),
        ({"mean": (0, 0, True)}, "mean="),
        ({"std": (1, 1, 0)}, "std="),
        ({"std": (1, -1, 1)}, "std="),
        ({"std": (1, 1, 1, 1)}, "std="),
        ({"std": (1, 1, None)}, "std="),
        ({"interpolation": "lanczos"}, "interpolation='lanczos'"),
        ({"interpolation": ["bilinear"]}, "interpolation="),
        ({"antialias": 1}, "antialias=1"),
        ({"antialias": None}, "antialias=None"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(values, named):
    with pytest.raises(ValueError) as caught:
        Preprocess(**values)
    assert str(caught.value).startswith("Preprocess: ")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "256",
        "null",
        "[]",
        '"resize"',
        '{"Resize": 256}',
        '{"resize": 256, "centre": 1}',
        '{"mean": [NaN, 0, 0]}',
        '{"std": [1, 1, Infinity]}',
        '{"crop": null}',
        '{"resize": "256"}',
        '{"mean": [0, 0, 1' + "0" * 400 + "]}",
        '{"resize": 1' + "0" * 5000 + "}",
    ],
)
def test_text_that_is_no_preprocess_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"^Preprocess: "):
        Preprocess.from_json(text)


def test_keys_that_json_leaves_out_have_their_defaults():
    assert Preprocess.from_json('{"resize": 300}') == Preprocess(resize=300)
    assert set(json.loads(Preprocess().to_json())) == {"resize", "crop", "mean", "std", "interpolation", "antialias"}


def test_values_are_frozen_and_travel_by_pickle():
    spec = Spec("0" * 64, outputs=("error", "prediction"))
    for value, field in ((Preprocess(), "crop"), (spec, "batch_size")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field, 1)
        assert pickle.loads(pickle.dumps(value)) == value
        assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ParamError", ValueError),
        ("ModelError", ValueError),
        ("ModelFileError", errors.ModelError),
        ("DeviceError", RuntimeError),
        ("DeviceMemoryError", errors.DeviceError),
        ("RowError", ValueError),
    ],
)
def test_every_error_is_a_gpuml_error_and_the_builtin_a_caller_would_catch(name, builtin):
    error = getattr(errors, name)
    assert issubclass(error, GpumlError)
    assert issubclass(error, builtin)


def test_the_drawn_tree_names_every_error():
    drawn = {line.split("--")[-1].split()[0] for line in errors.__doc__.splitlines() if "+--" in line}
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and name != "GpumlError"}
    assert drawn == defined


def test_a_row_error_prints_kind_and_message_and_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(errors.RowError("empty", "no bytes")))
    assert (error.kind, error.message, str(error)) == ("empty", "no bytes", "empty: no bytes")


def test_a_row_error_of_an_unlisted_kind_is_a_bug_in_gpuml():
    with pytest.raises(AssertionError):
        errors.RowError("sad", "no such kind")


def test_numbers_for_0_to_255_are_refused():
    with pytest.raises(ValueError, match="divide mean and std by 255"):
        Preprocess(mean=(124, 116, 104), std=(58, 57, 57))


def test_json_nested_too_deeply_is_a_value_error():
    with pytest.raises(ValueError, match="JSON"):
        Preprocess.from_json("[" * 100_000)
