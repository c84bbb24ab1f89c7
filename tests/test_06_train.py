"""Lesson 06, training: the plain generate and token_logprobs, collect, and train_step, with real architectures.

GPT-2 (learned positions, dropout), Llama and Qwen2 (rotary). Sampling is compared with enumeration and with
transformers' own generate(), log-probabilities with a float64 log-softmax of each response on its own, the update with
a batch that is never cut up. Ids such as C32 name small cases that trainers of this kind got wrong.
"""

import copy
import dataclasses
import importlib
import itertools
import json
import math
import types

import pytest
import torch
from conftest import TOKENIZERS, build_model, left_padded, right_padded
from under_the_hood.evaluation import off_policyness
from under_the_hood.tasks import Example

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
KINDS = ["gpt2", "llama", "qwen2"]
EXAMPLES = [Example("What is 2 + 3?", "5"), Example("And 40 + 2? Think.", "42"), Example("1 + 1?", "2")]
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GENERATE = {name: lm.ENGINES[name][0] for name in ("plain", "fast", "uncached")}


def config(**options):
    return lm.Config(**{"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 5, "max_grad_norm": 1e9} | options)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sampled_batch(model, tokenizer, settings, *, seed=0):
    """A batch from the model with rewards that differ inside each group."""
    batch = lm.collect(model, tokenizer, EXAMPLES, settings, version=0, generator=generator(seed))
    rewards = torch.rand(batch.rewards.shape, generator=generator(seed + 1)).round()
    rewards[:, 0], rewards[:, 1] = 1.0, 0.0
    return dataclasses.replace(batch, rewards=rewards)


# ------------------------------------------------------------------------------------------------- log-probabilities

RESPONSES = [[20, 21, 22, 2], [23, 2], [24, 25, 26, 27], [2], [28, 29, 2], [30, 31, 32, 33]]  # 2 is EOS; 27, 33 are cut


@pytest.fixture(scope="module")
def doubles():
    """In float64, so that rounding hides nothing."""
    return {kind: build_model(kind, vocab_size=50).double() for kind in KINDS}


def reference_row(model, prompt, response, temperature=1.0):
    """log-softmax over the whole vocabulary, row P−1+t predicting response token t, and the entropies there."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits, -1)
    every = logprobs[len(prompt) - 1: len(prompt) - 1 + len(response)]
    chosen = torch.stack([every[t, token] for t, token in enumerate(response)])
    return chosen, -(every.exp() * every).sum(-1)


def reference(model, responses, temperature=1.0):
    """Rows p·K … belong to prompt p."""
    group = len(responses) // len(PROMPTS)
    return [reference_row(model, PROMPTS[i // group], response, temperature) for i, response in enumerate(responses)]


def gradients(model, scalar):
    model.zero_grad()
    scalar.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_to_reference(found, expected, mask, tolerance=1e-5):
    for row, keep, chosen in zip(found, mask, expected):
        assert torch.allclose(row[keep].double(), chosen.double(), atol=tolerance, rtol=0)
        assert (row[~keep] == 0).all()


@pytest.mark.parametrize("kind, temperature, extra, pad", [
    ("gpt2", 1.0, 0, 0), ("gpt2", .7, 1, 2), ("gpt2", 2.0, 8, 20), ("llama", .7, 3, 2), ("qwen2", 2.0, 1, 0)])
def test_values_entropies_and_gradients_are_the_full_softmaxes(doubles, kind, temperature, extra, pad):
    """Two responses to each of three left-padded prompts of unequal length; C32: with 0 to 8 more pads on either side,
    whose id may be that of EOS or of a word, and with no gradient from what stands there."""
    model, (prompt, prompt_mask) = doubles[kind], left_padded(PROMPTS, extra)
    completion, mask = right_padded(RESPONSES, extra, pad)
    logprobs, entropy = lm.token_logprobs(model, prompt, completion, prompt_mask=prompt_mask, mask=mask,
                                          temperature=temperature)
    expected = reference(model, RESPONSES, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32 and logprobs.shape == completion.shape
    assert_equal_to_reference(logprobs, [c for c, _ in expected], mask)
    assert_equal_to_reference(entropy, [e for _, e in expected], mask)
    assert not entropy.requires_grad
    weights = torch.randn(completion.shape, generator=generator(1), dtype=torch.float64)
    found = gradients(model, (logprobs * weights).sum())
    right = gradients(model, sum((c * w[: len(c)]).sum() for (c, _), w in zip(expected, weights)))
    for name in right:
        assert (found[name] - right[name]).abs().max() / right[name].abs().max().clamp(min=1e-3) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_c05_groups_belong_to_consecutive_rows(doubles, kind):
    """Rows p·K … are prompt p's. With responses that are all alike only the prompt tells the rows apart."""
    (prompt, prompt_mask), (completion, mask) = left_padded(PROMPTS), right_padded([[20, 21]] * 9)
    logprobs, _ = lm.token_logprobs(doubles[kind], prompt, completion, prompt_mask=prompt_mask, mask=mask)
    assert_equal_to_reference(logprobs, [c for c, _ in reference(doubles[kind], [[20, 21]] * 9)], mask)
    assert (logprobs[0] - logprobs[3]).abs().max() > 1e-2


def test_without_masks_everything_is_real(doubles):
    prompt, completion = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[20, 21], [22, 23], [24, 25], [26, 27]])
    logprobs, _ = lm.token_logprobs(doubles["llama"], prompt, completion)
    expected = [reference_row(doubles["llama"], prompt[i // 2].tolist(), row.tolist())[0]
                for i, row in enumerate(completion)]
    assert_equal_to_reference(logprobs, expected, torch.ones_like(completion).bool())


def test_c31_the_row_before_a_token_predicts_it(bigram):
    """ids [5, 6 | 7, 8, 2]: log-probs of the NEXT token at rows 0 … 3 are −.1 … −.4. Right: −.2, −.3, −.4."""
    model = bigram({(5, 6): -.1, (6, 7): -.2, (7, 8): -.3, (8, 2): -.4})
    logprobs, _ = lm.token_logprobs(model, torch.tensor([[5, 6]]), torch.tensor([[7, 8, 2]]))
    assert logprobs[0].tolist() == pytest.approx([-.2, -.3, -.4], abs=1e-5)
    assert logprobs.sum().item() == pytest.approx(-.9, abs=1e-5)


# log-softmax([2, 1, 0] / T), worked by hand; T = 1: log(e² + e + 1) = 2.4076060.
C27 = {1.0: [-.4076060, -1.4076060, -2.4076060], .5: [-.1429316, -2.1429316, -4.1429316],
       .9: [-.3629479, -1.4740591, -2.5851702]}


@pytest.mark.parametrize("temperature", C27)
def test_c27_temperature_divides_the_logits(fixed_logits, temperature):
    model = fixed_logits([2.0, 1.0, 0.0])
    completion = torch.tensor([[0], [1], [2]])
    logprobs, _ = lm.token_logprobs(model, torch.tensor([[0]]), completion, temperature=temperature)
    assert logprobs[:, 0].tolist() == pytest.approx(C27[temperature], abs=1e-6)


@pytest.mark.parametrize("temperature", [.5, .9, 1.0, 1.7])
def test_c27_on_policy_ratios_are_one_at_every_temperature(fixed_logits, temperature):
    model = fixed_logits([2.0, 1.0, 0.0])
    prompt = torch.tensor([[0]])
    tokens, mask, old = lm.generate(model, prompt, torch.ones(1, 1).bool(), group_size=400, max_new_tokens=1,
                                    temperature=temperature, eos_ids={2}, pad_id=0,
                                    generator=torch.Generator().manual_seed(0))
    logprobs, _ = lm.token_logprobs(model, prompt, tokens, mask=mask, temperature=temperature)
    assert set(tokens.flatten().tolist()) == {0, 1, 2}
    assert ((logprobs - old).exp() - 1).abs().max() < 1e-5
    if temperature == .5:  # training at 1 what was sampled at .5 is off by the ratios .7675 and 5.6708, silently
        wrong = (lm.token_logprobs(model, prompt, tokens, mask=mask)[0] - old).exp()
        assert wrong[tokens == 0][0].item() == pytest.approx(.7675, abs=1e-4)
        assert wrong[tokens == 2][0].item() == pytest.approx(5.6708, abs=1e-4)


# ------------------------------------------------------------------------------------------------- completion mask


@pytest.mark.parametrize("tokens, eos_ids, expected", [
    ([7, 8, 2, 2, 2], {2}, [1, 1, 1, 0, 0]),   # C35: pad = EOS = 2; the first EOS is trained on
    ([7, 8, 9, 4, 5], {2}, [1, 1, 1, 1, 1]),   # C35: cut
    ([2, 2, 2, 2, 2], {2}, [1, 0, 0, 0, 0]),   # C35: an empty answer still has its EOS
    ([7, 8, 9, 0, 0], {9, 2}, [1, 1, 1, 0, 0]),  # C37: generation stops on 9 too
    ([7, 2, 9, 7, 2], {9, 2}, [1, 1, 0, 0, 0]),  # whichever comes first
    ([7, 2, 7, 2, 7], {2}, [1, 1, 0, 0, 0]),   # what follows an EOS stays out, whatever it is
    ([7, 8, 9, 4, 5], set(), [1, 1, 1, 1, 1]),  # no EOS at all
])
def test_completion_mask(tokens, eos_ids, expected):
    mask = lm.completion_mask(torch.tensor([tokens, tokens[::-1]]), eos_ids=eos_ids)
    assert mask.dtype == torch.bool and mask.shape == (2, 5)
    assert mask[0].int().tolist() == expected


def test_completion_mask_takes_any_collection_of_ids():
    tokens = torch.tensor([[7, 9, 2, 1]])
    for ids in ({9, 2}, [2, 9], (9,)):
        assert lm.completion_mask(tokens, eos_ids=ids).int().tolist() == [[1, 1, 0, 0]]


# ------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eos", [{2}, {2, 17, 23, 5, 8}])
def test_greedy_is_transformers_own_greedy(kind, eos):
    model = build_model(kind, vocab_size=30, seed=3)
    prompt, prompt_mask = left_padded(PROMPTS)
    tokens, mask, _ = lm.generate(model, prompt, prompt_mask, group_size=2, max_new_tokens=12, temperature=0.0,
                                  eos_ids=eos, pad_id=0, generator=None)
    theirs = model.generate(input_ids=prompt, attention_mask=prompt_mask.long(), do_sample=False, max_new_tokens=12,
                            eos_token_id=sorted(eos), pad_token_id=0)[:, prompt.shape[1]:]
    for row, expected in enumerate(theirs.repeat_interleave(2, 0)):
        found = tokens[row][mask[row]]
        assert torch.equal(found, expected[: len(found)])
        assert (expected[len(found):] == 0).all() and (len(found) == 12 or found[-1].item() in eos)


@pytest.mark.parametrize("kind, pads, engine", [("gpt2", 1, "plain"), ("gpt2", 8, "uncached"), ("llama", 3, "plain"),
                                                ("qwen2", 8, "plain")])
def test_c32_left_pads_change_nothing(kind, pads, engine):
    model = build_model(kind, vocab_size=30, seed=3)
    runs = [GENERATE[name](model, *left_padded(PROMPTS, extra), group_size=3, max_new_tokens=6, temperature=1.0,
                           eos_ids={2}, pad_id=0, generator=generator(5))
            for name, extra in (("plain", 0), (engine, pads))]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert (runs[0][2] - runs[1][2]).abs().max() < 1e-4


def chi_square(counts, probabilities):
    """Pearson's statistic as a standard score: about N(0, 1) when the counts have these probabilities."""
    expected = probabilities * counts.sum()
    keep = expected > 5
    counts, expected = (torch.cat([x[keep], x[~keep].sum()[None]]) for x in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = len(counts) - 1
    return ((statistic - freedom) / math.sqrt(2 * freedom)).item()


@pytest.mark.parametrize("engine", GENERATE)
@pytest.mark.parametrize("kind, temperature", [("gpt2", 1.0), ("llama", .7), ("qwen2", 1.6)])
def test_c33_sampling_follows_the_tempered_softmax_whatever_the_generation_config_says(engine, kind, temperature):
    """All two-token responses of a 12-word vocabulary are enumerated, and 6000 sampled ones compared with that."""
    model, size = build_model(kind, vocab_size=12, seed=2), 12
    ignored = {"top_k": 2, "top_p": .5, "repetition_penalty": 3.0, "temperature": .1, "do_sample": True}
    for name, value in ignored.items():
        setattr(model.generation_config, name, value)
    prompt = torch.tensor([[3, 4, 5]])
    tokens, mask, old = GENERATE[engine](
        model, prompt, torch.ones_like(prompt).bool(), group_size=6000, max_new_tokens=2, temperature=temperature,
        eos_ids=set(), pad_id=0, generator=generator(7))
    pairs = torch.tensor(list(itertools.product(range(size), repeat=2)))
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt.repeat(len(pairs), 1), pairs], 1)).logits[:, 2:4].double()
    logprobs = torch.log_softmax(logits / temperature, -1).gather(2, pairs[:, :, None])[..., 0]
    index = tokens[:, 0] * size + tokens[:, 1]
    counts = torch.bincount(index, minlength=size**2).double()
    assert abs(chi_square(counts, logprobs.sum(1).exp())) < 4
    assert mask.all() and (old - logprobs[index]).abs().max() < 1e-4
    wrong = torch.log_softmax(logits, -1).gather(2, pairs[:, :, None])[..., 0].sum(1).exp()
    assert temperature == 1 or chi_square(counts, wrong) > 20  # the check would have seen a missing temperature


