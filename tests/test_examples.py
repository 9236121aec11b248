"""The examples run as they stand, and say what they promise."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_features_tell_what_pixels_do_not():
    done = subprocess.run(
        [sys.executable, "examples/transfer_learning.py"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    features, pixels = map(float, re.search(r"features ([\d.]+), with raw pixels ([\d.]+)", done.stdout).groups())
    assert pixels < 0.7
    assert features >= pixels + 0.15
    assert "the broken one dropped" in done.stdout
    assert "saved, loaded, and the same answers" in done.stdout
