"""Lesson 05: shape the data. Leave responses out, or count good ones more, and know exactly what that does.

Claim. Lesson 03 allowed any data, so the data may be chosen. RED-Drop leaves responses out, RED-Weight counts good
ones more. Both are weights on the pairs of lesson 03's loss, but for one extra term in RED-Weight: imitation of the
good responses. On a policy's own samples that term is only a matter of pace. On other data it is what helps.

Run       python 05_data_shaping.py [--quick] [--seed N] [--claims]      or  --exercise 1  (2, 3)
You see   seven sections of numbers, each checked where it is made, and three figures; about 5 seconds on a laptop.
Before    Lesson 04 changed the update and took the data as they came. Here the update stays plain REINFORCE.
"""
# %% Setup
import math

import torch

from stale_world import (SETTINGS, descend, expected_reward, interval, random_worlds, rollout_version, sample_responses,
                         token_logprobs)
from utils import Lesson, figure, method_style

lesson = Lesson(__name__, __doc__)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)    # lesson 03's 3-arm bandit: the rewards prefer arm 3,
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)  # π_b, where its data come from, prefers arm 2
TWO_OF_EIGHT = (torch.arange(8) < 2).double()                   # a group: two responses are right, six are wrong

# %% [markdown]
# ## 1. Weights on the pairs, and RED-Drop
# Lesson 03 compared every pair of a group: K responses y_i to one prompt, with rewards r_i. Write ℓ_i = log π_θ(y_i),
# π_t for the policy before the step, τ for the pull towards it, and a_i = r_i − τ·(ℓ_i − log π_t(y_i)). At the optimum
# π* all a_i are equal, whoever sampled the pair. So some pairs may count more than others, with w_ij = w_ji ≥ 0:
#
#     L̂_w = (1/K²) Σ_{i<j} w_ij·(a_i − a_j)² / (1+τ)²
# One gradient step from θ_t, where a_i = r_i and ∇a_i = −τ·∇ℓ_i:
#
#     ∇L̂_w = −2τ/(1+τ)² · (1/K²) Σ_{i<j} w_ij·(r_i − r_j)·(∇ℓ_i − ∇ℓ_j)
# Exchange i and j: both differences change sign and the term stays. So Σ_{i<j} is half of Σ_{ij}, and in that double
# sum the part with −∇ℓ_j equals the part with ∇ℓ_i. The two halves add up to
#
#     ∇L̂_w = −2τ/(1+τ)² · (1/K²) Σ_i [ Σ_j w_ij·(r_i − r_j) ]·∇ℓ_i                                       (5.1)
# If each response has a weight w_i and w_ij = w_i·w_j, the bracket is w_i·(r_i·Σ_j w_j − Σ_j w_j·r_j), and
#
#     ∇L̂_w = −2τ/(1+τ)² · (Σw/K²) Σ_i w_i·(r_i − r̄_w)·∇ℓ_i,      r̄_w = Σ w_j·r_j / Σ w_j.                (5.2)
# It is REINFORCE again, and its baseline is the WEIGHTED mean. The simplest weights are 1 and 0. With S the responses
# that are kept and r̄_S the mean of what was KEPT,
#
#     ∇L̂_w = −2τ/(1+τ)² · (|S|/K²) Σ_{i∈S} (r_i − r̄_S)·∇ℓ_i.                                               (5.3)
# The paper's RED-Drop drops where bad responses crowd out good ones. A response is positive if its reward is at least
# the group's mean. If negatives outnumber positives, random negatives go until there are as many; else none does.

# %%
def pair_gradient(rewards, pair_weights, *, tau=0.5):
    """∂L̂_w/∂ℓ_i at θ_t by autograd, without the factor −2τ/(1+τ)²: (..., K), (..., K, K) → (..., K)."""
    shift = torch.zeros_like(rewards, requires_grad=True)  # ℓ_i − log π_t(y_i), 0 at θ_t
    a = rewards - tau * shift
    violations = pair_weights * (a.unsqueeze(-1) - a.unsqueeze(-2)).square()  # holds every pair twice
    loss = violations.sum() / 2 / a.shape[-1] ** 2 / (1 + tau) ** 2
    return torch.autograd.grad(loss, shift)[0] / (-2 * tau / (1 + tau) ** 2)

