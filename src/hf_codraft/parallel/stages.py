"""A Hugging Face causal LM cut into pipeline stages, each with the model's own modules and parameter names.

Legend: B rows, S padded length, H hidden width, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_codraft.policy.anatomy import PolicyAnatomy, unwrap_peft

# Families whose decoder does nothing to the residual stream outside its layers, so that a stage may start from it.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class StagePlan:
    """Which decoder layers each stage holds; made by [`plan_stages`], read by everything that splits or addresses.

    Args:
        layer_ranges (`tuple[tuple[int, int], ...]`): per stage, first layer and one past the last; together they cover
            all layers in order. Stage 0 has the embeddings too, the last stage the final norm and the head.
    """

    layer_ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        start = 0
        for stage, (first, end) in enumerate(self.layer_ranges):
            if first != start or end <= first:
                raise ValueError(
                    f"layer_ranges ({self.layer_ranges}) must be non-empty and follow each other from layer 0; stage "
                    f"{stage} has {first}..{end} where one that starts at {start} was due. Use plan_stages."
                )
            start = end
        if not self.layer_ranges:
            raise ValueError("layer_ranges is empty; a plan needs at least one stage. Use plan_stages.")

    @property
    def num_stages(self) -> int:
        return len(self.layer_ranges)

    @property
    def num_layers(self) -> int:
        return self.layer_ranges[-1][1]

    def layers_of(self, stage: int) -> range:
        return range(*self.layer_ranges[stage])

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds decoder layer `layer` (counted from 0).

        Raises:
            ValueError: if the model has no such layer.
        """
        for stage, (first, end) in enumerate(self.layer_ranges):
            if first <= layer < end:
                return stage
        raise ValueError(f"layer ({layer}) must lie in 0..{self.num_layers - 1}.")

    def owner_of_tap(self, tap_id: int) -> int:
        """The stage where a tap arises.

        Id 0 is the output of the embeddings, id j the residual stream after j layers, `num_layers + 1` the final hidden
        state after the norm.

        Raises:
            ValueError: if the id is outside 0..num_layers + 1.
        """
        if not 0 <= tap_id <= self.num_layers + 1:
            raise ValueError(
                f"tap_id ({tap_id}) must lie in 0..{self.num_layers + 1}: 0 is the output of the embeddings, j the hidden "
                f"state after j of {self.num_layers} layers, {self.num_layers + 1} the final one after the norm."
            )
        if tap_id == self.num_layers + 1:
            return self.num_stages - 1
        return self.stage_of_layer(max(tap_id - 1, 0))


def plan_stages(num_layers: int, num_stages: int, *, last_stage_layers: int | None = None) -> StagePlan:
    """Spreads decoder layers over stages as evenly as they go, earlier stages first.

    Args:
        num_layers (`int`): decoder layers of the model.
        num_stages (`int`): stages, virtual ones included.
        last_stage_layers (`int`, *optional*): layers of the last stage, where it also has a head and a draft to run.

    Raises:
        ValueError: if a stage would be left without a layer.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise ValueError(
            f"num_stages ({num_stages}) must lie in 1..num_layers ({num_layers}): each stage needs a layer. Use fewer stages."
        )
    if last_stage_layers is None:
        sizes = [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]
    elif num_stages == 1 and last_stage_layers != num_layers:
        raise ValueError(
            f"last_stage_layers ({last_stage_layers}) must be num_layers ({num_layers}) with one stage; leave it out."
        )
    elif num_stages > 1 and not 1 <= last_stage_layers <= num_layers - num_stages + 1:
        raise ValueError(
            f"last_stage_layers ({last_stage_layers}) must lie in 1..{num_layers - num_stages + 1}, so that the other "
            f"{num_stages - 1} of {num_stages} stages share at least one of {num_layers} layers each."
        )
    else:
        before, others = num_layers - last_stage_layers, max(num_stages - 1, 1)
        sizes = [before // others + (stage < before % others) for stage in range(num_stages - 1)]
        sizes.append(last_stage_layers)
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return StagePlan(tuple((end - size, end) for end, size in zip(ends, sizes)))


class LayerElsewhere(nn.Module):
    """Stands for a layer, or the final norm, of another stage: hands the hidden state on."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return hidden_states


class ModuleElsewhere(nn.Module):
    """Stands for the embeddings or the head of another stage: an error when called."""

    def __init__(self, name: str, stage: int):
        super().__init__()
        self.name, self.stage = name, stage

    def forward(self, *args, **kwargs):
        raise RuntimeError(f"{self.name} lives on pipeline stage {self.stage}; this stage can't compute it.")


