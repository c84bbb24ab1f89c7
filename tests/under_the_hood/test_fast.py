"""What the fast functions leave out: padding, logits of all tokens at once, and everything that stands there twice.

That they find what the plain ones find is in test_fast_is_plain.py.
"""

import copy
import importlib
import weakref

import pytest
import torch
from conftest import build_model, left_padded, right_padded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from under_the_hood import fast
from under_the_hood.models import recompute_activations

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
VOCABULARY = 50
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
RESPONSES = [[20, 21, 22, 2], [23, 2], [24, 25, 26, 27], [2], [28, 29, 2], [30, 31, 32, 33]]


@pytest.fixture(scope="module")
def model():
    return build_model("llama", vocab_size=VOCABULARY)


def batch(responses=RESPONSES):
    """(prompt, completion) and the two masks as options."""
    (prompt, prompt_mask), (completion, mask) = left_padded(PROMPTS), right_padded(responses)
    return (prompt, completion), {"prompt_mask": prompt_mask, "mask": mask}


class Passes:
    """The (rows, columns) that run through a model's first layer, pass by pass, while this context lasts."""
    def __init__(self, model):
        self.layer = model.model.layers[0]

    def __enter__(self):
        shapes = []
        self.hook = self.layer.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape[:2])))
        return shapes

    def __exit__(self, *_):
        self.hook.remove()


# -------------------------------------------------------------------------------------------------------- generate


def test_a_prompt_runs_once_common_beginnings_once_and_finished_responses_not_at_all(fixed_logits):
    """200 responses of many lengths over ten words: as many passes as the longest has tokens, with few rows in each."""
    model = fixed_logits([0.0] * 10)
    with Passes(model) as shapes:
        _, mask, _ = fast.generate(model, torch.tensor([[3, 4]]), torch.ones(1, 2).bool(), group_size=200, pad_id=0,
                                   max_new_tokens=100, temperature=1.0, eos_ids={2},
                                   generator=torch.Generator().manual_seed(0))
    lengths = mask.sum(1)
    assert len(set(lengths.tolist())) > 15 and mask.shape[1] == lengths.max() < 100
    assert len(shapes) == lengths.max() and shapes[0] == (1, 2) and all(width == 1 for _, width in shapes[1:])
    assert shapes[1][0] <= 10 and shapes[2][0] <= 100  # there are no more beginnings
    needed = int((lengths - 1).sum())  # the last token of a response is not fed back
    assert sum(rows for rows, _ in shapes[1:]) <= needed / .75


def test_what_is_sampled_can_be_trained_on(model):
    """Sampling runs in inference mode, whose tensors autograd refuses; what it returns are ordinary tensors."""
    result = fast.generate(model, *left_padded(PROMPTS), group_size=2, max_new_tokens=3, temperature=1.0, eos_ids={2},
                           pad_id=0, generator=torch.Generator())
    assert not any(tensor.is_inference() for tensor in result)


# ------------------------------------------------------------------------------------------- which way, and its passes


def test_short_groups_are_packed_long_ones_share_their_prompt_and_recomputing_models_do_neither(model):
    short, long = (torch.full((count, 2), 4) for count in (4, 300))
    prompt = torch.full((1, 5), 3)
    with Passes(model) as shapes:
        fast.token_logprobs(model, prompt, short)
        fast.token_logprobs(model, prompt, long)
    # The group in one row, with its one beginning that is run; the prompt, then 300 first tokens.
    assert shapes == [(1, 6), (1, 5), (300, 1)]
    recomputing = copy.deepcopy(model)
    recompute_activations(recomputing)
    with Passes(recomputing) as shapes:
        fast.token_logprobs(recomputing, prompt, short)
    assert shapes == [(4, 7)]  # each response behind a copy of the prompt


def test_packed_rows_hold_each_beginning_once():
    """Three groups of six responses of two words: the longest with the shortest in a row, the other alone."""
    model = build_model("qwen2", vocab_size=VOCABULARY)
    generator = torch.Generator().manual_seed(2)
    groups = [[torch.randint(20, 22, (int(n),), generator=generator).tolist()
               for n in torch.randint(1, 6, (6,), generator=generator)] for _ in PROMPTS]
    (prompt, completion), masks = batch([response for group in groups for response in group])
    with Passes(model) as shapes:
        fast.token_logprobs(model, prompt, completion, way="packed", **masks)
    run = [len({tuple(r[:n]) for r in group for n in range(1, len(r))}) for group in groups]
    sizes = sorted(len(p) + n for p, n in zip(PROMPTS, run))
    assert shapes == [(2, max(sizes[0] + sizes[2], sizes[1]))]
    assert sum(run) < 0.7 * sum(len(r) - 1 for group in groups for r in group)


def test_one_token_responses_need_no_second_pass(model):
    (prompt, completion), masks = batch([[20], [2], [21], [22], [2], [23]])
    with Passes(model) as shapes:
        fast.token_logprobs(model, prompt, completion, way="shared", **masks)
    assert shapes == [(3, 6)]