lesson.section("1. Weights on the pairs, and RED-Drop")
lesson.check("(5.1) r = (0, .8, 1), w_12 = 1, w_13 = 2, w_23 = 0: (−2.8, .8, 2)/9",
             pair_gradient(REWARDS, torch.tensor([[0, 1, 2], [1, 0, 0], [2, 0, 0]])), [-2.8 / 9, 0.8 / 9, 2 / 9])
w = torch.tensor([1, 1, 2])  # r̄_w = (0 + .8 + 2)/4 = .7, and Σw/K² = 4/9
lesson.check("(5.2) w = (1, 1, 2): (−.7, .1, .6)·4/9",
             pair_gradient(REWARDS, w[:, None] * w), [-2.8 / 9, 0.4 / 9, 2.4 / 9])

def red_drop(rewards, *, generator=None):
    """RED-Drop: (..., K) → advantages, less the mean of the kept and 0 where dropped, and keep, both (..., K)."""
    if rewards.shape[-1:] < (2,) or not rewards.isfinite().all():
        raise ValueError("need finite rewards (..., K), K ≥ 2 responses to one prompt; got shape "
                         f"{tuple(rewards.shape)}")
    # r_i − r̄ as the mean of r_i − r_j over j: equal rewards differ by exactly 0 in any precision, while the float32
    # mean of seven times 0.1 is larger than 0.1. A reward AT the mean is positive, so its rounding must not decide.
    rewards = 1.0 * rewards
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

advantages, keep = red_drop(TWO_OF_EIGHT, generator=lesson.generator)
lesson.check("two right of eight: how many right and wrong ones stay", [keep[:2].sum(), keep[2:].sum()], [2, 2])
lesson.check("…and their advantages (by the mean of all eight: ¾, −¼)", advantages[keep].unique(), [-0.5, 0.5])
lesson.check("(5.3) largest |gradient on the kept pairs − (4/8²)·advantage|",
             (pair_gradient(TWO_OF_EIGHT, (keep[:, None] & keep).double()) - 4 / 64 * advantages).abs().max(), 0)
lesson.say("Under any weights π* keeps the loss 0; where responses are dropped it is one minimiser of many, as nothing "
           "holds their probabilities. RED-Drop is REINFORCE on a balanced group, with its own mean.")

# %% [markdown]
# ## 2. RED-Weight: pairs, and imitation
# RED-Weight multiplies each advantage A_i = r_i − r̄ by w_i = exp(A_i/T), T a temperature, but keeps the PLAIN mean r̄
# as baseline. That is not (5.2). How far from it is it? Write r_i − r̄ = (r_i − r̄_w) + (r̄_w − r̄):
#
#     (1/K) Σ w_i·A_i·∇ℓ_i  =  (1/K) Σ w_i·(r_i − r̄_w)·∇ℓ_i  +  (r̄_w − r̄)·(1/K) Σ w_i·∇ℓ_i              (5.4)
#                              REINFORCE on pairs               imitation of the group, of good ones most
# The first sum is (5.2) up to a factor, the step size: (5.2) has Σw/K² in front, here stands 1/K. How strong is the
# imitation? As Σ A_i = 0, r̄_w − r̄ = Σ w_i·A_i / Σ w_i = Cov(w, r)/w̄, w̄ the mean weight. The weights rise with the
# rewards, so it is never negative. For large T, w_i ≈ 1 + A_i/T and it is about Var(r)/T.
# If rewards are 0 or 1 and a share p of the group is right, right answers weigh e^{1/T} times as much as wrong ones.
# That multiplies the odds p/(1−p) by e^{1/T}. With logit p = log(p/(1−p)) and its inverse σ(z) = 1/(1 + e^{−z}):
#
#     r̄_w = σ(logit p + 1/T)                                                                              (5.5)

