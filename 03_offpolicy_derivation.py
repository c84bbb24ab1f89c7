"""Lesson 03: group-relative REINFORCE is one gradient step on a loss that never asks where the data came from.

Take the KL-regularised objective, write down what its optimum demands of every pair of responses, square the
violation and take ONE gradient step: out comes REINFORCE with the group mean as baseline. Nobody assumed that the
responses were sampled from the policy. Whether the step is a good one is another matter: two small examples show data
that pull a policy to the wrong place. (Sections 1 to 5 are the main derivation of arXiv 2509.24203.)

Run       python 03_offpolicy_derivation.py [--quick] [--seed N] [--claims]      or  --exercise 1  (2, 3)
You see   eight sections of numbers, each checked where it is made, and three figures; about 4 seconds on a laptop.
"""
# %%
import math

import torch
from torch.distributions.constraints import simplex

from utils import Lesson, figure, method_style

lesson = Lesson(__name__, __doc__)
TAU = 0.5  # τ, the strength of the pull towards the present policy
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)  # of a bandit: one prompt, three responses, called arms
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)  # π_b, who made the data; up to section 5 also π_t

# %% [markdown]
# ## 1. The surrogate objective
# The policy in iteration t is π_t, the *anchor*. For one prompt we want a policy π near it that earns more reward r:
#
#     maximise   F(π) = Σ_y π(y)·r(y) − τ·KL(π ‖ π_t),      KL(π ‖ π_t) = Σ_y π(y)·log(π(y)/π_t(y)).             (3.1)
# where y runs over all responses. As a single KL, F shows its maximiser. Join the sums, with r = τ·log exp(r/τ):
#
#     F(π) = τ·Σ_y π(y)·[ log exp(r(y)/τ) + log π_t(y) − log π(y) ]
#          = τ·Σ_y π(y)·log[ π_t(y)·exp(r(y)/τ) / π(y) ].
#
# The numerator would be a policy if it summed to 1. So divide it by its sum Z and call the result π*:
#
#     π*(y) = π_t(y)·exp(r(y)/τ) / Z,      Z = Σ_y π_t(y)·exp(r(y)/τ),                                           (3.2)
#     F(π)  = τ·Σ_y π(y)·[ log Z + log(π*(y)/π(y)) ] = τ·log Z − τ·KL(π ‖ π*).                                   (3.3)
# A KL is never negative, and 0 only between equals: π* is the one maximiser, and F(π*) = τ·log Z.
#
# With numbers, π_t = (.3, .6, .1), r = (0, .8, 1), τ = .5: the three numerators are .3·e⁰ = .3, .6·e^1.6 = 2.9718 and
# .1·e² = .7389. Their sum is Z = 4.0107, and τ·log Z = .6945.

# %%
def kl_regularised_optimum(old_probs, rewards, *, tau):
    """π* = π_t·exp(r/τ)/Z, equation (3.2); (A,), (A,) → (A,). What π_t never says stays at 0, at any reward."""
    if not (simplex.check(old_probs) and old_probs.shape == rewards.shape and 0 < tau < math.inf):
        raise ValueError(f"need probabilities, as many rewards and tau in (0, ∞); got {old_probs}, {rewards}, {tau}")
    return torch.softmax(old_probs.log() + rewards.to(old_probs.dtype) / tau, dim=-1)  # in logs: exp(r/τ) may overflow


lesson.section("1. The surrogate objective")
optimum = kl_regularised_optimum(BEHAVIOUR, REWARDS, tau=TAU)
lesson.check("(3.2) π* of the example", optimum, [0.0747995, 0.7409681, 0.1842324], 1e-7)
log_z = math.log(0.3 + 0.6 * math.exp(1.6) + 0.1 * math.exp(2))
others = torch.softmax(2 * torch.randn(1000, 3, dtype=torch.float64, generator=lesson.generator), -1)
objective = (others * (REWARDS - TAU * (others / BEHAVIOUR).log())).sum(-1)  # (3.1)
single_kl = TAU * (log_z - (others * (others / optimum).log()).sum(-1))
lesson.check("(3.3) 1000 random π: F(π) and the right side differ by at most", (objective - single_kl).abs().max(), 0)
lesson.say("The best policy near π_t is π_t tilted by the rewards. But Z is a sum over all responses.")

