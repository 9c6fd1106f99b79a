"""Layers whose weights vLLM turns into another form once it has loaded them, so that they can be loaded again.

Serves vLLM 0.31 and 0.32. Delete when a colocated vLLM redoes these forms itself after `load_weights`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_codraft.serving.cpu import is_cpu
from hf_codraft.serving.refit import digest


@contextmanager
def exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While open, a name of a foreign module or class means something else."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@dataclass(frozen=True)
class _Packed:
    """A layer, its plain parameters with their values, and what makes the packed form of them."""

    layer: nn.Module
    plain: dict[str, tuple[nn.Parameter, torch.Tensor]]
    pack: Callable[[nn.Module], None]

    @classmethod
    def before(cls, layer: nn.Module, pack: Callable[[nn.Module], None]) -> "_Packed":
        return cls(layer, {name: (p, p.data) for name, p in layer.named_parameters(recurse=False)}, pack)


class PackedLayers:
    """What an engine's layers need in order to be loaded again.

    As shipped, a second load goes wrong: on CPU the plain weights of linear layers are dropped, and those of experts and
    convolutions give their place to packed ones; some GPU kernels want experts in another order; and latent attention
    (MLA) multiplies by matrices that were cut from a weight. While [`recording`] is open, what is needed to redo this is
    kept. On CPU that is one more copy of the weights.
    """

    def __init__(self) -> None:
        self._packed: list[_Packed] = []
        self._redo: list[Callable[[], None]] = []
        self.unknown: list[str] = []  # parameters that were changed after loading, nobody here knows how

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, engines that are built are remembered."""
        from vllm.model_executor.model_loader import base_loader

        process = base_loader.process_weights_after_loading

        def watched(model: nn.Module, model_config: Any, device: torch.device) -> None:
            before = _state(model)
            process(model, model_config, device)
            self._note(model, before, model_config.dtype)

        with ExitStack() as patches:
            patches.enter_context(exchanged(base_loader, "process_weights_after_loading", watched))
            if is_cpu():
                self._record_cpu(patches)
            yield

    def _record_cpu(self, patches: ExitStack) -> None:
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        pack_linear, pack_experts = (
            utils.dispatch_cpu_unquantized_gemm,
            CPUUnquantizedExperts.process_weights_after_loading,
        )

        def keep_linear(layer: nn.Module, remove_weight: bool) -> None:
            packed = _Packed.before(layer, partial(pack_linear, remove_weight=False))
            packed.pack(layer)
            self._packed.append(packed)

        def keep_experts(experts: Any, layer: nn.Module) -> None:
            packed = _Packed.before(layer, partial(pack_experts, experts))
            packed.pack(layer)
            self._packed.append(packed)

        patches.enter_context(exchanged(utils, "dispatch_cpu_unquantized_gemm", keep_linear))
        patches.enter_context(exchanged(CPUUnquantizedExperts, "process_weights_after_loading", keep_experts))

    def _note(self, model: nn.Module, before: dict[str, tuple], dtype: torch.dtype) -> None:
        """Sorts what changed into what is packed here, what vLLM can redo in place, and what nobody knows."""
        from vllm.model_executor.layers.attention import MLAAttention
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        after, modules = _state(model), dict(model.named_modules())
        known = {id(packed.layer) for packed in self._packed}
        changed: dict[str, list[str]] = {}
        for name, state in before.items():
            if after.get(name) != state:
                changed.setdefault(name.rpartition(".")[0], []).append(name)
        for owner, names in changed.items():
            module = modules[owner]
            method = getattr(module, "quant_method", None)
            if id(module) in known:
                continue
            if isinstance(method, UnquantizedFusedMoEMethod) and after.keys() >= set(names):
                # Made for this by vLLM: from a second call on it orders the rows within the parameters that it has.
                self._redo.append(partial(method.process_weights_after_loading, module))
            else:
                self.unknown += names
        for module in modules.values():
            if isinstance(module, MLAAttention):
                self._redo.append(partial(module.process_weights_after_loading, dtype))

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """While open, the layers have their plain weights: load into them and look at them here."""
        for packed in self._packed:
            for name, (parameter, data) in packed.plain.items():
                parameter.data = data
                setattr(packed.layer, name, parameter)
        try:
            yield
        finally:
            for packed in self._packed:
                packed.pack(packed.layer)
            for redo in self._redo:
                redo()


def _state(model: nn.Module) -> dict[str, tuple]:
    """Shape, dtype and digest of every parameter."""
    parameters = dict(model.named_parameters())
    digests = [digest(p).item() for p in parameters.values()]
    return {n: (p.shape, p.dtype, d) for (n, p), d in zip(parameters.items(), digests, strict=True)}
