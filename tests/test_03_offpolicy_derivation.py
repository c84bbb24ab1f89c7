"""Lesson 03 against references of another kind: plain loops, closed forms, exact fractions, finite differences.

Nothing here calls a lesson function to make the value that another lesson function is held to, and no number is
copied from a run: literals stand beside their derivation or come from the worked examples of the paper's bandit.
"""

import importlib
import inspect
import itertools
import json
import math
import os
import pathlib
import runpy
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

lesson = importlib.import_module("03_offpolicy_derivation")

SCRIPT = pathlib.Path(lesson.__file__)
EXAMPLES = settings(max_examples=20, deadline=None)
REWARDS = [0.0, 0.8, 1.0]
BEHAVIOUR = [0.3, 0.6, 0.1]
DRIFT = [-0.174, 0.132, 0.042]  # μ = .6·.8 + .1·1 = .58; c = .3·(−.58), .6·.22, .1·.42
finite = st.floats(-2, 2, allow_nan=False, allow_subnormal=False)
taus = st.floats(0.05, 5)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def lists(size, elements=finite):
    return st.lists(elements, min_size=size, max_size=size)


def softmax(values):
    exponentials = [math.exp(v - max(values)) for v in values]
    return [e / sum(exponentials) for e in exponentials]


def close(measured, expected, tolerance=1e-10):
    measured = measured.detach().numpy() if torch.is_tensor(measured) else measured
    np.testing.assert_allclose(measured, np.asarray(expected), rtol=0, atol=tolerance)


def loss_by_loops(logprobs, old_logprobs, rewards, tau, *, scale=True, weights=None):
    adjusted = [r - tau * (new - old) for r, new, old in zip(rewards, logprobs, old_logprobs)]
    size = len(rewards)
    total = sum((1 if weights is None else weights[i][j]) * (adjusted[i] - adjusted[j]) ** 2
                for i in range(size) for j in range(i + 1, size))
    return total / size**2 / ((1 + tau) ** 2 if scale else 1)


def test_every_claim_of_the_page_holds():
    assert all(claim["ok"] for claim in lesson.lesson.claims) and len(lesson.lesson.claims) >= 25


# ---------------------------------------------------------------- 1 and 2: objective, optimum, consistency


@EXAMPLES
@given(lists(4), lists(4), lists(4), st.floats(0.5, 5))  # τ ≥ ½ keeps every probability above 1e-6, far from rounding
def test_3_3_no_distribution_beats_the_optimum(anchor, rewards, other, tau):
    old, candidate = softmax(anchor), softmax(other)
    optimum = lesson.kl_regularised_optimum(vector(*old), vector(*rewards), tau=tau).tolist()

    def objective(probs):
        return sum(p * (r - tau * math.log(p / q)) for p, q, r in zip(probs, old, rewards))

    assert objective(optimum) >= objective(candidate) - 1e-12
    for i, j in itertools.permutations(range(4), 2):  # moving half of the smallest probability loses strictly
        moved = list(optimum)
        shift = 0.5 * min(moved)
        moved[i], moved[j] = moved[i] + shift, moved[j] - shift
        assert objective(optimum) > objective(moved)
    log_z = math.log(sum(q * math.exp(r / tau) for q, r in zip(old, rewards)))
    assert objective(optimum) == pytest.approx(tau * log_z, abs=1e-10)
    for p, q, r in zip(optimum, old, rewards):  # (3.4), so (3.5) for every pair
        assert r - tau * (math.log(p) - math.log(q)) == pytest.approx(tau * log_z, abs=1e-10)


def test_3_2_optimum_at_the_edges():
    old, rewards = vector(*BEHAVIOUR), vector(*REWARDS)
    close(lesson.kl_regularised_optimum(old, rewards, tau=1e9), BEHAVIOUR, 1e-8)  # τ → ∞: stay
    close(lesson.kl_regularised_optimum(old, rewards, tau=1e-4), [0, 0, 1])  # τ → 0: the best arm; e^10000 overflows
    close(lesson.kl_regularised_optimum(old, rewards + 7, tau=0.5), [0.0747995, 0.7409681, 0.1842324], 1e-7)
    close(lesson.kl_regularised_optimum(vector(0.5, 0.5, 0.0), rewards, tau=0.01)[2], 0)  # π_t = 0 stays 0
    factor = math.exp(1 / 0.3)
    integers = lesson.kl_regularised_optimum(old, torch.tensor([0, 1, 1]), tau=0.3)
    close(integers, np.array([0.3, 0.6 * factor, 0.1 * factor]) / (0.3 + 0.7 * factor), 1e-15)


