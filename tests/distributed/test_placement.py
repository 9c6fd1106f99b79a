"""A draft beside a pipeline: the policy learns as without it, bit for bit, and the draft as in one process.

The one-process run is the unsplit transformers model under a [`TapRecorder`], its rows packed and learnt from microbatch by
microbatch.
"""

import copy
import os
import random
import re
import signal
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import SimpleNamespace

import families
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tap_ranks import outcomes_of, shared_files
from torch import distributed as dist

from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.hub.resolve import fresh_eagle3
from hf_codraft.parallel.pipeline import PolicyPipeline, next_token_loss
from hf_codraft.parallel.placement import PipelineDraft
from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.parallel.simulator import StepCosts, balanced_sinks
from hf_codraft.parallel.stages import build_stage, plan_stages
from hf_codraft.policy.anatomy import PolicyAnatomy
from hf_codraft.policy.packing import pack_rows
from hf_codraft.taps.recorder import TapRecorder, TapSpec
from hf_codraft.taps.transports.shm import ShmRing

EVERYWHERE = (0, 1, 3, 4)  # the embedding; layers of the first, a middle and the last stage of two or four
# fp32 sums in another order: rows of a microbatch that were filled up, gradients summed over ranks
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Setting:
    """How a pipeline with a draft is laid out."""

    placement: str = "last_deferred"
    taps: tuple[int, ...] = EVERYWHERE
    schedule: str = "1F1B"
    num_stages: int = 2
    num_microbatches: int = 4
    transport: str = "auto"
    sinks: tuple[int, ...] | None = None
    num_slots: int | None = None
    num_passes: int = 2
    draft_vocab: int | None = None


def make_pipeline(model, setting, group=None):
    group = dist.group.WORLD if group is None else group
    plan = plan_stages(PolicyAnatomy.of(model).num_layers, setting.num_stages)
    stages = [build_stage(model, plan, s) for s in range(dist.get_rank(group), setting.num_stages, group.size())]
    return PolicyPipeline(stages, setting.num_microbatches, group=group, schedule=setting.schedule)


def make_learner(model, setting, *, seed=0):
    """Every weight away from its initial value, so that every gradient is more than rounding."""
    torch.manual_seed(seed)
    anatomy = PolicyAnatomy.of(model)
    options = SimpleNamespace(
        draft_vocab_size=setting.draft_vocab, draft_tap_layers=list(setting.taps), draft_warmup_rollouts=1
    )
    draft = fresh_eagle3(anatomy, options)
    if draft.has_reduced_vocab:
        draft.set_vocabulary(torch.randperm(families.VOCAB)[: setting.draft_vocab].sort().values, anatomy.weights())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return DraftLearner(draft, setting.num_passes, learning_rate=1e-3, groups=[])


def make_draft(pipeline, model, setting, **kwargs):
    """Learners start unequal: rank 0's weights must not matter."""
    seed = 0 if pipeline.pipeline_rank == pipeline.num_ranks - 1 else 1 + pipeline.pipeline_rank
    return PipelineDraft(
        pipeline, make_learner(model, setting, seed=seed), tap_ids=setting.taps, placement=setting.placement,
        sink_of_microbatch=setting.sinks, transport=setting.transport, num_slots=setting.num_slots,
        **({"timeout_s": 20.0, "check_crc": True} | kwargs),
    )  # fmt: skip


def gradients(stages):
    return [None if p.grad is None else p.grad.clone() for stage in stages for p in stage.parameters()]


def equal(ours, theirs):
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def flat_gradient(learner):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in learner.parameters])


def summed_gradient(draft):
    """The draft's gradient over all ranks, before the learner divides it; only some ranks may have a learner."""
    total = None if draft.learner is None else flat_gradient(draft.learner)
    size = torch.tensor(0 if total is None else len(total))
    dist.all_reduce(size, dist.ReduceOp.MAX)
    total = torch.zeros(int(size)) if total is None else total
    dist.all_reduce(total)
    return total


