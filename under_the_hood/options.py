"""Flags: fields of a dataclass become --help, a command line or a file becomes a Config, and a Config is checked."""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
from dataclasses import dataclass, field

from under_the_hood.answers import load_reward
from under_the_hood.errors import UserError, one_line, require
from under_the_hood.friends import rate_pair
from under_the_hood.models import BUILT_IN, built_in_digits
from utils import pick_device


def option(default, help: str, shown: str | None = None):
    """A dataclass field whose --help text ends with its default, or with `shown`: what an empty default stands for."""
    shown = shown or ("off" if default is False else default)
    return field(default=default, metadata={"help": f"{help} (default {shown})"})


@dataclass(kw_only=True)
class FriendOptions:
    _argument_group_name = "what single rows need"
    reward_noise: str = option("0,0", "ρ⁺,ρ⁻: flip this share of the verifier's verdicts on wrong and on right answers")
    noise_rates: str | None = option(None, "ρ⁺,ρ⁻ that noise-corrected-grpo assumes", "those of --reward-noise")
    calibrate: int = option(0, "train nothing: estimate ρ⁺ and ρ⁻ of the verifier from this many answers of --model")
    step_reward: str | None = option(None, "module:function of your own, called like --reward, returns the share of "
                                     "leading steps that are right (sgpo)", "leading digits, for addition only")
    refills: int = option(4, "how often dapo may replace groups without a contrast in one batch")


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
    config: str | None = option(None, "a file of flags, such as a run's config.json; the command line wins", "none")
    compare: str | None = option(None, "train several rows, comma-separated, from one base and overlay them", "none")
    dry_run: bool = option(False, "train nothing: print steps, tokens and memory; status 3 where it does not fit")
    device_memory: float | None = option(None, "GiB of the CUDA device that --dry-run plans for", "this machine's")
    map: str | None = option(None, "train nothing: draw 06_family.png, the map of all rows, into this folder", "none")
    exercise: int | None = option(None, "train nothing: ask question 1, 2 or 3 on reading a run; see --answer",
                                    "none")
    answer: str | None = option(None, "your answer to --exercise", "none")
    log_tokens: int = option(8, "prompts whose responses an evaluating step writes to tokens.jsonl, by token; 0: none")
    report: str | None = option(None, "train nothing: RUN, or RUN1,RUN2: write the run's report.html, every token's "
                                "M·W·A in it", "none")
    export: str | None = option(None, "train nothing: trinity writes row, staleness, model and questions for "
                                "Trinity-RFT into --out", "none")
    tensorboard: bool = option(False, "also write the metrics for TensorBoard, into <out>/tensorboard")
    cache_dir: str = option(str(pathlib.Path(__file__).resolve().parent.parent / "cache"),
                            "where the built-in model is kept", "cache, beside 06")


