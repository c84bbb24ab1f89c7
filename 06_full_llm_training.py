#!/usr/bin/env python3
"""Fine-tune a causal language model with any row of the group-relative REINFORCE family, on data as stale as you like.

Claim (arXiv 2509.24203): group-relative REINFORCE never needed on-policy data. What breaks on stale data is an *unregularised*
step; clipping repairs it, with importance sampling or without. A real transformer shows it in two minutes.

Every algorithm in this file is one row of one equation, summed over responses i and their tokens t:

    L(θ) = − Σᵢ Σₜ Nᵢᵗ · Mᵢᵗ · Wᵢᵗ · Aᵢ · log π_θ(yᵢᵗ | x, yᵢ^{<t})  +  R(θ)

    symbol | name here       | shape  | meaning
    A      | advantages      | (B,)   | reward minus the group's baseline, perhaps shaped (RED)
    M      | clip_mask       | (B, T) | 0 where a token has moved too far from the sampler (REC)
    W      | weight          | (B, T) | detached importance weight, or 1
    R      | regulariser     | scalar | an additive pull towards the sampler (REP)
    N      | token_weights   | (B, T) | a named mean with an explicit denominator

Run:  python 06_full_llm_training.py --compare reinforce,grpo,rec-oneside-nois --sync-interval 20     (2 minutes on 2 cores)
      python 06_full_llm_training.py --model HuggingFaceTB/SmolLM2-135M-Instruct --task gsm8k --max-new-tokens 256
What the previous lessons lacked: a network, a tokenizer, responses of unequal length, and all that can go wrong with them.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import pathlib
import random
import shutil
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter, deque
from dataclasses import dataclass, field

# Threads that wait for each other: spin for some microseconds, then sleep. Spinning for long slows training several times when
# the machine has other work, and sleeping at once doubles the time of the small matrices of the built-in model.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import matplotlib
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import parallel
from answers import extract_answer, is_correct, load_reward, math_reward  # noqa: F401 (others look for the first here)
from utils import STYLES, figure, pick_device, save_figure, seed_everything, write_text

# %% ------------------------------------------------------------------------------------------------- configuration


def option(default, help: str, shown: str | None = None):
    """A dataclass field whose --help text ends with its default, or with `shown`, which says what an empty one stands for."""
    shown = shown or ("off" if default is False else default)
    return field(default=default, metadata={"help": f"{help} (default {shown})"})


@dataclass(kw_only=True)
class ModelOptions:
    _argument_group_name = "model and data"
    model: str = option("tiny", "tiny or small (built in; small wants a GPU), a hub name, a directory, or a .gguf file")
    task: str = option("addition", "addition, addition-1, addition-3 (digits), addition-steps (4 digits, with worked steps), "
                       "gsm8k (hub, or the folder in GSM8K_DIR), or a .jsonl file of {question, answer}")
    reward: str | None = option(None, "module:function of your own, called with (question, response, answer), returns a number",
                                "1 for the right answer, else 0")
    eval_questions: int = option(256, "held-out questions in an evaluation")
    max_prompt_tokens: int = option(512, "longest prompt, in tokens; longer questions are left out")


@dataclass(kw_only=True)
class AlgorithmOptions:
    _argument_group_name = "algorithm"
    algorithm: str = option("rec-oneside-nois", "a row of ALGORITHMS")
    eps_low: float | None = option(None, "clip where the ratio falls below 1 − this", "the row's")
    eps_high: float | None = option(None, "clip where the ratio rises above 1 + this", "the row's")
    outer_low: float | None = option(None, "ring clipping: keep again where the ratio is below 1 − this", "the row's")
    outer_high: float | None = option(None, "ring clipping: keep again where the ratio is above 1 + this", "the row's")
    tau: float | None = option(None, "strength of the squared log-ratio penalty, (τ/2)·d² per token (OPMD)", "the row's")
    beta: float | None = option(None, "strength of the forward-KL penalty, in nats per token (AsymRE)", "the row's")
    weight_temperature: float | None = option(None, "temperature T of RED-Weight's exp(A/T), in units of reward", "the row's")
    weight_cap: float | None = option(None, "largest importance weight (CISPO, TIS, TOPR, TIC-GRPO)", "the row's")
    entropy_target: float | None = option(None, "entropy that AEPO steers to, in nats per token", "the row's")


@dataclass(kw_only=True)
class FriendOptions:
    _argument_group_name = "what single rows need"
    reward_noise: str = option("0,0", "ρ⁺,ρ⁻: flip this share of the verifier's verdicts on wrong and on right answers")
    noise_rates: str | None = option(None, "ρ⁺,ρ⁻ that noise-corrected-grpo assumes", "those of --reward-noise")
    calibrate: int = option(0, "train nothing: estimate ρ⁺ and ρ⁻ of the verifier from this many answers of --model")
    step_reward: str | None = option(None, "module:function of your own, called with (question, response, answer), returns the "
                                     "share of leading steps that are right (sgpo)", "leading digits, for addition only")
    refills: int = option(4, "how often dapo may replace groups without a contrast in one batch")


@dataclass(kw_only=True)
class StalenessOptions:
    _argument_group_name = "off-policyness"
    sync_interval: int = option(1, "I: training steps between two refreshes of the sampler's weights")
    sync_offset: int = option(0, "m: batches by which the sampler works ahead of the trainer")
    offline: bool = option(False, "never refresh the sampler: every batch comes from the starting model")


@dataclass(kw_only=True)
class TrainingOptions:
    _argument_group_name = "training"
    steps: int = option(120, "optimizer steps")
    prompts_per_step: int = option(32, "prompts in one batch")
    group_size: int = option(8, "K: responses to each prompt, at least 2")
    learning_rate: float = option(1e-4, "AdamW's constant learning rate, per step")
    max_grad_norm: float = option(1.0, "clip the gradient's global L2 norm to this")
    temperature: float = option(1.0, "sampling temperature (divides the logits); the loss differentiates the same distribution")
    max_new_tokens: int = option(8, "longest response, in tokens")
    micro_batch_tokens: int = option(16384, "prompt + response tokens in one forward and backward pass")
    seed: int = option(0, "seed of data order, sampling and random dropping")
    device: str = option("auto", "auto, cpu, cuda or mps")
    dtype: str = option("auto", "compute type: float32, bfloat16 (weights stay float32), auto = bfloat16 on cuda")
    engine: str = option("auto", "what samples: plain (the loop of this file), paged (transformers' continuous batching), "
                         "auto = paged on cuda where it works")
    gradient_checkpointing: bool = option(False, "keep one activation per layer and recompute the rest: less memory, more time")
    shard: bool = option(False, "with torchrun: split weights, gradients and optimizer state over the processes (FSDP2)")


@dataclass(kw_only=True)
class OutputOptions:
    _argument_group_name = "evaluation and output"
    eval_every: int = option(20, "steps between evaluations; step 0 and the last step always evaluate")
    eval_samples: int = option(4, "sampled answers per evaluation question")
    eval_only: bool = option(False, "evaluate --model, train nothing")
    save_every: int = option(50, "steps between checkpoints")
    out: str | None = option(None, "run directory", "runs/<algorithm>-<task>-<staleness>-seed<seed>")
    resume: bool = option(False, "continue the run in --out from its last checkpoint")
    overwrite: bool = option(False, "replace the run in --out")
    config: str | None = option(None, "a file of flags, such as a run's config.json; flags on the command line win", "none")
    compare: str | None = option(None, "train several rows, comma-separated, from the same base and overlay them; or: paper", "none")
    dry_run: bool = option(False, "train nothing: print steps, tokens and memory of the run, part by part")
    device_memory: float | None = option(None, "GiB of the CUDA device that --dry-run plans for", "this machine's")
    map: str | None = option(None, "train nothing: draw 06_family.png, the map of all rows, into this folder", "none")
    tensorboard: bool = option(False, "also write the metrics for TensorBoard, into <out>/tensorboard")
    cache_dir: str = option(str(pathlib.Path(__file__).resolve().parent / "cache"), "where the built-in model is kept",
                            "cache, beside this file")


GROUPS = (ModelOptions, AlgorithmOptions, FriendOptions, StalenessOptions, TrainingOptions, OutputOptions)


@dataclass(kw_only=True)
class Config(*GROUPS):
    """All flags of one run; the groups above only order --help."""


METRICS = {  # what a line of metrics.jsonl says; --help ends with it
    "step": "optimizer steps so far; step 0 only evaluates",
    "reward": "mean reward of the batch as the trainer sees it, under the policy that sampled it",
    "loss": "value of the loss. It says little: advantages sum to 0 in a group, so a value near 0 is normal",
    "grad_norm": "L2 norm of the gradient before clipping it to --max-grad-norm",
    "entropy": "of the policy, in nats per token",
    "kl_old": "estimate of KL(sampler ‖ policy) in nats per token, on the batch (k3)",
    "clip_fraction": "share of response tokens that the clip mask takes out of the update",
    "ratio_mean": "mean of π_θ/π_old over the response tokens; 1 when on-policy",
    "ratio_p05": "quantiles of the token ratio: 5 %",
    "ratio_p50": "… the median",
    "ratio_p95": "… 95 %",
    "ratio_max": "… the largest",
    "ess": "effective sample size of the responses, as a share: 1 when on-policy, 1/B when one carries all the weight",
    "staleness": "updates between the sampler's weights and the policy's",
    "flat_groups": "share of groups whose rewards are all equal, which teach most rows nothing",
    "truncated": "share of responses cut off at --max-new-tokens",
    "completion_length": "mean length of a response, in tokens",
    "tokens_per_second": "response tokens of the batch per second of sampling and training",
    "eval_accuracy": "mean reward on the held-out questions, sampled at --temperature",
    "eval_low": "lower end of its 95 % interval; the questions are the sample",
    "eval_high": "upper end",
    "eval_greedy": "mean reward of the greedy answers",
    "eval_greedy_low": "lower end of its 95 % interval",
    "eval_greedy_high": "upper end",
    "eval_pass_at_k": "chance that at least one of k sampled answers is right (its reward is 1 or more); unbiased",
}


class UserError(Exception):
    """Something the user can put right; `main` prints it as one line and exits with status 2."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def validate(config: Config) -> None:
    """Refuse impossible settings before any work starts."""
    require(not (config.compare and config.eval_only), "--eval-only evaluates one model; leave --compare out")
    for name in ("reward_noise", "noise_rates"):
        rate_pair(getattr(config, name) or "0,0", flag=f"--{name.replace('_', '-')}")
    if config.tensorboard:
        try:
            from torch.utils import tensorboard  # noqa: F401
        except ImportError:
            raise UserError("--tensorboard needs the package of that name: pip install tensorboard") from None
    rows = [] if config.compare == "paper" else config.compare.split(",") if config.compare else [config.algorithm]
    require(all(rows), f"--compare {config.compare} has an empty name; write it as grpo,reinforce")
    if config.compare == "paper":
        changed = [f"--{name.replace('_', '-')}" for name, value in dataclasses.asdict(config).items()
                   if value != getattr(Config(), name) and name not in ("compare", "cache_dir")]
        require(not changed, f"--compare paper has settings of its own and ignores {', '.join(changed)}; leave them out, or see "
                "python paper_grid.py --help")
    require(not (config.resume and config.eval_only), "--eval-only evaluates --model; for the model of a run give its folder, "
            "--model <out>/model, and leave --resume out")
    require(len(rows) == len(set(rows)), f"--compare {config.compare} names a row twice; each has one folder")
    for name in rows:
        require(name in ALGORITHMS, f"unknown algorithm {name!r}; choose from: {', '.join(ALGORITHMS)}")
        require(not ALGORITHMS[name].graded or config.step_reward or config.task.startswith("addition"),
                f"{name} must judge single steps; for --task {config.task} give it --step-reward module:function")
        require(not ALGORITHMS[name].worked_examples or config.group_size >= 3,
                f"{name} needs --group-size 3 or more: one response with a worked example, and others to compare it with")
    require(abs(config.seed) < 2**32, f"--seed is {config.seed}; it must be between -2^32 and 2^32")
    require(config.group_size >= 2, f"--group-size is {config.group_size}; a baseline needs at least 2 responses to a prompt")
    require(config.sync_interval >= 1, f"--sync-interval is {config.sync_interval}; it must be at least 1, or use --offline")
    require(config.sync_offset >= 0, f"--sync-offset is {config.sync_offset}; it must be 0 or more")
    for name in ("steps", "prompts_per_step", "max_new_tokens", "micro_batch_tokens", "eval_every", "eval_questions",
                 "eval_samples", "save_every", "max_prompt_tokens"):
        require(getattr(config, name) >= 1, f"--{name.replace('_', '-')} is {getattr(config, name)}; it must be at least 1")
    for name in ("learning_rate", "max_grad_norm", "temperature", "weight_temperature", "weight_cap", "entropy_target",
                 "device_memory"):
        value = getattr(config, name)
        require(value is None or 0 < value < math.inf, f"--{name.replace('_', '-')} is {value}; it must be positive and finite")
    for name in ("eps_low", "eps_high", "outer_low", "outer_high", "tau", "beta", "calibrate", "refills"):
        value = getattr(config, name)
        require(value is None or 0 <= value < math.inf, f"--{name.replace('_', '-')} is {value}; it must be 0 or more")
    require(config.dtype in ("auto", "float32", "bfloat16"), f"--dtype is {config.dtype!r}; choose auto, float32 or bfloat16")
    require(config.engine in ("auto", "plain", "paged"), f"--engine is {config.engine!r}; choose auto, plain or paged")
    processes = int(os.environ.get("WORLD_SIZE", 1))
    require(processes == 1 or "RANK" in os.environ or config.dry_run, f"WORLD_SIZE is {processes} but RANK is not set; start "
            "several processes with torchrun")
    require(config.prompts_per_step % processes == 0 and config.eval_questions >= processes,
            f"{processes} processes share a batch: --prompts-per-step must be a multiple of {processes}, and --eval-questions at "
            "least as many")
    require(processes == 1 or not (config.compare or config.eval_only or config.calibrate), "several processes train one run; "
            "start --compare, --eval-only and --calibrate without torchrun")
    if config.model in BUILT_IN:
        require(built_in_digits(config.task) in BUILT_IN[config.model]["steps"], f"--model {config.model} has not learned --task "
                f"{config.task}; tiny adds 1 to 3 digits (addition-2), and small adds 4, with its steps (addition-steps)")
    require(config.model != "small" or config.max_new_tokens >= 40,
            f"--max-new-tokens is {config.max_new_tokens}; worked steps need 40")
    require(not config.shard or processes > 1, "--shard splits a model over processes; start them with torchrun "
            "--nproc-per-node N 06_full_llm_training.py …")
    require(not config.shard or all(ALGORITHMS[name].entropy_target is None for name in rows),
            "aepo samples from the policy in every step, which --shard does not offer; leave one of them out")
    try:
        pick_device(config.device)
        for function in filter(None, (config.reward, config.step_reward)):
            load_reward(function)
        for name in rows:  # the loss itself knows which bounds go together
            row = chosen_row(dataclasses.replace(config, algorithm=name))
            policy_loss(*torch.zeros(3, 1, 1), torch.ones(1, 1), algorithm=row, constant=config.max_new_tokens)
    except (ValueError, RuntimeError) as error:  # torch refuses a device with the second
        raise UserError(one_line(error))