# %%
def red_weight(advantages, *, temperature=1.0):
    """RED-Weight: exp(A/T), (..., K) → (..., K). Train on advantages * red_weight(advantages)."""
    weights = (advantages / temperature).exp()
    if not (0 < temperature < math.inf and weights.isfinite().all()):
        raise ValueError("need finite advantages and 0 < T < ∞, large enough that exp(A/T) is finite; got T = "
                         f"{temperature}")
    return weights

def less_mean(rewards):
    return rewards - rewards.mean(-1, keepdim=True)  # A_i: group_advantages of lesson 02 without its options

def imitation_part(rewards):
    """What stands before (1/K)·∇ℓ_i in the second sum of (5.4), at T = 1: (..., K) → (..., K)."""
    w = red_weight(less_mean(rewards))
    return w * (w * less_mean(rewards)).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)

lesson.section("2. RED-Weight: pairs, and imitation")
w = red_weight(less_mean(TWO_OF_EIGHT))
lesson.check("two of eight right, T = 1: w·A of right and wrong, .75·e^.75 and −.25·e^−.25",
             (w * less_mean(TWO_OF_EIGHT))[[0, -1]], [1.587750, -0.194700], 1e-6)
lesson.check("(5.5) p = ¼, T = 1: r̄_w = e/(e + 3)", w @ TWO_OF_EIGHT / w.sum(), math.e / (math.e + 3))
w, imitation = red_weight(less_mean(REWARDS)), imitation_part(REWARDS)
lesson.check("(5.4) r = (0, .8, 1): w·A − K²/Σw · gradient with w_i·w_j − imitation, largest",
             (w * less_mean(REWARDS) - pair_gradient(REWARDS, w[:, None] * w) * 9 / w.sum() - imitation).abs().max(), 0)
lesson.say("RED-Weight = REINFORCE on weighted pairs + imitation, much like AsymRE (lesson 04) with β = r̄_w − r̄.")

# %% [markdown]
# ## 3. A temperature from the lengths
# In a token-level loss each response pushes once per token, A_i·L_i in all, where L_i is its length. Σ A_i = 0, but if
# the wrong answers are the long ones, Σ A_i·L_i < 0: the group as a whole pushes down. A later paper by the makers
# of Trinity-RFT, who wrote RED-Weight's, then weighs with the T at which the pushes balance (arXiv 2606.20002):
#
#     f(T) = Σ A_i·exp(A_i/T)·L_i = 0                                                                      (5.6)
# In u = 1/T the slope Σ A_i²·exp(A_i·u)·L_i is positive. At u = 0, without weights, f < 0; for large u the best
# response decides and f > 0. So there is exactly one root, and halving an interval finds it. For advantages ±a and
# total lengths L₊ and L₋ it solves a·e^{a/T}·L₊ = a·e^{−a/T}·L₋, which gives T = 2a/ln(L₋/L₊).

# %%
def adaptive_temperature(advantages, lengths, *, low=0.8, high=100.0):
    """The T of (5.6) for one group, (K,), or None: do not weight. A root outside gives the nearer end (our reading)."""
    if not (advantages.dim() == 1 and advantages.shape == lengths.shape and len(lengths) > 1
            and 0 < low < high < math.inf and advantages.isfinite().all()
            and (lengths >= 0).all() and lengths.isfinite().all()):
        raise ValueError("need one group, finite advantages and lengths ≥ 0, both (K,), K ≥ 2, and 0 < low < high; got "
                         f"{tuple(advantages.shape)}, {tuple(lengths.shape)}, {low}, {high}")
    advantages, lengths = (tensor.detach().to("cpu", torch.float64) for tensor in (advantages, lengths))
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

lesson.section("3. A temperature from the lengths")
advantages, lengths = torch.tensor([0.5, 0.5, -0.5, -0.5]).double(), torch.tensor([100, 100, 200, 300])
balanced = advantages * red_weight(advantages, temperature=1 / math.log(500 / 200))
lesson.check("(5.6) A = ±½, L = 100, 100 | 200, 300: Σ A·L; Σ w·A·L at T = 1/ln(500/200)",
             [(advantages * lengths).sum(), (balanced * lengths).sum()], [-150, 0])
