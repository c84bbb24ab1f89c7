"""A world small enough to be exact, in which a policy can be trained on samples of its own past. No algorithm.

A policy writes three tokens, each one of four, in answer to one of four prompts: 64 responses, so that J, the KL
divergence and the effective sample size are plain sums over all of them. It is a table (4, 21) of logits: a row for
each next token, a column for each prefix, that is, for what stands before it: column 0 nothing, 1 to 4 one token, 5 to
20 two tokens. One table for each prompt, and seeds in front. Lessons 04 and 05 train in it, by this loop:

    generator = torch.Generator().manual_seed(0)
    logits, rewards = random_worlds(20, generator=generator)               # 20 seeds: a task and a first policy each
    policies, (every, late) = [logits], SETTINGS["refreshed every 20 steps"]
    for step in range(1, 101):
        learner = policies[-1].clone().requires_grad_()
        sampler = policies[rollout_version(step, sync_interval=every, sync_offset=late)]       # a policy of the past
        responses = sample_responses(sampler, generator=generator)         # (seeds, prompts, K): numbers 0 … 63
        advantages = group_advantages(rewards.gather(-1, responses))       # (seeds, prompts, K)
        logprobs, old_logprobs = token_logprobs(learner, responses), token_logprobs(sampler, responses)
        loss = rec_loss(logprobs, old_logprobs, advantages, torch.ones_like(logprobs), …)      # a mean over all tokens
        policies.append(descend(learner, loss))
    expected_reward(torch.stack(policies), rewards)                        # exact J: (101 versions, 20 seeds)

A real trainer keeps no old policies: its sampler fills a queue, first in, first out. Either way the batch of step n
comes from the policy after v(n) updates (rollout_version).
"""

import torch

torch.set_num_threads(1)  # tensors this small lose more time between threads than they gain
PROMPTS, VOCABULARY, LENGTH, GROUP_SIZE, PREFIXES = 4, 4, 3, 8, 1 + 4 + 16
SETTINGS = {"fresh data": (1, 0), "refreshed every 20 steps": (20, 0), "10 batches late": (1, 10),
            "never refreshed": (None, 0)}  # name → sync interval I, sync offset m
STEP_SIZE, SHARING = 3.0, 0.85  # fresh data nearly solve the task in 100 steps, and stale data hurt


# %% Which batch comes from which policy


