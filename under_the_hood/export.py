"""--export trinity: the same row, staleness, model and questions as a configuration of Trinity-RFT, the paper's code.

Names and meanings are those of trinity-rft 0.6.0. Tests load the file with Trinity's own reader, and compare the
gradient of what it selects there with the row's here. A run there needs GPUs and has not been seen.
"""

import json
import pathlib
import shlex

from under_the_hood.errors import require
from under_the_hood.models import BUILT_IN, chat_switches
from under_the_hood.runs import write_text
from under_the_hood.tasks import load_task

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLIPS = {"none": "none", "one_side": "one-side", "two_side": "two-side", "ring": "ring"}  # M: ours → Trinity's


def missing_in_trinity(row) -> str | None:
    """What of this row Trinity has no setting for, in words; None when it has all of it."""
    kept_on_side = row.clip == "one_side" and row.aggregation == "seq-mean-token-mean"
    reasons = {
        "token advantages from entropy": row.process_weight is not None,
        "steering the entropy by a second batch": row.entropy_target is not None,
        "worked examples in one response's prompt": row.worked_examples > 0,
        "grading an all-wrong group": row.graded,
        "undoing the verifier's error rates": row.correct_noise,
        "replacing flat groups": row.refill,
        "a length penalty (it has one, in math_dapo_reward)": row.overlong_share > 0,
        "a reward per token": row.per_token_reward,
        "a virtual right answer in the group": row.baseline == "virtual",
        "mean and deviation over the batch's responses (its reinforceplusplus takes tokens)": row.baseline == "batch",
        "a temperature found from the lengths": row.shaping == "adaptive-weight",
        "geometric means of bounded ratios": row.weight == "capped-mean",
        "one ratio for the whole response (its topr takes the token's)": row.level == "trajectory",
        f"the mean {row.aggregation}": row.aggregation in ("constant", "seq-mean-token-sum")
                                       or (row.level == "token" and row.aggregation != "token-mean"),
        "one-side clipping of a geometric mean, and nothing else of it": row.level == "sequence" and not kept_on_side,
        "two regularisers": row.tau > 0 and row.beta > 0,
        "a capped weight beside clipping or a regulariser": capped(row) and (row.clip != "none" or row.tau or row.beta),
        "RED's weight beside another": row.shaping == "weight" and (row.weight != "one" or row.level != "token"),
        "ε of 0": row.clip != "none" and not (0 < row.eps_low <= 1 and row.eps_high > 0),
    }
    return next((words for words, found in reasons.items() if found), None)


def capped(row) -> bool:
    return row.weight == "ratio" and row.weight_cap < float("inf")


def trinity_algorithm(row) -> dict:
    """The row in Trinity's words: its `algorithm` section, without what is not the row's."""
    require(not (missing := missing_in_trinity(row)), f"Trinity-RFT has no setting for this row: {missing}")
    settings = {
        "algorithm_type": "rec", "advantage_fn": "rec",
        "advantage_fn_args": {"epsilon": 1e-6, "std_normalize": row.std_normalize,
                              "drop": "balance" if row.shaping == "drop" else None},
        "policy_loss_fn": "rec", "loss_agg_mode": row.aggregation,
        # By default `rec` adds a KL to a reference model and an entropy term: they are not the paper's.
        "kl_loss_fn": "none", "kl_penalty_fn": "none", "entropy_loss_fn": "none",
        "bypass_old_logprobs": True,  # ratios against the sampler, as here
    }
    if row.baseline == "leave-one-out":
        settings |= {"algorithm_type": "rloo", "advantage_fn": "rloo", "advantage_fn_args": {}}
    if capped(row):  # min(ρ, cap) is Trinity's CISPO, without a lower bound
        return settings | {"policy_loss_fn": "cispo", "policy_loss_fn_args": {
            "clip_range_low": 1.0, "clip_range_high": row.weight_cap - 1, "enable_mask_clip": False,
            "loss_agg_mode": row.aggregation}}
    sequence = row.level == "sequence"
    weight = {"one": "none", "ratio": "gspo_importance_sampling" if sequence else "importance_sampling"}[row.weight]
    regularizer, strength = ("k2", row.tau / 2) if row.tau else ("forward-kl", row.beta) if row.beta else ("none", 0.0)
    clips = row.clip != "none"
    return settings | {"policy_loss_fn_args": {
        "clip_mode": "gspo-one-side" if sequence else CLIPS[row.clip],
        "epsilon_low": row.eps_low if clips else 0.2, "epsilon_high": row.eps_high if clips else 0.2,
        "epsilon_low_prime": row.outer_low if row.clip == "ring" else 0.6,
        "epsilon_high_prime": row.outer_high if row.clip == "ring" else 2.0,
        "weight": "advantage" if row.shaping == "weight" else weight, "temp": row.weight_temperature,
        "regularizer": regularizer, "regularizer_coef": strength,  # k2 there has no ½: τ/2
    }}