lesson.check("…the T that halving finds, at most .05 higher", adaptive_temperature(advantages, lengths), 1.1390625, 0)
lesson.say("Long wrong answers pull the whole group down; this T gives the good ones just enough weight against it.")

# %% [markdown]
# ## 4. Your own samples, and somebody else's
# Let a policy train on its own samples, with rewards 0 or 1 and probability p of being right. Over right responses the
# score ∇ℓ has the mean Σ_right π·∇log π / p = ∇p/p; over wrong ones −∇p/(1−p), because Σ π·∇log π = 0. A shaped
# advantage sees rewards only. Let A₊ and A₋ be its sums over the right and over the wrong responses of a group, which
# depend on how many are right. Then the expected update is ∇p times a mere NUMBER g(p):
#
#     E[(1/K) Σ_i A_i·∇ℓ_i] = g(p)·∇p,      g(p) = E[A₊/p − A₋/(1−p)]/K                                    (5.7)
# Shaping sets the pace of each prompt. It can turn the step only where rewards have more than two values.
#
# Data from elsewhere are another matter. Let a policy write two tokens, one of four methods, then one of four answers,
# all equally likely at first, and take eight responses that it did not write. All begin with method 1 (a hint in the
# prompt, say), and one then gives the right answer. The push on the token that all share is (1/K) Σ w_i·A_i: 0 for
# REINFORCE and RED-Drop, whose advantages sum to 0. Only the imitation of (5.4) learns the method.

# %%
lesson.section("4. Your own samples, and somebody else's")
SHAPINGS = {  # from rewards (..., K) to the advantages that are trained on
    "REINFORCE": less_mean,
    "GRPO": lambda rewards: less_mean(rewards) / (rewards.std(-1, correction=0, keepdim=True) + 1e-6),
    "RED-Drop": lambda rewards: red_drop(rewards, generator=lesson.generator)[0],
    "RED-Weight, T = 1": lambda rewards: less_mean(rewards) * red_weight(less_mean(rewards)),
    "RED-Weight, T = .3": lambda rewards: less_mean(rewards) * red_weight(less_mean(rewards), temperature=0.3),
}

def shaping_gain(success_rate, *, group_size, shaping):
    """g(p) of (5.7): (...) → (...)."""
    gain = torch.zeros_like(success_rate)
    for k in range(group_size + 1):
        advantages = shaping((torch.arange(group_size) < k).double())
        chance = math.comb(group_size, k) * success_rate**k * (1 - success_rate) ** (group_size - k)
        push = advantages[:k].sum() / success_rate - advantages[k:].sum() / (1 - success_rate)
        gain = gain + chance * push / group_size
    return gain

extremes = torch.tensor([1e-9, 1 - 1e-9], dtype=torch.float64)
for name, at_0, at_1 in (("REINFORCE", 7 / 8, 7 / 8), ("RED-Drop", 1 / 2, 7 / 8),
                         ("RED-Weight, T = 1", 7 / 8 * math.exp(7 / 8), 7 / 8 * math.exp(-7 / 8))):
    lesson.check(f"(5.7) K = 8, g of {name} where p → 0 and where p → 1",
                 shaping_gain(extremes, group_size=8, shaping=SHAPINGS[name]), [at_0, at_1], 1e-6)

right = torch.eye(8).double()[0]
tokens = torch.tensor([[1, 1], [1, 0], [1, 2], [1, 3], [1, 0], [1, 2], [1, 3], [1, 0]])
learned = {}  # name → P(method 1), P(answer 1 | method 1) before each step and after the last
for name, shaping in SHAPINGS.items():
    theta, learned[name] = torch.zeros(2, 4, dtype=torch.float64), []
    for _ in range(201):
        probs = torch.softmax(theta, -1)
        learned[name].append(probs[:, 1])
        theta = theta + (shaping(right)[:, None, None] * (torch.eye(4)[tokens] - probs)).mean(0)
lesson.check("one right of eight: RED-Weight's push on the shared token, 7/64·(e^⅞ − e^−⅛)",
             SHAPINGS["RED-Weight, T = 1"](right).mean(), 7 / 64 * (math.exp(7 / 8) - math.exp(-1 / 8)))
