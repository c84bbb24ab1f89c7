"""The grid's keys, statistics and verdicts, and that the committed tables lead to the committed verdicts."""

import importlib
import re

import numpy as np
import pytest
import torch

from experiments import claims, paper_grid, pictures

ROOT = paper_grid.ROOT
lm = importlib.import_module("06_full_llm_training")


def synthetic(values):
    """A grid with one setting in which row → list over seeds of (base, end) accuracies, straight lines in between."""
    rows = []
    for (row, setting), seeds in values.items():
        for seed, (base, end) in enumerate(seeds):
            for i, step in enumerate(range(0, 130, 10)):
                rows.append({"row": row, "setting": setting, "seed": float(seed), "step": float(step),
                             "clip_fraction": 0.01, "eval_accuracy": base if i == 0 else end})
    return rows


# ------------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("draw", ["normal", "accuracies"])
def test_the_interval_covers_the_truth_as_often_as_it_says(seeds, draw):
    """95 % of the intervals hold the true mean; a bootstrap's hold it in 76 % with 3 seeds, in 85 % with 5."""
    generator, runs = np.random.default_rng(0), 20_000
    if draw == "normal":
        values = generator.normal(size=(seeds, runs))
    else:  # the difference of two rows: each seed's own level, counted on 512 answers
        level = np.clip(0.6 + 0.03 * generator.normal(size=(2, seeds, runs)), 0, 1)
        values = np.subtract(*generator.binomial(512, level) / 512)
    _, low, high = claims.mean_interval(values)
    assert 0.94 <= ((low <= 0) & (0 <= high)).mean() <= 0.96


def test_students_quantiles_are_those_of_its_density():
    """The area under t's density, ∝ (1 + x²/d)^(−(d+1)/2), from −q to q is .95; x = √d·tan φ: ∝ cos^(d−1) φ dφ."""
    for degrees, quantile in enumerate(claims.T_QUANTILES, 1):
        phi = np.linspace(0, np.pi / 2, 200_001)
        density = np.cos(phi) ** (degrees - 1)
        area = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
        assert np.interp(np.arctan(quantile / degrees**0.5), phi, area / area[-1]) == pytest.approx(0.95, abs=1e-5)


def test_one_seed_resolves_nothing_and_many_seeds_take_the_last_quantile():
    grid = synthetic({("a", "s"): [(0.4, 0.9)], ("b", "s"): [(0.4, 0.1)]})
    result = claims.compare_rows(grid, "a", "b", "s", "better")
    assert result["mean"] == pytest.approx(0.8) and result["verdict"] == "not resolved"
    mean, low, high = claims.mean_interval([0.0, 1.0] * 8)  # s/√n = .1291
    assert (mean, high - mean, mean - low) == pytest.approx((0.5, 2.2622 * 0.1291, 2.2622 * 0.1291), abs=1e-4)


def test_rows_are_compared_seed_by_seed():
    # Seeds differ by far more than the rows do: only the paired difference resolves it.
    grid = synthetic({("a", "s"): [(0.4, 0.41), (0.4, 0.60), (0.4, 0.80)],
                      ("b", "s"): [(0.4, 0.35), (0.4, 0.55), (0.4, 0.75)]})
    result = claims.compare_rows(grid, "a", "b", "s", "better")
    half = 4.3027 * 0.01 / 3  # differences .06, .05, .05: s = .01/√3, and s/√3 = .01/3
    assert (result["mean"], result["low"]) == pytest.approx((0.16 / 3, 0.16 / 3 - half))
    assert result["verdict"] == "holds"
    assert claims.compare_rows(grid, "b", "a", "s", "better")["verdict"] == "does not hold"


# ---------------------------------------------------------------------------------------------------------- claims


@pytest.mark.parametrize("kind, low, high, expected", [
    ("better", 0.04, 0.10, "holds"), ("better", 0.02, 0.10, "not resolved"), ("better", -0.10, 0.02, "does not hold"),
    ("no worse", -0.02, 1, "holds"), ("no worse", -0.04, 1, "not resolved"), ("no worse", -1, -0.04, "does not hold"),
    ("equal", -0.02, 0.02, "holds"), ("equal", -0.04, 0.02, "not resolved"), ("equal", 0.04, 0.08, "does not hold"),
    ("rare", 0.01, 0.04, "holds"), ("rare", 0.04, 0.06, "not resolved"), ("rare", 0.06, 0.08, "does not hold"),
])
def test_verdict_is_the_stated_rule(kind, low, high, expected):
    assert claims.MARGIN == 0.03
    assert claims.verdict(kind, low, high) == expected


