"""Decoding: every awkward file gives the right pixels or the right reason, and nothing else."""

import base64
import io
import itertools
import json
import random
import struct
import subprocess
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from make_inputs import SCENE, build, chunk, exif, ihdr, insert_app, jpeg, numbers, png, quad, rows_of, stored_for, tiff
from PIL import Image, ImageFile, features

from gpuml.errors import RowError
from gpuml.spec import MAX_PIXELS
from gpuml.worker.decode import decode, decode_pil, decode_struct
from gpuml.worker.exif import orientation

VARIANTS = {"white": "over_white", "black": "over_black", "drop": "drop_alpha"}
PICTURE = quad(SCENE)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    build(root)
    manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["skipped"] == []
    structs = json.loads((root / "structs.json").read_text(encoding="utf-8"))["rows"]
    return [(entry, (root / entry["path"]).read_bytes()) for entry in manifest["files"]], structs


def read(data, max_pixels=MAX_PIXELS, alpha="white"):
    return decode(data, max_pixels=max_pixels, alpha=alpha)


def hwc(pixels):
    return pixels.permute(1, 2, 0).numpy()


def kind_of(call, *args, **kwargs):
    with pytest.raises(RowError) as caught:
        call(*args, **kwargs)
    return caught.value.kind


def encoded(image, name, **options):
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def difference(found, expected, tol):
    """Whether any of the numbers is further off than `tol`."""
    pairs = [(found["mean_rgb"], expected["mean_rgb"])] if "mean_rgb" in expected else []
    pairs += [(found["quadrants"][name], colour) for name, colour in expected.get("quadrants", {}).items()]
    return any(np.abs(np.subtract(*pair)).max() > tol for pair in pairs)


def result(data, **options):
    """The tensor, or the RowError: whatever else is raised fails the test."""
    try:
        return read(data, **options)
    except RowError as error:
        return error


def check_entry(entry, call):
    for alpha, variant in VARIANTS.items():
        try:
            pixels, error = call(alpha), None
        except RowError as caught:
            pixels, error = None, caught
        if error is not None:
            assert entry["expect"] != "decode", (entry["id"], str(error))
            assert error.kind == entry["error_kind"], (entry["id"], str(error))
            continue
        assert entry["expect"] != "reject", entry["id"]
        assert pixels.dtype == torch.uint8
        assert pixels.permute(1, 2, 0).is_contiguous()
        found = numbers(hwc(pixels))
        expected = entry.get("variants", {}).get(variant, entry)
        assert found["size"] == expected["size"], entry["id"]
        if entry.get("check") == "size_only":
            continue
        assert not difference(found, expected, entry["tol"]), (entry["id"], alpha, found)
        for fault, numbers_of_fault in entry.get("wrong", {}).items():
            assert found["size"] != numbers_of_fault["size"] or difference(found, numbers_of_fault, entry["tol"]), fault


# ------------------------------------------------------------------------------------- the manifest


def test_every_file_matches_its_manifest_for_each_alpha_policy(inputs):
    files, _ = inputs
    assert len(files) >= 70
    for entry, data in files:
        check_entry(entry, lambda alpha, data=data: read(data, alpha=alpha))


def test_every_struct_row_matches_its_manifest_for_each_alpha_policy(inputs):
    _, structs = inputs
    assert len(structs) >= 6
    for entry in structs:
        row = entry["row"] or dict.fromkeys(("data_base64", "height", "width", "nChannels", "mode"))
        data = None if row["data_base64"] is None else base64.b64decode(row["data_base64"])
        fields = (data, row["height"], row["width"], row["nChannels"], row["mode"])
        check_entry(entry, lambda alpha, f=fields: decode_struct(*f, max_pixels=MAX_PIXELS, alpha=alpha))


def test_the_same_picture_as_png_and_as_struct_is_the_same_tensor():
    rows = PICTURE[:, :, ::-1].tobytes()
    assert torch.equal(
        decode_struct(rows, *PICTURE.shape, 16, max_pixels=MAX_PIXELS, alpha="white"), read(png(PICTURE))
    )


