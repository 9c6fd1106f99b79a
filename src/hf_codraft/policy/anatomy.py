"""Where the parts of a Hugging Face causal LM are, whatever wraps it.

Legend: V vocabulary, H hidden width.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_codraft.losses import Teacher
from hf_codraft.policy.probe import (
    NUM_TOKENS,
    LogitFunction,
    NormFunction,
    dense_weight,
    logit_function,
    norm_function,
    whole,
)
from hf_codraft.taps.packed import PolicyWeights
from hf_codraft.taps.recorder import TapRecorder, TapSpec, tap_hooks

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "norm_f", "final_norm", "embedding_norm", "layer_norm")
# A draft's norms, and what families call the one at that place; the one in front of the MLP is not the one after attention.
LAYER_NORMS = {
    "input_layernorm": ("input_layernorm", "attention_layernorm", "operator_norm", "temporal_pre_norm"),
    "post_attention_layernorm": (
        "pre_feedforward_layernorm", "pre_mlp_layernorm", "pre_ff_layernorm", "feedforward_layernorm", "ffn_norm",
        "channel_pre_norm", "post_attention_layernorm",
    ),
}  # fmt: skip


def unwrap_peft(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT model (or the model itself); adapters stay in place."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


@torch.no_grad()
def effective_weight(module: nn.Module) -> torch.Tensor:
    """The weight that `module` multiplies by, with active LoRA and DoRA deltas added.

    PEFT's wrappers of `modules_to_save` and trainable tokens answer `weight` with the active one themselves.

    Raises:
        ValueError: for an adapter of another kind.
    """
    _check_adapter(module)
    if hasattr(module, "get_merged_weights"):  # trainable tokens as an adapter of their own
        return module.get_merged_weights(module.active_adapters).detach()
    if hasattr(module, "base_layer"):
        weight = module.base_layer.weight.detach()
        if module.merged or module.disable_adapters:
            return weight
        for adapter in module.active_adapters:
            if adapter in module.lora_variant:  # DoRA rescales the sum
                weight = module.lora_variant[adapter].merge_safe(module, adapter, weight).detach()
            elif adapter in module.lora_A or adapter in module.lora_embedding_A:
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
        return weight
    return module.weight.detach()


def _check_adapter(module: nn.Module) -> None:
    if not hasattr(module, "base_layer") or hasattr(module, "get_merged_weights"):
        return
    if not hasattr(module, "lora_embedding_A") or any(getattr(module, "lora_bias", {}).values()):
        raise ValueError(
            f"the policy's embeddings or head carry an adapter of the kind {type(module).__module__.split('.')[2]!r} (or a LoRA "
            "with lora_bias), whose weights cannot be read out for the draft's teacher. Leave them out of target_modules, or "
            "use LoRA or modules_to_save there."
        )


@dataclass(frozen=True)
class PolicyAnatomy:
    """The parts of a causal LM that co-training touches; made by [`PolicyAnatomy.of`], read by trainer and warm start.

    Args:
        model (`PreTrainedModel`): the transformers model, out of PEFT.
        decoder (`nn.Module`): its backbone, whose output is what the head reads.
        norm (`nn.Module`): the backbone's final norm.
        outer (`nn.Module`): the model as it is trained, with PEFT around it.
    """

    model: PreTrainedModel
    decoder: nn.Module
    norm: nn.Module
    outer: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> "PolicyAnatomy":
        """Finds the parts.

        Raises:
            ValueError: if the model is not a decoder-only LM with `layers`, a final norm, input embeddings and an output
                head, or is compiled.
        """
        outer, model = model, unwrap_peft(model)
        if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in outer.modules()):
            raise ValueError(
                f"model ({type(model).__name__}) is compiled (torch.compile): compiled code runs past the hooks that read its "
                "hidden states. Pass the model before it is compiled, or draft=None."
            )
        decoder = getattr(model, "model", None)
        norms = [module for name in FINAL_NORMS if isinstance(module := getattr(decoder, name, None), nn.Module)]
        missing = [
            what
            for what, is_there in (
                ("model.layers", isinstance(getattr(decoder, "layers", None), nn.ModuleList)),
                (f"model.norm (or {', '.join(FINAL_NORMS[1:])})", bool(norms)),
                ("input embeddings", _has_embeddings(model)),
                ("output head", isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None),
            )
            if not is_there
        ]
        if missing:
            raise ValueError(
                f"model ({type(model).__name__}) is not a decoder-only language model with model.layers, a final norm, input "
                f"embeddings and an output head (missing: {missing}); co-training needs them. Pass a causal LM of the Llama, "
                "Qwen, Mistral, Gemma or a like family."
            )
        return cls(model, decoder, norms[0], outer)

    @torch.no_grad()
    def check(self) -> None:
        """Makes sure that a draft sees what the policy computes, by a forward on a few tokens.

        Hidden states must be one of the hidden size for every token and layer, and logits must be those of [`weights`].
        Where the weights are not here yet (DeepSpeed ZeRO-3, shards, the meta device) only the logits' scaling is looked at.

        Raises:
            ValueError: with the model's name and what it does differently.
        """
        name, hidden_size = type(self.model).__name__, self.hidden_size
        for module in (self.model.get_input_embeddings(), self.head):
            _check_adapter(module)
        self.logit_function  # noqa: B018  (raises where it cannot be followed)
        if not all(_is_whole(parameter) for parameter in self.outer.parameters()):
            return
        weights = self.weights()
        for what, weight in (("input embeddings", weights.embedding_VH), ("output head", weights.head_VH)):
            if weight.ndim != 2 or weight.shape[1] != hidden_size or not weight.is_floating_point():
                raise ValueError(
                    f"model ({name}) has {what} of shape {tuple(weight.shape)} in {weight.dtype}, and a draft needs one plain "
                    f"row of its hidden size ({hidden_size}) for every token. Leave them out of quantization, or pass draft=None."
                )
        if len(weights.embedding_VH) != len(weights.head_VH):
            raise ValueError(
                f"model ({name}) embeds {len(weights.embedding_VH)} tokens and predicts {len(weights.head_VH)}; a draft needs "
                "one vocabulary."
            )
        seen = _forward(self.outer, self.decoder, vocab_size=len(weights.head_VH))
        self._check_hidden_states(seen)
        teacher = Teacher(
            seen.final_BSH, weights.head_VH, weights.head_bias_V, scale=self.logit_scale, softcap=self.logit_softcap
        )
        got = teacher.logits(seen.final_BSH.flatten(0, 1).to(weights.head_VH.dtype))
        want = seen.logits_BSV.flatten(0, 1).float()
        if not want.isfinite().all():
            return  # weights that are still to come from another rank
        error = (got - want).abs().max()
        # a matmul's rounding, and that of an adapter that is merged here and runs beside the head there
        allowed = max(8 * torch.finfo(weights.head_VH.dtype).eps, 1e-3) * want.abs().max()
        if not error <= allowed:
            raise ValueError(
                f"model ({name}) has other logits than its head makes of its last hidden states (off by {error:.3g}, with "
                f"logits up to {want.abs().max():.3g}), so a draft's teacher would not be the policy. Pass another policy, or "
                "draft=None."
            )

    def _check_hidden_states(self, seen: "_Seen") -> None:
        who = _describe(self.outer)
        if set(seen.num_calls) != {1}:
            raise ValueError(
                f"{who} runs its layers {seen.num_calls} times in one forward; a draft reads the hidden states "
                "of layers that run once. Pass another policy or adapter, or draft=None."
            )
        want = (1, NUM_TOKENS, self.hidden_size)
        for shape in (*seen.shapes, tuple(seen.final_BSH.shape)):
            if shape == want:
                continue
            if len(shape) == 3 and shape[1] > NUM_TOKENS and shape[2] == self.hidden_size:
                raise ValueError(
                    f"{who} adds {shape[1] - NUM_TOKENS} virtual tokens to every row, so its hidden states are not "
                    "those of the tokens; and no engine would draft behind them. Use LoRA or another adapter that sits inside "
                    "the layers, or draft=None."
                )
            raise ValueError(
                f"{who} hands hidden states of shape {shape} from layer to layer for {want[:2]} tokens, and a draft "
                f"reads one vector of the hidden size ({self.hidden_size}) a token. Pass another policy, or draft=None."
            )

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @property
    def layer_config(self) -> PreTrainedConfig:
        """The config of the last layer, where layers differ (Gemma 4); else that of all."""
        config = self.model.config.get_text_config()
        return config.per_layer_config[-1] if config.is_heterogeneous else config

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def recorder(self, tap_ids: tuple[int, ...]) -> TapRecorder:
        """Of some taps and of what the head reads."""
        return TapRecorder(self.decoder.layers, self.decoder, TapSpec(tap_ids, self.num_layers))

    @cached_property
    def logit_function(self) -> LogitFunction:
        return logit_function(self.model, self.decoder, self.head)

    @property
    def logit_scale(self) -> float:
        return self.logit_function.scale

    @property
    def logit_softcap(self) -> float | None:
        return self.logit_function.softcap

    @property
    def final_norm(self) -> NormFunction:
        return norm_function(self.norm, self.hidden_size)

    def last_layer_weights(self) -> dict[str, torch.Tensor]:
        """Weights of the last decoder layer by Llama's names, as a draft is started from.

        Without adapters; projections that the policy fuses (Phi-3, GLM-4) are split, quantized ones read out. A norm's is
        what it multiplies by. Under DeepSpeed ZeRO-3 the caller gathers [`initial_parameters`] around this call.
        """
        layer = self.decoder.layers[-1]
        weights: dict[str, torch.Tensor] = {}
        for name, module in layer.named_modules():
            plain = name.replace(".base_layer", "").replace(".original_module", "")
            if any(part in name for part in ("lora_", "modules_to_save")) or plain.split(".")[0] in LAYER_NORMS:
                continue
            weight = dense_weight(module)
            if weight is not None:
                weights.setdefault(f"{plain}.weight", weight)
        norms = {
            norm: next((x for name in names if _is_norm(x := getattr(layer, name, None))), None)
            for norm, names in LAYER_NORMS.items()
        }
        if norms["input_layernorm"] is not None:  # without one, norms stand behind what they norm (OLMo 2)
            functions = {norm: norm_function(x, self.hidden_size) for norm, x in norms.items() if x is not None}
            weights |= {f"{norm}.weight": function.weight_H for norm, function in functions.items()}
        return self._split(weights)

    def _split(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        config = self.layer_config
        num_heads = getattr(config, "num_attention_heads", 1)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        query, key = num_heads * head_dim, (getattr(config, "num_key_value_heads", None) or num_heads) * head_dim
        width = getattr(config, "intermediate_size", 0)
        for fused, names, sizes in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), [query, key, key]),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), [width, width]),
        ):
            weight = weights.get(f"{fused}.weight")
            if weight is not None and weight.ndim == 2 and len(weight) == sum(sizes):
                del weights[f"{fused}.weight"]
                weights |= {f"{name}.weight": part for name, part in zip(names, weight.split(sizes), strict=True)}
        return weights

    @torch.no_grad()
    def weights(self) -> PolicyWeights:
        """The live embeddings and head as plain detached tensors; shards of FSDP2 are gathered.

        Under DeepSpeed ZeRO-3 the caller gathers [`borrowed_parameters`] around this call.
        """
        embedding_module = self.model.get_input_embeddings()
        is_adapted = hasattr(embedding_module, "base_layer") or hasattr(self.head, "base_layer")
        embedding = whole(effective_weight(embedding_module))
        if embedding_module.weight is self.head.weight and not is_adapted:
            head = embedding  # gathered once
        else:
            head = whole(effective_weight(self.head))
        bias = getattr(self.head, "bias", None)
        return PolicyWeights(
            embedding,
            head,
            None if bias is None else whole(bias.detach()),
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
        )

    def borrowed_parameters(self) -> list[nn.Parameter]:
        """Parameters that [`weights`] reads, for a gathering context."""
        return list(dict.fromkeys([*self.model.get_input_embeddings().parameters(), *self.head.parameters()]))

    def initial_parameters(self) -> list[nn.Parameter]:
        """Parameters that a fresh draft is started from, for a gathering context."""
        copied = [*self.decoder.layers[-1].parameters(), *self.norm.parameters()]
        return list(dict.fromkeys([*self.borrowed_parameters(), *copied]))


@dataclass(frozen=True)
class _Seen:
    """One forward as hooks saw it: calls and output shapes of every layer, the backbone's output, the logits."""

    num_calls: list[int]
    shapes: list[tuple[int, ...]]
    final_BSH: torch.Tensor
    logits_BSV: torch.Tensor


