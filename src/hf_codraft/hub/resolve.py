"""From what a user passes as `draft` to a draft that fits the policy."""

import warnings
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedConfig

from hf_codraft.drafts.eagle3 import Eagle3Draft, Eagle3DraftConfig, default_tap_ids
from hf_codraft.hub.checkpoint import check_finite, differs_from_base, load_draft
from hf_codraft.policy.anatomy import PolicyAnatomy
from hf_codraft.taps.recorder import TapSpec

FAMILIES = ("eagle3",)
DEFAULT_POSITIONS = 32768  # of a policy that knows no limit


class DraftOptions(Protocol):
    """The settings of a fresh draft, as `CoDraftGRPOConfig` has them."""

    draft_vocab_size: int | None
    draft_tap_layers: list[int] | None
    draft_warmup_rollouts: int
    draft_base_mismatch: str


def resolve_draft(source: "str | Path | Eagle3Draft", anatomy: PolicyAnatomy, options: DraftOptions) -> Eagle3Draft:
    """Makes, loads or takes over a draft and checks it against the policy.

    Raises:
        ValueError: if it does not fit the policy, the policy is not one to train a draft on, or a fresh reduced draft has no
            rollouts to choose its vocabulary from.
    """
    anatomy.check()
    if isinstance(source, Eagle3Draft):
        draft = source
    elif source in FAMILIES:
        return fresh_eagle3(anatomy, options)
    elif isinstance(source, (str, Path)):
        draft = load_draft(source)
    else:
        raise ValueError(f"draft must be one of {FAMILIES}, a folder, a Hub id or an Eagle3Draft, got {type(source)}.")
    for name in ("draft_vocab_size", "draft_tap_layers"):
        if getattr(options, name) is not None:
            warnings.warn(f"{name} has no effect on a draft that exists; its own is used.", stacklevel=4)
    check_fit(draft, anatomy)
    _check_state(draft, anatomy, source, options)
    return draft


def _check_state(
    draft: Eagle3Draft, anatomy: PolicyAnatomy, source: "str | Path | Eagle3Draft", options: DraftOptions
):
    name = type(source).__name__ if isinstance(source, Eagle3Draft) else str(source)
    check_finite(draft, name)
    if draft.is_vocab_open and options.draft_warmup_rollouts == 0:
        raise ValueError(
            f"the ids of the draft's {draft.config.draft_vocab_size} of {draft.config.vocab_size} tokens were never chosen: set "
            "draft_warmup_rollouts (a few hundred), so that the policy's own rollouts choose them, or pass a draft that was "
            "trained."
        )
    policy = anatomy.model.config._name_or_path
    if not differs_from_base(draft.config, policy, None if isinstance(source, Eagle3Draft) else source):
        return
    message = (
        f"the draft was trained with {draft.config.base_model_name_or_path!r}, and the policy is {policy!r}: fewer tokens will "
        "be accepted until it has learned the new one."
    )
    if options.draft_base_mismatch == "error":
        raise ValueError(f"{message} Pass a draft of this policy, or draft_base_mismatch='warn'.")
    warnings.warn(message, stacklevel=5)


