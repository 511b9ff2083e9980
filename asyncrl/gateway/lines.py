"""Splits lines of programs into words with placeholders, checks the words, and fills them for an episode.

    agent --url {base_url} --task={prompt}    a placeholder is a word, or the end of a word

A line is split before placeholders are filled, and no shell reads the line, so nothing in a prompt can become
a separate word, an option or a command.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncrlError, ConfigError

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
LINE_PLACEHOLDERS = frozenset(
    {"base_url", "anthropic_url", "model", "max_tokens", "workspace", "prompt", "prompt_file"}
)
# Only in environment variables and files: other users of the machine see the words of a process.
KEY_PLACEHOLDER = "key"
INTERPRETER_NAME = re.compile(r"(ba|da|z|k|c|tc|fi)?sh|python[\d.]*|node|bun|deno|perl|ruby|php")
CODE_OPTION = re.compile(r"-\w*[ceErp]|--?(eval|command|print)")  # the option before a program text
OPTION_WITH_VALUE = re.compile(r"[-+][oOWX]")  # options of interpreters, whose value is the next word
# Characters that mark program texts: no other argument contains these.
SHELL_TEXT = re.compile(r"""[\s'"$`;|&<>()]""")
MAX_ARGUMENT_BYTES = 100_000  # bytes of a prompt; the kernel accepts 131,071 for the whole word


class CommandError(AsyncrlError):
    """A program could not be run, or failed. `result`: the result that the program left nevertheless."""

    result: Any = None


def words_of(line: str, key: str = "line") -> list[str]:
    """Split a line as a shell would. ConfigError, with the option's name, for words that cannot be filled."""
    with ConfigError.instead_of(ValueError, text=f"{key} {line!r} cannot be split into words"):
        words = shlex.split(line)
    for index, word in enumerate(words):
        if problem := _placeholder_problem(words[:index], word):
            raise ConfigError(f"{key}: {problem}")
    return words


def _placeholder_problem(previous_words: list[str], word: str) -> str:
    """Return why a word cannot be filled; '' if the word can be filled."""
    placeholder_names = PLACEHOLDER.findall(word)
    known_names = [name for name in placeholder_names if name in LINE_PLACEHOLDERS or name == KEY_PLACEHOLDER]
    if KEY_PLACEHOLDER in known_names:
        return f"{{key}} in {word!r} would be visible to all users of the machine; set env: 'NAME={{key}}'"

    if known_names and (SHELL_TEXT.search(PLACEHOLDER.sub("", word)) or _runs_next(previous_words)):
        return (
            f"{{{known_names[0]}}} would run as part of the program text {word!r}; pass it as an argument: "
            f"sh -c 'agent \"$1\"' sh {{{known_names[0]}}}"
        )

    last_placeholder = f"{{{placeholder_names[-1]}}}" if placeholder_names else ""
    if len(known_names) > 1 or (known_names and not word.endswith(last_placeholder)):
        return (
            f"{{{known_names[0]}}} is in the middle of {word!r}; put it at the end of the word, or make it a "
            "separate word"
        )
    if word.endswith(last_placeholder) and len(placeholder_names) > len(known_names):
        return f"unknown placeholder {last_placeholder}; available: {', '.join(sorted(LINE_PLACEHOLDERS))}"

    return ""


def _runs_next(previous_words: list[str]) -> bool:
    """Return True if an interpreter among these words runs the next word as a program text."""
    for index, word in enumerate(previous_words):
        following_words = [
            option
            for previous, option in zip(previous_words[index:], previous_words[index + 1 :], strict=False)
            if not OPTION_WITH_VALUE.fullmatch(previous)
        ]
        all_are_options = all(option[:1] in ("-", "+") for option in following_words)
        if _interprets(word) and all_are_options and any(map(CODE_OPTION.fullmatch, following_words)):
            return True

    return False


def _interprets(word: str) -> bool:
    return INTERPRETER_NAME.fullmatch(Path(word).name) is not None


def with_absolute_paths(words: list[str]) -> list[str]:
    """Make the paths of the program and of the script absolute: the program runs in another directory.
    `python` is the run's own interpreter."""
    program, *arguments = words
    if program in ("python", "python3"):
        program = sys.executable
    absolute_words = [str(Path(program).absolute()) if "/" in program else program, *arguments]
    if script_index := script_of(absolute_words):
        absolute_words[script_index] = str(Path(absolute_words[script_index]).absolute())
    return absolute_words


def script_of(words: list[str]) -> int:
    """Return the index of the file that an interpreter runs; 0 if there is none."""
    file_indexes = (
        index for index, word in enumerate(words) if index and word[:1] != "-" and Path(word).is_file()
    )
    return next(file_indexes, 0) if _interprets(words[0]) else 0


def fill(text: str, values: Mapping[str, str]) -> str:
    """Fill in the values, once: a placeholder inside a value stays unchanged."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def fill_word(word: str, values: Mapping[str, str]) -> str:
    """Fill a word of a line. CommandError for a prompt that cannot be an argument."""
    prompt = values["prompt"]
    if word.endswith("{prompt}"):
        looks_like_option = word == "{prompt}" and prompt.startswith("-")
        problem = "it begins with '-', so it would be read as an option" if looks_like_option else ""
        if len(prompt.encode(errors="replace")) > MAX_ARGUMENT_BYTES:
            problem = f"it is longer than {MAX_ARGUMENT_BYTES} bytes"
        if "\0" in prompt:
            problem = "it contains a NUL character"
        if problem:
            raise CommandError(f"the prompt cannot be passed as an argument: {problem}; use {{prompt_file}}")

    return fill(word, values)
