"""How tests start ranks."""

import multiprocessing
from multiprocessing.context import ForkServerContext

SLOW_IMPORTS = ["torch", "transformers.models.llama.modeling_llama", "peft", "hf_codraft.hub.resolve"]


def fresh_processes() -> ForkServerContext:
    """Processes as fresh as spawned ones, forked from a server that has done the slow imports once for all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW_IMPORTS)
    return context
