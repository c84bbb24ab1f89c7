"""What single rows do beside their loss: noisy verdicts, graded steps, refills, worked examples, a second batch.

Their losses are in tests/test_06_family.py.
"""

import copy
import dataclasses
import functools
import importlib
import math

import pytest
import torch
from under_the_hood import evaluation, fast, friends
from under_the_hood.answers import is_correct
from under_the_hood.errors import UserError
from under_the_hood.models import decode, encode_prompts, load_model
from under_the_hood.runs import read_metrics
from under_the_hood.tasks import Example, load_task

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def tiny(tiny_run):
    """(model, tokenizer, task, config) of the smallest model that is sometimes right."""
    folder, path, _ = tiny_run
    config = lm.Config(model=str(folder), task=str(path), prompts_per_step=4, group_size=4, max_new_tokens=2,
                       eval_questions=2, eval_samples=2)
    return *load_model(str(folder), device="cpu"), load_task(config), config


def sampled_batch(tiny, name, number=1, seed=0, config=None):
    """Batch `number` of a run of the row, with the rewards that the trainer sees."""
    model, tokenizer, task, default = tiny
    config, row = config or default, lm.find_algorithm(name)
    draw = functools.partial(lm.collect, model, tokenizer, config=config, version=0, generator=generator(seed),
                             algorithm=row, number=number)
    return friends.training_batch(draw, task, number, config, algorithm=row)


def recomputed(model, part, config):
    """Log-probabilities of the rollout's own tokens under its own, plain prompts."""
    with torch.no_grad():
        return lm.token_logprobs(model, part.prompt, part.tokens, prompt_mask=part.prompt_mask, mask=part.mask,
                                 temperature=config.temperature)[0]


# ------------------------------------------------------------------------------------------------------------ noise


@pytest.mark.parametrize("rates", [(0.2, 0.1), (0.0, 0.4), (0.45, 0.5)])
def test_the_corrected_reward_is_unbiased_and_a_standard_deviation_undoes_it(rates):
    known = {"false_positive_rate": rates[0], "false_negative_rate": rates[1]}
    passed, failed = friends.noise_corrected_rewards(float64(1, 0), **known).tolist()
    assert rates[0] * passed + (1 - rates[0]) * failed == pytest.approx(0)  # of a wrong answer
    assert (1 - rates[1]) * passed + rates[1] * failed == pytest.approx(1)  # of a right one
    group = float64(1, 1, 0, 0, 0, 0, 0, 0)
    fixed, raw = (lm.group_advantages(rewards, std_normalize=True, eps=0)
                  for rewards in (friends.noise_corrected_rewards(group, **known), group))
    assert torch.allclose(fixed, raw, atol=1e-14)


def test_verdicts_are_flipped_at_their_rates():
    truth = torch.tensor([0.0, 1.0]).repeat_interleave(20_000)
    noisy = friends.noisy_verdicts(truth, (0.2, 0.1), generator=generator())
    flipped = (noisy != truth).double().view(2, -1).mean(1)
    assert flipped.tolist() == pytest.approx([0.2, 0.1], abs=0.012)  # 4 standard errors: 4·√(.2·.8/20000) = .0113
    assert torch.equal(friends.noisy_verdicts(truth, (0.0, 0.0), generator=generator()), truth)


def test_only_verdicts_of_0_and_1_can_be_flipped():
    with pytest.raises(ValueError, match="verdicts of 0 and 1"):
        friends.noisy_verdicts(float64(0, 0.5), (0.1, 0.1), generator=generator())


def test_noise_reaches_the_trainer_but_not_the_evaluation(tiny):
    model, tokenizer, task, config = tiny
    noisy = dataclasses.replace(config, reward_noise="0.5,0.4")
    clean, seen = (sampled_batch(tiny, "noise-corrected-grpo", config=c).rewards for c in (config, noisy))
    assert not torch.equal(clean, seen)
    first, second = (evaluation.evaluate(lm.collect, model, tokenizer, task, c) for c in (config, noisy))
    assert first == second


