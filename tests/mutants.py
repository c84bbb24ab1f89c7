"""make mutants: change one operator or constant of the product at a time; does a test fail?

    python tests/mutants.py                          300 places, seed 0: hours on 2 cores
    python tests/mutants.py --count 40 --only fast   40 places of under_the_hood/fast.py
    python tests/mutants.py --list --count 300       only say which places these are

A mutant runs in a copy of the tree, against the quick tests of its file, until one fails. Reported: the share caught by
file, and every survivor. Those that mean the same as the original stand in tests/equivalent_mutants.md, each with the
reason; they are left out of the share.
"""

import argparse
import ast
import concurrent.futures
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter

ROOT = pathlib.Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.md"
FILES = [*sorted(ROOT.glob("0[1-6]_*.py")), ROOT / "stale_world.py", *sorted((ROOT / "under_the_hood").glob("*.py"))]
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
             ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Lt: ast.LtE,
             ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or,
             ast.Or: ast.And, ast.USub: ast.UAdd, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
             ast.NotIn: ast.In}


def changes(node):
    """What can be changed at a node: functions that do it and return words for it."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.UnaryOp)) and type(node.op) in OPERATORS:
        yield node, "op", OPERATORS[type(node.op)]()
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield node, "ops", [OPERATORS[type(node.ops[0])](), *node.ops[1:]]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = node.value
        yield node, "value", not value if isinstance(value, bool) else value + 1 if value in (0, 1) else value * 2


def places(path):
    """[(line, index of the node in ast.walk, index of its change)] inside functions, where a change can mean something.

    Lessons: functions only, since what stands between them is a claim with its own expected number. Text is left alone.
    """
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(n) for function in functions for statement in function.body for n in ast.walk(statement)}
    text = {id(n) for joined in ast.walk(tree) if isinstance(joined, ast.JoinedStr) for n in ast.walk(joined)}
    for i, node in enumerate(ast.walk(tree)):
        if id(node) in inside and id(node) not in text:
            found += [(node.lineno, i, j) for j, _ in enumerate(changes(node))]
    return found


def mutate(source: str, node_index: int, change_index: int):
    """(the mutated source, the line's change in words)."""
    tree = ast.parse(source)
    node = next(n for i, n in enumerate(ast.walk(tree)) if i == node_index)
    target, field, value = list(changes(node))[change_index]
    before = ast.unparse(node)
    setattr(target, field, value)
    return ast.unparse(tree), f"{before} → {ast.unparse(node)}"


def tests_of(path) -> list:
    """The test files that speak of a file."""
    name, rooms = path.stem, "tests/under_the_hood"
    training = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").glob("test_06_*.py"))]
    if re.match(r"0[1-5]", name):
        return [f"tests/test_{name}.py", "tests/test_copies.py"]
    if name == "stale_world":
        return ["tests/test_stale_world.py", "tests/test_04_regularization.py"]
    if name.startswith("06"):
        return [*training, rooms]
    own = f"{rooms}/test_{name}.py"
    return [own] * (ROOT / own).exists() + [rooms, *training]


def caught(tree: pathlib.Path, path, mutated: str, *, seconds: int) -> bool:
    """Does a test fail, or hang, with this source in the place of the file?"""
    target = tree / path.relative_to(ROOT)
    original = target.read_text(encoding="utf-8")
    target.write_text(mutated, encoding="utf-8")
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests_of(path)]
        run = subprocess.run(command, cwd=tree, capture_output=True, timeout=seconds, env=environment)
        return run.returncode in (1, 2)
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(original, encoding="utf-8")


def copy_of_the_tree(folder: pathlib.Path) -> pathlib.Path:
    left_out = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".pytest_cache", "site", "node_modules")
    return pathlib.Path(shutil.copytree(ROOT, folder / "tree", ignore=left_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="places to change (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a file's name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=int, default=600, help="longest run of the tests; what hangs is caught")
    parser.add_argument("--list", action="store_true", help="only list the places")
    args = parser.parse_args()
    everything = [(path, *place) for path in FILES if args.only in path.name for place in places(path)]
    chosen = random.Random(args.seed).sample(everything, min(args.count, len(everything)))
    known = EQUIVALENT.read_text(encoding="utf-8") if EQUIVALENT.exists() else ""
    total, alive, jobs = Counter(), [], []
    for path, line, *place in chosen:
        mutated, words = mutate(path.read_text(encoding="utf-8"), *place)
        label = f"{path.relative_to(ROOT)}:{line}: {words}"
        if f"`{path.name}`: `{words}`" in known.replace("\\|", "|"):
            continue
        total[path.name] += 1
        jobs.append((path, label, mutated))
    if args.list:
        return print(*(label for _, label, _ in jobs), sep="\n")
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        trees = [copy_of_the_tree(pathlib.Path(scratch) / str(i)) for i in range(args.jobs)]

        def run(job):
            tree = trees.pop()
            try:
                return caught(tree, job[0], job[2], seconds=args.seconds)
            finally:
                trees.append(tree)

        for job, found in zip(jobs, pool.map(run, jobs)):
            print("caught  " if found else "SURVIVED", job[1], flush=True)
            alive += [] if found else [job]
    lost = Counter(path.name for path, _, _ in alive)
    for name, count in sorted(total.items()):
        print(f"{name:28} {count - lost[name]} of {count}")
    print(f"{len(jobs) - len(alive)} of {len(jobs)} mutants caught, {100 * (1 - len(alive) / max(1, len(jobs))):.0f} %")
    sys.exit(1 if len(alive) > 0.05 * len(jobs) else 0)


if __name__ == "__main__":
    main()
