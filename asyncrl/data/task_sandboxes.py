"""Opens the sandboxes in which tasks are worked on, and collects what changed there, for tests to judge."""

from __future__ import annotations

import asyncio
import base64
import shlex
from collections.abc import Iterable

from msgspec.structs import replace

from asyncrl.data.tasks import Task
from asyncrl.errors import ConfigError, SetupError, one_line
from asyncrl.isolation.images import find_image
from asyncrl.isolation.sandbox.base import RunEnding, SandboxError, SandboxLimits
from asyncrl.isolation.sandbox.jail import Jail

MOST_CHANGES = 700_000  # bytes: as base64 text, with what an agent returned, a result of 1 MiB
RESULT_SECONDS = 20.0  # to collect what changed, on a busy machine
UNREACHED = ("OutNoRoutes", "NoPorts")  # datagrams and connections without a route, or that nobody received
LIMITS = SandboxLimits(memory=0, processes=256, open_files=4096, file=1024, disk=1024, resident=2048)
"""The sizes of a sandbox that an agent works in, where neither its user nor a task states others."""
NOT_COUNTED = (".git", "__pycache__", "*.pyc", ".pytest_cache", "/sandbox", "/tmp")


class TaskSandbox:
    """Holds the sandbox of a task: in its image, with its directory, environment, user and sizes, which
    `limits` complete. SetupError where there is no such image. The caller closes the `jail`."""

    def __init__(
        self,
        task: Task,
        limits: SandboxLimits,
        require: Iterable[str],
        show: Iterable[str] = (),
        listen: bool = False,
    ) -> None:
        with SetupError.instead_of(ConfigError, text=f"task {task.name}"):
            image = find_image(task.image)
        self.task = task
        self.directory = task.directory or image.directory
        self.workspace = task.workspace or (self.directory,)
        self.environment = {**image.environment, **task.environment}
        of = "resident" if limits.resident else "memory"  # a program with its children, or a process
        sizes = {of: task.memory_mb, "disk": task.disk_mb, "file": task.disk_mb}
        self.jail = Jail(
            limits._replace(**{name: size for name, size in sizes.items() if size}),
            require=require,
            show=show,
            listen=listen,
            image=replace(image, environment=self.environment),
            user=task.user,
            directory=self.directory,
        )

    async def start(self) -> None:
        """Start it. SetupError where it does not start."""
        with SetupError.instead_of(SandboxError, text=f"task {self.task.name}"):
            await self.jail.start()

    async def find(self, program: str) -> str:
        """Find a program as a shell in the image does; '' if there is none."""
        found = await self.jail.run("shell", f"command -v -- {shlex.quote(program)}", RESULT_SECONDS)
        return found.output.strip() if found.ending is RunEnding.DONE else ""

    async def result(self) -> dict[str, str]:
        """Collect what changed in the task's workspace, while nothing runs: `changes`, an archive as base64
        text; `failed`, where the agent left none, says why. SetupError where that is not its doing."""
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                archive = await self.jail.changes(self.workspace, NOT_COUNTED, MOST_CHANGES)
        except SandboxError as error:
            return {"failed": one_line(error)}
        except TimeoutError:  # of a machine that is too busy: the archive is small
            why = f"what changed was not collected within {RESULT_SECONDS:g} s"
            raise SetupError(f"task {self.task.name}: {why}") from None
        return {"changes": base64.b64encode(archive).decode()}

    async def unreached(self) -> int:
        """Count how often something in it tried to reach another machine, or a name server. It does not see
        IPv6, and what looked first whether there is a network."""
        lines = (await self.jail.read_file("/proc/net/snmp")).decode().splitlines()
        pairs = zip(" ".join(lines[::2]).split(), " ".join(lines[1::2]).split(), strict=True)
        return sum(int(value) for name, value in pairs if name in UNREACHED)
