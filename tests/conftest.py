"""Fixtures that the whole suite shares: a cache folder of its own, one Spark session, tiny networks and images."""

import io
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gpuml import Preprocess
from gpuml.models import store

# Spark's workers would use `python3` otherwise, which need not be this environment's.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

# For each JVM of the suite, which lives for seconds: without its slower compiler it takes a third less CPU.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

TESTS = os.path.dirname(os.path.abspath(__file__))

#: For processes that a test starts: what this one was given, and this folder.
PYTHONPATH = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))

#: Pixels as they are, scaled to 0..1: a network's output can be worked out by hand.
PLAIN = Preprocess(resize=(32, 32), crop=None, mean=(0, 0, 0), std=(1, 1, 1))


class Quadrants(nn.Module):
    """The mean colour of each quadrant: 12 outputs, channel by channel, each tl tr bl br."""

    def forward(self, x):
        return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


class Pooled(nn.Module):
    """Mean colour, then one linear layer; seeded, so that equal arguments are equal networks."""

    def __init__(self, classes=4, seed=0):
        super().__init__()
        self.linear = nn.Linear(3, classes)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 3)

    def forward(self, x):
        return self.linear(x.mean((2, 3)))


class Corner(nn.Module):
    """A detector: the upper left quarter of each picture, its score the mean of the pixels."""

    def __init__(self, label: int = 1, noise: float = 0.0):
        super().__init__()
        self.label = label
        self.noise = noise

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        made: list[dict[str, torch.Tensor]] = []
        for image in images:
            height, width = image.shape[1] / 2, image.shape[2] / 2
            mean = image.mean().reshape(1) + self.noise * torch.rand(1)
            box = torch.tensor([[0.0, 0.0, width, height]])
            made.append({"boxes": box, "labels": torch.tensor([self.label]), "scores": mean})
        return made


class WideAndDeep(nn.Module):
    """Two inputs, float32 (batch, 4) and int64 (batch,); three outputs. Seeded, so that equal arguments are equal."""

    def __init__(self, seed=0):
        super().__init__()
        self.wide, self.table, self.deep = nn.Linear(4, 3), nn.Embedding(10, 10), nn.Linear(10, 3)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, wide, ids):
        deep = self.table(ids)
        return {"logits": self.wide(wide) + self.deep(deep), "hidden": deep.reshape(-1, 2, 5), "twice": ids * 2}


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory):
    """The suite never touches the user's own cache."""
    home = tmp_path_factory.mktemp("gpuml-home")
    before = os.environ.get("GPUML_HOME")
    os.environ["GPUML_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["GPUML_HOME"]
    else:
        os.environ["GPUML_HOME"] = before


@pytest.fixture(scope="session")
def spark():
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def picture(seed=0, width=60, height=40):
    """A blocky random picture as a PIL image: smooth enough for JPEG, different for each seed."""
    blocks = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def encoded(seed=0, kind="PNG", **size):
    """The same as the bytes of a file."""
    buffer = io.BytesIO()
    picture(seed, **size).save(buffer, kind)
    return buffer.getvalue()


def give_back():
    """As if this process, which holds files of the cache, had ended."""
    for path in list(store._kept):
        store._let_go(path)


def aged(path, days):
    """The file, last used some days ago."""
    then = time.time() - days * 86400
    os.utime(path, (then, then))
    return path


class Harm:
    """Pickles as a call that makes the folder `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Stumble:
    """Pickles as what Python's unpickler reads, and torch's restricted one fails at with a TypeError."""

    def __reduce__(self):
        return OrderedDict, (), (None, {})


#: Runs in a child process: nothing there can import PySpark.
WITHOUT_PYSPARK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pyspark":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks():
    """The benchmarks' modules can be imported."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
