"""Drafts on disk: nothing is lost on the way, by a kill, or without a network; what does not fit is refused."""

import json
import os
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from ranks import HIDDEN, VOCAB, tiny_batch, tiny_draft, tiny_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from hf_codraft.drafts.eagle3 import Eagle3Draft
from hf_codraft.hub import checkpoint
from hf_codraft.hub.checkpoint import load_draft, load_training_state, push_draft, save_draft
from hf_codraft.hub.history import last_complete_checkpoint
from hf_codraft.hub.resolve import check_fit, fresh_eagle3, resolve_draft
from hf_codraft.policy.anatomy import PolicyAnatomy

VARIANTS = {
    **tiny.NORM_FLAGS,
    "every norm": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "own embeddings": {"has_own_embeddings": True},
    "another width": {"hidden_size": 16, "target_hidden_size": HIDDEN, "has_own_embeddings": True},
    "two taps": {"eagle_aux_hidden_state_layer_ids": [0, 7]},
}
layouts = pytest.mark.parametrize("layout", ["plain", "speculators"])
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
ropes = pytest.mark.parametrize("rope", ROPE.values(), ids=ROPE)


def loss_of(draft) -> torch.Tensor:
    batch = tiny_batch([(3, 9), (1, 5)], dtype=torch.float32)
    if len(draft.tap_ids) == 2:
        batch = type(batch)(
            batch.shard, batch.token_ids_T, batch.supervised_T, batch.taps_TX[:, : 2 * HIDDEN], batch.hidden_TH
        )
    return draft.compute_loss(batch, tiny_weights(dtype=torch.float32), num_passes=3).loss


def assert_same_draft(got, want) -> None:
    """Equal weights, buffers and output, bit for bit."""
    got_state, want_state = got.state_dict(), want.state_dict()
    assert got_state.keys() == want_state.keys()
    for name, tensor in got_state.items():
        assert tensor.dtype == want_state[name].dtype and torch.equal(tensor, want_state[name]), name
    assert torch.equal(got.rotary_emb.inv_freq, want.rotary_emb.inv_freq)
    assert torch.equal(loss_of(got), loss_of(want))


def read_config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def rewrite_config(folder, *, drop=(), **fields) -> None:
    data = {name: value for name, value in read_config(folder).items() if name not in drop} | fields
    (folder / "config.json").write_text(json.dumps(data))


# Round trips


@layouts
@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_a_draft_comes_back_as_it_was(tmp_path, layout, flags):
    draft = tiny_draft(exact=False, **flags)
    save_draft(draft, tmp_path / "draft", base_model="some/policy", layout=layout)
    back = load_draft(tmp_path / "draft")
    assert_same_draft(back, draft)
    for name, value in flags.items():
        assert getattr(back.config, name) == value
    assert back.tap_ids == draft.tap_ids
    assert back.config.num_aux_hidden_states == len(draft.tap_ids)


@pytest.mark.parametrize("name", ["norm_before_residual", "norm_output"])
def test_flags_without_weights_change_the_output(tmp_path, name):
    draft = tiny_draft(exact=False, **{name: True})
    save_draft(draft, tmp_path / "draft", base_model="")
    rewrite_config(tmp_path / "draft", **{name: False})
    assert not torch.isclose(loss_of(load_draft(tmp_path / "draft")), loss_of(draft))


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_from_pretrained_reads_the_plain_form(tmp_path, flags):
    draft = tiny_draft(exact=False, **flags)
    save_draft(draft, tmp_path / "draft", base_model="")
    assert_same_draft(Eagle3Draft.from_pretrained(tmp_path / "draft"), draft)


