"""Lesson 01 against references that share no code path with it: finite differences, loops over responses, literals."""

import importlib
import itertools
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import utils

ROOT = pathlib.Path(__file__).resolve().parent.parent
lesson = importlib.import_module("01_reinforce")
page = lesson.lesson

FEW = settings(max_examples=15, deadline=None, derandomize=True)
PI, PI_B, R = np.full(3, 1 / 3), np.array([0.3, 0.6, 0.1]), np.array([0.0, 0.8, 1.0])
Q = np.array([0.2, 0.6, 1.0])  # the chain's quality of a token


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def simplex(size):
    """Strategy: probabilities that are not extreme, numpy."""
    return st.lists(st.floats(-2, 2), min_size=size, max_size=size).map(lambda x: np.exp(x) / np.exp(x).sum())


def finite_differences(function, logits, step=1e-5):
    """Central differences of a scalar function of an array."""
    gradient = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        shift = np.zeros_like(logits)
        shift[index] = step
        gradient[index] = (function(logits + shift) - function(logits - shift)) / (2 * step)
    return gradient


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def test_every_claim_of_the_page_holds():
    assert all(c["ok"] for c in page.claims) and len(page.claims) >= 15
    assert all("(1." in " ".join(c["claim"] for c in page.claims if c["section"][0] == s) for s in "123456")


# A language model that stops: tokens 0 (stop), 1, 2, at most three, a row of logits for EVERY prefix. 15 responses.
# "1 2 stop" earns 1, "1 2" cut off at the limit ½. Plain numpy: what the lesson does with its 27 strings, in general.
WORDS = [(0,), (1, 0), (2, 0), *itertools.product((1, 2), (1, 2), (0, 1, 2))]
PREFIXES = sorted({word[:t] for word in WORDS for t in range(len(word))})
EARNS = np.array([0.0 if w[:2] != (1, 2) else 1.0 if w[2] == 0 else 0.5 for w in WORDS])


def probability(logits, word, start=0):
    probs = softmax(logits)
    return math.prod(probs[PREFIXES.index(word[:t]), word[t]] for t in range(start, len(word)))


def token_scores(logits, word):
    """∇ log π of each token of the word, (len(word), 7, 3): e_token − π in its prefix's row."""
    scores = np.zeros((len(word), *logits.shape))
    for t, token in enumerate(word):
        row = PREFIXES.index(word[:t])
        scores[t, row] = np.eye(3)[token] - softmax(logits)[row]
    return scores


def expectation(logits, values):
    return sum(probability(logits, word) * value for word, value in zip(WORDS, values))


@settings(FEW, max_examples=5)
@given(st.integers(0, 2**31), st.floats(-5, 5))
def test_1_1_and_1_2_reinforce_is_unbiased_for_any_baseline_on_responses_that_stop(seed, baseline):
    logits = np.random.default_rng(seed).normal(size=(7, 3))
    assert expectation(logits, np.ones(15)) == pytest.approx(1, abs=1e-12)
    gradient = finite_differences(lambda x: expectation(x, EARNS), logits)
    scores = np.stack([token_scores(logits, word).sum(0).ravel() for word in WORDS])
    probs = double([probability(logits, word) for word in WORDS])
    mean, _ = lesson.mean_and_variance(probs, double(EARNS - baseline)[:, None] * double(scores))
    np.testing.assert_allclose(mean, gradient.ravel(), atol=1e-9)
    np.testing.assert_allclose(probs.numpy() @ scores, 0, atol=1e-12)  # E[s] = 0


def test_1_1_string_logprobs_look_one_token_back():
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    table = np.log(softmax(logits.numpy()))
    expected = [[table[3, a], table[a, b], table[b, c]] for a, b, c in itertools.product(range(3), repeat=3)]
    np.testing.assert_allclose(lesson.string_logprobs(logits), expected, atol=1e-12)
    assert lesson.token_scores.shape == (27, 3, 12)
    assert lesson.string_logprobs(logits).sum(-1).exp().sum().item() == pytest.approx(1)


def test_1_1_variance_is_the_trace_of_the_covariance():
    generator = np.random.default_rng(1)
    probs, values = generator.dirichlet(np.ones(5)), generator.normal(size=(5, 4))
    mean, variance = lesson.mean_and_variance(double(probs), double(values))
    np.testing.assert_allclose(mean, probs @ values, atol=1e-12)
    assert variance.item() == pytest.approx(np.trace(np.cov(values.T, aweights=probs, ddof=0)), abs=1e-12)


