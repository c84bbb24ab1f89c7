"""Lesson 06 with real architectures and real tokenizers: GPT-2 (learned positions, dropout), Llama and Qwen2 (rotary).

Sampling is compared with enumeration and with transformers' own generate(), the update with a batch that is never cut up.
Ids such as C32 name small cases that trainers of this kind got wrong.
"""

import dataclasses
import importlib
import itertools
import math

import pytest
import torch
from conftest import build_model

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
KINDS = ["gpt2", "llama", "qwen2"]
EXAMPLES = [lm.Example("What is 2 + 3?", "5"), lm.Example("And 40 + 2? Think.", "42"), lm.Example("1 + 1?", "2")]
LINES = ["What is 2 + 3? Reply with the number only.", "Question: how much is 12 + 34?", "Answer: 46, since 12 + 34 = 46.",
         "user assistant system", "Über naïve café — 1,234.50 €", "hello hello hello world"]


def bpe_tokenizer(*, bos=False, eos=True, chat=False, pad="own", close=False):
    """A byte-level BPE trained on a few lines. bos: the tokenizer puts <s> in front; close: and </s> behind.

    chat: a template that itself writes the BOS, where there is one. pad: own | eos | missing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    if bos or close:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> " * bos + "$A" + " </s>" * close, special_tokens=[("<s>", 0), ("</s>", 1)])
    names = ({"bos_token": "<s>"} if bos else {}) | ({"eos_token": "</s>"} if eos else {})
    names |= {"own": {"pad_token": "<pad>"}, "eos": {"pad_token": "</s>"}, "missing": {}}[pad]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if chat:
        wrapped.chat_template = ("{{ bos_token }}" if bos else "") + (
            "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return wrapped


TOKENIZERS = {"plain": {}, "bos": {"bos": True}, "chat": {"chat": True}, "chat-bos": {"chat": True, "bos": True},
              "bos-pad-is-eos": {"bos": True, "pad": "eos"}, "no-pad": {"pad": "missing"},
              "chat-bos-no-pad": {"chat": True, "bos": True, "pad": "missing"}, "bos-eos": {"bos": True, "close": True}}


def saved(folder, kind, tokenizer, **options):
    """A model folder with that tokenizer, as a user would have it. GPT-2 keeps its dropout of .1."""
    model = build_model(kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(kind, tokenizer name) → (model, tokenizer) as load_model returns them; cached."""
    cache = {}

    def get(kind, name):
        if (kind, name) not in cache:
            folder = saved(tmp_path_factory.mktemp("model"), kind, bpe_tokenizer(**TOKENIZERS[name]))
            cache[kind, name] = lm.load_model(str(folder), device="cpu")
        return cache[kind, name]
    return get


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


# ------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("name", TOKENIZERS)
def test_c40_exactly_one_bos_where_there_is_one(name):
    tokenizer = bpe_tokenizer(**TOKENIZERS[name])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = "</s>"
    ids, mask = lm.encode_prompts(tokenizer, EXAMPLES, device="cpu")
    for row, keep, example in zip(ids, mask, EXAMPLES):
        real = row[keep].tolist()
        assert real.count(0) == int(TOKENIZERS[name].get("bos", False)) and (0 not in real or real[0] == 0)
        text = tokenizer.decode(real, skip_special_tokens=True)
        assert example.question in text
        if TOKENIZERS[name].get("chat"):
            assert tokenizer.decode(real).endswith("</s><|assistant|>") and "Answer:" not in text
        else:
            assert text.endswith("Answer:") and 1 not in real  # open: the model is to continue, not to begin anew


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_are_left_padded_and_masks_come_from_lengths(name, loaded):
    _, tokenizer = loaded("gpt2", name)
    ids, mask = lm.encode_prompts(tokenizer, EXAMPLES, device="cpu")
    alone = [lm.encode_prompts(tokenizer, [e], device="cpu")[0][0].tolist() for e in EXAMPLES]
    assert [row[keep].tolist() for row, keep in zip(ids, mask)] == alone
    assert mask[:, -1].all() and (mask[:, 1:].int() >= mask[:, :-1].int()).all() and mask.sum() < mask.numel()
    assert mask.sum(1).tolist() == [len(a) for a in alone]


