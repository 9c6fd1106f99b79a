"""Trains, and evaluates, a causal LM that is spread over the ranks of a pipeline.

Legend: B rows, S padded length, H hidden width, V vocabulary.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from hf_codraft.parallel.schedule import ScheduleRunner, StepCalls, StepShape, check_schedule
from hf_codraft.parallel.stages import PolicyStage
from hf_codraft.taps.peers import Peers
from hf_codraft.taps.protocol import tensor_crc
from hf_codraft.taps.transports.relay import Relay

STAGE_INPUTS = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class Microbatch:
    """The rows that go through the stages together; made by [`PolicyPipeline`], read by loss and row functions.

    Args:
        index (`int`): which of the step's microbatches.
        rows (`Mapping[str, torch.Tensor]`): every tensor of the batch, cut to this microbatch's own rows.
    """

    index: int
    rows: Mapping[str, torch.Tensor]

    @property
    def num_rows(self) -> int:
        return len(self.rows["input_ids"])


@dataclass(frozen=True)
class CurrentForward:
    """The forward that runs right now in a training step; made by [`PolicyPipeline`], read by hooks of tapped layers.

    Args:
        stage (`int`): global stage.
        microbatch (`int`): which microbatch.
        num_rows (`int`): rows that count; rows after them fill the microbatch up and belong to nobody.
    """

    stage: int
    microbatch: int
    num_rows: int


LossFunction = Callable[[torch.Tensor, PolicyStage, Microbatch], torch.Tensor]
RowFunction = Callable[[torch.Tensor, PolicyStage, Microbatch], Mapping[str, torch.Tensor]]
ForwardObserver = Callable[[CurrentForward, torch.Tensor], None]


def next_token_loss(
    hidden_BSH: torch.Tensor, stage: PolicyStage, microbatch: Microbatch, *, num_items: int | None = None
) -> torch.Tensor:
    """transformers' causal LM loss of one microbatch.

    Labels are the rows' `labels` (-100 is ignored) or, without them, the unpadded token ids.

    Args:
        hidden_BSH (`torch.Tensor` of shape `(rows, length, hidden)`): final hidden state.
        stage ([`PolicyStage`]): the last stage, which has the head.
        microbatch ([`Microbatch`]): the rows.
        num_items (`int`, *optional*): supervised tokens to divide by, for a mean over all microbatches (transformers'
            `num_items_in_batch`). By default the microbatch's own number.
    """
    labels_BS = microbatch.rows.get("labels")
    if labels_BS is None:
        labels_BS = microbatch.rows["input_ids"]
        if "attention_mask" in microbatch.rows:
            labels_BS = labels_BS.masked_fill(microbatch.rows["attention_mask"] == 0, -100)
    if num_items is None:  # at least 1: a microbatch that supervises nothing has loss 0
        num_items = max(int((labels_BS[:, 1:] != -100).sum()), 1)
    model = stage.anatomy.model
    return model.loss_function(
        stage.logits(hidden_BSH), labels_BS, vocab_size=model.config.vocab_size, num_items_in_batch=num_items
    )


class PolicyPipeline:
    """One replica of a causal LM over the ranks of `group`; all ranks call each method with the same whole batch.

    Only hidden states and their gradients travel between stages: every rank has the token ids and masks. Gradients
    accumulate in the parameters' `grad` as after `loss.backward()`; stepping the optimizer, clipping and the mean over
    data-parallel replicas are the caller's.

    Args:
        stages (`Sequence[PolicyStage]`): this rank's stages; global stage s belongs to pipeline rank `s % P`.
        num_microbatches (`int`): microbatches of every step, at least P.
        group (`dist.ProcessGroup`, *optional*): the P ranks of this replica in order; by default all ranks.
        schedule (`str`): "1F1B", or "Interleaved1F1B" for several stages a rank. Forward-only passes run GPipe.
        activation_dtype (`torch.dtype`, *optional*): of the hidden states between stages; by default the embeddings'.

    Raises:
        ValueError: on all ranks, if a rank's stages, schedule or sizes don't fit the others'.
    """

    def __init__(
        self,
        stages: Sequence[PolicyStage],
        num_microbatches: int,
        *,
        group: dist.ProcessGroup | None = None,
        schedule: str = "1F1B",
        activation_dtype: torch.dtype | None = None,
    ):
        self.group = dist.group.WORLD if group is None else group
        self.pipeline_rank = dist.get_rank(self.group)
        self.num_ranks = self.group.size()
        self.schedule = schedule
        self.num_microbatches = num_microbatches
        self.activation_dtype = self._agree(stages, activation_dtype)
        self.stages = tuple(stages)
        self.plan = self.stages[0].plan
        self.device = next(self.stages[0].parameters()).device
        self.hidden_size = self.stages[0].anatomy.model.config.hidden_size
        self._current: CurrentForward | None = None
        self._failure: str | None = None
        self.peers = Peers(self.group)
        self._runner = ScheduleRunner(
            self.stages,
            self.plan.num_stages,
            schedule=schedule,
            num_microbatches=num_microbatches,
            device=self.device,
            group=self.group,
        )
        self.sync_tied_embeddings()

    @property
    def current_forward(self) -> CurrentForward | None:
        """What a hook is being called for: `None` in forward-only passes, and when checkpointing runs a layer again."""
        return self._current

    @property
    def last_stage(self) -> PolicyStage | None:
        """The stage with the head, on the rank that has it."""
        return self.stages[-1] if self.stages[-1].is_last else None

    # Agreement at construction

    def _check_stages(self, stages: Sequence[PolicyStage]) -> None:
        if not stages:
            raise ValueError(f"pipeline rank {self.pipeline_rank} got no stages.")
        plan = stages[0].plan
        check_schedule(
            self.schedule,
            num_ranks=self.num_ranks,
            num_stages=plan.num_stages,
            num_microbatches=self.num_microbatches,
        )
        own = [stage.stage for stage in stages]
        due = list(range(self.pipeline_rank, plan.num_stages, self.num_ranks))
        if own != due:
            raise ValueError(
                f"stages ({own}) of pipeline rank {self.pipeline_rank} must be {due}: with {plan.num_stages} stages on "
                f"{self.num_ranks} ranks, stage s belongs to rank s % {self.num_ranks}."
            )

    def _own_settings(
        self, stages: Sequence[PolicyStage], activation_dtype: torch.dtype | None
    ) -> tuple[dict[str, Any], torch.dtype | None, list[bool]]:
        """What must be alike on all ranks, the embeddings' dtype on the first, and whether copies of a tied weight learn."""
        self._check_stages(stages)
        stage, config = stages[0], stages[0].anatomy.model.config
        settings = {
            "layer_ranges": stage.plan.layer_ranges,
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "activation_dtype": activation_dtype,
            "hidden_size": config.hidden_size,
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        embedding_dtype = stage.anatomy.model.get_input_embeddings().weight.dtype if stage.is_first else None
        tied = [stage.tied_parameter for stage in stages]
        return settings, embedding_dtype, [parameter.requires_grad for parameter in tied if parameter is not None]

    def _agree(self, stages: Sequence[PolicyStage], activation_dtype: torch.dtype | None) -> torch.dtype:
        """Compares all ranks' settings and returns the dtype of the hidden states between stages."""
        own, failure = None, None
        try:
            own = self._own_settings(stages, activation_dtype)
        except Exception as error:  # whatever it is: the others must hear of it, or they would wait for this rank
            failure = error
        self._raise_together(failure, "its arguments")
        everyone: list = [None] * self.num_ranks
        dist.all_gather_object(everyone, own, group=self.group)
        check_alike([settings for settings, *_ in everyone])
        if len({flag for *_, flags in everyone for flag in flags}) > 1:
            raise ValueError(
                "the tied weight is trainable on one of first and last stage and frozen on the other; set requires_grad "
                "of embed_tokens.weight and lm_head.weight alike."
            )
        return activation_dtype or everyone[0][1]

    def _raise_together(self, failure: Exception | None, what: str) -> None:
        """Raises this rank's failure, or an error that names another rank's; all ranks call."""
        own = None if failure is None else f"{type(failure).__name__}: {failure}"
        problems: list[str | None] = [None] * self.num_ranks
        dist.all_gather_object(problems, own, group=self.group)
        if failure is not None:
            raise failure
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ValueError(f"pipeline rank {rank} refused {what}: {problem}")

    # Tied embeddings

    def _tied(self) -> tuple[torch.nn.Parameter | None, int]:
        """This rank's copy of the tied weight, if it has one, and the pipeline rank of the other copy."""
        for stage in self.stages:
            if stage.tied_parameter is not None:
                return stage.tied_parameter, self.num_ranks - 1 if stage.is_first else 0
        return None, -1

    def sync_tied_embeddings(self) -> None:
        """Copies a tied weight from the first stage to the last; to be called by all ranks after weights were loaded."""
        parameter, peer = self._tied()
        if parameter is None:
            return
        # Between steps the pair of ranks has no other transfer under way that this one could be mistaken for.
        weight = parameter.detach().contiguous()
        if self.pipeline_rank == 0:
            dist.send(weight, group=self.group, group_dst=peer)
        else:
            dist.recv(weight, group=self.group, group_src=peer)
            parameter.detach().copy_(weight)

    def _sum_tied_gradient(self, earlier: torch.Tensor | None) -> None:
        """Gives both copies of a tied weight the sum of this step's two gradients, on top of those of earlier steps."""
        parameter, peer = self._tied()
        if parameter is None or not parameter.requires_grad:
            return
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        other = torch.empty_like(own)
        operations = [
            dist.P2POp(dist.isend, own, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = own + other
        parameter.grad = total if earlier is None else earlier.add_(total)

    # Steps

    def microbatches(self, batch: Mapping[str, torch.Tensor]) -> list[Microbatch]:
        """How a batch is cut: as loss functions will see it."""
        return self._cut(batch)[0]

    def _cut(self, batch: Mapping[str, torch.Tensor]) -> tuple[list[Microbatch], list[dict[str, torch.Tensor]]]:
        """The microbatches, and what goes through the stages: all of one size, the smaller ones filled up.

        A filling row repeats the microbatch's first. Loss functions never see it, so its gradient is zero.
        """
        num_rows = _check_batch(batch, self.num_microbatches)
        base, larger = divmod(num_rows, self.num_microbatches)
        microbatches, inputs, start = [], [], 0
        for index in range(self.num_microbatches):
            size = base + (index < larger)
            rows = {name: tensor[start : start + size] for name, tensor in batch.items()}
            microbatches.append(Microbatch(index, rows))
            fed = {name: rows[name] for name in ("input_ids", *STAGE_INPUTS) if name in rows}
            if larger and size == base:
                fed = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in fed.items()}
            inputs.append(fed)
            start += size
        return microbatches, inputs

    @contextmanager
    def _step(
        self, batch: Mapping[str, torch.Tensor], is_training: bool, check: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """A step that all ranks agree on; after one that failed there is no other, since its transfers may be under way."""
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed ({self._failure}); its transfers may still be under way. Start "
                "again with new process groups."
            )
        with self.peers.naming("a training step" if is_training else "a forward-only pass"):
            self._agree_on_step(batch, is_training, check)
            try:
                yield
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"[:200]
                raise

    def _agree_on_step(
        self, batch: Mapping[str, torch.Tensor], is_training: bool, check: Callable[[], None] | None
    ) -> None:
        """Every rank must be about to run the same step: buffers of another size would be filled without an error."""
        failure, numbers = None, [0] * 5
        try:
            rows = _check_batch(batch, self.num_microbatches)
            if check is not None:
                check()
            numbers = [1, int(is_training), rows, batch["input_ids"].shape[1], _crc(batch)]
        except Exception as error:  # whatever it is: the others must hear of it, or they would wait for this rank
            failure = error
        own = torch.tensor(numbers, device=self.device)
        everyone = [torch.empty_like(own) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, own, group=self.group)
        steps = [tuple(numbers.tolist()) for numbers in everyone]
        if not all(step[0] for step in steps):  # which all ranks see
            self._raise_together(failure, "the step")
        for rank, step in enumerate(steps):
            if step[:-1] != steps[0][:-1]:
                raise ValueError(
                    "all ranks of a pipeline must run the same step; (training, rows, length) are "
                    f"{steps[0][1:-1]} on rank 0 and {step[1:-1]} on rank {rank}."
                )
            if step != steps[0]:
                raise ValueError(
                    f"all ranks of a pipeline must be given the same rows, but {', '.join(('input_ids', *STAGE_INPUTS))} are "
                    f"not on rank {rank} what they are on rank 0. Does a data loader deal every rank a batch of its own?"
                )

    def _run(
        self,
        batch: Mapping[str, torch.Tensor],
        loss: Callable[[torch.Tensor, Microbatch], torch.Tensor] | None,
        observe: Callable[[int, Microbatch, torch.Tensor], None] | None,
        relay: Relay | None = None,
    ) -> list[torch.Tensor]:
        is_training = loss is not None
        microbatches, inputs = self._cut(batch)

        def forward(stage: int, index: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
            if is_training:
                self._current = CurrentForward(stage, index, microbatches[index].num_rows)
            try:
                output = compute()
                if observe is not None:
                    observe(stage, microbatches[index], output)
                return output
            finally:
                self._current = None

        def own_rows(output: torch.Tensor, index: int) -> torch.Tensor:
            num_rows = microbatches[index].num_rows
            return output if num_rows == len(output) else output[:num_rows]

        calls = StepCalls(
            inputs=lambda index: (
                inputs[index]["input_ids"],
                {k: v for k, v in inputs[index].items() if k != "input_ids"},
            ),
            forward=forward,
            loss=None if loss is None else lambda output, index: loss(own_rows(output, index), microbatches[index]),
            relay=relay,
        )
        num_rows, length = inputs[0]["input_ids"].shape
        shape = StepShape(num_rows, length, self.hidden_size, self.activation_dtype, is_training)
        return self._runner.run(shape, calls)

    def train_step(
        self,
        batch: Mapping[str, torch.Tensor],
        loss_function: LossFunction,
        *,
        check: Callable[[], None] | None = None,
        before_schedule: Callable[[], Relay | None] | None = None,
        after_forward: ForwardObserver | None = None,
        after_schedule: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Forward and backward of every microbatch; returns their losses, the same on all ranks.

        What is differentiated is the plain sum of the microbatches' losses: a mean over microbatches is the loss
        function's business.

        Args:
            batch (`Mapping[str, torch.Tensor]`): `input_ids` of shape `(rows, length)`, optionally `attention_mask` and
                `position_ids`, and any tensors with as many rows for the loss function. Rows are dealt out in order; where
                they don't divide evenly, the first microbatches have one more.
            loss_function (callable): `loss_function(hidden_BSH, stage, microbatch)` gives a scalar; called on the last
                stage with its final hidden state. See [`next_token_loss`].
            check (callable, *optional*): called before the ranks agree on the batch; what it raises ends the step on all.
            before_schedule (callable, *optional*): called once all ranks have agreed on the batch, so it may be collective. It
                may return a [`Relay`] of taps for the stages to hand on beside their hidden states.
            after_forward (callable, *optional*): `after_forward(current, output)` inside the schedule, right after each
                stage's forward (on the last stage, before the loss). `output` has filling rows too, see
                [`CurrentForward`].
            after_schedule (callable, *optional*): called when this rank's part of the schedule is done, before any rank
                waits for another again.

        Returns:
            `torch.Tensor` of shape `(num_microbatches,)`: fp32, detached.

        Raises:
            ValueError: on all ranks, for a batch that can't be cut or differs between ranks in what goes through the stages.
            PeerLost: if another rank ended or stands still; says which, where it can be seen from here.
        """

        def loss(hidden_BSH: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
            return loss_function(hidden_BSH, self.last_stage, microbatch)

        observe = None
        if after_forward is not None:

            def observe(stage: int, microbatch: Microbatch, output: torch.Tensor) -> None:
                after_forward(CurrentForward(stage, microbatch.index, microbatch.num_rows), output)

        with self._step(batch, is_training=True, check=check):
            relay = None if before_schedule is None else before_schedule()
            tied, _ = self._tied()
            earlier = None
            if tied is not None:  # the copies' sum must not count what earlier steps have summed already
                earlier, tied.grad = tied.grad, None
            losses = self._run(batch, loss, observe, relay)
            if after_schedule is not None:
                after_schedule()
            self._sum_tied_gradient(earlier)
            return self._share_losses(losses)

    def _share_losses(self, losses: list[torch.Tensor]) -> torch.Tensor:
        if self.last_stage is not None:
            shared = torch.stack([loss.detach().float() for loss in losses])
        else:
            shared = torch.empty(self.num_microbatches, device=self.device)
        dist.broadcast(shared, group=self.group, group_src=self.num_ranks - 1)
        return shared

    @torch.no_grad()
    def forward_only(self, batch: Mapping[str, torch.Tensor], row_function: RowFunction) -> dict[str, torch.Tensor]:
        """Runs the model without gradients and returns what `row_function` makes of it, the same on all ranks.

        Args:
            batch (`Mapping[str, torch.Tensor]`): as for [`train_step`].
            row_function (callable): `row_function(hidden_BSH, stage, microbatch)` gives named tensors with one row for each
                of the microbatch's; called on the last stage.

        Returns:
            `dict[str, torch.Tensor]`: by name, the rows of the whole batch in order.
        """
        parts: list[dict[str, torch.Tensor]] = []

        def observe(stage: int, microbatch: Microbatch, output: torch.Tensor) -> None:
            if stage != self.plan.num_stages - 1:
                return
            made = dict(row_function(output[: microbatch.num_rows], self.last_stage, microbatch))
            for name, tensor in made.items():
                if tensor.ndim == 0 or len(tensor) != microbatch.num_rows:
                    raise ValueError(
                        f"row_function's {name!r} has shape {tuple(tensor.shape)}; it must have one row for each of the "
                        f"microbatch's {microbatch.num_rows}."
                    )
            parts.append(made)

        with self._step(batch, is_training=False):
            self._run(batch, None, observe)
            return self._share_rows(parts)

    def _share_rows(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        joined = {name: torch.cat([part[name] for part in parts]).contiguous() for name in (parts[0] if parts else ())}
        form = [{name: (tensor.shape, tensor.dtype) for name, tensor in joined.items()}]
        source = self.num_ranks - 1
        dist.broadcast_object_list(form, group=self.group, group_src=source)
        for name, (shape, dtype) in form[0].items():
            if name not in joined:
                joined[name] = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(joined[name], group=self.group, group_src=source)
        return joined


def check_alike(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raises a `ValueError` where two ranks of a pipeline were given different things.

    Args:
        settings (`Sequence[Mapping[str, Any]]`): every rank's, by name, gathered so that all ranks raise.
    """
    for rank, other in enumerate(settings):
        for name, value in other.items():
            if value != settings[0][name]:
                raise ValueError(
                    f"{name} differs between pipeline ranks: {settings[0][name]!r} on rank 0, {value!r} on rank {rank}. All "
                    "ranks must be given the same."
                )


def _crc(batch: Mapping[str, torch.Tensor]) -> int:
    """Of what goes through the stages."""
    crc = 0
    for name in ("input_ids", *STAGE_INPUTS):
        if name in batch:
            crc = zlib.crc32(f"{name} {batch[name].dtype} {tensor_crc(batch[name])}".encode(), crc)
    return crc


def _check_batch(batch: Mapping[str, torch.Tensor], num_microbatches: int) -> int:
    """Number of rows of a batch that can be cut.

    Raises:
        ValueError: if tensors don't have the same rows, or there are fewer rows than microbatches.
    """
    input_ids = batch.get("input_ids")
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
        raise ValueError("batch must have input_ids, a tensor of shape (rows, length).")
    num_rows = len(input_ids)
    for name, tensor in batch.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != num_rows:
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(
                f"batch[{name!r}] ({found}) must be a tensor with one row for each of input_ids' {num_rows}; "
                "give the loss function anything else directly, with functools.partial."
            )
    if num_rows < num_microbatches:
        raise ValueError(
            f"batch has {num_rows} rows, which {num_microbatches} microbatches can't share: each needs one. Use a larger "
            f"batch, or num_microbatches={num_rows}."
        )
    return num_rows
