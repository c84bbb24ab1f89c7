#!/usr/bin/env python3
"""What the training script does on a GPU: does it learn, do sampler and trainer agree, how fast is it.

    learn          06 trains the built-in model of --learn: accuracy before and after, the self-check in bfloat16
    0.5b, 1.5b     Qwen2.5's shapes with random weights, bfloat16 compute on float32 weights: response tokens per
                   second of each way of sampling, and how far its log-probabilities are from the trainer's; training
                   tokens per second, model-FLOP utilisation, peak memory
    paper_run      what these rates mean for the paper's GSM8K run: 160 steps of 96 × 8 responses, up to 1024 tokens

A random model ends a response with equal chance at each token, so that lengths vary as in practice: geometric, with a
given mean, cut at a maximum. Utilisation counts only the operations that are needed (harness.step_flops), without
padding and recomputation, against the device's published dense bfloat16 peak, or a large matrix product where that is
not known.

Run:  python benchmarks/gpu_check.py            under 4 minutes on an H200
      python benchmarks/gpu_check.py --smoke    on CPU with tiny shapes, under a minute: it only checks this script
"""

import argparse
import copy
import dataclasses
import functools
import gc
import pathlib
import shlex
import statistics
import sys
import tempfile
import time

from harness import (
    RESULTS,
    lm,
    machine,
    matrix_rate,
    random_model,
    rollout_flops,
    save,
    table,
    timed,
    torch,
)

from under_the_hood import engines, fast, options
from under_the_hood.errors import UserError, one_line
from under_the_hood.models import autocast, drop_long_prompts, load_model
from under_the_hood.runs import METRICS, read_metrics
from under_the_hood.tasks import load_task

QWEN = {"vocab_size": 151_936, "kv_heads": 2}
SHAPES = {"0.5b": {"hidden_size": 896, "intermediate_size": 4864, "layers": 24, "heads": 14, **QWEN},
          "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "layers": 28, "heads": 12, **QWEN}}
SMOKE_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "vocab_size": 512, "kv_heads": 1}
LOAD = {"prompts": 96, "group_size": 8, "prompt_length": 100, "mean_length": 192, "max_length": 384,
        "micro_batch_tokens": 16_384}
SMOKE_LOAD = {"prompts": 3, "group_size": 2, "prompt_length": 6, "mean_length": 4, "max_length": 8,
              "micro_batch_tokens": 64}
LEARN = ("--model small --task addition-steps --algorithm grpo --steps 60 --max-new-tokens 48 --learning-rate 1e-5 "
         "--eval-every 60 --save-every 60")
SMOKE_LEARN = "--model tiny --task addition-1 --steps 2 --prompts-per-step 4 --eval-questions 4 --eval-samples 2"
ENGINES = ("fast", "paged")
PEAK_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}  # dense, published, per second


# ---------------------------------------------------------------- does it learn


def parse(flags: str):
    return options.parse_arguments(lm.Config, lm.GROUPS, lm.__doc__, METRICS, shlex.split(flags))


