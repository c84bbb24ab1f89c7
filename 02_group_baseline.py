"""Lesson 02: the group mean as a baseline, and what is usually added to it.

Claim. The mean reward of K responses to one prompt is a baseline for free: it multiplies the expected gradient
by exactly (K−1)/K and does not turn it. The usual additions are not free: dividing by the group's standard deviation
re-weights the prompts, and averaging inside each response makes right answers shorter and wrong answers longer.

Equations checked here, each by summing over EVERY group (section 2 of arXiv 2509.24203 starts from (2.1)). K responses
y_i ~ π with rewards r_i, r̄ their mean, A_i = r_i − r̄, s = ∇ log π, J = E_π r, p = J when rewards are 0 or 1:
  (2.1)  E[(1/K) Σ_i A_i s_i] = (K−1)/K · ∇J;   leave-one-out, A_i = K/(K−1)·(r_i − r̄), gives ∇J
  (2.2)  leave-one-out is an average over pairs of h = ½(r_1 − r_2)(s_1 − s_2), so its total variance is
         2/(K(K−1)) · (2(K−2) ζ₁ + ζ₂),   ζ₁ = Var E[h | y_1],  ζ₂ = Var h       (lesson 03 starts from such pairs)
  (2.3)  E[(1/K) Σ_i (A_i/σ) s_i] = g_K(p) · ∇p,  g_K(p) = E[σ] / (p(1−p)), which is 1/√(p(1−p)) for K → ∞ and
         √(K−1) for p → 0 or 1 (σ: the group's population standard deviation)
  (2.4)  a group is flat, so silent, with probability p^K + (1−p)^K
  (2.5)  four denominators for one sum over tokens, and the length bias of two of them
  (2.6)  p_n = 1 / (1 + (1−p_ref)/p_ref · exp(−(A₊ − A₋)/β)):   GRPO's success amplification (arXiv 2503.06639)

How to run:  python 02_group_baseline.py       (--quick: fewer updates; --exercise N: check your own answer)
What you see: a table of claims after about 5 seconds, and in figures/ the pictures 02_group_mean, 02_length_bias and
              02_success_amplification.
Before it:   lesson 01's good baselines had to know J. Here the other responses to the same prompt supply it.

symbol    tensor        shape        meaning
r         rewards       (..., K)     the last dimension is one group: K responses to the same prompt
A         advantages    (..., K)
          per_token     (..., B, T)  loss of each token of B responses; mask: True where there is a token
π(y), s   probs, scores (N,), (N, P) probability and ∇_θ log π of each of the N possible responses
"""

import math

import torch

import utils

# %% The two functions that the training script copies: rewards to advantages, token losses to one number


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


def prompt_groups(prompt_ids):
    """Which responses belong together: (N,) prompt ids in any order → (prompts, K) positions, one row per prompt.

    advantages[groups] = group_advantages(rewards[groups]) is then right for [p1, p1, p2, p2] and for [p1, p2, p1, p2];
    a bare rewards.view(-1, K) is right for the first only, and nothing tells you. ValueError: unequal group sizes, or
    ids that are not (N,) with N > 0.
    """
    if prompt_ids.dim() != 1 or len(prompt_ids) == 0:
        raise ValueError(f"prompt_ids must be (N,), one id per response, not {tuple(prompt_ids.shape)}")
    _, counts = torch.unique(prompt_ids, return_counts=True)
    if (counts != counts[0]).any():
        raise ValueError(f"every prompt needs the same number of responses, got {counts.tolist()}")
    return torch.argsort(prompt_ids, stable=True).view(len(counts), -1)


def enumerate_groups(responses, group_size):
    """All ordered groups: (responses ** group_size, group_size) indices."""
    return torch.cartesian_prod(*[torch.arange(responses)] * group_size).view(-1, group_size)


def require_distribution(probs):
    """Raise ValueError unless the last dimension of `probs` is a probability distribution."""
    if (probs < 0).any() or not torch.allclose(probs.sum(-1), torch.ones_like(probs.sum(-1)), atol=1e-6):
        raise ValueError("probabilities must be ≥ 0 and sum to 1 over all responses; normalise them first")


def group_estimator_moments(probs, rewards, scores, *, group_size, **options):
    """Exact mean (P,) and total variance of g = (1/K) Σ_i A_i s_i with K independent responses from probs  (2.1).

    probs, rewards: (N,). scores: (N, P). `options` go to group_advantages.
    """
    require_distribution(probs)
    if not probs.shape == rewards.shape == scores.shape[:1]:
        raise ValueError("probs, rewards and scores need one entry per response, (N,), (N,) and (N, P), not "
                         f"{tuple(probs.shape)}, {tuple(rewards.shape)} and {tuple(scores.shape)}")
    groups = enumerate_groups(len(probs), group_size)
    weight = probs[groups].prod(-1)
    advantages = group_advantages(rewards[groups], **options)
    estimates = torch.einsum("gk,gkp->gp", advantages, scores[groups]) / group_size
    mean = weight @ estimates
    return mean, weight @ (estimates - mean).square().sum(-1)


