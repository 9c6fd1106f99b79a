"""DeepSpeed ZeRO on two CPU ranks: the policy and the draft's gradients are those of one process.

Needs the package deepspeed, which no other test does; `trainer_cases.zero` says how accelerate is brought to it on CPUs.
"""

from functools import partial

import pytest
from trainer_cases import assert_like_one_process, run_all, zero

CASES = {
    "zero1": (partial(zero, 1), {}),
    "zero2, pieces": (partial(zero, 2), dict(gradient_accumulation_steps=2, per_device_train_batch_size=1)),
    "zero3": (partial(zero, 3), {}),
    "zero3, untied, reduced vocabulary": (partial(zero, 3), dict(tie=False, draft_vocab_size=64)),
}


@pytest.fixture(scope="module")
def zeroed(run_ranks, tmp_path_factory):
    pytest.importorskip(
        "deepspeed", reason="deepspeed is not installed: pip install --no-deps deepspeed hjson msgpack"
    )
    return run_ranks(run_all, 2, CASES, tmp_path_factory.mktemp("zero"), timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_zero_gives_the_policy_and_the_draft_gradients_of_one_process(zeroed, tmp_path, name):
    """DeepSpeed's backward steps the policy: with the head of after that step, gradients differ by 0.4 to 2."""
    assert_like_one_process([rank[name] for rank in zeroed], CASES[name][1], tmp_path)
