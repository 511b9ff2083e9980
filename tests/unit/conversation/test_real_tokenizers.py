"""Random conversations with real tokenizers and templates: prompt, what the model wrote, and deltas are the
template's own tokens at every turn."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from unicodedata import normalize

import pytest
from transformers import PreTrainedTokenizerFast

from asyncrl.conversation import templates
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.requests import AgentRequest, TextRows, TokenRow
from asyncrl.conversation.tokenizer import TEST_TEXTS, load_tokenizer
from asyncrl.conversation.watch import GrowingText
from asyncrl.gateway import completions, messages, responses
from asyncrl.types import Generation, Message, StopReason, ToolCall, Turn, VersionSpan
from tests.fakes import families
from tests.fakes.families import FAMILIES, TEMPLATES, Family
from tests.fakes.fetched import FETCHED, fetched_tokenizer, first_requests, missing
from tests.unit.conversation.test_chat import TODAY, TOOL

pytestmark = pytest.mark.slow

SAID = (
    *(*TEST_TEXTS, "It is 42.", "x", "3.14159265", "a\n\nb\n", "def f(x):\n\treturn x\n", "1.\n2.\n", "..."),
    *("```", "<b>bold</b> &amp; {% raw %}", "don't, won't", "ＡＢＣ", "ﷺ", "𝔘𝔫𝔦", "e\u0301 é", "a\u200bb"),
    "🏳\u200d🌈",
)
AROUND = ("", "", "", " ", "\n", "\n\n", "  ", "\t", " \n ")  # white space around what others say


@dataclass(frozen=True)
class Real:
    """`tokenizer` as fetched; `template`: another one than its own; `stops`: the ends of its turns."""

    tokenizer: str
    family: Family
    stops: str = ""
    template: Path | None = None


def _mistral(message: Message) -> str:
    calls = [
        f'{{"name": "{c.name}", "arguments": {c.arguments}, "id": "{c.id}"}}' for c in message.tool_calls
    ]
    return message.content + (f"[TOOL_CALLS][{', '.join(calls)}]" if calls else "")


def _mistral_v13(message: Message) -> str:
    return message.content + "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.arguments}" for c in message.tool_calls)


MISTRAL = replace(FAMILIES["mistral-v7"], writes=_mistral, bare_calls=False)
MISTRAL_V13 = replace(MISTRAL, writes=_mistral_v13, appends=("tool", "user"))
CHATML = replace(FAMILIES["qwen2.5"], writes=lambda message: message.content, appends=("tool", "user"))
CHATML_TOOLS = replace(FAMILIES["qwen3"], appends=("tool", "user"))
OWN = Path(templates.__file__).parent
REAL = {
    "qwen3": Real("qwen3", FAMILIES["qwen3"], "<|im_end|>"),
    "deepseek-v3": Real("deepseek-v3", FAMILIES["deepseek-v3"], "<｜end▁of▁sentence｜>"),
    "gpt-oss": Real("gpt-oss", FAMILIES["gpt-oss"], "<|return|> <|call|>", TEMPLATES / "gpt-oss.jinja"),
    "llama3.1": Real("llama3.1", FAMILIES["llama3.1"], "<|eot_id|>", TEMPLATES / "llama3.1.jinja"),
    "llama3": Real("llama3.1", FAMILIES["llama3"], "<|eot_id|>"),
    "llama3-opening": Real("llama3.1", FAMILIES["llama3"], "<|eot_id|>", TEMPLATES / "llama3.jinja"),
    "gemma3": Real("gemma3", FAMILIES["gemma3"], "<end_of_turn>"),
    "smollm2": Real("smollm2", CHATML, "<|im_end|>"),
    "smollm2-tools": Real(
        "smollm2", CHATML_TOOLS, "<|im_end|>", Path(templates.__file__).parent / "chatml_tools.jinja"
    ),
    "mistral-v3": Real("mistral", replace(MISTRAL, bare_calls=True), "</s>", FETCHED / "mistral/v3.jinja"),
    "mistral-v7": Real("mistral", MISTRAL, "</s>", FETCHED / "mistral/v7.jinja"),
    "mistral-v13": Real("mistral", MISTRAL_V13, "</s>", FETCHED / "mistral/v13.jinja"),
}
LEARNED = {
    f"learned {name}": Real(name, family) for name, family in FAMILIES.items() if family.appends
}  # with tokenizers that are made here: there where none is fetched


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    if name in LEARNED:
        return families.tokenizer_of(LEARNED[name].tokenizer)
    real = REAL[name]
    tokenizer = copy.copy(fetched_tokenizer(real.tokenizer))
    if real.template:
        tokenizer.chat_template = real.template.read_text()
    return tokenizer


@functools.cache
def chat_of(name: str) -> Chat:
    return Chat(tokenizer_of(name), TODAY)


class Talk:
    """A random conversation: who answers what."""

    def __init__(self, name: str, seed: int) -> None:
        self.family = (REAL | LEARNED)[name].family
        self.random = Random(f"{name} {seed}")
        self.silent = "mistral" not in name  # their templates refuse a turn of nothing

    def words(self) -> str:
        """Of the model: templates strip the white space around them."""
        return self.random.choice(SAID).strip()

    def foreign(self) -> str:
        if self.random.random() < 0.1:
            return ""
        around = self.random.choice(AROUND), self.random.choice(AROUND)
        return self.random.choice(SAID).join(around)

    def prompt(self) -> tuple[Message, ...]:
        rules = (Message("system", self.foreign()),) * (self.random.random() < 0.5)
        return (*rules, Message("user", self.foreign()))

    def turn(self) -> Message:
        most = 1 if self.family.one_call else 3
        calls = tuple(self.call(n) for n in range(self.random.choice((0, 1, 1, most))))
        quiet = self.family.bare_calls if calls else self.silent and self.random.random() < 0.1
        content = "" if quiet or (calls and self.random.random() < 0.3) else self.words()
        thought = self.words() if self.family.thinks and self.random.random() < 0.5 else ""
        return Message("assistant", content, calls, reasoning=thought)

    def call(self, number: int) -> ToolCall:
        given = {"city": self.foreign(), "more": self.random.choice((None, 1, -2.5, True, [1, {"a": "b"}]))}
        given = given if self.random.random() < 0.7 else {}
        return ToolCall("weather", json.dumps(given, ensure_ascii=False), f"abcdefgh{number}")

    def answer(self, turn: Message) -> tuple[Message, ...]:
        calls = turn.tool_calls
        replies = [Message("tool", self.foreign(), tool_call_id=call.id, name=call.name) for call in calls]
        return tuple(replies) or (Message("user", self.foreign()),)


def check(name: str, seed: int) -> None:
    chat = chat_of(name)
    tokenizer = tokenizer_of(name)
    talk = Talk(name, seed)
    family = talk.family
    tools = (TOOL,) * (talk.random.random() < 0.8)
    said = talk.prompt()
    row = chat.prompt_ids(said, tools)
    appends = True
    for _ in range(talk.random.randint(1, 4)):
        turn = talk.turn()
        answer = talk.answer(turn)
        text = family.writes(turn) + family.ends[bool(turn.tool_calls)]
        written = tuple(tokenizer.encode(text, add_special_tokens=False))
        assert written[-1] in chat.stop_ids
        assert same(chat.decode(written), family.writes(turn))
        appends &= answer[0].role in family.appends
        if name in LEARNED and appends:  # what follows a turn that is rewritten is no turn of its row
            opened = "<think>\n\n</think>\n\n" * (name == "learned qwen3" and not turn.reasoning)
            assert chat.turn_ids(said, turn, tools) == (*tokenizer.encode(opened), *written)
        said += (turn, *answer)
        delta = chat.delta_ids(answer, written[-1], said[: -len(answer)], tools)
        whole = chat.prompt_ids(said, tools)
        assert (delta is None) == (answer[0].role not in family.appends)
        row = whole if delta is None else row + written + delta
        assert tokenizer.decode(row) == tokenizer.decode(whole)
        assert row == whole
    assert row == tuple(tokenizer.encode(chat._render(said, tools), add_special_tokens=False))


def same(one: str, other: str) -> bool:
    """Qwen's tokenizer composes letters."""
    return normalize("NFC", one) == normalize("NFC", other)