@ropes
def test_from_pretrained_restores_the_inverse_frequencies(tmp_path, rope):
    draft = tiny_draft(exact=False, rope_parameters=rope)
    save_draft(draft, tmp_path / "draft", base_model="")
    for dtype in (torch.float32, torch.bfloat16):
        back = Eagle3Draft.from_pretrained(tmp_path / "draft", dtype=dtype)
        assert back.dtype == dtype and back.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(back.rotary_emb.inv_freq, draft.rotary_emb.inv_freq)
        assert torch.equal(back.rotary_emb.original_inv_freq, draft.rotary_emb.original_inv_freq)


def test_a_bf16_draft_is_saved_as_it_is_and_loaded_in_fp32(tmp_path):
    draft = tiny_draft(exact=False).to(torch.bfloat16)
    save_draft(draft, tmp_path / "draft", base_model="")
    assert read_config(tmp_path / "draft")["dtype"] == "bfloat16"
    assert {x.dtype for x in load_file(tmp_path / "draft" / "model.safetensors").values()} == {torch.bfloat16}
    assert_same_draft(load_draft(tmp_path / "draft"), draft.float())


# Names and config on disk


@pytest.mark.parametrize(("layout", "layer"), [("plain", "midlayer."), ("speculators", "layers.0.")])
def test_weights_have_the_names_of_their_layout(tmp_path, layout, layer):
    save_draft(
        tiny_draft(exact=False, draft_vocab_size=20, fc_norm=True), tmp_path / "draft", base_model="", layout=layout
    )
    own = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    own += [f"{x}.weight" for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    with safe_open(tmp_path / "draft" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"fc_norm.{i}.weight" for i in range(3))}
    assert names == rest | {layer + name for name in own}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_either_layer_name_is_read_with_and_without_prefix(tmp_path, prefix, layer):
    draft = tiny_draft(exact=False, draft_vocab_size=20)
    save_draft(draft, tmp_path / "draft", base_model="")
    file = tmp_path / "draft" / "model.safetensors"
    save_file({prefix + name.replace("midlayer.", layer): x for name, x in load_file(file).items()}, file)
    assert_same_draft(load_draft(tmp_path / "draft"), draft)


