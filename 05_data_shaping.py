"""Lesson 05: shape the data. Drop or weigh the responses of a group, and know exactly what that does.

Claim. Lesson 03 allowed any data, so the data may be chosen: RED-Drop leaves responses out, RED-Weight counts good
ones more. Both follow from weights on the pairs of lesson 03's loss, up to one extra term: weighted imitation.

Equations checked here (section 5 of arXiv 2509.24203 and what follows from it). A group of K responses with rewards
r_i, r̄ their mean, A_i = r_i − r̄, ℓ_i = log π_θ(y_i), d_i = ℓ_i − log π_t(y_i), a_i = r_i − τ·d_i:

  (5.1)  the loss (1/K²) Σ_{i<j} w_ij·(a_i − a_j)²/(1+τ)² has, at θ_t where d = 0, the gradient
             −2τ/(1+τ)² · (1/K²) Σ_i [Σ_j w_ij·(r_i − r_j)]·∇ℓ_i
  (5.2)  for w_ij = w_i·w_j:  −2τ/(1+τ)² · (Σw/K²) Σ_i w_i·(r_i − r̄_w)·∇ℓ_i,   r̄_w = Σ w_i·r_i / Σ w_i.
         w ∈ {0, 1} is RED-Drop: the baseline is the mean of what was KEPT.
  (5.3)  RED-Weight is (1/K) Σ w_i·(r_i − r̄)·∇ℓ_i with w_i = exp(A_i/T) and the PLAIN mean r̄. It splits into
             (1/K) Σ w_i·(r_i − r̄_w)·∇ℓ_i  +  (r̄_w − r̄)·(1/K) Σ w_i·∇ℓ_i
         (5.2), so REINFORCE                  imitation of the group, the good ones most
  (5.4)  r̄_w − r̄ = Cov(w, r)/w̄ ≥ 0. Rewards 0 or 1 with success rate p: r̄_w = σ(logit p + 1/T).
  (5.5)  adaptive temperature: the T with Σ A_i·exp(A_i/T)·L_i = 0, L_i response lengths   (arXiv 2606.20002)
  (5.6)  on a policy's OWN samples and rewards 0 or 1, any shaping by reward gives g(p)·∇p on average: it sets the pace
         of a prompt and cannot turn its gradient. To change the direction takes other data or graded rewards.
  (5.7)  on fixed data π_b a softmax bandit moves by c − κ·π_θ, with c = π_b·w·(r − μ) and κ = Σc. RED-Weight pulls
         against a wrong arm's lead by κ·π_θ and ends at the projection of c/κ onto the simplex.

How to run:  python 05_data_shaping.py       (--quick: fewer seeds and steps; --exercise N: check your own answer)
What you see: a table of claims, a table of the stale world, and three figures, after about 15 seconds.
Before it:   lesson 04 regularised the update and took the data as they came. Here the update is plain REINFORCE
             and the data change. Both principles can be combined, and the last experiment does.

symbol    name in the code      shape      meaning
r, A      rewards, advantages   (..., K)   the last dimension is one group: K responses to the same prompt
w         red_weight            (..., K)   weight of each response;  w_ij: pair_weights (..., K, K), of each pair
          keep                  (..., K)   False for a response that RED-Drop leaves out
π_b, μ    behaviour_probs       (A,)       where the bandit's data come from, and their mean reward E_b r
"""

import itertools
import math

import torch

from utils import check, figure, finish, lesson_arguments, run_exercise, save_figure, seed_everything

# The 3-arm bandit of lesson 03: the data prefer arm 2, the rewards prefer arm 3.
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)
ONE_IN_FOUR = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
TAU = 0.5


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


# %% Weights on pairs: from lesson 03's loss to RED


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
    """(1/K²) Σ_j w_ij·(r_i − r_j): the weight of ∇ℓ_i in (5.1), but for −2τ/(1+τ)². (..., K), (..., K, K) → (..., K)."""
    difference = rewards.unsqueeze(-1) - rewards.unsqueeze(-2)
    return (pair_weights * difference).sum(-1) / rewards.shape[-1] ** 2


def weighted_mean(rewards, weights):
    """r̄_w = Σ w_i·r_i / Σ w_i of each group, with the last dimension kept: (..., K), (..., K) → (..., 1)."""
    return (weights * rewards).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)


