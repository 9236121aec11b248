"""predict: images in memory and local files, with no Spark, in order, each row accounted for."""

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import PLAIN, Pooled, Quadrants, encoded, picture
from PIL import Image

import gpuml
from gpuml import ImageClassifier, ModelError, ParamError, Preprocess, save_model
from gpuml.errors import RowError
from gpuml.models import sources, store


@pytest.fixture(scope="module")
def classifier():
    return ImageClassifier.from_module(Pooled(), preprocess=PLAIN, labels=list("abcd"))


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "a photo é.png"
    path.write_bytes(encoded(1))
    return path


def expected(seed, net=None, size=32):
    """The network's output for a picture of conftest, worked out with Pillow and numpy."""
    image = picture(seed).resize((size, size), Image.Resampling.BILINEAR)
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    with torch.inference_mode():
        return (net or Pooled())(x)[0].numpy()


# --- inputs -------------------------------------------------------------------------------------------------------


def test_each_kind_of_input_gives_the_same_row_in_order(classifier, photo):
    data = encoded(1)
    inputs = [data, bytearray(data), memoryview(data), str(photo), photo, picture(1)]
    frame = classifier.copy().setRawPredictionCol("raw").predict([encoded(2), *inputs, encoded(3)])
    assert frame["error"].isna().all()
    assert frame.index.tolist() == list(range(8))
    for row in range(1, 7):
        assert np.array_equal(frame["raw"][row], frame["raw"][1]), row
    for row, seed in ((0, 2), (1, 1), (7, 3)):
        # The resize rounds to whole 8-bit levels, here and there.
        np.testing.assert_allclose(frame["raw"][row], expected(seed), atol=0.02)
        assert frame["prediction"][row] == expected(seed).argmax()


def test_a_pil_image_equals_the_bytes_of_its_file(classifier):
    for kind in ("PNG", "JPEG"):
        data = encoded(4, kind, width=300, height=200)
        opened, loaded = Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data))
        loaded.load()
        rows = [row.tobytes() for row in classifier.predict([data, opened, loaded])["probability"]]
        assert rows[1] == rows[2]
        if kind == "PNG":
            assert rows[0] == rows[1]
        np.testing.assert_allclose(np.frombuffer(rows[0], np.float32), np.frombuffer(rows[1], np.float32), atol=0.01)


def test_one_lazily_opened_image_given_many_times_is_read_once(classifier, tmp_path):
    # Threads that load one image at once share its file's position: of 6 rows 1 or 2 failed.
    (tmp_path / "large.png").write_bytes(encoded(3, width=1200, height=1200))
    for _ in range(3):
        with Image.open(tmp_path / "large.png") as image:
            frame = classifier.predict([image] * 6)
        assert frame["error"].isna().all()
        assert frame["prediction"].nunique() == 1


def test_one_image_given_twice_is_still_refused_by_its_size_before_it_is_read(classifier):
    image = Image.open(io.BytesIO(encoded(1)))
    frame = classifier.copy().setMaxPixels(100).predict([image, image])
    assert frame["error"].str.startswith("too_large").all()
    assert image.tile  # Pillow empties it when it loads the pixels


def test_null_and_empty_inputs_keep_their_rows_and_have_their_kinds(classifier):
    frame = classifier.predict([None, encoded(1), b"", bytearray(), b"text"])
    assert [error and error.partition(":")[0] for error in frame["error"]] == [
        "null_input",
        None,
        "empty",
        "empty",
        "not_image",
    ]
    assert frame["prediction"].isna().tolist() == [True, False, True, True, True]
    assert [value is None for value in frame["probability"]] == [True, False, True, True, True]
    assert [value is None for value in frame["predictedLabel"]] == [True, False, True, True, True]


def test_paths_that_cannot_be_read_are_rows_of_kind_io(classifier, photo, monkeypatch):
    def read_bytes(self):
        if self.name == "forbidden.png":
            raise PermissionError(13, "Permission denied", str(self))
        return original(self)

    original = Path.read_bytes  # root reads all files, so no chmod
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    (photo.parent / "forbidden.png").write_bytes(b"x")
    paths = [photo.parent / "missing.png", photo.parent, photo.parent / "forbidden.png", "", photo / "x", photo]
    errors = classifier.predict(paths)["error"].tolist()
    for path, error, reason in zip(
        paths,
        errors,
        ["No such file", "Is a directory", "Permission denied", "Is a directory", "Not a directory"],
        strict=False,
    ):
        assert error.startswith("io: ")
        assert str(path) in error
        assert reason in error
    assert errors[-1] is None


