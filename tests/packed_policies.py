"""Small policies of several kinds, run on a packed row that is spread over ranks and, as the truth, on separate rows."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.plans import balanced_plan, contiguous_plan, segment_zigzag_plan, zigzag_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import run_local_ranks
from hf_codraft.policy.anatomy import unwrap_peft
from hf_codraft.policy.attention import packed_inputs, register_attention

VOCAB = 48
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}
PLANS = {
    "contiguous": contiguous_plan,
    "zigzag": zigzag_plan,
    "segment_zigzag": segment_zigzag_plan,
    "balanced": balanced_plan,
}
PACKINGS = {
    "mixed": [7, 1, 12, 3, 2],  # 25 tokens: no multiple of 2 x ranks, a segment of one token
    "short": [1, 3, 2, 1, 2, 3, 1],  # shorter than 4 ranks, all of them
    "long": [29],
    "sparse": [1, 2],  # fewer tokens than 4 ranks
}


@dataclass(frozen=True)
class Case:
    """One policy on one row; made by tests, read by [`truth`] and [`run_rank`]."""

    kind: str = "llama"
    packing: str = "mixed"
    plan: str = "zigzag"
    config: dict[str, Any] = field(default_factory=dict)
    lora: tuple[str, ...] = ()  # target modules
    supervised: str = "all"  # or the "last" segment alone, or "none"
    reentrant: bool | None = None  # gradient checkpointing, if not None
    call: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the model call
    autocast: torch.dtype | None = None  # of torch.autocast around every forward

    def layout(self, world: int) -> PackedLayout:
        row = PackedLayout.from_lengths(PACKINGS[self.packing])
        return PLANS[self.plan](row.cu_seqlens, world)

    def token_ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randint(VOCAB, (sum(PACKINGS[self.packing]),), generator=generator)

    def supervised_mask(self) -> torch.Tensor:
        """Which tokens of the row are targets, if something precedes them."""
        lengths = PACKINGS[self.packing]
        first = {"all": 0, "last": sum(lengths[:-1]), "none": sum(lengths)}[self.supervised]
        return torch.arange(sum(lengths)) >= first

    def num_targets(self) -> int:
        masks = self.supervised_mask().split(PACKINGS[self.packing])
        return max(sum(int(mask[1:].sum()) for mask in masks), 1)


@dataclass(frozen=True)
class Result:
    """Logits of the whole row, and the gradient of the mean loss over its targets by every trainable parameter."""

    logits_TV: torch.Tensor
    gradients: dict[str, torch.Tensor]


def build(case: Case) -> nn.Module:
    """The case's policy with transformers' own attention, every weight away from its initial value."""
    model_class, config_class, extra = KINDS[case.kind]
    config = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=1,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config_class(**(config | extra | case.config)))
    if case.lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=list(case.lora), init_lora_weights=False))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
                if case.lora and parameter.requires_grad:
                    parameter.mul_(0.3)  # the delta stays below the weight
            else:
                parameter.uniform_(0.5, 1.5)
    return model.train()


def ours(model: nn.Module, case: Case) -> nn.Module:
    """A copy with this library's attention, and the case's checkpointing."""
    model = copy.deepcopy(model)
    unwrap_peft(model).set_attn_implementation(register_attention())
    if case.reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.reentrant})
        if case.lora:
            model.enable_input_require_grads()
    return model


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def truth(case: Case, model: nn.Module) -> Result:
    """Stock transformers: a forward for every row, next-token loss over all of them."""
    model, rows = copy.deepcopy(model), case.token_ids().split(PACKINGS[case.packing])
    with torch.autocast("cpu", case.autocast, enabled=case.autocast is not None):
        logits = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    targets = case.token_ids().masked_fill(~case.supervised_mask(), -100).split(PACKINGS[case.packing])
    losses = [F.cross_entropy(x[:-1].float(), target[1:], reduction="sum") for x, target in zip(logits, targets)]
    (sum(losses) / case.num_targets()).backward()
    return Result(torch.cat(logits).detach(), _gradients(model))


def run_rank(case: Case, model: nn.Module, shard: Shard) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's logits, and its part of every gradient; `model` (of [`ours`]) is its own."""
    inputs = packed_inputs(case.token_ids(), shard, supervised_T=case.supervised_mask())
    with torch.autocast("cpu", case.autocast, enabled=case.autocast is not None):  # a thread's own
        output = model(**inputs, **case.call)
    output.loss.backward()
    return output.logits[0, : shard.num_tokens].detach(), _gradients(model)


def join(layout: PackedLayout, parts: Sequence[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> Result:
    """All ranks' parts as one result: logits side by side, gradients summed."""
    logits_TV = layout.unshard([logits for logits, _ in parts])
    names = parts[0][1]
    return Result(logits_TV, {name: sum(gradients[name] for _, gradients in parts) for name in names})


def errors(result: Result, reference: Result) -> dict[str, float]:
    """Largest difference of each tensor, relative to the reference's largest entry (of all gradients, where all are 0)."""
    assert result.gradients.keys() == reference.gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in reference.gradients.values())
    pairs = {"logits": (result.logits_TV, reference.logits_TV)}
    pairs |= {name: (result.gradients[name], gradient) for name, gradient in reference.gradients.items()}
    return {
        name: ((found - wanted).abs().max() / (wanted.abs().max().item() or largest or 1.0)).item()
        for name, (found, wanted) in pairs.items()
    }


def run_local(case: Case, model: nn.Module, world: int, dtype: torch.dtype = torch.float32) -> Result:
    """The case on `world` ranks of this process."""
    layout = case.layout(world)
    copies = [ours(model, case) for _ in range(world)]
    for parameter in (parameter for each in copies for parameter in each.parameters()):
        parameter.data = parameter.data.to(dtype)  # and not the buffers: inverse frequencies stay fp32
    parts = run_local_ranks(lambda t: run_rank(case, copies[t.rank], Shard(layout, t.rank, t)), world)
    return join(layout, parts)


def assert_equal(result: Result, reference: Result, *, tolerance: float = 1e-5) -> None:
    wrong = {name: error for name, error in errors(result, reference).items() if not error <= tolerance}
    assert not wrong, wrong
