"""Lesson 01: REINFORCE, and what "on-policy" buys.

If the responses come from the policy itself, the mean of reward × ∇log π is exactly the gradient of the expected
reward, and a baseline changes only the noise. If they come from anywhere else, neither is true. The textbook repair,
importance sampling, is exact again, and pays with a variance that grows exponentially with the length of a response.
The worlds here are so small that an expectation is a sum over EVERY response: the numbers are exact, not estimates.

Run it:   python 01_reinforce.py      (--quick: fewer seeds; --claims: the full table; --exercise 1: your turn)
You see:  six sections in 3 seconds, and figures/01_*.png. (lesson.check(claim, measured, expected) prints and checks.)
You need: the chain rule, and to know that a language model is a softmax over the next token.
"""
# %% Setup
import torch

from utils import Lesson, figure, method_style

lesson = Lesson(__name__, __doc__)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)    # a bandit: three responses (arms), the last is best
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)  # a policy that dislikes the best one
UNIFORM = torch.full((3,), 1 / 3, dtype=torch.float64)
STRINGS = torch.cartesian_prod(*[torch.arange(3)] * 3)          # every string of three tokens 0, 1, 2: (27, 3)

# %% [markdown]
# ## 1. The gradient of an expected reward
# A policy π with parameters θ draws a response y, and a reward r(y) comes back. We want to climb J = E_{y~π} r(y). The
# reward is a black box without derivatives. We need none: in J = Σ_y π(y)·r(y) only π depends on θ, and ∇π = π·∇log π:
#
#     ∇J = Σ_y r(y)·∇π(y) = Σ_y π(y)·r(y)·∇log π(y) = E_π[r·s],      s(y) = ∇log π(y), the score             (1.1)
#
# So draw y from π and step along r·s: that is REINFORCE. The smallest policy is a bandit: one response of three, its
# arms, with a number θ_a for each, its logit; a softmax makes probabilities of logits. log π(y) = θ_y − log Σ_a exp θ_a
# yields s(y) = e_y − π (e_y is 1 at y, else 0), so ∂J/∂θ_a = π_a·(r_a − J): up with the arms better than the mean.
# In a language model a response is a string of tokens: log π(y) = Σ_t log π(y_t | y_<t), so the score is a sum over
# tokens, s = Σ_t s_t. Ours knows three tokens, looks one token back and always writes three: 27 possible responses.
# %%
def softmax_scores(probs):
    """s(y) = ∇_θ log π(y) = e_y − π of every response y: (A,) → (A, A), one row for each y."""
    return torch.eye(len(probs), dtype=probs.dtype) - probs

def mean_and_variance(sampling_probs, values):
    """Exact mean (P,) and total variance of an estimator that takes values (N, P), a row for each response."""
    mean = sampling_probs @ values
    return mean, sampling_probs @ (values - mean).square().sum(-1)

def string_logprobs(logits):
    """log π(y_t | y_{t−1}) of all 27 strings, (27, 3): logits (4, 3), a row for each token before, row 3 for none."""
    before = torch.nn.functional.pad(STRINGS[:, :-1], (1, 0), value=3)  # the strings moved one place right, 3 in front
    return torch.log_softmax(logits, -1)[before, STRINGS]  # for each token, its row (the one before) and its column

lesson.section("1. The gradient of an expected reward")
gradient, _ = mean_and_variance(UNIFORM, REWARDS[:, None] * softmax_scores(UNIFORM))
lesson.check("(1.1) three arms, π uniform, J = .6: E[r·s] = π·(r − J)", gradient, [-1 / 5, 1 / 15, 2 / 15])
logits, behaviour_logits = torch.randn(2, 4, 3, dtype=torch.float64, generator=lesson.generator).requires_grad_()
rewards = torch.rand(27, dtype=torch.float64, generator=lesson.generator)  # one for each string
probs = string_logprobs(logits).sum(-1).exp()  # (27,)
exact = torch.autograd.grad(probs @ rewards, logits)[0].flatten()
token_scores = torch.autograd.functional.jacobian(string_logprobs, logits).flatten(2)  # (27, 3 tokens, 12 parameters)
probs, scores = probs.detach(), token_scores.sum(1)
mean, _ = mean_and_variance(probs, rewards[:, None] * scores)
lesson.check("(1.1) 27 strings: largest |E[r Σ_t s_t] − ∇J|, ∇J by autograd", (mean - exact).abs().max(), 0)
lesson.say("Sample from the policy, multiply the score by the reward: the mean is the gradient of J.")

