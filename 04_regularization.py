"""Lesson 04: regularise the update. A clip and a penalty both keep a policy near the sampler of its data.

Lesson 03 let REINFORCE learn from any data, and on fixed data it went wrong. GRPO's clip, the first repair, sets a
trust region around the sampler: with it, the importance weight may go and little changes. The penalties of OPMD and
AsymRE put a price on the same distance. On stale data REINFORCE falls back; with a clip or a penalty it ends higher. So
it does with exact importance weights alone, here and in lesson 06. And a trust region can be too tight: section 5.

Run it:  python 04_regularization.py   (8 seconds; --quick 5; --exercise 1 to 3). Numbers and four pictures in figures/.
"""
# %% Setup
import math
from functools import partial

import torch

import stale_world as world
from utils import STYLES, Lesson, figure, method_style

lesson = Lesson(__name__, __doc__)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)  # the 3-arm bandit of lesson 03
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)  # π_b, where its data come from

# %% [markdown]
# ## 1. The clip decides which tokens still learn
# A batch holds responses that π_old, the sampler, wrote some updates ago. For each of their N tokens let
#
#     ρ = π_θ(token)/π_old(token), how much likelier it is now than when it was sampled: a number, not differentiated.
# REINFORCE with clipping (REC) gives each token a mask M and a weight W:
#
#     L = −(1/N) Σ M·W·A·log π_θ(token),      M = 0 or 1;  W = ρ (importance sampling, IS) or W = 1 (NoIS).       (4.1)
# A = r − r̄ is the advantage of the token's response in its group (lesson 02): A > 0 makes the token likelier, A < 0
# less likely. M = W = 1 is REINFORCE. A clip is a rule for M. Here are three, with the inner bounds 1 − ε_low = .8 and
# 1 + ε_high = 1.2 and, for the ring, the outer bounds 1 − .6 = .4 and 1 + 2 = 3:
#
#     ρ                    .4 and below   .4 to .8    .8 to 1.2   1.2 to 3    3 and above
#     one-side   A > 0     kept           kept        kept        clipped     clipped          stop what has gone far
#                A < 0     clipped        clipped     kept        kept        kept             where it is pushed
#     two-side   any A     clipped        clipped     kept        clipped     clipped          stop all that is outside
#     ring       A > 0     kept again     clipped     kept        clipped     clipped          … but let back what is
#                A < 0     clipped        clipped     kept        clipped     kept again       far out, pushed inwards
# The narrow clip is (.2, .2); the wide one, (.6, 2), puts the inner bounds at .4 and 3. A = 0 is never clipped.

# %%
def clip_mask(ratio, advantages, *, clip, eps_low=0.2, eps_high=0.2, outer_low=0.6, outer_high=2.0):
    """M of (4.1): does a token take part? advantages with as many dimensions as the ratio. NaN is never clipped."""
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

def clean_tokens(logprobs, old_logprobs, advantages, mask):
    """Put 0 on padding BEFORE any arithmetic: NaN · 0 is NaN, in gradients too. Half precision comes back float32."""
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

def rec_loss(logprobs, old_logprobs, advantages, mask, *, clip, importance_sampling, eps_low=0.2, eps_high=0.2,
             outer_low=0.6, outer_high=2.0):
    """(4.1): logprobs, old_logprobs (B, T), advantages (B,) or (B, T), mask (B, T) True on response tokens → scalar."""
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    ratio = (logprobs - old_logprobs).detach().clamp(-20, 20).exp()  # a constant, and finite
    keep = clip_mask(ratio, advantages, clip=clip, eps_low=eps_low, eps_high=eps_high,
                     outer_low=outer_low, outer_high=outer_high)
    weight = ratio if importance_sampling else torch.where(ratio.isnan(), ratio, 1.0)
    per_token = torch.where(keep, weight * advantages, 0.0) * logprobs
    return -per_token.sum() / mask.sum().clamp(min=1)

lesson.section("1. The clip decides which tokens still learn")
for A, kept in ((1.0, [1, 1, 1, 0, 0]), (-1.0, [0, 0, 1, 0, 1])):
    M = clip_mask(torch.tensor([0.3, 0.5, 1.0, 1.5, 3.5]), torch.tensor(A), clip="one_side" if A > 0 else "ring")
    lesson.check(f"(4.1) {'one-side' if A > 0 else 'ring'}, A = {A:+.0f}, M at ρ = .3, .5, 1, 1.5, 3.5", M, kept)

