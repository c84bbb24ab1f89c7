"""Lesson 06, the losses: every row against the equations, written out again as loops over responses and tokens.

The reference below knows nothing of the module: its table of rows, its masks, its means and its derivative are its own.
What must not change, such as padding, order or a shift of the rewards, is in test_invariances.py, for every row.
Ids such as C12 name small inputs that trainers of this kind got wrong.
"""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)

# ------------------------------------------------------------------------------------------- the equations, once more

# name: (clip, importance sampling, level, std, shaping, ε_low, ε_high, τ, β, mean). Paper sections 3 to 5.
EQUATIONS = {
    "reinforce": ("none", False, "token", False, None, .2, .2, 0, 0, "token"),
    "reinforce-is": ("none", True, "token", False, None, .2, .2, 0, 0, "token"),
    "grpo": ("one_side", True, "token", True, None, .2, .2, 0, 0, "token"),
    "rec-oneside-is": ("one_side", True, "token", False, None, .2, .2, 0, 0, "token"),
    "rec-oneside-nois": ("one_side", False, "token", False, None, .2, .2, 0, 0, "token"),
    "rec-twoside-is": ("two_side", True, "token", False, None, .2, .2, 0, 0, "token"),
    "rec-twoside-nois": ("two_side", False, "token", False, None, .2, .2, 0, 0, "token"),
    "rec-ring-is": ("ring", True, "token", False, None, .2, .2, 0, 0, "token"),
    "rec-ring-nois": ("ring", False, "token", False, None, .2, .2, 0, 0, "token"),
    "rec-gspo-is": ("one_side", True, "sequence", False, None, 3e-4, 4e-4, 0, 0, "sequence"),
    "rec-gspo-nois": ("one_side", False, "sequence", False, None, 3e-4, 4e-4, 0, 0, "sequence"),
    "rep-opmd": ("none", False, "token", False, None, .2, .2, .2, 0, "token"),
    "rep-asymre": ("none", False, "token", False, None, .2, .2, 0, .1, "token"),
    "red-drop": ("none", False, "token", False, "drop", .2, .2, 0, 0, "token"),
    "red-weight": ("none", False, "token", False, "weight", .2, .2, 0, 0, "token"),
    "red-weight-oneside": ("one_side", False, "token", False, "weight", .2, .2, 0, 0, "token"),
    "red-weight-adaptive": ("none", False, "token", False, "adaptive", .2, .2, 0, 0, "token"),
}
OUTER_LOW, OUTER_HIGH = .6, 2.0


def kept(ratio, advantage, clip, low, high):
    """M of one token, from the inequalities of the paper; A = 0 is never clipped."""
    inside = 1 - low <= ratio <= 1 + high
    if advantage == 0 or clip == "none":
        return True
    if clip == "one_side":
        return ratio <= 1 + high if advantage > 0 else ratio >= 1 - low
    if clip == "two_side":
        return inside
    return inside or (ratio <= 1 - OUTER_LOW if advantage > 0 else ratio >= 1 + OUTER_HIGH)


def reference_advantages(name, rewards, lengths, dropped=()):
    """(P, K) lists → list of P·K advantages. `dropped`: indices that RED-Drop left out (its choice is random)."""
    std, shaping, result = EQUATIONS[name][3], EQUATIONS[name][4], []
    for p, group in enumerate(rewards):
        members = [k for k in range(len(group)) if (p, k) not in dropped]
        mean = sum(group[k] for k in members) / len(members)
        advantages = [group[k] - mean if k in members else 0.0 for k in range(len(group))]
        if std:
            sigma = math.sqrt(sum((r - mean) ** 2 for r in group) / len(group))
            advantages = [a / (sigma + 1e-6) for a in advantages]
        if shaping == "weight":
            advantages = [a * math.exp(a) for a in advantages]
        if shaping == "adaptive":
            pull = [a * n for a, n in zip(advantages, lengths[p])]
            if sum(pull) < -1e-9:
                excess = lambda t, pull=pull, a=advantages: sum(f * math.exp(x / t) for x, f in zip(a, pull))
                low, high = .8, 100.0
                temperature = low
                if excess(low) > 0:
                    for _ in range(20):
                        if high - low < .05:
                            break
                        middle = (low + high) / 2
                        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
                    temperature = high
                advantages = [a * math.exp(a / temperature) for a in advantages]
        result += advantages
    return result


