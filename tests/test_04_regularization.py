"""Lesson 04 against references of another kind: loops in plain python, PPO differentiated as published, a second
trainer that keeps its parameters apart, exact fractions, numbers with their derivation beside them."""

import csv
import importlib
import itertools
import math
import os
import pathlib
import subprocess
import sys
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stale_world as world
import utils

lesson = importlib.import_module("04_regularization")
ROOT = pathlib.Path(lesson.__file__).parent
EXAMPLES = settings(max_examples=30, deadline=None)
CLIPS = ("none", "one_side", "two_side", "ring")
NAN, INFINITY = math.nan, math.inf
NARROW, WIDE, BEHAVIOUR, REWARDS = lesson.NARROW, lesson.WIDE, lesson.BEHAVIOUR, lesson.REWARDS
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


def test_every_claim_of_the_page_holds():
    assert len(lesson.lesson.claims) > 15 and all(claim["ok"] for claim in lesson.lesson.claims)


# ---------------------------------------------------------------- the mask M of (4.1); paper, section 3

# One ratio a row; columns one_side A>0, A<0 | two_side A>0, A<0 | ring A>0, A<0 | one_side (.6, 2) A>0, A<0. 1: kept.
TRUTH = {
    0.10: "10 00 10 10", 0.30: "10 00 10 10", 0.50: "10 00 00 11", 0.79: "10 00 00 11", 0.80: "11 11 11 11",
    1.00: "11 11 11 11", 1.20: "11 11 11 11", 1.21: "01 00 00 11", 2.00: "01 00 00 11", 2.90: "01 00 00 11",
    3.00: "01 00 01 11", 3.50: "01 00 01 01",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ratio, bits", TRUTH.items())
def test_4_1_the_truth_table_in_full(ratio, bits, dtype):
    columns = [("one_side", {}), ("two_side", {}), ("ring", {}), ("one_side", {"eps_low": 0.6, "eps_high": 2.0})]
    for (clip, bounds), pair in zip(columns, bits.split()):
        for sign, bit in zip((0.7, -0.7), pair):
            point = torch.tensor(ratio, dtype=dtype), torch.tensor(sign, dtype=dtype)
            mask = lesson.clip_mask(*point, clip=clip, **bounds)
            assert mask.dtype == torch.bool and bool(mask) == (bit == "1"), (clip, sign)


def kept(ratio, advantage, clip, eps_low, eps_high, outer_low, outer_high):
    """The masks as the paper writes them, inclusive, on python floats."""
    if advantage == 0 or clip == "none":
        return True
    inside = 1 - eps_low <= ratio <= 1 + eps_high
    if clip == "two_side":
        return inside
    if clip == "one_side":
        return advantage >= 0 and ratio <= 1 + eps_high or advantage <= 0 and ratio >= 1 - eps_low
    return inside or advantage >= 0 and ratio <= 1 - outer_low or advantage <= 0 and ratio >= 1 + outer_high


@EXAMPLES
@given(st.sampled_from(CLIPS), st.lists(st.tuples(st.floats(0, 8), signed), min_size=1, max_size=30), st.floats(0, 0.9),
       st.floats(0, 2), st.floats(0.01, 1), st.floats(0.01, 3))
@example("ring", [(0.75, 1.0), (0.75, -1.0), (1.25, 1.0), (1.25, -1.0), (0.5, 1.0), (1.5, -1.0)], 0.25, 0.25, 0.25,
         0.25)
@example("two_side", [(0.5, 0.0), (5.0, 0.0)], 0.25, 0.25, 0.25, 0.25)
def test_4_1_mask_is_the_papers_inequalities(clip, points, eps_low, eps_high, gap_low, gap_high):
    bounds = {"eps_low": eps_low, "eps_high": eps_high,
              "outer_low": eps_low + gap_low, "outer_high": eps_high + gap_high}
    ratio, advantages = torch.tensor(points, dtype=torch.float64).T
    expected = [kept(r, a, clip, **bounds) for r, a in points]
    assert lesson.clip_mask(ratio, advantages, clip=clip, **bounds).tolist() == expected


@pytest.mark.parametrize("clip", CLIPS)
def test_nan_and_advantage_0_are_never_clipped_away(clip):
    grid = vector(0.01, 0.5, 1.0, 1.5, 50.0)
    assert lesson.clip_mask(torch.full((2,), NAN), torch.tensor([1.0, -1.0]), clip=clip).all()
    assert lesson.clip_mask(grid, torch.full_like(grid, NAN), clip=clip).all()
    assert lesson.clip_mask(torch.logspace(-3, 3, 200), torch.tensor(0.0), clip=clip).all()


def test_mask_broadcasts_one_advantage_per_response():
    ratio, advantages = torch.tensor([[0.5, 1.5], [0.5, 1.5]]), torch.tensor([1.0, -1.0])
    assert lesson.clip_mask(ratio, advantages[:, None], clip="one_side").tolist() == [[True, False], [False, True]]
    assert lesson.clip_mask(ratio, advantages[:, None], clip="none").shape == (2, 2)
    with pytest.raises(ValueError, match=r"\(B, 1\)"):  # would line up with the tokens
        lesson.clip_mask(ratio, advantages, clip="one_side")


def test_clip_fraction_of_four_is_one_half():
    ratio, advantages = vector(1.5, 1.5, 0.5, 0.5), vector(1, -1, 1, -1)
    assert (~lesson.clip_mask(ratio, advantages, clip="one_side")).tolist() == [True, False, False, True]


def test_dapo_clips_higher():
    mask = partial(lesson.clip_mask, vector(1.25, 1.3), vector(1, 1), clip="one_side")
    assert mask(eps_high=0.28).tolist() == [True, False] and not mask().any()


@pytest.mark.parametrize("options", [
    {"clip": "both"}, {"clip": "one_side", "eps_low": -0.1}, {"clip": "two_side", "eps_high": -1e-9},
    {"clip": "one_side", "eps_low": NAN}, {"clip": "ring", "outer_low": 0.1}, {"clip": "ring", "outer_high": 0.2},
    {"clip": "ring", "eps_low": 0.6, "eps_high": 2.0}, {"clip": "ring", "outer_low": NAN}])
def test_mask_refuses(options):
    with pytest.raises(ValueError, match="need clip none, one_side, two_side or ring"):
        lesson.clip_mask(torch.ones(3), torch.ones(3), **options)


def test_outer_bounds_matter_to_the_ring_alone():
    assert lesson.clip_mask(torch.tensor(2.5), torch.tensor(1.0), clip="one_side", eps_low=0.6, eps_high=2.0)


# ---------------------------------------------------------------- the losses (4.1), (4.3), (4.4)


@pytest.mark.parametrize("bounds", [(0.2, 0.2, 0.6, 2.0), (0.1, 0.35, 0.4, 0.8)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clip", CLIPS)
def test_4_1_rec_loss_is_the_sum_over_tokens(clip, weighted, bounds):
    logprobs, old, advantages, mask = tensors = batch(rows=40, seed=3)
    options = dict(zip(("eps_low", "eps_high", "outer_low", "outer_high"), bounds))
    options |= {"clip": clip, "importance_sampling": weighted}
    value, slopes = 0.0, torch.zeros_like(logprobs)
    for i, t in mask.nonzero().tolist():
        ratio = math.exp(logprobs[i, t] - old[i, t])
        if kept(ratio, float(advantages[i]), clip, *bounds):
            slopes[i, t] = -float(advantages[i]) * (ratio if weighted else 1.0) / int(mask.sum())
            value += float(slopes[i, t] * logprobs[i, t])
    close(lesson.rec_loss(*tensors, **options), value)
    close(gradient(lesson.rec_loss, *tensors, **options), slopes)


def ppo(logprobs, old, advantages, *, eps=0.2, dual_clip=INFINITY):
    """−min(ρA, clip(ρ)A), differentiated through ρ; with a dual clip c, at most −cA where A < 0."""
    ratio = (logprobs - old).exp()
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - eps, 1 + eps) * advantages)
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss).mean()