# %% [markdown]
# One-side with IS is PPO, whose objective min(ρA, clip(ρ, 1−ε, 1+ε)·A) is differentiated through ρ: ∇ρ = ρ·∇log π_θ.
#
#     A > 0 and ρ > 1+ε:     the minimum is (1+ε)·A, a constant      gradient 0                  clipped
#     A < 0 and ρ < 1−ε:     the minimum is (1−ε)·A, a constant      gradient 0                  clipped
#     everywhere else:       the minimum is ρ·A                      gradient ρ·A·∇log π_θ       kept, W = ρ       (4.2)
# GRPO is this method, with advantages divided by their group's standard deviation. The picture shows these weights.

# %%
def update_weights(loss, logprobs, old_logprobs, advantages):
    """The weight on ∇log π_θ of each token, −N·∂L/∂log π_θ, from the loss itself by autograd: (..., K, T)."""
    logprobs = logprobs.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logprobs, old_logprobs, advantages, torch.ones_like(logprobs)), logprobs)
    return -gradient * logprobs.numel()

NARROW, WIDE, wide = "rec-oneside-nois", "rec-oneside-nois (.6,2)", {"eps_low": 0.6, "eps_high": 2.0}
METHODS = {f"rec-{clip.replace('_', '')}-{kind}": partial(rec_loss, clip=clip, importance_sampling=kind == "is")
           for clip, kind in (("one_side", "nois"), ("one_side", "is"), ("two_side", "nois"), ("ring", "nois"))}
METHODS |= {"reinforce" + tag: partial(rec_loss, clip="none", importance_sampling=bool(tag)) for tag in ("", "-is")}
METHODS[WIDE] = partial(METHODS[NARROW], **wide)
log_ratio = torch.linspace(-2.5, 2.5, 1000, dtype=torch.float64, requires_grad=True)
ratio, A = log_ratio.exp(), torch.tensor([1.0, -1.0] * 500, dtype=torch.float64)
(ppo,) = torch.autograd.grad(torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).sum(), log_ratio)
rec = update_weights(METHODS["rec-oneside-is"], log_ratio[:, None], torch.zeros(1000, 1), A)[:, 0]
lesson.check("(4.2) gradient of PPO − weights of one-side IS, 1000 tokens, largest", (ppo - rec).abs().max(), 0, 1e-12)
if lesson.draws:
    fig, axes = figure(4, 2, width=2.4, height=2.2, sharex=True, sharey="row")
    ratio = torch.linspace(0.02, 4, 800, dtype=torch.float64).unsqueeze(-1)
    for column, (title, options) in enumerate({
            "narrow one-side (.2, .2)": {"clip": "one_side"}, "wide one-side (.6, 2)": {"clip": "one_side", **wide},
            "two-side (.2, .2)": {"clip": "two_side"}, "ring, back at .4 and 3": {"clip": "ring"}}.items()):
        for axis, A in zip(axes[:, column], (torch.ones(800), -torch.ones(800))):
            for (color, line), label, on in zip(STYLES, ("NoIS: W = 1", "IS: W = ρ"), (False, True)):
                w = update_weights(partial(rec_loss, importance_sampling=on, **options), ratio.log(), 0 * ratio, A)
                axis.plot(ratio, w, color=color, linestyle=line, label=label)
            axis.fill_between(ratio[:, 0], 0, 1, where=~clip_mask(ratio[:, 0], A, **options), color="0.88",
                              transform=axis.get_xaxis_transform(), linewidth=0)
        axes[0, column].set(title=title, xlim=(0, 4), xticks=[0.4, 1, 3], xticklabels=[".4", "1", "3"])
        axes[1, column].set_xlabel("ρ")
    axes[0, 0].set(ylabel="weight, A = +1", ylim=(-0.4, 4))
    axes[1, 0].set(ylabel="weight, A = −1", ylim=(-4, 0.4))
    fig.suptitle("The clip decides where a token stops learning (grey: both weights are 0); IS only tilts the rest")
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    lesson.save_figure(fig, "04_gradient_weight")
lesson.say("A clip ends the push at a distance. IS weighs most far out, where one-side lets A < 0 push back.")

