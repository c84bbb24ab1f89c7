"""Lesson 06 from the command line: what a run leaves behind, what it can be held to, and how it says no."""

import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
SCRIPT = str(ROOT / "06_full_llm_training.py")
PER_STEP = {"step", "reward", "loss", "grad_norm", "entropy", "kl_old", "clip_fraction", "ratio_max", "staleness",
            "tokens_per_second", "completion_length"}
TIMING = {"tokens_per_second"}


def command(*arguments, program=(SCRIPT,)):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run([sys.executable, *program, *map(str, arguments)], capture_output=True, text=True, timeout=300,
                          encoding="utf-8", env=environment)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def flags(tiny_run):
    return [*tiny_run[2], "--steps", "3", "--sync-interval", "2", "--eval-every", "2", "--algorithm", "rec-oneside-is"]


@pytest.fixture(scope="module")
def run(flags, tmp_path_factory):
    """(run directory, finished process) of three steps in a process of their own."""
    out = tmp_path_factory.mktemp("run") / "first"
    finished = command(*flags, "--out", out)
    assert finished.returncode == 0, finished.stderr
    return out, finished


@pytest.fixture(scope="module")
def repeated(flags, tmp_path_factory):
    """(run directory, trained model) of the same three steps in this process."""
    out, models, load_model = tmp_path_factory.mktemp("again") / "second", [], lm.load_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "load_model", lambda *args, **kwargs: models.append(load_model(*args, **kwargs)) or models[-1])
        lm.main([*flags, "--out", str(out)])
    return out, models[0][0]


# ------------------------------------------------------------------------------------------------ the run directory


def test_metrics_are_complete_finite_and_in_order(run):
    history = lines(run[0] / "metrics.jsonl")
    assert [line["step"] for line in history] == [0, 1, 2, 3]
    assert [line["step"] for line in history if "eval_accuracy" in line] == [0, 2, 3]
    for line in history[1:]:
        assert PER_STEP <= line.keys()
        assert all(math.isfinite(value) for value in line.values())
        assert 0 <= line["reward"] <= 1 and 0 <= line["clip_fraction"] <= 1 and line["grad_norm"] >= 0
        assert 0 <= line["entropy"] <= math.log(7) and 1 <= line["completion_length"] <= 2 and line["kl_old"] > -1e-6
        assert line["tokens_per_second"] > 0
    assert [line["staleness"] for line in history[1:]] == [0, 1, 0]
    assert sum(line["reward"] for line in history[1:]) > 0 and any(line["loss"] != 0 for line in history[1:])


def test_every_metric_is_documented(run):
    documented = set(lm.METRICS) - {"eval_pass_at_k"}
    for line in lines(run[0] / "metrics.jsonl"):
        assert {key for key in line if not key.startswith("eval_pass_at_")} <= documented


def test_samples_are_what_was_asked_and_answered(run, tiny_run):
    questions = {example.question for example in lm.read_jsonl(tiny_run[1])}
    samples = lines(run[0] / "samples.jsonl")
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    for sample in samples:
        assert sample["question"] in questions and sample["answer"] == "1"
        assert sample["reward"] == float(lm.is_correct(sample["response"], "1"))
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}


def test_config_holds_every_flag_and_reproduces_the_run(run, tmp_path, flags):
    stored = json.loads((run[0] / "config.json").read_text(encoding="utf-8"))
    assert stored["sync_interval"] == 2 and stored["steps"] == 3 and stored["algorithm"] == "rec-oneside-is"
    assert stored["learning_rate"] == .01 and stored["seed"] == 0 and stored["offline"] is False
    not_of_a_run = {"resume", "overwrite", "config"}
    assert {field.name for field in dataclasses.fields(lm.Config)} - not_of_a_run <= stored.keys()
    lm.main(["--config", str(run[0] / "config.json"), "--out", str(tmp_path / "same")])
    assert without_timing(tmp_path / "same") == without_timing(run[0])


