"""Samples from rows: prompts with verl's columns, or demonstrations for supervised training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.config import DataConfig
from asyncrl.data.columns import as_json, as_object, as_text, renamed
from asyncrl.data.messages import read_messages
from asyncrl.data.rows import Row
from asyncrl.data.sources import Place, reader
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Sample

MEDIA = ("images", "videos")
MAX_SAMPLE = 16 << 20  # bytes; a reward in a process is sent the sample with its episode, within 64 MiB


class RowLayout(msgspec.Struct, frozen=True):
    """The way in which a row becomes a sample. `truth`: what needs the ground truth of a prompt, for the
    error where there is none; empty: nothing does. `demonstrations`: rows are whole conversations; None:
    those with a column `messages` or `response` are."""

    columns: Mapping[str, str] = MappingProxyType({})
    system_prompt: str = ""
    truth: str = ""
    demonstrations: bool | None = False


def load_samples(path: str | Path, truth: str = "a reward") -> list[Sample]:
    """Return the prompts of one source, with verl's columns."""
    return list(read_samples(DataConfig(str(path)), str(path), "train", RowLayout(truth=truth)))


def read_samples(
    config: DataConfig,
    path: str,
    split: str,
    layout: RowLayout,
    see: Callable[[Row, bool], Row] = lambda row, whole: row,
) -> Iterator[Sample]:
    """The samples of one source, in order, each with its number in its file. ConfigError for what is wrong.
    `see`: is called with every row, and whether it is a demonstration.

    A prompt: columns `prompt`, `ground_truth` or `reward_model`, and optional ones. A demonstration:
    `messages`, or `prompt` and `response`, of which only the latter is learned; the sample's `prompt` holds
    all messages, and `extra_info.tool_schemas` what a column `tools` held.
    """
    empty = True
    for place, row in reader(config, split)(path):
        empty = False
        whole = _is_demonstration(layout, row)
        row = see(renamed(str(place), row, layout.columns, _unread(layout, row, whole)), whole)
        yield _demonstration(place, row, layout) if whole else question(place, row, layout)
    if empty:
        raise ConfigError(f"{path}: the data set is empty; it needs at least one sample")


def _is_demonstration(layout: RowLayout, row: Row) -> bool:
    if layout.demonstrations is not None:
        return layout.demonstrations
    columns = (layout.columns.get(part, part).partition(".")[0] for part in ("messages", "response"))
    return any(row.get(column) is not None for column in columns)


def _unread(layout: RowLayout, row: Row, demonstration: bool) -> tuple[str, ...]:
    """Parts that this row may lack: `data.columns` may name them for the other kind, as conversations to
    imitate and the prompts of `data.test` have different columns."""
    if not demonstration:
        return ("messages", "response", "tools")
    whole = "messages" in layout.columns or row.get("messages") is not None
    return ("ground_truth", "reward_model", *(("prompt", "response") if whole else ()))


def question(where: Place, row: Row, layout: RowLayout) -> Sample:
    """A prompt to sample from. ConfigError for what is wrong with its row."""
    if row.get("prompt") is None:
        raise ConfigError(f"{where}: no column prompt; {_found(row, 'prompt', 'ground_truth')}")
    if row.get("tools") not in (None, "", "[]", []) and "tools" not in layout.columns.values():
        raise ConfigError(
            f"{where}: column tools holds schemas, and nothing would answer their calls: name tools in "
            "rollout.tools, and the names that a sample may use in extra_info.tools; an agent of your own "
            "gets the schemas with 'data.columns={extra_info.schemas: tools}'"
        )
    truth = _truth(where, row)
    if layout.truth and as_json(str(where), "ground_truth", truth) == "null":
        raise ConfigError(
            f"{where}: no ground truth for {layout.truth}, neither reward_model.ground_truth nor a column "
            f"ground_truth; {_found(row, 'ground_truth')}"
        )
    prompt = read_messages(f"{where}: column prompt", row["prompt"])
    last = prompt[-1]
    if last.role == "assistant" and (last.tool_calls or not last.content.strip()):
        raise ConfigError(
            f"{where}: column prompt ends with an assistant message that has "
            f"{'tool calls' if last.tool_calls else 'no text'}; the model continues this message: "
            "give it text and no tool calls, or end the prompt with a message of the user or a tool"
        )
    return _sample(where, row, _led(prompt, layout), truth, _extra(where, row))


