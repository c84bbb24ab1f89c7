"""Lesson 05 against brute force, exact fractions, finite differences and literal numbers."""

import importlib
import itertools
import math
import os
import pathlib
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

lesson = importlib.import_module("05_data_shaping")
ROOT = pathlib.Path(lesson.__file__).parent
FEW = settings(max_examples=30, deadline=None)
DTYPES = [torch.float32, torch.float64]
tenths = st.integers(0, 10).map(lambda n: Fraction(n, 10))  # rewards that floats cannot hold exactly
groups_of_tenths = st.lists(tenths, min_size=2, max_size=8)
temperatures = st.floats(0.2, 20.0)
RED_WEIGHT = "RED-Weight, T = 1"


def tensor(values, dtype=torch.float64):
    return torch.tensor([float(v) for v in values], dtype=dtype)


def random(*shape, seed=0):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_every_claim_of_the_page_holds():
    assert len(lesson.lesson.claims) > 20 and all(claim["ok"] for claim in lesson.lesson.claims)


# ---------------------------------------------------------------- weights on the pairs


def test_5_1_for_any_weights_and_as_lesson_03_has_the_loss():
    derivation = importlib.import_module("03_offpolicy_derivation")
    rewards, weights = random(100, 6, seed=1), random(100, 6, 6, seed=2)
    weights = weights + weights.mT
    difference = rewards.unsqueeze(-1) - rewards.unsqueeze(-2)
    formula = (weights * difference).sum(-1) / 36
    for tau in (0.3, 2.0):
        assert torch.allclose(lesson.pair_gradient(rewards, weights, tau=tau), formula, atol=1e-14)
        logprobs = torch.full_like(rewards, -1.0).requires_grad_()
        loss = derivation.pairwise_surrogate_loss(logprobs, logprobs.detach(), rewards, tau=tau, pair_weights=weights)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert torch.allclose(gradient, -2 * tau / (1 + tau) ** 2 * formula, atol=1e-14)


@FEW
@given(groups_of_tenths, st.integers(0, 9))
def test_5_2_and_5_3_for_any_weights_of_responses(rewards, seed):
    size, w = len(rewards), random(len(rewards), seed=seed)
    mean = math.fsum(a * float(b) for a, b in zip(w.tolist(), rewards)) / math.fsum(w.tolist())
    want = [math.fsum(w.tolist()) / size**2 * a * (float(b) - mean) for a, b in zip(w.tolist(), rewards)]
    assert lesson.pair_gradient(tensor(rewards), w[:, None] * w).tolist() == pytest.approx(want, abs=1e-14)
    advantages, keep = lesson.red_drop(tensor(rewards), generator=torch.Generator().manual_seed(seed))
    have = lesson.pair_gradient(tensor(rewards), (keep[:, None] & keep).double())
    assert torch.allclose(have, keep.sum() / size**2 * advantages, atol=1e-8)


def test_the_loss_of_lesson_03_is_zero_at_the_optimum_whatever_the_weights():
    derivation = importlib.import_module("03_offpolicy_derivation")
    best = derivation.kl_regularised_optimum(lesson.BEHAVIOUR, lesson.REWARDS, tau=0.5).log()
    weights = random(3, 3, seed=3)
    loss = derivation.pairwise_surrogate_loss(best, lesson.BEHAVIOUR.log(), lesson.REWARDS, tau=0.5,
                                              pair_weights=weights + weights.T)
    assert float(loss) == pytest.approx(0, abs=1e-15)


# ---------------------------------------------------------------- RED-Drop


