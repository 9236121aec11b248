"""The Params of names: which columns a network takes, and which columns its outputs become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Params, TypeConverters

from gpuml.errors import ParamError
from gpuml.spark.params import param

if TYPE_CHECKING:
    from typing_extensions import Self


def _mapping(name: str, example: str) -> Callable[[Any], dict[str, str]]:
    """A converter that takes a dict of names to distinct names."""

    def convert(value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping) or not all(
            isinstance(each, str) and each for each in (*value, *value.values())
        ):
            raise ParamError(f"{name}={value!r} is no dict of names; write {example}")
        if len(set(value.values())) < len(value):
            raise ParamError(f"{name}={dict(value)!r} has a name twice on its right side; write {example}")
        return dict(value)

    return convert


class HasMappings(Params):
    """Params of a stage whose network has named inputs and outputs."""

    inputMapping = param(
        "inputMapping",
        "dict of columns to inputs of the model, such as {'age': 'x'}; an input that is not in it takes the column of "
        "its own name",
        _mapping("inputMapping", "{'column': 'input'}"),
    )
    outputMapping = param(
        "outputMapping",
        "dict of outputs of the model to columns, such as {'logits': 'score'}; outputs that are not in it are not "
        "produced. {} = all, each a column of its own name",
        _mapping("outputMapping", "{'output': 'column'}"),
    )
    outputVectors = param(
        "outputVectors",
        "whether outputs of shape (batch, k), floats, come as Vectors, for a learner of Spark's, and not as arrays",
        TypeConverters.toBoolean,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(inputMapping={}, outputMapping={}, outputVectors=False)

    def setInputMapping(self, value: Mapping[str, str]) -> Self:
        """Set `inputMapping`: columns to inputs."""
        return self._set(inputMapping=value)

    def getInputMapping(self) -> dict[str, str]:
        """The value of `inputMapping`."""
        return dict(self.getOrDefault(self.inputMapping))

    def setOutputMapping(self, value: Mapping[str, str]) -> Self:
        """Set `outputMapping`: outputs to columns."""
        return self._set(outputMapping=value)

    def getOutputMapping(self) -> dict[str, str]:
        """The value of `outputMapping`; {} stands for all outputs by their own names."""
        return dict(self.getOrDefault(self.outputMapping))

    def setOutputVectors(self, value: bool) -> Self:
        """Set `outputVectors`."""
        return self._set(outputVectors=value)

    def getOutputVectors(self) -> bool:
        """The value of `outputVectors`."""
        return bool(self.getOrDefault(self.outputVectors))
