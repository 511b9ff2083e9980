"""Real clients against the gateway: the openai package, sync and async, a LangGraph agent, a shell script."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import composition
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import EngineError
from asyncrl.gateway import Endpoint, load_agent
from asyncrl.rewards import RewardInput
from asyncrl.rollout.samplers import engine_factory
from asyncrl.types import EpisodeEnd, FailReason, Sample, StopReason
from asyncrl.wire.messages.worker import Failed, Finished
from tests.fakes.agents import AgentBench, read
from tests.fakes.chat import call

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
ADD = call("add", '{"a":  1, "b": 2}')  # with a blank that no client sends back


def adder(prompt: str) -> str:
    """Calls the tool once, then answers with what it said."""
    _, found, reply = prompt.rpartition("[")
    return f"it is {reply.rstrip(']')}" if found and reply.endswith("]") else "let me see " + ADD


def finished(bench: AgentBench) -> Finished:
    end = bench.play()
    assert isinstance(end, Finished), end
    return end


def whole_row(bench: AgentBench) -> None:
    """One row, in which the model's own spelling stands."""
    assert finished(bench).stats.rows == 1
    (row,) = bench.rows
    assert row.endswith(f"let me see {ADD}[3]it is 3")


def test_the_sync_client() -> None:
    from openai import OpenAI

    def agent(sample: Sample, endpoint: Endpoint) -> float:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            assert [model.id for model in client.models.list()] == [endpoint.model]
            history: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            for _ in range(2):
                answer = client.chat.completions.create(
                    model=endpoint.model, messages=history, tools=[TOOL], temperature=0.2
                )
                message = answer.choices[0].message
                history.append(message.model_dump(exclude_none=True))
                for made in message.tool_calls or ():
                    given = json.loads(made.function.arguments)
                    content = str(given["a"] + given["b"])
                    history.append({"role": "tool", "tool_call_id": made.id, "content": content})
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len("it is 3") + 1
            return float(message.content == "it is 3")

    results: list[Any] = []

    def reward(given: RewardInput) -> float:
        results.append(given.result)
        return 1.0

    whole_row(AgentBench(agent, adder, reward))
    assert results == [1.0]


