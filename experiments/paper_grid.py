#!/usr/bin/env python3
"""The paper's experiments on the built-in model: train a grid of runs, keep it as one table, draw the figures, judge the claims.

    python 06_full_llm_training.py --compare paper                  train what is missing, then draw and judge (also: make figures-paper)
    python paper_grid.py --plot-only                                draw and judge again from figures/data/*.csv, no training
    python paper_grid.py --grid staleness --seeds 3                 one of the grids: paper, staleness, family, hard, conditions

A *cell* is one run of 06: a row of the family, a staleness setting, a seed. Cells run in as many processes as there are cores,
one thread each. A finished cell stands in figures/data/<grid>.csv under the hash of its configuration, so a stopped grid goes on
where it stopped, on another machine too. Nothing is tuned per row: every row has the learning rate, batch and steps of 06's defaults.

The verdicts follow one rule, fixed before the runs (section `claims` below).
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile

import numpy as np

from utils import STYLES, figure, save_figure, write_text

ROOT = pathlib.Path(__file__).resolve().parent
DATA = ROOT / "figures" / "data"

# %% ------------------------------------------------------------------------------------------------------- the grids

# label → (algorithm of 06, what it overrides). "(.6,2)" is the paper's enlarged clipping range.
ROWS = {
    "reinforce": ("reinforce", {}),
    "reinforce-is": ("reinforce-is", {}),
    "grpo": ("grpo", {}),
    "rec-oneside-is": ("rec-oneside-is", {}),
    "rec-oneside-nois": ("rec-oneside-nois", {}),
    "rec-oneside-is (.6,2)": ("rec-oneside-is", {"eps_low": 0.6, "eps_high": 2.0}),
    "rec-oneside-nois (.6,2)": ("rec-oneside-nois", {"eps_low": 0.6, "eps_high": 2.0}),
    "rec-oneside-nois 5×lr": ("rec-oneside-nois", {"learning_rate": 5e-4}),
    "rec-twoside-is": ("rec-twoside-is", {}),
    "rec-twoside-nois": ("rec-twoside-nois", {}),
    "rec-ring-is": ("rec-ring-is", {}),
    "rec-ring-nois": ("rec-ring-nois", {}),
    "rep-opmd": ("rep-opmd", {}),
    "rep-asymre": ("rep-asymre", {}),
    "red-drop": ("red-drop", {}),
    "red-weight": ("red-weight", {}),
    "red-weight-adaptive": ("red-weight-adaptive", {}),
    "red-weight-oneside": ("red-weight-oneside", {}),
}
SETTINGS = {
    "(1,0)": {"sync_interval": 1, "sync_offset": 0},
    "(20,0)": {"sync_interval": 20, "sync_offset": 0},
    "(1,10)": {"sync_interval": 1, "sync_offset": 10},
    "offline": {"offline": True},
}
INTERVALS = (1, 2, 5, 10, 20, 40, 80)
SWEEP = ("reinforce", "reinforce-is", "grpo", "rec-oneside-nois", "rec-oneside-nois (.6,2)", "rep-opmd", "red-weight")


@functools.cache
def twin(label: str, setting: str) -> str:
    """The row whose runs stand for those of `label`: itself, but on fresh data the first row that is the same there.

    With a fresh sampler every ratio is 1, so that nothing is clipped and every importance weight is 1: rows that differ in
    nothing else are one computation, trained once.
    """
    if setting != "(1,0)" or label not in ROWS:
        return label
    plain = {"clip": "none", "weight": "one", "eps_low": 0, "eps_high": 0, "source": ""}

    def fresh(name):
        algorithm, overrides = ROWS[name]
        return dataclasses.replace(trainer().ALGORITHMS[algorithm], **plain), overrides.get("learning_rate")
    return next(name for name in ROWS if fresh(name) == fresh(label))


def trainer():
    return importlib.import_module("06_full_llm_training")


def grid_cells(name: str, seeds: int) -> list:
    """The cells of a grid as (label, setting, seed, options of 06), seed by seed, so that a stopped grid is still balanced."""
    every = [(label, setting, options) for setting, options in SETTINGS.items() for label in ROWS if label == twin(label, setting)]
    if name == "paper":
        plan = every
    elif name == "staleness":
        plan = [(label, f"({i},0)", {"sync_interval": i}) for i in INTERVALS if f"({i},0)" not in SETTINGS for label in SWEEP]
    elif name == "hard":
        plan = [(label, setting, {**options, "task": "addition-3"}) for label, setting, options in every]
    elif name == "family":
        plan = [(label, "(20,0)", SETTINGS["(20,0)"]) for label in trainer().ALGORITHMS]
    elif name == "conditions":  # where the enlarged range, and dropping alone, might show what the paper reports
        plan = [(label, f"(20,0) lr {rate:g}", {**SETTINGS["(20,0)"], "learning_rate": rate}) for rate in (1e-5, 3e-5, 3e-4)
                for label in ("reinforce", "reinforce-is", "rec-oneside-nois", "rec-oneside-nois (.6,2)", "red-drop")]
    else:
        raise ValueError(f"unknown grid {name!r}; choose paper, staleness, family, hard or conditions")
    return [(label, setting, seed, dict(options)) for seed in range(seeds) for label, setting, options in plan]


def cell_settings(cell, *, steps: int) -> dict:
    """The flags of 06 that determine the result of a cell."""
    label, _, seed, options = cell
    algorithm, overrides = ROWS.get(label, (label, {}))
    return {"algorithm": algorithm, "steps": steps, "eval_every": 15, "eval_samples": 2, "save_every": steps + 1, "seed": seed,
            "device": "cpu", **overrides, **options}


def cell_key(cell, *, steps: int) -> str:
    """The hash of what determines the result, flags, row and base model: the name under which a finished cell is kept."""
    settings = cell_settings(cell, steps=steps)
    row = dataclasses.asdict(dataclasses.replace(trainer().ALGORITHMS[settings["algorithm"]], source=""))
    return hashlib.sha256(json.dumps([settings, row, trainer().TINY], sort_keys=True).encode()).hexdigest()[:12]


def run_cell(cell, steps: int, cache_dir: str) -> list:
    """Train one cell and return its rows of the table."""
    import torch

    torch.set_num_threads(1)
    module = trainer()
    module.plot_run = lambda *_, **__: None  # a picture of each run would take a second of it
    sys.stdout = sys.stderr = open(os.devnull, "w")  # the grid's own progress bar is enough
    try:
        with tempfile.TemporaryDirectory() as out:
            module.train(module.Config(**cell_settings(cell, steps=steps), out=out, overwrite=True, cache_dir=cache_dir))
            history = module.read_metrics(pathlib.Path(out))
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return tidy(cell, history, key=cell_key(cell, steps=steps))


COLUMNS = ("eval_accuracy", "eval_greedy", "reward", "kl_old", "clip_fraction", "entropy", "grad_norm", "ess", "ratio_max", "staleness")


def tidy(cell, history: list, *, key: str) -> list:
    """One row per evaluation: its accuracy, and the means of the training metrics since the evaluation before."""
    rows, since = [], []
    for line in history:
        since.append(line)
        if "eval_accuracy" in line:
            values = {c: [x[c] for x in since if c in x] for c in COLUMNS}
            rows.append({"cell": key, "row": cell[0], "setting": cell[1], "seed": cell[2], "step": line["step"],
                         **{c: round(float(np.mean(v)), 5) if v else "" for c, v in values.items()}})
            since = []
    return rows


def train_grid(name: str, *, seeds: int, steps: int, jobs: int, cache_dir: str) -> None:
    """Train the cells that figures/data/<name>.csv does not hold yet; each is added to the table when it is finished."""
    from tqdm import tqdm

    path, cells = DATA / f"{name}.csv", grid_cells(name, seeds)
    finished = {line["cell"] for line in load_grid(name)} if path.exists() else set()
    missing = [cell for cell in cells if cell_key(cell, steps=steps) not in finished]
    module = trainer()
    for task in {cell_settings(cell, steps=steps).get("task", "addition") for cell in missing}:
        module.built_in_model(module.digits_of(task), cache_dir)  # once, before every process would make it
    if not path.exists():
        write_text(path, ",".join(("cell", "row", "setting", "seed", "step", *COLUMNS)) + "\n")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(run_cell, cell, steps, cache_dir) for cell in missing]
        for done in tqdm(concurrent.futures.as_completed(running), initial=len(cells) - len(missing), total=len(cells),
                         desc=f"runs of the {name} grid"):
            rows = done.result()
            with open(path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, fieldnames=list(rows[0])).writerows(rows)


# %% -------------------------------------------------------------------------------------------------- reading a grid


def load_grid(name: str) -> list:
    """The rows of figures/data/<name>.csv, numbers as float, empty fields as NaN."""
    with open(DATA / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [{k: v if k in ("cell", "row", "setting") else float(v or "nan") for k, v in line.items()} for line in csv.DictReader(file)]


def curves(grid: list, row: str, setting: str, column: str = "eval_accuracy"):
    """(steps, values) with values (seeds, steps), seeds in order."""
    cells, row = {}, twin(row, setting)
    for line in grid:
        if line["row"] == row and line["setting"] == setting:
            cells.setdefault(line["seed"], []).append((line["step"], line[column]))
    if not cells:
        raise ValueError(f"the grid has no runs of {row!r} under {setting!r}")
    series = [sorted(cells[seed]) for seed in sorted(cells)]
    return np.array([step for step, _ in series[0]]), np.array([[value for _, value in run] for run in series])


def final(grid: list, row: str, setting: str):
    """Accuracy at the end of each run: the mean of its last three evaluations, (seeds,). One evaluation would be noisier."""
    return curves(grid, row, setting)[1][:, -3:].mean(1)


def mean_interval(values, *, resamples: int = 10_000) -> tuple:
    """(mean, low, high): the mean over seeds and its 95 % bootstrap interval, with a fixed generator. One seed says nothing of others."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return float(values.mean()), -np.inf, np.inf
    pick = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[pick].mean(1), (2.5, 97.5))
    return float(values.mean()), float(low), float(high)


