"""--report: what tokens.jsonl and report.html say of a token is what the loss did with it."""

import dataclasses
import importlib
import json
import math
import re
import shutil
import subprocess

import browser
import pytest
import torch
from conftest import build_model

from under_the_hood import report, runs
from under_the_hood.errors import UserError

lm = importlib.import_module("06_full_llm_training")

SCRIPT = re.compile(r'<script>\n(.*)</script>', re.DOTALL)
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
COLUMNS = ("logprob", "old_logprob", "entropy", "ratio", "advantage", "M", "W")


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def flags(tiny_run):
    return [*tiny_run[2], "--steps", "4", "--sync-interval", "4", "--eval-every", "2", "--log-tokens", "3",
            "--learning-rate", "0.03"]


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory, quick):
    """Run directories of two rows on the same data: one clips, one does not."""
    out = tmp_path_factory.mktemp("runs")
    lm.main([*flags, "--compare", "rec-oneside-is,reinforce", "--out", str(out)])
    return out


# ------------------------------------------------------------------------------------- the numbers are the loss's own


def sampled_batch(*, hinted):
    """4 prompts of 3 responses, 1 to 5 tokens, sampled by another model than the one that trains."""
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 7, (4, 3), generator=draw)
    lengths = torch.randint(1, 6, (12, 1), generator=draw)
    tokens = torch.randint(0, 7, (12, 5), generator=draw)
    mask = torch.arange(5) < lengths
    old = lm.token_logprobs(build_model("qwen2", vocab_size=7, seed=1), prompt, tokens, mask=mask)[0].detach()
    rewards = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0]])
    hinted = torch.arange(12) % 3 == 2 if hinted else None
    return lm.Rollout(prompt, torch.ones_like(prompt, dtype=torch.bool), tokens, mask, old, rewards,
                      torch.zeros(12, dtype=torch.bool), 0, [], hinted)


class Letters:
    """A tokenizer as far as the log needs one."""
    def decode(self, ids, **_):
        return "".join("abcdefg"[int(i)] for i in ids)


def logged(name, monkeypatch, *, prompts=4, budget=16384):
    """(row, batch, lines of tokens.jsonl, the sum of the losses' (B, T) gradients in log π) of one train_step."""
    # Bounds of two widths, so narrow that tokens of this batch lie between them on either side.
    algorithm = lm.find_algorithm(name, eps_low=.1, eps_high=.4)
    model, batch, passes = build_model("qwen2", vocab_size=7), sampled_batch(hinted=name == "icpo"), []
    config = lm.Config(algorithm=name, group_size=3, prompts_per_step=4, max_new_tokens=5, log_tokens=prompts,
                       micro_batch_tokens=budget, engine="plain")
    gradient, loss_of = torch.zeros(12, 5), lm.policy_loss

    def watched(logprobs, *arguments, **options):
        logprobs.retain_grad()
        loss, metrics = loss_of(logprobs, *arguments, **options)
        seen.append((logprobs, torch.autograd.grad(loss, logprobs, retain_graph=True)[0] if loss.requires_grad
                     else torch.zeros_like(logprobs)))
        return loss, metrics

    seen = []
    monkeypatch.setattr(lm, "policy_loss", watched)
    lm.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, config, algorithm=algorithm,
                  generator=torch.Generator().manual_seed(0), passes=passes,
                  sample=lambda *a, **k: (batch.tokens, batch.mask, None))
    for (rows, *_), (_, slope) in zip(passes, seen, strict=True):
        gradient[rows, :slope.shape[1]] = slope
    return algorithm, batch, report.token_lines(passes, batch, Letters(), config, algorithm, lm.clean_tokens,
                                                lm.policy_ratio, lm.clip_mask, lm.importance_weight), gradient