@EXAMPLES
@given(st.lists(st.tuples(st.floats(-3, 3), signed), min_size=1, max_size=20), st.floats(0.05, 0.5))
@example([(math.log(1.2), 1.0), (math.log(0.8), -1.0), (0.0, 1.0)], 0.2)
def test_4_2_one_side_with_is_is_ppo(points, eps):
    log_ratio, advantages = (column.unsqueeze(-1) for column in torch.tensor(points, dtype=torch.float64).T)
    old, mask = torch.full_like(log_ratio, -1.3), torch.ones_like(log_ratio)
    edge = ((log_ratio.exp() - 1).abs() - eps).abs() < 1e-9  # there rounding decides on which side of the bound it is
    here = gradient(lesson.rec_loss, old + log_ratio, old, advantages, mask, clip="one_side", importance_sampling=True,
                    eps_low=eps, eps_high=eps)
    there = gradient(ppo, old + log_ratio, old, advantages, eps=eps)
    close(torch.where(edge, 0.0, here), torch.where(edge, 0.0, there))


def test_a_dual_clip_differs_exactly_where_a_is_negative_and_rho_above_c():
    """There its gradient is 0 and REC's is not. By hand, A = −1: ρ = 10 loses 10, or 3 with c = 3; ρ = .5 loses .8."""
    log_ratio, signs = torch.linspace(-2.5, 2.5, 1001).double().repeat(2)[:, None], torch.ones(2002, 1).double()
    signs[1001:] = -1
    zeros, mask = torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
    dual = gradient(ppo, log_ratio, zeros, signs, dual_clip=3.0)
    rec = gradient(lesson.rec_loss, log_ratio, zeros, signs, mask, clip="one_side", importance_sampling=True)
    beyond = (signs < 0) & (log_ratio.exp() > 3)
    assert ((dual != rec) == beyond).all() and (dual[beyond] == 0).all() and beyond.any()
    for advantage, ratio, plain, capped in ((-1, 10, 10, 3), (-1, 0.5, 0.8, 0.8), (1, 10, -1.2, -1.2)):
        point = vector(math.log(ratio)), vector(0), vector(advantage)
        close(ppo(*point), plain)
        close(ppo(*point, dual_clip=3.0), capped)


