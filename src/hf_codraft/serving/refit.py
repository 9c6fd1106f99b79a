"""Pushes the trainer's weights into a colocated engine, and proves that they arrived where they belong.

A digest of a tensor weighs its bits by their position, as integers modulo 2^64: it is exact, and rows that change places
change it. The engine stacks some of what it is sent (q, k, v; gate, up), so every part is compared with its own place there.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Checkpoint's part: the engine's parameter and the place in it.
_STACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_EXPERTS = {"gate_up_proj": "w13", "down_proj": "w2"}  # a tensor for all experts of a layer, on both sides
_BLOCK = 2**20  # words of 8 bytes that are weighed at a time
_SAMPLE = 4096  # elements of each tensor that a fingerprint looks at
_ODD = 0x5851F42D4C957F2D


@functools.cache
def _position_weights(device: torch.device) -> torch.Tensor:
    """Numbers that look random, all odd: so a change of one word always shows."""
    mixed = torch.arange(1, _BLOCK + 1, device=device) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as one row of int64, without a copy where they lie right; zeros fill up the last word."""
    flat = tensor.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    starts_at = flat.storage_offset() * flat.element_size()
    if num_bytes % 8 == 0 and starts_at % 8 == 0 and flat.data_ptr() % 8 == 0:
        return flat.view(torch.int64)
    padded = torch.zeros(-(-num_bytes // 8) * 8, dtype=torch.uint8, device=flat.device)
    padded[:num_bytes] = flat.view(torch.uint8)
    return padded.view(torch.int64)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's words, each times the weight of its position, modulo 2^64: a scalar on its device."""
    words, weights = _as_words(tensor), _position_weights(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in words.split(_BLOCK):
        total = total * _ODD + (block * weights[: len(block)]).sum()
    return total


def _at_once(scalars: list[torch.Tensor]) -> torch.Tensor:
    """Brings scalars of any device to the host, waiting for each device once."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).cpu()


def _plain_name(name: str) -> str:
    """The name that checkpoint and engine have in common, if the engine does not stack the tensor."""
    return name.replace("midlayer.", "layers.0.").replace("d2t", "draft_id_to_target_id").removeprefix("model.")


def group_name(name: str) -> str:
    """The engine's parameter that a checkpoint's parameter ends up in, without the `model.` prefix."""
    return re.sub(
        r"(?<=\.)[a-z_]+_proj(?=\.)",
        lambda match: _STACKED.get(match.group(), (match.group(), 0))[0],
        _plain_name(name),
    )


def _order(name: str) -> int:
    """Place of a checkpoint's parameter in the stacked one."""
    return next((order for part, (_, order) in _STACKED.items() if f".{part}." in name), 0)


def _experts_name(name: str) -> str:
    """The engine's name of a tensor of experts, which transformers names as a stacked projection without `.weight`."""
    match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?", _plain_name(name))
    if match is None:
        return name
    module, projection, bias = match.groups()
    return f"{module}.routed_experts.{_EXPERTS[projection]}{bias or '_weight'}"


@dataclass(frozen=True)
class _Part:
    """What was sent; made while it passes, read by [`WeightStream.differing`]."""

    name: str
    order: int
    num_elements: int
    digest: torch.Tensor


class WeightStream:
    """Casts named tensors as the engine keeps them, on their way into it, and compares afterwards.

    Args:
        weights (iterable of name and tensor): as the trainer has them.
        engine (`torch.nn.Module`): the engine's model, its weights in the form that they are loaded in.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], engine: nn.Module):
        self.weights = weights
        # Both names of a shared parameter: whoever is sent must arrive.
        self._parameters = {_plain_name(n): p for n, p in engine.named_parameters(remove_duplicate=False)}
        self._mapper = getattr(engine, "hf_to_vllm_mapper", None)  # an option of vLLM's model classes
        self._parts: dict[str, list[_Part]] = defaultdict(list)
        self.unverified: list[str] = []  # names whose place in the engine is not known

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.weights:
            tensor = tensor.detach()
            place = self._place(name)
            if place is None:
                self.unverified.append(name)
            else:
                tensor = tensor.to(self._parameters[place].dtype)
                self._parts[place].append(_Part(name, _order(name), tensor.numel(), digest(tensor)))
            yield name, tensor

    def _place(self, name: str) -> str | None:
        mapped = name if self._mapper is None else self._mapper.map_name(name)
        if mapped is None:
            return None
        return next(
            (n for n in (_plain_name(mapped), group_name(mapped), _experts_name(mapped)) if n in self._parameters),
            None,
        )

    def differing(self) -> list[str]:
        """Names of the sent tensors that the engine does not hold, bit for bit, in its own dtype.

        What the engine holds beside them is not looked at.
        """
        names, sent, found = [], [], []
        for place, parts in self._parts.items():
            held = self._parameters[place].detach().view(-1)
            parts = sorted(parts, key=lambda part: part.order)
            total = sum(part.num_elements for part in parts)
            # Rows behind a single one are padding of the vocabulary; a stack with a gap has none to compare with.
            if total > len(held) or (total < len(held) and (len(parts) > 1 or _order(parts[0].name))):
                self.unverified += [part.name for part in parts]
                continue
            for part in parts:
                names.append(part.name)
                sent.append(part.digest)
                found.append(digest(held[: part.num_elements]))
                held = held[part.num_elements :]
        if not names:
            return []
        are_equal = _at_once(sent) == _at_once(found)
        return [name for name, is_equal in zip(names, are_equal.tolist(), strict=True) if not is_equal]


def check_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises a `RuntimeError` that names the tensors that are not finite.

    A draft that proposes by NaN makes wrong rollouts, not slow ones: no comparison with it rejects anything.
    """
    names, are_finite = zip(*((name, tensor.isfinite().all()) for name, tensor in weights), strict=True)
    broken = [name for name, is_finite in zip(names, torch.stack(are_finite).tolist(), strict=True) if not is_finite]
    if broken:
        raise RuntimeError(
            f"the draft's weights are not finite in {len(broken)} tensors: {broken[:8]}; they were not sent to the engine, whose "
            "rollouts would be wrong. Resume from a checkpoint before that, with a lower draft_learning_rate."
        )


def fingerprint(parameters: Iterable[nn.Parameter]) -> int:
    """A number that changes when weights do, from what this rank holds of them.

    Steps of optimizers and loaded states change nearly all elements and in-place operations count versions, so a sample of
    each tensor is enough to see a change that the version counter does not (DeepSpeed and FSDP write through `.data`).
    """
    versions, digests = [], []
    for parameter in parameters:
        local = getattr(parameter, "ds_tensor", parameter.data)  # ZeRO-3 keeps its shard there
        local = local.to_local() if isinstance(local, DTensor) else local
        flat = local.reshape(-1)
        versions.append(parameter._version)
        digests.append(digest(flat[:: max(1, len(flat) // _SAMPLE)]))
    return hash((*versions, *_at_once(digests).tolist()))


def check_names(draft: nn.Module, policy: nn.Module, sent: Iterable[str]) -> None:
    """Raises a `RuntimeError` unless the drafter expects exactly the tensors that are sent, none of them the policy's."""
    shared = {id(p) for p in policy.parameters()}
    own = {group_name(name) for name, p in draft.named_parameters() if id(p) not in shared}
    sent_groups = {group_name(name) for name in sent}
    if own != sent_groups:
        borrowed = {group_name(name) for name, p in draft.named_parameters() if id(p) in shared}
        raise RuntimeError(
            f"the draft cannot be refitted: the trainer sends {sorted(sent_groups - own)} that the engine's drafter does "
            f"not own (it shares {sorted(borrowed)} with the policy), and the drafter expects {sorted(own - sent_groups)} "
            "that the trainer does not send."
        )
