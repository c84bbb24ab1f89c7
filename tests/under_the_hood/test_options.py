"""Flags: --help, --config, --resume, and every mistake in one line before anything is trained."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from under_the_hood import options
from under_the_hood.errors import UserError
from under_the_hood.runs import METRICS, NOT_OF_A_RUN, read_metrics
from under_the_hood.tasks import reward_function

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("quick")


def parse(*argv):
    return options.parse_arguments(lm.Config, lm.GROUPS, lm.__doc__, METRICS, [str(word) for word in argv])


def validate(**settings):
    options.validate(lm.Config(**settings), lm.ALGORITHMS, lm.try_loss)


def refused(capsys, *flags):
    """The one line on stderr of a command that exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        lm.main([str(flag) for flag in flags])
    captured = capsys.readouterr()
    error = captured.err.splitlines()
    assert stop.value.code == 2 and len(error) == 1 and error[0].startswith("error: "), captured
    return error[0]


def metrics(out):
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_metrics(out)]


@pytest.fixture
def flags(tiny_run):
    return [*tiny_run[2], "--steps", "2", "--prompts-per-step", "2", "--max-new-tokens", "3"]


@pytest.fixture(scope="module")
def finished(tiny_run, tmp_path_factory, quick):
    """The directory of a run with a setting of every type: leave it as it is."""
    out = tmp_path_factory.mktemp("options") / "run"
    lm.main([*tiny_run[2], "--steps", "2", "--algorithm", "rep-opmd", "--tau", "0.3", "--sync-interval", "2", "--seed",
             "5", "--offline", "--out", str(out)])
    return out


# --------------------------------------------------------------------------------------------------------------- help


def test_help_shows_every_flag_in_its_group_with_its_default_and_every_metric(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        lm.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    sections = re.split(r"\n(?=\S)", text)
    for group in lm.GROUPS:
        section = next(part for part in sections if part.startswith(group._argument_group_name + ":"))
        for field in dataclasses.fields(group):
            entry = re.search(rf"^  --{field.name}\b.*?(?=^  --|\Z)", section, re.MULTILINE | re.DOTALL)
            assert entry and f"--{field.name.replace('_', '-')}" in entry[0], field.name
            shown = re.findall(r"\(default ([^)]+)\)", " ".join(entry[0].split()))
            assert shown, field.name
            if isinstance(field.default, bool):
                assert shown == ["off"]
            elif isinstance(field.default, (int, float)):
                assert re.split(", |$", shown[0])[0] == str(field.default)
    fields = {f.name for group in lm.GROUPS for f in dataclasses.fields(group)}
    assert {f.name for f in dataclasses.fields(lm.Config)} == fields
    for name, meaning in METRICS.items():
        assert re.search(rf"^  {name} +{re.escape(meaning)}$", text, re.MULTILINE), name


# -------------------------------------------------------------------------------------------------- flags, and --config


def test_flags_have_two_spellings_and_defaults():
    for spelling in ("--sync_interval", "--sync-interval"):
        assert parse(spelling, "7").sync_interval == 7 and parse(f"{spelling}=8").sync_interval == 8
    assert parse() == lm.Config() and parse("--offline").offline
    config = lm.Config()
    assert (config.sync_interval, config.sync_offset, config.offline, config.seed) == (1, 0, False, 0)


def test_every_row_is_accepted_as_it_stands():
    for name in lm.ALGORITHMS:
        validate(algorithm=name)


def test_the_least_values_are_accepted():
    validate(**dict.fromkeys(("steps", "prompts_per_step", "micro_batch_tokens", "eval_every", "eval_questions",
                              "eval_samples", "save_every", "max_prompt_tokens", "max_new_tokens", "sync_interval"), 1),
             **dict.fromkeys(("eps_low", "eps_high", "tau", "beta", "calibrate", "refills", "sync_offset"), 0),
             group_size=2, seed=2**32 - 1, learning_rate=1e-30, temperature=1e-30)
    validate(algorithm="icpo", group_size=3)
    validate(model="small", task="addition-steps", max_new_tokens=40)
    validate(compare="grpo,reinforce", algorithm="grpo")


def test_the_same_flags_from_a_file_and_from_the_command_line(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"steps": 7, "learning_rate": 3e-5, "offline": True, "tau": None, "algorithm": "grpo"}))
    from_file = parse("--config", path, "--steps", "9")
    assert dataclasses.replace(from_file, config=None) == parse(
        "--steps", "9", "--learning-rate", "3e-5", "--offline", "--algorithm", "grpo")
    assert parse("--config", path, "--offline", "false").offline is False


