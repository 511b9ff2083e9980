"""The shell's puzzles: what the start model was shown is what a real shell says, and words are held out."""

from __future__ import annotations

import random
import subprocess
from itertools import combinations
from pathlib import Path

from tests.fakes.scripts import script

puzzles = script("shell_puzzles")


def say(command: str, directory: Path) -> str:
    """Run a command, and report it as the tool `shell` does."""
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    status = f"[exit status {done.returncode}]" if done.returncode else ""
    return "\n".join(part for part in (done.stdout.rstrip("\n"), status) if part) or "[no output]"


def test_a_real_shell_says_the_same(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = puzzles.split_words()["train"]
    for number in range(2):
        puzzle = puzzles.make_puzzle(rng, words)
        wrong_function = puzzle.wrong_function
        found_word = puzzle.printed
        wanted = puzzle.wanted
        source = f"{puzzle.package}.sh"
        edits = [
            f"/{wrong_function}/s/{found_word}/{wanted}/ {source}",
            f"s/{found_word}/{wanted}/ {source}",
            f"s/{wrong_function}/{wanted}/ {source}",
            f"/{wrong_function}/s/echo/printf/ {source}",
            f"/{wrong_function}/s/{wanted}/{found_word}/ test.sh",
            f"s/{found_word}/{wanted}/ missing.sh",
        ]
        for at, edit in enumerate(edits):
            shell = puzzles.Shell(puzzle)
            puzzle_directory = tmp_path / f"{number}-{at}"
            puzzle_directory.mkdir()
            for name, text in puzzle.files.items():
                (puzzle_directory / name).write_text(text)
            looks = (
                "ls",
                "sh test.sh",
                f"grep {wrong_function} {source}",
                f"grep {wrong_function} missing.sh",
            )
            for command in (*looks, f"sed -i {edit}", "sh test.sh"):
                assert say(command, puzzle_directory) == shell.run(command), command
            assert shell.solved == (
                at == 0 or (at == 1 and list(puzzle.expected.values()).count(found_word) == 0)
            )


def test_no_held_out_word_is_trained_on_and_none_has_two_meanings() -> None:
    splits = puzzles.split_words().values()
    kinds = [{*kind} for words in splits for kind in (words.packages, words.functions, words.messages)]
    assert len(kinds) == 6 and all(not left & right for left, right in combinations(kinds, 2))


def test_what_is_wanted_is_in_no_question() -> None:
    rng = random.Random(0)
    words = puzzles.split_words()["test"]
    for package in words.packages:
        puzzle = puzzles.make_puzzle(rng, words, package)
        assert puzzle.wanted not in puzzle.question and puzzle.printed not in puzzle.question
        assert puzzle.wanted not in puzzle.files[f"{package}.sh"]