def test_terse_questions_are_for_models_without_a_chat_template():
    example = lm.Example("What is 1 + 2? Reply with the number only.", "3", "1+2=")
    plain, chat = bpe_tokenizer(), bpe_tokenizer(chat=True)
    assert plain.decode(lm.encode_prompts(plain, [example], device="cpu")[0][0]) == "1+2="
    assert example.question in chat.decode(lm.encode_prompts(chat, [example], device="cpu")[0][0])


@pytest.mark.parametrize("text", ["12+34=46", "0", "9-10*3; 7,8", "99+1=100"])
def test_character_tokenizer_round_trip(text):
    tokenizer = lm.character_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    mask = torch.ones(1, len(ids) + 1).bool()
    assert lm.decode(tokenizer, torch.tensor([[*ids, tokenizer.eos_token_id]]), mask) == [text]  # EOS is not text


@pytest.mark.parametrize("text", LINES)
def test_bpe_round_trip_through_decode(text):
    tokenizer = bpe_tokenizer(bos=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([[*ids, 1, 7, 7], [7, 1, *[2] * (len(ids) + 1)]])
    mask = lm.completion_mask(tokens, eos_ids={1})
    assert lm.decode(tokenizer, tokens, mask) == [text, tokenizer.decode([7])]


def test_stop_ids_collects_every_eos():
    tokenizer = bpe_tokenizer()
    for configured, expected in ((9, {1, 9}), ([9, 2], {1, 2, 9}), (None, {1}), ([1], {1})):
        model = build_model("llama", vocab_size=20)
        model.generation_config.eos_token_id = configured
        assert lm.stop_ids(model, tokenizer) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_with_neither_pad_nor_eos_is_refused(kind, tmp_path):
    saved(tmp_path / "model", kind, bpe_tokenizer(pad="missing", eos=False))
    with pytest.raises(lm.UserError, match="neither a pad nor an end-of-text token"):
        lm.load_model(str(tmp_path / "model"), device="cpu")


# ------------------------------------------------------------------------------------ every model × every tokenizer


@pytest.mark.parametrize("kind, name", [(k, n) for k in KINDS for n in TOKENIZERS])
def test_first_update_has_ratio_one_and_clips_nothing(kind, name, loaded):
    """C28 and C40: sampler and trainer see the same ids, positions and network; GPT-2 was saved with dropout .1."""
    model, tokenizer = loaded(kind, name)
    assert tokenizer.pad_token_id is not None
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = sampled_batch(model, tokenizer, config())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    metrics = lm.train_step(model, optimizer, batch, config(), algorithm=lm.ALGORITHMS["grpo"], generator=generator())
    moved = any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
    model.load_state_dict(before)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["ratio_p05"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_fraction"] == 0 and metrics["kl_old"] == pytest.approx(0, abs=1e-6)
    assert metrics["ess"] == pytest.approx(1, abs=1e-4)
    assert moved and metrics["grad_norm"] > 0


def test_c28_dropout_is_off_in_training_mode_too(loaded):
    model, tokenizer = loaded("gpt2", "plain")
    assert model.config.resid_pdrop == .1
    batch = sampled_batch(model, tokenizer, config())
    arguments = dict(prompt_mask=batch.prompt_mask, mask=batch.mask)
    model.train()
    first, second = (lm.token_logprobs(model, batch.prompt, batch.tokens, **arguments)[0] for _ in range(2))
    again = lm.collect(model, tokenizer, EXAMPLES, config(), version=0, generator=generator())
    model.eval()
    assert torch.equal(first, second) and (first - batch.old_logprobs).abs().max() < 1e-4
    assert torch.equal(again.tokens, batch.tokens)


# ------------------------------------------------------------------------------------------------------- generation


def left_padded(prompts, extra=0):
    width = max(map(len, prompts)) + extra
    return (torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
            torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts]))


PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eos", [{2}, {2, 17, 23, 5, 8}])
def test_greedy_is_transformers_own_greedy(kind, eos):
    model = build_model(kind, vocab_size=30, seed=3)
    prompt, prompt_mask = left_padded(PROMPTS)
    tokens, mask, _ = lm.generate(model, prompt, prompt_mask, group_size=2, max_new_tokens=12, temperature=0.0, eos_ids=eos,
                                  pad_id=0, generator=None)
    theirs = model.generate(input_ids=prompt, attention_mask=prompt_mask.long(), do_sample=False, max_new_tokens=12,
                            eos_token_id=sorted(eos), pad_token_id=0)[:, prompt.shape[1]:]
    for row, expected in enumerate(theirs.repeat_interleave(2, 0)):
        found = tokens[row][mask[row]]
        assert torch.equal(found, expected[: len(found)])
        assert (expected[len(found):] == 0).all() and (len(found) == 12 or found[-1].item() in eos)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pads", [1, 3, 8])