# %% [markdown]
# ## 2. A baseline is free
# Probabilities always sum to 1, so E_π[s] = Σ_y π·∇log π = ∇ Σ_y π = 0. Subtracting a constant b from the reward leaves
# the mean alone: E_π[(r − b)·s] = ∇J. It changes the noise. The total variance of one sample (summed over coordinates)
# is the mean square minus the square of the mean, E[(r − b)²‖s‖²] − ‖∇J‖², a parabola in b. Completing the square:
#
#     V(b) = V(b*) + (b − b*)²·E‖s‖²,      b* = E[r‖s‖²] / E‖s‖²                                             (1.2)
#
# For π = (.3, .6, .1): ‖s(y)‖² = 1 − 2π(y) + ‖π‖² = (.86, .26, 1.26), E‖s‖² = .54, E[r‖s‖²] = .2508: long scores where
# responses are rare. The usual b = J = E_π r is best if all scores are equally long, and worse than b = 0 if b* < J/2:
# with one right answer, π = .9, and one wrong, V(0) = .0018, V(J) = .115; with nine right ones of .1 each .80 and .07.
# %%
def variance_of_one_sample(probs, rewards, baseline):
    return mean_and_variance(probs, (rewards - baseline)[:, None] * softmax_scores(probs))[1]

lesson.section("2. A baseline is free")
means = torch.stack([mean_and_variance(probs, (rewards - b)[:, None] * scores)[0] for b in (-3.0, 0.5, 10.0)])
lesson.check("27 strings, b = −3, .5, 10: largest |E[(r − b)·s] − ∇J|", (means - exact).abs().max(), 0)
squared_length = softmax_scores(BEHAVIOUR).square().sum(-1)
best = BEHAVIOUR @ (REWARDS * squared_length) / (BEHAVIOUR @ squared_length)
lesson.check("(1.2) π = (.3, .6, .1), J = .58: b* = .2508/.54", best, 0.2508 / 0.54)
lesson.say("On-policy any b is right. J is a good habit, but not the best b, and where b* < J/2 worse than none.")

# %% [markdown]
# ## 3. On someone else's data the baseline changes the answer
# Now another policy samples the data, called the behaviour policy, π_b, while we train π. π_b knows nothing of θ, so
#
#     E_b[(r − b)·s] = Σ_y π_b(y)·(r(y) − b)·∇log π(y) = ∇ E_b[(r − b)·log π]   ≠   ∇J                        (1.3)
#
# This climbs a weighted imitation: copy what is better than b, as often as π_b offers it. And E_b[s] is no longer 0, so
# b counts. With three arms, coordinate a of (1.3) is π_b(a)·(r_a − b) − π(a)·E_b[r − b]. At b = E_b[r] = .58 the last
# term is 0, and the policy that we train is gone from its own update. (Lesson 03 begins there.)
# %%
def off_policy_bandit_update(probs, behaviour_probs, rewards, *, baseline):
    weighted = behaviour_probs * (rewards - baseline)
    return weighted - probs * weighted.sum()

