"""docs/interactive: node evaluates the pictures' functions at 1,000 random points each, Python those of 06 and 03."""

import importlib
import json
import math
import pathlib
import random
import re
import shutil
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "interactive"
POINTS = 1000
CALL = """const calls = JSON.parse(require("fs").readFileSync(0)), picture = require(process.argv[1]);
console.log(JSON.stringify(calls.map(([name, ...args]) => picture[name](...args))));"""



def needs_node(test):
    """It starts a process, so it is slow."""
    absent = pytest.mark.skipif(not shutil.which("node"), reason="needs node, which evaluates the JavaScript")
    return pytest.mark.slow(absent(test))


def in_node(picture, calls):
    run = subprocess.run(["node", "-e", CALL, str(FOLDER / f"{picture}.js")], input=json.dumps(calls), text=True,
                         capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def table(picture, name):
    code = f'console.log(JSON.stringify(require({str(FOLDER / picture)!r}).{name}))'
    return json.loads(subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True).stdout)


def close(measured, expected, tolerance=1e-9):
    measured, expected = (torch.as_tensor(v, dtype=torch.float64) for v in (measured, expected))
    assert measured.shape == expected.shape
    worst = ((measured - expected).abs() / expected.abs().clamp(min=1)).max()
    assert worst < tolerance, float(worst)


def distribution(draw):
    shares = [draw.expovariate(1) + 0.01 for _ in range(3)]
    return [share / sum(shares) for share in shares]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def load(name):
    return importlib.import_module(name)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.js")), ids=lambda path: path.name)
