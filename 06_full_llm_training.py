"""Fine-tune a causal language model with any algorithm of the group-relative REINFORCE family, on fresh or stale data.

Claim (arXiv 2509.24203): group-relative REINFORCE never needed on-policy data. What breaks on stale data is an
*unregularised* step; clipping repairs it, with importance sampling or without. A transformer shows it in minutes.

For each prompt x a *sampler* π_old writes a group of K responses y, and the policy π_θ learns from their rewards. The
sampler is the policy itself, or an older copy of it: then the data are *stale*, and ρ = π_θ/π_old, the ratio of a
token's two probabilities, is not 1. Every algorithm here is one row of one equation, over responses i and tokens t:

    L(θ) = Σᵢ Σₜ Nᵢᵗ · ( − Mᵢᵗ · Wᵢᵗ · Aᵢ · log π_θ(yᵢᵗ | x, yᵢ^{<t})  +  Rᵢᵗ(θ) )

    symbol | name here       | shape  | meaning (B responses of up to T tokens)
    A      | advantages      | (B,)   | reward minus the group's baseline, perhaps shaped (RED)
    M      | clip_mask       | (B, T) | 0 where a token has moved too far from the sampler (REC); detached, like W
    W      | weight          | (B, T) | the importance weight ρ, or 1
    R      | tau, beta       | (B, T) | an additive penalty on the distance from the sampler (REP)
    N      | token_weights   | (B, T) | a named mean with an explicit denominator

Run:  python 06_full_llm_training.py --compare reinforce,grpo,rec-oneside-nois --sync-interval 20
      python 06_full_llm_training.py --model HuggingFaceTB/SmolLM2-135M-Instruct --task gsm8k --max-new-tokens 256
      python 06_full_llm_training.py --exercise 1                                     (three questions to answer)
The first takes two to four minutes on 2 cores and prints accuracy before → after for each row: with the sampler
refreshed every 20 steps, the unclipped `reinforce` falls back and the other two go on learning. (By default the sampler
is refreshed before every step. Then ρ = 1, no clip acts, and rows that differ in M and W alone are one algorithm.)
--out holds a run directory each, with metrics.jsonl, samples.jsonl, curves.png and the trained model.

How to read this file: downwards, in half an hour; lessons 02 (A), 03 (why any data will do), 04 (M, W, R, staleness)
and 05 (shaping A) come before it.
    1 configuration   the flags, a line each: skim it
    2 the family      Algorithm, ALGORITHMS: which choices make a row. A new row is one more line there
    3 the equation    group_advantages, clip_mask, policy_loss: the heart, worth a second reading
    4 shaping         RED: which responses count, and how much
    5 the model       generate and token_logprobs: sample a response; ask for the probability of a given one
    6 staleness       which policy sampled the batch of step n
    7 training        collect a batch, train_step, train
under_the_hood/ is the engine room; its README.md is the map. It makes this page fast and dependable (by default a run
uses fast.py's generate and token_logprobs, tested equal to the plain ones here) and holds what single rows need beside
the equation (friends.py). It never imports this page: where it needs a function of it, that is handed over.
"""

import dataclasses
import functools
import math
import pathlib
import sys
import time
from collections import Counter
from dataclasses import dataclass

import under_the_hood  # noqa: F401 (before torch: it says how torch's waiting threads wait)

import torch

from under_the_hood import (comparison, evaluation, export, fast, friends, options, paged, parallel, pictures, plan,
                            report)
from under_the_hood.answers import extract_answer, is_correct  # noqa: F401 (others import the two from here)
from under_the_hood.batching import micro_batches
from under_the_hood.engines import choose_engine, compute_gap
from under_the_hood.errors import UserError, one_line, require, said_in_one_line
from under_the_hood.exercises import EXERCISES
from under_the_hood.friends import adaptive_temperature
from under_the_hood.lora import add_adapters
from under_the_hood.models import (autocast, autocast_dtype, copy_for_sampling, decode, drop_long_prompts,
                                   encode_prompts, in_eval_mode, load_model, model_inputs, next_cache,
                                   recompute_activations, set_chat_options, stop_ids)
from under_the_hood.options import FriendOptions, OutputOptions, option
from under_the_hood.runs import METRICS, Run
from under_the_hood.tasks import load_task, reward_function
from utils import exercise, pick_device, seed_everything

# %% 1. -------------------------------------------------------------------------------------------------- configuration

# option(default, help, what --help shows for the default). More flags, on output and single rows: options.py.


@dataclass(kw_only=True)
class ModelOptions:
    _argument_group_name = "model and data"
    model: str = option("tiny", "tiny or small (built in; small wants a GPU), a hub name, a directory, or a .gguf file")
    task: str = option("addition", "addition, addition-1, addition-3 (digits), addition-steps (4 digits, with worked "
                       "steps), gsm8k (hub, or the folder in GSM8K_DIR), or a .jsonl file of {question, answer}")
    reward: str | None = option(None, "module:function of your own, called with (question, response, answer), returns "
                                "a number", "1 for the right answer, else 0")
    on_unscored: str = option("stop", "a reward of None or NaN: stop, or leave-out (that response teaches nothing)")
    system_prompt: str | None = option(None, "system message in front of every question, for chat models", "none")
    chat_template_kwargs: str = option("{}", "JSON of switches for the chat template: '{\"enable_thinking\": false}'")
    eval_questions: int = option(256, "held-out questions in an evaluation")
    max_prompt_tokens: int = option(512, "longest prompt, in tokens; longer questions are left out")