# %% [markdown]
# ## 2. Pairwise consistency
# For a language model nobody can compute Z. Take the logarithm of (3.2), multiply by τ and solve for the reward:
#
#     r(y) − τ·(log π*(y) − log π_t(y)) = τ·log Z,      the same number for every y.                             (3.4)
# Two responses are enough to get rid of Z. For any policy π, give the left side a name:
#
#     a_i = r(y_i) − τ·(log π(y_i) − log π_t(y_i)).      At π = π*, a_1 = a_2 for ANY two responses.             (3.5)
# "Any" is where the off-policy freedom comes from: it does not matter who found the pair. And backwards: if a is one
# number for all responses, solving for π(y) gives a constant times π_t(y)·exp(r(y)/τ), so π = π*.

# %%
lesson.section("2. Pairwise consistency")
lesson.check("(3.5) a of the three arms at π*", REWARDS - TAU * (optimum / BEHAVIOUR).log(), [TAU * log_z] * 3)
lesson.say("A policy is optimal exactly when no two responses disagree.")

# %% [markdown]
# ## 3. A loss from a finite sample
# Now we hold a *group*: K responses y_1 … y_K to the prompt, from anywhere, with rewards r_i. The policy is π_θ, θ its
# parameters. Square the disagreement of each pair:
#
#     L̂(θ) = (1/K²)·Σ_{i<j} (a_i − a_j)² / (1+τ)²,      a_i = r_i − τ·(log π_θ(y_i) − log π_t(y_i)).            (3.6)
# One identity turns sums over pairs into sums over members, for numbers u_i and numbers or vectors v_i. A sum over all
# i and j counts each pair twice, and i = j adds 0:
#
#     Σ_{i<j} (u_i − u_j)·(v_i − v_j) = ½·Σ_i Σ_j (u_i·v_i − u_i·v_j − u_j·v_i + u_j·v_j)
#                                     = K·Σ_i u_i·v_i − (Σ_i u_i)·(Σ_j v_j)
#                                     = K·Σ_i (u_i − ū)·v_i,      because Σ_i u_i = K·ū.                         (3.7)
# With u = v = a the last line is K·Σ_i (a_i − ā)·a_i = K·Σ_i (a_i − ā)² = K²·Var(a), so
#
#     L̂(θ) = Var(a_1 … a_K) / (1+τ)².                                                                           (3.8)
# Why (1+τ)²? It sets the scale and no direction; some versions of the text omit it (`scale=False`). Our reading: a_i
# holds a reward with weight 1 and a log-ratio with weight τ, so a_i/(1+τ) is a weighted average, and L̂ does not grow
# like τ². Section 4's step has the factor 2τ/(1+τ)² ≤ ½, not 2τ: never too large, yet near 0 with τ (.02 at τ = .01).
#
# With numbers, each arm once and π_θ = π_t, so that a = r: the pairs give .8² + 1² + .2² = 1.68. Divided by K² = 9 this
# is .1867, and divided by 1.5² it is .0830.

# %%
def pairwise_surrogate_loss(logprobs, old_logprobs, rewards, *, tau, scale=True, pair_weights=None):
    """L̂ of each group, equation (3.6): log π_θ and log π_t of WHOLE responses, and their rewards, (..., K) → (...).
    scale=False leaves out 1/(1+τ)². pair_weights (..., K, K), symmetric, puts a weight on each pair."""
    weights = rewards.new_ones(rewards.shape[-1:] * 2) if pair_weights is None else pair_weights
    if not (logprobs.shape == old_logprobs.shape == rewards.shape and rewards.shape[-1:] >= (2,) and 0 < tau < math.inf
            and weights.shape[-2:] == rewards.shape[-1:] * 2 and torch.allclose(weights, weights.mT)):
        raise ValueError("need three (..., K), K ≥ 2, a finite tau > 0 and symmetric pair_weights (..., K, K); got "
                         f"{[tuple(v.shape) for v in (logprobs, old_logprobs, rewards, weights)]} and tau {tau}")
    adjusted = rewards - tau * (logprobs - old_logprobs.detach())
    violation = weights * (adjusted.unsqueeze(-1) - adjusted.unsqueeze(-2)).square()  # (..., K, K): each pair twice
    loss = violation.sum((-2, -1)) / 2 / rewards.shape[-1] ** 2
    return loss / (1 + tau) ** 2 if scale else loss


