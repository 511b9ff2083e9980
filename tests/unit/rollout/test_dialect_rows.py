"""An agent's rows do not depend on the API by which it speaks, which may change in mid-conversation, nor on
clients that leave and ask again."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.conversation.branches import Branches
from asyncrl.engines.base import Request
from asyncrl.gateway import Endpoint
from asyncrl.types import Generation, Message, Sample, Turn
from asyncrl.wire.messages.worker import Records
from tests.fakes.agents import AgentBench
from tests.fakes.chat import call
from tests.fakes.dialects import DIALECTS, LOOK, Dialect, events_of
from tests.fakes.engine import ScriptedEngine

# No thought without a beginning: what was streamed of it is content, which it turns out not to be.
ANSWERS = (
    "42",
    "",
    " so \n",
    "<think>hm</think>so",
    call("look"),
    "I look. " + call("look", '{"a":  1}') + call("look"),
    "<think>hm</think>" + call("look", '{"ö": "<b>"}'),
    "<tool_call>{",
    "so <tool_call>no JSON</tool_call>",
)
REPLIES = ("7", "", "Error: it broke", " größe\n")


class Said(NamedTuple):
    """What tools reply to a turn, and what the user says next; the tokens at which the turn is cut."""

    reply: str
    question: str
    limit: int | None


class Way(NamedTuple):
    """The way in which one turn is asked for. `leaves`: its client leaves before it has the answer, while
    that is sampled or before it is durable, and asks again."""

    dialect: str
    stream: bool
    leaves: Literal["", "sampling", "posted"] = ""


PLAIN = Way("chat", False)
limits = st.sampled_from([None, None, 1, 4, 30])
says = st.builds(Said, st.sampled_from(REPLIES), st.sampled_from(["", "and?", "so"]), limits)
ways = st.builds(
    Way, st.sampled_from(list(DIALECTS)), st.booleans(), st.sampled_from(["", "", "sampling", "posted"])
)


class HoldingEngine(ScriptedEngine):
    """Where it `holds`, the next request waits until its client has left."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.holds = False
        self.entered = threading.Event()
        self.left = threading.Event()

    async def generate(self, request: Request) -> Generation:
        if self.holds:
            self.holds = False
            self.entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        return await super().generate(request)


class LeavingBench(AgentBench):
    """An agent whose clients leave, and notice that the endpoint knows."""

    def __init__(self, agent: Any) -> None:
        super().__init__(agent, lambda text: ANSWERS[zlib.crc32(text.encode()) % len(ANSWERS)])
        self.engine = self.holding = HoldingEngine(self.script)
        self.posted = threading.Event()
        self.known = threading.Event()

    async def run(self, *arguments: Any, **assigned: Any) -> None:
        self.loop = asyncio.get_running_loop()
        mark = Branches.mark_undelivered

        def marked(branches: Branches, turn: Turn) -> None:
            mark(branches, turn)
            self.known.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Branches, "mark_undelivered", marked)
            await super().run(*arguments, **assigned)

    async def _send(self, records: Records, frames: Sequence[bytes]) -> None:
        await super()._send(records, frames)
        if not self.auto_ack:
            self.posted.set()

    async def leave(self, ask: Coroutine[Any, Any, Any], sampling: bool) -> None:
        engine = self.holding
        entered = engine.entered if sampling else self.posted
        left = engine.left if sampling else self.known
        entered.clear()
        left.clear()
        engine.holds = sampling
        self.auto_ack = sampling
        asking = asyncio.ensure_future(ask)
        assert await asyncio.to_thread(entered.wait, 30)
        asking.cancel()
        assert await asyncio.to_thread(left.wait, 30)
        self.auto_ack = True
        self.loop.call_soon_threadsafe(self.outbox.acknowledge, len(self.sent))


async def asked_by(
    session: aiohttp.ClientSession,
    url: str,
    dialect: Dialect,
    messages: Sequence[Message],
    limit: int | None,
    stream: bool,
) -> Any:
    body = dialect.body(messages, [LOOK], limit=limit, **({"stream": True} if stream else {}))
    async with session.post(url + dialect.path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        if stream:
            return dialect.heard(events_of(await answer.text()))
        return dialect.parse_answer(await answer.json())


def played(prompt: str, all_replies: Sequence[Said], ways: Sequence[Way]) -> tuple[list[Any], list[str]]:
    """The turns of a conversation, and how its client was told that they ended."""
    ends: list[str] = []

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        messages = [Message("system", "be brief"), Message("user", prompt)]
        headers = {"x-api-key": endpoint.api_key}
        async with aiohttp.ClientSession(headers=headers) as session:
            for reply, way in zip(all_replies, ways, strict=True):
                dialect = DIALECTS[way.dialect]
                ask = partial(asked_by, session, endpoint.base_url, dialect, messages, reply.limit)
                if way.leaves:
                    await bench.leave(ask(not way.stream), way.leaves == "sampling")
                heard = await ask(way.stream)
                calls = tuple(heard.calls)
                ends.append(heard.end)
                messages.append(Message("assistant", heard.content, calls, reasoning=heard.reasoning))
                messages += [Message("tool", reply.reply, tool_call_id=it.id, name=it.name) for it in calls]
                if reply.question or not calls:
                    messages.append(Message("user", reply.question))

    bench = LeavingBench(agent)
    bench.finished()
    return [(turn.row, turn.context, turn.generation.ids, turn.generation.stop) for turn in bench.turns], ends


conversations = st.tuples(st.text("abc", max_size=3), st.lists(st.tuples(says, ways), min_size=1, max_size=5))


def check(conversation: tuple[str, list[tuple[Said, Way]]]) -> None:
    prompt, turns = conversation
    all_replies, ways = zip(*turns, strict=True)
    wanted = played(prompt, all_replies, [PLAIN] * len(all_replies))
    assert played(prompt, all_replies, ways) == wanted
    assert len(wanted[0]) == len(all_replies)


@settings(max_examples=40, deadline=None)
@given(conversations)
def test_rows_are_the_same_in_every_dialect(conversation: tuple[str, list[tuple[Said, Way]]]) -> None:
    check(conversation)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(conversations)
def test_rows_of_a_thousand_conversations(conversation: tuple[str, list[tuple[Said, Way]]]) -> None:
    check(conversation)
