"""Lesson 03: group-relative REINFORCE is one gradient step on a loss that never asks where the data came from.

Claim. Take the KL-regularised objective, write down what its optimum demands of every pair of responses, square the
violation and take ONE gradient step: out comes REINFORCE with the group mean as baseline. Nobody assumed y ~ π_θ.

    The minimiser is the same for every sampling distribution; the single step is not.     (figures/03_pairwise.png)

THE DERIVATION (the main one of arXiv 2509.24203). x is a prompt, y_1..y_K are responses from anywhere, r_i rewards.

(1) Surrogate objective. In iteration t, with the current policy π_t = π_θt as the anchor, maximise

        J(π) = E_{y~π} r(y) − τ·KL(π ‖ π_t).                                            → regularised_objective

    For every π, J(π) = τ·log Z − τ·KL(π ‖ π*) with π*(y) = π_t(y)·exp(r(y)/τ)/Z. A KL is never negative, so π* is
    the one maximiser.                                                                  → kl_regularised_optimum

(2) Pairwise consistency. Z sums over all responses, which nobody can do for a language model. Take logs of π* and
    solve for r: r(y) − τ·(log π*(y) − log π_t(y)) = τ·log Z, one number for all y. So for ANY two responses

        a_1 = a_2    where    a_i = r_i − τ·(log π(y_i) − log π_t(y_i)),

    and Z is gone. "Any" is where the off-policy freedom comes from: it does not matter how the pair was found.

(3) Finite-sample surrogate loss. Square the violation over the pairs of a group:

        L̂(θ) = (1/K²) Σ_{i<j} (a_i − a_j)² / (1+τ)²  =  Var(a_1..a_K) / (1+τ)².         → pairwise_surrogate_loss

    The 1/(1+τ)² only fixes the scale; some versions of the text omit it (`scale=False`). Averaged over data that can
    hold every response, L̂ is 0 at π* and nowhere else, whatever the frequencies: the same minimiser.

(4) One gradient step at θ = θ_t. There log π_θ = log π_t, so a_i is just r_i, while ∇a_i = −τ·∇log π_θ(y_i):

        ∇L̂ = 2/(K²·(1+τ)²) · Σ_{i<j} (r_i − r_j)·(−τ)·(∇log π_θ(y_i) − ∇log π_θ(y_j))
            = −2τ/(1+τ)² · (1/K) Σ_i (r_i − r̄)·∇log π_θ(y_i),

    by Σ_{i<j} (r_i−r_j)(v_i−v_j) = K·Σ_i (r_i−r̄)·v_i. Up to the constant 2τ/(1+τ)², which a learning rate absorbs,
    this is the gradient of the one line of code in `group_reinforce_loss`:

        return -((rewards - rewards.mean(-1, keepdim=True)) * logprobs).mean(-1)

The same for many turns (appendix; our reading). For a trajectory x¹,y¹,…,xⁿ,yⁿ with return R, log π_θ(y_i) becomes
Σ_l log π_θ(y_i^l | x_i^l). The environment's transition probabilities stand in π_θ and in π_t and cancel in the
ratio; loss and constants stay. If the environment rolls dice, no policy alone can be exactly consistent, because π*
would load the dice.                                                                    → two_turn_logprobs

What it does not say. Nothing here guarantees convergence or improvement. Staying on one L̂ for many steps is the idea
of REBEL and CoPG; REINFORCE takes one step, moves the anchor to where it landed and starts over. Two pitfalls follow,
both shown below: data from a fixed source can pull a bandit to the wrong arm for ever, and a finite sample says
nothing about responses that it does not hold. Two principles answer them: (1) regularise the update of the policy,
lesson 04; (2) shape the distribution of the data, lesson 05.

    symbol         in the code                  shape           meaning
    π_t            old_probs, old_logprobs      (A,), (..., K)  the anchor: the policy before the step, a constant
    π_b            behaviour_probs              (A,)            whatever produced the data; need not be π_t
    log π_θ(y_i)   logprobs                     (..., K)        log-probability of a WHOLE response (sum over tokens)
    r_i, r̄         rewards                      (..., K)        one reward per response, and the mean of the group
    τ              tau                          number > 0      strength of the pull towards the anchor
    θ              theta                        (P,)            all parameters, flat (for a bandit: its logits)
    c              bandit_drift                 (A,)            π_b·(r − μ), μ = E_b r: mean update of the logits

Run       python 03_offpolicy_derivation.py [--quick] [--seed N] [--out DIR] [--json PATH]
          python 03_offpolicy_derivation.py --exercise 1        (or 2, 3: each checks a function that you write)
You see   a table of claims, by exact enumeration in float64, and three figures; about 5 seconds on a laptop.
Before    Lesson 02 computed what the group mean does to samples of the policy itself. Here that assumption goes.
"""

import itertools
import math

import torch

from utils import check, figure, finish, lesson_arguments, run_exercise, save_figure, seed_everything

# The 3-arm bandit of the paper: the data prefers arm 2, the rewards prefer arm 3.
BEHAVIOUR = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)
TAU = 0.5
FIXED = "fixed data"


# %% 1. From the surrogate objective to one line of code


def require_distribution(probs):
    """Raise ValueError unless the last dimension of `probs` is a probability distribution."""
    if (probs < 0).any() or not torch.allclose(probs.sum(-1), torch.ones_like(probs.sum(-1)), atol=1e-6):
        raise ValueError("probabilities must be ≥ 0 and sum to 1 over all responses; normalise them first")


