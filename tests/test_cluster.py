"""Device binding on a real cluster: executors as processes of their own, GPU addresses from a discovery script.

The machine needs no GPU. The executors' PYTHONPATH holds a module that replaces the two functions of
`gpuml.worker.device` that touch CUDA, before any worker is forked; everything else is the product as it is.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections import defaultdict

import pytest
from conftest import PYTHONPATH

# Imported by every Python process of the executors at start-up.
SITE = """
import os, socket, sys
for package in ("timm", "transformers", "huggingface_hub", "safetensors", "efficientnet_lite_pytorch"):
    sys.modules[package] = None  # a worker needs none of them
connect = socket.socket.connect
def near(self, address):
    assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), f"a worker calls {address}"
    return connect(self, address)
socket.socket.connect = near
import torch
import gpuml.worker.cache as cache
import gpuml.worker.device as device
device.uuids = lambda: ("GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd")
device.place = lambda index: torch.device("cpu")
load = cache.load
def counted(*arguments):
    with open(os.path.join(os.path.dirname(__file__), f"loads-{os.getpid()}"), "a") as file:
        file.write("load\\n")
    return load(*arguments)
cache.load = counted
"""

JOB = """
import json, sys
from conftest import PLAIN, encoded
from pyspark import TaskContext
from pyspark.sql import SparkSession, functions as F
from torch import nn
from gpuml import ImageClassifier

class OnlyHere(nn.Module):  # of __main__: no executor can import it
    def forward(self, x):
        return x.mean((2, 3))

conf = dict(pair.split("=", 1) for pair in sys.argv[2:])
spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").config(map=conf).getOrCreate()

@F.udf("string")
def given(_):
    import os, time
    task = TaskContext.get()
    time.sleep(0.05)  # long enough for both addresses to be taken
    return json.dumps([list(task.resources()["gpu"].addresses) if "gpu" in task.resources() else [], os.getpid()])

stage = ImageClassifier.from_module(OnlyHere(), preprocess=PLAIN, deviceCol="device", batchSize=2)
frame = spark.createDataFrame([(i, encoded(i % 8)) for i in range(48)], "id int, content binary").repartition(8)
rows = []
for _ in range(2):  # the second time the workers are reused
    out = stage.transform(frame).withColumn("given", given("content")).withColumn("partition", F.spark_partition_id())
    rows += [[r.id, r.device, r.prediction, *json.loads(r.given), r.partition] for r in out.collect()]
wanted = dict(enumerate(stage.predict([encoded(i) for i in range(8)]).prediction))
assert all(row[2] == wanted[row[0] % 8] for row in rows), "answers differ from predict's"
print("ROWS" + json.dumps(rows))
spark.stop()
"""


def run_job(tmp_path, master, job=JOB, **conf):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    script = tmp_path / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1"]}'\n""")
    script.chmod(0o755)
    settings = {
        "spark.executorEnv.PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), PYTHONPATH]),
        "spark.worker.resource.gpu.amount": 2,
        "spark.worker.resource.gpu.discoveryScript": str(script),
        **conf,
    }
    env = dict(os.environ, PYTHONPATH=PYTHONPATH, PYSPARK_PYTHON=sys.executable)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(job), master, *(f"{key}={value}" for key, value in settings.items())],
        env=env, capture_output=True, text=True, timeout=180, cwd=tmp_path,
    )  # fmt: skip
    assert "ROWS" in done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout[done.stdout.index("ROWS") + 4 :].splitlines()[0])


def by_worker(rows):
    """Worker process -> the devices that it served."""
    served = defaultdict(set)
    for _, device, _, _, pid, _ in rows:
        served[pid].add(device)
    return served


