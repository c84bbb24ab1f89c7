"""Lesson 02 against references that share no code path with it: plain Python loops, exact fractions, literals."""

import importlib
import itertools
import json
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

lesson = importlib.import_module("02_group_baseline")

FEW = settings(max_examples=20, deadline=None, derandomize=True)
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
NAN, INF = math.nan, math.inf


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def lists(low=-3.0, high=3.0, min_size=2, max_size=6):
    return st.lists(st.floats(low, high), min_size=min_size, max_size=max_size)


def advantages_by_hand(rewards, leave_one_out, std_normalize, eps):
    """The definitions in the statistics module's words, not the K/(K−1) shortcut."""
    spread = statistics.pstdev(rewards) + eps if std_normalize else 1.0
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    if leave_one_out:
        return [(r - statistics.fmean(rewards[:i] + rewards[i + 1:])) / spread for i, r in enumerate(rewards)]
    return [(r - statistics.fmean(rewards)) / spread for r in rewards]


# ---------------------------------------------------------------- group_advantages


@FEW
@given(lists(), st.booleans(), st.booleans(), st.sampled_from([1e-6, 1e-4, 0.1]))
def test_advantages_follow_their_definition(rewards, leave_one_out, std_normalize, eps):
    expected = advantages_by_hand(rewards, leave_one_out, std_normalize, eps)
    options = {"leave_one_out": leave_one_out, "std_normalize": std_normalize, "eps": eps}
    np.testing.assert_allclose(lesson.group_advantages(double(rewards), **options), expected, atol=1e-8)
    batch = double([[rewards, rewards[::-1]], [[1.0] + [0.0] * (len(rewards) - 1), [0.5] * len(rewards)]])
    batched = lesson.group_advantages(batch, **options)
    assert batched.shape == batch.shape and batched.dtype == torch.float64
    for i, j in itertools.product(range(2), range(2)):
        expected = advantages_by_hand(batch[i, j].tolist(), leave_one_out, std_normalize, eps)
        np.testing.assert_allclose(batched[i, j], expected, atol=1e-8)


@FEW
@given(lists(min_size=3), st.floats(-5, 5), st.randoms())
def test_advantages_forget_shifts_and_follow_permutations(rewards, shift, random):
    advantages = lesson.group_advantages(double(rewards))
    assert abs(advantages.sum().item()) < 1e-9
    np.testing.assert_allclose(lesson.group_advantages(double(rewards) + shift), advantages, atol=1e-9)
    order = list(range(len(rewards)))
    random.shuffle(order)
    np.testing.assert_allclose(lesson.group_advantages(double(rewards)[order]), advantages[order], atol=1e-12)


