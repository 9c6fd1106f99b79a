"""The real vLLM on CPU: refits, proposals, losslessness and co-training (issue 2, "must be shown" 2; groups A and B).

Engines of one process do not share it well, so every case of `engine_cases.py` runs in a process of its own, and several
promises are checked in each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from hf_codraft import load_draft

CASES = Path(__file__).with_name("engine_cases.py")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}


# What trainers of earlier tests leave in the environment.
NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "ACCELERATE_")


def run_case(case: str, folder: Path, *, script: Path = CASES, **keywords) -> dict:
    command = [sys.executable, str(script), case, str(folder), json.dumps(keywords)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)} | ENVIRONMENT
    finished = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    if finished.returncode != 0:  # negative: a signal
        pytest.fail(
            f"{case} {keywords} ended with status {finished.returncode}:\n{finished.stderr[-4000:]}", pytrace=False
        )
    return json.loads((folder / "result.json").read_text())


# Refits and proposals

REFITS = {
    "llama, tied, full vocabulary": {},
    "qwen3, untied, reduced vocabulary": dict(kind="qwen3", tie=False, vocab=100),
    "llama, untied, draft with its own embeddings and every norm": dict(tie=False, variant=True),
    "qwen3, LoRA, bf16 engine, reduced vocabulary": dict(kind="qwen3", lora=True, vocab=100, dtype="bfloat16"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, id=name, marks=[pytest.mark.slow] if case else []) for name, case in REFITS.items()],
)
def refit(request, tmp_path_factory) -> dict:
    return run_case("refit", tmp_path_factory.mktemp("refit"), **request.param) | {"case": request.param}


def in_fp32(refit: dict) -> dict:
    if refit["case"].get("dtype") == "bfloat16":
        pytest.skip("compared in fp32 only: in bf16 engine and transformers round in different places")
    return refit


def test_engine_has_the_trainers_tensors_after_every_refit(refit):
    assert len(refit["refits"]) >= 3
    for sides in refit["refits"].values():
        assert sides == {"policy": [], "draft": []}
    assert refit["dtypes"] == [f"torch.{refit['case'].get('dtype', 'float32')}"]


def test_draft_shares_nothing_with_the_policy_but_embeddings_it_does_not_own(refit):
    assert refit["shared"] == ([] if refit["case"].get("variant") else ["model.embed_tokens.weight"])
    assert refit["policy_changed"] == []


def test_tensors_that_do_not_fit_or_arrive_are_named(refit):
    errors = refit["errors"]
    assert "sends ['confidence.weight']" in errors["unknown"]
    assert "expects ['norm.weight'] that the trainer does not send" in errors["missing"]
    assert "draft differs from the trainer's in 1 tensors: ['fc.weight']" in errors["lost"]
    if not refit["case"].get("variant"):
        assert "shares ['embed_tokens.weight'] with the policy" in errors["borrowed"]


def test_proposals_equal_those_of_our_draft_token_for_token(refit):
    for proposals in (in_fp32(refit)["proposals"], refit["other_proposals"]):
        assert proposals["wrong"] == []
        assert proposals["equal"] >= 40
        assert proposals["distinct"] >= 10


def test_log_probs_equal_those_of_transformers_also_after_refits(refit):
    """The packed matrices are made anew: with stale ones the second figure would be of the order of 1."""
    assert in_fp32(refit)["logprob_difference"] < 1e-4  # fp32 sums in another order
    assert refit["other_logprob_difference"] < 1e-4


def test_completion_up_to_the_last_position_is_the_unspeculated_one(refit):
    assert in_fp32(refit)["full_length"] == {"wrong": []}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        dict(rows=300),  # of 256 tokens: a padded vocabulary, which vLLM pads again to a multiple of 64
        dict(kind="qwen3", tie=False, vocab=100),
        dict(kind="qwen3", tie=False, vocab=100, layout="speculators"),
    ],
    ids=str,
)
def test_saved_draft_serves_in_an_engine_that_knows_nothing_of_us(tmp_path, case):
    proposals = run_case("saved", tmp_path, **case)
    assert proposals["wrong"] == []
    assert proposals["equal"] >= 20
    assert proposals["accepted"] > 0


# Losslessness

# |z| of 15 or so tests at fixed seeds: 4 is one in 16,000 for each, and the fault on CPU gave +603
MAX_Z = 4.0


@pytest.fixture(scope="module", params=["probabilistic", "greedy"])
def samples(request, tmp_path_factory) -> dict:
    result = run_case("losslessness", tmp_path_factory.mktemp("samples"), method=request.param)
    return result | {"method": request.param}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["1.0", "0.7", "2.0"])
def test_speculative_sampling_is_lossless(samples, temperature):
    """At 0.7 with top_p 0.9 and top_k 20; marginals of the first tokens and their joint distribution."""
    result = samples[temperature]
    tests = {name: result[name] for name in ("first", "second", "pair", "third") if name in result}
    assert {name: test for name, test in tests.items() if abs(test["z"]) > MAX_Z} == {}
    assert tests["second"]["cells"] >= 20
    assert ("third" in tests) == (temperature == "0.7")
    assert result["accept_length"] > (1.25 if samples["method"] == "probabilistic" else 1.01)


@pytest.mark.slow
def test_greedy_output_is_the_policys(samples):
    assert samples["greedy"]["wrong"] == []
    assert samples["greedy"]["accept_length"] > 1.02


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["1.0", "2.0"])
def test_log_probs_under_speculation_are_the_policys(samples, temperature):
    assert samples[temperature]["logprob_difference"] < 1e-4  # fp32 sums in another order


# Rollouts of the policy that is trained


@pytest.fixture(scope="module")
def agreement(tmp_path_factory) -> dict:
    return run_case("agreement", tmp_path_factory.mktemp("agreement"))


@pytest.mark.slow
def test_moe_policy_and_engine_agree_after_every_refit(agreement):
    """Experts are packed at load: plain ones in their place would be 1 away."""
    for name in ("unchanged", "evaluated", "loaded", "mended"):
        assert agreement[name]["logprob_difference"] < 1e-4, name  # fp32 sums in another order


@pytest.mark.slow
def test_engine_is_refitted_whenever_weights_changed_and_only_then(agreement):
    """Also by a second `train()`, whose steps count from 0 again, and by a state that is loaded between two steps."""
    versions = [agreement[name]["version"] for name in ("evaluated", "evaluated again", "loaded")]
    assert versions[1:] == [versions[0], versions[0] + 1]
    for name in ("first train", "second train", "evaluated", "loaded"):
        assert agreement[name]["checked"], name
        for num_tokens, mean, num_outliers in agreement[name]["checked"]:
            assert num_tokens > 20
            assert (mean < 1e-5, num_outliers) == (True, 0), name


@pytest.mark.slow
def test_processed_log_probs_of_the_engine_are_those_that_the_check_expects(agreement):
    for num_tokens, mean, num_outliers in agreement["processed"]["checked"]:
        assert num_tokens > 20
        assert (mean < 1e-5, num_outliers) == (True, 0)


@pytest.mark.slow
def test_rollouts_of_other_weights_stop_the_run(agreement):
    assert "do not come from the policy" in agreement["stale"]
    assert "they agreed at version" in agreement["stale"]
    sync, evaluation = agreement["garbage"]
    assert sync == ""  # every tensor lies where it was sent: no digest can see it
    assert "do not come from the policy" in evaluation
    assert "not finite in 1 tensors: ['fc.weight']" in agreement["not finite"]


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [None, 60])
def test_expected_acceptance_is_what_the_engine_accepts(tmp_path, vocab):
    result = run_case("acceptance", tmp_path, vocab=vocab)
    for accepted, expected in zip(result["accepted"], result["expected"], strict=True):
        error = (expected * (1 - expected) / result["num_steps"]) ** 0.5
        # 5 to 7 % of the steps are the last of a row, in which the engine counts guesses behind its end too
        assert accepted == pytest.approx(expected, abs=MAX_Z * error + 0.01)
    assert result["num_steps"] > 3000
    if vocab is not None:  # a teacher of the kept ids alone would say much more
        assert result["coverage"] < 0.6
        assert result["renormalised"][0] > result["accepted"][0] + 0.1
    assert result["table_of_turns"] == ["nan"] * 3  # of no row, rather than of another batch


# Co-training

STEPS, FROZEN_STEPS, ROWS = 24, 10, 16


@pytest.fixture(scope="module", params=[0, 1])
def runs(request, tmp_path_factory) -> dict:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("trained", "frozen")}
    trained = run_case("co_training", folders["trained"], seed=request.param, frozen=False, steps=STEPS)
    frozen = run_case("co_training", folders["frozen"], seed=request.param, frozen=True, steps=FROZEN_STEPS)

    def steps(result):
        return [entry for entry in result["log"] if "loss" in entry]

    return {"trained": steps(trained), "frozen": steps(frozen), "folder": folders["trained"] / "out"}


def mean(values) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
def test_co_training_raises_the_accept_length_above_the_frozen_draft(runs):
    trained = [entry["draft/accept_length"] for entry in runs["trained"]]
    frozen = [entry["draft/accept_length"] for entry in runs["frozen"]]
    assert trained[0] == pytest.approx(frozen[0])
    assert max(frozen) < 1.35
    assert (
        mean(trained[-5:]) > mean(frozen) + 0.12
    )  # measured: +0.28 and +0.26, and 0.03 from step to step when frozen


@pytest.mark.slow
def test_every_step_logs_the_engine(runs):
    for number, entry in enumerate(runs["trained"], start=1):
        rates = [entry[f"draft/accept_rate/pos_{position}"] for position in range(3)]
        assert 1 >= rates[0] >= rates[1] >= rates[2] >= 0
        assert entry["draft/accept_length"] == pytest.approx(1 + sum(rates))
        assert entry["refit/version"] == number
        assert entry["time/generate"] > 0
        assert entry["time/refit"] > 0
        assert entry["sampling/sampling_logp_difference/max"] < 1e-4  # fp32 sums in another order


@pytest.mark.slow
def test_completions_table_has_the_accept_length_of_every_row(runs):
    tables = sorted((runs["folder"] / "completions").glob("*.parquet"))
    assert len(tables) == STEPS
    for path in tables:
        table = pd.read_parquet(path)
        assert len(table) == ROWS
        assert table["accept_length"].between(1, 4).all()
    last = pd.read_parquet(tables[-1])["accept_length"]
    assert last.nunique() > 1
    # rows count alike here and steps in the metric
    assert last.mean() == pytest.approx(runs["trained"][-1]["draft/accept_length"], rel=0.15)


@pytest.mark.slow
def test_checkpoint_and_final_draft_are_written_beside_the_policy(runs):
    checkpoint = runs["folder"] / f"checkpoint-{STEPS}" / "draft"
    final, saved = load_draft(runs["folder"] / "draft").state_dict(), load_draft(checkpoint).state_dict()
    assert all(torch.equal(final[name], saved[name]) for name in final)
    state = torch.load(checkpoint / "training_state.pt", weights_only=True)
    assert state["refit_version"] == STEPS
    assert state["learner"]["num_steps"] == STEPS
