"""Answer checking against literals, other algebra (cross-multiplication, int formatting) and the real GSM8K.

C43 … C53, D07 … D14 and E14 are small inputs that real graders got wrong; every other table row is a way models really
write an answer.
"""

import copy
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from fractions import Fraction

import pytest
import torch
from conftest import bpe_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from under_the_hood import answers
from under_the_hood.models import decode

extract_answer, is_correct = answers.extract_answer, answers.is_correct

EXAMPLES = settings(max_examples=200, deadline=None)
NO_ANSWER = None


def short(value):
    return value[:40] if isinstance(value, str) else type(value).__name__


def rows(table):
    return [pytest.param(text, value, id=f"{case}-{text[:40]}") for case, text, value in table]


# %% ---------------------------------------------------------------- numbers: marked, boxed, and last in plain text

NUMBERS = [
    # Cases from public reports. The number of characters after C46's answer is beyond every grader's "last 300 characters".
    ("C43", "#### 1,234", "1234"),
    ("C43", "She has 45 pens, in all.", "45"),
    ("C43", "#### 1,234,567.50", "1234567.5"),
    ("C43", "1.234", "1.234"),  # a decimal; European grouping is not guessed
    ("C44", "#### $18", "18"),
    ("C44", "#### 18.", "18"),
    ("C44", "#### 18.00", "18"),
    ("C44", "The cost is $18.00.", "18"),
    ("C46", "#### 42" + "x" * 450, "42"),
    ("C46", "#### 42 " + "and 7 more " * 41, "42"),
    ("C46", "#### 42\n" + "9" * 450, "42"),
    ("C46", "#### 7 ... #### 9", "9"),
    ("C46", "####5", "5"),
    ("C46", "####  5", "5"),
    ("C47", r"\boxed{3}, no: \boxed{4}", "4"),
    ("C47", r"\boxed{\frac{1}{2}}", "1/2"),
    ("C47", r"so \boxed{12", NO_ANSWER),
    ("C47", r"\boxed{3}, no: \boxed{12", NO_ANSWER),
    ("C47", r"\boxed{1{,}234}", "1234"),
    ("C52", "<think>\na\n</think>\n#### 5", "5"),
    ("C52", "<think>\nsurely \\boxed{3}\n</think>\nThe answer is 4.", "4"),  # a thought is not an answer
    ("C52", "<think>\n#### 3\n</think>\n", NO_ANSWER),
    # Plain text: the last number.
    ("plain", "**18**", "18"),
    ("plain", "$18 per day.", "18"),
    ("plain", "Answer: 18 dollars", "18"),
    ("plain", "18%", "18"),  # percent is a unit, as in GSM8K's gold answers
    ("plain", "-5", "-5"),
    ("plain", "\N{MINUS SIGN}5 degrees", "-5"),
    ("plain", "It is \N{EN DASH}5 degrees", "-5"),
    ("plain", "It is -$5.", "-5"),
    ("plain", "It is $-5.", "-5"),
    ("plain", "+5", "5"),
    ("plain", "5 - 3 = 2", "2"),
    ("plain", "so 5-3", "3"),  # a subtraction, not minus three
    ("plain", "so (5)-3", "3"),
    ("plain", "word " * 3000 + r"so it is \frac{1}{2}." + " word" * 3000, "1/2"),
    ("plain", "pages 12\N{EN DASH}15", "15"),
    ("plain", "x = 1/2", "1/2"),
    ("plain", "x = 1 / 2", "1/2"),
    ("plain", "1 1/2", "3/2"),
    ("plain", "2/4 of it", "1/2"),
    ("plain", "1,234.50", "1234.5"),
    ("plain", "12, 13 and 14", "14"),
    ("plain", "The answer is 42.\n\nQuestion: 7", "7"),  # rambling on is not rewarded
    ("plain", "1e3", "1000"),
    ("plain", "2.5E-3 m", "0.0025"),
    ("plain", "1.5 × 10^3", "1500"),
    ("plain", r"$3 \times 10^{8}$ m/s", "300000000"),
    ("plain", "US$18", "18"),
    ("plain", "€1.50", "1.5"),
    ("plain", ".5", "0.5"),
    ("plain", "it is ...5", "5"),
    ("plain", "007", "7"),
    ("plain", "the 18th", "18"),
    ("plain", "5km", "5"),
    ("plain", "$18$", "18"),
    ("plain", r"\(18\)", "18"),
    ("plain", r"\[ x = 18 \]", "18"),
    ("plain", "so 3*4=<<3*4=12>>12", "12"),
    ("plain", r"it is \frac{3}{4}.", "3/4"),
    ("plain", "8 apples in H2O, x^2", "8"),
    ("plain", "8 apples, x^{2} and x_{1}", "8"),
    ("plain", "٣", NO_ANSWER),  # only 0-9 count as digits
    ("plain", "1" * 600, NO_ANSWER),  # no answer is this long
    ("plain", "no number", NO_ANSWER),
    ("plain", "", NO_ANSWER),
    # Marked, as models write it.
    ("marked", "#### Answer: 18", "18"),
    ("marked", "#### **18**", "18"),
    ("marked", "#### 5 - 3 = 2", "2"),
    ("marked", "#### -18", "-18"),
    ("marked", "#### The answer is $18.", "18"),
    ("marked", "#### **Total cost:** $18", "18"),
    ("marked", "####\n18 dollars", "18"),
    ("marked", "#### 18 (eighteen)", "18"),
    ("marked", "#### 12,000,", "12000"),
    ("marked", r"#### \boxed{18}", "18"),
    ("marked", "#### Final answer\n\n\\boxed{18}", "18"),
    ("marked", "\\boxed{3}, no:\n#### 4", "4"),
    ("marked", "It was 3 before. ####", NO_ANSWER),
    # Boxed: the number must fill the box, up to units.
    ("boxed", r"\boxed{\text{42}}", "42"),
    ("boxed", r"\boxed{x=5}", "5"),
    ("boxed", r"\boxed{5 \text{ cm}}", "5"),
    ("boxed", r"\boxed{5\text{ cm}^2}", "5"),
    ("boxed", r"\boxed{18 dollars per day}", "18"),
    ("boxed", r"\boxed{\$1,\!234}", "1234"),
    ("boxed", r"\boxed{10\,000}", "10000"),
    ("boxed", r"\boxed{18\%}", "18"),
    ("boxed", r"\boxed{18~\text{km/h}}", "18"),
    ("boxed", r"\boxed{18\ \mbox{cents}}", "18"),
    ("boxed", r"\boxed{90^\circ}", "90"),
    ("boxed", r"\boxed{-\frac{3}{4}}", "-3/4"),
    ("boxed", r"\boxed{\dfrac{7}{3}}", "7/3"),
    ("boxed", r"\boxed{1\frac{1}{2}}", "3/2"),
    ("boxed", r"\boxed{-1 1/2}", "-3/2"),
    ("boxed", r"\boxed{1.5/2}", "3/4"),
    ("boxed", r"\boxed{\boxed{4}}", "4"),
    ("boxed", r"$\boxed{18}$ dollars, not 20", "18"),
    ("boxed", r"\boxed{}, 5", NO_ANSWER),
    ("boxed", r"\boxed{" + "x" * 600 + "}", NO_ANSWER),
]


