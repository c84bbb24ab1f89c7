"""Nothing is lost: a run killed at any moment, stopped by a signal, by a full disk or by a NaN continues bit-equal.

Each run is a process of its own, so that it can be killed for real. The processes are forked from a server that has
imported everything once; a run of the tiny random model below then takes well under a second.
"""

import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import ROOT, build_model

trainer = importlib.import_module("06_full_llm_training")

if not hasattr(os, "fork"):
    pytest.skip("these tests kill processes the POSIX way", allow_module_level=True)

# Everything that a checkpoint must carry is in use: a queue of two batches, a sampler that lags behind, RED-Drop's generator.
STEPS, SAVE_EVERY = 7, 2
FLAGS = ["--algorithm", "red-drop", "--sync-interval", "3", "--sync-offset", "2", "--steps", str(STEPS), "--save-every",
         str(SAVE_EVERY), "--eval-every", "3", "--eval-questions", "4", "--eval-samples", "2", "--prompts-per-step", "2",
         "--group-size", "4", "--max-new-tokens", "4", "--learning-rate", "1e-2", "--temperature", "1.5", "--seed", "3"]
DISK_CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


# ---------------------------------------------------------------------------------------------- runs as processes


def run_child(argv, log, sabotage):
    """In the child: one run of the trainer, with its output in a file, its pictures left out, and a sabotage put in."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    trainer.reward_function = lambda name, task: noisy_reward
    trainer.plot_run = lambda *arguments, **options: None
    if sabotage:
        kind, *arguments = sabotage
        {"kill at disk call": kill_at_disk_call, "signal in step": signal_in_step, "small disk": small_disk,
         "nan": nan_in_step, "infinite weights": infinite_weights}[kind](*arguments)
    trainer.main(argv)


def noisy_reward(question, text, gold):
    """A random model is never right; and a reward of the user's may draw from any of the global generators."""
    return 1.0 * ("1" in text) + (random.random() < 0.2) + (np.random.rand() < 0.2) + (torch.rand(()).item() < 0.2)


def kill_at_disk_call(number, record=None):
    """SIGKILL just before the call of that number, counted over everything that changes names or flushes, and the writers."""
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
    torch.save, trainer.append = counting(torch.save), counting(trainer.append)