# %% [markdown]
# ## 2. A penalty puts a price on the distance
# Per response write ℓ_i = log π_θ(y_i) and d_i = ℓ_i − log π_old(y_i). OPMD (Kimi) minimises a mean square. Expand it:
#
#     (1/K) Σ (A_i − τd_i)²/(2τ)  =  (1/K) Σ [A_i²/(2τ) − A_i·d_i + (τ/2)·d_i²]
#                                 =  −(1/K) Σ A_i·ℓ_i + (τ/2)·(1/K) Σ d_i² + constant                             (4.3)
# for every θ, since A_i and log π_old(y_i) are constants. AsymRE (Meta) lowers the baseline from r̄ to r̄ − β:
#
#     −(1/K) Σ (A_i + β)·ℓ_i  =  −(1/K) Σ A_i·ℓ_i + β·(1/K) Σ (log π_old(y_i) − ℓ_i) + constant.                  (4.4)
# Both are REINFORCE plus a price on the distance from the sampler; the sum in (4.4) estimates KL(π_old ‖ π_θ). (This τ,
# τ_opmd, is not lesson 03's.) In token-level code every token pays, Σ_t d_t², which is not (Σ_t d_t)². And the price
# does not depend on A: a group whose rewards are all equal is still pulled. We take the paper's τ_opmd = .2 and β = .1.
# The names in code, here and in lesson 06 (REC is REINFORCE with clipping, REP is REINFORCE with a penalty):
#
#     REINFORCE      reinforce             narrow clip   rec-oneside-nois             OPMD      rep-opmd
#     unclipped IS   reinforce-is          wide clip     rec-oneside-nois (.6,2)      AsymRE    rep-asymre

# %%
def opmd_loss(logprobs, old_logprobs, advantages, mask, *, tau):
    """(4.3) per token, tensors as in rec_loss. d is not capped: a cap would end the pull where it is needed most."""
    if not 0 < tau < math.inf:
        raise ValueError(f"need 0 < tau < ∞; got {tau}")
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    per_token = -advantages * logprobs + tau / 2 * (logprobs - old_logprobs).square()
    return per_token.sum() / mask.sum().clamp(min=1)

def asymre_loss(logprobs, old_logprobs, advantages, mask, *, beta):
    """(4.4) per token, tensors as in rec_loss; beta = 0 is REINFORCE."""
    if not 0 <= beta < math.inf:
        raise ValueError(f"need 0 ≤ beta < ∞; got {beta}")
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    per_token = -advantages * logprobs + beta * (old_logprobs - logprobs)
    return per_token.sum() / mask.sum().clamp(min=1)

lesson.section("2. A penalty puts a price on the distance")
METHODS |= {"rep-opmd": partial(opmd_loss, tau=0.2), "rep-asymre": partial(asymre_loss, beta=0.1)}
SHOWN = {"reinforce": "REINFORCE", "reinforce-is": "unclipped IS", NARROW: "narrow clip", WIDE: "wide clip",
         "rep-opmd": "OPMD", "rep-asymre": "AsymRE"}
logprobs = torch.log_softmax(torch.tensor([[0.3], [-0.2], [0.1]], dtype=torch.float64), 0)  # one draw of each arm
A, tokens = REWARDS - REWARDS.mean(), (logprobs, torch.full_like(logprobs, -math.log(3)))  # and a uniform sampler
square = opmd_loss(*tokens, A, torch.ones(3, 1), tau=0.5) + A.square().mean()  # the sums, with their constants
lowered = asymre_loss(*tokens, A, torch.ones(3, 1), beta=0.1) + 0.1 * math.log(3)
lesson.check("(4.3) OPMD at θ = (.3, −.2, .1), τ = .5: (1/K) Σ (A − τd)²/(2τ)", square, 0.257328934865)
lesson.check("(4.4) AsymRE there, β = .1: −(1/K) Σ (A + β)·ℓ", lowered, 0.1719272651)
lesson.say("A clip ends the push at a distance. OPMD pulls back, more from farther; AsymRE adds β to each sample.")

