"""Accelerators on gloo ranks: gradients, batches and metrics are those of one process."""

import errno
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from peft import LoraConfig, get_peft_model
from tap_ranks import outcomes_of
from tiny import policy
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hf_codraft.parallel import accelerator as accelerator_module
from hf_codraft.parallel import checkpoint
from hf_codraft.parallel.accelerator import ContextParallelAccelerator, PipelineAccelerator
from hf_codraft.parallel.config import CoDraftParallelismConfig
from hf_codraft.parallel.loading import load_stage
from hf_codraft.parallel.pipeline import PolicyPipeline, next_token_loss
from hf_codraft.parallel.stages import build_stage, plan_stages

NUM_ROWS, LENGTH, WIDTH = 8, 6, 5


def start(kind, layout, **kwargs):
    """A fresh accelerator, as if the process had just been launched."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ["OMP_NUM_THREADS"] = "1"
    return kind(cpu=True, parallelism_config=None if layout is None else CoDraftParallelismConfig(**layout), **kwargs)


def message_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# Context parallelism, with a model that looks at each token alone


class Tokenwise(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1)).double()

    def forward(self, x):
        return self.inner(x).squeeze(-1).square()


def rows():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.rand(NUM_ROWS, LENGTH, generator=generator) < 0.6
    mask[:, LENGTH // 2 :] &= torch.arange(NUM_ROWS)[:, None] % 2 == 0  # half of the second shards supervise nothing
    return [{"row": torch.tensor(i), "x": x[i], "mask": mask[i]} for i in range(NUM_ROWS)]


def whole_gradients():
    model, batch = Tokenwise(), torch.utils.data.default_collate(rows())
    (model(batch["x"]) * batch["mask"]).sum().div(batch["mask"].sum()).backward()
    return [p.grad for p in model.parameters()]


class Stream(IterableDataset):
    def __iter__(self):
        yield from rows()


def train_sharded(cp_size, num_replicas, accumulation):
    """Gradients of one optimizer step over all rows, and the rows this rank saw."""
    layout = {"cp_size": cp_size, "dp_replicate_size": num_replicas}
    accelerator = start(ContextParallelAccelerator, layout, gradient_accumulation_steps=accumulation)
    model = Tokenwise()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    batch_size = NUM_ROWS // (num_replicas * accumulation)
    loader = DataLoader(rows(), batch_size=batch_size, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = list(loader)
    assert len(batches) == accumulation
    shard = slice(accelerator.context_parallel_rank, None, cp_size)
    count = accelerator.global_sum(sum(batch["mask"][:, shard].sum() for batch in batches))
    for batch in batches:
        with accelerator.accumulate(model):
            local_sum = (model(batch["x"][:, shard]) * batch["mask"][:, shard]).sum()
            accelerator.backward(accelerator.mean_loss(local_sum, count))
            if accelerator.sync_gradients:
                gradients = [p.grad.clone() for p in model.parameters()]
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    return {
        "gradients": gradients,
        "norm": float(norm),
        "wrapped": type(model).__name__,
        "rows": [batch["row"].tolist() for batch in batches],
        "streamed": [batch["row"].tolist() for batch in stream],
        "scheduler_steps": scheduler.scheduler.last_epoch,
        "cp_rank": accelerator.context_parallel_rank,
    }


def context_parallel_cases(rank, layouts):
    results = [train_sharded(*layout) for layout in layouts]
    refusals = {
        "dispatch": message_of(
            start, ContextParallelAccelerator, {}, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
        ),
        "pipeline": message_of(start, ContextParallelAccelerator, {"pp_size": dist.get_world_size()}),
        "ranks": message_of(start, ContextParallelAccelerator, {"cp_size": 3}),
        "mixed": message_of(start, PipelineAccelerator, {}, mixed_precision="bf16"),
    }
    start(Accelerator, None)
    refusals["second"] = message_of(ContextParallelAccelerator, cpu=True)
    return results, refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [(2, [(2, 1, 1), (2, 1, 4), (1, 2, 2)]), (4, [(2, 2, 1), (2, 2, 2), (4, 1, 2), (1, 4, 1)])],
)
def test_gradients_over_shards_and_replicas_are_those_of_the_global_mean(run_ranks, num_ranks, layouts):
    expected = whole_gradients()
    norm = float(torch.stack([g.norm() for g in expected]).norm())
    by_rank = run_ranks(context_parallel_cases, num_ranks, layouts)
    for number, (cp_size, num_replicas, _) in enumerate(layouts):
        results = [cases[number] for cases, _ in by_rank]
        for rank, result in enumerate(results):
            assert result["wrapped"] == "DistributedDataParallel"
            for gradient, whole in zip(result["gradients"], expected, strict=True):
                torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-14)
            assert result["norm"] == pytest.approx(norm, rel=1e-12)
            assert result["cp_rank"] == rank % cp_size
            assert result["scheduler_steps"] == num_replicas
            assert result["rows"] == results[rank - rank % cp_size]["rows"]
            assert result["streamed"] == results[rank - rank % cp_size]["streamed"]
        for key in ("rows", "streamed"):
            seen = [row for result in results[::cp_size] for batch in result[key] for row in batch]
            assert sorted(seen) == list(range(NUM_ROWS)), f"{key}: the replicas must share the rows out"
    for _, refusals in by_rank:
        assert "dispatch_batches" in refusals["dispatch"]
        assert "PipelineAccelerator" in refusals["pipeline"]
        assert f"makes 3 ranks, but {num_ranks} were launched" in refusals["ranks"]
        assert "mixed_precision ('bf16')" in refusals["mixed"]
        assert "made in this process before" in refusals["second"]


def test_one_process_needs_no_layout():
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = PipelineAccelerator(cpu=True)
    try:
        assert (accelerator.process_index, accelerator.num_processes, accelerator.pipeline_parallel_rank) == (0, 1, 0)
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.tensor([3.0, 0.0, 4.0])
        accelerator.reduce_gradients([parameter])
        assert float(accelerator.clip_grad_norm_([parameter], 1.0)) == pytest.approx(5.0)
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.0, 0.8]))
        tensors = {"a": torch.tensor([1.0, 2.0])}
        assert accelerator.gather(tensors)["a"] is tensors["a"] and accelerator.gather_object([1]) == [1]
        torch.testing.assert_close(accelerator.reduce(tensors, "mean"), tensors)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)], ids=str)
def test_the_mean_over_nothing_and_its_gradient_are_0(count):
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        weight = nn.Parameter(torch.ones(3))
        loss = ContextParallelAccelerator(cpu=True).mean_loss((weight * torch.zeros(3)).sum(), count)
        loss.backward()
        assert loss == 0 and torch.equal(weight.grad, torch.zeros(3))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


# Pipelines

LAYERS = 4


# Model's kind and number of stages; two a rank in "interleaved"
STEPS = {"tied": 2, "untied": 2, "interleaved": 4, "lora": 2}


def tiny_model(kind="tied"):
    model = policy("qwen3", tie=kind != "untied", num_hidden_layers=LAYERS)
    if kind != "lora":
        return model
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def token_batch(num_rows=8, *, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 256, (num_rows, 10), generator=generator)}


def next_token_gradients(model, batch, num_parts):
    """Mean over `num_parts` equal parts of the mean next-token loss."""
    for ids in batch["input_ids"].chunk(num_parts):
        (model(input_ids=ids, labels=ids, use_cache=False).loss / num_parts).backward()
    return gradients_of(model)


def gradients_of(*models):
    return {name: p.grad.clone() for model in models for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def sums_that_depend_on_their_place(accelerator):
    """As in a ring of three replicas and more, where a chunk's offset says which addition comes first."""
    original = accelerator_module._average

    def average(gradients, group):
        original(gradients, group)
        for gradient in gradients if accelerator.pipeline_parallel_rank else ():
            gradient.copy_(torch.nextafter(gradient, torch.full_like(gradient, float("inf"))))

    with mock.patch.object(accelerator_module, "_average", average):
        yield


