"""--exercise: three tables of a run to read, an answer that may hold spaces, and numbers that there are not."""

import importlib

import pytest

lm = importlib.import_module("06_full_llm_training")


def ask(capsys, *flags):
    """(exit status or message, what is printed, errors)"""
    with pytest.raises(SystemExit) as stop:
        lm.main(["--exercise", *map(str, flags)])
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err


@pytest.mark.parametrize("number, answer, status", [
    (1, "reinforce", 0), (1, " Reinforce ", 0), (1, "rep-opmd", 1), (1, "", 1),
    (2, "4,2", 0), (2, "4, 2", 0), (2, " 4 ,2 ", 0), (2, "2,4", 1), (2, "42", 1),
    (3, "kl_old", 0), (3, "KL_old", 0), (3, "entropy", 1)])
def test_right_and_wrong_answers(number, answer, status, capsys):
    code, out, _ = ask(capsys, number, "--answer", answer)
    assert code == status and out.startswith("Right. " if status == 0 else "No: ")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_without_an_answer_the_question_is_asked(number, capsys):
    code, out, _ = ask(capsys, number)
    assert code.startswith(f"Exercise {number}: ") and "--answer" in code and not out


@pytest.mark.parametrize("number", [0, 4, -1, 99])
def test_a_number_that_there_is_not_is_one_line(number, capsys):
    code, out, err = ask(capsys, number, "--answer", "x")
    assert code == 2 and not out and err == f"error: there is no exercise {number}, only 1, 2, 3\n"


def test_the_staleness_of_the_second_table_is_that_of_its_answer():
    """I = 4, m = 2: the staleness of each step by the formula of 06."""
    row = next(line for line in lm.EXERCISES[2][0].splitlines() if "staleness" in line)
    assert [int(word) for word in row.split()[1:]] == [lm.staleness(n, sync_interval=4, sync_offset=2)
                                                        for n in range(1, 15)]
