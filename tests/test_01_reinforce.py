"""Lesson 01 against references that share no code path with it: finite differences, plain Python loops, literals."""

import importlib
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

lesson = importlib.import_module("01_reinforce")

FEW = settings(max_examples=15, deadline=None, derandomize=True)
LOGIT = st.floats(-2, 2)


def simplex(size):
    """Strategy: float64 probabilities that are not extreme."""
    return st.lists(LOGIT, min_size=size, max_size=size).map(
        lambda logits: torch.softmax(torch.tensor(logits, dtype=torch.float64), -1))


def numbers(size):
    return st.lists(st.floats(-3, 3), min_size=size, max_size=size).map(lambda v: torch.tensor(v, dtype=torch.float64))


def finite_differences(function, logits, step=1e-5):
    """Central differences of a scalar function of an array, in numpy."""
    logits = np.asarray(logits, dtype=float)
    gradient = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        shift = np.zeros_like(logits)
        shift[index] = step
        gradient[index] = (function(logits + shift) - function(logits - shift)) / (2 * step)
    return gradient


def log_softmax(row):
    return [value - math.log(sum(math.exp(other) for other in row)) for value in row]


def responses_by_truncation(vocabulary, max_length, end):
    """All strings of full length, each cut after its first `end`, without repeats."""
    full = itertools.product(range(vocabulary), repeat=max_length)
    return {word[: word.index(end) + 1] if end in word else word for word in full}


def as_words(tokens, mask):
    return [tuple(row[keep].tolist()) for row, keep in zip(tokens, mask)]


# ---------------------------------------------------------------- the enumerated policy


@pytest.mark.parametrize("vocabulary, max_length, end",
                         [(3, 3, 0), (3, 3, 2), (2, 2, None), (4, 2, 1), (3, 1, None), (2, 5, 1)])
def test_enumeration_is_complete_and_numbers_prefixes(vocabulary, max_length, end):
    tokens, states, mask = lesson.enumerate_responses(vocabulary=vocabulary, max_length=max_length, end=end)
    words = as_words(tokens, mask)
    assert len(set(words)) == len(words)
    assert set(words) == responses_by_truncation(vocabulary, max_length, end)
    assert (tokens[~mask] == 0).all() and (states[~mask] == 0).all()
    row_of = {}
    for word, row in zip(words, states.tolist()):
        for t in range(len(word)):
            assert row_of.setdefault(word[:t], row[t]) == row[t]
    assert sorted(row_of.values()) == list(range(len(row_of)))  # one row per prefix, none left out
    assert [len(prefix) for prefix in sorted(row_of, key=row_of.get)] == sorted(len(prefix) for prefix in row_of)


def test_counting_task_has_15_responses_and_the_stated_rewards():
    tokens, states, mask, rewards = lesson.counting_task()
    assert tokens.shape == (15, 3) and int(states.max()) + 1 == 7
    reward_of = dict(zip(as_words(tokens, mask), rewards.tolist()))
    assert reward_of.pop((1, 2, 0)) == 1.0
    assert reward_of.pop((1, 2, 1)) == reward_of.pop((1, 2, 2)) == 0.5
    assert set(reward_of.values()) == {0.0}


@pytest.mark.parametrize("vocabulary, max_length", [(1, 3), (3, 0)])
def test_enumeration_refuses_an_empty_space(vocabulary, max_length):
    with pytest.raises(ValueError, match="vocabulary"):
        lesson.enumerate_responses(vocabulary=vocabulary, max_length=max_length)


@pytest.mark.parametrize("end", [-1, 3, "stop"])
def test_enumeration_refuses_an_end_that_is_no_token(end):
    with pytest.raises(ValueError, match="end must be a token"):
        lesson.enumerate_responses(vocabulary=3, max_length=2, end=end)