def regularised_objective(probs, old_probs, rewards, *, tau):
    """J(π) = Σ_y π(y)·r(y) − τ·KL(π ‖ π_t), equation (1). All (..., A), rows of probs distributions. Returns (...).

    ValueError: probs or old_probs is not a distribution, the last dimensions differ, or tau is not a positive number.
    """
    if not probs.shape[-1:] == old_probs.shape[-1:] == rewards.shape[-1:]:
        raise ValueError("probs, old_probs and rewards need one last dimension, got "
                         f"{tuple(probs.shape)}, {tuple(old_probs.shape)} and {tuple(rewards.shape)}")
    require_distribution(probs)
    require_distribution(old_probs)
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a positive number, got {tau}")
    kl = (torch.xlogy(probs, probs) - torch.xlogy(probs, old_probs)).sum(-1)  # xlogy: 0·log 0 = 0
    return (probs * rewards).sum(-1) - tau * kl


def kl_regularised_optimum(old_probs, rewards, *, tau):
    """π*(y) = π_t(y)·exp(r(y)/τ)/Z, the one maximiser of `regularised_objective`; equation (1).

    old_probs, rewards (A,) → (A,). A response that π_t never gives stays at 0: the KL forbids it at any reward.
    ValueError: old_probs is not a distribution, shapes differ, or tau is not a positive number.
    """
    if old_probs.shape != rewards.shape:
        raise ValueError(f"old_probs and rewards need one shape, got {tuple(old_probs.shape)}, {tuple(rewards.shape)}")
    require_distribution(old_probs)
    if not 0 < tau < math.inf:
        raise ValueError(f"tau must be a positive number, got {tau}")
    # In logs, so that exp(r/τ) cannot overflow.
    return torch.softmax(old_probs.log() + rewards.to(old_probs.dtype) / tau, dim=-1)


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


def step_constant(tau, *, scale=True):
    """2τ/(1+τ)², or 2τ without the scale: ∇L̂ at θ_t is this number times ∇group_reinforce_loss; equation (4)."""
    return 2 * tau / (1 + tau) ** 2 if scale else 2 * tau


def group_reinforce_loss(logprobs, rewards):
    """−(1/K) Σ_i (r_i − r̄)·log π_θ(y_i): what the derivation arrives at. logprobs, rewards (..., K) → (...).

    No old_logprobs, no ratio, no sampler: nothing in this line knows where the responses came from.
    """
    return -((rewards - rewards.mean(-1, keepdim=True)) * logprobs).mean(-1)


# %% 2. Three tiny policies: each maps one flat parameter vector to the log-probability of EVERY response


def prefix_tree_logprobs(logits, *, length):
    """log π of all V^length token sequences in lexicographic order.

    logits (1 + V + … + V^(length−1), V): one row per prefix, the empty one first, then by length, lexicographic within.
    """
    token_logprobs = torch.log_softmax(logits, dim=-1)
    vocabulary = logits.shape[-1]
    logprobs, row = token_logprobs.new_zeros(1), 0
    for position in range(length):
        prefixes = vocabulary**position
        logprobs = (logprobs[:, None] + token_logprobs[row : row + prefixes]).flatten()  # prefix × next token
        row += prefixes
    return logprobs


def prefix_one_hots(*, vocabulary, length):
    """One row per prefix, in the order of `prefix_tree_logprobs`: its tokens one-hot, zeros where none stands yet."""
    rows = []
    for position in range(length):
        for prefix in itertools.product(range(vocabulary), repeat=position):
            row = torch.zeros(length - 1, vocabulary, dtype=torch.float64)
            for place, token in enumerate(prefix):
                row[place, token] = 1.0
            rows.append(row.flatten())
    return torch.stack(rows)


def tiny_policies(generator):
    """name → (random theta (P,), function theta → (N,) log-probabilities of all N responses), in float64."""
    vocabulary, length, hidden = 3, 3, 8
    features = prefix_one_hots(vocabulary=vocabulary, length=length)
    network = torch.nn.Sequential(
        torch.nn.Linear(features.shape[1], hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, vocabulary)
    ).double()
    shapes = {name: parameter.shape for name, parameter in network.named_parameters()}

    def network_logprobs(theta):
        pieces = theta.split([shape.numel() for shape in shapes.values()])
        parameters = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces)}
        return prefix_tree_logprobs(torch.func.functional_call(network, parameters, features), length=length)

    def random_theta(size):
        return 0.5 * torch.randn(size, dtype=torch.float64, generator=generator)

    return {
        "bandit": (random_theta(6), lambda theta: torch.log_softmax(theta, dim=-1)),
        "sequence table": (random_theta(13 * 3), lambda theta: prefix_tree_logprobs(theta.view(13, 3), length=length)),
        "network": (random_theta(sum(shape.numel() for shape in shapes.values())), network_logprobs),
    }


