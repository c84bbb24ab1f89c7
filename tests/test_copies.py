"""Scripts never import each other: what two of them need is copied, and here the copies are held equal.

Same name ⇔ same code. Two of the pages (the numbered scripts, stale_world.py, and friends.py, which holds formulas of
the lessons) may both define a top-level function or class of some name only if the two are equal up to docstrings, comments
and layout. `main` is each script's own.
"""

import ast
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("0[1-6]_*.py"))
PAGES = [*SCRIPTS, ROOT / "stale_world.py", ROOT / "under_the_hood" / "friends.py"]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TRAINER, STALE_WORLD, FRIENDS = "06_full_llm_training.py", "stale_world.py", "under_the_hood/friends.py"
# Where a formula is taught, and where it stands again, so that either can be read and used on its own.
COPIES = {
    TRAINER: {"group_advantages": "02_group_baseline.py", "clip_mask": "04_regularization.py",
              "clean_tokens": "04_regularization.py", "red_drop": "05_data_shaping.py",
              "red_weight": "05_data_shaping.py", "rollout_version": STALE_WORLD, "staleness": STALE_WORLD},
    FRIENDS: {"ngrpo_advantages": "02_group_baseline.py", "noise_corrected_rewards": "02_group_baseline.py",
              "overlong_penalty": "04_regularization.py", "adaptive_temperature": "05_data_shaping.py",
              "hint_weight": "05_data_shaping.py", "icpo_advantages": "05_data_shaping.py",
              "graded_reward": "05_data_shaping.py", "informative_groups": "05_data_shaping.py"},
}
# One name, two things: over enumerated responses here, with a transformer in 06; a world's bandit here, a run in 06.
UNLIKE = {(TRAINER, STALE_WORLD): {"token_logprobs"}, ("05_data_shaping.py", TRAINER): {"train"}}


def without_docstrings(node):
    """The node as text, without the docstrings in it. Comments and layout are not part of the tree."""
    tree = ast.parse(ast.unparse(node))
    for inner in ast.walk(tree):
        if isinstance(inner, DEFINITIONS) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def definitions(source):
    """name → code of every top-level function and class but `main`."""
    return {node.name: without_docstrings(node) for node in ast.parse(source).body
            if isinstance(node, DEFINITIONS) and node.name != "main"}