# %% ---------------------------------------------------------------------------------------------------------- claims

# The rule. Two rows are compared by the paired difference over seeds (same seed: same base, data order and first batches) of the
# final accuracy, with its 95 % bootstrap interval, against a margin of 3 percentage points:
MARGIN = 0.03


def verdict(kind: str, low: float, high: float, margin: float = MARGIN) -> str:
    """`better`: the difference exceeds the margin; `no worse`: it exceeds −margin; `equal`: it lies within ±margin.

    holds: the whole interval says so. does not hold: the whole interval says otherwise. Else: not resolved.
    """
    inside = {"better": (margin, np.inf), "no worse": (-margin, np.inf), "equal": (-margin, margin)}[kind]
    if inside[0] < low and high < inside[1]:
        return "holds"
    return "does not hold" if high < inside[0] or low > inside[1] else "not resolved"


def compare_rows(grid, first: str, second: str, setting: str, kind: str, value=final) -> dict:
    mean, low, high = mean_interval(value(grid, first, setting) - value(grid, second, setting))
    of = {speed: ", mean of the whole run", drop_from_peak: ", loss from the peak"}.get(value, "")
    return {"setting": setting, "what": f"{first} − {second}{of}", "mean": mean, "low": low, "high": high,
            "verdict": verdict(kind, low, high)}


