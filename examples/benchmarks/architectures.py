"""Networks of torchvision's and timm's zoos -> a table: does the model file give what the network gives in plain torch?

    python examples/benchmarks/architectures.py [torchvision:resnet18 timm:vit_tiny_patch16_224 ...]

Weights are random, since this needs no download, but the networks are calibrated first: BatchNorm has the statistics of
48 crops of the sample photographs; each output has mean 0, and all together standard deviation 3, over them.
Else most outputs of a deep random network are equal for every image, and equal outputs would prove nothing.
"""

import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import torch
import torchvision
from PIL import Image, ImageEnhance, ImageOps
from torch import nn

from gpuml import save_model
from gpuml.models.file import load
from gpuml.models.sources import ZOOS
from gpuml.worker.preprocess import normalise

NAMES = (
    "astronaut.jpg",
    "camera.png",
    "cat.png",
    "coffee.jpg",
    "flower.jpg",
    "motorcycle.jpg",
    "rocket.jpg",
    "temple.jpg",
)
PHOTOGRAPHS = [Path(__file__).parents[1] / "images" / name for name in NAMES]
COUNT = 48

ARCHITECTURES = (
    "torchvision:convnext_tiny",
    "torchvision:densenet121",
    "torchvision:efficientnet_b0",
    "torchvision:googlenet",
    "torchvision:inception_v3",
    "torchvision:maxvit_t",
    "torchvision:mobilenet_v3_small",
    "torchvision:regnet_y_400mf",
    "torchvision:resnet18",
    "torchvision:swin_t",
    "torchvision:vit_b_16",
    "timm:coatnet_0_rw_224",
    "timm:convnextv2_atto",
    "timm:inception_v4",
    "timm:mixer_s32_224",
    "timm:mobilenetv4_conv_small",
    "timm:regnety_002",
    "timm:swinv2_tiny_window8_256",
    "timm:tf_efficientnetv2_b0",
    "timm:vit_tiny_patch16_224",
)


class Row(NamedTuple):
    """What was seen of one architecture; `difference` is the largest one of a logit over the largest logit."""

    name: str
    export_s: float
    size_mb: float
    load_s: float
    difference: float
    labels: int


def pixels(preprocess):
    """48 crops of the photographs that differ in contrast and order of colours too: float32 (48, 3, height, width)."""
    random = np.random.default_rng(0)
    height, width = preprocess.size
    rows = []
    for number in range(COUNT):
        image = Image.open(PHOTOGRAPHS[number % len(PHOTOGRAPHS)]).convert("RGB")
        part = random.uniform(0.15, 0.6)
        left, top = (random.uniform(0, 1 - part) * side for side in image.size)
        box = (left, top, left + part * image.width, top + part * image.height)
        image = image.resize((width, height), Image.Resampling.BICUBIC, box=box)
        image = ImageOps.mirror(image) if random.random() < 0.5 else image
        image = ImageEnhance.Contrast(image).enhance(random.uniform(0.6, 1.6))
        rows.append(torch.from_numpy(np.array(image)[:, :, random.permutation(3)]).permute(2, 0, 1))
    return normalise(torch.stack(rows), preprocess)


def calibrate(net, rows):
    """Give a random network outputs that differ from image to image, in place; it ends in evaluation mode.

    Its last layer must be the linear one that gives the outputs.
    """
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0  # the statistics become those of this one batch
            module.train()
    linear = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    inputs = []
    with torch.no_grad():
        net(rows)
        net.eval()
        handle = linear.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        predict(net, rows)
        handle.remove()
        features = torch.cat(inputs)
        mean = features.mean(0)
        # A few directions hold most of what differs between images; evened out by half, they lead to more labels.
        _, lengths, directions = torch.linalg.svd(features - mean, full_matrices=False)
        directions, lengths = directions[lengths > 1e-3 * lengths[0]], lengths[lengths > 1e-3 * lengths[0]]
        if not linear.weight.any():  # some networks, such as vit_b_16, begin with zeros
            nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
        weight = linear.weight @ directions.T / lengths.sqrt() @ directions
        weight *= 3 / ((features - mean) @ weight.T).std()
        linear.weight.copy_(weight)
        linear.bias = nn.Parameter(-(weight @ mean))


def predict(network, rows):
    """Logits, 16 rows at a time."""
    with torch.no_grad():
        return torch.cat([network(part) for part in rows.split(16)])


def measure(name):
    """Export a calibrated network, load the file, compare.

    Raises
    ------
    AssertionError
        The file gives other logits than the network, or the network fewer than 30 labels for 48 images.
    """
    prefix, _, rest = name.partition(":")
    built = ZOOS[f"{prefix}:"](rest, "none", ()).build()
    rows = pixels(built.preprocess)
    calibrate(built.net, rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.pt2"
        start = time.perf_counter()
        save_model(built.net, path, labels=built.labels, preprocess=built.preprocess)
        exported = time.perf_counter()
        network, card = load(path, torch.device("cpu"))
        loaded = time.perf_counter()
        size = path.stat().st_size / 1e6
        expected, given = predict(built.net, rows), predict(network, rows)
    difference = float((given - expected).abs().max() / expected.abs().max())
    labels = {card.labels[index] for index in given.argmax(1).tolist()}
    assert difference <= 1e-4, f"{name}: logits differ by {difference:.1e} of the largest"
    assert len(labels) >= 30, f"{name}: {len(labels)} labels for {COUNT} images"
    return Row(name, exported - start, size, loaded - exported, difference, len(labels))


def main(names):
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}, "
        f"timm {timm.__version__}, {torch.get_num_threads()} threads\n"
    )
    print("| Model | Export, s | File, MB | Load, s | Relative difference | Labels of 48 images |")
    print("|---|---|---|---|---|---|")
    for name in names:
        row = measure(name)
        print(
            f"| `{row.name}` | {row.export_s:.1f} | {row.size_mb:.0f} | {row.load_s:.1f} | {row.difference:.0e} | "
            f"{row.labels} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:] or ARCHITECTURES)
