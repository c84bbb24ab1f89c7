"""What README, RESULTS and docs promise exists: links, make targets, commands with flags that parse, numbers that were measured."""

import importlib
import json
import re
import shlex
import sys

import pytest

from conftest import ROOT

lm = importlib.import_module("06_full_llm_training")
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("experiments/*/README.md")]}
BLOCKS = [line.split(" #")[0].split("  ")[0].strip() for text in PAGES.values()
          for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.replace("\\\n", " ").splitlines()]
INLINE = [command for text in PAGES.values() for command in re.findall(r"`((?:python|make) [^`]+)`", text.replace("\n", " "))]
COMMANDS = sorted({" ".join(command.split()) for command in BLOCKS + INLINE})


def test_the_front_page_is_short():
    lines = README.splitlines()
    assert len(lines) <= 170
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def reading_time(text):
    """Minutes: 200 words of prose and 25 lines of code or of equations; what only draws a picture is passed over."""
    words, lines, drawing = 0, 0, None
    for line in filter(str.strip, text.splitlines()):
        indent = len(line) - len(line.lstrip())
        if drawing is not None and indent > drawing:
            continue
        drawing = indent if line.lstrip() == "if lesson.draws:" else None
        if drawing is not None or line.startswith("# %%"):
            continue
        if line.lstrip().startswith("#") and not line.startswith("#     "):
            words += len(line.split()) - 1
        else:
            lines += 1
    return words / 200 + lines / 25


def test_the_path_is_ninety_minutes_and_no_page_is_longer_than_it_says():
    """A lower bound: maths takes longer than words. The minutes on the page are a reader's."""
    rows = [row.strip("| ").split(" | ") for row in README.split("## Ninety minutes")[1].split("##")[0].splitlines()
            if re.match(r"\| \d", row)]
    assert sum(int(row[0]) for row in rows) == 90
    for minutes, what, *_ in rows:
        number = re.match(r"\**(\d\d)", what)
        if not number:
            continue
        text = next(ROOT.glob(f"{number[1]}_*.py")).read_text(encoding="utf-8")
        parts = re.split(r"(?m)^(?=# ## \d|# %% \d\. -)", text)
        sections = re.search(r"sections (\d) to (\d)", what)
        if sections:
            parts = parts[int(sections[1]):int(sections[2]) + 1]
        assert reading_time("".join(parts)) <= 1.2 * int(minutes), what


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    folder = (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", PAGES[page]) if not link.startswith("http")]
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_every_make_target_exists(command):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in command.split()[1:] if re.match(r"[a-z]", target)), command


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python ") and "…" not in c])
def test_every_command_names_a_script_and_flags_that_it_knows(command):
    script, *flags = shlex.split(command)[1:]
    if not script.endswith(".py"):  # python -m …, or a prompt in a page about the language
        return
    source = (ROOT / script).read_text(encoding="utf-8")
    if script.startswith(("06", "examples/with_")):  # which take the flags of 06
        config = lm.options.parse_arguments(lm.Config, lm.GROUPS, "", lm.METRICS, [re.sub("[<>]", "", flag) for flag in flags])
        assert all(name in lm.ALGORITHMS for name in (config.compare or config.algorithm).split(","))
    else:
        text = source + (ROOT / "utils.py").read_text(encoding="utf-8") * script.startswith("0")
        assert all(f'"{flag}"' in text for flag in flags if flag.startswith("--")), command


def test_the_main_job_table_shows_what_was_measured():
    measured = json.loads((ROOT / "figures" / "data" / "main_job.json").read_text(encoding="utf-8"))
    assert len(measured) == 3
    for row, result in measured.items():
        assert f"| `{row}` | {result['before']:.2f} → {result['after']:.2f} |" in README


def comparisons(name):
    """{(setting, comparison): (mean, low, high)} and {claim: verdict} of a committed table of claims."""
    text = (ROOT / "figures" / "data" / f"{name}_claims.md").read_text(encoding="utf-8")
    found = re.findall(r"[✓✗?] ([^:|<]+): ([^<|]+?) ([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]", text)
    verdicts = dict(re.findall(r"^\| \*\*(P\d)\*\*.*\*\*([a-z ]+)\*\* \| `", text, re.M))
    return {(setting, what): tuple(map(float, numbers)) for setting, what, *numbers in found}, verdicts


def test_the_verdicts_on_the_front_page_are_those_of_the_tables():
    for column, name in ((3, "paper"), (4, "hard")):
        verdicts = comparisons(name)[1]
        rows = [line.split("|") for line in README.splitlines() if re.match(r"\| P\d \|", line)]
        assert {row[1].strip(): re.match(r" \**([a-z ]+?)\**(?::| *$)", row[column])[1].strip() for row in rows} == verdicts


