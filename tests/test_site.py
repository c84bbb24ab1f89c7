"""The site in a headless Chromium, at desktop and phone width: no error, nothing overflows, every link leads somewhere."""

import html
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.parse

import browser
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "runs" / "notebooks"
KATEX = ROOT / ".venv" / "katex" / "node_modules" / "katex"
SCRIPTS = [*sorted(ROOT.glob("0[1-5]_*.py")), ROOT / "docs" / "tour_06.py"]
pytestmark = pytest.mark.slow
needs_browser = pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built from the notebooks that make notebooks wrote, or from new ones where a script is newer."""
    if not shutil.which("node") or not KATEX.exists():
        pytest.skip("needs node and KaTeX: make site fetches it")
    for module in ("markdown_it", "mdit_py_plugins", "pygments"):
        pytest.importorskip(module, reason="needs requirements-docs.txt")
    python, environment = sys.executable, os.environ | {"OMP_NUM_THREADS": "1"}
    old = [script for script in SCRIPTS if not (made := NOTEBOOKS / f"{script.stem}.ipynb").exists()
           or made.stat().st_mtime < script.stat().st_mtime]
    if old:
        subprocess.run([python, ROOT / "docs" / "notebooks.py", *old], check=True, timeout=900, env=environment)
    out = tmp_path_factory.mktemp("site")
    run = subprocess.run([python, ROOT / "docs" / "build_site.py", "--out", out], capture_output=True, text=True,
                         timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    return out


def pages(site):
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(site.glob("*.html"))}


def test_every_link_leads_somewhere(site):
    texts = pages(site)
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in texts.items()}
    lost = []
    for name, text in texts.items():
        for target in map(html.unescape, re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            if re.match("https?:|mailto:|data:", target):
                continue
            path, _, fragment = urllib.parse.unquote(target).partition("#")
            there = path or name
            if not (site / there).exists() or (fragment and fragment not in anchors.get(there, ())):
                lost.append(f"{name}: {target}")
    assert not lost, "\n".join(lost)


def test_every_page_can_be_reached(site):
    texts, seen, waiting = pages(site), set(), ["index.html"]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in texts:
            seen.add(name)
            waiting += [target.partition("#")[0] for target in re.findall(r'href="([^"]+)"', texts[name])]
    assert seen == set(texts)


def test_no_page_asks_for_anything_elsewhere(site):
    for name, text in pages(site).items():
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", text):
            assert not re.search(r"""(?:href|src)=["']?(?:https?:)?//""", tag), f"{name}: {tag}"
    for path in (site / "assets").glob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", path.read_text(encoding="utf-8")), path.name


def test_lessons_show_maths_code_numbers_and_pictures(site):
    texts = pages(site)
    for script in SCRIPTS:
        text = texts[f"{script.stem}.html"]
        for part in ('class="equation', 'class="katex"', '<pre class="code">', '<pre class="output">', "<img src="):
            assert part in text, f"{script.stem}: {part}"
        for picture in re.findall(r'<img src="([^"]+)"', text):
            assert (site / picture).stat().st_size > 5000
    assert not re.search("\x02|\x03|site:|\\$\\$", "".join(texts.values()))


def test_every_row_has_its_place(site):
    import importlib

    lm, texts = importlib.import_module("06_full_llm_training"), pages(site)
    for group, rows in lm.FAMILIES.items():
        text = texts[f"family-{group.lower()}.html"]
        assert re.findall(r'<h2 id="[^"]*">(.*?)</h2>', text) == list(rows)
        assert text.count("<svg class=\"curve\"") == len(rows)
        assert len(re.findall("<th>what it adds</th>", text)) == len(rows)


OVERFLOW = """
const inside = (e) => e.closest(".wide, .equation, pre, svg, nav, #found");
return {wide: document.documentElement.scrollWidth - innerWidth,
        out: [...document.querySelectorAll("body *")].filter((e) => !inside(e) && e.getClientRects().length
             && (e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1))
             .map((e) => e.outerHTML.slice(0, 120)),
        asked: performance.getEntriesByType("resource").map((r) => r.name).filter((n) => !/^(file|data):/.test(n)),
        bad: [...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)};"""