lesson.section("3. A loss from a finite sample")
at_anchor = pairwise_surrogate_loss(BEHAVIOUR.log(), BEHAVIOUR.log(), REWARDS, tau=TAU)
lesson.check("(3.6) L̂ at π_t, each arm once: 1.68/9/1.5² = Var(r)/1.5²", at_anchor, 1.68 / 9 / 2.25)
lesson.check("(3.6) L̂ at π*", pairwise_surrogate_loss(optimum.log(), BEHAVIOUR.log(), REWARDS, tau=TAU), 0)
lesson.say("The loss needs the rewards and log-probabilities of what we hold, and nothing about where it came from.")

# %% [markdown]
# ## 4. One gradient step
# Only log π_θ depends on θ, so ∇a_i = −τ·v_i with the score v_i = ∇log π_θ(y_i). Differentiate (3.6):
#
#     ∇L̂ = 2/(K²·(1+τ)²)·Σ_{i<j} (a_i − a_j)·(∇a_i − ∇a_j)
#         = −2τ/(K²·(1+τ)²)·Σ_{i<j} (a_i − a_j)·(v_i − v_j)
#         = −2τ/(1+τ)² · (1/K)·Σ_i (a_i − ā)·v_i,      by (3.7) with u = a.                                      (3.9)
# At the anchor, θ = θ_t, every log-ratio is 0 and a_i is just r_i:
#
#     ∇L̂(θ_t) = −2τ/(1+τ)² · (1/K)·Σ_i (r_i − r̄)·∇log π_θ(y_i).                                               (3.10)
# That is REINFORCE with the group mean as baseline, up to a constant that a learning rate absorbs. Nobody assumed
# y ~ π_θ. (With K = 2, the first step has the direction of DPO's, which learns from pairs, one preferred to the other.)
#
# With numbers: r − r̄ = (−.6, .2, .4). The score of arm i in the logits is e_i − π (e_i is 1 at i, 0 elsewhere), and π
# drops out because Σ_i (r_i − r̄) = 0. So ∇L̂ = −(2·.5/1.5²)·⅓·(−.6, .2, .4) = (.0889, −.0296, −.0593).

# %%
def group_reinforce_loss(logprobs, rewards):
    """−(1/K)·Σ_i (r_i − r̄)·log π_θ(y_i); (..., K), (..., K) → (...). No sampler, no ratio, no old policy."""
    return -((rewards - rewards.mean(-1, keepdim=True)) * logprobs).mean(-1)


def two_gradients(policy, theta, old_theta, group, rewards, *, tau=TAU):
    """∇L̂ and 2τ/(1+τ)²·∇REINFORCE at theta, for the responses `group`. policy(theta): log π of every response."""
    theta = theta.clone().requires_grad_()
    logprobs = policy(theta)[group]
    losses = (pairwise_surrogate_loss(logprobs, policy(old_theta)[group], rewards[group], tau=tau),
              2 * tau / (1 + tau) ** 2 * group_reinforce_loss(logprobs, rewards[group]))
    return [torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses]


def language_model(theta, second_token=1.0):
    """Each of 3 tokens depends on the one before: (12,), logits after each token and at the start → log π (27,)."""
    after, start = theta.view(4, 3).log_softmax(-1).split((3, 1))
    return (start.view(3, 1, 1) + second_token * after.view(3, 3, 1) + after.view(1, 3, 3)).flatten()


lesson.section("4. One gradient step")
both = two_gradients(lambda logits: logits.log_softmax(-1), BEHAVIOUR.log(), BEHAVIOUR.log(), [0, 1, 2], REWARDS)
lesson.check("(3.10) bandit, each arm once: ∇L̂", both[0], [0.0888889, -0.0296296, -0.0592593], 1e-7)
theta = torch.randn(12, dtype=torch.float64, generator=lesson.generator)  # now a tiny language model, any responses:
grades, own = torch.rand(27, dtype=torch.float64, generator=lesson.generator), language_model(theta).exp()
sources = {"the policy itself": torch.multinomial(own, 5, replacement=True, generator=lesson.generator),
           "all, uniformly": torch.randint(27, (5,), generator=lesson.generator), "its least likely": own.argsort()[:5],
           "one repeated": torch.tensor([0, 0, 0, 0, 26]), "a human": torch.tensor([26, 1, 0, 13, 2])}