class OneProcess:
    """The unsplit model with the draft beside it, in this process alone."""

    def __init__(self, model, setting):
        self.model, self.setting = copy.deepcopy(model), setting
        self.anatomy = PolicyAnatomy.of(self.model)
        decoder = self.anatomy.decoder
        self.recorder = TapRecorder(decoder.layers, decoder.norm, TapSpec(setting.taps, self.anatomy.num_layers))
        self.learner = make_learner(model, setting)

    def train_step(self, batch):
        weights = self.anatomy.weights()
        parts = {name: tensor.tensor_split(self.setting.num_microbatches) for name, tensor in batch.items()}
        for m in range(self.setting.num_microbatches):
            rows = {name: part[m] for name, part in parts.items()}
            mask = rows["attention_mask"]
            labels = rows["input_ids"].masked_fill(mask == 0, -100)
            num_items = max(int((labels[:, 1:] != -100).sum()), 1)
            with self.recorder.recording():
                loss = self.model(
                    input_ids=rows["input_ids"], attention_mask=mask, labels=labels, num_items_in_batch=num_items,
                    use_cache=False,
                ).loss  # fmt: skip
            loss.backward()
            supervised = rows.get("supervised", mask)
            self.learner.accumulate(pack_rows(rows["input_ids"], mask, supervised, self.recorder.take()), weights)


def relative_error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def check_report(report, expected, name):
    for field, value in asdict(expected).items():
        assert asdict(report)[field] == pytest.approx(value, rel=TOLERANCE, abs=1e-9, nan_ok=True), (name, field)


def descend(parameters, rate=0.05):
    """Plain descent that writes as fused optimizers do, past torch's version counters."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.data.sub_(rate * parameter.grad)
            parameter.grad = None


def check(name, model, batches, setting, *, between=None, num_accumulated=1, policy_waits=True, spoil=None):
    """Three runs over the same batches: the pipeline alone, with a draft beside it, and both in one process.

    The draft steps every `num_accumulated` batches, and the policy with it, or, unless `policy_waits`, after each.
    """
    alone, beside, one = make_pipeline(model, setting), make_pipeline(model, setting), OneProcess(model, setting)
    draft = make_draft(beside, model, setting)
    if spoil is not None:
        spoil(beside, draft)
    owners = [[p for s in alone.stages for p in s.parameters()], [p for s in beside.stages for p in s.parameters()]]
    owners.append(list(one.model.parameters()))
    for step, batch in enumerate(batches, start=1):
        expected_losses = alone.train_step(batch, next_token_loss)
        losses = draft.train_step(batch, next_token_loss)
        assert torch.equal(losses, expected_losses), (name, step)
        assert equal(gradients(beside.stages), gradients(alone.stages)), (name, step)
        one.train_step(batch)
        error = relative_error(summed_gradient(draft), flat_gradient(one.learner))
        # One rank that runs the draft on the whole batch makes the same sums in the same order, until tied weights
        # or filled rows have made the policies differ in the last bit.
        is_exact = (
            setting.placement != "spread" and len(batch["input_ids"]) % setting.num_microbatches == 0 and step == 1
        )
        assert error <= (0.0 if is_exact else TOLERANCE), (name, step, error)
        if between is not None:
            between(beside)
        if step % num_accumulated == 0:
            check_report(draft.step(), one.learner.step(), (name, step))
        if not policy_waits or step % num_accumulated == 0:
            for parameters in owners:
                descend(parameters)
    totals = draft.channel.totals
    draft.close()
    return totals


# One rank


def test_every_placement_on_one_rank():
    """A pipeline of one stage: the draft's place is the only one, and taps never travel."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        batches = [families.batch(8, 12), families.batch(7, 9, seed=1)]
        for placement in ("last_inside", "last_deferred", "spread"):
            for transport in ("auto", "relay"):
                setting = Setting(placement, num_stages=1, transport=transport)
                totals = check(f"{placement} {transport}", families.policy("qwen3", tie=True), batches, setting)
                assert totals.num_collected == 2 * 4 * 5 and totals.bytes_published == 0
    finally:
        dist.destroy_process_group()


# Two ranks

LOOPED = {"schedule": "Interleaved1F1B", "num_stages": 4}