@FEW
@given(groups_of_tenths, st.sampled_from(DTYPES), st.integers(0, 5))
def test_red_drop_follows_the_balance_rule_of_exact_arithmetic(rewards, dtype, seed):
    mean = sum(rewards) / len(rewards)
    positive = [r >= mean for r in rewards]
    advantages, keep = lesson.red_drop(tensor(rewards, dtype), generator=torch.Generator().manual_seed(seed))
    assert advantages.dtype == dtype and keep.dtype == torch.bool and advantages.shape == keep.shape == (len(rewards),)
    assert all(keep[i] for i, is_positive in enumerate(positive) if is_positive)
    assert int(keep.sum()) == sum(positive) + min(len(rewards) - sum(positive), sum(positive))
    kept = [r for r, k in zip(rewards, keep.tolist()) if k]
    want = [float(r - sum(kept) / len(kept)) if k else 0.0 for r, k in zip(rewards, keep.tolist())]
    assert advantages.tolist() == pytest.approx(want, abs=1e-6 if dtype == torch.float32 else 1e-14)
    assert (advantages[~keep] == 0).all() and (max(rewards) > min(rewards) or (advantages == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_red_drop_known_groups(dtype):
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
    for rewards, want in (([1, 0], [0.5, -0.5]), ([1, 1, 1, 0], [0.25, 0.25, 0.25, -0.75]),
                          ([0, 0, 1, 1, 1, 1, 1, 1], [-0.75] * 2 + [0.25] * 6)):
        advantages, keep = lesson.red_drop(torch.tensor(rewards, dtype=dtype))
        assert keep.all() and advantages.tolist() == want


def test_red_drop_keeps_a_reward_at_the_mean_in_any_unit():
    """1, 2, 3, 2 units: the mean is 2, up to rounding, which is larger where the rewards are."""
    for unit in torch.rand(100, generator=torch.Generator().manual_seed(0)).tolist():
        for scale in (1e-4, 1, 1e4):
            assert lesson.red_drop(torch.tensor([1.0, 2, 3, 2]) * (unit * scale))[1].all()


def test_red_drop_takes_integers_and_treats_every_group_by_itself():
    rewards = torch.tensor([[1, 0, 0], [0, 0, 0]])
    advantages, keep = lesson.red_drop(rewards)
    assert advantages.is_floating_point() and keep[1].all() and keep[0].sum() == 2
    assert rewards.tolist() == [[1, 0, 0], [0, 0, 0]]
    rewards = (random(5, 4, 6) < 0.3).double()
    advantages, keep = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(1))
    positives = rewards.sum(-1) + 6 * (rewards.sum(-1) == 0)  # all wrong is flat: six positives
    assert (keep.sum(-1) == torch.minimum(torch.tensor(6.0), 2 * positives)).all()
    assert advantages.sum(-1).abs().max() < 1e-14


def test_red_drop_chooses_uniformly_and_repeatably():
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]).expand(30_000, 6)  # keep 2 of 4 negatives: 6 pairs
    _, keep = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(3))
    pairs = torch.unique(keep[:, [0, 2, 3, 5]], dim=0, return_counts=True)[1]
    assert len(pairs) == 6
    assert (pairs - 5000).abs().max() < 4 * (30_000 * 5 / 36) ** 0.5  # four standard deviations of a binomial
    again = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(3))[1]
    other = lesson.red_drop(rewards, generator=torch.Generator().manual_seed(4))[1]
    assert torch.equal(keep, again) and not torch.equal(keep, other)


def every_choice_of_red_drop(rewards):
    """Advantages of each way to drop, all equally likely: (choices, K)."""
    size, mean = len(rewards), math.fsum(rewards) / len(rewards)
    positives = [i for i in range(size) if rewards[i] >= mean - 1e-12]
    negatives = [i for i in range(size) if i not in positives]
    rows = []
    for chosen in itertools.combinations(negatives, min(len(negatives), len(positives))):
        kept = [*positives, *chosen]
        baseline = math.fsum(rewards[i] for i in kept) / len(kept)
        rows.append([rewards[i] - baseline if i in kept else 0.0 for i in range(size)])
    return torch.tensor(rows, dtype=torch.float64)


