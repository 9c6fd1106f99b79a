"""Drafts measured side by side on the rollouts of one run: a co-trained one against its own control."""

import copy
from typing import TYPE_CHECKING, Any

import torch

from hf_codraft.drafts.expected import ExpectedAcceptance
from hf_codraft.taps.packed import PackedBatch, PolicyWeights

if TYPE_CHECKING:
    from hf_codraft.drafts.eagle3 import Eagle3Draft
    from hf_codraft.trainer import CoDraftGRPOTrainer


class SideBySide:
    """Measures the trainer's draft and others on every window's rows, before any of them is trained on these.

    All see the same policy and the same completions, so they are compared row by row, and the others need no run of their own
    (see `drafts.expected`). What this takes is no part of the trainer's times.

    Args:
        trainer ([`CoDraftGRPOTrainer`]): watched from now on.
        others (`dict[str, Eagle3Draft]`): the drafts to compare with.
    """

    def __init__(self, trainer: "CoDraftGRPOTrainer", others: dict[str, "Eagle3Draft"]):
        self.trainer = trainer
        assert trainer.draft is not None
        self.drafts: dict[str, Eagle3Draft] = {"cotrained": trainer.draft, **others}
        self.steps: list[dict[str, ExpectedAcceptance]] = []
        trainer.draft_updates.listeners.append(self)

    @classmethod
    def with_frozen_copy(cls, trainer: "CoDraftGRPOTrainer") -> "SideBySide":
        """Against the trainer's draft as it is now."""
        frozen = copy.deepcopy(trainer.draft)
        assert frozen is not None
        return cls(trainer, {"frozen": frozen})

    def __call__(self, rows: list[PackedBatch], policy: PolicyWeights) -> None:
        updates, learner = self.trainer.draft_updates, self.trainer.learner
        batch = PackedBatch.join(rows).to(policy.head_VH.device)
        settings: dict[str, Any] = dict(
            num_passes=learner.num_passes, temperature=learner.temperature, is_greedy=updates.is_greedy
        )
        settings["log_p_T"] = learner.sampled_log_probs(batch, policy)
        with learner.autocast():
            measured = {
                name: draft.expected_acceptance(batch, policy, **settings) for name, draft in self.drafts.items()
            }
        self.steps.append(measured)


def expected_from(saved: dict[str, list[float]]) -> ExpectedAcceptance:
    """Of the lists `steps` and `tokens` that a run has written."""
    return ExpectedAcceptance(
        torch.tensor(saved["steps"], dtype=torch.float64),
        torch.tensor(saved["tokens"], dtype=torch.float64),
        torch.zeros(0),
    )


def ratio_interval(
    ours: list[ExpectedAcceptance], theirs: list[ExpectedAcceptance], *, confidence: float = 0.95, draws: int = 2000
) -> tuple[float, float, float]:
    """Accept length of one draft over another's on the same rows, with a bootstrap interval over rows: (ratio, low, high).

    Rows are drawn in pairs, so what makes a row easy for both cancels.

    Args:
        ours, theirs (`list[ExpectedAcceptance]`): of the same rows, step by step.
        confidence (`float`): of the interval.
        draws (`int`): resamples.
    """
    steps = torch.stack([torch.cat([step.steps_S for step in side]) for side in (ours, theirs)])
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(steps.shape[1], (draws, steps.shape[1]), generator=generator)
    sums = steps[:, index].sum(-1)
    ratios = (sums[1] / sums[0]).sort().values  # the tokens are the same, so they cancel
    tail = (1 - confidence) / 2
    low, high = (ratios[round(q * (draws - 1))].item() for q in (tail, 1 - tail))
    return (steps[1].sum() / steps[0].sum()).item(), low, high
