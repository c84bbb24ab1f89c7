"""Lesson 01: REINFORCE, and what "on-policy" buys.

Claim. If the responses come from the policy itself, the mean of reward × ∇ log π is exactly the gradient of the
expected reward, and a baseline changes only its variance. If they come from anywhere else, neither is true, and the
textbook repair, importance sampling, pays with a variance that grows exponentially with the length of the response.

Equations checked here, each by summing over EVERY response (background to section 2 of arXiv 2509.24203). π is the
policy, π_b the behaviour policy that produced the data, s = ∇ log π the score, J = E_{y~π} r(y), ρ = π/π_b:
  (1.1)  E_π[r s] = ∇J                                       for a softmax bandit: π ⊙ (r − J)
  (1.2)  E_π[(r − b) s] = ∇J for every constant b;           V(b) = V(b*) + (b − b*)² E‖s‖²,   b* = E[r‖s‖²] / E‖s‖²
  (1.3)  E_b[(r − b) s] = ∇ E_b[(r − b) log π] ≠ ∇J          off-policy: another objective, and b now changes it
  (1.4)  E_b[ρ r s] = ∇J;   E_b[ρ²] = (Σ_a π(a)²/π_b(a))^T   for T independent tokens
  (1.5)  E_b[r Σ_t ρ_t s_t] = ∇ E_b[r Σ_t ρ_t] ≠ ∇J          token-level ratios: tame variance, biased again
  (1.6)  −mean(ρ A) = 0 while its gradient is −mean(A s)     at ρ = 1 and ΣA = 0: the value of the loss says nothing

How to run:  python 01_reinforce.py       (--quick: fewer seeds; --exercise N: check your own answer)
What you see: a table of claims after about 5 seconds, and in figures/ the pictures 01_baseline, 01_importance, 01_loss.
Before it:   nothing. You need the chain rule, and to know that a language model is a softmax over the next token.

symbol    tensor           shape       meaning
θ         logits           (S, V)      one row of logits per prefix; a bandit has the single row of the empty prefix
y         tokens           (N, T)      all N responses, padded to T tokens
          states, mask     (N, T)      the row of `logits` that produced each token; True where there is a token
s_t       scores           (N, T, S, V)  ∇_θ log π(token t | prefix)
π(y)      probs            (N,)        probability of each response; behaviour_probs likewise
r(y)      rewards          (N,)
"""

import torch

import utils

# %% The policy: a table of logits. Every response is written down, so an expectation is a sum and not an estimate.


def enumerate_responses(*, vocabulary, max_length, end=None):
    """All responses over tokens 0 … vocabulary−1: tokens, states, mask, each (N, T) with T = max_length.

    `end` is the token that ends a response early; None lets every response run to max_length. states[i, t] numbers the
    prefix before token t, shortest first: the row of the logits table that produced the token. Padding holds 0 in both.
    """
    if vocabulary < 2 or max_length < 1:
        raise ValueError(f"need at least 2 tokens and length 1, got vocabulary={vocabulary}, max_length={max_length}")
    if end not in (None, *range(vocabulary)):
        raise ValueError(f"end must be a token, 0 … {vocabulary - 1}, or None for no end, not {end}")
    finished, growing = [], [()]
    for _ in range(max_length):
        longer = [prefix + (token,) for prefix in growing for token in range(vocabulary)]
        finished += [response for response in longer if response[-1] == end]
        growing = [response for response in longer if response[-1] != end]
    responses = finished + growing
    prefixes = {response[:t] for response in responses for t in range(len(response))}
    row = {prefix: i for i, prefix in enumerate(sorted(prefixes, key=lambda prefix: (len(prefix), prefix)))}
    padding = [(0,) * (max_length - len(response)) for response in responses]
    tokens = torch.tensor([response + pad for response, pad in zip(responses, padding)])
    states = torch.tensor([tuple(row[response[:t]] for t in range(len(response))) + pad
                           for response, pad in zip(responses, padding)])
    lengths = torch.tensor([len(response) for response in responses])
    return tokens, states, torch.arange(max_length) < lengths[:, None]