for name, group in sources.items():
    both = two_gradients(language_model, theta, theta, group, grades)
    lesson.check(f"(3.10) responses from {name}: |∇L̂ − constant·∇REINFORCE|", (both[0] - both[1]).norm(), 0)
lesson.say("REINFORCE is the first step on this loss, whoever wrote the responses; and only the first.")

# %% [markdown]
# ## 5. One minimiser for all data, but not one first step
# Let a source π_b hand us a huge group. Of all its ordered pairs, the share π_b(i)·π_b(j) is (response i, response j):
#
#     L̂ = ½·Σ_i Σ_j π_b(i)·π_b(j)·(a_i − a_j)² / (1+τ)² = Var_{y~π_b}(a) / (1+τ)².                             (3.11)
# It is 0 if and only if a is one number for all responses that π_b can produce. If it can produce every response, then
# π = π* (section 2), whatever the frequencies. If it cannot, L̂ says nothing about the responses that it lacks.
# (REINFORCE takes one step on L̂, moves the anchor there and starts over; REBEL and CoPG take many on one like it.)

# %%
lesson.section("5. One minimiser for all data, but not one first step")
data = {"the anchor's (.3, .6, .1)": BEHAVIOUR, "uniform (⅓, ⅓, ⅓)": torch.ones_like(BEHAVIOUR) / 3,
        "mostly arm 3 (.1, .1, .8)": BEHAVIOUR.new_tensor([0.1, 0.1, 0.8])}
paths = {name: [BEHAVIOUR.log()] for name in data}
for name, path in paths.items():
    shares = len(REWARDS) ** 2 * torch.outer(data[name], data[name])  # each arm is held once: so weigh its pairs (3.11)
    for _ in range(400):
        logits = path[-1].clone().requires_grad_()
        loss = pairwise_surrogate_loss(logits.log_softmax(-1), BEHAVIOUR.log(), REWARDS, tau=TAU, pair_weights=shares)
        path.append((logits - 4 * torch.autograd.grad(loss, logits)[0]).detach())
    lesson.check(f"(3.11) data {name}: 400 steps end at π*", path[-1].softmax(-1), optimum, 1e-9)
tilted = torch.log_softmax(optimum.log() + torch.tensor([0, 0, 9]), -1)  # 99.9 % on arm 3, odds of arms 1 and 2 kept
loss = pairwise_surrogate_loss(tilted[:2], BEHAVIOUR[:2].log(), REWARDS[:2], tau=TAU)
lesson.check("(3.11) data without arm 3: L̂ of a policy with 99.9 % on arm 3", loss, 0)
if lesson.draws:
    fig, axis = figure(width=7.5, height=4.4)
    arrow = {"arrowstyle": "-|>", "linewidth": 2.5, "color": method_style("reinforce")["color"]}
    for (name, path), (x, y, side) in zip(paths.items(), [(-0.03, 0.03, "right")] * 2 + [(0.03, -0.05, "left")]):
        path = torch.stack([logits[:2] - logits[2] for logits in path])
        tip = path[0] + 0.7 * (path[1] - path[0]) / (path[1] - path[0]).norm()  # the learning rate sets the length
        axis.annotate("", tip.tolist(), path[0].tolist(), arrowprops=arrow)
        axis.text(tip[0] + x, tip[1] + y, f"data: {name}", ha=side)
        axis.plot(*path.T, "--", color="black", label="many steps on L̂, same data" if side == "left" else None)
    axis.plot(*path[0], "o", color="black", markersize=9, label=r"start: the anchor $\pi_t$")
    axis.plot(*path[-1], "*", color="black", markersize=16, label=r"end: the minimiser $\pi^*$")
    axis.set(xlabel="logit 1 − logit 3", ylabel="logit 2 − logit 3", ylim=(1.12, 2.16),
             title="One minimiser for every data source; REINFORCE's single step (arrows) depends on it")
    fig.legend(loc="outside lower center", ncols=2)
    lesson.save_figure(fig, "03_pairwise")
