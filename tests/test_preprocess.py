"""Resize, crop and normalise agree with torchvision's own transforms of a Pillow image."""

import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as reference

from gpuml.spec import Preprocess
from gpuml.worker import preprocess as module
from gpuml.worker.preprocess import normalise, resize_crop

SETTINGS = [
    Preprocess(),
    Preprocess(resize=232, interpolation="bicubic"),
    Preprocess(interpolation="nearest"),
    Preprocess(resize=(200, 333), crop=None),
    Preprocess(resize=256, crop=(224, 201)),
    Preprocess(resize=64, crop=63, interpolation="bicubic"),
]


def photo(height, width):
    """Smooth shapes with edges and noise on them, as a tensor that `decode` could have given."""
    y, x = np.mgrid[0:height, 0:width]
    base = 120 + 80 * np.sin(x / 17 + np.arange(3)[:, None, None]) * np.cos(y / 23)
    base += 40 * ((x // 31 + y // 29) % 2)
    noise = np.random.default_rng(height * 10007 + width).normal(0, 12, base.shape)
    pixels = np.clip(base + noise, 0, 255).astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(1, 2, 0))).permute(2, 0, 1)


def torchvision_result(pixels, preprocess):
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
    size = preprocess.resize if isinstance(preprocess.resize, int) else list(preprocess.resize)
    image = reference.resize(image, size, interpolation=InterpolationMode(preprocess.interpolation))
    return reference.pil_to_tensor(image if preprocess.crop is None else reference.center_crop(image, preprocess.crop))


def difference(found, expected):
    assert found.shape == expected.shape
    return (found.int() - expected.int()).abs().float()


def assert_same_but_for_ties(off):
    """A resized pixel whose centre falls exactly between two source pixels may take either: a column, if any."""
    assert (off > 0).float().mean() < 0.01


@pytest.mark.parametrize("preprocess", SETTINGS, ids=lambda p: f"{p.resize}-{p.crop}-{p.interpolation}")
@pytest.mark.parametrize("size", [(375, 500), (500, 375), (40, 61), (900, 1201), (256, 257), (3, 50), (50, 3), (7, 90)])
def test_result_is_that_of_torchvision_on_a_pillow_image(size, preprocess):
    pixels = photo(*size)
    off = difference(resize_crop(pixels, preprocess), torchvision_result(pixels, preprocess))
    if preprocess.interpolation == "nearest":
        assert_same_but_for_ties(off)
    else:  # seen: at most 2, and 0.25 on average; torch's integer kernels keep other bits than Pillow's
        assert off.max() <= 2
        assert off.mean() < 0.3


@pytest.mark.parametrize("size", [(h, w) for h in range(1, 6) for w in range(1, 6)])
def test_every_small_size_gives_the_size_of_the_model(size):
    for interpolation in ("nearest", "bilinear", "bicubic"):
        for antialias in (True, False):
            found = resize_crop(photo(*size), Preprocess(interpolation=interpolation, antialias=antialias))
            assert found.shape == (3, 224, 224)
            assert found.dtype == torch.uint8


def test_image_of_the_right_size_is_only_cropped():
    pixels = photo(256, 300)
    assert torch.equal(resize_crop(pixels, Preprocess()), pixels[:, 16:240, 38:262])
    assert torch.equal(resize_crop(pixels, Preprocess(resize=(256, 300), crop=None)), pixels)


def test_flat_image_three_pixels_high_keeps_its_colour():
    pixels = torch.tensor([200, 40, 41], dtype=torch.uint8).expand(3, 50, 3).permute(2, 0, 1)
    assert resize_crop(pixels, Preprocess()).unique(dim=1).squeeze().unique(dim=1).flatten().tolist() == [200, 40, 41]