def table_logprobs(logits, tokens, states, mask):
    """log π(token | prefix) of every token: (S, V) logits → (N, T), 0 on padding."""
    logprobs = torch.log_softmax(logits, -1)[states, tokens]
    return torch.where(mask, logprobs, torch.zeros_like(logprobs))


def table_scores(logits, tokens, states, mask):
    """∇_θ log π(token | prefix) of every token, (N, T, S, V): e_token − π(·|prefix) in its prefix's row, else 0."""
    one_hot = torch.nn.functional.one_hot(tokens, logits.shape[-1])
    rows = torch.where(mask[..., None], one_hot - torch.softmax(logits, -1)[states], 0.0)
    which = torch.nn.functional.one_hot(states, logits.shape[0])
    return which[..., None] * rows[..., None, :]


def require_distribution(probs):
    """Raise ValueError unless the last dimension of `probs` is a probability distribution."""
    if (probs < 0).any() or not torch.allclose(probs.sum(-1), torch.ones_like(probs.sum(-1)), atol=1e-6):
        raise ValueError("probabilities must be ≥ 0 and sum to 1 over all responses; normalise them first")


def require_one_shape(*tensors):
    """Raise ValueError unless all are (N,), one entry per response: broadcasting would hide any other shape."""
    if any(tensor.dim() != 1 or tensor.shape != tensors[0].shape for tensor in tensors):
        raise ValueError("need one entry per response, (N,), in every argument, not "
                         + ", ".join(str(tuple(tensor.shape)) for tensor in tensors))


# %% Estimators: what one sampled response contributes, averaged exactly


def estimator_moments(sampling_probs, weights, scores):
    """Exact mean and total variance of the estimator g(y) = Σ_t w_t(y) s_t(y) with y ~ sampling_probs.

    sampling_probs: (N,). weights: (N, T), for example r(y) at every token (REINFORCE) or ρ(y)·r(y) (importance
    sampling). scores: (N, T, S, V). Returns the mean (S, V) and the trace of the covariance, a scalar.
    """
    require_distribution(sampling_probs)
    if weights.shape != scores.shape[:2]:
        raise ValueError(f"weights need one entry per token, {tuple(scores.shape[:2])}, not {tuple(weights.shape)}")
    contributions = torch.einsum("nt,ntsv->nsv", weights, scores)
    mean = torch.einsum("n,nsv->sv", sampling_probs, contributions)
    return mean, sampling_probs @ (contributions - mean).square().sum((-2, -1))


def bandit_gradient(probs, rewards):
    """∇J of a softmax bandit with respect to its logits, (A,): π ⊙ (r − J)  (1.1)."""
    require_distribution(probs)
    require_one_shape(probs, rewards)
    return probs * (rewards - probs @ rewards)


def off_policy_bandit_update(probs, behaviour_probs, rewards, *, baseline):
    """E_b[(r − b) ∇ log π] of a softmax bandit, (A,): π_b ⊙ (r − b) − π · E_b[r − b]  (1.3)."""
    require_distribution(probs)
    require_distribution(behaviour_probs)
    require_one_shape(probs, behaviour_probs, rewards)
    weighted = behaviour_probs * (rewards - baseline)
    return weighted - probs * weighted.sum()


def optimal_baseline(probs, rewards, scores):
    """The constant b* that minimises the total variance of (r − b)·s: E[r‖s‖²] / E‖s‖²  (1.2). s = Σ_t s_t."""
    require_distribution(probs)
    squared_norm = scores.sum(1).square().sum((-2, -1))
    require_one_shape(probs, rewards, squared_norm)
    return (probs * rewards * squared_norm).sum() / (probs * squared_norm).sum()


def ratio_second_moment(probs, behaviour_probs, length):
    """E_b[ρ²] of `length` independent tokens, each from `probs` (A,): (Σ_a π(a)²/π_b(a))^length  (1.4).

    That is (1 + χ²)^length with the χ² of one token. n weighted responses are worth about n / E_b[ρ²] unweighted ones.
    """
    require_distribution(probs)
    require_distribution(behaviour_probs)
    require_one_shape(probs, behaviour_probs)
    possible = probs > 0
    if (behaviour_probs[possible] <= 0).any():
        raise ValueError("importance sampling needs π_b > 0 wherever π can go; give every token some probability")
    return (probs[possible].square() / behaviour_probs[possible]).sum() ** length


