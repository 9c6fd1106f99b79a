"""What cannot work is refused when the trainer is made, with the name of the argument and the way out."""

import os
import sys
import warnings

import pytest
import tiny
import trl.generation.vllm_generation as trl_engine
from fixed_rollouts import FixedCoDraftGRPOTrainer, codraft, settings
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, ProcessorMixin, XGLMConfig
from trl import GRPOConfig

from hf_codraft import CoDraftGRPOConfig, Eagle3Draft, Eagle3DraftConfig, _compat, save_draft
from hf_codraft.serving.sampling import REFUSED


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    """An engine that starts is a refusal that came too late; what it would leave behind is undone."""
    monkeypatch.setattr(trl_engine, "LLM", lambda **kwargs: pytest.fail("an engine was started"))
    monkeypatch.setattr("hf_codraft.serving.engine.repair_sampling", lambda: None)
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)


def draft(**changes) -> Eagle3Draft:
    config = dict(
        vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=128, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, max_position_embeddings=512, eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )  # fmt: skip
    return Eagle3Draft(Eagle3DraftConfig(**config | changes))


# Settings that stand alone

BAD_VALUES = [
    ("num_speculative_tokens", 0),
    ("num_speculative_tokens", -1),
    ("draft_sample_method", "random"),
    ("draft_loss_type", "mse"),
    ("draft_learning_rate", -1e-3),
    ("draft_learning_rate", float("nan")),
    ("draft_learning_rate", float("inf")),
    ("draft_lr_warmup_steps", -1),
    ("draft_weight_decay", -0.1),
    ("draft_max_grad_norm", -1.0),
    ("draft_teacher_temperature", "hot"),
    ("draft_teacher_temperature", "0"),
    ("draft_teacher_temperature", "-1"),
    ("draft_teacher_temperature", "nan"),
    ("draft_teacher_temperature", "inf"),
    ("draft_update_every", 0),
    ("draft_warmup_rollouts", -1),
    ("draft_warmup_epochs", 0),
    ("draft_warmup_batch_size", 0),
    ("draft_warmup_learning_rate", -1.0),
    ("draft_loss_chunk_size", 0),
    ("rollout_dtype", "fp8"),
    ("check_rollouts_every", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_value_out_of_range_is_named(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"{name} .*{value}"):
        CoDraftGRPOConfig(**settings(tmp_path, **{name: value}))


@pytest.mark.parametrize(("asked", "got"), [(0.3, 0.3), (1e-6, 1.0), (0.0, 1.0), (1e-3, 1e-2)])
def test_teacher_has_the_temperature_that_rollouts_have(tmp_path, asked, got):
    """vLLM is greedy below 1e-5 and raises what is below 1e-2."""
    args = CoDraftGRPOConfig(**settings(tmp_path, temperature=0.8, generation_kwargs={"temperature": asked}))
    assert args.draft_temperature == got


@pytest.mark.parametrize("value", ["rollout", "1", "0.7", 0.7, 2])
def test_teacher_temperature_is_read_as_a_number_or_the_rollouts(tmp_path, value):
    args = CoDraftGRPOConfig(**settings(tmp_path, temperature=0.4, draft_teacher_temperature=value))
    assert args.draft_temperature == (0.4 if value == "rollout" else float(value))


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([1.0, 0.5], r"ttt_pass_weights has 2 weights, but .* 3 passes"),
        ([1.0, 0.5, -0.1], "none negative"),
        ([1.0, 0.5, float("nan")], "finite"),
        ([1.0, 0.5, float("inf")], "finite"),
        ([0.0, 0.0, 0.0], "one above 0"),
        ([], "has 0 weights"),
    ],
    ids=str,
)
def test_pass_weights_must_be_one_a_pass(tmp_path, weights, match):
    with pytest.raises(ValueError, match=match):
        CoDraftGRPOConfig(**settings(tmp_path, ttt_pass_weights=weights))
    CoDraftGRPOConfig(**settings(tmp_path, ttt_pass_weights=[1.0, 0.5], num_speculative_tokens=2))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(draft_lr_scheduler_type="sometimes"), "draft_lr_scheduler_type cannot be 'sometimes'"),
        (dict(draft_lr_scheduler_type="greedy"), "'greedy', since it follows a metric"),
        (dict(draft_lr_scheduler_type="reduce_lr_on_plateau"), "since it follows a metric"),
        (dict(draft_lr_scheduler_type="cosine_with_min_lr"), "draft_lr_scheduler_kwargs.*min_lr"),
        (dict(draft_lr_scheduler_type="warmup_stable_decay"), "draft_lr_scheduler_kwargs.*num_decay_steps"),
        (dict(draft_lr_scheduler_type="cosine", draft_lr_scheduler_kwargs={"lr_end": 0.0}), "kwargs.*lr_end"),
        (dict(draft_lr_scheduler_type="polynomial", draft_lr_scheduler_kwargs={"lr_end": 1.0}), "kwargs.*lr_end"),
        (dict(draft_lr_scheduler_kwargs={"power": 2.0}), "draft_lr_scheduler_kwargs must be empty"),
        (
            dict(draft_lr_scheduler_type="linear", draft_lr_warmup_steps=12),
            r"draft_lr_warmup_steps \(12\) must be below",
        ),
        (
            dict(draft_lr_scheduler_type="linear", draft_lr_warmup_steps=8, draft_update_every=2),
            r"draft_lr_warmup_steps \(8\) must be below the number of steps of the draft \(2\)",
        ),
    ],
    ids=str,
)
def test_schedule_that_cannot_be_is_refused(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        CoDraftGRPOConfig(**settings(tmp_path, **changes))


# With and without a draft


def test_speculation_without_draft_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_speculative_tokens=3 needs a draft"):
        codraft(tmp_path, draft=None, num_speculative_tokens=3)


def test_draft_settings_without_draft_warn_with_their_names(tmp_path):
    with pytest.warns(UserWarning, match=r"no effect: \['draft_loss_type', 'freeze_draft'\]"):
        codraft(tmp_path, draft=None, draft_loss_type="tv", freeze_draft=True)


def test_no_warning_without_draft_and_without_its_settings(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message=".*draft")
        codraft(tmp_path, draft=None)


def test_draft_without_vllm_warns_and_trains(tmp_path):
    with pytest.warns(UserWarning, match="use_vllm=False: the draft is trained, but nothing speculates"):
        trainer = FixedCoDraftGRPOTrainer(
            tiny.policy(num_hidden_layers=4), tiny.reward, CoDraftGRPOConfig(**settings(tmp_path, max_steps=1)),
            train_dataset=tiny.prompts(), processing_class=tiny.tokenizer(), draft="eagle3",
        )  # fmt: skip
    trainer.train()
    assert trainer.learner.num_steps == 1


def test_settings_of_plain_grpo_are_refused_as_args(tmp_path):
    with pytest.raises(ValueError, match="args must be a CoDraftGRPOConfig"):
        FixedCoDraftGRPOTrainer(tiny.policy(), tiny.reward, GRPOConfig(**settings(tmp_path)), draft="eagle3")


@pytest.mark.parametrize("draft", [None, "eagle3"])
def test_engine_made_of_the_trainers_own_classes_is_refused(tmp_path, draft):
    with pytest.raises(ValueError, match=r"vllm_model_impl='transformers' .*the trainer's own forward then fails"):
        codraft(tmp_path, draft=draft, use_vllm=True, vllm_mode="colocate", vllm_model_impl="transformers")


# Speculation that the engine cannot do right

UNSUITABLE = {
    "min_p": (dict(min_p=0.1), "^min_p=0.1 .*rejects it under speculation"),
    "regex": (
        dict(vllm_structured_outputs_regex="[a-z]+"),
        r"^vllm_structured_outputs_regex=.*'\[a-z\]\+'.* .*grammar",
    ),
    "server": (dict(vllm_mode="server"), "vllm_mode='server' cannot serve a co-trained draft yet"),
    "value": (
        dict(generation_kwargs={"top_p": 1.5}),
        r"vLLM rejects the sampling options .*top_p must be in \(0, 1\]",
    ),
    "value of TRL's field": (dict(temperature=3.0), "vLLM rejects the sampling options .*temperature must be in"),
    "type": (dict(generation_kwargs={"stop_token_ids": 5}), "vLLM rejects the sampling options"),
    "pair": (dict(generation_kwargs={"stop": "x", "detokenize": False}), "vLLM rejects .*detokenize"),
    "plain dict": (
        dict(generation_kwargs={"repetition_detection": {"min_count": 3}}),
        "must be a vllm.*DetectionParams",
    ),
}
VALUES = {
    "min_p": 0.05,
    "logit_bias": {5: 1.0},
    "structured_outputs": {"regex": "a+"},
    "seed": 0,
    "min_tokens": 2,
    "thinking_token_budget": 0,
    "trace_decode_token_ids": [3, 4],
    "n": 2,
    "logprobs": 5,
    "prompt_logprob_token_ids": [5],
    "prompt_logprob_start": 0,
    "logprob_token_ids": [5],
    "flat_logprobs": True,
    "output_text_buffer_length": 3,
}
# None of vLLM's options: TRL would fail at its first rollout.
UNKNOWN = (
    "guided_decoding",
    "logits_processors",
    "num_beams",
    "posterior_threshold",
    "rejection_sample_method",
    "_eos_token_id",
)
UNSUITABLE |= {
    f"generation_kwargs {name}": (
        dict(generation_kwargs={name: value}), rf"generation_kwargs\['{name}'\]=.*cannot be used with a draft",
    )
    for name, value in (VALUES | dict.fromkeys(UNKNOWN, 1)).items()
}  # fmt: skip


def test_every_refused_sampling_option_is_tried():
    assert VALUES.keys() == REFUSED.keys()


@pytest.mark.parametrize(("changes", "message"), UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_setting_that_speculation_cannot_serve_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        codraft(tmp_path, use_vllm=True, **dict(vllm_mode="colocate") | changes)


@pytest.mark.parametrize(
    "harmless",
    [{"n": 1, "seed": -1, "logprobs": 0}, {"min_p": 0.0, "logit_bias": None, "min_tokens": 0}, {"stop": ["x"]}],
    ids=str,
)
def test_harmless_sampling_option_passes(tmp_path, harmless):
    with pytest.raises(pytest.fail.Exception, match="an engine was started"):
        codraft(tmp_path, use_vllm=True, vllm_mode="colocate", generation_kwargs=harmless)


def test_sampling_options_of_plain_rollouts_are_left_alone(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="an engine was started"):
        codraft(tmp_path, draft=None, use_vllm=True, vllm_mode="colocate", min_p=0.1, generation_kwargs={"n": 2})


# A policy that the engine cannot draft for

POLICIES = {
    "no interface": (Gemma2Config, "Gemma2ForCausalLM has no EAGLE-3 interface"),
    "no interface either": (GraniteConfig, "GraniteForCausalLM has no EAGLE-3 interface"),
    "unknown": (XGLMConfig, "XGLMForCausalLM is unknown to vLLM"),
}


@pytest.mark.parametrize("is_path", [False, True], ids=["model", "path"])
@pytest.mark.parametrize(("kind", "message"), POLICIES.values(), ids=POLICIES.keys())
def test_policy_that_the_engine_cannot_draft_for_is_refused(tmp_path, kind, message, is_path):
    sizes = dict(
        vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    sizes = (
        dict(vocab_size=tiny.VOCAB, d_model=64, num_layers=4, attention_heads=4, ffn_dim=64)
        if kind is XGLMConfig
        else sizes
    )
    policy = AutoModelForCausalLM.from_config(kind(**sizes, pad_token_id=0, bos_token_id=2, eos_token_id=1))
    if is_path:
        policy = tiny.save(policy, tmp_path / "policy")
    with pytest.raises(ValueError, match=message):
        codraft(tmp_path, model=policy, use_vllm=True, vllm_mode="colocate")


# A draft that does not fit

UNFIT = {
    "hidden size": (lambda: draft(hidden_size=96), "hidden states of size 96, but the policy's are 64"),
    "vocabulary": (lambda: draft(vocab_size=512), "vocabulary of 512, but the policy's is 256"),
    "its taps": (lambda: draft(eagle_aux_hidden_state_layer_ids=[1, 2, 5]), r"must lie in 0\.\.4.*got 5"),
    "order of its taps": (lambda: draft(eagle_aux_hidden_state_layer_ids=[2, 1, 3]), "must ascend"),
    "type": (lambda: 5, "draft must be one of .*int"),
    "missing folder": (lambda: "/no/such/folder", "'/no/such/folder' is not a folder"),
    "unknown name": (lambda: "eagle7", "neither a family .* nor a folder, nor could it be fetched"),
}


@pytest.mark.parametrize("use_vllm", [False, True], ids=["without vllm", "vllm"])
@pytest.mark.parametrize(("make", "message"), UNFIT.values(), ids=UNFIT.keys())
def test_draft_that_does_not_fit_is_refused(tmp_path, monkeypatch, make, message, use_vllm):
    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("hf_codraft.hub.checkpoint.snapshot_download", no_network)
    with pytest.raises(ValueError, match=message):
        codraft(tmp_path, draft=make(), use_vllm=use_vllm, vllm_mode="colocate")


def test_folder_of_another_model_is_refused_as_a_draft(tmp_path):
    policy = tiny.save(tiny.policy("qwen3", num_hidden_layers=4), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"architectures=\['Qwen3ForCausalLM'\]"):
        codraft(tmp_path, draft=policy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(draft_vocab_size=64), r"draft_vocab_size \(64\) is below .*256.* set draft_warmup_rollouts"),
        (dict(draft_vocab_size=512), r"draft_vocab_size \(512\) must be in 1\.\.256"),
        (dict(draft_vocab_size=-1), r"draft_vocab_size \(-1\) must be in 1\.\.256"),
        (dict(draft_tap_layers=[1, 2, 9]), r"draft_tap_layers \(\[1, 2, 9\]\) must lie in 0\.\.4.*got 9"),
        (dict(draft_tap_layers=[3, 1, 2]), r"draft_tap_layers \(\[3, 1, 2\]\) must ascend, .* Pass \[1, 2, 3\]"),
        (dict(draft_tap_layers=[1, 2, 2]), r"draft_tap_layers \(\[1, 2, 2\]\) must ascend, each id once"),
        (dict(draft_tap_layers=[-1, 2]), r"must lie in 0\.\.4.*got -1"),
    ],
)
@pytest.mark.parametrize("use_vllm", [False, True], ids=["without vllm", "vllm"])
def test_fresh_draft_that_cannot_be_made_is_refused(tmp_path, changes, message, use_vllm):
    with pytest.raises(ValueError, match=message):
        codraft(tmp_path, use_vllm=use_vllm, vllm_mode="colocate", **changes)


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_fresh_draft_of_a_shallow_policy_has_taps_that_the_engine_keeps_apart(tmp_path, num_layers):
    tap_ids = codraft(tmp_path, model=tiny.policy(num_hidden_layers=num_layers)).draft.tap_ids
    assert list(tap_ids) == sorted(set(tap_ids))
    assert len(tap_ids) == min(num_layers, 3)


def test_settings_of_a_fresh_draft_warn_beside_one_that_exists(tmp_path):
    save_draft(draft(), tmp_path / "saved", base_model="x")
    with pytest.warns(UserWarning, match="draft_tap_layers has no effect on a draft that exists"):
        codraft(tmp_path, draft=str(tmp_path / "saved"), draft_tap_layers=[0, 1, 2])


def test_multimodal_policy_is_refused(tmp_path):
    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match="text-only policy"):
        args = CoDraftGRPOConfig(**settings(tmp_path))
        FixedCoDraftGRPOTrainer(tiny.policy(), tiny.reward, args, processing_class=Processor(), draft="eagle3")


# What is installed


@pytest.mark.parametrize("package", ["trl", "transformers", "accelerate", "vllm"])
@pytest.mark.parametrize("supported", [("99.0", "100.0"), ("0.0", "0.1")], ids=["too old", "too new"])
def test_unsupported_version_is_refused_with_the_range(tmp_path, monkeypatch, package, supported):
    monkeypatch.setitem(_compat.SUPPORTED, package, supported)
    message = rf"{package} \S+ is not supported: .*{package}>={supported[0]},<{supported[1]}"
    with pytest.raises(ImportError, match=message):
        codraft(tmp_path, use_vllm=True, vllm_mode="colocate")


def test_version_of_vllm_does_not_matter_without_it(tmp_path, monkeypatch):
    monkeypatch.setitem(_compat.SUPPORTED, "vllm", ("99.0", "100.0"))
    codraft(tmp_path)


def test_missing_vllm_is_an_import_error_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"vllm is not installed; .*hf-codraft\[vllm\]"):
        codraft(tmp_path, use_vllm=True, vllm_mode="colocate")
