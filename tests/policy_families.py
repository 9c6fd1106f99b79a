"""Every causal LM of the installed transformers, shrunk, and what becomes of it as a policy of a fresh draft."""

import dataclasses
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.hub.resolve import resolve_draft
from hf_codraft.losses import Teacher
from hf_codraft.policy.anatomy import LAYER_NORMS, PolicyAnatomy
from hf_codraft.policy.packing import pack_rows
from hf_codraft.policy.probe import norm_function

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB, HIDDEN, HEADS, HEAD_DIM = 96, 32, 4, 8
# Fields that mean the same in every family that has them.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "d_model": HIDDEN, "n_embd": HIDDEN, "intermediate_size": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 1, "decoder_layers": 2,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "decoder_attention_heads": HEADS,
    "encoder_attention_heads": HEADS, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32, "num_key_value_heads": 2,
    "head_dim": HEAD_DIM, "max_position_embeddings": 128, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "pad_token_id": 0,
    "logits_scaling": 4.0, "logit_scale": 0.5, "lm_head_multiplier": 0.25, "output_multiplier": 0.5,
    "final_logit_softcapping": 5.0, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What a family needs beside them.
OVERRIDES: dict[str, dict] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"], "head_dim": 128, "num_attention_heads": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_chunk_size": 8,
        "embedding_multiplier": 2.0,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
        "layer_types": ["mamba", "attention"],
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 8, "n_groups": 2,
        "layers_block_type": ["mamba", "attention"],
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"layer_types": ["hybrid", "hybrid"], "mamba_dt_rank": 4, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["hybrid", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# Not to be built here, with the reason.
UNBUILT = {
    "gemma3n": "a vision tower of timm, which is not installed",
    "dbrx": "its attention config has no rope_theta in this transformers",
    "gemma4_assistant": "is itself a draft, of Gemma 4: its config has no vocabulary",
    "gemma4_unified_assistant": "is itself a draft, of Gemma 4: its config has no vocabulary",
    "musicgen": "its class wants its decoder's config, the mapping names that of the whole text-to-audio model",
    "musicgen_melody": "its class wants its decoder's config, the mapping names that of the whole text-to-audio model",
}
MAX_PARAMETERS = 8_000_000  # of a model that is given memory; above it must be refused by its structure alone


def tiny_config(family: str) -> PreTrainedConfig:
    return _shrink(CONFIG_MAPPING[family], OVERRIDES.get(family, {}))


def _shrink(kind: type[PreTrainedConfig], overrides: dict) -> PreTrainedConfig:
    names = {field.name for field in dataclasses.fields(kind)}
    sizes = {name: size for name, size in SIZES.items() if name in names}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        sizes["num_key_value_heads"] = HEADS  # latent attention has keys for all heads
    parts = {
        name: _shrink(part, OVERRIDES.get(part.model_type, {}))
        for name, part in kind.sub_configs.items()
        if part is not AutoConfig
    }
    return kind(**sizes | parts | overrides)


def build(family: str) -> PreTrainedModel:
    """The shrunk model, every vector (norms, biases) off its neutral start; on the meta device where it stayed large."""
    config = tiny_config(family)
    if config.sub_configs or family in ("roc_bert", "xlm"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if sum(parameter.numel() for parameter in model.parameters()) > MAX_PARAMETERS:
            return model
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(2.0)  # logits that are far from alike
    return model


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a family; made by [`try_family`], read by tests and the table in the documentation.

    Args:
        family, model (`str`): transformers' name of the family and class of the model.
        refusal (`str`): message of the refusal; empty where it trains.
        warning (`str`): what its fresh draft was started without.
    """

    family: str
    model: str
    refusal: str = ""
    warning: str = ""


def try_family(family: str) -> Outcome:
    """Trains a fresh draft of a family for a step, comparing all that it sees with transformers' own forward.

    Raises:
        AssertionError: where a draft would have seen something else.
    """
    model = build(family)
    name = type(model).__name__
    try:
        anatomy = PolicyAnatomy.of(model)
        assert not next(model.parameters()).is_meta, f"{family} is too large to be tried; shrink it in OVERRIDES"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = SimpleNamespace(draft_vocab_size=None, draft_tap_layers=[0, 1, 2], draft_warmup_rollouts=0)
            draft = resolve_draft("eagle3", anatomy, options)
    except ValueError as error:
        assert name in str(error), f"{family}: the refusal does not name the model: {error}"
        return Outcome(family, name, refusal=str(error))
    said = [str(warning.message) for warning in caught if "fresh draft" in str(warning.message)]
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    batch = compare_with_transformers(model, anatomy, draft, {"input_ids": ids, "attention_mask": mask}, mask)
    compare_norms(anatomy, draft, "post_attention_layernorm" in " ".join(said))
    learner = DraftLearner(draft, num_passes=2)
    before = draft.fc.weight.clone()
    learner.accumulate(batch, anatomy.weights())
    step = learner.step()
    assert not step.is_skipped and torch.isfinite(torch.tensor(step.loss)), family
    assert not torch.equal(draft.fc.weight, before), family
    assert all(parameter.grad is None for parameter in model.parameters()), family
    return Outcome(family, name, warning=said[0] if said else "")


@torch.no_grad()
def compare_with_transformers(model, anatomy: PolicyAnatomy, draft, inputs: dict, mask: torch.Tensor):
    """The batch of a recorded forward, once taps and teacher are what transformers says."""
    recorder = anatomy.recorder(draft.tap_ids)
    with recorder.recording():
        model(**inputs, use_cache=False)
    taps = recorder.take()
    output = model(**inputs, use_cache=False, output_hidden_states=True)
    num_layers = anatomy.num_layers
    for tap_id, tap in zip(draft.tap_ids, taps.hidden_states, strict=True):
        if tap_id < num_layers:  # transformers hands the last one out after the norm
            torch.testing.assert_close(tap, output.hidden_states[tap_id], rtol=1e-5, atol=1e-5)
    if num_layers in draft.tap_ids:
        last = anatomy.norm(taps.hidden_states[draft.tap_ids.index(num_layers)])
        torch.testing.assert_close(last, taps.final_BSH, rtol=1e-5, atol=1e-5)
    weights = anatomy.weights()
    teacher = Teacher(
        taps.final_BSH, weights.head_VH, weights.head_bias_V, scale=weights.logit_scale, softcap=weights.logit_softcap
    )
    # Two orders of one product, and a factor or cap read off a forward in fp32.
    logits = teacher.logits(taps.final_BSH.flatten(0, 1))
    torch.testing.assert_close(logits, output.logits.flatten(0, 1).float(), rtol=1e-4, atol=1e-4)
    assert output.logits.std() > 1e-3  # logits that are all alike would prove nothing
    return pack_rows(inputs["input_ids"], mask, mask, taps)


@torch.no_grad()
def compare_norms(anatomy: PolicyAnatomy, draft, is_mlp_norm_own: bool) -> None:
    """A draft's norms are the policy's functions, and the one in front of its MLP is that of the policy's MLP."""
    x = torch.randn(3, anatomy.hidden_size) * 0.5
    assert draft.config.rms_norm_eps > 0
    if anatomy.final_norm.is_rms:
        torch.testing.assert_close(draft.norm(x), anatomy.norm(x), rtol=1e-4, atol=1e-5)
    if is_mlp_norm_own:
        return
    layer, seen = anatomy.decoder.layers[-1], {}
    norms = [
        n for n in LAYER_NORMS["post_attention_layernorm"] if isinstance(getattr(layer, n, None), torch.nn.Module)
    ]
    mlps = [n for n in ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn", "mlp_block") if hasattr(layer, n)]
    hooks = [getattr(layer, n).register_forward_hook(lambda m, a, out, n=n: seen.update({n: out})) for n in norms]
    hooks += [getattr(layer, n).register_forward_pre_hook(lambda m, a, n=n: seen.update({n: a[0]})) for n in mlps]
    anatomy.model(input_ids=torch.arange(6)[None])
    for hook in hooks:
        hook.remove()
    read = [seen[n].flatten() for n in mlps if n in seen]
    feeding = [n for n in norms if any(torch.equal(seen[n].flatten(), x) for x in read)]
    assert len(feeding) == 1, (type(anatomy.model).__name__, norms, mlps, feeding)
    function = norm_function(getattr(layer, feeding[0]), anatomy.hidden_size)
    torch.testing.assert_close(draft.midlayer.post_attention_layernorm.weight, function.weight_H, rtol=1e-5, atol=1e-6)
    if function.is_rms:
        want = getattr(layer, feeding[0])(x)
        torch.testing.assert_close(draft.midlayer.post_attention_layernorm(x), want, rtol=1e-4, atol=1e-5)


def try_all() -> list[Outcome]:
    return [try_family(family) for family in FAMILIES if family not in UNBUILT]


def drafts_in_engine(model: str) -> str:
    """Whether vLLM's class of that name serves a policy with an EAGLE-3 draft."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    registered = ModelRegistry.models.get(model)
    try:
        kind = None if registered is None else registered.load_model_cls()
    except ImportError as error:
        return f"not known here (needs {error.name})"
    if kind is None or kind.__name__.startswith("Transformers"):
        return "no class of its own"
    return "yes" if supports_eagle3(kind) else "no"


def table(outcomes: list[Outcome], engine: Callable[[str], str]) -> str:
    """The section of the documentation."""
    lines = ["| family | class | vLLM serves it with a draft | a fresh draft starts without |", "|---|---|---|---|"]
    for outcome in outcomes:
        if not outcome.refusal:
            missing = outcome.warning.partition("for [")[2].partition("] (experts")[0].replace("midlayer.", "")
            missing = missing.replace(".weight", "").replace('"', "").replace("'", "")
            lines.append(f"| {outcome.family} | {outcome.model} | {engine(outcome.model)} | {missing or '-'} |")
    refused: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.refusal:
            reason = re.sub(r"model \(\w+\) ", "", outcome.refusal).partition("(missing")[0].partition(". Pass")[0]
            refused.setdefault(reason.strip(), []).append(outcome.family)
    lines += ["", "Refused when the trainer is made:", "", "| the model ... | families |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(families)} |" for reason, families in refused.items()]
    lines += ["", "Not tried:", "", "| family | reason |", "|---|---|"]
    lines += [f"| {family} | {reason} |" for family, reason in UNBUILT.items()]
    return "\n".join(lines) + "\n"
