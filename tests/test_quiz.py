"""docs/quiz.md: its frame, and every number in its answers, computed here by other means than in the lessons."""

import importlib
import math
import pathlib
import re
from fractions import Fraction

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUIZ = (ROOT / "docs" / "quiz.md").read_text(encoding="utf-8")
LESSONS = {path.name[:2]: path.read_text(encoding="utf-8") for path in ROOT.glob("0[1-6]_*.py")}
REWARDS, DATA = (Fraction(0), Fraction(4, 5), Fraction(1)), (Fraction(3, 10), Fraction(6, 10), Fraction(1, 10))


def questions():
    """number → (lesson, question, answer)."""
    found = {}
    for lesson, part in re.findall(r"(?ms)^## Lesson (\d\d).*?\n(.*?)(?=^## |\Z)", QUIZ):
        for number, ask, answer in re.findall(
                r"(?ms)^\*\*(\d+)\.\*\* (.*?)\n\n<details><summary>Answer</summary>\n\n(.*?)\n\n</details>", part):
            found[int(number)] = lesson, ask, answer
    return found


def test_four_questions_a_lesson_with_folded_answers():
    assert [(n, q[0]) for n, q in questions().items()] == [(n, f"0{1 + (n - 1) // 4}") for n in range(1, 25)]
    assert QUIZ.count("<details>") == QUIZ.count("</details>") == 24


def test_cited_equations_are_in_the_lesson():
    for lesson, ask, answer in questions().values():
        for number in re.findall(r"\((\d\.\d+)\)", ask + answer):
            assert number.startswith(lesson[1] + ".") and f"({number})" in LESSONS[lesson], number


MU = sum(p * r for p, r in zip(DATA, REWARDS))
SAID = {  # number → what its answer must say, from arithmetic with fractions
    2: f"{float(DATA[2] * 1 - MU / 3):.3f}".replace("-0", "−"),
    4: f"{float(1000 * Fraction(1) / (1 + Fraction(2, 3)) ** 4):.1f}",
    5: f"gives {Fraction(3, 4) * Fraction(4, 3)} and −⅓",
    7: f"{float(Fraction(1, 4) ** 4 + Fraction(3, 4) ** 4):.0%}".replace("%", " %"),
    11: "(−.174, .132, .042)",
    12: f"{(0.82 - math.sqrt(0.4036)) / 0.8:.4f}".lstrip("0"),
    16: f"1.2·.58 = {float(Fraction(6, 5) * MU):.3f}".replace("0.", "."),
    20: f"{7 / 64 * (math.exp(7 / 8) - math.exp(-1 / 8)):.3f}".lstrip("0"),
}


@pytest.mark.parametrize("number", SAID)
def test_numbers(number):
    assert SAID[number] in questions()[number][2]


def test_drift_and_its_longest_entry():
    drift = [p * (r - MU) for p, r in zip(DATA, REWARDS)]
    assert [float(c) for c in drift] == [-0.174, 0.132, 0.042] and drift.index(max(drift)) == 1


def test_share_of_arm_3_at_which_the_lead_turns():
    def lead(q):  # c₃ − c₂ for the data (.3, .7 − q, q)
        mean = 0.8 * (0.7 - q) + q
        return q * (1 - mean) - (0.7 - q) * (0.8 - mean)

    assert lead(0.2308) < 0 < lead(0.2310)


def test_what_the_clips_do_with_a_wrong_answers_token():
    lm = importlib.import_module("06_full_llm_training")
    for number, ratio, kept in ((13, 1.5, (True, False, False)), (14, 3.5, (True, False, True))):
        mask = [bool(lm.clip_mask(torch.tensor([ratio]), torch.tensor([-1.0]), clip=clip))
                for clip in ("one_side", "two_side", "ring")]
        assert tuple(mask) == kept
        said = re.findall(r"keeps it|clips\s+it", questions()[number][2])
        assert [word == "keeps it" for word in said] == mask


def test_staleness():
    lm = importlib.import_module("06_full_llm_training")
    said = ", ".join(str(lm.staleness(n, sync_interval=4, sync_offset=2)) for n in range(1, 11))
    assert questions()[21][2].startswith(said)


def test_fields_that_make_grpo():
    lm = importlib.import_module("06_full_llm_training")
    rows = lm.ALGORITHMS
    assert rows["grpo"] == lm.Algorithm(std_normalize=True, clip="one_side", weight="ratio", source=rows["grpo"].source)
    assert lm.find_algorithm("rec-oneside-nois", weight="ratio") == rows["rec-oneside-is"]
