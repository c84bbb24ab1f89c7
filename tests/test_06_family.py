"""Lesson 06, the family: every friend's row against its own paper's objective, its worked numbers, what it reduces to.

The references are the surrogate objectives as their papers write them, such as PPO's minimum with its gradient through
the ratio: other algebra than the detached weights and masks of `policy_loss`, so equal gradients say that the row is
the method. What a row does beside its loss is in under_the_hood/test_friends.py.
"""

import dataclasses
import functools
import importlib
import math

import pytest
import torch
from under_the_hood import friends, pictures
from under_the_hood.runs import read_metrics

lm = importlib.import_module("06_full_llm_training")
torch.set_num_threads(1)

GROUP = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0]], dtype=torch.float64)
BUDGET = 7  # Dr. GRPO's constant


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def batch(seed, *, prompts=3, group=4, width=5, spread=0.5):
    """Random stale data: (logprobs, old_logprobs, rewards (P, K), mask); the first group mixed, the last all wrong."""
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
@pytest.mark.parametrize("seed", range(2))
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
    loss, _ = lm.policy_loss(leaf, torch.zeros(1, len(log_ratio)).double(), float64(advantage), mask, algorithm=row,
                             **options)
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
    ("topr", "reinforce"), ("tis", "reinforce"), ("dr-grpo", "reinforce"),
    ("cispo", replaced("reinforce", std_normalize=True)), ("gmpo", "gspo"), ("gspo", "gmpo"), ("ngrpo", "ngrpo"),
    ("reinforce-plus-plus", replaced("reinforce", baseline="batch", std_normalize=True)),
])
def test_on_fresh_data_masks_and_weights_do_nothing(name, parent):
    """ρ = 1 everywhere: what is left is the row's A and N."""
    _, old, rewards, mask = batch(9)
    row, parent = lm.ALGORITHMS[name], lm.find_algorithm(parent)
    plain = dataclasses.replace(parent, clip="none", weight="one", aggregation=row.aggregation)
    found, expected = (row_gradient(which, old, old, rewards, mask) for which in (row, plain))
    assert torch.allclose(found, expected, atol=1e-14)


# ------------------------------------------------------------------------------------- rows that need more than a loss


@pytest.mark.parametrize("name", ["dapo", "sgpo", "aepo"])
@pytest.mark.parametrize("seed", range(2))
def test_their_losses_are_grpos_with_dapos_range(name, seed):
    new, old, rewards, mask = batch(seed)
    leaf = new.clone().requires_grad_()
    objective = token_ppo(standardised, 0.2, 0.28 if name == "dapo" else 0.2, tokens)(leaf, old, rewards, mask)
    expected = torch.autograd.grad(-objective, leaf)[0]
    assert torch.allclose(row_gradient(name, new, old, rewards, mask), expected, atol=1e-13, rtol=1e-9)


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
@pytest.mark.parametrize("seed", range(2))
def test_icpo_has_the_gradient_of_its_objective(seed, smoothing):
    new, old, rewards, mask = batch(seed)
    hinted, row = torch.arange(12) % 4 == 3, replaced("icpo", hint_smoothing=smoothing)
    advantages = lm.shaped_advantages(rewards, mask, algorithm=row, number=1).flatten()
    leaf = new.clone().requires_grad_()
    loss, _metrics = lm.policy_loss(leaf, old, advantages, mask, algorithm=row, hinted=hinted)
    ours, = torch.autograd.grad(loss, leaf)
    leaf = new.clone().requires_grad_()
    expected, = torch.autograd.grad(-icpo_objective(leaf, old, rewards, mask, hinted, smoothing), leaf)
    assert torch.allclose(ours, expected, atol=1e-13, rtol=1e-9)
    if smoothing < 0.1:  # λ → 0: the hinted response takes part with weight 1
        plain = lm.policy_loss(new, old, advantages, mask & hinted[:, None], algorithm="reinforce")[0]
        alone = lm.policy_loss(new, old, advantages, mask & hinted[:, None], algorithm=row, hinted=hinted)[0]
        assert alone.item() == pytest.approx(plain.item(), abs=1e-7)


def test_ep_grpo_without_its_ingredient_is_grpo_as_published():
    bare = replaced("ep-grpo", process_weight=None, aggregation="token-mean", source="")
    assert bare == replaced("grpo", source="")


# ------------------------------------------------------------------------------------- every row, from the command line


@pytest.fixture(scope="module")
def family_runs(tiny_run, quick, tmp_path_factory):
    """One process trains every row for 3 steps on stale data."""
    out = tmp_path_factory.mktemp("family")
    lm.main([*tiny_run[2], "--compare", ",".join(lm.ALGORITHMS), "--steps", "3", "--sync-interval", "2",
             "--out", str(out), "--step-reward", f"{__name__}:half", "--reward-noise", "0.2,0.1",
             "--learning-rate", "0.02"])
    return out


def half(question, response, answer):
    return 0.5 * (len(response) > 1)


