"""One tiny policy of each family that a pipeline splits, with weights far from uniform."""

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    # Sliding layers after full ones: which is which depends on a layer's index in the whole model.
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
    ),
}
VOCAB = 96


def policy(family: str, *, tie: bool = False, num_layers: int = 4, seed: int = 0, **overrides) -> PreTrainedModel:
    """A seeded model in training mode."""
    kind, special = CONFIGS[family]
    config = kind(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tie, **(special | overrides),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.train()


def batch(num_rows: int, length: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows padded on the left by 0, 1, 2, ... tokens, with a weight each."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(length) >= (torch.arange(num_rows) % (length - 2))[:, None]).long()
    return {
        "input_ids": torch.randint(3, VOCAB, (num_rows, length), generator=generator) * mask,
        "attention_mask": mask,
        "weight": torch.rand(num_rows, generator=generator) + 0.5,
    }