def step_pipeline(pp_size, num_replicas, kind, max_norm):
    accelerator = start(PipelineAccelerator, {"pp_size": pp_size, "dp_replicate_size": num_replicas})
    num_stages, rank = STEPS[kind], accelerator.pipeline_parallel_rank
    plan = plan_stages(LAYERS, num_stages)
    made = [build_stage(tiny_model(kind), plan, stage) for stage in range(rank, num_stages, pp_size)]
    stages = [accelerator.prepare(stage) for stage in made]
    schedule = "1F1B" if num_stages == pp_size else "Interleaved1F1B"
    pipeline = PolicyPipeline(stages, pp_size, group=accelerator.pipeline_group, schedule=schedule)
    parameters, models = [p for stage in stages for p in stage.parameters()], [stage.model for stage in stages]
    # every replica takes its share of the rows; each microbatch counts as a part of the mean
    ids = token_batch()["input_ids"].chunk(num_replicas)[accelerator.process_index]
    batch = {"input_ids": ids}

    def loss(hidden, stage, microbatch):
        return next_token_loss(hidden, stage, microbatch) / pp_size

    pipeline.train_step(batch, loss)
    unused = nn.Parameter(torch.zeros(2))
    with sums_that_depend_on_their_place(accelerator):
        accelerator.reduce_gradients([*parameters, unused], bucket_bytes=2**15)
    gradients = gradients_of(*models)
    norm = accelerator.clip_grad_norm_(parameters, max_norm)
    clipped = gradients_of(*models)
    infinite = accelerator.clip_grad_norm_(parameters, 1e9, norm_type=float("inf"))
    copies = [copy.grad for copy in (stage.tied_parameter for stage in stages) if copy is not None]
    stranger = nn.Parameter(torch.zeros(2))
    stranger.grad = torch.ones(2)
    return {
        "type": type(stages[0]).__name__,
        "copies": copies,
        "stranger": message_of(accelerator.clip_grad_norm_, [*parameters, stranger], 1.0),
        "gradients": gradients,
        "clipped": clipped,
        "norm": float(norm),
        "infinite": float(infinite),
        "unused": unused.grad,
        "index": (accelerator.process_index, accelerator.num_processes, accelerator.pipeline_parallel_rank),
    }


