"""Lesson 04: regularise the update. Clipping and additive penalties are two ways to stay near the sampler."""

import math

import torch

# %% The losses


def clip_mask(ratio, advantages, *, clip, eps_low=0.2, eps_high=0.2, outer_low=0.6, outer_high=2.0):
    """M of the family: True where a token takes part in the update, False where it has moved too far (paper, REC).

    ratio       ρ = π_θ/π_old, any shape: one per token, or one per response.
    advantages  A, the same number of dimensions (or none at all); a size of 1 broadcasts, as in (B, 1) for (B, T).
    clip        "none"      keeps everything
                "one_side"  stops a token that already went far where its advantage pushes it: ρ > 1+ε_high with A > 0,
                            ρ < 1−ε_low with A < 0 (exactly where PPO's min(ρA, clip(ρ)A) is flat)
                "two_side"  stops every token outside [1−ε_low, 1+ε_high], whichever way it is pushed
                "ring"      two_side, but a token far out on the side it is pushed back from returns: ρ ≤ 1−outer_low
                            with A > 0, ρ ≥ 1+outer_high with A < 0
    All bounds are inclusive. A = 0 is never clipped, and NaN is never clipped: it stays in the loss, where it shows.
    Returns bool, the broadcast shape. ValueError: unknown clip, negative bound, ring not outside the inner bounds, or
    numbers of dimensions that differ.
    """
    if clip not in ("none", "one_side", "two_side", "ring"):
        raise ValueError(f"clip must be none, one_side, two_side or ring, not {clip!r}")
    if not (eps_low >= 0 and eps_high >= 0):
        raise ValueError(f"eps_low and eps_high must be ≥ 0, got {eps_low} and {eps_high}; 0.2 and 0.2 are usual")
    if clip == "ring" and not (outer_low > eps_low and outer_high > eps_high):
        raise ValueError("the ring must lie outside the inner bounds: need outer_low > eps_low and outer_high > "
                         f"eps_high, got {outer_low}, {eps_low} and {outer_high}, {eps_high}")
    if advantages.dim() not in (0, ratio.dim()):
        # (B,) against (B, T) would line up with the tokens, silently when B = T.
        raise ValueError("advantages need as many dimensions as ratio: pass advantages.unsqueeze(-1) for one per "
                         f"response; got {tuple(advantages.shape)} for ratio {tuple(ratio.shape)}")
    above, below = ratio > 1 + eps_high, ratio < 1 - eps_low
    raised, lowered = advantages > 0, advantages < 0  # whether the update makes the token likelier
    if clip == "none":
        clipped = torch.zeros_like(above & raised)
    elif clip == "one_side":
        clipped = (raised & above) | (lowered & below)
    elif clip == "two_side":
        clipped = (raised | lowered) & (above | below)
    else:
        clipped = raised & (above | (below & (ratio > 1 - outer_low)))
        clipped = clipped | (lowered & (below | (above & (ratio < 1 + outer_high))))
    return ~clipped


def clean_tokens(logprobs, old_logprobs, advantages, mask):
    """Check what the losses below take, and put 0 on padding BEFORE any arithmetic: NaN · 0 is NaN, in gradients too.

    logprobs, old_logprobs, mask (..., T); advantages (..., T), or (...) for one per response. mask: bool, or 0 and 1.
    Half-precision inputs come back in float32, where exp(20) is finite. Returns the four, all (..., T), mask as bool.
    """
    if not logprobs.shape == old_logprobs.shape == mask.shape:
        raise ValueError("logprobs, old_logprobs and mask need one shape (B, T), got "
                         f"{tuple(logprobs.shape)}, {tuple(old_logprobs.shape)} and {tuple(mask.shape)}")
    if advantages.shape not in (logprobs.shape, logprobs.shape[:-1], (*logprobs.shape[:-1], 1)):
        raise ValueError("advantages must be (B,), one per response, or (B, T), one per token; "
                         f"got {tuple(advantages.shape)} for logprobs {tuple(logprobs.shape)}")
    if mask.dtype != torch.bool:
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("mask must hold 0 and 1 only; was another tensor passed in its place?")
        mask = mask.bool()
    if advantages.dim() < logprobs.dim():
        advantages = advantages.unsqueeze(-1)
    if logprobs.dtype in (torch.float16, torch.bfloat16):
        logprobs = logprobs.float()
    old_logprobs, advantages = old_logprobs.detach().to(logprobs.dtype), advantages.detach().to(logprobs.dtype)
    return *(torch.where(mask, tensor, 0.0) for tensor in (logprobs, old_logprobs, advantages)), mask


