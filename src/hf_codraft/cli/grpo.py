"""`hf-codraft grpo`: the sibling of `trl grpo` that has a draft.

    hf-codraft grpo --config FILE.yaml --learning_rate 2e-6

On several devices: `accelerate launch -m hf_codraft.cli.main grpo --config FILE.yaml`.
"""

import dataclasses
import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from hf_codraft.config import CoDraftGRPOConfig

FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # suffix: builder of `datasets`
_TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OVERLONG = "get_soft_overlong_punishment"


@dataclass
class CoDraftScriptArguments(GRPOScriptArguments):
    """`trl grpo`'s own arguments and the draft."""

    draft: str | None = field(
        default="eagle3",
        metadata={
            "help": "'eagle3' for a fresh draft, the folder or Hub id of one that exists, or 'none' for plain GRPO."
        },
    )

    def __post_init__(self):
        if self.draft is not None and self.draft.lower() in ("", "none", "null"):
            self.draft = None


_KINDS = (CoDraftScriptArguments, CoDraftGRPOConfig, ModelConfig, DatasetMixtureConfig)


@dataclass(frozen=True)
class Options:
    """What command line and YAML file ask for; made by [`parse`], read by the commands `grpo` and `warmup`.

    Args:
        parser (`TrlParser`): ends the process with a message and status 2 ([`error`]).
        script, training, model, mixture: the dataclasses of `trl grpo`, two of them with the draft's fields.
    """

    parser: TrlParser
    script: CoDraftScriptArguments
    training: CoDraftGRPOConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


def parse(argv: list[str], *, command: str, description: str) -> Options:
    """Reads the options; a mistake in them ends the process with a message and status 2."""
    parser = TrlParser(
        _KINDS,
        prog=f"hf-codraft {command}",
        usage=f"hf-codraft {command} --config FILE.yaml [--option value ...]",
        description=f"{description} Every option can stand in the YAML file under its name; the command line wins.",
    )
    argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    if argv[-1:] == ["--config"]:
        parser.error("--config needs the name of a YAML file.")
    try:
        *parsed, unknown = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))
    if unknown:
        parser.error(_describe_unknown(unknown))
    options = Options(parser, *parsed)
    if options.model.model_name_or_path is None:
        parser.error("model_name_or_path is missing: pass the Hub id or the folder of the policy.")
    return options


def _describe_unknown(unknown: list[str]) -> str:
    known = [f"--{f.name}" for kind in _KINDS for f in dataclasses.fields(kind)]
    names = [arg.split("=")[0] for arg in unknown if arg.startswith("--")]
    if not names:
        return f"unknown arguments: {' '.join(unknown)}."
    lines = []
    for name in names:
        close = difflib.get_close_matches(name.replace("-", "_").replace("__", "--", 1), known, n=1)
        lines.append(f"there is no option {name}" + (f"; did you mean {close[0]}?" if close else "."))
    return " ".join(lines)


def load_splits(options: Options) -> Mapping[str, Any]:
    """The dataset by split, from the Hub, a folder, a file, or the YAML file's mixture (`datasets`).

    Raises:
        ValueError: if none is named, or a file is missing or of a kind that is not read.
    """
    from datasets import Dataset, load_dataset, load_from_disk
    from trl import get_dataset

    script = options.script
    if options.mixture.datasets:
        if script.dataset_name:
            warnings.warn("dataset_name has no effect beside datasets.", stacklevel=2)
        return get_dataset(options.mixture)
    if not script.dataset_name:
        raise ValueError("dataset_name is missing: pass a Hub id, a folder, or a .json, .jsonl or .parquet file.")
    path = Path(script.dataset_name)
    if path.is_file() or path.suffix in FILE_FORMATS:
        files = {script.dataset_train_split: str(path)}
        return load_dataset(_file_format(path), data_files=files, streaming=script.dataset_streaming)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = load_from_disk(path)
        return {script.dataset_train_split: saved} if isinstance(saved, Dataset) else saved
    return load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)