# ---------------------------------------------------------------- 3: the surrogate loss


@EXAMPLES
@given(st.integers(2, 6).flatmap(lambda k: st.tuples(lists(k), lists(k), lists(k), lists(k))), taus, st.booleans())
def test_3_6_and_3_8_the_loss_is_the_double_loop_and_the_variance(group, tau, scale):
    new, old, rewards, raw = group
    tensors = vector(*new), vector(*old), vector(*rewards)
    loss = lesson.pairwise_surrogate_loss(*tensors, tau=tau, scale=scale)
    close(loss, loss_by_loops(new, old, rewards, tau, scale=scale))
    adjusted = [r - tau * (a - b) for a, b, r in zip(new, old, rewards)]
    close(loss, np.var(adjusted) / ((1 + tau) ** 2 if scale else 1))
    weights = [[u * v + abs(u - v) for u in raw] for v in raw]
    weighted = lesson.pairwise_surrogate_loss(*tensors, tau=tau, scale=scale, pair_weights=vector(*weights))
    close(weighted, loss_by_loops(new, old, rewards, tau, scale=scale, weights=weights))


@EXAMPLES
@given(lists(5), lists(5))
def test_3_7_sums_over_pairs_are_sums_over_members(rewards, values):
    mean = sum(rewards) / 5
    pairs = sum((rewards[i] - rewards[j]) * (values[i] - values[j]) for i, j in itertools.combinations(range(5), 2))
    assert pairs == pytest.approx(5 * sum((r - mean) * v for r, v in zip(rewards, values)), abs=1e-10)
    close(lesson.group_reinforce_loss(vector(*values), vector(*rewards)), -pairs / 25)


@pytest.mark.parametrize("tau, variance_of", [(1e-9, "rewards"), (1e9, "log-ratios")])
def test_3_8_the_scale_keeps_the_loss_bounded_for_every_tau(tau, variance_of):
    new, old, rewards = vector(-1, -2, -0.5), vector(-1.5, -1, -1), vector(*REWARDS)
    expected = np.var(REWARDS) if variance_of == "rewards" else np.var([0.5, -1.0, 0.5])
    close(lesson.pairwise_surrogate_loss(new, old, rewards, tau=tau), expected, 1e-7)


