"""Tools: typed functions, or classes with one object per episode, whose public methods are the tools.

    @tool                                    class Warehouse:
    async def weather(city: str) -> str:         def reset(self, sample: Sample) -> str | None: ...
        \"\"\"The weather of a city.\"\"\"             def find(self, item: str) -> str: ...
        ...                                      def count(self, shelf: int) -> int: ...
                                                 def result(self): ...  # for the reward
                                                 def close(self): ...

A class with a method `call` is a single tool, named after the class. The JSON schema comes from the
signature and the docstring; arguments are checked against the schema. A tool returns text, a PIL.Image, a
list of texts and images, or a value that becomes JSON.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, get_origin, overload

import msgspec

from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.registry import Registry
from asyncrl.tools.schema import Decode, signature_of
from asyncrl.types import IMAGE_MARK
from asyncrl.values import finite_number
from asyncrl.vision.content import has_image_parts, read_content, without_marks
from asyncrl.vision.files import StoredImage
from asyncrl.vision.layout import ImageLayout

Replay = Literal["pure", "reapply", "no"]
RESERVED_METHODS = frozenset({
    *("open", "reset", "call", "result", "get_reward", "close", "snapshot", "restore", "snapshots"),
})  # fmt: skip
"""Public names in a class that are not tools."""
NO_TOOLS = (staticmethod, classmethod, property, functools.cached_property, type)
"""Types of public class members that are not tools; `type` is for nested classes."""
MAX_REPLY_BYTES = 1 << 18
"""Size limit for a reply, more than a model can read; without a limit, a tool could return a gigabyte."""


class ToolError(AsyncrlError):
    """The tools of an episode could not be opened: `FailReason.TOOL_ERROR`. A tool can also raise ToolError
    to decline a call: the model reads `error: ` and the text, the call is not retried, and it does not count
    as a failure."""


class Options(TypedDict, total=False):
    """Holds the options for running calls of a tool; see `Tool`."""

    timeout: float
    retries: int
    concurrency: int
    rate: float
    replay: Replay
    blocking: bool
    process: bool
    env: tuple[str, ...]
    end: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Tool:
    """Describes a callable that the model may use.

    `schema` is OpenAI's tool schema; `decode` turns the text of a call into keyword arguments, or raises an
    error for the model to read. `state` creates an object per episode: `function` is called with this object
    before the arguments, and tools with the same `state` share the object.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    decode: Decode
    state: Callable[[], Any] | None = None
    timeout: float | None = None
    """Time limit in seconds; None means the caller's default."""
    retries: int = 0
    """Maximum number of times that a failed call is retried, with increasing delays, before the deadline."""
    concurrency: int | None = None
    """Maximum number of calls to this tool that one worker runs at once; None means no limit."""
    rate: float | None = None
    """Maximum number of calls to this tool that one worker starts per second; None means no limit."""
    replay: Replay = "pure"
    """How recorded calls are treated when an episode continues after a crash. `pure`: use the recorded reply;
    `reapply`: run the call again to rebuild its effects; `no`: start the episode again."""
    blocking: bool = False
    """Run a sync function in a thread, which the deadline can abandon. Otherwise the function runs inline,
    and must be quick. With `state`, this also applies to the constructor and the other sync methods of the
    object."""
    process: bool = False
    """Run a sync function in a process from a pool; the deadline can kill this process."""
    env: tuple[str, ...] = ()
    """With `process`: environment variables for the process, in addition to the usual variables
    (isolation/child.py)."""
    remake: Callable[..., Tool] | None = None
    """The factory that created the tool, for samples that supply constructor arguments."""
    begin: Callable[[], Awaitable[None]] | None = None
    """Awaited before every episode with the tool: prepares shared resources outside the deadline for
    calls, and returns at once if the resources are ready."""
    end: Callable[[], Awaitable[None]] | None = None
    """Awaited once when a worker exits: releases resources that tools share, such as connections."""
    check: Callable[[dict[str, Any]], Awaitable[str]] | None = None
    """Describes a problem with decoded arguments for the model; '' if there is none. Runs under the
    deadline."""

    @functools.cached_property
    def schema_text(self) -> str:
        return json.dumps(self.schema, ensure_ascii=False)

    def __post_init__(self) -> None:
        lower_bounds = {"timeout": 0.0, "retries": -1, "concurrency": 0, "rate": 0.0}
        for key, lower_bound in lower_bounds.items():
            value = getattr(self, key)
            if value is not None and not value > lower_bound:
                raise ConfigError(f"tool {self.name!r}: {key} must be above {lower_bound:g}, not {value!r}")

        if self.process and (self.state is not None or self.blocking):
            raise ConfigError(
                f"tool {self.name!r}: process=True works only for functions, and cannot be combined with "
                "blocking"
            )

        # An object of an async method may have other members that block.
        runs_elsewhere = self.process or (self.blocking and self.state is None)
        if runs_elsewhere and inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"tool {self.name!r} is async, so it needs neither blocking nor process; remove them"
            )