def data_sources(logprobs, *, generator):
    """name → five response numbers (K,). Only the first source has anything to do with the policy's own samples."""
    responses, group_size = len(logprobs), 5
    return {
        "on-policy": torch.multinomial(logprobs.exp(), group_size, replacement=True, generator=generator),
        "uniform": torch.randint(responses, (group_size,), generator=generator),
        "adversarial (least likely)": logprobs.argsort()[:group_size],
        "duplicated": torch.tensor([0, 0, 0, 0, responses - 1]),
        "hand-written": torch.tensor([responses - 1, 1, 0, responses // 2, 2]),
    }


def two_gradients(policy, theta, old_theta, group, rewards, *, tau, scale=True):
    """(∇L̂, step_constant·∇group_reinforce_loss), both (P,), by autograd at theta with the anchor at old_theta.

    Equal when theta is old_theta. Anywhere else L̂ also feels the log-ratios, which REINFORCE has never heard of.
    """
    theta = theta.clone().requires_grad_()
    logprobs = policy(theta)[group]
    surrogate = pairwise_surrogate_loss(logprobs, policy(old_theta)[group], rewards[group], tau=tau, scale=scale)
    reinforce = step_constant(tau, scale=scale) * group_reinforce_loss(logprobs, rewards[group])
    return torch.autograd.grad(surrogate, theta, retain_graph=True)[0], torch.autograd.grad(reinforce, theta)[0]


def one_step_table(generator, *, taus, repeats):
    """source → (largest |∇L̂ − constant·∇REINFORCE|, largest |∇L̂|) over policies, τ, scale and repeats."""
    table = {}
    for _ in range(repeats):
        for theta, policy in tiny_policies(generator).values():
            logprobs = policy(theta)
            rewards = torch.rand(len(logprobs), dtype=torch.float64, generator=generator)
            for source, group in data_sources(logprobs, generator=generator).items():
                for tau, scale in itertools.product(taus, (True, False)):
                    surrogate, reinforce = two_gradients(policy, theta, theta, group, rewards, tau=tau, scale=scale)
                    gap, size = table.get(source, (0.0, 0.0))
                    gap = max(gap, (surrogate - reinforce).abs().max().item())
                    table[source] = gap, max(size, surrogate.abs().max().item())
    return table


def parting_of_gradients(policy, theta, group, rewards, direction, *, tau, distances):
    """How ∇L̂ and REINFORCE part at θ_t + h·v, against the first Taylor term.

    With the log-ratios d_i = log π_θ(y_i) − log π_t(y_i), everywhere
        ∇L̂ = −constant·(1/K) Σ_i (r_i − r̄ − τ·(d_i − d̄))·∇log π_θ(y_i),
    which differs from REINFORCE by constant·τ·(1/K) Σ_i (d_i − d̄)·∇log π_θ(y_i). Near the anchor d_i = h·s_i·v + O(h²)
    with s_i = ∇log π_t(y_i), so the difference is h · constant·τ·Cov(s)·v + O(h²).

    direction v (P,), distances h (H,). Returns (norm of the difference (H,), norm of its first term per unit of h,
    norm of what the first term leaves (H,)).
    """
    scores = torch.autograd.functional.jacobian(lambda t: policy(t)[group], theta)  # (K, P)
    centred = scores - scores.mean(0)
    first_order = step_constant(tau) * tau * centred.T @ (centred @ direction) / len(group)
    differences, remainders = [], []
    for distance in distances:
        surrogate, reinforce = two_gradients(policy, theta + distance * direction, theta, group, rewards, tau=tau)
        differences.append((surrogate - reinforce).norm())
        remainders.append((surrogate - reinforce - distance * first_order).norm())
    return torch.stack(differences), first_order.norm(), torch.stack(remainders)


# %% 3. The same minimiser from every data source


def population_surrogate_loss(logprobs, old_logprobs, rewards, behaviour_probs, *, tau):
    """L̂ on infinitely many responses from π_b: Var_{y~π_b}(a) / (1+τ)². All (N,): one entry per possible response.

    One copy of every response, with pair weights N²·π_b(i)·π_b(j) in place of counting how often a pair was drawn.
    """
    require_distribution(behaviour_probs)
    pair_weights = len(rewards) ** 2 * torch.outer(behaviour_probs, behaviour_probs)
    return pairwise_surrogate_loss(logprobs, old_logprobs, rewards, tau=tau, pair_weights=pair_weights)


def descend_population_loss(behaviour_probs, old_probs, rewards, *, tau, steps=400, step_size=4.0):
    """Gradient descent on ONE population loss, anchor fixed, from θ_t = log π_t. Returns the logits (steps+1, A).

    In the logits a_i − a_j is linear, so the loss is a quadratic bowl: π_b sets its shape, π_t and r its bottom.
    """
    theta = old_probs.log().requires_grad_()
    path = [theta.detach().clone()]
    for _ in range(steps):
        logprobs = torch.log_softmax(theta, -1)
        loss = population_surrogate_loss(logprobs, old_probs.log(), rewards, behaviour_probs, tau=tau)
        theta = (theta - step_size * torch.autograd.grad(loss, theta)[0]).detach().requires_grad_()
        path.append(theta.detach().clone())
    return torch.stack(path)


# %% 4. Pitfall one: a fixed data source can win against the rewards


def bandit_drift(behaviour_probs, rewards):
    """c = π_b ⊙ (r − μ) with μ = Σ_i π_b(i)·r_i: the expected REINFORCE update of softmax logits on data from π_b.

    behaviour_probs, rewards (A,) → (A,). The score of arm i is e_i − π_θ, and the π_θ part is multiplied by
    Σ_i π_b(i)·(r_i − μ) = 0: the update does not depend on π_θ, and training on one π_b walks the line θ_0 + ηt·c.
    ValueError: behaviour_probs is not a distribution, or shapes differ.
    """
    if behaviour_probs.shape != rewards.shape:
        raise ValueError("behaviour_probs and rewards need one shape, got "
                         f"{tuple(behaviour_probs.shape)} and {tuple(rewards.shape)}")
    require_distribution(behaviour_probs)
    return behaviour_probs * (rewards - (behaviour_probs * rewards).sum(-1, keepdim=True))


def mean_group_update(behaviour_probs, rewards, *, group_size, leave_one_out=False):
    """E[(1/K) Σ_i A_i·∇log π_θ(y_i)] as a sum over ALL A^K groups that π_b can draw; (A,), (A,) → (A,).

    ∇log π_θ(y) = e_y − π_θ, and Σ_i A_i = 0 in every group with either baseline: π_θ drops out and e_y stays.
    """
    require_distribution(behaviour_probs)
    if behaviour_probs.shape != rewards.shape or group_size < 2:
        raise ValueError("need behaviour_probs and rewards of one shape (A,) and group_size ≥ 2, got "
                         f"{tuple(behaviour_probs.shape)}, {tuple(rewards.shape)} and {group_size}")
    arms = torch.arange(len(rewards))
    groups = torch.cartesian_prod(*[arms] * group_size)  # (A^K, K)
    drawn = rewards[groups]
    baseline = drawn.mean(-1, keepdim=True)
    if leave_one_out:
        baseline = (drawn.sum(-1, keepdim=True) - drawn) / (group_size - 1)
    one_hot = torch.eye(len(rewards), dtype=rewards.dtype)[groups]  # (A^K, K, A)
    updates = ((drawn - baseline).unsqueeze(-1) * one_hot).mean(1)
    return behaviour_probs[groups].prod(-1) @ updates


def train_bandit(behaviour_probs, rewards, *, steps, step_size=1.0, importance_sampling=False, refresh_every=None):
    """Population REINFORCE on softmax logits from θ_0 = 0 by autograd. Returns the logits (steps+1, A).

    importance_sampling weighs every response with the detached ratio π_θ/π_b.
    refresh_every=S replaces π_b by the current π_θ before steps S, 2S, …
    """
    theta = torch.zeros_like(rewards)
    path = [theta]
    for step in range(steps):
        if refresh_every is not None and step > 0 and step % refresh_every == 0:
            behaviour_probs = torch.softmax(theta, -1)
        theta = theta.clone().requires_grad_()
        logprobs = torch.log_softmax(theta, -1)
        weights = (logprobs.exp() / behaviour_probs).detach() if importance_sampling else torch.ones_like(rewards)
        advantages = rewards - behaviour_probs @ rewards
        loss = -(behaviour_probs * weights * advantages * logprobs).sum()
        theta = (theta - step_size * torch.autograd.grad(loss, theta)[0]).detach()
        path.append(theta)
    return torch.stack(path)


def data_with_third_arm(share):
    """π_b with π_b(3) = share; arms 1 and 2 split the rest 1 : 2, as they do in BEHAVIOUR (our reading)."""
    return torch.tensor([(1 - share) / 3, 2 * (1 - share) / 3, share], dtype=torch.float64)


def lead_of_third_arm(share):
    """c_3 − c_2 when π_b(3) = share. Logits walk along c: the right arm wins in the end where this is positive."""
    drift = bandit_drift(data_with_third_arm(share), REWARDS)
    return (drift[2] - drift[1]).item()


def bisect(function, low, high):
    """The root of a continuous function between low and high, by halving; ValueError if both ends have one sign."""
    if not function(low) * function(high) <= 0:  # NaN is refused too
        raise ValueError("bisection needs opposite signs at the two ends; widen the interval")
    rising = function(high) > 0
    for _ in range(60):  # 2⁻⁶⁰ of the interval is below the resolution of float64
        middle = (low + high) / 2
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2


# %% 5. Pitfall two: a finite sample says nothing about the responses it does not hold


UNSEEN_REWARDS = torch.tensor([0.3, 1.0, 1.0, 0.0], dtype=torch.float64)  # of 00, 01, 10 and 11, which nobody samples


def train_on_seen(*, steps, step_size=1.0):
    """A policy over two independent binary tokens, trained by REINFORCE on the group (00, 01, 10) over and over.

    In the group a 1 goes with reward 1, so both tokens learn to say 1: together, the one response that nobody saw.
    Here 1 response of 4 is unseen; for a language model all but a handful are.
    Returns (steps+1, 4): the probability of each response along the way.
    """
    tokens = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    theta = torch.zeros(2, dtype=torch.float64)  # logit of "1" for each token
    path = []
    for _ in range(steps + 1):
        theta = theta.clone().requires_grad_()
        logprobs = torch.nn.functional.logsigmoid((2 * tokens - 1) * theta).sum(-1)
        path.append(logprobs.detach().exp())
        loss = group_reinforce_loss(logprobs[:3], UNSEEN_REWARDS[:3])
        theta = (theta - step_size * torch.autograd.grad(loss, theta)[0]).detach()
    return torch.stack(path)


# %% 6. Many turns: the environment's dice cancel (paper: appendix; our reading of it)


def two_turn_logprobs(theta):
    """Σ_l log π_θ(y^l | x^l) of the 8 trajectories (y¹, x², y²), each binary, in lexicographic order.

    theta (10,): a pair of logits for the first prompt, then for each of the four second prompts, which hold (y¹, x²).
    The token view is the special case x^l = prefix, where the environment adds nothing (`prefix_tree_logprobs`).
    """
    logprobs = torch.log_softmax(theta.view(5, 2), dim=-1)
    return (logprobs[0][:, None, None] + logprobs[1:].view(2, 2, 2)).flatten()


def play_conditionals(trajectory_probs):
    """What a policy can copy from a distribution over trajectories: P(y¹) and P(y² | y¹, x²), but not P(x² | y¹).

    trajectory_probs (8,) → Σ_l log π(y^l | x^l) (8,). A second prompt that never occurs gets a uniform answer.
    """
    joint = trajectory_probs.view(2, 2, 2)
    second_prompt = joint.sum(-1, keepdim=True)
    second = torch.where(second_prompt > 0, joint / second_prompt, torch.full_like(joint, 0.5))
    return (joint.sum((1, 2), keepdim=True).log() + second.log()).flatten()


def environment_probs(chance):
    """P(x² | y¹) of the 8 trajectories, (8,), from chance (2, 2), rows y¹."""
    return chance.view(2, 2, 1).expand(2, 2, 2).flatten()


# R(y¹, x², y²) = x² + ½·y¹·y²: one part luck (or foresight, where y¹ decides x²), one part skill.
TWO_TURN_RETURNS = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.5, 1.0, 1.5], dtype=torch.float64)
FAIR_COIN = torch.full((2, 2), 0.5, dtype=torch.float64)
DETERMINISTIC = torch.eye(2, dtype=torch.float64)  # x² = y¹


