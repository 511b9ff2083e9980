"""Tools that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import PIL.Image

from asyncrl.tools import Rewarded, Tool, ToolError, tool
from asyncrl.vision.content import ImageFile


@tool(process=True, timeout=20, concurrency=2, env=("SEARCH_KEY",))
def work(command: str) -> Rewarded:
    """Do what is said, some of it bad."""
    print("tools may print")
    match command:
        case "hang":
            time.sleep(60)
        case "die":
            os._exit(7)
        case "child":
            return Rewarded(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, 0.0)
        case "variables":
            return Rewarded(" ".join(os.environ), 0.0)
        case "large":
            return Rewarded("x" * 10_000_000, 0.0)
    if command.startswith("polite"):
        with open(command.split()[1], "a") as calls:
            calls.write("x")
        raise ToolError("No city is called so.")
    if command.endswith(".txt") and not Path(command).exists():
        Path(command).touch()
        os._exit(7)
    return Rewarded(os.getpid(), 0.5)


def scaled(*, by: int = 2) -> Tool:
    @tool(process=True, timeout=20, concurrency=1)
    def scale(x: int) -> int:
        """Multiply."""
        return by * x

    return scale


@tool(process=True, timeout=20, concurrency=1)
def paint(colour: str) -> list[object]:
    """Paint a picture; black pictures are damaged."""
    if colour == "black":
        return [ImageFile(b"damaged")]
    return [f"{colour}:", PIL.Image.new("RGB", (64, 48), colour)]
