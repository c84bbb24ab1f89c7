"""What must not change: each property for every row, and the rows for which it does not hold, each with its reason.

A property makes two batches of one and says how their gradients must be related; hypothesis looks for a batch where a
row breaks it. The exceptions are shown to be exceptions on fixed batches, so that the list is true in both directions.
A row here is what the page makes of rewards and log-probabilities: shaped_advantages, then policy_loss. What DAPO,
SGPO and AEPO also do to data, rewards and by a second batch is in under_the_hood/test_friends.py.
Elsewhere: left padding of prompts and micro-batches of a model, test_06_train.py (C32, C13); how a batch is cut by the
token budget, under_the_hood/test_batching.py; any number of processes, under_the_hood/test_parallel.py.
"""

import importlib
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from under_the_hood import friends

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
ROWS = lm.ALGORITHMS


@dataclass
class Batch:
    new: torch.Tensor      # (B, T) log π_θ
    old: torch.Tensor      # (B, T)
    entropy: torch.Tensor  # (B, T)
    mask: torch.Tensor     # (B, T)
    rewards: torch.Tensor  # (P, K)
    random: torch.Generator  # what a property draws itself


def random_batch(seed, *, prompts=3, group_size=4, width=4):
    random = torch.Generator().manual_seed(seed)
    old, noise, entropy = torch.rand(3, prompts * group_size, width, generator=random, dtype=torch.float64)
    old = -3 * old - .05
    lengths = torch.randint(1, width + 1, (prompts * group_size, 1), generator=random)
    rewards = torch.randint(0, 3, (prompts, group_size), generator=random).double() / 2  # sums of them are exact
    return Batch(old + 2 * (noise - .5), old, entropy + .1, torch.arange(width) < lengths, rewards, random)


def rows_of(batch, order):
    """The batch with its responses in this order; rewards keep their shape."""
    moved = {name: getattr(batch, name)[order] for name in ("new", "old", "entropy", "mask")}
    return replace(batch, **moved, rewards=batch.rewards.flatten()[order].view(-1, batch.rewards.shape[1]))


def outcome_advantages(row, batch):
    """(P, K). Like the rewards, the noise rates are such that no sum is rounded: 0 is 0 in any order."""
    return lm.shaped_advantages(batch.rewards, batch.mask.sum(1).view_as(batch.rewards), algorithm=row,
                                generator=torch.Generator().manual_seed(0), noise_rates=(.25, .25))


def advantages_of(row, batch):
    """(B,), or (B, T) for EP-GRPO, as train_step makes them."""
    advantages = outcome_advantages(row, batch)
    return friends.token_advantages(advantages, batch.rewards, batch.new - batch.old, batch.entropy, batch.mask,
                                    algorithm=row)


def update(row, batch, *, advantages=None, weights=None, **options):
    """(gradient (B, T), metrics) of the row on this batch."""
    leaf, group_size = batch.new.clone().requires_grad_(), batch.rewards.shape[1]
    hinted = torch.arange(len(leaf)) % group_size == group_size - 1 if row.worked_examples else None
    loss, metrics = lm.policy_loss(leaf, batch.old, advantages_of(row, batch) if advantages is None else advantages,
                                   batch.mask, algorithm=row, constant=8, hinted=hinted, weights=weights, **options)
    return torch.autograd.grad(loss, leaf)[0], torch.stack([loss.detach(), *metrics.values()])


def gradient(row, batch, **options):
    return update(row, batch, **options)[0]


def mean_of(row, batch):
    """N, (B, T)."""
    return lm.token_weights(batch.mask.double(), aggregation=row.aggregation, constant=8)


# ----------------------------------------------------------------------------------------------------- the properties
# Each takes a row and a batch, and returns pairs of tensors that must be equal, or nearly so: up to a third number.


def prompts_in_another_order(row, batch):
    order = torch.randperm(len(batch.rewards), generator=batch.random)
    order = torch.arange(len(batch.new)).view(len(batch.rewards), -1)[order].flatten()
    (found, numbers), (whole, expected) = update(row, rows_of(batch, order)), update(row, batch)
    return (found, whole[order]), (numbers, expected)


def responses_in_another_order(row, batch):
    prompts, group_size = batch.rewards.shape
    order = torch.cat([i * group_size + torch.randperm(group_size, generator=batch.random) for i in range(prompts)])
    (found, numbers), (whole, expected) = update(row, rows_of(batch, order)), update(row, batch)
    return (found, whole[order]), (numbers, expected)