@pytest.mark.parametrize("rewards, options, expected", [
    # mean 1/4, population variance 3/16: std √3/4; sample variance 1/4
    ([1, 0, 0, 0], {}, [0.75, -0.25, -0.25, -0.25]),
    ([1, 0, 0, 0], {"std_normalize": True}, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
    ([1, 0, 0, 0], {"std_normalize": True, "eps": 1e-4}, [1.7316509, -0.5772170, -0.5772170, -0.5772170]),
    ([1, 0, 0, 0], {"leave_one_out": True}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    # one success of eight: mean 1/8, variance 7/64, so 7/8 : √7/8 = √7
    ([1] + [0] * 7, {"std_normalize": True}, [2.6457513] + [-0.3779645] * 7),
    ([1, 1] + [0] * 6, {"leave_one_out": True}, [0.857143] * 2 + [-0.285714] * 6),
    ([1, 1] + [0] * 6, {"std_normalize": True}, [1.732047] * 2 + [-0.577349] * 6),
])
def test_advantages_worked_numbers(rewards, options, expected):
    for dtype in (torch.float32, torch.float64):
        measured = lesson.group_advantages(torch.tensor(rewards, dtype=dtype), **options)
        assert measured.dtype == dtype
        np.testing.assert_allclose(measured, expected, rtol=1e-5)


def test_eps_stands_outside_the_root():
    # std .01: (r − r̄)/(std + .01) = ±.5, whereas √(var + eps) would give ±.01/.1005.
    measured = lesson.group_advantages(double([0.01, -0.01]), std_normalize=True, eps=0.01)
    np.testing.assert_allclose(measured, [0.5, -0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("std_normalize, eps", [(False, 1e-6), (True, 1e-6), (True, 1e-8), (True, 0.0)])
def test_flat_groups_are_exactly_zero(dtype, leave_one_out, std_normalize, eps):
    for value, size in itertools.product([0.1, 0.3, 0.7, -1 / 3, 1e-3, 123.456], [2, 3, 5, 6, 7, 11]):
        rewards = torch.full((size,), value, dtype=dtype)
        measured = lesson.group_advantages(rewards, leave_one_out=leave_one_out, std_normalize=std_normalize, eps=eps)
        assert torch.equal(measured, torch.zeros_like(rewards))
    # a flat group does not silence its neighbour
    mixed = lesson.group_advantages(torch.tensor([[0.1] * 7, [0.1] * 6 + [0.2]], dtype=dtype))
    assert (mixed[0] == 0).all() and (mixed[1] != 0).all()


@pytest.mark.parametrize("rewards", [[0.7], 0.7, [[0.1], [0.2]], []])
def test_groups_of_one_are_refused(rewards):
    with pytest.raises(ValueError, match="at least 2"):
        lesson.group_advantages(torch.tensor(rewards))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rewards_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        lesson.group_advantages(torch.tensor([[1.0, 0.0], [0.5, bad]]))


def test_whole_numbers_and_booleans_are_rewards_too():
    for rewards in (torch.tensor([1, 0, 0, 0]), torch.tensor([True, False, False, False])):
        np.testing.assert_allclose(lesson.group_advantages(rewards), [0.75, -0.25, -0.25, -0.25])


# ---------------------------------------------------------------- aggregate


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
def test_aggregate_by_loops(rows, columns, seed, mode, as_bool):
    generator = torch.Generator().manual_seed(seed)
    per_token = torch.randn(2, rows, columns, dtype=torch.float64, generator=generator)
    mask = torch.rand(2, rows, columns, generator=generator) < 0.6
    constant = 7.5 if mode == "constant" else None
    garbage = torch.where(mask, per_token, double([NAN, INF, -INF, 1e308]).repeat(columns)[:columns])
    measured = lesson.aggregate(garbage, mask if as_bool else mask.double(), mode=mode, constant=constant)
    assert measured.shape == (2,)
    for i in range(2):
        expected = aggregate_by_hand(per_token[i].tolist(), mask[i].tolist(), mode, constant)
        assert measured[i].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mode, spec, uneven", [
    # lengths 2 and 4, A = ±1, log π = −.5 | one token of loss 1 beside four of loss .5
    ("token-mean", -1 / 6, 0.6), ("seq-mean-token-mean", 0.0, 0.75),
    ("seq-mean-token-sum", -0.5, 1.5), ("constant", -0.0625, 0.1875)])
def test_aggregate_worked_numbers(mode, spec, uneven):
    constant = 8 if mode == "constant" else None
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    advantages, logprobs = double([[1.0], [-1.0]]), torch.full((2, 4), -0.5, dtype=torch.float64)
    assert lesson.aggregate(-advantages * logprobs, mask, mode=mode, constant=constant).item() == pytest.approx(spec)
    per_token, mask = double([[1.0, 0, 0, 0], [0.5] * 4]), torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    assert lesson.aggregate(per_token, mask, mode=mode, constant=constant).item() == pytest.approx(uneven)
    lone_token = lesson.aggregate(per_token[:1], mask[:1], mode=mode, constant=constant)
    assert lone_token.item() == pytest.approx(0.125 if constant else 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_give_no_gradient_and_padding_changes_nothing(mode):
    constant = 8 if mode == "constant" else None
    per_token = double([[0.5, NAN, 1.5, -INF]]).requires_grad_()
    loss = lesson.aggregate(per_token, torch.tensor([[1, 0, 1, 0]]), mode=mode, constant=constant)
    loss.backward()
    weight = {"token-mean": 0.5, "seq-mean-token-mean": 0.5, "seq-mean-token-sum": 1.0, "constant": 0.125}[mode]
    assert loss.item() == pytest.approx(2.0 * weight)
    assert per_token.grad.tolist() == [[weight, 0, weight, 0]]
    wider = (2, 3, 1, 2)  # padding on both sides of the row, and rows without tokens
    padded = torch.nn.functional.pad(per_token.detach(), wider, value=NAN)
    mask = torch.nn.functional.pad(torch.tensor([[1, 0, 1, 0]]), wider)
    assert lesson.aggregate(padded, mask, mode=mode, constant=constant).item() == pytest.approx(loss.item())
    nothing = lesson.aggregate(padded.requires_grad_(), torch.zeros_like(mask), mode=mode, constant=constant)
    nothing.backward()
    assert nothing.item() == 0 and (padded.grad == 0).all()


def test_truncated_rows_leave_numerator_and_denominator():
    ended_and_cut = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert lesson.aggregate(torch.ones(2, 5), ended_and_cut, mode="token-mean").item() == 1.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_weighted_by_their_tokens_give_the_gradient_of_the_whole(size):
    generator = torch.Generator().manual_seed(size)
    logprobs = torch.randn(6, 5, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.arange(5) < torch.tensor([1, 5, 2, 3, 4, 1])[:, None]
    (whole,) = torch.autograd.grad(lesson.aggregate(-logprobs, mask, mode="token-mean"), logprobs)
    for start in range(0, 6, size):
        rows = slice(start, start + size)
        share = mask[rows].sum() / mask.sum()
        (share * lesson.aggregate(-logprobs[rows], mask[rows], mode="token-mean")).backward()
    torch.testing.assert_close(logprobs.grad, whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("change, message", [
    ({"mode": "mean"}, "mode must be"),
    ({"mode": "constant"}, "needs a constant"),
    ({"mode": "constant", "constant": 0}, "needs a constant"),
    ({"mode": "constant", "constant": -8}, "needs a constant"),
    ({"constant": 8}, "take none"),
    ({"mask": torch.ones(2, 3)}, "one shape"),
    ({"mask": torch.full((2, 4), 0.5)}, "0 and 1 only"),
    ({"mask": torch.tensor([[1.0, -1.0, 1.0, -1.0]] * 2)}, "0 and 1 only"),
    ({"per_token": torch.ones(4), "mask": torch.ones(4)}, "one shape"),
])
def test_aggregate_refuses_bad_input(change, message):
    arguments = {"per_token": torch.ones(2, 4), "mask": torch.ones(2, 4), "mode": "token-mean", **change}
    with pytest.raises(ValueError, match=message):
        lesson.aggregate(arguments.pop("per_token"), arguments.pop("mask"), **arguments)


# ---------------------------------------------------------------- grouping, and (2.1) to (2.4)


def test_groups_follow_the_prompt_whatever_the_order():
    ids, rewards = torch.tensor([7, 3, 7, 3, 5, 5]), double([1, 0, 1, 0, 1, 0])
    groups = lesson.prompt_groups(ids)
    assert groups.tolist() == [[1, 3], [4, 5], [0, 2]]
    advantages = torch.empty(6, dtype=torch.float64)
    advantages[groups] = lesson.group_advantages(rewards[groups])
    assert advantages.tolist() == [0, 0, 0, 0, 0.5, -0.5]
    assert lesson.prompt_groups(torch.tensor([4, 4, 4])).tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="same number"):
        lesson.prompt_groups(torch.tensor([1, 1, 2]))
    for ids in (torch.tensor([[1, 2], [1, 2]]), torch.tensor(1), torch.tensor([])):
        with pytest.raises(ValueError, match="one id per response"):
            lesson.prompt_groups(ids)


def test_enumerate_groups_lists_every_ordered_group():
    assert set(map(tuple, lesson.enumerate_groups(3, 4).tolist())) == set(itertools.product(range(3), repeat=4))
    assert len(lesson.enumerate_groups(3, 4)) == 81
    assert lesson.enumerate_groups(5, 1).tolist() == [[0], [1], [2], [3], [4]]


def random_policy(seed, responses=4, parameters=3):
    """Probabilities, rewards and scores with E[s] = 0."""
    generator = np.random.default_rng(seed)
    probs = generator.dirichlet(np.ones(responses) * 2)
    scores = generator.normal(size=(responses, parameters))
    return probs, generator.normal(size=responses), scores - probs @ scores


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("leave_one_out, std_normalize", [(False, False), (True, False), (False, True), (True, True)])
def test_group_estimator_by_loops_over_groups(group_size, leave_one_out, std_normalize):
    probs, rewards, scores = random_policy(seed=group_size)
    chance, estimates = [], []
    for group in itertools.product(range(4), repeat=group_size):
        advantages = advantages_by_hand([rewards[i] for i in group], leave_one_out, std_normalize, 1e-6)
        chance.append(math.prod(probs[i] for i in group))
        estimates.append(sum(a * scores[i] for a, i in zip(advantages, group)) / group_size)
    expected_mean = np.average(estimates, axis=0, weights=chance)
    expected_variance = np.trace(np.cov(np.array(estimates).T, aweights=chance, ddof=0))
    policy = double(probs), double(rewards), double(scores)
    mean, variance = lesson.group_estimator_moments(
        *policy, group_size=group_size, leave_one_out=leave_one_out, std_normalize=std_normalize)
    np.testing.assert_allclose(mean, expected_mean, atol=1e-9)
    assert variance.item() == pytest.approx(expected_variance, abs=1e-9)
    if not std_normalize:
        gradient = (probs * rewards) @ scores  # ∇J = Σ π r s
        factor = 1.0 if leave_one_out else (group_size - 1) / group_size
        np.testing.assert_allclose(mean, factor * gradient, atol=1e-9)
    if leave_one_out and not std_normalize:
        hoeffding = lesson.leave_one_out_variance(*policy, group_size=group_size)
        assert hoeffding.item() == pytest.approx(expected_variance, abs=1e-9)


def test_group_mean_in_exact_fractions():
    # π = (7, 2, 1)/10, r = (0, 8, 10)/10, groups of 3: the mean is 2/3 of π ⊙ (r − J), J = 13/50, without any rounding.
    probs, rewards = [Fraction(p, 10) for p in (7, 2, 1)], [Fraction(r, 10) for r in (0, 8, 10)]
    total = [Fraction(0)] * 3
    for group in itertools.product(range(3), repeat=3):
        mean = sum(rewards[i] for i in group) / 3
        for i in group:
            for arm in range(3):
                total[arm] += math.prod(probs[j] for j in group) * (rewards[i] - mean) * ((arm == i) - probs[arm]) / 3
    assert total == [Fraction(2, 3) * p * (r - Fraction(13, 50)) for p, r in zip(probs, rewards)]
    scores = lesson.softmax_scores(lesson.SKEWED)
    measured, _ = lesson.group_estimator_moments(lesson.SKEWED, lesson.ARMS, scores, group_size=3)
    np.testing.assert_allclose(measured, [float(t) for t in total], atol=1e-15)


def test_variance_against_group_size_by_loops():
    probs, rewards = np.array([0.7, 0.2, 0.1]), np.array([0.0, 0.8, 1.0])
    scores = np.eye(3) - probs
    measured = lesson.variance_against_group_size([2, 3])

    def one_sample(b):
        estimates = (rewards - b)[:, None] * scores
        return probs @ (estimates**2).sum(-1) - ((probs @ estimates) ** 2).sum()

    def leave_one_out(size):
        second, mean = 0.0, 0.0
        for group in itertools.product(range(3), repeat=size):
            chance, total = math.prod(probs[i] for i in group), sum(rewards[i] for i in group)
            estimate = sum((rewards[i] - (total - rewards[i]) / (size - 1)) * scores[i] for i in group) / size
            second, mean = second + chance * estimate @ estimate, mean + chance * estimate
        return size * (second - mean @ mean)

    for row, size in zip(measured.tolist(), (2, 3)):
        expected = [one_sample(0), leave_one_out(size), one_sample(0.26), one_sample(0.3164 / 0.46)]  # J = .26
        np.testing.assert_allclose(row, expected, atol=1e-12)


@FEW
@given(st.floats(0.02, 0.98), st.integers(2, 9))
def test_std_gain_is_the_mean_of_normalised_binary_groups(p, group_size):
    # ∇p = 1 along the direction in which a right answer has score 1/p and a wrong one −1/(1−p).
    expected = 0.0
    for group in itertools.product([0.0, 1.0], repeat=group_size):
        mean, spread = statistics.fmean(group), statistics.pstdev(group)
        if spread:
            chance = math.prod(p if r else 1 - p for r in group)
            update = sum((r - mean) / spread * (1 / p if r else -1 / (1 - p)) for r in group) / group_size
            expected += chance * update
    assert lesson.std_gain(double(p), group_size=group_size).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rate, group_size", [(0.0, 4), (1.0, 4), (0.5, 1), (NAN, 4)])
def test_std_gain_refuses_groups_that_are_always_flat(rate, group_size):
    with pytest.raises(ValueError, match="flat"):
        lesson.std_gain(double([0.3, rate]), group_size=group_size)


def test_flat_group_share():
    # p = 1/4: (1 + 3^K) / 4^K
    for group_size, share in [(2, 0.625), (4, 82 / 256), (8, 6562 / 65536), (16, 43046722 / 4**16)]:
        assert lesson.flat_group_share(0.25, group_size=group_size) == pytest.approx(share, rel=1e-12)
    for rate, group_size in [(-0.1, 4), (1.5, 4), (NAN, 4), (double([0.5, 1.5]), 4), (0.5, 0)]:
        with pytest.raises(ValueError, match="success_rate"):
            lesson.flat_group_share(rate, group_size=group_size)


def test_a_response_that_never_comes_changes_nothing():
    probs, rewards, scores = double([0.4, 0.6, 0.0]), double([0, 1, 9]), double([[-3], [2], [7]])
    three = lesson.group_estimator_moments(probs, rewards, scores, group_size=3)
    two = lesson.group_estimator_moments(probs[:2], rewards[:2], scores[:2], group_size=3)
    for with_it, without in zip(three, two):
        torch.testing.assert_close(with_it, without)


def test_group_estimator_refuses_what_is_not_a_distribution():
    for probs in ([0.5, 0.7], [1.5, -0.5], [0.5, NAN], [0.499, 0.5]):
        for function in (lesson.group_estimator_moments, lesson.leave_one_out_variance):
            with pytest.raises(ValueError, match="sum to 1"):
                function(double(probs), double([0, 1]), torch.eye(2).double(), group_size=2)
    half, rewards, scores = double([0.5, 0.5]), double([0, 1]), torch.eye(2).double()
    for shapes in [(half, double([0, 1, 5]), torch.eye(3).double()), (half, rewards[:, None], scores),
                   (half, rewards, torch.eye(3).double())]:
        with pytest.raises(ValueError, match="one entry per response"):
            lesson.group_estimator_moments(*shapes, group_size=2)
    with pytest.raises(ValueError, match="group_size ≥ 2"):
        lesson.leave_one_out_variance(half, rewards, scores, group_size=1)


# ---------------------------------------------------------------- (2.5): length bias


@FEW
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 0.9), st.integers(1, 5))
def test_stopping_model_is_two_cut_geometric_laws(right_logit, wrong_logit, rate, max_length):
    logprobs, mask, rewards, probs = lesson.stopping_model(
        double([right_logit, wrong_logit]), success_rate=rate, max_length=max_length)
    rows = iter(zip(logprobs.tolist(), mask.tolist(), rewards.tolist(), probs.tolist()))
    for logit, coin, reward in [(right_logit, rate, 1.0), (wrong_logit, 1 - rate, 0.0)]:
        stop = 1 / (1 + math.exp(-logit))
        for length in range(1, max_length + 1):
            row, keep, measured_reward, prob = next(rows)
            decisions = [1 - stop] * (length - 1) + ([stop] if length < max_length else [])
            assert keep == [t < length for t in range(max_length)] and measured_reward == reward
            np.testing.assert_allclose(np.exp(row[: len(decisions)]), decisions, rtol=1e-12)
            assert row[len(decisions):] == [0.0] * (max_length - len(decisions))
            assert prob == pytest.approx(coin * math.prod(decisions), rel=1e-12)
    assert probs.sum().item() == pytest.approx(1.0)


@settings(FEW, max_examples=10)
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 0.9), st.sampled_from([2, 3]), st.sampled_from([2, 4]))
def test_length_gradient_in_closed_form(right_logit, wrong_logit, rate, group_size, max_length):
    """Reward and length are independent given the branch, so E[A_i | right] · P(right) = p(1−p)(K−1)/K factors out."""
    logits = double([right_logit, wrong_logit])
    shared = {"group_size": group_size, "success_rate": rate, "max_length": max_length}
    for mode, constant in [("seq-mean-token-sum", None), ("constant", 3)]:
        drift = lesson.expected_length_gradient(logits, mode=mode, constant=constant, **shared)
        np.testing.assert_allclose(drift, [0, 0], atol=1e-12)

    def mean_score_per_token(logit):  # E[(1/L) Σ_t ∂ log π(t) / ∂ logit]
        stop, total = 1 / (1 + math.exp(-logit)), 0.0
        for length in range(1, max_length + 1):
            ends = length < max_length
            chance = (1 - stop) ** (length - 1) * (stop if ends else 1)
            total += chance * ((1 - stop if ends else 0.0) - stop * (length - 1)) / length
        return total

    factor = rate * (1 - rate) * (group_size - 1) / group_size
    expected = [factor * mean_score_per_token(right_logit), -factor * mean_score_per_token(wrong_logit)]
    drift = lesson.expected_length_gradient(logits, mode="seq-mean-token-mean", **shared)
    np.testing.assert_allclose(drift, expected, atol=1e-12)
    assert expected[0] > 0 > expected[1]  # right answers shorter, wrong ones longer