def check_splittable(model: nn.Module, plan: StagePlan) -> PolicyAnatomy:
    """The model's parts, once it is known that stages of it compute what the whole would.

    Raises:
        ValueError: if the family is not known, the plan does not fit, or the loss needs something of every stage.
    """
    anatomy = PolicyAnatomy.of(model)
    config = anatomy.model.config
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model ({type(anatomy.model).__name__}, model_type {config.model_type!r}) can't be split into pipeline stages; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    if plan.num_layers != anatomy.num_layers:
        raise ValueError(
            f"plan covers {plan.num_layers} layers and the model has {anatomy.num_layers}; "
            f"make it with plan_stages({anatomy.num_layers}, ...)."
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "model.config.output_router_logits is set: the router's auxiliary loss needs the router logits of every stage, "
            "which a pipeline does not gather. Set model.config.output_router_logits = False."
        )
    for name, adapter in getattr(model, "peft_config", {}).items():
        if adapter.is_prompt_learning:
            raise ValueError(
                f"adapter {name!r} ({adapter.peft_type.value}) adds virtual tokens to the input, which stages don't see; "
                "use LoRA or another adapter that sits inside the layers."
            )
    return anatomy


def placeholders(anatomy: PolicyAnatomy, plan: StagePlan, stage: int) -> dict[str, nn.Module]:
    """What takes the place of modules that `stage` does not hold, by dotted name in the transformers model."""
    last = plan.num_stages - 1
    absent: dict[str, nn.Module] = {
        f"model.layers.{layer}": LayerElsewhere()
        for layer in range(plan.num_layers)
        if layer not in plan.layers_of(stage)
    }
    if stage != 0:
        absent["model.embed_tokens"] = ModuleElsewhere("embed_tokens", 0)
    if stage != last:
        absent["model.norm"] = LayerElsewhere()
        absent["lm_head"] = ModuleElsewhere("lm_head", last)
    return absent


class PolicyStage(nn.Module):
    """One stage of a causal LM; `forward` takes token ids on the first stage and hidden states on the others.

    Made by [`build_stage`] or [`load_stage`]. Adapters may be put around `stage.model` afterwards:
    `stage.model = get_peft_model(stage.model, config)`.

    Args:
        model (`nn.Module`): transformers model, or a PEFT model around it, with placeholders where other stages' modules
            were. Names of parameters are those of the whole model.
        plan ([`StagePlan`]): the cut.
        stage (`int`): global index, virtual stages counted.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, stage: int):
        super().__init__()
        self.model = model
        self.plan = plan
        self.stage = stage
        self.training = model.training

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.plan.num_stages - 1

    @property
    def anatomy(self) -> PolicyAnatomy:
        """Decoder, layers and head, out of PEFT; the placeholders are among them."""
        return PolicyAnatomy.of(self.model)

    @property
    def tied_parameter(self) -> nn.Parameter | None:
        """This stage's copy of a weight that embeddings and head share across stages; `None` where there is no copy."""
        anatomy = self.anatomy
        if self.is_first == self.is_last or not anatomy.model.config.tie_word_embeddings:
            return None
        module: Any = anatomy.decoder.embed_tokens if self.is_first else anatomy.head
        while hasattr(module, "base_layer") or hasattr(module, "original_module"):  # PEFT wraps the tied module itself
            module = module.base_layer if hasattr(module, "base_layer") else module.original_module
        return module.weight

    def forward(
        self,
        hidden_BSH: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream after this stage's layers; on the last stage the final hidden state after the norm.

        Args:
            hidden_BSH (`torch.Tensor` of shape `(rows, length, hidden)`): the previous stage's output; on the first stage
                token ids of shape `(rows, length)`.
            attention_mask (`torch.Tensor` of shape `(rows, length)`, *optional*): 1 for tokens, 0 for padding.
            position_ids (`torch.Tensor` of shape `(rows, length)`, *optional*): counted from 0 where not given.
        """
        source = {"input_ids" if self.is_first else "inputs_embeds": hidden_BSH}
        output = self.anatomy.decoder(
            **source, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        return output.last_hidden_state

    def logits(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """The head's output of shape `(rows, length, vocabulary)`; on the last stage only."""
        return self.anatomy.head(hidden_BSH)


def build_stage(model: nn.Module, plan: StagePlan, stage: int) -> PolicyStage:
    """A copy of one stage out of a whole model in memory; modules of other stages are not copied.

    Args:
        model (`PreTrainedModel` or `PeftModel`): the whole model; it stays as it is.
        plan ([`StagePlan`]): the cut.
        stage (`int`): which stage.

    Raises:
        ValueError: if the model can't be split, or not so.
    """
    if not 0 <= stage < plan.num_stages:
        raise ValueError(f"stage ({stage}) must lie in 0..{plan.num_stages - 1}.")
    anatomy = check_splittable(model, plan)
    base = unwrap_peft(model)
    # deepcopy takes what it finds in the memo for the copy, so the placeholders stop it at the border of the stage.
    memo = {id(base.get_submodule(name)): module for name, module in placeholders(anatomy, plan, stage).items()}
    return PolicyStage(copy.deepcopy(model, memo), plan, stage)