def leave_one_out_variance(probs, rewards, scores, *, group_size):
    """Total variance of the leave-one-out estimator from single pairs: Hoeffding's formula for a U-statistic  (2.2)."""
    require_distribution(probs)
    if group_size < 2:
        raise ValueError(f"leave-one-out needs another response: group_size ≥ 2, not {group_size}")
    pair = 0.5 * (rewards[:, None] - rewards)[..., None] * (scores[:, None] - scores)
    given_first = torch.einsum("j,ijp->ip", probs, pair)
    mean = probs @ given_first
    zeta_1 = probs @ (given_first - mean).square().sum(-1)
    zeta_2 = torch.einsum("i,j,ij->", probs, probs, (pair - mean).square().sum(-1))
    return 2 / (group_size * (group_size - 1)) * (2 * (group_size - 2) * zeta_1 + zeta_2)


def std_gain(success_rate, *, group_size):
    """g_K(p) = E[σ] / (p(1−p)): how much std-normalised advantages scale ∇p of a prompt, rewards 0/1  (2.3).

    success_rate: (...) in (0, 1). With plain advantages the factor is (K−1)/K for every prompt.
    """
    if group_size < 2 or not ((success_rate > 0) & (success_rate < 1)).all():
        raise ValueError("need group_size ≥ 2 and 0 < success_rate < 1: otherwise every group is flat")
    successes = torch.arange(group_size + 1, dtype=torch.float64)
    ways = torch.tensor([math.comb(group_size, k) for k in range(group_size + 1)], dtype=torch.float64)
    p = success_rate[..., None]
    probability = ways * p**successes * (1 - p) ** (group_size - successes)
    share = successes / group_size
    return (probability * (share * (1 - share)).sqrt()).sum(-1) / (success_rate * (1 - success_rate))


def flat_group_share(success_rate, *, group_size):
    """Probability that all K rewards are equal, rewards 0/1: p^K + (1−p)^K  (2.4)."""
    if group_size < 1 or not torch.as_tensor((success_rate >= 0) & (success_rate <= 1)).all():
        raise ValueError(f"need group_size ≥ 1 and 0 ≤ success_rate ≤ 1, got {group_size} and {success_rate}")
    return success_rate**group_size + (1 - success_rate) ** group_size


# %% A policy that chooses nothing but its length


def stopping_model(stop_logits, *, success_rate, max_length):
    """A policy that chooses nothing but its length: all 2T outcomes, T = max_length, half of them right answers.

    A coin that is not trained makes the answer right (reward 1) with probability success_rate. Then every token ends
    the response with probability sigmoid(stop_logits[0]) if right and sigmoid(stop_logits[1]) if wrong; token T is the
    last in any case. The reward does not see the length, so the true gradient with respect to stop_logits is 0.
    Returns logprobs (2T, T), mask (2T, T), rewards (2T,), probs (2T,).
    """
    length = torch.arange(1, max_length + 1).repeat(2)
    branch = torch.arange(2).repeat_interleave(max_length)
    position = torch.arange(1, max_length + 1)
    goes_on = torch.nn.functional.logsigmoid(-stop_logits)[branch][:, None]
    stops = torch.nn.functional.logsigmoid(stop_logits)[branch][:, None]
    mask = position <= length[:, None]
    logprobs = torch.where(position < length[:, None], goes_on, stops)
    logprobs = torch.where(mask & (position < max_length), logprobs, 0.0)  # the cut at T is no decision
    rewards = 1.0 - branch.double()
    coin = rewards * success_rate + (1 - rewards) * (1 - success_rate)
    return logprobs, mask, rewards, coin * logprobs.sum(-1).exp()


def expected_length_gradient(stop_logits, *, mode, constant=None, group_size=3, success_rate=0.5, max_length=8):
    """Expected ascent direction (2,) on stop_logits (right, wrong) under one aggregation, over every group  (2.5).

    The truth is (0, 0). Positive means shorter.
    """
    stop_logits = stop_logits.detach().requires_grad_()
    logprobs, mask, rewards, probs = stopping_model(stop_logits, success_rate=success_rate, max_length=max_length)
    groups = enumerate_groups(len(probs), group_size)
    weight = probs.detach()[groups].prod(-1)
    per_token = -group_advantages(rewards[groups])[..., None] * logprobs[groups]
    loss = aggregate(per_token, mask[groups], mode=mode, constant=constant)
    (gradient,) = torch.autograd.grad(weight @ loss, stop_logits)
    return -gradient