lesson.say("The minimiser is the same for every sampling distribution; the single step is not.")

# %% [markdown]
# ## 6. Many turns
# An agent answers several times (the paper's appendix; our reading). A trajectory 𝒯 = (x₁, y₁, …, xₙ, yₙ), numbered by
# turns here, holds prompts x_l, which the environment draws, responses y_l and one return R. With P for its dice,
#
#     π_θ(𝒯) = Π_l P(x_l | …)·π_θ(y_l | x_l),   log(π_θ(𝒯)/π_t(𝒯)) = Σ_l log(π_θ(y_l | x_l)/π_t(y_l | x_l)).    (3.12)
# P cancels: the derivation stays, log π_θ is a sum over turns. (A token is a turn whose prompt is the prefix.)
# One thing is lost: π* would load the dice, which no policy can. With a fair coin x₂ and R = x₂ + ½·y₁·y₂, it wants
# π*(x₂ = 1) = e^{1/τ}/(e^{1/τ} + 1). A policy that copies the rest of π* has the log-ratio (R − x₂)/τ + const.; so a =
# R − (R − x₂) + const. = x₂ + const., and Var(a) = Var(x₂) = ½·½ = ¼ is left.

# %%
lesson.section("6. Many turns")
dice = BEHAVIOUR.view(1, 3, 1).expand(3, 3, 3).flatten()  # the environment draws the second of the three tokens
surrogate, _ = two_gradients(lambda theta: language_model(theta, 0.0) + dice.log(), theta, theta, group, grades)
_, reinforce = two_gradients(lambda theta: language_model(theta, 0.0), theta, theta, group, grades)
lesson.check("(3.10) |∇L̂ of trajectories − constant·∇REINFORCE of turns|", (surrogate - reinforce).norm(), 0)
lesson.say("Many turns change nothing in the step. Only luck keeps a policy from being exactly consistent.")

# %% [markdown]
# ## 7. First pitfall: data that stay as they are
# Is the step a good one? Train on π_b = (.3, .6, .1) for ever. With μ = Σ_i π_b(i)·r_i the mean update of the logits is
#
#     Σ_i π_b(i)·(r_i − μ)·(e_i − π_θ) = c − π_θ·Σ_i π_b(i)·(r_i − μ) = c,      c_i = π_b(i)·(r_i − μ),         (3.13)
# the same at every π_θ (groups of K give (K−1)/K·c). So the logits walk a line, θ_0 + s·c after t steps of size η, with
# s = η·t, and the largest c wins. Here μ = .58 and c = (.3·(−.58), .6·.22, .1·.42): arm 2, six times as frequent, beats
# the better arm 3. On the way the expected reward, here J = Σ_i π(i)·r_i, overshoots: dπ(i)/ds = π(i)·(c_i − c̄) with
# c̄ = Σ_i π(i)·c_i, so its slope is the covariance of c and r under π: .0492 at s = 0, π uniform, and −.0017 at s = 20.
#
# How frequent must arm 3 be? Let q = π_b(3). If arms 1 and 2 share the rest 1 : 2, then 1 − μ = 7(1−q)/15 and .8 − μ =
# (4−7q)/15, and c_3 > c_2 reads 7q > ⅔·(4−7q), so q > 8/35. If π_b(1) stays .3, then μ = .56 + .2q, and it reads
# q·(.44−.2q) > (.7−q)·(.24−.2q), or .4q² − .82q + .168 < 0, so q > (.82 − √.4036)/.8 = .2309.
#
# Two repairs: refresh the data now and then (seldom is only slower; lesson 04, section 5); or weigh by π_θ/π_b, for
#
#     Σ_i π_θ(i)·(r_i − μ)·(e_i − π_θ) = π_θ⊙(r − μ) − π_θ·(J − μ) = π_θ⊙(r − J),   ∇J, as on fresh data.       (3.14)