@pytest.mark.parametrize("name", [n for n in lesson.METHODS if n not in ("grpo", "rep-asymre", f"{NARROW} 5×lr")])
def test_on_fresh_data_every_row_is_reinforce_to_the_last_bit(name):
    logprobs, _, advantages, mask = batch(rows=12)
    here = gradient(lesson.METHODS[name], logprobs, logprobs, advantages, mask)
    close(here, -(advantages[:, None] * mask) / mask.sum(), 1e-16)
    assert torch.equal(here, gradient(lesson.METHODS["reinforce"], logprobs, logprobs, advantages, mask))


def test_on_fresh_data_the_loss_can_be_zero_while_learning():
    point = torch.full((2, 1), -0.7).double(), torch.full((2, 1), -0.7).double(), vector(1, -1), torch.ones(2, 1)
    loss = lesson.METHODS["rec-oneside-is"]
    assert float(loss(*point)) == 0.0
    close(gradient(loss, *point), [[-0.5], [0.5]])


LOSSES = {"rec": partial(lesson.rec_loss, clip="one_side", importance_sampling=True),
          "rec-nois": partial(lesson.rec_loss, clip="ring", importance_sampling=False),
          "opmd": partial(lesson.opmd_loss, tau=0.3), "asymre": partial(lesson.asymre_loss, beta=0.3)}
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
    for same in (advantages[:, None], advantages[:, None].expand_as(logprobs)):
        close(loss(logprobs, old, same, mask), value)
    close(loss(logprobs, old, advantages.float(), mask.int()), value, tolerance=1e-6)
    close(loss(logprobs, old, advantages, mask.double()), value)
    square = [tensor[:4] for tensor in (logprobs, old, advantages, mask)]  # (4, 4): (4,) is still one per response
    close(gradient(loss, *square), gradient(loss, *square[:2], square[2][:, None].repeat(1, 4), square[3]))


@every_loss
def test_bad_shapes_and_masks_are_refused(loss):
    logprobs, old, advantages, mask = batch()
    for tensors in ((logprobs, old[:, :3], advantages, mask), (logprobs, old, advantages, mask[:, :1]),
                    (logprobs, old, advantages[:4], mask), (logprobs, old, advantages[:1], mask),
                    (logprobs, old, torch.ones(()), mask), (logprobs, old, torch.ones(1, 4), mask),
                    (logprobs, old, advantages, advantages[:, None].expand_as(logprobs))):  # not 0 and 1
        with pytest.raises(ValueError, match="need logprobs, old_logprobs, mask of 0 and 1"):
            loss(*tensors)


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


def test_a_log_ratio_of_100_is_capped_at_20():
    old, ones = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    for advantage, log_ratio, expected in ((-1, 100.0, 485165195.41), (0, 100.0, 0.0), (1, -100.0, -math.exp(-20))):
        here = gradient(lesson.METHODS["reinforce-is"], old + log_ratio, old, vector(advantage), ones)
        close(here, [[expected]], tolerance=0.01 if log_ratio > 0 else 1e-20)


def test_the_loss_and_the_weights_of_the_picture_ask_the_one_mask(monkeypatch):
    asked = []

    def keeps_nothing(ratio, advantages, **options):
        asked.append(options["clip"])
        return torch.zeros_like(ratio * advantages, dtype=torch.bool)

    monkeypatch.setattr(lesson, "clip_mask", keeps_nothing)
    logprobs, old, advantages, mask = batch()
    for name in ("rec", "rec-nois"):
        assert (gradient(LOSSES[name], logprobs, old, advantages, mask) == 0).all()
        assert (lesson.update_weights(LOSSES[name], logprobs, old, advantages) == 0).all()
    assert asked == ["one_side", "one_side", "ring", "ring"]


