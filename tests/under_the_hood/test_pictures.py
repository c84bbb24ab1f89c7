"""The map of the family shows every row once, with the bounds at which its weight jumps; a run's curves are drawn."""

import importlib

import numpy as np

from under_the_hood import pictures

lm = importlib.import_module("06_full_llm_training")


def test_the_map_names_every_row_once_and_shows_where_each_clip_cuts(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda fig, directory, name: drawn.append(fig))
    lm.main(["--map", str(tmp_path)])
    names, jumps, curves = [], {}, {}
    for axis in drawn[0].axes:
        low, high = axis.get_xlim()
        for line in axis.get_lines():
            if not line.get_label().startswith("_"):
                label = line.get_label().replace("\n", " ").split(", ")
                names += label
                x, y = line.get_data()
                cut = np.asarray(x)[np.isnan(y)]
                curves[label[0]] = x, y
                jumps[label[0]] = cut[(low < cut) & (cut < high)]  # what a reader sees of A = 1
    assert sorted(names) == sorted(lm.ALGORITHMS)
    bounds = {"reinforce": [], "grpo": [1.2], "rec-twoside-nois": [0.8, 1.2], "rec-ring-nois": [0.4, 0.8, 1.2],
              "rec-gspo-nois": [1.0004], "gmpo": [np.exp(0.4)], "dapo": [1.28], "red-weight-oneside": [1.2]}
    for name, expected in bounds.items():
        np.testing.assert_allclose(jumps[name], expected, rtol=5e-3 if name != "rec-gspo-nois" else 1e-5)
    for name, weight in (("reinforce", lambda x: 1 + 0 * x), ("reinforce-is", lambda x: x), ("rep-opmd",
                         lambda x: 1 - lm.ALGORITHMS["rep-opmd"].tau * np.log(x))):  # at A = 1
        np.testing.assert_allclose(curves[name][1], weight(np.asarray(curves[name][0])), rtol=1e-5, atol=1e-9)


def test_the_curves_of_a_run_are_drawn(tmp_path, capsys):
    history = [{"step": 0, "eval_accuracy": 0.4, "eval_low": 0.3, "eval_high": 0.5}]
    history += [{"step": i, "reward": 0.5, "kl_old": 0.01, "clip_fraction": 0.02, "entropy": 1.0} for i in (1, 2)]
    pictures.plot_run([*history, {**history[0], "step": 2}], tmp_path, title="grpo")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_titles_say_the_first_and_the_last_accuracy(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "save_figure", lambda fig, directory, name: drawn.append(fig))
    history = [{"step": i, "eval_accuracy": a, "eval_low": a, "eval_high": a, "kl_old": 0.0, "clip_fraction": 0.0,
                "entropy": 0.0, "reward": 0.0} for i, a in enumerate((0.1, 0.3, 0.6, 0.5))]
    pictures.plot_run(history, tmp_path, title="grpo")
    pictures.plot_comparison({"grpo": history, "tis": history[1:3]}, tmp_path, setting="late")
    assert drawn[0].axes[0].get_title() == "grpo: accuracy 0.10 → 0.50"
    assert len(drawn[0].axes) == 4 and len(drawn[1].axes) == 3
    assert drawn[1].get_suptitle() == "late: accuracy grpo 0.10 → 0.50, tis 0.30 → 0.60"