def two_ranks(rank):
    batches = [families.batch(8, 12), families.batch(8, 9, seed=1), families.batch(8, 12, seed=2)]
    for placement in ("last_inside", "last_deferred", "spread"):
        for transport in ("shm", "gloo", "relay"):
            if (placement, transport) == ("spread", "relay"):
                continue
            model = families.policy("qwen3", tie=placement == "spread")
            check(f"{placement} {transport}", model, batches, Setting(placement, transport=transport))
    for placement in ("last_inside", "last_deferred"):
        for taps, schedule in (((3, 4), {}), ((2, 4), LOOPED)):
            setting = Setting(placement, taps=taps, transport="local", **schedule)
            check(f"{placement} local", families.policy("qwen3"), batches[:1], setting)


@pytest.mark.slow
def test_every_placement_and_transport_on_two_ranks(run_ranks):
    run_ranks(two_ranks, 2)


def with_lora(model, *more):
    torch.manual_seed(7)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", *more], task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def evaluate(pipeline):
    """A forward-only pass, of another length, in which nothing may be published."""
    pipeline.forward_only(families.batch(8, 14, seed=9), lambda hidden, stage, microbatch: {"h": hidden[:, 0]})


def check_policies(rank):
    rows, later = families.batch(8, 12), families.batch(8, 12, seed=1)
    for tap in (0, 1, 2, 3, 4):
        check(f"tap {tap}", families.policy("llama"), [rows], Setting("spread", taps=(tap,)))
    check("LoRA", with_lora(families.policy("qwen3", tie=True)), [rows, later], Setting("spread"))
    for tie, adapted in ((True, ("lm_head",)), (True, ("embed_tokens",)), (False, ("embed_tokens", "lm_head"))):
        for setting in (Setting("last_inside", **LOOPED), Setting("last_deferred"), Setting("spread", **LOOPED)):
            model = with_lora(families.policy("qwen3", tie=tie), *adapted)
            check(f"LoRA of {adapted}, {setting.placement}", model, [rows, later], setting)
    for use_reentrant in (False, True):
        model = families.policy("mistral", tie=True)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        relayed = Setting("last_deferred", transport="relay")
        for setting in (Setting("last_inside"), relayed, Setting("spread", **LOOPED)):
            check(f"checkpointing, reentrant {use_reentrant}", model, [rows, later], setting)
    check("bf16", families.policy("llama").bfloat16(), [rows], Setting("last_deferred"))
    check("reduced vocabulary", families.policy("qwen2"), [rows, later], Setting("spread", draft_vocab=40))
    check("tied, last", families.policy("qwen3_moe", tie=True), [rows, later], Setting("last_inside"))


def check_batches(rank):
    rows = families.batch(8, 12)
    nothing = torch.ones_like(rows["input_ids"])
    nothing[2:4] = 0  # microbatch 1
    lengths = [families.batch(8, n, seed=n) for n in (9, 14, 9, 12)]
    for setting in (
        Setting("last_inside"), Setting("spread"), Setting("spread", sinks=(1, 0, 1, 1)),
        Setting("spread", transport="gloo", **LOOPED), Setting("last_deferred", transport="gloo", **LOOPED),
        Setting("last_inside", transport="relay", **LOOPED),
    ):  # fmt: skip
        check("lengths, evaluation", families.policy("llama", tie=True), lengths, setting, between=evaluate)
        check("uneven rows", families.policy("llama"), [families.batch(10, 12), families.batch(7, 12)], setting)
        supervised = rows | {"supervised": nothing}
        check("nothing in a microbatch", families.policy("llama"), [supervised, rows], setting)
        supervised = rows | {"supervised": 0 * nothing}
        check("nothing at all", families.policy("llama"), [rows, supervised], setting, num_accumulated=2)
    check("gloo", families.policy("llama"), [rows], Setting("last_inside", transport="gloo", **LOOPED))
    check("accumulation", families.policy("qwen3", tie=True), lengths, Setting("spread"), num_accumulated=2)
    for tie, setting in ((True, Setting("spread")), (False, Setting("last_inside", **LOOPED))):
        # The draft's gradient is the sum over two versions of the policy: each teaches with its own embeddings and head.
        model = families.policy("llama", tie=tie)
        check("the policy steps alone", model, lengths, setting, num_accumulated=2, policy_waits=False)
    draft = make_draft(make_pipeline(families.policy("llama"), Setting()), families.policy("llama"), Setting())
    draft.train_step(rows | {"supervised": 0 * nothing}, next_token_loss)
    before = None if draft.learner is None else [p.clone() for p in draft.learner.parameters]
    report = draft.step()
    assert report.num_supervised == 0 and report.loss != report.loss and not report.is_skipped
    assert before is None or all(torch.equal(a, b) for a, b in zip(before, draft.learner.parameters))


