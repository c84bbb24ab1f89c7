"""Lesson 02: the group mean as a baseline (in progress: the two functions that later lessons copy stand here first)."""

import torch


def group_advantages(rewards, *, leave_one_out=False, std_normalize=False, eps=1e-6):
    """Advantage of each response against its own group: A_i = r_i − r̄, r̄ = (1/K) Σ_i r_i (paper section 2).

    rewards: (..., K), where the last dimension holds the K responses to ONE prompt. Returns the same shape.
    leave_one_out: subtract the mean of the other K−1 rewards instead (RLOO), which equals K/(K−1)·(r_i − r̄).
    std_normalize: divide by the group's population standard deviation (ddof 0) + eps, as GRPO does.
    A group whose rewards are all equal gives exactly 0, in float32 too. ValueError: K < 2, or a reward that is not finite.
    """
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError(f"a group needs at least 2 responses to the same prompt: sample K ≥ 2, not {tuple(rewards.shape)}")
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite: replace NaN and infinity (by 0, say) before grouping")
    group_size = rewards.shape[-1]
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if std_normalize:
        advantages = advantages / (rewards.std(-1, correction=0, keepdim=True) + eps)
    if leave_one_out:
        advantages = advantages * (group_size / (group_size - 1))
    # In float32 the mean of seven times 0.1 is not 0.1, and a tiny std blows that error up. So ask the rewards themselves.
    flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(flat, torch.zeros_like(advantages), advantages)


def aggregate(per_token, mask, *, mode, constant=None):
    """Reduce per-token losses to one number, with the denominator named.

    per_token: (..., B, T) float; mask: the same shape, True (or 1) on response tokens. Returns (...).
    mode:  "token-mean"           sum over all tokens / number of tokens              (DAPO; the paper's code)
           "seq-mean-token-mean"  mean over responses of the mean over their tokens   (GRPO as published)
           "seq-mean-token-sum"   mean over responses of the sum over their tokens    (the policy gradient itself)
           "constant"             seq-mean-token-sum / constant, a fixed token budget (Dr. GRPO)
    Masked tokens are left out before any arithmetic, so NaN or infinity there is harmless. A response without any token
    counts in no denominator, and no token at all gives 0. ValueError: unequal shapes, a mask that is not 0/1, an unknown
    mode, a constant that is missing, not positive or not wanted.
    """
    if mode not in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"):
        raise ValueError(f"mode must be token-mean, seq-mean-token-mean, seq-mean-token-sum or constant, not {mode!r}")
    if (mode == "constant") != (constant is not None) or (constant is not None and not constant > 0):
        raise ValueError(f"mode 'constant' needs a constant > 0 and the other modes take none; got {mode!r}, {constant!r}")
    if per_token.shape != mask.shape or per_token.dim() < 2:
        raise ValueError("per_token and mask must have one shape (..., B, T), "
                         f"not {tuple(per_token.shape)} and {tuple(mask.shape)}")
    if mask.dtype != torch.bool:
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("mask must hold 0 and 1 only; was another tensor passed in its place?")
        mask = mask.bool()
    kept = torch.where(mask, per_token, torch.zeros_like(per_token))  # where, not times: NaN · 0 is NaN
    lengths = mask.sum(-1)
    if mode == "token-mean":
        return kept.sum((-2, -1)) / lengths.sum(-1).clamp(min=1)
    per_response = kept.sum(-1)
    if mode == "seq-mean-token-mean":
        per_response = per_response / lengths.clamp(min=1)
    elif mode == "constant":
        per_response = per_response / constant
    return per_response.sum(-1) / (lengths > 0).sum(-1).clamp(min=1)
