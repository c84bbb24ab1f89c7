"""Lesson 06, the family: every friend's row against its own paper's objective, its worked numbers, what it reduces to.

The references are the surrogate objectives as their papers write them, such as PPO's minimum with its gradient through the
ratio: other algebra than the detached weights and masks of `policy_loss`, so equal gradients say that the row is the method.
"""

import dataclasses
import importlib
import math

import pytest
import torch

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)

GROUP = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
BUDGET = 7  # Dr. GRPO's constant


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch(seed, *, prompts=3, group=4, width=5, spread=0.5):
    """Random stale data: (logprobs, old_logprobs, rewards (P, K), mask); the first group is mixed, the last one all wrong."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(prompts * group, width, generator=generator, dtype=torch.float64) - 0.05
    new = old + spread * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(1, width + 1, (len(old), 1), generator=generator)
    rewards = torch.randint(0, 2, (prompts, group), generator=generator).double()
    rewards[0], rewards[0, 1:3], rewards[-1] = 1.0, 0.0, 0.0
    return new, old, rewards, mask


def row_gradient(row, logprobs, old_logprobs, rewards, mask, **options):
    """Gradient of the row's loss in the log-probabilities, advantages made by the row too."""
    row = lm.find_algorithm(row)
    advantages = lm.shaped_advantages(rewards, mask.sum(1).view_as(rewards), algorithm=row).flatten()
    leaf = logprobs.clone().requires_grad_()
    loss, _ = lm.policy_loss(leaf, old_logprobs, advantages, mask, algorithm=row, constant=BUDGET, **options)
    return torch.autograd.grad(loss, leaf)[0]


# ------------------------------------------------------------------------ the objectives as their papers write them


def centred(group):
    return [r - sum(group) / len(group) for r in group]


def standardised(group, ddof=0):
    mean = sum(group) / len(group)
    std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - ddof))
    return [(r - mean) / (std + 1e-6) for r in group]


def ppo(ratio, advantage, low, high):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def responses(new, old, mask):
    """One (log π, log ratio) pair per response, without its padding."""
    return [(n[m], (n - o)[m]) for n, o, m in zip(new, old, mask)]


def advantages_of(rewards, function):
    return [a for group in rewards.tolist() for a in function(group)]


def rloo(new, old, rewards, mask):
    others = [(sum(g) - r) / (len(g) - 1) for g in rewards.tolist() for r in g]
    rest = [r - b for r, b in zip(rewards.flatten().tolist(), others)]
    return sum((a * log).sum() for a, (log, _) in zip(rest, responses(new, old, mask))) / mask.sum()


def token_ppo(function, low, high, denominator):
    def objective(new, old, rewards, mask):
        terms = zip(advantages_of(rewards, function), responses(new, old, mask))
        return sum(ppo(d.exp(), a, low, high).sum() for a, (_, d) in terms) / denominator(mask)
    return objective


def gspo(new, old, rewards, mask):
    terms = zip(advantages_of(rewards, standardised), responses(new, old, mask))
    return sum(ppo(d.mean().exp(), a, 3e-4, 4e-4) for a, (_, d) in terms) / len(new)


def gmpo(new, old, rewards, mask):
    terms = zip(advantages_of(rewards, standardised), responses(new, old, mask))
    return sum(a * (d.clamp(max=0.4) if a > 0 else d.clamp(min=-0.4)).mean().exp() for a, (_, d) in terms) / len(new)


def weighted(function, weight, denominator):
    """Σ sg(W)·A·log π: weight(a, d) → W from the advantage and the response's detached log-ratios."""
    def objective(new, old, rewards, mask):
        terms = zip(advantages_of(rewards, function), responses(new, old, mask))
        return sum((weight(a, d.detach()) * a * log).sum() for a, (log, d) in terms) / denominator(mask)
    return objective


def whitened(new, old, rewards, mask):
    flat = standardised(rewards.flatten().tolist())
    return sum(ppo(d.exp(), a, 0.2, 0.2).sum() for a, (_, d) in zip(flat, responses(new, old, mask))) / mask.sum()


def tic(new, old, rewards, mask):
    rates = (rewards / mask.sum(1).view_as(rewards)).tolist()
    terms = zip([a for group in rates for a in standardised(group)], responses(new, old, mask))
    return sum(min(math.exp(d.detach().sum()), 1.2) * a * log.sum() for a, (log, d) in terms) / len(new)


def tokens(mask):
    return mask.sum()


