"""Decides which class of transformers reads a model directory, and which of the model's parts train.

    config.json ──► AutoModelForCausalLM             one model of text: everything trains
                └─► AutoModelForImageTextToText      a composite model: its text part trains; towers and
                    (or AutoModelForMultimodalLM)    projectors are frozen, without model.train_vision

A configuration is composite if it holds a configuration of the text part. Launcher, trainer ranks, embedded
engines and commands all ask here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

ModelRole = Literal["language model", "backbone", "classifier"]
"""Purpose for which a model is loaded: to sample and train, to carry a value head, or to score."""

COMPOSITE_CLASSES = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")


def read_config(path: str, role: ModelRole = "language model") -> PreTrainedConfig:
    """Return the configuration from which the model of a directory is built for a role: that of the text part
    for the backbone of a language model that is of text alone. Raises what transformers raises."""
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    if role == "backbone" and auto_class_of(config) is transformers.AutoModelForCausalLM:
        causal_class = model_class_for(transformers.AutoModelForCausalLM, config)
        if causal_class is not None and causal_class.config_class is config.sub_configs.get("text_config"):
            return config.get_text_config()

    return config


def auto_class_of(config: PreTrainedConfig, role: ModelRole = "language model") -> Any:
    """Return the Auto class of transformers that reads a model of this configuration for a role.

    A composite model is read whole, also where transformers could read its text part alone, unless
    `architectures` in config.json names the class of the text part.
    """
    if role == "backbone":
        return transformers.AutoModel
    if role == "classifier":
        return transformers.AutoModelForSequenceClassification

    causal_class = model_class_for(transformers.AutoModelForCausalLM, config)
    names_causal_class = causal_class is not None and causal_class.__name__ in (config.architectures or ())
    if not is_composite(config) or names_causal_class:
        return transformers.AutoModelForCausalLM

    for class_name in COMPOSITE_CLASSES:
        auto_class = getattr(transformers, class_name)
        if model_class_for(auto_class, config) is not None:
            return auto_class

    return transformers.AutoModelForCausalLM


def is_composite(config: PreTrainedConfig) -> bool:
    """True if the configuration has a text part beside others."""
    return config.get_text_config() is not config


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the stack of layers that computes text: a part of a composite model, or the model itself. Raises
    ValueError for a composite model that does not name its text part."""
    if not is_composite(model.config):
        return model
    decoder: PreTrainedModel = model.get_decoder()
    if decoder is model:
        raise ValueError(f"{type(model).__name__} does not indicate which of its submodules processes text")
    return decoder


def set_text_attention(model: PreTrainedModel, attention: str) -> None:
    """Set the attention implementation of the text part; towers keep their own, which reads an image in both
    directions. A configuration that does not name its text part sets all parts."""
    text_config = model.config.get_text_config()
    text_keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text_config]
    model.set_attn_implementation(dict.fromkeys(["", *text_keys], attention) if text_keys else attention)


def frozen_parts(model: PreTrainedModel, *, train_vision: bool = False) -> tuple[str, ...]:
    """Return the names of the parts that do not train: those beside the text part, or none with
    `model.train_vision`."""
    return () if train_vision else parts_beside_text(model)


def parts_beside_text(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the modules and parameters beside the text part and its output layer, such as
    `model.visual` and `model.multi_modal_projector`; () for a model of text alone."""
    decoder = text_part(model)
    if decoder is model:
        return ()
    return tuple(_parts_outside(model, "", {decoder, model.get_output_embeddings()}))


def is_within(name: str, parts: tuple[str, ...]) -> bool:
    """True if the tensor or module called `name` belongs to one of the parts."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def freeze_parts(model: PreTrainedModel, frozen_part_names: tuple[str, ...]) -> None:
    """Freeze parts of a model, by their names."""
    for name, parameter in model.named_parameters():
        if is_within(name, frozen_part_names):
            parameter.requires_grad_(False)


def _parts_outside(module: nn.Module, name: str, text_modules: set[nn.Module | None]) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    for parameter_name, _ in module.named_parameters(recurse=False):
        yield prefix + parameter_name

    for child_name, child in module.named_children():
        if child in text_modules:
            continue
        if any(descendant in text_modules for descendant in child.modules()):
            yield from _parts_outside(child, prefix + child_name, text_modules)
        elif next(child.parameters(), None) is not None:
            yield prefix + child_name


def model_class_for(auto_class: Any, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that an Auto class has for a configuration; None for none."""
    if type(config) not in auto_class._model_mapping:
        return None
    model_class = auto_class._model_mapping[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class