def red_weight_parts(rewards, *, temperature):
    """The two parts of RED-Weight as weights of ∇ℓ_i, (pairwise REINFORCE, imitation), both (..., K); equation (5.3)."""
    mean = rewards.mean(-1, keepdim=True)
    weights = red_weight(rewards - mean, temperature=temperature)
    tilted = weighted_mean(rewards, weights)
    return weights * (rewards - tilted) / rewards.shape[-1], weights * (tilted - mean) / rewards.shape[-1]


def tilted_success(success, temperature):
    """r̄_w of a group with rewards 0 or 1 and success rate p in (0, 1): σ(logit p + 1/T), equation (5.4).

    exp(A_i/T) = exp(r_i/T)·constant, so weighting multiplies the odds of "right" by e^{1/T}, whatever K is.
    """
    success = torch.as_tensor(success, dtype=torch.float64)
    return torch.sigmoid(torch.logit(success) + 1 / temperature)


def expected_red_drop(rewards):
    """E[advantages] of red_drop over its random choice, exactly: (..., K) → (..., K).

    With p positives and n > p negatives, each negative survives with probability p/n, and then shares the place with
    p − 1 of the other n − 1. A dropped response counts as advantage 0.
    """
    mean = rewards.mean(-1, keepdim=True)
    positive = rewards >= mean - 4 * torch.finfo(rewards.dtype).eps * rewards.abs().amax(-1, keepdim=True)
    p, n = (side.sum(-1, keepdim=True).to(rewards.dtype) for side in (positive, ~positive))
    sum_positive = torch.where(positive, rewards, 0.0).sum(-1, keepdim=True)
    sum_negative = torch.where(positive, 0.0, rewards).sum(-1, keepdim=True)
    survives = p / n.clamp(min=1)
    beside = rewards + (p - 1) / (n - 1).clamp(min=1) * (sum_negative - rewards)  # itself and its expected neighbours
    balanced = torch.where(positive, rewards - (sum_positive + survives * sum_negative) / (2 * p),
                           survives * (rewards - (sum_positive + beside) / (2 * p)))
    return torch.where(n > p, balanced, rewards - mean)


# %% The policy's own samples: shaping sets the pace

