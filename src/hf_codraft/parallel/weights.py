"""All weights of a pipeline-split policy, one after another, on one rank: to push them into an inference engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from hf_codraft.parallel.loading import EMBEDDING_KEY, HEAD_KEY
from hf_codraft.parallel.stages import PolicyStage
from hf_codraft.policy.anatomy import effective_weight, unwrap_peft


@dataclass(frozen=True)
class PlainWeight:
    """A parameter of the adapter-free model; made by [`plain_weights`], read by those who send or save it.

    Args:
        name (`str`): in the transformers model.
        like (`torch.Tensor`): has its shape and dtype.
        read (callable): computes it, detached; adapters are merged at this moment.
    """

    name: str
    like: torch.Tensor
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of the manifest; made by [`agree_manifest`], read by [`iterate_full_weights`].

    Args:
        name (`str`): as in a checkpoint (experts one by one).
        shape (`tuple[int, ...]`)
        dtype (`torch.dtype`)
        owner (`int`): rank in the pipeline's group.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int


def plain_weights(stage: PolicyStage) -> Iterator[PlainWeight]:
    """A stage's parameters under the names of the adapter-free model, LoRA merged; a tied head is left out.

    Raises:
        ValueError: if an adapter can't be merged into weights of these names.
    """
    model = unwrap_peft(stage.model)
    is_tied = model.config.tie_word_embeddings
    if is_tied:
        embeddings = (model.get_submodule(name.removesuffix(".weight")) for name in (EMBEDDING_KEY, HEAD_KEY))
        if any(_is_adapted(module) for module in embeddings):
            raise ValueError(
                "an adapter changes only one of embeddings and head, which model.config.tie_word_embeddings says are one "
                "tensor. Untie them before adding the adapter, or leave both out of its target_modules and modules_to_save."
            )
    for weight in _walk(model, ""):
        if not (is_tied and weight.name == HEAD_KEY):
            yield weight


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def _walk(module: nn.Module, prefix: str) -> Iterator[PlainWeight]:
    if hasattr(module, "base_layer"):
        if hasattr(module, "parameter_name") or any(
            b.bias is not None for b in getattr(module, "lora_B", {}).values()
        ):
            raise ValueError(
                f"the adapter of {prefix.removesuffix('.')} (target_parameters, or lora_bias) can't be merged here; use LoRA "
                "on linear layers and embeddings, without lora_bias."
            )
        for name, parameter in module.base_layer.named_parameters():
            read = partial(effective_weight, module) if name == "weight" else parameter.detach
            yield PlainWeight(prefix + name, parameter, read)
    elif hasattr(module, "original_module"):  # PEFT answers for the active one of its copies
        for name, parameter in module.original_module.named_parameters():
            yield PlainWeight(prefix + name, parameter, partial(_active_copy, module, name))
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield PlainWeight(prefix + name, parameter, parameter.detach)
        for name, child in module.named_children():
            yield from _walk(child, f"{prefix}{name}.")


def _active_copy(wrapper: nn.Module, name: str) -> torch.Tensor:
    return attrgetter(name)(wrapper).detach()


def _local_entries(stages: Sequence[PolicyStage], owner: int) -> list[WeightEntry]:
    entries = []
    for stage in stages:
        model = unwrap_peft(stage.model)
        for weight in plain_weights(stage):
            stored = revert_weight_conversion(model, {weight.name: torch.empty_like(weight.like, device="meta")})
            entries += [WeightEntry(name, tuple(t.shape), t.dtype, owner) for name, t in stored.items()]
    return entries


def _try_local_entries(stages: Sequence[PolicyStage], owner: int) -> tuple[list[WeightEntry], str | None]:
    """The entries, or what is wrong: whatever it is, the other ranks must hear of it, or they would wait for this one."""
    try:
        return _local_entries(stages, owner), None
    except Exception as error:
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return [], f"rank {owner}: {name}{error}"


def agree_manifest(stages: Sequence[PolicyStage], group: dist.ProcessGroup | None) -> tuple[WeightEntry, ...]:
    """The list of all tensors and their owners, the same on all ranks of `group`; to be called by all of them.

    Args:
        stages (sequence of [`PolicyStage`]): this rank's.
        group (`dist.ProcessGroup`, *optional*): the ranks of one pipeline; `None` for one rank.

    Raises:
        ValueError: on every rank, if a rank can't list its weights, or two ranks own the same.
    """
    owner = 0 if group is None else dist.get_rank(group)
    entries, problem = _try_local_entries(stages, owner)
    everyone: list = [(entries, problem)]
    if group is not None:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, (entries, problem), group=group)
    problems = [problem for _, problem in everyone if problem is not None]
    manifest = tuple(entry for entries, _ in everyone for entry in entries)
    owners: dict[str, int] = {}
    for entry in manifest:
        if entry.name in owners:
            problems.append(f"{entry.name} is held by rank {owners[entry.name]} and by rank {entry.owner}")
        owners[entry.name] = entry.owner
    if problems:
        raise ValueError(f"the weights of the pipeline can't be listed: {'; '.join(problems)}.")
    return manifest


def iterate_full_weights(
    stages: Sequence[PolicyStage],
    group: dist.ProcessGroup | None,
    *,
    receiver: int = 0,
    manifest: Sequence[WeightEntry] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the whole policy on one rank, one at a time.

    Every rank of `group` must run the iterator to its end; on ranks other than `receiver` it yields nothing and sends:

        for name, tensor in iterate_full_weights(stages, group):  # on all ranks; the body runs on rank 0
            engine.load_weights([(name, tensor)])

    One parameter is on its way at a time, so a rank needs memory for the largest (and for its merged form, under LoRA). A
    receiver that stops early leaves the owners waiting until the group's timeout. Don't call it while the group's
    pipeline is in a step: both would use the same pairs of ranks.

    Args:
        stages (sequence of [`PolicyStage`]): this rank's.
        group (`dist.ProcessGroup`, *optional*): the ranks of one pipeline; `None` for one rank.
        receiver (`int`): rank in `group` that gets everything.
        manifest (sequence of [`WeightEntry`], *optional*): from [`agree_manifest`], to save agreeing anew each time.

    Raises:
        ValueError: on every rank, before anything is sent, if the weights of some rank don't match the manifest.
    """
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), group.size())
    if not 0 <= receiver < num_ranks:
        raise ValueError(f"receiver ({receiver}) must be a rank of the group, 0..{num_ranks - 1}.")
    if manifest is None:
        manifest = agree_manifest(stages, group)
    else:
        _check_manifest(manifest, stages, group, rank)
    own = _own_tensors(stages)
    device = next(stages[0].parameters()).device
    for entry in manifest:
        if entry.owner == rank:
            tensor = next(own)
            if rank != receiver:
                dist.send(tensor.contiguous(), group=group, group_dst=receiver)
            else:
                yield entry.name, tensor
            del tensor
        elif rank == receiver:
            received = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            try:
                dist.recv(received, group=group, group_src=entry.owner)
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {rank} waited for rank {entry.owner} to send {entry.name} and got none ({error}); every rank of "
                    "the pipeline must run iterate_full_weights to its end."
                ) from error
            yield entry.name, received
            del received


def _own_tensors(stages: Sequence[PolicyStage]) -> Iterator[torch.Tensor]:
    for stage in stages:
        model = unwrap_peft(stage.model)
        for weight in plain_weights(stage):
            yield from revert_weight_conversion(model, {weight.name: weight.read()}).values()


def _check_manifest(
    manifest: Sequence[WeightEntry], stages: Sequence[PolicyStage], group: dist.ProcessGroup | None, rank: int
) -> None:
    expected = [entry for entry in manifest if entry.owner == rank]
    found, problem = _try_local_entries(stages, rank)
    if problem is None and expected != found:
        differing = sorted({entry.name for entry in set(expected) ^ set(found)}) or ["their order"]
        problem = f"rank {rank} differs in {differing[:8]}"
    problems = [problem]
    if group is not None:
        problems = [None] * group.size()
        dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        raise ValueError(
            f"the weights don't match the manifest: {'; '.join(p for p in problems if p)}. Call agree_manifest again after "
            "the model has changed."
        )