lesson.check("P(method 1) after 200 steps of REINFORCE, RED-Drop (before: ¼)",
             [learned[name][-1][0] for name in ("REINFORCE", "RED-Drop")], [0.25, 0.25])

def style_of(name):  # RED-Weight at another temperature is thinner, with open markers
    method = "red-weight-oneside" if "clipped" in name else name.split(",")[0].lower()
    thin = {"linewidth": 1, "markerfacecolor": "white"} if "T = ." in name else {}
    return method_style(method, points=6) | {"label": name} | thin

if lesson.draws:
    fig, (pace, share) = figure(2)
    rates = torch.linspace(0.001, 0.999, 299, dtype=torch.float64)
    for name, shaping in SHAPINGS.items():
        pace.plot(rates, shaping_gain(rates, group_size=8, shaping=shaping), **style_of(name))
        share.plot(torch.stack(learned[name]).prod(-1), **style_of(name))
    pace.set(title="On its own samples shaping only sets the pace", xlabel="success rate p of the prompt",
             ylabel="pace g(p), K = 8", yscale="log", ylim=(0.02, 20))
    share.set(title="Only imitation learns what the batch shares", xlabel="update on the same 8 responses",
              ylabel="P(the one right response)", ylim=(0, 1.02))
    share.text(200, 0.29, "REINFORCE, GRPO, RED-Drop end together:\nP(method) stays at ¼", ha="right", color="0.3")
    pace.legend(loc="lower left")
    lesson.save_figure(fig, "05_own_data")
lesson.say("On own samples shaping is REINFORCE at another pace; on borrowed ones imitation learns what they share.")

# %% [markdown]
# ## 5. Fixed data: where RED-Weight ends
# Lesson 03's bandit again: data from π_b for ever, logits θ, ∇log π_θ(y) = e_y − π_θ, advantages A = r − μ with
# μ = E_b r = .58. On infinitely many data RED-Weight moves the logits by
#
#     θ' = Σ_y π_b(y)·w_y·A_y·(e_y − π_θ) = c − κ·π_θ,      c = π_b·w·A,      κ = Σ c.                     (5.8)
# Without weights κ = 0, as advantages sum to 0: nothing brakes the arm with the largest c, here arm 2, the wrong one.
# RED-Drop is no better: of these data, as one large group, 70 % are positive, so it drops nothing. With weights
# κ = Cov_b(w, r) > 0, the imitation of (5.4): it brakes each arm by its probability.
#
# Where does it stop? All arms that live on must in the end move at one speed λ, and an arm that dies must be slower:
# c_i − κ·π_i = λ where π_i > 0, and c_i ≤ λ where π_i = 0. In one line
#
#     π_i = max(c_i − λ, 0)/κ,      with the λ that makes Σ π_i = 1.                                       (5.9)
# This is lesson 04's water level (4.6), with κ for its β. The same conditions describe the point of the simplex (π ≥ 0,
# Σ π = 1) nearest to c/κ: there ½·|π − c/κ|² has one slope π_i − c_i/κ = −λ/κ for all π_i > 0, and at least that for
# π_i = 0. So the limit is a projection; call it q.
#
# Training does get there. V = KL(q ‖ π_θ) = log Σ e^θ − q·θ + a constant, so
#
#     V' = (π_θ − q)·θ' = (π_θ − q)·(c − κ·q) − κ·|π_θ − q|²  ≤  − κ·|π_θ − q|².
# The first term is at most λ·Σ (π_θ − q) = 0: c − κ·q is λ on living arms and at most λ on dead ones, where
# π_θ − q ≥ 0. As V ≥ 0, κ·|π_θ − q|² added up over all time is at most V(0). As π_θ moves at bounded speed, a distance
# that came back again and again would add up to more: π_θ → q.
#
# T decides who lives. If arms 2 and 3 do, c_2 + c_3 − 2λ = κ = c_1 + c_2 + c_3, so λ = −c_1/2. Arm 3 lives if c_3 > λ:
# .042·e^{.42/T} > .087·e^{−.58/T}, so T < 1/ln(87/42) ≈ 1.37. It leads if c_3 > c_2: T < .2/ln(22/7) ≈ .175.