def test_token_mean_length_gradient_by_loops():
    # K = 2, T = 2, stop probability ½: four outcomes (reward, length) of probability ¼; the loss divides by L_1 + L_2.
    total = np.zeros(2)
    for first, second in itertools.product(itertools.product([1, 0], [1, 2]), repeat=2):
        mean = (first[0] + second[0]) / 2
        for reward, length in (first, second):
            score = 0.5 if length == 1 else -0.5
            total[0 if reward else 1] += (reward - mean) * score / (first[1] + second[1]) / 16
    measured = lesson.expected_length_gradient(torch.zeros(2).double(), mode="token-mean", group_size=2, max_length=2)
    np.testing.assert_allclose(measured, total, atol=1e-15)


def test_token_weight_against_length():
    # 7 others of 8 tokens: token-mean 1/(56 + L), seq-mean 1/(8 L), seq-sum and constant blind to L; relative to L = 8.
    for length, row in zip([1, 8, 32], lesson.token_weight_against_length([1, 8, 32]).tolist()):
        np.testing.assert_allclose(row, [64 / (56 + length), 8 / length, 1, 1], rtol=1e-12)


def test_length_drift_starts_at_the_geometric_mean_and_follows_the_gradient():
    path = lesson.length_drift("seq-mean-token-mean", None, updates=2, learning_rate=3.0, max_length=4)
    assert path.shape == (3, 2)

    def expected_length(logit):
        go = 1 - 1 / (1 + math.exp(-logit))
        return 1 + go + go**2 + go**3  # Σ_t P(at least t tokens)

    logits = np.array([-1.0, -1.0])
    for row in path.tolist():
        np.testing.assert_allclose(row, [expected_length(x) for x in logits], rtol=1e-12)
        gradient = lesson.expected_length_gradient(double(logits), mode="seq-mean-token-mean", max_length=4)
        logits = logits + 3.0 * gradient.numpy()


