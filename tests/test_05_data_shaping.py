"""Lesson 05 against brute force, exact fractions, finite differences and literal numbers."""

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

lesson = importlib.import_module("05_data_shaping")

FEW = settings(max_examples=40, deadline=None)
DTYPES = [torch.float32, torch.float64]
tenths = st.integers(0, 10).map(lambda n: Fraction(n, 10))  # rewards that floats cannot hold exactly
groups_of_tenths = st.lists(tenths, min_size=2, max_size=9)
temperatures = st.floats(0.2, 20.0)


def tensor(values, dtype=torch.float64):
    return torch.tensor([float(v) for v in values], dtype=dtype)


def random(*shape, seed=0):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- RED-Drop


@FEW
@given(groups_of_tenths, st.sampled_from(DTYPES), st.integers(0, 5))
def test_red_drop_follows_the_balance_rule_of_exact_arithmetic(rewards, dtype, seed):
    mean = sum(rewards) / len(rewards)
    positive = [r >= mean for r in rewards]
    advantages, keep = lesson.red_drop(tensor(rewards, dtype), generator=torch.Generator().manual_seed(seed))
    assert advantages.dtype == dtype and keep.dtype == torch.bool and advantages.shape == keep.shape == (len(rewards),)
    assert all(keep[i] for i, is_positive in enumerate(positive) if is_positive)
    negatives = len(rewards) - sum(positive)
    assert int(keep.sum()) == sum(positive) + min(negatives, sum(positive))
    kept = [r for r, k in zip(rewards, keep.tolist()) if k]
    baseline = sum(kept) / len(kept)
    want = [float(r - baseline) if k else 0.0 for r, k in zip(rewards, keep.tolist())]
    assert advantages.tolist() == pytest.approx(want, abs=1e-6 if dtype == torch.float32 else 1e-14)
    assert (advantages[~keep] == 0).all()
    if max(rewards) == min(rewards):
        assert (advantages == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_red_drop_known_groups(dtype):
    # Two right of eight: two wrong survive, baseline ½. The mean of all eight would give .75 and −.25.
    advantages, keep = lesson.red_drop(torch.tensor([1, 1, 0, 0, 0, 0, 0, 0], dtype=dtype))
    assert keep[:2].all() and keep.sum() == 4
    assert advantages[keep].tolist() == [0.5, 0.5, -0.5, -0.5] and (advantages[~keep] == 0).all()
    advantages, keep = lesson.red_drop(torch.tensor([1, 0, 0, 0], dtype=dtype))
    assert keep.sum() == 2 and sorted(advantages.tolist()) == [-0.5, 0, 0, 0.5]
    # Identical rewards: in float32 the mean of seven .1 exceeds .1, and `r >= mean` would drop all seven.
    for value, size in ((0.1, 7), (0.3, 6), (0.7, 3), (1e-8, 5), (-0.1, 7)):
        advantages, keep = lesson.red_drop(torch.full((size,), value, dtype=dtype))
        assert keep.all() and (advantages == 0).all()
    almost = torch.full((7,), 0.1, dtype=dtype)
    almost[3] = torch.nextafter(almost[3], almost.new_tensor(1.0))
    assert lesson.red_drop(almost)[1].all()
    # As many negatives as positives: nothing to do. Positives in the majority: nothing either.
    for rewards, want in (([1, 0], [0.5, -0.5]), ([1, 1, 1, 0], [0.25, 0.25, 0.25, -0.75])):
        advantages, keep = lesson.red_drop(torch.tensor(rewards, dtype=dtype))
        assert keep.all() and advantages.tolist() == want


def test_red_drop_takes_integers_and_leaves_its_input_alone():
    rewards = torch.tensor([[1, 0, 0], [0, 0, 0]])
    advantages, keep = lesson.red_drop(rewards)
    assert advantages.is_floating_point() and keep[1].all() and keep[0].sum() == 2
    assert rewards.tolist() == [[1, 0, 0], [0, 0, 0]]


def test_red_drop_treats_every_group_of_a_batch_by_itself():
    rewards = (random(5, 4, 6) < 0.3).double()
    advantages, keep = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(1))
    for index in itertools.product(range(5), range(4)):
        positives = int(rewards[index].sum()) or 6  # all wrong is flat: six positives
        assert keep[index].sum() == positives + min(6 - positives, positives)
        assert advantages[index].sum() == pytest.approx(0, abs=1e-14)


def test_red_drop_chooses_uniformly_and_repeatably():
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]).expand(30_000, 6)  # keep 2 of 4 negatives: 6 pairs
    _, keep = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(3))
    pairs = torch.unique(keep[:, [0, 2, 3, 5]], dim=0, return_counts=True)[1]
    assert len(pairs) == 6
    assert (pairs - 5000).abs().max() < 4 * (30_000 * 5 / 36) ** 0.5  # four standard deviations of a binomial
    again = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(3))[1]
    other = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(4))[1]
    assert torch.equal(keep, again) and not torch.equal(keep, other)