def test_a_runs_config_holds_every_flag_and_reproduces_the_run(finished, tmp_path):
    stored = json.loads((finished / "config.json").read_text(encoding="utf-8"))
    wanted = {"tau": 0.3, "seed": 5, "sync_interval": 2, "steps": 2, "algorithm": "rep-opmd", "offline": True,
              "learning_rate": 0.01, "beta": None}
    assert wanted.items() <= stored.items()
    assert {"resume", "overwrite", "config", "exercise", "answer"} <= set(NOT_OF_A_RUN)
    assert stored.keys() == {field.name for field in dataclasses.fields(lm.Config)} - set(NOT_OF_A_RUN)
    assert set(options.OF_THE_RUN) <= stored.keys()
    again, other = tmp_path / "again", tmp_path / "other"
    lm.main(["--config", str(finished / "config.json"), "--out", str(again)])
    assert metrics(again) == metrics(finished)
    assert (again / "samples.jsonl").read_bytes() == (finished / "samples.jsonl").read_bytes()
    assert {**json.loads((again / "config.json").read_text()), "out": None} == {**stored, "out": None}
    lm.main(["--config", str(finished / "config.json"), "--out", str(other), "--seed", "6", "--offline", "false"])
    changed = json.loads((other / "config.json").read_text())
    assert changed == {**stored, "seed": 6, "offline": False, "out": str(other)}
    assert metrics(other) != metrics(finished)


@pytest.mark.parametrize("content, names", [
    ('{"stepz": 3}', "stepz"), ('{"steps": 1.5}', "--steps"), ('{"steps": "many"}', "--steps"), ("[1, 2]", "flags"),
    ('{"steps": 3', "run.json"), ("", "run.json"), (None, "run.json"), ('{"offline": 3}', "--offline"),
    ('{"steps": [1]}', "--steps")])
def test_a_malformed_config_is_refused_in_one_line(content, names, tmp_path, capsys):
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    line = refused(capsys, "--config", path)
    assert "run.json is not a file of flags" in line and names in line


def test_a_config_with_an_impossible_value_is_refused_like_a_flag(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"group_size": 1}')
    assert "--group-size is 1" in refused(capsys, "--config", tmp_path / "run.json")