@FEW
@given(st.sampled_from([None, 0, 1]), st.integers(1, 3), st.integers(0, 2**31))
def test_logprobs_and_scores(end, max_length, seed):
    tokens, states, mask = lesson.enumerate_responses(vocabulary=3, max_length=max_length, end=end)
    logits = torch.randn(int(states.max()) + 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logprobs = lesson.table_logprobs(logits, tokens, states, mask)
    for i in range(len(tokens)):
        for t in range(max_length):
            expected = log_softmax(logits[states[i, t]].tolist())[tokens[i, t]] if mask[i, t] else 0.0
            assert logprobs[i, t].item() == pytest.approx(expected, abs=1e-12)
    assert logprobs.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    jacobian = torch.autograd.functional.jacobian(lambda x: lesson.table_logprobs(x, tokens, states, mask), logits)
    torch.testing.assert_close(lesson.table_scores(logits, tokens, states, mask), jacobian, atol=1e-12, rtol=0)


# ---------------------------------------------------------------- (1.1), (1.2): on-policy


def expected_reward(logits, words, rewards, row_of):
    """J by plain Python: the sum over responses of the product of token probabilities times the reward."""
    total = 0.0
    for word, reward in zip(words, rewards):
        total += reward * math.exp(sum(log_softmax(logits[row_of[word[:t]]])[word[t]] for t in range(len(word))))
    return total


@settings(FEW, max_examples=5)
@given(st.integers(0, 2**31), st.floats(-5, 5))
def test_reinforce_is_unbiased_for_any_baseline(seed, baseline):
    tokens, states, mask, rewards = lesson.counting_task()
    words = as_words(tokens, mask)
    row_of = {word[:t]: int(states[i, t]) for i, word in enumerate(words) for t in range(len(word))}
    logits = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = finite_differences(lambda x: expected_reward(x, words, rewards.tolist(), row_of), logits)
    probs = lesson.table_logprobs(logits, tokens, states, mask).sum(-1).exp()
    weights = (rewards[:, None] - baseline).expand(tokens.shape)
    mean, _ = lesson.estimator_moments(probs, weights, lesson.table_scores(logits, tokens, states, mask))
    np.testing.assert_allclose(mean, expected, atol=1e-9)


def test_variance_is_the_trace_of_the_covariance():
    generator = torch.Generator().manual_seed(1)
    scores, weights, logits = (torch.randn(*shape, dtype=torch.float64, generator=generator)
                               for shape in [(5, 2, 3, 4), (5, 2), (5,)])
    probs = torch.softmax(logits, -1)
    samples = np.stack([sum(weights[i, t] * scores[i, t] for t in range(2)).numpy().ravel() for i in range(5)])
    covariance = np.cov(samples.T, aweights=probs.numpy(), ddof=0)
    mean, variance = lesson.estimator_moments(probs, weights, scores)
    np.testing.assert_allclose(mean.numpy().ravel(), np.average(samples, axis=0, weights=probs.numpy()), atol=1e-12)
    assert variance.item() == pytest.approx(np.trace(covariance), abs=1e-12)


@FEW
@given(simplex(4), numbers(4))
def test_bandit_gradient(probs, rewards):
    def objective(logits):
        weights = np.exp(logits)
        return float(weights @ rewards.numpy() / weights.sum())

    expected = finite_differences(objective, probs.log())
    np.testing.assert_allclose(lesson.bandit_gradient(probs, rewards), expected, atol=1e-9)


@FEW
@given(simplex(3), numbers(3))
def test_optimal_baseline_is_the_vertex_of_the_variance(probs, rewards):
    # A parabola's vertex from three of its points: b* = (V(−1) − V(1)) / (2 (V(−1) − 2V(0) + V(1))).
    # The mean does not depend on b, so the second moment E‖(r − b) s‖² has the same vertex.
    score = np.eye(3) - probs.numpy()
    left, middle, right = (probs.numpy() @ ((rewards.numpy() - b) ** 2 * (score**2).sum(-1)) for b in (-1.0, 0.0, 1.0))
    vertex = (left - right) / (2 * (left - 2 * middle + right))
    best = lesson.optimal_baseline(probs, rewards, lesson.bandit_scores(probs))
    assert best.item() == pytest.approx(vertex, abs=1e-8)
    assert lesson.bandit_optimal_baseline(probs, rewards).item() == pytest.approx(vertex, abs=1e-8)
    variances = lesson.variance_against_baseline(probs, rewards, [best - 0.3, best, best + 0.3])
    assert variances[1] < variances[0] and variances[1] < variances[2]
    assert variances[0].item() == pytest.approx(variances[2].item(), abs=1e-10)


def test_optimal_baseline_counts_the_score_of_the_whole_response():
    # Two tokens of response 0 have scores +1 and +1 (‖sum‖² = 4), of response 1 have +1 and −1 (‖sum‖² = 0).
    scores = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[..., None, None]
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert lesson.optimal_baseline(half, torch.tensor([3.0, 7.0], dtype=torch.float64), scores).item() == 3.0


# ---------------------------------------------------------------- (1.3): off-policy


@FEW
@given(simplex(3), simplex(3), numbers(3), st.floats(-2, 2))
def test_off_policy_update_climbs_weighted_imitation(probs, behaviour, rewards, baseline):
    def imitation(logits):
        values = log_softmax(list(logits))
        return float(sum(b * (r - baseline) * value for b, r, value in zip(behaviour.numpy(), rewards.numpy(), values)))

    expected = finite_differences(imitation, probs.log())
    update = lesson.off_policy_bandit_update(probs, behaviour, rewards, baseline=baseline)
    np.testing.assert_allclose(update, expected, atol=1e-8)
    on_policy = lesson.off_policy_bandit_update(probs, probs, rewards, baseline=baseline)
    torch.testing.assert_close(on_policy, lesson.bandit_gradient(probs, rewards), atol=1e-12, rtol=0)


# ---------------------------------------------------------------- (1.4), (1.5): importance sampling


def test_second_moment_is_a_power_of_five_thirds():
    # π uniform, π_b = (3, 6, 1)/10: Σ π²/π_b = (10/3 + 10/6 + 10/1)/9 = 5/3, in exact fractions.
    behaviour = [Fraction(3, 10), Fraction(6, 10), Fraction(1, 10)]
    for length in (1, 2, 3):
        exact = sum(math.prod(Fraction(1, 9) / behaviour[token] for token in word)
                    for word in itertools.product(range(3), repeat=length))
        assert exact == Fraction(5, 3) ** length
        measured = lesson.ratio_second_moment(lesson.UNIFORM, lesson.BEHAVIOUR, length)
        assert measured.item() == pytest.approx(float(exact), rel=1e-12)


@FEW
@given(simplex(3), simplex(3), st.integers(1, 4))
def test_second_moment_by_brute_force(probs, behaviour, length):
    expected = sum(math.prod(probs[token].item() ** 2 / behaviour[token].item() for token in word)
                   for word in itertools.product(range(3), repeat=length))
    assert lesson.ratio_second_moment(probs, behaviour, length).item() == pytest.approx(expected, rel=1e-9)


def test_three_estimators_on_two_binary_tokens():
    # Rows: first token; second token after 0; after 1. Log-odds of token 1 under π: .5, −.3, .8; under π_b all 0.
    # Reward 1 for (1, 1) alone, A = r − .25. The gradients below were worked out elsewhere.
    tokens, states, mask = lesson.enumerate_responses(vocabulary=2, max_length=2)
    logits = torch.tensor([[0.0, 0.5], [0.0, -0.3], [0.0, 0.8]], dtype=torch.float64)
    logprobs = lesson.table_logprobs(logits, tokens, states, mask)
    old = lesson.table_logprobs(torch.zeros(3, 2, dtype=torch.float64), tokens, states, mask)
    scores = lesson.table_scores(logits, tokens, states, mask)
    advantages = (tokens.prod(-1) - 0.25).double()[:, None].expand(4, 2)
    ratio = (logprobs - old).exp()
    known = {
        "none": (torch.ones_like(ratio), [0.125, -0.0093053, 0.1012532]),
        "token": (ratio, [0.1175019, 0.0, 0.1069549]),
        "trajectory": (ratio.prod(-1, keepdim=True).expand(4, 2), [0.1621466, 0.0, 0.1331501]),
    }
    for weight, expected in known.values():
        mean, _ = lesson.estimator_moments(old.sum(-1).exp(), advantages * weight, scores)
        np.testing.assert_allclose(mean[:, 1], expected, atol=6e-8)
        np.testing.assert_allclose(mean[:, 0], -mean[:, 1], atol=1e-15)
    on_policy, _ = lesson.estimator_moments(logprobs.sum(-1).exp(), advantages, scores)
    np.testing.assert_allclose(on_policy[:, 1], known["trajectory"][1], atol=6e-8)


def test_token_level_bias_comes_from_prefixes_and_continuations_of_the_behaviour():
    # Independent algebra: the mean is Σ_prefix P_b(prefix) Σ_a π(a|prefix) Q_b(prefix, a) (e_a − π(·|prefix)).
    distance, seed = 0.7, 5
    measured = lesson.token_level_bias([distance], generator=torch.Generator().manual_seed(seed))[0].item()
    behaviour, direction = torch.randn(2, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    current = behaviour + distance * direction / direction.square().sum().sqrt()
    tokens, states, mask, rewards = lesson.counting_task()
    words = as_words(tokens, mask)
    reward_of = dict(zip(words, rewards.tolist()))
    row_of = {word[:t]: int(states[i, t]) for i, word in enumerate(words) for t in range(len(word))}

    def walk(table, prefix):  # expected reward from here on
        if prefix in reward_of:
            return reward_of[prefix]
        probs = torch.softmax(table[row_of[prefix]], -1).tolist()
        return sum(probs[a] * walk(table, prefix + (a,)) for a in range(3))

    def gradient(visits, values):
        total, visit_probs = np.zeros((7, 3)), torch.softmax(visits, -1).numpy()
        for prefix, row in row_of.items():
            reach = math.prod(visit_probs[row_of[prefix[:t]], prefix[t]] for t in range(len(prefix)))
            pi = torch.softmax(current[row], -1).numpy()
            for a in range(3):
                total[row] += reach * pi[a] * walk(values, prefix + (a,)) * (np.eye(3)[a] - pi)
        return total

    exact, token_level = gradient(current, current), gradient(behaviour, behaviour)
    assert measured == pytest.approx(np.linalg.norm(token_level - exact) / np.linalg.norm(exact), abs=1e-10)
    assert measured > 0.01


def test_error_against_length_by_loops():
    # T = 2 and 5 responses, everything in plain numpy over the nine words.
    probs, behaviour, quality = np.full(3, 1 / 3), np.array([0.3, 0.6, 0.1]), np.array([0.2, 0.6, 1.0])
    words = list(itertools.product(range(3), repeat=2))
    sampling = np.array([behaviour[a] * behaviour[b] for a, b in words])
    reward = np.array([quality[a] * quality[b] for a, b in words])
    advantage = reward - sampling @ reward
    score = np.eye(3) - probs
    exact = sum(probs[a] * probs[b] * quality[a] * quality[b] * (score[a] + score[b]) for a, b in words)
    ratio = probs / behaviour
    estimates = [
        np.array([advantage[i] * (score[a] + score[b]) for i, (a, b) in enumerate(words)]),
        np.array([advantage[i] * (ratio[a] * score[a] + ratio[b] * score[b]) for i, (a, b) in enumerate(words)]),
        np.array([advantage[i] * ratio[a] * ratio[b] * (score[a] + score[b]) for i, (a, b) in enumerate(words)]),
    ]
    bias, error = lesson.error_against_length([2], probs=lesson.UNIFORM, behaviour_probs=lesson.BEHAVIOUR, responses=5)
    for column, estimate in enumerate(estimates):
        mean = sampling @ estimate
        variance = sampling @ ((estimate - mean) ** 2).sum(-1)
        norm = np.linalg.norm(exact)
        assert bias[0, column].item() == pytest.approx(np.linalg.norm(mean - exact) / norm, abs=1e-12)
        expected = math.sqrt(np.linalg.norm(mean - exact) ** 2 + variance / 5) / norm
        assert error[0, column].item() == pytest.approx(expected, abs=1e-12)


# ---------------------------------------------------------------- (1.6): loss and ratio


@pytest.mark.parametrize("advantage, ratio, loss",
                         [(-1.0, 10, 10), (-1.0, 0.5, 0.8), (1.0, 10, -1.2), (1.0, 0.5, -0.5), (-2.0, 1.1, 2.2)])
def test_ppo_clip_loss_values(advantage, ratio, loss):
    logprobs, advantages = torch.tensor([math.log(ratio)]), torch.tensor([advantage])
    measured = lesson.ppo_clip_loss(logprobs, torch.zeros(1), advantages, eps=0.2)
    assert measured.item() == pytest.approx(loss, rel=1e-6)


@FEW
@given(st.floats(0.3, 2.0), st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3), st.floats(0.05, 0.5))
def test_ppo_clip_gradient_is_minus_a_rho_unless_it_moves_further_out(ratio, advantage, eps):
    if min(abs(ratio - 1 - eps), abs(ratio - 1 + eps)) < 1e-6:
        return  # on the kink itself there is no gradient to compare with
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss = lesson.ppo_clip_loss(logprobs, torch.zeros_like(advantages), advantages, eps=eps)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    outside = ratio > 1 + eps if advantage > 0 else ratio < 1 - eps
    assert gradient.item() == pytest.approx(0.0 if outside else -advantage * ratio, abs=1e-12)


def test_loss_is_a_mean_over_the_last_dimension():
    logprobs = torch.zeros(3, 4, dtype=torch.float64)
    loss = lesson.ppo_clip_loss(logprobs, logprobs, torch.arange(12.0, dtype=torch.float64).view(3, 4), eps=0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.5, -5.5, -9.5], dtype=torch.float64))


