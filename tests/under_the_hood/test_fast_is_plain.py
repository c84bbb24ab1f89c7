"""The fast functions are the plain ones of 06: values, gradients, entropies, greedy and sampled tokens.

What the plain ones are is proved in tests/test_06_train.py, against references that know neither.
"""

import copy
import importlib

import pytest
import torch
from conftest import build_model, left_padded, right_padded
from under_the_hood import fast
from under_the_hood.models import recompute_activations

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
VOCABULARY = 40
KINDS = ["gpt2", "llama", "qwen2"]
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
WAYS = ["packed", "shared", "whole", "recomputed"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def models():
    """In float64, so that what two ways round differently is far below every tolerance."""
    return {kind: build_model(kind, vocab_size=VOCABULARY).double() for kind in KINDS}


def alike(group_size, longest, seed):
    """Responses of few tokens, so that some of a group begin alike, one is another's beginning, and two are equal."""
    draw = generator(seed)
    responses = [[torch.randint(20, 23, (int(n),), generator=draw).tolist()
                  for n in torch.randint(1, longest + 1, (group_size,), generator=draw)] for _ in PROMPTS]
    if group_size > 2:
        responses[0][-2:] = [responses[0][0], responses[0][0] + [20, 21]]
    return [response for group in responses for response in group]


def uneven():
    """40 short responses, 20 of medium length and 4 long ones in each group: short ones leave, twice."""
    draw = generator(4)
    lengths = [2] * 30 + [4] * 10 + [25] * 20 + [60] * 4
    return [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for _ in PROMPTS for n in lengths]


BATCHES = {  # responses, temperature, chunk size, more pads than needed, the id of padding
    "one-each": (alike(1, 5, 0), 1.0, None, 0, 0),
    "two-cold-chunks": (alike(2, 4, 1), .7, 5, 1, 2),
    "six-hot-one-by-one": (alike(6, 6, 2), 2.0, 1, 3, 21),  # a pad that is also a word of the responses
    "one-token": ([[20], [2], [21], [20], [2], [23]], 1.0, 3, 2, 0),
    "uneven": (uneven(), 1.0, None, 0, 0),
}


def found(model, function, responses, temperature, pads, pad, **options):
    """(log-probabilities, entropies, mask, gradients) of a random weighting of the log-probabilities."""
    prompt, prompt_mask = left_padded(PROMPTS, pads)
    completion, mask = right_padded(responses, pads, pad)
    logprobs, entropy = function(model, prompt, completion, prompt_mask=prompt_mask, mask=mask, temperature=temperature,
                                 **options)
    assert logprobs.shape == entropy.shape == mask.shape and logprobs.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    weights = torch.randn(mask.shape, generator=generator(1))
    gradients = torch.autograd.grad((logprobs * weights).sum(), list(model.parameters()))
    return logprobs.detach(), entropy, mask, gradients


@pytest.fixture(scope="module")
def plain(models):
    """(kind, name of BATCHES) → what the plain function finds, made once."""
    made = {}

    def get(kind, name):
        if (kind, name) not in made:
            responses, temperature, _, pads, pad = BATCHES[name]
            made[kind, name] = found(models[kind], lm.token_logprobs, responses, temperature, pads, pad)
        return made[kind, name]
    return get


def in_the_way(models, kind, way):
    """(model, the way's name): for "recomputed" a model that recomputes, and had dropout before."""
    if way != "recomputed":
        return models[kind], way
    model = copy.deepcopy(models[kind])
    for module in model.modules():  # dropout that must not act
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    recompute_activations(model)
    return model, "auto"


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind, way", [("gpt2", way) for way in WAYS] + [("llama", "shared"), ("llama", "packed"),
                                                                         ("qwen2", "packed"), ("qwen2", "recomputed")])
