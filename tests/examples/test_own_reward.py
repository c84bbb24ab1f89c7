"""examples/own_reward.py: right earns 1, everything else 0, quickly and whatever the text; and 06 takes both."""

import json
import time

import pytest
from conftest import ROOT  # noqa: F401 (the path)

from examples import own_reward
from under_the_hood.answers import load_reward

TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"
RIGHT = "def add(a, b):\n    return a + b"


@pytest.mark.slow
@pytest.mark.parametrize("response, reward", [
    (RIGHT, 1), (f"Here it is:\n```python\n{RIGHT}\n```\nDone.", 1), (f"```\n{RIGHT}\n```", 1),
    (f"```python\nwrong\n```\nor rather\n```python\n{RIGHT}\n```", 1), (f"print('x' * 1000)\n{RIGHT}", 1),
    ("def add(a, b):\n    return a - b", 0), ("def add(a, b:", 0), ("", 0), ("\x00 \ud800 é", 0), ("add = 1", 0),
    ("exit(0)", 0), ("import os; os._exit(0)", 0), ("print('passed')\nraise SystemExit(0)", 0),
    (f"{RIGHT}\nprint('x' * (2 << 20))", 0),  # a large file
    ("x = 'a' * (1 << 30)\n" + RIGHT, 0),  # a gigabyte
])
def test_code_earns_what_its_tests_say(response, reward):
    assert own_reward.runs_the_tests("Add.", response, TESTS) == reward


@pytest.mark.slow
@pytest.mark.parametrize("response", ["while True: pass", "import time; time.sleep(600)", "input()",
                                      "import os\nfor _ in range(3):\n    os.fork()\nimport time; time.sleep(600)"])
def test_code_that_never_ends_is_ended(response, monkeypatch):
    monkeypatch.setattr(own_reward, "SECONDS", 1)
    began = time.monotonic()
    assert own_reward.runs_the_tests("Add.", f"{RIGHT}\n{response}", TESTS) == 0
    assert time.monotonic() - began < 20  # 2 seconds, on a machine with nothing else to do


@pytest.mark.slow
def test_what_the_code_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(own_reward, "SECONDS", 1)
    late = f"import os, time\nif os.fork() == 0:\n    time.sleep(4)\n    open({str(tmp_path / 'late')!r}, 'w')\n"
    own_reward.runs_the_tests("Add.", f"{RIGHT}\n{late}", TESTS)
    time.sleep(5)
    assert not (tmp_path / "late").exists()


SCHEMA = json.dumps({"type": "object", "required": ["name", "age"], "additionalProperties": False,
                     "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}})


@pytest.mark.parametrize("response, reward", [
    ('{"name": "Ada", "age": 36}', 1), ('```json\n{"name": "Ada", "age": 36}\n```', 1),
    (' {"age": 0, "name": ""}\n', 1), ('{"name": "Ada", "age": -1}', 0),
    ('{"name": "Ada"}', 0), ('{"name": "Ada", "age": "36"}', 0), ("[]", 0), ("", 0),
    ('Here: {"name": "Ada", "age": 36}', 0), ('{"name": "Ada", "age": NaN}', 0), ("[" * 100_000, 0), ("é\x00", 0),
    ('{"name": "Ada", "age": 36, "x": 1}', 0),
])
def test_json_earns_what_its_schema_says(response, reward):
    assert own_reward.fits_the_schema("Who?", response, SCHEMA) == reward


@pytest.mark.parametrize("name, response, answer", [("fits_the_schema", "{}", '{"type": "object"}'),
                                                    ("runs_the_tests", RIGHT, TESTS)])
def test_06_takes_it(name, response, answer):
    assert load_reward(f"examples.own_reward:{name}")("?", response, answer) == 1.0