# %% [markdown]
# ## 3. Fixed data: where each method ends
# The 3-arm bandit of lesson 03: rewards r = (0, .8, 1), data from π_b = (.3, .6, .1) for ever, μ = E_b r = .58, softmax
# logits. With infinitely many samples, a weight u_i on ∇log π_θ(i) moves logit j by
#
#     E_b[u·∇log π_θ]_j  =  π_b(j)·u_j − π_θ(j)·Σ_i π_b(i)·u_i.                                                    (4.5)
# **AsymRE.** u = r − μ + β. Write w = π_b·(r − μ + β), whose sum is μ − μ + β = β: the logits move by w − β·π_θ. A
# common shift of all logits changes no probability. So training rests when all arms that are left move by the same c,
# and arms that are gone, π_j = 0, move by no more than that (else they would catch up):
#
#     w_j − β·π_j = c  if π_j > 0,      w_j ≤ c  if π_j = 0;      together   π_j = max(w_j − c, 0)/β.              (4.6)
# The probabilities must sum to 1. Their sum falls as c rises, so that one c does it, the level of water over a ground
# whose hills are the w_j: an arm lives if its hill stands out. If all do, c = 0 and π = π_b + π_b·(r − μ)/β: the data,
# moved by REINFORCE's own drift. As β falls, water rises. With arm 2 alone π_2 = 1 and c = w_2 − β, so that arm 3 lives
# if w_3 > w_2 − β, .042 + .1β > .132 − .4β, β > .18; likewise arm 1 if β > .58. For β = .5 we have w = (−.024, .432,
# .092), c = (.432 + .092 − .5)/2 = .012 and π = (0, .84, .16). Lesson 03's π_b·exp(r/τ)/Z has no 0 at any τ > 0.
#
# **OPMD.** u = r − b − τd with a baseline b. Take b = τ·log Z, from lesson 03's optimum π* = π_b·exp(r/τ)/Z. At π* all
# d = r/τ − log Z, so that u = r − τ·log Z − (r − τ·log Z) = 0 on every arm: OPMD rests at π*.                    (4.7)
# With the group mean b = μ it rests where π_b·u is proportional to π_θ: J = .83, against .86 at π*.
#
# **A clip** on one sampler is a ceiling, if rewards are ≥ 0 and no token ends with ρ > 1 + ε: the push stops there, but
# a token that nobody pushes may drift past it. Then responses of T tokens earn
#
#     J = Σ_y π_b(y)·ρ_1 ⋯ ρ_T·r(y)  ≤  (1 + ε)^T · J_b,        J_b = E_b r: what the data earn.                   (4.8)
# On the bandit T = 1, and arms 2 and 3 both come to ρ = 1.2: J = 1.2·.58 = .696, while plain REINFORCE gets .8.

# %%
def asymre_limit(behaviour_probs, rewards, *, beta):  # (4.6): (A,), (A,) → (A,)
    w = behaviour_probs * (rewards - behaviour_probs @ rewards + beta)
    w = w - w.max()  # moves c alone, and keeps a tiny beta from being rounded away
    hills = w.sort(descending=True).values
    levels = (hills.cumsum(-1) - beta) / torch.arange(1, len(w) + 1)  # c, if only the n highest hills stand out
    return (w - levels[(hills > levels).nonzero().max()]).clamp(min=0) / beta

def follow_bandit(loss, *, steps=200, step_size=2.0, baseline=None, refresh=None):
    """π_θ before each step and after the last: (steps + 1, 3). refresh: after so many steps the data come from π_θ."""
    theta, data, path = BEHAVIOUR.log(), BEHAVIOUR, []
    for step in range(steps + 1):
        logprobs = torch.log_softmax(theta, -1)
        path.append(logprobs.exp())
        data = path[-1] if refresh and step % refresh == 0 else data
        u = update_weights(loss, logprobs[:, None], data.log()[:, None], REWARDS - (baseline or data @ REWARDS))[:, 0]
        theta = theta + step_size * (data * u - (data @ u) * path[-1])  # (4.5)
    return torch.stack(path)

lesson.section("3. Fixed data: where each method ends")
tilt = BEHAVIOUR * (REWARDS / 0.2).exp()
ends = {name: follow_bandit(METHODS[name])[-1] for name in SHOWN}
ends[NARROW] = follow_bandit(METHODS[NARROW], step_size=0.1)[-1]  # a large step would jump over the near bound
ends["OPMD, b = τ·log Z"] = follow_bandit(METHODS["rep-opmd"], baseline=0.2 * tilt.sum().log())[-1]
ends["AsymRE, β = .5"] = follow_bandit(partial(asymre_loss, beta=0.5))[-1]
J = {name: float(end @ REWARDS) for name, end in ends.items()}
lesson.check("(4.6) AsymRE, β = .5, trained: π", ends["AsymRE, β = .5"], [0, 0.84, 0.16], 1e-6)
lesson.check("(4.7) OPMD with b = τ·log Z, trained: π*", ends["OPMD, b = τ·log Z"], tilt / tilt.sum(), 1e-6)
lesson.check("(4.8) narrow clip 1.2·.58; J of REINFORCE, of unclipped IS: trained", [
    J[name] for name in (NARROW, "reinforce", "reinforce-is")], [0.696, 0.8, 1], 0.005)