# %% Success amplification


def amplified_success(success, reference_success, beta, *, std_normalize=True, eps=1e-5):
    """One round of (2.6): the success rate of the policy that best trades this round's advantage against β·KL(π‖π_ref).

    That policy is π_ref·exp(A/β)/Z, so only the gap between a right and a wrong answer's advantage counts: it is
    1/√(p(1−p) + eps) with GRPO's std normalisation and 1 with the mean alone, p = `success` of the previous round.
    """
    if not (0 < reference_success < 1 and beta > 0):
        raise ValueError(f"need 0 < reference_success < 1 and beta > 0, got {reference_success} and {beta}")
    success = torch.as_tensor(success, dtype=torch.float64)
    if not ((success >= 0) & (success <= 1)).all():
        raise ValueError(f"success is a probability, got {success.tolist()}")
    gap = 1 / (success * (1 - success) + eps).sqrt() if std_normalize else torch.ones_like(success)
    return 1 / (1 + (1 - reference_success) / reference_success * torch.exp(-gap / beta))


def iterate_success(reference_success, beta, *, rounds, start=None, **options):
    """p_0 = start (default reference_success), p_1, …, p_rounds: (rounds + 1,)."""
    path = [torch.as_tensor(reference_success if start is None else start, dtype=torch.float64)]
    for _ in range(rounds):
        path.append(amplified_success(path[-1], reference_success, beta, **options))
    return torch.stack(path)


def success_fixed_points(reference_success, beta, **options):
    """All p in (0, 1] with amplified_success(p) = p, in increasing order, by bisection on a fine grid."""
    grid = torch.linspace(0, 1, 4001, dtype=torch.float64)
    above = amplified_success(grid, reference_success, beta, **options) > grid
    points = []
    for i in (above[1:] != above[:-1]).nonzero().flatten().tolist():
        low, high = grid[i], grid[i + 1]
        for _ in range(60):
            middle = (low + high) / 2
            same_side = (amplified_success(middle, reference_success, beta, **options) > middle) == above[i]
            low, high = (middle, high) if same_side else (low, middle)
        points.append(low)
    return torch.stack(points)


# %% Friends: other ways from a group's rewards to its advantages


def batch_whitened_advantages(rewards, *, eps=1e-6):
    """REINFORCE++ (arXiv 2501.03262): one mean and one standard deviation for the whole batch, (..., K) → (..., K).

    No group at all: a right answer earns the same on an easy and on a hard prompt. ddof 0 is **our reading**.
    """
    return group_advantages(rewards.reshape(-1), std_normalize=True, eps=eps).view(rewards.shape)


def noise_corrected_rewards(rewards, *, false_positive_rate, false_negative_rate):
    """Unbiased reward from a verifier that errs (arXiv 2510.18924): r̂ = (r̃ − ρ⁺)/(1 − ρ⁺ − ρ⁻), any shape.

    rewards: r̃ in {0, 1} or booleans, as the verifier gave them. ρ⁺ = P(r̃=1 | r=0), ρ⁻ = P(r̃=0 | r=1). E[r̂ | r] = r.
    """
    if not (false_positive_rate >= 0 and false_negative_rate >= 0 and false_positive_rate + false_negative_rate < 1):
        raise ValueError("the two rates must be ≥ 0 and sum to less than 1, else the verifier says nothing about r; "
                         f"got {false_positive_rate} and {false_negative_rate}")
    return (1.0 * rewards - false_positive_rate) / (1 - false_positive_rate - false_negative_rate)


def ngrpo_advantages(rewards, *, max_reward=1.0, eps=1e-6):
    """NGRPO (arXiv 2509.18851): normalise each group together with one virtual response of reward max_reward (ddof 1).

    (..., K) → (..., K). An all-wrong group, silent in GRPO, gets −1/√(K+1) each; an all-right one still gets 0.
    """
    if (rewards > max_reward).any():
        raise ValueError(f"max_reward must be the largest possible reward, but {rewards.max():g} > {max_reward:g}")
    pool = torch.cat([rewards, torch.full_like(rewards[..., :1], max_reward)], -1)
    advantages = (rewards - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    flat = pool.amax(-1, keepdim=True) == pool.amin(-1, keepdim=True)
    return torch.where(flat, torch.zeros_like(advantages), advantages)


# %% Experiments: each returns arrays

ARMS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)
SKEWED = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
MODES = {"token-mean": None, "seq-mean-token-mean": None, "seq-mean-token-sum": None, "constant": 8}
REFERENCE_SUCCESS = 0.2


def softmax_scores(probs):
    """∇ log π of a softmax bandit with respect to its logits, (A, A): row y is e_y − π."""
    return torch.eye(len(probs), dtype=probs.dtype) - probs