def check_refusals(rank):
    """Every rank gets the error, before the first step."""
    model = families.policy("llama")

    def make(**changes):
        return make_draft(make_pipeline(model, Setting()), model, replace(Setting("spread"), **changes))

    with pytest.raises(
        ValueError, match=r"tap_ids differs between pipeline ranks: \(0, 1\) on rank 0, \(0, 2\) on rank 1"
    ):
        make(taps=((0, 1), (0, 2))[rank])
    with pytest.raises(
        ValueError, match="placement differs between pipeline ranks: 'spread' on rank 0, 'last_inside'"
    ):
        make(placement=("spread", "last_inside")[rank])
    with pytest.raises(ValueError, match="sink_of_microbatch differs between pipeline ranks"):
        make(sinks=((0, 1, 0, 1), (0, 1, 1, 1))[rank])
    with pytest.raises(ValueError, match=r"sink_of_microbatch .* must name one of the ranks"):
        make(sinks=(0, 1, 0))
    with pytest.raises(ValueError, match=r"placement \('first'\) must be one of last_inside, last_deferred, spread"):
        make(placement="first")
    for transport, found in (
        ("relay", r"transport='relay' can't work: activations only flow to the last stage \(rank 1\)"),
        ("local", r"transport='local' can't work: taps are owned by ranks \[0, 1\] and read by ranks \[0, 1\]"),
        ("nccl", "transport='nccl' can't work: nccl moves GPU memory"),
        ("pigeon", r"transport \('pigeon'\) must be 'auto' or one of"),
        (("shm", "gloo")[rank], "transport differs between pipeline ranks: 'shm' on rank 0, 'gloo' on rank 1"),
    ):
        with pytest.raises(ValueError, match=found):
            make(transport=transport)
    group = dist.new_group(timeout=timedelta(seconds=60))
    alone = make_pipeline(model, Setting(), group)
    with pytest.raises(ValueError, match=r"timeout_s \(60\) times 1.5 must be shorter than the process group's"):
        make_draft(alone, model, Setting("spread"), timeout_s=60.0)
    # What is of a wrong type on one rank is not waited for by the other.
    for wrong, kind, found in (
        ({"num_slots": "3"}, TypeError, "'>=' not supported between instances of 'str' and 'int'"),
        ({"sinks": 3}, TypeError, "'int' object is not iterable"),
    ):
        with pytest.raises(
            kind if rank == 0 else ValueError, match=found if rank == 0 else f"pipeline rank 0: {found}"
        ):
            make_draft(alone, model, replace(Setting("spread"), **(wrong if rank == 0 else {})))
    alone.train_step(families.batch(8, 12), next_token_loss)  # a refused draft leaves the policy's pipeline alone
    with pytest.raises(ValueError, match=r"tap_id \(6\) must lie in 0..5"):
        pipeline = make_pipeline(model, Setting())
        PipelineDraft(pipeline, make_learner(model, Setting()), tap_ids=(0, 6))
    for taps, found in (
        (None, "learner is None, but this rank"),
        ((0, 1), r"tap_ids \(\[0, 1, 3, 4\]\) differ from the"),
    ):
        learner = make_learner(model, Setting(taps=taps or EVERYWHERE))
        own = learner if rank == 0 and taps else (make_learner(model, Setting()) if rank else None)
        with pytest.raises(ValueError, match=found if rank == 0 else f"pipeline rank 0: {found}"):
            PipelineDraft(make_pipeline(model, Setting()), own, tap_ids=EVERYWHERE)
    # A batch that one rank can't take is refused on all, and is not the end.
    draft, rows = make(), families.batch(8, 12)
    for wrong in (families.batch(8, (12, 9)[rank]), families.batch((8, 3)[rank], 12)):
        with pytest.raises((ValueError, RuntimeError), match=r"must run the same step|refused the step|can't share"):
            draft.train_step(wrong, next_token_loss)
    draft.train_step(rows, next_token_loss)
    if rank == 0:  # the other would receive the borrowed embeddings into a buffer of another dtype
        draft.pipeline.stages[0].double()
    with pytest.raises((RuntimeError, ValueError), match="embeddings or head are no longer what they were"):
        draft.train_step(rows, next_token_loss)
    draft.close()


