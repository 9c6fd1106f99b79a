"""A split policy against the unsplit transformers model, microbatch by microbatch: losses and gradients.

What runs on one stage is the same arithmetic in the same order as in the whole model, so fp32 results are compared bit for
bit. Two cases can't be: a tied weight gets its gradients in another order (all of the head's, then all of the embeddings'),
and filling rows change how matrix products are blocked.
"""

import copy
import os
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import families
import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import fresh_processes
from torch import distributed as dist

from hf_codraft.parallel import schedule as schedule_module
from hf_codraft.parallel.pipeline import PolicyPipeline, next_token_loss
from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.parallel.stages import build_stage, plan_stages
from hf_codraft.taps.slots import Action

NUM_MICROBATCHES = 4


def make(model, *, num_stages=2, num_microbatches=NUM_MICROBATCHES, group=None, **kwargs):
    """This rank's pipeline over copies of the model's parts."""
    group = dist.group.WORLD if group is None else group
    plan = plan_stages(4 if num_stages < 8 else 8, num_stages, last_stage_layers=kwargs.pop("last_stage_layers", None))
    mine = range(dist.get_rank(group), num_stages, group.size())
    stages = [build_stage(model, plan, stage) for stage in mine]
    return PolicyPipeline(stages, num_microbatches, group=group, **kwargs)


def cut(batch, num_microbatches=NUM_MICROBATCHES):
    parts = {name: tensor.tensor_split(num_microbatches) for name, tensor in batch.items()}
    return [{name: part[m] for name, part in parts.items()} for m in range(num_microbatches)]


def labels(rows):
    return rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)


def whole_step(model, batch, num_microbatches=NUM_MICROBATCHES):
    """transformers' own loss on the unsplit model; gradients accumulate in the model."""
    losses = []
    for rows in cut(batch, num_microbatches):
        inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids") if name in rows}
        num_items = max(int((labels(rows)[:, 1:] != -100).sum()), 1)
        loss = model(**inputs, labels=labels(rows), num_items_in_batch=num_items, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach().float())
    return torch.stack(losses)


