"""Lesson 04: regularise the update. A clip and an additive penalty are two leashes to the sampler of the data.

Claim. GRPO's clip works as a leash, not as a correction of importance sampling: under the clip the importance weight
may go and little changes, while without any leash REINFORCE on stale data falls back from what it had reached. OPMD
and AsymRE, derived elsewhere and in other ways, are REINFORCE plus a penalty on the distance from the sampler: the
same leash, written as a sum.

EQUATIONS CHECKED (arXiv 2509.24203; ρ = π_θ/π_old per token and detached, d = log ρ, A the group advantage r − r̄)

(1) REC, clipping. M is 0 or 1 and W is ρ (IS) or 1 (NoIS); the sum runs over the N response tokens:

        L = −(1/N) Σ A·W·M·log π_θ                                                       → clip_mask, rec_loss

    One-sided with W = ρ, its gradient is that of PPO's min(ρA, clip(ρ)A). Where ρ = 1 every M and W is 1, so that on
    fresh data, one step per batch, every row of the family is REINFORCE to the last bit: a run that collapses
    there cannot have collapsed for want of a clip.

(2) REP, an additive penalty. Expand the square of OPMD (Kimi), with one log-probability ℓ_i per response:

        (1/K) Σ (A_i − τd_i)²/(2τ) = (1/K) Σ [A_i²/(2τ) − A_i·d_i + (τ/2)·d_i²]
                                   = −(1/K) Σ A_i·ℓ_i + (τ/2)·(1/K) Σ d_i² + constant          → opmd_loss

    for all θ, not only near π_old. AsymRE (Meta) lowers the baseline to r̄ − β:

        −(1/K) Σ (A_i + β)·ℓ_i = −(1/K) Σ A_i·ℓ_i + β·(1/K) Σ (log π_old − ℓ_i) + constant,    → asymre_loss

    whose last sum estimates KL(π_old ‖ π_θ). Token-level code penalises every token: Σ_t d_t², not (Σ_t d_t)².

(3) Where they end on fixed data, a softmax bandit and infinitely many samples from π_b (μ = E_b r). REINFORCE gives
    the wrong arm (lesson 03). AsymRE's update of the logits is w − β·π_θ with w = π_b·(r − μ + β), which rests only at

        π_i = max(w_i − c, 0)/β,  c such that Σ π_i = 1,                                       → asymre_limit

    so that arms are cut off one by one as β falls: no softmax tilt, and β is no τ. OPMD with the baseline τ·log Z in
    place of μ rests where A = τd, which is π_b·exp(r/τ)/Z, the optimum of lesson 03.

(4) Staleness. The batch of step n comes from the policy after v(n) = I·max(0, ⌊(n−m−1)/I⌋) updates, so the learner is
    s(n) = n − 1 − v(n) updates ahead of its data.                                             → rollout_version

THE STALE WORLD. Autoregressive policies over 4 prompts, 4 tokens and 3 positions, where J, KL(π_θ ‖ π_b) and the
effective sample size are sums over all 64 responses, trained from samples. One knob matters as much as the
staleness: how much the prompts share (`sharing`). Give each prompt a table of its own and stale, unclipped REINFORCE
does well; let updates spill over to other prompts, as in any network, and it falls back. The run prints which of the
paper's claims show here and which do not, with intervals. Against the grain: the importance weight alone, without a
clip, prevents the fall too, and data that are never refreshed punish a tight clip more than none.

    symbol     in the code              shape            meaning
    log π_θ    logprobs                 (B, T)           of each token of B responses, with gradient
    log π_old  old_logprobs             (B, T)           the sampler's, at sampling time
    A          advantages               (B,) or (B, T)   from the group
               mask                     (B, T)           True on response tokens
    ρ          ratio                    (B, T)           exp(logprobs − old_logprobs), detached
    ε          eps_low, eps_high        numbers ≥ 0      inner bounds 1 − ε_low, 1 + ε_high; .2, .2 or, enlarged, .6, 2
    ε'         outer_low, outer_high    numbers > ε      outer bounds of the ring
    τ, β       tau, beta                numbers          strength of the additive penalty

Run       python 04_regularization.py [--quick] [--seed N] [--out DIR] [--json PATH]
          python 04_regularization.py --exercise 1        (or 2, 3: each checks a function that you write)
You see   where the methods end on fixed data and at four kinds of staleness, the verdicts, a table of claims and three
          figures; about 12 seconds on a laptop.
Before    Lesson 03 showed that REINFORCE accepts any data, and two ways in which that goes wrong. Here is the first
          repair: stay near the sampler.
"""

import math
from collections import deque
from functools import partial

import torch
from PIL import Image

from utils import STYLES, check, figure, finish, lesson_arguments, run_exercise, save_figure, seed_everything

# The 3-arm bandit of lesson 03: the data prefers arm 2, the rewards prefer arm 3.
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)
TAU, BETA = 0.2, 0.1  # OPMD's and AsymRE's strengths in the paper's runs
ENLARGED = {"eps_low": 0.6, "eps_high": 2.0}


# %% 1. The losses


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


# %% 2. Staleness


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


# %% 3. A stale world small enough to be exact

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


# %% 4. Friends: neighbours that differ from REC in M or W alone


