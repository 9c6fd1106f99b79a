"""What is learnt of a policy's modules by feeding them, against transformers' and torch's own."""

import warnings
from types import SimpleNamespace

import policy_families
import pytest
import tiny
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from hf_codraft.drafts.eagle3 import Eagle3DraftConfig
from hf_codraft.hub.resolve import fresh_eagle3
from hf_codraft.policy.anatomy import PolicyAnatomy
from hf_codraft.policy.probe import dense_weight, logit_function, norm_function

WIDTH = 16
OPTIONS = SimpleNamespace(draft_vocab_size=None, draft_tap_layers=[0, 1, 2], draft_warmup_rollouts=0)


def moved(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)) * 0.3)
    return norm


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3e-5])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm], ids=["w", "1 + w"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_is_known_by_its_function(kind, eps, dtype):
    norm = moved(kind(WIDTH, eps)).to(dtype)
    function = norm_function(norm, WIDTH)
    assert function.is_rms and function.eps == eps
    x = torch.randn(5, WIDTH) * 0.01
    copy = LlamaRMSNorm(WIDTH, function.eps)
    copy.weight = nn.Parameter(function.weight_H)
    torch.testing.assert_close(copy(x), norm.float()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("norm", "weight"),
    [
        (moved(nn.LayerNorm(WIDTH)), lambda norm: norm.weight),
        (moved(nn.LayerNorm(WIDTH, bias=False)), lambda norm: norm.weight),
        (moved(NemotronLayerNorm1P(WIDTH)), lambda norm: norm.weight + 1),
        (OlmoLayerNorm(WIDTH), lambda norm: torch.ones(WIDTH)),
    ],
    ids=["LayerNorm", "without bias", "1 + w", "without weight"],
)
def test_a_norm_that_is_more_than_rms_gives_its_factor_and_says_so(norm, weight):
    function = norm_function(norm, WIDTH)
    assert not function.is_rms and function.eps == 1e-5
    torch.testing.assert_close(function.weight_H, weight(norm).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantized_projection_is_read_as_what_it_multiplies_by(bias):
    torch.manual_seed(0)
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(24, 10, bias=bias)), {nn.Linear})
    weight = dense_weight(model[0])
    # its inputs are rounded to 7 bits as well; those of 0 and 1 are exact up to the scale
    torch.testing.assert_close(weight, model[0].weight().dequantize(), rtol=1e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*deprecat")
def test_a_draft_of_a_policy_with_quantized_layers_starts_from_their_weights():
    model = tiny.policy(num_hidden_layers=2)
    plain = fresh_eagle3(PolicyAnatomy.of(model), OPTIONS).state_dict()
    model.model.layers = torch.ao.quantization.quantize_dynamic(model.model.layers, {nn.Linear})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantized = fresh_eagle3(PolicyAnatomy.of(model), OPTIONS).state_dict()
    assert not [warning for warning in caught if "fresh draft" in str(warning.message)]
    for name, tensor in plain.items():
        error = (tensor - quantized[name]).abs().max()
        assert error <= 0.02 * tensor.abs().max(), name  # 8 bits


@pytest.mark.parametrize("family", ["phi3", "glm", "glm4"])
def test_fused_projections_are_split_as_the_policy_splits_them(family):
    model = policy_families.build(family)
    draft = fresh_eagle3(PolicyAnatomy.of(model), OPTIONS)
    layer, x = model.model.layers[-1], torch.randn(4, policy_families.HIDDEN)
    torch.testing.assert_close(draft.midlayer.mlp(x), layer.mlp(x), rtol=1e-5, atol=1e-6)
    if family == "phi3":
        fused = layer.self_attn.qkv_proj(x)
        parts = [getattr(draft.midlayer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
        got = torch.cat([part(torch.cat([torch.zeros_like(x), x], -1)) for part in parts], -1)
        torch.testing.assert_close(got, fused, rtol=1e-5, atol=1e-6)


# Logits


class Shifted(LlamaForCausalLM):
    """Logits that no factor and cap make of the head's."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output


class Squared(LlamaForCausalLM):
    """A head whose input is not the backbone's output."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        output.logits = self.lm_head(output.last_hidden_state**2)
        return output


@pytest.mark.parametrize("kind", [Shifted, Squared])
def test_logits_that_a_teacher_cannot_follow_are_refused_by_name(kind):
    config = tiny.policy(num_hidden_layers=2).config
    with pytest.raises(ValueError, match=rf"model \({kind.__name__}\) makes its logits .* by more than a head"):
        PolicyAnatomy.of(kind(config)).check()


@pytest.mark.parametrize(
    ("family", "scale", "cap"),
    [
        ("granite", 0.25, None),
        ("cohere", 0.5, None),
        ("hyperclovax", 4.0, None),
        ("gemma2", 1.0, 5.0),
        ("llama", 1, None),
    ],
)
def test_scale_and_cap_are_read_without_any_weight(family, scale, cap):
    with torch.device("meta"):
        model = policy_families.AutoModelForCausalLM.from_config(policy_families.tiny_config(family))
    head = nn.Linear(policy_families.HIDDEN, policy_families.VOCAB, bias=False)
    model.lm_head = head  # only its device is looked at
    function = logit_function(model, model.model, head)
    assert function.scale == pytest.approx(scale, rel=1e-6) and function.softcap == cap
    assert "forward" not in vars(model.model) and "forward" not in vars(head)


def test_a_check_leaves_modes_and_gradients_alone():
    model = tiny.policy(num_hidden_layers=2).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    PolicyAnatomy.of(model).check()
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is None for parameter in model.parameters())


COMPILED = {
    "wrapped": torch.compile,
    "in place": lambda model: model.compile() or model,
    "one layer": lambda model: model.model.layers[0].compile() or model,
}


@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_a_compiled_policy_is_refused(compiled):
    with pytest.raises(ValueError, match=r"is compiled \(torch.compile\).* Pass the model before it is compiled"):
        PolicyAnatomy.of(compiled(tiny.policy(num_hidden_layers=2)))


# Partial RoPE

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0],
}  # fmt: skip
PARTIAL = {
    "default": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "longrope": LONGROPE,
}


