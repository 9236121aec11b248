"""A network of tensors and a sample of each input -> its program, seen to do the same row by row, and its card."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from gpuml.errors import ModelError
from gpuml.models.cards import INPUT_DTYPES, Port, TensorCard
from gpuml.models.export import close, evaluation_copy, export_with, jit, telling_lines, trace_with
from gpuml.models.samples import checked_names, checked_samples, dtype_of, three_rows

_log = logging.getLogger("gpuml")

#: What a network may give -> what its file gives: Spark has no half precision, and no unsigned bytes.
_GIVEN = {"float16": "float32", "bfloat16": "float32", "uint8": "int16"}


class InOrder(nn.Module):
    """A network that is given its tensors in order, and gives a tuple of tensors, whatever it was before.

    Parameters
    ----------
    network : any.
    names : by which it takes the last of the tensors; the others go by position.
    keys : places or names in what it gives; none: that is one tensor.
    """

    def __init__(self, network: nn.Module, names: Sequence[str] = (), keys: Sequence[Any] = ()) -> None:
        super().__init__()
        self.network = network
        self.names = tuple(names)
        self.keys = tuple(keys)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) - len(self.names)
        given = self.network(*tensors[:count], **dict(zip(self.names, tensors[count:], strict=True)))
        return tuple(given[key] for key in self.keys) if self.keys else (given,)


def program_and_card(
    net: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str], labels: tuple[str, ...], activation: str
) -> tuple[torch.export.ExportedProgram | torch.jit.ScriptModule, TensorCard]:
    """What `gpuml.save_model` writes of a network with named inputs, within `plain_torch`; parameters are its own.

    Raises
    ------
    ModelError
        The samples do not fit the network, it cannot be exported, mixes the rows of a batch, or gives anything but
        tensors of numbers, the batch first; or the labels do not fit.
    """
    samples = checked_samples(inputs)
    network, names = _in_order(evaluation_copy(net), samples, checked_names(outputs))
    return exported(network, tuple(samples), three_rows(samples), names, labels, activation)


def exported(
    network: InOrder,
    inputs: Sequence[str],
    rows: Sequence[Tensor],
    outputs: Sequence[str],
    labels: tuple[str, ...] = (),
    activation: str = "softmax",
) -> tuple[torch.export.ExportedProgram | torch.jit.ScriptModule, TensorCard]:
    """The program and the card of a network, for inputs like these three rows; errors as of `program_and_card`."""
    program, shapes = _program(network, rows, outputs)
    ports = tuple(Port(name, dtype_of(row), tuple(row.shape[1:])) for name, row in zip(inputs, rows, strict=True))
    return program, TensorCard(ports, shapes, labels, activation)


def of_archive(
    program: torch.export.ExportedProgram, what: str, labels: tuple[str, ...]
) -> tuple[torch.export.ExportedProgram | torch.jit.ScriptModule, TensorCard]:
    """The same of a program of ``torch.export``, which tells its inputs itself; errors call it `what`.

    Raises
    ------
    ModelError
        Its inputs are no tensors of fixed rows, or the batch is fixed; else as `program_and_card`.
    """
    given = list(program.graph_signature.user_inputs)
    spec = program.call_spec.in_spec
    args, kwargs = tree_unflatten(range(spec.num_leaves), spec)
    if [*args, *kwargs.values()] != list(range(len(given))):
        raise ModelError(f"{what} takes its inputs in a nest ({spec}); it must take tensors, each an argument")
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [*given[: len(args)], *kwargs]
    generator = torch.Generator().manual_seed(0)
    rows = [
        _random_rows(values[node], f"{what}, input {name!r}", generator)
        for node, name in zip(given, inputs, strict=True)
    ]
    module = InOrder(program.module(), tuple(kwargs))
    try:
        with torch.no_grad():
            (answer,) = module(*rows)
    except Exception as error:
        raise ModelError(f"{what} fails on three rows: {telling_lines(error)}") from error
    keys, names = _keys(answer, (), what)
    return exported(InOrder(module.network, module.names, keys), inputs, rows, names, labels)


def _random_rows(value: Any, what: str, generator: torch.Generator) -> Tensor:
    """Three rows of an input that a graph describes: of integers, those that any embedding knows."""
    if not isinstance(value, Tensor) or value.ndim == 0 or dtype_of(value) not in INPUT_DTYPES:
        told = f"{dtype_of(value)} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ModelError(f"{what}: is {told}; inputs are tensors of {', '.join(INPUT_DTYPES)}, the batch first")
    lengths: tuple[Any, ...] = tuple(value.shape)  # symbols where they may vary
    if isinstance(lengths[0], int) or not all(isinstance(length, int) for length in lengths[1:]):
        raise ModelError(
            f"{what}: has shape {lengths}; only the batch may vary, and must: export it with "
            f"dynamic_shapes=..., {{0: torch.export.Dim('batch')}} for each input, or by gpuml.save_model(net, path, "
            f"inputs=...)"
        )
    shape = (3, *lengths[1:])
    if value.is_floating_point():
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 2, shape, generator=generator).to(value.dtype)


# --- the network ------------------------------------------------------------------------------------------------------


def _in_order(module: nn.Module, samples: Mapping[str, Tensor], outputs: tuple[str, ...]) -> tuple[InOrder, list[str]]:
    """A network that takes the samples in order, and the names of what it gives."""
    names = _by_name(module, tuple(samples))
    try:
        with torch.no_grad():
            given = module(**samples) if names else module(*samples.values())
    except Exception as error:
        ports = ", ".join(str(Port(name, dtype_of(each), tuple(each.shape[1:]))) for name, each in samples.items())
        raise ModelError(
            f"{type(module).__name__} fails on the samples ({ports}): {telling_lines(error)}. Names are those of "
            f"forward()'s parameters, and a sample's type and shape are what the network takes"
        ) from error
    keys, called = _keys(given, outputs, type(module).__name__)
    return InOrder(module, names, keys), called


def _by_name(module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, if forward() takes the inputs by them; none, if it takes them in their order."""
    if isinstance(module, torch.jit.ScriptModule):
        known = [argument.name for argument in module.forward.schema.arguments[1:]]  # type: ignore[attr-defined]
        kinds: set[Any] = set()
    else:
        parameters = inspect.signature(module.forward).parameters.values()
        known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        kinds = {each.kind for each in parameters}
    if set(names) <= set(known):
        return names
    if len(names) > 1 and inspect.Parameter.VAR_KEYWORD in kinds:  # DataParallel, compiled: they pass them on
        return names
    if len(names) == 1 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return ()
    unknown = next(name for name in names if name not in known)
    close_to = difflib.get_close_matches(unknown, known, n=1)
    raise ModelError(
        f"save_model: inputs[{unknown!r}]: forward() of {type(module).__name__} has no such parameter. "
        + (f"Did you mean {close_to[0]!r}? " if close_to else "")
        + f"It takes {', '.join(map(repr, known)) or 'none by name'}"
    )