def reference_loss(name, logprobs, old_logprobs, advantages, mask, **changed):
    """−Σ N·M·sg(W)·A·log π + R, one token after the other; differentiable in logprobs through autograd only."""
    clip, use_ratio, level, _, _, low, high, tau, beta, mean = EQUATIONS[name]
    low, high = changed.get("eps_low", low), changed.get("eps_high", high)
    tau, beta = changed.get("tau", tau), changed.get("beta", beta)
    rows, width = logprobs.shape
    places = [[t for t in range(width) if mask[i][t]] for i in range(rows)]
    tokens = sum(map(len, places))
    total = logprobs.new_zeros(())
    for i in range(rows):
        if not places[i]:
            continue
        distances = [float(logprobs[i, t].detach() - old_logprobs[i, t]) for t in places[i]]
        for t, distance in zip(places[i], distances):
            ratio = math.exp(distance if level == "token" else sum(distances) / len(distances))
            a = float(advantages[i])
            share = 1 / tokens if mean == "token" else 1 / (rows * len(places[i]))
            d = logprobs[i, t] - old_logprobs[i, t]
            if kept(ratio, a, clip, low, high):
                total = total - share * a * (ratio if use_ratio else 1.0) * logprobs[i, t]
            total = total + share * (tau / 2 * d**2 - beta * d)
    return total


def random_batch(seed, *, prompts=3, group=4, width=6, spread=.5):
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * group
    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - .05
    new = old + spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    mask = torch.arange(width) < lengths[:, None]
    rewards = torch.randint(0, 2, (prompts, group), generator=generator).double()
    rewards[0] = torch.tensor([1.0] + [0.0] * (group - 1))  # one group that is never flat
    return new, old, rewards, mask


def loss_and_gradient(function, logprobs, *args, **kwargs):
    leaf = logprobs.clone().requires_grad_(True)
    loss = function(leaf, *args, **kwargs)
    loss = loss[0] if isinstance(loss, tuple) else loss
    gradient, = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def ours(logprobs, old_logprobs, advantages, mask, *, name, **options):
    return loss_and_gradient(
        lambda leaf: lm.policy_loss(leaf, old_logprobs, advantages, mask, algorithm=name, **options), logprobs)


# --------------------------------------------------------------------------------------------------- every row


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("seed", range(2))
def test_row_is_its_equation(name, seed):
    new, old, rewards, mask = random_batch(seed, spread=(.5, 1e-3)[seed % 2] if "gspo" in name else .5)
    lengths, row = mask.sum(1).view_as(rewards), lm.ALGORITHMS[name]
    advantages = lm.shaped_advantages(rewards, lengths, algorithm=row, generator=torch.Generator().manual_seed(seed))
    dropped = set()
    if EQUATIONS[name][4] == "drop":
        for p, group in enumerate(rewards):
            positive = group >= group.mean()
            keep = advantages[p] != 0
            if 0 < positive.sum() < group.numel() / 2:
                dropped |= {(p, k) for k in range(4) if not keep[k]}
                assert keep.sum() == 2 * positive.sum() and bool(keep[positive].all())
    expected = reference_advantages(name, rewards.tolist(), lengths.tolist(), dropped)
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(advantages.flatten(), expected, atol=1e-12, rtol=0)

    loss, gradient = ours(new, old, expected, mask, name=name)
    reference, reference_gradient = loss_and_gradient(lambda leaf: reference_loss(name, leaf, old, expected, mask), new)
    assert torch.allclose(loss, reference, atol=1e-13, rtol=1e-12)
    assert torch.allclose(gradient, reference_gradient, atol=1e-14, rtol=1e-12)
    assert (gradient[mask] != 0).any()


def test_the_reference_covers_every_row_of_the_paper():
    paper = {name for name in lm.ALGORITHMS if name.startswith(("rec-", "rep-", "red-", "reinforce-is", "grpo"))}
    assert paper <= EQUATIONS.keys() <= lm.ALGORITHMS.keys()


