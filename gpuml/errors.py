"""Everything that gpuml raises, and the reasons it gives for a row.

GpumlError
+-- ParamError        (ValueError)    a Param is unset, out of range, or names a wrong column
+-- ModelError        (ValueError)    a model source, weights or network cannot be used
|   +-- ModelFileError                a model file is damaged, of another format, or not safe to open
+-- DeviceError       (RuntimeError)  the task's device cannot be found or used
|   +-- DeviceMemoryError             a row, a user's batch or the network does not fit into the device's memory
+-- RowError          (ValueError)    one input that cannot be read; has a kind and a message
+-- TensorError       (ValueError)    a column is no tensor, or a function's tensors are not what was promised

Each also subclasses the builtin that a caller would catch.
"""

from __future__ import annotations


class GpumlError(Exception):
    """Root of gpuml's errors."""


class ParamError(GpumlError, ValueError):
    """A Param is unset, out of range, or names a column that does not fit."""


class ModelError(GpumlError, ValueError):
    """A model source, its weights or its network cannot be used."""


class ModelFileError(ModelError):
    """A model file is damaged, of another format, or not safe to open."""


class DeviceError(GpumlError, RuntimeError):
    """The device that a task should use cannot be found or used."""


class DeviceMemoryError(DeviceError):
    """One row alone, the network, or a batch for a user's function does not fit into the device's memory."""


#: Why a row has null outputs. The error column holds ``"<kind>: <message>"``.
ROW_ERROR_KINDS = (
    "null_input",  # a null cell, or a null struct
    "empty",  # no bytes
    "not_image",  # the bytes are no image; also the -1 rows of Spark's image source
    "unsupported",  # an image in a format, or with pixels, that gpuml does not read
    "truncated",  # the file ends too early
    "corrupt",  # the file is damaged
    "too_large",  # more pixels than maxPixels, more than memory or the decoder takes, or a file over 2 GiB
    "bad_struct",  # an image struct whose lengths or mode do not fit
    "io",  # the file of a path or a URL could not be read
    # the row was read, but the model gave NaN for it, or cannot take it; or a null within an array of numbers
    "bad_value",
    "bad_shape",  # an array of another length than the model takes
)


class RowError(GpumlError, ValueError):
    """One input that cannot be read: the row keeps its place, with null outputs and this reason.

    Parameters
    ----------
    kind : one of `ROW_ERROR_KINDS`.
    message : what is wrong with the value.
    """

    def __init__(self, kind: str, message: str) -> None:
        assert kind in ROW_ERROR_KINDS, kind
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class TensorError(GpumlError, ValueError):
    """A column's values cannot become a tensor, or the tensors of a user's function are not what was promised."""
