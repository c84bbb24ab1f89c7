"""examples/with_verl.py: what verl registers, calls and splits over workers is our row. verl itself runs on no CPU."""

import importlib
import math

import pytest
from conftest import ROOT  # noqa: F401 (the path)
from other_trainers import ask  # noqa: F401 (fixture)

lm = importlib.import_module("06_full_llm_training")


@pytest.fixture(scope="module")
def verl(ask):  # noqa: F811
    return ask("verl_side.py")


@pytest.mark.slow
def test_every_row_but_the_neighbours_is_registered_when_verl_imports_the_example(verl):
    assert verl["registered"] == sorted(f"our-{name}" for name in lm.ALGORITHMS if name not in lm.NEIGHBOURS)


@pytest.mark.slow
def test_the_signature_is_the_one_verl_calls(verl):
    assert verl["signature"]["ours"] == verl["signature"]["vanilla"]


@pytest.mark.slow
def test_the_gradient_is_that_of_verls_own_losses(verl):
    assert set(verl["loss"]) == {"our-grpo", "our-rec-oneside-is", "our-dr-grpo", "our-gspo", "our-cispo"}
    for name, row in verl["loss"].items():
        assert row["distance"] < 1e-6 < 1e-2 < row["largest"], name
        assert row["numbers"] and row["metrics"] == ["actor/clip_fraction", "actor/kl_old", "actor/ratio_mean"]


@pytest.mark.slow
def test_rows_that_verl_has_under_other_names(verl):
    """gpg, dro, geo_mean; k1 and k2 as penalties; importance weights of a token or a response, capped or cut off."""
    assert set(verl["exact"]) == {"reinforce", "rep-opmd", "rep-asymre", "tis", "rec-twoside-is", "gmpo", "topr",
                                  "tic-grpo"}
    for name, comparisons in verl["exact"].items():
        for found in comparisons:
            assert found["gradient"] < 1e-12 < 1e-2 < found["largest"], name
            assert found["values"] < 1e-12 or name == "gmpo", name
    assert math.isclose(verl["k3"]["verl"], verl["k3"]["ours"], rel_tol=1e-12) and verl["k3"]["ours"] > .01


@pytest.mark.slow
def test_micro_batches_and_workers_change_nothing(verl):
    assert len(verl["split"]) == 27
    for name, row in verl["split"].items():
        assert row["distance"] < 1e-6 < 1e-3 < row["largest"], name


@pytest.mark.slow
def test_advantages_are_verls_own_up_to_the_kind_of_standard_deviation(verl):
    assert verl["advantages"]["our-reinforce"]["distance"] < 1e-6 and verl["advantages"]["our-rloo"]["distance"] < 1e-6
    for ratio in verl["advantages"]["our-grpo"]["ratio"]:  # K = 4: ddof 1 there, 0 here
        assert math.isclose(ratio, math.sqrt(3 / 4), rel_tol=1e-5)
    for ratio in verl["advantages"]["our-reinforce-plus-plus"]["ratio"]:  # 48 tokens
        assert math.isclose(ratio, math.sqrt(47 / 48), rel_tol=1e-5)


@pytest.mark.slow
def test_every_printed_setting_is_one_of_verls(verl):
    assert verl["unknown"] == []


def example():
    return importlib.import_module("examples.with_verl")


def test_the_printed_command_selects_the_row_and_its_staleness(capsys):
    example().main(["--algorithm", "rec-gspo-nois", "--sync-interval", "5", "--model", "some/model", "--steps", "20"])
    lines = [line.strip(" \\") for line in capsys.readouterr().out.splitlines()]
    assert lines[0].endswith("VERL_USE_EXTERNAL_MODULES=with_verl python -m verl.trainer.main_ppo")
    for line in ("algorithm.adv_estimator=our-rec-gspo-nois", "data.train_batch_size=160",
                 "actor_rollout_ref.actor.policy_loss.loss_mode=our-rec-gspo-nois", "trainer.total_training_steps=4",
                 "actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.model.path=some/model",
                 "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
                 "algorithm.rollout_correction.bypass_mode=False"):
        assert line in lines


@pytest.mark.parametrize("flags, words", [
    (["--algorithm", "dapo"], "more than A, M, W, R and N"), (["--offline"], "--sync-interval"),
    (["--sync-offset", "2"], "--sync-interval"), (["--eps-high", "0.4"], "a line of your own"),
    (["--sync-interval", "7"], "no multiple"), (["--model", "tiny"], "built in"),
])
def test_what_verl_would_not_do_is_said_in_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        example().main(["--model", "some/model", *flags])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1


def test_another_aggregation_is_refused():
    torch, tensors = lm.torch, [lm.torch.zeros(2, 3) for _ in range(3)]
    with pytest.raises(ValueError, match="loss_agg_mode=token-mean"):
        example().loss_in_verl(*tensors, torch.ones(2, 3), "seq-mean-token-mean", row=lm.ALGORITHMS["grpo"])


def test_groups_of_unlike_sizes_are_refused():
    numpy, torch = importlib.import_module("numpy"), lm.torch
    with pytest.raises(ValueError, match="same number of responses"):
        example().advantages_in_verl(torch.zeros(4, 2), torch.ones(4, 2), numpy.array(["a", "a", "a", "b"]),
                                     row=lm.ALGORITHMS["grpo"])
