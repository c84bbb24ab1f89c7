"""The site: lessons, family, results, functions to copy, pictures to play with. python docs/build_site.py [--out DIR]

Everything comes from files that are read elsewhere, too: the executed notebooks (notebooks.py), the Markdown pages, the
code of 06. Equations are rendered here, by KaTeX in node, so that a page needs no script for them; the search index is
a script beside the pages. Nothing is fetched from elsewhere when a page is read: it works from a folder, without a net.
"""

import argparse
import ast
import base64
import html
import importlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import nbformat
import pygments
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
import maths

LESSONS = {"01_reinforce": "01 REINFORCE", "02_group_baseline": "02 The group", "03_offpolicy_derivation":
           "03 Off-policy", "04_regularization": "04 Regularise", "05_data_shaping": "05 Shape data",
           "tour_06": "06 A guided tour"}
FAMILY_WORDS = {"REC": "REINFORCE, and clipping: a token that has moved too far from its sampler stops to teach.",
                "REP": "REINFORCE plus a penalty: the farther from the sampler, the harder it is pulled back.",
                "RED": "REINFORCE on shaped data: leave responses out, or count the good ones more.",
                "friends": "Rows that differ in A, M, W or N alone.",
                "neighbours": "Rows that also change the data, the rewards or the batch."}
COPIED = {  # what to take home, by the file that explains it
    "02_group_baseline": ["group_advantages", "aggregate"],
    "03_offpolicy_derivation": ["kl_regularised_optimum", "pairwise_surrogate_loss", "bandit_drift"],
    "04_regularization": ["clip_mask", "clean_tokens", "rec_loss", "opmd_loss", "asymre_loss"],
    "05_data_shaping": ["red_drop", "red_weight", "adaptive_temperature"],
    "06_full_llm_training": ["policy_ratio", "importance_weight", "token_weights", "policy_loss", "completion_mask",
                             "generate", "token_logprobs", "rollout_version", "staleness"]}
PLAY = {"03_offpolicy_derivation": "the-bandit-data-and-rewards", "04_regularization": "the-weight-of-a-token",
        "tour_06": "the-dial-of-staleness"}
PICTURES = (".png", ".svg", ".jpg", ".gif")