def check_slots(rank):
    rows, model = families.batch(8, 12), families.policy("llama")
    cases = (
        (Setting("last_inside", num_slots=1), None),
        (Setting("last_deferred", num_slots=4), (3, 4)),
        (Setting("spread", sinks=(0, 1, 0, 1), num_slots=2), (1, 2)),
        (Setting("spread", sinks=(1, 1, 0, 1), num_slots=3), (2, 3)),
        (Setting("last_inside", schedule="Interleaved1F1B", num_stages=4, num_slots=2), (1, 2)),
    )
    for setting, refused in cases:
        check("at the bound", model, [rows], setting)
        if refused is not None:
            few, bound = refused
            match = rf"num_slots \({few}\) must be at least {bound} for schedule '{setting.schedule}' on 2 ranks"
            with pytest.raises(ValueError, match=match):
                make_draft(make_pipeline(model, setting), model, replace(setting, num_slots=few))


def check_not_finite(rank):
    """NaN on one rank: no rank steps its draft, the policy goes on; after the third time all stop learning."""
    model, rows = families.policy("llama"), families.batch(8, 12)
    for placement, victim in (("spread", 0), ("last_deferred", 1)):
        draft = make_draft(make_pipeline(model, Setting()), model, Setting(placement))
        if rank == victim:
            with torch.no_grad():
                draft.learner.draft.norm.weight.fill_(float("nan"))
        before = [] if draft.learner is None else [p.clone() for p in draft.learner.parameters]
        for attempt in range(4):
            assert torch.isfinite(draft.train_step(rows, next_token_loss)).all()
            assert all(torch.isfinite(p.grad).all() for s in draft.pipeline.stages for p in s.parameters())
            assert draft.step().is_skipped
            assert draft.learner is None or draft.learner.has_stopped == (attempt >= 2)
        after = [] if draft.learner is None else draft.learner.parameters
        assert rank == victim or all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert draft.learner is None or draft.learner.num_skipped == 3


def check_failed_step(rank):
    """An error in one rank's draft step is that rank's, and its name reaches the others: no replica goes on alone."""
    model, rows = families.policy("llama"), families.batch(8, 12)
    for placement, victim in (("spread", 0), ("last_deferred", 1)):
        for where in ("before the sum", "after it"):
            draft = make_draft(make_pipeline(model, Setting()), model, Setting(placement))
            draft.train_step(rows, next_token_loss)
            if rank == victim and where == "before the sum":
                draft.learner._flat_gradient = raise_out_of_memory
            elif rank == victim:
                draft.learner.optimizer.step = raise_out_of_memory
            kind, text = (torch.OutOfMemoryError, "^no room$")
            if rank != victim:
                kind, text = RuntimeError, f"^pipeline rank {victim}: the draft's step failed: no room$"
            with pytest.raises(kind, match=text):
                draft.step()
            draft.close()


def raise_out_of_memory():
    raise torch.OutOfMemoryError("no room")


def two_ranks_and_many_policies(rank):
    check_policies(rank)
    check_batches(rank)


def two_ranks_and_faults(rank):
    check_refusals(rank)
    check_slots(rank)
    check_not_finite(rank)
    check_failed_step(rank)


@pytest.mark.slow
def test_policies_batches_and_schedules_on_two_ranks(run_ranks):
    run_ranks(two_ranks_and_many_policies, 2)


@pytest.mark.slow
def test_refusals_slots_and_losses_that_are_not_finite_reach_every_rank(run_ranks):
    run_ranks(two_ranks_and_faults, 2)


# Four ranks


