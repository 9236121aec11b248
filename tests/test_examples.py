"""The examples run as they stand, and say what they promise."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def printed(script):
    done = subprocess.run([sys.executable, f"examples/{script}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_features_tell_what_pixels_do_not():
    out = printed("transfer_learning.py")
    features, pixels = map(float, re.search(r"features ([\d.]+), with raw pixels ([\d.]+)", out).groups())
    assert pixels < 0.7
    assert features >= pixels + 0.15
    assert "the broken one dropped" in out
    assert "saved, loaded, and the same answers" in out


def test_photographs_are_questioned_in_sql():
    _, surest, cats, unread = re.split("The surest:|With a cat .*:|Not read:", printed("sql.py"))
    assert [line.split()[0] for line in surest.splitlines()[1:]] == ["coffee.jpg", "cmyk.jpg", "rotated.jpg"]
    assert re.search(r"cat\.png .*tiger cat", cats)
    assert unread.split()[:2] == ["broken.jpg", "truncated:"]


def test_a_stream_goes_on_where_it_was_stopped():
    out = printed("streaming.py").splitlines()[-14:]
    assert out[:2] == ["8 photographs classified", "3 photographs classified"]
    assert out[-1] == "11 rows, the same as of one batch over the folder"
    assert sum("tripod" in line for line in out) == 2


def test_a_network_of_columns_tells_flowers_that_it_has_not_seen():
    said = printed("tensor_model.py")
    assert float(re.search(r"accuracy ([\d.]+) on", said)[1]) >= 0.9
    assert "saved, loaded, and the same answers" in said