if lesson.draws:
    fig, (left, right) = figure(2, width=4.7, height=3.7)
    betas = torch.linspace(0.02, 1.2, 300, dtype=torch.float64)
    left.plot(betas, torch.stack([asymre_limit(BEHAVIOUR, REWARDS, beta=float(beta)) for beta in betas]),
              label=[f"arm {arm + 1}, reward {reward:g}" for arm, reward in enumerate(REWARDS)])
    left.set(title="AsymRE drowns arms one by one as β falls", xlabel="β", ylabel="probability in the end",
             xticks=[0.18, 0.58, 1], xticklabels=[".18\narm 3 lives", ".58\narm 1 lives", "1"], ylim=(0, 1.03))
    left.legend(loc="center right")
    order = sorted(J, key=J.get)
    right.bar_label(right.barh([SHOWN.get(name, name) for name in order], [J[name] for name in order], color=[
        method_style(name if name in SHOWN else "rep-opmd")["color"] for name in order]), fmt=" %.2f")
    right.set(title="One sampler for ever: the narrow clip earns least", xlabel="J in the end", xlim=(0, 1.15))
    lesson.save_figure(fig, "04_bandit")
lesson.say("Here a narrow clip only costs: REINFORCE ends higher without, and exact IS needs none. Section 5 says why.")

# %% [markdown]
# ## 4. Stale data
# In training the sampler is refreshed. After every I updates it gets the learner's weights, and it works m batches
# ahead. So the batch of step n comes from the policy after v updates, and the learner is s updates ahead of it:
#
#     v(n) = I·max(0, ⌊(n − m − 1)/I⌋),        s(n) = (n − 1) − v(n),        n = 1, 2, …                           (4.9)
#     I = 4, m = 2:     n   1   2   3   4   5   6   7   8
#                       v   0   0   0   0   0   0   4   4      (the first new weights come after step 4, and two batches
#                       s   0   1   2   3   4   5   2   3       of the old ones are still waiting then)
# Fresh data (I = 1, m = 0) with one step per batch have ρ = 1 and d = 0: every M and W is 1, OPMD's price has no slope,
# and all clips, unclipped IS and OPMD are REINFORCE to the last bit. (GRPO divides the step by σ, 5×lr multiplies it,
# AsymRE keeps its β.) What collapses there does not collapse for want of a clip.
# The stale world (stale_world.py) has 4 prompts and responses of 3 tokens out of 4, a random quarter of them right: J
# sums over all 64, while updates use 8 samples. As in a network, an update for one prompt moves the others (by .85).
# There we test the paper's claims on stale data. P1: with a clip, IS is not needed, and narrow clip = GRPO. P2: a clip
# stabilises. P3: a wide clip learns more; P4: not as by 5 times the learning rate (lr). P5: two-side and ring equal
# one-side. P7: penalties stabilise, too. (P6, on shaped data, is in lesson 05.)

# %%
def train_stale(name, every=20, late=0, *, practice=0, sharing=world.SHARING):
    """Exact J of one method, (STEPS + 1, SEEDS). The sampler is refreshed after `every` steps (None: never) and works
    `late` batches ahead. practice: steps of the exact gradient before anything is sampled."""
    generator = torch.Generator().manual_seed(lesson.seed)  # the same worlds and the same luck for every method
    logits, rewards = world.random_worlds(SEEDS, generator=generator)
    for _ in range(practice):
        logits = world.descend(logits.requires_grad_(), -world.expected_reward(logits, rewards).mean() / world.LENGTH)
    policies = [logits]
    for step in range(1, STEPS + 1):
        learner = policies[-1].clone().requires_grad_()
        sampler = policies[world.rollout_version(step, sync_interval=every, sync_offset=late)]
        responses = world.sample_responses(sampler, generator=generator)
        sampled = rewards.gather(-1, responses)  # (SEEDS, prompts, 8)
        advantages = sampled - sampled.mean(-1, keepdim=True)
        logprobs, old_logprobs = world.token_logprobs(learner, responses), world.token_logprobs(sampler, responses)
        loss = METHODS[name](logprobs, old_logprobs, advantages, torch.ones_like(logprobs))
        policies.append(world.descend(learner, loss, sharing=sharing))
    return world.expected_reward(torch.stack(policies), rewards)

def ahead(methods, first, second):  # J in the end, paired by seed: the mean and its 95 % interval
    return world.interval(methods[first][-1] - methods[second][-1])

lesson.section("4. Stale data")
SEEDS, STEPS = 8 if lesson.quick else 20, 100
METHODS |= {"rec-oneside-nois 5×lr": lambda *tokens: 5 * METHODS[NARROW](*tokens),
            "grpo": lambda new, old, A, mask: METHODS["rec-oneside-is"](
                new, old, A / (A.std(-1, correction=0, keepdim=True) + 1e-6), mask)}