# %%
def bandit_drift(behaviour_probs, rewards):
    """c = π_b ⊙ (r − μ), equation (3.13); (A,), (A,) → (A,): the mean update of softmax logits on data from π_b."""
    if not (simplex.check(behaviour_probs).all() and behaviour_probs.shape == rewards.shape):
        raise ValueError(f"need probabilities and as many rewards; got {behaviour_probs}, {rewards}")
    return behaviour_probs * (rewards - (behaviour_probs * rewards).sum(-1, keepdim=True))


def train_bandit(behaviour_probs, *, steps, step_size=1.0, refresh_every=math.inf):
    """J before each mean update of the logits, which start at 0, and after the last one; (steps+1,)."""
    theta, values = torch.zeros_like(REWARDS), []
    for step in range(steps + 1):
        values.append(theta.softmax(-1) @ REWARDS)
        if step and step % refresh_every == 0:
            behaviour_probs = theta.softmax(-1)
        theta = theta + step_size * bandit_drift(behaviour_probs, REWARDS)
    return torch.stack(values)


lesson.section("7. First pitfall: data that stay as they are")
drift = bandit_drift(BEHAVIOUR, REWARDS)
groups = torch.cartesian_prod(*[torch.arange(3)] * 3)  # every group of K = 3 that π_b can draw
theta = torch.randn(3, dtype=torch.float64, generator=lesson.generator, requires_grad=True)
loss = BEHAVIOUR[groups].prod(-1) @ group_reinforce_loss(theta.log_softmax(-1)[groups], REWARDS[groups])
lesson.check("(3.13) c = π_b·(r − μ)", drift, [-0.174, 0.132, 0.042])
lesson.check("(3.13) mean of all groups of 3 at a random π_θ: ⅔·c", -torch.autograd.grad(loss, theta)[0], drift * 2 / 3)
time = torch.arange(0, 1000.5, 0.01, dtype=torch.float64)  # ηt
value = torch.softmax(time[:, None] * drift, -1) @ REWARDS
lesson.check("J at ηt = 0, 10, 1000", value[[0, 1000, 100000]], [0.6, 0.830138, 0.8], 1e-6)
lesson.check("J peaks at ηt, with J", [time[value.argmax()], value.max()], [13.2, 0.835], 0.02)
runs = {"fixed data": train_bandit(BEHAVIOUR, steps=1000),
        "fixed data with the ratio": train_bandit(torch.ones_like(drift) / 3, steps=1000, refresh_every=1),  # (3.14)
        "refreshed every 10 steps": train_bandit(BEHAVIOUR, steps=1000, refresh_every=10),
        "refreshed every 50 steps": train_bandit(BEHAVIOUR, steps=1000, refresh_every=50)}
lesson.check(f"J after 1000 steps: {'; '.join(runs)}", [run[-1] for run in runs.values()], [0.8, 1, 1, 1], 2e-3)
q = torch.cat([REWARDS.new_tensor([8 / 35, (0.82 - 0.4036**0.5) / 0.8]), torch.linspace(0.02, 0.6, 100)])
mixes = {"arms 1 and 2 share the rest 1 : 2 (zero at .2286)": torch.stack([(1 - q) / 3, 2 * (1 - q) / 3, q], -1),
         "arm 1 stays at .3 (zero at .2309)": torch.stack([0.3 + 0 * q, 0.7 - q, q], -1)}
leads = {name: bandit_drift(mix, REWARDS.expand_as(mix)).diff()[:, 1] for name, mix in mixes.items()}
lesson.check("c₃ − c₂ at 8/35 (1 : 2) and .2309 (arm 1 at .3)", torch.stack([*leads.values()]).diagonal(), 0)
if lesson.draws:
    fig, (left, right) = figure(2, width=4.6, height=4)
    black = {"color": "black", "linestyle": "-."}, {"color": "black", "linestyle": ":"}
    for (name, run), style in zip(runs.items(), (method_style("reinforce"), method_style("reinforce-is"), *black)):
        left.plot(range(1, 1001), run[1:], label=name, **style)
    left.set(title="Fixed data: REINFORCE ends on arm 2, J = .8", xlabel="steps (η = 1)", xscale="log",
             ylabel="expected reward J", ylim=(0.6, 1.02))
    for (name, lead), line in zip(leads.items(), ("-", "--")):
        right.plot(q[2:], lead[2:], label=name, color="black" if line == "-" else "0.55", linestyle=line)
    right.plot(0.1, drift[2] - drift[1], "ks", label="this bandit: share .1")
    right.axhline(0, color="0.6", linewidth=1, linestyle="-", zorder=0)
    right.set(title="Arm 3 wins if its share is above .23", ylabel="lead of arm 3, $c_3 - c_2$", ylim=(-0.26, 0.19),
              xlabel=r"share of arm 3 in the data, $\pi_b(3)$")
    left.legend(loc="lower right")
    right.legend(loc="lower right", fontsize=9)
    lesson.save_figure(fig, "03_pitfalls")