def test_calibration_finds_the_rates(tiny_run, capsys):
    lm.main([*tiny_run[2], "--reward-noise", "0.3,0.15", "--calibrate", "3000", "--prompts-per-step", "100"])
    printed = capsys.readouterr().out
    low_high = [tuple(map(float, line.split("95 % ")[1][:-1].split("–"))) for line in printed.splitlines()[:2]]
    for (low, high), rate in zip(low_high, (0.3, 0.15)):
        assert low < rate < high and high - low < 0.1
    rates = friends.rate_pair(printed.split("--noise-rates ")[1].strip(), flag="")
    assert rates == pytest.approx((0.3, 0.15), abs=0.05)


def always(question, response, answer):
    return 1.0


def test_calibration_judges_a_verifier_of_the_users(tiny_run, capsys):
    lm.main([*tiny_run[2], "--reward", f"{__name__}:always", "--calibrate", "64"])
    passed, failed, _ = capsys.readouterr().out.splitlines()
    assert "passed: " in passed and "= 1.000 (95 %" in passed and "failed: " in failed and "= 0.000 (95 %" in failed


def test_calibration_without_a_right_answer_says_that_there_is_nothing_to_count(tiny_run, tmp_path, capsys):
    lines = (f'{{"question": "{i:b}", "answer": "5"}}\n' for i in range(20))  # a digit that the model does not know
    (tmp_path / "task.jsonl").write_text("".join(lines))
    with pytest.raises(SystemExit):
        lm.main([*tiny_run[2], "--task", str(tmp_path / "task.jsonl"), "--calibrate", "16"])
    assert "all 16 answers are wrong: nothing to count ρ⁻" in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [
    ("0.2", "two numbers"), ("0.6,0.4", "less than 1"), ("-0.1,0.2", "0 or more"), ("nan,0", "0 or more"),
    ("a,b", "two numbers"), ("0,0,0", "two numbers")])
def test_rates_that_cannot_be_are_refused(text, message):
    with pytest.raises(UserError, match=f"--noise-rates is .*{message}"):
        friends.rate_pair(text, flag="--noise-rates")
    assert friends.rate_pair("0.2,0", flag="") == (0.2, 0.0)


