#!/usr/bin/env python3
"""One on-policy GRPO step, ours against TRL's GRPOTrainer, and against the arithmetic that a step cannot avoid.

Both train the built-in model on the same prompts: 32 × 8 responses of at most 8 tokens, float32, fused AdamW, one
update per batch. They take turns inside one process: a step of TRL's, ours on the same prompts, the next of TRL's, …
so that other work on the machine slows both alike. TRL's time runs from its on_step_begin to its on_step_end:
generation, rewards, loss, backward, optimizer, without loading the batch and logging. Ours is `training_batch` +
`train_step`, all metrics included.

Two lower bounds, measured in the same run: the step's operations as usually counted (harness.step_flops) divided by
the rate of one large float32 matrix product; and the time of the layers' matrix products on the step's tokens, once
forward for sampling, once forward and backward for training, with nothing between them.

Run:  python benchmarks/bench_rl_step.py          about a minute on 2 idle cores; needs `pip install trl`
"""

import argparse
import copy
import functools
import statistics
import tempfile
import time

from harness import (
    RESULTS,
    lm,
    machine,
    matrix_rate,
    products_seconds,
    quartiles,
    rollout_flops,
    save,
    table,
    torch,
)

from under_the_hood.friends import training_batch
from under_the_hood.models import load_model
from under_the_hood.tasks import batch_examples, load_task, reward_function


class OurTrainer:
    """What `train` in 06 does in a step with --algorithm grpo, one call per step, with a clock."""

    def __init__(self, config, model, tokenizer, task):
        self.config, self.model, self.tokenizer, self.task = config, model, tokenizer, task
        self.algorithm = lm.chosen_algorithm(config)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
        self.sampling, self.dropping = (torch.Generator().manual_seed(config.seed) for _ in range(2))

    def step(self, number: int) -> dict:
        began = time.perf_counter()
        sample = functools.partial(lm.collect, self.model, self.tokenizer, config=self.config, version=number - 1,
                                   generator=self.sampling, algorithm=self.algorithm, number=number)
        batch = training_batch(sample, self.task, number, self.config, algorithm=self.algorithm)
        collected = time.perf_counter()
        lm.train_step(self.model, self.optimizer, batch, self.config, algorithm=self.algorithm,
                      generator=self.dropping)
        ended = time.perf_counter()
        return {"seconds": ended - began, "collect": collected - began, "train": ended - collected,
                "flops": sum(rollout_flops(self.model, batch).values()), "reward": batch.rewards.mean().item(),
                # The last token of a response does not run.
                "tokens": int(batch.prompt_mask.sum() + batch.mask.sum() - len(batch.mask)),
                "length": batch.mask.sum(1).float().mean().item()}


def trl_config(config, *, steps: int, folder: str):
    """The same step in TRL's words, with everything optional switched off."""
    from trl import GRPOConfig

    rows = config.prompts_per_step * config.group_size
    return GRPOConfig(
        output_dir=folder, max_steps=steps, seed=config.seed, use_cpu=True, bf16=False, fp16=False,
        per_device_train_batch_size=rows, gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1,
        num_generations=config.group_size, max_completion_length=config.max_new_tokens, shuffle_dataset=False,
        temperature=config.temperature, top_k=0, top_p=1.0, repetition_penalty=1.0, beta=0.0, epsilon=0.2,
        loss_type="dapo", scale_rewards="group", importance_sampling_level="token",  # token mean, ÷ std, as row "grpo"
        optim="adamw_torch_fused", learning_rate=config.learning_rate, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=config.max_grad_norm, gradient_checkpointing=False, use_vllm=False, log_completions=False,
        logging_strategy="no", save_strategy="no", eval_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_num_workers=0, dataloader_pin_memory=False)


