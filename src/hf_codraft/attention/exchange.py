"""How the trunk's keys and values reach the queries of other ranks, and how their gradients come home.

Legend: T tokens of a rank, M key/value heads, D head size.

| route | keys and values | their gradients |
|---|---|---|
| `ring` | whole shards hop from neighbour to neighbour, N - 1 times | hop along behind them, N times (arXiv 2609.07108) |
| `direct` | what a peer's queries see, straight to it | straight home, in one hop |

Keys and values travel in their own dtype, gradients in fp32 (fp64 for fp64).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_codraft.attention.blocks import needed_keys, num_in, runs_taken
from hf_codraft.attention.layout import Run
from hf_codraft.attention.merge import stat_zeros
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import Delivery, Spec

ROUTES = ("direct", "ring")
Gradients = tuple[torch.Tensor, torch.Tensor]  # of some keys and of their values


@dataclass(frozen=True)
class PeerKeys:
    """Keys and values of one rank's tokens, as they lie in `runs`; made by [`KeyExchange`], read by `trunk`.

    Raises:
        ValueError: if `runs` are not of these rows: blocks made of them would reach past the tensors.
    """

    rank: int
    runs: tuple[Run, ...]
    k_TMD: torch.Tensor
    v_TMD: torch.Tensor

    def __post_init__(self) -> None:
        num_tokens = sum(run.end - run.start for run in self.runs)
        if not num_tokens == len(self.k_TMD) == len(self.v_TMD):
            raise ValueError(
                f"runs of rank {self.rank} have {num_tokens} tokens, but k_TMD has {len(self.k_TMD)} rows and v_TMD "
                f"{len(self.v_TMD)}; take all three from one exchange."
            )


class KeyExchange:
    """Moves one trunk's keys, values and their gradients between ranks. Every method is collective.

    Args:
        shard ([`Shard`]): this rank's part of the row.
        window (`int`, *optional*): sliding window; keys outside of it do not travel on the direct route.
    """

    def __init__(self, shard: Shard, *, window: int | None = None):
        self.shard, self.window = shard, window
        self.rank, self.world = shard.cp_rank, shard.layout.world
        self.layout_id = shard.layout.layout_id

    def ranges(self, query_rank: int, key_rank: int) -> tuple[tuple[int, int], ...]:
        """Rows of `key_rank` that some token of `query_rank` sees."""
        return self.shard.once(
            ("ranges", query_rank, key_rank, self.window),
            lambda: needed_keys(self.shard.blocks(query_rank, key_rank, self.window)),
        )

    def runs_from(self, peer: int) -> tuple[Run, ...]:
        """Which tokens this rank gets from a peer on the direct route, and where they lie in what it gets."""
        # by the ranges themselves: trunks and every choice of draft blocks share one shard
        ranges = self.ranges(self.rank, peer)
        return self.shard.once(("runs taken", peer, ranges), lambda: runs_taken(self.shard.layout.runs(peer), ranges))

    def num_from(self, query_rank: int, key_rank: int) -> int:
        """Tokens of `key_rank` that travel to `query_rank` on the direct route."""
        return num_in(self.ranges(query_rank, key_rank))

    def own(self, k_TMD: torch.Tensor, v_TMD: torch.Tensor) -> PeerKeys:
        return PeerKeys(self.rank, self.shard.layout.runs(self.rank), k_TMD, v_TMD)

    def _ask(self, step: int, k_TMD: torch.Tensor, v_TMD: torch.Tensor) -> tuple[int, Delivery]:
        source, target = (self.rank - step) % self.world, (self.rank + step) % self.world
        wanted = self.ranges(target, self.rank)
        num_tokens = self.num_from(self.rank, source)
        specs = [Spec((num_tokens, *x.shape[1:]), x.dtype) for x in (k_TMD, v_TMD)]
        deliveries = self.shard.transport.exchange(
            [(target, [take(x, wanted) for x in (k_TMD, v_TMD)])],
            [(source, specs)],
            layout_id=self.layout_id,
            device=k_TMD.device,
            what="keys and values",
        )
        return source, deliveries[0]

    def fetch(self, k_TMD: torch.Tensor, v_TMD: torch.Tensor, steps: range) -> Iterator[PeerKeys]:
        """What the ranks at these distances hold and this rank needs; each comes while the one before is used."""
        asked = [self._ask(step, k_TMD, v_TMD) for step in steps[:1]]
        for step in [*steps[1:], None]:
            if not asked:
                return
            source, delivery = asked.pop()
            arrived = [PeerKeys(source, self.runs_from(source), *delivery.wait())]
            del delivery  # else what was used would stay until the next has come
            if step is not None:
                asked.append(self._ask(step, k_TMD, v_TMD))
            yield arrived.pop()

    def send_home(
        self, step: int, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Sends the gradients of what [`fetch`] got at this distance to its owner.

        Returns what waits for the gradients of this rank's own keys that the opposite rank found, and adds them.
        """
        source, target = (self.rank - step) % self.world, (self.rank + step) % self.world
        ranges = self.ranges(target, self.rank)
        spec = Spec((self.num_from(target, self.rank), *grad_k.shape[1:]), grad_k.dtype)
        deliveries = self.shard.transport.exchange(
            [(source, [grad_k, grad_v])],
            [(target, [spec, spec])],
            layout_id=self.layout_id,
            device=grad_k.device,
            what="gradients of keys and values",
        )

        def add(own_grad_k: torch.Tensor, own_grad_v: torch.Tensor) -> None:
            for own, got in zip((own_grad_k, own_grad_v), deliveries[0].wait()):
                for part, (start, end) in split(got, ranges):
                    own[start:end] += part

        return add

    def return_gradients(
        self,
        found: Iterable[tuple[int, Gradients]],
        own_grad_k: torch.Tensor,
        own_grad_v: torch.Tensor,
    ) -> None:
        """Sends home what is found, distance by distance, and adds what comes to the gradients of this rank's own keys.

        What comes is added one distance late: it travels while the next gradients are computed, and no more than two
        distances' parcels exist at a time.
        """
        late: list[Callable[[torch.Tensor, torch.Tensor], None]] = []
        for step, gradients in found:
            late.append(self.send_home(step, *gradients))
            del gradients  # a copy of them is on its way
            if len(late) > 1:
                late.pop(0)(own_grad_k, own_grad_v)
        for add in late:
            add(own_grad_k, own_grad_v)

    def hop(self, source: int, tensors: list[torch.Tensor], what: str) -> list[torch.Tensor]:
        """Passes the tensors of a shard on to the next rank and takes those of `source`'s from the one before."""
        num_tokens = self.shard.layout.num_local(source)
        deliveries = self.shard.transport.exchange(
            [((self.rank + 1) % self.world, tensors)],
            [((self.rank - 1) % self.world, [Spec((num_tokens, *x.shape[1:]), x.dtype) for x in tensors])],
            layout_id=self.layout_id,
            device=tensors[0].device,
            what=what,
        )
        return deliveries[0].wait()

    def circulate(self, k_TMD: torch.Tensor, v_TMD: torch.Tensor) -> Iterator[PeerKeys]:
        """The ring: every other rank's whole shard, nearest first."""
        travelling = [k_TMD, v_TMD]
        for source in self.shard.peers:
            travelling = self.hop(source, travelling, "keys and values")
            yield PeerKeys(source, self.shard.layout.runs(source), travelling[0], travelling[1])

    def circulate_gradients(
        self,
        k_TMD: torch.Tensor,
        v_TMD: torch.Tensor,
        differentiate: Callable[[PeerKeys, torch.Tensor, torch.Tensor], object],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The ring's backward: gradients hop along behind their keys and are home after a full round.

        Args:
            differentiate (callable): adds the gradients of one shard's keys and values in place.

        Returns:
            The gradients of this rank's own keys and values, other ranks' parts included.
        """
        travelling = [stat_zeros(k_TMD), stat_zeros(v_TMD)]
        differentiate(self.own(k_TMD, v_TMD), *travelling)
        for keys in self.circulate(k_TMD, v_TMD):
            travelling = self.hop(keys.rank, travelling, "gradients of keys and values")
            differentiate(keys, *travelling)
        if self.world > 1:
            travelling = self.hop(self.rank, travelling, "gradients of keys and values")
        return travelling[0], travelling[1]


Ranges = tuple[tuple[int, int], ...]


def take(x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The rows of `x` in some ranges, one after another."""
    return torch.cat([x[start:end] for start, end in ranges]) if ranges else x[:0]


def split(taken: torch.Tensor, ranges: Ranges) -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
    """The inverse of [`take`]: every part with the range that it came from."""
    return zip(taken.split([end - start for start, end in ranges]), ranges)
