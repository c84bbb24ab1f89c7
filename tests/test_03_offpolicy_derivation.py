"""Lesson 03 against references of another kind: loops in plain python, closed forms, exact fractions.

Nothing here calls a lesson function to make the value that another lesson function is held to, and no number is
copied from a run: literals stand beside their derivation or come from the worked examples of the paper's bandit.
"""

import importlib
import inspect
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

lesson = importlib.import_module("03_offpolicy_derivation")

EXAMPLES = settings(max_examples=25, deadline=None)
REWARDS = [0.0, 0.8, 1.0]
BEHAVIOUR = [0.3, 0.6, 0.1]
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


def pairwise_by_loops(logprobs, old_logprobs, rewards, tau, *, scale=True, weights=None):
    adjusted = [r - tau * (new - old) for r, new, old in zip(rewards, logprobs, old_logprobs)]
    size = len(rewards)
    total = sum((1 if weights is None else weights[i][j]) * (adjusted[i] - adjusted[j]) ** 2
                for i in range(size) for j in range(i + 1, size))
    return total / size**2 / ((1 + tau) ** 2 if scale else 1)


def central_differences(function, theta, step=1e-5):
    """∇function at theta (P,) without autograd."""
    columns = []
    for index in range(len(theta)):
        nudge = torch.zeros_like(theta)
        nudge[index] = step
        columns.append((function(theta + nudge) - function(theta - nudge)) / (2 * step))
    return torch.stack(columns)


# ---------------------------------------------------------------- (1) objective and optimum


def test_optimum_on_the_bandit_by_hand():
    # weights .3·e^0, .6·e^1.6, .1·e^2 = .3, 2.9718194, .7389056; Z = 4.0107251
    weights = [0.3, 0.6 * math.exp(1.6), 0.1 * math.exp(2.0)]
    optimum = lesson.kl_regularised_optimum(vector(*BEHAVIOUR), vector(*REWARDS), tau=0.5)
    close(optimum, [w / sum(weights) for w in weights], 1e-15)
    close(optimum, [0.0747995, 0.7409681, 0.1842324], 1e-7)


@EXAMPLES
@given(lists(4), lists(4), lists(4), st.floats(0.5, 5))  # τ ≥ ½ keeps every probability above 1e-6, far from rounding
def test_no_distribution_beats_the_optimum(anchor, rewards, other, tau):
    old, candidate = softmax(anchor), softmax(other)
    optimum = lesson.kl_regularised_optimum(vector(*old), vector(*rewards), tau=tau).tolist()

    def objective(probs):
        return sum(p * (r - tau * math.log(p / q)) for p, q, r in zip(probs, old, rewards))

    assert objective(optimum) >= objective(candidate) - 1e-12
    # and moving half of the smallest probability between any two responses loses strictly
    for i, j in itertools.permutations(range(4), 2):
        moved = list(optimum)
        shift = 0.5 * min(moved)
        moved[i], moved[j] = moved[i] + shift, moved[j] - shift
        assert objective(optimum) > objective(moved)
    close(lesson.regularised_objective(vector(*candidate), vector(*old), vector(*rewards), tau=tau),
          objective(candidate))


@EXAMPLES
@given(lists(5), lists(5), taus)
def test_the_optimum_is_pairwise_consistent(anchor, rewards, tau):
    old = softmax(anchor)
    optimum = lesson.kl_regularised_optimum(vector(*old), vector(*rewards), tau=tau).tolist()
    for i, j in itertools.combinations(range(5), 2):
        left = rewards[i] - tau * (math.log(optimum[i]) - math.log(old[i]))
        right = rewards[j] - tau * (math.log(optimum[j]) - math.log(old[j]))
        assert left == pytest.approx(right, abs=1e-10)


def test_optimum_at_the_edges():
    old, rewards = vector(*BEHAVIOUR), vector(*REWARDS)
    close(lesson.kl_regularised_optimum(old, rewards, tau=1e9), BEHAVIOUR, 1e-8)  # τ → ∞: stay
    close(lesson.kl_regularised_optimum(old, rewards, tau=1e-4), [0, 0, 1])  # τ → 0: the best arm; e^10000 overflows
    shifted = lesson.kl_regularised_optimum(old, rewards + 7, tau=0.5)
    close(shifted, lesson.kl_regularised_optimum(old, rewards, tau=0.5))
    close(lesson.kl_regularised_optimum(vector(0.5, 0.5, 0.0), rewards, tau=0.01)[2], 0)  # π_t = 0 stays 0
    integers = lesson.kl_regularised_optimum(old, torch.tensor([0, 1, 1]), tau=0.3)
    factor = math.exp(1 / 0.3)
    close(integers, np.array([0.3, 0.6 * factor, 0.1 * factor]) / (0.3 + 0.7 * factor), 1e-15)
    close(lesson.regularised_objective(vector(0, 1, 0), vector(0, 0.5, 0.5), rewards, tau=2.0), 0.8 - 2 * math.log(2))


