"""Layouts of images for tests."""

from __future__ import annotations

from asyncrl.vision.layout import ImageLayout


def qwen_layout(placeholder: int, patch_size: int, min_side: int, max_side: int) -> ImageLayout:
    """Return a layout of Qwen's kind, which leaves square images of `min_side` to `max_side` pixels as they
    are if the side is a multiple of two patches."""
    return ImageLayout(
        placeholder=placeholder,
        scaling="qwen",
        patch_size=patch_size,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=min_side**2,
        max_pixels=max_side**2,
    )
