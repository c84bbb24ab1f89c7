#!/usr/bin/env python3
"""The rows of ALGORITHMS as policy losses and advantage estimators of verl, registered by their names there: our-<row>.

verl keeps its engines, Ray workers and reward managers; two functions of tensors come from here. It imports this file
in every process when VERL_USE_EXTERNAL_MODULES names it, and the file registers itself. Started by hand it prints the
command that selects a row, with 06's flags in verl's words; that needs neither verl nor a GPU:

Run:  python examples/with_verl.py --algorithm rec-oneside-nois --sync-interval 4 --model Qwen/Qwen2.5-0.5B-Instruct

Tested against the functions of verl 0.9.1 itself, on CPU: signature, loss, gradient and the split over micro-batches
and workers. A run of verl with it has not been seen, for that needs GPUs.

Staleness: verl's trainer samples train_batch_size prompts and updates once for every ppo_mini_batch_size of them, so
--sync-interval I is I mini-batches. Not here: the neighbours (dapo, noise-corrected-grpo, sgpo, aepo, icpo, ep-grpo).
They change data, rewards or the batch, which in verl are the business of its trainer and of your reward function.
"""

import functools
import importlib
import pathlib
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
lm = importlib.import_module("06_full_llm_training")
torch = lm.torch

ROWS = {name: row for name, row in lm.ALGORITHMS.items() if name not in lm.NEIGHBOURS}
AGGREGATIONS = {"constant": "seq-mean-token-sum-norm"}  # verl's words for N; the others are the same


def loss_in_verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
                 rollout_is_weights=None, *, row):
    """policy_loss with verl's arguments, for one micro-batch. N is the row's, made of the global batch's totals."""
    batch, mask = getattr(config, "global_batch_info", None) or {}, response_mask.bool()
    if loss_agg_mode != AGGREGATIONS.get(row.aggregation, row.aggregation):
        raise ValueError(f"this row needs actor.loss_agg_mode={AGGREGATIONS.get(row.aggregation, row.aggregation)}; "
                         f"got {loss_agg_mode}")
    if rollout_is_weights is not None:  # verl's correction for an engine whose numbers differ from the trainer's
        advantages = advantages * rollout_is_weights
    weights = lm.token_weights(mask, aggregation=row.aggregation, tokens=batch.get("batch_num_tokens"),
                               sequences=batch.get("global_batch_size"),
                               constant=batch.get("loss_scale_factor") or mask.shape[1])
    loss, metrics = lm.policy_loss(log_prob, old_log_prob, advantages, mask, algorithm=row,
                                   weights=weights * batch.get("dp_size", 1))  # workers' gradients are averaged
    return loss, {f"actor/{name}": value.item() for name, value in metrics.items()}


def advantages_in_verl(token_level_rewards, response_mask, index, config=None, *, row, **_):
    """shaped_advantages with verl's arguments: index names the group of each response. (B, T), twice, as verl wants."""
    rewards, lengths = token_level_rewards.sum(1), response_mask.sum(1)
    order = torch.tensor(sorted(range(len(index)), key=lambda i: str(index[i])))
    groups = len(set(index))
    if len(index) % groups or any(len(set(group)) > 1 for group in index[order.numpy()].reshape(groups, -1)):
        raise ValueError("all groups of a batch need the same number of responses")
    advantages = torch.empty_like(rewards)
    advantages[order] = lm.shaped_advantages(rewards[order].view(groups, -1), lengths[order].view(groups, -1),
                                             algorithm=row).flatten()
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


def register(core_algos) -> None:
    """Under our-<row>: the loss, for actor.policy_loss.loss_mode, and the advantages, for algorithm.adv_estimator."""
    for name, row in ROWS.items():
        core_algos.register_policy_loss(f"our-{name}")(functools.partial(loss_in_verl, row=row))
        core_algos.register_adv_est(f"our-{name}")(functools.partial(advantages_in_verl, row=row))


def settings(config) -> dict:
    """verl's settings for the row, the staleness and the model of 06's flags."""
    row, actor = ROWS[config.algorithm], "actor_rollout_ref.actor"
    name, rollout = f"our-{config.algorithm}", "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": name, f"{actor}.policy_loss.loss_mode": name,
        f"{actor}.loss_agg_mode": AGGREGATIONS.get(row.aggregation, row.aggregation),
        f"{actor}.loss_scale_factor": config.max_new_tokens if row.aggregation == "constant" else "null",
        f"{actor}.use_kl_loss": False, "algorithm.use_kl_in_reward": False, f"{actor}.entropy_coeff": 0,
        # True would put verl's own loss in place of the one named above, and say nothing.
        "algorithm.rollout_correction.bypass_mode": False,
        "data.train_batch_size": config.prompts_per_step * config.sync_interval,
        f"{actor}.ppo_mini_batch_size": config.prompts_per_step, f"{actor}.ppo_epochs": 1,
        f"{actor}.optim.lr": config.learning_rate, f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.clip_grad": config.max_grad_norm,
        "actor_rollout_ref.model.path": config.model, f"{rollout}.n": config.group_size,
        f"{rollout}.temperature": config.temperature, f"{rollout}.top_p": 1.0, f"{rollout}.top_k": -1,
        "data.max_prompt_length": config.max_prompt_tokens, "data.max_response_length": config.max_new_tokens,
        "trainer.total_training_steps": config.steps // config.sync_interval,
    }


def main(argv=None) -> None:
    from under_the_hood import options
    from under_the_hood.errors import UserError, require
    from under_the_hood.models import BUILT_IN
    from under_the_hood.runs import METRICS

    try:
        config = options.parse_arguments(lm.Config, lm.GROUPS, __doc__, METRICS, argv)
        options.validate(config, lm.ALGORITHMS, lm.try_loss)
        require(config.algorithm in ROWS,
                f"{config.algorithm} is more than A, M, W, R and N; here it would be another row")
        require(not (config.sync_offset or config.offline),
                "verl's trainer samples and trains in turn: of 06's staleness it has --sync-interval")
        require(lm.chosen_algorithm(config) == ROWS[config.algorithm],
                "--eps-low and the like change a row; in verl that is a line of your own in ROWS of this file")
        require(config.steps % config.sync_interval == 0,
                f"--steps {config.steps} is no multiple of --sync-interval {config.sync_interval}")
        require(config.model not in BUILT_IN,
                f"--model {config.model} is built in and no model for verl; name a hub model or a directory")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    lines = [f"{key}={value}" for key, value in settings(config).items()]
    print(" \\\n  ".join([(f"PYTHONPATH={shlex.quote(str(ROOT / 'examples'))} VERL_USE_EXTERNAL_MODULES=with_verl "
                           "python -m verl.trainer.main_ppo"), *lines, "data.train_files=… data.val_files=…"]))


if __name__ == "__main__":
    main()
elif "verl" in sys.modules:
    register(importlib.import_module("verl.trainer.ppo.core_algos"))
