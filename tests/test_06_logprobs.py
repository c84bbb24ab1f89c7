"""Lesson 06, log-probabilities and their masks: against a full float64 log-softmax of each response on its own.

The reference never pads, caches, shares a prompt, or cuts the vocabulary into chunks; it runs one row at a time.
"""

import copy
import functools
import importlib
import weakref

import pytest
import torch
from conftest import build_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
VOCABULARY = 50
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
RESPONSES = [[[20, 21, 22, 2], [23, 2]], [[24, 25, 26, 27], [2]], [[28, 29, 2], [30, 31, 32, 33]]]  # 2 is EOS; 27, 33 cut
KINDS = ["gpt2", "llama", "qwen2"]


@pytest.fixture(scope="module")
def models():
    return {kind: build_model(kind, vocab_size=VOCABULARY, **({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
                                                              if kind == "gpt2" else {})).double() for kind in KINDS}


def padded(prompts=PROMPTS, responses=RESPONSES, *, left=0, right=0, pad=0):
    """(prompt, prompt mask, completion, mask); `left` and `right` add that many more pads than the batch needs."""
    flat = [response for group in responses for response in group]
    width, length = max(map(len, prompts)) + left, max(map(len, flat)) + right
    prompt = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    prompt_mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    completion = torch.tensor([r + [pad] * (length - len(r)) for r in flat])
    mask = torch.tensor([[True] * len(r) + [False] * (length - len(r)) for r in flat])
    return prompt, prompt_mask, completion, mask


def reference_row(model, prompt, response, temperature=1.0):
    """log-softmax over the whole vocabulary, row P−1+t predicting response token t, and the entropies there."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits, -1)
    start = len(prompt) - 1
    chosen = torch.stack([logprobs[start + t, token] for t, token in enumerate(response)])
    every = logprobs[start: start + len(response)]
    return chosen, -(every.exp() * every).sum(-1)


def reference(model, prompts=PROMPTS, responses=RESPONSES, temperature=1.0):
    return [reference_row(model, p, r, temperature) for p, group in zip(prompts, responses) for r in group]


def gradients(model, scalar):
    model.zero_grad()
    scalar.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_to_reference(found, expected, mask, tolerance=1e-5):
    for row, keep, chosen in zip(found, mask, expected):
        assert torch.allclose(row[keep].double(), chosen.double(), atol=tolerance, rtol=0)
        assert (row[~keep] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, .7, 2.0])
@pytest.mark.parametrize("chunk_size", [None, 1, 5])
@pytest.mark.parametrize("way", ["packed", "shared", "whole", "recomputed"])
def test_values_and_gradients_are_the_full_softmaxes(models, kind, temperature, chunk_size, way):
    """Two responses to each of three left-padded prompts of unequal length, in chunks or not."""
    model = models[kind]
    if way == "recomputed":
        model = copy.deepcopy(model)
        for module in model.modules():  # dropout that must not act
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        lm.recompute_activations(model)
    prompt, prompt_mask, completion, mask = padded()
    logprobs, entropy = lm.token_logprobs(model, prompt, completion, prompt_mask=prompt_mask, mask=mask,
                                          temperature=temperature, chunk_size=chunk_size, way="auto" if way == "recomputed" else way)
    assert not model.training
    expected = reference(model, temperature=temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32 and logprobs.shape == completion.shape
    assert_equal_to_reference(logprobs, [c for c, _ in expected], mask)
    assert_equal_to_reference(entropy, [e for _, e in expected], mask)
    assert not entropy.requires_grad

    weights = torch.randn(completion.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = gradients(model, (logprobs * weights).sum())
    right = gradients(model, sum((c * w[: len(c)]).sum() for (c, _), w in zip(expected, weights)))
    for name in right:
        scale = right[name].abs().max().clamp(min=1e-3)
        assert (found[name] - right[name]).abs().max() / scale < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left, right, pad", [(0, 0, 7), (1, 0, 0), (3, 2, 0), (8, 5, 2)])
def test_pads_change_nothing(models, kind, left, right, pad):
    """C32: 0, 1, 3 or 8 more left pads, more right pads, and pads that share an id with EOS or with a word."""
    prompt, prompt_mask, completion, mask = padded(left=left, right=right, pad=pad)
    with torch.no_grad():
        logprobs, _ = lm.token_logprobs(models[kind], prompt, completion, prompt_mask=prompt_mask, mask=mask)
        assert_equal_to_reference(logprobs, [c for c, _ in reference(models[kind])], mask)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_have_no_gradient_and_no_influence(models, kind):
    model = models[kind]
    prompt, prompt_mask, completion, mask = padded(right=2)
    garbage = torch.where(mask, completion, 41)
    first, second = (lm.token_logprobs(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask)[0]
                     for tokens in (completion, garbage))
    assert torch.allclose(first, second, atol=1e-6)
    ones, others = gradients(model, first.sum()), gradients(model, second.sum())
    assert all(torch.allclose(ones[n], others[n], atol=1e-5 * max(1, float(ones[n].abs().max()))) for n in ones)


def test_one_token_responses_need_no_second_pass(models):
    prompt, prompt_mask, completion, mask = padded(responses=[[[20], [2]], [[21], [22]], [[2], [23]]])
    logprobs, _ = lm.token_logprobs(models["gpt2"], prompt, completion, prompt_mask=prompt_mask, mask=mask)
    expected = reference(models["gpt2"], responses=[[[20], [2]], [[21], [22]], [[2], [23]]])
    assert_equal_to_reference(logprobs, [c for c, _ in expected], mask)


def test_without_masks_everything_is_real(models):
    prompt, completion = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[20, 21], [22, 23], [24, 25], [26, 27]])
    logprobs, _ = lm.token_logprobs(models["llama"], prompt, completion)
    expected = reference(models["llama"], [[3, 4, 5], [6, 7, 8]], [[[20, 21], [22, 23]], [[24, 25], [26, 27]]])
    assert_equal_to_reference(logprobs, [c for c, _ in expected], torch.ones_like(completion).bool())


def test_responses_that_do_not_divide_evenly_are_refused(models):
    with pytest.raises(ValueError, match="3 completions .* 2 prompts"):
        lm.token_logprobs(models["llama"], torch.ones(2, 3, dtype=torch.long), torch.ones(3, 2, dtype=torch.long))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_belong_to_consecutive_rows(models, kind):
    """C05: rows p·K … are prompt p's. With responses that are all alike only the prompt tells the rows apart."""
    prompt, prompt_mask, completion, mask = padded(responses=[[[20, 21]] * 3] * 3)
    logprobs, _ = lm.token_logprobs(models[kind], prompt, completion, prompt_mask=prompt_mask, mask=mask)
    expected = [reference_row(models[kind], p, [20, 21])[0] for p in PROMPTS for _ in range(3)]
    assert_equal_to_reference(logprobs, expected, mask)
    assert (logprobs[0] - logprobs[3]).abs().max() > 1e-2


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


def test_backward_keeps_no_logits(models):
    """C30's memory, counted: what autograd keeps of shape (tokens, V) is nothing with chunks, and everything without."""
    prompt, prompt_mask, completion, mask = padded()
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() if tensor.dim() == 2 and tensor.shape[1] == VOCABULARY and len(tensor) != 32 else 0)
        return tensor  # (32, V) is the head's own weight

    for chunk_size, some in ((3, False), (None, True)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            lm.token_logprobs(models["llama"], prompt, completion, prompt_mask=prompt_mask, mask=mask, chunk_size=chunk_size)
        assert (sum(kept) >= int(mask.sum()) * VOCABULARY) == some and (sum(kept) > 0) == some


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


def test_gradient_checkpointing_runs_every_block_again_in_backward(models):
    model, calls = copy.deepcopy(models["qwen2"]), []
    lm.recompute_activations(model)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    prompt, prompt_mask, completion, mask = padded()
    logprobs, _ = lm.token_logprobs(model, prompt, completion, prompt_mask=prompt_mask, mask=mask)
    before = len(calls)
    logprobs.sum().backward()
    assert (before, len(calls)) == (1, 2)
    with torch.no_grad():
        lm.token_logprobs(model, prompt, completion, prompt_mask=prompt_mask, mask=mask)
    assert len(calls) == 3


@pytest.mark.parametrize("lengths, blocks", [
    ([3, 3, 3], [(0, 2, [0, 1, 2])]),
    ([1, 1], []),  # a response of one token has no input that predicts anything
    ([2, 2, 2, 9], [(0, 1, [0, 1, 2, 3]), (1, 8, [3])]),  # saves 3 × 7
    ([3, 3, 9, 1], [(0, 2, [0, 1, 2]), (2, 8, [2])]),  # the row of one token is never run
    ([2, 3, 4], [(0, 3, [0, 1, 2])]),  # would save no more than 2
])
def test_short_completions_leave_early(lengths, blocks):
    """Every token but each row's last is run once, and none of the padding behind it beyond a block's end."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    found = [(begin, end, rows.tolist()) for begin, end, rows in lm.column_blocks(mask, worthwhile=10)]
    assert found == blocks
    run = torch.zeros(mask.shape, dtype=torch.long)
    for begin, end, rows in found:
        run[rows, begin:end] += 1
    assert run.max() <= 1 and (run[:, :-1][mask[:, 1:]] == 1).all()


def test_random_lengths_agree_with_one_row_at_a_time(models, monkeypatch):
    """Many blocks: lengths from 1 to 12, groups of 5."""
    monkeypatch.setattr(lm, "column_blocks", functools.partial(lm.column_blocks, worthwhile=1))
    generator = torch.Generator().manual_seed(0)
    responses = [[torch.randint(3, VOCABULARY, (int(n),), generator=generator).tolist()
                  for n in torch.randint(1, 13, (5,), generator=generator)] for _ in PROMPTS]
    prompt, prompt_mask, completion, mask = padded(responses=responses)
    assert len(list(lm.column_blocks(mask))) > 2
    for way in ("shared", "packed", "whole"):
        logprobs, _ = lm.token_logprobs(models["llama"], prompt, completion, prompt_mask=prompt_mask, mask=mask, way=way)
        assert_equal_to_reference(logprobs, [c for c, _ in reference(models["llama"], responses=responses)], mask)


@pytest.mark.parametrize("kind", KINDS)
def test_common_beginnings_are_computed_once(models, kind):
    """Six responses of two kinds of token: what several have in common runs once, and values and gradients stay what they are."""
    generator = torch.Generator().manual_seed(2)
    responses = [[torch.randint(20, 22, (int(n),), generator=generator).tolist()
                  for n in torch.randint(1, 6, (6,), generator=generator)] for _ in PROMPTS]
    responses[0][3:] = [responses[0][0], [20, 21], [20, 21, 20, 21, 20]]
    prompt, prompt_mask, completion, mask = padded(responses=responses)
    runs = []
    hook = models[kind].base_model.register_forward_pre_hook(
        lambda _module, _arguments, options: runs.append(options["input_ids"].shape), with_kwargs=True)
    logprobs, _ = lm.token_logprobs(models[kind], prompt, completion, prompt_mask=prompt_mask, mask=mask, way="packed")
    hook.remove()
    distinct = [len({tuple(r[:n]) for r in group for n in range(1, len(r))}) for group in responses]  # beginnings that are run
    sizes = sorted(len(p) + n for p, n in zip(PROMPTS, distinct))  # three groups: the longest with the shortest, the other alone
    assert runs == [(2, max(sizes[0] + sizes[2], sizes[1]))]
    assert sum(distinct) < 0.6 * sum(len(r) - 1 for group in responses for r in group)
    expected = reference(models[kind], responses=responses)
    assert_equal_to_reference(logprobs, [c for c, _ in expected], mask)
    weights = torch.randn(completion.shape, generator=generator, dtype=torch.float64)
    found = gradients(models[kind], (logprobs * weights).sum())
    right = gradients(models[kind], sum((c * w[: len(c)]).sum() for (c, _), w in zip(expected, weights)))
    for name in right:
        assert (found[name] - right[name]).abs().max() / right[name].abs().max().clamp(min=1e-3) < 1e-5, name


def test_short_groups_are_packed_and_long_ones_share_their_prompt(models, monkeypatch):
    called = []
    for name in ("packed_states", "shared_prompt_states", "whole_sequence_states"):
        def note(*arguments, function=getattr(lm, name), name=name):
            called.append(name)
            return function(*arguments)
        monkeypatch.setattr(lm, name, note)
    model = copy.deepcopy(models["llama"])
    for responses in (4, 300):
        prompt, completion = torch.full((1, 5), 3), torch.full((responses, 2), 4)
        lm.token_logprobs(model, prompt, completion)
    lm.recompute_activations(model)
    lm.token_logprobs(model, prompt, completion)
    assert called == ["packed_states", "shared_prompt_states", "whole_sequence_states"]


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are alive, as they are made and freed, and the most there ever were."""
    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.sizes:
                self.sizes[key] = tensor.untyped_storage().nbytes()
                self.now += self.sizes[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor.untyped_storage(), self.free, key)
        return result

    def free(self, key):
        self.now -= self.sizes.pop(key, 0)


def test_the_logits_of_all_tokens_never_exist_at_once():
    """B = 8, T = 512, V = 151,936: forward and backward need less than an eighth of one float32 copy of the logits, 2.49 GB."""
    batch, length, vocabulary = 8, 512, 151_936
    full = 4 * batch * length * vocabulary
    model = build_model("qwen2", vocab_size=vocabulary, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=1024)
    generator = torch.Generator().manual_seed(0)
    prompt, completion = (torch.randint(vocabulary, (batch, n), generator=generator) for n in (4, length))
    with LiveBytes() as live:
        logprobs, _ = lm.token_logprobs(model, prompt, completion)
        logprobs.sum().backward()
    assert 4 * vocabulary * 8 < live.peak < full / 8
    weight = model.get_output_embeddings().weight
    with torch.no_grad():  # values, on some tokens, against the whole softmax
        states = model.model(input_ids=torch.cat([prompt, completion], 1)[:1]).last_hidden_state[0, 3:11].double()
        expected = torch.log_softmax(states @ weight.double().T, -1).gather(1, completion[0, :8, None])[:, 0]
    assert torch.allclose(logprobs[0, :8].double(), expected, atol=1e-5)


@pytest.mark.parametrize("options", [{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, {}])
def test_a_model_with_a_sliding_window_is_not_packed(options):
    """A mask of ours would take the place of the window. Eight tokens, a window of four: the way must not change the result."""
    model = build_model("qwen2", vocab_size=VOCABULARY, **options)
    assert lm.packable(model) == (not options)
    prompt, completion = torch.arange(6)[None] + 5, torch.arange(12).view(2, 6) + 20
    found = [lm.token_logprobs(model, prompt, completion, way=way)[0] for way in ("auto", "whole")]
    assert torch.allclose(*found, atol=1e-5)


def test_masks_with_holes_are_refused_and_empty_ones_are_zero(models):
    prompt, completion = torch.tensor([[3, 4]]), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="without holes"):
        lm.token_logprobs(models["llama"], prompt, completion, mask=torch.tensor([[True, False, True]]))
    for part in lm.token_logprobs(models["llama"], prompt, completion, mask=torch.zeros(1, 3, dtype=torch.bool)):
        assert part.tolist() == [[0, 0, 0]]
