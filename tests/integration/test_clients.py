"""Clients as people use them, in real episodes over the gateway: each solves the same task with a tool, as
its own page shows. A client is a row of the table; then what single clients see, and programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncrl.config import composition
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import EngineError
from asyncrl.gateway import Endpoint, load_agent
from asyncrl.rewards import RewardInput
from asyncrl.rollout.samplers import engine_factory
from asyncrl.types import EpisodeEnd, Sample, StopReason
from asyncrl.wire.messages.worker import Failed, Finished
from tests.fakes.agents import AgentBench
from tests.fakes.chat import call
from tests.fakes.episodes import read
from tools import clients

NUMBER = {"type": "number"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    },
}
ADD = call("add", '{"a":  1, "b": 2}')  # with a blank that no client sends back
QUESTION = "What is 1 + 2?"


def adder(prompt: str) -> str:
    """Calls the tool once, then answers with what it said."""
    _, bracket, reply = prompt.rpartition("[")
    return f"it is {reply.rstrip(']')}" if bracket and reply.endswith("]") else "let me see " + ADD


def led(lead: Callable[[Endpoint], Any]) -> Callable[[Sample, Endpoint], Any]:
    """An agent that does not look at its sample."""
    return lambda sample, endpoint: lead(endpoint)


def keys(endpoint: Endpoint) -> dict[str, str]:
    return {"base_url": endpoint.base_url, "api_key": endpoint.api_key}


# -- the table ---------------------------------------------------------------------------------------


def openai_sync(endpoint: Endpoint) -> str:
    from openai import OpenAI

    with OpenAI(**keys(endpoint)) as client:
        assert [model.id for model in client.models.list()] == [endpoint.model]
        history: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(2):
            answer = client.chat.completions.create(
                model=endpoint.model, messages=history, tools=[TOOL], temperature=0.2
            )
            message = answer.choices[0].message
            history.append(message.model_dump(exclude_none=True))
            for tool_call in message.tool_calls or ():
                arguments = json.loads(tool_call.function.arguments)
                content = str(arguments["a"] + arguments["b"])
                history.append({"role": "tool", "tool_call_id": tool_call.id, "content": content})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("it is 3") + 1
        return str(message.content)


async def openai_streams(endpoint: Endpoint) -> str:
    from openai import AsyncOpenAI

    strict: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    request: Any = {"model": endpoint.model, "messages": history, "tools": [strict]}
    async with AsyncOpenAI(**keys(endpoint)) as client:
        async with client.chat.completions.stream(**request) as events:
            async for _ in events:
                pass
            message = (await events.get_final_completion()).choices[0].message
        assert message.tool_calls is not None
        history.append({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls})
        history.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"})
        chunks = await client.chat.completions.create(stream=True, **request)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def langgraph(endpoint: Endpoint) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(a: float, b: float) -> str:
        """Add two numbers."""
        return f"{a + b:g}"

    bound = ChatOpenAI(model=endpoint.model, **keys(endpoint)).bind_tools([add])  # type: ignore[arg-type]

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    state = await graph.compile().ainvoke({"messages": [("user", QUESTION)]})
    return str(state["messages"][-1].content)


def agents_of_openai(streamed: bool) -> Callable[[Endpoint], Awaitable[str]]:
    """By default it asks /v1/responses."""

    async def lead(endpoint: Endpoint) -> str:
        agents = pytest.importorskip("agents")
        from openai import AsyncOpenAI

        @agents.function_tool
        def add(a: int, b: int) -> str:
            """Add two numbers."""
            return str(a + b)

        model = agents.OpenAIResponsesModel(endpoint.model, AsyncOpenAI(**keys(endpoint)))
        helper = agents.Agent(name="Hello", instructions="You help.", model=model, tools=[add])
        quiet = agents.RunConfig(tracing_disabled=True)
        if not streamed:
            return str((await agents.Runner.run(helper, QUESTION, run_config=quiet)).final_output)
        run = agents.Runner.run_streamed(helper, QUESTION, run_config=quiet)
        heard = ""
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                heard += event.data.delta
        assert heard == "let me see" + run.final_output
        return str(run.final_output)

    return lead


def pydantic_ai(model: str) -> Callable[[Endpoint], Awaitable[str]]:
    """Its requests demand a call of the tool that takes the typed output."""

    async def lead(endpoint: Endpoint) -> str:
        pytest.importorskip("pydantic_ai")
        from pydantic import BaseModel
        from pydantic_ai import Agent
        from pydantic_ai.models import openai
        from pydantic_ai.providers.openai import OpenAIProvider

        class Sum(BaseModel):
            text: str

        provider = OpenAIProvider(**keys(endpoint))
        helper = Agent(getattr(openai, model)(endpoint.model, provider=provider), output_type=Sum)

        @helper.tool_plain
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        return str((await helper.run(QUESTION)).output.text)

    return lead


def final_result(prompt: str) -> str:
    return call("final_result", '{"text": "it is 3"}') if "[3]" in prompt else adder(prompt)


def smolagents(kind: str) -> Callable[[Endpoint], str]:
    """A code agent names texts to stop at; the model's tag after the code is one of them, and it adds text of
    its own to the model's messages, so each turn begins a row. A tool calling agent demands calls."""

    def lead(endpoint: Endpoint) -> str:
        package = pytest.importorskip("smolagents")

        @package.tool
        def add(a: int, b: int) -> int:
            """Add two numbers.

            Args:
                a: The first.
                b: The second.
            """
            return a + b

        model = package.OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
        tools = [] if kind == "CodeAgent" else [add]
        return str(getattr(package, kind)(tools=tools, model=model, verbosity_level=0).run(QUESTION))

    return lead