# --------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("changed, expected", [
    (["--algorithm", "rec-onesided"], "unknown algorithm 'rec-onesided'; choose from: reinforce"),
    (["--compare", "reinforce,ppo"], "unknown algorithm 'ppo'"),
    (["--compare", "reinforce,"], "an empty name"),
    (["--compare", "grpo,rloo,grpo"], "names a row twice"),
    (["--compare", "grpo", "--eval-only"], "--eval-only evaluates one model"),
    (["--algorithm", "sgpo", "--task", "gsm8k"], "give it --step-reward"),
    (["--algorithm", "icpo", "--group-size", "2"], "icpo needs --group-size 3"),
    (["--group-size", "1"], "--group-size is 1"),
    (["--sync-interval", "0"], "--sync-interval is 0"),
    (["--sync-interval", "-4"], "--sync-interval is -4"),
    (["--sync-offset", "-1"], "--sync-offset is -1"),
    (["--steps", "0"], "--steps is 0"),
    (["--prompts-per-step", "0"], "--prompts-per-step is 0"),
    (["--max-new-tokens", "-3"], "--max-new-tokens is -3"),
    (["--micro-batch-tokens", "0"], "--micro-batch-tokens is 0"),
    (["--eval-samples", "0"], "--eval-samples is 0"),
    (["--save-every", "0"], "--save-every is 0"),
    (["--learning-rate", "0"], "--learning-rate is 0"),
    (["--learning-rate", "nan"], "--learning-rate is nan"),
    (["--temperature", "0"], "--temperature is 0"),
    (["--temperature", "inf"], "--temperature is inf"),
    (["--weight-cap", "-1"], "--weight-cap is -1"),
    (["--eps-low", "-0.1"], "--eps-low is -0.1"),
    (["--eps-high", "inf"], "--eps-high is inf"),
    (["--tau", "-1"], "--tau is -1"),
    (["--refills", "-1"], "--refills is -1"),
    (["--reward-noise", "0.5"], "--reward-noise is '0.5'; it must be two numbers"),
    (["--noise-rates", "0.6,0.4"], "--noise-rates is 0.6,0.4"),
    (["--seed", "99999999999999999999"], "--seed is 99999999999999999999"),
    (["--seed", "-4294967296"], "--seed is -4294967296"),
    (["--dtype", "float8"], "--dtype is 'float8'"),
    (["--engine", "vllm"], "--engine is 'vllm'"),
    (["--device", "abacus"], "'abacus'"),
    (["--device", "cpu:x"], "cpu:x"),
    (["--algorithm", "rec-ring-is", "--outer-low", "0.1"], "below outer_*"),
    (["--model", "tiny", "--task", "addition-steps"], "tiny adds 1 to 3 digits"),
    (["--model", "small", "--task", "addition-steps"], "worked steps need 40"),
    (["--reward", "brevity"], "module:function"),
    (["--reward", "math:nothing"], "has no function nothing"),
    (["--step-reward", "math:nothing"], "has no function nothing"),
    (["--steps", "many"], "many"),
    (["--no-such-flag", "3"], "--no-such-flag"),
    (["--temp", "3"], "--temp 3"),  # no guessing of abbreviations
    (["--resume"], "--resume needs --out"),
])
def test_a_mistake_is_one_line(capsys, tmp_path, flags, changed, expected):
    """Of the command line alone; what needs files or a model to be found out comes below."""
    out = [] if changed == ["--resume"] else ["--out", tmp_path / "never"]
    assert expected in refused(capsys, *flags, *out, *changed)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("changed, expected", [
    (["--task", "subtraction"], "unknown task 'subtraction'"),
    (["--task", "addition-7"], "unknown task 'addition-7'"),
    (["--model", "no/such-model"], "no/such-model"),
    (["--model", "/no/such/folder"], "/no/such/folder"),
    (["--model", "nothing.gguf"], "nothing.gguf: no such file"),
    (["--max-prompt-tokens", "1"], "--max-prompt-tokens 1"),
    (["--max-new-tokens", "100000"], "leaves no room for a prompt"),
])
def test_a_mistake_found_on_loading_is_one_line_and_leaves_no_run(capsys, tmp_path, flags, changed, expected):
    assert expected in refused(capsys, *flags, *changed, "--out", tmp_path / "never")
    assert not (tmp_path / "never" / "metrics.jsonl").exists() and not (tmp_path / "never" / "checkpoint").exists()


@pytest.mark.slow
def test_a_mistake_in_a_real_process(tmp_path, flags):
    """Not even a warning of a library stands beside the line."""
    finished = subprocess.run([sys.executable, ROOT / "06_full_llm_training.py", *flags, "--group-size", "1", "--out",
                               tmp_path / "never"], check=False, capture_output=True, text=True, timeout=300,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}, encoding="utf-8")
    assert finished.returncode == 2 and finished.stdout == ""
    assert len(finished.stderr.splitlines()) == 1 and finished.stderr.startswith("error: --group-size is 1")


