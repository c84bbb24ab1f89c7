"""Nothing is lost: a run killed at any moment, stopped by a signal, by a full disk or by a NaN continues bit-equal.

Each run is a process of its own, so that it can be killed for real; one of the tiny random model below takes well under
a second. What a run leaves behind is tested here as well, and who may write where.
"""

import importlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
from conftest import ROOT, build_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from under_the_hood import runs
from under_the_hood.answers import is_correct
from under_the_hood.errors import RunStopped, UserError
from under_the_hood.models import character_tokenizer, load_model
from under_the_hood.tasks import read_jsonl

lm = importlib.import_module("06_full_llm_training")

# Everything that a checkpoint must carry is in use: a queue of two batches, a sampler that lags behind, RED-Drop's
# generator, and a reward that draws from the global generators.
STEPS, SAVE_EVERY = 7, 2
FLAGS = ["--algorithm", "red-drop", "--sync-interval", "3", "--sync-offset", "2", "--steps", str(STEPS), "--save-every",
         str(SAVE_EVERY), "--eval-every", "3", "--eval-questions", "4", "--eval-samples", "2", "--prompts-per-step",
         "2", "--group-size", "4", "--max-new-tokens", "4", "--learning-rate", "1e-2", "--temperature", "1.5", "--seed",
         "3", "--reward", "test_runs:noisy_reward"]
DISK_CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


# ---------------------------------------------------------------------------------------------- runs as processes


def noisy_reward(question, text, gold):
    """A random model is never right; and a reward of the user's may draw from any of the global generators."""
    return 1.0 * ("1" in text) + (random.random() < 0.2) + (np.random.rand() < 0.2) + (torch.rand(()).item() < 0.2)


def sabotaged_run(argv, sabotage):
    """In the child: one run, without its pictures, with a sabotage put in."""
    runs.plot_run = lambda *arguments, **options: None
    if sabotage:
        kind, *arguments = sabotage
        {"kill at disk call": kill_at_disk_call, "signal in step": signal_in_step, "small disk": small_disk,
         "nan": nan_in_step, "infinite weights": infinite_weights}[kind](*arguments)
    lm.main(argv)