def luck_left_over(chance, *, tau):
    """Play the conditionals of the optimum over trajectories, anchor π_t uniform.

    Returns (population Var(a) left, P*(x² = 1), the share of lucky second prompts that the optimum would like).
    """
    old_logprobs = two_turn_logprobs(torch.zeros(10, dtype=torch.float64))
    old_probs = old_logprobs.exp() * environment_probs(chance)
    optimum = kl_regularised_optimum(old_probs, TWO_TURN_RETURNS, tau=tau)
    possible = old_probs > 0
    loss = population_surrogate_loss(play_conditionals(optimum)[possible], old_logprobs[possible],
                                     TWO_TURN_RETURNS[possible], old_probs[possible], tau=tau)
    return loss * (1 + tau) ** 2, optimum.view(2, 2, 2)[:, 1].sum()


# %% 7. The claims


def claims_optimum(claims, generator):
    random = torch.softmax(2 * torch.randn(1000, 3, dtype=torch.float64, generator=generator), -1)
    optimum = kl_regularised_optimum(BEHAVIOUR, REWARDS, tau=TAU)
    log_z = (BEHAVIOUR * (REWARDS / TAU).exp()).sum().log()
    shortfall = TAU * (random * (random / optimum).log()).sum(-1)
    check(claims, "(1) J(π) = τ·log Z − τ·KL(π‖π*) for 1000 random π: largest deviation", expected=0.0, tolerance=1e-12,
          measured=(regularised_objective(random, BEHAVIOUR, REWARDS, tau=TAU) - (TAU * log_z - shortfall)).abs().max())
    spread = 0.0
    for tau in (0.05, 0.5, 5.0):
        old_probs = torch.softmax(torch.randn(27, dtype=torch.float64, generator=generator), -1)
        rewards = torch.rand(27, dtype=torch.float64, generator=generator)
        adjusted = rewards - tau * (kl_regularised_optimum(old_probs, rewards, tau=tau).log() - old_probs.log())
        spread = max(spread, (adjusted[:, None] - adjusted).abs().max().item())
    check(claims, "(2) pairwise consistency at π*, all pairs of 27 responses: largest |a_i − a_j|", expected=0.0,
          measured=spread)

    logprobs, old_logprobs, rewards = torch.randn(3, 200, 6, dtype=torch.float64, generator=generator)
    loss = pairwise_surrogate_loss(logprobs, old_logprobs, rewards, tau=TAU)
    variance = (rewards - TAU * (logprobs - old_logprobs)).var(-1, unbiased=False)
    check(claims, "(3) L̂ = Var(a)/(1+τ)² on 200 random groups: largest deviation", expected=0.0, tolerance=1e-12,
          measured=(loss - variance / (1 + TAU) ** 2).abs().max())


