"""Starts a draft on the policy's own rollouts, before the first step of RL.

Three parts, each with its border: rows that the trainer rolls out ([`roll_out`]), batches of hidden states that its own
forward shows ([`TappedRows`]), and epochs of a learner over these batches ([`learn`]). The first two run on the policy that
the trainer has prepared for training, whatever wraps it: all ranks make the same calls in the same order.
"""

import math
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm
from trl.trainer.utils import pad

from hf_codraft.drafts.learner import DraftLearner, DraftStep, default_learning_rate
from hf_codraft.drafts.replicas import share
from hf_codraft.drafts.vocabulary import select_draft_vocab
from hf_codraft.policy.packing import pack_rows
from hf_codraft.taps.packed import PackedBatch, PolicyWeights

if TYPE_CHECKING:
    from hf_codraft.trainer import CoDraftGRPOTrainer

FEW_STEPS = 30  # a fresh draft of a small policy has learnt the common tokens after about so many


@dataclass(frozen=True)
class Row:
    """One rollout; made by [`roll_out`], read by the rest of the warm start.

    Args:
        prompt_ids, completion_ids (`list[int]`): its tokens.
        is_sampled (`list[int]`): for each token of the completion 1 where the policy sampled it, 0 where a tool or an
            environment wrote it.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    is_sampled: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def warm_up(trainer: "CoDraftGRPOTrainer") -> None:
    """Samples rollouts, chooses the draft's vocabulary from them, and trains the draft on them.

    The vocabulary of a fresh reduced draft is chosen here; one that was trained before keeps its own. Apart from the draft,
    the trainer is afterwards as it was: the run that follows draws the numbers that it would have drawn.

    Args:
        trainer ([`CoDraftGRPOTrainer`]): its policy is prepared for training.

    Raises:
        ValueError: if the dataset has no rows.
    """
    args, was_training = trainer.args, trainer.model.training
    with _put_back(trainer):
        rows = roll_out(trainer, args.draft_warmup_rollouts)
        trainer.num_warmup_tokens = int(_total(trainer, [len(row.completion_ids) for row in rows]))
        trainer.model.eval()
        try:
            if trainer.draft.is_vocab_open:
                choose_vocabulary(trainer, rows)
            batches = TappedRows(trainer, rows)
            num_steps, width = len(batches) * args.draft_warmup_epochs, trainer.draft.config.hidden_size
            peak = args.draft_warmup_learning_rate or default_learning_rate(width, is_warm_start=True)
            with trainer.learner.following(rise_and_fall(num_steps), peak=peak):
                learn(
                    trainer.learner,
                    batches,
                    trainer._policy_weights(),
                    epochs=args.draft_warmup_epochs,
                    seed=args.seed + 1,
                    bar=_bar(trainer, num_steps, "draft"),
                )
        finally:
            trainer.model.train(was_training)


@contextmanager
def _put_back(trainer: "CoDraftGRPOTrainer") -> Iterator[None]:
    """Lends fresh logs and a copy of all random states, and takes them away again."""
    fresh = {
        "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "_pending_extra_logs": defaultdict(list),
        "_pending_metrics": defaultdict(list),
    }
    kept = {name: getattr(trainer, name) for name in fresh}
    num_tokens_seen = trainer.state.num_input_tokens_seen
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            for name, value in fresh.items():
                setattr(trainer, name, value)
            yield
    finally:
        for name, value in kept.items():
            setattr(trainer, name, value)
        trainer.state.num_input_tokens_seen = num_tokens_seen
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _bar(trainer: "CoDraftGRPOTrainer", total: int, what: str) -> tqdm:
    is_hidden = trainer.args.disable_tqdm or not trainer.accelerator.is_local_main_process
    return tqdm(total=total, desc=f"Warm start: {what}", disable=is_hidden)


def _total(trainer: "CoDraftGRPOTrainer", counts: Sequence[int]) -> int:
    return trainer.accelerator.reduce(torch.tensor(sum(counts), device=trainer.accelerator.device)).item()


# Rows that the trainer rolls out


class _RolledOut(Exception):
    """Carries a batch of rollouts out of the trainer, before it would reward them."""


def roll_out(trainer: "CoDraftGRPOTrainer", num_rollouts: int) -> list[Row]:
    """This rank's share of the rollouts, sampled by the trainer as in training: `rollout_func`, environments, tools and all.

    Every rank gets the same number of them; a number that the ranks do not divide is rounded up.

    Raises:
        ValueError: if the dataset has no rows.
    """
    rank, num_ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
    share = -(-num_rollouts // num_ranks)
    examples = _examples(trainer, share * num_ranks)[rank::num_ranks]
    wave = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    rows: list[Row] = []
    with _bar(trainer, len(examples), "rollouts") as bar:
        for start in range(0, len(examples), wave):
            prompt_ids, completion_ids, is_sampled = _roll_out_batch(trainer, examples[start : start + wave])
            is_sampled = is_sampled or [[1] * len(ids) for ids in completion_ids]
            rows += [Row(*parts) for parts in zip(prompt_ids, completion_ids, is_sampled, strict=True)]
            bar.update(len(completion_ids))
    return rows


def _roll_out_batch(trainer: "CoDraftGRPOTrainer", examples: list[dict]) -> tuple[list, list, list | None]:
    """Prompts, completions and tool masks of what the trainer makes of these examples.

    It prepares environments and tools and then calls its `_generate`; whatever comes behind that is for its own step.
    """
    is_own = "_generate" in vars(trainer)
    generate = trainer._generate

    def generate_only(prompts: list) -> None:
        raise _RolledOut(*generate(prompts)[:3])

    trainer._generate = generate_only  # type: ignore[method-assign]
    try:
        trainer._generate_and_score_completions(examples)
    except _RolledOut as rolled_out:
        return rolled_out.args
    finally:
        del trainer._generate
        if is_own:
            trainer._generate = generate  # type: ignore[method-assign]
    raise RuntimeError("GRPOTrainer made a batch without calling _generate; see hf_codraft._compat.SUPPORTED.")


def _examples(trainer: "CoDraftGRPOTrainer", num: int) -> list[dict]:
    """Rows of the training data, the same on all ranks: in random order, or as they stream; anew where they end."""
    dataset = trainer.train_dataset
    examples: list[dict] = []
    generator = random.Random(trainer.args.seed)
    while len(examples) < num:
        before = len(examples)
        if hasattr(dataset, "__len__"):
            order = generator.sample(range(len(dataset)), len(dataset))[: num - before]
            examples += [dataset[index] for index in order]
        else:
            examples += islice(iter(dataset), num - before)
        if len(examples) == before:
            raise ValueError(
                "train_dataset has no rows, so there is nothing to warm the draft up on. Pass a dataset with prompts, or "
                "set draft_warmup_rollouts=0."
            )
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        examples = [{k: v for k, v in row.items() if k in trainer._signature_columns} for row in examples]
    return examples


def choose_vocabulary(trainer: "CoDraftGRPOTrainer", rows: list[Row]) -> None:
    """Sets the draft's vocabulary to what the policy samples most, over all ranks; prompts break ties among the unseen."""
    vocab_size, device = trainer.draft.config.vocab_size, trainer.accelerator.device
    sampled = [i for row in rows for i, is_own in zip(row.completion_ids, row.is_sampled, strict=True) if is_own]
    read = [i for row in rows for i in row.prompt_ids]
    sampled_V, read_V = (
        trainer.accelerator.reduce(
            torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size).to(device)
        )
        .cpu()
        .double()
        for ids in (sampled, read)
    )
    counts_V = sampled_V + read_V / (read_V.sum() + 1)  # all of the prompts weigh less than one sampled token
    kept = select_draft_vocab(
        counts_V, trainer.draft.config.draft_vocab_size, always_keep=tuple(trainer.eos_token_ids)
    )
    trainer.draft.set_vocabulary(kept, trainer._policy_weights())
    share(trainer.draft)