@pytest.mark.parametrize("text, value", rows(NUMBERS))
def test_number_in_a_reply(text, value):
    assert extract_answer(text) == value
    if value is not NO_ANSWER:
        assert is_correct(text, value)
    for wrong in (Fraction(value or 0) + 1, Fraction(value or 0) - Fraction(1, 1000), -Fraction(value or 1) or 1):
        assert not is_correct(text, str(wrong))


# What is not one number comes back as it stands: it is right for the same text only, and never for its last digits.
TEXTS = [
    ("plain", "at 3:30", "3:30", "30"),
    ("plain", "10^3", "10^3", "3"),
    ("plain", "2^{10}", "2^{10}", "10"),
    ("plain", "12,34,567", "12,34,567", "567"),
    ("plain", "0,5", "0,5", "5"),
    ("plain", "0,123", "0,123", "123"),
    ("plain", "1234,567", "1234,567", "1234567"),
    ("plain", "1.234,50", "1.234,50", "50"),
    ("plain", "version 1.2.3", "1.2.3", "3"),
    ("plain", "on 10/12/2024", "10/12/2024", "2024"),
    ("plain", "1/0", "1/0", "0"),
    ("plain", "1e999", "1e999", "999"),
    ("marked", "#### Step 2: add", "Step 2: add", "2"),
    ("marked", "#### at 3:30", "at 3:30", "30"),
    ("marked", "#### at noon\nQuestion: 7", "at noon", "7"),
    ("boxed", r"\boxed{2x+1}", "2x+1", "2"),
    ("boxed", r"\boxed{5 x}", "5 x", "5"),
    ("boxed", r"\boxed{2ab}", "2ab", "2"),
    ("boxed", r"\boxed{2x=10}", "2x=10", "10"),
    ("boxed", r"\boxed{\left\{ x \right.} or 3", r"\left\{ x \right.", "3"),
    ("boxed", r"\boxed{2\pi}", r"2\pi", "2"),
    ("boxed", r"\boxed{2 pi}", "2 pi", "2"),
    ("boxed", r"\boxed{(1,2)}", "(1,2)", "2"),
    ("boxed", r"\boxed{1,2}", "1,2", "12"),
    ("boxed", r"\boxed{\{1,2\}}", r"\{1,2\}", "2"),
    ("boxed", r"\boxed{12 and 13}", "12 and 13", "12"),
    ("boxed", r"\boxed{12 hours 30 minutes}", "12 hours 30 minutes", "12"),
    ("boxed", r"\boxed{x = 1, y = 2}", "x = 1, y = 2", "2"),
    ("boxed", r"\boxed{10^3}", "10^3", "10"),
    ("boxed", r"\boxed{\left(\frac{1}{2}\right)^n}", r"\left(\frac{1}{2}\right)^n", "1/2"),
    ("boxed", r"\boxed{\text{Paris}}", r"\text{Paris}", "0"),
]


@pytest.mark.parametrize("text, value, digits", [pytest.param(*row, id=f"{case}-{row[0]}") for case, *row in TEXTS])
def test_what_is_not_one_number(text, value, digits):
    assert extract_answer(text) == value
    assert is_correct(text, value)
    assert not is_correct(text, digits)


# %% ---------------------------------------------------------------- the whole number, or none

