"""Lines of the console break between words, and paths after a slash."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from asyncrl.observe.table import PipeSafeTerminal, print_summary
from asyncrl.observe.wrapping import fit_terminal, shorten, wrap_text

PATH = "/data/experiments/shared/calculator/checkpoints/step-60/hf"


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("fits", 60, ["fits"]),
        ("one two three", 8, ["one two", "three"]),
        ("  one two three four five", 20, ["  one two three four", "    five"]),
        (f"model: {PATH}", 60, ["model:", f"  {PATH}"]),  # whole on a line, so that it can be copied
        (f"model: {PATH}", 40, ["model: /data/experiments/shared/", "  calculator/checkpoints/step-60/hf"]),
        ("step 12/60 is done", 10, ["step 12/60", "is done"]),
        ("x" * 50, 20, ["x" * 20, "  " + "x" * 18, "  " + "x" * 12]),
        ("漢字 漢字 漢字", 9, ["漢字 漢字", "漢字"]),
        ("a\nb c", 2, ["a", "b", "c"]),
        ("", 10, [""]),
    ],
)
def test_lines_break_between_words(text: str, width: int, lines: list[str]) -> None:
    assert wrap_text(text, width).split("\n") == lines


@given(st.text(alphabet="ab /漢-.", max_size=80), st.integers(2, 30), st.integers(0, 4))
def test_nothing_is_lost_and_no_line_is_too_wide(text: str, width: int, hanging_indent: int) -> None:
    lines = wrap_text(text, width, hanging_indent).split("\n")
    if cell_len(text) > width:
        assert "".join("".join(lines).split()) == "".join(text.split())
        assert all(cell_len(line) <= width for line in lines if text.strip() and not text.startswith(" "))
        assert all(line.strip() for line in lines) or not text.strip(), "an empty line was added"
    else:
        assert lines == [text]


@pytest.mark.parametrize("width", [60, 80])
def test_the_summary_fits_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", str(width))
    alert = f"solved: held-out success 96%, since step 60. What to do: stop here, or train on {PATH}/harder"
    summary = {"steps": 60, "alerts": [alert], "flow": {"issued": 8, "trained": 8}, "conserved": True}
    out = Screen()
    print_summary(summary, Path(PATH), PipeSafeTerminal(file=out, width=width, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert f"{PATH}/harder" in "".join("".join(lines).split())
    assert any(f"{PATH}/harder" in line for line in lines) == (width == 80)  # it fits only there

    piped = io.StringIO()
    print_summary(summary, Path(PATH), PipeSafeTerminal(file=piped, width=width))
    assert f"  {alert}\n" in piped.getvalue()


def test_a_file_keeps_its_lines(tmp_path: Path) -> None:
    long_line = "word " * 100
    with (tmp_path / "log").open("w") as file:
        assert fit_terminal(long_line, file) == long_line
    assert fit_terminal(long_line, file) == long_line  # closed
    assert fit_terminal(long_line, None) == long_line
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        assert "\n" in fit_terminal(long_line, terminal)
    os.close(ours)


def test_a_short_text_ends_with_a_word() -> None:
    assert shorten("all episodes scored 0", 21) == "all episodes scored 0"
    assert shorten("all episodes scored 0", 18) == "all episodes…"
    assert shorten("incomprehensibilities", 10) == "incompreh…"