@pytest.mark.parametrize("flags, message", [
    (["--reward-noise", "0.2"], "--reward-noise is '0.2'"), (["--noise-rates=-0.1,0.2"], "--noise-rates is -0.1,0.2"),
    (["--algorithm", "sgpo"], "--step-reward"), (["--algorithm", "sgpo", "--step-reward", "math:nothing"], "nothing"),
    (["--algorithm", "icpo", "--group-size", "2"], "--group-size 3"), (["--refills", "-1"], "--refills"),
    (["--weight-cap", "0"], "--weight-cap"), (["--entropy-target", "-1"], "--entropy-target"),
])
def test_mistakes_are_one_line(tiny_run, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        lm.main([*tiny_run[2], *flags])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and message in printed and printed.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------- SGPO


@pytest.mark.parametrize("text, answer, share", [
    ("123", "123", 1), ("124", "123", 2 / 3), ("223", "123", 0), ("1234", "123", 3 / 4), ("12", "123", 2 / 3),
    ("", "123", 0), ("no idea", "7", 0), ("so it is 99", "98", 1 / 2),
])
def test_leading_digits(text, answer, share):
    assert friends.leading_digits("", text, answer) == pytest.approx(share)


def all_wrong_and_mixed(step_reward=None):
    """Training rewards of SGPO for two groups of three answers to 12 + 3 (15): one all wrong, one with a right one."""
    texts, asked = ["25", "14", "1", "15", "14", "99"], [Example("12+3", "15")] * 6
    config = lm.Config(step_reward=step_reward)
    rewards = torch.tensor([[0, 0, 0], [1, 0, 0]], dtype=torch.float64)
    return friends.training_rewards(rewards, asked, texts, torch.ones(6), config, algorithm=lm.ALGORITHMS["sgpo"],
                                    generator=None)


def test_sgpo_grades_an_all_wrong_group_only():
    graded = all_wrong_and_mixed()
    assert graded[0].tolist() == pytest.approx([0.0758582, 0.5, 0.5], abs=1e-7)  # RTS 0, ½, ½ → σ(5·(RTS − ½))
    assert graded[1].tolist() == [1, 0, 0]
    assert friends.graded_reward(float64(1)).item() == pytest.approx(0.9241418, abs=1e-7)


def step_judge(question, response, answer):
    return {"25": 1.0, "14": 0.5, "1": 0.0}[response]


def bad_judge(question, response, answer):
    return 1.5


def test_sgpo_takes_a_judge_of_the_users():
    graded = all_wrong_and_mixed(f"{__name__}:step_judge")[0].tolist()
    assert graded == pytest.approx([0.9241418, 0.5, 0.0758582], abs=1e-7)
    with pytest.raises(ValueError, match="share of right leading steps"):
        all_wrong_and_mixed(f"{__name__}:bad_judge")


# ------------------------------------------------------------------------------------------------------------- DAPO


def test_overlong_penalty_in_numbers():
    lengths = float64(16000, 16384, 18432, 20480)
    assert friends.overlong_penalty(lengths, max_length=20480, cache=4096).tolist() == [0, 0, -0.5, -1]
    rewards, config, row = torch.zeros(2, 2).double(), lm.Config(max_new_tokens=20480), lm.ALGORITHMS["dapo"]
    for share, expected in ((0.2, [0, 0, -0.5, -1]), (0.0, [0] * 4)):  # its Lc is a fifth of the budget: 4096
        row = dataclasses.replace(row, overlong_share=share)
        seen = friends.training_rewards(rewards, [], [], lengths, config, algorithm=row, generator=None)
        assert seen.flatten().tolist() == pytest.approx(expected)


def dapo_batch(tiny, refills, **changes):
    """(batch, the questions of each call that made it, config) of 12 groups of three."""
    model, tokenizer, task, config = tiny
    config = dataclasses.replace(config, refills=refills, prompts_per_step=12, group_size=3, **changes)
    row = dataclasses.replace(lm.ALGORITHMS["dapo"], overlong_share=0.0)
    calls, draw = [], generator(1)

    def sample(examples, worked):
        calls.append([e.question for e in examples])
        return lm.collect(model, tokenizer, examples, config, version=0, generator=draw, algorithm=row, worked=worked)

    return friends.training_batch(sample, task, 1, config, algorithm=row), calls, config


@pytest.mark.filterwarnings("ignore:groups without a contrast")
def test_dynamic_sampling_replaces_flat_groups_and_nothing_else(tiny):
    flat = [int((~friends.informative_groups(dapo_batch(tiny, refills)[0].rewards)).sum()) for refills in (0, 1, 30)]
    assert flat[0] > flat[1] >= flat[2] == 0
    first, (questions,), config = dapo_batch(tiny, 0)
    filled, calls, _ = dapo_batch(tiny, 1)
    keep = friends.informative_groups(first.rewards)
    assert [len(c) for c in calls] == [12, flat[0]]
    assert calls[1] != [q for q, k in zip(questions, keep) if not k] and calls[1] != questions[: flat[0]]
    kept = int(keep.sum())
    assert torch.equal(filled.rewards[:kept], first.rewards[keep]) and filled.rewards.shape == first.rewards.shape
    # rows, prompts, log-probabilities and rewards of the joined batch still belong together
    assert torch.allclose(recomputed(tiny[0], filled, config), filled.old_logprobs, atol=1e-5)
    texts = decode(tiny[1], filled.tokens, filled.mask)
    assert filled.rewards.flatten().tolist() == [float(is_correct(text, "1")) for text in texts]
    eos = ((filled.tokens == tiny[1].eos_token_id) & filled.mask).any(1)
    assert torch.equal(filled.truncated, ~eos)


def test_dynamic_sampling_is_bounded_and_says_so(tiny):
    with pytest.warns(UserWarning, match="groups without a contrast remain after --refills 3"):
        filled, calls, _ = dapo_batch(tiny, 3, reward=f"{__name__}:never")
    assert len(calls) == 4 and len(filled.rewards) == 12
    assert len({tuple(questions) for questions in calls}) == 4  # each attempt asks others


def never(question, response, answer):
    return 0.0


def test_joined_batches_of_unequal_widths_keep_prompts_left_and_responses_right():
    def rollout(prompts, width, length, value):
        rows = prompts * 2
        return lm.Rollout(torch.full((prompts, width), value), torch.ones(prompts, width, dtype=torch.bool),
                          torch.full((rows, length), value), torch.ones(rows, length, dtype=torch.bool),
                          torch.full((rows, length), -1.0), torch.full((prompts, 2), float(value)),
                          torch.zeros(rows, dtype=torch.bool), 5, [], None, 7)

    joined = friends.join(rollout(2, 1, 3, 1), torch.tensor([False, True]), rollout(1, 2, 1, 2))
    assert joined.prompt.tolist() == [[0, 1], [2, 2]] and joined.prompt_mask.tolist() == [[False, True], [True, True]]
    assert joined.tokens.tolist() == [[1, 1, 1]] * 2 + [[2, 0, 0]] * 2
    assert joined.mask.tolist() == [[True] * 3] * 2 + [[True, False, False]] * 2
    assert joined.rewards.tolist() == [[1, 1], [2, 2]]
    assert (joined.version, joined.number, len(joined.truncated)) == (5, 7, 4)


# ------------------------------------------------------------------------------------------------------------- AEPO


class Constant(torch.nn.Module):
    """A model of one distribution over tokens, whatever the context."""

    def __init__(self, probs):
        super().__init__()
        self.logits = torch.nn.Parameter(float64(*probs).log())


@pytest.mark.parametrize("target, moved", [(2.0, 0.0255595), (0.1, -0.0333072)])
def test_aepo_steers_the_entropy_up_and_down(target, moved):
    """π = [.7, .2, .1] with the three samples weighed by their probability at the temperature that the row asks for."""
    model = Constant([0.7, 0.2, 0.1])
    row = dataclasses.replace(lm.ALGORITHMS["aepo"], entropy_target=target, entropy_weight=1.0)
    asked = {}

    def sample(_, prompt, prompt_mask, *, group_size, temperature):
        asked.update(temperature=temperature, group_size=group_size)
        return torch.tensor([[0], [1], [2]]), torch.ones(3, 1, dtype=torch.bool), None

    def token_logprobs(model, prompt, tokens, *, temperature, **_):  # three rows, mean over 3: times 3·π_T is exact
        assert temperature == 1.0  # that of the policy, not that of the samples
        weights = 3 * torch.softmax(model.logits.detach() / asked["temperature"], -1)
        return (weights * model.logits.log_softmax(-1))[:, None], None

    part = lm.Rollout(*[torch.zeros(1, 1)] * 7, 0, [])
    entropy = torch.distributions.Categorical(logits=model.logits).entropy()
    friends.extra_gradient(model, part, lm.Config(dtype="float32", group_size=5), algorithm=row, entropy=entropy.item(),
                           sample=sample, token_logprobs=token_logprobs)
    assert asked == {"temperature": 1.2 if moved > 0 else 0.8, "group_size": 5}
    step = -model.logits.grad
    change = (torch.autograd.grad(entropy, model.logits)[0] * step).sum().item()
    assert change == pytest.approx(moved, abs=1e-7)


def test_aepos_gradient_reaches_every_weight_in_bfloat16_too(tiny):
    """Autocast may keep weights that it has cast; those of sampling, made without gradients, must not serve here."""
    model, _tokenizer, _task, config = tiny
    part, gradients = sampled_batch(tiny, "grpo"), {}
    for dtype in ("float32", "bfloat16"):
        sample = functools.partial(fast.generate, max_new_tokens=config.max_new_tokens, eos_ids={1}, pad_id=0,
                                   generator=generator())
        moved = copy.deepcopy(model)
        friends.extra_gradient(moved, part, dataclasses.replace(config, dtype=dtype), algorithm=lm.ALGORITHMS["aepo"],
                               entropy=0.0, sample=sample, token_logprobs=fast.token_logprobs)
        gradients[dtype] = [p.grad for p in moved.parameters()]
        assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients[dtype])
    norm = sum(g.norm() ** 2 for g in gradients["float32"]) ** 0.5
    difference = sum((a - b).norm() ** 2 for a, b in zip(*gradients.values())) ** 0.5
    assert difference < 0.3 * norm  # other responses may come out of it, but not another direction