def ppo_loss(logprobs, old_logprobs, advantages, mask, *, eps=0.2, dual_clip=None):
    """PPO's −min(ρA, clip(ρ, 1−ε, 1+ε)A), token mean, here with the gradient THROUGH ρ; to compare with.

    Tensors as in rec_loss. dual_clip: c > 1 bounds the loss by −cA where A < 0.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be > 1, got {dual_clip}; None means no dual clip")
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    ratio = (logprobs - old_logprobs).exp()
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    if dual_clip is not None:
        per_token = torch.where(advantages < 0, torch.minimum(per_token, -dual_clip * advantages), per_token)
    return per_token.sum() / mask.sum().clamp(min=1)


def sequence_ratio(log_ratio, mask):
    """GSPO's s = exp(mean over response tokens of log ρ_t): (..., T) → (...). The geometric mean of the ratios."""
    mean = torch.where(mask, log_ratio, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    return mean.clamp(-20, 20).exp()


def gspo_loss(logprobs, old_logprobs, advantages, mask, *, importance_sampling, eps_low=3e-4, eps_high=4e-4):
    """GSPO (arXiv 2507.18071) in REC's form: one ratio s = exp(mean_t log ρ_t) for all tokens of a response, clipped
    one-sidedly; mean over tokens, then over responses that have any. importance_sampling=False drops W = s.

    The tiny range is made for responses of hundreds of tokens, whose mean log-ratio hardly moves.
    """
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    lengths = mask.sum(-1, keepdim=True)
    ratio = sequence_ratio(logprobs - old_logprobs, mask).detach().unsqueeze(-1)
    keep = clip_mask(ratio, advantages, clip="one_side", eps_low=eps_low, eps_high=eps_high)
    weight = ratio if importance_sampling else torch.where(ratio.isnan(), ratio, 1.0)
    per_token = torch.where(keep, weight * advantages, 0.0) * logprobs / lengths.clamp(min=1)
    return -per_token.sum() / (lengths > 0).sum().clamp(min=1)


def gmpo_ratio(log_ratio, advantages, mask, *, log_range=0.4):
    """GMPO (arXiv 2507.20673): geometric mean of token ratios, each capped in log space on the side it is pushed to.

    log_ratio, mask (..., T), advantages (...): A > 0 caps log ρ_t at log_range, A < 0 lifts it to −log_range. → (...).
    """
    if advantages.shape != log_ratio.shape[:-1]:
        raise ValueError("advantages must be (...), one per response, for log_ratio (..., T); "
                         f"got {tuple(advantages.shape)} for {tuple(log_ratio.shape)}")
    if not log_range >= 0:
        raise ValueError(f"log_range must be ≥ 0, got {log_range}")
    capped = torch.where(advantages.unsqueeze(-1) > 0, log_ratio.clamp(max=log_range), log_ratio.clamp(min=-log_range))
    return sequence_ratio(capped, mask)


def capped_ratio_weight(ratio, *, cap):
    """W = min(ρ, cap), detached, with M = 1: CISPO (arXiv 2506.13585) with cap 1 + ε, truncated IS with cap C = 2."""
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    return ratio.detach().clamp(max=cap)


def topr_weight(ratio, rewards):
    """TOPR (arXiv 2503.14286): W = 1 for right responses (r > 0), min(ρ, 1) for wrong ones. M = 1.

    rewards: as many dimensions as ratio, such as (B, 1) for (B, T).
    """
    if rewards.dim() != ratio.dim():
        raise ValueError("rewards need as many dimensions as ratio: pass rewards.unsqueeze(-1) for one per response; "
                         f"got {tuple(rewards.shape)} for ratio {tuple(ratio.shape)}")
    return torch.where(rewards > 0, torch.ones_like(ratio), capped_ratio_weight(ratio, cap=1.0))


def overlong_penalty(length, *, max_length, cache):
    """DAPO's soft length penalty (arXiv 2503.14476): 0 up to max_length − cache, then linear to −1 at max_length."""
    return (-(length - (max_length - cache)) / cache).clamp(max=0)


def two_token_gradients():
    """TIC-GRPO's point (arXiv 2508.02833): what each kind of importance sampling estimates, by enumeration.

    Two binary tokens with one logit each for t1, t2 | t1=0 and t2 | t1=1, at [.5, −.3, .8]. The data come from the
    policy with logits 0; only (1, 1) has reward 1; A = r − ¼, and ¼ is the data's mean reward. Returns name → (3,).
    """
    theta = torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    logits = torch.stack([theta[0].expand(4), theta[1 + tokens[:, 0]]], -1)
    logprobs = torch.nn.functional.logsigmoid((2 * tokens - 1) * logits)  # (4 responses, 2 tokens)
    rewards = tokens.prod(-1).double()
    ratio = (logprobs.detach() - math.log(0.5)).exp()
    weights = {"trajectory IS": ratio.prod(-1, keepdim=True), "token-level IS": ratio, "no IS": torch.ones_like(ratio)}
    objectives = {"exact ∇J": (logprobs.sum(-1).exp() * rewards).sum()}
    for name, weight in weights.items():
        objectives[name] = 0.25 * (weight * (rewards - 0.25).unsqueeze(-1) * logprobs).sum()
    return {name: torch.autograd.grad(value, theta, retain_graph=True)[0] for name, value in objectives.items()}


# %% 5. The methods: an advantage and a loss each


def five_times(loss):
    """The same loss with five times the learning rate."""
    return lambda *tensors: 5 * loss(*tensors)


ONE_SIDE, ONE_SIDE_IS = (partial(rec_loss, clip="one_side", importance_sampling=weighted) for weighted in (False, True))
METHODS = {
    "reinforce": (group_advantages, partial(rec_loss, clip="none", importance_sampling=False)),
    "reinforce-is": (group_advantages, partial(rec_loss, clip="none", importance_sampling=True)),
    "grpo": (partial(group_advantages, std_normalize=True), ONE_SIDE_IS),
    "rec-oneside-is": (group_advantages, ONE_SIDE_IS),
    "rec-oneside-nois": (group_advantages, ONE_SIDE),
    "rec-oneside-is (.6, 2)": (group_advantages, partial(ONE_SIDE_IS, **ENLARGED)),
    "rec-oneside-nois (.6, 2)": (group_advantages, partial(ONE_SIDE, **ENLARGED)),
    "rec-oneside-nois, 5× step": (group_advantages, five_times(ONE_SIDE)),
    "rec-twoside-is": (group_advantages, partial(rec_loss, clip="two_side", importance_sampling=True)),
    "rec-twoside-nois": (group_advantages, partial(rec_loss, clip="two_side", importance_sampling=False)),
    "rec-ring-is": (group_advantages, partial(rec_loss, clip="ring", importance_sampling=True)),
    "rec-ring-nois": (group_advantages, partial(rec_loss, clip="ring", importance_sampling=False)),
    "rec-gspo-is": (group_advantages, partial(gspo_loss, importance_sampling=True)),
    "rec-gspo-nois": (group_advantages, partial(gspo_loss, importance_sampling=False)),
    "rep-opmd": (group_advantages, partial(opmd_loss, tau=TAU)),
    "rep-asymre": (group_advantages, partial(asymre_loss, beta=BETA)),
}


# %% 6. Fixed data: where each method ends on the bandit


def require_distribution(probs):
    """Raise ValueError unless the last dimension of `probs` is a probability distribution."""
    if (probs < 0).any() or not torch.allclose(probs.sum(-1), torch.ones_like(probs.sum(-1)), atol=1e-6):
        raise ValueError("probabilities must be ≥ 0 and sum to 1 over all responses; normalise them first")


def asymre_limit(behaviour_probs, rewards, *, beta):
    """Where AsymRE rests on fixed data: π_i = max(w_i − c, 0)/β with w = π_b·(r − μ + β) and Σ π_i = 1. (A,) → (A,).

    Water-filling: the level c rises until what stands out has the volume β. Σ w_i = β, so that c = 0 when all w_i ≥ 0.
    ValueError: behaviour_probs is no distribution, a reward is not finite, or beta is not a positive number.
    """
    require_distribution(behaviour_probs)
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be a positive number, got {beta}: without the penalty only the winner is left")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    weights = behaviour_probs * (rewards - behaviour_probs @ rewards + beta)
    weights = weights - weights.max()  # a shift moves c alone, and a tiny beta is not rounded away beside a weight of 0
    ordered = weights.sort(descending=True).values
    levels = (ordered.cumsum(-1) - beta) / torch.arange(1, len(ordered) + 1)  # the level if the n best arms stand out
    level = levels[(ordered > levels).nonzero().max()]
    return (weights - level).clamp(min=0) / beta


def fixed_data_end(loss, advantages, *, steps, step_size):
    """π_θ (A,) after training softmax logits on infinitely many samples from BEHAVIOUR, starting there.

    One token per response, so a row of the batch is an arm; its weight is multiplied by how often π_b draws it.
    """
    theta = BEHAVIOUR.log()
    for _ in range(steps):
        logprobs = torch.log_softmax(theta, -1)
        weights = update_weights(loss, logprobs.unsqueeze(-1), BEHAVIOUR.log().unsqueeze(-1), advantages)[:, 0]
        weights = BEHAVIOUR * weights
        theta = theta + step_size * (weights - weights.sum() * logprobs.exp())
    return torch.softmax(theta, -1)


def bandit_ends(*, steps):
    """name → π_θ (3,) at the end, for every method whose path differs (a step size or a std only changes the pace)."""
    mean = BEHAVIOUR @ REWARDS
    log_partition = TAU * (BEHAVIOUR * (REWARDS / TAU).exp()).sum().log()
    cases = {name: (loss, mean) for name, (_, loss) in METHODS.items() if name != "grpo" and "step" not in name}
    cases["rep-opmd, baseline τ·log Z"] = METHODS["rep-opmd"][1], log_partition
    cases["rep-asymre, β = .5"] = partial(asymre_loss, beta=0.5), mean
    ends = {}
    for name, (loss, baseline) in cases.items():
        # A clip stops but does not pull back: large steps would jump over a near bound and stay there.
        near = name.startswith("rec-") and not name.endswith("(.6, 2)")
        step_size = 0.002 if "gspo" in name else 0.1 if near else 2.0  # GSPO's bound is a thousandth of the others
        ends[name] = fixed_data_end(loss, REWARDS - baseline, steps=steps, step_size=step_size)
    return ends


# %% 7. Stale data: the experiments


SETTINGS = {"fresh (1, 0)": (1, 0), "(20, 0)": (20, 0), "(1, 10)": (1, 10), "offline": (None, 0)}
# Chosen so that fresh data nearly solve the task in 100 steps and staleness hurts. The sweep over SHARES shows how much
# hangs on this choice: with a table for each prompt, unclipped REINFORCE needs no leash at all.
STEP_SIZE, SHARING = 3.0, 0.85
INTERVALS, SHARES = (1, 2, 5, 10, 20, 50, 100), (0.0, 0.25, 0.5, 0.75, 1.0)
SHOWN = ("reinforce", "reinforce-is", "rec-oneside-nois", "rec-oneside-nois (.6, 2)", "rep-opmd", "rep-asymre")


def run_stale(names, *, seeds, seed, setting=(20, 0), steps, sharing=SHARING):
    """train_stale for the named methods; the same worlds and random numbers for every setting and sharing."""
    generator = torch.Generator().manual_seed(seed)
    logits, rewards = random_worlds(seeds, generator=generator)
    return train_stale({name: METHODS[name] for name in names}, logits, rewards, sync_interval=setting[0],
                       sync_offset=setting[1], steps=steps, step_size=STEP_SIZE, sharing=sharing, generator=generator)


def interval(values, *, resamples=1000):
    """Mean over the last dimension (seeds) and its bootstrap 95 % interval: (..., seeds) → three tensors (...)."""
    generator = torch.Generator().manual_seed(0)
    seeds = values.shape[-1]
    drawn = torch.randint(seeds, (resamples, seeds), generator=generator)
    shares = torch.nn.functional.one_hot(drawn, seeds).sum(1).to(values.dtype) / seeds
    low, high = torch.quantile(values @ shares.T, torch.tensor([0.025, 0.975], dtype=values.dtype), dim=-1)
    return values.mean(-1), low, high


def verdict(low, high, *, least=0.0, margin=None):
    """What a 95 % interval says about "more than `least`" or, with a margin, about "equal within ± margin"."""
    if margin is None:
        return "holds" if low > least else "does not hold" if high < least else "not resolved"
    if -margin < low and high < margin:
        return "holds"
    return "does not hold" if low > margin or high < -margin else "not resolved"


def paper_verdicts(runs, names):
    """The paper's claims against this world: rows (claim, setting, mean, low, high, verdict), paired over seeds.

    runs: setting → curves of train_stale for `names`. "Equal" means within ± .05 of J, "falls" by more than .05.
    """
    final = {setting: dict(zip(names, curves["value"][..., -1])) for setting, curves in runs.items()}
    fall = {setting: dict(zip(names, curves["value"].amax(-1) - curves["value"][..., -1]))
            for setting, curves in runs.items()}
    clipped = {setting: dict(zip(names, curves["clipped"].mean(-1))) for setting, curves in runs.items()}
    narrow, large = "rec-oneside-nois", "rec-oneside-nois (.6, 2)"
    rows = []

    def add(claim, values, **rule):
        for setting in list(SETTINGS)[1:]:
            mean, low, high = interval(values(setting))
            rows.append((claim, setting, mean, low, high, verdict(low, high, **rule)))

    def compare(claim, first, second, **rule):
        if first in names and second in names:
            add(claim, lambda setting: final[setting][first] - final[setting][second], **rule)

    compare("P1 with a clip, IS is not needed: NoIS = IS", narrow, "rec-oneside-is", margin=0.05)
    compare("P1 … nor GRPO's std, which lengthens its steps: = GRPO", narrow, "grpo", margin=0.05)
    compare("   without a clip it is: REINFORCE with IS > without", "reinforce-is", "reinforce")
    add("P2 unclipped REINFORCE falls from its best J", lambda setting: fall[setting]["reinforce"], least=0.05)
    add("P2 … one-side (.2, .2) does not: .05 − its fall", lambda setting: 0.05 - fall[setting][narrow])
    compare("P2 … and ends higher: (.2, .2) > no clip", narrow, "reinforce")
    compare("P2 … and ends higher: (.6, 2) > no clip", large, "reinforce")
    compare("P3 the large range learns more: (.6, 2) > (.2, .2)", large, narrow)
    add("P3 … and pays in stability: it falls from its best J", lambda setting: fall[setting][large], least=0.05)
    compare("P4 … which 5× the step does not do: (.6, 2) > 5×", large, "rec-oneside-nois, 5× step")
    compare("P5 two-side = one-side", "rec-twoside-nois", narrow, margin=0.05)
    compare("P5 ring = one-side", "rec-ring-nois", narrow, margin=0.05)
    compare("P7 OPMD stabilises: > REINFORCE", "rep-opmd", "reinforce")
    compare("P7 AsymRE stabilises: > REINFORCE", "rep-asymre", "reinforce")
    add("P8 (.6, 2) clips few tokens: .1 − clipped share", lambda setting: 0.1 - clipped[setting][large])
    return rows


def print_tables(ends, runs, names, rows, *, seeds, steps):
    """Where the bandit ends, J at the end of every stale run, and the verdicts."""
    print("Fixed data, 3-arm bandit: where each method ends\n\n" + " " * 28 + "arm 1  arm 2  arm 3    J")
    for name, probs in ends.items():
        print(f"{name:28}" + "".join(f"{p:<7.3f}" for p in probs) + f"  {probs @ REWARDS:.3f}")
    start = next(iter(runs.values()))["value"][0, :, 0].mean()
    print(f"\nStale world: J after {steps} steps, mean of {seeds} seeds [95 % interval]; start {start:.2f}, best 1.\n"
          "On the right, means over the run at (20, 0).\n")
    print(" " * 26 + "".join(f"{setting:19}" for setting in runs) + "KL     sample  clipped")
    finals = [interval(curves["value"][..., -1]) for curves in runs.values()]
    means = [runs["(20, 0)"][key].mean((-1, -2)) for key in ("kl", "ess", "clipped")]
    for i, name in enumerate(names):
        print(f"{name:26}" + "".join(f"{mean[i]:.2f} [{low[i]:.2f}, {high[i]:.2f}]  " for mean, low, high in finals)
              + f"{means[0][i]:<7.2f}{means[1][i]:<8.2f}{means[2][i]:.2f}")
    print("\nWhat the paper claims, and what shows here: final J, first minus second, unless said otherwise\n")
    for claim, setting, mean, low, high, outcome in rows:
        print(f"{claim:58}{setting:9}{mean:+.3f} [{low:+.3f}, {high:+.3f}]  {outcome}")
    print()


# %% 8. The claims


def token_batch(generator, *, spread, rows=64, tokens=5):
    """Random logprobs, old_logprobs, advantages (rows,), mask for checks of a loss: log-ratios ~ N(0, spread²)."""
    old_logprobs = -3 * torch.rand(rows, tokens, dtype=torch.float64, generator=generator)
    logprobs = old_logprobs + spread * torch.randn(rows, tokens, dtype=torch.float64, generator=generator)
    advantages = torch.randn(rows, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, tokens, dtype=torch.float64, generator=generator) < 0.8
    return logprobs, old_logprobs, advantages, mask


def loss_gradient(loss, logprobs, *tensors):
    """∂L/∂log π_θ."""
    logprobs = logprobs.detach().requires_grad_()
    return torch.autograd.grad(loss(logprobs, *tensors), logprobs)[0]


# Rows that differ from REINFORCE in M, W or a penalty whose gradient is 0 at ρ = 1.
SAME_WHEN_FRESH = [name for name in METHODS if name.startswith(("rec-oneside", "rec-twoside", "rec-ring"))
                   and "5×" not in name] + ["reinforce-is", "rep-opmd"]


# Rows of ρ; columns: one_side A>0, A<0 | two_side A>0, A<0 | ring A>0, A<0 | one_side (.6, 2) A>0, A<0.
TRUTH_TABLE = [
    ((0.10, 0.30), "10 00 10 10"), ((0.50, 0.79), "10 00 00 11"), ((0.80, 1.0, 1.2), "11 11 11 11"),
    ((1.21, 2.0, 2.9), "01 00 00 11"), ((3.0,), "01 00 01 11"), ((3.5,), "01 00 01 01"),
]


def claims_mask(claims):
    wanted, measured = [], []
    for ratios, bits in TRUTH_TABLE:
        for ratio in ratios:
            wanted.append([float(bit) for bit in bits.replace(" ", "")])
            masks = [clip_mask(torch.tensor(ratio), torch.tensor(sign), clip=clip, **bounds)
                     for clip, bounds in (("one_side", {}), ("two_side", {}), ("ring", {}), ("one_side", ENLARGED))
                     for sign in (1.0, -1.0)]
            measured.append(torch.stack(masks).double())
    check(claims, "(1) the truth table of all masks: 12 ratios, both signs", expected=wanted, tolerance=0.0,
          measured=torch.stack(measured))
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    check(claims, "(1) clip fraction of ρ = 1.5, 1.5, .5, .5 with A = 1, −1, 1, −1", expected=0.5,
          measured=(~clip_mask(ratio, advantages, clip="one_side")).double().mean())
    grid = torch.logspace(-3, 3, 200)
    kept = torch.stack([clip_mask(grid, torch.tensor(0.0), clip=clip) for clip in ("one_side", "two_side", "ring")])
    check(claims, "(1) A = 0 is never counted as clipped", expected=True, measured=bool(kept.all()))
    far = torch.tensor([[100.0]], dtype=torch.float64)
    weights = [update_weights(METHODS["reinforce-is"][1], far, torch.zeros_like(far), torch.tensor([a])).item()
               for a in (-1.0, 0.0)]
    check(claims, "(1) log-ratio 100 is capped at 20: weight −e²⁰ for A = −1, and 0 for A = 0", tolerance=0.01,
          expected=[-485165195.41, 0.0], measured=weights)


def claims_ppo(claims, generator):
    grid = torch.linspace(-2.5, 2.5, 1001, dtype=torch.float64).unsqueeze(-1)
    advantages = torch.cat([torch.ones(1001), -torch.ones(1001)]).double()
    grid = grid.repeat(2, 1)
    batches = {"grid": (grid, torch.zeros_like(grid), advantages, torch.ones_like(grid, dtype=torch.bool)),
               "random": token_batch(generator, spread=0.5)}
    for name, (logprobs, old_logprobs, advantages, mask) in batches.items():
        token_advantages = advantages.unsqueeze(-1).expand_as(logprobs)
        ppo = loss_gradient(ppo_loss, logprobs, old_logprobs, token_advantages, mask)
        rec = loss_gradient(ONE_SIDE_IS, logprobs, old_logprobs, advantages, mask)
        check(claims, f"(1) ∇PPO-min = ∇REC one-side IS, {name}: largest difference", expected=0.0, tolerance=1e-14,
              measured=(ppo - rec).abs().max())
        if name == "grid":
            dual = loss_gradient(partial(ppo_loss, dual_clip=3.0), logprobs, old_logprobs, token_advantages, mask)
            beyond = (token_advantages < 0) & ((logprobs - old_logprobs).exp() > 3)
            check(claims, "(1) a dual clip, c = 3, differs exactly where A < 0 and ρ > 3", expected=True,
                  measured=bool(((dual != ppo) == beyond).all()))
            check(claims, "(1) … there its gradient is 0, and REC's is not", expected=True,
                  measured=bool((dual[beyond] == 0).all() and (rec[beyond] != 0).all()))


def claims_on_policy(claims, generator):
    logprobs, _, advantages, mask = token_batch(generator, spread=0.0)
    reinforce = loss_gradient(METHODS["reinforce"][1], logprobs, logprobs, advantages, mask)
    gap = max((loss_gradient(METHODS[name][1], logprobs, logprobs, advantages, mask) - reinforce).abs().max()
              for name in SAME_WHEN_FRESH)
    check(claims, f"(1), (2) fresh data, ρ = 1: ∇ of {len(SAME_WHEN_FRESH)} rows − ∇REINFORCE", expected=0.0,
          measured=gap, tolerance=1e-15)


def claims_penalties(claims, generator):
    theta = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    old = torch.full((3, 1), 1 / 3, dtype=torch.float64).log()
    ones = torch.ones(3, 1, dtype=torch.bool)
    advantages = group_advantages(REWARDS)

    def opmd_square(logprobs, tau):  # as its authors write it, one number per response
        return ((advantages - tau * (logprobs - old[:, 0])).square() / (2 * tau)).mean()

    logprobs = torch.log_softmax(theta, -1)
    constant = (advantages.square() / (2 * 0.5)).mean() + (advantages * old[:, 0]).mean()
    check(claims, "(2) OPMD, worked example, τ = .5: as a square and as a sum", expected=[0.257328934865] * 2,
          measured=[opmd_square(logprobs, 0.5),
                    opmd_loss(logprobs[:, None], old, advantages, ones, tau=0.5) + constant])
    check(claims, "(2) AsymRE, worked example, β = .1: as a baseline and as a sum", expected=[0.171927265100] * 2,
          measured=[-((REWARDS - (REWARDS.mean() - 0.1)) * logprobs).mean(),
                    asymre_loss(logprobs[:, None], old, advantages, ones, beta=0.1) - 0.1 * old.mean()])
    gaps = {"OPMD": 0.0, "AsymRE": 0.0}
    for theta in 2 * torch.randn(200, 3, dtype=torch.float64, generator=generator):
        logprobs = torch.log_softmax(theta, -1)
        square = loss_gradient(lambda l: opmd_square(l, 0.5), logprobs)
        penalty = loss_gradient(partial(opmd_loss, tau=0.5), logprobs[:, None], old, advantages, ones)[:, 0]
        lowered = -(REWARDS - (REWARDS.mean() - BETA)) / 3  # the gradient with the baseline r̄ − β
        shifted = loss_gradient(partial(asymre_loss, beta=BETA), logprobs[:, None], old, advantages, ones)[:, 0]
        gaps["OPMD"] = max(gaps["OPMD"], (square - penalty).abs().max())
        gaps["AsymRE"] = max(gaps["AsymRE"], (lowered - shifted).abs().max())
    for name, gap in gaps.items():
        check(claims, f"(2) {name} = REINFORCE + penalty, gradients at 200 random θ: difference", expected=0.0,
              measured=gap, tolerance=1e-13)
    pair, zero = torch.tensor([[0.1, -0.1]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    check(claims, "(2) two tokens, d = .1, −.1: the token penalty sees them, (Σ_t d)² does not", expected=[0.01, 0.0],
          measured=[opmd_loss(pair, zero, torch.zeros(1), torch.ones(1, 2), tau=2.0), pair.sum().square()])


def claims_limits(claims, ends):
    drift = BEHAVIOUR * (REWARDS - BEHAVIOUR @ REWARDS)
    check(claims, "(3) REINFORCE and AsymRE (β = .1) end on arm 2, the wrong one", expected=[[0.0, 1.0, 0.0]] * 2,
          measured=torch.stack([ends["reinforce"], ends["rep-asymre"]]), tolerance=1e-6)
    check(claims, "(3) AsymRE, β = .5: arm 1 is below the water level", expected=[0.0, 0.84, 0.16],
          measured=ends["rep-asymre, β = .5"], tolerance=1e-6)
    check(claims, "(3) AsymRE, β = 1: all arms survive and π = π_b·(r − μ + 1)", expected=drift + BEHAVIOUR,
          measured=asymre_limit(BEHAVIOUR, REWARDS, beta=1.0))
    # With arm 2 alone above water c = w_2 − β, and arm 3 appears when w_3 exceeds that: .042 + .1β = .132 − .4β.
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if asymre_limit(BEHAVIOUR, REWARDS, beta=middle)[2] > 0 else (middle, high)
    check(claims, "(3) AsymRE: arm 3 survives from β = .18 on, by bisection", expected=0.18, measured=high)
    limit = asymre_limit(BEHAVIOUR, REWARDS, beta=0.5)
    taus = torch.logspace(-2, 2, 2000, dtype=torch.float64).unsqueeze(-1)
    tilts = torch.softmax(BEHAVIOUR.log() + REWARDS / taus, -1)
    check(claims, "(3) … no τ gives that policy: π_b·exp(r/τ)/Z stays more than .05 away", expected=True,
          measured=(tilts - limit).abs().amax(-1).min().item() > 0.05)
    check(claims, "(3) OPMD with baseline τ·log Z ends at π* = π_b·exp(r/τ)/Z", tolerance=1e-6,
          expected=torch.softmax(BEHAVIOUR.log() + REWARDS / TAU, -1), measured=ends["rep-opmd, baseline τ·log Z"])
    # A narrow clip stops arms 2 and 3 at ρ = 1.2; arm 1 keeps the rest.
    clipped = torch.stack([ends[name] for name in ends if name.startswith(("rec-oneside", "rec-twoside", "rec-ring"))
                           and "(.6, 2)" not in name])
    check(claims, "(3) one-side, two-side, ring at (.2, .2), IS or not: J = .696, π = [.16, .72, .12]", tolerance=0.01,
          expected=torch.tensor([0.16, 0.72, 0.12]).expand_as(clipped), measured=clipped)
    # (.6, 2) without IS: once arm 1 is clipped only positive weights are left, and REINFORCE is weighted imitation.
    check(claims, "(3) one-side (.6, 2) NoIS: imitates arms 2 and 3 as .132 : .042", tolerance=0.02,
          expected=[0.0, 0.132 / 0.174, 0.042 / 0.174], measured=ends["rec-oneside-nois (.6, 2)"])
    check(claims, "(3) only full importance sampling ends on arm 3: π_3 > .99, all others < .5", expected=True,
          measured=all(end[2] > 0.99 if name == "reinforce-is" else end[2] < 0.5 for name, end in ends.items()))


def claims_staleness(claims):
    wanted = {(1, 0): [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], (4, 0): [0, 1, 2, 3, 0, 1, 2, 3, 0, 1],
              (1, 3): [0, 1, 2, 3, 3, 3, 3, 3, 3, 3], (2, 1): [0, 1, 2, 1, 2, 1, 2, 1, 2, 1],
              (4, 2): [0, 1, 2, 3, 4, 5, 2, 3, 4, 5], (2, 3): [0, 1, 2, 3, 4, 3, 4, 3, 4, 3],
              (None, 0): [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}
    for (every, ahead), expected in wanted.items():
        check(claims, f"(4) staleness of steps 1..10, I = {every}, m = {ahead}", expected=expected, tolerance=0.0,
              measured=[staleness(n, sync_interval=every, sync_offset=ahead) for n in range(1, 11)])
    check(claims, "(4) … (20, 0): 9.5 on average", expected=9.5,
          measured=sum(staleness(n, sync_interval=20, sync_offset=0) for n in range(1, 101)) / 100)


def claims_mask_friends(claims):
    ratio = torch.tensor([1.25, 1.3], dtype=torch.float64)
    one = torch.tensor(1.0)
    higher = clip_mask(ratio, one, clip="one_side", eps_high=0.28).double()
    check(claims, "DAPO clip-higher .2/.28: ρ = 1.25 learns, 1.3 does not; at .2/.2 neither", expected=[1, 0, 0, 0],
          measured=torch.cat([higher, clip_mask(ratio, one, clip="one_side").double()]))
    lengths = torch.tensor([16000, 16384, 18432, 20480], dtype=torch.float64)
    check(claims, "DAPO overlong penalty, 20480 tokens, cache 4096: at 16000, 16384, 18432, 20480",
          expected=[0.0, 0.0, -0.5, -1.0], measured=overlong_penalty(lengths, max_length=20480, cache=4096))
    log_ratio = torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=torch.float64)
    check(claims, "GSPO: s of log-ratios .1, −.2, .3, 0", expected=1.0512711, tolerance=1e-7,
          measured=sequence_ratio(log_ratio, torch.ones(4, dtype=torch.bool)))
    log_ratio = torch.tensor([0.6, -0.5, 0.1], dtype=torch.float64).expand(2, 3)
    check(claims, "GMPO: .6, −.5, .1 in e^{±.4}, A > 0 and A < 0", expected=[1.0, 1.1051709], tolerance=1e-7,
          measured=gmpo_ratio(log_ratio, torch.tensor([1.0, -1.0]), torch.ones(2, 3, dtype=torch.bool)))
    ratio = torch.tensor([1.5, 3.0], dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    ppo = loss_gradient(ppo_loss, ratio.log().unsqueeze(-1), 0 * ones, ones, ones.bool())[:, 0]
    check(claims, "CISPO, ε = .2, A = 1, ρ = 1.5 and 3: weight 1.2 where PPO's is 0", expected=[1.2, 1.2, 0.0, 0.0],
          measured=torch.cat([capped_ratio_weight(ratio, cap=1.2), ppo]))
    check(claims, "TIS, C = 2: ρ = 1.5 and 3 weigh", expected=[1.5, 2.0], measured=capped_ratio_weight(ratio, cap=2.0))
    check(claims, "TOPR: ρ = .5 and 3 weigh 1, 1 when right and .5, 1 when wrong", expected=[1.0, 1.0, 0.5, 1.0],
          measured=topr_weight(torch.tensor([0.5, 3.0]).repeat(2), torch.tensor([1.0, 1.0, 0.0, 0.0])))
    gradients = two_token_gradients()
    for name, expected in (("exact ∇J", [0.1621466, 0.0, 0.1331501]), ("trajectory IS", gradients["exact ∇J"]),
                           ("token-level IS", [0.1175019, 0.0, 0.1069549]), ("no IS", [0.125, -0.0093053, 0.1012532])):
        check(claims, f"TIC-GRPO, two tokens: {name}" + (" is the exact ∇J" if name == "trajectory IS" else ""),
              expected=expected, measured=gradients[name], tolerance=1e-12 if name == "trajectory IS" else 1e-7)


def claims_stale_world(claims, runs, names, by_sharing):
    fresh = dict(zip(names, runs["fresh (1, 0)"]["value"]))
    same = [name for name in SAME_WHEN_FRESH if name in names]
    gap = max((fresh[name] - fresh["reinforce"]).abs().max() for name in same)
    check(claims, f"stale world, fresh data: J of {len(same)} rows at every step − J of REINFORCE", expected=0.0,
          measured=gap)
    check(claims, "… where KL to the sampler is 0 and the effective sample size whole", expected=[0.0, 1.0],
          measured=[runs["fresh (1, 0)"]["kl"].abs().max(), runs["fresh (1, 0)"]["ess"].min()])
    stale = dict(zip(names, runs["(20, 0)"]["value"][..., -1]))
    low = {name: interval(stale[name] - stale["reinforce"])[1]
           for name in ("rec-oneside-nois (.6, 2)", "rep-opmd")}
    for name, bound in low.items():
        check(claims, f"stale (20, 0): {name} ends above REINFORCE (95 % interval)", expected=True,
              measured=bool(bound > 0))
    alone = dict(zip(SHOWN, by_sharing[0.0]))
    check(claims, "… but when prompts share nothing, REINFORCE ends above one-side (.2, .2)", expected=True,
          measured=bool(interval(alone["reinforce"] - alone["rec-oneside-nois"])[1] > 0))


# %% 9. The figures


def figure_gradient_weight(directory):
    """The weight on ∇log π_θ of one token against its ratio, taken from each loss by update_weights."""
    panels = [("none", {}), ("one_side", {}), ("one_side", ENLARGED), ("two_side", {}), ("two_side", ENLARGED),
              ("ring", {})]
    fig, axes = figure(len(panels), 2, width=2.1, height=2.1, sharex=True, sharey="row")
    fig.suptitle("The clip decides where the gradient is 0; importance sampling only tilts what is left")
    ratio = torch.logspace(-1, math.log10(6), 600, dtype=torch.float64)
    zeros = torch.zeros_like(ratio).unsqueeze(-1)
    for column, (clip, bounds) in enumerate(panels):
        for axis, sign in zip(axes[:, column], (1.0, -1.0)):
            advantages = torch.full_like(ratio, sign)
            for weighted, label in ((False, "NoIS: W = 1"), (True, "IS: W = ρ")):
                loss = partial(rec_loss, clip=clip, importance_sampling=weighted, **bounds)
                weights = update_weights(loss, ratio.log().unsqueeze(-1), zeros, advantages)[:, 0]
                axis.plot(ratio, weights, label=label)
            keep = clip_mask(ratio, advantages, clip=clip, **bounds)
            axis.fill_between(ratio, 0, 1, where=~keep, transform=axis.get_xaxis_transform(), color="0.9", linewidth=0)
            axis.axhline(0, color="0.6", linewidth=0.6, linestyle="-", zorder=0)
            axis.set(xscale="log", xticks=[0.1, 0.4, 1, 3], xticklabels=[".1", ".4", "1", "3"], xlim=(0.1, 6))
            axis.minorticks_off()
        title = clip.replace("_", "-") + ("" if clip == "none" else " (.6, 2)" if bounds else " (.2, .2)")
        title += "\nouter (.6, 2)" if clip == "ring" else ""
        axes[0, column].set_title(title)
        axes[1, column].set_xlabel("ratio ρ")
    axes[0, 0].set(ylabel="weight, A = +1", ylim=(-0.4, 4))
    axes[1, 0].set(ylabel="weight, A = −1", ylim=(-4, 0.4))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return save_figure(fig, directory, "04_gradient_weight")


def figure_bandit(ends, directory):
    """Left: AsymRE's limit against β. Right: where every method ends on fixed data."""
    fig, (left, right) = figure(2, width=5.0, height=3.8)
    betas = torch.linspace(0.02, 2, 400, dtype=torch.float64)
    limits = torch.stack([asymre_limit(BEHAVIOUR, REWARDS, beta=beta.item()) for beta in betas])
    for arm, name in enumerate(("arm 1 (r = 0)", "arm 2 (r = .8)", "arm 3 (r = 1)")):
        left.plot(betas, limits[:, arm], label=name)
        left.plot(betas[-1:], BEHAVIOUR[arm : arm + 1], "<", color=STYLES[arm][0], clip_on=False)
    left.axvline(0.18, color="0.7", linewidth=0.8, linestyle="-", zorder=0)
    left.annotate("arm 3 survives\nfrom β = .18", (0.2, 0.42), fontsize=8)
    left.set(title="AsymRE cuts arms off one by one", xlabel="β   (◂ at the right edge: the data, β → ∞)",
             ylabel="probability in the end", xlim=(0, 2), ylim=(0, 1.02))
    left.legend(fontsize=8, loc="center right")
    order = sorted(ends, key=lambda name: float(ends[name] @ REWARDS))
    values = [float(ends[name] @ REWARDS) for name in order]
    right.barh(order, values, color="0.75")
    for row, value in enumerate(values):
        right.annotate(f"{value:.2f}", (value, row), (3, 0), textcoords="offset points", va="center", fontsize=7)
    for value, name in ((0.58, "data"), (0.8, "arm 2"), (1.0, "arm 3")):
        right.axvline(value, color="0.4", linewidth=0.8, linestyle=":")
        right.annotate(name, (value, len(order) - 0.4), ha="center", va="bottom", fontsize=8, annotation_clip=False)
    right.tick_params(axis="y", labelsize=7)
    right.set(xlabel="expected reward J in the end", xlim=(0.5, 1.05), ylim=(-0.6, len(order) - 0.4))
    right.set_title("Fixed data: only full importance sampling ends on arm 3", pad=16)
    return save_figure(fig, directory, "04_bandit")


def figure_stale(runs, names, by_interval, by_sharing, directory):
    """Top: J in the stale settings. Below: final J against staleness and against sharing, effective sample size."""
    fig, axes = figure(3, 2, width=3.1, height=2.5)
    fig.suptitle("On stale data REINFORCE falls back and every leash prevents it; offline, a tight leash costs more",
                 fontsize=11)

    def lines(axis, x, values, **options):
        """values (methods, points, seeds) in the order of SHOWN; bars are 95 % intervals."""
        for (color, style), name, series in zip(STYLES, SHOWN, values):
            mean, low, high = interval(series)
            axis.errorbar(x, mean, torch.stack([mean - low, high - mean]), color=color, linestyle=style, label=name,
                          elinewidth=0.8, **options)

    rows = [names.index(name) for name in SHOWN]
    fresh = runs["fresh (1, 0)"]["value"][names.index("reinforce")].mean(0)
    titles = ("refreshed every 20 steps (20, 0)", "10 batches behind (1, 10)", "offline: never refreshed")
    for axis, title, curves in zip(axes[0], titles, list(runs.values())[1:]):
        values = curves["value"][rows].transpose(1, 2)
        last = values.shape[1] - 1
        axis.plot(fresh, color="0.7", linestyle="-", linewidth=1)
        axis.annotate("fresh data (1, 0)", (last, fresh[-1]), (0, 2), textcoords="offset points", ha="right",
                      color="0.5", fontsize=7)
        lines(axis, range(last + 1), values, errorevery=(last // 5, last // 5))
        axis.set(title=title, xlabel="step", ylim=(0.2, 1.06))
    axes[0, 0].set_ylabel("expected reward J")
    for axis, points in ((axes[1, 0], by_interval), (axes[1, 1], by_sharing)):
        lines(axis, list(points), torch.stack(list(points.values()), 1), marker="o", markersize=3)
        axis.set(ylim=(0.2, 1.06))
    axes[1, 0].set(title="staleness hurts REINFORCE first", xscale="log", xlabel="sync interval I",
                   ylabel="J in the end", xticks=list(by_interval), xticklabels=[str(every) for every in by_interval])
    axes[1, 0].minorticks_off()
    axes[1, 1].set(title="at (20, 0): sharing does the harm", xlabel="how much the prompts share")
    values = runs["(20, 0)"]["ess"][rows].transpose(1, 2)
    lines(axes[1, 2], range(1, values.shape[1] + 1), values, errorevery=(19, 20))
    axes[1, 2].set(title="at (20, 0): leashes save samples", xlabel="step",
                   ylabel="effective sample size",
                   ylim=(0, 1.06))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    path = save_figure(fig, directory, "04_stale")
    Image.open(path).convert("RGB").quantize(64).save(path)  # many thin lines: a palette takes a third of the bytes
    return path


# %% 10. Exercises: python 04_regularization.py --exercise 1


def exercise_mask(ratio, advantages, eps_low, eps_high):
    return clip_mask(ratio, advantages, clip="one_side", eps_low=eps_low, eps_high=eps_high)


def exercise_asymre(behaviour_probs, rewards, beta):
    return asymre_limit(behaviour_probs, rewards, beta=beta)


def exercise_staleness(step, sync_interval, sync_offset):
    return staleness(step, sync_interval=sync_interval, sync_offset=sync_offset)


EXERCISES = {
    1: ("one_side_mask", "True where PPO's clipped objective has a gradient: ratio, advantages (N,), and the bounds "
        "1 − eps_low and 1 + eps_high, inclusive. A = 0 counts as kept.",
        exercise_mask,
        [(torch.tensor([0.5, 0.8, 1.0, 1.2, 1.5] * 3), torch.tensor([1.0] * 5 + [-1.0] * 5 + [0.0] * 5), 0.2, 0.2),
         (torch.tensor([0.3, 2.5, 3.5, 0.3, 2.5, 3.5]), torch.tensor([0.5] * 3 + [-0.5] * 3), 0.6, 2.0)]),
    2: ("asymre_end", "Where AsymRE ends on fixed data: π_i = max(w_i − c, 0)/beta with w = π_b·(r − μ + beta), c such "
        "that Σ π_i = 1; equation (3). behaviour_probs, rewards (A,) → (A,).",
        exercise_asymre,
        [(BEHAVIOUR, REWARDS, 0.1), (BEHAVIOUR, REWARDS, 0.5), (BEHAVIOUR, REWARDS, 2.0)]),
    3: ("updates_ahead", "How many updates the learner is ahead of the policy that sampled the batch of `step` "
        "(1-based); sync_interval=None is never refreshed; equation (4).",
        exercise_staleness,
        [(step, every, ahead) for step in (1, 2, 7, 12) for every, ahead in ((1, 0), (4, 2), (1, 10), (None, 0))]),
}


# %% 11. Run


def main(argv=None):
    args = lesson_arguments(__doc__, argv)
    if args.exercise is not None:
        run_exercise(EXERCISES, args)
    torch.set_num_threads(1)  # tensors this small lose more time between threads than they gain
    generator = seed_everything(args.seed)
    seeds, steps, names = (8, 60, SHOWN) if args.quick else (20, 100, tuple(METHODS))
    intervals, shares = ((20,), (0.0,)) if args.quick else (INTERVALS, SHARES)
    options = {"seeds": seeds, "seed": args.seed, "steps": steps}

    runs = {setting: run_stale(names, setting=pair, **options) for setting, pair in SETTINGS.items()}
    ends_shown = {every: runs[setting]["value"][[names.index(name) for name in SHOWN], :, -1]
                  for setting, every in (("fresh (1, 0)", 1), ("(20, 0)", 20))}
    by_interval = {every: ends_shown[every] if every in ends_shown
                   else run_stale(SHOWN, setting=(every, 0), **options)["value"][..., -1] for every in intervals}
    by_sharing = {share: run_stale(SHOWN, sharing=share, **options)["value"][..., -1] for share in shares}
    ends = bandit_ends(steps=200)
    print_tables(ends, runs, names, paper_verdicts(runs, names), seeds=seeds, steps=steps)

    claims = []
    claims_mask(claims)
    claims_ppo(claims, generator)
    claims_on_policy(claims, generator)
    claims_penalties(claims, generator)
    claims_limits(claims, ends)
    claims_staleness(claims)
    claims_mask_friends(claims)
    claims_stale_world(claims, runs, names, by_sharing)
    figure_gradient_weight(args.out)
    figure_bandit(ends, args.out)
    figure_stale(runs, names, by_interval, by_sharing, args.out)
    finish(claims, args)


if __name__ == "__main__":
    main()