# Each shaping as a function from rewards (..., K) to the EXPECTED weight A of every ∇ℓ_i; the 1/K is outside.
SHAPINGS = {
    "REINFORCE": lambda r: r - r.mean(-1, keepdim=True),
    "RED-Drop": expected_red_drop,
    "RED-Weight T = 1": lambda r: sum(red_weight_parts(r, temperature=1.0)) * r.shape[-1],
    "RED-Weight T = .5": lambda r: sum(red_weight_parts(r, temperature=0.5)) * r.shape[-1],
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
    if ((success_rate <= 0) | (success_rate >= 1)).any():
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


def red_weight_pull(behaviour_probs, rewards, *, temperature):
    """c = π_b·w·(r − μ) with w = exp((r − μ)/T), the pull on each logit in (5.7): (A,), (A,) → (A,). κ is its sum."""
    advantages = rewards - behaviour_probs @ rewards
    return behaviour_probs * red_weight(advantages, temperature=temperature) * advantages


def project_to_simplex(point):
    """The nearest probability vector to `point` (A,): (x − λ)₊ with the λ that makes the sum 1 ("water-filling")."""
    sorted_point = point.sort(descending=True).values
    level = (sorted_point.cumsum(-1) - 1) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    return (point - level[sorted_point > level][-1]).clamp(min=0)


def red_weight_limit(behaviour_probs, rewards, *, temperature):
    """Where RED-Weight ends on infinitely many data from π_b: the projection of c/κ, equation (5.7). (A,).

    dθ/dt = c − κ·π_θ climbs the concave c·θ − κ·log Σ e^θ. It comes to rest where all living logits move at one speed:
    c_i − κ·π_i = λ for π_i > 0, and a dead arm is one that cannot keep up, c_i ≤ λ.
    """
    pull = red_weight_pull(behaviour_probs, rewards, temperature=temperature)
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
    """SGPO (arXiv 2505.11595): 1/(1 + exp(−β(RTS − γ))), for a wrong answer in an all-wrong group; β, γ = steepness, centre.

    right_steps: RTS, the share of leading steps that are right, in [0, 1], any shape.
    """
    if ((right_steps < 0) | (right_steps > 1)).any():
        raise ValueError("right_steps is the share of right leading steps and must lie in [0, 1]")
    return torch.sigmoid(steepness * (right_steps - centre))


def tempered(probs, *, temperature):
    """π^{1/T}/Z over the last dimension: what sampling at temperature T draws from."""
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

    A right hinted answer (reward > 0) gets the bonus 1 − step/decay, which ends at step = decay (the end is our reading).
    """
    bonus = max(0.0, 1 - step / decay)
    hinted = torch.where(hinted_reward > 0, hinted_reward + bonus, hinted_reward)
    pool = torch.cat([plain_rewards, hinted.unsqueeze(-1)], -1)
    advantages = (pool - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    return torch.where(informative_groups(pool).unsqueeze(-1), advantages, 0.0)

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
    check(claims, "(5.1) any symmetric w_ij: autograd − formula, largest over 100 groups", expected=0.0, tolerance=1e-12,
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
    check(claims, "…advantages, sorted: the baseline is ½, the mean of the kept", expected=[-0.5] * 2 + [0.0] * 4 + [0.5] * 2,
          measured=advantages.sort().values)
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
    check(claims, "…graded rewards: the mean over all choices has a closed form", expected=torch.stack(outcomes).mean(0),
          measured=expected_red_drop(rewards), tolerance=1e-12)


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
    check(claims, "…the root in closed form, 2a/ln(L₋/L₊)", expected=1.0913567, measured=root, tolerance=1e-7)
    pushes = advantages * red_weight(advantages, temperature=root) * torch.tensor([100, 100, 200, 300])
    check(claims, "…where the pushes on all tokens sum to 0 (without weights: −150)", expected=[0.0, -150.0],
          measured=[pushes.sum(), (advantages * torch.tensor([100, 100, 200, 300])).sum()])
    check(claims, "…wrong answers 10 times as long: the root .43 is below the bracket, T = low", expected=0.8,
          tolerance=0.0, measured=found(100, 100, 1000, 1000))
    check(claims, "…wrong answers longer by 1 in 200: the root 200.5 is above it, T = high", expected=100.0,
          tolerance=0.0, measured=found(100, 100, 100, 101))


def claims_own_data(claims, generator):
    """(5.6): what a shaping can do to the expected update on own samples, and what it cannot."""
    logits = torch.randn(4, dtype=torch.float64, generator=generator)
    probs = torch.softmax(logits, -1)
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


def claims_bandit(claims, paths):
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
    check(claims, "…p = .25, K = 8: groups drawn for each one kept, 1/(1 − p⁸ − (1−p)⁸)", expected=1 / (1 - 0.25**8 - 0.75**8),
          measured=1 / share)
    check(claims, "SGPO: graded reward for 0, half and all leading steps right", tolerance=1e-7,
          expected=[0.0758582, 0.5, 0.9241418], measured=graded_reward(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)))
    probs = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    # E over samples at temperature T of ∇log π is π_T − π.
    moves = [slope(probs, tempered(probs, temperature=t) - probs, -probs.log()) for t in (1.2, 0.8)]
    check(claims, "AEPO, π = [.7,.2,.1]: entropy moves up at T = 1.2 and down at .8", tolerance=1e-7,
          expected=[0.0255595, -0.0333072], measured=moves)
    # Why the sign is certain: the slope is −Σ π²·(w−1)·(log π + H) with w = π_T/π. For T > 1, w falls where log π rises.
    # Under weights ∝ π² the two are anticorrelated, the mean of w is ≤ 1 and that of log π is ≥ −H: the sum is ≤ 0.
    random = torch.softmax(3 * torch.randn(200, 6, dtype=torch.float64, generator=generator), -1)
    up, down = ([slope(p, tempered(p, temperature=t) - p, -p.log()) for p in random] for t in (1.2, 0.8))
    check(claims, "…for any policy: the same signs for 200 random ones", expected=True,
          measured=bool(min(up) > 0 > max(down)))
    plain = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    right = torch.tensor(1.0, dtype=torch.float64)
    check(claims, "ICPO: one right plain answer of 7 and a right hinted one, at step 0: plain right, plain wrong, hinted",
          expected=[0.840026, -0.504015, 2.184067], tolerance=1e-6,
          measured=icpo_advantages(plain, right, step=0)[[0, 1, -1]])
    check(claims, "…f(x) = x/(x + .1) at x = .1 and 1, and f(x)/x → 10 for rare tokens", tolerance=1e-6,
          expected=[1 / 2, 10 / 11, 10.0], measured=[hint_weight(0.1), hint_weight(1.0), hint_weight(1e-9) / 1e-9])


# %% Figures


def figure_own_data(directory, expert):
    """Left: the pace that a shaping gives a prompt. Right: one good response in a poor batch."""
    fig, (left, right) = figure(2)
    rates = torch.linspace(0.001, 0.999, 499, dtype=torch.float64)
    grpo = {"GRPO (divided by std)": lambda r: (r - r.mean()) / (r.std(correction=0) + 1e-6)}
    for name, shaping in {**SHAPINGS, **grpo}.items():
        left.plot(rates, shaping_gain(rates, group_size=8, shaping=shaping), label=name)
    left.set(title="On own samples shaping only sets each prompt's pace", xlabel="success rate p of the prompt",
             ylabel="expected update / ∇p   (K = 8)", ylim=(0, 6))
    left.legend()
    for name, path in expert.items():
        right.plot(path.prod(-1), label=name)
    right.set(title="One right answer in a batch of near misses", xlabel="update on the same 8 responses",
              ylabel="probability of the right response", ylim=(0, 1.02))
    right.annotate("¼: the method that all eight share is not learned", (200, 0.2), ha="right", color="0.4")
    right.legend(loc="center right")
    return save_figure(fig, directory, "05_own_data")


def figure_bandit(directory, paths, *, step_size):
    """Left: where RED-Weight ends for each T. Middle and right: J and entropy on the way."""
    fig, (left, middle, right) = figure(3, width=3.9)
    temperatures = torch.logspace(-1.3, 0.5, 200, dtype=torch.float64)
    limits = torch.stack([red_weight_limit(BEHAVIOUR, REWARDS, temperature=float(t)) for t in temperatures])
    left.plot(temperatures, limits)
    for text, place in (("arm 1, reward 0", (0.055, 0.03)), ("arm 2, reward .8", (0.38, 0.76)),
                        ("arm 3, reward 1", (0.38, 0.37))):
        left.annotate(text, place)
    for name, path in paths.items():
        if name.startswith("RED-Weight"):
            left.plot([float(name.split()[-1])] * 3, torch.softmax(path[-1], -1), "ok", markersize=4, zorder=3)
    left.annotate("dots: trained", (1.45, 0.4), color="0.4")
    left.axvline(1 / math.log(87 / 42), color="0.6", linewidth=1, linestyle="-")
    left.annotate("T = 1.37", (1.45, 0.5), color="0.4")
    ticks = [0.1, 0.3, 1, 3]
    left.set(title="RED-Weight: a low T saves the right arm", xscale="log", xlabel="temperature T of exp(A/T)",
             ylabel="probability in the end", xticks=ticks, xticklabels=ticks)
    left.minorticks_off()
    middle.axhline(0.8, color="0.8", linewidth=0.8, linestyle="-", zorder=0)
    for name, path in paths.items():
        probs = torch.softmax(path, -1)
        time = step_size * torch.arange(len(path))
        middle.plot(time, probs @ REWARDS, label=name)
        right.plot(time, entropy(probs), label=name)
    middle.set(title="…so J ends above arm 2's .8", xlabel="ηt", ylabel="J", xlim=(0, 100))
    middle.legend(loc="lower right", fontsize=8)
    right.set(title="…and entropy stays above 0", xlabel="ηt", ylabel="entropy of π_θ", xlim=(0, 100), ylim=(0, 1.12))
    return save_figure(fig, directory, "05_bandit")


# %% Exercises: write the function in exercise_N.py, then `python 05_data_shaping.py --exercise N`


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
    generator = seed_everything(args.seed)
    claims = []
    claims_pair_weights(claims, generator)
    claims_drop(claims, generator)
    claims_weight(claims, generator)
    claims_adaptive(claims)
    claims_own_data(claims, generator)
    step_size = 0.5
    paths = bandit_paths(steps=4000, step_size=step_size)
    claims_bandit(claims, paths)
    expert = {name: train_on_expert_batch(shaping, steps=200) for name, shaping in SHAPINGS.items()}
    claims_expert(claims, expert)
    claims_data_friends(claims, generator)
    figure_own_data(args.out, expert)
    figure_bandit(args.out, paths, step_size=step_size)
    finish(claims, args)


if __name__ == "__main__":
    main()