# D08: a reply was paid for the first digits of another number. D09: digits were glued where LaTeX sets a space.
WHOLE = [
    ("D08", "1½", "3/2"), ("D08", "1 ½", "3/2"), ("D08", "-1½", "-3/2"), ("D08", "½", "1/2"), ("D08", "-½", "-1/2"),
    ("D08", "2⅔", "8/3"), ("D08", "1⁄2", "1/2"), ("D08", "1∕2", "1/2"), ("D08", "3 1⁄2", "7/2"),
    ("D08", "1'234", "1234"), ("D08", "1’234’567", "1234567"), ("D08", "1_000", "1000"), ("D08", r"1\_000", "1000"),
    ("D08", "1_000_000.5", "1000000.5"), ("D08", "1，234", "1234"), ("D08", "１，２３４．５", "1234.5"), ("D08", "1２", "12"),
    ("D08", "1.5×10³", "1500"), ("D08", "1.5·10³", "1500"), ("D08", "2×10⁻³", "0.002"), ("D08", "1.5 * 10**3", "1500"),
    ("D08", r"1.5 \cdot 10^{3}", "1500"), ("D08", r"1\frac12", "3/2"), ("D08", r"1\nicefrac{1}{2}", "3/2"),
    ("D08", "2.5 million", "2500000"), ("D08", "3 thousand", "3000"), ("D08", "5 billion", "5000000000"),
    ("D09", r"2\ 1/2", "5/2"), ("D09", "2~1/2", "5/2"), ("D09", r"2\,1/2", "5/2"), ("D09", r"2\;\frac{1}{2}", "5/2"),
    ("D09", r"2\ \tfrac12", "5/2"), ("D09", r"2\quad\frac{1}{2}", "5/2"), ("D09", "2$1/2$", "5/2"),
    ("D09", r"1\,234\,567", "1234567"), ("D09", "1~234", "1234"),
    ("E14", "__73__", "73"), ("E14", "_42_", "42"), ("E14", "___42___", "42"), ("E14", "**_42_**", "42"),
    ("E14", "***42***", "42"), ("E14", "*42*", "42"), ("E14", "`42`", "42"), ("E14", "```42```", "42"),
    ("E14", '"42"', "42"), ("E14", "'42'", "42"), ("E14", "“42”", "42"), ("E14", "‘42’", "42"), ("E14", "«42»", "42"),
    ("E14", "<b>42</b>", "42"), ("E14", "<strong>42</strong>", "42"), ("E14", "_-5_", "-5"),
    ("E14", "__-1/2__", "-1/2"),
    ("E14", "_.5_", "0.5"), ("E14", "__$1,234.50__", "1234.5"), ("E14", "_42%_", "42"), ("E14", "__42 km__", "42"),
    ("E14", "__42__.", "42"), ("E14", r"\textbf{42}", "42"), ("E14", r"\emph{\textbf{42}}", "42"),
    ("E14", r"\underline{42}", "42"), ("E14", r"\boldsymbol{42}", "42"),
    ("unit", "5 cm^2", "5"), ("unit", "42 dollars.", "42"), ("unit", "90°", "90"),
]
OF_THEIR_OWN = ("90°C", "5km", "5 m", "18 a day", "42!", "42个", "42 - done", "42 \N{EN DASH} I believe", "5 p.m.",
                "5 m²",
                "42 \\end{align*}", "42 \\blacksquare", "42</answer>", "42<|end|>", "42 \\\\", "42; done")


@pytest.mark.parametrize("text, value", rows(WHOLE))
@pytest.mark.parametrize("form", ["{}", "Answer: {}", "#### {}", "#### **Answer**: {}", "#### __Answer:__ {}",
                                  r"\boxed{{{}}}", r"so \fbox{{{}}}, not 7"])
def test_the_whole_number(form, text, value):
    """D08, D09 and E14: bare, marked and boxed."""
    reply = form.format(text)
    assert extract_answer(reply) == value
    assert is_correct(reply, value) and answers.math_reward(reply, value) == 1.0
    assert is_correct(value, text)  # and as a gold answer
    for digits in (value[0], value[:2], value[-1], value.lstrip("-")[0]):
        assert (Fraction(value) == Fraction(digits) if digits.isdecimal() else True) or not is_correct(reply, digits)


@pytest.mark.parametrize("text", OF_THEIR_OWN)
def test_what_may_follow_a_number(text):
    for form in ("{}", "#### {}"):
        assert extract_answer(form.format(text)) == text[:2].strip("k pm")


PARTS = [  # the numbers that such a reply holds, none of which is its answer
    ("D08", "2³", "2 3 23"), ("D08", "2π", "2"), ("D08", "2 π", "2"), ("D08", r"2\pi", "2"), ("D08", "2pi", "2"),
    ("D08", "2πr", "2"),
    ("D08", "2√3", "2 3 23"), ("D08", r"2\sqrt{3}", "2 3"), ("D08", r"2 \sqrt3", "2 3"), ("D08", "2sqrt(3)", "2 3"),
    ("D08", "±5", "5 -5"), ("D08", r"\pm 5", "5 -5"), ("D08", "+/-5", "5 -5"), ("D08", "√5", "5"),
    ("D08", "-√5", "5 -5"),
    ("D08", r"\sqrt{5}", "5"), ("D08", r"\sqrt[3]{5}", "3 5"), ("D08", "∛5", "5"), ("D08", "sqrt(5)", "5"),
    ("D08", "5i", "5"), ("D08", "5 i", "5"), ("D08", "2+3i", "2 3 5"), ("D08", "5x", "5"), ("D08", "2ⁿ", "2"),
    ("D08", "2^n", "2"), ("D08", "10³", "10 3 103"), ("D08", "10⁻³", "10 3 -3"),
    ("D08", "101_2", "101 2 1012"), ("D08", "101_{2}", "101 2 1012"), ("D08", "101₂", "101 2 1012"),
    ("D08", "101₁₁₁", "101 111 101111"), ("D08", "(101)_2", "101 2"), ("D08", r"101_{\text{two}}", "101"),
    ("D08", "0x1F", "0 1"), ("D08", "1٢", "1"), ("D08", "1'5", "1 5 15"), ("D08", "5'10\"", "5 10 510"),
    ("D08", "5′10″", "5 10"), ("D08", "12_34", "12 34 1234"), ("D08", "1 234", "1 234 1234"),
    ("D08", "ln 2", "2"), ("D08", r"\frac{\pi}{2}", "2"), ("D08", "x^{-2}", "2 -2"), ("D08", "5a", "5"),
    ("D09", r"3~4", "34 3 7"), ("D09", r"3\,4", "34 3 7"), ("D09", r"3\ 4", "34 3"), ("D09", r"3\!4", "34 3"),
    ("D09", "3°4", "34 3"), ("D09", r"3^\circ4", "34 3"), ("D09", "5%3", "53 5"), ("D09", r"5\%3", "53 5"),
    ("D09", "5$3", "53 5"), ("D09", r"3\left4", "34 3"),
    ("E14", "file_42", "42"), ("E14", "a_42_b", "42"),
]
BEGINNINGS = ["5 - 3", "5 + x", "5 * 3", "2**3", "5 ÷ 2", "5 / x", "5(x+1)", "5 x", "5 < x", "3 : 4", "12-15",
              "12 or 13", "12 to 15", "3 times 4", "12, 13", "12 and 13", "2 and 1/2", "2 and a half", "2 squared",
              "2xy", "5 cos x",
              r"5\cdot 3", r"5 \text{ or } 6", "1e3.5", "**4**2", "5 7", "1..2"]


