"""Checks that the trainer can train a run on images, from the configuration and the models' files alone:
before the start of a run whose data have images, and in a trainer rank with the first image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.footprint import needs_critic
from asyncrl.vision.layout import ImageLayout, read_image_layout, read_processor
from asyncrl.weights.checkpoint_match import frozen_shapes

# Settings of an image processor that decide on the pixels of an image of the final size.
PIXEL_SETTINGS = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")


def require_trainable_images(config: RunConfig) -> ImageLayout:
    """Return how the models of a run read images. ConfigError names the key that images do not go with."""
    model_path = config.model.path
    layout = read_image_layout(model_path)
    if not frozen_shapes(model_path):
        raise ConfigError(
            f"{model_path}: `architectures` in config.json names a text-only class, so the model reads "
            "no images; set it to the class of the whole model, or remove the images from the data"
        )

    other_paths = {"kl.reference": config.kl.reference}
    for name, scorer in config.scorers.items():
        if name == "reward":  # it reads texts
            continue
        if layout.scaling != "qwen" and name not in config.scorers_lent:
            raise ConfigError(
                f"scorers.{name}: for {model_path}, SGLang servers tokenize prompts with images again; set "
                "kl.reference to a path instead"
            )
        if (Path(scorer.path) / "config.json").is_file():  # else it is on other machines only
            other_paths[f"scorers.{name}.path"] = scorer.path
    if needs_critic(config):
        other_paths["critic.path"] = config.critic.path
    for key, path in other_paths.items():
        if path and _pixel_layout(path) != _pixel_layout(model_path):
            raise ConfigError(
                f"{key}: {path} uses different patches or pixel values from "
                f"{model_path}; use a model of the same family"
            )

    return layout


def _pixel_layout(path: str) -> tuple[Any, ...]:
    """Return everything that the pixels of an image of the final size depend on, and the placeholder."""
    layout = read_image_layout(path)
    processor = read_processor(Path(path))
    return (
        layout.placeholder,
        layout.patch_size,
        layout.merge_size,
        layout.temporal_patch_size,
        *(processor.get(setting) for setting in PIXEL_SETTINGS),
    )
