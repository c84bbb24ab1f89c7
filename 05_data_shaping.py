"""Lesson 05: shape the data. Drop or weigh the responses of a group, and know exactly what that does.

Claim. Lesson 03 allowed any data, so the data may be chosen: RED-Drop leaves responses out, RED-Weight counts good
ones more. Both follow from weights on the pairs of lesson 03's loss, up to one extra term, weighted imitation, and in
the stale world below it is that term which keeps the training alive.

Equations checked here (RED in arXiv 2509.24203, and what follows from it). A group of K responses with rewards r_i,
r̄ their mean, A_i = r_i − r̄, ℓ_i = log π_θ(y_i), d_i = ℓ_i − log π_t(y_i), a_i = r_i − τ·d_i:

  (5.1)  the loss (1/K²) Σ_{i<j} w_ij·(a_i − a_j)²/(1+τ)² has, at θ_t where d = 0, the gradient
             −2τ/(1+τ)² · (1/K²) Σ_i [Σ_j w_ij·(r_i − r_j)]·∇ℓ_i
  (5.2)  for w_ij = w_i·w_j:  −2τ/(1+τ)² · (Σw/K²) Σ_i w_i·(r_i − r̄_w)·∇ℓ_i,   r̄_w = Σ w_i·r_i / Σ w_i.
         w ∈ {0, 1} is RED-Drop: the baseline is the mean of what was KEPT.
  (5.3)  RED-Weight is (1/K) Σ w_i·(r_i − r̄)·∇ℓ_i with w_i = exp(A_i/T) and the PLAIN mean r̄. It splits into
             (1/K) Σ w_i·(r_i − r̄_w)·∇ℓ_i  +  (r̄_w − r̄)·(1/K) Σ w_i·∇ℓ_i
         (5.2), so REINFORCE                  imitation of the group, the good ones most
         Up to the w_i the second part is lesson 04's AsymRE, with β = r̄_w − r̄: shaping data also regularises.
  (5.4)  r̄_w − r̄ = Cov(w, r)/w̄ ≥ 0, about Var(r)/T for large T and 0 in a flat group. Rewards 0 or 1 with success
         rate p: r̄_w = σ(logit p + 1/T).
  (5.5)  adaptive temperature: the T with Σ A_i·exp(A_i/T)·L_i = 0, L_i response lengths   (arXiv 2606.20002)
  (5.6)  on a policy's OWN samples and rewards 0 or 1, any shaping by reward gives g(p)·∇p on average: it sets the pace
         of a prompt and cannot turn its gradient. To change the direction takes other data or graded rewards.
  (5.7)  on fixed data π_b a softmax bandit moves by c − κ·π_θ, with c = π_b·w·(r − μ) and κ = Σc. RED-Weight pulls
         against a wrong arm's lead by κ·π_θ and ends at the projection of c/κ onto the simplex.

How to run:  python 05_data_shaping.py       (--quick: fewer seeds and steps; --exercise N: check your own answer)
What you see: a table of the stale world, a table of claims and three figures, after about 8 seconds.
Before it:   lesson 04 regularised the update and took the data as they came. Here the update stays REINFORCE and
             the data change; the last experiment also combines the two.

symbol    name in the code      shape      meaning
r, A      rewards, advantages   (..., K)   the last dimension is one group: K responses to the same prompt
w         red_weight            (..., K)   weight of each response;  w_ij: pair_weights (..., K, K), of each pair
          keep                  (..., K)   False for a response that RED-Drop leaves out
π_b, μ    behaviour_probs       (A,)       where the bandit's data come from, and their mean reward E_b r
"""

import functools
import itertools
import math
from collections import deque

import torch

from utils import STYLES, check, figure, finish, lesson_arguments, run_exercise, save_figure, seed_everything

# The 3-arm bandit of lesson 03: the data prefer arm 2, the rewards prefer arm 3.
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)
ONE_IN_FOUR = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
TAU = 0.5


# %% Three functions that the training script copies: which responses of a group count, and how much


def red_drop(rewards, *, generator=None):
    """RED-Drop: balance each group by dropping random negatives, then recompute the baseline (paper, RED).

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
    # r_i − r̄ as the mean of r_i − r_j over j: equal rewards differ by exactly 0 in any precision, while the float32
    # mean of seven times 0.1 is larger than 0.1. A reward AT the mean is positive, whichever way it was rounded.
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
    """RED-Weight: the weight exp(A_i/T) of each response, to multiply its advantage with (paper, RED).

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
    balance. Bisection, at most 20 steps, until the bracket [low, high] is narrower than 0.05; returns its upper end.
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


# %% Weights on pairs: from lesson 03's loss to RED


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


def pairwise_surrogate_loss(logprobs, old_logprobs, rewards, *, tau, scale=True, pair_weights=None):
    """L̂ = (1/K²) Σ_{i<j} w_ij·(a_i − a_j)² / (1+τ)²  with  a_i = r_i − τ·(log π_θ(y_i) − log π_t(y_i)); equation (3).

    logprobs      (..., K)     log π_θ of K responses to one prompt, with gradient. They may come from anywhere.
    old_logprobs  (..., K)     log π_t of the same responses, the anchor. A constant: detached here.
    rewards       (..., K)
    scale         False leaves out the division by (1+τ)².
    pair_weights  (..., K, K)  symmetric w_ij; None is all ones. Lesson 05 shapes the data with them.
    Returns (...): one loss per group. ValueError: shapes differ, K < 2, tau not positive, weights not symmetric.
    """
    if not logprobs.shape == old_logprobs.shape == rewards.shape:
        raise ValueError("logprobs, old_logprobs and rewards need one shape (..., K), got "
                         f"{tuple(logprobs.shape)}, {tuple(old_logprobs.shape)} and {tuple(rewards.shape)}")
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError("a group needs at least 2 responses: one response alone has no pair; sample more per prompt")
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a positive number, got {tau}")
    group_size = rewards.shape[-1]
    if pair_weights is not None:
        if pair_weights.shape[-2:] != (group_size, group_size):
            raise ValueError(f"pair_weights must be (..., {group_size}, {group_size}), got {tuple(pair_weights.shape)}")
        if not torch.allclose(pair_weights, pair_weights.transpose(-2, -1)):
            raise ValueError("pair_weights must be symmetric: w_ij and w_ji weigh the same pair")
    adjusted = rewards - tau * (logprobs - old_logprobs.detach())
    violation = (adjusted.unsqueeze(-1) - adjusted.unsqueeze(-2)).square()  # (..., K, K)
    if pair_weights is not None:
        violation = pair_weights * violation
    loss = violation.sum((-2, -1)) / 2 / group_size**2  # the K×K matrix holds every pair i<j twice
    return loss / (1 + tau) ** 2 if scale else loss