def speed(grid, row, setting):
    """Mean accuracy over the whole run: the area under the learning curve."""
    return curves(grid, row, setting)[1].mean(1)


def drop_from_peak(grid, row, setting):
    """Best evaluation so far minus the end: how much of what was learned is lost again."""
    values = curves(grid, row, setting)[1]
    return values.max(1) - values[:, -3:].mean(1)


def gain(grid, row, setting, kind) -> dict:
    """Final accuracy against the base model's own."""
    values = curves(grid, row, setting)[1]
    mean, low, high = mean_interval(values[:, -3:].mean(1) - values[:, 0])
    return {"setting": setting, "what": f"{row}: end − start", "mean": mean, "low": low, "high": high, "verdict": verdict(kind, low, high)}


def judge(grid: list) -> dict:
    """P1 … P8 → {"claim", "rows": the comparisons, "verdict"}. A claim holds when all its comparisons do, and fails when one fails."""
    stale = ("(20,0)", "(1,10)", "offline")
    wide, narrow = "rec-oneside-nois (.6,2)", "rec-oneside-nois"
    clip = [mean_interval(np.nanmean(curves(grid, wide, s, "clip_fraction")[1], axis=1)) for s in stale]
    claims = {
        "P1": ("importance sampling is not needed: one-side NoIS equals IS equals GRPO on stale data",
               [compare_rows(grid, narrow, other, s, "equal") for s in stale for other in ("rec-oneside-is", "grpo")]),
        "P2": ("clipping stabilises: it beats unclipped REINFORCE on stale data and does not fall below the base",
               [compare_rows(grid, narrow, "reinforce", s, "better") for s in stale] + [gain(grid, narrow, s, "no worse") for s in stale]),
        "P3": ("the enlarged range (.6,2) learns faster, and offline it loses more from its peak",
               [compare_rows(grid, wide, narrow, s, "better", speed) for s in stale]
               + [compare_rows(grid, wide, narrow, "offline", "better", drop_from_peak)]),
        "P4": ("a 5× learning rate at (.2,.2) does worse than (.6,2)",
               [compare_rows(grid, wide, "rec-oneside-nois 5×lr", s, "better") for s in stale]),
        "P5": ("ring and two-side clipping do no worse than one-side",
               [compare_rows(grid, f"rec-{shape}-nois", narrow, s, "no worse") for shape in ("ring", "twoside") for s in stale]),
        "P6": ("RED-Drop and RED-Weight do no worse than GRPO, on-policy and at (20,0)",
               [compare_rows(grid, row, "grpo", s, "no worse") for row in ("red-drop", "red-weight") for s in ("(1,0)", "(20,0)")]),
        "P7": ("OPMD and AsymRE stabilise as well: they beat REINFORCE on stale data",
               [compare_rows(grid, row, "reinforce", s, "better") for row in ("rep-opmd", "rep-asymre") for s in stale]),
        "P8": ("with the enlarged range fewer than 5 % of the tokens are clipped",
               [{"setting": s, "what": "clip fraction", "mean": m, "low": low, "high": high,
                 "verdict": "holds" if high < 0.05 else "does not hold" if low > 0.05 else "not resolved"}
                for s, (m, low, high) in zip(stale, clip)]),
    }
    results = {}
    for name, (claim, rows) in claims.items():
        verdicts = {row["verdict"] for row in rows}
        overall = "does not hold" if "does not hold" in verdicts else "not resolved" if "not resolved" in verdicts else "holds"
        results[name] = {"claim": claim, "rows": rows, "verdict": overall}
    return results


