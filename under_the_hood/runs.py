"""The run directory: one writer, whole files, checkpoints that resume bit for bit, an orderly end on a signal."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import threading
import time
from collections import deque

import numpy as np
import torch

from under_the_hood import lora, parallel
from under_the_hood.errors import RunStopped, UserError, one_line, require
from under_the_hood.pictures import plot_run

METRICS = {  # what a line of metrics.jsonl says; --help ends with it
    "step": "optimizer steps so far; step 0 only evaluates",
    "reward": "mean reward of the batch as the trainer sees it, under the policy that sampled it",
    "loss": "value of the loss. It says little: advantages sum to 0 in a group, so a value near 0 is normal",
    "grad_norm": "L2 norm of the gradient before clipping it to --max-grad-norm",
    "entropy": "of the policy, in nats per token",
    "kl_old": "estimate of KL(sampler ‖ policy) in nats per token, on the batch (k3)",
    "clip_fraction": "share of response tokens that the clip mask takes out of the update",
    "ratio_mean": "mean of π_θ/π_old over the response tokens; 1 when on-policy",
    "ratio_p05": "quantiles of the token ratio: 5 %",
    "ratio_p50": "… the median",
    "ratio_p95": "… 95 %",
    "ratio_max": "… the largest",
    "ess": "effective sample size of the responses, as a share: 1 when on-policy, 1/B when one carries all the weight",
    "staleness": "updates between the sampler's weights and the policy's",
    "flat_groups": "share of groups whose rewards are all equal, which teach most rows nothing",
    "truncated": "share of responses cut off at --max-new-tokens",
    "completion_length": "mean length of a response, in tokens",
    "tokens_per_second": "response tokens of the batch per second of sampling and training",
    "compute_gap_mean": "step 0, bfloat16 or --shard: |log π of the sampler − of the trainer| that the compute type "
                        "makes, mean",
    "compute_gap_max": "… the largest",
    "eval_accuracy": "mean reward on the held-out questions, sampled at --temperature",
    "eval_low": "lower end of its 95 % interval; the questions are the sample",
    "eval_high": "upper end",
    "eval_greedy": "mean reward of the greedy answers",
    "eval_greedy_low": "lower end of its 95 % interval",
    "eval_greedy_high": "upper end",
    "unscored": "share of responses that the verifier could not judge (--on-unscored leave-out)",
    "eval_unscored": "… in the evaluation",
    "eval_pass_at_k": "chance that at least one of k sampled answers is right (its reward is 1 or more); unbiased",
}


LOGS = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")  # a line has a step; the last one only where it is wanted


class Run:
    """One training run seen from its directory. `train` in 06 says what a step does; this says what is kept of it.

        run = Run(config)                       refuses a directory with another run; .folder: a checkpoint's model
        run.attach(model, tokenizer, …)         what is saved and restored
        version, queue = run.begin(Rollout)     the checkpoint's, or (0, empty)
        for step in run.steps():                with run.guard(step): …; run.record(…); run.save_when_due(…)
        run.finish(started)                     model/ and curves.png; the result
    """

    def __init__(self, config):
        self.config, self.out, self.state = config, pathlib.Path(config.out), None
        holds_a_run = (self.out / "metrics.jsonl").exists() or checkpoints(self.out)
        require(config.resume or config.overwrite or not holds_a_run,
                f"{self.out} already holds a run: add --resume to continue it, --overwrite to replace it, "
                "or choose another --out")
        if config.resume:
            self.state = load_checkpoint(self.out)
        self.is_new, self.folder = self.state is None, self.state and self.state["folder"]
        self.first_step, self.signals, self.explained = 1, [], False
        self.main_process = parallel.rank() == 0

    def attach(self, model, tokenizer, sampler, optimizer, *generators) -> None:
        self.model, self.tokenizer, self.sampler, self.optimizer = model, tokenizer, sampler, optimizer
        self.generators, self.copied = generators, sampler is not model

    def begin(self, Rollout):
        """Restore the checkpoint, lock and tidy the directory. Returns the sampler's version and the queue."""
        version, queue = self._restore(Rollout) if self.state else (0, deque())
        parallel.barrier()  # all have seen what --out holds
        if self.main_process:
            self.lock = lock_run_directory(self.out)  # held while this object lives
            clear_run(self.out) if self.is_new else truncate_logs(self.out, last_step=self.first_step - 1)
            unfinished = [*self.out.glob("unfinished-*"), *self.out.glob("checkpoint/unfinished-*")]
            for leftover in [*unfinished, *checkpoints(self.out)[:-1]]:  # of a run that was killed
                discard(leftover) if leftover.is_dir() else leftover.unlink()
            store_config(self.out, self.config)
        self.board = None
        if self.config.tensorboard and self.main_process:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(self.out / "tensorboard"), purge_step=self.first_step)
        return version, queue

    def _restore(self, Rollout):
        state, device = self.state, next(self.model.parameters()).device
        require("processes" in state,
                f"the checkpoint in {self.out} was saved by an older version of this file, which alone can continue it")
        require(len(state["processes"]) == parallel.size(),
                f"the run in {self.out} was saved by {len(state['processes'])} processes and continues with as many, "
                f"not with {parallel.size()}: see torchrun's --nproc-per-node")
        mine = state["processes"][parallel.rank()]
        parallel.load_optimizer_state(self.optimizer, state.pop("optimizer"))
        self.optimizer.param_groups[0]["lr"] = self.config.learning_rate  # a flag given with --resume counts
        if (weights := state.pop("sampler")) and self.copied:  # else it was the policy itself
            self.sampler.load_state_dict(weights, strict=not lora.has_adapters(self.sampler))
        restore_random(mine["random"], *self.generators)
        self.first_step = state["step"] + 1
        return state["version"], deque(Rollout(**parallel.move(batch, device)) for batch in mine["queue"])

    def steps(self):
        """The steps that are left, with a progress bar. Meanwhile signals are collected and do not end the process."""
        from tqdm import tqdm

        steps = range(self.first_step, self.config.steps + 1)
        with interruptions() as self.arrived, tqdm(
                steps, initial=self.first_step - 1, total=self.config.steps, desc=self.config.algorithm,
                mininterval=redraw_seconds(), disable=not self.main_process) as self.progress:
            yield from self.progress

    def guard(self, step: int):
        """Turn what can go wrong during a step into RunStopped, which names the step and what is safe."""
        return stopping_in_order(step, self.out)

    def record(self, metrics: dict, samples=(), tokens=()) -> None:
        if not self.main_process:
            return
        append(self.out / "metrics.jsonl", metrics)
        append(self.out / "samples.jsonl", *({"step": metrics["step"], **sample} for sample in samples))
        if tokens:
            append(self.out / "tokens.jsonl", *({"step": metrics["step"], **line} for line in tokens))
        if self.board:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, metrics["step"])
            self.board.flush()

    def save(self, step: int, version: int, queue) -> None:
        mine = {"queue": [parallel.move(vars(batch), "cpu") for batch in queue],
                "random": random_state(*self.generators)}
        saved = {"version": version, "optimizer": parallel.optimizer_state(self.optimizer),
                 "processes": parallel.gather_objects(mine),
                 "sampler": (parallel.move(lora.own_state(self.sampler), "cpu")
                             if self.copied and self.main_process else None)}
        policy = parallel.ordinary_model(self.model, self.sampler)
        if self.main_process:
            save_checkpoint(self.out, step, policy, self.tokenizer, saved)
        parallel.barrier()

    def save_when_due(self, step: int, version: int, queue) -> None:
        # Signals are read here only, and from all processes, so that all stop after the same step.
        self.signals = [name for names in parallel.gather_objects(list(self.arrived)) for name in names]
        if step % self.config.save_every == 0 or step == self.config.steps or self.signals:
            self.save(step, version, queue)

    def report(self, step: int, metrics: dict) -> None:
        """The progress bar; and the end of the run, where a signal asked for it."""
        self.progress.set_postfix(reward=f"{metrics['reward']:.2f}", stale=metrics["staleness"],
                                  clip=f"{metrics['clip_fraction']:.3f}", refresh=False)
        if abs(metrics["loss"]) < 0.01 < metrics["grad_norm"] and not self.explained:
            self.explained = True
            self.progress.write(f"step {step}: loss ≈ 0 ({metrics['loss']:.4f}) and gradient norm > 0 "
                                f"({metrics['grad_norm']:.2f}) is normal: advantages sum to 0 in a group. "
                                "Watch reward and eval_accuracy instead.")
        if self.signals and step < self.config.steps:
            raise RunStopped(f"by {self.signals[0]} after step {step}; continue with --resume --out {self.out}")

    def finish(self, started: float) -> dict:
        """Write model/ and curves.png. Returns accuracy before and after, its interval, seconds; {} on other ranks."""
        with self.guard(self.config.steps):
            final = parallel.ordinary_model(self.model, self.sampler)
            if not self.main_process:
                return {}
            if lora.has_adapters(final):
                replace_folder(self.out / "adapter", lambda folder: lora.save(self.model, folder))
                final = lora.merged(final)
            replace_folder(self.out / "model",
                           lambda folder: (final.save_pretrained(folder), self.tokenizer.save_pretrained(folder)))
            history = read_metrics(self.out)
            plot_run(history, self.out, title=self.config.algorithm)
        evaluations = [line for line in history if "eval_accuracy" in line]
        first, last = evaluations[0], evaluations[-1]
        return {"before": first["eval_accuracy"], "after": last["eval_accuracy"], "low": last["eval_low"],
                "high": last["eval_high"], "seconds": time.perf_counter() - started}


