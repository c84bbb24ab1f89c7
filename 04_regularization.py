"""Lesson 04: regularise the update. Clipping and additive penalties are two ways to stay near the sampler."""

import math
from collections import deque

import torch

# %% The losses


def group_advantages(rewards, *, leave_one_out=False, std_normalize=False, eps=1e-6):
    """Advantage of each response against its own group: A_i = r_i − r̄, r̄ = (1/K) Σ_i r_i (paper section 2).

    rewards: (..., K), where the last dimension holds the K responses to ONE prompt. Returns the same shape.
    leave_one_out: subtract the mean of the other K−1 rewards instead (RLOO), which equals K/(K−1)·(r_i − r̄).
    std_normalize: divide by the group's population standard deviation (ddof 0) + eps, as GRPO does.
    A group whose rewards are all equal gives exactly 0, in float32 too. ValueError: K < 2, or a reward is not finite.
    """
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError("a group needs at least 2 responses to the same prompt: sample K ≥ 2, "
                         f"not {tuple(rewards.shape)}")
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
    # In float32 the mean of seven times 0.1 is not 0.1, and a tiny std blows that error up: so ask the rewards.
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
    counts in no denominator, and no token at all gives 0. ValueError: unequal shapes, a mask that is not 0/1, an
    unknown mode, a constant that is missing, not positive or not wanted.
    """
    if mode not in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"):
        raise ValueError(f"mode must be token-mean, seq-mean-token-mean, seq-mean-token-sum or constant, not {mode!r}")
    if (mode == "constant") != (constant is not None) or (constant is not None and not constant > 0):
        raise ValueError("mode 'constant' needs a constant > 0 and the other modes take none; "
                         f"got {mode!r}, {constant!r}")
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


# %% Which responses form a group, and the estimator averaged over every group


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


# %% A stale world small enough to be exact

PROMPTS, VOCABULARY, LENGTH, GROUP_SIZE = 4, 4, 3, 8  # 4³ = 64 responses to each prompt, all of them enumerated


def response_cells():
    """Where the tokens of every response stand in a flat table of (prefix, next token): (64, 3) integers.

    A table has one row of VOCABULARY entries per prefix, 1 + 4 + 16 = 21: the empty one, then by length, in
    lexicographic order within a length. Responses are in lexicographic order too.
    """
    responses = torch.arange(VOCABULARY**LENGTH)
    cells, row = [], 0
    for position in range(LENGTH):
        prefix_and_token = responses // VOCABULARY ** (LENGTH - 1 - position)  # the first position + 1 tokens, base 4
        cells.append(row * VOCABULARY + prefix_and_token)
        row += VOCABULARY**position
    return torch.stack(cells, -1)


def response_logprobs(token_logprobs):
    """log π(y) of every response: (..., 21, 4) log-probabilities of the next token → (..., 64)."""
    total, row = token_logprobs.new_zeros(*token_logprobs.shape[:-2], 1), 0
    for position in range(LENGTH):
        prefixes = VOCABULARY**position
        total = (total.unsqueeze(-1) + token_logprobs[..., row : row + prefixes, :]).flatten(-2)
        row += prefixes
    return total


def random_worlds(seeds, *, generator):
    """One task and one initial policy per seed: logits (seeds, PROMPTS, 21, 4) ~ N(0, 1), rewards (seeds, PROMPTS, 64).

    A quarter of the responses to each prompt is right (reward 1), chosen at random, so what is right for one prompt is
    as a rule wrong for another.
    """
    rows = (VOCABULARY**LENGTH - 1) // (VOCABULARY - 1)
    logits = torch.randn(seeds, PROMPTS, rows, VOCABULARY, dtype=torch.float64, generator=generator)
    order = torch.rand(seeds, PROMPTS, VOCABULARY**LENGTH, dtype=torch.float64, generator=generator).argsort(-1)
    return logits, (order < VOCABULARY**LENGTH // 4).double()


def update_weights(loss, logprobs, old_logprobs, advantages):
    """The weight that a loss puts on ∇log π_θ of each token: −N·∂L/∂log π_θ, (..., K, T), N the number of tokens.

    logprobs, old_logprobs (..., K, T); advantages (..., K). Taken from the loss itself by autograd, so that what is
    trained on, plotted and counted cannot differ.
    """
    logprobs = logprobs.detach().requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    (gradient,) = torch.autograd.grad(loss(logprobs, old_logprobs, advantages, mask), logprobs)
    return -gradient * logprobs.numel()


def sample_responses(logprobs, *, generator):
    """K responses for each prompt: (methods, seeds, prompts, 64) → numbers (methods, seeds, prompts, K).

    By inverting the cumulative distribution. All methods get the same uniform numbers, so that they see the same
    responses for as long as their samplers agree, and differences between methods are paired.
    """
    methods, seeds, prompts, _ = logprobs.shape
    cumulative = logprobs.exp().cumsum(-1)
    cumulative[..., -1] = 1.0  # against rounding
    uniform = torch.rand(seeds, prompts, GROUP_SIZE, dtype=torch.float64, generator=generator)
    return torch.searchsorted(cumulative, uniform.expand(methods, -1, -1, -1).contiguous(), right=True)


def logit_gradient(weights, cells, token_logprobs):
    """(1/K) Σ_i Σ_t w_it·∇log π_θ(y_i^t | prefix) with respect to the logits, as one closed form.

    The score of a token is (one-hot − π) on the row of its prefix, so each row gets the weights on its tokens minus
    π times their sum. weights, cells (..., K, T); token_logprobs (..., 21, 4). Returns (..., 21, 4).
    """
    group_size = weights.shape[-2]
    pushes = torch.zeros_like(token_logprobs.flatten(-2)).scatter_add_(-1, cells.flatten(-2), weights.flatten(-2))
    pushes = pushes.view_as(token_logprobs) / group_size
    return pushes - pushes.sum(-1, keepdim=True) * token_logprobs.exp()


def train_stale(methods, logits, rewards, *, sync_interval, sync_offset, steps, step_size, sharing, generator):
    """Train every method on data of the staleness that (sync_interval, sync_offset) prescribes; see rollout_version.

    methods   name → (advantages, loss): rewards (..., K) → (..., K), and a loss with the signature of rec_loss
    logits    (seeds, prompts, 21, 4) and rewards (seeds, prompts, 64), from random_worlds
    sharing   s in [0, 1]. A gradient g for one prompt moves its own logits by step_size·g and those of every other
              prompt by step_size·s·g. That is gradient ascent on logits_x = √(1−s)·own_x + √s·shared: s = 0 is a table
              for each prompt, s = 1 one table for all. A network stands between: its prompts share weights.
    Methods and seeds are dimensions of one tensor.

    Returns curves, each (methods, seeds, steps), exact sums over all responses unless said otherwise:
      value    J = E r of the policy before each step and after the last one, (methods, seeds, steps + 1)
      kl       KL(π_θ ‖ π_b), mean over prompts; π_b sampled this step's batch
      ess      effective sample size as a share: 1 / Σ_y π_θ(y)²/π_b(y), mean over prompts
      clipped  share of the SAMPLED tokens that have an advantage but no weight
    """
    cells = response_cells()
    logits = logits.expand(len(methods), *logits.shape)
    all_rewards = rewards.expand(len(methods), *rewards.shape)
    buffer, next_batch = deque(), 1
    curves = {key: [] for key in ("value", "kl", "ess", "clipped")}
    for step in range(1, steps + 2):
        token_logprobs = torch.log_softmax(logits, -1)
        logprobs = response_logprobs(token_logprobs)
        curves["value"].append((logprobs.exp() * rewards).sum(-1).mean(-1))
        if step > steps:
            return {key: torch.stack(curve, -1) for key, curve in curves.items()}

        # Into the buffer, first in, first out, goes every batch that this version of the policy is to sample.
        while next_batch <= steps and step - 1 == rollout_version(
                next_batch, sync_interval=sync_interval, sync_offset=sync_offset):
            buffer.append((sample_responses(logprobs, generator=generator), token_logprobs, logprobs))
            next_batch += 1
        responses, old_token_logprobs, behaviour_logprobs = buffer.popleft()

        sampled = cells[responses]  # (methods, seeds, prompts, K, T)
        here, old = (table.flatten(-2).gather(-1, sampled.flatten(-2)).view(sampled.shape)
                     for table in (token_logprobs, old_token_logprobs))
        sampled_rewards = all_rewards.gather(-1, responses)
        advantages = torch.stack([shape(r) for (shape, _), r in zip(methods.values(), sampled_rewards)])
        weights = torch.stack([update_weights(loss, *tensors) for (_, loss), *tensors
                               in zip(methods.values(), here, old, advantages)])
        curves["kl"].append((logprobs.exp() * (logprobs - behaviour_logprobs)).sum(-1).mean(-1))
        curves["ess"].append((-(2 * logprobs - behaviour_logprobs).logsumexp(-1)).exp().mean(-1))
        curves["clipped"].append(((weights == 0) & (advantages != 0).unsqueeze(-1)).double().mean((-1, -2, -3)))

        gradient = logit_gradient(weights, sampled, token_logprobs)
        logits = logits + step_size * ((1 - sharing) * gradient + sharing * gradient.sum(2, keepdim=True))