def pair_coefficients(rewards, pair_weights):
    """(1/K²) Σ_j w_ij·(r_i − r_j), the weight of ∇ℓ_i in (5.1) but for −2τ/(1+τ)²: (..., K), (..., K, K) → (..., K)."""
    if pair_weights.shape[-2:] != (rewards.shape[-1], rewards.shape[-1]):
        raise ValueError(f"pair_weights must be (..., K, K) for rewards {tuple(rewards.shape)}, "
                         f"got {tuple(pair_weights.shape)}")
    difference = rewards.unsqueeze(-1) - rewards.unsqueeze(-2)
    return (pair_weights * difference).sum(-1) / rewards.shape[-1] ** 2


def weighted_mean(rewards, weights):
    """r̄_w = Σ w_i·r_i / Σ w_i of each group, with the last dimension kept: (..., K), (..., K) → (..., 1)."""
    return (weights * rewards).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)


def red_weighted(rewards, *, temperature):
    """RED-Weight's advantages w_i·A_i, ready for any loss: rewards (..., K) → (..., K)."""
    advantages = group_advantages(rewards)
    return advantages * red_weight(advantages, temperature=temperature)


def red_weight_parts(rewards, *, temperature):
    """RED-Weight as two weights of ∇ℓ_i, pairwise REINFORCE and imitation, both (..., K); equation (5.3)."""
    advantages = group_advantages(rewards)
    weights = red_weight(advantages, temperature=temperature)
    shift = weighted_mean(advantages, weights)  # r̄_w − r̄
    return weights * (advantages - shift) / rewards.shape[-1], weights * shift / rewards.shape[-1]


def tilted_success(success, temperature):
    """r̄_w of a group with rewards 0 or 1 and success rate p in [0, 1]: σ(logit p + 1/T), equation (5.4).

    exp(A_i/T) = exp(r_i/T)·constant, so weighting multiplies the odds of "right" by e^{1/T}, whatever K is.
    """
    success = torch.as_tensor(success, dtype=torch.float64)
    if not ((success >= 0) & (success <= 1)).all():
        raise ValueError("success is a success rate and must lie in [0, 1]")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    return torch.sigmoid(torch.logit(success) + 1 / temperature)


def expected_red_drop(rewards):
    """E[advantages] of red_drop over its random choice, exactly: (..., K) → (..., K).

    With p positives and n > p negatives, each negative survives with probability p/n, and then shares the place with
    p − 1 of the other n − 1. A dropped response counts as advantage 0. ValueError: as red_drop.
    """
    advantages = group_advantages(rewards)
    rewards = rewards.to(advantages.dtype)
    positive = advantages >= -4 * torch.finfo(rewards.dtype).eps * rewards.abs().amax(-1, keepdim=True)
    p, n = (side.sum(-1, keepdim=True).to(rewards.dtype) for side in (positive, ~positive))
    sum_positive = torch.where(positive, rewards, 0.0).sum(-1, keepdim=True)
    sum_negative = torch.where(positive, 0.0, rewards).sum(-1, keepdim=True)
    survives = p / n.clamp(min=1)
    beside = rewards + (p - 1) / (n - 1).clamp(min=1) * (sum_negative - rewards)  # itself and its expected neighbours
    balanced = torch.where(positive, rewards - (sum_positive + survives * sum_negative) / (2 * p),
                           survives * (rewards - (sum_positive + beside) / (2 * p)))
    return torch.where(n > p, balanced, advantages)


# %% The policy's own samples: shaping sets the pace

# Each shaping as a function from rewards (..., K) to the EXPECTED weight A of every ∇ℓ_i; the 1/K is outside.
SHAPINGS = {
    "REINFORCE": group_advantages,
    "RED-Drop": expected_red_drop,
    "RED-Weight T = 1": functools.partial(red_weighted, temperature=1.0),
    "RED-Weight T = .5": functools.partial(red_weighted, temperature=0.5),
}


def enumerate_groups(responses, group_size):
    """All ordered groups: (responses ** group_size, group_size) indices."""
    return torch.cartesian_prod(*[torch.arange(responses)] * group_size).view(-1, group_size)


def expected_update(probs, rewards, scores, *, group_size, shaping):
    """E[(1/K) Σ_i A_i·s_i] over ALL groups that probs can draw: probs, rewards (N,), scores (N, P) → (P,)."""
    groups = enumerate_groups(len(probs), group_size)
    estimates = torch.einsum("gk,gkp->gp", shaping(rewards[groups]), scores[groups]) / group_size
    return probs[groups].prod(-1) @ estimates


def shaping_gain(success_rate, *, group_size, shaping):
    """g(p) of (5.6): how much a shaping scales ∇p of a prompt that is solved with probability p. (...) → (...).

    A shaped advantage sees only the rewards, and on own samples E[s | right] = ∇p/p, E[s | wrong] = −∇p/(1−p).
    So a group with k right answers contributes (1/K)·(ΣA of the right / p − ΣA of the wrong / (1−p))·∇p.
    """
    if not ((success_rate > 0) & (success_rate < 1)).all():
        raise ValueError("success_rate must lie strictly between 0 and 1: at 0 and 1 every group is flat")
    gain = torch.zeros_like(success_rate)
    for k in range(group_size + 1):
        rewards = (torch.arange(group_size) < k).to(success_rate.dtype)
        advantages = shaping(rewards)
        probability = math.comb(group_size, k) * success_rate**k * (1 - success_rate) ** (group_size - k)
        right, wrong = advantages[:k].sum(), advantages[k:].sum()
        gain = gain + probability * (right / success_rate - wrong / (1 - success_rate)) / group_size
    return gain


# %% Fixed data: shaping changes where the bandit ends


def softmax_scores(probs):
    """∇ log π of a softmax bandit with respect to its logits, (A, A): row y is e_y − π."""
    return torch.eye(len(probs), dtype=probs.dtype) - probs