@contextmanager
def counted_stalls():
    """Numbers the publishes that found their ring full."""
    stalls, original = [], ShmRing.wait_for_room

    def counting(self, sequence):
        if not self._has_room(sequence):
            stalls.append(sequence)
        original(self, sequence)

    ShmRing.wait_for_room = counting
    try:
        yield stalls
    finally:
        ShmRing.wait_for_room = original


def slow_down(kind):
    """Lets some stages sleep in their forward and the draft in its work."""

    def spoil(pipeline, draft):
        draw = random.Random(pipeline.pipeline_rank)
        slow_rank = {"first": 0, "last": pipeline.num_ranks - 1}.get(kind)

        def sleep(*args, **kwargs):
            if kind == "random":
                time.sleep(draw.choice((0.0, 0.002, 0.01)))
            elif pipeline.pipeline_rank == slow_rank:
                time.sleep(0.005)

        for stage in pipeline.stages:
            stage.anatomy.decoder.rotary_emb.register_forward_hook(sleep)
        if draft.learner is not None:
            draft.learner.draft.fc.register_forward_hook(sleep)

    return spoil


def check_four_ranks(rank):
    rows, later = families.batch(8, 12), families.batch(16, 7, seed=1)
    order = schedule_order("1F1B", 4, 4, 8)
    balanced = tuple(balanced_sinks(order, StepCosts([1.0] * 4, [2.0] * 4, draft_s=1.0)))
    in_turn = tuple(m % 4 for m in range(8))
    assert balanced != in_turn
    looped = {"schedule": "Interleaved1F1B", "num_stages": 8, "taps": (0, 3, 6, 8)}
    for placement, sinks, transport in (
        ("last_inside", None, "relay"),
        ("last_inside", None, "gloo"),
        ("last_deferred", None, "relay"),
        ("last_deferred", None, "shm"),
        ("last_deferred", None, "gloo"),
        ("spread", None, "shm"),
        ("spread", in_turn, "gloo"),
        ("spread", balanced, "shm"),
    ):
        setting = Setting(placement, num_stages=4, num_microbatches=8, sinks=sinks, transport=transport)
        is_relay, is_gloo = transport == "relay", transport == "gloo"
        batches, between = [rows] if is_gloo else [rows, later], evaluate if is_relay else None
        name = f"P = 4, {placement}, {transport}"
        totals = check(name, families.policy("qwen3", tie=True), batches, setting, between=between)
        if is_relay:
            # Taps 0 and 1 of stage 0 travel over three hops, tap 3 of stage 2 over one, those of stage 3 over none. The
            # second batch's microbatches are larger, so it has a channel of its own.
            assert totals.bytes_published == (2, 2, 3, 0)[rank] * 16 * 7 * 64 * 4
        model = families.policy("qwen2", num_layers=8)
        check(f"v = 2, {name}", model, [rows], replace(setting, **looped))
    adapted = with_lora(families.policy("qwen3", tie=True), "embed_tokens")
    check("P = 4, LoRA", adapted, [rows, later], Setting("spread", num_stages=4, num_microbatches=8))
    for placement, schedule in (("last_inside", looped | {"taps": (4, 8)}), ("last_deferred", {"taps": (4,)})):
        setting = Setting(placement, transport="local", num_microbatches=8, **({"num_stages": 4} | schedule))
        check("P = 4, local", families.policy("llama", num_layers=8 if "schedule" in schedule else 4), [rows], setting)


def check_borrowed_weights(rank):
    """Embeddings and head go from their owners to the ranks that run the draft, and to no other."""
    size, rows = families.VOCAB * 64 * 4, families.batch(8, 12)
    for placement, sinks, tie, expected in (
        ("last_deferred", None, False, (1, 0, 0, 1)),
        ("last_inside", None, True, (0, 0, 0, 0)),  # the last stage has both
        ("spread", (0, 2) * 2, False, (2, 0, 2, 2)),
        ("spread", (0, 1, 2, 3), True, (1, 1, 1, 1)),
    ):
        model = families.policy("llama", tie=tie)
        setting = Setting(placement, num_stages=4, sinks=sinks)
        draft = make_draft(make_pipeline(model, setting), model, setting)
        moved = transfers_of_weights(draft)
        draft.train_step(rows, next_token_loss)
        draft.close()
        assert sum(moved) == expected[rank] * size, (placement, rank, moved)