@FEW
@given(simplex(4), st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_1_1_bandit_gradient(probs, rewards):
    expected = finite_differences(lambda x: softmax(x) @ rewards, np.log(probs))
    mean, _ = lesson.mean_and_variance(double(probs), double(rewards)[:, None] * lesson.softmax_scores(double(probs)))
    np.testing.assert_allclose(mean, expected, atol=1e-9)
    np.testing.assert_allclose(probs * (rewards - probs @ rewards), expected, atol=1e-9)


@FEW
@given(simplex(3), st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_1_2_variance_is_a_parabola_around_the_best_baseline(probs, rewards):
    length = 1 - 2 * probs + (probs**2).sum()  # ‖e_y − π‖²
    best = (probs * rewards * length).sum() / (probs * length).sum()
    def variance(b):
        return lesson.variance_of_one_sample(double(probs), double(rewards), b).item()

    lowest = variance(best)
    for b in (-1, 0, 2):
        assert variance(b) == pytest.approx(lowest + (b - best) ** 2 * (probs * length).sum(), abs=1e-8)


def test_1_2_worked_numbers():
    def variance(probs, rewards, b):
        return lesson.variance_of_one_sample(double(probs), double(rewards), b).item()

    # π = (.7, .2, .1): ‖s‖² = (.14, 1.14, 1.34), so E‖s‖² = .46, E[r‖s‖²] = .3164. J = .26 is not b*, but beats none.
    best, mean_reward, none = (variance([0.7, 0.2, 0.1], R, b) for b in (0.3164 / 0.46, 0.26, 0.0))
    assert best < mean_reward < none and none - best == pytest.approx(0.3164**2 / 0.46, abs=1e-12)
    # An easy prompt, 90 % right: ‖s‖² = (.015, 1.715, 1.715), b* = .0135/.185, so b = J = .9 is noisier than none.
    assert variance([0.9, 0.05, 0.05], [1, 0, 0], 0.9) > variance([0.9, 0.05, 0.05], [1, 0, 0], 0.0)
    # The page: one right answer and one wrong, and the same 90 % spread over nine right ones.
    one, nine = ([0.9, 0.1], [1, 0]), ([0.1] * 10, [1] * 9 + [0])
    spread = [variance(*prompt, b) for prompt in (one, nine) for b in (0.0, 0.9)]
    np.testing.assert_allclose(spread, [0.0018, 0.1152, 0.801, 0.072], atol=1e-12)
    # A score of two tokens counts as their sum: the lesson's strings have the squared length of the summed score.
    np.testing.assert_allclose(lesson.scores, lesson.token_scores.sum(1))


# ---------------------------------------------------------------- (1.3): off-policy


@FEW
@given(simplex(3), simplex(3), st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.floats(-2, 2))
def test_1_3_off_policy_it_climbs_weighted_imitation(probs, behaviour, rewards, baseline):
    arguments = double(probs), double(behaviour), double(rewards)
    update = lesson.off_policy_bandit_update(*arguments, baseline=baseline)
    advantages = np.array(rewards) - baseline
    imitation = finite_differences(lambda x: behaviour @ (advantages * np.log(softmax(x))), np.log(probs))
    np.testing.assert_allclose(update, imitation, atol=1e-8)
    mean, _ = lesson.mean_and_variance(
        arguments[1], double(advantages)[:, None] * lesson.softmax_scores(arguments[0]))
    np.testing.assert_allclose(update, mean, atol=1e-12)
    on_policy = lesson.off_policy_bandit_update(arguments[0], arguments[0], arguments[2], baseline=baseline)
    np.testing.assert_allclose(on_policy, probs * (rewards - probs @ rewards), atol=1e-12)


def test_1_3_weighted_imitation_on_responses_that_stop():
    current, behaviour = np.random.default_rng(3).normal(size=(2, 7, 3))
    old = np.array([probability(behaviour, word) for word in WORDS])
    imitation = finite_differences(
        lambda x: old @ ((EARNS - 0.2) * np.log([probability(x, word) for word in WORDS])), current)
    scores = np.stack([token_scores(current, word).sum(0) for word in WORDS])
    np.testing.assert_allclose(np.einsum("n,nij", old * (EARNS - 0.2), scores), imitation, atol=1e-8)


def test_1_3_best_arm_sinks_where_the_true_gradient_lifts_it():
    assert lesson.updates[10, 2] < 0 < (PI * (R - PI @ R))[2]  # b = 0
    assert (lesson.updates[:30, 2] < 0).all() and (lesson.updates[31:, 2] > 0).all()  # b = .4 is number 30


# ---------------------------------------------------------------- (1.4) to (1.6): importance sampling


@FEW
@given(simplex(3), simplex(3), st.integers(1, 4))
def test_1_5_second_moment_of_independent_tokens(probs, behaviour, length):
    words = list(itertools.product(range(3), repeat=length))
    sampling = np.array([math.prod(behaviour[a] for a in word) for word in words])
    ratio = np.array([math.prod(probs[a] / behaviour[a] for a in word) for word in words])
    assert sampling @ ratio == pytest.approx(1)
    assert sampling @ ratio**2 == pytest.approx((1 + behaviour @ (probs / behaviour - 1) ** 2) ** length, rel=1e-9)


def prefix_gradients(current, behaviour):
    """∇J and the mean of token-level importance sampling by the algebra of prefixes, not of responses:

    Σ_prefix P(prefix) Σ_a π(a|prefix)·Q(prefix, a)·(e_a − π), with P and Q of π, or both of π_b."""
    reward_of = dict(zip(WORDS, EARNS))

    def value(table, prefix):
        if prefix in reward_of:
            return reward_of[prefix]
        return sum(softmax(table)[PREFIXES.index(prefix), a] * value(table, prefix + (a,)) for a in range(3))

    results = []
    for table in (current, behaviour):
        total = np.zeros((7, 3))
        for row, prefix in enumerate(PREFIXES):
            pi = softmax(current)[row]
            total[row] = probability(table, prefix) * sum(
                pi[a] * value(table, prefix + (a,)) * (np.eye(3)[a] - pi) for a in range(3))
        results.append(total)
    return results


def token_ratios(current, behaviour, word):
    return [probability(current, word[:t + 1], t) / probability(behaviour, word[:t + 1], t) for t in range(len(word))]


def ratio_estimates(current, behaviour):
    """Means under π_b of the whole-ratio and of the token-ratio estimator, by loops over the 15 responses."""
    whole, token = np.zeros((7, 3)), np.zeros((7, 3))
    for word, reward in zip(WORDS, EARNS):
        old, scores = probability(behaviour, word), token_scores(current, word)
        ratios = token_ratios(current, behaviour, word)
        whole += old * reward * math.prod(ratios) * scores.sum(0)
        token += old * reward * np.einsum("t,tij", ratios, scores)
    return whole, token


def test_1_4_and_1_6_whole_ratios_are_unbiased_and_token_ratios_climb_another_objective():
    current, behaviour = np.random.default_rng(5).normal(size=(2, 7, 3))
    exact, token_level = prefix_gradients(current, behaviour)
    whole, token = ratio_estimates(current, behaviour)
    np.testing.assert_allclose(whole, exact, atol=1e-12)
    np.testing.assert_allclose(token, token_level, atol=1e-12)
    surrogate = finite_differences(lambda x: expectation(
        behaviour, [r * sum(token_ratios(x, behaviour, w)) for w, r in zip(WORDS, EARNS)]), current)
    np.testing.assert_allclose(token, surrogate, atol=1e-8)
    assert np.linalg.norm(token - exact) > 0.01 * np.linalg.norm(exact)
    on_policy = ratio_estimates(behaviour, behaviour)[1], prefix_gradients(behaviour, behaviour)[0]
    np.testing.assert_allclose(*on_policy, atol=1e-12)


def test_1_6_bias_of_token_ratios_doubles_with_the_distance():
    behaviour, direction = np.random.default_rng(6).normal(size=(2, 7, 3))
    bias = []
    for distance in (1e-3, 2e-3):
        exact, token = prefix_gradients(behaviour + distance * direction, behaviour)
        bias.append(np.linalg.norm(token - exact) / np.linalg.norm(exact))
    assert bias[1] / bias[0] == pytest.approx(2, rel=0.02)


def test_1_6_two_binary_tokens():
    # Log-odds of token 1: .5 first, −.3 after 0, .8 after 1; π_b is uniform; r = 1 for (1, 1) alone, A = r − .25.
    odds, known = [0.5, -0.3, 0.8], {"none": [0.125, -0.0093053, 0.1012532], "token": [0.1175019, 0, 0.1069549],
                                     "whole": [0.1621466, 0, 0.1331501]}
    means = {name: np.zeros(3) for name in known}
    for a, b in itertools.product((0, 1), repeat=2):
        rows, p_one = (0, 1 + a), [1 / (1 + math.exp(-odds[row])) for row in (0, 1 + a)]
        ratios = [2 * (p if token else 1 - p) for p, token in zip(p_one, (a, b))]
        for row, token, p, ratio in zip(rows, (a, b), p_one, ratios):
            step = 0.25 * (a * b - 0.25) * (token - p)
            for name, weight in {"none": 1, "token": ratio, "whole": math.prod(ratios)}.items():
                means[name][row] += weight * step
    for name, expected in known.items():
        np.testing.assert_allclose(means[name], expected, atol=6e-8)


def test_1_6_the_missing_share_of_the_length_as_the_page_says():
    assert [round(100 * (1 - (0.52 / 0.6) ** (T - 1))) for T in (2, 8, 20)] == [13, 63, 93]
    for length in (2, 8):
        missing = 1 - (0.52 / 0.6) ** (length - 1)
        assert lesson.chain_errors(length, responses=math.inf)[1].item() == pytest.approx(missing, abs=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_1_6_chain_errors_by_loops(length):
    words = list(itertools.product(range(3), repeat=length))
    sampling = np.array([math.prod(PI_B[a] for a in word) for word in words])
    reward = np.array([math.prod(Q[a] for a in word) for word in words])
    exact = sum(math.prod(PI[a] for a in w) * r * sum(np.eye(3)[a] - PI for a in w) for w, r in zip(words, reward))
    for column, weight in enumerate([lambda w, t: 1.0, lambda w, t: PI[w[t]] / PI_B[w[t]],
                                     lambda w, t: math.prod(PI[a] / PI_B[a] for a in w)]):
        g = np.stack([(r - sampling @ reward) * sum(weight(w, t) * (np.eye(3)[w[t]] - PI) for t in range(length))
                      for w, r in zip(words, reward)])
        mean = sampling @ g
        square = ((mean - exact) ** 2).sum() + sampling @ ((g - mean) ** 2).sum(-1) / 5
        measured = lesson.chain_errors(length, responses=5)[column].item()
        assert measured == pytest.approx(math.sqrt(square) / np.linalg.norm(exact), abs=1e-12)
    if length > 1:
        assert lesson.chain_errors(length, responses=math.inf)[2] < 1e-12  # the whole ratio has no bias
        assert lesson.chain_errors(length)[1] < lesson.chain_errors(length)[[0, 2]].min()


# ---------------------------------------------------------------- (1.7): loss and ratio


@pytest.mark.parametrize("advantage, ratio, loss",
                         [(-1.0, 10, 10), (-1.0, 0.5, 0.8), (1.0, 10, -1.2), (1.0, 0.5, -0.5), (-2.0, 1.1, 2.2)])
def test_ppo_clip_loss_values(advantage, ratio, loss):
    measured = lesson.ppo_clip_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), eps=0.2)
    assert measured.item() == pytest.approx(loss, rel=1e-6)


@FEW
@given(st.floats(0.3, 2.0), st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3), st.floats(0.05, 0.5))
def test_ppo_clip_gradient_is_minus_a_rho_unless_it_moves_further_out(ratio, advantage, eps):
    if min(abs(ratio - 1 - eps), abs(ratio - 1 + eps)) < 1e-6:
        return  # on the kink itself there is no gradient to compare with
    logprobs = double([math.log(ratio)]).requires_grad_()
    loss = lesson.ppo_clip_loss(logprobs, torch.zeros_like(logprobs), double([advantage]), eps=eps)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    outside = ratio > 1 + eps if advantage > 0 else ratio < 1 - eps
    assert gradient.item() == pytest.approx(0.0 if outside else -advantage * ratio, abs=1e-12)


