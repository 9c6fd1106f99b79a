"""The draft's optimizer step: independent of how a batch is split, of the policy, and of steps that fail."""

import copy
import io
import math
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from ranks import tiny_batch, tiny_draft, tiny_weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import SchedulerType, get_scheduler

from hf_codraft.drafts.eagle3 import Eagle3Draft, Eagle3DraftConfig
from hf_codraft.drafts.learner import SCHEDULES_BY_METRIC, TV_FROM, DraftLearner, rate_factor, settling
from hf_codraft.losses import VOCAB_BLOCK
from hf_codraft.taps.packed import PolicyWeights

ROWS = [(5, 9), (1, 1), (3, 0), (2, 8, 3, 5), (7, 12), (1, 6), (2, 3), (4, 11)]
SPLITS = {"one": [8], "two uneven": [3, 5], "four uneven": [1, 2, 1, 4], "a piece that supervises nothing": [1, 2, 5]}


def pieces_of(sizes) -> list:
    """The same rows, drawn once, in pieces of these many rows."""
    whole = tiny_batch(ROWS)
    pieces, first = [], 0
    for size in sizes:
        start, end = (whole.layout.cu_seqlens[i] for i in (first, first + size))
        shard = tiny_batch(ROWS[first : first + size]).shard
        parts = (whole.token_ids_T, whole.supervised_T, whole.taps_TX, whole.hidden_TH)
        pieces.append(replace(whole, shard=shard, **dict(zip(
            ("token_ids_T", "supervised_T", "taps_TX", "hidden_TH"), (x[start:end] for x in parts), strict=True
        ))))  # fmt: skip
        first += size
    return pieces


def learner_of(draft, **settings) -> DraftLearner:
    return DraftLearner(draft, **({"num_passes": 3, "learning_rate": 1e-2} | settings))


def applied_gradients(learner) -> list[list[torch.Tensor]]:
    """A list that grows by the gradients the optimizer sees in every step."""
    seen = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in learner.parameters]))
    return seen


