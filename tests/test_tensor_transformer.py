"""TensorTransformer in Spark: columns of every kind, rows that fail, Pipelines, evaluators, and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import PLAIN, Pooled, WideAndDeep
from plans import udf_rows
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from torch import nn

from gpuml import ImageClassifier, ModelError, ParamError, RowError, TensorTransformer, register_udf, save_model
from gpuml.spark import arrays

SAMPLES = {"wide": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "ids": torch.tensor([1, 2, 3])}
LABELS = ["ant", "bee", "cat"]


class Mixed(nn.Module):
    """An input of every kind that a column can be; two outputs."""

    def forward(self, age, id, small, even, pair, vector, grid):
        number = age + id + small + even
        return number, torch.cat([pair * number[:, None], vector, grid.flatten(1)], 1)


MIXED = {
    "age": torch.tensor([1.0, 2.0]),
    "id": torch.tensor([1, 2]),
    "small": torch.tensor([1, 2], dtype=torch.int16),
    "even": torch.tensor([True, False]),
    "pair": torch.randn(2, 2),
    "vector": torch.randn(2, 3),
    "grid": torch.randn(2, 2, 2),
}


@pytest.fixture(scope="module")
def frame(spark):
    """Rows of three partitions: `f` takes 1 row to 3, 0 and 6 is null, 2 has 3 numbers, 4 a null."""
    i = F.col("id")
    f = F.array(*(F.sin(i + j) for j in range(4)))
    holed = (
        F.when(i == 6, None)
        .when(i == 2, F.slice(f, 1, 3))
        .when(i == 4, F.array(F.lit(1.0), F.lit(None), F.lit(1.0), F.lit(1.0)))
        .otherwise(f)
    )
    return spark.range(0, 9, 1, 3).select(
        "id",
        (i % 10).cast("int").alias("ids"),
        f.alias("wide"),
        holed.alias("f"),
        (i % 2).cast("double").alias("label"),
    )


@pytest.fixture(scope="module")
def stage():
    return TensorTransformer.from_module(WideAndDeep(), inputs=SAMPLES, labels=LABELS)


def in_order(frame):
    """Its rows by id: a sort of Spark's would run the network twice."""
    return sorted(frame.collect(), key=lambda row: row.id)


def eager(rows):
    with torch.inference_mode():
        return WideAndDeep().eval()(torch.tensor([row.wide for row in rows]), torch.tensor([row.ids for row in rows]))


# --- columns in, columns out ------------------------------------------------------------------------------------------


def test_columns_of_every_kind_are_the_tensors_that_eager_torch_is_given(spark, tmp_path):
    i = F.col("id")
    grid = F.array(F.array(i * 1.5, i * 2.5), F.array(i * 3.5, i * 4.5))
    rows = spark.range(0, 6, 1, 2).select(
        (i / 4).alias("years"),
        "id",
        i.cast("tinyint").alias("small"),
        (i % 2 == 0).alias("even"),
        F.array(i, i + 1).alias("pair"),
        F.when(i < 5, array_to_vector(F.array(i / 3, i / 5, i / 7))).alias("a.vector"),
        grid.alias("grid"),
    )
    save_model(Mixed(), tmp_path / "net.pt2", inputs=MIXED, outputs=["number", "all"])
    stage = TensorTransformer(model=str(tmp_path / "net.pt2"), inputMapping={"years": "age", "a.vector": "vector"})
    out = stage.transform(rows)
    assert out.columns == [*rows.columns, "number", "all", "outputError"]
    assert [(name, kind) for name, kind in out.dtypes if name in ("number", "all")] == [
        ("number", "float"),
        ("all", "array<float>"),
    ]
    *made, null = in_order(out)
    assert [row.id for row in made] == list(range(5))
    assert (null.number, null.outputError) == (None, "null_input: input 'vector' is null")
    given = {
        name: torch.tensor([list(row[column]) if name == "vector" else row[column] for row in made])
        for name, column in zip(MIXED, rows.columns, strict=True)
    }
    given = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    number, everything = Mixed()(**given)
    assert [row.number for row in made] == number.tolist()
    assert [row["all"] for row in made] == everything.tolist()
    assert {row.outputError for row in made} == {None}


