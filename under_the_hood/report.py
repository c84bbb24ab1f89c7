"""--report: a run as one page, report.html: its curves, and for each token what the update did with it, and why.

A step that evaluates also keeps, for the first --log-tokens prompts of its batch, what the loss knew of each token:
tokens.jsonl, one line a response. The page is report_page.html beside this file with those numbers put in. It needs no
network and no library.
"""

import dataclasses
import json
import math
import pathlib
from types import SimpleNamespace

import torch

from under_the_hood.comparison import staleness_text
from under_the_hood.errors import UserError, one_line, require
from under_the_hood.friends import weigh_hints
from under_the_hood.runs import METRICS, read_metrics, write_text

PAGE = pathlib.Path(__file__).with_name("report_page.html")
SHOWN_STEPS = 12  # of a run that has logged more, so many, evenly spread: a page should open at once


def token_lines(passes, batch, tokenizer, config, algorithm, clean_tokens, policy_ratio, clip_mask,
                importance_weight) -> list:
    """What the loss made of each token, one dict a response, in batch order, of the first --log-tokens prompts.

    passes: (rows, logprobs, entropy, advantages, weights) of each pass, from train_step. The functions are those that
    policy_loss calls, on the same numbers, so ρ, A, M, W and N here are its own.
    """
    group, lines = config.group_size, {}
    questions = [tokenizer.decode(ids[mask], skip_special_tokens=True)
                 for ids, mask in zip(batch.prompt[:config.log_tokens], batch.prompt_mask.bool())] if passes else []
    for rows, logprobs, entropy, advantages, weights in passes:
        width, hinted = logprobs.shape[1], None if batch.hinted is None else batch.hinted[rows]
        logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, batch.old_logprobs[rows, :width], advantages,
                                                                batch.mask[rows, :width])
        advantages, log_ratio = advantages.expand(mask.shape), logprobs - old_logprobs
        ratio = policy_ratio(log_ratio, mask, level=algorithm.level)
        keep = clip_mask(ratio, advantages, clip=algorithm.clip, eps_low=algorithm.eps_low, eps_high=algorithm.eps_high,
                         outer_low=algorithm.outer_low, outer_high=algorithm.outer_high)
        weight = importance_weight(ratio, log_ratio, advantages, mask, algorithm=algorithm) * torch.ones_like(ratio)
        if hinted is not None:
            keep, weight = weigh_hints(keep, weight, logprobs, hinted, algorithm=algorithm)
        columns = {"logprob": logprobs, "old_logprob": old_logprobs, "entropy": entropy, "ratio": ratio,
                   "advantage": advantages, "M": keep, "W": weight}
        wanted = [i for i, row in enumerate(rows.tolist()) if row < group * config.log_tokens and mask[i].any()]
        numbers = torch.stack([column[wanted].float() for column in columns.values()], 1).tolist()
        for i, per_column in zip(wanted, numbers):
            row, length = int(rows[i]), int(mask[i].sum())
            ids, reward = batch.tokens[row, :length].tolist(), batch.rewards.flatten()[row].item()
            lines[row] = {
                "prompt": row // group, "response": row % group, "question": questions[row // group],
                "reward": reward if math.isfinite(reward) else None, "truncated": bool(batch.truncated[row]),
                "hinted": hinted is not None and bool(hinted[i]),
                "N": short(weights[i, 0].item()), "tokens": [tokenizer.decode([token]) for token in ids],
                **{name: list(map(short, column[:length])) for name, column in zip(columns, per_column)}}
    return [lines[row] for row in sorted(lines)]


def short(value: float) -> float:
    """Seven digits are what float32 holds."""
    return float(f"{value:.7g}")


def write_report(folders: str, row_of) -> None:
    """--report RUN or RUN1,RUN2. row_of(config): the row of the family that a run trained, with its overrides."""
    folders = [pathlib.Path(folder) for folder in folders.split(",")]
    require(len(folders) <= 2, f"--report shows one run, or two side by side, not {len(folders)}")
    runs = [read_run(folder, row_of) for folder in folders]
    shown = shown_steps([{line["step"] for line in run["tokens"]} for run in runs])
    for run in runs:
        run["logged"] = len({line["step"] for line in run["tokens"]})
        run["tokens"] = [line for line in run["tokens"] if line["step"] in shown]
    # No text of a response may end the script that holds it: "<" is written as its escape.
    data = json.dumps(finite({"metrics": METRICS, "steps": shown, "runs": runs}), ensure_ascii=False, allow_nan=False)
    page = PAGE.read_text(encoding="utf-8").replace("{{data}}", data.replace("<", "\\u003c"), 1)
    path = folders[0] / ("report.html" if len(runs) == 1 else f"report-and-{folders[1].name}.html")
    write_text(path, page)
    print(f"{path}: open it in a browser" + "".join(
        f"; {run['name']} has no tokens.jsonl: the page shows its curves alone"
        for run in runs if not run["logged"]))


def read_run(folder: pathlib.Path, row_of) -> dict:
    """What the page shows of one run directory."""
    inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    require((folder / "metrics.jsonl").exists(), f"--report: {folder} is not a run directory, it has no metrics.jsonl"
            + (f"; it holds the runs {', '.join(inside)}: name one or two of them" if inside else ""))
    try:
        config = SimpleNamespace(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
        row, history, tokens = row_of(config), read_metrics(folder), []
        if (folder / "tokens.jsonl").exists():
            with open(folder / "tokens.jsonl", encoding="utf-8") as file:
                tokens = [json.loads(line) for line in file]
        accuracy = [line["eval_accuracy"] for line in history if "eval_accuracy" in line]
        return {"name": folder.name, "algorithm": config.algorithm, "row": dataclasses.asdict(row), "history": history,
                "tokens": tokens, "accuracy": [accuracy[0], accuracy[-1]], "task": config.task, "model": config.model,
                "seed": config.seed, "steps": history[-1]["step"], "setting": staleness_text(config),
                "prompts": config.prompts_per_step, "group_size": config.group_size}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"--report: {folder} cannot be read ({type(error).__name__}: {one_line(error)})") from error


def shown_steps(logged: list) -> list:
    """Steps that the page shows: those that all runs have logged, else those of any run; at most SHOWN_STEPS."""
    logged = [steps for steps in logged if steps]
    steps = sorted(set.intersection(*logged) or set.union(*logged)) if logged else []
    last, count = len(steps) - 1, min(SHOWN_STEPS, len(steps))
    return sorted({steps[round(i * last / max(1, count - 1))] for i in range(count)})


def finite(value):
    """The same, with None where JSON has no number: ∞, a row without a cap, and NaN."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
