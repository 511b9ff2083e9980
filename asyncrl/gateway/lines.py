"""Lines of programs: words with placeholders, checked before the start and filled for an episode.

    agent --url {base_url} --task={prompt}    a placeholder is a word of its own, or the end of one

A line is split before it is filled, and no shell reads it, so nothing in a prompt can become a word of its
own, an option or a command.
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
OF_LINES = frozenset(
    {"base_url", "anthropic_url", "model", "max_tokens", "workspace", "prompt", "prompt_file"}
)
KEY = "key"  # only in environment variables and files: other users of the machine see the words of a process
INTERPRETER = re.compile(r"(ba|da|z|k|c|tc|fi)?sh|python[\d.]*|node|bun|deno|perl|ruby|php")
CODE = re.compile(r"-\w*[ceErp]|--?(eval|command|print)")  # the option before a text that it runs
WITH_VALUE = re.compile(r"[-+][oOWX]")  # options of interpreters, whose value is the next word
TEXT = re.compile(r"""[\s'"$`;|&<>()]""")  # in an argument, only texts for somebody to read have these
MAX_ARGUMENT = 100_000  # bytes of a prompt; the kernel takes 131,071 with what is in front of it


class CommandError(AsyncrlError):
    """Says that a program could not be run, or failed. `result`: what it left nevertheless."""

    result: Any = None


def words_of(line: str, key: str = "line") -> list[str]:
    """Split a line as a shell would. ConfigError, with the option's name, for what cannot be filled."""
    with ConfigError.instead_of(ValueError, text=f"{key} {line!r} cannot be split"):
        words = shlex.split(line)
    for index, word in enumerate(words):
        if trouble := _trouble(words[:index], word):
            raise ConfigError(f"{key}: {trouble}")
    return words


def _trouble(before: list[str], word: str) -> str:
    """Say why the word cannot be filled; '' if it can be."""
    names = PLACEHOLDER.findall(word)
    known = [name for name in names if name in OF_LINES or name == KEY]
    if KEY in known:
        return f"{{key}} in {word!r} would be seen by all users of the machine; set env: 'NAME={{key}}'"
    if known and (TEXT.search(PLACEHOLDER.sub("", word)) or _runs_next(before)):
        return (
            f"{{{known[0]}}} stands in a program's text, {word!r}, and would be run as a part of it; give it "
            f"as an argument: sh -c 'agent \"$1\"' sh {{{known[0]}}}"
        )
    last = f"{{{names[-1]}}}" if names else ""
    if len(known) > 1 or (known and not word.endswith(last)):
        return f"{{{known[0]}}} stands in the middle of {word!r}; make it a word of its own, or its end"
    if word.endswith(last) and len(names) > len(known):
        return f"there is no placeholder {last}; known: {', '.join(sorted(OF_LINES))}"
    return ""


def _runs_next(before: list[str]) -> bool:
    """True where an interpreter among these words takes the next one for the text to run."""
    for index, word in enumerate(before):
        given = [
            option
            for previous, option in zip(before[index:], before[index + 1 :], strict=False)
            if not WITH_VALUE.fullmatch(previous)
        ]
        options = [option for option in given if option[:1] in ("-", "+")]
        if _interprets(word) and options == given and any(map(CODE.fullmatch, options)):
            return True
    return False


def _interprets(word: str) -> bool:
    return INTERPRETER.fullmatch(Path(word).name) is not None


def located(words: list[str]) -> list[str]:
    """Make the paths of the program and of its script absolute: it does not run where the run was started.
    `python` is the run's own interpreter."""
    program, *rest = words
    if program in ("python", "python3"):
        program = sys.executable
    found = [str(Path(program).absolute()) if "/" in program else program, *rest]
    if script := script_of(found):
        found[script] = str(Path(found[script]).absolute())
    return found


def script_of(words: list[str]) -> int:
    """Find the index of the file that an interpreter is to run; 0 if there is none."""
    files = (index for index, word in enumerate(words) if index and word[:1] != "-" and Path(word).is_file())
    return next(files, 0) if _interprets(words[0]) else 0


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put in the values, once: a placeholder in a value stays as it is."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def fill_word(word: str, values: Mapping[str, str]) -> str:
    """Fill a word of a line. CommandError for a prompt that cannot be an argument."""
    prompt = values["prompt"]
    if word.endswith("{prompt}"):
        option = word == "{prompt}" and prompt.startswith("-")
        trouble = "it begins with '-', and would be an option" if option else ""
        if len(prompt.encode(errors="replace")) > MAX_ARGUMENT:
            trouble = f"it has more than {MAX_ARGUMENT} bytes"
        if "\0" in prompt:
            trouble = "it has a NUL"
        if trouble:
            raise CommandError(f"the prompt cannot be an argument: {trouble}; use {{prompt_file}}")
    return fill(word, values)