@needs_browser
@pytest.mark.parametrize("width, phone", [(1280, False), (390, True)], ids=["desktop", "phone"])
def test_in_the_browser(site, width, phone):
    wrong = []
    with browser.browser(width=width, phone=phone) as page:
        for name in pages(site):
            page.open((site / name).as_uri())
            found = page.run(OVERFLOW)
            found["console"] = page.console()
            wrong += [f"{name}: {key}: {value}" for key, value in found.items()
                      if value and not (key == "wide" and value <= 0)]
    assert not wrong, "\n".join(wrong)


@needs_browser
def test_search_finds_and_leads_there(site):
    with browser.browser(width=1280) as page:
        page.open((site / "index.html").as_uri())
        page.run('const s = document.getElementById("search"); s.value = "pairwise consistency";'
                 's.dispatchEvent(new Event("input"))')
        for _ in range(50):  # the index is loaded when somebody types
            if page.run("return typeof SEARCH_INDEX !== 'undefined'"):
                break
            time.sleep(0.1)
        hits = page.run('return [...document.querySelectorAll("#found a")].map((a) => a.getAttribute("href"))')
        assert any(hit.startswith("03_offpolicy_derivation.html#2-pairwise-consistency") for hit in hits), hits
        page.run('document.querySelector("#found a").click()')
        assert page.run("return location.hash").startswith("#")
        assert page.console() == []


# Where a drag on the first panel begins and ends, in shares of the panel.
DRAGS = {"bandit": [(0.8, 0.75), (0.8, 0.3)], "weight": [(0.3, 0.5), (0.85, 0.5)],
         "dial": [(0.3, 0.5), (0.8, 0.5)], "pairs": [(0.3, 0.5), (0.6, 0.7)]}
PLACE = """const place = document.querySelector(`[data-picture=${arguments[0]}]`);
const controls = [...place.querySelectorAll("input, select")];
const set = (c, share) => {
  if (c.tagName === "SELECT") c.selectedIndex = Math.round(share * (c.options.length - 1));
  else c.value = Number(c.min) + share * (Number(c.max) - Number(c.min));
  c.dispatchEvent(new Event(c.tagName === "SELECT" ? "change" : "input"));
};
const named = (name) => controls.find((c) => c.parentNode.firstChild.textContent === name);
const words = () => place.querySelector(".words").textContent;
"""
DRAG = PLACE + """const svg = place.querySelector("svg"), box = svg.getBoundingClientRect(), before = words();
const send = (kind, [x, y]) => svg.dispatchEvent(new PointerEvent(kind, {pointerId: 1, bubbles: true,
  clientX: box.left + x * box.width, clientY: box.top + y * box.height}));
svg.setPointerCapture = () => {};  // there is no real pointer to capture
send("pointerdown", arguments[1][0]); send("pointermove", arguments[1][1]); send("pointerup", arguments[1][1]);
return words() !== before;"""
# Which controls move the drawing, for one of the two signs of A: an outer bound acts on one sign of a ring only.
MOVES = PLACE + """const shown = () => place.querySelector(".panels").innerHTML + words();
return controls.map((c) => [-1, 1].some((sign) => {
  if (named("clip")) { set(named("clip"), 1); set(named("A"), (1 + sign / 2) / 2); }
  set(c, 0.4);
  const before = shown();
  set(c, 0.9);
  return shown() !== before && !/NaN|undefined/.test(shown());
}) || c.parentNode.firstChild.textContent);"""


@needs_browser
@pytest.mark.parametrize("picture", DRAGS)
@pytest.mark.parametrize("width, phone", [(1280, False), (390, True)], ids=["desktop", "phone"])
def test_pictures_follow_the_pointer_and_every_control(site, picture, width, phone):
    with browser.browser(width=width, phone=phone) as page:
        page.open((site / "docs-play.html").as_uri())
        assert page.run(DRAG, picture, DRAGS[picture]), "dragging changes nothing"
        moves = page.run(MOVES, picture)
        assert moves and all(move is True for move in moves), moves
        assert page.console() == []