def test_aepo_moves_the_entropy_of_a_model_towards_its_target(tiny_run, quick, tmp_path):
    ends = {}
    for target in ("3", "0.01"):  # no answer is ever right, so that nothing else moves the policy
        lm.main([*tiny_run[2], "--algorithm", "aepo", "--entropy-target", target, "--steps", "20", "--learning-rate",
                 "0.001", "--prompts-per-step", "32", "--reward", f"{__name__}:never", "--out", str(tmp_path / target)])
        entropy = [line["entropy"] for line in read_metrics(tmp_path / target) if "entropy" in line]
        ends[target] = entropy[-1] - entropy[0]
    assert ends["3"] > 0.03 and ends["0.01"] < -0.5  # from 1.84 nats, of at most log 7 = 1.95


def test_without_a_target_aepo_is_grpo(tiny):
    model, _tokenizer, _task, config = tiny
    weights = {}
    part = sampled_batch(tiny, "grpo")
    for name in ("grpo", "aepo"):
        moved = copy.deepcopy(model)
        row = dataclasses.replace(lm.ALGORITHMS[name], entropy_target=None)
        lm.train_step(moved, torch.optim.SGD(moved.parameters(), 0.1), part, config, algorithm=row, generator=None)
        weights[name] = torch.cat([p.detach().flatten() for p in moved.parameters()])
    assert torch.equal(weights["grpo"], weights["aepo"])
    assert not torch.equal(weights["grpo"], torch.cat([p.detach().flatten() for p in model.parameters()]))