def test_each_picture_is_short(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 300 and max(map(len, lines)) <= 120
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|import\(|fetch\(|XMLHttpRequest", "\n".join(lines))


# (a) the bandit


def bandits(seed):
    draw = random.Random(seed)
    return [(distribution(draw), [draw.random() for _ in range(3)]) for _ in range(POINTS)]


@needs_node
def test_drift():
    points = bandits(0)
    expected = [load("03_offpolicy_derivation").bandit_drift(double(b), double(r)) for b, r in points]
    close(in_node("bandit", [["drift", b, r] for b, r in points]), torch.stack(expected))


@needs_node
def test_at_the_threshold_the_best_arm_ties_with_the_next():
    points = bandits(1)
    drift = load("03_offpolicy_derivation").bandit_drift
    for (b, r), share in zip(points, in_node("bandit", [["threshold", b, r] for b, r in points])):
        best = max(range(3), key=r.__getitem__)

        def lead(q, b=b, r=r, best=best):
            mixed = [q if i == best else p / (1 - b[best]) * (1 - q) for i, p in enumerate(b)]
            c = drift(double(mixed), double(r))
            return float(c[best] - max(c[i] for i in range(3) if i != best))

        assert 0 < share < 1 and abs(lead(share)) < 1e-12
        assert lead(share - 1e-4) < 0 < lead(share + 1e-4)


@needs_node
def test_threshold_of_the_lesson():
    assert in_node("bandit", [["threshold", [0.3, 0.6, 0.1], [0, 0.8, 1]]])[0] == pytest.approx(8 / 35, abs=1e-12)


@needs_node
@pytest.mark.parametrize("refresh", [None, 1, 7])
def test_path_of_j(refresh, monkeypatch):
    lesson, points = load("03_offpolicy_derivation"), bandits(2)
    options = {"steps": 20} | ({"refreshEvery": refresh} if refresh else {})
    expected = []
    for b, r in points:
        monkeypatch.setattr(lesson, "REWARDS", double(r))
        expected.append(lesson.train_bandit(double(b), steps=20, refresh_every=refresh or math.inf))
    close(in_node("bandit", [["expectedRewards", b, r, options] for b, r in points]), torch.stack(expected))


@needs_node
def test_dragging_keeps_a_distribution():
    draw = random.Random(3)
    calls = [["withProbability", distribution(draw), draw.randrange(3), draw.uniform(-0.2, 1.2)] for _ in range(POINTS)]
    result = double(in_node("bandit", calls))
    close(result.sum(-1), torch.ones(POINTS))
    assert result.min() > 0
    for (_, probs, arm, value), after in zip(calls, result):
        i, j = (n for n in range(3) if n != arm)
        assert float(after[arm]) == pytest.approx(min(0.98, max(0.01, value)))
        assert float(after[i] / after[j]) == pytest.approx(probs[i] / probs[j])


# (b) the weight of a token


def tokens(seed):
    """(ratio, advantage, options) at random, a fifth of them exactly on a bound or at A = 0."""
    draw = random.Random(seed)
    for _ in range(POINTS):
        eps_low, eps_high = draw.uniform(0, 0.7), draw.uniform(0, 2)
        outer_low, outer_high = draw.uniform(eps_low + 0.01, 0.9), draw.uniform(eps_high + 0.01, 3)
        ratio = math.exp(draw.uniform(-2.3, 1.6))
        if draw.random() < 0.2:
            ratio = draw.choice([1 - eps_low, 1 + eps_high, 1 - outer_low, 1 + outer_high])
        options = {"clip": draw.choice(["none", "one_side", "two_side", "ring"]), "epsLow": eps_low,
                   "epsHigh": eps_high, "outerLow": outer_low, "outerHigh": outer_high,
                   "weight": draw.choice(["one", "ratio"]), "cap": draw.choice([1e9, 1.2, 2.0])}
        yield ratio, draw.choice([draw.uniform(-2, 2), 0.0, 1.0, -1.0]), options


@needs_node
def test_clip_mask():
    points = list(tokens(4))
    expected = [load("06_full_llm_training").clip_mask(
        double([ratio]), double([advantage]), clip=o["clip"], eps_low=o["epsLow"], eps_high=o["epsHigh"],
        outer_low=o["outerLow"], outer_high=o["outerHigh"]).item() for ratio, advantage, o in points]
    assert in_node("weight", [["clipMask", *point] for point in points]) == expected
    assert 0.2 < sum(expected) / POINTS < 0.9


@needs_node
def test_weight_is_the_gradient_of_the_loss():
    """−∂L/∂log π of a response of one token, by autograd through 06's policy_loss."""
    lm, points = load("06_full_llm_training"), list(tokens(5))
    expected = []
    for ratio, advantage, o in points:
        row = lm.Algorithm(clip=o["clip"], eps_low=o["epsLow"], eps_high=o["epsHigh"], outer_low=o["outerLow"],
                           outer_high=o["outerHigh"], weight=o["weight"], weight_cap=o["cap"])
        logprobs = double([[math.log(ratio)]]).requires_grad_()
        loss, _ = lm.policy_loss(logprobs, double([[0.0]]), double([advantage]), torch.ones(1, 1), algorithm=row)
        expected.append(float(-torch.autograd.grad(loss, logprobs)[0]))
    # On a bound the ratio is as the loss sees it, e^(log ρ), which may fall on the other side of the bound.
    calls = [["gradientWeight", float(double(math.log(ratio)).exp()), advantage, o] for ratio, advantage, o in points]
    close(in_node("weight", calls), expected)


@needs_node
def test_rows_are_those_of_the_family():
    """Every row whose token weight is M·W·A with one ratio a token and one advantage a response is in the table."""
    lm = load("06_full_llm_training")
    plain = {name: row for name, row in lm.ALGORITHMS.items()
             if row.level == "token" and row.weight in ("one", "ratio") and not row.tau and not row.beta
             and row.entropy_target is None and row.shaping in ("none", "drop") and row.process_weight is None
             and not row.worked_examples}
    default, names = table("weight.js", "DEFAULTS"), {"clip": "clip", "weight": "weight", "epsLow": "eps_low",
                                                      "epsHigh": "eps_high", "outerLow": "outer_low",
                                                      "outerHigh": "outer_high", "cap": "weight_cap"}
    rows = {name: default | row for name, row in table("weight.js", "ROWS").items()}
    assert set(rows) == set(plain)
    for name, row in plain.items():
        for key, field in names.items():
            here = rows[name][key]
            assert (math.inf if here is None else here) == getattr(row, field), (name, field)  # JSON has no ∞


@needs_node
def test_which_row_it_is():
    lm = load("06_full_llm_training")
    ratio = torch.logspace(-1, 0.7, 60).double()[:, None]
    rows = table("weight.js", "ROWS")

    def curve(name):
        row, out = lm.ALGORITHMS[name], []
        for advantage in (1.0, -1.0):
            keep = lm.clip_mask(ratio, torch.full_like(ratio, advantage), clip=row.clip, eps_low=row.eps_low,
                                eps_high=row.eps_high, outer_low=row.outer_low, outer_high=row.outer_high)
            weight = lm.importance_weight(ratio, ratio.log(), torch.full_like(ratio, advantage),
                                          torch.ones_like(ratio), algorithm=row)
            out.append(torch.where(keep, weight * torch.full_like(ratio, advantage), 0.0))
        return torch.cat(out)

    for name, found in zip(rows, in_node("weight", [["rowsLike", row] for row in rows.values()])):
        assert set(found) == {other for other in rows if torch.equal(curve(other), curve(name))}


# (c) the dial


def dials(seed):
    draw = random.Random(seed)
    return [(draw.randrange(1, 60), draw.choice([None, draw.randrange(1, 25)]), draw.randrange(0, 13))
            for _ in range(POINTS)]


@needs_node
@pytest.mark.parametrize("name, function", [("rolloutVersion", "rollout_version"), ("staleness", "staleness")])
def test_dial(name, function):
    points = dials(6)
    expected = [getattr(load("06_full_llm_training"), function)(n, sync_interval=i, sync_offset=m)
                for n, i, m in points]
    assert in_node("dial", [[name, n, {"interval": i, "offset": m}] for n, i, m in points]) == expected


@needs_node
def test_the_queue_says_what_the_formula_says():
    """The simulated trainer knows no formula, and the formula no queue."""
    points = dials(7)
    age = load("06_full_llm_training").staleness
    for (n, i, m), log in zip(points, in_node("dial", [["simulate", {"interval": i, "offset": m}, n]
                                                       for n, i, m in points])):
        assert [entry["staleness"] for entry in log] == [age(k, sync_interval=i, sync_offset=m)
                                                         for k in range(1, n + 1)]
        assert all(entry["taken"]["batch"] == entry["step"] and len(entry["queue"]) == m + 1 for entry in log)


# (d) π* and the pairwise loss


def policies(seed):
    draw = random.Random(seed)
    return [(distribution(draw), distribution(draw), [draw.random() for _ in range(3)], distribution(draw),
             math.exp(draw.uniform(-3.5, 3))) for _ in range(POINTS)]


@needs_node
def test_optimum():
    points = policies(8)
    expected = [load("03_offpolicy_derivation").kl_regularised_optimum(double(anchor), double(r), tau=tau)
                for _, anchor, r, _, tau in points]
    close(in_node("pairs", [["optimum", anchor, r, tau] for _, anchor, r, _, tau in points]), torch.stack(expected))


@needs_node
def test_pairwise_loss_its_gradient_and_a_step():
    lesson, points = load("03_offpolicy_derivation"), policies(9)
    losses, slopes, after = [], [], []
    for policy, anchor, r, data, tau in points:
        logits = double(policy).log().requires_grad_()
        pairs = 9 * torch.outer(double(data), double(data))
        loss = lesson.pairwise_surrogate_loss(logits.log_softmax(-1), double(anchor).log(), double(r), tau=tau,
                                              pair_weights=pairs)
        losses.append(loss.detach())
        slopes.append(torch.autograd.grad(loss, logits)[0])
        after.append((logits.detach() - 0.7 * slopes[-1]).softmax(-1))
    close(in_node("pairs", [["pairwiseLoss", *point] for point in points]), torch.stack(losses))
    close(in_node("pairs", [["gradient", *point] for point in points]), torch.stack(slopes))
    calls = [["step", point[0], slope.tolist(), 0.7] for point, slope in zip(points, slopes)]
    close(in_node("pairs", calls), torch.stack(after))