@pytest.mark.parametrize("url", ["http://host/a.png", "s3a://bucket/a.png", "file:///tmp/a.png", "dbfs://a"])
def test_urls_are_refused_naming_their_position(classifier, url):
    with pytest.raises(ParamError, match=r"input 1 is a URL, .*download it first"):
        classifier.predict([encoded(1), url])


@pytest.mark.parametrize("value", [1, 2.5, np.zeros((4, 4, 3), np.uint8), torch.zeros(3), ["a.png"], io.BytesIO(b"a")])
def test_other_types_are_refused_naming_their_position(classifier, value):
    with pytest.raises(ParamError, match=rf"input 1 is a {type(value).__name__}; give bytes"):
        classifier.predict([encoded(1), value])


def test_one_input_that_is_not_in_a_list_is_refused(classifier, photo):
    # A text would be read letter by letter, each a file that is not there.
    for value in (str(photo), photo, encoded(1), bytearray(encoded(1)), memoryview(encoded(1)), picture(1)):
        with pytest.raises(ParamError, match=r"predict\(\[\.\.\.\]\)"):
            classifier.predict(value)


def test_any_iterable_is_taken(classifier):
    images = [encoded(1), encoded(2)]
    whole = classifier.predict(images)
    pd.testing.assert_frame_equal(classifier.predict(iter(images)), whole)
    pd.testing.assert_frame_equal(classifier.predict(tuple(images)), whole)
    pd.testing.assert_frame_equal(classifier.predict(pd.Series(images, index=[7, 3])), whole)


# --- handleInvalid ------------------------------------------------------------------------------------------------


def test_skip_drops_failed_rows_and_keeps_the_index_of_the_others(classifier):
    stage = classifier.copy().setHandleInvalid("skip")
    frame = stage.predict([b"bad", encoded(1), None, encoded(2)])
    assert frame.index.tolist() == [1, 3]
    assert frame["prediction"].notna().all()
    assert len(stage.predict([b"bad", None])) == 0
    assert stage.copy().setErrorCol("").predict([b"bad", encoded(1)]).index.tolist() == [1]


def test_error_names_the_first_failed_input_and_its_kind(classifier, photo):
    stage = classifier.copy().setHandleInvalid("error").setErrorCol("")
    missing = str(photo.parent / "missing.png")
    for bad, kind, name in ((None, "null_input", "None"), (b"bad", "not_image", "3 bytes"), (missing, "io", missing)):
        for inputs in ([encoded(1), bad, b""], pd.Series([encoded(1), bad, b""], index=[4, 5, 6])):
            with pytest.raises(RowError) as caught:
                stage.predict(inputs)
            assert caught.value.kind == kind
            assert "input 1" in str(caught.value)
            assert name in str(caught.value)
    with pytest.raises(RowError, match="input 1"):
        stage.predict(value for value in [encoded(1), b""])
    assert len(stage.predict([encoded(1)])) == 1


def test_bad_rows_do_not_change_their_neighbours(classifier):
    good = [encoded(seed) for seed in range(4)]
    alone = classifier.predict(good)["probability"].tolist()
    for bad in (0, 2, 4):
        mixed = [*good[:bad], b"bad", *good[bad:]]
        frame = classifier.copy().setBatchSize(2).predict(mixed)
        assert frame["error"].notna().tolist() == [row == bad for row in range(5)]
        for row, probability in zip([row for row in range(5) if row != bad], alone, strict=True):
            np.testing.assert_allclose(frame["probability"][row], probability, rtol=1e-6)


# --- outputs ------------------------------------------------------------------------------------------------------


def test_the_default_outputs_have_their_names_order_and_types(classifier):
    frame = classifier.predict([encoded(1), b"bad"])
    assert frame.columns.tolist() == ["prediction", "predictedLabel", "probability", "error"]
    assert frame.dtypes.tolist() == [np.float64, object, object, object]
    assert frame["probability"][0].dtype == np.float32
    assert frame["probability"][0].shape == (4,)
    assert frame["probability"][0].sum() == pytest.approx(1, abs=1e-6)
    assert frame["predictedLabel"][0] == "abcd"[int(frame["prediction"][0])]


@pytest.mark.parametrize("inputs", [[], [b"bad"], [None, b""]])
def test_frames_without_a_good_row_have_the_same_columns_and_types(classifier, inputs):
    stage = classifier.copy().setTopKCol("top").setDeviceCol("device").setRawPredictionCol("raw")
    whole, frame = stage.predict([encoded(1)]), stage.predict(inputs)
    assert len(frame) == len(inputs)
    assert frame.columns.tolist() == whole.columns.tolist()
    assert frame.dtypes.tolist() == whole.dtypes.tolist()


