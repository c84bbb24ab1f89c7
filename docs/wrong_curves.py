"""The wrong lines of wrong_losses.md in real runs: each is put into the trainer in memory, beside the right one.

    python docs/wrong_curves.py     train what is missing (about 15 minutes on one core), draw, print the page's numbers

A run is 60 steps of 06 on two-digit additions with the built-in model; one seed. It is kept in
figures/data/wrong_losses.csv under a key of its flags and its wrong lines, so a stopped command goes on where it was.
"""

import csv
import hashlib
import importlib
import json
import pathlib
import re
import shutil
import sys
import tempfile
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
from utils import figure, save_figure
PAGE, DATA = ROOT / "docs" / "wrong_losses.md", ROOT / "figures" / "data" / "wrong_losses.csv"
LM, STEPS = "06_full_llm_training.py", 60
COMMON = f"--steps {STEPS} --eval-every 10 --eval-samples 2 --log-tokens 0 --seed 0 --device cpu".split()
METRICS = ["eval_accuracy", "reward", "kl_old", "clip_fraction", "ratio_mean", "ratio_max", "grad_norm", "entropy",
           "completion_length", "truncated", "staleness"]
EXHIBIT = re.compile(r"(?P<number>\d+)\. (?P<title>[^\n]+)\n\nIn `(?P<file>[^`]+)`:\n```diff\n(?P<diff>.+?)```\n"
                     r"(?P<text>.+?)Caught by\s`(?P<tests>[^:]+)::(?P<test>\w+)`", re.S)


def exhibits():
    """Number → what the page says. words: its panel's, in bold there; keys: of its runs, (right, wrong)."""
    shown = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        one = types.SimpleNamespace(**EXHIBIT.match(section).groupdict())
        one.text = " ".join(one.text.split())
        one.words = (re.findall(r"\*\*(.+?)\*\*", one.text) or [""])[0]
        one.flags = "--algorithm " + re.search(r"Run `(.+?)`", one.text)[1]
        one.metrics = re.findall(r"`(\w+)` \S+, right", one.text)
        one.keys = [hashlib.sha256(json.dumps([COMMON, one.flags, *what]).encode()).hexdigest()[:10]
                    for what in ((LM, ""), (one.file, one.diff))]
        shown[int(one.number)] = one
    return shown


def module(file, diff="", *, install=False):
    """The file as a module, diff's plus line, of which there is one, replaced; install: later imports find it, too."""
    source, name = (ROOT / file).read_text(encoding="utf-8"), file.removesuffix(".py").replace("/", ".")
    if diff:
        wrong, (right,) = ([line[2:] for line in diff.splitlines() if line[0] == sign] for sign in "-+")
        ((indent, rest),) = re.findall(rf"^( *){re.escape(right)}(.*)\n", source, re.M)
        source = source.replace(f"{indent}{right}{rest}\n", "\n".join(indent + line for line in wrong) + f"{rest}\n")
    made = types.ModuleType(name)
    made.__file__ = str(ROOT / file)
    if install:
        sys.modules[name] = made
        if file != LM:
            setattr(importlib.import_module("under_the_hood"), name.partition(".")[2], made)
    exec(compile(source, file, "exec"), made.__dict__)  # noqa: S102
    return made