@pytest.mark.parametrize("text, parts", rows(PARTS))
@pytest.mark.parametrize("form", ["{}", "x = {}", "#### {}", "#### x = {}", r"\boxed{{{}}}"])
def test_no_part_of_a_number(form, text, parts):
    for part in parts.split():
        assert not is_correct(form.format(text), part)
        assert answers.math_reward(form.format(text), part) == 0.0


@pytest.mark.parametrize("text", BEGINNINGS)
def test_no_beginning_of_an_expression(text):
    for form in ("#### {}", r"\boxed{{{}}}"):
        reply = form.format(text)
        assert extract_answer(reply) == text and is_correct(reply, text) and not is_correct(reply, text.strip("*")[0])
        assert not is_correct(reply, text[:2])


def test_d09_formulas_keep_their_spaces_between_digits():
    assert not is_correct(r"\boxed{3\,4x}", "34x") and not is_correct("#### 3~4x", "34x")
    assert is_correct(r"\boxed{3\,x}", "3x") and is_correct(r"\boxed{x\;+\ 1}", "x+1")


@pytest.mark.parametrize("text", [r"\fbox{42}", r"\boxed {42}", "\\boxed\n{42}", r"\boxed  {42}", r"\fbox {42}",
                                  r"\boxed{3}, no: \fbox{42}", r"\fbox{3}, no: \boxed {42}", r"\fbox{\text{42}}",
                                  r"\fbox{\boxed{42}}", "#### 3\n\\fbox{42}"])
def test_d11_every_box(text):
    assert extract_answer(text + ", as in step 7") == "42"


# %% ---------------------------------------------------------------- thoughts


@pytest.mark.parametrize("text, value", [
    ("<think>so 42, or maybe 42", NO_ANSWER), (r"<think>\boxed{42}", NO_ANSWER), ("<think>#### 42", NO_ANSWER),
    ("<think>so 42</think>", NO_ANSWER), ("so 42</think>", NO_ANSWER), ("<think></think>", NO_ANSWER),
    ("so 41</think>\n#### 42", "42"), ("so 41</think>42", "42"), ("<think>41</think>42", "42"),
    ("<think>a</think> 41 <think>b</think> 42", "42"), ("<think>a</think> 42 <think>43", "42"),
    ("a</think>\n42\n<think>43</think>", "42"), ("#### 42 <think>6*7</think> checked", "42"),
    ("#### 42\n<think>but", "42"), ("4<think></think>2", "2"),  # never glued
    ("41 </think> b </think> 42", "42"), ("41</think><think>42", NO_ANSWER), ("42<think>a</think>b</think>", NO_ANSWER),
    ("<think>a<think>42</think>b</think>", NO_ANSWER), ("<think>a<think>b</think>c</think> 42", "42"),
    ("<thinking>so 42", NO_ANSWER), ("<thinking>41</thinking>42", "42"), ("[THINK]so 42", NO_ANSWER),
    ("[THINK]41[/THINK]42", "42"), ("<reasoning>#### 42", NO_ANSWER),
    ("<reasoning>41</reasoning>\n<answer>42</answer>", "42"), ("<think>41</think><answer>42</answer>", "42"),
    ("<think>" + "\n#### 42" * 500, NO_ANSWER), ("42 </thin", "42"),
])
def test_d07_no_answer_in_thoughts(text, value):
    """D07 (verifiers #213, rllm #405)."""
    assert extract_answer(text) == value
    assert is_correct(text, "42") == (value == "42") and answers.math_reward(text, "42") == float(value == "42")


@pytest.fixture(scope="module")
def tag_tokenizer():
    """Its tags are special tokens, as are the tokens that frame a turn and some that its model stops at."""
    tokenizer = bpe_tokenizer(bos=True, chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<think>", "</think>", "<answer>", "</answer>", "[INST]", "[/INST]", "<|eom|>"]})
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
                               "{% elif m.role == 'assistant' %}<think></think>{{ m.content }}</s>{% endif %}"
                               "{% endfor %}")
    return tokenizer


def decoded(tokenizer, *texts):
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    lengths = torch.tensor([[len(ids)] for ids in rows])
    width = int(lengths.max())
    tokens = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in rows])
    return decode(tokenizer, tokens, torch.arange(width) < lengths)


def test_d14_the_reward_gets_tags_that_are_special_tokens(tag_tokenizer):
    """D14 (trl #2897): the text would be 7*6=41?42, in which nobody finds the thought."""
    text = "<think>7*6=41?</think><answer>42</answer>"
    assert tag_tokenizer.decode(tag_tokenizer(text)["input_ids"], skip_special_tokens=True) == "7*6=41?42"
    for ended in (text, text + "</s>", text + "<|eom|>", "<s>" + text + "</s>", text + "[INST]"):
        assert decoded(tag_tokenizer, ended) == [text]
    assert is_correct(text, "42")
    assert decoded(tag_tokenizer, "<think>42</s>", "[/INST]4<|user|>", "1</answer>", "</think>", "</s>") == [
        "<think>42", "4", "1</answer>", "</think>", ""]
    assert extract_answer(decoded(tag_tokenizer, "<think>#### 42</s>")[0]) is NO_ANSWER


