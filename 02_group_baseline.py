"""Lesson 02: the group mean as a baseline, and what is usually added to it.

The mean reward of K responses to one prompt is a baseline for free: it multiplies the expected gradient by (K−1)/K and
does not turn it. The usual additions are not free. Dividing by the group's standard deviation re-weights the prompts;
averaging inside each response makes right answers shorter and wrong ones longer. Expectations are sums over ALL groups.

Run it:   python 02_group_baseline.py      (--quick: smaller groups; --claims: the full table; --exercise 1: your turn)
You see:  six sections in about 3 seconds; in figures/ 02_group_mean, 02_length_bias and 02_success_amplification.
You need: lesson 01. The score s is ∇log π(y), J the expected reward, E_π[r·s] = ∇J and E_π[s] = 0.
"""
# %% Setup
import torch

from utils import Lesson, figure

lesson = Lesson(__name__, __doc__)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)    # the bandit of lesson 01: three responses to one prompt
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)  # the policy that answers. On-policy throughout

# %% [markdown]
# ## 1. The group is its own baseline
# A good baseline is the expected reward J, which nobody knows. So let K responses y_1 … y_K answer the same prompt and
# compare each with their mean reward r̄: the advantage is A_i = r_i − r̄, the update (1/K) Σ_i A_i·s_i. But r̄ contains
# r_i and is no constant. What does that do? Take its own share out: A_i = (1 − 1/K)·r_i − (1/K) Σ_{j≠i} r_j. The other
# rewards are independent of s_i, hence E[r_j·s_i] = J·E[s_i] = 0, and only the first term is left:
#
#     E[(1/K) Σ_i A_i·s_i] = (K−1)/K · ∇J                                                                    (2.1)
#
# The direction is right, the length a little short. The mean of the OTHER rewards, (K·r̄ − r_i)/(K−1), is independent
# of s_i. With it the advantage is K/(K−1)·(r_i − r̄), and the expectation is ∇J. This is leave-one-out, or RLOO.
# The function has one line of idea, r − r.mean(). (Sort responses by prompt before you reshape them to (prompts, K).)
# %%
def group_advantages(rewards, *, leave_one_out=False, std_normalize=False, eps=1e-6):
    """A_i = r_i − r̄ of each response against its own group, (..., K) → (..., K): arXiv 2509.24203, §2.
    leave_one_out: against the mean of the others. std_normalize: over the population standard deviation, as in GRPO."""
    if rewards.shape[-1:] < (2,) or not rewards.isfinite().all():
        raise ValueError(
            f"need finite rewards (..., K), K ≥ 2 responses to one prompt; got shape {tuple(rewards.shape)}")
    rewards, group_size = 1.0 * rewards, rewards.shape[-1]
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if std_normalize:
        advantages = advantages / (rewards.std(-1, correction=0, keepdim=True) + eps)
    if leave_one_out:
        advantages = advantages * (group_size / (group_size - 1))
    # In float32 the mean of seven times 0.1 is not 0.1, and a tiny std blows that error up: so ask the rewards.
    flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(flat, 0.0, advantages)

def group_estimator_moments(probs, rewards, scores, *, group_size, **options):
    """Exact mean (D,) and total variance of (1/K) Σ_i A_i·s_i over all groups from probs (N,); scores (N, D)."""
    groups = torch.cartesian_prod(*[torch.arange(len(probs))] * group_size)
    estimates = torch.einsum("gk,gkd->gd", group_advantages(rewards[groups], **options), scores[groups]) / group_size
    mean = probs[groups].prod(-1) @ estimates
    return mean, probs[groups].prod(-1) @ (estimates - mean).square().sum(-1)

lesson.section("1. The group is its own baseline")
lesson.check("rewards (1, 0, 0, 0): A", group_advantages(torch.tensor([1, 0, 0, 0])), [0.75, -0.25, -0.25, -0.25])
scores = torch.eye(3, dtype=torch.float64) - BEHAVIOUR  # row y is s(y) = e_y − π
gradient, bandit = BEHAVIOUR * (REWARDS - BEHAVIOUR @ REWARDS), (BEHAVIOUR, REWARDS, scores)  # ∇J of lesson 01
plain, loo = (torch.stack([group_estimator_moments(*bandit, group_size=k, leave_one_out=option)[0] for k in (2, 3, 4)])
              for option in (False, True))