lesson.section("3. On someone else's data the baseline changes the answer")
baselines = torch.linspace(-0.2, 1.2, 71, dtype=torch.float64)  # number 10 is 0, 30 is .4, 39 is .58
updates = torch.stack([off_policy_bandit_update(UNIFORM, BEHAVIOUR, REWARDS, baseline=b) for b in baselines])
lesson.check("(1.3) π uniform, data from π_b, b = 0: arm 3 goes DOWN", updates[10], [-.58 / 3, .86 / 3, -.28 / 3])
lesson.check("(1.3) b = .4: arm 3 does not move, .1·(1 − .4) = (.58 − .4)/3", updates[30, 2], 0)
lesson.check("(1.3) b = E_b[r] = .58: arm 3 goes up, though less than arm 2", updates[39], [-0.174, 0.132, 0.042])
if lesson.draws:
    fig, (left, right) = figure(2)
    left.plot(baselines, torch.stack([variance_of_one_sample(BEHAVIOUR, REWARDS, b) for b in baselines]), color="0.4")
    for b, marker, name in (0, "s", "none, b = 0"), (0.58, "^", "mean reward, b = J = .58"), (best, "o", "b* = .46"):
        left.plot([b], [variance_of_one_sample(BEHAVIOUR, REWARDS, b)], "k" + marker, label=name)
    left.set(title="On-policy a baseline changes only the noise", xlabel="baseline b", ylabel="variance", ylim=(0, .4))
    left.legend(loc="upper center")
    for arm, height, name in (0, -0.235, "arm 1"), (1, -0.08, "arm 2"), (2, 0.21, "arm 3, the best"):
        right.plot(baselines, updates[:, arm], "-", color="#D55E00" if arm == 2 else "0.6", linewidth=1.5 + arm)
        right.text(1.2, height, name, ha="right")
    right.annotate("sign flips\nat b = .4", (0.4, 0), (0.55, -0.14), arrowprops={"arrowstyle": "->"})
    right.annotate("b = E_b[r] = .58", (0.58, 0.042), (0.45, 0.28), arrowprops={"arrowstyle": "->"})
    right.axhline(0, color="black", linewidth=0.8, linestyle="-")
    right.set(title="Off-policy it decides where the best arm goes", xlabel="baseline b", ylim=(-0.26, 0.36),
              ylabel="expected change of the logit")
    lesson.save_figure(fig, "01_baseline")
lesson.say("Off-policy the baseline is not about noise: below .4 the best arm is pushed down.")

# %% [markdown]
# ## 4. Importance sampling: exact, and hopeless for long responses
# Weight each response by the importance ratio ρ(y) = π(y)/π_b(y). If π_b can go wherever π can,
#
#     E_b[ρ·r·s] = Σ_y π_b·(π/π_b)·r·s = E_π[r·s] = ∇J                                                       (1.4)
#
# The price is in the weights: their mean is E_b[ρ] = Σ_y π = 1, but they vary. What does it cost? Suppose rewards of
# variance σ² that know nothing of their weights. The plain mean of m responses from π has variance σ²/m, the weighted
# mean Σρ_i r_i / Σρ_i of n responses from π_b has σ²·Σρ_i²/(Σρ_i)². They are equally noisy if
# m = (Σρ_i)²/Σρ_i² ≈ n/E_b[ρ²]. So n weighted responses are worth only m plain ones, their EFFECTIVE SAMPLE SIZE. Let
# a response be T independent tokens, ρ = Π_t ρ_t, and χ² (chi-squared) the variance of ONE token's ρ_t, E_b[ρ_t²] − 1:
#
#     E_b[ρ²] = Π_t E_b[ρ_t²] = (1 + χ²)^T,      1 + χ² = Σ_a π(a)²/π_b(a) for one token                      (1.5)
#
# Why so bad? log ρ is a sum of T terms with a negative mean, so nearly every weight sinks towards 0, and the mean of 1
# is kept up by a few giants, which a finite sample hardly ever contains.
# %%
lesson.section("4. Importance sampling: exact, and hopeless for long responses")
token_ratios = (string_logprobs(logits) - string_logprobs(behaviour_logits)).exp()
behaviour_probs = string_logprobs(behaviour_logits).sum(-1).exp()
mean, _ = mean_and_variance(behaviour_probs, (token_ratios.prod(-1) * rewards)[:, None] * scores)
lesson.check("(1.4) 27 strings from another policy: largest |E_b[ρ r s] − ∇J|", (mean - exact).abs().max(), 0)
eight = torch.cartesian_prod(*[torch.arange(3)] * 8)
second_moment = BEHAVIOUR[eight].prod(-1) @ (UNIFORM / BEHAVIOUR)[eight].prod(-1) ** 2
lesson.check("(1.5) π uniform, χ² = 2/3, all 6561 strings of 8 tokens: 1000 are worth 1000·(3/5)^8",
             1000 / second_moment, 1000 * 0.6**8)
lesson.say("After eight tokens of disagreement, 17 of 1000 responses are left; after twenty, none.")