def test_every_output_on_request(classifier):
    stage = ImageClassifier(
        model=classifier.getModel(),
        predictionCol="p",
        predictedLabelCol="l",
        probabilityCol="v",
        rawPredictionCol="r",
        topKCol="t",
        topK=3,
        errorCol="e",
        deviceCol="d",
        timingCol="s",
    )
    frame = stage.predict([encoded(1), b"bad"])
    assert frame.columns.tolist() == ["p", "l", "v", "r", "t", "e", "d", "s"]
    assert frame["r"][0].dtype == np.float32
    np.testing.assert_allclose(frame["v"][0], np.exp(frame["r"][0]) / np.exp(frame["r"][0]).sum(), rtol=1e-5)
    order = np.argsort(-frame["v"][0])
    assert [entry["label"] for entry in frame["t"][0]] == ["abcd"[index] for index in order[:3]]
    assert [entry["probability"] for entry in frame["t"][0]] == pytest.approx(frame["v"][0][order[:3]].tolist())
    assert frame["t"][1] is None
    assert frame["d"].tolist() == ["cpu", "cpu"]
    assert list(frame["s"][0]) == ["feed", "decode", "resize", "copy", "compute"]
    assert frame["s"][0]["feed"] is None
    assert frame["s"][0]["decode"] > 0
    assert frame["s"][1] is None


def test_empty_names_are_not_produced(classifier):
    stage = ImageClassifier(model=classifier.getModel(), predictionCol="", probabilityCol="", errorCol="")
    assert stage.predict([encoded(1), b"bad"]).columns.tolist() == ["predictedLabel"]
    nothing = stage.copy().setPredictedLabelCol("")
    assert nothing.predict([encoded(1), b"bad"]).shape == (2, 0)


def test_two_outputs_of_one_name_are_refused(classifier):
    with pytest.raises(ParamError, match=r"setErrorCol"):
        classifier.copy().setErrorCol("prediction").predict([encoded(1)])


def test_batch_size_and_threads_do_not_change_results(classifier):
    images = [encoded(seed) for seed in range(9)]
    whole = np.stack(classifier.predict(images)["probability"])
    for size, threads in ((1, 1), (2, 3), (7, 2), (9, 0)):
        stage = classifier.copy().setBatchSize(size).setDecodeThreads(threads)
        np.testing.assert_allclose(np.stack(stage.predict(images)["probability"]), whole, rtol=1e-5)


def test_without_labels_the_label_is_the_index():
    stage = ImageClassifier.from_module(Pooled(), preprocess=PLAIN)
    frame = stage.predict([encoded(1)])
    assert frame["predictedLabel"][0] == str(int(frame["prediction"][0]))


# --- the model ----------------------------------------------------------------------------------------------------


def test_from_module_takes_a_class_of_this_function_and_leaves_the_network():
    class Local(Quadrants):
        pass

    net = Local().train()
    stage = ImageClassifier.from_module(net, preprocess=PLAIN, activation="none", batchSize=3, rawPredictionCol="raw")
    assert net.training
    assert stage.getBatchSize() == 3
    assert stage.getModel() == f"sha256:{stage._model_file()}"
    red = Image.new("RGB", (32, 32), (255, 0, 0))
    red.paste((0, 0, 255), (0, 0, 16, 16))
    assert stage.predict([red])["raw"][0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0]


def test_from_module_of_equal_networks_is_one_model_and_of_others_another():
    models = [ImageClassifier.from_module(Pooled(seed=s), preprocess=PLAIN).getModel() for s in (0, 0, 1)]
    assert models[0] == models[1] != models[2]


def test_labels_and_preprocess_params_override_the_file(classifier):
    stage = classifier.copy().setLabels(list("wxyz"))
    frame, own = stage.predict([encoded(1)]), classifier.predict([encoded(1)])
    assert frame["predictedLabel"][0] == "wxyz"["abcd".index(own["predictedLabel"][0])]
    assert np.array_equal(frame["probability"][0], own["probability"][0])

    darker = Preprocess(resize=(32, 32), crop=None, mean=(0.5, 0.5, 0.5), std=(1, 1, 1))
    stage.setPreprocess(darker)
    assert not np.allclose(stage.predict([encoded(1)])["probability"][0], own["probability"][0])
    assert stage.predict([encoded(1)])["predictedLabel"][0] in "wxyz"

    stage.clear(stage.preprocess)
    stage.clear(stage.labels)
    pd.testing.assert_frame_equal(stage.predict([encoded(1)]), own)


