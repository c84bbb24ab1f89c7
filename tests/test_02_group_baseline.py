"""Lesson 02 against references that share no code path with it: plain Python loops, exact fractions, literals."""

import importlib
import itertools
import math
import os
import pathlib
import statistics
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import utils

ROOT = pathlib.Path(__file__).resolve().parent.parent
lesson = importlib.import_module("02_group_baseline")
page = lesson.lesson

FEW = settings(max_examples=20, deadline=None, derandomize=True)
MODES = list(lesson.MODES)
NAN, INF = math.nan, math.inf


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def lists(low=-3.0, high=3.0, min_size=2, max_size=6):
    return st.lists(st.floats(low, high), min_size=min_size, max_size=max_size)


def test_every_claim_of_the_page_holds():
    assert all(c["ok"] for c in page.claims) and len(page.claims) >= 20
    assert {c["section"][0] for c in page.claims} == set("123456")


# ---------------------------------------------------------------- group_advantages


def advantages_by_hand(rewards, leave_one_out, std_normalize, eps):
    """The definitions in the statistics module's words, not the K/(K−1) shortcut."""
    spread = statistics.pstdev(rewards) + eps if std_normalize else 1.0
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    if leave_one_out:
        return [(r - statistics.fmean(rewards[:i] + rewards[i + 1:])) / spread for i, r in enumerate(rewards)]
    return [(r - statistics.fmean(rewards)) / spread for r in rewards]


@FEW
@given(lists(), st.booleans(), st.booleans(), st.sampled_from([1e-6, 1e-4, 0.1]), st.floats(-5, 5))
def test_advantages_follow_their_definition_in_every_group_and_forget_shifts(rewards, loo, std, eps, shift):
    options = {"leave_one_out": loo, "std_normalize": std, "eps": eps}
    batch = double([[rewards, rewards[::-1]], [[1.0] + [0.0] * (len(rewards) - 1), [0.5] * len(rewards)]])
    batched = lesson.group_advantages(batch, **options)
    assert batched.shape == batch.shape and batched.dtype == torch.float64
    for i, j in itertools.product(range(2), range(2)):
        expected = advantages_by_hand(batch[i, j].tolist(), loo, std, eps)
        np.testing.assert_allclose(batched[i, j], expected, atol=1e-8)
    plain = lesson.group_advantages(double(rewards))
    assert abs(plain.sum().item()) < 1e-9
    np.testing.assert_allclose(lesson.group_advantages(double(rewards) + shift), plain, atol=1e-9)