def test_one_step_per_batch_is_plain_reinforce():
    """The same draws, updated by hand: logits += lr · mean A (e_a − π), no ratio and no clipping anywhere."""
    run = lesson.train_on_batches(steps_per_batch=1, eps=0.2, seeds=3, batches=6, batch_size=8, learning_rate=1.5,
                                  generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(2)
    logits, rewards = np.zeros((3, 3)), lesson.ARMS.numpy()
    expected_rewards = []
    for _ in range(6):
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        expected_rewards.append(probs @ rewards)
        actions = torch.multinomial(torch.from_numpy(probs), 8, replacement=True, generator=generator).numpy()
        for seed in range(3):
            advantage = rewards[actions[seed]] - rewards[actions[seed]].mean()
            steps = [a * (np.eye(3)[arm] - probs[seed]) for a, arm in zip(advantage, actions[seed])]
            logits[seed] += 1.5 * np.mean(steps, axis=0)
    np.testing.assert_allclose(run["logits"], logits, atol=1e-10)
    np.testing.assert_allclose(run["J"][:-1], expected_rewards, atol=1e-10)
    assert run["J"].shape == (7, 3) and run["loss"].shape == (6, 1, 3)
    assert run["ratio_deviation"].max() == 0 and run["clip_fraction"].max() == 0


def test_second_step_on_the_same_batch_moves_the_ratio_and_clips():
    """First batch of 1000 draws, followed by hand for two steps and inspected at the third."""
    size, eps, rate = 1000, 0.1, 2.0
    run = lesson.train_on_batches(steps_per_batch=3, eps=eps, seeds=1, batches=1, batch_size=size, learning_rate=rate,
                                  generator=torch.Generator().manual_seed(4))
    uniform = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    actions = torch.multinomial(uniform, size, replacement=True, generator=torch.Generator().manual_seed(4))[0].numpy()
    share = np.bincount(actions, minlength=3) / size
    rewards = lesson.ARMS.numpy()
    advantage = rewards - share @ rewards
    logits = np.zeros(3)
    for step in range(3):
        probs = np.exp(logits) / np.exp(logits).sum()
        ratio = 3 * probs
        clipped = ((advantage > 0) & (ratio > 1 + eps)) | ((advantage < 0) & (ratio < 1 - eps))
        bound = np.where(clipped, np.where(advantage > 0, 1 + eps, 1 - eps), ratio)
        assert run["clip_fraction"][0, step, 0].item() == pytest.approx(share @ clipped, abs=1e-12)
        assert run["ratio_deviation"][0, step, 0].item() == pytest.approx(abs(ratio - 1).max(), abs=1e-12)
        assert run["loss"][0, step, 0].item() == pytest.approx(-(share * advantage) @ bound, abs=1e-12)
        assert run["log_loss"][0, step, 0].item() == pytest.approx(-(share * advantage) @ np.log(probs), abs=1e-12)
        pull = share * advantage * np.where(clipped, 0.0, ratio)
        logits = logits + rate * (pull - probs * pull.sum())
    assert run["clip_fraction"][0, 0, 0] == 0 < run["clip_fraction"][0, 2, 0]
    np.testing.assert_allclose(run["logits"][0], logits, atol=1e-10)


def test_seed_interval():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 400, dtype=torch.float64, generator=generator)
    mean, low, high = lesson.seed_interval(values, generator=generator, resamples=4000)
    torch.testing.assert_close(mean, values.mean(-1))
    # For a mean of 400 draws the bootstrap agrees with the normal interval, 1.96 standard errors to each side.
    standard_error = values.std(-1) / 20
    np.testing.assert_allclose((high - mean) / standard_error, 1.96, rtol=0.08)
    np.testing.assert_allclose((mean - low) / standard_error, 1.96, rtol=0.08)


