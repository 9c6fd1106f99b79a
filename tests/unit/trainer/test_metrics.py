"""Where the seconds of a step go, and that logs are of what they name."""

import time

import pytest
import tiny
from fixed_rollouts import FixedCoDraftGRPOTrainer, codraft
from transformers import TrainerCallback

from hf_codraft.phases import PHASES, PhaseClock

SLOW_S = 0.15
BUSY_S = 0.7  # by which a busy machine may delay a step; an evaluation sleeps longer


def steps(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_phases_add_up_to_the_wall_time_whatever_nests():
    clock = PhaseClock()
    started = time.perf_counter()
    clock.begin()
    with clock.phase("other"):
        time.sleep(0.02)
        with clock.phase("reward"):
            time.sleep(0.04)
        aside = time.perf_counter()
        with clock.aside(), clock.phase("generate"):
            time.sleep(0.3)
        aside = time.perf_counter() - aside
        clock.move("refit", 0.01)
    seconds, wall = clock.read(), time.perf_counter() - started
    assert sum(seconds.values()) >= 0.06 and sum(seconds.values()) == pytest.approx(wall - aside, abs=0.1)
    assert seconds["reward"] >= 0.04 and seconds["refit"] == 0.01 and seconds["generate"] == 0
    clock.begin()
    assert sum(clock.read().values()) < 0.06


def test_phase_that_fails_ends():
    clock = PhaseClock()
    with pytest.raises(KeyError), clock.phase("draft"):
        raise KeyError
    clock.begin()
    time.sleep(0.01)
    assert clock.read()["policy"] >= 0.01 and clock.read()["draft"] == 0


def test_queued_work_counts_to_the_phase_that_queued_it():
    queue: list[float] = []

    def finish() -> None:
        while queue:
            time.sleep(queue.pop())

    clock = PhaseClock(finish)
    clock.begin()
    queue.append(0.5)  # the backward, which returns at once
    with clock.phase("draft"):
        time.sleep(0.01)
        queue.append(0.02)
    seconds = clock.read()
    assert seconds["policy"] >= 0.5
    assert 0.03 <= seconds["draft"] < 0.5


class _Slow(FixedCoDraftGRPOTrainer):
    """Generates, rewards and evaluates slowly; its draft's step and its optimizer are slow too."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        time.sleep(SLOW_S if self.model.training else 8 * SLOW_S)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        with self._clock.phase("reward"):
            time.sleep(SLOW_S)
        return super()._calculate_rewards(*args, **kwargs)

    def _draft_step(self):
        time.sleep(SLOW_S)
        super()._draft_step()


class _Wall(TrainerCallback):
    def __init__(self):
        self.seconds, self.started = [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs):
        time.sleep(SLOW_S)

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.started)


@pytest.mark.parametrize("pieces", [1, 2])
def test_phases_of_a_step_add_up_and_leave_evaluation_out(tmp_path, pieces):
    trainer = codraft(
        tmp_path, trainer=_Slow, max_steps=3, eval_dataset=tiny.prompts(1), eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=4, gradient_accumulation_steps=pieces, per_device_train_batch_size=4 // pieces,
    )  # fmt: skip
    wall = _Wall()
    trainer.add_callback(wall)
    trainer.train()
    for entry, seconds in zip(steps(trainer), wall.seconds, strict=True):
        phases = {phase: entry[f"time/{phase}"] for phase in PHASES}
        assert sum(phases.values()) == pytest.approx(entry["time/step"], abs=1e-6)
        assert entry["time/step"] == pytest.approx(seconds, abs=BUSY_S)
        for phase, times in {"generate": 1, "reward": 1, "draft": pieces, "policy": 1}.items():
            assert SLOW_S * times <= phases[phase] < SLOW_S * times + BUSY_S
        assert phases["refit"] == 0
        # TRL's own is of training_step alone, without the optimizer
        assert SLOW_S * (2 + pieces) <= entry["step_time"] <= entry["time/step"] - SLOW_S
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluations and all(entry["eval_runtime"] > 8 * SLOW_S for entry in evaluations)