def require_distribution(probs):
    """Raise ValueError unless the last dimension of `probs` is a probability distribution."""
    if (probs < 0).any() or not torch.allclose(probs.sum(-1), torch.ones_like(probs.sum(-1)), atol=1e-6):
        raise ValueError("probabilities must be ≥ 0 and sum to 1 over all responses; normalise them first")


def red_weight_pull(behaviour_probs, rewards, *, temperature):
    """c = π_b·w·(r − μ) with w = exp((r − μ)/T), the pull on each logit in (5.7): (A,), (A,) → (A,). κ is its sum."""
    require_distribution(behaviour_probs)
    advantages = rewards - behaviour_probs @ rewards
    return behaviour_probs * red_weight(advantages, temperature=temperature) * advantages


def project_to_simplex(point):
    """The nearest probability vector to `point` (A,): (x − λ)₊ with the λ that makes the sum 1 ("water-filling")."""
    if not torch.isfinite(point).all():
        raise ValueError("point must be finite")
    point = point - point.max()  # a shift moves λ alone, and the 1 is not rounded away beside a large number
    sorted_point = point.sort(descending=True).values
    level = (sorted_point.cumsum(-1) - 1) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    return (point - level[sorted_point > level][-1]).clamp(min=0)


def red_weight_limit(behaviour_probs, rewards, *, temperature):
    """Where RED-Weight ends on infinitely many data from π_b: the projection of c/κ, equation (5.7). (A,).

    dθ/dt = c − κ·π_θ climbs the concave c·θ − κ·log Σ e^θ. It comes to rest where all living logits move at one speed:
    c_i − κ·π_i = λ for π_i > 0, and a dead arm is one that cannot keep up, c_i ≤ λ.
    ValueError: all arms in the data pay alike, so that κ = 0 and nothing moves.
    """
    pull = red_weight_pull(behaviour_probs, rewards, temperature=temperature)
    drawn = rewards[behaviour_probs > 0]
    if (drawn == drawn[0]).all():
        raise ValueError("all arms that behaviour_probs can draw have the same reward: nothing moves, so no limit")
    return project_to_simplex(pull / pull.sum())


def follow(update, *, steps, step_size):
    """θ ← θ + step_size·update(θ) from θ = 0 on the 3-arm bandit. Returns the logits (steps + 1, 3)."""
    theta = torch.zeros(3, dtype=torch.float64)
    path = [theta]
    for _ in range(steps):
        theta = theta + step_size * update(theta)
        path.append(theta)
    return torch.stack(path)


def bandit_paths(*, steps, step_size, group_size=8):
    """name → logits (steps + 1, 3) on fixed data from BEHAVIOUR, each step the exact expected update."""
    plain = BEHAVIOUR * (REWARDS - BEHAVIOUR @ REWARDS)
    # The scores are e_y − π_θ, but advantages that sum to 0 in every group cancel π_θ: one matrix of scores is enough.
    dropped = expected_update(BEHAVIOUR, REWARDS, torch.eye(3, dtype=torch.float64), group_size=group_size,
                              shaping=expected_red_drop)
    paths = {"REINFORCE": follow(lambda theta: plain, steps=steps, step_size=step_size),
             f"RED-Drop, K = {group_size}": follow(lambda theta: dropped, steps=steps, step_size=step_size)}
    for temperature in (1.0, 0.3):
        pull = red_weight_pull(BEHAVIOUR, REWARDS, temperature=temperature)
        paths[f"RED-Weight T = {temperature:g}"] = follow(
            lambda theta: pull - pull.sum() * torch.softmax(theta, -1), steps=steps, step_size=step_size)
    return paths


def entropy(probs):
    """−Σ π log π over the last dimension: (..., A) → (...)."""
    return -torch.xlogy(probs, probs).sum(-1)


def slope(probs, update, values):
    """d(Σ π·values)/dη when the logits of π move by η·update: Cov_π(values, update). All (A,) → ().

    values = r gives the slope of J; values = −log π gives that of the entropy, as the change of log π has mean 0.
    """
    return (probs * values * update).sum() - (probs @ values) * (probs @ update)


# %% Expert data: one good response in a poor batch

# Two tokens of a vocabulary of 4. Every response of the batch took method 1 as its first token (a hint in the prompt,
# a colleague's drafts); one of the eight then gives the right answer, 1.
BATCH_SECOND_TOKEN = torch.tensor([1, 0, 2, 3, 0, 2, 3, 0])


def train_on_expert_batch(shaping, *, steps, step_size=1.0):
    """REINFORCE with shaped advantages on that one batch, from uniform logits, exact: (steps + 1, 2).

    Returns the probability of method 1, and of the right answer given method 1, at each step.
    """
    advantages = shaping((BATCH_SECOND_TOKEN == 1).double())
    theta = torch.zeros(2, 4, dtype=torch.float64)
    path = []
    for _ in range(steps + 1):
        theta.requires_grad_()
        logprobs = torch.log_softmax(theta, -1)
        path.append(logprobs[:, 1].detach().exp())
        loss = -(advantages * (logprobs[0, 1] + logprobs[1, BATCH_SECOND_TOKEN])).mean()
        theta = (theta - step_size * torch.autograd.grad(loss, theta)[0]).detach()
    return torch.stack(path)


# %% Friends that shape the data as well


def informative_groups(rewards):
    """DAPO's dynamic sampling (arXiv 2503.14476): True for a group that is not flat, (..., K) → (...).

    DAPO draws new prompts until the batch is full of such groups; a trainer must bound the tries.
    """
    return rewards.amax(-1) != rewards.amin(-1)


def graded_reward(right_steps, *, steepness=5.0, centre=0.5):
    """SGPO (arXiv 2505.11595): 1/(1 + exp(−β(RTS − γ))), the reward of a wrong answer in an all-wrong group.

    right_steps: RTS, the share of leading steps that are right, in [0, 1], any shape. β is steepness, γ is centre.
    """
    if ((right_steps < 0) | (right_steps > 1)).any():
        raise ValueError("right_steps is the share of right leading steps and must lie in [0, 1]")
    return torch.sigmoid(steepness * (right_steps - centre))


