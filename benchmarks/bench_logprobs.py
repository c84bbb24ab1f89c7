#!/usr/bin/env python3
"""Log-probabilities of sampled tokens, forward and backward: what a head in recomputed chunks costs and saves.

Four ways to the same (B, T) numbers, on one small Qwen2 with the vocabulary of Qwen2.5:

    ours               fast.token_logprobs: states reach the head in chunks, backward recomputes each; entropy too
    plain              log_softmax of all logits, then gather
    TRL, selective     TRL's selective_log_softmax of all logits
    TRL, fused head    TRL's add_fused_lm_head, which is what its GRPOTrainer uses now; entropy too, where it exists

The ways take turns within one process. Peak memory (VmHWM, Linux) is measured for each in a process of its own, less
what that process held after a warm-up of a few tokens, as a share of one float32 copy of all logits.

Run:  python benchmarks/bench_logprobs.py      about two minutes on 2 idle cores and 12 GB; TRL's rows need trl
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from harness import RESULTS, machine, quartiles, random_model, save, table, timed, torch

from under_the_hood import fast
from under_the_hood.errors import one_line


def ours(model, tokens):
    return fast.token_logprobs(model, tokens[:, :1], tokens[:, 1:])[0]


def plain(model, tokens):
    return model(input_ids=tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def trl_selective(model, tokens):
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:])


def trl_fused(model, tokens):
    from trl.trainer.utils import add_fused_lm_head

    if not hasattr(model, "fused_head"):  # it changes the model's forward, for calls with fused_lm_head=True only
        add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        model.fused_head = True
    return model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs


WAYS = {"ours": ours, "plain": plain, "TRL, selective": trl_selective, "TRL, fused head": trl_fused}


def forward_backward(way: str, model, tokens):
    """The log-probabilities, (B, T); the gradients of their mean are thrown away."""
    logprobs = WAYS[way](model, tokens)
    logprobs.mean().backward()
    model.zero_grad()
    return logprobs.detach()


def workload(*, batch: int, length: int, vocabulary: int, hidden: int):
    """A model whose head outweighs all else, and (B, T + 1) tokens."""
    heads = max(1, hidden // 32)
    model = random_model(vocab_size=vocabulary, hidden_size=hidden, layers=1, heads=heads, kv_heads=heads,
                         intermediate_size=2 * hidden)
    return model, torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS now, VmHWM at its highest."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field + ":")))


def extra_peak(way: str, size: dict) -> int:
    """Bytes that one forward and backward pass needs on top of model and libraries. For a fresh process."""
    model, tokens = workload(**size)
    forward_backward(way, model, tokens[:, :4])
    before = memory("VmRSS")
    forward_backward(way, model, tokens)
    return memory("VmHWM") - before


def extra_peak_in_a_process(way: str, size: dict, threads: int):
    """extra_peak in a process of its own, or None where the system does not tell."""
    if not pathlib.Path("/proc/self/status").exists():
        return None
    command = [sys.executable, __file__, "--measure-memory", way, "--threads", str(threads)]
    command += [word for name, value in size.items() for word in (f"--{name}", str(value))]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def unavailable(way: str) -> str | None:
    """Why a way cannot be measured here, or None."""
    try:
        forward_backward(way, *workload(batch=1, length=3, vocabulary=11, hidden=32))
    except ImportError as error:
        return one_line(error)


def bench(*, repeats: int, threads: int, **size) -> dict:
    torch.set_num_threads(threads)
    reasons = {way: unavailable(way) for way in WAYS}
    ways = [way for way in WAYS if not reasons[way]]
    model, tokens = workload(**size)
    seconds, reference, errors = {way: [] for way in ways}, None, {}
    for _ in range(repeats):
        for way in ["plain", *(way for way in ways if way != "plain")]:
            spent, logprobs = timed(forward_backward, way, model, tokens)
            seconds[way].append(spent)
            reference = logprobs if reference is None else reference
            errors[way] = (logprobs - reference).abs().max().item()
    one_copy = 4 * size["batch"] * size["length"] * size["vocabulary"]
    result = {"machine": machine(), **size, "repeats": repeats, "one_copy_bytes": one_copy, "ways": {}}
    for way in WAYS:
        if reasons[way]:
            result["ways"][way] = {"not_measured": reasons[way]}
            continue
        peak = extra_peak_in_a_process(way, size, threads)
        result["ways"][way] = {"seconds": statistics.median(seconds[way]), "quartiles": quartiles(seconds[way]),
                               "ratio_to_plain": statistics.median(
                                   a / b for a, b in zip(seconds[way], seconds["plain"])),
                               "extra_peak_bytes": peak, "peak_in_copies": None if peak is None else peak / one_copy,
                               "difference_to_plain": errors[way]}
    return result


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (("batch", 8, "B, responses"), ("length", 512, "T, tokens of each"),
                                ("vocabulary", 151_936, "V"), ("hidden", 64, "width of the model"),
                                ("repeats", 5, "measurements of each time"),
                                ("threads", 2, "threads of torch")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--measure-memory", choices=WAYS, help="only print this way's peak in bytes; used from inside")
    parser.add_argument("--out", default=RESULTS, help="folder of the result file (default benchmarks/results)")
    options = vars(parser.parse_args(argv))
    out, way = options.pop("out"), options.pop("measure_memory")
    if way:
        torch.set_num_threads(options.pop("threads"))
        del options["repeats"]
        return print(extra_peak(way, options))
    result = bench(**options)
    print(f"one copy of the logits ({options['batch']} × {options['length']} × {options['vocabulary']}): "
          f"{result['one_copy_bytes'] / 1e9:.2f} GB")
    table(["way", "median s", "against plain", "extra peak, GB", "in copies", "difference"],
          [[way, row["seconds"], row["ratio_to_plain"], *(["not known"] * 2 if row["extra_peak_bytes"] is None else
            [row["extra_peak_bytes"] / 1e9, row["peak_in_copies"]]), row["difference_to_plain"]]
           if "seconds" in row else [way, row["not_measured"], "", "", "", ""] for way, row in result["ways"].items()])
    save("logprobs", result, out)


if __name__ == "__main__":
    main()