def rate_pair(text: str, *, flag: str) -> tuple[float, float]:
    """'0.2,0.1' → (ρ⁺, ρ⁻), the shares of wrong and of right answers that the verifier misjudges."""
    try:
        false_positive, false_negative = map(float, text.split(","))
    except ValueError:
        raise UserError(f"{flag} is {text!r}; it must be two numbers with a comma, such as 0.2,0.1") from None
    require(min(false_positive, false_negative) >= 0 and false_positive + false_negative < 1,
            f"{flag} is {text}; the rates must be 0 or more, and sum to less than 1, else a verdict says nothing")
    return false_positive, false_negative


# %% --------------------------------------------------------------------------------------------- tasks and rewards

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


def load_task(config: Config) -> Task:
    """The training and held-out examples of --task. Raises UserError on a missing or malformed source."""
    if config.task.startswith("addition"):
        train, held_out = addition_examples(digits_of(config.task))
    elif config.task == "gsm8k":
        train, held_out = gsm8k_examples()
    elif config.task.endswith(".jsonl"):
        examples = list({e.question: e for e in reversed(read_jsonl(config.task))}.values())[::-1]  # none on both sides
        require(len(examples) >= 2, f"{config.task} has {len(examples)} example; it needs at least 2, since some are held out")
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
        size = min(config.eval_questions, max(1, len(examples) // 10))
        held_out, train = [examples[i] for i in order[:size]], [examples[i] for i in order[size:]]
    else:
        raise UserError(f"unknown task {config.task!r}; choose addition, addition-1, addition-3, gsm8k or a .jsonl file")
    return Task(config.task, train, held_out[: config.eval_questions])


def digits_of(task: str) -> int:
    """Digits of each summand: addition is addition-2, and addition-steps has 4."""
    digits = {"addition": 2, "addition-1": 1, "addition-2": 2, "addition-3": 3, "addition-steps": 4}.get(task)
    require(digits is not None, f"unknown task {task!r}; choose addition, addition-1, addition-3 or addition-steps")
    return digits


@functools.cache
def addition_examples(digits: int) -> tuple[list, list]:
    """Sums of two numbers below 10^digits in a fixed shuffled order: at most 20,000, of which a tenth is never trained on."""
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

    slip: at the step of this number the result is wrong by one, and what follows is built on it.
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
        except Exception as error:  # whatever the hub client raises: no network, no such version, …
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
        require(isinstance(question, str) and isinstance(answer, (str, int, float)) and bool(question.strip()),
                f"{path} line {number}: question must be non-empty text, and answer text or a number")
        examples.append(Example(question, str(answer)))
    require(bool(examples), f"{path} holds no examples")
    return examples


# %% ---------------------------------------------------------------------------------------------------------- model


def load_model(name: str, *, device, cache_dir=None, task: str = "addition"):
    """(model, tokenizer) in float32 and eval mode, with a pad token. `name`: tiny, hub name, directory or .gguf file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar is enough, and it is ours
    if name in BUILT_IN:
        return load_model(str(built_in_model(built_in_digits(task), cache_dir, name=name, device=device)), device=device)
    path, options = pathlib.Path(name), {}
    if name.endswith(".gguf"):
        require(path.is_file(), f"--model {name}: no such file")
        options, name = {"gguf_file": path.name}, str(path.parent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if options or isinstance(error, ImportError):
            raise UserError(f"--model {path}: {one_line(error)}")
        raise UserError(f"--model {name} is neither 'tiny', a model directory, a .gguf file, nor reachable on the hub: "
                        f"{one_line(error)}")
    if options:  # weights read from a .gguf cannot be saved again until they sit in an ordinary model
        if hasattr(model.config, "quantization_config"):  # they were expanded to float32
            del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.tie_weights()
        model = plain
    known = range(model.get_input_embeddings().num_embeddings)  # some tokenizer classes invent a pad id beyond it
    if tokenizer.pad_token_id not in known:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: every mask here comes from lengths, never from the pad id
    require(tokenizer.pad_token_id in known, f"--model {path}: its tokenizer has neither a pad nor an end-of-text token that "
            "the model knows; name one in tokenizer_config.json")
    return model.to(device).eval(), tokenizer


def stop_ids(model, tokenizer) -> set:
    """Every id that ends a response: the tokenizer's EOS and those of the model's generation config."""
    configured = model.generation_config.eos_token_id
    configured = configured if isinstance(configured, (list, tuple)) else [configured]
    return {int(i) for i in [*configured, tokenizer.eos_token_id] if i is not None}


def context_length(model):
    return getattr(model.config, "max_position_embeddings", None) or math.inf


def encode_prompts(tokenizer, examples, *, device, worked=()):
    """Left-padded (ids, mask), each (P, L). A chat template, where there is one, also places the one BOS.

    worked: solved examples to show before each question, in the form in which it is asked; never the question itself.
    """
    shown = [[other for other in worked if other.question != example.question] for example in examples]
    if tokenizer.chat_template:
        chats = []
        for example, others in zip(examples, shown):
            turns = [turn for other in others for turn in (("user", other.question), ("assistant", other.answer))]
            chats.append([{"role": role, "content": content} for role, content in [*turns, ("user", example.question)]])
        rows = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    else:
        solved = ["".join(f"{other.terse}{other.answer};" if other.terse else f"Question: {other.question}\nAnswer: {other.answer}\n\n"
                          for other in others) for others in shown]
        rows = tokenizer([text + (example.terse or f"Question: {example.question}\nAnswer:")
                          for text, example in zip(solved, examples)])["input_ids"]
        end = tokenizer.eos_token_id  # some tokenizers close every text; a prompt is not closed
        rows = [ids[:-1] if end is not None and len(ids) > 1 and ids[-1] == end else ids for ids in rows]
    width = max(len(ids) for ids in rows)
    tokens = torch.tensor([[tokenizer.pad_token_id] * (width - len(ids)) + list(ids) for ids in rows], device=device)
    lengths = torch.tensor([len(ids) for ids in rows], device=device)
    return tokens, torch.arange(width, device=device) >= width - lengths[:, None]


# The built-in models: Qwen2, but small. "steps" of supervised training by digits; "wrong_share" of what it shows holds a mistake.
TINY = {"hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "wrong_share": 0.6, "steps": {1: 200, 2: 700, 3: 1500},
        "batch": 256, "learning_rate": 2e-3}
SMALL = {**TINY, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 8, "max_position_embeddings": 128, "steps": {4: 800}, "batch": 512, "learning_rate": 1e-3}
BUILT_IN = {"tiny": TINY, "small": SMALL}


def built_in_digits(task: str) -> int:
    """What a built-in model has learned when it meets this task; any other task than addition finds the one for two digits."""
    return digits_of(task) if task.startswith("addition") else 2


def built_in_model(digits: int, cache_dir, *, name: str = "tiny", device="cpu") -> pathlib.Path:
    """The folder of a built-in base model; made by supervised training on first use, then kept in `cache_dir`."""
    key = hashlib.sha256(json.dumps(BUILT_IN[name], sort_keys=True).encode()).hexdigest()[:10]
    folder = pathlib.Path(cache_dir) / f"{name}-{digits}-digits-{key}"
    if not (folder / "config.json").exists():
        require(parallel.rank() == 0, f"there is no built-in model in {folder}; rank 0 makes it, in a --cache-dir that all machines see")
        folder.parent.mkdir(parents=True, exist_ok=True)
        model, tokenizer = make_built_in_model(digits, BUILT_IN[name], device=device)
        if not (folder / "config.json").exists():  # another process may have been quicker, with the same model
            replace_folder(folder, lambda scratch: (model.save_pretrained(scratch), tokenizer.save_pretrained(scratch)))
    return folder


def redraw_seconds() -> float:
    """How often a progress bar is redrawn: often on a terminal, rarely in a log file."""
    return 0.1 if sys.stderr.isatty() else 10


def character_tokenizer():
    """One token per character of arithmetic, as an ordinary fast tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"0123456789+-*=,; "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False, padding_side="left")


def make_built_in_model(digits: int, recipe: dict, *, device="cpu"):
    """Train a built-in model on additions of which 60 % hold one mistake, so that it knows the task but errs.

    Reinforcement learning needs a base that is sometimes right. Noise in the demonstrations sets how often: sampled accuracy
    settles near the share of clean demonstrations, with no need to stop the training at a lucky moment. Four digits are shown
    with worked steps, and the mistake is a slip in one of them; fewer digits are shown as the sum, with one digit replaced.
    """
    from tqdm import tqdm
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = character_tokenizer()
    shape = {k: v for k, v in recipe.items() if k in Qwen2Config().to_dict()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=None,
                                             eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape))
    model.to(device)
    generator = torch.Generator().manual_seed(0)
    examples, _ = addition_examples(digits)
    prompts = [tokenizer(e.terse)["input_ids"] for e in examples]
    if digits < 4:
        shown = [[e.answer for e in examples]]
        lengths = torch.tensor([len(e.answer) for e in examples])
    else:  # without a mistake, and with a slip in each of the steps
        shown = [[worked_steps(e.terse, slip) for e in examples] for slip in (None, *range(digits))]
        lengths = torch.tensor([max(map(len, e.terse.rstrip("=").split("+"))) for e in examples])
    demonstrations = [tokenizer(texts)["input_ids"] for texts in shown]
    first_digit, width = tokenizer.convert_tokens_to_ids("0"), max(len(p) for p in prompts) + max(map(len, sum(demonstrations, []))) + 1
    rows = torch.full((len(shown), len(examples), width), tokenizer.pad_token_id)
    for version, answers in zip(rows, demonstrations):
        for row, prompt, answer in zip(version, prompts, answers):
            row[: len(prompt) + len(answer) + 1] = torch.tensor(prompt + answer + [tokenizer.eos_token_id])
    starts = torch.tensor([len(p) for p in prompts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["learning_rate"], weight_decay=0.01)
    steps = recipe["steps"][digits]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe["learning_rate"], total_steps=steps)
    progress = tqdm(range(steps), desc="making the built-in model (once)", mininterval=redraw_seconds())
    for _ in progress:
        pick = torch.randint(len(examples), (recipe["batch"],), generator=generator)
        wrong = torch.rand(len(pick), generator=generator) < recipe["wrong_share"]
        place = (torch.rand(len(pick), generator=generator) * lengths[pick]).long()
        shift = torch.randint(1, 10, (len(pick),), generator=generator)
        if len(shown) > 1:
            tokens = rows[torch.where(wrong, place + 1, 0), pick]
        else:
            tokens, place = rows[0, pick].clone(), starts[pick] + place
            digit = tokens.gather(1, place[:, None]).squeeze(1) - first_digit
            tokens[wrong, place[wrong]] = first_digit + (digit + shift)[wrong] % 10
        labels = tokens.masked_fill((torch.arange(width) < starts[pick, None]) | (tokens == tokenizer.pad_token_id), -100)
        with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = model(input_ids=tokens.to(device), labels=labels.to(device)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model, tokenizer


# %% -------------------------------------------------------------------------------------------------------- rollout


def model_inputs(model, tokens, attention_mask, cache) -> dict:
    """Keyword arguments for one forward pass that continues `cache`. attention_mask covers cache and tokens.

    Positions count real tokens only, so left padding shifts nothing: GPT-2's learned positions need that, and say nothing
    when they do not get it.
    """
    accepted = forward_parameters(type(model))
    inputs = {"input_ids": tokens, "attention_mask": attention_mask, "use_cache": True,
              "cache" if "cache" in accepted else "past_key_values": cache}  # renamed in transformers 5.24
    if "position_ids" in accepted:
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1]:]
    return inputs


@functools.cache
def forward_parameters(model_class) -> frozenset:
    return frozenset(inspect.signature(model_class.forward).parameters)


def in_eval_mode(function):
    """Run function(model, …) in eval mode and leave the model as it was: dropout would make the trainer's log-probabilities
    differ from the sampler's, and a model that checkpoints its gradients drops the cache in training mode."""
    @functools.wraps(function)
    def wrapped(model, *args, **kwargs):
        was_training = model.training
        if was_training:
            model.eval()
        try:
            return function(model, *args, **kwargs)
        finally:
            if model.training != was_training:
                model.train(was_training)
    return wrapped


def without_autograd(function):
    """Run function in inference mode, which costs less than no_grad, and hand its tensors on as ordinary ones."""
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with torch.inference_mode():
            results = function(*args, **kwargs)
        return tuple(tensor.clone() for tensor in results)
    return wrapped


@without_autograd
@in_eval_mode
def generate(model, prompt, prompt_mask, *, group_size: int, max_new_tokens: int, temperature: float, eos_ids, pad_id: int,
             generator):
    """Sample `group_size` responses to each prompt from exactly softmax(logits / temperature); temperature 0 is greedy.

    prompt, prompt_mask: (P, L), left-padded. Returns tokens (B, T), mask (B, T), logprobs (B, T) float32 with B = P·group_size
    and rows p·group_size … of prompt p. The mask includes the EOS. No top-k, no top-p, no penalties: the distribution that
    samples is the one the loss differentiates, so `logprobs` are the behaviour policy's own.

    Responses share what they have in common: a prompt runs through the model once for its group, and so does each beginning that
    several responses have sampled alike. `node` says which row of the cache and of the logits a response stands at.
    """
    from transformers import DynamicCache

    cache, batch, device = DynamicCache(config=model.config), prompt.shape[0] * group_size, prompt.device
    logits, attention = model(**model_inputs(model, prompt, prompt_mask, cache), logits_to_keep=1).logits[:, -1], prompt_mask
    tokens = torch.full((batch, max_new_tokens), pad_id, dtype=torch.long, device=device)
    logprobs = torch.zeros(batch, max_new_tokens, device=device)
    mask = torch.zeros(batch, max_new_tokens, dtype=torch.bool, device=device)
    rows = torch.arange(batch, device=device)  # the responses still in the batch, and whether they have yet to end
    going, node = torch.ones_like(rows, dtype=torch.bool), rows // group_size
    stops = torch.tensor(sorted(eos_ids), device=device)
    for t in range(max_new_tokens):
        scores = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
        if scores.isnan().any():
            raise FloatingPointError("the model's logits are not finite")
        scores, vocabulary = scores[node], scores.shape[1]
        if temperature == 0:
            token = scores.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens[rows, t], logprobs[rows, t], mask[rows, t] = token[:, 0], scores.gather(1, token)[:, 0], True
        token = token[:, 0]
        going = going & ~torch.isin(token, stops)
        if t + 1 == max_new_tokens or not going.any():
            break
        if going.float().mean() < 0.75:  # finished responses leave, when they are enough to be worth a copy of the cache
            rows, node, token, going = rows[going], node[going], token[going], going[going]
        stood, (branches, node) = len(attention), torch.unique(node * vocabulary + token, return_inverse=True)
        parent, token = branches // vocabulary, branches % vocabulary
        if len(parent) != stood or (parent[1:] == parent[:-1]).any():
            cache.batch_select_indices(parent)
            attention = attention[parent]
        attention = torch.cat([attention, torch.ones_like(attention[:, :1])], 1)
        logits = model(**model_inputs(model, token[:, None], attention, cache)).logits[:, -1]
    mask = completion_mask(tokens, eos_ids=eos_ids) & mask
    width = int(mask.sum(1).max())
    return (tokens[:, :width].masked_fill(~mask[:, :width], pad_id), mask[:, :width],
            logprobs[:, :width].masked_fill(~mask[:, :width], 0.0))