@pytest.mark.parametrize("name", lm.ALGORITHMS)
def test_the_logged_factors_are_the_gradient_of_the_loss_that_trained(name, monkeypatch):
    """−∂L/∂log π = N·(M·W·A − τ·d + β), by autograd through the policy_loss that train_step called, in every row."""
    row, batch, logs, gradient = logged(name, monkeypatch)
    assert [(line["prompt"], line["response"]) for line in logs] == [(i // 3, i % 3) for i in range(12)]
    for i, line in enumerate(logs):
        for t in range(int(batch.mask[i].sum())):
            d = line["logprob"][t] - line["old_logprob"][t]
            weight = line["M"][t] * line["W"][t] * line["advantage"][t] - row.tau * d + row.beta
            assert -gradient[i, t].item() == pytest.approx(line["N"] * weight, rel=2e-5, abs=1e-8)


@pytest.mark.parametrize("name", ["rec-oneside-is", "rec-twoside-nois", "rec-ring-is", "gspo", "topr", "cispo"])
def test_the_logged_numbers_are_those_of_the_equation_in_float64(name, monkeypatch):
    """ρ, M, W and A written out in plain floats from the log-probabilities and the rewards, one row of a kind."""
    row, batch, logs, _ = logged(name, monkeypatch)
    clipped = 0
    for line in logs:
        rewards = batch.rewards[line["prompt"]].tolist()
        mean = sum(rewards) / 3
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3) if row.std_normalize else 1
        A = 0.0 if len(set(rewards)) == 1 else (rewards[line["response"]] - mean) / std
        d = [new - old for new, old in zip(line["logprob"], line["old_logprob"])]
        power = {"token": d, "sequence": [sum(d) / len(d)] * len(d), "trajectory": [sum(d)] * len(d)}[row.level]
        ratio = [math.exp(x) for x in power]
        low, high = 1 - row.eps_low, 1 + row.eps_high
        for t, rho in enumerate(ratio):
            out = {"none": False, "one_side": rho > high if A > 0 else rho < low, "two_side": not low <= rho <= high,
                   "ring": (rho > high or 1 - row.outer_low < rho < low) if A > 0
                   else (rho < low or high < rho < 1 + row.outer_high)}[row.clip] and A != 0
            capped = min(rho, row.weight_cap)
            W = {"one": 1, "ratio": capped, "ratio-if-worse": capped if A < 0 else 1}[row.weight]
            assert line["ratio"][t] == pytest.approx(rho, rel=1e-5)
            assert line["advantage"][t] == pytest.approx(A, abs=1e-5)
            assert (line["M"][t], line["W"][t]) == (float(not out), pytest.approx(W, rel=1e-5))
            clipped += out
    assert (clipped > 0) == (row.clip != "none")


def test_what_is_logged_does_not_depend_on_how_a_batch_is_split_into_passes(monkeypatch):
    whole, split = (logged("grpo", monkeypatch, budget=budget)[2] for budget in (16384, 1))
    for line, other in zip(whole, split, strict=True):
        assert line.keys() == other.keys()
        assert all(line[name] == other[name] for name in line.keys() - set(COLUMNS))
        for name in COLUMNS:
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


def test_only_the_first_prompts_are_logged_with_their_texts(monkeypatch):
    _, batch, logs, _ = logged("grpo", monkeypatch, prompts=2)
    assert [line["prompt"] for line in logs] == [0, 0, 0, 1, 1, 1]
    for i, line in enumerate(logs):
        assert line["question"] == Letters().decode(batch.prompt[i // 3])
        assert "".join(line["tokens"]) == Letters().decode(batch.tokens[i][batch.mask[i]])
        assert line["reward"] == batch.rewards.flatten()[i] and len(line["M"]) == len(line["tokens"])


# -------------------------------------------------------------------------------------------------------- in a run


def test_a_run_logs_the_steps_that_evaluate(trained):
    for name in ("rec-oneside-is", "reinforce"):
        logs = lines(trained / name / "tokens.jsonl")
        assert sorted({line["step"] for line in logs}) == [2, 4]
        assert [(line["prompt"], line["response"]) for line in logs if line["step"] == 4] == [
            (p, r) for p in range(3) for r in range(4)]


def test_the_log_of_a_whole_batch_adds_up_to_the_metrics_of_its_step(flags, tmp_path, quick):
    """Clip fraction, entropy, mean ratio, length and loss, which other code makes."""
    lm.main([*flags, "--algorithm", "rec-oneside-is", "--log-tokens", "99", "--eps-low", "0.05", "--eps-high", "0.05",
             "--out", str(tmp_path / "run")])
    for metrics in lines(tmp_path / "run" / "metrics.jsonl")[2::2]:
        logs = [line for line in lines(tmp_path / "run" / "tokens.jsonl") if line["step"] == metrics["step"]]
        flat = {name: [value for line in logs for value in line[name]] for name in COLUMNS}
        tokens = len(flat["M"])
        assert tokens / len(logs) == pytest.approx(metrics["completion_length"])
        assert 1 - sum(flat["M"]) / tokens == pytest.approx(metrics["clip_fraction"], abs=1e-6)
        assert sum(flat["entropy"]) / tokens == pytest.approx(metrics["entropy"], rel=1e-5)
        assert sum(map(math.exp, (a - b for a, b in zip(flat["logprob"], flat["old_logprob"])))) / tokens == (
            pytest.approx(metrics["ratio_mean"], rel=1e-5))
        loss = -sum(line["N"] * m * w * a * log for line in logs for m, w, a, log in zip(
            line["M"], line["W"], line["advantage"], line["logprob"]))
        assert loss == pytest.approx(metrics["loss"], abs=1e-5)
    assert metrics["clip_fraction"] > 0


def test_logging_changes_nothing_else(flags, trained, tmp_path, quick):
    lm.main([*flags, "--log-tokens", "0", "--algorithm", "rec-oneside-is", "--out", str(tmp_path / "run")])
    with_log, without = trained / "rec-oneside-is", tmp_path / "run"
    assert not (without / "tokens.jsonl").exists()
    assert (with_log / "samples.jsonl").read_bytes() == (without / "samples.jsonl").read_bytes()
    for line, other in zip(lines(with_log / "metrics.jsonl"), lines(without / "metrics.jsonl"), strict=True):
        assert {**line, "tokens_per_second": 0} == {**other, "tokens_per_second": 0}


def test_a_resumed_run_has_every_line_once(flags, trained, tmp_path, quick):
    """Killed in a logged step, after its lines were written and before its checkpoint was, then resumed."""
    out = tmp_path / "run"
    steps = [*flags, "--algorithm", "rec-oneside-is", "--out", str(out), "--save-every", "1"]
    lm.main([*steps, "--steps", "3"])  # it evaluates and logs its last step, 3; a run of 4 steps does not
    runs.append(out / "tokens.jsonl", {"step": 4, "left": "by a run that was killed before its checkpoint"})
    with open(out / "tokens.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "torn')
    lm.main([*steps, "--steps", "4", "--resume"])
    straight = (trained / "rec-oneside-is" / "tokens.jsonl").read_text(encoding="utf-8").splitlines()
    resumed = (out / "tokens.jsonl").read_text(encoding="utf-8").splitlines()
    assert [line for line in resumed if json.loads(line)["step"] != 3] == straight
    assert {json.loads(line)["step"] for line in resumed} == {2, 3, 4}
    assert len(set(resumed)) == len(resumed)


def test_overwriting_a_run_removes_its_log_and_its_report(flags, tmp_path, quick):
    run = [*flags, "--steps", "1", "--out", str(tmp_path / "run")]
    lm.main(run)
    lm.main(["--report", str(tmp_path / "run")])
    lm.main([*run, "--log-tokens", "0", "--overwrite"])
    assert not {"tokens.jsonl", "report.html"} & {path.name for path in (tmp_path / "run").iterdir()}


# -------------------------------------------------------------------------------------------------------- the page


def page_of(trained, *names):
    lm.main(["--report", ",".join(str(trained / name) for name in names)])
    file = "report.html" if len(names) == 1 else f"report-and-{names[1]}.html"
    text = (trained / names[0] / file).read_text(encoding="utf-8")
    return text, json.loads(DATA.search(text)[1])


@pytest.mark.parametrize("names", [("rec-oneside-is",), ("reinforce", "rec-oneside-is")])
def test_the_page_holds_the_runs_and_needs_nothing_else(trained, names, capsys):
    text, data = page_of(trained, *names)
    assert "open it in a browser" in capsys.readouterr().out and data["metrics"] == runs.METRICS
    assert [run["name"] for run in data["runs"]] == list(names) and data["steps"] == [2, 4]
    for run in data["runs"]:
        assert run["tokens"] == lines(trained / run["name"] / "tokens.jsonl")
        assert run["history"] == lines(trained / run["name"] / "metrics.jsonl")
    page = text.replace(DATA.search(text)[1], "")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|<img|<script src|rel=.stylesheet|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page and page.count("<script") == 2 and "{{" not in page


def test_no_text_of_a_model_can_end_the_script_or_run(trained, tmp_path):
    shutil.copytree(trained / "reinforce", tmp_path / "run")
    evil = "</script><script>alert('1')</script><!-- <img src=x onerror=alert(1)>"
    logs = lines(tmp_path / "run" / "tokens.jsonl")
    logs[0] |= {"question": evil, "tokens": [evil] * len(logs[0]["tokens"])}
    runs.write_text(tmp_path / "run" / "tokens.jsonl", "".join(json.dumps(line) + "\n" for line in logs))
    text, data = page_of(tmp_path, "run")
    assert data["runs"][0]["tokens"][0]["question"] == evil
    assert "<" not in DATA.search(text)[1] and text.count("</script>") == 2


def test_a_number_that_is_none_becomes_none(trained, tmp_path):
    shutil.copytree(trained / "reinforce", tmp_path / "run")
    runs.append(tmp_path / "run" / "metrics.jsonl", {"step": 5, "reward": math.nan, "eval_accuracy": 0.5})
    data = page_of(tmp_path, "run")[1]
    assert data["runs"][0]["history"][-1] == {"step": 5, "reward": None, "eval_accuracy": 0.5}
    assert data["runs"][0]["row"]["weight_cap"] is None  # ∞: no cap


@pytest.mark.parametrize("logged, shown", [
    ([set()], []), ([{20, 40}, set()], [20, 40]), ([{20, 40, 60}, {40, 60, 80}], [40, 60]), ([{20}, {30}], [20, 30]),
    ([set(range(1, 101))], [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]), ([{7}], [7])])
def test_steps_that_both_runs_logged_are_shown_at_most_twelve(logged, shown):
    assert report.shown_steps(logged) == shown


def test_a_run_without_a_token_log_still_has_its_curves(trained, tmp_path, capsys):
    shutil.copytree(trained / "reinforce", tmp_path / "old")
    (tmp_path / "old" / "tokens.jsonl").unlink()
    data = page_of(tmp_path, "old")[1]
    assert data["steps"] == [] and len(data["runs"][0]["history"]) == 5
    assert "old has no tokens.jsonl: the page shows its curves alone" in capsys.readouterr().out


def test_bad_input_takes_one_line(trained, tmp_path, capsys):
    shutil.copytree(trained / "reinforce", tmp_path / "torn")
    (tmp_path / "torn" / "metrics.jsonl").write_text('{"step": 0, "ev', encoding="utf-8")
    shutil.copytree(trained / "reinforce", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"algorithm": "unheard-of"}', encoding="utf-8")
    (tmp_path / "nothing").mkdir()
    for argument, words in {
            str(tmp_path / "nothing"): "is not a run directory, it has no metrics.jsonl",
            str(tmp_path / "missing"): "is not a run directory, it has no metrics.jsonl",
            str(trained): "it holds the runs rec-oneside-is, reinforce: name one or two of them",
            str(tmp_path / "torn"): "cannot be read", str(tmp_path / "other"): "cannot be read",
            "a,b,c": "shows one run, or two side by side, not 3"}.items():
        with pytest.raises(SystemExit) as ended:
            lm.main(["--report", argument])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and words in error and error.count("\n") == 1, error
    with pytest.raises(UserError, match="--log-tokens is -1; it must be 0 or more"):
        lm.options.validate(lm.Config(log_tokens=-1), lm.ALGORITHMS, lm.try_loss)


# ---------------------------------------------------------------------------------------- the page's own arithmetic


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@pytest.mark.parametrize("name", ["rec-oneside-is", "rec-ring-nois", "gspo", "gmpo", "topr", "rep-opmd", "rep-asymre",
                                  "red-weight", "icpo", "ep-grpo", "dr-grpo"])
def test_the_page_computes_what_python_computes(name, monkeypatch, tmp_path):
    """fate, push and equation of the page, run by node, against the formula in Python, for every token of a batch."""
    row, _, logs, gradient = logged(name, monkeypatch)
    script = SCRIPT.search(report.PAGE.read_text(encoding="utf-8"))[1]
    data = json.dumps(report.finite({"row": lm.dataclasses.asdict(row), "logs": logs}), allow_nan=False)
    (tmp_path / "page.js").write_text(script + f"""
        const {{row, logs}} = {data};
        console.log(JSON.stringify(logs.map(line => line.tokens.map((_, i) => ({{
          fate: fate(row, line, i), said: verdict(row, line, i), rule: clipRule(row, line.advantage[i]),
          why: weightRule(row, line) + ratioRule(row) + meanRule(row), ...equation(row, line, i)}})))));
        """, encoding="utf-8")
    done = subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True, check=True, timeout=60)
    for i, (line, tokens) in enumerate(zip(logs, json.loads(done.stdout), strict=True)):
        for t, token in enumerate(tokens):
            M, W, A, log = (line[key][t] for key in ("M", "W", "advantage", "logprob"))
            d = log - line["old_logprob"][t]
            assert token["weight"] == pytest.approx(-gradient[i, t].item(), rel=2e-5, abs=1e-8)
            assert token["total"] == pytest.approx(
                line["N"] * (-M * W * A * log + row.tau / 2 * d * d - row.beta * d), rel=1e-9, abs=1e-12)
            assert [value for _, value, _ in token["factors"]] == [line["N"], M, W, A, log]
            slope = token["weight"]
            fate = "clipped" if not M else "up" if slope > 0 else "down" if slope < 0 else "untouched"
            assert token["fate"] == fate and token["said"].lower().startswith(
                {"up": "pushed up", "down": "pushed down"}.get(fate, fate))
            assert "undefined" not in token["rule"] + token["why"] + token["said"]
            if row.clip == "none":
                assert token["rule"] == "this algorithm never clips"
            elif A == 0:
                assert token["rule"] == "A = 0, so there is nothing to clip"
            elif not line["hinted"]:  # the rule in words, read back, decides as M did
                assert said_by(token["rule"], line["ratio"][t]) == (not M)


def said_by(rule, ratio):
    """Evaluate "clips where ρ < 0.8 or ρ > 1.2", with commas and ranges, for a ratio."""
    condition = rule.partition("clips where ")[2].replace(", or ", " or ").replace("ρ", str(ratio))
    return eval(condition)


@pytest.mark.slow
@pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_browser_asks_for_nothing_and_fits(trained, width):
    """No error and no request, nothing wider than the screen; a click on a token fills in its equation."""
    page_of(trained, "rec-oneside-is", "reinforce")
    with browser.browser(width=width, phone=width < 500) as page:
        page.open((trained / "rec-oneside-is" / "report-and-reinforce.html").as_uri())
        tokens = sum(len(line["tokens"]) for name in ("rec-oneside-is", "reinforce")
                     for line in lines(trained / name / "tokens.jsonl") if line["step"] == 4)
        page.run("document.querySelector('[data-step=\"4\"]').click()")
        assert page.run("return document.querySelectorAll('#groups .t').length") == tokens
        assert page.run("return document.documentElement.scrollWidth") <= width
        page.run("document.querySelector('#groups .t').click()")
        said = page.run("return document.getElementById('panel').innerText")
        assert "rec-oneside-is, step 4" in said and "This token's part" in said
        assert "NaN" not in said and "undefined" not in said
        names = page.run("return [...document.querySelectorAll('.chart')].map(chart => chart.dataset.metric)")
        logged = {key for name in ("rec-oneside-is", "reinforce") for line in lines(trained / name / "metrics.jsonl")
                  for key in line}
        assert set(names) == {name for name in logged if name != "step" and not name.endswith(("_low", "_high"))}
        assert page.run("return performance.getEntriesByType('resource').length") == 0 and page.console() == []
        page.run("""for (const chart of document.querySelectorAll('.chart b'))
                      chart.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}));""")
        assert page.run("return document.getElementById('tip').textContent").split(": ")[1][:20] == (
            runs.METRICS[re.sub(r"pass_at_\d+", "pass_at_k", names[-1])][:20])


def test_a_run_is_read_with_its_first_and_its_last_accuracy(tmp_path):
    history = [{"step": i, "eval_accuracy": a} for i, a in enumerate((0.1, 0.3, 0.6, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*history, {"step": 4}]))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(lm.Config())))
    run = report.read_run(tmp_path, lambda config: lm.ALGORITHMS["grpo"])
    assert run["accuracy"] == [0.1, 0.5] and run["steps"] == 4 and run["tokens"] == []