def interleave(config, *, warmup: int, steps: int) -> tuple:
    """Steps of ours and of TRL's in turn, on the same prompts: two lists of measurements, without the warm-up.

    The third result is the model that was trained.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    task = load_task(config)
    model, tokenizer = load_model(config.model, device="cpu", cache_dir=config.cache_dir, task=config.task)
    ours, reward = OurTrainer(config, copy.deepcopy(model), tokenizer, task), reward_function(None, config.task)
    mine, theirs = [], []

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, *_args, **_kwargs):
            theirs.append({"began": time.perf_counter()})

        def on_step_end(self, *_args, **_kwargs):
            theirs[-1]["seconds"] = time.perf_counter() - theirs[-1]["began"]
            mine.append(ours.step(len(theirs)))

    def rewards(prompts, completions, completion_ids, answer, **_):
        values = [reward(prompt, text, gold) for prompt, text, gold in zip(prompts, completions, answer)]
        theirs[-1] |= {"reward": statistics.mean(values), "length": statistics.mean(map(len, completion_ids)),
                       "prompts": prompts}
        return values

    total, count = warmup + steps, config.prompts_per_step
    examples = [e for n in range(1, total + 1) for e in batch_examples(task.train, n, count=count, seed=config.seed)]
    data = Dataset.from_list([{"prompt": e.terse, "answer": e.answer} for e in examples])
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=rewards, train_dataset=data,
                              args=trl_config(config, steps=total, folder=folder), callbacks=[TakeTurns()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for number, step in enumerate(theirs):
        asked = [e.terse for e in examples[number * count: (number + 1) * count] for _ in range(config.group_size)]
        assert step.pop("prompts") == asked, "TRL's step had other prompts than ours"
    return mine[warmup:], theirs[warmup:], ours.model


def bench(*, steps: int, warmup: int, prompts: int, group_size: int, max_new_tokens: int, threads: int) -> dict:
    torch.set_num_threads(threads)
    config = lm.Config(algorithm="grpo", prompts_per_step=prompts, group_size=group_size, max_new_tokens=max_new_tokens,
                       device="cpu", dtype="float32")
    rate_before = matrix_rate()
    mine, theirs, model = interleave(config, warmup=warmup, steps=steps)
    rate = statistics.median([rate_before, matrix_rate()])
    tokens = round(statistics.median(step["tokens"] for step in mine))
    products = (products_seconds(model, tokens=tokens, backward=False)
                + products_seconds(model, tokens=tokens, backward=True))
    ours_s, trl_s = ([step["seconds"] for step in side] for side in (mine, theirs))
    ratios, flops = [a / b for a, b in zip(ours_s, trl_s)], statistics.median(step["flops"] for step in mine)
    floor, median = flops / rate, statistics.median(ours_s)

    def mean(side, key):
        return statistics.mean(step[key] for step in side)

    return {"machine": machine(), "steps": steps, "prompts": prompts, "group_size": group_size,
            "max_new_tokens": max_new_tokens, "ours_s": median, "ours_quartiles": quartiles(ours_s),
            "trl_s": statistics.median(trl_s), "trl_quartiles": quartiles(trl_s),
            "ratio": statistics.median(ratios), "ratio_quartiles": quartiles(ratios),
            "collect_s": statistics.median(step["collect"] for step in mine),
            "train_s": statistics.median(step["train"] for step in mine),
            "flops": flops, "matrix_gflops": rate / 1e9, "floor_s": floor, "over_floor": median / floor,
            "tokens": tokens, "products_s": products, "over_products": median / products,
            "ours_reward": mean(mine, "reward"), "trl_reward": mean(theirs, "reward"),
            "ours_length": mean(mine, "length"), "trl_length": mean(theirs, "length")}


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (("steps", 30, "measured steps of each"), ("warmup", 5, "steps before them"),
                                ("prompts", 32, "prompts in a step"), ("group-size", 8, "responses to a prompt"),
                                ("max-new-tokens", 8, "longest response"), ("threads", 2, "threads of torch")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--out", default=RESULTS, help="folder of the result file (default benchmarks/results)")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    result = bench(**options)
    table(["GRPO step", "median s", "quartiles", "reward", "tokens/response"],
          [[name, result[f"{key}_s"], "{0:.4f} – {2:.4f}".format(*result[f"{key}_quartiles"]),
            result[f"{key}_reward"], result[f"{key}_length"]] for name, key in (("ours", "ours"), ("TRL", "trl"))])
    print("ours / TRL, step by step: {1:.3f} (quartiles {0:.3f} – {2:.3f})".format(*result["ratio_quartiles"]))
    print(f"floor: {result['flops'] / 1e9:.2f} GFLOP at {result['matrix_gflops']:.0f} GFLOP/s = "
          f"{result['floor_s'] * 1e3:.1f} ms; "
          f"our step takes {result['over_floor']:.2f} times that ({result['collect_s'] * 1e3:.0f} ms collecting, "
          f"{result['train_s'] * 1e3:.0f} ms training)")
    print(f"the layers' matrix products alone: {result['products_s'] * 1e3:.1f} ms; our step takes "
          f"{result['over_products']:.2f} times that")
    save("rl_step", result, out)


if __name__ == "__main__":
    main()