@pytest.mark.parametrize("rewards, options, expected", [
    # mean 1/4, population variance 3/16: std √3/4; sample variance 1/4
    ([1, 0, 0, 0], {}, [0.75, -0.25, -0.25, -0.25]),
    ([1, 0, 0, 0], {"std_normalize": True}, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
    ([1, 0, 0, 0], {"std_normalize": True, "eps": 1e-4}, [1.7316509, -0.5772170, -0.5772170, -0.5772170]),
    ([1, 0, 0, 0], {"leave_one_out": True}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    # one success of eight: mean 1/8, variance 7/64, so 7/8 : √7/8 = √7
    ([1] + [0] * 7, {"std_normalize": True}, [2.6457513] + [-0.3779645] * 7),
    ([1, 1] + [0] * 6, {"std_normalize": True}, [1.732047] * 2 + [-0.577349] * 6),
    # eps stands outside the root: (r − r̄)/(.01 + .01), whereas √(var + eps) would give ±.01/.1005
    ([0.01, -0.01], {"std_normalize": True, "eps": 0.01}, [0.5, -0.5]),
])
def test_advantages_worked_numbers(rewards, options, expected):
    for dtype in (torch.float32, torch.float64):
        measured = lesson.group_advantages(torch.tensor(rewards, dtype=dtype), **options)
        assert measured.dtype == dtype
        np.testing.assert_allclose(measured, expected, rtol=1e-5)


def test_sample_standard_deviation_shrinks_advantages_by_the_root_of_k_minus_1_over_k():
    for rewards, expected in [([1, 0, 0, 0], [1.5, -0.5]), ([1, 1] + [0] * 6, [1.620182, -0.540061])]:
        group = double(rewards)
        sample = lesson.group_advantages(group) / (group.std(correction=1) + 1e-6)
        np.testing.assert_allclose(sample[[0, -1]], expected, rtol=3e-6)
        population = lesson.group_advantages(group, std_normalize=True)
        np.testing.assert_allclose(sample, population * math.sqrt(1 - 1 / len(group)), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std_normalize, eps", [(False, 1e-6), (True, 1e-6), (True, 1e-8), (True, 0.0)])
def test_flat_groups_are_exactly_zero(dtype, std_normalize, eps):
    for value, size, loo in itertools.product([0.1, 0.3, -1 / 3, 1e-3, 123.456], [2, 3, 6, 7, 11], [False, True]):
        rewards = torch.full((size,), value, dtype=dtype)
        measured = lesson.group_advantages(rewards, leave_one_out=loo, std_normalize=std_normalize, eps=eps)
        assert torch.equal(measured, torch.zeros_like(rewards))
    mixed = lesson.group_advantages(torch.tensor([[0.1] * 7, [0.1] * 6 + [0.2]], dtype=dtype))
    assert (mixed[0] == 0).all() and (mixed[1] != 0).all()  # a flat group does not silence its neighbour


@pytest.mark.parametrize("rewards", [[0.7], 0.7, [[0.1], [0.2]], [], [[1.0, 0.0], [0.5, NAN]], [1.0, INF], [1.0, -INF]])
def test_groups_of_one_and_rewards_that_are_not_finite_are_refused(rewards):
    with pytest.raises(ValueError, match="need finite rewards"):
        lesson.group_advantages(torch.tensor(rewards))


def test_whole_numbers_and_booleans_are_rewards_too():
    for rewards in (torch.tensor([1, 0, 0, 0]), torch.tensor([True, False, False, False])):
        np.testing.assert_allclose(lesson.group_advantages(rewards), [0.75, -0.25, -0.25, -0.25])


def test_responses_are_grouped_by_prompt_not_by_position():
    prompts, rewards = torch.tensor([1, 2, 1, 2]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    groups = prompts.argsort(stable=True).view(-1, 2)
    assert (lesson.group_advantages(rewards[groups]) == 0).all()  # both prompts are flat
    assert lesson.group_advantages(rewards.view(-1, 2)).tolist() == [[0.5, -0.5]] * 2  # a bare view invents a signal


# ---------------------------------------------------------------- (2.1) to (2.3)


def random_policy(seed, responses=4, parameters=3):
    """Probabilities, rewards and scores with E[s] = 0."""
    generator = np.random.default_rng(seed)
    probs, scores = generator.dirichlet(np.ones(responses) * 2), generator.normal(size=(responses, parameters))
    return probs, generator.normal(size=responses), scores - probs @ scores


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("leave_one_out, std_normalize", [(False, False), (True, False), (False, True), (True, True)])
def test_2_1_and_2_2_any_policy_by_loops_over_groups(group_size, leave_one_out, std_normalize):
    probs, rewards, scores = random_policy(seed=group_size)
    chance, estimates = [], []
    for group in itertools.product(range(4), repeat=group_size):
        advantages = advantages_by_hand([rewards[i] for i in group], leave_one_out, std_normalize, 1e-6)
        chance.append(math.prod(probs[i] for i in group))
        estimates.append(sum(a * scores[i] for a, i in zip(advantages, group)) / group_size)
    variance = np.trace(np.cov(np.array(estimates).T, aweights=chance, ddof=0))
    mean, measured = lesson.group_estimator_moments(
        double(probs), double(rewards), double(scores), group_size=group_size, leave_one_out=leave_one_out,
        std_normalize=std_normalize)
    np.testing.assert_allclose(mean, np.average(estimates, axis=0, weights=chance), atol=1e-9)
    assert measured.item() == pytest.approx(variance, abs=1e-9)
    gradient = (probs * rewards) @ scores  # ∇J = Σ π r s
    if not std_normalize:
        np.testing.assert_allclose(mean, gradient * (1 if leave_one_out else (group_size - 1) / group_size), atol=1e-9)
    if leave_one_out and not std_normalize:  # (2.2), with ζ₁ from its own words, Var E[h | y_1] = V(J)/4
        pairs = [(probs[i] * probs[j], (rewards[i] - rewards[j]) / 2 * (scores[i] - scores[j]) - gradient)
                 for i, j in itertools.product(range(4), repeat=2)]
        zeta_2 = sum(p * h @ h for p, h in pairs)
        one_sample = (rewards - probs @ rewards)[:, None] * scores - gradient
        four_zeta_1 = probs @ (one_sample**2).sum(-1)
        count = math.comb(group_size, 2)
        assert variance == pytest.approx((zeta_2 + (group_size - 2) * four_zeta_1 / 2) / count, abs=1e-9)


def test_2_1_in_exact_fractions():
    # π = (3, 6, 1)/10, r = (0, 8, 10)/10, groups of 3: the mean is 2/3 of π·(r − J), J = 29/50, without any rounding.
    probs, rewards = [Fraction(p, 10) for p in (3, 6, 1)], [Fraction(r, 10) for r in (0, 8, 10)]
    total = [Fraction(0)] * 3
    for group in itertools.product(range(3), repeat=3):
        mean = sum(rewards[i] for i in group) / 3
        for i, arm in itertools.product(group, range(3)):
            total[arm] += math.prod(probs[j] for j in group) * (rewards[i] - mean) * ((arm == i) - probs[arm]) / 3
    assert total == [Fraction(2, 3) * p * (r - Fraction(29, 50)) for p, r in zip(probs, rewards)]
    measured, _ = lesson.group_estimator_moments(*lesson.bandit, group_size=3)
    np.testing.assert_allclose(measured, [float(t) for t in total], atol=1e-15)


def test_2_2_k_times_the_variance_falls_towards_that_of_the_known_mean():
    sizes = torch.tensor(list(lesson.sizes))
    falling = sizes * lesson.variances
    assert (falling.diff() < 0).all() and (falling > lesson.knowing_j).all()
    assert falling[0] > lesson.none > falling[1]  # a pair is noisier than no baseline, three are not


@FEW
@given(st.floats(0.02, 0.98), st.integers(2, 9))
def test_2_3_std_gain_is_the_mean_of_normalised_binary_groups(p, group_size):
    # ∇p = 1 along the direction in which a right answer has score 1/p and a wrong one −1/(1−p).
    expected = 0.0
    for group in itertools.product([0.0, 1.0], repeat=group_size):
        mean, spread = statistics.fmean(group), statistics.pstdev(group)
        if spread:
            chance = math.prod(p if r else 1 - p for r in group)
            update = sum((r - mean) / spread * (1 / p if r else -1 / (1 - p)) for r in group) / group_size
            expected += chance * update
    assert lesson.std_gain(double(p), group_size=group_size).item() == pytest.approx(expected, rel=1e-9)


def test_2_3_limits():
    # the hardest and the easiest prompts, K = 8: √7, three times the 7/8 without division
    np.testing.assert_allclose(lesson.std_gain(double([1e-7, 1 - 1e-7]), group_size=8), math.sqrt(7), rtol=1e-5)
    rates = double([0.1, 0.5, 0.9])  # large K: 1/√(p(1−p)), the slope of 2·arcsin √p
    slope = (2 * (rates + 1e-6).sqrt().asin() - 2 * (rates - 1e-6).sqrt().asin()) / 2e-6
    np.testing.assert_allclose(lesson.std_gain(rates, group_size=512), slope, rtol=0.005)


@pytest.mark.parametrize("group_size, share", [(2, 0.625), (4, 82 / 256), (8, 6562 / 65536), (16, 43046722 / 4**16)])
def test_share_of_silent_groups(group_size, share):
    # p = 1/4: (1 + 3^K) / 4^K of all groups have only zeros for advantages
    groups = torch.cartesian_prod(*[torch.arange(2)] * group_size).double()
    silent = (lesson.group_advantages(groups) == 0).all(-1)
    assert ((0.25**groups * 0.75 ** (1 - groups)).prod(-1) @ silent.double()).item() == pytest.approx(share, rel=1e-12)


# ---------------------------------------------------------------- (2.4): aggregation and length bias


def aggregate_by_hand(per_token, mask, mode, constant):
    """Loops over the kept tokens of every response; responses without tokens are dropped at the start."""
    responses = [[x for x, keep in zip(row, keeps) if keep] for row, keeps in zip(per_token, mask)]
    responses = [tokens for tokens in responses if tokens]
    if not responses:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, responses)) / sum(map(len, responses))
    if mode == "seq-mean-token-mean":
        return statistics.fmean(sum(tokens) / len(tokens) for tokens in responses)
    return statistics.fmean(sum(tokens) for tokens in responses) / (constant or 1)


@FEW
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31), st.sampled_from(MODES), st.booleans())
def test_2_4_aggregate_by_loops(rows, columns, seed, mode, as_bool):
    generator = torch.Generator().manual_seed(seed)
    per_token = torch.randn(2, rows, columns, dtype=torch.float64, generator=generator)
    mask = torch.rand(2, rows, columns, generator=generator) < 0.6
    constant = 7.5 if mode == "constant" else None
    garbage = torch.where(mask, per_token, double([NAN, INF, -INF, 1e308]).repeat(columns)[:columns])
    measured = lesson.aggregate(garbage, mask if as_bool else mask.double(), mode=mode, constant=constant)
    for i in range(2):
        expected = aggregate_by_hand(per_token[i].tolist(), mask[i].tolist(), mode, constant)
        assert measured[i].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mode, expected", [("token-mean", 0.6), ("seq-mean-token-mean", 0.75),
                                            ("seq-mean-token-sum", 1.5), ("constant", 0.1875)])