@pytest.mark.parametrize("template", [
    None,  # no frame: only the named ids and a last one that is no tag go
    ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
     "[INST]{{ m.content }}[/INST]{% endfor %}"),
    ("{% if messages[0].role != 'system' %}<think>{% endif %}"
     "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"),
])
def test_d14_whatever_the_chat_template(tag_tokenizer, template):
    tokenizer = copy.deepcopy(tag_tokenizer)
    tokenizer.chat_template = template
    text = "<think>1</think>2"
    assert decoded(tokenizer, text + "<|eom|>", text + "</s>") == [text, text]
    assert decoded(tokenizer, "[INST]2[/INST]") == ["[INST]2[/INST]" if template is None else "2"]


# %% ---------------------------------------------------------------- correct, and incorrect


def test_c49_of_a_gold_solution_only_the_marked_answer_counts():
    gold = "There are 3*4=<<3*4=12>>12 boxes of 100.\n#### 1,200"
    assert is_correct("#### 1200", gold) and is_correct(gold, gold)
    assert not is_correct("#### 12", gold) and not is_correct("#### 100", gold)


@pytest.mark.parametrize("text, gold", [("1234", "12"), ("12", "1234"), ("#### 1234", "#### 12"), ("It is 123.", "12")])
def test_c53_no_prefix_counts(text, gold):
    assert not is_correct(text, gold)


@pytest.mark.parametrize("text, gold", [
    ("It is $1,200.00.", "1,200"),
    ("18", "$18"), ("18", "18 dollars"), ("18%", "18%"), ("18", "18."), ("18", 18), ("0.5", 0.5), ("-3", -3),
    ("0.50", "1/2"), (r"\boxed{\frac{2}{4}}", "0.5"), ("1000", "1e3"), ("-0", "0"), ("0.25", r"\dfrac{1}{4}"),
    ("5", r"We find \boxed{5}."), ("5", "x = 5"), (r"\boxed{x=5}", "5 cm"),
    ("0." + "1" * 400, "0." + "1" * 400), ("9" * 499, "9" * 499),
    (r"\boxed{x^2+1}", "x^2 + 1"), ("#### x^2+1", "x^2+1"), ("x^2+1", "x^2+1"),
    (r"\boxed{\dfrac{\pi}{2}}", r"\frac{\pi}{2}"),
    (r"\boxed{\left(1, 2\right)}", "(1,2)"), (r"\boxed{\text{Paris}}", "Paris"), ("Paris.", "Paris"), ("#### $x$", "x"),
    ("At 3:30.", "3:30"), ("2x+1", r"\boxed{2x+1}"), ("#### 2x+1", "2x+1"),
], ids=short)
def test_correct(text, gold):
    assert is_correct(text, gold) is True


@pytest.mark.parametrize("text, gold", [
    ("0.333333333333", "1/3"), ("9007199254740993", "9007199254740992"),  # equal as float, not as numbers
    ("0.1000000000000000000000001", "0.1"), ("9" * 499, "9" * 498 + "8"), ("5", "-5"), ("18", "1.8"), ("50", "0.5"),
    (r"\boxed{x^2+1}", "x^2-1"), (r"\boxed{12}", r"so \boxed{12"), ("", ""), (" ", " "), ("$", "$"), ("####", "####"),
    (r"\boxed{}", r"\boxed{}"), (None, None), (5, 5), (b"5", "5"), ("5", None), ("5", b"5"), ("5", float("nan")),
    ("5", float("inf")), ("1", 10**5000), ([], {}), ("2", "2x+1"), ("2", "x^2"), ("23", "2 3"), ("23", "2*3"),
    ("12", "1, 2"),
    ("7" + "9" * 2000, "9" * 1000), ("9" * 2000, "9" * 2000),  # no answer is this long, so nothing is cut to fit
], ids=short)
def test_incorrect(text, gold):
    assert is_correct(text, gold) is False


integers = st.integers(-10**15, 10**15)
denominators = st.integers(1, 10**6)


@EXAMPLES
@given(integers, st.sampled_from(["#### {}", "####{}.", r"So \boxed{{{}}}.", "The answer is {}.", "**{}** dollars"]))
def test_every_integer_in_every_writing(n, template):
    grouped, dollars = f"{n:,}", f"-${-n:,}" if n < 0 else f"${n:,}"
    unusual = str(n).replace("-", "\N{MINUS SIGN}")
    for written in (str(n), unusual, grouped, grouped.replace(",", "{,}"), grouped + ".00", dollars):
        text = template.format(written)
        assert extract_answer(text) == str(n)
        assert is_correct(text, f"Since 2*3=<<2*3=6>>6.\n#### {grouped}")
        assert not is_correct(text, str(n + 1)) and not is_correct(text, str(10 * n + 1))


@EXAMPLES
@given(st.integers(-10**6, 10**6), denominators, st.integers(-10**6, 10**6), denominators, st.integers(1, 9))
def test_fractions_are_equal_when_they_cross_multiply(a, b, c, d, k):
    sign = "-" if a < 0 else ""
    for text in (f"{a}/{b}", f"\\boxed{{{sign}\\frac{{{abs(a)}}}{{{b}}}}}", f"\\boxed{{\\frac{{{a}}}{{{b}}}}}"):
        assert is_correct(text, f"{c}/{d}") == (a * d == b * c)
        assert is_correct(text, f"{k * a}/{k * b}")


@EXAMPLES
@given(integers, st.integers(0, 12), st.integers(0, 5))
def test_decimals_are_exact(n, places, zeros):
    digits = str(abs(n)).zfill(places + 1)
    point = len(digits) - places
    text = "-" * (n < 0) + digits[:point] + ("." + digits[point:]) * (places > 0)
    longer = text + "0" * zeros * (places > 0)
    assert is_correct(longer, f"{n}/{10**places}") and is_correct(f"#### {longer} m", text)
    assert is_correct(f"{n}e-{places}", text)
    assert not is_correct(longer, f"{n + 1}/{10**places}")


