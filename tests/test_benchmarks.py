"""The benchmarks run, on tiny sizes, and what they divide by is right: operations, growth exponents, memory."""

import functools
import importlib
import json
import sys

import pytest
import torch
from conftest import ROOT, build_model
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / "benchmarks"))
harness = importlib.import_module("harness")
lm = harness.lm
from under_the_hood import fast, options
from under_the_hood.models import BUILT_IN, load_model
from under_the_hood.tasks import load_task


def matrix_flops(function) -> int:
    """What PyTorch's own counter sees in matrix products; attention has names of its own there."""
    with FlopCounterMode(display=False) as counter:
        function()
    return sum(count for operation, count in counter.get_flop_counts()["Global"].items()
               if operation.__name__ in ("mm", "addmm", "bmm"))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_least_work_of_a_step_is_what_pytorch_counts_without_padding(kind):
    """Two prompts of 3 tokens, two responses of 4 to each: nothing is padded, so the counts are equal."""
    model = build_model(kind, vocab_size=50)
    generator = torch.Generator().manual_seed(0)
    prompt, completion = (torch.randint(3, 50, shape, generator=generator) for shape in ((2, 3), (4, 4)))
    lengths = torch.full((2,), 3), torch.full((2, 2), 4)
    flops, attention = harness.step_flops(model, *lengths), 4 * 2 * 32 * 2 * (6 + 2 * (3 * 3 + 6))

    def train():
        fast.token_logprobs(model, prompt, completion, way="packed")[0].sum().backward()

    assert matrix_flops(train) == flops["train"] - 3 * attention

    def collect():
        fast.generate(model, prompt, torch.ones_like(prompt).bool(), group_size=2, max_new_tokens=4, temperature=1.0,
                      eos_ids={99}, pad_id=0, generator=generator)

    assert matrix_flops(collect) == flops["collect"] - attention


def test_attention_counts_the_pairs_under_the_causal_mask():
    """One prompt token and a response of 3: inputs 1 + 2, so 1 + 2 + 3 pairs, at 4 operations per channel and layer."""
    model = build_model("qwen2", vocab_size=50)
    one = harness.forward_flops(model, tokens=0, pairs=1, logits=0)
    assert one == 4 * 2 * 32
    total = harness.step_flops(model, torch.tensor([1]), torch.tensor([[3]]))["collect"]
    assert total == harness.forward_flops(model, tokens=3, pairs=0, logits=3) + 6 * one


def test_the_products_of_the_layers_are_all_timed():
    """2 operations per weight and token forward, and 4 more backward."""
    model = build_model("qwen2", vocab_size=50)
    weights = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    for backward, times in ((False, 2), (True, 6)):
        products = functools.partial(harness.products_seconds, model, tokens=7, backward=backward, repeats=1)
        counted = matrix_flops(products)
        assert counted == times * weights * 7


def test_the_growth_exponent_of_a_power_law():
    scaling = importlib.import_module("bench_scaling")
    sizes = (2, 4, 8, 16, 32)
    for power, words in ((0, "hardly grows"), (0.5, "slower than linear"), (1, "linear"), (1.5, "faster than linear"),
                         (2, "quadratic")):
        assert scaling.exponent(sizes, [3 * size**power for size in sizes]) == pytest.approx(power)
        assert scaling.in_words(power) == words
    assert scaling.exponent(sizes, [100, 100, 8, 16, 32]) == pytest.approx(1)  # fixed costs at small sizes do not count


def test_scaling_runs(tmp_path):
    scaling = importlib.import_module("bench_scaling")
    base = {"prompts": 2, "group_size": 2, "response_length": 3, "prompt_length": 3, "vocabulary": 64}
    result = scaling.bench(repeats=1, threads=1, base=base, hidden=32, layers=1,
                           sizes={"group_size": (2, 4), "vocabulary": (64, 128)})
    for entry in result["quantities"].values():
        assert all(seconds > 0 for part in ("collect", "train") for seconds in entry[part]["seconds"])


