"""Starts a draft on the policy's own rollouts, before any RL."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from trl.trainer.utils import pad

from hf_codraft.drafts.learner import DraftLearner
from hf_codraft.drafts.vocabulary import select_draft_vocab
from hf_codraft.policy.packing import pack_rows
from hf_codraft.taps.packed import PackedBatch

if TYPE_CHECKING:
    from hf_codraft.trainer import CoDraftGRPOTrainer

Row = tuple[list[int], list[int]]  # prompt and completion ids


def warm_up(trainer: "CoDraftGRPOTrainer") -> None:
    """Samples rollouts, chooses the draft's vocabulary from them, and trains the draft on them.

    The vocabulary of a fresh reduced draft is chosen here; one that was trained before keeps its own.

    Args:
        trainer ([`CoDraftGRPOTrainer`]): lends the policy, the engine, the prompts and the draft.
    """
    was_training = trainer.model.training
    trainer.model.eval()
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):  # the run that follows draws the numbers it would have drawn
            rows = list(_sample(trainer))
            trainer.num_warmup_tokens = sum(gather_object([len(completion) for _, completion in rows]))
            if trainer.draft.is_vocab_open:
                _choose_vocabulary(trainer, rows)
            _train(trainer, rows)
    finally:
        trainer.model.train(was_training)


def _prompts(trainer: "CoDraftGRPOTrainer") -> list:
    """This rank's share of the warm-up's prompts, drawn without replacement as long as the dataset reaches."""
    dataset, num = trainer.train_dataset, trainer.args.draft_warmup_rollouts
    if not hasattr(dataset, "__len__"):
        chosen = [example["prompt"] for example in islice(iter(dataset), num)]
    else:
        order: list[int] = []
        generator = random.Random(trainer.args.seed)
        while len(order) < num:
            order += generator.sample(range(len(dataset)), len(dataset))
        chosen = [dataset[i]["prompt"] for i in order[:num]]
    return chosen[trainer.accelerator.process_index :: trainer.accelerator.num_processes]


def _sample(trainer: "CoDraftGRPOTrainer") -> Iterator[Row]:
    prompts = _prompts(trainer)
    wave = max(trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation, 1)
    bar = tqdm(total=len(prompts), desc="Warm-up: rollouts", disable=not trainer.accelerator.is_local_main_process)
    for start in range(0, len(prompts), wave):
        prompt_ids, images, fields = trainer._tokenize_prompts(prompts[start : start + wave])
        completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, 1)
        yield from zip(prompt_ids, completion_ids, strict=True)
        bar.update(len(prompt_ids))
    bar.close()
    if trainer.use_vllm:
        trainer.vllm_generation.take_rollouts()  # not part of any step's metrics


def _choose_vocabulary(trainer: "CoDraftGRPOTrainer", rows: list[Row]) -> None:
    vocab_size = trainer.draft.config.vocab_size
    counts_V = torch.zeros(vocab_size, dtype=torch.float64)
    for prompt_ids, completion_ids in gather_object(rows):
        counts_V += torch.bincount(torch.tensor(completion_ids), minlength=vocab_size)
        # prompts only break ties among the unseen
        counts_V += torch.bincount(torch.tensor(prompt_ids), minlength=vocab_size) * 1e-3
    kept = select_draft_vocab(
        counts_V, trainer.draft.config.draft_vocab_size, always_keep=tuple(trainer.eos_token_ids)
    )
    trainer.draft.set_vocabulary(kept, trainer.anatomy.weights())


def _tap(trainer: "CoDraftGRPOTrainer", rows: list[Row]) -> PackedBatch:
    """The packed batch of these rows, from one forward of the policy's backbone without its head."""
    device = trainer.accelerator.device
    ids = [torch.tensor(prompt + completion) for prompt, completion in rows]
    sampled = [torch.tensor([0] * len(prompt) + [1] * len(completion)) for prompt, completion in rows]
    token_ids = pad(ids, padding_value=trainer._tokenizer.pad_token_id).to(device)
    attention_mask = pad([torch.ones_like(x) for x in ids], padding_value=0).to(device)
    with torch.no_grad(), trainer.accelerator.autocast(), trainer._recorder.recording():
        trainer.anatomy.decoder(input_ids=token_ids, attention_mask=attention_mask, use_cache=False)
    return pack_rows(token_ids, attention_mask, pad(sampled, padding_value=0).to(device), trainer._recorder.take())


def _train(trainer: "CoDraftGRPOTrainer", rows: list[Row]) -> None:
    """Epochs over the rollouts with a learner of their own, so that GRPO starts with a fresh optimizer and schedule.

    Hidden states are kept between epochs (`4 * hidden` numbers a token); with one epoch none is.
    """
    args, learner = trainer.args, trainer.learner
    size = args.draft_warmup_batch_size
    share = -(-args.draft_warmup_rollouts // trainer.accelerator.num_processes)  # ranks step equally often
    num_batches = -(-share // size)
    warm_learner = DraftLearner(
        trainer.draft,
        num_passes=learner.num_passes,
        learning_rate=args.draft_warmup_learning_rate or args.draft_learning_rate,
        weight_decay=args.draft_weight_decay,
        max_grad_norm=args.draft_max_grad_norm,
        loss_type=learner.loss_type,
        pass_weights=learner.pass_weights,
        temperature=learner.temperature,
        chunk_size=learner.chunk_size,
        scheduler="cosine",
        scheduler_steps=num_batches * args.draft_warmup_epochs,
        warmup_steps=min(3, num_batches),
        autocast=learner.autocast,
    )
    policy = trainer._policy_weights()
    order = random.Random(args.seed + 1)
    order.shuffle(rows)
    pieces = [rows[i * size : (i + 1) * size] for i in range(num_batches)]
    cache: dict[int, PackedBatch] = {}
    bar = tqdm(
        total=num_batches * args.draft_warmup_epochs,
        desc="Warm-up: draft",
        disable=not trainer.accelerator.is_local_main_process,
    )
    for _ in range(args.draft_warmup_epochs):
        for i in order.sample(range(num_batches), num_batches):
            if pieces[i]:
                batch = cache.get(i) or _tap(trainer, pieces[i])
                if args.draft_warmup_epochs > 1:
                    cache[i] = batch
                warm_learner.accumulate(batch, policy)
            step = warm_learner.step()
            bar.set_postfix(loss=f"{step.loss:.2f}", accept=f"{step.accept_passes[0]:.2f}")
            bar.update()
    bar.close()
