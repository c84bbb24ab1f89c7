"""Plumbing that every script shares: seeds, devices, the page of a lesson, figure style. No algorithm.

A lesson is a page that computes as it is read. It begins with lesson = Lesson(__name__, __doc__); then in each section

    lesson.section("1. The surrogate objective")                           a heading on the terminal
    lesson.check("(3.2) π* = π_t·exp(r/τ)/Z", measured, expected, 1e-7)    a number, checked where it is made
    if lesson.draws: … lesson.save_figure(fig, "03_pairwise")              the picture
    lesson.say("So the data never enters.")                                what it means

up to lesson.finish(exercises): the count of claims, --json, the exit status. Run, it prints and draws; in a notebook
pictures stand in place; imported, it is silent, draws nothing and takes the --quick path.
"""

import argparse
import json
import pathlib
import random
import runpy
import sys
import textwrap

import matplotlib
import numpy as np
import torch

NOTEBOOK = "ipykernel" in sys.modules
if not NOTEBOOK:
    matplotlib.use("Agg")  # figures go to files, never to a window
import matplotlib.pyplot as plt

def seed_everything(seed: int) -> torch.Generator:
    """Seed python, numpy and torch, and return a fresh CPU generator with the same seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def pick_device(name: str = "auto") -> torch.device:
    """'auto' takes cuda, then mps, then cpu. A device that this machine lacks is a ValueError that says so."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    usable = [kind for kind, there in present.items() if there]
    if name != "auto" and name.split(":")[0] not in usable:
        raise ValueError(f"device {name!r} is not available here; use --device auto or one of: {', '.join(usable)}")
    return torch.device(usable[0] if name == "auto" else name)


# ---------------------------------------------------------------- the page of a lesson


class Lesson:
    """Flags, claims, printing and exercises of one lesson. Read seed, generator, quick and draws; claims fills up."""

    def __init__(self, module: str, docstring: str):
        parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--seed", type=int, default=0, help="seed of everything that is sampled (default 0)")
        parser.add_argument("--out", default="figures", metavar="DIR", help="folder for the figures (default figures)")
        parser.add_argument("--quick", action="store_true", help="fewer seeds and steps; the same claims")
        parser.add_argument("--claims", action="store_true", help="also print the full table of claims")
        parser.add_argument("--json", metavar="PATH", help="also write the claims to this file")
        parser.add_argument("--exercise", type=int, metavar="N", help="do exercise N instead of reading the lesson")
        parser.add_argument("--answer", metavar="TEXT", help="what you predict, or the file with your function")
        self.args = parser.parse_args(None if module == "__main__" and not NOTEBOOK else [])
        self.draws = module == "__main__" and self.args.exercise is None  # else silent, quick, no pictures
        self.quick = self.args.quick or not self.draws
        self.seed, self.generator = self.args.seed, seed_everything(self.args.seed)
        self.claims, self.heading = [], ""
        plt.rcParams["savefig.dpi"] = 60 if self.args.quick else "figure"  # fine ones take long

    def section(self, heading: str) -> None:
        self.heading = heading
        if self.draws and not NOTEBOOK:  # which shows the heading of the prose
            print(f"\n{heading}")

    def say(self, text: str) -> None:
        if self.draws:
            print(textwrap.fill(text, 98, initial_indent="  → ", subsequent_indent="    "))

    def check(self, claim: str, measured, expected, tolerance: float = 1e-10, *, quiet: bool = False) -> None:
        """One claim: max |expected − measured| ≤ tolerance (NaN never is); text and truth must be equal.

        quiet: only in the table of --claims. A failed claim is always printed in full.
        """
        if isinstance(expected, (str, bool)):
            ok = expected == measured
        else:
            measured, expected = (np.asarray(v.detach() if torch.is_tensor(v) else v, float)
                                  for v in (measured, expected))
            if expected.shape not in ((), measured.shape):
                raise ValueError(f"{claim}: expected has shape {expected.shape}, measured {measured.shape}")
            ok = bool(np.abs(expected - measured).max(initial=0.0) <= tolerance)
            expected, measured = expected.tolist(), measured.tolist()
        self.claims.append(dict(claim=claim, section=self.heading, expected=expected, measured=measured,
                                tolerance=tolerance, ok=ok))
        if not ok:
            print(f"FAILED {claim}\n  expected {expected} ± {tolerance}\n  measured {measured}")
        elif self.draws and not quiet:
            print(textwrap.fill(f"  {claim}: {brief(measured)}", 98, subsequent_indent="      "))

    def save_figure(self, fig, name: str) -> None:
        if not NOTEBOOK:  # which shows it below the cell
            save_figure(fig, self.args.out, name)

    def finish(self, exercises: dict | None = None) -> None:
        """The last line of a lesson: the exercise, or the table, --json, the count and the exit status."""
        if self.args.exercise is not None:
            sys.exit(exercise(exercises or {}, self.args.exercise, self.args.answer))
        if not self.draws:
            return
        for c in self.claims if self.args.claims else ():
            told = f"{brief(c['measured'])}, expected {brief(c['expected'])}"
            print(textwrap.fill(f"{'ok' if c['ok'] else 'FAIL'}  {c['claim']}: {told}", 98, subsequent_indent="     "))
        if self.args.json:
            pathlib.Path(self.args.json).write_text(json.dumps(self.claims, indent=1), encoding="utf-8")
        failed = sum(not c["ok"] for c in self.claims)
        print(f"\n{len(self.claims) - failed} of {len(self.claims)} claims hold, {failed} failed")
        if not NOTEBOOK:
            sys.exit(1 if failed else 0)


