"""Passes of a step: every response once, within the token budget, like lengths together, flat groups apart."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from conftest import build_model
from hypothesis import given, settings, strategies as st
from under_the_hood.batching import micro_batches, split_batch
from under_the_hood.models import recompute_activations

lm = importlib.import_module("06_full_llm_training")


def split(lengths, has_gradient, *, prompt=3, budget):
    return [(prompts.tolist(), rows.tolist(), width, wanted) for prompts, rows, width, wanted in
            split_batch(torch.tensor(lengths), prompt, torch.tensor(has_gradient), budget=budget)]


def test_by_hand_longest_first_as_many_as_fit_and_only_as_wide_as_they_are():
    """Groups of two, the longest of 5, 9, 4 and 8, and a prompt of 3 tokens: at width 9 a group needs 3 + 2·9 = 21."""
    lengths = [[5, 1], [2, 9], [4, 4], [8, 7]]
    assert split(lengths, [True] * 4, budget=42) == [
        ([1, 3], [2, 3, 6, 7], 9, True), ([0, 2], [0, 1, 4, 5], 5, True)]
    assert split(lengths, [True] * 4, budget=41) == [
        ([1], [2, 3], 9, True), ([0, 3], [0, 1, 6, 7], 8, True), ([2], [4, 5], 4, True)]
    assert split(lengths, [True] * 4, budget=1) == [
        ([1], [2, 3], 9, True), ([3], [6, 7], 8, True), ([0], [0, 1], 5, True), ([2], [4, 5], 4, True)]


def test_groups_without_a_gradient_are_read_in_passes_of_their_own():
    lengths = [[5, 1], [2, 9], [4, 4], [8, 7]]
    assert split(lengths, [False, True, False, True], budget=100) == [
        ([1, 3], [2, 3, 6, 7], 9, True), ([0, 2], [0, 1, 4, 5], 5, False)]


@pytest.mark.parametrize("has_gradient, with_gradient", [
    ([True, True, True, False], [True] * 4),  # ¾ have one: reading one group apart saves too little
    ([True, True, False, False], [True, True, False, False]),
    ([False] * 4, [True] * 4),  # none has: the optimizer's momentum still wants a step
])
def test_few_groups_without_a_gradient_or_all_run_with_the_others(has_gradient, with_gradient):
    found = {}
    for prompts, _, _, wanted in split([[2, 2]] * 4, has_gradient, budget=1):
        found |= dict.fromkeys(prompts, wanted)
    assert [found[i] for i in range(4)] == with_gradient


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_response_is_in_one_pass_which_fits_and_is_wide_enough(data):
    prompts, group = data.draw(st.integers(1, 7)), data.draw(st.integers(2, 4))
    lengths = data.draw(st.lists(st.lists(st.integers(1, 12), min_size=group, max_size=group), min_size=prompts,
                                 max_size=prompts))
    has_gradient = data.draw(st.lists(st.booleans(), min_size=prompts, max_size=prompts))
    budget, prompt = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 9))
    parts = split(lengths, has_gradient, prompt=prompt, budget=budget)
    assert sorted(row for _, rows, _, _ in parts for row in rows) == list(range(prompts * group))
    for members, rows, width, _ in parts:
        assert rows == [p * group + k for p in members for k in range(group)] and members == sorted(members)
        assert width == max(max(lengths[p]) for p in members)
        assert len(members) == 1 or len(members) * (prompt + group * width) <= budget


def passes(algorithm, *, model=None, budget=1, advantages=None):
    """[(prompts, with_gradient), …] of a batch of 3 prompts with 3 tokens and 2 responses each, 4 tokens long."""
    batch = SimpleNamespace(mask=torch.ones(6, 4, dtype=torch.bool), rewards=torch.zeros(3, 2),
                            prompt=torch.zeros(3, 3))
    advantages = torch.tensor([[1.0, -1.0], [0, 0], [0, 0]]) if advantages is None else advantages
    model = model or build_model("llama", vocab_size=8)
    return [(prompts.tolist(), with_gradient) for (prompts, _, _, with_gradient), counts in micro_batches(
        model, batch, advantages, lm.Config(micro_batch_tokens=budget), lm.find_algorithm(algorithm)) if counts == 1.0]


@pytest.mark.parametrize("name", ["grpo", "rep-opmd", "rep-asymre", "ep-grpo"])
def test_a_flat_group_has_a_gradient_where_a_row_has_a_regulariser_or_a_process_signal(name):
    assert [wanted for _, wanted in passes(name)] == ([True, False, False] if name == "grpo" else [True] * 3)


def test_the_prompt_counts_once_for_a_group_but_once_for_each_response_where_activations_are_recomputed():
    model, everywhere = build_model("llama", vocab_size=8), torch.ones(3, 2)
    assert len(passes("grpo", model=model, budget=2 * (3 + 2 * 4), advantages=everywhere)) == 2
    assert len(passes("grpo", model=model, budget=2 * (3 + 2 * 4) - 1, advantages=everywhere)) == 3
    recompute_activations(model)
    assert len(passes("grpo", model=model, budget=2 * (6 + 2 * 4), advantages=everywhere)) == 2
    assert len(passes("grpo", model=model, budget=2 * (6 + 2 * 4) - 1, advantages=everywhere)) == 3
