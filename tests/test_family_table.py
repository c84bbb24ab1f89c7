"""The table of the family: every row of ALGORITHMS stands in it, and its columns are what the code does."""

import importlib
import math
import pathlib
import re

import pytest

lm = importlib.import_module("06_full_llm_training")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def columns(row):
    """A, M, W, R, N and the paper of a row, as the table says them: generated from the dataclass, never typed."""
    def number(value):
        return f"{value:.4g}".replace("0.", ".", 1) if value < 1 else f"{value:.4g}"

    ratio = {"token": "ρ", "sequence": "s", "trajectory": "Πρ"}[row.level]
    reward = "r/len" if row.per_token_reward else "r̂" if row.correct_noise else "r"
    advantage = {"group": f"{reward} − mean", "leave-one-out": f"{reward} − mean of the others",
                 "batch": f"{reward} − batch mean", "virtual": f"({reward} − mean with a virtual 1)/std",
                 "hinted": "(r + bonus − mean)/std"}[row.baseline]
    advantage = f"({advantage})/std" if row.std_normalize else advantage
    heat = "" if row.weight_temperature == 1 else f"/{number(row.weight_temperature)}"
    advantage = {"none": advantage, "drop": "r − mean of the kept", "weight": f"({advantage})·exp(A{heat})",
                 "adaptive-weight": f"({advantage})·exp(A/T), T by length"}[row.shaping]
    if row.process_weight is not None:
        advantage = f"({advantage} ± {number(row.process_weight)}·process) × entropy share"
    bounds = f"{number(row.eps_low)}/{number(row.eps_high)}"
    outer = f", again beyond {number(row.outer_low)}/{number(row.outer_high)}" if row.clip == "ring" else ""
    where = " on s" if row.level == "sequence" else ""
    clip = "1" if row.clip == "none" else f"{row.clip.replace('_', '-')} {bounds}{outer}{where}"
    capped = ratio if math.isinf(row.weight_cap) else f"min({ratio}, {number(row.weight_cap)})"
    weight = {"one": "1", "ratio": capped, "ratio-if-worse": f"1; A < 0: {capped}",
              "capped-mean": "mean of bounded ρ"}[row.weight]
    weight += f"; hinted: π/(π + {number(row.hint_smoothing)})" if row.worked_examples else ""
    terms = [f"({number(row.tau)}/2)·d²"] * (row.tau > 0) + [f"−{number(row.beta)}·d"] * (row.beta > 0)
    if row.entropy_target is not None:
        terms.append(f"entropy → {number(row.entropy_target)}")
    paper = re.sub(r"arXiv (\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", row.source)
    return [advantage, clip, weight, ", ".join(terms) or "0", row.aggregation, paper]


def rows_of_table(text):
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:7] for cells in lines if len(cells) == 9}


def complaints(table, rows):
    """What is wrong with a table, with the lines to paste; "" if nothing is. rows: name → its columns."""
    said = []
    for name, cells in rows.items():
        if table.get(name) != cells:
            said.append(f"docs/family.md {'says something else of' if name in table else 'lacks'} `{name}`. Its line is\n"
                        f"| `{name}` | {' | '.join(cells)} | WHAT IT ADDS | THE NUMBER THAT PROVES IT |")
    return "\n\n".join(said + [f"docs/family.md has `{name}`, ALGORITHMS has not" for name in table.keys() - rows.keys()])


def test_the_table_says_what_the_code_does():
    wrong = complaints(rows_of_table((ROOT / "docs" / "family.md").read_text(encoding="utf-8")),
                       {name: columns(row) for name, row in lm.ALGORITHMS.items()})
    if wrong:
        pytest.fail(wrong, pytrace=False)


def test_a_row_that_is_new_changed_or_gone_is_said_with_the_line_to_paste():
    row = columns(lm.ALGORITHMS["grpo"])
    pasted = complaints({}, {"mine": row}).splitlines()[1]
    assert complaints(rows_of_table(pasted), {"mine": row}) == ""
    assert "something else of `mine`" in complaints({"mine": ["r − mean", *row[1:]]}, {"mine": row})
    assert complaints({"old": row}, {}) == "docs/family.md has `old`, ALGORITHMS has not"
