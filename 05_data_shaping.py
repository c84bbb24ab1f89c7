"""Lesson 05: shape the data instead of the update."""

import math

import torch

# %% Three functions that the training script copies: which responses of a group count, and how much


def red_drop(rewards, *, generator=None):
    """RED-Drop: balance each group by dropping random negatives, then recompute the baseline (paper section 4).

    rewards: (..., K), where the last dimension holds the K responses to ONE prompt. A response is positive when its
    reward is at least the group's mean. If negatives outnumber positives, random negatives are dropped until there are
    as many; else nothing is dropped. generator: a torch.Generator that makes the choice repeatable.
    Returns (advantages, keep), both (..., K): reward minus the mean of the KEPT rewards, 0 where dropped; and which
    responses were kept (bool). A group whose rewards are all equal keeps everything and gives exactly 0.
    ValueError: K < 2, or a reward is not finite.
    """
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError("a group needs at least 2 responses to the same prompt: sample K ≥ 2, "
                         f"not {tuple(rewards.shape)}")
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite: replace NaN and infinity (by 0, say) before grouping")
    # r_i − r̄ as the mean of r_i − r_j over j: equal rewards differ by exactly 0 in any precision, while the float32 mean
    # of seven times 0.1 is larger than 0.1. A reward AT the mean is positive, so its rounding must not decide either.
    difference = rewards.unsqueeze(-1) - rewards.unsqueeze(-2)
    rounding = 4 * torch.finfo(rewards.dtype).eps * rewards.abs().amax(-1, keepdim=True)
    positive = difference.mean(-1) >= -rounding
    # A random rank for each negative, 0, 1, …, with the positives behind them: rank < number of positives may stay.
    device = rewards.device if generator is None else generator.device
    noise = torch.rand(rewards.shape, generator=generator, device=device).to(rewards.device)
    rank = noise.masked_fill(positive, 2.0).argsort(-1).argsort(-1)
    keep = positive | (rank < positive.sum(-1, keepdim=True))
    from_kept = torch.where(keep.unsqueeze(-2), difference, 0.0).sum(-1) / keep.sum(-1, keepdim=True)
    return torch.where(keep, from_kept, 0.0), keep


def red_weight(advantages, *, temperature=1.0):
    """RED-Weight: the weight exp(A_i/T) of each response, to multiply its advantage with (paper section 4).

    advantages: (..., K), with the UNWEIGHTED group mean as baseline. Returns the same shape. T → ∞ weighs all alike.
    The advantage to train on is advantages * red_weight(advantages).
    ValueError: temperature is not a positive number, an advantage is not finite, or a weight overflows.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}; a large one means no weighting")
    if not torch.isfinite(advantages).all():
        raise ValueError("advantages must be finite: check the rewards they were made from")
    weights = (advantages / temperature).exp()
    if not torch.isfinite(weights).all():
        raise ValueError(f"exp(A/T) overflows at A = {advantages.max():g}, T = {temperature}: raise the temperature")
    return weights


def adaptive_temperature(advantages, lengths, *, low=0.8, high=100.0):
    """The temperature at which RED-Weight stops rewarding length: Σ_i A_i·exp(A_i/T)·L_i = 0 (arXiv 2606.20002).

    advantages, lengths: (K,), ONE group; lengths counts the tokens of each response. Where Σ A_i·L_i < 0, the
    long responses are the bad ones and token-level losses push down more than they lift; the returned T restores the
    balance. Bisection, at most 20 steps, until the bracket [low, high] is narrower than 0.05; its upper end is returned.
    A root below low gives low and one above high gives high (**our reading**). Without such an imbalance: None, which
    means do not weight. ValueError: shapes differ, K < 2, a number not finite, a length below 0, not 0 < low < high.
    """
    if advantages.dim() != 1 or advantages.shape != lengths.shape or len(advantages) < 2:
        raise ValueError("advantages and lengths must be one group of K ≥ 2 responses, both (K,), "
                         f"not {tuple(advantages.shape)} and {tuple(lengths.shape)}; loop over the groups")
    if not 0 < low < high < math.inf:
        raise ValueError(f"the bracket must satisfy 0 < low < high, not low = {low}, high = {high}")
    advantages, lengths = (tensor.detach().to("cpu", torch.float64) for tensor in (advantages, lengths))
    if not (torch.isfinite(advantages).all() and torch.isfinite(lengths).all() and (lengths >= 0).all()):
        raise ValueError("advantages and lengths must be finite, and lengths must be ≥ 0")
    pull = advantages * lengths
    if pull.sum() >= -1e-6 * pull.abs().sum():  # the rounding of a float32 mean is no imbalance
        return None

    def still_negative(temperature):  # falls with T; dividing by the largest weight keeps the sign and the range
        return (pull * ((advantages - advantages.max()) / temperature).exp()).sum() < 0

    if still_negative(low):
        return float(low)
    for _ in range(20):
        if high - low < 0.05:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if still_negative(middle) else (middle, high)
    return float(high)
