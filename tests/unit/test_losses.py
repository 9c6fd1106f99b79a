"""Losses against their formulas in fp64, and the chunked path against the dense one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_codraft.losses import LOSS_TYPES, Teacher, draft_loss, per_token_loss

PASSES, ANCHORS, HIDDEN, VOCAB = 3, 17, 6, 29
loss_types = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def formula(draft_logits, teacher_logits, token_ids, loss_type) -> torch.Tensor:
    """The table of DRAFT_MATH section 1, with explicit exponentials."""
    p = teacher_logits.exp() / teacher_logits.exp().sum(-1, keepdim=True)
    q = draft_logits.exp() / draft_logits.exp().sum(-1, keepdim=True)
    kl = (p * (p / q).log()).sum(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    weight = torch.exp(-3 * (1 - tv)).detach()
    return {
        "kl": kl,
        "tv": tv,
        "lk": weight * kl + (1 - weight) * tv,
        "ce": -q[torch.arange(len(q)), token_ids].log(),
    }[loss_type]


def random(*shape, seed) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(*, seed=0, passes=PASSES, anchors=ANCHORS, vocab=VOCAB, hidden=HIDDEN, **teacher) -> dict:
    """Arguments of `draft_loss`; anchor a of pass k is compared with the teacher's row a + k."""
    generator = torch.Generator().manual_seed(seed)
    weight, states = random(vocab, hidden, seed=seed + 3), random(anchors + passes, hidden, seed=seed + 4)
    return dict(
        hidden_KAH=random(passes, anchors, hidden, seed=seed + 1).requires_grad_(),
        head_VH=random(vocab, hidden, seed=seed + 2).requires_grad_(),
        teacher=Teacher(states, weight, **teacher),
        index_KA=torch.arange(anchors) + torch.arange(1, passes + 1)[:, None],
        token_ids_KA=torch.randint(vocab, (passes, anchors), generator=generator),
        mask_KA=torch.rand(passes, anchors, generator=generator) < 0.7,
    )


def gradients(loss, arguments) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss.loss * 1.7, (arguments["hidden_KAH"], arguments["head_VH"]))


