"""Where questions come from (additions, GSM8K, a .jsonl file), which of them a batch asks, how a reply is rewarded."""

import dataclasses
import functools
import json
import math
import os
import pathlib
from dataclasses import dataclass

import torch

from under_the_hood.answers import is_correct, load_reward, math_reward
from under_the_hood.errors import UserError, require


@dataclass(frozen=True)
class Example:
    question: str  # for a chat model
    answer: str
    terse: str | None = None  # the same question for a model without a chat template


@dataclass(frozen=True)
class Task:
    name: str
    train: list
    evaluation: list


def load_task(config) -> Task:
    """The training and held-out examples of --task. Raises UserError on a missing or malformed source."""
    if config.task.startswith("addition"):
        train, held_out = addition_examples(digits_of(config.task))
    elif config.task == "gsm8k":
        train, held_out = gsm8k_examples()
    elif config.task.endswith(".jsonl"):
        # Each question once, so that none is both trained on and held out.
        examples = list({e.question: e for e in reversed(read_jsonl(config.task))}.values())[::-1]
        require(len(examples) >= 2,
                f"{config.task} has {len(examples)} example; it needs at least 2, since some are held out")
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
        size = min(config.eval_questions, max(1, len(examples) // 10))
        held_out, train = [examples[i] for i in order[:size]], [examples[i] for i in order[size:]]
    else:
        raise UserError(f"unknown task {config.task!r}; "
                        "choose addition, addition-1, addition-3, gsm8k or a .jsonl file")
    return Task(config.task, train, held_out[: config.eval_questions])


def digits_of(task: str) -> int:
    """Digits of each summand: addition is addition-2, and addition-steps has 4."""
    digits = {"addition": 2, "addition-1": 1, "addition-2": 2, "addition-3": 3, "addition-steps": 4}.get(task)
    require(digits is not None, f"unknown task {task!r}; choose addition, addition-1, addition-3 or addition-steps")
    return digits


@functools.cache
def addition_examples(digits: int) -> tuple[list, list]:
    """Sums of two numbers below 10^digits, at most 20,000, shuffled once for all: (to train on, held out), 9 : 1."""
    below = 10**digits
    if below**2 <= 10**6:
        order = torch.randperm(below**2, generator=torch.Generator().manual_seed(2509))[:20_000]
    else:  # too many pairs to shuffle them all
        order = torch.randint(below**2, (20_000,), generator=torch.Generator().manual_seed(2509)).unique()
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(2509))]
    examples = [Example(f"What is {i // below} + {i % below}? Reply with the number only.", str(i // below + i % below),
                        f"{i // below}+{i % below}=") for i in order.tolist()]
    return examples[len(examples) // 10:], examples[: len(examples) // 10]


def worked_steps(question: str, slip: int | None = None) -> str:
    """'47+85=' → '7+5=12;1+4+8=13;132', one column at a time from the right, the carry in front, then the sum.

    slip: the index of a step whose result is 1 too large; the later steps continue from the wrong result.
    """
    first, second = question.rstrip("=").split("+")
    carry, steps, digits = 0, [], ""
    for place in range(max(len(first), len(second))):
        column = [number[-1 - place] for number in (first, second) if place < len(number)]
        result = carry + sum(map(int, column)) + (place == slip)
        steps.append("+".join(([str(carry)] if carry else []) + column) + f"={result}")
        carry, digits = result // 10, str(result % 10) + digits
    return ";".join([*steps, str(int((str(carry) if carry else "") + digits))])


def gsm8k_examples() -> tuple[list, list]:
    """GSM8K from the folder in GSM8K_DIR (train.jsonl, test.jsonl), else from the hub through `datasets`."""
    instruction = "\nThink step by step. End with a line '#### ' followed by the final number."
    local = "GSM8K_DIR set to a folder with train.jsonl and test.jsonl"
    if folder := os.environ.get("GSM8K_DIR"):
        splits = [read_jsonl(pathlib.Path(folder) / f"{name}.jsonl") for name in ("train", "test")]
    else:
        try:
            from datasets import load_dataset
            loaded = load_dataset("openai/gsm8k", "main")
        except ImportError:
            raise UserError(f"--task gsm8k needs `pip install datasets`, or {local}") from None
        except Exception as error:  # noqa: BLE001 (whatever the hub's client raises: no network, …)
            raise UserError(f"could not load openai/gsm8k from the hub ({type(error).__name__}); use {local}") from None
        splits = [[Example(row["question"], row["answer"]) for row in loaded[name]] for name in ("train", "test")]
    return tuple([dataclasses.replace(e, question=e.question + instruction) for e in split] for split in splits)


def read_jsonl(path) -> list:
    """Examples from a file with one {"question": …, "answer": …} a line; blank lines are skipped."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines() also splits at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}")
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, answer = row["question"], row["answer"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{path} line {number}: expected {{"question": "…", "answer": "…"}}, found {line[:60]!r}')
        finite = isinstance(answer, (int, float)) and not isinstance(answer, bool) and abs(answer) < math.inf
        require(isinstance(question, str) and bool(question.strip()) and
                (finite or isinstance(answer, str) and bool(answer.strip())),
                f"{path} line {number}: question must be non-empty text, and answer non-empty text or a finite number")
        try:
            (question + str(answer)).encode()
        except UnicodeEncodeError:  # half of a pair of surrogates
            raise UserError(f"{path} line {number}: the text is no valid Unicode; save the file as UTF-8") from None
        examples.append(Example(question, str(answer)))
    require(bool(examples), f"{path} holds no examples")
    return examples


def batch_examples(examples: list, number: int, *, count: int, seed: int) -> list:
    """The examples of batch `number`, from 1: slices of a new shuffle in each pass over the data.

    It depends on its arguments alone, so a resumed run asks the same questions.
    """
    picked = []
    for position in range((number - 1) * count, number * count):
        epoch, index = divmod(position, len(examples))
        picked.append(examples[_shuffled(len(examples), seed, epoch)[index]])
    return picked


@functools.lru_cache(maxsize=4)
def _shuffled(size: int, seed: int, epoch: int) -> list:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


@functools.cache
def reward_function(name: str | None, task: str, on_unscored: str = "stop"):
    """reward(question, response, answer) → float: the user's `module:function`, else 1 for the right answer, else 0."""
    if name:
        return load_reward(name, unscored=on_unscored == "leave-out")
    if task.endswith(".jsonl"):  # whose answers may be formulas
        return lambda question, text, answer: math_reward(text, answer)
    # Responses of a group are often equal: their verdict is looked up.
    check = functools.lru_cache(2**16)(lambda function, text, answer: float(function(text, answer)))
    return lambda question, text, answer: check(is_correct, text, answer)
