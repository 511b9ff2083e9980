"""Makes samples of rows: prompts with verl's columns, or demonstrations for supervised training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.config import DataConfig
from asyncrl.data.columns import as_json, as_object, as_text, rename_columns
from asyncrl.data.images import ImagePreparer, RowImages
from asyncrl.data.messages import read_messages
from asyncrl.data.rows import Row
from asyncrl.data.sources import RowOrigin, read_source
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Sample

MAX_SAMPLE_BYTES = 16 << 20  # bytes; a reward in a process is sent the sample with its episode, within 64 MiB


class RowLayout(msgspec.Struct, frozen=True):
    """Tells how a row becomes a sample. `truth`: the reason why prompts need a ground truth, for the error
    message; empty: prompts need none. `demonstrations`: rows are whole conversations; None: only rows with
    a column `messages` or `response` are."""

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
    count_row: Callable[[Row, bool], Row] = lambda row, is_demonstration: row,
    preparer: ImagePreparer | None = None,
) -> Iterator[Sample]:
    """Read the samples of one source, in order, each with its number in the file. ConfigError for bad rows.
    `count_row` is called with every row, and True for a demonstration. `preparer`: of images; None: rows with
    images are refused.

    A prompt has the columns `prompt`, `ground_truth` or `reward_model`, and optional columns. A demonstration
    has `messages`, or `prompt` and `response`, of which only the response is learned; the sample's `prompt`
    holds all messages, and `extra_info.tool_schemas` the column `tools`.
    """
    samples = _read_rows(config, path, split, layout, count_row, preparer)
    return preparer.with_final_images(samples) if preparer else samples


def _read_rows(
    config: DataConfig,
    path: str,
    split: str,
    layout: RowLayout,
    count_row: Callable[[Row, bool], Row],
    preparer: ImagePreparer | None,
) -> Iterator[Sample]:
    """Read the samples of one source, with provisional references to images."""
    is_empty = True
    for origin, row in read_source(config, split, path):
        is_empty = False
        is_demonstration = layout.demonstrations
        if is_demonstration is None:
            columns = (layout.columns.get(part, part).partition(".")[0] for part in ("messages", "response"))
            is_demonstration = any(row.get(column) is not None for column in columns)

        # A row may lack these parts although `data.columns` names them: conversations to imitate and the
        # prompts of `data.test` have different columns.
        optional_parts: tuple[str, ...] = ("messages", "response", "tools")
        if is_demonstration:
            has_messages = "messages" in layout.columns or row.get("messages") is not None
            optional_parts = ("ground_truth", "reward_model")
            if has_messages:
                optional_parts += ("prompt", "response")

        row = rename_columns(str(origin), row, layout.columns, optional_parts)
        row = count_row(row, is_demonstration)
        if is_demonstration:
            yield _read_demonstration(origin, row, layout, preparer)
        else:
            yield read_question(origin, row, layout, preparer)

    if is_empty:
        raise ConfigError(f"{path}: the data set is empty; add at least one sample")


def read_question(
    origin: RowOrigin, row: Row, layout: RowLayout, preparer: ImagePreparer | None = None
) -> Sample:
    """Read a prompt to sample from. ConfigError for a bad row."""
    if "prompt" not in row:
        raise ConfigError(f"{origin}: no prompt column {_columns_hint(row, 'prompt', 'ground_truth')}")
    if row["prompt"] is None:
        raise ConfigError(f"{origin}: the prompt column is null; provide some text, or remove the row")

    if row.get("tools") not in (None, "", "[]", []) and "tools" not in layout.columns.values():
        raise ConfigError(
            f"{origin}: the tools column contains schemas, but nothing would answer calls to these tools; "
            "list the tools in rollout.tools and, in extra_info.tools, those that a sample may use; to pass "
            "the schemas to your own agent, set 'data.columns={extra_info.schemas: tools}'"
        )

    truth = _ground_truth(origin, row)
    if layout.truth and as_json(str(origin), "ground_truth", truth) == "null":
        raise ConfigError(
            f"{origin}: no ground truth for {layout.truth}: neither reward_model.ground_truth nor a "
            f"ground_truth column {_columns_hint(row, 'ground_truth')}"
        )

    images = _row_images(origin, row, preparer)
    prompt = read_messages(f"{origin}: the prompt column", row["prompt"], images)
    images.check_marks()
    last = prompt[-1]
    if last.role == "assistant" and (last.tool_calls or not last.content.strip()):
        raise ConfigError(
            f"{origin}: the prompt column ends with an assistant message that has "
            f"{'tool calls' if last.tool_calls else 'no text'}, but the model continues such a message; "
            "write text and no tool calls in the message, or end the prompt with a user or tool message"
        )

    return _make_sample(origin, row, _with_system_prompt(prompt, layout), truth, _extra_info(origin, row))


def _read_demonstration(
    origin: RowOrigin, row: Row, layout: RowLayout, preparer: ImagePreparer | None
) -> Sample:
    images = _row_images(origin, row, preparer)
    if row.get("messages") is not None:
        prompt: tuple[Message, ...] = ()
        learned_messages = read_messages(f"{origin}: the messages column", row["messages"], images)
    elif row.get("prompt") is not None and row.get("response") is not None:
        prompt = read_messages(f"{origin}: the prompt column", row["prompt"], images)
        prompt = _with_system_prompt(prompt, layout)
        learned_messages = read_messages(
            f"{origin}: the response column", row["response"], images, role="assistant"
        )
    else:
        raise ConfigError(
            f"{origin}: no messages column, and no prompt and response columns "
            f"{_columns_hint(row, 'messages')}"
        )

    images.check_marks()
    if all(message.role != "assistant" for message in learned_messages):
        raise ConfigError(f"{origin}: no assistant message, so there is nothing to imitate")

    extra_info = _extra_info(origin, row)
    if tools := row.get("tools"):  # a list of schemas, which may be JSON text
        problem = f"{origin}: the tools column must be a list of schemas"
        with ConfigError.instead_of(ValueError, RecursionError, text=problem):
            tools = json.loads(tools) if isinstance(tools, str) else tools
            extra_info["tool_schemas"] = msgspec.convert(tools, list[dict[str, Any]])

    messages = (*prompt, *learned_messages) if prompt else _with_system_prompt(learned_messages, layout)
    sample = _make_sample(origin, row, messages, _ground_truth(origin, row), extra_info)
    return msgspec.structs.replace(sample, given=len(prompt))


def _row_images(origin: RowOrigin, row: Row, preparer: ImagePreparer | None) -> RowImages:
    """Return the images of a row, whose column may be a list, the same list as JSON text, or one image."""
    column = row.get("images")
    if isinstance(column, str) and column.lstrip().startswith("["):
        with ConfigError.instead_of(
            ValueError, RecursionError, text=f"{origin}: the images column contains text that is not JSON"
        ):
            column = json.loads(column)

    if column is not None and not isinstance(column, list):
        column = [column]
    return RowImages(origin, column, preparer)


def _with_system_prompt(messages: tuple[Message, ...], layout: RowLayout) -> tuple[Message, ...]:
    """Put the configured system prompt first, unless the messages begin with a system message."""
    if not layout.system_prompt or messages[0].role == "system":
        return messages
    return Message("system", layout.system_prompt), *messages


def _ground_truth(origin: RowOrigin, row: Row) -> Any:
    if row.get("ground_truth") is not None:
        return row["ground_truth"]
    return as_object(str(origin), "reward_model", row.get("reward_model") or {}).get("ground_truth")


def _extra_info(origin: RowOrigin, row: Row) -> dict[str, Any]:
    return as_object(str(origin), "extra_info", row.get("extra_info") or {})


def _make_sample(
    origin: RowOrigin, row: Row, prompt: tuple[Message, ...], truth: Any, extra: dict[str, Any]
) -> Sample:
    if row.get("videos"):
        raise ConfigError(
            f"{origin}: the videos column is not empty; only text and images are supported, so remove the "
            "column"
        )

    sample = Sample(
        row=origin.number,
        data_source=as_text(str(origin), "data_source", row.get("data_source")) or origin.source,
        prompt=prompt,
        ground_truth_json=as_json(str(origin), "ground_truth", truth),
        ability=as_text(str(origin), "ability", row.get("ability")),
        extra_info_json=as_json(str(origin), "extra_info", extra),
    )

    # A sample must fit into messages to the processes of a run.
    try:
        size = len(msgspec.msgpack.encode(sample))
    except UnicodeEncodeError as error:
        surrogate = ascii(error.object[error.start])
        raise ConfigError(
            f"{origin}: the row contains {surrogate}, a lone surrogate (half of a character), which is not "
            "valid text; correct the row"
        ) from None

    if size > MAX_SAMPLE_BYTES:
        raise ConfigError(
            f"{origin}: the sample takes {size:,} bytes, but at most {MAX_SAMPLE_BYTES:,} bytes can be sent "
            "to rewards and tools; remove columns, or store large values in files and put the paths in "
            "the row"
        )

    return sample


def _columns_hint(row: Row, *parts: str) -> str:
    """List the row's columns, and show how to configure which of them are the `parts`."""
    example = ", ".join(f"{part}: NAME" for part in parts)
    return (
        f"(found: {', '.join(row) or 'none'}); map your columns with 'data.columns={{{example}}}' "
        "(docs/guides/data.md)"
    )
