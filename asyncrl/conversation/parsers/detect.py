"""Which parser fits a model, by marks in its chat template. Only a hint for people."""

from __future__ import annotations

# The first mark that a chat template contains says its format; the rarest marks come first. None: no parser.
_MARKS: tuple[tuple[str, str | None], ...] = (
    ("start_tag => `<function`", None),  # Functionary v3.1, Llama 3.1 with tools of the user
    (">>>all", None),  # Functionary v3
    ("<seed:tool_call>", None),
    ("<minimax:tool_call>", None),
    ("<|channel|>", "harmony"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<parameter=", "qwen3_coder"),
    ("<|python_start|>", "pythonic"),
    ("<|tool_list_start|>", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument', "llama3"),
)
_MODEL_TYPES = {
    "gpt_oss": "harmony",
    "kimi_k2": "kimi",
    "deepseek_v3": "deepseek",
    "mistral": "mistral",
    "mistral3": "mistral",
    "ministral": "mistral",
    "mixtral": "mistral",
    "glm4_moe": "glm",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "qwen3_next": "hermes",
    "llama": "llama3",
    "llama4": "pythonic",
    "lfm2": "pythonic",
}


def detect(model: str) -> str | None:
    """The parser that fits a chat template, or a `model_type` of a model's config.json; None if neither says.

    Prefer the template: models of one type were trained on different formats.
    """
    marked = (parser for mark, parser in _MARKS if mark in model)
    return next(marked, _MODEL_TYPES.get(model))