def test_update_weights_undo_the_mean():
    here, old, advantages = random(5, 8, 3, seed=1), random(5, 8, 3, seed=2), random(5, 8, seed=3)
    ratio = (here - old).exp()
    keep = torch.tensor([[[kept(float(r), float(a), "one_side", 0.2, 0.2, 0, 0) for r in row]
                          for row, a in zip(rows, group)] for rows, group in zip(ratio, advantages)])
    expected = torch.where(keep, ratio * advantages[..., None], 0.0)
    close(lesson.update_weights(LOSSES["rec"], here, old, advantages), expected)


@EXAMPLES
@given(st.lists(st.tuples(signed, signed, signed), min_size=2, max_size=6), st.floats(0.05, 5))
def test_4_3_opmd_is_the_square_at_every_theta(points, tau):
    logprobs, old, advantages = torch.tensor(points, dtype=torch.float64).T
    mask = torch.ones(len(points), 1)

    def square(logprobs):
        return ((advantages - tau * (logprobs - old)) ** 2 / (2 * tau)).mean()

    constant = float((advantages**2 / (2 * tau) + advantages * old).mean())
    here = lesson.opmd_loss(logprobs[:, None], old[:, None], advantages, mask, tau=tau)
    close(here + constant, square(logprobs), 1e-9)
    close(gradient(lesson.opmd_loss, logprobs[:, None], old[:, None], advantages, mask, tau=tau)[:, 0],
          gradient(square, logprobs), 1e-9)


@EXAMPLES
@given(st.integers(0, 10**6), st.floats(0, 3))
def test_4_4_asymre_is_a_lowered_baseline(seed, beta):
    logprobs, old, advantages, mask = batch(seed=seed)
    lowered = torch.where(mask, -(advantages[:, None] + beta), 0.0) / mask.sum()
    close(gradient(lesson.asymre_loss, logprobs, old, advantages, mask, beta=beta), lowered)
    kl = torch.where(mask, old - logprobs, 0.0).sum() / mask.sum()  # the sample's estimate of KL(π_old ‖ π_θ)
    reinforce = -torch.where(mask, advantages[:, None] * logprobs, 0.0).sum() / mask.sum()
    close(lesson.asymre_loss(logprobs, old, advantages, mask, beta=beta), reinforce + beta * kl)


def test_flat_groups_still_feel_the_penalties():
    logprobs, old, _, mask = batch()
    none, tokens = torch.zeros(len(logprobs)), int(mask.sum())
    close(gradient(lesson.asymre_loss, logprobs, old, none, mask, beta=0.1), -0.1 / tokens * mask.double())
    here = gradient(lesson.opmd_loss, logprobs, old, none, mask, tau=0.4)
    close(here, torch.where(mask, 0.4 * (logprobs - old) / tokens, 0.0))


def test_4_3_opmd_penalises_tokens_and_does_not_cap_the_pull():
    """d = (.1, −.1): Σ_t d_t² = .02, (Σ_t d_t)² = 0, and the loss is (τ/2)·(1/2)·.02."""
    old, ones, loss = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2), partial(lesson.opmd_loss, tau=1.0)
    close(loss(vector(0.1, -0.1)[None], old, torch.zeros(1), ones), 0.005)
    close(gradient(loss, vector(-50.0, 0.0)[None], old, torch.zeros(1), ones), [[-25.0, 0.0]])


def test_penalties_refuse_strengths_without_meaning():
    for tau in (0, -1.0, NAN, INFINITY):
        with pytest.raises(ValueError, match="need 0 < tau"):
            lesson.opmd_loss(*batch(), tau=tau)
    for beta in (-0.1, NAN, INFINITY):
        with pytest.raises(ValueError, match="need 0 ≤ beta"):
            lesson.asymre_loss(*batch(), beta=beta)


# ---------------------------------------------------------------- fixed data (4.5) – (4.8)


@EXAMPLES
@given(st.lists(st.floats(0.02, 1), min_size=2, max_size=6), st.lists(st.floats(0, 1), min_size=6, max_size=6),
       st.floats(0.01, 4))
def test_4_6_asymre_rests_there(masses, rewards, beta):
    """The update of the logits w − βπ is the same on all arms that are left and no larger on those that are gone."""
    behaviour, rewards = vector(*masses) / sum(masses), vector(*rewards[: len(masses)])
    limit = lesson.asymre_limit(behaviour, rewards, beta=beta)
    assert (limit >= 0).all()
    close(limit.sum(), 1.0)
    update = behaviour * (rewards - (behaviour * rewards).sum() + beta) - beta * limit
    alive = limit > 0
    close(update[alive], update[alive].max().expand(int(alive.sum())))
    assert (update <= update[alive].max() + 1e-12).all()


