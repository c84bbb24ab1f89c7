#!/usr/bin/env python3
"""A training loop of your own, with three functions pasted from 06 and nothing else of ours: no import, no config.

Between the two lines below stand group_advantages, clip_mask and policy_loss, with the five small helpers that
policy_loss calls, as they are in 06 (a test holds them equal). Below them is all that is yours: a model, a task, a
sampler, a loop. Here the model is a tiny GPT-2 with random weights, and the task is to count on: 3 → 4 5 6 and stop.

Run:  python examples/own_loop.py                 half a minute on one core; the sampler is refreshed every 8 steps
      python examples/own_loop.py reinforce       the same without clipping
You see the mean reward (the share of right tokens) every 25 steps; it starts near 0.1.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass(frozen=True)
class Algorithm:
    """The fields of 06's Algorithm that policy_loss reads."""
    clip: str = "none"
    eps_low: float = 0.2
    eps_high: float = 0.2
    outer_low: float = 0.6
    outer_high: float = 2.0
    level: str = "token"
    weight: str = "one"
    weight_cap: float = math.inf
    tau: float = 0.0
    beta: float = 0.0
    aggregation: str = "token-mean"


ALGORITHMS = {"reinforce": Algorithm(), "rec-oneside-nois": Algorithm(clip="one_side"),
              "rec-oneside-is": Algorithm(clip="one_side", weight="ratio"), "rep-opmd": Algorithm(tau=0.2)}
friends = None  # policy_loss needs this room for ICPO's hinted responses only

# -------------------------------------------------------------------------------------------- pasted from 06, from here


def find_algorithm(algorithm, **overrides) -> Algorithm:
    """The row itself, or the row of that name, with every override that is not None put in."""
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {algorithm!r}; choose from: {', '.join(ALGORITHMS)}")
        algorithm = ALGORITHMS[algorithm]
    return dataclasses.replace(algorithm, **{k: v for k, v in overrides.items() if v is not None})


def group_advantages(rewards, *, leave_one_out=False, std_normalize=False, eps=1e-6):
    """A_i = r_i − r̄ of each response against its own group, (..., K) → (..., K); lesson 02."""
    if rewards.shape[-1:] < (2,) or not rewards.isfinite().all():
        raise ValueError("need finite rewards (..., K), K ≥ 2 responses to one prompt; got shape "
                         f"{tuple(rewards.shape)}")
    rewards, group_size = 1.0 * rewards, rewards.shape[-1]
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if std_normalize:
        advantages = advantages / (rewards.std(-1, correction=0, keepdim=True) + eps)
    if leave_one_out:
        advantages = advantages * (group_size / (group_size - 1))
    # In float32 the mean of seven times 0.1 is not 0.1, and a tiny std blows that error up: so ask the rewards.
    flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(flat, 0.0, advantages)


def clip_mask(ratio, advantages, *, clip, eps_low=0.2, eps_high=0.2, outer_low=0.6, outer_high=2.0):
    """M: True where a token takes part in the update, False where it has moved too far; lesson 04.

    one_side: it already went where its advantage pushes it. two_side: it went too far either way. ring: as two_side,
    but far out where its advantage pushes it back (A > 0 and ρ ≤ 1 − outer_low, A < 0 and ρ ≥ 1 + outer_high) it is
    kept again.
    """
    bounds = eps_low >= 0 and eps_high >= 0 and (clip != "ring" or (outer_low > eps_low and outer_high > eps_high))
    if not (clip in ("none", "one_side", "two_side", "ring") and bounds and advantages.dim() in (0, ratio.dim())):
        raise ValueError("need clip none, one_side, two_side or ring, eps ≥ 0 (below outer_* for a ring), and "
                         "advantages (B, 1) or (B, T) for a ratio (B, T); "
                         f"got {clip!r}, {eps_low}, {eps_high}, {advantages.shape}")
    above, below = ratio > 1 + eps_high, ratio < 1 - eps_low
    raised, lowered = advantages > 0, advantages < 0  # does the update make the token likelier?
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