# ---------------------------------------------------------------- bad input, the script as a whole, exercises


THIRDS = lesson.UNIFORM


@pytest.mark.parametrize("bad", [torch.tensor(values, dtype=torch.float64) for values in (
    [0.5, 0.7, 0.1], [1.2, -0.4, 0.2], [0.333, 0.333, 0.333], [0.5, math.nan, 0.5])])
@pytest.mark.parametrize("call", [
    lambda bad: lesson.bandit_gradient(bad, lesson.ARMS),
    lambda bad: lesson.off_policy_bandit_update(bad, THIRDS, lesson.ARMS, baseline=0.0),
    lambda bad: lesson.off_policy_bandit_update(THIRDS, bad, lesson.ARMS, baseline=0.0),
    lambda bad: lesson.optimal_baseline(bad, lesson.ARMS, lesson.bandit_scores(THIRDS)),
    lambda bad: lesson.ratio_second_moment(bad, THIRDS, 2),
    lambda bad: lesson.ratio_second_moment(THIRDS, bad, 2),
    lambda bad: lesson.estimator_moments(bad, lesson.ARMS[:, None], lesson.bandit_scores(THIRDS)),
])
def test_what_is_not_a_distribution_is_refused(call, bad):
    with pytest.raises(ValueError, match="sum to 1"):
        call(bad)


