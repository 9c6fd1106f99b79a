"""Captures a policy's hidden states while a context is open, and only then.

Legend: B rows, S padded length, H hidden width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class TapSpec:
    """Which hidden states a draft reads; made by the draft's config, read by recorders.

    Args:
        tap_ids (`tuple[int, ...]`): id j is the residual stream after j decoder layers (before the final norm), id 0
            the output of the embeddings: vLLM's convention and HF's `hidden_states[j]` but for the last, which HF
            returns after the norm.
        num_layers (`int`): decoder layers of the policy.
    """

    tap_ids: tuple[int, ...]
    num_layers: int

    def __post_init__(self) -> None:
        if not self.tap_ids:
            raise ValueError("draft_tap_layers must name at least one layer.")
        for tap_id in self.tap_ids:
            if not 0 <= tap_id <= self.num_layers:
                raise ValueError(
                    f"draft_tap_layers ({list(self.tap_ids)}) must lie in 0..{self.num_layers}: id j is the hidden state "
                    f"after j of the policy's {self.num_layers} layers; got {tap_id}. (DFlash's target_layer_ids are "
                    "smaller by one.)"
                )


@dataclass(frozen=True)
class Taps:
    """Hidden states of one forward, detached; made by [`TapRecorder`], read by `policy.packing`.

    Args:
        hidden_states (`tuple[torch.Tensor, ...]` of shape `(rows, length, hidden)`): one per tap id, in their order.
        final_BSH (`torch.Tensor` of shape `(rows, length, hidden)`): after the final norm, what the head reads.
    """

    hidden_states: tuple[torch.Tensor, ...]
    final_BSH: torch.Tensor


def _first_tensor(output: Any) -> torch.Tensor:
    tensor = output if isinstance(output, torch.Tensor) else output[0]  # a layer's tuple, a backbone's ModelOutput
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()


@contextmanager
def tap_hooks(
    layers: Sequence[nn.Module],
    final: nn.Module,
    tap_ids: Iterable[int],
    keep: Callable[[int, torch.Tensor], None],
) -> Iterator[None]:
    """Calls `keep(tap_id, hidden state)` in every forward that runs inside, detached.

    Args:
        layers (`Sequence[nn.Module]`): the policy's decoder layers in order.
        final (`nn.Module`): what hands the final hidden state to the head: the backbone, or its norm.
        tap_ids (`Iterable[int]`): as in [`TapSpec`]; `len(layers) + 1` is the final hidden state, after the norm.
        keep (callable): takes what was captured.
    """

    def register(tap_id: int) -> RemovableHandle:
        if tap_id == 0:

            def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
                keep(0, _first_tensor(args[0] if args else kwargs["hidden_states"]))

            return layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(module: nn.Module, args: object, output: object) -> None:
            keep(tap_id, _first_tensor(output))

        module = final if tap_id == len(layers) + 1 else layers[tap_id - 1]
        return module.register_forward_hook(after)

    handles = [register(tap_id) for tap_id in dict.fromkeys(tap_ids)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class TapRecorder:
    """Forward hooks on decoder layers that exist only while [`recording`] is open.

    Opened around the training loss alone, it sees neither the log-prob forwards nor the recomputation of gradient
    checkpointing (which runs in the backward, when it is closed again).

    Args:
        layers (`Sequence[nn.Module]`): the policy's decoder layers in order.
        final (`nn.Module`): what hands the final hidden state to the head: the backbone, or its norm.
        spec ([`TapSpec`]): what to capture.
    """

    def __init__(self, layers: Sequence[nn.Module], final: nn.Module, spec: TapSpec):
        self.layers = layers
        self.final = final
        self.spec = spec
        self._captured: dict[int, list[torch.Tensor]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Captures every forward that runs inside; read them with [`take`] afterwards."""
        self._captured.clear()

        def keep(tap_id: int, tensor: torch.Tensor) -> None:
            self._captured.setdefault(tap_id, []).append(tensor)

        with tap_hooks(self.layers, self.final, (*self.spec.tap_ids, len(self.layers) + 1), keep):
            yield

    def take(self) -> Taps:
        """Hands over what was captured and forgets it; several forwards are joined along their rows.

        Raises:
            RuntimeError: if no forward ran while recording, or a layer was skipped in one.
        """
        captured, self._captured = self._captured, {}
        lists = [captured.get(tap_id, []) for tap_id in (*self.spec.tap_ids, len(self.layers) + 1)]
        if not lists[-1] or any(len(x) != len(lists[-1]) for x in lists):
            raise RuntimeError(
                f"taps {list(self.spec.tap_ids)} and the final hidden state were seen {[len(x) for x in lists]} times; each must "
                "run once in every forward. Was the model replaced or compiled after the trainer was built?"
            )
        joined = [x[0] if len(x) == 1 else torch.cat(x) for x in lists]
        return Taps(tuple(joined[:-1]), joined[-1])