def train(learner, pieces):
    for piece in pieces:
        learner.accumulate(piece, tiny_weights())
    return learner.step()


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(
    "settings", [{}, {"max_grad_norm": 0.0, "pass_weights": (1.0, 0.5, 0.25), "loss_type": "lk"}], ids=str
)
def test_accumulation_gives_the_step_of_the_whole_batch(sizes, settings):
    whole, split = (learner_of(tiny_draft(), **settings) for _ in range(2))
    seen_whole, seen_split = applied_gradients(whole), applied_gradients(split)
    for _ in range(2):
        want, got = train(whole, pieces_of([8])), train(split, pieces_of(sizes))
        assert (got.num_supervised, got.vocab_coverage) == (want.num_supervised, want.vocab_coverage)
        for name in ("loss", "loss_passes", "accept_passes", "grad_norm"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-12)
    for step_whole, step_split in zip(seen_whole, seen_split, strict=True):
        for ours, expected in zip(step_split, step_whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    # Adam divides by the gradient's size: where it is 1e-10 or less, a rounding of 1e-17 shows in the update
    for ours, expected in zip(split.draft.parameters(), whole.draft.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def test_gradient_is_that_of_the_mean_loss_over_all_supervised_positions():
    draft = tiny_draft()
    learner = learner_of(draft, max_grad_norm=0.0, pass_weights=(1.0, 0.5, 0.25))
    whole, options = pieces_of([8])[0], dict(num_passes=3, pass_weights=(1.0, 0.5, 0.25))
    loss = draft.compute_loss(whole, tiny_weights(), **options)
    mean = loss.loss / (loss.count_K * torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)).sum()
    want = torch.autograd.grad(mean, list(draft.parameters()))
    seen = applied_gradients(learner)
    step = train(learner, pieces_of([3, 5]))
    for ours, expected in zip(seen[0], want, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(step.loss, mean.item(), rtol=1e-12, atol=0)
    torch.testing.assert_close(list(step.loss_passes), (loss.loss_sum_K / loss.count_K).tolist(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        list(step.accept_passes), (loss.accept_sum_K / loss.count_K).tolist(), rtol=1e-12, atol=0
    )
    norm = math.sqrt(sum(g.square().sum().item() for g in want))
    torch.testing.assert_close(step.grad_norm, norm, rtol=1e-12, atol=0)


def test_clip_bounds_the_drafts_gradient_and_touches_no_other():
    policy_parameter = torch.nn.Parameter(torch.ones(4))
    policy_parameter.grad = torch.full((4,), 100.0)
    free, clipped = learner_of(tiny_draft(), max_grad_norm=0.0), learner_of(tiny_draft(), max_grad_norm=1e-3)
    seen_free, seen_clipped = applied_gradients(free), applied_gradients(clipped)
    steps = [train(learner, pieces_of([8])) for learner in (free, clipped)]
    assert steps[0].grad_norm == steps[1].grad_norm > 1e-3
    for ours, whole in zip(seen_clipped[0], seen_free[0], strict=True):
        torch.testing.assert_close(ours, whole * (1e-3 / steps[0].grad_norm), rtol=1e-12, atol=0)
    assert torch.equal(policy_parameter.grad, torch.full((4,), 100.0))
    assert not {id(policy_parameter)} & {id(p) for group in clipped.optimizer.param_groups for p in group["params"]}


def test_a_clip_above_the_norm_changes_nothing():
    free, clipped = learner_of(tiny_draft(), max_grad_norm=0.0), learner_of(tiny_draft(), max_grad_norm=1e6)
    for learner in (free, clipped):
        train(learner, pieces_of([8]))
    assert all(torch.equal(a, b) for a, b in zip(free.draft.parameters(), clipped.draft.parameters(), strict=True))


def test_training_lowers_the_loss_and_raises_the_acceptance():
    learner = learner_of(tiny_draft())
    steps = [train(learner, pieces_of([8])) for _ in range(30)]
    assert steps[-1].loss < 0.7 * steps[0].loss
    assert all(last > first for first, last in zip(steps[0].accept_passes, steps[-1].accept_passes, strict=True))


@pytest.mark.parametrize("where", ["taps_TX", "hidden_TH"])
def test_steps_that_are_not_finite_are_skipped_and_after_three_in_a_row_the_draft_stops_learning(where):
    draft = tiny_draft()
    learner = learner_of(draft, scheduler="linear", scheduler_steps=10)
    train(learner, pieces_of([8]))
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in learner.optimizer.state.values()]
    bad = tiny_batch(ROWS)
    getattr(bad, where)[3:8] = torch.nan

    def skips():
        step = train(learner, [pieces_of([8])[0], bad])  # one bad piece of two spoils the step
        assert step.is_skipped and not math.isfinite(step.loss + step.grad_norm)

    skips()
    skips()
    assert (learner.num_skipped, learner.num_skipped_in_a_row, learner.num_steps) == (2, 2, 1)
    assert learner.lr_scheduler.get_last_lr() == pytest.approx([7e-3])  # it ends when the policy's run does
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
    kept = [state["exp_avg"] for state in learner.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, moments, strict=True))
    step = train(learner, pieces_of([8]))  # nothing of the bad steps is left
    assert not step.is_skipped and math.isfinite(step.loss)
    assert (learner.num_skipped, learner.num_skipped_in_a_row, learner.num_steps) == (2, 0, 2)
    skips()
    skips()
    last = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.warns(UserWarning, match=r"STOPPED LEARNING.*not finite 3 times in a row. The policy is unharmed"):
        train(learner, [bad])
    assert learner.has_stopped
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so once
        assert train(learner, pieces_of([8])).is_skipped
    assert all(torch.equal(tensor, last[name]) for name, tensor in draft.state_dict().items())
    again = learner_of(draft, scheduler="linear", scheduler_steps=10)
    again.load_state_dict(learner.state_dict())
    assert not again.has_stopped and not train(again, pieces_of([8])).is_skipped


@pytest.mark.parametrize("factor", [1e-12, 1e-3, 1e6])
def test_only_the_ratios_of_pass_weights_matter(factor):
    few = [(2, 8, 3, 5), (1, 6)]  # only the large factor leaves a sum of weights above 1
    steps, seen = [], []
    for weights in ((1.0, 0.5, 0.25), (factor, 0.5 * factor, 0.25 * factor)):
        learner = learner_of(tiny_draft(), pass_weights=weights)
        seen.append(applied_gradients(learner))
        steps.append(train(learner, [tiny_batch(few)]))
    torch.testing.assert_close(steps[1].loss, steps[0].loss, rtol=1e-12, atol=0)
    for ours, expected in zip(seen[1][0], seen[0][0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-15)


SCHEDULES = {
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 5, "decay_type": "linear", "warmup_type": "cosine"},
}


def test_every_schedule_of_transformers_works_or_is_refused():
    assert {kind.value for kind in SchedulerType} == {*SCHEDULES, *SCHEDULES_BY_METRIC}
    for name in SCHEDULES_BY_METRIC:
        with pytest.raises(ValueError, match=f"draft_lr_scheduler_type cannot be '{name}', since it follows a metric"):
            rate_factor(name, learning_rate=1e-3, num_steps=10)


@pytest.mark.parametrize("num_warmup_steps", [0, 1, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_that_of_transformers_without_a_step_of_rate_zero(name, num_warmup_steps):
    num_steps = 12
    common = dict(learning_rate=1e-3, num_warmup_steps=num_warmup_steps, options=SCHEDULES[name])
    factor = rate_factor(name, num_steps=num_steps, **common)
    rates = [factor(step) for step in range(num_steps)]
    assert min(rates) > 0
    assert rates[:num_warmup_steps] == sorted(rates[:num_warmup_steps])
    assert rates[num_warmup_steps] == pytest.approx(1, abs=0.1)
    if name not in ("warmup_stable_decay", "cosine_warmup_with_min_lr"):
        ramp = [(step + 1) / (num_warmup_steps + 1) for step in range(num_warmup_steps)]
        assert rates[:num_warmup_steps] == pytest.approx(ramp)
    ends = {
        "linear": 0, "cosine": 0, "cosine_with_restarts": 0, "polynomial": 1e-4, "cosine_with_min_lr": 0.1,
        "cosine_warmup_with_min_lr": 0.01, "warmup_stable_decay": 0,
    }  # fmt: skip
    if name in ends:
        last = num_steps - (name == "cosine_warmup_with_min_lr")  # reaches its end in the last step
        assert factor(last) == pytest.approx(ends[name], abs=1e-12)
    if num_warmup_steps == 0:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        want = get_scheduler(name, optimizer, 0, num_steps, SCHEDULES[name])
        assert rates == pytest.approx([want.lr_lambdas[0](step) for step in range(num_steps)])


def test_schedule_that_waits_for_its_number_of_steps():
    learner = learner_of(tiny_draft(), scheduler="linear")
    with pytest.raises(RuntimeError, match=r"call schedule\(num_steps\) first"):
        learner.step()
    for _ in range(2):  # training begins a second time: at the peak again
        learner.schedule(2)
        rates = []
        for _ in range(2):
            rates += learner.lr_scheduler.get_last_lr()
            train(learner, pieces_of([8]))
        assert rates == pytest.approx([1e-2, 5e-3])
        assert learner.lr_scheduler.get_last_lr() == [0.0]


def test_a_step_that_fails_leaves_nothing_of_its_gradient(monkeypatch):
    draft = tiny_draft()
    learner, other = learner_of(draft), learner_of(tiny_draft())

    def full(*args):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="no room"):
        patch.setattr(learner, "_flat_gradient", full)
        learner.step()
    assert train(learner, pieces_of([8])) == train(other, pieces_of([8]))
    assert (learner.num_steps, learner.num_skipped) == (1, 0)


@pytest.mark.parametrize("rows", [[(5, 0), (3, 1)], []], ids=["nothing supervised", "no piece at all"])
def test_a_step_without_supervised_positions_changes_nothing(rows):
    draft = tiny_draft()
    learner = learner_of(draft, weight_decay=0.1, scheduler="linear", scheduler_steps=10)
    train(learner, pieces_of([8]))
    before = [p.clone() for p in draft.parameters()]
    step = train(learner, [tiny_batch(rows)] if rows else [])
    assert not step.is_skipped and step.num_supervised == 0 and step.grad_norm == 0.0 and math.isnan(step.loss)
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), before, strict=True))
    assert (learner.num_steps, learner.num_skipped) == (1, 0)
    assert learner.lr_scheduler.get_last_lr() == pytest.approx([8e-3])  # the schedule ends when the policy's run does


