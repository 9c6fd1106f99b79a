"""Packing of TRL's rows, and where the parts of a policy are under PEFT."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from hf_codraft.hub.resolve import fresh_eagle3
from hf_codraft.policy.anatomy import PolicyAnatomy, effective_weight, unwrap_peft
from hf_codraft.policy.packing import pack_completions, pack_rows
from hf_codraft.taps.recorder import Taps

# Packing


def marked_taps(rows, length, *, width=2) -> Taps:
    """Taps whose numbers tell tap, row and column apart."""
    place = (torch.arange(rows)[:, None] * 100 + torch.arange(length))[..., None].expand(-1, -1, width).float()
    return Taps((place, place + 1000), place + 2000)


def test_pads_on_both_sides_are_dropped_and_the_rest_stays_aligned():
    inputs = {
        "prompt_ids": torch.tensor([[0, 0, 11], [12, 13, 14], [0, 15, 16]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[21, 22, 0, 0], [23, 24, 25, 26], [0, 0, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
    }
    batch = pack_completions(inputs, marked_taps(3, 7))
    assert batch.layout.cu_seqlens == (0, 3, 10, 12)
    assert batch.layout.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert batch.token_ids_T.tolist() == [11, 21, 22, 12, 13, 14, 23, 24, 25, 26, 15, 16]
    assert batch.supervised_T.tolist() == [False, True, True, False, False, False, *[True] * 4, False, False]
    places = [2, 3, 4, *range(100, 107), 201, 202]
    assert batch.taps_TX.tolist() == [[p, p, p + 1000, p + 1000] for p in places]
    assert batch.hidden_TH.tolist() == [[p + 2000, p + 2000] for p in places]


def test_tool_output_is_text_that_is_not_supervised():
    inputs = {
        "prompt_ids": torch.tensor([[11, 12]]),
        "prompt_mask": torch.tensor([[1, 1]]),
        "completion_ids": torch.tensor([[21, 22, 23, 24, 25, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 0, 1, 1, 1]]),
    }
    batch = pack_completions(inputs, marked_taps(1, 8))
    assert batch.token_ids_T.tolist() == [11, 12, 21, 22, 23, 24, 25]
    assert batch.supervised_T.tolist() == [False, False, True, False, False, True, True]


def test_a_masked_truncated_completion_leaves_its_prompt_alone():
    inputs = {
        "prompt_ids": torch.tensor([[11, 12], [0, 13]]),
        "prompt_mask": torch.tensor([[1, 1], [0, 1]]),
        "completion_ids": torch.tensor([[21, 22], [23, 24]]),
        "completion_mask": torch.zeros(2, 2, dtype=torch.long),
    }
    batch = pack_completions(inputs, marked_taps(2, 4))
    assert batch.token_ids_T.tolist() == [11, 12, 13]
    assert not batch.supervised_T.any()


def test_a_row_without_tokens_is_left_out():
    ids = torch.tensor([[5, 6], [0, 0], [7, 0]])
    mask = torch.tensor([[1, 1], [0, 0], [1, 0]])
    batch = pack_rows(ids, mask, mask, marked_taps(3, 2))
    assert batch.layout.segments == [(0, 2), (2, 3)]
    assert batch.token_ids_T.tolist() == [5, 6, 7]
    assert batch.hidden_TH[:, 0].tolist() == [2000, 2001, 2200]


def test_hidden_states_of_other_positions_are_an_error():
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"of shape \(1, 5\) for token ids of shape \(1, 3\)"):
        pack_rows(ids, torch.ones_like(ids), torch.ones_like(ids), marked_taps(1, 5))


# Anatomy


def peft_policy(*, tie=False, seed=1, **config):
    """A PEFT model whose adapters are not at their neutral start."""
    model = get_peft_model(tiny.policy(tie=tie, num_hidden_layers=2), LoraConfig(r=4, task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


PEFT = {
    "lm_head": dict(target_modules=["lm_head"]),
    "embed_tokens": dict(target_modules=["embed_tokens"]),
    "q_proj": dict(target_modules=["q_proj"]),
    "all three": dict(target_modules=["lm_head", "embed_tokens", "q_proj"], lora_alpha=13),
    "rslora": dict(target_modules=["lm_head", "embed_tokens"], use_rslora=True),
    "dora on lm_head": dict(target_modules=["lm_head"], use_dora=True),
    "dora on embed_tokens": dict(target_modules=["embed_tokens"], use_dora=True),
    "modules_to_save lm_head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "modules_to_save both": dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "trainable tokens": dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 7]}),
}


def head_and_embedding(model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, what the embeddings gave, what the head read and the logits of a real forward."""
    seen = {}
    base = unwrap_peft(model)
    ids = torch.arange(tiny.VOCAB).view(4, -1)
    hooks = [
        base.model.norm.register_forward_hook(lambda module, args, output: seen.update(final=output)),
        base.get_input_embeddings().register_forward_hook(lambda module, args, output: seen.update(embedded=output)),
    ]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    return ids, seen["embedded"], seen["final"], logits