def test_groups_are_independent_draws_and_follow_the_generator():
    model = build_model("qwen2", vocab_size=30)
    arguments = dict(group_size=8, max_new_tokens=6, temperature=1.0, eos_ids={2}, pad_id=0)
    first, again, other = (lm.generate(model, *left_padded(PROMPTS), **arguments, generator=generator(s))[0]
                           for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row.tolist()) for row in first}) > 20


# Words: 0 pad, 2 EOS, 9 a second EOS. Near-certain steps: 5 → 7 → 8 → 2 → 2 and 6 → 7.
CHAIN = {(5, 7): -1e-9, (7, 8): -1e-9, (8, 2): -1e-9, (2, 2): -1e-9, (6, 6): -1e-9, (4, 2): -1e-9}


@pytest.mark.parametrize("engine", GENERATE)
@pytest.mark.parametrize("pad, temperature", [(0, 0.0), (2, 1.0)])
def test_c35_first_eos_is_kept_and_trained_on(bigram, engine, pad, temperature):
    """An answer with an end, one that is cut, and one that is empty, also when pad and EOS are one id."""
    prompt, keep = torch.tensor([[5], [6], [4]]), torch.ones(3, 1).bool()
    tokens, mask, old = GENERATE[engine](bigram(CHAIN), prompt, keep, group_size=1, max_new_tokens=5,
                                         temperature=temperature, eos_ids={2}, pad_id=pad, generator=generator())
    assert tokens.tolist() == [[7, 8, 2, pad, pad], [6] * 5, [2, pad, pad, pad, pad]]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]
    assert (old[~mask] == 0).all()


