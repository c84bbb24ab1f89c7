"""The engine of a run is one that samples and scores one distribution on this model, checked before the first step.

Continuous batching, the paged engine, samples what the plain loop samples, with the trainer's log-probabilities.
"""

import functools
import importlib
from types import SimpleNamespace

import pytest
import torch
from conftest import build_model, left_padded
from under_the_hood import engines, fast, paged
from under_the_hood.engines import choose_engine, compute_gap, self_check
from under_the_hood.errors import UserError
from under_the_hood.models import load_model, recompute_activations
from under_the_hood.runs import read_metrics
from under_the_hood.tasks import Example, Task, load_task

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
EXAMPLES = [Example("What is 2 + 3?", "5"), Example("And 40 + 2? Think.", "42"), Example("1 + 1?", "2")]
TASK = Task("addition", EXAMPLES, EXAMPLES)


def config(**options):
    return lm.Config(**{"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 5} | options)


# ------------------------------------------------------------------------------------------------------- self-check


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize("name", ["plain", "uncached", "fast"])
def test_the_self_check_passes_and_reports(loaded, capsys, kind, name):
    assert self_check(*loaded(kind, "bos"), TASK, config(), lm.ENGINES[name]) < 1e-4
    assert "self-check" in capsys.readouterr().out


def faulty_trainer(fault):
    """fast.token_logprobs with one silent mistake."""
    def token_logprobs(model, prompt, completion, **options):
        if fault == "temperature":
            options["temperature"] = 1.3
        if fault == "positions":
            options["prompt_mask"] = torch.ones_like(prompt).bool()
        if fault == "shift":
            completion = completion.roll(1, 1)
        logprobs, entropy = fast.token_logprobs(model, prompt, completion, **options)
        return (logprobs + 0.002 if fault == "two thousandths" else logprobs), entropy
    return token_logprobs


def faulty_sampler(fault):
    """lm.generate with one silent mistake."""
    def generate(model, prompt, prompt_mask, **options):
        if fault == "temperature":
            options["temperature"] = 1.3 * options["temperature"]
        if fault == "heat":  # the mistake shows at AEPO's temperatures alone
            options["temperature"] = min(options["temperature"], 1.0)
        if fault == "positions":
            prompt_mask = torch.ones_like(prompt).bool()
        return lm.generate(model, prompt, prompt_mask, **options)
    return generate


@pytest.mark.parametrize("fault", ["temperature", "positions", "shift", "two thousandths"])
def test_the_self_check_finds_silent_faults_of_the_trainer(loaded, fault):
    with pytest.raises(UserError, match="its trainer differs from the model's own logits"):
        self_check(*loaded("gpt2", "bos"), TASK, config(), (fast.generate, faulty_trainer(fault)))


@pytest.mark.parametrize("fault", ["temperature", "positions"])
def test_the_self_check_finds_faults_that_sampler_and_trainer_share(loaded, fault):
    """They agree with each other, so that every ratio is 1; the model's own logits of unpadded rows tell."""
    def token_logprobs(model, prompt, completion, **options):
        if fault == "positions":
            options["prompt_mask"] = torch.ones_like(prompt).bool()
        else:
            options["temperature"] = 1.3 * options["temperature"]
        return lm.token_logprobs(model, prompt, completion, **options)

    with pytest.raises(UserError, match="its sampler differs from the model's own logits"):
        self_check(*loaded("gpt2", "bos"), TASK, config(), (faulty_sampler(fault), token_logprobs))


def test_the_self_check_samples_at_every_temperature_of_the_row(loaded):
    engine = faulty_sampler("heat"), lm.token_logprobs
    assert self_check(*loaded("gpt2", "bos"), TASK, config(), engine) < 1e-4
    with pytest.raises(UserError, match="its sampler differs"):
        self_check(*loaded("gpt2", "bos"), TASK, config(algorithm="aepo"), engine)


def test_the_self_check_runs_every_way_that_the_trainer_may_take(loaded, monkeypatch):
    """Responses of a run may be long, and then take another way than those of the check."""
    right = fast.shared_prompt_states

    def wrong(*arguments):
        states, chosen = right(*arguments)
        return states.roll(1, 0), chosen

    monkeypatch.setattr(fast, "shared_prompt_states", wrong)
    with pytest.raises(UserError, match="its trainer shared differs"):
        self_check(*loaded("llama", "bos"), TASK, config(), lm.ENGINES["fast"])


def test_the_self_check_runs_behind_the_window_of_a_layer(monkeypatch, loaded):
    """All questions are shorter than the window; those of a run with a long budget pass it."""
    tokenizer = loaded("qwen2", "bos")[1]
    window = {"use_sliding_window": True, "sliding_window": 60, "max_window_layers": 0}
    model = build_model("qwen2", vocab_size=len(tokenizer), eos_token_id=1, **window)
    monkeypatch.setattr(fast, "packable", lambda _: True)  # a mask of ours in place of the window
    engine = lm.ENGINES["fast"]
    assert self_check(model, tokenizer, TASK, config(), engine) < 1e-4
    with pytest.raises(UserError, match="its trainer packed differs .* prompts of 3 to 63 tokens"):
        self_check(model, tokenizer, TASK, config(max_new_tokens=50), engine)


def test_the_self_check_finds_a_recomputation_that_changes_the_gradient(loaded):
    """Dropout that gradient checkpointing switched on again would do that."""
    tokenizer = loaded("gpt2", "bos")[1]
    model = build_model("gpt2", vocab_size=len(tokenizer), eos_token_id=1)
    recompute_activations(model)
    assert self_check(model, tokenizer, TASK, config(), lm.ENGINES["fast"]) < 1e-4
    model.transformer.h[0].mlp.dropout.p = 0.5
    with pytest.raises(UserError, match="differs from the model's own logits"):
        self_check(model, tokenizer, TASK, config(), lm.ENGINES["fast"])


# ------------------------------------------------------------------------------------------------------ which engine


@pytest.mark.parametrize("broken, chosen", [([], "fast"), (["fast"], "plain"), (["fast", "plain"], "uncached")])
def test_auto_takes_the_fastest_that_passes_and_says_what_did_not(loaded, capsys, broken, chosen):
    table = lm.ENGINES | {name: (lm.generate, faulty_trainer("shift")) for name in broken}
    assert choose_engine(*loaded("gpt2", "bos"), TASK, config(), table).engine == chosen
    said = capsys.readouterr().out
    assert [line.split()[1] for line in said.splitlines() if "does not suit" in line] == broken


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_a_model_that_no_wanted_engine_suits_is_refused(loaded, engine):
    table = dict.fromkeys(lm.ENGINES, (lm.generate, faulty_trainer("shift")))
    with pytest.raises(UserError, match=f"GPT2LMHeadModel cannot be trained here with --engine {engine}: its trainer"):
        choose_engine(*loaded("gpt2", "bos"), TASK, config(engine=engine), table)


@pytest.mark.parametrize("works", [True, False])
def test_auto_on_a_gpu_is_paged_if_that_passes_and_else_fast(monkeypatch, capsys, works):
    checked, attention = [], []

    def check(model, tokenizer, task, config, engine):
        checked.append(engine)
        if engine == "paged" and not works:
            raise RuntimeError("no kernel\nfor this device")

    class OnGpu:
        device, config = torch.device("cuda"), SimpleNamespace(_attn_implementation="sdpa")
        set_attn_implementation = attention.append

    monkeypatch.setattr(engines, "self_check", check)
    table = {name: name for name in lm.ENGINES}
    chosen = choose_engine(OnGpu(), None, None, lm.Config(), table).engine
    if works:
        assert chosen == "paged" and checked == ["paged"] and not attention
    else:
        assert chosen == "fast" and checked == ["paged", "fast"] and attention == ["sdpa"]
        assert "no kernel for this device" in capsys.readouterr().out


def test_what_bfloat16_changes_is_measured_and_nothing_in_float32(loaded):
    model, tokenizer = loaded("llama", "bos")
    token_logprobs = functools.partial(fast.token_logprobs, model)
    assert compute_gap(model, token_logprobs, tokenizer, TASK, config(), lm.ENGINES["fast"]) == {}
    gap = compute_gap(model, token_logprobs, tokenizer, TASK, config(dtype="bfloat16"), lm.ENGINES["fast"])
    assert 0 < gap["compute_gap_mean"] <= gap["compute_gap_max"] < 1
    faulty = functools.partial(faulty_trainer("shift"), model)
    worse = compute_gap(model, faulty, tokenizer, TASK, config(dtype="bfloat16"), lm.ENGINES["fast"])
    assert worse["compute_gap_mean"] > 5 * gap["compute_gap_mean"]


# ------------------------------------------------------------------------------------------------------------ paged

PAGED = {"group_size": 4, "max_new_tokens": 6, "eos_ids": {2, 3}, "pad_id": 0}
PROMPTS = left_padded([[5, 6], [7, 8, 9, 10], [11]])


def test_paged_log_probabilities_are_the_trainers():
    model = build_model("qwen2", vocab_size=20)
    generator = torch.Generator().manual_seed(0)
    tokens, mask, logprobs = paged.generate(model, *PROMPTS, temperature=1.4, generator=generator, **PAGED)
    assert tokens.shape == mask.shape == logprobs.shape and len(tokens) == 12
    trainers, _ = lm.token_logprobs(model, PROMPTS[0], tokens, prompt_mask=PROMPTS[1], mask=mask, temperature=1.4)
    assert torch.allclose(logprobs, trainers, atol=1e-5)
    assert torch.equal(mask, lm.completion_mask(tokens, eos_ids=PAGED["eos_ids"]) & mask) and mask[:, 0].all()
    ended = (torch.isin(tokens, torch.tensor([2, 3])) & mask).any(1)
    assert (ended | (mask.sum(1) == 6)).all() and ended.any() and (tokens[~mask] == 0).all()
    again, *_ = paged.generate(model, *PROMPTS, temperature=1.4, generator=torch.Generator().manual_seed(0), **PAGED)
    other, *_ = paged.generate(model, *PROMPTS, temperature=1.4, generator=generator, **PAGED)
    assert torch.equal(tokens, again) and not (tokens.shape == other.shape and torch.equal(tokens, other))


def test_paged_samples_the_models_distribution(bigram):
    """400 first tokens after one token, at temperature 1: within five standard errors of the table."""
    model = bigram({(5, 6): -0.5, (5, 7): -1.5}, vocab_size=10)
    prompt = torch.tensor([[i, 8, 5] for i in range(8)])  # only the last token matters
    tokens, _, _ = paged.generate(model, prompt, torch.ones_like(prompt).bool(), group_size=50, max_new_tokens=2,
                                  pad_id=0, temperature=1.0, eos_ids={2}, generator=torch.Generator().manual_seed(1))
    for token, chance in ((6, 0.6065), (7, 0.2231)):
        share = (tokens[:, 0] == token).float().mean().item()
        assert abs(share - chance) < 5 * (chance * (1 - chance) / 400) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["paged", "plain"])
def test_a_run_samples_and_trains_with_it(tiny_run, quick, tmp_path, engine):
    """Stale in step 2; the evaluations take the greedy answers from the same engine."""
    _, _, flags = tiny_run
    lm.main([*flags, "--engine", engine, "--steps", "2", "--sync-interval", "2", "--out", str(tmp_path / "run")])
    lines = read_metrics(tmp_path / "run")
    assert lines[1]["ratio_max"] == pytest.approx(1, abs=1e-4) and lines[2]["staleness"] == 1


def test_auto_is_fast_without_a_gpu(tiny_run):
    model, tokenizer = load_model(str(tiny_run[0]), device="cpu")
    settings = lm.Config(model=str(tiny_run[0]), task=str(tiny_run[1]), max_new_tokens=2)
    assert choose_engine(model, tokenizer, load_task(settings), settings, lm.ENGINES).engine == "fast"


def test_greedy_answers_and_lost_responses():
    model = build_model("qwen2", vocab_size=20)
    greedy = paged.generate(model, *PROMPTS, temperature=0, generator=None, **PAGED)
    assert torch.equal(greedy[0], lm.generate(model, *PROMPTS, temperature=0, generator=None, **PAGED)[0])
    model.generate_batch = lambda *_, **__: {}
    with pytest.raises(UserError, match="--engine plain"):
        paged.generate(model, *PROMPTS, temperature=1.0, generator=torch.Generator(), **PAGED)
