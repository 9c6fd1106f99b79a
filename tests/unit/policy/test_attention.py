"""Policies on packed rows that are spread over ranks of this process: as transformers on the separate rows, or refused."""

import copy
import dataclasses
import importlib.util
import re

import pytest
import torch
from packed_policies import PACKINGS, PLANS, VOCAB, Case, Result, assert_equal, build, ours, run_local, truth
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.plans import zigzag_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import run_local_ranks
from hf_codraft.policy import attention
from hf_codraft.policy.attention import check_isolation, packed_inputs, register_attention

MIXED_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
}
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Equal to stock transformers

POLICIES = {
    "llama": Case("llama"),
    "llama_9_query_3_key_heads": Case(config={"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama_1_key_head": Case(config={"num_key_value_heads": 1}),
    "llama_tied": Case(config={"tie_word_embeddings": True}),
    "qwen3": Case("qwen3"),
    "qwen3_windows_in_some_layers": Case("qwen3", config=MIXED_WINDOWS),
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe_window": Case("qwen3_moe", config={"use_sliding_window": True, "sliding_window": 5}),
    "lora_on_queries_alone": Case(lora=("q_proj",)),  # the first layer's keys need no gradient
    "lora_on_values_alone": Case(lora=("v_proj",)),  # nor its queries
    "lora": Case("qwen3", lora=ALL_LINEAR),
    "lora_windows_in_some_layers": Case("qwen3", config=MIXED_WINDOWS, lora=ALL_LINEAR),
    **{f"mistral_window_{window}": Case("mistral", config={"sliding_window": window}) for window in (1, 2, 7, 64)},
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_logits_and_gradients_equal_transformers_on_the_separate_rows(name, world):
    case = POLICIES[name]
    model = build(case)
    assert_equal(run_local(case, model, world), truth(case, model))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["direct", "ring"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_packing_and_route_is_exact(plan, packing, route):
    case = Case("mistral", packing, plan, config={"sliding_window": 7}, call={"route": route})
    model = build(case)
    reference = truth(case, model)
    for world in (3, 4):
        assert_equal(run_local(case, model, world), reference)


@pytest.mark.slow
@pytest.mark.parametrize("keep_remote", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("llama", 2),
        ("lora", 2),
        ("qwen3_moe_window", 2),
        ("mistral_window_7", 4),
        ("qwen3_windows_in_some_layers", 3),
        ("lora_windows_in_some_layers", 4),
    ],
)
def test_checkpointing_changes_nothing(name, world, reentrant, keep_remote):
    case = dataclasses.replace(POLICIES[name], reentrant=reentrant, call={"keep_remote": keep_remote})
    model = build(case)
    assert_equal(run_local(case, model, world), truth(case, model))


@pytest.mark.parametrize("supervised", ["all", "last", "none"])
def test_ranks_without_a_supervised_token_take_part(supervised):
    """Without a word about the loss's scale: a rank's loss is its part of the mean over the row's targets."""
    case = Case(plan="contiguous", supervised=supervised)
    model, layout = build(case), case.layout(4)

    def run(transport) -> tuple[float, bool]:
        copy_of_rank = ours(model, case)
        shard = Shard(layout, transport.rank, transport)
        loss = copy_of_rank(**packed_inputs(case.token_ids(), shard, supervised_T=case.supervised_mask())).loss
        loss.backward()
        gradients = [parameter.grad for parameter in copy_of_rank.parameters()]
        assert all(gradient.isfinite().all() for gradient in gradients)
        return loss.item(), any(gradient.any() for gradient in gradients)

    losses, has_gradient = zip(*run_local_ranks(run, 4))
    num_learning = {"all": 4, "last": 1, "none": 0}[supervised]  # the last segment lies on the last rank
    assert [loss != 0 for loss in losses] == list(has_gradient) == [False] * (4 - num_learning) + [True] * num_learning
    rows, masks = (x.split(PACKINGS["mixed"]) for x in (case.token_ids(), case.supervised_mask()))
    stock = [
        model(
            input_ids=row[None], labels=row.masked_fill(~mask, -100)[None], num_items_in_batch=case.num_targets()
        ).loss
        for row, mask in zip(rows, masks)
    ]
    assert sum(losses) == pytest.approx(sum(stock).item(), rel=1e-6)
    assert_equal(run_local(case, model, 4), truth(case, model))


def distances(result: Result, exact: Result) -> dict[str, float]:
    """Relative Frobenius distance of every tensor."""
    pairs = {"logits": (result.logits_TV, exact.logits_TV)}
    pairs |= {name: (result.gradients[name], gradient) for name, gradient in exact.gradients.items()}
    return {name: ((found.double() - wanted).norm() / wanted.norm()).item() for name, (found, wanted) in pairs.items()}


def assert_no_less_exact(found: dict[str, float], reference: dict[str, float]) -> None:
    """Of half the accuracy at least: roundings fall differently."""
    assert reference["logits"] > 1e-4, "bf16 must round at all"
    assert {name: (found[name], error) for name, error in reference.items() if not found[name] <= 2 * error} == {}


def test_bf16_is_no_less_exact_on_four_ranks_than_on_one():
    case = Case("qwen3", "long")
    model = build(case)
    exact = truth(case, model.double())
    one, four = (distances(run_local(case, model, world, torch.bfloat16), exact) for world in (1, 4))
    assert_no_less_exact(four, one)


@pytest.mark.parametrize("kernel", ["aten", "eager"])
@pytest.mark.parametrize(
    ("name", "reentrant"), [("llama", None), ("qwen3", True), ("mistral_window_7", False), ("qwen3_moe", None)]
)
def test_autocast_costs_no_more_accuracy_than_in_transformers(name, reentrant, kernel):
    """fp32 weights, as accelerate's mixed_precision runs them; transformers with its default, which is torch's attention."""
    case = POLICIES[name]
    model, cast = build(case), dataclasses.replace(case, autocast=torch.bfloat16)
    exact = truth(case, model)
    stock = build(dataclasses.replace(case, config=case.config | {"attn_implementation": "sdpa"}))
    reference = distances(truth(cast, stock), exact)
    cast = dataclasses.replace(cast, reentrant=reentrant, call={"kernel": kernel})
    for world in (1, 2):
        result = run_local(cast, model, world)
        assert_no_less_exact(distances(result, exact), reference)
        assert all(gradient.dtype is torch.float32 for gradient in result.gradients.values())


def test_keys_travel_once_a_group_and_not_once_a_query_head():
    def body_bytes(num_key_value_heads: int) -> int:
        case = Case(config={"num_attention_heads": 9, "num_key_value_heads": num_key_value_heads, "hidden_size": 72})
        model, layout = build(case), case.layout(2)

        def run(transport) -> int:
            with torch.no_grad():
                ours(model, case)(**packed_inputs(case.token_ids(), Shard(layout, transport.rank, transport)))
            return transport.traffic.num_bytes - 16 * transport.traffic.num_messages  # without headers

        return sum(run_local_ranks(run, 2))

    assert body_bytes(3) * 3 == body_bytes(9) > 0


@pytest.mark.parametrize("token", [0, 9, 13, 24])
def test_a_changed_token_changes_no_logit_before_it_or_in_another_segment(token):
    case = Case("mistral", config={"sliding_window": 7})
    model, layout = build(case), case.layout(4)

    def logits(token_ids: torch.Tensor) -> torch.Tensor:
        def run(transport) -> torch.Tensor:
            with torch.no_grad():
                shard = Shard(layout, transport.rank, transport)
                return ours(model, case)(**packed_inputs(token_ids, shard)).logits[0, : shard.num_tokens]

        return layout.unshard(run_local_ranks(run, 4))

    token_ids = case.token_ids()
    before = logits(token_ids)
    token_ids[token] = (token_ids[token] + 1) % VOCAB
    changed_T = (logits(token_ids) != before).any(-1)
    _, end = layout.segment_of(token)
    reach = min(end, token + 2 * (7 - 1) + 1)  # two layers, a window of 7 each
    assert changed_T.nonzero()[:, 0].tolist() == list(range(token, reach))


# Inputs


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_positions_are_the_segments_and_labels_cross_the_borders_of_shards(plan, world):
    layout = PLANS[plan]((0, 5, 6, 14), world)
    token_ids = torch.arange(100, 114)
    supervised = torch.ones(14, dtype=torch.bool)
    supervised[8] = False
    after = [101, 102, 103, 104, -100, -100, 107, -100, *range(109, 114), -100]
    positions = [*range(5), 0, *range(8)]
    shards = run_local_ranks(lambda transport: Shard(layout, transport.rank, transport), world)
    seen = []
    for shard in shards:
        inputs = packed_inputs(token_ids, shard, supervised_T=supervised)
        tokens = inputs["input_ids"][0] - 100
        assert tokens.tolist() == shard.index.tolist()
        assert inputs["position_ids"].tolist() == [[positions[token] for token in tokens]]
        assert inputs["shift_labels"].tolist() == [[after[token] for token in tokens]]
        assert inputs["num_items_in_batch"] == 10  # of the row, on every rank
        assert packed_inputs(token_ids, shard, num_items_in_batch=3)["num_items_in_batch"] == 3
        seen += tokens.tolist()
    assert sorted(seen) == list(range(14))


def test_a_rank_without_tokens_gets_one_that_has_no_label():
    layout = zigzag_plan((0, 1), 2)
    empty = next(rank for rank in range(2) if layout.num_local(rank) == 0)
    shards = run_local_ranks(lambda transport: Shard(layout, transport.rank, transport), 2)
    inputs = packed_inputs(torch.tensor([5]), shards[empty])
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 1)
    assert inputs["shift_labels"].tolist() == [[-100]]
    assert inputs["num_items_in_batch"] == 1


@pytest.mark.parametrize("name", ["token_ids_T", "supervised_T"])
def test_inputs_are_made_from_the_whole_row(name):
    rows = {"token_ids_T": torch.zeros(4, dtype=torch.long), "supervised_T": torch.ones(4)}
    rows[name] = rows[name][:3]
    with pytest.raises(ValueError, match=rf"{name} has shape \(3,\), but the layout has 4 tokens"):
        packed_inputs(rows["token_ids_T"], Shard(PackedLayout((0, 4))), supervised_T=rows["supervised_T"])


# Registration


def test_importing_registers_nothing_and_registering_twice_is_one(monkeypatch):
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
        interface._global_mapping.pop("hf_codraft", None)
    spec = importlib.util.spec_from_file_location("attention_again", attention.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "hf_codraft" not in AttentionInterface() and "hf_codraft" not in AttentionMaskInterface()
    assert register_attention() == register_attention() == "hf_codraft"
    assert AttentionInterface()["hf_codraft"] is attention.sharded_attention
    assert AttentionMaskInterface()["hf_codraft"] is attention.refuse_masks


def test_positions_of_a_zigzag_make_no_mask():
    config = ours(build(Case("mistral", config={"sliding_window": 7})), Case()).config
    layout = zigzag_plan((0, 9), 2)
    positions = layout.position_ids_T[layout.index(0)][None]
    assert (positions.diff() != 1).any()
    for create in (create_causal_mask, create_sliding_window_causal_mask):
        hidden = torch.zeros(1, positions.shape[1], 64)
        assert create(config, hidden, None, past_key_values=None, position_ids=positions) is None


# Kernels and dtypes


@pytest.mark.parametrize("name", ["lora", "mistral_window_7"])
def test_the_kernel_is_the_callers_choice_and_changes_nothing(name):
    case = dataclasses.replace(POLICIES[name], call={"kernel": "eager"})
    model = build(case)
    eager, aten = run_local(case, model, 3), run_local(POLICIES[name], model, 3)
    assert_equal(eager, truth(case, model))
    assert_equal(eager, aten)
    assert not torch.equal(eager.logits_TV, aten.logits_TV), "two kernels round differently"


def attend(llama, dtypes, **kwargs) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 6, 16, generator=generator).to(dtype) for heads, dtype in zip((4, 2, 2), dtypes)]
    return attention.sharded_attention(llama.model.layers[0].self_attn, *tensors, None, shard=alone(), **kwargs)[0]


@pytest.mark.parametrize("kernel", ["aten", "eager"])
def test_autocast_decides_the_dtype_of_attention_and_not_its_widths(llama, kernel):
    expected = attend(llama, [torch.bfloat16] * 3, kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(llama, [torch.float32, torch.float32, torch.bfloat16], kernel=kernel)
        exact = attend(llama, [torch.float64] * 3, kernel=kernel)
    assert found.dtype is expected.dtype is torch.bfloat16 and torch.equal(found, expected)
    assert torch.equal(exact, attend(llama, [torch.float64] * 3, kernel=kernel)), "autocast leaves fp64 alone"


def test_unequal_dtypes_are_refused_where_no_autocast_settles_them(llama):
    message = (
        "LlamaAttention has query torch.float32, key torch.float32, value torch.bfloat16, which must have one dtype"
    )
    with pytest.raises(ValueError, match=message):
        attend(llama, [torch.float32, torch.float32, torch.bfloat16])


# Refusals


def alone(num_tokens: int = 6) -> Shard:
    return Shard(PackedLayout((0, num_tokens)))


def call(model, num_tokens: int = 6, **changes):
    """Runs a model on one segment, with some arguments changed."""
    return model(**(packed_inputs(torch.arange(3, 3 + num_tokens), alone(num_tokens)) | changes))


@pytest.fixture(scope="module")
def llama():
    return ours(build(Case()), Case())


REFUSED_CALLS = {
    "no shard": ({"shard": None}, "LlamaAttention got no shard: .* see packed_inputs"),
    "padding": ({"attention_mask": torch.ones(1, 6)}, r"attention_mask of shape \(1, 6\) can't be used"),
    "mask of four axes": ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "attention_mask given to LlamaAttention"),
    "two rows": (
        {name: torch.zeros(2, 6, dtype=torch.long) for name in ("input_ids", "position_ids")} | {"labels": None},
        r"batch size \(2\) must be 1",
    ),
    "another number of tokens": ({"shard": alone(7)}, "has 6 tokens, but rank 0 of the shard holds 7"),
    "other positions": ({"position_ids": torch.arange(1, 7)[None]}, "position_ids are not those of the shard's"),
    "attention weights": ({"output_attentions": True}, "output_attentions must be False"),
    "a bias": ({"position_bias": torch.zeros(1, 4, 6, 6)}, "position_bias of LlamaAttention"),
    "an unknown route": ({"route": "post"}, "route must be one of"),
    "an unknown kernel": ({"kernel": "math"}, r"kernel must be one of \('aten', 'flash_attn', 'eager'\), got 'math'"),
    "a kernel without its device": (
        {"kernel": "flash_attn"},
        "kernel='flash_attn' needs fp16 or bf16 tensors on a GPU",
    ),
    "no causality": ({"is_causal": False}, "llama asks for a mask beyond causal"),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_calls_that_it_cannot_serve_are_refused(llama, name):
    call(llama)
    changes, message = REFUSED_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(llama, **changes)


def test_positions_left_out_are_refused_unless_they_are_the_default(llama):
    call(llama, position_ids=None)
    with pytest.raises(ValueError, match="position_ids are not those of the shard's"):
        call(llama, shard=Shard(PackedLayout((0, 2, 6))), position_ids=None)


def test_a_filled_cache_is_refused(llama):
    cache = DynamicCache(config=llama.config)
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), layer)
    with pytest.raises(ValueError, match="9 keys came with 6 queries: past_key_values must be empty"):
        call(llama, past_key_values=cache)