def claims_one_step(claims, table):
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for scale, loss_value, gradient in (
        (True, 0.0829629630, [0.088889, -0.029630, -0.059259]), (False, 0.1866666667, [0.2, -0.066667, -0.133333]),
    ):
        logprobs = torch.log_softmax(theta, -1)
        loss = pairwise_surrogate_loss(logprobs, logprobs, REWARDS, tau=TAU, scale=scale)
        check(claims, f"(3) worked example, scale={scale}: L̂", expected=loss_value, measured=loss, tolerance=1e-9)
        check(claims, f"(4) worked example, scale={scale}: ∇L̂", expected=gradient, tolerance=1e-6,
              measured=torch.autograd.grad(loss, theta)[0])
    for source, (gap, _) in table.items():
        check(claims, f"(4) {source} data: max |∇L̂ − constant·∇REINFORCE|, 3 policies", expected=0.0, measured=gap)
    check(claims, "(4) … where the gradients of every source reach at least 0.01", expected=True,
          measured=min(size for _, size in table.values()) > 0.01)


def claims_parting(claims, partings):
    for name, (distances, differences, slope, remainders) in partings.items():
        check(claims, f"{name}, away from θ_t: difference/(h·Taylor term) at the smallest h", expected=1.0,
              measured=differences[-1] / (distances[-1] * slope), tolerance=1e-2)
        orders = torch.stack([differences[-2] / differences[-1], remainders[-2] / remainders[-1]]).log2()
        check(claims, f"{name}: order in h of the difference and of what Taylor leaves", expected=[1.0, 2.0],
              measured=orders, tolerance=0.05)


def claims_minimiser(claims, descents):
    optimum = kl_regularised_optimum(BEHAVIOUR, REWARDS, tau=TAU)
    for name, (behaviour_probs, path) in descents.items():
        check(claims, f"minimiser of L̂, data {name}", expected=optimum, tolerance=1e-9,
              measured=torch.softmax(path[-1], -1))
    steps = torch.stack([path[1] - path[0] for _, path in descents.values()])
    directions = steps / steps.norm(dim=-1, keepdim=True)
    cosines = directions @ directions.T
    check(claims, "… but the first steps point elsewhere: smallest cosine between two of them < 0.7", expected=True,
          measured=cosines.min().item() < 0.7)
    no_third_arm = torch.tensor([0.4, 0.6, 0.0], dtype=torch.float64)
    tilted = torch.softmax(optimum.log() + torch.tensor([0.0, 0.0, 9.0]), -1)  # keeps the odds of arms 1 and 2
    losses = [population_surrogate_loss(probs.log(), BEHAVIOUR.log(), REWARDS, no_third_arm, tau=TAU)
              for probs in (optimum, tilted)]
    check(claims, "but data without arm 3 does not see it: L̂ = 0 at π* and also with all but 0.1 % on arm 3",
          expected=[0.0, 0.0], measured=torch.stack(losses))


def claims_preference(claims):
    """K = 2: the surrogate regresses the difference of log-ratios on the difference of rewards, and starts like DPO."""
    theta = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    beta, pair = 0.1, torch.tensor([2, 0])  # arm 3 (reward 1) preferred to arm 1 (reward 0)
    logprobs = torch.log_softmax(theta, -1)[pair]
    preferred, other = REWARDS[pair]
    surrogate = torch.autograd.grad(
        pairwise_surrogate_loss(logprobs, logprobs, REWARDS[pair], tau=TAU), theta, retain_graph=True)[0]
    log_ratios = logprobs - logprobs.detach()
    target = (preferred - other) / TAU
    moved = torch.tensor([0.7, -0.4], dtype=torch.float64)  # log-ratios of some other policy
    check(claims, "K = 2: L̂ = ¼·(τ/(1+τ))²·(Δ log-ratio − Δr/τ)², a squared preference loss", tolerance=1e-12,
          expected=(TAU / (1 + TAU)) ** 2 / 4 * (moved[0] - moved[1] - target) ** 2,
          measured=pairwise_surrogate_loss(moved, torch.zeros(2, dtype=torch.float64), REWARDS[pair], tau=TAU))
    dpo = torch.autograd.grad(-torch.nn.functional.logsigmoid(beta * (log_ratios[0] - log_ratios[1])), theta)[0]
    check(claims, "K = 2: ∇L̂ = constant·(r_1 − r_2)/(2β) · ∇DPO at θ_t", expected=surrogate,
          measured=step_constant(TAU) * (preferred - other) / (2 * beta) * dpo, tolerance=1e-12)


