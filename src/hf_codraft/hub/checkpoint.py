"""A draft on disk: the plain EAGLE-3 form that vLLM and SGLang load, written so that a kill loses nothing."""

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_codraft.drafts.eagle3 import Eagle3Draft, Eagle3DraftConfig
from hf_codraft.hub.card import is_hub_id, write_card
from hf_codraft.hub.folder import begin_folder, complete_folder, finish_folder
from hf_codraft.hub.speculators import from_speculators_config, is_speculators_config, to_speculators_config

WEIGHTS = "model.safetensors"
TRAINING_STATE = "training_state.pt"
_PARTS = {"learner", "updates"}  # of a training state, whose keys are checked too
_WITHOUT_MEANING = frozenset(  # fields of a config that change nothing of what a draft computes
    ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "base_model_name_or_path")
    + ("num_speculative_tokens", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache")
)


def plain_config(config: Eagle3DraftConfig) -> dict[str, Any]:
    """The `config.json` of a draft: RoPE both as `rope_parameters` and in the older `rope_theta` and `rope_scaling`."""
    data = config.to_dict()
    rope = dict(data.get("rope_parameters") or {})
    data["rope_theta"] = rope.pop("rope_theta", 10000.0)
    data["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return data


def save_draft(
    draft: Eagle3Draft,
    folder: str | Path,
    *,
    base_model: str,
    layout: str = "plain",
    training_state: dict[str, Any] | None = None,
) -> None:
    """Writes a draft's weights, config and card.

    Args:
        draft ([`Eagle3Draft`]): what to save, in the dtype that it has.
        folder (`str` or `Path`): replaced as a whole; a kill leaves the old one or the new one (or `.NAME.old`).
        base_model (`str`): the policy, named in config and card.
        layout (`str`): `"plain"` (`LlamaForCausalLMEagle3`, what vLLM and SGLang load) or `"speculators"`.
        training_state (`dict`, *optional*): saved beside the weights, for a resume.
    """
    if layout not in ("plain", "speculators"):
        raise ValueError(f"layout must be 'plain' or 'speculators', got {layout!r}.")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in draft.state_dict().items()}
    config = plain_config(draft.config) | {
        "dtype": str(draft.dtype).removeprefix("torch."),
        "base_model_name_or_path": base_model or None,
    }
    if layout == "speculators":
        config = to_speculators_config(draft.config, config, base_model)
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}

    folder = Path(folder)
    fresh = begin_folder(folder)
    (fresh / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(weights, fresh / WEIGHTS, metadata={"format": "pt"})
    if training_state is not None:
        torch.save(training_state, fresh / TRAINING_STATE)
    write_card(fresh, draft, base_model)
    finish_folder(folder)


def load_draft(source: str | Path, *, revision: str | None = None) -> Eagle3Draft:
    """Loads a draft from a folder or the Hub, in the plain or the speculators form, in fp32 for training.

    Raises:
        ValueError: if there is no draft there, it is of a kind that is not supported, or its weights do not fit its config or
            are not finite.
    """
    folder = _find(source, revision)
    if not (folder / "config.json").is_file():
        raise ValueError(f"draft={str(source)!r} has no config.json, so it is not a draft.")
    weights = _read_weights(folder)
    try:
        data = json.loads((folder / "config.json").read_text())
        config = _read_config(data, weights, str(source))
    except (TypeError, StrictDataclassError, json.JSONDecodeError) as error:
        raise ValueError(f"draft={str(source)!r} has a config.json that cannot be read: {error}") from error
    draft = Eagle3Draft(config).float()
    _load_weights(draft, weights, str(source))
    return draft


def _find(source: str | Path, revision: str | None) -> Path:
    """The folder of a draft; one of the Hub is fetched."""
    folder = complete_folder(Path(source))
    if folder != Path(source):
        warnings.warn(f"{source} was being replaced when a kill came; the draft before it is taken.", stacklevel=3)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(source).startswith("."):
        raise ValueError(f"draft={str(source)!r} is not a folder. Pass 'eagle3', a folder or a Hub id.")
    try:
        return Path(snapshot_download(str(source), revision=revision))
    except Exception as error:
        raise ValueError(
            f"draft={str(source)!r} is neither a family ('eagle3'), nor a folder, nor could it be fetched from the Hub: "
            f"{error}"
        ) from error


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file; convert the draft to safetensors first.")
    weights = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    weights[name.removeprefix("model.").replace("layers.0.", "midlayer.")] = opened.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}); fetch or save the draft again.") from error
    return weights


