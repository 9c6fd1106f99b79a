"""The demo's figures, verdicts and picture from histories of its runs."""

import json

import pytest
from rich.console import Console

from hf_codraft.cli.report import PHASES, draw, print_table, summarize, verdicts

SCALE = {"rows": 4, "steps": 2}


def step(reward: float, generate_s: float, accept_length: float | None = None) -> dict[str, float]:
    entry = {"reward": reward, "rewards/accuracy/mean": reward, "completions/mean_length": 10.0}
    entry |= {f"time/{phase}": 1.0 for phase in PHASES} | {"time/generate": generate_s}
    if accept_length is not None:
        entry |= {"draft/accept_length": accept_length, "draft/accept_rate/pos_0": 0.5, "draft/vocab_coverage": 1.0}
        entry["expected"] = {
            name: {"steps": [12 / length] * 8, "tokens": [12.0] * 8}
            for name, length in (("cotrained", accept_length), ("frozen", 1.5))
        }
    return entry


@pytest.fixture
def folders(tmp_path):
    histories = {
        "cotrained": [step(0.1, 2.0, 1.5), step(0.3, 2.0, 2.5)],
        "plain": [step(0.1, 4.0), step(0.3, 4.0)],
    }
    for name, steps in histories.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "history.json").write_text(json.dumps({"warmup_s": 1.0, "train_s": 2.0, "steps": steps}))
    return {name: tmp_path / name for name in histories}


def test_summary_compares_with_both_controls(folders):
    summary = summarize(folders, SCALE)
    assert summary["accept_length"] == {"first": 2.0, "last": 2.0}
    assert summary["expected_accept_length"]["frozen"] == {"first": 1.5, "last": 1.5}
    assert summary["rollout_tokens_per_second"] == {"speculative": 20.0, "plain": 10.0}
    assert summary["seconds"]["generate"] == 4.0
    frozen, plain = verdicts(summary)
    # 8 rows of 12 tokens a step: 8 + 8 steps frozen are 16 * 8, co-trained 8 * 8 + 8 * 4.8
    assert "Co-training won" in frozen and "1.250 times" in frozen
    assert "Speculation won" in plain and "2.00x" in plain


def test_verdicts_say_who_lost(folders):
    summary = summarize(folders, SCALE)
    summary["over_frozen"] = {"ratio": 0.9, "low": 0.8, "high": 0.95}
    summary["rollout_tokens_per_second"]["plain"] = 40.0
    frozen, plain = verdicts(summary)
    assert "Co-training lost" in frozen and "Speculation lost" in plain
    summary["over_frozen"]["high"] = 1.1
    assert "Co-training drew" in verdicts(summary)[0]


def test_table_and_picture_are_made_with_and_without_controls(folders, tmp_path):
    for chosen in (folders, {"cotrained": folders["cotrained"]}):
        console = Console(record=True, width=100)
        print_table(summarize(chosen, SCALE), console)
        assert "accept length" in console.export_text()
        draw(chosen, tmp_path / "demo.png")
        assert (tmp_path / "demo.png").stat().st_size > 10_000
