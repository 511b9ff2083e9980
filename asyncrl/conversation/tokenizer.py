"""The tokenizer of a model directory, as its tokenizer.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, one_line

TEXTS = (
    "What is 12 plus 30 in total?",
    "  indented\n\n\ttwice;\r\n x = f(1e-9, 'it''s') # 1234567",
    "Größe, naïve, œuvre, ﬁn, ½ · Đặng Thị",
    "Сколько будет 12 и 30? Πόσο κάνει;",
    "你好，世界。多少？ こんにちは 안녕하세요",
    "كم المجموع؟ כמה זה? कुल कितना? ทั้งหมด",
    '🙂 👩‍👩‍👧 ≤ ∑ → {"a": [1, 2.5, null]}',
)  # in many scripts, and without control tokens


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer in a directory. ConfigError if there is none, or if it reads or writes some
    text otherwise than its tokenizer.json.

    Not by AutoTokenizer, which trusts `tokenizer_class` and `model_type`: a byte-level vocabulary whose
    configuration says LlamaTokenizerFast becomes one of SentencePiece, which loses all spaces.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast  # takes a second

    try:
        loaded: Any = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        own = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    except Exception as error:  # of tokenizers it is a bare Exception
        raise ConfigError(
            f"{path}: no usable tokenizer ({one_line(error)}); it needs a tokenizer.json, which "
            "save_pretrained(...) of a tokenizer of transformers writes"
        ) from error
    special = [token for token in loaded.all_special_tokens if own.token_to_id(token) is not None]
    for text in (*TEXTS, " ".join(special)):
        ids = own.encode(text, add_special_tokens=False).ids
        words = loaded.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if loaded.encode(text, add_special_tokens=False) != ids:
            found = "reads"
        elif words != own.decode(ids, skip_special_tokens=False):
            found = "writes"
        else:
            continue
        raise ConfigError(
            f"{path}: the tokenizer as transformers loads it {found} {text!r} otherwise than tokenizer.json; "
            "remove what changes it from tokenizer_config.json, or save it anew with save_pretrained(...)"
        )
    return loaded
