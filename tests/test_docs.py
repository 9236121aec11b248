"""README and docs: their Python blocks run as they stand, and what they quote is what the code says."""

import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

PERFORMANCE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "examples" / "benchmarks" / "results"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def code_of(page):
    """The page with nothing but its Python, each line in its place: errors name the page's own lines."""
    lines, inside, block = [], False, 0
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            block += inside
            lines.append("")
        else:
            # The README's first block is the quick start, which has its own test.
            lines.append(line if inside and (page.name, block) != ("README.md", 1) else "")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs pages in the repository's root as a reader would, in one process: a JVM costs more than most pages."""
    log = tmp_path_factory.mktemp("pages") / "log"
    env = {**os.environ, "PYTHONWARNINGS": "default", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / "tests" / "run_pages.py")]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )

    def one(code, name):
        watch = threading.Timer(400, process.kill)
        watch.start()
        process.stdin.write(json.dumps({"code": code, "name": name}) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        watch.cancel()
        assert answer, f"{name} ended the process: {log.read_text()[-3000:]}"
        return json.loads(answer)

    with process:  # at the end stdin is closed, and the process ends
        yield one


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
def test_the_python_blocks_of_a_page_run(page, run):
    code = code_of(page)
    if code.strip():
        error = run(code, str(page.relative_to(ROOT)))
        assert error is None, error


def test_a_page_that_fails_is_named_with_its_line_and_leaves_nothing_to_the_next(run):
    first = """
import os, sys
from pyspark.sql import SparkSession
os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[2]").getOrCreate()
spark.conf.set("spark.sql.shuffle.partitions", "3")
spark.range(1).createOrReplaceTempView("left")
1 / 0
"""
    assert 'File "first.md", line 8' in run(first, "first.md")
    assert "NameError: name 'spark' is not defined" in run("spark", "second.md")
    third = first.splitlines()[1:5] + [
        'assert spark.conf.get("spark.sql.shuffle.partitions") != "3"',
        "assert not spark.catalog.listTables()",
    ]
    assert run("\n".join(third), "third.md") is None


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