def test_the_async_client_streams() -> None:
    from openai import AsyncOpenAI

    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}

    async def agent(sample: Sample, endpoint: Endpoint) -> None:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            history: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            stream = client.chat.completions.stream(model=endpoint.model, messages=history, tools=[strict])
            async with stream as events:
                async for _ in events:
                    pass
                message = (await events.get_final_completion()).choices[0].message
            assert message.tool_calls is not None
            history.append(
                {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls}
            )
            history.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"})
            text = ""
            async for chunk in await client.chat.completions.create(
                model=endpoint.model, messages=history, tools=[strict], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == "it is 3"

    whole_row(AgentBench(agent, adder))


def test_the_client_sees_limits_and_expired_keys() -> None:
    from openai import AuthenticationError, OpenAI

    kept: list[Endpoint] = []

    def agent(sample: Sample, endpoint: Endpoint) -> None:
        kept.append(endpoint)
        with (
            OpenAI(base_url=endpoint.base_url, api_key="sk-other") as stranger,
            pytest.raises(AuthenticationError),
        ):
            stranger.models.list()
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for text in ("q", "x" * 5000):
                client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": text}])

    bench = AgentBench(agent)
    end = finished(bench)  # the client's BadRequestError ended the agent
    assert (end.result.end, end.stats.turns) == (EpisodeEnd.LENGTH, 1)


def test_the_client_gets_several_answers_that_stop_at_a_text() -> None:
    from openai import OpenAI

    texts = iter(["a. b", "c. d", "e. f"])

    def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            assert client.models.retrieve("gpt-4o").id == "gpt-4o"
            asked: Any = {
                "model": endpoint.model,
                "messages": [{"role": "user", "content": "q"}],
                "stop": ".",
            }
            whole = client.chat.completions.create(n=2, **asked)
            said = [choice.message.content for choice in whole.choices]
            for chunk in client.chat.completions.create(stream=True, **asked):
                said.append(chunk.choices[0].delta.content or "")
            assert {choice.finish_reason for choice in whole.choices} == {"stop"}
        return {"said": "".join(map(str, said))}

    bench = AgentBench(agent, lambda prompt: next(texts))
    assert finished(bench).stats.rows == 3
    assert bench.rows == ["qa.", "qc.", "qe."]


@pytest.mark.long
def test_a_model_that_is_streamed_and_stopped() -> None:
    """The demo model on its own engine: what was streamed is the message, and a text at which the turn stops
    leaves the beginning of the same turn, its log-probs and its row."""
    from openai import OpenAI

    config = composition.compose(["experiment=calculator", "validation.samples=0"])
    said: list[str] = []

    def agent_of(stop: list[str]) -> Any:
        def agent(sample: Sample, endpoint: Endpoint) -> None:
            with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                history: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
                stream = client.chat.completions.create(
                    model=endpoint.model, messages=history, stream=True, stop=stop
                )
                said.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

        return agent

    turns = []
    for _ in range(2):
        bench = AgentBench(agent_of([said[0][2:6]] if turns else []))
        bench.context = replace(bench.context, rules=EpisodeParts(config).rules)
        bench.engine = engine_factory(config)()  # type: ignore[assignment]
        finished(bench)
        turns += bench.turns
    whole, cut = turns
    assert len(whole.ids) > len(cut.ids)
    assert (cut.stop, cut.ids, cut.logprobs) == (
        StopReason.TEXT,
        whole.ids[: len(cut.ids)],
        whole.logprobs[: len(cut.ids)],
    )
    assert said[1] == said[0][:2]


def test_a_langgraph_agent() -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(a: float, b: float) -> str:
        """Add two numbers."""
        return f"{a + b:g}"

    async def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        model = ChatOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model)  # type: ignore[arg-type]
        bound = model.bind_tools([add])

        async def think(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await bound.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("think", think)
        graph.add_node("tools", ToolNode([add]))
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", tools_condition)
        graph.add_edge("tools", "think")
        state = await graph.compile().ainvoke({"messages": [("user", "1 + 2?")]})
        return {"steps": len(state["messages"])}

    bench = AgentBench(agent, adder)
    whole_row(bench)
    assert bench.sent[-1].stats.tool_calls == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_shell_script_with_curl(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(
        """
set -e
ask() {
  curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -d "$1"
}
ask '{"messages": [{"role": "user", "content": "q"}]}' >&2
ask '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "42"},
                   {"role": "user", "content": "sure?"}]}' >&2
echo 0.75
"""
    )
    bench = AgentBench(load_agent({"command": {"line": f"sh {script}"}}))
    assert finished(bench).stats.turns == 2
    assert bench.rows == ["q42sure?42"]


def test_a_program_that_is_killed_fails_and_one_that_hangs_ends(tmp_path: Path) -> None:
    ask = (
        "import json, os, signal, time, urllib.request\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'q'}]}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
    )
    endings = {"killed": "os.kill(os.getpid(), signal.SIGKILL)", "hung": "time.sleep(600)"}
    for name, code in endings.items():
        (tmp_path / f"{name}.py").write_text(ask + code)
    line = f"{sys.executable} {tmp_path}/"
    end = AgentBench(load_agent({"command": {"line": line + "killed.py"}})).play()
    assert isinstance(end, Failed)
    assert (end.reason, "code -9" in end.detail) == (FailReason.AGENT_ERROR, True)
    hung = AgentBench(load_agent({"command": {"line": line + "hung.py"}}), episode_timeout=4.0)
    assert finished(hung).result.end is EpisodeEnd.TIMEOUT


CURIOUS = '''
"""Asks for all that there is, and writes what it was given and told into a file."""
import json, os, sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen

seen, statuses = [sys.stdin.read(), str(dict(os.environ))], []


def ask(path, body=None, key=os.environ["OPENAI_API_KEY"]):
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    url = os.environ["OPENAI_BASE_URL"] + path
    try:
        answer = urlopen(Request(url, data, {"Authorization": "Bearer " + key}))
    except HTTPError as error:
        answer = error
    statuses.append(answer.status)
    seen.append(f"{answer.headers}{answer.read().decode()}")


def said(text):
    return {"messages": [{"role": "system", "content": "Cheat."}, {"role": "user", "content": text}]}


for path in ("/models", "/models/ground_truth", "/ground_truth", "/../sample", "/responses/1"):
    ask(path)
ask("/models", key="guess")
ask("/chat/completions", b"{")
ask("/chat/completions", {"messages": "x"})
ask("/chat/completions", said("q"))
ask("/chat/completions", {**said("q"), "n": 2, "logprobs": True, "metadata": {"ground_truth": ""}})
ask("/chat/completions", {**said("q"), "stream": True, "stream_options": {"include_usage": True}})
ask("/responses", {"input": "q"})
ask("/responses", {"input": "q", "stream": True})


def write(path):
    with open(path + ".new", "w") as file:
        json.dump([statuses, seen], file)
    os.replace(path + ".new", path)


write(sys.argv[1])
ask("/chat/completions", said(sys.argv[2]))
write(sys.argv[1])
'''


@pytest.mark.parametrize(("last", "status", "end"), [("x" * 5000, 400, Finished), ("break", 500, Failed)])
def test_a_client_never_sees_the_ground_truth(tmp_path: Path, last: str, status: int, end: type) -> None:
    """Nor does the model. Only the reward does."""
    (tmp_path / "curious.py").write_text(CURIOUS)
    secret, scored = '"the-hidden-answer"', list[str]()

    def script(prompt: str) -> str:
        if prompt.endswith("break"):
            raise EngineError("broke")
        return "42"

    def reward(given: RewardInput) -> float:
        scored.append(given.sample.ground_truth)
        return 1.0

    line = f"{sys.executable} {tmp_path}/curious.py {tmp_path}/seen.json {last}"
    bench = AgentBench(load_agent({"command": {"line": line}}), script, reward)
    bench.sample = Sample(7, "test", bench.sample.prompt, secret, extra_info=f'{{"answer": {secret}}}')
    assert isinstance(bench.play(), end)
    statuses, seen = json.loads((tmp_path / "seen.json").read_text())
    assert statuses[:13] == [200, 200, 404, 404, 404, 401, 400, 400, *[200] * 5]
    killed_before = not statuses[13:] and end is Failed  # an episode that fails does not wait for its program
    assert statuses[13:] == [status] or killed_before
    assert not [text for text in seen if "hidden" in text] and json.loads(seen[0])["row"] == 7
    assert not any("hidden" in read(request.ids) for request in bench.engine.requests)
    assert scored == [secret] * (end is Finished)
