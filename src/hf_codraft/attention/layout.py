"""Where the documents of a packed row lie.

Legend: T packed tokens, A anchor tokens (those that query), S segments.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedLayout:
    """Segments of a packed row, made by `policy.packing`, read by drafts and attention.

    Args:
        cu_seqlens (`tuple[int, ...]` of length `segments + 1`):
            Start of every segment and, last, the number of tokens. Segments may not be empty.
        position_ids_T (`torch.Tensor` of shape `(tokens,)`, int64):
            RoPE position of every token inside its own segment.
    """

    cu_seqlens: tuple[int, ...]
    position_ids_T: torch.Tensor

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> "PackedLayout":
        """Lay segments of these lengths one after another, positions from 0 in each."""
        if any(length < 1 for length in lengths):
            raise ValueError(f"lengths must all be at least 1, got {lengths}; leave empty rows out.")
        cu_seqlens = [0]
        for length in lengths:
            cu_seqlens.append(cu_seqlens[-1] + length)
        parts = [torch.arange(length, device=device) for length in lengths]
        positions = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=device)
        return cls(tuple(cu_seqlens), positions)

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True))


@dataclass(frozen=True)
class Block:
    """A rectangle (or causal square) of the attention matrix that one kernel call computes.

    Queries `[query_start, query_end)` see keys `[key_start, key_end)`; all of them, or, if `is_causal`,
    query `query_start + n` sees keys up to and including `key_start + n` (then both ranges are equally long).
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    is_causal: bool


def trunk_blocks(layout: PackedLayout, anchors: list[int]) -> list[Block]:
    """Blocks in which the query at each anchor sees the keys of its own segment up to and including itself.

    A run of neighbouring anchors a..b in a segment that starts at s needs two kernel calls:

        keys ->  s .. a-1   a .. b
        a..b     all        causal

    Args:
        layout (`PackedLayout`): segments of the keys.
        anchors (`list[int]`): ascending key indices; query n is the token `anchors[n]`.
    """
    blocks: list[Block] = []
    query = 0
    for start, end in layout.segments:
        while query < len(anchors) and anchors[query] < end:
            first = query
            while query + 1 < len(anchors) and anchors[query + 1] == anchors[query] + 1 and anchors[query + 1] < end:
                query += 1
            query += 1
            run_start, run_end = anchors[first], anchors[query - 1] + 1
            if run_start > start:
                blocks.append(Block(first, query, start, run_start, is_causal=False))
            blocks.append(Block(first, query, run_start, run_end, is_causal=True))
    return blocks