def test_final_is_the_mean_of_the_last_three_evaluations():
    grid = [{"row": "a", "setting": "s", "seed": 0.0, "step": float(i), "eval_accuracy": float(i)} for i in range(10)]
    assert claims.final(grid, "a", "s").tolist() == [(7 + 8 + 9) / 3]
    assert claims.speed(grid, "a", "s").tolist() == [4.5]
    assert claims.drop_from_peak(grid, "a", "s").tolist() == [9 - 8]
    with pytest.raises(ValueError, match="no runs of 'b'"):
        claims.final(grid, "b", "s")
    with pytest.raises(ValueError, match="two runs of 'a'"):
        claims.final(grid + grid, "a", "s")


def test_a_claim_holds_when_all_its_comparisons_do_and_fails_when_one_fails():
    rng = np.random.default_rng(0)
    grid = synthetic({(row, setting): [(0.4, 0.4 + 0.2 * rng.random()) for _ in range(5)]
                      for row in paper_grid.ROWS for setting in paper_grid.SETTINGS})
    results = claims.judge(grid)
    assert [len(result["rows"]) for result in results.values()] == [6, 6, 4, 3, 6, 4, 6, 3] and list(results)[7] == "P8"
    for result in results.values():
        verdicts = {row["verdict"] for row in result["rows"]}
        assert all(row["low"] <= row["mean"] <= row["high"] for row in result["rows"])
        assert (result["verdict"] == "holds") == (verdicts == {"holds"})
        assert (result["verdict"] == "does not hold") == ("does not hold" in verdicts)
    assert results["P8"]["verdict"] == "holds"  # 1 % of the tokens are clipped in this synthetic table
    assert claims.verdict_table(grid, "c").count("\n") == 10


def test_rows_that_share_their_runs_on_fresh_data_have_one_gradient():
    """Every ratio is 1 there. The gradient of each row's loss, advantages included, is its twin's."""
    rewards = torch.tensor([[1.0, 0, 0, 1, 0, 1], [1.0, 0, 0, 0, 0, 0]])
    logprobs, mask = -torch.rand(12, 3, dtype=torch.float64), torch.arange(3) <= torch.arange(12)[:, None] % 3

    def gradient(label):
        name, overrides = paper_grid.ROWS[label]
        row = lm.find_algorithm(name, **{k: v for k, v in overrides.items() if "eps" in k})
        advantages = lm.shaped_advantages(rewards, mask.sum(1).view(2, 6), algorithm=row,
                                          generator=torch.Generator().manual_seed(0))
        leaf = logprobs.clone().requires_grad_()
        loss, _ = lm.policy_loss(leaf, logprobs, advantages.flatten(), mask, algorithm=row)
        return torch.autograd.grad(loss, leaf)[0]

    for label in paper_grid.ROWS:
        assert torch.allclose(gradient(label), gradient(claims.twin(label, "(1,0)")), atol=1e-12)
        assert claims.twin(label, "(20,0)") == label
    assert not {"rec-oneside-nois 5×lr", "grpo", "red-drop", "red-weight", "rep-asymre"} & set(claims.SAME_WHEN_FRESH)


# ------------------------------------------------------------------------------------------------------------ keys


def test_the_keys_are_frozen():
    """A finished run is found under its key. If that changes, it is lost: restore the key, or migrate the tables."""
    cells = {cell[:3]: cell for cell in paper_grid.grid_cells("paper", 3)}
    assert paper_grid.cell_key(cells["grpo", "(20,0)", 1], steps=120) == "8401c56ea101"
    assert paper_grid.cell_key(cells["rec-oneside-nois (.6,2)", "offline", 2], steps=120) == "30b7016c9992"