def gradients_differ(pipeline, model, *, exact=True):
    """Names of this rank's parameters whose gradient is not the whole model's."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    differing = []
    for stage in pipeline.stages:
        for name, parameter in stage.model.named_parameters():
            expected = whole[name].grad
            if expected is None or parameter.grad is None:
                same = expected is None and parameter.grad is None
            elif exact and parameter is not stage.tied_parameter:
                same = torch.equal(parameter.grad, expected)
            else:  # fp32 sums in another order
                same = torch.allclose(parameter.grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
            if not same:
                differing.append(f"stage {stage.stage}: {name}")
    return differing


def check_steps(name, model, *batches, exact=True, autocast=None, **kwargs):
    """Steps that accumulate into one gradient, as `len(batches)` accumulation steps do."""
    pipeline, whole = make(model, **kwargs), copy.deepcopy(model)
    num_microbatches = pipeline.num_microbatches
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            losses = pipeline.train_step(batch, next_token_loss)
            expected = whole_step(whole, batch, num_microbatches)
        if exact:
            assert torch.equal(losses, expected), (name, losses, expected)
        else:
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6, msg=name)
    assert not gradients_differ(pipeline, whole, exact=exact), (name, gradients_differ(pipeline, whole, exact=exact))
    return pipeline, whole


# Two ranks


def with_lora(model, **kwargs):
    """LoRA whose B is not zero, so that every adapter has a gradient."""
    torch.manual_seed(7)
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **kwargs)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def check_families(rank):
    rows = families.batch(8, 12)
    for family in sorted(families.CONFIGS):
        for tie in (False, True):
            check_steps(f"{family}, tied {tie}", families.policy(family, tie=tie), rows)
    positions = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    check_steps("position_ids", families.policy("qwen3"), rows | {"position_ids": positions})
    check_steps("bf16", families.policy("llama").bfloat16(), rows)
    check_steps("autocast", families.policy("llama"), rows, autocast=True)
    check_steps("short last stage", families.policy("qwen2"), rows, last_stage_layers=1)
    check_steps("as many rows as microbatches", families.policy("llama"), families.batch(4, 12))
    for tie in (False, True):
        check_steps(
            f"Interleaved1F1B, tied {tie}", families.policy("qwen2", tie=tie), rows, families.batch(4, 7),
            schedule="Interleaved1F1B", num_stages=4,
        )  # fmt: skip


def check_adapters_and_checkpointing(rank):
    rows = families.batch(8, 12)
    check_steps("LoRA", with_lora(families.policy("qwen3", tie=True)), rows, rows)
    check_steps("fp32 LoRA on bf16", with_lora(families.policy("qwen3").bfloat16()), rows)
    check_steps("LoRA on the last layer alone", with_lora(families.policy("qwen3"), layers_to_transform=[3]), rows)
    check_steps("LoRA on the first layer alone", with_lora(families.policy("qwen3"), layers_to_transform=[0]), rows)
    for use_reentrant in (False, True):
        kwargs = {"use_reentrant": use_reentrant}
        model = families.policy("qwen3_moe")
        model.gradient_checkpointing_enable(kwargs)
        check_steps(f"checkpointing, reentrant {use_reentrant}", model, rows)
        model = families.policy("mistral")
        model.gradient_checkpointing_enable(kwargs)
        model.enable_input_require_grads()
        check_steps(f"LoRA, checkpointing, reentrant {use_reentrant}", with_lora(model), rows)


def log_probs(hidden_BSH, stage, microbatch):
    logps_BSV = stage.logits(hidden_BSH).float().log_softmax(-1)
    chosen = microbatch.rows["input_ids"][:, 1:, None]
    return {"logps": logps_BSV[:, :-1].gather(2, chosen)[..., 0], "weight": microbatch.rows["weight"]}


def check_log_probs(pipeline, model, batch, *, exact=True):
    found = pipeline.forward_only(batch, log_probs)
    with torch.no_grad():
        expected = torch.cat(
            [
                model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
                .logits.float()
                .log_softmax(-1)[:, :-1]
                .gather(2, rows["input_ids"][:, 1:, None])[..., 0]
                for rows in cut(batch)
            ]
        )
    assert torch.equal(found["weight"], batch["weight"])
    if exact:
        assert torch.equal(found["logps"], expected)
    else:
        torch.testing.assert_close(found["logps"], expected, rtol=1e-5, atol=1e-5)


def check_changes_between_steps(rank):
    """Lengths and rows change, forward-only passes come between, gradients accumulate through all of it."""
    for kwargs in ({}, {"schedule": "Interleaved1F1B", "num_stages": 4}):
        model = families.policy("mistral", tie=True)
        pipeline, whole = make(model, **kwargs), copy.deepcopy(model)
        for step, (num_rows, length) in enumerate([(8, 12), (8, 7), (12, 12), (8, 12), (8, 12)]):
            batch = families.batch(num_rows, length, seed=step)
            assert torch.equal(pipeline.train_step(batch, next_token_loss), whole_step(whole, batch)), step
            before = [None if p.grad is None else p.grad.clone() for s in pipeline.stages for p in s.parameters()]
            check_log_probs(pipeline, whole, families.batch(4 + 4 * step, 15 - step, seed=step))
            after = [p.grad for s in pipeline.stages for p in s.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after))
            check_log_probs(pipeline, whole, families.batch(8, length, seed=9))
        assert not gradients_differ(pipeline, whole)


def check_uneven_rows(rank):
    model = families.policy("qwen3", tie=True)
    for num_rows in (10, 5, 7):
        check_steps(f"{num_rows} rows", model, families.batch(num_rows, 12), exact=False)
    pipeline = make(model)
    check_log_probs(pipeline, model, families.batch(5, 12), exact=False)
    sizes = []
    seen = partial(pipeline.train_step, families.batch(10, 12), next_token_loss)
    seen(after_forward=lambda current, output: sizes.append((current.num_rows, len(output))))
    assert sizes == [(3, 3), (3, 3), (2, 3), (2, 3)]
    with pytest.raises(ValueError, match="batch has 3 rows, which 4 microbatches can't share"):
        pipeline.train_step(families.batch(3, 12), next_token_loss)
    pipeline.train_step(families.batch(4, 12), next_token_loss)  # a refusal is not a failure


def check_losses_with_rows_of_their_own(rank):
    """A sum over weighted rows, a microbatch that supervises nothing, and one number of items for the whole batch."""
    model, batch = families.policy("llama"), families.batch(8, 12)
    pipeline, whole = make(model), copy.deepcopy(model)
    order = []

    def weighted(hidden_BSH, stage, microbatch):
        order.append(microbatch.index)
        per_row_B = stage.logits(hidden_BSH).square().mean((1, 2))
        return (per_row_B * microbatch.rows["weight"]).sum()

    losses, expected = pipeline.train_step(batch, weighted), []
    for rows in cut(batch):
        logits_BSV = whole(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        loss = (logits_BSV.square().mean((1, 2)) * rows["weight"]).sum()
        loss.backward()
        expected.append(loss.detach())
    assert torch.equal(losses, torch.stack(expected)) and not gradients_differ(pipeline, whole)
    assert order == ([0, 1, 2, 3] if pipeline.last_stage is not None else [])

    # labels of microbatch 1 are all ignored
    ignored = labels(batch)
    ignored[2:4] = -100
    losses = pipeline.train_step(batch | {"labels": ignored}, next_token_loss)
    assert losses[1] == 0 and all(torch.isfinite(p.grad).all() for s in pipeline.stages for p in s.parameters())

    num_items = int((labels(batch)[:, 1:] != -100).sum())
    losses = pipeline.train_step(batch, partial(next_token_loss, num_items=num_items))
    mean = whole(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels(batch)).loss
    torch.testing.assert_close(losses.sum(), mean.detach(), rtol=1e-5, atol=1e-6)

    # A loss that depends on no parameter still reaches the end, and adds nothing.
    before = [p.grad.clone() for s in pipeline.stages for p in s.parameters()]
    pipeline.train_step(batch, lambda hidden_BSH, stage, microbatch: hidden_BSH.detach().sum() * 0)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, (p for s in pipeline.stages for p in s.parameters())))


def check_hooks_and_order(rank):
    """Hooks know their microbatch in training forwards alone; the order that runs is the one that is promised."""
    for use_reentrant in (None, False, True):
        for name, num_stages in (("1F1B", 2), ("Interleaved1F1B", 4)):
            model = families.policy("llama")
            if use_reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            pipeline = make(model, schedule=name, num_stages=num_stages)
            fired, known, ran, order = [], [], [], []

            def hook(module, args, output, fired=fired, known=known, pipeline=pipeline):
                fired.append(module)
                if pipeline.current_forward is not None:
                    known.append((pipeline.current_forward.stage, pipeline.current_forward.microbatch))

            for stage in pipeline.stages:
                first = stage.plan.layers_of(stage.stage)[0]
                # Inside the layer: non-reentrant checkpointing stops before the layer's own end.
                stage.anatomy.decoder.layers[first].input_layernorm.register_forward_hook(hook)
            with recorded_backwards(ran):
                pipeline.train_step(
                    families.batch(8, 12),
                    next_token_loss,
                    after_forward=lambda current, output, ran=ran: ran.append(
                        Action("F", current.stage, current.microbatch)
                    ),
                    after_schedule=lambda order=order, ran=ran: order.append(len(ran)),
                )
            assert ran == schedule_order(name, 2, num_stages, NUM_MICROBATCHES)[rank], name
            assert order == [2 * NUM_MICROBATCHES * num_stages // 2]  # once, after all of it
            assert known == [(action.stage, action.microbatch) for action in ran if action.kind == "F"]
            times = 1 if use_reentrant is None else 2  # checkpointing runs each layer again
            assert len(fired) == times * len(known)
            pipeline.forward_only(families.batch(8, 12), log_probs)
            assert pipeline.current_forward is None and len(known) == NUM_MICROBATCHES * num_stages // 2


def check_inputs_of_a_stage_are_its_own(rank):
    """What a step hands to a stage, and what was hung on it, is neither seen nor overwritten by a later step."""
    for name, num_stages in (("1F1B", 2), ("Interleaved1F1B", 4)):
        model, batches = families.policy("llama"), [families.batch(8, 12, seed=seed) for seed in (0, 1)]
        pipeline = make(model, schedule=name, num_stages=num_stages)
        last, kept, gradients = pipeline.stages[-1], [], []

        def hang(module, args, keywords, last=last, kept=kept, gradients=gradients):
            if not last.is_first:
                kept.append(keywords["hidden_states"] if "hidden_states" in keywords else args[0])
                kept[-1].register_hook(gradients.append)

        first_layer = last.plan.layers_of(last.stage)[0]
        handle = last.anatomy.decoder.layers[first_layer].register_forward_pre_hook(hang, with_kwargs=True)
        pipeline.train_step(batches[0], next_token_loss)
        handle.remove()
        assert len(kept) == len(gradients) == (0 if last.is_first else NUM_MICROBATCHES)
        before = [tensor.clone() for tensor in gradients]
        pipeline.train_step(batches[1], next_token_loss)
        pipeline.forward_only(batches[1], log_probs)
        assert len(gradients) == len(before) and all(map(torch.equal, gradients, before)), name
        for rows, hidden in zip(cut(batches[0]), kept):
            inputs = {key: rows[key] for key in ("input_ids", "attention_mask")}
            states = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
            assert torch.equal(hidden, states[first_layer]), name


@contextmanager
def recorded_backwards(ran):
    kind = schedule_module._Stage
    original = kind.backward_one_chunk

    def recording(self, microbatch, *args, **kwargs):
        ran.append(Action("B", self.stage_index, microbatch))
        return original(self, microbatch, *args, **kwargs)

    kind.backward_one_chunk = recording
    try:
        yield
    finally:
        kind.backward_one_chunk = original


def check_disagreements(rank):
    """Every rank gets the error, before the first step."""
    model, batch = families.policy("llama"), families.batch(8, 12)
    with pytest.raises(ValueError, match="num_microbatches differs between pipeline ranks: 4 on rank 0, 8 on rank 1"):
        make(model, num_microbatches=(4, 8)[rank])
    with pytest.raises(ValueError, match="layer_ranges differs"):
        make(model, last_stage_layers=(1, 2)[rank])
    with pytest.raises(ValueError, match=r"stages \(\[0\]\) of pipeline rank 1 must be \[1\]"):
        PolicyPipeline([build_stage(model, plan_stages(4, 2), 0)], 4)
    for spoiled, kind in ((build_stage(model, plan_stages(4, 2), 1), TypeError), ([model], AttributeError)):
        with pytest.raises(kind if rank else ValueError, match="" if rank else f"rank 1 refused .*{kind.__name__}"):
            PolicyPipeline(spoiled if rank else [build_stage(model, plan_stages(4, 2), 0)], 4)
    with pytest.raises(ValueError, match=r"schedule \('ZBVZeroBubble'\) must be one of 1F1B, Interleaved1F1B"):
        make(model, schedule="ZBVZeroBubble", num_stages=4)
    with pytest.raises(ValueError, match=r"num_stages \(2\) on 2 ranks. Use '1F1B'"):
        make(model, schedule="Interleaved1F1B")
    tied = families.policy("llama", tie=True)
    stage = build_stage(tied, plan_stages(4, 2), rank)
    stage.tied_parameter.requires_grad_(rank == 0)
    with pytest.raises(ValueError, match="tied weight is trainable on one"):
        PolicyPipeline([stage], 4)
    pipeline = make(model)
    with pytest.raises(
        ValueError, match=r"\(training, rows, length\) are \(1, 8, 12\) on rank 0 and \(1, 8, 9\) on rank 1"
    ):
        pipeline.train_step(families.batch(8, (12, 9)[rank]), next_token_loss)
    shorter = batch["attention_mask"].clone()
    shorter[0, -1] = 0
    for other in (families.batch(8, 12, seed=1), batch | {"attention_mask": shorter}):
        with pytest.raises(
            ValueError, match=r"position_ids are not on rank 1 what they are on rank 0\. Does a data loader"
        ):
            pipeline.train_step((batch, other)[rank], next_token_loss)
    lists = batch | {"input_ids": batch["input_ids"].tolist()}
    for spoiled, kind, message in (
        (batch | {"weight": torch.ones(3)}, ValueError, r"batch\['weight'\] \(shape \(3,\)\)"),
        (lists, ValueError, "input_ids, a tensor of shape"),
        (None, AttributeError, "'NoneType' object has no attribute 'get'"),
    ):
        if rank == 0:
            kind, message = ValueError, f"pipeline rank 1 refused the step: {kind.__name__}: .*{message}"
        with pytest.raises(kind, match=message):
            pipeline.train_step(batch if rank == 0 else spoiled, next_token_loss)
    pipeline.train_step(batch, next_token_loss)
    wrong = make(model, activation_dtype=torch.bfloat16, group=dist.new_group(timeout=timedelta(seconds=3)))
    started = time.monotonic()
    kind, message = (ValueError, r"torch.float32; the next stage expects \(2, 12, 64\) of torch.bfloat16")
    if rank == 1:
        kind, message = (RuntimeError, None)  # gloo's own: nothing came
    with pytest.raises(kind, match=message):
        wrong.train_step(batch, next_token_loss)
    assert time.monotonic() - started < 10


def check_tied_weights_are_one(rank):
    """Copies that differ at the start, or after a load, become the first stage's."""
    stage = build_stage(families.policy("llama", tie=True), plan_stages(4, 2), rank)
    with torch.no_grad():
        stage.tied_parameter.add_(rank)
    pipeline = PolicyPipeline([stage], 4)
    expected = families.policy("llama", tie=True).lm_head.weight
    assert torch.equal(stage.tied_parameter, expected)
    with torch.no_grad():
        stage.tied_parameter.add_(1 - rank)
    pipeline.sync_tied_embeddings()
    assert torch.equal(stage.tied_parameter, expected + 1)
    # Stepped by the same gradient the copies stay one.
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    for seed in range(2):
        pipeline.train_step(families.batch(8, 12, seed=seed), next_token_loss)
        optimizer.step()
        optimizer.zero_grad()
    other = [torch.empty_like(expected) for _ in range(2)]
    dist.all_gather(other, stage.tied_parameter.detach())
    assert torch.equal(*other) and not torch.equal(other[0], expected + 1)