def kill_at_disk_call(number, record=None):
    """SIGKILL just before the call of that number, counted over all that changes names or flushes, and the writers."""
    count = 0

    def counting(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if record:
                with open(record, "w") as file:
                    file.write(str(count))
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return call

    for name in DISK_CALLS:
        setattr(os, name, counting(getattr(os, name)))
    torch.save, runs.append = counting(torch.save), counting(runs.append)


def in_step(number, act):
    """Call act(model) at the start of optimizer step `number`."""
    original, count = lm.train_step, 0

    def train_step(model, *arguments, **options):
        nonlocal count
        count += 1
        if count == number:
            act(model)
        return original(model, *arguments, **options)

    lm.train_step = train_step


def signal_in_step(number, name):
    for _ in range(2 if name == "SIGHUP" else 1):  # a closing terminal may send that one twice
        in_step(number, lambda model: os.kill(os.getpid(), getattr(signal, name)))


def small_disk(number, limit):
    """From that step on no file may grow beyond `limit` bytes: a real write error, from the kernel, in whoever writes.

    Instead of a number it may be a file: that one has room for half a line more.
    """
    def act(model):
        room = limit if isinstance(limit, int) else limit.stat().st_size + 50
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    in_step(number, act)


def nan_in_step(number):
    def poison(model):
        hook = model.get_input_embeddings().weight.register_hook
        hook(lambda gradient: gradient * float("nan"))
    in_step(number, poison)


def infinite_weights(number):
    def poison(model):
        with torch.no_grad():
            model.get_input_embeddings().weight[0, 0] = float("inf")
    in_step(number, poison)


class Runner:
    def __init__(self, folder, model):
        self.folder, self.model, self.count = folder, model, 0

    def start(self, out, *flags, sabotage=None):
        self.count += 1
        argv = ["--model", str(self.model), "--out", str(out), *FLAGS, *flags]
        log = self.folder / f"log-{self.count}"
        return processes.start(sabotaged_run, argv, sabotage, log=log), log

    def __call__(self, out, *flags, sabotage=None):
        """(exit status, output) of one run; a status of −9 is a SIGKILL."""
        process, log = self.start(out, *flags, sabotage=sabotage)
        process.join(60)
        assert process.exitcode is not None, "the run hangs"
        return process.exitcode, log.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    tokenizer = character_tokenizer()
    model = build_model("qwen2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                        pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return Runner(folder, folder / "model")


@pytest.fixture(scope="module")
def straight(run):
    """The run that nothing disturbed."""
    out = run.folder / "straight"
    status, output = run(out, sabotage=("kill at disk call", -1, run.folder / "calls"))
    assert status == 0, output
    return out


# ------------------------------------------------------------------------------------------------- the comparisons


def metrics(out):
    """metrics.jsonl without the timing."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def assert_same_run(out, straight):
    """Every line once, every number, every sample, the weights and the whole trainer state: bit-equal."""
    assert metrics(out) == metrics(straight)
    assert [line["step"] for line in metrics(out)] == list(range(STEPS + 1))
    for name in ("samples.jsonl", "model/model.safetensors", f"checkpoint/step-{STEPS:06d}/model.safetensors"):
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name
    assert_equal(runs.load_checkpoint(out), runs.load_checkpoint(straight), ignore="folder")
    assert sorted(p.name for p in out.iterdir() if p.name != "config.json") == sorted(
        p.name for p in straight.iterdir() if p.name != "config.json")  # and no litter
    assert [p.name for p in (out / "checkpoint").iterdir()] == [f"step-{STEPS:06d}"]


def assert_equal(left, right, ignore=None):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left.keys() - {ignore}:
            assert_equal(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for pair in zip(left, right):
            assert_equal(*pair)
    elif torch.is_tensor(left):
        assert left.dtype == right.dtype and torch.equal(left, right)
    else:
        assert left == right


def test_the_undisturbed_run_uses_all_that_a_checkpoint_must_carry(straight):
    lines = metrics(straight)
    assert [line["staleness"] for line in lines[1:]] == [0, 1, 2, 3, 4, 2, 3]
    assert len({line["reward"] for line in lines[1:]}) >= 3 and all(line["grad_norm"] > 0 for line in lines[1:])
    state = runs.load_checkpoint(straight)
    assert len(state["processes"][0]["queue"]) == 2 and state["sampler"] and state["version"] == 6
    weights = torch.cat([p.flatten() for p in state["sampler"].values()])
    model, _ = load_model(str(straight / "model"), device="cpu")
    assert not torch.equal(weights, torch.cat([p.flatten() for p in model.state_dict().values()]))


# --------------------------------------------------------------------------------------------------------- kill −9


@pytest.mark.slow
def test_killed_20_times_at_random_moments(run, straight):
    """Loading, sampling, appending, saving, cleaning up: wherever the kill falls, the next attempt continues."""
    out, draw, finished = run.folder / "killed", random.Random(5), 0
    run(out, sabotage=("kill at disk call", 40))
    for _ in range(20):
        status, output = run(out, "--resume", sabotage=("kill at disk call", draw.randint(1, 60)))
        if status == 0:  # it outran its killer: what it made is whole, and the next one starts from nothing
            assert_same_run(out, straight)
            finished += 1
            status, output = run(out, "--overwrite", sabotage=("kill at disk call", draw.randint(5, 60)))
        assert status == -signal.SIGKILL, output
    assert finished < 10  # else hardly anything was killed
    status, output = run(out, "--resume")
    assert status == 0, output
    assert_same_run(out, straight)


def test_killed_by_the_clock(run, straight):
    """The same without any hook in the process: SIGKILL from outside after a random time."""
    out, draw = run.folder / "clock", random.Random(6)
    for _ in range(3):
        process, _ = run.start(out, *(["--resume"] if (out / "config.json").exists() else []))
        time.sleep(draw.uniform(0.1, 1.0))
        process.kill()
        process.join()
    status, output = run(out, "--resume") if (out / "config.json").exists() else run(out)
    assert status == 0, output
    assert_same_run(out, straight)


def kill_at_every_moment_of_a_save(out, report):
    """In the child: continue a run to its next save; kill that save at every single disk call, each time in a fork."""
    model, tokenizer = load_model(runs.load_checkpoint(out)["folder"], device="cpu")
    old = runs.load_checkpoint(out)
    state = {k: v for k, v in old.items() if k not in ("folder", "step")}
    survived, weights = [], load_file(Path(old["folder"]) / "model.safetensors").keys()
    for number in range(1, 1000):
        child = os.fork()
        if child == 0:
            kill_at_disk_call(number)
            runs.save_checkpoint(out, old["step"] + number, model, tokenizer, state)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = runs.load_checkpoint(out)
        assert_equal(found["optimizer"], old["optimizer"])
        assert load_file(Path(found["folder"]) / "model.safetensors").keys() == weights
        survived.append(found["step"] - old["step"])
        if not killed:
            break
    report.write_text(json.dumps(survived))


@pytest.mark.slow
def test_a_save_killed_at_every_disk_call_leaves_a_checkpoint_that_loads(run, straight):
    out, report = run.folder / "every moment", run.folder / "report"
    shutil.copytree(straight, out)
    status, output = processes.call(kill_at_every_moment_of_a_save, out, report, log=run.folder / "log of saves")
    assert status == 0, output
    newest = json.loads(report.read_text())
    # up to the rename the old one is the newest, from then on the new one; and there were many moments before it
    switch = next(i for i, number in enumerate(newest) if number == i + 1)
    assert switch > 8 and newest[:switch] == [0] * switch
    assert newest[switch:] == list(range(switch + 1, len(newest) + 1))


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def kill_at_every_moment_of_an_overwrite(straight, out):
    """In the child: --overwrite clears a run; kill that at every disk call. A whole checkpoint is left, or none."""
    whole = runs.load_checkpoint(straight)
    for number in range(1, 1000):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(straight, out)
        child = os.fork()
        if child == 0:
            kill_at_disk_call(number)
            runs.clear_run(out)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = runs.load_checkpoint(out)
        if found:
            assert_equal(found, whole, ignore="folder")
            assert names(found["folder"]) == names(whole["folder"])
        if not killed:
            assert number > 15 and not found
            return


def test_an_overwrite_killed_at_every_disk_call_leaves_no_half_checkpoint(run, straight, tmp_path):
    status, output = processes.call(kill_at_every_moment_of_an_overwrite, straight, tmp_path / "run",
                                    log=tmp_path / "log")
    assert status == 0, output


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(straight, tmp_path, monkeypatch):
    """What a power cut could tear: each file and folder is flushed, then renamed, then the rename itself is flushed."""
    model, tokenizer = load_model(str(straight / "model"), device="cpu")
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("{}\n")
    calls = []
    fsync, rename, path_of = os.fsync, os.rename, {}
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(("flush", os.fstat(handle).st_ino)), fsync(handle)))
    monkeypatch.setattr(os, "rename", lambda a, b: (path_of.update({p: p.stat().st_ino for p in [a, *a.rglob("*")]}),
                                                    calls.append(("rename", b)), rename(a, b)))
    runs.save_checkpoint(tmp_path, 1, model, tokenizer, {})
    at = calls.index(("rename", tmp_path / "checkpoint" / "step-000001"))
    flushed = {inode for kind, inode in calls[:at]}
    assert len(path_of) > 5 and set(path_of.values()) <= flushed
    assert {(tmp_path / name).stat().st_ino for name in ("metrics.jsonl", "samples.jsonl")} <= flushed
    assert ("flush", (tmp_path / "checkpoint").stat().st_ino) in calls[at:]


# ------------------------------------------------------------------------------------- signals, full disk, not finite


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_finishes_the_step_and_saves_it(run, straight, name):
    out = run.folder / name
    status, output = run(out, sabotage=("signal in step", 3, name))
    assert status == 1
    assert output.splitlines()[-1] == f"stopped: by {name} after step 3; continue with --resume --out {out}"
    assert f"{name}: finishing this step" in output
    assert [p.name for p in runs.checkpoints(out)] == ["step-000003"]
    if name == "SIGTERM":
        status, output = run(out, "--resume")
        assert status == 0, output
        assert_same_run(out, straight)


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with runs.interruptions() as arrived:
            os.kill(os.getpid(), signal.SIGTERM)
        assert arrived == []
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("limit", [None, 10_000, 100_000], ids=["metrics", "model", "trainer"])
def test_a_full_disk_stops_the_run_in_order(run, straight, limit):
    """It ends in the middle of a line of metrics, in the weights (10,000 bytes), in the trainer's state (100,000)."""
    sizes = {p.name: p.stat().st_size for p in runs.checkpoints(straight)[-1].iterdir()}
    assert 10_000 < sizes["model.safetensors"] < 100_000 < sizes["trainer.pt"]
    out = run.folder / f"disk {limit}"
    status, output = run(out, sabotage=("small disk", 4, limit or out / "metrics.jsonl"))
    last = output.splitlines()[-1]
    assert status == 1, output
    assert last.startswith("stopped: step 4: ")
    assert last.endswith(f"; the last good checkpoint is {out}/checkpoint/step-000002")
    assert "Traceback" not in output and ("cannot write" in last or "File too large" in last)
    if limit != 100_000:  # half a line, half a model; half a state is the latter again
        status, output = run(out, "--resume")
        assert status == 0, output
        assert_same_run(out, straight)


@pytest.mark.parametrize("sabotage", [("nan", 4), ("infinite weights", 4)], ids=lambda s: s[0])
def test_what_is_not_finite_stops_the_run_and_is_not_recorded(run, sabotage):
    out = run.folder / sabotage[0]
    status, output = run(out, sabotage=sabotage)
    assert status == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("stopped: step 4: the ") and "not finite" in last
    assert last.endswith(f"; the last good checkpoint is {out}/checkpoint/step-000002")
    assert metrics(out)[-1]["step"] == 3  # nothing of the broken step is recorded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_sampling_from_logits_that_are_not_finite_raises(straight, engine, temperature):
    """The greedy choice among NaN would be token 0, without a word."""
    model, tokenizer = load_model(str(straight / "model"), device="cpu")
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 0] = float("inf")
    prompt = torch.tensor([tokenizer("0+1=")["input_ids"]])
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        lm.ENGINES[engine][0](model, prompt, prompt > -1, group_size=2, max_new_tokens=2, temperature=temperature,
                              eos_ids={1}, pad_id=0, generator=torch.Generator().manual_seed(0))


def test_weights_that_are_not_finite_are_never_saved(straight):
    model, tokenizer = load_model(str(straight / "model"), device="cpu")
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        runs.save_checkpoint(straight, STEPS + 1, model, tokenizer, {})
    assert [p.name for p in runs.checkpoints(straight)] == [f"step-{STEPS:06d}"]


# ---------------------------------------------------------------------------------------------------------- resuming


def test_a_finished_run_resumes_to_itself_and_can_be_extended(run, straight):
    out = run.folder / "extended"
    status, output = run(out, "--steps", "4")
    assert status == 0 and len(metrics(out)) == 5, output
    status, output = run(out, "--resume", "--steps", "4")
    assert status == 0 and len(metrics(out)) == 5, output
    status, output = run(out, "--resume")  # FLAGS say 7 steps
    assert status == 0, output
    extended = metrics(out)
    assert extended[4].pop("eval_accuracy") is not None  # step 4 was the last one then, so it evaluated
    assert [line["loss"] for line in extended[1:]] == [line["loss"] for line in metrics(straight)[1:]]
    assert (out / "samples.jsonl").read_bytes() == (straight / "samples.jsonl").read_bytes()


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_starts_again(run, straight):
    out = run.folder / "early"
    for number in range(8, 30):  # the first disk call behind that of config.json
        status, _ = run(out, "--overwrite", sabotage=("kill at disk call", number))
        if (out / "config.json").exists():
            break
    assert status == -signal.SIGKILL and not runs.checkpoints(out) and (out / "config.json").exists()
    status, output = run(out, "--resume")
    assert status == 0, output
    assert_same_run(out, straight)


def test_a_damaged_checkpoint_is_named(run, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    (runs.checkpoints(tmp_path / "run")[-1] / "trainer.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=f"step-{STEPS:06d} is damaged"):
        runs.load_checkpoint(tmp_path / "run")


class Harm:
    """Unpickled, it would call a function."""
    called = []  # noqa: RUF012 (one list for all is the point)

    def __reduce__(self):
        return Harm.called.append, (True,)


def test_a_checkpoint_from_elsewhere_cannot_run_code(tmp_path):
    (tmp_path / "checkpoint" / "step-000001").mkdir(parents=True)
    torch.save({"step": 1, "queue": Harm()}, tmp_path / "checkpoint" / "step-000001" / "trainer.pt")
    with pytest.raises(UserError, match="step-000001 is damaged"):
        runs.load_checkpoint(tmp_path)


def test_checkpoints_are_ordered_by_number_and_nothing_unfinished_counts(tmp_path):
    for name in ("step-999999", "step-1000000", "step-000002", "unfinished-step-1000001-77"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    assert [p.name for p in runs.checkpoints(tmp_path)] == ["step-000002", "step-999999", "step-1000000"]


def test_truncate_logs_drops_later_steps_and_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 2, "re')
    runs.truncate_logs(tmp_path, last_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'


def test_truncate_logs_keeps_an_answer_with_a_line_separator_in_it(tmp_path):
    line = {"step": 1, "response": "a\u2028b\x85c"}
    runs.append(tmp_path / "samples.jsonl", line)
    runs.truncate_logs(tmp_path, last_step=1)
    assert json.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8")) == line


TOKENS = torch.arange(1, 7)[None]


def save_logits(folders, path):
    with torch.no_grad():
        torch.save([AutoModelForCausalLM.from_pretrained(folder)(TOKENS).logits for folder in folders], path)


def test_model_and_checkpoint_load_in_another_process_with_the_logits_of_the_trained_model(trained, tmp_path):
    """By transformers alone; the weights stay tied and float32."""
    out, live = trained
    folders = out / "model", runs.checkpoints(out)[-1]
    status, output = processes.call(save_logits, folders, tmp_path / "logits.pt", log=tmp_path / "log")
    assert status == 0, output
    with torch.no_grad():
        expected = live(TOKENS).logits
    assert expected.dtype == torch.float32 and expected.std() > 0
    assert all(torch.equal(logits, expected) for logits in torch.load(tmp_path / "logits.pt"))
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


# -------------------------------------------------------------------------------------------- what a run leaves behind


def refused(capsys, *flags):
    """The one line on stderr of a command that exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        lm.main([str(flag) for flag in flags])
    error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(error) == 1 and error[0].startswith("error: "), error
    return error[0]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def flags(tiny_run):
    return [*tiny_run[2], "--steps", "3", "--sync-interval", "2", "--eval-every", "2", "--algorithm", "rec-oneside-is"]


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory):
    """(run directory, finished process) of three steps, started as a user starts them."""
    out = tmp_path_factory.mktemp("run") / "first"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.run([sys.executable, ROOT / "06_full_llm_training.py", *flags, "--out", out], check=False,
                             text=True, capture_output=True, timeout=300, encoding="utf-8", env=environment)
    assert process.returncode == 0, process.stderr
    return out, process


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory, quick):
    """(run directory, trained model) of the same three steps in this process."""
    out, made = tmp_path_factory.mktemp("again") / "second", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "load_model", lambda *args, **options: made.append(load_model(*args, **options)) or made[-1])
        lm.main([*flags, "--out", str(out)])
    return out, made[0][0]


def test_metrics_are_complete_finite_and_in_order(finished):
    history = lines(finished[0] / "metrics.jsonl")
    assert [line["step"] for line in history] == [0, 1, 2, 3]
    assert [line["step"] for line in history if "eval_accuracy" in line] == [0, 2, 3]
    names = {re.sub(r"(?<=pass_at_)\d+$", "k", key) for line in history for key in line}
    # METRICS is what --help shows: none undocumented, none documented that does not exist
    elsewhere = {"compute_gap_mean", "compute_gap_max", "unscored", "eval_unscored"}  # bfloat16, --on-unscored
    assert names == set(runs.METRICS) - elsewhere
    for line in history[1:]:
        assert {name for name in names if not name.startswith("eval")} <= line.keys()
        assert all(math.isfinite(value) for value in line.values())
        assert 0 <= line["reward"] <= 1 and 0 <= line["clip_fraction"] <= 1 and line["grad_norm"] >= 0
        assert 0 <= line["entropy"] <= math.log(7) and 1 <= line["completion_length"] <= 2 and line["kl_old"] > -1e-6
        assert line["tokens_per_second"] > 0
    assert [line["staleness"] for line in history[1:]] == [0, 1, 0]
    assert sum(line["reward"] for line in history[1:]) > 0 and any(line["loss"] != 0 for line in history[1:])


def test_samples_are_what_was_asked_and_answered(finished, tiny_run):
    questions = {example.question for example in read_jsonl(tiny_run[1])}
    samples = lines(finished[0] / "samples.jsonl")
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    for sample in samples:
        assert sample["question"] in questions and sample["answer"] == "1"
        assert sample["reward"] == float(is_correct(sample["response"], "1"))
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}


def test_the_picture_is_a_picture(finished):
    data = (finished[0] / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 10_000
    width, height = (int.from_bytes(data[i: i + 4], "big") for i in (16, 20))
    assert width > 1000 and height > 300


def test_the_last_line_is_the_result_and_errors_are_silent(finished):
    out, process = finished
    history, last = lines(out / "metrics.jsonl"), process.stdout.splitlines()[-1]
    assert f"accuracy {history[0]['eval_accuracy']:.3f} → {history[-1]['eval_accuracy']:.3f}" in last
    assert str(out) in last and " s" in last
    assert "Traceback" not in process.stderr and "Warning" not in process.stderr


def test_a_run_repeats_itself_in_another_process(finished, trained):
    assert metrics(finished[0]) == metrics(trained[0])
    assert (finished[0] / "samples.jsonl").read_bytes() == (trained[0] / "samples.jsonl").read_bytes()


def test_another_seed_other_samples(trained, flags, tmp_path):
    lm.main([*flags, "--out", str(tmp_path / "other"), "--seed", "1"])
    assert lines(trained[0] / "samples.jsonl") != lines(tmp_path / "other" / "samples.jsonl")


def test_evaluating_changes_nothing_in_training(trained, flags, tmp_path):
    """Evaluation has a generator of its own: without the one at step 2, steps 1 to 3 are the same."""
    lm.main([*flags, "--out", str(tmp_path / "rarely"), "--eval-every", "100", "--eval-samples", "7"])
    pairs = list(zip(metrics(trained[0])[1:], metrics(tmp_path / "rarely")[1:], strict=True))
    assert len(pairs) == 3 and "eval_accuracy" not in pairs[1][1]
    for often, rarely in pairs:
        assert all(rarely[key] == value for key, value in often.items() if not key.startswith("eval_"))


def test_training_changed_the_model(trained, tiny_run):
    base, _ = load_model(str(tiny_run[0]), device="cpu")
    assert any(not torch.equal(a, b) for a, b in zip(base.parameters(), trained[1].parameters()))


# ----------------------------------------------------------------------------------------------- whose directory it is


def test_a_finished_run_is_not_touched(capsys, flags, trained):
    before = {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}
    message = refused(capsys, *flags, "--out", trained[0])
    assert "already holds a run" in message and "--overwrite" in message and "--resume" in message
    assert {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")} == before


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoint/step-000001"])
def test_either_trace_of_a_run_makes_a_directory_taken(tmp_path, left):
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(UserError, match="already holds a run"):
        runs.Run(lm.Config(out=str(tmp_path)))
    runs.Run(lm.Config(out=str(tmp_path), overwrite=True))


def test_two_processes_never_write_one_run_directory(flags, tmp_path, capsys):
    hold = ("import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
            "print('held', flush=True); sys.stdin.read()")
    command = [sys.executable, "-c", hold, tmp_path / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert "another process is writing" in refused(capsys, *flags, "--out", tmp_path)
        other.stdin.close()
    runs.lock_run_directory(tmp_path)  # the lock went with its process


def test_a_run_directory_that_cannot_be_made_takes_one_line(flags, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        lm.main([*flags, "--out", str(tmp_path / "file" / "run")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and last.startswith("error: ") and str(tmp_path / "file") in last


def test_what_resume_may_change_counts_and_is_kept(flags, trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    lm.main(["--resume", "--out", str(out), "--steps", "4", "--learning-rate", "1e-9"])
    stored = json.loads((out / "config.json").read_text())
    assert stored["steps"] == 4 and stored["learning_rate"] == 1e-9
    assert [line["step"] for line in metrics(out)] == [0, 1, 2, 3, 4]
    assert runs.load_checkpoint(out)["optimizer"]["param_groups"][0]["lr"] == 1e-9


def test_a_checkpoint_of_an_older_version_is_refused_in_words(tmp_path):
    (tmp_path / "checkpoint" / "step-000003").mkdir(parents=True)
    torch.save({"step": 3}, tmp_path / "checkpoint" / "step-000003" / "trainer.pt")
    run = runs.Run(lm.Config(out=str(tmp_path), resume=True))
    model = torch.nn.Linear(1, 1)
    run.attach(model, None, model, None)
    with pytest.raises(UserError, match="older version"):
        run.begin(lm.Rollout)


# ----------------------------------------------------------------------------------- TensorBoard, and what the bar says


def test_tensorboard_gets_every_number_of_metrics_jsonl(flags, trained, tmp_path, monkeypatch):
    """Against a stand-in for the writer, since the package is optional; resuming drops what will be written again."""
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
    shutil.copytree(trained[0], tmp_path / "run")
    lm.main(["--resume", "--out", str(tmp_path / "run"), "--tensorboard", "--steps", "5"])
    assert made == [(str(tmp_path / "run" / "tensorboard"), 4)]
    after = lines(tmp_path / "run" / "metrics.jsonl")[4:]
    assert len(after) == 2
    assert written == {(name, line["step"]): value for line in after for name, value in line.items()}


@pytest.mark.parametrize("loss, norm, times", [(-0.003, 0.7, 1), (0.4, 0.7, 0), (0.0, 0.0, 0)])
def test_a_loss_near_0_is_explained_once(tmp_path, capsys, loss, norm, times):
    run = runs.Run(lm.Config(out=str(tmp_path), steps=3))
    for step in run.steps():
        run.report(step, {"loss": loss, "grad_norm": norm, "reward": 0.5, "staleness": 0, "clip_fraction": 0.0})
    assert capsys.readouterr().out.count("loss ≈ 0") == times


def test_a_signal_in_the_last_step_ends_a_run_that_is_complete(tmp_path):
    """After an earlier step it stops the run."""
    metrics = {"loss": 1.0, "grad_norm": 1.0, "reward": 0.5, "staleness": 0, "clip_fraction": 0.0}
    run = runs.Run(lm.Config(out=str(tmp_path), steps=2))
    for step in run.steps():
        run.signals = ["SIGTERM"] * (step == 2)
        run.report(step, metrics)
    run = runs.Run(lm.Config(out=str(tmp_path), steps=2))
    with pytest.raises(RunStopped, match="by SIGTERM after step 1"):
        for step in run.steps():
            run.signals = ["SIGTERM"]
            run.report(step, metrics)