# ---------------------------------------------------------------- (3) the surrogate loss


def test_worked_example():
    # a = r at the anchor: pairs .8², 1², .2² sum to 1.68; /9 = .186666…; /(1.5)² = .0829629…
    zeros = torch.zeros(3, dtype=torch.float64)
    assert 1.68 / 9 == pytest.approx(0.1866666667, abs=1e-10)
    for scale, value, gradient in ((False, 0.1866666667, [0.2, -0.066667, -0.133333]),
                                   (True, 0.0829629630, [0.088889, -0.029630, -0.059259])):
        logits = zeros.clone().requires_grad_()
        logprobs = torch.log_softmax(logits, -1)
        loss = lesson.pairwise_surrogate_loss(logprobs, logprobs.detach(), vector(*REWARDS), tau=0.5, scale=scale)
        loss.backward()
        close(loss, value, 1e-10)
        close(logits.grad, gradient, 1e-6)


@EXAMPLES
@given(st.integers(2, 6).flatmap(lambda k: st.tuples(lists(k), lists(k), lists(k), lists(k))), taus, st.booleans())
def test_loss_is_the_double_loop_and_the_variance(group, tau, scale):
    new, old, rewards, raw = group
    loss = lesson.pairwise_surrogate_loss(vector(*new), vector(*old), vector(*rewards), tau=tau, scale=scale)
    close(loss, pairwise_by_loops(new, old, rewards, tau, scale=scale))
    adjusted = [r - tau * (a - b) for a, b, r in zip(new, old, rewards)]
    mean = sum(adjusted) / len(adjusted)
    close(loss, sum((a - mean) ** 2 for a in adjusted) / len(adjusted) / ((1 + tau) ** 2 if scale else 1))

    weights = [[u * v + abs(u - v) for u in raw] for v in raw]
    weighted = lesson.pairwise_surrogate_loss(vector(*new), vector(*old), vector(*rewards), tau=tau, scale=scale,
                                              pair_weights=torch.tensor(weights, dtype=torch.float64))
    close(weighted, pairwise_by_loops(new, old, rewards, tau, scale=scale, weights=weights))


def test_leading_dimensions_are_separate_groups():
    generator = torch.Generator().manual_seed(3)
    new, old, rewards = torch.randn(3, 2, 4, 5, dtype=torch.float64, generator=generator)
    weights = torch.rand(2, 4, 5, 5, dtype=torch.float64, generator=generator)
    weights = weights + weights.mT
    loss = lesson.pairwise_surrogate_loss(new, old, rewards, tau=0.7, pair_weights=weights)
    assert loss.shape == (2, 4)
    for i, j in itertools.product(range(2), range(4)):
        group = [x[i, j].tolist() for x in (new, old, rewards)]
        close(loss[i, j], pairwise_by_loops(*group, 0.7, weights=weights[i, j].tolist()))
        mean = sum(group[2]) / 5
        reinforce = -sum((r - mean) * v for v, r in zip(group[0], group[2])) / 5
        close(lesson.group_reinforce_loss(new, rewards)[i, j], reinforce)


def test_the_anchor_is_a_constant():
    """Passing one tensor twice is the natural call at θ_t; the anchor must not cancel the gradient."""
    logits = vector(0.3, -0.2, 0.1).requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    lesson.pairwise_surrogate_loss(logprobs, logprobs, vector(*REWARDS), tau=0.5).backward()
    assert logits.grad.norm() > 0.05


# ---------------------------------------------------------------- (4) one step, for data from anywhere


@EXAMPLES
@given(lists(4), st.lists(st.integers(0, 3), min_size=2, max_size=7), st.data(), taus, st.booleans())
def test_one_step_is_reinforce_on_any_group_of_a_bandit(theta, group, data, tau, scale):
    """Any arms, repeated or not, any rewards: the gradient is −constant·(1/K) Σ (r − r̄)·(e_y − π), written out."""
    rewards = data.draw(lists(len(group)))
    probs, mean = softmax(theta), sum(rewards) / len(rewards)
    constant = 2 * tau / (1 + tau) ** 2 if scale else 2 * tau
    expected = [-constant * sum((r - mean) * ((arm == y) - probs[arm]) for y, r in zip(group, rewards)) / len(group)
                for arm in range(4)]
    logits = vector(*theta).requires_grad_()
    logprobs = torch.log_softmax(logits, -1)[group]
    lesson.pairwise_surrogate_loss(logprobs, logprobs.detach(), vector(*rewards), tau=tau, scale=scale).backward()
    close(logits.grad, expected)
    logits.grad = None
    loss = lesson.group_reinforce_loss(torch.log_softmax(logits, -1)[group], vector(*rewards))
    (lesson.step_constant(tau, scale=scale) * loss).backward()
    close(logits.grad, expected)


