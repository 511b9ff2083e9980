"""A run with conversations to read: one with thoughts, tools and markup, its sibling that differs from its
third turn on, an agent of 40 turns with a sub-agent and a rewritten history, and one of megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from asyncrl.buffer.payloads import extend
from asyncrl.config import parse
from asyncrl.data import samples_path
from asyncrl.store.runstore import RunStore
from asyncrl.types import (
    EpisodeEnd,
    EpisodeResult,
    EpisodeStats,
    Message,
    Sample,
    StopReason,
    ToolCall,
    ToolReply,
    Turn,
    TurnReply,
    VersionSpan,
)
from tests.fakes.data import stored
from tests.fakes.viewed import MARKUP, MODEL
from tests.unit.buffer.machine import admit, make, run, train

HOSTILE = f"{MARKUP} \x1b[31mred\x1b[0m \u202etxet"
LONG = 10_000_000  # characters of a line
SHOTS = tuple(Message(("user", "assistant")[at % 2], f"example {at}") for at in range(12))
QUESTION = "How many words are in notes.txt?"


class Scribe:
    """Writes episodes as workers send them, by the tokenizer of the demo's model."""

    def __init__(self, store: RunStore) -> None:
        self.store, self._encode = store, Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text, add_special_tokens=False).ids)

    def turn(self, index: int, context: str, text: str, **fields: object) -> Turn:
        """The first half of its tokens is of version 0, the rest of version 1."""
        ids = self.ids(text)
        half, end = len(ids) // 2, len(ids)
        spans = tuple(
            VersionSpan(*ends, version, version)
            for version, ends in enumerate([(0, half), (half, end)])
            if ends[1] > ends[0]
        )
        logprobs = tuple(-float(at % 5) for at in range(end))
        return msgspec.structs.replace(
            Turn(index, self.ids(context), ids, logprobs, spans, StopReason.STOP, seconds=1.5), **fields
        )


def chat(*messages: tuple[str, str]) -> str:
    """As the template writes it."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


OPEN = "<|im_start|>assistant\n"


def answer(text: str) -> str:
    """What the next turn of a row reads of a tool."""
    return f"\n{chat(('tool', text))}{OPEN}"


def save_conversations(run_dir: Path, long: int = LONG) -> Path:
    """Group 0: 0.0 and 0.1 use tools; group 1: 1.0 is the agent's, 1.1 the long one. All are trained."""
    buffer, batches = make(rows=4, max_staleness=4)
    prompt = (Message("system", "You count."), *SHOTS, Message("user", QUESTION))
    samples = stored([Sample(row, "s", prompt, '"7"') for row in range(4)])
    admit(buffer, 2)
    store = RunStore(run_dir)
    scribe = Scribe(store)
    episodes = {
        "0.0": (_with_tools(scribe, "7"), 1.0, "7"),
        "0.1": (_with_tools(scribe, "8"), 0.0, "8"),
        "1.0": (list(_agent(scribe)), 0.5, "done after 40 turns"),
        "1.1": (_long(scribe, long), 0.0, MARKUP),
    }
    for uid, (turns, reward, said) in episodes.items():
        run(buffer, uid)
        episode, calls = buffer.episodes[uid], [reply for turn in turns for reply in turn.replies]
        for turn in turns:
            extend(episode, turn)
            bare = msgspec.structs.replace(turn, replies=())
            store.put_frame(uid, turn.index, "generated", msgspec.msgpack.encode(bare))
            store.put_frame(uid, turn.index, "replied", msgspec.msgpack.encode(TurnReply(turn.replies)))
            store.put_calls(uid, turn.index, turn.replies)
        buffer.touch(episode)
        rewards = (*(0.0 for _ in turns[1:]), reward)
        parts = {"right": reward, "format": 1.0}
        result = EpisodeResult(reward, episode.sampled, rewards, parts, end=EpisodeEnd.ANSWERED)
        failed = sum(reply.error is not None for reply in calls)
        episode.failed_tool = "shell" if failed else ""
        buffer.finish(episode, result, EpisodeStats(len(turns), len(calls), failed=failed, seconds=9.0), 0.0)
        store.put_answer(uid, said)
    for group in range(2):
        store.put_question(group, samples[group])
    train(batches, 0)
    groups, records = buffer.changes()
    store.put_groups(groups, buffer.live)
    store.put_episodes(records)
    store.put_commit(1, 1, batches.batches[0].plan_hash)
    store.commit()
    store.close()
    samples.save(samples_path(run_dir, "train"))
    config = {"name": run_dir.name, "model": {"path": str(MODEL)}, "data": {"train": "x"}}
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(parse(config)))
    return run_dir


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def _with_tools(scribe: Scribe, found: str) -> list[Turn]:
    read, count = '{"command": "cat notes.txt"}', '{"command": "wc -w notes.tx"}'
    replies = (
        ToolReply(ToolCall("shell", read), HOSTILE, seconds=0.2),
        ToolReply(ToolCall("shell", count), "no such file", error="exit status 1", seconds=0.1),
    )
    thought = "<think>First I look at the file.</think>\n"
    begin = chat(*((one.role, one.content) for one in SHOTS), ("user", QUESTION)) + OPEN
    return [
        scribe.turn(0, begin, thought + _call("shell", read), replies=replies[:1]),
        scribe.turn(1, answer(HOSTILE), _call("shell", count), replies=replies[1:]),
        scribe.turn(2, answer("no such file"), f"There are {found} words.<|im_end|>"),
    ]


def _agent(scribe: Scribe) -> list[Turn]:
    """Rows 0 and 2 are the agent's, whose history is cut at turn 24; row 1 is a sub-agent's of three turns;
    row 3 asks for a title, in the last turn."""
    system, task = ("system", "You are an agent. " * 20), ("user", "Fix the failing test in utils.py.")
    helper = chat(("system", "You search."), ("user", "Find where parse is called")) + OPEN
    turns: list[Turn] = []

    def say(row: int, context: str, text: str, agent: str = "main") -> None:
        turns.append(scribe.turn(len(turns), context, f"{text}<|im_end|>", row=row, agent=agent))

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


def _long(scribe: Scribe, long: int) -> Sequence[Turn]:
    reply = ToolReply(ToolCall("shell", '{"command": "cat big"}'), "x" * long)
    words = " ".join(str(at) for at in range(long // 800))
    return [
        scribe.turn(
            0, chat(("user", QUESTION)) + OPEN, _call("shell", '{"command": "cat big"}'), replies=(reply,)
        ),
        scribe.turn(1, OPEN, f"{words}<|im_end|>"),
    ]
