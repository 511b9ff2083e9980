"""Python that keeps its variables for an episode, in a sandbox; `workspace` adds a shell.

For a sample with a task the sandbox has the task's image, and its changes are left for the reward.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.data.task_sandboxes import TaskSandbox
from asyncrl.data.tasks import Task, task_of
from asyncrl.isolation.sandbox.base import (
    ISOLATION,
    RunEnding,
    RunKind,
    RunResult,
    SandboxError,
    SandboxLimits,
)
from asyncrl.isolation.sandbox.detection import check_image, check_isolation
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.tools.base import MAX_REPLY_BYTES, Tool, tools
from asyncrl.tools.schema import signature_of
from asyncrl.types import Sample

# Limit of a run's output; the difference is for notes on the run's end.
MAX_OUTPUT_BYTES = MAX_REPLY_BYTES - 1024
SPARE_SECONDS = 10.0  # extra time of a call beside its code: a start, an interrupt, a kill

Seconds = Annotated[float, Meta(gt=0)]
Size = Annotated[int, Meta(ge=1)]


class Workspace:
    """Holds one sandbox for one episode: an interpreter, a shell, and their common directory. `task`: for
    samples without a task. `snapshots`: the least number of turns between two snapshots of the files; 0:
    never."""

    def __init__(
        self,
        limits: SandboxLimits,
        require: frozenset[str],
        seconds: float,
        task: Task | None = None,
        snapshots: int = 0,
    ) -> None:
        self._jail_settings = limits, require
        self._sandbox = Jail(limits, require=require)
        self._default_task = task
        self._task: TaskSandbox | None = None
        self.snapshots = snapshots
        self._run_seconds = seconds
        self._setup_code = ""
        self._sample_row = 0  # for errors
        self._losses_at_setup = -1  # losses of variables when the setup last ran

    async def open(self, sample: Sample, setup: str = "") -> None:
        """Start the sandbox. `setup`: code that an interpreter runs first, such as the data of this
        sample."""
        self._setup_code = setup
        self._sample_row = sample.row

        if task := task_of(sample) or self._default_task:
            self._task = TaskSandbox(task, *self._jail_settings)
            self._sandbox = self._task.jail

        await (self._task or self._sandbox).start()
        await self._run_setup()

    async def python(self, code: str) -> str:
        """Run Python code; shows what it prints, and the value of a final expression. Variables are kept.

        Args:
            code: The code to run.
        """
        return reply_text(await self._run_code("cell", code), self._run_seconds)

    async def shell(self, command: str) -> str:
        """Run a shell command; shows what it prints. Files are kept.

        Args:
            command: The command to run.
        """
        result = await self._run_code("shell", command)
        status = f"[exit status {result.status}]" if result.ending == RunEnding.FAILED else ""
        return reply_text(result, self._run_seconds, status)

    async def snapshot(self) -> bytes:
        """Collect the files, while nothing runs."""
        return await self._sandbox.collect_changes()

    async def restore(self, snapshot: bytes) -> None:
        """Apply the files in a sandbox that has run nothing yet. The setup runs again in the next call."""
        if self._setup_code:
            await self._sandbox.close()
            await self._sandbox.start()
            self._losses_at_setup = -1
        await self._sandbox.apply_changes(snapshot)

    async def result(self) -> dict[str, str] | None:
        """Return the changes in the workspace of a task."""
        return await self._task.collect_changes() if self._task else None

    async def close(self) -> None:
        await self._sandbox.close()

    async def _run_code(self, kind: RunKind, source: str) -> RunResult:
        await self._run_setup()
        return await self._sandbox.run(kind, source, self._run_seconds)

    async def _run_setup(self) -> None:
        """Run the setup if the interpreter has not run it."""
        if not self._setup_code or self._losses_at_setup == self._sandbox.losses:
            return

        result = await self._sandbox.prepare(self._setup_code, self._run_seconds)

        if result.ending != RunEnding.DONE:
            raise SandboxError(f"the setup code for sample {self._sample_row} failed: {result.output[-500:]}")
        self._losses_at_setup = self._sandbox.losses


def _register_tools(registered_name: str, snapshots: int, *methods: Callable[..., Awaitable[str]]) -> None:
    """Register a factory of tools, one for each method, that share a sandbox. `snapshots`: the option's
    default."""

    @tools.register(registered_name)
    def make_tools(
        *,
        seconds: Seconds = 10.0,
        memory_mb: Size = 512,
        disk_mb: Size = 64,
        processes: Size = 32,
        snapshots: Annotated[int, Meta(ge=0)] = snapshots,
        require: str = " ".join(ISOLATION),
        image: str = "",
        user: Literal["", "root"] = "",
        name: str = "",
    ) -> Sequence[Tool]:
        """Make the tools. Code that runs longer than `seconds` is interrupted, then killed. `memory_mb`
        limits each process. `require`: the required isolation of the sandbox (docs/guides/tasks.md), words in
        one text; empty: as far as possible. `image`, `user`: of the sandbox for samples without a task.
        `snapshots`: the least number of turns between two snapshots of the files; 0: no snapshots. `name`: of
        the only tool."""
        required = check_isolation(require)
        limits = SandboxLimits(memory_mb, processes, file=disk_mb, disk=disk_mb, output=MAX_OUTPUT_BYTES)
        task = Task(image, check_image(image, user).digest, user=user) if image else None
        state = functools.partial(Workspace, limits, required, seconds, task, snapshots)
        timeout = 2 * seconds + SPARE_SECONDS  # the setup may have to run again
        sandbox_tools: list[Tool] = []

        for method in methods:
            tool_name = name or method.__name__
            schema, decode = signature_of(method, tool_name)
            sandbox_tools.append(
                Tool(tool_name, schema, method, decode, state, timeout=timeout, replay="reapply")
            )

        return sandbox_tools


_register_tools("python", 0, Workspace.python)  # repeated calls also give the variables back
_register_tools("shell", 1, Workspace.shell)
_register_tools("workspace", 1, Workspace.python, Workspace.shell)


def reply_text(result: RunResult, seconds: float, status: str = "") -> str:
    """Return the reply for the model: the output, and the ending of a run that did not succeed."""
    exit_text = f"was killed by signal {-result.status}" if result.status < 0 else "exited"
    ending_notes = {
        RunEnding.LATE: f"[stopped after {seconds:g} s]",
        RunEnding.DIED: f"[the interpreter {exit_text}]",
    }
    reply_parts = [result.output.rstrip("\n"), ending_notes.get(result.ending, ""), status]

    if result.lost:
        lost_things = "variables and files" if result.emptied else "variables"
        reply_parts.append(f"[the {lost_things} from earlier calls are lost]")
    return "\n".join(part for part in reply_parts if part) or "[no output]"