# %%
def red_weight_pull(temperature):  # c of (5.8) for the bandit
    advantages = REWARDS - BEHAVIOUR @ REWARDS
    return BEHAVIOUR * red_weight(advantages, temperature=temperature) * advantages

def resting_point(pull):
    """(5.9): c (A,) → the probabilities in the end (A,)."""
    ordered = pull.sort(descending=True).values
    level = (ordered.cumsum(-1) - pull.sum()) / torch.arange(1, len(pull) + 1)  # λ if only the 1, 2, … largest live
    return (pull - level[ordered > level][-1]).clamp(min=0) / pull.sum()

lesson.section("5. Fixed data: where RED-Weight ends")
pulls = {"REINFORCE": BEHAVIOUR * (REWARDS - BEHAVIOUR @ REWARDS),
         "RED-Weight, T = 1": red_weight_pull(1.0), "RED-Weight, T = .3": red_weight_pull(0.3)}
paths = {}  # name → probabilities of the three arms along 1500 steps of (5.8)
for name, pull in pulls.items():
    theta, paths[name] = torch.zeros(3, dtype=torch.float64), []
    for _ in range(1501):
        paths[name].append(torch.softmax(theta, -1))
        theta = theta + pull - pull.sum() * paths[name][-1]
    paths[name] = torch.stack(paths[name])
lesson.check("REINFORCE: the three arms in the end", paths["REINFORCE"][-1], [0, 1, 0])
for name in list(pulls)[1:]:
    lesson.check(f"(5.9) {name}: the three arms in the end", paths[name][-1], resting_point(pulls[name]), 1e-6)
lesson.check("(5.9) arm 3 dies at T = 1/ln(87/42), and has ½ at T = .2/ln(22/7)",
             [resting_point(red_weight_pull(t))[2] for t in (1 / math.log(87 / 42), 0.2 / math.log(22 / 7))], [0, 0.5])

if lesson.draws:
    fig, (end, way) = figure(2)
    temperatures = torch.logspace(-1.3, 0.5, 150, dtype=torch.float64)
    end.plot(temperatures, torch.stack([resting_point(red_weight_pull(float(t))) for t in temperatures]))
    for text, x, y in (("arm 1, reward 0", 0.07, 0.03), ("arm 2, reward .8", 0.17, 0.87),
                       ("arm 3, reward 1", 0.14, 0.14), ("T = 1.37:\narm 3 dies", 1.45, 0.4)):
        end.text(x, y, text)
    end.axvline(1 / math.log(87 / 42), color="0.6", linewidth=1, linestyle="-")
    end.set(title="Arm 3 lives below T = 1.37, leads below .175", xlabel="temperature T of exp(A/T)", xscale="log",
            ylabel="probability in the end", xticks=[0.1, 0.3, 1, 3], xticklabels=[0.1, 0.3, 1, 3])
    for name, path in paths.items():
        way.plot(path[:101] @ REWARDS, **style_of(name))
    way.set(title="Its J ends above arm 2's reward, .8", xlabel="step", ylabel="expected reward J")
    way.legend(loc="lower right")
    lesson.save_figure(fig, "05_bandit")
lesson.say("Fixed data pull REINFORCE to the wrong arm. Imitation is a brake: below T = 1.37 the right arm lives.")

# %% [markdown]
# ## 6. Stale data
# Now samples of the policy's own past, in lesson 04's world: four prompts that share parameters, and J exact. The loss
# is plain REINFORCE, and only the advantages differ. Two rows keep one part of (5.4) each, to see which of them helps.
# GRPO and one more row clip, as lesson 04 does, in PPO's form min(ρA, clip(ρ)A) with ρ = π_θ/π_old.

# %%
lesson.section("6. Stale data")
METHODS = {name: (shaping, name == "GRPO") for name, shaping in SHAPINGS.items()} | {  # name → advantages, clip?
    "RED-Weight, clipped": (SHAPINGS["RED-Weight, T = 1"], True),
    "pairs": (lambda rewards: SHAPINGS["RED-Weight, T = 1"](rewards) - imitation_part(rewards), False),
    "REINFORCE + imitation": (lambda rewards: less_mean(rewards) + imitation_part(rewards), False)}