def test_the_plain_config_is_what_vllm_reads(tmp_path):
    save_draft(tiny_draft(exact=False, draft_vocab_size=20), tmp_path / "draft", base_model="")
    config = read_config(tmp_path / "draft")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["draft_vocab_size"] == 20
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["num_aux_hidden_states"] == 3
    assert type(AutoConfig.from_pretrained(tmp_path / "draft")) is LlamaConfig


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_the_speculators_config_keeps_the_drafts_fields_apart_from_the_layers(tmp_path, flags):
    draft = tiny_draft(exact=False, **flags)
    save_draft(draft, tmp_path / "draft", base_model="some/policy", layout="speculators")
    config = read_config(tmp_path / "draft")
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/policy"
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["hidden_size"] == draft.config.hidden_size
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    for name in (*norms, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
        assert config[name] == getattr(draft.config, name)
        assert name not in layer
    assert config["target_hidden_size"] == (HIDDEN if draft.config.hidden_size != HIDDEN else None)


@layouts
def test_embeddings_are_never_tied(tmp_path, layout):
    draft = tiny_draft(exact=False, tie_word_embeddings=True, has_own_embeddings=True)
    assert draft.config.tie_word_embeddings is False
    save_draft(draft, tmp_path / "draft", base_model="", layout=layout)
    data = read_config(tmp_path / "draft")
    assert data["tie_word_embeddings"] is False
    assert data.get("transformer_layer_config", {}).get("tie_word_embeddings") in (None, False)
    rewrite_config(tmp_path / "draft", tie_word_embeddings=True)  # a published checkpoint that says otherwise
    back = load_draft(tmp_path / "draft")
    assert back.config.tie_word_embeddings is False
    assert back.lm_head.weight.data_ptr() != back.embed_tokens.weight.data_ptr()
    assert_same_draft(back, draft)


@layouts
@ropes
def test_rope_is_written_both_ways_and_read_either_way(tmp_path, layout, rope):
    draft = tiny_draft(exact=False, rope_parameters=rope)
    save_draft(draft, tmp_path / "draft", base_model="", layout=layout)
    whole = read_config(tmp_path / "draft")
    data = whole["transformer_layer_config"] if layout == "speculators" else whole
    assert data["rope_parameters"] == dict(draft.config.rope_parameters)
    assert data["rope_theta"] == rope["rope_theta"]
    old = {name: value for name, value in draft.config.rope_parameters.items() if name != "rope_theta"}
    assert data["rope_scaling"] == (None if rope["rope_type"] == "default" else old)
    for dropped in (("rope_theta", "rope_scaling"), ("rope_parameters",), ()):
        kept = {name: value for name, value in data.items() if name not in dropped}
        if layout == "speculators":
            kept = whole | {"transformer_layer_config": kept}
        (tmp_path / "draft" / "config.json").write_text(json.dumps(kept))
        back = load_draft(tmp_path / "draft")
        assert_same_draft(back, draft)
        assert back.rotary_emb.attention_scaling == draft.rotary_emb.attention_scaling


def test_scaling_that_names_its_type_the_old_way_is_read(tmp_path):
    draft = tiny_draft(exact=False, rope_parameters=ROPE["linear"])
    save_draft(draft, tmp_path / "draft", base_model="")
    rewrite_config(tmp_path / "draft", drop=("rope_parameters",), rope_scaling={"type": "linear", "factor": 4.0})
    assert_same_draft(load_draft(tmp_path / "draft"), draft)


@layouts
def test_the_vocabulary_mapping_is_restored(tmp_path, layout):
    draft = tiny_draft(exact=False, draft_vocab_size=5)
    kept = torch.tensor([0, 3, 4, 17, 47])
    draft.set_vocabulary(kept, tiny_weights(dtype=torch.float32))
    save_draft(draft, tmp_path / "draft", base_model="", layout=layout)
    file = tmp_path / "draft" / "model.safetensors"
    weights = load_file(file)
    assert weights["d2t"].tolist() == [0, 2, 2, 14, 43] and weights["d2t"].dtype == torch.int64
    assert weights["t2d"].nonzero()[:, 0].tolist() == kept.tolist() and weights["t2d"].dtype == torch.bool
    del weights["t2d"]  # follows from d2t, and vLLM does not read it
    save_file(weights, file)
    back = load_draft(tmp_path / "draft")
    assert back.kept_ids.tolist() == kept.tolist()
    assert back.t2d.nonzero()[:, 0].tolist() == kept.tolist()


def test_a_full_vocabulary_with_a_mapping_of_zeros_is_read(tmp_path):
    draft = tiny_draft(exact=False)
    save_draft(draft, tmp_path / "draft", base_model="")
    file = tmp_path / "draft" / "model.safetensors"
    mapping = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    save_file(load_file(file) | mapping, file)
    assert_same_draft(load_draft(tmp_path / "draft"), draft)


def test_taps_and_norms_nested_in_eagle_config_are_read(tmp_path):
    draft = tiny_draft(exact=False, norm_before_fc=True)
    save_draft(draft, tmp_path / "draft", base_model="")
    names = ("eagle_aux_hidden_state_layer_ids", "norm_before_fc")
    nested = {name: read_config(tmp_path / "draft")[name] for name in names} | {"use_aux_hidden_state": True}
    rewrite_config(tmp_path / "draft", drop=(*names, "num_aux_hidden_states"), eagle_config=nested)
    back = load_draft(tmp_path / "draft")
    assert back.tap_ids == (1, 2, 4) and back.config.norm_before_fc
    assert_same_draft(back, draft)


def test_a_speculators_config_that_leaves_norm_before_residual_out_means_what_vllm_reads(tmp_path):
    """vLLM's reader takes it as true (`transformers_utils/configs/speculators/algos.py`, 0.31 and 0.32)."""
    save_draft(tiny_draft(exact=False), tmp_path / "draft", base_model="", layout="speculators")
    rewrite_config(tmp_path / "draft", drop=("norm_before_residual",))
    assert load_draft(tmp_path / "draft").config.norm_before_residual is True


# Refusals


@pytest.fixture
def saved(tmp_path) -> Path:
    save_draft(tiny_draft(exact=False, draft_vocab_size=20), tmp_path / "draft", base_model="")
    return tmp_path / "draft"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures=\['LlamaForCausalLM'\]; an EAGLE-3 draft .* is needed",
        ),
        ({"architectures": None}, r"architectures=None; an EAGLE-3 draft"),
        ({"model_type": "qwen3"}, r"model_type='qwen3'; only Llama-type drafts"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads no auxiliary hidden states"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; only 'eagle3' is supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of an EAGLE-3 draft must be 1, got 2"),
        ({"fc_norm": True}, r"missing weights \['fc_norm.0.weight', 'fc_norm.1.weight', 'fc_norm.2.weight'\]"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_config_of_another_kind_is_refused(saved, fields, message):
    rewrite_config(saved, **fields)
    with pytest.raises(ValueError, match=message):
        load_draft(saved)


def test_a_folder_without_config_or_weights_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        load_draft(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not a folder"):
        load_draft("./nowhere")
    os.rename(saved / "model.safetensors", saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no .safetensors file; convert"):
        load_draft(saved)
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json, so it is not a draft"):
        load_draft(saved)


def test_a_hub_id_that_cannot_be_fetched_is_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ValueError, match=r"draft='nobody/nothing-at-all' is neither a family .* nor could it be fetched"
    ):
        load_draft("nobody/nothing-at-all")


def test_weights_that_do_not_fit_the_config_are_named(saved):
    file = saved / "model.safetensors"
    weights = load_file(file)
    weights["stray.weight"] = weights.pop("fc.weight")
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"missing weights \['fc.weight'\], unknown ones \['stray.weight'\]"):
        load_draft(saved)


def test_target_ids_in_place_of_offsets_are_refused(saved):
    file = saved / "model.safetensors"
    weights = load_file(file)
    weights["d2t"] = weights["d2t"] + torch.arange(20)
    save_file(weights, file)
    with pytest.raises(
        ValueError, match=rf"outside the policy's vocabulary of {VOCAB}.*target ids instead of offsets"
    ):
        load_draft(saved)


def test_a_reduced_draft_without_its_mapping_is_refused(saved):
    file = saved / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name not in ("d2t", "t2d")}, file)
    with pytest.raises(ValueError, match=r"missing weights \['d2t', 't2d'\]"):
        load_draft(saved)