OBJECTIVES = {
    "rloo": rloo,
    "dr-grpo": token_ppo(centred, 0.2, 0.2, lambda mask: len(mask) * BUDGET),
    "gspo": gspo,
    "cispo": weighted(standardised, lambda a, d: d.exp().clamp(0, 1.2), tokens),
    "gmpo": gmpo,
    "tis": weighted(centred, lambda a, d: d.exp().clamp(max=2), tokens),
    "topr": weighted(centred, lambda a, d: 1.0 if a >= 0 else min(math.exp(d.sum()), 1.0), len),
    "reinforce-plus-plus": whitened,
    "ngrpo": token_ppo(lambda group: standardised([*group, 1.0], ddof=1)[:-1], 0.16, 0.24, tokens),
    "tic-grpo": tic,
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_row_has_the_gradient_of_its_papers_objective(name, seed):
    new, old, rewards, mask = batch(seed, spread=(0.5, 4e-4)[seed % 2] if name == "gspo" else 0.5)
    leaf = new.clone().requires_grad_()
    expected = torch.autograd.grad(-OBJECTIVES[name](leaf, old, rewards, mask), leaf)[0]
    assert torch.allclose(row_gradient(name, new, old, rewards, mask), expected, atol=1e-13, rtol=1e-9)
    assert (expected[mask] != 0).any() and not (expected[~mask] != 0).any()


# -------------------------------------------------------------------------------------------------- worked numbers


@pytest.mark.parametrize("name, right, wrong", [
    ("rloo", 0.857143, -0.285714),  # 8/7 · (1 − .25), 8/7 · (−.25)
    ("dr-grpo", 0.75, -0.25),
    ("gspo", 1.732047, -0.577349),  # √3 and −1/√3, less 1e-6 in the denominator
    # with the virtual 1 the nine rewards have mean 1/3 and ddof-1 std 1/2: (2/3)/.5 and (−1/3)/.5
    ("ngrpo", 4 / 3, -2 / 3),
])
def test_advantages_of_two_right_in_eight(name, right, wrong):
    advantages = lm.shaped_advantages(GROUP, torch.ones(1, 8), algorithm=lm.ALGORITHMS[name])
    assert advantages[0].tolist() == pytest.approx([right] * 2 + [wrong] * 6, abs=3e-6)


def test_ngrpo_learns_from_an_all_wrong_group():
    advantages = lm.shaped_advantages(torch.zeros(1, 8).double(), torch.ones(1, 8), algorithm=lm.ALGORITHMS["ngrpo"])
    assert advantages[0].tolist() == pytest.approx([-1 / math.sqrt(9)] * 8, abs=2e-6)


def weight_of(row, log_ratio, advantage, **options):
    """W·M of each token of one response, from the gradient: −∂L/∂log π · (number of tokens) / A under a token mean."""
    leaf = float64(log_ratio).requires_grad_()
    row = dataclasses.replace(lm.find_algorithm(row), aggregation="token-mean")
    mask = torch.ones(1, len(log_ratio), dtype=torch.bool)
    loss, _ = lm.policy_loss(leaf, torch.zeros(1, len(log_ratio)).double(), float64(advantage), mask, algorithm=row, **options)
    return (-torch.autograd.grad(loss, leaf)[0][0] * len(log_ratio) / advantage).tolist()


def test_gspo_weighs_by_the_geometric_mean():
    assert weight_of("gspo", [.1, -.2, .3, 0], 1.0, eps_high=0.1) == pytest.approx([1.0512711] * 4, abs=1e-7)


@pytest.mark.parametrize("advantage, weight, kept", [(1.0, 1.0, [0, 1, 1]), (-1.0, 1.1051709, [1, 0, 1])])
def test_gmpo_caps_on_the_side_of_the_advantage(advantage, weight, kept):
    # A > 0: (.4 − .5 + .1)/3 = 0; A < 0: (.6 − .4 + .1)/3 = .1; a capped token has no gradient
    assert weight_of("gmpo", [.6, -.5, .1], advantage) == pytest.approx([weight * k for k in kept], abs=1e-7)


def test_cispo_keeps_a_gradient_where_ppo_has_none():
    ratios = [math.log(r) for r in (0.5, 1.1, 1.5, 3.0)]
    assert weight_of("cispo", ratios, 1.0) == pytest.approx([0.5, 1.1, 1.2, 1.2])
    assert weight_of("grpo", ratios, 1.0) == pytest.approx([0.5, 1.1, 0.0, 0.0])


def test_tis_and_topr_cap_the_weight():
    ratios = [math.log(r) for r in (0.5, 1.5, 3.0)]
    assert weight_of("tis", ratios, 1.0) == pytest.approx([0.5, 1.5, 2.0])
    for ratio, right, wrong in ((0.5, 1.0, 0.5), (3.0, 1.0, 1.0)):
        assert weight_of("topr", [math.log(ratio)], 1.0) == pytest.approx([right])
        assert weight_of("topr", [math.log(ratio)], -1.0) == pytest.approx([wrong])


def test_tic_estimates_the_policy_gradient_and_token_ratios_do_not():
    theta = float64(0.5, -0.3, 0.8).requires_grad_()
    answers = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])  # each with probability 1/4 under the sampler
    logits = torch.stack([theta[0].expand(4), theta[1 + answers[:, 0]]], 1)
    logprobs = torch.nn.functional.logsigmoid((2 * answers - 1) * logits)
    old, mask = torch.full((4, 2), math.log(0.5), dtype=torch.float64), torch.ones(4, 2, dtype=torch.bool)

    def ascent(row):
        row = dataclasses.replace(lm.ALGORITHMS[row], aggregation="seq-mean-token-sum", weight_cap=math.inf)
        loss, _ = lm.policy_loss(logprobs, old, float64(-0.25, -0.25, -0.25, 0.75), mask, algorithm=row)
        return torch.autograd.grad(-loss, theta, retain_graph=True)[0].tolist()

    success = torch.sigmoid(theta[0]) * torch.sigmoid(theta[2])
    exact = torch.autograd.grad(success, theta)[0].tolist()
    assert exact == pytest.approx([0.1621466, 0, 0.1331501], abs=1e-7)
    assert ascent("tic-grpo") == pytest.approx(exact, abs=1e-15)
    assert ascent("reinforce-is") == pytest.approx([0.1175019, 0, 0.1069549], abs=1e-7)
    assert ascent("reinforce") == pytest.approx([0.125, -0.0093053, 0.1012532], abs=1e-7)


@pytest.mark.parametrize("aggregation, value", [("token-mean", -1 / 6), ("seq-mean-token-mean", 0.0),
                                                ("seq-mean-token-sum", -0.5), ("constant", -0.0625)])
def test_aggregation_of_lengths_two_and_four(aggregation, value):
    mask = torch.arange(4) < torch.tensor([[2], [4]])
    logprobs = torch.full((2, 4), -0.5).double()
    row = lm.Algorithm(aggregation=aggregation)
    loss, _ = lm.policy_loss(logprobs, logprobs, float64(1, -1), mask, algorithm=row, constant=8)
    assert loss.item() == pytest.approx(value, abs=1e-15)


def test_a_constant_budget_must_be_named():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="constant"):
        lm.policy_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), mask, algorithm="dr-grpo")