# ------------------------------------------------------------------------------------------ structs


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ((None,) * 5, "null_input"),
        ((None, *(float("nan"),) * 4), "null_input"),
        ((b"", -1, -1, -1, -1), "not_image"),
        ((bytes(6), 1, 2, 3, None), "bad_struct"),
        ((None, 1, 2, 3, 16), "bad_struct"),
        ((bytes(6), 1, 2, 3, 17), "bad_struct"),  # another of OpenCV's types
        ((bytes(6), 1, 2, 1, 16), "bad_struct"),  # channels do not fit the mode
        ((b"", 0, 2, 3, 16), "bad_struct"),
        ((bytes(6), -1 * 2, -1, 3, 16), "bad_struct"),
        ((bytes(6), 1.5, 2, 3, 16), "bad_struct"),
        ((bytes(6), float("inf"), 2, 3, 16), "bad_struct"),
        ((bytes(6), 2**31 - 1, 2**31 - 1, 3, 16), "bad_struct"),
        ((bytes(1200), 20, 20, 3, 16), "too_large"),
    ],
)
def test_bad_structs_give_their_reason(fields, kind):
    assert kind_of(decode_struct, *fields, max_pixels=399, alpha="white") == kind


def test_struct_numbers_may_be_numpy_integers_or_floats():
    for number in (np.int32, np.float64, int):
        pixels = decode_struct(bytes(range(6)), *map(number, (1, 2, 3, 16)), max_pixels=2, alpha="white")
        assert pixels[:, 0].T.tolist() == [[2, 1, 0], [5, 4, 3]]


def test_bad_struct_names_the_mode_and_the_numbers():
    with pytest.raises(RowError, match="mode 17"):
        decode_struct(bytes(6), 1, 2, 3, 17, max_pixels=9, alpha="white")
    with pytest.raises(RowError, match=r"5 bytes .* height 1 x width 2 x nChannels 3"):
        decode_struct(bytes(5), 1, 2, 3, 16, max_pixels=9, alpha="white")


# ------------------------------------------------------------------------------- bytes and formats


def test_null_and_empty_cells_give_their_own_reasons():
    assert kind_of(read, None) == "null_input"
    assert kind_of(read, float("nan")) == "null_input"
    assert kind_of(read, b"") == "empty"
    assert kind_of(read, bytearray()) == "empty"


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_bytearray_and_memoryview_are_taken_like_bytes(kind):
    assert torch.equal(read(kind(png(PICTURE))), read(png(PICTURE)))


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIF"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\xff\x0a", "JPEG XL"),
        (b"\0\0\1\0", "ICO"),
        (b"8BPS", "PSD"),
        (b"%PDF-1.7", "PDF"),
        (b"II+\0", "BigTIFF"),
        (b'<?xml version="1.0"?><svg xmlns=""/>', "SVG"),
        (bytes(128) + b"DICM", "DICOM"),
    ],
)
def test_known_formats_that_are_not_read_are_named(start, name):
    with pytest.raises(RowError, match=f"unsupported: {name} ") as caught:
        read(start + bytes(100))
    assert caught.value.kind == "unsupported"


def test_text_that_begins_like_a_bitmap_is_not_an_image():
    assert kind_of(read, b"BMW, Audi and others") == "not_image"


def test_jpeg_with_12_bit_samples_and_run_length_bmp_are_unsupported():
    data = bytearray(jpeg(PICTURE))
    data[data.index(b"\xff\xc0") + 4] = 12
    assert kind_of(read, bytes(data)) == "unsupported"
    header = struct.pack("<IiiHHIIiiII", 40, 4, 1, 1, 8, 1, 0, 0, 0, 2, 0)
    assert kind_of(read, b"BM" + struct.pack("<IHHI", 60, 0, 0, 62) + header + bytes(8) + b"\4\1\0\1") == "unsupported"


def test_first_picture_of_an_mpo_is_read():
    first, second = Image.fromarray(PICTURE), Image.fromarray(PICTURE[::-1])
    data = encoded(first, "MPO", save_all=True, append_images=[second], quality=95, subsampling=0)
    assert np.abs(hwc(read(data)).astype(int) - PICTURE).mean() < 3


def test_tiff_float_and_32_bit_modes_are_unsupported_with_their_mode():
    for mode in ("F", "I", "LAB"):
        with pytest.raises(RowError, match=f"unsupported: .*'{mode}'"):
            decode_pil(Image.new(mode, (4, 4)), max_pixels=16, alpha="white")


