"""make mutants: change one operator or constant of the product at a time; does a test fail?

    python tests/mutants.py                            300 places, seed 0: about half an hour on one core
    python tests/mutants.py --count 40 --only fast     40 places of under_the_hood/fast.py
    python tests/mutants.py --list                     only say which places these are
    python tests/mutants.py --again                    the survivors once more, after new tests

First every quick test is run once, to see which lines of the product it executes. Then a mutant, in a copy of the tree,
meets the tests that execute its statement, those of its own file first, until one fails or hangs. What no quick test
executes meets the slow tests of its file. Reported: the share caught by file, and every survivor. Those that mean the
same as the original stand in tests/equivalent_mutants.md, each with the reason; they are left out of the share.
Everything is noted in runs/mutants at once, so a run that was stopped goes on.

Not counted: tests that compare our text with text (LEFT_OUT), for which any change is a change. Not changed: LOOKS.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.md"
FILES = [*sorted(ROOT.glob("0[1-6]_*.py")), ROOT / "stale_world.py", *sorted((ROOT / "under_the_hood").glob("*.py"))]
LEFT_OUT = {"test_copies", "test_layout", "test_notebooks", "test_wrong_losses", "test_readme", "test_site",
            "test_contributing", "test_glossary", "test_own_loop", "test_mutants"}
# How a picture looks: nobody's result depends on it, and the eye is its test.
LOOKS = {"figsize", "fontsize", "linewidth", "alpha", "zorder", "dpi", "markersize", "bbox_to_anchor", "yticks", "ylim"}
OPERATORS = {ast.Add: "+-", ast.Sub: "-+", ast.Mult: "*/", ast.Div: "/*", ast.Pow: ("**", "*"),
             ast.FloorDiv: ("//", "*"), ast.Mod: "%*", ast.BitAnd: "&|", ast.BitOr: "|&", ast.Lt: ("<", "<="),
             ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
             ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.USub: "-+",
             ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
             ast.NotIn: ("not in", "in")}
FUNCTIONS, PARTS = (ast.FunctionDef, ast.AsyncFunctionDef), ("body", "orelse", "finalbody", "handlers", "cases")


# Which places there are, and what a change there looks like

def span(starts, first, last):
    """(begin, end) in the UTF-8 bytes of the source, from the start of one node to the end of another."""
    return (starts[first.lineno - 1] + first.col_offset, starts[last.end_lineno - 1] + last.end_col_offset)


def changes(node):
    """What can be changed at a node: (operand before, operand after, old, new); the operands are None at a constant."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield [(node.left, node.right)], *OPERATORS[type(node.op)]
    if isinstance(node, ast.BoolOp):
        yield list(zip(node.values, node.values[1:])), *OPERATORS[type(node.op)]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield [(node.left, node.comparators[0])], *OPERATORS[type(node.ops[0])]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield [(None, node.operand)], "-", "+"
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = node.value
        yield [], None, str(not value if isinstance(value, bool) else value + 1 if value in (0, 1) else value * 2)


def places(path):
    """[(words, mutated source, lines of the statement)] inside functions, where a change can mean something.

    Lessons: functions only, since what stands between them is a claim with its own expected number. Text is left alone.
    """
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, seen = [], Counter()

    def visit(node, function, lines, parents):
        if isinstance(node, ast.JoinedStr) or isinstance(node, ast.keyword) and node.arg in LOOKS:
            return
        if isinstance(node, ast.stmt):  # of a compound statement only the head
            inner = [n.lineno for part in PARTS for n in getattr(node, part, []) if hasattr(n, "lineno")]
            lines = range(node.lineno, min(inner, default=node.end_lineno + 1))
        for pairs, old, new in changes(node) if function else ():
            begin, end = span(starts, node, node)
            changed, at = b"", begin
            for left, right in pairs:
                gap = (span(starts, left, left)[1] if left else begin, span(starts, right, right)[0])
                operator = re.search(re.escape(old).replace(r"\ ", r"\s+").encode(), source[gap[0]:gap[1]])
                changed += source[at:gap[0] + operator.start()] + new.encode()
                at = gap[0] + operator.end()
            changed = b"(" + changed + source[at:end] + b")" if pairs else new.encode()
            around = parents[-1] if not pairs and parents and isinstance(parents[-1], ast.expr) else node
            if len(ast.unparse(around)) > 70:
                around = node
            a, b = span(starts, around, around)
            before, after = source[a:b], source[a:begin] + (changed[1:-1] if pairs else changed) + source[end:b]
            words = " ".join(f"{function}: {before.decode()} → {after.decode()}".split())
            seen[words] += 1
            mutated = (source[:begin] + changed + source[end:]).decode()
            found.append((words + f" ({seen[words]})" * (seen[words] > 1), mutated, lines))
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    inside = function
                    if isinstance(node, FUNCTIONS) and name == "body":
                        inside = f"{function}.{node.name}" if function else node.name
                    visit(child, inside, lines, [*parents, node])

    visit(ast.parse(source), "", range(0), [])
    return found


