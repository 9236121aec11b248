"""The built wheel: what is in it, and that it works on its own."""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import gpuml

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):  # a copy: building leaves folders beside its source
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "gpuml", source / "gpuml", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("*.whl"))


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        mode = archive.getinfo("gpuml/spark/gpus.sh").external_attr >> 16
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "gpuml").rglob("*.py")}
    assert sources | {"gpuml/py.typed", "gpuml/spark/gpus.sh"} <= names
    assert {name.split("/")[0] for name in names} == {"gpuml", f"gpuml-{gpuml.__version__}.dist-info"}
    assert mode & 0o111, "gpus.sh must stay executable"


def test_the_installed_wheel_predicts(wheel, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    script = f"""
import gpuml, pathlib
assert pathlib.Path(gpuml.__file__).is_relative_to({str(target)!r}), gpuml.__file__
from torch import nn
net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
stage = gpuml.ImageClassifier.from_module(net, preprocess=gpuml.Preprocess(), labels=["red", "green", "blue"])
print(stage.predict([{str(ROOT / "examples/images/coffee.jpg")!r}]).predictedLabel[0])
"""
    env = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() in ("red", "green", "blue"), done.stderr[-2000:]