@pytest.mark.parametrize("name, options", [("rec-oneside-is", {"eps_low": .6, "eps_high": 2.0}),
                                           ("rec-twoside-nois", {"eps_low": .1, "eps_high": .3}),
                                           ("rec-ring-is", {"eps_low": .05, "eps_high": .4}),
                                           ("rep-opmd", {"tau": .7}), ("rep-asymre", {"beta": .5}),
                                           ("rec-oneside-nois", {"tau": .3, "beta": .2}), ("rep-opmd", {"tau": 0.0})])
def test_options_override_the_row(name, options):
    new, old, rewards, mask = random_batch(11, spread=.8)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    loss, gradient = ours(new, old, advantages, mask, name=name, **options)
    reference, expected = loss_and_gradient(
        lambda leaf: reference_loss(name, leaf, old, advantages, mask, **options), new)
    assert torch.allclose(loss, reference, atol=1e-13) and torch.allclose(gradient, expected, atol=1e-14)


def test_overrides_are_used_and_typos_are_refused():
    assert lm.find_algorithm("rep-opmd", tau=0.0).tau == 0.0  # 0 is a value, None is not
    assert lm.find_algorithm("rep-opmd", tau=None) == lm.ALGORITHMS["rep-opmd"]
    with pytest.raises(ValueError, match="unknown algorithm 'rec-onside'"):
        lm.find_algorithm("rec-onside")


def test_ring_outer_bounds_are_used():
    ratio = torch.tensor([[.35, .45], [2.4, 2.6]], dtype=torch.float64)
    advantages, mask, old = torch.tensor([1.0, -1.0]), torch.ones(2, 2, dtype=torch.bool), -torch.ones(2, 2).double()
    _, gradient = ours(old + ratio.log(), old, advantages, mask, name="rec-ring-nois", outer_low=.6, outer_high=1.5)
    assert (gradient != 0).tolist() == [[True, False], [False, True]]


# ----------------------------------------------------------------------------------------------------- the masks

# The truth table of the paper for ε = .2/.2 and ε' = .6/2: ratio → one_side A>0, A<0 | two_side | ring A>0, A<0 |
# one_side with ε = .6/2.0 A>0, A<0.
TRUTH = {.10: (1, 0, 0, 1, 0, 1, 0), .30: (1, 0, 0, 1, 0, 1, 0), .50: (1, 0, 0, 0, 0, 1, 1),
         .79: (1, 0, 0, 0, 0, 1, 1), .80: (1, 1, 1, 1, 1, 1, 1), 1.0: (1, 1, 1, 1, 1, 1, 1),
         1.2: (1, 1, 1, 1, 1, 1, 1), 1.21: (0, 1, 0, 0, 0, 1, 1), 2.0: (0, 1, 0, 0, 0, 1, 1),
         2.9: (0, 1, 0, 0, 0, 1, 1), 3.0: (0, 1, 0, 0, 1, 1, 1), 3.5: (0, 1, 0, 0, 1, 0, 1)}


@pytest.mark.parametrize("ratio", TRUTH)
def test_masks_are_the_truth_table(ratio):
    ratio, expected = torch.tensor(ratio, dtype=torch.float64), TRUTH[ratio]
    up, down, zero = (torch.tensor(a, dtype=torch.float64) for a in (.3, -.3, 0.0))
    wide = {"eps_low": .6, "eps_high": 2.0}
    found = [lm.clip_mask(ratio, up, clip="one_side"), lm.clip_mask(ratio, down, clip="one_side"),
             lm.clip_mask(ratio, up, clip="two_side"), lm.clip_mask(ratio, up, clip="ring"),
             lm.clip_mask(ratio, down, clip="ring"), lm.clip_mask(ratio, up, clip="one_side", **wide),
             lm.clip_mask(ratio, down, clip="one_side", **wide)]
    assert tuple(int(f) for f in found) == expected
    assert lm.clip_mask(ratio, down, clip="two_side") == lm.clip_mask(ratio, up, clip="two_side")
    assert all(lm.clip_mask(ratio, zero, clip=clip) for clip in ("none", "one_side", "two_side", "ring"))
    assert lm.clip_mask(ratio, up, clip="none") and lm.clip_mask(ratio, down, clip="none")


