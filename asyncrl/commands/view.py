"""`asyncrl view [RUN…]`: serves a page about runs, also while they go on; or writes the page to a file."""

from __future__ import annotations

import asyncio
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.commands import command_parser, find_run
from asyncrl.commands.status import describe_ending
from asyncrl.errors import ConfigError, one_line
from asyncrl.isolation.calls import in_thread

if TYPE_CHECKING:
    from asyncrl.viewer.views import Views

HELP = """\
Show a run in the browser: summary, curves, episodes token by token, and the timeline of all processes.

  asyncrl view                      the newest run in runs/
  asyncrl view demo other           two runs in the same charts
  asyncrl view demo --html run.html one file that opens without a server; exit code 1 if the
                                    episode counts of a run do not add up

The page is read-only. It is served on 127.0.0.1 until Ctrl-C, to anyone who has the address with its random
token. To view it from another machine, use --port 8765 and run ssh -C -L 8765:127.0.0.1:8765 HOST there."""


def main(argv: list[str]) -> int:
    parser = command_parser("view", HELP)
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="names or directories of runs (default: the newest)"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page to FILE instead of serving it"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port to serve the page on (default: a free port)"
    )
    parser.add_argument("--open", action="store_true", help="also open the page in the browser")
    options = parser.parse_intermixed_args(argv)

    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port}: use a port from 1 to 65535, or 0 for any free port")
    paths = [find_run(options.run_dir, name) for name in options.runs or [""]]
    from asyncrl.viewer.page import write_page
    from asyncrl.viewer.views import Views

    if (file := options.html) is None:
        asyncio.run(_serve(Views(paths, describe_ending), options.port, options.open))
        return 0

    if file.suffix != ".html" or file.is_dir():
        raise ConfigError(f"{file}: use a file name that ends with .html")
    exact = write_page(file, Views(paths, describe_ending))
    print(file)
    return 0 if exact else 1


async def _serve(views: Views, port: int, open_browser: bool) -> None:
    """Serve the page until an interrupt."""
    from asyncrl.viewer.server import ViewServer

    server = ViewServer(views, port)
    try:
        await server.start()
    except OSError as error:
        await server.close()
        raise ConfigError(
            f"--port {port}: the port cannot be used ({one_line(error)}); use another port, or omit the "
            "option"
        ) from None
    print(f"{server.url}\nPress Ctrl-C to stop", flush=True)
    try:
        if open_browser:
            await in_thread(partial(webbrowser.open, server.url), "browser")
        await asyncio.Event().wait()
    finally:
        await server.close()