# -------------------------------------------------------------------------------------- orientation


@pytest.mark.parametrize("value", range(1, 9))
@pytest.mark.parametrize("where", ["png_before", "png_after", "webp", "avif", "tiff", "jpeg"])
def test_orientation_is_applied_exactly_once(where, value):
    stored = np.ascontiguousarray(stored_for(PICTURE, value))
    raw = exif(value, "MM")
    image = Image.fromarray(stored)
    if where == "jpeg":
        data = insert_app(jpeg(stored), 0xE1, raw)
    elif where == "png_before":
        data = png(stored, pre=chunk(b"eXIf", raw[6:]))
    elif where == "png_after":
        data = png(stored, post=chunk(b"eXIf", raw[6:]))
    elif where == "tiff":
        data = tiff([stored], orientation=value)
    else:
        if not features.check(where):
            pytest.skip(f"this Pillow has no {where}")
        data = encoded(image, where.upper(), exif=raw, quality=95)
    pixels = hwc(read(data))
    assert pixels.shape == PICTURE.shape
    assert np.abs(pixels.astype(int) - PICTURE).mean() < 6
    opened = hwc(decode_pil(Image.open(io.BytesIO(data)), max_pixels=MAX_PIXELS, alpha="white"))
    assert np.array_equal(opened, pixels)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (exif(6), 6),
        (exif(6, "MM"), 6),
        (exif(6, prefix=b"Exif\0\0" * 3), 6),
        (exif(6, prefix=b""), 6),
        (exif(0), 1),
        (exif(9), 1),
        (exif(6)[:-16], 1),  # the entry itself is cut
        (exif(6)[:14] + b"\xff\xff" + exif(6)[16:], 6),  # claims 65535 entries
        (exif(None, extra=[(0x0112, 4, 1, b"\6\0\0\0")]), 6),
        (exif(None, extra=[(0x0112, 2, 2, b"6\0")]), 1),
        (exif(None, extra=[(0x0112, 3, 0, b"")]), 1),
        (b"Exif\0\0", 1),
        (b"II*\0\xff\xff\xff\xff", 1),
        (b"", 1),
        (None, 1),
    ],
)
def test_only_a_readable_orientation_counts(raw, value):
    assert orientation(raw) == value


# ------------------------------------------------------------------------------------- transparency