def test_outputs_are_chosen_named_and_made_vectors_and_classes_come_from_the_first(frame, stage):
    more = stage.copy().setOutputMapping({"twice": "double", "logits": "score"}).setOutputVectors(True)
    more.setParams(predictionCol="p", predictedLabelCol="name", probabilityCol="prob", rawPredictionCol="raw")
    more.setParams(errorCol="", deviceCol="device", batchSize=2)
    out = more.transform(frame)
    assert out.columns[5:] == ["score", "double", "p", "name", "prob", "raw", "device"]
    assert out.schema["score"].dataType == out.schema["prob"].dataType == VectorUDT()
    kept = out.where("double > 0")
    assert udf_rows(kept) == 9  # once per row, whatever is filtered
    rows = in_order(out)
    logits, _, twice = eager(rows).values()
    np.testing.assert_allclose([row.score.toArray() for row in rows], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([row.prob.toArray() for row in rows], logits.softmax(1), rtol=1e-5, atol=1e-6)
    assert [row.raw for row in rows] == [row.score for row in rows]
    assert [row.double for row in rows] == twice.tolist()
    assert [row.p for row in rows] == logits.argmax(1).tolist()
    assert [row.name for row in rows] == [LABELS[i] for i in logits.argmax(1)]
    assert {row.device for row in rows} == {"cpu"}


REASONS = {
    2: "bad_shape: input 'wide' takes an array of length 4, and was given 3",
    4: "bad_value: input 'wide' has a null in its array",
    6: "null_input: input 'wide' is null",
}


@pytest.mark.parametrize("arrow", [True, False])
def test_rows_that_do_not_fit_keep_their_place_with_nulls_and_the_reason(frame, stage, arrow, monkeypatch):
    if not arrow:  # before Spark 4.1
        monkeypatch.setattr(arrays, "arrow_udf", None)
    holes = frame.withColumn("ids", F.when(F.col("id") != 8, F.col("ids")))
    rows = in_order(stage.copy().setInputMapping({"f": "wide"}).transform(holes))
    reasons = {**REASONS, 8: "null_input: input 'ids' is null"}
    if not arrow:
        del reasons[4]  # pandas makes a NaN of it
    assert {row.id: row.outputError for row in rows if row.outputError} == reasons
    good = [row for row in rows if row.id not in {**reasons, 4: ""}]
    made = eager(good)
    for name, values in made.items():
        np.testing.assert_allclose([row[name] for row in good], values, rtol=1e-5, atol=1e-6)
        assert [row.id for row in rows if row[name] is None] == list(reasons)


def test_failed_rows_are_dropped_or_end_the_job(frame, stage):
    mapped = stage.copy().setInputMapping({"f": "wide"})
    kept = mapped.copy({mapped.handleInvalid: "skip"}).transform(frame)
    assert sorted(row.id for row in kept.collect()) == [0, 1, 3, 5, 7, 8]
    failing = mapped.copy({mapped.handleInvalid: "error"}).transform(frame.where("id = 2"))
    with pytest.raises(Exception, match=r"partition \d row 0: bad_shape: input 'wide' takes an array of length 4"):
        failing.collect()


def test_predict_is_transform_without_spark(frame, stage):
    more = stage.copy().setParams(inputMapping={"f": "wide"}, predictionCol="p")
    rows = in_order(more.transform(frame))
    local = more.predict(pd.DataFrame({name: [row[name] for row in rows] for name in ("ids", "f")}, list("abcdefghi")))
    assert local.index.tolist() == list("abcdefghi")
    assert local.columns.tolist() == ["logits", "hidden", "twice", "p", "outputError"]
    for row, (_, given) in zip(rows, local.iterrows(), strict=True):
        assert row.outputError == given.outputError
        if row.outputError is None:
            assert (row.twice, row.p) == (given.twice, given.p)
            np.testing.assert_allclose(row.logits, given.logits, rtol=1e-5)
            assert given.hidden.shape == (2, 5)
            assert given.hidden.dtype == np.float32
    holed = pd.DataFrame({"ids": [1, None], "f": [np.ones(4)] * 2}, dtype=object)
    assert more.setHandleInvalid("skip").predict(holed).index.tolist() == [0]
    with pytest.raises(RowError, match=r"bad_shape: row 'x': input 'wide' takes an array of length 4, and was given 2"):
        more.setHandleInvalid("error").predict(pd.DataFrame({"ids": [1], "f": [[1.0, 2.0]]}, index=["x"]))


def test_predict_refuses_what_transform_would(stage):
    for cells, said in [
        ({"ids": [1]}, r"takes column 'wide': there is no such column among \['ids'\]"),
        ({"ids": [1.5], "wide": [[1.0] * 4]}, "must be 'bigint', and not every value is one"),
        ({"ids": [1], "wide": [1.0]}, "must be 'array<float>', arrays of length 4, or a Vector"),
        ({"ids": ["1"], "wide": [[1.0] * 4]}, "is of type string; it must be 'bigint'"),
        ({"ids": np.array([2**63], np.uint64), "wide": [[1.0] * 4]}, "is of type uint64; it must be 'bigint'"),
        ({"ids": [1], "wide": [["1"] * 4]}, "is of type list<.*string>; it must be 'array<float>'"),
        ({"ids": [1], "wide": [[1.0, "2"]]}, "are not numbers"),
    ]:
        with pytest.raises(ParamError, match=said):
            stage.predict(pd.DataFrame(cells))
    with pytest.raises(ParamError, match="give one of pandas"):
        stage.predict([[1]])
    vectors = pd.DataFrame({"ids": [1], "wide": [Vectors.dense(1, 2, 3, 4)]})
    assert stage.predict(vectors).outputError.tolist() == [None]


# --- before any job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "columns", "said"),
    [
        ({}, {"wide": None}, r"column 'wide': there is no such column.*setInputMapping\(\{'column': 'wide'\}\)"),
        ({"inputMapping": {"x": "wide"}}, {}, "input 'wide' takes column 'x': there is no such column"),
        ({"inputMapping": {"wide": "wid"}}, {}, "inputMapping: the model has no input 'wid'. Did you mean 'wide'"),
        ({"inputMapping": {"a": "wide", "b": "wide"}}, {}, "has a name twice on its right side"),
        ({"inputMapping": "wide"}, {}, r"inputMapping='wide' is no dict of names; write \{'column': 'input'\}"),
        ({"outputMapping": {"logit": "x"}}, {}, "the model has no output 'logit'. Did you mean 'logits'"),
        ({"outputMapping": {"logits": ""}}, {}, "is no dict of names"),
        ({}, {"wide": "cast(id as string)"}, r"is of type string; it must be 'array<float>'.*cast\('array<float>'\)"),
        ({}, {"wide": "map(id, id)"}, "is of type map<bigint,bigint>"),
        ({}, {"wide": "cast(id as double)"}, r"'array<float>', arrays of length 4, or a Vector\..*VectorAssembler"),
        ({}, {"wide": "array(wide)"}, "is of type array<array<double>>; it must be 'array<float>'"),
        ({}, {"wide": "array(cast(1 as decimal(9,2)))"}, r"is of type array<decimal\(9,2\)>"),
        ({}, {"ids": "array(ids)"}, r"it must be 'bigint'\. Give one number of it"),
        ({}, {"ids": "cast(ids as double)"}, "must be 'bigint', and not every value is one.*cast it to 'bigint'"),
        ({}, {"logits": "1"}, r"outputMapping\['logits'\]='logits': .* has a column .* setOutputMapping\(\.\.\.\)$"),
        ({}, {"outputError": "1"}, r"errorCol='outputError'.*setErrorCol\(\.\.\.\), or '' for none"),
        ({"outputMapping": {"twice": "y"}, "predictionCol": "Y"}, {}, r"predictionCol='Y' and .*='y' are one name"),
    ],
)  # fmt: skip
def test_what_the_driver_can_know_is_refused_before_any_job(frame, stage, params, columns, said):
    rows = frame
    for name, value in columns.items():
        rows = rows.drop(name) if value is None else rows.withColumn(name, F.expr(value))
    with pytest.raises(ParamError, match=said):
        stage.copy().setParams(**params).transform(rows)


