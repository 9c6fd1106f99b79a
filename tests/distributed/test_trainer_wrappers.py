"""Policies that are wrapped and sharded over two ranks learn, and teach their draft, what one process does.

FSDP2 runs for real, on CPU ranks joined by gloo: see `trainer_cases` for how accelerate is brought to it.
"""

import pytest
import tiny
import torch
from trainer_cases import assert_like_one_process, be_rank, build, forget, fsdp, fsdp2, plain, run_all

from hf_codraft.drafts.replicas import check_same

PIECES = dict(gradient_accumulation_steps=2, per_device_train_batch_size=1)

# name: how a rank's policy is wrapped, and the run
WRAPPED = {
    "ddp, 13 rollouts": (plain, dict(draft_warmup_rollouts=13)),
    "ddp, lora, reduced vocabulary, warm start alone": (plain, dict(lora=True, draft_vocab_size=64, alone=True)),
    "fsdp2": (fsdp2, {}),
    "fsdp2, untied, reduced vocabulary, pieces": (fsdp2, dict(tie=False, draft_vocab_size=64, **PIECES)),
    "fsdp2, lora": (fsdp2, dict(lora=True)),
}


@pytest.fixture(scope="module")
def wrapped(run_ranks, tmp_path_factory):
    return run_ranks(run_all, 2, WRAPPED, tmp_path_factory.mktemp("wrapped"), timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_two_ranks_give_the_policy_and_the_draft_gradients_of_one_process(wrapped, tmp_path, name):
    assert_like_one_process([rank[name] for rank in wrapped], WRAPPED[name][1], tmp_path)


@pytest.mark.slow
def test_embeddings_and_head_are_gathered_once_a_step(wrapped):
    """3 steps and once in the warm start (twice where it chooses a vocabulary); tied ones as one."""
    assert wrapped[0]["fsdp2"].kind.startswith("FSDP")
    assert wrapped[0]["fsdp2"].num_gathers == 4
    assert wrapped[0]["fsdp2, untied, reduced vocabulary, pieces"].num_gathers == 2 * 5


# Replicas of the draft


def replicas(rank, folder) -> dict:
    """Only rank 0 has read the policy, as with TRL's shipped FSDP configurations; then one rank's draft is changed."""
    be_rank(rank)
    model = tiny.policy("qwen3", num_hidden_layers=4)
    if rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    adam = dict(optim="adamw_torch", learning_rate=1e-3)
    trainer = build(
        folder, model=model, plugin=fsdp(cpu_ram_efficient_loading=True), save_strategy="steps", save_steps=2, **adam
    )
    initial = {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}
    trainer.train()
    check_same(trainer.draft)
    result = {"initial": initial, "gradients": trainer.gradients}
    with torch.no_grad():
        trainer.draft.norm.weight[3] += 1e-6 * rank
    try:
        check_same(trainer.draft)
    except RuntimeError as error:
        result["error"] = str(error)
    forget()
    alone = build(folder, plugin=fsdp())
    alone.warm_up_draft()
    result["warm"] = {name: tensor.clone() for name, tensor in alone.draft.state_dict().items()}
    try:
        alone.train()
    except RuntimeError as again:
        result["prepared"] = str(again)
    forget()
    resumed = build(folder, plugin=fsdp(), **adam)
    resumed.train(str(folder / "checkpoint-2"))
    result["last step"] = trainer.gradients[-1], resumed.gradients[-1]
    result["weights"] = [
        {n: p.clone() for n, p in each.draft.named_parameters() if n != "norm.weight"} for each in (trainer, resumed)
    ]
    return result


@pytest.fixture(scope="module")
def pair(run_ranks, tmp_path_factory):
    return run_ranks(replicas, 2, tmp_path_factory.mktemp("replicas"), timeout_s=200)


@pytest.mark.slow
def test_draft_is_rank_0s_where_only_rank_0_has_the_policy(pair, tmp_path):
    one = build(tmp_path, optim="adamw_torch", learning_rate=1e-3)
    want = {name: tensor.clone() for name, tensor in one.draft.state_dict().items()}
    one.train()
    forget()
    for rank in pair:
        assert all(torch.equal(rank["initial"][name], tensor) for name, tensor in want.items())
        for ours, theirs in zip(rank["gradients"], one.gradients, strict=True):
            assert all((a - b).norm() <= 3e-3 * b.norm() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_difference_between_ranks_is_an_error_that_names_the_tensor(pair):
    for rank in pair:
        assert "draft of ranks [1] differs from rank 0's in 1 of 13 tensors: ['norm.weight']" in rank["error"]


@pytest.mark.slow
def test_warm_start_alone_on_a_sharded_policy_is_the_one_of_train_and_refuses_to_prepare_it_again(pair, tmp_path):
    one = build(tmp_path)
    one.warm_up_draft()
    forget()
    for rank in pair:
        assert "Call train() alone" in rank["prepared"]
        for name, tensor in one.draft.state_dict().items():
            assert (rank["warm"][name] - tensor).abs().max() <= 2e-3  # one step of Adam where a gradient is rounding
            assert (rank["warm"][name] - tensor).norm() <= 1e-2 * tensor.norm()


@pytest.mark.slow
def test_sharded_run_resumes_with_its_draft(pair):
    for rank in pair:
        whole, resumed = rank["last step"]
        assert all((a - b).norm() <= 1e-4 * b.norm() for a, b in zip(whole, resumed, strict=True))
        for name, tensor in rank["weights"][0].items():
            torch.testing.assert_close(tensor, rank["weights"][1][name], rtol=1e-4, atol=1e-6)