def variance_against_group_size(group_sizes):
    """K × total variance of the gradient from one group on the bandit: (len, 4).

    Columns: no baseline, leave-one-out, b = J, b = b* (lesson 01). All four estimators are unbiased.
    """
    scores = softmax_scores(SKEWED)
    exact = SKEWED * (ARMS - SKEWED @ ARMS)
    squared_norm = scores.square().sum(-1)
    best = (SKEWED * ARMS * squared_norm).sum() / (SKEWED * squared_norm).sum()
    fixed = [SKEWED @ ((ARMS - b)[:, None] * scores - exact).square().sum(-1) for b in (0.0, SKEWED @ ARMS, best)]
    rows = []
    for k in group_sizes:
        _, variance = group_estimator_moments(SKEWED, ARMS, scores, group_size=k, leave_one_out=True)
        rows.append(torch.stack([fixed[0], k * variance, fixed[1], fixed[2]]))
    return torch.stack(rows)


def token_weight_against_length(lengths, *, others=7, other_length=8):
    """Weight of one token's log-probability against its response's length, relative to length 8: (len, 4 modes)."""
    rows = []
    for length in lengths:
        all_lengths = torch.tensor([length] + [other_length] * others)
        mask = torch.arange(int(all_lengths.max())) < all_lengths[:, None]
        per_token = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
        losses = [aggregate(per_token, mask, mode=mode, constant=constant) for mode, constant in MODES.items()]
        rows.append(torch.stack([torch.autograd.grad(loss, per_token)[0][0, 0] for loss in losses]))
    weights = torch.stack(rows)
    return weights / weights[list(lengths).index(other_length)]


def length_drift(mode, constant, *, updates, learning_rate=4.0, max_length=8):
    """Expected length of right and of wrong answers while stop_logits follow the expected update: (updates + 1, 2).

    Compare directions, not speeds: each mode has its own scale, and the learning rate is the same.
    """
    stop_logits = torch.full((2,), -1.0, dtype=torch.float64)
    path = []
    for _ in range(updates + 1):
        _, mask, _, probs = stopping_model(stop_logits, success_rate=0.5, max_length=max_length)
        path.append((probs * mask.sum(-1)).view(2, -1).sum(-1) / 0.5)
        stop_logits = stop_logits + learning_rate * expected_length_gradient(
            stop_logits, mode=mode, constant=constant, max_length=max_length)
    return torch.stack(path)


# %% Claims


def refuses(function, *arguments, **options):
    """True when the call raises ValueError."""
    try:
        function(*arguments, **options)
    except ValueError:
        return True
    return False


def aggregates(per_token, mask):
    """All four aggregations of the same tokens, in the order of MODES: a list."""
    return [aggregate(per_token, mask, mode=mode, constant=constant) for mode, constant in MODES.items()]


def claims_group_mean(claims, generator):
    """(2.1), (2.2): the group mean's bias and variance."""
    scores = softmax_scores(SKEWED)
    exact = SKEWED * (ARMS - SKEWED @ ARMS)
    sizes = (2, 3, 4)
    plain, leave_one_out = (
        torch.stack([group_estimator_moments(SKEWED, ARMS, scores, group_size=k, leave_one_out=loo)[0] for k in sizes])
        for loo in (False, True))
    utils.check(claims, "bandit, K = 2, 3, 4: the group mean gives (K−1)/K · ∇J",
                expected=torch.stack([(k - 1) / k * exact for k in sizes]), measured=plain)
    utils.check(claims, "…leave-one-out gives ∇J", expected=exact.expand(3, 3), measured=leave_one_out)

    logits, rewards = torch.randn(2, 5, dtype=torch.float64, generator=generator)
    features = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    probs = torch.softmax(logits, -1)
    scores = features - probs @ features  # only E_π[s] = 0 makes them scores
    mean, _ = group_estimator_moments(probs, rewards, scores, group_size=3)
    utils.check(claims, "any policy (5 responses, 7 parameters), K = 3: 2/3 · ∇J",
                expected=2 / 3 * (probs * rewards) @ scores, measured=mean)
    sizes = (2, 3, 4, 5)
    measured = [group_estimator_moments(probs, rewards, scores, group_size=k, leave_one_out=True)[1] for k in sizes]
    utils.check(claims, "…K = 2…5: the variance of leave-one-out follows from single pairs",
                expected=torch.stack([leave_one_out_variance(probs, rewards, scores, group_size=k) for k in sizes]),
                measured=torch.stack(measured))


def claims_variance(claims, variance):
    """What a larger group buys beyond averaging."""
    leave_one_out, mean_reward = variance[:, 1], variance[:, 2]
    utils.check(claims, "K × variance of leave-one-out falls with K, and stays above that of b = J", expected=True,
                measured=bool((leave_one_out.diff() < 0).all() and (leave_one_out > mean_reward).all()))