@dataclass(kw_only=True)
class AlgorithmOptions:
    _argument_group_name = "algorithm"
    algorithm: str = option("rec-oneside-nois", "a row of ALGORITHMS")
    eps_low: float | None = option(None, "clip where the ratio falls below 1 − this", "the row's")
    eps_high: float | None = option(None, "clip where the ratio rises above 1 + this", "the row's")
    outer_low: float | None = option(None, "ring clipping: keep again where the ratio is below 1 − this", "the row's")
    outer_high: float | None = option(None, "ring clipping: keep again where the ratio is above 1 + this", "the row's")
    tau: float | None = option(None, "strength of the penalty (τ/2)·d² per token, d = log ρ (OPMD)", "the row's")
    beta: float | None = option(None, "strength of the forward-KL penalty, in nats per token (AsymRE)", "the row's")
    weight_temperature: float | None = option(None, "T of RED-Weight's exp(A/T), in units of reward", "the row's")
    weight_cap: float | None = option(None, "largest importance weight (CISPO, TIS, TOPR, TIC-GRPO)", "the row's")
    entropy_target: float | None = option(None, "entropy that AEPO steers to, in nats per token", "the row's")


@dataclass(kw_only=True)
class StalenessOptions:
    _argument_group_name = "off-policyness"
    sync_interval: int = option(1, "I: training steps between two refreshes of the sampler's weights")
    sync_offset: int = option(0, "m: batches by which the sampler works ahead of the trainer")
    offline: bool = option(False, "never refresh the sampler: every batch comes from the starting model")


@dataclass(kw_only=True)
class TrainingOptions:
    _argument_group_name = "training"
    steps: int = option(120, "optimizer steps")
    prompts_per_step: int = option(32, "prompts in one batch")
    group_size: int = option(8, "K: responses to each prompt, at least 2")
    learning_rate: float = option(1e-4, "AdamW's constant learning rate, per step")
    max_grad_norm: float = option(1.0, "clip the gradient's global L2 norm to this")
    temperature: float = option(1.0, "divides the logits, when sampling and in the loss alike")
    max_new_tokens: int = option(8, "longest response, in tokens")
    lora_rank: int = option(0, "train only adapters of this rank, through peft: less memory", "0, all weights train")
    micro_batch_tokens: int = option(16384, "prompt + response tokens in one forward and backward pass")
    seed: int = option(0, "seed of data order, sampling and random dropping")
    device: str = option("auto", "auto, cpu, cuda or mps")
    dtype: str = option("auto", "compute type: float32, bfloat16 (weights stay float32), auto = bfloat16 on cuda")
    engine: str = option("auto", "whose generate and token_logprobs: plain (this file's), uncached (plain without a "
                         "cache), fast (the same, faster), paged (continuous batching), auto = the fastest right one")
    gradient_checkpointing: bool = option(False, "keep one activation a layer, recompute the rest: less memory")
    shard: bool = option(False, "with torchrun: split weights, gradients and optimizer state over processes (FSDP2)")


GROUPS = (ModelOptions, AlgorithmOptions, FriendOptions, StalenessOptions, TrainingOptions, OutputOptions)


@dataclass(kw_only=True)
class Config(*GROUPS):
    """All flags of one run; the groups above only order --help."""


# %% 2. ----------------------------------------------------------------------------------------------------- the family


@dataclass(frozen=True)
class Algorithm:
    """One row of the family: what it chooses for A, M, W, R and N. What is left alone is REINFORCE with a baseline."""
    baseline: str = "group"             # A: group | leave-one-out | batch | virtual (one more response, a right one, in
                                        #    the group) | hinted (ICPO's pool)
    std_normalize: bool = False         # A: divide by the group's standard deviation (ddof 0, + 1e-6)
    per_token_reward: bool = False      # A: made from r/|y| in place of r
    correct_noise: bool = False         # A: made from rewards that undo the verifier's error rates
    process_weight: float | None = None  # A: EP-GRPO's token advantages, with this much of the process signal
    shaping: str = "none"               # A: none | drop (RED-Drop) | weight (RED-Weight) | adaptive-weight
    weight_temperature: float = 1.0     # A: T of exp(A/T)
    clip: str = "none"                  # M: none | one_side | two_side | ring
    eps_low: float = 0.2                # M
    eps_high: float = 0.2               # M
    outer_low: float = 0.6              # M: ring only
    outer_high: float = 2.0             # M: ring only
    level: str = "token"                # M, W: ρ of a token | sequence (geometric mean) | trajectory (product)
    weight: str = "one"                 # W: one | ratio | ratio-if-worse (where A < 0) | capped-mean (GMPO)
    weight_cap: float = math.inf        # W: min(ρ, cap) in place of ρ
    hint_smoothing: float = 0.1         # W: λ of π/(π + λ) on responses sampled with worked examples
    tau: float = 0.0                    # R: (τ/2)·d², d = log π_θ − log π_old, per token (OPMD)
    beta: float = 0.0                   # R: β·(log π_old − log π_θ), per token (AsymRE's forward KL)
    entropy_target: float | None = None  # R: steer the entropy, in nats per token, by a second batch (AEPO)
    entropy_weight: float = 3.0         # R: how strongly
    aggregation: str = "token-mean"     # N: token-mean | seq-mean-token-mean | seq-mean-token-sum | constant
    refill: bool = False                # data: replace groups whose rewards are all equal (DAPO)
    worked_examples: int = 0            # data: how many the last response of each group sees in its prompt (ICPO)
    overlong_share: float = 0.0         # rewards: the last share of the token budget costs up to 1 (DAPO)
    graded: bool = False                # rewards: an all-wrong group is graded by its right leading steps (SGPO)
    source: str = ""

    def __post_init__(self):
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} must be one of {', '.join(choices)}, not {getattr(self, field)!r}")
        if self.shaping != "none" and (self.baseline != "group" or (self.shaping == "drop" and self.std_normalize)):
            raise ValueError(f"shaping {self.shaping!r} has the group's mean as its baseline; leave the others alone")


