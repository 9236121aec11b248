"""A network in memory -> a copy of it, exported, that was seen to do the same row by row."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass
from torch.jit._trace import TracerWarning
from torch.utils._python_dispatch import TorchDispatchMode

from gpuml.errors import ModelError
from gpuml.models.fold import fold_batch_norm

_log = logging.getLogger("gpuml")

#: torch.export, torch.export.load and torch's settings are global: two threads of a driver, such as a CrossValidator's,
#: break one another's exports ("Trying to pop empty mode stack", "_CURRENT_DESERIALIZER is already set").
ONE_AT_A_TIME = threading.RLock()


@contextmanager
def plain_torch() -> Iterator[None]:
    """torch's global settings as in a worker; the caller's, and its random state, come back afterwards.

    A default dtype or device, or an autocast around the caller, would become part of an export.
    """
    with ONE_AT_A_TIME, _plain_settings():
        yield


@contextmanager
def _plain_settings() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.compiler.set_stance("force_eager"),  # a compiled module would take a minute to compile again
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def evaluation_copy(net: nn.Module) -> nn.Module:
    """A float32 copy on the CPU in evaluation mode: exporting in train mode raises nothing and is wrong."""
    try:
        with torch.no_grad():  # copying a script module is recorded otherwise
            module = copy.deepcopy(net)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{type(net).__name__} leaves no memory for a copy of it on its device: {telling_lines(error)}. Export it "
            f"from the CPU: net.cpu() first, and net.cuda() afterwards"
        ) from error
    except Exception as error:
        raise ModelError(
            f"{type(net).__name__} cannot be copied for export: {telling_lines(error)}. If it keeps a tensor computed "
            f"in forward(), delete that attribute, or run the network once under torch.no_grad()"
        ) from error
    # float(), not to(float32), which drops the imaginary part of complex weights.
    module = module.cpu().float().eval()
    for parameter in module.parameters():  # not module.requires_grad_: script modules refuse it
        parameter.requires_grad_(False)
    return module


def program_of(module: nn.Module, size: tuple[int, int]) -> torch.export.ExportedProgram | torch.jit.ScriptModule:
    """A module that was copied for export -> what can be written: exported, else scripted, else traced.

    Raises
    ------
    ModelError
        It fails on an input, or none of the three takes it; the message quotes what each said.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module
    rows = sample_rows(size, 2)
    try:
        with torch.no_grad():
            module(rows)
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__} fails on float32 inputs of shape (batch, 3, {size[0]}, {size[1]}): "
            f"{telling_lines(error)}. Images have 3 channels, and the preprocess says their size"
        ) from error
    refusals: list[str] = []
    for how, make in (("torch.export", export), ("torch.jit.script", _script), ("torch.jit.trace", _trace)):
        try:
            program = make(module, size)
            if make is not export:  # which sees by itself what holds for one number of rows alone
                checked_width(program, module, size)
                _log.warning("gpuml: %s; it becomes TorchScript, by %s", refusals[0], how)
            return program
        except Exception as error:  # of nearly any type
            refusals.append(f"{how} refuses it ({telling_lines(error)})")
    raise ModelError(
        f"{type(module).__name__} cannot become a file: {'; '.join(refusals)}. Let forward() take one tensor, with no "
        f"branch on its values and no fixed batch size (len(x) fixes it, x.shape[0] does not); or leave it as code "
        f"that each worker imports: model='python:your.module:function_that_returns_the_network'"
    )


def export(module: nn.Module, size: tuple[int, int]) -> torch.export.ExportedProgram:
    """The program of a module, for float32 inputs of shape (batch, 3, *size) with any number of rows."""
    return export_with(module, sample_rows(size, 2))