def test_4_6_thresholds_and_limits_in_fractions():
    """Arm 3 appears when w_3 = w_2 − β, β = .18; arm 1 when w_1 > c = (w_2 + w_3 − β)/2 = .087 − .15β, .45β > .261."""
    limit = partial(lesson.asymre_limit, BEHAVIOUR, REWARDS)
    for beta, alive in ((0.1799, 1), (0.1801, 2), (0.5799, 2), (0.5801, 3)):
        assert int((limit(beta=beta) > 0).sum()) == alive
    for beta in (1, 2):  # all arms alive: π_b + π_b·(r − μ)/β
        exact = [Fraction(p, 10) + Fraction(c, 1000) / beta for p, c in ((3, -174), (6, 132), (1, 42))]
        close(limit(beta=float(beta)), [float(p) for p in exact])
    close(limit(beta=0.5), [0, 0.84, 0.16])
    close(limit(beta=1e-20), [0, 1, 0])  # not lost in rounding beside w
    taus = torch.logspace(-2, 2, 2000, dtype=torch.float64).unsqueeze(-1)
    tilts = torch.softmax(BEHAVIOUR.log() + REWARDS / taus, -1)  # no τ gives AsymRE's limit
    assert (tilts - limit(beta=0.5)).abs().amax(-1).min() > 0.05


@pytest.mark.parametrize("clip", CLIPS[1:])
@pytest.mark.parametrize("weighted", [False, True])
def test_4_8_every_narrow_clip_ends_at_the_ceiling(clip, weighted):
    loss = partial(lesson.rec_loss, clip=clip, importance_sampling=weighted)
    end = lesson.follow_bandit(loss, step_size=0.1)[-1]
    close(end, [0.16, 0.72, 0.12], 0.01)  # arms 2 and 3 stop at ρ = 1.2, arm 1 keeps the rest: J = .696


@pytest.mark.parametrize("weighted", [False, True])
def test_4_8_gspo_stops_at_its_own_bounds(weighted):
    """Responses of one token: one-side on s = ρ, .9997 and 1.0004. Arms 1 and 2 stop there; arm 3 gets the rest."""
    loss = partial(lesson.rec_loss, clip="one_side", importance_sampling=weighted, eps_low=3e-4, eps_high=4e-4)
    close(lesson.follow_bandit(loss, step_size=0.002)[-1][:2], [0.3 * 0.9997, 0.6 * 1.0004], 2e-4)


def test_4_5_where_the_others_end():
    ends = lesson.ends
    close([lesson.J["rep-opmd"], lesson.J["OPMD, b = τ·log Z"]], [0.83, 0.86], 0.005)  # as the prose says
    close(ends["reinforce"], [0, 1, 0], 1e-6)
    close(ends["rep-asymre"], [0, 1, 0], 1e-6)
    # The wide clip without IS: once arm 1 is clipped only positive weights are left, imitation of arms 2 and 3.
    close(ends[WIDE], [0.0, 0.132 / 0.174, 0.042 / 0.174], 0.02)
    assert all((end[2] > 0.99) == (name == "reinforce-is") and (name == "reinforce-is" or end[2] < 0.5)
               for name, end in ends.items())
    # OPMD with the mean as baseline rests where π_b·(A − τd) is proportional to π.
    pull = BEHAVIOUR * (REWARDS - 0.58 - 0.2 * (ends["rep-opmd"] / BEHAVIOUR).log())
    close(pull - pull.sum() * ends["rep-opmd"], [0, 0, 0], 1e-6)


@pytest.mark.parametrize("refresh", [None, 3])
def test_4_5_is_the_gradient_of_the_expectation(refresh):
    """E_data[A·ρ·log π] by autograd in the logits, step by step."""
    path = lesson.follow_bandit(LOSSES["rec"], steps=8, step_size=0.5, refresh=refresh)
    theta, data = BEHAVIOUR.log(), BEHAVIOUR
    for step in range(9):
        probs = torch.softmax(theta, -1)
        close(path[step], probs)
        if refresh and step % refresh == 0:
            data = probs
        leaf = theta.clone().requires_grad_()
        ratio, advantages = probs / data, REWARDS - data @ REWARDS
        keep = torch.tensor([kept(float(r), float(a), "one_side", 0.2, 0.2, 0, 0) for r, a in zip(ratio, advantages)])
        value = (data * keep * ratio * advantages * torch.log_softmax(leaf, -1)).sum()
        theta = theta + 0.5 * torch.autograd.grad(value, leaf)[0]


