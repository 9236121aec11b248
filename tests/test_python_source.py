"""python:package.module:function, the one source without a model file: each process builds the network."""

import json
import logging

import numpy as np
import pytest
from conftest import PLAIN, Pooled, encoded, picture
from pyspark.ml import Pipeline, PipelineModel

from gpuml import DeviceMemoryError, ImageClassifier, ModelError, ModelFileError, ParamError, Preprocess
from gpuml.worker import cache

SOURCE = """
import torch
from pathlib import Path
from torch import nn
with open(Path(__file__).with_name("imported"), "a") as file:
    file.write("x")

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 3)
    def forward(self, x):
        return self.linear(x.mean((2, 3)))

def make():
    with open(Path(__file__).with_name("made"), "a") as file:
        file.write("x")
    return Own().double().train()

class Nested:
    make = staticmethod(make)

def fails():
    return 1 / 0

def other():
    return "a network"

def scripted():
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Own())

def memory():
    raise torch.OutOfMemoryError("no room")

def mixes():
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(0))
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """A module of the user's, importable in this process; its name is new in every test."""
    name = f"own_{request.node.name.partition('[')[0][5:45]}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cache, "_networks", type(cache._networks)())
    monkeypatch.delenv("GPUML_TRUST_PYTHON", raising=False)
    return name


def count(tmp_path, what):
    path = tmp_path / what
    return len(path.read_text()) if path.exists() else 0


def stage(module, function="make", **params):
    return ImageClassifier(model=f"python:{module}:{function}", preprocess=PLAIN, rawPredictionCol="raw", **params)


PHOTOS = [picture(seed) for seed in range(3)]


@pytest.mark.parametrize("function", ["make", "Nested.make", "scripted"])
def test_the_functions_network_answers_in_float32_and_evaluation_mode(module, function):
    answers = stage(module, function, labels=list("abcd")).predict(PHOTOS)
    expected = ImageClassifier.from_module(
        Pooled(), preprocess=PLAIN, labels=list("abcd"), rawPredictionCol="raw"
    ).predict(PHOTOS)
    assert answers.predictedLabel.tolist() == expected.predictedLabel.tolist()
    np.testing.assert_allclose(np.stack(answers.raw), np.stack(expected.raw), rtol=1e-5)


def test_one_network_per_source_labels_and_preprocess(module, tmp_path):
    for _ in range(2):
        stage(module).predict(PHOTOS)
    assert count(tmp_path, "made") == 1
    stage(module, labels=list("abcd")).predict(PHOTOS)
    assert count(tmp_path, "made") == 2


def test_nothing_is_imported_on_the_driver_for_a_transform(spark, module, tmp_path):
    frame = spark.createDataFrame([(encoded(0),)], "content binary")
    assert "probability" in stage(module).transform(frame).columns
    assert count(tmp_path, "imported") == 0


def test_a_job_runs_it_with_what_spark_sent_to_the_workers(spark, module, tmp_path):
    spark.addArtifacts(str(tmp_path / f"{module}.py"), pyfile=True)
    frame = spark.createDataFrame([(encoded(seed),) for seed in range(3)], "content binary").coalesce(1)
    rows = stage(module).transform(frame).collect()
    local = stage(module).predict([encoded(seed) for seed in range(3)])
    np.testing.assert_allclose([row.raw.toArray() for row in rows], np.stack(local.raw), rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fails", "the function failed: ZeroDivisionError"),
        ("other", "returned a str, not a torch.nn.Module"),
        ("mixes", "gives torch.float32 of shape"),
        ("missing", "cannot be imported here"),
    ],
)
def test_what_a_function_gives_is_checked_before_the_first_row(module, function, reason):
    with pytest.raises(ModelError, match=reason):
        stage(module, function).predict(PHOTOS)


def test_a_full_device_is_the_devices_trouble(module):
    with pytest.raises(DeviceMemoryError, match=rf"python:{module}:memory"):
        stage(module, "memory").predict(PHOTOS)


def test_labels_of_another_number_are_refused_with_both(module):
    with pytest.raises(ModelError, match=r"2 labels .* 4 outputs"):
        stage(module, labels=["a", "b"]).predict(PHOTOS)


def test_a_module_that_is_not_there_says_what_to_do():
    with pytest.raises(ModelError, match=r"cannot be imported here.*pyfile=True"):
        stage("no_such_module_of_ours").predict(PHOTOS)


@pytest.mark.parametrize(
    "model", ["python:", "python:net", "python:net:", "python::make", "python:net.py:make()", "python:/a/net.py:make"]
)
def test_a_source_that_names_no_function_is_refused_with_the_form(model):
    with pytest.raises(ModelError, match=r"write 'python:package\.module:function'"):
        ImageClassifier(model=model, preprocess=PLAIN).predict(PHOTOS)