def generate_paged(model, prompt, prompt_mask, *, group_size: int, max_new_tokens: int, temperature: float, eos_ids, pad_id: int,
                   generator):
    """`generate` through transformers' continuous batching: a response that ends makes room for another one's tokens, and keys
    and values lie in pages, so that long and short responses share one batch without padding. temperature must be positive.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    on_gpu = prompt.device.type == "cuda"
    sizes = {"max_memory_percent": 0.5} if on_gpu else {"num_blocks": 512, "max_batch_tokens": 512, "page_size": 16}
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    answers = model.generate_batch(
        [ids[keep].tolist() for ids, keep in zip(prompt.cpu(), prompt_mask.cpu())],
        generation_config=GenerationConfig(do_sample=True, temperature=temperature, top_k=0, top_p=1.0, pad_token_id=pad_id,
                                           eos_token_id=sorted(eos_ids), max_new_tokens=max_new_tokens,
                                           num_return_sequences=group_size),
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, seed=seed, auto_switch_to_flash=False, **sizes))
    answers = list(answers.values())
    if len(answers) < len(prompt) * group_size or any(answer.error for answer in answers):
        raise UserError("continuous batching lost some responses; use --engine plain")
    lengths = torch.tensor([len(answer.generated_tokens) for answer in answers])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.full(mask.shape, pad_id)
    tokens[mask] = torch.tensor([token for answer in answers for token in answer.generated_tokens])
    logprobs = torch.zeros(mask.shape)
    logprobs[mask] = torch.tensor([value for answer in answers for value in answer.logprobs])
    return tokens.to(prompt.device), mask.to(prompt.device), logprobs.to(prompt.device)


def completion_mask(tokens, *, eos_ids):
    """True up to and including the first EOS of each row, (B, T) → bool (B, T).

    The EOS is a decision of the policy and is trained on; what follows it is padding, also where pad and EOS share an id.
    """
    is_eos = torch.isin(tokens, torch.as_tensor(sorted(eos_ids), dtype=tokens.dtype, device=tokens.device))
    return is_eos.long().cumsum(1) - is_eos.long() == 0


@dataclass
class Rollout:
    """One batch: P prompts with K responses each; B = P·K rows, in prompt order."""
    prompt: torch.Tensor        # (P, L) left-padded ids
    prompt_mask: torch.Tensor   # (P, L)
    tokens: torch.Tensor        # (B, T) the sampled ids themselves, never a re-encoding of their text
    mask: torch.Tensor          # (B, T) response tokens, EOS included
    old_logprobs: torch.Tensor  # (B, T) the sampler's own, recorded while sampling
    rewards: torch.Tensor       # (P, K)
    truncated: torch.Tensor     # (B,) no EOS within max_new_tokens
    version: int                # updates the sampler's weights had seen
    samples: list               # a few (question, response, answer, reward) for the log
    hinted: torch.Tensor | None = None  # (B,) sampled with worked examples in the prompt (ICPO)
    number: int = 1             # which batch of the run this is, from 1


@functools.cache
def reward_function(name: str | None, task: str):
    """reward(question, response, answer) → float: the user's `module:function`, else 1 for the right answer and 0 for another."""
    if name:
        return load_reward(name)
    if task.endswith(".jsonl"):  # whose answers may be formulas
        return lambda question, text, answer: math_reward(text, answer)
    check = functools.lru_cache(2**16)(lambda function, text, answer: float(function(text, answer)))  # a group repeats itself
    return lambda question, text, answer: check(is_correct, text, answer)


def collect(model, tokenizer, examples, config: Config, *, version: int, generator, row=None, number=1, worked=()) -> Rollout:
    """Sample a group of responses to each example and reward them. Raises UserError when the reward fails.

    row: in training, the row whose mechanisms act on data and rewards; None in an evaluation. worked: see hinted_group.
    """
    device, hinted = next(model.parameters()).device, None
    prompt, prompt_mask = encode_prompts(tokenizer, examples, device=device)
    options = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens, "generator": generator,
               "group_size": config.group_size, "eos_ids": stop_ids(model, tokenizer), "pad_id": tokenizer.pad_token_id}
    with autocast(config, device):  # as in training, or every ratio would carry the difference of the two precisions
        if worked:
            tokens, mask, logprobs, hinted = hinted_group(model, tokenizer, examples, prompt, prompt_mask, worked, **options)
        else:
            sample = generate_paged if config.engine == "paged" and config.temperature else generate
            tokens, mask, logprobs = sample(model, prompt, prompt_mask, **options)
    texts = decode(tokenizer, tokens, mask)
    asked = [e for e in examples for _ in range(config.group_size)]
    try:
        reward = reward_function(config.reward, config.task)
        rewards = torch.tensor([float(reward(e.question, text, e.answer)) for e, text in zip(asked, texts)], device=device)
        rewards = rewards.view(len(examples), -1)
        if row:
            rewards = training_rewards(rewards, asked, texts, mask.sum(1), config, row=row, generator=generator)
    except (ValueError, ImportError) as error:
        raise UserError(one_line(error)) from error
    ended = (torch.isin(tokens, torch.tensor(sorted(options["eos_ids"]), device=device)) & mask).any(1)
    samples = [{"question": e.question, "response": texts[i * config.group_size], "answer": e.answer,
                "reward": rewards[i, 0].item()} for i, e in enumerate(examples[:4])]
    return Rollout(prompt, prompt_mask, tokens, mask, logprobs, rewards, ~ended, version, samples, hinted, number)


def decode(tokenizer, tokens, mask) -> list:
    rows = [tuple(ids[:n]) for ids, n in zip(tokens.tolist(), mask.sum(1).tolist())]
    distinct = list(dict.fromkeys(rows))  # a group repeats itself
    texts = dict(zip(distinct, tokenizer.batch_decode([list(ids) for ids in distinct], skip_special_tokens=True)))
    return [texts[ids] for ids in rows]


# %% ------------------------------------------------------------------------- what some rows do to rewards and data


