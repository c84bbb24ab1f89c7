"""E06: a verifier that cannot judge a response. By the user's choice the run stops, or that response teaches nothing."""

import dataclasses
import importlib
import json
import math

import pytest
import torch

from under_the_hood import evaluation, friends
from under_the_hood.answers import load_reward
from under_the_hood.runs import read_metrics
from under_the_hood.tasks import Example

lm = importlib.import_module("06_full_llm_training")
NAN = math.nan
LENGTHS = torch.ones(1, 4)


def shaped(rewards, name, lengths=LENGTHS, **options):
    return lm.shaped_advantages(torch.tensor(rewards), lengths, algorithm=lm.ALGORITHMS[name], **options)


def test_the_baseline_is_the_mean_of_the_scored_responses():
    torch.testing.assert_close(shaped([[1.0, 0.0, NAN, 0.0]], "reinforce"), torch.tensor([[2 / 3, -1 / 3, 0, -1 / 3]]))


def test_one_scored_response_is_no_group():
    assert shaped([[1.0, NAN, NAN, NAN]], "reinforce").tolist() == [[0.0] * 4]


@pytest.mark.parametrize("name", lm.ALGORITHMS)
def test_every_row_gives_the_advantages_of_the_group_without_the_unscored_response(name):
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    rewards, lengths = [1.0, 0.0, 1.0, 0.0, 0.0], torch.tensor([[2.0, 3.0, 4.0, 5.0, 6.0]])
    want = shaped([rewards], name, lengths, generator=generators[0])[0]
    rewards.insert(2, NAN)
    lengths = torch.cat([lengths[:, :2], torch.zeros(1, 1), lengths[:, 2:]], 1)
    have = shaped([rewards], name, lengths, generator=generators[1])[0]
    assert have[2] == 0
    torch.testing.assert_close(have[[0, 1, 3, 4, 5]], want)


def test_a_group_keeps_its_values_when_another_has_an_unscored_response():
    rewards = [[10.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    want = shaped(rewards, "ngrpo", torch.ones(2, 4))
    have = shaped([*rewards, [NAN, 0.0, 0.0, 0.0]], "ngrpo", torch.ones(3, 4))
    torch.testing.assert_close(have[:2], want)


def test_icpo_without_a_verdict_on_the_hinted_response_compares_the_plain_ones():
    """Mean 1/3 and ICPO's deviation (ddof 1) √(6/9/2) = .577350: advantages 1.154701, −.577350, and no hint's bonus."""
    for number in (1, 401):  # the bonus is largest at first
        have = shaped([[1.0, 0.0, 0.0, NAN]], "icpo", number=number)[0]
        torch.testing.assert_close(have, torch.tensor([1.154701, -0.577350, -0.577350, 0.0]), rtol=0, atol=5e-6)
    assert not shaped([[1.0, 1.0, 1.0, NAN]], "icpo").any()


def test_one_scored_response_is_no_group_beside_a_virtual_one_either():
    assert shaped([[0.0, NAN, NAN, NAN], [1.0, 0.0, 0.0, 0.0]], "ngrpo", torch.ones(2, 4))[0].tolist() == [0.0] * 4


def test_the_effective_sample_size_is_that_of_the_scored_responses():
    """Ratios 1 and 3 of whole responses: (1 + 3)² / (2·(1 + 9)) = .8; a third response has no verdict, so no token."""
    logprobs, mask = torch.tensor([[0.0], [math.log(3)], [0.5]]), torch.tensor([[True], [True], [False]])
    found = evaluation.off_policyness(logprobs, torch.zeros(3, 1), mask)
    assert float(found["ess"]) == pytest.approx(0.8)


def test_filled_says_which_groups_are_flat_by_their_scored_rewards():
    rewards = torch.tensor([[0.1, NAN, 0.1], [1.0, NAN, 0.0], [NAN, NAN, NAN]])
    assert friends.informative_groups(evaluation.filled(rewards)).tolist() == [False, True, False]


def test_noise_and_grading_leave_the_unscored_unscored():
    algorithm = dataclasses.replace(lm.ALGORITHMS["sgpo"], overlong_share=0.5)
    config = lm.Config(reward_noise="0.3,0.3", max_new_tokens=4)
    examples = [Example("1+1=", "2")] * 3
    rewards = friends.training_rewards(torch.tensor([[0.0, NAN, 0.0]]), examples, ["3", "2", "4"], torch.ones(3), config,
                                       algorithm=algorithm, generator=torch.Generator().manual_seed(0))
    assert rewards.isnan().tolist() == [[False, True, False]]


REWARDS = '''
def unsure(question, response, answer):
    return None if response == "0" else float(response == answer)

async def later(question, response, answer):
    return 1.0

def huge(question, response, answer):
    return 1e39

def steep(question, response, answer):
    return 2000.0 * (response == answer)
'''


@pytest.fixture
def reward_file(tmp_path, monkeypatch):
    (tmp_path / "verifiers_of_this_test.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return "verifiers_of_this_test"


def run(tiny_run, out, *flags):
    lm.main([*tiny_run[2], "--steps", "2", "--out", str(out), "--device", "cpu", *flags])


def test_a_run_leaves_unscored_responses_out_and_says_how_many(tiny_run, reward_file, tmp_path):
    run(tiny_run, tmp_path / "run", "--reward", f"{reward_file}:unsure", "--on-unscored", "leave-out", "--group-size", "8")
    lines = read_metrics(tmp_path / "run")
    assert any(line.get("unscored", 0) > 0 for line in lines) and all(math.isfinite(line.get("reward", 0)) for line in lines)


def test_unscored_tokens_have_no_gradient_and_no_share_of_the_mean(tiny_run, reward_file, tmp_path, monkeypatch):
    seen, loss = [], lm.policy_loss

    def watched(logprobs, old_logprobs, advantages, mask, **options):
        if "weights" in options:
            seen.append((advantages, mask, options["weights"]))
        return loss(logprobs, old_logprobs, advantages, mask, **options)

    monkeypatch.setattr(lm, "policy_loss", watched)
    run(tiny_run, tmp_path / "run", "--reward", f"{reward_file}:unsure", "--on-unscored", "leave-out", "--group-size", "8",
        "--algorithm", "reinforce")
    left_out = [(~mask.any(1)).any() for _, mask, _ in seen]
    assert any(left_out)
    for advantages, mask, weights in seen:
        assert not advantages[~mask.any(1)].any() and (weights[mask] > 0).all() and not weights[~mask].any()


@pytest.mark.parametrize("flags, message", [
    (["--reward", "{}:unsure", "--group-size", "8"], "not a finite number"), (["--reward", "{}:later"], "async"),
    (["--reward", "{}:huge"], "float32"), (["--reward", "{}:steep", "--algorithm", "red-weight"], "red-weight"),
    (["--on-unscored", "guess"], "--on-unscored")])
def test_a_reward_that_cannot_be_used_is_one_line(flags, message, tiny_run, reward_file, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tiny_run, tmp_path / "run", *[flag.format(reward_file) for flag in flags])
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error:", "stopped:"))]
    assert len(error) == 1 and message in error[0]
    metrics = tmp_path / "run" / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_without_leave_out_none_is_refused(reward_file):
    with pytest.raises(ValueError, match="not a finite number"):
        load_reward(f"{reward_file}:unsure")("q", "0", "1")
    assert math.isnan(load_reward(f"{reward_file}:unsure", unscored=True)("q", "0", "1"))