def test_an_unknown_layout_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="layout must be 'plain' or 'speculators', got 'gguf'"):
        save_draft(tiny_draft(exact=False), tmp_path / "draft", base_model="", layout="gguf")
    assert list(tmp_path.iterdir()) == []


# Fit to a policy


def draft_for_tiny_policy(**flags) -> Eagle3Draft:
    sizes = dict(vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, max_position_embeddings=512)
    return tiny_draft(exact=False, **(sizes | flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hidden_size": 48}, "reads hidden states of size 48, but the policy's are 64"),
        ({"vocab_size": 300}, "for a vocabulary of 300, but the policy's is 256"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"draft_tap_layers \(\[1, 2, 9\]\) must lie in 0..8"),
        (
            {"eagle_aux_hidden_state_layer_ids": [4, 2, 6]},
            r"draft_tap_layers \(\[4, 2, 6\]\) must ascend.* \[2, 4, 6\]",
        ),
    ],
)
def test_a_draft_of_another_policy_is_refused_with_both_numbers(flags, message):
    anatomy = PolicyAnatomy.of(tiny.policy())
    check_fit(draft_for_tiny_policy(), anatomy)
    with pytest.raises(ValueError, match=message):
        check_fit(draft_for_tiny_policy(**flags), anatomy)