def validate(config, algorithms: dict, try_loss) -> None:
    """Refuse impossible settings before any work starts.

    try_loss(config) runs the loss of --algorithm once: it knows itself which bounds go together.
    """
    require(not (config.compare and config.eval_only), "--eval-only evaluates one model; leave --compare out")
    require(config.on_unscored in ("stop", "leave-out"),
            f"--on-unscored is {config.on_unscored!r}; choose stop or leave-out")
    for name in ("reward_noise", "noise_rates"):
        rate_pair(getattr(config, name) or "0,0", flag=f"--{name.replace('_', '-')}")
    if config.tensorboard:
        try:
            from torch.utils import tensorboard  # noqa: F401
        except ImportError:
            raise UserError("--tensorboard needs the package of that name: pip install tensorboard") from None
    rows = config.compare.split(",") if config.compare else [config.algorithm]
    require(all(rows), f"--compare {config.compare} has an empty name; write it as grpo,reinforce")
    require(not (config.resume and config.eval_only),
            "--eval-only evaluates --model; for the model of a run give its folder, --model <out>/model, "
            "and leave --resume out")
    require(len(rows) == len(set(rows)), f"--compare {config.compare} names a row twice; each has one folder")
    for name in rows:
        require(name in algorithms, f"unknown algorithm {name!r}; choose from: {', '.join(algorithms)}")
        require(not algorithms[name].graded or config.step_reward or config.task.startswith("addition"),
                f"{name} must judge single steps; for --task {config.task} give it --step-reward module:function")
        require(not algorithms[name].worked_examples or config.group_size >= 3,
                f"{name} needs --group-size 3 or more: one response with a worked example, "
                "and others to compare it with")
    require(abs(config.seed) < 2**32, f"--seed is {config.seed}; it must be between -2^32 and 2^32")
    require(config.group_size >= 2,
            f"--group-size is {config.group_size}; a baseline needs at least 2 responses to a prompt")
    require(config.sync_interval >= 1,
            f"--sync-interval is {config.sync_interval}; it must be at least 1, or use --offline")
    require(config.sync_offset >= 0, f"--sync-offset is {config.sync_offset}; it must be 0 or more")
    for name in ("steps", "prompts_per_step", "max_new_tokens", "micro_batch_tokens", "eval_every", "eval_questions",
                 "eval_samples", "save_every", "max_prompt_tokens"):
        require(getattr(config, name) >= 1,
                f"--{name.replace('_', '-')} is {getattr(config, name)}; it must be at least 1")
    for name in ("learning_rate", "max_grad_norm", "temperature", "weight_temperature", "weight_cap", "entropy_target",
                 "device_memory"):
        value = getattr(config, name)
        require(value is None or 0 < value < math.inf,
                f"--{name.replace('_', '-')} is {value}; it must be positive and finite")
    for name in ("eps_low", "eps_high", "outer_low", "outer_high", "tau", "beta", "calibrate", "refills", "lora_rank",
                 "log_tokens"):
        value = getattr(config, name)
        require(value is None or 0 <= value < math.inf, f"--{name.replace('_', '-')} is {value}; it must be 0 or more")
    require(config.dtype in ("auto", "float32", "bfloat16"),
            f"--dtype is {config.dtype!r}; choose auto, float32 or bfloat16")
    require(config.engine in ("auto", "plain", "uncached", "fast", "paged"),
            f"--engine is {config.engine!r}; choose auto, plain, uncached, fast or paged")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    require(processes == 1 or "RANK" in os.environ or config.dry_run,
            f"WORLD_SIZE is {processes} but RANK is not set; start several processes with torchrun")
    require(config.prompts_per_step % processes == 0 and config.eval_questions >= processes,
            f"{processes} processes share a batch: --prompts-per-step must be a multiple of {processes}, "
            "and --eval-questions at least as many")
    require(processes == 1 or not (config.compare or config.eval_only or config.calibrate),
            "several processes train one run; start --compare, --eval-only and --calibrate without torchrun")
    if config.model in BUILT_IN:
        require(built_in_digits(config.task) in BUILT_IN[config.model]["steps"],
                f"--model {config.model} has not learned --task {config.task}; tiny adds 1 to 3 digits (addition-2), "
                "and small adds 4, with its steps (addition-steps)")
    require(config.model != "small" or config.max_new_tokens >= 40,
            f"--max-new-tokens is {config.max_new_tokens}; worked steps need 40")
    require(not (config.shard and config.lora_rank), "--lora-rank leaves little to split; leave --shard out")
    require(not config.shard or processes > 1,
            "--shard splits a model over processes; start them with torchrun --nproc-per-node N "
            "06_full_llm_training.py …")
    second_batch = [name for name in rows if algorithms[name].entropy_target or config.entropy_target]
    require(not (config.shard and second_batch),
            f"{', '.join(second_batch)}: steering the entropy samples from the policy in every step, which --shard "
            "does not offer; leave one of them out")
    try:
        pick_device(config.device)
        for function in filter(None, (config.reward, config.step_reward)):
            load_reward(function)
        for name in rows:
            try_loss(dataclasses.replace(config, algorithm=name))
    except (ValueError, RuntimeError) as error:  # torch raises RuntimeError for a device it lacks
        raise UserError(one_line(error))


def parse_arguments(Config, groups, description: str, metrics: dict, argv=None):
    """Flags → Config. Flags that are not given come from --config, or with --resume from the run in --out.

    groups: the dataclasses that Config is made of, in the order of --help, which ends with the metrics of a run.
    """
    from transformers import HfArgumentParser

    def fail(message):
        raise UserError(message)

    width = max(map(len, metrics))
    lines = "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in metrics.items())
    parser = HfArgumentParser(groups, description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                              allow_abbrev=False, epilog=f"metrics.jsonl, one line per step:\n{lines}")
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
        require(getattr(config, name) == getattr(run, name),
                f"--{name.replace('_', '-')} belongs to the run in {given.out}, where it is {getattr(run, name)}; "
                "start another run to change it")
    return config


# A resumed run must keep these: with another value it would be another run.
OF_THE_RUN = ("model", "task", "reward", "eval_questions", "group_size", "prompts_per_step", "sync_interval",
              "sync_offset", "offline", "seed", "reward_noise", "step_reward", "algorithm", "temperature",
              "max_new_tokens", "lora_rank", "on_unscored", "system_prompt", "chat_template_kwargs")