CHOICES = {"baseline": ("group", "leave-one-out", "batch", "virtual", "hinted"),
           "shaping": ("none", "drop", "weight", "adaptive-weight"), "clip": ("none", "one_side", "two_side", "ring"),
           "level": ("token", "sequence", "trajectory"), "weight": ("one", "ratio", "ratio-if-worse", "capped-mean"),
           "aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")}

PAPER = "arXiv 2509.24203"
REC = {  # REINFORCE, and clipping it. IS: W = ρ; NoIS: W = 1
    "reinforce": Algorithm(source="Williams 1992, with the group mean as baseline"),
    "reinforce-is": Algorithm(weight="ratio", source="unclipped token-level importance sampling"),
    "grpo": Algorithm(std_normalize=True, clip="one_side", weight="ratio",
                      source="arXiv 2402.03300, no KL term, token mean"),
    "rec-oneside-is": Algorithm(clip="one_side", weight="ratio", source=PAPER),
    "rec-oneside-nois": Algorithm(clip="one_side", source=PAPER),
    "rec-twoside-is": Algorithm(clip="two_side", weight="ratio", source=PAPER),
    "rec-twoside-nois": Algorithm(clip="two_side", source=PAPER),
    "rec-ring-is": Algorithm(clip="ring", weight="ratio", source=PAPER),
    "rec-ring-nois": Algorithm(clip="ring", source=PAPER),
    "rec-gspo-is": Algorithm(clip="one_side", eps_low=3e-4, eps_high=4e-4, level="sequence", weight="ratio",
                             aggregation="seq-mean-token-mean", source=PAPER),
    "rec-gspo-nois": Algorithm(clip="one_side", eps_low=3e-4, eps_high=4e-4, level="sequence",
                               aggregation="seq-mean-token-mean", source=PAPER),
}
REP = {  # REINFORCE plus a penalty on the distance from the sampler
    "rep-opmd": Algorithm(tau=0.2, source="Kimi k1.5, arXiv 2501.12599"),
    "rep-asymre": Algorithm(beta=0.1, source="arXiv 2506.20520"),
}
RED = {  # REINFORCE on data that were shaped
    "red-drop": Algorithm(shaping="drop", source=PAPER),
    "red-weight": Algorithm(shaping="weight", source=PAPER),
    "red-weight-oneside": Algorithm(shaping="weight", clip="one_side", source=PAPER),
    "red-weight-adaptive": Algorithm(shaping="adaptive-weight", source="arXiv 2606.20002"),
}
FRIENDS = {  # these differ in A, M, W or N alone. Our reading where a paper leaves it open: the caps of 1.2 (CISPO,
    # TIC-GRPO), A < 0 for a wrong answer (TOPR), ddof 0 over the batch (REINFORCE++)
    "rloo": Algorithm(baseline="leave-one-out", source="arXiv 2402.14740"),
    "dr-grpo": Algorithm(clip="one_side", weight="ratio", aggregation="constant", source="arXiv 2503.20783"),
    "gspo": Algorithm(std_normalize=True, clip="one_side", eps_low=3e-4, eps_high=4e-4, level="sequence",
                      weight="ratio", aggregation="seq-mean-token-mean", source="arXiv 2507.18071"),
    "cispo": Algorithm(std_normalize=True, weight="ratio", weight_cap=1.2, source="arXiv 2506.13585"),
    "gmpo": Algorithm(std_normalize=True, clip="one_side", eps_low=1 - math.exp(-0.4), eps_high=math.exp(0.4) - 1,
                      weight="capped-mean", aggregation="seq-mean-token-mean", source="arXiv 2507.20673"),
    "tis": Algorithm(weight="ratio", weight_cap=2.0, source="truncated importance sampling, Ionides 2008"),
    "topr": Algorithm(level="trajectory", weight="ratio-if-worse", weight_cap=1.0, aggregation="seq-mean-token-sum",
                      source="arXiv 2503.14286"),
    "reinforce-plus-plus": Algorithm(baseline="batch", std_normalize=True, clip="one_side", weight="ratio",
                                     source="arXiv 2501.03262"),
    "ngrpo": Algorithm(baseline="virtual", clip="one_side", eps_low=0.16, eps_high=0.24, weight="ratio",
                       source="arXiv 2509.18851"),
    "tic-grpo": Algorithm(std_normalize=True, per_token_reward=True, level="trajectory", weight="ratio", weight_cap=1.2,
                          aggregation="seq-mean-token-sum", source="arXiv 2508.02833"),
}
NEIGHBOURS = {  # these also change the data, the rewards or the batch: under_the_hood/friends.py
    "dapo": Algorithm(std_normalize=True, clip="one_side", eps_high=0.28, weight="ratio", refill=True,
                      overlong_share=0.2, source="arXiv 2503.14476"),
    "noise-corrected-grpo": Algorithm(correct_noise=True, clip="one_side", weight="ratio", source="arXiv 2510.18924"),
    "sgpo": Algorithm(std_normalize=True, clip="one_side", weight="ratio", graded=True, source="arXiv 2505.11595"),
    "aepo": Algorithm(std_normalize=True, clip="one_side", weight="ratio", entropy_target=0.7,
                      source="arXiv 2510.08141"),
    "icpo": Algorithm(baseline="hinted", clip="one_side", weight="ratio", worked_examples=1, source="arXiv 2510.26519"),
    "ep-grpo": Algorithm(std_normalize=True, clip="one_side", weight="ratio", process_weight=0.1,
                         aggregation="seq-mean-token-mean", source="our reading of arXiv 2605.04960"),
}
FAMILIES = {"REC": REC, "REP": REP, "RED": RED, "friends": FRIENDS, "neighbours": NEIGHBOURS}
ALGORITHMS = {name: algorithm for rows in FAMILIES.values() for name, algorithm in rows.items()}