class Site:
    """Pages by name, the files they stand for, what they link to, and the equations that wait for KaTeX."""

    def __init__(self, out, notebooks, katex):
        self.out, self.notebooks, self.katex = out, notebooks, katex
        self.pages, self.index, self.equations, self.broken, self.files = {}, [], [], [], {}
        self.waiting = []
        self.markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
        self.markdown.use(dollarmath_plugin, allow_space=True, renderer=self.equation)
        self.markdown.add_render_rule("fence", lambda _, tokens, i, *rest: code(tokens[i].content, tokens[i].info))
        self.markdown.add_render_rule("code_block", lambda _, tokens, i, *rest: code(tokens[i].content, "text"))

    def equation(self, latex, options):
        """A place for the equation. In a display of one line its parts may stand below each other on a phone."""
        if not options["display_mode"]:
            return self.place(latex, False)
        if "\\begin" in latex:
            return f'<div class="equation">{self.place(latex.strip(), True)}</div>'
        parts = [self.place(r"\displaystyle " + part.strip(), False) for part in latex.split(r"\qquad")]
        return '<div class="equation row">' + "".join(f"<span>{part}</span>" for part in parts) + "</div>"

    def place(self, latex, display):
        self.equations.append((latex, display))
        return f"\x02{len(self.equations) - 1}\x03"

    def name_of(self, path):
        """The page of a file or folder of the repository, which is made when something links to it; None: no page."""
        path = path.relative_to(ROOT)
        if path in self.files:
            return self.files[path]
        place = ROOT / path
        if place.is_dir():
            readme = place / "README.md"
            name = self.name_of(readme) if readme.exists() else f"{slug(str(path))}-folder.html"
        else:
            name = f"{slug(str(path.with_suffix('') if path.suffix == '.md' else path))}.html"
        self.files[path] = name
        if not (place.is_dir() and (place / "README.md").exists()):
            self.waiting.append(path)
        return name

    def link(self, target, folder, page):
        """A link or picture of a page whose source lies in folder → where it is on the site."""
        if re.match(r"[a-z]+:|#|//", target):
            return target
        path, _, fragment = target.partition("#")
        place = (folder / path).resolve()
        if not place.exists() or not place.is_relative_to(ROOT):
            self.broken.append(f"{page}: {target}")
            return target
        if place.suffix in PICTURES:
            name = "figures/" + slug(str(place.relative_to(ROOT).parent)).removeprefix("figures") + place.name
            copy(place, self.out / name)
            return name
        return self.name_of(place) + (f"#{fragment}" if fragment else "")

    def page(self, name, title, body, folder=ROOT):
        """Add a page: links resolved, headings with anchors, text into the search index."""
        body = re.sub(r'\b(href|src)="([^"]+)"',
                      lambda m: f'{m[1]}="{html.escape(self.link(html.unescape(m[2]), folder, name))}"', body)
        body = re.sub(r"<table>.*?</table>", lambda m: f'<div class="wide">{m[0]}</div>', body, flags=re.S)
        seen = {}

        def anchor(match):
            words = slug(plain(match[2]), github=True)
            seen[words] = seen.get(words, -1) + 1
            words += f"-{seen[words]}" if seen[words] else ""
            return f'<h{match[1]} id="{words}">{match[2]}</h{match[1]}>'

        body = re.sub(r"<h([1-6])>(.*?)</h\1>", anchor, body, flags=re.S)
        for part in re.split(r"(?=<h[1-3] id=)", body):
            head = re.match(r'<h[1-3] id="(.*?)">(.*?)</h', part, re.S)
            section = plain(head[2]) if head else title
            self.index.append({"url": f"{name}#{head[1]}" if head else name, "page": title, "title": section,
                               "text": plain(part)})
        self.pages[name] = (title, body)

    def markdown_page(self, path):
        text = (ROOT / path).read_text(encoding="utf-8")
        title = (re.search(r"^# (.*)$", text, re.M) or [0, str(path)])[1]
        self.page(self.name_of(ROOT / path), plain(title), self.markdown.render(maths.inline(text)),
                  (ROOT / path).parent)

    def source_page(self, path):
        """A file that is only linked to, as it is; a folder as the list of its files."""
        place = ROOT / path
        if place.is_dir():
            entries = sorted(p for p in place.iterdir() if p.suffix not in (".pyc",) and p.name[0] not in "._")
            body = "".join(f'<li><a href="{p.name}">{p.name}</a></li>' for p in entries)
            return self.page(self.files[path], str(path), f"<h1>{path}</h1><ul>{body}</ul>", place)
        text = place.read_text(encoding="utf-8", errors="replace")
        if len(text) > 200_000:
            text = text[:200_000] + "\n… (cut here)"
        kind = {".py": "python", ".json": "json", ".yaml": "yaml", ".js": "js"}.get(path.suffix, "text")
        self.page(self.files[path], path.name, f"<h1>{path}</h1>{code(text, kind)}", place.parent)

    def notebook_page(self, stem, title):
        path = self.notebooks / f"{stem}.ipynb"
        cells, parts, pictures = nbformat.read(path, 4).cells, [], 0
        copy(path, self.out / path.name)
        heading = title
        for cell in cells:
            if cell.cell_type == "markdown":
                heading = (re.search(r"^#+ (.*)$", cell.source, re.M) or [0, heading])[1]
                parts.append(self.markdown.render(cell.source))
                continue
            if "carried" in cell.metadata.get("tags", []):
                continue
            parts.append(code(cell.source, "python"))
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    pictures += 1
                    name = f"figures/{stem}-{pictures}.png"
                    (self.out / name).parent.mkdir(exist_ok=True)
                    (self.out / name).write_bytes(base64.b64decode(output["data"]["image/png"]))
                    parts.append(f'<img src="site:{name}" alt="Picture of: {html.escape(heading)}">')
                elif output.get("name") == "stdout":
                    parts.append(f'<pre class="output">{html.escape(output["text"].strip(chr(10)))}</pre>')
        source = "06_full_llm_training.py" if stem == "tour_06" else f"{stem}.py"
        links = [f'<a href="{source}">the script</a>', f'<a download href="site:{path.name}">the notebook</a>']
        if stem in PLAY:
            links.append(f'<a href="docs/play.md#{PLAY[stem]}">play with its numbers</a>')
        self.page(f"{stem}.html", title, f'<p class="links">{" · ".join(links)}</p>' + "".join(parts))

    def family_pages(self):
        """One page a group of 06's FAMILIES: every row, what it sets, and the curve of its weight."""
        lm, pictures = (importlib.import_module(name) for name in ("06_full_llm_training", "under_the_hood.pictures"))
        table = {}
        for line in (ROOT / "docs" / "family.md").read_text(encoding="utf-8").splitlines():
            cells = line.strip("| ").split(" | ")
            if line.startswith("| `") and len(cells) == 9:
                table[cells[0].strip("`")] = cells[1:]
        for group, rows in lm.FAMILIES.items():
            body = [(f"<h1>{group}: {len(rows)} rows</h1><p>{FAMILY_WORDS[group]} The curves: what stands before "
                     "a token's ∇log π, over ρ (log scale), for a right answer (blue) and a wrong one.</p>")]
            for name, row in rows.items():
                changed = [f"{field}={value!r}" for field, value in vars(row).items()
                           if value != getattr(lm.Algorithm(), field) and field != "source"]
                cells = dict(zip(("A", "M", "W", "R", "N", "paper", "what it adds", "a number that proves it"),
                                 table.get(name, [])))
                lines = "".join(f"<tr><th>{key}</th><td>{self.markdown.renderInline(maths.inline(value))}</td></tr>"
                                for key, value in cells.items())
                body.append(f"<h2>{name}</h2><div class='row-of-family'>{curve(lm, pictures, row)}"
                            f"<div><table>{lines}</table></div></div>"
                            + code(f"Algorithm({', '.join(changed)})", "python"))
            self.page(f"family-{slug(group)}.html", f"Family: {group}", "".join(body))

    def functions_page(self):
        body = [("<h1>Functions to copy</h1><p>Tensors in, tensors out: no model, tokenizer or configuration inside. "
                 "Each stands here as in the file that explains it; a test holds the copies in other files equal.</p>")]
        for stem, names in COPIED.items():
            text = (ROOT / f"{stem}.py").read_text(encoding="utf-8")
            functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
            body.append(f'<h2>From <a href="{stem}.py">{stem}.py</a></h2>')
            for name in names:
                node = functions[name]
                start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                source = "\n".join(text.splitlines()[start - 1:node.end_lineno])
                said = textwrap.dedent(ast.get_docstring(node) or "").split("\n\n")[0]
                body.append(f'<h3>{name}</h3><p>{maths.inline(html.escape(said, quote=False))}</p>'
                            f'<div class="copyable"><button type="button" class="copy">copy</button>'
                            f'{code(source, "python")}</div>')
        self.page("functions.html", "Functions to copy", "".join(body))

    def navigation(self):
        """Headings and (page, words), only what there is."""
        family = [(f"family-{slug(group)}.html", group) for group in FAMILY_WORDS]
        page = {path.name: name for path, name in self.files.items()}
        parts = {"": [("index.html", "Start")], "Lessons": [(f"{s}.html", words) for s, words in LESSONS.items()],
                 "Play": [(page.get("play.md"), "Play with the numbers"), (page.get("quiz.md"), "Quiz")],
                 "The family": [(page.get("family.md"), "All rows"), *family],
                 "Use it": [(page.get("take_it_home.md"), "Take it home"), ("functions.html", "Functions to copy"),
                            (page.get("real_models.md"), "Real models"), (page.get("gpus.md"), "GPUs")],
                 "Look up": [(page.get("RESULTS.md"), "Results"),
                             (page.get("wrong_losses.md"), "Museum of wrong losses"),
                             (page.get("glossary.md"), "Glossary")]}
        return {head: [(name, words) for name, words in entries if name in self.pages]
                for head, entries in parts.items()}

    def build(self):
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        self.files[pathlib.Path("README.md")] = "index.html"
        for stem in LESSONS:
            self.files[pathlib.Path(f"{stem}.py" if stem != "tour_06" else "docs/tour_06.py")] = f"{stem}.html"
        self.waiting += [pathlib.Path("README.md")]
        for path in [ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]:
            if path.exists():
                self.name_of(path)
        for stem, title in LESSONS.items():
            self.notebook_page(stem, title)
        self.family_pages()
        self.functions_page()
        while self.waiting:
            path = self.waiting.pop()
            (self.markdown_page if path.suffix == ".md" else self.source_page)(path)
        self.write()

    def write(self):
        rendered = render_equations(self.equations, self.katex)
        style = (ROOT / "docs" / "theme" / "style.css").read_text(encoding="utf-8")
        colours = HtmlFormatter(style="friendly").get_style_defs("pre.code")
        assets = self.out / "assets"
        assets.mkdir()
        (assets / "style.css").write_text(style + colours, encoding="utf-8")
        copy(ROOT / "docs" / "theme" / "page.js", assets / "page.js")
        copy(self.katex / "dist" / "katex.min.css", assets / "katex.min.css")
        for font in (self.katex / "dist" / "fonts").glob("*.woff2"):
            copy(font, assets / "fonts" / font.name)
        for script in (ROOT / "docs" / "interactive").glob("*.js"):
            copy(script, assets / script.name)
        index = json.dumps(self.index, ensure_ascii=False).replace("\x02", "").replace("</", "<\\/")
        (assets / "index.js").write_text(f"const SEARCH_INDEX = {re.sub(chr(3), '', index)};", encoding="utf-8")
        navigation = self.navigation()
        for name, (title, body) in self.pages.items():
            body = re.sub("\x02(\\d+)\x03", lambda m: rendered[int(m[1])], body).replace('"site:', '"')
            here = {name: " aria-current=page"}
            menu = "".join((f"<b>{head}</b>" if head else "") + "".join(
                f'<a href="{link}"{here.get(link, "")}>{words}</a>' for link, words in entries)
                for head, entries in navigation.items() if entries)
            scripts = ["page.js"]
            if 'class="interactive"' in body:
                scripts += ["draw.js", *(p.name for p in (ROOT / "docs" / "interactive").glob("*.js")
                                         if p.name != "draw.js")]
            scripts = "".join(f'<script defer src="assets/{script}"></script>' for script in scripts)
            (self.out / name).write_text(
                f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
                '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
                '<link rel="stylesheet" href="assets/katex.min.css"><link rel="stylesheet" href="assets/style.css">'
                f'{scripts}</head><body><header><a class="home" href="index.html">Off-policy all along</a>'
                '<input id="search" type="search" placeholder="Search" aria-label="Search"><div id="found"></div>'
                f'<button id="menu" type="button" aria-label="Menu">☰</button></header><nav>{menu}</nav>'
                f'<main>{body}</main></body></html>', encoding="utf-8")
        print(f"{len(self.pages)} pages, {len(self.equations)} equations: {self.out / 'index.html'}")


