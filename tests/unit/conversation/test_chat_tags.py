"""Templates that write tags around a turn's parts, or that end turns only where somebody answers."""

from __future__ import annotations

import functools

import pytest
from tokenizers import AddedToken

from asyncrl.config import RolloutConfig
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import Observed, Opened, Rules, Step, TurnGenerated
from asyncrl.conversation.episode import advance, begin, conversation
from asyncrl.conversation.parsers import load_parser
from asyncrl.types import Generation, Message, Observation, Sample, StopReason, ToolCall, VersionSpan
from tests.fakes.families import tokenizer_of

# Each as its model's template does it, without what other templates do, too.
SOLAR = """{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning and loop.index0 > last.user %}<|begin|>assistant<|think|>{{ m.reasoning -}}
<|end|>{% endif -%}
<|begin|>assistant<|content|>{{ m.content }}<|end|>
{%- else %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|begin|>assistant{% endif %}"""
COMMAND = """{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>
{%- if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif -%}
<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% else %}<|USER_TOKEN|>{{ m.content -}}
<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"""
KIMI_K3 = """{% for m in messages %}<|open|>message role="{{ m.role }}"<|sep|>{% if m.role == 'assistant' -%}
<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|><|open|>response<|sep|>{{ m.content -}}
<|close|>response<|sep|>{% else %}{{ m.content }}{% endif %}<|close|>message<|sep|><|end_of_msg|>{% endfor %}
{%- if add_generation_prompt %}<|open|>message role="assistant"<|sep|><|open|>think<|sep|>{% endif %}"""
APERTUS = """{% set ns = namespace(open=false, tool=false) %}{% for m in messages %}
{%- if m.role == 'user' %}{{ ']' if ns.tool }}{{ '<|assistant_end|>' if ns.open }}
{%- set ns.tool = false %}{% set ns.open = false %}<|user_start|>{{ m.content }}<|user_end|>
{%- elif m.role == 'assistant' %}{{ '<|assistant_start|>' if not ns.open }}{{ ']' if ns.tool }}{{ m.content }}
{%- set ns.tool = false %}{% set ns.open = true %}{% if m.tool_calls %}<|tools_prefix|>[
{%- for c in m.tool_calls %}
{{- '{"' + c.function.name + '": ' + c.function.arguments|tojson + '}' }}{{ ', ' if not loop.last }}
{%- endfor %}]<|tools_suffix|>{% endif %}{% else %}{{ ', ' if ns.tool else '[' }}{{ m.content }}
{%- set ns.tool = true %}{% endif %}{% endfor %}{{ ']' if ns.tool }}
{{- '<|assistant_start|>' if add_generation_prompt }}"""
APRIEL = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '\\n<|begin_assistant|>\\n' + m.content }}
{%- if not loop.last %}{{ '\\n<|end|>\\n' }}{% endif %}{% else %}
{{- '<|begin_' + m.role + '|>\\n' + m.content }}{% endif %}
{%- if loop.last and m.role != 'assistant' %}{{ '\\n<|begin_assistant|>\\nHere are my steps:\\n' }}{% endif %}
{%- endfor %}"""
GEMMA4 = """{% for m in messages %}{% if m.role == 'assistant' %}<|turn>model
{% for c in m.tool_calls %}<|tool_call>call:{{ c.function.name }}{{ c.function.arguments -}}
<tool_call|>{% endfor %}
{%- for r in messages[loop.index:] if m.tool_calls and r.role == 'tool' %}<|tool_response>{{ r.content -}}
<tool_response|>{% endfor %}{{ m.content }}<turn|>
{% elif m.role == 'user' %}<|turn>user
{{ m.content }}<turn|>
{% endif %}{% endfor %}{{ '<|turn>model\n' if add_generation_prompt }}"""
CONTROLS = {
    GEMMA4: ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"],
    SOLAR: ["<|begin|>", "<|think|>", "<|content|>", "<|end|>"],
    COMMAND: [f"<|{part}_TOKEN|>" for part in ("START_OF_TURN", "END_OF_TURN", "CHATBOT", "USER")]
    + [f"<|{edge}_{part}|>" for part in ("THINKING", "RESPONSE") for edge in ("START", "END")],
    KIMI_K3: ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    APERTUS: [f"<|{part}_{edge}|>" for part in ("assistant", "user") for edge in ("start", "end")]
    + ["<|tools_prefix|>", "<|tools_suffix|>"],
    APRIEL: ["<|begin_user|>", "<|begin_assistant|>", "<|begin_tool|>", "<|end|>"],
}


@functools.cache
def chat_of(template: str) -> Chat:
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS[template]])
    tokenizer.chat_template = template
    return Chat(tokenizer)


def written(chat: Chat, text: str) -> tuple[int, ...]:
    return tuple(chat._tokenizer.encode(text, add_special_tokens=False))


QUESTION = Message("user", "Rain?")


def test_thoughts_reach_a_template_that_reads_reasoning() -> None:
    chat = chat_of(SOLAR)
    said = (QUESTION, Message("assistant", "Yes.", reasoning="Hm."), Message("tool", "so"))
    assert "<|think|>Hm.<|end|>" in chat.decode(chat.prompt_ids(said))
    assert chat.check("fork", ["user"])[0].startswith("the chat template drops the reasoning")


@pytest.mark.parametrize(
    ("template", "parser", "turn", "end"),
    [
        (COMMAND, "hermes", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        (COMMAND, "cohere", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        (
            COMMAND,
            "cohere",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
        (COMMAND, "hermes", "<|START_RESPONSE|>Yes.", "<|END_OF_TURN_TOKEN|>"),  # left open
        (COMMAND, "hermes", "Yes.", "<|END_OF_TURN_TOKEN|>"),
        (SOLAR, "hermes", "<|content|>Yes.", "<|end|>"),
        (
            KIMI_K3,
            "kimi_k3",
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
    ],
)
def test_tags_that_the_template_writes_are_no_content(
    template: str, parser: str, turn: str, end: str
) -> None:
    """Neither what an environment, a reward and another row read, nor doubled where a template renders it."""
    chat = chat_of(template)
    rules = Rules(chat, load_parser(parser), RolloutConfig(max_turns=3, history="fork", environment="fake"))
    episode = advance(rules, begin(Sample(0, "", (QUESTION,), "yes")), Opened())
    ids = written(chat, turn + end)
    made = Generation(ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 1, 1),), StopReason.STOP)
    episode = advance(rules, episode, TurnGenerated(made))
    assert isinstance(episode.command, Step)
    assert episode.command.message.content == "Yes."
    episode = advance(rules, episode, Observed(Observation((Message("user", "Sure?"),))))
    shown = chat.decode(chat.prompt_ids(conversation(rules, episode)))
    assert all(shown.count(f"{token}{token}") == 0 for token in CONTROLS[template])
    assert shown.count("Yes.") == 1


def test_a_user_who_ends_the_turn_and_a_tool_that_speaks_within_it() -> None:
    """Apertus: its `<|assistant_end|>` stands where a user speaks, and not where a tool replies."""
    chat = chat_of(APERTUS)
    assert chat.stop_ids[:2] == written(chat, "<|assistant_end|><|tools_suffix|>")
    chat.check("fork", ["tool", "user"])
    call = ToolCall("f", '{"a": 1}', "c")
    said = (QUESTION, Message("assistant", "", (call,)), Message("tool", "rain", tool_call_id="c", name="f"))
    assert '[{"f": {"a": 1}}]<|tools_suffix|>[rain]' in chat.decode(chat.prompt_ids(said))


def test_the_first_token_after_a_line_break_ends_the_turn() -> None:
    """Apriel-1.6 ends all turns but the last one."""
    chat = chat_of(APRIEL)
    [end] = written(chat, "<|end|>")
    assert chat.stop_ids[0] == end
    assert "begins a new row" in chat.check("fork", ["user"])[0]


def test_calls_before_the_words_beside_them_are_shown() -> None:
    """Gemma 4 writes calls, replies, and then what the turn says."""
    assert not any("shows no tool calls" in line for line in chat_of(GEMMA4).check("fork", ["tool"]))