def test_a_number_of_taps_that_does_not_fit_is_refused():
    draft = draft_for_tiny_policy()
    draft.config.eagle_aux_hidden_state_layer_ids = [2, 4]
    with pytest.raises(ValueError, match=r"fc reads 3 hidden states, but it names the layers \[2, 4\]"):
        check_fit(draft, PolicyAnatomy.of(tiny.policy()))


def test_taps_that_a_checkpoint_leaves_out_are_vllms_default_and_others_win(tmp_path):
    anatomy = PolicyAnatomy.of(tiny.policy())
    draft = draft_for_tiny_policy()
    check_fit(draft, anatomy)
    assert draft.tap_ids == (1, 2, 4)
    save_draft(draft, tmp_path / "draft", base_model="")
    rewrite_config(tmp_path / "draft", drop=("eagle_aux_hidden_state_layer_ids",))
    back = load_draft(tmp_path / "draft")
    check_fit(back, anatomy)
    assert back.tap_ids == (2, 4, 5)


def test_absolute_ids_in_d2t_are_refused():
    draft = draft_for_tiny_policy(vocab_size=tiny.VOCAB, has_own_embeddings=False)
    reduced = draft_for_tiny_policy(draft_vocab_size=4)
    reduced.d2t.copy_(torch.tensor([3, 100, 200, 255]))
    anatomy = PolicyAnatomy.of(tiny.policy())
    check_fit(draft, anatomy)
    with pytest.raises(ValueError, match=r"target ids 3\.\.258, outside the policy's vocabulary of 256"):
        check_fit(reduced, anatomy)