def talk_between_replicas(pp_size, num_replicas):
    accelerator = start(PipelineAccelerator, {"pp_size": pp_size, "dp_replicate_size": num_replicas})
    index, stage = accelerator.process_index, accelerator.pipeline_parallel_rank
    own = torch.full((index + 1, 2), 10.0 * stage + index)
    padded = accelerator.pad_across_processes(own, pad_index=-1)
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    accelerator.synchronize_random_state()
    draws = (float(torch.rand(())), random.random(), float(np.random.rand()))
    loader = accelerator.prepare(DataLoader(list(range(6)), batch_size=2, shuffle=True))
    samples, metrics, words = [], [], []
    for batch in loader:
        samples.append(batch.tolist())
        metrics += accelerator.gather_for_metrics(batch).tolist()
        words += accelerator.gather_for_metrics([str(item) for item in batch.tolist()])
    rare = nn.Parameter(torch.zeros(3))  # a gradient on the first replica only
    if index == 0:
        rare.grad = torch.ones(3)
    accelerator.reduce_gradients([rare])
    return {
        "gathered": accelerator.gather({"x": padded, "scalar": torch.tensor(float(index))}),
        "padded_first": accelerator.pad_across_processes(own, dim=0, pad_index=-1, pad_first=True),
        "objects": accelerator.gather_object([f"{stage}-{index}"]),
        "reduced": [
            float(accelerator.reduce(torch.tensor(float(index + 1)), kind)) for kind in ("sum", "mean", "max", "none")
        ],
        "draws": draws,
        "samples": samples,
        "metrics": metrics,
        "words": words,
        "rare": rare.grad.tolist(),
        "is_main": accelerator.is_main_process,
        "is_last": accelerator.is_last_process,
        "refusals": [
            message_of(function)
            for function in (
                lambda: accelerator.get_state_dict(None),
                accelerator.save_state,
                accelerator.load_state,
                accelerator.save_model,
                accelerator.split_between_processes,
                lambda: accelerator.reduce(torch.zeros(1), "product"),
            )
        ],
    }


ACCUMULATION = 2  # of three batches that a replica has in an epoch, so that the second step has one only


def long_rows():
    return [{"input_ids": row} for row in token_batch(24)["input_ids"]]


