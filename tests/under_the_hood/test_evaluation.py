"""Evaluation: pass@k against enumeration, intervals against exact coverage, evaluating without a trace in training."""

import dataclasses
import importlib
import itertools
import json
import math
import random
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import build_model

from under_the_hood.evaluation import evaluate, interval_95, off_policyness, pass_at_k
from under_the_hood.models import character_tokenizer
from under_the_hood.tasks import load_task

lm = importlib.import_module("06_full_llm_training")


# ------------------------------------------------------------------------------------------------------------- pass@k


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(samples):
    """Every subset of k of the n answers, enumerated; an identity of the estimator's definition, not of its formula."""
    for correct in range(samples + 1):
        answers = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(answers, k))
            share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
            assert pass_at_k([correct], samples=samples, k=k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_is_unbiased_and_the_plug_in_estimate_is_not():
    """Expectation over c ~ Binomial(n, p), summed exactly, against 1 − (1 − p)^k."""
    n, p = 6, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        expected = sum(chance * pass_at_k([c], samples=n, k=k) for c, chance in enumerate(chances))
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
        plug_in = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
        assert k == 1 or plug_in < expected - 0.01


def test_pass_at_k_is_a_mean_over_questions_and_literal_values():
    # n = 4, k = 2: c = 0 → 0; c = 1 → 1 − C(3,2)/C(4,2) = 1 − 3/6; c = 3 → 1 − C(1,2)/C(4,2) = 1; mean .5
    assert pass_at_k([0, 1, 3], samples=4, k=2) == pytest.approx(0.5)
    assert pass_at_k([0, 1, 3], samples=4, k=1) == pytest.approx((0 + 1 / 4 + 3 / 4) / 3)
    for k in (0, 5, -1):
        with pytest.raises(ValueError, match="1 ≤ k ≤ 4"):
            pass_at_k([1], samples=4, k=k)


# ---------------------------------------------------------------------------------------------------------- intervals


def test_interval_by_hand():
    # 0 of 16: padded mean 2/20 = .1, variance .1·.9, half width 1.96·.3/√20 = .131481; the lower end is cut at 0
    low, high = interval_95(torch.zeros(16))
    assert low == 0.0 and high == pytest.approx(0.1 + 1.96 * 0.3 / math.sqrt(20), abs=1e-12)
    low, high = interval_95(torch.ones(16))
    assert high == 1.0 and low == pytest.approx(0.9 - 1.96 * 0.3 / math.sqrt(20), abs=1e-12)


@pytest.mark.parametrize("n", [8, 30, 100])
def test_interval_covers_a_proportion_in_about_95_percent(n):
    """Exact coverage under Binomial(n, p): close to 95 % on average over p, and never far below."""
    intervals = [interval_95(torch.tensor([1.0] * c + [0.0] * (n - c))) for c in range(n + 1)]
    coverage = []
    for p in torch.linspace(0.01, 0.99, 99).tolist():
        inside = [low <= p <= high for low, high in intervals]
        coverage.append(sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1) if inside[c]))
    assert min(coverage) > 0.92 and 0.945 < sum(coverage) / len(coverage) < 0.985


def test_interval_of_questions_is_wider_than_that_of_independent_answers():
    """Four answers to one question are not four questions: ten that are always right, ten that are always wrong."""
    per_question = torch.tensor([1.0] * 10 + [0.0] * 10)
    low, high = interval_95(per_question)
    naive_low, naive_high = interval_95(per_question.repeat(4))
    assert high - low > 1.7 * (naive_high - naive_low)


def test_interval_holds_the_mean_also_of_rewards_outside_0_and_1():
    for values in ([-1.0] * 9, [3.0] * 5, [-1.0, 1.0, 1.0], [0.0], [0.25] * 400, [1.0, 0.0, 7.5]):
        low, high = interval_95(torch.tensor(values))
        assert low <= sum(values) / len(values) <= high and low < high