# ---------------------------------------------------------------- (2.6): success amplification


@FEW
@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.floats(0.5, 5), st.booleans())
def test_one_round_is_the_best_policy_under_the_kl_penalty(success, reference, beta, std_normalize):
    """Brute force: among all success rates q, maximise q·A₊ + (1−q)·A₋ − β·KL(q ‖ reference)."""
    spread = math.sqrt(success * (1 - success) + 1e-5) if std_normalize else 1.0
    right, wrong = (1 - success) / spread, -success / spread

    def objective(q):
        kl = q * math.log(q / reference) + (1 - q) * math.log((1 - q) / (1 - reference))
        return q * right + (1 - q) * wrong - beta * kl

    best = lesson.amplified_success(success, reference, beta, std_normalize=std_normalize).item()
    for other in (0.99 * best, 0.999 * best, 0.99 * best + 0.01, 0.999 * best + 0.001):
        assert objective(other) < objective(best)
    # the log-odds move by (A₊ − A₋)/β
    moved = math.log(best / (1 - best)) - math.log(reference / (1 - reference))
    assert moved == pytest.approx((right - wrong) / beta, abs=1e-8)


@pytest.mark.parametrize("beta, options, fixed_point", [
    (1, {}, 0.681283), (2, {}, 0.408728), (5, {}, 0.280660), (1, {"std_normalize": False}, 0.404610)])
