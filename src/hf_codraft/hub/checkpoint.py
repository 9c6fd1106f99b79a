"""A draft on disk: the plain EAGLE-3 form that vLLM and SGLang load, written so that a kill loses nothing."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from httpx import HTTPError
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_codraft.drafts.eagle3 import Eagle3Draft, Eagle3DraftConfig
from hf_codraft.drafts.vocabulary import kept_mask
from hf_codraft.hub.card import write_card
from hf_codraft.hub.folder import begin_folder, finish_folder
from hf_codraft.hub.speculators import from_speculators_config, is_speculators_config, to_speculators_config

WEIGHTS = "model.safetensors"
TRAINING_STATE = "training_state.pt"
TRAINER_STATE = "trainer_state.json"  # transformers writes it last


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
    config = plain_config(draft.config) | {"dtype": str(draft.dtype).removeprefix("torch.")}
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
        ValueError: if there is no draft there, or it is of a kind that is not supported.
    """
    folder = Path(source)
    if not folder.is_dir():
        if folder.is_absolute() or str(source).startswith("."):
            raise ValueError(f"draft={str(source)!r} is not a folder. Pass 'eagle3', a folder or a Hub id.")
        try:
            folder = Path(snapshot_download(str(source), revision=revision))
        except Exception as error:
            raise ValueError(
                f"draft={str(source)!r} is neither a family ('eagle3'), nor a folder, nor could it be fetched from the Hub: "
                f"{error}"
            ) from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"draft={str(source)!r} has no config.json, so it is not a draft.")
    data = json.loads((folder / "config.json").read_text())
    weights = _read_weights(folder)
    draft = Eagle3Draft(_read_config(data, weights, str(source))).float()
    _load_weights(draft, weights, str(source))
    return draft


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors file; convert the draft to safetensors first.")
    weights = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                weights[name.removeprefix("model.").replace("layers.0.", "midlayer.")] = opened.get_tensor(name)
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
    if data.get("rope_parameters"):  # the older names beside it say the same
        data.pop("rope_theta", None)
        data.pop("rope_scaling", None)
    for name in ("architectures", "torch_dtype", "dtype", "transformers_version", "tie_word_embeddings"):
        data.pop(name, None)
    return Eagle3DraftConfig(**data)


def _load_weights(draft: Eagle3Draft, weights: dict[str, torch.Tensor], source: str) -> None:
    if draft.has_reduced_vocab and "d2t" in weights:
        draft.d2t.copy_(weights["d2t"])
        draft.check_vocabulary()
        weights = {**weights, "t2d": kept_mask(draft.kept_ids, draft.config.vocab_size)}
    elif not draft.has_reduced_vocab:
        weights = {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d")}
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"draft={source!r} does not fit its own config: missing weights {sorted(missing)}, unknown ones "
            f"{sorted(unexpected)}."
        )


@torch.no_grad()
def load_training_state(draft: Eagle3Draft, folder: Path) -> dict[str, Any]:
    """Puts a checkpoint's weights into the draft, in place, and returns its training state."""
    if not (folder / TRAINING_STATE).is_file():
        raise ValueError(
            f"{folder} has no draft to resume; was the checkpoint written with draft=None, or killed while being written? "
            "Resume from another one, or start anew with draft= its folder."
        )
    saved = load_draft(folder)
    draft.load_state_dict(saved.state_dict())
    return torch.load(folder / TRAINING_STATE, map_location="cpu", weights_only=True)


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The newest `checkpoint-N` that was written to its end, draft included; `None` where there is none."""
    numbered = sorted(
        (int(folder.name.split("-")[-1]), folder)
        for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if folder.name.split("-")[-1].isdigit()
    )
    for _, folder in reversed(numbered):
        if _is_complete(folder):
            return str(folder)
        warnings.warn(f"{folder} was not written to its end; an older checkpoint is taken.", stacklevel=3)
    return None


def _is_complete(folder: Path) -> bool:
    if not (folder / "draft" / TRAINING_STATE).is_file():
        return False
    try:
        json.loads((folder / TRAINER_STATE).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True


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
    except (HTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise RuntimeError(
            f"the draft could not be pushed to {repo_id!r} ({type(error).__name__}: {error}). It is saved in {folder}; log in "
            f"with `hf auth login` or check the network, then run `hf upload {repo_id} {folder}`."
        ) from error
    return commit.commit_url
