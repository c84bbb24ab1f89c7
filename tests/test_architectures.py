"""Every family of causal language models either trains with sampler and trainer equal to the model's own logits, or is refused.

benchmarks/architectures.py builds the tiny models; docs/architectures.md is its table, and is held to it here.
"""

import importlib
import re
import sys

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
architectures = importlib.import_module("architectures")
lm, models = architectures.lm, architectures.models
TABLE = dict(re.findall(r"^\| ([^|]+?) \| `\w+` \| (\w+) \|", (ROOT / "docs/architectures.md").read_text(encoding="utf-8"), re.M))
# One of each kind for the quick suite: plain, windowed, capped, scaled, experts, learned positions, ALiBi, hybrid, recurrent.
QUICK = ("Llama", "Mistral, sliding window", "Gemma 2, soft caps", "Granite", "Cohere", "Mixtral, router logits on", "GPT-2",
         "OPT, layerdrop", "BLOOM", "Qwen3-Next", "Mamba", "RWKV")


def all_families():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in architectures.FAMILIES]


def test_the_table_lists_every_family():
    assert set(TABLE) == set(architectures.FAMILIES)


@pytest.mark.parametrize("name", all_families())
def test_sampler_and_trainer_agree_with_the_models_own_logits_or_the_family_is_refused(name):
    found = architectures.examine(name)
    assert found["engine"] == TABLE[name]
    if found["engine"] != "refused":  # D01, D03, D04: right to 1e-3 nats, and fresh data have ratio 1
        assert found["error"] <= 1e-4 and found["ratio"] <= 1e-3


@pytest.mark.parametrize("name", all_families())
def test_gradient_checkpointing_changes_nothing(name):  # D06
    if TABLE[name] == "refused":
        return
    found = architectures.examine(name, checkpointing=True)
    assert found["engine"] == TABLE[name] and found["error"] <= 1e-4 and found["ratio"] <= 1e-3


def test_a_checkpointed_layerdrop_that_stays_in_the_model_is_noticed(monkeypatch):  # D06: the check itself can fail
    monkeypatch.setattr(models, "RANDOM_NUMBERS", ())
    assert architectures.examine("OPT, layerdrop", checkpointing=True)["engine"] == "refused"


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Granite MoE", "BERT as a decoder", "Mixtral", "GPT-2"])
@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_values_entropies_and_gradients_equal_those_of_single_unpadded_rows(name, engine):
    model = architectures.build(name)
    assert max(architectures.measure(model, lm.ENGINES[engine])) < 1e-5


def test_the_experts_auxiliary_loss_is_no_part_of_the_gradient():
    model = architectures.build("Mixtral, router logits on")
    model.config.output_router_logits = True
    models.leave_out_auxiliary_loss(model)
    plain = architectures.build("Mixtral")
    prompt, prompt_mask = architectures.prompts()
    tokens = torch.randint(3, architectures.VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(3))
    both = []
    for each in (model, plain):
        new, _ = lm.ENGINES["fast"][1](each, prompt, tokens, prompt_mask=prompt_mask)
        both.append(architectures.gradients(each, new))
    assert torch.equal(*both)


def test_a_longrope_model_ends_where_its_frequencies_change():  # D05
    model = architectures.build("Phi-3, longrope")
    assert models.context_length(model) == 12 and model.config.max_position_embeddings == 128


def test_a_soft_cap_on_attention_is_kept_or_the_paged_engine_is_refused():  # D21
    model, (tokenizer, task) = architectures.build("Gemma 2, soft caps"), architectures.character_examples()
    config = lm.Config(engine="paged", group_size=3, max_new_tokens=6)
    try:
        chosen = architectures.engines.choose_engine(model, tokenizer, task, config, lm.ENGINES)
    except architectures.UserError as error:
        assert "paged" in str(error)
    else:
        assert architectures.engines.self_check(model, tokenizer, task, chosen, lm.ENGINES["paged"]) < 1e-3


def test_the_self_check_meets_a_prompt_longer_than_the_sliding_window():
    model, (tokenizer, task) = architectures.build("Mistral, sliding window"), architectures.character_examples()
    found = list(architectures.engines.probes(model, tokenizer, task, lm.Config(max_new_tokens=6)))
    assert len(found) == 2 and found[1][0].shape[1] > models.sliding_window(model) == 6
    lengths = found[0][1].sum(1)
    assert lengths.min() < lengths.max()  # and questions of unlike length


def test_what_bfloat16_changes_is_a_metric_not_a_refusal():
    model, (tokenizer, task) = architectures.build("Gemma 2, soft caps"), architectures.character_examples()
    config = lm.Config(engine="fast", group_size=3, max_new_tokens=6, dtype="bfloat16")
    found = architectures.engines.compute_gap(model, lm.logprobs_fn(model, config), tokenizer, task, config, lm.ENGINES["fast"])
    assert 0 < found["compute_gap_mean"] < found["compute_gap_max"] < 0.5
    assert architectures.engines.compute_gap(model, None, tokenizer, task, lm.Config(dtype="float32"), None) == {}
