"""The name of a workload -> its network, with the same weights in every process; and the peers' way to score images."""

from __future__ import annotations

import fcntl
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from gpuml import Preprocess, save_model

#: What torchvision's zoo asks for, and what every peer does.
PREPROCESS = Preprocess(resize=256, crop=224)

#: Seconds that the simulated accelerator takes for an image.
ACCELERATOR_S = 0.0006

#: Held by whoever uses the simulated accelerator: a machine has one, whatever number of processes share it.
_ACCELERATOR = Path(tempfile.gettempdir()) / "gpuml-bench-accelerator.lock"


OURS = ("limit", "gpuml")
PEERS = (*OURS, "predict_batch_udf", "predict_batch_udf_floats", "pandas_udf", "daft")


@dataclass(frozen=True)
class Workload:
    """A network, the kind of images that it gets, how many of them a full run has, and who runs it unless asked."""

    network: str
    kind: str
    images: int
    peers: tuple[str, ...]


WORKLOADS = {
    # mlflow's is one pandas UDF with its own way to load: once is enough to show what that costs.
    "pooled": Workload("pooled", "jpeg", 4608, (*PEERS, "mlflow")),
    "accelerator": Workload("accelerator", "jpeg", 4608, PEERS),
    "mobilenet_v3_small": Workload("mobilenet_v3_small", "jpeg", 2048, PEERS),
    "resnet18": Workload("resnet18", "jpeg", 256, PEERS),
    "pooled_12mp": Workload("pooled", "jpeg12mp", 64, OURS),
    "pooled_png": Workload("pooled", "png", 512, OURS),
    "pooled_struct": Workload("pooled", "struct", 1024, OURS),
}


class Pooled(nn.Module):
    """Mean colour, then one linear layer with seeded weights: what is measured is all but the network."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(10, 3, generator=torch.Generator().manual_seed(2))
        weight = 10 * nn.functional.normalize(weight, dim=1)
        self.linear = nn.Linear(3, 10)
        self.linear.weight = nn.Parameter(weight)
        # Centred on the mean colour of the photographs, the ten directions share them out: 8 labels are given.
        self.linear.bias = nn.Parameter(-weight @ torch.tensor([0.11, -0.33, -0.36]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean((2, 3)))


class Accelerator(Pooled):
    """`Pooled` on a device that takes its time for each image, and no core: the machine has one, used in turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(_ACCELERATOR, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing gives it back
            time.sleep(ACCELERATOR_S * len(x))
        return super().forward(x)


def accelerator() -> nn.Module:
    """What gpuml's ``python:bench.workloads:accelerator`` calls."""
    return Accelerator()


def prepare(models: Path, names: set[str]) -> None:
    """Write each network's weights (``.pt``) and its model file (``.pt2``), unless they are there."""
    from architectures import calibrate, pixels
    from torchvision import models as zoo

    models.mkdir(parents=True, exist_ok=True)
    for name in sorted(names - {"accelerator"}):
        if (models / f"{name}.pt2").is_file():
            continue
        torch.manual_seed(0)
        net = Pooled() if name == "pooled" else getattr(zoo, name)()
        if name != "pooled":
            calibrate(net, pixels(PREPROCESS))
        torch.save(net.state_dict(), models / f"{name}.pt")
        save_model(net, models / f"{name}.pt2", preprocess=PREPROCESS)


def network(name: str, models: str | Path) -> nn.Module:
    """The network as its makers would use it in plain PyTorch: eager, in evaluation mode, with its weights."""
    from torchvision import models as zoo

    if name == "accelerator":
        return Accelerator().eval()
    net = Pooled() if name == "pooled" else getattr(zoo, name)()
    net.load_state_dict(torch.load(Path(models) / f"{name}.pt", weights_only=True))
    return net.eval()


def scorer(name: str, models: str | Path) -> Callable[[Sequence[bytes]], dict[str, Any]]:
    """A function from encoded images to ``prediction`` float32 (n,) and ``probability`` float32 (n, classes).

    Pillow, the preset of torchvision's zoo on Pillow images, and the eager network: what most people write.
    """
    from torchvision.transforms._presets import ImageClassification

    net, preset = network(name, models), ImageClassification(crop_size=224, resize_size=256)

    def score(contents: Sequence[bytes]) -> dict[str, Any]:
        batch = torch.stack([preset(Image.open(io.BytesIO(content)).convert("RGB")) for content in contents])
        return outputs(net, batch)

    return score


def reference(name: str, models: Path, kind: str, root: Path) -> list[tuple[int, float]]:
    """What the peers' labels are compared with: of each different image, its label and how far its probability is ahead
    of the next one. Image number n is the n-th of them, modulo their number."""
    from bench import data

    score = scorer(name, models)
    found: list[tuple[int, float]] = []
    _, contents = data.read(data.parquet(root, kind, data.KINDS[kind].distinct, 1) / "part-0.parquet")
    for start in range(0, len(contents), 16):
        made = score([data.encoded(content) for content in contents[start : start + 16]])
        ahead = np.diff(np.sort(made["probability"], 1)[:, -2:], axis=1)[:, 0]
        found += zip(made["prediction"].astype(int).tolist(), ahead.tolist(), strict=True)
    return found


def outputs(net: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> dict[str, Any]:
    """A normalised batch -> the two columns that every peer gives."""
    with torch.inference_mode():
        probability = torch.softmax(net(batch), 1).numpy()
    return {"prediction": probability.argmax(1).astype(np.float32), "probability": probability}