tools: Registry[Tool | Callable[..., Any]] = Registry(
    "tool",
    modules={
        "mcp": "asyncrl.tools.mcp",
        "python": "asyncrl.tools.python",
        "search": "asyncrl.tools.search",
        "search_remote": "asyncrl.tools.search",
        "shell": "asyncrl.tools.python",
        "workspace": "asyncrl.tools.python",
    },
)
"""Tools, or factories that are annotated to return Tool or Sequence[Tool] and are called with the arguments
from the config."""


@overload
def tool(subject: type[Any], /) -> Any: ...
@overload
def tool(subject: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str = "", **options: Unpack[Options]) -> Callable[[Callable[..., Any]], Any]: ...


def tool(subject: Callable[..., Any] | None = None, /, *, name: str = "", **options: Any) -> Any:
    """Turn a sync or async function, or a class with a method `call`, into a `Tool`; any other class into a
    tuple of tools, one for each public method, with these options.

    A class makes an object per episode, without arguments (bind arguments with functools.partial); the
    methods `open` (without `call` also `reset`) and `close`, sync or async, are called if present. After a
    crash calls are run again unless `replay` says otherwise. ConfigError for a class that cannot be used
    so."""

    def build_tools(subject: Callable[..., Any]) -> Tool | tuple[Tool, ...]:
        definition: Any = getattr(subject, "func", subject)  # unwraps a functools.partial
        if not inspect.isclass(definition):
            tool_name = name or definition.__name__
            schema, decode = signature_of(subject, tool_name, definition)
            return Tool(tool_name, schema, subject, decode, **options)

        try:
            inspect.signature(subject).bind()
        except TypeError as error:
            raise ConfigError(
                f"class {definition.__name__}: the constructor must work without arguments ({error})"
            ) from None

        object_options = {"replay": "reapply", **options}
        call_method = getattr(definition, "call", None)
        if callable(call_method):
            tool_name = name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", definition.__name__).lower()
            documented = definition if definition.__doc__ else call_method
            schema, decode = signature_of(call_method, tool_name, documented)
            return Tool(tool_name, schema, call_method, decode, subject, **object_options)

        if name:
            raise ConfigError(
                f"class {definition.__name__} defines a tool for each public method; rename the methods, and "
                f"remove name={name!r}"
            )

        _check_members(definition)
        method_tools: list[Tool] = []
        for method_name, method in _public_methods(definition).items():
            schema, decode = signature_of(method, method_name)
            method_tools.append(Tool(method_name, schema, method, decode, subject, **object_options))
        return tuple(method_tools)

    return build_tools(subject) if subject is not None else build_tools


def _check_members(definition: type) -> None:
    """Check the members of a class without `call` that are no tools. ConfigError."""
    label = f"class {definition.__name__}"
    if inspect.isfunction(getattr(definition, "reward", None)):
        raise ConfigError(
            f"{label}: `reward` is a method, which the model could call; make it an attribute or a property"
        )

    reset = getattr(definition, "reset", None)
    if not callable(reset):
        return

    if callable(getattr(definition, "open", None)):
        raise ConfigError(
            f"{label} has both `open` and `reset`, but either begins an episode; remove one of them"
        )
    for parameter in inspect.signature(reset).parameters.values():
        has_no_name = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
        if has_no_name and parameter.name != "self":
            raise ConfigError(f"{label}: parameter {parameter.name!r} of `reset` cannot be passed by name")


