"""Digests, places, names and counts of a refit, without an engine."""

import pytest
import torch
from torch import nn

from hf_codraft.serving.acceptance import Acceptance
from hf_codraft.serving.refit import WeightStream, check_finite, check_names, digest, fingerprint, group_name


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 8])  # rows that end within a word of 8 bytes and at its end
def test_digest_of_a_part_is_that_of_its_copy_wherever_it_lies(dtype, width):
    stacked = random(9, width, dtype=dtype)
    for start in range(4):
        assert digest(stacked[start : start + 5]) == digest(stacked[start : start + 5].clone())
        assert digest(stacked.T[:, start:]) == digest(stacked[start:].T.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_sees_the_smallest_change(dtype):
    tensor = random(50, 50, dtype=dtype)
    other = tensor.clone()
    other[7, 9] = torch.nextafter(other[7, 9], torch.tensor(torch.inf, dtype=dtype))
    assert digest(tensor) != digest(other)
    assert digest(torch.tensor([1.0, -1.0], dtype=dtype)) != digest(torch.zeros(2, dtype=dtype))


# Within a word of 8 bytes, within a block of words, and over several blocks.
@pytest.mark.parametrize("shape", [(7, 1), (7, 8), (1100, 2048)])
def test_digest_sees_any_two_rows_that_change_places(shape):
    tensor, num_rows = random(*shape), shape[0]
    for first, second in [(0, 1), (0, num_rows - 1), (num_rows // 2, num_rows - 2)]:
        other = tensor.clone()
        other[[first, second]] = other[[second, first]]
        assert digest(tensor) != digest(other)


class Layer(nn.Module):
    """Parameters as an engine names and stacks them: three parts, two parts, padded rows, a router in fp32, experts."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()

        def empty(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.qkv_proj = nn.ParameterDict({"weight": empty(4 + 2 + 2, 4), "bias": empty(8)})
        self.gate_up_proj = nn.ParameterDict({"weight": empty(6, 4)})
        self.gate = nn.ParameterDict({"weight": empty(3, 4, dtype=torch.float32), "e_score_correction_bias": empty(3)})
        self.experts = nn.ModuleDict({"routed_experts": nn.ParameterDict({"w13_weight": empty(3, 6, 4)})})
        self.lm_head = nn.ParameterDict({"weight": empty(10, 4)})


STACKED = {"q_proj": (0, 4), "k_proj": (4, 6), "v_proj": (6, 8), "gate_proj": (0, 3), "up_proj": (3, 6)}


def checkpoint() -> dict[str, torch.Tensor]:
    shapes = {
        "a.v_proj.weight": (2, 4), "a.q_proj.weight": (4, 4), "a.k_proj.weight": (2, 4), "a.q_proj.bias": (4,),
        "a.k_proj.bias": (2,), "a.v_proj.bias": (2,), "a.up_proj.weight": (3, 4), "a.gate_proj.weight": (3, 4),
        "a.gate.weight": (3, 4), "a.experts.gate_up_proj": (3, 6, 4), "a.lm_head.weight": (9, 4),
    }  # fmt: skip
    return {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def load(engine: nn.Module, weights) -> None:
    parameters = dict(engine.named_parameters())
    for name, tensor in weights:
        part = name.split(".")[1]
        place = group_name(name).replace("experts.gate_up_proj", "experts.routed_experts.w13_weight")
        start, end = STACKED.get(part, (0, len(tensor)))
        parameters[place].data[start:end] = tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refit_that_arrived_differs_nowhere(dtype):
    """The router's weights in the engine's fp32, and a bias that nobody sent, included."""
    engine = nn.ModuleDict({"a": Layer(dtype)})
    stream = WeightStream(checkpoint().items(), engine)
    engine["a"].gate["e_score_correction_bias"].data.fill_(3.0)
    load(engine, stream)
    assert (stream.differing(), stream.unverified) == ([], [])
    assert engine["a"].gate["weight"].equal(checkpoint()["a.gate.weight"])


def exchange(tensor: torch.Tensor, first: slice, second: slice) -> None:
    tensor[first], tensor[second] = tensor[second].clone(), tensor[first].clone()


FAULTS = {
    "k before q": ("qkv_proj.weight", slice(0, 2), slice(4, 6), {"q_proj.weight", "k_proj.weight"}),
    "up before gate": ("gate_up_proj.weight", slice(0, 3), slice(3, 6), {"gate_proj.weight", "up_proj.weight"}),
    "rows of the head": ("lm_head.weight", slice(1, 2), slice(5, 6), {"lm_head.weight"}),
    "rows within v": ("qkv_proj.bias", slice(6, 7), slice(7, 8), {"v_proj.bias"}),
    "experts": ("experts.routed_experts.w13_weight", slice(0, 1), slice(2, 3), {"experts.gate_up_proj"}),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_lie_wrong_are_named(fault, dtype):
    place, first, second, names = FAULTS[fault]
    engine = nn.ModuleDict({"a": Layer(dtype)})
    stream = WeightStream(checkpoint().items(), engine)
    load(engine, stream)
    exchange(dict(engine["a"].named_parameters())[place].data, first, second)
    assert set(stream.differing()) == {f"a.{name}" for name in names}


def test_router_in_fp32_is_not_rounded_to_the_dtype_of_the_rest():
    engine = nn.ModuleDict({"a": Layer(torch.bfloat16)})
    stream = WeightStream(checkpoint().items(), engine)
    load(engine, stream)
    engine["a"].gate["weight"].data.copy_(engine["a"].gate["weight"].data.bfloat16())
    assert stream.differing() == ["a.gate.weight"]


def test_what_has_no_known_place_is_said_to_be_unverified():
    engine, weights = nn.ModuleDict({"a": Layer(torch.float32)}), checkpoint()
    weights |= {"a.A_log": torch.ones(3), "a.lm_head.weight": torch.ones(11, 4)}
    del weights["a.gate_proj.weight"]
    stream = WeightStream(weights.items(), engine)
    assert [name for name, _ in stream] == list(weights)
    stream.differing()
    assert set(stream.unverified) == {"a.A_log", "a.lm_head.weight", "a.up_proj.weight"}


def test_ids_of_a_reduced_vocabulary_pass_as_they_are():
    engine = nn.ParameterDict(
        {"draft_id_to_target_id": nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)}
    )
    stream = WeightStream({"d2t": torch.tensor([2, 7])}.items(), engine)
    engine["draft_id_to_target_id"].data.copy_(dict(stream)["d2t"])
    assert (stream.differing(), stream.unverified) == ([], [])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_draft_that_is_not_finite_is_refused_by_the_name_of_the_tensor(value):
    weights = {"fc.weight": torch.ones(3, 3), "norm.weight": torch.ones(3), "d2t": torch.tensor([1, 2])}
    check_finite(weights.items())
    weights["fc.weight"][1, 2] = value
    with pytest.raises(RuntimeError, match=r"not finite in 1 tensors: \['fc.weight'\]"):
        check_finite(weights.items())


@torch.no_grad()
def test_fingerprint_changes_with_any_step_and_with_nothing_else():
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 1))
    seen = [fingerprint(model.parameters())]
    model(torch.randn(2, 300))
    assert fingerprint(model.parameters()) == seen[0]
    changes = [
        lambda: torch._foreach_add_(list(model.parameters()), 1e-6),
        lambda: model[0].weight[7, 9].add_(1.0),  # one element, counted by its version
        lambda: model[0].weight.data.mul_(1 + 1e-6),  # no version, but all elements
        lambda: model.load_state_dict({name: tensor + 1e-3 for name, tensor in model.state_dict().items()}),
        lambda: setattr(model[1].weight, "data", torch.zeros(1, 200)),
    ]
    for change in changes:
        change()
        seen.append(fingerprint(model.parameters()))
    assert len(set(seen)) == len(changes) + 1


class Drafter(nn.Module):
    """`fc` of its own and the embeddings of a policy."""

    def __init__(self, policy):
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.embed_tokens = policy.embed_tokens


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([], r"the drafter expects \['fc.weight'\]"),
        (["fc.weight", "norm.weight"], r"the trainer sends \['norm.weight'\] that the engine's drafter does not own"),
        (
            ["fc.weight", "embed_tokens.weight"],
            r"\['embed_tokens.weight'\].*shares \['embed_tokens.weight'\] with the policy",
        ),
    ],
)
def test_names_that_do_not_fit_are_listed(sent, message):
    policy = Policy()
    check_names(Drafter(policy), policy, ["fc.weight"])
    with pytest.raises(RuntimeError, match=message):
        check_names(Drafter(policy), policy, sent)


def test_accept_length_and_rates_of_a_histogram():
    total = Acceptance.total([Acceptance((3, 1, 0, 0)), Acceptance(()), Acceptance((0, 1, 1, 2))])
    assert total.histogram == (3, 2, 1, 2)
    assert total.num_steps == 8
    assert total.accept_length == 1 + (2 * 1 + 1 * 2 + 2 * 3) / 8
    assert total.accept_rates == (5 / 8, 3 / 8, 2 / 8)
    assert total.accept_length == pytest.approx(1 + sum(total.accept_rates))


def test_nothing_drafted_is_an_accept_length_of_one():
    assert Acceptance.total([]).accept_length == 1.0
    assert Acceptance(()).accept_rates == ()