def claims_std(claims):
    """(2.3): what dividing by the standard deviation does."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    utils.check(claims, "[1,0,0,0]: A = r − r̄",
                expected=[0.75, -0.25, -0.25, -0.25], measured=group_advantages(rewards))
    normalized = group_advantages(rewards, std_normalize=True)
    utils.check(claims, "…/ std with ddof 0: √3 and −1/√3", tolerance=1e-5,
                expected=[3**0.5] + [-(3**-0.5)] * 3, measured=normalized)
    sample_std = group_advantages(rewards) / rewards.std(correction=1)
    utils.check(claims, "…/ std with ddof 1: 1.5 and −.5, smaller by √((K−1)/K)", tolerance=1e-5,
                expected=[[1.5, -0.5, -0.5, -0.5]] * 2, measured=torch.stack([sample_std, normalized * (3 / 4) ** 0.5]))

    rates, measured = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), []
    for p in rates:
        right_or_wrong = torch.stack([p, 1 - p])
        mean, _ = group_estimator_moments(right_or_wrong, torch.tensor([1.0, 0.0], dtype=torch.float64),
                                          softmax_scores(right_or_wrong), group_size=6, std_normalize=True, eps=0.0)
        measured.append(mean[0] / (p * (1 - p)))
    utils.check(claims, "success rate .1, .5, .9, K = 6: the 64 groups give g_K(p) · ∇p",
                expected=std_gain(rates, group_size=6), measured=torch.stack(measured))
    extremes = torch.tensor([1e-7, 1 - 1e-7], dtype=torch.float64)
    utils.check(claims, "hardest and easiest prompts, K = 8: g → √7, three times the 7/8 without std", tolerance=1e-5,
                expected=[7**0.5, 7**0.5], measured=std_gain(extremes, group_size=8))
    utils.check(claims, "large K: g → 1/√(p(1−p)), so std normalisation climbs 2·arcsin √p", tolerance=0.005,
                expected=torch.ones(3), measured=std_gain(rates, group_size=512) * (rates * (1 - rates)).sqrt())


def claims_edge_groups(claims):
    """(2.4), and the groups that break careless code."""
    flat = [torch.full((7,), 0.1), torch.full((6,), 0.3), torch.zeros(4)]
    largest = max(group_advantages(rewards, leave_one_out=loo, std_normalize=std).abs().max()
                  for rewards in flat for loo in (False, True) for std in (False, True))
    utils.check(claims, "flat groups in float32, [.1]×7, [.3]×6: exactly 0", tolerance=0.0,
                expected=0.0, measured=largest)
    utils.check(claims, "a group of one is refused",
                expected=True, measured=refuses(group_advantages, torch.tensor([0.7])))
    utils.check(claims, "a NaN reward is refused",
                expected=True, measured=refuses(group_advantages, torch.tensor([0.7, math.nan])))
    prompt_ids, rewards = torch.tensor([1, 2, 1, 2]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    utils.check(claims, "order p1, p2, p1, p2 with rewards 1, 0, 1, 0: grouped by prompt, both are flat",
                expected=torch.zeros(2, 2), measured=group_advantages(rewards[prompt_groups(prompt_ids)]))
    utils.check(claims, "…a bare view(-1, K) invents a signal",
                expected=[[0.5, -0.5], [0.5, -0.5]], measured=group_advantages(rewards.view(-1, 2)))
    sizes, measured = (2, 4, 8, 16), []
    for k in sizes:
        rewards = enumerate_groups(2, k).double()
        silent = (group_advantages(rewards) == 0).all(-1)
        measured.append((0.25**rewards * 0.75 ** (1 - rewards)).prod(-1) @ silent.double())
    utils.check(claims, "p = .25, K = 2, 4, 8, 16: share of flat groups .625, .320, .100, .010",
                expected=[flat_group_share(0.25, group_size=k) for k in sizes], measured=torch.stack(measured))


def claims_aggregation(claims):
    """(2.5): the same tokens, four numbers, and what the choice does to the lengths."""
    mask = torch.arange(4) < torch.tensor([[2], [4]])
    per_token = torch.tensor([[0.5], [-0.5]], dtype=torch.float64).expand(2, 4)  # −A · log π with A = ±1, log π = −.5
    utils.check(claims, "lengths 2 and 4, A = ±1, log π = −.5: token-mean, seq-mean, seq-sum, constant 8",
                expected=[-1 / 6, 0.0, -0.5, -0.0625], measured=aggregates(per_token, mask))
    per_token = torch.tensor([[1.0, math.nan, math.nan, -math.inf], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    utils.check(claims, "1 token of loss 1, 4 of loss .5, NaN in the padding",
                expected=[0.6, 0.75, 1.5, 0.1875], measured=aggregates(per_token, mask))
    micro = torch.stack([aggregate(per_token[i:i + 1], mask[i:i + 1], mode="token-mean") for i in range(2)])
    utils.check(claims, "…as two micro-batches, each weighted by its share of the tokens: still .6",
                expected=0.6, measured=micro @ torch.tensor([1 / 5, 4 / 5], dtype=torch.float64))
    utils.check(claims, "…the mean of their means is another loss", expected=0.75, measured=micro.mean())
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    utils.check(claims, "a response masked whole leaves numerator and denominator",
                expected=[1.0, 1.0, 3.0, 0.375], measured=aggregates(torch.ones(2, 5, dtype=torch.float64), mask))

    start = torch.zeros(2, dtype=torch.float64)  # every token is the last one with probability ½
    drift = {mode: expected_length_gradient(start, mode=mode, constant=c, max_length=2) for mode, c in MODES.items()}
    utils.check(claims, "a reward blind to length: seq-sum and constant leave the lengths alone",
                expected=torch.zeros(2, 2), measured=torch.stack([drift["seq-mean-token-sum"], drift["constant"]]))
    # p(1−p) · (K−1)/K · E[(1/L) Σ_t s_t] = ¼ · ⅔ · ⅛: half stop at 1 with score ½, half go on with score −½ and L = 2.
    utils.check(claims, "…seq-mean makes right answers shorter and wrong ones longer: ±1/48 at T = 2, K = 3",
                expected=[1 / 48, -1 / 48], measured=drift["seq-mean-token-mean"])
    relative = torch.stack([
        expected_length_gradient(start, mode="token-mean", group_size=k, max_length=2)
        / expected_length_gradient(start, mode="seq-mean-token-mean", group_size=k, max_length=2) for k in range(2, 7)])
    utils.check(claims, "…token-mean does the same, less the more responses share its denominator", expected=True,
                measured=bool((relative > 0).all() and (relative < 1).all() and (relative.diff(dim=0) < 0).all()))


def claims_amplification(claims):
    """(2.6): from p_ref = .2, where do the rounds end?"""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # five equally likely answers: p = .2
    tilted = torch.softmax(math.log(0.2) + group_advantages(rewards, std_normalize=True, eps=0.0) / 2, -1)
    utils.check(claims, "one round is the tilted policy π_ref · exp(A/β) / Z: p = .2, β = 2",
                expected=amplified_success(0.2, 0.2, 2, eps=0.0), measured=tilted[0])
    ends = [iterate_success(REFERENCE_SUCCESS, beta, rounds=200)[-1] for beta in (1, 2, 5)]
    mean_only = iterate_success(REFERENCE_SUCCESS, 1, rounds=200, std_normalize=False)[-1]
    utils.check(claims, "200 rounds with β = 1, 2, 5, and with β = 1 without std", tolerance=1e-6,
                expected=[0.681283, 0.408728, 0.280660, 0.404610], measured=torch.stack([*ends, mean_only]))
    points = [success_fixed_points(REFERENCE_SUCCESS, beta) for beta in (1, 2, 5)]
    utils.check(claims, "…each is the lowest fixed point, found by bisection",
                expected=torch.stack([p[0] for p in points]), measured=torch.stack(ends))
    utils.check(claims, "…and above p_ref = .2: success is amplified",
                expected=True, measured=bool(min(ends) > REFERENCE_SUCCESS))
    utils.check(claims, "β = 1 has an unstable fixed point at .935: below it back to .681, above it up to 1",
                tolerance=1e-6, expected=[0.681283, 1.0],
                measured=[iterate_success(REFERENCE_SUCCESS, 1, rounds=200, start=p)[-1] for p in (0.934, 0.936)])


def claims_friends(claims):
    """Neighbours that differ from (2.1) in the advantage alone; right and wrong answer of [1, 1, 0, 0, 0, 0, 0, 0]."""
    group = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    grpo = group_advantages(group, std_normalize=True)
    utils.check(claims, "[1,1,0×6], right and wrong: RLOO", tolerance=1e-6,
                expected=[0.857143, -0.285714], measured=group_advantages(group, leave_one_out=True)[[0, -1]])
    utils.check(claims, "…Dr. GRPO", expected=[0.75, -0.25], measured=group_advantages(group)[[0, -1]])
    utils.check(claims, "…GRPO with ddof 1", tolerance=1e-6, expected=[1.620182, -0.540061],
                measured=(group_advantages(group) / (group.std(correction=1) + 1e-6))[[0, -1]])
    utils.check(claims, "…GRPO with ddof 0", tolerance=1e-6, expected=[1.732047, -0.577349], measured=grpo[[0, -1]])
    utils.check(claims, "…REINFORCE++ with this group as the whole batch: GRPO",
                expected=grpo, measured=batch_whitened_advantages(group))
    batch = torch.tensor([[1.0] * 7 + [0.0], [1.0] + [0.0] * 7], dtype=torch.float64)
    utils.check(claims, "REINFORCE++, an easy and a hard prompt: right +1 and wrong −1 on both", tolerance=1e-5,
                expected=2 * batch - 1, measured=batch_whitened_advantages(batch))

    rates = {"false_positive_rate": 0.2, "false_negative_rate": 0.1}
    wrong, right = noise_corrected_rewards(torch.tensor([0.0, 1.0], dtype=torch.float64), **rates)
    utils.check(claims, "noise-corrected reward, ρ⁺ = .2, ρ⁻ = .1: on average r, for r = 0 and r = 1",
                expected=[0.0, 1.0], measured=[0.8 * wrong + 0.2 * right, 0.1 * wrong + 0.9 * right])
    corrected = noise_corrected_rewards(group, **rates)
    utils.check(claims, "…its advantages", tolerance=1e-7,
                expected=[1.0714286, -0.3571429], measured=group_advantages(corrected)[[0, -1]])
    utils.check(claims, "…but dividing by the std of r̂ cancels the correction exactly",
                expected=group_advantages(group, std_normalize=True, eps=0.0),
                measured=group_advantages(corrected, std_normalize=True, eps=0.0))

    sizes = (2, 4, 8, 16)
    utils.check(claims, "NGRPO, all-wrong groups of G = 2, 4, 8, 16: −1/√(G+1)", tolerance=1e-5,
                expected=[-((size + 1) ** -0.5) for size in sizes],
                measured=[ngrpo_advantages(torch.zeros(size, dtype=torch.float64))[0] for size in sizes])
    utils.check(claims, "…an all-right group: 0", tolerance=0.0,
                expected=torch.zeros(8), measured=ngrpo_advantages(torch.ones(8)))


# %% Figures


def figure_group_mean(group_sizes, variance, directory):
    """Left: what the group's size buys. Right: the weight that std normalisation gives to a prompt."""
    fig, (left, right) = utils.figure(2)
    names = ["no baseline", "leave-one-out mean of the group", "b = J (not known)", "b = b* (not known)"]
    for column, (name, marker) in enumerate(zip(names, [None, "o", None, None])):
        left.plot(group_sizes, variance[:, column], marker=marker, label=name)
    left.set(title="A larger group is a better baseline", xlabel="group size K",
             ylabel="K × total variance of the gradient", ylim=(0, 0.38), xticks=list(group_sizes))
    left.legend(loc="upper right")
    rates = torch.linspace(0.001, 0.999, 499, dtype=torch.float64)
    for k in (4, 8, 64):
        right.plot(rates, std_gain(rates, group_size=k), label=f"divided by std, K = {k}")
    right.plot(rates, torch.full_like(rates, 7 / 8), label="r − r̄ alone, K = 8")
    right.set(title="Dividing by std favours very hard and very easy prompts",
              xlabel="success rate p of the prompt", ylabel="expected update / ∇p", ylim=(0, 8.5))
    right.legend(loc="upper center")
    utils.save_figure(fig, directory, "02_group_mean")