def policy_ratio(log_ratio, mask, *, level: str):
    """ρ of each token, detached, (B, T): its own, or one for all tokens of the response. log_ratio is 0 on padding."""
    log_ratio = log_ratio.detach()
    if level != "token":
        log_ratio = log_ratio.sum(1, keepdim=True).expand(mask.shape)
    if level == "sequence":
        log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-20, 20).exp()  # finite in float32, whatever comes


def importance_weight(ratio, log_ratio, advantages, mask, *, algorithm: Algorithm):
    """W of the row, detached, (B, T), or 1."""
    if algorithm.weight == "one":
        return 1.0
    if algorithm.weight == "capped-mean":  # a geometric mean; each ratio is bounded where one_side stops it
        above, below = math.log1p(algorithm.eps_high), math.log(max(1 - algorithm.eps_low, 1e-9))
        bounded = torch.where(advantages > 0, log_ratio.clamp(max=above), log_ratio.clamp(min=below))
        return policy_ratio(bounded, mask, level="sequence")
    capped = ratio.clamp(max=algorithm.weight_cap)
    return torch.where(advantages < 0, capped, 1.0) if algorithm.weight == "ratio-if-worse" else capped


def token_weights(mask, *, aggregation: str, tokens: int | None = None, sequences: int | None = None, constant=None):
    """N: the weight of each token in the named mean, (B, T). For a part of a batch, pass the totals of the whole.

    constant: the token budget of a response that aggregation "constant" (Dr. GRPO) divides by, not its length.
    """
    if aggregation == "constant" and not constant:
        raise ValueError("aggregation 'constant' needs constant, a token budget such as the longest allowed response")
    tokens, sequences = tokens or mask.sum().clamp(min=1), sequences or mask.shape[0]
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    denominator = {"token-mean": tokens, "seq-mean-token-mean": sequences * lengths, "seq-mean-token-sum": sequences,
                   "constant": sequences * (constant or 1)}[aggregation]
    return mask * (1.0 / denominator)


def clean_tokens(logprobs, old_logprobs, advantages, mask):
    """Put 0 on padding BEFORE any arithmetic: NaN · 0 is NaN, in gradients too; lesson 04."""
    shape, per_token = logprobs.shape, advantages.dim() == logprobs.dim()
    if not (old_logprobs.shape == mask.shape == shape and ((mask == 0) | (mask == 1)).all()
            and advantages.shape in (shape, shape[:-1], (*shape[:-1], 1))):
        raise ValueError("need logprobs, old_logprobs, mask of 0 and 1, all (B, T), and advantages (B,) or (B, T); got "
                         f"{[tuple(tensor.shape) for tensor in (logprobs, old_logprobs, mask, advantages)]}")
    if logprobs.dtype in (torch.float16, torch.bfloat16):
        logprobs = logprobs.float()
    mask, advantages = mask.bool(), advantages if per_token else advantages.unsqueeze(-1)
    old_logprobs, advantages = old_logprobs.detach().to(logprobs.dtype), advantages.detach().to(logprobs.dtype)
    return *(torch.where(mask, tensor, 0.0) for tensor in (logprobs, old_logprobs, advantages)), mask


