"""How good is the policy: accuracy, greedy accuracy and pass@k on held-out questions, with intervals."""

import dataclasses
import json
import math
import pathlib
import time

import torch

from under_the_hood import parallel
from under_the_hood.engines import choose_engine
from under_the_hood.errors import require
from under_the_hood.models import drop_long_prompts, load_model, set_chat_options
from under_the_hood.runs import random_state, restore_random, write_text
from under_the_hood.tasks import load_task
from utils import pick_device


def batch_metrics(metrics: dict, batch, rewards, lengths, logprobs) -> dict:
    """The metrics of a step as numbers, and those of its batch added; rewards, lengths: (P, K) of all processes."""
    metrics |= off_policyness(logprobs, batch.old_logprobs, batch.mask)
    unscored, rewards = rewards.isnan(), filled(rewards)
    metrics |= {"reward": rewards[~unscored].mean(), "completion_length": lengths[lengths > 0].float().mean(),
                "truncated": parallel.gather(batch.truncated.float()).mean(),
                "flat_groups": (rewards.amax(1) == rewards.amin(1)).float().mean()}
    if unscored.any():
        metrics["unscored"] = unscored.float().mean()
    return {name: float(value) for name, value in metrics.items()}


def filled(rewards):
    """(P, K) rewards in which the group's largest stands for NaN, a response that the verifier could not judge."""
    known = rewards.where(~rewards.isnan(), -math.inf).amax(1, keepdim=True)
    return torch.where(rewards.isnan(), known.where(known > -math.inf, 0.0), rewards)


def off_policyness(logprobs, old_logprobs, mask) -> dict:
    """How far the batch is from the policy: quantiles of the token ratio, and the responses' effective sample size.

    ess = (Σ ρ_seq)² / (B Σ ρ_seq²), 1 when on-policy and 1/B when one response carries all the weight; of the B
    responses that train, not of those without a verdict, whose mask is empty.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    sequence = torch.softmax(parallel.gather(log_ratio.sum(1)[mask.any(1)]), 0)
    ratio = parallel.gather(log_ratio[mask]).clamp(-20, 20).exp().sort().values
    at = {f"ratio_p{q:02d}": ratio[int(q / 100 * (len(ratio) - 1))] for q in (5, 50, 95)}
    return {**at, "ratio_max": ratio[-1], "ess": 1 / (sequence**2).sum() / len(sequence)}


def evaluate(collect, model, tokenizer, task, config, *, first=False) -> dict:
    """Accuracy on the held-out questions with 95 % intervals: sampled at the training temperature, greedy, and pass@k.

    collect: the function of 06; first: of a run, which may give a hint. An evaluation has a generator of its own, with
    the same seed each time, so that it changes nothing in training, and all evaluations of a run use the same numbers.
    """
    device, count = next(model.parameters()).device, config.eval_samples
    generator, before = torch.Generator(device).manual_seed(parallel.own_seed(config.seed + 1)), random_state()
    sampled, greedy, truncated = [], [], []
    require(len(task.evaluation) >= parallel.size(),
            f"{len(task.evaluation)} held-out questions are too few for {parallel.size()} processes")
    mine = task.evaluation[parallel.rank():: parallel.size()]
    for begin in range(0, len(mine), 64):
        examples = mine[begin: begin + 64]
        for rewards, part in ((sampled, dataclasses.replace(config, group_size=count)),
                              (greedy, dataclasses.replace(config, group_size=1, temperature=0.0))):
            batch = collect(model, tokenizer, examples, part, version=0, generator=generator)
            rewards.append(batch.rewards)
            truncated.append(batch.truncated.float())
    restore_random(before)  # a reward may have drawn from the global generators
    sampled, greedy = (parallel.gather(torch.cat(part)).cpu().double() for part in (sampled, greedy))
    if first and parallel.gather(torch.cat(truncated)).mean() > 0.9:
        parallel.print_rank0(f"more than 90 % of the answers are cut off at --max-new-tokens {config.max_new_tokens}. "
                             "Raise it; a chat model that thinks first may need --chat-template-kwargs "
                             "'{\"enable_thinking\": false}' or a --system-prompt")
    metrics = {}
    for name, values in (("accuracy", sampled.nanmean(1)), ("greedy", greedy[:, 0])):
        values = values[~values.isnan()]  # a question counts if the verifier could judge an answer to it
        require(len(values) > 0, "the verifier could judge no answer of the evaluation")
        low, high = interval_95(values)
        prefix = "eval" if name == "accuracy" else "eval_greedy"
        metrics |= {f"eval_{name}": values.mean().item(), f"{prefix}_low": low, f"{prefix}_high": high}
    if sampled.isnan().any():
        metrics["eval_unscored"] = sampled.isnan().double().mean().item()
        sampled = sampled[~sampled.isnan().any(1)]
    correct = (sampled >= 1).sum(1).tolist()
    sizes = sorted({2**i for i in range(1, count.bit_length())} | {count} - {1}) if correct else []
    return metrics | {f"eval_pass_at_{k}": pass_at_k(correct, samples=count, k=k) for k in sizes}


def pass_at_k(correct, *, samples: int, k: int) -> float:
    """Mean over questions of 1 − C(n−c, k)/C(n, k): the chance that k of n answers hold one of the c right ones.

    Unbiased for every k ≤ n, where 1 − (1 − c/n)^k is too small (arXiv 2107.03374). ValueError unless 1 ≤ k ≤ n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k needs 1 ≤ k ≤ {samples}, the number of samples, not k = {k}")
    return 1 - sum(math.comb(samples - c, k) for c in correct) / (math.comb(samples, k) * len(correct))


