"""A run with conversations to read: one with thoughts, tools and markup, its sibling that differs from its
third turn on, an agent of 40 turns with a sub-agent and a rewritten history, and one of megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.types import Message, Sample, ToolCall, ToolReply
from tests.fakes.planted import MARKUP, OPEN, PlantedRun, Played, Said, chat
from tests.unit.buffer.machine import admit

HOSTILE = f"{MARKUP} \x1b[31mred\x1b[0m \u202etxet"
LONG = 10_000_000  # characters of a line
SHOTS = tuple(Message(("user", "assistant")[at % 2], f"example {at}") for at in range(12))
QUESTION = "How many words are in notes.txt?"


def answer(text: str) -> str:
    """What the next turn of a row reads of a tool."""
    return f"\n{chat(('tool', text))}{OPEN}"


def save_conversations(run_dir: Path, long: int = LONG) -> Path:
    """Group 0: 0.0 and 0.1 use tools; group 1: 1.0 is the agent's, 1.1 the long one. All are trained."""
    prompt = (Message("system", "You count."), *SHOTS, Message("user", QUESTION))
    planted_run = PlantedRun(run_dir, [Sample(row, "s", prompt, '"7"') for row in range(4)])
    admit(planted_run.buffer, 2)

    for uid, turns, answer_text, reward in (
        ("0.0", _with_tools("7"), "7", 1.0),
        ("0.1", _with_tools("8"), "8", 0.0),
        ("1.0", _agent(), "done after 40 turns", 0.5),
        ("1.1", _long(long), MARKUP, 0.0),
    ):
        halves = [turn._replace(versions=(0, 1)) for turn in turns]
        planted_run.land(uid, Played(halves, answer_text, reward, {"right": reward, "format": 1.0}))

    planted_run.commit()
    return planted_run.close()


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def _with_tools(word_count: str) -> list[Said]:
    read = '{"command": "cat notes.txt"}'
    count = '{"command": "wc -w notes.tx"}'
    replies = (
        ToolReply(ToolCall("shell", read), HOSTILE, seconds=0.2),
        ToolReply(ToolCall("shell", count), "no such file", error="exit status 1", seconds=0.1),
    )

    thought = "<think>First I look at the file.</think>\n"
    begin = chat(*((shot.role, shot.content) for shot in SHOTS), ("user", QUESTION)) + OPEN
    return [
        Said(thought + _call("shell", read), replies[0], begin),
        Said(_call("shell", count), replies[1], answer(HOSTILE)),
        Said(f"There are {word_count} words.<|im_end|>", None, answer("no such file")),
    ]


def _agent() -> list[Said]:
    """Rows 0 and 2 are the agent's, whose history is cut at turn 24; row 1 is a sub-agent's of three turns;
    row 3 asks for a title, in the last turn."""
    system = ("system", "You are an agent. " * 20)
    task = ("user", "Fix the failing test in utils.py.")
    helper = chat(("system", "You search."), ("user", "Find where parse is called")) + OPEN

    turns: list[Said] = []

    def say(row: int, context: str, text: str, agent: str = "main") -> None:
        turns.append(Said(f"{text}<|im_end|>", None, context, row, agent))

    begin = chat(system, task)
    say(0, begin + OPEN, "I look at step 0.")
    first = begin + OPEN + "I look at step 0.<|im_end|>\n"
    for at in range(1, 20):
        say(0, answer(f"output of step {at}"), f"Now step {at}.")

    say(1, helper, "I search.", "search")
    for at in range(2):
        say(1, answer(f"found {at}"), f"Result {at}.", "search")
    say(2, first + chat(("user", "The search is over; older steps are left out.")) + OPEN, "I go on.")
    for at in range(24, 39):
        say(2, answer(f"output of step {at}"), f"Now step {at}.")

    say(
        3,
        chat(("system", "You write titles."), ("user", "A title for: Fix the failing test")) + OPEN,
        "Test fix",
        "title",
    )
    return turns


def _long(long: int) -> Sequence[Said]:
    reply = ToolReply(ToolCall("shell", '{"command": "cat big"}'), "x" * long)
    words = " ".join(str(at) for at in range(long // 800))
    return [
        Said(_call("shell", '{"command": "cat big"}'), reply, chat(("user", QUESTION)) + OPEN),
        Said(f"{words}<|im_end|>", None, OPEN),
    ]