def keyed_png(samples, depth, ctype, key):
    return png(samples, depth, ctype, pre=chunk(b"tRNS", key))


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_grey_colour_key_is_transparent_at_each_depth(depth):
    most = 2**depth - 1
    samples = np.array([[0, most, most // 2, most]], dtype=np.uint16)
    data = keyed_png(samples, depth, 0, struct.pack(">H", most))
    grey = np.rint(samples * (255 / most))
    transparent = samples == most
    for alpha, back in (("white", 255), ("black", 0), ("drop", None)):
        expected = grey if back is None else np.where(transparent, back, grey)
        assert hwc(read(data, alpha=alpha))[..., 1].tolist() == expected.tolist()
    opened = decode_pil(Image.open(io.BytesIO(data)), max_pixels=9, alpha="black")
    assert torch.equal(opened, read(data, alpha="black"))


@pytest.mark.parametrize("depth", [8, 16])
def test_rgb_colour_key_is_transparent(depth):
    factor = 1 if depth == 8 else 257
    samples = np.array([[(200, 40, 40), (200, 40, 41)]], dtype=np.uint16) * factor
    data = keyed_png(samples, depth, 2, struct.pack(">3H", *samples[0, 0].tolist()))
    assert hwc(read(data))[0].tolist() == [[255, 255, 255], [200, 40, 41]]
    assert hwc(read(data, alpha="drop"))[0].tolist() == [[200, 40, 40], [200, 40, 41]]


def test_alpha_composes_to_the_nearest_integer_for_every_colour_and_alpha():
    colour, alpha = np.meshgrid(np.arange(256), np.arange(256))
    rgba = np.stack([colour, 255 - colour, colour, alpha], -1).astype(np.uint8)
    for policy, back in (("white", 255), ("black", 0)):
        found = hwc(read(png(rgba, 8, 6), alpha=policy)).astype(float)
        part = rgba[..., 3:] / 255
        assert np.abs(found - (rgba[..., :3] * part + back * (1 - part))).max() <= 0.5 + 1e-9
    assert np.array_equal(hwc(read(png(rgba, 8, 6), alpha="drop")), rgba[..., :3])


def test_alpha_policy_is_one_rule_for_every_kind_of_file():
    rgba = np.dstack([PICTURE, np.full(PICTURE.shape[:2], 128, np.uint8)])
    rgba[:16, :, 3] = 0
    image = Image.fromarray(rgba)
    files = [encoded(image, "PNG"), encoded(image, "WEBP", lossless=True, exact=True), encoded(image, "TIFF")]
    for alpha in VARIANTS:
        expected = read(png(rgba, 8, 6), alpha=alpha)
        for data in files:
            assert torch.equal(read(data, alpha=alpha), expected)
        bgra = rgba[..., [2, 1, 0, 3]].tobytes()
        assert torch.equal(decode_struct(bgra, 32, 48, 4, 24, max_pixels=9999, alpha=alpha), expected)
        assert torch.equal(decode_pil(image, max_pixels=9999, alpha=alpha), expected)


def test_gif_transparent_index_follows_the_alpha_policy():
    image = Image.fromarray(quad((0, 1, 2, 3))).convert("P")
    image.putpalette(list(itertools.chain(*SCENE)))
    data = encoded(image, "GIF", transparency=1)
    assert hwc(read(data))[2, -3].tolist() == [255, 255, 255]
    assert hwc(read(data, alpha="black"))[2, -3].tolist() == [0, 0, 0]
    assert hwc(read(data, alpha="drop"))[2, -3].tolist() == list(SCENE[1])


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "I;16"]
)
def test_images_in_memory_of_every_mode_with_an_answer_decode_and_stay_as_they_were(mode):
    image = Image.new(mode, (5, 7))
    image.info["note"] = "kept"
    pixels = decode_pil(image, max_pixels=35, alpha="white")
    assert pixels.shape == (3, 7, 5)
    assert (image.mode, image.size, image.info) == (mode, (5, 7), {"note": "kept"})
    assert kind_of(decode_pil, image, max_pixels=34, alpha="white") == "too_large"


# -------------------------------------------------------------------------------- size and bombs


def riff(*chunks):
    body = b"WEBP" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bombs():
    """Small files that claim 13000x13000 pixels or more."""
    gif = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 128, 0, 0) + bytes(6) + b"\x21\xf9\4\x08\0\0\0\0"
    yield "gif", gif + b"," + struct.pack("<4HB", 0, 0, 13000, 13000, 0) + b"\2\2\x44\1\0;"
    side = (12999).to_bytes(3, "little")
    yield "webp VP8X", riff((b"VP8X", b"\2\0\0\0" + side + side), (b"ANIM", bytes(6)))
    yield "webp VP8L", riff((b"VP8L", b"\x2f" + struct.pack("<I", 12999 | 12999 << 14) + bytes(9)))
    yield "webp VP8", riff((b"VP8 ", b"\x10\0\0\x9d\1\x2a" + struct.pack("<HH", 13000, 13000) + bytes(9)))
    header = struct.pack("<IiiHHIIiiII", 40, 13000, -13000, 1, 24, 0, 0, 0, 0, 0, 0)
    yield "bmp", b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header
    yield "png", png_header(13000, 13000)
    yield "tiff", tiff_of({256: 13000, 257: 13000, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 13000, 279: 9})
    yield "tiff tile", tiff_of({256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: 13008, 323: 13008, 324: 8, 325: 9})
    if features.check("avif"):
        yield "avif", avif_of(13000, 13000)
        yield "avif over libavif's own limit", avif_of(20000, 20000)


def png_header(width, height):
    coded = zlib.compress(bytes(512))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr(width, height, 8, 2)) + chunk(b"IDAT", coded) + chunk(b"IEND")


def avif_of(width, height):
    data = encoded(Image.new("RGB", (8, 8)), "AVIF")
    at = data.index(b"ispe") + 8
    return data[:at] + struct.pack(">II", width, height) + data[at + 8 :]