def ppo_clip_loss(logprobs, old_logprobs, advantages, *, eps):
    """PPO's loss −mean over the last dimension of min(ρA, clip(ρ, 1−eps, 1+eps)·A), ρ = exp(logprobs − old_logprobs).

    All inputs have one shape (..., B). eps = inf turns clipping off. ValueError: unequal shapes, eps < 0.
    """
    if not logprobs.shape == old_logprobs.shape == advantages.shape:
        raise ValueError("logprobs, old_logprobs and advantages must have one shape, not "
                         f"{tuple(logprobs.shape)}, {tuple(old_logprobs.shape)}, {tuple(advantages.shape)}")
    if not eps >= 0:
        raise ValueError(f"eps must be ≥ 0 (inf turns clipping off), got {eps}")
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages).mean(-1)


# %% Experiments: each returns arrays

ARMS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)  # the bandit that lesson 03 studies in depth
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
STEP_QUALITY = torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)
SKEWED = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
UNIFORM = torch.full((3,), 1 / 3, dtype=torch.float64)


def bandit_scores(probs):
    """(A, 1, 1, A): a bandit is the case of one token and one prefix, so the functions above serve it too."""
    return table_scores(probs.log()[None], *enumerate_responses(vocabulary=len(probs), max_length=1))


def counting_task():
    """Vocabulary {0: stop, 1, 2}, at most 3 tokens: 15 responses. "1, 2, stop" earns 1, "1, 2" cut off .5, others 0."""
    tokens, states, mask = enumerate_responses(vocabulary=3, max_length=3, end=0)
    counted = (tokens[:, 0] == 1) & (tokens[:, 1] == 2)
    rewards = torch.where(counted, torch.where(tokens[:, 2] == 0, 1.0, 0.5), 0.0).double()
    return tokens, states, mask, rewards


def variance_against_baseline(probs, rewards, baselines):
    """Total variance of the one-sample estimator (r − b)·s for each b: (len(baselines),)."""
    scores = bandit_scores(probs)
    return torch.stack([estimator_moments(probs, (rewards - b)[:, None], scores)[1] for b in baselines])


def token_level_bias(distances, *, generator):
    """Relative bias ‖E_b[token-level estimator] − ∇J‖ / ‖∇J‖ at θ = θ_b + h·direction, for each distance h: (len,).

    The counting task, with θ_b and the unit direction drawn once.
    """
    tokens, states, mask, rewards = counting_task()
    behaviour_logits, direction = torch.randn(2, 7, 3, dtype=torch.float64, generator=generator)
    direction = direction / direction.norm()
    old = table_logprobs(behaviour_logits, tokens, states, mask)
    biases = []
    for h in distances:
        logits = behaviour_logits + h * direction
        logprobs = table_logprobs(logits, tokens, states, mask)
        scores = table_scores(logits, tokens, states, mask)
        per_token = rewards[:, None].expand(tokens.shape)
        exact, _ = estimator_moments(logprobs.sum(-1).exp(), per_token, scores)
        mean, _ = estimator_moments(old.sum(-1).exp(), per_token * (logprobs - old).exp(), scores)
        biases.append((mean - exact).norm() / exact.norm())
    return torch.stack(biases)


