"""E09: switches of a chat template reach every prompt. D16, D24, D25: a tokenizer or a file that cannot be used is one line."""

import importlib
import json

import pytest
import torch

from conftest import bpe_tokenizer, build_digit_tokenizer, build_model
from under_the_hood import models
from under_the_hood.answers import is_correct
from under_the_hood.errors import UserError
from under_the_hood.tasks import Example, read_jsonl

lm = importlib.import_module("06_full_llm_training")
TEMPLATE = ("{% for m in messages %}{{ '+' if m.role == 'system' else '=' }}{{ m.content }}{% endfor %}"
            "{{ '' if thinking is defined and not thinking else '0' }}")


def chat_tokenizer():
    tokenizer = build_digit_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prompt_text(tokenizer, **flags):
    models.set_chat_options(tokenizer, lm.Config(**flags))
    return tokenizer.decode(models.encode_prompts(tokenizer, [Example("11", "1")], device="cpu")[0][0])


@pytest.mark.parametrize("flags, text", [
    ({}, "=110"), ({"system_prompt": "1"}, "+1=110"), ({"chat_template_kwargs": '{"thinking": false}'}, "=11"),
    ({"system_prompt": "1", "chat_template_kwargs": '{"thinking": false}'}, "+1=11")])
def test_the_prompt_has_the_system_message_and_obeys_the_switch(flags, text):
    assert prompt_text(chat_tokenizer(), **flags) == text


@pytest.mark.parametrize("flags", [{"chat_template_kwargs": "thinking"}, {"chat_template_kwargs": "[1]"}])
def test_switches_that_are_no_object_are_refused(flags):
    with pytest.raises(UserError, match="JSON object"):
        prompt_text(chat_tokenizer(), **flags)


def test_switches_without_a_template_are_refused():
    with pytest.raises(UserError, match="no chat template"):
        prompt_text(build_digit_tokenizer(), system_prompt="1")


def test_a_run_stores_them_and_evaluates_with_them(tiny_run, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    build_model("qwen2", vocab_size=7, eos_token_id=1, pad_token_id=0).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    prompts, encode = set(), models.encode_prompts

    def watched(tokenizer, *args, **options):
        tokens, mask = encode(tokenizer, *args, **options)
        prompts.update(tokenizer.decode(row[keep]) for row, keep in zip(tokens, mask))
        return tokens, mask

    monkeypatch.setattr(lm, "encode_prompts", watched)
    lm.main([*tiny_run[2], "--model", str(folder), "--steps", "1", "--out", str(tmp_path / "run"), "--device", "cpu",
             "--system-prompt", "0", "--chat-template-kwargs", '{"thinking": false}'])
    assert prompts and all(prompt.startswith("+0=") and not prompt.endswith("0=0") for prompt in prompts)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["system_prompt"] == "0" and json.loads(stored["chat_template_kwargs"]) == {"thinking": False}


def test_answers_that_are_all_cut_off_give_a_hint(tiny_run, tmp_path, capsys, fixed_logits):
    fixed_logits([-50.0, -50, -50, 0, 0, 0, 0]).save_pretrained(tmp_path / "model")  # never ends
    build_digit_tokenizer().save_pretrained(tmp_path / "model")
    lm.main([*tiny_run[2], "--model", str(tmp_path / "model"), "--eval-only", "--device", "cpu"])
    assert "--chat-template-kwargs" in capsys.readouterr().out


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):  # D16
    build_model("llama", vocab_size=5).save_pretrained(tmp_path)
    build_digit_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="7 tokens and its embedding 5 rows"):
        models.load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("answer", ['""', '"  "', "NaN", "1e400", "true", "null", "[1]"])
def test_a_row_without_an_answer_is_refused_with_its_line(answer, tmp_path):  # D24
    (tmp_path / "a.jsonl").write_text('{"question": "1+1", "answer": 2}\n{"question": "1+2", "answer": ' + answer + "}\n")
    with pytest.raises(UserError, match="line 2"):
        read_jsonl(tmp_path / "a.jsonl")


@pytest.mark.parametrize("row", ['{"question": "a\\ud800", "answer": "1"}', '{"question": "a", "answer": "\\udfff"}'])
def test_half_a_surrogate_is_refused_with_its_line(row, tmp_path):  # D25
    (tmp_path / "a.jsonl").write_text(row)
    with pytest.raises(UserError, match="line 1"):
        read_jsonl(tmp_path / "a.jsonl")


def test_an_evaluation_checks_the_architecture_too(tiny_run, tmp_path, monkeypatch, capsys):  # D0E
    monkeypatch.setitem(lm.ENGINES, "fast", (lambda *a, **k: lm.ENGINES["plain"][0](*a, **k | {"temperature": 0.3}),
                                             lm.ENGINES["plain"][1]))
    with pytest.raises(SystemExit):
        lm.main([*tiny_run[2], "--eval-only", "--engine", "fast", "--device", "cpu"])
    assert "cannot be trained here" in capsys.readouterr().err


def test_an_engine_that_this_transformers_lacks_is_one_line(tiny_run, tmp_path, monkeypatch, capsys):  # D28
    def missing(*_, **__):
        raise ImportError("cannot import name 'ContinuousBatchingConfig' from 'transformers'")

    monkeypatch.setitem(lm.ENGINES, "paged", (missing, lm.ENGINES["fast"][1]))
    with pytest.raises(SystemExit):
        lm.main([*tiny_run[2], "--engine", "paged", "--device", "cpu", "--out", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "ContinuousBatchingConfig" in error


def test_a_thought_that_the_template_opens_is_open_in_the_response_too():  # D07
    class Letters:
        chat_template, eos_token_id, pad_token_id, bos_token_id = "any", None, None, None
        all_special_ids = all_special_tokens = ()
        added_tokens_decoder = {}  # noqa: RUF012 (nobody changes it)

        def decode(self, ids):
            return "".join(map(chr, ids.tolist() if torch.is_tensor(ids) else ids))

        def batch_decode(self, rows, skip_special_tokens):
            return [self.decode(row) for row in rows]

        def get_added_vocab(self):
            return {}

    def as_ids(*texts):
        return torch.tensor([[ord(letter) for letter in text] for text in texts])

    tokens = as_ids("so 42", "x</th")
    for prompt, start in (("1+1?<think>\n", "<think>"), ("1+1?", ""), ("<think>a</think>", "")):
        texts = models.decode(Letters(), tokens, torch.ones_like(tokens).bool(), as_ids(prompt, prompt))
        assert texts == [start + "so 42", start + "x</th"]
    assert not is_correct("<think>" + "so 42", "42")


def test_a_template_that_refuses_a_system_message_still_shows_what_frames_an_answer():
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}"
                               "{% elif m['role'] == 'assistant' %}<|assistant|>{% endif %}{{ m['content'] }}{% endfor %}")
    frame, _ = models.control_ids(tokenizer)
    assert 4 in frame and 3 not in frame  # <|assistant|>, and <|user|>, which this template does not write