@pytest.mark.parametrize("rewards", [torch.tensor([1.0]), torch.tensor(1.0), torch.ones(3, 1), torch.ones(0),
                                     torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 0.0])])
def test_red_drop_refuses(rewards):
    with pytest.raises(ValueError):
        lesson.red_drop(rewards)


@FEW
@given(groups_of_tenths)
def test_expected_red_drop_is_the_mean_over_every_choice(rewards):
    size, mean = len(rewards), sum(rewards) / len(rewards)
    positives = [i for i in range(size) if rewards[i] >= mean]
    negatives = [i for i in range(size) if rewards[i] < mean]
    total, choices = [Fraction(0)] * size, 0
    for chosen in itertools.combinations(negatives, min(len(negatives), len(positives))):
        kept, choices = positives + list(chosen), choices + 1
        baseline = sum(rewards[i] for i in kept) / len(kept)
        for i in kept:
            total[i] += rewards[i] - baseline
    want = [float(t / choices) for t in total]
    assert lesson.expected_red_drop(tensor(rewards)).tolist() == pytest.approx(want, abs=1e-13)


def test_expected_red_drop_of_flat_groups_and_integers():
    assert (lesson.expected_red_drop(torch.full((7,), 0.1)) == 0).all()  # float32: as red_drop, exactly 0
    assert lesson.expected_red_drop(torch.tensor([1, 0, 0])).tolist() == [0.5, -0.25, -0.25]
    for rewards in (torch.ones(1), torch.tensor([1.0, math.nan])):
        with pytest.raises(ValueError):
            lesson.expected_red_drop(rewards)


# ---------------------------------------------------------------- RED-Weight


def test_red_weight_known_values():
    # A = .75 and −.25 at T = 1: .75·e^.75 and −.25·e^−.25.
    advantages = torch.tensor([0.75, -0.25], dtype=torch.float64)
    weighted = advantages * lesson.red_weight(advantages)
    assert weighted.tolist() == pytest.approx([1.587750, -0.194700], abs=1e-6)
    assert lesson.red_weight(torch.tensor([1.0, -2.0]), temperature=0.5).tolist() == pytest.approx(
        [math.e**2, math.e**-4], rel=1e-6)
    assert lesson.red_weight(torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("temperature", [0, -1.0, math.inf, math.nan])
def test_red_weight_refuses_a_temperature(temperature):
    with pytest.raises(ValueError, match="temperature"):
        lesson.red_weight(torch.zeros(2), temperature=temperature)


@pytest.mark.parametrize("advantages, temperature", [
    ([math.nan, 0.0], 1.0), ([-math.inf, 0.0], 1.0), ([1.0, 0.0], 1e-3)])
def test_red_weight_refuses_what_would_become_infinite_or_nan(advantages, temperature):
    with pytest.raises(ValueError):
        lesson.red_weight(torch.tensor(advantages), temperature=temperature)


@FEW
@given(groups_of_tenths, temperatures)
def test_red_weight_splits_into_pairwise_reinforce_and_imitation(rewards, temperature):
    values = [float(r) for r in rewards]
    size, mean = len(values), math.fsum(values) / len(values)
    weights = [math.exp((r - mean) / temperature) for r in values]
    weighted_mean = math.fsum(w * r for w, r in zip(weights, values)) / math.fsum(weights)
    covariance = math.fsum((w - math.fsum(weights) / size) * (r - mean) for w, r in zip(weights, values)) / size
    assert weighted_mean - mean == pytest.approx(covariance * size / math.fsum(weights), abs=1e-12)
    pairwise, imitation = lesson.red_weight_parts(tensor(rewards), temperature=temperature)
    assert pairwise.tolist() == pytest.approx(
        [w * (r - weighted_mean) / size for w, r in zip(weights, values)], abs=1e-12)
    assert (pairwise + imitation).tolist() == pytest.approx(
        [w * (r - mean) / size for w, r in zip(weights, values)], abs=1e-12)
    assert float(pairwise.sum()) == pytest.approx(0, abs=1e-12) and (imitation >= -1e-15).all()


@FEW
@given(st.integers(1, 11), st.integers(1, 11), temperatures)
def test_tilted_success_is_the_weighted_mean_of_a_binary_group(right, wrong, temperature):
    odds = right / wrong * math.exp(1 / temperature)  # weighting multiplies the odds of "right" by e^{1/T}
    assert float(lesson.tilted_success(right / (right + wrong), temperature)) == pytest.approx(odds / (1 + odds))
    rewards = tensor([1] * right + [0] * wrong)
    weights = lesson.red_weight(rewards - rewards.mean(), temperature=temperature)
    assert float(lesson.weighted_mean(rewards, weights)) == pytest.approx(odds / (1 + odds))


def test_red_weight_parts_of_a_flat_group_are_exactly_zero():
    for part in lesson.red_weight_parts(torch.full((7,), 0.1), temperature=0.01):
        assert (part == 0).all()


def test_tilted_success_known_value():
    assert float(lesson.tilted_success(0.25, 1.0)) == pytest.approx(0.4753668864, abs=1e-10)
    assert lesson.tilted_success([0.0, 1.0], 1.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("success, temperature", [(1.5, 1.0), (-0.1, 1.0), (math.nan, 1.0), (0.5, 0), (0.5, -1.0)])
def test_tilted_success_refuses(success, temperature):
    with pytest.raises(ValueError):
        lesson.tilted_success(success, temperature)


# ---------------------------------------------------------------- adaptive temperature

HALVES = torch.tensor([0.5, 0.5, -0.5, -0.5])


def balance(advantages, lengths, temperature):
    return math.fsum(a * math.exp(a / temperature) * n for a, n in zip(advantages, lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adaptive_temperature_the_four_cases(dtype):
    # The bracket halves 11 times from [.8, 100] to a width of 99.2/2¹¹ = .0484375. The root 1/ln 2.5 = 1.0913567 lies
    # between .8 + 6·.0484375 and .8 + 7·.0484375, and the upper end is returned.
    assert lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor([100, 100, 200, 300])) == pytest.approx(1.1390625)
    for lengths in ([300, 200, 100, 100], [5, 5, 5, 5], [0, 0, 0, 0]):
        assert lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor(lengths)) is None
    assert lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor([1, 1, 10, 10])) == 0.8  # root 1/ln 10 = .43
    assert lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor([1000, 1000, 1001, 1001])) == 100.0  # root 1000.5
    assert isinstance(lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor([100, 100, 200, 300])), float)