def error_against_length(lengths, *, probs, behaviour_probs, responses):
    """Bias and root mean squared error of three off-policy estimators of ∇J, as shares of ‖∇J‖: two (len(lengths), 3).

    Columns: no ratio, token-level ratio, trajectory ratio. Error² = ‖bias‖² + variance / responses, all exact, with the
    baseline E_b[r]. Every token comes from the same three logits, and a response is a chain: r = Π_t STEP_QUALITY[y_t].
    """
    biases, errors = [], []
    for length in lengths:
        tokens, states, mask = enumerate_responses(vocabulary=3, max_length=length)
        shared = torch.zeros_like(states)  # one row of logits for all positions: independent tokens
        logprobs, old = (table_logprobs(p.log()[None], tokens, shared, mask) for p in (probs, behaviour_probs))
        scores = table_scores(probs.log()[None], tokens, shared, mask)
        rewards = STEP_QUALITY[tokens].prod(-1)
        sampling = old.sum(-1).exp()
        advantages = (rewards - sampling @ rewards)[:, None].expand(tokens.shape)
        exact, _ = estimator_moments(logprobs.sum(-1).exp(), advantages, scores)
        token_ratio = (logprobs - old).exp()
        moments = [estimator_moments(sampling, advantages * weight, scores)
                   for weight in (1.0, token_ratio, token_ratio.prod(-1, keepdim=True))]
        biases.append([(mean - exact).norm() / exact.norm() for mean, _ in moments])
        errors.append([((mean - exact).square().sum() + variance / responses).sqrt() / exact.norm()
                       for mean, variance in moments])
    return torch.tensor(biases, dtype=torch.float64), torch.tensor(errors, dtype=torch.float64)


def train_on_batches(*, steps_per_batch, eps, seeds, batches, generator, batch_size=32, learning_rate=2.0):
    """Train `seeds` bandits at once with ppo_clip_loss: sample a batch, take `steps_per_batch` SGD steps on it, repeat.

    Returns a dict: "J" (batches + 1, seeds), the final "logits" (seeds, A), and for every optimiser step, each
    (batches, steps_per_batch, seeds): "loss", "log_loss" = −mean(A log π), "ratio_deviation" = max |ρ − 1| and
    "clip_fraction", the share of responses whose gradient is cut.
    """
    logits = torch.zeros(seeds, 3, dtype=torch.float64, requires_grad=True)
    names = ["loss", "log_loss", "ratio_deviation", "clip_fraction"]
    log = {name: torch.zeros(batches, steps_per_batch, seeds, dtype=torch.float64) for name in names}
    expected_reward = [torch.softmax(logits.detach(), -1) @ ARMS]
    for batch in range(batches):
        behaviour = torch.log_softmax(logits.detach(), -1)
        actions = torch.multinomial(behaviour.exp(), batch_size, replacement=True, generator=generator)
        old_logprobs = behaviour.gather(-1, actions)
        rewards = ARMS[actions]
        advantages = rewards - rewards.mean(-1, keepdim=True)  # the group mean, which lesson 02 is about
        for step in range(steps_per_batch):
            logprobs = torch.log_softmax(logits, -1).gather(-1, actions)
            loss = ppo_clip_loss(logprobs, old_logprobs, advantages, eps=eps)
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
            with torch.no_grad():
                ratio = (logprobs - old_logprobs).exp()
                clipped = ((advantages > 0) & (ratio > 1 + eps)) | ((advantages < 0) & (ratio < 1 - eps))
                values = [loss, -(advantages * logprobs).mean(-1), (ratio - 1).abs().amax(-1),
                          clipped.double().mean(-1)]
                for name, value in zip(names, values):
                    log[name][batch, step] = value
                logits -= learning_rate * gradient
        expected_reward.append(torch.softmax(logits.detach(), -1) @ ARMS)
    return {**log, "J": torch.stack(expected_reward), "logits": logits.detach()}


def seed_interval(values, *, generator, resamples=500):
    """Mean over the last dimension (seeds) and the ends of its bootstrap 95 % interval: three arrays of shape (...)."""
    seeds = values.shape[-1]
    draws = torch.randint(seeds, (resamples, seeds), generator=generator)
    means = values[..., draws].mean(-1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=values.dtype), dim=-1)
    return values.mean(-1), low, high


# %% Claims