def test_c32_left_pads_change_nothing(kind, pads):
    model = build_model(kind, vocab_size=30, seed=3)
    runs = [lm.generate(model, *left_padded(PROMPTS, extra), group_size=3, max_new_tokens=6, temperature=1.0, eos_ids={2},
                        pad_id=0, generator=generator(5)) for extra in (0, pads)]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert (runs[0][2] - runs[1][2]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [.6, 1.0, 1.5])
def test_recorded_logprobs_are_the_trainers(kind, temperature):
    """Many rows that end at many places, so that finished rows leave the batch and the cache is cut again and again."""
    model = build_model(kind, vocab_size=13, seed=1)
    prompt, prompt_mask = left_padded(PROMPTS)
    tokens, mask, old = lm.generate(model, prompt, prompt_mask, group_size=16, max_new_tokens=20, temperature=temperature,
                                    eos_ids={2, 5, 7}, pad_id=0, generator=generator())
    assert len(set(mask.sum(1).tolist())) > 4
    logprobs, _ = lm.token_logprobs(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask, temperature=temperature)
    assert (logprobs - old).abs().max() < 1e-4
    ends = torch.isin(tokens, torch.tensor([2, 5, 7])) & mask
    assert (ends.sum(1) <= 1).all() and ((ends.sum(1) == 1) | (mask.sum(1) == tokens.shape[1])).all()
    assert (tokens[~mask] == 0).all() and (old[~mask] == 0).all() and (old[mask] < 0).all()


def test_finished_rows_cost_nothing(fixed_logits):
    """Responses of many lengths: as many passes as the longest has tokens, and few more rows in them than tokens needed."""
    model = fixed_logits([0.0] * 10)
    sizes, forward = [], model.forward
    model.forward = lambda *args, **kwargs: sizes.append(len(kwargs["input_ids"])) or forward(*args, **kwargs)
    _, mask, _ = lm.generate(model, torch.tensor([[3]]), torch.ones(1, 1).bool(), group_size=200, max_new_tokens=100,
                             temperature=1.0, eos_ids={2}, pad_id=0, generator=generator())
    lengths = mask.sum(1)
    assert len(set(lengths.tolist())) > 15 and lengths.max() < 100
    assert len(sizes) == lengths.max()
    needed = int((lengths - 1).sum())  # the last token of a response is not fed back
    assert sum(sizes[1:]) <= needed / .75


def chi_square(counts, probabilities):
    """Pearson's statistic as a standard score: about N(0, 1) when the counts have these probabilities."""
    expected = probabilities * counts.sum()
    keep = expected > 5
    counts, expected = (torch.cat([x[keep], x[~keep].sum()[None]]) for x in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    freedom = len(counts) - 1
    return ((statistic - freedom) / math.sqrt(2 * freedom)).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [.7, 1.0, 1.6])
def test_c33_sampling_follows_the_tempered_softmax_whatever_the_generation_config_says(kind, temperature):
    """All two-token responses of a 12-word vocabulary are enumerated, and 6000 sampled ones compared with that."""
    model, size = build_model(kind, vocab_size=12, seed=2), 12
    for name, value in {"top_k": 2, "top_p": .5, "repetition_penalty": 3.0, "temperature": .1, "do_sample": True}.items():
        setattr(model.generation_config, name, value)
    prompt = torch.tensor([[3, 4, 5]])
    tokens, mask, old = lm.generate(model, prompt, torch.ones_like(prompt).bool(), group_size=6000, max_new_tokens=2,
                                    temperature=temperature, eos_ids=set(), pad_id=0, generator=generator(7))
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


def test_c33_kept_mass_is_what_truncation_would_hide(fixed_logits):
    """p = [.5, .3, .15, .05]: all four words are sampled, each with its own log-probability, not those of top-2."""
    p = torch.tensor([.5, .3, .15, .05])
    model = fixed_logits(p.log().tolist())
    model.generation_config.top_k = 2
    tokens, _, old = lm.generate(model, torch.tensor([[0]]), torch.ones(1, 1).bool(), group_size=4000, max_new_tokens=1,
                                 temperature=1.0, eos_ids=set(), pad_id=0, generator=generator())
    assert (torch.bincount(tokens[:, 0]) / 4000 - p).abs().max() < .03
    assert (old[:, 0].exp() - p[tokens[:, 0]]).abs().max() < 1e-5