def test_c35_a_cut_row_next_to_a_longer_one_ends_where_it_ended(bigram):
    """max_new_tokens cuts; the width of the batch does not: 2 tokens are all that there is."""
    tokens, mask, _ = lm.generate(bigram(CHAIN), torch.tensor([[6], [4]]), torch.ones(2, 1).bool(), group_size=1,
                                  max_new_tokens=2, temperature=0.0, eos_ids={2}, pad_id=0, generator=None)
    assert tokens.tolist() == [[6, 6], [2, 0]] and mask.int().tolist() == [[1, 1], [1, 0]]


def test_width_is_that_of_the_longest_response(bigram):
    tokens, mask, old = lm.generate(bigram(CHAIN), torch.tensor([[5], [4]]), torch.ones(2, 1).bool(), group_size=1,
                                    max_new_tokens=50, temperature=0.0, eos_ids={2}, pad_id=0, generator=None)
    assert tokens.shape == mask.shape == old.shape == (2, 3)


# --------------------------------------------------------------------------------------------------------- collect


class DigitTokens:
    """Just enough of a tokenizer for `collect`: words are listed, text is their concatenation, `terse` is ids."""
    pad_token_id, eos_token_id, chat_template = 0, 2, None
    words = {1: "1", 3: "12", 4: "2", 5: "q", 6: "r", 7: "7", 8: "8"}  # noqa: RUF012 (nobody changes it)

    def __call__(self, texts):
        return {"input_ids": [[int(i) for i in text.split()] for text in texts]}

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(self.words.get(i, "") for i in row) for row in rows]