def test_a_key_depends_on_what_determines_the_result_and_on_no_name(monkeypatch):
    cell = ("grpo", "(20,0)", 0, {"sync_interval": 20})
    key = paper_grid.cell_key(cell, steps=120)
    for other in (("rloo", *cell[1:]), (*cell[:2], 1, cell[3]), (*cell[:3], {"sync_interval": 10}),
                  (*cell[:3], {"sync_interval": 20, "task": "addition-3"})):
        assert paper_grid.cell_key(other, steps=120) != key
    assert paper_grid.cell_key(cell, steps=121) != key
    assert paper_grid.cell_key(("grpo", "another word", *cell[2:]), steps=120) == key
    settings = paper_grid.cell_settings(cell, steps=120)
    renamed = {name if name in ("algorithm", "model") else name[::-1]: value for name, value in settings.items()}
    with monkeypatch.context() as patch:  # every flag renamed, and a new one added
        patch.setattr(paper_grid, "cell_settings", lambda *_, **__: {**renamed, "new": None})
        assert paper_grid.cell_key(cell, steps=120) == key
    for name in ("grpo", "tiny"):  # which computes something else than it did
        with monkeypatch.context() as patch:
            patch.setitem(paper_grid.VERSIONS, name, 2)
            assert paper_grid.cell_key(cell, steps=120) != key


def test_rows_and_base_model_compute_what_they_did_when_their_runs_were_made():
    """Who changes one on purpose gives it a higher number in VERSIONS, trains it again, and puts the new value here.

    A new row has no place here until it has runs."""
    from under_the_hood.models import TINY
    assert [*TINY.values()] == [96, 320, 3, 4, 4, 64, 0.6, {1: 200, 2: 700, 3: 1500}, 256, 2e-3]
    rewards = torch.tensor([[1.0, 0, 0, 1, 0, 1], [1.0, 0, 0, 0, 0, 0]]).double()
    responses = torch.arange(12)[:, None]
    mask = (torch.arange(41) - 20).abs() <= 20 - responses // 2
    # Log-ratios on all sides of all bounds, those of whole responses included.
    moved = torch.linspace(-1.3, 1.3, 41, dtype=torch.float64) + 1e-4 * (responses - 6)
    found = {}
    for name, row in lm.ALGORITHMS.items():
        advantages = lm.shaped_advantages(rewards, mask.sum(1).view(2, 6), algorithm=row, noise_rates=(0.1, 0.2),
                                          generator=torch.Generator().manual_seed(0)).flatten()
        leaf = moved.clone().requires_grad_()
        loss, _ = lm.policy_loss(leaf, torch.zeros_like(moved), advantages, mask, algorithm=row, constant=8)
        found[name] = ((responses + moved.exp()) * torch.autograd.grad(loss, leaf)[0]).sum().item()
    assert COMPUTED.keys() <= found.keys()
    assert {name: found[name] for name in COMPUTED} == pytest.approx(COMPUTED, abs=2e-6)
    run = {line["row"] for line in claims.load_grid("family")}
    if run - COMPUTED.keys():
        pytest.fail(f"new runs: put into COMPUTED { {name: round(found[name], 6) for name in run - COMPUTED.keys()} }", False)


COMPUTED = {
    "reinforce": 0.108903, "reinforce-is": 0.10456, "grpo": 2.317275, "rec-oneside-is": 0.98902,
    "rec-oneside-nois": 0.231605, "rec-twoside-is": 0.027089, "rec-twoside-nois": 0.02778, "rec-ring-is": 0.187394,
    "rec-ring-nois": 0.003312, "rec-gspo-is": -0.06904, "rec-gspo-nois": -0.069335, "rep-opmd": 0.217007,
    "rep-asymre": -0.533852, "red-drop": 0.067682, "red-weight": -1.154587, "red-weight-oneside": -0.453909,
    "red-weight-adaptive": 0.108903, "rloo": 0.130684, "dr-grpo": 4.45059, "gspo": 0.002942, "cispo": 0.295179,
    "gmpo": 1.037191, "tis": 0.115818, "topr": 3.697502, "reinforce-plus-plus": 3.012132, "ngrpo": 3.054144,
    "tic-grpo": 10.524565, "dapo": 2.239135, "noise-corrected-grpo": 1.412886, "sgpo": 2.317275, "aepo": 2.317275,
    "icpo": 1.932344, "ep-grpo": 2.427643,
}


def test_nothing_is_tuned_per_row():
    """Every cell has 06's learning rate, batch and temperature, but for the row that is about the learning rate."""
    cells, config = paper_grid.grid_cells("paper", seeds=5), lm.Config()
    assert len({paper_grid.cell_key(cell, steps=120) for cell in cells}) == len(cells) == 310
    varied = {"algorithm", "steps", "seed", "sync_interval", "sync_offset", "offline", "eval_every", "eval_samples",
              "device"}
    for cell in cells:
        settings = paper_grid.cell_settings(cell, steps=120)
        tuned = {name for name, value in settings.items() if name not in varied and value != getattr(config, name)}
        bounds = {"eps_low", "eps_high"} if "(.6,2)" in cell[0] else set()
        assert tuned == ({"learning_rate"} if "5×lr" in cell[0] else bounds)
        lm.Config(**settings)  # every name is a flag


