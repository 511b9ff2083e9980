"""A document of headings, paragraphs, tables, pictures and texts side by side, as HTML and as Markdown.
All text is escaped: it may be a model's. Pure."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SPECIAL = re.compile(r"([\\`*_\[\]<>|&~$#])")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ text-align: left; padding: .15rem .8rem; border-bottom: 1px solid #8885; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; vertical-align: top }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6rem; margin: .3rem 0 }}
img {{ max-width: 100%; background: white }}
summary {{ cursor: pointer }}
.pair {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }}
</style></head><body>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Grid:
    """A table; every row as long as the header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """`name`: of its file beside the Markdown. HTML has it inside."""

    name: str
    png: bytes
    text: str


@dataclass(frozen=True)
class Texts:
    """Long texts, each with a caption; beside one another where there is room."""

    title: str
    texts: Sequence[tuple[str, str]]


Block = Heading | Paragraph | Grid | Picture | Texts


def as_html(title: str, blocks: Sequence[Block]) -> str:
    """One file that needs no other and no network."""
    return PAGE.format(title=html.escape(title), body="\n".join(map(_html, blocks)))


def as_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Grid(header, rows):
            return f"<table>{_row('th', header)}{''.join(_row('td', row) for row in rows)}</table>"
        case Picture(_, png, text):
            data = base64.b64encode(png).decode()
            return f'<img src="data:image/png;base64,{data}" alt="{html.escape(text)}">'
        case Texts(title, texts):
            parts = "".join(
                f"<div><b>{html.escape(caption)}</b><pre>{html.escape(text)}</pre></div>"
                for caption, text in texts
            )
            summary = f"<summary>{html.escape(title)}</summary>"
            return f'<details>{summary}<div class="pair">{parts}</div></details>'


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_plain(text)}"
        case Paragraph(text):
            return _plain(text)
        case Grid(header, rows):
            return "\n".join(_lines(header, rows, _plain))
        case Picture(name, _, text):
            return f"![{_plain(text)}](<{name}>)"
        case Texts(title, texts):
            shown = [f"{_plain(caption)}\n\n{_fenced(text)}" for caption, text in texts]
            return "\n\n".join([f"**{_plain(title)}**", *shown])


def _lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], shown: Callable[[str], str]
) -> Iterator[str]:
    for row in (header, ["---"] * len(header), *rows):
        yield f"| {' | '.join(cell if cell == '---' else shown(cell) for cell in row)} |"


def _plain(text: str) -> str:
    """On one line, and without meaning for Markdown."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _fenced(text: str) -> str:
    """As code; the fence is longer than any in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