def rollout_version(step, *, sync_interval, sync_offset):
    """v(n) = I·max(0, ⌊(n−m−1)/I⌋): updates the sampler's weights had seen for the batch of step n (1-based).

    I: the sampler is refreshed after every I updates (None: never); m: it works m batches ahead of the learner.
    """
    if sync_interval is None:
        return 0
    return sync_interval * max(0, (step - sync_offset - 1) // sync_interval)


def staleness(step, *, sync_interval, sync_offset):
    """s(n) = (n−1) − v(n): how many updates step n (1-based) is ahead of its data's sampler."""
    return step - 1 - rollout_version(step, sync_interval=sync_interval, sync_offset=sync_offset)


# %% The responses, all of them
def response_cells():
    """Where the tokens of every response stand in the flattened (4, 21) table: (64, 3) integers, 21·token + prefix.

    Response (2, 0, 3) has number 2·16 + 0·4 + 3 = 35. Its tokens stand in row 2, column 0 (nothing before); in row 0,
    column 1 + 2 (after 2); in row 3, column 5 + 4·2 + 0 (after 2, 0): cells 42, 3 and 76.
    """
    responses, cells, first = torch.arange(VOCABULARY**LENGTH), [], 0
    for position in range(LENGTH):
        here = responses // VOCABULARY ** (LENGTH - 1 - position)  # the tokens so far, as a number of base 4
        cells.append(here % VOCABULARY * PREFIXES + first + here // VOCABULARY)  # its row, and its column
        first += VOCABULARY**position  # the first column of prefixes of this length: 0, 1, 5
    return torch.stack(cells, -1)


CELLS = response_cells()


def random_worlds(seeds, *, generator):
    """One task and one first policy per seed: logits (seeds, PROMPTS, 4, 21) ~ N(0, 1), rewards (seeds, PROMPTS, 64).

    A random quarter of the responses to each prompt is right: what is right for one is as a rule wrong for another.
    """
    logits = torch.randn(seeds, PROMPTS, PREFIXES, VOCABULARY, dtype=torch.float64, generator=generator).mT.contiguous()
    order = torch.rand(seeds, PROMPTS, VOCABULARY**LENGTH, dtype=torch.float64, generator=generator).argsort(-1)
    return logits, (order < VOCABULARY**LENGTH // 4).double()


def response_logprobs(logits):
    """log π(y) of all 64 responses: (..., 4, 21) → (..., 64)."""
    table = torch.log_softmax(logits, -2).flatten(-2)
    return sum(table[..., cells] for cells in CELLS.T)


def token_logprobs(logits, responses):
    """log π of each token of the numbered responses: (..., 4, 21), (..., K) → (..., K, 3)."""
    cells = CELLS[responses]
    table = torch.log_softmax(logits, -2).flatten(-2)
    return table.gather(-1, cells.flatten(-2)).view(cells.shape)


def sample_responses(logits, *, generator):
    """A group of K responses to each prompt: (seeds, prompts, 4, 21) → numbers of responses (seeds, prompts, K).

    Equal policies draw equal responses from equal generators, so that differences between methods are paired.
    """
    cumulative = response_logprobs(logits).exp().cumsum(-1)
    cumulative[..., -1] = 1.0  # against rounding
    uniform = torch.rand(*logits.shape[:2], GROUP_SIZE, dtype=torch.float64, generator=generator)
    return torch.searchsorted(cumulative, uniform, right=True)


# %% Exact values, all (..., seeds): the mean over the prompts
def expected_reward(logits, rewards):
    """J = Σ_y π(y)·r(y)."""
    return (response_logprobs(logits).exp() * rewards).sum(-1).mean(-1)


def kl_to(logits, old_logits):
    """KL(π ‖ π_old) = Σ_y π(y)·log(π(y)/π_old(y))."""
    logprobs, old_logprobs = response_logprobs(logits), response_logprobs(old_logits)
    return (logprobs.exp() * (logprobs - old_logprobs)).sum(-1).mean(-1)


def effective_sample_size(logits, old_logits):
    """1 / Σ_y π(y)²/π_old(y): the share of π_old's samples that still count when they stand for π's (lesson 01)."""
    logprobs, old_logprobs = response_logprobs(logits), response_logprobs(old_logits)
    return (-(2 * logprobs - old_logprobs).logsumexp(-1)).exp().mean(-1)


# %% A step, and what many seeds say


def descend(logits, loss, *, step_size=STEP_SIZE, sharing=SHARING):
    """One step of gradient descent on `loss`, a mean over all tokens that was computed from `logits`; → new logits.

    sharing  s in [0, 1]. A gradient g for one prompt moves its own logits by g and those of every other prompt by s·g.
             That is descent on logits_x = √(1−s)·own_x + √s·shared: s = 0 is a table for each prompt, s = 1 one table
             for all. A network stands between: its prompts share weights.
    """
    (gradient,) = torch.autograd.grad(loss, logits)
    gradient = gradient * logits[..., 0, 0].numel() * LENGTH  # the mean over all tokens → (1/K) Σ_i Σ_t of each prompt
    return (logits - step_size * ((1 - sharing) * gradient + sharing * gradient.sum(1, keepdim=True))).detach()


def interval(values, *, resamples=1000):
    """Mean over the last dimension (seeds) and its bootstrap 95 % interval: (..., seeds) → three tensors (...)."""
    drawn = torch.randint(values.shape[-1], (resamples, values.shape[-1]), generator=torch.Generator().manual_seed(0))
    means = values[..., drawn].mean(-1)
    return values.mean(-1), *torch.quantile(means, torch.tensor([0.025, 0.975], dtype=values.dtype), dim=-1)


def verdict(low, high, *, least=0.0, margin=None):
    """What a 95 % interval says about "more than `least`" or, with a margin, about "equal within ± margin"."""
    if margin is None:
        return "holds" if low > least else "does not hold" if high < least else "not resolved"
    if -margin < low and high < margin:
        return "holds"
    return "does not hold" if low > margin or high < -margin else "not resolved"
