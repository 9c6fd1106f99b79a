"""Several processes joined by gloo, and the drafts and batches that they and single-process tests learn from."""

import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
from processes import fresh_processes
from torch import distributed as dist
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_codraft.attention.layout import PackedLayout
from hf_codraft.attention.shard import Shard
from hf_codraft.drafts.eagle3 import Eagle3Draft, Eagle3DraftConfig
from hf_codraft.taps.packed import PackedBatch, PolicyWeights

# Processes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(payload: bytes, rank: int, num_ranks: int, port: int, timeout_s: float, connection) -> None:
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(payload)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, timedelta(seconds=timeout_s), num_ranks, rank)
        report = (True, function(rank, *args))
        dist.destroy_process_group()
    except BaseException:
        report = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(report))


def run_ranks(function: Callable, num_ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Runs `function(rank, *args)` in fresh processes joined by gloo and returns what each rank returned.

    The first rank that fails ends the run: its traceback becomes the test's failure. After `timeout_s` seconds every
    process is killed and the ranks that had not finished are named.

    Args:
        function (callable): found by its module and name, so no closure; may use `torch.distributed`.
        num_ranks (`int`): number of processes.
        args: picklable, the same for every rank.
        timeout_s (`float`): seconds for the whole run, imports included.
    """
    context = fresh_processes()
    payload, port = pickle.dumps((function, args)), _free_port()
    processes, connections = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        rank_args = (payload, rank, num_ranks, port, timeout_s, sender)
        processes.append(context.Process(target=_rank_main, args=rank_args, daemon=True))
        processes[-1].start()
        sender.close()  # the child has its own, so that its death closes the pipe
        connections.append(receiver)
    try:
        return _collect(connections, time.monotonic() + timeout_s, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(connections: list, deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        missing = [rank for rank in range(len(connections)) if rank not in results]
        ready = wait([connections[rank] for rank in missing], timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            pytest.fail(f"ranks {missing} of {len(connections)} did not finish within {timeout_s} s.", pytrace=False)
        for connection in ready:
            rank = connections.index(connection)
            try:
                is_ok, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                pytest.fail(f"rank {rank} of {len(connections)} died without a word.", pytrace=False)
            if not is_ok:
                pytest.fail(f"rank {rank} of {len(connections)} failed:\n{value}", pytrace=False)
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]


# Drafts and batches without a policy

VOCAB, HIDDEN, NUM_TAPS = 48, 32, 3


def tiny_draft(*, seed: int = 0, exact: bool = True, **flags) -> Eagle3Draft:
    """A draft with every weight away from its initial value; if `exact`, in fp64 from end to end."""
    torch.manual_seed(seed)
    config = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4], max_position_embeddings=128, pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    draft = Eagle3Draft(Eagle3DraftConfig(**(config | flags)))
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    if draft.has_reduced_vocab:
        kept = torch.randperm(VOCAB)[: draft.config.draft_vocab_size].sort().values
        draft.set_vocabulary(kept, tiny_weights(seed=seed))
    return exact_norms(draft.double()) if exact else draft


def exact_norms(draft: Eagle3Draft) -> Eagle3Draft:
    """Swaps transformers' RMSNorm, which rounds to fp32 whatever it is given, for torch's, which computes in fp64."""
    for parent in list(draft.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, LlamaRMSNorm):
                norm = nn.RMSNorm(len(module.weight), eps=module.variance_epsilon, dtype=torch.float64)
                norm.weight = module.weight
                setattr(parent, name, norm)
    return draft


def tiny_weights(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> PolicyWeights:
    generator = torch.Generator().manual_seed(seed + 1)
    embedding, head = (
        torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)
    )
    return PolicyWeights(embedding, head / HIDDEN**0.5)


def tiny_batch(
    rows: list[tuple[int, int] | tuple[int, int, int, int]], *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> PackedBatch:
    """A packed batch of rows `(prompt length, completion length)` or `(..., hole start, hole end)` in the completion."""
    generator = torch.Generator().manual_seed(seed)
    layout = PackedLayout.from_lengths([row[0] + row[1] for row in rows])
    supervised = []
    for prompt, completion, *hole in rows:
        mask = torch.arange(prompt + completion) >= prompt
        if hole:
            mask[prompt + hole[0] : prompt + hole[1]] = False
        supervised.append(mask)
    tokens = layout.num_tokens
    return PackedBatch(
        Shard(layout),
        torch.randint(VOCAB, (tokens,), generator=generator),
        torch.cat(supervised),
        torch.randn(tokens, NUM_TAPS * HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype),
    )