def verdict_table(results: dict, command: str = "python paper_grid.py --plot-only") -> str:
    """The claims as a markdown table."""
    lines = ["| claim | what we see: difference in accuracy, 95 % interval over seeds | verdict | command |", "|---|---|---|---|"]
    short = {"holds": "✓", "does not hold": "✗", "not resolved": "?"}
    for name, result in results.items():
        seen = "<br>".join(f"{short[r['verdict']]} {r['setting']} {r['what']}: {r['mean']:+.3f} [{r['low']:+.3f}, {r['high']:+.3f}]"
                           for r in result["rows"])
        lines.append(f"| **{name}** {result['claim']} | {seen} | **{result['verdict']}** | `{command}` |")
    return "\n".join(lines) + "\n"


def with_the_papers_rate(grid: list) -> list:
    """The conditions' runs together with those of the paper's grid that have the usual learning rate, for as many seeds."""
    seeds = {line["seed"] for line in grid}
    return grid + [{**line, "setting": "(20,0) lr 0.0001"} for line in load_grid("paper")
                   if line["setting"] == "(20,0)" and line["seed"] in seeds]


def conditions_table(grid: list) -> str:
    """What the learning rate does to the claims that it might decide, as a markdown table."""
    narrow, wide = "rec-oneside-nois", "rec-oneside-nois (.6,2)"
    lines = ["| learning rate at (20,0) | accuracy at the end: reinforce, reinforce-is, narrow clip, wide clip, red-drop | wide − narrow, mean over "
             "the run | red-drop − narrow, end | reinforce-is − narrow, end |", "|---|---|---|---|---|"]
    for setting in sorted({line["setting"] for line in grid}, key=lambda name: float(name.split()[-1])):
        ends = ", ".join(f"{final(grid, row, setting).mean():.2f}" for row in ("reinforce", "reinforce-is", narrow, wide, "red-drop"))
        pairs = [compare_rows(grid, wide, narrow, setting, "better", speed), compare_rows(grid, "red-drop", narrow, setting, "no worse"),
                 compare_rows(grid, "reinforce-is", narrow, setting, "no worse")]
        seen = " | ".join(f"{p['mean']:+.3f} [{p['low']:+.3f}, {p['high']:+.3f}]" for p in pairs)
        lines.append(f"| {setting.split()[-1]} | {ends} | {seen} |")
    return "\n".join(lines) + "\n"


def family_table(grid: list) -> str:
    """All rows of the family at (20,0), sorted by final accuracy, as a markdown table."""
    results = []
    for row in sorted({line["row"] for line in grid}):
        mean, low, high = mean_interval(final(grid, row, "(20,0)"))
        distance = np.nanmean(curves(grid, row, "(20,0)", "kl_old")[1])
        results.append((mean, f"| `{row}` | {mean:.3f} [{low:.3f}, {high:.3f}] | {distance:.3f} |"))
    seeds = len({line["seed"] for line in grid})
    head = f"| row | accuracy at the end, 95 % interval over {seeds} seeds | mean KL from the sampler |\n|---|---|---|\n"
    return head + "\n".join(line for _, line in sorted(results, reverse=True)) + "\n"