def _demonstration(where: Place, row: Row, layout: RowLayout) -> Sample:
    if row.get("messages") is not None:
        given: tuple[Message, ...] = ()
        learned = read_messages(f"{where}: column messages", row["messages"])
    elif row.get("prompt") is not None and row.get("response") is not None:
        given = _led(read_messages(f"{where}: column prompt", row["prompt"]), layout)
        learned = read_messages(f"{where}: column response", row["response"], role="assistant")
    else:
        raise ConfigError(f"{where}: no column messages, or prompt and response; {_found(row, 'messages')}")
    if all(message.role != "assistant" for message in learned):
        raise ConfigError(f"{where}: has no assistant message, so there is nothing to imitate")
    extra = _extra(where, row)
    if tools := row.get("tools"):  # a list of schemas, or that as JSON text
        wrong = f"{where}: column tools must be a list of schemas"
        with ConfigError.instead_of(ValueError, RecursionError, text=wrong):
            tools = json.loads(tools) if isinstance(tools, str) else tools
            extra["tool_schemas"] = msgspec.convert(tools, list[dict[str, Any]])
    messages = (*given, *learned) if given else _led(learned, layout)
    sample = _sample(where, row, messages, _truth(where, row), extra)
    return msgspec.structs.replace(sample, given=len(given))


def _led(messages: tuple[Message, ...], layout: RowLayout) -> tuple[Message, ...]:
    """Put the configured system prompt first, unless the messages bring their own."""
    if not layout.system_prompt or messages[0].role == "system":
        return messages
    return Message("system", layout.system_prompt), *messages


def _truth(where: Place, row: Row) -> Any:
    if row.get("ground_truth") is not None:
        return row["ground_truth"]
    return as_object(str(where), "reward_model", row.get("reward_model") or {}).get("ground_truth")


def _extra(where: Place, row: Row) -> dict[str, Any]:
    return as_object(str(where), "extra_info", row.get("extra_info") or {})


def _sample(where: Place, row: Row, prompt: tuple[Message, ...], truth: Any, extra: dict[str, Any]) -> Sample:
    if media := next((name for name in MEDIA if row.get(name)), ""):
        raise ConfigError(
            f"{where}: column {media} is not empty; only text can be trained here, so leave it out"
        )
    sample = Sample(
        row=where.number,
        data_source=as_text(str(where), "data_source", row.get("data_source")) or where.source,
        prompt=prompt,
        ground_truth=as_json(str(where), "ground_truth", truth),
        ability=as_text(str(where), "ability", row.get("ability")),
        extra_info=as_json(str(where), "extra_info", extra),
    )
    _check_encoded(where, sample)
    return sample


def _check_encoded(where: Place, sample: Sample) -> None:
    """ConfigError where the sample cannot be sent to the processes of a run."""
    try:
        size = len(msgspec.msgpack.encode(sample))
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ConfigError(
            f"{where}: has {half}, a lone surrogate (half of a character), which is no text; correct the row"
        ) from None
    if size > MAX_SAMPLE:
        raise ConfigError(
            f"{where}: a sample of {size:,} bytes is over the {MAX_SAMPLE:,} that can be sent to rewards and "
            "tools; leave columns out, or put large contents into files and their paths into the row"
        )


def _found(row: Row, *parts: str) -> str:
    """The columns that there are, and how one says which of them are the `parts`."""
    example = ", ".join(f"{part}: NAME" for part in parts)
    return (
        f"found: {', '.join(row) or 'none'}; say which it is with 'data.columns={{{example}}}' (docs/data.md)"
    )
