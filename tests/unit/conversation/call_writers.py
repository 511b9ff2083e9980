"""Writes calls as chat templates do, one function per format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Calls = list[tuple[str, dict[str, Any]]]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _qwen3_value(value: Any) -> str:
    return _dumps(value) if isinstance(value, dict | list) else str(value)


def _glm_value(value: Any) -> str:
    return value if isinstance(value, str) else _dumps(value)


def hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{_dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def llama3(calls: Calls) -> str:
    return "; ".join(_dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(calls: Calls) -> str:
    return "[TOOL_CALLS]" + _dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def deepseek(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{k}<|tool_call_argument_begin|>{_dumps(arguments)}<|tool_call_end|>"
        for k, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def qwen3_coder(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={k}>\n{_qwen3_value(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_glm_value(v)}</arg_value>\n" for k, v in arguments.items()
        )
        return f"<tool_call>{name}\n{inner}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def pythonic(calls: Calls) -> str:
    return f"[{', '.join(f'{name}({_keywords(arguments)})' for name, arguments in calls)}]"


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def cohere(calls: Calls) -> str:
    inner = ",\n".join(
        f'    {{"tool_call_id": "{n}", "tool_name": {_dumps(name)}, "parameters": {_dumps(arguments)}}}'
        for n, (name, arguments) in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n{inner}\n]<|END_ACTION|>"


def gemma4(calls: Calls) -> str:
    return "".join(
        f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in calls
    )


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(inner)}" for key, inner in value.items()) + "}"
    return f"[{','.join(map(_gemma_value, value))}]" if isinstance(value, list) else _dumps(value)


def minimax(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(f'<parameter name="{k}">{_glm_value(v)}</parameter>\n' for k, v in arguments.items())
        return f'<invoke name="{name}">{inner}</invoke>\n'

    return f"\n<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def deepseek_v32(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<｜DSML｜parameter name="{k}" string="{_dumps(isinstance(v, str))}">{_glm_value(v)}'
            "</｜DSML｜parameter>\n"
            for k, v in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'

    inner = "".join(one(*call) for call in calls)
    return f"\n\n<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


_JSON_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def kimi_k3(calls: Calls) -> str:
    def one(number: int, name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(
            f'<|open|>argument key="{k}" type="{_JSON_TYPES.get(type(v), "null")}"<|sep|>{_glm_value(v)}'
            "<|close|>argument<|sep|>"
            for k, v in arguments.items()
        )
        return f'<|open|>call tool="{name}" index="{number}"<|sep|>{inner}<|close|>call<|sep|>'

    inner = "".join(one(n, *call) for n, call in enumerate(calls, 1))
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def seed_oss(calls: Calls) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={k}>{_qwen3_value(v)}</parameter>\n" for k, v in arguments.items())
        return f"\n<seed:tool_call>\n<function={name}>\n{inner}</function>\n</seed:tool_call>"

    return "".join(one(*call) for call in calls)


WRITERS: dict[str, Callable[[Calls], str]] = {
    "cohere": cohere,
    "deepseek": deepseek,
    "deepseek_v32": deepseek_v32,
    "gemma4": gemma4,
    "glm": glm,
    "harmony": harmony,
    "hermes": hermes,
    "kimi": kimi,
    "kimi_k3": kimi_k3,
    "llama3": llama3,
    "minimax": minimax,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3_coder": qwen3_coder,
    "seed_oss": seed_oss,
}


def can_write(name: str, value: Any) -> bool:
    """Whether the format can write this argument at all. Without types, text that reads as another value is
    that value; tags of what encloses it end it."""
    if (
        name in ("qwen3_coder", "glm", "minimax", "seed_oss")
        and isinstance(value, str)
        and not _is_text(value)
    ):
        return False
    if name == "gemma4" and not _plain_keys(value):
        return False
    written = repr(value)
    return not any(
        tag in written for tag in ("think>", "THINK]", "<|", "|>", "</", "<｜", "<parameter=", "<arg_value>")
    )


def _plain_keys(value: Any) -> bool:
    """Keys stand without quotes."""
    if isinstance(value, dict):
        return all(key and key == key.strip() and not set(key) & set(':,{}[]<>"') for key in value) and (
            _plain_keys(list(value.values()))
        )
    return not isinstance(value, list) or all(map(_plain_keys, value))


def _is_text(value: str) -> bool:
    try:
        return isinstance(json.loads(value), str)
    except ValueError:
        return True