def tempered(probs, *, temperature):
    """π^{1/T}/Z over the last dimension: what sampling at temperature T draws from."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    return torch.softmax(probs.log() / temperature, -1)


def hint_weight(probs, *, smoothing=0.1):
    """ICPO (arXiv 2510.26519): f(x) = x/(x + λ), the weight of a token that was sampled WITH a worked example.

    probs: x, the token's probability under the plain prompt. A token that the plain policy would hardly say counts
    hardly at all; no ratio to the hinted sampler is needed, and no clip.
    """
    if not smoothing > 0:
        raise ValueError(f"smoothing must be positive, not {smoothing}")
    return probs / (probs + smoothing)


def icpo_advantages(plain_rewards, hinted_reward, *, step, decay=400, eps=1e-6):
    """ICPO: G−1 plain rollouts and one hinted one, normalised together (ddof 1). (..., G−1), (...) → (..., G).

    A right hinted answer (reward > 0) gets the bonus 1 − step/decay, none after step = decay (**our reading**).
    """
    bonus = max(0.0, 1 - step / decay)
    hinted = torch.where(hinted_reward > 0, hinted_reward + bonus, hinted_reward)
    pool = torch.cat([plain_rewards, hinted.unsqueeze(-1)], -1)
    advantages = (pool - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    return torch.where(informative_groups(pool).unsqueeze(-1), advantages, 0.0)


# %% The stale world of lesson 04, copied: exact values of a policy that trains on samples of its past

PROMPTS, VOCABULARY, LENGTH, GROUP_SIZE = 4, 4, 3, 8  # 4³ = 64 responses to each prompt, all of them enumerated


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


# %% RED in that world

SETTINGS = {"fresh (1, 0)": (1, 0), "(20, 0)": (20, 0), "(1, 10)": (1, 10), "offline": (None, 0)}
STEP_SIZE, SHARING = 3.0, 0.85


def shaped_methods(generator):
    """name → (advantages, loss), as train_stale takes them. generator: for the random choice of RED-Drop."""

    def weighted(temperature):
        return functools.partial(red_weighted, temperature=temperature)

    def part(index, rewards):  # of RED-Weight at T = 1: 0 the pairwise part, 1 the imitation
        return red_weight_parts(rewards, temperature=1.0)[index] * rewards.shape[-1]

    plain = functools.partial(rec_loss, clip="none", importance_sampling=False)
    clipped = functools.partial(rec_loss, clip="one_side", importance_sampling=False)
    return {
        "REINFORCE": (group_advantages, plain),
        "REINFORCE, 2 × the step": (lambda rewards: 2 * group_advantages(rewards), plain),
        "GRPO": (functools.partial(group_advantages, std_normalize=True),
                 functools.partial(rec_loss, clip="one_side", importance_sampling=True)),
        "RED-Drop": (lambda rewards: red_drop(rewards, generator=generator)[0], plain),
        "RED-Weight T = 3": (weighted(3.0), plain),
        "RED-Weight T = 1": (weighted(1.0), plain),
        "RED-Weight T = .3": (weighted(0.3), plain),
        "RED-Weight T = 1, clipped": (weighted(1.0), clipped),
        "… only its pairwise part": (lambda rewards: part(0, rewards), plain),
        "… only REINFORCE + its imitation": (lambda rewards: group_advantages(rewards) + part(1, rewards), plain),
    }


def run_shaped(*, seeds, seed, steps):
    """setting → method → exact J before each step and after the last one, (seeds, steps + 1).

    Worlds and random numbers are the same in every setting, and the same as in lesson 04: so are REINFORCE and GRPO.
    """
    methods, curves = shaped_methods(torch.Generator().manual_seed(seed + 1)), {}
    for setting, (sync_interval, sync_offset) in SETTINGS.items():
        generator = torch.Generator().manual_seed(seed)
        logits, rewards = random_worlds(seeds, generator=generator)
        run = train_stale(methods, logits, rewards, sync_interval=sync_interval, sync_offset=sync_offset,
                          steps=steps, step_size=STEP_SIZE, sharing=SHARING, generator=generator)
        curves[setting] = dict(zip(methods, run["value"]))
    return curves


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


def shaping_verdicts(curves):
    """What the paper and this lesson say, against this world: rows (claim, setting, mean, low, high, verdict)."""
    rows = []
    for claim, first, second in (
        ("P6 RED-Drop − GRPO", "RED-Drop", "GRPO"),
        ("P6 RED-Weight T = 1 − GRPO", "RED-Weight T = 1", "GRPO"),
        ("P6 RED-Weight T = .3 − GRPO", "RED-Weight T = .3", "GRPO"),
        ("RED-Weight T = 1 − REINFORCE", "RED-Weight T = 1", "REINFORCE"),
        ("only its pairwise part − REINFORCE", "… only its pairwise part", "REINFORCE"),
        ("REINFORCE + its imitation − REINFORCE", "… only REINFORCE + its imitation", "REINFORCE"),
        ("REINFORCE, 2 × the step − 1 ×", "REINFORCE, 2 × the step", "REINFORCE"),
        ("RED-Weight T = 1: clipped − not clipped", "RED-Weight T = 1, clipped", "RED-Weight T = 1"),
    ):
        for setting, methods in curves.items():
            mean, low, high = (float(v) for v in interval(methods[first][:, -1] - methods[second][:, -1]))
            least = -0.02 if claim.startswith("P6") else 0.0  # P6: RED does as well as GRPO, give or take .02
            rows.append((claim, setting, mean, low, high, verdict(low, high, least=least)))
    return rows


def print_shaped(curves, rows, *, seeds, steps):
    """J at the end of every run, and the paired differences, both with intervals."""
    print(f"Stale world: J after {steps} steps, mean of {seeds} seeds [95 % interval]\n")
    print(" " * 34 + "".join(f"{setting:20}" for setting in curves))
    for name in curves["offline"]:
        cells = ("{:.2f} [{:.2f}, {:.2f}]".format(*interval(methods[name][:, -1])) for methods in curves.values())
        print(f"{name:34}" + "".join(f"{cell:20}" for cell in cells))
    print("\nIs the difference of final J, on the same seeds, above 0?\n"
          "(P6, the paper's claim that RED does as well as GRPO: above −.02?)\n")
    for claim, setting, mean, low, high, outcome in rows:
        print(f"{claim:40}{setting:14}{mean:+.3f} [{low:+.3f}, {high:+.3f}]  {outcome}")
    print()


# %% Claims


def random_groups(generator, *shape):
    """Rewards of several kinds in one tensor: half the groups 0/1, the others in [0, 1]."""
    rewards = torch.rand(shape, dtype=torch.float64, generator=generator)
    rewards[::2] = (rewards[::2] < 0.4).double()
    return rewards


def autograd_coefficients(rewards, pair_weights):
    """∂/∂ℓ_i of the pairwise loss at θ_t, divided by −2τ/(1+τ)²: what (5.1) and (5.2) give in closed form."""
    logprobs = torch.full_like(rewards, -1.0).requires_grad_()
    loss = pairwise_surrogate_loss(logprobs, logprobs, rewards, tau=TAU, pair_weights=pair_weights)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return gradient / (-2 * TAU / (1 + TAU) ** 2)


def claims_pair_weights(claims, generator):
    """(5.1), (5.2)."""
    rewards = random_groups(generator, 100, 6)
    weights = torch.rand(100, 6, dtype=torch.float64, generator=generator)
    symmetric = torch.rand(100, 6, 6, dtype=torch.float64, generator=generator)
    symmetric = symmetric + symmetric.transpose(-2, -1)
    check(claims, "(5.1) any symmetric w_ij: autograd − formula, 100 groups", expected=0.0, tolerance=1e-12,
          measured=(autograd_coefficients(rewards, symmetric) - pair_coefficients(rewards, symmetric)).abs().max())
    product = weights.unsqueeze(-1) * weights.unsqueeze(-2)
    formula = weights.sum(-1, keepdim=True) / 36 * weights * (rewards - weighted_mean(rewards, weights))
    check(claims, "(5.2) w_ij = w_i·w_j: autograd − formula", expected=0.0, tolerance=1e-12,
          measured=(autograd_coefficients(rewards, product) - formula).abs().max())
    advantages, keep = red_drop(rewards, generator=generator)
    both_kept = (keep.unsqueeze(-1) & keep.unsqueeze(-2)).double()
    check(claims, "…w ∈ {0, 1}: RED-Drop is the loss on the pairs that were kept, times |S|/K²", expected=0.0,
          tolerance=1e-12, measured=(autograd_coefficients(rewards, both_kept)
                                     - keep.double().sum(-1, keepdim=True) / 36 * advantages).abs().max())


def claims_drop(claims, generator):
    """RED-Drop's balance rule and its baseline."""
    advantages, keep = red_drop(ONE_IN_FOUR, generator=generator)
    check(claims, "RED-Drop, [1,1,0×6]: keeps both right answers and two wrong ones", expected=[2, 2],
          measured=[keep[:2].sum(), keep[2:].sum()])
    check(claims, "…advantages, sorted: the baseline is ½, the mean of the kept",
          expected=[-0.5] * 2 + [0.0] * 4 + [0.5] * 2, measured=advantages.sort().values)
    advantages, keep = red_drop(1 - ONE_IN_FOUR)
    check(claims, "…[0,0,1×6]: positives outnumber negatives, nothing is dropped", expected=[0.25] * 6 + [-0.75] * 2,
          measured=advantages.flip(0) * keep.flip(0))
    advantages, keep = red_drop(torch.full((7,), 0.1))
    check(claims, "…[.1]×7 in float32: keeps all, advantages exactly 0", expected=[7, 0, 0], tolerance=0.0,
          measured=[keep.sum(), advantages.min(), advantages.max()])
    rewards = torch.tensor([1.0, 0.8, 0.5, 0.3, 0.1, 0.0, 0.0], dtype=torch.float64)  # 3 positives, 4 negatives
    outcomes = []
    for kept in itertools.combinations(range(3, 7), 3):
        chosen = torch.tensor([0, 1, 2, *kept])
        outcomes.append(torch.zeros(7, dtype=torch.float64).index_put(
            (chosen,), rewards[chosen] - rewards[chosen].mean()))
    check(claims, "…graded rewards: the mean over all choices has a closed form", tolerance=1e-12,
          expected=torch.stack(outcomes).mean(0), measured=expected_red_drop(rewards))