@FEW
@given(groups_of_tenths)
def test_the_mean_over_the_choices_of_red_drop_has_a_closed_form(rewards):
    # Each of n negatives survives with chance p/n, and then beside p − 1 of the n − 1 others.
    values, mean = [float(r) for r in rewards], sum(rewards) / len(rewards)
    up, down = ([float(r) for r in rewards if (r >= mean) == side] for side in (True, False))
    p, n = len(up), len(down)
    if n > p:
        beside = {r: r + (p - 1) / max(1, n - 1) * (sum(down) - r) for r in down}
        want = [r - (sum(up) + p / n * sum(down)) / (2 * p) if r >= float(mean) - 1e-12
                else p / n * (r - (sum(up) + beside[r]) / (2 * p)) for r in values]
        assert every_choice_of_red_drop(values).mean(0).tolist() == pytest.approx(want, abs=1e-13)


# ---------------------------------------------------------------- RED-Weight


@FEW
@given(groups_of_tenths, temperatures)
def test_5_4_and_the_strength_of_the_imitation(rewards, temperature):
    values = [float(r) for r in rewards]
    size, mean = len(values), math.fsum(values) / len(values)
    weights = [math.exp((r - mean) / temperature) for r in values]
    weighted_mean = math.fsum(w * r for w, r in zip(weights, values)) / math.fsum(weights)
    covariance = math.fsum((w - math.fsum(weights) / size) * (r - mean) for w, r in zip(weights, values)) / size
    assert weighted_mean - mean == pytest.approx(covariance * size / math.fsum(weights), abs=1e-12)
    assert weighted_mean - mean >= -1e-15
    w = lesson.red_weight(tensor(values) - mean, temperature=temperature)
    assert w.tolist() == pytest.approx(weights)
    scaled = lesson.imitation_part(tensor(values) / temperature)  # imitation_part has T = 1: scale the rewards instead
    assert scaled.tolist() == pytest.approx([v * (weighted_mean - mean) / temperature for v in weights], abs=1e-12)
    pairs = lesson.pair_gradient(tensor(values), w[:, None] * w) * size**2 / w.sum()
    assert (pairs + temperature * scaled).tolist() == pytest.approx(
        [v * (r - mean) for v, r in zip(weights, values)], abs=1e-12)


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0, 5.0])
def test_5_5_and_the_share_of_the_push_that_falls_on_right_answers(temperature):
    for right in range(1, 8):
        rewards = (torch.arange(8) < right).double()
        advantages = rewards - right / 8
        weights = lesson.red_weight(advantages, temperature=temperature)
        odds = right / (8 - right) * math.exp(1 / temperature)
        assert float(weights @ rewards / weights.sum()) == pytest.approx(odds / (1 + odds))
        pushes = (weights * advantages).abs()
        assert float(pushes @ rewards / pushes.sum()) == pytest.approx(1 / (1 + math.exp(-1 / temperature)))


def test_a_hot_red_weight_is_reinforce_and_its_imitation_dies_like_var_over_t():
    rewards = random(8, seed=4)
    w = lesson.red_weight(rewards - rewards.mean(), temperature=1e6)
    assert (w - 1).abs().max() < 1e-6
    shift = float(w @ rewards / w.sum() - rewards.mean())
    assert 1e6 * shift == pytest.approx(float(rewards.var(correction=0)), abs=1e-6)
    w = lesson.red_weight(lesson.less_mean(lesson.TWO_OF_EIGHT))
    assert float(w @ lesson.TWO_OF_EIGHT / w.sum()) == pytest.approx(0.4753668864, abs=1e-10)  # paper, section RED