def find_algorithm(algorithm, **overrides) -> Algorithm:
    """The row itself, or the row of that name, with every override that is not None put in."""
    if isinstance(algorithm, str):
        if algorithm not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {algorithm!r}; choose from: {', '.join(ALGORITHMS)}")
        algorithm = ALGORITHMS[algorithm]
    return dataclasses.replace(algorithm, **{k: v for k, v in overrides.items() if v is not None})


def chosen_algorithm(config: Config) -> Algorithm:
    """The row of --algorithm, with the flags that override it."""
    overrides = {f.name: getattr(config, f.name) for f in dataclasses.fields(AlgorithmOptions) if f.name != "algorithm"}
    return find_algorithm(config.algorithm, **overrides)


# %% 3. --------------------------------------------------------------------------------------------------- the equation

# A, the advantage. This function and clip_mask are copies from lessons 02 and 04, which explain them; a test holds them
# equal. The others of sections 3 and 4 that say so come from lessons 04 and 05.


def group_advantages(rewards, *, leave_one_out=False, std_normalize=False, eps=1e-6):
    """A_i = r_i − r̄ of each response against its own group, (..., K) → (..., K); lesson 02."""
    if rewards.shape[-1:] < (2,) or not rewards.isfinite().all():
        raise ValueError("need finite rewards (..., K), K ≥ 2 responses to one prompt; got shape "
                         f"{tuple(rewards.shape)}")
    rewards, group_size = 1.0 * rewards, rewards.shape[-1]
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if std_normalize:
        advantages = advantages / (rewards.std(-1, correction=0, keepdim=True) + eps)
    if leave_one_out:
        advantages = advantages * (group_size / (group_size - 1))
    # In float32 the mean of seven times 0.1 is not 0.1, and a tiny std blows that error up: so ask the rewards.
    flat = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(flat, 0.0, advantages)


# M, the mask; W, the weight; N, the mean.


def clip_mask(ratio, advantages, *, clip, eps_low=0.2, eps_high=0.2, outer_low=0.6, outer_high=2.0):
    """M: True where a token takes part in the update, False where it has moved too far; lesson 04.

    one_side: it already went where its advantage pushes it. two_side: it went too far either way. ring: as two_side,
    but far out where its advantage pushes it back (A > 0 and ρ ≤ 1 − outer_low, A < 0 and ρ ≥ 1 + outer_high) it is
    kept again.
    """
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


def policy_ratio(log_ratio, mask, *, level: str):
    """ρ of each token, detached, (B, T): its own, or one for all tokens of the response. log_ratio is 0 on padding."""
    log_ratio = log_ratio.detach()
    if level != "token":
        log_ratio = log_ratio.sum(1, keepdim=True).expand(mask.shape)
    if level == "sequence":
        log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-20, 20).exp()  # finite in float32, whatever comes


def importance_weight(ratio, log_ratio, advantages, mask, *, algorithm: Algorithm):
    """W of the row, detached, (B, T), or 1."""
    if algorithm.weight == "one":
        return 1.0
    if algorithm.weight == "capped-mean":  # a geometric mean; each ratio is bounded where one_side stops it
        above, below = math.log1p(algorithm.eps_high), math.log(max(1 - algorithm.eps_low, 1e-9))
        bounded = torch.where(advantages > 0, log_ratio.clamp(max=above), log_ratio.clamp(min=below))
        return policy_ratio(bounded, mask, level="sequence")
    capped = ratio.clamp(max=algorithm.weight_cap)
    return torch.where(advantages < 0, capped, 1.0) if algorithm.weight == "ratio-if-worse" else capped


def token_weights(mask, *, aggregation: str, tokens: int | None = None, sequences: int | None = None, constant=None):
    """N: the weight of each token in the named mean, (B, T). For a part of a batch, pass the totals of the whole.

    constant: the token budget of a response that aggregation "constant" (Dr. GRPO) divides by, not its length.
    """
    if aggregation == "constant" and not constant:
        raise ValueError("aggregation 'constant' needs constant, a token budget such as the longest allowed response")
    tokens, sequences = tokens or mask.sum().clamp(min=1), sequences or mask.shape[0]
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    denominator = {"token-mean": tokens, "seq-mean-token-mean": sequences * lengths, "seq-mean-token-sum": sequences,
                   "constant": sequences * (constant or 1)}[aggregation]
    return mask * (1.0 / denominator)


# And all of it together.


def clean_tokens(logprobs, old_logprobs, advantages, mask):
    """Put 0 on padding BEFORE any arithmetic: NaN · 0 is NaN, in gradients too; lesson 04."""
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