def claims_weight(claims, generator):
    """(5.3), (5.4)."""
    advantages = ONE_IN_FOUR - 0.25
    check(claims, "RED-Weight, [1,1,0×6], T = 1: w·A of right and wrong", tolerance=1e-6,
          expected=[1.587750, -0.194700], measured=(advantages * red_weight(advantages))[[0, -1]])
    rewards = random_groups(generator, 200, 8)
    mean = rewards.mean(-1, keepdim=True)
    for temperature in (0.3, 1.0):
        weights = red_weight(rewards - mean, temperature=temperature)
        pairwise, imitation = red_weight_parts(rewards, temperature=temperature)
        check(claims, f"(5.3) T = {temperature:g}: w·A/K − (pairwise + imitation), 200 groups", expected=0.0,
              tolerance=1e-12, measured=(weights * (rewards - mean) / 8 - pairwise - imitation).abs().max())
        product = weights.unsqueeze(-1) * weights.unsqueeze(-2)
        check(claims, "…and the first part is the loss with w_i·w_j, times K/Σw", expected=0.0, tolerance=1e-12,
              measured=(autograd_coefficients(rewards, product) * 8 / weights.sum(-1, keepdim=True)
                        - pairwise).abs().max())
        shift = weighted_mean(rewards, weights) - mean
        covariance = ((weights - weights.mean(-1, keepdim=True)) * (rewards - mean)).mean(-1, keepdim=True)
        check(claims, "(5.4) r̄_w − r̄ − Cov(w, r)/w̄, and whether it is ≥ 0 everywhere", expected=[0.0, 1.0],
              tolerance=1e-12, measured=[(shift - covariance / weights.mean(-1, keepdim=True)).abs().max(),
                                         float((shift >= 0).all())])
    check(claims, "(5.4) p = .25, T = 1: r̄_w", expected=0.4753668864, tolerance=1e-10,
          measured=weighted_mean(ONE_IN_FOUR, red_weight(advantages))[0])
    rights, temperatures = torch.arange(1, 8), (0.2, 1.0, 5.0)
    groups = (torch.arange(8) < rights[:, None]).double()
    for temperature in temperatures:
        weights = red_weight(groups - groups.mean(-1, keepdim=True), temperature=temperature)
        check(claims, f"(5.4) 1…7 right of 8, T = {temperature:g}: σ(logit p + 1/T)", tolerance=1e-12,
              expected=tilted_success(rights / 8, temperature), measured=weighted_mean(groups, weights)[:, 0])
    pushed = groups - groups.mean(-1, keepdim=True)
    pushed = pushed * red_weight(pushed, temperature=0.5)
    check(claims, "…share of Σ|w·A| that falls on right answers: σ(1/T), for any p (T = .5)",
          expected=[1 / (1 + math.exp(-2))] * 7, measured=(pushed * groups).sum(-1) / pushed.abs().sum(-1))
    check(claims, "…T → ∞ is REINFORCE: w at T = 1e9", expected=torch.ones(8), tolerance=1e-8,
          measured=red_weight(advantages, temperature=1e9))
    shift = weighted_mean(rewards, red_weight(rewards - mean, temperature=1e6)) - mean
    check(claims, "…on the way there T·(r̄_w − r̄) → Var(r): deviation at T = 1e6", expected=0.0, tolerance=1e-6,
          measured=(1e6 * shift[:, 0] - rewards.var(-1, correction=0)).abs().max())