# %% --------------------------------------------------------------------------------------------------------- figures


def style(row: str) -> dict:
    """The same colour and line for the same row in every figure here; rows share colours only where no figure shows both."""
    index = {"reinforce": 0, "rec-oneside-nois": 1, "rec-oneside-is": 2, "grpo": 3, "rec-oneside-nois (.6,2)": 4, "reinforce-is": 5,
             "rec-oneside-nois 5×lr": 7, "rep-opmd": 2, "rep-asymre": 4, "red-drop": 2, "red-weight": 6, "red-weight-adaptive": 4,
             "red-weight-oneside": 5, "rec-ring-nois": 6, "rec-ring-is": 7, "rec-twoside-nois": 0, "rec-twoside-is": 3}
    colour, line = STYLES[index[row]]
    marker = "o" if row.startswith("red") else "^" if row.startswith("rep") else "s" if "twoside" in row else ""
    return {"color": colour, "linestyle": line, "marker": marker, "markersize": 3}


def draw_curves(grid, rows, settings, *, title, directory, name, column="eval_accuracy", label="held-out accuracy"):
    """One panel per setting, one curve per row: mean over seeds with its 95 % bootstrap band."""
    fig, axes = figure(len(settings), width=3.9, height=3.3, sharey=True, squeeze=False)
    for axis, setting in zip(axes[0], settings):
        for row in rows:
            steps, values = curves(grid, row, setting, column)
            band = np.array([mean_interval(values[:, i], resamples=1000) for i in range(len(steps))])
            axis.plot(steps, band[:, 0], label=row, **style(row))
            axis.fill_between(steps, band[:, 1], band[:, 2], color=style(row)["color"], alpha=0.15, linewidth=0)
        axis.set_title({"(1,0)": "on-policy (1,0)", "(20,0)": "synced every 20 steps (20,0)", "(1,10)": "10 batches late (1,10)"}.get(setting, setting))
        axis.set_xlabel("training step")
    axes[0, 0].set_ylabel(label)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(rows), fontsize=8)
    fig.suptitle(title)
    save_figure(fig, directory, name)


def draw_figures(directory) -> None:
    """The paper's figures; each title asks its question and gives the verdict that `judge` reached."""
    grid = load_grid("paper")
    seeds, claims = len({line["seed"] for line in grid}), judge(grid)
    stale, every = ("(20,0)", "(1,10)", "offline"), tuple(SETTINGS)
    plain, clipped, wide = "reinforce", "rec-oneside-nois", "rec-oneside-nois (.6,2)"
    plan = [
        ("paper_rec", (plain, "grpo", "rec-oneside-is", clipped, wide, "reinforce-is"), stale, "P2",
         "Does clipping save REINFORCE on stale data?", (plain, clipped, "rec-oneside-is")),
        ("paper_clip_shape", (clipped, "rec-twoside-nois", "rec-twoside-is", "rec-ring-nois", "rec-ring-is"), stale, "P5",
         "Do other shapes of clipping do as well as one-side?", (clipped, "rec-twoside-nois", "rec-ring-nois")),
        ("paper_learning_rate", (clipped, "rec-oneside-nois 5×lr", wide), stale, "P4",
         "Is a wider clip better than a larger step?", (wide, "rec-oneside-nois 5×lr")),
        ("paper_red", (plain, "grpo", "red-drop", "red-weight", "red-weight-adaptive", "red-weight-oneside"), every, "P6",
         "Does shaping the data alone do as well as GRPO?", ("red-drop", "red-weight", "grpo")),
        ("paper_rep", (plain, clipped, "rep-opmd", "rep-asymre"), every, "P7",
         "Does an additive penalty stabilise, too?", (plain, "rep-opmd", "rep-asymre")),
    ]
    for name, rows, settings, claim, question, quoted in plan:
        ends = ", ".join(f"{row} {final(grid, row, '(20,0)').mean():.2f}" for row in quoted)
        draw_curves(grid, rows, settings, name=name, directory=directory,
                    title=f"{question} {claim}: {claims[claim]['verdict']}, {seeds} seeds\nEnd of (20,0): {ends}")
    draw_kl(grid, directory)
    if (DATA / "staleness.csv").exists():
        draw_staleness(grid + load_grid("staleness"), directory)  # the paper's settings are among the intervals