def policy_loss(logprobs, old_logprobs, advantages, mask, *, algorithm, eps_low=None, eps_high=None, outer_low=None,
                outer_high=None, tau=None, beta=None, weights=None, constant=None, hinted=None):
    """The one equation. Returns (loss, metrics): a scalar to minimise, and token means as 0-d tensors.

    With clip "one_side" and W = ρ its gradient is that of PPO's min(ρA, clip(ρ)A), written with log π and a detached ρ.

    logprobs, old_logprobs, mask: (B, T); advantages: (B,) or (B, T); algorithm: a row or its name, which eps_low …
    beta override. weights: (B, T) from token_weights, when it is a part of a larger batch; by default it is the whole.
    constant: see token_weights. hinted: (B,) responses sampled under another prompt, see friends.weigh_hints.
    Positions where mask is False may hold anything, NaN too: they are cut out before any arithmetic.
    """
    row = find_algorithm(algorithm, eps_low=eps_low, eps_high=eps_high, outer_low=outer_low, outer_high=outer_high,
                         tau=tau, beta=beta)
    logprobs, old_logprobs, advantages, mask = clean_tokens(logprobs, old_logprobs, advantages, mask)
    advantages, log_ratio = advantages.expand(mask.shape), logprobs - old_logprobs
    ratio = policy_ratio(log_ratio, mask, level=row.level)
    keep = clip_mask(ratio, advantages, clip=row.clip, eps_low=row.eps_low, eps_high=row.eps_high,
                     outer_low=row.outer_low, outer_high=row.outer_high)
    weight = importance_weight(ratio, log_ratio, advantages, mask, algorithm=row)
    if hinted is not None:
        keep, weight = friends.weigh_hints(keep, weight, logprobs, hinted, algorithm=row)
    per_token = -torch.where(keep, weight * advantages, 0.0) * logprobs  # − M·W·A·log π
    per_token = per_token + row.tau / 2 * log_ratio**2 - row.beta * log_ratio  # + R
    if weights is None:
        weights = token_weights(mask.to(logprobs.dtype), aggregation=row.aggregation, constant=constant)
    loss = (weights * per_token).sum()  # Σ N

    with torch.no_grad():
        count, token_ratio = mask.sum().clamp(min=1), log_ratio.clamp(-20, 20).exp()
        metrics = {
            "clip_fraction": (mask & ~keep).sum() / count,
            "ratio_mean": torch.where(mask, token_ratio, 0.0).sum() / count,
            # k3 on the sampler's own tokens estimates KL(π_old ‖ π_θ): never negative, and far less noisy than −log ρ
            "kl_old": torch.where(mask, token_ratio - 1 - log_ratio, 0.0).sum() / count,
        }
    return loss, metrics


# %% 4. ------------------------------------------------------------------------------------------------------ shaping


def red_drop(rewards, *, generator=None):
    """RED-Drop: (advantages, keep) with random surplus negatives dropped, (..., K); lesson 05."""
    if rewards.shape[-1:] < (2,) or not rewards.isfinite().all():
        raise ValueError("need finite rewards (..., K), K ≥ 2 responses to one prompt; got shape "
                         f"{tuple(rewards.shape)}")
    # r_i − r̄ as the mean of r_i − r_j over j: equal rewards differ by exactly 0 in any precision, while the float32
    # mean of seven times 0.1 is larger than 0.1. A reward AT the mean is positive, so rounding must not decide that.
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


def red_weight(advantages, *, temperature=1.0):
    """RED-Weight: exp(A/T), (..., K) → (..., K); lesson 05."""
    weights = (advantages / temperature).exp()
    if not (0 < temperature < math.inf and weights.isfinite().all()):
        raise ValueError("need finite advantages and 0 < T < ∞, large enough that exp(A/T) is finite; "
                         f"got T = {temperature}")
    return weights


def shaped_advantages(rewards, lengths, *, algorithm: Algorithm, generator=None, noise_rates=(0.0, 0.0), number=1):
    """A of the row: (P, K) rewards and response lengths → (P, K) advantages, with RED's dropping or weighting put in.

    noise_rates: (ρ⁺, ρ⁻) that correct_noise undoes; number: which batch of the run this is, for ICPO's decaying bonus.
    """
    if rewards.isnan().any():  # responses that the verifier could not judge
        return friends.advantages_of_scored(shaped_advantages, rewards, lengths, algorithm=algorithm,
                                            generator=generator, noise_rates=noise_rates, number=number)
    rewards = friends.prepare_rewards(rewards, lengths, algorithm=algorithm, noise_rates=noise_rates)
    if algorithm.baseline in friends.BASELINES:  # a baseline of the row's own
        return friends.BASELINES[algorithm.baseline](rewards, number)
    if algorithm.shaping == "drop":
        return red_drop(rewards, generator=generator)[0]
    if algorithm.baseline == "batch":  # one group, the whole batch
        return group_advantages(rewards.reshape(-1), std_normalize=algorithm.std_normalize).view(rewards.shape)
    advantages = group_advantages(rewards, leave_one_out=algorithm.baseline == "leave-one-out",
                                  std_normalize=algorithm.std_normalize)
    if algorithm.shaping == "weight":
        advantages = advantages * red_weight(advantages, temperature=algorithm.weight_temperature)
    if algorithm.shaping == "adaptive-weight":
        for group, length in zip(advantages, lengths):
            if temperature := adaptive_temperature(group, length):
                group *= red_weight(group, temperature=temperature)
    return advantages


# %% 5. ---------------------------------------------------------------------------------------------------- the model


def completion_mask(tokens, *, eos_ids):
    """True up to and including the first EOS of each row, (B, T) → bool (B, T).

    The EOS is a decision of the policy and trained on; what follows is padding, also where pad and EOS share an id.
    """
    is_eos = torch.isin(tokens, torch.as_tensor(sorted(eos_ids), dtype=tokens.dtype, device=tokens.device))
    return is_eos.long().cumsum(1) - is_eos.long() == 0