def test_2_4_one_token_of_loss_1_beside_four_of_loss_one_half(mode, expected):
    per_token, mask = double([[1.0, 0, 0, 0], [0.5] * 4]), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    assert lesson.aggregate(per_token, mask, mode=mode, constant=lesson.MODES[mode]).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_2_4_masked_tokens_give_no_gradient_and_padding_changes_nothing(mode):
    constant = lesson.MODES[mode]
    per_token = double([[0.5, NAN, 1.5, -INF]]).requires_grad_()
    loss = lesson.aggregate(per_token, torch.tensor([[1, 0, 1, 0]]), mode=mode, constant=constant)
    loss.backward()
    weight = {"token-mean": 0.5, "seq-mean-token-mean": 0.5, "seq-mean-token-sum": 1.0, "constant": 0.125}[mode]
    assert loss.item() == pytest.approx(2.0 * weight)
    assert per_token.grad.tolist() == [[weight, 0, weight, 0]]
    wider = (2, 3, 1, 2)  # padding on both sides of the row, and rows without tokens: they count in no denominator
    padded = torch.nn.functional.pad(per_token.detach(), wider, value=NAN)
    mask = torch.nn.functional.pad(torch.tensor([[1, 0, 1, 0]]), wider)
    assert lesson.aggregate(padded, mask, mode=mode, constant=constant).item() == pytest.approx(loss.item())
    nothing = lesson.aggregate(padded.requires_grad_(), torch.zeros_like(mask), mode=mode, constant=constant)
    nothing.backward()
    assert nothing.item() == 0 and (padded.grad == 0).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_2_4_micro_batches_weighted_by_their_tokens_give_the_gradient_of_the_whole(size):
    generator = torch.Generator().manual_seed(size)
    logprobs = torch.randn(6, 5, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.arange(5) < torch.tensor([1, 5, 2, 3, 4, 2])[:, None]
    (whole,) = torch.autograd.grad(lesson.aggregate(-logprobs, mask, mode="token-mean"), logprobs)
    plain_means = []
    for start in range(0, 6, size):
        rows = slice(start, start + size)
        loss = lesson.aggregate(-logprobs[rows], mask[rows], mode="token-mean")
        (mask[rows].double().sum() / mask.sum() * loss).backward(retain_graph=True)
        plain_means.append(torch.autograd.grad(loss, logprobs)[0])
    torch.testing.assert_close(logprobs.grad, whole, atol=1e-12, rtol=0)
    assert not torch.allclose(torch.stack(plain_means).mean(0), whole)  # the mean of their means is another loss


@pytest.mark.parametrize("change", [
    {"mode": "mean"}, {"mode": "constant"}, {"mode": "constant", "constant": 0}, {"mode": "constant", "constant": -8},
    {"constant": 8}, {"mask": torch.ones(2, 3)}, {"mask": torch.full((2, 4), 0.5)},
    {"mask": torch.tensor([[1.0, -1.0, 1.0, -1.0]] * 2)}])
def test_aggregate_refuses_bad_input(change):
    arguments = {"per_token": torch.ones(2, 4), "mask": torch.ones(2, 4), "mode": "token-mean", **change}
    with pytest.raises(ValueError, match="need a mode"):
        lesson.aggregate(arguments.pop("per_token"), arguments.pop("mask"), **arguments)


@pytest.mark.parametrize("length", [1, 8, 32])
def test_2_4_weight_of_one_token_as_drawn(length):
    # 7 others of 8 tokens: token-mean 1/(56 + L), seq-mean-token-mean 1/(8 L), the sums are blind to L.
    mask = torch.arange(32) < torch.tensor([length] + [8] * 7)[:, None]
    tokens = torch.zeros(8, 32, dtype=torch.float64, requires_grad=True)
    weight = {mode: torch.autograd.grad(lesson.aggregate(tokens, mask, mode=mode, constant=c), tokens)[0][0, 0].item()
              for mode, c in lesson.MODES.items()}
    assert weight == pytest.approx({"token-mean": 1 / (56 + length), "seq-mean-token-mean": 1 / (8 * length),
                                    "seq-mean-token-sum": 1 / 8, "constant": 1 / 64})


@settings(FEW, max_examples=10)
@given(st.floats(-2, 2), st.floats(-2, 2), st.sampled_from([2, 3]))
def test_2_4_push_on_the_lengths_in_closed_form(right_logit, wrong_logit, group_size):
    # Reward and length are independent given the coin, so E[A_i·1(right)] = ¼·(K−1)/K factors out of E[(1/L) Σ_t s_t],
    # where stopping (probability q) has score 1 − q and L = 1, going on has score −q and L = 2.
    q = [1 / (1 + math.exp(-x)) for x in (right_logit, wrong_logit)]
    per_token = [x * (1 - x) - (1 - x) * x / 2 for x in q]
    factor = (group_size - 1) / group_size / 4
    logits = double([right_logit, wrong_logit])
    push = {mode: lesson.length_gradient(logits, mode=mode, constant=c, group_size=group_size)
            for mode, c in lesson.MODES.items()}
    np.testing.assert_allclose(push["seq-mean-token-mean"], [factor * per_token[0], -factor * per_token[1]], atol=1e-12)
    np.testing.assert_allclose(torch.stack([push["seq-mean-token-sum"], push["constant"]]), 0, atol=1e-12)
    assert push["token-mean"][0] > 0 > push["token-mean"][1]


def test_2_4_token_mean_pushes_less_the_more_responses_share_its_denominator():
    half, shares = torch.zeros(2).double(), []
    for k in range(2, 7):
        tokens, mean = (lesson.length_gradient(half, mode=mode, group_size=k)
                        for mode in ("token-mean", "seq-mean-token-mean"))
        shares.append((tokens / mean)[0].item())
    assert 1 > shares[0] and all(later < earlier for earlier, later in itertools.pairwise(shares)) and shares[-1] > 0
    # K = 2 by loops: four outcomes (reward, length) of probability ¼; the loss divides by L_1 + L_2.
    total = np.zeros(2)
    for first, second in itertools.product(itertools.product([1, 0], [1, 2]), repeat=2):
        for reward, length in (first, second):
            advantage, score = reward - (first[0] + second[0]) / 2, 0.5 if length == 1 else -0.5
            total[1 - reward] += advantage * score / (first[1] + second[1]) / 16
    np.testing.assert_allclose(lesson.length_gradient(half, mode="token-mean", group_size=2), total, atol=1e-15)


def test_2_4_longer_responses_drift_the_same_way():
    """Up to 8 tokens, each the last with probability ½: E[(1/L) Σ_t s_t] is positive, E[Σ_t s_t] is 0, by loops."""
    mean, total = 0.0, 0.0
    for length in range(1, 9):
        chance, score = 0.5 ** min(length, 7), (0.5 if length < 8 else 0) - 0.5 * (length - 1)
        mean, total = mean + chance * score / length, total + chance * score
    assert mean > 0 and total == pytest.approx(0, abs=1e-12)


# ---------------------------------------------------------------- (2.5): success amplification


@FEW
@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.floats(0.5, 5), st.booleans())
def test_2_5_one_round_is_the_best_policy_under_the_kl_penalty(success, reference, beta, std_normalize):
    """Brute force: among all success rates q, maximise q·A₊ + (1−q)·A₋ − β·KL(q ‖ reference)."""
    spread = math.sqrt(success * (1 - success) + 1e-5) if std_normalize else 1.0
    right, wrong = (1 - success) / spread, -success / spread

    def objective(q):
        kl = q * math.log(q / reference) + (1 - q) * math.log((1 - q) / (1 - reference))
        return q * right + (1 - q) * wrong - beta * kl

    options = {"reference": reference, "std_normalize": std_normalize}
    start, best = lesson.success_path(success, beta, rounds=1, **options).tolist()
    assert start == success
    for other in (0.99 * best, 0.999 * best, 0.99 * best + 0.01, 0.999 * best + 0.001):
        assert objective(other) < objective(best)
    moved = math.log(best / (1 - best)) - math.log(reference / (1 - reference))  # the log-odds move by (A₊ − A₋)/β
    assert moved == pytest.approx((right - wrong) / beta, abs=1e-8)


