"""Lesson 04 against references of another kind: loops in plain python, PPO and GSPO differentiated as published, an
event simulation of the sampler, a second trainer that keeps its parameters apart, closed forms and exact fractions.

Literals stand beside their derivation or come from the worked examples of the paper and its neighbours.
"""

import importlib
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

lesson = importlib.import_module("04_regularization")

EXAMPLES = settings(max_examples=30, deadline=None)
CLIPS = ("none", "one_side", "two_side", "ring")
NAN, INFINITY = math.nan, math.inf
log_ratios = st.floats(-3, 3, allow_subnormal=False)
signed = st.floats(-2, 2, allow_subnormal=False)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(measured, expected, tolerance=1e-12):
    measured, expected = (v.detach().double().numpy() if torch.is_tensor(v) else v for v in (measured, expected))
    np.testing.assert_allclose(measured, np.asarray(expected, dtype=float), rtol=0, atol=tolerance)


def gradient(loss, logprobs, *tensors, **options):
    logprobs = logprobs.detach().requires_grad_()
    return torch.autograd.grad(loss(logprobs, *tensors, **options), logprobs)[0]


def batch(*, rows=6, tokens=4, seed=0, spread=0.6):
    """logprobs, old_logprobs, advantages (rows,), mask with one empty row."""
    old = -torch.rand(rows, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 0.1
    mask = torch.arange(tokens) < torch.tensor([[i % (tokens + 1)] for i in range(rows)])
    return old + random(rows, tokens, seed=seed + 1, scale=spread), old, random(rows, seed=seed + 2), mask


# Reference: the masks as the paper writes them, inclusive, on python floats.


def kept(ratio, advantage, clip, eps_low, eps_high, outer_low, outer_high):
    if advantage == 0 or clip == "none":
        return True
    inside = 1 - eps_low <= ratio <= 1 + eps_high
    if clip == "two_side":
        return inside
    if clip == "one_side":
        return advantage >= 0 and ratio <= 1 + eps_high or advantage <= 0 and ratio >= 1 - eps_low
    return inside or advantage >= 0 and ratio <= 1 - outer_low or advantage <= 0 and ratio >= 1 + outer_high


# ------------------------------------------------------------------------------------------------------- the mask

# One ratio a row; columns one_side A>0, A<0 | two_side A>0, A<0 | ring A>0, A<0 | one_side (.6, 2) A>0, A<0.
TRUTH = {
    0.10: "10 00 10 10", 0.30: "10 00 10 10", 0.50: "10 00 00 11", 0.79: "10 00 00 11", 0.80: "11 11 11 11",
    1.00: "11 11 11 11", 1.20: "11 11 11 11", 1.21: "01 00 00 11", 2.00: "01 00 00 11", 2.90: "01 00 00 11",
    3.00: "01 00 01 11", 3.50: "01 00 01 01",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ratio, bits", TRUTH.items())
def test_the_truth_table(ratio, bits, dtype):
    columns = [("one_side", {}), ("two_side", {}), ("ring", {}), ("one_side", {"eps_low": 0.6, "eps_high": 2.0})]
    for (clip, bounds), pair in zip(columns, bits.split()):
        for sign, bit in zip((0.7, -0.7), pair):
            point = torch.tensor(ratio, dtype=dtype), torch.tensor(sign, dtype=dtype)
            mask = lesson.clip_mask(*point, clip=clip, **bounds)
            assert mask.dtype == torch.bool and bool(mask) == (bit == "1"), (clip, sign)


@EXAMPLES
@given(st.sampled_from(CLIPS), st.lists(st.tuples(st.floats(0, 8), signed), min_size=1, max_size=30), st.floats(0, 0.9),
       st.floats(0, 2), st.floats(0.01, 1), st.floats(0.01, 3))
@example("ring", [(0.75, 1.0), (0.75, -1.0), (1.25, 1.0), (1.25, -1.0), (0.5, 1.0), (1.5, -1.0)], 0.25, 0.25, 0.25,
         0.25)
@example("two_side", [(0.5, 0.0), (5.0, 0.0)], 0.25, 0.25, 0.25, 0.25)
def test_mask_is_the_papers_inequalities(clip, points, eps_low, eps_high, gap_low, gap_high):
    bounds = {"eps_low": eps_low, "eps_high": eps_high,
              "outer_low": eps_low + gap_low, "outer_high": eps_high + gap_high}
    ratio, advantages = torch.tensor(points, dtype=torch.float64).T
    expected = [kept(r, a, clip, **bounds) for r, a in points]
    assert lesson.clip_mask(ratio, advantages, clip=clip, **bounds).tolist() == expected


@pytest.mark.parametrize("clip", CLIPS)
def test_nan_is_never_clipped_away(clip):
    grid = vector(0.01, 0.5, 1.0, 1.5, 50.0)
    assert lesson.clip_mask(torch.full((2,), NAN), torch.tensor([1.0, -1.0]), clip=clip).all()
    assert lesson.clip_mask(grid, torch.full_like(grid, NAN), clip=clip).all()


def test_mask_broadcasts_one_advantage_per_response():
    ratio = torch.tensor([[0.5, 1.5], [0.5, 1.5]])
    mask = lesson.clip_mask(ratio, torch.tensor([[1.0], [-1.0]]), clip="one_side")
    assert mask.tolist() == [[True, False], [False, True]]
    assert lesson.clip_mask(ratio, torch.tensor([[1.0], [-1.0]]), clip="none").shape == (2, 2)
    with pytest.raises(ValueError, match="unsqueeze"):  # would line up with the tokens
        lesson.clip_mask(ratio, torch.tensor([1.0, -1.0]), clip="one_side")


def test_clip_fraction_of_four():
    ratio, advantages = vector(1.5, 1.5, 0.5, 0.5), vector(1, -1, 1, -1)
    assert (~lesson.clip_mask(ratio, advantages, clip="one_side")).tolist() == [True, False, False, True]


@pytest.mark.parametrize("options, message", [
    ({"clip": "both"}, "one_side"), ({"clip": "one_side", "eps_low": -0.1}, "eps_low"),
    ({"clip": "two_side", "eps_high": -1e-9}, "eps_high"), ({"clip": "one_side", "eps_low": NAN}, "eps_low"),
    ({"clip": "ring", "outer_low": 0.1}, "outside"), ({"clip": "ring", "outer_high": 0.2}, "outside"),
    ({"clip": "ring", "eps_low": 0.6, "eps_high": 2.0}, "outside"), ({"clip": "ring", "outer_low": NAN}, "outside"),
])
def test_mask_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        lesson.clip_mask(torch.ones(3), torch.ones(3), **options)


def test_outer_bounds_matter_to_the_ring_alone():
    assert lesson.clip_mask(torch.tensor(2.5), torch.tensor(1.0), clip="one_side", eps_low=0.6, eps_high=2.0)


# ------------------------------------------------------------------------------------------------------ the losses


def rec_by_loops(logprobs, old_logprobs, advantages, mask, clip, weighted, bounds):
    """Value and gradient, token by token."""
    total, tokens, gradients = 0.0, int(mask.sum()), torch.zeros_like(logprobs)
    for i, t in mask.nonzero().tolist():
        ratio = math.exp(logprobs[i, t] - old_logprobs[i, t])
        if kept(ratio, float(advantages[i]), clip, *bounds):
            weight = float(advantages[i]) * (ratio if weighted else 1.0)
            total -= weight * float(logprobs[i, t]) / tokens
            gradients[i, t] = -weight / tokens
    return total, gradients


@pytest.mark.parametrize("bounds", [(0.2, 0.2, 0.6, 2.0), (0.1, 0.35, 0.4, 0.8)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
def test_rec_loss_is_the_sum_over_tokens(clip, weighted, bounds):
    names = ("eps_low", "eps_high", "outer_low", "outer_high")
    tensors = batch(rows=40, seed=3)
    options = {"clip": clip, "importance_sampling": weighted, **dict(zip(names, bounds))}
    value, expected = rec_by_loops(*tensors, clip, weighted, bounds)
    close(lesson.rec_loss(*tensors, **options), value)
    close(gradient(lesson.rec_loss, *tensors, **options), expected)


@EXAMPLES
@given(st.lists(st.tuples(log_ratios, signed), min_size=1, max_size=20), st.floats(0.05, 0.5))
@example([(math.log(1.2), 1.0), (math.log(0.8), -1.0), (0.0, 1.0)], 0.2)
def test_one_side_is_ppo(points, eps):
    """−min(ρA, clip(ρ)A), differentiated through ρ."""
    log_ratio, advantages = (column.unsqueeze(-1) for column in torch.tensor(points, dtype=torch.float64).T)
    old, mask = torch.full_like(log_ratio, -1.3), torch.ones_like(log_ratio, dtype=torch.bool)

    def ppo(logprobs):
        ratio = (logprobs - old).exp()
        return torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps, 1 + eps) * advantages).mean()

    edge = ((log_ratio.exp() - 1).abs() - eps).abs() < 1e-9  # there rounding decides on which side of the bound it is
    here = gradient(lesson.rec_loss, old + log_ratio, old, advantages, mask, clip="one_side", importance_sampling=True,
                    eps_low=eps, eps_high=eps)
    there = gradient(ppo, old + log_ratio)
    close(torch.where(edge, 0.0, here), torch.where(edge, 0.0, there))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
def test_on_fresh_data_every_row_is_reinforce(clip, weighted):
    logprobs, _, advantages, mask = batch(rows=12)
    plain = -(advantages[:, None] * mask).double() / mask.sum()
    here = gradient(lesson.rec_loss, logprobs, logprobs, advantages, mask, clip=clip, importance_sampling=weighted)
    close(here, plain, 1e-16)
    reinforce = gradient(lesson.rec_loss, logprobs, logprobs, advantages, mask, clip="none", importance_sampling=False)
    assert torch.equal(here, reinforce)


def test_on_fresh_data_the_loss_can_be_zero_while_learning():
    logprobs = vector(-0.7, -0.7)[:, None]
    ones = torch.ones(2, 1, dtype=torch.bool)
    loss = lesson.rec_loss(logprobs, logprobs, vector(1, -1), ones, clip="one_side", importance_sampling=True)
    assert float(loss) == 0.0
    close(gradient(lesson.rec_loss, logprobs, logprobs, vector(1, -1), ones, clip="one_side",
                   importance_sampling=True), [[-0.5], [0.5]])


LOSSES = {
    "rec": lambda *tensors: lesson.rec_loss(*tensors, clip="one_side", importance_sampling=True),
    "rec-nois": lambda *tensors: lesson.rec_loss(*tensors, clip="ring", importance_sampling=False),
    "opmd": lambda *tensors: lesson.opmd_loss(*tensors, tau=0.3),
    "asymre": lambda *tensors: lesson.asymre_loss(*tensors, beta=0.3),
    "gspo": lambda *tensors: lesson.gspo_loss(*tensors, importance_sampling=True, eps_low=0.3, eps_high=0.3),
    "gspo-nois": lambda *tensors: lesson.gspo_loss(*tensors, importance_sampling=False, eps_low=0.3, eps_high=0.3),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@every_loss
@pytest.mark.parametrize("garbage", [NAN, INFINITY, -INFINITY, 1e30])
def test_padding_is_harmless(loss, garbage):
    logprobs, old, advantages, mask = batch()
    value, slope = loss(logprobs, old, advantages, mask), gradient(loss, logprobs, old, advantages, mask)
    for spoil in ((1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 1, 1)):
        tensors = [torch.where(mask, t, garbage) if bad else t
                   for t, bad in zip((logprobs, old, advantages[:, None].expand_as(logprobs)), spoil)]
        close(loss(*tensors, mask), value)
        close(gradient(loss, *tensors, mask), slope)
        assert (slope[~mask] == 0).all()


@every_loss
def test_nan_on_a_response_token_stays_visible(loss):
    for position in range(3):
        tensors = list(batch())
        tensors[position] = tensors[position].clone()
        tensors[position][(2, 0) if tensors[position].dim() == 2 else 2] = NAN  # row 2 has two response tokens
        assert torch.isnan(loss(*tensors))


@every_loss
def test_shapes_of_advantages_and_kinds_of_mask(loss):
    logprobs, old, advantages, mask = batch()
    value = loss(logprobs, old, advantages, mask)
    close(loss(logprobs, old, advantages[:, None], mask), value)
    close(loss(logprobs, old, advantages[:, None].expand_as(logprobs), mask), value)
    close(loss(logprobs, old, advantages.float(), mask.int()), value, tolerance=1e-6)
    close(loss(logprobs, old, advantages, mask.double()), value)


@every_loss
def test_bad_shapes_are_refused(loss):
    logprobs, old, advantages, mask = batch()
    for tensors in ((logprobs, old[:, :3], advantages, mask), (logprobs, old, advantages, mask[:, :1]),
                    (logprobs, old, advantages[:4], mask), (logprobs, old, advantages[:1], mask),
                    (logprobs, old, torch.ones(()), mask), (logprobs, old, torch.ones(1, 4), mask)):
        with pytest.raises(ValueError, match="logprobs"):
            loss(*tensors)
    with pytest.raises(ValueError, match="0 and 1"):  # the advantages in the place of the mask
        loss(logprobs, old, advantages, advantages[:, None].expand_as(logprobs))


@every_loss
def test_square_batches_keep_one_advantage_per_response(loss):
    logprobs, old, advantages, _ = batch(rows=4, tokens=4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    per_token = advantages[:, None].repeat(1, 4)
    close(gradient(loss, logprobs, old, advantages, mask), gradient(loss, logprobs, old, per_token, mask))


@every_loss
def test_no_response_token_gives_zero_and_zero_gradients(loss):
    logprobs, old, advantages, mask = batch()
    nothing = torch.zeros_like(mask)
    assert float(loss(logprobs, old, advantages, nothing)) == 0.0
    assert (gradient(loss, logprobs, old, advantages, nothing) == 0).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(loss, dtype):
    logprobs, old = torch.tensor([[0.0, -0.5]], dtype=dtype), torch.tensor([[-19.0, -0.5]], dtype=dtype)
    value = loss(logprobs, old, torch.tensor([-1.0], dtype=dtype), torch.ones(1, 2, dtype=torch.bool))
    assert value.dtype == torch.float32 and torch.isfinite(value)


@every_loss
def test_sampler_and_advantages_are_constants(loss):
    logprobs, old, advantages, mask = batch()
    leaves = [tensor.clone().requires_grad_() for tensor in (logprobs, old, advantages)]
    loss(*leaves, mask).backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None


def test_far_ratios_are_capped_and_finite():
    old, ones = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    for advantage, log_ratio, expected in ((-1.0, 100.0, 485165195.41), (0.0, 100.0, 0.0),
                                           (1.0, -100.0, -math.exp(-20))):
        here = gradient(lesson.rec_loss, old + log_ratio, old, vector(advantage), ones, clip="none",
                        importance_sampling=True)
        close(here, [[expected]], tolerance=0.01 if log_ratio > 0 else 1e-20)


def test_the_loss_the_weights_and_the_picture_ask_the_one_mask(monkeypatch, tmp_path):
    asked, shaded = [], []

    def keeps_nothing(ratio, advantages, **options):
        asked.append(options["clip"])
        return torch.zeros_like(ratio * advantages, dtype=torch.bool)

    monkeypatch.setattr(lesson, "clip_mask", keeps_nothing)
    tensors = batch()
    for loss in ("rec", "rec-nois", "gspo"):
        assert (gradient(LOSSES[loss], *tensors) == 0).all()
    assert asked == ["one_side", "ring", "one_side"]
    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", lambda *places, where, **options: shaded.append(where))
    lesson.figure_gradient_weight(tmp_path)
    assert set(asked) == set(CLIPS) and len(shaded) == 12 and all(where.all() for where in shaded)


# ------------------------------------------------------------------------------------------------------- penalties


@EXAMPLES
@given(st.lists(st.tuples(signed, signed, signed), min_size=2, max_size=6), st.floats(0.05, 5))
def test_opmd_is_the_square(points, tau):
    """(1/K) Σ (A − τd)²/(2τ) for responses of one token: equal gradients at every θ, values up to a constant."""
    logprobs, old, advantages = torch.tensor(points, dtype=torch.float64).T
    ones = torch.ones(len(points), 1, dtype=torch.bool)

    def square(logprobs):
        return ((advantages - tau * (logprobs - old)) ** 2 / (2 * tau)).mean()

    constant = float((advantages**2 / (2 * tau) + advantages * old).mean())
    here = lesson.opmd_loss(logprobs[:, None], old[:, None], advantages, ones, tau=tau)
    close(here + constant, square(logprobs), 1e-9)
    close(gradient(lesson.opmd_loss, logprobs[:, None], old[:, None], advantages, ones, tau=tau)[:, 0],
          gradient(square, logprobs), 1e-9)


def test_worked_example_of_both_penalties():
    logits, rewards = [0.3, -0.2, 0.1], [0.0, 0.8, 1.0]
    norm = sum(math.exp(v) for v in logits)
    logprobs = vector(*(v - math.log(norm) for v in logits))[:, None]
    old, ones = torch.full_like(logprobs, -math.log(3)), torch.ones(3, 1, dtype=torch.bool)
    advantages = vector(*(r - 0.6 for r in rewards))
    # Constants by hand: ΣA²/(2τK) = .56/3 at τ = .5; ΣA·log π_old = 0 since ΣA = 0; −β·log π_old = .1·log 3.
    close(lesson.opmd_loss(logprobs, old, advantages, ones, tau=0.5) + 0.56 / 3, 0.257328934865, 1e-11)
    close(lesson.asymre_loss(logprobs, old, advantages, ones, beta=0.1) + 0.1 * math.log(3), 0.171927265100, 1e-11)


@EXAMPLES
@given(st.integers(0, 10**6), st.floats(0, 3))
def test_asymre_is_a_lowered_baseline(seed, beta):
    logprobs, old, advantages, mask = batch(seed=seed)
    lowered = torch.where(mask, -(advantages[:, None] + beta), 0.0) / mask.sum()
    close(gradient(lesson.asymre_loss, logprobs, old, advantages, mask, beta=beta), lowered)
    kl = torch.where(mask, old - logprobs, 0.0).sum() / mask.sum()  # the sample's estimate of KL(π_old ‖ π_θ)
    reinforce = -torch.where(mask, advantages[:, None] * logprobs, 0.0).sum() / mask.sum()
    close(lesson.asymre_loss(logprobs, old, advantages, mask, beta=beta), reinforce + beta * kl)


def test_flat_groups_still_feel_the_penalties():
    logprobs, old, _, mask = batch()
    none, tokens = torch.zeros(len(logprobs)), int(mask.sum())
    here = gradient(lesson.asymre_loss, logprobs, old, none, mask, beta=0.1)
    close(here, -0.1 / tokens * mask.double())
    here = gradient(lesson.opmd_loss, logprobs, old, none, mask, tau=0.4)
    close(here, torch.where(mask, 0.4 * (logprobs - old) / tokens, 0.0))


def test_opmd_penalises_tokens_and_does_not_cap_the_pull():
    old, ones = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2)
    close(lesson.opmd_loss(vector(0.1, -0.1)[None], old, torch.zeros(1), ones, tau=1.0), 0.005)  # (.01 + .01)/2/2
    close(gradient(lesson.opmd_loss, vector(-50.0, 0.0)[None], old, torch.zeros(1), ones, tau=1.0), [[-25.0, 0.0]])


@pytest.mark.parametrize("tau", [0, -1.0, NAN, INFINITY])
def test_opmd_refuses(tau):
    with pytest.raises(ValueError, match="tau"):
        lesson.opmd_loss(*batch(), tau=tau)


@pytest.mark.parametrize("beta", [-0.1, NAN, INFINITY])
def test_asymre_refuses(beta):
    with pytest.raises(ValueError, match="beta"):
        lesson.asymre_loss(*batch(), beta=beta)


# ------------------------------------------------------------------------------------------------------- staleness

SCHEDULES = {
    (1, 0): [0] * 8, (4, 0): [0, 1, 2, 3, 0, 1, 2, 3, 0, 1], (1, 3): [0, 1, 2, 3, 3, 3], (1, 1): [0, 1, 1, 1, 1],
    (2, 1): [0, 1, 2, 1, 2, 1, 2], (4, 2): [0, 1, 2, 3, 4, 5, 2, 3, 4, 5], (2, 3): [0, 1, 2, 3, 4, 3, 4, 3, 4, 3],
    (20, 0): [*range(20), *range(20)], (None, 0): list(range(30)), (None, 7): list(range(30)),
}


@pytest.mark.parametrize("knobs, expected", SCHEDULES.items())
def test_listed_schedules(knobs, expected):
    every, ahead = knobs
    for n, stale in enumerate(expected, start=1):
        assert lesson.staleness(n, sync_interval=every, sync_offset=ahead) == stale
        assert lesson.rollout_version(n, sync_interval=every, sync_offset=ahead) == n - 1 - stale


@EXAMPLES
@given(st.integers(1, 12), st.integers(0, 12))
def test_schedule_against_a_simulation(every, ahead):
    """Events in order: batch n is sampled once the learner has done n − 1 − m updates (or at the start), with the
    weights it published last; it publishes after every I-th update."""
    published, done, versions = 0, 0, []
    for n in range(1, 60):
        while done < n - 1 - ahead:
            done += 1
            if done % every == 0:
                published = done
        versions.append(published)
    assert versions == [lesson.rollout_version(n, sync_interval=every, sync_offset=ahead) for n in range(1, 60)]
    steady = {lesson.staleness(n, sync_interval=every, sync_offset=ahead) for n in range(40, 60)}
    assert steady == set(range(ahead, ahead + every))


@pytest.mark.parametrize("bad", [
    {"step": 0}, {"step": -3}, {"step": 1.0}, {"step": True}, {"sync_interval": 0}, {"sync_interval": -1},
    {"sync_interval": 2.0}, {"sync_interval": True}, {"sync_interval": "4"}, {"sync_offset": -1}, {"sync_offset": 0.5},
    {"sync_offset": None}, {"sync_offset": False},
])
def test_schedule_refuses(bad):
    for function in (lesson.rollout_version, lesson.staleness):
        arguments = {"step": 3, "sync_interval": 2, "sync_offset": 1, **bad}
        with pytest.raises(ValueError, match=next(iter(bad))):
            function(arguments.pop("step"), **arguments)
    with pytest.raises(ValueError, match="sync_offset"):  # offline does not excuse the other knob
        lesson.rollout_version(3, sync_interval=None, sync_offset=-1)


# ------------------------------------------------------------------------------------------------- the stale world

RESPONSES = list(itertools.product(range(4), repeat=3))


def test_cells_of_every_response():
    """Rows: the empty prefix, then 4 of one token, then 16 of two."""
    expected = [[a, 4 * (1 + a) + b, 4 * (5 + 4 * a + b) + c] for a, b, c in RESPONSES]
    assert lesson.response_cells().tolist() == expected


def test_response_logprobs_multiply_along_the_tree():
    token_probs = torch.softmax(random(2, 3, 21, 4, seed=5), -1)
    expected = torch.stack([token_probs[..., 0, a] * token_probs[..., 1 + a, b] * token_probs[..., 5 + 4 * a + b, c]
                            for a, b, c in RESPONSES], -1)
    close(lesson.response_logprobs(token_probs.log()), expected.log())


def test_worlds_hold_a_quarter_of_right_answers():
    logits, rewards = lesson.random_worlds(3, generator=torch.Generator().manual_seed(1))
    assert logits.shape == (3, 4, 21, 4) and logits.dtype == torch.float64
    assert (rewards.sum(-1) == 16).all() and ((rewards == 0) | (rewards == 1)).all()
    assert not torch.equal(rewards[0, 0], rewards[0, 1]) and not torch.equal(rewards[0, 0], rewards[1, 0])


def test_samples_follow_the_policy_and_are_shared_by_methods():
    probs = torch.softmax(random(1, 2, 1, 64, seed=3), -1)
    probs[..., 5] = 0
    probs[..., 63] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([lesson.sample_responses(probs.log().expand(3, 2, 1, 64), generator=generator)
                         for _ in range(4000)])
    assert drawn.shape == (4000, 3, 2, 1, 8)
    assert torch.equal(drawn[:, 0], drawn[:, 1]) and torch.equal(drawn[:, 0], drawn[:, 2])
    for seed in range(2):
        counts = torch.bincount(drawn[:, 0, seed].flatten(), minlength=64)
        expected = 32000 * probs[0, seed, 0]
        assert counts[5] == 0 and counts[63] == 0
        assert ((counts - expected) ** 2 / expected.clamp(min=1)).sum() < 120  # χ², 61 degrees: mean 61, sd 11


@pytest.mark.parametrize("uniform, expected", [(0.0, 1), (0.25, 3), (0.9999999999999999, 63)])
def test_impossible_responses_are_never_drawn(monkeypatch, uniform, expected):
    """Probabilities 0, ¼, 0, ¾/61, …: at the edges of the unit interval, and exactly on a step."""
    probs = torch.tensor([0.0, 0.25, 0.0] + [0.75 / 61] * 61, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(shape, uniform, dtype=torch.float64))
    drawn = lesson.sample_responses(probs.log().expand(1, 1, 1, 64), generator=None)
    assert (drawn == expected).all()


def test_logit_gradient_is_autograd():
    cells, responses = lesson.response_cells(), torch.tensor([[3, 60, 60], [1, 17, 40]])
    logits = random(2, 21, 4, seed=7).requires_grad_()
    weights = random(2, 3, 3, seed=8)
    token_logprobs = torch.log_softmax(logits, -1)
    picked = torch.stack([token_logprobs[p].flatten()[cells[responses[p]]] for p in range(2)])
    (expected,) = torch.autograd.grad((weights * picked).sum() / 3, logits)
    close(lesson.logit_gradient(weights, cells[responses], token_logprobs), expected)


def test_update_weights_undo_the_mean():
    here, old = random(5, 8, 3, seed=1), random(5, 8, 3, seed=2)
    advantages = random(5, 8, seed=3)
    ratio = (here - old).exp()
    keep = torch.tensor([[[kept(float(r), float(a), "one_side", 0.2, 0.2, 0, 0) for r in row]
                          for row, a in zip(rows, group)] for rows, group in zip(ratio, advantages)])
    loss = lesson.METHODS["rec-oneside-is"][1]
    close(lesson.update_weights(loss, here, old, advantages), torch.where(keep, ratio * advantages[..., None], 0.0))


def reference_training(loss, logits, rewards, *, every, ahead, steps, step_size, sharing, generator):
    """One seed at a time, autograd on parameters kept apart: logits_x = √(1−s)·own_x + √s·shared. Every policy is kept,
    batch n is sampled from policy v(n), and each curve is a plain sum over the 64 responses."""
    cells = torch.tensor([[a, 4 * (1 + a) + b, 4 * (5 + 4 * a + b) + c] for a, b, c in RESPONSES])
    prompts = logits.shape[0]
    own = (logits / max(1 - sharing, 1e-300) ** 0.5).clone().requires_grad_()
    shared = torch.zeros(21, 4, dtype=torch.float64, requires_grad=True)
    policies, curves = [], {"value": [], "kl": [], "ess": [], "clipped": []}
    draws = [torch.rand(1, prompts, 8, dtype=torch.float64, generator=generator)[0] for _ in range(steps)]
    for step in range(1, steps + 2):
        tables = torch.log_softmax((1 - sharing) ** 0.5 * own + sharing**0.5 * shared, -1).flatten(-2)
        policies.append(tables.detach())
        probs = tables[:, cells].sum(-1).exp().detach()
        curves["value"].append(float((probs * rewards).sum() / prompts))
        if step > steps:
            return curves
        version = 0 if every is None else every * max(0, (step - ahead - 1) // every)
        behaviour_table = policies[version]
        behaviour = behaviour_table[:, cells].sum(-1).exp()
        curves["kl"].append(float((probs * (probs / behaviour).log()).sum() / prompts))
        curves["ess"].append(float((1 / (probs**2 / behaviour).sum(-1)).mean()))
        chosen = [[int((behaviour[p].cumsum(0)[:-1] <= u).sum()) for u in draws[step - 1][p]] for p in range(prompts)]
        total, silent, tokens = 0.0, 0, 0
        for p in range(prompts):
            group = rewards[p][chosen[p]]
            advantages = group - group.mean()
            here = tables[p][cells[chosen[p]]]
            old = behaviour_table[p][cells[chosen[p]]]
            mask = torch.ones_like(here, dtype=torch.bool)
            value = loss(here, old, advantages, mask) * 3  # a mean over 8·3 tokens → (1/8) Σ_i Σ_t
            (slope,) = torch.autograd.grad(value, here, retain_graph=True)
            silent += int(((slope == 0) & (advantages != 0)[:, None]).sum())
            tokens += here.numel()
            total = total + value
        curves["clipped"].append(silent / tokens)
        slopes = torch.autograd.grad(total, (own, shared))
        own, shared = ((leaf - step_size * slope).detach().requires_grad_()
                       for leaf, slope in zip((own, shared), slopes))


@pytest.mark.parametrize("sharing", [0.0, 0.7])
@pytest.mark.parametrize("every, ahead", [(1, 0), (4, 0), (1, 3), (2, 1), (None, 0)])
def test_training_against_a_second_trainer(every, ahead, sharing):
    logits, rewards = lesson.random_worlds(1, generator=torch.Generator().manual_seed(4))
    options = {"steps": 9, "step_size": 3.0, "sharing": sharing}
    names = ("reinforce-is", "rec-oneside-nois", "rep-opmd")
    curves = lesson.train_stale({name: lesson.METHODS[name] for name in names}, logits, rewards, sync_interval=every,
                                sync_offset=ahead, generator=torch.Generator().manual_seed(5), **options)
    for i, name in enumerate(names):
        expected = reference_training(lesson.METHODS[name][1], logits[0], rewards[0], every=every, ahead=ahead,
                                      generator=torch.Generator().manual_seed(5), **options)
        for key, values in expected.items():
            close(curves[key][i, 0], values, 1e-9)
    assert curves["value"].shape == (3, 1, 10) and curves["kl"].shape == (3, 1, 9)


def test_seeds_do_not_mix():
    """Two worlds in one tensor train as each does alone, given its own random numbers."""
    logits, rewards = lesson.random_worlds(2, generator=torch.Generator().manual_seed(2))
    methods = {"grpo": lesson.METHODS["grpo"]}
    options = {"sync_interval": None, "sync_offset": 0, "steps": 1, "step_size": 2.0, "sharing": 0.5}
    both = lesson.train_stale(methods, logits, rewards, generator=torch.Generator().manual_seed(0), **options)
    first = lesson.train_stale(methods, logits[:1], rewards[:1], generator=torch.Generator().manual_seed(0), **options)
    close(both["value"][:, :1], first["value"])  # the first seed's numbers are drawn first


def test_on_fresh_data_whole_runs_coincide():
    logits, rewards = lesson.random_worlds(2, generator=torch.Generator().manual_seed(6))
    same = ("reinforce", "reinforce-is", "rec-oneside-is", "rec-twoside-nois", "rec-ring-is", "rep-opmd")
    other = ("grpo", "rep-asymre", "rec-oneside-nois, 5× step")
    methods = {name: lesson.METHODS[name] for name in (*same, *other)}
    curves = lesson.train_stale(methods, logits, rewards, sync_interval=1, sync_offset=0, steps=12, step_size=3.0,
                                sharing=0.8, generator=torch.Generator().manual_seed(7))
    value = curves["value"]
    assert all(torch.equal(value[i], value[0]) for i in range(len(same)))
    assert all((value[i] != value[0]).any() for i in range(len(same), len(value)))
    assert curves["kl"].abs().max() == 0 and curves["clipped"].abs().max() == 0
    close(curves["ess"], torch.ones_like(curves["ess"]))


# ------------------------------------------------------------------------------------------------- the 3-arm bandit


@EXAMPLES
@given(st.lists(st.floats(0.02, 1), min_size=2, max_size=6), st.lists(st.floats(0, 1), min_size=6, max_size=6),
       st.floats(0.01, 4))
def test_asymre_limit_is_a_resting_point(masses, rewards, beta):
    """The update of the logits w − βπ is the same on all arms that are left and no larger on those that are gone."""
    behaviour = vector(*masses) / sum(masses)
    rewards = vector(*rewards[: len(masses)])
    limit = lesson.asymre_limit(behaviour, rewards, beta=beta)
    assert (limit >= 0).all()
    close(limit.sum(), 1.0)
    update = behaviour * (rewards - (behaviour * rewards).sum() + beta) - beta * limit
    alive = limit > 0
    close(update[alive], update[alive].max().expand(int(alive.sum())))
    assert (update <= update[alive].max() + 1e-12).all()


def test_asymre_thresholds_by_hand():
    """w = [.3β − .174, .6β + .132, .1β + .042]; arm 3 appears when w_3 = w_2 − β, at β = .18. Arm 1 needs w_1 > c with
    arms 2 and 3 above water, c = (w_2 + w_3 − β)/2 = .087 − .15β: .45β > .261, so β > .58."""
    behaviour, rewards = lesson.BEHAVIOUR, lesson.REWARDS
    for beta, alive in ((0.1799, 1), (0.1801, 2), (0.5799, 2), (0.5801, 3)):
        assert int((lesson.asymre_limit(behaviour, rewards, beta=beta) > 0).sum()) == alive
    exact = [Fraction(3, 10) - Fraction(174, 1000) / 2, Fraction(6, 10) + Fraction(132, 1000) / 2,
             Fraction(1, 10) + Fraction(42, 1000) / 2]
    close(lesson.asymre_limit(behaviour, rewards, beta=2.0), [float(p) for p in exact])
    close(lesson.asymre_limit(behaviour, rewards, beta=1e-20), [0, 1, 0])  # not lost in rounding beside w


@pytest.mark.parametrize("behaviour, rewards, beta, message", [
    ((0.5, 0.5), (0, 1), 0.0, "beta"), ((0.5, 0.5), (0, 1), INFINITY, "beta"), ((0.5, 0.5), (0, 1), NAN, "beta"),
    ((0.5, 0.6), (0, 1), 0.5, "sum to 1"), ((NAN, 1), (0, 1), 0.5, "sum to 1"), ((0.5, 0.5), (NAN, 1), 0.5, "finite"),
])
def test_asymre_limit_refuses(behaviour, rewards, beta, message):
    with pytest.raises(ValueError, match=message):
        lesson.asymre_limit(vector(*behaviour), vector(*rewards), beta=beta)


def test_where_methods_end():
    ends = lesson.bandit_ends(steps=200)
    for name in ("rec-oneside-is", "rec-oneside-nois", "rec-twoside-is", "rec-ring-nois"):
        close(ends[name], [0.16, 0.72, 0.12], 0.01)  # arms 2 and 3 stop at ρ = 1.2
    close(ends["reinforce"], [0, 1, 0], 1e-6)
    close(ends["rep-asymre, β = .5"], [0, 0.84, 0.16], 1e-6)
    tilted = [p * math.exp(r / 0.2) for p, r in zip((0.3, 0.6, 0.1), (0.0, 0.8, 1.0))]
    close(ends["rep-opmd, baseline τ·log Z"], [t / sum(tilted) for t in tilted], 1e-6)
    # OPMD at rest with the mean as baseline: π_b(A − τd) is proportional to π.
    behaviour, rewards = vector(0.3, 0.6, 0.1), vector(0.0, 0.8, 1.0)
    pull = behaviour * (rewards - 0.58 - 0.2 * (ends["rep-opmd"] / behaviour).log())
    close(pull - pull.sum() * ends["rep-opmd"], [0, 0, 0], 1e-6)
    assert ends["reinforce-is"][2] > 0.99
    # GSPO stops arms 1 and 2 at its own bounds, ρ = 1 − .0003 and 1.0004; arm 3 gets the rest.
    for name in ("rec-gspo-is", "rec-gspo-nois"):
        close(ends[name][:2], [0.3 * 0.9997, 0.6 * 1.0004], 2e-4)


# ---------------------------------------------------------------------------------------------------------- friends


def test_ppo_and_dual_clip_by_hand():
    """A = −1, ρ = 10: PPO loses 10, the dual clip 3 with gradient 0. A = −1, ρ = .5: .8 both. A = 1, ρ = 10: −1.2."""
    ones = torch.ones(1, 1, dtype=torch.bool)
    for advantage, ratio, plain, dual in ((-1.0, 10.0, 10.0, 3.0), (-1.0, 0.5, 0.8, 0.8), (1.0, 10.0, -1.2, -1.2)):
        tensors = vector(math.log(ratio))[None], torch.zeros(1, 1, dtype=torch.float64), vector(advantage)[None], ones
        close(lesson.ppo_loss(*tensors), plain)
        close(lesson.ppo_loss(*tensors, dual_clip=3.0), dual)
    far = vector(math.log(10.0))[None], torch.zeros(1, 1, dtype=torch.float64), vector(-1.0)[None], ones
    close(gradient(lesson.ppo_loss, *far, dual_clip=3.0), [[0.0]])
    close(gradient(lesson.rec_loss, *far, clip="one_side", importance_sampling=True), [[10.0]])


@pytest.mark.parametrize("seed", range(3))
def test_gspo_with_importance_sampling_is_gspo_as_published(seed):
    """−min(sA, clip(s)A) with s = exp(mean_t log ρ_t), differentiated through s; mean over responses with tokens."""
    logprobs, old, advantages, mask = batch(rows=12, seed=seed)

    def published(logprobs):
        terms = []
        for i in range(len(logprobs)):
            if mask[i].any():
                s = (logprobs[i] - old[i])[mask[i]].mean().exp()
                terms.append(torch.maximum(-s * advantages[i], -s.clamp(0.7, 1.3) * advantages[i]))
        return torch.stack(terms).mean()

    close(gradient(LOSSES["gspo"], logprobs, old, advantages, mask), gradient(published, logprobs))
    slope = gradient(LOSSES["gspo-nois"], logprobs, old, advantages, mask)
    lengths, rows = mask.sum(-1, keepdim=True), int(mask.any(-1).sum())
    taking_part = gradient(published, logprobs) != 0
    close(slope, torch.where(taking_part, -advantages[:, None] / lengths / rows, 0.0))


def test_worked_ratios():
    every = torch.ones(4, dtype=torch.bool)
    close(lesson.sequence_ratio(vector(0.1, -0.2, 0.3, 0.0), every), math.exp(0.05))
    padded = lesson.sequence_ratio(vector(0.1, -0.2, 0.3, 0.0, NAN), torch.tensor([1, 1, 1, 1, 0]).bool())
    close(padded, 1.0512711, 1e-7)
    log_ratio = vector(0.6, -0.5, 0.1).expand(2, 3)
    close(lesson.gmpo_ratio(log_ratio, vector(1, -1), every[:3].expand(2, 3)), [1.0, 1.1051709], 1e-7)
    close(lesson.capped_ratio_weight(vector(0.5, 1.5, 3.0), cap=2.0), [0.5, 1.5, 2.0])
    close(lesson.topr_weight(vector(0.5, 3.0, 0.5, 3.0), vector(1, 1, 0, 0)), [1, 1, 0.5, 1])
    close(lesson.topr_weight(vector(0.5, 3.0), vector(-1, -1)), [0.5, 1])
    assert not lesson.capped_ratio_weight(torch.ones(1, requires_grad=True), cap=2.0).requires_grad


def test_ppo_takes_tensors_as_the_other_losses_do():
    logprobs, old, advantages, mask = batch(rows=4, tokens=4)  # square: (B,) would line up with the tokens
    per_token = advantages[:, None].expand_as(logprobs)
    expected = gradient(lesson.ppo_loss, logprobs, old, per_token, mask)
    close(gradient(lesson.ppo_loss, logprobs, old, advantages, mask), expected)
    spoilt = torch.where(mask, old, -INFINITY)
    close(gradient(lesson.ppo_loss, logprobs, spoilt, advantages, mask), expected)
    assert float(lesson.ppo_loss(logprobs, old, advantages, torch.zeros_like(mask))) == 0.0


@pytest.mark.parametrize("call, message", [
    (lambda: lesson.topr_weight(torch.ones(2, 2), vector(1, 0)), "unsqueeze"),
    (lambda: lesson.gmpo_ratio(torch.ones(2, 2), torch.ones(2, 1), torch.ones(2, 2).bool()), "advantages"),
    (lambda: lesson.gmpo_ratio(torch.ones(2, 2), torch.ones(2), torch.ones(2, 2).bool(), log_range=-0.4), "log_range"),
    (lambda: lesson.capped_ratio_weight(vector(1, 2), cap=-2.0), "cap"),
    (lambda: lesson.ppo_loss(*batch(), dual_clip=1.0), "dual_clip"),
])
def test_friends_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_overlong_penalty_of_dapo():
    lengths = vector(1, 16384, 17408, 18432, 20480)
    close(lesson.overlong_penalty(lengths, max_length=20480, cache=4096), [0, 0, -0.25, -0.5, -1])


def test_tic_against_finite_differences_and_literals():
    def value(theta):
        first, second = (1 / (1 + math.exp(-theta[i])) for i in (0, 2))
        return first * second  # P(1)·P(1 | 1)

    point, exact = [0.5, -0.3, 0.8], []
    for i in range(3):
        up, down = list(point), list(point)
        up[i] += 1e-5
        down[i] -= 1e-5
        exact.append((value(up) - value(down)) / 2e-5)
    gradients = lesson.two_token_gradients()
    close(gradients["exact ∇J"], exact, 1e-9)
    close(gradients["trajectory IS"], exact, 1e-9)
    close(gradients["token-level IS"], [0.1175019, 0, 0.1069549], 1e-7)
    close(gradients["no IS"], [0.125, -0.0093053, 0.1012532], 1e-7)


# ------------------------------------------------------------------------------------------ intervals and verdicts


def test_intervals():
    values = random(3, 40, seed=9)
    mean, low, high = lesson.interval(values)
    close(mean, values.mean(-1))
    width = 2 * 1.96 * values.std(-1, correction=0) / 40**0.5
    close((high - low) / width, torch.ones(3), 0.15)
    close((low + high) / 2 - mean, torch.zeros(3), 0.05)
    assert all(torch.equal(part, torch.full((2,), 0.5, dtype=torch.float64))
               for part in lesson.interval(torch.full((2, 8), 0.5, dtype=torch.float64)))


@pytest.mark.parametrize("low, high, rule, expected", [
    (0.01, 0.2, {}, "holds"), (-0.2, -0.01, {}, "does not hold"), (-0.1, 0.1, {}, "not resolved"),
    (0.06, 0.2, {"least": 0.05}, "holds"), (0.01, 0.2, {"least": 0.05}, "not resolved"),
    (0.0, 0.04, {"least": 0.05}, "does not hold"), (-0.04, 0.04, {"margin": 0.05}, "holds"),
    (0.01, 0.06, {"margin": 0.05}, "not resolved"), (0.06, 0.1, {"margin": 0.05}, "does not hold"),
    (-0.1, -0.06, {"margin": 0.05}, "does not hold"), (-0.1, 0.1, {"margin": 0.05}, "not resolved"),
])
def test_verdicts(low, high, rule, expected):
    assert lesson.verdict(low, high, **rule) == expected


def test_verdicts_follow_the_data():
    """Curves made by hand, with what is to be said about them; nothing is decided by a method's name."""
    names = tuple(lesson.METHODS)
    seeds = torch.linspace(-0.001, 0.001, 12, dtype=torch.float64)

    def world(ends, *, peak=0.0, clipped=0.0):
        value = torch.zeros(len(names), 12, 5, dtype=torch.float64)
        for i, name in enumerate(names):
            value[i] = ends.get(name, 0.5) + seeds[:, None] * (1 + i)
            value[i, :, 2] += peak if name == "reinforce" else 0.0
        return {"value": value, "clipped": torch.full((len(names), 12, 4), clipped, dtype=torch.float64)}

    def said(ends, **options):
        rows = lesson.paper_verdicts(dict.fromkeys(lesson.SETTINGS, world(ends, **options)), names)
        return {claim: outcome for claim, setting, *_, outcome in rows if setting == "offline"}

    good = said({"reinforce": 0.3, "rec-oneside-nois (.6, 2)": 0.7}, peak=0.2, clipped=0.02)
    bad = said({"reinforce": 0.9, "rec-oneside-nois (.6, 2)": 0.4, "rec-oneside-is": 0.8, "rec-ring-nois": 0.2,
                "rep-opmd": 0.2}, clipped=0.3)
    for start in ("P1 with", "P2 unclipped", "P2 … and ends higher: (.2", "P2 … and ends higher: (.6", "P3 the", "P4",
                  "P5 two", "P5 ring", "P7 OPMD", "P7 AsymRE", "P8"):
        (claim,) = [name for name in good if name.startswith(start)]
        assert good[claim] == "holds", claim
        if not start.startswith("P5 two"):
            assert bad[claim] == "does not hold", claim


def test_verdicts_look_at_the_method_they_name():
    """One method falls, or clips much; only the claims about that one say so."""
    names = tuple(lesson.METHODS)

    def rejected(key, method, amount):
        curves = {"value": torch.full((len(names), 12, 5), 0.5, dtype=torch.float64),
                  "clipped": torch.zeros(len(names), 12, 4, dtype=torch.float64)}
        curves[key][names.index(method), :, :3] += amount
        rows = lesson.paper_verdicts(dict.fromkeys(lesson.SETTINGS, curves), names)
        return {(claim[:6], outcome) for claim, setting, *_, outcome in rows if "fall" in claim or claim[:2] == "P8"}

    assert rejected("value", "reinforce", 0.3) == {
        ("P2 unc", "holds"), ("P2 … o", "holds"), ("P3 … a", "does not hold"), ("P8 (.6", "holds")}
    assert rejected("value", "rec-oneside-nois", 0.3) == {
        ("P2 unc", "does not hold"), ("P2 … o", "does not hold"), ("P3 … a", "does not hold"), ("P8 (.6", "holds")}
    assert rejected("value", "rec-oneside-nois (.6, 2)", 0.3) == {
        ("P2 unc", "does not hold"), ("P2 … o", "holds"), ("P3 … a", "holds"), ("P8 (.6", "holds")}
    assert ("P8 (.6", "does not hold") in rejected("clipped", "rec-oneside-nois (.6, 2)", 0.9)
    assert ("P8 (.6", "holds") in rejected("clipped", "rec-oneside-nois", 0.9)


# ------------------------------------------------------------------------------------------- the script as a whole


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        lesson.main([str(argument) for argument in arguments])
    return stop.value.code


def test_quick_run_writes_claims_and_figures(tmp_path, capsys):
    assert run("--quick", "--out", tmp_path / "figures", "--json", tmp_path / "claims.json") == 0
    claims = json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))
    assert len(claims) > 40 and all(row["ok"] for row in claims)
    assert {"claim", "expected", "measured", "tolerance", "ok"} <= claims[0].keys()
    written = {path.name for path in (tmp_path / "figures").iterdir()}
    assert written == {"04_gradient_weight.png", "04_bandit.png", "04_stale.png"}
    assert all(path.stat().st_size < 150_000 for path in (tmp_path / "figures").iterdir())
    printed = capsys.readouterr().out
    assert "Stale world" in printed and "P2 unclipped REINFORCE falls" in printed


def test_a_broken_loss_fails_the_run(tmp_path, monkeypatch):
    """The clip on the wrong side for A < 0, a mistake made in the wild."""
    right = lesson.clip_mask

    def swapped(ratio, advantages, **options):
        return right(ratio, advantages.abs(), **options)

    monkeypatch.setattr(lesson, "clip_mask", swapped)
    monkeypatch.setattr(lesson, "run_stale", cheap_runs())
    monkeypatch.setattr(lesson, "figure_stale", lambda *arguments: None)
    assert run("--quick", "--out", tmp_path, "--json", tmp_path / "claims.json") == 1
    failed = [row["claim"] for row in json.loads((tmp_path / "claims.json").read_text()) if not row["ok"]]
    assert any("truth table" in claim for claim in failed) and any("PPO-min" in claim for claim in failed)


def cheap_runs():
    original = lesson.run_stale
    return lambda names, *, seeds, seed, steps, **options: original(names, seeds=2, seed=seed, steps=3, **options)


RIGHT = {
    1: """
import numpy as np
def one_side_mask(ratio, advantages, eps_low, eps_high):
    r, a = ratio.double().numpy(), advantages.double().numpy()
    too_far = np.where(a > 0, r - (1 + eps_high), np.where(a < 0, (1 - eps_low) - r, -1.0))
    return (too_far <= 1e-6).tolist()
""",
    2: """
def asymre_end(behaviour_probs, rewards, beta):
    p, r = behaviour_probs.tolist(), rewards.tolist()
    mean = sum(x * y for x, y in zip(p, r))
    w = [x * (y - mean + beta) for x, y in zip(p, r)]
    low, high = min(w) - beta, max(w)
    for _ in range(200):
        level = (low + high) / 2
        if sum(max(x - level, 0) for x in w) > beta:
            low = level
        else:
            high = level
    return [max(x - level, 0) / beta for x in w]
""",
    3: """
def updates_ahead(step, sync_interval, sync_offset):
    if sync_interval is None:
        return step - 1
    version = 0
    while version + sync_interval <= step - 1 - sync_offset:
        version += sync_interval
    return step - 1 - version
""",
}
WRONG = {
    1: RIGHT[1].replace("a < 0", "a < -9"),
    2: RIGHT[2].replace("return [max(x - level, 0) / beta for x in w]", "return [x / beta for x in w]"),
    3: RIGHT[3].replace("return step - 1 - version", "return step - version"),
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