def collected(model, *, examples, **options):
    settings = config(**{"group_size": 2, "max_new_tokens": 5, "temperature": 1.0} | options)
    return lm.collect(model, DigitTokens(), examples, settings, version=3, generator=generator())


def test_c37_every_stop_id_of_the_model_ends_a_response(bigram):
    """The model stops on {9, 2} while the tokenizer's EOS is 2: [7, 8, 9] has ended, with length 3."""
    model = bigram({(5, 7): -1e-9, (7, 8): -1e-9, (8, 9): -1e-9, (9, 7): -1e-9})
    model.generation_config.eos_token_id = [9, 2]
    batch = collected(model, examples=[Example("q", "78", "5")])
    assert batch.tokens.tolist() == [[7, 8, 9]] * 2 and batch.mask.all() and not batch.truncated.any()
    model.generation_config.eos_token_id = 2
    assert collected(model, examples=[Example("q", "78", "5")]).truncated.all()


def test_c35_a_batch_trains_on_each_response_to_its_eos_and_on_no_padding(bigram):
    """7, 8, EOS beside five tokens that were cut."""
    batch = collected(bigram(CHAIN), examples=[Example("q", "78", "5"), Example("r", "66", "6")])
    assert batch.mask.int().tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5] * 2


def test_c39_the_sampled_ids_are_trained_on_and_not_their_text(bigram):
    """Words "1", "2" and "12": the model says "1", "2"; the text "12" would be encoded as one word."""
    model = bigram({(5, 1): -.01, (1, 4): -.02, (4, 2): -.03})
    batch = collected(model, examples=[Example("q", "12", "5")], group_size=8)
    row = next(i for i in range(8) if batch.tokens[i, :3].tolist() == [1, 4, 2])
    assert batch.samples[0]["answer"] == "12" and batch.rewards[0, row] == 1
    assert batch.mask[row].sum() == 3
    assert batch.old_logprobs[row, :3].tolist() == pytest.approx([-.01, -.02, -.03], abs=1e-4)