@EXAMPLES
@given(lists(5), lists(5))
def test_the_algebra_of_step_four(rewards, values):
    mean = sum(rewards) / 5
    pairs = sum((rewards[i] - rewards[j]) * (values[i] - values[j]) for i, j in itertools.combinations(range(5), 2))
    assert pairs == pytest.approx(5 * sum((r - mean) * v for r, v in zip(rewards, values)), abs=1e-10)
    close(lesson.group_reinforce_loss(vector(*values), vector(*rewards)), -pairs / 25)


def test_prefix_tree_lists_every_sequence_once():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(13, 3, dtype=torch.float64, generator=generator)
    prefixes = [(), (0,), (1,), (2,), *itertools.product(range(3), repeat=2)]
    rows = {prefix: row for row, prefix in enumerate(prefixes)}
    expected = []
    for sequence in itertools.product(range(3), repeat=3):
        probability = 1.0
        for t in range(3):
            probability *= softmax(logits[rows[sequence[:t]]].tolist())[sequence[t]]
        expected.append(math.log(probability))
    close(lesson.prefix_tree_logprobs(logits, length=3), expected)
    features = lesson.prefix_one_hots(vocabulary=3, length=3)
    assert features.shape == (13, 6)
    for prefix, row in rows.items():
        hot = [float(place < len(prefix) and prefix[place] == token) for place in range(2) for token in range(3)]
        assert features[row].tolist() == hot


