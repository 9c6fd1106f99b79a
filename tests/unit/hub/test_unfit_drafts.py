"""Drafts that are broken, or of something else: refused where they come in, or left open, and never taken as they are."""

import json
import os
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from ranks import VOCAB, tiny_draft
from safetensors.torch import load_file, save_file

from hf_codraft.drafts.eagle3 import Eagle3Draft
from hf_codraft.hub.checkpoint import load_draft, load_training_state, load_weights_into, save_draft
from hf_codraft.hub.resolve import resolve_draft
from hf_codraft.policy.anatomy import PolicyAnatomy

REDUCED = 20


@pytest.fixture
def saved(tmp_path) -> Path:
    save_draft(tiny_draft(exact=False, draft_vocab_size=REDUCED), tmp_path / "draft", base_model="")
    return tmp_path / "draft"


def change_weights(folder: Path, *, drop=(), **tensors) -> None:
    """`fc__weight=` stands for "fc.weight"."""
    file = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: x for name, x in (load_file(file) | named).items() if name not in drop}, file)


class Options:
    draft_vocab_size: int | None = None
    draft_tap_layers: list[int] | None = None
    draft_warmup_rollouts = 0
    draft_base_mismatch = "warn"


def draft_for_tiny_policy(**flags) -> Eagle3Draft:
    sizes = dict(vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, max_position_embeddings=512)
    return tiny_draft(exact=False, **(sizes | flags))


def resolve(source, *, policy=None, **options):
    chosen = Options()
    for name, value in options.items():
        setattr(chosen, name, value)
    return resolve_draft(source, PolicyAnatomy.of(policy or tiny.policy()), chosen)


# Vocabulary

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FIRST = torch.arange(VOCAB) < REDUCED


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_mapping_of_zeros_is_not_taken_for_the_first_ids(saved, dtype):
    zeros = torch.zeros(REDUCED, dtype=dtype)
    change_weights(saved, d2t=zeros)  # beside a mask that keeps others
    with pytest.raises(ValueError, match=r"d2t is all zeros, which would mean the ids 0\.\.19, but t2d keeps others"):
        load_draft(saved)
    change_weights(saved, drop=["t2d"])
    with pytest.raises(ValueError, match=r"missing weights \['t2d'\]"):
        load_draft(saved)
    for mask in (torch.zeros(VOCAB, dtype=torch.bool), torch.zeros(VOCAB, dtype=dtype)):
        change_weights(saved, d2t=zeros, t2d=mask)  # saved before it was chosen
        draft = load_draft(saved)
        assert draft.is_vocab_open and draft.d2t.dtype == torch.int64 and draft.t2d.dtype == torch.bool


def test_the_first_ids_may_be_meant(saved):
    """As of a vocabulary without its padding: the mask says so."""
    change_weights(saved, d2t=torch.zeros(REDUCED, dtype=torch.long), t2d=FIRST)
    draft = load_draft(saved)
    assert not draft.is_vocab_open and draft.kept_ids.tolist() == list(range(REDUCED))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_mapping_is_read_in_any_integer_type(saved, dtype):
    want = load_draft(saved).kept_ids
    weights = load_file(saved / "model.safetensors")
    change_weights(saved, d2t=weights["d2t"].to(dtype), t2d=weights["t2d"].to(torch.uint8))
    draft = load_draft(saved)
    assert torch.equal(draft.kept_ids, want) and draft.d2t.dtype == torch.int64
    assert draft.t2d.nonzero()[:, 0].tolist() == want.tolist()


def test_a_mapping_that_holds_no_integers_is_refused(saved):
    change_weights(saved, d2t=load_file(saved / "model.safetensors")["d2t"].float())
    with pytest.raises(ValueError, match=r"d2t must hold integers, got torch\.float32"):
        load_draft(saved)


@pytest.mark.parametrize("kind", ["folder", "object"])
def test_a_draft_without_a_chosen_vocabulary_needs_rollouts_to_choose_it(tmp_path, kind):
    draft = Eagle3Draft(draft_for_tiny_policy(draft_vocab_size=REDUCED).config).float()
    source = draft if kind == "object" else tmp_path / "draft"
    if kind == "folder":
        save_draft(draft, source, base_model="")
    with pytest.raises(ValueError, match="20 of 256 tokens were never chosen: set draft_warmup_rollouts"):
        resolve(source)
    assert resolve(source, draft_warmup_rollouts=8).is_vocab_open


def test_a_draft_object_with_a_lost_mapping_is_refused():
    draft = draft_for_tiny_policy(draft_vocab_size=REDUCED)
    draft.d2t = draft.d2t.int()
    assert resolve(draft) is draft
    draft.d2t = torch.zeros(REDUCED, dtype=torch.int32)
    with pytest.raises(ValueError, match="d2t is all zeros"):
        resolve(draft)