def test_fixed_points(beta, options, fixed_point):
    path = lesson.iterate_success(0.2, beta, rounds=300, **options)
    assert path.shape == (301,) and path[0] == 0.2
    assert path[1].item() == lesson.amplified_success(0.2, 0.2, beta, **options).item()
    assert path[-1].item() == pytest.approx(fixed_point, abs=1e-6)
    points = lesson.success_fixed_points(0.2, beta, **options)
    assert points[0].item() == pytest.approx(fixed_point, abs=1e-6)
    for point in points.tolist():  # p = σ(logit .2 + gap/β), in the log-odds of a fixed point below 1
        gap = 1 / math.sqrt(point * (1 - point) + 1e-5) if not options else 1.0
        assert 1 / (1 + 4 * math.exp(-gap / beta)) == pytest.approx(point, abs=1e-9)
    assert len(points) == (1 if options else 3) and (points.diff() > 0).all()


def test_start_and_reference_are_two_things():
    path = lesson.iterate_success(0.2, 1, rounds=1, start=0.5)
    assert path[0] == 0.5
    # p = .5: gap 1/√(.25 + 1e-5) = 1.99996, so 1/(1 + 4 e^{−1.99996}) = .648784
    assert path[1].item() == pytest.approx(1 / (1 + 4 * math.exp(-1 / math.sqrt(0.25001))), rel=1e-12)


