"""Flags, --config, --help, what is documented, TensorBoard, and the line that explains a loss of 0."""

import dataclasses
import importlib
import json
import subprocess
import re
import sys
import types

import pytest

from conftest import build_model

trainer = importlib.import_module("06_full_llm_training")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a random two-layer model."""
    tokenizer = trainer.character_tokenizer()
    folder = tmp_path_factory.mktemp("config") / "model"
    build_model("qwen2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def flags(model):
    return ["--model", model, "--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--eval-questions", "3",
            "--eval-samples", "3", "--max-new-tokens", "3", "--learning-rate", "1e-2"]


@pytest.fixture(autouse=True)
def easy_reward(monkeypatch):
    """A random model is never right; this reward it meets now and then. Pictures are left out, they take a second each."""
    monkeypatch.setattr(trainer, "is_correct", lambda text, gold: "1" in text)
    monkeypatch.setattr(trainer, "plot_run", lambda *arguments, **options: None)
    monkeypatch.setattr(trainer, "plot_comparison", lambda *arguments, **options: None)


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def refused(capsys, *arguments):
    """The one line on stderr of a command that exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        trainer.main(list(arguments))
    error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(error) == 1 and error[0].startswith("error: "), error
    return error[0]


# -------------------------------------------------------------------------------------------------- --help, documented


def test_every_flag_stands_in_a_group_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        trainer.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    groups = re.split(r"\n(?=\S)", text)
    for group in trainer.GROUPS:
        section = next(part for part in groups if part.startswith(group._argument_group_name + ":"))
        for field in dataclasses.fields(group):
            entry = re.search(rf"^  --{field.name}\b.*?(?=^  --|\Z)", section, re.M | re.S)
            assert entry, field.name
            assert re.search(r"\(default [^)]+", " ".join(entry[0].split())), field.name
            shown = re.findall(r"\(default ([^)]+)\)", " ".join(entry[0].split()))
            if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
                assert shown == [str(field.default)]
    assert {f.name for f in dataclasses.fields(trainer.Config)} == {f.name for g in trainer.GROUPS for f in dataclasses.fields(g)}


def test_every_metric_of_a_run_is_documented_in_help(flags, tmp_path, capsys):
    trainer.main([*flags, "--out", str(tmp_path)])
    names = {re.sub(r"(?<=pass_at_)\d+$", "k", key) for line in map(json.loads, (tmp_path / "metrics.jsonl").open()) for key in line}
    assert names == set(trainer.METRICS)  # none undocumented, none documented that does not exist
    capsys.readouterr()
    with pytest.raises(SystemExit):
        trainer.main(["--help"])
    text = capsys.readouterr().out
    for name, meaning in trainer.METRICS.items():
        assert re.search(rf"^  {name} +{re.escape(meaning)}$", text, re.M), name


# ------------------------------------------------------------------------------------------------------------- --config


def test_a_runs_config_reproduces_the_run(flags, tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    trainer.main([*flags, "--algorithm", "rep-opmd", "--tau", "0.3", "--sync-interval", "2", "--seed", "5", "--out", str(a)])
    trainer.main(["--config", str(a / "config.json"), "--out", str(b)])
    assert metrics(a) == metrics(b) and (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    first, second = (json.loads((out / "config.json").read_text()) for out in (a, b))
    assert {**first, "out": None} == {**second, "out": None}
    assert first["tau"] == 0.3 and first["seed"] == 5 and "resume" not in first and "overwrite" not in first
    trainer.main(["--config", str(a / "config.json"), "--out", str(c), "--seed", "6", "--offline"])
    changed = json.loads((c / "config.json").read_text())
    assert changed["seed"] == 6 and changed["offline"] is True and changed["tau"] == 0.3 and changed["sync_interval"] == 2
    assert metrics(c) != metrics(a)


def test_the_same_flags_from_a_file_and_from_the_command_line(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"steps": 7, "learning_rate": 3e-5, "offline": True, "tau": None, "algorithm": "grpo"}))
    from_file = trainer.parse_arguments(["--config", str(path), "--steps", "9"])
    assert dataclasses.replace(from_file, config=None) == trainer.parse_arguments(
        ["--steps", "9", "--learning-rate", "3e-5", "--offline", "--algorithm", "grpo"])
    assert trainer.parse_arguments(["--config", str(path), "--offline", "false"]).offline is False


@pytest.mark.parametrize("content, names", [
    ('{"stepz": 3}', "stepz"), ('{"steps": 1.5}', "--steps"), ('{"steps": "many"}', "--steps"), ("[1, 2]", "flags"),
    ('{"steps": 3', "run.json"), ("", "run.json"), ('{"offline": 3}', "--offline"), ('{"steps": [1]}', "--steps")])
