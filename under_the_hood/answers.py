"""Is an answer right? Numbers by exact value, formulas by computer algebra in a process that can be killed.

Reinforcement learning on reasoning tasks often goes wrong here, without a sign: "1,234" read as 1, an answer that was
cut off scored as right, a grader that hangs for an hour on nine characters. The rest of the code uses four functions:
extract_answer, is_correct, math_reward and load_reward.
"""

import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import unicodedata
from decimal import Decimal
from fractions import Fraction

# A number and all that touches its digits: "1,2", "3:30", "1'5", "1 234" and "10^3" are found whole, else their last
# digits would count as the answer. The sign in "5-3" is a subtraction; the digits in "x^2" and "H2O" are no numbers.
NUMBER_LIKE = re.compile(
    r"(?:(?<![\w)}\]])[-+])?(?:(?<![\w.])\.)?(?<![\w^])(?<![_^]\{)(?:[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
    r"(?:\^\{[-+]?[0-9]+\}|(?:[.,:/^'’′″٫]|\^[-+]| (?=[0-9]+/[0-9]))[0-9]+)*(?:[eE][-+]?[0-9]+)?")
# Of those, one number: 12 · 1,234.50 · 1/2 · 1 1/2 · 1e3, but not 0,5 · 1,2 · 1.2.3 (we guess no European grouping).
NUMBER = re.compile(r"[-+]?(?=\.?[0-9])(?:[0-9]+ (?=[0-9]+/))?(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?"
                    r"(?:/[0-9]+(?:\.[0-9]+)?|[eE][-+]?[0-9]{1,2})?")
# Not behind digits that only begin something: 5i · 2π · 2√3 · 2^n · 101_2 · 5 - 3 · 5 x · 12 or 13 · 12, 13. Whole
# are 5km · 18 (a sum) · 42 - done · 18 a day · 42 and 7 more; the single letters left out are units, as in 5 m.
FUNCTIONS = r"(?:pi|sqrt|ln|log|sin|cos|tan|exp|squared|cubed|choose)(?![A-Za-z])"
COMPLETE = re.compile(
    r"(?!\.[.\d]*\d|…\d|\((?![A-Za-z]{2})|a(?![A-Za-z])|[)}\]]?_+(?:\{|[^\W_])|[^\S\n]*(?:[√∛∜±∓π∞^\d]|[:;]\s*[0-9]"
    rf"|{FUNCTIONS}|[b-fi-knopqrt-zBEKMTXYZΑ-Ψα-ω](?![^\W\d_]|\.\w)|[xyz]{{2,3}}(?![A-Za-z])|and (?:a half|[0-9]+/)"
    r"|(?:or|to|mod|times|plus|minus|over|divided by)\s+[-+.]?[0-9]|(?:,|&|and\b)\s*[-+.]?[0-9][0-9.,/]*[\s*]*$"
    r"|\\(?!end|qed|check|(?:black)?square)[A-Za-z]|(?:[-+/×÷·⋅<>≤≥≠≈]|\*\*?(?=\S)|\*(?=\s))\s*(?:[-+]?\.?[0-9]|[√π]"
    r"|\((?![A-Za-z]{2})|\\[A-Za-z]|(?:[A-HJ-Zb-z]|(?<! )a)(?![A-Za-z'>]))))")
# Before digits that only end something: √5 · ±5 · +/-5 · \sqrt{5} · ln 2 · \frac{π}{2}.
ENDS_MORE = re.compile(r"(?:[√∛∜±∓_^]|\+/?|\\[pm]{2}|sqrt|\b(?:ln|log|sin|cos|tan)|\}(?=\{))(?:\[\w*\]|[({\s])*$")
# Units that may follow a number in a box: words of two letters or more ("5 x" is a product), perhaps squared.
UNITS = re.compile(rf"[\s.,*_\"'`”’»]*(?:\s(?!{FUNCTIONS}|(?:mod|or|and|plus|minus)\b)[A-Za-z]{{2}}"
                   r"[A-Za-z\s.,/'\"`”’»*_-]*(?:\^\{?[23]\}?\s*)?)?")
