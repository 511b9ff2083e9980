"""Checks that all parts of a run read the same images, from the configuration and the models' files alone: in
the launcher, in workers, which show the notes of a text model otherwise, and in trainer ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.vision.layout import ImageLayout, read_image_layout, read_processor
from asyncrl.weights.checkpoint_match import frozen_shapes

# Settings of an image processor that decide on the pixels of an image of the final size.
PIXEL_SETTINGS = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")


def require_images(config: RunConfig) -> ImageLayout:
    """Return how the models of a run read images, at most `model.max_image_tokens` ids each. ConfigError says
    why the run has no images: its model, its engine or its trainer cannot read them."""
    model_path = config.model.path
    layout = read_image_layout(model_path)
    if config.engine.remote and layout.scaling != "qwen":
        raise ConfigError(
            f"engine: for {model_path}, SGLang servers tokenize prompts with images again, perhaps into "
            "other tokens than the trainer's; use the embedded engine (engine=torch), or a model of the "
            "Qwen family"
        )
    if config.total_steps:
        _require_trainable_images(config, layout)

    max_ids = config.model.max_image_tokens
    if not max_ids:
        return layout
    if max_ids < layout.smallest_limit:
        raise ConfigError(
            f"model.max_image_tokens={max_ids} is too small for {model_path}, whose processor would enlarge "
            f"the images again; set at least {layout.smallest_limit}"
        )
    return layout.with_max_ids(max_ids)


def _require_trainable_images(config: RunConfig, layout: ImageLayout) -> None:
    """ConfigError names the key that training on images does not go with. Models that are on other machines
    only are checked there."""
    model_path = config.model.path
    if config.trainer.sequence_parallel > 1:
        raise ConfigError(
            f"trainer.sequence_parallel={config.trainer.sequence_parallel} does not work with images; set "
            "trainer.sequence_parallel=1, or remove the images from the data"
        )
    if not frozen_shapes(model_path):
        raise ConfigError(
            f"{model_path}: `architectures` in config.json names a text-only class, so the model reads "
            "no images; set it to the class of the whole model, or remove the images from the data"
        )

    other_paths = {"kl.reference": config.kl.reference, "critic.path": config.critic.path}
    for name, scorer in config.scorers.items():
        if name == "reward":  # it reads texts
            continue
        if layout.scaling != "qwen" and name not in config.scorers_lent:
            raise ConfigError(
                f"scorers.{name}: for {model_path}, SGLang servers tokenize prompts with images again; set "
                "kl.reference to a path instead"
            )
        other_paths[f"scorers.{name}.path"] = scorer.path
    for key, path in other_paths.items():
        if (
            path
            and (Path(path) / "config.json").is_file()
            and _pixel_layout(path) != _pixel_layout(model_path)
        ):
            raise ConfigError(
                f"{key}: {path} uses different patches or pixel values from {model_path}; use a model of the "
                "same family"
            )


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