def _read_config(data: dict[str, Any], weights: dict[str, torch.Tensor], source: str) -> Eagle3DraftConfig:
    if is_speculators_config(data):
        data = from_speculators_config(data)
    elif not any("Eagle3" in name for name in data.get("architectures") or []):
        raise ValueError(
            f"draft={source!r} has architectures={data.get('architectures')}; an EAGLE-3 draft of the Llama kind is needed "
            "(LlamaForCausalLMEagle3, or speculators' eagle3)."
        )
    if data.get("model_type") != "llama":
        raise ValueError(
            f"draft={source!r} has model_type={data.get('model_type')!r}; only Llama-type drafts are supported."
        )
    eagle = data.pop("eagle_config", None) or {}
    for name in ("eagle_aux_hidden_state_layer_ids", "norm_before_fc"):
        if eagle.get(name) is not None:
            data[name] = eagle[name]
    if eagle.get("use_aux_hidden_state") is False:
        raise ValueError(
            f"draft={source!r} reads no auxiliary hidden states (EAGLE-1/2 style); that is not supported."
        )
    data["has_own_embeddings"] = "embed_tokens.weight" in weights
    data["num_aux_hidden_states"] = data.get("num_aux_hidden_states") or len(
        data.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    )
    if data.get("rope_parameters"):  # the older names beside it say the same, or what it leaves out
        theta = data.pop("rope_theta", None)
        if theta is not None:
            data["rope_parameters"] = {"rope_theta": theta, **data["rope_parameters"]}
        data.pop("rope_scaling", None)
    for name in ("architectures", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings"):
        data.pop(name, None)
    return Eagle3DraftConfig(**data)


@torch.no_grad()
def _load_weights(draft: Eagle3Draft, weights: dict[str, torch.Tensor], source: str) -> None:
    own = draft.state_dict()
    if not draft.has_reduced_vocab:
        weights = {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d")}
    elif "t2d" not in weights and "d2t" in weights and weights["d2t"].any():
        weights = {**weights, "t2d": torch.zeros_like(draft.t2d)}  # follows from d2t
    missing, unexpected = own.keys() - weights.keys(), weights.keys() - own.keys()
    if missing or unexpected:
        raise ValueError(
            f"draft={source!r} does not fit its own config: missing weights {sorted(missing)}, unknown ones "
            f"{sorted(unexpected)}."
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"draft={source!r} does not fit its own config: {name} has the shape {tuple(tensor.shape)}, and the config "
                f"makes it {tuple(own[name].shape)}."
            )
        if name not in ("d2t", "t2d") and not tensor.is_floating_point():
            raise ValueError(f"draft={source!r} has {name} in {tensor.dtype}; a quantized draft cannot be trained.")
    if draft.has_reduced_vocab:
        draft.d2t, draft.t2d = weights.pop("d2t"), weights.pop("t2d").bool()
        draft.check_vocabulary()
        draft.d2t = draft.d2t.long()
    draft.load_state_dict(weights, strict=False)
    check_finite(draft, source)


def check_finite(draft: Eagle3Draft, source: str) -> None:
    """Raises a `ValueError` that names the first weight of a draft with a value that is not finite."""
    for name, parameter in draft.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(
                f"draft={source!r} has values that are not finite in {name} ({int((~parameter.isfinite()).sum())} of "
                f"{parameter.numel()}); take an earlier checkpoint of it."
            )


def differs_from_base(config: Eagle3DraftConfig, policy: str, source: str | Path | None = None) -> bool:
    """Whether a draft names another policy than this one as the one that it was trained with.

    Args:
        config ([`Eagle3DraftConfig`]): of the draft.
        policy (`str`): name of the policy, a Hub id or a folder.
        source (`str` or `Path`, *optional*): where the draft comes from; one inside the policy's folder was saved with it.
    """
    base = config.base_model_name_or_path
    if not base or not policy or base == policy:
        return False
    if os.path.isdir(policy) and source is not None and Path(policy).resolve() in Path(source).resolve().parents:
        return False
    if os.path.isdir(base) and os.path.isdir(policy):
        return not os.path.samefile(base, policy)
    if is_hub_id(base) and is_hub_id(policy):
        return True
    return Path(base).name != Path(policy).name  # a copy of the one in the folder of the other


@torch.no_grad()
def load_training_state(draft: Eagle3Draft, folder: Path, *, like: dict[str, Any]) -> dict[str, Any]:
    """Puts a checkpoint's weights into the draft, in place, and returns its training state.

    Args:
        draft ([`Eagle3Draft`]): the draft of the run that resumes.
        folder (`Path`): the draft in the checkpoint.
        like (`dict`): the training state of the run that resumes, whose keys the saved one must have.

    Raises:
        ValueError: if there is none, if it is that of a draft with other settings or has other keys.
    """
    folder = complete_folder(folder)
    if not (folder / TRAINING_STATE).is_file():
        raise ValueError(
            f"{folder} has no draft to resume; was the checkpoint written with draft=None, or killed while being written? "
            "Resume from another one, or start anew with draft= its folder."
        )
    state = read_training_state(folder)
    _check_keys(state, like, f"the training state in {folder}")
    load_weights_into(draft, folder)
    return state


def read_training_state(folder: Path, *, mmap: bool = False) -> dict[str, Any]:
    """What lies beside a draft's weights in a checkpoint; with `mmap` its tensors stay on disk until they are used."""
    try:
        return torch.load(folder / TRAINING_STATE, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder / TRAINING_STATE} cannot be read ({error}); resume from another one.") from error


def _check_keys(state: Any, like: dict[str, Any], what: str) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"{what} is a {type(state).__name__}, not a dict; it was written by another program.")
    missing, unknown = sorted(like.keys() - state.keys()), sorted(map(str, state.keys() - like.keys()))
    if missing or unknown:
        raise ValueError(
            f"{what} lacks {missing} and has {unknown}, which this version of hf-codraft does not know. Resume with the version "
            "that wrote it, or start anew with draft= its folder."
        )
    for name in _PARTS & like.keys():
        _check_keys(state[name], like[name], f"{name!r} of {what}")


def load_weights_into(draft: Eagle3Draft, folder: Path) -> None:
    """Puts a saved draft's weights into one of the same settings, in place.

    Raises:
        ValueError: if the saved draft has other settings, or its vocabulary was never chosen.
    """
    saved = load_draft(folder)
    ours, theirs = (json.loads(json.dumps(config.to_dict())) for config in (draft.config, saved.config))
    differing = sorted(
        name for name in (ours.keys() | theirs.keys()) - _WITHOUT_MEANING if ours.get(name) != theirs.get(name)
    )
    if differing:
        listed = "; ".join(f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in differing)
        raise ValueError(
            f"the draft in {folder} has other settings than the one of this run: {listed}. Make the trainer with the settings "
            f"of the run that wrote it, or with draft={str(folder)!r}."
        )
    if saved.is_vocab_open:
        raise ValueError(f"the draft in {folder} was saved before its vocabulary was chosen; start anew.")
    draft.load_state_dict(saved.state_dict())


def push_draft(folder: Path, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
    """Uploads a saved draft folder; returns the address of the commit.

    Raises:
        RuntimeError: if it could not be uploaded; nothing local is lost.
    """
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with the user's name
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload draft", ignore_patterns=[TRAINING_STATE]
        )
    except Exception as error:  # whatever it was, nothing local is lost and the way on is the same
        raise RuntimeError(
            f"the draft could not be pushed to {repo_id!r} ({type(error).__name__}: {error}). It is saved in {folder}; log in "
            f"with `hf auth login` or check the network, then run `hf upload {repo_id} {folder}`."
        ) from error
    return commit.commit_url