def redraw_seconds() -> float:
    """How often a progress bar is redrawn: often on a terminal, rarely in a log file."""
    return 0.1 if sys.stderr.isatty() else 10


def write_text(path, text: str) -> None:
    """Write a file whole or not at all: into a temporary neighbour, flushed to disk, then renamed over the target."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"unfinished-{path.name}-{os.getpid()}")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def clear_run(out: pathlib.Path) -> None:
    """Remove what an earlier run has left in the run directory."""
    for folder in ("checkpoint", "model", "adapter", "tensorboard"):
        discard(out / folder)
    for name in ("curves.png", "report.html", *LOGS):
        (out / name).unlink(missing_ok=True)


def lock_run_directory(out: pathlib.Path):
    """Lock the run directory, since a second run in it would ruin the first. The lock ends with the process."""
    out.mkdir(parents=True, exist_ok=True)
    file = open(out / ".lock", "w")  # noqa: SIM115 (open as long as the process lives)
    with contextlib.suppress(ImportError):  # Windows has no fcntl
        import fcntl
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is writing to {out}; choose another --out, or wait for it") from None
    return file


NOT_OF_A_RUN = ("resume", "overwrite", "config", "exercise", "answer", "report")


def store_config(out: pathlib.Path, config) -> None:
    """config.json: every flag that shapes the run, as --config and --resume read them."""
    settings = {k: v for k, v in vars(config).items() if k not in NOT_OF_A_RUN}
    write_text(out / "config.json", json.dumps(settings, indent=1))


def append(path: pathlib.Path, *lines: dict) -> None:
    """Add the lines in one write that reaches the operating system before this returns."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_metrics(out: pathlib.Path) -> list:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def truncate_logs(out: pathlib.Path, *, last_step: int) -> None:
    """Drop the lines after the checkpoint, whose steps will run again, and a last line that a crash cut short."""
    for path in (out / name for name in LOGS if (out / name).exists()):
        kept = []
        for line in path.read_text(encoding="utf-8").split("\n"):
            with contextlib.suppress(ValueError):
                if json.loads(line)["step"] <= last_step:
                    kept.append(line + "\n")
        write_text(path, "".join(kept))


