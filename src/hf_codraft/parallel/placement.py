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
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from hf_codraft.drafts.learner import DraftLearner, DraftStep
from hf_codraft.parallel.pipeline import CurrentForward, LossFunction, Microbatch, PolicyPipeline, check_alike
from hf_codraft.parallel.schedule import schedule_order
from hf_codraft.parallel.simulator import nominal_sinks
from hf_codraft.parallel.stages import PolicyStage
from hf_codraft.policy.anatomy import effective_weight
from hf_codraft.policy.packing import pack_rows
from hf_codraft.taps.channel import TapChannel, TapRoute
from hf_codraft.taps.packed import PolicyWeights
from hf_codraft.taps.protocol import gather_objects
from hf_codraft.taps.recorder import Taps, tap_hooks
from hf_codraft.taps.slots import check_num_slots, place_draft
from hf_codraft.taps.transports.relay import Relay


@dataclass(frozen=True)
class WeightForms:
    """Shapes and dtypes of a rank's part of embeddings and head; made and read by [`PipelineDraft`].

    Args:
        of (`dict[str, tuple[torch.Size, torch.dtype]]`): by `"embedding"`, `"head"` and `"bias"`; only what the rank has.
        is_tied (`bool`): whether these are the tied weight itself, with no adapter around it.
    """

    of: dict[str, tuple[torch.Size, torch.dtype]]
    is_tied: bool


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
        ValueError: on all ranks, if one was given something impossible, too few slots, a draft with other taps, a transport
            that can't work here, or other things than the rest. A rank given something of a wrong type raises what
            came of it, the others name that rank.
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
        self.pipeline, self.placement, self._data_group = pipeline, placement, data_group
        self.final_id = pipeline.plan.num_layers + 1
        self._options = {"transport": transport, "timeout_s": timeout_s, "check_crc": check_crc}
        self._agree(lambda: self._settle(learner, tap_ids, sink_of_microbatch, num_slots))
        self._make_channel(1).choose()  # a transport that can't work here is refused now, not by the first step
        self._own = [m for m, sink in enumerate(self.sinks) if sink == pipeline.pipeline_rank]
        self._set_groups()
        self.channel: TapChannel | None = None
        self._max_numel = 0
        self._weights: PolicyWeights | None = None
        self._step_ids = itertools.count()

    # Setup

    def _agree(self, settle: Callable[[], dict[str, Any]]) -> None:
        """Compares all ranks' settings before any of them could wait for another."""
        settings, forms, problem = {}, WeightForms({}, False), None
        try:
            settings, forms = settle(), self._owned_weights()[1]
        except Exception as error:  # whatever it is, the others wait to hear of it
            problem = error
        everyone = gather_objects((settings, forms, None if problem is None else str(problem)), self.pipeline.group)
        for rank, (*_, text) in enumerate(everyone):
            if text is not None:
                raise problem or ValueError(f"pipeline rank {rank}: {text}")
        check_alike([other for other, *_ in everyone])
        self._forms = [forms for _, forms, _ in everyone]

    def _settle(
        self,
        learner: DraftLearner | None,
        tap_ids: Sequence[int],
        sink_of_microbatch: Sequence[int] | None,
        num_slots: int | None,
    ) -> dict[str, Any]:
        """Sets what follows from the arguments without another rank; returns what must be alike on all."""
        pipeline, plan = self.pipeline, self.pipeline.plan
        last_rank = pipeline.num_ranks - 1
        self.tap_ids = tuple(tap_ids)
        may_run = self.placement == "spread" or pipeline.pipeline_rank == last_rank
        self.learner = learner if may_run else None
        order = schedule_order(pipeline.schedule, pipeline.num_ranks, plan.num_stages, pipeline.num_microbatches)
        if self.placement != "spread":
            self.sinks = [last_rank] * pipeline.num_microbatches
        elif sink_of_microbatch is None:
            self.sinks = nominal_sinks(order, [end - start for start, end in plan.layer_ranges])
        else:
            self.sinks = list(sink_of_microbatch)
        placed = place_draft(order, self.placement, sink_of_microbatch=self.sinks)
        sources = sorted({plan.owner_of_tap(tap_id) for tap_id in (*self.tap_ids, self.final_id)})
        self.num_slots = check_num_slots(num_slots, placed, source_stages=sources, schedule=pipeline.schedule)
        if may_run and learner is None:
            raise ValueError(
                f"learner is None, but this rank may run the draft (placement {self.placement!r}); pass one."
            )
        if self.learner is not None and self.learner.draft.tap_ids != self.tap_ids:
            raise ValueError(
                f"tap_ids ({list(tap_ids)}) differ from the draft's ({list(self.learner.draft.tap_ids)})."
            )
        return self._options | {
            "tap_ids": self.tap_ids,
            "placement": self.placement,
            "sink_of_microbatch": self.sinks,
            "num_slots": num_slots,
        }

    def _set_groups(self) -> None:
        if self.learner is None:
            return
        over = (self.pipeline.group if self.placement == "spread" else None, self._data_group)
        groups = [group for group in over if group is not None]
        self.learner.groups = groups
        for group in groups:
            for tensor in self.learner.draft.state_dict().values():
                dist.broadcast(tensor, group=group, group_src=group.size() - 1)

    def _make_channel(self, numel: int) -> TapChannel:
        """A channel with slots for taps of `numel` elements, not yet open."""
        plan, num_ranks = self.pipeline.plan, self.pipeline.num_ranks
        routes = []
        for tap_id in dict.fromkeys((*self.tap_ids, self.final_id)):
            stage = plan.owner_of_tap(tap_id)
            routes.append(TapRoute(tap_id, stage, stage % num_ranks, numel, self.pipeline.activation_dtype))
        return TapChannel(
            routes, self.sinks, num_slots=self.num_slots, group=self.pipeline.group, device=self.pipeline.device,
            **self._options,
        )  # fmt: skip

    def _open_channel(self, numel: int) -> TapChannel:
        """The open channel; a larger batch than before needs another one."""
        if self.channel is None or numel > self._max_numel:
            self.close()
            channel = self._make_channel(numel)
            channel.setup()
            self.channel = channel
            self._max_numel = numel
        return self.channel

    # The policy's weights that the draft borrows

    def _owned_weights(self) -> tuple[dict[str, torch.Tensor], WeightForms]:
        """What this rank has of embeddings and head, and what the others must know of it to receive it."""
        first, last = self.pipeline.stages[0], self.pipeline.stages[-1]
        owned, is_tied = {}, True
        if first.is_first:
            embeddings = first.anatomy.model.get_input_embeddings()
            owned["embedding"] = effective_weight(embeddings)
            is_tied &= _is_shared(embeddings, first)
        if last.is_last:
            head = last.anatomy.head
            owned["head"] = effective_weight(head)
            is_tied &= _is_shared(head, last)
            if getattr(head, "bias", None) is not None:
                owned["bias"] = head.bias.detach()
        return owned, WeightForms({name: (x.shape, x.dtype) for name, x in owned.items()}, is_tied)

    def _check_weights(self) -> dict[str, torch.Tensor]:
        owned, forms = self._owned_weights()
        if forms != self._forms[self.pipeline.pipeline_rank]:
            raise RuntimeError(
                f"the policy's embeddings or head are no longer what they were when this PipelineDraft was made ({forms}, was "
                f"{self._forms[self.pipeline.pipeline_rank]}); make it after dtypes, sizes and adapters are settled."
            )
        return owned

    def _borrow_weights(self, owned: Mapping[str, torch.Tensor]) -> None:
        """Embeddings and head as they are now, on the ranks that run the draft and on no other. Collective.

        At every step: optimizers, loaded weights and merged adapters leave no common trace by which to tell that nothing
        has changed (torch's version counters miss writes through `.data`).
        """
        pipeline, last_rank = self.pipeline, self.pipeline.num_ranks - 1
        first, last = self._forms[0].of, self._forms[last_rank].of
        head = self._carried(owned.get("head"), last["head"], last_rank)
        if all(forms.is_tied for forms in self._forms):
            embedding = head
        else:
            embedding = self._carried(owned.get("embedding"), first["embedding"], 0)
        bias = self._carried(owned.get("bias"), last.get("bias"), last_rank)
        if self._own:
            assert embedding is not None and head is not None
            anatomy = pipeline.stages[-1].anatomy
            self._weights = PolicyWeights(
                embedding, head, bias, logit_scale=anatomy.logit_scale, logit_softcap=anatomy.logit_softcap
            )

    def _carried(
        self, tensor: torch.Tensor | None, form: tuple[torch.Size, torch.dtype] | None, source: int
    ) -> torch.Tensor | None:
        """`source`'s tensor on that rank and on those that run the draft, None on the others and where there is none."""
        group, rank = self.pipeline.group, self.pipeline.pipeline_rank
        takers = sorted(set(self.sinks) - {source})
        if form is None or rank not in (source, *takers):
            return None
        shape, dtype = form
        tensor = (
            torch.empty(shape, dtype=dtype, device=self.pipeline.device) if tensor is None else tensor.contiguous()
        )
        if len(takers) == self.pipeline.num_ranks - 1:
            dist.broadcast(tensor, group=group, group_src=source)
        elif rank == source:
            # No schedule is under way, so this can't be mistaken for an activation.
            for taker in takers:
                dist.send(tensor, group=group, group_dst=taker)
        else:
            dist.recv(tensor, group=group, group_src=source)
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
        owned: dict[str, torch.Tensor] = {}

        def check() -> None:
            owned.update(self._check_weights())

        def before_schedule() -> Relay | None:
            nonlocal channel, microbatches
            microbatches = self.pipeline.microbatches(batch)
            channel = self._open_channel(microbatches[0].rows["input_ids"].numel() * self.pipeline.hidden_size)
            self._borrow_weights(owned)
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
                    check=check,
                    before_schedule=before_schedule,
                    after_forward=after_forward if is_inside else None,
                    after_schedule=None if is_inside else after_schedule,
                )
            channel.end_step()
        except BaseException as error:
            if channel is not None:
                channel.abort(error)  # whoever waits for a tap of this rank learns why none comes
            raise
        finally:
            self._weights = None  # the next step borrows them anew
        return losses

    def step(self) -> DraftStep:
        """The draft's optimizer step, reported on all ranks; to be called where the policy makes its own.

        Raises:
            Exception: on all ranks (of all replicas), where it failed on one: there its own error, elsewhere a `RuntimeError`
                that names the rank, such as when the loss was not finite three times in a row. Other ranks may have updated
                their replica of the draft already.
        """
        report = failure = text = None
        if self.learner is not None:
            try:
                report = self.learner.step()
            except Exception as error:  # a replica that goes on alone would train another draft
                failure = error
                text = f"pipeline rank {self.pipeline.pipeline_rank}: the draft's step failed: {error}"
        with self.pipeline.peers.naming("the draft's step"):
            outcomes = gather_objects((report, text), self.pipeline.group)
        texts = [text for _, text in outcomes]
        if self._data_group is not None:
            texts += [text for other in gather_objects(texts, self._data_group) for text in other]
        problems = [text for text in texts if text is not None]
        if problems:
            raise failure or RuntimeError(problems[0])
        report = outcomes[-1][0]
        assert report is not None  # the last rank runs every draft
        return report

    def close(self) -> None:
        """Ends the channel; the next step would open another."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def _is_shared(module: nn.Module, stage: PolicyStage) -> bool:
    """Whether a stage's embeddings or head are the tied weight itself, with no adapter around it."""
    return any(parameter is stage.tied_parameter for parameter in module.parameters(recurse=False))