def brief(value) -> str:
    if isinstance(value, (str, bool)):
        return str(value)
    flat = np.asarray(value, dtype=float).ravel()
    shown = ", ".join(f"{v:.6g}" if flat.size == 1 else f"{v:.4g}" for v in flat[:6])
    return shown if flat.size == 1 else f"[{shown}]" if flat.size < 7 else f"[{shown}, … {flat.size} values]"


def exercise(exercises: dict, number: int, answer: str | None):
    """Do one exercise; returns the exit status: 0 for a right answer, else 1 or a message; 2 if there is no such one.

    exercises: number → (question, answer, why), revealed once --answer is given, or
    number → (task, "def name(arguments):", check), where check(function) returns what is wrong, in words, or None."""
    if number not in exercises:
        print(f"error: there is no exercise {number}, only {', '.join(map(str, exercises)) or 'none'}", file=sys.stderr)
        return 2
    text, right, how = exercises[number]
    if not callable(how):
        if answer is None:
            return f"Exercise {number}: {text}\nDecide first; then run the same command with --answer and your answer."
        try:
            same = abs(float(answer) - float(right)) <= 0.01 * abs(float(right))
        except ValueError:
            same = "".join(answer.split()).casefold() == "".join(str(right).split()).casefold()  # "4, 2" is "4,2"
        print(f"{'Right' if same else f'No: {right}'}. {how}")
        return 0 if same else 1
    path = pathlib.Path(answer or f"exercise_{pathlib.Path(sys.argv[0]).stem[:2]}_{number}.py")
    if not path.exists():
        path.write_text(f'import torch\n\n\n{right}\n    """{text}"""\n    raise NotImplementedError\n', "utf-8")
        return f"Exercise {number}: {text}\nA stub now stands in {path}: fill it in and run the same command again."
    try:
        complaint = how(runpy.run_path(str(path))[right.removeprefix("def ").partition("(")[0]])
    except Exception as error:  # noqa: BLE001 (the reader's code may fail in any way: say how, without our stack)
        return f"Not yet: {path} raised {type(error).__name__}: {error}"
    return f"Not yet: {complaint}" if complaint else print("Right: your function passes every check.")


# ---------------------------------------------------------------- figures

# One method: one colour, one line and one marker in every figure. REINFORCE warm, REC blue, REP pink, RED green.
METHODS = {
    "reinforce": ("#D55E00", "-", "o"), "reinforce-is": ("#E69F00", "--", "s"), "grpo": ("#000000", "-", "^"),
    "rec-oneside-nois": ("#0072B2", "-", "D"), "rec-oneside-is": ("#0072B2", "--", "v"),
    "rec-oneside-nois (.6,2)": ("#56B4E9", "-", "d"), "rec-oneside-is (.6,2)": ("#56B4E9", "--", "1"),
    "rec-oneside-nois 5×lr": ("#0072B2", ":", "x"),
    "rec-twoside-nois": ("#5B4FA2", "-.", "p"), "rec-twoside-is": ("#5B4FA2", ":", "h"),
    "rec-ring-nois": ("#8C6D31", "-.", "*"), "rec-ring-is": ("#8C6D31", ":", "8"),
    "rep-opmd": ("#CC79A7", "-", "P"), "rep-asymre": ("#CC79A7", "--", "X"),
    "red-drop": ("#009E73", "--", ">"), "red-weight": ("#009E73", "-", "<"),
    "red-weight-adaptive": ("#009E73", ":", "+"), "red-weight-oneside": ("#004D38", "-.", "H"),
}
# What is no method (an arm, a prompt, a data source) takes its line from this cycle.
STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"), ("#56B4E9", (0, (7, 2))),
          ("#E69F00", (0, (5, 1, 1, 1, 1, 1))), ("#000000", (0, (1, 1))), ("#8C6D31", (0, (3, 1, 1, 1)))]


def method_style(name: str, *, points: int = 0) -> dict:
    """Keywords for axis.plot; points: about that many markers on the line. A name that the table lacks is grey."""
    colour, line, marker = METHODS.get(name, ("#666666", "-", "."))
    markers = {"marker": marker, "markersize": 5, "markevery": 1 / points} if points else {}
    return {"color": colour, "linestyle": line, **markers}


def figure(columns: int = 1, rows: int = 1, *, width: float = 4.6, height: float = 3.4, **options):
    """A figure in the house style; `options` go to plt.subplots."""
    plt.rcParams.update({
        "axes.prop_cycle": matplotlib.cycler(color=[c for c, _ in STYLES], linestyle=[s for _, s in STYLES]),
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium", "figure.dpi": 160,
        "font.size": 10, "legend.frameon": False, "lines.linewidth": 1.8})
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained", **options)


def save_figure(fig, directory, name: str) -> pathlib.Path:
    """Write DIR/name.png and close the figure; returns the path."""
    path = pathlib.Path(directory) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Software": None})
    plt.close(fig)
    print(f"  figure: {path}")
    return path