def _public_methods(definition: type) -> dict[str, Callable[..., Any]]:
    """Return the methods that are tools, those of base classes first, each in the order of definition.
    ConfigError if there are none."""
    names = dict.fromkeys(name for owner in reversed(definition.__mro__) for name in vars(owner))
    attributes = {name: inspect.getattr_static(definition, name) for name in names}

    if decorated_names := [name for name, attribute in attributes.items() if isinstance(attribute, Tool)]:
        raise ConfigError(
            f"class {definition.__name__}: {decorated_names[0]!r} has @tool; decorate the class instead"
        )

    methods: dict[str, Callable[..., Any]] = {}
    for name, attribute in attributes.items():
        if name.startswith("_") or name in RESERVED_METHODS:
            continue
        if inspect.isfunction(attribute):
            methods[name] = attribute
            continue

        is_other_member = isinstance(attribute, NO_TOOLS) or get_origin(attribute) is not None
        if not is_other_member and callable(getattr(definition, name, None)):
            raise ConfigError(
                f"class {definition.__name__}: {name!r} is a {type(attribute).__name__}, not a method that "
                "can be a tool; write a method, or begin the name with an underscore"
            )
    if not methods:
        raise ConfigError(
            f"class {definition.__name__} has neither a `call` method nor a public method, so it defines no "
            "tool; add a method"
        )
    return methods


def join_names(tool_names: Iterable[str]) -> str:
    """Return `a, b`, or `none`, for messages."""
    return ", ".join(sorted(tool_names)) or "none"


# -- from a tool's result to content; only memory is bounded here: the episode cuts replies, in tokens -----


@dataclass(frozen=True)
class Rewarded:
    """A reply of a tool with a reward for the calling turn, which the model does not read. The rewards of an
    episode, including that of the reward function, add up."""

    content: Any
    reward: float


class ToolAnswer(msgspec.Struct, frozen=True):
    """Holds the result of a call. `content` has an IMAGE_MARK for each of the images. `refused`: the tool
    raised ToolError, with `content` as the text."""

    content: str
    reward: float = 0.0
    refused: bool = False
    images: tuple[StoredImage, ...] = ()


def returns_images(value: Any) -> bool:
    """Return True if a tool's result has images: `read_answer` then takes its time."""
    return has_image_parts(value.content if isinstance(value, Rewarded) else value)


def read_answer(value: Any, layout: ImageLayout | None) -> ToolAnswer:
    """Return the answer for a tool's result: text unchanged, images as the model reads them, other values as
    JSON. `layout`: None for a model that reads text only. ValueError: the reward is not a finite number.
    ImageError: models cannot read an image."""
    rewarded = value if isinstance(value, Rewarded) else Rewarded(value, 0.0)
    reward = finite_number("the tool's reward", rewarded.reward)

    if not has_image_parts(rewarded.content):
        text = rewarded.content if isinstance(rewarded.content, str) else _write_json(rewarded.content)
        if layout is not None:  # a mark stands for an image
            text = without_marks(text)
        return ToolAnswer(bound_reply(text), reward)

    content = read_content(rewarded.content, layout)
    text = bound_reply(content.text)
    if text.count(IMAGE_MARK) != len(content.images):  # the cut took away marks
        text = bound_reply(without_marks(content.text)) + IMAGE_MARK * len(content.images)
    return ToolAnswer(text, reward, images=content.images)


def bound_reply(text: str) -> str:
    """Return the text as valid UTF-8; a text of more than MAX_REPLY_BYTES is reduced to its two ends, in
    constant time."""
    encoded_text = text[: MAX_REPLY_BYTES + 1].encode(errors="replace")
    if len(encoded_text) <= MAX_REPLY_BYTES:
        return encoded_text.decode()

    half_limit = MAX_REPLY_BYTES // 2
    encoded_end = text[-half_limit:].encode(errors="replace")[-half_limit:]
    return (
        f"{encoded_text[:half_limit].decode(errors='ignore')}\n[...]\n{encoded_end.decode(errors='ignore')}"
    )


_encoder = json.JSONEncoder(ensure_ascii=False, default=msgspec.to_builtins)


def _write_json(value: Any) -> str:
    """Write JSON, at most a quarter of MAX_REPLY_BYTES in characters, as a character has up to four bytes."""
    text = ""
    for chunk in _encoder.iterencode(value):
        text += chunk
        if len(text) > MAX_REPLY_BYTES // 4:
            return text[: MAX_REPLY_BYTES // 4 - 5] + "[...]"
    return text