lesson.check("(2.1) K = 2, 3, 4, all 3^K groups: mean / ∇J", (plain / gradient).mean(-1), [1 / 2, 2 / 3, 3 / 4])
lesson.check("(2.1) leave-one-out: largest |mean − ∇J|", (loo - gradient).abs().max(), 0)
lesson.say("The responses supply the baseline, at the cost of one factor that the learning rate absorbs.")

# %% [markdown]
# ## 2. What a larger group buys
# Advantages compare responses, and so can be written with pairs alone. Multiply out (lesson 03 uses this again):
#
#     Σ_{i<j} (r_i − r_j)·(s_i − s_j) = K Σ_i r_i·s_i − (Σ_i r_i)·(Σ_j s_j) = K Σ_i (r_i − r̄)·s_i
#
# Divide by 2 and by the number of pairs, P = K(K−1)/2: the leave-one-out update is the AVERAGE over all pairs of
# h(y_i, y_j) = ½·(r_i − r_j)·(s_i − s_j). Such an average of one function over all pairs of a sample is called a
# U-statistic. The pairs are not independent, since each response is in K−1 of them, but we can count. The variance of
# an average of P terms is the sum of their P² covariances, over P². A pair with itself: P times ζ₂ = Var h. Two pairs
# that share one response: P·2(K−2) times ζ₁ = Var E[h | y_1]. Two pairs that share none: independent, 0. Together,
#
#     Var = (ζ₂ + 2(K−2)·ζ₁) / P,      P = K(K−1)/2       (Hoeffding 1948)                                    (2.2)
#
# And E[h | y_1] = ½·((r_1 − J)·s_1 + ∇J), so 4ζ₁ is V(J), the variance of one sample with the baseline J (lesson 01).
# K·Var therefore falls to V(J): a large group is as good as knowing J.
# %%
lesson.section("2. What a larger group buys")
sizes = range(2, 7 if lesson.quick else 9)
variances = torch.stack([group_estimator_moments(*bandit, group_size=k, leave_one_out=True)[1] for k in sizes])
pair = 0.5 * (REWARDS[:, None] - REWARDS)[..., None] * (scores[:, None] - scores)  # h of all pairs of arms, (3, 3, 3)
zeta_1 = BEHAVIOUR @ (torch.einsum("j,ijd->id", BEHAVIOUR, pair) - gradient).square().sum(-1)
zeta_2 = torch.einsum("i,j,ij->", BEHAVIOUR, BEHAVIOUR, (pair - gradient).square().sum(-1))
lesson.check("(2.2) K = 2, 3, …, variance over all groups: from single pairs", variances,
             torch.stack([(zeta_2 + 2 * (k - 2) * zeta_1) / (k * (k - 1) / 2) for k in sizes]))
none, knowing_j = (BEHAVIOUR @ ((REWARDS - b)[:, None] * scores - gradient).square().sum(-1) for b in (0, 0.58))
lesson.check("(2.2) 4ζ₁ = V(J)", 4 * zeta_1, knowing_j)
lesson.say("On this bandit a pair alone (K = 2) is noisier than no baseline, and from K = 3 on the group wins.")