def test_leading_dimensions_are_separate_groups_and_the_anchor_is_a_constant():
    new, old, rewards = torch.randn(3, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weights = torch.rand(2, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights = weights + weights.mT
    loss = lesson.pairwise_surrogate_loss(new, old, rewards, tau=0.7, pair_weights=weights)
    assert loss.shape == (2, 4)
    for i, j in itertools.product(range(2), range(4)):
        group = [x[i, j].tolist() for x in (new, old, rewards)]
        close(loss[i, j], loss_by_loops(*group, 0.7, weights=weights[i, j].tolist()))
        mean = sum(group[2]) / 5
        reinforce = -sum((r - mean) * v for v, r in zip(group[0], group[2])) / 5
        close(lesson.group_reinforce_loss(new, rewards)[i, j], reinforce)
    logits = vector(0.3, -0.2, 0.1).requires_grad_()  # one tensor passed twice is the natural call at θ_t
    logprobs = torch.log_softmax(logits, -1)
    lesson.pairwise_surrogate_loss(logprobs, logprobs, vector(*REWARDS), tau=0.5).backward()
    assert logits.grad.norm() > 0.05


# ---------------------------------------------------------------- 4: one step, for data from anywhere


def test_3_10_worked_example_without_the_scale():
    logits = vector(0, 0, 0).requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    loss = lesson.pairwise_surrogate_loss(logprobs, logprobs, vector(*REWARDS), tau=0.5, scale=False)
    loss.backward()
    close(loss, 1.68 / 9)  # pairs .8², 1², .2²
    close(logits.grad, [0.2, -0.2 / 3, -0.4 / 3])  # −2·.5·⅓·(−.6, .2, .4)


@EXAMPLES
@given(lists(4), st.lists(st.integers(0, 3), min_size=2, max_size=7), st.data(), taus, st.booleans())
def test_3_10_one_step_is_reinforce_on_any_group_of_a_bandit(theta, group, data, tau, scale):
    """Any arms, repeated or not, any rewards: the gradient is −constant·(1/K) Σ (r − r̄)·(e_y − π), written out."""
    rewards = data.draw(lists(len(group)))
    probs, mean = softmax(theta), sum(rewards) / len(rewards)
    constant = 2 * tau / (1 + tau) ** 2 if scale else 2 * tau
    expected = [-constant * sum((r - mean) * ((arm == y) - probs[arm]) for y, r in zip(group, rewards)) / len(group)
                for arm in range(4)]
    logits = vector(*theta).requires_grad_()
    logprobs = torch.log_softmax(logits, -1)[group]
    lesson.pairwise_surrogate_loss(logprobs, logprobs, vector(*rewards), tau=tau, scale=scale).backward()
    close(logits.grad, expected)
    by_arm = vector(*[dict(zip(group, rewards)).get(arm, 0.0) for arm in range(4)])  # one reward for each arm
    both = lesson.two_gradients(lambda t: t.log_softmax(-1), vector(*theta), vector(*theta), group, by_arm, tau=tau)
    close(both[0], both[1])


def test_the_language_model_is_a_chain():
    theta = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = [softmax(row) for row in theta.view(4, 3).tolist()]
    for spoken in (1.0, 0.0):
        expected = [math.log(rows[3][a] * rows[a][b] ** spoken * rows[b][c])
                    for a, b, c in itertools.product(range(3), repeat=3)]
        close(lesson.language_model(theta, spoken), expected)
    close(lesson.language_model(theta).exp().sum(), 1)


def sequence_table(theta):
    """log π of all 27 sequences of 3 tokens; one row of logits for each of the 13 prefixes."""
    rows = theta.view(13, 3).log_softmax(-1)
    second = (rows[0][:, None] + rows[1:4]).flatten()
    return (second[:, None] + rows[4:]).flatten()


FEATURES = torch.randn(27, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def network(theta):
    """log π of 27 responses from a small network with one hidden layer, all weights in theta (40,)."""
    hidden = torch.tanh(FEATURES @ theta[:32].view(4, 8))
    return (hidden @ theta[32:]).log_softmax(-1)


@pytest.mark.parametrize("policy, size", [(lesson.language_model, 12), (sequence_table, 39), (network, 40)])
@pytest.mark.parametrize("tau", [0.1, 2.0])
def test_3_10_one_step_is_reinforce_for_every_policy_and_source_by_finite_differences(policy, size, tau):
    theta = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    old = policy(theta)
    close(old.exp().sum(), 1.0)
    rewards = torch.rand(27, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    for group in (old.argsort()[:5], torch.tensor([0, 0, 0, 0, 26]), torch.tensor([26, 1, 0, 13, 2])):
        chosen, rows = rewards[group], []
        for index in range(size):  # central differences, no autograd
            nudge = torch.zeros(size, dtype=torch.float64)
            nudge[index] = 1e-5
            high, low = ([*policy(theta + sign * nudge)[group].tolist()] for sign in (1, -1))
            losses = [loss_by_loops(logprobs, old[group].tolist(), chosen.tolist(), tau) for logprobs in (high, low)]
            reinforce = -np.mean((chosen - chosen.mean()).numpy() * (np.array(high) - np.array(low))) / 2e-5
            rows.append([(losses[0] - losses[1]) / 2e-5, 2 * tau / (1 + tau) ** 2 * reinforce])
        surrogate, reinforce = lesson.two_gradients(policy, theta, theta, group, rewards, tau=tau)
        close(torch.stack([surrogate, reinforce], -1), rows, 1e-8)
        assert surrogate.norm() > 1e-4  # 0 = 0 would prove nothing


def test_the_sources_of_the_page_are_what_their_names_say():
    own, sources = lesson.own, lesson.sources
    assert all(len(group) == 5 and 0 <= group.min() and group.max() < 27 for group in sources.values())
    assert sorted(own[sources["its least likely"]].tolist()) == sorted(own.tolist())[:5]
    assert sources["one repeated"].unique().numel() == 2
    for group in sources.values():
        theta = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
        both = lesson.two_gradients(lesson.language_model, theta, theta, group, lesson.grades)
        assert min(gradient.norm() for gradient in both) > 1e-3


@EXAMPLES
@given(lists(3), lists(3), lists(3), taus)
def test_3_9_away_from_the_anchor_the_adjusted_rewards_take_the_place_of_the_rewards(theta, old_theta, rewards, tau):
    """The surrogate's gradient is −constant·(1/K) Σ (a − ā)(e_y − π), a = r − τ·d; REINFORCE has r in place of a."""
    group = [0, 2, 2, 1]
    new, old = softmax(theta), softmax(old_theta)
    chosen = [rewards[y] for y in group]
    adjusted = [r - tau * math.log(new[y] / old[y]) for y, r in zip(group, chosen)]
    gradients = lesson.two_gradients(lambda t: torch.log_softmax(t, -1), vector(*theta), vector(*old_theta), group,
                                     vector(*rewards), tau=tau)
    for gradient, values in zip(gradients, (adjusted, chosen)):
        mean = sum(values) / 4
        updates = [sum((v - mean) * ((arm == y) - new[arm]) for y, v in zip(group, values)) / 4 for arm in range(3)]
        close(gradient, -2 * tau / (1 + tau) ** 2 * np.array(updates))


def test_3_9_the_gradients_part_at_the_rate_of_taylor():
    """d_i = h·s_i·v + O(h²), s_i the score: the difference is h·constant·τ·Cov(s)·v, and what that leaves is O(h²)."""
    generator, tau, group = torch.Generator().manual_seed(2), 0.5, torch.tensor([0, 4, 9, 20])
    theta, direction = torch.randn(2, 39, dtype=torch.float64, generator=generator)
    rewards = torch.rand(27, dtype=torch.float64, generator=generator)
    scores = torch.autograd.functional.jacobian(lambda t: sequence_table(t)[group], theta)
    centred = scores - scores.mean(0)
    first = 2 * tau / (1 + tau) ** 2 * tau * centred.T @ (centred @ direction) / 4
    sizes = []
    for distance in (2e-4, 1e-4):
        both = lesson.two_gradients(sequence_table, theta + distance * direction, theta, group, rewards, tau=tau)
        sizes.append([(both[0] - both[1]).norm(), (both[0] - both[1] - distance * first).norm()])
    orders = (torch.tensor(sizes[0]) / torch.tensor(sizes[1])).log2()
    close(orders, [1, 2], 0.05)


def test_two_responses_are_a_preference():
    """K = 2: L̂ = ¼·(τ/(1+τ))²·(Δ log-ratio − Δr/τ)², and its first step is parallel to DPO's."""
    tau, beta, theta = 0.5, 0.3, vector(0.3, -0.2, 0.1)
    loss = lesson.pairwise_surrogate_loss(vector(0.7, -0.4), vector(0, 0), vector(1.0, 0.0), tau=tau)
    close(loss, 0.25 * (tau / (1 + tau)) ** 2 * (1.1 - 1 / tau) ** 2)

    def step(rewards):
        logits = theta.clone().requires_grad_()
        logprobs = torch.log_softmax(logits, -1)[[2, 0]]
        lesson.pairwise_surrogate_loss(logprobs, logprobs, vector(*rewards), tau=tau).backward()
        return -logits.grad

    # −∇L̂ = constant/4·(r_1 − r_2)·(e_1 − e_2), constant = 4/9; the π parts of the two scores cancel
    close(step([1.0, 0.0]), [-1 / 9, 0, 1 / 9])
    close(step([0.0, 1.0]), [1 / 9, 0, -1 / 9])
    close(step([0.5, 0.5]), [0, 0, 0])
    logits = theta.clone().requires_grad_()  # −log σ(β·Δ) at the anchor has the gradient −β/2·(e_w − e_l)
    change = torch.log_softmax(logits, -1) - torch.log_softmax(theta, -1)
    (-torch.nn.functional.logsigmoid(beta * (change[2] - change[0]))).backward()
    close(step([1.0, 0.0]), -logits.grad.numpy() * (4 / 9) / (2 * beta))


# ---------------------------------------------------------------- 5: one minimiser, many steps


@EXAMPLES
@given(lists(4), lists(4), lists(4), lists(4), taus)
def test_3_11_the_loss_of_a_huge_group_and_its_minimiser(behaviour, anchor, theta, rewards, tau):
    data, old, new = softmax(behaviour), softmax(anchor), softmax(theta)
    adjusted = [r - tau * math.log(p / q) for p, q, r in zip(new, old, rewards)]
    mean = sum(p * a for p, a in zip(data, adjusted))
    expected = sum(p * (a - mean) ** 2 for p, a in zip(data, adjusted)) / (1 + tau) ** 2
    weights = 16 * torch.outer(vector(*data), vector(*data))
    tensors = vector(*new).log(), vector(*old).log(), vector(*rewards)
    close(lesson.pairwise_surrogate_loss(*tensors, tau=tau, pair_weights=weights), expected)
    # … and K/(K−1) times the mean of the finite-sample loss over every group of K = 3 that the data can hold
    groups = list(itertools.product(range(4), repeat=3))
    losses = lesson.pairwise_surrogate_loss(*(tensor[torch.tensor(groups)] for tensor in tensors), tau=tau)
    close(1.5 * sum(math.prod(data[y] for y in group) * loss for group, loss in zip(groups, losses)), expected)
    # … and 0 at π_t·exp(r/τ)/Z, whatever the data
    optimum = softmax([math.log(q) + r / tau for q, r in zip(old, rewards)])
    tensors = vector(*optimum).log(), *tensors[1:]
    close(lesson.pairwise_surrogate_loss(*tensors, tau=tau, pair_weights=weights), 0)


def test_3_11_the_paths_of_the_page_start_in_different_directions():
    starts = []
    for behaviour, path in zip(([0.3, 0.6, 0.1], [1 / 3] * 3, [0.1, 0.1, 0.8]), lesson.paths.values()):
        mean = sum(p * r for p, r in zip(behaviour, REWARDS))
        # −∇ = 2τ/(1+τ)²·π_b(r − μ) = (4/9)·π_b(r − μ), in steps of size 4
        starts.append([4 * 4 / 9 * p * (r - mean) for p, r in zip(behaviour, REWARDS)])
        close(path[1] - path[0], starts[-1])
    directions = np.array(starts) / np.linalg.norm(starts, axis=1, keepdims=True)
    assert (directions @ directions.T).min() < 0.7


def test_3_11_data_without_an_arm_do_not_see_it():
    weights = 9 * torch.outer(vector(0.4, 0.6, 0), vector(0.4, 0.6, 0))
    odds = vector(0.3, 0.6 * math.exp(1.6), 1e5)  # the optimum's odds of arms 1 and 2, nearly all mass on arm 3
    tensors = (odds / odds.sum()).log(), vector(*BEHAVIOUR).log(), vector(*REWARDS)
    close(lesson.pairwise_surrogate_loss(*tensors, tau=0.5, pair_weights=weights), 0, 1e-20)


# ---------------------------------------------------------------- 6: many turns

TRAJECTORIES = list(itertools.product(range(2), repeat=3))  # y¹, x², y²
RETURNS = [x2 + 0.5 * y1 * y2 for y1, x2, y2 in TRAJECTORIES]


def two_turns(theta):
    """log p(y¹)·p(y² | y¹, x²) of the 8 trajectories; theta (10,): a pair of logits at first and for each (y¹, x²)."""
    rows = theta.view(5, 2).log_softmax(-1)
    return torch.stack([rows[0, y1] + rows[1 + 2 * y1 + x2, y2] for y1, x2, y2 in TRAJECTORIES])


@EXAMPLES
@given(lists(10), lists(10), lists(2), lists(8))
def test_3_12_transition_probabilities_cancel(theta, old_theta, coin, returns):
    chance = vector(*[softmax([0.0, coin[y1]])[x2] for y1, x2, _ in TRAJECTORIES])

    def whole(values):
        return two_turns(values) + chance.log()

    close(whole(vector(*theta)).exp().sum(), 1)
    for group in (range(8), [3, 3, 3, 0], [5, 6, 6, 1, 1]):
        arguments = vector(*theta), vector(*old_theta), list(group), vector(*returns)
        close(lesson.two_gradients(whole, *arguments)[0], lesson.two_gradients(two_turns, *arguments)[0])


@pytest.mark.parametrize("coin, low, high", [(False, 0, 1e-6), (True, 0.01, 0.25)])
def test_only_luck_keeps_a_policy_from_consistency(coin, low, high):
    """The least Var(a) over all policies, by descent from the uniform anchor: 0 if x² = y¹ for sure, not for a coin."""
    weights = vector(*[0.25 * (0.5 if coin else x2 == y1) for y1, x2, _ in TRAJECTORIES])
    theta = torch.zeros(10, dtype=torch.float64)
    for _ in range(200):
        logits = theta.clone().requires_grad_()
        a = vector(*RETURNS) - 0.5 * (two_turns(logits) - math.log(0.25))
        loss = weights @ (a - weights @ a) ** 2
        theta = theta - 2 * torch.autograd.grad(loss, logits)[0]
    assert low <= loss.item() <= high


@pytest.mark.parametrize("tau", [0.3, 0.5, 2.0])
@pytest.mark.parametrize("lucky", [0.5, 0.2])
def test_the_dice_that_the_optimum_would_load(tau, lucky):
    """π* wants π*(x² = 1) ∝ p·e^{1/τ}. Copying all of π* but the dice leaves a = x² + const., variance p(1−p)."""
    old = vector(*[0.25 * (lucky if x2 else 1 - lucky) for _, x2, _ in TRAJECTORIES])
    optimum = lesson.kl_regularised_optimum(old, vector(*RETURNS), tau=tau).view(2, 2, 2)
    close(optimum[:, 1].sum(), lucky * math.exp(1 / tau) / (lucky * math.exp(1 / tau) + 1 - lucky))
    copied = optimum.sum((1, 2), keepdim=True) * optimum / optimum.sum(2, keepdim=True)  # P(y¹)·P(y² | y¹, x²)
    a = vector(*RETURNS) - tau * (copied.flatten().log() - math.log(0.25))
    close(old @ (a - old @ a) ** 2, lucky * (1 - lucky))


# ---------------------------------------------------------------- 7: the bandit on fixed data


@EXAMPLES
@given(lists(4), lists(4), lists(4))
def test_3_13_drift_is_the_mean_update_from_any_policy(behaviour, rewards, theta):
    data, probs = softmax(behaviour), softmax(theta)
    mean = sum(p * r for p, r in zip(data, rewards))
    expected = [sum(data[y] * (rewards[y] - mean) * ((arm == y) - probs[arm]) for y in range(4)) for arm in range(4)]
    close(lesson.bandit_drift(vector(*data), vector(*rewards)), expected)


@pytest.mark.parametrize("group_size", [2, 4])
def test_3_13_groups_give_a_share_of_the_drift(group_size):
    """Over every group: the group mean gives (K−1)/K·c (the page: K = 3), leaving the response out gives c."""
    logits = vector(0.7, 0.1, -0.4).requires_grad_()
    mean, loo = vector(0, 0, 0), vector(0, 0, 0)
    for group in itertools.product(range(3), repeat=group_size):
        chance, rewards = math.prod(BEHAVIOUR[y] for y in group), vector(*[REWARDS[y] for y in group])
        logprobs = logits.log_softmax(-1)[list(group)]
        baseline = (rewards.sum() - rewards) / (group_size - 1)
        losses = lesson.group_reinforce_loss(logprobs, rewards), -((rewards - baseline) * logprobs).mean()
        for total, loss in zip((mean, loo), losses):
            total -= chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    close(mean, (group_size - 1) / group_size * np.array(DRIFT))
    close(loo, DRIFT)


def train_by_autograd(behaviour, *, steps, step_size=1.0, importance_sampling=False):
    """J on the way of REINFORCE with the baseline μ, by autograd; the ratio π_θ/π_b is detached."""
    theta, values, data, rewards = vector(0, 0, 0), [], vector(*behaviour), vector(*REWARDS)
    for _ in range(steps + 1):
        logits = theta.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        values.append(logprobs.detach().exp() @ rewards)
        weights = logprobs.detach().exp() / data if importance_sampling else torch.ones(3)
        loss = -(data * weights * (rewards - data @ rewards) * logprobs).sum()
        theta = theta - step_size * torch.autograd.grad(loss, logits)[0]
    return torch.stack(values), theta


def test_3_13_fixed_data_walk_a_straight_line_to_the_wrong_arm():
    values, theta = train_by_autograd(BEHAVIOUR, steps=600, step_size=0.5)
    close(theta, 601 * 0.5 * np.array(DRIFT))
    close(lesson.train_bandit(vector(*BEHAVIOUR), steps=600, step_size=0.5), values)
    # ηt = 10 is step 20: e^−1.74, e^1.32, e^.42 = .1755, 3.7434, 1.5220, sum 5.4409
    probs = np.exp([-1.74, 1.32, 0.42]) / np.exp([-1.74, 1.32, 0.42]).sum()
    close(probs, [0.032259, 0.688015, 0.279726], 1e-6)
    close(values[[0, 20]], [0.6, probs @ REWARDS], 1e-12)
    assert theta.argmax() == 1 and 0.8 < values[-1] < 0.8 + 1e-9


def test_3_13_the_peak_is_where_the_covariance_of_drift_and_reward_is_zero():
    def slope(s):
        probs = np.exp(s * np.array(DRIFT)) / np.exp(s * np.array(DRIFT)).sum()
        return probs @ (np.array(DRIFT) * REWARDS) - (probs @ DRIFT) * (probs @ REWARDS)

    low, high = 1.0, 100.0
    assert slope(low) > 0 > slope(high)
    assert slope(0) == pytest.approx((0.132 * 0.8 + 0.042) / 3) and slope(20) == pytest.approx(-0.0017, abs=5e-5)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    claim = next(c for c in lesson.lesson.claims if c["claim"].startswith("J peaks"))
    assert claim["measured"][0] == pytest.approx(low, abs=0.006) == pytest.approx(13.2, abs=0.05)
    late = lesson.train_bandit(vector(*BEHAVIOUR), steps=200)[14:]  # past the peak J only falls, and never below .8
    assert late.diff().max() < 0 and late.min() > 0.8 and late.max() < claim["measured"][1] < 0.836


@pytest.mark.parametrize("behaviour", [BEHAVIOUR, BEHAVIOUR[::-1]])
def test_3_14_weighting_by_the_ratio_is_fresh_data_at_every_step(behaviour):
    values, theta = train_by_autograd(behaviour, steps=300, importance_sampling=True)
    close(lesson.train_bandit(vector(1, 1, 1) / 3, steps=300, refresh_every=1), values)
    expected = np.zeros(3)
    for _ in range(301):
        probs = np.exp(expected) / np.exp(expected).sum()
        expected = expected + probs * (np.array(REWARDS) - probs @ REWARDS)
    close(theta, expected)
    assert theta.argmax() == 2


def test_refreshed_data_repair_it():
    data, theta, values = np.array(BEHAVIOUR), np.zeros(3), []
    for step in range(301):
        probs = np.exp(theta) / np.exp(theta).sum()
        values.append(probs @ REWARDS)
        data = probs if step in range(7, 301, 7) else data
        theta = theta + 0.7 * data * (np.array(REWARDS) - data @ REWARDS)
    close(lesson.train_bandit(vector(*BEHAVIOUR), steps=300, step_size=0.7, refresh_every=7), values)
    assert values[-1] > 0.99
    assert torch.stack([run[-1] for run in lesson.runs.values()]).tolist() == pytest.approx([0.8, 1, 1, 1], abs=2e-3)


def test_threshold_of_the_third_arm_in_both_conventions():
    q = Fraction(8, 35)  # arms 1 and 2 share the rest 1 : 2
    data = [(1 - q) / 3, 2 * (1 - q) / 3, q]
    mean = data[1] * Fraction(4, 5) + data[2]
    assert data[1] * (Fraction(4, 5) - mean) == data[2] * (1 - mean)
    q = (0.82 - math.sqrt(0.4036)) / 0.8  # π_b(1) = .3: μ = .8·(.7−q) + q
    mean = 0.8 * (0.7 - q) + q
    assert (0.7 - q) * (0.8 - mean) == pytest.approx(q * (1 - mean), abs=1e-15) and q == pytest.approx(0.2309, abs=5e-5)
    for share, value in ((0.225, 0.8), (0.235, 1.0)):  # on either side, by training
        for first in ((1 - share) / 3, 0.3):
            run = lesson.train_bandit(vector(first, 1 - first - share, share), steps=100, step_size=1e4)
            assert run[-1] == pytest.approx(value, abs=1e-6)


# ---------------------------------------------------------------- 8: responses that nobody sampled


def test_3_15_the_unseen_response_takes_over():
    """By training: the closed form holds, the sampled look better at every step, and J falls at every step."""
    tokens, rewards, theta, path = vector([0, 0], [0, 1], [1, 0], [1, 1]), vector(0.3, 1, 1, 0), vector(0, 0), []
    for _ in range(61):
        logits = theta.clone().requires_grad_()
        logprobs = torch.nn.functional.logsigmoid((2 * tokens - 1) * logits).sum(-1)
        path.append(logprobs.detach().exp())
        theta = theta - torch.autograd.grad(lesson.group_reinforce_loss(logprobs[:3], rewards[:3]), logits)[0]
    path = torch.stack(path)
    one = [1 / (1 + math.exp(-7 * t / 90)) for t in range(61)]
    close(path, [[(1 - p) ** 2, (1 - p) * p, p * (1 - p), p * p] for p in one])
    close(lesson.probs, path)
    assert lesson.sampled.diff().min() > 0 and lesson.value.diff().max() < 0 and path[-1, 3] > 0.9
    close(lesson.value[0], 0.575)


# ---------------------------------------------------------------- bad input, signatures


two = vector(0, 1)


@pytest.mark.parametrize("call, words", [
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.6), two, tau=0.5), "probabilities"),
    (lambda: lesson.kl_regularised_optimum(vector(1.5, -0.5), two, tau=0.5), "probabilities"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, math.nan), two, tau=0.5), "probabilities"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.5), vector(0, 1, 2), tau=0.5), "as many rewards"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.5), two, tau=0.0), "tau"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.5), two, tau=math.inf), "tau"),
    (lambda: lesson.pairwise_surrogate_loss(two, two, two, tau=-1.0), "tau"),
    (lambda: lesson.pairwise_surrogate_loss(two, two, two, tau=math.nan), "tau"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0), vector(0), vector(1), tau=1.0), "K ≥ 2"),
    (lambda: lesson.pairwise_surrogate_loss(*[torch.tensor(0.0)] * 3, tau=1.0), "K ≥ 2"),
    (lambda: lesson.pairwise_surrogate_loss(two, two, vector(0, 1, 1), tau=1.0), "need three"),
    (lambda: lesson.pairwise_surrogate_loss(two, two.view(2, 1), two, tau=1.0), "need three"),
    (lambda: lesson.pairwise_surrogate_loss(two, two, two, tau=1.0, pair_weights=torch.ones(3, 3)), "symmetric"),
    (lambda: lesson.pairwise_surrogate_loss(two, two, two, tau=1.0, pair_weights=vector([0, 1], [2, 0])), "symmetric"),
    (lambda: lesson.bandit_drift(vector(0.5, 0.4), two), "probabilities"),
    (lambda: lesson.bandit_drift(vector(0.5, 0.5), vector(0, 1, 1)), "as many rewards"),
])
def test_bad_input_is_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("function, positional, keywords", [
    ("kl_regularised_optimum", ["old_probs", "rewards"], ["tau"]),
    ("pairwise_surrogate_loss", ["logprobs", "old_logprobs", "rewards"], ["tau", "scale", "pair_weights"]),
    ("bandit_drift", ["behaviour_probs", "rewards"], []),
])
def test_signatures(function, positional, keywords):
    parameters = inspect.signature(getattr(lesson, function)).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keywords