def train(shaping, clip, *, setting, seeds, steps):
    """Exact J before each step and after the last, (seeds, steps + 1). All methods meet the same worlds."""
    generator = torch.Generator().manual_seed(lesson.seed)
    logits, rewards = random_worlds(seeds, generator=generator)
    policies, (every, late) = [logits], SETTINGS[setting]
    for step in range(1, steps + 1):
        learner = policies[-1].clone().requires_grad_()
        sampler = policies[rollout_version(step, sync_interval=every, sync_offset=late)]  # a policy of the past
        responses = sample_responses(sampler, generator=generator)
        advantages = shaping(rewards.gather(-1, responses)).unsqueeze(-1)
        logprobs = token_logprobs(learner, responses)
        objective = advantages * logprobs
        if clip:
            ratio = (logprobs - token_logprobs(sampler, responses)).exp()
            objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        policies.append(descend(learner, -objective.mean()))
    return expected_reward(torch.stack(policies), rewards).T

seeds, steps = (6, 50) if lesson.quick else (20, 100)
curves = {(setting, name): train(*method, setting=setting, seeds=seeds, steps=steps)
          for setting in SETTINGS for name, method in METHODS.items()}
if lesson.draws:
    print(lesson.quick * "  Quick: fewer seeds, the verdicts below may differ from those of the full run.\n"
          + f"  Is the first's J of the last 20 steps higher? {seeds} seeds; ?: the 95 % interval holds 0\n"
          "                                            fresh  every 20 steps  10 late     never")
    below = {}  # the first of the pair → settings in which it is below the second
    for first, second in (("RED-Drop", "GRPO"), ("RED-Weight, T = 1", "GRPO"), ("RED-Weight, T = 1", "REINFORCE"),
                          ("pairs", "REINFORCE"), ("REINFORCE + imitation", "REINFORCE")):
        row = [interval((curves[s, first] - curves[s, second])[:, -20:].mean(-1)) for s in SETTINGS]
        cells = (f"{mean:+9.2f} {'yes' if low > 0 else 'no' if high < 0 else '?':3}" for mean, low, high in row)
        print(f"  {first + ' − ' + second:36}" + "".join(cells))
        below[first, second] = " and ".join(s for s, (_, _, high) in zip(SETTINGS, row) if high < 0) or "nowhere"
late = {key: float(curve[:, -20:].mean()) for key, curve in curves.items()}
lesson.check("stale data: RED-Weight and the imitation alone end above REINFORCE, in each setting", all(
    late[setting, name] > late[setting, "REINFORCE"] for setting in list(SETTINGS)[1:]
    for name in ("RED-Weight, T = 1", "REINFORCE + imitation")), True)
lesson.check("… RED-Weight above RED-Drop too; T = .3 costs on fresh data, a clip if never refreshed", all(
    late[setting, "RED-Weight, T = 1"] > late[setting, "RED-Drop"] for setting in list(SETTINGS)[1:])
    and late["fresh data", "RED-Weight, T = .3"] < late["fresh data", "RED-Weight, T = 1"]
    and late["never refreshed", "RED-Weight, clipped"] < late["never refreshed", "RED-Weight, T = 1"], True)

if lesson.draws:
    fig, axes = figure(2, 2, height=2.5, sharex=True, sharey=True)
    for axis, setting in zip(axes.flat, SETTINGS):
        for place, name in enumerate(list(METHODS)[:6]):
            middle, low, high = interval(curves[setting, name].T)
            axis.plot(middle, **style_of(name))
            bar = style_of(name) | {"label": None, "linestyle": "-", "linewidth": 2, "markevery": [1]}
            axis.plot([steps + 4 * (place + 1)] * 3, [low[-1], middle[-1], high[-1]], **bar)
        axis.set(title=setting, ylim=(0.2, 1.02), xlabel="training step", ylabel="exact J, mean")
        axis.label_outer()
    fig.suptitle("On stale data RED-Weight, unclipped, ends above REINFORCE and RED-Drop; on fresh data T = .3 costs")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
               title="curves: means over seeds; bars on the right: each method's last mean and its 95 % interval")
    lesson.save_figure(fig, "05_stale_world")
    lesson.say("It is the imitation that helps. The paper's claim P6, that on fresh data and refreshed every 20 steps "
               "RED-Drop and RED-Weight do at least as well as GRPO: in this run RED-Drop ends clearly below GRPO on: "
               f"{below['RED-Drop', 'GRPO']}; RED-Weight: {below['RED-Weight, T = 1', 'GRPO']}.")