# %% [markdown]
# ## 3. Dividing by the standard deviation re-weights the prompts
# GRPO divides A_i by the group's standard deviation σ. Let rewards be 0 or 1, and p = E r the prompt's success rate.
# From ∇p = E[r·s] = p·E[s | right] the mean score of a right answer is ∇p/p; E[s] = 0 makes that of a wrong one
# −∇p/(1−p). A group with the share r̄ of right answers has σ² = r̄(1−r̄) and gives, on average,
#
#     r̄·(1−r̄)/σ · ∇p/p  +  (1−r̄)·(−r̄)/σ · (−∇p/(1−p))  =  σ·∇p·(1/p + 1/(1−p))  =  σ·∇p / (p(1−p))
#
#     so the expected update is g_K(p)·∇p,      g_K(p) = E[σ] / (p(1−p))                                     (2.3)
#
# instead of (K−1)/K·∇p. For large K, g = 1/√(p(1−p)): it climbs 2·arcsin √p in place of p. For p near 0 or 1 a group
# has at most one odd answer, and g → √(K−1): the rarest answers count most. What no division mends: a group of
# equal rewards is silent, with probability p^K + (1−p)^K (p = ¼: 32 % at K = 4, 1 % at K = 16). And beware: where a
# library takes the sample's σ, with K−1 in place of K, advantages are smaller, by the factor √((K−1)/K).
# %%
def std_gain(success_rate, *, group_size):
    """g_K(p) of (2.3): (...) → (...)."""
    right = torch.arange(group_size + 1, dtype=torch.float64)  # how many of the K are right
    chance = torch.distributions.Binomial(group_size, success_rate[..., None]).log_prob(right).exp()
    sigma = (right / group_size * (1 - right / group_size)).sqrt()
    return (chance * sigma).sum(-1) / (success_rate * (1 - success_rate))

lesson.section("3. Dividing by the standard deviation re-weights the prompts")
rates, measured = torch.tensor([0.01, 0.1, 0.5], dtype=torch.float64), []
for p in rates:  # one right and one wrong answer; the derivative of p by the logit of the right one is p(1−p)
    policy, right = torch.stack([p, 1 - p]), torch.tensor([1.0, 0.0], dtype=torch.float64)
    mean, _ = group_estimator_moments(policy, right, torch.eye(2) - policy, group_size=8, std_normalize=True, eps=0.0)
    measured.append(mean[0] / (p * (1 - p)))
lesson.check("(2.3) p = .01, .1, .5, K = 8, all 256 groups: g", torch.stack(measured), std_gain(rates, group_size=8))
if lesson.draws:
    fig, (left, right) = figure(2)
    for value, name in (none, "no baseline"), (knowing_j, "baseline J, which nobody knows"):
        left.axhline(value, color="0.5", linestyle="--"), left.text(sizes[-1], value + 0.004, name, ha="right")
    left.plot(sizes, variances * torch.tensor(sizes), "ko-")
    left.text(4, 0.115, "leave-one-out mean of the group")
    left.set(title="A larger group is a better baseline", xlabel="group size K", ylabel="K × variance", ylim=(0, 0.21))
    p = torch.linspace(0.001, 0.999, 499, dtype=torch.float64)
    for k, line in (64, ":"), (8, "-"), (4, "--"):
        right.plot(p, std_gain(p, group_size=k), "k" + line, label=f"divided by σ, K = {k}")
    right.axhline(7 / 8, color="0.6", linestyle="-", label="not divided, K = 8")
    right.set(title="Dividing by σ favours very hard and easy prompts", xlabel="success rate p", ylabel="update / ∇p")
    right.legend(loc="upper center")
    lesson.save_figure(fig, "02_group_mean")
lesson.say("The mean keeps the direction of every prompt; the division decides which prompts count.")

# %% [markdown]
# ## 4. One number from many tokens
# Each token has a loss l_t = −A_i·log π(y_t | y_<t), and a batch of B responses with L_i tokens needs one number:
#
#     seq-mean-token-sum     Σ_i Σ_t l_t / B             the policy gradient itself
#     constant               Σ_i Σ_t l_t / (B·c)         the same, over a budget of c tokens (Dr. GRPO)
#     seq-mean-token-mean    Σ_i (Σ_t l_t / L_i) / B     every response counts the same (GRPO as published)
#     token-mean             Σ_i Σ_t l_t / Σ_i L_i       every token the same, in ONE batch (DAPO; the paper's)   (2.4)
#
# Is the third one fair? Take a policy that chooses only its length. A coin says right or wrong, and the policy knows it
# when it stops after one token, with probability ½, or after two. Rewards do not see the length: the true gradient is 0
# and the sum's is: its scores are ½ for stopping and −½ for going on, equally often. Divided by L the second counts
# half, E[(1/L) Σ_t s_t] = ½·½ − ½·½/2 = 1/8. This is multiplied by E[A_i·1(right)] = p(1−p)·(K−1)/K = ¼·⅔ for right
# answers, K = 3, and by −¼·⅔ for wrong ones: a push of ±1/48 towards shorter right and longer wrong answers.
# %%
MODES = {"seq-mean-token-sum": None, "constant": 8, "seq-mean-token-mean": None, "token-mean": None}