def optimizer_and_scheduler(parameters):
    """A cycle that ends between the two steps that two replicas make at once."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=7)


class Replica:
    """One rank of a replica in training, with everything prepared at once."""

    def __init__(self, accelerator, stage):
        self.accelerator = accelerator
        optimizer, scheduler = optimizer_and_scheduler(stage.parameters())
        loader = DataLoader(long_rows(), batch_size=4)
        self.stage, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            stage, optimizer, scheduler, loader
        )
        self.pipeline = PolicyPipeline([self.stage], 2, group=accelerator.pipeline_group)

    def train_epoch(self):
        """The learning rate after every batch."""
        rates = []
        for batch in self.loader:
            with self.accelerator.accumulate(self.stage):
                self.pipeline.train_step(batch, lambda *args: next_token_loss(*args) / (2 * ACCUMULATION))
                if self.accelerator.sync_gradients:
                    self.accelerator.reduce_gradients(self.stage.parameters())
                    self.accelerator.clip_grad_norm_(self.stage.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            rates.append(self.optimizer.param_groups[0]["lr"])
        return rates

    def weights(self):
        return {name: p.detach().clone() for name, p in self.stage.model.named_parameters()}


def train_whole(num_replicas, num_epochs):
    """Weights and learning rates of accelerate's own loop in one process, told that it is one of `num_replicas`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator, model, rates = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION), tiny_model(), []
    loader = DataLoader(long_rows(), batch_size=4 * num_replicas)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, *optimizer_and_scheduler(model.parameters()), loader
    )
    state = SimpleNamespace(num_processes=num_replicas)
    with mock.patch("accelerate.scheduler.AcceleratorState", return_value=state):
        for _ in range(num_epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch, labels=batch["input_ids"], use_cache=False).loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return dict(model.named_parameters()), rates


def save_to_a_full_disk(accelerator, folder):
    """The last stage of the first replica can't write."""
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "disk full"))
    is_struck = accelerator.process_index == 0 and accelerator.pipeline_parallel_rank == 1
    with mock.patch.object(checkpoint, "save_file", full if is_struck else checkpoint.save_file):
        return message_of(accelerator.save_pretrained, folder)


