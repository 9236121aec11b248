"""What holds for every stage, by a table of cases: failed rows, columns, Params, copies, Pipelines, saved folders."""

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import PLAIN, Corner, Pooled, encoded, picture
from PIL import Image
from plans import udf_nodes
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from gpuml import ImageClassifier, ImageFeaturizer, ModelFileError, ObjectDetector, ParamError, TensorTransformer

GOOD, NULL, OTHER, BAD, AGAIN = range(5)


@dataclass(frozen=True)
class Case:
    """A stage over rows of five kinds, in their order: GOOD, NULL, OTHER, BAD, and AGAIN, which equals GOOD."""

    name: str
    #: Params by keyword -> a stage that has a model.
    make: Callable[..., Any]
    #: A folder for files -> the cells of the five rows.
    rows: Callable[[Path], Sequence[tuple[Any, ...]]]
    #: Of these cells, as DDL; the first column is the one that goes missing.
    schema: str
    #: Every Param that names an output column -> that column, in the order in which they are added.
    outputs: Mapping[str, str]
    #: The Param that names the input columns.
    reads: str = "inputCol"
    #: Other Params of the case.
    params: Mapping[str, Any] = field(default_factory=dict)
    #: Kinds of error of the rows NULL and BAD.
    kinds: tuple[str, str] = ("null_input", "not_image")
    #: How an error names BAD, when it is the second of two rows.
    bad_row: str = "partition 0 row 1"
    #: The rows -> what predict takes for them.
    local: Callable[[Sequence[tuple[Any, ...]]], Any] = lambda rows: [cells[0] for cells in rows]
    #: Columns before those, which no Param of their own names.
    first: Sequence[str] = ()
    #: What the closure of its UDF may hold beside the Spec.
    closes_over: frozenset[str] = frozenset()

    def stage(self, **params):
        return self.make(**{**self.params, **self.outputs, **params})

    @property
    def column(self):
        return self.schema.split()[0]


# --- the table --------------------------------------------------------------------------------------------------------


@cache
def source():
    """One export for all cases."""
    return ImageClassifier.from_module(Pooled(), labels=["ant", "bee", "cat", "dog"], preprocess=PLAIN).getModel()


def classifier(**params):
    return ImageClassifier(model=source(), **params)


def featurizer(**params):
    return ImageFeaturizer(model=source(), **params)


@cache
def detector_source():
    return ObjectDetector.from_module(Corner(), labels=["background", "corner"]).getModel()


def detector(**params):
    return ObjectDetector(model=detector_source(), **params)


@cache
def tensor_source():
    net, sample = torch.nn.Linear(2, 3), torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    net.load_state_dict({"weight": torch.arange(6.0).reshape(3, 2) / 6, "bias": torch.ones(3)})
    return TensorTransformer.from_module(
        net, inputs={"x": sample}, outputs=["y"], labels=["ant", "bee", "cat"]
    ).getModel()


def transformer(**params):
    return TensorTransformer(model=tensor_source(), **params)


def arrays(_):
    return [([1.0, 2.0],), (None,), ([-3.0, 0.5],), ([1.0],), ([1.0, 2.0],)]


def of_arrays(rows):
    return pd.DataFrame({"x": [cells[0] for cells in rows]})


def files(_):
    return [(encoded(0),), (None,), (encoded(1),), (b"broken",), (encoded(0),)]


def paths(folder):
    named = [(folder / f"{place}.png", content) for place, (content,) in enumerate(files(folder)) if content]
    for path, content in named:
        path.write_bytes(content)
    good, other, bad, again = (str(path) for path, _ in named)
    return [(good,), (None,), (other,), (bad,), (again,)]


def structs(_):
    def struct(seed, cut=0):
        data = np.array(picture(seed))[..., ::-1].tobytes()
        return ((f"{seed}.png", 40, 60, 3, 16, data[cut:]),)

    return [struct(0), (None,), struct(1), struct(3, cut=1), struct(0)]


def of_structs(rows):
    """predict takes no struct: the pictures, and for one that cannot be read, some bytes."""
    return [None if cells[0] is None else of_struct(*cells[0]) for cells in rows]


