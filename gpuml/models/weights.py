"""A ``weights`` Param that is a file -> tensors by name, in a network. No code from the file runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import torch
from torch import nn

from gpuml.errors import ModelError
from gpuml.models.export import telling_lines

#: torch.load reads them at each call.
_WEIGHTS_ONLY, _NO_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def weights_path(weights: str) -> Path | None:
    """The file that a ``weights`` Param means, if it means a file.

    Raises
    ------
    ModelError
        It means a file that is not there.
    """
    named = "/" in weights or "\\" in weights or Path(weights).suffix in (".pth", ".pt", ".bin", ".safetensors")
    if not named:
        return None
    path = local_path(weights)
    check_file(path, f"weights={weights!r}")
    return path


def local_path(text: str) -> Path:
    """A path as users write it: with ``~``, or as a ``file:`` URL, whose name may be quoted (``%20``) or not."""
    if not text.startswith("file:/"):
        try:
            return Path(text).expanduser()
        except RuntimeError as error:  # ~someone
            raise ModelError(f"{text!r} is no path here: {error}") from error
    path = Path(re.sub(r"^file:(//)?(?=/)", "", text))
    return path if path.exists() else Path(unquote(str(path)))


def check_file(path: Path, what: str) -> None:
    """Refuse what is no file, before anything is opened."""
    try:
        found = path.is_file()
    except OSError as error:  # a name that is too long
        raise ModelError(f"{what}: {error.strerror}") from error
    if not found:
        problem = "that is a folder" if path.is_dir() else "there is no such file on the driver"
        raise ModelError(f"{what}: {problem} ({path.absolute()})")


def state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU wherever they were saved.

    Raises
    ------
    ModelError
        The file holds anything else.
    """
    try:
        if _is_safetensors(path):
            from safetensors.torch import load_file

            state: object = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise ModelError(f"weights={str(path)!r} need the package safetensors: pip install safetensors") from None
    except Exception as error:
        raise ModelError(
            f"weights={str(path)!r} is no state dict that can be read safely ({type(error).__name__}); save one with "
            f"torch.save(net.state_dict(), path), or as .safetensors"
        ) from error
    named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not isinstance(state, dict) or not named or not all(isinstance(value, torch.Tensor) for value in state.values()):
        what = f"a dict of {', '.join(map(repr, list(state)[:5]))}" if isinstance(state, dict) else type(state).__name__
        raise ModelError(f"weights={str(path)!r} holds {what}, not tensors by name; save net.state_dict() alone")
    return dict(state)


@contextmanager
def no_code() -> Iterator[None]:
    """Within it torch.load runs no code of a file, whatever its caller asks for.

    torchvision's loader asks for everything, and timm's does so after a TypeError, which a file can bring about.
    Reading a file safely beforehand proves nothing: torch.hub unpacks a zip in its cache, which may replace itself so.
    """
    before = {name: os.environ.pop(name, None) for name in (_WEIGHTS_ONLY, _NO_WEIGHTS_ONLY)}  # torch refuses both
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        del os.environ[_WEIGHTS_ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _is_safetensors(path: Path) -> bool:
    """Told by its start, 8 bytes of a length and JSON: torch's files begin with a zip's or a pickle's mark."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def load_weights(net: nn.Module, state: dict[str, torch.Tensor], path: Path, source: str, classes: int) -> None:
    """Put a state dict into a network, every tensor of both.

    Raises
    ------
    ModelError
        They do not fit one another; `source` and `classes` say what the network is.
    """
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        wrapped = bool(state) and all(name.startswith("module.") for name in state)
        advice = (
            "Its names begin with 'module.', as DataParallel saves them: save net.module.state_dict()"
            if wrapped
            else "They must be a state dict of that network; with other classes, set labels to their names"
        )
        raise ModelError(
            f"weights={str(path)!r} do not fit {source} with {classes} outputs: {telling_lines(error)}. {advice}."
        ) from error