@pytest.mark.parametrize("call", [
    *[lambda t=t: lesson.red_weight(torch.zeros(2), temperature=t) for t in (0, -1.0, math.inf, math.nan)],
    *[lambda a=a, t=t: lesson.red_weight(torch.tensor(a), temperature=t)
      for a, t in (([math.nan, 0.0], 1.0), ([math.inf, 0.0], 1.0), ([1.0, 0.0], 1e-3))],
    *[lambda r=r: lesson.red_drop(r) for r in (torch.tensor([1.0]), torch.tensor(1.0), torch.ones(3, 1), torch.ones(0),
                                               torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 0.0]))],
    *[lambda a=a, n=n, o=o: lesson.adaptive_temperature(torch.tensor(a), torch.tensor(n), **o) for a, n, o in (
        ([0.5, -0.5], [1, 2, 3], {}), ([0.5], [3], {}), ([[0.5, -0.5]], [[1, 2]], {}), ([math.nan, 0.0], [1, 2], {}),
        ([0.5, -0.5], [1, -2], {}), ([0.5, -0.5], [1.0, math.inf], {}), ([0.5, -0.5], [1, 2], {"low": 0.0}),
        ([0.5, -0.5], [1, 2], {"low": 3.0, "high": 2.0}), ([0.5, -0.5], [1, 2], {"high": math.inf}))],
    lambda: lesson.graded_reward(torch.tensor([1.5])), lambda: lesson.graded_reward(torch.tensor([math.nan]))])
def test_what_people_copy_out_refuses_what_it_cannot_do(call):
    with pytest.raises(ValueError, match="need .*"):
        call()


# ---------------------------------------------------------------- adaptive temperature

HALVES = torch.tensor([0.5, 0.5, -0.5, -0.5])


def balance(advantages, lengths, temperature):
    return math.fsum(a * math.exp(a / temperature) * n for a, n in zip(advantages, lengths))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adaptive_temperature_the_four_cases(dtype):
    # The bracket halves 11 times from [.8, 100] to a width of 99.2/2¹¹ = .0484375. The root 1/ln 2.5 = 1.0913567 lies
    # between .8 + 6·.0484375 and .8 + 7·.0484375, and the upper end is returned.
    found = lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor([100, 100, 200, 300]))
    assert isinstance(found, float) and found == pytest.approx(1.1390625)
    for lengths in ([300, 200, 100, 100], [5, 5, 5, 5], [0, 0, 0, 0]):
        assert lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor(lengths)) is None
    assert lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor([1, 1, 10, 10])) == 0.8  # root 1/ln 10 = .43
    assert lesson.adaptive_temperature(HALVES.to(dtype), torch.tensor([100, 100, 100, 101])) == 100.0  # root 200.5


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
    assert found == 0.8 if root < 0.8 else found == 100.0 if root > 100 else -1e-3 <= found - root <= 0.05
    assert lesson.adaptive_temperature(advantages, 3 * lengths) == pytest.approx(found, abs=0.05)  # in any unit


@FEW
@given(st.lists(tenths, min_size=3, max_size=8), st.lists(st.integers(1, 900), min_size=8, max_size=8),
       st.floats(0.1, 2.0), st.floats(2.5, 200.0))
def test_adaptive_temperature_brackets_the_root_of_5_6_in_any_group(rewards, lengths, low, high):
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


def test_adaptive_temperature_reads_rounding_as_balance_and_survives_large_advantages():
    advantages = torch.tensor([1.0, 0.0, 0.0]) - torch.tensor([1.0, 0.0, 0.0]).mean()  # do not quite sum to 0
    assert lesson.adaptive_temperature(advantages, torch.tensor([7, 7, 7])) is None
    assert lesson.adaptive_temperature(torch.tensor([5000.0, -5000.0]), torch.tensor([1, 1000])) == 100.0
    assert lesson.adaptive_temperature(torch.tensor([-4000.0, -5000.0]), torch.tensor([1, 1])) == 0.8  # < 0 at any T


# ---------------------------------------------------------------- own samples