def test_vectors_of_another_size_are_refused_where_their_metadata_tell_it(frame, stage):
    short = VectorAssembler(inputCols=["id", "label"], outputCol="two").transform(frame)
    with pytest.raises(ParamError, match=r"column 'two', whose Vectors have 2 numbers; it must be .* of length 4"):
        stage.copy().setInputMapping({"two": "wide"}).transform(short)
    narrow = TensorTransformer.from_module(nn.Embedding(4, 2), inputs={"ids": torch.tensor([[1, 2], [3, 0]])})
    with pytest.raises(ParamError, match=r"is of type a Vector; it must be 'array<bigint>'.* not every value is one"):
        narrow.setInputMapping({"two": "ids"}).transform(short)


def test_classes_need_a_first_output_that_has_them(frame):
    wide = {"wide": SAMPLES["wide"]}
    flat = TensorTransformer.from_module(nn.Flatten(0), inputs={"wide": torch.randn(2, 1)}, predictionCol="p")
    with pytest.raises(
        ParamError, match=r"predictionCol='p': classes are made .* output: float32 \(batch\), not float"
    ):
        flat.transform(frame)
    one = TensorTransformer.from_module(nn.Linear(4, 1), inputs=wide, probabilityCol="p")
    with pytest.raises(ParamError, match=r"probabilityCol='p': softmax over one class.*activation='sigmoid'"):
        one.transform(frame)


