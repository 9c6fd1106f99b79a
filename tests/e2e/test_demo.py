"""The command that the README promises, on the real model."""

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from hf_codraft import load_draft


@pytest.mark.slow
def test_quick_demo_leaves_policy_draft_figures_and_picture(tmp_path):
    command = [
        sys.executable,
        "-m",
        "hf_codraft.cli.main",
        "demo",
        "--quick",
        "--steps",
        "2",
        "--output-dir",
        str(tmp_path),
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    }  # a real model: all cores
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["accept_length"]["last"] > 1.1  # an untrained draft has 1.0
    assert {"first", "last"} <= summary["reward"].keys()
    # what is expected on the completions is what the engine accepted of them: two steps of 16 rows, 15 % are four standard errors
    expected = summary["expected_accept_length"]["cotrained"]["last"]
    assert abs(summary["accept_length"]["last"] / expected - 1) < 0.15
    assert summary["rollout_tokens_per_second"]["speculative"] > 0
    assert {"generate", "logprob", "policy", "draft", "refit"} <= summary["seconds"].keys()
    assert (tmp_path / "demo.png").stat().st_size > 10_000

    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "cotrained")
    draft = load_draft(tmp_path / "cotrained" / "draft")
    assert draft.config.target_hidden_size == policy.config.hidden_size
    assert draft.t2d.sum() == draft.config.draft_vocab_size