def tiff_of(tags):
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(64)


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak memory from Linux's /proc")
def test_size_is_refused_from_the_header_before_any_allocation():
    code = (
        "import json, pathlib, sys\n"
        "from gpuml.errors import RowError\n"
        "from gpuml.worker.decode import decode\n"
        # Not ru_maxrss, which on Linux starts at the peak of the process that started this one: pytest's.
        "peak = lambda: int(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "for name, data in json.load(sys.stdin).items():\n"
        "    before = peak()\n"
        "    try:\n"
        "        decode(bytes.fromhex(data), max_pixels=10**6, alpha='white')\n"
        "    except RowError as error:\n"
        "        print(name, error.kind, peak() - before < 20_000, 'maxPixels=1000000' in error.message, sep='|')\n"
    )
    data = json.dumps({name: data.hex() for name, data in bombs()})
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name}|too_large|True|True" for name, _ in bombs()]


def test_raised_max_pixels_lets_honest_pictures_through_and_no_empty_promises():
    lie = png_header(20000, 10000)
    assert kind_of(read, lie) == "too_large"
    assert kind_of(read, lie, max_pixels=10**9) == "truncated"  # 14 coded bytes cannot be 600 MB
    flat = zlib.compressobj(9)
    coded = flat.compress(bytes(10001 * 100)) + flat.flush()
    honest = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr(80000, 100, 1, 0)) + chunk(b"IDAT", coded) + chunk(b"IEND")
    assert kind_of(read, honest, max_pixels=80000 * 100 - 1) == "too_large"
    assert read(honest, max_pixels=80000 * 100).shape == (3, 100, 80000)


def test_pillows_own_pixel_limit_plays_no_part(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # twice this is an error of Image.open, this a warning
    picture = np.ascontiguousarray(PICTURE)
    frame_over_screen = bytearray(encoded(Image.fromarray(picture), "GIF"))
    frame_over_screen[6:10] = struct.pack("<HH", 1, 1)
    image = Image.fromarray(picture)
    files = [jpeg(picture), png(picture), tiff([picture]), encoded(image, "TIFF", compression="tiff_lzw"),
             encoded(image, "BMP"), encoded(image, "GIF"), bytes(frame_over_screen)]  # fmt: skip
    if features.check("webp"):  # one for each way in which a WebP file says its size: VP8, VP8L and VP8X
        files += [encoded(image, "WEBP"), encoded(image, "WEBP", lossless=True), encoded(image, "WEBP", exif=exif(1))]
    if features.check("avif"):
        files += [encoded(image, "AVIF")]
    for data in files:
        assert read(data).shape == (3, 32, 48), data[:16]


def test_image_that_pillow_itself_finds_too_large_is_told_whose_limit_it_is(monkeypatch):
    tiled = tiff_of({256: 8, 257: 8, 258: 8, 259: 1, 262: 1, 277: 1, 322: 16, 323: 16, 324: 8, 325: 256}) + bytes(256)
    opened = Image.open(io.BytesIO(tiled))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(RowError, match=r"too_large: .*PIL\.Image\.MAX_IMAGE_PIXELS.* exceeds limit of 20 pixels"):
        decode_pil(opened, max_pixels=64, alpha="white")
    assert read(tiled, max_pixels=256).shape == (3, 8, 8)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no avif")
def test_avif_larger_than_libavif_opens_is_too_large_whatever_max_pixels_is():
    for width, height in ((16385, 16384), (32769, 10), (10, 32769)):
        with pytest.raises(RowError, match=f"too_large: AVIF of {width}x{height} .* 268435456 pixels or 32768 a side"):
            read(avif_of(width, height), max_pixels=10**9)
    assert kind_of(read, avif_of(16384, 16384)[:-20], max_pixels=10**9) == "truncated"
    assert kind_of(read, avif_of(0, 10), max_pixels=10**9) == "corrupt"


def test_progressive_jpeg_of_very_many_scans_is_corrupt():
    data = jpeg(PICTURE, progressive=True)
    last = data.rindex(b"\xff\xda")
    assert read(data[:-2] + data[last:-2] * 20 + data[-2:]).shape == (3, 32, 48)
    assert kind_of(read, data[:-2] + data[last:-2] * 300 + data[-2:]) == "corrupt"


# ------------------------------------------------------------------------------------------- damage


def test_png_with_a_broken_comment_or_profile_or_animation_still_decodes():
    expected = read(png(PICTURE))
    bomb = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2_000_000)))
    for extra in (
        bomb,
        chunk(b"acTL", bytes(8)),
        chunk(b"fcTL", bytes(26)),
        chunk(b"iCCP", b"x"),
        chunk(b"tEXt", b"a", 1),
    ):
        assert torch.equal(read(png(PICTURE, pre=extra)), expected)