CLAIMS = (("P1 with a clip, IS = no IS", NARROW, "rec-oneside-is"), ("P1 narrow clip = GRPO", NARROW, "grpo"),
          ("   without a clip, IS > no IS", "reinforce-is", "reinforce"),
          ("P2 narrow clip > REINFORCE", NARROW, "reinforce"), ("P2 wide clip > REINFORCE", WIDE, "reinforce"),
          ("P3 wide clip > narrow clip", WIDE, NARROW), ("P4 … at 5× lr", WIDE, "rec-oneside-nois 5×lr"),
          ("P5 two-side = one-side", "rec-twoside-nois", NARROW), ("P5 ring = one-side", "rec-ring-nois", NARROW),
          ("P7 OPMD > REINFORCE", "rep-opmd", "reinforce"), ("P7 AsymRE > REINFORCE", "rep-asymre", "reinforce"))
stale = [world.staleness(n, sync_interval=4, sync_offset=2) for n in range(1, 9)]
lesson.check("(4.9) I = 4, m = 2: s of steps 1 to 8", stale, [0, 1, 2, 3, 4, 5, 2, 3], 0)
runs = {setting: {name: train_stale(name, *pair) for name in METHODS}
        for setting, pair in list(world.SETTINGS.items())[1 :: 1 + lesson.quick]}  # quick: without the second
every_20, never, fresh = runs["refreshed every 20 steps"], runs["never refreshed"], train_stale("reinforce", 1)
fall = (every_20["reinforce"].amax(0) - every_20["reinforce"][-1]).mean()
gain = min(ahead(every_20, name, "reinforce")[0] for name in SHOWN if name != "reinforce")
lesson.check(f"every 20 steps: REINFORCE falls {fall:.2f} below its best J, the others end ≥ {gain:.2f} above it",
             bool(fall > 0.1 and gain > 0), True)
if lesson.draws:
    print(lesson.quick * "  Quick: fewer seeds, the verdicts below may differ from those of the full run.\n"
          + f"  The paper's claims, {SEEDS} seeds: J in the end, first − second, and what its 95 % interval says\n"
          f"  (= within ± .05) {'':14}" + " ".join(f"{setting.removeprefix('refreshed '):20}" for setting in runs))
    for claim, first, second in CLAIMS:
        found, margin = (ahead(methods, first, second) for methods in runs.values()), 0.05 if "=" in claim else None
        print(f"  {claim:31}" + " ".join(f"{mean:+.2f} {world.verdict(*ci, margin=margin):14}" for mean, *ci in found))
    fig, axes = figure(2, width=5, height=3.9, sharey=True)
    for axis, (setting, methods) in zip(axes, (("refreshed every 20 steps", every_20), ("never refreshed", never))):
        axis.plot(fresh.mean(1), color="0.8", linestyle="-", linewidth=4)
        height = 0.0
        for place, name in enumerate(sorted(SHOWN, key=lambda name: methods[name][-1].mean())):
            style, (mean, low, high) = method_style(name, points=5), world.interval(methods[name])
            height = max(height + 0.042, float(mean[-1]))  # the labels stand apart
            axis.plot(mean, **style)
            axis.vlines(103 + 2 * place, low[-1], high[-1], color=style["color"])
            axis.text(117, height, f"{SHOWN[name]} {mean[-1]:.2f}", color=style["color"], va="center", fontsize=9)
        axis.set(title=setting, xlabel="step (bars: 95 % intervals at the end)", xlim=(-3, 152), xticks=[0, 50, 100])
    axes[0].set(ylabel="expected reward J", ylim=(0.2, 1.06))
    axes[1].text(25, 1.015, "grey: fresh data, the same for REINFORCE, IS, clips and OPMD", color="0.4", fontsize=8)
    fig.suptitle("On stale data REINFORCE falls back; never refreshed, a narrow clip hardly learns")
    lesson.save_figure(fig, "04_stale")
best = [", ".join(words for name, words in SHOWN.items() if min(ahead(methods, name, other)[2] for other in SHOWN) >= 0)
        for methods in (every_20, never)]
lesson.say(f"Best, within 95 % intervals: {best[0]}, if refreshed every 20 steps; {best[1]}, if never.")

