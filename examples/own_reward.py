"""Two rewards of your own, in the form that --reward wants: a function (question, response, answer) → a number.

    python 06_full_llm_training.py --reward examples.own_reward:runs_the_tests --task my_tasks.jsonl --model …
    python 06_full_llm_training.py --reward examples.own_reward:fits_the_schema --task my_tasks.jsonl --model …

runs_the_tests: the response holds Python, `answer` tests that use it; the reward is 1 if they pass. The code runs in a
process of its own, with limits on time, memory, files and processes (Linux and macOS). That stops accidents: an endless
loop, a list that eats the machine. It is no jail: run what a model writes inside a container as well.
fits_the_schema: `answer` is a JSON schema; the reward is 1 if the response is JSON that fits it, and nothing beside.

What makes a verifier good: it returns a number for any text, since an exception ends the run (or None, with
--on-unscored leave-out); it is quick, since each of the P·K responses of a step is judged; and it is hard to fool. Here
`exit(0)` and `print("passed")` earn nothing, for the verdict is a random word that is written after the tests. Code can
still dig it out of the interpreter, or replace what the tests compare with: read samples.jsonl when the reward rises
too well.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile

SECONDS, MEGABYTES = 5, 512
CHILD = """
import resource, sys
for what, most in (("CPU", {seconds}), ("AS", {bytes}), ("FSIZE", 1 << 20), ("NPROC", 0), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + what), (most, most))
def judge(code, tests, word):
    space = dict(__name__="response")
    exec(compile(code, "response", "exec"), space)
    exec(compile(tests, "tests", "exec"), space)
    sys.__stdout__.write(word)
judge(*eval(sys.stdin.read()))
"""


def runs_the_tests(question: str, response: str, answer: str) -> float:
    """1 if the code in the response passes the tests in `answer`, such as "assert add(2, 3) == 5"; else 0."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", response, re.DOTALL)
    word = secrets.token_hex(16)
    task = ascii((blocks[-1] if blocks else response, answer, word))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        # Its output goes to a file: a pipe would stay open, and hold us up, as long as anything it started lives.
        child = subprocess.Popen([sys.executable, "-I", "-c", CHILD.format(seconds=SECONDS, bytes=MEGABYTES << 20)],
                                 cwd=folder, env={}, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.DEVNULL,
                                 start_new_session=True)
        try:
            child.communicate(task.encode(), timeout=2 * SECONDS)  # asleep, it uses no processor time
        except subprocess.TimeoutExpired:
            return 0.0
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # and all that it started
            except ProcessLookupError:
                pass
            child.wait()
        said.seek(0)
        return float(said.read().endswith(word.encode()))


def fits_the_schema(question: str, response: str, answer: str) -> float:
    """1 if the response, or the one ```json block that it is, is JSON that fits the schema in `answer`; else 0."""
    from jsonschema import Draft202012Validator  # pip install jsonschema

    fenced = re.fullmatch(r"\s*```(?:json)?[ \t]*\n(.*?)```\s*", response, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else response, parse_constant=lambda name: 1 / 0)  # NaN is no JSON
        return float(Draft202012Validator(json.loads(answer)).is_valid(value))
    except (ValueError, ZeroDivisionError, RecursionError):
        return 0.0