@pytest.mark.parametrize("beta, std, points", [(1, True, 3), (2, True, 3), (5, True, 3), (1, False, 1)])
def test_2_5_rounds_end_at_the_lowest_fixed_point(beta, std, points):
    def next_success(p):
        return 1 / (1 + 4 * math.exp(-(1 / math.sqrt(p * (1 - p) + 1e-5) if std else 1.0) / beta))

    crossings = []
    for i in range(1, 10**4 + 1):  # scan (0, 1], then bisect
        low, high = (i - 1) / 10**4, i / 10**4
        rises = next_success(low) > low
        if rises != (next_success(high) > high):
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if (next_success(middle) > middle) == rises else (low, middle)
            crossings.append(low)
    assert len(crossings) == points and crossings[0] > 0.2
    assert lesson.success_path(0.2, beta, std_normalize=std)[-1].item() == pytest.approx(crossings[0], abs=1e-9)
    if (beta, std) == (1, True):  # unstable, and mirrored: the next rate depends on p(1−p) alone
        assert crossings[1] == pytest.approx(0.935, abs=5e-4)
        assert next_success(1 - crossings[1]) == pytest.approx(crossings[1], abs=1e-9)


# ---------------------------------------------------------------- friends


@FEW
@given(st.integers(0, 2**31))
def test_batch_whitening_ignores_groups(seed):
    rewards = np.random.default_rng(seed).normal(size=(3, 4))
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    np.testing.assert_allclose(lesson.batch_whitened_advantages(double(rewards)), expected, atol=1e-10)


