"""The pipeline benchmark: its judgement on made-up figures, and that a quick run works."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.parallel.simulator import StepCosts, simulate

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


def made_up_rows(benchmark, schedule="1F1B", *, num_ranks=4, taps=1.0, spread=1.08, in_turn=1.15, simulated=1.0):
    ratios = dict.fromkeys(benchmark.VARIANTS, 1.0) | {
        "taps, shm": taps, "taps, gloo": 1.0, "last_inside": 1.3, "last_deferred": 1.2, "spread": spread,
        "spread, m mod P": in_turn,
    }  # fmt: skip
    return [
        {
            "schedule": schedule,
            "num_ranks": num_ranks,
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
    # the default is judged, and m mod P stands beside it
    assert aims[3]["figure"] == "0.267 (m mod P: 0.500, above 1/3)"
    assert benchmark.check_aims(made_up_rows(benchmark, in_turn=1.09))[3]["figure"].endswith("0.300, within 1/3)")
    missed = [{"taps": 1.1}, {"spread": 1.11}, {"simulated": 1.2}]
    for position, changes in zip((0, 3, 4), missed):
        verdicts = [aim["is_met"] for aim in benchmark.check_aims(made_up_rows(benchmark, **changes))]
        assert verdicts == [i != position for i in range(5)]


def test_runs_are_judged_apart(benchmark):
    rows = made_up_rows(benchmark, num_ranks=2) + made_up_rows(benchmark)
    aims = benchmark.check_aims(
        rows + made_up_rows(benchmark, "Interleaved1F1B", taps=1.1, spread=1.11, simulated=1.2)
    )
    assert [aim["is_met"] for aim in aims] == [True] * 4 + [True] * 5 + [False, True, True, False, False]
    starts = ["1F1B, P = 2: "] * 4 + ["1F1B, P = 4: "] * 5 + ["Interleaved1F1B, P = 4: "] * 5
    assert all(aim["aim"].startswith(start) for aim, start in zip(aims, starts))


def made_up_report(variant, *, rank, num_ranks, sinks):
    """Of a rank with two stages: its second takes three times its first."""
    busy = [["F", rank, 0.1], ["B", rank, 0.2], ["F", rank + num_ranks, 0.3], ["B", rank + num_ranks, 0.6]] * 4
    busy += [["D", 2 * num_ranks - 1, 0.5]]
    return {"variant": variant, "step_s": 6.4, "draft_step_s": 0.0, "busy": busy, "sinks": sinks, "bytes_weights": 7}


def test_the_simulated_step_has_the_sinks_and_stages_that_ran(benchmark):
    """Made-up reports of two ranks whose spread ran wholly on rank 1, as long as the last, deferred."""
    scale, layout = benchmark.Scale(num_microbatches=4, rounds=1), benchmark.Layout("Interleaved1F1B", 2, 2)
    sinks = dict.fromkeys(benchmark.PLACED, [1] * 4) | {benchmark.IN_TURN: [0, 1, 0, 1]}
    ranks = [
        [made_up_report(name, rank=rank, num_ranks=2, sinks=sinks.get(name)) for name in benchmark.VARIANTS]
        for rank in range(2)
    ]
    found = {row["variant"]: row for row in benchmark.summarize(layout, scale, ranks)}
    simulated_s = {name: row.get("simulated_s") for name, row in found.items()}
    assert simulated_s["spread"] == simulated_s["last_deferred"] > simulated_s[benchmark.IN_TURN] > 0.0
    costs = StepCosts([0.1, 0.1, 0.3, 0.3], [0.2, 0.2, 0.6, 0.6], 0.5, found["spread"]["fitted_transfer_s"])
    order = schedule_order("Interleaved1F1B", 2, 4, 4)
    # transfers are fitted to the step without a draft; what comes with one is predicted
    assert simulate(order, costs, placement="none").step_s == pytest.approx(6.4)
    assert simulate(order, costs, placement="last_inside").step_s == simulated_s["last_inside"]
    assert found["spread"]["idle_s"] == pytest.approx([6.4 - 4 * 1.2 - 0.5] * 2)
    assert found["spread"]["bytes_weights"] == 14 and found["spread"]["bytes_gradients"] == 0


@pytest.mark.slow
def test_tables_are_written_without_a_measured_run(benchmark, tmp_path):
    pytest.importorskip("matplotlib")
    assert benchmark.main(["--tables", str(tmp_path / "t.md")]) == 0
    table = (tmp_path / "t.md").read_text()
    assert "Simulated, not measured" in table and (tmp_path / "pipeline_timeline.png").stat().st_size > 0
    assert "| no draft | last_inside | last_deferred | spread, m mod P | spread, balanced |" in table
    # 1F1B, P = 2, M = 8: 9 s a step and 8 of work; the draft's 8 * 0.4 s on one rank, or 4 * 0.4 s on each
    assert "| 1F1B | 2 | 40% | (idle 11%) | 35.6% (idle 21%) |" in table
    assert table.count("| Interleaved1F1B | 16 |") == 4


@pytest.mark.slow
def test_a_quick_run_reports_every_variant(benchmark, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(row["schedule"], row["variant"]): row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert [*rows] == [(schedule, name) for schedule in ("1F1B", "Interleaved1F1B") for name in benchmark.VARIANTS]
    assert [len(row["idle_s"]) for row in rows.values()] == [2] * 9 + [4] * 9
    sinks = {name: row.get("sinks") for (schedule, name), row in rows.items() if schedule != "1F1B"}
    assert sinks["spread"] != sinks["spread, m mod P"] == 2 * [0, 1, 2, 3] and sinks["last_inside"] == 8 * [3]

    def moved(what: str, schedule: str, *variants: str) -> list[int]:
        return [rows[schedule, name][f"bytes_{what}"] for name in variants]

    # 8 microbatches of 128 tokens, 256 wide, in fp32; of two ranks the first owns taps 0 and 2
    sent = 8 * 128 * 256 * 4
    assert moved("published", "1F1B", "no taps", *benchmark.TAPS) == [0, 2 * sent, 2 * sent, 2 * sent]
    # of eight stages, tap 0 travels over seven hops and tap 2 over six, or both straight to the last rank
    assert moved("published", "Interleaved1F1B", *benchmark.TAPS) == [2 * sent, 2 * sent, 13 * sent]
    # the last rank lacks the embeddings, 64 x 256 in fp32, and a spread draft's other ranks one of both or both
    weight = 64 * 256 * 4
    assert moved("weights", "1F1B", "no taps", "taps, shm", *benchmark.PLACED) == [0] + [weight] * 3 + [2 * weight] * 2
    others = [2 * len(set(sinks[name])) - len({0, 3} & set(sinks[name])) for name in ("spread", "spread, m mod P")]
    assert moved("weights", "Interleaved1F1B", "spread", "spread, m mod P") == [n * weight for n in others]
    assert others[1] == 6
    # an EAGLE-3 layer of this size: fc, q, k and v of twice the width, o, three of the MLP, four norms, the head
    draft = 3 * 256 * 256 + 512 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 64 + 4 * 256 + 64 * 256
    assert moved("gradients", "1F1B", "taps, shm", "last_deferred", "spread") == [0, 0, 2 * 4 * draft]
    assert moved("gradients", "Interleaved1F1B", "last_inside", "spread, m mod P") == [0, 4 * 4 * draft]