def _file_format(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"dataset_name={str(path)!r}: there is no such file.")
    if path.suffix not in FILE_FORMATS:
        raise ValueError(f"dataset_name={str(path)!r} must end in one of {', '.join(FILE_FORMATS)}, or be a folder.")
    return FILE_FORMATS[path.suffix]


def split_of(splits: Mapping[str, Any], name: str, *, option: str) -> Any:
    if name not in splits:
        raise ValueError(f"{option}={name!r} is not in the dataset, which has {sorted(splits)}.")
    return splits[name]


def load_reward(name: str) -> Callable[..., Any]:
    """A reward function of TRL by its name, or any by its dotted path (the working directory is searched too).

    Raises:
        ValueError: if there is none under this name.
    """
    from trl import rewards

    if name in _TRL_REWARDS:
        return getattr(rewards, name)
    if name == _OVERLONG:  # with the lengths that `trl grpo` gives it
        return rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
    module, _, function = name.rpartition(".")
    if not module:
        raise ValueError(
            f"reward_funcs names {name!r}; allowed are {', '.join((*_TRL_REWARDS, _OVERLONG))}, or a dotted path such "
            "as my_rewards.exact_match."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward_funcs names {name!r}, which could not be imported: {error}") from error


def load_rewards(script: CoDraftScriptArguments) -> list[Any]:
    """The reward model's name, if one is given, and the reward functions."""
    rewards: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    rewards += [load_reward(name) for name in script.reward_funcs or ()]
    if not rewards:
        raise ValueError("reward_funcs is missing: name a reward function, or set reward_model_name_or_path.")
    return rewards


def build_trainer(options: Options, reward_funcs: list[Any], train_dataset: Any, eval_dataset: Any = None) -> Any:
    """The [`CoDraftGRPOTrainer`] that these options describe."""
    from trl import get_peft_config, get_quantization_config

    from hf_codraft.trainer import CoDraftGRPOTrainer

    model, training = options.model, options.training
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    return CoDraftGRPOTrainer(
        model.model_name_or_path,
        reward_funcs,
        training,
        draft=options.script.draft,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )


def draft_repo_id(policy_repo_id: str) -> str:
    """Where the draft of the policy in this Hub repository goes."""
    from hf_codraft.drafts.eagle3 import VLLM_METHOD

    return f"{policy_repo_id}-speculator.{VLLM_METHOD}"


def push(trainer: Any, *, dataset_name: str | None) -> None:
    """Uploads policy and draft, each to a repository of its own."""
    trainer.push_to_hub(dataset_name=dataset_name)
    if trainer.draft is not None and trainer.is_world_process_zero():
        args = trainer.args
        address = trainer.push_draft_to_hub(
            draft_repo_id(trainer.hub_model_id), private=args.hub_private_repo, token=args.hub_token
        )
        print(f"Draft pushed: {address}")


def _resume_from(value: str | bool | None) -> str | bool | None:
    """`resume_from_checkpoint` as the trainer takes it: the command line has only strings."""
    words = {"true": True, "false": None, "none": None}
    return words.get(value.lower(), value) if isinstance(value, str) else value or None


def run(argv: list[str]) -> int:
    """Trains policy and draft, saves both and, if asked, pushes both; returns the exit status."""
    options = parse(
        argv, command="grpo", description="GRPO whose rollouts are drafted by a model that learns beside it."
    )
    script, training = options.script, options.training
    try:
        rewards, splits = load_rewards(script), load_splits(options)
        train = split_of(splits, script.dataset_train_split, option="dataset_train_split")
        test = None
        if training.eval_strategy != "no":
            test = split_of(splits, script.dataset_test_split, option="dataset_test_split")
    except (ValueError, ImportError, OSError) as error:
        options.parser.error(str(error))
    trainer = build_trainer(options, rewards, train, test)
    trainer.train(resume_from_checkpoint=_resume_from(training.resume_from_checkpoint))
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"Policy: {training.output_dir}")
    if trainer.draft is not None:
        trainer.accelerator.print(f"Draft:  {training.output_dir}/draft")
    if training.push_to_hub:
        push(trainer, dataset_name=script.dataset_name)
    return 0