def code(prompt: str) -> str:
    if "Out - Final" in prompt or "Last output" in prompt:
        return "Thought: it is three.\n<code>\nfinal_answer(f'it is {x}')\n</code>never read"
    return "Thought: I add.\n<code>\nx = 1 + 2\nprint(x)\nx\n</code>never read"


def final_answer(prompt: str) -> str:
    return call("final_answer", '{"answer": "it is 3"}') if "Observation:\n3" in prompt else adder(prompt)


class Client(NamedTuple):
    """Its episode is of two turns. `calls`: of tools; `rows`: of tokens."""

    lead: Callable[[Endpoint], Any]
    script: Callable[[str], str] = adder
    calls: int = 1
    rows: int = 1


CLIENTS = {
    "openai": Client(openai_sync),
    "openai, streamed": Client(openai_streams),
    "langgraph": Client(langgraph),
    "openai-agents": Client(agents_of_openai(streamed=False)),
    "openai-agents, streamed": Client(agents_of_openai(streamed=True)),
    "pydantic-ai": Client(pydantic_ai("OpenAIChatModel"), final_result, calls=2),
    "pydantic-ai by responses": Client(pydantic_ai("OpenAIResponsesModel"), final_result, calls=2),
    "smolagents' code agent": Client(smolagents("CodeAgent"), code, calls=0, rows=2),
    "smolagents' tool calling agent": Client(smolagents("ToolCallingAgent"), final_answer, calls=2, rows=2),
}
IN_THE_GATE = ("openai", "openai, streamed", "langgraph", "openai-agents", "openai-agents, streamed")


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(made, id=name, marks=[] if name in IN_THE_GATE else [pytest.mark.full])
        for name, made in CLIENTS.items()
    ],
)
def test_clients(client: Client) -> None:
    answers = []

    async def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        answer = client.lead(endpoint)
        return {"said": answer if isinstance(answer, str) else await answer}

    def reward(given: RewardInput) -> float:
        answers.append(given.result)
        return 1.0

    bench = AgentBench(agent, client.script, reward, limits={"max_tokens": 40_000})
    stats = bench.finished().stats
    assert answers == [{"said": "it is 3"}]
    assert (stats.turns, stats.tool_calls, stats.rows) == (2, client.calls, client.rows)
    if client.script is adder:
        (row,) = bench.rows
        assert row.endswith(f"let me see {ADD}[3]it is 3")


def test_a_client_of_the_table_in_the_docs_leads_an_episode() -> None:
    """Of `make clients`, with the packages that are here."""
    outcome = clients.run("openai_python", clients.LIBRARIES["openai_python"], Path(sys.prefix), "chat")
    assert outcome == clients.Outcome("2→1", False, {"chat/completions"})


# -- what single clients see -------------------------------------------------------------------------


def test_the_client_sees_limits_and_strange_keys() -> None:
    from openai import AuthenticationError, OpenAI

    def lead(endpoint: Endpoint) -> None:
        with (
            OpenAI(base_url=endpoint.base_url, api_key="sk-other") as stranger,
            pytest.raises(AuthenticationError),
        ):
            stranger.models.list()
        with OpenAI(**keys(endpoint)) as client:
            for text in ("q", "x" * 5000):
                client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": text}])

    end = AgentBench(led(lead)).finished()  # the client's BadRequestError ended the agent
    assert (end.result.end, end.stats.turns) == (EpisodeEnd.LENGTH, 1)