def expected_update(name, right, *, size=3):
    """(update, probs, ∇J) of a 4-arm softmax: autograd, a loop over every group, and for RED-Drop over every choice."""
    logits = torch.tensor([0.4, -0.6, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(logits, 0)
    probs, total = logprobs.detach().exp(), 0.0
    for group in itertools.product(range(4), repeat=size):
        rewards = [right[y] for y in group]
        advantages = (every_choice_of_red_drop(rewards).mean(0) if name == "RED-Drop"
                      else lesson.SHAPINGS[name](tensor(rewards)))
        total = total + probs[list(group)].prod() * (advantages * logprobs[list(group)]).mean()
    gradient = torch.autograd.grad((logprobs.exp() * tensor(right)).sum(), logits, retain_graph=True)[0]
    return torch.autograd.grad(total, logits)[0], probs, gradient


@pytest.mark.parametrize("name", list(lesson.SHAPINGS))
def test_5_7_on_own_samples_every_shaping_gives_g_of_p_times_the_gradient(name):
    update, probs, gradient = expected_update(name, [1.0, 0.0, 1.0, 0.0])
    gain = lesson.shaping_gain(probs[0] + probs[2], group_size=3, shaping=lesson.SHAPINGS[name])
    assert torch.allclose(update, gain * gradient, atol=1e-14)
    # So the entropy paid per unit of reward is the same for all: d/dη of both along θ + η·update.
    slopes = [probs @ (values * (step - probs @ step)) for step in (update, gradient)
              for values in (-probs.log(), tensor([1, 0, 1, 0]))]
    assert float(slopes[0] / slopes[1]) == pytest.approx(float(slopes[2] / slopes[3]))


def test_graded_rewards_let_a_shaping_turn_the_step_but_reinforce_never_does():
    for name, turns in {"REINFORCE": False, "RED-Drop": True, RED_WEIGHT: True}.items():
        update, _, gradient = expected_update(name, [0.0, 0.8, 1.0, 0.3])
        assert (torch.cosine_similarity(update, gradient, dim=0) < 1 - 1e-6) == turns


@pytest.mark.parametrize("name, temperature", [("REINFORCE", math.inf), (RED_WEIGHT, 1.0)])
def test_the_borrowed_batch_by_hand(name, temperature):
    seconds = [1, 0, 2, 3, 0, 2, 3, 0]
    advantages = np.array([(y == 1) - 1 / 8 for y in seconds])
    advantages = advantages * np.exp(advantages / temperature)
    first, second = np.zeros(4), np.zeros(4)
    for step in range(6):
        softmax = [np.exp(z) / np.exp(z).sum() for z in (first, second)]
        assert lesson.learned[name][step].tolist() == pytest.approx([softmax[0][1], softmax[1][1]], abs=1e-12)
        for advantage, y in zip(advantages, seconds):
            first = first + advantage / 8 * (np.eye(4)[1] - softmax[0])
            second = second + advantage / 8 * (np.eye(4)[y] - softmax[1])


def test_red_weight_learns_the_borrowed_method_and_its_answer():
    for name in (RED_WEIGHT, "RED-Weight, T = .3"):
        assert (lesson.learned[name][-1] > 0.95).all()


# ---------------------------------------------------------------- fixed data


@FEW
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=6).filter(lambda c: sum(c) > 0.05))
def test_5_9_is_the_nearest_point_of_the_simplex_and_all_that_live_move_together(pull):
    have, scale = lesson.resting_point(tensor(pull)), sum(pull)
    assert float(have.sum()) == pytest.approx(1) and (have >= 0).all()
    speeds = (tensor(pull) - scale * have).tolist()
    living = [s for s, p in zip(speeds, have.tolist()) if p > 0]
    assert max(living) - min(living) < 1e-9 and max(speeds) < max(living) + 1e-9
    best = math.inf
    for support in itertools.product([0, 1], repeat=len(pull)):  # the nearest point with a given support: shift it
        inside = [c / scale for c, s in zip(pull, support) if s]
        level = (sum(inside) - 1) / max(1, len(inside))
        candidate = [c / scale - level if s else 0.0 for c, s in zip(pull, support)]
        if inside and min(candidate) >= 0:
            best = min(best, math.fsum((c / scale - x) ** 2 for c, x in zip(pull, candidate)))
    assert float((tensor(pull) / scale - have).square().sum()) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_5_8_the_pull_of_red_weight_on_the_bandit_and_its_way():
    b, r = np.array([0.3, 0.6, 0.1]), np.array([0, 0.8, 1.0])
    # μ = .58, so the advantages are −.58, .22, .42 and at T = 1 c = (−.174·e^−.58, .132·e^.22, .042·e^.42).
    pull = [-0.174 * math.exp(-0.58), 0.132 * math.exp(0.22), 0.042 * math.exp(0.42)]
    assert lesson.pulls[RED_WEIGHT].tolist() == pytest.approx(pull, abs=1e-15)
    for name, temperature in (("REINFORCE", math.inf), (RED_WEIGHT, 1.0), ("RED-Weight, T = .3", 0.3)):
        theta = np.zeros(3)
        for step in range(4):
            probs = np.exp(theta) / np.exp(theta).sum()
            assert lesson.paths[name][step].tolist() == pytest.approx(probs.tolist())
            weighted = b * np.exp((r - 0.58) / temperature) * (r - 0.58)
            theta = theta + sum(weighted[i] * (np.eye(3)[i] - probs) for i in range(3))