def test_a_resume_from_its_state_continues_bit_for_bit():
    def fresh(seed):
        settings = dict(scheduler="cosine", scheduler_steps=8, warmup_steps=2, weight_decay=0.01)
        return learner_of(tiny_draft(exact=False, seed=seed), **settings)

    def batch(seed):
        return tiny_batch(ROWS, seed=seed, dtype=torch.float32)

    def advance(learner, seeds):
        steps = []
        for seed in seeds:
            bad = batch(seed)
            if seed == 2:
                bad.taps_TX.fill_(torch.nan)
            learner.accumulate(bad, tiny_weights(dtype=torch.float32))
            steps.append(learner.step())
        return steps

    straight, first = fresh(0), fresh(0)
    advance(straight, [0, 1, 2])
    want = advance(straight, [3, 4, 5])
    advance(first, [0, 1, 2])
    file = io.BytesIO()
    torch.save({"learner": first.state_dict(), "draft": first.draft.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = fresh(1)
    assert advance(fresh(1), [3]) != want[:1]
    second.draft.load_state_dict(saved["draft"])
    second.load_state_dict(saved["learner"])
    assert (second.num_steps, second.num_skipped, second.num_skipped_in_a_row) == (2, 1, 1)
    assert advance(second, [3, 4, 5]) == want
    assert all(torch.equal(a, b) for a, b in zip(second.draft.parameters(), straight.draft.parameters(), strict=True))
    assert second.lr_scheduler.get_last_lr() == straight.lr_scheduler.get_last_lr()


def test_one_weight_a_pass_is_needed():
    with pytest.raises(ValueError, match="ttt_pass_weights has 2 weights, but the draft is trained for 3 passes"):
        learner_of(tiny_draft(), pass_weights=(1.0, 0.5))


@pytest.mark.parametrize("loss_type", ["kl", "ce"])
def test_coverage_is_the_share_of_sampled_tokens_that_the_draft_can_propose(loss_type):
    draft = tiny_draft(draft_vocab_size=20)
    batch = tiny_batch(ROWS)
    step = train(learner_of(draft, loss_type=loss_type), [batch])
    targets = batch.token_ids_T[2:][batch.supervised_T[1:-1] & batch.supervised_T[2:]]  # prompts part the rows
    covered = torch.isin(targets, draft.kept_ids).double().mean().item()
    assert 0.2 < covered < 0.8
    torch.testing.assert_close(step.vocab_coverage, covered, rtol=1e-12, atol=0)


def test_only_what_requires_a_gradient_is_trained():
    draft = tiny_draft(has_own_embeddings=True)
    embeddings = draft.embed_tokens.weight.clone()
    before = [p.clone() for p in draft.parameters() if p.requires_grad]
    train(learner_of(draft, weight_decay=0.1), pieces_of([8]))
    assert torch.equal(draft.embed_tokens.weight, embeddings)
    assert not any(
        torch.equal(a, b) for a, b in zip((p for p in draft.parameters() if p.requires_grad), before, strict=True)
    )


def loss_types(learner) -> list[str]:
    """A list that grows by the loss that each piece is compared by."""
    seen, compute = [], learner.draft.compute_loss

    def watched(*args, **settings):
        seen.append(settings["loss_type"])
        return compute(*args, **settings)

    learner.draft.compute_loss = watched
    return seen


def test_auto_is_kl_until_guesses_are_accepted_and_total_variation_from_then_on():
    learner = learner_of(tiny_draft(), loss_type="auto", learning_rate=1e-2)
    seen = loss_types(learner)
    acceptance = []
    while len(acceptance) < 400 and (not acceptance or acceptance[-1] < TV_FROM):
        acceptance.append(train(learner, pieces_of([8])).accept_passes[0])
    assert acceptance[0] < TV_FROM <= acceptance[-1]
    train(learner, pieces_of([8]))
    assert seen == ["kl"] * len(acceptance) + ["tv"]

    resumed = learner_of(copy.deepcopy(learner.draft), loss_type="auto")
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    seen = loss_types(resumed)
    train(resumed, pieces_of([8]))
    assert seen == ["tv"]


def test_warm_start_is_kl_whatever_is_accepted():
    learner = learner_of(tiny_draft(), loss_type="auto")
    learner.acceptance = 0.9
    seen = loss_types(learner)
    with learner.following(lambda step: 1.0, peak=1e-3):
        train(learner, pieces_of([8]))
    learner.acceptance = 0.9
    train(learner, pieces_of([8]))
    assert seen == ["kl", "tv"]


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages that were alive at one time, beside those of the tensors that it is given."""

    def __init__(self, resident):
        super().__init__()
        self.resident = {tensor.untyped_storage()._cdata for tensor in resident}
        self.sizes, self.num_bytes, self.peak = {}, 0, 0

    def forget(self, key):
        self.num_bytes -= self.sizes.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.resident | self.sizes.keys():
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.num_bytes += storage.nbytes()
                    self.peak = max(self.peak, self.num_bytes)
                    weakref.finalize(storage, self.forget, storage._cdata)
        return result


@pytest.mark.parametrize("loss_type", ["kl", "tv", "lk"])
@pytest.mark.parametrize(
    "autocast", [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["fp32", "bf16"]
)
def test_step_needs_a_tenth_more_than_weights_gradient_and_moments(autocast, loss_type):
    # the head outweighs a block of ids and a chunk's logits, as 128k ids at hidden size 4096 do with chunks of 512
    vocab, hidden, chunk = 8 * VOCAB_BLOCK, 128, 8
    config = dict(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, eagle_aux_hidden_state_layer_ids=[1, 2, 4], max_position_embeddings=128,
    )  # fmt: skip
    draft = Eagle3Draft(Eagle3DraftConfig(**config))
    embedding, head = torch.randn(2, vocab, hidden)
    batch = tiny_batch([(2, 30)], dtype=torch.float32)
    taps, states = torch.randn(32, 3 * hidden), torch.randn(32, hidden)
    batch = replace(batch, taps_TX=taps, hidden_TH=states)
    learner = learner_of(draft, loss_type=loss_type, chunk_size=chunk, autocast=autocast)
    policy = PolicyWeights(embedding, head)
    learner.accumulate(batch, policy)
    learner.step()  # gradient and moments are there from now on
    moments = [x for state in learner.optimizer.state.values() for x in state.values()]
    weights = list(draft.parameters())
    with LiveBytes([*weights, *draft.buffers(), *(p.grad for p in weights), *moments, embedding, head]) as live:
        learner.accumulate(batch, policy)
        learner.step()
    needed = 4 * sum(weight.nbytes for weight in weights)
    assert needed / 1000 < live.peak <= needed / 10


def test_a_resumed_learner_has_the_opening_of_the_one_it_goes_on_from():
    """After a warm start there is none, although a fresh draft's learner is made with one."""
    learner = learner_of(tiny_draft(), opening=settling)
    with learner.following(lambda step: 1.0, peak=1e-3):
        train(learner, pieces_of([8]))
    train(learner, pieces_of([8]))
    resumed = learner_of(copy.deepcopy(learner.draft), opening=settling)
    assert resumed.last_lr > learner.last_lr
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert resumed.last_lr == learner.last_lr
    for x in (learner, resumed):
        train(x, pieces_of([8]))
    for ours, expected in zip(resumed.parameters, learner.parameters, strict=True):
        assert torch.equal(ours, expected)