def assert_same(got, want, arguments, other_arguments=None) -> None:
    """Equal values and gradients of hidden states and head."""
    for name in ("loss", "loss_sum_K", "accept_sum_K", "count_K"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(got, arguments), gradients(want, other_arguments or arguments), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@loss_types
def test_per_token_loss_equals_its_formula(loss_type):
    draft, teacher = (random(11, VOCAB, seed=seed).mul(2).requires_grad_() for seed in (1, 2))
    token_ids = torch.arange(11)
    got, accept = per_token_loss(draft, teacher.detach(), token_ids, loss_type=loss_type)
    want = formula(draft, teacher.detach(), token_ids, loss_type)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weight = random(11, seed=3)
    grads = [torch.autograd.grad((x * weight).sum(), draft)[0] for x in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    overlap = torch.minimum(torch.softmax(draft, -1), torch.softmax(teacher, -1)).sum(-1)
    torch.testing.assert_close(accept, overlap.detach(), rtol=1e-12, atol=1e-12)
    assert not accept.requires_grad


def test_kl_and_soft_cross_entropy_have_the_same_gradient():
    draft, teacher = random(11, VOCAB, seed=1).requires_grad_(), random(11, VOCAB, seed=2)
    kl, _ = per_token_loss(draft, teacher, torch.zeros(11, dtype=torch.long), loss_type="kl")
    cross_entropy = torch.nn.functional.cross_entropy(draft, torch.softmax(teacher, -1), reduction="none")
    grads = [torch.autograd.grad(x.sum(), draft)[0] for x in (kl, cross_entropy)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    entropy = -(torch.softmax(teacher, -1) * torch.log_softmax(teacher, -1)).sum(-1)
    torch.testing.assert_close(cross_entropy - kl, entropy, rtol=1e-12, atol=1e-12)


def test_equal_logits_cost_nothing_and_are_always_accepted():
    logits = random(5, VOCAB, seed=1)
    for loss_type in ("kl", "tv", "lk"):
        loss, accept = per_token_loss(logits, logits + 3, torch.zeros(5, dtype=torch.long), loss_type=loss_type)
        torch.testing.assert_close(loss, torch.zeros_like(loss), rtol=0, atol=1e-14)
        torch.testing.assert_close(accept, torch.ones_like(accept), rtol=0, atol=1e-14)


@loss_types
@pytest.mark.parametrize("chunk_size", [None, 5], ids=["dense", "chunked"])
def test_draft_loss_sums_the_formula_over_supervised_positions(loss_type, chunk_size):
    weights, temperature, scale, softcap = (1.0, 0.5, 0.25), 0.7, 1.5, 4.0
    bias = random(VOCAB, seed=8)
    arguments = problem(bias_V=bias, temperature=temperature, scale=scale, softcap=softcap)
    got = draft_loss(**arguments, loss_type=loss_type, pass_weights=weights, chunk_size=chunk_size)

    teacher = arguments["teacher"]
    raw = (teacher.hidden_TH @ teacher.weight_VH.T + bias) * scale
    teacher_logits = softcap * torch.tanh(raw / softcap) / temperature
    sums, accepts = [], []
    for k in range(PASSES):
        kept = arguments["mask_KA"][k]
        draft_logits = (arguments["hidden_KAH"][k] @ arguments["head_VH"].T)[kept] / temperature
        p = teacher_logits[arguments["index_KA"][k]][kept]
        sums.append(formula(draft_logits, p, arguments["token_ids_KA"][k][kept], loss_type).sum())
        accepts.append(torch.minimum(torch.softmax(draft_logits, -1), torch.softmax(p, -1)).sum().detach())
    loss = sum(weight * x for weight, x in zip(weights, sums, strict=True))
    torch.testing.assert_close(got.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.loss_sum_K, torch.stack(sums).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.accept_sum_K, torch.stack(accepts), rtol=1e-12, atol=1e-12)
    assert got.count_K.tolist() == arguments["mask_KA"].sum(1).tolist()
    leaves = (arguments["hidden_KAH"], arguments["head_VH"])
    for ours, want in zip(torch.autograd.grad(got.loss, leaves), torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


@loss_types
@pytest.mark.parametrize("chunk_size", [1, 4, 16, 17, 500])
def test_chunked_equals_dense(loss_type, chunk_size):
    arguments = problem(temperature=1.3)
    weights = (1.0, 0.8, 0.64)
    dense = draft_loss(**arguments, loss_type=loss_type, pass_weights=weights, chunk_size=None)
    chunked = draft_loss(**arguments, loss_type=loss_type, pass_weights=weights, chunk_size=chunk_size)
    assert_same(chunked, dense, arguments)


@pytest.mark.parametrize("loss_type", ["kl", "tv", "lk"])
def test_teacher_of_a_reduced_vocabulary_is_renormalised_over_the_kept_ids(loss_type):
    kept = torch.tensor([0, 3, 4, 9, 20, 28])
    arguments = problem(vocab=len(kept), passes=1)
    full = random(VOCAB, HIDDEN, seed=11)
    arguments["teacher"] = Teacher(arguments["teacher"].hidden_TH, full[kept])
    got = draft_loss(**arguments, loss_type=loss_type)

    p = torch.softmax(arguments["teacher"].hidden_TH @ full.T, -1)[:, kept]
    p = p / p.sum(-1, keepdim=True)
    mask = arguments["mask_KA"][0]
    draft_logits = (arguments["hidden_KAH"][0] @ arguments["head_VH"].T)[mask]
    log_p = p[arguments["index_KA"][0]][mask].log()
    want = formula(draft_logits, log_p, arguments["token_ids_KA"][0][mask], loss_type)
    torch.testing.assert_close(got.loss, want.sum(), rtol=1e-12, atol=1e-12)


@loss_types
@pytest.mark.parametrize("chunk_size", [None, 4], ids=["dense", "chunked"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_at_masked_positions_does_no_harm(loss_type, chunk_size, poison):
    clean = problem()
    used = torch.zeros(ANCHORS + PASSES, dtype=torch.bool)
    clean["mask_KA"][:, 5:9] = False
    used[clean["index_KA"][clean["mask_KA"]]] = True
    assert not used.all()
    poisoned = dict(clean)
    hidden = clean["hidden_KAH"].detach().clone()
    hidden[~clean["mask_KA"]] = poison
    poisoned["hidden_KAH"] = hidden.requires_grad_()
    poisoned["teacher"] = Teacher(
        clean["teacher"].hidden_TH.masked_fill(~used[:, None], poison), clean["teacher"].weight_VH
    )
    got = draft_loss(**poisoned, loss_type=loss_type, chunk_size=chunk_size)
    want = draft_loss(**clean, loss_type=loss_type, chunk_size=chunk_size)
    assert_same(got, want, poisoned, clean)


@loss_types
def test_nan_at_a_supervised_position_is_not_hidden(loss_type):
    arguments = problem()
    arguments["mask_KA"][1, 4] = True
    hidden = arguments["hidden_KAH"].detach().clone()
    hidden[1, 4] = torch.nan
    arguments["hidden_KAH"] = hidden.requires_grad_()
    assert draft_loss(**arguments, loss_type=loss_type).loss.isnan()


@loss_types
@pytest.mark.parametrize("chunk_size", [None, 4], ids=["dense", "chunked"])
@pytest.mark.parametrize("anchors", [0, ANCHORS], ids=["no anchor", "all masked"])
def test_no_supervised_position_gives_zero_and_zero_gradients(loss_type, chunk_size, anchors):
    arguments = problem(anchors=anchors)
    arguments["mask_KA"] = torch.zeros_like(arguments["mask_KA"])
    got = draft_loss(**arguments, loss_type=loss_type, chunk_size=chunk_size)
    assert got.loss.item() == 0.0
    assert got.loss_sum_K.tolist() == got.accept_sum_K.tolist() == got.count_K.tolist() == [0] * PASSES
    for gradient in gradients(got, arguments):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_unknown_loss_type_is_refused():
    with pytest.raises(ValueError, match=r"loss_type must be one of .*'kl'.* got 'mse'"):
        draft_loss(**problem(), loss_type="mse")


class LargestLogits(TorchDispatchMode):
    """Most elements of any tensor that an operation returned and that has an axis as long as the vocabulary."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.elements = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and self.vocab in tensor.shape:
                self.elements = max(self.elements, tensor.numel())
        return out


@loss_types
def test_no_logits_outlive_their_chunk(loss_type):
    vocab, anchors, chunk = 101, 64, 8
    largest = {}
    for chunk_size in (chunk, None):
        arguments = problem(vocab=vocab, anchors=anchors, hidden=4)
        with LargestLogits(vocab) as seen:
            got = draft_loss(**arguments, loss_type=loss_type, chunk_size=chunk_size)
            if chunk_size is not None:
                kept = {tuple(tensor.shape) for tensor in got.loss.grad_fn.saved_tensors}
                assert kept == {(PASSES, anchors, 4), (vocab, 4)}
            gradients(got, arguments)
        largest[chunk_size] = seen.elements
    # the passes of a chunk share the teacher's rows, and reach PASSES - 1 rows past its last anchor
    assert largest[chunk] <= (chunk + PASSES) * vocab
    assert largest[None] >= anchors * vocab


@loss_types
def test_bf16_error_is_at_most_twice_that_of_the_plain_loss(loss_type):
    exact = problem(anchors=64, vocab=101, hidden=32)
    narrow = dict(exact)
    for name in ("hidden_KAH", "head_VH"):
        narrow[name] = (exact[name].detach() / 4).bfloat16().requires_grad_()
        exact[name] = narrow[name].detach().double().requires_grad_()
    states, weight = exact["teacher"].hidden_TH.bfloat16(), (exact["teacher"].weight_VH / 4).bfloat16()
    narrow["teacher"], exact["teacher"] = Teacher(states, weight), Teacher(states.double(), weight.double())
    want = draft_loss(**exact, loss_type=loss_type, chunk_size=None)
    ours = draft_loss(**narrow, loss_type=loss_type, chunk_size=7)
    assert ours.loss.dtype == torch.float32

    mask, index = narrow["mask_KA"], narrow["index_KA"]
    logits = torch.nn.functional.linear(narrow["hidden_KAH"], narrow["head_VH"])[mask].float()
    teacher_logits = torch.nn.functional.linear(states, weight)[index][mask].float()
    plain = formula(logits, teacher_logits, narrow["token_ids_KA"][mask], loss_type).sum()

    wanted = [want.loss, *torch.autograd.grad(want.loss, (exact["hidden_KAH"], exact["head_VH"]))]
    errors = []
    for loss in (ours.loss, plain):
        got = [loss, *torch.autograd.grad(loss, (narrow["hidden_KAH"], narrow["head_VH"]))]
        errors.append([(g.double() - w).norm().item() for g, w in zip(got, wanted, strict=True)])
    # the sum over all positions is one number, whose roundings may cancel in the plain loss: bf16 resolution bounds it
    assert errors[0][0] <= max(2 * errors[1][0], 2**-8 * abs(want.loss.item()))
    for ours_error, plain_error in zip(errors[0][1:], errors[1][1:], strict=True):
        assert plain_error > 0
        assert ours_error <= 2 * plain_error


@loss_types
def test_gradients_are_finite_where_nothing_is_accepted(loss_type):
    arguments = problem(hidden=VOCAB)
    arguments["head_VH"] = torch.eye(VOCAB, dtype=torch.float64).requires_grad_()
    apart = 2000 * torch.eye(VOCAB, dtype=torch.float64)
    arguments["hidden_KAH"] = apart[0].expand(PASSES, ANCHORS, -1).clone().requires_grad_()
    arguments["teacher"] = Teacher(apart[1].expand(ANCHORS + PASSES, -1), torch.eye(VOCAB, dtype=torch.float64))
    got, want = (draft_loss(**arguments, loss_type=loss_type, chunk_size=chunk) for chunk in (5, None))
    assert got.accept_sum_K.tolist() == [0.0] * PASSES
    assert_same(got, want, arguments)


@loss_types
def test_autocast_costs_the_chunked_loss_no_more_than_the_dense_one(loss_type):
    exact = problem(anchors=64, vocab=101, hidden=32)
    narrow = dict(exact)
    for name in ("hidden_KAH", "head_VH"):
        narrow[name] = exact[name].detach().float().requires_grad_()
    narrow["teacher"] = Teacher(exact["teacher"].hidden_TH.float(), exact["teacher"].weight_VH.float())
    wanted = gradients(draft_loss(**exact, loss_type=loss_type, chunk_size=None), exact)
    errors = []
    for chunk_size in (7, None):
        with torch.autocast("cpu", torch.bfloat16):
            loss = draft_loss(**narrow, loss_type=loss_type, chunk_size=chunk_size)
        got = gradients(loss, narrow)
        errors.append([((g - w).norm() / w.norm()).item() for g, w in zip(got, wanted, strict=True)])
    for ours, dense in zip(*errors, strict=True):
        assert 0 < ours <= 2 * dense


def test_the_heads_gradient_is_added_in_place():
    arguments = problem()
    want = gradients(draft_loss(**arguments, chunk_size=5), arguments)[1] / 1.7
    into = torch.ones_like(want)
    loss = draft_loss(**arguments | {"head_VH": arguments["head_VH"].detach()}, chunk_size=5, into_VH=into)
    torch.testing.assert_close(into, 1 + want, rtol=1e-12, atol=1e-12)
    loss.loss.backward()
    torch.testing.assert_close(into, 1 + want, rtol=1e-12, atol=1e-12)
