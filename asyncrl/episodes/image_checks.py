"""Says whether the models of a run read images.

    launcher ── refused_images ──► model.read_images ──► all processes ── run_image_layout ──► their layout

The launcher decides for the run, as other machines may not have the files of all models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig, ScorerConfig
from asyncrl.errors import ConfigError
from asyncrl.vision.layout import (
    ImageLayout,
    difference_of_servers,
    is_vision_model,
    read_image_layout,
    read_processor,
)
from asyncrl.weights.checkpoint_match import frozen_shapes

# Settings of an image processor that decide on the pixels of an image of the final size.
PIXEL_SETTINGS = ("image_mean", "image_std", "rescale_factor", "do_rescale", "do_normalize")


def run_image_layout(config: RunConfig) -> ImageLayout:
    """Return how a run reads images, at most `model.max_image_tokens` ids each. ConfigError says why it reads
    none."""
    model_path = config.model.path
    layout = read_image_layout(model_path)
    if not config.model.read_images:
        raise ConfigError(
            "model.read_images=false: this run shows notes in place of images; its start says why"
        )

    max_ids = config.model.max_image_tokens
    if not max_ids:
        return layout
    if max_ids < layout.smallest_limit:
        raise ConfigError(
            f"model.max_image_tokens={max_ids} is too small for {model_path}, whose processor would enlarge "
            f"the images again; set at least {layout.smallest_limit}"
        )
    return layout.with_max_ids(max_ids)


def refused_images(config: RunConfig) -> str:
    """Return why a run with a vision-language model cannot read images; "" if it can, or has a text model."""
    if not is_vision_model(config.model.path):
        return ""
    try:
        check_images(config)
    except ConfigError as error:
        return str(error)
    return ""


def check_images(config: RunConfig) -> None:
    """Check that the model, the engine and the trainer of a run read the same images, by the configuration
    and the models' files alone. ConfigError names the key that is in the way."""
    model_path = config.model.path
    layout = read_image_layout(model_path)
    if config.engine.remote and (difference := difference_of_servers(model_path, layout)):
        raise ConfigError(
            f"engine: for {model_path}, {difference}; use the embedded engine (engine=torch) or another model"
        )
    if not config.total_steps:
        return

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

    for name, scorer in config.scorers.items():
        if name == "reward" or name in config.scorers_lent:
            continue
        # A scorer on another machine is taken for a model like the policy.
        own_path = _local_path(scorer)
        scorer_path = own_path or model_path
        if difference := difference_of_servers(scorer_path, read_image_layout(scorer_path)):
            raise ConfigError(
                f"scorers.{name}: for {own_path or f'a model like {model_path}'}, {difference}; set "
                "kl.reference to a path instead"
            )
    for key, path in _other_models(config).items():
        if _pixel_layout(path) != _pixel_layout(model_path):
            raise ConfigError(
                f"{key}: {path} uses different patches or pixel values from {model_path}; use a model of the "
                "same family"
            )


def _other_models(config: RunConfig) -> dict[str, str]:
    """Return the directories of the models that read the policy's rows, by key. Scorers may be on other
    machines only, and are then compared with each request."""
    paths = {"kl.reference": config.kl.reference, "critic.path": config.critic.path}
    for name, scorer in config.scorers.items():
        if name != "reward":  # a reward model reads text
            paths[f"scorers.{name}.path"] = _local_path(scorer)
    return {key: path for key, path in paths.items() if path}


def _local_path(scorer: ScorerConfig) -> str:
    """Return the directory of the scorer's model if it is on this machine; '' otherwise."""
    return scorer.path if scorer.path and (Path(scorer.path) / "config.json").is_file() else ""


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