class Boom(Exception):
    pass


def check_errors_surface_as_themselves(rank):
    """On the rank where it happens an error is itself; the other gets one too, within the group's timeout."""

    def fail(*args, **kwargs):
        raise Boom("here")

    def forward_hook(stage):
        stage.anatomy.decoder.layers[stage.plan.layers_of(stage.stage)[0]].register_forward_hook(fail)

    def backward_hook(stage):
        stage.anatomy.decoder.layers[stage.plan.layers_of(stage.stage)[0]].register_full_backward_hook(fail)

    def runtime_error(stage):
        def wrong(*args):
            raise RuntimeError("of its own")

        stage.anatomy.decoder.rotary_emb.register_forward_hook(wrong)

    cases = [(0, forward_hook, Boom), (1, backward_hook, Boom), (1, runtime_error, RuntimeError), (1, None, Boom)]
    dist.barrier()  # the other rank may still be in the wait of the check before, as long as the groups' own
    groups = [dist.new_group(timeout=timedelta(seconds=3)) for _ in cases]
    for (where, spoil, kind), group in zip(cases, groups):
        dist.barrier()  # the rank that fails is here sooner than the one that waits for it
        pipeline = make(families.policy("llama"), group=group)
        if rank == where and spoil is not None:
            spoil(pipeline.stages[0])
        started = time.monotonic()
        if rank == where:
            with pytest.raises(kind, match=r"^(here|of its own)$"):
                pipeline.train_step(families.batch(8, 12), next_token_loss if spoil else fail)
            with pytest.raises(RuntimeError, match="an earlier step of this pipeline failed"):
                pipeline.train_step(families.batch(8, 12), next_token_loss)
        else:
            with pytest.raises(RuntimeError):
                pipeline.train_step(families.batch(8, 12), next_token_loss if spoil else fail)
        assert time.monotonic() - started < 10
        assert pipeline.current_forward is None


