"""Where the parts of a Hugging Face causal LM are, whatever wraps it.

Legend: V vocabulary, H hidden width.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_codraft.taps.packed import PolicyWeights


def unwrap_peft(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT model (or the model itself); adapters stay in place."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


@torch.no_grad()
def effective_weight(module: nn.Module) -> torch.Tensor:
    """The weight that `module` multiplies by, with active LoRA and DoRA deltas added.

    PEFT's wrappers of `modules_to_save` and trainable tokens answer `weight` with the active one themselves.
    """
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


@dataclass(frozen=True)
class PolicyAnatomy:
    """The parts of a causal LM that co-training touches; made by [`PolicyAnatomy.of`], read by trainer and warm start.

    Args:
        model (`PreTrainedModel`): the transformers model, out of PEFT.
        decoder (`nn.Module`): its backbone, with `layers`, `norm` and `embed_tokens`.
    """

    model: PreTrainedModel
    decoder: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> "PolicyAnatomy":
        """Finds the parts.

        Raises:
            ValueError: if the model is not a decoder-only LM with `layers`, `norm`, `embed_tokens` and an output head.
        """
        model = unwrap_peft(model)
        decoder = getattr(model, "model", None)
        missing = [name for name in ("layers", "norm", "embed_tokens") if not hasattr(decoder, name)]
        if decoder is None or missing or model.get_output_embeddings() is None:
            raise ValueError(
                f"model ({type(model).__name__}) is not a decoder-only language model with model.layers, model.norm, "
                f"model.embed_tokens and an output head (missing: {missing or ['output head']}); co-training needs them. "
                "Pass a causal LM of the Llama, Qwen, Mistral, Gemma or a like family."
            )
        return cls(model, decoder)

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def logit_scale(self) -> float:
        config = self.model.config.get_text_config()
        if getattr(config, "logits_scaling", None):  # Granite divides
            return 1.0 / config.logits_scaling
        return getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies

    @property
    def logit_softcap(self) -> float | None:
        return getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)

    def last_layer_weights(self) -> dict[str, torch.Tensor]:
        """Weights of the last decoder layer by plain (adapter-free) name, as a draft is started from.

        Projections that the policy fuses (Phi-3, GLM-4) are split. Under DeepSpeed ZeRO-3 the caller gathers
        [`initial_parameters`] around this call.
        """
        weights = {
            name.replace(".base_layer", ""): parameter.detach()
            for name, parameter in self.decoder.layers[-1].named_parameters()
            if "lora_" not in name
        }
        config = self.model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        for fused, names, sizes in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), [query, key, key]),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), [config.intermediate_size] * 2),
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
        embedding = _whole(effective_weight(embedding_module))
        if embedding_module.weight is self.head.weight and not is_adapted:
            head = embedding  # gathered once
        else:
            head = _whole(effective_weight(self.head))
        bias = getattr(self.head, "bias", None)
        return PolicyWeights(
            embedding,
            head,
            None if bias is None else _whole(bias.detach()),
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
        )

    def borrowed_parameters(self) -> list[nn.Parameter]:
        """Parameters that [`weights`] reads, for a gathering context."""
        return list(dict.fromkeys([*self.model.get_input_embeddings().parameters(), *self.head.parameters()]))

    def initial_parameters(self) -> list[nn.Parameter]:
        """Parameters that a fresh draft is started from, for a gathering context."""
        copied = [*self.decoder.layers[-1].parameters(), *self.decoder.norm.parameters()]
        return list(dict.fromkeys([*self.borrowed_parameters(), *copied]))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