# ---------------------------------------------------------------- stale data (4.9), and when a clip helps


def reference_training(loss, logits, rewards, *, every, late, steps, sharing, generator):
    """One seed, autograd on parameters kept apart: logits_x = √(1−s)·own_x + √s·shared. Returns J at each step, a plain
    sum over the 64 responses, each found by its tokens."""
    tokens = torch.tensor(list(itertools.product(range(4), repeat=3)))
    a, b, c = tokens.T
    cells = torch.stack([a * 21, b * 21 + 1 + a, c * 21 + 5 + 4 * a + b], -1)  # in a flat (4, 21) table
    own = (logits / max(1 - sharing, 1e-300) ** 0.5).clone().requires_grad_()
    shared, policies, values = torch.zeros(4, 21, dtype=torch.float64, requires_grad=True), [], []
    draws = [torch.rand(1, 4, 8, dtype=torch.float64, generator=generator)[0] for _ in range(steps)]
    for step in range(1, steps + 2):
        tables = torch.log_softmax((1 - sharing) ** 0.5 * own + sharing**0.5 * shared, -2).flatten(-2)
        policies.append(tables.detach())
        values.append(float((policies[-1][:, cells].sum(-1).exp() * rewards).sum() / 4))
        if step > steps:
            return values
        behaviour = policies[0 if every is None else every * max(0, (step - late - 1) // every)]
        total = 0.0
        for p in range(4):
            cumulative = behaviour[p][cells].sum(-1).exp().cumsum(0)[:-1]
            chosen = [int((cumulative <= u).sum()) for u in draws[step - 1][p]]
            advantages = rewards[p][chosen] - rewards[p][chosen].mean()
            here, old = (table[p][cells[chosen]] for table in (tables, behaviour))
            total = total + 3 * loss(here, old, advantages, torch.ones_like(here))  # a mean over 8·3 → (1/8) Σ_i Σ_t
        slopes = torch.autograd.grad(total, (own, shared))
        own, shared = ((leaf - 3.0 * slope).detach().requires_grad_() for leaf, slope in zip((own, shared), slopes))


@pytest.mark.parametrize("sharing", [0.0, 0.7])
@pytest.mark.parametrize("every, late, name", [(1, 0, "rep-opmd"), (4, 0, "reinforce-is"), (1, 3, NARROW),
                                               (2, 1, "rep-asymre"), (None, 0, "rec-ring-nois")])
def test_4_9_training_against_a_second_trainer(monkeypatch, every, late, name, sharing):
    monkeypatch.setattr(lesson, "SEEDS", 1)
    monkeypatch.setattr(lesson, "STEPS", 9)
    monkeypatch.setattr(lesson.lesson, "seed", 4)
    generator = torch.Generator().manual_seed(4)
    logits, rewards = world.random_worlds(1, generator=generator)
    expected = reference_training(lesson.METHODS[name], logits[0], rewards[0], every=every, late=late, steps=9,
                                  sharing=sharing, generator=generator)
    close(lesson.train_stale(name, every, late, sharing=sharing)[:, 0], expected, 1e-9)


def test_grpo_divides_by_the_groups_standard_deviation():
    logprobs, old = random(5, 8, 3, seed=1), random(5, 8, 3, seed=2)
    advantages = random(5, 8, seed=3) - random(5, 8, seed=3).mean(-1, keepdim=True)
    divided = advantages / (advantages.std(-1, correction=0, keepdim=True) + 1e-6)
    close(lesson.update_weights(lesson.METHODS["grpo"], logprobs, old, advantages),
          lesson.update_weights(LOSSES["rec"], logprobs, old, divided))


def test_practice_is_the_exact_gradient(monkeypatch):
    monkeypatch.setattr(lesson, "STEPS", 1)
    logits, rewards = world.random_worlds(lesson.SEEDS, generator=torch.Generator().manual_seed(lesson.lesson.seed))
    leaf = logits.clone().requires_grad_()
    values = (world.response_logprobs(leaf).exp() * rewards).sum(-1)  # J of each seed and prompt
    (slope,) = torch.autograd.grad(values.sum(), leaf)
    moved = logits + 3.0 * (0.15 * slope + 0.85 * slope.sum(1, keepdim=True))
    close(lesson.train_stale("reinforce", practice=1)[0], world.expected_reward(moved, rewards), 1e-12)


def test_claims_of_the_paper_compare_what_they_say():
    """What each row measures: J in the end, first − second, with the interval paired over seeds."""
    runs = {name: torch.zeros(5, 6) + i for i, name in enumerate(lesson.METHODS)}
    runs[NARROW] = runs[NARROW] + torch.arange(5.0)[:, None]
    mean, low, high = lesson.ahead(runs, NARROW, "reinforce")
    index = list(lesson.METHODS).index
    assert mean == low == high == index(NARROW) + 4 - index("reinforce")
    words = {"narrow clip": NARROW, "wide clip": WIDE, "REINFORCE": "reinforce", "OPMD": "rep-opmd",
             "AsymRE": "rep-asymre", "GRPO": "grpo", "two-side": "rec-twoside-nois", "ring": "rec-ring-nois",
             "one-side": NARROW}
    for claim, first, second in lesson.CLAIMS:
        assert {first, second} <= lesson.METHODS.keys()
        left, _, right = claim[2:].strip(" …").partition(" = " if "=" in claim else " > ")
        assert words.get(left, first) == first and words.get(right, second) == second, claim


@pytest.fixture(scope="module")
def full():
    """Twenty seeds of the rows that the verdicts in words rest on, with their policies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson, "SEEDS", 20)
        kept, exact = {}, world.expected_reward
        patch.setattr(world, "expected_reward", lambda policies, rewards: kept.update(last=policies) or exact(
            policies, rewards))
        runs = {}
        for setting, pair in (("every 20", (20, 0)), ("never", (None, 0))):
            for name in ("reinforce", "reinforce-is", NARROW, WIDE, "rep-opmd"):
                runs[setting, name] = lesson.train_stale(name, *pair), kept["last"]
        return runs


def test_p2_reinforce_falls_and_the_clips_do_not(full):
    def fall(name):
        J = full["every 20", name][0]
        return world.interval(J.amax(0) - J[-1])

    assert fall("reinforce")[1] > 0.1 and max(fall(NARROW)[2], fall(WIDE)[2]) < 0.05


def test_4_8_the_narrow_clip_stays_at_the_ceiling_if_never_refreshed(full):
    J = full["never", NARROW][0].mean(1)
    assert (J < 1.2**3 * float(J[0]) + 0.02).all()


def test_the_wide_clip_is_ahead_only_where_data_are_refreshed(full):
    """Section 4: refreshed, the wide clip beats the narrow one; never refreshed, unclipped IS is not below the wide."""
    end = {key: J[-1] for key, (J, _) in full.items()}
    assert world.interval(end["every 20", WIDE] - end["every 20", NARROW])[1] > 0
    assert world.interval(end["never", "reinforce-is"] - end["never", WIDE])[0] > 0


@pytest.mark.parametrize("name", ["reinforce-is", NARROW, WIDE, "rec-oneside-is", "rec-ring-nois", "rep-opmd"])
def test_fresh_runs_are_reinforces_to_the_last_bit(monkeypatch, name):
    monkeypatch.setattr(lesson, "STEPS", 20)
    assert torch.equal(lesson.train_stale(name, 1), lesson.train_stale("reinforce", 1))


@pytest.mark.parametrize("lower, upper, first", [(0.0, math.inf, 350), (0.8, 1.2, 161)])
def test_section_5_on_the_refreshed_bandit_the_clip_is_first_and_both_end_on_arm_3(lower, upper, first):
    """A second trainer, in numpy: Σ_i π_old(i)·A_i·M_i·(e_i − π); M: one-side at 1 ± .2, or 1."""
    theta, rewards, values = np.log([0.3, 0.6, 0.1]), np.array([0, 0.8, 1]), []
    data = None
    for step in range(501):
        probs = np.exp(theta) / np.exp(theta).sum()
        values.append(probs @ rewards)
        data = probs if step % 20 == 0 else data
        A = rewards - data @ rewards
        push = data * A * np.where(A > 0, probs / data <= upper, probs / data >= lower)
        theta = theta + 2 * (push - push.sum() * probs)
        if step == 20 and upper == math.inf:
            assert probs[2] == pytest.approx(1 / 200, abs=0.001)
    assert next(step for step, J in enumerate(values) if J > 0.95) == first and values[-1] > 0.99


def test_unclipped_importance_sampling_prevents_the_fall_too(full):
    for setting in ("every 20", "never"):
        assert world.interval(full[setting, "reinforce-is"][0][-1] - full[setting, "reinforce"][0][-1])[1] > 0


def test_a_trust_region_saves_samples(full):
    """After 19 steps on one sampler, how much of its samples still counts."""
    share = {name: float(world.effective_sample_size(policies[19], policies[0]).mean())
             for (setting, name), (_, policies) in full.items() if setting == "every 20"}
    assert share["reinforce"] < 0.2 and share[NARROW] > 0.7 and share["rep-opmd"] > 0.4


@pytest.mark.parametrize("setting, small", [("every 20", True), ("never", False)])
def test_p8_the_wide_clip_stops_few_tokens_unless_never_refreshed(full, setting, small):
    """The share of the sampler's own tokens that have an advantage and no weight, in expectation: over all responses,
    right ones raised and wrong ones lowered, at every step."""
    _logits, rewards = world.random_worlds(20, generator=torch.Generator().manual_seed(lesson.lesson.seed))
    policies, responses, shares = full[setting, WIDE][1], torch.arange(64).expand(20, 4, 64), []
    for step in range(1, len(policies)):
        sampler = policies[20 * ((step - 1) // 20) if setting == "every 20" else 0]
        ratio = (world.token_logprobs(policies[step - 1], responses) - world.token_logprobs(sampler, responses)).exp()
        clipped = ~lesson.clip_mask(ratio, (rewards - 0.5).unsqueeze(-1), clip="one_side", eps_low=0.6, eps_high=2.0)
        shares.append((world.response_logprobs(sampler).exp() * clipped.double().mean(-1)).sum(-1).mean())
    assert (float(torch.stack(shares).mean()) < 0.1) == small


def test_section_5_in_the_transformer_of_lesson_06():
    """Never refreshed: from .39, .56 for the narrow clip, .44 for REINFORCE, .61 for unclipped IS; and before training
    the likeliest answer is right in 96 % of the cases."""
    with open(ROOT / "figures/data/paper.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["setting"] == "offline"]

    def mean(key, name, step):
        return np.mean([float(row[key]) for row in rows if row["row"] == name and row["step"] == step])

    ends = [mean("eval_accuracy", name, "120") for name in (NARROW, "reinforce", "reinforce-is")]
    assert ends == pytest.approx([0.56, 0.44, 0.61], abs=0.005)
    assert mean("eval_accuracy", "reinforce", "0") == pytest.approx(0.39, abs=0.005)
    assert mean("eval_greedy", "reinforce", "0") == pytest.approx(0.96, abs=0.005)


# ---------------------------------------------------------------- friends, exercises, the script as a whole


def test_overlong_penalty_of_dapo():
    lengths = vector(1, 16000, 16384, 17408, 18432, 20480)
    close(lesson.overlong_penalty(lengths, max_length=20480, cache=4096), [0, 0, 0, -0.25, -0.5, -1])


def test_two_tokens_against_finite_differences():
    def value(theta):
        first, second = (1 / (1 + math.exp(-theta[i])) for i in (0, 2))
        return first * second  # P(1)·P(1 | 1)

    for i in range(3):
        up, down = [0.5, -0.3, 0.8], [0.5, -0.3, 0.8]
        up[i] += 1e-5
        down[i] -= 1e-5
        close(lesson.exact[i], (value(up) - value(down)) / 2e-5, 1e-9)


@pytest.mark.parametrize("number, right, wrong", [(1, "Kept", "clipped"), (2, "0.36", "0.25")])
def test_predictions(number, right, wrong, capsys):
    assert utils.exercise(lesson.EXERCISES, number, right) == 0
    assert utils.exercise(lesson.EXERCISES, number, wrong) == 1
    assert utils.exercise(lesson.EXERCISES, number, None).startswith(f"Exercise {number}")


OPMD_REST = """
def opmd_rest(behaviour_probs, rewards, tau):
    import torch
    theta, mean = behaviour_probs.log(), behaviour_probs @ rewards
    for _ in range(2000):
        probs = torch.softmax(theta, -1)
        u = rewards - mean - tau * (probs / behaviour_probs).log()
        theta = theta + behaviour_probs * u - (behaviour_probs @ u) * probs
    return torch.softmax(theta, -1)
"""


@pytest.mark.parametrize("text, right", [(OPMD_REST, True), (OPMD_REST.replace("range(2000)", "range(9)"), False), (
    "def opmd_rest(b, r, tau):\n    return (b.log() + r / tau).softmax(-1)", False)])  # that is for b = τ·log Z
def test_opmd_exercise(text, right, tmp_path, capsys):
    answer = tmp_path / "answer.py"
    answer.write_text(text)
    verdict = utils.exercise(lesson.EXERCISES, 3, str(answer))
    assert verdict is None if right else "Not yet" in verdict


@pytest.mark.slow
def test_quick_run_fits_a_terminal_and_writes_its_figures(tmp_path):
    command = [sys.executable, ROOT / "04_regularization.py", "--quick", "--seed", "3", "--out", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert max(map(len, result.stdout.replace(str(tmp_path), "").splitlines())) <= 100
    assert "verdicts below may differ" in result.stdout
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "04_gradient_weight.png", "04_bandit.png", "04_stale.png", "04_when_clipping_helps.png"}
    assert torch.get_default_dtype() == torch.float32