def test_c22_clip_fraction_looks_at_the_sign_and_at_real_tokens_only():
    # One-sided: (1.5, +) and (.5, −) are clipped, (1.5, −) and (.5, +) are not: 2 of 4. The masked column would count.
    ratio = torch.tensor([[1.5, 9.0], [1.5, 9.0], [.5, 9.0], [.5, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0]] * 4)
    old = torch.full((4, 2), -1.0, dtype=torch.float64)
    _, metrics = lm.policy_loss(old + ratio.log(), old, torch.tensor([1.0, -1.0, 1.0, -1.0]), mask,
                                algorithm="rec-oneside-is")
    assert metrics["clip_fraction"] == .5
    assert metrics["ratio_mean"].item() == pytest.approx(1.0)  # (1.5 + 1.5 + .5 + .5) / 4
    # k3 = ρ − 1 − log ρ: (.5 − log 1.5)·2 + (−.5 − log .5)·2 over 4 tokens
    assert metrics["kl_old"].item() == pytest.approx(((.5 - math.log(1.5)) + (-.5 - math.log(.5))) / 2)


def test_kl_is_estimated_by_k3():
    # Ratios 2 and ¼: k3 = ρ − 1 − log ρ averages to ((1 − log 2) + (−¾ + log 4)) / 2; with ρ turned round it would be
    # ((−½ + log 2) + (3 − log 4)) / 2, and k1 = −log ρ averages to log(2) / 2. (2 and ½ would not tell the first two.)
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    new = old + torch.tensor([[2.0, .25]], dtype=torch.float64).log()
    _, metrics = lm.policy_loss(new, old, torch.tensor([1.0]), torch.ones(1, 2), algorithm="reinforce")
    assert metrics["kl_old"].item() == pytest.approx((.25 + math.log(2)) / 2)
    assert metrics["ratio_mean"].item() == pytest.approx(1.125)


# ----------------------------------------------------------------------------------------- regularised identities

THETA, REWARDS, BANDIT_TAU = (.3, -.2, .1), (0.0, .8, 1.0), .5


def bandit(theta=THETA, rewards=REWARDS):
    """One draw of each of three arms: logprobs (3, 1) from softmax(θ), the uniform old policy, rewards, mask."""
    theta = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    old = torch.full((3, 1), -math.log(3), dtype=torch.float64)
    return theta, torch.log_softmax(theta, 0)[:, None], old, torch.tensor(rewards, dtype=torch.float64), old > -9


