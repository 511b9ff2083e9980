"""Draws the live view of the console for the documentation, in dark and light colors: trains the demo, and
takes the picture at step 40 of 60.

python tools/console_picture.py build/pictures/demo --out docs/pictures
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console as Terminal
from rich.terminal_theme import TerminalTheme

from asyncrl.api.live_view import RunFeed
from asyncrl.launch.console import Console
from asyncrl.launch.console_view import ConsoleState, render
from asyncrl.wire.messages.shared import Status

PICTURED_STEP = 40
TOTAL_STEPS = 60  # of the demo
WIDTH = 90  # columns
HEIGHT = 16  # lines
POLL_SECONDS = 0.1
DEADLINE = 1800.0  # seconds

# Background, text and the eight colors of a terminal, as on the page.
DARK = TerminalTheme(
    (16, 18, 22),
    (231, 233, 236),
    [
        *((16, 18, 22), (255, 138, 128), (76, 195, 138), (240, 163, 94)),
        *((93, 179, 240), (204, 121, 167), (86, 180, 233), (231, 233, 236)),
    ],
)
LIGHT = TerminalTheme(
    (246, 247, 249),
    (26, 29, 33),
    [
        *((26, 29, 33), (179, 38, 30), (0, 115, 79), (168, 67, 0)),
        *((0, 103, 165), (140, 60, 110), (0, 103, 165), (92, 99, 108)),
    ],
)
# rich's own format loads a font from the network.
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The live view of the console</title>
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="directory for the new run; must not exist yet")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    command = [sys.executable, "-m", "asyncrl", "train", "experiment=calculator"]
    command += [f"name={args.run.name}", f"run_dir={args.run.parent}", "observe.console=off"]
    terminal = Terminal(
        width=WIDTH,
        height=HEIGHT,
        record=True,
        force_terminal=True,
        color_system="standard",
        file=io.StringIO(),
    )
    state = ConsoleState(args.run.name, Status("starting", 0, TOTAL_STEPS, {}, ()))
    feed = RunFeed(args.run, Console("off", state, terminal), time.monotonic())

    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + DEADLINE
        while state.status.step < PICTURED_STEP or state.status.phase != "running":
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run did not reach step {PICTURED_STEP}")
            feed.update()
            time.sleep(POLL_SECONDS)

        terminal.print(render(state, terminal, has_keyboard=True), end="")
        for name, theme in (("dark", DARK), ("light", LIGHT)):
            path = args.out / f"console_{name}.svg"
            svg = terminal.export_svg(
                title="asyncrl train", theme=theme, clear=False, code_format=SVG, unique_id="console"
            )
            path.write_text(svg)
            print(path)
        if process.wait(DEADLINE):
            sys.exit("the run has failed")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
