"""CONTRIBUTING's row of one's own is 12 lines, trains, has a test that can fail; version and citation are whole."""

import importlib
import json
import re

import pytest
import yaml
from conftest import ROOT
from test_family_table import columns, rows_of_table

lm = importlib.import_module("06_full_llm_training")
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROW, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def add_row(monkeypatch, text=ROW):
    """Evaluate the line as it would stand in a dictionary of 06, and add it. Returns its name."""
    (name, row), = eval("{" + text + "}", vars(lm)).items()
    monkeypatch.setitem(lm.ALGORITHMS, name, row)
    return name


def run_test():
    space = {}
    exec(TEST, space)  # noqa: S102 (it is what the test is about)
    functions = [value for key, value in space.items() if key.startswith("test_")]
    assert len(functions) == 1
    functions[0]()


def test_a_row_and_its_test_are_twelve_lines():
    assert len(ROW.splitlines()) + len(TEST.splitlines()) == 12
    assert max(map(len, (ROW + TEST).splitlines())) <= 116  # the row is indented in 06


def test_the_front_page_shows_the_same_row_and_test():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert [re.sub(r"\n+", "\n", block).strip() for block in blocks] == [
        re.sub(r"\n+", "\n", text).strip() for text in (ROW, TEST)]


def test_the_row_trains(monkeypatch, tiny_run, tmp_path, quick):
    name = add_row(monkeypatch)
    lm.main([*tiny_run[2], "--algorithm", name, "--steps", "2", "--sync-interval", "2", "--out", str(tmp_path)])
    history = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in history] == [0, 1, 2]
    assert sum(line.get("grad_norm", 0) for line in history) > 0


def test_its_test_passes_and_fails_for_another_row(monkeypatch):
    add_row(monkeypatch)
    run_test()
    monkeypatch.undo()
    for other in ("eps_high=0.26", "eps_high=0.30", 'clip="none"'):
        line = ROW.replace('clip="one_side", eps_high=0.28', other if "clip" in other else f'clip="one_side", {other}')
        assert line != ROW
        with monkeypatch.context() as patch:
            add_row(patch, line)
            with pytest.raises(AssertionError):
                run_test()


def test_its_line_of_the_table_says_what_the_code_does(monkeypatch):
    name = add_row(monkeypatch)
    assert rows_of_table(PAGE) == {name: columns(lm.ALGORITHMS[name])}


def test_version_and_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the format requires
    assert (citation["version"], str(citation["date-released"])) == newest.groups()
    assert citation["references"][0]["url"] == "https://arxiv.org/abs/2509.24203" and citation["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT")


def test_the_changelog_counts_the_rows():
    """Those of the version that it describes. Rows may come after it, none may go."""
    counted = re.search(r"(\d+) rows", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert 33 <= int(counted[1]) <= len(lm.ALGORITHMS)
