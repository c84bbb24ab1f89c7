"""The grid's statistics and verdicts, and that the committed tables lead to the committed verdicts."""

import importlib

import numpy as np
import pytest
import torch

import paper_grid


def synthetic(values):
    """A grid with one setting in which row → list over seeds of (base, end) accuracies, straight lines in between."""
    rows = []
    for (row, setting), seeds in values.items():
        for seed, (base, end) in enumerate(seeds):
            for i, step in enumerate(range(0, 130, 10)):
                rows.append({"row": row, "setting": setting, "seed": float(seed), "step": float(step), "clip_fraction": 0.01,
                             "eval_accuracy": base if i == 0 else end})
    return rows


@pytest.mark.parametrize("kind, low, high, expected", [
    ("better", 0.04, 0.10, "holds"), ("better", 0.02, 0.10, "not resolved"), ("better", -0.10, 0.02, "does not hold"),
    ("no worse", -0.02, 0.50, "holds"), ("no worse", -0.04, 0.50, "not resolved"), ("no worse", -0.2, -0.04, "does not hold"),
    ("equal", -0.02, 0.02, "holds"), ("equal", -0.04, 0.02, "not resolved"), ("equal", 0.04, 0.08, "does not hold"),
])
def test_verdict_is_the_stated_rule(kind, low, high, expected):
    assert paper_grid.MARGIN == 0.03
    assert paper_grid.verdict(kind, low, high) == expected


def test_bootstrap_interval_matches_enumeration_of_all_resamples():
    values = [0.1, 0.4, 0.7]
    every = np.array([np.mean([values[i], values[j], values[k]]) for i in range(3) for j in range(3) for k in range(3)])
    mean, low, high = paper_grid.mean_interval(values)
    assert mean == pytest.approx(0.4)
    assert low == pytest.approx(np.quantile(every, 0.025, method="inverted_cdf"))
    assert high == pytest.approx(np.quantile(every, 0.975, method="inverted_cdf"))


def test_one_seed_resolves_nothing():
    grid = synthetic({("a", "s"): [(0.4, 0.9)], ("b", "s"): [(0.4, 0.1)]})
    result = paper_grid.compare_rows(grid, "a", "b", "s", "better")
    assert result["mean"] == pytest.approx(0.8) and result["verdict"] == "not resolved"


def test_rows_are_compared_seed_by_seed():
    # Seeds differ by far more than the rows do: only the paired difference resolves it.
    grid = synthetic({("a", "s"): [(0.4, 0.40), (0.4, 0.60), (0.4, 0.80)], ("b", "s"): [(0.4, 0.35), (0.4, 0.55), (0.4, 0.75)]})
    result = paper_grid.compare_rows(grid, "a", "b", "s", "better")
    assert result["mean"] == pytest.approx(0.05) and result["low"] == pytest.approx(0.05) and result["verdict"] == "holds"
    assert paper_grid.compare_rows(grid, "b", "a", "s", "better")["verdict"] == "does not hold"


def test_final_is_the_mean_of_the_last_three_evaluations():
    grid = [{"row": "a", "setting": "s", "seed": 0.0, "step": float(i), "eval_accuracy": float(i)} for i in range(10)]
    assert paper_grid.final(grid, "a", "s").tolist() == [(7 + 8 + 9) / 3]
    assert paper_grid.speed(grid, "a", "s").tolist() == [4.5]
    assert paper_grid.drop_from_peak(grid, "a", "s").tolist() == [9 - 8]


def test_rows_that_share_their_runs_on_fresh_data_have_one_gradient():
    """Every ratio is 1 there. The gradient of each row's loss, advantages included, is its twin's."""
    lm, rewards = importlib.import_module("06_full_llm_training"), torch.tensor([[1.0, 0, 0, 1, 0, 1], [1.0, 0, 0, 0, 0, 0]])
    logprobs, mask = -torch.rand(12, 3, dtype=torch.float64), torch.arange(3) <= torch.arange(12)[:, None] % 3
    lengths = mask.sum(1).view(2, 6)

    def gradient(label):
        row = lm.find_algorithm(paper_grid.ROWS[label][0], **{k: v for k, v in paper_grid.ROWS[label][1].items() if "eps" in k})
        advantages = lm.shaped_advantages(rewards, lengths, algorithm=row, generator=torch.Generator().manual_seed(0))
        leaf = logprobs.clone().requires_grad_()
        loss, _ = lm.policy_loss(leaf, logprobs, advantages.flatten(), mask, algorithm=row)
        return torch.autograd.grad(loss, leaf)[0]

    for label in paper_grid.ROWS:
        twin = paper_grid.twin(label, "(1,0)")
        assert torch.allclose(gradient(label), gradient(twin), atol=1e-12)
        assert paper_grid.twin(label, "(20,0)") == label
        assert ("lr" in label) == (paper_grid.ROWS[twin][1].get("learning_rate") is not None)
    assert paper_grid.twin("rec-ring-is", "(1,0)") == "reinforce" and paper_grid.twin("red-weight", "(1,0)") == "red-weight"


def test_a_missing_row_is_a_clear_error():
    with pytest.raises(ValueError, match="no runs of 'b'"):
        paper_grid.final([], "b", "s")