def run(flags, file=LM, diff=""):
    """The rows of one run. Where the self-check refuses the wrong lines, it is left out, and the rows say so."""
    for name in [name for name in sys.modules if name.split(".")[0] == "under_the_hood"]:
        del sys.modules[name]
    if file != LM:
        module(file, diff, install=True)
    lm, refused = module(LM, diff if file == LM else ""), []

    def choose_engine(*arguments, check=lm.choose_engine):
        try:
            return check(*arguments)
        except lm.UserError as error:
            refused.append(error)
            return arguments[3]  # the configuration
    lm.choose_engine = choose_engine
    with tempfile.TemporaryDirectory() as folder:
        base, out = pathlib.Path(folder) / "base", pathlib.Path(folder) / "run"
        if "DROPOUT" in flags:  # the built-in model, saved with dropout as many a model is
            shutil.copytree(importlib.import_module("under_the_hood.models").built_in_model(2, ROOT / "cache"), base)
            config = json.loads((base / "config.json").read_text())
            (base / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
        argv = [*flags.replace("DROPOUT", str(base)).split(), *COMMON, "--out", str(out)]
        if "--sync-offset" in flags:  # stopped halfway, and resumed
            lm.main([*argv, "--steps", str(STEPS // 2)])
            argv.append("--resume")
        lm.main(argv)
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [{"step": line["step"], "refused": len(refused)}
                | {name: f"{line[name]:.4g}" for name in METRICS if name in line} for line in lines]


def load():
    table = {}  # key → rows
    for row in csv.DictReader(DATA.read_text(encoding="utf-8").splitlines()) if DATA.exists() else ():
        table.setdefault(row["key"], []).append(row)
    return table


def seen(one, table):
    """What the page says of a run: accuracy of the last evaluation, other metrics' mean over the second half."""
    right, wrong = (table[key] for key in one.keys)

    def value(rows, name):
        values = [float(row[name]) for row in rows if row[name] and int(row["step"]) > STEPS // 2]
        return f"{values[-1]:.3f}" if name == "eval_accuracy" else f"{round(sum(values) / len(values), 6) + 0.0:.3g}"

    told = "; ".join(f"`{name}` {value(wrong, name)}, right {value(right, name)}" for name in one.metrics)
    if all(a[name] == b[name] for a, b in zip(right, wrong, strict=True) for name in METRICS):
        told = "every number is the right run's"
    refused = " (06 refuses it; so without the self-check)" * (wrong[0]["refused"] == "1")
    return f"Run `{one.flags.removeprefix('--algorithm ')}`{refused}: {told}."


def draw(table, shown):
    drawn = [number for number in shown if shown[number].words]
    fig, axes = figure(3, len(drawn) // 3, width=3.6, height=2.5)
    for axis, number, one in zip(axes.flat, drawn, map(shown.get, drawn), strict=True):
        styles, name = (("right line", "black", "--", 1.2), ("wrong line", "#D55E00", "-", 2.4)), one.metrics[0]
        for key, (label, color, line, width) in zip(one.keys, styles):
            points = zip(*((int(row["step"]), float(row[name])) for row in table[key] if row[name]))
            axis.plot(*points, label=label, color=color, linestyle=line, linewidth=width)
        axis.set_title(f"{number}. {one.title}\n{one.words}", fontsize=8, loc="left")
        axis.set(ylabel=name.removeprefix("eval_"), xlabel="step" if axis in axes[-1] else "")
    axes.flat[0].legend()
    fig.suptitle("One wrong line each: its run (orange, thick) beside the right line's run (black, dashed)")
    save_figure(fig, ROOT / "figures", "wrong_losses")


def main():
    table, shown = load(), exhibits()
    for number, one in shown.items():
        for key, name, what in zip(one.keys, ("right", one.title), ((), (one.file, one.diff))):
            if key not in table:
                print(f"== {number}. {one.title}: {one.flags}{', the wrong lines' if what else ''}", flush=True)
                table[key] = [{"key": key, "run": name} | row for row in run(one.flags, *what)]
                with open(DATA, "w", encoding="utf-8", newline="") as out:
                    writer = csv.DictWriter(out, ("key", "run", "step", "refused", *METRICS), "", lineterminator="\n")
                    writer.writeheader()
                    wanted = dict.fromkeys(key for one in shown.values() for key in one.keys)
                    writer.writerows(row for key in wanted for row in table.get(key, ()))
                table = load()
    print(*(f"{number}. {seen(one, table)}" for number, one in shown.items()), sep="\n")
    draw(table, shown)


if __name__ == "__main__":
    main()