def rec_loss(logprobs, old_logprobs, advantages, mask, *, clip, importance_sampling, eps_low=0.2, eps_high=0.2,
             outer_low=0.6, outer_high=2.0):
    """REINFORCE with clipping: L = −(1/N) Σ A·W·M·log π_θ over the N response tokens (paper, REC).

    logprobs      (B, T)  log π_θ of each token, with gradient
    old_logprobs  (B, T)  log π_old of the same tokens, from the sampler, at sampling time
    advantages    (B,) or (B, T);  mask (B, T): True, or 1, on response tokens
    M is clip_mask(ρ, A) and W is ρ (importance_sampling=True) or 1, with ρ = π_θ/π_old DETACHED: the gradient of ρ
    itself would count the same token twice. |log ρ| is capped at 20, so that ρ is finite; NaN stays NaN.
    clip="one_side" with importance_sampling is GRPO without its standard deviation and KL. Returns a scalar; 0, with
    zero gradients, when mask is empty. ValueError: as clean_tokens and clip_mask.
    """
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    ratio = (logprobs - old_logprobs).detach().clamp(-20, 20).exp()
    keep = clip_mask(ratio, advantages, clip=clip, eps_low=eps_low, eps_high=eps_high,
                     outer_low=outer_low, outer_high=outer_high)
    weight = ratio if importance_sampling else torch.where(ratio.isnan(), ratio, 1.0)
    per_token = torch.where(keep, weight * advantages, 0.0) * logprobs
    return -per_token.sum() / mask.sum().clamp(min=1)


def opmd_loss(logprobs, old_logprobs, advantages, mask, *, tau):
    """Kimi's OPMD read as regularised REINFORCE: −(1/N) Σ A·log π_θ + (τ/2)·(1/N) Σ d², d = log π_θ − log π_old (REP).

    Per token: Σ_t d_t², which is not (Σ_t d_t)². For responses of one token this is (1/K) Σ (A − τd)²/(2τ) up to a
    constant. Tensors as in rec_loss; tau > 0. d is not capped: no exp acts on it, and a cap would end the pull where
    it is needed most. Returns a scalar.
    """
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a positive number, got {tau}")
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    log_ratio = logprobs - old_logprobs
    per_token = -advantages * logprobs + tau / 2 * log_ratio.square()
    return per_token.sum() / mask.sum().clamp(min=1)


def asymre_loss(logprobs, old_logprobs, advantages, mask, *, beta):
    """Meta's AsymRE read as regularised REINFORCE: −(1/N) Σ A·log π_θ + β·(1/N) Σ (log π_old − log π_θ)  (REP).

    The second sum estimates KL(π_old ‖ π_θ) per token. Its gradient is that of the baseline r̄ − β in place of r̄, but
    written outside the advantage, so that a group whose rewards are all equal still pulls. Tensors as in rec_loss;
    beta ≥ 0, where 0 is REINFORCE. Returns a scalar.
    """
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta must be a number ≥ 0, got {beta}")
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    per_token = -advantages * logprobs + beta * (old_logprobs - logprobs)
    return per_token.sum() / mask.sum().clamp(min=1)


# %% Staleness


def rollout_version(step, *, sync_interval, sync_offset):
    """v(n) = I·max(0, ⌊(n−m−1)/I⌋): after how many updates the policy was copied that sampled the batch of step n.

    step            n, 1-based, an int
    sync_interval   I ≥ 1: the sampler's weights are refreshed after every I training steps; None: never (offline)
    sync_offset     m ≥ 0: the sampler works m batches ahead
    """
    for name, value, least in (("step", step, 1), ("sync_interval", 1 if sync_interval is None else sync_interval, 1),
                               ("sync_offset", sync_offset, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number ≥ {least}, got {value!r}")
    if sync_interval is None:
        return 0
    return sync_interval * max(0, (step - sync_offset - 1) // sync_interval)


def staleness(step, *, sync_interval, sync_offset):
    """s(n) = (n−1) − v(n): how many updates the policy of training step n (1-based) is ahead of its data's sampler."""
    return step - 1 - rollout_version(step, sync_interval=sync_interval, sync_offset=sync_offset)
