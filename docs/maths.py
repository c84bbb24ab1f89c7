"""Unicode equations of the lessons' prose into LaTeX, when notebooks and the site are built; no lesson changes.

An indented block of a lesson is an equation, a derivation with a line for each step, or a table. Equations become
$$ … $$ (`blocks`), tables stay as they are. Inside a sentence, where nothing marks what is mathematics, only
subscripts and superscripts are set, as <sub> and <sup> (`inline`).
"""

import re
import unicodedata

RELATIONS = {"=": "=", "≤": r"\le", "≥": r"\ge", "≠": r"\ne", "≈": r"\approx", "<": r"\lt", ">": r"\gt", "→": r"\to",
             "∈": r"\in", "~": r"\sim"}
SIGNS = {"·": r"\cdot", "−": "-", "‖": r"\Vert", "⊙": r"\odot", "⋯": r"\cdots", "…": r"\ldots", "⌊": r"\lfloor",
         "⌋": r"\rfloor", "Σ": r"\sum", "Π": r"\prod", "∇": r"\nabla", "ℓ": r"\ell", "𝒯": r"\mathcal{T}",
         "½": r"\tfrac{1}{2}", "⅓": r"\tfrac{1}{3}", "¼": r"\tfrac{1}{4}", "⅔": r"\tfrac{2}{3}", "¾": r"\tfrac{3}{4}",
         "²": "^{2}", "₁": "_{1}", "₂": "_{2}", "₊": "_{+}", "₋": "_{-}", "*": "^{*}", "'": "'", "+": "+", "/": "/",
         "(": "(", ")": ")", "[": "[", "]": "]", ",": ",", ".": ".", ":": ":", ";": ";"}
GREEK = {letter: "\\" + unicodedata.name(letter).split()[-1].lower() for letter in "αβγδεζηθκλμνξπρστφχψω"}
GREEK["ε"], GREEK["λ"] = r"\varepsilon", r"\lambda"
ACCENTS = {"\u0304": r"\bar", "\u0302": r"\hat"}
FUNCTIONS = {"log", "exp", "max", "min"}
OPERATORS = {"Var", "Cov", "KL", "logit", "mean"}
GAP = re.compile(r"(?<=[^\s=≤≠≥]) {3,}(?=[^\s=≤≠≥])")  # not the room around a relation
NUMBER = re.compile(r"\s{2,}(\(\d\.\d+\))$")


class NotAnEquation(ValueError):
    """A table, or a sign that has no translation here."""


def group(text, start):
    """What a _ or ^ at start − 1 applies to: (content, end)."""
    if text[start] == "{":
        depth = 0
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start + 1:end], end + 1
    match = re.compile(r"[A-Za-z]+|.").match(text, start)
    return match.group(), match.end()