def spellings(n, power):
    """Ways to write n · 10**-power, all of which have the same value."""
    value, sign, size = Fraction(n, 10**power), "-" * (n < 0), abs(n)
    digits = f"{size:0{power + 1}}"
    plain = digits[: len(digits) - power] + ("." + digits[len(digits) - power:]) * (power > 0)
    whole, _, rest = plain.partition(".")
    rest = rest and "." + rest
    for separator in (",", "_", "'", "’", "{,}", r"\,", "，", "\u202f", "~", r"\_"):
        yield sign + f"{int(whole):,}".replace(",", separator) + rest
    yield from (sign + plain, sign.replace("-", "\N{MINUS SIGN}") + plain, f"{sign}${plain}", f"{value}")
    yield sign + "".join(chr(ord(c) + 0xFEE0) for c in plain)  # fullwidth
    yield f"{n}×10^{{-{power}}}"
    yield f"{n} · 10" + ("⁻" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(c)] for c in str(power)))
    yield rf"{sign}\frac{{{size}}}{{{10**power}}}"
    if power == 0:
        yield from (f"{sign}{size}½"[:-1], f"{sign}{size}.0", f"{sign}{size:,}.00")


@EXAMPLES
@given(st.integers(-10**9, 10**9), st.integers(0, 6), st.sampled_from([
    "{}", "Answer: __{}__", "_{}_", "`{}`", "“{}”", "**{}**", "#### {}", "#### **{}**", r"\boxed{{{}}}",
    r"\fbox {{{}}}, 7$",
    "<think>7</think><answer>{}</answer>", r"\boxed{{\text{{{}}}}}", "#### Answer: _{}_"]))
@example(0, 0, "{}")
def test_every_spelling_of_a_number(n, power, form):
    value = Fraction(n, 10**power)
    for written in spellings(n, power):
        if "{" in written and "text" in form:  # \text holds plain text
            continue
        reply = form.format(written).replace(", 7$", " in the end")
        assert is_correct(reply, str(value)), reply
        assert is_correct(reply, str(n / 10**power)) or power  # as floats they need not be equal
        assert not is_correct(reply, str(value + 1)) and not is_correct(reply, str(10 * value + 1))


@EXAMPLES
@given(st.integers(0, 99), st.integers(1, 99), st.sampled_from("½⅓¼⅕⅙⅛⅔¾⅞"),
       st.sampled_from(["{}", "#### {}", r"\boxed{{{}}}"]))
def test_no_digits_of_a_mixed_number(whole, other, vulgar, form):
    value = whole + Fraction(*map(int, unicodedata.normalize("NFKC", vulgar).split("⁄")))
    for written in (f"{whole}{vulgar}", f"{whole} {vulgar}", rf"{whole}\ {value - whole}", f"{whole}~{value - whole}"):
        assert is_correct(form.format(written), str(value)) and not is_correct(form.format(written), str(whole))
    assert whole == 0 or not is_correct(form.format(rf"{whole}\,{other:02}"), f"{whole}{other:02}")


# %% ---------------------------------------------------------------- total, pure and fast

pieces = st.lists(st.sampled_from([
    "#", "####", "\\boxed{", "{", "}", "\\frac", "\\text{", "1", "12", ",", ".", "/", " ", "-", "−", "$", "%", "^",
    "e", "E", "=", ":", "x", "\n", "\\", "10", "×", "</think>", "(", ")", "_", "0", "٣", "\ud800",
    "<think>", "½", "³", "⁻", "₂", "，", "’", "~", "\\,", "\\ ", "\\!", "√", "π", "±", "`", '"', "*", "__", "\\fbox {",
    "million", "i", "or",
]), max_size=30).map("".join)
anything = st.one_of(st.text(), pieces, st.none(), st.integers(), st.floats(), st.binary(), st.lists(st.text()))


@settings(max_examples=500, deadline=None)
@given(anything, anything)
def test_total(text, gold):
    answer = extract_answer(text)
    assert answer is None or isinstance(answer, str) and answer.strip()
    assert is_correct(text, gold) in (True, False) and isinstance(is_correct(text, gold), bool)


