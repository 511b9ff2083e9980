"""Opens the sandboxes in which agents work on tasks, and collects the changes, for tests to judge."""

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

MAX_CHANGES_BYTES = 700_000  # as base64 text with an agent's result, these fit into 1 MiB
RESULT_SECONDS = 20.0  # limit for collecting the changes, on a busy machine
UNREACHED_COUNTERS = ("OutNoRoutes", "NoPorts")  # packets without a route, or without a receiver
DEFAULT_LIMITS = SandboxLimits(memory=0, processes=256, open_files=4096, file=1024, disk=1024, resident=2048)
"""The sizes of an agent's sandbox if neither the user nor the task sets them."""
IGNORED_NAMES = (".git", "__pycache__", "*.pyc", ".pytest_cache", "/sandbox", "/tmp")


class TaskSandbox:
    """Holds the sandbox of a task, with the task's image, directory, environment, user and sizes; `limits`
    apply where the task sets none. SetupError if the image is missing. The caller closes the `jail`."""

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
        # A limit for a program with its children, or for a process.
        memory_limit = "resident" if limits.resident else "memory"
        sizes = {memory_limit: task.memory_mb, "disk": task.disk_mb, "file": task.disk_mb}

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
        """Start the sandbox. SetupError if the sandbox does not start."""
        with SetupError.instead_of(SandboxError, text=f"task {self.task.name}"):
            await self.jail.start()

    async def find_program(self, program: str) -> str:
        """Find the path of a program as a shell in the image does; '' if the program is missing."""
        search_result = await self.jail.run("shell", f"command -v -- {shlex.quote(program)}", RESULT_SECONDS)
        return search_result.output.strip() if search_result.ending is RunEnding.DONE else ""

    async def collect_changes(self) -> dict[str, str]:
        """Collect the changes in the task's workspace, while nothing runs: `changes`, an archive as base64
        text, or `failed`, the reason why the agent's changes cannot be read. SetupError if the agent is not
        at fault."""
        try:
            async with asyncio.timeout(RESULT_SECONDS):
                archive = await self.jail.collect_changes(self.workspace, IGNORED_NAMES, MAX_CHANGES_BYTES)
        except SandboxError as error:
            return {"failed": one_line(error)}
        except TimeoutError:  # the machine is too busy, as the archive is small
            reason = f"the changes were not collected within {RESULT_SECONDS:g} s"
            raise SetupError(f"task {self.task.name}: {reason}") from None

        return {"changes": base64.b64encode(archive).decode()}

    async def count_unreached(self) -> int:
        """Count the attempts in the sandbox to reach another machine or a name server. IPv6 is not counted,
        nor are programs that first check whether there is a network."""
        lines = (await self.jail.read_file("/proc/net/snmp")).decode().splitlines()
        pairs = zip(" ".join(lines[::2]).split(), " ".join(lines[1::2]).split(), strict=True)
        return sum(int(value) for name, value in pairs if name in UNREACHED_COUNTERS)