def policy_loss(logprobs, old_logprobs, advantages, mask, *, algorithm, eps_low=None, eps_high=None, outer_low=None,
                outer_high=None, tau=None, beta=None, weights=None, constant=None, hinted=None):
    """The one equation. Returns (loss, metrics): a scalar to minimise, and token means as 0-d tensors.

    With clip "one_side" and W = ρ its gradient is that of PPO's min(ρA, clip(ρ)A), written with log π and a detached ρ.

    logprobs, old_logprobs, mask: (B, T); advantages: (B,) or (B, T); algorithm: a row or its name, which eps_low …
    beta override. weights: (B, T) from token_weights, when it is a part of a larger batch; by default it is the whole.
    constant: see token_weights. hinted: (B,) responses sampled under another prompt, see friends.weigh_hints.
    Positions where mask is False may hold anything, NaN too: they are cut out before any arithmetic.
    """
    row = find_algorithm(algorithm, eps_low=eps_low, eps_high=eps_high, outer_low=outer_low, outer_high=outer_high,
                         tau=tau, beta=beta)
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    advantages, log_ratio = advantages.expand(mask.shape), logprobs - old_logprobs
    ratio = policy_ratio(log_ratio, mask, level=row.level)
    keep = clip_mask(ratio, advantages, clip=row.clip, eps_low=row.eps_low, eps_high=row.eps_high,
                     outer_low=row.outer_low, outer_high=row.outer_high)
    weight = importance_weight(ratio, log_ratio, advantages, mask, algorithm=row)
    if hinted is not None:
        keep, weight = friends.weigh_hints(keep, weight, logprobs, hinted, algorithm=row)
    per_token = -torch.where(keep, weight * advantages, 0.0) * logprobs  # − M·W·A·log π
    per_token = per_token + row.tau / 2 * log_ratio**2 - row.beta * log_ratio  # + R
    if weights is None:
        weights = token_weights(mask.to(logprobs.dtype), aggregation=row.aggregation, constant=constant)
    loss = (weights * per_token).sum()  # Σ N

    with torch.no_grad():
        count, token_ratio = mask.sum().clamp(min=1), log_ratio.clamp(-20, 20).exp()
        metrics = {
            "clip_fraction": (mask & ~keep).sum() / count,
            "ratio_mean": torch.where(mask, token_ratio, 0.0).sum() / count,
            # k3 on the sampler's own tokens estimates KL(π_old ‖ π_θ): never negative, and far less noisy than −log ρ
            "kl_old": torch.where(mask, token_ratio - 1 - log_ratio, 0.0).sum() / count,
        }
    return loss, metrics

# ------------------------------------------------------------------------------------------------------------- to here

EOS, VOCABULARY, LENGTH, GROUP_SIZE = 10, 11, 5, 8


@torch.no_grad()
def sample(policy, prompts):
    """Responses to each prompt (B, 1), until EOS: tokens, mask (EOS included) and log π_old, all (B, T)."""
    sequence, running = prompts, torch.ones_like(prompts, dtype=torch.bool)
    masks, logprobs = [], []
    for _ in range(LENGTH):
        scores = policy(sequence).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(scores.exp(), 1)
        masks.append(running)
        logprobs.append(scores.gather(1, token))
        sequence, running = torch.cat([sequence, token], 1), running & (token != EOS)
    return sequence[:, 1:], torch.cat(masks, 1), torch.cat(logprobs, 1)


def reward(prompts, tokens, mask):
    """The share of right tokens: count on three times, then stop. What follows is not counted."""
    right = torch.cat([(prompts + i) % 10 for i in (1, 2, 3)] + [torch.full_like(prompts, EOS)], 1)
    return ((tokens[:, :4] == right) & mask[:, :4]).float().mean(1)


def token_logprobs(policy, prompts, tokens):
    """log π_θ of each token, (B, T): the logits at a position speak of the next one, so the last are not needed."""
    logits = policy(torch.cat([prompts, tokens], 1)).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def train(algorithm, *, steps=200, refresh=8, questions=16, seed=0):
    """The mean reward of each batch."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=EOS)
    policy, sampler = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    optimizer, history = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0), []
    for step in range(steps):
        if step % refresh == 0:  # between two refreshes the data are up to refresh − 1 updates old
            sampler.load_state_dict(policy.state_dict())
        prompts = torch.randint(10, (questions, 1)).repeat_interleave(GROUP_SIZE, 0)  # the rows of a group side by side
        tokens, mask, old_logprobs = sample(sampler, prompts)
        rewards = reward(prompts, tokens, mask)
        advantages = group_advantages(rewards.view(questions, GROUP_SIZE)).flatten()
        loss, metrics = policy_loss(token_logprobs(policy, prompts, tokens), old_logprobs, advantages, mask,
                                    algorithm=algorithm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(rewards.mean().item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:3}: reward {history[-1]:.2f}, clipped {metrics['clip_fraction']:.2f}")
    return history


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "rec-oneside-nois")