def test_stages_and_models_that_do_not_fit_name_those_that_do(spark, stage, tmp_path):
    with pytest.raises(ParamError, match=r"the Param model is not set; e\.g\. setModel\('/path/of/model\.pt2'\)$"):
        TensorTransformer().transform(spark.range(1))
    with pytest.raises(ModelError, match="ImageClassifier"):
        TensorTransformer(model="torchvision:resnet18").transform(spark.range(1))
    save_model(Pooled(), tmp_path / "images.pt2", preprocess=PLAIN)
    with pytest.raises(ModelError, match="takes pixels of one size: ImageClassifier"):
        TensorTransformer(model=str(tmp_path / "images.pt2")).transform(spark.range(1))
    images = spark.createDataFrame([(b"",)], "content binary")
    with pytest.raises(ModelError, match="TensorTransformer runs it"):
        ImageClassifier(model=stage.getModel()).transform(images)
    with pytest.raises(ParamError, match=r"stage is a TensorTransformer; give a stage of gpuml over images"):
        register_udf(spark, "f", stage)


# --- among Spark's own ------------------------------------------------------------------------------------------------


def test_copies_with_other_params_leave_the_stage_as_it_was(stage):
    other = stage.copy({stage.batchSize: 3, stage.inputMapping: {"f": "wide"}, stage.labels: ["x", "y", "z"]})
    assert (other.getBatchSize(), other.getInputMapping(), other.getLabels()) == (3, {"f": "wide"}, ["x", "y", "z"])
    assert (stage.getBatchSize(), stage.getInputMapping(), stage.getLabels()) == (64, {}, [])
    assert stage.copy()._held == stage._held
    assert other._card().labels == ("x", "y", "z")
    assert stage._card().labels == tuple(LABELS)
    other.getInputMapping()["g"] = "ids"
    assert other.getInputMapping() == {"f": "wide"}


def test_a_learner_after_it_is_saved_and_loaded_in_a_pipeline(frame, stage, tmp_path):
    first = stage.copy().setParams(inputMapping={"f": "wide"}, handleInvalid="skip", outputVectors=True)
    first.setOutputMapping({"logits": "features"})
    model = Pipeline(stages=[first, LogisticRegression(maxIter=1)]).fit(frame)
    before = in_order(model.transform(frame).select("id", "features", "prediction"))
    assert [row.id for row in before] == [0, 1, 3, 5, 7, 8]
    (tmp_path / "model").mkdir()
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert loaded.stages[0].extractParamMap() == first.extractParamMap()
    assert in_order(loaded.transform(frame).select("id", "features", "prediction")) == before


def test_evaluators_read_its_columns(frame):
    class Sure(nn.Module):
        """Right but for row 3."""

        def forward(self, id):
            one = ((id % 2) ^ (id == 3)).float()
            return torch.stack([1 - one, one], 1)

    scored = TensorTransformer.from_module(
        Sure(), inputs={"id": torch.tensor([0, 1, 2])}, predictionCol="prediction", rawPredictionCol="rawPrediction"
    ).setHandleInvalid("skip")
    rows = scored.transform(frame.unionByName(frame.limit(1).withColumn("id", F.lit(None).cast("bigint"))))
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(rows) == pytest.approx(8 / 9)
    assert BinaryClassificationEvaluator().evaluate(rows) == pytest.approx((4 * 5 - 5 / 2) / 20)