def test_groups_are_independent_draws_and_follow_the_generator():
    model = build_model("qwen2", vocab_size=30)
    arguments = dict(group_size=8, max_new_tokens=6, temperature=1.0, eos_ids={2}, pad_id=0)
    first, again, other = (lm.generate(model, *left_padded(PROMPTS), **arguments, generator=generator(s))[0]
                           for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row.tolist()) for row in first}) > 20


# Words: 0 pad, 2 EOS, 9 a second EOS. Near-certain steps: 5 → 7 → 8 → 2 → 2 and 6 → 7.
CHAIN = {(5, 7): -1e-9, (7, 8): -1e-9, (8, 2): -1e-9, (2, 2): -1e-9, (6, 6): -1e-9, (4, 2): -1e-9}


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_c35_first_eos_is_kept_and_trained_on(bigram, pad, temperature):
    """Three prompts: an answer with an end, one that is cut, and one that is empty, also when pad and EOS are one id."""
    prompt, keep = torch.tensor([[5], [6], [4]]), torch.ones(3, 1).bool()
    tokens, mask, old = lm.generate(bigram(CHAIN), prompt, keep, group_size=1, max_new_tokens=5, temperature=temperature,
                                    eos_ids={2}, pad_id=pad, generator=generator())
    assert tokens.tolist() == [[7, 8, 2, pad, pad], [6] * 5, [2, pad, pad, pad, pad]]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]


def test_c35_a_cut_row_next_to_a_longer_one_ends_where_it_ended(bigram):
    """max_new_tokens cuts; the width of the batch does not: 2 tokens are all that there is."""
    tokens, mask, _ = lm.generate(bigram(CHAIN), torch.tensor([[6], [4]]), torch.ones(2, 1).bool(), group_size=1,
                                  max_new_tokens=2, temperature=0.0, eos_ids={2}, pad_id=0, generator=None)
    assert tokens.tolist() == [[6, 6], [2, 0]] and mask.int().tolist() == [[1, 1], [1, 0]]


def test_width_is_that_of_the_longest_response(bigram):
    tokens, mask, old = lm.generate(bigram(CHAIN), torch.tensor([[5], [4]]), torch.ones(2, 1).bool(), group_size=1,
                                    max_new_tokens=50, temperature=0.0, eos_ids={2}, pad_id=0, generator=None)
    assert tokens.shape == mask.shape == old.shape == (2, 3)


class DigitTokens:
    """Just enough of a tokenizer for `collect`: words are listed, text is their concatenation, `terse` is ids."""
    pad_token_id, eos_token_id, chat_template = 0, 2, None
    words = {1: "1", 3: "12", 4: "2", 5: "q", 6: "r", 7: "7", 8: "8"}

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
    batch = collected(model, examples=[lm.Example("q", "78", "5")])
    assert batch.tokens.tolist() == [[7, 8, 9]] * 2 and batch.mask.all() and not batch.truncated.any()
    model.generation_config.eos_token_id = 2
    assert collected(model, examples=[lm.Example("q", "78", "5")]).truncated.all()


def test_c39_the_sampled_ids_are_trained_on_and_not_their_text(bigram):
    """Words "1", "2" and "12": the model says "1", "2"; the text "12" would be encoded as one word."""
    batch = collected(bigram({(5, 1): -.01, (1, 4): -.02, (4, 2): -.03}), examples=[lm.Example("q", "12", "5")], group_size=8)
    row = [i for i in range(8) if batch.tokens[i, :3].tolist() == [1, 4, 2]][0]
    assert batch.samples[0]["answer"] == "12" and batch.rewards[0, row] == 1
    assert batch.mask[row].sum() == 3
    assert batch.old_logprobs[row, :3].tolist() == pytest.approx([-.01, -.02, -.03], abs=1e-4)


