"""The reduced vocabulary of a draft: which of the policy's token ids it can propose.

Legend: V the policy's vocabulary, R the draft's (reduced) one. `d2t` holds *offsets*: draft id r stands for target id
`r + d2t[r]`; `t2d` is a boolean mask over target ids. This is the convention of EAGLE-3 checkpoints and vLLM.
"""

import torch


def select_draft_vocab(counts_V: torch.Tensor, size: int, *, always_keep: tuple[int, ...] = ()) -> torch.Tensor:
    """The `size` most frequent token ids, ascending; ids in `always_keep` come first, ties go to the lower id.

    Args:
        counts_V (`torch.Tensor` of shape `(vocab,)`): how often the policy produced each id.
        size (`int`): number of ids to keep.
        always_keep (`tuple[int, ...]`): ids kept whatever their count, such as the end-of-sequence ids.

    Raises:
        ValueError: if `size` is not in `1..vocab` or smaller than `always_keep`.
    """
    vocab = len(counts_V)
    if not max(1, len(set(always_keep))) <= size <= vocab:
        raise ValueError(
            f"draft_vocab_size ({size}) must be between {max(1, len(set(always_keep)))} and the policy's vocabulary ({vocab})."
        )
    counts = counts_V.to(torch.float64).clone()
    counts[list(always_keep)] = torch.inf
    return torch.argsort(counts, descending=True, stable=True)[:size].sort().values


def offsets(kept_ids_R: torch.Tensor) -> torch.Tensor:
    """`d2t` for these ascending target ids: `(draft_vocab,)`, int64."""
    return kept_ids_R - torch.arange(len(kept_ids_R), device=kept_ids_R.device)


def kept_mask(kept_ids_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`t2d` for these target ids: `(vocab,)`, bool."""
    mask = torch.zeros(vocab_size, dtype=torch.bool, device=kept_ids_R.device)
    mask[kept_ids_R] = True
    return mask


def check_mapping(d2t_R: torch.Tensor, vocab_size: int) -> None:
    """Raises a `ValueError` unless `d2t` holds integers and maps onto distinct target ids of a vocabulary of this size."""
    if d2t_R.is_floating_point() or d2t_R.dtype == torch.bool:
        raise ValueError(f"d2t must hold integers, got {d2t_R.dtype}.")
    targets = d2t_R.long() + torch.arange(len(d2t_R), device=d2t_R.device)
    if targets.numel() and (targets.min() < 0 or targets.max() >= vocab_size):
        raise ValueError(
            f"d2t maps to target ids {int(targets.min())}..{int(targets.max())}, outside the policy's vocabulary of "
            f"{vocab_size}. Either the draft was trained for another tokenizer, or d2t holds target ids instead of "
            "offsets (target id = draft id + d2t[draft id])."
        )
    if len(torch.unique(targets)) != len(targets):
        raise ValueError("d2t maps two draft ids to the same target id; it must hold offsets, ascending by target id.")