def test_tensorboard_without_the_package_is_refused_with_a_hint(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert "pip install tensorboard" in refused(capsys, "--out", tmp_path / "run", "--tensorboard")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------- --resume


def test_resume_without_a_run_is_refused(tmp_path, capsys):
    assert "config.json" in refused(capsys, "--resume", "--out", tmp_path / "run")
    assert "--model <out>/model" in options_refused(resume=True, eval_only=True)


def options_refused(**settings):
    with pytest.raises(UserError) as error:
        validate(**settings)
    return str(error.value)


@pytest.mark.parametrize("name, value", [
    ("sync_interval", "5"), ("seed", "1"), ("task", "addition-1"), ("model", "tiny"), ("algorithm", "rloo"),
    ("temperature", "2"), ("max_new_tokens", "5"), ("offline", "false"), ("group_size", "8"), ("reward_noise", "0.1,0"),
    ("eval_questions", "3"),  # it moves the border between training and held-out questions of a .jsonl
])
def test_what_belongs_to_a_run_cannot_change_when_it_resumes(finished, capsys, name, value):
    before = (finished / "config.json").read_bytes()
    line = refused(capsys, "--resume", "--out", finished, f"--{name}", value)
    stored = json.loads(before)[name]
    assert f"--{name.replace('_', '-')} belongs to the run in {finished}, where it is {stored}" in line
    assert (finished / "config.json").read_bytes() == before


def test_a_resumed_run_takes_its_flags_from_its_directory(finished):
    config = parse("--resume", "--out", finished, "--steps", "9", "--learning-rate", "1e-9", "--sync-interval", "2")
    stored = json.loads((finished / "config.json").read_text())
    assert {**vars(config), "steps": 2, "learning_rate": 0.01}.items() >= stored.items()
    assert config.steps == 9 and config.learning_rate == 1e-9 and config.resume


# ----------------------------------------------------------------------------------------------- a reward of the user's


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    """Write functions into a module in the working directory, as a user would; returns a function that does it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(body):
        name = f"my_rewards_{abs(hash(body))}"
        (tmp_path / f"{name}.py").write_text(body)
        reward_function.cache_clear()
        return f"{name}:mine"
    return write


def test_a_reward_of_the_users_is_used_in_training_and_evaluation(flags, my_rewards, tmp_path):
    spec = my_rewards("def mine(question, response, answer):\n"
                      "    assert set(question) <= set('01') and answer == '1'\n    return 0.5 + len(response)\n")
    lm.main([*flags, "--reward", spec, "--out", "run"])
    assert all(line["reward"] >= 0.5 for line in metrics(tmp_path / "run")[1:])
    assert metrics(tmp_path / "run")[0]["eval_accuracy"] >= 0.5
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["reward"] == 0.5 + len(sample["response"])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["reward"] == spec


@pytest.mark.parametrize("body, says", [
    ("def mine(question, response, answer): return 1 / 0", "ZeroDivisionError"),
    ("def mine(question, response, answer): return float('nan')", "nan"),
    ("def mine(question): return 1.0", "TypeError"),
    ("import no_such_module", "no_such_module")])
def test_a_reward_that_fails_is_named_before_any_training(flags, my_rewards, capsys, tmp_path, body, says):
    """When it is loaded, or in the first evaluation."""
    with pytest.raises(SystemExit) as stop:
        lm.main([*flags, "--reward", my_rewards(body), "--out", "run"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and line.startswith("error: reward 'my_rewards_")
    assert ":mine" in line and says in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_reward_that_fails_later_stops_the_run_in_order(flags, my_rewards, capsys):
    spec = my_rewards("calls = 0\ndef mine(question, response, answer):\n    global calls\n    calls += 1\n"
                      "    if calls > 24: raise RuntimeError('no more')\n    return calls % 2\n")
    with pytest.raises(SystemExit) as stop:
        lm.main([*flags, "--steps", "9", "--save-every", "1", "--out", "run", "--reward", spec])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1
    assert re.match(r"stopped: step [1-9]: reward .*RuntimeError: no more; the last good", last), last