def test_the_distance_to_the_limit_falls_on_the_whole_way_of_red_weight():
    for name in (RED_WEIGHT, "RED-Weight, T = .3"):
        limit = lesson.resting_point(lesson.pulls[name])
        distance = (torch.xlogy(limit, limit) - torch.xlogy(limit, lesson.paths[name])).sum(-1)  # KL(q ‖ π_θ)
        assert (distance.diff() <= 1e-14).all() and distance[-1] < 1e-12


def test_the_right_arm_survives_just_below_t_1_37():
    threshold = 1 / math.log(87 / 42)
    for factor, lives in ((1.001, False), (0.999, True)):
        assert (lesson.resting_point(lesson.red_weight_pull(threshold * factor))[2] > 0) == lives


def test_red_drop_on_the_bandit_has_no_brake_and_ends_on_arm_2():
    # All 3⁸ groups. Negatives of two kinds would need n_1 > 4·n_0 arms 3 and yet a majority of negatives: K ≥ 11. So
    # here it does not matter which of them are dropped.
    groups = torch.cartesian_prod(*[torch.arange(3)] * 8)
    weights = lesson.BEHAVIOUR[groups].prod(-1, keepdim=True) * lesson.red_drop(lesson.REWARDS[groups])[0] / 8
    pull = torch.stack([weights[groups == arm].sum() for arm in range(3)])
    assert float(pull.sum()) == pytest.approx(0, abs=1e-15)
    assert pull.argmax() == 1 and torch.softmax(1500 * pull, -1)[1] > 1 - 1e-12


# ---------------------------------------------------------------- friends


def test_flat_groups_only_rescale_the_mean_so_dapo_draws_for_information():
    rewards = (random(64, 4, seed=5) < 0.3).double()
    informative, advantages = lesson.informative_groups(rewards), rewards - rewards.mean(-1, keepdim=True)
    assert torch.allclose(advantages[informative].mean(0), advantages.mean(0) * 64 / informative.sum())
    every = torch.cartesian_prod(*[torch.arange(2)] * 8).double()
    chance = (0.25**every * 0.75 ** (1 - every)).prod(-1)
    assert float(1 / chance[lesson.informative_groups(every)].sum()) == pytest.approx(1 / (1 - 0.25**8 - 0.75**8))


