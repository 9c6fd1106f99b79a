"""The pipeline benchmark: its judgement on made-up figures, and that a quick run works."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("pipeline_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_bootstrap_interval_holds_the_median_and_narrows_with_more_values(benchmark):
    values = [1.0 + 0.01 * (i % 7) for i in range(14)]
    few, many = benchmark.bootstrap(values), benchmark.bootstrap(values * 20)
    assert few.median == pytest.approx(1.03) and few.low <= few.median <= few.high
    assert many.high - many.low < few.high - few.low
    assert benchmark.bootstrap([2.0] * 5) == benchmark.Interval(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    "found, is_met",
    [
        ((1.005, 1.004, 1.006), True),  # inside the control's interval
        ((1.02, 1.009, 1.03), True),  # overlaps it
        ((1.02, 1.011, 1.03), False),
        ((0.98, 0.97, 0.989), False),
    ],
)
def test_noise_is_what_the_control_shows(benchmark, found, is_met):
    control = benchmark.Interval(1.0, 0.99, 1.01)
    assert benchmark.is_within_noise(benchmark.Interval(*found), control) == is_met


def test_fit_finds_where_a_rising_function_reaches_a_value(benchmark):
    assert benchmark.fit(lambda x: 3.0 + 2.0 * x, 3.1) == pytest.approx(0.05, abs=1e-9)
    assert benchmark.fit(lambda x: 3.0 + 2.0 * x, 2.0) < 1e-9


def made_up_rows(benchmark, *, taps=1.0, spread=1.08, simulated=1.0):
    ratios = dict.fromkeys(benchmark.VARIANTS, 1.0) | {
        "taps, shm": taps, "taps, gloo": 1.0, "last_inside": 1.3, "last_deferred": 1.2, "spread": spread,
        "spread, m mod P": 1.15,
    }  # fmt: skip
    return [
        {
            "num_ranks": 4,
            "variant": variant,
            "step_s": ratio,
            "ratio": {"median": ratio, "low": ratio - 0.01, "high": ratio + 0.01},
            "simulated_s": simulated * ratio,
        }
        for variant, ratio in ratios.items()
    ]


def test_each_aim_is_missed_by_its_own_figure(benchmark):
    aims = benchmark.check_aims(made_up_rows(benchmark))
    assert [aim["is_met"] for aim in aims] == [True] * 5
    assert aims[3]["figure"] == "0.267 (m mod P: 0.500)"  # the default is judged, and m mod P stands beside it
    missed = [{"taps": 1.1}, {"spread": 1.11}, {"simulated": 1.2}]
    for position, changes in zip((0, 3, 4), missed):
        verdicts = [aim["is_met"] for aim in benchmark.check_aims(made_up_rows(benchmark, **changes))]
        assert verdicts == [i != position for i in range(5)]


def test_the_simulated_step_has_the_sinks_that_ran(benchmark):
    """Made-up reports of two ranks whose spread ran wholly on rank 1, as long as the last, deferred."""
    scale = benchmark.Scale(num_microbatches=4, rounds=1, ranks=(2,))
    common = {"step_s": 1.0, "draft_step_s": 0.0, "F_s": [0.1] * 4, "B_s": [0.2] * 4, "D_s": [0.3]}
    sinks = dict.fromkeys(benchmark.PLACED, [1] * 4) | {benchmark.IN_TURN: [0, 1, 0, 1]}
    ranks = [[common | {"variant": name, "sinks": sinks.get(name)} for name in benchmark.VARIANTS]] * 2
    found = {row["variant"]: row.get("simulated_s") for row in benchmark.summarize(2, scale, ranks)}
    assert found["spread"] == found["last_deferred"] > found[benchmark.IN_TURN] > 0.0


@pytest.mark.slow
def test_a_quick_run_reports_every_variant(benchmark, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(SCRIPT),
        "--quick",
        "--json",
        str(tmp_path / "r.json"),
        "--tables",
        str(tmp_path / "t.md"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    sinks = {row["variant"]: row["sinks"] for row in rows if row["num_ranks"] == 4 and "sinks" in row}
    assert sinks["spread"] != sinks["spread, m mod P"] == 2 * [0, 1, 2, 3] and sinks["last_inside"] == 8 * [3]
    assert [row["variant"] for row in rows] == 2 * list(benchmark.VARIANTS)
    sent = {(row["num_ranks"], row["variant"]): row["bytes_published"] for row in rows}
    # 8 microbatches of 32 tokens, 32 wide, in fp32; of two ranks the first owns taps 0 and 2
    assert sent[2, "taps, shm"] == sent[2, "taps, gloo"] == sent[2, "taps, relay"] == 2 * 8 * 32 * 32 * 4
    # of four, tap 0 travels over three hops and tap 2 over two, or both straight to the last rank
    assert sent[4, "taps, relay"] == 2.5 * sent[4, "taps, shm"] == 5 * 8 * 32 * 32 * 4
    assert sent[2, "no taps"] == 0
    table = (tmp_path / "t.md").read_text()
    assert "Simulated, not measured" in table and "| 1F1B | 16 | 40% |" in table