def in_step(number, act):
    """Call act(model) at the start of optimizer step `number`."""
    original, count = trainer.train_step, 0

    def train_step(model, *arguments, **options):
        nonlocal count
        count += 1
        if count == number:
            act(model)
        return original(model, *arguments, **options)

    trainer.train_step = train_step


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
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["test_06_resume", "transformers.models.qwen2.modeling_qwen2"])

    def start(self, out, *flags, sabotage=None):
        self.count += 1
        log = self.folder / f"log-{self.count}"
        argv = ["--model", str(self.model), "--out", str(out), *FLAGS, *flags]
        process = self.context.Process(target=run_child, args=(argv, log, sabotage))
        process.start()
        return process, log

    def __call__(self, out, *flags, sabotage=None):
        """(exit status, output) of one run; a status of −9 is a SIGKILL."""
        process, log = self.start(out, *flags, sabotage=sabotage)
        process.join(60)
        assert process.exitcode is not None, "the run hangs"
        return process.exitcode, log.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    tokenizer = trainer.character_tokenizer()
    model = build_model("qwen2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                        pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        runner = Runner(folder, folder / "model")
        runner(folder / "warm up", "--steps", "1")
    return runner


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
    assert_equal(trainer.load_checkpoint(out), trainer.load_checkpoint(straight), ignore="folder")
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
    state = trainer.load_checkpoint(straight)
    assert len(state["processes"][0]["queue"]) == 2 and state["sampler"] and state["version"] == 6
    weights = torch.cat([p.flatten() for p in state["sampler"].values()])
    assert not any(torch.equal(weights, other) for other in [torch.cat([p.flatten() for p in sampler_weights(straight)])])


def sampler_weights(out):
    model, _ = trainer.load_model(str(out / "model"), device="cpu")
    return model.state_dict().values()


# --------------------------------------------------------------------------------------------------------- kill −9


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
    for _ in range(5):
        process, _ = run.start(out, *(["--resume"] if (out / "config.json").exists() else []))
        time.sleep(draw.uniform(0.1, 1.0))
        process.kill()
        process.join()
    status, output = run(out, "--resume") if (out / "config.json").exists() else run(out)
    assert status == 0, output
    assert_same_run(out, straight)


def kill_at_every_moment_of_a_save(out, report):
    """In the child: continue a run to its next save; kill that save at every single disk call, each time in a fork."""
    config = trainer.parse_arguments(["--resume", "--out", str(out)])
    model, tokenizer = trainer.load_model(trainer.load_checkpoint(out)["folder"], device="cpu")
    old = trainer.load_checkpoint(out)
    state = {k: v for k, v in old.items() if k not in ("folder", "step")}
    survived, weights = [], load_file(Path(old["folder"]) / "model.safetensors").keys()
    for number in range(1, 1000):
        child = os.fork()
        if child == 0:
            kill_at_disk_call(number)
            trainer.save_checkpoint(out, old["step"] + number, model, tokenizer, state)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = trainer.load_checkpoint(out)
        assert_equal(found["optimizer"], old["optimizer"])
        assert load_file(Path(found["folder"]) / "model.safetensors").keys() == weights
        survived.append(found["step"] - old["step"])
        if not killed:
            break
    report.write_text(json.dumps({"survived": survived, "steps": config.steps}))


def test_a_save_killed_at_every_disk_call_leaves_a_checkpoint_that_loads(run, straight):
    out, report = run.folder / "every moment", run.folder / "report"
    shutil.copytree(straight, out)
    process = run.context.Process(target=kill_at_every_moment_of_a_save, args=(out, report))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    newest = json.loads(report.read_text())["survived"]
    # up to the rename the old one is the newest, from then on the new one; and there were many moments before it
    switch = next(i for i, number in enumerate(newest) if number == i + 1)
    assert switch > 8 and newest[:switch] == [0] * switch
    assert newest[switch:] == list(range(switch + 1, len(newest) + 1))


def kill_at_every_moment_of_an_overwrite(straight, out):
    """In the child: --overwrite clears a run; kill that at every disk call. What is left is a whole checkpoint or none."""
    whole = trainer.load_checkpoint(straight)
    for number in range(1, 1000):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(straight, out)
        child = os.fork()
        if child == 0:
            kill_at_disk_call(number)
            trainer.clear_run(out)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = trainer.load_checkpoint(out)
        if found:
            assert_equal(found, whole, ignore="folder")
            assert {p.name for p in Path(found["folder"]).iterdir()} == {p.name for p in Path(whole["folder"]).iterdir()}
        if not killed:
            assert number > 15 and not found
            return


def test_an_overwrite_killed_at_every_disk_call_leaves_no_half_checkpoint(run, straight, tmp_path):
    process = run.context.Process(target=kill_at_every_moment_of_an_overwrite, args=(straight, tmp_path / "run"))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(straight, tmp_path, monkeypatch):
    """What a power cut could tear: every file and folder is flushed, then renamed, then the rename itself is flushed."""
    model, tokenizer = trainer.load_model(str(straight / "model"), device="cpu")
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("{}\n")
    calls = []
    fsync, rename, path_of = os.fsync, os.rename, {}
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(("flush", os.fstat(handle).st_ino)), fsync(handle)))
    monkeypatch.setattr(os, "rename", lambda a, b: (path_of.update({p: p.stat().st_ino for p in [a, *a.rglob("*")]}),
                                                    calls.append(("rename", b)), rename(a, b)))
    trainer.save_checkpoint(tmp_path, 1, model, tokenizer, {})
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
    assert [p.name for p in trainer.checkpoints(out)] == ["step-000003"]
    if name == "SIGTERM":
        status, output = run(out, "--resume")
        assert status == 0, output
        assert_same_run(out, straight)


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with trainer.interruptions() as arrived:
            os.kill(os.getpid(), signal.SIGTERM)
        assert arrived == []
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("limit", [None, 10_000, 100_000], ids=["metrics", "model", "trainer"])
def test_full_disk(run, straight, limit):
    """The disk ends in the middle of a line of metrics, in the weights (10,000 bytes), in the trainer's state (100,000)."""
    sizes = {p.name: p.stat().st_size for p in trainer.checkpoints(straight)[-1].iterdir()}
    assert 10_000 < sizes["model.safetensors"] < 100_000 < sizes["trainer.pt"]
    out = run.folder / f"disk {limit}"
    status, output = run(out, sabotage=("small disk", 4, limit or out / "metrics.jsonl"))
    last = output.splitlines()[-1]
    assert status == 1, output
    assert last.startswith("stopped: step 4: ") and last.endswith(f"; the last good checkpoint is {out}/checkpoint/step-000002")
    assert "Traceback" not in output and ("cannot write" in last or "File too large" in last)
    status, output = run(out, "--resume")
    assert status == 0, output
    assert_same_run(out, straight)