def export_with(module: nn.Module, *samples: Tensor) -> torch.export.ExportedProgram:
    """The program of a module, for any number of rows: two in each sample, as one would be the only number it takes."""
    shapes = torch.export.ShapesCollection()  # by tensor, so that forward(*inputs) fits too: DataParallel, compiled
    batch = torch.export.Dim("batch")
    for sample in samples:
        shapes[sample] = {0: batch}
    program = torch.export.export(module, samples, dynamic_shapes=shapes)
    fold_batch_norm(program)
    return program


def strip(program: torch.export.ExportedProgram) -> None:
    """Drop what is no part of the network: equal networks are to be equal files."""
    program.example_inputs = None  # they are pickled into the file otherwise
    for part in graphs(program):
        for node in part.graph.nodes:
            node.meta.pop("stack_trace", None)  # the author's source lines, with their paths


def _script(module: nn.Module, size: tuple[int, int]) -> torch.jit.ScriptModule:
    scripted: torch.jit.ScriptModule = jit("script", module)
    return scripted


def _trace(module: nn.Module, size: tuple[int, int]) -> torch.jit.ScriptModule:
    return trace_with(module, sample_rows(size, 2))


def trace_with(module: nn.Module, *samples: Tensor) -> torch.jit.ScriptModule:
    """A trace, if torch saw nothing in it that another input would do otherwise: a branch traced is a branch lost."""
    with torch.no_grad(), _BranchesOnValues():  # type: ignore[no-untyped-call]
        module(*samples)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        traced: torch.jit.ScriptModule = jit("trace", module, samples, check_trace=False)
    for warning in caught:
        if issubclass(warning.category, TracerWarning):
            raise ModelError(str(warning.message))
    return traced


class _BranchesOnValues(TorchDispatchMode):
    """Refuses what makes Python values of tensors' values: torch.allclose and others do it without a TracerWarning."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.allclose):
            raise ModelError(
                f"forward() makes a Python value of a tensor's ({func}), which a trace would keep for good"
            )
        return func(*args, **(kwargs or {}))


def jit(function: str, *args: Any, **kwargs: Any) -> Any:
    """Call torch.jit, which warns at every call since 2.9 that it is deprecated: exactly that is silenced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is (deprecated|not supported)")
        return getattr(torch.jit, function)(*args, **kwargs)


def graphs(program: torch.export.ExportedProgram) -> Iterator[torch.fx.GraphModule]:
    """The graph of a program and those within it: the bodies of its regions."""
    return (part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))


def checked_width(
    exported: Callable[[Tensor], Any], module: Callable[[Tensor], Any], size: tuple[int, int], name: str = ""
) -> int:
    """Columns of the output, once the exported network was seen to do what the module does, row by row.

    `name` is what messages call it: the module's class unless given.

    Raises
    ------
    ModelError
        It does something else, mixes the rows of a batch, or gives anything but float (batch, width).
    """
    name = name or type(module).__name__
    rows = sample_rows(size, 3)
    with torch.inference_mode():
        try:
            output = exported(rows)
            singles = [exported(row) for row in rows.split(1)]
            eager = [(output, module(rows)), (singles[0], module(rows[:1]))] if exported is not module else []
        except Exception as error:
            raise ModelError(
                f"{name} fails on 3 inputs, or on one, of shape (3, {size[0]}, {size[1]}): {telling_lines(error)}. Was "
                f"it made for inputs of another size, or for one number of rows?"
            ) from error
        for given, count in [(output, 3)] + [(single, 1) for single in singles]:
            if not isinstance(given, Tensor) or not given.is_floating_point() or given.ndim != 2 or len(given) != count:
                kind = type(given).__name__
                what = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {kind}"
                raise ModelError(
                    f"{name} gives {what} for {count} row(s); it must give float of shape (batch, classes) for any "
                    f"batch, one row too (squeeze() without a dimension drops that one)"
                )
        if not all(close(given, expected, range(len(given))) for given, expected in eager):
            raise ModelError(
                f"{name}: the exported network does not give what forward() gives; is it random, or does it branch on "
                f"the number of rows?"
            )
        alone = torch.cat(singles)
        if not close(output, alone, (0, 1, 2)) or not close(exported(rows.flip(0)), alone.flip(0), (2, 1, 0)):
            raise ModelError(
                f"{name} mixes the rows of a batch: row i alone gives another output than row i among others, so "
                f"results would depend on batchSize; remove what reads across dimension 0 (as BatchNorm in training)"
            )
    return int(output.shape[1])