# Running tests in a process of their own, which has the libraries already

def fork(tree, plugin, *arguments, seconds):
    """The exit status of pytest with these arguments, in a child that starts with what this process has imported.

    None if it was killed, by the clock or by the memory it wanted.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
        signal.alarm(seconds)  # its default action ends the process, whatever it is doing
        import pytest
        os._exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=[plugin]))
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a killed test left running
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None


class Recorder:
    """Notes the lines of the product that each quick test runs, and how long the test takes.

    What a fixture of a wide scope ran counts for every test that asks for it; what an import ran, for the whole file.
    """

    def __init__(self, tree, out):
        self.prefix, self.files = f"{tree}/", {str(tree / path.relative_to(ROOT)) for path in FILES}
        self.lines, self.seconds, self.needs, self.bad = defaultdict(set), Counter(), {}, set()
        self.context, self.importing, self.out = "import", None, out

    def trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if name not in self.files:
            return None
        if frame.f_code.co_name == "<module>" and event in ("call", "return"):
            if event == "call" and self.importing is None:
                self.importing = frame
            elif self.importing is frame and event == "return":
                self.importing = None
        self.lines["import" if self.importing else self.context].add((name, frame.f_lineno))
        return self.trace

    def pytest_collection(self):
        import threading
        sys.settrace(self.trace)
        threading.settrace(self.trace)

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if not item.get_closest_marker("slow")]

    def pytest_runtest_setup(self, item):
        self.context = item.nodeid
        definitions = item._fixtureinfo.name2fixturedefs.values()
        self.needs[item.nodeid] = {f"fixture {d.baseid} {d.argname}" for many in definitions for d in many}
        sys.settrace(self.trace)

    import pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = self.context
        self.context = f"fixture {fixturedef.baseid} {fixturedef.argname}" * (fixturedef.scope != "function") or before
        try:
            return (yield)
        finally:
            self.context = before

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        self.bad |= {report.nodeid} if report.failed else set()

    def pytest_sessionfinish(self):
        sys.settrace(None)
        rows = {}
        for test in self.seconds.keys() - self.bad:
            lines = defaultdict(list)
            for context in ("import", test, *self.needs.get(test, ())):
                for name, line in self.lines.get(context, ()):
                    lines[name.removeprefix(self.prefix)].append(line)
            rows[test] = {"seconds": self.seconds[test], "lines": lines}
        self.out.write_text(json.dumps({"tests": rows, "failed": sorted(self.bad)}), encoding="utf-8")


class Chosen:
    """Runs these tests and no others, each against the clock; notes the first that fails."""

    def __init__(self, seconds, note):
        self.seconds, self.note = seconds, note
        self.limit = int(60 + 10 * sum(seconds.values()))  # any of them may be the one that makes a shared fixture

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.seconds]

    def pytest_runtest_setup(self, item):
        self.note.write_text(item.nodeid, encoding="utf-8")
        signal.alarm(self.limit)


class Slow(Chosen):
    """Runs the slow tests of a file."""

    def __init__(self, note):
        super().__init__({}, note)
        self.limit = 300

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.get_closest_marker("slow")]


def own(test, path):
    """Is it a test file of this product file?"""
    stem = pathlib.Path(test).stem
    return stem.startswith("test_06") if path.name.startswith("06") else stem.startswith(f"test_{path.stem}")


def caught(tree, path, mutated, lines, record, note):
    """(name of the test that fails or hangs with this source in the place of the file, or "", how many ran it)."""
    name = str(path.relative_to(ROOT))
    target = tree / name
    times = target.stat()
    target.write_text(mutated, encoding="utf-8")
    try:
        chosen = {}
        for file, tests in record.items():
            hit = {test: row["seconds"] for test, row in tests.items() if set(lines) & set(row["lines"].get(name, ()))}
            chosen |= {file: hit} if hit else {}
        plan = [(file, Chosen(chosen[file], note)) for file in
                sorted(chosen, key=lambda file: (not own(file, path), sum(chosen[file].values())))]
        plan = plan or [(file, Slow(note)) for file in record if own(file, path)]
        for file, plugin in plan:
            note.write_text(f"{file} (import)", encoding="utf-8")
            status = fork(tree, plugin, "-x", file, seconds=120)
            if status in (1, 2, None):
                return note.read_text(encoding="utf-8"), sum(map(len, chosen.values()))
            if status not in (0, 5):
                raise SystemExit(f"pytest ended with {status} on {file}")
        return "", sum(map(len, chosen.values()))
    finally:
        shutil.copy2(ROOT / name, target)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))


def copy_of_the_tree(folder: pathlib.Path) -> pathlib.Path:
    left_out = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".pytest_cache", ".hypothesis", "site",
                                      "node_modules")
    return pathlib.Path(shutil.copytree(ROOT, folder / "tree", ignore=left_out))


def read_log(log):
    """words → the last thing noted."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    return {row["place"]: row for row in rows}