@pytest.mark.parametrize("name", ["bandit", "sequence table", "network"])
@pytest.mark.parametrize("tau", [0.1, 2.0])
def test_one_step_is_reinforce_for_every_policy_by_finite_differences(name, tau):
    theta, policy = lesson.tiny_policies(torch.Generator().manual_seed(5))[name]
    old = policy(theta)
    close(old.exp().sum(), 1.0)
    rewards = torch.rand(len(old), dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    sources = lesson.data_sources(old, generator=torch.Generator().manual_seed(7))
    assert len(sources) == 5
    for group in sources.values():
        chosen = rewards[group]
        scores = central_differences(lambda t: policy(t)[group], theta)  # (P, K)
        by_hand = -2 * tau / (1 + tau) ** 2 * scores @ (chosen - chosen.mean()) / len(group)
        surrogate = central_differences(lambda t: torch.tensor(pairwise_by_loops(
            policy(t)[group].tolist(), old[group].tolist(), chosen.tolist(), tau), dtype=torch.float64), theta)
        gradients = lesson.two_gradients(policy, theta, theta, group, rewards, tau=tau)
        for gradient in gradients:
            close(gradient, by_hand, 1e-8)
            close(gradient, surrogate, 1e-8)


def test_network_policy_is_autoregressive():
    """Sequences with one prefix share its probability: changing only later tokens must not change the earlier ones."""
    theta, policy = lesson.tiny_policies(torch.Generator().manual_seed(5))["network"]
    joint = policy(theta).exp().view(3, 3, 3)
    second = joint.sum(2) / joint.sum((1, 2))[:, None]  # P(token 2 | token 1)
    assert (second[0] - second[1]).abs().max() > 1e-3  # it does look at its prefix
    close(second.sum(1), np.ones(3))
    assert not policy(theta + 0.1).equal(policy(theta))


def test_data_sources():
    logprobs = torch.log_softmax(vector(0.0, 3.0, -1.0, 2.0, 5.0, 1.0), -1)
    sources = lesson.data_sources(logprobs, generator=torch.Generator().manual_seed(0))
    assert sorted(sources["adversarial (least likely)"].tolist()) == [0, 1, 2, 3, 5]  # all but the favourite, arm 4
    assert sources["duplicated"].unique().numel() == 2
    assert all(len(group) == 5 and 0 <= group.min() and group.max() < 6 for group in sources.values())
    many = [lesson.data_sources(logprobs, generator=torch.Generator().manual_seed(seed)) for seed in range(200)]
    on_policy, uniform = (torch.stack([m[key] for m in many]) for key in ("on-policy", "uniform"))
    assert (on_policy == 4).double().mean() == pytest.approx(logprobs[4].exp().item(), abs=0.06)  # 1000 draws, 4 sd
    assert (uniform == 4).double().mean() == pytest.approx(1 / 6, abs=0.05)


def test_the_one_step_table_sees_a_wrong_loss(monkeypatch):
    clean = lesson.one_step_table(torch.Generator().manual_seed(0), taus=(0.5,), repeats=1)
    assert max(gap for gap, _ in clean.values()) < 1e-12 and min(size for _, size in clean.values()) > 1e-2
    monkeypatch.setattr(lesson, "group_reinforce_loss", lambda logprobs, rewards: -(rewards * logprobs).mean(-1))
    without_baseline = lesson.one_step_table(torch.Generator().manual_seed(0), taus=(0.5,), repeats=1)
    assert min(gap for gap, _ in without_baseline.values()) > 1e-3


# ---------------------------------------------------------------- away from the anchor


@EXAMPLES
@given(lists(3), lists(3), lists(3), taus)
def test_away_from_the_anchor_on_a_bandit(theta, old_theta, rewards, tau):
    """The surrogate's gradient is −constant·(1/K) Σ (a − ā)(e_y − π), a = r − τ·d; REINFORCE has r in place of a."""
    group = [0, 2, 2, 1]
    new, old = softmax(theta), softmax(old_theta)
    chosen = [rewards[y] for y in group]
    adjusted = [r - tau * math.log(new[y] / old[y]) for y, r in zip(group, chosen)]

    def by_hand(values):
        mean = sum(values) / 4
        return [-2 * tau / (1 + tau) ** 2 / 4 * sum((v - mean) * ((arm == y) - new[arm]) for y, v in zip(group, values))
                for arm in range(3)]

    surrogate, reinforce = lesson.two_gradients(lambda t: torch.log_softmax(t, -1), vector(*theta), vector(*old_theta),
                                                torch.tensor(group), vector(*rewards), tau=tau)
    close(surrogate, by_hand(adjusted))
    close(reinforce, by_hand(chosen))


def test_parting_follows_taylor():
    def bandit(theta):
        return torch.log_softmax(theta, -1)

    theta, direction, tau = vector(0.3, -0.2, 0.1), vector(0.6, -0.8, 0.0), 0.5
    group, distances = torch.tensor([0, 1, 1, 2]), vector(0.5, 0.25)
    differences, slope, remainders = lesson.parting_of_gradients(
        bandit, theta, group, vector(*REWARDS), direction, tau=tau, distances=distances)
    # In a bandit d_i − d̄ = h·(v_yi − mean) exactly: v = (.6, −.8, −.8, 0), mean −.25, centred (.85, −.55, −.55, .25).
    # Sum per arm / 4 = (.2125, −.275, .0625), times constant·τ = (1/2.25)·.5: nothing is left at any distance.
    expected = np.array([0.2125, -0.275, 0.0625]) * (2 * tau / (1 + tau) ** 2) * tau
    close(slope, np.linalg.norm(expected))
    close(differences, np.linalg.norm(expected) * distances.numpy())
    close(remainders, [0, 0])

    theta, policy = lesson.tiny_policies(torch.Generator().manual_seed(2))["sequence table"]
    direction = torch.randn(39, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rewards = torch.rand(27, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    distances = vector(2e-3, 1e-3)
    differences, slope, remainders = lesson.parting_of_gradients(
        policy, theta, torch.tensor([0, 4, 9, 20]), rewards, direction, tau=tau, distances=distances)
    close(differences / distances, [slope, slope], 0.01 * slope.item())
    assert remainders[0] / remainders[1] == pytest.approx(4, rel=0.05)


# ---------------------------------------------------------------- one minimiser, many steps


@EXAMPLES
@given(lists(4), lists(4), lists(4), lists(4), taus)
def test_population_loss_is_half_the_mean_squared_violation(behaviour, anchor, theta, rewards, tau):
    data, old, new = softmax(behaviour), softmax(anchor), softmax(theta)
    adjusted = [r - tau * math.log(p / q) for p, q, r in zip(new, old, rewards)]
    pairs = itertools.product(range(4), repeat=2)
    expected = sum(data[i] * data[j] * (adjusted[i] - adjusted[j]) ** 2 / 2 for i, j in pairs) / (1 + tau) ** 2
    loss = lesson.population_surrogate_loss(vector(*new).log(), vector(*old).log(), vector(*rewards), vector(*data),
                                            tau=tau)
    close(loss, expected)
    # … and K/(K−1) times the mean of the finite-sample loss over every group of K = 3 that the data can hold
    mean = 0.0
    for group in itertools.product(range(4), repeat=3):
        chance = math.prod(data[y] for y in group)
        logprobs, old_logprobs = ([math.log(p[y]) for y in group] for p in (new, old))
        mean += chance * pairwise_by_loops(logprobs, old_logprobs, [rewards[y] for y in group], tau)
    close(loss, 1.5 * mean)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([[0.3, 0.6, 0.1], [1 / 3, 1 / 3, 1 / 3], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6], [0.7, 0.15, 0.15]]))
def test_descent_ends_at_one_place_but_starts_in_its_own_direction(behaviour):
    path = lesson.descend_population_loss(vector(*behaviour), vector(*BEHAVIOUR), vector(*REWARDS), tau=0.5)
    weights = [0.3, 0.6 * math.exp(1.6), 0.1 * math.exp(2.0)]
    close(torch.softmax(path[-1], -1), [w / sum(weights) for w in weights], 1e-10)
    mean = sum(p * r for p, r in zip(behaviour, REWARDS))
    # −∇ = 2τ/(1+τ)²·π_b(r − μ) = (4/9)·π_b(r − μ): the single step knows the data
    close(path[1] - path[0], [4.0 * 4 / 9 * p * (r - mean) for p, r in zip(behaviour, REWARDS)])


def test_two_responses_are_a_preference():
    tau, beta, theta = 0.5, 0.3, vector(0.3, -0.2, 0.1)
    probs = softmax(theta.tolist())

    def step(group, rewards):
        logits = theta.clone().requires_grad_()
        logprobs = torch.log_softmax(logits, -1)[group]
        lesson.pairwise_surrogate_loss(logprobs, logprobs.detach(), vector(*rewards), tau=tau).backward()
        return -logits.grad

    # −∇L̂ = constant/4·(r_1 − r_2)·(e_1 − e_2), constant = 4/9; the π parts of the two scores cancel
    close(step([2, 0], [1.0, 0.0]), [-1 / 9, 0, 1 / 9])
    close(step([0, 2], [1.0, 0.0]), [1 / 9, 0, -1 / 9])  # the other label: the other way
    close(step([2, 0], [0.5, 0.5]), [0, 0, 0])  # a tie teaches nothing
    # DPO at the anchor: σ'(0)… −∇(−log σ(β·Δ)) = β/2·(e_w − e_l), so parallel with ratio (4/9)/(2β)
    logits = theta.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    margin = (logprobs[2] - math.log(probs[2])) - (logprobs[0] - math.log(probs[0]))
    (-torch.nn.functional.logsigmoid(beta * margin)).backward()
    close(step([2, 0], [1.0, 0.0]), -logits.grad.numpy() * (4 / 9) / (2 * beta))


# ---------------------------------------------------------------- the bandit


def test_drift_by_hand():
    # μ = .6·.8 + .1·1 = .58; .3·(−.58), .6·.22, .1·.42
    close(lesson.bandit_drift(vector(*BEHAVIOUR), vector(*REWARDS)), [-0.174, 0.132, 0.042], 1e-15)


@EXAMPLES
@given(lists(4), lists(4), lists(4))
def test_drift_is_the_mean_update_from_any_policy(behaviour, rewards, theta):
    data, probs = softmax(behaviour), softmax(theta)
    mean = sum(p * r for p, r in zip(data, rewards))
    expected = [sum(data[y] * (rewards[y] - mean) * ((arm == y) - probs[arm]) for y in range(4)) for arm in range(4)]
    drift = lesson.bandit_drift(vector(*data), vector(*rewards))
    close(drift, expected)
    close(drift.sum(), 0)


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("probs", [[Fraction(1, 3)] * 3, [Fraction(7, 10), Fraction(1, 10), Fraction(2, 10)]])
def test_mean_group_update_over_every_group(group_size, probs):
    """In exact fractions: the group mean gives (K−1)/K of c, leaving the response out gives c, at any π_θ."""
    data = [Fraction(3, 10), Fraction(6, 10), Fraction(1, 10)]
    rewards = [Fraction(0), Fraction(8, 10), Fraction(1)]
    mean, loo = [Fraction(0)] * 3, [Fraction(0)] * 3
    for group in itertools.product(range(3), repeat=group_size):
        chance = math.prod(data[y] for y in group)
        total = sum(rewards[y] for y in group)
        for y, arm in itertools.product(group, range(3)):
            score = (arm == y) - probs[arm]
            mean[arm] += chance * (rewards[y] - total / group_size) / group_size * score
            loo[arm] += chance * (rewards[y] - (total - rewards[y]) / (group_size - 1)) / group_size * score
    assert loo == [Fraction(-174, 1000), Fraction(132, 1000), Fraction(42, 1000)]
    assert mean == [Fraction(group_size - 1, group_size) * c for c in loo]
    for leave_one_out, expected in ((False, mean), (True, loo)):
        update = lesson.mean_group_update(vector(*BEHAVIOUR), vector(*REWARDS), group_size=group_size,
                                          leave_one_out=leave_one_out)
        close(update, [float(e) for e in expected], 1e-14)


def test_fixed_data_walks_a_straight_line_to_the_wrong_arm():
    path = lesson.train_bandit(vector(*BEHAVIOUR), vector(*REWARDS), steps=600, step_size=0.5)
    assert path.shape == (601, 3)
    line = np.arange(601)[:, None] * 0.5 * np.array([-0.174, 0.132, 0.042])
    close(path, line, 1e-10)
    value = torch.softmax(path, -1) @ vector(*REWARDS)
    close(value[0], 0.6, 1e-12)
    # ηt = 10 is step 20: e^−1.74, e^1.32, e^.42 = .1755, 3.7434, 1.5220, sum 5.4409
    close(torch.softmax(path[20], -1), [0.032259, 0.688015, 0.279726], 1e-6)
    close(value[20], 0.830138, 1e-6)
    peak = value.argmax().item()
    assert 0 < peak < 600 and value[peak] > 0.835 and value[-1] < value[peak] and 0.8 < value[-1] < 0.8 + 1e-9
    assert torch.softmax(path[-1], -1).argmax() == 1


def test_importance_sampling_and_refreshing_repair_it():
    rewards, data = np.array(REWARDS), np.array(BEHAVIOUR)
    theta = np.zeros(3)
    path = lesson.train_bandit(vector(*BEHAVIOUR), vector(*REWARDS), steps=300, importance_sampling=True, step_size=0.7)
    for step in range(300):
        probs = np.exp(theta) / np.exp(theta).sum()
        theta = theta + 0.7 * probs * (rewards - probs @ rewards)
        close(path[step + 1], theta, 1e-10)
    assert torch.softmax(path[-1], -1)[2] > 0.97
    theta = np.zeros(3)
    path = lesson.train_bandit(vector(*BEHAVIOUR), vector(*REWARDS), steps=300, refresh_every=7)
    for step in range(300):
        if step in range(7, 300, 7):
            data = np.exp(theta) / np.exp(theta).sum()
        theta = theta + data * (rewards - data @ rewards)
        close(path[step + 1], theta, 1e-10)
    assert torch.softmax(path[-1], -1)[2] > 0.97


def test_threshold_of_the_third_arm():
    # With q = π_b(3), arms 1 : 2 as 1 : 2 and μ = (2/3)(1−q)·.8 + q:  c_3 = c_2  ⇔  q(1−μ) = (2/3)(1−q)(.8−μ).
    # 1 − μ = (7/15)(1−q) and .8 − μ = 4/15 − (7/15)q; divide by (1−q): 7q/15 = (2/3)(4/15 − 7q/15), so q = 8/35.
    q = Fraction(8, 35)
    data = [(1 - q) / 3, 2 * (1 - q) / 3, q]
    mean = data[1] * Fraction(4, 5) + data[2]
    assert data[1] * (Fraction(4, 5) - mean) == data[2] * (1 - mean)
    close(lesson.data_with_third_arm(float(q)), [float(p) for p in data], 1e-15)
    assert lesson.lead_of_third_arm(8 / 35) == pytest.approx(0, abs=1e-15)
    assert lesson.lead_of_third_arm(0.1) == pytest.approx(0.042 - 0.132, abs=1e-12)
    assert lesson.bisect(lesson.lead_of_third_arm, 0.05, 0.95) == pytest.approx(8 / 35, abs=1e-13)
    for share, winner in ((0.2, 1), (0.26, 2)):  # on either side, by training
        path = lesson.train_bandit(lesson.data_with_third_arm(share), vector(*REWARDS), steps=300, step_size=5.0)
        assert torch.softmax(path[-1], -1)[winner] > 0.99


def test_bisect():
    assert lesson.bisect(lambda x: x * x - 2, 0.0, 2.0) == pytest.approx(math.sqrt(2), abs=1e-15)
    assert lesson.bisect(lambda x: 1 - x**3, 0.0, 5.0) == pytest.approx(1, abs=1e-15)


def test_unseen_response_in_closed_form():
    # Baseline 23/30; per token the mean of A·(y − σ) is (1/3)·(1 − 23/30) = 7/90 since Σ A = 0: each logit is 7t/90.
    path = lesson.train_on_seen(steps=60)
    one = [1 / (1 + math.exp(-7 * t / 90)) for t in range(61)]
    close(path, [[(1 - p) ** 2, (1 - p) * p, p * (1 - p), p * p] for p in one])
    assert lesson.UNSEEN_REWARDS.tolist() == [0.3, 1.0, 1.0, 0.0]


# ---------------------------------------------------------------- many turns


def trajectory(index):
    return index // 4, index // 2 % 2, index % 2  # y¹, x², y²


@EXAMPLES
@given(lists(10), lists(10), lists(2))
def test_transition_probabilities_cancel(theta, old_theta, coin):
    chance = [softmax([0.0, c]) for c in coin]

    def whole(values):  # log p(trajectory), the environment included
        rows = [softmax(values[2 * i : 2 * i + 2]) for i in range(5)]
        logs = []
        for y1, x2, y2 in map(trajectory, range(8)):
            logs.append(math.log(rows[0][y1] * chance[y1][x2] * rows[1 + 2 * y1 + x2][y2]))
        return logs

    close(lesson.two_turn_logprobs(vector(*theta)) - lesson.two_turn_logprobs(vector(*old_theta)),
          np.array(whole(theta)) - np.array(whole(old_theta)))
    environment = lesson.environment_probs(torch.tensor(chance, dtype=torch.float64))
    close(lesson.two_turn_logprobs(vector(*theta)) + environment.log(), whole(theta))
    # a policy recovers itself from its own trajectories, whatever the environment does
    close(lesson.play_conditionals(vector(*whole(theta)).exp()), lesson.two_turn_logprobs(vector(*theta)))


def test_a_prompt_that_never_comes_gets_a_uniform_answer():
    # y¹ = 1 half of the time, x² = y¹ always, y² = 1 always: (0, 0, 1) and (1, 1, 1).
    played = lesson.play_conditionals(vector(0, 0.5, 0, 0, 0, 0, 0, 0.5)).exp()
    close(played, [0, 0.5, 0.25, 0.25, 0.25, 0.25, 0, 0.5])


def test_tokens_are_the_special_case():
    """With x² = y¹ the second prompt is the prefix: the four possible trajectories are the two-token sequences."""
    theta = vector(0.3, -0.2, 0.1, 0.7, 0.0, 0.0, 0.0, 0.0, -0.4, 0.2)
    possible = lesson.environment_probs(lesson.DETERMINISTIC) > 0
    assert possible.tolist() == [x2 == y1 for y1, x2, _ in map(trajectory, range(8))]
    prefixes = theta.view(5, 2)[[0, 1, 4]]  # the empty prefix, (y¹=0, x²=0), (y¹=1, x²=1)
    close(lesson.two_turn_logprobs(theta)[possible], lesson.prefix_tree_logprobs(prefixes, length=2))


def test_returns_of_the_two_turn_task():
    assert lesson.TWO_TURN_RETURNS.tolist() == [x2 + 0.5 * y1 * y2 for y1, x2, y2 in map(trajectory, range(8))]


@pytest.mark.parametrize("tau", [0.3, 0.5, 2.0])
@pytest.mark.parametrize("lucky", [0.5, 0.2])
def test_the_luck_that_no_policy_controls(tau, lucky):
    # π*/π_t ∝ e^{x²/τ}·e^{skill/τ} factorises, so the optimum wants P*(x²=1) ∝ p·e^{1/τ}; the conditionals repair the
    # skill part, and a is left as x² + const, whose variance is p(1−p).
    chance = vector(1 - lucky, lucky).expand(2, 2)
    left, wanted = lesson.luck_left_over(chance, tau=tau)
    close(left, lucky * (1 - lucky))
    close(wanted, lucky * math.exp(1 / tau) / (lucky * math.exp(1 / tau) + 1 - lucky))
    assert abs(lesson.luck_left_over(lesson.DETERMINISTIC, tau=tau)[0]) < 1e-12


def test_no_policy_is_consistent_under_a_fair_coin():
    """Minimise the violation over all policies: it reaches 0 in the deterministic environment and only there."""
    def smallest_variance(chance):
        theta = torch.zeros(10, dtype=torch.float64, requires_grad=True)
        start = [math.log(0.25)] * 8
        weights = [0.25 * chance[y1][x2] for y1, x2, _ in map(trajectory, range(8))]
        returns = vector(*[x2 + 0.5 * y1 * y2 for y1, x2, y2 in map(trajectory, range(8))])
        optimiser = torch.optim.LBFGS([theta], lr=1, max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16,
                                      line_search_fn="strong_wolfe")

        def loss():
            adjusted = returns - 0.5 * (lesson.two_turn_logprobs(theta) - vector(*start))
            mean = vector(*weights) @ adjusted
            return vector(*weights) @ (adjusted - mean) ** 2

        def closure():
            optimiser.zero_grad()
            value = loss()
            value.backward()
            return value

        optimiser.step(closure)
        return loss().item()

    assert smallest_variance([[1, 0], [0, 1]]) < 1e-12
    assert 0.01 < smallest_variance([[0.5, 0.5], [0.5, 0.5]]) <= 0.25


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("call, words", [
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.6), vector(0, 1), tau=0.5), "sum to 1"),
    (lambda: lesson.kl_regularised_optimum(vector(1.5, -0.5), vector(0, 1), tau=0.5), "sum to 1"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, math.nan), vector(0, 1), tau=0.5), "sum to 1"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.5), vector(0, 1, 2), tau=0.5), "one shape"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.5), vector(0, 1), tau=0.0), "tau"),
    (lambda: lesson.kl_regularised_optimum(vector(0.5, 0.5), vector(0, 1), tau=math.inf), "tau"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0, 1), vector(0, 1), vector(0, 1), tau=-1.0), "tau"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0, 1), vector(0, 1), vector(0, 1), tau=math.nan), "tau"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0), vector(0), vector(1), tau=1.0), "at least 2"),
    (lambda: lesson.pairwise_surrogate_loss(*[torch.tensor(0.0)] * 3, tau=1.0), "at least 2"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0, 1), vector(0, 1), vector(0, 1, 1), tau=1.0), "one shape"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0, 1), vector(0, 1).view(2, 1), vector(0, 1), tau=1.0), "one shape"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0, 1), vector(0, 1), vector(0, 1), tau=1.0,
                                            pair_weights=torch.ones(3, 3)), "pair_weights must be"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0, 1), vector(0, 1), vector(0, 1), tau=1.0,
                                            pair_weights=vector(0, 1, 2, 0).view(2, 2)), "symmetric"),
    (lambda: lesson.pairwise_surrogate_loss(vector(0, 1), vector(0, 1), vector(0, 1), tau=0.0), "tau"),
    (lambda: lesson.kl_regularised_optimum(vector(0.499, 0.5), vector(0, 1), tau=0.5), "sum to 1"),
    (lambda: lesson.regularised_objective(vector(0.5, 0.7), vector(0.5, 0.5), vector(0, 1), tau=0.5), "sum to 1"),
    (lambda: lesson.regularised_objective(vector(0.5, 0.5), vector(0.5, 0.7), vector(0, 1), tau=0.5), "sum to 1"),
    (lambda: lesson.regularised_objective(vector(0.5, 0.5), vector(0.5, 0.5), vector(0, 1)[:, None], tau=0.5),
     "one last dimension"),
    (lambda: lesson.regularised_objective(vector(0.5, 0.5), vector(0.5, 0.5), vector(0, 1), tau=-1.0), "tau"),
    (lambda: lesson.population_surrogate_loss(vector(0, 1), vector(0, 1), vector(0, 1), vector(0.9, 0.9), tau=1.0),
     "sum to 1"),
    (lambda: lesson.mean_group_update(vector(0.5, 0.5), vector(0, 1), group_size=1), "group_size ≥ 2"),
    (lambda: lesson.mean_group_update(vector(0.5, 0.5), vector(0, 1, 1), group_size=2), "one shape"),
    (lambda: lesson.mean_group_update(vector(0.5, 0.7), vector(0, 1), group_size=2), "sum to 1"),
    (lambda: lesson.bandit_drift(vector(0.5, 0.4), vector(0, 1)), "sum to 1"),
    (lambda: lesson.bandit_drift(vector(0.5, 0.5), vector(0, 1, 1)), "one shape"),
    (lambda: lesson.bisect(lambda x: x + 1, 0.0, 1.0), "opposite signs"),
    (lambda: lesson.bisect(lambda x: math.nan, 0.0, 1.0), "opposite signs"),
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


