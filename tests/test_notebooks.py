"""Equations into LaTeX (docs/maths.py); the notebooks of the lessons and of the tour run alone, with all they show."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import maths
import notebooks

PROSE = {path.name: [cell.source for cell in notebooks.jupytext.read(path).cells if cell.cell_type == "markdown"]
         for path in [*notebooks.LESSONS, notebooks.TOUR]}

# The way back, written separately: what a reader sees of a LaTeX command.
SEEN = {r"\cdot": "·", r"\sum": "Σ", r"\prod": "Π", r"\nabla": "∇", r"\le": "≤", r"\ge": "≥", r"\ne": "≠", r"\lt": "<",
        r"\gt": ">", r"\to": "→", r"\in": "∈", r"\approx": "≈", r"\sim": "~", r"\Vert": "‖", r"\mid": "|", r"\odot": "⊙", r"\cdots": "⋯",
        r"\ldots": "…", r"\lfloor": "⌊", r"\rfloor": "⌋", r"\ell": "ℓ", r"\mathcal{T}": "𝒯", r"\log": "log",
        r"\exp": "exp", r"\max": "max", r"\min": "min", r"\tfrac{1}{2}": "½", r"\tfrac{1}{3}": "⅓", r"\qquad": "",
        r"\varepsilon": "ε", r"\theta": "θ", r"\pi": "π", r"\tau": "τ", r"\rho": "ρ", r"\chi": "χ", r"\mu": "μ",
        r"\sigma": "σ", r"\zeta": "ζ", r"\beta": "β", r"\kappa": "κ", r"\lambda": "λ", r"\eta": "η"}


def read_back(latex):
    """LaTeX → the signs that a reader sees, in order, without spaces, underscores and roofs of powers."""
    latex = re.sub(r"\\(begin|end)\{aligned\}|\\\\|&", "", latex)
    latex = re.sub(r"\\(text|operatorname)\{([^{}]*)\}", r"\2", latex)
    latex = re.sub(r"\\sqrt\{([^{}]*)\}", r"√(\1)", latex)
    latex = re.sub(r"\\bar\{(.)\}", "\\1\u0304", re.sub(r"\\hat\{(.)\}", "\\1\u0302", latex))
    for command, sign in sorted(SEEN.items(), key=lambda pair: -len(pair[0])):
        latex = re.sub(re.escape(command) + r"(?![A-Za-z])", sign, latex)
    assert "\\" not in latex, latex
    return re.sub(r"[\s_^{}]", "", latex).replace("-", "−")


def as_seen(block):
    block = maths.unicodedata.normalize("NFC", block)
    for sign, plain in {"²": "2", "₁": "1", "₂": "2", "₊": "+", "₋": "−", "ā": "a\u0304", "ū": "u\u0304"}.items():
        block = block.replace(sign, plain)
    return re.sub(r"[\s_^{}]", "", block).replace("-", "−")


def indented(prose):
    """The indented blocks, split where a line is empty."""
    return [block.strip("\n") for block in re.findall(r"(?:^    .*\n?)+", prose, re.M)]


@pytest.mark.parametrize("name", PROSE)
def test_no_sign_of_an_equation_is_lost_or_moved(name):
    for prose in PROSE[name]:
        for block in indented(prose):
            for rows in maths.head_and_table(block.split("\n")):
                try:
                    latex = maths.block_latex(rows)
                except maths.NotAnEquation:
                    continue
                assert read_back(latex) == as_seen("\n".join(rows))


def test_all_equations_are_converted_and_only_tables_stay():
    left = [block.split("\n") for name in PROSE for prose in PROSE[name] for block in
            re.findall(r"```text\n(.*?)\n```", maths.blocks(prose), re.S)]
    for rows in left:
        assert len(rows) > 1 and any(re.search(r"\S {3,}\S", row) for row in rows[1:]), rows
    whole = "".join(maths.blocks(prose) for page in PROSE.values() for prose in page)
    assert whole.count("$$") > 80 and not re.search("^    ", re.sub("(?s)```.*?```", "", whole), re.M)


@pytest.mark.parametrize("source, latex", [
    ("    A > 0", r"A \gt 0"),
    ("    π*(y) = π_t(y)·exp(r(y)/τ) / Z      (3.2)",
     r"\pi ^{*}(y) = \pi _{t}(y)\cdot \exp (r(y)/\tau ) / Z \qquad (3.2)"),
    ("    r̄_w = σ(logit p + 1/T)", r"\bar{r}_{w} = \sigma (\operatorname{logit} p + 1/T)"),
    ("    1/√(p(1−p)), p = p_{n−1}", r"1/\sqrt{p(1-p)}, p = p_{n-1}"),
    ("    p_ref·w_ij,   for any two", r"p_{\text{ref}}\cdot w_{ij}, \qquad \text{for any two}"),
    ("    x = 1\n      = 2      (1.1)", "\\begin{aligned}\nx & = 1 \\\\\n & = 2 && (1.1)\n\\end{aligned}"),
])
def test_conversion_by_hand(source, latex):
    assert maths.block_latex(source.split("\n")) == latex


def test_an_equation_above_a_table():
    text = maths.blocks("    x = 1      (4.9)\n    n   1   2\n    m   3   4\n")
    assert text == "$$\nx = 1 \\qquad (4.9)\n$$\n\n```text\nn   1   2\nm   3   4\n```\n"


@pytest.mark.parametrize("source", ["    a = 1    b    c\n    d = 2    e    f\n    g = 3    h    i", "    x = 1 ☃"])
def test_what_is_no_equation_is_refused(source):
    with pytest.raises(maths.NotAnEquation):
        maths.block_latex(source.split("\n"))


@pytest.mark.parametrize("text, html", [
    ("log π_θ(y_i) and Σ_t s_t", "log π<sub>θ</sub>(y<sub>i</sub>) and Σ<sub>t</sub> s<sub>t</sub>"),
    ("J = E_{y~π_b} r", "J = E<sub>y~π<sub>b</sub></sub> r"), ("(1+ε)^T", "(1+ε)<sup>T</sup>"),
    ("(.52/.6)^(T−1)", "(.52/.6)<sup>T−1</sup>"), ("π_old and r̄_w", "π<sub>old</sub> and r̄<sub>w</sub>"),
    ("stale_world.py, `r_i`, eps_low, old_logprobs", "stale_world.py, `r_i`, eps_low, old_logprobs"),
    ("[x](a_b.md)", "[x](a_b.md)"), (".6·e^1.6 = 3", ".6·e<sup>1.6</sup> = 3"), ("e^1. So", "e<sup>1</sup>. So"),
    ("so\n\n    J = π_t\n\nand π_t", "so\n\n    J = π_t\n\nand π<sub>t</sub>")])
def test_subscripts_in_sentences(text, html):
    assert maths.inline(text) == html


def sections(notebook):
    """heading → the outputs below it, up to the next heading."""
    found, heading = {}, None
    for cell in notebook.cells:
        match = cell.cell_type == "markdown" and re.search(r"^## (.*)$", cell.source, re.M)
        heading = match.group(1) if match else heading
        if heading:
            found.setdefault(heading, [])
            found[heading] += cell.get("outputs", [])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("script", notebooks.LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_alone_and_shows_numbers_and_pictures(script, tmp_path):
    """In an empty folder: what it imports it brings along, as it must on Colab."""
    shown = sections(notebooks.execute(notebooks.to_notebook(script), tmp_path))
    parts = re.split(r'(?m)^lesson\.section\("(.*?)"\)', script.read_text(encoding="utf-8"))
    assert list(shown) == parts[1::2]
    for heading, code in zip(parts[1::2], parts[2::2]):
        text = "".join(output.get("text", "") for output in shown[heading])
        assert re.search(r"(?m)^  .*: .*\d", text), f"{heading}: no number"
        assert ("  → " in text) == ("lesson.say(" in code), f"{heading}: what it means"
        pictures = sum("image/png" in output.get("data", {}) for output in shown[heading])
        assert pictures == len(re.findall(r"lesson\.save_figure\(", code)), f"{heading}: {pictures} pictures"
        assert "FAILED" not in text
    last = "".join(output.get("text", "") for output in list(shown.values())[-1])
    assert re.search(r"(\d+) of \1 claims hold, 0 failed", last)


@pytest.mark.slow
def test_the_tour_runs_alone(tmp_path):
    notebook = notebooks.to_notebook(notebooks.TOUR)
    for cell in notebook.cells:  # the small model that is already made, where there is one
        cell.source = cell.source.replace("eval_samples=2)", f"eval_samples=2, cache_dir={str(ROOT / 'cache')!r})", 1)
    shown = sections(notebooks.execute(notebook, tmp_path))
    assert len(shown) == 6 and all(shown.values())
    assert sum("image/png" in output.get("data", {}) for outputs in shown.values() for output in outputs) == 2
    assert (tmp_path / "under_the_hood" / "fast.py").exists()


def test_the_same_files_are_carried_in_the_same_bytes():
    files = notebooks.carried(notebooks.LESSONS[0])
    assert notebooks.carrier(files).source == notebooks.carrier(files).source
    assert {path.name for path in files} == {"utils.py", "stale_world.py"}
