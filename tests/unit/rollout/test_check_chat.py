"""What the launcher finds out about tokenizer, chat template and tools before any process starts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from asyncrl.config import parse
from asyncrl.conversation.templates import read_template
from asyncrl.episodes.parts import EpisodeParts, check_chat, check_token_ids, shown_calls
from asyncrl.errors import ConfigError
from asyncrl.launch.data import RunData
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.preflight import check_settings
from asyncrl.tools import tool
from asyncrl.types import Message, Sample, ToolCall
from tests.fakes.chatml import TEMPLATE as CHATML
from tests.fakes.families import tokenizer_of
from tests.fakes.tiny_families import build_family

FIRST = (Message("user", "Rain in Ulm?"),)


GALLERY = """
from asyncrl.environments import Environment, image_observation

class Gallery(Environment):
    needs_images = True

    async def reset(self, sample):
        return image_observation()

    async def step(self, message):
        return image_observation()
"""


@tool
def pick(number: Literal[1, 2] = 1) -> str:
    """Pick a number."""
    return str(number)


def parts_of(model: Path, *tools: str, **keys: Any) -> EpisodeParts:
    rollout = keys.pop("rollout", {})
    settings = {"name": "x", "run_dir": str(model / "runs"), "data": {"train": "t"}}
    settings |= {"rollout": {"tools": list(tools), **rollout}, "model": {"path": str(model), **keys}}
    return EpisodeParts(parse(settings))


def saved(family: str, path: Path) -> Path:
    tokenizer_of(family).save_pretrained(path)
    return path


def ids(eos_token_ids: str) -> dict[str, Any]:
    return {"generation_config.json": f'{{"eos_token_id": {eos_token_ids}}}'}


PICK = f"{__name__}:pick"
HI_LO = {"rollout": {"environment": "hi_lo"}}
MISNAMED = {"enable_thinkin": False}
GIVEN = {"tools": "none"}
UNREADABLE = r"generation_config\.json: .* JSON.*; correct the file"
NO_IDS = r"must be a token ID or a list of token IDs"
REFUSED: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str]] = {
    # gpt-oss joins the values of an enum as text
    "tools": (
        "gpt-oss",
        ("calculator", PICK),
        {},
        r"rollout\.tools: .* 'pick' cannot .*; change the tool's signature",
    ),
    "first prompt": ("gemma3", (), {}, r"data\.train, sample 0: .* template rejects .* change the prompt"),
    "answers": ("qwen3", (), HI_LO, r"rollout\.history is append"),
    "argument": ("qwen3", (), {"template_args": MISNAMED}, r"does not read 'enable_thinkin'; correct"),
    "given argument": ("qwen3", (), {"template_args": GIVEN}, r"rejects .* multiple values"),
    "own template": (
        *("gemma3", (), {"template": read_template("chatml_tools", "--")}),
        r"model\.template: .* does not mark the end of the assistant",
    ),
    "syntax": ("gemma3", (), {"template": "{% for %}"}, r"model\.template: .*TemplateSyntaxError"),
    "generation": ("qwen2.5", (), {"generation_config.json": "{"}, UNREADABLE),
    "generation list": ("qwen2.5", (), {"generation_config.json": "[257]"}, UNREADABLE),
    "text as id": ("qwen2.5", (), ids('"257"'), "eos_token_id must be .*, not '257'"),
    "flag as id": ("qwen2.5", (), ids("[257, true]"), NO_IDS),
}


@pytest.mark.parametrize(("family", "tools", "keys", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_before_a_run(
    tmp_path: Path, family: str, tools: tuple[str, ...], keys: dict[str, Any], why: str
) -> None:
    saved(family, tmp_path)
    for name in [name for name in keys if name.endswith(".json")]:
        (tmp_path / name).write_text(keys[name])
    settings = {key: value for key, value in keys.items() if not key.endswith(".json")}
    prompt = FIRST * 2 if why.startswith("data") else FIRST
    with pytest.raises(ConfigError, match=why):
        check_chat(parts_of(tmp_path, *tools, **settings), prompt)


def test_a_first_prompt_that_is_not_the_whole(tmp_path: Path) -> None:
    """An environment or an agent goes on with it."""
    saved("gemma3", tmp_path)
    for leader in ({"environment": "hi_lo"}, {"agent": "a:b"}):
        check_chat(parts_of(tmp_path, rollout=leader), FIRST * 2)


def test_arguments_of_the_template(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    prompts = []
    for arguments in ({}, {"enable_thinking": False}):
        chat = parts_of(tmp_path, template_args=arguments).chat
        prompts.append(chat.decode(chat.prompt_ids(FIRST)))
    assert prompts[1] == prompts[0] + "<think>\n\n</think>\n\n"


def test_a_template_of_ones_own_takes_the_place_of_the_models(tmp_path: Path) -> None:
    own_template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    )
    own_template += "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    saved("gemma3", tmp_path)
    chat = parts_of(tmp_path, template=own_template).chat
    assert chat.decode(chat.prompt_ids(FIRST)) == (
        "<start_of_turn>user\nRain in Ulm?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_model_without_tools_in_its_template_is_offered_one(tmp_path: Path) -> None:
    tokenizer = copy.copy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    (warning,) = check_chat(parts_of(tmp_path, "calculator"), FIRST)
    assert "does not show the tools to the model; set model.template=chatml_tools" in warning
    own_template = read_template("chatml_tools", "--")
    assert check_chat(parts_of(tmp_path, "calculator", template=own_template), FIRST) == []


@pytest.mark.parametrize("found", ["[257, 300]", "257", "null", None])
def test_ends_of_the_generation_configuration(tmp_path: Path, found: str | None) -> None:
    stop_ids = parts_of(saved("qwen2.5", tmp_path)).chat.stop_ids
    if found is not None:
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {found}}}')
    ends = json.loads(f"[{(found or 'null').strip('[]')}]")
    assert parts_of(tmp_path).chat.stop_ids == (*stop_ids, *(end for end in ends if end is not None))


@pytest.mark.parametrize(
    ("said", "warned"),
    [
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>', False),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', True),  # no tool of the run
        ("calculator(2+3)", True),  # no call to the parser
    ],
)
def test_worked_calls_in_the_prompt_say_what_the_template_does_not(
    tmp_path: Path, said: str, warned: bool
) -> None:
    tokenizer = copy.copy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    parts = parts_of(tmp_path, "calculator")
    worked_example = (Message("assistant", said), Message("tool", "5"), Message("assistant", "5"))
    sample = Sample(0, "sums", (*FIRST, *worked_example, *FIRST), "5")
    inputs = Inputs(parts.config)
    vars(inputs)["run_data"] = RunData([sample], None, [])
    written = [note.text for note in check_settings(inputs) if "how the model writes calls" in note.text]
    assert [bool(written), bool(check_chat(parts, sample.prompt))] == [warned, warned]


def test_a_call_of_one_tool_does_not_show_the_others(tmp_path: Path) -> None:
    saved("qwen2.5", tmp_path)
    call = Message("assistant", '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>')
    parts = parts_of(tmp_path, "calculator", f"{__name__}:pick")
    assert shown_calls(parts, (*FIRST, call)) == {"calculator"}
    assert not shown_calls(parts, (Message("user", call.content),))  # nobody's turn but the model's


TOKEN_TEXTS: dict[str, tuple[Message, ...]] = {
    '<say "x">': (Message("user", 'a <say "x"> b'),),
    "<tab\there>": (Message("user", "a <tab\there> b"),),
    "<back\\slash>": (Message("user", "a <back\\slash> b"),),
    "<größe>": (Message("user", "a <größe> b"),),
    "<argument>": (
        Message("user", "?"),
        Message("assistant", "", (ToolCall("f", '{"a": "<argument>"}', "c"),)),
        Message("user", "?"),
    ),
}


@pytest.mark.parametrize("token", TOKEN_TEXTS)
def test_a_token_that_the_embedding_lacks_is_found_as_the_prompt_writes_it(
    token: str, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    rows = len(tokenizer)
    tokenizer.add_tokens([token])
    parts = parts_of(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    samples = [Sample(0, "test", FIRST, "1"), Sample(1, "test", TOKEN_TEXTS[token], "1")]
    check_token_ids(parts, "data.train", samples, rows + 1)
    with pytest.raises(ConfigError, match=r"data\.train, sample 1: the prompt contains the token"):
        check_token_ids(parts, "data.train", samples, rows)


def test_an_environment_that_needs_images_needs_a_model_that_reads_them(tmp_path: Path) -> None:
    (tmp_path / "gallery.py").write_text(GALLERY)
    environment = {f"{tmp_path / 'gallery.py'}:Gallery": {}}
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match=r"rollout.environment shows images: .* reads text only"):
        _ = parts_of(tmp_path, rollout={"environment": environment}).environment

    build_family("qwen3_vl", tmp_path)
    assert parts_of(tmp_path, rollout={"environment": environment}).environment is not None
