"""The stale world against plain python: 64 responses by hand, a simulated sampler, parameters kept apart."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stale_world as world

RESPONSES = list(itertools.product(range(4), repeat=3))


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(measured, expected, tolerance=1e-12):
    torch.testing.assert_close(torch.as_tensor(measured, dtype=torch.float64),
                               torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def cells(a, b, c):
    """(next token, prefix): the empty prefix is 0, then four of one token, then sixteen of two."""
    return (a, 0), (b, 1 + a), (c, 5 + 4 * a + b)


# ---------------------------------------------------------------- staleness, paper section 6


@pytest.mark.parametrize("every, late, expected", [
    (1, 0, [0] * 8), (4, 0, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]), (1, 3, [0, 1, 2, 3, 3, 3]), (1, 1, [0, 1, 1, 1, 1]),
    (2, 1, [0, 1, 2, 1, 2, 1, 2]), (4, 2, [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]), (2, 3, [0, 1, 2, 3, 4, 3, 4, 3, 4, 3]),
    (20, 0, [*range(20), *range(20)]), (None, 0, list(range(30))), (None, 7, list(range(30)))])
def test_listed_schedules(every, late, expected):
    knobs = {"sync_interval": every, "sync_offset": late}
    assert [world.staleness(n, **knobs) for n in range(1, len(expected) + 1)] == expected
    assert [world.rollout_version(n, **knobs) + s for n, s in enumerate(expected, 1)] == list(range(len(expected)))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 12))
def test_schedule_is_that_of_a_queue(every, late):
    """Events in order: the sampler fills a first-in first-out queue `late` batches ahead with the weights that the
    learner published last, which it does after every I-th update."""
    published, queue, versions = 0, [], []
    for step in range(1, 60):
        while len(versions) + len(queue) < step + late:
            queue.append(published)
        versions.append(queue.pop(0))
        if step % every == 0:
            published = step
    assert versions == [world.rollout_version(n, sync_interval=every, sync_offset=late) for n in range(1, 60)]


def test_settings_in_words():
    mean = {name: sum(world.staleness(n, sync_interval=i, sync_offset=m) for n in range(1, 101)) / 100
            for name, (i, m) in world.SETTINGS.items()}
    assert mean == {"fresh data": 0, "refreshed every 20 steps": 9.5, "10 batches late": 9.45, "never refreshed": 49.5}


# ---------------------------------------------------------------- all 64 responses


def test_response_and_token_logprobs_multiply_along_the_tree():
    logits = random(2, 3, 4, 21)
    probs = torch.softmax(logits, -2)
    for number, response in enumerate(RESPONSES):
        tokens = torch.stack([probs[..., token, prefix] for token, prefix in cells(*response)], -1)
        close(world.response_logprobs(logits)[..., number], tokens.log().sum(-1))
        close(world.token_logprobs(logits, torch.full((2, 3, 1), number))[..., 0, :], tokens.log())
    close(world.response_logprobs(logits).exp().sum(-1), torch.ones(2, 3))


def test_cells_of_the_worked_example():
    """(2, 0, 3) is response 2·16 + 3 = 35; 21·2 + 0, 21·0 + 1 + 2, 21·3 + 5 + 8."""
    assert RESPONSES[35] == (2, 0, 3) and world.response_cells()[35].tolist() == [42, 3, 76]


def test_worlds_hold_a_quarter_of_right_answers():
    logits, rewards = world.random_worlds(3, generator=torch.Generator().manual_seed(1))
    assert logits.shape == (3, 4, 4, 21) and logits.dtype == torch.float64
    assert (rewards.sum(-1) == 16).all() and ((rewards == 0) | (rewards == 1)).all()
    assert not torch.equal(rewards[0, 0], rewards[0, 1]) and not torch.equal(rewards[0, 0], rewards[1, 0])


def test_exact_values_are_plain_sums():
    new, old, rewards = random(5, 2, 4, 4, 21, seed=1), random(2, 4, 4, 21, seed=2), random(2, 4, 64, seed=3)
    p, q = (world.response_logprobs(table).exp() for table in (new, old))
    close(world.expected_reward(new, rewards), (p * rewards).sum(-1).mean(-1))
    close(world.kl_to(new, old), (p * (p / q).log()).sum(-1).mean(-1))
    close(world.effective_sample_size(new, old), (1 / (p**2 / q).sum(-1)).mean(-1))
    close(world.effective_sample_size(old, old), torch.ones(2))


def test_samples_follow_the_policy():
    logits = random(1, 1, 4, 21, seed=3)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([world.sample_responses(logits, generator=generator).flatten() for _ in range(4000)])
    expected = len(drawn) * world.response_logprobs(logits).exp()[0, 0]
    counts = torch.bincount(drawn, minlength=64)
    assert ((counts - expected) ** 2 / expected).sum() < 120  # χ², 63 degrees: mean 63, sd 11


def test_equal_policies_draw_equal_responses_and_seeds_their_own():
    logits = random(1, 4, 4, 21).expand(2, 4, 4, 21)
    first, second = (world.sample_responses(logits, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert first.shape == (2, 4, 8) and torch.equal(first, second) and not torch.equal(first[0], first[1])


@pytest.mark.parametrize("uniform, expected", [(0.0, 16), (0.5 - 1e-12, 16), (0.5 + 1e-12, 63), (1 - 1e-16, 63)])
def test_impossible_responses_are_never_drawn(monkeypatch, uniform, expected):
    """½ on (1, 0, 0), response 16, and ½ on (3, 3, 3), the last: also at the edges of the unit interval."""
    logits = torch.full((1, 1, 4, 21), -1e9, dtype=torch.float64)
    for response in ((1, 0, 0), (3, 3, 3)):
        for token, prefix in cells(*response):
            logits[..., token, prefix] = 0.0
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, uniform, dtype=torch.float64))
    assert (world.sample_responses(logits, generator=None) == expected).all()


# ---------------------------------------------------------------- a step


@pytest.mark.parametrize("sharing", [0.0, 0.7, 1.0])
def test_descend_is_descent_on_own_and_shared_parameters(sharing):
    """logits_x = √(1−s)·own_x + √s·shared, the loss of each prompt (1/K) Σ_i Σ_t weight·log π, two seeds apart."""
    logits, weights = random(2, 4, 4, 21), random(2, 4, 8, 3, seed=5)
    responses = torch.arange(64).view(2, 4, 8)
    leaf = logits.clone().requires_grad_()
    loss = (weights * world.token_logprobs(leaf, responses)).mean()
    after = world.descend(leaf, loss, step_size=0.3, sharing=sharing)
    assert not after.requires_grad
    for seed in range(2):
        own, shared = torch.zeros(4, 4, 21).double().requires_grad_(), torch.zeros(4, 21).double().requires_grad_()

        def table(own, shared, seed=seed):
            return logits[seed] + (1 - sharing) ** 0.5 * own + sharing**0.5 * shared

        loss = (weights[seed] * world.token_logprobs(table(own, shared), responses[seed])).sum() / 8
        slopes = torch.autograd.grad(loss, (own, shared))
        close(after[seed], table(*(leaf.detach() - 0.3 * slope for leaf, slope in zip((own, shared), slopes))))


# ---------------------------------------------------------------- intervals and verdicts


def test_intervals():
    values = random(3, 40, seed=9)
    mean, low, high = world.interval(values)
    close(mean, values.mean(-1))
    width = 2 * 1.96 * values.std(-1, correction=0) / math.sqrt(40)
    close((high - low) / width, torch.ones(3), 0.15)
    close((low + high) / 2, mean, 0.05)
    assert all((part == 0.5).all() for part in world.interval(torch.full((2, 8), 0.5)))


@pytest.mark.parametrize("low, high, rule, expected", [
    (0.01, 0.2, {}, "holds"), (-0.2, -0.01, {}, "does not hold"), (-0.1, 0.1, {}, "not resolved"),
    (0.06, 0.2, {"least": 0.05}, "holds"), (0.01, 0.2, {"least": 0.05}, "not resolved"),
    (0.0, 0.04, {"least": 0.05}, "does not hold"), (-0.04, 0.04, {"margin": 0.05}, "holds"),
    (0.01, 0.06, {"margin": 0.05}, "not resolved"), (0.06, 0.1, {"margin": 0.05}, "does not hold"),
    (-0.1, -0.06, {"margin": 0.05}, "does not hold"), (-0.1, 0.1, {"margin": 0.05}, "not resolved")])
def test_verdicts(low, high, rule, expected):
    assert world.verdict(low, high, **rule) == expected
