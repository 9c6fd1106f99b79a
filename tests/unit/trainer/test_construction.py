"""What the trainer takes as GRPOTrainer does, how a fresh draft starts, and policies that it cannot reach."""

import warnings

import pytest
import tiny
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from fixed_rollouts import FixedCoDraftGRPOTrainer, codraft, same, settings, weights
from transformers import Phi3Config, Phi3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

from hf_codraft import CoDraftGRPOConfig

SIZES = dict(
    vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=2, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:use_vllm=False")
def test_arguments_and_checkpoint_go_by_position_as_in_grpo_trainer(tmp_path):
    args = CoDraftGRPOConfig(**settings(tmp_path, max_steps=2, save_strategy="steps", save_steps=1))
    model, data, evaluation = tiny.policy(num_hidden_layers=4), tiny.prompts(), tiny.prompts(4)
    trainer = FixedCoDraftGRPOTrainer(model, tiny.reward, args, data, evaluation, tiny.tokenizer(), draft="eagle3")
    assert trainer.train_dataset is data and trainer.eval_dataset is evaluation
    trainer.train()
    whole = weights(trainer.draft)
    again = FixedCoDraftGRPOTrainer(
        tiny.policy(num_hidden_layers=4), tiny.reward, args, data, None, tiny.tokenizer(), draft="eagle3"
    )
    again.train(str(tmp_path / "checkpoint-1"))
    assert same(whole, weights(again.draft))


def test_empty_dataset_with_a_warm_start_is_refused(tmp_path):
    with pytest.raises(ValueError, match="train_dataset has no rows, so draft_warmup_rollouts=4"):
        codraft(tmp_path, train_dataset=tiny.prompts(2).select([]), draft_warmup_rollouts=4)


def test_policy_spread_over_devices_is_refused(tmp_path):
    model = tiny.policy(num_hidden_layers=4)
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1}
    with pytest.raises(ValueError, match=r"spread over \['0', '1'\] \(device_map\).*accelerate launch"):
        codraft(tmp_path, model=model)


@pytest.mark.parametrize("use_vllm", [False, True])
def test_fsdp1_is_refused(tmp_path, monkeypatch, use_vllm):
    """Its plugin is put where accelerate has it on GPUs; on one CPU process it would be left out."""

    def create(self):
        original(self)
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=1)

    original = GRPOTrainer.create_accelerator_and_postprocess
    monkeypatch.setattr(GRPOTrainer, "create_accelerator_and_postprocess", create)
    monkeypatch.setattr("trl.generation.vllm_generation.LLM", lambda **kwargs: pytest.fail("an engine was started"))
    try:
        with pytest.raises(ValueError, match="fsdp_version=1 cannot train a draft"):
            codraft(tmp_path, use_vllm=use_vllm, vllm_mode="colocate")
    finally:
        AcceleratorState._reset_state(True)


def test_fused_projections_start_a_draft_as_plain_ones(tmp_path):
    """Queries, keys, values, gates and ups of Phi-3 are what its own layer computes."""
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SIZES))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the fresh draft starts")
        draft = codraft(tmp_path, model=model).draft
    layer, x = model.model.layers[-1], torch.randn(5, tiny.HIDDEN)
    width = 2 * 16  # of two key heads
    own = draft.midlayer
    reads = torch.cat([torch.zeros_like(x), x], -1)  # no embedding beside the state
    with torch.no_grad():
        query, key, value = layer.self_attn.qkv_proj(x).split([2 * width, width, width], -1)
        torch.testing.assert_close(own.self_attn.q_proj(reads), query)
        torch.testing.assert_close(own.self_attn.k_proj(reads), key)
        torch.testing.assert_close(own.self_attn.v_proj(reads), value)
        torch.testing.assert_close(own.mlp(x), layer.mlp(x))
        torch.testing.assert_close(draft.norm(x), model.model.norm(x))


def test_weights_that_a_fresh_draft_could_not_start_from_are_named(tmp_path):
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32)
    with pytest.warns(
        UserWarning, match=r"nothing of the right shape for \['midlayer.mlp.down_proj.weight', .*gate_proj"
    ):
        codraft(tmp_path, model=Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **moe)))
