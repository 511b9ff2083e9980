"""Hello-worlds of agents off the shelf, as their own pages show them, in real episodes over the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.gateway import Agent, Endpoint
from asyncrl.rewards import RewardInput
from asyncrl.types import EpisodeStats, Sample
from asyncrl.wire.messages.worker import Finished
from tests.fakes.agents import AgentBench
from tests.fakes.chat import call


def played(agent: Agent, script: Callable[[str], str]) -> tuple[Any, EpisodeStats]:
    """What the agent returned, and the size of its episode."""
    results = []

    def reward(given: RewardInput) -> float:
        results.append(given.result)
        return 1.0

    end = AgentBench(agent, script, reward, limits={"max_tokens": 40_000}).play()
    assert isinstance(end, Finished), end
    return results[0], end.stats


@pytest.mark.full
def test_smolagents_code_agent() -> None:
    """Its requests name texts to stop at; the model's tag after the code is one of them. It adds text of its
    own to the model's messages, so each turn begins a row."""
    smolagents = pytest.importorskip("smolagents")

    def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        model = smolagents.OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
        code_agent = smolagents.CodeAgent(tools=[], model=model, verbosity_level=0)
        return {"said": code_agent.run("What is 1 + 2?")}

    def script(prompt: str) -> str:
        if "Out - Final" in prompt or "Last output" in prompt:
            return "Thought: it is three.\n<code>\nfinal_answer(x)\n</code>never read"
        return "Thought: I add.\n<code>\nx = 1 + 2\nprint(x)\nx\n</code>never read"

    result, stats = played(agent, script)
    assert (result, stats.turns, stats.rows) == ({"said": 3}, 2, 2)


@pytest.mark.full
def test_smolagents_tool_calling_agent() -> None:
    """Its requests demand a call of a tool."""
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: float, b: float) -> float:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        model = smolagents.OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key)
        caller = smolagents.ToolCallingAgent(tools=[add], model=model, verbosity_level=0)
        return {"said": str(caller.run("What is 1 + 2?"))}

    def script(prompt: str) -> str:
        said = "Observation:\n3" in prompt
        return call("final_answer", '{"answer": "3"}') if said else call("add", '{"a": 1, "b": 2}')

    result, stats = played(agent, script)
    assert (result, stats.turns, stats.tool_calls) == ({"said": "3"}, 2, 2)


@pytest.mark.full
@pytest.mark.parametrize("model", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai_with_a_typed_output(model: str) -> None:
    """Its requests demand a call of the tool that takes the output."""
    pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        name: str
        country: str

    async def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
        asked = Agent(getattr(openai, model)(endpoint.model, provider=provider), output_type=City)

        @asked.tool_plain
        def year() -> int:
            """The year."""
            return 2012

        return dict((await asked.run("Where were the Olympics?")).output)

    def script(prompt: str) -> str:
        if "[2012]" not in prompt:
            return call("year")
        return call("final_result", '{"name": "London", "country": "UK"}')

    result, stats = played(agent, script)
    assert result == {"name": "London", "country": "UK"}
    assert (stats.turns, stats.rows) == (2, 1)


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents(streamed: bool) -> None:
    """By default it asks /v1/responses."""
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    async def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        model = agents.OpenAIResponsesModel(endpoint.model, client)
        asked = agents.Agent(name="Hello", instructions="You help.", model=model, tools=[weather])
        quiet = agents.RunConfig(tracing_disabled=True)
        if not streamed:
            return {"said": (await agents.Runner.run(asked, "Tokyo?", run_config=quiet)).final_output}
        run, heard = agents.Runner.run_streamed(asked, "Tokyo?", run_config=quiet), ""
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                heard += event.data.delta
        assert heard == "let me see" + run.final_output
        return {"said": run.final_output}

    def script(prompt: str) -> str:
        found = "[sunny in Tokyo]" in prompt
        return "It is sunny." if found else "let me see" + call("weather", '{"city": "Tokyo"}')

    result, stats = played(agent, script)
    assert result == {"said": "It is sunny."}
    assert (stats.turns, stats.rows, stats.tool_calls) == (2, 1, 1)


@pytest.mark.full
def test_mini_swe_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks by litellm."""
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip("minisweagent")
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    config["agent"].pop("mode")

    def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        own = {"api_base": endpoint.base_url, "api_key": endpoint.api_key}
        settings = {**config["model"], "model_kwargs": {**config["model"]["model_kwargs"], **own}}
        model = LitellmModel(model_name=f"openai/{endpoint.model}", cost_tracking="ignore_errors", **settings)
        runner = DefaultAgent(model, LocalEnvironment(cwd=str(tmp_path)), **config["agent"])
        return dict(runner.run("Write hello."))

    def script(prompt: str) -> str:
        written = '"returncode": 0' in prompt.rpartition("echo hello")[2]
        line = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat said" if written else "echo hello > said"
        return "I do it." + call("bash", json.dumps({"command": line}))

    result, stats = played(agent, script)
    assert result["submission"] == "hello\n"
    assert (stats.turns, stats.rows) == (2, 1)


@pytest.mark.full
def test_litellm_knows_a_full_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")

    def agent(sample: Sample, endpoint: Endpoint) -> None:
        own = {
            "api_base": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": f"openai/{endpoint.model}",
        }
        for text in ("q", "long " * 10_000, "long " * 200_000):
            asked = [{"role": "user", "content": text}]
            if text == "q":
                litellm.completion(messages=asked, **own)
            else:
                with pytest.raises(litellm.exceptions.ContextWindowExceededError):
                    litellm.completion(messages=asked, **own)

    assert played(agent, lambda prompt: "42")[1].turns == 1