# %% [markdown]
# ## 5. Ratios per token: some bias for much less noise
# PPO and GRPO weight each token by its own ratio ρ_t = π(y_t|y_<t)/π_b(y_t|y_<t) alone. As ρ_t·s_t = ∇ρ_t,
#
#     E_b[r·Σ_t ρ_t·s_t] = ∇ E_b[r·Σ_t ρ_t]   ≠   ∇J                                                         (1.6)
#
# The weights stay tame, and any baseline is harmless, as E_b[ρ_t·s_t | y_<t] = Σ_a π·∇log π = 0. But the other tokens
# are still those of π_b. In a chain of T independent tokens with r = Π_t q(y_t), q = (.2, .6, 1), the true gradient is
# ∇J = T·(E_π q)^(T−1)·∇E_π q. In (1.6) the other T − 1 tokens contribute E_b q = .52 instead of E_π q = .6: the right
# direction, but the share 1 − (.52/.6)^(T−1) of the length is missing, 13 % at T = 2, 63 % at 8, 93 % at 20.
# %%
def chain_errors(length, *, responses=256, quality=BEHAVIOUR.new_tensor([0.2, 0.6, 1.0])):  # noqa: B008 (a constant)
    """Root mean square error / ‖∇J‖ with no ratio, token ratios, the whole ratio: (3,). Baseline: E_b[r] in all."""
    strings = torch.cartesian_prod(*[torch.arange(3)] * length).view(-1, length)
    ratios, token_scores = (UNIFORM / BEHAVIOUR)[strings], softmax_scores(UNIFORM)[strings]
    sampling, advantages = BEHAVIOUR[strings].prod(-1), quality[strings].prod(-1) - 0.52**length
    exact, _ = mean_and_variance(UNIFORM[strings].prod(-1), advantages[:, None] * token_scores.sum(1))
    errors = []
    for weights in torch.ones_like(ratios), ratios, ratios.prod(-1, keepdim=True):
        mean, variance = mean_and_variance(sampling, advantages[:, None] * (weights[..., None] * token_scores).sum(1))
        errors.append(((mean - exact).square().sum() + variance / responses).sqrt() / exact.norm())
    return torch.stack(errors)

lesson.section("5. Ratios per token: some bias for much less noise")
bias = torch.stack([chain_errors(length, responses=torch.inf)[1] for length in (2, 3, 4)])
lesson.check("(1.6) T = 2, 3, 4: their bias is 1 − (.52/.6)^(T−1)", bias, [1 - (0.52 / 0.6) ** n for n in (1, 2, 3)])
error = torch.stack([chain_errors(length) for length in range(1, 6 if lesson.quick else 9)])
lesson.check("256 responses, T > 1: token ratios are the nearest", bool((error[1:, [1]] < error[1:, ::2]).all()), True)
if lesson.draws:
    fig, (left, right) = figure(2)
    for sampler, line in ((0.3, 0.6, 0.1), "-"), ((0.3, 0.45, 0.25), "--"), ((0.32, 0.36, 0.32), ":"):
        growth = sum(1 / 9 / p for p in sampler)  # (1.5), π uniform
        left.semilogy(growth ** torch.arange(101), "k" + line, label=f"{sampler}: χ² = {growth - 1:.2g}")
    left.set(title="Whole ratio: the cost explodes", xlabel="length T", ylim=(0.5, 1e12), ylabel="responses worth one")
    left.legend(loc=(0.32, 0.25), title="π uniform, data from")
    names = {"reinforce": "no ratio: biased", "reinforce-is": "token ratios: biased", "whole": "whole ratio: unbiased"}
    for (name, label), values in zip(names.items(), error.T):
        right.semilogy(range(1, len(values) + 1), values, label=label, **method_style(name, points=20))
    right.axhline(1, color="0.6", linewidth=1, linestyle="-", label="no update at all")
    right.set(title="Token ratios: nearest to ∇J, but less and less", xlabel="length T", ylabel="error / ‖∇J‖, n = 256")
    right.legend()
    lesson.save_figure(fig, "01_importance")
lesson.say("Token ratios: a small error near π_b and over few tokens. It grows with both; so stay near (lesson 04).")