def _keys(given: Any, outputs: tuple[str, ...], name: str) -> tuple[list[Any], list[str]]:
    """Where the outputs are in what a network gives, and their names; see `InOrder`."""
    if isinstance(given, Mapping):
        missing = [each for each in outputs if each not in given]
        if missing:
            raise ModelError(f"save_model: outputs: {name} gives no {missing[0]!r}, but {', '.join(map(repr, given))}")
        chosen = list(outputs or given)
        return chosen, chosen
    if isinstance(given, Tensor):
        keys, named = [], ["output"]
    elif isinstance(given, (tuple, list)):
        keys = list(range(len(given)))
        named = list(getattr(given, "_fields", [f"output_{i}" for i in keys]))
    else:
        raise ModelError(f"{name} gives a {type(given).__name__}; it must give a tensor, or a tuple or dict of tensors")
    if outputs and len(outputs) != len(named):
        raise ModelError(
            f"save_model: outputs={list(outputs)} names {len(outputs)} of the {len(named)} that {name} gives"
        )
    return keys, list(outputs) or named


# --- the program ------------------------------------------------------------------------------------------------------


def _program(
    network: InOrder, rows: Sequence[Tensor], outputs: Sequence[str]
) -> tuple[torch.export.ExportedProgram | torch.jit.ScriptModule, tuple[Port, ...]]:
    """Exported, else traced over a script, else traced; and what it was seen to give."""
    name = type(network.network).__name__
    two = [each[:2] for each in rows]
    refusals: list[str] = []
    _checked(network, network, rows, outputs, name)
    if not isinstance(network.network, torch.jit.ScriptModule):
        try:
            program = export_with(network, *two)
        except Exception as error:  # of nearly any type
            refusals.append(f"torch.export refuses it ({telling_lines(error)})")
        else:
            return program, _checked(program.module(), network, rows, outputs, name)
    for how, make in (("torch.jit.script", _script), ("torch.jit.trace", trace_with)):
        try:
            scripted = make(network, *two)
            ports = _checked(scripted, network, rows, outputs, name)
            if refusals:
                _log.warning("gpuml: %s; it becomes TorchScript, by %s", refusals[0], how)
            return scripted, ports
        except Exception as error:  # of nearly any type
            refusals.append(f"{how} refuses it ({telling_lines(error)})")
    raise ModelError(
        f"{name} cannot become a file: {'; '.join(refusals)}. Let forward() take and give tensors, with no branch on "
        f"their values and no fixed batch size (len(x) fixes it, x.shape[0] does not); or run it as code of your own: "
        f"gpuml.tensor_udf(predict, returns, setup=...)"
    )


