"""The arithmetic of examples/benchmarks/growth.py: bounds, quarters, the cost of a task; no Spark."""

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.parametrize(
    ("figure", "bound", "holds"),
    [(0.9, "at least", True), (0.89, "at least", False), (0.9, "at most", True), (0.91, "at most", False)],
)
def test_a_bound_holds_on_its_own_side_and_at_the_limit(figure, bound, holds):
    from bench.bounds import Verdict

    assert Verdict(figure, bound, 0.9).holds is holds


def test_a_table_shows_what_is_broken_beside_its_bound_and_does_not_hold():
    from bench.bounds import Table, Verdict

    table = Table("Tasks", ["Tasks", "ms", "Rate"])
    table.rows.append(["8", Verdict(69.96, "at most", 70, ".1f"), Verdict(1, "at least", 0.8)])
    assert table.holds
    table.rows.append(["400", "", Verdict(0.5, "at least", 0.8)])
    assert not table.holds
    assert table.text().splitlines() == [
        "### Tasks",
        "",
        "| Tasks | ms | Rate | Bound |",
        "| --- | --- | --- | --- |",
        "| 8 | 70.0 | 1.00 | at most 70; at least 0.8 |",
        "| 400 |  | **0.50, broken** | at least 0.8 |",
    ]


def test_the_cost_of_a_task_is_what_more_tasks_take_on_all_cores():
    from bench.bounds import task_ms
    from bench.report import Pass

    # 392 tasks more take 9.8 s more on 2 cores: 50 ms each.
    assert task_ms(Pass(8000, 5.0, 10), Pass(8000, 14.8, 30), 392, 2) == pytest.approx(50)
    assert task_ms(Pass(8000, 5.0, 10), Pass(8000, 5.0, 10), 0, 2) == 0


def test_a_quarter_has_the_peak_of_its_own_time():
    from bench.peaks import quarters

    seen = [(100.0, 1), (101.0, 9), (102.5, 4), (103.0, 5), (105.0, 2), (106.0, 7), (108.0, 8)]
    assert quarters(seen) == [9, 5, 2, 8]


def test_a_worker_s_peak_is_seen_between_two_looks_and_then_forgotten():
    from bench.peaks import LOOK_S, worker_peaks

    # 64 MB for some milliseconds, shortly after its start; then nothing until a look has seen that.
    work = f"import time; time.sleep({1.2 * LOOK_S}); b'x' * (64 << 20); input()"
    command = [sys.executable, "-c", f"{work}  # pyspark.daemon"]  # workers are known by this name
    until = time.monotonic() + 60
    with worker_peaks() as seen, subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        while time.monotonic() < until:
            peaks = [peak for _, peak in seen.get(process.pid, [])]
            if peaks and max(peaks) > 64 << 20 > peaks[-1]:
                break
            time.sleep(LOOK_S / 4)
        process.communicate("\n")
    assert max(peaks) > 64 << 20
    assert peaks[-1] < 64 << 20