# ------------------------------------------------------------------------------------------------------------- ICPO


def test_the_hinted_response_is_sampled_with_a_worked_example_and_scored_without(tiny):
    model, tokenizer, task, config = tiny
    worked, examples = [Example("1 0", "1")], task.train[:5]
    part = lm.collect(model, tokenizer, examples, config, generator=generator(3), worked=worked, version=0,
                      algorithm=lm.ALGORITHMS["icpo"])
    assert part.hinted.view(5, 4).tolist() == [[False, False, False, True]] * 5
    assert torch.allclose(recomputed(model, part, config), part.old_logprobs, atol=1e-5)  # plain prompts, hinted too
    # The plain rows, then the hinted ones, drawn by the same generator from the prompts that they should see.
    again = generator(3)
    shared = {"temperature": 1.0, "max_new_tokens": config.max_new_tokens, "eos_ids": {1}, "pad_id": 0}
    plain = fast.generate(model, part.prompt, part.prompt_mask, group_size=3, generator=again, **shared)
    shown, shown_mask = encode_prompts(tokenizer, examples, device="cpu", worked=worked)
    hint = fast.generate(model, shown, shown_mask, group_size=1, generator=again, **shared)

    def ids(tokens, mask):
        return [row[keep].tolist() for row, keep in zip(tokens, mask)]

    assert ids(part.tokens[~part.hinted], part.mask[~part.hinted]) == ids(*plain[:2])
    assert ids(part.tokens[part.hinted], part.mask[part.hinted]) == ids(*hint[:2])
    texts = decode(tokenizer, part.tokens, part.mask)
    assert part.rewards.flatten().tolist() == [float(is_correct(text, "1")) for text in texts]


def test_a_worked_example_that_does_not_fit_is_said(tiny):
    model, tokenizer, task, config = tiny
    long = [Example("1" * 130, "1")]
    with pytest.raises(UserError, match="worked example .* leaves no room"):
        lm.collect(model, tokenizer, task.train[:2], config, version=0, generator=generator(), worked=long)