@FEW
@given(st.floats(0, 0.49), st.floats(0, 0.49), lists(0, 1, min_size=3))
def test_noise_correction_is_unbiased_and_cancels_under_std(false_positive, false_negative, rewards):
    rates = {"false_positive_rate": false_positive, "false_negative_rate": false_negative}
    seen_wrong, seen_right = lesson.noise_corrected_rewards(double([0.0, 1.0]), **rates).tolist()
    assert (1 - false_positive) * seen_wrong + false_positive * seen_right == pytest.approx(0.0, abs=1e-9)
    assert false_negative * seen_wrong + (1 - false_negative) * seen_right == pytest.approx(1.0, abs=1e-9)
    binary = double([1.0, 0.0, *(round(r) for r in rewards)])
    np.testing.assert_allclose(
        lesson.group_advantages(lesson.noise_corrected_rewards(binary, **rates), std_normalize=True, eps=0.0),
        lesson.group_advantages(binary, std_normalize=True, eps=0.0), atol=1e-9)


def test_noise_correction_takes_booleans_and_refuses_a_verifier_that_says_nothing():
    seen = lesson.noise_corrected_rewards(torch.tensor([True, False]), false_positive_rate=0.2, false_negative_rate=0.1)
    np.testing.assert_allclose(seen, [8 / 7, -2 / 7], rtol=1e-6)
    for rates in [(0.5, 0.5), (0.7, 0.4), (-0.1, 0.2), (0.2, -0.1), (NAN, 0.1), (0.1, NAN)]:
        with pytest.raises(ValueError, match="rates"):
            lesson.noise_corrected_rewards(double([1, 0]), false_positive_rate=rates[0], false_negative_rate=rates[1])


