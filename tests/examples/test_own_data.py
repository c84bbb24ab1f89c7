"""examples/own_data.md: its file loads, and its answers are found as it says."""

import importlib
import json
import re

import pytest
from conftest import ROOT

from under_the_hood.answers import math_reward

lm = importlib.import_module("06_full_llm_training")
TEXT = (ROOT / "examples" / "own_data.md").read_text(encoding="utf-8")
LINES = re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)[1]


def test_the_file_in_the_page_is_a_task(tmp_path):
    path = tmp_path / "my_tasks.jsonl"
    path.write_text(LINES, encoding="utf-8")
    task = lm.load_task(lm.Config(task=str(path)))
    assert sorted(e.answer for e in task.train + task.evaluation) == ["60", "Paris"] and len(task.evaluation) == 1


def test_the_program_in_the_page_writes_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], {"my_pairs": [("2 + 2?", 4), ("é?", "yes")]})  # noqa: S102 (it is what the test is about)
    written = (tmp_path / "my_tasks.jsonl").read_text(encoding="utf-8").splitlines()
    assert [tuple(json.loads(line).values()) for line in written] == [("2 + 2?", 4), ("é?", "yes")]


@pytest.mark.parametrize("response, answer, reward", [
    ("#### 3/4", "3/4", 1), ("Paris", "Paris", 1), ("paris", "Paris", 0), ("6/8", "3/4", 1),
    ("\\boxed{\\frac{6}{8}}", "3/4", 1), ("#### 2/3", "3/4", 0), ("#### 1200.0", "1,200", 1)])
def test_answers_are_compared_as_the_page_says(response, answer, reward):
    assert math_reward(response, answer) == reward


def test_every_flag_on_the_pages_is_one_of_06():
    known = {f"--{name.replace('_', '-')}" for name in lm.Config.__dataclass_fields__}
    for page in ("own_data.md", "with_trinity.md"):
        text = (ROOT / "examples" / page).read_text(encoding="utf-8")
        used = {flag for line in text.splitlines() for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
        assert used - known - {"--config"} == set(), page