def of_struct(_, height, width, channels, mode, data):
    return Image.frombytes("RGB", (width, height), data, "raw", "BGR") if len(data) == 3 * height * width else b"broken"


IMAGE = "image struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
SHARED = {"deviceCol": "device", "timingCol": "timing"}
CLASSES = {
    "predictionCol": "prediction",
    "predictedLabelCol": "predictedLabel",
    "probabilityCol": "probability",
    "rawPredictionCol": "raw",
    "topKCol": "top",
    "errorCol": "error",
    **SHARED,
}
FEATURES = {"outputCol": "features", "errorCol": "featuresError", **SHARED}
FOUND = {"outputCol": "detections", "errorCol": "detectionsError", **SHARED}
NUMBERS = {
    "predictionCol": "prediction",
    "predictedLabelCol": "predictedLabel",
    "probabilityCol": "probability",
    "rawPredictionCol": "raw",
    "errorCol": "outputError",
    "deviceCol": "device",
}
BY_PATH = {"readPaths": True, "inputCol": "path"}

CASES = [
    Case("classifier-bytes", classifier, files, "content binary", CLASSES, params={"topK": 2}),
    Case(
        "classifier-struct", classifier, structs, IMAGE, CLASSES,
        params={"inputCol": "image"}, kinds=("null_input", "bad_struct"), bad_row="3.png", local=of_structs,
    ),
    Case("classifier-paths", classifier, paths, "path string", CLASSES, params=BY_PATH, bad_row=r"\S+/3\.png"),
    Case("featurizer-bytes", featurizer, files, "content binary", FEATURES, params={"normalize": True}),
    Case("detector-bytes", detector, files, "content binary", FOUND, params={"scoreThreshold": 0.1}),
    Case(
        "tensors", transformer, arrays, "x array<float>", NUMBERS,
        reads="inputMapping", kinds=("null_input", "bad_shape"), local=of_arrays, first=["y"],
        closes_over=frozenset({"pyarrow.lib.StructType", "builtins.bool", "builtins.list", "builtins.function"}),
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def rows(case, tmp_path_factory):
    return case.rows(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def frame(spark, case, rows) -> DataFrame:
    """The case's rows in one partition, between a column before and one after them."""
    data = [(place, *cells, f"name{place}") for place, cells in enumerate(rows)]
    return spark.createDataFrame(data, f"id int, {case.schema}, name string").coalesce(1)


@pytest.fixture(scope="module")
def kept(case, frame):
    """What transform gives under `keep`, with every output."""
    return case.stage().transform(frame).collect()


@pytest.fixture
def refused(spark):
    """A context in which a ParamError is raised, and no job started."""

    @contextmanager
    def context(match):
        spark.sparkContext.setJobGroup(match, "")
        try:
            with pytest.raises(ParamError, match=match):
                yield
            spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
            assert list(spark.sparkContext.statusTracker().getJobIdsForGroup(match)) == []
        finally:
            spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)

    return context


def upper(name):
    return name[0].upper() + name[1:]


def flat(value):
    """A cell of transform's or of predict's, as a list of numbers and texts."""
    if isinstance(value, dict):
        value = value.values()
    elif hasattr(value, "toArray"):
        value = value.toArray()
    if isinstance(value, (str, float, int, np.generic, type(None))):
        return [None if value != value else value]  # predict's null number is NaN
    return [part for each in value for part in flat(each)]


def answers(case, row):
    """The outputs that are the same in every run."""
    return [flat(row[column]) for name, column in case.outputs.items() if name not in ("timingCol", "deviceCol")]


# --- rows that fail ---------------------------------------------------------------------------------------------------


def test_keep_keeps_every_row_in_order_with_nulls_and_a_reason(case, frame, rows, kept):
    assert [(row.id, row.name) for row in kept] == [(place, f"name{place}") for place in range(5)]
    error = case.outputs["errorCol"]
    kinds = [row[error] and row[error].split(": ")[0] for row in kept]
    assert kinds == [None, case.kinds[0], None, case.kinds[1], None]
    for place, row in enumerate(kept):
        for name, column in case.outputs.items():
            if name == "deviceCol":
                assert row[column] == "cpu"
            elif name != "errorCol":
                assert (row[column] is None) == (place in (NULL, BAD)), (place, column)
    assert [row[case.column] for row in kept] == [cells[0] for cells in rows]


@pytest.mark.parametrize("named", [True, False])
def test_skip_drops_the_rows_that_failed_and_needs_no_error_column(case, frame, kept, named):
    off = {} if named else {"errorCol": ""}
    made = case.stage(handleInvalid="skip", **off).transform(frame).collect()
    assert [row.id for row in made] == [GOOD, OTHER, AGAIN]
    assert (case.outputs["errorCol"] in made[0]) == named
    one = next(column for name, column in case.outputs.items() if name != "errorCol")
    assert [flat(row[one]) for row in made] == [flat(kept[place][one]) for place in (GOOD, OTHER, AGAIN)]


def test_error_fails_naming_the_stage_the_row_and_the_reason(case, frame):
    stage = case.stage(handleInvalid="error", errorCol="")
    message = rf"{stage.uid}: (\S+/)?{case.bad_row}: {case.kinds[1]}: "
    with pytest.raises(Exception, match=message):
        stage.transform(frame.where(F.col("id").isin(OTHER, BAD))).collect()


def test_equal_rows_have_equal_outputs_and_predict_gives_the_same(case, rows, kept):
    assert answers(case, kept[GOOD]) == answers(case, kept[AGAIN]) != answers(case, kept[OTHER])
    local = case.stage().predict(case.local(rows)).to_dict("records")
    assert list(local[0]) == [*case.first, *case.outputs.values()]
    assert answers(case, local[GOOD]) == answers(case, local[AGAIN])
    for place in (GOOD, OTHER):
        for there, here in zip(answers(case, kept[place]), answers(case, local[place]), strict=True):
            assert there == [pytest.approx(x, rel=1e-4, abs=1e-5) if isinstance(x, float) else x for x in here]
    for place in (NULL, BAD):
        assert local[place][case.outputs["errorCol"]]


# --- columns ----------------------------------------------------------------------------------------------------------


def test_input_columns_pass_through_in_order_and_outputs_follow(case, frame):
    assert case.stage().transform(frame).columns == [*frame.columns, *case.first, *case.outputs.values()]


def test_an_empty_name_is_not_produced(case, frame):
    for name, column in case.outputs.items():
        left = [*case.first, *(other for other in case.outputs.values() if other != column)]
        assert case.stage(**{name: ""}).transform(frame).columns[len(frame.columns) :] == left


def test_an_output_that_is_there_already_is_refused_in_any_case_of_letters(case, frame, refused):
    stage = case.stage()
    for name, column in case.outputs.items():
        with refused(rf"{name}='{column}'.*set{upper(name)}\("):
            stage.transform(frame.withColumn(column.upper(), F.lit(1)))


def test_two_outputs_of_one_name_are_refused(case, frame, refused):
    first, *others = case.outputs.items()
    for name, _ in others:
        stage = case.stage(**{name: first[1].upper()})
        with refused(rf"({name}|{first[0]})='.*' and .* are one name.*set\w+\("):
            stage.transform(frame)


def test_an_input_that_is_missing_or_of_another_type_is_refused(case, frame, refused):
    stage = case.stage()
    with refused(rf"{case.reads}.*{case.column}"):
        stage.transform(frame.drop(case.column))
    with refused(rf"{case.reads}.*{case.column}.*map<int,int>"):
        stage.transform(frame.withColumn(case.column, F.expr("map(1, 1)")))


def test_a_model_that_is_not_set_is_refused(case, frame, refused):
    kind = type(case.stage())
    with refused(r"Param model is not set.*setModel"):
        kind(**case.params).transform(frame)


# --- Params -----------------------------------------------------------------------------------------------------------


def test_every_param_is_documented_set_got_and_an_argument(case):
    stage = case.stage()
    kind = type(stage)
    text = stage.explainParams()
    for param in stage.params:
        assert f"{param.name}: {param.doc}" in text
        assert len(param.doc) > 15
    assert [line for line in kind().explainParams().splitlines() if line.count("(default") > 1] == []

    values = {param.name: value for param, value in stage.extractParamMap().items()}
    assert {param.name for param in stage.params} == set(values)
    assert set(inspect.signature(kind.__init__).parameters) == {"self", *values}
    by_keyword, by_setter = kind(**values), kind()
    for name, value in values.items():
        assert getattr(by_setter, f"set{upper(name)}")(value) is by_setter
        assert getattr(by_setter, f"get{upper(name)}")() == getattr(by_keyword, f"get{upper(name)}")() == value
        assert by_keyword.isSet(name)
    unset = kind(**dict.fromkeys(values))
    assert not any(unset.isSet(param) for param in unset.params)


def test_a_copy_with_other_params_changes_the_copy_alone(case):
    stage = case.stage()
    held = stage._model_file()
    copy = stage.copy({stage.batchSize: 2, stage.errorCol: "why"})
    assert (copy.getBatchSize(), copy.getErrorCol(), copy._held, copy.uid) == (2, "why", held, stage.uid)
    assert stage.getErrorCol() == case.outputs["errorCol"]
    assert stage.getBatchSize() != 2
    other = stage.copy({stage.model: "torchvision:resnet18"})
    assert (other._held, stage._held) == (None, held)
    stage.setBatchSize(7).setDevice("cpu").setErrorCol("reason")
    assert stage._held == held
    stage.setModel(stage.getModel())
    assert stage._held is None


def test_a_param_map_reaches_the_stage_of_a_pipeline_for_that_call(case, frame):
    stage = case.stage()
    fitted = Pipeline(stages=[stage]).fit(frame, {stage.errorCol: "why"})
    # A Pipeline fits a copy of itself, with the map in its stages.
    assert "why" in fitted.transform(frame).columns
    assert "because" in fitted.transform(frame, {stage.errorCol: "because"}).columns
    assert stage.getErrorCol() == case.outputs["errorCol"]


# --- what travels, and what is saved ----------------------------------------------------------------------------------


def test_the_udf_closes_over_one_value_of_gpuml_and_nothing_of_spark(case, frame):
    (node,) = udf_nodes(case.stage().transform(frame))
    command = node.udfs().apply(0).func().command().mkString(",")
    pickled = bytes(int(number) % 256 for number in command.split(","))
    function, _ = pickle.loads(pickled)
    held = closed_over(function)
    assert held.count("gpuml.spec.Spec") == 1
    assert set(held) - case.closes_over == {"gpuml.spec.Spec"}
    for name in (type(case.stage()).__name__, "SparkSession", "SparkContext"):
        assert name.encode() not in pickled


def closed_over(function):
    """Types of what a function holds, and of what the functions among that hold."""
    found = []
    for cell in function.__closure__ or ():
        kind = type(cell.cell_contents)
        found.append(f"{kind.__module__}.{kind.__qualname__}")
        if inspect.isfunction(cell.cell_contents):
            found += closed_over(cell.cell_contents)
    return found


def test_saved_and_loaded_alone_and_in_a_pipeline_it_answers_the_same(case, frame, kept, tmp_path):
    stage, path = case.stage(), str(tmp_path / "saved")
    PipelineModel(stages=[stage]).save(path)
    made = PipelineModel.load(path).transform(frame).collect()
    assert [answers(case, row) for row in made] == [answers(case, row) for row in kept]

    stage.write().overwrite().save(path)
    loaded = type(stage).load(path)
    assert (type(loaded), loaded.uid, loaded._held) == (type(stage), stage.uid, stage._model_file())
    assert loaded.extractParamMap() == stage.extractParamMap()
    assert [loaded.isSet(param) for param in loaded.params] == [stage.isSet(param) for param in stage.params]


def test_a_folder_of_another_class_is_refused_naming_it(case, spark, tmp_path):
    SQLTransformer(statement="SELECT * FROM __THIS__").save(str(tmp_path / "s"))
    kind = type(case.stage())
    message = rf"holds a \S+SQLTransformer, not a gpuml\.{kind.__name__}; load it with SQLTransformer\.load"
    with pytest.raises(ModelFileError, match=message):
        kind.load(str(tmp_path / "s"))
