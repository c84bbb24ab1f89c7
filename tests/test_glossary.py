"""docs/glossary.md: each term once, every flag and name of 06 that a reader meets explained, tables in one shape."""

import dataclasses
import importlib
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split(" | ") for line in TEXT.splitlines()
        if line.startswith("| ") and not line.startswith("| here")]


def test_every_row_has_five_cells():
    assert len(ROWS) > 60 and all(len(row) == 5 and all(cell.strip() for cell in row) for row in ROWS)


def test_every_term_once():
    terms = [term.strip("` ") for row in ROWS for term in row[0].split(", ")]
    assert len(terms) == len(set(terms)), sorted(t for t in terms if terms.count(t) > 1)


def test_the_words_of_the_family_are_explained():
    lm = importlib.import_module("06_full_llm_training")
    rows = lm.ALGORITHMS.values()
    said = TEXT.replace("-", "_").casefold()
    for word in {row.aggregation for row in rows} | {row.clip for row in rows} - {"none"}:
        assert word.replace("-", "_").casefold() in said, word
    for field in ("eps_low", "eps_high", "outer_low", "outer_high", "tau", "beta", "std_normalize"):
        assert field in {f.name for f in dataclasses.fields(lm.Algorithm)} and f"`{field}`" in TEXT


def test_cited_equations_exist():
    lessons = {path.name[1]: path.read_text(encoding="utf-8") for path in ROOT.glob("0[1-5]_*.py")}
    for number in re.findall(r"\((\d\.\d+)\)", TEXT):
        assert f"({number})" in lessons[number[0]], number