def claims_adaptive(claims):
    """(5.5): the four cases."""
    advantages = torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=torch.float64)

    def found(*lengths):
        return adaptive_temperature(advantages, torch.tensor(lengths))

    check(claims, "(5.5) wrong answers are not the longer ones: no weighting", expected="None, None",
          measured=f"{found(300, 200, 100, 100)}, {found(100, 100, 100, 100)}")
    check(claims, "…lengths 100, 100 | 200, 300: bisection", expected=1.1390625, tolerance=0.0,
          measured=found(100, 100, 200, 300))
    root = 1 / math.log(500 / 200)  # T = 2a/ln(L₋/L₊), a = ½
    check(claims, "…the root in closed form, 2a/ln(L₋/L₊) = 1.0914, is at most .05 lower", expected=True,
          measured=0 <= found(100, 100, 200, 300) - root < 0.05)
    pushes = advantages * red_weight(advantages, temperature=root) * torch.tensor([100, 100, 200, 300])
    check(claims, "…where the pushes on all tokens sum to 0 (without weights: −150)", expected=[0.0, -150.0],
          measured=[pushes.sum(), (advantages * torch.tensor([100, 100, 200, 300])).sum()])
    check(claims, "…wrong answers 10 times as long: the root .43 is below the bracket, T = low", expected=0.8,
          tolerance=0.0, measured=found(100, 100, 1000, 1000))
    check(claims, "…wrong answers longer by 1 in 200: the root 200.5 is above it, T = high", expected=100.0,
          tolerance=0.0, measured=found(100, 100, 100, 101))


def claims_own_data(claims):
    """(5.6): what a shaping can do to the expected update on own samples, and what it cannot."""
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    scores = softmax_scores(probs)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    success = probs @ rewards
    for name, shaping in SHAPINGS.items():
        check(claims, f"(5.6) own samples, 0/1 rewards, all 4⁵ groups: {name} gives g(p)·∇p",
              expected=shaping_gain(success, group_size=5, shaping=shaping) * probs * (rewards - success),
              measured=expected_update(probs, rewards, scores, group_size=5, shaping=shaping), tolerance=1e-12)
    exact = probs * (rewards - success)
    updates = [expected_update(probs, rewards, scores, group_size=5, shaping=s) for s in SHAPINGS.values()]
    check(claims, "…so entropy paid per unit of J gained is the same for all four", tolerance=1e-12,
          expected=[float(slope(probs, exact, -probs.log()) / slope(probs, exact, rewards))] * len(updates),
          measured=[slope(probs, u, -probs.log()) / slope(probs, u, rewards) for u in updates])
    edges = torch.tensor([1e-9, 1 - 1e-9], dtype=torch.float64)
    for name, expected in {"REINFORCE": [7 / 8, 7 / 8], "RED-Drop": [1 / 2, 7 / 8],
                           "RED-Weight T = 1": [7 / 8 * math.exp(7 / 8), 7 / 8 * math.exp(-7 / 8)]}.items():
        check(claims, f"…K = 8, hardest and easiest prompts: g of {name}", expected=expected, tolerance=1e-6,
              measured=shaping_gain(edges, group_size=8, shaping=SHAPINGS[name]))
    rewards = torch.tensor([0.0, 0.8, 1.0, 0.3], dtype=torch.float64)
    exact = probs * (rewards - probs @ rewards)
    turned = {name: torch.cosine_similarity(exact, expected_update(
        probs, rewards, scores, group_size=5, shaping=shaping), dim=0).item() for name, shaping in SHAPINGS.items()}
    check(claims, "…graded rewards: REINFORCE still points along ∇J, RED-Drop and RED-Weight do not", expected=True,
          measured=abs(turned.pop("REINFORCE") - 1) < 1e-12 and max(turned.values()) < 1 - 1e-6)


def claims_shaped_bandit(claims, paths):
    """(5.7): where shaping ends on fixed data."""
    probs = torch.softmax(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), -1)
    advantages = REWARDS - BEHAVIOUR @ REWARDS
    pull = red_weight_pull(BEHAVIOUR, REWARDS, temperature=1.0)
    check(claims, "(5.7) bandit: E_b[w·A·∇ℓ] = c − κ·π_θ", measured=pull - pull.sum() * probs, tolerance=1e-12,
          expected=(BEHAVIOUR * advantages * advantages.exp()) @ softmax_scores(probs))
    # Arms 2 and 3 live: Σ(c_i − λ) = κ = Σc over both, so λ = −c_1/2, and arm 3 lives when c_3 > λ:
    # .042·e^{.42/T} > .087·e^{−.58/T}, that is e^{1/T} > .087/.042.
    survives = 1 / math.log(0.087 / 0.042)
    limits = [red_weight_limit(BEHAVIOUR, REWARDS, temperature=survives * f)[2].item() for f in (1 + 1e-6, 1 - 1e-6)]
    check(claims, "…the right arm survives exactly for T < 1/ln(87/42) = 1.3732", expected=True,
          measured=limits[0] == 0 < limits[1])
    leads = 0.2 / math.log(22 / 7)  # c_3 = c_2: .042·e^{.42/T} = .132·e^{.22/T}
    check(claims, "…and leads for T < .2/ln(22/7) = .1747, where arms 2 and 3 share", expected=[0.0, 0.5, 0.5],
          measured=red_weight_limit(BEHAVIOUR, REWARDS, temperature=leads))
    for name, path in paths.items():
        if name.startswith("RED-Weight"):
            temperature = float(name.split()[-1])
            limit = red_weight_limit(BEHAVIOUR, REWARDS, temperature=temperature)
            check(claims, f"…{name}: the path ends at the projection of c/κ", expected=limit, tolerance=1e-6,
                  measured=torch.softmax(path[-1], -1))
        else:
            check(claims, f"…{name}: ends on arm 2, the wrong one, without any entropy", tolerance=1e-6,
                  expected=[0.0, 1.0, 0.0, 0.0], measured=torch.cat([torch.softmax(path[-1], -1), entropy(
                      torch.softmax(path[-1], -1))[None]]))