def test_loss_is_a_mean_over_the_last_dimension_and_refuses_what_would_broadcast():
    zeros, advantages = torch.zeros(3, 4), torch.arange(12.0).view(3, 4)
    assert lesson.ppo_clip_loss(zeros, zeros, advantages, eps=0.2).tolist() == [-1.5, -5.5, -9.5]
    for shapes in [(3, 3, 1), (3, 1, 3), (1, 3, 3)]:
        with pytest.raises(ValueError, match="one shape"):
            lesson.ppo_clip_loss(*map(torch.zeros, shapes), eps=0.2)
    for eps in (-0.1, math.nan):
        with pytest.raises(ValueError, match="eps"):
            lesson.ppo_clip_loss(*map(torch.zeros, (3, 3, 3)), eps=eps)


def test_1_7_token_mean_of_a_loss_at_ratio_1_tells_lengths():
    assert -torch.tensor([1.0, -1.0]).repeat_interleave(torch.tensor([1, 3])).mean() == 0.5


def train(steps_per_batch, eps, *, batches=8, size=400, rate=2.0):
    """A bandit on ppo_clip_loss, and every step by hand. Returns J, the clipped share and max |ρ − 1| of each step."""
    logits, generator, log = torch.zeros(3, dtype=torch.float64), np.random.default_rng(0), []
    for _ in range(batches):
        old = np.log(softmax(logits.numpy()))
        share = generator.multinomial(size, np.exp(old)) / size
        arms = torch.repeat_interleave(torch.arange(3), torch.tensor(np.round(share * size), dtype=torch.long))
        advantage = R - share @ R
        for _ in range(steps_per_batch):
            theta = logits.clone().requires_grad_()
            logprobs = torch.log_softmax(theta, -1)[arms]
            loss = lesson.ppo_clip_loss(logprobs, double(old)[arms], double(advantage)[arms], eps=eps)
            (gradient,) = torch.autograd.grad(loss, theta)
            pi = softmax(logits.numpy())
            ratio = pi / np.exp(old)
            clipped = ((advantage > 0) & (ratio > 1 + eps)) | ((advantage < 0) & (ratio < 1 - eps))
            pull = share * advantage * np.where(clipped, 0, ratio)
            np.testing.assert_allclose(gradient, pi * pull.sum() - pull, atol=1e-12)
            log.append([pi @ R, share @ clipped, abs(ratio - 1).max()])
            logits = logits - rate * gradient
    return np.array(log).reshape(batches, steps_per_batch, 3)


