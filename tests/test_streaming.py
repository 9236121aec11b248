"""Images that arrive in a folder: each classified once, also when the query is stopped and started again."""

import pytest
from conftest import PLAIN, Pooled, encoded

from gpuml import ImageClassifier

SCHEMA = "path string, modificationTime timestamp, length long, content binary"


@pytest.fixture(scope="module")
def stage():
    model = ImageClassifier.from_module(Pooled(), preprocess=PLAIN, labels=["ant", "bee", "cat", "dog"]).getModel()
    return ImageClassifier(model=model)


@pytest.fixture
def folder(tmp_path):
    """A folder that three pictures and a broken one have come to."""
    (tmp_path / "in").mkdir()
    for seed in range(3):
        (tmp_path / "in" / f"{seed}.png").write_bytes(encoded(seed))
    (tmp_path / "in" / "broken.png").write_bytes(encoded(1)[:60])
    return tmp_path


def finish(writer, folder):
    """Run a query over all that is there; how many batches it was in all."""
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(120)
    finally:
        query.stop()
    return len(list((folder / "checkpoint" / "commits").glob("[0-9]*")))


def by_name(frame):
    return sorted((row.path.rpartition("/")[2], row.predictedLabel, row.error) for row in frame.collect())


@pytest.mark.parametrize("way", ["transform", "foreachBatch"])
def test_a_query_that_starts_again_goes_on_with_what_is_new(spark, stage, folder, way):
    stream = spark.readStream.format("binaryFile").schema(SCHEMA).load(str(folder / "in"))
    out = str(folder / "out")

    def written():
        if way == "transform":
            made = stage.transform(stream).select("path", "predictedLabel", "error")
            return finish(made.writeStream.format("parquet").option("path", out), folder)

        def one(batch, number):
            made = stage.transform(batch).select("path", "predictedLabel", "error")
            made.write.mode("overwrite").parquet(f"{out}/batch={number}")

        return finish(stream.writeStream.foreachBatch(one), folder)

    assert written() == 1
    first = by_name(spark.read.parquet(out))
    assert [name for name, _, _ in first] == ["0.png", "1.png", "2.png", "broken.png"]
    for seed in (3, 4):
        (folder / "in" / f"{seed}.png").write_bytes(encoded(seed))
    assert written() == 2
    batch = stage.transform(spark.read.format("binaryFile").load(str(folder / "in")))
    assert by_name(spark.read.parquet(out)) == by_name(batch)
    assert set(first) < set(by_name(batch))
