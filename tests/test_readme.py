"""What the README promises exists: links, make targets, commands with flags that parse, and numbers that were measured."""

import importlib
import json
import pathlib
import re
import shlex

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
INLINE = re.findall(r"`((?:python|make|torchrun) [^`]+)`", README.replace("\n", " "))


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#\s]+)\)", README)
    assert len(links) > 10
    missing = [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS + INLINE if c.startswith("make ")}))
def test_every_make_target_exists(command):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{command.split()[1]}:", makefile, re.M), command


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS + INLINE if c.startswith("python ")}))
def test_every_command_names_a_script_and_flags_that_it_knows(command, capsys):
    script, *flags = shlex.split(command)[1:]
    assert (ROOT / script).exists(), command
    if script.startswith("06"):
        lesson = importlib.import_module("06_full_llm_training")
        lesson.validate(lesson.parse_arguments([flag.replace("<", "").replace(">", "") for flag in flags]))
    elif script.startswith("0"):
        importlib.import_module("utils").lesson_arguments("", flags)
    else:
        source = (ROOT / script).read_text(encoding="utf-8")
        assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--"))


def test_the_main_job_table_shows_what_was_measured():
    measured = json.loads((ROOT / "figures" / "data" / "main_job.json").read_text(encoding="utf-8"))
    assert len(measured) == 3
    for row, result in measured.items():
        assert f"| `{row}` | {result['before']:.2f} → {result['after']:.2f} |" in README


def test_the_speeds_are_those_of_the_committed_measurement():
    result = json.loads((ROOT / "benchmarks" / "results" / "rl_step.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    low, middle, high = result["ratio_quartiles"]
    assert f"| **{middle:.3f}** | quartiles {low:.3f} – {high:.3f} |" in readme and result["ratio"] == middle
    assert f"| this project | {1e3 * result['ours_s']:.0f} ms | {1e3 * result['collect_s']:.0f} ms" in readme
    assert f"everything optional off | {1e3 * result['trl_s']:.0f} ms |" in readme
    assert f"| {1e3 * result['floor_s']:.0f} ms | a step takes {result['over_floor']:.1f} times that" in readme
    assert f"| {1e3 * result['products_s']:.0f} ms | a step takes {result['over_products']:.1f} times that" in readme


def test_growth_and_memory_are_those_of_the_committed_measurements():
    results, words = ROOT / "benchmarks" / "results", " ".join(README.split())
    growth = json.loads((results / "scaling.json").read_text(encoding="utf-8"))["quantities"]
    for name, quantity in (("group size", "group_size"), ("response", "response_length"), ("prompt", "prompt_length"), ("vocabulary", "vocabulary")):
        exponents = " and ".join(f"{growth[quantity][part]['exponent']:.1f}" for part in ("collect", "train"))
        assert f"{name} {exponents}" in words, name
    memory = json.loads((results / "logprobs.json").read_text(encoding="utf-8"))
    ours, plain = memory["ways"]["ours"], memory["ways"]["plain"]
    assert f"{memory['batch']} × {memory['length']} tokens" in words and ours["peak_in_copies"] < 1 / 8
    assert f"take {ours['extra_peak_bytes'] / 1e9:.2f} GB beyond the model" in words
    assert f"{plain['extra_peak_bytes'] / 1e9:.1f} GB for a plain log-softmax" in words
    assert f"in {ours['ratio_to_plain']:.2f} times the plain one's time" in words