@FEW
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 400), st.integers(1, 4000))
def test_adaptive_temperature_finds_the_closed_form_of_a_binary_group(right, wrong, length_right, length_wrong):
    # (1−p)·e^{(1−p)/T}·L₊ = p·e^{−p/T}·L₋ with total lengths L± gives e^{1/T} = p·L₋/((1−p)·L₊) = length ratio, as
    # p/(1−p) = right/wrong.
    size = right + wrong
    advantages = tensor([Fraction(wrong, size)] * right + [Fraction(-right, size)] * wrong, torch.float32)
    lengths = torch.tensor([length_right] * right + [length_wrong] * wrong)
    found = lesson.adaptive_temperature(advantages, lengths)
    if length_wrong <= length_right:
        assert found is None
        return
    root = 1 / math.log(length_wrong / length_right)
    if root < 0.8:
        assert found == 0.8
    elif root > 100:
        assert found == 100.0
    else:
        assert -1e-3 <= found - root <= 0.05
    scaled = lesson.adaptive_temperature(advantages, 3 * lengths)  # the unit of length does not matter
    assert scaled == pytest.approx(found, abs=0.05)


@FEW
@given(st.lists(tenths, min_size=3, max_size=8), st.lists(st.integers(1, 900), min_size=8, max_size=8),
       st.floats(0.1, 2.0), st.floats(2.5, 200.0))
def test_adaptive_temperature_brackets_the_root_of_any_group(rewards, lengths, low, high):
    mean = sum(rewards) / len(rewards)
    advantages, lengths = [float(r - mean) for r in rewards], lengths[: len(rewards)]
    found = lesson.adaptive_temperature(tensor(advantages), torch.tensor(lengths), low=low, high=high)
    total = sum((r - mean) * n for r, n in zip(rewards, lengths))
    if total >= 0:
        assert found is None
    elif found is None:  # only where the imbalance is at the level of rounding
        assert abs(total) <= 1e-6 * sum(abs(r - mean) * n for r, n in zip(rewards, lengths))
    elif found == low:
        assert balance(advantages, lengths, low) <= 1e-9
    elif found == high:
        assert balance(advantages, lengths, high - 0.05) >= -1e-9
    else:
        assert balance(advantages, lengths, found) <= 1e-9 <= balance(advantages, lengths, found - 0.05) + 1e-6


def test_adaptive_temperature_reads_rounding_as_balance():
    # [1, 0, 0] with equal lengths: in float32 the three advantages do not quite sum to 0.
    advantages = torch.tensor([1.0, 0.0, 0.0]) - torch.tensor([1.0, 0.0, 0.0]).mean()
    assert lesson.adaptive_temperature(advantages, torch.tensor([7, 7, 7])) is None