def test_picture_is_a_picture(run):
    data = (run[0] / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
    width, height = (int.from_bytes(data[i: i + 4], "big") for i in (16, 20))
    assert width > 1000 and height > 300


def test_last_line_is_the_result(run):
    history, last = lines(run[0] / "metrics.jsonl"), run[1].stdout.splitlines()[-1]
    assert f"accuracy {history[0]['eval_accuracy']:.3f} → {history[-1]['eval_accuracy']:.3f}" in last
    assert str(run[0]) in last and " s" in last
    assert "Traceback" not in run[1].stderr


FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("10+1=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    tied = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    print(json.dumps({"tied": tied, "ids": ids.tolist(), "logits": logits.tolist(), "dtype": str(logits.dtype)}))
"""


def test_model_and_checkpoint_load_in_a_fresh_process_with_equal_logits(run, repeated):
    """Logits of both folders, loaded by transformers alone, equal those of the live model that an equal run ended with."""
    finished = command(run[0] / "model", run[0] / "checkpoint" / "step-000003", program=("-c", FRESH))
    assert finished.returncode == 0, finished.stderr
    found, live = [json.loads(line) for line in finished.stdout.splitlines()], repeated[1]
    assert len(found) == 2
    for fresh in found:
        with torch.no_grad():
            expected = live(input_ids=torch.tensor(fresh["ids"])).logits
        assert fresh["tied"] and fresh["dtype"] == "torch.float32"
        assert torch.equal(torch.tensor(fresh["logits"]), expected)
    assert live.get_input_embeddings().weight.data_ptr() == live.get_output_embeddings().weight.data_ptr()


def test_training_changed_the_model(repeated, tiny_run):
    base, _ = lm.load_model(str(tiny_run[0]), device="cpu")
    moved = [not torch.equal(a, b) for a, b in zip(base.parameters(), repeated[1].parameters())]
    assert any(moved)


# ---------------------------------------------------------------------------------------------------- repeatability


def without_timing(out):
    return [{k: v for k, v in line.items() if k not in TIMING} for line in lines(out / "metrics.jsonl")]


def test_same_seed_same_metrics(run, repeated):
    assert without_timing(run[0]) == without_timing(repeated[0])
    assert lines(run[0] / "samples.jsonl") == lines(repeated[0] / "samples.jsonl")


def test_another_seed_other_samples(run, flags, tmp_path):
    lm.main([*flags, "--out", str(tmp_path / "other"), "--seed", "1"])
    assert lines(run[0] / "samples.jsonl") != lines(tmp_path / "other" / "samples.jsonl")


def test_evaluating_changes_nothing_in_training(repeated, flags, tmp_path):
    """Evaluation has a generator of its own: without the one at step 2, steps 1 to 3 are the same."""
    lm.main([*flags, "--out", str(tmp_path / "rarely"), "--eval-every", "100", "--eval-questions", "2", "--eval-samples", "7"])
    pairs = list(zip(without_timing(repeated[0])[1:], without_timing(tmp_path / "rarely")[1:]))
    assert len(pairs) == 3 and "eval_accuracy" not in pairs[1][1]
    for often, rarely in pairs:
        assert all(rarely[key] == value for key, value in often.items() if not key.startswith("eval_"))


# --------------------------------------------------------------------------------------------------------- compare


def test_compare_starts_every_row_from_the_same_place(flags, tmp_path, capsys):
    lm.main([*flags, "--compare", "reinforce,rec-twoside-nois", "--steps", "2", "--out", str(tmp_path / "both")])
    first, second = (tmp_path / "both" / name for name in ("reinforce", "rec-twoside-nois"))
    assert lines(first / "metrics.jsonl")[0] == lines(second / "metrics.jsonl")[0]
    asked = [[s["question"] for s in lines(out / "samples.jsonl")] for out in (first, second)]
    assert asked[0] == asked[1]
    begun = [[s["response"] for s in lines(out / "samples.jsonl") if s["step"] == 1] for out in (first, second)]
    assert begun[0] == begun[1]  # the same base, the same random numbers
    assert (tmp_path / "both" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((first / "config.json").read_text(encoding="utf-8"))["algorithm"] == "reinforce"
    last = capsys.readouterr().out.splitlines()[-1]
    assert "reinforce" in last and "rec-twoside-nois" in last and "→" in last


# ----------------------------------------------------------------------------------------------------------- errors


def refused(capsys, arguments):
    """The one line on stderr of a command that must exit with status 2."""
    with pytest.raises(SystemExit) as stopped:
        lm.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert stopped.value.code == 2, captured
    message = captured.err.strip()
    assert message.startswith("error: ") and "\n" not in message and "Traceback" not in message
    return message


@pytest.mark.parametrize("arguments, expected", [
    (["--algorithm", "rec-onesided"], "unknown algorithm 'rec-onesided'; choose from: reinforce"),
    (["--compare", "reinforce,ppo"], "unknown algorithm 'ppo'"),
    (["--compare", "reinforce,"], "an empty name"),
    (["--task", "subtraction"], "unknown task 'subtraction'"),
    (["--task", "addition-7"], "unknown task 'addition-7'"),
    (["--model", "no/such-model"], "no/such-model"),
    (["--model", "/no/such/folder"], "/no/such/folder"),
    (["--model", "nothing.gguf"], "nothing.gguf: no such file"),
    (["--group-size", "1"], "--group-size is 1"),
    (["--sync-interval", "0"], "--sync-interval is 0"),
    (["--sync-interval", "-4"], "--sync-interval is -4"),
    (["--sync-offset", "-1"], "--sync-offset is -1"),
    (["--steps", "0"], "--steps is 0"),
    (["--prompts-per-step", "0"], "--prompts-per-step is 0"),
    (["--max-new-tokens", "-3"], "--max-new-tokens is -3"),
    (["--learning-rate", "0"], "--learning-rate is 0"),
    (["--learning-rate", "nan"], "--learning-rate is nan"),
    (["--temperature", "0"], "--temperature is 0"),
    (["--temperature", "inf"], "--temperature is inf"),
    (["--eps-low", "-0.1"], "--eps-low is -0.1"),
    (["--tau", "-1"], "--tau is -1"),
    (["--seed", "99999999999999999999"], "--seed is 99999999999999999999"),
    (["--compare", "grpo,rloo,grpo"], "names a row twice"),
    (["--dtype", "float8"], "--dtype is 'float8'"),
    (["--device", "abacus"], "'abacus'"),
    (["--device", "cpu:x"], "cpu:x"),
    (["--algorithm", "rec-ring-is", "--outer-low", "0.1"], "outer_low"),
    (["--steps", "many"], "many"),
    (["--no-such-flag", "3"], "--no-such-flag"),
    (["--sync", "3"], "--sync"),  # no guessing of abbreviations
    (["--max-prompt-tokens", "1"], "--max-prompt-tokens 1"),
    (["--resume"], "--resume"),
])
def test_a_mistake_is_one_line_and_nothing_is_trained(capsys, tmp_path, flags, arguments, expected):
    out = tmp_path / "never"
    where = [] if arguments == ["--resume"] else ["--out", str(out)]
    base = [f for pair in zip(flags[::2], flags[1::2]) if pair[0] not in arguments for f in pair]
    assert expected in refused(capsys, [*base, *arguments, *where])
    assert not (out / "metrics.jsonl").exists() and not (out / "checkpoint").exists()


@pytest.mark.parametrize("text, expected", [
    (None, "missing.jsonl"),
    ("", "holds no examples"),
    ('{"question": "1", "answer": "1"}\n', "at least 2"),
    ('{"question": "1", "answer": "1"}\n\n{"question": "2", "answer": \n', "line 3"),
    ('{"question": "1", "answer": "1"}\n{"question": "2"}\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n["2", "3"]\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n{"question": "  ", "answer": "3"}\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n{"question": "2", "answer": null}\n', "line 2"),
    ('{"question": "1", "answer": "1"}\n{"question": 2, "answer": "2"}\n', "line 2"),
])
def test_a_bad_jsonl_names_its_line(capsys, tmp_path, flags, text, expected):
    path = tmp_path / "missing.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    message = refused(capsys, [*flags, "--task", path, "--out", tmp_path / "never"])
    assert expected in message and "missing.jsonl" in message
    assert not (tmp_path / "never" / "metrics.jsonl").exists()


def test_a_line_separator_inside_a_question_ends_no_line(tmp_path):
    text = '{"question": "1\u2028+ 1\x85=", "answer": "2"}\r\n{"question": "2", "answer": 2}'
    (tmp_path / "lines.jsonl").write_bytes(text.encode("utf-8-sig"))  # as some editors save it, with a mark in front
    assert [e.question for e in lm.read_jsonl(tmp_path / "lines.jsonl")] == ["1\u2028+ 1\x85=", "2"]


def test_a_jsonl_that_is_not_text_is_refused(capsys, tmp_path, flags):
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe\x00{")
    assert "binary.jsonl" in refused(capsys, [*flags, "--task", path, "--out", tmp_path / "never"])


def test_a_finished_run_is_not_touched(capsys, flags, repeated):
    before = {path: path.stat().st_mtime_ns for path in repeated[0].rglob("*")}
    message = refused(capsys, [*flags, "--out", repeated[0]])
    assert "already holds a run" in message and "--overwrite" in message and "--resume" in message
    assert {path: path.stat().st_mtime_ns for path in repeated[0].rglob("*")} == before


def test_a_mistake_in_a_real_process(tmp_path, flags):
    finished = command(*flags, "--group-size", "1", "--out", tmp_path / "never")
    assert finished.returncode == 2 and finished.stdout == ""
    assert len(finished.stderr.splitlines()) == 1 and finished.stderr.startswith("error: --group-size is 1")


# ------------------------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize("spelling", ["--sync_interval", "--sync-interval"])
def test_both_spellings_of_a_flag(spelling):
    assert lm.parse_arguments([spelling, "7"]).sync_interval == 7
    assert lm.parse_arguments([f"{spelling}=8"]).sync_interval == 8


@pytest.mark.parametrize("name", lm.ALGORITHMS)
def test_every_row_is_accepted_as_it_stands(name):
    lm.validate(lm.Config(algorithm=name))


def test_switches_and_defaults():
    config = lm.parse_arguments([])
    assert (config.sync_interval, config.sync_offset, config.offline, config.seed) == (1, 0, False, 0)
    assert config == lm.Config()
    assert lm.parse_arguments(["--offline"]).offline


def test_help_explains_every_flag_and_metric(capsys):
    with pytest.raises(SystemExit) as stopped:
        lm.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for field in dataclasses.fields(lm.Config):
        assert f"--{field.name.replace('_', '-')}" in text, field.name
    for name in lm.METRICS:
        assert name in text


def test_jsonl_answers_may_be_numbers_and_lines_blank(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a", "answer": 3}\n\n{"question": "b", "answer": 2.5, "more": 1}\n', encoding="utf-8")
    assert [(e.question, e.answer) for e in lm.read_jsonl(path)] == [("a", "3"), ("b", "2.5")]


def test_held_out_questions_are_never_trained_on(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"question": "{i}", "answer": "{i}"}}\n' for i in range(40)), encoding="utf-8")
    for config in (lm.Config(task=str(path)), lm.Config(), lm.Config(task="addition-1"), lm.Config(task="addition-3")):
        task = lm.load_task(config)
        train, held_out = ({e.question for e in examples} for examples in (task.train, task.evaluation))
        assert train and held_out and not train & held_out
        assert len(task.evaluation) <= config.eval_questions
    task = lm.load_task(lm.Config(task=str(path)))
    assert {int(e.question) for e in task.train + task.evaluation} == set(range(40)) and len(task.evaluation) == 4


def test_addition_asks_and_answers_right():
    for name, digits in (("addition-1", 1), ("addition", 2), ("addition-3", 3)):
        task = lm.load_task(lm.Config(task=name))
        for example in task.train[:50] + task.evaluation[:50]:
            left, right = example.terse.rstrip("=").split("+")
            assert int(left) + int(right) == int(example.answer) and max(len(left), len(right)) <= digits
            assert f"{left} + {right}" in example.question