# Weights


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.k_proj.weight", "norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite_are_refused_by_name(saved, name, value):
    broken = load_file(saved / "model.safetensors")[name]
    broken.view(-1)[7] = value
    change_weights(saved, **{name: broken})
    with pytest.raises(ValueError, match=rf"draft='.*draft' has values that are not finite in {name} \(1 of"):
        load_draft(saved)
    draft = draft_for_tiny_policy()
    with torch.no_grad():
        draft.get_parameter(name).view(-1)[7] = value
    with pytest.raises(ValueError, match=rf"draft='Eagle3Draft' has values that are not finite in {name} \(1 of"):
        resolve(draft)


def test_weights_that_do_not_fit_into_fp32_are_refused(saved):
    change_weights(saved, fc__weight=load_file(saved / "model.safetensors")["fc.weight"].double() * 1e300)
    with pytest.raises(ValueError, match=r"not finite in fc\.weight"):
        load_draft(saved)


def test_every_weight_of_a_wrong_shape_is_refused_by_name(saved):
    for name, tensor in load_file(saved / "model.safetensors").items():
        change_weights(saved, **{name: tensor[:-1].clone()})
        shape = (len(tensor) - 1, *tensor.shape[1:])
        with pytest.raises(ValueError) as error:
            load_draft(saved)
        for part in (f"draft={str(saved)!r}", f"{name} has the shape {shape},", f"makes it {tuple(tensor.shape)}."):
            assert part in str(error.value)
        change_weights(saved, **{name: tensor})
    load_draft(saved)


def test_quantized_weights_are_refused(saved):
    change_weights(saved, fc__weight=load_file(saved / "model.safetensors")["fc.weight"].to(torch.int8))
    with pytest.raises(ValueError, match=r"fc.weight in torch.int8; a quantized draft cannot be trained"):
        load_draft(saved)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", None], ids=["empty", "open", "cut"])
def test_a_damaged_file_is_refused_by_name(saved, file, content):
    whole = (saved / file).read_bytes()
    (saved / file).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ValueError, match=rf"draft.* (has a config\.json that )?cannot be read|{file} cannot be read"):
        load_draft(saved)


def test_a_config_with_a_field_of_a_wrong_type_is_refused(saved):
    data = json.loads((saved / "config.json").read_text()) | {"hidden_size": "wide"}
    (saved / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"has a config\.json that cannot be read: .*hidden_size"):
        load_draft(saved)


# Kills


@pytest.mark.parametrize("relative", [False, True])
def test_a_draft_killed_between_the_two_renames_is_found(tmp_path, monkeypatch, relative):
    old, new = draft_for_tiny_policy(seed=0), draft_for_tiny_policy(seed=1)
    folder = tmp_path / "out" / "draft"
    state = {"learner": {"num_steps": 3}}
    save_draft(old, folder, base_model="", training_state=state)
    rename = os.rename

    def killed_rename(source, target):
        if Path(target).name == "draft":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed_rename)
        with pytest.raises(KeyboardInterrupt):
            save_draft(new, folder, base_model="", training_state=state)
    assert not folder.exists()
    monkeypatch.chdir(tmp_path)
    source = Path("out/draft") if relative else folder
    for load in (load_draft, resolve, lambda x: resolve(str(x))):
        with pytest.warns(UserWarning, match="was being replaced when a kill came; the draft before it is taken"):
            found = load(source)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), old.parameters(), strict=True))
    assert load_training_state(new, source, like=state) == state
    assert all(torch.equal(a, b) for a, b in zip(new.parameters(), old.parameters(), strict=True))


# The policy of a draft


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return {name: Path(tiny.save(tiny.policy(seed=seed), folder / name)) for seed, name in enumerate(("a/p", "b/p"))}