def test_sgpo_and_the_weight_of_hinted_tokens():
    other = lesson.graded_reward(torch.tensor(0.6, dtype=torch.float64), steepness=10, centre=0.4)
    assert float(other) == pytest.approx(1 / (1 + math.e**-2))
    weights = lesson.hint_weight(tensor([0.1, 1.0, 0.0]))
    assert weights.tolist() == pytest.approx([0.5, 10 / 11, 0.0])
    assert lesson.hint_weight(1e-9) / 1e-9 == pytest.approx(10)
    assert lesson.hint_weight(0.3, smoothing=0.2) == pytest.approx(0.6)


def test_icpo_pools_the_hinted_rollout():
    plain, right = tensor([1, 0, 0, 0, 0, 0, 0]), torch.tensor(1.0, dtype=torch.float64)
    for step, reward in ((0, 2.0), (100, 1.75), (400, 1.0), (1000, 1.0)):  # the bonus decays to nothing and stays there
        pool = np.array([1, 0, 0, 0, 0, 0, 0, reward])
        have = lesson.icpo_advantages(plain, right, step=step)
        assert have.tolist() == pytest.approx(((pool - pool.mean()) / pool.std(ddof=1)).tolist(), abs=5e-6)
    wrong = lesson.icpo_advantages(torch.zeros(2, 7), torch.zeros(2), step=0)  # a wrong hinted answer gets no bonus
    assert wrong.shape == (2, 8) and (wrong == 0).all()


def test_aepo_hot_samples_raise_the_entropy_of_any_policy_and_cold_ones_lower_it():
    # The slope is −Σ π²·(w−1)·(log π + H) with w = π_T/π. For T > 1, w falls as log π rises. Under weights ∝ π² the two
    # are anticorrelated, w has a mean ≤ 1 and log π one ≥ −H: the sum is ≤ 0.
    def slope(p, temperature):
        move = torch.softmax(p.log() / temperature, -1) - p
        return -float((p * p.log() * (move - p @ move)).sum())

    assert [slope(tensor([0.7, 0.2, 0.1]), t) for t in (1.2, 0.8)] == pytest.approx([0.0255595, -0.0333072], abs=1e-7)
    for p in torch.softmax(6 * random(200, 6, seed=6), -1):
        assert slope(p, 1.2) > 0 > slope(p, 0.8)


# ---------------------------------------------------------------- the stale world


def test_the_methods_are_what_their_names_say():
    advantages = {name: shaping(lesson.TWO_OF_EIGHT.expand(3, 8))[0] for name, (shaping, _) in lesson.METHODS.items()}
    right_and_wrong = {name: (float(a[0]), float(a[-1])) for name, a in advantages.items()}
    for name, want in {
        "REINFORCE": (0.75, -0.25), "GRPO": (1.732047, -0.577349), RED_WEIGHT: (1.587750, -0.194700),
        "RED-Weight, T = .3": (0.75 * math.exp(2.5), -0.25 * math.exp(-1 / 1.2)),
        "RED-Weight, clipped": (1.587750, -0.194700),
        # r̄_w = .4753669: w·(r − r̄_w), and A + w·(r̄_w − r̄)
        "pairs": (math.exp(0.75) * 0.5246331, -math.exp(-0.25) * 0.4753669),
        "REINFORCE + imitation": (0.75 + math.exp(0.75) * 0.2253669, -0.25 + math.exp(-0.25) * 0.2253669),
    }.items():
        assert right_and_wrong[name] == pytest.approx(want, abs=1e-6), name
    assert sorted(advantages["RED-Drop"].tolist()) == [-0.5, -0.5, 0, 0, 0, 0, 0.5, 0.5]
    assert {name for name, (_, clip) in lesson.METHODS.items() if clip} == {"GRPO", "RED-Weight, clipped"}


@pytest.mark.parametrize("setting, name", [("refreshed every 20 steps", "GRPO"), ("10 batches late", "REINFORCE"),
                                           ("never refreshed", "RED-Weight, clipped")])
