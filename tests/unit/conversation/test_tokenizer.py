"""A model's tokenizer is what its tokenizer.json says, whatever lies beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.conversation.tokenizer import TEST_TEXTS, load_tokenizer
from asyncrl.errors import ConfigError
from tests.fakes.families import tokenizer_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer_of("deepseek-r1").save_pretrained(tmp_path)
    return tmp_path


def configure(model: Path, **keys: Any) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_the_class_that_the_configuration_names_changes_nothing(model: Path) -> None:
    """AutoTokenizer makes a SentencePiece tokenizer of this byte-level one: it loses the spaces."""
    configure(model, tokenizer_class="LlamaTokenizerFast", add_bos_token=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    wrong = AutoTokenizer.from_pretrained(model, local_files_only=True)
    assert " " not in wrong.decode(wrong.encode("What is 12 plus 30?"), skip_special_tokens=True)
    loaded = load_tokenizer(str(model))
    own = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in (*TEST_TEXTS, "<｜User｜>What is 12 plus 30?<｜end▁of▁sentence｜>"):
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == own.encode(text, add_special_tokens=False).ids
        assert loaded.decode(ids) == text
    assert loaded.chat_template and loaded.eos_token == "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    "keys",
    [
        {"added_tokens_decoder": {"900": {"content": " total"}}},
        {"split_special_tokens": True},
    ],
)
def test_a_configuration_that_changes_how_text_is_read_is_refused(model: Path, keys: Any) -> None:
    configure(model, **keys)
    with pytest.raises(ConfigError, match=r"encodes .* differently from tokenizer\.json; remove the cause"):
        load_tokenizer(str(model))


def test_a_padding_token_that_the_file_lacks_is_no_difference(model: Path) -> None:
    configure(model, pad_token="[PAD]")
    assert load_tokenizer(str(model)).pad_token == "[PAD]"


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("{")])
def test_without_a_tokenizer(model: Path, spoil: Any) -> None:
    spoil(model / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"no usable tokenizer .* add a tokenizer\.json"):
        load_tokenizer(str(model))


def test_a_library_that_writes_text_otherwise_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokenizer_config.json makes transformers 5 do so; other releases have tidied spaces up."""
    written = PreTrainedTokenizerFast.decode
    tidied = lambda *given, **options: written(*given, **options).replace(" ?", "?").replace("  ", " ")  # noqa: E731
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", tidied)
    with pytest.raises(ConfigError, match=r"decodes .  indented.* differently from tokenizer\.json"):
        load_tokenizer(str(model))