# ------------------------------------------------------------- every row reduces to its parent without its ingredient


def replaced(name, **fields):
    return dataclasses.replace(lm.ALGORITHMS[name], **fields)


@pytest.mark.parametrize("row, parent, scale", [
    (replaced("rloo"), "reinforce", 4 / 3),
    (replaced("cispo", weight_cap=math.inf), replaced("reinforce-is", std_normalize=True), 1),
    (replaced("cispo", weight_cap=math.inf, clip="one_side"), "grpo", 1),
    (replaced("tis", weight_cap=math.inf), "reinforce-is", 1),
    (replaced("gspo", std_normalize=False), "rec-gspo-is", 1),
    (replaced("ngrpo", baseline="group", std_normalize=True, eps_low=0.2, eps_high=0.2), "grpo", 1),
    (replaced("dr-grpo", aggregation="token-mean"), "rec-oneside-is", 1),
])
def test_without_its_ingredient_a_row_is_its_parent(row, parent, scale):
    data = batch(5)
    assert torch.allclose(row_gradient(row, *data), scale * row_gradient(parent, *data), atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("row", [replaced("gspo", eps_low=0.2, eps_high=0.2), "gmpo",
                                 replaced("tic-grpo", weight_cap=math.inf)])
def test_with_one_token_a_response_its_mean_and_its_product_are_the_token(row):
    """GSPO and GMPO are then GRPO, with GMPO's own range; TIC-GRPO is REINFORCE with importance sampling."""
    data, row = batch(6, width=1, spread=0.3), lm.find_algorithm(row)
    parent = replaced("grpo", eps_low=row.eps_low, eps_high=row.eps_high, clip=row.clip)
    assert torch.allclose(row_gradient(row, *data), row_gradient(parent, *data), atol=1e-14)


def test_dr_grpo_with_full_responses_is_rec_oneside_is():
    new, old, rewards, mask = batch(7, width=BUDGET)
    data = new, old, rewards, torch.ones_like(mask)
    assert torch.allclose(row_gradient("dr-grpo", *data), row_gradient("rec-oneside-is", *data))


def test_reinforce_plus_plus_with_one_group_is_grpo():
    data = batch(8, prompts=2, group=6)
    data = tuple(part[: 6 if len(part) == 12 else 1] for part in data)
    assert torch.allclose(row_gradient("reinforce-plus-plus", *data), row_gradient("grpo", *data), atol=1e-14)


@pytest.mark.parametrize("name, parent", [
    ("topr", "reinforce"), ("tis", "reinforce"), ("dr-grpo", "reinforce"), ("cispo", replaced("reinforce", std_normalize=True)),
    ("gmpo", "gspo"), ("gspo", "gmpo"), ("ngrpo", "ngrpo"), ("reinforce-plus-plus", replaced("reinforce", baseline="batch")),
])
def test_on_fresh_data_masks_and_weights_do_nothing(name, parent):
    """ρ = 1 everywhere: what is left is the row's A and N."""
    _, old, rewards, mask = batch(9)
    row, parent = lm.ALGORITHMS[name], lm.find_algorithm(parent)
    plain = dataclasses.replace(parent, clip="none", weight="one", aggregation=row.aggregation)
    assert torch.allclose(row_gradient(row, old, old, rewards, mask), row_gradient(plain, old, old, rewards, mask), atol=1e-14)


# ------------------------------------------------------------------------------------- rows that need more than a loss


@pytest.fixture(scope="module")
def tiny(tiny_run):
    """(model, tokenizer, task, config) of the smallest model that is sometimes right."""
    folder, path, flags = tiny_run
    config = lm.parse_arguments(flags)
    model, tokenizer = lm.load_model(str(folder), device="cpu")
    return model, tokenizer, lm.load_task(config), config


@pytest.fixture(scope="module")
def quick():
    """Without what takes longer than a tiny training run: pictures and waiting for the disk. Both have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plot_run", "plot_comparison", "flush_to_disk"):
            patch.setattr(lm, name, lambda *_, **__: None)
        yield


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def recomputed(model, part, config):
    """Log-probabilities of the rollout's own tokens under its own, plain prompts."""
    with torch.no_grad():
        return lm.token_logprobs(model, part.prompt, part.tokens, prompt_mask=part.prompt_mask, mask=part.mask,
                                 temperature=config.temperature)[0]


@pytest.mark.parametrize("name", ["dapo", "sgpo", "aepo"])
@pytest.mark.parametrize("seed", range(3))
def test_their_losses_are_grpos_with_dapos_range(name, seed):
    new, old, rewards, mask = batch(seed)
    leaf = new.clone().requires_grad_()
    objective = token_ppo(standardised, 0.2, 0.28 if name == "dapo" else 0.2, tokens)(leaf, old, rewards, mask)
    expected = torch.autograd.grad(-objective, leaf)[0]
    assert torch.allclose(row_gradient(name, new, old, rewards, mask), expected, atol=1e-13, rtol=1e-9)


# Noise


def corrected(rewards, rates, name="noise-corrected-grpo"):
    return lm.shaped_advantages(rewards, torch.ones_like(rewards), algorithm=lm.ALGORITHMS[name], noise_rates=rates)


def test_noise_correction_in_numbers():
    # r̂ is (1 − .2)/.7 or −.2/.7; their mean over the group is (.25 − .2)/.7: 0.75/.7 and −.25/.7 are left
    assert corrected(GROUP, (0.2, 0.1))[0].tolist() == pytest.approx([1.0714286] * 2 + [-0.3571429] * 6, abs=1e-7)
    assert torch.equal(corrected(GROUP, (0.0, 0.0)), corrected(GROUP, (0.0, 0.0), "rec-oneside-is"))


@pytest.mark.parametrize("rates", [(0.2, 0.1), (0.4, 0.0)])
def test_against_a_group_mean_the_correction_is_a_larger_step_and_nothing_else(rates):
    """ρ⁺ goes with the mean; what is left is a factor 1/(1 − ρ⁺ − ρ⁻), which an optimizer like Adam does not see."""
    raw = corrected(GROUP, rates, "rec-oneside-is")
    assert torch.allclose(corrected(GROUP, rates), raw / (1 - sum(rates)), atol=1e-14)


@pytest.mark.parametrize("rates", [(0.2, 0.1), (0.0, 0.4), (0.45, 0.5)])
def test_the_corrected_reward_is_unbiased_and_a_standard_deviation_undoes_it(rates):
    known = {"false_positive_rate": rates[0], "false_negative_rate": rates[1]}
    passed, failed = lm.noise_corrected_rewards(float64(1, 0), **known).tolist()
    assert rates[0] * passed + (1 - rates[0]) * failed == pytest.approx(0)  # of a wrong answer
    assert (1 - rates[1]) * passed + rates[1] * failed == pytest.approx(1)  # of a right one
    fixed, raw = (lm.group_advantages(rewards, std_normalize=True, eps=0)
                  for rewards in (lm.noise_corrected_rewards(GROUP, **known), GROUP))
    assert torch.allclose(fixed, raw, atol=1e-14)


def test_verdicts_are_flipped_at_their_rates():
    truth = torch.tensor([0.0, 1.0]).repeat_interleave(20_000)
    noisy = lm.noisy_verdicts(truth, (0.2, 0.1), generator=generator())
    flipped = (noisy != truth).double().view(2, -1).mean(1)
    assert flipped.tolist() == pytest.approx([0.2, 0.1], abs=0.012)  # 4 standard errors: 4·√(.2·.8/20000) = .0113
    assert torch.equal(lm.noisy_verdicts(truth, (0.0, 0.0), generator=generator()), truth)


def test_noise_reaches_the_trainer_but_not_the_evaluation(tiny):
    model, tokenizer, task, config = tiny
    noisy = dataclasses.replace(config, reward_noise="0.5,0.4")
    row = lm.ALGORITHMS["noise-corrected-grpo"]
    clean, seen = (lm.training_batch(model, tokenizer, task, 1, c, row=row, version=0, generator=generator()).rewards
                   for c in (config, noisy))
    assert not torch.equal(clean, seen)
    assert lm.evaluate(model, tokenizer, task, noisy) == lm.evaluate(model, tokenizer, task, config)


def test_calibration_finds_the_rates(tiny_run, capsys):
    lm.main([*tiny_run[2], "--reward-noise", "0.3,0.15", "--calibrate", "3000", "--prompts-per-step", "100"])
    printed = capsys.readouterr().out
    low_high = [tuple(map(float, line.split("95 % ")[1][:-1].split("–"))) for line in printed.splitlines()[:2]]
    for (low, high), rate in zip(low_high, (0.3, 0.15)):
        assert low < rate < high and high - low < 0.1
    rates = lm.rate_pair(printed.split("--noise-rates ")[1].strip(), flag="")
    assert rates == pytest.approx((0.3, 0.15), abs=0.05)


def always(question, response, answer):
    return 1.0


def test_calibration_judges_a_verifier_of_the_users(tiny_run, capsys):
    lm.main([*tiny_run[2], "--reward", f"{__name__}:always", "--calibrate", "64"])
    printed = capsys.readouterr().out
    assert "passed: " in printed and "= 1.000 (95 %" in printed.splitlines()[0] and "= 0.000 (95 %" in printed.splitlines()[1]


@pytest.mark.parametrize("flags, message", [
    (["--reward-noise", "0.2"], "two numbers"), (["--reward-noise", "0.6,0.4"], "less than 1"),
    (["--noise-rates=-0.1,0.2"], "0 or more"), (["--noise-rates", "nan,0"], "0 or more"),
    (["--algorithm", "sgpo"], "--step-reward"), (["--algorithm", "sgpo", "--step-reward", "math:nothing"], "nothing"),
    (["--algorithm", "icpo", "--group-size", "2"], "--group-size 3"), (["--refills", "-1"], "--refills"),
    (["--weight-cap", "0"], "--weight-cap"), (["--entropy-target", "-1"], "--entropy-target"),
])
def test_mistakes_are_one_line(tiny_run, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        lm.main([*tiny_run[2], *flags])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and message in printed and printed.count("\n") == 1


# SGPO


@pytest.mark.parametrize("text, answer, share", [
    ("123", "123", 1), ("124", "123", 2 / 3), ("223", "123", 0), ("1234", "123", 3 / 4), ("12", "123", 2 / 3), ("", "123", 0),
    ("no idea", "7", 0), ("so it is 99", "98", 1 / 2),
])
def test_leading_digits(text, answer, share):
    assert lm.leading_digits("", text, answer) == pytest.approx(share)


def all_wrong_and_mixed(step_reward=None):
    """Training rewards of SGPO for two groups of three answers to 12 + 3 (15): one all wrong, one with a right answer."""
    texts, asked = ["25", "14", "1", "15", "14", "99"], [lm.Example("12+3", "15")] * 6
    config = lm.Config(step_reward=step_reward)
    rewards = torch.tensor([[0, 0, 0], [1, 0, 0]], dtype=torch.float64)
    return lm.training_rewards(rewards, asked, texts, torch.ones(6), config, row=lm.ALGORITHMS["sgpo"], generator=None)


def test_sgpo_grades_an_all_wrong_group_only():
    graded = all_wrong_and_mixed()
    assert graded[0].tolist() == pytest.approx([0.0758582, 0.5, 0.5], abs=1e-7)  # RTS 0, ½, ½ → σ(5·(RTS − ½))
    assert graded[1].tolist() == [1, 0, 0]
    assert lm.graded_reward(float64(1)).item() == pytest.approx(0.9241418, abs=1e-7)


def step_judge(question, response, answer):
    return {"25": 1.0, "14": 0.5, "1": 0.0}[response]


def bad_judge(question, response, answer):
    return 1.5


def test_sgpo_takes_a_judge_of_the_users():
    assert all_wrong_and_mixed(f"{__name__}:step_judge")[0].tolist() == pytest.approx([0.9241418, 0.5, 0.0758582], abs=1e-7)
    with pytest.raises(ValueError, match="share of right leading steps"):
        all_wrong_and_mixed(f"{__name__}:bad_judge")


# DAPO


def test_overlong_penalty_in_numbers():
    lengths = float64(16000, 16384, 18432, 20480)
    assert lm.overlong_penalty(lengths, max_length=20480, cache=4096).tolist() == [0, 0, -0.5, -1]
    rewards, config = torch.zeros(2, 2).double(), lm.Config(max_new_tokens=20480)
    row = lm.ALGORITHMS["dapo"]
    seen = lm.training_rewards(rewards, [], [], lengths, config, row=row, generator=None)
    assert seen.flatten().tolist() == pytest.approx([0, 0, -0.5, -1])  # its Lc is a fifth of the budget: 4096
    row = dataclasses.replace(row, overlong_share=0.0)
    assert torch.equal(lm.training_rewards(rewards, [], [], lengths, config, row=row, generator=None), rewards)


def dapo_batch(tiny, refills, **changes):
    model, tokenizer, task, config = tiny
    config = dataclasses.replace(config, refills=refills, prompts_per_step=12, group_size=3, **changes)
    row = dataclasses.replace(lm.ALGORITHMS["dapo"], overlong_share=0.0)
    calls, collect = [], lm.collect

    def counted(model, tokenizer, examples, *args, **options):
        calls.append([e.question for e in examples])
        return collect(model, tokenizer, examples, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "collect", counted)
        return lm.training_batch(model, tokenizer, task, 1, config, row=row, version=0, generator=generator(1)), calls, config


@pytest.mark.filterwarnings("ignore:groups without a contrast")
def test_dynamic_sampling_replaces_flat_groups_and_nothing_else(tiny):
    flat = [int((~lm.informative_groups(dapo_batch(tiny, refills)[0].rewards)).sum()) for refills in (0, 1, 30)]
    assert flat[0] > flat[1] >= flat[2] == 0
    first, (questions,), config = dapo_batch(tiny, 0)
    filled, calls, _ = dapo_batch(tiny, 1)
    keep = lm.informative_groups(first.rewards)
    assert [len(c) for c in calls] == [12, flat[0]]
    assert calls[1] != [q for q, k in zip(questions, keep) if not k] and calls[1] != questions[: flat[0]]
    kept = int(keep.sum())
    assert torch.equal(filled.rewards[:kept], first.rewards[keep]) and filled.rewards.shape == first.rewards.shape
    # rows, prompts, log-probabilities and rewards of the joined batch still belong together
    assert torch.allclose(recomputed(tiny[0], filled, config), filled.old_logprobs, atol=1e-5)
    texts = lm.decode(tiny[1], filled.tokens, filled.mask)
    assert filled.rewards.flatten().tolist() == [float(lm.is_correct(text, "1")) for text in texts]
    eos = ((filled.tokens == tiny[1].eos_token_id) & filled.mask).any(1)
    assert torch.equal(filled.truncated, ~eos)


def test_dynamic_sampling_is_bounded_and_says_so(tiny):
    with pytest.warns(UserWarning, match="groups without a contrast remain after --refills 3"):
        filled, calls, _ = dapo_batch(tiny, 3, reward=f"{__name__}:never")
    assert len(calls) == 4 and len(filled.rewards) == 12


def never(question, response, answer):
    return 0.0


def test_joined_batches_of_unequal_widths_keep_prompts_left_and_responses_right():
    def rollout(prompts, width, length, value):
        rows = prompts * 2
        return lm.Rollout(torch.full((prompts, width), value), torch.ones(prompts, width, dtype=torch.bool),
                          torch.full((rows, length), value), torch.ones(rows, length, dtype=torch.bool),
                          torch.full((rows, length), -1.0), torch.full((prompts, 2), float(value)),
                          torch.zeros(rows, dtype=torch.bool), 5, [], None, 7)

    joined = lm.join(rollout(2, 1, 3, 1), torch.tensor([False, True]), rollout(1, 2, 1, 2))
    assert joined.prompt.tolist() == [[0, 1], [2, 2]] and joined.prompt_mask.tolist() == [[False, True], [True, True]]
    assert joined.tokens.tolist() == [[1, 1, 1]] * 2 + [[2, 0, 0]] * 2
    assert joined.mask.tolist() == [[True] * 3] * 2 + [[True, False, False]] * 2
    assert joined.rewards.tolist() == [[1, 1], [2, 2]] and (joined.version, joined.number, len(joined.truncated)) == (5, 7, 4)


# AEPO


class Constant(torch.nn.Module):
    """A stand-in for token_logprobs' model: one distribution over tokens, whatever the context."""

    def __init__(self, probs):
        super().__init__()
        self.logits = torch.nn.Parameter(float64(*probs).log())


@pytest.mark.parametrize("target, moved", [(2.0, 0.0255595), (0.1, -0.0333072)])
def test_aepo_steers_the_entropy_up_and_down(monkeypatch, target, moved):
    """π = [.7, .2, .1] with the three samples weighed by their probability at the temperature that the row asks for."""
    model = Constant([0.7, 0.2, 0.1])
    row = dataclasses.replace(lm.ALGORITHMS["aepo"], entropy_target=target, entropy_weight=1.0)
    asked = {}

    def sample(_, prompt, prompt_mask, *, group_size, temperature):
        asked["temperature"] = temperature
        return torch.tensor([[0], [1], [2]]), torch.ones(3, 1, dtype=torch.bool), None

    def token_logprobs(model, prompt, tokens, **_):  # three rows, mean over 3: times 3·π_T makes the exact expectation
        weights = 3 * torch.softmax(model.logits.detach() / asked["temperature"], -1)
        return (weights * model.logits.log_softmax(-1))[:, None], None

    monkeypatch.setattr(lm, "token_logprobs", token_logprobs)
    part = lm.Rollout(*[torch.zeros(1, 1)] * 7, 0, [])
    entropy = torch.distributions.Categorical(logits=model.logits).entropy()
    lm.steer_entropy(model, part, lm.Config(dtype="float32"), row=row, entropy=entropy.item(), sample=sample)
    assert asked["temperature"] == (1.2 if moved > 0 else 0.8)
    step = -model.logits.grad
    assert (torch.autograd.grad(entropy, model.logits)[0] * step).sum().item() == pytest.approx(moved, abs=1e-7)


def test_aepos_gradient_reaches_every_weight_in_bfloat16_too(tiny):
    """Autocast may keep weights that it has cast; those of the sampling, which has no gradients, must not serve the training."""
    model, tokenizer, task, config = tiny
    config = dataclasses.replace(config, dtype="bfloat16")
    part = lm.training_batch(model, tokenizer, task, 1, config, row=lm.ALGORITHMS["grpo"], version=0, generator=generator())
    sample = lm.functools.partial(lm.generate, max_new_tokens=config.max_new_tokens, eos_ids={1}, pad_id=0, generator=generator())
    gradients = {}
    for dtype in ("float32", "bfloat16"):
        copy = lm.copy.deepcopy(model)
        lm.steer_entropy(copy, part, dataclasses.replace(config, dtype=dtype), row=lm.ALGORITHMS["aepo"], entropy=0.0, sample=sample)
        gradients[dtype] = {name: p.grad for name, p in copy.named_parameters()}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients["bfloat16"].values())


def test_what_is_sampled_can_be_trained_on(tiny):
    """Sampling runs in inference mode, whose tensors autograd refuses; what it returns are ordinary tensors."""
    model, tokenizer, task, config = tiny
    part = lm.training_batch(model, tokenizer, task, 1, config, row=lm.ALGORITHMS["grpo"], version=0, generator=generator())
    assert not any(tensor.is_inference() for tensor in (part.tokens, part.mask, part.old_logprobs, part.rewards, part.prompt))


def test_aepo_moves_the_entropy_of_a_model_towards_its_target(tiny_run, quick, tmp_path):
    ends = {}
    for target in ("3", "0.01"):  # no answer is ever right, so that nothing else moves the policy
        lm.main([*tiny_run[2], "--algorithm", "aepo", "--entropy-target", target, "--steps", "20", "--prompts-per-step", "32",
                 "--learning-rate", "0.001", "--reward", f"{__name__}:never", "--out", str(tmp_path / target)])
        entropy = [line["entropy"] for line in lm.read_metrics(tmp_path / target) if "entropy" in line]
        ends[target] = entropy[-1] - entropy[0]
    assert ends["3"] > 0.03 and ends["0.01"] < -0.5  # from 1.84 nats, of at most log 7 = 1.95


def test_without_a_target_aepo_is_grpo(tiny):
    model, tokenizer, task, config = tiny
    weights = {}
    part = lm.training_batch(model, tokenizer, task, 1, config, row=lm.ALGORITHMS["grpo"], version=0, generator=generator())
    for name in ("grpo", "aepo"):
        copy = lm.copy.deepcopy(model)
        row = dataclasses.replace(lm.ALGORITHMS[name], entropy_target=None)
        lm.train_step(copy, torch.optim.SGD(copy.parameters(), 0.1), part, config, algorithm=row, generator=None)
        weights[name] = torch.cat([p.detach().flatten() for p in copy.parameters()])
    assert torch.equal(weights["grpo"], weights["aepo"])
    assert not torch.equal(weights["grpo"], torch.cat([p.detach().flatten() for p in model.parameters()]))


# ICPO


def test_icpo_pools_the_hinted_response_with_a_decaying_bonus():
    row, rewards = lm.ALGORITHMS["icpo"], float64(1, 0, 0, 0, 0, 0, 0, 1)[None]
    first = lm.shaped_advantages(rewards, torch.ones(1, 8), algorithm=row, number=1)[0].tolist()
    assert first == pytest.approx([0.840026] + [-0.504015] * 6 + [2.184067], abs=2e-6)  # rewards 1, 0 × 6 and 2
    late = lm.shaped_advantages(rewards, torch.ones(1, 8), algorithm=row, number=401)[0].tolist()
    assert late == pytest.approx(standardised(rewards[0].tolist(), ddof=1))  # no bonus any more
    wrong = lm.shaped_advantages(float64(1, 0, 0)[None], torch.ones(1, 3), algorithm=row, number=1)[0].tolist()
    assert wrong == pytest.approx(standardised([1, 0, 0], ddof=1))  # nor for a wrong one


def icpo_objective(new, old, rewards, mask, hinted, smoothing):
    pooled = advantages_of(rewards, lambda group: standardised([*group[:-1], 2 * group[-1]], ddof=1))
    total = 0
    for a, (log, d), special in zip(pooled, responses(new, old, mask), hinted.tolist()):
        shrunk = [p / (p + smoothing) for p in log.detach().exp()]
        total = total + (sum(f * a * l for f, l in zip(shrunk, log)) if special else ppo(d.exp(), a, 0.2, 0.2).sum())
    return total / mask.sum()


@pytest.mark.parametrize("smoothing", [0.1, 1e-9])
@pytest.mark.parametrize("seed", range(3))
def test_icpo_has_the_gradient_of_its_objective(seed, smoothing):
    new, old, rewards, mask = batch(seed)
    hinted, row = torch.arange(12) % 4 == 3, replaced("icpo", hint_smoothing=smoothing)
    advantages = lm.shaped_advantages(rewards, mask, algorithm=row, number=1).flatten()
    leaf = new.clone().requires_grad_()
    loss, metrics = lm.policy_loss(leaf, old, advantages, mask, algorithm=row, hinted=hinted)
    ours, = torch.autograd.grad(loss, leaf)
    leaf = new.clone().requires_grad_()
    expected, = torch.autograd.grad(-icpo_objective(leaf, old, rewards, mask, hinted, smoothing), leaf)
    assert torch.allclose(ours, expected, atol=1e-13, rtol=1e-9)
    if smoothing < 0.1:  # λ → 0: the hinted response takes part with weight 1
        plain = lm.policy_loss(new, old, advantages, mask & hinted[:, None], algorithm="reinforce")[0]
        alone = lm.policy_loss(new, old, advantages, mask & hinted[:, None], algorithm=row, hinted=hinted)[0]
        assert alone.item() == pytest.approx(plain.item(), abs=1e-7)


def test_the_hinted_response_is_sampled_with_a_worked_example_and_scored_without(tiny):
    model, tokenizer, task, config = tiny
    worked = [lm.Example("1 0", "1")]
    examples, options = task.train[:5], {"version": 0, "row": lm.ALGORITHMS["icpo"]}
    part = lm.collect(model, tokenizer, examples, config, generator=generator(3), worked=worked, **options)
    assert part.hinted.view(5, 4).tolist() == [[False, False, False, True]] * 5
    assert torch.allclose(recomputed(model, part, config), part.old_logprobs, atol=1e-5)  # plain prompts, hinted rows too
    # the plain rows, then the hinted ones, drawn by the same generator from the prompts that they should see
    again, shared = generator(3), {"temperature": 1.0, "max_new_tokens": config.max_new_tokens, "eos_ids": {1}, "pad_id": 0}
    plain = lm.generate(model, part.prompt, part.prompt_mask, group_size=3, generator=again, **shared)
    shown, shown_mask = lm.encode_prompts(tokenizer, examples, device="cpu", worked=worked)
    hint = lm.generate(model, shown, shown_mask, group_size=1, generator=again, **shared)

    def ids(tokens, mask):
        return [row[keep].tolist() for row, keep in zip(tokens, mask)]

    assert ids(part.tokens[~part.hinted], part.mask[~part.hinted]) == ids(*plain[:2])
    assert ids(part.tokens[part.hinted], part.mask[part.hinted]) == ids(*hint[:2])
    texts = lm.decode(tokenizer, part.tokens, part.mask)
    assert part.rewards.flatten().tolist() == [float(lm.is_correct(text, "1")) for text in texts]


def test_a_worked_example_that_does_not_fit_is_said(tiny):
    model, tokenizer, task, config = tiny
    long = [lm.Example("1" * 130, "1")]
    with pytest.raises(lm.UserError, match="worked example .* leaves no room"):
        lm.collect(model, tokenizer, task.train[:2], config, version=0, generator=generator(), worked=long)


def test_worked_examples_stand_before_the_question_and_never_give_it_away(tiny):
    tokenizer = tiny[1]
    asked, other = lm.Example("10+1", "11", "10+1="), lm.Example("1+1", "10", "1+1=")
    ids, mask = lm.encode_prompts(tokenizer, [asked], device="cpu", worked=[asked, other])
    assert ids[0].tolist() == tokenizer("1+1=10;10+1=")["input_ids"] and mask.all()
    chatty = lm.copy.deepcopy(tokenizer)
    chatty.chat_template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    ids, _ = lm.encode_prompts(chatty, [asked], device="cpu", worked=[other])
    assert ids[0].tolist() == tokenizer("u:1+1|a:10|u:10+1|")["input_ids"]


# EP-GRPO, our reading


def process(advantages, rewards, log_ratio, entropy, mask, weight=0.1):
    return lm.process_advantages(advantages, rewards, log_ratio, entropy, mask, process_weight=weight)


def ep_batch(seed):
    new, old, rewards, mask = batch(seed)
    entropy = torch.rand(new.shape, generator=generator(seed), dtype=torch.float64) * 2
    advantages = lm.group_advantages(rewards, std_normalize=True)
    return advantages, rewards, new - old, entropy, mask


@pytest.mark.parametrize("seed", range(4))
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
    assert torch.equal(longer[:, :-2], shaped) and not longer[:, -2:].any()
    # The first token becomes two, with half of its entropy each and the same divergence: a response's total, the mean over its
    # tokens, stays. The floor of 1e-6 nats a token is what little changes.
    split = [torch.cat([part[:, :1] / share, part[:, :1] / share, part[:, 1:]], 1)
             for part, share in ((log_ratio, 1), (entropy, 2))]
    twice = torch.cat([mask[:, :1], mask], 1)
    cut = process(advantages, rewards, *split, twice)
    assert torch.allclose(cut.sum(1) / twice.sum(1), shaped.sum(1) / mask.sum(1), atol=1e-5)


def test_ep_grpo_without_its_ingredients_is_grpo_as_published():
    advantages, rewards, log_ratio, entropy, mask = ep_batch(1)
    even = process(advantages, rewards, log_ratio, torch.ones_like(entropy), mask, weight=0.0)
    assert torch.allclose(even[mask], advantages.reshape(-1, 1).expand(mask.shape)[mask], atol=1e-12)
    assert replaced("ep-grpo", process_weight=None, aggregation="token-mean", source="") == replaced("grpo", source="")


def test_the_training_step_uses_the_process_signal(tiny):
    model, tokenizer, task, config = tiny
    row = lm.ALGORITHMS["ep-grpo"]
    part = lm.training_batch(model, tokenizer, task, 1, config, row=row, version=0, generator=generator())
    part.rewards = torch.zeros_like(part.rewards)  # every group flat: GRPO's gradient is 0
    for name, moves in (("grpo", False), ("ep-grpo", True)):
        copy = lm.copy.deepcopy(model)
        optimizer = torch.optim.SGD(copy.parameters(), 0.1)
        norm = lm.train_step(copy, optimizer, part, config, algorithm=lm.ALGORITHMS[name], generator=None)["grad_norm"]
        assert (norm > 1e-3) == moves


# ---------------------------------------------------------------------------------------- every row, from the command line


@pytest.fixture(scope="module")
def family_runs(tiny_run, quick, tmp_path_factory):
    """One process trains every row for 3 steps on stale data."""
    out = tmp_path_factory.mktemp("family")
    lm.main([*tiny_run[2], "--compare", ",".join(lm.ALGORITHMS), "--steps", "3", "--sync-interval", "2", "--out", str(out),
             "--step-reward", f"{__name__}:half", "--reward-noise", "0.2,0.1", "--learning-rate", "0.02"])
    return out


def half(question, response, answer):
    return 0.5 * (len(response) > 1)


@pytest.mark.parametrize("name", lm.ALGORITHMS)
def test_every_row_trains_from_the_command_line(family_runs, tiny_run, name):
    from safetensors.torch import load_file

    history = lm.read_metrics(family_runs / name)
    assert [line["step"] for line in history] == [0, 1, 2, 3] and history[2]["staleness"] == 1
    assert all(math.isfinite(value) for line in history for value in line.values())
    assert any(line["grad_norm"] > 0 for line in history[1:])
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_run[0], family_runs / name / "model"))
    assert any(not torch.equal(before[key], after[key]) for key in before)