def two_ranks(rank):
    check_tied_weights_are_one(rank)
    check_losses_with_rows_of_their_own(rank)


def two_ranks_through_a_life_of_steps(rank):
    check_changes_between_steps(rank)
    check_uneven_rows(rank)
    check_hooks_and_order(rank)
    check_inputs_of_a_stage_are_its_own(rank)


def two_ranks_of_every_family(rank):
    check_families(rank)
    check_adapters_and_checkpointing(rank)
    # torch validates every tensor between stages against what was announced.
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    check_steps("validated", families.policy("qwen3", tie=True), families.batch(8, 12), families.batch(8, 7))
    dist.set_debug_level(dist.DebugLevel.OFF)


def two_ranks_that_fail(rank):
    check_disagreements(rank)
    check_errors_surface_as_themselves(rank)


def test_two_stages_equal_the_whole_model_for_any_loss(run_ranks):
    run_ranks(two_ranks, 2)


@pytest.mark.slow
def test_shapes_modes_and_rows_change_between_steps(run_ranks):
    run_ranks(two_ranks_through_a_life_of_steps, 2)


@pytest.mark.slow
def test_two_stages_equal_the_whole_model_for_every_family(run_ranks):
    run_ranks(two_ranks_of_every_family, 2)


@pytest.mark.slow
def test_disagreements_and_errors_reach_every_rank(run_ranks):
    run_ranks(two_ranks_that_fail, 2)