def test_a_preprocess_is_needed_and_weights_are_refused(module):
    with pytest.raises(ParamError, match="setPreprocess"):
        ImageClassifier(model=f"python:{module}:make").predict(PHOTOS)
    with pytest.raises(ParamError, match="loads its own"):
        stage(module, weights="w.pth").predict(PHOTOS)


# --- saved and loaded ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(spark, module, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "gpuml"):
        stage(module).write().overwrite().save(str(tmp_path / "stage"))
    assert "saved by name alone" in caplog.text
    return str(tmp_path / "stage")


def refused(loaded, module):
    with pytest.raises(ParamError, match=rf"python:{module}:make.*GPUML_TRUST_PYTHON=1"):
        loaded.predict(PHOTOS)


def test_a_loaded_stage_runs_no_code_until_it_is_trusted(saved, spark, module, tmp_path, monkeypatch):
    loaded = ImageClassifier.load(saved)
    refused(loaded, module)
    frame = spark.createDataFrame([(encoded(0),)], "content binary")
    with pytest.raises(ParamError, match="GPUML_TRUST_PYTHON=1"):
        loaded.transform(frame)
    refused(loaded.copy(), module)
    refused(loaded.copy({loaded.labels: list("abcd")}), module)
    refused(loaded.setPreprocess(Preprocess(resize=(16, 16), crop=None)), module)
    assert count(tmp_path, "imported") == 0

    monkeypatch.setenv("GPUML_TRUST_PYTHON", "1")
    first, second = ImageClassifier.load(saved).predict(PHOTOS), stage(module).predict(PHOTOS)
    np.testing.assert_array_equal(np.stack(first.raw), np.stack(second.raw))


def test_setting_the_model_again_is_the_users_own_word(saved, module):
    loaded = ImageClassifier.load(saved)
    assert len(loaded.setModel(loaded.getModel()).predict(PHOTOS)) == 3


def test_a_grid_of_params_is_no_users_word(saved, module):
    """A CrossValidator's grid comes from its file, too; and a default from the stage's."""
    loaded = ImageClassifier.load(saved)
    refused(loaded.copy({loaded.model: loaded.getModel()}), module)
    loaded._setDefault(model=loaded.getModel())
    loaded.clear(loaded.model)
    refused(loaded, module)


def test_a_loaded_pipeline_is_refused_as_well(spark, module, tmp_path):
    frame = spark.createDataFrame([(encoded(0),)], "content binary")
    Pipeline(stages=[stage(module)]).fit(frame).write().overwrite().save(str(tmp_path / "pipeline"))
    with pytest.raises(ParamError, match="GPUML_TRUST_PYTHON=1"):
        PipelineModel.load(str(tmp_path / "pipeline")).transform(frame)


def test_a_loaded_stage_can_be_saved_again_and_stays_refused(saved, module, tmp_path):
    ImageClassifier.load(saved).write().overwrite().save(str(tmp_path / "again"))
    refused(ImageClassifier.load(str(tmp_path / "again")), module)


def test_a_model_file_in_the_metadata_does_not_make_code_trusted(saved, spark, module, tmp_path):
    """A crafted folder: the hash of a model in the cache, and the name of code."""
    held = ImageClassifier.from_module(Pooled(), preprocess=PLAIN)._held
    part = next((tmp_path / "stage" / "metadata").glob("part-*"))
    metadata = json.loads(part.read_text())
    metadata["gpuml"] = {"sha256": held, "chunks": 1}
    part.write_text(json.dumps(metadata))
    part.with_name(f".{part.name}.crc").unlink()
    refused(ImageClassifier.load(saved), module)


@pytest.mark.parametrize("where", ["paramMap", "defaultParamMap"])
def test_loading_reads_no_file_that_the_metadata_names(saved, tmp_path, where):
    (tmp_path / "secret.txt").write_text("hunter2")
    part = next((tmp_path / "stage" / "metadata").glob("part-*"))
    metadata = json.loads(part.read_text())
    metadata[where]["labels"] = str(tmp_path / "secret.txt")
    part.write_text(json.dumps(metadata))
    part.with_name(f".{part.name}.crc").unlink()
    with pytest.raises(ModelFileError, match="no list of names"):
        ImageClassifier.load(saved)


def test_the_driver_says_what_a_worker_lacks(spark, module):
    frame = spark.createDataFrame([(encoded(0),)], "content binary")
    with pytest.raises(Exception, match=r"cannot be imported here.*every node"):
        ImageClassifier(model="python:not_on_workers:make", preprocess=PLAIN).transform(frame).collect()
