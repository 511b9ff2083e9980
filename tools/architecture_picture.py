"""Draws the architecture of a run, in dark and light colors, for README.md and
docs/background/architecture.md. The text of docs/background/architecture.md is the source of the drawing.

python tools/architecture_picture.py --out docs/pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH = 1080  # units of the drawing
HEIGHT = 640
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
LINE_HEIGHT = 19
LABEL_WIDTH = 7.0  # units per character of a label, with room to spare in any font


class Theme(NamedTuple):
    back: str
    card: str
    inner: str
    text: str
    dim: str
    line: str
    episodes: str  # colors of the three kinds of arrows
    batches: str
    weights: str


THEMES = {  # the colors of the page
    "dark": Theme(
        back="#101216",
        card="#181b20",
        inner="#23272e",
        text="#e7e9ec",
        dim="#a0a7b0",
        line="#4a515b",
        episodes="#5db3f0",
        batches="#4cc38a",
        weights="#f0a35e",
    ),
    "light": Theme(
        back="#ffffff",
        card="#f6f7f9",
        inner="#ffffff",
        text="#1a1d21",
        dim="#5c636c",
        line="#b9bfc8",
        episodes="#0067a5",
        batches="#00734f",
        weights="#a84300",
    ),
}


class Box(NamedTuple):
    """A process, or a part of one. `copies`: outlines behind the box, where there are several such processes.
    `dashed`: not started by the run."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: Sequence[str] = ()
    copies: int = 0
    is_part: bool = False
    dashed: bool = False


class Arrow(NamedTuple):
    """A path of points with a head at its end. `kind`: the name of a color. `label`: lines of text, centered
    at `label_at`; the first line is what travels, the others how."""

    points: Sequence[tuple[int, int]]
    kind: str
    label: Sequence[str]
    label_at: tuple[int, int]


BOXES = (
    Box(30, 150, 300, 230, "COORDINATOR", ["decides what runs and what is trained on"]),
    Box(46, 210, 268, 48, "admission, assignments", is_part=True),
    Box(46, 265, 268, 48, "replay buffer", ["groups · staleness · batches"], is_part=True),
    Box(46, 320, 268, 48, "run store", ["SQLite and segments: durable"], is_part=True),
    Box(
        590,
        150,
        290,
        104,
        "ROLLOUT WORKERS",
        ["many episodes each, in asyncio", "tools · environments", "rewards"],
        2,
    ),
    Box(
        590,
        400,
        290,
        84,
        "ENGINES",
        ["embedded in each worker, or", "SGLang servers with a supervisor each"],
        2,
    ),
    Box(
        30,
        500,
        300,
        104,
        "TRAINER RANKS",
        ["FSDP2: backward on whatever is ready;", "optimizer step when the batch is full"],
        2,
    ),
    Box(30, 30, 140, 62, "samples", ["prompts, truths"], dashed=True),
    Box(924, 150, 126, 104, "agent programs", ["sandboxes", "MCP servers", "judges"], dashed=True),
)
ARROWS = (
    Arrow([(100, 92), (100, 150)], "batches", ["groups"], (136, 124)),
    Arrow([(330, 186), (590, 186)], "episodes", ["assignments", "ZeroMQ"], (460, 162)),
    Arrow(
        [(590, 228), (330, 228)],
        "episodes",
        ["turns, replies, endings, as they come", "ZeroMQ, acknowledged once durable"],
        (460, 250),
    ),
    Arrow([(690, 254), (690, 400)], "episodes", ["token ids"], (640, 330)),
    Arrow([(780, 400), (780, 254)], "episodes", ["ids, log-probs, versions", "HTTP, streamed"], (878, 322)),
    Arrow([(892, 192), (924, 192)], "episodes", [], (0, 0)),
    Arrow([(924, 216), (892, 216)], "episodes", [], (0, 0)),
    Arrow([(110, 380), (110, 500)], "batches", ["trajectories,", "in parts"], (58, 432)),
    Arrow([(230, 500), (230, 380)], "batches", ["requests, commits", "ZeroMQ"], (306, 430)),
    Arrow(
        [(342, 560), (735, 560), (735, 496)],
        "weights",
        [
            "weights of each version, in the background",
            "files, deltas or a broadcast; loaded between two tokens",
        ],
        (545, 588),
    ),
    Arrow(
        [(330, 340), (480, 340), (480, 432), (590, 432)],
        "weights",
        ["which version to load", "ZeroMQ"],
        (568, 368),
    ),
)
NOTE_LINES = (
    "The launcher, asyncrl train, starts the processes,",
    "watches them and restarts what dies.",
)