def assert_effective(model) -> None:
    weights = PolicyAnatomy.of(model).weights()
    ids, embedded, final, logits = head_and_embedding(model)
    # one product against two (weight and delta apart) in fp32, on numbers of about 10
    torch.testing.assert_close(F.linear(final, weights.head_VH, weights.head_bias_V), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(F.embedding(ids, weights.embedding_VH), embedded, rtol=1e-4, atol=1e-4)
    assert not weights.head_VH.requires_grad and not weights.embedding_VH.requires_grad


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_weights_of_a_plain_policy_are_its_own_tensors(kind, tie):
    model = tiny.policy(kind, tie=tie, num_hidden_layers=2)
    assert_effective(model)
    weights = PolicyAnatomy.of(model).weights()
    assert weights.embedding_VH.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert weights.head_VH.data_ptr() == model.lm_head.weight.data_ptr()
    assert (weights.head_VH.data_ptr() == weights.embedding_VH.data_ptr()) == tie


@pytest.mark.filterwarnings("ignore")  # PEFT warns of adapters on tied weights
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("config", PEFT.values(), ids=PEFT)
def test_effective_weights_give_the_peft_models_logits_and_embeddings(config, tie):
    model = peft_policy(tie=tie, **config)
    base = tiny.policy(tie=tie, num_hidden_layers=2)
    assert_effective(model)
    with torch.no_grad():
        ids = torch.arange(16)[None]
        assert not torch.allclose(model(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_effective_weights_follow_merging_disabling_and_the_active_adapter():
    model = peft_policy(target_modules=["lm_head", "embed_tokens"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    first = PolicyAnatomy.of(model).weights().head_VH
    model.set_adapter("other")
    assert_effective(model)
    second = PolicyAnatomy.of(model).weights().head_VH
    assert not torch.allclose(first, second, atol=1e-3)
    with model.disable_adapter():
        assert_effective(model)
        assert torch.equal(PolicyAnatomy.of(model).weights().head_VH, model.get_base_model().lm_head.base_layer.weight)
    model.set_adapter("default")
    model.merge_adapter()
    assert_effective(model)
    torch.testing.assert_close(PolicyAnatomy.of(model).weights().head_VH, first, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_disabled_adapters_disable_modules_to_save():
    model = peft_policy(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with model.disable_adapter():
        assert_effective(model)


def test_a_bias_of_the_head_is_read():
    model = tiny.policy(tie=False, num_hidden_layers=2)
    head = nn.Linear(tiny.HIDDEN, tiny.VOCAB)
    head.weight = model.lm_head.weight
    model.lm_head = head
    assert_effective(model)
    assert_effective(
        get_peft_model(
            model, LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
        )
    )


def test_the_weights_are_live():
    model = tiny.policy(tie=False, num_hidden_layers=2)
    anatomy = PolicyAnatomy.of(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(anatomy.weights().head_VH, model.lm_head.weight)


@pytest.mark.filterwarnings("ignore")
def test_a_draft_starts_from_the_base_layer_under_lora():
    model = peft_policy(target_modules=["q_proj", "down_proj"])
    layer = PolicyAnatomy.of(model).last_layer_weights()
    want = {
        name: parameter
        for name, parameter in tiny.policy(tie=False, num_hidden_layers=2).model.layers[-1].named_parameters()
    }
    assert layer.keys() == want.keys()
    assert all(torch.equal(layer[name], want[name]) for name in want)
    options = SimpleNamespace(draft_vocab_size=None, draft_tap_layers=[0, 2], draft_warmup_rollouts=0)
    draft = fresh_eagle3(PolicyAnatomy.of(model), options)
    assert torch.equal(draft.midlayer.mlp.down_proj.weight, want["mlp.down_proj.weight"])


@pytest.mark.filterwarnings("ignore")
def test_unwrap_peft_finds_the_transformers_model():
    model = tiny.policy(num_hidden_layers=2)
    assert unwrap_peft(model) is model
    assert unwrap_peft(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))) is model


def test_parameters_to_gather_are_those_of_embedding_and_head():
    model = tiny.policy(tie=False, num_hidden_layers=2)
    gathered = {id(p) for p in PolicyAnatomy.of(model).borrowed_parameters()}
    assert gathered == {id(model.model.embed_tokens.weight), id(model.lm_head.weight)}


TINY_BERT = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: BertForMaskedLM(BertConfig(**TINY_BERT)), "BertForMaskedLM"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)), "GPT2LMHeadModel"),
        (lambda: tiny.policy(num_hidden_layers=1).model, "LlamaModel"),
        (lambda: nn.Linear(2, 2), "Linear"),
    ],
    ids=["encoder", "other layout", "no head", "not a transformers model"],
)
def test_a_model_that_is_not_a_known_decoder_is_refused(build, name):
    with pytest.raises(ValueError, match=rf"model \({name}\) is not a decoder-only language model .*missing:"):
        PolicyAnatomy.of(build())


def test_effective_weight_of_a_plain_module_is_its_weight():
    linear = nn.Linear(3, 2)
    assert effective_weight(linear).data_ptr() == linear.weight.data_ptr()
