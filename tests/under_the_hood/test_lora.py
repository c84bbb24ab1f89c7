"""--lora-rank: only adapters train, the base stands once in memory, resume is bit-equal, model/ is an ordinary model."""

import importlib
import json
import re

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import build_model
from under_the_hood import lora, models, parallel, plan
from under_the_hood.runs import read_metrics

lm = importlib.import_module("06_full_llm_training")
FLAGS = ["--lora-rank", "2", "--algorithm", "grpo", "--sync-interval", "2", "--sync-offset", "1", "--eval-every", "10",
         "--learning-rate", "0.05", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora") / "run"
    lm.main([*tiny_run[2], *FLAGS, "--steps", "5", "--out", str(out)])
    return out


def without_times(path):
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_metrics(path)]


def test_a_resumed_run_is_bit_equal(run, tiny_run, tmp_path):
    out = tmp_path / "run"
    lm.main([*tiny_run[2], *FLAGS, "--steps", "3", "--out", str(out)])
    lm.main(["--resume", "--steps", "5", "--out", str(out)])
    assert without_times(out)[-2:] == without_times(run)[-2:]
    pair = [torch.load(next((folder / "checkpoint").glob("step-*")) / "trainer.pt") for folder in (run, out)]
    assert all(torch.equal(a, pair[1]["sampler"][name]) for name, a in pair[0]["sampler"].items())


def test_the_policy_learns_and_the_base_stays(run, tiny_run):
    base, trained = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_run[0], run / "model"))
    before, after = base.state_dict(), trained.state_dict()
    changed = {re.sub(r"\d+", "N", name) for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.endswith("proj.weight") for name in changed)  # linear layers; no norm, no embedding


def test_the_model_is_the_base_with_its_adapters(run, tiny_run):
    base = AutoModelForCausalLM.from_pretrained(tiny_run[0])
    merged, tokens = AutoModelForCausalLM.from_pretrained(run / "model"), torch.randint(3, 7, (2, 9))
    want = merged(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
    torch.testing.assert_close(adapted(tokens).logits, want, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_holds_adapters_only(run):
    checkpoint = next((run / "checkpoint").glob("step-*"))
    assert not list(checkpoint.glob("model*.safetensors"))
    assert all("lora_" in name for name in torch.load(checkpoint / "trainer.pt")["sampler"])


def test_the_base_weights_exist_once_in_memory_and_the_sampler_is_stale():
    model = build_model("qwen2", vocab_size=40)
    base = sum(weight.numel() for weight in model.parameters())
    lora.add_adapters(model, rank=2)
    sampler = models.copy_for_sampling(model, lm.Config(sync_interval=4, lora_rank=2))
    storages = {w.data_ptr(): w.numel() for m in (model, sampler) for w in m.parameters()}
    adapters = sum(w.numel() for w in model.parameters() if w.requires_grad)
    assert sum(storages.values()) == base + 2 * adapters
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(1.0)
    tokens = torch.randint(3, 40, (1, 5))
    assert not torch.equal(model(tokens).logits, sampler(tokens).logits)
    parallel.copy_weights(model, sampler)
    assert torch.equal(model(tokens).logits, sampler(tokens).logits)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_the_plan_counts_the_adapters(kind):
    model = build_model(kind, vocab_size=40)
    shape = plan.describe(model.config)
    lora.add_adapters(model, rank=3)
    assert 3 * shape.adapter_sides == sum(w.numel() for w in model.parameters() if w.requires_grad)
    config = lm.Config(lora_rank=3, sync_interval=4)
    held, *phases = plan.memory(config, shape, plan.Setting(8)).values()
    assert list(held.values()) == [4 * (shape.parameters + 3 * shape.adapter_sides),
                                   24 * shape.adapter_sides, 12 * shape.adapter_sides]  # weights, moments, the sampler's
    assert phases[0]["gradients of the step before, float32"] == 12 * shape.adapter_sides


@pytest.mark.parametrize("flags, message", [(["--lora-rank", "-1"], "--lora-rank"),
                                            (["--lora-rank", "2", "--shard"], "--shard")])
def test_bad_settings_are_refused_in_one_line(flags, message, capsys):
    with pytest.raises(SystemExit):
        lm.main(flags)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_config_json_has_the_rank(run):
    assert json.loads((run / "config.json").read_text())["lora_rank"] == 2