@pytest.mark.slow
def test_logprobs_compares_ways_that_agree(tmp_path):
    flags = "--batch 2 --length 8 --vocabulary 500 --hidden 32 --repeats 1 --threads 1 --out"
    importlib.import_module("bench_logprobs").main([*flags.split(), str(tmp_path)])
    result = json.loads((tmp_path / "logprobs.json").read_text())
    assert result["one_copy_bytes"] == 4 * 2 * 8 * 500 and result["machine"]["torch"] == torch.__version__
    measured = {way: row for way, row in result["ways"].items() if "seconds" in row}
    assert {"ours", "plain"} <= set(measured)
    assert all(row["difference_to_plain"] < 1e-5 and row["extra_peak_bytes"] >= 0 for row in measured.values())
    assert all("trl" in row["not_measured"] for row in result["ways"].values() if "seconds" not in row)


@pytest.mark.slow
def test_the_gpu_check_runs_on_tiny_shapes(tiny_run, tmp_path):
    flags = " ".join([*tiny_run[2], "--steps", "2"])
    importlib.import_module("gpu_check").main(["--smoke", "--learn", flags, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert all(0 <= result["learn"][when] <= 1 for when in ("before", "after"))
    assert 0 < result["learn"]["self_check_bfloat16"] < 0.5
    for shape in ("0.5b", "1.5b"):
        assert result[shape]["train_tokens_per_second"] > 0 and 0 < result[shape]["mfu"] < 1
        for engine in ("fast", "paged"):
            assert result[shape]["rollout"][engine]["logprob_difference_max"] < 0.5, result[shape]["rollout"][engine]
    assert 0 < result["paper_run"]["hours"] < result["paper_run"]["hours_at_1024_tokens"]


def test_the_gpu_check_knows_the_model_that_it_will_ask_for():
    """Its default flags are ones that 06 accepts, so that the minutes on a GPU are not lost to a typing error."""
    check = importlib.import_module("gpu_check")
    config = check.parse(check.LEARN)
    options.validate(config, lm.ALGORITHMS, lm.try_loss)
    assert config.model == "small"
    small = BUILT_IN["small"]
    hidden, inner = small["hidden_size"], small["intermediate_size"]
    assert 24e6 < small["num_hidden_layers"] * (4 * hidden**2 + 3 * hidden * inner) < 27e6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so the check would run in full")
def test_the_gpu_check_refuses_a_machine_without_a_gpu(capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("gpu_check").main([])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--smoke" in error and error.count("\n") == 1


def test_our_side_of_the_step_benchmark_is_a_step_of_the_trainer(tiny_run):
    bench = importlib.import_module("bench_rl_step")
    config = lm.Config(model=str(tiny_run[0]), task=str(tiny_run[1]), algorithm="grpo", prompts_per_step=2,
                       group_size=3, max_new_tokens=2)
    model, tokenizer = load_model(config.model, device="cpu")
    before = [p.detach().clone() for p in model.parameters()]
    step = bench.OurTrainer(config, model, tokenizer, load_task(config)).step(1)
    assert step["seconds"] == pytest.approx(step["collect"] + step["train"])
    assert step["flops"] > 0 and 0 <= step["reward"] <= 1
    assert 2 <= step["tokens"] <= 2 * 8 + 2 * 3  # two prompts, and of each response all but the last token
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before)) or step["reward"] in (0, 1)


def test_trl_is_asked_for_the_same_step(tmp_path):
    pytest.importorskip("trl", reason="TRL is the other side of the step benchmark, not a dependency of the project")
    bench = importlib.import_module("bench_rl_step")
    arguments = bench.trl_config(lm.Config(), steps=3, folder=str(tmp_path))
    assert (arguments.per_device_train_batch_size, arguments.num_generations) == (256, 8)
    assert arguments.max_completion_length == 8
    assert arguments.beta == 0 and arguments.top_k == 0 and not arguments.gradient_checkpointing
