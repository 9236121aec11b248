"""gpus.sh: what a node's nvidia-smi lists -> the addresses that Spark hands to tasks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "gpuml" / "spark" / "gpus.sh"
SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]

FOUR = """\
GPU 0: NVIDIA H200 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA H200 (UUID: GPU-2d4d8a24-d9b1-4be9-95b6-3d64f2a5a3f1)
GPU 2: NVIDIA H200 (UUID: GPU-c6dc1234-d33d-4be9-95b6-000000000002)
GPU 10: NVIDIA H200 (UUID: GPU-c6dc1234-d33d-4be9-95b6-000000000010)
"""
MIXED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2d4d8a24-d9b1-4be9-95b6-3d64f2a5a3f1)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-c6dc1234-d33d-4be9-95b6-000000000002)
"""
# Drivers before 470 name a MIG device after its GPU and its two instance numbers.
OLD_MIG = """\
GPU 0: A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb Device 0: (UUID: MIG-GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77/1/0)
"""
DRIVER_ERROR = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
LOST = "Unable to determine the device handle for GPU1: 0000:41:00.0: GPU is lost."


def run(folder: Path, printed: str | None, status: int = 0, shell: str = SHELLS[0]) -> tuple[list[str], str]:
    """Addresses and stderr, on a node whose nvidia-smi prints and exits so; None: a node without nvidia-smi."""
    if printed is not None:
        (folder / "listing").write_text(printed)
        fake = folder / "nvidia-smi"
        fake.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 99\n/bin/cat {folder}/listing\nexit {status}\n')
        fake.chmod(0o755)
    interpreter = [str(shutil.which(shell)), *(["sh"] if shell == "busybox" else [])]
    done = subprocess.run(
        [*interpreter, str(SCRIPT)], env={"PATH": str(folder)}, capture_output=True, text=True, timeout=20, check=True
    )
    found = json.loads(done.stdout)
    assert found.keys() == {"name", "addresses"}  # ResourceInformation's two fields
    assert found["name"] == "gpu"
    return found["addresses"], done.stderr


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("printed", "addresses"),
    [
        pytest.param(FOUR, ["0", "1", "2", "10"], id="plain"),
        pytest.param(
            MIXED,
            ["0", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", "2"],
            id="mixed",
        ),
        pytest.param(OLD_MIG, ["MIG-GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77/1/0"], id="old-mig"),
        pytest.param(f"{FOUR.splitlines()[0]}\n{LOST}\n", ["0"], id="one-lost"),
        pytest.param("", [], id="silent"),
        pytest.param("No devices found.\n", [], id="no-devices"),
        pytest.param(DRIVER_ERROR, [], id="driver-error-exit-0"),
    ],
)
def test_gpus_are_indices_and_mig_devices_are_names(
    tmp_path: Path, shell: str, printed: str, addresses: list[str]
) -> None:
    assert run(tmp_path, printed, shell=shell) == (addresses, "")


@pytest.mark.parametrize("printed", [DRIVER_ERROR, FOUR])
def test_failing_nvidia_smi_is_an_empty_list_and_says_why_on_stderr(tmp_path: Path, printed: str) -> None:
    addresses, said = run(tmp_path, printed, status=9)
    assert addresses == []
    assert said == f"gpus.sh: no GPUs, because 'nvidia-smi -L' failed: {printed.rstrip()}\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_missing_nvidia_smi_is_an_empty_list_and_says_so_on_stderr(tmp_path: Path, shell: str) -> None:
    addresses, said = run(tmp_path, None, shell=shell)
    assert addresses == []
    assert "not found" in said


def test_script_can_be_executed_by_its_path(tmp_path: Path) -> None:
    # Spark runs the path itself, without a shell in front.
    assert os.access(SCRIPT, os.X_OK)
    done = subprocess.run([str(SCRIPT)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, '{"name":"gpu","addresses":[]}\n')