@pytest.mark.full
def test_litellm_knows_a_full_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")

    def lead(endpoint: Endpoint) -> None:
        endpoint_options = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}

        def complete(text: str) -> None:
            messages = [{"role": "user", "content": text}]
            litellm.completion(messages=messages, model=f"openai/{endpoint.model}", **endpoint_options)

        complete("q")
        for times in (10_000, 200_000):
            with pytest.raises(litellm.exceptions.ContextWindowExceededError):
                complete("long " * times)

    assert AgentBench(led(lead), limits={"max_tokens": 40_000}).finished().stats.turns == 1


def test_the_client_gets_several_answers_that_stop_at_a_text() -> None:
    from openai import OpenAI

    texts = iter(["a. b", "c. d", "e. f"])

    def lead(endpoint: Endpoint) -> None:
        with OpenAI(**keys(endpoint)) as client:
            assert client.models.retrieve("gpt-4o").id == "gpt-4o"
            messages = [{"role": "user", "content": "q"}]
            request: Any = {"model": endpoint.model, "messages": messages, "stop": "."}
            completion = client.chat.completions.create(n=2, **request)
            texts = [choice.message.content for choice in completion.choices]
            for chunk in client.chat.completions.create(stream=True, **request):
                texts.append(chunk.choices[0].delta.content or "")
            assert {choice.finish_reason for choice in completion.choices} == {"stop"}
            assert "".join(map(str, texts)) == "ace"

    bench = AgentBench(led(lead), lambda prompt: next(texts))
    assert bench.finished().stats.rows == 3
    assert bench.rows == ["qa.", "qc.", "qe."]


@pytest.mark.long
def test_a_model_that_is_streamed_and_stopped() -> None:
    """The demo model on its own engine: what was streamed is the message, and a text at which the turn stops
    leaves the beginning of the same turn, its log-probs and its row."""
    from openai import OpenAI

    config = composition.compose(["experiment=calculator", "validation.samples=0"])
    texts: list[str] = []

    def lead(endpoint: Endpoint) -> None:
        with OpenAI(**keys(endpoint)) as client:
            history: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
            stop = [texts[0][2:6]] if texts else []
            stream = client.chat.completions.create(
                model=endpoint.model, messages=history, stream=True, stop=stop
            )
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))

    turns = []
    for _ in range(2):
        bench = AgentBench(led(lead))
        bench.context = replace(bench.context, rules=EpisodeParts(config).rules)
        bench.engine = engine_factory(config)()  # type: ignore[assignment]
        bench.finished()
        turns += bench.turns
    whole_turn, cut = [turn.generation for turn in turns]
    count = len(cut.ids)
    assert len(whole_turn.ids) > count and texts[1] == texts[0][:2]
    assert (cut.stop, cut.ids, cut.logprobs) == (
        StopReason.TEXT,
        whole_turn.ids[:count],
        whole_turn.logprobs[:count],
    )


# -- programs ----------------------------------------------------------------------------------------


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
    assert bench.finished().stats.turns == 2
    assert bench.rows == ["q42sure?42"]


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
    secret = '"the-hidden-answer"'
    scored = list[str]()

    def script(prompt: str) -> str:
        if prompt.endswith("break"):
            raise EngineError("broke")
        return "42"

    def reward(given: RewardInput) -> float:
        scored.append(given.sample.ground_truth)
        return 1.0

    line = f"{sys.executable} {tmp_path}/curious.py {tmp_path}/seen.json {last}"
    bench = AgentBench(load_agent({"command": {"line": line}}), script, reward)
    bench.sample = Sample(7, "test", bench.sample.prompt, secret, extra_info_json=f'{{"answer": {secret}}}')
    assert isinstance(bench.play(), end)
    statuses, seen = json.loads((tmp_path / "seen.json").read_text())
    assert statuses[:13] == [200, 200, 404, 404, 404, 401, 400, 400, *[200] * 5]
    killed_before = not statuses[13:] and end is Failed  # an episode that fails does not wait for its program
    assert statuses[13:] == [status] or killed_before
    assert not [text for text in seen if "hidden" in text] and json.loads(seen[0])["row"] == 7
    assert not any("hidden" in read(request.ids) for request in bench.engine.requests)
    assert scored == [json.loads(secret)] * (end is Finished)