def test_result_is_written_into_the_slot_of_a_batch():
    batch = torch.zeros((2, 224, 224, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    pixels = photo(300, 400)
    assert resize_crop(pixels, Preprocess(), out=batch[1]).data_ptr() == batch[1].data_ptr()
    assert torch.equal(batch[1], resize_crop(pixels, Preprocess()))
    assert batch[0].max() == 0
    assert resize_crop(pixels, Preprocess()).permute(1, 2, 0).is_contiguous()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_without_antialias_the_result_is_the_rounded_float_one(interpolation):
    pixels = photo(375, 500)
    preprocess = Preprocess(resize=(60, 81), crop=None, interpolation=interpolation, antialias=False)
    values = torch.nn.functional.interpolate(pixels[None].float(), (60, 81), mode=interpolation, align_corners=False)
    assert torch.equal(resize_crop(pixels, preprocess), values[0].clamp(0, 255).round().to(torch.uint8))
    assert not torch.equal(
        resize_crop(pixels, preprocess),
        resize_crop(pixels, Preprocess(resize=(60, 81), crop=None, interpolation=interpolation)),
    )


# ------------------------------------------------------------------------------- extreme aspect ratios


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(3, 700), (700, 3), (5, 3000), (1, 150), (150, 1), (2, 2)])
def test_resizing_only_the_cropped_part_equals_cropping_the_whole_resize(size, interpolation, monkeypatch):
    pixels, preprocess = photo(*size), Preprocess(interpolation=interpolation)
    expected = torchvision_result(pixels, preprocess)
    whole = resize_crop(pixels, preprocess)
    monkeypatch.setattr(module, "_LARGE", 0)
    part = resize_crop(pixels, preprocess)
    if interpolation == "nearest":
        assert_same_but_for_ties(difference(part, expected))
    else:
        assert difference(part, expected).max() <= 1
    assert difference(part, whole).max() <= 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory from Linux's /proc")
def test_extreme_aspect_ratio_stays_under_200_megabytes():
    code = (
        "import pathlib, torch\n"
        "from gpuml.spec import Preprocess\n"
        "from gpuml.worker.preprocess import resize_crop\n"
        # Not ru_maxrss, which on Linux starts at the peak of the process that started this one: pytest's.
        "peak = lambda: int(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) // 1024\n"
        "before = peak()\n"
        "for height, width in ((1, 4000), (4000, 1), (2, 20000), (1, 10**6)):\n"
        "    pixels = torch.zeros((height, width, 3), dtype=torch.uint8).permute(2, 0, 1)\n"
        "    for name in ('nearest', 'bilinear', 'bicubic'):\n"
        "        assert resize_crop(pixels, Preprocess(interpolation=name)).shape == (3, 224, 224)\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200


def test_two_halves_of_a_very_wide_image_meet_in_the_middle():
    pixels = torch.zeros((1, 4000, 3), dtype=torch.uint8)
    pixels[:, :2000], pixels[:, 2000:] = torch.tensor([200, 0, 0]), torch.tensor([0, 0, 200])
    found = resize_crop(pixels.permute(2, 0, 1), Preprocess())
    # The crop shows less than one source pixel, around the seam: red fades into blue, the mirror image of itself.
    red, blue = found[0, 100].int(), found[2, 100].int()
    assert (red[0] - red[-1], red[0]) == (blue[-1] - blue[0], blue[-1])
    assert 150 < red[0] < 200
    assert torch.equal(found[0, 0], found[0, -1])


# -------------------------------------------------------------------------------------------- threads


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="counts threads in /proc; other CPUs' kernels differ",
)
def test_a_thread_that_decodes_starts_no_threads_of_its_own():
    code = (
        "import os, threading, numpy as np, torch\n"
        "from gpuml.spec import Preprocess\n"
        "from gpuml.worker.preprocess import resize_crop\n"
        "torch.set_num_threads(4)\n"
        "started = {}\n"
        "def decode(preprocess, size):\n"
        "    pixels = torch.from_numpy(np.zeros((*size, 3), np.uint8)).permute(2, 0, 1)\n"
        "    before = set(os.listdir('/proc/self/task'))\n"  # one that has ended may be among them still
        "    resize_crop(pixels, preprocess)\n"
        "    started[preprocess, size] = len(set(os.listdir('/proc/self/task')) - before)\n"
        "for name in ('nearest', 'bilinear', 'bicubic'):\n"
        "    for resize in (256, (375, 500)):\n"
        "        for size in ((375, 500), (20, 2000)):\n"
        "            thread = threading.Thread(target=decode, args=(Preprocess(resize, interpolation=name), size))\n"
        "            thread.start()\n"
        "            thread.join()\n"
        "print(len(started), sum(started.values()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["12", "0"]


# ------------------------------------------------------------------------------------------ normalise


def test_normalise_is_pixel_over_255_less_mean_over_std_in_channels_last_memory():
    batch = torch.arange(256, dtype=torch.uint8).repeat(3 * 4).view(4, 16, 16, 3).permute(0, 3, 1, 2)
    preprocess = Preprocess(resize=16, crop=16, mean=(0.5, 0.25, 0.1), std=(0.5, 1.0, 0.2))
    found = normalise(batch, preprocess)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (preprocess.mean, preprocess.std))
    assert found.dtype == torch.float32
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found - (batch.double() / 255 - mean) / std).abs().max() < 1e-6
    assert batch.dtype == torch.uint8  # the batch is left as it was