HUGE = {
    "C52 commas": "1," * 25_000, "C52 boxes": "\\boxed{" * 8_000, "C52 braces": "{" * 50_000,
    "C52 digits": "9" * 50_000,
    "box of braces": "\\boxed{" + "{" * 50_000, "box of digits": "\\boxed{" + "9" * 50_000 + "}",
    "marked digits": "#### " + "9" * 50_000,
    "hashes": "#" * 50_000, "spaces": " " * 50_000, "newlines": "\n" * 50_000, "backslashes": "\\" * 50_000,
    "letters": "a" * 50_000,
    "fractions": "1/" * 25_000, "mixed": "1 1/" * 12_000, "frac": "\\frac{" * 9_000, "frac1": "\\frac{1}" * 7_000,
    "text": "\\text{" * 9_000,
    "powers": "1x10^" * 10_000, "exponents": "1e" * 25_000, "big exponent": "1e999999999",
    "big power": "1 × 10^{999999999}",
    "tall power": "\\boxed{9^{9^{9^{9}}}}", "dots": "." * 50_000, "decimal": "0." + "1" * 50_000, "signs": "-" * 50_000,
    "labels": "\\boxed{" + "x=" * 25_000 + "}", "units": "\\boxed{5 " + "aa " * 16_000 + "0}",
    "unit spaces": "\\boxed{5" + " " * 480 + "0}",
    "label spaces": "\\boxed{x" + " " * 480 + "0}", "frac spaces": "\\boxed{\\frac" + " " * 480 + "}",
    "long denominator": "1/" + "9" * 490,
    "D07 thoughts": "<think>" * 8_000, "D07 ends": "</think>" * 8_000, "D07 pairs": "<think>5</think>" * 3_000,
    "D07 a million": "<think>5</think>" * 62_500, "D11 spaces": "\\boxed  " * 6_000, "D11 boxes": "\\fbox {" * 140_000,
    "a million signs": "\\" * 1_000_000, "halves": "½" * 50_000, "powers of 2": "#### " + "2³" * 490,
    "underscores": "#### " + "_" * 990, "emphasis": "#### " + "_1" * 490, "points": "#### 1" + "." * 990,
    "gone": "#### 1" + "\\left" * 190, "roots": "√" * 990 + "1", "spaces and digits": "#### " + "1 " * 490,
    "words": "1 and " * 160,
    "ten million": "word 5 " * 1_500_000, "ten million braces": "\\boxed{" + "{" * 10_000_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_time(name):
    """C52: below 0.2 s, as a reply and as a gold answer. The best of three, since the machine may be busy."""
    for text, gold in ((HUGE[name], "5"), (HUGE[name], "x^2"), ("5", HUGE[name]), (HUGE[name], HUGE[name])):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            is_correct(text, gold)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.2


def test_is_correct_starts_no_process(monkeypatch):
    monkeypatch.setattr(answers, "symbolic_equal", lambda *args, **options: pytest.fail("not pure"))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("not pure"))
    assert not is_correct(r"\boxed{1+x^2}", "x^2+1")
    assert answers.math_reward("#### 5", "6") == 0.0  # two numbers that differ need no algebra


# %% ---------------------------------------------------------------- the real GSM8K


