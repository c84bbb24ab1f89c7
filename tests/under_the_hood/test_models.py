"""Any causal language model: its tokenizer and chat template, its context, its modes; and the built-in models.

Ids such as C40 name small cases that trainers of this kind got wrong.
"""

import copy
import importlib
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import LINES, TOKENIZERS, bpe_tokenizer, build_digit_tokenizer, build_model, left_padded, saved
from under_the_hood import models, parallel
from under_the_hood.errors import UserError
from under_the_hood.models import (SMALL, built_in_model, character_tokenizer, context_length, copy_for_sampling,
                                   decode, drop_long_prompts, encode_prompts, load_model, recompute_activations,
                                   sliding_window, stop_ids)
from under_the_hood.tasks import Example, Task, addition_examples, worked_steps

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)
KINDS = ["gpt2", "llama", "qwen2"]
EXAMPLES = [Example("What is 2 + 3?", "5"), Example("And 40 + 2? Think.", "42"), Example("1 + 1?", "2")]
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


def config(**options):
    return lm.Config(**{"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 5} | options)


# ------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("name", TOKENIZERS)
def test_c40_exactly_one_bos_where_there_is_one(name):
    tokenizer = bpe_tokenizer(**TOKENIZERS[name])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = "</s>"
    ids, mask = encode_prompts(tokenizer, EXAMPLES, device="cpu")
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
    ids, mask = encode_prompts(tokenizer, EXAMPLES, device="cpu")
    alone = [encode_prompts(tokenizer, [e], device="cpu")[0][0].tolist() for e in EXAMPLES]
    assert [row[keep].tolist() for row, keep in zip(ids, mask)] == alone
    assert mask[:, -1].all() and (mask[:, 1:].int() >= mask[:, :-1].int()).all() and mask.sum() < mask.numel()
    assert mask.sum(1).tolist() == [len(a) for a in alone]


def test_terse_questions_are_for_models_without_a_chat_template():
    example = Example("What is 1 + 2? Reply with the number only.", "3", "1+2=")
    plain, chat = bpe_tokenizer(), bpe_tokenizer(chat=True)
    assert plain.decode(encode_prompts(plain, [example], device="cpu")[0][0]) == "1+2="
    assert example.question in chat.decode(encode_prompts(chat, [example], device="cpu")[0][0])


@pytest.mark.parametrize("text", ["12+34=46", "0", "9-10*3; 7,8", "99+1=100"])
def test_character_tokenizer_round_trip(text):
    tokenizer = character_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    mask = torch.ones(1, len(ids) + 1).bool()
    assert decode(tokenizer, torch.tensor([[*ids, tokenizer.eos_token_id]]), mask) == [text]  # EOS is not text


@pytest.mark.parametrize("text", LINES)
def test_bpe_round_trip_through_decode(text):
    tokenizer = bpe_tokenizer(bos=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([[*ids, 1, 7, 7], [7, 1, *[2] * (len(ids) + 1)]])
    mask = torch.arange(len(ids) + 3) < torch.tensor([[len(ids) + 1], [2]])
    assert decode(tokenizer, tokens, mask) == [text, tokenizer.decode([7])]


def test_stop_ids_collects_every_eos():
    tokenizer = bpe_tokenizer()
    for configured, expected in ((9, {1, 9}), ([9, 2], {1, 2, 9}), (None, {1}), ([1], {1})):
        model = build_model("llama", vocab_size=20)
        model.generation_config.eos_token_id = configured
        assert stop_ids(model, tokenizer) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_with_neither_pad_nor_eos_is_refused(kind, tmp_path):
    saved(tmp_path / "model", kind, bpe_tokenizer(pad="missing", eos=False))
    with pytest.raises(UserError, match="neither a pad nor an end-of-text token"):
        load_model(str(tmp_path / "model"), device="cpu")


def test_a_special_token_that_a_tokenizer_class_invents_is_no_harm_but_a_word_beyond_the_embedding_is(tmp_path):
    """Qwen2's class adds <|endoftext|>, as unknown and as pad token, whatever the file says; no text ever holds it."""
    folder = saved(tmp_path / "model", "qwen2", bpe_tokenizer(pad="missing"))
    model, tokenizer = load_model(str(folder), device="cpu")
    assert len(tokenizer) == 301 > model.config.vocab_size == 300
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="has 302 tokens and its embedding 300 rows"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("name", ["nowhere/to-be-found", "some/model.gguf"])
def test_a_model_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match=f"--model {name}"):
        load_model(name, device="cpu")


def test_a_file_that_is_no_model_is_a_fault_of_the_file(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(UserError, match="--model .*broken.gguf: ") as error:
        load_model(str(tmp_path / "broken.gguf"), device="cpu")
    assert "on the hub" not in str(error.value)
    with pytest.raises(UserError, match="nor reachable on the hub: "):
        load_model("nowhere/to-be-found", device="cpu")


# -------------------------------------------------------------------------------------------------- worked examples


def test_worked_examples_stand_before_the_question_and_never_give_it_away():
    tokenizer = build_digit_tokenizer()
    asked, other = Example("10+1", "11", "10+1="), Example("1+1", "10", "1+1=")
    ids, mask = encode_prompts(tokenizer, [asked], device="cpu", worked=[asked, other])
    assert ids[0].tolist() == tokenizer("1+1=10;10+1=")["input_ids"] and mask.all()
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    ids, _ = encode_prompts(chatty, [asked], device="cpu", worked=[other])
    assert ids[0].tolist() == tokenizer("u:1+1|a:10|u:10+1|")["input_ids"]


# ----------------------------------------------------------------------------------------------------- long prompts


def test_questions_that_do_not_fit_the_context_are_left_out(loaded, capsys):
    """GPT-2 has 128 learned positions and no way to go beyond: prompt and response together must fit."""
    model, tokenizer = loaded("gpt2", "bos")
    long = Example("1 + 1? " * 30, "2")
    sizes = [encode_prompts(tokenizer, [e], device="cpu")[0].shape[1] for e in (*EXAMPLES, long)]
    task = Task("sums.jsonl", [*EXAMPLES, long], [*EXAMPLES, long])

    def kept(**options):
        return [e.question for e in drop_long_prompts(task, model, tokenizer, config(**options)).train]

    assert sizes[3] > 128 and kept() == [e.question for e in EXAMPLES]
    assert "left out 1 training questions" in capsys.readouterr().out
    assert kept(max_new_tokens=128 - max(sizes[:3])) == [e.question for e in EXAMPLES]
    assert len(kept(max_new_tokens=128 - max(sizes[:3]) + 1)) == 2
    assert len(kept(max_prompt_tokens=max(sizes[:3]) - 1)) == 2
    with pytest.raises(UserError, match="context of 128"):
        kept(max_new_tokens=128)
    addition = Task("addition", EXAMPLES, EXAMPLES)
    assert drop_long_prompts(addition, model, tokenizer, config()) == addition
    with pytest.raises(UserError, match="context of 128"):
        drop_long_prompts(addition, model, tokenizer, config(max_new_tokens=128))


def test_the_context_ends_where_the_model_changes_its_frequencies_and_the_window_is_the_shortest():
    def of(**options):
        options = SimpleNamespace(**options)
        options.get_text_config = lambda: options
        return SimpleNamespace(config=options)

    assert context_length(of(max_position_embeddings=4096)) == 4096 and sliding_window(of(sliding_window=None)) > 1e9
    assert context_length(of(max_position_embeddings=None)) > 1e9
    long = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    assert context_length(of(max_position_embeddings=4096, rope_parameters=long)) == 512
    assert context_length(of(max_position_embeddings=4096, rope_parameters={"full": long, "other": {}})) == 512
    assert context_length(of(max_position_embeddings=4096, rope_parameters={**long, "rope_type": "yarn"})) == 4096
    assert sliding_window(of(sliding_window=64, attention_chunk_size=32)) == 32


# ------------------------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("engine", ["plain", "fast"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_c42_gradient_checkpointing_and_train_mode_change_nothing(kind, engine):
    model, (prompt, prompt_mask) = build_model(kind, vocab_size=30, seed=3), left_padded(PROMPTS)
    generate, token_logprobs = lm.ENGINES[engine]

    def both():
        tokens, mask, _ = generate(model, prompt, prompt_mask, group_size=2, max_new_tokens=8, temperature=0.0,
                                   eos_ids={2}, pad_id=0, generator=None)
        logprobs, _ = token_logprobs(model, prompt, tokens, prompt_mask=prompt_mask, mask=mask)
        model.zero_grad()
        logprobs.sum().backward()
        return tokens, logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    plain = both()
    recompute_activations(model)  # which takes GPT-2's dropout out
    model.train()
    checkpointed = both()
    assert model.training  # as it was
    assert torch.equal(plain[0], checkpointed[0])
    assert torch.allclose(plain[1], checkpointed[1], atol=1e-5)
    assert torch.allclose(plain[2], checkpointed[2], atol=1e-4 * float(plain[2].abs().max()))
    with pytest.raises(RuntimeError):
        generate(model, prompt.float(), prompt_mask, group_size=2, max_new_tokens=8, temperature=0.0, eos_ids={2},
                 pad_id=0, generator=None)
    assert model.training  # also after an exception


def test_without_gradients_a_model_that_recomputes_samples_in_eval_mode_and_goes_back_to_its_mode():
    model, seen = build_model("qwen2", vocab_size=30), []
    recompute_activations(model)
    model.register_forward_pre_hook(lambda module, *_: seen.append(module.training))
    for training in (True, False):
        model.train(training)
        lm.generate(model, *left_padded(PROMPTS), group_size=1, max_new_tokens=2, temperature=0.0, eos_ids={2},
                    pad_id=0, generator=None)
        assert model.training == training
    assert seen and not any(seen)


@pytest.mark.parametrize("name, other", [("cache", "past_key_values"), ("past_key_values", "cache")])
def test_the_cache_goes_by_the_name_that_the_model_has_for_it(name, other, monkeypatch):
    monkeypatch.setattr(models, "forward_parameters", lambda kind: frozenset({name}))
    inputs = models.model_inputs(build_model("llama", vocab_size=9), torch.ones(1, 1), torch.ones(1, 3), "kept")
    assert inputs[name] == "kept" and other not in inputs and "position_ids" not in inputs
    assert models.next_cache({name: "kept"}) == "kept"


def test_the_sampler_is_the_policy_while_they_are_refreshed_together_and_else_a_copy():
    model = build_model("llama", vocab_size=9)
    for options in ({}, {"sync_offset": 3}, {"engine": "paged"}):  # on a CPU no engine wants bfloat16 weights
        assert copy_for_sampling(model, config(**options)) is model
    for options in ({"sync_interval": 2}, {"offline": True}, {"shard": True}):
        sampler = copy_for_sampling(model, config(**options))
        with torch.no_grad():
            sampler.lm_head.weight.add_(1)
        assert not torch.isclose(sampler.lm_head.weight, model.lm_head.weight).any()


def test_bfloat16_is_asked_for_and_weights_stay_float32():
    model, ids = build_model("llama", vocab_size=9), torch.tensor([[3, 4]])
    for dtype, expected in (("float32", torch.float32), ("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        with models.autocast(config(dtype=dtype), torch.device("cpu")):
            assert model(input_ids=ids).logits.dtype == expected
    assert model.lm_head.weight.dtype == torch.float32


# --------------------------------------------------------------------------------------------------- built-in models


def test_a_model_is_made_that_writes_steps(tmp_path, monkeypatch):
    """Narrow and after few steps it is no good yet, but it expects worked steps more than others of these letters."""
    recipe = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "steps": {4: 40}, "batch": 32, "learning_rate": 5e-3}
    monkeypatch.setitem(models.BUILT_IN, "small", recipe)
    shown, held_out = addition_examples(4)
    monkeypatch.setattr(models, "addition_examples", lambda digits: (shown[:1500], held_out))  # of 17,991
    model, tokenizer = load_model("small", device="cpu", cache_dir=tmp_path, task="addition-steps")

    def mean_logprob(shuffle):
        values = []
        for example in held_out[:16]:
            text = list(worked_steps(example.terse))
            if shuffle:
                random.Random(0).shuffle(text)
            prompt, completion = (torch.tensor([tokenizer(t)["input_ids"]]) for t in (example.terse, "".join(text)))
            values.append(lm.token_logprobs(model, prompt, completion)[0].mean().item())
        return sum(values) / len(values)

    assert mean_logprob(shuffle=False) > max(mean_logprob(shuffle=True), -torch.tensor(19.0).log()) + 0.3
    assert [folder.name.startswith("small-4-digits") for folder in tmp_path.iterdir()] == [True]
    again, _ = load_model("small", device="cpu", cache_dir=tmp_path, task="addition-steps")
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)


@pytest.mark.parametrize("flags, words", [
    (["--model", "small"], "has not learned --task addition;"),
    (["--model", "small", "--task", "addition-steps"], "need 40"),
    (["--model", "tiny", "--task", "addition-steps", "--max-new-tokens", "48"], "tiny adds 1 to 3 digits"),
    (["--model", "small", "--task", "gsm8k", "--max-new-tokens", "48"], "has not learned"),
    (["--task", "addition-9"], "addition-steps"),
])
def test_what_a_built_in_model_cannot_do_is_refused_in_one_line(capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        lm.main(flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1


def test_a_folder_without_a_model_is_filled_again_and_by_rank_0_only(tiny_run, tmp_path, monkeypatch):
    """Of several processes save_pretrained writes on rank 0 alone; what another left would be half a model for good."""
    made = load_model(str(tiny_run[0]), device="cpu")
    monkeypatch.setattr(models, "make_built_in_model", lambda *_, **__: made)
    folder = built_in_model(1, tmp_path)
    assert (folder / "model.safetensors").exists()
    (folder / "config.json").unlink()
    assert (built_in_model(1, tmp_path) / "config.json").exists()
    (folder / "config.json").unlink()
    monkeypatch.setattr(parallel, "rank", lambda: 1)
    with pytest.raises(UserError, match="rank 0 makes it"):
        built_in_model(1, tmp_path)


@pytest.mark.parametrize("digits", [2, 4])
def test_of_the_demonstrations_some_hold_one_mistake_anywhere(digits, monkeypatch):
    """What the first step of supervised training sees: prompt, answer, end; learned are answer and end."""
    from transformers import Qwen2ForCausalLM

    seen, tokenizer = [], character_tokenizer()

    class Enough(Exception):
        pass

    def forward(self, input_ids, labels):
        seen.extend(zip(input_ids, labels))
        raise Enough
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", forward)
    monkeypatch.setattr(models, "addition_examples", lambda digits: (addition_examples(digits)[0][:1000], []))
    recipe = {**models.BUILT_IN["small"], "steps": {digits: 1}, "batch": 3000, "wrong_share": 0.6}
    with pytest.raises(Enough):
        models.make_built_in_model(digits, recipe)
    mistakes, places = 0, Counter()
    for ids, labels in seen:
        text = tokenizer.decode(ids).replace("<pad>", "")
        question, answer = text.removesuffix("<eos>").split("=", 1)
        assert tokenizer.decode(labels[labels >= 0]) == answer + "<eos>" and text.endswith("<eos>")
        if digits < 4:
            right = str(sum(map(int, question.split("+"))))
            wrong = [i for i, (a, b) in enumerate(zip(answer, right, strict=True)) if a != b]
            assert len(wrong) <= 1
            wrong = [(len(right), i) for i in wrong]
        else:
            slips = range(max(map(len, question.split("+"))))
            wrong = [] if answer == worked_steps(question) else [
                (len(slips), i) for i in slips if answer == worked_steps(question, i)]
            assert wrong or answer == worked_steps(question)
        mistakes, places = mistakes + bool(wrong), places + Counter(wrong)
    assert mistakes / len(seen) == pytest.approx(0.6, abs=0.045)  # 5 standard deviations
    longest = max(length for length, _ in places)
    counts = [places[longest, i] for i in range(longest)]
    assert min(counts) > 0.8 * max(counts) > 100  # equally often at every place


def test_what_the_built_in_tokenizer_encodes_it_decodes():
    tokenizer, text = character_tokenizer(), "12 + 3 , 4;5=0*6-7 , "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