# ---------------------------------------------------------------- the script


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        lesson.main([str(a) for a in arguments])
    return stop.value.code


def test_quick_run(tmp_path):
    assert run("--quick", "--seed", 3, "--out", tmp_path, "--json", tmp_path / "claims.json") == 0
    rows = json.loads((tmp_path / "claims.json").read_text())
    assert all(row["ok"] and {"claim", "expected", "measured", "tolerance", "ok"} <= set(row) for row in rows)
    assert len(rows) >= 50 and len({row["claim"] for row in rows}) == len(rows)
    for name in ("03_pairwise", "03_pitfalls", "03_parting"):
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("function, wrong", [
    ("step_constant", lambda tau, *, scale=True: tau / (1 + tau) ** 2),  # a factor 2 lost
    ("group_reinforce_loss", lambda logprobs, rewards: (rewards - rewards.mean(-1)) @ logprobs / len(rewards)),  # sign
    ("bandit_drift", lambda behaviour_probs, rewards: behaviour_probs * rewards),  # no baseline
    ("kl_regularised_optimum", lambda old_probs, rewards, *, tau: torch.softmax(rewards / tau, -1)),  # no anchor
])
def test_a_wrong_formula_fails_the_run(monkeypatch, tmp_path, function, wrong):
    monkeypatch.setattr(lesson, function, wrong)
    for figure in ("figure_pairwise", "figure_pitfalls", "figure_parting"):
        monkeypatch.setattr(lesson, figure, lambda *_: None)
    assert run("--quick", "--out", tmp_path) == 1


