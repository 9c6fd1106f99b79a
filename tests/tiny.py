"""Small real policies, tokenizers, data and rewards: seeded, offline, quick."""

import random
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB, HIDDEN, LAYERS = 256, 64, 8

# Flags of the published EAGLE-3 variants, each alone.
NORM_FLAGS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
}


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<eos>", "<bos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB + 3, special_tokens=special, initial_alphabet=sorted(alphabet)[: VOCAB - 3]
    )
    bpe.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def policy(
    kind: str = "llama", *, tie: bool = True, seed: int = 0, **overrides
) -> LlamaForCausalLM | Qwen3ForCausalLM:
    config = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tie, bos_token_id=2,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    config |= overrides
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**config))
    with torch.no_grad():  # away from uniform, so that a draft has something to learn
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0 if "embed" in name or "lm_head" in name else 3.0)
    return model


def save(model, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def prompts(num: int = 32, seed: int = 0) -> Dataset:
    draw = random.Random(seed)
    return Dataset.from_dict(
        {"prompt": ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 12))) for _ in range(num)]}
    )


def reward(completions, **kwargs) -> list[float]:
    """Share of letters that are vowels: graded, and different from row to row."""
    return [
        sum(letter in "aeiou" for letter in text) / max(len(text), 1) + 0.01 * len(set(text)) for text in completions
    ]
