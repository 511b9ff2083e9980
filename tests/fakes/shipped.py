"""Chat templates as packages ship them (`make tokenizers`), each with a small tokenizer that has the
template's control tokens."""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.fakes.families import learned_tokenizer
from tests.fakes.fetched import FETCHED, missing

FOLDER = FETCHED / "templates"
# Texts that look like control tokens: tags, [INST], and odd ones of MiniMax, Exaone, Laguna and DeepSeek.
CONTROL = re.compile(
    r"""<[^\s<>'"{}%=()]+>|\[/?[A-Z_]{3,}\]|\[\|[a-z]+\|\]|\[e~\[|\]~!?b\]?\[?|〈[^〉]+〉|｜DSML｜|\[gMASK\]"""
)
# Templates that fail without tools: their models have another template for conversations without tools.
BESIDE = {
    "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use": "axolotl/cohere",
    "llama.cpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "axolotl/chatml",
    "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "axolotl/chatml",
}
_CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "z", "tool_call_id": "abcdefgh1", "name": "f"},
    ],
)


@functools.cache
def shipped_templates() -> dict[str, str]:
    """Return the templates by package and name; of equal templates, the first. Skip the test without
    templates."""
    if not FOLDER.is_dir():
        missing("templates")
    names = {
        path.read_text(): f"{path.parent.name}/{path.stem}" for path in sorted(FOLDER.glob("*/*.jinja"))[::-1]
    }
    return {name: template for template, name in sorted(names.items(), key=lambda item: item[1])}


@functools.cache
def shipped_tokenizer(name: str) -> PreTrainedTokenizerFast:
    templates = shipped_templates()
    texts = [templates[name], templates[BESIDE[name]] if name in BESIDE else ""]
    writer = learned_tokenizer(templates[name], (), (), eos="</s>", bos="<s>")
    for conversation in _CONVERSATIONS:  # some templates put tokens together from parts
        with suppress(Exception):  # templates raise anything
            texts.append(writer.apply_chat_template(conversation, tokenize=False))

    controls = {"<s>", "</s>", *(token for text in texts for token in CONTROL.findall(text))}
    tokenizer = learned_tokenizer(templates[name], sorted(controls), (), eos="</s>", bos="<s>")
    if name in BESIDE:
        tokenizer.chat_template = {"default": templates[BESIDE[name]], "tool_use": templates[name]}
    return tokenizer
