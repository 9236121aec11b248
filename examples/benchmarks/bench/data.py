"""A seed -> folders of Parquet with photo-like images: equal seeds give equal bytes, as long as Pillow is the same."""

from __future__ import annotations

import io
import shutil
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NAMES = ("astronaut.jpg", "cat.png", "coffee.jpg", "flower.jpg", "motorcycle.jpg", "rocket.jpg", "temple.jpg")
PHOTOGRAPHS = [Path(__file__).parents[2] / "images" / name for name in NAMES]

#: Standard deviation of the noise of a pixel's brightness, of 255.
NOISE = 5

#: Files in a full folder; with one partition a file, the tasks of two cores end together.
FILES = 8


@dataclass(frozen=True)
class Kind:
    """Size in pixels and encoding of a kind of images, and how many different ones there are; they repeat."""

    width: int
    height: int
    encoding: str
    distinct: int


KINDS = {
    "jpeg": Kind(500, 375, "JPEG", 256),
    "jpeg12mp": Kind(4000, 3000, "JPEG", 8),
    "png": Kind(500, 375, "PNG", 32),
    "struct": Kind(500, 375, "raw", 32),
}

#: Spark's image struct, as its image source gives it.
STRUCT = pa.struct(
    [
        ("origin", pa.string()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("nChannels", pa.int32()),
        ("mode", pa.int32()),
        ("data", pa.binary()),
    ]
)


#: One thread at a time writes a folder.
_writing = threading.Lock()


@cache
def photo(seed: int, kind: Kind) -> Any:
    """A random crop of one of the sample photographs: encoded bytes, or the fields of an image struct.

    With some noise, which a camera's pixels have and an enlarged crop has not: smooth images decode faster.
    """
    random = np.random.default_rng(seed)
    image = Image.open(PHOTOGRAPHS[seed % len(PHOTOGRAPHS)]).convert("RGB")
    part = random.uniform(0.3, 1)
    left, top = (random.uniform(0, 1 - part) * side for side in image.size)
    box = (left, top, left + part * image.width, top + part * image.height)
    image = image.resize((kind.width, kind.height), Image.Resampling.LANCZOS, box=box)
    noise = random.normal(0, NOISE, (kind.height, kind.width, 1)).astype(np.float32)
    image = Image.fromarray((np.asarray(image) + noise).round().clip(0, 255).astype(np.uint8))
    if kind.encoding == "raw":
        data = np.ascontiguousarray(np.asarray(image)[:, :, ::-1]).tobytes()  # BGR, as OpenCV and Spark have it
        return {
            "origin": f"{seed}",
            "height": kind.height,
            "width": kind.width,
            "nChannels": 3,
            "mode": 16,
            "data": data,
        }
    buffer = io.BytesIO()
    image.save(buffer, kind.encoding, **({"quality": 90} if kind.encoding == "JPEG" else {}))
    return buffer.getvalue()


def parquet(root: Path, kind: str, images: int, files: int = FILES) -> Path:
    """The folder of `images` rows (id, content) in as many files; written at the first call."""
    folder = root / f"{kind}-{images}-{files}"
    with _writing:
        if not folder.is_dir():
            _write(folder, KINDS[kind], images, files)
    return folder


def _write(folder: Path, kind: Kind, images: int, files: int) -> None:
    made = folder.with_name(f".{folder.name}")
    shutil.rmtree(made, ignore_errors=True)  # of a call that was interrupted
    made.mkdir(parents=True)
    photos = [photo(seed, kind) for seed in range(min(images, kind.distinct))]
    schema = pa.schema([("id", pa.int64()), ("content", STRUCT if kind.encoding == "raw" else pa.binary())])
    for part in range(files):
        numbers = range(part, images, files)
        rows = {"id": list(numbers), "content": [photos[number % len(photos)] for number in numbers]}
        # Encoded images do not compress further, and repeated ones must not become a dictionary.
        pq.write_table(pa.table(rows, schema), made / f"part-{part}.parquet", compression="none", use_dictionary=False)
    made.rename(folder)


def read(path: Path) -> tuple[list[int], list[bytes]]:
    """The ids and the encoded images of one file of `parquet`."""
    table = pq.read_table(path)
    return table["id"].to_pylist(), table["content"].to_pylist()


def encoded(content: Any) -> bytes:
    """An image as a file that Pillow opens: image structs become uncompressed BMP."""
    if isinstance(content, bytes):
        return content
    size = content["width"], content["height"]
    buffer = io.BytesIO()
    Image.frombytes("RGB", size, content["data"], "raw", "BGR").save(buffer, "BMP")
    return buffer.getvalue()