def _script(network: InOrder, *samples: Tensor) -> torch.jit.ScriptModule:
    """A script of the network itself; around it a trace, which keeps the script's branches."""
    scripted = InOrder(jit("script", network.network), network.names, network.keys)
    traced: torch.jit.ScriptModule = jit("trace", scripted.eval(), samples, check_trace=False)
    return traced


def _checked(
    program: Callable[..., Any], network: InOrder, rows: Sequence[Tensor], outputs: Sequence[str], name: str
) -> tuple[Port, ...]:
    """What a program gives, once it was seen to do what the network does, row by row."""
    with torch.inference_mode():
        try:
            together, eager = program(*rows), network(*rows)
            backwards = program(*(each.flip(0) for each in rows))
            singles = [program(*(each[i : i + 1] for each in rows)) for i in range(3)]
        except Exception as error:
            raise ModelError(
                f"{name} fails on 3 rows, or on one: {telling_lines(error)}. Was it made for one number of rows?"
            ) from error
    return tuple(
        _port(output, f"{name}, output {output!r}", together[i], eager[i], backwards[i], [each[i] for each in singles])
        for i, output in enumerate(outputs)
    )


def _port(output: str, what: str, together: Any, eager: Any, backwards: Any, singles: list[Any]) -> Port:
    for given, count in [(together, 3), *((each, 1) for each in singles)]:
        if not isinstance(given, Tensor):
            raise ModelError(f"{what}: is a {type(given).__name__}, no tensor; name those to keep with outputs=[...]")
        if given.is_complex() or given.ndim == 0 or len(given) != count or given.shape[1:] != singles[0].shape[1:]:
            raise ModelError(
                f"{what}: is {dtype_of(given)} of shape {tuple(given.shape)} for {count} row(s); it must be numbers, "
                f"the batch first and the rest alike for any rows (squeeze() without a dimension drops a batch of one)"
            )
    if not close(together, eager, (0, 0, 0)):
        raise ModelError(
            f"{what}: the exported network does not give what forward() gives; is it random, or does it branch on the "
            f"number of rows?"
        )
    alone = torch.cat(singles)
    if not close(together, alone, (0, 0, 0)) or not close(backwards, alone.flip(0), (0, 0, 0)):
        raise ModelError(
            f"{what}: mixes the rows of a batch: row i alone gives another output than row i among others, so results "
            f"would depend on batchSize; remove what reads across dimension 0 (as BatchNorm in training)"
        )
    return Port(output, _GIVEN.get(dtype_of(together), dtype_of(together)), tuple(together.shape[1:]))