def test_adaptive_temperature_survives_large_advantages():
    found = lesson.adaptive_temperature(torch.tensor([5000.0, -5000.0]), torch.tensor([1, 1000]))
    assert found == 100.0  # at T = 100 the weights differ by e^100 and the root is at 1447


@pytest.mark.parametrize("advantages, lengths, options", [
    ([0.5, -0.5], [1, 2, 3], {}), ([0.5], [3], {}), ([[0.5, -0.5]], [[1, 2]], {}), ([math.nan, 0.0], [1, 2], {}),
    ([0.5, -0.5], [1, -2], {}), ([0.5, -0.5], [1.0, math.inf], {}), ([0.5, -0.5], [1, 2], {"low": 0.0}),
    ([0.5, -0.5], [1, 2], {"low": 3.0, "high": 2.0}), ([0.5, -0.5], [1, 2], {"high": math.inf}),
])
def test_adaptive_temperature_refuses(advantages, lengths, options):
    with pytest.raises(ValueError):
        lesson.adaptive_temperature(torch.tensor(advantages), torch.tensor(lengths), **options)


# ---------------------------------------------------------------- pair weights


def pairwise_loss_by_hand(logprobs, old_logprobs, rewards, weights, tau):
    adjusted = [r - tau * (new - old) for r, new, old in zip(rewards, logprobs, old_logprobs)]
    size = len(rewards)
    pairs = itertools.combinations(range(size), 2)
    return math.fsum(weights[i][j] * (adjusted[i] - adjusted[j]) ** 2 for i, j in pairs) / size**2 / (1 + tau) ** 2


@pytest.mark.parametrize("tau", [0.3, 2.0])
def test_pair_coefficients_are_the_slopes_of_the_weighted_loss(tau):
    rewards, old = random(5, seed=1).tolist(), (-random(5, seed=2)).tolist()
    weights = random(5, 5, seed=3)
    weights = weights + weights.T
    coefficients = lesson.pair_coefficients(torch.tensor(rewards, dtype=torch.float64), weights)
    for i, step in itertools.product(range(5), [1e-5]):
        moved = [[p + sign * step * (k == i) for k, p in enumerate(old)] for sign in (1, -1)]
        up, down = (pairwise_loss_by_hand(new, old, rewards, weights.tolist(), tau) for new in moved)
        slope = (up - down) / (2 * step)
        assert slope == pytest.approx(-2 * tau / (1 + tau) ** 2 * float(coefficients[i]), rel=1e-6)
    loss = lesson.pairwise_surrogate_loss(torch.tensor(moved[0]), torch.tensor(old), torch.tensor(rewards), tau=tau,
                                          pair_weights=weights.float())
    assert float(loss) == pytest.approx(pairwise_loss_by_hand(moved[0], old, rewards, weights.tolist(), tau), rel=1e-5)


def test_pair_coefficients_of_product_weights():
    rewards, weights = random(7, 6, seed=4), random(7, 6, seed=5)
    for r, w, have in zip(rewards.tolist(), weights.tolist(),
                          lesson.pair_coefficients(rewards, weights[:, :, None] * weights[:, None, :]).tolist()):
        mean = math.fsum(a * b for a, b in zip(w, r)) / math.fsum(w)
        assert have == pytest.approx([math.fsum(w) / 36 * b * (a - mean) for a, b in zip(r, w)], abs=1e-14)


def test_pair_coefficients_refuse_weights_of_responses():
    with pytest.raises(ValueError, match="pair_weights"):  # (K,) would line up with the columns
        lesson.pair_coefficients(torch.ones(3), torch.ones(3))


# ---------------------------------------------------------------- own data


