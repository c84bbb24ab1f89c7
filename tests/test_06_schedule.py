"""Lesson 06, the staleness dial: who sampled which batch. An event simulation, listed sequences, and the real loop.

The loop is observed from outside: which weights the sampler really held when it sampled, not the number it wrote down.
"""

import importlib
from collections import deque

import pytest
import torch
from hypothesis import given, settings, strategies as st
from under_the_hood.models import load_model
from under_the_hood.runs import read_metrics
from under_the_hood.tasks import batch_examples, load_task
import itertools

lm = importlib.import_module("06_full_llm_training")


def simulated_versions(steps, interval, offset):
    """Versions of batches 1 … steps from events: a sampler that keeps offset batches in a queue ahead of the trainer.

    interval None: never refreshed. Before training step n the sampler gets fresh weights when a multiple of `interval`
    updates has been done; then it fills the queue up to `offset` batches more than the one that the trainer takes next.
    """
    updates_done, sampler_version, queue, used = 0, 0, deque(), []
    while len(used) < steps:
        if interval is not None and updates_done % interval == 0:
            sampler_version = updates_done
        while len(queue) < offset + 1:
            queue.append(sampler_version)
        used.append(queue.popleft())
        updates_done += 1
    return used


# C63: staleness of batches 1 … 10, worked by hand from v = s·⌊max(0, n−1−o)/s⌋.
LISTED = {
    (1, 0): [0] * 10,
    (1, 1): [0] + [1] * 9,
    (4, 0): [0, 1, 2, 3, 0, 1, 2, 3, 0, 1],
    (4, 2): [0, 1, 2, 3, 4, 5, 2, 3, 4, 5],
    (2, 3): [0, 1, 2, 3, 4, 3, 4, 3, 4, 3],
    (1, 3): [0, 1, 2, 3, 3, 3, 3, 3, 3, 3],
    (2, 1): [0, 1, 2, 1, 2, 1, 2, 1, 2, 1],
}


@pytest.mark.parametrize("setting", LISTED)
def test_c63_listed_staleness(setting):
    interval, offset = setting
    assert [lm.staleness(n, sync_interval=interval, sync_offset=offset) for n in range(1, 11)] == LISTED[setting]


def test_interval_20_cycles_through_0_to_19():
    ages = [lm.staleness(n, sync_interval=20, sync_offset=0) for n in range(1, 121)]
    assert ages == list(range(20)) * 6
    assert sum(ages) / len(ages) == 9.5


def test_offline_grows_forever():
    assert [lm.rollout_version(n, sync_interval=None, sync_offset=3) for n in (1, 5, 1000)] == [0, 0, 0]
    assert [lm.staleness(n, sync_interval=None, sync_offset=0) for n in (1, 5, 1000)] == [0, 4, 999]


@settings(max_examples=60, deadline=None)
@given(interval=st.integers(1, 9), offset=st.integers(0, 9), steps=st.integers(1, 60))
def test_schedule_is_the_simulated_queue(interval, offset, steps):
    versions = [lm.rollout_version(n, sync_interval=interval, sync_offset=offset) for n in range(1, steps + 1)]
    assert versions == simulated_versions(steps, interval, offset)
    ages = [lm.staleness(n, sync_interval=interval, sync_offset=offset) for n in range(1, steps + 1)]
    assert ages == [n - 1 - v for n, v in enumerate(versions, start=1)]
    assert all(offset <= age < offset + interval for age in ages[offset + interval:])  # the steady range


# ------------------------------------------------------------------------------------------------------ the real loop


def flat_weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def observe(monkeypatch, flags, out, *extra):
    """Run the training loop. Per training batch: the sampler's weights when it sampled it, its questions, and the step
    it was used in; and the policy's weights after 0, 1, … updates. Sampling for evaluation, which has no row, does not
    count.
    """
    collect, train_step = lm.collect, lm.train_step
    sampled, used, weights = [], [], []

    def watched_collect(model, tokenizer, examples, *args, **kwargs):
        batch = collect(model, tokenizer, examples, *args, **kwargs)
        if kwargs.get("algorithm"):
            sampled.append({"batch": batch, "weights": flat_weights(model),
                            "questions": [e.question for e in examples]})
        return batch

    def watched_step(model, optimizer, batch, *args, **kwargs):
        if not weights:
            weights.append(flat_weights(model))
        used.append(batch)
        metrics = train_step(model, optimizer, batch, *args, **kwargs)
        weights.append(flat_weights(model))
        return metrics

    monkeypatch.setattr(lm, "collect", watched_collect)
    monkeypatch.setattr(lm, "train_step", watched_step)
    lm.main([*flags, "--out", str(out), "--eval-every", "1000", "--save-every", "1000", *extra])
    return sampled, used, weights


SETTINGS = [(1, 0, False), (4, 2, False), (2, 3, False), (3, 1, True)]


@pytest.mark.parametrize("interval, offset, offline", SETTINGS)
def test_training_loop_realises_the_schedule(monkeypatch, tmp_path, tiny_run, quick, interval, offset, offline):
    steps = 9
    sampled, used, weights = observe(
        monkeypatch, tiny_run[2], tmp_path / "run", "--steps", str(steps), "--sync-interval", str(interval),
        "--sync-offset", str(offset), *(["--offline"] if offline else []))
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    assert all(moved) and len(used) == steps  # else every version would look alike
    expected = simulated_versions(steps, None if offline else interval, offset)
    task = load_task(lm.Config(task=str(tiny_run[1]), eval_questions=2))
    for n, (batch, version) in enumerate(zip(used, expected), start=1):
        record = sampled[n - 1]
        assert record["batch"] is batch  # first in, first out
        assert batch.version == version
        assert torch.equal(record["weights"], weights[version]), f"batch {n} was not sampled with version {version}"
        assert record["questions"] == [e.question for e in batch_examples(task.train, n, count=4, seed=0)]
    lines = [line for line in read_metrics(tmp_path / "run") if line["step"] > 0]
    assert [line["staleness"] for line in lines] == [n - 1 - v for n, v in enumerate(expected, start=1)]


def test_c59_old_logprobs_are_the_behaviour_policys_own(monkeypatch, tmp_path, tiny_run, quick):
    """Recorded while sampling, they are the log-probabilities under the weights that sampled, not the current ones."""
    sampled, _used, _weights = observe(monkeypatch, tiny_run[2], tmp_path / "run", "--steps", "6", "--sync-interval", "3")
    model, _ = load_model(str(tiny_run[0]), device="cpu")
    for record in sampled:
        batch = record["batch"]
        torch.nn.utils.vector_to_parameters(record["weights"], model.parameters())
        logprobs, _ = lm.token_logprobs(model, batch.prompt, batch.tokens, prompt_mask=batch.prompt_mask,
                                        mask=batch.mask)
        assert (logprobs - batch.old_logprobs).abs().max() < 1e-5
    lines = [line for line in read_metrics(tmp_path / "run") if line["step"] > 0]
    for line in lines:  # staleness 0 ⇔ the policy is the sampler
        off = max(abs(line["ratio_max"] - 1), abs(line["ratio_p05"] - 1))
        assert (off < 1e-4) == (line["staleness"] == 0), line
    behaviour = [record["weights"] for record in sampled]
    assert all(torch.equal(behaviour[0], w) for w in behaviour[:3]) and not torch.equal(behaviour[2], behaviour[3])
