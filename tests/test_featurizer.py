"""ImageFeaturizer in Spark: before a learner, saved and loaded, beside a classifier."""

import numpy as np
import pytest
from conftest import PLAIN, Pooled, encoded
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.linalg import VectorUDT
from torchvision import models as zoo

from gpuml import ImageClassifier, ImageFeaturizer, Preprocess


@pytest.fixture(scope="module")
def frame(spark):
    data = [encoded(0), None, encoded(1), b"broken", *(encoded(i) for i in range(2, 8))]
    rows = [(i, d, float(i % 2)) for i, d in enumerate(data)]
    return spark.createDataFrame(rows, "id int, content binary, label double").coalesce(1)


@pytest.fixture(scope="module")
def featurizer():
    return ImageFeaturizer.from_module(zoo.resnet18(num_classes=5), preprocess=Preprocess(resize=64, crop=64))


def test_transform_gives_what_predict_gives(frame, featurizer):
    out = featurizer.transform(frame)
    assert out.schema["features"].dataType == VectorUDT()
    assert out.columns == ["id", "content", "label", "features", "featuresError"]
    rows = out.orderBy("id").collect()
    local = featurizer.predict([row.content for row in rows])
    assert [row.id for row in rows if row.features is None] == [1, 3]
    for row, vector in zip(rows, local.features, strict=True):
        assert (row.features is None) == (vector is None)
        if vector is not None:
            assert np.allclose(row.features.toArray(), vector, rtol=1e-4, atol=1e-5)


def test_a_learner_after_it_is_saved_and_loaded_and_predicts_the_same(frame, featurizer, tmp_path):
    stage = featurizer.copy().setHandleInvalid("skip").setNormalize(True)
    model = Pipeline(stages=[stage, LogisticRegression(maxIter=3)]).fit(frame)
    before = model.transform(frame).select("id", "features", "probability", "prediction").collect()
    assert len(before) == 8
    assert np.allclose([np.linalg.norm(row.features.toArray()) for row in before], 1)
    model.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert loaded.transform(frame).select("id", "features", "probability", "prediction").collect() == before
    # It holds the cut file: without its source another layer cannot be had.
    assert loaded.stages[0]._held == stage._held


def test_it_stands_beside_a_classifier_of_the_same_network(frame):
    classifier = ImageClassifier.from_module(Pooled(), preprocess=PLAIN)
    featurizer = ImageFeaturizer(model=classifier.getModel())
    row = Pipeline(stages=[classifier, featurizer]).fit(frame).transform(frame).where("id = 0").first()
    assert (row.probability.size, row.features.size) == (4, 3)
    assert (row.error, row.featuresError) == (None, None)