@pytest.mark.parametrize("name", list(lesson.SHAPINGS))
def test_shaping_gain_scales_the_gradient_of_a_bandit(name):
    """Autograd through log-softmax, a loop over every group of three, and for RED-Drop over every choice."""
    logits = torch.tensor([0.4, -0.6, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    right = [1.0, 0.0, 1.0, 0.0]
    probs = torch.softmax(logits, 0)
    weight = probs.tolist()  # of the data, which carry no gradient
    success = probs[0] + probs[2]
    (exact,) = torch.autograd.grad(success, logits, retain_graph=True)
    total = 0.0
    for group in itertools.product(range(4), repeat=3):
        rewards = [right[y] for y in group]
        mean = sum(rewards) / 3
        if name == "RED-Drop":  # one right, two wrong: one wrong stays; A = ½ and −½, in expectation −¼ each
            advantages = [0.5 if r else -0.25 for r in rewards] if sum(rewards) == 1 else [r - mean for r in rewards]
        else:
            temperature = {"REINFORCE": math.inf, "RED-Weight T = 1": 1.0, "RED-Weight T = .5": 0.5}[name]
            advantages = [(r - mean) * math.exp((r - mean) / temperature) for r in rewards]
        probability = math.prod(weight[y] for y in group)
        total = total + probability * sum(a * torch.log_softmax(logits, 0)[y] for a, y in zip(advantages, group)) / 3
    (update,) = torch.autograd.grad(total, logits)
    gain = lesson.shaping_gain(success.detach(), group_size=3, shaping=lesson.SHAPINGS[name])
    assert torch.allclose(update, gain * exact, atol=1e-14)
    scores = torch.eye(4, dtype=torch.float64) - probs.detach()
    have = lesson.expected_update(probs.detach(), torch.tensor(right, dtype=torch.float64), scores, group_size=3,
                                  shaping=lesson.SHAPINGS[name])
    assert torch.allclose(have, update, atol=1e-14)


def test_shaping_gain_refuses_a_sure_prompt():
    for rate in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError):
            lesson.shaping_gain(torch.tensor([0.5, rate]), group_size=4, shaping=lesson.SHAPINGS["REINFORCE"])


# ---------------------------------------------------------------- the bandit


def probability_vectors(size):
    return st.lists(st.floats(0.05, 1.0), min_size=size, max_size=size).map(lambda v: [x / sum(v) for x in v])


@FEW
@given(probability_vectors(4), st.lists(st.floats(0, 1), min_size=4, max_size=4), st.floats(0.2, 5.0))
def test_red_weight_limit_is_where_all_living_logits_move_together(behaviour, rewards, temperature):
    mean = sum(b * r for b, r in zip(behaviour, rewards))
    pull = [b * math.exp((r - mean) / temperature) * (r - mean) for b, r in zip(behaviour, rewards)]
    if sum(pull) < 1e-6:  # all arms pay alike: nothing moves
        return
    limit = lesson.red_weight_limit(tensor(behaviour), tensor(rewards), temperature=temperature).tolist()
    assert sum(limit) == pytest.approx(1) and min(limit) >= 0
    speeds = [c - sum(pull) * p for c, p in zip(pull, limit)]
    living = [s for s, p in zip(speeds, limit) if p > 0]
    assert max(living) == pytest.approx(min(living), abs=1e-9)
    assert all(s <= max(living) + 1e-9 for s in speeds)


@FEW
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6))
def test_projection_beats_every_other_support(point):
    have = lesson.project_to_simplex(tensor(point))
    assert float(have.sum()) == pytest.approx(1) and (have >= 0).all()
    best = math.inf
    for support in itertools.product([0, 1], repeat=len(point)):  # the nearest point with a given support: shift it
        inside = [x for x, s in zip(point, support) if s]
        if inside:
            level = (sum(inside) - 1) / len(inside)
            candidate = [x - level if s else 0.0 for x, s in zip(point, support)]
            if min(candidate) >= 0:
                best = min(best, math.fsum((x - c) ** 2 for x, c in zip(point, candidate)))
    assert float((tensor(point) - have).square().sum()) == pytest.approx(best, abs=1e-9)


def test_projection_of_huge_and_of_infinite_numbers():
    assert lesson.project_to_simplex(tensor([1e20, 0])).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="finite"):
        lesson.project_to_simplex(tensor([math.nan, 0]))


@pytest.mark.parametrize("behaviour, rewards, message", [
    ([0.3, 0.6, 0.1], [0.1, 0.1, 0.1], "same reward"), ([0.5, 0.5, 0.0], [1, 1, 0], "same reward"),
    ([0.3, 0.6, 0.2], [0, 0.8, 1], "sum to 1"), ([math.nan, 0.6, 0.1], [0, 0.8, 1], "sum to 1")])
def test_red_weight_limit_refuses(behaviour, rewards, message):
    with pytest.raises(ValueError, match=message):
        lesson.red_weight_limit(tensor(behaviour), tensor(rewards), temperature=1.0)


def test_red_weight_on_the_bandit_of_the_paper():
    b, r = lesson.BEHAVIOUR, lesson.REWARDS
    # μ = .58, so the advantages are −.58, .22, .42 and at T = 1 c = (−.174·e^−.58, .132·e^.22, .042·e^.42).
    pull = [-0.174 * math.exp(-0.58), 0.132 * math.exp(0.22), 0.042 * math.exp(0.42)]
    assert lesson.red_weight_pull(b, r, temperature=1.0).tolist() == pytest.approx(pull, abs=1e-15)
    level = -pull[0] / 2
    want = [0, (pull[1] - level) / sum(pull), (pull[2] - level) / sum(pull)]
    assert lesson.red_weight_limit(b, r, temperature=1.0).tolist() == pytest.approx(want, abs=1e-14)
    threshold = 1 / math.log(0.087 / 0.042)
    assert lesson.red_weight_limit(b, r, temperature=threshold * 1.001)[2] == 0
    assert lesson.red_weight_limit(b, r, temperature=threshold * 0.999)[2] > 0