# %% [markdown]
# ## 7. Friends that shape the data
# DAPO (arXiv 2503.14476) draws prompts until its batch is full of groups that are not flat; flat ones add 0 and only
# scale the mean. SGPO (2505.11595) rewards an all-wrong group for right leading steps. ICPO (2510.26519) adds to G − 1
# plain responses one that was sampled with a worked example in the prompt. AEPO (2510.08141) also trains on samples
# drawn at another temperature T, from π_T ∝ π^{1/T}. Their mean score is E[e_y] − π = π_T − π, a pull towards π_T: hot
# samples, T > 1, raise the entropy, cold ones lower it.

# %%
def informative_groups(rewards):
    """DAPO: True for a group that is not flat, (..., K) → (...)."""
    return rewards.amax(-1) != rewards.amin(-1)

def graded_reward(right_steps, *, steepness=5.0, centre=0.5):
    """SGPO: a reward for a wrong answer, from the share of its leading steps that are right."""
    if not ((right_steps >= 0) & (right_steps <= 1)).all():
        raise ValueError("need right_steps, the share of right leading steps, in [0, 1]")
    return torch.sigmoid(steepness * (right_steps - centre))

def hint_weight(probs, *, smoothing=0.1):
    """ICPO: the weight of a token sampled WITH the example, from its probability without."""
    return probs / (probs + smoothing)

def icpo_advantages(plain_rewards, hinted_reward, *, step, decay=400, eps=1e-6):
    """ICPO: one normalisation for all G; a right hinted answer gets a bonus that fades (our reading)."""
    bonus = max(0.0, 1 - step / decay)
    hinted = torch.where(hinted_reward > 0, hinted_reward + bonus, hinted_reward)
    pool = torch.cat([plain_rewards, hinted.unsqueeze(-1)], -1)
    advantages = (pool - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    return torch.where(informative_groups(pool).unsqueeze(-1), advantages, 0.0)

lesson.section("7. Friends that shape the data")
lesson.check("SGPO, none, half and all leading steps right", graded_reward(torch.tensor([0.0, 0.5, 1.0]).double()),
             [0.0758582, 0.5, 0.9241418], 1e-7)
lesson.check("ICPO, 1 of 7 plain answers and the hinted one right: right, wrong, hinted",
             icpo_advantages(right[:7], right[0], step=0)[[0, 1, -1]], [0.840026, -0.504015, 2.184067], 1e-6)
lesson.say("Which responses enter, with which reward and which weight: all of it is free, because the data are.")

def check_temperature(temperature_for):
    for right, target in ((5, 0.5), (2, 0.9), (10, 0.6)):
        group = (torch.arange(20) < right).double()
        weights = red_weight(less_mean(group), temperature=float(temperature_for(right / 20, target)))
        if abs(weights @ group / weights.sum() - target) > 1e-6:
            return f"with {right} of 20 right, the weighted mean is not {target} at your temperature"

EXERCISES = {
    1: ("Rewards (1, .6, .6, 0, 0): how many does RED-Drop keep?", 5, "Mean .44: 3 positives, 2 negatives, none goes."),
    2: ("A policy trains on its own samples, rewards 0 or 1. Does RED-Weight turn its expected update? yes or no", "no",
        "(5.7): it is g(p)·∇p for every shaping by reward; only the pace changes."),
    3: ("The T at which a group, a share success_rate of its rewards 1 and the others 0, has the weighted mean target.",
        "def temperature_for(success_rate, target):", check_temperature)}
lesson.finish(EXERCISES)