def test_rewards_meet_the_prompts_that_they_belong_to(bigram):
    """C05: prompt q is answered 7 and prompt r 8, whatever the order and the group size."""
    model = bigram({(5, 7): -1e-9, (7, 2): -1e-9, (6, 8): -1e-9, (8, 2): -1e-9})
    q, r, wrong = Example("q", "7", "5"), Example("r", "8", "6"), Example("r", "7", "6")
    batch = collected(model, examples=[q, r, wrong, q], group_size=3)
    assert batch.rewards.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert batch.tokens[:, 0].tolist() == [7] * 3 + [8] * 6 + [7] * 3
    assert [(s["question"], s["response"], s["answer"], s["reward"]) for s in batch.samples] == [
        ("q", "7", "7", 1.0), ("r", "8", "8", 1.0), ("r", "8", "7", 0.0), ("q", "7", "7", 1.0)]
    assert batch.version == 3 and not batch.truncated.any()


# ---------------------------------------------------------------------------------------------------- the first step


@pytest.mark.parametrize("kind, name, engine", [*(("gpt2", name, "auto") for name in TOKENIZERS),
                                                ("gpt2", "bos", "plain"), ("llama", "bos-eos", "plain"),
                                                ("qwen2", "chat-bos-no-pad", "auto")])
