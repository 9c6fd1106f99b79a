"""One draft on all ranks: what rank 0 has is everyone's, and a difference is an error.

Replicas start alike and take the same steps, so they stay alike bit for bit; where they do not, each rank would train a
draft of its own on gradients of the others', silently.
"""

import torch
from torch import distributed as dist
from torch import nn

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


@torch.no_grad()
def share(draft: nn.Module) -> None:
    """Gives every rank rank 0's weights and buffers, in place.

    Raises:
        ValueError: if the ranks' drafts differ in a name, shape or dtype, such as folders that differ from host to host.
    """
    if _num_ranks() == 1:
        return
    tensors = draft.state_dict()
    form = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    forms: list = [None] * _num_ranks()
    dist.all_gather_object(forms, form)
    for rank, other in enumerate(forms):
        if other != forms[0]:
            raise ValueError(
                f"the drafts of ranks 0 and {rank} differ in form: {sorted(set(forms[0]) ^ set(other))[:6]}. Is draft= a folder "
                "that is not the same on every host?"
            )
    for tensor in tensors.values():
        assert tensor.is_contiguous()  # else the bytes would be those of a copy
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)


@torch.no_grad()
def check_same(draft: nn.Module) -> None:
    """Compares sums of the bit patterns of all weights over the ranks; costs one pass over them and one small gather.

    Raises:
        RuntimeError: if a rank has another draft than rank 0; names the tensors.
    """
    if _num_ranks() == 1:
        return
    tensors = draft.state_dict()
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in tensors.values()])
    gathered = [torch.empty_like(sums) for _ in range(_num_ranks())]
    dist.all_gather(gathered, sums)
    differs = torch.stack([other != gathered[0] for other in gathered])
    if differs.any():
        ranks = differs.any(1).nonzero()[:, 0].tolist()
        names = [name for name, is_other in zip(tensors, differs.any(0).tolist(), strict=True) if is_other]
        raise RuntimeError(
            f"the draft of ranks {ranks} differs from rank 0's in {len(names)} of {len(tensors)} tensors: {names[:6]}. Every "
            "rank must hold the same draft; was it changed on one of them?"
        )
