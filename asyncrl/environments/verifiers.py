"""Environments of the package `verifiers`, played by the trained model.

`Env.run` of verifiers requests the model's next turn, whereas our environments answer a turn. So `Env.run`
is a task beside the episode, and waits while the model writes.

    reset ──► run(task, agents) … turn(text) ──► Observation(text)      step(message) ──► … turn's Segment
                                                                        run has ended ──► reward, done
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import msgspec

from asyncrl.environments.base import Environment, environments
from asyncrl.errors import ConfigError
from asyncrl.isolation.calls import GRACE_SECONDS, cancel_later, start_guarded
from asyncrl.remote import RemoteModel
from asyncrl.types import Message, Observation, Sample, ToolCall

EXTRA_INFO_KEY = "verifiers"


@environments.register("verifiers")
class Verifiers(Environment):
    """Play an environment of verifiers 0.4 (`verifiers.v1`): a task set, and perhaps an `Env` that leads.

    `taskset`, `env`: ids, names of installed modules; `config`: settings of verifiers for the environment, a
    JSON object, e.g. `{"taskset": {"split": "easy"}, "player": {"max_turns": 9}}`. `role`: the trained
    agent, if there are several agents. All further agents, which may have no tools, are played by the model
    `others_model` behind the OpenAI-compatible `others_url`; `others_key_env` names the variable with the
    key. The sample's `extra_info.verifiers` is the task's data, as JSON text; `tools/prepare_verifiers.py`
    writes such rows. The weighted rewards of the trained agent's traces fall on the last turn. Tools of the
    task run in the worker. `timeout`: seconds between two turns, for tools, other agents and scoring
    together."""

    def __init__(
        self,
        *,
        taskset: str,
        env: str = "",
        config: str = "{}",
        role: str = "",
        others_url: str = "",
        others_model: str = "",
        others_key_env: str = "",
        timeout: float = 120.0,
    ) -> None:
        self.timeout = timeout
        self._environment = load_verifiers(taskset, env, config)

        roles = list(self._environment.config.agent_harnesses())
        if not role and len(roles) > 1:
            raise ConfigError(f"role is missing; set role to the agent to train ({', '.join(roles)})")
        if role and role not in roles:
            raise ConfigError(f"role: unknown agent {role!r}; available: {', '.join(roles)}")

        self._role = role or roles[0]
        self._roles = roles
        self._other_model = RemoteModel(others_url, others_model, others_key_env) if others_url else None
        # Replies of another model cannot be reproduced.
        self.replay = "reapply" if self._other_model is None else "no"

        self._requested_turns: asyncio.Queue[list[Any] | None] = asyncio.Queue()  # None: the run has ended
        self._turn_reply: asyncio.Future[Message | None] | None = None  # done: no turn is requested
        self._limit_reached = False  # a limit ended the episode
        self._run_task: asyncio.Task[float] | None = None

    async def reset(self, sample: Sample) -> Observation:
        self._run_task = start_guarded(functools.partial(self._run_episode, self._make_task(sample)))
        task_messages = (await self._next_observation()).messages

        for task_message, prompt_message in zip_longest(task_messages[: len(sample.prompt)], sample.prompt):
            if task_message is None or (task_message.role, task_message.content) != (
                prompt_message.role,
                prompt_message.content,
            ):
                raise ValueError(
                    f"row {sample.row}: the prompt does not match the task's opening messages; "
                    "prepare the data again"
                )
        return Observation(task_messages[len(sample.prompt) :])

    async def step(self, message: Message) -> Observation:
        if self._turn_reply is None or self._turn_reply.done():
            raise RuntimeError("the environment did not request a turn")
        self._turn_reply.set_result(message)
        return await self._next_observation()

    async def cut_short(self, unanswered: Message | None) -> float:
        """Return the final reward. The environment learns of the limit at its next request for a turn, and
        scores the turns so far."""
        self._limit_reached = True
        if self._turn_reply is not None and not self._turn_reply.done():
            self._turn_reply.set_result(unanswered)
        return await self._final_reward()

    async def close(self) -> None:
        if self._run_task is not None:
            cancel_later(self._run_task)
            await asyncio.wait({self._run_task}, timeout=GRACE_SECONDS)

    def _make_task(self, sample: Sample) -> Any:
        data = sample.extra_info.get(EXTRA_INFO_KEY)
        if data is None:
            raise ValueError(
                f"row {sample.row}: extra_info.{EXTRA_INFO_KEY} is missing; it must contain the task's data "
                "as JSON text"
            )
        task_class = type(self._environment.taskset).task_type()
        data_class = task_class.data_type()
        read_data = data_class.model_validate_json if isinstance(data, str) else data_class.model_validate
        return task_class(read_data(data), self._environment.taskset.config.task)

    async def _next_observation(self) -> Observation:
        messages = await self._requested_turns.get()
        if messages is None:
            return Observation(reward=await self._final_reward(), done=True)
        return Observation(tuple(map(from_verifiers, messages)))

    async def _final_reward(self) -> float:
        """Wait for the end of the run. Cancelling a step here does not cancel the run."""
        if self._run_task is None:
            return 0.0
        await asyncio.wait({self._run_task})
        return self._run_task.result()

    async def _run_episode(self, task: Any) -> float:
        """Run one episode of verifiers (setup, run, finalize); return the reward of the trained agent."""
        import verifiers.v1 as vf

        task_record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(task=task_record)

        try:
            agents = self._make_agents(episode.traces)
            await self._environment.setup(agents)
            await self._environment.run(task, agents)
            await self._environment.finalize(task, episode)
            return float(sum(trace.reward for trace in episode.traces if trace.agent.name == self._role))
        finally:
            self._requested_turns.put_nowait(None)

    def _make_agents(self, traces: list[Any]) -> SimpleNamespace:
        from asyncrl.environments.verifiers_proxy import AgentProxy, TaskTools

        task_tools = TaskTools()
        self.tools = task_tools.schemas
        config = self._environment.config
        begin_conversation = None
        if self._other_model is not None:
            begin_conversation = functools.partial(begin_conversation_with, self._other_model)

        agents = {
            name: AgentProxy(name, getattr(config, name), begin_conversation, None, traces)
            for name in self._roles
        }

        agents[self._role] = AgentProxy(
            self._role, getattr(config, self._role), lambda: self._ask_for_turn, task_tools, traces
        )
        return SimpleNamespace(**agents)

    async def _ask_for_turn(self, messages: list[Any]) -> tuple[Any, bool]:
        if self._turn_reply is not None and not self._turn_reply.done():
            raise RuntimeError("the environment requested two turns at once")
        if self._limit_reached:
            return None, False
        self._turn_reply = asyncio.get_running_loop().create_future()
        self._requested_turns.put_nowait(messages)
        message = await self._turn_reply
        return to_verifiers(message) if message is not None else None, not self._limit_reached


def begin_conversation_with(model: RemoteModel) -> Callable[[list[Any]], Awaitable[tuple[Any, bool]]]:
    """Begin a conversation with the model that plays another agent."""
    history: list[Message] = []

    async def ask_model(messages: list[Any]) -> tuple[Any, bool]:
        history.extend(map(from_verifiers, messages))
        history.append(Message("assistant", await model.chat(history)))
        return to_verifiers(history[-1]), True

    return ask_model


def from_verifiers(message: Any) -> Message:
    """Return a message of verifiers as a Message. ValueError: the message is not text."""
    content = message.content or ""
    if not isinstance(content, str):
        if any(content_part.type != "text" for content_part in content):
            raise ValueError("the environment sent an image, but only text is supported")
        content = "\n".join(content_part.text for content_part in content)

    tool_calls = tuple(
        ToolCall(call.name, call.arguments, call.id) for call in getattr(message, "tool_calls", None) or ()
    )

    return Message(
        message.role,
        content,
        tool_calls,
        tool_call_id=getattr(message, "tool_call_id", ""),
        name=getattr(message, "name", None) or "",
    )


def to_verifiers(message: Message) -> Any:
    """Return a turn of the model as a message of verifiers."""
    from verifiers.v1.types import AssistantMessage
    from verifiers.v1.types import ToolCall as Call

    tool_calls = [Call(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls]
    return AssistantMessage(
        content=message.content, reasoning_content=message.reasoning or None, tool_calls=tool_calls or None
    )


@functools.cache
def load_verifiers(taskset: str, env: str, config: str) -> Any:
    """Load the `Env`, once per process, as loading may read a data set. ConfigError."""
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError:
        raise ConfigError("verifiers is not installed; pip install 'asyncrl[verifiers]'") from None

    with ConfigError.instead_of(Exception, text=f"cannot load the environment for taskset {taskset!r}"):
        settings = msgspec.json.decode(config, type=dict[str, Any])
        taskset_settings = {**settings.get("taskset", {}), "id": taskset}
        environment = load_environment(
            resolve_env_config({**settings, "id": env, "taskset": taskset_settings})
        )
        shared_toolsets = environment.taskset.toolsets(environment.taskset.config)

    if shared_toolsets or type(environment).start is not vf.Env.start:
        raise ConfigError(
            f"the episodes of taskset {taskset!r} share servers; let verifiers run the episodes as an agent "
            "(rollout.agent)"
        )
    return environment