# -------------------------------------------------------------------------------------------- evaluating a tiny model


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(model, tokenizer, task, config, folder): a random model, which answers an addition with random characters."""
    tokenizer = character_tokenizer()
    model = build_model("qwen2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                        pad_token_id=tokenizer.pad_token_id)
    folder = tmp_path_factory.mktemp("evaluation") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = lm.Config(task="addition-1", eval_questions=7, eval_samples=6, max_new_tokens=3)
    return model, tokenizer, load_task(config), config, folder


def test_evaluate_agrees_with_counting_by_hand(world):
    """From a known table: question i has i right answers of 6, and greedily every second is right."""
    model, tokenizer, task, config, _ = world
    seen = []

    def known(model, tokenizer, examples, part, **options):
        seen.append((part.group_size, part.temperature))
        count = [6 if part.group_size > 1 else 1] * len(examples)
        rights = range(len(examples)) if part.group_size > 1 else [i % 2 for i in range(len(examples))]
        rewards = torch.tensor([[1.0] * right + [0.0] * (n - right) for right, n in zip(rights, count)])
        return SimpleNamespace(rewards=rewards, truncated=torch.zeros(rewards.numel(), dtype=torch.bool))

    metrics = evaluate(known, model, tokenizer, task, config)
    assert sorted(seen) == [(1, 0.0), (6, 1.0)]
    assert metrics["eval_accuracy"] == pytest.approx(sum(range(7)) / 42)
    assert metrics["eval_greedy"] == pytest.approx(3 / 7)
    assert set(metrics) == {"eval_accuracy", "eval_low", "eval_high", "eval_greedy", "eval_greedy_low",
                            "eval_greedy_high", "eval_pass_at_2", "eval_pass_at_4", "eval_pass_at_6"}
    for k in (2, 4, 6):
        by_hand = [1 - math.comb(6 - c, k) / math.comb(6, k) for c in range(7)]
        assert metrics[f"eval_pass_at_{k}"] == pytest.approx(sum(by_hand) / 7)
    assert (metrics["eval_low"], metrics["eval_high"]) == interval_95(torch.arange(7).double() / 6)


def one_or_luck(question, text, gold):
    """A reward that depends on the response, and draws from a global generator too."""
    return ("1" in text) != (random.random() < 0.2)


def test_evaluating_changes_nothing_in_training_and_repeats_itself(world):
    model, tokenizer, task, config, _ = world
    config = dataclasses.replace(config, reward="test_evaluation:one_or_luck")
    before = torch.get_rng_state(), random.getstate()
    weights = [p.clone() for p in model.parameters()]
    first, second = (evaluate(lm.collect, model, tokenizer, task, config) for _ in range(2))
    assert first == second and first["eval_accuracy"] > 0
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters())) and not model.training


def test_evaluation_does_not_depend_on_the_size_of_its_parts(world):
    """Greedy accuracy over 70 questions (parts of 64 and 6) is the mean over single questions."""
    model, tokenizer, _, config, _ = world
    config = dataclasses.replace(config, task="addition", eval_questions=70, eval_samples=1)
    task = load_task(config)
    whole = evaluate(lm.collect, model, tokenizer, task, config)
    assert len(task.evaluation) == 70 and not any("pass" in key for key in whole)
    single = [evaluate(lm.collect, model, tokenizer, dataclasses.replace(task, evaluation=[example]), config)
              for example in task.evaluation]
    assert whole["eval_greedy"] == pytest.approx(sum(m["eval_greedy"] for m in single) / 70)


def test_eval_only_prints_the_result_last_and_trains_nothing(world, tmp_path, monkeypatch, capsys):
    *_, folder = world
    monkeypatch.chdir(tmp_path)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    flags = ["--eval-only", "--model", str(folder), "--task", "addition-1", "--eval-questions", "5",
             "--max-new-tokens", "3"]
    lm.main(flags)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{folder} on 5 questions of addition-1: accuracy 0.")
    assert "pass@4" in last and "95 %" in last
    assert list(tmp_path.iterdir()) == []
    lm.main([*flags, "--out", "here"])
    metrics = json.loads((tmp_path / "here" / "evaluation.json").read_text())
    assert 0 <= metrics["eval_low"] <= metrics["eval_accuracy"] <= metrics["eval_high"] <= 1
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["evaluation.json"]
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_eval_only_of_a_run_equals_what_the_run_measured_last(tiny_run, tmp_path, quick):
    lm.main([*tiny_run[2], "--steps", "2", "--eval-samples", "5", "--out", str(tmp_path / "run")])
    config = str(tmp_path / "run" / "config.json")
    model, out = str(tmp_path / "run" / "model"), str(tmp_path / "e")
    lm.main(["--config", config, "--eval-only", "--model", model, "--out", out])
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_accuracy"] > 0
    assert json.loads((tmp_path / "e" / "evaluation.json").read_text()) == {
        key: value for key, value in last.items() if key.startswith("eval")}


# ------------------------------------------------------------------------------------------------ how stale a batch is


def test_off_policyness_by_hand():
    """Three responses; the log-ratios of their tokens are 0, log 2 | log 3 | −log 6, padding is NaN or anything."""
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    log_ratio = torch.tensor([[0.0, math.log(2)], [math.log(3), math.nan], [-math.log(6), 50.0]])
    found = off_policyness(log_ratio - 1.5, torch.full((3, 2), -1.5), mask)
    # token ratios, sorted: 1/6, 1, 2, 3; quantile q stands at index ⌊q·3⌋
    expected = {"ratio_p05": 1 / 6, "ratio_p50": 1.0, "ratio_p95": 2.0, "ratio_max": 3.0}
    # responses: 2, 3, 1/6; ess = (Σ)² / (3 Σ of squares)
    expected["ess"] = (2 + 3 + 1 / 6) ** 2 / (3 * (4 + 9 + 1 / 36))
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)


def test_off_policyness_of_fresh_data_and_of_one_response_with_all_the_weight():
    mask = torch.ones(4, 3, dtype=torch.bool)
    fresh = {name: value.item() for name, value in off_policyness(-torch.ones(4, 3), -torch.ones(4, 3), mask).items()}
    assert fresh == {"ratio_p05": 1, "ratio_p50": 1, "ratio_p95": 1, "ratio_max": 1, "ess": 1}
    far = torch.zeros(4, 3)
    far[2] = 300.0  # beyond what exp can hold
    assert off_policyness(far, torch.zeros(4, 3), mask)["ess"] == pytest.approx(1 / 4)
    assert off_policyness(far, torch.zeros(4, 3), mask)["ratio_max"].isfinite()