def test_1_7_clipping_needs_a_second_step_on_a_batch():
    once, often = train(1, 0.2), train(4, 0.2)
    assert once[..., 1].max() == 0 and once[..., 2].max() < 1e-12  # ρ = 1, so
    np.testing.assert_allclose(once, train(1, math.inf), atol=1e-12)  # ε changes nothing
    assert often[:, 0, 1].max() == 0 and often[:, 3, 1].mean() > 0.02
    assert abs(often[..., 0] - train(4, math.inf)[..., 0]).max() > 0.02  # here it does


# ---------------------------------------------------------------- exercises and the script as a whole


@pytest.mark.parametrize("number, right, wrong", [(1, "Down", "up"), (2, "8", "500"), (3, "nothing", "worse")])
def test_predictions(number, right, wrong, capsys):
    assert utils.exercise(lesson.EXERCISES, number, right) == 0
    assert utils.exercise(lesson.EXERCISES, number, wrong) == 1
    assert utils.exercise(lesson.EXERCISES, number, None).startswith(f"Exercise {number}")


@pytest.mark.parametrize("body, right", [
    ("w = torch.softmax(logprobs - old_logprobs, -1)\n    return 1 / (w * w).sum()", True),
    ("w = (logprobs - old_logprobs).exp()\n    return w.sum() ** 2 / (w * w).sum()", False),  # overflows
    ("w = torch.softmax(logprobs - old_logprobs, -1)\n    return (-torch.xlogy(w, w).sum()).exp()", False)])
def test_effective_sample_size_exercise(body, right, tmp_path, capsys):
    answer = tmp_path / "answer.py"
    answer.write_text(f"import torch\ndef effective_sample_size(logprobs, old_logprobs):\n    {body}\n")
    verdict = utils.exercise(lesson.EXERCISES, 4, str(answer))
    assert verdict is None if right else "Not yet" in verdict


@pytest.mark.slow
def test_quick_run_fits_a_terminal_and_writes_its_figures(tmp_path):
    result = subprocess.run([sys.executable, ROOT / "01_reinforce.py", "--quick", "--seed", "3", "--out", tmp_path],
                            capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert max(map(len, result.stdout.replace(str(tmp_path), "").splitlines())) <= 100
    assert {path.name for path in tmp_path.glob("*.png")} == {"01_baseline.png", "01_importance.png", "01_loss.png"}
    assert torch.get_default_dtype() == torch.float32
