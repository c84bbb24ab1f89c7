"""Plumbing that every lesson shares: flags, seeding, the claims table, exercises, figure style. No algorithm lives here.

A lesson collects *claims*, rows that say what the text expects and what the code measured:

    claims = []
    check(claims, "mean of the score function", expected=0.0, measured=score.mean(), tolerance=1e-12)
    finish(claims, args)            # prints the table, writes --json, exits 1 if a row failed
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import sys

import matplotlib

matplotlib.use("Agg")  # figures go to files, never to a window
import matplotlib.pyplot as plt
import numpy as np
import torch

plt.rcParams["savefig.dpi"] = 160


def seed_everything(seed: int) -> torch.Generator:
    """Seed python, numpy and torch, and return a fresh CPU generator with the same seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def pick_device(name: str = "auto") -> torch.device:
    """'auto' takes cuda, then mps, then cpu. A device that this machine lacks is a ValueError that says so."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, present in available.items() if present)
    if not available.get(name.split(":")[0], False):
        raise ValueError(f"device {name!r} is not available here; use --device auto or one of: "
                         + ", ".join(device for device, present in available.items() if present))
    return torch.device(name)


# ---------------------------------------------------------------- the claims table


def check(claims: list, claim: str, *, expected, measured, tolerance: float = 1e-10) -> bool:
    """Append one row. Numbers, booleans, strings, arrays: ok means max |expected − measured| ≤ tolerance (NaN is never ok)."""
    if isinstance(expected, (str, bool)):
        error, ok = float(expected != measured), expected == measured
    else:
        expected, measured = (np.asarray(v.detach() if torch.is_tensor(v) else v, dtype=float) for v in (expected, measured))
        if expected.shape != measured.shape:
            raise ValueError(f"claim {claim!r}: expected has shape {expected.shape}, measured {measured.shape}")
        error = float(np.abs(expected - measured).max(initial=0.0))
        ok, expected, measured = error <= tolerance, expected.tolist(), measured.tolist()
    claims.append({"claim": claim, "expected": expected, "measured": measured, "tolerance": tolerance, "error": error, "ok": bool(ok)})
    return bool(ok)


def _short(value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        flat = np.asarray(value).ravel()
        return "[" + ", ".join(f"{v:.4g}" for v in flat[:4]) + (f", … {flat.size} values]" if flat.size > 4 else "]")
    return str(value)


def finish(claims: list, args: argparse.Namespace) -> None:
    """Print the claims table, write it to --json where asked, and exit with status 1 if a claim failed."""
    rows = [[c["claim"], _short(c["expected"]), _short(c["measured"]), f"{c['error']:.1e}", "ok" if c["ok"] else "FAIL"] for c in claims]
    header = ["claim", "expected", "measured", "error", ""]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(5)]
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    failed = sum(not c["ok"] for c in claims)
    print(f"\n{len(claims) - failed} of {len(claims)} claims hold" + (f", {failed} FAILED" if failed else ""))
    if args.json:
        write_text(args.json, json.dumps(claims, indent=1, ensure_ascii=False))
    sys.exit(1 if failed else 0)


def write_text(path, text: str) -> None:
    """Write a file whole or not at all: into a temporary neighbour, flushed to the disk, then renamed over the target."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"unfinished-{path.name}-{os.getpid()}")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


# ---------------------------------------------------------------- flags and exercises


def lesson_arguments(docstring: str, argv=None) -> argparse.Namespace:
    """The flags that every lesson takes."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that is sampled (default 0)")
    parser.add_argument("--out", default="figures", metavar="DIR", help="folder for the figures (default figures)")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and steps; the same claims")
    parser.add_argument("--json", metavar="PATH", help="also write the claims table to this file")
    parser.add_argument("--exercise", type=int, metavar="N", help="check your answer to exercise N instead of running the lesson")
    parser.add_argument("--answer", metavar="FILE", help="your file for --exercise (default exercise_<lesson>_<N>.py; made with a stub when absent)")
    args = parser.parse_args(argv)
    if args.quick:
        plt.rcParams["savefig.dpi"] = 60  # drawing fine figures would be a third of a quick run
    return args


def run_exercise(exercises: dict, args: argparse.Namespace) -> None:
    """Check the reader's function against the lesson's own, input by input, and exit 0 (right) or 1 (say where it first differs).

    exercises: number → (function name, task text, reference function, list of argument tuples).
    """
    if args.exercise not in exercises:
        sys.exit(f"no exercise {args.exercise}; this lesson has {sorted(exercises)}")
    name, task, reference, inputs = exercises[args.exercise]
    lesson = pathlib.Path(sys.argv[0]).stem[:2]  # "03" of 03_offpolicy_derivation.py
    path = pathlib.Path(args.answer or f"exercise_{lesson}_{args.exercise}.py")
    if not path.exists():
        arguments = reference.__code__.co_varnames[: reference.__code__.co_argcount]
        write_text(path, f'import torch\n\n\ndef {name}({", ".join(arguments)}):\n    """{task}"""\n    raise NotImplementedError\n')
        sys.exit(f"Exercise {args.exercise}: {task}\nA stub now stands in {path}: fill it in and run the same command again.")
    spec = importlib.util.spec_from_file_location("answer", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        for arguments in inputs:
            want = torch.as_tensor(reference(*arguments), dtype=torch.float64)
            have = torch.as_tensor(getattr(module, name)(*arguments), dtype=torch.float64)
            if have.shape != want.shape:
                sys.exit(f"Not yet: {name}{arguments} has shape {tuple(have.shape)}, expected {tuple(want.shape)}")
            wrong = ~torch.isclose(have, want, rtol=1e-6, atol=1e-9)
            if wrong.any():
                first = tuple(wrong.nonzero()[0].tolist())
                sys.exit(f"Not yet: for {name}{arguments}\nthe first difference is at index {first}: yours {have[first].item():.9g}, right {want[first].item():.9g}")
    except Exception as error:  # the reader's code may fail in any way; say how, without our own stack
        sys.exit(f"Not yet: your {name} in {path} raised {type(error).__name__}: {error}")
    print(f"Right: {name} agrees with the lesson on all {len(inputs)} inputs.")
    sys.exit(0)


# ---------------------------------------------------------------- figures

# Okabe–Ito colours, each with a line style of its own, so that a figure also reads in black and white.
STYLES = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":"),
          ("#E69F00", (0, (5, 1, 1, 1, 1, 1))), ("#56B4E9", (0, (7, 2))), ("#000000", (0, (1, 1))), ("#8C6D31", (0, (3, 1, 1, 1)))]


def figure(columns: int = 1, rows: int = 1, *, width: float = 4.6, height: float = 3.4, **options):
    """A figure in the house style; `options` go to plt.subplots."""
    plt.rcParams.update({
        "axes.prop_cycle": matplotlib.cycler(color=[c for c, _ in STYLES], linestyle=[s for _, s in STYLES]),
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium", "figure.dpi": 100,
        "font.size": 10, "legend.frameon": False, "lines.linewidth": 1.8,
    })
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained", **options)


def save_figure(fig, directory, name: str) -> pathlib.Path:
    """Write DIR/name.png and close the figure; returns the path."""
    path = pathlib.Path(directory) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, metadata={"Software": None})
    plt.close(fig)
    print(f"figure: {path}")
    return path