def draw_kl(grid, directory) -> None:
    """Largest distance to the sampler against the accuracy lost from the peak, one point per run."""
    fig, axis = figure(width=5.6, height=4.0)
    markers = {"(20,0)": "s", "(1,10)": "^", "offline": "D"}
    distance, lost = [], []
    for setting, marker in markers.items():
        for row, grey in (("everything else", "0.65"), ("reinforce", "black")):
            chosen = [row] if row in ROWS else [r for r in ROWS if r != "reinforce"]
            x = np.concatenate([np.nanmax(curves(grid, r, setting, "kl_old")[1], axis=1) for r in chosen])
            y = np.concatenate([drop_from_peak(grid, r, setting) for r in chosen])
            axis.scatter(x, y, marker=marker, color=grey, s=22 if row in ROWS else 10, linewidths=0, label=f"{row}, {setting}")
            distance, lost = distance + x.tolist(), lost + y.tolist()
    axis.set_xscale("log")
    rank = np.corrcoef(np.argsort(np.argsort(distance)), np.argsort(np.argsort(lost)))[0, 1]
    losers = np.array(distance)[np.array(lost) > 0.05]
    axis.set_title(f"{(losers > 0.1).sum()} of the {len(losers)} runs that lost more than 5 points again had been far from\n"
                   f"their sampler (KL > 0.1); {len(lost)} stale runs, rank correlation {rank:.2f}", fontsize=10)
    axis.set_xlabel("largest KL(sampler ‖ policy) per token, mean of 15 steps")
    axis.set_ylabel("accuracy lost since the best evaluation")
    axis.legend(fontsize=7)
    save_figure(fig, directory, "paper_kl")


def draw_staleness(grid, directory) -> None:
    fig, axis = figure(width=5.6, height=4.0)
    for row in SWEEP:
        band = np.array([mean_interval(final(grid, row, f"({i},0)")) for i in INTERVALS])
        axis.plot(INTERVALS, band[:, 0], label=row, **style(row))
        axis.fill_between(INTERVALS, band[:, 1], band[:, 2], color=style(row)["color"], alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(INTERVALS, [str(i) for i in INTERVALS])
    axis.set_xlabel("sync interval I: steps between two refreshes of the sampler")
    axis.set_ylabel("held-out accuracy at the end")
    plain, clipped = ([final(grid, row, f"({i},0)").mean() for i in INTERVALS] for row in ("reinforce", "rec-oneside-nois"))
    axis.set_title(f"From fresh to stale: REINFORCE {plain[0]:.2f}, at worst {min(plain):.2f} (I = {INTERVALS[np.argmin(plain)]});\n"
                   f"with clipping (rec-oneside-nois) never below {min(clipped):.2f}", fontsize=10)
    axis.legend(fontsize=8)
    save_figure(fig, directory, "paper_staleness")


# %% ------------------------------------------------------------------------------------------------------------ main


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="paper", choices=["paper", "staleness", "family", "hard", "conditions"])
    parser.add_argument("--seeds", type=int, default=5, help="seeds per cell (default 5)")
    parser.add_argument("--steps", type=int, default=120, help="training steps per run (default 120)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: the number of cores)")
    parser.add_argument("--cache-dir", default=str(ROOT / "cache"), help="where the built-in models are kept")
    parser.add_argument("--out", default=str(ROOT / "figures"), help="folder for the figures (default figures)")
    parser.add_argument("--plot-only", action="store_true", help="draw and judge from the committed tables, without training")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.steps < 45 or args.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1, and --steps at least 45 (three evaluations make the end of a run)")
    if not args.plot_only:
        train_grid(args.grid, seeds=args.seeds, steps=args.steps, jobs=args.jobs, cache_dir=args.cache_dir)
    if args.grid in ("paper", "staleness"):
        draw_figures(args.out)
    if args.grid == "family":
        write_text(DATA / "family.md", family_table(load_grid("family")))
        print(family_table(load_grid("family")))
    if args.grid in ("paper", "hard"):
        table = verdict_table(judge(load_grid(args.grid)), f"python paper_grid.py --plot-only --grid {args.grid}")
        write_text(DATA / f"{args.grid}_claims.md", table)
        print(table)
    if args.grid == "conditions":
        table = conditions_table(with_the_papers_rate(load_grid("conditions")))
        write_text(DATA / "conditions.md", table)
        print(table)


if __name__ == "__main__":
    main()
