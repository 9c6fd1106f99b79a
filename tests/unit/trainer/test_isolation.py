"""The policy's weights are those of plain GRPO, bit for bit, whatever the draft does (issue 2, "must be shown" 1)."""

import pytest
import tiny
from fixed_rollouts import codraft, grpo, logged, same, weights
from peft import LoraConfig

CHECKPOINTING = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
CASES = {
    "plain": {},
    "accumulation": dict(gradient_accumulation_steps=2, per_device_train_batch_size=2),
    "clipping": dict(max_grad_norm=1e-3),
    "two iterations": dict(num_iterations=2, max_steps=4),
    "stale rollouts": dict(steps_per_generation=2, max_steps=4),
    "reentrant checkpointing": CHECKPOINTING | dict(gradient_checkpointing_kwargs={"use_reentrant": True}),
    "checkpointing": CHECKPOINTING,
    "dapo": dict(loss_type="dapo"),
    "grpo": dict(loss_type="grpo"),
    "truncated rows masked": dict(mask_truncated_completions=True),
    "bf16": dict(bf16=True),
}


def assert_isolated(folder, parts=dict, **changes):
    """One run after the other: each trainer seeds torch's generator when it is made, and TRL shuffles rows by it."""
    plain = grpo(folder / "plain", **parts(), **changes)
    before = weights(plain.model)
    plain.train()
    co_trained = codraft(folder / "co", **parts(), **changes)
    draft_before = weights(co_trained.draft)
    assert same(before, weights(co_trained.model))
    co_trained.train()
    after = weights(plain.model)
    assert not same(before, after)
    assert not same(draft_before, weights(co_trained.draft))
    assert same(after, weights(co_trained.model))
    assert logged(plain) == logged(co_trained, without=("draft/",))


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_policy_weights_equal_those_of_plain_grpo(tmp_path, changes):
    assert_isolated(tmp_path, **changes)


def test_policy_weights_equal_those_of_plain_grpo_with_a_reference_model(tmp_path):
    path = tiny.save(tiny.policy("llama", num_hidden_layers=4, tie=False), tmp_path / "policy")
    assert_isolated(tmp_path, lambda: {"model": path}, beta=0.1, num_iterations=2, max_steps=4)


@pytest.mark.parametrize("changes", [{}, CHECKPOINTING, dict(bf16=True)], ids=["plain", "checkpointing", "bf16"])
def test_adapters_equal_those_of_plain_grpo(tmp_path, changes):
    """With dropout, which draws from the generator that a draft must leave alone."""

    def lora():
        config = LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear", modules_to_save=["lm_head"])
        return {"peft_config": config, "model": tiny.policy("qwen3", num_hidden_layers=4, tie=False)}

    assert_isolated(tmp_path, lora, **changes)


@pytest.mark.parametrize("changes", [{}, CASES["accumulation"]], ids=["plain", "accumulation"])
def test_trainer_without_draft_is_plain_grpo(tmp_path, changes):
    plain = grpo(tmp_path / "plain", **changes)
    plain.train()
    ours = codraft(tmp_path / "ours", draft=None, **changes)
    ours.train()
    assert same(weights(plain.model), weights(ours.model))
    assert logged(plain) == logged(ours)
    assert plain.state.log_history[0].keys() == ours.state.log_history[0].keys()