FEW = range(10)
MORE = range(10, 50)
MANY = range(50, 1000)


@pytest.mark.parametrize(
    "seeds",
    [FEW, pytest.param(MORE, marks=pytest.mark.full), pytest.param(MANY, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize("name", [*REAL, *LEARNED])
def test_deltas_are_the_templates_own_tokens(name: str, seeds: range) -> None:
    for seed in seeds:
        check(name, seed)


READ = {
    "/v1/messages": messages.read,
    "/v1/responses": responses.read,
    "/v1/chat/completions": completions.read,
}


@pytest.mark.parametrize("agent", ["claude_code", "codex", "opencode", "qwen_code", "mini_swe_agent"])
def test_first_requests_of_coding_agents_are_written_whole(agent: str) -> None:
    """By each template: it refuses none of their messages, and drops no text. Some show no tools."""
    for sent in first_requests(agent):
        ask = READ[sent["path"]](sent["body"].encode()).agent_request
        for name in REAL:
            chat = chat_of(name)
            folded = chat.fold(ask.messages, True)
            text = normalize("NFC", chat.decode(chat.prompt_ids(folded, ask.tools)))
            for message in ask.messages:
                assert normalize("NFC", message.content.strip()) in text, (name, message.role)


@pytest.mark.parametrize("name", REAL)
def test_ends_of_turns(name: str) -> None:
    assert tokenizer_of(name).convert_ids_to_tokens(chat_of(name).stop_ids) == REAL[name].stops.split()


@pytest.mark.parametrize("name", REAL)
def test_nothing_that_a_template_writes_passes_through_a_reply(name: str) -> None:
    """As one reply, forged turns have no token that the template's own turns are made of."""
    chat = chat_of(name)
    tokenizer = tokenizer_of(name)
    said = (*Talk(name, 0).prompt(), Message("assistant", "So."), Message("user", "Why?"))
    added = {n for text, n in tokenizer.get_added_vocab().items() if not text.isspace()}
    own = added & {*chat.prompt_ids(said, (TOOL,)), *chat.stop_ids}
    forged = tokenizer.decode(sorted(own))
    assert own <= {*tokenizer.encode(forged, add_special_tokens=False)}
    read = chat.shorten(forged, 10_000, "middle")
    assert not own & {*tokenizer.encode(read, add_special_tokens=False)}


@pytest.mark.full  # a small one is in test_tokenizer.py
def test_a_real_configuration_that_misnames_its_class() -> None:
    """DeepSeek's says LlamaTokenizerFast, of which transformers makes a tokenizer that loses spaces."""
    folder = FETCHED / "deepseek-v3"
    if not folder.is_dir():
        missing("deepseek-v3")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.encode(TEST_TEXTS[0], add_special_tokens=False)) == TEST_TEXTS[0]


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in FETCHED.glob("*/tokenizer.json")))
def test_the_text_of_ids_that_come_one_by_one_is_their_text(folder: str) -> None:
    tokenizer = fetched_tokenizer(folder)
    rng = Random(folder)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in SAID]
    for ids in (*texts, *(rng.choices(range(len(tokenizer)), k=40) for _ in range(10))):
        growing = GrowingText(functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False))
        for count in range(1, len(ids) + 1):
            growing.read_new_ids(ids[:count])
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert whole.startswith(growing.text) and set(whole[len(growing.text) :]) <= {"\ufffd"}


@pytest.mark.parametrize("folder", ["gemma3", "llama3.1", "qwen3"])
def test_the_text_of_a_row_that_grows_is_that_of_its_ids(folder: str) -> None:
    """In steps that may split characters: a prompt that continues the row is found out as by decoding all."""
    tokenizer = fetched_tokenizer(folder)
    rng = Random(folder)
    chat = Chat(tokenizer)
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in SAID]
    request = AgentRequest((), prompt="")
    for ids in (*texts, *(rng.choices(range(len(tokenizer)), k=60) for _ in range(20))):
        growing = TextRows(chat)
        count = 0
        while count < len(ids):
            count = min(len(ids), count + rng.randint(1, 12))
            span = VersionSpan(0, count, 0, 0)
            turn = Turn(0, (), Generation(tuple(ids[:count]), (0.0,) * count, (span,), StopReason.LENGTH))
            row = TokenRow(request, 0, (), tuple(ids[:count]), turn)
            prompt = chat.decode(row.ids) + "x"
            continued_row = growing.find_continued_row(prompt, [(0, row)])
            assert continued_row == TextRows(chat).find_continued_row(prompt, [(0, row)])
            assert continued_row == ((None, prompt) if row.ids[-1] in chat.stop_ids else (0, "x"))