def test_bandit_paths_follow_their_updates():
    paths = lesson.bandit_paths(steps=3, step_size=0.5, group_size=3)
    b, r = np.array([0.3, 0.6, 0.1]), np.array([0, 0.8, 1.0])
    drops = np.zeros(3)
    for group in itertools.product(range(3), repeat=3):
        rewards, probability = r[list(group)], b[list(group)].prod()
        positive = [i for i in range(3) if rewards[i] >= rewards.mean() - 1e-12]
        negative = [i for i in range(3) if i not in positive]
        choices = list(itertools.combinations(negative, min(len(positive), len(negative))))
        for choice in choices:
            kept = positive + list(choice)
            for i in kept:
                drops[group[i]] += probability / len(choices) * (rewards[i] - rewards[kept].mean()) / 3
    assert paths["REINFORCE"][1].tolist() == pytest.approx([-0.087, 0.066, 0.021])
    assert paths["RED-Drop, K = 3"][3].tolist() == pytest.approx((1.5 * drops).tolist())
    for name, temperature in (("RED-Weight T = 1", 1.0), ("RED-Weight T = 0.3", 0.3)):
        theta = np.zeros(3)
        for _ in range(3):
            probs = np.exp(theta) / np.exp(theta).sum()
            weighted = b * np.exp((r - 0.58) / temperature) * (r - 0.58)
            theta = theta + 0.5 * sum(weighted[i] * (np.eye(3)[i] - probs) for i in range(3))
        assert paths[name][3].tolist() == pytest.approx(theta.tolist())


def test_slope_is_the_derivative_of_value_and_of_entropy():
    logits, update, values = random(3, 5, seed=6)
    probs = torch.softmax(logits, -1)

    def at(eta):
        moved = np.exp((logits + eta * update).numpy())
        moved = moved / moved.sum()
        return (moved * values.numpy()).sum(), -(moved * np.log(moved)).sum()

    (value_up, entropy_up), (value_down, entropy_down) = at(1e-5), at(-1e-5)
    assert float(lesson.slope(probs, update, values)) == pytest.approx((value_up - value_down) / 2e-5, rel=1e-6)
    assert float(lesson.slope(probs, update, -probs.log())) == pytest.approx(
        (entropy_up - entropy_down) / 2e-5, rel=1e-6)
    assert lesson.entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist() == pytest.approx([math.log(2), 0.0])


# ---------------------------------------------------------------- expert data


@pytest.mark.parametrize("name, temperature", [("REINFORCE", math.inf), ("RED-Weight T = 1", 1.0)])
def test_expert_batch_by_hand(name, temperature):
    path = lesson.train_on_expert_batch(lesson.SHAPINGS[name], steps=5, step_size=0.7)
    seconds = [1, 0, 2, 3, 0, 2, 3, 0]
    advantages = np.array([(y == 1) - 1 / 8 for y in seconds])
    advantages = advantages * np.exp(advantages / temperature)
    first, second = np.zeros(4), np.zeros(4)
    for step in range(6):
        softmax = [np.exp(z) / np.exp(z).sum() for z in (first, second)]
        assert path[step].tolist() == pytest.approx([softmax[0][1], softmax[1][1]], abs=1e-12)
        for advantage, y in zip(advantages, seconds):
            first = first + 0.7 / 8 * advantage * (np.eye(4)[1] - softmax[0])
            second = second + 0.7 / 8 * advantage * (np.eye(4)[y] - softmax[1])


# ---------------------------------------------------------------- friends


def test_data_friends_known_values():
    shares = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert lesson.graded_reward(shares).tolist() == pytest.approx([0.0758582, 0.5, 0.9241418], abs=1e-7)
    other = lesson.graded_reward(torch.tensor(0.6, dtype=torch.float64), steepness=10, centre=0.4)
    assert float(other) == pytest.approx(1 / (1 + math.e**-2))
    # π^{1/T}: at T = ½ the probabilities .5, .3, .2 become .25, .09, .04 of .38.
    assert lesson.tempered(tensor([0.5, 0.3, 0.2]), temperature=0.5).tolist() == pytest.approx(
        [25 / 38, 9 / 38, 4 / 38])
    assert lesson.hint_weight(torch.tensor([0.1, 1.0, 0.0])).tolist() == pytest.approx([0.5, 1 / 1.1, 0.0])
    assert float(lesson.hint_weight(torch.tensor(0.3), smoothing=0.2)) == pytest.approx(0.6)
    groups = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert lesson.informative_groups(groups).tolist() == [False, True, False]