def trinity_config(config, row, folder) -> dict:
    """The whole file. folder: where train.jsonl and test.jsonl are."""
    interval = config.steps if config.offline else config.sync_interval  # the first refresh comes after the last step
    sampling = {"temperature": config.temperature, "top_p": 1.0, "top_k": -1, "max_tokens": config.max_new_tokens}
    data = {"storage_type": "file", "path": str(folder), "rollout_args": sampling,
            "reward_fn_args": {"task": config.task, "reward": config.reward},
            "format": {"prompt_key": "question", "response_key": "answer", "system_prompt": config.system_prompt}}
    return {
        "mode": "both", "project": "off-policy-reinforce", "name": folder.parent.name,
        "checkpoint_root_dir": str(folder.parent / "checkpoints"),
        "algorithm": {
            **trinity_algorithm(row), "repeat_times": config.group_size,
            "optimizer": {"optimizer_type": "adamw", "lr": config.learning_rate, "lr_scheduler_type": "constant",
                          "weight_decay": 0.0, "betas": [0.9, 0.999], "clip_grad": config.max_grad_norm}},
        "model": {"model_path": config.model, "max_prompt_tokens": config.max_prompt_tokens,
                  "max_response_tokens": config.max_new_tokens,
                  "max_model_len": config.max_prompt_tokens + config.max_new_tokens,
                  "temperature": config.temperature, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0,
                  "enable_thinking": chat_switches(config).get("enable_thinking")},
        "buffer": {
            "total_steps": config.steps, "batch_size": config.prompts_per_step,
            "train_batch_size": config.prompts_per_step * config.group_size,
            "explorer_input": {
                "default_workflow_type": "simple_workflow", "default_reward_fn_type": "trinity_reward.OurReward",
                "taskset": {"name": "train", "split": "train", **data,
                            "data_selector": {"selector_type": "shuffle", "seed": config.seed}},
                "eval_tasksets": [{"name": "test", "split": "test", "repeat_times": config.eval_samples, **data}]},
            "trainer_input": {"experience_buffer": {"name": "experiences", "storage_type": "queue"}}},
        "explorer": {"eval_interval": -(-config.eval_every // interval) * interval, "eval_on_startup": True,
                     "rollout_model": {"engine_type": "vllm", "engine_num": 1, "tensor_parallel_size": 1,
                                       "seed": config.seed}},
        "synchronizer": {"sync_method": "nccl", "sync_style": "fixed", "sync_interval": interval,
                         "sync_offset": config.sync_offset},
        "trainer": {"trainer_type": "verl", "total_steps": config.steps, "save_interval": config.save_every,
                    "grad_clip": config.max_grad_norm},
    }


def export(config, row) -> None:
    """--export trinity: write trinity.yaml and its questions into --out, and print the command that runs them."""
    import yaml

    require(config.export == "trinity", f"--export is {config.export!r}; it can be trinity")
    require(config.model not in BUILT_IN and not config.model.endswith(".gguf"),
            f"--export trinity: Trinity-RFT trains a hub model or a directory, not --model {config.model}; "
            "try --model Qwen/Qwen2.5-0.5B-Instruct")
    switches = chat_switches(config)
    thinking = switches.pop("enable_thinking", None)
    cannot = {"--reward-noise": config.reward_noise != "0,0", "--lora-rank": config.lora_rank,
              "--on-unscored leave-out": config.on_unscored != "stop", "--compare": config.compare,
              f"--chat-template-kwargs but for enable_thinking ({', '.join(switches)})": switches,
              f"an enable_thinking of {thinking!r}": thinking not in (None, True, False)}
    require(not any(cannot.values()), "--export trinity has no words for "
            + ", nor for ".join(words for words, wanted in cannot.items() if wanted) + "; leave it out")
    setting = "offline" if config.offline else f"I{config.sync_interval}-m{config.sync_offset}"
    out = pathlib.Path(config.out or f"runs/trinity-{config.algorithm}-{pathlib.Path(config.task).stem}-{setting}")
    out = out.resolve()
    require(config.overwrite or not (out / "trinity.yaml").exists(),
            f"{out} already holds a trinity.yaml: add --overwrite to replace it, or choose another --out")
    settings, task = trinity_config(config, row, out / "data"), load_task(config)
    for name, examples in (("train", task.train), ("test", task.evaluation)):
        lines = (json.dumps({"question": e.question, "answer": e.answer}, ensure_ascii=False) for e in examples)
        write_text(out / "data" / f"{name}.jsonl", "\n".join(lines) + "\n")
    file = out / "trinity.yaml"
    command = f"PYTHONPATH={shlex.quote(str(ROOT / 'examples'))} trinity run --config {shlex.quote(str(file))}"
    notes = [f"--algorithm {config.algorithm} in the words of Trinity-RFT 0.6.0; see examples/with_trinity.md", command]
    if config.offline:
        notes.append("Offline: the first refresh comes after the last step, and Trinity evaluates only at refreshes. "
                     "Evaluate its checkpoints with mode: bench")
    text = "".join(f"# {note}\n" for note in notes)
    settings = json.loads(json.dumps(settings))  # no dictionary twice, or YAML would write a reference to the first
    write_text(file, text + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    print(f"{file}: {config.algorithm}, {config.model}, {len(task.train)} questions; run it with\n{command}")