def spied(name, seen):
    """lm's function `name`, which also notes its arguments."""
    function = getattr(lm, name)

    def wrapper(*arguments, **options):
        seen.append((arguments, options))
        return function(*arguments, **options)

    return wrapper


@pytest.mark.parametrize("name, rates", [("icpo", None), ("dr-grpo", None), ("noise-corrected-grpo", None),
                                         ("noise-corrected-grpo", "0.3,0.05")])
def test_training_passes_on_what_a_row_needs(tiny_run, quick, tmp_path, name, rates):
    losses, advantages, hints = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        for function, seen in (("policy_loss", losses), ("shaped_advantages", advantages), ("hinted_group", hints)):
            patch.setattr(lm, function, spied(function, seen))
        lm.main([*tiny_run[2], "--algorithm", name, "--steps", "3", "--sync-offset", "1", "--micro-batch-tokens", "1",
                 "--out", str(tmp_path), "--reward-noise", "0.2,0.1", *(["--noise-rates", rates] if rates else [])])
    assert [options["number"] for _, options in advantages] == [1, 2, 3]  # ICPO's clock
    assert {options["noise_rates"] for _, options in advantages} == {(0.3, 0.05) if rates else (0.2, 0.1)}
    parts = [options for arguments, options in losses if "weights" in options]
    assert len(parts) == 12  # a micro-batch for each prompt
    if name == "icpo":
        assert len(hints) == 4 and all(len(arguments[5]) == 1 for arguments, _ in hints)  # a batch ahead; one worked example
        assert all(part["hinted"].tolist() == [False, False, False, True] for part in parts)
    else:
        assert not hints and all(part["hinted"] is None for part in parts)
    if name == "dr-grpo":  # 16 responses, each with a budget of 2 tokens
        assert all(set(part["weights"].unique().tolist()) <= {0.0, 1 / 32} for part in parts)