def flush_to_disk(path: pathlib.Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk itself."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(target: pathlib.Path, fill) -> None:
    """Let `fill` write into a neighbour, flush it to the disk, then rename it to `target`: whole or not at all."""
    scratch = target.with_name(f"unfinished-{target.name}-{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        fill(scratch)
        for path in [*scratch.rglob("*"), scratch]:
            flush_to_disk(path)
        discard(target)
        os.rename(scratch, target)
        flush_to_disk(target.parent)
    except Exception as error:  # a full disk: OSError, RuntimeError or SafetensorError, depending on who writes
        raise OSError(f"cannot write {target} ({one_line(error)})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def discard(folder: pathlib.Path) -> None:
    """Remove a folder. It is renamed first, so that a half-removed one is never taken for a whole one."""
    if folder.exists():
        nameless = folder.with_name(f"unfinished-old-{folder.name}-{os.getpid()}")
        os.rename(folder, nameless)
        shutil.rmtree(nameless, ignore_errors=True)


def save_checkpoint(out: pathlib.Path, step: int, model, tokenizer, state: dict) -> None:
    """Write out/checkpoint/step-N: a model for from_pretrained plus trainer.pt; then remove the older checkpoints."""
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise FloatingPointError("the weights are not finite, so they are not saved")
    for name in LOGS:  # their lines must reach the disk before the checkpoint does
        if (out / name).exists():
            flush_to_disk(out / name)
    target = out / "checkpoint" / f"step-{step:06d}"

    def fill(scratch):
        lora.save(model, scratch)
        tokenizer.save_pretrained(scratch)
        torch.save({"step": step, **state}, scratch / "trainer.pt")

    replace_folder(target, fill)
    for old in checkpoints(out)[:-1]:
        discard(old)


def checkpoints(out: pathlib.Path) -> list:
    """The folders of the complete checkpoints, oldest first; an incomplete one still has another name."""
    return sorted((out / "checkpoint").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))


def load_checkpoint(out: pathlib.Path) -> dict | None:
    """The trainer's state in the newest checkpoint, with its folder; None when the run had not saved one yet."""
    if not (found := checkpoints(out)):
        return None
    try:  # mmap: each of several processes reads only the part that it needs
        state = torch.load(found[-1] / "trainer.pt", weights_only=True, map_location="cpu", mmap=parallel.size() > 1)
        return {**state, "folder": str(found[-1])}
    except Exception as error:  # noqa: BLE001 (unpickling may raise anything)
        raise UserError(f"--resume: {found[-1]} is damaged ({one_line(error)})")


@contextlib.contextmanager
def stopping_in_order(step: int, out: pathlib.Path):
    """Turn what can go wrong during a step into RunStopped, which names the step and what is safe."""
    try:
        yield
    except (FloatingPointError, UserError, OSError) as error:
        if step == 0 and isinstance(error, UserError):
            raise  # nothing has been trained yet: a reward that fails at once is a mistake in the command
        found = checkpoints(out)
        safe = f"the last good checkpoint is {found[-1]}" if found else "no checkpoint had been saved yet"
        raise RunStopped(f"step {step}: {one_line(error)}; {safe}") from error


def random_state(*generators) -> dict:
    """Every generator's state: our own, and the global ones that a user's reward may draw from."""
    kind, keys, *rest = np.random.get_state()
    return {"generators": [g.get_state() for g in generators],
            "torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, keys.tolist(), *rest),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random(state: dict, *generators) -> None:
    for generator, saved in zip(generators, state["generators"], strict=True):
        generator.set_state(saved)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def interruptions():
    """Collect the names of signals that ask for an end in a list, so that the current step can finish and be saved.

    A second SIGINT or SIGTERM ends the process at once, as usual; a signal that was ignored (nohup) stays ignored.
    """
    arrived, previous = [], {}

    def note(number, _frame):
        arrived.append(signal.Signals(number).name)
        if arrived[-1] != "SIGHUP":  # a closing terminal may send that one twice
            signal.signal(number, previous[number])
        with contextlib.suppress(OSError):  # the terminal may be gone; not print, which may not interrupt a print
            os.write(2, f"\n{arrived[-1]}: finishing this step and saving it; once more to stop at once\n".encode())

    if threading.current_thread() is threading.main_thread():
        handled = (getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
        previous = {n: signal.signal(n, note) for n in handled if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