def closing(text, start):
    """Where the bracket that opens at start closes."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if depth == 0:
            return end
    raise NotAnEquation(f"unbalanced: {text}")


def latex(text, *, script=False):
    """One line of Unicode mathematics → LaTeX. In a script, letters side by side are indices, not a word."""
    out, at = [], 0
    while at < len(text):
        sign, base = text[at], unicodedata.normalize("NFD", text[at])
        word = re.compile(r"[A-Za-z]{2,}(-[A-Za-z]+)*|a(?= [a-z]{2})").match(text, at)  # "a number" holds no variable a
        if word and not (script and word.group() not in {"ref", "old", "opmd"}):
            at = word.end()
            if word.group() in FUNCTIONS:
                out.append(f"\\{word.group()} ")
            elif word.group() in OPERATORS:
                out.append(rf"\operatorname{{{word.group()}}}")
            else:  # words side by side are one text, with the space before and after
                more = re.compile(r"( [A-Za-z]{2,}(-[A-Za-z]+)*(?![(_]))*").match(text, at)
                said, at = word.group() + more.group(), more.end()
                before = " " if out and text[word.start() - 1] == " " else ""
                after = " " if text[at:at + 1] == " " else ""
                out.append(rf"\text{{{before}{said}{after}}}")
            continue
        at += 1
        if sign == " ":
            out.append(" ")
        elif sign == "|":
            out.append(r"\mid " if text[at - 2:at + 1] == " | " else "|")
        elif sign in "_^":
            content, at = group(text, at)
            out.append(f"{sign}{{{latex(content, script=True).strip()}}}")
        elif sign == "√":
            end = closing(text, at)
            out.append(rf"\sqrt{{{latex(text[at + 1:end])}}}")
            at = end + 1
        elif sign in RELATIONS or sign in SIGNS or sign in GREEK:
            command = RELATIONS.get(sign) or SIGNS.get(sign) or GREEK[sign]
            if at < len(text) and text[at] in ACCENTS:
                command, at = f"{ACCENTS[text[at]]}{{{command}}}", at + 1
            out.append(command + (" " if command[-1].isalpha() else ""))
        elif sign.isdigit() and sign.isascii():
            out.append(sign)
        elif base[0].isascii() and base[0].isalpha():
            accents = base[1:]
            while at < len(text) and text[at] in ACCENTS:
                accents, at = accents + text[at], at + 1
            for accent in accents:
                if accent not in ACCENTS:
                    raise NotAnEquation(f"{accent!r} on {base[0]}")
                base = f"{ACCENTS[accent]}{{{base[0]}}}"
            out.append(base)
        else:
            raise NotAnEquation(f"no LaTeX for {sign!r} in: {text}")
    return re.sub(" +", " ", "".join(out))


def block_latex(lines):
    """The lines of an indented block, none of them empty → LaTeX without the dollars, or NotAnEquation."""
    rows = [unicodedata.normalize("NFC", line.rstrip()) for line in lines]
    numbers = [(NUMBER.search(row) or [None, ""])[1] for row in rows]
    rows = [NUMBER.sub("", row) for row in rows]
    if sum(bool(GAP.search(row.strip())) for row in rows) > 2:
        raise NotAnEquation("a table")
    relation = re.compile("[=≤≠≥]")
    if len(rows) > 1 and not all(relation.search(row) for row in rows):
        raise NotAnEquation("a line of words below an equation")
    first = [relation.search(row) for row in rows]
    aligned = len(rows) > 1 and all(row.strip()[0] == here.group() or abs(here.start() - first[0].start()) <= 1
                                    for row, here in zip(rows, first))
    parts = []
    for row, number, here in zip(rows, numbers, first):
        pieces = [row[:here.start()], row[here.start():]] if aligned else ["", row]
        left, right = (r" \qquad ".join(latex(chunk.strip()) for chunk in GAP.split(piece.strip())) if piece.strip()
                       else "" for piece in pieces)
        if len(rows) == 1:
            return right + (rf" \qquad {number}" if number else "")
        parts.append(f"{left} & {right}" + (f" && {number}" if number else ""))
    return "\\begin{aligned}\n" + " \\\\\n".join(parts) + "\n\\end{aligned}"


def head_and_table(rows):
    """A numbered equation with a table below it, as far to the left, is two blocks."""
    indents = [len(row) - len(row.lstrip()) for row in rows[:2]]
    if len(rows) > 1 and NUMBER.search(rows[0]) and indents[0] == indents[1] and any(
            len(re.findall(r"\S {3,}(?=\S)", row)) > 1 for row in rows[1:]):
        return [rows[:1], rows[1:]]
    return [rows]


def blocks(markdown):
    """Prose with indented blocks → the same with $$ … $$ in place of those that are equations."""
    lines, out, at = markdown.split("\n"), [], 0
    while at < len(lines):
        if not lines[at].startswith("    "):
            out.append(lines[at])
            at += 1
            continue
        end = at
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
            end += 1
        for block in re.split(r"\n\s*\n", "\n".join(lines[at:end]).rstrip()):
            for rows in head_and_table(block.split("\n")):
                try:
                    out += ["$$", block_latex(rows), "$$", ""]
                except NotAnEquation:
                    out += ["```text", *(row[4:] for row in rows), "```", ""]
        at = end
    return "\n".join(out)


LETTER = "(?<![A-Za-z0-9_])[A-Za-zΑ-ωℓ𝒯∇ΣΠ][\u0304\u0302]?|[āū]|[])}]"
SCRIPT = re.compile(rf"({LETTER})([_^])(\{{[^{{}}]+\}}|\([^()]+\)|<t|old|ref|opmd|[0-9]*\.[0-9]+"
                    r"|[A-Za-z0-9θπτ]{1,2}(?![A-Za-z0-9_]))")
KEPT = re.compile(r"(```.*?```|^ {4}[^\n]*|`[^`]*`|\]\([^)]*\)|\$\$.*?\$\$)", re.S | re.M)


def inline(markdown):
    """r_i → r<sub>i</sub>, π_θ, E_{y~π}, (1+ε)^T … in sentences; code, links and equations stay as they are."""
    def scripts(text):
        def one(match):
            letter, kind, content = match.groups()
            content = content[1:-1] if content[0] in "{(" else content.replace("<", "&lt;")
            tag = "sub" if kind == "_" else "sup"
            return f"{letter}<{tag}>{scripts(content)}</{tag}>"
        return SCRIPT.sub(one, text)
    return "".join(part if number % 2 else scripts(scripts(part)) for number, part in enumerate(KEPT.split(markdown)))
