"""The config of a draft in the form of the `speculators` library (its 0.9), which vLLM also loads."""

from typing import Any

from hf_codraft.drafts.eagle3 import Eagle3DraftConfig

_OWN_FIELDS = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "target_hidden_size",
)
_PLAIN_FIELDS = (  # which this form says elsewhere, or not at all
    "num_aux_hidden_states",
    "has_own_embeddings",
    "architectures",
    "base_model_name_or_path",
    "num_speculative_tokens",
)
DEFAULT_TOKENS = 3  # the form needs a number where none was recorded


def is_speculators_config(data: dict[str, Any]) -> bool:
    return "speculators_model_type" in data


def from_speculators_config(data: dict[str, Any]) -> dict[str, Any]:
    """The plain config of a speculators one: the layer's config with the draft's fields beside it.

    Raises:
        ValueError: if it is another algorithm than EAGLE-3.
    """
    if data["speculators_model_type"] != "eagle3":
        raise ValueError(f"speculators_model_type is {data['speculators_model_type']!r}; only 'eagle3' is supported.")
    own = {name: data[name] for name in _OWN_FIELDS if data.get(name) is not None}
    own.setdefault("norm_before_residual", True)  # as vLLM reads it
    serving = data.get("speculators_config") or {}
    own["base_model_name_or_path"] = (serving.get("verifier") or {}).get("name_or_path")
    for method in (serving.get("proposal_methods") or [])[:1]:  # vLLM reads the first one
        own["num_speculative_tokens"] = method.get("speculative_tokens")
    return {**data["transformer_layer_config"], **own}


def to_speculators_config(config: Eagle3DraftConfig, plain: dict[str, Any], base_model: str) -> dict[str, Any]:
    """The speculators config of a draft, around its plain one; source: `speculators.models.eagle3.config` 0.9."""
    layer = {name: value for name, value in plain.items() if name not in (*_OWN_FIELDS, *_PLAIN_FIELDS)}
    own = {name: getattr(config, name) for name in _OWN_FIELDS}
    if own["target_hidden_size"] == config.hidden_size:
        own["target_hidden_size"] = None
    num_tokens = config.num_speculative_tokens or DEFAULT_TOKENS
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": base_model, "architectures": []},
        },
        **own,
    }