def test_rewards_meet_the_prompts_that_they_belong_to(bigram):
    """C05: prompt q is answered 7 and prompt r 8, whatever the order and the group size."""
    model = bigram({(5, 7): -1e-9, (7, 2): -1e-9, (6, 8): -1e-9, (8, 2): -1e-9})
    q, r, wrong = lm.Example("q", "7", "5"), lm.Example("r", "8", "6"), lm.Example("r", "7", "6")
    batch = collected(model, examples=[q, r, wrong, q], group_size=3)
    assert batch.rewards.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert batch.tokens[:, 0].tolist() == [7] * 3 + [8] * 6 + [7] * 3
    assert [(s["question"], s["response"], s["answer"], s["reward"]) for s in batch.samples] == [
        ("q", "7", "7", 1.0), ("r", "8", "8", 1.0), ("r", "8", "7", 0.0), ("q", "7", "7", 1.0)]
    assert batch.version == 3 and not batch.truncated.any()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")  # renamed in transformers 5
@pytest.mark.parametrize("kind", KINDS)
def test_c42_gradient_checkpointing_and_train_mode_change_nothing(kind):
    model, (prompt, prompt_mask) = build_model(kind, vocab_size=30, seed=3, **(
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {})), left_padded(PROMPTS)

    def both():
        tokens, mask, _ = lm.generate(model, prompt, prompt_mask, group_size=2, max_new_tokens=8, temperature=0.0,
                                      eos_ids={2}, pad_id=0, generator=None)
        logprobs, _ = lm.token_logprobs(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask)
        model.zero_grad()
        logprobs.sum().backward()
        return tokens, logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    plain = both()
    model.gradient_checkpointing_enable()
    model.train()
    checkpointed = both()
    assert model.training  # as it was
    assert torch.equal(plain[0], checkpointed[0])
    assert torch.allclose(plain[1], checkpointed[1], atol=1e-5)
    assert torch.allclose(plain[2], checkpointed[2], atol=1e-4 * float(plain[2].abs().max()))
    with pytest.raises(Exception):
        lm.generate(model, prompt.float(), prompt_mask, group_size=2, max_new_tokens=8, temperature=0.0, eos_ids={2}, pad_id=0,
                    generator=None)
    assert model.training  # also after an exception


# -------------------------------------------------------------------------------------------------------- the update


@pytest.fixture(scope="module")
def stale(loaded):
    """(model, batch): a batch that was sampled before the weights moved, so that clipping and weights have work to do."""
    cache = {}

    def get(kind):
        if kind not in cache:
            model, tokenizer = loaded(kind, "bos")
            model = lm.copy.deepcopy(model)
            batch = sampled_batch(model, tokenizer, config())
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
    loss, metrics = lm.policy_loss(torch.stack(rows), batch.old_logprobs.double(), advantages, batch.mask, algorithm=algorithm)
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}, {"loss": loss.item()} | {k: v.item() for k, v in
                                                                                              metrics.items()}


def assert_same_gradient(found, expected, tolerance):
    scale = max(g.abs().max() for g in expected.values())
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["grpo", "rec-oneside-nois", "rec-gspo-is", "rep-opmd", "red-drop", "red-weight-adaptive"])
def test_c13_micro_batches_add_up_to_the_uncut_batch(kind, name, stale):
    """Micro-batches of 1, 2 and all 3 prompts: one gradient, and the one of a batch that is not cut at all."""
    model, batch = stale(kind)
    row = lm.ALGORITHMS[name] if "gspo" not in name else lm.find_algorithm(name, eps_low=.01, eps_high=.01)
    expected, reference = uncut(model, batch, row)
    per_prompt = batch.prompt.shape[1] + 4 * batch.tokens.shape[1]
    for tokens in (1, 2 * per_prompt, 100_000):
        found, metrics = update(model, batch, row, micro_batch_tokens=tokens)
        assert_same_gradient(found, expected, 2e-5)
        for key, value in reference.items():
            assert metrics[key] == pytest.approx(value, abs=2e-5, rel=1e-4), key
    assert name not in ("grpo", "rec-oneside-nois", "rec-gspo-is") or 0 < reference["clip_fraction"] < 1