@pytest.mark.parametrize("sabotage", [("nan", 4), ("infinite weights", 4)], ids=lambda s: s[0])
def test_not_finite(run, straight, sabotage):
    out = run.folder / sabotage[0]
    status, output = run(out, sabotage=sabotage)
    assert status == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("stopped: step 4: the ") and "not finite" in last
    assert last.endswith(f"; the last good checkpoint is {out}/checkpoint/step-000002")
    assert metrics(out)[-1]["step"] == 3  # nothing of the broken step is recorded
    status, output = run(out, "--resume")
    assert status == 0, output
    assert_same_run(out, straight)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_from_logits_that_are_not_finite_raises(straight, temperature):
    """The greedy choice among NaN would be token 0, without a word."""
    model, tokenizer = trainer.load_model(str(straight / "model"), device="cpu")
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 0] = float("inf")
    prompt, mask = trainer.encode_prompts(tokenizer, [trainer.Example("?", "1", "0+1=")], device="cpu")
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        trainer.generate(model, prompt, mask, group_size=2, max_new_tokens=2, temperature=temperature, eos_ids={1}, pad_id=0,
                         generator=torch.Generator().manual_seed(0))


def test_weights_that_are_not_finite_are_never_saved(straight):
    model, tokenizer = trainer.load_model(str(straight / "model"), device="cpu")
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.save_checkpoint(straight, STEPS + 1, model, tokenizer, {})
    assert [p.name for p in trainer.checkpoints(straight)] == [f"step-{STEPS:06d}"]


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


def test_killed_before_the_first_checkpoint_starts_again(run, straight):
    out = run.folder / "early"
    status, _ = run(out, sabotage=("kill at disk call", 8))
    assert status == -signal.SIGKILL and not trainer.checkpoints(out) and (out / "config.json").exists()
    status, output = run(out, "--resume")
    assert status == 0, output
    assert_same_run(out, straight)


def test_a_damaged_checkpoint_is_named(run, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    (trainer.checkpoints(tmp_path / "run")[-1] / "trainer.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(trainer.UserError, match=f"step-{STEPS:06d} is damaged"):
        trainer.load_checkpoint(tmp_path / "run")


def test_checkpoints_are_ordered_by_number_and_nothing_unfinished_counts(tmp_path):
    for name in ("step-999999", "step-1000000", "step-000002", "unfinished-step-1000001-77"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    assert [p.name for p in trainer.checkpoints(tmp_path)] == ["step-000002", "step-999999", "step-1000000"]


def test_keep_lines_drops_later_steps_and_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 2, "re')
    trainer.keep_lines(tmp_path, last_step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'


def test_keep_lines_keeps_an_answer_with_a_line_separator_in_it(tmp_path):
    line = {"step": 1, "response": "a\u2028b\x85c"}
    trainer.append(tmp_path / "samples.jsonl", line)
    trainer.keep_lines(tmp_path, last_step=1)
    assert json.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8")) == line


def save_logits(folder, path):
    with torch.no_grad():
        torch.save(AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 9)[None]).logits, path)


def test_the_weights_load_in_a_fresh_process_and_stay_tied(run, straight):
    tokens = torch.arange(3, 9)[None]
    model, checkpoint = (AutoModelForCausalLM.from_pretrained(folder) for folder in
                         (straight / "model", trainer.checkpoints(straight)[-1]))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    logits = straight.parent / "logits.pt"
    process = run.context.Process(target=save_logits, args=(straight / "model", logits))
    process.start()
    process.join(60)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, torch.load(logits))
        assert torch.equal(model(tokens).logits, checkpoint(tokens).logits)
