"""The benchmark of co-training: its workload's rewards, its intervals, and that it judges made-up figures rightly."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_codraft.cli.control import ratio_interval
from hf_codraft.drafts.expected import ExpectedAcceptance

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "co_training.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("co_training_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def made_up(lengths: dict[str, list[float]], *, draft_s: float = 0.5, engine: float = 1.0) -> dict:
    """A run in which these drafts have these accept lengths by step, on 16 rows that scatter by 5 %."""
    draw = random.Random(0)
    steps = []
    for number in range(len(lengths["cotrained"])):
        noise = [draw.gauss(1.0, 0.05) for _ in range(16)]
        expected = {
            name: {"steps": [24 / values[number] * x for x in noise], "tokens": [24.0] * 16}
            for name, values in lengths.items()
        }
        steps.append({
            "reward": 0.1, "mean_length": 25.0, "entropy": 0.3, "rolled_back": 0.0, "expected": expected,
            "seconds": {"generate": 5.0, "logprob": 1.0, "policy": 9.0, "draft": draft_s},
            "engine": {"cotrained": lengths["cotrained"][number] * engine},
        })  # fmt: skip
    return {"workload": {}, "seed": 0, "seconds_in_all": 1.0, "steps": steps}


GOOD = {"cotrained": [2.0, 2.1, 2.2, 2.3, 2.4, 2.4], "frozen": [2.0] * 6, "cold": [1.0, 1.5, 2.0, 2.3, 2.35, 2.35]}


def verdicts(benchmark, **changes) -> list[bool]:
    settings = {name: changes.pop(name) for name in ("draft_s", "engine") if name in changes}
    return [is_met for _, is_met in benchmark.aims({"sums, seed 0": made_up(GOOD | changes, **settings)})]


def test_good_figures_meet_every_aim(benchmark):
    assert verdicts(benchmark) == [True] * 6


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"cotrained": [2.0, 1.8, 1.8, 1.9, 2.4, 2.9]}, [0]),  # one bad window, though the mean is above
        ({"cotrained": [2.0] * 6, "cold": [2.0] * 6}, [1, 2]),
        ({"cotrained": [2.0, 2.05, 2.05, 2.1, 2.1, 2.1], "cold": [2.1] * 6}, [2]),
        ({"cold": [1.0, 1.5, 1.8, 2.0, 2.0, 2.0]}, [3]),
        ({"draft_s": 1.1}, [4]),
        ({"engine": 0.9}, [5]),
    ],
)
def test_missed_aims_are_called_so(benchmark, changes, missed):
    met = verdicts(benchmark, **changes)
    assert [number for number, is_met in enumerate(met) if not is_met] == missed


@pytest.mark.slow
def test_judging_a_file_prints_and_exits_by_the_aims(tmp_path):
    for name, changes, status in (("good", {}, 0), ("bad", {"cold": [1.0] * 6}, 1)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"sheets, seed 0": made_up(GOOD | changes)}))
        command = [sys.executable, str(BENCHMARK), "--judge", str(file), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        assert ("MISSED" in done.stdout) == bool(status) and "cotrained / frozen by thirds" in done.stdout


def test_intervals_cover_the_true_ratio_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        easy = torch.rand(32, generator=generator, dtype=torch.float64) + 0.5  # what a row is worth to both
        sides = [
            ExpectedAcceptance(
                easy * 10 * (1 + 0.1 * torch.randn(32, generator=generator)) / length, easy * 20, torch.zeros(0)
            )
            for length in (1.1, 1.0)
        ]
        ratio, low, high = ratio_interval([sides[0]], [sides[1]], draws=400)
        assert low < ratio < high
        covered += low <= 1.1 <= high
    assert (
        180 <= covered <= 199
    )  # 95 % of 200, four standard errors; bootstrap intervals of 32 rows are a little short


def test_rewards_find_small_sums(benchmark):
    text = "First 3 + 4 = 7, then 7 - 2 = 5. Then 3 + 4 = 7 and 5 + 1 = 9."
    completions = [[{"content": text}], [{"content": "It is five."}]]
    assert benchmark.right_sums(completions, [5, 5]) == [0.5, 0.0]
    assert benchmark.share_of_sums(completions) == [4 * len("3 + 4 = 7") / len(text), 0.0]
    rows = benchmark.sums(8, seed=1)
    assert all(6 <= row["num_terms"] <= 9 and row["prompt"][0]["content"].count(" + ") <= 8 for row in rows)