def interval_95(values) -> tuple[float, float]:
    """A 95 % interval of the mean of the values, one for each question, (N,).

    The normal interval after adding two 0s and two 1s (Agresti and Coull 1998), or two of each extreme where a reward
    leaves [0, 1]. Without them 16 wrong answers of 16 would give an accuracy of 0 ± 0.
    """
    least, most = min(0.0, values.min().item()), max(1.0, values.max().item())
    padded = torch.cat([values.double(), torch.tensor([least, least, most, most], dtype=torch.float64)])
    half_width = 1.96 * padded.std(correction=0) / math.sqrt(len(padded))
    return max(least, (padded.mean() - half_width).item()), min(most, (padded.mean() + half_width).item())


def evaluation_text(metrics: dict) -> str:
    """One evaluation in words, with its intervals."""
    passes = "".join(f", pass@{key.rpartition('_')[2]} {value:.3f}"
                     for key, value in metrics.items() if "pass_at" in key)
    return (f"{metrics['eval_accuracy']:.3f} (95 % {metrics['eval_low']:.3f}–{metrics['eval_high']:.3f}), "
            f"greedy {metrics['eval_greedy']:.3f} "
            f"({metrics['eval_greedy_low']:.3f}–{metrics['eval_greedy_high']:.3f}){passes}")


def evaluate_only(config, collect, engines: dict) -> None:
    """--eval-only: print the evaluation of --model, and write it to evaluation.json where --out is given."""
    started, device, task = time.perf_counter(), pick_device(config.device), load_task(config)
    model, tokenizer = load_model(config.model, device=device, cache_dir=config.cache_dir, task=config.task)
    set_chat_options(tokenizer, config)
    task = drop_long_prompts(task, model, tokenizer, config)
    config = choose_engine(model, tokenizer, task, config, engines)
    metrics = evaluate(collect, model, tokenizer, task, config, first=True)
    if config.out:
        write_text(pathlib.Path(config.out) / "evaluation.json", json.dumps(metrics, indent=1))
    print(f"{config.model} on {len(task.evaluation)} questions of {task.name}: accuracy {evaluation_text(metrics)}, "
          f"in {time.perf_counter() - started:.0f} s")
