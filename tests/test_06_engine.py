"""The paged engine (transformers' continuous batching) samples what the plain loop samples, and reports the right log-probabilities."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import build_model

lm = importlib.import_module("06_full_llm_training")
OPTIONS = {"group_size": 4, "max_new_tokens": 6, "eos_ids": {2, 3}, "pad_id": 0}


@pytest.fixture(scope="module")
def prompts():
    """Left-padded prompts of 2, 4 and 1 tokens."""
    return torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10], [0, 0, 0, 11]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_its_log_probabilities_are_the_trainers(kind, prompts):
    model = build_model(kind, vocab_size=20)
    generator = torch.Generator().manual_seed(0)
    tokens, mask, logprobs = lm.generate_paged(model, *prompts, temperature=1.4, generator=generator, **OPTIONS)
    assert tokens.shape == mask.shape == logprobs.shape and len(tokens) == 12
    trainers, _ = lm.token_logprobs(model, prompts[0], tokens, prompt_mask=prompts[1], mask=mask, temperature=1.4)
    assert torch.allclose(logprobs, trainers, atol=1e-5)
    assert torch.equal(mask, lm.completion_mask(tokens, eos_ids=OPTIONS["eos_ids"]) & mask) and mask[:, 0].all()
    ended = (torch.isin(tokens, torch.tensor([2, 3])) & mask).any(1)
    assert (ended | (mask.sum(1) == 6)).all() and ended.any()
    again, *_ = lm.generate_paged(model, *prompts, temperature=1.4, generator=torch.Generator().manual_seed(0), **OPTIONS)
    other, *_ = lm.generate_paged(model, *prompts, temperature=1.4, generator=generator, **OPTIONS)
    assert torch.equal(tokens, again) and not (tokens.shape == other.shape and torch.equal(tokens, other))


def test_it_samples_the_models_distribution(bigram, prompts):
    """400 first tokens after one token, at temperature 1: within five standard errors of the table."""
    model = bigram({(5, 6): -0.5, (5, 7): -1.5}, vocab_size=10)
    prompt = torch.tensor([[i, 8, 5] for i in range(8)])  # only the last token matters
    tokens, _, _ = lm.generate_paged(model, prompt, torch.ones_like(prompt).bool(), group_size=50, max_new_tokens=2, pad_id=0,
                                     temperature=1.0, eos_ids={2}, generator=torch.Generator().manual_seed(1))
    for token, chance in ((6, 0.6065), (7, 0.2231)):
        share = (tokens[:, 0] == token).float().mean().item()
        assert abs(share - chance) < 5 * (chance * (1 - chance) / 400) ** 0.5


def test_a_run_samples_with_it(tiny_run, tmp_path):
    _, _, flags = tiny_run
    lm.main([*flags, "--engine", "paged", "--steps", "2", "--sync-interval", "2", "--out", str(tmp_path / "run")])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["ratio_max"] == pytest.approx(1, abs=1e-4) and lines[2]["staleness"] == 1


def test_auto_is_plain_without_a_gpu(tiny_run):
    model, tokenizer = lm.load_model(str(tiny_run[0]), device="cpu")
    config = lm.Config(model=str(tiny_run[0]), task=str(tiny_run[1]), max_new_tokens=2)
    assert lm.working_engine(model, tokenizer, lm.load_task(config), config).engine == "plain"


@pytest.mark.parametrize("works", [True, False])
def test_auto_on_a_gpu_is_paged_if_that_passes_the_check_and_plain_if_not(monkeypatch, capsys, works):
    checked, attention = [], []

    def check(model, tokenizer, task, config):
        checked.append(config.engine)
        if config.engine == "paged" and not works:
            raise RuntimeError("no kernel\nfor this device")

    class OnGpu:
        config = SimpleNamespace(_attn_implementation="sdpa")
        set_attn_implementation = attention.append

        def parameters(self):
            return iter([SimpleNamespace(device=torch.device("cuda"))])

    monkeypatch.setattr(lm, "self_check", check)
    chosen = lm.working_engine(OnGpu(), None, None, lm.Config()).engine
    if works:
        assert chosen == "paged" and checked == ["paged"] and not attention
    else:
        assert chosen == "plain" and checked == ["paged", "plain"] and attention == ["sdpa"]
        assert "no kernel for this device" in capsys.readouterr().out


def test_lost_responses_are_an_error(monkeypatch, prompts):
    model = build_model("qwen2", vocab_size=20)
    monkeypatch.setattr(model, "generate_batch", lambda *args, **options: {})
    with pytest.raises(lm.UserError, match="--engine plain"):
        lm.generate_paged(model, *prompts, temperature=1.0, generator=torch.Generator(), **OPTIONS)
