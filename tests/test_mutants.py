"""make mutants finds the places, changes each in the text, and tells a change that tests notice from one unnoticed."""

import subprocess
import sys

import pytest
from conftest import ROOT

import mutants

SOURCE = '''
LIMIT = 3  # outside a function: not a place

def far(a, b, *, flag=True):
    """Not a place: 1 + 1."""
    if not flag and 0 <= a < b is not None:
        raise ValueError(f"{a + 1}")
    return (a - b) ** 2 \\
        + -a if flag else [a, b][0]
'''


def test_places_and_changes_by_hand(tmp_path):
    (tmp_path / "source.py").write_text(SOURCE)
    found = mutants.places(tmp_path / "source.py")
    assert [words.removeprefix("far: ") for words, _, _ in found] == [
        "not flag and 0 <= a < b is not None → not flag or 0 <= a < b is not None",
        "0 <= a < b is not None → 0 < a < b is not None",
        "0 <= a < b is not None → 1 <= a < b is not None",
        "(a - b) ** 2 \\ + -a → (a - b) ** 2 \\ - -a",
        "(a - b) ** 2 → (a - b) * 2", "a - b → a + b", "(a - b) ** 2 → (a - b) ** 4", "-a → +a",
        "[a, b][0] → [a, b][1]"]
    values = []
    for _, mutated, _ in found[3:]:
        space = {}
        exec(mutated, space)  # noqa: S102 (it is what the test is about)
        values.append((space["far"](3, 5), space["far"](5, 3, flag=False)))
    # at first (3 − 5)² − 3 = 1, and 5
    assert values == [(7, 5), (-7, 5), (61, 5), (13, 5), (7, 5), (1, 3)]
    assert [list(lines) for _, _, lines in found][::4] == [[6], [8, 9], [8, 9]]


def test_every_listed_equivalent_mutant_is_a_place_with_a_reason():
    table = mutants.EQUIVALENT.read_text(encoding="utf-8").replace("\\|", "¦")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    known = {f"`{path.relative_to(ROOT)}: {words}`".replace("|", "¦")
             for path in mutants.FILES for words, _, _ in mutants.places(path)}
    assert rows and [row for row in rows if f"{row[0][2:-1]}: {row[1][1:]}" not in known] == []
    assert all(len(row) == 3 and len(row[2]) > 20 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("tests, status, words", [("test_batching", 0, "3 of 3 mutants caught"),
                                                  ("test_exercises", 1, "0 of 3 mutants caught")])
def test_a_change_is_caught_by_the_tests_of_its_file_and_by_no_others(tests, status, words, tmp_path):
    places = r"batching\.py: split_batch: (order\[0\]|0 < has_gradient|lengths\.amax)"
    run = subprocess.run([sys.executable, "tests/mutants.py", "--only", places, "--tests", tests, "--count", "3",
                          "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == status and words in run.stdout, run.stdout + run.stderr