@pytest.mark.parametrize("reference, beta", [(0.0, 1.0), (1.0, 1.0), (0.2, 0.0), (0.2, -1.0)])
def test_amplification_refuses_bad_input(reference, beta):
    with pytest.raises(ValueError, match="reference_success"):
        lesson.amplified_success(0.5, reference, beta)
    for success in (-0.1, 1.2, NAN):
        with pytest.raises(ValueError, match="probability"):
            lesson.amplified_success(success, 0.2, 1.0)


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
    perfect = lesson.noise_corrected_rewards(double(rewards), false_positive_rate=0, false_negative_rate=0)
    assert perfect.tolist() == rewards
    binary = double([1.0, 0.0, *(round(r) for r in rewards)])
    np.testing.assert_allclose(
        lesson.group_advantages(lesson.noise_corrected_rewards(binary, **rates), std_normalize=True, eps=0.0),
        lesson.group_advantages(binary, std_normalize=True, eps=0.0), atol=1e-9)


def test_noise_correction_worked_number_and_refusals():
    # r̂ = 8/7 and −2/7 for r̃ = 1 and 0; group mean (2·8 − 6·2)/56 = 1/14; advantages 15/14 and −5/14
    group = double([1, 1] + [0] * 6)
    corrected = lesson.noise_corrected_rewards(group, false_positive_rate=0.2, false_negative_rate=0.1)
    np.testing.assert_allclose(lesson.group_advantages(corrected), [15 / 14] * 2 + [-5 / 14] * 6, atol=1e-12)
    booleans = lesson.noise_corrected_rewards(group.bool(), false_positive_rate=0.2, false_negative_rate=0.1)
    np.testing.assert_allclose(booleans, corrected, rtol=1e-6)
    for rates in [(0.5, 0.5), (0.7, 0.4), (-0.1, 0.2), (0.2, -0.1), (NAN, 0.1), (0.1, NAN)]:
        with pytest.raises(ValueError, match="rates"):
            lesson.noise_corrected_rewards(double([1, 0]), false_positive_rate=rates[0], false_negative_rate=rates[1])


