"""The demo's task: sheets of small sums and products from `reasoning-gym`, checked line by line.

A 135M model gets some lines right and some wrong, so GRPO has something to learn from, and a sheet is graded by its share
of right lines, so that almost no group of completions has one reward for all.
"""

import random
from functools import cache

from datasets import Dataset

from hf_codraft._optional import require

LINES = 4
SYSTEM = "Solve each line."
EXAMPLE = (("3 * 2", "6"), ("9 - 4", "5"))
MAX_COMPLETION_LENGTH = 40
TEMPERATURE = 0.7  # at 1.0 the model strays from the sheet in most completions, and rewards are nearly all 0


@cache
def _problems() -> list[tuple[str, str, str]]:
    """(generator's name, expression, answer) of every small problem."""
    gym = require("reasoning_gym", extra="demo")
    products = gym.create_dataset("products", seed=1, size=400, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    sums = gym.create_dataset("chain_sum", seed=1, size=400, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    return [
        (name, item["metadata"]["expression"], item["answer"])
        for name, dataset in (("products", products), ("chain_sum", sums))
        for item in dataset
    ]


def sheets(num: int, *, seed: int) -> Dataset:
    """`num` prompts of four lines each; sheets of different seeds are different draws of the same problems.

    Returns:
        `Dataset` with `prompt` (conversation), `expressions` and `answers` (list of four strings each).
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(num):
        problems = draw.sample(_problems(), LINES)
        expressions = [expression for _, expression, _ in problems]
        prompt = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "\n".join(expression for expression, _ in EXAMPLE)},
            {"role": "assistant", "content": "\n".join(f"{e} = {answer}" for e, answer in EXAMPLE)},
            {"role": "user", "content": "\n".join(expressions)},
        ]
        rows.append({"prompt": prompt, "expressions": expressions, "answers": [answer for *_, answer in problems]})
    return Dataset.from_list(rows)


def _lines(completion: list[dict[str, str]]) -> list[str]:
    return completion[0]["content"].strip().split("\n")


def accuracy(completions, expressions, answers, **kwargs) -> list[float]:
    """Share of the sheet's lines that repeat their expression and give the right answer; halved if lines are added or missing."""
    gym = require("reasoning_gym", extra="demo")
    score = gym.get_score_answer_fn("chain_sum")  # both generators score an integer answer alike
    rewards = []
    for completion, asked, expected in zip(completions, expressions, answers, strict=True):
        lines = _lines(completion)
        right = sum(
            line.startswith(f"{expression} = ")
            and score(answer=line.removeprefix(f"{expression} = ").strip(), entry={"answer": answer}) == 1.0
            for line, expression, answer in zip(lines, asked, expected, strict=False)
        )
        rewards.append(right / LINES * (1.0 if len(lines) == LINES else 0.5))
    return rewards


def layout(completions, expressions, **kwargs) -> list[float]:
    """Share of the sheet's lines that repeat their expression, followed by an equals sign; 0 if it has more lines than asked."""
    rewards = []
    for completion, asked in zip(completions, expressions, strict=True):
        lines = _lines(completion)
        repeated = sum(line.startswith(f"{expression} = ") for line, expression in zip(lines, asked, strict=False))
        rewards.append(repeated / LINES if len(lines) <= LINES else 0.0)
    return rewards
