"""What test_with_verl.py asks of verl's own functions: prints one JSON object, the answer."""

import os
import pathlib
import sys
import warnings

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "examples")]
os.environ["VERL_USE_EXTERNAL_MODULES"] = "with_verl"  # as a user would: verl imports the example
warnings.simplefilter("ignore")

import without_ray  # noqa: F401 (verl imports Ray, and this asks for functions only)
import verl

import inspect
import json
from types import SimpleNamespace

import numpy
import torch
import with_verl
import yaml
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig, PolicyLossConfig


def config(**batch):
    """An actor configuration of verl: dual clipping far away, ε of the rows, CISPO without a lower bound."""
    return ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e9,
                       global_batch_info=batch)


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_prob = torch.randn(8, 6, generator=generator) - 2
    mask = torch.arange(6) < torch.randint(1, 7, (8, 1), generator=generator)
    return {"old_log_prob": log_prob + torch.randn(8, 6, generator=generator) * 0.4, "log_prob": log_prob,
            "advantages": torch.randn(8, 1, generator=generator).expand(8, 6).contiguous(), "response_mask": mask}


def gradient(name, tensors, mode, **batch):
    """The gradient and the metrics of verl's loss of that name."""
    log_prob = tensors["log_prob"].clone().requires_grad_()
    options = {**tensors, "log_prob": log_prob, "loss_agg_mode": mode, "config": options_of(name, batch)}
    loss, metrics = core_algos.get_policy_loss_fn(name)(**options)
    loss.backward()
    return log_prob.grad, metrics


def options_of(name, batch):
    made = config(**batch)
    if name == "gspo":
        made = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=3e-4,
                           clip_ratio_high=4e-4, global_batch_info=batch)
    if name == "cispo":
        made = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=1.0,
                           clip_ratio_high=0.2, global_batch_info=batch)
    return made


def distance(one, other):
    return (one - other).abs().max().item()


answer = {"version": verl.__version__, "registered": sorted(name for name in core_algos.POLICY_LOSS_REGISTRY
                                                            if name.startswith("our-"))}
answer["signature"] = {"vanilla": list(inspect.signature(core_algos.compute_policy_loss_vanilla).parameters),
                       "ours": [name for name in inspect.signature(with_verl.loss_in_verl).parameters if name != "row"]}

answer["loss"] = {}
for ours, theirs, mode, batch in (
        ("our-grpo", "vanilla", "token-mean", {}), ("our-rec-oneside-is", "vanilla", "token-mean", {}),
        ("our-dr-grpo", "vanilla", "seq-mean-token-sum-norm", {"loss_scale_factor": 10}),
        ("our-gspo", "gspo", "seq-mean-token-mean", {}), ("our-cispo", "cispo", "token-mean", {})):
    (mine, metrics), (other, their_metrics) = (gradient(name, data(), mode, **batch) for name in (ours, theirs))
    answer["loss"][ours] = {"distance": distance(mine, other), "largest": other.abs().max().item(),
                            "metrics": sorted(metrics), "numbers": all(isinstance(v, float) for v in metrics.values())}

# Functions of verl that are one of our rows in value and slope, token by token, in float64 (GMPO in slope: its value
# there is −ρA). What verl calls a correction for a sampler other than the trainer is W, capped or cut off.
exact = {key: value.double() if value.is_floating_point() else value for key, value in data(1).items()}
log_ratio, a, mask = exact["log_prob"] - exact["old_log_prob"], exact["advantages"], exact["response_mask"]


def corrected(level, threshold, mode, where=True):
    """verl's REINFORCE with its importance weights, for the responses in `where`."""
    weights, _ = compute_rollout_correction_weights(log_ratio, mask, rollout_is=level, rollout_is_threshold=threshold)
    weights = weights if where is True else torch.where(where, weights, 1.0)
    return lambda leaf: core_algos.compute_policy_loss_reinforce(
        exact["old_log_prob"], leaf, a, mask, loss_agg_mode=mode, config=config(), rollout_is_weights=weights)[0]


def named(name, made):
    return lambda leaf: core_algos.get_policy_loss_fn(name)(**{**exact, "log_prob": leaf}, loss_agg_mode="token-mean",
                                                            config=made)[0]


def penalised(name, strength):
    """REINFORCE and a penalty made of verl's own estimator of the KL from the sampler."""
    return lambda leaf: named("gpg", config())(leaf) + strength * core_algos.agg_loss(
        core_algos.kl_penalty(leaf, exact["old_log_prob"], name), mask, "token-mean")


def value_and_slope(function):
    leaf = exact["log_prob"].clone().requires_grad_()
    value = function(leaf)
    return value.item(), torch.autograd.grad(value, leaf)[0]


made = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
gmpo = ActorConfig(**made, clip_ratio=.4, clip_ratio_low=.4, clip_ratio_high=.4)
dro = ActorConfig(**made, policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=.2))
answer["exact"] = {}
for row, of_verl in (
        ("reinforce", named("gpg", config())), ("rep-opmd", named("dro", dro)), ("rep-opmd", penalised("k2", .2)),
        ("rep-asymre", penalised("k1", -.1)), ("tis", corrected("token", 2.0, "token-mean")),
        ("rec-twoside-is", corrected("token", "0.8_1.2", "token-mean")), ("gmpo", named("geo_mean", gmpo)),
        ("topr", corrected("sequence", 1.0, "seq-mean-token-sum", where=a < 0)),
        ("tic-grpo", corrected("sequence", 1.2, "seq-mean-token-sum"))):
    (value, slope), (mine, my_slope) = value_and_slope(of_verl), value_and_slope(
        lambda leaf, row=row: with_verl.lm.policy_loss(leaf, exact["old_log_prob"], a, mask, algorithm=row)[0])
    answer["exact"].setdefault(row, []).append({"values": abs(value - mine), "gradient": distance(slope, my_slope),
                                                "largest": slope.abs().max().item()})
# kl_old is verl's k3 of the sampler, seen from the policy
k3 = core_algos.agg_loss(core_algos.kl_penalty(exact["old_log_prob"], exact["log_prob"], "k3"), mask, "token-mean")
_, metrics = with_verl.lm.policy_loss(exact["log_prob"], exact["old_log_prob"], a, mask, algorithm="reinforce")
answer["k3"] = {"verl": k3.item(), "ours": metrics["kl_old"].item()}

# One batch, and the same over two workers of two micro-batches each: verl sums micro-batches and averages workers.
answer["split"] = {}
for name in with_verl.ROWS:
    tensors, row = data(), with_verl.ROWS[name]
    mode = with_verl.AGGREGATIONS.get(row.aggregation, row.aggregation)
    whole, _ = gradient(f"our-{name}", tensors, mode, loss_scale_factor=10)
    totals = {"dp_size": 2, "batch_num_tokens": int(tensors["response_mask"].sum()), "global_batch_size": 8,
              "loss_scale_factor": 10}
    parts = [gradient(f"our-{name}", {key: value[i:i + 2] for key, value in tensors.items()}, mode, **totals)[0]
             for i in range(0, 8, 2)]
    answer["split"][name] = {"distance": distance(torch.cat(parts) / 2, whole), "largest": whole.abs().max().item()}

# Advantages: two groups of four, mixed, against verl's own estimators.
rewards, index = torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0]), numpy.array([*"babaabab"], dtype=object)
mask = data()["response_mask"]
token_rewards = torch.zeros(8, 6)
token_rewards[torch.arange(8), mask.sum(1) - 1] = rewards
answer["advantages"] = {}
for ours, theirs, options in (("our-reinforce", "grpo", {"norm_adv_by_std_in_grpo": False}), ("our-rloo", "rloo", {}),
                              ("our-grpo", "grpo", {})):
    mine, _ = core_algos.get_adv_estimator_fn(ours)(token_level_rewards=token_rewards.clone(), response_mask=mask,
                                                    index=index, config=None)
    other, _ = core_algos.get_adv_estimator_fn(theirs)(token_level_rewards=token_rewards.clone(), response_mask=mask,
                                                       index=index, **options)
    answer["advantages"][ours] = {"distance": distance(mine, other), "ratio": (other / mine)[mask].unique().tolist()}

# REINFORCE++ whitens over tokens there, over responses here: with equal lengths only n/(n − 1) is between them.
level = torch.zeros(8, 6).index_fill(1, torch.tensor([5]), 1.0) * rewards[:, None]
mine, _ = core_algos.get_adv_estimator_fn("our-reinforce-plus-plus")(
    token_level_rewards=level, response_mask=torch.ones(8, 6), index=index, config=None)
other, _ = core_algos.get_adv_estimator_fn("reinforce_plus_plus")(
    token_level_rewards=level, response_mask=torch.ones(8, 6), config=SimpleNamespace(gamma=1.0))
answer["advantages"]["our-reinforce-plus-plus"] = {"ratio": (other / mine).unique().tolist()}

# Every setting that the example prints is one of verl's.
known = pathlib.Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
tree = yaml.safe_load(known.read_text(encoding="utf-8"))
settings = with_verl.settings(with_verl.lm.Config(algorithm="dr-grpo", model="some/model"))
answer["unknown"] = []
for key in settings:
    node = tree
    for part in key.split("."):
        node = node.get(part, {}) if isinstance(node, dict) and part in node else answer["unknown"].append(key) or {}
print(json.dumps(answer))