def test_icpo_pools_the_hinted_rollout():
    plain = tensor([1, 0, 0, 0, 0, 0, 0])
    # Pool [1, 0×6, 2]: mean 3/8, sum of squares 5 − 8·9/64 = 31/8, std √(31/56).
    std = math.sqrt(31 / 56)
    want = [(1 - 3 / 8) / std] + [-3 / 8 / std] * 6 + [(2 - 3 / 8) / std]
    assert lesson.icpo_advantages(plain, torch.tensor(1.0, dtype=torch.float64), step=0).tolist() == pytest.approx(
        want, abs=5e-6)
    for step, reward in ((100, 1.75), (400, 1.0), (1000, 1.0)):  # the bonus decays to nothing and stays there
        pool = np.array([1, 0, 0, 0, 0, 0, 0, reward])
        want = (pool - pool.mean()) / pool.std(ddof=1)
        have = lesson.icpo_advantages(plain, torch.tensor(1.0, dtype=torch.float64), step=step)
        assert have.tolist() == pytest.approx(want.tolist(), abs=5e-6)
    wrong = lesson.icpo_advantages(torch.zeros(2, 7), torch.zeros(2), step=0)  # a wrong hinted answer gets no bonus
    assert wrong.shape == (2, 8) and (wrong == 0).all()


def test_friends_refuse():
    with pytest.raises(ValueError):
        lesson.graded_reward(torch.tensor([1.5]))
    with pytest.raises(ValueError):
        lesson.hint_weight(torch.tensor([0.5]), smoothing=0.0)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            lesson.tempered(tensor([0.5, 0.5]), temperature=temperature)


# ---------------------------------------------------------------- the stale world


