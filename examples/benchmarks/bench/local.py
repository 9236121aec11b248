"""So many images in so many files -> a job of gpuml in a local session, one task a file."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from bench import data, tree
from bench.report import Pass
from bench.serve import Job, Setting
from bench.spark_peers import BATCH, UNIX_SOCKETS, frame_of, gpuml
from gpuml import gpu_conf

NETWORK = "pooled"

#: By name: what a session is given of the settings that gpuml recommends.
SETTINGS: dict[str, dict[str, str]] = {"Spark's own": {}, "gpu_conf": gpu_conf(BATCH)}

#: Makes each file a task: opening one is said to cost as much as a task may hold.
FILE_A_TASK = {"spark.sql.files.openCostInBytes": "1t", "spark.sql.files.maxPartitionBytes": "1t"}

#: Rows in a row group of the one large file; Spark reads a group as a whole.
GROUP = 256


@dataclass(frozen=True)
class Work:
    """A job over so many images in so many tasks."""

    images: int
    tasks: int
    job: Job

    def run(self) -> Pass:
        """One timed pass."""
        before, start = tree.times(os.getpid()), time.perf_counter()
        self.job(False)
        seconds = time.perf_counter() - start
        return Pass(self.images, seconds, tree.cpu_seconds(before, tree.times(os.getpid())))


@dataclass(frozen=True)
class Bench:
    """Where the data lies, and how much to do on how many cores."""

    root: Path
    cores: int
    quick: bool

    def rounds(self, full: int) -> int:
        return 1 if self.quick else full

    def images(self, full: int) -> int:
        return full // 10 if self.quick else full

    def folder(self, images: int, files: int) -> Path:
        """Of `bench.data`; one file alone in groups that can be read one by one."""
        if files > 1:
            return data.parquet(self.root, "jpeg", images, files)
        folder = self.root / f"jpeg-{images}-grouped"
        if not folder.is_dir():
            (path,) = data.parquet(self.root, "jpeg", GROUP, 1).glob("*.parquet")
            photos, made = pq.read_table(path), self.root / f".{folder.name}"
            shutil.rmtree(made, ignore_errors=True)  # of a call that was interrupted
            made.mkdir()
            path = made / path.name
            with pq.ParquetWriter(path, photos.schema, compression="none", use_dictionary=False) as writer:
                for start in range(0, images, GROUP):
                    writer.write_table(photos.slice(0, images - start))
            made.rename(folder)
        return folder

    def work(self, images: int, tasks: int) -> Work:
        """One file a task; under the settings that gpuml recommends, until others are given."""
        setting = Setting(NETWORK, str(self.folder(images, tasks)), str(self.root / "models"), self.cores)
        job = gpuml(setting)
        configure(SETTINGS["gpu_conf"])
        partitions = frame_of(setting).rdd.getNumPartitions()
        assert partitions == tasks, f"{setting.data}: {partitions} partitions, not {tasks}"
        return Work(images, tasks, job)

    def start(self, unix_sockets: bool = True) -> SparkSession:
        """A session with Spark's own settings, but for its sockets, and new workers."""
        if (session := SparkSession.getActiveSession()) is not None:
            session.stop()
        setting = Setting(NETWORK, str(self.folder(8, 8)), str(self.root / "models"), self.cores)
        return frame_of(setting, {UNIX_SOCKETS: str(unix_sockets).lower()}).sparkSession


def configure(settings: dict[str, str]) -> None:
    """Give the session these settings, and Spark's own instead of the others that gpuml recommends."""
    session = SparkSession.getActiveSession()
    assert session is not None
    for name in gpu_conf(BATCH):
        session.conf.unset(name)
    for name, value in {**settings, **FILE_A_TASK}.items():
        session.conf.set(name, value)