def _forward(outer: nn.Module, decoder: nn.Module, *, vocab_size: int) -> _Seen:
    shapes: list[list[tuple[int, ...]]] = [[] for _ in decoder.layers]
    finals: list[torch.Tensor] = []

    def keep(number: int, tensor: torch.Tensor) -> None:
        if number > len(shapes):
            finals.append(tensor)
        else:
            shapes[number - 1].append(tuple(tensor.shape))

    training = {module: module.training for module in outer.modules()}
    outer.eval()
    ids = torch.arange(NUM_TOKENS, device=next(outer.parameters()).device)[None] % vocab_size
    try:
        with tap_hooks(decoder.layers, decoder, range(1, len(shapes) + 2), keep):
            output = outer(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except (TypeError, ValueError) as error:  # it wants more than text
        raise ValueError(
            f"{_describe(outer)} cannot run on token ids and a mask alone ({error}); a draft needs a policy that reads text and "
            "nothing else. Pass another policy or adapter, or draft=None."
        ) from error
    finally:
        for module, mode in training.items():
            module.training = mode
    if len(finals) != 1:
        raise ValueError(
            f"{_describe(outer)} runs its backbone {len(finals)} times in one forward; a draft reads "
            "hidden states of one. Pass another policy or adapter, or draft=None."
        )
    return _Seen([len(calls) for calls in shapes], [s for calls in shapes for s in calls], finals[0], output.logits)


def _describe(outer: nn.Module) -> str:
    adapters = sorted({str(config.peft_type.value) for config in getattr(outer, "peft_config", {}).values()})
    return f"model ({type(unwrap_peft(outer)).__name__}{' inside PEFT ' * bool(adapters)}{', '.join(adapters)})"


def _has_embeddings(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel) and isinstance(model.get_input_embeddings(), nn.Module)


def _is_norm(module: nn.Module | None) -> bool:
    return module is not None and not isinstance(module, nn.ModuleList)  # LongCat has two of each in a layer


def _is_whole(parameter: nn.Parameter) -> bool:
    return not parameter.is_meta and parameter.numel() > 0 and not hasattr(parameter, "full_tensor")
