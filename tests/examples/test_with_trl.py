"""examples/with_trl.py: TRL trains any row; its own GRPO and our row of that name are one loss; stale data show why."""
# ruff: noqa: F811 (a fixture is imported, and then a parameter)

import ast
import importlib
import subprocess
import sys

import pytest
from conftest import ROOT
from other_trainers import BENCH, ask, cache  # noqa: F401

lm = importlib.import_module("06_full_llm_training")
EXAMPLE = ROOT / "examples" / "with_trl.py"


def test_the_subclass_is_short():
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in tree.body if isinstance(node, ast.ClassDef)}
    assert lengths["AnyRowTrainer"] <= 60


@pytest.mark.slow
def test_without_trl_one_line_says_how_to_get_it(tmp_path):
    (tmp_path / "trl.py").write_text("raise ImportError", encoding="utf-8")
    result = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120,
                            env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert result.returncode == 1 and result.stderr.startswith("error: this needs TRL: pip install trl")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_row_grpo_is_trls_own_grpo(ask, cache):
    """TRL's loss, untouched, on the batch that it made itself."""
    answer = ask("trl_side.py", "same_loss", cache)
    assert answer["same_samples"]
    # Both advantages are the deviation from the mean, divided by its standard deviation: ddof 0 and 1e-6, 1 and 1e-4.
    assert answer["ours_advantages"] < 1e-5 and answer["trl_advantages"] < 1e-5
    assert abs(answer["fresh"]["loss"] - answer["fresh"]["trl_loss"]) < 1e-5 and abs(answer["fresh"]["loss"]) > 1e-3
    for data in ("fresh", "stale"):
        assert answer[data]["gradient"] < 1e-5 < 1e-2 < answer[data]["largest"]
    # Where tokens are clipped TRL's loss holds a constant for each, ours 0; the gradient has just been seen equal.
    assert answer["stale"]["clipped"] > 0.1 and answer["stale"]["loss"] != answer["stale"]["trl_loss"]


@pytest.mark.slow
def test_every_row_has_the_gradient_in_trl_that_it_has_in_06(ask, cache):
    answer = ask("trl_side.py", "every_row", cache)
    assert set(lm.ALGORITHMS) - set(answer) == {"aepo", "icpo"}
    wrong = {name: row for name, row in answer.items() if not row["distance"] < 1e-5 * max(1, row["largest"])}
    assert wrong == {} and all(row["largest"] > 1e-3 for row in answer.values())


@pytest.mark.slow
def test_trls_losses_are_rows_of_one_equation(ask, cache):
    """Seven of its loss types, its two-sided clipping and its KL: value and slope, token by token, in float64."""
    answer = ask("trl_side.py", "loss_types", cache)
    delta, kl = answer.pop("delta"), answer.pop("kl")
    assert len(answer) == 7
    for name, row in answer.items():
        assert row["gradient"] < 1e-12 < 1e-2 < row["largest"] and row["values"] < 1e-10 < .1 < row["value"], name
        assert row["clipped"] > .1 or name == "cispo", name
    assert delta["gradient"] < 1e-12 < 1e-3 < min(delta["from two_side"], delta["from one_side"])
    assert kl["values"] < 1e-12 < 1e-2 < kl["value"]


@pytest.mark.slow
def test_gradient_accumulation_changes_nothing(ask, cache):
    for name, row in ask("trl_side.py", "micro_batches", cache).items():
        assert row["distance"] < 1e-5 < row["largest"], name


@pytest.mark.slow
def test_twenty_steps_beside_trls_own(ask, cache):
    """The constant between the two standard deviations scales the gradient, and Adam hardly sees it: one run, twice."""
    flags = ["--steps", 20, "--eval-every", 1, "--eval-questions", 64, "--prompts-per-step", 16, "--algorithm", "grpo"]
    ours, theirs = (ask("trl_side.py", "train", cache, *flags, *more) for more in ((), ("--trl-loss",)))
    assert ours["steps"] == theirs["steps"] == 20 and ours["before"] == theirs["before"] != ours["after"]
    rewards, others = ([line["reward"] for line in run["log"] if "reward" in line] for run in (ours, theirs))
    assert len(rewards) == 20 and rewards[0] == others[0]  # the same first batch
    assert sum(abs(a - b) for a, b in zip(rewards, others)) / 20 < 0.05 and abs(ours["after"] - theirs["after"]) < 0.05


@pytest.mark.slow
def test_a_row_with_a_second_batch_runs(ask, cache):
    answer = ask("trl_side.py", "train", cache, "--steps", 1, "--eval-questions", 16, "--prompts-per-step", 4,
                 "--eval-every", 1, "--algorithm", "aepo")
    assert answer["steps"] == 1 and answer["log"][0]["grad_norm"] > 0


@pytest.mark.slow
def test_reinforce_falls_where_the_clipped_row_does_not(ask, cache):
    """Eight updates on each batch of generations."""
    flags = ["--num-iterations", 8, "--steps", 64, "--prompts-per-step", 16, "--learning-rate", 2e-4,
             "--eval-every", 8, "--eval-questions", 128]
    runs = {name: ask("trl_side.py", "train", cache, *flags, "--algorithm", name)
            for name in ("reinforce", "rec-oneside-nois")}
    assert runs["reinforce"]["after"] < 0.5 * runs["reinforce"]["before"]
    assert runs["rec-oneside-nois"]["after"] > 0.75 * runs["rec-oneside-nois"]["before"]
    clipped = [line["clip_fraction"] for line in runs["rec-oneside-nois"]["log"] if "clip_fraction" in line]
    assert max(clipped) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("flags, words", [
    (["--algorithm", "icpo"], "TRL gives all of them one prompt"), (["--sync-offset", "1"], "no counterpart"),
    (["--offline"], "no counterpart"), (["--num-iterations", "0"], "at least 1"), (["--group-size", "1"], "baseline"),
])
def test_what_trl_cannot_do_is_said_in_one_line(flags, words):
    if not BENCH.exists():
        pytest.skip("needs TRL: make .venv-bench/ready")
    result = subprocess.run([BENCH, "-W", "ignore", EXAMPLE, *flags], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1