def test_dropout_is_refused_in_training_alone():
    model = ours(build(Case(config={"attention_dropout": 0.1})), Case())
    with pytest.raises(ValueError, match=r"dropout \(0.1\) of LlamaAttention must be 0"):
        call(model)
    call(model.eval())


def test_a_layer_that_loses_the_shard_says_so(llama, monkeypatch):
    layer = llama.model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, shard, **kwargs: forward(*args, **kwargs))
    with pytest.raises(ValueError, match="this model's layers do not pass keyword arguments on"):
        call(llama)


def test_attention_that_is_not_causal_is_refused(llama, monkeypatch):
    monkeypatch.setattr(llama.model.layers[1].self_attn, "is_causal", False)
    with pytest.raises(ValueError, match="LlamaAttention is not causal"):
        call(llama)


def test_a_mask_function_of_a_model_is_refused(llama):
    with pytest.raises(ValueError, match="llama asks for a mask beyond causal"):
        create_causal_mask(
            llama.config, torch.zeros(1, 6, 64), None, None, or_mask_function=lambda batch, head, query, key: query < 2
        )


def test_the_routers_loss_is_refused_on_several_ranks():
    case = Case("qwen3_moe")
    model, layout = ours(build(case), case), case.layout(2)
    call(model, output_router_logits=True)

    def run(transport) -> None:
        model(**packed_inputs(case.token_ids(), Shard(layout, transport.rank, transport)), output_router_logits=True)

    with pytest.raises(ValueError, match="output_router_logits must be False on 2 context-parallel ranks"):
        run_local_ranks(run, 2)


