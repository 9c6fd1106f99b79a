"""torch's pipeline schedules with static shapes; the one file that touches private fields of that package.

Read against torch 2.13. What is private here: `forward_maybe_with_nosync`, `_user_meta`, `_inference_mode`,
`_prepare_forward_infra`, `_prepare_backward_infra` and the schedules' "initialized" flags: left to itself torch finds shapes
out with an additional real forward, which would fire hooks and call the loss on garbage, and never looks again when the
batch's shape changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining._utils import InferenceMode, _StageMeta, extract_tensor_metas
from torch.distributed.pipelining.schedules import (
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    PipelineScheduleMulti,
    _PipelineSchedule,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from hf_codraft.taps.slots import Action
from hf_codraft.taps.transports.relay import Relay

TRAINING_SCHEDULES = ("1F1B", "Interleaved1F1B")


def check_schedule(name: str, *, num_ranks: int, num_stages: int, num_microbatches: int) -> None:
    """Refuses what torch would run wrongly, or not at all.

    Raises:
        ValueError: naming the argument.
    """
    if name not in TRAINING_SCHEDULES:
        raise ValueError(f"schedule ({name!r}) must be one of {', '.join(TRAINING_SCHEDULES)}.")
    if num_stages % num_ranks:
        raise ValueError(f"num_stages ({num_stages}) must be a multiple of the pipeline's ranks ({num_ranks}).")
    per_rank = num_stages // num_ranks
    if name == "1F1B" and per_rank != 1:
        raise ValueError(
            f"schedule '1F1B' holds one stage a rank; got num_stages ({num_stages}) on {num_ranks} ranks. Use "
            "'Interleaved1F1B' for several, or as many stages as ranks."
        )
    if name == "Interleaved1F1B" and (num_ranks < 2 or per_rank < 2):
        raise ValueError(
            "schedule 'Interleaved1F1B' needs at least two ranks with two stages each; got num_stages "
            f"({num_stages}) on {num_ranks} ranks. Use '1F1B'."
        )
    if num_microbatches < num_ranks:
        raise ValueError(
            f"num_microbatches ({num_microbatches}) must be at least the pipeline's ranks ({num_ranks}) for {name}."
        )
    num_rounds = num_microbatches // num_ranks
    if name == "Interleaved1F1B" and num_microbatches % num_rounds:
        raise ValueError(
            f"num_microbatches ({num_microbatches}) must be a multiple of its {num_rounds} rounds of {num_ranks} ranks for "
            f"Interleaved1F1B; {num_microbatches - num_microbatches % num_ranks} or "
            f"{num_microbatches + -num_microbatches % num_ranks} would do."
        )


class _StageOnPaper(_PipelineStageBase):
    """As much of a stage as a schedule reads to lay out its order; needs no process group."""

    def __init__(self, stage: int, num_stages: int, num_ranks: int):
        self.stage_index = stage
        self.num_stages = num_stages
        self.group_size = num_ranks
        self.group_rank = 0

    def _prepare_forward_infra(self, *args, **kwargs):
        raise NotImplementedError

    def _prepare_backward_infra(self, *args, **kwargs):
        raise NotImplementedError

    def _create_grad_recv_info(self, *args, **kwargs):
        raise NotImplementedError


def schedule_order(name: str, num_ranks: int, num_stages: int, num_microbatches: int) -> Mapping[int, list[Action]]:
    """What each pipeline rank computes, in torch's order for a training step.

    Args:
        name (`str`): "1F1B" or "Interleaved1F1B", or "GPipe" (of forward-only passes; its backward is listed too).
        num_ranks (`int`): ranks of the pipeline.
        num_stages (`int`): stages, virtual ones included; stage s is on rank `s % num_ranks`.
        num_microbatches (`int`): microbatches of a step.

    Returns:
        `Mapping[int, list[Action]]`: by pipeline rank. Idle steps are left out.

    Raises:
        ValueError: if the schedule is not supported, or not with these numbers.
    """
    schedule: _PipelineSchedule
    if name == "GPipe" and num_stages == num_ranks:
        schedule = ScheduleGPipe(_StageOnPaper(0, num_stages, num_ranks), num_microbatches)
    else:
        check_schedule(name, num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches)
        if name == "1F1B":
            return {stage: _order_of_1f1b(stage, num_stages, num_microbatches) for stage in range(num_stages)}
        stages = [_StageOnPaper(stage, num_stages, num_ranks) for stage in range(0, num_stages, num_ranks)]
        schedule = ScheduleInterleaved1F1B(stages, num_microbatches)
    kinds = {FORWARD: "F", FULL_BACKWARD: "B", BACKWARD_WEIGHT: "W"}
    return {
        rank: [
            Action(kinds[action.computation_type], action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None and action.computation_type in kinds
        ]
        for rank, actions in schedule.pipeline_order.items()
    }


def _order_of_1f1b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What `Schedule1F1B` runs. Its `pipeline_order` is off by one on the last stage, which it lets start at microbatch 1."""
    warmup = min(num_microbatches, num_stages - stage)
    order = [Action("F", stage, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches):
        order.append(Action("B", stage, microbatch))
        if warmup + microbatch < num_microbatches:
            order.append(Action("F", stage, warmup + microbatch))
    return order


@dataclass(frozen=True)
class StepShape:
    """Everything that buffers between stages depend on; made by `PolicyPipeline`, equal on all ranks.

    Args:
        num_rows (`int`): rows of a microbatch, filled up.
        length (`int`): tokens of a row.
        hidden_size (`int`): width of the residual stream.
        dtype (`torch.dtype`): of the residual stream.
        is_training (`bool`): whether a backward follows.
    """

    num_rows: int
    length: int
    hidden_size: int
    dtype: torch.dtype
    is_training: bool

    @property
    def hidden(self) -> tuple[int, int, int]:
        return self.num_rows, self.length, self.hidden_size


@dataclass(frozen=True)
class StepCalls:
    """What a step computes with; made by `PolicyPipeline` for one step, read by [`ScheduleRunner`].

    Args:
        inputs (callable): `inputs(microbatch)` gives the token ids and the keyword arguments of a stage's forward.
        forward (callable): `forward(stage, microbatch, compute)` calls `compute()` for the stage's output and returns it.
        loss (callable, *optional*): `loss(output, microbatch)`, on the last stage; `None` in forward-only passes.
        relay ([`Relay`], *optional*): taps that ride behind the hidden states.
    """

    inputs: Callable[[int], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    forward: Callable[[int, int, Callable[[], torch.Tensor]], torch.Tensor]
    loss: Callable[[torch.Tensor, int], torch.Tensor] | None
    relay: Relay | None = None


class _Stage(PipelineStage):
    """Takes its inputs from the runner, and lets errors out as they were raised."""

    def __init__(
        self,
        runner: "ScheduleRunner",
        module: nn.Module,
        stage: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ):
        super().__init__(module, stage, num_stages, device, group=group)
        self._runner = runner

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        return self._runner.forward(self.stage_index, fwd_chunk_id, super().forward_one_chunk)

    def forward_maybe_with_nosync(self, hidden, *received, **kwargs):
        output = super().forward_maybe_with_nosync(hidden, **kwargs)
        behind = self._runner.pass_on(self.stage_index, received)
        return (output, *behind) if behind else output

    def backward_one_chunk(self, *args, **kwargs):
        try:
            return super().backward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            raise _cause(error, "Failed to run stage backward") from None


class ScheduleRunner:
    """Runs steps of one schedule over this rank's stages.

    Args:
        modules (`Sequence[nn.Module]`): this rank's stages in order; global stage s is on rank `s % num_ranks`.
        num_stages (`int`): of the whole pipeline.
        schedule (`str`): training schedule; forward-only passes run GPipe, or its looped form for several stages a rank.
        num_microbatches (`int`): of every step.
        device (`torch.device`): where buffers live.
        group (`dist.ProcessGroup`): the pipeline's ranks in order.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        num_stages: int,
        *,
        schedule: str,
        num_microbatches: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ):
        num_ranks, pipeline_rank = group.size(), dist.get_rank(group)
        self._num_stages = num_stages
        self._num_microbatches = num_microbatches
        self._shape: StepShape | None = None
        self._calls: StepCalls | None = None
        self._microbatch: int | None = None  # of the forward under way
        self._stages = [
            _Stage(self, module, pipeline_rank + local * num_ranks, num_stages, device, group)
            for local, module in enumerate(modules)
        ]
        self._training = self._schedule(
            {"1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}[schedule], self._loss
        )
        self._forward_only = self._schedule(ScheduleGPipe if len(modules) == 1 else ScheduleLoopedBFS, None)

    def _schedule(self, kind: type, loss: Callable | None) -> _PipelineSchedule:
        is_multi = issubclass(kind, PipelineScheduleMulti)
        stages = self._stages if is_multi else self._stages[0]
        # Scaling would divide what earlier steps have accumulated too.
        return kind(stages, n_microbatches=self._num_microbatches, loss_fn=loss, scale_grads=False)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert self._calls is not None and self._calls.loss is not None
        return self._calls.loss(output, int(target))

    def forward(self, stage: int, microbatch: int, original: Callable[..., torch.Tensor]) -> torch.Tensor:
        """One stage's forward with the step's own inputs; `original` is torch's."""
        assert self._calls is not None
        input_ids, keywords = self._calls.inputs(microbatch)

        def compute() -> torch.Tensor:
            try:
                output = original(microbatch, (input_ids,), keywords, save_forward_output=False)
            except RuntimeError as error:
                raise _cause(error, "failed to run forward") from None
            finally:
                self._microbatch = None
            sent = output if isinstance(output, tuple) else (output,)
            for tensor in sent:
                self._check_output(stage, tensor)
            return sent[0]

        self._microbatch = microbatch
        return self._calls.forward(stage, microbatch, compute)

    def pass_on(self, stage: int, received: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What goes behind the hidden state that a stage has just computed; `received` came behind the one before."""
        assert self._calls is not None and self._microbatch is not None
        relay = self._calls.relay
        return () if relay is None else relay.pass_on(stage, self._microbatch, received)

    def _check_output(self, stage: int, output: torch.Tensor) -> None:
        """The receiver's buffer has a fixed shape and type; bytes of another would arrive as garbage, without an error."""
        assert self._shape is not None
        expected, dtype = self._shape.hidden, self._shape.dtype
        if stage == self._num_stages - 1 or (output.dtype == dtype and output.shape == expected):
            return
        advice = "" if output.dtype == dtype else f" Pass activation_dtype={output.dtype} if that is meant."
        raise ValueError(
            f"stage {stage} returned {tuple(output.shape)} of {output.dtype}; the next stage expects {expected} of "
            f"{dtype}.{advice}"
        )

    def _set_shape(self, shape: StepShape, relay: Relay | None) -> None:
        """Gives torch the shapes of a step, and the step receive buffers of its own.

        torch would hand the same tensors to the model in every step, with the hooks that the model had set on them, and
        overwrite what hooks had kept.
        """
        num_relayed = [0 if relay is None else relay.num_into(stage) for stage in range(self._num_stages)]
        hidden = torch.empty(*shape.hidden, dtype=shape.dtype, device="meta", requires_grad=shape.is_training)
        tokens = torch.empty(shape.num_rows, shape.length, dtype=torch.long, device="meta")

        def into(stage: int) -> tuple | None:
            return extract_tensor_metas((hidden, *[hidden.detach()] * num_relayed[stage]))

        for stage in self._stages:
            inputs = extract_tensor_metas((tokens,)) if stage.is_first else into(stage.stage_index)
            outputs = extract_tensor_metas((hidden,)) if stage.is_last else into(stage.stage_index + 1)
            stage._user_meta = _StageMeta(inputs=inputs, outputs=outputs)
            stage._inference_mode = InferenceMode.STATIC
            stage.has_backward = shape.is_training
            stage.args_recv_info.clear()
            stage.grad_recv_info.clear()
            stage.grad_send_info = None
            stage._prepare_forward_infra(self._num_microbatches, None, None, has_backward=shape.is_training)
            if shape.is_training:
                stage._prepare_backward_infra(self._num_microbatches)
        for schedule in (self._training, self._forward_only):
            prefix = "_stages" if isinstance(schedule, PipelineScheduleMulti) else "_stage"
            setattr(schedule, f"{prefix}_forward_initialized", True)
            setattr(schedule, f"{prefix}_backward_initialized", schedule is self._training)
        self._shape = shape

    def run(self, shape: StepShape, calls: StepCalls) -> list[torch.Tensor]:
        """Runs one step and returns the losses by microbatch, on the last stage's rank; elsewhere, or forward-only, none."""
        self._set_shape(shape, calls.relay)
        schedule = self._training if shape.is_training else self._forward_only
        # Stage inputs come from `calls`, so torch gets nothing to cut but the microbatches' numbers for the loss.
        target = torch.arange(self._num_microbatches) if shape.is_training else None
        losses: list[torch.Tensor] | None = [] if shape.is_training else None
        self._calls = calls
        try:
            schedule.step(target=target, losses=losses, return_outputs=False)
            return losses or []
        finally:
            self._calls = None
            for stage in self._stages:  # outputs of all microbatches would otherwise live until the next step
                stage.clear_runtime_states()


def _cause(error: RuntimeError, wrapper: str) -> BaseException:
    """What really happened, where torch has wrapped it into a message of its own."""
    return error.__cause__ if wrapper in str(error) and error.__cause__ is not None else error
