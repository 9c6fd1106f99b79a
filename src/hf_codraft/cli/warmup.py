"""`hf-codraft warmup`: starts a draft on the policy's own rollouts and saves it for later runs (`--draft FOLDER`)."""

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from hf_codraft.cli.grpo import Options, build_trainer, draft_repo_id, load_splits, parse, split_of
from hf_codraft.hub.checkpoint import push_draft, save_draft

if TYPE_CHECKING:
    from hf_codraft.serving.acceptance import Acceptance


def _no_reward(completions: list, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)  # GRPOTrainer wants a reward function, the warm start never asks it


def _check(options: Options) -> None:
    training = options.training
    if options.script.draft is None:
        options.parser.error("draft is none, so there is nothing to warm up; pass 'eagle3', a folder or a Hub id.")
    if training.draft_warmup_rollouts == 0:
        options.parser.error(
            "draft_warmup_rollouts is 0, so the draft would learn nothing; pass --draft_warmup_rollouts with the number "
            "of completions to train it on (a few hundred)."
        )
    if training.push_to_hub and not training.hub_model_id:
        options.parser.error(
            "push_to_hub needs hub_model_id, the policy's repository; the draft's name is made from it."
        )


def measure(trainer: Any) -> "Acceptance":
    """What the engine accepts of the warmed draft on one generation batch of prompts, of the test split if there is one."""
    from hf_codraft.serving.acceptance import Acceptance

    dataset = trainer.train_dataset if trainer.eval_dataset is None else trainer.eval_dataset
    num_rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    prompts = [example["prompt"] for example in islice(iter(dataset), num_rows)]
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    trainer._generate_single_turn(prompt_ids, images, fields, 1)
    return Acceptance.total(gather_object(trainer.vllm_generation.take_rollouts().rows))


def _describe(acceptance: "Acceptance", *, prompts: str) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in acceptance.accept_rates)
    return (
        f"Accept length {acceptance.accept_length:.2f} (accepted by position: {rates}), over {acceptance.num_steps} "
        f"verification steps on {prompts} prompts"
    )


def run(argv: list[str]) -> int:
    """Warms a draft up and saves it to `output_dir/draft`; returns the exit status."""
    options = parse(
        argv, command="warmup", description="The draft's warm start alone: no reward is needed, the policy stays."
    )
    _check(options)
    script, training = options.script, options.training
    try:
        splits = load_splits(options)
        train = split_of(splits, script.dataset_train_split, option="dataset_train_split")
    except (ValueError, ImportError, OSError) as error:
        options.parser.error(str(error))
    test = splits.get(script.dataset_test_split)
    is_pushed, training.push_to_hub = training.push_to_hub, False  # else the trainer makes the policy's repository
    training.eval_strategy, training.reward_weights = "no", None
    trainer = build_trainer(options, [_no_reward], train, test)
    started = time.perf_counter()
    trainer.warm_up_draft()
    folder = f"{training.output_dir}/draft"
    if trainer.accelerator.is_main_process:
        moments = {"learner": trainer.learner.state_dict()}  # a later run goes on with them
        save_draft(trainer.draft, folder, base_model=options.model.model_name_or_path, training_state=moments)
        print(f"Draft: {folder} ({training.draft_warmup_rollouts} rollouts, {time.perf_counter() - started:.0f} s)")
        print(f"Train with it: hf-codraft grpo --draft {folder} --draft_warmup_rollouts 0")
    if training.use_vllm:
        acceptance = measure(trainer)
        trainer.accelerator.print(_describe(acceptance, prompts="training" if test is None else "test"))
    else:
        trainer.accelerator.print("use_vllm is false: nothing speculates, so the accept length was not measured.")
    if is_pushed and trainer.accelerator.is_main_process:
        address = push_draft(
            folder, draft_repo_id(training.hub_model_id), private=training.hub_private_repo, token=training.hub_token
        )
        print(f"Draft pushed: {address}")
    return 0