def resume_replicas(root):
    layout, plan = {"pp_size": 2, "dp_replicate_size": 2}, plan_stages(LAYERS, 2)
    accelerator = start(PipelineAccelerator, layout, gradient_accumulation_steps=ACCUMULATION)
    run = Replica(accelerator, build_stage(tiny_model(), plan, accelerator.pipeline_parallel_rank))
    torch.manual_seed(20 + dist.get_rank())
    rates = run.train_epoch()
    accelerator.save_pretrained(f"{root}/policy")
    parts = {"optimizer": run.optimizer, "schedulers": [run.scheduler]}
    accelerator.save_training_state(f"{root}/state", **parts, counters={"epoch": 1})
    full = save_to_a_full_disk(accelerator, f"{root}/gloo")  # a name that must not pass for the backend's
    second, straight, next_draw = run.train_epoch(), run.weights(), float(torch.rand(()))

    accelerator = start(PipelineAccelerator, layout, gradient_accumulation_steps=ACCUMULATION)
    run = Replica(accelerator, load_stage(f"{root}/policy", plan, accelerator.pipeline_parallel_rank))
    parts = {"optimizer": run.optimizer, "schedulers": [run.scheduler]}
    assert accelerator.load_training_state(f"{root}/state", **parts) == {"epoch": 1}
    again, resumed = run.train_epoch(), run.weights()
    report = {
        "differ": [name for name, weight in straight.items() if not torch.equal(weight, resumed[name])],
        "weights": straight,
        "rates": rates + second,
        "rates again": rates + again,
        "draw": next_draw,
        "draw again": float(torch.rand(())),
        "prepared": [type(part).__name__ for part in (run.stage, run.optimizer, run.scheduler, run.loader)],
        "full": full,
    }

    accelerator = start(PipelineAccelerator, {"dp_replicate_size": 4})  # two replicas that were not there
    stage = accelerator.prepare(load_stage(f"{root}/policy", plan_stages(LAYERS, 1), 0))
    optimizer, scheduler = optimizer_and_scheduler(stage.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_training_state(f"{root}/state", optimizer=optimizer, schedulers=[scheduler])
    assert scheduler.last_epoch == 2 * 2 and optimizer.param_groups[0]["lr"] == rates[-1]
    return report | {"warned": [str(w.message) for w in caught if "random state" in str(w.message)]}


def num_pidfds():
    gc.collect()
    places = Path("/proc/self/fd").iterdir()
    return sum(place.is_symlink() and "pidfd" in os.readlink(place) for place in places)


def lose_the_last_rank(pp_size, num_replicas, root):
    """What this rank's calls raise once the last one was killed, by what they were doing, and when they all had."""
    before = num_pidfds()
    accelerator = start(PipelineAccelerator, {"pp_size": pp_size, "dp_replicate_size": num_replicas})
    stage = build_stage(tiny_model(), plan_stages(LAYERS, pp_size), accelerator.pipeline_parallel_rank)
    stage, optimizer = accelerator.prepare(stage, torch.optim.SGD(stage.parameters()))
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    watched = num_pidfds()
    dist.barrier()
    killed_at_s = time.monotonic()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls = {}
    if accelerator.process_index == num_replicas - 1:  # in the pipeline of the dead
        calls["clipping gradients"] = lambda: accelerator.clip_grad_norm_(stage.parameters(), 1.0)
        calls["sharing random states"] = accelerator.synchronize_random_state
    elif accelerator.pipeline_parallel_rank == pp_size - 1:
        calls["averaging gradients"] = lambda: accelerator.reduce_gradients(stage.parameters())
        calls["gathering"] = lambda: accelerator.gather(torch.ones(1))
        calls["gathering objects"] = lambda: accelerator.gather_object([1])
        calls["reducing"] = lambda: accelerator.reduce(torch.ones(1))
    calls["waiting for everyone"] = accelerator.wait_for_everyone
    if num_replicas == 1:  # where there are more, who is left may wait for another that has raised already
        calls["saving policy"] = lambda: accelerator.save_pretrained("policy")
        calls["saving state"] = lambda: accelerator.save_training_state("state", optimizer=optimizer)
        calls["resuming from state"] = lambda: accelerator.load_training_state("state", optimizer=optimizer)
    os.chdir(root)
    messages = {what: message_of(call) for what, call in calls.items()}
    seconds = time.monotonic() - killed_at_s
    accelerator.end_training()
    return messages, seconds, (before, watched, num_pidfds())


def pipeline_cases(rank, pp_size, num_replicas, max_norm, root):
    """What the cases found goes to a file, since the last rank does not return."""
    try:
        steps = {kind: step_pipeline(pp_size, num_replicas, kind, max_norm) for kind in STEPS}
        resumed = resume_replicas(root) if num_replicas > 1 else None
        torch.save((steps, talk_between_replicas(pp_size, num_replicas), resumed), f"{root}/found-{rank}.pt")
        return lose_the_last_rank(pp_size, num_replicas, root)
    except Exception as error:
        raise AssertionError(traceback.format_exc()) from error


@pytest.mark.slow
@pytest.mark.parametrize(("pp_size", "num_replicas"), [(2, 2), (2, 1)])
def test_a_pipeline_of_replicas_is_seen_as_its_replicas(tmp_path, pp_size, num_replicas):
    max_norm, num_ranks = 0.05, pp_size * num_replicas
    outcomes = outcomes_of(pipeline_cases, num_ranks, pp_size, num_replicas, max_norm, str(tmp_path), timeout_s=120.0)
    check_loss(outcomes)
    by_rank = [torch.load(tmp_path / f"found-{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    for kind in STEPS:
        model = tiny_model(kind)
        whole = next_token_gradients(model, token_batch(), pp_size * num_replicas)
        infinite = max(float(gradient.abs().max()) for gradient in whole.values())
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        assert norm > max_norm
        scale = max(float(gradient.abs().max()) for gradient in whole.values())
        seen = set()
        copies = [copy for steps, *_ in by_rank for copy in steps[kind]["copies"]]
        assert len(copies) == (0 if kind == "untied" else 2 * num_replicas)
        if kind != "lora":  # which leaves the tied weight as it is
            assert all(torch.equal(copy, copies[0]) for copy in copies)
        for rank, (steps, *_) in enumerate(by_rank):
            step = steps[kind]
            assert step["type"] == "PolicyStage" and step["unused"] is None
            assert step["index"] == (rank % num_replicas, num_replicas, rank // num_replicas)
            assert "parameters has 1 of " in step["stranger"]
            assert step["norm"] == pytest.approx(norm, rel=1e-6)
            assert step["infinite"] == pytest.approx(infinite * max_norm / norm, rel=1e-5)
            for name, gradient in step["gradients"].items():
                source = name if name in whole else "model.embed_tokens.weight"  # the tied head
                torch.testing.assert_close(gradient, whole[source], rtol=1e-5, atol=1e-6 * scale)
                clipped = dict(model.named_parameters())[source].grad
                torch.testing.assert_close(step["clipped"][name], clipped, rtol=1e-5, atol=1e-6 * scale)
                seen.add(source)
        assert seen == set(whole)
    check_talk([talk for _, talk, _ in by_rank], pp_size, num_replicas)
    if num_replicas > 1:
        check_resumed([resumed for *_, resumed in by_rank])


def check_loss(outcomes):
    *living, dead = outcomes
    assert not any(outcome.text for outcome in outcomes), [outcome.text for outcome in outcomes]
    assert dead.error == "died"
    done = set()
    for rank, outcome in enumerate(living):
        messages, seconds, num_watched = outcome.value
        done |= messages.keys()
        for what, message in messages.items():
            pattern = rf"PeerLost: rank {rank} lost the others in {what}: rank\(s\) \[(\d, )*{len(living)}\] ended"
            assert re.match(pattern, message or ""), (rank, what, message)
        assert seconds < 10.0
        assert num_watched == (0, len(living), 0)
    assert len(done) == (6 if len(living) == 1 else 7)


def check_resumed(reports):
    weights, rates = train_whole(num_replicas=2, num_epochs=2)
    assert len({report["draw"] for report in reports}) == len(reports)
    for rank, report in enumerate(reports):
        assert report["prepared"] == [
            "PolicyStage",
            "AcceleratedOptimizer",
            "DataParallelScheduler",
            "DataLoaderShard",
        ]
        assert report["rates"] == report["rates again"] == rates
        for name, weight in report["weights"].items():
            whole = weights[name if name in weights else "model.embed_tokens.weight"]
            torch.testing.assert_close(weight, whole, rtol=1e-4, atol=1e-5)
        if rank == 2:
            assert report["full"].startswith("OSError: [Errno 28]")
        else:
            assert report["full"].startswith("RuntimeError: could not "), report["full"]
            assert "rank 2: OSError: [Errno 28] disk full" in report["full"]
        assert not report["differ"], f"rank {rank} did not go on as an uninterrupted run"
        assert report["draw again"] == report["draw"]
        assert len(report["warned"]) == (rank >= 2)
        assert all(f"no random state of replica {rank};" in message for message in report["warned"])


def check_talk(talks, pp_size, num_replicas):
    for rank, talk in enumerate(talks):
        stage, index = divmod(rank, num_replicas)
        rows = [
            [10.0 * stage + i] * 2 if row <= i else [-1.0, -1.0]
            for i in range(num_replicas)
            for row in range(num_replicas)
        ]
        assert talk["gathered"]["x"].tolist() == rows
        if num_replicas > 1:
            assert talk["gathered"]["scalar"].tolist() == [float(i) for i in range(num_replicas)]
            assert talk["padded_first"][0].tolist() == ([-1.0] * 2 if index == 0 else [10.0 * stage + 1] * 2)
        assert talk["objects"] == [f"{stage}-{i}" for i in range(num_replicas)]
        total = sum(range(1, num_replicas + 1))
        assert talk["reduced"] == [total, total / num_replicas, num_replicas, index + 1]
        assert talk["draws"] == talks[index]["draws"]  # the first stage of this replica
        assert talk["samples"] == talks[index]["samples"]
        assert sorted(talk["metrics"]) == list(range(6)) and talk["words"] == [str(item) for item in talk["metrics"]]
        assert talk["rare"] == [1.0 / num_replicas] * 3
        assert talk["is_main"] == (rank == 0) and talk["is_last"] == (rank == len(talks) - 1)
        assert all(message is not None for message in talk["refusals"])
    if num_replicas > 1:
        assert talks[0]["draws"] != talks[1]["draws"]


# The launcher

SCRIPT = """
    import json, sys
    import torch
    from hf_codraft.parallel.accelerator import ContextParallelAccelerator

    accelerator = ContextParallelAccelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [torch.full((6, 4), float(row)) for row in range(4)]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        shard = batch[:, accelerator.context_parallel_rank :: accelerator.axis_size("cp")]
        count = accelerator.global_sum(torch.tensor(float(shard[..., 0].numel())))
        accelerator.backward(accelerator.mean_loss(model(shard).square().sum(), count))
        optimizer.step()
        optimizer.zero_grad()
    report = [repr(accelerator.parallelism_config), accelerator.unwrap_model(model).weight.flatten().tolist()]
    print("REPORT" + json.dumps(report), flush=True) if accelerator.is_main_process else None
"""


@pytest.mark.slow
def test_accelerate_launch_starts_context_parallel_cpu_ranks(tmp_path):
    """accelerate 1.15 takes --use_parallelism_config only together with FSDP2's flags; on CPU ranks they change nothing."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    flags = "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0"
    flags += " --use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_size 2"
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags.split(), str(script)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    assert "cp_size=2" in line
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in (0, 2):
        batch = torch.stack([torch.full((6, 4), float(row)) for row in (first, first + 1)])
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    weight = torch.tensor(json.loads(line.removeprefix("REPORT"))[1])
    torch.testing.assert_close(weight, model.weight.detach().flatten(), rtol=1e-5, atol=1e-6)
