"""Pushes the trainer's weights into a colocated engine, and proves that they arrived.

A digest of a tensor is the sum of its bit patterns as integers: exact, independent of order, so that the fused tensors
of the engine (qkv, gate and up) have the digest of their parts, and padding rows of zeros add nothing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> int:
    """Sum of the bit patterns of a tensor."""
    return int(tensor.detach().contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64).item())


def group_name(name: str) -> str:
    """The engine's parameter that a checkpoint's parameter ends up in, without the `model.` prefix."""
    name = name.replace("midlayer.", "layers.0.").replace("d2t", "draft_id_to_target_id")
    name = re.sub(r"(?<=\.)[a-z_]+_proj(?=\.)", lambda match: _FUSED.get(match.group(), match.group()), name)
    return name.removeprefix("model.")


class WeightStream:
    """Casts, counts and passes on named tensors on their way into the engine."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype):
        self.weights = weights
        self.dtype = dtype
        self.digests: Counter[str] = Counter()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.weights:
            if tensor.is_floating_point():
                tensor = tensor.detach().to(self.dtype)
            self.digests[group_name(name)] += digest(tensor)
            yield name, tensor


def engine_digests(model: nn.Module, *, without: nn.Module | None = None) -> Counter[str]:
    """Digests of an engine's model by group; parameters that are also `without`'s are left out."""
    shared = set() if without is None else {id(p) for p in without.parameters()}
    digests: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if id(parameter) not in shared:
            digests[group_name(name)] += digest(parameter)
    return digests


def check_digests(sent: Counter[str], found: Counter[str], *, side: str) -> None:
    """Raises a `RuntimeError` that names the tensors in which the engine differs from what was sent.

    Where the engine fuses more than `group_name` knows (experts of MoE models), only the sums over all can be compared.
    """
    if set(sent) == set(found):
        wrong = [name for name in sent if sent[name] != found[name]]
    else:
        wrong = [] if sent.total() == found.total() else sorted(set(sent) ^ set(found))
    if wrong:
        raise RuntimeError(
            f"after the refit the engine's {side} differs from the trainer's in {len(wrong)} tensors: {wrong[:8]}. "
            "Rollouts would come from stale weights; this is a fault of the refit, please report it with your versions."
        )


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
