"""Checkpoints of a pipeline-split policy: each stage writes its own part, none ever holds the whole.

Folders are shared by all ranks (one host, or a network file system). They are written beside their final place and
renamed when all parts are there, so that a kill leaves the last complete one.
"""

import copy
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from hf_codraft.hub.folder import begin_folder, finish_folder, fresh_folder, recover_folder
from hf_codraft.parallel.loading import EMBEDDING_KEY, HEAD_KEY
from hf_codraft.parallel.stages import PolicyStage
from hf_codraft.parallel.weights import plain_weights
from hf_codraft.policy.anatomy import unwrap_peft

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
COMMON_STATE = "training_state.pt"

T = TypeVar("T")


# Writing together


def together(group: dist.ProcessGroup | None, purpose: str, action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank of `group` and returns what each made; where one fails, all raise.

    Raises:
        RuntimeError: names the ranks of the job that failed, and why; a failing rank raises its own error.
        DistError: (a `RuntimeError`) if another rank could not be waited for: it died, or took too long.
    """
    if group is None:
        return [action()]
    rank = dist.get_rank(group)
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is: the others must hear of it, or they would wait for this rank
        failure = error
    reports: list = [None] * group.size()
    report = (result, None if failure is None else f"{type(failure).__name__}: {failure}")
    try:
        dist.all_gather_object(reports, report, group=group)
    except RuntimeError as error:
        # One class for every backend, apart from the errors of ranks that live and could not write.
        raise dist.DistError(f"rank {rank} of {group.size()} waited for the others to {purpose}: {error}") from error
    if failure is not None:
        raise failure
    problems = [
        f"rank {dist.get_global_rank(group, other)}: {problem}"
        for other, (_, problem) in enumerate(reports)
        if problem is not None
    ]
    if problems:
        raise RuntimeError(f"could not {purpose}: {'; '.join(problems)}")
    return [result for result, _ in reports]


def _is_lead(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0


def _write_together(
    folder: Path,
    group: dist.ProcessGroup | None,
    write_part: Callable[[Path], T],
    finish: Callable[[Path, list[T]], None],
) -> None:
    """`write_part(fresh)` on all ranks, `finish(fresh, parts)` on the first, then `fresh` takes the place of `folder`."""
    lead, fresh = _is_lead(group), fresh_folder(folder)
    together(group, f"make {fresh}", lambda: begin_folder(folder) if lead else None)

    def write() -> T:
        if not fresh.is_dir():
            raise FileNotFoundError(
                f"{fresh}, made by the first rank, is not seen here; checkpoints need a folder that all ranks share."
            )
        return write_part(fresh)

    def complete() -> None:
        finish(fresh, parts)
        finish_folder(folder)

    try:
        parts = together(group, f"write {folder}", write)
        together(group, f"complete {folder}", lambda: complete() if lead else None)
    except Exception:
        if lead:  # the disk may be full
            shutil.rmtree(fresh, ignore_errors=True)
        raise


# Models


@dataclass(frozen=True)
class _Shard:
    """A file that a stage has written; made by `_write_stage`, read by `_join_stages` on the first rank."""

    stage: int
    file: str
    names: tuple[str, ...]
    num_bytes: int
    num_parameters: int


def save_pretrained_stages(
    stages: Sequence[PolicyStage],
    group: dist.ProcessGroup | None,
    folder: str | Path,
    *,
    merge_adapters: bool = False,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Saves a pipeline as one checkpoint that `from_pretrained` loads; to be called by all ranks of one pipeline.

    Each stage writes its own safetensors files; index, config and generation config follow. The head of a tied model is
    not written. A PEFT model is saved as one adapter that PEFT loads on the unsplit model.

    A kill leaves the last complete checkpoint. If it falls between the two renames at the end, that one lies beside its place
    as `.NAME.old`; [`load_stage`], and the next save, put it back. Before `from_pretrained`, rename it.

    Args:
        stages (sequence of [`PolicyStage`]): this rank's.
        group (`dist.ProcessGroup`, *optional*): the ranks of one pipeline; `None` for one rank.
        folder (`str` or `Path`): replaced as a whole.
        merge_adapters (`bool`): save the model with LoRA merged into its weights, instead of the adapter. The live model
            stays as it is.
        max_shard_bytes (`int`): of one file; a rank needs memory for one (under `merge_adapters`).

    Raises:
        RuntimeError: on the ranks that could have written, if another one could not; the failing rank raises its own
            error. What was in `folder` stays.
        ValueError: if an adapter can't be merged.
    """
    folder = Path(folder)
    if any(hasattr(stage.model, "peft_config") for stage in stages) and not merge_adapters:
        _write_together(folder, group, lambda fresh: _write_adapters(stages, fresh), _join_adapters)
    else:

        def write(fresh: Path) -> list[_Shard]:
            if not stages:  # raised in here, where the other ranks hear of it
                raise ValueError("stages is empty; pass this rank's PolicyStages.")
            return [shard for stage in stages for shard in _write_stage(stage, fresh, max_shard_bytes)]

        _write_together(folder, group, write, _join_stages)


def _write_stage(stage: PolicyStage, fresh: Path, max_shard_bytes: int) -> list[_Shard]:
    """Writes one stage, a shard in memory at a time; transformers' `save_pretrained` writes on the first rank alone."""
    model = unwrap_peft(stage.model)
    shards: list[_Shard] = []
    tensors: dict[str, torch.Tensor] = {}

    def flush() -> None:
        shard = _Shard(
            stage.stage,
            f"stage-{stage.stage}-{len(shards)}.safetensors",
            tuple(tensors),
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        )
        save_file(tensors, fresh / shard.file, metadata={"format": "pt"})
        shards.append(shard)
        tensors.clear()

    for weight in plain_weights(stage):
        for name, tensor in revert_weight_conversion(model, {weight.name: weight.read()}).items():
            if tensors and sum(other.nbytes for other in tensors.values()) + tensor.nbytes > max_shard_bytes:
                flush()
            tensors[name] = tensor.contiguous()
    flush()
    if stage.is_first:
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(fresh)
        if model.can_generate():
            # Its save_pretrained refuses what from_pretrained takes (a temperature without do_sample).
            file = fresh / GENERATION_CONFIG_NAME
            model.generation_config.to_json_file(file, use_diff=True, keys_to_pop=["compile_config"])
    return shards


def _join_stages(fresh: Path, parts: list[list[_Shard]]) -> None:
    shards = sorted((shard for part in parts for shard in part), key=lambda shard: (shard.stage, shard.file))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if doubled := weight_map.keys() & set(shard.names):
            raise ValueError(f"{sorted(doubled)} were written by two stages; each stage must be held by one rank.")
        weight_map |= dict.fromkeys(shard.names, name)
        os.rename(fresh / shard.file, fresh / name)
    if len(shards) > 1:
        metadata = {
            "total_parameters": sum(shard.num_parameters for shard in shards),
            "total_size": sum(shard.num_bytes for shard in shards),
        }
        index = {"metadata": metadata, "weight_map": weight_map}
        (fresh / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _part(fresh: Path, stage: PolicyStage) -> Path:
    return fresh / f"stage-{stage.stage}"


def _write_adapters(stages: Sequence[PolicyStage], fresh: Path) -> list[str]:
    for stage in stages:
        stage.model.save_pretrained(_part(fresh, stage), save_embedding_layers=False)
    return [_part(fresh, stage).name for stage in stages]


def _join_adapters(fresh: Path, parts: list[list[str]]) -> None:
    folders = sorted(fresh / name for part in parts for name in part)
    # PEFT keeps each adapter but "default" in a folder of its own name.
    places = {file.parent.relative_to(folders[0]) for file in folders[0].rglob(ADAPTER_CONFIG)}
    for place in places:
        weights: dict[str, torch.Tensor] = {}
        configs = []
        for part in folders:
            weights |= load_file(part / place / ADAPTER_WEIGHTS)
            configs.append(json.loads((part / place / ADAPTER_CONFIG).read_text()))
        config = configs[0]
        if isinstance(config.get("target_modules"), list):
            config["target_modules"] = sorted({name for other in configs for name in other["target_modules"]})
        (fresh / place).mkdir(exist_ok=True)
        save_file(weights, fresh / place / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (fresh / place / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for part in folders:
        shutil.rmtree(part)


# Training state


def random_state() -> dict[str, Any]:
    """Where the random generators stand, in a form that `torch.load(weights_only=True)` reads."""
    numpy_state = np.random.get_state(legacy=False)
    keys = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    numpy_state["state"] = {"key": keys, "pos": numpy_state["state"]["pos"]}
    state: dict[str, Any] = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the random generators to what [`random_state`] returned."""
    random.setstate(state["python"])
    place = state["numpy"]["state"]
    keys = place["key"].numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {"key": keys, "pos": place["pos"]}})
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def save_training_state(
    folder: str | Path,
    group: dist.ProcessGroup | None,
    *,
    stages: Sequence[PolicyStage],
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any] = (),
    counters: dict[str, Any] | None = None,
    replica: int = 0,
    pipeline_rank: int | None = None,
) -> None:
    """Saves optimizer, schedulers and random states, by parameter name, so that any number of stages can resume.

    To be called by all ranks of `group`. Weights are saved apart ([`save_pretrained_stages`]).

    Args:
        folder (`str` or `Path`): replaced as a whole.
        group (`dist.ProcessGroup`, *optional*): the ranks of one pipeline, or of several replicas; `None` for one rank.
        stages (sequence of [`PolicyStage`]): this rank's.
        optimizer (`torch.optim.Optimizer`): over parameters of `stages` alone.
        schedulers (sequence): things with a `state_dict` that is the same on all ranks.
        counters (`dict`, *optional*): numbers and strings to come back at the resume.
        replica (`int`): data-parallel index; only replica 0 writes parameters' state.
        pipeline_rank (`int`, *optional*): this rank's place in its pipeline; by default its rank in `group`.

    Raises:
        ValueError: if the optimizer holds a parameter of no stage.
        RuntimeError: if another rank could not write. What was in `folder` stays.
    """
    rank = _rank(group) if pipeline_rank is None else pipeline_rank

    def write(fresh: Path) -> None:
        torch.save(random_state(), fresh / f"random-{replica}-{rank}.pt")
        if replica == 0:
            torch.save(_optimizer_state(stages, optimizer), fresh / f"optimizer-{rank}.pt")

    def finish(fresh: Path, parts: list[None]) -> None:
        common = {"schedulers": [scheduler.state_dict() for scheduler in schedulers], "counters": counters or {}}
        torch.save(common, fresh / COMMON_STATE)

    _write_together(Path(folder), group, write, finish)


def load_training_state(
    folder: str | Path,
    group: dist.ProcessGroup | None,
    *,
    stages: Sequence[PolicyStage],
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any] = (),
    replica: int = 0,
    pipeline_rank: int | None = None,
) -> dict[str, Any]:
    """Restores what [`save_training_state`] wrote, with any number of stages, and returns the counters.

    A rank reads the state of its own parameters alone. Random states are restored one to one where the rank existed;
    others take that of their pipeline's first rank, or keep their own (with a warning) where there was no such replica.

    Args: as in [`save_training_state`].

    Raises:
        ValueError: if the folder holds no training state, not that of some parameter, or another number of schedulers.
        RuntimeError: if another rank failed.
    """
    folder = Path(folder)
    rank = _rank(group) if pipeline_rank is None else pipeline_rank
    together(group, f"look for {folder}", lambda: recover_folder(folder) if _is_lead(group) else None)

    def read() -> dict[str, Any]:
        if not (folder / COMMON_STATE).is_file():
            raise ValueError(
                f"{folder} has no {COMMON_STATE}, so it holds no training state; resume from another one."
            )
        common = _load(folder / COMMON_STATE)
        if len(common["schedulers"]) != len(schedulers):
            raise ValueError(
                f"{folder} holds {len(common['schedulers'])} schedulers, but schedulers has {len(schedulers)}; pass as many."
            )
        _restore_optimizer(folder, stages, optimizer)
        for scheduler, state in zip(schedulers, common["schedulers"]):
            scheduler.load_state_dict(state)
        _restore_random_state(folder, replica, rank)
        return common["counters"]

    return together(group, f"resume from {folder}", read)[_rank(group)]


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _load(file: Path) -> dict[str, Any]:
    # Mapped, so that only the tensors that are taken out are read.
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _parameter_names(stages: Sequence[PolicyStage]) -> dict[nn.Parameter, str]:
    """Names over all stages; both copies of a tied weight have the embeddings' name."""
    names = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter is stage.tied_parameter and name.endswith(HEAD_KEY):
                name = name.removesuffix(HEAD_KEY) + EMBEDDING_KEY
            names[parameter] = name
    return names


def _plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _group_names(stages: Sequence[PolicyStage], optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = _parameter_names(stages)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in parameters if parameter not in names]
    if strangers:
        raise ValueError(
            f"optimizer holds {len(strangers)} parameters that belong to none of the stages (shapes {strangers[:4]}); make "
            "one optimizer for the stages' parameters alone."
        )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _optimizer_state(stages: Sequence[PolicyStage], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    optimizer = _plain_optimizer(optimizer)
    copies = {stage.tied_parameter for stage in stages if stage.is_last}
    parameters = {}
    for number, (group, names) in enumerate(zip(optimizer.param_groups, _group_names(stages, optimizer))):
        for parameter, name in zip(group["params"], names):
            if parameter not in copies:  # the first stage writes it
                parameters[name] = {"state": optimizer.state.get(parameter, {}), "group": number}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"parameters": parameters, "settings": settings}


def _restore_optimizer(folder: Path, stages: Sequence[PolicyStage], optimizer: torch.optim.Optimizer) -> None:
    optimizer = _plain_optimizer(optimizer)
    groups = _group_names(stages, optimizer)
    wanted = {name for names in groups for name in names}
    state, settings = {}, {}
    for file in sorted(folder.glob("optimizer-*.pt")):
        saved = _load(file)
        for name in wanted & saved["parameters"].keys():
            entry = saved["parameters"][name]
            # Copied, so that the state does not stay a view of the file.
            state[name] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entry["state"].items()}
            settings[name] = (entry["group"], saved["settings"][entry["group"]])
    missing = sorted(wanted - state.keys())
    if missing:
        raise ValueError(
            f"{folder} lacks the optimizer state of {len(missing)} parameters: {', '.join(missing[:8])}. Was another model, "
            "or other trainable parameters, saved there?"
        )
    for number, names in enumerate(groups):
        origins = {settings[name][0] for name in names}
        if len(origins) > 1:
            raise ValueError(
                f"group {number} of optimizer joins parameters that {folder} has in groups {sorted(origins)}; make the "
                "groups as they were."
            )
    numbers = iter(range(sum(len(names) for names in groups)))
    param_groups: list[dict[str, Any]] = []
    by_number: dict[int, dict[str, Any]] = {}
    for group, names in zip(optimizer.param_groups, groups):
        indices = [next(numbers) for _ in names]
        by_number |= {index: state[name] for index, name in zip(indices, names) if state[name]}
        kept = settings[names[0]][1] if names else {k: v for k, v in group.items() if k != "params"}
        param_groups.append({**kept, "params": indices})
    optimizer.load_state_dict({"state": by_number, "param_groups": param_groups})


def _restore_random_state(folder: Path, replica: int, pipeline_rank: int) -> None:
    for rank in (pipeline_rank, 0):
        file = folder / f"random-{replica}-{rank}.pt"
        if file.is_file():
            set_random_state(_load(file))
            return
    warnings.warn(f"{folder} has no random state of replica {replica}; its generators stay as they are.", stacklevel=4)
