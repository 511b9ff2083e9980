"""Agents for an environment of the package `verifiers`. Imported only on use.

Env.run(task, agents) ─► agents.NAME.interaction(task).turn(text) ─► ask ─► the model's turn ─► Segment
                                      └► the task's tools, in this process, until a turn calls none
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from verifiers.v1.agent import Segment
from verifiers.v1.dialects import parse_message
from verifiers.v1.runtimes import provision_runtime
from verifiers.v1.session import call_hook, hook_boundary
from verifiers.v1.state import State, state_cls
from verifiers.v1.types import Messages, SystemMessage, ToolCall, UserMessage
from verifiers.v1.utils.decorators import discover_decorated, invoke

from asyncrl.errors import one_line

LIMIT_STOP = "max_total_tokens"  # verifiers' name for the stop of an episode that a limit ended

Ask = Callable[[Messages], Awaitable[tuple[vf.AssistantMessage | None, bool]]]
"""Maps the messages since the model's last turn to the model's next turn, and to whether another turn may
follow. The turn is None if a limit ended the episode first."""


class Unsupported(Exception):
    """The environment needs features that only verifiers' runner has."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; let verifiers run the episodes as an agent (rollout.agent)")


class TaskTools:
    """Hold the tools of one task. A toolset is an MCP server, which is called here without HTTP."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._servers: dict[str, tuple[MCPServer, str]] = {}

    async def add_toolset(self, toolset: vf.Toolset, task: vf.Task) -> None:
        if state_cls(type(toolset)) is not State:
            raise Unsupported(f"{type(toolset).__name__} shares state with its task")
        await toolset.setup()
        await toolset.setup_task(task.data)

        prefix = toolset.server_name
        server = MCPServer(prefix or type(toolset).__name__)
        toolset.register(server)

        for tool in await server.list_tools():
            tool_name = f"{prefix}_{tool.name}" if prefix else tool.name
            function_schema = {
                "name": tool_name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            self.schemas.append({"type": "function", "function": function_schema})
            self._servers[tool_name] = (server, tool.name)

    async def call(self, call: ToolCall) -> vf.ToolMessage:
        """Return the reply of a tool. An error also becomes a reply for the model."""
        try:
            server, tool_name = self._servers[call.name]
            result: Any = await server.call_tool(tool_name, json.loads(call.arguments or "{}"))
            reply_text = "\n".join(part.text for part in result.content if part.type == "text")
        except KeyError:
            reply_text = f"error: unknown tool {call.name!r}; available: {', '.join(self._servers)}"
        except (ToolError, ValueError) as error:
            reply_text = f"error: {one_line(error)}"
        return vf.ToolMessage(tool_call_id=call.id, content=reply_text, name=call.name)


class AgentInteraction:
    """Stand for the object that `Agent.interaction` yields: `turn` sends the environment's messages to the
    model, and runs the task's tools until a turn calls no tool."""

    def __init__(
        self, task: vf.Task, trace: vf.Trace, tools: TaskTools, ask: Ask, max_turns: int | None
    ) -> None:
        self.trace = trace
        self._task = task
        self._tools = tools
        self._ask_model = ask
        self._max_turns = max_turns
        self._stop_hooks = task.hooks("stop")
        self._is_over = False

    async def turn(self, message: str | Messages | None = None) -> Segment:
        """Take a turn as `Interaction.turn` does; without a message for the reply to the task's prompt."""
        if self._is_over:
            raise RuntimeError("the exchange has ended")
        new_messages = _parse_messages(message) if self.trace.nodes else self._opening_messages(message)
        turn_messages: Messages = []
        while not await self._should_stop():
            reply_message, may_continue = await self._ask_model(new_messages)
            if not may_continue:
                self.trace.stop(LIMIT_STOP)
            if reply_message is None:
                break

            self._record_messages(*new_messages)
            self._record_messages(reply_message, sampled=True)
            turn_messages.append(reply_message)
            if not reply_message.tool_calls or not may_continue:
                return Segment(messages=turn_messages)

            new_messages = [await self._tools.call(call) for call in reply_message.tool_calls]
            turn_messages += new_messages

        self._is_over = not turn_messages
        return Segment(messages=turn_messages, terminated=self._is_over)

    def _opening_messages(self, message: str | Messages | None) -> Messages:
        data = self._task.data
        if (data.prompt is None) == (message is None):
            raise ValueError(
                "call turn() without a message if the task has a prompt, and with a message otherwise"
            )
        system_messages = (
            [SystemMessage(content=data.system_prompt)] if data.system_prompt is not None else []
        )
        return [*system_messages, *_parse_messages(data.prompt if message is None else message)]

    def _record_messages(self, *messages: Any, sampled: bool = False) -> None:
        for message in messages:
            last_index = len(self.trace.nodes) - 1
            node = vf.MessageNode(
                parent=last_index if last_index >= 0 else None, message=message, sampled=sampled
            )
            self.trace.nodes.append(node)

    async def _should_stop(self) -> bool:
        if self._max_turns is not None and self.trace.num_turns >= self._max_turns:
            self.trace.stop("max_turns")
        if self.trace.stop_condition is not None:
            return True

        for hook in self._stop_hooks:
            if await call_hook(hook, {vf.Trace: self.trace}):
                self.trace.stop(hook.__name__)
                return True
        return False


