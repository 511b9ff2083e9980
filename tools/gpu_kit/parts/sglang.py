"""Does a real SGLang server compute the trainer's log-probs after each kind of update, and do streams
survive it?

A server with a small random model, and a second one for adapters, started and loaded by the product's own
classes. SGLang may be in an environment of its own: ASYNCRL_SGLANG_PYTHON="PYTHON [LAUNCHER]", on a CPU with
tools/sglang_cpu/launch.py; or in the file that `make gpu-kit-sglang` writes, in this folder or beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from asyncrl.trainer.world import join, leave
from parts.common import Context, Finding, failure
from parts.servers import ATTEMPTS, LEAST_S, NOT_THERE, RANK, Subject, each, server_command

SECONDS = 180
SMALL_SECONDS = 300.0
GOAL = "1e-4; streams stay open"
OPTIONAL = True


def run(context: Context) -> Iterator[Finding]:
    if (command := server_command(context)) is None:
        yield Finding("server", NOT_THERE)
        return
    yield from each(examine(context, command))


async def examine(context: Context, command: list[str]) -> AsyncIterator[Finding]:
    """Start servers, probe and update them; an error in a step is a finding."""
    world = join(0, 1, device=context.device.type)
    for dtype in ATTEMPTS:
        subject = Subject(context, world, dtype, command)
        try:
            works = {"disk": subject.by_disk, "collective": subject.by_broadcast, "speed": subject.speed}
            async for finding in subject.examined(works):
                yield finding
            break
        except Exception as error:
            last = dtype == "bfloat16" or context.small or context.left() < LEAST_S
            yield replace(failure(f"start, {dtype}", error), ok=False if last else None)
            if last:
                leave()
                return
    if context.left() < LEAST_S:
        yield Finding("adapters", "not run: no time left for a second server")
    else:
        # In float32 SGLang's own kernels for adapters would round to TF32.
        subject = Subject(context, world, "float32" if context.small else "bfloat16", command, RANK)
        try:
            async for finding in subject.examined({"adapters": subject.by_disk}):
                yield finding
        except Exception as error:
            yield failure("start with adapters", error)
    leave()
