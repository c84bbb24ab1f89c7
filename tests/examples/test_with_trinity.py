"""--export trinity: what Trinity's own classes make of the file is our row, and the rows it lacks are named."""

import dataclasses
import importlib
import json

import pytest
import yaml
from conftest import ROOT
from other_trainers import ask  # noqa: F401 (fixture)

from under_the_hood.export import missing_in_trinity
from under_the_hood import export as trinity

lm = importlib.import_module("06_full_llm_training")
LACKS = {  # row → a word of the reason
    "red-weight-adaptive": "lengths", "dr-grpo": "constant", "gmpo": "geometric", "topr": "whole response",
    "reinforce-plus-plus": "batch", "ngrpo": "virtual", "tic-grpo": "per token", "dapo": "flat groups",
    "noise-corrected-grpo": "error rates", "sgpo": "all-wrong", "aepo": "second batch", "icpo": "worked examples",
    "ep-grpo": "entropy"}
HAS = sorted(name for name, row in lm.ALGORITHMS.items() if not missing_in_trinity(row))


def export(folder, *flags):
    lm.main(["--export", "trinity", "--model", "some/model", "--out", str(folder), *map(str, flags)])
    return yaml.safe_load((folder / "trinity.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The folder with a file for every row that Trinity has, and name → what is in it."""
    folder = tmp_path_factory.mktemp("trinity")
    return folder, {name: export(folder / name, "--algorithm", name, "--sync-interval", 20, "--sync-offset", 3)
                    for name in HAS}


@pytest.mark.parametrize("name", sorted(LACKS))
def test_a_row_that_trinity_lacks_is_refused_and_named(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        export(tmp_path, "--algorithm", name)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: Trinity-RFT has no setting for this row")
    assert LACKS[name] in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("change, word", [
    ({"process_weight": 0.5}, "from entropy"), ({"entropy_target": 0.5}, "second batch"), ({"graded": True}, "all-wrong"),
    ({"worked_examples": 1}, "worked examples"), ({"correct_noise": True}, "error rates"),
    ({"refill": True}, "flat groups"), ({"overlong_share": 0.2}, "length penalty"),
    ({"per_token_reward": True}, "per token"), ({"baseline": "virtual"}, "virtual"), ({"baseline": "batch"}, "batch's"),
    ({"shaping": "adaptive-weight"}, "lengths"), ({"weight": "capped-mean"}, "geometric"),
    ({"level": "trajectory"}, "whole response"), ({"aggregation": "constant"}, "the mean constant"),
    ({"aggregation": "seq-mean-token-sum"}, "the mean seq"), ({"aggregation": "seq-mean-token-mean"}, "the mean seq"),
    ({"level": "sequence"}, "nothing else of it"), ({"level": "sequence", "clip": "one_side"}, "nothing else of it"),
    ({"tau": 0.5, "beta": 0.5}, "two regularisers"),
    *[({"weight": "ratio", "weight_cap": 2.0, **more}, "capped") for more in ({"clip": "one_side"}, {"tau": 0.5},
                                                                              {"beta": 0.5})],
    ({"shaping": "weight", "weight": "ratio"}, "RED's weight"),
    *[({"clip": "one_side", **more}, "ε of 0") for more in ({"eps_low": 0.0}, {"eps_low": 1.5}, {"eps_high": 0.0})]])
def test_each_setting_that_trinity_lacks_is_a_reason_of_its_own(change, word):
    row = dataclasses.replace(lm.ALGORITHMS["reinforce"], **change)
    assert word in trinity.missing_in_trinity(row)


@pytest.mark.parametrize("change", [
    {}, {"tau": 0.5}, {"beta": 0.5}, {"clip": "one_side", "eps_low": 1.0}, {"weight": "ratio", "weight_cap": 2.0},
    {"weight": "ratio", "clip": "ring", "beta": 0.5}, {"shaping": "weight"}, {"shaping": "drop"}, {"eps_low": 0.0},
    {"level": "sequence", "clip": "one_side", "aggregation": "seq-mean-token-mean"}])
def test_a_setting_that_trinity_has_is_no_reason(change):
    assert trinity.missing_in_trinity(dataclasses.replace(lm.ALGORITHMS["reinforce"], **change)) is None


# Row → clip_mode, weight, regularizer, its coefficient and std_normalize, from the names that the paper's code uses.
SETTINGS = {
    "reinforce": ("none", "none", "none", 0, False), "reinforce-is": ("none", "importance_sampling", "none", 0, False),
    "grpo": ("one-side", "importance_sampling", "none", 0, True),
    "rec-oneside-is": ("one-side", "importance_sampling", "none", 0, False),
    "rec-oneside-nois": ("one-side", "none", "none", 0, False),
    "rec-twoside-is": ("two-side", "importance_sampling", "none", 0, False),
    "rec-twoside-nois": ("two-side", "none", "none", 0, False),
    "rec-ring-is": ("ring", "importance_sampling", "none", 0, False),
    "rec-ring-nois": ("ring", "none", "none", 0, False),
    "rec-gspo-is": ("gspo-one-side", "gspo_importance_sampling", "none", 0, False),
    "rec-gspo-nois": ("gspo-one-side", "none", "none", 0, False),
    "gspo": ("gspo-one-side", "gspo_importance_sampling", "none", 0, True),
    "rep-opmd": ("none", "none", "k2", 0.1, False),  # there without the ½: τ/2
    "rep-asymre": ("none", "none", "forward-kl", 0.1, False),
    "red-drop": ("none", "none", "none", 0, False), "red-weight": ("none", "advantage", "none", 0, False),
    "red-weight-oneside": ("one-side", "advantage", "none", 0, False)}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_row_in_the_names_of_the_papers_code(name, exported):
    algorithm = exported[1][name]["algorithm"]
    loss, advantage = algorithm["policy_loss_fn_args"], algorithm["advantage_fn_args"]
    assert (loss["clip_mode"], loss["weight"], loss["regularizer"], loss["regularizer_coef"],
            advantage["std_normalize"]) == SETTINGS[name]
    assert advantage["drop"] == ("balance" if name == "red-drop" else None)


def test_no_row_of_the_tables_here_is_lost():
    """A new row may be absent from both: the slow test below compares it with Trinity's own classes."""
    assert set(SETTINGS) | {"rloo", "cispo", "tis"} <= set(HAS) and LACKS.keys() <= lm.ALGORITHMS.keys() - set(HAS)


def test_flags_that_change_the_row_change_the_file(tmp_path):
    loss = export(tmp_path, "--algorithm", "rec-ring-is", "--eps-low", 0.1, "--eps-high", 0.3, "--outer-low", 0.5,
                  "--outer-high", 4)["algorithm"]["policy_loss_fn_args"]
    assert [loss[f"epsilon_{side}"] for side in ("low", "high", "low_prime", "high_prime")] == [0.1, 0.3, 0.5, 4]


def test_staleness_model_and_questions(exported):
    folder, files = exported
    made = files["rep-opmd"]
    assert made["synchronizer"]["sync_interval"] == 20 and made["synchronizer"]["sync_offset"] == 3
    assert made["model"]["model_path"] == "some/model" and made["algorithm"]["repeat_times"] == 8
    questions = [json.loads(line) for line in
                 (folder / "rep-opmd" / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    task = lm.load_task(lm.Config())
    assert [(q["question"], q["answer"]) for q in questions] == [(e.question, e.answer) for e in task.train]


def test_sampling_is_from_the_whole_distribution_and_evaluation_at_the_next_refresh(tmp_path):
    made = export(tmp_path, "--eval-every", 25, "--sync-interval", 20, "--temperature", 0.7, "--seed", 5)
    for part in (made["model"], made["buffer"]["explorer_input"]["taskset"]["rollout_args"],
                 made["buffer"]["explorer_input"]["eval_tasksets"][0]["rollout_args"]):
        assert (part["temperature"], part["top_p"], part["top_k"]) == (0.7, 1.0, -1)  # −1: no limit
    assert made["explorer"]["eval_interval"] == 40 and made["explorer"]["rollout_model"]["seed"] == 5


def test_offline_is_a_refresh_after_the_last_step(tmp_path):
    made = export(tmp_path, "--offline", "--steps", 30, "--sync-offset", 2)
    interval = made["synchronizer"]["sync_interval"]
    assert all(lm.rollout_version(step, sync_interval=interval, sync_offset=2) == 0 for step in range(1, 31))
    assert made["buffer"]["total_steps"] == interval == 30


@pytest.mark.parametrize("flags, words", [
    (["--export", "verl"], "it can be trinity"), (["--model", "tiny"], "hub model or a directory"),
    (["--model", "x.gguf"], "hub model or a directory"), (["--lora-rank", "8"], "--lora-rank"),
    (["--eps-low", "0"], "ε of 0"), (["--tau", "0.1", "--beta", "0.1"], "two regularisers"),
    (["--on-unscored", "leave-out"], "--on-unscored leave-out"), (["--compare", "grpo,reinforce"], "--compare"),
    (["--chat-template-kwargs", '{"enable_thinking": false, "effort": "low", "tools": null}'], "(effort, tools)"),
    (["--chat-template-kwargs", '{"enable_thinking": "no"}'], "an enable_thinking of 'no'"),
    (["--chat-template-kwargs", "effort=low"], "must be a JSON object"),
    (["--lora-rank", "8", "--on-unscored", "leave-out"], "--lora-rank, nor for --on-unscored"),
])
def test_what_has_no_counterpart_is_one_line(flags, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        lm.main(["--export", "trinity", "--model", "some/model", "--out", str(tmp_path), *flags])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("switches, expected", [("{}", None), ('{"enable_thinking": false}', False),
                                               ('{"enable_thinking": true}', True)])
def test_what_has_a_counterpart_for_chat_models_is_carried_over(switches, expected, tmp_path):
    made = export(tmp_path, "--chat-template-kwargs", switches, "--system-prompt", "Be brief.")
    assert made["model"]["enable_thinking"] is expected
    tasksets = [made["buffer"]["explorer_input"]["taskset"], *made["buffer"]["explorer_input"]["eval_tasksets"]]
    assert [taskset["format"]["system_prompt"] for taskset in tasksets] == ["Be brief."] * 2


def test_a_file_is_not_replaced_unasked(tmp_path, capsys):
    export(tmp_path)
    with pytest.raises(SystemExit):
        export(tmp_path)
    assert "--overwrite" in capsys.readouterr().err
    export(tmp_path, "--overwrite")


@pytest.mark.slow
def test_trinitys_own_classes_make_of_the_file_what_the_row_is_here(exported, ask):  # noqa: F811
    """Its reader takes the file, and its advantages and loss have the row's gradient, on ratios from .05 to 20."""
    answer = ask("trinity_side.py", exported[0])
    assert sorted(answer["rows"]) == HAS
    for name, row in answer["rows"].items():
        assert row["gradient"] < 1e-6 < 1e-3 < row["largest"], name
        assert row["kept"] == [4, 8, 0] if name == "red-drop" else row["advantages"] < 1e-6, name
        # Their forward KL leaves log π_old out, which is a constant; else the value of the loss is the same too.
        assert name == "rep-asymre" or abs(row["loss"]) < 1e-6, name
        assert row["synchronizer"] == [20, 3] and row["extra_terms"] == ["none"] * 3 and row["eval_interval"] == 20
        assert row["batch"] == [32, 8, 120, 1e-4] and row["model"] == "some/model"
    assert answer["reward"] == [{"accuracy": 1.0}, {"accuracy": 1.0}, {"accuracy": 0.0}]


def test_the_page_names_the_rows_that_trinity_lacks():
    text = (ROOT / "examples" / "with_trinity.md").read_text(encoding="utf-8")
    assert [name for name in LACKS if f"`{name}`" not in text] == []