def claims_policy_gradient(claims, generator):
    """(1.1): the mean of reward × score is the gradient, on the bandit and on the 15 responses of the counting task."""
    mean, _ = estimator_moments(UNIFORM, ARMS[:, None], bandit_scores(UNIFORM))
    utils.check(claims, "bandit, π uniform: E[r ∇log π] = π ⊙ (r − J)",
                expected=[-1 / 5, 1 / 15, 2 / 15], measured=mean[0])

    tokens, states, mask, rewards = counting_task()
    logits = torch.randn(7, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    probs = table_logprobs(logits, tokens, states, mask).sum(-1).exp()
    (gradient,) = torch.autograd.grad(probs @ rewards, logits)
    logits, probs = logits.detach(), probs.detach()
    scores = table_scores(logits, tokens, states, mask)
    ones = torch.ones(tokens.shape, dtype=torch.float64)
    utils.check(claims, "15 responses: their probabilities sum to 1", expected=1.0, measured=probs.sum())
    mean, _ = estimator_moments(probs, rewards[:, None] * ones, scores)
    utils.check(claims, "15 responses: E[r Σ_t ∇log π] = ∇J by autograd", expected=gradient, measured=mean)
    mean, _ = estimator_moments(probs, ones, scores)
    utils.check(claims, "15 responses: the score has mean 0", expected=torch.zeros(7, 3), measured=mean)
    shifted = [estimator_moments(probs, (rewards[:, None] - b) * ones, scores)[0] for b in (-3.0, 0.5, 10.0)]
    utils.check(claims, "any baseline (−3, .5, 10) leaves the mean alone",
                expected=gradient.expand(3, 7, 3), measured=torch.stack(shifted))


def claims_baseline(claims):
    """(1.2): what the baseline does to the variance."""
    best = optimal_baseline(SKEWED, ARMS, bandit_scores(SKEWED))
    # ‖s_a‖² = 1 − 2π_a + ‖π‖² with ‖π‖² = .54: (.14, 1.14, 1.34). So E‖s‖² = .46 and E[r‖s‖²] = .3164.
    utils.check(claims, "π = (.7, .2, .1): optimal baseline b* = .3164/.46", expected=0.3164 / 0.46, measured=best)
    baselines = torch.tensor([-1.0, 0.0, 0.26, 2.0], dtype=torch.float64)
    lowest, *variances = variance_against_baseline(SKEWED, ARMS, [best, *baselines])
    utils.check(claims, "V(b) = V(b*) + (b − b*)² E‖s‖²",
                expected=lowest + (baselines - best).square() * 0.46, measured=torch.stack(variances))
    utils.check(claims, "the mean reward J = .26 is not b*, but beats no baseline",
                expected=True, measured=bool(lowest < variances[2] < variances[1]))
    easy = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)
    none, mean = variance_against_baseline(easy, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), [0.0, 0.9])
    utils.check(claims, "easy prompt, 90 % right: the mean reward has MORE variance than no baseline",
                expected=True, measured=bool(mean > none))


