"""What one rank holds of a packed row, and the rows just past its edges.

Legend: T tokens of this rank, K steps ahead, E tokens of this rank and, behind them, what it borrowed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from hf_codraft.attention.blocks import Block, visible_blocks
from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.transport import Spec, Transport, alone

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A rank's part of a packed row; made by `policy.packing` or a training loop, read by attention and drafts.

    Args:
        layout ([`PackedLayout`]): the whole row, the same on every rank.
        cp_rank (`int`): which part this is.
        transport ([`Transport`]): reaches the other parts.
    """

    layout: PackedLayout
    cp_rank: int = 0
    transport: Transport = field(default_factory=alone)
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.layout.world != self.transport.world or self.cp_rank != self.transport.rank:
            raise ValueError(
                f"cp_rank {self.cp_rank} of a layout for {self.layout.world} ranks does not fit a transport of rank "
                f"{self.transport.rank} of {self.transport.world}; plan the layout for the context-parallel group."
            )

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank holds."""
        return self.layout.num_local(self.cp_rank)

    @property
    def peers(self) -> list[int]:
        """The other ranks, nearest first on the ring."""
        return [(self.cp_rank - step) % self.layout.world for step in range(1, self.layout.world)]

    @property
    def index(self) -> torch.Tensor:
        """Packed index of this rank's tokens, int64 on the CPU: `(tokens,)`."""
        return self.layout.index(self.cp_rank)

    def position_ids(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Position of this rank's tokens inside their segments: `(tokens,)`."""
        return self.layout.position_ids_T[self.index].to(device)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns for this key, made once: a policy's layers share one geometry."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def blocks(self, query_rank: int, key_rank: int, window: int | None = None) -> tuple[Block, ...]:
        """How the tokens of one rank see those of another (`blocks.visible_blocks`)."""
        runs = self.layout.runs(query_rank), self.layout.runs(key_rank)
        return self.once(
            ("blocks", query_rank, key_rank, window), lambda: visible_blocks(self.layout, *runs, window=window)
        )

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The same small tensor of every other rank, nearest first. Collective."""
        deliveries = self.transport.exchange(
            [(peer, [x]) for peer in self.peers],
            [(peer, [Spec(tuple(x.shape), x.dtype)]) for peer in self.peers],
            layout_id=self.layout.layout_id,
            device=x.device,
            what="a count",
        )
        return [delivery.wait()[0] for delivery in deliveries]

    def _halo(self, num_steps: int) -> list[torch.Tensor]:
        """For every rank, the packed indices within `num_steps` of its tokens that it does not hold, ascending."""

        def make() -> list[torch.Tensor]:
            halos = []
            for rank in range(self.layout.world):
                own = self.layout.index(rank)
                ahead = self.layout.ahead(own, num_steps).unique()
                halos.append(ahead[(ahead >= 0) & ~torch.isin(ahead, own)])
            return halos

        return self.once(("halo", num_steps), make)

    def ahead(self, num_steps: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Row, in a tensor that [`extend`] has extended, of the token 0..num_steps after each of this rank's.

        -1 past the end of a segment: `(num_steps + 1, tokens)`, int64.
        """
        rows = torch.full((self.layout.num_tokens + 1,), -1)
        own, halo = self.index, self._halo(num_steps)[self.cp_rank]
        rows[torch.cat([own, halo])] = torch.arange(len(own) + len(halo))
        return rows[self.layout.ahead(own, num_steps)].to(device)  # index -1 is the last row, which stays -1

    def extend(self, tensors: Sequence[torch.Tensor], num_steps: int) -> list[torch.Tensor]:
        """This rank's rows and, behind them, those within `num_steps` after its tokens that other ranks hold.

        All ranks must call it together. What is borrowed has no gradient, so the tensors may not ask for one.

        Args:
            tensors (sequence of `torch.Tensor` of shape `(tokens, ...)`): their other sizes equal on all ranks.
            num_steps (`int`): how far ahead.
        """
        if any(x.requires_grad for x in tensors):
            raise ValueError("tensors to extend must be detached: no gradient comes back for rows of other ranks.")
        if self.layout.world == 1:
            return list(tensors)
        halos = self._halo(num_steps)
        owner = torch.empty(self.layout.num_tokens, dtype=torch.long)
        for rank in range(self.layout.world):
            owner[self.layout.index(rank)] = rank
        row = torch.empty(self.layout.num_tokens, dtype=torch.long)
        row[self.index] = torch.arange(self.num_tokens)
        sends, receives = [], []
        for peer in self.peers:
            wanted = halos[peer][owner[halos[peer]] == self.cp_rank]
            rows = row[wanted].to(tensors[0].device)
            sends.append((peer, [x[rows] for x in tensors]))
            num_wanted = int((owner[halos[self.cp_rank]] == peer).sum())
            receives.append((peer, [Spec((num_wanted, *x.shape[1:]), x.dtype) for x in tensors]))
        deliveries = self.transport.exchange(
            sends, receives, layout_id=self.layout.layout_id, device=tensors[0].device, what="rows past a shard's edge"
        )
        arrived = {peer: delivery.wait() for peer, delivery in zip(self.peers, deliveries)}
        order = torch.cat([(owner[halos[self.cp_rank]] == peer).nonzero()[:, 0] for peer in self.peers]).argsort()
        return [
            torch.cat([x, torch.cat([arrived[peer][n] for peer in self.peers])[order.to(x.device)]])
            for n, x in enumerate(tensors)
        ]
