"""Trains a draft beside a pipeline: where its work runs, and how the taps get there.

The published way runs the draft on the last stage inside the schedule, and every other stage waits for it. Two others
leave the schedule alone:

    last_inside      stage 3   F D F D B F D B ...           D on the critical path of every microbatch
    last_deferred    stage 3   F B F B ... B | D D D D       while earlier stages drain
    spread           stage s   ... B | D                     on all ranks, more where they are idle first; gradients summed

All leave the policy's gradients as they are without a draft, bit for bit, and give the draft the same gradient.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import distributed as dist

from hf_codraft.drafts.learner import DraftLearner, DraftStep
from hf_codraft.parallel.pipeline import CurrentForward, LossFunction, Microbatch, PolicyPipeline, check_alike
from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.parallel.simulator import nominal_sinks
from hf_codraft.policy.anatomy import effective_weight
from hf_codraft.policy.packing import pack_rows
from hf_codraft.taps.channel import TapChannel, TapRoute
from hf_codraft.taps.packed import PolicyWeights
from hf_codraft.taps.recorder import Taps, tap_hooks
from hf_codraft.taps.slots import Order, check_num_slots, place_draft
from hf_codraft.taps.transports.relay import Relay


class PipelineDraft:
    """A draft that learns from the taps of a [`PolicyPipeline`]. Every rank of the pipeline makes one, alike.

    Args:
        pipeline ([`PolicyPipeline`]): the policy.
        learner ([`DraftLearner`], *optional*): trains this rank's replica of the draft; needed on the ranks that may run the
            draft (all for `"spread"`, else the last one), ignored on the others. Its `groups` are set here, and its
            draft's weights made equal to those of the last such rank.
        tap_ids (`Sequence[int]`): the draft's, known on all ranks.
        placement (`str`): see the drawing above.
        sink_of_microbatch (`Sequence[int]`, *optional*): of `"spread"`, the pipeline rank by microbatch, such as m mod P or
            `simulator.balanced_sinks` of measured times; by default `simulator.nominal_sinks`.
        data_group (`dist.ProcessGroup`, *optional*): the ranks that hold this rank's place in the policy's replicas.
        transport, timeout_s, check_crc: see [`TapChannel`].
        num_slots (`int`, *optional*): see [`check_num_slots`].

    Raises:
        ValueError: on all ranks, if one was given something impossible, too few slots, a draft with other taps, or other
            things than the rest.
    """

    def __init__(
        self,
        pipeline: PolicyPipeline,
        learner: DraftLearner | None,
        *,
        tap_ids: Sequence[int],
        placement: str = "spread",
        sink_of_microbatch: Sequence[int] | None = None,
        data_group: dist.ProcessGroup | None = None,
        transport: str = "auto",
        num_slots: int | None = None,
        timeout_s: float = 60.0,
        check_crc: bool = False,
    ):
        self.pipeline, self.placement = pipeline, placement
        self.tap_ids = tuple(tap_ids)
        self.final_id = pipeline.plan.num_layers + 1
        last_rank = pipeline.num_ranks - 1
        may_run = placement == "spread" or pipeline.pipeline_rank == last_rank
        self.learner = learner if may_run else None
        order = schedule_order(
            pipeline.schedule, pipeline.num_ranks, pipeline.plan.num_stages, pipeline.num_microbatches
        )
        if placement != "spread":
            self.sinks = [last_rank] * pipeline.num_microbatches
        elif sink_of_microbatch is None:
            self.sinks = nominal_sinks(order, [end - start for start, end in pipeline.plan.layer_ranges])
        else:
            self.sinks = list(sink_of_microbatch)
        self._own = [m for m, sink in enumerate(self.sinks) if sink == pipeline.pipeline_rank]
        self.num_slots = self._agree(num_slots, order, transport, may_run)
        self._options = {"transport": transport, "timeout_s": timeout_s, "check_crc": check_crc}
        self._set_groups(data_group)
        self.channel: TapChannel | None = None
        self._max_numel = 0
        self._weights: PolicyWeights | None = None
        self._is_stale = True
        self._step_ids = itertools.count()

    # Setup

    def _agree(self, num_slots: int | None, order: Order, transport: str, may_run: bool) -> int:
        """Compares all ranks' settings before any of them could wait for another; returns the number of slots."""
        settings = {
            "tap_ids": self.tap_ids,
            "placement": self.placement,
            "sink_of_microbatch": self.sinks,
            "num_slots": num_slots,
        }
        everyone: list = [None] * self.pipeline.num_ranks
        checked_slots, problem = 0, None
        try:
            checked_slots = self._checked_slots(num_slots, order)
        except ValueError as error:
            problem = str(error)
        problem = problem or self._own_problem(transport, may_run)
        dist.all_gather_object(everyone, (settings, problem), group=self.pipeline.group)
        check_alike([other for other, _ in everyone])
        problems = [(rank, each) for rank, (_, each) in enumerate(everyone) if each is not None]
        if problems:
            raise ValueError(problem or f"pipeline rank {problems[0][0]}: {problems[0][1]}")
        return checked_slots

    def _own_problem(self, transport: str, may_run: bool) -> str | None:
        if transport == "relay" and self.placement == "spread":
            return (
                "transport='relay' carries taps to the last stage alone, and placement 'spread' needs them everywhere; use "
                "transport 'auto', or placement 'last_deferred'."
            )
        if may_run and self.learner is None:
            return f"learner is None, but this rank may run the draft (placement {self.placement!r}); pass one."
        if self.learner is not None and self.learner.draft.tap_ids != self.tap_ids:
            return f"tap_ids ({list(self.tap_ids)}) differ from the draft's ({list(self.learner.draft.tap_ids)})."
        return None

    def _checked_slots(self, num_slots: int | None, order: Order) -> int:
        pipeline, plan = self.pipeline, self.pipeline.plan
        placed = place_draft(order, self.placement, sink_of_microbatch=self.sinks)
        sources = sorted({plan.owner_of_tap(tap_id) for tap_id in (*self.tap_ids, self.final_id)})
        return check_num_slots(num_slots, placed, source_stages=sources, schedule=pipeline.schedule)

    def _set_groups(self, data_group: dist.ProcessGroup | None) -> None:
        if self.learner is None:
            return
        over = (self.pipeline.group if self.placement == "spread" else None, data_group)
        groups = [group for group in over if group is not None]
        self.learner.groups = groups
        for group in groups:
            for tensor in self.learner.draft.state_dict().values():
                dist.broadcast(tensor, group=group, group_src=group.size() - 1)

    def _open_channel(self, numel: int) -> TapChannel:
        """The channel, with slots for taps of `numel` elements; a larger batch than before needs another one."""
        if self.channel is not None and numel <= self._max_numel:
            return self.channel
        self.close()
        plan, num_ranks = self.pipeline.plan, self.pipeline.num_ranks
        routes = []
        for tap_id in dict.fromkeys((*self.tap_ids, self.final_id)):
            stage = plan.owner_of_tap(tap_id)
            routes.append(TapRoute(tap_id, stage, stage % num_ranks, numel, self.pipeline.activation_dtype))
        self.channel = TapChannel(
            routes, self.sinks, num_slots=self.num_slots, group=self.pipeline.group, device=self.pipeline.device,
            **self._options,
        )  # fmt: skip
        self.channel.setup()
        self._max_numel = numel
        return self.channel

    # The policy's weights that the draft borrows

    def _refresh_weights(self) -> None:
        """Embeddings and head of this version of the policy, on every rank that runs the draft. Collective."""
        pipeline = self.pipeline
        first, last = pipeline.stages[0], pipeline.stages[-1]
        embedding = effective_weight(first.anatomy.model.get_input_embeddings()) if first.is_first else None
        head = bias = None
        anatomy = last.anatomy
        if last.is_last:
            head, bias = effective_weight(anatomy.head), getattr(anatomy.head, "bias", None)
        embedding = self._shared(embedding, 0)
        # An adapter may change one of two tied weights.
        is_tied = anatomy.model.config.tie_word_embeddings and not hasattr(last.model, "peft_config")
        head = embedding if is_tied else self._shared(head, pipeline.num_ranks - 1)
        bias = self._shared(None if bias is None else bias.detach(), pipeline.num_ranks - 1)
        if self._own:
            assert embedding is not None and head is not None
            self._weights = PolicyWeights(
                embedding, head, bias, logit_scale=anatomy.logit_scale, logit_softcap=anatomy.logit_softcap
            )

    def _shared(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor | None:
        """`source`'s tensor on all ranks of the pipeline, None if it has none."""
        form = [None if tensor is None else (tensor.shape, tensor.dtype)]
        dist.broadcast_object_list(form, group=self.pipeline.group, group_src=source)
        if form[0] is None:
            return None
        shape, dtype = form[0]
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.pipeline.device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, group=self.pipeline.group, group_src=source)
        return tensor

    # Steps

    @contextmanager
    def _hooks(self, publish: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """Hands every hidden state of this rank's tapped layers to `publish`."""
        plan = self.pipeline.plan
        with ExitStack() as stack:
            for stage in self.pipeline.stages:
                own = [tap for tap in (*self.tap_ids, self.final_id) if plan.owner_of_tap(tap) == stage.stage]
                decoder = stage.anatomy.decoder
                stack.enter_context(tap_hooks(decoder.layers, decoder.norm, own, publish))
            yield

    def _learn(self, channel: TapChannel, microbatch: Microbatch) -> None:
        taps = channel.collect(microbatch.index)
        rows, num_rows = microbatch.rows, microbatch.num_rows
        attention_mask = rows.get("attention_mask")
        if attention_mask is None:
            attention_mask = torch.ones_like(rows["input_ids"])
        states = tuple(taps[tap_id][:num_rows] for tap_id in self.tap_ids)
        batch = pack_rows(
            rows["input_ids"],
            attention_mask,
            rows.get("supervised", attention_mask),
            Taps(states, taps[self.final_id][:num_rows]),
        )
        del taps, states
        channel.release(microbatch.index)  # packing has copied what it needs
        assert self.learner is not None and self._weights is not None
        self.learner.accumulate(batch, self._weights)

    def train_step(self, batch: Mapping[str, torch.Tensor], loss_function: LossFunction) -> torch.Tensor:
        """The policy's [`PolicyPipeline.train_step`], and the draft's loss and gradient on the same forward.

        Args:
            batch (`Mapping[str, torch.Tensor]`): the pipeline's, and optionally `supervised` of shape `(rows, length)`: nonzero
                where the draft may learn the token; every token that is not padding by default.
            loss_function (callable): the policy's.

        Returns:
            `torch.Tensor` of shape `(num_microbatches,)`: the policy's losses.
        """
        last_stage = self.pipeline.plan.num_stages - 1
        channel: TapChannel | None = None  # of this step, once it has begun
        microbatches: list[Microbatch] = []

        def before_schedule() -> Relay | None:
            nonlocal channel, microbatches
            microbatches = self.pipeline.microbatches(batch)
            channel = self._open_channel(microbatches[0].rows["input_ids"].numel() * self.pipeline.hidden_size)
            if self._is_stale:
                self._refresh_weights()
                self._is_stale = False
            channel.begin_step(next(self._step_ids), len(microbatches))
            return channel.relay()

        def publish(tap_id: int, tensor: torch.Tensor) -> None:
            current = self.pipeline.current_forward
            if current is not None:  # not when checkpointing runs a layer again
                channel.publish(current.microbatch, tap_id, tensor)

        def after_forward(current: CurrentForward, output: torch.Tensor) -> None:
            if current.stage == last_stage:
                self._learn(channel, microbatches[current.microbatch])

        def after_schedule() -> None:
            for index in self._own:
                self._learn(channel, microbatches[index])

        is_inside = self.placement == "last_inside"
        try:
            with self._hooks(publish):
                losses = self.pipeline.train_step(
                    batch,
                    loss_function,
                    before_schedule=before_schedule,
                    after_forward=after_forward if is_inside else None,
                    after_schedule=None if is_inside else after_schedule,
                )
            channel.end_step()
        except BaseException as error:
            if channel is not None:
                channel.abort(error)  # whoever waits for a tap of this rank learns why none comes
            raise
        return losses

    def step(self) -> DraftStep:
        """The draft's optimizer step, reported on all ranks; to be called where the policy makes its own.

        Raises:
            RuntimeError: on all ranks, when the loss was not finite three times in a row.
        """
        self._is_stale = True
        report = failure = None
        if self.learner is not None:
            try:
                report = self.learner.step()
            except RuntimeError as error:  # ranks without a learner must hear of it
                failure = error
        outcome = [(report, None if failure is None else str(failure))]
        with self.pipeline.peers.naming("the draft's step"):
            dist.broadcast_object_list(outcome, group=self.pipeline.group, group_src=self.pipeline.num_ranks - 1)
        report, problem = outcome[0]
        if problem is not None:
            raise failure or RuntimeError(problem)
        assert report is not None
        return report

    def close(self) -> None:
        """Ends the channel; the next step would open another."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