# Four ranks


def check_replicas(rank):
    """dp = 2 x pp = 2, mesh (pp, dp): the caller averages gradients over the replicas of a stage."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = families.policy("qwen3", tie=True)
    pipeline, whole = make(model, group=mesh.get_group("pp")), copy.deepcopy(model)
    batches = [families.batch(8, 12, seed=seed) for seed in (3, 4)]
    losses = pipeline.train_step(batches[mesh.get_local_rank("dp")], next_token_loss)
    expected = [whole_step(whole, batch) for batch in batches]
    assert torch.equal(losses, expected[mesh.get_local_rank("dp")])
    for parameter in pipeline.stages[0].parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= 2
    for parameter in whole.parameters():
        parameter.grad /= 2
    assert not gradients_differ(pipeline, whole, exact=False)


def four_ranks(rank):
    rows, short = families.batch(8, 12), families.batch(16, 7)
    check_steps("P = 4", families.policy("qwen3", tie=True), rows, short, num_stages=4)
    check_steps("P = 4, LoRA", with_lora(families.policy("qwen3", tie=True)), rows, num_stages=4)
    check_steps("P = 4, M = 8", families.policy("mistral"), rows, num_stages=4, num_microbatches=8)
    model = families.policy("qwen2", tie=True, num_layers=8)
    kwargs = {"schedule": "Interleaved1F1B", "num_stages": 8, "num_microbatches": 8}
    pipeline, whole = check_steps("P = 4, v = 2", model, rows, short, **kwargs)
    found = pipeline.forward_only(rows, log_probs)["logps"]
    with torch.no_grad():
        logits_BSV = whole(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    expected = logits_BSV.log_softmax(-1)[:, :-1].gather(2, rows["input_ids"][:, 1:, None])[..., 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # eight rows at once, not one by one
    check_replicas(rank)


@pytest.mark.slow
def test_four_stages_interleaved_stages_and_replicas(run_ranks):
    run_ranks(four_ranks, 4)


# A rank that dies


def survivor(rank, path, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}", timedelta(seconds=60), 2, rank)
    pipeline = make(families.policy("llama"))

    def die(current, output):
        if current.microbatch == 1:
            os._exit(1)

    started = time.monotonic()
    try:
        pipeline.train_step(families.batch(8, 12), next_token_loss, after_forward=die if rank == 1 else None)
    except RuntimeError as error:
        results.put((time.monotonic() - started, str(error)))


@pytest.mark.slow
def test_a_killed_rank_is_an_error_on_the_other_at_once(tmp_path):
    context = fresh_processes()
    results = context.Queue()
    processes = [context.Process(target=survivor, args=(r, tmp_path / "store", results)) for r in range(2)]
    for process in processes:
        process.start()
    try:
        seconds, message = results.get(timeout=90)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert seconds < 10 and message