@FEW
@given(lists(0, 1, min_size=2), st.sampled_from([1.0, 2.0]))
def test_ngrpo_by_hand(rewards, max_reward):
    pool = rewards + [max_reward]
    expected = [0.0] * len(rewards)
    if len(set(pool)) > 1:
        expected = [(r - statistics.fmean(pool)) / (statistics.stdev(pool) + 1e-6) for r in rewards]
    both = lesson.ngrpo_advantages(double([rewards, [0.0] * len(rewards)]), max_reward=max_reward)
    np.testing.assert_allclose(both[0], expected, atol=1e-8)
    np.testing.assert_allclose(both[1], -((len(rewards) + 1) ** -0.5), rtol=1e-5)  # whatever the virtual reward is


def test_ngrpo_flat_pool_and_refusal():
    assert (lesson.ngrpo_advantages(torch.full((6,), 0.1), max_reward=0.1) == 0).all()  # float32: .1 has no exact mean
    assert (lesson.ngrpo_advantages(torch.ones(8)) == 0).all()  # an all-right group stays silent
    with pytest.raises(ValueError, match="largest possible"):
        lesson.ngrpo_advantages(double([0.5, 1.5]))


# ---------------------------------------------------------------- exercises and the script as a whole


@pytest.mark.parametrize("number, right, wrong", [(1, "-0.75", "-0.25"), (2, ".01", ".5")])
def test_predictions(number, right, wrong, capsys):
    assert utils.exercise(lesson.EXERCISES, number, right) == 0
    assert utils.exercise(lesson.EXERCISES, number, wrong) == 1


@pytest.mark.parametrize("share, right", [("p**k + (1 - p)**k", True), ("p**k", False),
                                          ("round(p**k + (1 - p)**k, 3)", False)])
def test_smallest_group_exercise(share, right, tmp_path, capsys):
    answer = tmp_path / "answer.py"
    answer.write_text(f"def smallest_group(p, limit):\n    return next(k for k in range(2, 99) if {share} <= limit)\n")
    verdict = utils.exercise(lesson.EXERCISES, 3, str(answer))
    assert verdict is None if right else "Not yet" in verdict


@pytest.mark.slow
def test_quick_run_fits_a_terminal_and_writes_its_figures(tmp_path):
    command = [sys.executable, ROOT / "02_group_baseline.py", "--quick", "--seed", "3", "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert max(map(len, result.stdout.replace(str(tmp_path), "").splitlines())) <= 100
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "02_group_mean.png", "02_length_bias.png", "02_success_amplification.png"}
    assert torch.get_default_dtype() == torch.float32