def constants_read(source, names):
    """name → code of every top-level constant that one of the functions or classes `names` reads."""
    tree = ast.parse(source)
    constants = {target.id: node.value for node in tree.body if isinstance(node, ast.Assign)
                 for targets in node.targets for target in ast.walk(targets) if isinstance(target, ast.Name)}
    read = {inner.id for node in tree.body if isinstance(node, DEFINITIONS) and node.name in names
            for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return {name: ast.dump(value) for name, value in constants.items() if name in read}


def differences(first, second):
    """Names that both sources define, but not alike: definitions, and the constants that shared definitions read."""
    ours, theirs = definitions(first), definitions(second)
    shared = ours.keys() & theirs.keys()
    differing = {name for name in shared if ours[name] != theirs[name]}
    our_constants, their_constants = constants_read(first, shared), constants_read(second, shared)
    return sorted(differing | {name for name in our_constants.keys() & their_constants.keys()
                               if our_constants[name] != their_constants[name]})


def missing_copies(source, wanted):
    return sorted(set(wanted) - definitions(source).keys())


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("first, second", list(itertools.combinations(PAGES, 2)), ids=lambda path: path.stem)
def test_a_name_means_the_same_code_everywhere(first, second):
    unlike = UNLIKE.get((name_of(first), name_of(second)), set())
    found = differences(first.read_text(encoding="utf-8"), second.read_text(encoding="utf-8"))
    assert set(found) - unlike == set()


@pytest.mark.parametrize("page", COPIES)
def test_a_page_holds_every_copy_it_should(page):
    assert missing_copies(text(page), COPIES[page]) == []
    for name, lesson in COPIES[page].items():
        assert name in definitions(text(lesson)), f"{name} left {lesson}"


# The checker itself, on sources small enough to judge by eye.

ORIGINAL = '''
EPS = 1e-6
def shift(x, *, by=1):
    """Move x."""
    # a comment
    def inner(y):
        """Inner docstring."""
        return y + EPS
    return inner(x) + by
class Row:
    """A row."""
    size: int = 3
def main():
    return 1
'''


@pytest.mark.parametrize("change", [
    ('"""Move x."""', '"""Another text."""'), ('"""Inner docstring."""', "'''x'''"), ("# a comment", ""),
    ("inner(x) + by", "(inner(x)\n            + by)"), ("return 1", "return 2"), ('    """A row."""\n', ""),
])
def test_docstrings_comments_layout_and_main_may_differ(change):
    copy = ORIGINAL.replace(*change)
    assert copy != ORIGINAL
    assert differences(ORIGINAL, copy) == []


@pytest.mark.parametrize("change, name", [
    (("inner(x) + by", "inner(x) - by"), "shift"), (("by=1", "by=2"), "shift"), (("*, by", "by"), "shift"),
    (("y + EPS", "y"), "shift"), (("size: int = 3", "size: int = 4"), "Row"), (("1e-6", "1e-8"), "EPS"),
    (("def shift(x", "async def shift(x"), "shift"), (("def shift", "@cache\ndef shift"), "shift"),
])
def test_a_changed_copy_is_detected(change, name):
    copy = ORIGINAL.replace(*change)
    assert copy != ORIGINAL
    assert differences(ORIGINAL, copy) == [name]


def test_a_copy_without_its_docstring_or_with_nothing_else_left_still_compares():
    assert differences('def f():\n    """Only a docstring."""\n', "def f():\n    pass\n") == []
    assert differences("def f():\n    pass\n", "def g():\n    return 1\n") == []


def test_a_missing_copy_is_detected():
    source = "\n".join(f"def {name}():\n    pass" for name in COPIES[TRAINER] if name != "red_drop")
    assert missing_copies(source, COPIES[TRAINER]) == ["red_drop"]


# Importing: a lesson computes, but it prints nothing, writes nothing, loads nothing slow, and takes little time.

WATCHED_IMPORT = """
import importlib, json, os, sys, time
import torch, numpy, matplotlib.pyplot
root, names = sys.argv[1], sys.argv[2:]
inside, touched = (root, os.getcwd()), []

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
    if writes and os.path.abspath(os.fspath(arguments[0])).startswith(inside):
        touched.append(f"{event} {arguments[0]}")

sys.addaudithook(watch)
sys.path.insert(0, root)
seconds = {}
for name in names:
    began = time.process_time()
    importlib.import_module(name)
    seconds[name] = time.process_time() - began
heavy = [name for name in ("transformers", "datasets", "scipy", "pandas") if name in sys.modules]
print(json.dumps({"touched": touched, "heavy": heavy, "seconds": seconds}))
"""


def watched_import(folder, root, names):
    result = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, str(root), *names], cwd=folder, capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    *printed, report = result.stdout.strip().splitlines()
    return {"printed": printed, "warned": result.stderr, **json.loads(report)}


QUIET = {"printed": [], "warned": "", "touched": [], "heavy": []}


def test_importing_a_script_prints_nothing_writes_nothing_and_is_quick(tmp_path):
    """Seconds of processor time beside torch and matplotlib, which are loaded before."""
    report = watched_import(tmp_path, ROOT, [script.stem for script in SCRIPTS])
    seconds = report.pop("seconds")
    assert report == QUIET
    assert len(seconds) == 6 and max(seconds.values()) < 3, seconds


@pytest.mark.slow
def test_a_script_that_prints_or_writes_on_import_is_detected(tmp_path):
    (tmp_path / "noisy.py").write_text("print('here')\nopen('left.txt', 'w').close()\n")
    report = watched_import(tmp_path, tmp_path, ["noisy"])
    assert report["printed"] == ["here"] and any("left.txt" in line for line in report["touched"])