def fresh_eagle3(anatomy: PolicyAnatomy, options: DraftOptions) -> Eagle3Draft:
    """An EAGLE-3 draft shaped like the policy's layers, started from its last one."""
    config = anatomy.layer_config
    vocab_size = anatomy.model.get_input_embeddings().weight.shape[0]
    tap_ids = tuple(options.draft_tap_layers or default_tap_ids(anatomy.num_layers))
    _check_tap_ids(tap_ids, anatomy.num_layers)
    if options.draft_vocab_size is not None and not 1 <= options.draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size ({options.draft_vocab_size}) must be in 1..{vocab_size}, the policy's vocabulary."
        )
    if options.draft_vocab_size not in (None, vocab_size) and options.draft_warmup_rollouts == 0:
        raise ValueError(
            f"draft_vocab_size ({options.draft_vocab_size}) is below the policy's vocabulary ({vocab_size}), and the ids are "
            "chosen from the policy's own rollouts: set draft_warmup_rollouts (a few hundred), pass a draft that exists, or "
            "leave draft_vocab_size out."
        )
    num_heads = config.num_attention_heads
    norm = anatomy.final_norm
    draft = Eagle3Draft(
        Eagle3DraftConfig(
            vocab_size=vocab_size,
            draft_vocab_size=options.draft_vocab_size or vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=_mlp_width(config),
            num_hidden_layers=1,
            num_attention_heads=num_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            max_position_embeddings=_max_positions(config),
            rms_norm_eps=norm.eps,
            rope_parameters=_rope_parameters(config),
            eagle_aux_hidden_state_layer_ids=list(tap_ids),
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    ).float()
    left = draft.init_from_policy(anatomy.last_layer_weights(), norm.weight_H)
    if not norm.is_rms:
        left.append(
            f"norm (the policy's {type(anatomy.norm).__name__} is more than an RMSNorm: its factor alone is taken)"
        )
    if left:
        warnings.warn(
            f"the fresh draft starts from the policy's last layer, but {type(anatomy.model).__name__} has nothing of the right "
            f"shape for {left} (experts, other attention, otherwise named weights): they start at their initial values, and the "
            "draft needs a longer warm start.",
            stacklevel=5,
        )
    if not draft.has_reduced_vocab:
        draft.set_vocabulary(draft.kept_ids, anatomy.weights())
    return draft


def _check_tap_ids(tap_ids: tuple[int, ...], num_layers: int) -> None:
    TapSpec(tap_ids, num_layers)
    if list(tap_ids) != sorted(set(tap_ids)):
        raise ValueError(
            f"draft_tap_layers ({list(tap_ids)}) must ascend, each id once: vLLM hands the hidden states over in the order of "
            f"the layers. Pass {sorted(set(tap_ids))}."
        )


def _mlp_width(config: PreTrainedConfig) -> int:
    width = getattr(config, "intermediate_size", None)
    return width if isinstance(width, int) else 4 * config.hidden_size  # experts alone, or a width for every layer


def _max_positions(config: PreTrainedConfig) -> int:
    return getattr(config, "max_position_embeddings", None) or DEFAULT_POSITIONS


# Types that Llama's draft and the engine read alike, with the names that belong to them.
_ROPE_NAMES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "attention_factor", "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip


def _rope_parameters(config: PreTrainedConfig) -> dict:
    """The policy's RoPE, as far as a draft of Llama's kind has it too; its angles alone where its type is another."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention") or rope)  # models that give each kind of layer its own
    kind = rope.get("rope_type", "default")
    kept = {"rope_theta": rope.get("rope_theta") or Eagle3DraftConfig.default_theta}
    if kind in _ROPE_NAMES:
        names = (*_ROPE_NAMES[kind], "partial_rotary_factor")
        return {"rope_type": kind, **kept, **{name: rope[name] for name in names if rope.get(name) is not None}}
    return {"rope_type": "default", **kept}


def check_fit(draft: Eagle3Draft, anatomy: PolicyAnatomy) -> None:
    """Completes a draft's tap ids and positions from the policy.

    Raises:
        ValueError: where hidden size, vocabulary or tap ids do not fit, naming both numbers.
    """
    config, policy = draft.config, anatomy.layer_config
    vocab_size = anatomy.model.get_input_embeddings().weight.shape[0]
    if config.target_hidden_size != policy.hidden_size:
        raise ValueError(
            f"the draft reads hidden states of size {config.target_hidden_size}, but the policy's are {policy.hidden_size}: "
            "it was trained for another model."
        )
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"the draft is for a vocabulary of {config.vocab_size}, but the policy's is {vocab_size}: it was trained for "
            "another tokenizer."
        )
    draft.check_vocabulary()
    if config.eagle_aux_hidden_state_layer_ids is None:
        config.eagle_aux_hidden_state_layer_ids = list(default_tap_ids(anatomy.num_layers))
    if len(config.eagle_aux_hidden_state_layer_ids) != config.num_aux_hidden_states:
        raise ValueError(
            f"the draft's fc reads {config.num_aux_hidden_states} hidden states, but it names the layers "
            f"{config.eagle_aux_hidden_state_layer_ids}."
        )
    _check_tap_ids(tuple(config.eagle_aux_hidden_state_layer_ids), anatomy.num_layers)
    longest = getattr(policy, "max_position_embeddings", None) or 0
    if config.max_position_embeddings < longest:
        warnings.warn(
            f"the draft's max_position_embeddings is raised from {config.max_position_embeddings} to the policy's "
            f"{longest}; below it, positions would be clamped and nothing accepted past it.",
            stacklevel=5,
        )
        config.max_position_embeddings = longest
    theta, policys = config.rope_parameters["rope_theta"], _rope_parameters(policy)["rope_theta"]
    if theta != policys:
        warnings.warn(
            f"the draft's rope_theta is {theta:g} and the policy's {policys:g}. The draft is trained at its own, at which the "
            "engine serves it too (10000 where its config names none); if it was made for the policy's, write rope_theta into "
            "its config.json.",
            stacklevel=5,
        )
