"""gpuml runs deep-learning models on Spark's columns, each Spark task on its own GPU.

Importing it loads neither torch nor pyspark: a name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuml.version import __version__

if TYPE_CHECKING:
    from gpuml.errors import (
        DeviceError,
        DeviceMemoryError,
        GpumlError,
        ModelError,
        ModelFileError,
        ParamError,
        RowError,
        TensorError,
    )
    from gpuml.models.detection import save_detector
    from gpuml.models.file import save_model
    from gpuml.spark.conf import gpu_conf
    from gpuml.spark.detector import ObjectDetector
    from gpuml.spark.sql import register_udf
    from gpuml.spark.stages import ImageClassifier, ImageFeaturizer
    from gpuml.spark.tensor_stage import TensorTransformer
    from gpuml.spark.tensors import reduce_blocks, tensor_udf
    from gpuml.spec import Preprocess

__all__ = [
    "DeviceError",
    "DeviceMemoryError",
    "GpumlError",
    "ImageClassifier",
    "ImageFeaturizer",
    "ModelError",
    "ModelFileError",
    "ObjectDetector",
    "ParamError",
    "Preprocess",
    "RowError",
    "TensorError",
    "TensorTransformer",
    "__version__",
    "gpu_conf",
    "reduce_blocks",
    "register_udf",
    "save_detector",
    "save_model",
    "tensor_udf",
]

_HOMES = {
    "ImageClassifier": "gpuml.spark.stages",
    "ImageFeaturizer": "gpuml.spark.stages",
    "ObjectDetector": "gpuml.spark.detector",
    "Preprocess": "gpuml.spec",
    "TensorTransformer": "gpuml.spark.tensor_stage",
    "gpu_conf": "gpuml.spark.conf",
    "reduce_blocks": "gpuml.spark.tensors",
    "register_udf": "gpuml.spark.sql",
    "save_detector": "gpuml.models.detection",
    "save_model": "gpuml.models.file",
    "tensor_udf": "gpuml.spark.tensors",
    **dict.fromkeys(
        (
            "DeviceError",
            "DeviceMemoryError",
            "GpumlError",
            "ModelError",
            "ModelFileError",
            "ParamError",
            "RowError",
            "TensorError",
        ),
        "gpuml.errors",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpuml' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
