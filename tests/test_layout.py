"""The layout of the repository: what may import what, how long a page and a line may be, how quickly 06 is there."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

ROOMS = sorted((ROOT / "under_the_hood").glob("*.py"))
PRODUCT = sorted(path for path in ROOT.rglob("*.py")
                 if not any(part.startswith(".") or part in ("tests", "runs", "cache") for part in
                            path.relative_to(ROOT).parts) and not path.name.startswith("exercise_"))


def modules_named(source):
    """Every module that a source imports, statically or by a literal name: `from a import b` counts as a and as a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value[:2].isdigit():
            yield node.value  # import_module("06_full_llm_training")


def own_modules(source):
    """What of this repository a source imports; attributes of its modules are left out."""
    own = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PRODUCT}
    return sorted({name for name in modules_named(source) if name in own or name.startswith(".")})


def test_rooms_import_rooms_and_utils_and_never_a_page():
    foreign = {room.name: [name for name in own_modules(room.read_text(encoding="utf-8"))
                           if name != "utils" and not name.startswith("under_the_hood")] for room in ROOMS}
    assert len(ROOMS) > 10 and not any(foreign.values()), foreign


def test_arrows_between_rooms_go_one_way():
    """Take away, again and again, the rooms that need no other of those left: in the end none is left."""
    needs = {f"under_the_hood.{room.stem}": set(own_modules(room.read_text(encoding="utf-8"))) for room in ROOMS}
    while free := {name for name, needed in needs.items() if not needed & (needs.keys() - {name})}:
        needs = {name: needed for name, needed in needs.items() if name not in free}
    assert needs == {}


@pytest.mark.parametrize("line, found", [
    ("import stale_world", ["stale_world"]), ("from utils import figure", ["utils"]),
    ("from under_the_hood import fast", ["under_the_hood.fast"]), ("import torch, math", []),
    ("lm = importlib.import_module('06_full_llm_training')", ["06_full_llm_training"]),
    ("def later():\n    from experiments.paper_grid import main", ["experiments.paper_grid"]),
    ("from . import fast", ["."]),
])
def test_an_import_is_found_wherever_it_stands(line, found):
    assert own_modules(line) == found


def test_a_room_says_in_its_first_line_what_it_is_for():
    first = {room.name: (ast.get_docstring(ast.parse(room.read_text(encoding="utf-8"))) or " ").splitlines()[0]
             for room in ROOMS}
    assert [name for name, line in first.items() if len(line) < 20] == []
    assert len(set(first.values())) == len(first)


def test_the_training_script_is_a_page():
    assert len((ROOT / "06_full_llm_training.py").read_text(encoding="utf-8").splitlines()) <= 800


def test_lines_of_the_product_fit_120_columns():
    long = [f"{path.relative_to(ROOT)}:{i}" for path in PRODUCT
            for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if len(line) > 120]
    assert long == []


@pytest.mark.slow
def test_the_training_script_is_there_as_quickly_as_its_libraries():
    """Processor time of its import, in a process of its own, against that of torch and transformers."""
    clock = "import time; began = time.process_time(); {}; print(time.process_time() - began)"

    def seconds(statement):
        result = subprocess.run([sys.executable, "-c", clock.format(statement)], cwd=ROOT, capture_output=True,
                                text=True, timeout=120, check=True)
        return float(result.stdout)

    for _ in range(3):  # what else the machine does may spoil one of them
        script = seconds("import importlib; importlib.import_module('06_full_llm_training')")
        if script <= 1.15 * seconds("import torch, transformers"):
            return
    pytest.fail(f"importing 06 took {script:.2f} s of processor time, more than its libraries by over 15 %")