@torch.no_grad()
@in_eval_mode  # dropout would make the trainer's log-probabilities differ from the sampler's
def generate(model, prompt, prompt_mask, *, group_size: int, max_new_tokens: int, temperature: float, eos_ids,
             pad_id: int, generator, use_cache=True):
    """Sample `group_size` responses to each prompt from exactly softmax(logits / temperature); temperature 0 is greedy.

    prompt, prompt_mask: (P, L), left-padded. Returns tokens, mask, logprobs (float32), each (B, T), B = P·group_size,
    the rows of a prompt side by side; the mask includes the EOS. No top-k, no top-p, no penalties: the distribution
    that samples is the one the loss differentiates, so `logprobs` are log π_old itself.
    """
    new, seen, cache = prompt.repeat_interleave(group_size, 0), prompt_mask.repeat_interleave(group_size, 0), None
    running, steps = torch.ones(len(new), 1, dtype=torch.bool, device=new.device), []
    while len(steps) < max_new_tokens and running.any():  # new: tokens that the model has yet to read; seen: attention
        output = model(**model_inputs(model, new, seen, cache, use_cache=use_cache))
        scores = torch.log_softmax(output.logits[:, -1].float() / (temperature or 1.0), -1)
        if scores.isnan().any():
            raise FloatingPointError("the model's logits are not finite")
        token = scores.argmax(-1, keepdim=True)
        if temperature > 0:
            token = torch.multinomial(scores.exp(), 1, generator=generator)
        steps.append((token.where(running, pad_id), running, scores.gather(1, token).where(running, 0.0)))
        running = running & ~torch.isin(token, torch.tensor(sorted(eos_ids), device=token.device))
        seen, cache = torch.cat([seen, torch.ones_like(running)], 1), next_cache(output)
        new = torch.cat([new, token], 1) if cache is None else token  # without a cache: read all of it again
    return tuple(torch.cat(part, 1) for part in zip(*steps))


@in_eval_mode
def token_logprobs(model, prompt, completion, *, prompt_mask=None, mask=None, temperature: float = 1.0):
    """log π_θ of each completion token, and the policy's entropy there: two (B, T) float32 tensors, 0 where mask is 0.

    prompt (P, L) left-padded, completion (B, T) right-padded, B a multiple of P: rows p·B/P … belong to prompt p. One
    forward pass over both; the logits at position i predict token i + 1. The entropy carries no gradient.
    """
    group_size = len(completion) // len(prompt)
    prompt_mask = torch.ones_like(prompt, dtype=torch.bool) if prompt_mask is None else prompt_mask
    mask = torch.ones_like(completion, dtype=torch.bool) if mask is None else mask
    sequence = torch.cat([prompt.repeat_interleave(group_size, 0), completion], 1)
    seen = torch.cat([prompt_mask.repeat_interleave(group_size, 0), mask], 1)
    logits = model(**model_inputs(model, sequence, seen, use_cache=False)).logits[:, prompt.shape[1] - 1: -1]
    scores = torch.log_softmax(logits.float() / temperature, -1)
    chosen, entropy = scores.gather(-1, completion[..., None])[..., 0], -(scores.exp() * scores).sum(-1).detach()
    return chosen.where(mask, 0.0), entropy.where(mask, 0.0)


ENGINES = {"plain": (generate, token_logprobs), "fast": (fast.generate, fast.token_logprobs),
           "paged": (paged.generate, fast.token_logprobs), "auto": (fast.generate, fast.token_logprobs),
           "uncached": (functools.partial(generate, use_cache=False), token_logprobs)}


def logprobs_fn(model, config):
    """token_logprobs of this run's engine and model; a sharded model has its own."""
    return model.token_logprobs if parallel.is_sharded(model) else functools.partial(ENGINES[config.engine][1], model)


# %% 6. ---------------------------------------------------------------------------------------------------- staleness


def rollout_version(step, *, sync_interval, sync_offset):
    """v(n) = I·max(0, ⌊(n−m−1)/I⌋): updates that the sampler's weights had seen for the batch of step n, from 1.

    I = sync_interval: the sampler is refreshed after every I steps (None: never, --offline); m = sync_offset: it works
    m batches ahead. `train` does not ask this formula: its queue makes it so, and a test holds the two equal.
    """
    if sync_interval is None:
        return 0
    return sync_interval * max(0, (step - sync_offset - 1) // sync_interval)


def staleness(step, *, sync_interval, sync_offset):
    """s(n) = (n−1) − v(n): how many updates step n, from 1, is ahead of its data's sampler."""
    return step - 1 - rollout_version(step, sync_interval=sync_interval, sync_offset=sync_offset)


# %% 7. ----------------------------------------------------------------------------------------------------- training


@dataclass
class Rollout:
    """One batch: P prompts with K responses each; B = P·K rows, in prompt order."""
    prompt: torch.Tensor        # (P, L) left-padded ids
    prompt_mask: torch.Tensor   # (P, L)
    tokens: torch.Tensor        # (B, T) the sampled ids themselves, never a re-encoding of their text
    mask: torch.Tensor          # (B, T) response tokens, EOS included
    old_logprobs: torch.Tensor  # (B, T) the sampler's own, recorded while sampling
    rewards: torch.Tensor       # (P, K)
    truncated: torch.Tensor     # (B,) no EOS within max_new_tokens
    version: int                # updates the sampler's weights had seen
    samples: list               # a few (question, response, answer, reward) for the log
    hinted: torch.Tensor | None = None  # (B,) sampled with worked examples in the prompt (ICPO)
    number: int = 1             # which batch of the run this is, from 1


def collect(model, tokenizer, examples, config: Config, *, version, generator, algorithm=None, number=1, worked=()):
    """Sample a group of responses to each example and reward them: a Rollout. UserError when the reward fails.

    algorithm: in training, the row, which may act on rewards; None in an evaluation. worked: see friends.hinted_group.
    """
    device, hinted = model.device, None
    prompt, prompt_mask = encode_prompts(tokenizer, examples, device=device)
    settings = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens,
                "group_size": config.group_size, "generator": generator, "eos_ids": stop_ids(model, tokenizer),
                "pad_id": tokenizer.pad_token_id}
    with autocast(config, device):  # as in training, or every ratio would carry the difference of the two precisions
        if worked:
            tokens, mask, logprobs, hinted = friends.hinted_group(
                ENGINES[config.engine], model, tokenizer, examples, worked, prompt, prompt_mask, **settings)
        else:
            tokens, mask, logprobs = ENGINES[config.engine][0](model, prompt, prompt_mask, **settings)
    texts, asked = decode(tokenizer, tokens, mask, prompt), [e for e in examples for _ in range(config.group_size)]
    try:
        reward = reward_function(config.reward, config.task, config.on_unscored)
        rewards = [float(reward(e.question, text, e.answer)) for e, text in zip(asked, texts)]
        rewards = torch.tensor(rewards, device=device).view(len(examples), -1)
        if algorithm:
            rewards = friends.training_rewards(rewards, asked, texts, mask.sum(1), config, algorithm=algorithm,
                                               generator=generator)
    except (ValueError, ImportError) as error:
        raise UserError(one_line(error)) from error
    require(not rewards.isinf().any(), "rewards must be numbers that float32 can hold")
    ended = (torch.isin(tokens, torch.tensor(sorted(settings["eos_ids"]), device=device)) & mask).any(1)
    samples = [{"question": e.question, "response": texts[i * config.group_size], "answer": e.answer,
                "reward": rewards[i, 0].item()} for i, e in enumerate(examples[:4])]
    mask = mask & ~rewards.isnan().view(-1, 1)  # an unscored response teaches nothing and counts for nothing
    return Rollout(prompt, prompt_mask, tokens, mask, logprobs, rewards, ~ended, version, samples, hinted, number)


