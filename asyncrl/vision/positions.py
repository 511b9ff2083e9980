"""Computes the positions of ids for models that rotate by time, height and width (multimodal RoPE).

An image's ids share the time of its first id, and count rows and columns from there on. The text after the
image goes on behind the largest position. For an image of 2 x 3 merged patches between text:

    ids      a  b  [ image              ]  c
    time     0  1  2  2  2  2  2  2        5
    height   0  1  2  2  2  3  3  3        5
    width    0  1  2  3  4  2  3  4        5

Source: Qwen2-VL (arXiv 2409.12191), section 2.1; `get_rope_index` of transformers, for images alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from asyncrl.vision.image_ids import find_runs

Grid = tuple[int, int]
"""Rows and columns of the merged patches of an image."""


def rope_positions(ids: np.ndarray, grids: Mapping[str, Grid]) -> np.ndarray:
    """Return the positions [3, T] (time, height, width) of a row of ids [T]. `grids`: by digest, of all
    images of the row. ValueError if a run has another number of ids than its grid."""
    positions = np.empty((3, len(ids)), dtype=np.int64)
    text_start = 0
    next_position = 0
    for run in find_runs(ids):
        text_length = run.start - text_start
        positions[:, text_start : run.start] = np.arange(next_position, next_position + text_length)
        next_position += text_length

        rows, columns = grids[run.digest]
        if rows * columns != run.end - run.start:
            raise ValueError(
                f"image {run.digest} has {run.end - run.start} ids instead of {rows} x {columns}"
            )
        patch_rows, patch_columns = np.divmod(np.arange(rows * columns), columns)
        positions[0, run.start : run.end] = next_position
        positions[1, run.start : run.end] = next_position + patch_rows
        positions[2, run.start : run.end] = next_position + patch_columns
        next_position += max(rows, columns)
        text_start = run.end

    text_length = len(ids) - text_start
    positions[:, text_start:] = np.arange(next_position, next_position + text_length)
    return positions
