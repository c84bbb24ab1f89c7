"""What single rows of the family do beside the one equation: to rewards, to data, to advantages, and by a second batch.

06 calls these, and for a row that needs nothing they change nothing: training_rewards (in collect), training_batch (in
train), prepare_rewards and BASELINES (in shaped_advantages), weigh_hints (in policy_loss), token_advantages and
extra_gradient (in train_step).
"""

import math
import os
import warnings
from dataclasses import replace

import torch

from under_the_hood import parallel
from under_the_hood.answers import extract_answer, load_reward
from under_the_hood.errors import UserError, require
from under_the_hood.evaluation import filled, interval_95
from under_the_hood.models import (autocast, context_length, decode, drop_long_prompts, encode_prompts, load_model,
                                   set_chat_options)
from under_the_hood.tasks import batch_examples, load_task, reward_function
from utils import pick_device

# %% Rewards: what the trainer sees


def training_rewards(rewards, asked, texts, lengths, config, *, algorithm, generator):
    """What the trainer sees, (P, K) → (P, K): a verifier that errs, SGPO's graded steps, DAPO's length penalty."""
    if config.reward_noise != "0,0":
        rewards = noisy_verdicts(rewards, rate_pair(config.reward_noise, flag="--reward-noise"), generator=generator)
    if algorithm.graded:
        judge = load_reward(config.step_reward) if config.step_reward else leading_digits
        wrong = filled(rewards).amax(1) <= 0
        shares = [judge(e.question, text, e.answer) if wrong[i // rewards.shape[1]] else 0.0
                  for i, (e, text) in enumerate(zip(asked, texts))]
        graded = graded_reward(torch.tensor(shares).to(rewards)).view_as(rewards)
        rewards = torch.where(wrong[:, None] & ~rewards.isnan(), graded, rewards)
    if algorithm.overlong_share:
        budget = config.max_new_tokens
        penalty = overlong_penalty(lengths, max_length=budget, cache=algorithm.overlong_share * budget)
        rewards = rewards + penalty.view_as(rewards)
    return rewards


def noisy_verdicts(rewards, rates, *, generator):
    """Flip verdicts of 0 with probability ρ⁺ and verdicts of 1 with probability ρ⁻."""
    if not ((rewards == 0) | (rewards == 1) | rewards.isnan()).all():
        raise ValueError("--reward-noise flips verdicts of 0 and 1, and this reward gives other numbers")
    chance = torch.where(rewards == 0, *rates)
    flipped = torch.rand(rewards.shape, generator=generator, device=rewards.device) < chance
    return (rewards - flipped.to(rewards)).abs()


def rate_pair(text: str, *, flag: str) -> tuple[float, float]:
    """'0.2,0.1' → (ρ⁺, ρ⁻), the shares of wrong and of right answers that the verifier misjudges."""
    try:
        false_positive, false_negative = map(float, text.split(","))
    except ValueError:
        raise UserError(f"{flag} is {text!r}; it must be two numbers with a comma, such as 0.2,0.1") from None
    require(min(false_positive, false_negative) >= 0 and false_positive + false_negative < 1,
            f"{flag} is {text}; the rates must be 0 or more, and sum to less than 1, else a verdict says nothing")
    return false_positive, false_negative


def noise_rates(config) -> tuple[float, float]:
    """The (ρ⁺, ρ⁻) that noise-corrected-grpo assumes: by default those that --reward-noise makes."""
    return rate_pair(config.noise_rates or config.reward_noise, flag="--noise-rates")


def leading_digits(question: str, text: str, answer: str) -> float:
    """The step checker of addition: the share of digits that are right, counted up to the first wrong one."""
    found = extract_answer(text) or ""
    return len(os.path.commonprefix([found, answer])) / max(len(found), len(answer))


# Formulas of lessons 02, 04 and 05, copied here and below; a test holds them equal.


def overlong_penalty(length, *, max_length, cache):
    """DAPO: 0 up to max_length − cache, then linear to −1 at max_length; lesson 04 explains it."""
    return (-(length - (max_length - cache)) / cache).clamp(max=0)


def graded_reward(right_steps, *, steepness=5.0, centre=0.5):
    """SGPO: 1/(1 + exp(−β(RTS − γ))); lesson 05 explains it."""
    if not ((right_steps >= 0) & (right_steps <= 1)).all():
        raise ValueError("need right_steps, the share of right leading steps, in [0, 1]")
    return torch.sigmoid(steepness * (right_steps - centre))


# %% Data: which responses make a batch


def training_batch(sample, task, number: int, config, *, algorithm):
    """Batch `number` of the run, this process's share. sample(examples, worked=…) → Rollout.

    DAPO's dynamic sampling replaces groups whose rewards are all equal, at most --refills times.
    """
    count, seed = config.prompts_per_step, config.seed
    worked = batch_examples(task.train, number, count=algorithm.worked_examples, seed=seed + 1)
    examples = batch_examples(task.train, number, count=count, seed=seed)[parallel.rank():: parallel.size()]
    batch = sample(examples, worked=worked)
    for attempt in range(config.refills if algorithm.refill else 0):
        keep = informative_groups(filled(batch.rewards))
        if keep.all():
            break
        # Other questions in each attempt and process, from a fixed seed, so that a resumed run repeats them.
        shuffle = (seed + 1) * 1009 + attempt + 7919 * parallel.rank()
        more = batch_examples(task.train, number, count=int((~keep).sum()), seed=shuffle)
        batch = join(batch, keep, sample(more, worked=worked))
    if algorithm.refill and not informative_groups(filled(batch.rewards)).all():
        warnings.warn(f"groups without a contrast remain after --refills {config.refills}; they stay in the batch, "
                      "with advantage 0 (flat_groups in metrics.jsonl). An easier task or larger groups help",
                      stacklevel=2)
    return batch


def informative_groups(rewards):
    """True for a group that is not flat, (..., K) → (...); lesson 05 explains it."""
    return rewards.amax(-1) != rewards.amin(-1)


def join(first, keep, second):
    """The groups of `first` where keep (P,) is True, then those of `second`, padded to one width."""
    rows = keep.repeat_interleave(first.rewards.shape[1])

    def both(name, kept, left=False):
        return pad_and_stack(getattr(first, name)[kept], getattr(second, name), left=left)

    return replace(
        first, rewards=both("rewards", keep), prompt=both("prompt", keep, left=True),
        prompt_mask=both("prompt_mask", keep, left=True),
        **{name: both(name, rows) for name in ("tokens", "mask", "old_logprobs")},
        **{name: torch.cat([getattr(first, name)[rows], getattr(second, name)]) for name in ("truncated", "hinted")
           if getattr(first, name) is not None})


def pad_and_stack(first, second, *, left=False):
    """Two tensors (·, T₁) and (·, T₂) on top of each other. The narrower one is filled with 0, which the mask hides."""
    width = max(first.shape[1], second.shape[1])
    gaps = [(width - part.shape[1], 0) if left else (0, width - part.shape[1]) for part in (first, second)]
    return torch.cat([torch.nn.functional.pad(part, gap) for part, gap in zip((first, second), gaps)])


def hinted_group(engine, model, tokenizer, examples, worked, prompt, prompt_mask, *, group_size: int, **options):
    """ICPO: the last response of each group is sampled with worked examples in the prompt, and scored without them.

    engine: (generate, token_logprobs). Returns tokens, mask, logprobs and hinted (B,). The log-probabilities of the
    hinted tokens are those under the plain prompt, so that ratios and KL measure staleness and not the hint. Only a
    model that can use examples gains by them: the built-in one has never seen two questions in a row, and with an
    example it is right in 1 % of the cases, without in 40 %.
    """
    generate, token_logprobs = engine
    tokens, mask, logprobs = generate(model, prompt, prompt_mask, group_size=group_size - 1, **options)
    shown, shown_mask = encode_prompts(tokenizer, examples, device=prompt.device, worked=worked)
    require(shown.shape[1] + options["max_new_tokens"] <= context_length(model),
            f"with a worked example a prompt has {shown.shape[1]} tokens, "
            f"and the model's context of {context_length(model)} leaves no room for the answer")
    hinted_tokens, hinted_mask, _ = generate(model, shown, shown_mask, group_size=1, **options)
    with torch.no_grad():
        hinted_logprobs, _ = token_logprobs(model, prompt, hinted_tokens, prompt_mask=prompt_mask, mask=hinted_mask,
                                            temperature=options["temperature"])
    hinted = torch.arange(len(prompt) * group_size, device=prompt.device) % group_size == group_size - 1
    order = hinted.long().argsort(stable=True).argsort()  # in the stack the plain rows come first, then the hinted
    pairs = ((tokens, hinted_tokens), (mask, hinted_mask), (logprobs, hinted_logprobs))
    return *(pad_and_stack(*pair)[order] for pair in pairs), hinted


# %% Advantages beside the group mean


def adaptive_temperature(advantages, lengths, *, low=0.8, high=100.0):
    """The T of RED-Weight at which Σ A·exp(A/T)·L = 0 for one group, or None; lesson 05 explains it."""
    if not (advantages.dim() == 1 and advantages.shape == lengths.shape and len(lengths) > 1
            and 0 < low < high < math.inf
            and advantages.isfinite().all() and (lengths >= 0).all() and lengths.isfinite().all()):
        raise ValueError("need one group, finite advantages and lengths ≥ 0, both (K,), K ≥ 2, and 0 < low < high; got "
                         f"{tuple(advantages.shape)}, {tuple(lengths.shape)}, {low}, {high}")
    advantages, lengths = (tensor.detach().to("cpu", torch.float64) for tensor in (advantages, lengths))
    pull = advantages * lengths
    if pull.sum() >= -1e-6 * pull.abs().sum():  # less than that is the rounding of a float32 mean
        return None

    def still_negative(temperature):  # dividing by the largest weight keeps the sign, and nothing overflows
        return (pull * ((advantages - advantages.max()) / temperature).exp()).sum() < 0

    if still_negative(low):
        return float(low)
    for _ in range(20):
        if high - low < 0.05:
            break
        middle = (low + high) / 2
        low, high = (low, middle) if still_negative(middle) else (middle, high)
    return float(high)


def advantages_of_scored(shaped_advantages, rewards, lengths, *, algorithm, **options):
    """Where the verifier could not judge a response (its reward is NaN): its group's advantages come from the others.

    Its own is 0. Fewer than two judged responses are no group, and give 0 as well.
    """
    advantages, scored = torch.zeros_like(rewards), ~rewards.isnan()
    one_group = torch.eye(len(scored), dtype=torch.bool, device=scored.device)[:, :, None]
    for known in [scored] if algorithm.baseline == "batch" else scored & one_group:
        hint_unscored = algorithm.baseline == "hinted" and not known[:, -1].any()
        if known.sum() > 1 and algorithm.baseline == "virtual":  # the largest reward is that of the whole batch
            most = max(1.0, rewards[scored].max().item())
            advantages[known] = ngrpo_advantages(rewards[known][None], max_reward=most)[0]
        elif known.sum() > 1:
            # Without a verdict on the hinted response the plain ones are ICPO's pool, and none has the bonus of a hint
            timed = options | ({"number": math.inf} if hint_unscored else {})
            found = shaped_advantages(rewards[known][None], lengths[known][None], algorithm=algorithm, **timed)
            advantages[known] = found[0]
    return advantages


def prepare_rewards(rewards, lengths, *, algorithm, noise_rates):
    """What a row makes of the rewards before its baseline, (P, K): undo the verifier's errors, divide by the length."""
    if algorithm.correct_noise:
        rewards = noise_corrected_rewards(rewards, false_positive_rate=noise_rates[0],
                                          false_negative_rate=noise_rates[1])
    return rewards / lengths if algorithm.per_token_reward else rewards


def ngrpo_advantages(rewards, *, max_reward=1.0, eps=1e-6):
    """NGRPO: each group normalised with one virtual right response, (..., K) → (..., K); lesson 02 explains it."""
    if (rewards > max_reward).any():
        raise ValueError(f"need max_reward, the largest possible reward; got {max_reward:g} "
                         f"and a reward of {rewards.max():g}")
    pool = torch.cat([rewards, torch.full_like(rewards[..., :1], max_reward)], -1)
    advantages = (rewards - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    flat = pool.amax(-1, keepdim=True) == pool.amin(-1, keepdim=True)
    return torch.where(flat, 0.0, advantages)


def noise_corrected_rewards(rewards, *, false_positive_rate, false_negative_rate):
    """r̂ = (r̃ − ρ⁺)/(1 − ρ⁺ − ρ⁻), unbiased though the verifier errs; lesson 02 explains it."""
    if not (min(false_positive_rate, false_negative_rate) >= 0 and false_positive_rate + false_negative_rate < 1):
        raise ValueError(f"need rates ≥ 0 that sum to less than 1; got {false_positive_rate}, {false_negative_rate}")
    return (1.0 * rewards - false_positive_rate) / (1 - false_positive_rate - false_negative_rate)


def icpo_advantages(plain_rewards, hinted_reward, *, step, decay=400, eps=1e-6):
    """ICPO: plain rollouts and one hinted one, normalised together, (..., G−1), (...) → (..., G); lesson 05."""
    bonus = max(0.0, 1 - step / decay)
    hinted = torch.where(hinted_reward > 0, hinted_reward + bonus, hinted_reward)
    pool = torch.cat([plain_rewards, hinted.unsqueeze(-1)], -1)
    advantages = (pool - pool.mean(-1, keepdim=True)) / (pool.std(-1, correction=1, keepdim=True) + eps)
    return torch.where(informative_groups(pool).unsqueeze(-1), advantages, 0.0)


# Baselines of single rows: (P, K) rewards and the number of the batch → (P, K) advantages.
BASELINES = {
    "virtual": lambda rewards, number: ngrpo_advantages(rewards, max_reward=max(1.0, rewards.max().item())),
    "hinted": lambda rewards, number: icpo_advantages(rewards[:, :-1], rewards[:, -1], step=number - 1),
}


def hint_weight(probs, *, smoothing=0.1):
    """ICPO's W = x/(x + λ) of hinted tokens; lesson 05 explains it."""
    return probs / (probs + smoothing)


def weigh_hints(keep, weight, logprobs, hinted, *, algorithm):
    """ICPO: M and W with the hinted responses, (B,), never clipped and weighed by π/(π + λ)."""
    smoothed = hint_weight(logprobs.detach().exp(), smoothing=algorithm.hint_smoothing)
    return keep | hinted[:, None], torch.where(hinted[:, None], smoothed, weight)


def token_advantages(advantages, rewards, log_ratio, entropy, mask, *, algorithm):
    """(P, K) advantages of groups → (B,), or (B, T) for a row that gives each token its own."""
    if algorithm.process_weight is None:
        return advantages.flatten()
    return process_advantages(advantages, rewards, log_ratio.detach(), entropy, mask,
                              process_weight=algorithm.process_weight)


def process_advantages(advantages, rewards, log_ratio, entropy, mask, *, process_weight):
    """EP-GRPO's token advantages, **our reading**: s·(|A| + w·σ(s·d))·g, (P, K) advantages and rewards → (B, T).

    s is the sign of the outcome advantage, or in a flat group of the outcome itself (r > 0 or not). All tokens of a
    response are pushed in this direction. d = log π_θ − log π_old at the token is the process signal: σ(s·d) says how
    far the policy agrees with the outcome there. On fresh data d = 0 and σ = ½; in a flat group A = 0, and only this
    term is left. g is the gate: the token's share of the response's entropy, times the response's length. The shares
    sum to 1, so neither padding nor cutting a token in two changes the response's total.
    """
    flat = ~informative_groups(filled(rewards))[:, None]
    sign = torch.where(flat, torch.where(rewards > 0, 1.0, -1.0), advantages.sign()).reshape(-1, 1)
    entropy = torch.where(mask, entropy + 1e-6, 0.0)  # a response without any entropy is gated evenly
    gate = entropy * mask.sum(1, keepdim=True) / entropy.sum(1, keepdim=True)
    return sign * (advantages.abs().reshape(-1, 1) + process_weight * torch.sigmoid(sign * log_ratio)) * gate


# %% A second batch


def extra_gradient(model, batch, config, *, algorithm, entropy, sample, token_logprobs):
    """AEPO: add REINFORCE's gradient, with reward 1, on own samples at temperature 1.2 or 0.8. Returns its loss.

    Imitating samples that are more random than the policy raises its entropy, imitating less random ones lowers it
    (lesson 05). They come from the policy at this step: samples of a stale sampler would also pull the policy towards
    that sampler. sample: generate with all but the prompts, the group size and the temperature filled in.
    """
    if algorithm.entropy_target is None:
        return 0.0
    heat = 1.2 if entropy < algorithm.entropy_target else 0.8
    with autocast(config, batch.tokens.device):
        tokens, mask, _ = sample(model, batch.prompt, batch.prompt_mask, group_size=config.group_size,
                                 temperature=config.temperature * heat)
    with autocast(config, batch.tokens.device):  # a new one: the first keeps casts of the weights without gradients
        logprobs, _ = token_logprobs(model, batch.prompt, tokens, mask=mask, prompt_mask=batch.prompt_mask,
                                     temperature=config.temperature)
    loss = -algorithm.entropy_weight * logprobs.sum() / parallel.all_reduce_sum(mask.sum())
    loss.backward()
    return parallel.all_reduce_sum(loss.detach())


# %% How often does the verifier err?


def calibrate(config, collect, algorithm) -> None:
    """--calibrate N: how often the verifier (--reward, with --reward-noise) errs on answers whose truth is known."""
    task, generator = load_task(config), torch.Generator(pick_device(config.device)).manual_seed(config.seed)
    model, tokenizer = load_model(config.model, device=generator.device, cache_dir=config.cache_dir, task=config.task)
    set_chat_options(tokenizer, config)
    task, truths, verdicts = drop_long_prompts(task, model, tokenizer, config), [], []
    exact = reward_function(None, config.task)
    for number in range(1, 1 + math.ceil(config.calibrate / (config.prompts_per_step * config.group_size))):
        examples = batch_examples(task.train, number, count=config.prompts_per_step, seed=config.seed)
        batch = collect(model, tokenizer, examples, config, version=0, generator=generator, algorithm=algorithm)
        texts = decode(tokenizer, batch.tokens, batch.mask, batch.prompt)
        asked = [e for e in examples for _ in range(config.group_size)]
        truths += [exact(e.question, text, e.answer) > 0 for e, text in zip(asked, texts)]
        verdicts += [None if math.isnan(reward) else reward > 0 for reward in batch.rewards.flatten().tolist()]
    rates = []
    for truth, name in ((False, "ρ⁺: wrong answers passed"), (True, "ρ⁻: right answers failed")):
        errors = torch.tensor([float(verdict != truth) for verdict, t in zip(verdicts, truths)
                               if t == truth and verdict is not None])  # None: the verifier could not judge it
        require(len(errors) > 0,
                f"all {len(truths)} answers are {'wrong' if truth else 'right'}: nothing to count {name}")
        rates.append(errors.mean().item())
        low, high = interval_95(errors)
        print(f"{name}: {int(errors.sum())} of {len(errors)} = {rates[-1]:.3f} (95 % {low:.3f}–{high:.3f})")
    print(f"to correct for it: --algorithm noise-corrected-grpo --noise-rates {rates[0]:.3f},{rates[1]:.3f}")
