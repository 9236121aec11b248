"""Save and load: alone and in Pipelines, every Param, in a new process, after sources and cache are gone."""

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from conftest import PLAIN, Pooled, encoded
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.feature import SQLTransformer

from gpuml import ImageClassifier, ModelError, ModelFileError, ParamError, Preprocess, save_model
from gpuml.models import store

LABELS = ["ant", "bee", "cat", "dog"]


@pytest.fixture(scope="module")
def frame(spark):
    """Good, null and broken rows, one partition: rows in one order, so that equal means bit-equal."""
    data = [encoded(0), None, encoded(1), b"broken", *(encoded(i) for i in range(2, 8))]
    return spark.createDataFrame(
        [(i, d, float(i % 2)) for i, d in enumerate(data)], "id int, content binary, label double"
    ).coalesce(1)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder that this test may delete."""
    monkeypatch.setenv("GPUML_HOME", str(tmp_path / "own-home"))
    return tmp_path / "own-home"


@pytest.fixture
def model_path(tmp_path):
    path = tmp_path / "source" / "net.pt2"
    save_model(Pooled(), path, labels=LABELS, preprocess=PLAIN)
    return path


def in_new_process(script, home, *args):
    """Runs a script with its own cache."""
    env = dict(os.environ, GPUML_HOME=str(home))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=home.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metadata(path):
    part = next(p for p in (pathlib.Path(path) / "metadata").iterdir() if p.name.startswith("part-"))
    return json.loads(part.read_text())


def all_params(model):
    """A value other than the default for every Param."""
    return {
        "inputCol": "image", "model": str(model), "weights": "", "batchSize": 3, "labels": ["w", "x", "y", "z"],
        "preprocess": Preprocess(resize=40, crop=32).to_json(), "device": "cpu", "dtype": "bfloat16",
        "decodeThreads": 2, "readPaths": True, "maxPixels": 999999, "alpha": "drop", "scaledDecode": 1.5,
        "handleInvalid": "skip", "errorCol": "e", "deviceCol": "d", "timingCol": "s", "predictionCol": "p",
        "predictedLabelCol": "l", "probabilityCol": "q", "rawPredictionCol": "r", "topKCol": "t", "topK": 2,
    }  # fmt: skip


def test_every_param_uid_and_held_model_survive(spark, model_path, tmp_path):
    stage = ImageClassifier(**all_params(model_path))
    assert {p.name for p in stage.params} == set(all_params(model_path))
    stage.save(str(tmp_path / "s"))
    loaded = ImageClassifier.load(str(tmp_path / "s"))
    assert loaded.uid == stage.uid
    assert loaded.extractParamMap() == stage.extractParamMap()
    assert {p.name: loaded.isSet(p) for p in loaded.params} == {p.name: stage.isSet(p) for p in stage.params}
    assert loaded._held == stage._held is not None


def test_a_default_stage_survives_without_a_model(spark, tmp_path):
    ImageClassifier().save(str(tmp_path / "s"))
    loaded = ImageClassifier.load(str(tmp_path / "s"))
    assert not any(loaded.isSet(p) for p in loaded.params)
    assert not loaded.isDefined(loaded.model)
    assert loaded.getErrorCol() == "error"


def test_the_recorded_class_is_importable_by_its_path(spark, tmp_path):
    ImageClassifier().save(str(tmp_path / "s"))
    module, _, name = metadata(tmp_path / "s")["class"].rpartition(".")
    assert (module, name) == ("gpuml", "ImageClassifier")
    assert getattr(importlib.import_module(module), name) is ImageClassifier


def test_save_refuses_an_existing_path_and_overwrite_replaces_it(spark, model_path, tmp_path):
    stage = ImageClassifier(model=str(model_path))
    path = str(tmp_path / "s")
    stage.save(path)
    with pytest.raises(Exception, match="already exists"):
        stage.save(path)
    other = ImageClassifier.from_module(Pooled(seed=1), preprocess=PLAIN)
    other.write().overwrite().save(path)
    assert ImageClassifier.load(path)._held == other._held
    assert ImageClassifier.read().load(path).uid == other.uid


@pytest.mark.parametrize("position", ["first", "middle", "last", "nested", "alone"])
def test_pipelines_predict_the_same_after_the_sources_are_gone(spark, frame, model_path, tmp_path, own_cache, position):
    stage = ImageClassifier(model=str(model_path), rawPredictionCol="raw", topKCol="top")
    before = SQLTransformer(statement="SELECT *, id * 2 AS twice FROM __THIS__")
    after = SQLTransformer(statement="SELECT *, prediction + 1 AS next FROM __THIS__")
    stages = {
        "first": [stage, after],
        "middle": [before, stage, after],
        "last": [before, stage],
        "nested": [before, Pipeline(stages=[stage, after])],
        "alone": [stage],
    }[position]
    pipeline = Pipeline(stages=stages)
    fitted = pipeline.fit(frame)
    wanted = fitted.transform(frame).collect()
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    shutil.rmtree(model_path.parent)
    shutil.rmtree(own_cache)
    assert PipelineModel.load(str(tmp_path / "fitted")).transform(frame).collect() == wanted
    assert PipelineModel.read().load(str(tmp_path / "fitted")).transform(frame).collect() == wanted
    assert Pipeline.load(str(tmp_path / "pipeline")).fit(frame).transform(frame).collect() == wanted


def test_a_new_process_that_imports_only_pyspark_predicts_bit_equal(spark, frame, model_path, tmp_path, own_cache):
    fitted = Pipeline(stages=[ImageClassifier(model=str(model_path), rawPredictionCol="raw")]).fit(frame)
    wanted = [row.raw and row.raw.toArray().tolist() for row in fitted.transform(frame).collect()]
    fitted.write().save(str(tmp_path / "fitted"))
    frame.write.parquet(str(tmp_path / "frame"))
    shutil.rmtree(model_path.parent)
    shutil.rmtree(own_cache)
    out = in_new_process(
        """
        import json, sys
        from pyspark.ml import PipelineModel
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
        model = PipelineModel.load(sys.argv[1])
        rows = model.transform(spark.read.parquet(sys.argv[2]).coalesce(1)).collect()
        print("ROWS" + json.dumps([row.raw and row.raw.toArray().tolist() for row in rows]))
        """,
        own_cache, tmp_path / "fitted", tmp_path / "frame",
    )  # fmt: skip
    got = json.loads(out[out.index("ROWS") + 4 :].splitlines()[0])
    assert got == wanted
    assert sum(row is None for row in wanted) == 2


def test_a_loaded_stage_does_not_read_its_source_again(spark, frame, model_path, tmp_path):
    ImageClassifier(model=str(model_path)).save(str(tmp_path / "s"))
    loaded = ImageClassifier.load(str(tmp_path / "s"))
    wanted = loaded.transform(frame).select("predictedLabel").collect()
    save_model(Pooled(seed=7), model_path, labels=["q", "r", "s", "t"], preprocess=PLAIN)
    assert loaded.transform(frame).select("predictedLabel").collect() == wanted
    loaded.setModel(str(model_path))
    labels = {row.predictedLabel for row in loaded.transform(frame).collect()} - {None}
    assert labels <= {"q", "r", "s", "t"}
    assert labels


def test_overwriting_the_path_it_came_from_is_safe(spark, frame, model_path, tmp_path, own_cache):
    path = str(tmp_path / "s")
    ImageClassifier(model=str(model_path)).save(path)
    loaded = ImageClassifier.load(path)
    loaded.write().overwrite().save(path)
    shutil.rmtree(own_cache)
    again = ImageClassifier.load(path)
    assert again.transform(frame).collect() == ImageClassifier(model=str(model_path)).transform(frame).collect()


def test_zero_rows_and_empty_partitions_survive_the_round_trip(spark, frame, model_path, tmp_path):
    ImageClassifier(model=str(model_path)).save(str(tmp_path / "s"))
    loaded = ImageClassifier.load(str(tmp_path / "s"))
    assert loaded.transform(frame.limit(0)).collect() == []
    assert loaded.transform(frame.limit(2).repartition(5)).count() == 2


def test_setting_a_model_param_drops_the_held_file_and_others_keep_it(model_path):
    stage = ImageClassifier(model=str(model_path))
    held = stage._model_file()
    stage.setBatchSize(7).setDevice("cpu")
    assert stage._held == held
    assert stage.copy()._held == held
    assert stage.copy({stage.batchSize: 2})._held == held
    assert stage.copy({stage.labels: ["1", "2", "3", "4"]})._held is None
    assert stage._held == held
    for change in (
        lambda s: s.setLabels([]),
        lambda s: s.setModel(s.getModel()),
        lambda s: s.set(s.weights, ""),
        lambda s: s.clear(s.preprocess),
        lambda s: s.setParams(preprocess=""),
    ):
        copy = stage.copy()
        change(copy)
        assert copy._held is None
        assert stage._held == held


def test_extra_labels_hold_for_one_transform(spark, frame, model_path):
    stage = ImageClassifier(model=str(model_path))
    renamed = stage.transform(frame, {stage.labels: ["W", "X", "Y", "Z"]})
    plain = stage.transform(frame)
    pairs = {(a.predictedLabel, b.predictedLabel) for a, b in zip(plain.collect(), renamed.collect(), strict=True)}
    assert pairs <= {(None, None), ("ant", "W"), ("bee", "X"), ("cat", "Y"), ("dog", "Z")}
    assert len(pairs) > 1


@pytest.mark.parametrize("damage", ["missing", "twice", "changed", "hash", "traversal"])
def test_a_damaged_saved_model_is_refused(spark, model_path, tmp_path, monkeypatch, own_cache, damage):
    monkeypatch.setattr("gpuml.spark.persistence.CHUNK_BYTES", 1000)
    path = tmp_path / "s"
    ImageClassifier(model=str(model_path)).save(str(path))
    shutil.rmtree(own_cache)
    parts = sorted((path / "model").glob("part-*.parquet"))
    assert len(parts) > 2
    if damage == "missing":
        parts[0].unlink()
    elif damage == "twice":
        shutil.copy(parts[0], parts[0].with_name("part-again.parquet"))
    elif damage == "changed":
        rows = spark.read.parquet(str(parts[1])).collect()
        parts[1].unlink()
        rows = [(row.chunk, bytes(reversed(row.data))) for row in rows]
        spark.createDataFrame(rows, "chunk int, data binary").coalesce(1).write.mode("append").parquet(
            str(path / "model")
        )
    else:
        saved = metadata(path)
        old = saved["gpuml"]["sha256"]
        new = "0" * 64 if damage == "hash" else "../../" + old
        part = next(p for p in (path / "metadata").iterdir() if p.name.startswith("part-"))
        part.write_text(part.read_text().replace(old, new))
        for crc in (path / "metadata").glob(".*.crc"):
            crc.unlink()
    for crc in (path / "model").glob(".*.crc"):
        crc.unlink()
    with pytest.raises(ModelFileError):
        ImageClassifier.load(str(path))
    assert not list((own_cache / "models").glob("*")) if (own_cache / "models").exists() else True


def test_a_lost_cache_is_an_error_that_tells_what_to_do(spark, frame, model_path, own_cache):
    stage = ImageClassifier.from_module(Pooled(), preprocess=PLAIN)
    shutil.rmtree(own_cache)
    with pytest.raises(ModelError, match=r"not in the cache.*load the stage again"):
        stage.transform(frame)


def test_a_notebooks_own_class_works_in_a_new_process(spark, frame, tmp_path, own_cache):
    class OnlyHere(torch.nn.Module):
        def forward(self, x):
            return x.amax((2, 3))

    stage = ImageClassifier.from_module(OnlyHere(), preprocess=PLAIN, labels=["red", "green", "blue"])
    wanted = [row.predictedLabel for row in stage.transform(frame).collect()]
    stage.save(str(tmp_path / "s"))
    again = ImageClassifier.load(str(tmp_path / "s"))
    assert [row.predictedLabel for row in again.transform(frame).collect()] == wanted
    assert set(wanted) - {None}


@pytest.mark.parametrize("way", ["learner", "evaluator"])
def test_skip_lets_a_broken_file_stand_before_a_learner_and_an_evaluator(spark, frame, model_path, tmp_path, way):
    """With 'keep' both fail on null Vectors; with 'skip' neither does."""
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    stage = ImageClassifier(model=str(model_path), handleInvalid="skip")
    if way == "learner":
        learner = LogisticRegression(
            featuresCol="probability", predictionCol="p2", probabilityCol="pr2", rawPredictionCol="rp2", maxIter=3
        )
        fitted = Pipeline(stages=[stage, learner]).fit(frame)
        fitted.write().overwrite().save(str(tmp_path / "fitted"))
        rows = PipelineModel.load(str(tmp_path / "fitted")).transform(frame).collect()
        assert len(rows) == 8
        assert all(row.p2 in (0.0, 1.0) for row in rows)
        with pytest.raises(Exception):  # noqa: B017 - Spark's own failure, of whatever class
            Pipeline(stages=[stage.copy({stage.handleInvalid: "keep"}), learner]).fit(frame)
    else:
        scored = stage.transform(frame)
        loss = MulticlassClassificationEvaluator(metricName="logLoss").evaluate(scored)
        wanted = np.mean([-np.log(row.probability[int(row.label)]) for row in scored.collect()])
        assert loss == pytest.approx(wanted, rel=1e-6)


def test_an_unsafe_model_in_a_saved_stage_is_refused_at_load(spark, tmp_path, own_cache):
    """The hash of what was planted is right: whoever changes the chunks can change it too."""
    planted = tmp_path / "planted.pt2"
    torch.save(torch.nn.Linear(1, 1), planted)  # a pickle
    stage = ImageClassifier()
    stage._held = store.add_copy(planted)
    stage.set(stage.model, f"sha256:{stage._held}")
    stage._held = store.hash_of(planted)
    stage.save(str(tmp_path / "s"))
    shutil.rmtree(own_cache)
    with pytest.raises(ModelFileError, match="save_model"):
        ImageClassifier.load(str(tmp_path / "s"))
    assert not list((own_cache / "models").glob("gpuml-*"))


def test_none_is_no_text_and_an_unknown_param_is_named():
    with pytest.raises(ParamError, match=r"errorCol=None.*clear"):
        ImageClassifier().setErrorCol(None)
    assert ImageClassifier.from_module(Pooled(), preprocess=PLAIN, deviceCol=None).getDeviceCol() == ""
    with pytest.raises(ParamError, match="no Param batchsize"):
        ImageClassifier.from_module(Pooled(), preprocess=PLAIN, batchsize=3)


def test_a_pipeline_saved_by_release_0_1_loads_and_predicts(spark, own_cache):
    """tests/data/pipeline-0.1 is kept for good: what one release saves, the next ones load."""
    model = PipelineModel.load(str(pathlib.Path(__file__).parent / "data" / "pipeline-0.1"))
    rows = model.transform(spark.createDataFrame([(encoded(3),), (encoded(4),)], "content binary")).collect()
    assert [row.predictedLabel for row in rows] == ["bee", "bee"]
    assert rows[0].probability.toArray() == pytest.approx([0.0074, 0.7805, 0.0273, 0.1849], abs=1e-3)
    assert rows[1].probability.toArray() == pytest.approx([0.0068, 0.6631, 0.0515, 0.2786], abs=1e-3)
    assert model.stages[0].getTopKCol() == "top"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["paramMap"].update(futureParam=1), "Param 'futureParam'.*upgrade gpuml"),
        (lambda m: m["defaultParamMap"].update(futureParam=1), "Param 'futureParam'.*upgrade gpuml"),
        (lambda m: m.pop("gpuml"), "damaged"),
        (lambda m: m.update(gpuml=None), "damaged"),
        (lambda m: m["gpuml"].update(sha256=5), "damaged"),
        (lambda m: m["gpuml"].update(chunks="1"), "damaged"),
        (lambda m: m.pop("uid"), "damaged"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_with_what_to_do(spark, model_path, tmp_path, change, message):
    ImageClassifier(model=str(model_path)).save(str(tmp_path / "s"))
    saved = metadata(tmp_path / "s")
    change(saved)
    part = next(p for p in (tmp_path / "s" / "metadata").iterdir() if p.name.startswith("part-"))
    part.write_text(json.dumps(saved))
    for crc in (tmp_path / "s" / "metadata").glob(".*.crc"):
        crc.unlink()
    with pytest.raises(ModelFileError, match=message):
        ImageClassifier.load(str(tmp_path / "s"))