def recorded(trees, out, files):
    """test file → test → seconds and lines: from out, or made now where a test file or the product has changed."""
    shared = [*FILES, ROOT / "utils.py", ROOT / "tests" / "conftest.py"]
    product = "".join(path.read_text(encoding="utf-8") for path in shared)
    record = {}
    for file in files:
        key = hashlib.sha256((product + (ROOT / file).read_text(encoding="utf-8")).encode()).hexdigest()[:16]
        stored = out / f"{pathlib.Path(file).stem}-{key}.json"
        if not stored.exists():
            for old in out.glob(f"{pathlib.Path(file).stem}-????????????????.json"):
                old.unlink()
            fork(trees[0], Recorder(trees[0], stored), file, seconds=1800)
        rows = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {"tests": {}, "failed": [file]}
        record[file] = rows["tests"]
        if rows["failed"]:
            print("fails without a change, left out:", *rows["failed"], sep="\n  ", flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="places to change (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression that --list's line of a place must hold")
    parser.add_argument("--tests", default="", help="part of a test file's name: only these tests")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "mutants")
    parser.add_argument("--list", action="store_true", help="only list the places")
    parser.add_argument("--again", action="store_true", help="try the survivors of the log again")
    args = parser.parse_args()

    everything = [(path, f"{path.relative_to(ROOT)}: {words}", mutated, lines)
                  for path in FILES for words, mutated, lines in places(path)]
    everything = [place for place in everything if re.search(args.only, place[1])]
    # Drawn by a hash, so that an edit elsewhere in the product leaves the draw as it is.
    everything.sort(key=lambda place: hashlib.sha256(f"{args.seed} {place[1]}".encode()).digest())
    known = EQUIVALENT.read_text(encoding="utf-8").replace("\\|", "|") if EQUIVALENT.exists() else ""
    chosen = everything[:args.count]
    counted = [place for place in chosen if "| `{}` | `{}` |".format(*place[1].split(": ", 1)) not in known]
    if args.list:
        return print(*(f"{place[1]}  [line {place[3][0]}]" for place in counted), sep="\n")

    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import hypothesis
    import transformers
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM"):
        getattr(transformers, name)  # imported here once, not in every child
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True, deadline=None, phases=(
        hypothesis.Phase.explicit, hypothesis.Phase.generate))  # a failure need not be made small
    hypothesis.settings.load_profile("mutants")
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "log.jsonl"
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if args.tests in file and pathlib.Path(file).stem not in LEFT_OUT]
    with tempfile.TemporaryDirectory() as scratch:
        trees = [copy_of_the_tree(pathlib.Path(scratch) / str(i)) for i in range(args.jobs)]
        record = recorded(trees, args.out, files)
        done = read_log(log)
        jobs = [place for place in counted if place[1] not in done or args.again and not done[place[1]]["caught"]]
        workers = []
        for i, tree in enumerate(trees):
            workers.append(os.fork())
            if workers[-1] == 0:
                for path, words, mutated, lines in jobs[i::args.jobs]:
                    began = time.time()
                    by, tests = caught(tree, path, mutated, lines, record, pathlib.Path(scratch) / f"note{i}")
                    row = {"place": words, "line": lines[0], "caught": by, "tests": tests,
                           "seconds": round(time.time() - began, 1)}
                    with log.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(row, ensure_ascii=False) + "\n")
                    print("caught  " if by else "SURVIVED", words, "" if tests else "(slow tests)", flush=True)
                os._exit(0)
        for worker in workers:
            os.waitpid(worker, 0)
    done = read_log(log)
    rows = [(path.name, done[words]) for path, words, _, _ in counted if words in done]
    total, alive = Counter(name for name, _ in rows), Counter(name for name, row in rows if not row["caught"])
    print(*(f"SURVIVED {row['place']}  [line {row['line']}, {row['tests']} tests]"
            for _, row in rows if not row["caught"]),
          *(f"{name:28} {count - alive[name]} of {count}" for name, count in sorted(total.items())), sep="\n")
    lost = sum(alive.values())
    print(f"{len(rows) - lost} of {len(rows)} mutants caught, {100 * (1 - lost / max(1, len(rows))):.1f} %; "
          f"{len(chosen) - len(counted)} more mean the same; {sum(row['seconds'] for _, row in rows):.0f} s")
    sys.exit(1 if lost > 0.05 * len(rows) or len(rows) < len(counted) else 0)


if __name__ == "__main__":
    main()
