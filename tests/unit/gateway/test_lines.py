"""Lines with placeholders: what is refused before the start, and that no prompt becomes more than a word."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.gateway import Command, Endpoint
from asyncrl.gateway.lines import (
    MAX_ARGUMENT_BYTES,
    CommandError,
    fill,
    fill_word,
    with_absolute_paths,
    words_of,
)
from asyncrl.types import Message, Sample

ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "secret")


@pytest.mark.parametrize(
    "line",
    [
        "agent --url {base_url} --task={prompt}",
        "agent model=openai/{model}",
        "sh -c 'agent \"$1\"' sh {prompt}",
        "python agent.py {workspace} {prompt_file} {anthropic_url}",
        "sh -c \"awk '{print}' x; echo {}\"",
        "agent -c {model} -e {prompt}",  # its own options, not an interpreter's
        "python -u agent.py -c {model} -e {prompt}",
        "find . -exec cat {} ;",
        """agent '{"a": {"b": 1}}'""",
    ],
)
def test_a_placeholder_is_a_word_or_its_end(line: str) -> None:
    assert words_of(line)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "sh -c 'agent {prompt}'",
            r"\{prompt\} would run as part of the program text 'agent .* as an argument",
        ),
        ("sh -c {prompt}", "would run as part of the program text"),
        ("/bin/bash -lc 'cd {workspace}'", "would run as part of the program text"),
        ("env A=1 bash -ec 'x {model}'", "would run as part of the program text"),
        ("python -c 'print({prompt})'", "would run as part of the program text"),
        ("node --eval {prompt}", "would run as part of the program text"),
        ("node -p {prompt}", "would run as part of the program text"),
        ("perl -E {prompt}", "would run as part of the program text"),
        ("php -r 'x {prompt}'", "would run as part of the program text"),
        ("sh -c -- 'x {prompt}'", "would run as part of the program text"),
        ("sh -c -x {prompt}", "would run as part of the program text"),
        ("bash -o pipefail -c {prompt}", "would run as part of the program text"),
        ("ssh host 'agent {prompt}'", "would run as part of the program text"),
        ("agent 'x;{prompt}'", "would run as part of the program text"),
        ("agent '{prompt}-please'", "is in the middle of"),
        ("agent {base_url}/models", "is in the middle of"),
        ("agent {model}{prompt}", "is in the middle of"),
        ("agent {promt}", r"unknown placeholder \{promt\}; available: anthropic_url, base_url"),
        ("agent --key {key}", r"would be visible to all users of the machine; set env: 'NAME=\{key\}'"),
        ("agent 'unclosed", "No closing quotation"),
    ],
)
def test_a_line_that_cannot_be_filled_is_refused(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^line.*{why}"):
        words_of(line)


HARMLESS = st.text().filter(lambda text: "\0" not in text and len(text.encode(errors="replace")) < 10_000)


@given(HARMLESS)
def test_a_prompt_is_filled_in_once_and_as_it_is(prompt: str) -> None:
    values = {"prompt": prompt, "model": "policy", "key": "secret"}
    assert fill_word("--task={prompt}", values) == f"--task={prompt}"
    if not prompt.startswith("-"):
        assert fill_word("{prompt}", values) == prompt
    assert fill_word("-x", values) == "-x"


def test_a_placeholder_in_a_prompt_stays() -> None:
    assert fill_word("{prompt}", {"prompt": "{key} {model}", "key": "secret"}) == "{key} {model}"
    assert fill('url = "{base_url}" {x} {}', {"base_url": "http"}) == 'url = "http" {x} {}'


@pytest.mark.parametrize(
    ("word", "prompt", "why"),
    [
        ("{prompt}", "--help", "begins with '-'"),
        ("{prompt}", "x" * (MAX_ARGUMENT_BYTES + 1), "is longer than"),
        ("--task={prompt}", "é" * (MAX_ARGUMENT_BYTES // 2 + 1), "is longer than"),
        ("{prompt}", "a\0b", "contains a NUL"),
    ],
)
def test_a_prompt_that_is_no_argument_is_refused(word: str, prompt: str, why: str) -> None:
    with pytest.raises(CommandError, match=f"cannot be passed as an argument: .*{why}.*use {{prompt_file}}"):
        fill_word(word, {"prompt": prompt})


def test_paths_start_where_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    assert with_absolute_paths(["python", "-u", "agent.py", "agent.py"]) == [
        sys.executable,
        "-u",
        str(tmp_path / "agent.py"),
        "agent.py",
    ]
    assert with_absolute_paths(["bin/agent", "agent.py"]) == [str(tmp_path / "bin/agent"), "agent.py"]
    assert with_absolute_paths(["sh", "-c", "agent.py x"]) == ["sh", "-c", "agent.py x"]


NASTY = (
    *("'", '"', 'it\'s "so"', "$(touch broken)", "`touch broken`", "; touch broken", "a\nb\n", "\\", "*"),
    *("--help", "-rf /", "{key}", "{prompt}", "%s", "$HOME", "", " ", "\t-x", "ü\U0001f600", "x" * 150_000),
)


def test_real_programs_get_nasty_prompts_as_they_are(tmp_path: Path) -> None:
    """By a file, as the end of an option and, where it can be one, as an argument."""
    expression = "{'file': open(sys.argv[1]).read(), 'words': sys.argv[2:]}"
    (tmp_path / "agent.py").write_text(f"import json, sys\nprint(json.dumps({expression}))")
    line = f"{sys.executable} {tmp_path / 'agent.py'} {{prompt_file}}"

    async def run(prompt: str) -> None:
        sample = Sample(0, "test", (Message("user", prompt),), "1")
        assert await Command(line=line)(sample, ENDPOINT) == {"file": prompt, "words": []}
        for word, is_one in {"--x={prompt}": len(prompt) < 1000, "{prompt}": prompt[:1] != "-"}.items():
            command = Command(line=f"{line} {word}")
            if is_one and len(prompt) < 1000:
                filled = word.replace("{prompt}", prompt)
                assert await command(sample, ENDPOINT) == {"file": prompt, "words": [filled]}
            else:
                with pytest.raises(CommandError, match="cannot be passed as an argument"):
                    await command(sample, ENDPOINT)

    async def all_of_them() -> None:
        await asyncio.gather(*map(run, NASTY))

    asyncio.run(all_of_them())