# What may stand before a marked answer: "x =", "Answer:", "The answer is", "5 - 3 =", but no time of day, "at 3:".
LABEL = re.compile(r"^(?:[\s*_]*[A-Za-z][\w *]{0,40}(?:=|(?<![0-9]):|:(?![0-9])| is )|[^A-Za-z=\\]*=)")
WORDS = re.compile(r"\\(?:text\w{0,2}|emph|underline|math(?:rm|bf|it|sf)|bm|boldsymbol|mbox)\s*\{([^{}]*)\}")
GONE = r"(?:US)?\\?[$€£¥₹¢]|\\left|\\right|\\[!()\[\]]"
NFKC = functools.partial(unicodedata.normalize, "NFKC")  # ４ is 4, ½ is 1⁄2, ³ is 3
SPELLINGS = [(re.compile(pattern), plain) for pattern, plain in [  # the many ways to write a number, made plain
    (r"(?<=[0-9])[^\S\n]*[¼-¾⅐-⅞]", lambda m: " " + NFKC(m[0])), ("[\uff01-\uff5e¼-¾⅐-⅞]", lambda m: NFKC(m[0])),
    ("[²³¹\u2070-\u207f]+", lambda m: "^" + NFKC(m[0])), ("[\u2212\u2013]", "-"), ("[\u2044\u2215]", "/"),  # −, –, ⁄
    *[(WORDS, r" \1 ")] * 2,  # LaTeX's ways to set plain text, perhaps nested
    (r"(?<=[0-9])(?:\{,\}|\\,|\\?_|[~'’٬\xa0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ","),  # 1{,}234, 1'234, 1_000
    ("[\u2080-\u2089]+", lambda m: "_" + NFKC(m[0])),  # only now, or 101₂₂₂ would be grouped
    (r"\\[,;: ]|\\q?quad\b|~|\\?%|°|\^\{?\\circ\}?", " "),  # a space, since 2\ 1/2 is not 21/2, and 5%3 not 53
    (rf"(?<=[0-9])(?:{GONE})+(?=[0-9])", " "), (GONE, ""), (r"(?<=[0-9])(?=\\(?:[dtcs]|nice)?frac)", " "),
    (r"\\(?:[dtcs]|nice)?frac\s*(?:\{\s*(-?[0-9.,]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9.,]+)\s*\}|([0-9]))", r"\1\2/\3\4 "),
    (r"(?<![\w)}\]])_+(?=[-+.]*[0-9])|(?<=[0-9.!])_+(?![\w{])|</?(?:b|i|u|em|strong|code)>", " "),  # __73__, not x_1
    (r"(?<=[0-9])[^\S\n]+(?=[0-9])", " "), (r"(?<=[0-9]) ?/ ?(?=[0-9])", "/"),  # 1 / 2
    (r"(?<=[0-9])\s*(?:×|\\times|\\cdot|[*x·⋅])\s*10\s*(?:\^|\*\*)\s*\{?([-+]?[0-9]+)\}?", r"e\1"),  # 1.5 × 10^3
    *[(rf"(?<=[0-9]) ?{word}\b", f"e{3 * i}") for i, word in enumerate(("thousand", "million", "billion"), 1)]]]
LONGEST, LONGEST_REPLY = 500, 1_000_000  # characters; a longer text is no answer, so no text takes long to check
THOUGHTS = [(f"<{name}>", f"</{name}>") for name in ("think", "thinking", "reasoning")] + [("[THINK]", "[/THINK]")]


def respell(text: str) -> str:
    return functools.reduce(lambda spelled, rule: rule[0].sub(rule[1], spelled), SPELLINGS, text)


def plain_number(token: str) -> str | None:
    """'1,234.50' → '1234.5', '1 1/2' → '3/2', '1e3' → '1000'; None for what is not one number: '1,2', '3:30', '5/0'."""
    if len(token) > LONGEST or not NUMBER.fullmatch(token):
        return None
    whole, _, rest = token.replace(",", "").rpartition(" ")
    top, slash, bottom = rest.partition("/")
    if not slash:
        text = f"{Decimal(top):f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if not Fraction(bottom):
        return None
    value = Fraction(top) / Fraction(bottom)
    return str(int(whole) + (-value if whole[0] == "-" else value) if whole else value)


def as_fraction(answer: str | None) -> Fraction | None:
    """The value of what `plain_number` writes; None for any other text, on which Fraction() may raise or never end."""
    return Fraction(answer) if answer and re.fullmatch(r"-?[0-9]+(?:\.[0-9]+|/[1-9][0-9]*)?", answer) else None


def answer_part(text) -> tuple[str, str]:
    """(where the answer stands, its marker): after the last '####' to the end of the line, or in the last \\boxed{…}.

    Of the two the later one counts; without either, the text itself and ''. A box that was cut off holds ''.
    """
    text = text if isinstance(text, str) and len(text) <= LONGEST_REPLY else ""
    for begin, end in THOUGHTS:  # one may begin in the prompt, and one that does not end hides all that follows
        pieces = text.split(end)
        first = max((i for i, piece in enumerate(pieces[:-1], 1) if begin not in piece), default=0)
        text = "\n".join(piece.partition(begin)[0] for piece in pieces[first:])
    hashes, found = text.rfind("####"), re.search(r"\{\s{0,9}(?:dexob|xobf)\\", text[::-1])  # backwards: the last box
    box = len(text) - found.start() if found else -1
    if box > hashes:
        depth, inside = 1, text[box: box + 2 * LONGEST]
        for brace in re.finditer(r"\\.|[{}]", inside):  # \\. steps over \{ and \}, which are text
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return inside[: brace.start()], "boxed"
        return "", "boxed"
    if hashes >= 0:
        return text[hashes + 4:].lstrip().partition("\n")[0][:2 * LONGEST], "####"
    if len(text) > 2 * LONGEST:  # only the surroundings of the last digit matter
        found = re.search("[0-9０-９¼-¾⅐-⅞]", text[::-1])
        end = len(text) - (found.start() if found else 0)
        text = text[max(0, end - 2 * LONGEST): end + 20]
    return text, ""


def read_part(part: str, *, entire: bool) -> str | None:
    """The number at the start of a part, else the part itself. entire: nothing but units may follow the number."""
    spelled = LABEL.sub("", respell(part), count=1).lstrip(" *_\"'`“‘«")
    found = NUMBER_LIKE.match(spelled)
    whole = found and (UNITS.fullmatch if entire else COMPLETE.match)(spelled, found.end())
    return whole and plain_number(found[0]) or (part.strip() if len(part) <= LONGEST else "") or None


def extract_answer(text) -> str | None:
    """The answer in a reply: what the last '#### x' or \\boxed{x} marks, else the last number; None if there is none.

    A number comes back as Fraction() reads it, without currency and units: '1,234.50' → '1234.5', '18%' → '18'.
    Anything else comes back as it stands: 'x^2+1', '3:30'. No input raises an error or takes 0.2 s.
    """
    part, marker = answer_part(text)
    if marker:
        return read_part(part, entire=marker == "boxed")
    spelled = respell(part)
    start, end = ([(0, 0)] + [found.span() for found in NUMBER_LIKE.finditer(spelled)])[-1]
    if not 0 < end - start <= LONGEST or not COMPLETE.match(spelled, end) or ENDS_MORE.search(spelled[:start][-20:]):
        return None
    return plain_number(spelled[start:end]) or spelled[start:end]


def gold_answer(gold) -> str | None:
    """The answer in a bare gold answer ('1,200', 'x^2+1', 7) or behind the marker of a gold solution."""
    gold = str(gold) if isinstance(gold, (int, float)) and abs(gold) < 1e100 else gold
    return read_part(answer_part(gold)[0], entire=True)


def squeeze(text: str | None) -> str:
    """A formula without the spelling that means nothing: \\left, \\dfrac, \\text, $, spaces except between digits."""
    text = re.sub(r"\\left|\\right|\\[,;:! ]|\$|~", " ", WORDS.sub(r" \1 ", text or ""))
    return re.sub(r"(?<=\\)[dt](?=frac)|(?<![0-9]) | (?![0-9])", "", " ".join(text.split()).strip("*. "))


def is_correct(text, gold) -> bool:
    """Does the reply give the gold answer? Numbers count by exact value, anything else as text, up to spelling.

    gold: a bare answer or a solution that ends in '#### 1200'. No input raises an error or takes 0.2 s.
    """
    if all(isinstance(x, str) and x.isascii() and x.isdecimal() and len(x) <= LONGEST for x in (text, gold)):
        return int(text) == int(gold)  # the common case of short tasks, without the machinery
    wanted, answer = gold_answer(gold), extract_answer(text)
    if (value := as_fraction(wanted)) is not None:
        return as_fraction(answer) == value
    return squeeze(wanted) != "" and squeeze(wanted) in (squeeze(answer), squeeze(answer_part(text)[0]))


# Computer algebra can work for hours on nine characters, so it gets a process of its own. The watchdog of
# faulthandler is a C thread, so it ends that process wherever it hangs, on any system.
SYMBOLIC_WORKER = """
import faulthandler, json, sys
from math_verify import LatexExtractionConfig, parse, verify
def read(text):
    return parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
print("ready", flush=True)
for line in sys.stdin:
    answer, gold, seconds = json.loads(line)
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        equal = verify(read(gold), read(answer), float_rounding=15, timeout_seconds=None)  # 0.333333 is not 1/3
    except BaseException:
        equal = False
    faulthandler.cancel_dump_traceback_later()
    print("equal" if equal else "different", flush=True)
"""
symbolic_worker, symbolic_lock = None, threading.Lock()


def symbolic_equal(answer: str, gold: str, *, seconds: float = 2.0) -> bool:
    """Are two formulas equal to math-verify? False after that many seconds. Any thread may call."""
    global symbolic_worker
    if not 0 < seconds < 1e6:
        raise ValueError(f"seconds must be positive and finite, not {seconds}")
    with symbolic_lock:
        if symbolic_worker is None or symbolic_worker.poll() is not None:
            symbolic_worker = subprocess.Popen(  # in a session of its own, since Ctrl-C is meant for us
                [sys.executable, "-c", SYMBOLIC_WORKER], text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if symbolic_worker.stdout.readline() != "ready\n":
                raise ImportError("symbolic answers need math-verify, which does not load: pip install math-verify")
        reply = ""
        try:
            print(json.dumps([answer, gold, seconds]), file=symbolic_worker.stdin, flush=True)
            reply = symbolic_worker.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not reply:  # out of time, or interrupted: a late reply must not answer the next question
                symbolic_worker.kill()
                symbolic_worker.communicate()
    return reply == "equal\n"


def math_reward(text, gold) -> float:
    """1 for a correct reply, or a marked formula that equals the gold one: \\boxed{1+x^2} for x^2+1; else 0."""
    if is_correct(text, gold):
        return 1.0
    (part, marker), wanted = answer_part(text), gold_answer(gold)
    two_numbers = as_fraction(extract_answer(text)) is not None and as_fraction(wanted) is not None
    a_word = re.fullmatch("[A-Za-z ]{3,}", squeeze(wanted))  # to algebra a product of letters: Paris = pairs
    glued = as_fraction(wanted) is not None and re.search(r"[0-9](?:[_']|\s+[0-9])|0[xob]", respell(part))  # 101_2
    if not marker or not squeeze(part) or not wanted or two_numbers or a_word or glued:
        return 0.0
    return float(symbolic_equal(part, wanted))


def load_reward(spec: str, *, unscored=False):
    """'module:function' → reward(question, text, gold) → float, which checks the user's function at every call.

    ValueError, one line that names the function: here, when it cannot be loaded; at a call, when it raises or returns
    anything but a finite number (a bool is one). unscored: None and NaN are no mistake, and come back as NaN.
    """
    def fail(problem, cause=None):
        raise ValueError(" ".join(f"reward {spec!r} {problem}".split())[:300]) from cause

    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        fail("is not module:function, such as my_rewards:brevity")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where the user's file stands
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code may raise anything)
        fail(f"cannot be imported ({type(error).__name__}: {error})", error)
    if not callable(function):
        fail(f"cannot be used: {module_name} has no function {name}")
    if inspect.iscoroutinefunction(function):
        fail("is an async function; make it an ordinary one that waits for its result")

    def reward(question, text, gold) -> float:
        try:
            value = function(question, text, gold)
            value = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code may raise anything)
            fail(f"raised {type(error).__name__}: {error}", error)
        if unscored and (value is None or value != value):  # noqa: PLR0124 (NaN is not itself)
            return float("nan")
        if not isinstance(value, (int, float)) or not -1e308 < value < 1e308:
            fail(f"returned {value if isinstance(value, float) else type(value).__name__}, not a finite number")
        return float(value)

    return reward