def test_only_icpo_draws_worked_examples_and_another_one_for_each_batch(tiny):
    _, _, task, config = tiny
    shown = {name: [] for name in ("icpo", "grpo")}
    for name, seen in shown.items():
        for number in (1, 2, 3):
            friends.training_batch(lambda _, worked, seen=seen: seen.append([e.question for e in worked]), task, number,
                                   config, algorithm=lm.ALGORITHMS[name])
    assert shown["grpo"] == [[], [], []]
    same = 0
    for seed in range(5):  # an example of a shuffle of its own: that of the questions would show each batch its first
        friends.training_batch(lambda examples, worked: shown.update(pair=(examples[0], worked[0])), task, 1,
                               dataclasses.replace(config, seed=seed), algorithm=lm.ALGORITHMS["icpo"])
        same += len(set(shown.pop("pair"))) == 1
    assert same < 3
    assert all(len(one) == 1 for one in shown["icpo"]) and len({one[0] for one in shown["icpo"]}) > 1


# ---------------------------------------------------------------------------------------------- EP-GRPO, our reading


def process(advantages, rewards, log_ratio, entropy, mask, weight=0.1):
    return friends.process_advantages(advantages, rewards, log_ratio, entropy, mask, process_weight=weight)


def ep_batch(seed):
    """Three groups of four, up to five tokens long: one mixed, one drawn, one all wrong."""
    draw = generator(seed)
    mask = torch.arange(5) < torch.randint(1, 6, (12, 1), generator=draw)
    log_ratio = 0.5 * torch.randn(12, 5, generator=draw, dtype=torch.float64)
    entropy = 2 * torch.rand(12, 5, generator=draw, dtype=torch.float64)
    rewards = torch.randint(0, 2, (3, 4), generator=draw).double()
    rewards[0], rewards[0, 1:3], rewards[-1] = 1.0, 0.0, 0.0
    return lm.group_advantages(rewards, std_normalize=True), rewards, log_ratio, entropy, mask


@pytest.mark.parametrize("seed", range(2))
def test_ep_grpo_against_a_loop_and_its_three_properties(seed):
    advantages, rewards, log_ratio, entropy, mask = ep_batch(seed)
    rewards[1], advantages[1] = 1.0, 0.0  # an all-right group besides the all-wrong one
    shaped = process(advantages, rewards, log_ratio, entropy, mask)
    for i, (a, r) in enumerate(zip(advantages.flatten().tolist(), rewards.flatten().tolist())):
        places = [t for t in range(mask.shape[1]) if mask[i, t]]
        spent = sum(entropy[i, t].item() + 1e-6 for t in places)
        sign = (1 if a > 0 else -1) if a != 0 else (1 if r > 0 else -1)
        for t in places:
            agrees = 1 / (1 + math.exp(-sign * log_ratio[i, t].item()))
            share = (entropy[i, t].item() + 1e-6) / spent
            assert shaped[i, t].item() == pytest.approx(sign * (abs(a) + 0.1 * agrees) * share * len(places))
            assert shaped[i, t] * sign > 0  # 1: the sign of the outcome; 2: and never 0, in a flat group either
        assert not shaped[i, mask.shape[1]:].any()


def test_ep_grpo_is_invariant_to_padding_and_to_splitting_a_token():
    advantages, rewards, log_ratio, entropy, mask = ep_batch(0)
    shaped = process(advantages, rewards, log_ratio, entropy, mask)
    padded = [torch.cat([part, torch.full((12, 2), 7.0).to(part.dtype)], 1) for part in (log_ratio, entropy)]
    longer = process(advantages, rewards, *padded, torch.cat([mask, torch.zeros(12, 2, dtype=torch.bool)], 1))
    assert torch.allclose(longer[:, :-2], shaped, atol=1e-14) and not longer[:, -2:].any()
    # The first token becomes two, with half of its entropy each and the same divergence: a response's total, the mean
    # over its tokens, stays. The floor of 1e-6 nats a token is what little changes.
    split = [torch.cat([part[:, :1] / share, part[:, :1] / share, part[:, 1:]], 1)
             for part, share in ((log_ratio, 1), (entropy, 2))]
    twice = torch.cat([mask[:, :1], mask], 1)
    cut = process(advantages, rewards, *split, twice)
    assert torch.allclose(cut.sum(1) / twice.sum(1), shaped.sum(1) / mask.sum(1), atol=1e-5)