@pytest.mark.skipif("GSM8K_DIR" not in os.environ, reason="set GSM8K_DIR to the folder of GSM8K's .jsonl files")
@pytest.mark.parametrize("split, size", [("train", 7473), ("test", 1319)])  # the sizes its authors publish
def test_gsm8k_gold_solutions(split, size):
    lines = (pathlib.Path(os.environ["GSM8K_DIR"]) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == size
    for line in lines:
        solution = json.loads(line)["answer"]
        reasoning, written = solution.split("\n#### ")
        number = int(written.replace(",", ""))
        assert is_correct(solution, solution) and is_correct(solution, written) and is_correct(solution, str(number))
        assert is_correct(f"{reasoning}\nSo the answer is ${written}.", solution)
        assert is_correct(f"\\boxed{{{written}}}", solution)
        assert not is_correct(solution, f"{reasoning}\n#### {number + 1:,}")
        assert not is_correct(solution, str(number * 10 + 1))
        assert not is_correct(f"{reasoning}\n#### {-number or 1:,}", solution)


# %% ---------------------------------------------------------------- formulas, in a process with a time limit

ENDLESS = "9^{9^{9^{9}}}"


@pytest.mark.parametrize("answer, gold, equal", [
    ("1+x^2", "x^2+1", True), (r"\pi/2", r"\frac{\pi}{2}", True), (r"\sqrt{12}", r"2\sqrt{3}", True),
    ("10^3", "1000", True),
    ("1-x^2", "x^2-1", False), ("(0,1]", "[0,1)", False), ("x>5", "x<5", False),
    ("(1,2)", "1<x<2", True), ("1<x<2", "(1,2)", False),  # math-verify reads an interval into a gold inequality only
    ("0.333333", "1/3", False),
    ("", "5", False),
    ("\ud800\n\x00", "5", False), ("it has 5", "5", False), (r"\frac{", "5", False),
])
def test_symbolic_equal(answer, gold, equal):
    assert answers.symbolic_equal(answer, gold, seconds=20) is equal


def test_c51_endless_algebra_in_a_worker_thread():
    answers.symbolic_equal("x", "x", seconds=20)  # start the process, so that only the limit is timed
    results = []

    def work():
        start = time.monotonic()
        results.append((answers.math_reward(rf"\boxed{{{ENDLESS}}}", "5"), time.monotonic() - start))
        results.append(answers.symbolic_equal("1+x", "x+1", seconds=20))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    (reward, seconds), after = results
    assert reward == 0.0 and seconds < 4  # the limit is 2 s
    assert after is True  # a fresh process has taken over


def test_threads_get_their_own_answers():
    results = {}

    def work(i):
        results[i] = [answers.symbolic_equal(f"x+{i}", f"{j}+x", seconds=20) for j in range(4)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [i == j for j in range(4)] for i in range(4)}


def test_symbolic_worker_survives_its_own_death_and_ends_itself():
    assert answers.symbolic_equal("x", "x", seconds=20)
    answers.symbolic_equal("x", "x", seconds=1)
    time.sleep(1.2)
    assert answers.symbolic_worker.poll() is None  # the watchdog is off between two questions
    answers.symbolic_worker.kill()
    answers.symbolic_worker.wait()
    assert answers.symbolic_equal("1+x", "x+1", seconds=20)
    assert os.getsid(answers.symbolic_worker.pid) != os.getsid(0)  # Ctrl-C in our terminal does not reach it

    # With nobody left to wait for it, as when the training process is killed, a hanging worker still ends.
    orphan = subprocess.Popen([sys.executable, "-c", answers.SYMBOLIC_WORKER], text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert orphan.stdout.readline() == "ready\n"
    print(json.dumps([ENDLESS, "5", 0.5]), file=orphan.stdin, flush=True)
    assert orphan.wait(20) != 0
    orphan.communicate()


def test_symbolic_equal_after_an_interruption():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    assert answers.symbolic_equal("x", "x", seconds=20)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            answers.symbolic_equal(ENDLESS, "5", seconds=300)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    start = time.monotonic()
    assert answers.symbolic_equal("1+x", "x+1", seconds=20) and time.monotonic() - start < 30


def test_symbolic_equal_without_math_verify(monkeypatch):
    monkeypatch.setattr(answers, "symbolic_worker", None)
    monkeypatch.setattr(answers, "SYMBOLIC_WORKER", "import a_package_that_is_absent")
    with pytest.raises(ImportError, match="pip install math-verify"):
        answers.symbolic_equal("x", "x")
    with pytest.raises(ValueError, match="seconds"):
        answers.symbolic_equal("x", "x", seconds=0)
    with pytest.raises(ValueError, match="seconds"):
        answers.symbolic_equal("x", "x", seconds=float("nan"))


@pytest.mark.parametrize("text, gold, reward", [
    ("#### 1,200", "1200", 1), ("#### 1,201", "1200", 0),
    (r"\boxed{1+x^2}", "x^2+1", 1), (r"\boxed{1-x^2}", "x^2+1", 0), ("#### 1+x^2", r"The answer is \boxed{x^2+1}.", 1),
    (r"\boxed{10^3}", "1000", 1), (r"\boxed{1000}", "10^3", 1), (r"\boxed{y = 2x+1}", "2x+1", 1),
    ("1+x^2", "x^2+1", 0),  # where an unmarked formula starts would be a guess
    (r"\boxed{pairs}", "Paris", 0), (r"\boxed{silent}", "listen", 0),  # to algebra one product of letters
    (r"\boxed{\text{pairs}}", "Paris", 0), (r"\boxed{\text{Paris}}", "Paris", 1),
    (r"\boxed{1+x^2", "x^2+1", 0), (r"\boxed{}", "x", 0), ("#### x", r"\boxed{x", 0), (None, "x", 0),
    ("#### x", None, 0),
])
def test_math_reward(text, gold, reward):
    measured = answers.math_reward(text, gold)
    assert measured == reward and isinstance(measured, float)


# %% ---------------------------------------------------------------- the user's own reward

USER_REWARDS = """
import math, sys
import numpy as np, torch
number = 3
def brevity(question, text, gold): return -len(text) + 0.5
def exact(question, text, gold): return text == gold
def numpy_bool(question, text, gold): return np.bool_(True)
def numpy_number(question, text, gold): return np.float32(0.5)
def tensor(question, text, gold): return torch.tensor(2)
def in_order(question, text, gold): return ["q", "t", "g"] == [question, text, gold]
def nan(question, text, gold): return math.nan
def infinite(question, text, gold): return -math.inf
def nothing(question, text, gold): pass
def word(question, text, gold): return "1"
def pair(question, text, gold): return (1, 2)
def tensors(question, text, gold): return torch.zeros(2)
def huge(question, text, gold): return 10 ** 5000
def complex_number(question, text, gold): return 1j
def raises(question, text, gold): raise KeyError("two\\nlines")
def leaves(question, text, gold): sys.exit(3)
def too_few(text): return 1.0
def sometimes(question, text, gold): return 1.0 if text == "fine" else math.nan
class Scorer:
    def __call__(self, question, text, gold): return 1
scorer = Scorer()
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module in the current folder, as a user would have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_rewards.py").write_text(USER_REWARDS)
    (tmp_path / "my_broken_rewards.py").write_text("def f(:\n")
    (tmp_path / "my_leaving_rewards.py").write_text("raise SystemExit(3)\n")
    yield "my_rewards"
    for name in ("my_rewards", "my_broken_rewards", "my_leaving_rewards"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name, value", [
    ("brevity", -0.5), ("exact", 0.0), ("numpy_bool", 1.0), ("numpy_number", 0.5), ("tensor", 2.0), ("in_order", 1.0),
    ("scorer", 1.0),
])
def test_a_users_reward(user_module, name, value):
    measured = answers.load_reward(f"{user_module}:{name}")("q", "t", "g")
    assert measured == value and type(measured) is float


@pytest.mark.parametrize("name, problem", [
    ("nan", "returned nan"), ("infinite", "returned -inf"), ("nothing", "NoneType"), ("word", "str"), ("pair", "tuple"),
    ("huge", "int"),
    ("complex_number", "complex"), ("tensors", "raised"), ("raises", "KeyError"), ("leaves", "SystemExit"),
    ("too_few", "TypeError"),
])
def test_a_users_reward_that_fails(user_module, name, problem):
    reward = answers.load_reward(f"{user_module}:{name}")
    with pytest.raises(ValueError, match=problem) as caught:
        reward("q", "t", "g")
    assert f"my_rewards:{name}" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) <= 300


def test_a_users_reward_is_checked_at_every_call(user_module):
    reward = answers.load_reward(f"{user_module}:sometimes")
    assert reward("q", "fine", "g") == 1.0
    with pytest.raises(ValueError, match="my_rewards:sometimes"):
        reward("q", "other", "g")
    assert reward("q", "fine", "g") == 1.0


@pytest.mark.parametrize("spec, problem", [
    ("my_rewards", "module:function"), ("my_rewards:", "module:function"), (":brevity", "module:function"),
    ("", "module:function"),
    ("no_such_module:f", "no_such_module"), ("my_rewards:no_such_function", "no_such_function"),
    ("my_rewards:number", "number"),
    ("my_broken_rewards:f", "SyntaxError"), ("my_leaving_rewards:f", "SystemExit"), ("..:f", "cannot be imported"),
])
def test_a_reward_that_cannot_be_loaded(user_module, spec, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        answers.load_reward(spec)
    assert repr(spec) in str(caught.value) and "\n" not in str(caught.value)


def test_the_longest_answer_has_500_characters():
    assert answers.plain_number("9" * 500) == "9" * 500 and answers.plain_number("9" * 501) is None
    assert answers.extract_answer("#### " + "9" * 500) == "9" * 500
    assert answers.extract_answer("#### " + "x" * 500) == "x" * 500 and answers.extract_answer("#### " + "x" * 501) is None
