"""Every option of TRL's trainer leaves the policy as it is without a draft, or is refused, or cannot reach the draft."""

import dataclasses
import os
from pathlib import Path

import options
import pytest
import tiny
import torch
from fixed_rollouts import codraft, grpo, logged, same, weights
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig

DOC = Path(__file__).parents[3] / "docs" / "compatibility.md"
OURS = ("draft/", "eval_draft/", "eval_time/", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
BEGIN, END = "<!-- begin: options -->\n", "\n<!-- end: options -->"


@pytest.fixture(autouse=True)
def determinism_ends_with_the_test():
    environment = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)


def policy_for(case: str, folder: Path):
    """A fresh policy for one trainer: TRL loads a reference model by its path, and only some have routers."""
    if "reference" in case:
        return tiny.save(tiny.policy("llama", num_hidden_layers=4, tie=False), folder)
    if "router" not in case:
        return None
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=512, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize(("case", "changes"), options.CASES.items(), ids=options.CASES)
def test_the_policy_learns_what_it_would_without_a_draft(tmp_path, case, changes):
    changes = dict(max_steps=2) | changes
    data = {"eval_dataset": tiny.prompts(4, seed=3)} if "eval_strategy" in changes else {}
    plain = grpo(tmp_path / "plain", model=policy_for(case, tmp_path / "policy"), **data, **changes)
    before = weights(plain.model)
    plain.train()
    ours = codraft(tmp_path / "ours", model=policy_for(case, tmp_path / "policy"), **data, **changes)
    draft_before = weights(ours.draft)
    ours.train()
    assert not same(before, weights(plain.model))
    assert not same(draft_before, weights(ours.draft)) and ours.learner.num_steps > 0
    assert same(weights(plain.model), weights(ours.model))
    assert logged(plain, without=OURS) == logged(ours, without=OURS)


@pytest.mark.parametrize(("changes", "message", "reason"), options.REFUSED.values(), ids=options.REFUSED)
def test_what_does_not_work_is_refused_by_name(tmp_path, changes, message, reason):
    with pytest.raises(ValueError, match=message):
        codraft(tmp_path, **changes)


@pytest.mark.parametrize("kind", ["wrapped", "in place", "a layer", "launcher"])
def test_a_compiled_policy_is_refused(tmp_path, monkeypatch, kind):
    model = tiny.policy("llama", num_hidden_layers=4)
    if kind == "wrapped":
        model = torch.compile(model)
    elif kind == "launcher":
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    else:
        (model if kind == "in place" else model.model.layers[1]).compile()
    with pytest.raises(
        ValueError, match=r"(model is compiled|dynamo_backend='INDUCTOR'), which cannot be used with a draft"
    ):
        codraft(tmp_path, model=model)


def test_every_option_stands_in_one_table():
    """TRL has a new one: try it in `CASES`, refuse it, or say why it cannot reach the draft."""
    assert {field.name for field in dataclasses.fields(GRPOConfig)} == options.known()
    elsewhere = [name for table in (options.ELSEWHERE, options.OUTSIDE) for names in table for name in names.split()]
    assert len(elsewhere) == len(set(elsewhere))
    assert not set(elsewhere) & (
        options.REFUSED.keys() | {name for changes in options.CASES.values() for name in changes}
    )


def test_the_document_shows_the_tables():
    """`python tests/unit/trainer/test_options.py` writes them."""
    assert DOC.read_text().split(BEGIN)[1].split(END)[0] == options.render()


if __name__ == "__main__":
    start, rest = DOC.read_text().split(BEGIN)
    DOC.write_text(start + BEGIN + options.render() + END + rest.split(END)[1])