def claims_fixed_data(claims, paths):
    drift = bandit_drift(BEHAVIOUR, REWARDS)
    check(claims, "bandit: c = π_b·(r − μ)", expected=[-0.174, 0.132, 0.042], measured=drift, tolerance=1e-12)
    fixed = paths[FIXED]
    time = torch.arange(len(fixed), dtype=torch.float64)[:, None]
    check(claims, "bandit: 1000 autograd steps leave the line θ_0 + ηt·c by at most", expected=0.0,
          measured=(fixed - time * drift).abs().max())
    values = torch.softmax(time * drift, -1) @ REWARDS
    check(claims, "bandit: J at ηt = 0", expected=0.6, measured=values[0], tolerance=1e-12)
    check(claims, "bandit: π at ηt = 10", expected=[0.032259, 0.688015, 0.279726], tolerance=1e-6,
          measured=torch.softmax(10 * drift, -1))
    check(claims, "bandit: J at ηt = 10, above its limit", expected=0.830138, measured=values[10], tolerance=1e-6)

    def slope(eta_t):  # dJ/d(ηt) = Cov_π(c, r)
        probs = torch.softmax(eta_t * drift, -1)
        return (probs @ (drift * REWARDS) - (probs @ drift) * (probs @ REWARDS)).item()

    peak = bisect(slope, 1.0, 100.0)
    grid = torch.arange(0.0, 100.0, 0.01, dtype=torch.float64)
    check(claims, "bandit: J peaks where Cov_π(c, r) = 0; ηt by bisection against the best of a grid", tolerance=0.01,
          expected=grid[(torch.softmax(grid[:, None] * drift, -1) @ REWARDS).argmax()], measured=peak)
    after = values[math.ceil(peak) : 200]  # later the excess over .8 drowns in rounding
    check(claims, "bandit: past the peak J only falls, towards .8 and never below", expected=True,
          measured=after.diff().max().item() < 0 and after.min().item() > 0.8)
    check(claims, "bandit: the limit is arm 2, the wrong one: π at ηt = 1000", expected=[0.0, 1.0, 0.0],
          measured=torch.softmax(fixed[-1], -1))
    check(claims, "bandit: the right arm wins once π_b(3) > 8/35 (arms 1 and 2 share the rest 1 : 2)", expected=8 / 35,
          measured=bisect(lead_of_third_arm, 0.05, 0.95), tolerance=1e-12)
    for group_size in (2, 3, 4):
        update = mean_group_update(BEHAVIOUR, REWARDS, group_size=group_size)
        check(claims, f"all 3^{group_size} groups, group mean: (K−1)/K · c", measured=update, tolerance=1e-12,
              expected=(group_size - 1) / group_size * drift)
        update = mean_group_update(BEHAVIOUR, REWARDS, group_size=group_size, leave_one_out=True)
        check(claims, f"all 3^{group_size} groups, leave-one-out: c", expected=drift, measured=update, tolerance=1e-12)


def claims_repairs(claims, paths):
    # With the full ratio the constant baseline μ of the data drops out, and π_b with it: what is left is the exact ∇J.
    largest = []
    for path in (paths["importance sampling"],
                 train_bandit(BEHAVIOUR.flip(0), REWARDS, steps=100, importance_sampling=True)):
        probs = torch.softmax(path[:-1], -1)
        largest.append((path.diff(dim=0) - probs * (REWARDS - (probs @ REWARDS)[:, None])).abs().max())
    check(claims, "importance sampling: the update is π_θ·(r − J), whatever π_b (two of them)", expected=0.0,
          measured=max(largest), tolerance=1e-12)
    on_policy = train_bandit(torch.full_like(REWARDS, 1 / 3), REWARDS, steps=100, refresh_every=1)
    check(claims, "… which is on-policy REINFORCE, refreshed at every step: largest difference in 100 steps",
          expected=0.0, measured=(on_policy - paths["importance sampling"][:101]).abs().max())
    for name, path in paths.items():
        if name != FIXED:
            final = torch.softmax(path[-1], -1)
            check(claims, f"{name}: probability of arm 3 after 1000 steps > 0.99", expected=True,
                  measured=final[2].item() > 0.99)


def claims_unseen(claims, path):
    seen_value = (path[:, :3] @ UNSEEN_REWARDS[:3]) / path[:, :3].sum(-1)
    value = path @ UNSEEN_REWARDS
    check(claims, "unseen response: the reward among SEEN responses rises at every step", expected=True,
          measured=seen_value.diff().min().item() > 0)
    check(claims, "unseen response: the true J falls at every step, from .575", expected=True,
          measured=value.diff().max().item() < 0 and abs(value[0].item() - 0.575) < 1e-12)
    check(claims, "unseen response: more than 0.9 of the mass ends on the response nobody saw", expected=True,
          measured=path[-1, 3].item() > 0.9)