def test_cells_differ_only_where_they_should_and_hash_by_what_they_do(tmp_path):
    cells = paper_grid.grid_cells("paper", seeds=5)
    settings = len(paper_grid.SETTINGS)
    fresh = len({paper_grid.twin(label, "(1,0)") for label in paper_grid.ROWS})  # rows that are one on fresh data run once
    assert len(cells) == 5 * (len(paper_grid.ROWS) * (settings - 1) + fresh) == len({str(c) for c in cells})
    assert len({paper_grid.cell_key(cell, steps=120) for cell in cells}) == len(cells)
    assert paper_grid.cell_key(cells[0], steps=120) != paper_grid.cell_key(cells[0], steps=121)
    module = importlib.import_module("06_full_llm_training")
    configs = {cell[0]: module.Config(**paper_grid.cell_settings(cell, steps=120)) for cell in cells}
    rates = {label: config.learning_rate for label, config in configs.items()}
    assert {rate for label, rate in rates.items() if "lr" not in label} == {1e-4}  # nothing is tuned per row
    assert rates["rec-oneside-nois 5×lr"] == pytest.approx(5e-4)
    assert module.ALGORITHMS[configs["grpo"].algorithm].clip == "one_side"


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

    monkeypatch.setattr(paper_grid, "DATA", tmp_path)
    monkeypatch.setattr(paper_grid.concurrent.futures, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(paper_grid.concurrent.futures, "as_completed", lambda futures: futures)
    monkeypatch.setattr(importlib.import_module("06_full_llm_training"), "built_in_model", lambda *args: None)
    monkeypatch.setattr(paper_grid, "grid_cells", lambda name, seeds: [("grpo", "(1,0)", seed, {}) for seed in range(4)])
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        paper_grid.train_grid("paper", seeds=4, steps=120, jobs=1, cache_dir="")
    resumed = True
    paper_grid.train_grid("paper", seeds=4, steps=120, jobs=1, cache_dir="")
    assert [cell[2] for cell in ran] == [0, 1, 2, 3]
    assert [line["seed"] for line in paper_grid.load_grid("paper")] == [0, 1, 2, 3]


def test_tidy_averages_between_evaluations():
    history = [{"step": 0, "eval_accuracy": 0.4}, {"step": 1, "kl_old": 1.0}, {"step": 2, "kl_old": 3.0, "eval_accuracy": 0.5}]
    first, second = paper_grid.tidy(("a", "s", 0, {}), history, key="k")
    assert first["kl_old"] == "" and second["kl_old"] == 2.0 and second["eval_accuracy"] == 0.5 and second["step"] == 2


@pytest.mark.parametrize("name", ["paper", "family"])
def test_the_committed_table_holds_whole_runs_of_its_own_grid(name):
    """Every run has all its evaluations, once, and its hash is that of a cell of the grid as it is defined now."""
    planned = {paper_grid.cell_key(cell, steps=120): cell for cell in paper_grid.grid_cells(name, seeds=5)}
    runs = {}
    for line in paper_grid.load_grid(name):
        runs.setdefault(line["cell"], []).append(line)
    assert runs
    for key, lines in runs.items():
        label, setting, seed, _ = planned[key]
        assert {(line["row"], line["setting"], line["seed"]) for line in lines} == {(label, setting, seed)}
        assert [line["step"] for line in lines] == list(range(0, 121, 15))
        assert all(0 <= line["eval_accuracy"] <= 1 for line in lines)


def test_every_claim_is_judged_from_comparisons_with_intervals():
    rng = np.random.default_rng(0)
    grid = synthetic({(row, setting): [(0.4, 0.4 + 0.2 * rng.random()) for _ in range(5)]
                      for row in paper_grid.ROWS for setting in paper_grid.SETTINGS})
    results = paper_grid.judge(grid)
    assert list(results) == ["P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8"]
    for result in results.values():
        verdicts = {row["verdict"] for row in result["rows"]}
        assert all(row["low"] <= row["mean"] <= row["high"] for row in result["rows"])
        assert (result["verdict"] == "holds") == (verdicts == {"holds"})
        assert (result["verdict"] == "does not hold") == ("does not hold" in verdicts)
    assert results["P8"]["verdict"] == "holds"  # 1 % of the tokens are clipped in this synthetic table
    assert paper_grid.verdict_table(results).count("\n") == 10


TABLES = {"family": lambda: paper_grid.family_table(paper_grid.load_grid("family")),
          "paper_claims": lambda: paper_grid.verdict_table(paper_grid.judge(paper_grid.load_grid("paper")),
                                                           "python paper_grid.py --plot-only --grid paper"),
          "hard_claims": lambda: paper_grid.verdict_table(paper_grid.judge(paper_grid.load_grid("hard")),
                                                          "python paper_grid.py --plot-only --grid hard"),
          "conditions": lambda: paper_grid.conditions_table(paper_grid.with_the_papers_rate(paper_grid.load_grid("conditions")))}


@pytest.mark.parametrize("name", TABLES)
def test_the_readme_shows_what_the_committed_runs_say(name):
    """Every number and every verdict of the README's tables, computed again from figures/data/*.csv."""
    readme = (paper_grid.ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition(f"<!-- {name}.md -->\n")[2].partition("<!-- end -->")[0]
    assert shown == TABLES[name]()


def test_the_committed_grids_are_whole():
    """All rows, all settings, at least five seeds of the paper's grid and three of the family's."""
    for name, seeds in (("paper", 5), ("family", 3), ("staleness", 3), ("conditions", 3), ("hard", 3)):
        wanted = {paper_grid.cell_key(cell, steps=120) for cell in paper_grid.grid_cells(name, seeds)}
        assert wanted <= {line["cell"] for line in paper_grid.load_grid(name)}, name