def figure_length_bias(lengths, weights, drifts, directory):
    """Left: the weight of one token against the length of its response. Right: what that does to the lengths."""
    fig, (left, right) = utils.figure(2)
    for column, (mode, marker) in enumerate(zip(MODES, "os^D")):
        (line,) = left.loglog(lengths, weights[:, column], marker=marker, markevery=(column, 4), label=mode)
        style = {"color": line.get_color(), "linestyle": line.get_linestyle(), "marker": marker}
        right.plot(drifts[mode], markevery=(2 * column, 10), **style)
    ticks = [1, 2, 4, 8, 16, 32]
    left.set(title="Averaged per response, a long answer's tokens count less",
             xlabel="length of the response (7 others have 8 tokens)", ylabel="weight of one token (length 8: 1)",
             xticks=ticks, xticklabels=ticks, yticks=[0.25, 1, 4], yticklabels=["¼", "1", "4"])
    left.minorticks_off()
    left.legend()
    right.annotate("wrong answers", (len(drifts["constant"]) - 1, 7.7), ha="right")
    right.annotate("right answers", (len(drifts["constant"]) - 1, 0.6), ha="right")
    right.set(title="…so wrong answers grow and right ones shrink", ylim=(0.4, 8.1),
              xlabel="update, each the exact expectation", ylabel="expected length; the reward ignores it")
    utils.save_figure(fig, directory, "02_length_bias")


