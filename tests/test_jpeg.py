"""The faster JPEG decoder: the same pixels and the same reasons as Pillow's, whatever the file."""

import io
import random

import numpy as np
import pytest
from conftest import picture
from make_inputs import exif, insert_app
from PIL import Image, ImageFile

from gpuml.errors import RowError
from gpuml.worker import jpeg
from gpuml.worker.decode import decode


def encoded(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


PHOTO = picture(3, 121, 87).resize((83, 61), Image.Resampling.BICUBIC)
FILES = {
    "baseline": encoded(PHOTO, quality=90),
    "4:4:4": encoded(PHOTO, subsampling=0),
    "4:2:2": encoded(PHOTO, subsampling=1),
    "progressive": encoded(PHOTO, progressive=True),
    "rgb": encoded(PHOTO, keep_rgb=True),
    "restarts": encoded(PHOTO, restart_marker_rows=1),
    "grey": encoded(PHOTO.convert("L")),
    "cmyk": encoded(PHOTO.convert("CMYK")),
    "one pixel": encoded(PHOTO.resize((1, 1))),
    **{f"turned {turn}": insert_app(encoded(PHOTO), 0xE1, exif(turn)) for turn in range(1, 9)},
}


def outcome(data):
    """Pixels, or the reason why not."""
    try:
        return decode(data, max_pixels=1 << 24, alpha="white").numpy()
    except RowError as error:
        return str(error)


@pytest.fixture
def both(monkeypatch):
    """Decodes twice, with the faster decoder and without it; says whether the faster one gave the pixels."""
    assert jpeg._simplejpeg is not None, "pip install simplejpeg"
    served = []
    real = jpeg.jpeg_pixels

    def watched(image, data, scale):
        pixels = real(image, data, scale)
        served.append(pixels is not None)
        return pixels

    def run(data):
        served.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpuml.worker.decode.jpeg_pixels", watched)
            fast = outcome(data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpuml.worker.decode.jpeg_pixels", lambda image, data, scale: None)
            plain = outcome(data)
        return fast, plain, any(served)

    return run


def same(a, b):
    return a == b if isinstance(a, str) or isinstance(b, str) else np.array_equal(a, b)


@pytest.mark.parametrize("name", FILES)
def test_the_pixels_are_pillows(name, both):
    fast, plain, served = both(FILES[name])
    assert fast.shape == plain.shape
    assert same(fast, plain)
    assert served is (name not in ("grey", "cmyk"))


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_have_the_same_outcome(name, both):
    generator = random.Random(name)
    used = 0
    for _ in range(300):
        data = bytearray(FILES[name])
        kind = generator.randrange(4)
        at = generator.randrange(2, len(data))
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 2:
            data[at : at + 4] = generator.randbytes(4)
        else:
            data[at:at] = generator.randbytes(generator.randrange(1, 9))
        fast, plain, served = both(bytes(data))
        used += served
        if isinstance(plain, str):
            assert isinstance(fast, str), (name, kind, at)
            assert fast.split(":")[0] == plain.split(":")[0]
        else:
            assert same(fast, plain), (name, kind, at)


def test_pillow_has_the_last_word_on_truncated_files(both):
    fast, plain, served = both(FILES["baseline"][:-40])
    assert fast == plain
    assert fast.startswith("truncated")
    assert not served


def test_it_is_left_out_where_the_process_lets_pillow_read_truncated_files(both, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert both(FILES["baseline"])[2] is False


def test_without_the_package_pillow_decodes(monkeypatch):
    wanted = outcome(FILES["baseline"])
    monkeypatch.setattr(jpeg, "_simplejpeg", None)
    assert same(outcome(FILES["baseline"]), wanted)