def rewards_shifted(row, batch):
    shift = torch.randint(-4, 5, (1,), generator=batch.random)
    return (gradient(row, replace(batch, rewards=batch.rewards + shift)), gradient(row, batch)),


def rewards_scaled(row, batch):
    """By s ≥ 1: nothing changes under std normalisation, up to the 1e-6 beside it, and else the gradient is s times."""
    scale = 2.0 ** int(torch.randint(0, 4, (1,), generator=batch.random))
    found, before = gradient(row, replace(batch, rewards=scale * batch.rewards)), gradient(row, batch)
    return (found, before if row.std_normalize else scale * before, 1e-4 if row.std_normalize else 1e-9),


def padded(row, batch):
    """Three more columns of NaN."""
    def wide(tensor, value):
        return torch.cat([tensor, torch.full((len(tensor), 3), value, dtype=tensor.dtype)], 1)

    more = replace(batch, mask=wide(batch.mask, False),
                   **{name: wide(getattr(batch, name), math.nan) for name in ("new", "old", "entropy")})
    (found, numbers), (before, expected) = update(row, more), update(row, batch)
    return (found, torch.nn.functional.pad(before, (0, 3))), (numbers, expected)


def halves_that_know_the_totals(row, batch):
    """Micro-batches: advantages and denominators are those of the whole batch."""
    advantages, cut = advantages_of(row, batch), batch.rewards.shape[1] * (len(batch.rewards) // 2)
    weights = mean_of(row, batch)
    parts = [gradient(row, part, advantages=advantages[rows], weights=weights[rows])
             for rows, part in ((rows, half(batch, rows)) for rows in (slice(0, cut), slice(cut, None)))]
    return (torch.cat(parts), gradient(row, batch)),


def half(batch, rows):
    return rows_of(batch, torch.arange(len(batch.new))[rows])


def halves_that_do_not(row, batch):
    """Two equal halves, each with its own advantages and denominators, averaged."""
    twice = batch if len(batch.rewards) % 2 == 0 else half(batch, slice(batch.rewards.shape[1], None))
    cut = len(twice.new) // 2
    parts = [gradient(row, half(twice, rows)) / 2 for rows in (slice(0, cut), slice(cut, None))]
    return (torch.cat(parts), gradient(row, twice)),


def one_more_flat_group(row, batch):
    """Appended: it has no gradient, and takes its place in the denominator alone."""
    size, value = batch.rewards.shape[1], torch.randint(0, 3, (1,), generator=batch.random).item() / 2
    order = torch.cat([torch.arange(len(batch.new)), torch.arange(size)])  # the first group's responses, once more
    more = rows_of(batch, order)
    more.rewards[-1] = value
    found, share = gradient(row, more), mean_of(row, more)[0, 0] / mean_of(row, batch)[0, 0]
    return (found[:-size], share * gradient(row, batch)), (found[-size:], torch.zeros_like(found[-size:]))


def fresh_data_are_reinforce(row, batch):
    """π_θ = π_old: no mask, weight or penalty acts, whatever the row. Its A and N are left: the gradient is −N·A."""
    fresh = replace(batch, new=batch.old)
    return (gradient(row, fresh), -mean_of(row, batch) * outcome_advantages(row, batch).view(-1, 1)),


def wide_bounds_do_not_clip(row, batch):
    wide = {"eps_low": 1e9, "eps_high": 1e9, "outer_low": 2e9, "outer_high": 2e9}
    return (gradient(row, batch, **wide), gradient(replace(row, clip="none"), batch)),


def penalties_add(row, batch):
    """τ adds τ·d to each token's slope and β takes β away, in the row's mean. As both go to 0 no penalty is left."""
    tau, beta = torch.rand(2, generator=batch.random, dtype=torch.float64).tolist()
    weights = mean_of(row, batch)
    plain, distance = gradient(replace(row, tau=0.0, beta=0.0), batch), batch.new - batch.old
    return ((gradient(row, batch, tau=tau, beta=beta), plain + weights * (tau * distance - beta)),
            (gradient(row, batch, tau=1e-14, beta=1e-14), plain))


def hot_weights_are_none(row, batch):
    """T → ∞ in exp(A/T)."""
    return (gradient(replace(row, weight_temperature=1e14), batch), gradient(replace(row, shaping="none"), batch)),


def both_log_probabilities_shifted(row, batch):
    """A ratio, and no probability: the loss may be written at any shift, as in examples/with_trl.py."""
    shift = torch.rand(batch.new.shape, generator=batch.random, dtype=torch.float64)
    return (gradient(row, replace(batch, new=batch.new + shift, old=batch.old + shift)), gradient(row, batch)),


TOKEN_MEANS = [name for name, row in ROWS.items() if row.aggregation == "token-mean"]
WHICH = "the choice among surplus negatives is drawn for places, not for responses"
VIRTUAL = "one more response in each group, with the largest reward there is"
PROCESS = "a process signal beside the outcome: the sign of r says where a flat group is pushed, and σ(d) how far"
# property → the rows for which it does not hold → why
PROPERTIES = {
    prompts_in_another_order: {"red-drop": WHICH},
    responses_in_another_order: {"red-drop": WHICH, "icpo": "the last response is the hinted one"},
    rewards_shifted: {
        "ngrpo": VIRTUAL, "tic-grpo": "r/|y|: a shift pays for brevity", "ep-grpo": PROCESS,
        "icpo": "the hinted response has a bonus if its reward is positive"},
    rewards_scaled: {
        **dict.fromkeys(("rep-opmd", "rep-asymre"), "the penalty has a scale of its own: τ, β are in units of reward"),
        **dict.fromkeys(("red-weight", "red-weight-oneside"), "T of exp(A/T) is in units of reward"),
        "red-weight-adaptive": "T is bounded below by 0.8", "ngrpo": VIRTUAL,
        "icpo": "a bonus of 1, whatever the unit of the reward"},
    padded: {},
    halves_that_know_the_totals: {},
    halves_that_do_not: dict.fromkeys(TOKEN_MEANS, "a mean over tokens: the halves have unlike numbers of them"),
    one_more_flat_group: {
        **dict.fromkeys(("rep-opmd", "rep-asymre"), "the penalty acts on it: it keeps the policy near the sampler"),
        "reinforce-plus-plus": "the baseline is the batch's", "ngrpo": VIRTUAL, "tic-grpo": "r/|y| is not flat",
        "icpo": "the bonus of a hint makes a contrast", "ep-grpo": PROCESS},
    fresh_data_are_reinforce: {
        "rep-asymre": "the slope of its penalty is −β everywhere", "ep-grpo": PROCESS,
        "icpo": "W of a hinted token is π/(π + λ)"},
    wide_bounds_do_not_clip: {"gmpo": "the bounds also hold inside W, for each ratio of the geometric mean"},
    penalties_add: {},
    hot_weights_are_none: {"red-drop": "its shaping has no T",
                           "red-weight-adaptive": "it finds its T itself, the flag says nothing"},
    both_log_probabilities_shifted: {"icpo": "W of a hinted token is π/(π + λ)"},
}


def broken(check, names, batch):
    """Those of the rows for which the property fails on this batch, all from the same state of its generator."""
    state, failed = batch.random.get_state(), set()
    for name in names:
        batch.random.set_state(state)
        for found, expected, *tolerance in check(ROWS[name], batch):
            if not torch.allclose(found, expected, rtol=(tolerance or [1e-9])[0], atol=1e-12):
                failed.add(name)
    return failed


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), prompts=st.integers(2, 4), group_size=st.integers(2, 4), width=st.integers(1, 4))
def test_it_holds_for_all_other_rows(check, seed, prompts, group_size, width):
    batch = random_batch(seed, prompts=prompts, group_size=group_size, width=width)
    assert broken(check, ROWS.keys() - PROPERTIES[check].keys(), batch) == set()


@pytest.mark.parametrize("check", [c for c in PROPERTIES if PROPERTIES[c]], ids=lambda check: check.__name__)
def test_it_does_not_hold_for_the_exceptions(check):
    left = set(PROPERTIES[check])
    for seed in range(20):
        batch = random_batch(seed, group_size=5)
        batch.rewards[1] = 0.0  # a flat group among others
        left -= broken(check, left, batch)
        if not left:
            return
    assert left == set()


def test_gmpo_without_bounds_is_gspos_ratio_without_a_clip():
    batch, gmpo = random_batch(0), ROWS["gmpo"]
    unbounded = gradient(replace(gmpo, eps_low=1 - 1e-9, eps_high=1e9), batch)
    assert torch.allclose(unbounded, gradient(replace(gmpo, clip="none", level="sequence", weight="ratio"), batch))


def test_on_fresh_data_asymre_still_lowers_its_baseline():
    """Where REINFORCE has −A/N, it has −(A + β)/N."""
    batch = random_batch(0)
    fresh = replace(batch, new=batch.old)
    plain = gradient(ROWS["reinforce"], fresh)
    assert torch.allclose(gradient(ROWS["rep-asymre"], fresh), plain - .1 * batch.mask / batch.mask.sum(), atol=1e-16)