@FEW
@given(lists(0, 1, min_size=2), st.sampled_from([1.0, 2.0]))
def test_ngrpo_by_hand(rewards, max_reward):
    pool = rewards + [max_reward]
    if len(set(pool)) == 1:
        expected = [0.0] * len(rewards)
    else:
        expected = [(r - statistics.fmean(pool)) / (statistics.stdev(pool) + 1e-6) for r in rewards]
    np.testing.assert_allclose(lesson.ngrpo_advantages(double(rewards), max_reward=max_reward), expected, atol=1e-8)
    both = lesson.ngrpo_advantages(double([rewards, [0.0] * len(rewards)]), max_reward=max_reward)
    np.testing.assert_allclose(both[0], expected, atol=1e-8)
    np.testing.assert_allclose(both[1], -((len(rewards) + 1) ** -0.5), rtol=1e-5)  # whatever the virtual reward is


def test_ngrpo_flat_pool_and_refusal():
    assert (lesson.ngrpo_advantages(torch.full((6,), 0.1), max_reward=0.1) == 0).all()  # float32: .1 has no exact mean
    with pytest.raises(ValueError, match="largest possible"):
        lesson.ngrpo_advantages(double([0.5, 1.5]))


# ---------------------------------------------------------------- the script as a whole, exercises