def memory_format(network: nn.Module, size: tuple[int, int]) -> str:
    """The memory that weights and rows may lie in: ``"channels_last"``, or ``"contiguous"`` where that alone will do.

    A graph may hold a view(), which fails on other memory, or an as_strided(), which takes other pixels from it.
    """
    rows = sample_rows(size, 3)
    batches = (rows, rows[:1])
    with torch.inference_mode():
        expected = [network(batch) for batch in batches]
    kept = [(tensor, tensor.data) for tensor in (*network.parameters(), *network.buffers())]
    to_channels_last(network)
    try:
        with torch.inference_mode():
            given = [network(batch.contiguous(memory_format=torch.channels_last)) for batch in batches]
    except Exception:  # of any type; on contiguous memory it ran
        return "contiguous"
    finally:
        for tensor, data in kept:  # the file's are as the user's
            tensor.data = data
    same = all(close(output, wanted, range(len(output))) for output, wanted in zip(given, expected, strict=True))
    return "channels_last" if same else "contiguous"


def to_channels_last(network: nn.Module) -> None:
    """Lay the weights out anew, in place: those of 4 dimensions, as Module.to fails on 5 (YOLO's anchors)."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def moved(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """The program on another device, with its constants, the tensors that it makes and its autocast regions."""
    program = move_to_device_pass(program, device)
    for part in graphs(program):
        for node in part.graph.nodes:
            # torch.autocast(x.device.type) became "cpu" in the export, and the pass leaves it so (torch 2.14).
            if node.target is torch.ops.higher_order.wrap_with_autocast:
                node.update_arg(0, device.type)
        part.recompile()
    return program


def sample_rows(size: tuple[int, int], rows: int) -> Tensor:
    """Fixed inputs, float32 (rows, 3, *size): plain, bright and dark ones in turn.

    Of different kinds, so that what one row makes of the others (``if x.max() > 2``) shows.
    """
    samples = torch.randn((rows, 3, *size), generator=torch.Generator().manual_seed(0))
    spread, mean = (torch.tensor([kind[i % 3] for i in range(rows)]) for kind in ((1.0, 1.5, 0.1), (0.0, 3.0, -2.0)))
    return samples * spread.view(-1, 1, 1, 1) + mean.view(-1, 1, 1, 1)


def telling_lines(error: BaseException) -> str:
    """The type of an error and the telling lines of what it says: torch's messages run over pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = lines[-1:] if "in the TorchScript interpreter" in str(error) else lines[:2]  # a traceback comes first
    return f"{type(error).__name__}: {' '.join(telling)[:400]}".rstrip(":. ")


def close(given: Tensor, expected: Tensor, kinds: Sequence[int]) -> bool:
    """Equal but for float32 rounding, which depends on the batch; each row against its largest finite output.

    `kinds` are the rows' numbers in `sample_rows`. The first is like training's images, and tells of any mixing. The
    others are far from those, where rounding grows (to 5e-3 in an efficientnet_b0 with random weights): more room.
    """
    if given.shape != expected.shape:
        return False
    for row, wanted, kind in zip(given.float(), expected.float(), kinds, strict=True):
        scale = float(row.abs().nan_to_num(0.0, posinf=0.0).max()) if row.numel() else 0.0
        rtol, atol = (1e-3, 1e-4) if kind == 0 else (5e-2, 5e-2)
        if not torch.allclose(row, wanted, rtol=rtol, atol=atol * scale + 1e-7, equal_nan=True):
            return False
    return True