def test_micro_batches_are_as_many_as_they_must_be(stale, monkeypatch):
    model, batch = stale("qwen2")
    sizes, original = [], lm.token_logprobs
    monkeypatch.setattr(lm, "token_logprobs",
                        lambda m, prompt, *a, **k: sizes.append(len(prompt)) or original(m, prompt, *a, **k))
    per_prompt = batch.prompt.shape[1] + 4 * batch.tokens.shape[1]
    for tokens, expected in ((1, [1, 1, 1]), (2 * per_prompt, [2, 1]), (2 * per_prompt - 1, [1, 1, 1]), (100_000, [3])):
        sizes.clear()
        update(model, batch, lm.ALGORITHMS["reinforce"], micro_batch_tokens=tokens)
        assert sizes == expected


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
    logprobs, entropy = lm.token_logprobs(model, batch.prompt, batch.tokens, prompt_mask=batch.prompt_mask, mask=batch.mask)
    assert metrics["entropy"] == pytest.approx((entropy.sum() / batch.mask.sum()).item(), rel=1e-5)
    ratio = (logprobs - batch.old_logprobs)[batch.mask].exp()
    assert metrics["ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(ratio.mean().item(), rel=1e-4)


def test_gradients_are_clipped_to_the_norm_and_do_not_pile_up(stale):
    model, batch = stale("gpt2")
    free, metrics = update(model, batch, lm.ALGORITHMS["reinforce"])
    limit = metrics["grad_norm"] / 4
    clipped, again = update(model, batch, lm.ALGORITHMS["reinforce"], max_grad_norm=limit)
    assert again["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)  # logged before clipping, not accumulated
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


def test_a_loss_that_is_not_finite_moves_no_weight(stale):
    model, batch = stale("qwen2")
    before = [p.clone() for p in model.parameters()]
    bad = dataclasses.replace(batch, old_logprobs=torch.full_like(batch.old_logprobs, math.nan))
    with pytest.raises(FloatingPointError, match="not finite"):
        lm.train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), bad, config(),
                      algorithm=lm.ALGORITHMS["rec-oneside-is"], generator=generator())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


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


# -------------------------------------------------------------------------------------------------------- self-check


def test_self_check_passes_for_every_kind_and_reports(loaded, capsys):
    for kind in KINDS:
        model, tokenizer = loaded(kind, "bos")
        task = lm.Task("addition", EXAMPLES, EXAMPLES)
        assert lm.self_check(model, tokenizer, task, config()) < 1e-4
        assert "self-check" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["temperature", "positions", "shift"])
def test_self_check_finds_silent_faults(loaded, monkeypatch, fault):
    model, tokenizer = loaded("gpt2", "bos")
    original = lm.token_logprobs

    def faulty(model, prompt, completion, **options):
        if fault == "temperature":
            options["temperature"] = 1.3
        if fault == "positions":
            options["prompt_mask"] = torch.ones_like(prompt).bool()
        if fault == "shift":
            completion = completion.roll(1, 1)
        return original(model, prompt, completion, **options)

    monkeypatch.setattr(lm, "token_logprobs", faulty)
    with pytest.raises(lm.UserError, match="log-probabilities differ"):
        lm.self_check(model, tokenizer, lm.Task("addition", EXAMPLES, EXAMPLES), config())


# ------------------------------------------------------------------------------------------------------ long prompts


def test_questions_that_do_not_fit_the_context_are_left_out(loaded, capsys):
    """GPT-2 has 128 learned positions and no way to go beyond: prompt and response together must fit."""
    model, tokenizer = loaded("gpt2", "bos")
    long = lm.Example("1 + 1? " * 30, "2")
    sizes = [lm.encode_prompts(tokenizer, [e], device="cpu")[0].shape[1] for e in (*EXAMPLES, long)]
    task = lm.Task("sums.jsonl", [*EXAMPLES, long], [*EXAMPLES, long])

    def kept(**options):
        return [e.question for e in lm.drop_long_prompts(task, model, tokenizer, config(**options)).train]

    assert sizes[3] > 128 and kept() == [e.question for e in EXAMPLES]
    assert "left out 1 training questions" in capsys.readouterr().out
    assert kept(max_new_tokens=128 - max(sizes[:3])) == [e.question for e in EXAMPLES]
    assert len(kept(max_new_tokens=128 - max(sizes[:3]) + 1)) == 2
    assert len(kept(max_prompt_tokens=max(sizes[:3]) - 1)) == 2
    with pytest.raises(lm.UserError, match="context of 128"):
        kept(max_new_tokens=128)
    addition = lm.Task("addition", EXAMPLES, EXAMPLES)
    assert lm.drop_long_prompts(addition, model, tokenizer, config()) == addition
    with pytest.raises(lm.UserError, match="context of 128"):
        lm.drop_long_prompts(addition, model, tokenizer, config(max_new_tokens=128))