# What the text says → the comparison that it speaks of: (table, setting, what, digits).
SAID = {
    "+.24 [+.21, +.26]": ("paper", "refreshed every 20 steps", "rec-oneside-nois − reinforce"),
    "+.35 [+.27, +.43]": ("paper", "10 batches late", "rec-oneside-nois − reinforce"),
    "+.04 [+.01, +.08]": ("hard", "10 batches late", "rec-oneside-nois − reinforce"),
    "+.001 [−.014, +.015]": ("paper", "refreshed every 20 steps", "rec-oneside-nois − rec-oneside-is"),
    "+.022 [+.008, +.036]": ("paper", "10 batches late", "rec-oneside-nois − rec-oneside-is"),
    "+.008 [−.007, +.024]": ("paper", "never refreshed", "rec-oneside-nois − rec-oneside-is"),
    "+.22 [+.19, +.24]": ("paper", "refreshed every 20 steps", "rep-opmd − reinforce"),
    "+.15 [+.14, +.17]": ("paper", "never refreshed", "rep-opmd − reinforce"),
    "+.18 [+.15, +.21]": ("paper", "refreshed every 20 steps", "rep-asymre − reinforce"),
    "+.09 [+.05, +.12]": ("paper", "never refreshed", "rep-asymre − reinforce"),
    "−.23 [−.27, −.20]": ("paper", "refreshed every 20 steps", "red-drop − grpo"),
    "−.035 [−.049, −.022]": ("paper", "refreshed every 20 steps", "red-weight − grpo"),
}


@pytest.mark.parametrize("text", SAID)
def test_a_number_of_the_advice_is_the_tables(text):
    table, setting, what = SAID[text]
    said = [float(number.replace("−", "-")) for number in re.findall(r"[+−]\.\d+", text)]
    digits = len(re.search(r"\.(\d+)", text)[1])
    assert text in " ".join(RESULTS.split())
    assert all(abs(a - b) <= 0.5 * 10**-digits + 6e-4 for a, b in zip(said, comparisons(table)[0][setting, what], strict=True))


def test_every_interval_of_the_advice_is_held_by_the_test_above():
    advice = " ".join(RESULTS.partition("## What to do")[2].partition("When does a clip")[0].split())
    assert set(re.findall(r"[+−]\.\d+ \[[+−]\.\d+, [+−]\.\d+\]", advice)) == set(SAID)


def test_how_many_runs_lost_what_they_had_learned():
    sys.path.insert(0, str(ROOT))
    claims = importlib.import_module("experiments.claims")
    near = far = lost_near = lost_far = 0
    grid = claims.load_grid("paper")
    for row in sorted({line["row"] for line in grid}):
        for setting in claims.STALE:
            distance = claims.np.nanmax(claims.curves(grid, row, setting, "kl_old")[1], axis=1)
            lost = claims.drop_from_peak(grid, row, setting) > 0.05
            near, far = near + (distance <= 0.1).sum(), far + (distance > 0.1).sum()
            lost_near, lost_far = lost_near + lost[distance <= 0.1].sum(), lost_far + lost[distance > 0.1].sum()
    words = " ".join(RESULTS.split())
    assert lost_near == 0 and f"Of {near} stale runs" in words and f"of {far} that went farther {lost_far} did" in words


def test_the_speeds_are_those_of_the_committed_measurement():
    result = json.loads((ROOT / "benchmarks" / "results" / "rl_step.json").read_text(encoding="utf-8"))
    page = PAGES["benchmarks/README.md"]
    low, middle, high = result["ratio_quartiles"]
    assert f"| **{middle:.3f}** | quartiles {low:.3f} – {high:.3f} |" in page and result["ratio"] == middle
    assert f"| this project | {1e3 * result['ours_s']:.0f} ms | {1e3 * result['collect_s']:.0f} ms" in page
    assert f"everything optional off | {1e3 * result['trl_s']:.0f} ms |" in page
    assert f"| {1e3 * result['floor_s']:.0f} ms | a step takes {result['over_floor']:.1f} times that" in page
    assert f"| {1e3 * result['products_s']:.0f} ms | a step takes {result['over_products']:.1f} times that" in page


def test_growth_and_memory_are_those_of_the_committed_measurements():
    results, words = ROOT / "benchmarks" / "results", " ".join(PAGES["benchmarks/README.md"].split())
    growth = json.loads((results / "scaling.json").read_text(encoding="utf-8"))["quantities"]
    for name, quantity in (("group size", "group_size"), ("response", "response_length"), ("prompt", "prompt_length"),
                           ("vocabulary", "vocabulary")):
        exponents = " and ".join(f"{growth[quantity][part]['exponent']:.1f}" for part in ("collect", "train"))
        assert f"{name} {exponents}" in words, name
    memory = json.loads((results / "logprobs.json").read_text(encoding="utf-8"))
    ours, plain = memory["ways"]["ours"], memory["ways"]["plain"]
    assert f"{memory['batch']} × {memory['length']} tokens" in words and ours["peak_in_copies"] < 1 / 8
    assert f"take {ours['extra_peak_bytes'] / 1e9:.2f} GB beyond the model" in words
    assert f"{plain['extra_peak_bytes'] / 1e9:.1f} GB for a plain log-softmax" in words
    assert f"in {ours['ratio_to_plain']:.2f} times the plain one's time" in words


def test_the_table_of_architectures_is_counted_right():
    rows = re.findall(r"^\| .+? \| `\w+` \| (\w+) \|", PAGES["docs/architectures.md"], re.M)
    trained = sum(engine != "refused" for engine in rows)
    assert f"{trained} of {len(rows)} families" in README and f"{len(rows)} families, of which {trained} train" in " ".join(
        PAGES["docs/real_models.md"].split())