def test_shaped_methods_are_what_their_names_say():
    methods = lesson.shaped_methods(torch.Generator().manual_seed(0))
    rewards = tensor([1, 1, 0, 0, 0, 0, 0, 0]).expand(3, 8)
    advantages = {name: shape(rewards)[0] for name, (shape, _) in methods.items()}
    right_and_wrong = {name: (float(a[0]), float(a[-1])) for name, a in advantages.items()}
    for name, want in {
        "REINFORCE": (0.75, -0.25), "REINFORCE, 2 × the step": (1.5, -0.5), "GRPO": (1.732047, -0.577349),
        "RED-Weight T = 3": (0.75 * math.exp(0.25), -0.25 * math.exp(-1 / 12)),
        "RED-Weight T = 1": (1.587750, -0.194700),
        "RED-Weight T = .3": (0.75 * math.exp(2.5), -0.25 * math.exp(-1 / 1.2)),
        "RED-Weight T = 1, clipped": (1.587750, -0.194700),
        # r̄_w = .4753669: w·(r − r̄_w), and A + w·(r̄_w − r̄)
        "… only its pairwise part": (math.exp(0.75) * 0.5246331, -math.exp(-0.25) * 0.4753669),
        "… only REINFORCE + its imitation": (0.75 + math.exp(0.75) * 0.2253669, -0.25 + math.exp(-0.25) * 0.2253669),
    }.items():
        assert right_and_wrong[name] == pytest.approx(want, abs=1e-6), name
    assert sorted(advantages["RED-Drop"].tolist()) == [-0.5, -0.5, 0, 0, 0, 0, 0.5, 0.5]
    # The losses: a token with A > 0 and ρ = 2 is dropped by the clipped ones; with importance sampling others weigh ρ.
    logprobs = torch.tensor([[-1.0, -1.1]], dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor([[math.log(2), math.log(1.1)]])
    for name, (_, loss) in methods.items():
        (gradient,) = torch.autograd.grad(loss(logprobs, old, torch.ones(1), torch.ones(1, 2)), logprobs)
        want = {"GRPO": [0, -1.1 / 2], "RED-Weight T = 1, clipped": [0, -0.5]}.get(name, [-0.5, -0.5])
        assert gradient[0].tolist() == pytest.approx(want), name


def test_the_rows_that_lesson_04_has_too_are_the_same_there():
    earlier = importlib.import_module("04_regularization")
    here = lesson.run_shaped(seeds=2, seed=3, steps=6)
    for setting, pair in lesson.SETTINGS.items():
        there = earlier.run_stale(("reinforce", "grpo"), seeds=2, seed=3, setting=pair, steps=6)["value"]
        assert torch.equal(here[setting]["REINFORCE"], there[0]) and torch.equal(here[setting]["GRPO"], there[1])
        assert not torch.equal(here[setting]["REINFORCE"], here[setting]["RED-Drop"])


def test_verdicts_compare_what_they_say():
    curves = {"somewhere": {name: torch.full((5, 3), 0.5) for name in lesson.shaped_methods(None)}}
    curves["somewhere"]["GRPO"][:, -1] = torch.tensor([0.6, 0.61, 0.62, 0.63, 0.64])
    curves["somewhere"]["RED-Weight T = .3"][:, -1] = 0.9
    rows = {claim: (round(mean, 6), low <= mean <= high, outcome)
            for claim, _, mean, low, high, outcome in lesson.shaping_verdicts(curves)}
    assert rows["P6 RED-Drop − GRPO"] == (-0.12, True, "does not hold")
    assert rows["P6 RED-Weight T = .3 − GRPO"] == (0.28, True, "holds")
    assert rows["RED-Weight T = 1 − REINFORCE"] == (0.0, True, "not resolved")
    curves["somewhere"]["GRPO"][:, -1] = 0.51  # .01 above the others: P6 allows that, "better than" would not
    rows = {claim: outcome for claim, *_, outcome in lesson.shaping_verdicts(curves)}
    assert rows["P6 RED-Drop − GRPO"] == "holds"


def test_every_difference_is_between_the_two_that_it_names():
    methods = list(lesson.shaped_methods(None))
    curves = {"here": {name: torch.full((4, 2), 2.0**i) for i, name in enumerate(methods)}}
    final = {name: 2.0**i for i, name in enumerate(methods)}  # powers of two: each difference tells its pair
    for claim, _, mean, *_ in lesson.shaping_verdicts(curves):
        first, second = {
            "RED-Weight T = 1: clipped − not clipped": ("RED-Weight T = 1, clipped", "RED-Weight T = 1"),
            "REINFORCE, 2 × the step − 1 ×": ("REINFORCE, 2 × the step", "REINFORCE"),
            "only its pairwise part − REINFORCE": ("… only its pairwise part", "REINFORCE"),
            "REINFORCE + its imitation − REINFORCE": ("… only REINFORCE + its imitation", "REINFORCE"),
        }.get(claim) or claim.removeprefix("P6 ").split(" − ")
        assert mean == final[first] - final[second], claim


# ---------------------------------------------------------------- the whole lesson


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lesson05")
    with pytest.raises(SystemExit) as end:
        lesson.main(["--quick", "--out", str(folder), "--json", str(folder / "claims.json")])
    return end.value.code, folder


def test_all_claims_hold_and_are_written(quick_run):
    code, folder = quick_run
    rows = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    assert code == 0 and len(rows) > 50
    assert all(row["ok"] and {"claim", "expected", "measured", "tolerance"} <= row.keys() for row in rows)


def test_figures_are_written(quick_run):
    names = {path.name for path in quick_run[1].glob("*.png")}
    assert names == {"05_own_data.png", "05_bandit.png", "05_stale_world.png"}


@pytest.mark.parametrize("name, broken", [
    ("red_weight", lambda advantages, temperature=1.0: (-advantages / temperature).exp()),
    ("tilted_success", lambda success, temperature: torch.sigmoid(torch.logit(success) + temperature)),
    ("expected_red_drop", lambda rewards: rewards - rewards.mean(-1, keepdim=True)),
    ("graded_reward", lambda share: share),
])
def test_a_broken_function_fails_a_claim(monkeypatch, name, broken):
    monkeypatch.setattr(lesson, name, broken)
    claims, generator = [], torch.Generator().manual_seed(0)
    lesson.claims_weight(claims, generator)
    lesson.claims_drop(claims, generator)
    lesson.claims_data_friends(claims, generator)
    assert not all(claim["ok"] for claim in claims)


RIGHT_ANSWERS = {
    1: """
def kept_responses(rewards):
    def kept(group):
        positive = sum(8 * r >= sum(8 * x for x in group) / len(group) - 1e-6 for r in group)
        return positive + min(positive, len(group) - positive)
    rows = rewards.double().reshape(-1, rewards.shape[-1]).tolist()
    return torch.tensor([kept(row) for row in rows]).view(rewards.shape[:-1])
""",
    2: """
def pair_product_gradient(rewards, weights, tau):
    mean = (weights * rewards).sum() / weights.sum()
    return -2 * tau / (1 + tau) ** 2 * weights.sum() / len(rewards) ** 2 * weights * (rewards - mean)
""",
    3: """
def tilted_success(success, temperature):
    import math
    up, down = success * math.exp((1 - success) / temperature), (1 - success) * math.exp(-success / temperature)
    return up / (up + down)
""",
}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("right", [True, False])
def test_exercises_tell_right_from_wrong(tmp_path, number, right):
    name = lesson.EXERCISES[number][0]
    wrong = f"def {name}(*arguments):\n    return torch.as_tensor(arguments[0]).double() * 0 + 1\n"
    file = tmp_path / "answer.py"
    file.write_text("import torch\n" + (RIGHT_ANSWERS[number] if right else wrong), encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        lesson.main(["--exercise", str(number), "--answer", str(file)])
    assert (end.value.code == 0) == right