@pytest.mark.parametrize("call", [
    lambda: lesson.bandit_gradient(THIRDS, lesson.ARMS[:, None]),
    lambda: lesson.bandit_gradient(THIRDS.expand(3, 3), lesson.ARMS),
    lambda: lesson.off_policy_bandit_update(THIRDS, THIRDS, lesson.ARMS[:, None], baseline=0.0),
    lambda: lesson.off_policy_bandit_update(THIRDS, torch.ones(1).double(), lesson.ARMS, baseline=0.0),
    lambda: lesson.optimal_baseline(THIRDS, lesson.ARMS[:, None], lesson.bandit_scores(THIRDS)),
    lambda: lesson.ratio_second_moment(torch.ones(1).double(), THIRDS, 2),
    lambda: lesson.ratio_second_moment(THIRDS.expand(2, 3), THIRDS.expand(2, 3), 2),
])
def test_shapes_that_would_broadcast_are_refused(call):
    with pytest.raises(ValueError, match="one entry per response"):
        call()


def test_a_token_that_neither_policy_gives_costs_nothing():
    half = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert lesson.ratio_second_moment(half, half, 3).item() == pytest.approx(1.0, abs=1e-12)
    assert lesson.ratio_second_moment(half, THIRDS, 1).item() == pytest.approx(1.5, abs=1e-12)


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="π_b > 0"):
        lesson.ratio_second_moment(THIRDS, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), 2)
    with pytest.raises(ValueError, match="one entry per token"):
        lesson.estimator_moments(THIRDS, lesson.ARMS, lesson.bandit_scores(THIRDS))
    for shapes in [(3, 3, 1), (3, 1, 3), (1, 3, 3)]:  # broadcasting would hide each of them
        with pytest.raises(ValueError, match="one shape"):
            lesson.ppo_clip_loss(*map(torch.zeros, shapes), eps=0.2)
    for eps in (-0.1, math.nan):
        with pytest.raises(ValueError, match="eps"):
            lesson.ppo_clip_loss(*map(torch.zeros, (3, 3, 3)), eps=eps)


