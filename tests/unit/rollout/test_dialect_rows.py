"""An agent's rows do not depend on the API by which it speaks, which may change in mid-conversation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.gateway import Endpoint
from asyncrl.types import Message, Sample, Turn
from tests.fakes.agents import AgentBench
from tests.fakes.chat import call
from tests.fakes.dialects import DIALECTS, LOOK, events_of

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


class Way(NamedTuple):
    """The way in which one turn is asked for."""

    dialect: str
    stream: bool


PLAIN = Way("chat", False)
ways = st.builds(Way, st.sampled_from(list(DIALECTS)), st.booleans())


def played(prompt: str, said: Sequence[tuple[str, str]], asked: Sequence[Way]) -> list[Turn]:
    """The turns of a conversation. `said`: of each turn what its tools reply, and what the user says next."""

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        messages = [Message("system", "be brief"), Message("user", prompt)]
        headers = {"x-api-key": endpoint.api_key}
        async with aiohttp.ClientSession(headers=headers) as session:
            for (reply, question), way in zip(said, asked, strict=True):
                dialect = DIALECTS[way.dialect]
                body = dialect.body(messages, [LOOK], **({"stream": True} if way.stream else {}))
                async with session.post(endpoint.base_url + dialect.path, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    if way.stream:
                        heard = dialect.heard(events_of(await answer.text()))
                    else:
                        heard = dialect.whole(await answer.json())
                calls = tuple(heard.calls)
                messages.append(Message("assistant", heard.content, calls, reasoning=heard.reasoning))
                messages += [Message("tool", reply, tool_call_id=one.id, name=one.name) for one in calls]
                if question or not calls:
                    messages.append(Message("user", question))

    bench = AgentBench(agent, lambda text: ANSWERS[zlib.crc32(text.encode()) % len(ANSWERS)])
    bench.finished()
    return bench.turns


conversations = st.tuples(
    st.text("abc", max_size=3),
    st.lists(
        st.tuples(st.sampled_from(REPLIES), st.sampled_from(["", "and?", "so"]), ways), min_size=1, max_size=5
    ),
)


def check(conversation: tuple[str, list[tuple[str, str, Way]]]) -> None:
    prompt, turns = conversation
    said = [(reply, question) for reply, question, _ in turns]
    wanted = played(prompt, said, [PLAIN] * len(said))
    found = played(prompt, said, [way for _, _, way in turns])
    assert [(one.row, one.context, one.ids) for one in found] == [
        (one.row, one.context, one.ids) for one in wanted
    ]


@settings(max_examples=40, deadline=None)
@given(conversations)
def test_rows_are_the_same_in_every_dialect(conversation: tuple[str, list[tuple[str, str, Way]]]) -> None:
    check(conversation)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(conversations)
def test_rows_of_a_thousand_conversations(conversation: tuple[str, list[tuple[str, str, Way]]]) -> None:
    check(conversation)