def claims_expert(claims, expert):
    """One good response in a poor batch."""
    for name in ("REINFORCE", "RED-Drop"):
        check(claims, f"expert batch, {name}: the method that all share is never learned, P = ¼", expected=0.25,
              measured=expert[name][-1, 0])
    answers = (BATCH_SECOND_TOKEN == 1).double()
    for name in ("RED-Weight T = 1", "RED-Weight T = .5"):
        check(claims, f"…{name}: learned by imitation, P(method) and P(answer | method) > .95", expected=True,
              measured=bool((expert[name][-1] > 0.95).all()))
    pushes = [SHAPINGS[name](answers).mean() for name in ("REINFORCE", "RED-Drop", "RED-Weight T = 1")]
    check(claims, "…the push on the shared token, Σ w·A/K: 0, 0 and 7/64·(e^{7/8} − e^{−1/8})",
          expected=[0.0, 0.0, 7 / 64 * (math.exp(7 / 8) - math.exp(-1 / 8))], measured=pushes)


def claims_data_friends(claims, generator):
    """Neighbours that change the data: DAPO, SGPO, AEPO, ICPO."""
    rewards = random_groups(generator, 64, 4)
    advantages, informative = rewards - rewards.mean(-1, keepdim=True), informative_groups(rewards)
    check(claims, "DAPO: flat groups add nothing, so dropping them only rescales the batch mean", tolerance=1e-12,
          expected=advantages.mean(0) * 64 / informative.sum(), measured=advantages[informative].mean(0))
    group = enumerate_groups(2, 8).double()
    share = (0.25**group * 0.75 ** (1 - group)).prod(-1) @ informative_groups(group).double()
    check(claims, "…p = .25, K = 8: groups drawn for each one kept, 1/(1 − p⁸ − (1−p)⁸)",
          expected=1 / (1 - 0.25**8 - 0.75**8), measured=1 / share)
    right_steps = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    check(claims, "SGPO: graded reward for 0, half and all leading steps right", tolerance=1e-7,
          expected=[0.0758582, 0.5, 0.9241418], measured=graded_reward(right_steps))
    probs = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    # E over samples at temperature T of ∇log π is π_T − π.
    moves = [slope(probs, tempered(probs, temperature=t) - probs, -probs.log()) for t in (1.2, 0.8)]
    check(claims, "AEPO, π = [.7,.2,.1]: entropy moves up at T = 1.2 and down at .8", tolerance=1e-7,
          expected=[0.0255595, -0.0333072], measured=moves)
    # Why the sign is certain: the slope is −Σ π²·(w−1)·(log π + H) with w = π_T/π. For T > 1, w falls as log π rises.
    # Under weights ∝ π² the two are anticorrelated, w has a mean ≤ 1 and log π one ≥ −H: the sum is ≤ 0.
    random = torch.softmax(3 * torch.randn(200, 6, dtype=torch.float64, generator=generator), -1)
    up, down = ([slope(p, tempered(p, temperature=t) - p, -p.log()) for p in random] for t in (1.2, 0.8))
    check(claims, "…for any policy: the same signs for 200 random ones", expected=True,
          measured=bool(min(up) > 0 > max(down)))
    plain = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    right = torch.tensor(1.0, dtype=torch.float64)
    check(claims, "ICPO, 1 of 7 plain answers and the hinted one right, step 0: plain right, plain wrong, hinted",
          expected=[0.840026, -0.504015, 2.184067], tolerance=1e-6,
          measured=icpo_advantages(plain, right, step=0)[[0, 1, -1]])
    check(claims, "…f(x) = x/(x + .1) at x = .1 and 1, and f(x)/x → 10 for rare tokens", tolerance=1e-6,
          expected=[1 / 2, 10 / 11, 10.0], measured=[hint_weight(0.1), hint_weight(1.0), hint_weight(1e-9) / 1e-9])


def claims_shaped_world(claims, curves):
    """What holds in the stale world; the verdicts printed above it may go either way."""
    fresh = curves["fresh (1, 0)"]
    check(claims, "stale world, fresh data: clipping cannot act, RED-Weight with and without it agree", expected=0.0,
          tolerance=1e-12, measured=(fresh["RED-Weight T = 1"] - fresh["RED-Weight T = 1, clipped"]).abs().max())
    for setting in list(curves)[1:]:
        final = {name: float(curve[:, -1].mean()) for name, curve in curves[setting].items()}
        check(claims, f"…{setting}: RED-Weight T = 1 ends above REINFORCE, mean over seeds", expected=True,
              measured=final["RED-Weight T = 1"] > final["REINFORCE"])
        if setting != "offline":
            check(claims, f"…{setting}: its imitation alone does better than its pairwise part alone", expected=True,
                  measured=final["… only REINFORCE + its imitation"] > final["… only its pairwise part"])


# %% Figures


def figure_own_data(directory, expert):
    """Left: the pace that a shaping gives a prompt. Right: one good response in a poor batch."""
    fig, (left, right) = figure(2)
    rates = torch.linspace(0.001, 0.999, 499, dtype=torch.float64)
    grpo = functools.partial(group_advantages, std_normalize=True)
    for name, shaping in {**SHAPINGS, "GRPO (divided by std)": grpo}.items():
        left.plot(rates, shaping_gain(rates, group_size=8, shaping=shaping), label=name)
    left.set(title="On own samples shaping only sets each prompt's pace", xlabel="success rate p of the prompt",
             ylabel="expected update / ∇p   (K = 8)", ylim=(0, 6))
    left.legend()
    for name, path in expert.items():
        right.plot(path.prod(-1), label=name)
    right.set(title="One right answer among near misses: weights imitate it", xlabel="update on the same 8 responses",
              ylabel="probability of the right response", ylim=(0, 1.02))
    right.annotate("¼: the shared method is not learned", (200, 0.17), ha="right", color="0.4")
    right.legend(loc="center right")
    return save_figure(fig, directory, "05_own_data")


