#!/usr/bin/env python3
"""How the time of a step grows with group size, response length, prompt length and vocabulary.

Collecting and training are timed apart. A small random Qwen2 answers random questions; no response ends early, so that
each has the full length. One quantity grows while the others keep their base value. The exponent is the slope of log
seconds over log size: 1 means twice the size, twice the time. It is fitted to the upper half of the sizes, where fixed
costs hide least of it.

Run:  python benchmarks/bench_scaling.py          about two minutes on 2 idle cores
"""

import argparse
import math
import statistics

from harness import RESULTS, lm, machine, random_model, save, table, timed, torch

from under_the_hood.models import character_tokenizer
from under_the_hood.tasks import Example

BASE = {"prompts": 4, "group_size": 8, "response_length": 32, "prompt_length": 32, "vocabulary": 2048}
SIZES = {"group_size": (4, 8, 16, 32, 64), "response_length": (16, 32, 64, 128, 256),
         "prompt_length": (32, 128, 512, 1024, 2048),
         "vocabulary": (2048, 8192, 32_768, 65_536, 131_072)}


def tokenizer_without_end():
    """The character tokenizer of 06, without an end of text: no response ends before its length is reached."""
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def measure_step(*, prompts: int, group_size: int, response_length: int, prompt_length: int, vocabulary: int,
                 hidden: int, layers: int, repeats: int) -> dict:
    """Median seconds of `collect` and `train_step` of 06, after one warm-up of each."""
    model, tokenizer = random_model(vocab_size=vocabulary, hidden_size=hidden, layers=layers, heads=hidden // 32,
                                    kv_heads=hidden // 32, intermediate_size=3 * hidden), tokenizer_without_end()
    config = lm.Config(algorithm="grpo", prompts_per_step=prompts, group_size=group_size,
                       max_new_tokens=response_length, device="cpu", dtype="float32")
    row, generator = lm.chosen_algorithm(config), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    digits = torch.randint(10, (prompts, prompt_length), generator=generator).tolist()
    examples = [Example("", "1", terse="".join(map(str, line))) for line in digits]
    seconds = {"collect": [], "train": []}
    for _ in range(repeats + 1):
        spent, batch = timed(lm.collect, model, tokenizer, examples, config, version=0, generator=generator)
        seconds["collect"].append(spent)
        assert batch.prompt.shape[1] == prompt_length and batch.mask.all() and batch.mask.shape[1] == response_length
        batch.rewards = (torch.arange(batch.rewards.numel()) % 2).view_as(batch.rewards).float()  # every group teaches
        spent, _ = timed(lm.train_step, model, optimizer, batch, config, algorithm=row, generator=generator)
        seconds["train"].append(spent)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def exponent(sizes, seconds) -> float:
    """Slope of log seconds over log size, least squares, over the upper half of the sizes."""
    upper = len(sizes) // 2 if len(sizes) > 2 else 0
    x, y = (torch.tensor(values[upper:], dtype=torch.float64).log() for values in (sizes, seconds))
    return (((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()).item()


def in_words(slope: float) -> str:
    """A growth exponent for people."""
    if math.isnan(slope):
        return "unknown"
    names = ((0.25, "hardly grows"), (0.85, "slower than linear"), (1.15, "linear"), (1.75, "faster than linear"),
             (2.25, "quadratic"))
    return next((name for limit, name in names if slope < limit), "faster than quadratic")


def bench(*, repeats: int, threads: int, base=None, sizes=None, hidden: int = 64, layers: int = 2) -> dict:
    torch.set_num_threads(threads)
    base, sizes = base or BASE, sizes or SIZES
    result = {"machine": machine(), "base": base, "hidden": hidden, "layers": layers, "repeats": repeats,
              "quantities": {}}
    for name, values in sizes.items():
        steps = [measure_step(**{**base, name: value}, hidden=hidden, layers=layers, repeats=repeats)
                 for value in values]
        entry = {"sizes": list(values)}
        for part in ("collect", "train"):
            seconds = [step[part] for step in steps]
            slope = exponent(values, seconds)
            entry[part] = {"seconds": seconds, "exponent": slope, "growth": in_words(slope)}
        result["quantities"][name] = entry
    return result


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each time (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--out", default=RESULTS, help="folder of the result file (default benchmarks/results)")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    result = bench(**options)
    print("base: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in BASE.items()))
    for part in ("collect", "train"):
        print(f"\n{part}")
        table(["quantity", "sizes", "seconds", "exponent", "growth"],
              [[name.replace("_", " "), " ".join(map(str, entry["sizes"])),
                " ".join(f"{s:.3f}" for s in entry[part]["seconds"]),
                f"{entry[part]['exponent']:.2f}", entry[part]["growth"]]
               for name, entry in result["quantities"].items()])
    save("scaling", result, out)


if __name__ == "__main__":
    main()