def test_the_docstring_ends_on_the_line_of_code():
    line = "return -((rewards - rewards.mean(-1, keepdim=True)) * logprobs).mean(-1)"
    assert line in lesson.__doc__ and line in inspect.getsource(lesson.group_reinforce_loss)


RIGHT = {
    1: """
import numpy as np
def optimum(old_probs, rewards, tau):
    scores = np.log(old_probs.numpy()) + rewards.numpy() / tau
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
""",
    2: """
import numpy as np
def one_step(logits, actions, rewards, tau):
    probs = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum()
    advantages = rewards.numpy() - rewards.numpy().mean()
    update = sum(a * (np.eye(len(probs))[y] - probs) for a, y in zip(advantages, actions.tolist())) / len(actions)
    return -2 * tau / (1 + tau) ** 2 * update
""",
    3: """
def limit(behaviour_probs, rewards):
    mean = float((behaviour_probs * rewards).sum())
    pulls = [p * (r - mean) for p, r in zip(behaviour_probs.tolist(), rewards.tolist())]
    return rewards[pulls.index(max(pulls))]
""",
}
WRONG = {
    1: RIGHT[1].replace("/ tau", "* tau"),
    2: RIGHT[2].replace("-2 * tau", "2 * tau"),
    3: "def limit(behaviour_probs, rewards):\n    return rewards.max()\n",
}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_exercises(tmp_path, number):
    answer = tmp_path / "answer.py"
    stub = run("--exercise", number, "--answer", answer)
    assert f"Exercise {number}" in stub and "raise NotImplementedError" in answer.read_text()
    assert "NotImplementedError" in run("--exercise", number, "--answer", answer)
    answer.write_text(WRONG[number])
    assert "first difference" in run("--exercise", number, "--answer", answer)
    answer.write_text(RIGHT[number])
    assert run("--exercise", number, "--answer", answer) == 0
