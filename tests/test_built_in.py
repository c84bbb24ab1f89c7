"""The built-in models' tasks: worked steps that are right, slips that are wrong in one place, and a model made from them."""

import importlib
import random

import pytest
import torch

lm = importlib.import_module("06_full_llm_training")


def pairs(count=300):
    generator = random.Random(0)
    return [(generator.randrange(10**generator.randint(1, 4)), generator.randrange(10**generator.randint(1, 4))) for _ in range(count)]


def wrong_steps(text: str) -> int:
    *steps, _ = text.split(";")
    return sum(sum(map(int, step.split("=")[0].split("+"))) != int(step.split("=")[1]) for step in steps)


@pytest.mark.parametrize("question, text", [("47+85=", "7+5=12;1+4+8=13;132"), ("7+9985=", "7+5=12;1+8=9;9=9;9=9;9992"), ("0+0=", "0+0=0;0"),
                                            ("9999+1=", "9+1=10;1+9=10;1+9=10;1+9=10;10000")])
def test_steps_by_hand(question, text):
    assert lm.worked_steps(question) == text


def test_every_step_and_the_sum_are_right():
    for a, b in pairs():
        text = lm.worked_steps(f"{a}+{b}=")
        assert wrong_steps(text) == 0 and text.count(";") == max(len(str(a)), len(str(b)))
        assert lm.is_correct(text, str(a + b))
        assert len(text) + 1 <= 40  # with the end of text: what --max-new-tokens must leave room for


def test_a_slip_is_one_wrong_step_and_a_wrong_sum():
    for a, b in pairs(100):
        for place in range(max(len(str(a)), len(str(b)))):
            text = lm.worked_steps(f"{a}+{b}=", place)
            assert wrong_steps(text) == 1
            assert not lm.is_correct(text, str(a + b)) and lm.is_correct(text, str(a + b + 10**place))


def test_the_task_holds_out_a_tenth_and_repeats_nothing():
    train, held_out = lm.addition_examples(4)
    terse = [example.terse for example in train + held_out]
    assert len(terse) == len(set(terse)) > 19_900 and len(held_out) == len(terse) // 10
    for example in train[:50]:
        a, b = map(int, example.terse.rstrip("=").split("+"))
        assert example.answer == str(a + b) and f"{a} + {b}" in example.question
    assert {len(example.terse) for example in train} <= set(range(4, 11))


def test_a_model_is_made_that_writes_steps(tmp_path, monkeypatch):
    """Narrow and after few steps it is no good yet, but it expects worked steps more than any other text of these letters."""
    recipe = {**lm.SMALL, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "steps": {4: 40}, "batch": 32, "learning_rate": 5e-3}
    monkeypatch.setitem(lm.BUILT_IN, "small", recipe)
    model, tokenizer = lm.load_model("small", device="cpu", cache_dir=tmp_path, task="addition-steps")

    def mean_logprob(shuffle):
        values = []
        for example in lm.addition_examples(4)[1][:16]:
            text = list(lm.worked_steps(example.terse))
            if shuffle:
                random.Random(0).shuffle(text)
            prompt, completion = (torch.tensor([tokenizer(t)["input_ids"]]) for t in (example.terse, "".join(text)))
            values.append(lm.token_logprobs(model, prompt, completion)[0].mean().item())
        return sum(values) / len(values)

    assert mean_logprob(shuffle=False) > max(mean_logprob(shuffle=True), -torch.tensor(19.0).log()) + 0.3
    assert [folder.name.startswith("small-4-digits") for folder in tmp_path.iterdir()] == [True]
    again, _ = lm.load_model("small", device="cpu", cache_dir=tmp_path, task="addition-steps")
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
    """In a run of several processes save_pretrained writes on rank 0 alone; what another left would be half a model for good."""
    made = lm.load_model(str(tiny_run[0]), device="cpu")
    monkeypatch.setattr(lm, "make_built_in_model", lambda *_, **__: made)
    folder = lm.built_in_model(1, tmp_path)
    assert (folder / "model.safetensors").exists()
    (folder / "config.json").unlink()
    assert (lm.built_in_model(1, tmp_path) / "config.json").exists()
    (folder / "config.json").unlink()
    monkeypatch.setattr(lm.parallel, "rank", lambda: 1)
    with pytest.raises(lm.UserError, match="rank 0 makes it"):
        lm.built_in_model(1, tmp_path)