def claims_off_policy(claims, generator):
    """(1.3): the same estimator on foreign data."""
    mean, _ = estimator_moments(BEHAVIOUR, ARMS[:, None], bandit_scores(UNIFORM))
    utils.check(claims, "data from π_b = (.3, .6, .1): E_b[r ∇log π] is not ∇J",
                expected=[-0.58 / 3, 0.86 / 3, -0.28 / 3], measured=mean[0])
    utils.check(claims, "…it pushes the best arm down, where ∇J pushes it up",
                expected=True, measured=bool(mean[0, 2] < 0 < bandit_gradient(UNIFORM, ARMS)[2]))
    utils.check(claims, "…and up with b = E_b[r] = .58: off-policy the baseline changes the mean",
                expected=[-0.174, 0.132, 0.042],
                measured=off_policy_bandit_update(UNIFORM, BEHAVIOUR, ARMS, baseline=0.58))

    tokens, states, mask, rewards = counting_task()
    behaviour_logits, logits = torch.randn(2, 7, 3, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    behaviour_probs = table_logprobs(behaviour_logits, tokens, states, mask).sum(-1).exp()
    imitation = behaviour_probs @ ((rewards - 0.2) * table_logprobs(logits, tokens, states, mask).sum(-1))
    (gradient,) = torch.autograd.grad(imitation, logits)
    weights = (rewards[:, None] - 0.2).expand(tokens.shape)
    mean, _ = estimator_moments(behaviour_probs, weights, table_scores(logits.detach(), tokens, states, mask))
    utils.check(claims, "15 responses: off-policy it climbs weighted imitation E_b[(r − b) log π]",
                expected=gradient, measured=mean)


def claims_importance_sampling(claims, generator):
    """(1.4), (1.5): the repair, its price, and the compromise."""
    tokens, states, mask, rewards = counting_task()
    behaviour_logits, logits = torch.randn(2, 7, 3, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    logprobs, old = (table_logprobs(table, tokens, states, mask) for table in (logits, behaviour_logits))
    behaviour_probs, token_ratio = old.sum(-1).exp(), (logprobs - old).exp()
    (exact,) = torch.autograd.grad(logprobs.sum(-1).exp() @ rewards, logits, retain_graph=True)
    (surrogate,) = torch.autograd.grad(behaviour_probs @ (rewards * (token_ratio * mask).sum(-1)), logits)
    scores, token_ratio = table_scores(logits.detach(), tokens, states, mask), token_ratio.detach()
    trajectory_ratio = token_ratio.prod(-1, keepdim=True)
    mean, _ = estimator_moments(behaviour_probs, (rewards[:, None] * trajectory_ratio).expand(tokens.shape), scores)
    utils.check(claims, "15 responses: trajectory ratios, E_b[ρ r s] = ∇J", expected=exact, measured=mean)
    mean, _ = estimator_moments(behaviour_probs, rewards[:, None] * token_ratio, scores)
    utils.check(claims, "15 responses: token ratios climb E_b[r Σ_t ρ_t]", expected=surrogate, measured=mean)
    utils.check(claims, "…which is not J", expected=True, measured=bool((mean - exact).norm() > 0.01 * exact.norm()))

    measured = []
    for length in range(1, 9):
        tokens, _, _ = enumerate_responses(vocabulary=3, max_length=length)
        behaviour_probs = BEHAVIOUR[tokens].prod(-1)
        measured.append(behaviour_probs @ (UNIFORM[tokens].prod(-1) / behaviour_probs).square())
    utils.check(claims, "all 3^T responses, T = 1…8: E_b[ρ²] = (1 + χ²)^T = (5/3)^T", tolerance=1e-9,
                expected=[(5 / 3) ** length for length in range(1, 9)], measured=torch.stack(measured))
    bias = token_level_bias([0.0, 1e-3, 2e-3], generator=generator)
    utils.check(claims, "token ratios: no bias at π = π_b", expected=0.0, measured=bias[0])
    utils.check(claims, "…and near it the bias doubles with the distance", tolerance=0.02,
                expected=2.0, measured=bias[2] / bias[1])


def claims_error_against_length(claims, bias, error):
    """The compromise in numbers: token ratios scale ∇J of a chain by (E_b[q]/E_π[q])^(T−1) = (.52/.6)^(T−1)."""
    steps = torch.arange(len(bias), dtype=torch.float64)
    utils.check(claims, "chain of T steps: token ratios have relative bias 1 − (.52/.6)^(T−1)",
                expected=1 - (0.52 / 0.6) ** steps, measured=bias[:, 1])
    utils.check(claims, "…and trajectory ratios none", expected=torch.zeros(len(bias)), measured=bias[:, 2])
    utils.check(claims, "…but from T = 2 on, with 256 responses, token ratios have the smallest error",
                expected=True, measured=bool((error[1:, 1] < error[1:, [0, 2]].amin(-1)).all()))


def claims_loss(claims, once, once_unclipped, often, often_unclipped):
    """(1.6), and the two most-asked questions: is a loss of 0 broken, and is a ratio of 1 broken? Neither is."""
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([-1.3, -0.2], dtype=torch.float64, requires_grad=True)
    loss = ppo_clip_loss(logprobs, logprobs.detach(), advantages, eps=0.2)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    utils.check(claims, "A = (1, −1) at ρ = 1: the loss is 0", expected=0.0, measured=loss)
    utils.check(claims, "…its gradient is not", expected=[-0.5, 0.5], measured=gradient)
    lengths = torch.tensor([1, 3])
    utils.check(claims, "…and if they have 1 and 3 tokens, the token mean is +.5: it tells lengths",
                expected=0.5, measured=-advantages.repeat_interleave(lengths).mean())
    utils.check(claims, "a whole run, one step per batch: the loss stays 0",
                expected=0.0, measured=once["loss"].abs().max())
    first, last = once["J"][[0, -1]].mean(-1)
    utils.check(claims, "…while J rises from .6 to above .9", expected=True,
                measured=bool(abs(first - 0.6) < 1e-12 and last > 0.9))
    utils.check(claims, "one step per batch: max |ρ − 1| is 0 to the last bit", tolerance=0.0,
                expected=0.0, measured=once["ratio_deviation"].max())
    utils.check(claims, "…so ε = .2 and ε = ∞ end at the same logits",
                expected=once_unclipped["logits"], measured=once["logits"])
    utils.check(claims, "four steps per batch: the first clips nothing",
                expected=0.0, measured=often["clip_fraction"][:, 0].max())
    utils.check(claims, "…the fourth does, and ε now matters", expected=True,
                measured=bool(often["clip_fraction"][:, 3].mean() > 0.02
                              and (often["J"] - often_unclipped["J"]).abs().max() > 0.02))


# %% Figures


def figure_baseline(directory):
    """Left: variance against b. Right: what b does to the mean, on-policy and off-policy."""
    baselines = torch.linspace(-0.5, 1.5, 81, dtype=torch.float64)
    best = optimal_baseline(SKEWED, ARMS, bandit_scores(SKEWED))
    fig, (left, right) = utils.figure(2)
    left.plot(baselines, variance_against_baseline(SKEWED, ARMS, baselines))
    marks = [("no baseline", 0.0, "s"), ("mean reward J", SKEWED @ ARMS, "^"), ("optimal b*", best, "o")]
    for name, b, marker in marks:
        left.plot([b], variance_against_baseline(SKEWED, ARMS, [b]), marker, color="black", label=f"{name}: {b:.2f}")
    left.set(title="On-policy, a baseline changes the variance", xlabel="baseline b, at π = (.7, .2, .1)",
             ylabel="total variance of one sample", ylim=(0, None))
    left.legend()
    exact = bandit_gradient(SKEWED, ARMS)
    for name, source in [("on-policy", SKEWED), ("off-policy, data from (.3, .6, .1)", BEHAVIOUR)]:
        means = torch.stack([off_policy_bandit_update(SKEWED, source, ARMS, baseline=b) for b in baselines])
        right.plot(baselines, (means - exact).norm(dim=-1) / exact.norm(), label=name)
    right.set(title="Off-policy, it changes the answer", xlabel="baseline b", ylabel="‖mean − ∇J‖ / ‖∇J‖")
    right.legend()
    utils.save_figure(fig, directory, "01_baseline")


def figure_importance(bias, error, directory):
    """Left: E[ρ²] against length for three distances, formula and enumeration. Right: error of the three estimators."""
    fig, (left, right) = utils.figure(2)
    lengths = torch.arange(1, 101)
    direction = torch.tensor([-1.0, -0.5, 1.5], dtype=torch.float64)
    for step, marker in [(0.6, "o"), (0.3, "s"), (0.1, "^")]:
        probs = torch.softmax(BEHAVIOUR.log() + step * direction, -1)
        moment = ratio_second_moment(probs, BEHAVIOUR, lengths)
        left.semilogy(lengths, moment, marker=marker, markevery=15, label=f"χ² per token = {moment[0] - 1:.3f}")
    left.set(title="A trajectory ratio's variance explodes with length", xlabel="length T (independent tokens)",
             ylabel="E[ρ²] = responses per effective one", ylim=(0.7, 1e8))
    left.legend()
    lengths = torch.arange(1, len(error) + 1)
    names = ["no ratio (biased)", "token ratios (biased)", "trajectory ratio (unbiased)"]
    for column, (name, marker) in enumerate(zip(names, "so^")):
        right.semilogy(lengths, error[:, column], marker=marker, label=name)
    right.axhline(1, color="0.6", linewidth=1, linestyle="-", zorder=0)
    right.annotate("no better than guessing 0", (len(error), 1.05), ha="right", va="bottom", color="0.4", fontsize=8)
    right.set(title="Token ratios trade variance for bias", xlabel="length T",
              ylabel="RMS error / ‖∇J‖, 256 responses", xticks=lengths.tolist())
    right.legend()
    utils.save_figure(fig, directory, "01_importance")


def figure_loss(once, often, directory, *, generator):
    """Left: J and the two forms of the loss in one training run. Right: clipping against the step within the batch."""
    fig, (left, right) = utils.figure(2)
    batches = torch.arange(len(once["J"]))
    for name, values in [("expected reward J", once["J"][:-1]), ("loss −mean(ρ A)", once["loss"][:, 0]),
                         ("loss −mean(A log π)", once["log_loss"][:, 0])]:
        mean, low, high = seed_interval(values, generator=generator)
        (line,) = left.plot(batches[:-1], mean, label=name)
        left.fill_between(batches[:-1], low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    left.set(title="The policy learns; neither loss tells you so", xlabel="batch (one update each)", ylim=(-0.35, 1.05))
    left.legend(loc="center right")
    steps = torch.arange(1, often["clip_fraction"].shape[1] + 1)
    mean, low, high = seed_interval(often["clip_fraction"].mean(0), generator=generator)
    whiskers = torch.stack([mean - low, high - mean]).numpy()
    right.bar(steps.numpy(), mean.numpy(), yerr=whiskers, color="#0072B2", width=0.6, capsize=4)
    right.annotate("ρ = 1 exactly:\nnothing to clip", (1, 0.002), ha="center", va="bottom", fontsize=9)
    right.set(title="Clipping needs a second step on the same batch", xlabel="update number within the batch",
              ylabel="share of responses clipped (ε = .2)", xticks=steps.tolist(), xlim=(0.35, None))
    utils.save_figure(fig, directory, "01_loss")


# %% Exercises: python 01_reinforce.py --exercise 1


def bandit_optimal_baseline(probs, rewards):
    """optimal_baseline for a softmax bandit."""
    return optimal_baseline(probs, rewards, bandit_scores(probs))


EXERCISES = {
    1: ("bandit_gradient", "∇J of a softmax bandit with respect to its logits: probs (A,), rewards (A,) → (A,).",
        bandit_gradient, [(UNIFORM, ARMS), (SKEWED, ARMS), (BEHAVIOUR, ARMS.flip(0) - 2)]),
    2: ("bandit_optimal_baseline",
        "The constant b that minimises the total variance of (r − b)·∇log π: probs (A,), rewards (A,) → scalar.",
        bandit_optimal_baseline, [(UNIFORM, ARMS), (SKEWED, ARMS), (BEHAVIOUR, ARMS.flip(0) - 2)]),
    3: ("ratio_second_moment",
        "E_b[ρ²] of `length` independent tokens: probs (A,), behaviour_probs (A,), length → scalar.",
        ratio_second_moment, [(UNIFORM, BEHAVIOUR, 1), (SKEWED, BEHAVIOUR, 3), (BEHAVIOUR, SKEWED, 8)]),
}


def main(argv=None):
    args = utils.lesson_arguments(__doc__, argv)
    if args.exercise is not None:
        utils.run_exercise(EXERCISES, args)
    generator = utils.seed_everything(args.seed)
    claims = []
    claims_policy_gradient(claims, generator)
    claims_baseline(claims)
    claims_off_policy(claims, generator)
    claims_importance_sampling(claims, generator)
    lengths = range(1, 7 if args.quick else 9)
    bias, error = error_against_length(lengths, probs=UNIFORM, behaviour_probs=BEHAVIOUR, responses=256)
    claims_error_against_length(claims, bias, error)
    runs = [train_on_batches(steps_per_batch=steps, eps=eps, seeds=16 if args.quick else 64, batches=30,
                             generator=torch.Generator().manual_seed(args.seed))
            for steps, eps in [(1, 0.2), (1, float("inf")), (4, 0.2), (4, float("inf"))]]
    claims_loss(claims, *runs)
    figure_baseline(args.out)
    figure_importance(bias, error, args.out)
    figure_loss(runs[0], runs[2], args.out, generator=generator)
    utils.finish(claims, args)


if __name__ == "__main__":
    torch.set_num_threads(1)  # every tensor here is tiny: more threads would only wait for each other
    main()
