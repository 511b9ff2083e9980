"""How far attention reads when rows have different lengths."""

from __future__ import annotations

import numpy as np

from asyncrl.engines.torch.step_layout import _decoding_spans, reordered_slots


def lengths(slots: int = 64, idle: int = 8) -> np.ndarray:
    """Log-normal, in no order; 0 on `idle` slots."""
    rng = np.random.default_rng(0)
    rows = np.minimum(60 + rng.lognormal(5, 1, slots), 1024).astype(np.int64)
    rows[rng.permutation(slots)[:idle]] = 0
    return rows


def read(rows: np.ndarray) -> int:
    """Cells that one step reads."""
    return sum(len(span.slots) * span.longest for span in _decoding_spans(rows, scratch=1023))


def test_attention_reads_little_more_than_the_rows():
    rows = lengths()
    sources = reordered_slots(rows)
    assert sources is not None and sorted(sources) == list(range(len(rows)))
    assert read(rows[sources]) < 1.6 * rows.sum()
    assert read(rows) > 2.5 * rows.sum()
    assert reordered_slots(rows[sources]) is None


def test_every_slot_that_decodes_is_in_one_group():
    rows = lengths()
    rows = rows[reordered_slots(rows)]
    spans = _decoding_spans(rows, scratch=1023)
    assert len(spans) == 4
    assert np.concatenate([span.slots for span in spans]).tolist() == list(
        range(np.flatnonzero(rows)[-1] + 1)
    )
    for span in spans:
        assert (span.positions[:, 0] == np.where(rows[span.slots] > 0, rows[span.slots] - 1, 1023)).all()
        assert (rows[span.slots] <= span.longest).all()


def test_rows_of_like_lengths_stay_where_they_are_and_together():
    rows = np.full(64, 200)
    rows[[3, 9, 40]] = 0
    assert reordered_slots(rows) is None
    assert len(_decoding_spans(rows, scratch=1023)) == 1
    assert _decoding_spans(np.zeros(4, dtype=np.int64), scratch=1023) == []