def transfers_of_weights(draft):
    """Fills a list with the bytes of every tensor that this rank sends or receives to borrow the policy's weights."""
    moved: list[int] = []
    borrow = draft._borrow_weights

    def counted(transfer):
        def run(tensor, *args, **kwargs):
            moved.append(tensor.nbytes)
            return transfer(tensor, *args, **kwargs)

        return run

    def counting(owned):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("broadcast", "send", "recv"):
                patch.setattr(dist, name, counted(getattr(dist, name)))
            borrow(owned)
        assert (draft._weights is None) == (draft.pipeline.pipeline_rank not in draft.sinks)

    draft._borrow_weights = counting
    return moved


def check_slow_stages(rank):
    """Who is slow changes nothing; with the default number of slots no publish ever waits, with the fewest some do."""
    rows, model = families.batch(8, 12), families.policy("llama")
    setting = Setting("last_inside", num_stages=4, num_microbatches=8, num_passes=1)
    looped = (replace(setting, schedule="Interleaved1F1B", num_stages=8), families.policy("llama", num_layers=8))
    for kind in ("first", "last", "random"):
        for placement in ("last_inside", "last_deferred", "spread"):
            for each, policy in ((setting, model), looped):
                with counted_stalls() as stalls:
                    check(f"slow: {kind}", policy, [rows], replace(each, placement=placement), spoil=slow_down(kind))
                assert not stalls, (kind, placement, each.schedule)
    each, policy = looped
    check("slow, at the bound", policy, [rows], replace(each, num_slots=4), spoil=slow_down("first"))
    with pytest.raises(ValueError, match=r"num_slots \(3\) must be at least 4"):
        make_draft(make_pipeline(policy, each), policy, replace(each, num_slots=3))
    with counted_stalls() as stalls:
        check("slow, one slot", model, [rows], replace(setting, num_slots=1), spoil=slow_down("last"))
    found: list = [None] * 4
    dist.all_gather_object(found, len(stalls))
    assert sum(found) > 0