def figure_success_amplification(directory):
    """Left: cobwebs from p_ref for three β and without std; open circles are unstable. Right: the same against n."""
    fig, (left, right) = utils.figure(2)
    p = torch.linspace(0, 1, 401, dtype=torch.float64)
    left.plot(p, p, color="0.6", linewidth=1, linestyle="-")
    for beta, std_normalize in [(1, True), (2, True), (5, True), (1, False)]:
        (line,) = left.plot(p, amplified_success(p, REFERENCE_SUCCESS, beta, std_normalize=std_normalize))
        color = line.get_color()
        path = iterate_success(REFERENCE_SUCCESS, beta, rounds=12, std_normalize=std_normalize)
        corners = path.repeat_interleave(2)
        left.plot(corners[:-1], corners[1:], color=color, linewidth=0.8, linestyle="-")
        stable, *unstable = success_fixed_points(REFERENCE_SUCCESS, beta, std_normalize=std_normalize)
        left.plot([stable], [stable], "o", color=color)
        left.plot(unstable[:1], unstable[:1], "o", color=color, markerfacecolor="white")
        label = f"β = {beta}{'' if std_normalize else ', no std'}:  {path[-1]:.3f}"
        right.plot(path, color=color, linestyle=line.get_linestyle(), marker="o", markersize=3, label=label)
    left.annotate("open: unstable", (0.92, 0.94), ha="right", color="0.4", fontsize=8)
    left.set(title="GRPO's rounds end at a fixed point above p_ref", xlabel="success rate p of this round",
             ylabel="success rate of the next round", xlim=(0, 1), ylim=(0, 1.02))
    right.axhline(REFERENCE_SUCCESS, color="0.6", linewidth=1, linestyle="-")
    right.annotate("p_ref", (12, REFERENCE_SUCCESS - 0.02), ha="right", va="top", color="0.4")
    right.set(title="A weaker pull to π_ref (small β) amplifies more", xlabel="round n", ylabel="success rate p_n",
              ylim=(0, 1.02))
    right.legend(loc="upper right", ncols=2)
    utils.save_figure(fig, directory, "02_success_amplification")