# -------------------------------------------------------------------------------------------------------- training


def test_a_stopped_grid_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """With the runs themselves replaced: only cells that the table lacks are run, and each is in the table at once."""
    class Inline:  # a pool in this process, which stops after two cells the first time
        def __init__(self, *args, **kwargs): pass
        def __enter__(self): return self
        def __exit__(self, *args): return False
        def submit(self, function, *args):
            future = paper_grid.concurrent.futures.Future()
            try:
                future.set_result(run(*args))
            except KeyboardInterrupt as error:
                future.set_exception(error)
            return future

    ran = []

    def run(cell, steps, cache_dir):
        if len(ran) == 2 and not resumed:
            raise KeyboardInterrupt
        ran.append(cell)
        return paper_grid.tidy(cell, [{"step": 0, "eval_accuracy": 0.5}], key=paper_grid.cell_key(cell, steps=steps))

    for module in (claims, paper_grid):
        monkeypatch.setattr(module, "DATA", tmp_path)
    monkeypatch.setattr(paper_grid.concurrent.futures, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(paper_grid.concurrent.futures, "as_completed", lambda futures: futures)
    monkeypatch.setattr(paper_grid, "built_in_model", lambda *args: None)
    monkeypatch.setattr(paper_grid, "grid_cells", lambda name, seeds: [("grpo", "(1,0)", i, {}) for i in range(4)])
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        paper_grid.train_grid("paper", seeds=4, steps=120, jobs=1, cache_dir="")
    resumed = True
    paper_grid.train_grid("paper", seeds=4, steps=120, jobs=1, cache_dir="")
    assert [cell[2] for cell in ran] == [0, 1, 2, 3]
    assert [line["seed"] for line in claims.load_grid("paper")] == [0, 1, 2, 3]


def test_a_cell_is_a_run_of_06(tmp_path, monkeypatch):
    """run_cell hands its settings to 06 and returns the table of the metrics that 06 wrote."""
    seen = []

    def train(config):
        seen.append(config)
        (paper_grid.pathlib.Path(config.out) / "metrics.jsonl").write_text(
            '{"step": 0, "eval_accuracy": 0.4}\n{"step": 1, "kl_old": 1.0}\n'
            '{"step": 2, "kl_old": 3.0, "eval_accuracy": 0.5}\n')

    monkeypatch.setattr(lm, "train", train)
    threads = torch.get_num_threads()
    cell = ("rec-oneside-nois (.6,2)", "(20,0)", 3, {"sync_interval": 20})
    first, second = paper_grid.run_cell(cell, 60, str(tmp_path))
    torch.set_num_threads(threads)
    assert (first["step"], first["eval_accuracy"], first["kl_old"]) == (0, 0.4, "")
    assert (second["step"], second["eval_accuracy"], second["kl_old"], second["seed"]) == (2, 0.5, (1 + 3) / 2, 3)
    config = seen[0]
    assert (config.algorithm, config.eps_high, config.sync_interval) == ("rec-oneside-nois", 2.0, 20)
    assert (config.steps, config.seed) == (60, 3) and config.save_every > config.steps and config.overwrite


# ------------------------------------------------------------------------------------------------ what is committed


@pytest.mark.parametrize("name, seeds", [("paper", 5), ("family", 3), ("staleness", 3), ("conditions", 3), ("hard", 3)])
def test_the_committed_table_holds_whole_runs_of_its_own_grid_and_all_of_them(name, seeds):
    """Every run has all its evaluations, once, and its key is that of a cell of the grid as it is defined now.

    A row of the family without a value in COMPUTED is new: it may be absent, with all its seeds."""
    planned = {paper_grid.cell_key(cell, steps=120): cell for cell in paper_grid.grid_cells(name, seeds=seeds)}
    runs = {}
    for line in claims.load_grid(name):
        runs.setdefault(line["cell"], []).append(line)
    run = {label for label, *_ in (planned[key] for key in runs)}  # a KeyError: a run of no cell
    new = set(lm.ALGORITHMS) - COMPUTED.keys() - run if name == "family" else set()
    assert runs.keys() == {key for key, cell in planned.items() if cell[0] not in new}
    for key, lines in runs.items():
        label, setting, seed, _ = planned[key]
        assert {(line["row"], line["setting"], line["seed"]) for line in lines} == {(label, setting, seed)}
        assert [line["step"] for line in lines] == list(range(0, 121, 15))
        assert all(0 <= line["eval_accuracy"] <= 1 for line in lines)
    for seed in range(seeds):  # paired: all rows begin with the same model and the same evaluation
        assert len({lines[0]["eval_accuracy"] for lines in runs.values() if lines[0]["seed"] == seed}) == 1


@pytest.mark.parametrize("grid", ["paper", "hard", "family", "conditions"])
def test_the_tables_say_what_the_committed_runs_say(grid):
    """figures/data/*.md, and RESULTS.md between <!-- name --> and <!-- end -->, computed again from the runs."""
    name, text = claims.table(grid)
    assert (claims.DATA / name).read_text(encoding="utf-8") == text
    page = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL) == [text]


