"""JPEGs decoded at 1/2, 1/4 and 1/8: when, to which pixels, and what that leaves alone."""

import io
import itertools
import math
import random
import struct

import numpy as np
import pytest
import torch
from conftest import PLAIN, encoded, picture
from make_inputs import exif, insert_app
from PIL import Image, ImageFile

from gpuml import ImageClassifier, ParamError, Preprocess
from gpuml.errors import RowError
from gpuml.models.cards import Card
from gpuml.spec import Spec
from gpuml.worker import decode as module
from gpuml.worker import jpeg
from gpuml.worker.cache import Network
from gpuml.worker.decode import decode, decode_scaled
from gpuml.worker.jpeg import jpeg_scale
from gpuml.worker.preprocess import resize_crop
from gpuml.worker.runner import Runner, least_pixels, read


def jpeg_of(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def photo(width, height, mode="RGB"):
    """Smooth shapes with some noise; different in every place."""
    noise = np.random.default_rng(width * height).normal(0, 6, (height, width, 1))
    shapes = picture(7, 13, 11).resize((width, height), Image.Resampling.BICUBIC)
    return Image.fromarray((np.asarray(shapes) + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def scaled(data, least, **limits):
    """(height, width, 3) pixels, and the full size; or the reason why not."""
    try:
        pixels, full = decode_scaled(data, **{"max_pixels": 1 << 24, "alpha": "white", "least": least, **limits})
    except RowError as error:
        return str(error), None
    return pixels.permute(1, 2, 0).numpy(), full


def both(data, least):
    """The outcome with simplejpeg and without it."""
    assert jpeg._simplejpeg is not None, "pip install simplejpeg"
    fast = scaled(data, least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg, "_simplejpeg", None)
        return fast, scaled(data, least)


def drafted(data, scale):
    """What Pillow makes of it."""
    image = Image.open(io.BytesIO(data))
    image.draft(None, (image.width // scale, image.height // scale))
    return np.asarray(image.convert("RGB"))


# --- which scale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "least", "scale"),
    [
        ((3000, 4000), (256, 256), 8),
        ((3000, 4000), (512, 512), 4),
        ((3000, 4000), (768, 768), 2),
        ((3000, 4000), (1500, 1500), 2),
        ((3000, 4000), (1500.5, 1500.5), 1),
        ((2048, 4000), (256, 256), 8),
        ((2047, 4000), (256, 256), 4),  # 255.9 pixels, though libjpeg makes 256 of them
        ((4000, 1), (1, 1), 1),
        ((4000, 100), (224, 224), 1),  # one axis is enlarged
        ((4000, 900), (448, 224), 4),
        ((900, 4000), (448, 224), 2),
        ((8, 8), (1, 1), 8),
        ((7, 8), (1, 1), 4),
        ((0, 8), (1, 1), 1),
        ((3000, 4000), (math.inf, math.inf), 1),
    ],
)
def test_the_smallest_scale_that_keeps_enough_whole_pixels(size, least, scale):
    assert jpeg_scale(jpeg_of(picture()), size, least) == scale


@pytest.mark.parametrize(
    ("resize", "ratio", "least"),
    [(256, 0.0, None), (256, 1.5, (384, 384)), (255, 1.5, (382.5, 382.5)), ((100, 300), 2.0, (200, 600))],
)
def test_what_must_remain_is_a_multiple_of_the_resize(resize, ratio, least):
    preprocess = Preprocess(resize=resize, crop=96)
    assert least_pixels(preprocess, Spec("0" * 64, scaled_decode=ratio)) == least


@pytest.mark.parametrize("turn", range(1, 9))
def test_the_rule_holds_for_the_upright_picture(turn):
    data = insert_app(jpeg_of(photo(400, 96)), 0xE1, exif(turn))
    upright = (400, 96) if turn >= 5 else (96, 400)
    pixels, full = scaled(data, (upright[0] / 4, upright[1] / 4))
    assert full == upright
    assert pixels.shape == (upright[0] // 4, upright[1] // 4, 3)
    # With the axes the other way round one of them would keep too little, at any scale.
    assert scaled(data, (upright[1] / 1.5, upright[0] / 4))[0].shape == (*upright, 3)
    assert abs(pixels.mean((0, 1)) - decode(data, max_pixels=1 << 24, alpha="white").numpy().mean((1, 2))).max() < 1


# --- the pixels ---------------------------------------------------------------------------------------------------

KINDS = {
    "4:2:0": {},
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_rows": 1},
    "rgb": {"keep_rgb": True},
    "grey": {"mode": "L"},
    "cmyk": {"mode": "CMYK"},
    "grey progressive": {"mode": "L", "progressive": True},
}
SIZES = [(160, 120), (161, 121), (163, 125), (167, 127), (159, 119), (99, 16), (17, 131)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_both_decoders_give_the_pixels_of_pillows_draft(kind, scale):
    options = dict(KINDS[kind])
    mode = options.pop("mode", "RGB")
    for width, height in SIZES:
        data = jpeg_of(photo(width, height, mode), quality=90, **options)
        fast, plain = both(data, (height / scale, width / scale))
        assert fast[1] == plain[1] == (height, width)
        assert fast[0].shape == (-(-height // scale), -(-width // scale), 3)
        assert np.array_equal(fast[0], plain[0]), (width, height)
        assert np.array_equal(fast[0], drafted(data, scale)), (width, height)


def test_simplejpeg_decodes_what_it_decodes_at_full_size(monkeypatch):
    served = []
    real = jpeg.jpeg_pixels
    monkeypatch.setattr(module, "jpeg_pixels", lambda *given: served.append(real(*given)) or served[-1])
    for mode in ("RGB", "L"):
        scaled(jpeg_of(photo(160, 120, mode)), (15, 20))
    assert served[0].shape == (15, 20, 3)
    assert served[1] is None


def test_both_decoders_take_the_same_scale_of_the_smallest_pictures():
    for width, height in itertools.product(range(1, 18), repeat=2):
        data = jpeg_of(photo(18, 18).crop((0, 0, width, height)), quality=95)
        for least in ((1, 1), (1.25, 1.25), (2, 2)):
            fast, plain = both(data, least)
            assert np.array_equal(fast[0], plain[0]), (width, height, least)


def test_a_scaled_picture_is_the_mean_of_its_blocks():
    image = photo(320, 240)
    data = jpeg_of(image, quality=98, subsampling=0)
    for scale in (2, 4, 8):
        pixels, _ = scaled(data, (240 / scale, 320 / scale))
        apart = np.abs(pixels.astype(int) - np.asarray(image.reduce(scale)))
        assert apart.mean() < 2, scale


def test_the_crop_lies_where_that_of_the_full_size_lies():
    # 1183x1024 at 1/8 is 148x128: alone it would be resized to 74x64 instead of 73x64.
    preprocess = Preprocess(resize=64, crop=56)
    data = jpeg_of(photo(1183, 1024), quality=95, subsampling=0)
    whole, full = decode_scaled(data, max_pixels=1 << 24, alpha="white", least=None)
    pixels, size = decode_scaled(data, max_pixels=1 << 24, alpha="white", least=(128, 128))
    assert (tuple(pixels.shape[1:]), size, full) == ((128, 148), (1024, 1183), (1024, 1183))
    wanted = resize_crop(whole, preprocess).int()
    apart = [
        (resize_crop(pixels, preprocess, full=given).int() - wanted).abs().float().mean() for given in (size, None)
    ]
    assert apart[0] < 0.75
    assert apart[1] > 2 * apart[0]


# --- what it leaves alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_other_formats_are_decoded_as_before(kind):
    data = encoded(3, kind, width=160, height=120)
    pixels, full = scaled(data, (10, 10))
    assert full == (120, 160)
    assert np.array_equal(pixels.transpose(2, 0, 1), decode(data, max_pixels=1 << 24, alpha="white").numpy())


def test_off_is_full_size():
    data = jpeg_of(photo(161, 121))
    for outcome in both(data, None):
        assert outcome[1] == (121, 161)
        assert np.array_equal(outcome[0], np.asarray(Image.open(io.BytesIO(data))))


def test_max_pixels_counts_at_full_size():
    data = jpeg_of(photo(160, 120))
    assert scaled(data, (15, 20), max_pixels=160 * 120)[0].shape == (15, 20, 3)
    assert scaled(data, (15, 20), max_pixels=160 * 120 - 1)[0].startswith("too_large")


def test_structs_and_opened_images_stay_at_full_size(tmp_path):
    data = jpeg_of(photo(160, 120))
    least = (15, 20)
    image = Image.open(io.BytesIO(data))
    struct_row = (np.asarray(image)[:, :, ::-1].tobytes(), 120, 160, 3, 16)
    opened = Image.open(io.BytesIO(data))
    (tmp_path / "a.jpg").write_bytes(data)
    sizes = [read(row, Spec("0" * 64), least)[0].shape[1:] for row in (struct_row, opened, data, tmp_path / "a.jpg")]
    assert [tuple(size) for size in sizes] == [(120, 160), (120, 160), (15, 20), (15, 20)]
    assert opened.size == (160, 120)


# --- files that are damaged, or lie -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "restarts", "grey", "cmyk"])
@pytest.mark.parametrize("lenient", [False, True])
def test_damaged_files_have_the_outcome_of_the_full_size(kind, lenient, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)  # others in the process may have set it
    options = dict(KINDS[kind])
    good = jpeg_of(photo(83, 61, options.pop("mode", "RGB")), **options)
    generator = random.Random(kind)
    for number in range(60 if lenient else 240):
        data = bytearray(good)
        at = generator.randrange(2, len(data))
        if number % 4 == 0:
            del data[at:]
        elif number % 4 == 1:
            data[at] ^= 1 << generator.randrange(8)
        elif number % 4 == 2:
            data[at : at + 4] = generator.randbytes(4)
        else:
            data[at:at] = generator.randbytes(generator.randrange(1, 9))
        whole, _ = scaled(bytes(data), None)
        (fast, _), (plain, _) = both(bytes(data), (1.0, 1.0))
        if isinstance(whole, str):
            assert plain == whole, (number, at)
            assert fast.split(":")[0] == whole.split(":")[0], (number, at)
        else:
            assert np.array_equal(fast, plain), (number, at)


def segment(marker, payload):
    return bytes([0xFF, marker]) + struct.pack(">H", len(payload) + 2) + payload


def lossless(channels, before=b""):
    """A lossless JPEG of 160x120 pixels, all 128: each is its neighbour plus a difference of no bits, code 0."""
    numbers = range(1, channels + 1)
    return b"".join(
        [
            b"\xff\xd8",
            before,
            segment(0xEE, b"Adobe\0\x64\0\0\0\0\0"),  # three channels are RGB
            segment(0xC3, struct.pack(">BHHB", 8, 120, 160, channels) + b"".join(bytes([i, 0x11, 0]) for i in numbers)),
            segment(0xC4, bytes([0, 1, *[0] * 15, 0])),
            segment(0xDA, bytes([channels]) + b"".join(bytes([i, 0]) for i in numbers) + bytes([1, 0, 0])),
            bytes(160 * 120 * channels // 8),
            b"\xff\xd9",
        ]
    )


FRAME = segment(0xC0, struct.pack(">BHHB", 8, 120, 160, 1) + bytes([1, 0x11, 0]))
DISGUISES = {
    "plain": b"",
    "after a comment": segment(0xFE, b"a comment"),
    "after a fill byte": b"\xff",
    "after a restart marker": b"\xff\xd0",
    # A restart marker has no length. Who takes the next two bytes for one, 0xFFE0, finds a frame of blocks there.
    "behind a restart marker and a frame of blocks": b"\xff\xd3" + segment(0xE0, bytes(0xFFE0 - 4) + FRAME),
    "a frame of blocks in a comment": segment(0xFE, FRAME),
}


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_lossless_jpeg_is_never_decoded_smaller(disguise, channels):
    """simplejpeg would write all of its pixels into memory for a few, and the process end."""
    data = lossless(channels, DISGUISES[disguise])
    assert jpeg_scale(data, (120, 160), (15, 20)) == 1
    outcomes = both(data, (15, 20))
    assert [np.unique(pixels).tolist() for pixels, _ in outcomes] == [[128], [128]]
    assert [pixels.shape for pixels, _ in outcomes] == [(120, 160, 3)] * 2


def test_a_frame_that_is_not_found_is_not_scaled():
    good = jpeg_of(photo(160, 120))
    assert jpeg_scale(good, (120, 160), (15, 20)) == 8
    assert good.count(b"\xff\xc0") == 1
    arithmetic = good.replace(b"\xff\xc0", b"\xff\xc9")
    for data in (
        arithmetic,
        b"",
        good[:20],
        b"\xff\xd8" + b"\xff" * 50,
        good[:2] + b"\0" + good[2:],
        lossless(1)[:2] + b"\xff\xd9",
    ):
        assert jpeg_scale(data, (120, 160), (15, 20)) == 1


# --- the Param ----------------------------------------------------------------------------------------------------


def test_the_param_is_zero_or_from_one_up():
    stage = ImageClassifier()
    assert stage.getScaledDecode() == 0.0
    for value in (0, 1, 1.5, 2, np.float64(3)):
        assert stage.setScaledDecode(value).getScaledDecode() == value
    for value in (0.5, 0.999, -1, math.nan, math.inf):
        with pytest.raises(ParamError, match=r"scaledDecode=.* is neither 0 \(off\) nor a number from 1 up.*enlarged"):
            stage.setScaledDecode(value)
    assert stage.getScaledDecode() == 3


def test_the_runner_scales_by_the_resize_of_the_card(monkeypatch):
    seen = []
    real = resize_crop

    def watched(pixels, preprocess, out, full):
        seen.append((tuple(pixels.shape[1:]), full))
        return real(pixels, preprocess, out=out, full=full)

    monkeypatch.setattr("gpuml.worker.runner.resize_crop", watched)
    network = Network(lambda x: x.mean((2, 3)), Card(PLAIN, 3), torch.device("cpu"), "float32")  # resizes to 32x32
    data = jpeg_of(photo(515, 261))
    scores = [Runner(network, Spec("0" * 64, scaled_decode=ratio), 0).run([data]) for ratio in (0.0, 1.0, 2.0, 5.0)]
    assert [score.reasons for score in scores] == [[None]] * 4
    full = (261, 515)
    assert seen == [(full, full), ((33, 65), full), ((66, 129), full), (full, full)]
    assert np.abs(scores[2].outputs - scores[0].outputs).max() < 0.01
