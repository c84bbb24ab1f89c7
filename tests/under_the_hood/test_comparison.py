"""--compare: each row from the same base in its own folder, a summary, and what a resumed comparison does again."""

import importlib
import json
import pathlib

import pytest

from under_the_hood.comparison import compare, print_result, staleness_text
from under_the_hood.errors import RunStopped
from under_the_hood.runs import append

lm = importlib.import_module("06_full_llm_training")


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Trainer:
    """Stands in for train: writes two evaluations, which differ by row, and remembers what it was asked."""

    def __init__(self, after, stop_at=None):
        self.after, self.stop_at, self.asked = after, stop_at, []

    def __call__(self, config):
        self.asked.append(config)
        if config.algorithm == self.stop_at:
            raise RunStopped("by SIGTERM")
        out = pathlib.Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        after = self.after[config.algorithm]
        (out / "config.json").write_text("{}")
        (out / "metrics.jsonl").unlink(missing_ok=True)
        for step, accuracy in ((0, 0.25), (2, after)):
            line = {"step": step, "eval_accuracy": accuracy, "kl_old": 0.1, "clip_fraction": 0.0}
            append(out / "metrics.jsonl", line)
        return {"before": 0.25, "after": after, "low": after - 0.1, "high": after + 0.1, "seconds": 61.4}


def test_each_row_is_trained_in_its_own_folder_and_the_last_line_sums_up(tmp_path, capsys):
    train = Trainer({"grpo": 0.5, "reinforce": 0.125})
    config = lm.Config(compare="grpo,reinforce", out=str(tmp_path / "both"), sync_interval=4, seed=7, overwrite=True)
    compare(config, train)
    for asked, name in zip(train.asked, ("grpo", "reinforce"), strict=True):
        assert asked.out == str(tmp_path / "both" / name) and asked.algorithm == name and asked.compare is None
        assert asked.seed == 7 and asked.sync_interval == 4 and asked.overwrite and not asked.resume
    *_, first, second, last = [line for line in capsys.readouterr().out.splitlines() if "figure" not in line]
    assert first == (f"grpo: accuracy 0.250 → 0.500 (95 % 0.400–0.600) in 61 s, run directory "
                     f"{tmp_path / 'both' / 'grpo'}")
    assert second.startswith("reinforce: accuracy 0.250 → 0.125")
    assert last == ("accuracy before → after: grpo 0.250 → 0.500, reinforce 0.250 → 0.125; 123 s; "
                    f"{tmp_path / 'both' / 'compare.png'}")
    assert (tmp_path / "both" / "compare.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert list(stored) == ["grpo", "reinforce"] and stored["grpo"]["after"] == 0.5
    assert json.loads((tmp_path / "both" / "config.json").read_text())["compare"] == "grpo,reinforce"


def test_a_resumed_comparison_resumes_what_had_begun_and_starts_the_rest(tmp_path, capsys):
    config = lm.Config(compare="rloo,grpo,reinforce", out=str(tmp_path))
    with pytest.raises(RunStopped):
        compare(config, Trainer({"rloo": 0.5}, stop_at="grpo"))
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "config.json").write_text("{}")  # it had begun
    config.resume, train = True, Trainer({"rloo": 0.5, "grpo": 0.5, "reinforce": 0.5})
    compare(config, train)
    assert [asked.resume for asked in train.asked] == [True, True, False]
    assert "grpo" in capsys.readouterr().out.splitlines()[-1]


def test_the_real_rows_start_from_the_same_base_with_the_same_random_numbers(tiny_run, tmp_path, quick, capsys):
    """And one that was finished resumes to itself, unchanged."""
    out, flags = tmp_path / "both", [*tiny_run[2], "--steps", "2", "--sync-interval", "2", "--save-every", "2"]
    lm.main([*flags, "--compare", "reinforce,rec-twoside-nois", "--out", str(out)])
    first, second = out / "reinforce", out / "rec-twoside-nois"
    assert lines(first / "metrics.jsonl")[0] == lines(second / "metrics.jsonl")[0]
    asked = [[s["question"] for s in lines(folder / "samples.jsonl")] for folder in (first, second)]
    assert asked[0] == asked[1]
    begun = [[s["response"] for s in lines(folder / "samples.jsonl") if s["step"] == 1] for folder in (first, second)]
    assert begun[0] == begun[1]
    assert json.loads((first / "config.json").read_text(encoding="utf-8"))["algorithm"] == "reinforce"
    before = (first / "metrics.jsonl").read_bytes()
    lm.main(["--resume", "--out", str(out)])
    assert (first / "metrics.jsonl").read_bytes() == before
    last = capsys.readouterr().out.splitlines()[-1]
    assert "reinforce" in last and "rec-twoside-nois" in last and "→" in last


def test_a_process_without_a_result_prints_none(capsys):
    print_result({}, lm.Config())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("settings, words", [
    ({}, "fresh"), ({"offline": True, "sync_offset": 3}, "never refreshed"),
    ({"sync_interval": 20}, "refreshed every 20 steps"),
    ({"sync_offset": 3}, "refreshed every 1 steps, 3 batches late"),
    ({"sync_interval": 4, "sync_offset": 8}, "refreshed every 4 steps, 8 batches late"),
])
def test_staleness_in_words(settings, words):
    assert staleness_text(lm.Config(**settings)) == words