def check_replicas(rank):
    """dp = 2 x pp = 2: the draft's gradient is that of both replicas' batches, and of one where the other has no work."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model, batches = families.policy("qwen3", tie=True), [families.batch(8, 12, seed=seed) for seed in (3, 4)]
    nothing = {"supervised": torch.zeros_like(batches[1]["input_ids"])}
    alone = make_pipeline(model, Setting(), group=mesh.get_group("pp"))
    alone.train_step(batches[mesh.get_local_rank("dp")], next_token_loss)
    expected = gradients(alone.stages)
    for placement in ("last_inside", "last_deferred", "spread"):
        setting = Setting(placement)
        pipeline, one = make_pipeline(model, setting, group=mesh.get_group("pp")), OneProcess(model, setting)
        seed = 0 if rank == dist.get_world_size() - 1 else 1 + rank
        learner = make_learner(model, setting, seed=seed)
        draft = PipelineDraft(
            pipeline,
            learner,
            tap_ids=setting.taps,
            placement=placement,
            data_group=mesh.get_group("dp"),
            timeout_s=20.0,
        )
        for second in (batches[1], batches[1] | nothing):
            pairs = (batches[0], second)
            draft.train_step(pairs[mesh.get_local_rank("dp")], next_token_loss)
            assert equal(gradients(pipeline.stages), expected), placement
            pipeline.stages[0].zero_grad()
            for batch in pairs:
                one.train_step(batch)
            assert relative_error(summed_gradient(draft), flat_gradient(one.learner)) <= TOLERANCE
            check_report(draft.step(), one.learner.step(), placement)
        draft.train_step(batches[mesh.get_local_rank("dp")], next_token_loss)
        if rank == 2:  # the last stage of the first replica
            learner.optimizer.step = raise_out_of_memory
        with pytest.raises(torch.OutOfMemoryError if rank == 2 else RuntimeError, match="no room"):
            draft.step()
        draft.close()


def four_ranks(rank):
    check_four_ranks(rank)
    check_borrowed_weights(rank)
    check_slow_stages(rank)
    check_replicas(rank)


@pytest.mark.slow
def test_four_ranks_slow_stages_and_replicas(run_ranks):
    run_ranks(four_ranks, 4)


# A rank that dies, and one that freezes


def stops_in_step(rank, victim, signal_number, placement, num_slots, folder):
    """In its second step the victim stops in the draft's work (frozen) or in a stage's forward (killed)."""
    model, setting = families.policy("llama"), Setting(placement, num_stages=3, num_slots=num_slots)
    draft = make_draft(make_pipeline(model, setting), model, setting, timeout_s=4.0)
    draft.train_step(families.batch(8, 12), next_token_loss)

    def stop(*args):
        (folder / "stopped").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal_number)

    if rank == victim and signal_number == signal.SIGKILL:
        draft.pipeline.stages[0].anatomy.decoder.rotary_emb.register_forward_hook(stop)
    elif rank == victim:
        draft.channel.release = stop
    draft.train_step(families.batch(8, 12), next_token_loss)


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_within_seconds_and_leaves_nothing(tmp_path):
    before = shared_files()
    outcomes = outcomes_of(stops_in_step, 3, 1, signal.SIGKILL, "spread", None, tmp_path)
    stopped_at_s = float((tmp_path / "stopped").read_text())
    assert outcomes[1].error == "died"
    for rank in (0, 2):
        assert outcomes[rank].error in ("PeerLost", "TapPeerLost"), outcomes[rank]
        assert re.search(r"rank\(s\) \[[^]]*\b1\b|rank 1", outcomes[rank].text), outcomes[rank]
        assert outcomes[rank].ended_at_s - stopped_at_s < 10.0, outcomes[rank]
    assert shared_files() <= before


@pytest.mark.slow
def test_a_frozen_rank_is_named_by_the_timeout_of_the_tap_that_waits_for_it(tmp_path):
    before = shared_files()
    outcomes = outcomes_of(stops_in_step, 3, 2, signal.SIGSTOP, "last_inside", 1, tmp_path, absent=(2,))
    stopped_at_s = float((tmp_path / "stopped").read_text())
    for rank in (0, 1):
        assert outcomes[rank].error in ("TapTimeout", "TapPeerLost", "PeerLost"), outcomes[rank]
        # the tap's 4 s, and what the process that timed out takes to end
        assert outcomes[rank].ended_at_s - stopped_at_s < 90.0  # on a busy machine too
    texts = [outcomes[rank].text for rank in (0, 1) if outcomes[rank].error == "TapTimeout"]
    assert any("waits for rank 2 to release room: waited" in text for text in texts), outcomes
    assert shared_files() <= before


def stops_without_taps(rank, signal_number, is_training):
    """The last rank stops in a stage's forward of its second step; the group waits for 5 s."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    pipeline = make_pipeline(families.policy("llama"), Setting(num_stages=3), group)

    def step():
        if is_training:
            pipeline.train_step(families.batch(8, 12), next_token_loss)
        else:
            evaluate(pipeline)

    step()
    if rank == 2:
        stage = pipeline.stages[0].anatomy.decoder.rotary_emb
        stage.register_forward_hook(lambda *args: os.kill(os.getpid(), signal_number))
    step()


@pytest.mark.slow
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "forward-only"])
def test_a_pipeline_without_a_draft_names_the_rank_that_ended_or_stands_still(is_training):
    what = "a training step" if is_training else "a forward-only pass"
    outcomes = outcomes_of(stops_without_taps, 3, signal.SIGKILL, is_training)
    for rank in (0, 1):
        assert outcomes[rank].error == "PeerLost", outcomes[rank]
        assert outcomes[rank].text.startswith(f"rank {rank} lost the others in {what}: rank(s) ["), outcomes[rank]
    assert re.search(r"rank\(s\) \[(0, )?2\] ended, killed or with an error", outcomes[1].text), outcomes
    outcomes = outcomes_of(stops_without_taps, 3, signal.SIGSTOP, is_training, absent=(2,))
    for rank in (0, 1):
        assert outcomes[rank].error == "PeerLost", outcomes[rank]
    assert "rank(s) [2] are stopped, by a signal or a debugger" in outcomes[1].text