def test_file_damage_is_corrupt_and_missing_bytes_are_truncated():
    whole = png(PICTURE)
    assert kind_of(read, whole.replace(b"IHDR", b"IHDX")) == "corrupt"
    bad_header = bytearray(whole)
    bad_header[16] ^= 1  # the checksum of IHDR no longer fits
    assert kind_of(read, bytes(bad_header)) == "corrupt"
    assert kind_of(read, whole[:20]) == "truncated"
    assert kind_of(read, jpeg(PICTURE)[:4]) == "truncated"
    assert kind_of(read, b"\xff\xd8\xff\xd8" + bytes(60)) == "corrupt"
    image = Image.fromarray(PICTURE)
    for name in ("BMP", "GIF", "TIFF", "WEBP", *(["AVIF"] if features.check("avif") else [])):
        assert kind_of(read, encoded(image, name)[:-40]) == "truncated", name


def test_every_length_of_a_cut_file_is_a_reason_or_the_whole_picture():
    for whole in (jpeg(PICTURE[::4, ::4]), png(PICTURE[::4, ::4])):
        expected = read(whole)
        results = [result(whole[:length]) for length in range(1, len(whole))]
        kinds = [found.kind for found in results if isinstance(found, RowError)]
        assert set(kinds) == {"not_image", "truncated"}
        assert kinds.count("not_image") <= 7  # until the format can be told
        # Only a PNG's last checksums and IEND may be missing.
        assert len(kinds) >= len(whole) - 24
        assert all(torch.equal(found, expected) for found in results if not isinstance(found, RowError))


def seeds():
    image = Image.fromarray(np.ascontiguousarray(PICTURE))
    yield "jpeg", jpeg(PICTURE, exif=exif(6))
    yield "png", png(PICTURE)
    yield "palette", encoded(image.quantize(8), "PNG", transparency=3)
    yield "gif", encoded(image, "GIF", save_all=True, append_images=[image.rotate(90)], disposal=2)
    yield "webp", encoded(image, "WEBP", lossless=True)
    yield "bmp", encoded(image.quantize(8), "BMP")
    yield "tiff", tiff([PICTURE], orientation=6)
    yield "lzw", encoded(image, "TIFF", compression="tiff_lzw")
    if features.check("avif"):
        yield "avif", encoded(image, "AVIF", exif=exif(6))


@pytest.mark.parametrize(("name", "whole"), list(seeds()), ids=[name for name, _ in seeds()])
def test_random_damage_raises_nothing_but_row_errors_and_warns_of_nothing(name, whole):
    rng = random.Random(name)
    assert read(whole).shape in ((3, 32, 48), (3, 48, 32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # as an error, a warning would hide among the reasons
        for _ in range(220):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 100))] = rng.randrange(256)
            found = result(bytes(data), max_pixels=10**6)
            assert isinstance(found, RowError) or found.shape[0] == 3
    assert caught == []


def test_pillows_globals_and_the_warning_filters_stay_as_they_were(inputs):
    files, _ = inputs
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    assert sum(isinstance(result(data), RowError) for _, data in files) >= 11
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


def test_truncated_files_are_refused_even_where_pillow_is_told_to_load_them(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for whole in (jpeg(PICTURE), png(PICTURE)):
        assert kind_of(read, whole[:-60]) == "truncated"


def test_many_threads_give_what_one_thread_gives(inputs):
    files, _ = inputs

    def comparable(data):
        found = result(data)
        return str(found) if isinstance(found, RowError) else found.numpy().tobytes()

    data = [content for _, content in files] * 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(comparable, data)) == [comparable(content) for content in data]


def test_png_rows_of_16_bit_grey_round_to_the_nearest_of_255():
    values = np.arange(0, 65536, 13, dtype=np.uint16)[None]
    body = zlib.compress(rows_of(values, 16))
    data = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", ihdr(values.shape[1], 1, 16, 0)) + chunk(b"IDAT", body) + chunk(b"IEND")
    )
    assert np.array_equal(hwc(read(data))[..., 0], np.rint(values / 257.0))