def training_rewards(rewards, asked, texts, lengths, config: Config, *, row, generator):
    """What the trainer sees, (P, K) → (P, K): a verifier that errs, SGPO's graded steps, DAPO's length penalty."""
    if config.reward_noise != "0,0":
        rewards = noisy_verdicts(rewards, rate_pair(config.reward_noise, flag="--reward-noise"), generator=generator)
    if row.graded:
        judge = load_reward(config.step_reward) if config.step_reward else leading_digits
        wrong = rewards.amax(1) <= 0
        shares = [judge(e.question, text, e.answer) if wrong[i // rewards.shape[1]] else 0.0
                  for i, (e, text) in enumerate(zip(asked, texts))]
        rewards = torch.where(wrong[:, None], graded_reward(torch.tensor(shares).to(rewards)).view_as(rewards), rewards)
    if row.overlong_share:
        budget = config.max_new_tokens
        rewards = rewards + overlong_penalty(lengths, max_length=budget, cache=row.overlong_share * budget).view_as(rewards)
    return rewards


def noisy_verdicts(rewards, rates, *, generator):
    """Flip verdicts of 0 with probability ρ⁺ and verdicts of 1 with probability ρ⁻."""
    if not ((rewards == 0) | (rewards == 1)).all():
        raise ValueError("--reward-noise flips verdicts of 0 and 1, and this reward gives other numbers")
    chance = torch.where(rewards == 0, *rates)
    return (rewards - (torch.rand(rewards.shape, generator=generator, device=rewards.device) < chance).to(rewards)).abs()


def leading_digits(question: str, text: str, answer: str) -> float:
    """The exact step checker of addition: the share of digits that are right, counted from the first to the first wrong one."""
    found = extract_answer(text) or ""
    return len(os.path.commonprefix([found, answer])) / max(len(found), len(answer))


# Copies from lessons 04 and 05.


def overlong_penalty(length, *, max_length, cache):
    """DAPO: 0 up to max_length − cache, then linear to −1 at max_length; lesson 04 explains it."""
    return (-(length - (max_length - cache)) / cache).clamp(max=0)


def graded_reward(right_steps, *, steepness=5.0, centre=0.5):
    """SGPO: 1/(1 + exp(−β(RTS − γ))); lesson 05 explains it."""
    if ((right_steps < 0) | (right_steps > 1)).any():
        raise ValueError("right_steps is the share of right leading steps and must lie in [0, 1]")
    return torch.sigmoid(steepness * (right_steps - centre))


def informative_groups(rewards):
    """True for a group that is not flat, (..., K) → (...); lesson 05 explains it."""
    return rewards.amax(-1) != rewards.amin(-1)


def training_batch(sampler, tokenizer, task: Task, number: int, config: Config, *, row, version: int, generator) -> Rollout:
    """This process's share of batch `number` of the run. DAPO's dynamic sampling replaces flat groups, at most --refills times."""
    options = {"row": row, "number": number, "version": version, "generator": generator}
    if row.worked_examples:
        options["worked"] = batch_examples(task.train, number, count=row.worked_examples, seed=config.seed + 1)
    examples = batch_examples(task.train, number, count=config.prompts_per_step, seed=config.seed)[parallel.rank():: parallel.size()]
    batch = collect(sampler, tokenizer, examples, config, **options)
    for attempt in range(config.refills if row.refill else 0):
        keep = informative_groups(batch.rewards)
        if keep.all():
            break
        # a shuffle of its own for each attempt; a pure function of the batch number again, so that a resumed run repeats it
        seed, count = (config.seed + 1) * 1009 + attempt + 7919 * parallel.rank(), int((~keep).sum())
        more = batch_examples(task.train, number, count=count, seed=seed)
        batch = join(batch, keep, collect(sampler, tokenizer, more, config, **options))
    else:
        if row.refill and not informative_groups(batch.rewards).all():
            warnings.warn(f"groups without a contrast remain after --refills {config.refills}; they stay in the batch, with "
                          "advantage 0 (flat_groups in metrics.jsonl). An easier task or larger groups help", stacklevel=2)
    return batch


def join(first: Rollout, keep, second: Rollout) -> Rollout:
    """The groups of `first` where keep (P,) is True, then those of `second`, padded to one width."""
    rows = keep.repeat_interleave(first.rewards.shape[1])

    def both(name, kept, left=False):
        return pad_and_stack(getattr(first, name)[kept], getattr(second, name), left=left)

    return dataclasses.replace(
        first, rewards=both("rewards", keep), prompt=both("prompt", keep, left=True),
        prompt_mask=both("prompt_mask", keep, left=True),
        **{name: both(name, rows) for name in ("tokens", "mask", "old_logprobs")},
        **{name: torch.cat([getattr(first, name)[rows], getattr(second, name)]) for name in ("truncated", "hinted")
           if getattr(first, name) is not None})


def pad_and_stack(first, second, *, left=False):
    """Two tensors (·, T₁) and (·, T₂) on top of each other; what fills the gap is masked, so 0 will do."""
    width = max(first.shape[1], second.shape[1])
    gaps = [(width - part.shape[1], 0) if left else (0, width - part.shape[1]) for part in (first, second)]
    return torch.cat([torch.nn.functional.pad(part, gap) for part, gap in zip((first, second), gaps)])


def hinted_group(model, tokenizer, examples, prompt, prompt_mask, worked, *, group_size: int, **options):
    """ICPO: the last response of each group is sampled with worked examples in the prompt, and scored without them.

    Returns tokens, mask, logprobs and hinted (B,). The sampler's log-probabilities of hinted tokens are those under the plain
    prompt as well, so that ratios and KL go on to measure staleness, not the hint. Only a model that reads examples gains by
    them: the built-in one has never seen two questions in a row, and is right in 1 % with one, in 40 % without.
    """
    tokens, mask, logprobs = generate(model, prompt, prompt_mask, group_size=group_size - 1, **options)
    shown, shown_mask = encode_prompts(tokenizer, examples, device=prompt.device, worked=worked)
    require(shown.shape[1] + options["max_new_tokens"] <= context_length(model), f"with a worked example a prompt has "
            f"{shown.shape[1]} tokens, and the model's context of {context_length(model)} leaves no room for the answer")
    hinted_tokens, hinted_mask, _ = generate(model, shown, shown_mask, group_size=1, **options)
    with torch.no_grad():
        hinted_logprobs, _ = token_logprobs(model, prompt, hinted_tokens, prompt_mask=prompt_mask, mask=hinted_mask,
                                            temperature=options["temperature"])
    hinted = torch.arange(len(prompt) * group_size, device=prompt.device) % group_size == group_size - 1
    order = hinted.long().argsort(stable=True).argsort()  # the plain rows come first in the stack, then the hinted ones
    pairs = ((tokens, hinted_tokens), (mask, hinted_mask), (logprobs, hinted_logprobs))
    return *(pad_and_stack(*pair)[order] for pair in pairs), hinted


# %% ----------------------------------------------------------------------------------------------- log-probabilities


@in_eval_mode
def token_logprobs(model, prompt, completion, *, prompt_mask=None, mask=None, temperature: float = 1.0, chunk_size=None,
                   way: str = "auto"):
    """log π_θ of each completion token and the policy's entropy there: two (B, T) float32 tensors, 0 where mask is False.

    prompt (P, L) left-padded, completion (B, T) right-padded, B a multiple of P: rows p·B/P … belong to prompt p.
    The entropy carries no gradient. Raises ValueError when B is not a multiple of P, or when a mask has a hole.

    way: how the hidden states are made, all three with one result. "whole": each response behind a copy of its prompt, the plain
    way, and the only one under gradient checkpointing and sharding. "shared": the prompt once, then the responses. "packed": the
    prompt and all its responses in one row, common beginnings once. auto: packed for short groups, shared for long ones.

    Memory: logits of all positions would be (B, T, V). Only states of real completion tokens reach the head, a chunk at a time,
    and backward recomputes each chunk instead of keeping it.
    """
    if completion.shape[0] % prompt.shape[0]:
        raise ValueError(f"{completion.shape[0]} completions cannot be split evenly over {prompt.shape[0]} prompts")
    prompt_mask = torch.ones_like(prompt, dtype=torch.bool) if prompt_mask is None else prompt_mask
    mask = torch.ones_like(completion, dtype=torch.bool) if mask is None else mask
    if way == "auto":
        short = prompt.shape[1] + completion.numel() // prompt.shape[0] <= 512
        way = "whole" if recomputes(model) else "packed" if short and packable(model) else "shared"
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("mask must be True for a row's first tokens and False behind them, without holes")
    if not mask.any():
        return torch.zeros(mask.shape, device=mask.device), torch.zeros(mask.shape, device=mask.device)
    states_of = {"whole": whole_sequence_states, "shared": shared_prompt_states, "packed": packed_states}[way]
    states, chosen = states_of(model, prompt, prompt_mask, completion, mask)

    head, targets = model.get_output_embeddings(), completion.flatten()[chosen]
    chunk_size = chunk_size or max(1, 10_000_000 // head.weight.shape[0])  # 38 MiB of float32 logits
    pieces = []
    for begin in range(0, len(targets), chunk_size):
        piece = functools.partial(_chosen_logprobs, head, temperature=temperature)
        arguments = states[begin: begin + chunk_size], targets[begin: begin + chunk_size]
        recompute = torch.is_grad_enabled() and len(targets) > chunk_size
        pieces.append(checkpoint(piece, *arguments, use_reentrant=False) if recompute else piece(*arguments))
    logprobs, entropy = (torch.cat(part) for part in zip(*pieces))
    empty, places = torch.zeros(completion.shape, device=completion.device), torch.unravel_index(chosen, completion.shape)
    return empty.index_put(places, logprobs), empty.index_put(places, entropy)


def whole_sequence_states(model, prompt, prompt_mask, completion, mask):
    """The states that predict completion tokens, (N, H), and the flat places of those tokens in (B, T): each prompt is run
    again for each of its completions.

    The state at position i predicts token i + 1, so the states of T completion tokens begin at the prompt's last one.
    """
    group, body = completion.shape[0] // prompt.shape[0], model.base_model
    tokens = torch.cat([prompt.repeat_interleave(group, 0), completion], 1)
    attention = torch.cat([prompt_mask.repeat_interleave(group, 0), mask], 1)
    inputs = {**model_inputs(body, tokens, attention, None), "use_cache": False}
    model.train(recomputes(model))
    states = body(**inputs).last_hidden_state[:, prompt.shape[1] - 1: -1]
    return states[mask], mask.flatten().nonzero()[:, 0]


def recompute_activations(model) -> None:
    """Gradient checkpointing: backward recomputes each block from its input. It acts in training mode only, in which dropout
    would act as well and part the trainer from the sampler; so dropout is taken out of the model."""
    new_name = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.24
    (new_name or model.gradient_checkpointing_enable)()
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (isinstance(module, torch.nn.Dropout) or "dropout" in name):
                setattr(module, name, 0.0)


def recomputes(model) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def shared_prompt_states(model, prompt, prompt_mask, completion, mask):
    """The same, but a group shares its prompt, as in `generate`.

    The prompts run once, *with* gradients; their keys and values are repeated, which autograd sums back; then only the
    completions run, and short ones leave early (`column_blocks`).
    """
    from transformers import DynamicCache

    group, body, cache = completion.shape[0] // prompt.shape[0], model.base_model, DynamicCache(config=model.config)
    last = body(**model_inputs(body, prompt, prompt_mask, cache)).last_hidden_state[:, -1].repeat_interleave(group, 0)
    states, chosen = [last[mask[:, 0]]], [mask[:, 0].nonzero()[:, 0] * completion.shape[1]]
    attention = torch.cat([prompt_mask.repeat_interleave(group, 0), mask], 1)
    places = torch.arange(completion.numel(), device=completion.device).view_as(completion)
    rows = torch.arange(len(prompt), device=prompt.device).repeat_interleave(group)  # of the cache, for each completion
    for begin, end, still in column_blocks(mask):
        cache.batch_select_indices(rows[still])
        rows = torch.empty_like(rows).index_copy(0, still, torch.arange(len(still), device=still.device))
        inputs = model_inputs(body, completion[still, begin:end], attention[still, : prompt.shape[1] + end], cache)
        predicted = mask[still, begin + 1: end + 1]
        states.append(body(**inputs).last_hidden_state[predicted])
        chosen.append(places[still, begin + 1: end + 1][predicted])
    return torch.cat(states), torch.cat(chosen)


def packable(model) -> bool:
    """Can a mask of ours and positions of ours say what a token sees? Not where a layer has a sliding window or a bias of its own."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ["sliding" if getattr(config, "sliding_window", None) else "full_attention"]
    return ("position_ids" in forward_parameters(type(model.base_model)) and config._attn_implementation == "sdpa"
            and set(layers) == {"full_attention"} and not getattr(config, "alibi", False) and not config.is_encoder_decoder)


def packed_states(model, prompt, prompt_mask, completion, mask):
    """The same, in one pass with hardly any padding and nothing computed twice: a prompt and its group stand in one row, and what
    several responses have in common at their beginning stands there once, as when they were sampled. So a group is a tree, and a
    mask lets each token see its ancestors. Two groups share a row, the longest with the shortest, which evens out the rows.
    Attention is computed for all pairs in a row, which is cheap for short rows only.
    """
    (count, length), width, device = prompt.shape, completion.shape[1], prompt.device
    group, columns = len(completion) // count, torch.arange(width, device=device)
    inputs = (columns < (mask * columns).amax(1, keepdim=True)).view(count, group, width)  # a response's last token is not run
    tokens = completion.view(count, group, width)
    # first[p, k, t]: the first response of group p whose tokens up to column t are those of response k.
    known = tokens.where(inputs, -1)
    first = (known[:, :, None] == known[:, None]).byte().cumprod(-1).argmax(2)
    # A group's slots: the prompt's L, then T for each response. used: those of real tokens, each beginning once.
    used = torch.cat([prompt_mask, (inputs & (first == torch.arange(group, device=device)[:, None])).flatten(1)], 1)
    position = (prompt_mask.long().cumsum(1) - 1).clamp(min=0)
    position = torch.cat([position, (position[:, -1:] + 1 + columns).repeat(1, group)], 1)
    # Rows: the slots of two groups, of which packing keeps the used ones, in their order. An odd group out stands alone.
    by_size, rows = used.sum(1).argsort(), (count + 1) // 2
    pair = torch.stack([by_size[:rows], by_size.flip(0)[:rows]], 1)
    kept = used[pair]
    kept[:, 1] &= (pair[:, 0] != pair[:, 1])[:, None]
    kept = kept.flatten(1)
    order = kept.byte().argsort(dim=1, descending=True, stable=True)[:, : int(kept.sum(1).max())]
    kept, owner, slot = kept.gather(1, order), pair.gather(1, order // used.shape[1]), order % used.shape[1]
    response, column = (slot - length).clamp(min=0) // width, (slot - length) % width
    beginning = first[owner[:, :, None], response[:, :, None], column[:, None]]  # of the row's response, up to the seen column
    sees = (owner[:, :, None] == owner[:, None]) & ((slot < length)[:, None] | (beginning == response[:, None]))
    sees = sees.tril() | torch.eye(order.shape[1], dtype=torch.bool, device=device)
    states = model.base_model(input_ids=torch.cat([prompt, tokens.flatten(1)], 1)[owner, slot], attention_mask=sees[:, None],
                              position_ids=position[owner, slot], use_cache=False).last_hidden_state
    # Token t > 0 of a response is predicted by the slot where its beginning up to t − 1 ends; token 0 by the prompt's last slot.
    predictor = torch.cat([torch.full_like(first[..., :1], length - 1), (length + first * width + columns)[..., :-1]], -1)
    place = torch.zeros_like(used, dtype=torch.long)
    place[owner[kept], slot[kept]] = kept.flatten().nonzero()[:, 0]
    place = place.gather(1, predictor.flatten(1)).view_as(completion)[mask]
    return states.flatten(0, 1).index_select(0, place), mask.flatten().nonzero()[:, 0]


def column_blocks(mask, *, worthwhile: int = 512):
    """Yield (begin, end, rows): run columns begin … end−1 for these rows, those that still have tokens there.

    One block of full width would spend most of its work on padding when a few responses are long. A block ends where leaving
    the rows that have ended saves most, if that is at least `worthwhile` padding tokens: a pass has a price of its own. The last
    token of a response predicts nothing that is trained on, so it is not run.
    """
    inputs = (mask * torch.arange(mask.shape[1], device=mask.device)).amax(1)  # of each row: the index of its last token
    begin, width = 0, int(inputs.max())
    while begin < width:
        rows = (inputs > begin).nonzero()[:, 0]
        ends = torch.arange(begin + 1, width + 1, device=mask.device)
        saved = (inputs[rows, None] <= ends).sum(0) * (width - ends)
        end = int(ends[saved.argmax()]) if saved.max() >= worthwhile else width
        yield begin, end, rows
        begin = end


def _chosen_logprobs(head, states, targets, *, temperature):
    logits = head(states).float()
    logits = logits / temperature if temperature != 1 else logits
    chosen, log_normaliser = LogSoftmaxAt.apply(logits, targets)
    with torch.no_grad():  # last, for here a recomputation stops: it has all that the gradient needs
        entropy = log_normaliser - (logits - log_normaliser[:, None]).exp_().mul_(logits).sum(-1)
    return chosen, entropy


class LogSoftmaxAt(torch.autograd.Function):
    """log softmax(logits) at one token of each row, and the log-normaliser without a gradient: (N, V), (N,) → (N,), (N,).

    Its gradient, onehot − softmax, takes one more array of the logits' size; put together by autograd it would take several.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        log_normaliser = logits.logsumexp(-1)
        ctx.save_for_backward(logits, targets, log_normaliser)
        ctx.mark_non_differentiable(log_normaliser)
        return logits.gather(-1, targets[:, None])[:, 0] - log_normaliser, log_normaliser

    @staticmethod
    def backward(ctx, gradient, _):
        logits, targets, log_normaliser = ctx.saved_tensors
        spread = (logits - log_normaliser[:, None]).exp_().mul_(-gradient[:, None])
        return spread.scatter_add_(1, targets[:, None], gradient[:, None]), None


# %% ------------------------------------------------------------------------------------------------------ algorithms


@dataclass(frozen=True)
class Algorithm:
    """One row of the family: what it chooses for A, M, W, R and N. Fields left alone are plain REINFORCE with a group mean."""
    baseline: str = "group"             # A: group | leave-one-out | batch | virtual (the group and one more response, a right
                                        #    one) | hinted (ICPO's pool)
    std_normalize: bool = False         # A: divide by the group's standard deviation (ddof 0, + 1e-6)
    per_token_reward: bool = False      # A: made from r/|y| in place of r
    correct_noise: bool = False         # A: made from rewards that undo the verifier's error rates
    process_weight: float | None = None  # A: EP-GRPO's token advantages, with this much of the process signal
    shaping: str = "none"               # A: none | drop (RED-Drop) | weight (RED-Weight) | adaptive-weight
    weight_temperature: float = 1.0     # A: T of exp(A/T)
    clip: str = "none"                  # M: none | one_side | two_side | ring
    eps_low: float = 0.2                # M
    eps_high: float = 0.2               # M
    outer_low: float = 0.6              # M: ring only
    outer_high: float = 2.0             # M: ring only
    level: str = "token"                # M, W: the ratio ρ of a token | sequence (geometric mean) | trajectory (product)
    weight: str = "one"                 # W: one | ratio | ratio-if-worse (where A < 0) | capped-mean (GMPO)
    weight_cap: float = math.inf        # W: min(ρ, cap) in place of ρ
    hint_smoothing: float = 0.1         # W: λ of π/(π + λ) on responses sampled with worked examples
    tau: float = 0.0                    # R: (τ/2)·d², d = log π_θ − log π_old, per token (OPMD)
    beta: float = 0.0                   # R: β·(log π_old − log π_θ), per token (AsymRE's forward KL)
    entropy_target: float | None = None  # R: steer the entropy, in nats per token, by a second batch (AEPO)
    entropy_weight: float = 3.0         # R: how strongly
    aggregation: str = "token-mean"     # N: token-mean | seq-mean-token-mean | seq-mean-token-sum | constant
    refill: bool = False                # data: replace groups whose rewards are all equal (DAPO)
    worked_examples: int = 0            # data: how many the last response of each group sees in its prompt (ICPO)
    overlong_share: float = 0.0         # rewards: the last share of the token budget costs up to 1 (DAPO)
    graded: bool = False                # rewards: an all-wrong group is graded by its right leading steps (SGPO)
    source: str = ""


PAPER = "arXiv 2509.24203"
ALGORITHMS = {
    "reinforce": Algorithm(source="Williams 1992, with the group mean as baseline"),
    "reinforce-is": Algorithm(weight="ratio", source="unclipped token-level importance sampling"),
    "grpo": Algorithm(std_normalize=True, clip="one_side", weight="ratio", source="arXiv 2402.03300, no KL term"),
    "rec-oneside-is": Algorithm(clip="one_side", weight="ratio", source=PAPER),
    "rec-oneside-nois": Algorithm(clip="one_side", source=PAPER),
    "rec-twoside-is": Algorithm(clip="two_side", weight="ratio", source=PAPER),
    "rec-twoside-nois": Algorithm(clip="two_side", source=PAPER),
    "rec-ring-is": Algorithm(clip="ring", weight="ratio", source=PAPER),
    "rec-ring-nois": Algorithm(clip="ring", source=PAPER),
    "rec-gspo-is": Algorithm(clip="one_side", eps_low=3e-4, eps_high=4e-4, level="sequence", weight="ratio",
                             aggregation="seq-mean-token-mean", source=PAPER),
    "rec-gspo-nois": Algorithm(clip="one_side", eps_low=3e-4, eps_high=4e-4, level="sequence",
                               aggregation="seq-mean-token-mean", source=PAPER),
    "rep-opmd": Algorithm(tau=0.2, source="Kimi k1.5, arXiv 2501.12599"),
    "rep-asymre": Algorithm(beta=0.1, source="arXiv 2506.20520"),
    "red-drop": Algorithm(shaping="drop", source=PAPER),
    "red-weight": Algorithm(shaping="weight", source=PAPER),
    "red-weight-oneside": Algorithm(shaping="weight", clip="one_side", source=PAPER),
    "red-weight-adaptive": Algorithm(shaping="adaptive-weight", source="arXiv 2606.20002"),
    # The friends: lessons 02, 04 and 05 show what each adds. Our reading, where a paper leaves it open: the caps of 1.2 (CISPO,
    # TIC-GRPO), A < 0 for a wrong answer (TOPR), ddof 0 over the batch (REINFORCE++), the weight of AEPO's second batch.
    "rloo": Algorithm(baseline="leave-one-out", source="arXiv 2402.14740"),
    "dr-grpo": Algorithm(clip="one_side", weight="ratio", aggregation="constant", source="arXiv 2503.20783"),
    "gspo": Algorithm(std_normalize=True, clip="one_side", eps_low=3e-4, eps_high=4e-4, level="sequence", weight="ratio",
                      aggregation="seq-mean-token-mean", source="arXiv 2507.18071"),
    "cispo": Algorithm(std_normalize=True, weight="ratio", weight_cap=1.2, source="arXiv 2506.13585"),
    "gmpo": Algorithm(std_normalize=True, clip="one_side", eps_low=1 - math.exp(-0.4), eps_high=math.exp(0.4) - 1,
                      weight="capped-mean", aggregation="seq-mean-token-mean", source="arXiv 2507.20673"),
    "tis": Algorithm(weight="ratio", weight_cap=2.0, source="truncated importance sampling, Ionides 2008"),
    "topr": Algorithm(level="trajectory", weight="ratio-if-worse", weight_cap=1.0, aggregation="seq-mean-token-sum",
                      source="arXiv 2503.14286"),
    "reinforce-plus-plus": Algorithm(baseline="batch", clip="one_side", weight="ratio", source="arXiv 2501.03262"),
    "ngrpo": Algorithm(baseline="virtual", clip="one_side", eps_low=0.16, eps_high=0.24, weight="ratio",
                       source="arXiv 2509.18851"),
    "tic-grpo": Algorithm(std_normalize=True, per_token_reward=True, level="trajectory", weight="ratio", weight_cap=1.2,
                          aggregation="seq-mean-token-sum", source="arXiv 2508.02833"),
    "dapo": Algorithm(std_normalize=True, clip="one_side", eps_high=0.28, weight="ratio", refill=True, overlong_share=0.2,
                      source="arXiv 2503.14476"),
    "noise-corrected-grpo": Algorithm(correct_noise=True, clip="one_side", weight="ratio", source="arXiv 2510.18924"),
    "sgpo": Algorithm(std_normalize=True, clip="one_side", weight="ratio", graded=True, source="arXiv 2505.11595"),
    "aepo": Algorithm(std_normalize=True, clip="one_side", weight="ratio", entropy_target=0.7, source="arXiv 2510.08141"),
    "icpo": Algorithm(baseline="hinted", clip="one_side", weight="ratio", worked_examples=1, source="arXiv 2510.26519"),
    "ep-grpo": Algorithm(std_normalize=True, clip="one_side", weight="ratio", process_weight=0.1,
                         aggregation="seq-mean-token-mean", source="our reading of arXiv 2605.04960"),
}


def find_algorithm(algorithm, **overrides) -> Algorithm:
    """The row itself, or the row of that name, with every override that is not None put in."""
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {algorithm!r}; choose from: {', '.join(ALGORITHMS)}")
        algorithm = ALGORITHMS[algorithm]
    return dataclasses.replace(algorithm, **{k: v for k, v in overrides.items() if v is not None})


def chosen_row(config: Config) -> Algorithm:
    """The row of --algorithm, with the flags that override it."""
    overrides = {f.name: getattr(config, f.name) for f in dataclasses.fields(AlgorithmOptions) if f.name != "algorithm"}
    return find_algorithm(config.algorithm, **overrides)


# The next functions are copies from lessons 02, 04 and 05; a test holds them equal.


def group_advantages(rewards, *, leave_one_out=False, std_normalize=False, eps=1e-6):
    """A_i = r_i − r̄ of each response against its own group, (..., K) → (..., K); lesson 02 explains it."""
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError("a group needs at least 2 responses to the same prompt: sample K ≥ 2, "
                         f"not {tuple(rewards.shape)}")
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite: replace NaN and infinity (by 0, say) before grouping")
    group_size = rewards.shape[-1]
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if std_normalize:
        advantages = advantages / (rewards.std(-1, correction=0, keepdim=True) + eps)
    if leave_one_out:
        advantages = advantages * (group_size / (group_size - 1))
    # In float32 the mean of seven times 0.1 is not 0.1, and a tiny std blows that error up: so ask the rewards.
    flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(flat, torch.zeros_like(advantages), advantages)


def clip_mask(ratio, advantages, *, clip, eps_low=0.2, eps_high=0.2, outer_low=0.6, outer_high=2.0):
    """M: True where a token takes part in the update, False where it has moved too far; lesson 04 explains it."""
    if clip not in ("none", "one_side", "two_side", "ring"):
        raise ValueError(f"clip must be none, one_side, two_side or ring, not {clip!r}")
    if not (eps_low >= 0 and eps_high >= 0):
        raise ValueError(f"eps_low and eps_high must be ≥ 0, got {eps_low} and {eps_high}; 0.2 and 0.2 are usual")
    if clip == "ring" and not (outer_low > eps_low and outer_high > eps_high):
        raise ValueError("the ring must lie outside the inner bounds: need outer_low > eps_low and outer_high > "
                         f"eps_high, got {outer_low}, {eps_low} and {outer_high}, {eps_high}")
    if advantages.dim() not in (0, ratio.dim()):
        # (B,) against (B, T) would line up with the tokens, silently when B = T.
        raise ValueError("advantages need as many dimensions as ratio: pass advantages.unsqueeze(-1) for one per "
                         f"response; got {tuple(advantages.shape)} for ratio {tuple(ratio.shape)}")
    above, below = ratio > 1 + eps_high, ratio < 1 - eps_low
    raised, lowered = advantages > 0, advantages < 0  # whether the update makes the token likelier
    if clip == "none":
        clipped = torch.zeros_like(above & raised)
    elif clip == "one_side":
        clipped = (raised & above) | (lowered & below)
    elif clip == "two_side":
        clipped = (raised | lowered) & (above | below)
    else:
        clipped = raised & (above | (below & (ratio > 1 - outer_low)))
        clipped = clipped | (lowered & (below | (above & (ratio < 1 + outer_high))))
    return ~clipped


def clean_tokens(logprobs, old_logprobs, advantages, mask):
    """Check shapes and put 0 on padding before any arithmetic; lesson 04 explains it."""
    if not logprobs.shape == old_logprobs.shape == mask.shape:
        raise ValueError("logprobs, old_logprobs and mask need one shape (B, T), got "
                         f"{tuple(logprobs.shape)}, {tuple(old_logprobs.shape)} and {tuple(mask.shape)}")
    if advantages.shape not in (logprobs.shape, logprobs.shape[:-1], (*logprobs.shape[:-1], 1)):
        raise ValueError("advantages must be (B,), one per response, or (B, T), one per token; "
                         f"got {tuple(advantages.shape)} for logprobs {tuple(logprobs.shape)}")
    if mask.dtype != torch.bool:
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("mask must hold 0 and 1 only; was another tensor passed in its place?")
        mask = mask.bool()
    if advantages.dim() < logprobs.dim():
        advantages = advantages.unsqueeze(-1)
    if logprobs.dtype in (torch.float16, torch.bfloat16):
        logprobs = logprobs.float()
    old_logprobs, advantages = old_logprobs.detach().to(logprobs.dtype), advantages.detach().to(logprobs.dtype)
    return *(torch.where(mask, tensor, 0.0) for tensor in (logprobs, old_logprobs, advantages)), mask


def red_drop(rewards, *, generator=None):
    """RED-Drop: (advantages, keep) with random surplus negatives dropped, (..., K); lesson 05 explains it."""
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError("a group needs at least 2 responses to the same prompt: sample K ≥ 2, "
                         f"not {tuple(rewards.shape)}")
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite: replace NaN and infinity (by 0, say) before grouping")
    # r_i − r̄ as the mean of r_i − r_j over j: equal rewards differ by exactly 0 in any precision, while the float32 mean
    # of seven times 0.1 is larger than 0.1. A reward AT the mean is positive, so its rounding must not decide either.
    difference = rewards.unsqueeze(-1) - rewards.unsqueeze(-2)
    rounding = 4 * torch.finfo(rewards.dtype).eps * rewards.abs().amax(-1, keepdim=True)
    positive = difference.mean(-1) >= -rounding
    # A random rank for each negative, 0, 1, …, with the positives behind them: rank < number of positives may stay.
    device = rewards.device if generator is None else generator.device
    noise = torch.rand(rewards.shape, generator=generator, device=device).to(rewards.device)
    rank = noise.masked_fill(positive, 2.0).argsort(-1).argsort(-1)
    keep = positive | (rank < positive.sum(-1, keepdim=True))
    from_kept = torch.where(keep.unsqueeze(-2), difference, 0.0).sum(-1) / keep.sum(-1, keepdim=True)
    return torch.where(keep, from_kept, 0.0), keep


def red_weight(advantages, *, temperature=1.0):
    """RED-Weight: exp(A/T), (..., K) → (..., K); lesson 05 explains it."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}; a large one means no weighting")
    if not torch.isfinite(advantages).all():
        raise ValueError("advantages must be finite: check the rewards they were made from")
    weights = (advantages / temperature).exp()
    if not torch.isfinite(weights).all():
        raise ValueError(f"exp(A/T) overflows at A = {advantages.max():g}, T = {temperature}: raise the temperature")
    return weights


def adaptive_temperature(advantages, lengths, *, low=0.8, high=100.0):
    """The T at which Σ A·exp(A/T)·L = 0 for one group, or None; lesson 05 explains it."""
    if advantages.dim() != 1 or advantages.shape != lengths.shape or len(advantages) < 2:
        raise ValueError("advantages and lengths must be one group of K ≥ 2 responses, both (K,), "
                         f"not {tuple(advantages.shape)} and {tuple(lengths.shape)}; loop over the groups")
    if not 0 < low < high < math.inf:
        raise ValueError(f"the bracket must satisfy 0 < low < high, not low = {low}, high = {high}")
    advantages, lengths = (tensor.detach().to("cpu", torch.float64) for tensor in (advantages, lengths))
    if not (torch.isfinite(advantages).all() and torch.isfinite(lengths).all() and (lengths >= 0).all()):
        raise ValueError("advantages and lengths must be finite, and lengths must be ≥ 0")
    pull = advantages * lengths
    if pull.sum() >= -1e-6 * pull.abs().sum():  # the rounding of a float32 mean is no imbalance
        return None

    def still_negative(temperature):  # falls with T; dividing by the largest weight keeps the sign and the range
        return (pull * ((advantages - advantages.max()) / temperature).exp()).sum() < 0

    if still_negative(low):
        return float(low)
    for _ in range(20):
        if high - low < 0.05:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if still_negative(middle) else (middle, high)
    return float(high)


def batch_whitened_advantages(rewards, *, eps=1e-6):
    """REINFORCE++: one mean and one standard deviation for the whole batch, (..., K) → (..., K); lesson 02 explains it."""
    return group_advantages(rewards.reshape(-1), std_normalize=True, eps=eps).view(rewards.shape)


def ngrpo_advantages(rewards, *, max_reward=1.0, eps=1e-6):
    """NGRPO: each group normalised together with one virtual right response, (..., K) → (..., K); lesson 02 explains it."""
    if (rewards > max_reward).any():
        raise ValueError(f"max_reward must be the largest possible reward, but {rewards.max():g} > {max_reward:g}")
    pool = torch.cat([rewards, torch.full_like(rewards[..., :1], max_reward)], -1)
    advantages = (rewards - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    flat = pool.amax(-1, keepdim=True) == pool.amin(-1, keepdim=True)
    return torch.where(flat, torch.zeros_like(advantages), advantages)


def noise_corrected_rewards(rewards, *, false_positive_rate, false_negative_rate):
    """r̂ = (r̃ − ρ⁺)/(1 − ρ⁺ − ρ⁻), unbiased though the verifier errs; lesson 02 explains it."""
    if not (false_positive_rate >= 0 and false_negative_rate >= 0 and false_positive_rate + false_negative_rate < 1):
        raise ValueError("the two rates must be ≥ 0 and sum to less than 1, else the verifier says nothing about r; "
                         f"got {false_positive_rate} and {false_negative_rate}")
    return (1.0 * rewards - false_positive_rate) / (1 - false_positive_rate - false_negative_rate)


def hint_weight(probs, *, smoothing=0.1):
    """ICPO: f(x) = x/(x + λ); lesson 05 explains it."""
    if not smoothing > 0:
        raise ValueError(f"smoothing must be positive, not {smoothing}")
    return probs / (probs + smoothing)


def icpo_advantages(plain_rewards, hinted_reward, *, step, decay=400, eps=1e-6):
    """ICPO: plain rollouts and one hinted one, normalised together, (..., G−1), (...) → (..., G); lesson 05 explains it."""
    bonus = max(0.0, 1 - step / decay)
    hinted = torch.where(hinted_reward > 0, hinted_reward + bonus, hinted_reward)
    pool = torch.cat([plain_rewards, hinted.unsqueeze(-1)], -1)
    advantages = (pool - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    return torch.where(informative_groups(pool).unsqueeze(-1), advantages, 0.0)


def process_advantages(advantages, rewards, log_ratio, entropy, mask, *, process_weight):
    """EP-GRPO's token advantages, **our reading**: s·(|A| + w·σ(s·d))·g, (P, K) advantages and rewards → (B, T).

    s, the sign of the outcome advantage, or of the outcome itself (r > 0 or not) in a flat group, anchors everything: no token
    is pushed the other way. d, the policy's divergence from the sampler at the token, is the implicit process signal: σ(s·d)
    says how far the policy agrees with the outcome there, and ½ of w is left on fresh data and in flat groups. g, the token's
    share of the response's entropy times its length, is gate and progress in one: the shares of a response sum to 1, so
    neither padding nor cutting a token in two changes its total.
    """
    flat = ~informative_groups(rewards)[:, None]
    sign = torch.where(flat, torch.where(rewards > 0, 1.0, -1.0), advantages.sign()).reshape(-1, 1)
    entropy = torch.where(mask, entropy + 1e-6, 0.0)  # a response without any entropy is gated evenly
    gate = entropy * mask.sum(1, keepdim=True) / entropy.sum(1, keepdim=True)
    return sign * (advantages.abs().reshape(-1, 1) + process_weight * torch.sigmoid(sign * log_ratio)) * gate


def shaped_advantages(rewards, lengths, *, algorithm: Algorithm, generator=None, noise_rates=(0.0, 0.0), number=1):
    """A of the row: (P, K) rewards and response lengths → (P, K) advantages, with RED's dropping or weighting put in.

    noise_rates: (ρ⁺, ρ⁻) that correct_noise undoes; number: which batch of the run this is, for ICPO's decaying bonus.
    """
    if algorithm.correct_noise:
        rewards = noise_corrected_rewards(rewards, false_positive_rate=noise_rates[0], false_negative_rate=noise_rates[1])
    if algorithm.per_token_reward:
        rewards = rewards / lengths
    if algorithm.shaping == "drop":
        return red_drop(rewards, generator=generator)[0]
    if algorithm.baseline == "batch":
        return batch_whitened_advantages(rewards)
    if algorithm.baseline == "virtual":
        return ngrpo_advantages(rewards, max_reward=max(1.0, rewards.max().item()))  # a reward of the user's may exceed 1
    if algorithm.baseline == "hinted":
        return icpo_advantages(rewards[:, :-1], rewards[:, -1], step=number - 1)
    advantages = group_advantages(rewards, leave_one_out=algorithm.baseline == "leave-one-out",
                                  std_normalize=algorithm.std_normalize)
    if algorithm.shaping == "weight":
        advantages = advantages * red_weight(advantages, temperature=algorithm.weight_temperature)
    if algorithm.shaping == "adaptive-weight":
        for group, length in zip(advantages, lengths):
            if temperature := adaptive_temperature(group, length):
                group *= red_weight(group, temperature=temperature)
    return advantages


def token_weights(mask, *, aggregation: str, tokens: int | None = None, sequences: int | None = None, constant=None):
    """N: the weight of each token in the named mean, (B, T). Micro-batches and ranks pass the totals of the whole batch.

    constant: the fixed token budget of a response that aggregation "constant" (Dr. GRPO) divides by, in place of its length.
    """
    if aggregation == "constant" and not constant:
        raise ValueError("aggregation 'constant' needs constant, a token budget such as the longest allowed response")
    tokens, sequences = tokens or mask.sum().clamp(min=1), sequences or mask.shape[0]
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    denominator = {"token-mean": tokens, "seq-mean-token-mean": sequences * lengths, "seq-mean-token-sum": sequences,
                   "constant": sequences * (constant or 1)}[aggregation]
    return mask * (1.0 / denominator)


def policy_ratio(log_ratio, mask, *, level: str):
    """ρ that masks and weighs a token, detached, (B, T): the token's own, or one for all tokens of the response."""
    log_ratio = log_ratio.detach()
    if level != "token":
        log_ratio = log_ratio.sum(1, keepdim=True).expand(mask.shape)
    if level == "sequence":
        log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-20, 20).exp()


def importance_weight(ratio, log_ratio, advantages, mask, *, row: Algorithm):
    """W of the row, detached, (B, T)."""
    if row.weight == "capped-mean":  # geometric mean of the ratios, each bounded on the side where clip_mask bounds it
        above, below = math.log1p(row.eps_high), math.log(max(1 - row.eps_low, 1e-9))
        bounded = torch.where(advantages > 0, log_ratio.clamp(max=above), log_ratio.clamp(min=below))
        return policy_ratio(bounded, mask, level="sequence")
    capped = ratio.clamp(max=row.weight_cap)
    return torch.where(advantages < 0, capped, 1.0) if row.weight == "ratio-if-worse" else capped


def policy_loss(logprobs, old_logprobs, advantages, mask, *, algorithm, eps_low=None, eps_high=None, outer_low=None,
                outer_high=None, tau=None, beta=None, weights=None, constant=None, hinted=None):
    """The one equation. Returns (loss, metrics): a scalar to minimise, and token means as 0-d tensors.

    logprobs, old_logprobs, mask: (B, T); advantages: (B,) or (B, T); algorithm: a row or its name; the other options override
    the row. weights: (B, T) from token_weights, when this is a part of a larger batch; by default this is the whole batch.
    constant: see token_weights. hinted: (B,) responses sampled under another prompt, whose W is π/(π + λ), unclipped.
    Positions where mask is False may hold anything, NaN too: they are cut out before any arithmetic.
    """
    row = find_algorithm(algorithm, eps_low=eps_low, eps_high=eps_high, outer_low=outer_low, outer_high=outer_high, tau=tau,
                         beta=beta)
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    advantages, log_ratio = advantages.expand(mask.shape), logprobs - old_logprobs
    ratio = policy_ratio(log_ratio, mask, level=row.level)

    keep = clip_mask(ratio, advantages, clip=row.clip, eps_low=row.eps_low, eps_high=row.eps_high,
                     outer_low=row.outer_low, outer_high=row.outer_high)
    weight = 1.0 if row.weight == "one" else importance_weight(ratio, log_ratio, advantages, mask, row=row)
    if hinted is not None:
        keep = keep | hinted[:, None]
        weight = torch.where(hinted[:, None], hint_weight(logprobs.detach().exp(), smoothing=row.hint_smoothing), weight)
    per_token = -torch.where(keep, weight * advantages, 0.0) * logprobs
    per_token = per_token + row.tau / 2 * log_ratio**2 - row.beta * log_ratio
    weights = token_weights(mask.to(logprobs.dtype), aggregation=row.aggregation, constant=constant) \
        if weights is None else weights
    loss = (weights * per_token).sum()

    with torch.no_grad():
        count = mask.sum().clamp(min=1)
        token_ratio = log_ratio.clamp(-20, 20).exp()
        metrics = {
            "clip_fraction": (mask & ~keep).sum() / count,
            "ratio_mean": torch.where(mask, token_ratio, 0.0).sum() / count,
            # k3 on the sampler's own tokens estimates KL(π_old ‖ π_θ): never negative, and far less noisy than −log ρ
            "kl_old": torch.where(mask, token_ratio - 1 - log_ratio, 0.0).sum() / count,
        }
    return loss, metrics


# %% -------------------------------------------------------------------------------------------------------- schedule

def rollout_version(step, *, sync_interval, sync_offset):
    """v(n) = I·max(0, ⌊(n−m−1)/I⌋): updates the sampler's weights had seen for the batch of step n (1-based)."""
    for name, value, least in (("step", step, 1), ("sync_interval", 1 if sync_interval is None else sync_interval, 1),
                               ("sync_offset", sync_offset, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number ≥ {least}, got {value!r}")
    if sync_interval is None:
        return 0
    return sync_interval * max(0, (step - sync_offset - 1) // sync_interval)


def staleness(step, *, sync_interval, sync_offset):
    """s(n) = (n−1) − v(n): how many updates step n (1-based) is ahead of its data's sampler."""
    return step - 1 - rollout_version(step, sync_interval=sync_interval, sync_offset=sync_offset)


def batch_examples(examples: list, number: int, *, count: int, seed: int) -> list:
    """The examples of batch `number` (1-based): consecutive slices of one shuffle per pass over the data, a pure function."""
    picked = []
    for position in range((number - 1) * count, number * count):
        epoch, index = divmod(position, len(examples))
        picked.append(examples[_shuffled(len(examples), seed, epoch)[index]])
    return picked


@functools.lru_cache(maxsize=4)
def _shuffled(size: int, seed: int, epoch: int) -> list:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


# %% -------------------------------------------------------------------------------------------------------- training


def train_step(model, optimizer, batch: Rollout, config: Config, *, algorithm: Algorithm, generator, sample=None) -> dict:
    """One optimizer step on one batch, in micro-batches whose gradients add up to the whole batch's.

    sample: `generate` with the policy and all but the prompts, the group size and the temperature filled in (AEPO).
    """
    lengths, sharded = batch.mask.sum(1).view_as(batch.rewards), parallel.is_sharded(model)
    rates = rate_pair(config.noise_rates or config.reward_noise, flag="--noise-rates")
    # Advantages and denominators belong to the whole batch, wherever its parts were sampled: a mean of the processes' own means
    # would weigh the tokens of short responses more.
    all_rewards, all_lengths = parallel.gather(batch.rewards), parallel.gather(lengths)
    advantages = shaped_advantages(all_rewards, all_lengths, algorithm=algorithm, generator=generator, noise_rates=rates,
                                   number=batch.number).chunk(parallel.size())[parallel.rank()]
    total = all_lengths.sum()
    weights = token_weights(batch.mask, aggregation=algorithm.aggregation, tokens=total, sequences=all_lengths.numel(),
                            constant=config.max_new_tokens)
    # Without a regulariser a group whose advantages are all 0 has no gradient: its tokens are only read, for the metrics.
    teaches = (advantages != 0).any(1) | (algorithm.tau > 0) | (algorithm.beta > 0) | (algorithm.process_weight is not None) | sharded
    copies = lengths.shape[1] if sharded or recomputes(model) else 1  # of a prompt that run: one for its group, or one for each response
    parts = list(micro_batches(lengths, batch.prompt.shape[1] * copies, teaches, budget=config.micro_batch_tokens))
    read = model.token_logprobs if sharded else functools.partial(token_logprobs, model)
    sums, all_logprobs = Counter(), torch.zeros_like(batch.old_logprobs)
    optimizer.zero_grad()
    for number in range(parallel.largest(len(parts)) if sharded else len(parts)):
        part, rows, width, with_gradient = parts[number % len(parts)]
        counts = float(number < len(parts))  # 0: a process that is done joins the others' passes, which gather its weights
        mask, old_logprobs = batch.mask[rows, :width], batch.old_logprobs[rows, :width]
        with torch.set_grad_enabled(with_gradient), autocast(config, batch.tokens.device):
            logprobs, entropy = read(batch.prompt[part], batch.tokens[rows, :width], mask=mask, prompt_mask=batch.prompt_mask[part],
                                     temperature=config.temperature, way="whole" if sharded else "auto")
        part_advantages = advantages[part].flatten()
        if algorithm.process_weight is not None:
            part_advantages = process_advantages(advantages[part], batch.rewards[part], logprobs.detach() - old_logprobs, entropy,
                                                 mask, process_weight=algorithm.process_weight)
        loss, metrics = policy_loss(logprobs, old_logprobs, part_advantages, mask, algorithm=algorithm,
                                    weights=weights[rows, :width] * counts,
                                    hinted=None if batch.hinted is None else batch.hinted[rows])
        if with_gradient:
            (loss * parallel.size() if sharded else loss).backward()
        share = counts * mask.sum() / total
        sums.update({"loss": loss.detach(), "entropy": counts * entropy.sum() / total, **{k: share * v for k, v in metrics.items()}})
        all_logprobs[rows, :width] = logprobs.detach()
    metrics = dict(zip(sums, parallel.add_up(torch.stack(list(sums.values())))))
    if algorithm.entropy_target is not None:
        metrics["loss"] += steer_entropy(model, batch, config, row=algorithm, entropy=metrics["entropy"], sample=sample)
    if not sharded:
        parallel.add_gradients(model.parameters())
    grad_norm = parallel.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm))
    if not torch.isfinite(metrics["loss"] + grad_norm):
        raise FloatingPointError(f"the loss ({metrics['loss']:.3g}) or its gradient norm ({grad_norm:.3g}) is not finite")
    optimizer.step()
    metrics |= off_policyness(all_logprobs, batch.old_logprobs, batch.mask)
    metrics |= {"grad_norm": grad_norm, "reward": all_rewards.mean(), "completion_length": all_lengths.float().mean(),
                "truncated": parallel.gather(batch.truncated.float()).mean(),
                "flat_groups": (all_rewards.amax(1) == all_rewards.amin(1)).float().mean()}
    return {k: float(v) for k, v in metrics.items()}


def micro_batches(lengths, prompt_tokens: int, teaches, *, budget: int):
    """Split a batch into passes of at most `budget` tokens, padding included, and at least one prompt.

    lengths: (P, K) response lengths; prompt_tokens: what the prompt of a group takes; teaches: (P,) groups that have a gradient,
    which get passes of their own. Groups of like length go together, and each pass is only as wide as its longest response.
    Yields (prompts, rows, width, with_gradient). When few groups are without a gradient, or all, every group runs with it: in the
    last case for the optimizer's momentum.
    """
    longest, group = lengths.amax(1), lengths.shape[1]
    if not 0 < teaches.float().mean() < 0.75:
        teaches = torch.ones_like(teaches)
    for wanted in (True, False):
        order = longest.argsort(descending=True, stable=True)
        order = order[teaches[order] == wanted]
        while len(order):
            width = int(longest[order[0]])
            part = order[: max(1, budget // (prompt_tokens + group * width))].sort().values
            order = order[len(part):]
            yield part, (part[:, None] * group + torch.arange(group, device=part.device)).flatten(), width, wanted


def steer_entropy(model, batch: Rollout, config: Config, *, row: Algorithm, entropy, sample):
    """AEPO: add the gradient of REINFORCE, with reward 1, on the policy's own samples at temperature 1.2 or 0.8.

    Imitating samples that are more random than the policy raises its entropy, imitating less random ones lowers it (lesson 05).
    They come from the policy itself at this step: a stale sampler's would pull towards that sampler too.
    """
    heat = 1.2 if entropy < row.entropy_target else 0.8
    with autocast(config, batch.tokens.device):
        tokens, mask, _ = sample(model, batch.prompt, batch.prompt_mask, group_size=config.group_size,
                                 temperature=config.temperature * heat)
    with autocast(config, batch.tokens.device):  # another one, which does not know the weights that sampling cast without gradients
        logprobs, _ = token_logprobs(model, batch.prompt, tokens, mask=mask, prompt_mask=batch.prompt_mask,
                                     temperature=config.temperature)
    loss = -row.entropy_weight * logprobs.sum() / parallel.add_up(mask.sum())
    loss.backward()
    return parallel.add_up(loss.detach())


def off_policyness(logprobs, old_logprobs, mask) -> dict:
    """How far the batch is from the policy: quantiles of the token ratio, and the effective sample size of the responses.

    ess = (Σ ρ_seq)² / (B Σ ρ_seq²), 1 when on-policy and 1/B when one response carries all the weight.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    sequence = torch.softmax(parallel.gather(log_ratio.sum(1)), 0)
    ratio = parallel.gather(log_ratio[mask]).clamp(-20, 20).exp().sort().values
    at = {f"ratio_p{q:02d}": ratio[int(q / 100 * (len(ratio) - 1))] for q in (5, 50, 95)}
    return {**at, "ratio_max": ratio[-1], "ess": 1 / (sequence**2).sum() / len(sequence)}


def autocast_dtype(config: Config, device):
    return torch.bfloat16 if config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda") else None


def autocast(config: Config, device):
    """bfloat16 matrix products on float32 weights, where asked for; log-softmax, ratios and losses stay float32."""
    dtype = autocast_dtype(config, device)
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def train(config: Config) -> dict:
    """One run, from the base model or its last checkpoint to a complete run directory. Returns before, after and seconds."""
    from tqdm import tqdm

    started, out = time.perf_counter(), pathlib.Path(config.out)
    require(config.resume or config.overwrite or not ((out / "metrics.jsonl").exists() or checkpoints(out)),
            f"{out} already holds a run: add --resume to continue it, --overwrite to replace it, or choose another --out")
    device, row = parallel.start(pick_device(config.device)), chosen_row(config)
    seed_everything(process_seed(config.seed))  # for a reward of the user's; what is drawn here comes from generators of its own
    main_process = parallel.rank() == 0
    state = load_checkpoint(out) if config.resume else None
    with parallel.first_process_first():
        task = load_task(config)
        model, tokenizer = load_model(state["folder"] if state else config.model, device=device, cache_dir=config.cache_dir,
                                      task=config.task)
    task = drop_long_prompts(task, model, tokenizer, config)
    require(len(task.evaluation) >= parallel.size(), f"{len(task.evaluation)} held-out questions are too few for {parallel.size()} processes")
    config = working_engine(model, tokenizer, task, config)
    # While the two are refreshed together the sampler is the policy itself. It is a second copy of the weights only when it is
    # stale, when the policy is in pieces, or when the engine needs its weights in bfloat16.
    copied = config.sync_interval > 1 or config.offline or config.shard or (config.engine == "paged" and device.type == "cuda")
    sampler = copy.deepcopy(model) if copied else model
    if copied and device.type == "cuda":
        for weight in sampler.parameters():  # the weights alone: rotary frequencies in bfloat16 would be wrong at far positions
            weight.data = weight.data.to(autocast_dtype(config, device) or torch.float32)
    if config.gradient_checkpointing:
        recompute_activations(model)
    if config.shard:
        parallel.shard(model, token_logprobs, compute_dtype=autocast_dtype(config, device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=device.type != "mps")
    sampling = torch.Generator(device).manual_seed(process_seed(config.seed))
    dropping = torch.Generator().manual_seed(config.seed)  # decided for the whole batch, alike in all processes
    version, queue, first_step = 0, deque(), 1  # the queue is the first-in first-out buffer between sampler and trainer

    if state:
        require("processes" in state, f"the checkpoint in {out} was saved by an older version of this file, which alone can continue it")
        require(len(state["processes"]) == parallel.size(), f"the run in {out} was saved by {len(state['processes'])} processes and "
                f"continues with as many, not with {parallel.size()}: see torchrun's --nproc-per-node")
        mine = state["processes"][parallel.rank()]
        queue = deque(Rollout(**parallel.move(batch, device)) for batch in mine["queue"])
        version, first_step = state["version"], state["step"] + 1
        parallel.load_optimizer_state(optimizer, state["optimizer"])
        optimizer.param_groups[0]["lr"] = config.learning_rate  # a flag given with --resume counts
        if copied and state["sampler"]:  # else it was the policy itself
            sampler.load_state_dict(state["sampler"])
        del state["optimizer"], state["sampler"]
        restore_random(mine["random"], sampling, dropping)
    parallel.wait()  # all have seen what --out holds
    if main_process:
        lock = only_writer(out)  # noqa: F841 (held while this function runs)
        keep_lines(out, last_step=state["step"]) if state else clear_run(out)
        for leftover in [*out.glob("unfinished-*"), *out.glob("checkpoint/unfinished-*"), *checkpoints(out)[:-1]]:  # after a kill
            discard(leftover) if leftover.is_dir() else leftover.unlink()
        store_config(out, config)

    def save(step):
        mine = {"queue": [parallel.move(dataclasses.asdict(batch), "cpu") for batch in queue],
                "random": random_state(sampling, dropping)}
        saved = {"version": version, "optimizer": parallel.optimizer_state(optimizer), "processes": parallel.gather_objects(mine),
                 "sampler": parallel.move(sampler.state_dict(), "cpu") if copied and main_process else None}
        policy = whole_policy()
        if main_process:
            save_checkpoint(out, step, policy, tokenizer, saved)
        parallel.wait()

    def whole_policy():
        """The policy as an ordinary model, to be saved. If it is sharded, rank 0 puts it together in the CPU's memory."""
        if not config.shard:
            return model
        weights = parallel.whole_weights(model)
        if not main_process:
            return None
        plain = type(sampler)(model.config).float()
        plain.load_state_dict(weights)
        plain.generation_config = sampler.generation_config
        return plain

    def measure():
        """An evaluation of the policy. If it is sharded, it borrows the sampler's place."""
        if not config.shard:
            return evaluate(model, tokenizer, task, config)
        stale = {name: weight.to("cpu", copy=True) for name, weight in sampler.state_dict().items()}
        parallel.copy_weights(model, sampler)
        metrics = evaluate(sampler, tokenizer, task, config)
        sampler.load_state_dict(stale)
        return metrics

    sample = functools.partial(generate, max_new_tokens=config.max_new_tokens, eos_ids=stop_ids(model, tokenizer),
                               pad_id=tokenizer.pad_token_id, generator=sampling)

    def record(metrics, samples=()):
        if not main_process:
            return
        append(out / "metrics.jsonl", metrics)
        append(out / "samples.jsonl", *({"step": metrics["step"], **sample} for sample in samples))
        if board:
            for name, value in metrics.items():
                board.add_scalar(name, value, metrics["step"])
            board.flush()

    if board := config.tensorboard and main_process:
        from torch.utils.tensorboard import SummaryWriter
        board = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)
    steps, explained = range(first_step, config.steps + 1), False
    with interruptions() as interruption, tqdm(steps, initial=first_step - 1, total=config.steps, desc=config.algorithm,
                                               mininterval=redraw_seconds(), disable=not main_process) as progress:
        if not state:
            with stopping_in_order(0, out):
                record({"step": 0, **measure()})
                save(0)  # a disk that cannot hold a checkpoint shows now, not after an hour
        for step in progress:
            with stopping_in_order(step, out):
                began = time.perf_counter()
                if (step - 1) % config.sync_interval == 0 and not config.offline:
                    version = step - 1
                    if copied:
                        parallel.copy_weights(model, sampler)  # numbers; a mere reference is never stale
                while len(queue) <= config.sync_offset:
                    queue.append(training_batch(sampler, tokenizer, task, step + len(queue), config, row=row, version=version,
                                                generator=sampling))
                batch = queue.popleft()
                metrics = {"step": step, "staleness": step - 1 - batch.version}
                metrics |= train_step(model, optimizer, batch, config, algorithm=row, generator=dropping,
                                      sample=sample)
                responses = config.prompts_per_step * config.group_size
                metrics["tokens_per_second"] = responses * metrics["completion_length"] / (time.perf_counter() - began)
                if step % config.eval_every == 0 or step == config.steps:
                    metrics |= measure()
                record(metrics, batch.samples)
                # asked once, so that a signal from here on finds the next step; and of all, so that all stop at the same one
                signals = parallel.gather_objects(list(interruption))
                signals = [name for names in signals for name in names]
                if step % config.save_every == 0 or step == config.steps or signals:
                    save(step)
            progress.set_postfix(reward=f"{metrics['reward']:.2f}", stale=metrics["staleness"],
                                 clip=f"{metrics['clip_fraction']:.3f}", refresh=False)
            if abs(metrics["loss"]) < 0.01 < metrics["grad_norm"] and not explained:
                explained = True
                progress.write(f"step {step}: loss ≈ 0 ({metrics['loss']:.4f}) and gradient norm > 0 ({metrics['grad_norm']:.2f}) is "
                               "normal: advantages sum to 0 in a group. Watch reward and eval_accuracy instead.")
            if signals and step < config.steps:
                raise RunStopped(f"by {signals[0]} after step {step}; continue with --resume --out {out}")

    with stopping_in_order(config.steps, out):
        final = whole_policy()
        if not main_process:
            return {}
        replace_folder(out / "model", lambda folder: (final.save_pretrained(folder), tokenizer.save_pretrained(folder)))
        history = read_metrics(out)
        plot_run(history, out, title=config.algorithm)
    evaluations = [line for line in history if "eval_accuracy" in line]
    return {"before": evaluations[0]["eval_accuracy"], "after": evaluations[-1]["eval_accuracy"],
            "low": evaluations[-1]["eval_low"], "high": evaluations[-1]["eval_high"], "seconds": time.perf_counter() - started}


def process_seed(seed: int) -> int:
    """The seed of this process's sampling stream: with a common one all processes would sample the same responses."""
    return seed + 1_000_003 * parallel.rank()


def working_engine(model, tokenizer, task: Task, config: Config) -> Config:
    """The configuration with --engine auto decided: paged on a GPU that runs it with the right log-probabilities, else plain."""
    if config.engine == "auto" and next(model.parameters()).device.type == "cuda":
        attention = model.config._attn_implementation
        try:
            paged = dataclasses.replace(config, engine="paged")
            self_check(model, tokenizer, task, paged)
            return paged
        except Exception as error:  # whatever an engine of another package may raise
            model.set_attn_implementation(attention)
            parallel.say(f"--engine paged does not work here ({one_line(error)}); sampling with the plain loop")
    chosen = dataclasses.replace(config, engine="plain" if config.engine == "auto" else config.engine)
    self_check(model, tokenizer, task, chosen)
    return chosen


def drop_long_prompts(task: Task, model, tokenizer, config: Config) -> Task:
    """The task without the questions that exceed --max-prompt-tokens, or leave the model no room for --max-new-tokens."""
    context = context_length(model)
    limit = min(config.max_prompt_tokens, context - config.max_new_tokens)
    require(limit > 0, f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt in the model's context of {context} tokens")

    def fits(example):
        return encode_prompts(tokenizer, [example], device="cpu")[0].shape[1] <= limit

    def short(examples):
        if task.name.startswith("addition"):  # all alike, and many: the first speaks for them
            return examples if fits(examples[0]) else []
        return [example for example in examples if fits(example)]

    kept = dataclasses.replace(task, train=short(task.train), evaluation=short(task.evaluation))
    require(bool(kept.train and kept.evaluation), f"no question of {task.name} fits into {limit} tokens: --max-prompt-tokens "
            f"{config.max_prompt_tokens}, --max-new-tokens {config.max_new_tokens}, the model's context {context}")
    if dropped := len(task.train) - len(kept.train):
        parallel.say(f"left out {dropped} training questions longer than {limit} tokens")
    return kept


def self_check(model, tokenizer, task: Task, config: Config, *, tolerance: float | None = None) -> float:
    """Sample one batch and compare the sampler's log-probabilities with the trainer's; they must describe one distribution.

    A wrong temperature, position, mask or head would make every ratio differ from 1 before the first update, silently.
    """
    device = next(model.parameters()).device
    examples = batch_examples(task.train, 1, count=min(4, config.prompts_per_step), seed=config.seed)
    with torch.no_grad(), autocast(config, device) as cast:
        batch = collect(model, tokenizer, examples, config, version=0, generator=torch.Generator(device).manual_seed(0))
        logprobs, _ = token_logprobs(model, batch.prompt, batch.tokens, prompt_mask=batch.prompt_mask, mask=batch.mask,
                                     temperature=config.temperature)
    difference = (logprobs - batch.old_logprobs).abs().max().item()
    tolerance = tolerance or (0.5 if cast else 1e-3)
    require(difference <= tolerance, f"the sampler's and the trainer's log-probabilities differ by {difference:.2g}, more than "
            f"{tolerance}: the architecture {type(model).__name__} is not supported")
    parallel.say(f"self-check: sampler and trainer log-probabilities agree to {difference:.1e}")
    return difference


# %% ------------------------------------------------------------------------------------------------------ evaluation


def evaluate(model, tokenizer, task: Task, config: Config) -> dict:
    """Accuracy on the held-out questions with 95 % intervals: sampled at the training temperature, greedy, and pass@k.

    Its generator is its own and starts afresh, so that evaluating changes nothing in training and every evaluation of a run
    meets the same random numbers.
    """
    device, count = next(model.parameters()).device, config.eval_samples
    generator, before = torch.Generator(device).manual_seed(process_seed(config.seed + 1)), random_state()
    sampled, greedy = [], []
    mine = task.evaluation[parallel.rank():: parallel.size()]
    for first in range(0, len(mine), 64):
        examples = mine[first: first + 64]
        for rewards, part in ((sampled, dataclasses.replace(config, group_size=count)),
                              (greedy, dataclasses.replace(config, group_size=1, temperature=0.0))):
            rewards.append(collect(model, tokenizer, examples, part, version=0, generator=generator).rewards)
    restore_random(before)  # a reward may have drawn from the global generators
    sampled, greedy = (parallel.gather(torch.cat(part)).cpu().double() for part in (sampled, greedy))
    greedy = greedy[:, 0]
    metrics = {}
    for name, values in (("accuracy", sampled.mean(1)), ("greedy", greedy)):
        low, high = interval_95(values)
        prefix = "eval" if name == "accuracy" else "eval_greedy"
        metrics |= {f"eval_{name}": values.mean().item(), f"{prefix}_low": low, f"{prefix}_high": high}
    correct = (sampled >= 1).sum(1).tolist()
    sizes = sorted({2**i for i in range(1, count.bit_length())} | {count} - {1})
    return metrics | {f"eval_pass_at_{k}": pass_at_k(correct, samples=count, k=k) for k in sizes}


def pass_at_k(correct, *, samples: int, k: int) -> float:
    """Mean over questions of 1 − C(n−c, k)/C(n, k): the chance that k of n sampled answers hold one of the c right ones.

    Unbiased for every k ≤ n, where 1 − (1 − c/n)^k is too small (arXiv 2107.03374). ValueError unless 1 ≤ k ≤ n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k needs 1 ≤ k ≤ {samples}, the number of samples, not k = {k}")
    return 1 - sum(math.comb(samples - c, k) for c in correct) / (math.comb(samples, k) * len(correct))


def interval_95(values) -> tuple[float, float]:
    """A 95 % interval of the mean of the values, one for each question, (N,).

    The normal interval after adding two 0s and two 1s (Agresti and Coull 1998), or two of the extremes where a reward leaves
    [0, 1]. Without them 16 wrong answers of 16 would claim an accuracy of 0 ± 0.
    """
    least, most = min(0.0, values.min().item()), max(1.0, values.max().item())
    padded = torch.cat([values.double(), torch.tensor([least, least, most, most], dtype=torch.float64)])
    half_width = 1.96 * padded.std(correction=0) / math.sqrt(len(padded))
    return max(least, (padded.mean() - half_width).item()), min(most, (padded.mean() + half_width).item())


def evaluation_text(metrics: dict) -> str:
    """One evaluation in words, with its intervals."""
    passes = "".join(f", pass@{key.rpartition('_')[2]} {value:.3f}" for key, value in metrics.items() if "pass_at" in key)
    return (f"{metrics['eval_accuracy']:.3f} (95 % {metrics['eval_low']:.3f}–{metrics['eval_high']:.3f}), greedy "
            f"{metrics['eval_greedy']:.3f} ({metrics['eval_greedy_low']:.3f}–{metrics['eval_greedy_high']:.3f}){passes}")


def evaluate_only(config: Config) -> None:
    """--eval-only: print the evaluation of --model, and write it to evaluation.json where --out is given."""
    started, device, task = time.perf_counter(), pick_device(config.device), load_task(config)
    model, tokenizer = load_model(config.model, device=device, cache_dir=config.cache_dir, task=config.task)
    task = drop_long_prompts(task, model, tokenizer, config)
    metrics = evaluate(model, tokenizer, task, config)
    if config.out:
        write_text(pathlib.Path(config.out) / "evaluation.json", json.dumps(metrics, indent=1))
    print(f"{config.model} on {len(task.evaluation)} questions of {task.name}: accuracy {evaluation_text(metrics)}, "
          f"in {time.perf_counter() - started:.0f} s")


def calibrate(config: Config) -> None:
    """--calibrate N: how often the verifier (--reward, with --reward-noise) misjudges answers whose truth the task knows."""
    task, generator = load_task(config), torch.Generator(pick_device(config.device)).manual_seed(config.seed)
    model, tokenizer = load_model(config.model, device=generator.device, cache_dir=config.cache_dir, task=config.task)
    task, truths, verdicts = drop_long_prompts(task, model, tokenizer, config), [], []
    exact, plain = reward_function(None, config.task), Algorithm()
    for number in range(1, 1 + math.ceil(config.calibrate / (config.prompts_per_step * config.group_size))):
        examples = batch_examples(task.train, number, count=config.prompts_per_step, seed=config.seed)
        batch = collect(model, tokenizer, examples, config, version=0, generator=generator, row=plain)
        texts = decode(tokenizer, batch.tokens, batch.mask)
        asked = [e for e in examples for _ in range(config.group_size)]
        truths += [exact(e.question, text, e.answer) > 0 for e, text in zip(asked, texts)]
        verdicts += (batch.rewards.flatten() > 0).tolist()
    rates = []
    for truth, name in ((False, "ρ⁺: wrong answers passed"), (True, "ρ⁻: right answers failed")):
        errors = torch.tensor([float(verdict != truth) for verdict, t in zip(verdicts, truths) if t == truth])
        require(len(errors) > 0, f"all {len(truths)} answers are {'wrong' if truth else 'right'}: nothing to count {name}")
        rates.append(errors.mean().item())
        low, high = interval_95(errors)
        print(f"{name}: {int(errors.sum())} of {len(errors)} = {rates[-1]:.3f} (95 % {low:.3f}–{high:.3f})")
    print(f"to correct for it: --algorithm noise-corrected-grpo --noise-rates {rates[0]:.3f},{rates[1]:.3f}")


# %% ------------------------------------------------------------------------------------------------------ checkpoint


class RunStopped(Exception):
    """The run ended early, in order: everything up to the last checkpoint is safe. Exit status 1."""


def clear_run(out: pathlib.Path) -> None:
    """Remove what an earlier run has left in the run directory."""
    for folder in ("checkpoint", "model", "tensorboard"):
        discard(out / folder)
    for name in ("curves.png", "samples.jsonl", "metrics.jsonl"):
        (out / name).unlink(missing_ok=True)


def only_writer(out: pathlib.Path):
    """Hold the run directory, in which a second run would ruin the first. The lock ends with the process, however that ends."""
    out.mkdir(parents=True, exist_ok=True)
    file = open(out / ".lock", "w")
    with contextlib.suppress(ImportError):  # Windows has no fcntl
        import fcntl
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is writing to {out}; choose another --out, or wait for it") from None
    return file


def store_config(out: pathlib.Path, config: Config) -> None:
    """config.json: every flag that shapes the run, as --config and --resume read them."""
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in ("resume", "overwrite", "config")}
    write_text(out / "config.json", json.dumps(settings, indent=1))


def append(path: pathlib.Path, *lines: dict) -> None:
    """Add the lines in one write that reaches the operating system before this returns."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_metrics(out: pathlib.Path) -> list:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def keep_lines(out: pathlib.Path, *, last_step: int) -> None:
    """Drop the lines after the checkpoint, and a last line that a crash cut short: those steps will be run again."""
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        kept = []
        for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] <= last_step:
                    kept.append(line + "\n")
        write_text(path, "".join(kept))


def flush_to_disk(path: pathlib.Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk itself."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(target: pathlib.Path, fill) -> None:
    """Let `fill` write into a neighbour, flush it to the disk, then rename it to `target`: whole or not at all."""
    scratch = target.with_name(f"unfinished-{target.name}-{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        fill(scratch)
        for path in [*scratch.rglob("*"), scratch]:
            flush_to_disk(path)
        discard(target)
        os.rename(scratch, target)
        flush_to_disk(target.parent)
    except Exception as error:  # a full disk is an OSError, a RuntimeError or a SafetensorError, depending on who writes
        raise OSError(f"cannot write {target} ({one_line(error)})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def discard(folder: pathlib.Path) -> None:
    """Remove a folder. It loses its name first, so that half of it is never taken for the whole."""
    if folder.exists():
        nameless = folder.with_name(f"unfinished-old-{folder.name}-{os.getpid()}")
        os.rename(folder, nameless)
        shutil.rmtree(nameless, ignore_errors=True)


def save_checkpoint(out: pathlib.Path, step: int, model, tokenizer, state: dict) -> None:
    """Write out/checkpoint/step-N: a model for from_pretrained plus trainer.pt. Older ones go only when it is complete."""
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise FloatingPointError("the weights are not finite, so they are not saved")
    for name in ("metrics.jsonl", "samples.jsonl"):  # the lines up to this step must not be younger than the checkpoint
        if (out / name).exists():
            flush_to_disk(out / name)
    target = out / "checkpoint" / f"step-{step:06d}"

    def fill(scratch):
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        torch.save({"step": step, **state}, scratch / "trainer.pt")

    replace_folder(target, fill)
    for old in checkpoints(out)[:-1]:
        discard(old)


def checkpoints(out: pathlib.Path) -> list:
    """The folders of the complete checkpoints, oldest first."""
    return sorted((out / "checkpoint").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))


def load_checkpoint(out: pathlib.Path) -> dict | None:
    """The trainer's state in the newest checkpoint, with its folder; None when the run had not saved one yet."""
    if not (found := checkpoints(out)):
        return None
    try:
        state = torch.load(found[-1] / "trainer.pt", weights_only=True, map_location="cpu", mmap=parallel.size() > 1)
        return {**state, "folder": str(found[-1])}  # several processes map the file: of a sharded state each needs its own part only
    except Exception as error:
        raise UserError(f"--resume: {found[-1]} is damaged ({one_line(error)})")


@contextlib.contextmanager
def stopping_in_order(step: int, out: pathlib.Path):
    """Turn what can go wrong during a step into RunStopped, which names the step and what is safe."""
    try:
        yield
    except (FloatingPointError, UserError, OSError) as error:
        found = checkpoints(out)
        safe = f"the last good checkpoint is {found[-1]}" if found else "no checkpoint had been saved yet"
        raise RunStopped(f"step {step}: {one_line(error)}; {safe}") from error


def random_state(*generators) -> dict:
    """Every generator's state: our own, and the global ones that a user's reward may draw from."""
    kind, keys, *rest = np.random.get_state()
    return {"generators": [g.get_state() for g in generators], "torch": torch.get_rng_state(), "python": random.getstate(),
            "numpy": (kind, keys.tolist(), *rest), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random(state: dict, *generators) -> None:
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(saved)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def interruptions():
    """A list that names the signals that ask for an end, as they arrive, so that the step in progress can finish and be saved.

    A second SIGINT or SIGTERM acts as it always did, and one that was ignored (nohup) stays so.
    """
    arrived, previous = [], {}

    def note(number, _frame):
        arrived.append(signal.Signals(number).name)
        if arrived[-1] != "SIGHUP":  # a closing terminal may send that one twice
            signal.signal(number, previous[number])
        with contextlib.suppress(OSError):  # the terminal may be gone; and print() may not be interrupted by itself
            os.write(2, f"\n{arrived[-1]}: finishing this step and saving it; once more to stop at once\n".encode())

    if threading.current_thread() is threading.main_thread():
        handled = (getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
        previous = {n: signal.signal(n, note) for n in handled if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# %% -------------------------------------------------------------------------------------------------------- pictures


def row_style(name: str) -> dict:
    """The same colour and line for the same row in every figure."""
    colour, line = STYLES[list(ALGORITHMS).index(name) % len(STYLES)] if name in ALGORITHMS else ("#000000", "-")
    return {"color": colour, "linestyle": line}


def plot_run(history: list, out: pathlib.Path, *, title: str) -> None:
    """curves.png: accuracy, distance to the sampler, clipping and entropy of one run."""
    fig, axes = figure(4, height=3.0, width=3.6)
    plot_series(axes[0], history, "reward", label="training reward", color="0.7", linestyle="-")
    plot_series(axes[0], history, "eval_accuracy", label="held-out accuracy, 95 %", color="black", linestyle="-")
    evaluations = [line for line in history if "eval_accuracy" in line]
    axes[0].fill_between(*([line[key] for line in evaluations] for key in ("step", "eval_low", "eval_high")), color="0.85")
    axes[0].legend()
    for axis, key, name in zip(axes[1:], ("kl_old", "clip_fraction", "entropy"),
                               ("KL(sampler ‖ policy) per token", "share of tokens clipped", "entropy (nats per token)")):
        plot_series(axis, history, key)
        axis.set_title(name)
    axes[0].set_title(f"{title}: accuracy {evaluations[0]['eval_accuracy']:.2f} → {evaluations[-1]['eval_accuracy']:.2f}")
    for axis in axes:
        axis.set_xlabel("training step")
        axis.set_ylim(bottom=0)
    save_figure(fig, out, "curves")


def plot_series(axis, history: list, key: str, **style) -> None:
    points = [(line["step"], line[key]) for line in history if key in line]
    axis.plot(*zip(*points), **style)


def plot_comparison(histories: dict, out: pathlib.Path, *, setting: str) -> None:
    """compare.png: the rows of --compare, overlaid."""
    fig, axes = figure(3, height=3.6, width=4.4)
    keys = {"eval_accuracy": "held-out accuracy", "kl_old": "KL(sampler ‖ policy) per token",
            "clip_fraction": "share of tokens clipped"}
    for axis, (key, label) in zip(axes, keys.items()):
        for name, history in histories.items():
            plot_series(axis, history, key, label=name, **row_style(name))
        axis.set_title(label)
        axis.set_xlabel("training step")
        axis.set_ylim(bottom=0)
    axes[0].legend()
    ends = {name: [line["eval_accuracy"] for line in history if "eval_accuracy" in line] for name, history in histories.items()}
    fig.suptitle(f"{setting}: accuracy " + ", ".join(f"{name} {a[0]:.2f} → {a[-1]:.2f}" for name, a in ends.items()))
    save_figure(fig, out, "compare")


def gradient_weight(name: str, ratio, advantages):
    """−∂L/∂log π of one-token responses, by autograd through policy_loss, (N,), (N,) → (N,).

    What a row does outside this formula (other data, other rewards, a second batch) is not in it.
    """
    row, mask = ALGORITHMS[name], torch.ones(len(ratio), 1, dtype=torch.bool)
    logprobs = ratio.log()[:, None].requires_grad_()
    if row.shaping == "weight":
        advantages = advantages * red_weight(advantages, temperature=row.weight_temperature)
    if row.process_weight is not None:
        groups = advantages[:, None]
        advantages = process_advantages(groups, groups, logprobs.detach(), torch.ones_like(groups), mask,
                                        process_weight=row.process_weight)
    loss, _ = policy_loss(logprobs, torch.zeros_like(logprobs), advantages, mask, algorithm=row, weights=mask.to(ratio.dtype))
    return -torch.autograd.grad(loss, logprobs)[0][:, 0]


def draw_map(directory) -> None:
    """--map: 06_family.png, the gradient weight of every row over the ratio, one panel for the rows that are alike in it."""
    ratio, panels = torch.logspace(-1, 0.7, 500, dtype=torch.float64), {}
    for name in ALGORITHMS:
        lines = torch.stack([gradient_weight(name, ratio, torch.full_like(ratio, a)) for a in (1.0, 0.5, -0.5, -1.0)])
        panels.setdefault(tuple(lines.mul(1e6).round().flatten().tolist()), (lines, []))[1].append(name)
    columns, count = 5, len(panels)
    fig, axes = figure(columns, count // columns + 1, width=2.3, height=1.7, sharex=True, sharey=True)
    matplotlib.rcParams["savefig.dpi"] = 105  # many panels: at the usual 160 the file would be large
    styles = {"A = 1": ("-", 2.0), "A = ½": ("-", 0.9), "A = −½": ("--", 0.9), "A = −1": ("--", 2.0)}
    for i, (axis, (lines, names)) in enumerate(zip(axes.flat, panels.values())):
        for line, (label, (dash, width)) in zip(lines, styles.items()):
            axis.plot(ratio, line, color="black", linestyle=dash, linewidth=width, label=label)
        axis.axvline(1, color="0.8", linewidth=0.8, zorder=0)
        axis.set_title(textwrap.fill(", ".join(names), 34, break_on_hyphens=False), fontsize=7)
        axis.set(xscale="log", ylim=(-3.2, 3.2), yticks=[-2, 0, 2])
        axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 5], [".1", ".2", ".5", "1", "2", "5"])
        axis.minorticks_off()
        axis.tick_params(labelbottom=i + columns >= count)
    for axis in axes.flat[count:]:
        axis.axis("off")
    axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), loc="center", title="advantage")
    fig.supxlabel("ratio ρ = π/π_old, one-token responses. Rows in one panel differ in how A is made, in N, or in their data",
                  fontsize=9)
    fig.supylabel("gradient weight −∂L/∂log π", fontsize=9)
    fig.suptitle(f"The map of the family: {len(ALGORITHMS)} rows are {count} shapes of one weight, M·W·A + the gradient of R")
    save_figure(fig, directory, "06_family")


# %% ------------------------------------------------------------------------------------------------------------ main


def parse_arguments(argv=None) -> Config:
    """Flags → Config. Flags that are not given come from --config, or with --resume from the run in --out."""
    from transformers import HfArgumentParser

    def fail(message):
        raise UserError(message)

    width = max(map(len, METRICS))
    metrics = "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in METRICS.items())
    parser = HfArgumentParser(GROUPS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                              allow_abbrev=False, epilog=f"metrics.jsonl, one line per step:\n{metrics}")
    parser.error = fail
    argv = sys.argv[1:] if argv is None else argv
    given = parser.parse_args(argv)
    require(not given.resume or given.out is not None, "--resume needs --out with the directory of the run")
    source = pathlib.Path(given.out) / "config.json" if given.resume else given.config
    if not source:
        return Config(**vars(given))
    try:
        stored = json.loads(pathlib.Path(source).read_text(encoding="utf-8"))
        stored = [f"--{name}={value}" for name, value in stored.items() if value is not None]
        run = parser.parse_args(stored)
    except (OSError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{source} is not a file of flags: {one_line(error)}")
    config = Config(**vars(parser.parse_args([*stored, *argv])))
    for name in OF_THE_RUN if given.resume else ():
        require(getattr(config, name) == getattr(run, name), f"--{name.replace('_', '-')} belongs to the run in {given.out}, "
                f"where it is {getattr(run, name)}; start another run to change it")
    return config


# What a resumed run cannot change without becoming another run.
OF_THE_RUN = ("model", "task", "reward", "eval_questions", "group_size", "prompts_per_step", "sync_interval", "sync_offset",
              "offline", "seed", "reward_noise", "step_reward", "algorithm", "temperature", "max_new_tokens")


def staleness_text(config: Config) -> str:
    if config.offline:
        return "offline"
    return f"sync interval {config.sync_interval}, offset {config.sync_offset}"


def main(argv=None) -> None:
    try:
        config = parse_arguments(argv)
        validate(config)
        if config.dry_run:
            import plan
            return plan.dry_run(config, sys.modules[__name__])
        if config.eval_only:
            return evaluate_only(config)
        if config.map:
            return draw_map(config.map)
        if config.calibrate:
            return calibrate(config)
        if config.compare == "paper":
            import paper_grid  # the paper's whole grid: many runs of this file, spread over the cores
            return paper_grid.main(["--cache-dir", config.cache_dir])
        if config.compare:
            return compare(config)
        setting = "offline" if config.offline else f"I{config.sync_interval}-m{config.sync_offset}"
        config.out = config.out or f"runs/{config.algorithm}-{pathlib.Path(config.task).stem}-{setting}-seed{config.seed}"
        print_result(train(config), config)
    except (UserError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        sys.exit(1)
    except RuntimeError as error:
        if parallel.size() == 1:
            raise
        print(f"stopped: another process failed, see its message ({one_line(error)})", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped at once; --resume continues from the last checkpoint, if there is one", file=sys.stderr)
        sys.exit(130)
    finally:
        parallel.stop()


def print_result(result: dict, config: Config) -> None:
    if result:
        print(f"{config.algorithm}: accuracy {result['before']:.3f} → {result['after']:.3f} (95 % {result['low']:.3f}–"
              f"{result['high']:.3f}) in {result['seconds']:.0f} s, run directory {config.out}")


def compare(config: Config) -> None:
    """Train the rows of --compare one after the other, each in its own folder under --out, and overlay them."""
    out, results = pathlib.Path(config.out or "runs/compare"), {}
    store_config(out, config)
    for name in config.compare.split(","):
        run = dataclasses.replace(config, algorithm=name, out=str(out / name), compare=None,
                                  resume=config.resume and (out / name / "config.json").exists())
        results[name] = train(run)
        print_result(results[name], run)
    histories = {name: read_metrics(out / name) for name in results}
    plot_comparison(histories, out, setting=f"{config.task}, {staleness_text(config)}")
    write_text(out / "compare.json", json.dumps(results, indent=1))
    summary = ", ".join(f"{name} {r['before']:.3f} → {r['after']:.3f}" for name, r in results.items())
    print(f"accuracy before → after: {summary}; {sum(r['seconds'] for r in results.values()):.0f} s; {out / 'compare.png'}")


if __name__ == "__main__":
    main()
