"""Policies whose packed rows are spread over gloo ranks, in DDP, FSDP2 and next to data parallelism."""

import os

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from packed_policies import Case, Result, assert_equal, build, join, ours, run_rank, truth
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_codraft.attention.plans import zigzag_plan
from hf_codraft.attention.shard import Shard
from hf_codraft.attention.transport import GroupTransport
from hf_codraft.parallel.accelerator import ContextParallelAccelerator
from hf_codraft.parallel.config import CoDraftParallelismConfig
from hf_codraft.policy.attention import packed_inputs

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
}
CASES = [
    Case("llama", "mixed", "contiguous", config=NINE_HEADS),
    Case("llama", "sparse", "zigzag"),  # on 4 ranks two hold nothing
    Case("llama", "long", "zigzag", reentrant=True, call={"route": "ring"}),
    Case("qwen3", "short", "segment_zigzag", config=WINDOWS, reentrant=False, call={"keep_remote": True}),
    Case("qwen3", "mixed", "balanced", lora=("q_proj", "v_proj"), reentrant=True),
    Case("mistral", "mixed", "zigzag", config={"sliding_window": 7}, call={"route": "ring"}),
    Case("mistral", "long", "balanced", config={"sliding_window": 1}),
    Case("qwen3_moe", "short", "zigzag", supervised="last"),
]
WRAPPED = Case("qwen3", "mixed", "zigzag", reentrant=False, config={"tie_word_embeddings": True})


def run_case(case: Case, wrap=None):
    shard = Shard(case.layout(dist.get_world_size()), dist.get_rank(), GroupTransport())
    model = ours(build(case), case)
    return run_rank(case, model if wrap is None else wrap(model), shard)


def shard_parameters(model):
    """FSDP2 over all ranks, layer by layer; its gradients are means over ranks, like DDP's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole_gradients(part):
    logits, gradients = part
    return logits, {name: gradient.full_tensor() for name, gradient in gradients.items()}


def all_cases(rank: int):
    plain = [run_case(case) for case in CASES]
    ddp = run_case(WRAPPED, DistributedDataParallel)
    fsdp = whole_gradients(run_case(WRAPPED, shard_parameters))
    precisions = ("no", "bf16") if dist.get_world_size() == 4 else ()
    return plain, ddp, fsdp, {precision: replicas(precision) for precision in precisions}


# Two data-parallel groups of two context-parallel ranks

ROWS = ((4, 1, 7), (2, 9))  # of each group; not as many targets in one as in the other


def replica_ids(number: int) -> torch.Tensor:
    return torch.randint(3, 48, (sum(ROWS[number]),), generator=torch.Generator().manual_seed(number))


def replicas(mixed_precision: str) -> dict[str, torch.Tensor]:
    """Gradients of the mean over both groups' targets, after accelerate's backward."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    layout = CoDraftParallelismConfig(dp_replicate_size=2, cp_size=2)
    accelerator = ContextParallelAccelerator(cpu=True, parallelism_config=layout, mixed_precision=mixed_precision)
    model = accelerator.prepare(ours(build(WRAPPED), WRAPPED))
    group = accelerator.axis_rank("dp")
    lengths = torch.tensor(ROWS[group])
    plan = zigzag_plan([0, *lengths.cumsum(0).tolist()], accelerator.axis_size("cp"))
    shard = Shard(plan, accelerator.context_parallel_rank, GroupTransport(accelerator.axis_group("cp")))
    inputs = packed_inputs(replica_ids(group), shard, num_items_in_batch=1)
    num_targets = accelerator.global_sum((inputs["shift_labels"] != -100).sum())
    accelerator.backward(accelerator.mean_loss(model(**inputs).loss, num_targets))
    return {name: parameter.grad for name, parameter in accelerator.unwrap_model(model).named_parameters()}


def replica_truth(autocast: bool = False) -> dict[str, torch.Tensor]:
    model = build(WRAPPED)
    rows = [row for number, lengths in enumerate(ROWS) for row in replica_ids(number).split(lengths)]
    num_targets = sum(len(row) - 1 for row in rows)
    for row in rows:
        if len(row) > 1:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=row[None], labels=row[None], num_items_in_batch=num_targets).loss
            loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_gloo_ranks_equal_transformers_on_the_separate_rows(run_ranks, world):
    by_rank = run_ranks(all_cases, world, timeout_s=300.0)
    for number, case in enumerate(CASES):
        assert_equal(join(case.layout(world), [plain[number] for plain, *_ in by_rank]), truth(case, build(case)))
    reference, layout = truth(WRAPPED, build(WRAPPED)), WRAPPED.layout(world)
    for wrapped in (1, 2):
        parts = [results[wrapped] for results in by_rank]
        logits = layout.unshard([part for part, _ in parts])
        for _, gradients in parts:  # each rank has the mean over ranks of the whole gradient
            mean = {name.removeprefix("module."): gradient * world for name, gradient in gradients.items()}
            assert_equal(Result(logits, mean), reference)
    if world == 4:
        empty, exact, stock = torch.zeros(1), replica_truth(), replica_truth(autocast=True)
        for *_, replicated in by_rank:
            assert_equal(Result(empty, replicated["no"]), Result(empty, exact))
            for name, gradient in exact.items():
                # as exact as transformers under autocast; twice, since roundings fall differently
                error, reference = ((x[name] - gradient).norm() for x in (replicated["bf16"], stock))
                assert 0 < error <= 2 * reference, name