# %% Exercises: python 02_group_baseline.py --exercise 1


def leave_one_out_advantages(rewards):
    """group_advantages with leave_one_out."""
    return group_advantages(rewards, leave_one_out=True)


def mean_of_token_means(per_token, mask):
    """aggregate in the mode of GRPO as published."""
    return aggregate(per_token, mask, mode="seq-mean-token-mean")


GROUPS = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.2, 0.4, 0.4, 1.0]], dtype=torch.float64)
PADDED = torch.tensor([[1.0, math.nan, math.nan, math.nan], [0.5, 0.5, 0.5, 0.25]], dtype=torch.float64)
EXERCISES = {
    1: ("leave_one_out_advantages",
        "Each reward minus the mean of the OTHER rewards of its group: rewards (..., K) → (..., K).",
        leave_one_out_advantages, [(GROUPS[0],), (GROUPS,), (GROUPS.flip(-1) - 3,)]),
    2: ("mean_of_token_means",
        "Mean over responses of the mean over their tokens; NaN may stand outside the mask: (B, T), (B, T) → scalar.",
        mean_of_token_means, [(GROUPS, torch.ones(2, 4, dtype=torch.bool)), (PADDED, ~PADDED.isnan())]),
    3: ("amplified_success", "(2.6) with A₊ − A₋ = 1/√(p(1−p) + 1e-5), p = success: three numbers → scalar.",
        amplified_success, [(0.2, 0.2, 1.0), (0.5, 0.2, 2.0), (0.9, 0.4, 5.0)]),
}


def main(argv=None):
    args = utils.lesson_arguments(__doc__, argv)
    if args.exercise is not None:
        utils.run_exercise(EXERCISES, args)
    generator = utils.seed_everything(args.seed)
    group_sizes, lengths = range(2, 7 if args.quick else 9), range(1, 33)
    claims = []
    claims_group_mean(claims, generator)
    variance = variance_against_group_size(group_sizes)
    claims_variance(claims, variance)
    claims_std(claims)
    claims_edge_groups(claims)
    claims_aggregation(claims)
    claims_amplification(claims)
    claims_friends(claims)
    drifts = {mode: length_drift(mode, constant, updates=10 if args.quick else 60) for mode, constant in MODES.items()}
    figure_group_mean(group_sizes, variance, args.out)
    figure_length_bias(lengths, token_weight_against_length(lengths), drifts, args.out)
    figure_success_amplification(args.out)
    utils.finish(claims, args)


if __name__ == "__main__":
    torch.set_num_threads(1)  # every tensor here is tiny: more threads would only wait for each other
    main()