def test_quick_run_holds_every_claim_and_writes_its_files(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        lesson.main(["--quick", "--seed", "3", "--out", str(tmp_path), "--json", str(tmp_path / "claims.json")])
    assert stop.value.code == 0
    rows = json.loads((tmp_path / "claims.json").read_text())
    assert len(rows) >= 35 and all(row["ok"] for row in rows)
    assert all({"claim", "expected", "measured", "tolerance", "ok"} <= set(row) for row in rows)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "02_group_mean.png", "02_length_bias.png", "02_success_amplification.png"}
    assert f"{len(rows)} of {len(rows)} claims hold" in capsys.readouterr().out


def test_a_wrong_advantage_fails_the_run(tmp_path, monkeypatch):
    right = lesson.group_advantages
    monkeypatch.setattr(lesson, "group_advantages", lambda rewards, **options: -right(rewards, **options))
    with pytest.raises(SystemExit) as stop:
        lesson.main(["--quick", "--out", str(tmp_path)])
    assert stop.value.code == 1


RIGHT = {
    1: "def leave_one_out_advantages(r):\n    k = r.shape[-1]\n    return r - (r.sum(-1, keepdim=True) - r) / (k - 1)",
    2: "def mean_of_token_means(x, m):\n    return sum(row[keep].mean() for row, keep in zip(x, m)) / len(x)",
    3: "from math import exp, log, sqrt\n"
       "def amplified_success(p, q, beta):\n"
       "    return 1 / (1 + exp(-log(q / (1 - q)) - 1 / sqrt(p * (1 - p) + 1e-5) / beta))",
}
WRONG = {
    1: "def leave_one_out_advantages(r): return r - r.mean(-1, keepdim=True)",
    2: "def mean_of_token_means(x, m): return x[m].mean()",
    3: "def amplified_success(p, q, beta): return q",
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