def figure_shaped_bandit(directory, paths):
    """Left: where RED-Weight ends for each T. Middle and right: J and entropy on the way."""
    fig, (left, middle, right) = figure(3, width=3.3, height=2.8)
    temperatures = torch.logspace(-1.3, 0.5, 200, dtype=torch.float64)
    limits = torch.stack([red_weight_limit(BEHAVIOUR, REWARDS, temperature=float(t)) for t in temperatures])
    left.plot(temperatures, limits)
    for text, place, (color, _) in zip(("arm 1, reward 0", "arm 2, reward .8", "arm 3, reward 1"),
                                       ((0.09, 0.03), (0.085, 0.15), (0.075, 0.91)), STYLES):
        left.annotate(text, place, color=color)
    for name, path in paths.items():
        if name.startswith("RED-Weight"):
            left.plot([float(name.split()[-1])] * 3, torch.softmax(path[-1], -1), "ok", markersize=4, zorder=3)
    left.annotate("dots: trained", (0.4, 0.47), color="0.4", fontsize=8)
    left.axvline(1 / math.log(87 / 42), color="0.6", linewidth=1, linestyle="-")
    left.annotate("T = 1.37", (1.45, 0.75), color="0.4", fontsize=8)
    ticks = [0.1, 0.3, 1, 3]
    left.set(title="RED-Weight: a low T saves the right arm", xscale="log", xlabel="temperature T of exp(A/T)",
             ylabel="probability in the end", xticks=ticks, xticklabels=ticks)
    left.minorticks_off()
    middle.axhline(0.8, color="0.8", linewidth=0.8, linestyle="-", zorder=0)
    for name, path in paths.items():
        probs = torch.softmax(path, -1)
        middle.plot(probs @ REWARDS, label=name)
        right.plot(entropy(probs), label=name)
    middle.set(title="…so J ends above arm 2's .8", xlabel="step (η = 1)", ylabel="expected reward J", xlim=(0, 100))
    middle.legend(loc="lower right", fontsize=8)
    right.set(title="…and entropy stays above 0", xlabel="step (η = 1)", ylabel="entropy", xlim=(0, 100),
              ylim=(0, 1.12))
    return save_figure(fig, directory, "05_bandit")


def figure_shaped_world(directory, curves):
    """J along the training, mean over seeds, one panel per setting; at the right its 95 % interval at the end."""
    shown = ["REINFORCE", "GRPO", "RED-Drop", "RED-Weight T = 1", "RED-Weight T = .3", "RED-Weight T = 1, clipped"]
    fig, axes = figure(len(curves), width=2.35, height=2.65, sharey=True)
    for axis, (setting, methods) in zip(axes, curves.items()):
        for place, name in enumerate(shown):
            mean, low, high = interval(methods[name].T)
            steps = len(mean) - 1
            (line,) = axis.plot(range(0, steps + 1, 4), mean[::4], label=name)
            end = steps * (1.04 + 0.04 * place)
            axis.plot([end, end], [low[-1], high[-1]], color=line.get_color(), linestyle="-", linewidth=2.5)
        axis.set(title=setting, xlabel="training step", xticks=[0, steps // 2, steps])
    axes[0].set(ylabel="exact J", ylim=(0.2, 1.0))
    fig.suptitle("On stale data RED-Weight keeps what REINFORCE and RED-Drop lose; on fresh data it buys nothing")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, columnspacing=1.2,
               title="lines: mean over seeds; bars: its 95 % interval at the end")
    return save_figure(fig, directory, "05_stale_world")


# %% Exercises: python 05_data_shaping.py --exercise 1


def kept_responses(rewards):
    """How many responses red_drop keeps."""
    return red_drop(rewards)[1].sum(-1)


def pair_product_gradient(rewards, weights, tau):
    """∂L̂/∂ℓ_i at θ_t, scaled, for w_ij = w_i·w_j."""
    product = weights.unsqueeze(-1) * weights.unsqueeze(-2)
    return -2 * tau / (1 + tau) ** 2 * pair_coefficients(rewards, product)


GRADED = torch.tensor([0.2, 0.4, 0.4, 1.0], dtype=torch.float64)
EXERCISES = {
    1: ("kept_responses", "How many responses RED-Drop keeps in each group: rewards (..., K), also float32 → (...).",
        kept_responses, [(ONE_IN_FOUR,), (1 - ONE_IN_FOUR,), (GRADED,), (torch.full((2, 7), 0.1),)]),
    2: ("pair_product_gradient",
        "(5.2): the gradient of the scaled loss in each ℓ_i at θ_t; rewards, weights (K,), tau a number → (K,).",
        pair_product_gradient, [(GRADED, torch.ones(4, dtype=torch.float64), 0.5), (GRADED, GRADED + 0.1, 2.0)]),
    3: ("tilted_success", "(5.4): mean reward of a 0/1 group with success rate `success`, weighted by exp(A/T).",
        tilted_success, [(0.25, 1.0), (0.5, 0.2), (0.9, 5.0)]),
}


def main(argv=None):
    args = lesson_arguments(__doc__, argv)
    if args.exercise is not None:
        run_exercise(EXERCISES, args)
    torch.set_num_threads(1)  # tensors this small lose more time between threads than they gain
    generator = seed_everything(args.seed)
    claims = []
    claims_pair_weights(claims, generator)
    claims_drop(claims, generator)
    claims_weight(claims, generator)
    claims_adaptive(claims)
    claims_own_data(claims)
    paths = bandit_paths(steps=1500, step_size=1.0)
    claims_shaped_bandit(claims, paths)
    expert = {name: train_on_expert_batch(shaping, steps=200) for name, shaping in SHAPINGS.items()}
    claims_expert(claims, expert)
    claims_data_friends(claims, generator)
    seeds, steps = (8, 60) if args.quick else (20, 120)
    curves = run_shaped(seeds=seeds, seed=args.seed, steps=steps)
    claims_shaped_world(claims, curves)
    print_shaped(curves, shaping_verdicts(curves), seeds=seeds, steps=steps)
    figure_own_data(args.out, expert)
    figure_shaped_bandit(args.out, paths)
    figure_shaped_world(args.out, curves)
    finish(claims, args)


if __name__ == "__main__":
    main()
