"""Where the documents of a packed row lie, and which rank holds which of its tokens.

Legend: T packed tokens. A *piece* is a run of neighbouring tokens with one owner. A rank holds its pieces one after
another, in the order of the row:

    row       | a a a a | b b b b b b | c c |        3 segments
    pieces    |  0  |  1  |  1  |  0  |              zigzag over 2 ranks
    rank 0    a a a b b c c
    rank 1    a b b b b
"""

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Piece:
    """Tokens `[start, end)` of a packed row, held by rank `owner`; made by `plans`, read by [`PackedLayout`]."""

    start: int
    end: int
    owner: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Run:
    """Tokens `[start, end)` of a packed row that lie at `[offset, offset + end - start)` of some tensor."""

    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class PackedLayout:
    """Segments of a packed row and the owner of every token; made by `policy.packing` and `plans`.

    Args:
        cu_seqlens (`tuple[int, ...]` of length `segments + 1`):
            Start of every segment and, last, the number of tokens. Segments may not be empty.
        world (`int`): ranks that share the row.
        pieces (`tuple[Piece, ...]`, *optional*): ascending, without gap, from 0 to the number of tokens; neighbours may
            have one owner, and a rank may own nothing. By default rank 0 holds everything.
    """

    cu_seqlens: tuple[int, ...]
    world: int = 1
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if not self.cu_seqlens or self.cu_seqlens[0] != 0 or any(a >= b for a, b in self.segments):
            raise ValueError(
                f"cu_seqlens must start with 0 and ascend, got {self.cu_seqlens}; leave empty segments out."
            )
        if not self.pieces and self.world == 1 and self.num_tokens:
            object.__setattr__(self, "pieces", (Piece(0, self.num_tokens, 0),))
        borders = [piece.start for piece in self.pieces] + [self.num_tokens]
        if any(piece.end != after or piece.start >= after for piece, after in zip(self.pieces, borders[1:])) or (
            borders[0] != 0
        ):
            raise ValueError(
                f"pieces must cover tokens 0..{self.num_tokens} in order, without gap or overlap; got {self.pieces}."
            )
        if any(not 0 <= piece.owner < self.world for piece in self.pieces):
            raise ValueError(f"owners of pieces must be ranks 0..{self.world - 1}, got {self.pieces}.")

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "PackedLayout":
        """Lay segments of these lengths one after another, all on one rank."""
        if any(length < 1 for length in lengths):
            raise ValueError(f"lengths must all be at least 1, got {list(lengths)}; leave empty rows out.")
        cu_seqlens = [0]
        for length in lengths:
            cu_seqlens.append(cu_seqlens[-1] + length)
        return cls(tuple(cu_seqlens))

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens[-1]

    @property
    def segments(self) -> list[tuple[int, int]]:
        return list(zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True))

    def segment_of(self, token: int) -> tuple[int, int]:
        """First token and end of the segment that holds `token`."""
        number = bisect.bisect_right(self.cu_seqlens, token) - 1
        return self.cu_seqlens[number], self.cu_seqlens[number + 1]

    @cached_property
    def layout_id(self) -> int:
        """63 bits that two layouts share only if they are equal: sent along with tensors and compared."""
        text = repr((self.cu_seqlens, self.world, [(p.start, p.end, p.owner) for p in self.pieces]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    @cached_property
    def _runs(self) -> tuple[tuple[Run, ...], ...]:
        runs: list[list[Run]] = [[] for _ in range(self.world)]
        sizes = [0] * self.world
        for piece in self.pieces:
            own = runs[piece.owner]
            if own and own[-1].end == piece.start:
                own[-1] = Run(own[-1].start, piece.end, own[-1].offset)
            else:
                own.append(Run(piece.start, piece.end, sizes[piece.owner]))
            sizes[piece.owner] += piece.num_tokens
        return tuple(tuple(own) for own in runs)

    def runs(self, cp_rank: int) -> tuple[Run, ...]:
        """What a rank holds, with the place of each run in its tensors."""
        return self._runs[cp_rank]

    def num_local(self, cp_rank: int) -> int:
        """Tokens that a rank holds."""
        return sum(run.end - run.start for run in self._runs[cp_rank])

    @cached_property
    def _index(self) -> tuple[torch.Tensor, ...]:
        empty = torch.zeros(0, dtype=torch.long)
        return tuple(torch.cat([torch.arange(r.start, r.end) for r in own] or [empty]) for own in self._runs)

    def index(self, cp_rank: int) -> torch.Tensor:
        """Packed index of every token that a rank holds, int64 on the CPU: `(local tokens,)`."""
        return self._index[cp_rank]

    @cached_property
    def position_ids_T(self) -> torch.Tensor:
        """Position of every token inside its own segment, int64 on the CPU: `(tokens,)`."""
        parts = [torch.arange(end - start) for start, end in self.segments]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)

    def shard(self, x_T: torch.Tensor, cp_rank: int, *, dim: int = 0) -> torch.Tensor:
        """What a rank holds of a tensor over the whole row, as a copy.

        Args:
            x_T (`torch.Tensor` whose dimension `dim` has `num_tokens` entries): same on all ranks.
            cp_rank (`int`): whose part.
        """
        if x_T.shape[dim] != self.num_tokens:
            raise ValueError(
                f"dimension {dim} of x_T has {x_T.shape[dim]} entries, but the layout has {self.num_tokens} tokens."
            )
        return x_T.index_select(dim, self._index[cp_rank].to(x_T.device))

    def unshard(self, parts: Sequence[torch.Tensor], *, dim: int = 0) -> torch.Tensor:
        """The inverse of [`shard`]: the whole row from every rank's part."""
        sizes = [part.shape[dim] for part in parts]
        if sizes != [self.num_local(rank) for rank in range(self.world)]:
            raise ValueError(
                f"parts have {sizes} tokens, but the ranks of the layout hold "
                f"{[self.num_local(rank) for rank in range(self.world)]}."
            )
        order = torch.cat(self._index).argsort().to(parts[0].device)
        return torch.cat(list(parts), dim).index_select(dim, order)

    def ahead(self, index_A: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Packed index of the tokens 0..num_steps after each, -1 past the end of its segment: `(num_steps + 1, A)`.

        Args:
            index_A (`torch.Tensor` of shape `(any,)`, int64): packed indices.
        """
        ends = torch.tensor(self.cu_seqlens, device=index_A.device)
        end_A = ends[torch.bucketize(index_A, ends, right=True).clamp(max=len(ends) - 1)]
        later = index_A + torch.arange(num_steps + 1, device=index_A.device)[:, None]
        return later.masked_fill(later >= end_A, -1)
