"""examples/own_loop.py: what it pasted is what stands in 06, it imports nothing of ours, and it learns."""

import ast
import dataclasses
import importlib

import pytest
from conftest import ROOT
from test_copies import definitions
from test_layout import own_modules

lm = importlib.import_module("06_full_llm_training")
SOURCE = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
PASTED = {"find_algorithm", "group_advantages", "clip_mask", "policy_ratio", "importance_weight", "token_weights",
          "clean_tokens", "policy_loss"}


def test_the_pasted_functions_are_those_of_06():
    here, there = definitions(SOURCE), definitions((ROOT / "06_full_llm_training.py").read_text(encoding="utf-8"))
    assert {name for name in PASTED if here[name] != there[name]} == set()
    between = SOURCE.split("pasted from 06, from here")[1].split("to here")[0]
    assert set(definitions(between[between.index("\n"):between.rindex("\n")])) == PASTED


def test_it_imports_nothing_of_ours():
    assert own_modules(SOURCE) == []
    imported = {name.split(".")[0] for node in ast.walk(ast.parse(SOURCE)) for name in
                ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                 [node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert imported == {"dataclasses", "math", "sys", "torch", "transformers"}


def test_the_loop_has_at_most_60_lines():
    assert len(SOURCE.split("to here")[1].splitlines()) <= 60


def test_its_rows_and_their_losses_are_those_of_06():
    own_loop, torch = importlib.import_module("examples.own_loop"), lm.torch
    generator = torch.Generator().manual_seed(0)
    logprobs, old_logprobs = (torch.randn(6, 5, generator=generator) for _ in range(2))
    advantages, mask = torch.randn(6, generator=generator), torch.rand(6, 5, generator=generator) < 0.7
    for name, row in own_loop.ALGORITHMS.items():
        assert {f: getattr(lm.ALGORITHMS[name], f) for f in dataclasses.asdict(row)} == dataclasses.asdict(row)
        one, other = (module.policy_loss(logprobs, old_logprobs, advantages, mask, algorithm=name)[0]
                      for module in (own_loop, lm))
        assert one == other, name


@pytest.mark.slow
def test_it_learns_on_data_up_to_seven_updates_old(capsys):
    history = importlib.import_module("examples.own_loop").train("rec-oneside-nois", steps=80)
    assert sum(history[:5]) / 5 < 0.2 < 0.3 < sum(history[-10:]) / 10
    assert "clipped 0.00" in capsys.readouterr().out