def test_a_title_gives_its_message_only_with_the_verdict_it_was_written_for():
    grid = claims.load_grid("paper")
    results = claims.judge(grid)
    for claim, _, _, message in pictures.CURVES.values():
        assert message[1] in pictures.titled(results, claim, message, 5)
        other = pictures.titled({claim: {"claim": "the claim", "verdict": "another"}}, claim, message, 5)
        assert other == f"the claim\n{claim}: another; mean and 95 % interval of 5 seeds"


def test_the_figures_are_drawn_from_the_committed_runs(tmp_path, capsys):
    paper_grid.main(["--plot-only", "--grid", "staleness", "--out", str(tmp_path)])
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"06_compare.png", *(f"paper_{n}.png" for n in (
        "rec", "clip_shape", "learning_rate", "red", "rep", "kl", "staleness"))}
    assert all((ROOT / "figures" / name).exists() for name in made)


# %% ---------------------------------------------------------------------------------------------------- SmolLM2's grid


def test_the_rows_of_a_claim_have_all_seeds_on_smollm2_and_the_others_one():
    cells = paper_grid.grid_cells("smollm2", seeds=3)
    seeds = {}
    for label, setting, seed, options in cells:
        seeds.setdefault((label, setting), []).append(seed)
        assert (options["model"], options["task"]) == ("smollm2", "addition-1")
    claimed = {(row, "(8,0)") for row in ("reinforce", "rec-oneside-nois", "grpo", "red-drop", "red-weight")}
    claimed |= {(row, "(1,8)") for row in ("reinforce", "rec-oneside-nois", "grpo")}
    claimed |= {(row, "(1,0)") for row in ("reinforce", "grpo", "red-drop", "red-weight")}
    assert {key for key, found in seeds.items() if found == [0, 1, 2]} == claimed
    assert all(found == [0] for key, found in seeds.items() if key not in claimed) and len(seeds) == 5 + 2 * 8
    assert {label for label, *_ in cells[:36]} == {label for label, _ in claimed}  # they come first


def test_smollm2s_table_pairs_rows_by_seed_and_judges_where_two_seeds_are_shared():
    """By hand: ends .5 and .7 less .1 and .2 are .4 and .5; mean .45, t(1 degree) 12.7062 · .05 = .635 to each side."""
    ends = {("rec-oneside-nois", 0): .5, ("rec-oneside-nois", 1): .7, ("rec-oneside-nois", 2): .9,
            ("reinforce", 0): .1, ("reinforce", 1): .2, ("grpo", 2): .9}
    grid = [{"row": row, "setting": "(8,0)", "seed": seed, "step": step, "eval_accuracy": .3 if step == 0 else end}
            for (row, seed), end in ends.items() for step in (0, 4, 8, 12)]
    text = claims.smollm2_table(grid)
    assert "| `rec-oneside-nois` | – | 0.30 → 0.70 (3) | – |" in text and "| `grpo` | – | 0.30 → 0.90 (1) | – |" in text
    assert [line for line in text.splitlines() if line.startswith("| P")] == [
        "| P2 | refreshed every 8 steps: rec-oneside-nois − reinforce +0.450 [-0.185, +1.085], 2 | not resolved |"]


def test_a_grid_without_runs_says_so_before_it_draws(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(paper_grid, "DATA", tmp_path)
    with pytest.raises(SystemExit):
        paper_grid.main(["--grid", "smollm2", "--plot-only"])
    assert "no run of the smollm2 grid yet" in capsys.readouterr().err