def learn(flags: str, *, device, folder) -> dict:
    """Train as 06 does on these flags: accuracy before and after, agreement of sampler and trainer, speed."""
    config = dataclasses.replace(parse(flags), device=device.type, out=str(pathlib.Path(folder) / "run"))
    try:
        options.validate(config, lm.ALGORITHMS, lm.try_loss)
        task = load_task(config)
        began = time.perf_counter()
        model, tokenizer = load_model(config.model, device=device, cache_dir=config.cache_dir, task=config.task)
        seconds = time.perf_counter() - began
    except UserError as error:
        return {"not_available": f"06 cannot run {flags!r}: {error}"}
    parameters = sum(p.numel() for p in model.parameters())
    cast = dataclasses.replace(config, dtype="bfloat16")
    task = drop_long_prompts(task, model, tokenizer, config)
    token_logprobs = functools.partial(fast.token_logprobs, model)
    gap = engines.compute_gap(model, token_logprobs, tokenizer, task, cast, lm.ENGINES["fast"])
    del model
    result = lm.train(config)
    lines = [line for line in read_metrics(pathlib.Path(config.out)) if "tokens_per_second" in line]
    return {"flags": flags, "parameters": parameters, "model_seconds": seconds, **result,
            "self_check_bfloat16": gap["compute_gap_max"],
            "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines)}


# ---------------------------------------------------------------- how fast is it


def measure_shape(shape: dict, *, device, peak: float, prompts: int, group_size: int, prompt_length: int,
                  mean_length: int, max_length: int, micro_batch_tokens: int) -> dict:
    """Sampling with each engine, then training on what the fast one sampled, on a random model of that shape."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = random_model(**shape, context=prompt_length + max_length, device=device)
    config = lm.Config(algorithm="grpo", prompts_per_step=prompts, group_size=group_size, max_new_tokens=max_length,
                       micro_batch_tokens=micro_batch_tokens, dtype="bfloat16", device=device.type)
    vocabulary, generator = shape["vocab_size"], torch.Generator(device).manual_seed(0)
    prompt = torch.randint(vocabulary, (prompts, prompt_length), device=device, generator=generator)
    options = {"group_size": group_size, "temperature": 1.0, "pad_id": 0, "generator": generator,
               "eos_ids": set(range(0, vocabulary, mean_length))}  # one token in mean_length ends a response
    result = {"parameters": sum(p.numel() for p in model.parameters()), "rollout": {}, "rollout_peak_gb": None}
    for name in ENGINES:
        try:
            result["rollout"][name], sampled = rollout(lm.ENGINES[name][0], model, prompt, config,
                                                       max_length=max_length, own_copy=name == "paged", **options)
        except Exception as error:  # an engine of another package may raise anything; the rest of the check goes on
            if name == "fast":
                raise
            result["rollout"][name] = {"not_available": f"{name} failed: {one_line(error)}"}
        if name == "fast":
            tokens, mask, logprobs = sampled
    result["rollout_peak_gb"] = peak_memory(device)
    # Right and wrong in turn, so that every group has a gradient.
    rewards = (torch.arange(prompts * group_size, device=device) % 2).view(prompts, group_size).float()
    batch = lm.Rollout(prompt=prompt, prompt_mask=torch.ones_like(prompt, dtype=torch.bool), tokens=tokens, mask=mask,
                       old_logprobs=logprobs, rewards=rewards, truncated=torch.zeros_like(mask[:, 0]), version=0,
                       samples=[])
    return result | training(model, batch, config, peak=peak)


def rollout(sample, model, prompt, config, *, max_length: int, own_copy: bool, generator, **options):
    """Response tokens per second of one engine, and how far its log-probabilities are from the trainer's.

    own_copy: sample from a copy with bfloat16 weights, as 06 does for an engine that has no autocast.
    """
    device, mask = prompt.device, torch.ones_like(prompt, dtype=torch.bool)
    sampler = copy.deepcopy(model) if own_copy and device.type == "cuda" else model
    if sampler is not model:
        for weight in sampler.parameters():  # not the rotary frequencies
            weight.data = weight.data.to(torch.bfloat16)
    with autocast(config, device):
        sample(sampler, prompt[:2], mask[:2], max_new_tokens=4, generator=generator, **options)  # warm-up
        began = time.perf_counter()
        tokens, kept, logprobs = sample(sampler, prompt, mask, max_new_tokens=max_length, generator=generator,
                                        **options)
        count, seconds = int(kept.sum()), time.perf_counter() - began  # the sum waits for the device
        few, rows = min(4, len(prompt)), min(4, len(prompt)) * options["group_size"]
        with torch.no_grad():
            again, _ = fast.token_logprobs(model, prompt[:few], tokens[:rows], mask=kept[:rows])
    difference = (again - logprobs[:rows]).abs()[kept[:rows]]
    rates = {"tokens_per_second": count / seconds, "seconds": seconds, "tokens": count,
             "longest": int(kept.sum(1).max()), "logprob_difference_mean": difference.mean().item(),
             "logprob_difference_max": difference.max().item()}
    return rates, (tokens, kept, logprobs)


def training(model, batch, config, *, peak: float, repeats: int = 2) -> dict:
    """Response tokens per second of `train_step`, model-FLOP utilisation, peak memory."""
    device, row = batch.tokens.device, lm.chosen_algorithm(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    options = {"algorithm": row, "generator": generator}
    lm.train_step(model, optimizer, first_prompts(batch, 2), config, **options)  # warm-up
    seconds = min(timed(lm.train_step, model, optimizer, batch, config, device=device, **options)[0]
                  for _ in range(repeats))
    tokens = int(batch.mask.sum())
    return {"train_tokens_per_second": tokens / seconds, "train_seconds": seconds, "train_peak_gb": peak_memory(device),
            "processed_tokens_per_second": (tokens + int(batch.prompt_mask.sum())) / seconds,
            "mfu": rollout_flops(model, batch)["train"] / seconds / peak}


def first_prompts(batch, count: int):
    """The first groups of a Rollout."""
    rows = count * batch.rewards.shape[1]
    by_prompt, by_response = ("prompt", "prompt_mask", "rewards"), ("tokens", "mask", "old_logprobs", "truncated")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[:count] for name in by_prompt},
                               **{name: getattr(batch, name)[:rows] for name in by_response})


def peak_memory(device):
    """Gigabytes that tensors held at most since the last reset; None without a GPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None


def paper_run(rates: dict, *, steps: int = 160, prompts: int = 96, group_size: int = 8, mean_length: int = 300) -> dict:
    """Hours of the paper's GSM8K run at these rates, for responses of mean_length tokens (assumed) and of 1024."""
    sampling = max(way["tokens_per_second"] for way in rates["rollout"].values() if "tokens_per_second" in way)
    per_token = 1 / sampling + 1 / rates["train_tokens_per_second"]
    return {"steps": steps, "responses": prompts * group_size, "mean_length": mean_length,
            "hours": steps * prompts * group_size * mean_length * per_token / 3600,
            "hours_at_1024_tokens": steps * prompts * group_size * 1024 * per_token / 3600}


# ---------------------------------------------------------------- all of it


def check(*, device, shapes: dict, load: dict, learn_flags: str, parts, out, matrix_size: int = 8192) -> dict:
    """Run the parts, and write the result file after each, so that an interrupted run keeps what it has."""
    rate = matrix_rate(device, size=matrix_size, dtype=torch.bfloat16)
    name = machine(device)["device"]
    published = next((value for key, value in PEAK_BFLOAT16.items() if key in name), None)
    result = {"machine": machine(device), "matrix_tflops": rate / 1e12,
              "published_tflops": published and published / 1e12, "load": load, "seconds": {}}

    def learning():
        with tempfile.TemporaryDirectory() as folder:
            return learn(learn_flags, device=device, folder=folder)

    measures = {"learn": learning} | {
        shape: lambda size=size: measure_shape(size, device=device, peak=published or rate, **load)
        for shape, size in shapes.items()}
    for part in (part for part in measures if part in parts):
        began = time.perf_counter()
        result[part] = measures[part]()
        result["seconds"][part] = time.perf_counter() - began
        if part == list(shapes)[-1]:
            result["paper_run"] = paper_run(result[part])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        save("gpu_check", result, out)
    return result


def report(result: dict, shapes) -> None:
    print(f"\n{result['machine']['device']}: a large bfloat16 product runs at {result['matrix_tflops']:.3g} TFLOP/s "
          f"(published peak: {result['published_tflops'] or 'not known'})")
    if learned := result.get("learn"):
        print(f"learning: not available: {learned['not_available']}" if "not_available" in learned else
              f"learning: {learned['parameters'] / 1e6:.3g} M parameters, "
              f"accuracy {learned['before']:.3f} → {learned['after']:.3f} "
              f"(95 % {learned['low']:.3f}–{learned['high']:.3f}) in {learned['seconds']:.0f} s, "
              f"{learned['tokens_per_second']:.0f} tokens/s; "
              f"sampler and trainer agree to {learned['self_check_bfloat16']:.2g} in bfloat16")
    rows = []
    for shape in (shape for shape in shapes if shape in result):
        for name, way in result[shape]["rollout"].items():
            rows.append([shape, f"sample, {name}", *([way["not_available"], "", "", ""] if "not_available" in way else [
                f"{way['tokens_per_second']:.0f}",
                f"{way['logprob_difference_mean']:.1e} / {way['logprob_difference_max']:.1e}", "",
                gigabytes(result[shape]["rollout_peak_gb"])])])
        rows.append([shape, "train", f"{result[shape]['train_tokens_per_second']:.0f}", "",
                     f"{result[shape]['mfu']:.1%}", gigabytes(result[shape]["train_peak_gb"])])
    if rows:
        table(["shape", "what", "response tokens/s", "|Δ log π| mean / max", "of the peak", "peak GB"], rows)
    if run := result.get("paper_run"):
        print(f"the paper's GSM8K run ({run['steps']} steps × {run['responses']} responses) at these rates: "
              f"{run['hours']:.2g} h with "
              f"{run['mean_length']} tokens a response, {run['hours_at_1024_tokens']:.2g} h with 1024")
    print(", ".join(f"{part} {seconds:.0f} s" for part, seconds in result["seconds"].items()))


def gigabytes(value) -> str:
    return "" if value is None else f"{value:.1f}"


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on CPU: only checks that everything runs")
    parser.add_argument("--parts", default="learn,0.5b,1.5b",
                        help="what to do, comma-separated (default learn,0.5b,1.5b)")
    parser.add_argument("--learn", metavar="FLAGS", help=f"flags of 06 for the part learn (default {LEARN!r})")
    parser.add_argument("--out", default=RESULTS, help="folder of the result file (default benchmarks/results)")
    options = parser.parse_args(argv)
    if not (options.smoke or torch.cuda.is_available()):
        print("error: this check needs a CUDA device, and torch sees none; --smoke runs it on CPU with tiny shapes",
              file=sys.stderr)
        sys.exit(2)
    device = torch.device("cpu" if options.smoke else "cuda")
    shapes = dict.fromkeys(SHAPES, SMOKE_SHAPE) if options.smoke else SHAPES
    parts = options.parts.split(",")
    if unknown := set(parts) - {"learn", *shapes}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from learn, {', '.join(shapes)}")
    load, learn_flags, matrix_size = (SMOKE_LOAD, SMOKE_LEARN, 256) if options.smoke else (LOAD, LEARN, 8192)
    result = check(device=device, shapes=shapes, load=load, parts=parts, out=options.out,
                   learn_flags=options.learn or learn_flags, matrix_size=matrix_size)
    report(result, shapes)


if __name__ == "__main__":
    main()