def loaded(folder: Path, name: str | None = None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    if name is not None:
        model.config._name_or_path = name  # as it comes from the Hub
    return model


@pytest.mark.parametrize("layout", ["plain", "speculators"])
@pytest.mark.parametrize("kind", ["folder", "object"])
def test_a_draft_of_another_policy_is_named_with_it(tmp_path, policies, layout, kind):
    """Both are folders of the same last name, with weights of the same shapes."""
    source = tmp_path / "draft"
    save_draft(draft_for_tiny_policy(), source, base_model=str(policies["a/p"]), layout=layout)
    source = load_draft(source) if kind == "object" else source
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(source, policy=loaded(policies["a/p"]))
    said = rf"trained with '{policies['a/p']}', and the policy is '{policies['b/p']}'"
    with pytest.warns(UserWarning, match=said):
        resolve(source, policy=loaded(policies["b/p"]))
    with pytest.raises(ValueError, match=said + ".*draft_base_mismatch"):
        resolve(source, policy=loaded(policies["b/p"]), draft_base_mismatch="error")


@pytest.mark.parametrize(
    ("base", "policy", "differs"),
    [
        ("org/model", "org/model", False),
        ("org/model", "other/model", True),
        ("org/model", "org/model-Instruct", True),
        ("org/model", "/models/model", False),  # a copy
        ("/gone/model", "org/model", False),
        ("/gone/run", "org/model", True),
        (None, "org/model", False),
        ("org/model", "", False),
    ],
)
def test_names_of_policies_are_compared_as_far_as_they_say_something(policies, base, policy, differs):
    draft = draft_for_tiny_policy(base_model_name_or_path=base)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolve(draft, policy=loaded(policies["a/p"], policy))
    assert ["was trained with" in str(one.message) for one in caught] == [True] * differs


def test_a_draft_saved_inside_its_policys_folder_fits_it(policies):
    """A run that started from a Hub id saves policy and draft together; the next one starts from both."""
    folder = policies["a/p"] / "draft"
    save_draft(draft_for_tiny_policy(), folder, base_model="org/start")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(folder, policy=loaded(policies["a/p"]))
    with pytest.warns(UserWarning, match="trained with 'org/start'"):
        resolve(folder, policy=loaded(policies["b/p"]))


# Another draft's checkpoint

SETTINGS = {
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "hidden_act": "gelu",
    "max_position_embeddings": 1024,
    "num_attention_heads": 2,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 80,
    "draft_vocab_size": 32,
    "has_own_embeddings": True,
}


@pytest.mark.parametrize(("name", "value"), SETTINGS.items())
def test_a_checkpoint_of_a_draft_with_other_settings_is_refused_by_name(tmp_path, name, value):
    flags = {"num_attention_heads": 4, "head_dim": 12}
    state = {"learner": {}}
    save_draft(
        draft_for_tiny_policy(**(flags | {name: value})), tmp_path / "draft", base_model="", training_state=state
    )
    draft = draft_for_tiny_policy(**flags)
    before = {key: tensor.clone() for key, tensor in draft.state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"has other settings than the one of this run: .*{name} is .* there and .* here"
    ):
        load_training_state(draft, tmp_path / "draft", like=state)
    assert all(torch.equal(tensor, before[key]) for key, tensor in draft.state_dict().items())


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_names_and_counts_that_mean_nothing_to_a_draft_may_differ(tmp_path, layout):
    saved = draft_for_tiny_policy(seed=1, num_speculative_tokens=5, eos_token_id=7)
    save_draft(saved, tmp_path / "draft", base_model="org/model", layout=layout)
    draft = draft_for_tiny_policy(num_speculative_tokens=2)
    load_weights_into(draft, tmp_path / "draft")
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), saved.parameters(), strict=True))
    assert (
        draft.config.num_speculative_tokens == 2 and load_draft(tmp_path / "draft").config.num_speculative_tokens == 5
    )


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"learner": {"num_steps": 1}}, r"lacks \['runs'\] and has \[\]"),
        ({"learner": {"num_steps": 1}, "runs": [], "ema": 1}, r"lacks \[\] and has \['ema'\]"),
        ({"learner": {}, "runs": []}, r"'learner' of .* lacks \['num_steps'\] and has \[\]"),
        ({"learner": {"num_steps": 1, "moment": 0}, "runs": []}, r"'learner' of .* lacks \[\] and has \['moment'\]"),
        ([1], "is a list, not a dict"),
    ],
)
def test_keys_of_a_training_state_that_are_missing_or_unknown_are_named(tmp_path, state, message):
    save_draft(tiny_draft(exact=False, seed=1), tmp_path / "draft", base_model="", training_state=state)
    draft = tiny_draft(exact=False)
    with pytest.raises(ValueError, match=message):
        load_training_state(draft, tmp_path / "draft", like={"learner": {"num_steps": 0}, "runs": []})
    assert torch.equal(draft.fc.weight, tiny_draft(exact=False).fc.weight)


def test_a_damaged_training_state_is_refused_by_name(tmp_path):
    save_draft(tiny_draft(exact=False), tmp_path / "draft", base_model="", training_state={"learner": {}})
    file = tmp_path / "draft" / "training_state.pt"
    for content in (b"", b"x", file.read_bytes()[:100]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"training_state\.pt cannot be read"):
            load_training_state(tiny_draft(exact=False), tmp_path / "draft", like={"learner": {}})