def test_quick_run_holds_every_claim_and_writes_its_files(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        lesson.main(["--quick", "--seed", "3", "--out", str(tmp_path), "--json", str(tmp_path / "claims.json")])
    assert stop.value.code == 0
    rows = json.loads((tmp_path / "claims.json").read_text())
    assert len(rows) >= 25 and all(row["ok"] for row in rows)
    assert all({"claim", "expected", "measured", "tolerance", "ok"} <= set(row) for row in rows)
    assert {path.name for path in tmp_path.glob("*.png")} == {"01_baseline.png", "01_importance.png", "01_loss.png"}
    assert f"{len(rows)} of {len(rows)} claims hold" in capsys.readouterr().out


def test_a_wrong_gradient_fails_the_run(tmp_path, monkeypatch):
    right = lesson.table_scores
    monkeypatch.setattr(lesson, "table_scores", lambda *arguments: -right(*arguments))
    with pytest.raises(SystemExit) as stop:
        lesson.main(["--quick", "--out", str(tmp_path)])
    assert stop.value.code == 1


RIGHT = {
    1: "def bandit_gradient(p, r): return p * r - p * (p * r).sum()",
    2: "def bandit_optimal_baseline(p, r):\n  w = p * (1 - 2 * p + (p * p).sum())\n  return (w * r).sum() / w.sum()",
    3: "def ratio_second_moment(p, b, n): return (((p / b) ** 2) * b).sum().pow(n)",
}
WRONG = {
    1: "def bandit_gradient(p, r): return r - p * (p * r).sum()",
    2: "def bandit_optimal_baseline(p, r): return (p * r).sum()",
    3: "def ratio_second_moment(p, b, n): return ((p / b) * b).sum().pow(n)",
}


@pytest.mark.parametrize("number", sorted(lesson.EXERCISES))
def test_exercises_know_right_from_wrong(number, tmp_path):
    answer = tmp_path / "answer.py"

    def verdict(text):
        answer.write_text(text)
        with pytest.raises(SystemExit) as stop:
            lesson.main(["--exercise", str(number), "--answer", str(answer)])
        return stop.value.code

    assert verdict(RIGHT[number]) == 0
    assert "the first difference is at" in verdict(WRONG[number])