def test_opmd_is_reinforce_plus_a_quadratic_worked_number():
    _theta, logprobs, old, rewards, mask = bandit()
    loss, _ = lm.policy_loss(logprobs, old, rewards - .6, mask, algorithm="rep-opmd", tau=BANDIT_TAU)
    constant = ((rewards - .6) ** 2).mean() / (2 * BANDIT_TAU)  # Σ A log π_old is 0: π_old is uniform and ΣA = 0
    distance = (logprobs - old)[:, 0]
    completed_square = ((rewards - .6 - BANDIT_TAU * distance) ** 2).mean() / (2 * BANDIT_TAU)
    assert loss.item() == pytest.approx((completed_square - constant).item(), abs=1e-15)
    assert completed_square.item() == pytest.approx(.257328934865, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(theta=st.tuples(*[st.floats(-2, 2)] * 3), rewards=st.tuples(*[st.floats(-1, 1)] * 3), tau=st.floats(.05, 2))
def test_opmd_gradient_is_the_completed_squares_for_all_policies(theta, rewards, tau):
    """∇ (1/K)Σ(A − τd)²/(2τ) = ∇ (−(1/K)ΣAℓ + (τ/2K)Σd²), everywhere and not only at the old policy."""
    theta, logprobs, old, rewards, mask = bandit(theta, rewards)
    advantages = rewards - rewards.mean()
    loss, _ = lm.policy_loss(logprobs, old, advantages, mask, algorithm="rep-opmd", tau=tau)
    square = ((advantages - tau * (logprobs - old)[:, 0]) ** 2).mean() / (2 * tau)
    first, = torch.autograd.grad(loss, theta, retain_graph=True)
    second, = torch.autograd.grad(square, theta)
    assert torch.allclose(first, second, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(theta=st.tuples(*[st.floats(-2, 2)] * 3), rewards=st.tuples(*[st.floats(-1, 1)] * 3), beta=st.floats(0, 2))
def test_asymre_is_reinforce_with_a_lowered_baseline(theta, rewards, beta):
    """Baseline r̄ − β, that is advantage A + β, has the gradient of REINFORCE + (β/K)Σ log(π_old/π_θ)."""
    theta, logprobs, old, rewards, mask = bandit(theta, rewards)
    loss, _ = lm.policy_loss(logprobs, old, rewards - rewards.mean(), mask, algorithm="rep-asymre", beta=beta)
    lowered = -((rewards - (rewards.mean() - beta)) * logprobs[:, 0]).mean()
    first, = torch.autograd.grad(loss, theta, retain_graph=True)
    second, = torch.autograd.grad(lowered, theta)
    assert torch.allclose(first, second, atol=1e-12)


def test_asymre_worked_number():
    _, logprobs, old, rewards, mask = bandit()
    loss, _ = lm.policy_loss(logprobs, old, rewards - .6, mask, algorithm="rep-asymre", beta=.1)
    lowered = -((rewards - .5) * logprobs[:, 0]).mean()  # differs by the constant (β/K)Σ log π_old = −β log 3
    assert loss.item() == pytest.approx((lowered - .1 * math.log(3)).item(), abs=1e-15)
    assert lowered.item() == pytest.approx(.171927265100, abs=1e-12)


def test_one_side_is_has_ppos_gradient():
    """∇ −min(ρA, clip(ρ)A) with ρ alive equals the one-sided, importance-weighted row with ρ detached."""
    new, old, rewards, mask = random_batch(5, spread=.6)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()

    def ppo(leaf):
        ratio, a = (leaf - old).exp(), advantages[:, None]
        return -(torch.minimum(ratio * a, ratio.clamp(.8, 1.2) * a) * mask).sum() / mask.sum()

    assert torch.allclose(ours(new, old, advantages, mask, name="rec-oneside-is")[1], loss_and_gradient(ppo, new)[1],
                          atol=1e-14)


# ------------------------------------------------------------------------------------------------- cases from public reports


def losses_as_logprobs(values, mask):
    """A batch whose REINFORCE per-token losses are `values`: advantage 1 and log π = −value."""
    logprobs = -torch.as_tensor(values, dtype=torch.float64)
    return logprobs, logprobs.clone(), torch.ones(len(logprobs)), torch.as_tensor(mask)


C12 = losses_as_logprobs([[1.0, 0, 0, 0], [.5, .5, .5, .5]], [[1, 0, 0, 0], [1, 1, 1, 1]])


def test_c12_aggregations():
    # token mean (1 + 4·.5)/5 = .6; mean of sequence means (1 + .5)/2 = .75
    assert lm.policy_loss(*C12, algorithm="reinforce")[0].item() == pytest.approx(.6)
    row = lm.Algorithm(aggregation="seq-mean-token-mean")
    assert lm.policy_loss(*C12, algorithm=row)[0].item() == pytest.approx(.75)


def test_c13_parts_of_a_batch_add_up_to_the_batch():
    """Parts {A} and {B} with the weights of the whole batch: .2 + .4 = .6, each token 1/5; not the mean of means."""
    logprobs, old, advantages, mask = C12
    for aggregation, whole in (("token-mean", .6), ("seq-mean-token-mean", .75)):
        row = lm.Algorithm(aggregation=aggregation)
        weights = lm.token_weights(mask, aggregation=aggregation)
        parts = [lm.policy_loss(logprobs[i:i + 1], old[i:i + 1], advantages[i:i + 1], mask[i:i + 1], algorithm=row,
                                weights=weights[i:i + 1])[0].item() for i in range(2)]
        assert sum(parts) == pytest.approx(whole)
    assert lm.token_weights(mask, aggregation="token-mean")[mask.bool()].tolist() == pytest.approx([1 / 5] * 5)


def test_c15_a_row_left_out_leaves_the_denominator_too():
    logprobs, old, advantages, _ = losses_as_logprobs(torch.ones(2, 5), torch.ones(2, 5))
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    assert lm.policy_loss(logprobs, old, advantages, mask, algorithm="reinforce")[0].item() == pytest.approx(1.0)  # 3/3


@pytest.mark.parametrize("name", EQUATIONS)
def test_c16_padding_may_hold_anything(name):
    """Loss [.5, NaN, 1.5, −inf] with mask [1, 0, 1, 0]: mean 1.0, finite gradients, and none on padding."""
    logprobs = torch.tensor([[-.5, math.nan, -1.5, -math.inf]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-.5, math.inf, -1.5, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 0]])
    loss, metrics = lm.policy_loss(logprobs, old, torch.tensor([1.0]), mask, algorithm=name)
    loss.backward()
    assert loss.item() == pytest.approx(1.0)
    assert torch.isfinite(logprobs.grad).all() and (logprobs.grad[mask == 0] == 0).all()
    assert all(math.isfinite(v) for v in metrics.values())
    token_advantages = torch.tensor([[1.0, math.nan, 1.0, math.inf]])
    again, _ = lm.policy_loss(logprobs.detach(), old, token_advantages, mask, algorithm=name)
    assert again.item() == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["reinforce-is", "rec-oneside-is", "rec-twoside-is", "rec-ring-is", "grpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_c18_a_huge_ratio_stays_finite(name, dtype):
    mask = torch.ones(1, 1, dtype=torch.bool)
    far, old = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True), torch.tensor([[-101.0]], dtype=dtype)
    loss, metrics = lm.policy_loss(far, old, torch.tensor([0.0]), mask, algorithm=name)
    gradient, = torch.autograd.grad(loss, far)
    assert loss == 0 and gradient == 0  # and not inf · 0 = NaN
    loss, metrics = lm.policy_loss(far, old, torch.tensor([-1.0]), mask, algorithm=name)
    gradient, = torch.autograd.grad(loss, far)
    weight = 0.0 if name == "rec-twoside-is" else math.exp(20)  # the log-ratio stops at 20: e^20 = 485165195.41
    assert gradient.item() == pytest.approx(weight, rel=1e-6)
    assert math.isfinite(loss.item()) and metrics["ratio_mean"].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_c18_nan_stays_visible():
    logprobs, old = torch.tensor([[math.nan, -1.0]]), torch.full((1, 2), -1.0)
    loss, _ = lm.policy_loss(logprobs, old, torch.tensor([1.0]), torch.ones(1, 2), algorithm="rec-oneside-is")
    assert math.isnan(loss.item())


def test_c24_loss_zero_is_not_gradient_zero():
    same, mask = torch.full((2, 1), -1.3, dtype=torch.float64), torch.ones(2, 1)
    for name in ("reinforce", "rec-oneside-is", "rec-oneside-nois"):
        loss, gradient = ours(same, same, torch.tensor([1.0, -1.0]), mask, name=name)
        assert loss == pytest.approx(0) and gradient.flatten().tolist() == pytest.approx([-.5, .5])
    # Lengths 1 and 3 with log π = −1: token mean (1·1 − 3·1)/4 = −.5 in our log π form, where PPO's ratio form has +.5.
    logprobs, mask = torch.full((2, 3), -1.0, dtype=torch.float64), torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss, gradient = ours(logprobs, logprobs, torch.tensor([1.0, -1.0]), mask, name="rec-oneside-is")
    assert loss == pytest.approx(-.5)
    assert gradient[mask.bool()].tolist() == pytest.approx([-.25, .25, .25, .25])  # Σ = +.5, the slope in log ρ


def test_c26_mask_and_advantages_cannot_trade_places():
    logprobs = torch.tensor([[-.3, -.7]])
    with pytest.raises(ValueError, match="0 and 1"):
        lm.policy_loss(logprobs, logprobs, torch.ones(1, 2), torch.tensor([[1.0, -1.0]]), algorithm="reinforce")
    with pytest.raises(TypeError):
        lm.policy_loss(logprobs, logprobs, torch.ones(1), torch.ones(1, 2), "reinforce")


@pytest.mark.parametrize("arguments", [
    dict(logprobs=torch.zeros(2, 3), old_logprobs=torch.zeros(2, 2), advantages=torch.zeros(2), mask=torch.ones(2, 3)),
    dict(logprobs=torch.zeros(2, 3), old_logprobs=torch.zeros(2, 3), advantages=torch.zeros(3), mask=torch.ones(2, 3)),
    dict(logprobs=torch.zeros(2, 3), old_logprobs=torch.zeros(2, 3), advantages=torch.zeros(2), mask=torch.ones(3)),
    dict(logprobs=torch.zeros(3, 3), old_logprobs=torch.zeros(3, 3), advantages=torch.zeros(1, 3),
         mask=torch.ones(3, 3))])
def test_shapes_that_would_broadcast_are_refused(arguments):
    with pytest.raises(ValueError, match="need logprobs"):
        lm.policy_loss(**arguments, algorithm="reinforce")


# --------------------------------------------------------------------------------------- what must leave no trace


def metrics_and_gradient(name, new, old, advantages, mask):
    leaf = new.clone().requires_grad_(True)
    loss, metrics = lm.policy_loss(leaf, old, advantages, mask, algorithm=name)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("reward", [0.0, .1, .3, 1.0])
def test_flat_groups_have_advantage_exactly_zero(name, reward):
    rewards = torch.full((2, 7), reward)  # float32: the mean of seven times .1 is not .1
    advantages = lm.shaped_advantages(rewards, torch.ones(2, 7), algorithm=lm.ALGORITHMS[name])
    assert (advantages == 0).all()


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_all_masked_row_adds_nothing_but_its_place_in_a_mean_over_sequences(name):
    new, old, rewards, mask = random_batch(9)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    mask[5] = False
    loss, gradient, metrics = metrics_and_gradient(name, new, old, advantages, mask)
    rest = [i for i in range(len(new)) if i != 5]
    rest_loss, rest_gradient, rest_metrics = metrics_and_gradient(
        name, new[rest], old[rest], advantages[rest], mask[rest])
    scale = 11 / 12 if EQUATIONS[name][-1] == "sequence" else 1.0
    assert torch.isfinite(loss) and (gradient[5] == 0).all()
    assert torch.allclose(loss, rest_loss * scale, atol=1e-14)
    assert torch.allclose(gradient[rest], rest_gradient * scale, atol=1e-15)
    assert metrics == pytest.approx(rest_metrics, abs=1e-14)


def test_nothing_masked_in_is_zero_and_not_nan():
    new, old, _rewards, mask = random_batch(9)
    for name in EQUATIONS:
        loss, gradient, metrics = metrics_and_gradient(name, new, old, torch.ones(len(new)), torch.zeros_like(mask))
        assert loss == 0 and (gradient == 0).all() and all(math.isfinite(v) for v in metrics.values()), name


@pytest.mark.parametrize("name", EQUATIONS)
def test_gradient_reaches_neither_sampler_nor_advantages(name):
    new, old, _rewards, mask = random_batch(10)
    new, old = new.requires_grad_(True), old.requires_grad_(True)
    advantages = torch.randn(len(new), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages.requires_grad_(True)
    lm.policy_loss(new, old, advantages, mask, algorithm=name)[0].backward()
    assert old.grad is None and advantages.grad is None and new.grad is not None


def test_token_advantages_of_one_value_are_a_response_advantage():
    new, old, rewards, mask = random_batch(12)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    for name in EQUATIONS:
        one = ours(new, old, advantages, mask, name=name)
        many = ours(new, old, advantages[:, None].expand_as(new), mask, name=name)
        assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1]), name
    token = advantages[:, None] * torch.linspace(.5, 2, new.shape[1])  # and they may differ from token to token
    _, gradient = ours(new, old, token, mask, name="reinforce")
    assert torch.allclose(gradient, -token * mask / mask.sum(), atol=1e-16)


