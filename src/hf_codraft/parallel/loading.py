"""Reads one pipeline stage from a checkpoint folder without ever holding the whole model."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, rename_source_key
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import GENERATION_CONFIG_NAME

from hf_codraft.hub.folder import recover_folder
from hf_codraft.parallel.stages import PolicyStage, StagePlan, check_splittable, placeholders

EMBEDDING_KEY, HEAD_KEY = "model.embed_tokens.weight", "lm_head.weight"


def load_stage(
    folder: str | Path,
    plan: StagePlan,
    stage: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attn_implementation: str | None = None,
) -> PolicyStage:
    """One stage of the causal LM that `save_pretrained` put into `folder`.

    The model is laid out on the meta device and only this stage's tensors are read, so that memory holds its share alone.
    transformers' own conversion runs on them: expert weights of Qwen3-MoE are stored one by one and used fused, which needs
    memory for about two layers' experts more at a time.

    Args:
        folder (`str` or `Path`): with `config.json` and safetensors weights, in one file or several with an index. Where a
            kill during [`save_pretrained_stages`] has left it aside, it is put back first.
        plan ([`StagePlan`]): the cut.
        stage (`int`): which stage.
        dtype (`torch.dtype`, *optional*): of the parameters; by default the checkpoint's, as its config says.
        device (`torch.device`, *optional*): where parameters go.
        attn_implementation (`str`, *optional*): as in `from_pretrained`.

    Raises:
        ValueError: if the model can't be split, or tensors are missing or of another shape; they are listed.
    """
    if not 0 <= stage < plan.num_stages:
        raise ValueError(f"stage ({stage}) must lie in 0..{plan.num_stages - 1}.")
    folder = Path(folder)
    recover_folder(folder)
    files = _files_by_key(folder)  # first, so that a wrong folder is named before transformers looks for a model
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype or torch.float32, attn_implementation=attn_implementation
        )
    if (folder / GENERATION_CONFIG_NAME).is_file():  # from_config made one out of the model's config
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    anatomy = check_splittable(model, plan)
    for name, module in placeholders(anatomy, plan, stage).items():
        model.set_submodule(name, module)
    _read_parameters(model, files, folder, device=device)
    # Buffers that are not stored are computed from the config; under meta they had nowhere to be computed.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    if plan.num_stages == 1:
        model.tie_weights()
    _check_complete(model, folder, stage)
    return PolicyStage(model.eval(), plan, stage)  # as from_pretrained leaves a model


def _files_by_key(folder: Path) -> dict[str, Path]:
    """The safetensors file of every stored tensor.

    Raises:
        ValueError: if the folder has no safetensors weights, or its index names a file that is not there.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if not index.is_file():
        raise ValueError(
            f"folder ({folder}) has neither {single.name} nor {index.name}; save the model there with save_pretrained."
        )
    files = {key: folder / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise ValueError(f"folder ({folder}) lacks {missing}, which {index.name} names; the download is incomplete.")
    return files


def _needed_keys(model: PreTrainedModel, files: dict[str, Path], weight_mapping: list) -> dict[str, str]:
    """Stored keys that this stage's parameters are made of, each with the key it is read under."""
    state = model.state_dict()
    renamings = [entry for entry in weight_mapping if not hasattr(entry, "operations")]
    converters = [entry for entry in weight_mapping if hasattr(entry, "operations")]
    needed = {}
    for key in files:
        target, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target in state:
            needed[key] = key
    # A tied checkpoint stores the shared weight once, under the embeddings' name.
    if HEAD_KEY in state and HEAD_KEY not in needed and model.config.tie_word_embeddings and EMBEDDING_KEY in files:
        needed[HEAD_KEY] = EMBEDDING_KEY
    return needed


@contextmanager
def _one_tensor_after_another() -> Iterator[None]:
    """Keeps transformers from reading ahead in threads.

    They would read all experts before the first are fused. What is freed then, piece by piece, is too small to hold those of
    a whole layer, so that allocators ended at twice the stage's share.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"  # there is no argument for it
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _read_parameters(
    model: PreTrainedModel, files: dict[str, Path], folder: Path, *, device: torch.device | str
) -> None:
    weight_mapping = get_model_conversion_mapping(model)
    needed = _needed_keys(model, files, weight_mapping)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        slices = {}
        for name, key in needed.items():
            path = files[key]
            if path not in opened:
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            slices[name] = opened[path].get_slice(key)  # nothing is read yet
        load_config = LoadStateDictConfig(
            dtype=model.dtype, weight_mapping=weight_mapping, device_map={"": torch.device(device)}
        )
        with _one_tensor_after_another():
            info, _ = convert_and_load_state_dict_in_model(model, slices, load_config)
    if info.mismatched_keys or info.conversion_errors:
        raise ValueError(
            f"folder ({folder}) has tensors that don't fit its config: "
            f"{sorted(info.mismatched_keys)} {info.conversion_errors}"
        )


def _check_complete(model: nn.Module, folder: Path, stage: int) -> None:
    """Whatever is still on the meta device was not found."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    missing = sorted(name for name, tensor in tensors if tensor.is_meta)
    if missing:
        raise ValueError(
            f"folder ({folder}) lacks {len(missing)} tensors of stage {stage}: {', '.join(missing[:20])}"
            f"{', ...' if len(missing) > 20 else ''}."
        )