# Batches of hidden states


def tap(trainer: "CoDraftGRPOTrainer", rows: list[Row]) -> PackedBatch:
    """The packed batch of these rows, from the trainer's own forward; all ranks must bring equally many rows."""
    device, at_once = trainer.accelerator.device, trainer.args.per_device_train_batch_size
    tokens = [torch.tensor(row.prompt_ids + row.completion_ids) for row in rows]
    sampled = [torch.tensor([0] * len(row.prompt_ids) + row.is_sampled) for row in rows]
    token_ids = pad(tokens, padding_value=trainer._tokenizer.pad_token_id).to(device)
    attention_mask = pad([torch.ones_like(ids) for ids in tokens], padding_value=0).to(device)
    with torch.no_grad(), trainer._recorder.recording():
        for ids, mask in zip(token_ids.split(at_once), attention_mask.split(at_once), strict=True):
            with trainer.accelerator.autocast():
                # The whole model is called, as FSDP and ZeRO need it; of its logits only the last ones are made.
                trainer.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    return pack_rows(token_ids, attention_mask, pad(sampled, padding_value=0).to(device), trainer._recorder.take())


class TappedRows:
    """The batches of the warm start by number, each of `draft_warmup_batch_size` rows over all ranks.

    With more than one epoch, hidden states are kept on the host, in the dtype that they come in: as many batches as fit
    into `draft_warmup_host_gb` (the same on every rank, since tapping takes all of them); the others are tapped anew.

    Args:
        trainer ([`CoDraftGRPOTrainer`]): taps them.
        rows (`list[Row]`): this rank's rollouts, as many as on each other rank.
    """

    def __init__(self, trainer: "CoDraftGRPOTrainer", rows: list[Row]):
        args, num_ranks = trainer.args, trainer.accelerator.num_processes
        size = -(-args.draft_warmup_batch_size // num_ranks)
        self.pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
        self.trainer = trainer
        self.kept: dict[int, PackedBatch] = {}
        self.num_kept: int | None = 0 if args.draft_warmup_epochs == 1 else None  # of the first; known after a look
        num_steps = len(self.pieces) * args.draft_warmup_epochs
        trainer.accelerator.print(
            f"Warm start: {len(rows) * num_ranks} rollouts ({trainer.num_warmup_tokens} tokens), {size * num_ranks} a step, "
            f"{args.draft_warmup_epochs} epochs: {num_steps} steps of the draft's optimizer."
        )
        if num_steps < FEW_STEPS and trainer.accelerator.is_main_process:
            warnings.warn(
                f"the draft's warm start is {num_steps} optimizer steps; a fresh draft needs some tens before it is accepted. "
                "Raise draft_warmup_rollouts or draft_warmup_epochs, or lower draft_warmup_batch_size (rows a step over all "
                "ranks).",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> PackedBatch:
        device = self.trainer.accelerator.device
        if number in self.kept:
            return self.kept[number].to(device)
        batch = tap(self.trainer, self.pieces[number])
        if self.num_kept is None:
            self.num_kept = self._count_fitting(batch)
        if number < self.num_kept:
            self.kept[number] = batch.to(torch.device("cpu"))
        return batch

    def _count_fitting(self, batch: PackedBatch) -> int:
        """How many batches, from the first on, fit into the host's memory on every rank."""
        trainer, limit = self.trainer, self.trainer.args.draft_warmup_host_gb * 2**30
        token_bytes = sum(x[0].nbytes for x in (batch.token_ids_T, batch.supervised_T, batch.taps_TX, batch.hidden_TH))
        lengths = torch.tensor([sum(map(len, piece)) for piece in self.pieces], device=trainer.accelerator.device)
        longest = trainer.accelerator.gather(lengths).view(-1, len(self)).amax(0)  # over the ranks
        sizes = (longest.cpu() * token_bytes).cumsum(0)
        fitting = int((sizes <= limit).sum())
        taken = sizes[fitting - 1].item() if fitting else 0
        trainer.accelerator.print(
            f"Warm start: hidden states of {fitting} of {len(self)} batches are kept on the host ({taken / 2**30:.2f} of at "
            f"most {trainer.args.draft_warmup_host_gb:g} GiB a rank)"
            + ("." if fitting == len(self) else "; the others are computed anew in every epoch.")
        )
        return fitting


# Epochs of a learner


def rise_and_fall(num_steps: int, num_rising: int = 3) -> Callable[[int], float]:
    """Factor of the learning rate at each step: a short linear rise, then a cosine; 0 at none of the steps."""
    num_rising = min(num_rising, num_steps // 4)

    def factor(step: int) -> float:
        return min((step + 1) / (num_rising + 1), 1.0) * 0.5 * (1 + math.cos(math.pi * step / num_steps))

    return factor


def learn(
    learner: DraftLearner,
    batches: Sequence[PackedBatch] | TappedRows,
    policy: PolicyWeights,
    *,
    epochs: int,
    seed: int,
    bar: Any,
) -> list[DraftStep]:
    """Epochs over the batches, an optimizer step for each of them, in an order that is the same on all ranks.

    Args:
        learner ([`DraftLearner`]): trains the draft.
        batches (`Sequence[PackedBatch]`): this rank's parts of them.
        policy ([`PolicyWeights`]): of the policy that the batches come from.
        epochs (`int`): passes over them.
        seed (`int`): of the order.
        bar (`tqdm`): shows the progress.
    """
    order = random.Random(seed)
    steps = []
    with bar:
        for _ in range(epochs):
            for number in order.sample(range(len(batches)), len(batches)):
                learner.accumulate(batches[number], policy)
                step = learner.step()
                steps.append(step)
                bar.set_postfix(loss=f"{step.loss:.2f}", overlap=f"{step.accept_passes[0]:.2f}")
                bar.update()
    return steps