SMALL = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=1,
)  # fmt: skip
REFUSED_MODELS = {
    "sinks": (
        GptOssForCausalLM,
        GptOssConfig,
        {"num_local_experts": 2, "num_experts_per_tok": 1},
        "s_aux of GptOssAttention",
    ),
    "soft-capped scores": (Gemma2ForCausalLM, Gemma2Config, {}, "softcap of Gemma2Attention"),
    "chunks": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {"num_local_experts": 2, "intermediate_size_mlp": 64},
        r"layer_types of llama4_text has \['chunked_attention'\]",
    ),
    "recurrent blocks": (
        RecurrentGemmaForCausalLM,
        RecurrentGemmaConfig,
        {"block_types": ("recurrent", "attention"), "lru_width": 64, "attention_window_size": 8},
        r"layers_block_type of recurrent_gemma has \['attention', 'recurrent'\]",
    ),
    "recurrence beside attention": (
        FalconH1ForCausalLM,
        FalconH1Config,
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
        r"layer_types of falcon_h1 has \['hybrid'\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_models_whose_attention_is_another_are_refused(name):
    model_class, config_class, extra, message = REFUSED_MODELS[name]
    model = model_class(config_class(**SMALL, **extra)).train()
    model.set_attn_implementation(register_attention())
    with pytest.raises(ValueError, match=message):
        call(model)


def test_configs_name_their_layers_where_it_is_read():
    """A field of another name would go unread, and a layer that is no attention unnoticed."""
    names = {name for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for name in dir(CONFIG_MAPPING[model_type])}
    # feed-forward layers mix no tokens, and heads for several tokens at a time do not run here
    found = {
        name for name in names if re.search("(layer|block).*type", name) and not re.match("_|validate|mlp|mtp", name)
    }
    assert found == set(attention.LAYER_TYPE_FIELDS)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_keep_segments_apart_pass_and_stay_in_training(name, dtype):
    model = ours(build(POLICIES[name]), POLICIES[name]).to(dtype)
    check_isolation(model)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_models_that_mix_segments_are_found_whatever_their_config_says(monkeypatch):
    monkeypatch.setattr(attention, "LAYER_TYPE_FIELDS", ())
    torch.manual_seed(0)
    for name in ("recurrent blocks", "recurrence beside attention"):
        model_class, config_class, extra, _ = REFUSED_MODELS[name]
        model = model_class(config_class(**SMALL, **extra))
        model.set_attn_implementation(register_attention())
        with pytest.raises(
            ValueError, match=f"{model_class.__name__} lets the segments of a packed row see each other"
        ):
            check_isolation(model)


def test_models_that_read_no_shard_are_found():
    rwkv = RwkvForCausalLM(RwkvConfig(**SMALL, attention_hidden_size=64))
    for model in (build(Case()), rwkv):  # transformers' own attention, and none at all
        with pytest.raises(ValueError, match=f"no layer of {type(model).__name__} calls the attention 'hf_codraft'"):
            check_isolation(model)


ROPES = {
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, {"max_position_embeddings": 12}),
    "longrope": (
        {
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 12,
            "short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 3.0, 4.0] * 2,
        },
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_that_follow_the_length_are_refused_where_ranks_or_segments_would_differ(name):
    rope, config = ROPES[name]
    case = Case(config={"rope_parameters": rope} | config)  # its longest segment has 12 tokens
    model = build(case)
    for world in (1, 3):
        assert_equal(run_local(case, model, world), truth(case, model))
    longer = Case(packing="long", config=case.config)  # one of 29
    assert_equal(run_local(longer, model, 1), truth(longer, model))
    message = rf"rope_type '{name}' of llama changes .*max_position_embeddings \(12\).* 1 segments has 29 tokens"
    with pytest.raises(ValueError, match=message):
        run_local(longer, model, 2)
    row = Shard(PackedLayout.from_lengths([13, 2]))
    with pytest.raises(ValueError, match="longest of the row's 2 segments has 13 tokens"):
        ours(model, case)(**packed_inputs(torch.arange(15), row))


def test_frequencies_of_each_kind_of_layer_are_looked_at():
    kinds = {"full_attention": ROPES["dynamic"][0], "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = LlamaConfig(**SMALL | {"max_position_embeddings": 12})
    config.rope_parameters = kinds
    attention._check_rope(config, PackedLayout.from_lengths([12, 3]))
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        attention._check_rope(config, PackedLayout.from_lengths([13, 3]))


@pytest.mark.parametrize("use_sliding_window", [False, True])
def test_a_window_that_a_layer_leaves_to_the_mask_is_kept(use_sliding_window):
    """Qwen2-MoE does not tell the attention function of its window, and writes 0 for none."""
    experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    window = dict(use_sliding_window=use_sliding_window, sliding_window=3, max_window_layers=2)
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **experts, **window, attn_implementation="eager"))
    with torch.no_grad():
        expected = model(input_ids=torch.arange(3, 12)[None]).logits
        sharded = copy.deepcopy(model)
        sharded.set_attn_implementation(register_attention())
        torch.testing.assert_close(call(sharded, 9).logits, expected)
        if use_sliding_window:  # and it matters
            model.config.layer_types = ["full_attention"] * 2
            for layer in model.model.layers:
                layer.attention_type = "full_attention"
            assert not torch.allclose(model(input_ids=torch.arange(3, 12)[None]).logits, expected)