def aggregate(per_token, mask, *, mode, constant=None):
    """Losses of tokens (..., B, T) and a mask of 0 and 1 → (...): (2.4). A response without tokens does not count."""
    if not (mode in MODES and (mode == "constant") == (constant is not None) and (constant is None or constant > 0)
            and per_token.shape == mask.shape and ((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"need a mode of {[*MODES]}, constant > 0 in that mode only, a mask of 0 and 1 like per_token")
    kept, lengths = torch.where(mask.bool(), per_token, 0.0), mask.sum(-1)  # where, not times: NaN · 0 is NaN
    if mode == "token-mean":
        return kept.sum((-2, -1)) / lengths.sum(-1).clamp(min=1)
    denominator = {"seq-mean-token-sum": 1, "constant": constant, "seq-mean-token-mean": lengths.clamp(min=1)}[mode]
    return (kept.sum(-1) / denominator).sum(-1) / (lengths > 0).sum(-1).clamp(min=1)

def length_gradient(stop_logits, *, mode, constant=None, group_size=3):
    """Expected ascent on the logits of stopping after one token, (for right, for wrong answers); > 0: shorter."""
    stop_logits = stop_logits.detach().requires_grad_()
    choice = torch.nn.functional.logsigmoid(torch.stack([stop_logits, -stop_logits], -1)).flatten()  # of four outcomes:
    rewards, mask = torch.tensor([1.0, 1, 0, 0]).double(), torch.tensor([[1, 0], [1, 1], [1, 0], [1, 1]])
    groups = torch.cartesian_prod(*[torch.arange(4)] * group_size)
    probs, logprobs = (0.5 * choice.detach().exp())[groups].prod(-1), torch.stack([choice, 0 * choice], -1)[groups]
    per_token = -group_advantages(rewards[groups])[..., None] * logprobs  # token 2 decides nothing: log 1
    loss = probs @ aggregate(per_token, mask[groups], mode=mode, constant=constant)
    return -torch.autograd.grad(loss, stop_logits)[0]

lesson.section("4. One number from many tokens")
mask, per_token = torch.arange(4) < torch.tensor([[2], [4]]), torch.tensor([[0.5], [-0.5]]).double().expand(2, 4)
lesson.check("(2.4) lengths 2 and 4, A = ±1, log π = −.5: the four, in order",
             [aggregate(per_token, mask, mode=mode, constant=c) for mode, c in MODES.items()], [-.5, -.0625, 0, -1 / 6])
total, budget, mean, tokens = (length_gradient(torch.zeros(2).double(), mode=m, constant=c) for m, c in MODES.items())
lesson.check("push of seq-mean-token-mean, for right and wrong answers", mean, [1 / 48, -1 / 48])
lesson.check("push of the sum and of constant, largest", torch.stack([total, budget]).abs().max(), 0)
lesson.check("push of token-mean: alike, weaker", bool(0 < (tokens / mean).min() and (tokens / mean).max() < 1), True)
if lesson.draws:
    fig, (left, right) = figure(2)
    length = torch.arange(1, 33)
    for mode, weight, line in [("seq-mean-token-sum", 1 + 0 * length, "-"), ("seq-mean-token-mean", 8 / length, "--"),
                               ("token-mean", 64 / (56 + length), ":")]:
        left.plot(length, weight, "k" + line, label=mode + ", constant" * (line == "-"))
        stop, path = torch.zeros(2, dtype=torch.float64), []
        for _ in range(60):
            path.append(2 - torch.sigmoid(stop))
            stop = stop + 8 * length_gradient(stop, mode=mode)
        right.plot(torch.stack(path), "k" + line)
    left.set(title="A mean makes tokens of long responses count less …", ylim=(0, 4), ylabel="weight of each token",
             xlabel="length of the response, among 7 others of length 8")
    left.legend()
    right.text(59, 1.7, "wrong answers", ha="right"), right.text(59, 1.3, "right answers", ha="right", va="top")
    right.set(title="… so wrong answers grow and right ones shrink", xlabel="update", ylabel="mean length (1 or 2)")
    lesson.save_figure(fig, "02_length_bias")
lesson.say("Only a sum is blind to length. Token-mean is not: its denominator Σ L_i holds the response's own length.")

# %% [markdown]
# ## 5. Optional: where many rounds end
# Say that each round ends at the policy with the largest E_π[A] − β·KL(π ‖ π_ref), with the advantages A before it.
# KL(π ‖ π_ref) = E_π log(π/π_ref) ≥ 0 is 0 only at the reference. Lesson 03 finds π_ref·exp(A/β)/Z. Rewards of 0 and 1
# have two advantages, A₊ = (1−p)/σ and A₋ = −p/σ, p = p_{n−1}: the odds of right are the reference's, times a factor
#
#     p_n/(1−p_n) = p_ref/(1−p_ref) · exp((A₊ − A₋)/β),      A₊ − A₋ = 1/σ,      σ = √(p(1−p) + ε)               (2.5)
#
# (ε = 10⁻⁵; undivided the gap is 1). It is positive: success is amplified, p_n > p_ref (arXiv 2503.06639). Only p(1−p)
# counts, so starts p and 1−p meet after one round. At an extreme start σ is so small that the push wins.
# %%
def success_path(start, beta, *, reference=0.2, rounds=200, std_normalize=True, eps=1e-5):
    """p_0 = start, p_1, …, p_rounds of (2.5)."""
    path = [torch.as_tensor(start, dtype=torch.float64)]
    for _ in range(rounds):
        gap = 1 / (path[-1] * (1 - path[-1]) + eps).sqrt() if std_normalize else torch.ones_like(path[-1])
        path.append(torch.sigmoid(torch.logit(torch.tensor(reference, dtype=torch.float64)) + gap / beta))
    return torch.stack(path)

lesson.section("5. Optional: where many rounds end")
five = torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)  # five equally likely answers, one right: p_ref = .2
tilted = torch.softmax(group_advantages(five, std_normalize=True, eps=0.0) / 2, -1)[0]
lesson.check("(2.5) one round, β = 2: π_ref·exp(A/β)/Z", tilted, success_path(0.2, 2, eps=0.0)[1])
ends = [*(success_path(0.2, beta)[-1] for beta in (1, 2, 5)), success_path(0.2, 1, std_normalize=False)[-1]]
lesson.check("from .2: β = 1, 2, 5, and β = 1 without σ", ends, [0.681283, 0.408728, 0.280660, 0.404610], 1e-6)
ends = [success_path(start, 1)[-1] for start in (0.064, 0.066, 0.934, 0.936)]
lesson.check("β = 1, starts .064, .066, .934, .936", ends, [1, 0.681283, 0.681283, 1], 1e-6)
if lesson.draws:
    fig, (left, right) = figure(2)
    for beta, line in (1, "-"), (2, "--"), (5, ":"):
        path = success_path(0.2, beta, rounds=8)
        left.plot(path, "k" + line)
        left.text(8, path[-1] + 0.025, f"β = {beta}: ends at {path[-1]:.2f}", ha="right")
    left.axhline(0.2, color="0.6", linestyle="-"), left.text(8, 0.13, "reference: .20 (β: the pull to it)", ha="right")
    left.set(title="From the reference: up, but not to 1", xlabel="round", ylabel="success rate", ylim=(0, 1.04))
    for start in (0.04, 0.2, 0.5, 0.8, 0.92, 0.95):
        right.plot(success_path(start, 1, rounds=8), "k-" if 0.065 < start < 0.935 else "k:", linewidth=1.5)
    right.text(8, 0.6, ".065 to .935 (.2 joins .8): to .68", ha="right"), right.text(8, 0.93, "others: 1", ha="right")
    right.set(title="Extreme starts end at 1, others at .68 (β = 1)", xlabel="round", ylim=(0, 1.04))
    lesson.save_figure(fig, "02_success_amplification")
lesson.say("Push of the advantages and pull to the reference balance below 1, unless σ is too small at the start.")

# %% [markdown]
# ## 6. Friends: the same group, other advantages
# REINFORCE++ (arXiv 2501.03262) has one mean and one σ for the whole batch: a right answer earns the same on easy and
# on hard prompts. (Population σ is **our reading**.) NGRPO (arXiv 2509.18851) adds a virtual response with the largest
# reward to the group, so an all-wrong group of K is not silent: the mean is 1/(K+1), the sample variance 1/(K+1), and
# each gets −1/√(K+1). A verifier errs with flip rates: f⁺ is how often it calls a wrong answer right, f⁻ a right one
# wrong. It says r̃ with E[r̃ | r] = f⁺ + (1 − f⁺ − f⁻)·r; solve for r (arXiv 2510.18924). This only shifts and
# stretches rewards, so dividing by σ afterwards undoes it exactly.
# %%
def batch_whitened_advantages(rewards, *, eps=1e-6):
    return group_advantages(rewards.reshape(-1), std_normalize=True, eps=eps).view(rewards.shape)

def ngrpo_advantages(rewards, *, max_reward=1.0, eps=1e-6):
    if (rewards > max_reward).any():
        raise ValueError(f"need max_reward, the largest possible reward; got {max_reward:g} and a reward of "
                         f"{rewards.max():g}")
    pool = torch.cat([rewards, torch.full_like(rewards[..., :1], max_reward)], -1)
    advantages = (rewards - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    flat = pool.amax(-1, keepdim=True) == pool.amin(-1, keepdim=True)
    return torch.where(flat, 0.0, advantages)

def noise_corrected_rewards(rewards, *, false_positive_rate, false_negative_rate):
    """r̂ = (r̃ − f⁺)/(1 − f⁺ − f⁻): the mean is the true reward."""
    if not (min(false_positive_rate, false_negative_rate) >= 0 and false_positive_rate + false_negative_rate < 1):
        raise ValueError(f"need rates ≥ 0 that sum to less than 1; got {false_positive_rate}, {false_negative_rate}")
    return (1.0 * rewards - false_positive_rate) / (1 - false_positive_rate - false_negative_rate)

lesson.section("6. Friends: the same group, other advantages")
group = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
corrected = noise_corrected_rewards(group, false_positive_rate=0.2, false_negative_rate=0.1)
for name, advantages, expected in [
        ("r − r̄ (Dr. GRPO)", group_advantages(group), [0.75, -0.25]),
        ("RLOO", group_advantages(group, leave_one_out=True), [6 / 7, -2 / 7]),
        ("GRPO", group_advantages(group, std_normalize=True), [3**0.5, -(3**-0.5)]),
        ("NGRPO", ngrpo_advantages(group), [4 / 3, -2 / 3]),
        ("noise-corrected, f⁺ = .2, f⁻ = .1", group_advantages(corrected), [15 / 14, -5 / 14]),
        ("… divided by σ", group_advantages(corrected, std_normalize=True), [3**0.5, -(3**-0.5)])]:
    lesson.check(f"right and wrong of (1, 1, 0×6): {name}", advantages[[0, -1]], expected, 1e-5)
batch = torch.tensor([[1.0] * 7 + [0], [1] + [0.0] * 7])
lesson.check("REINFORCE++, easy and hard prompt", batch_whitened_advantages(batch)[:, [0, -1]], [[1, -1]] * 2, 1e-5)

# %% Exercises: python 02_group_baseline.py --exercise 1 --answer …
def check_smallest_group(function):
    for p, limit, size in (0.25, 0.1, 9), (0.5, 0.3, 3), (0.9, 0.5, 7):  # .25^8 + .75^8 = .1001 is just too much
        if function(p, limit) != size:
            return f"p = {p}: with K = {size} the share is {p**size + (1 - p)**size:.3f}, with {size - 1} above {limit}"

EXERCISES = {
    1: ("Rewards (1, 1, 1, 0), not divided. What is the advantage of the wrong answer?", -0.75, "0 − 3/4."),
    2: ("K = 8, divided by σ: which prompt gets more update per ∇p, .01 or .5?", ".01", "(2.3): 2.6 against 1.9."),
    3: ("The smallest K ≥ 2 at which at most the share `limit` of groups is silent; rewards 0 or 1, success rate p.",
        "def smallest_group(p, limit):", check_smallest_group)}
lesson.finish(EXERCISES)