# %% [markdown]
# ## 5. When a clip helps, and when it does not
# The narrow clip ends at J = .70 on the bandit, where REINFORCE gets .80 and exact importance sampling needs no clip at
# all. Never refreshed, it is the worst method of the stale world. Yet it helps the transformer of lesson 06, also never
# refreshed: it answers 39 % of its additions right at first, and in the end 56 % with the narrow clip, 44 % with
# REINFORCE, 61 % with unclipped IS (sampled answers; figures/data/paper.csv). What makes a clip pay? Three questions.
# - **Steps on one sampler.** One sampler allows a factor of (1+ε)^T, the next allows it again. Never refreshed, the
# bandit stops at 1.2·.58. Refreshed every 20 steps, the same clip climbs from ceiling to ceiling and passes J = .95 at
# step 161. REINFORCE runs to arm 2 on its first sampler, and then samples arm 3 in 1 case of 200. It is slower, not
# stuck: each new sampler holds a little more of arm 3, J = .95 comes at step 350, and both end at arm 3.
# - **What the optimum needs.** On the bandit arm 3 must become 10 times likelier, in the stale world right answers 4
# times: more than 1.2³. Lesson 06's transformer must only grow surer: the answer that it holds likeliest (greedy
# decoding) is right in 96 % of the cases before training, a sampled one in 39 %. Let the stale world's first policy
# practise until it earns J_b > .6: the narrow clip ends above REINFORCE there too.
# - **Shared parameters.** What can REINFORCE lose? On the bandit nothing, it never falls below what the data earn; and
# little where each prompt has a table of its own. If an update for one prompt moves the others, tokens go far that no
# sample of theirs asked for, unseen by a stale sampler. There REINFORCE falls, and ending every push early pays.
#
# Or weigh by ρ, unclipped? With infinitely many samples E_b[ρ·(r − μ)·∇log π_θ] is ∇J, and vanishes at the optimum.
# With 8 it is noisy, more so for long responses (lesson 01), and a token's ρ is biased (section 6). 3 tokens bear it.

# %%
lesson.section("5. When a clip helps, and when it does not")
DIALS = [*SHOWN][:4]
practices, shares = ((0, 30), (0,)) if lesson.quick else ((0, 5, 10, 30), (0, 0.5, 1))
by_practice = {n: {name: train_stale(name, None, practice=n) for name in DIALS} if n else never for n in practices}
by_sharing = {s: {name: train_stale(name, sharing=s) for name in DIALS} for s in shares} | {world.SHARING: every_20}
J_b = {n: float(methods["reinforce"][0].mean()) for n, methods in by_practice.items()}
paths = {name: follow_bandit(METHODS[name], steps=500, refresh=20) @ REWARDS for name in DIALS[:3]}
far, near, alone, shared = (float(ahead(m, NARROW, "reinforce")[0]) for m in
                            (never, by_practice[30], by_sharing[0], every_20))
first, second = (int((paths[name] > 0.95).nonzero()[0]) for name in (NARROW, "reinforce"))
lesson.check(f"refreshed bandit: J > .95 at step {first} (narrow clip), {second} (REINFORCE)", first < second, True)
lesson.check("refreshed bandit, step 500: J of both", [paths[NARROW][-1], paths["reinforce"][-1]], 1, 0.01)
lesson.check(f"never refreshed: the clip ends below REINFORCE; above, if J_b = {J_b[30]:.2f}", far < 0 < near, True)
lesson.check("every 20 steps: the clip ends above REINFORCE; below, if prompts share nothing", alone < 0 < shared, True)
if lesson.draws:
    fig, axes = figure(3, width=3.6, height=3.9, sharey=True)
    for name, path in paths.items():
        axes[0].plot(path, **method_style(name, points=5))
    axes[0].axhline(1.2 * 0.58, color="0.5", linestyle=":")
    axes[0].annotate("narrow clip, never refreshed: 1.2·.58", (20, 0.63), color="0.3", fontsize=9)
    axes[0].set(title="Which gets to arm 3 first?\nbandit, refreshed every 20", xlabel="step", ylabel="J")
    for axis, dial, title, x in zip(axes[1:], ({J_b[n]: by_practice[n] for n in practices}, by_sharing), (
            "How good must the data be?\nstale world, never refreshed",
            "What if prompts share?\nstale world, refreshed every 20"), ("J_b, what data earn", "how much they share")):
        for name in DIALS:
            mean, low, high = world.interval(torch.stack([dial[place][name][-1] for place in sorted(dial)]))
            style = method_style(name, points=1) | {"markevery": 1, "elinewidth": 0.8}
            axis.errorbar(sorted(dial), mean, torch.stack([mean - low, high - mean]), label=SHOWN[name], **style)
        axis.set(title=title, xlabel=x, ylim=(0.2, 1.04))
    axes[1].plot([0.22, 0.58], [0.22 * 1.2**3, 0.58 * 1.2**3], color="0.5", linestyle=":", label="1.2³·J_b")
    fig.suptitle("Three questions decide whether the narrow clip (dark blue) beats REINFORCE (circles)")
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    lesson.save_figure(fig, "04_when_clipping_helps")
lesson.say("Refresh, then clip; a wide clip or a penalty costs less. On one sampler for ever, clip only to polish.")