@pytest.mark.parametrize("name", lm.ALGORITHMS)
def test_every_row_trains_from_the_command_line(family_runs, tiny_run, name):
    from safetensors.torch import load_file

    history = read_metrics(family_runs / name)
    assert [line["step"] for line in history] == [0, 1, 2, 3] and history[2]["staleness"] == 1
    assert all(math.isfinite(value) for line in history for value in line.values())
    assert any(line["grad_norm"] > 0 for line in history[1:])
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_run[0], family_runs / name / "model"))
    assert any(not torch.equal(before[key], after[key]) for key in before)


def spied(room, name, seen):
    """The room's function `name`, which also notes its arguments."""
    function = getattr(room, name)

    def wrapper(*arguments, **options):
        seen.append((arguments, options))
        return function(*arguments, **options)

    return wrapper


@pytest.mark.parametrize("name, rates", [("icpo", None), ("dr-grpo", None), ("noise-corrected-grpo", None),
                                         ("noise-corrected-grpo", "0.3,0.05")])
def test_training_passes_on_what_a_row_needs(tiny_run, quick, monkeypatch, tmp_path, name, rates):
    losses, advantages, hints = [], [], []
    for room, function, seen in ((lm, "policy_loss", losses), (lm, "shaped_advantages", advantages),
                                 (friends, "hinted_group", hints)):
        monkeypatch.setattr(room, function, spied(room, function, seen))
    lm.main([*tiny_run[2], "--algorithm", name, "--steps", "3", "--sync-offset", "1", "--micro-batch-tokens", "1",
             "--out", str(tmp_path), "--reward-noise", "0.2,0.1", *(["--noise-rates", rates] if rates else [])])
    assert [options["number"] for _, options in advantages] == [1, 2, 3]  # ICPO's clock
    assert {options["noise_rates"] for _, options in advantages} == {(0.3, 0.05) if rates else (0.2, 0.1)}
    parts = [options for _, options in losses if "weights" in options]
    assert len(parts) == 12  # a pass for each prompt
    if name == "icpo":
        assert len(hints) == 4 and all(len(arguments[4]) == 1 for arguments, _ in hints)  # one ahead; one example each
        assert all(part["hinted"].tolist() == [False, False, False, True] for part in parts)
    else:
        assert not hints and all(part["hinted"] is None for part in parts)
    if name == "dr-grpo":  # 16 responses, each with a budget of 2 tokens
        assert all(set(part["weights"].unique().tolist()) <= {0.0, 1 / 32} for part in parts)


@pytest.mark.filterwarnings("ignore:groups without a contrast")
@pytest.mark.parametrize("name", ["dapo", "icpo", "aepo", "noise-corrected-grpo"])
def test_a_resumed_run_repeats_what_the_row_draws(tiny_run, quick, tmp_path, name):
    flags = [*tiny_run[2], "--algorithm", name, "--sync-interval", "2", "--sync-offset", "1",
             "--reward-noise", "0.2,0.1"]
    lm.main([*flags, "--steps", "4", "--out", str(tmp_path / "straight")])
    lm.main([*flags, "--steps", "2", "--out", str(tmp_path / "halves")])
    lm.main([*flags, "--steps", "4", "--out", str(tmp_path / "halves"), "--resume"])
    first, second = ([{k: v for k, v in line.items() if k != "tokens_per_second" and not k.startswith("eval")}
                      for line in read_metrics(tmp_path / run)] for run in ("straight", "halves"))
    assert first == second


# ---------------------------------------------------------------------------------------------------------- the map


def test_the_map_is_the_gradient_weight():
    ratio = float64(0.5, 1.0, 1.25, 3.5)
    weight = functools.partial(pictures.gradient_weight, lm.policy_loss, lm.red_weight, friends.token_advantages)

    def of(name, advantage):
        return weight(lm.ALGORITHMS[name], ratio, torch.full((4,), advantage).double()).tolist()

    assert of("reinforce", 1.0) == pytest.approx([1] * 4)
    assert of("reinforce-is", -1.0) == pytest.approx([-0.5, -1, -1.25, -3.5])
    assert of("dapo", 1.0) == pytest.approx([0.5, 1, 1.25, 0])
    assert of("grpo", 1.0) == pytest.approx([0.5, 1, 0, 0])
    assert of("topr", -1.0) == pytest.approx([-0.5, -1, -1, -1])
    assert of("red-weight", -1.0) == pytest.approx([-math.exp(-1)] * 4)
    assert of("rep-opmd", 1.0) == pytest.approx([1 - 0.2 * math.log(r) for r in ratio.tolist()])
    assert of("ep-grpo", -1.0) == pytest.approx([0] + [-r * (1 + 0.1 / (1 + r)) for r in (1.0, 1.25, 3.5)])


def test_the_map_is_drawn(tmp_path):
    lm.main(["--map", str(tmp_path)])
    assert (tmp_path / "06_family.png").stat().st_size > 20_000