lesson.say("Any data may be used, but not any data lead to the best policy.")

# %% [markdown]
# ## 8. Second pitfall: responses that nobody sampled
# A language model has more responses than anyone can sample. Take four: two tokens, each 0 or 1, with a logit θ for 1.
# We repeat the group 00, 01, 10 with rewards .3, 1, 1 (r̄ = 23/30). Nobody sampled 11, whose reward is 0. The score of
# a token y is y − σ(θ), the r_i − r̄ sum to 0, and each token is 1 in one response of reward 1. So in a step of size 1
#
#     each logit rises by ⅓·(1 − 23/30) = 7/90,      and after t steps π(11) = σ(7t/90)² → 1.                   (3.15)

# %%
lesson.section("8. Second pitfall: responses that nobody sampled")
bits, rewards = torch.cartesian_prod(*[torch.arange(2)] * 2), BEHAVIOUR.new_tensor([0.3, 1, 1, 0])
logits = BEHAVIOUR.new_zeros(2).requires_grad_()
loss = group_reinforce_loss(torch.nn.functional.logsigmoid((2 * bits[:3] - 1) * logits).sum(-1), rewards[:3])
lesson.check("(3.15) the first step: −∇REINFORCE = 7/90", -torch.autograd.grad(loss, logits)[0], 7 / 90)
probs = torch.sigmoid((2 * bits - 1) * (7 / 90 * torch.arange(61).double()).view(61, 1, 1)).prod(-1)  # (steps, 4)
sampled, value = probs[:, :3] @ rewards[:3] / probs[:, :3].sum(-1), probs @ rewards
lesson.check("at first and after 60 steps: mean reward of the sampled", sampled[[0, 60]], [0.7667, 0.9967], 1e-3)
lesson.check("at first and after 60 steps: true J", value[[0, 60]], [0.575, 0.0185], 1e-3)
if lesson.draws:
    fig, axis = figure(width=7, height=3.8)
    axis.plot(torch.stack([sampled, value, probs[:, 3]], -1), label=[
        "mean reward among the three sampled", "true expected reward J", "share of 11, which nobody sampled"])
    axis.set(title="Better on what was sampled, worse in truth", xlabel="steps (η = 1)", ylim=(0, 1.02))
    axis.legend(loc="center right")
    lesson.save_figure(fig, "03_unseen")
lesson.say("What a step does to responses outside the data, the data cannot tell.")

# %% [markdown]
# REINFORCE may use any data: that is proved. That its steps improve the policy, or converge, is not. The paper answers
# with two principles. One is to regularise the update, which keeps it near the data. Whether that is enough depends: on
# this fixed data narrow clipping ends at J = .70, REINFORCE at .80 (lesson 04). The other: shape the data (lesson 05).

# %%
def check_data(function):
    for share in (0.02, 0.1, 0.3):
        probs = torch.as_tensor(function(share), dtype=torch.float64)
        if abs(probs[2] - share) > 1e-9 or train_bandit(probs, steps=100, step_size=1e4)[-1] < 0.99:
            return f"REINFORCE on data({share}) = {probs.tolist()} misses arm 3, or arm 3's share is not {share}"


lesson.finish({
    1: ("τ goes from .5 to 1. By which factor does the first step grow?", 1.125, "2τ/(1+τ)²: from 4/9 to ½ (3.10)."),
    2: ("Better data, π_b = (.3, .5, .2). On which arm does REINFORCE end?", 2, "c = (−.18, .10, .08) by (3.13)."),
    3: ("Shape the data: for any share below ½, a π_b with π_b(3) = share on which REINFORCE ends on arm 3.",
        "def data(share):", check_data)})
