"""Two repairs of vLLM's CPU backend. Each stands alone and does nothing on other platforms.

Both serve vLLM 0.31 and 0.32. Delete the first when vLLM can load weights into packed layers, the second when
`test_speculative_sampling_is_lossless` passes without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


class PackedLayers:
    """The linear layers of an engine whose weights vLLM packs for oneDNN (or AMX).

    As shipped, vLLM drops the plain weight after packing, so nothing can be loaded into the layer again. While
    [`recording`] is open, each layer keeps its plain weight beside the packed one; [`repack`] makes the packed one
    again after a load. Costs one more copy of the weights.
    """

    def __init__(self) -> None:
        self.layers: list[nn.Module] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        if not is_cpu():
            yield
            return
        from vllm.model_executor.layers import utils

        original = utils.dispatch_cpu_unquantized_gemm

        def keep_plain(layer: nn.Module, remove_weight: bool) -> None:
            original(layer, remove_weight=False)
            self.layers.append(layer)

        utils.dispatch_cpu_unquantized_gemm = keep_plain
        try:
            yield
        finally:
            utils.dispatch_cpu_unquantized_gemm = original

    def repack(self) -> None:
        if not self.layers:
            return
        from vllm.model_executor.layers import utils

        for layer in self.layers:
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """One value a request, repeated for its tokens: `[a, b]` with `cu_num_tokens` `[2, 3]` gives `[a, a, b]`."""
    repeats = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(repeats, output_size=num_tokens)


def repair_rejection_sampling() -> None:
    """Makes speculation at a temperature above 0 right on CPU.

    vLLM's CPU kernel behind `expand_batch_to_tokens` writes temperature, top_p and top_k of a request into a copy, so
    tokens are drawn from garbage (NaN log-probs, token id = vocabulary size). The plain torch function replaces it.
    """
    if not is_cpu():
        return
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