@pytest.mark.filterwarnings("ignore:groups without a contrast")
@pytest.mark.parametrize("name", ["dapo", "icpo", "aepo", "noise-corrected-grpo"])
def test_a_resumed_run_repeats_what_the_row_draws(tiny_run, quick, tmp_path, name):
    flags = [*tiny_run[2], "--algorithm", name, "--sync-interval", "2", "--sync-offset", "1", "--reward-noise", "0.2,0.1"]
    lm.main([*flags, "--steps", "4", "--out", str(tmp_path / "straight")])
    lm.main([*flags, "--steps", "2", "--out", str(tmp_path / "halves")])
    lm.main([*flags, "--steps", "4", "--out", str(tmp_path / "halves"), "--resume"])
    first, second = ([{k: v for k, v in line.items() if k != "tokens_per_second" and not k.startswith("eval")}
                      for line in lm.read_metrics(tmp_path / run)] for run in ("straight", "halves"))
    assert first == second


# ---------------------------------------------------------------------------------------------------------- the map


def test_the_map_is_the_gradient_weight():
    ratio = float64(0.5, 1.0, 1.25, 3.5)
    ones = torch.ones(4).double()
    assert lm.gradient_weight("reinforce", ratio, ones).tolist() == pytest.approx([1] * 4)
    assert lm.gradient_weight("reinforce-is", ratio, -ones).tolist() == pytest.approx([-0.5, -1, -1.25, -3.5])
    assert lm.gradient_weight("dapo", ratio, ones).tolist() == pytest.approx([0.5, 1, 1.25, 0])
    assert lm.gradient_weight("grpo", ratio, ones).tolist() == pytest.approx([0.5, 1, 0, 0])
    assert lm.gradient_weight("topr", ratio, -ones).tolist() == pytest.approx([-0.5, -1, -1, -1])
    assert lm.gradient_weight("red-weight", ratio, -ones).tolist() == pytest.approx([-math.exp(-1)] * 4)
    penalised = [1 - 0.2 * math.log(r) for r in ratio.tolist()]
    assert lm.gradient_weight("rep-opmd", ratio, ones).tolist() == pytest.approx(penalised)
    assert lm.gradient_weight("ep-grpo", ratio, -ones).tolist() == pytest.approx(
        [0] + [-r * (1 + 0.1 / (1 + r)) for r in (1.0, 1.25, 3.5)])


def test_the_map_is_drawn(tmp_path):
    lm.main(["--map", str(tmp_path)])
    assert (tmp_path / "06_family.png").stat().st_size > 20_000