def test_without_a_process_weight_and_with_even_entropy_the_advantages_are_grpos():
    advantages, rewards, log_ratio, entropy, mask = ep_batch(1)
    even = process(advantages, rewards, log_ratio, torch.ones_like(entropy), mask, weight=0.0)
    assert torch.allclose(even[mask], advantages.reshape(-1, 1).expand(mask.shape)[mask], atol=1e-12)


def test_the_training_step_uses_the_process_signal(tiny):
    model, _, _, config = tiny
    part = sampled_batch(tiny, "ep-grpo")
    part.rewards = torch.zeros_like(part.rewards)  # every group flat: GRPO's gradient is 0
    for name, moves in (("grpo", False), ("ep-grpo", True)):
        moved = copy.deepcopy(model)
        optimizer = torch.optim.SGD(moved.parameters(), 0.1)
        metrics = lm.train_step(moved, optimizer, part, config, algorithm=lm.ALGORITHMS[name], generator=None)
        assert (metrics["grad_norm"] > 1e-3) == moves


def test_ngrpos_virtual_response_is_as_good_as_the_best_where_a_reward_exceeds_1():
    """2, 0 and a virtual 2: mean 4/3, standard deviation (ddof 1) √(4/3)."""
    advantages = lm.shaped_advantages(float64(2, 0)[None], torch.ones(1, 2), algorithm=lm.ALGORITHMS["ngrpo"])
    assert advantages[0].tolist() == pytest.approx([1 / math.sqrt(3), -2 / math.sqrt(3)], abs=1e-5)


def test_rows_without_friends_change_nothing(tiny):
    rewards, texts = torch.tensor([[0.0, 0.5], [1.0, 2.0]]), ["a"] * 4
    row, config = lm.ALGORITHMS["grpo"], lm.Config()
    seen = friends.training_rewards(rewards, [], texts, torch.ones(4), config, algorithm=row, generator=None)
    assert torch.equal(seen, rewards)
    advantages = lm.shaped_advantages(rewards, torch.ones(2, 2), algorithm=row, noise_rates=(0.1, 0.1), number=7)
    assert torch.equal(advantages, lm.group_advantages(rewards, std_normalize=True))
    assert friends.extra_gradient(None, None, None, algorithm=row, entropy=0.0, sample=None, token_logprobs=None) == 0.0


def test_flat_groups_of_any_number_of_dimensions():
    rewards = torch.tensor([[[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]])
    assert friends.informative_groups(rewards).tolist() == [[True, False]]
    assert bool(friends.informative_groups(rewards[0, 0])) and not friends.informative_groups(rewards[0, 1])


@pytest.mark.parametrize("advantages, lengths, options", [
    ([0.5, -0.5], [1, 2, 3], {}), ([0.5], [3], {}), ([[0.5, -0.5]], [[1, 2]], {}), ([math.nan, 0.0], [1, 2], {}),
    ([0.5, -0.5], [1, -2], {}), ([0.5, -0.5], [1.0, math.inf], {}), ([0.5, -0.5], [1, 2], {"low": 0.0}),
    ([0.5, -0.5], [1, 2], {"low": 3.0, "high": 2.0}), ([0.5, -0.5], [1, 2], {"high": math.inf})])
def test_a_temperature_of_what_is_no_group_is_refused(advantages, lengths, options):
    with pytest.raises(ValueError, match="need one group"):
        friends.adaptive_temperature(torch.tensor(advantages), torch.tensor(lengths), **options)


@pytest.mark.parametrize("formula", [
    friends.ngrpo_advantages, lambda r: friends.icpo_advantages(r[..., :-1], r[..., -1], step=100),
    lm.group_advantages, lambda r: lm.group_advantages(r, std_normalize=True),
    lambda r: lm.group_advantages(r, leave_one_out=True), lambda r: lm.red_drop(r, generator=seeded())[0]])
def test_a_group_gets_what_it_gets_alone_whatever_stands_around_it(formula):
    """(2, 3, K) against (K,); no group has more wrong than right answers, so RED-Drop has no choice."""
    rewards = torch.tensor([[[1.0, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 1]], [[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 1, 1]]])
    together = formula(rewards)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], formula(rewards[i, j]))


def seeded():
    return torch.Generator().manual_seed(0)
