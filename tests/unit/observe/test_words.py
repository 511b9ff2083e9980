"""The words of the page have meanings, and each text with a meaning is shown somewhere."""

from __future__ import annotations

from pathlib import Path

from asyncrl.buffer.records import State
from asyncrl.observe.metrics import CHARTS, catalogue
from asyncrl.observe.words import plain_words
from asyncrl.store.listing import FACETS
from asyncrl.viewer.overview import ROLE_OF_PROCESS

STATIC = Path(__file__).resolve().parents[3] / "asyncrl" / "viewer" / "static"
HIDDEN_STATES = {State.PENDING, State.RUNNING}  # counted as in flight


def test_each_text_with_a_meaning_is_on_the_page() -> None:
    shown_texts = {metric.label for metric in catalogue().values()}
    shown_texts |= {title for charts in CHARTS.values() for title in charts}
    shown_texts |= {*FACETS.values(), *ROLE_OF_PROCESS.values(), "coordinator", "held out", "landed"}
    scripts = "\n".join(file.read_text() for file in STATIC.glob("*.js"))
    unknown = [
        text
        for word in plain_words()
        for text in word.texts
        if text not in shown_texts and f'"{text}"' not in scripts
    ]
    assert unknown == []


def test_states_and_small_curves_have_meanings() -> None:
    meanings = {text: word.meaning for word in plain_words() for text in word.texts}
    assert {*State} - HIDDEN_STATES <= meanings.keys()
    assert meanings["lag mean"] == meanings["lag"]
    assert "`" not in "".join(meanings.values())


def test_a_text_has_one_meaning_of_one_sentence_or_two() -> None:
    words = plain_words()
    texts = [text for word in words for text in word.texts]
    assert len(texts) == len({*texts}) and len(words) == len({word.word for word in words})
    for word in words:
        assert word.meaning.endswith(".") and word.meaning.count(". ") <= 1, word.word