def claims_multi_turn(claims, generator):
    theta, old_theta = torch.randn(2, 10, dtype=torch.float64, generator=generator)
    chance = torch.softmax(torch.randn(2, 2, dtype=torch.float64, generator=generator), -1)

    def whole(theta):  # p(y¹)·P(x² | y¹)·p(y² | y¹, x²), the environment's dice included
        probs = torch.softmax(theta.view(5, 2), -1)
        return (probs[0].view(2, 1, 1) * chance.view(2, 2, 1) * probs[1:].view(2, 2, 2)).flatten()

    check(claims, "two turns: the 8 trajectories are all there are (probabilities sum to 1)", expected=1.0,
          measured=whole(theta).sum(), tolerance=1e-12)
    log_ratios = two_turn_logprobs(theta) - two_turn_logprobs(old_theta)
    check(claims, "two turns: log-ratio of whole trajectories = Σ_l of the policy's own (dice cancel)", expected=0.0,
          measured=((whole(theta) / whole(old_theta)).log() - log_ratios).abs().max(), tolerance=1e-12)
    gap = 0.0
    for group in ([0, 1, 2, 3, 4, 5, 6, 7], [3, 3, 3, 0], [7, 0], [5, 6, 6, 1, 1]):
        group = torch.tensor(group)
        surrogate, reinforce = two_gradients(two_turn_logprobs, theta, theta, group, TWO_TURN_RETURNS, tau=TAU)
        gap = max(gap, (surrogate - reinforce).abs().max().item())
    check(claims, "two turns: max |∇L̂ − constant·∇REINFORCE|, four hand-written groups", expected=0.0,
          measured=gap)
    left, _ = luck_left_over(DETERMINISTIC, tau=TAU)
    check(claims, "deterministic environment: the policy reaches exact consistency, Var(a) = 0", expected=0.0,
          measured=left)
    left, lucky = luck_left_over(FAIR_COIN, tau=TAU)
    check(claims, "fair coin: the optimum would load the coin to σ(1/τ), which no policy can", measured=lucky,
          expected=1 / (1 + math.exp(-1 / TAU)))
    check(claims, "fair coin: playing its conditionals leaves Var(a) = the luck of the coin, ¼", expected=0.25,
          measured=left)


# %% 8. The figures


def figure_pairwise(descents, directory):
    fig, axes = figure(3, width=3.3, height=3.5, sharex=True, sharey=True)
    fig.suptitle("The minimiser is the same for every sampling distribution; the single step is not")
    optimum = kl_regularised_optimum(BEHAVIOUR, REWARDS, tau=TAU).log()
    star = optimum[:2] - optimum[2]
    horizontal, vertical = torch.meshgrid(torch.linspace(-1.6, 1.9, 80), torch.linspace(-0.1, 2.9, 80), indexing="xy")
    logits = torch.stack([horizontal, vertical, torch.zeros_like(horizontal)], -1).double()
    adjusted = REWARDS - TAU * (torch.log_softmax(logits, -1) - BEHAVIOUR.log())
    for axis, (name, (behaviour_probs, path)) in zip(axes, descents.items()):
        mean = (behaviour_probs * adjusted).sum(-1, keepdim=True)
        loss = (behaviour_probs * (adjusted - mean) ** 2).sum(-1) / (1 + TAU) ** 2
        axis.contour(horizontal, vertical, loss, levels=[0.004, 0.02, 0.06, 0.12], colors="0.7",
                     linestyles="-", linewidths=0.8)
        plane = path[:, :2] - path[:, 2:]
        axis.plot(*plane.T, linewidth=1.2, color="#0072B2", linestyle="--", label="many steps on this loss")
        step = plane[1] - plane[0]
        tip = plane[0] + 0.9 * step / step.norm()  # only the direction matters: the learning rate sets the length
        arrow = {"arrowstyle": "-|>", "linewidth": 2.2, "color": "#D55E00"}
        axis.annotate("", tip.tolist(), plane[0].tolist(), arrowprops=arrow)
        axis.plot([], [], color="#D55E00", linestyle="-", label="the single step = REINFORCE")
        axis.plot(*plane[0], "o", color="black", label=r"start: the anchor $\pi_t$")
        axis.plot(*star, "*", color="black", markersize=13, label=r"minimiser $\pi^*$")
        axis.set(title=f"data: {name}", xlabel="logit 1 − logit 3")
    axes[0].set_ylabel("logit 2 − logit 3")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return save_figure(fig, directory, "03_pairwise")


def figure_pitfalls(paths, unseen, directory):
    fig, (left, middle, right) = figure(3, width=3.6, height=3.0)
    for name, path in paths.items():
        left.plot(torch.arange(1, len(path)), torch.softmax(path, -1)[1:] @ REWARDS, label=name)
    left.axhline(0.8, color="0.8", linewidth=0.8, linestyle="-", zorder=0)
    left.annotate("arm 2: .8", (1.1, 0.805), color="0.4", fontsize=8)
    left.set(title="Fixed data ends on the wrong arm", xlabel="step (η = 1)", ylabel="expected reward J", xscale="log",
             ylim=(0.6, 1.02))
    left.legend(fontsize=8, loc="lower right")

    shares = torch.linspace(0.02, 0.6, 100)
    lead = [lead_of_third_arm(share.item()) for share in shares]
    root = bisect(lead_of_third_arm, 0.05, 0.95)
    middle.plot(shares, lead)
    middle.axhline(0, color="0.8", linewidth=0.8, linestyle="-", zorder=0)
    middle.plot(root, 0, "o", color="black")
    middle.annotate("threshold 8/35", (root, 0), (6, -14), textcoords="offset points")
    here = BEHAVIOUR[2].item(), lead_of_third_arm(BEHAVIOUR[2].item())
    middle.plot(*here, "s", color="black")
    middle.annotate("this bandit", here, (8, -3), textcoords="offset points")
    middle.set(title="The data decides which arm wins", xlabel=r"share of arm 3 in the data, $\pi_b(3)$",
               ylabel="lead of arm 3 over arm 2, c₃ − c₂")

    right.plot(unseen[:, :3] @ UNSEEN_REWARDS[:3] / unseen[:, :3].sum(-1), label="mean reward among seen")
    right.plot(unseen @ UNSEEN_REWARDS, label="true J")
    right.plot(unseen[:, 3], label="mass on the unseen response")
    right.set(title="Better on what was seen, worse in truth", xlabel="step (η = 1)", ylim=(0, 1.02))
    right.legend(fontsize=8, loc="center right")
    return save_figure(fig, directory, "03_pitfalls")


