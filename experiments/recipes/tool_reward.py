"""The reward of tool calling: 1 when a reply holds exactly the expected call, else 0.

    --reward experiments.recipes.tool_reward:exact_call

A call is a JSON object with a name and its arguments, {"name": "add", "arguments": {"a": 1, "b": 2}}. Prose or a code
fence may stand around it. The order of keys and the white space do not matter; 1, 1.0, "1" and true are four different
arguments.
"""

import json

ARGUMENTS = ("arguments", "parameters")  # models call them by either name


def find_calls(text: str) -> list[str]:
    """Every call in a text, in order, each in one canonical spelling. No text raises."""
    calls, position = [], text.find("{")
    while position >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            found, end = None, position + 1  # no JSON begins here, or half of it is missing
        key = next((key for key in ARGUMENTS if key in found), None) if found else None
        if found and isinstance(found.get("name"), str):
            calls.append(json.dumps([found["name"], found[key] if key else {}], sort_keys=True))
        position = text.find("{", end)
    return calls


def exact_call(question: str, response: str, answer: str) -> float:
    """1.0 when the calls in the response are those in the answer, one for one; a second guess costs the reward.

    Raises ValueError when the answer holds no call: the data is at fault, not the model.
    """
    expected = find_calls(answer)
    if not expected:
        raise ValueError(f"the answer {answer[:60]!r} holds no call such as {{\"name\": …, \"arguments\": {{…}}}}")
    return float(find_calls(response[-10_000:]) == expected)