def test_every_row_reports_the_address_that_spark_gave_its_task(tmp_path):
    """One executor with two GPUs and two task slots: its workers are reused for both addresses."""
    rows = run_job(
        tmp_path,
        "local-cluster[1,2,1024]",
        **{"spark.executor.resource.gpu.amount": 2, "spark.task.resource.gpu.amount": 1},
    )
    assert len(rows) == 96
    for _, device, _, addresses, _, _ in rows:
        assert len(addresses) == 1
        assert device == f"cuda:{addresses[0]} (address {addresses[0]})"
    assert {row[1] for row in rows} == {"cuda:0 (address 0)", "cuda:1 (address 1)"}
    # 8 tasks ran twice, in fewer worker processes: reused, and the second transform loaded nothing.
    loads = [len(file.read_text().splitlines()) for file in (tmp_path / "site").glob("loads-*")]
    assert 1 <= len(loads) < 8
    assert set(loads) == {1}
    assert len(by_worker(rows)) < 16


def test_two_tasks_share_one_gpu(tmp_path):
    """Half a GPU per task: both tasks of an executor have one address, and the answers are those of a single task."""
    rows = run_job(
        tmp_path,
        "local-cluster[1,2,1024]",
        **{"spark.executor.resource.gpu.amount": 1, "spark.task.resource.gpu.amount": 0.5},
    )
    assert len(rows) == 96
    assert len({row[1] for row in rows}) == 1
    assert len(by_worker(rows)) >= 2


def test_without_addresses_partitions_are_spread_over_the_visible_gpus(tmp_path):
    rows = run_job(tmp_path, "local-cluster[1,2,1024]")
    for _, device, _, addresses, _, partition in rows:
        assert addresses == []
        assert device == f"cuda:{partition % 4}"
    assert {row[1] for row in rows} == {"cuda:0", "cuda:1", "cuda:2", "cuda:3"}


@pytest.mark.parametrize("visible", ["2,3"])
def test_a_narrowed_executor_maps_addresses_to_its_own_devices(tmp_path, visible):
    """CUDA_VISIBLE_DEVICES=2,3 and relative addresses 0 and 1, as a container with two cards gives them."""
    rows = run_job(
        tmp_path,
        "local-cluster[1,2,1024]",
        **{
            "spark.executor.resource.gpu.amount": 2,
            "spark.task.resource.gpu.amount": 1,
            "spark.executorEnv.CUDA_VISIBLE_DEVICES": visible,
        },
    )
    assert {(row[1], row[3][0]) for row in rows} == {("cuda:0 (address 0)", "0"), ("cuda:1 (address 1)", "1")}


ZOOS = """
import json, sys
from conftest import encoded
from pyspark.sql import SparkSession, functions as F
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
from gpuml import ImageClassifier

conf = dict(pair.split("=", 1) for pair in sys.argv[2:])
spark = SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false").config(map=conf).getOrCreate()

config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32,
                   patch_size=8, num_labels=3, id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2})
ViTForImageClassification(config).save_pretrained("checkpoint")
ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("checkpoint")

@F.udf("string")
def lacks(_):
    lacking = []
    for name in ("timm", "transformers", "safetensors"):
        try:
            __import__(name)
        except ImportError:
            lacking.append(name)
    import socket
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    except AssertionError:
        lacking.append("network")
    return " ".join(lacking)

data = [encoded(seed) for seed in range(4)]
frame = spark.createDataFrame([(each,) for each in data], "content binary").coalesce(1)
rows = []
for arguments in (
    {"model": "timm:test_vit", "weights": "none", "labels": ["a", "b"]},
    {"model": "hf:./checkpoint"},
):
    stage = ImageClassifier(rawPredictionCol="raw", **arguments)
    local = stage.predict(data)
    for row, raw in zip(stage.transform(frame).withColumn("lacks", lacks("content")).collect(), local.raw):
        rows.append([arguments["model"], row.error, row.lacks, float(abs(row.raw.toArray() - raw).max())])
print("ROWS" + json.dumps(rows))
spark.stop()
"""


def test_workers_need_neither_timm_nor_transformers_nor_a_network(tmp_path):
    """Models of both come to executors that can import neither, and that reach no address but their own machine's."""
    rows = run_job(tmp_path, "local-cluster[1,1,1024]", ZOOS, **{"spark.worker.resource.gpu.amount": 0})
    assert [row[0] for row in rows] == ["timm:test_vit"] * 4 + ["hf:./checkpoint"] * 4
    for _, error, lacks, difference in rows:
        assert error is None
        assert lacks == "timm transformers safetensors network"
        assert difference < 1e-4
