"""docs/take_it_home.md: its one table has every row, flag and metric, and says of Trinity what --export writes."""

import dataclasses
import importlib
import re

from conftest import ROOT

from experiments.claims import load_grid
from under_the_hood.export import missing_in_trinity, trinity_algorithm
from under_the_hood.runs import METRICS

lm = importlib.import_module("06_full_llm_training")
TEXT = (ROOT / "docs" / "take_it_home.md").read_text(encoding="utf-8")
TABLE = {section: body for section, body in
         re.findall(r"\| \*\*(rows|flags|metrics)\*\* \|.*\n((?:\| `.*\n)+)", TEXT)}


def first_column(section):
    names = [name for line in TABLE[section].splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])]
    assert len(names) == len(set(names))
    return set(names)


def test_every_row_flag_and_metric_stands_in_the_table():
    """A new row may be absent until it has runs in figures/data/family.csv."""
    run = {line["row"] for line in load_grid("family")}
    assert run <= first_column("rows") <= set(lm.ALGORITHMS)
    flags = {f"--{field.name.replace('_', '-')}" for group in lm.GROUPS for field in dataclasses.fields(group)}
    assert first_column("flags") == flags
    assert first_column("metrics") == set(METRICS)


def words(row):
    """A row in Trinity, as the table says it: generated from the export."""
    if missing_in_trinity(row):
        return "—"
    made = trinity_algorithm(row)
    loss, advantage = made["policy_loss_fn_args"], made["advantage_fn_args"]
    if made["policy_loss_fn"] == "cispo":
        said = [f"cispo, clip_range_high {loss['clip_range_high']:g}"]
    else:
        said = ["rec", *(f"{key} {loss[key]}" for key in ("clip_mode", "weight") if loss[key] != "none")]
        said += [f"{loss['regularizer']} {loss['regularizer_coef']:g}"] * (loss["regularizer"] != "none")
    said += ["advantage_fn rloo"] * (made["advantage_fn"] == "rloo") + ["drop balance"] * bool(advantage.get("drop"))
    return ", ".join(said + ["std_normalize"] * bool(advantage.get("std_normalize")))


def test_the_columns_say_what_the_code_does():
    for line in TABLE["rows"].splitlines():
        name, trl, verl, trinity, paper = line.strip("| ").split(" | ")
        row = lm.ALGORITHMS[name.strip("`")]
        assert trinity == words(row) and paper == row.source, name
        assert trl.startswith("refused" if row.worked_examples else "our row"), name
        assert verl.startswith(f"our-{name.strip('`')}") == (name.strip("`") not in lm.NEIGHBOURS), name


def test_its_links_lead_somewhere():
    for page in (ROOT / "docs" / "take_it_home.md", *(ROOT / "examples").glob("*.md")):
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_functions_it_says_to_copy_are_there():
    names = set(re.findall(r"`([a-z_]+)`", TEXT.split("## What to copy")[1].split("They take tensors")[0]))
    lessons = importlib.import_module("04_regularization")
    assert [name for name in names if not (hasattr(lm, name) or hasattr(lessons, name))] == []