def train_step(model, optimizer, batch: Rollout, config: Config, *, algorithm, generator, sample=None, passes=None):
    """One optimizer step on one batch, in micro-batches whose gradients add up to the whole batch's. Returns metrics.

    Advantages and denominators belong to the whole batch, wherever its parts were sampled: a mean of the processes' own
    means would weigh the tokens of short responses more. sample: for a second batch, see friends.extra_gradient.
    passes: a list to fill with what each pass knows of its tokens, for report.token_lines.
    """
    lengths, token_logprobs = batch.mask.sum(1).view_as(batch.rewards), logprobs_fn(model, config)
    all_rewards, all_lengths = parallel.gather(batch.rewards), parallel.gather(lengths)  # of all processes, (P, K)
    require(not all_rewards.isnan().all(), "the verifier could judge no response of the batch")
    try:
        advantages = shaped_advantages(all_rewards, all_lengths, algorithm=algorithm, generator=generator,
                                       noise_rates=friends.noise_rates(config), number=batch.number)
    except ValueError as error:
        raise UserError(f"{config.algorithm} cannot use these rewards: {one_line(error)}") from error
    advantages, total = parallel.own_part(advantages), all_lengths.sum()
    weights = token_weights(batch.mask, aggregation=algorithm.aggregation, tokens=total,
                            sequences=int((all_lengths > 0).sum()), constant=config.max_new_tokens)
    sums, all_logprobs = Counter(), torch.zeros_like(batch.old_logprobs)
    optimizer.zero_grad()
    # A pass over some prompts. with_gradient is False where no advantage is left; counts is 0 for a pass that only
    # keeps step with other processes.
    for (prompts, rows, width, with_gradient), counts in micro_batches(model, batch, advantages, config, algorithm):
        mask, old_logprobs = batch.mask[rows, :width], batch.old_logprobs[rows, :width]
        with torch.set_grad_enabled(with_gradient), autocast(config, mask.device):
            logprobs, entropy = token_logprobs(batch.prompt[prompts], batch.tokens[rows, :width], mask=mask,
                                               prompt_mask=batch.prompt_mask[prompts], temperature=config.temperature)
        part_advantages = advantages[prompts].flatten()  # (P, K) → (B,)
        if algorithm.process_weight is not None:
            part_advantages = friends.token_advantages(advantages[prompts], batch.rewards[prompts],
                                                       logprobs - old_logprobs, entropy, mask, algorithm=algorithm)
        loss, metrics = policy_loss(logprobs, old_logprobs, part_advantages, mask, algorithm=algorithm,
                                    weights=weights[rows, :width] * counts,
                                    hinted=None if batch.hinted is None else batch.hinted[rows])
        if passes is not None and counts:
            passes.append((rows, logprobs.detach(), entropy, part_advantages, weights[rows, :width]))
        if with_gradient:
            parallel.scale(loss, model).backward()
        share = counts * mask.sum() / total  # token means of the parts add up to those of the batch
        sums.update({"loss": loss.detach(), "entropy": counts * entropy.sum() / total,
                     **{name: share * value for name, value in metrics.items()}})
        all_logprobs[rows, :width] = logprobs.detach()
    metrics = dict(zip(sums, parallel.all_reduce_sum(torch.stack(list(sums.values())))))
    metrics["loss"] += friends.extra_gradient(model, batch, config, algorithm=algorithm, entropy=metrics["entropy"],
                                              sample=sample, token_logprobs=ENGINES[config.engine][1])
    metrics["grad_norm"] = parallel.clip_gradients(model, config.max_grad_norm)
    if not torch.isfinite(metrics["loss"] + metrics["grad_norm"]):
        raise FloatingPointError(f"the loss ({metrics['loss']:.3g}) or its gradient norm ({metrics['grad_norm']:.3g}) "
                                 "is not finite")
    optimizer.step()
    return evaluation.batch_metrics(metrics, batch, all_rewards, all_lengths, all_logprobs)


