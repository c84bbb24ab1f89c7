"""Where questions come from: additions with worked steps, .jsonl files, GSM8K; which of them a batch asks; rewards."""

import json
import random

import pytest
from under_the_hood.answers import is_correct
from under_the_hood.errors import UserError
from under_the_hood.tasks import (addition_examples, batch_examples, load_task, read_jsonl, reward_function,
                                  worked_steps)


class Config:
    """What load_task reads of a configuration."""
    def __init__(self, task="addition", eval_questions=256):
        self.task, self.eval_questions = str(task), eval_questions


# -------------------------------------------------------------------------------------------------------- additions


def pairs(count=300):
    generator = random.Random(0)
    return [tuple(generator.randrange(10**generator.randint(1, 4)) for _ in range(2)) for _ in range(count)]


def wrong_steps(text: str) -> int:
    *steps, _ = text.split(";")
    return sum(sum(map(int, step.split("=")[0].split("+"))) != int(step.split("=")[1]) for step in steps)


@pytest.mark.parametrize("question, text", [
    ("47+85=", "7+5=12;1+4+8=13;132"), ("7+9985=", "7+5=12;1+8=9;9=9;9=9;9992"), ("0+0=", "0+0=0;0"),
    ("9999+1=", "9+1=10;1+9=10;1+9=10;1+9=10;10000")])
def test_steps_by_hand(question, text):
    assert worked_steps(question) == text


def test_every_step_and_the_sum_are_right():
    for a, b in pairs():
        text = worked_steps(f"{a}+{b}=")
        assert wrong_steps(text) == 0 and text.count(";") == max(len(str(a)), len(str(b)))
        assert is_correct(text, str(a + b))
        assert len(text) + 1 <= 40  # with the end of text: what --max-new-tokens must leave room for


def test_a_slip_is_one_wrong_step_and_a_wrong_sum():
    for a, b in pairs(100):
        for place in range(max(len(str(a)), len(str(b)))):
            text = worked_steps(f"{a}+{b}=", place)
            assert wrong_steps(text) == 1
            assert not is_correct(text, str(a + b)) and is_correct(text, str(a + b + 10**place))


@pytest.mark.parametrize("digits, count", [(1, 100), (2, 10_000), (3, 20_000), (4, 19_990)])
def test_additions_are_right_repeat_nothing_and_hold_out_a_tenth(digits, count):
    train, held_out = addition_examples(digits)
    terse = [example.terse for example in train + held_out]
    assert len(terse) == len(set(terse)) >= count and len(held_out) == len(terse) // 10
    for example in train[:50] + held_out[:50]:
        a, b = example.terse.rstrip("=").split("+")
        assert int(a) + int(b) == int(example.answer) and max(len(a), len(b)) <= digits
        assert f"{a} + {b}" in example.question
    assert max(len(example.terse) for example in train) == 2 * digits + 2


def test_names_of_additions():
    for name, digits in (("addition", 2), ("addition-1", 1), ("addition-3", 3), ("addition-steps", 4)):
        assert load_task(Config(name)).train == addition_examples(digits)[0]
    for name in ("addition-9", "arithmetic", "questions.csv"):
        with pytest.raises(UserError, match="unknown task"):
            load_task(Config(name))


# ------------------------------------------------------------------------------------------------------------ files


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_file_is_split_once_and_for_all_and_the_held_out_part_is_bounded(tmp_path):
    path = jsonl(tmp_path / "many.jsonl", ({"question": f"{i}", "answer": f"{i}"} for i in range(40)))
    task = load_task(Config(path))
    assert len(task.evaluation) == 4 and {int(e.question) for e in task.train + task.evaluation} == set(range(40))
    assert load_task(Config(path)) == task
    assert len(load_task(Config(path, eval_questions=3)).evaluation) == 3
    assert len(load_task(Config("addition", eval_questions=7)).evaluation) == 7


def test_a_question_asked_twice_is_never_on_both_sides(tmp_path):
    path = jsonl(tmp_path / "twice.jsonl", ({"question": f"q{i % 30}", "answer": "1"} for i in range(120)))
    task = load_task(Config(path))
    train, held_out = ({example.question for example in side} for side in (task.train, task.evaluation))
    assert len(task.train) == len(train) == 27 and len(task.evaluation) == len(held_out) == 3 and not train & held_out


@pytest.mark.parametrize("text, expected", [
    (None, "cannot read"),
    ("", "holds no examples"),
    ('{"question": "1", "answer": "1"}\n', "at least 2"),
    ('{"question": "1", "answer": "1"}\n\n{"question": "2", "answer": \n', "line 3"),
    ('{"question": "1", "answer": "1"}\n{"question": "2"}\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n["2", "3"]\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n{"question": "  ", "answer": "3"}\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n{"question": "2", "answer": null}\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n{"question": 2, "answer": "2"}\n', "line 2"),
    (b"\xff\xfe\x00{", "cannot read"),
])
def test_a_bad_file_and_its_line_are_named(tmp_path, text, expected):
    path = tmp_path / "missing.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=expected) as error:
        load_task(Config(path))
    assert "missing.jsonl" in str(error.value)


def test_a_line_separator_inside_a_question_ends_no_line(tmp_path):
    text = '{"question": "1\u2028+ 1\x85=", "answer": "2"}\r\n{"question": "2", "answer": 2}'
    (tmp_path / "lines.jsonl").write_bytes(text.encode("utf-8-sig"))  # as some editors save it, with a mark in front
    assert [e.question for e in read_jsonl(tmp_path / "lines.jsonl")] == ["1\u2028+ 1\x85=", "2"]


def test_answers_may_be_numbers_and_lines_blank(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a", "answer": 3}\n\n{"question": "b", "answer": 2.5, "more": 1}\n', encoding="utf-8")
    assert [(e.question, e.answer) for e in read_jsonl(path)] == [("a", "3"), ("b", "2.5")]


def test_gsm8k_comes_from_its_folder_with_an_instruction(tmp_path, monkeypatch):
    for name, question in (("train", "2 cats?"), ("test", "3 dogs?")):
        jsonl(tmp_path / f"{name}.jsonl", [{"question": question, "answer": "x\n#### 4"}])
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    task = load_task(Config("gsm8k"))
    for (example,), start in ((task.train, "2 cats?"), (task.evaluation, "3 dogs?")):
        assert example.question.startswith(start) and "'#### '" in example.question and example.answer == "x\n#### 4"


# ---------------------------------------------------------------------------------------------- batches and rewards


def test_one_pass_over_the_data_meets_every_example_once():
    examples = list(range(10))
    seen = [e for n in range(1, 6) for e in batch_examples(examples, n, count=4, seed=7)]
    assert sorted(seen[:10]) == examples and sorted(seen[10:]) == examples
    assert seen[:10] != seen[10:] and seen[:10] != examples
    assert seen[:10] != [e for n in range(1, 4) for e in batch_examples(examples, n, count=4, seed=8)][:10]


def test_a_reward_is_the_users_or_1_for_the_right_answer():
    plain = reward_function(None, "addition")
    assert (plain("?", "so 12", "12"), plain("?", "so 13", "12")) == (1.0, 0.0)
    formula = reward_function(None, "questions.jsonl")  # answers of a file may be formulas
    assert formula("?", r"so \boxed{1+x^2}", "x^2+1") == 1.0 and formula("?", r"so \boxed{1+x^3}", "x^2+1") == 0.0
    assert reward_function(f"{__name__}:length", "addition")("?", "four", "12") == 4.0


def length(question, response, answer):
    return len(response)