def test_half_precision_is_lifted_before_any_exponential():
    """bfloat16 log-probabilities: ratios and sums are float32, so 2⁻⁸ relative steps do not enter the mean."""
    logprobs = torch.full((1, 300), -1.0, dtype=torch.bfloat16)
    loss, metrics = lm.policy_loss(logprobs, logprobs, torch.ones(1), torch.ones(1, 300), algorithm="rec-oneside-is")
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio_mean"].item() == pytest.approx(1.0, abs=1e-6)


# ------------------------------------------------------------------------------------- literal advantages of the rows

GROUP = torch.tensor([[1.0, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)


@pytest.mark.parametrize("name, positive, negative", [
    ("reinforce", .75, -.25), ("rec-oneside-nois", .75, -.25), ("rep-asymre", .75, -.25),
    ("grpo", 1.732047, -.577349),        # ddof 0: .75 / (√.1875 + 1e-6)
    ("red-weight", 1.587750, -.194700),  # .75·e^.75 and −.25·e^−.25
    ("red-weight-oneside", 1.587750, -.194700),
])
def test_literal_advantages(name, positive, negative):
    advantages = lm.shaped_advantages(GROUP, torch.ones(1, 8), algorithm=lm.ALGORITHMS[name])[0].tolist()
    assert advantages == pytest.approx([positive] * 2 + [negative] * 6, abs=1e-6)


def test_red_drop_keeps_as_many_negatives_as_positives():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(40):
        advantages = lm.shaped_advantages(GROUP, torch.ones(1, 8), algorithm=lm.ALGORITHMS["red-drop"],
                                          generator=generator)[0]
        assert advantages[:2].tolist() == [.5, .5] and sorted(advantages[2:].tolist()) == [-.5] * 2 + [0.0] * 4
        seen |= set((advantages == -.5).nonzero()[:, 0].tolist())
    assert seen == set(range(2, 8))  # random, and drawn from the generator it was given
    again = [lm.shaped_advantages(GROUP, torch.ones(1, 8), algorithm=lm.ALGORITHMS["red-drop"],
                                  generator=torch.Generator().manual_seed(5)).tolist() for _ in range(2)]
    assert again[0] == again[1]


def test_red_drop_never_drops_a_reward_at_the_mean():
    """Mean ½: six positives, two negatives, so nothing is dropped. Were ½ a negative one, two of six would stay."""
    group = torch.tensor([[1.0, .5, .5, 0, 0, .5, 1, .5]], dtype=torch.float64)
    for seed in range(5):
        advantages = lm.shaped_advantages(group, torch.ones(1, 8), algorithm=lm.ALGORITHMS["red-drop"],
                                          generator=torch.Generator().manual_seed(seed))[0]
        assert advantages.tolist() == [.5, 0, 0, -.5, -.5, 0, .5, 0]


def test_adaptive_row_uses_the_lengths_of_its_own_group():
    rewards = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)
    lengths = torch.tensor([[100, 100, 200, 300], [300, 300, 10, 10]])
    advantages = lm.shaped_advantages(rewards, lengths, algorithm=lm.ALGORITHMS["red-weight-adaptive"])
    temperature = 1.1390625  # bisection of [.8, 100] to a width of .05; the exact root is 1/ln 2.5 = 1.0913567
    expected = [.5 * math.exp(.5 / temperature)] * 2 + [-.5 * math.exp(-.5 / temperature)] * 2
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert advantages[1].tolist() == [.5, .5, -.5, -.5]  # ΣAL ≥ 0: no weighting


def test_weight_temperature_is_used():
    row = lm.find_algorithm("red-weight", weight_temperature=2.0)
    advantages = lm.shaped_advantages(GROUP, torch.ones(1, 8), algorithm=row)[0]
    assert advantages[0].item() == pytest.approx(.75 * math.exp(.375)) and advantages[7].item() == pytest.approx(
        -.25 * math.exp(-.125))


def test_red_drop_keeps_a_reward_at_the_mean_in_any_unit():
    """1, 2, 3, 2 units: the mean is 2, up to rounding, which is larger where the rewards are."""
    for unit in torch.rand(100, generator=torch.Generator().manual_seed(0)).tolist():
        for scale in (1e-4, 1, 1e4):
            assert lm.red_drop(torch.tensor([1.0, 2, 3, 2]) * (unit * scale))[1].all()