def figure_parting(partings, directory):
    fig, axes = figure(len(partings), width=4.3, height=3.4, sharey=True)
    fig.suptitle("Away from the anchor the two gradients part, at the rate Taylor predicts")
    for axis, (name, (distances, differences, slope, remainders)) in zip(axes, partings.items()):
        axis.plot(distances, differences, marker="o", markersize=4, linestyle="none", label="‖∇L̂ − REINFORCE‖")
        axis.plot(distances, distances * slope, label="first Taylor term, ∝ h")
        axis.plot(distances, remainders, marker="s", markersize=4, linestyle="none", color="#009E73",
                  label="what that term leaves")
        axis.plot(distances, remainders[-1] * (distances / distances[-1]) ** 2, linestyle=":", color="#009E73",
                  label="∝ h²")
        axis.set(title=name, xscale="log", yscale="log",
                 xlabel=r"distance $h$ from the anchor $\theta_t$")
        axis.minorticks_off()
    axes[0].set_ylabel("norm")
    axes[0].legend(fontsize=8)
    return save_figure(fig, directory, "03_parting")


# %% 9. Exercises: python 03_offpolicy_derivation.py --exercise 1


def exercise_optimum(old_probs, rewards, tau):
    return kl_regularised_optimum(old_probs, rewards, tau=tau)


def exercise_one_step(logits, actions, rewards, tau):
    theta = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(theta, -1)[actions]
    return torch.autograd.grad(pairwise_surrogate_loss(logprobs, logprobs, rewards, tau=tau), theta)[0]


def exercise_limit(behaviour_probs, rewards):
    return rewards[bandit_drift(behaviour_probs, rewards).argmax()]


EXERCISES = {
    1: ("optimum", "The maximiser (A,) of E_π r − τ·KL(π‖π_t); old_probs = π_t (A,), rewards (A,); equation (1).",
        exercise_optimum,
        [(BEHAVIOUR, REWARDS, 0.5), (BEHAVIOUR, REWARDS, 5.0), (BEHAVIOUR, 1000 * REWARDS, 0.5)]),
    2: ("one_step", "Without autograd: the gradient (A,) of the scaled pairwise loss in the softmax logits (A,), at "
        "the anchor, for a group of arms `actions` (K,) with `rewards` (K,); equation (4).",
        exercise_one_step,
        [(torch.zeros(3, dtype=torch.float64), torch.tensor([0, 1, 2]), REWARDS, 0.5),
         (torch.tensor([0.3, -0.2, 0.1, 0.0], dtype=torch.float64), torch.tensor([3, 3, 0, 1]),
          torch.tensor([1.0, 1.0, 0.0, 0.5], dtype=torch.float64), 2.0)]),
    3: ("limit", "REINFORCE trains for ever on fixed data from behaviour_probs (A,), softmax logits starting at 0. "
        "Return the expected reward it ends with (a number).",
        exercise_limit,
        [(BEHAVIOUR, REWARDS), (data_with_third_arm(0.3), REWARDS), (BEHAVIOUR.flip(0), REWARDS)]),
}


# %% 10. Run


def main(argv=None):
    args = lesson_arguments(__doc__, argv)
    if args.exercise is not None:
        run_exercise(EXERCISES, args)
    generator = seed_everything(args.seed)
    claims = []

    claims_optimum(claims, generator)
    taus, repeats = ((0.1, 2.0), 1) if args.quick else ((0.01, 0.1, 0.5, 2.0, 10.0), 3)
    claims_one_step(claims, one_step_table(generator, taus=taus, repeats=repeats))

    distances = 2.0 ** -torch.arange(2 if not args.quick else 8, 14, dtype=torch.float64)
    partings = {}
    for name, (theta, policy) in tiny_policies(generator).items():
        if name == "bandit":  # there log-ratio differences are linear in the logits, so Taylor leaves nothing to plot
            continue
        rewards = torch.rand(27, dtype=torch.float64, generator=generator)
        direction = torch.randn(len(theta), dtype=torch.float64, generator=generator)
        direction = direction / direction.norm()
        group = data_sources(policy(theta), generator=generator)["hand-written"]
        partings[name] = (distances, *parting_of_gradients(
            policy, theta, group, rewards, direction, tau=TAU, distances=distances))
    claims_parting(claims, partings)

    descents = {}
    for name, behaviour in (("on-policy", BEHAVIOUR), ("uniform", torch.full_like(BEHAVIOUR, 1 / 3)),
                            ("mostly arm 3", torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64))):
        descents[name] = behaviour, descend_population_loss(behaviour, BEHAVIOUR, REWARDS, tau=TAU)
    claims_minimiser(claims, descents)
    claims_preference(claims)

    paths = {
        FIXED: train_bandit(BEHAVIOUR, REWARDS, steps=1000),
        "importance sampling": train_bandit(BEHAVIOUR, REWARDS, steps=1000, importance_sampling=True),
        "data refreshed every 10": train_bandit(BEHAVIOUR, REWARDS, steps=1000, refresh_every=10),
        "data refreshed every 50": train_bandit(BEHAVIOUR, REWARDS, steps=1000, refresh_every=50),
    }
    claims_fixed_data(claims, paths)
    claims_repairs(claims, paths)
    unseen = train_on_seen(steps=60)
    claims_unseen(claims, unseen)
    claims_multi_turn(claims, generator)

    print("The minimiser is the same for every sampling distribution; the single step is not.")
    figure_pairwise(descents, args.out)
    figure_pitfalls(paths, unseen, args.out)
    figure_parting(partings, args.out)
    finish(claims, args)


if __name__ == "__main__":
    torch.set_num_threads(1)  # every tensor here is tiny: more threads would only wait for each other
    main()
