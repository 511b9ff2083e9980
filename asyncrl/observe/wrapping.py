"""Breaks the lines of the console between words, so that a terminal does not break them inside a word."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len, chop_cells

HANGING_INDENT = 2  # columns by which the continuation of a line is indented
MIN_INDENTED_WIDTH = 20  # columns; narrower texts are not indented


def fit_terminal(text: str, file: Any, hanging_indent: int = HANGING_INDENT) -> str:
    """Return the text, wrapped to the width of the terminal if the file is one: lines in files and pipes stay
    whole."""
    try:
        is_terminal = file.isatty()
    except (AttributeError, ValueError):  # the file is missing or closed
        return text
    return wrap_text(text, shutil.get_terminal_size().columns, hanging_indent) if is_terminal else text


def wrap_text(text: str, width: int, hanging_indent: int = HANGING_INDENT) -> str:
    """Break each line of a text between words, and indent what follows by `hanging_indent` more columns than
    the line. A word that fits on no line is broken after `/`, or anywhere if it has none.

    Example: `model: /data/a/b` in 10 columns becomes `model:`, `  /data/a/`, `  b`.
    """
    return "\n".join(
        part for line in text.split("\n") for part in _wrapped_lines(line, width, hanging_indent)
    )


def shorten(text: str, width: int) -> str:
    """Return at most `width` characters of a text, cut between two words if possible, with `…` at the end of
    a cut text."""
    if len(text) <= width:
        return text
    if width <= 0:
        return ""
    before_last_space = text[:width].rpartition(" ")[0].rstrip(" ,;:|")
    return (before_last_space if len(before_last_space) > width // 2 else text[: width - 1]) + "…"


def _wrapped_lines(line: str, width: int, hanging_indent: int) -> Iterator[str]:
    if cell_len(line) <= width:
        yield line
        return

    own_indent = len(line) - len(line.lstrip(" "))
    widest_indent = width // 2 if width >= MIN_INDENTED_WIDTH else 0
    indent = " " * min(own_indent + hanging_indent, widest_indent)
    width = max(1, width)
    current = line[:own_indent]
    space = ""  # before the next piece, unless the piece begins a line

    for piece in _pieces(line[own_indent:], width - len(indent)):
        if piece.isspace():
            space = piece
            continue

        if cell_len(current + space + piece) <= width:
            current += space + piece
        elif cell_len(indent + piece) <= width:
            if current.strip():
                yield current.rstrip()
            current = indent + piece
        else:  # wider than a line, so that the piece fills this line first
            first_width = max(0, width - cell_len(current + space))
            first_part = (chop_cells(piece, first_width) if first_width > 1 else [""])[0]
            first_line = (current + space + first_part).rstrip()
            if first_line:
                yield first_line
            *full_lines, current = [
                indent + part for part in chop_cells(piece[len(first_part) :], max(2, width - len(indent)))
            ]
            yield from full_lines
        space = ""

    if current.strip():
        yield current


def _pieces(line: str, width: int) -> Iterator[str]:
    """Yield words and the spaces between them; a word that is wider than `width` in parts, each up to a
    `/`."""
    for word in re.findall(r"\s+|\S+", line):
        yield from re.findall(r"[^/]*/+|[^/]+", word) if cell_len(word) > width else [word]