# ---------------------------------------------------------------- the script and its exercises


@pytest.mark.slow
def test_quick_run_with_another_seed(tmp_path):
    command = [sys.executable, SCRIPT, "--quick", "--seed", "3", "--out", tmp_path, "--json", tmp_path / "claims.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert max(map(len, result.stdout.replace(str(tmp_path), "figures").splitlines())) <= 100
    rows = json.loads((tmp_path / "claims.json").read_text())
    assert len({row["claim"] for row in rows}) == len(rows) == len(lesson.lesson.claims)
    for name in ("03_pairwise", "03_pitfalls", "03_unseen"):
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def answer(monkeypatch, number, text):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--exercise", str(number), "--answer", str(text)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return stop.value.code


@pytest.mark.parametrize("number, right, wrong", [(1, "1.125", "2"), (2, "2", "3")])
def test_predictions(monkeypatch, number, right, wrong):
    assert answer(monkeypatch, number, right) == 0
    assert answer(monkeypatch, number, wrong) == 1


def test_the_function_to_write(monkeypatch, tmp_path):
    path = tmp_path / "data.py"
    path.write_text("def data(share):\n    return [1 - 2 * share, share, share]\n")  # equally frequent: the better wins
    assert not answer(monkeypatch, 3, path)
    path.write_text("def data(share):\n    return [0.9 - share, 0.1, share]\n")
    assert "misses arm 3" in answer(monkeypatch, 3, path)
    assert "arm 3's share" in lesson.check_data(lambda share: [0.2, 0.2, 0.6])