def test_first_update_has_ratio_one_and_clips_nothing(kind, name, engine, loaded):
    """C28 and C40: sampler and trainer see the same ids, positions and network; GPT-2 was saved with dropout .1."""
    model, tokenizer = loaded(kind, name)
    assert tokenizer.pad_token_id is not None
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = sampled_batch(model, tokenizer, config(engine=engine))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    metrics = lm.train_step(model, optimizer, batch, config(engine=engine), algorithm=lm.ALGORITHMS["grpo"],
                            generator=generator())
    moved = any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
    model.load_state_dict(before)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["ratio_p05"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_fraction"] == 0 and metrics["kl_old"] == pytest.approx(0, abs=1e-6)
    assert metrics["ess"] == pytest.approx(1, abs=1e-4)
    assert moved and metrics["grad_norm"] > 0


@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_c28_dropout_is_off_in_training_mode_too(loaded, engine):
    model, tokenizer = loaded("gpt2", "plain")
    assert model.config.resid_pdrop == .1
    settings, token_logprobs = config(engine=engine), lm.ENGINES[engine][1]
    batch = sampled_batch(model, tokenizer, settings)
    arguments = dict(prompt_mask=batch.prompt_mask, mask=batch.mask)
    model.train()
    first, second = (token_logprobs(model, batch.prompt, batch.tokens, **arguments)[0] for _ in range(2))
    again = lm.collect(model, tokenizer, EXAMPLES, settings, version=0, generator=generator())
    model.eval()
    assert torch.equal(first, second) and (first - batch.old_logprobs).abs().max() < 1e-4
    assert torch.equal(again.tokens, batch.tokens)


# -------------------------------------------------------------------------------------------------------- the update


@pytest.fixture(scope="module")
def stale(loaded):
    """(model, batch): of unlike lengths, and sampled before the weights moved, so that clipping has work to do."""
    cache = {}

    def get(kind):
        if kind not in cache:
            model, tokenizer = loaded(kind, "bos")
            model = copy.deepcopy(model)
            batch = sampled_batch(model, tokenizer, config())
            lengths = 1 + torch.arange(12) * 7 % batch.tokens.shape[1]  # as if cut at many lengths
            mask = batch.mask & (torch.arange(batch.tokens.shape[1]) < lengths[:, None])
            batch = dataclasses.replace(batch, mask=mask, tokens=batch.tokens.where(mask, 2),
                                        old_logprobs=batch.old_logprobs.where(mask, 0.0))
            assert len(set(mask.sum(1).tolist())) > 3
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(.02 * torch.randn(p.shape, generator=generator(1)))
            cache[kind] = model, batch
        return cache[kind]
    return get


def update(model, batch, algorithm, **options):
    """Gradients and metrics of one train_step that leaves the weights alone (learning rate 0)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = lm.train_step(model, optimizer, batch, config(**options), algorithm=algorithm, generator=generator(3))
    return {n: p.grad.clone() for n, p in model.named_parameters()}, metrics


def uncut(model, batch, algorithm, temperature=1.0):
    """The same from one plain forward pass of each response on its own, and the loss of the whole batch at once."""
    lengths, group = batch.mask.sum(1), batch.rewards.shape[1]
    advantages = lm.shaped_advantages(batch.rewards, lengths.view_as(batch.rewards), algorithm=algorithm,
                                      generator=generator(3)).flatten()
    rows = []
    for i, (tokens, length) in enumerate(zip(batch.tokens, lengths)):
        prompt = batch.prompt[i // group][batch.prompt_mask[i // group]]
        logits = model(input_ids=torch.cat([prompt, tokens[:length]])[None]).logits[0, len(prompt) - 1: -1]
        chosen = torch.log_softmax(logits.double() / temperature, -1).gather(1, tokens[:length, None])[:, 0]
        rows.append(torch.cat([chosen, chosen.new_zeros(len(tokens) - length)]))
    loss, metrics = lm.policy_loss(torch.stack(rows), batch.old_logprobs.double(), advantages, batch.mask,
                                   algorithm=algorithm)
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}, {"loss": loss.item()} | {k: v.item() for k, v in
                                                                                              metrics.items()}


def assert_same_gradient(found, expected, tolerance):
    scale = max(g.abs().max() for g in expected.values())
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("kind, name, engine", [
    ("gpt2", "grpo", "auto"), ("llama", "rec-oneside-nois", "plain"), ("qwen2", "grpo", "plain"),
    *(("qwen2", name, "auto") for name in ("rec-gspo-is", "rep-opmd", "red-drop", "red-weight-adaptive"))])
def test_c13_micro_batches_add_up_to_the_uncut_batch(kind, name, engine, stale):
    """Micro-batches of 1, 2 and all 3 prompts: one gradient, and the one of a batch that is not cut at all."""
    model, batch = stale(kind)
    row = lm.ALGORITHMS[name] if "gspo" not in name else lm.find_algorithm(name, eps_low=.01, eps_high=.01)
    expected, reference = uncut(model, batch, row)
    per_prompt = batch.prompt.shape[1] + 4 * batch.tokens.shape[1]
    for tokens in (1, 2 * per_prompt, 100_000):
        found, metrics = update(model, batch, row, micro_batch_tokens=tokens, engine=engine)
        assert_same_gradient(found, expected, 2e-5)
        for key, value in reference.items():
            assert metrics[key] == pytest.approx(value, abs=2e-5, rel=1e-4), key
    assert name not in ("grpo", "rec-oneside-nois", "rec-gspo-is") or 0 < reference["clip_fraction"] < 1


@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_temperature_reaches_sampler_and_trainer_alike(loaded, engine):
    model, tokenizer = loaded("llama", "plain")
    settings = config(temperature=.6, engine=engine)
    batch = sampled_batch(model, tokenizer, settings)
    logprobs, _ = lm.token_logprobs(model, batch.prompt, batch.tokens, prompt_mask=batch.prompt_mask, mask=batch.mask,
                                    temperature=.6)
    assert (logprobs - batch.old_logprobs).abs().max() < 1e-4
    _, metrics = update(model, batch, lm.ALGORITHMS["grpo"], temperature=.6, engine=engine)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["ratio_p05"] == pytest.approx(1, abs=1e-4)


def test_temperature_reaches_the_update(stale):
    model, batch = stale("llama")
    row = lm.ALGORITHMS["rec-oneside-is"]
    expected, reference = uncut(model, batch, row, temperature=.6)
    found, metrics = update(model, batch, row, temperature=.6)
    assert_same_gradient(found, expected, 2e-5)
    assert metrics["loss"] == pytest.approx(reference["loss"], abs=1e-5)


def test_update_metrics_by_hand(stale):
    model, batch = stale("qwen2")
    gradients, metrics = update(model, batch, lm.ALGORITHMS["reinforce"])
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["reward"] == pytest.approx(batch.rewards.mean().item())
    assert metrics["completion_length"] == pytest.approx(batch.mask.sum().item() / 12)
    flat = sum(len(set(group)) == 1 for group in batch.rewards.tolist()) / 3
    assert metrics["flat_groups"] == pytest.approx(flat)
    logprobs, entropy = lm.token_logprobs(model, batch.prompt, batch.tokens, prompt_mask=batch.prompt_mask,
                                          mask=batch.mask)
    assert metrics["entropy"] == pytest.approx((entropy.sum() / batch.mask.sum()).item(), rel=1e-5)
    ratio = (logprobs - batch.old_logprobs)[batch.mask].exp()
    assert metrics["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-4)


def test_off_policyness_by_hand():
    # Ratios 1, 2, 3 | 4, 1: sequence products 6 and 4, so ess = (6 + 4)² / (2·(36 + 16)) = .9615…
    ratio = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    old = torch.full((2, 3), -2.0, dtype=torch.float64)
    found = off_policyness(old + ratio.log(), old, mask)
    assert found["ess"].item() == pytest.approx(100 / (2 * 52))
    assert found["ratio_max"].item() == pytest.approx(4.0)
    assert found["ratio_p50"].item() == pytest.approx(2.0)  # of 1, 1, 2, 3, 4
    same = off_policyness(old, old, mask)
    assert {k: v.item() for k, v in same.items()} == pytest.approx({k: 1.0 for k in same})


def test_gradients_are_clipped_to_the_norm_and_do_not_pile_up(stale):
    model, batch = stale("gpt2")
    free, metrics = update(model, batch, lm.ALGORITHMS["reinforce"])
    limit = metrics["grad_norm"] / 4
    clipped, again = update(model, batch, lm.ALGORITHMS["reinforce"], max_grad_norm=limit)
    assert again["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)  # before clipping, and not accumulated
    assert_same_gradient({n: g * 4 for n, g in clipped.items()}, free, 1e-4)


def test_flat_groups_have_no_gradient(stale):
    model, batch = stale("qwen2")
    flat = dataclasses.replace(batch, rewards=torch.full_like(batch.rewards, .1))
    gradients, metrics = update(model, flat, lm.ALGORITHMS["grpo"])
    assert metrics["flat_groups"] == 1 and metrics["grad_norm"] == 0 and all((g == 0).all() for g in gradients.values())


def test_update_follows_the_generator_that_it_is_given(stale):
    model, batch = stale("qwen2")
    rewards = torch.tensor([[1.0, 0, 0, 0]] * 3)
    batch = dataclasses.replace(batch, rewards=rewards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = [lm.train_step(model, optimizer, batch, config(), algorithm=lm.ALGORITHMS["red-drop"],
                            generator=generator(s))["loss"] for s in (0, 0, 1, 2, 3)]
    assert losses[0] == losses[1] and len(set(losses)) > 1


@pytest.mark.parametrize("fault", ["both", "loss", "gradient"])
def test_what_is_not_finite_moves_no_weight(stale, fault):
    model, batch = stale("qwen2")
    model = copy.deepcopy(model)
    before = [p.clone() for p in model.parameters()]
    if fault == "gradient":
        next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    else:  # τ/2·d² leaves the range of float32 long before its slope does
        far = math.nan if fault == "both" else 2e19
        batch = dataclasses.replace(batch, old_logprobs=torch.full_like(batch.old_logprobs, far))
    with pytest.raises(FloatingPointError, match="not finite"):
        lm.train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), batch, config(),
                      algorithm=lm.ALGORITHMS["rep-opmd"], generator=generator())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def never(question, response, answer):
    return 0.0


def test_without_a_contrast_a_run_moves_nothing(tiny_run, quick, tmp_path):
    """No reward, no gradient; and no weight decay."""
    from safetensors.torch import load_file

    lm.main([*tiny_run[2], "--reward", f"{__name__}:never", "--steps", "2", "--out", str(tmp_path / "run")])
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_run[0], tmp_path / "run" / "model"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("kind", KINDS)
def test_improves_what_it_is_rewarded_for(kind):
    """Thirty steps that reward the word 4: each architecture learns to say it. The sign of the whole chain is right."""
    model = build_model(kind, vocab_size=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    (prompt, prompt_mask), draw = left_padded([[3, 4], [5]]), generator()
    shares = []
    for _ in range(30):
        tokens, mask, old = lm.generate(model, prompt, prompt_mask, group_size=8, max_new_tokens=3, temperature=1.0,
                                        eos_ids={2}, pad_id=0, generator=draw)
        rewards = ((tokens == 4) & mask).sum(1).float().view(2, 8)
        batch = lm.Rollout(prompt, prompt_mask, tokens, mask, old, rewards, torch.zeros(16).bool(), 0, [])
        lm.train_step(model, optimizer, batch, config(group_size=8, max_grad_norm=1.0),
                      algorithm=lm.ALGORITHMS["rec-oneside-nois"], generator=draw)
        shares.append(rewards.mean().item())
    assert sum(shares[-5:]) > sum(shares[:5]) + 3


def test_tokens_per_second_are_those_of_all_responses_over_the_seconds_of_the_step(tiny_run, tmp_path, monkeypatch, quick):
    ticks = itertools.count(0, 4)  # the clock is read before a step and after it: 4 seconds each
    monkeypatch.setattr(lm, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    lm.main([*tiny_run[2], "--steps", "2", "--device", "cpu", "--out", str(tmp_path / "run")])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    speeds = [(line["tokens_per_second"], 16 * line["completion_length"] / 4) for line in lines[1:]]
    assert len(speeds) == 2 and all(found == pytest.approx(expected) for found, expected in speeds)