class AgentProxy:
    """Stand for an agent of the environment. `ask` begins a conversation with the model that plays the
    agent; None: there is no model. `tools` collects the agent's tools; None: no tools are allowed. Finished
    traces go to `traces`."""

    trainable = True

    def __init__(
        self,
        name: str,
        config: vf.AgentConfig,
        ask: Callable[[], Ask] | None,
        tools: TaskTools | None,
        traces: list[vf.Trace],
    ) -> None:
        self._name = name
        self._config = config
        self._begin_conversation = ask
        self._tools = tools
        self._traces = traces

    async def run(self, task: vf.Task, **unsupported: Any) -> vf.Trace:
        async with self.interaction(task, **unsupported) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **unsupported: Any) -> AsyncIterator[AgentInteraction]:
        if self._begin_conversation is None:
            raise Unsupported(f"agent {self._name!r} has no model (others_url and others_model are not set)")
        if requested := [name for name, value in unsupported.items() if value]:
            raise Unsupported(
                f"agent {self._name!r} is called with unsupported arguments ({', '.join(requested)})"
            )

        check_supported(task)
        task_record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent_info = vf.AgentInfo(config=self._config, name=self._name, trainable=self.trainable)
        trace = vf.Trace(task=task_record, agent=agent_info, state=state_cls(type(task))())

        async with provision_runtime(vf.SubprocessConfig()) as runtime, AsyncExitStack() as exit_stack:
            await invoke(task.setup, {"trace": trace, "runtime": runtime})
            task_tools = self._tools or TaskTools()
            for toolset in task.toolsets(task.config):
                if self._tools is None:
                    raise Unsupported(f"agent {self._name!r} has tools, but is not trained")
                exit_stack.push_async_callback(toolset._exit_stack.aclose)  # closes resources of the toolset
                await task_tools.add_toolset(toolset, task)
            yield AgentInteraction(
                task, trace, task_tools, self._begin_conversation(), self._config.max_turns
            )
            trace.stop("agent_completed")
            await invoke(task.finalize, {"trace": trace, "runtime": runtime})
            await task.score(trace, runtime)
        trace.ok = True
        self._traces.append(trace)


def check_supported(task: vf.Task) -> None:
    """Raise Unsupported, naming the feature that the task needs."""
    if task.NEEDS_CONTAINER or task.data.image is not None:
        raise Unsupported("the task runs in a container")
    if discover_decorated(task, "intercept"):
        raise Unsupported("the task intercepts requests")
    for hook in task.hooks("stop"):
        if hook_boundary(hook, allow_trace=True) is not vf.Trace:
            raise Unsupported(f"the task's stop function {hook.__name__!r} reads requests or responses")


def _parse_messages(message: str | Sequence[Any] | None) -> Messages:
    """Return a user's turn as messages, from any form that the environment uses."""
    if message is None:
        raise ValueError("every turn after the first needs a message")
    if isinstance(message, str):
        return [UserMessage(content=message)]
    return [parse_message(part) if isinstance(part, dict) else part for part in message]