def test_values_entropies_and_gradients_are_the_plain_ones(models, plain, kind, way, name):
    """Three left-padded prompts of unequal length, and every way in which fast makes its hidden states."""
    responses, temperature, chunk_size, pads, pad = BATCHES[name]
    model, way = in_the_way(models, kind, way)
    expected = plain(kind, name)
    logprobs, entropy, mask, gradients = found(model, fast.token_logprobs, responses, temperature, pads, pad, way=way,
                                               chunk_size=chunk_size)
    assert not model.training or model is not models[kind]
    assert torch.allclose(logprobs, expected[0], atol=1e-5, rtol=0) and (logprobs[~mask] == 0).all()
    assert torch.allclose(entropy, expected[1], atol=1e-4, rtol=0) and (entropy[~mask] == 0).all()
    for ours, theirs in zip(gradients, expected[3]):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1e-3)


def sampled(function, model, *, temperature, eos, group_size, tokens=10, seed=0, pads=2):
    return function(model, *left_padded(PROMPTS, pads), group_size=group_size, max_new_tokens=tokens,
                    temperature=temperature, eos_ids=eos, pad_id=0, generator=generator(seed))


MANY_ENDS = set(range(1, VOCABULARY, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eos", [set(), {2}, MANY_ENDS], ids=["no-end", "one-end", "many-ends"])
@pytest.mark.parametrize("group_size", [1, 4])
def test_greedy_tokens_masks_widths_and_log_probabilities_are_equal(models, kind, eos, group_size):
    slow, quick = (sampled(function, models[kind], temperature=0.0, eos=eos, group_size=group_size)
                   for function in (lm.generate, fast.generate))
    assert torch.equal(slow[0], quick[0]) and torch.equal(slow[1], quick[1])
    assert torch.allclose(slow[2], quick[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [.7, 1.0])
@pytest.mark.parametrize("group_size", [1, 5])
def test_where_none_ends_early_the_same_draws_give_the_same_responses(models, kind, temperature, group_size):
    """Both draw once for each response and step. (When finished responses leave, fast draws for the others alone.)"""
    slow, quick = (sampled(function, models[kind], temperature=temperature, eos=set(), group_size=group_size, seed=5)
                   for function in (lm.generate, fast.generate))
    assert torch.equal(slow[0], quick[0]) and slow[1].all() and quick[1].all()
    assert torch.allclose(slow[2], quick[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["plain", "fast"])
@pytest.mark.parametrize("temperature, eos", [(.7, {2, 5, 7}), (1.0, MANY_ENDS), (1.5, {2})])
def test_what_either_samples_has_the_log_probabilities_of_both_trainers(models, kind, sampler, temperature, eos):
    """Many rows that end at many places, so that finished rows leave the batch and the cache is cut again and again."""
    model, sample = models[kind], {"plain": lm.generate, "fast": fast.generate}[sampler]
    tokens, mask, old = sampled(sample, model, temperature=temperature, eos=eos, group_size=16, tokens=20)
    assert len(set(mask.sum(1).tolist())) > 3
    prompt, prompt_mask = left_padded(PROMPTS, 2)
    for trainer in (lm.token_logprobs, fast.token_logprobs):
        with torch.no_grad():
            logprobs, _ = trainer(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask, temperature=temperature)
        assert torch.allclose(logprobs, old, atol=1e-5, rtol=0)
    ended = (torch.isin(tokens, torch.tensor(sorted(eos))) & mask).sum(1)
    assert (ended <= 1).all() and ((ended == 1) | (mask.sum(1) == 20)).all()
    assert torch.equal(lm.completion_mask(tokens, eos_ids=eos)[mask], torch.ones(int(mask.sum())).bool())
    assert (tokens[~mask] == 0).all() and (old[~mask] == 0).all() and (old[mask] < 0).all()


def test_logits_that_are_not_finite_stop_both(models):
    model = copy.deepcopy(models["llama"])
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    for function in (lm.generate, fast.generate):
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            sampled(function, model, temperature=1.0, eos={2}, group_size=2)