def drawing(theme: Theme) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="{FONT}" font-size="14">',
        "<title>A coordinator between rollout workers with their engines and the trainer ranks</title>",
        "<defs>",
    ]
    for kind in ("episodes", "batches", "weights"):
        parts.append(
            f'<marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{getattr(theme, kind)}"/></marker>'
        )
    parts += ["</defs>", f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{theme.back}"/>']

    for box in BOXES:
        parts += box_parts(box, theme)
    for arrow in ARROWS:
        parts += arrow_parts(arrow, theme)
    parts += legend_parts(theme)
    return "\n".join([*parts, "</svg>"]) + "\n"


def box_parts(box: Box, theme: Theme) -> Iterator[str]:
    fill = theme.inner if box.is_part else theme.card
    dashes = ' stroke-dasharray="5 4"' if box.dashed else ""
    for copy in range(box.copies, -1, -1):
        yield (
            f'<rect x="{box.x + 6 * copy}" y="{box.y + 6 * copy}" width="{box.width}" height="{box.height}" '
            f'rx="8" fill="{fill}" stroke="{theme.line}"{dashes}/>'
        )

    line_count = 1 + len(box.lines)
    is_container = box.title == "COORDINATOR"  # its parts have the room below
    first_y = box.y + (26 if is_container else (box.height - LINE_HEIGHT * line_count) / 2 + 14)
    weight = "400" if box.is_part or box.dashed else "700"
    yield text(box.x + box.width / 2, first_y, box.title, theme.text, weight)
    for number, line in enumerate(box.lines, start=1):
        yield text(box.x + box.width / 2, first_y + LINE_HEIGHT * number, line, theme.dim, size=13)


def arrow_parts(arrow: Arrow, theme: Theme) -> Iterator[str]:
    color = getattr(theme, arrow.kind)
    path = "M" + " L".join(f"{x} {y}" for x, y in arrow.points)
    yield (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round" '
        f'marker-end="url(#{arrow.kind})"/>'
    )

    x, y = arrow.label_at
    for number, line in enumerate(arrow.label):
        line_y = y + 16 * number
        half_width = LABEL_WIDTH * len(line) / 2
        yield (
            f'<rect x="{x - half_width:g}" y="{line_y - 12}" width="{2 * half_width:g}" height="16" '
            f'fill="{theme.back}" opacity="0.85"/>'
        )
        yield text(x, line_y, line, theme.dim if number else color, size=12)


def legend_parts(theme: Theme) -> Iterator[str]:
    for number, (kind, meaning) in enumerate(
        [("episodes", "episodes"), ("batches", "training"), ("weights", "weight versions")]
    ):
        x = 590 + 150 * number
        yield f'<path d="M{x} 44 h26" stroke="{getattr(theme, kind)}" stroke-width="3"/>'
        yield text(x + 34, 49, meaning, theme.text, anchor="start", size=13)
    for number, line in enumerate(NOTE_LINES):
        yield text(590, 78 + 19 * number, line, theme.dim, anchor="start", size=13)


def text(
    x: float, y: float, content: str, color: str, weight: str = "400", anchor: str = "middle", size: int = 14
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-weight="{weight}" font-size="{size}" '
        f'text-anchor="{anchor}">{escape(content)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    for name, theme in THEMES.items():
        path = out / f"architecture_{name}.svg"
        path.write_text(drawing(theme))
        print(path)


if __name__ == "__main__":
    main()