def test_labels_that_do_not_fit_are_an_error_with_both_numbers(classifier):
    with pytest.raises(ModelError, match=r"3 labels .* 4 outputs"):
        classifier.copy().setLabels(list("abc")).predict([encoded(1)])


def test_an_unset_model_is_an_error_that_names_the_param():
    with pytest.raises(ParamError, match=r"Param model is not set.*setModel"):
        ImageClassifier().predict([encoded(1)])


def test_an_overwritten_file_is_read_again_only_when_the_model_is_set_again(tmp_path):
    path = tmp_path / "net.pt2"

    def save(seed):
        save_model(Pooled(seed=seed), path, preprocess=PLAIN)

    def raw(stage):
        return stage.predict([encoded(1)])["raw"][0]

    save(0)
    stage = ImageClassifier(model=str(path), rawPredictionCol="raw")
    np.testing.assert_allclose(raw(stage), expected(1, Pooled(seed=0)), atol=0.02)
    save(1)
    np.testing.assert_allclose(raw(stage), expected(1, Pooled(seed=0)), atol=0.02)
    stage.setBatchSize(2)
    np.testing.assert_allclose(raw(stage), expected(1, Pooled(seed=0)), atol=0.02)
    stage.setModel(str(path))
    np.testing.assert_allclose(raw(stage), expected(1, Pooled(seed=1)), atol=0.02)
    path.unlink()
    np.testing.assert_allclose(raw(stage), expected(1, Pooled(seed=1)), atol=0.02)


def test_copies_share_the_held_file_unless_the_copy_sets_another_model(tmp_path, monkeypatch):
    first, second = tmp_path / "first.pt2", tmp_path / "second.pt2"
    save_model(Pooled(seed=0), first, preprocess=PLAIN)
    save_model(Pooled(seed=1), second, preprocess=PLAIN)
    stage, other = ImageClassifier(model=str(first)), ImageClassifier(model=str(second))
    held = stage._model_file()
    first.write_bytes(b"no model file any more")

    assert stage.copy()._model_file() == held
    assert stage.copy({stage.batchSize: 2})._model_file() == held
    assert stage.copy({stage.model: str(second)})._model_file() == other._model_file() != held
    assert stage.copy({stage.labels: list("wxyz"), stage.model: str(second)})._model_file() not in (
        held,
        other._model_file(),
    )
    # A Pipeline's copy hands each stage the extra params of the others.
    assert stage.copy({other.model: str(second), other.labels: list("wxyz")})._model_file() == held
    with pytest.raises(ModelError):
        stage.copy({stage.model: str(first)})._model_file()
    assert stage._model_file() == held


def test_a_held_file_that_left_the_cache_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "cache"))
    stage = ImageClassifier.from_module(Pooled(seed=77), preprocess=PLAIN)
    store.path_of(stage._model_file()).unlink()
    with pytest.raises(ModelError, match="set the stage's model again"):
        stage.predict([encoded(1)])


def test_an_unchanged_stage_resolves_its_model_once(tmp_path, monkeypatch):
    save_model(Pooled(), tmp_path / "net.pt2", preprocess=PLAIN)
    calls = []
    resolve = sources.resolve
    monkeypatch.setattr(sources, "resolve", lambda *args: calls.append(1) or resolve(*args))
    stage = ImageClassifier(model=str(tmp_path / "net.pt2"))
    for _ in range(3):
        stage.predict([encoded(1)])
    stage.setHandleInvalid("skip").predict([encoded(1)])
    assert len(calls) == 1


ALONE = """
import base64, sys
from torch import nn
from gpuml import ImageClassifier, Preprocess
class Net(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))
preprocess = Preprocess(resize=(8, 8), crop=None, mean=(0, 0, 0), std=(1, 1, 1))
stage = ImageClassifier.from_module(Net(), preprocess=preprocess, labels=["red", "green", "blue"])
print(stage.predict([base64.b64decode(sys.argv[1])])["predictedLabel"].tolist())
from pyspark import SparkContext
from pyspark.sql import SparkSession
print(SparkContext._gateway, SparkContext._active_spark_context, SparkSession._instantiatedSession)
"""


def test_predict_of_a_class_in_main_starts_no_spark_and_no_java(tmp_path):
    image = io.BytesIO()
    Image.new("RGB", (9, 9), (10, 200, 30)).save(image, "PNG")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "JAVA_HOME"},
        "PATH": str(tmp_path),  # no Java is to be found
        "GPUML_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(gpuml.__file__).parents[1]),
    }
    command = [sys.executable, "-c", ALONE, base64.b64encode(image.getvalue()).decode()]
    made = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert made.stdout.splitlines() == ["['green']", "None None None"], made.stderr