@pytest.mark.parametrize("rope", PARTIAL.values(), ids=PARTIAL)
def test_partial_rope_of_a_fresh_draft_turns_what_the_policy_turns(rope):
    config = policy_families.tiny_config("phi3")
    config = type(config)(**config.to_dict() | {"rope_parameters": rope, "original_max_position_embeddings": 32})
    model = policy_families.AutoModelForCausalLM.from_config(config)
    draft = fresh_eagle3(PolicyAnatomy.of(model), OPTIONS)
    attention, head_dim = draft.midlayer.self_attn, policy_families.HEAD_DIM
    for length in (20, 90):  # within and past the original positions
        x, positions = torch.zeros(1, 1, 1), torch.arange(length)[None]
        cos, sin = draft.rotary_emb(x, positions)
        theirs = model.model.rotary_emb(x, positions)
        assert cos.shape[-1] == int(head_dim * rope["partial_rotary_factor"])
        assert torch.equal(cos, theirs[0]) and torch.equal(sin, theirs[1])
        q = torch.randn(length, 4, head_dim)
        want = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], *theirs)[0][0].transpose(0, 1)
        torch.testing.assert_close(attention._turn(q, (cos[0], sin[0])), want)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            LONGROPE | {"short_factor": [1.0] * 4},
            r"rope_parameters\['short_factor'\] must hold half .* \(6 of head_dim 8\), got 4",
        ),
        (LONGROPE | {"partial_rotary_factor": 1.0}, r"\(8 of head_dim 8\), got 3"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
            "must give an even number of 2..8",
        ),
    ],
)
def test_rope_that_does_not_fit_the_heads_is_refused(rope, message):
    with pytest.raises(ValueError, match=message):
        Eagle3DraftConfig(vocab_size=32, hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=rope)