def test_a_malformed_config_is_refused_in_one_line(content, names, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(content)
    line = refused(capsys, "--config", str(path))
    assert "run.json is not a file of flags" in line and names in line
    line = refused(capsys, "--config", str(tmp_path / "absent.json"))
    assert "absent.json" in line


def test_a_config_with_an_impossible_value_is_refused_like_a_flag(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"group_size": 1}')
    assert "--group-size is 1" in refused(capsys, "--config", str(tmp_path / "run.json"))


def test_unknown_and_wrong_flags_take_one_line(capsys):
    assert "--stepz" in refused(capsys, "--stepz", "3")
    assert "--steps" in refused(capsys, "--steps", "many")
    assert "--step" in refused(capsys, "--step", "3")  # no guessing of abbreviations


# ------------------------------------------------------------------------------------------------------------- --resume


def test_what_resume_refuses(flags, tmp_path, capsys):
    out = str(tmp_path / "run")
    assert "--out" in refused(capsys, "--resume")
    assert "config.json" in refused(capsys, "--resume", "--out", out)
    trainer.main([*flags, "--out", out])
    capsys.readouterr()
    assert "already holds a run" in refused(capsys, *flags, "--out", out)
    for name, value in [("--sync-interval", "5"), ("--seed", "1"), ("--task", "addition-1"), ("--model", "tiny"),
                        ("--algorithm", "rloo"), ("--temperature", "2"), ("--max-new-tokens", "5"),
                        ("--eval-questions", "2")]:  # it moves the border between training and held-out questions of a .jsonl
        line = refused(capsys, "--resume", "--out", out, name, value)
        assert f"{name} belongs to the run" in line
    assert json.loads((tmp_path / "run" / "config.json").read_text())["sync_interval"] == 1


def test_flags_that_contradict_each_other_are_refused(flags, tmp_path, capsys):
    assert "ignores --steps, --seed" in refused(capsys, "--compare", "paper", "--seed", "1", "--steps", "4")
    assert "an empty name" in refused(capsys, "--compare", "grpo,")
    assert "leaves no room for a prompt" in refused(capsys, *flags, "--max-new-tokens", "100000", "--out", str(tmp_path / "a"))
    trainer.main([*flags, "--out", str(tmp_path / "run")])
    capsys.readouterr()
    assert "--model <out>/model" in refused(capsys, "--resume", "--eval-only", "--out", str(tmp_path / "run"))
    assert "paged" in refused(capsys, "--engine", "fast")


def test_two_processes_never_write_one_run_directory(flags, tmp_path, capsys):
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    out = tmp_path / "run"
    out.mkdir()
    with subprocess.Popen([sys.executable, "-c", hold, str(out / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert "another process is writing" in refused(capsys, *flags, "--out", str(out))
        other.stdin.close()
    trainer.main([*flags, "--out", str(out)])  # the lock went with its process


def test_a_question_asked_twice_is_never_on_both_sides(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i % 30}", "answer": "1"}) + "\n" for i in range(120)), encoding="utf-8")
    task = trainer.load_task(trainer.Config(task=str(path)))
    train, held_out = ({example.question for example in side} for side in (task.train, task.evaluation))
    assert len(task.train) == len(train) == 27 and len(task.evaluation) == len(held_out) == 3 and not train & held_out


def test_what_resume_may_change_counts_and_is_kept(flags, tmp_path):
    out = tmp_path / "run"
    trainer.main([*flags, "--out", str(out)])
    trainer.main(["--resume", "--out", str(out), "--steps", "4", "--learning-rate", "1e-9"])
    stored = json.loads((out / "config.json").read_text())
    assert stored["steps"] == 4 and stored["learning_rate"] == 1e-9
    assert [line["step"] for line in metrics(out)] == [0, 1, 2, 3, 4]
    state = trainer.load_checkpoint(out)
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-9


def test_compare_resumes_the_rows_it_had_not_finished(flags, tmp_path, monkeypatch, capsys):
    out, original = tmp_path / "compare", trainer.train
    argv = [*flags, "--compare", "reinforce,grpo", "--out", str(out)]

    def stopped(config):
        if config.algorithm == "grpo":
            raise trainer.RunStopped("by SIGTERM")
        return original(config)

    monkeypatch.setattr(trainer, "train", stopped)
    with pytest.raises(SystemExit):
        trainer.main(argv)
    before = (out / "reinforce" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(trainer, "train", original)
    trainer.main(["--resume", "--out", str(out)])
    assert (out / "reinforce" / "metrics.jsonl").read_bytes() == before
    assert [line["step"] for line in metrics(out / "grpo")] == [0, 1, 2]
    assert "grpo" in capsys.readouterr().out.splitlines()[-1]


# ----------------------------------------------------------------------------------------------- TensorBoard, the FAQ


def test_tensorboard_gets_every_number_of_metrics_jsonl(flags, tmp_path, monkeypatch):
    """Against a stand-in for the writer, since the package is optional."""
    written, made = {}, []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            assert (name, step) not in written
            written[name, step] = value

        def flush(self):
            pass

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    trainer.main([*flags, "--out", str(tmp_path), "--tensorboard"])
    assert made == [(str(tmp_path / "tensorboard"), 1)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert written == {(name, line["step"]): value for line in lines for name, value in line.items()}


def test_tensorboard_without_the_package_is_refused_with_a_hint(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert "pip install tensorboard" in refused(capsys, *flags, "--out", str(tmp_path / "run"), "--tensorboard")
    assert not (tmp_path / "run").exists()


def test_a_loss_near_0_is_explained_once(flags, tmp_path, monkeypatch, capsys):
    original = trainer.train_step

    def with_loss(loss, norm):
        monkeypatch.setattr(trainer, "train_step", lambda *a, **k: {**original(*a, **k), "loss": loss, "grad_norm": norm})

    for number, (loss, norm, times) in enumerate([(-0.003, 0.7, 1), (0.4, 0.7, 0), (0.0, 0.0, 0)]):
        with_loss(loss, norm)
        trainer.main([*flags, "--steps", "3", "--out", str(tmp_path / str(number))])
        assert capsys.readouterr().out.count("loss ≈ 0") == times


# ------------------------------------------------------------------------------------------------ a reward of the user's


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    """Write functions into a module in the working directory, as a user would; returns a function that does it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(body):
        name = f"my_rewards_{abs(hash(body))}"
        (tmp_path / f"{name}.py").write_text(body)
        trainer.reward_function.cache_clear()
        return f"{name}:mine"
    return write


def test_a_reward_of_the_users_is_used_in_training_and_evaluation(flags, my_rewards, tmp_path):
    spec = my_rewards("def mine(question, response, answer):\n"
                      "    assert question.startswith('What is') and answer.isdigit()\n    return 0.5 + len(response)\n")
    trainer.main([*flags, "--reward", spec, "--out", "run"])
    assert all(line["reward"] >= 0.5 for line in metrics(tmp_path / "run")[1:])
    assert metrics(tmp_path / "run")[0]["eval_accuracy"] >= 0.5
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["reward"] == 0.5 + len(sample["response"])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["reward"] == spec


@pytest.mark.parametrize("body, says", [
    ("def mine(question, response, answer): return 1 / 0", "ZeroDivisionError"),
    ("def mine(question, response, answer): return float('nan')", "nan"),
    ("def mine(question, response, answer): return 'good'", "str"),
    ("def mine(question): return 1.0", "TypeError"),
    ("import no_such_module", "no_such_module")])
def test_a_reward_that_fails_is_named_before_any_training(flags, my_rewards, capsys, tmp_path, body, says):
    line = refused(capsys, *flags, "--reward", my_rewards(body), "--out", "run")
    assert "my_rewards_" in line and ":mine" in line and says in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_reward_that_fails_later_stops_the_run_in_order(flags, my_rewards, capsys):
    spec = my_rewards("calls = 0\ndef mine(question, response, answer):\n    global calls\n    calls += 1\n"
                      "    if calls > 24: raise RuntimeError('no more')\n    return calls % 2\n")
    with pytest.raises(SystemExit) as stop:
        trainer.main([*flags, "--steps", "9", "--save-every", "1", "--out", "run", "--reward", spec])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and re.match(r"stopped: step [1-9]: reward .*RuntimeError: no more; the last good", last), last


def test_unknown_reward_and_form(capsys):
    assert "module:function" in refused(capsys, "--reward", "brevity")
    assert "has no function nothing" in refused(capsys, "--reward", "math:nothing")


def test_formulas_of_a_jsonl_task_go_through_algebra():
    assert trainer.reward_function(None, "questions.jsonl")("?", r"so \boxed{1+x^2}", "x^2+1") == 1.0
    assert trainer.reward_function(None, "questions.jsonl")("?", r"so \boxed{1+x^3}", "x^2+1") == 0.0


def test_a_run_directory_that_cannot_be_made_takes_one_line(flags, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        trainer.main([*flags, "--out", str(tmp_path / "file" / "run")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and last.startswith("error: ") and str(tmp_path / "file") in last