# %% [markdown]
# ## 6. Friends that differ in M or W alone
#     GSPO (2507.18071)        one ratio for a response, s = exp(mean_t log ρ_t); one-side on s; W = s or 1
#     GMPO (2507.20673)        the same mean, of log ρ_t first capped at .4 (A > 0) or lifted to −.4 (A < 0)
#     CISPO (2506.13585), TIS  M = 1, W = min(ρ, cap) with cap = 1 + ε, or cap = 2
#     TOPR (2503.14286)        M = 1, W = 1 for right responses, min(ρ, 1) for wrong ones
#     dual clip (1912.09729)   PPO, and M = 0 also where A < 0 and ρ > 3
#     DAPO (2503.14476)        one-side (.2, .28), and a price for responses that come near the limit of length
#     TIC-GRPO (2508.02833)    W = Π_t ρ_t, the ratio of the whole trajectory
#
# TIC-GRPO asks what each W estimates. Enumerate: two binary tokens, one logit each for t1, for t2 after t1 = 0 and
# after t1 = 1, at (.5, −.3, .8); data from logits 0; only (1, 1) is right; A = r − ¼.

# %%
def overlong_penalty(length, *, max_length, cache):
    """DAPO: 0 up to max_length − cache, then linear down to −1 at max_length."""
    return (-(length - (max_length - cache)) / cache).clamp(max=0)

lesson.section("6. Friends that differ in M or W alone")
lesson.check("DAPO: 5, 8, 10 tokens", overlong_penalty(torch.tensor([5, 8, 10]), max_length=10, cache=4), [0, -0.5, -1])
theta = torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64, requires_grad=True)
t = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
logits = torch.stack([theta[0].expand(4), theta[1 + t[:, 0]]], -1)
logprobs = torch.nn.functional.logsigmoid((2 * t - 1) * logits)  # (4 responses, 2 tokens)
r, ratio = t.prod(-1).double(), (logprobs.detach() - math.log(0.5)).exp()
exact = torch.autograd.grad((r * logprobs.sum(-1).exp()).sum(), theta, retain_graph=True)[0]
lesson.check("two tokens, exact ∇J", exact, [0.1621466, 0, 0.1331501], 1e-7)
for name, W, expected in (("trajectory IS", ratio.prod(-1, keepdim=True), exact),
                          ("token-level IS", ratio, [0.1175019, 0, 0.1069549]),
                          ("no IS", 1, [0.125, -0.0093053, 0.1012532])):
    objective = 0.25 * (W * (r - 0.25)[:, None] * logprobs).sum()
    lesson.check(f"two tokens, {name}", torch.autograd.grad(objective, theta, retain_graph=True)[0], expected, 1e-7)
lesson.say("Only the whole trajectory's ratio is exact. Without any, data also move the logit that ∇J leaves alone.")

# %% Exercises
def check_opmd_rest(function):
    probs = torch.as_tensor(function(BEHAVIOUR, REWARDS, 0.2), dtype=torch.float64)
    u = REWARDS - BEHAVIOUR @ REWARDS - 0.2 * (probs / BEHAVIOUR).log()
    move = BEHAVIOUR * u - (BEHAVIOUR @ u) * probs
    return None if abs(probs.sum() - 1) < 1e-6 and move.abs().max() < 1e-6 else f"at {probs} (4.5) still moves: {move}"

EXERCISES = {
    1: ("ρ = 1.5 and A < 0, one-side clip (.2, .2): is the token clipped or kept?", "kept",
        "The update pushes it down, back towards the sampler; one-side stops only what is pushed further out."),
    2: ("Responses of 2 tokens, rewards 0 or 1, J_b = .25, narrow clip, never refreshed: what can J reach?", 0.36,
        "(4.8): 1.2²·.25. For the wide clip it is 3²·.25 > 1: no ceiling at all."),
    3: ("Where OPMD with the baseline μ = E_b r rests on fixed data: there (4.5) is 0, within 1e-6.",
        "def opmd_rest(behaviour_probs, rewards, tau):", check_opmd_rest),
}
lesson.finish(EXERCISES)