def test_training_is_lesson_04s_loss_on_that_data(setting, name):
    # The same worlds and responses, rec_loss of lesson 04, and the gradient of every step must agree.
    earlier, world = importlib.import_module("04_regularization"), importlib.import_module("stale_world")
    shaping, clip = lesson.METHODS[name]
    have = lesson.train(shaping, clip, setting=setting, seeds=2, steps=25)
    generator = torch.Generator().manual_seed(lesson.lesson.seed)
    logits, rewards = world.random_worlds(2, generator=generator)
    every, late = world.SETTINGS[setting]
    versions = [logits]
    for step in range(1, 26):
        version = 0 if every is None else every * max(0, (step - late - 1) // every)
        responses = world.sample_responses(versions[version], generator=generator)
        learner = versions[-1].clone().requires_grad_()
        new, old = (world.token_logprobs(table, responses).flatten(0, 2) for table in (learner, versions[version]))
        loss = earlier.rec_loss(new, old, shaping(rewards.gather(-1, responses)).flatten(), torch.ones_like(new),
                                clip="one_side" if clip else "none", importance_sampling=clip)
        versions.append(world.descend(learner, loss))
    want = torch.stack([world.expected_reward(table, rewards) for table in versions], -1)
    assert have.shape == (2, 26) and torch.allclose(have, want, atol=1e-12)


def test_on_fresh_data_the_clip_cannot_act():
    fresh = {name: lesson.curves["fresh data", name] for name in ("RED-Weight, clipped", RED_WEIGHT)}
    assert (fresh["RED-Weight, clipped"] - fresh[RED_WEIGHT]).abs().max() < 1e-12


def test_it_is_the_imitation_that_helps_and_not_a_larger_step():
    def final(shaping, setting):
        return float(lesson.train(shaping, False, setting=setting, seeds=20, steps=60)[:, -20:].mean())

    for setting in ("refreshed every 20 steps", "10 batches late", "never refreshed"):
        plain = final(lesson.less_mean, setting)
        imitation = final(lesson.METHODS["REINFORCE + imitation"][0], setting)
        assert imitation > final(lesson.METHODS["pairs"][0], setting)
        assert imitation > max(plain, final(lambda rewards: 2 * lesson.less_mean(rewards), setting))
    hot = final(lambda r: lesson.less_mean(r) * lesson.red_weight(lesson.less_mean(r), temperature=3.0), setting)
    assert plain < hot < final(lesson.METHODS[RED_WEIGHT][0], setting)  # never refreshed: a hot T helps less


# ---------------------------------------------------------------- the script


def run(folder, *flags):
    return subprocess.run([sys.executable, str(ROOT / "05_data_shaping.py"), *flags], cwd=folder, capture_output=True,
                          text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_quick_run_prints_a_narrow_page_and_draws(tmp_path):
    result = run(tmp_path, "--quick", "--out", "out")
    assert result.returncode == 0 and result.stderr == ""
    assert "verdicts below may differ" in result.stdout and "0 failed" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"05_own_data.png", "05_bandit.png", "05_stale_world.png"}


RIGHT = """import math
def temperature_for(p, target):
    return 1 / (math.log(target / (1 - target)) - math.log(p / (1 - p)))
"""


@pytest.mark.parametrize("number, answer, code", [
    (1, "5", 0), (1, "4", 1), (2, "no", 0), (2, "yes", 1), (3, RIGHT, 0), (3, RIGHT.replace("- p", "+ p"), 1)])
def test_exercises_tell_right_from_wrong(tmp_path, number, answer, code):
    utils = importlib.import_module("utils")
    if number == 3:
        (tmp_path / "answer.py").write_text(answer, encoding="utf-8")
        answer = str(tmp_path / "answer.py")
    result = utils.exercise(lesson.EXERCISES, number, answer)
    assert (result in (0, None)) == (code == 0), result