def code(text, kind):
    try:
        lexer = get_lexer_by_name((kind or "text").strip().split()[0] if (kind or "").strip() else "text")
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return f'<pre class="code">{pygments.highlight(text.rstrip(), lexer, HtmlFormatter(nowrap=True))}</pre>'


def curve(lm, pictures, row):
    """The weight on ∇log π over the ratio for A = 1 and A = −1, from 06's own loss by autograd: a small SVG."""
    import torch

    centre = 0.0006 if row.level == "sequence" else 1.6
    log_ratio = torch.linspace(-centre, centre, 241, dtype=torch.float64)
    lines = []
    for advantage, colour in ((1.0, "#0072B2"), (-1.0, "#D55E00")):
        weight = pictures.gradient_weight(lm.policy_loss, lm.red_weight, lm.friends.token_advantages, row,
                                          log_ratio.exp(), torch.full_like(log_ratio, advantage))
        points, pen, before = [], "M", None
        for x, y in zip(log_ratio.tolist(), weight.tolist()):
            pen = "M" if before is None or abs(y - before) > 0.15 else "L"
            before = y if abs(y) < 3.2 else None  # off the picture
            if before is not None:
                points.append(f"{pen}{110 + 100 * x / centre:.1f} {90 - 24 * y:.1f}")
        lines.append(f'<path d="{"".join(points)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    ends = [f"{math.exp(v):.2g}" if centre > 0.01 else f"{math.exp(v):.4f}" for v in (-centre, centre)]
    return ('<svg class="curve" viewBox="0 0 220 190" role="img" aria-label="weight over the ratio">'
            '<rect x="10" y="90" width="200" height="77" fill="#f3f3f3"/>'
            f'<path d="M10 90H210M110 13V167" stroke="#999"/>{"".join(lines)}'
            f'<text x="10" y="182">ρ = {ends[0]}</text><text x="110" y="182" text-anchor="middle">1</text>'
            f'<text x="210" y="182" text-anchor="end">{ends[1]}</text><text x="14" y="24">A = 1</text>'
            '<text x="14" y="160">A = −1</text></svg>')


def render_equations(equations, katex):
    """All equations in one call of node; one that KaTeX refuses stops the build with its text."""
    script = ("const katex = require(process.argv[1]); const all = JSON.parse(require('fs').readFileSync(0));"
              "console.log(JSON.stringify(all.map(([latex, displayMode]) => {"
              "try { return katex.renderToString(latex, {displayMode, output: 'html'}); }"
              "catch (error) { console.error(error.message + '\\n  in: ' + latex); process.exit(1); }})));")
    run = subprocess.run(["node", "-e", script, str(katex)], input=json.dumps(equations), text=True,
                         capture_output=True)
    if run.returncode:
        sys.exit(f"error: KaTeX refuses an equation: {run.stderr.strip()}")
    return json.loads(run.stdout)


def slug(words, *, github=False):
    """A file name; or, with github, the anchor that code hosts give a heading."""
    words = words.strip().lower()
    if github:
        return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
    return re.sub(r"[^a-z0-9_]+", "-", words).strip("-")


def plain(markup):
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", re.sub("\x02\\d+\x03", "", markup)))).strip()


def copy(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "site", help="default runs/site")
    parser.add_argument("--notebooks", type=pathlib.Path, default=ROOT / "runs" / "notebooks", help="made before")
    parser.add_argument("--katex", type=pathlib.Path, default=ROOT / ".venv" / "katex" / "node_modules" / "katex",
                        help="default .venv/katex/node_modules/katex")
    arguments = parser.parse_args()
    missing = [stem for stem in LESSONS if not (arguments.notebooks / f"{stem}.ipynb").exists()]
    if not shutil.which("node") or not (arguments.katex / "dist").exists():
        sys.exit("error: node and KaTeX are needed: npm install --prefix .venv/katex katex@0.16.47")
    if missing:
        sys.exit(f"error: no notebook of {', '.join(missing)}: run python docs/notebooks.py first")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    site = Site(arguments.out.resolve(), arguments.notebooks.resolve(), arguments.katex.resolve())
    site.build()
    if site.broken:
        sys.exit("error: links that lead nowhere:\n  " + "\n  ".join(site.broken))


if __name__ == "__main__":
    main()