def train(config: Config) -> dict:
    """One run, from the base model or its last checkpoint to a complete run directory: before, after and seconds."""
    started, algorithm = time.perf_counter(), chosen_algorithm(config)
    device = parallel.start(pick_device(config.device))
    run = Run(config)  # the run directory, its lock, its checkpoints
    seed_everything(parallel.own_seed(config.seed))  # for a reward of the user's; what is drawn here has own generators
    with parallel.main_process_first():
        task = load_task(config)
        model, tokenizer = load_model(config.model if config.lora_rank or run.is_new else run.folder, device=device,
                                      cache_dir=config.cache_dir, task=config.task)
    set_chat_options(tokenizer, config)
    task = drop_long_prompts(task, model, tokenizer, config)
    if config.lora_rank:
        add_adapters(model, rank=config.lora_rank, folder=run.folder)
    if config.gradient_checkpointing:
        recompute_activations(model)
    config = choose_engine(model, tokenizer, task, config, ENGINES)
    sampler = copy_for_sampling(model, config)
    if config.shard:
        parallel.shard(model, fast.token_logprobs, compute_dtype=autocast_dtype(config, device))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0, fused=device.type != "mps")
    sampling = torch.Generator(device).manual_seed(parallel.own_seed(config.seed))
    dropping = torch.Generator().manual_seed(config.seed)  # decided for the whole batch, alike in all processes
    run.attach(model, tokenizer, sampler, optimizer, sampling, dropping)
    version, queue = run.begin(Rollout)  # the queue is the first-in first-out buffer between sampler and trainer
    sample = functools.partial(ENGINES[config.engine][0], max_new_tokens=config.max_new_tokens, generator=sampling,
                               eos_ids=stop_ids(model, tokenizer), pad_id=tokenizer.pad_token_id)

    def sample_batch(number):
        draw = functools.partial(collect, sampler, tokenizer, config=config, version=version, generator=sampling,
                                 algorithm=algorithm, number=number)
        return friends.training_batch(draw, task, number, config, algorithm=algorithm)

    def measure(first=False):
        with parallel.policy_to_sample(model, sampler) as policy:
            return evaluation.evaluate(collect, policy, tokenizer, task, config, first=first)

    if run.is_new:
        with run.guard(0):
            gap = compute_gap(sampler, logprobs_fn(model, config), tokenizer, task, config, ENGINES[config.engine])
            run.record({"step": 0, **gap, **measure(first=True)})
            run.save(0, version, queue)  # a disk that cannot hold a checkpoint shows now, not after an hour
    for step in run.steps():
        with run.guard(step):
            began = time.perf_counter()
            if (step - 1) % config.sync_interval == 0 and not config.offline:  # refresh the sampler
                version = step - 1
                if sampler is not model:
                    parallel.copy_weights(model, sampler)  # its own numbers: one that shared them would never be stale
            while len(queue) <= config.sync_offset:  # sample batches into the queue
                queue.append(sample_batch(step + len(queue)))
            batch = queue.popleft()  # take the oldest
            metrics = {"step": step, "staleness": step - 1 - batch.version}
            measures, passes = step % config.eval_every == 0 or step == config.steps, []
            metrics |= train_step(model, optimizer, batch, config, algorithm=algorithm, generator=dropping,
                                  sample=sample, passes=passes if measures and config.log_tokens else None)
            responses = config.prompts_per_step * config.group_size
            metrics["tokens_per_second"] = responses * metrics["completion_length"] / (time.perf_counter() - began)
            if measures:
                metrics |= measure()
            run.record(metrics, batch.samples, report.token_lines(
                passes, batch, tokenizer, config, algorithm, clean_tokens, policy_ratio, clip_mask, importance_weight))
            run.save_when_due(step, version, queue)
        run.report(step, metrics)
    return run.finish(started)


def try_loss(config: Config) -> None:
    """The loss itself knows which bounds go together."""
    policy_loss(*torch.zeros(3, 1, 1), torch.ones(1, 1), algorithm=chosen_algorithm(config),
                constant=config.max_new_tokens)


def main(argv=None) -> None:
    with said_in_one_line():  # what the user can put right, and a run that ended early
        config = options.parse_arguments(Config, GROUPS, __doc__, METRICS, argv)
        options.validate(config, ALGORITHMS, try_loss)
        if config.exercise is not None:
            sys.exit(exercise(EXERCISES, config.exercise, config.answer))
        if config.dry_run:
            sys.exit(plan.dry_run(config, chosen_algorithm(config)))
        if config.report:
            return report.write_report(config.report, chosen_algorithm)
        if config.export:
            return export.export(config, chosen_algorithm(config))
        if config.map:
            weight = functools.partial(pictures.gradient_weight, policy_loss, red_weight, friends.token_advantages)
            return pictures.draw_map(config.map, FAMILIES, weight)
        if config.eval_only:
            return evaluation.evaluate_only(config, collect, ENGINES)
        if config.calibrate:
            return friends.calibrate(config, collect, Algorithm())
        if config.compare:
            return comparison.compare(config, train)
        setting = "offline" if config.offline else f"I{config.sync_interval}-m{config.sync_offset}"
        name = f"{config.algorithm}-{pathlib.Path(config.task).stem}-{setting}-seed{config.seed}"
        config.out = config.out or f"runs/{name}"
        comparison.print_result(train(config), config)


if __name__ == "__main__":
    main()