# %% [markdown]
# ## 6. The value of the loss says nothing
# A program wants a loss to differentiate. PPO's is −mean min(ρA, clip(ρ, 1−ε, 1+ε)·A). Here ρ = π/π_old, π_old sampled
# the batch, and A_i = r_i − r̄ is reward less mean, lesson 02. Clip holds ρ within ε, say .2, of 1. Min takes the lower
# of both: a ρ that has gone beyond in A's direction is pushed no further. On a new batch ρ = 1 and ∇ρ = ρ·s = s, so
#
#     loss = −mean A = 0,      ∇loss = −mean A·s ≠ 0                                                          (1.7)
# %%
def ppo_clip_loss(logprobs, old_logprobs, advantages, *, eps):
    """−mean over the last dimension of min(ρA, clip(ρ, 1−eps, 1+eps)·A); eps = inf turns clipping off."""
    if not (logprobs.shape == old_logprobs.shape == advantages.shape and eps >= 0):
        raise ValueError(f"need three tensors of one shape and eps ≥ 0; got {advantages.shape}, {eps}")
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages).mean(-1)

lesson.section("6. The value of the loss says nothing")
two = torch.tensor([-1.3, -0.2], dtype=torch.float64, requires_grad=True)
loss = ppo_clip_loss(two, two.detach(), torch.tensor([1.0, -1.0]), eps=0.2)
lesson.check("(1.7) A = (1, −1) at ρ = 1: the loss", loss.abs(), 0)
lesson.check("(1.7) … and its gradient", torch.autograd.grad(loss, two)[0], [-0.5, 0.5])
bandit, log = torch.zeros(3, dtype=torch.float64), []
for _ in range(30):  # one step on each batch of 256
    log_policy = torch.log_softmax(bandit.requires_grad_(), -1)
    arms = torch.multinomial(log_policy.detach().exp(), 256, replacement=True, generator=lesson.generator)
    advantages = REWARDS[arms] - REWARDS[arms].mean()
    loss = ppo_clip_loss(log_policy[arms], log_policy[arms].detach(), advantages, eps=0.2)
    log.append(torch.stack([log_policy.exp() @ REWARDS, loss]).detach())
    bandit = (bandit - 2 * torch.autograd.grad(loss, bandit)[0]).detach()
expected_reward, losses = torch.stack(log, 1)
lesson.check("the bandit, 30 batches, one step on each: largest |loss|", losses.abs().max(), 0)
lesson.check("… and J at the end above .9", bool(expected_reward[-1] > 0.9), True)
if lesson.draws:
    fig, axis = figure(height=2.6)
    axis.plot(range(30), expected_reward, "k-", range(30), losses, "k--")
    axis.text(29, 0.84, "expected reward J", ha="right"), axis.text(29, 0.05, "loss", ha="right")
    axis.set(title="The policy learns; the loss stays at 0", xlabel="batch, one step on each", ylim=(-0.1, 1.05))
    lesson.save_figure(fig, "01_loss")
lesson.say("A loss of 0 is no broken run: watch the reward. Where data are fresh and used once, clipping does nothing.")

# %% Exercises: python 01_reinforce.py --exercise 1 --answer …
def check_effective_sample_size(function):
    for weights, expected in ([3.0] * 4, 4), ([2.0, 1, 0, 0], 1.8), ([1e30, 1, 1, 1], 1):
        old_logprobs = torch.tensor([-3.0, -5.0, -2.0, -4.0], dtype=torch.float64)
        if not abs(function(old_logprobs + 700 + torch.tensor(weights).log(), old_logprobs) - expected) < 1e-6:
            return f"four responses with weights in the proportion {weights} are worth {expected}"

EXERCISES = {
    1: ("π is uniform, data come from (.3, .6, .1), the baseline is .2: does arm 3, the best, go up or down?", "down",
        "(1.3): .1·(1 − .2) − (1/3)·(.58 − .2) = −.047. The data hold so little of arm 3 that the others decide."),
    2: ("χ² of one token is .05. Are 1000 responses of 100 tokens worth 950, 500, 50 or 8?", 8, "1000/1.05^100 = 7.6."),
    3: ("One step on each fresh batch. You turn ε from .2 to 1000. What happens to the run: better, worse or nothing?",
        "nothing", "ρ is 1 when the step is taken. Clipping needs a second step on the batch, or a stale one."),
    4: ("The effective sample size of n responses from their log-probabilities, (n,) and (n,) → scalar; no overflow.",
        "def effective_sample_size(logprobs, old_logprobs):", check_effective_sample_size)}
lesson.finish(EXERCISES)
