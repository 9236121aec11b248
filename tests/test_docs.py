"""README and docs: their Python blocks run as they stand, and what they quote is what the code says."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

PERFORMANCE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "examples" / "benchmarks" / "results"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run(code, name):
    """One process per page, in the repository's root, as a reader would run it."""
    env = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
    return done.stdout


def test_the_readme_shows_the_quickstart_and_its_real_output():
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert blocks(ROOT / "README.md", "python")[0] == quickstart
    done = subprocess.run(
        [sys.executable, "examples/quickstart.py"], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = blocks(ROOT / "README.md", "text")[0].splitlines()
    printed = done.stdout.splitlines()
    assert len(printed) == len(shown)
    for line, wanted in zip(printed, shown, strict=True):
        digits = re.compile(r"\d\.\d+")
        assert digits.sub("#", line) == digits.sub("#", wanted)
        for got, told in zip(digits.findall(line), digits.findall(wanted), strict=True):
            assert abs(float(got) - float(told)) < 0.01


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page):
    code = blocks(page, "python")
    if page.name == "README.md":
        code = code[1:]  # the quick start, which has its own test
    if code:
        run("\n".join(code), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_table_of_the_performance_page_is_one_that_the_benchmarks_wrote():
    written = {line for page in RESULTS.glob("*.md") for line in page.read_text().splitlines()}
    shown = [line for line in PERFORMANCE.read_text().splitlines() if line.startswith("|")]
    assert len(shown) > 30
    assert [line for line in shown if line not in written] == []


def test_every_error_kind_is_explained():
    from gpuml.errors import ROW_ERROR_KINDS

    text = "".join((ROOT / "docs" / name).read_text() for name in ("images.md", "functions.md"))
    assert [kind for kind in ROW_ERROR_KINDS if f"`{kind}`" not in text] == []