@pytest.mark.parametrize("lengths, blocks", [
    ([3, 3, 3], [(0, 2, [0, 1, 2])]),
    ([1, 1], []),  # a response of one token has no input that predicts anything
    ([2, 2, 2, 9], [(0, 1, [0, 1, 2, 3]), (1, 8, [3])]),  # saves 3 × 7
    ([3, 3, 9, 1], [(0, 2, [0, 1, 2]), (2, 8, [2])]),  # the row of one token is never run
    ([2, 3, 4], [(0, 3, [0, 1, 2])]),  # would save no more than 2
    ([2, 7, 7], [(0, 6, [0, 1, 2])]),  # would save 5
    ([2, 2, 7], [(0, 1, [0, 1, 2]), (1, 6, [2])]),  # saves 10, just worthwhile
])
def test_short_completions_leave_early(lengths, blocks):
    """Every token but each row's last is run once, and none of the padding behind it beyond a block's end."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    found = [(begin, end, rows.tolist()) for begin, end, rows in fast.column_blocks(mask, worthwhile=10)]
    assert found == blocks
    run = torch.zeros(mask.shape, dtype=torch.long)
    for begin, end, rows in found:
        run[rows, begin:end] += 1
    assert run.max() <= 1 and (run[:, :-1][mask[:, 1:]] == 1).all()


@pytest.mark.parametrize("options", [{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, {}])
def test_a_model_with_a_sliding_window_is_not_packed(options):
    """A mask of ours would take the place of the window. Eight tokens, a window of four: no way changes the result."""
    model = build_model("qwen2", vocab_size=VOCABULARY, **options)
    assert fast.packable(model) == (not options)
    prompt, completion = torch.arange(6)[None] + 5, torch.arange(12).view(2, 6) + 20
    found = [fast.token_logprobs(model, prompt, completion, way=way)[0] for way in ("auto", "whole")]
    assert torch.allclose(*found, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- memory


def test_backward_keeps_no_logits(model):
    """C30's memory, counted: of shape (tokens, V) autograd keeps nothing with chunks, and everything without."""
    (prompt, completion), masks = batch()
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() if tensor.dim() == 2 and tensor.shape[1] == VOCABULARY and len(tensor) != 32 else 0)
        return tensor  # (32, V) is the head's own weight

    for chunk_size, some in ((3, False), (None, True)):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fast.token_logprobs(model, prompt, completion, chunk_size=chunk_size, **masks)
        assert (sum(kept) >= int(masks["mask"].sum()) * VOCABULARY) == some and (sum(kept) > 0) == some


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
    """B = 8, T = 128, V = 151,936: forward and backward need less than half of one float32 copy of the logits, 622 MB.

    What they need does not grow with B and T: a few copies of one chunk of 65 tokens.
    """
    batch, length, vocabulary = 8, 128, 151_936
    full = 4 * batch * length * vocabulary
    model = build_model("qwen2", vocab_size=vocabulary, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=1024)
    generator = torch.Generator().manual_seed(0)
    prompt, completion = (torch.randint(vocabulary, (batch, n), generator=generator) for n in (4, length))
    with LiveBytes() as live:
        logprobs, _ = fast.token_logprobs(model, prompt, completion)
        logprobs.sum().backward()
    assert 4 * vocabulary * 8 < live.peak < full / 2
    weight = model.get_output_embeddings().weight
    with torch.no_grad():  # values, on some tokens, against the whole softmax
        states = model.model(input_ids=torch.cat([prompt, completion], 1)[:1]).last_hidden_state[0, 3:11].double()
        expected = torch.log_softmax(states @ weight.double().T, -1).gather(1, completion[0, :8, None])[:, 0]
    assert torch.allclose(logprobs[0, :8].double(), expected, atol=1e-5)


def test_gradient_checkpointing_runs_every_block_again_in_backward(model):
    model, calls = copy.deepcopy(model), []
    recompute_activations(model)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    (prompt, completion), masks = batch()
    logprobs, _ = fast.token_logprobs(model, prompt, completion, **masks)
    before = len(calls)
    logprobs.sum().backward()
    assert (before, len(calls)) == (1, 2)
    with torch.no_grad():
        fast.token_logprobs(model, prompt, completion, **masks)
    assert len(calls) == 3


# -------------------------------------------------------------------------------------------------------- refusals


def test_responses_that_do_not_divide_evenly_are_refused(model):
    with pytest.raises(ValueError, match="3 completions .* 2 prompts"):
        fast.token_logprobs(model, torch.ones(2, 3, dtype=torch.long), torch.ones(3, 2, dtype=torch.long))


def test_masks_with_holes_are_refused_and_empty_ones_are_zero(model):
    prompt, completion = torch.tensor([[3, 4]]), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="without holes"):
        fast.token_logprobs(model, prompt, completion, mask=torch.tensor([[True, False, True]]))
    for part in fast.token_logprobs(model, prompt, completion, mask=torch.zeros(1, 3, dtype=torch.bool)):
        assert part.tolist() == [[0, 0, 0]]


def test_without_masks_everything_is_real(model):
    prompt, completion = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[20, 21], [22, 23], [24, 25], [26, 27]])
    ours, theirs = (function(model, prompt, completion) for function in (fast.token_logprobs, lm.token_logprobs))
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(ours, theirs))
