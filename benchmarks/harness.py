"""What the benchmarks share: the training script, counts of operations, this machine in words, result files."""

import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is worth a download
sys.path.insert(0, str(ROOT))
lm = importlib.import_module("06_full_llm_training")  # before torch: it says how waiting threads wait
torch = lm.torch
from under_the_hood.runs import write_text

# ---------------------------------------------------------------- floating-point operations


def forward_flops(model, *, tokens: int, pairs: int, logits: int) -> int:
    """Floating-point operations of a forward pass: 2 per weight and token, 4 per (query, key) pair and head channel.

    tokens: that run through the body; pairs: (query, key) pairs under the causal mask; logits: positions that reach
    the head. Norms, activations, softmax and the rotation of positions are left out, as is usual.
    """
    config = model.config.get_text_config()
    weights = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return 2 * weights * tokens + attention * pairs + 2 * model.get_output_embeddings().weight.numel() * logits


def step_flops(model, prompt_lengths, response_lengths) -> dict:
    """The work of one on-policy step, {"collect", "train"}, from the token counts (P,), (P, K); no padding counts.

    A prompt runs once for its group. The last token of a response predicts nothing, so it does not run. A backward
    pass costs twice its forward pass. Each response counts in full; where responses begin alike, 06 does less.
    """
    prompt, response = prompt_lengths.long(), response_lengths.long()
    inputs = response - 1
    prompt_pairs = (prompt * (prompt + 1) // 2).sum()
    response_pairs = (inputs * prompt[:, None] + inputs * (inputs + 1) // 2).sum()
    body = {"tokens": int(prompt.sum() + inputs.sum()), "pairs": int(prompt_pairs + response_pairs)}
    return {"collect": forward_flops(model, **body, logits=len(prompt) + int(inputs.sum())),
            "train": 3 * forward_flops(model, **body, logits=int(response.sum()))}


def rollout_flops(model, batch) -> dict:
    """`step_flops` of a Rollout."""
    return step_flops(model, batch.prompt_mask.sum(1), batch.mask.sum(1).view_as(batch.rewards))


def matrix_rate(device="cpu", *, size: int = 2048, dtype=None, repeats: int = 9) -> float:
    """Floating-point operations per second of one large square matrix product, the median of some."""
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    out = left @ right
    seconds = [timed(torch.matmul, left, right, out=out, device=device)[0] for _ in range(repeats)]
    return 2 * size**3 / statistics.median(seconds)


def products_seconds(model, *, tokens: int, backward: bool, repeats: int = 9) -> float:
    """Seconds of the matrix products of the body's linear layers, one after the other, on so many tokens at once.

    backward: the two products of the backward pass, too. The median of some runs. Attention, the head and all that is
    between the products are left out.
    """
    weights = [module.weight.detach() for module in model.base_model.modules() if isinstance(module, torch.nn.Linear)]
    inputs, outputs = ([torch.randn(tokens, weight.shape[side]) for weight in weights] for side in (1, 0))

    def products():
        for weight, x, y in zip(weights, inputs, outputs):
            torch.matmul(x, weight.T)
            if backward:
                torch.matmul(y, weight)
                torch.matmul(y.T, x)

    return statistics.median(timed(products)[0] for _ in range(repeats))


# ---------------------------------------------------------------- time


def timed(function, *arguments, device="cpu", **options):
    """(seconds, result) of function(*arguments, **options), the work it left on the device included."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    result = function(*arguments, **options)
    wait()
    return time.perf_counter() - began, result


def quartiles(values) -> list:
    """[lower quartile, median, upper quartile]."""
    return torch.quantile(torch.tensor(values, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75]).double()).tolist()


# ---------------------------------------------------------------- models


def random_model(*, vocab_size: int, hidden_size: int, layers: int, heads: int, kv_heads: int, intermediate_size: int,
                 context: int = 4096, device="cpu", seed: int = 0):
    """A Qwen2 with random float32 weights and tied embeddings. It ends no response: no id is its end of text."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=intermediate_size, max_position_embeddings=context,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(seed)
    with torch.device(device):
        return Qwen2ForCausalLM(config).eval()


# ---------------------------------------------------------------- results


def machine(device="cpu") -> dict:
    """Where and with what this was measured."""
    versions = {}
    for package in ("torch", "transformers", "trl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    device = torch.device(device)
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", **versions}


def cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(header: list, rows: list) -> None:
    """Print rows under a header, columns aligned."""
    rows = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    for row in rows[:1] + [["-" * width for width in widths]] + rows[1:]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def save(name: str, result: dict, directory=RESULTS) -> None:
    """Write DIR/name.json."""
    path = pathlib.Path(directory) / f"{name}.json"
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"results: {path}")