def test_positions_of_a_draft_are_raised_to_the_policys_with_a_warning():
    anatomy = PolicyAnatomy.of(tiny.policy())
    draft = draft_for_tiny_policy(max_position_embeddings=128)
    with pytest.warns(UserWarning, match="max_position_embeddings is raised from 128 to the policy's 512"):
        check_fit(draft, anatomy)
    assert draft.config.max_position_embeddings == 512
    longer = draft_for_tiny_policy(max_position_embeddings=1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fit(longer, anatomy)
    assert longer.config.max_position_embeddings == 1024


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_a_theta_beside_rope_parameters_without_one_is_taken(tmp_path, layout):
    save_draft(draft_for_tiny_policy(), tmp_path / "draft", base_model="", layout=layout)
    file = tmp_path / "draft" / "config.json"
    data = json.loads(file.read_text())
    layer = data["transformer_layer_config"] if layout == "speculators" else data
    layer |= {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}
    file.write_text(json.dumps(data))
    assert load_draft(tmp_path / "draft").config.rope_parameters["rope_theta"] == 5e5


def test_a_draft_without_theta_is_trained_as_the_engine_reads_it_with_a_warning_that_names_both(tmp_path):
    save_draft(draft_for_tiny_policy(), tmp_path / "draft", base_model="")
    rewrite_config(tmp_path / "draft", drop=("rope_parameters", "rope_theta", "rope_scaling"))
    draft = load_draft(tmp_path / "draft")
    as_engine = LlamaConfig.from_pretrained(tmp_path / "draft")  # vLLM reads a Llama draft's config by transformers
    assert draft.config.rope_parameters["rope_theta"] == as_engine.rope_parameters["rope_theta"] == 10000.0
    rope = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.warns(UserWarning, match=r"rope_theta is 10000 and the policy's 1e\+06"):
        check_fit(draft, PolicyAnatomy.of(tiny.policy(rope_parameters=rope)))
    assert draft.config.rope_parameters["rope_theta"] == 10000.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fit(draft, PolicyAnatomy.of(tiny.policy()))


def test_a_window_that_is_not_used_is_full_attention(tmp_path):
    save_draft(draft_for_tiny_policy(), tmp_path / "draft", base_model="")
    rewrite_config(tmp_path / "draft", sliding_window=4096, use_sliding_window=False)
    assert load_draft(tmp_path / "draft").config.sliding_window is None
    rewrite_config(tmp_path / "draft", use_sliding_window=True)
    with pytest.raises(ValueError, match=r"sliding_window \(4096\) of an EAGLE-3 draft is not supported"):
        load_draft(tmp_path / "draft")


class Options:
    draft_vocab_size: int | None = None
    draft_tap_layers: list[int] | None = None
    draft_warmup_rollouts = 0
    draft_base_mismatch = "warn"


def test_resolve_takes_a_family_a_folder_or_a_draft_and_nothing_else(tmp_path):
    anatomy = PolicyAnatomy.of(tiny.policy())
    fresh = resolve_draft("eagle3", anatomy, Options())
    assert resolve_draft(fresh, anatomy, Options()) is fresh
    save_draft(fresh, tmp_path / "draft", base_model="")
    for source in (tmp_path / "draft", str(tmp_path / "draft")):
        back = resolve_draft(source, anatomy, Options())
        assert all(torch.equal(a, b) for a, b in zip(back.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(ValueError, match="draft must be one of"):
        resolve_draft(3, anatomy, Options())


def test_options_of_a_fresh_draft_warn_where_they_have_no_effect():
    anatomy, options = PolicyAnatomy.of(tiny.policy()), Options()
    options.draft_vocab_size = 20
    with pytest.warns(UserWarning, match="draft_vocab_size has no effect on a draft that exists"):
        resolve_draft(draft_for_tiny_policy(), anatomy, options)


@layouts
def test_a_fresh_draft_survives_the_round_trip_with_its_policys_rope(tmp_path, layout):
    model = tiny.policy("qwen3", rope_parameters=ROPE["llama3"])
    draft = fresh_eagle3(PolicyAnatomy.of(model), Options())
    save_draft(draft, tmp_path / "draft", base_model="some/policy", layout=layout)
    back = load_draft(tmp_path / "draft")
    x, positions = torch.zeros(1, 1, 1), torch.arange(100)[None]
    for ours, policys in zip(back.rotary_emb(x, positions), model.model.rotary_emb(x, positions), strict=True):
        assert torch.equal(ours, policys)


# Kills


def killed_write(weights, file, **kwargs):
    Path(file).write_bytes(b"half a file")
    raise KeyboardInterrupt


@layouts
def test_a_kill_while_writing_leaves_the_old_draft(tmp_path, monkeypatch, layout):
    old, new = tiny_draft(exact=False, seed=0), tiny_draft(exact=False, seed=1)
    save_draft(old, tmp_path / "draft", base_model="", layout=layout)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", killed_write)
        with pytest.raises(KeyboardInterrupt):
            save_draft(new, tmp_path / "draft", base_model="", layout=layout)
    assert_same_draft(load_draft(tmp_path / "draft"), old)
    save_draft(new, tmp_path / "draft", base_model="", layout=layout)
    assert_same_draft(load_draft(tmp_path / "draft"), new)
    assert [folder.name for folder in tmp_path.iterdir()] == ["draft"]  # leftovers are gone


def test_a_kill_of_the_first_write_leaves_no_folder_that_looks_like_a_draft(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save_file", killed_write)
    with pytest.raises(KeyboardInterrupt):
        save_draft(tiny_draft(exact=False), tmp_path / "draft", base_model="")
    assert not (tmp_path / "draft").exists()


def test_a_kill_between_the_renames_and_another_while_writing_leave_the_old_draft(tmp_path, monkeypatch):
    old, new = tiny_draft(exact=False, seed=0), tiny_draft(exact=False, seed=1)
    save_draft(old, tmp_path / "draft", base_model="")
    rename = os.rename

    def killed_rename(source, target):
        if Path(target).name == "draft":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed_rename)
        with pytest.raises(KeyboardInterrupt):
            save_draft(new, tmp_path / "draft", base_model="")
    assert_same_draft(load_draft(tmp_path / ".draft.old"), old)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", killed_write)
        with pytest.raises(KeyboardInterrupt):
            save_draft(new, tmp_path / "draft", base_model="")
    assert_same_draft(load_draft(tmp_path / "draft"), old)


# Training checkpoints


def test_training_state_and_weights_come_back_in_place(tmp_path):
    draft, state = (
        tiny_draft(exact=False, seed=0),
        {"learner": {"num_steps": 3, "moment": torch.arange(3.0)}, "seed": 7},
    )
    save_draft(draft, tmp_path / "draft", base_model="", training_state=state)
    other = tiny_draft(exact=False, seed=1)
    pointers = [p.data_ptr() for p in other.parameters()]
    back = load_training_state(other, tmp_path / "draft", like=state)
    assert back["seed"] == 7 and back["learner"]["num_steps"] == 3
    assert torch.equal(back["learner"]["moment"], torch.arange(3.0))
    assert_same_draft(other, draft)
    assert [p.data_ptr() for p in other.parameters()] == pointers  # an optimizer holds these


def test_a_checkpoint_without_a_draft_is_an_error_that_says_so(tmp_path):
    save_draft(tiny_draft(exact=False), tmp_path / "draft", base_model="")
    for folder in (tmp_path / "draft", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="has no draft to resume"):
            load_training_state(tiny_draft(exact=False), folder, like={})


def make_checkpoint(folder, *, draft=True, state='{"global_step": 1}', training_state=None) -> Path:
    (folder / "draft").mkdir(parents=True)
    if draft:
        torch.save(training_state or {}, folder / "draft" / "training_state.pt")
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    return folder


@pytest.mark.parametrize(
    "newest",
    [{"draft": False}, {"state": None}, {"state": '{"global_st'}, {"state": ""}],
    ids=["no draft", "no state", "half", "empty"],
)
def test_an_incomplete_newest_checkpoint_is_passed_over_with_a_warning(tmp_path, newest):
    make_checkpoint(tmp_path / "checkpoint-9")
    want = make_checkpoint(tmp_path / "checkpoint-20")
    make_checkpoint(tmp_path / "checkpoint-100", **newest)
    make_checkpoint(tmp_path / "checkpoint-best")
    with pytest.warns(UserWarning, match="checkpoint-100 was not written to its end"):
        assert last_complete_checkpoint(tmp_path) == str(want)


def test_no_complete_checkpoint_is_none(tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path / "nowhere") is None
    make_checkpoint(tmp_path / "checkpoint-1", state=None)
    with pytest.warns(UserWarning, match="checkpoint-1 was not"):
        assert last_complete_checkpoint(tmp_path) is None


# Hub


def test_the_card_names_the_policy_and_how_to_serve(tmp_path):
    save_draft(tiny_draft(exact=False, draft_vocab_size=20), tmp_path / "draft", base_model="some/policy")
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "base_model: some/policy" in card
    assert "'method': 'eagle3'" in card.replace('"', "'")
    assert f"20 of {VOCAB}" in card and "1, 2, 4" in card


# 127.0.0.1:9 (discard) refuses connections on every machine, with or without a network
@pytest.mark.parametrize("offline", [True, False], ids=["offline mode", "unreachable"])
def test_a_push_without_a_network_is_a_clear_error_and_keeps_the_files(saved, monkeypatch, offline):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(RuntimeError, match=rf"could not be pushed to 'me/draft' .*saved in {saved}; log in"):
        push_draft(saved, "me/draft", token="hf_none")
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    load_draft(saved)


def test_a_push_to_an_impossible_name_is_a_clear_error(saved):
    with pytest.raises(RuntimeError, match=r"could not be pushed to 'a/b/c' \(HFValidationError"):
        push_draft(saved, "a/b/c", token="hf_none")
