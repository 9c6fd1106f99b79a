"""Every kind of adapter of the installed PEFT on a tiny policy, and what becomes of it under a fresh draft."""

import dataclasses
import warnings
from types import SimpleNamespace

import tiny
import torch
from peft import PeftModel, PeftType, TaskType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from policy_families import compare_with_transformers

from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.hub.resolve import resolve_draft
from hf_codraft.policy.anatomy import PolicyAnatomy

PLACES = {"attention": ["q_proj", "v_proj"], "head": ["lm_head"]}
# What a kind needs beside its target modules.
OVERRIDES: dict[str, dict] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "C3A": {"block_size": 16},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "TRAINABLE_TOKENS": {"token_indices": [3, 7]},
    "VBLORA": {"vector_length": 32},
}
WITHOUT_TARGETS = ("ADAPTION_PROMPT", "LN_TUNING", "SHADOW", "TRAINABLE_TOKENS")
# Not to be built here, with the reason.
UNBUILT = {
    "ADAMSS": "needs scikit-learn, which is not installed",
    "XLORA": "its own forward fails in this PEFT, without a draft too (KeyError in disable_adapter_layers)",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a kind at a place; made by [`try_kind`], read by tests and the table in the documentation."""

    kind: str
    place: str
    refusal: str = ""


def has_targets(kind: PeftType) -> bool:
    names = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
    return "target_modules" in names and kind.value not in WITHOUT_TARGETS


def build(kind: PeftType, place: str) -> PeftModel:
    """A policy with an adapter that is off its neutral start."""
    policy = tiny.policy(num_hidden_layers=3, tie=False, head_dim=16, num_key_value_heads=4)
    fields = {"task_type": TaskType.CAUSAL_LM} | OVERRIDES.get(kind.value, {})
    if has_targets(kind):
        fields["target_modules"] = PLACES[place]
    return _moved(get_peft_model(policy, PEFT_TYPE_TO_CONFIG_MAPPING[kind](**fields)))


def _moved(model: PeftModel) -> PeftModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def try_kind(kind: PeftType, place: str) -> Outcome:
    """Trains a fresh draft of an adapted policy for a step, comparing what it sees with an independent forward.

    Raises:
        AssertionError: where a draft would have seen something else.
    """
    model = build(kind, place)
    try:
        anatomy = PolicyAnatomy.of(model)
        options = SimpleNamespace(draft_vocab_size=None, draft_tap_layers=[0, 1, 3], draft_warmup_rollouts=0)
        draft = resolve_draft("eagle3", anatomy, options)
    except ValueError as error:
        assert "PEFT" in str(error) or "an adapter of the kind" in str(error), (kind, str(error))
        return Outcome(kind.value, place, str(error))
    ids = torch.randint(3, tiny.VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    batch = compare_with_transformers(model, anatomy, draft, {"input_ids": ids, "attention_mask": mask}, mask)
    learner = DraftLearner(draft, num_passes=2)
    learner.accumulate(batch, anatomy.weights())
    assert not learner.step().is_skipped
    return Outcome(kind.value, place)


def try_all() -> list[Outcome]:
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, of adapters on a head
        for kind in PeftType:
            if kind.value not in UNBUILT:
                outcomes += [try_kind(kind, place) for place in PLACES if place == "attention" or has_targets(kind)]
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """The section of the documentation."""
    kinds: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        kinds.setdefault(outcome.kind, {})[outcome.place] = "refused" if outcome.refusal else "trains"
    lines = ["| kind | inside the layers | on the head |", "|---|---|---|"]
    lines += [f"| {kind} | {places['attention']} | {places.get('head', '-')} |" for kind, places in kinds.items()]
    lines += [f"| {kind} | not tried: {reason} | |" for kind, reason in UNBUILT.items()]
    return "\n".join(lines) + "\n"
