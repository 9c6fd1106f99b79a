"""A draft turns its heads as vLLM will, for every kind of RoPE and for a part of each head."""

import pytest
import torch

from hf_codraft.drafts.eagle3 import Eagle3DraftConfig, _Attention, _RotaryEmbedding

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 5e3},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("rope", ROPE.values(), ids=ROPE)
def test_a_draft_turns_its_heads_as_vllm_does(rope, part):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = Eagle3DraftConfig(
        vocab_size=32, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        rope_parameters=rope | {"partial_rotary_factor": part}, max_position_embeddings=64,
    )  # fmt: skip
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(16, max_position=64, rope_parameters=config.rope_parameters, dtype=torch.float32)
    q, positions = torch.randn(40, 64), torch.arange(40)
    want, _ = theirs.forward_native(positions, q.clone(), q.clone())
    cos, sin = _RotaryEmbedding(config)(torch.zeros(1, 1, 1), positions[None])
    got = _Attention(config)._turn(q.view(40, 4, 16), (cos[0], sin[0])).flatten(1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert (got.view(40, 4, 16)[..., 8:] == q.view(40, 4, 16)[..., 8:]).all() == (part == 0.5)
