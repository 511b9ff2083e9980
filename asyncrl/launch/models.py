"""Resolves and checks models as the configuration names them: a directory, or a repository of the Hugging
Face hub. Also resolves the chat template that replaces the model's own.

The launcher resolves names once. From then on the configuration, and with it config.yaml, holds directories
and the template's text. A directory in the hub's cache names its repository and commit, so that roles on
another machine can fetch the same files into the cache there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from asyncrl.config import RunConfig, divisors, leaves
from asyncrl.conversation.templates import read_template
from asyncrl.engines.sglang.served_layers import kinds_not_served, servers_get_adapters, type_without_adapters
from asyncrl.episodes.image_checks import refused_images
from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.launch.estimates import multiplies_bfloat16, sees_gpu
from asyncrl.vision.layout import read_image_layout
from asyncrl.weights.model_files import quantization_method, read_json, weight_files, weight_shapes
from asyncrl.weights.trained_tensors import linear_kinds

FETCHED_FILES = ("*.safetensors", "*.json", "*.jinja")
# Exports to other formats, and a second copy of the weights (Mistral).
SKIPPED_FILES = ("*/*", "consolidated*")
# How to write a version that is not quantized, by the method.
DEQUANTIZED_BY_TRANSFORMERS = {
    method: (
        f", or create one with transformers: from_pretrained(..., quantization_config={config_class}("
        "dequantize=True)), save_pretrained(...)"
    )
    for method, config_class in (("mxfp4", "Mxfp4Config"), ("fp8", "FineGrainedFP8Config"))
}
_REPOSITORY_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
_CACHED_DIRECTORY = re.compile(
    r".*/models--(?P<name>\w[\w.-]*?--\w[\w.-]*)/snapshots/(?P<revision>[0-9a-f]{40})"
)


class HubModel(NamedTuple):
    """A repository of models. `revision`: branch, tag or commit; None for the newest."""

    name: str
    revision: str | None


def resolve_models(
    config: RunConfig, previous_config: Mapping[str, Any] = {}, scorers: bool = True
) -> RunConfig:
    """Replace model names by directories of this machine, and the chat template by its text. Models of the
    hub are fetched into its cache. `previous_config`: the configuration of the run that is continued, which
    keeps the commits of its models. `scorers`: also resolve the scorers' models. Raises ConfigError."""

    previous_values = dict(leaves(previous_config))

    def resolve_local(key: str, configured: str) -> str:
        return local_directory(configured, key, str(previous_values.get(key) or ""))

    model = replace(
        config.model,
        path=resolve_local("model.path", config.model.path),
        template=read_template(config.model.template, "model.template"),
        dtype=_dtype(config, previous_values.get("model.dtype")),
    )

    model = replace(model, lora_modules=resolve_lora_modules(replace(config, model=model)))
    weights = config.weights
    if servers_get_adapters(config):
        weights = replace(weights, adapters=True)  # Servers that join the run need this, too.

    return replace(
        config,
        model=model,
        weights=weights,
        kl=replace(config.kl, reference=resolve_local("kl.reference", config.kl.reference)),
        critic=replace(config.critic, path=resolve_local("critic.path", config.critic.path)),
        scorers={
            name: replace(scorer, path=resolve_local(f"scorers.{name}.path", scorer.path))
            if scorers
            else scorer
            for name, scorer in config.scorers.items()
        },
    )


def decide_on_images(config: RunConfig) -> RunConfig:
    """Return the configuration with `model.read_images=false` where not all models of the run read the same
    images. For the launcher alone: other machines may not have the files of all models. ConfigError says why
    a model has no images if `model.max_image_tokens` is set."""
    refusal = refused_images(config)
    if not refusal:
        return config
    if config.model.max_image_tokens:
        raise ConfigError(f"model.max_image_tokens is set, but {refusal}")
    return replace(config, model=replace(config.model, read_images=False))


def resolve_lora_modules(config: RunConfig) -> list[str]:
    """Return the kinds of layers that a run's adapters adapt: `model.lora_modules`, or by default all kinds
    of linear layers, without those that servers do not take where they get adapters alone.

    Raises ConfigError for kinds that the model does not have, or that servers do not take.
    """
    path = config.model.path
    chosen_kinds = [*dict.fromkeys(config.model.lora_modules)]
    if not config.adapters:
        return chosen_kinds

    existing_kinds = sorted({*linear_kinds(path).values()})
    if not existing_kinds:
        return chosen_kinds

    unknown_kinds = sorted({*chosen_kinds} - {*existing_kinds})
    if unknown_kinds:
        raise ConfigError(
            f"model.lora_modules: {path} has no trainable linear layers named {', '.join(unknown_kinds)}; "
            f"choose from {', '.join(existing_kinds)}"
        )

    unserved_kinds = kinds_not_served(path) if servers_get_adapters(config) else {}
    served_kinds = [kind for kind in existing_kinds if kind not in unserved_kinds]
    refused_kinds = {kind: unserved_kinds[kind] for kind in chosen_kinds if kind in unserved_kinds}
    if config.agents:
        key = "agents"
        cure = "engine=torch"
    else:
        key = "weights.adapters"
        cure = "weights.adapters=false"

    if servers_get_adapters(config) and (model_type := type_without_adapters(path)):
        raise ConfigError(
            f"{key}: a request with an adapter crashes an SGLang server that runs {path} ({model_type}); "
            f"set {cure}"
        )
    if refused_kinds:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in refused_kinds.items())
        raise ConfigError(
            f"model.lora_modules: SGLang cannot load adapters alone for {reasons}; remove "
            f"{', '.join(refused_kinds)}, or set {cure}"
        )
    if not served_kinds:
        raise ConfigError(
            f"{key}: SGLang does not support adapters for any linear layer of {path}; set {cure}"
        )

    return chosen_kinds or served_kinds


def _dtype(config: RunConfig, previous_dtype: str | None) -> Literal["float32", "bfloat16"]:
    """Return the configured type; for `auto` the type of the run's first launch, or the type that suits this
    machine."""
    match config.model.dtype, previous_dtype:
        case ("float32" | "bfloat16") as configured_dtype, _:
            return configured_dtype
        case _, ("float32" | "bfloat16") as kept_dtype:
            return kept_dtype
    return "bfloat16" if multiplies_bfloat16(config.model.device != "cpu" and sees_gpu(config)) else "float32"


def local_directory(name: str, key: str, previous_directory: str = "") -> str:
    """Return the directory of a model: `name` itself, or its directory in the hub's cache.
    `previous_directory`: the directory that the run has used so far, which is kept if it is of the same
    repository and `name` gives no revision. Raises ConfigError."""
    if not name or Path(name).is_dir():
        return name

    hub_model = parse_hub_model(name)
    previous_model = parse_hub_model(previous_directory)
    if hub_model is None:
        raise ConfigError(
            f"{key}: {name} is not a directory; use a Hugging Face model directory, or the owner/name of a "
            "hub repository"
        )

    if previous_model is not None and previous_model.name == hub_model.name and hub_model.revision is None:
        hub_model = previous_model
    return fetch_model(hub_model, key)


def parse_hub_model(name: str) -> HubModel | None:
    """Return the repository that `owner/name`, `owner/name@revision` or a directory of the hub's cache
    names."""
    if name_match := _CACHED_DIRECTORY.fullmatch(name):
        return HubModel(name_match["name"].replace("--", "/"), name_match["revision"])
    name_match = _REPOSITORY_NAME.fullmatch(name)
    return HubModel(name_match["name"], name_match["revision"]) if name_match else None


def fetch_model(model: HubModel, key: str) -> str:
    """Fetch the files that a run needs into the hub's cache, unless they are there, and return their
    directory. Without a network (or with HF_HUB_OFFLINE=1) the cached files are used. Raises ConfigError."""
    from huggingface_hub import errors, snapshot_download  # The import takes a second

    full_name = model.name + (f"@{model.revision}" if model.revision else "")
    try:
        with users_code():
            return snapshot_download(
                model.name,
                revision=model.revision,
                allow_patterns=[*FETCHED_FILES],
                ignore_patterns=[*SKIPPED_FILES],
            )
    except errors.RepositoryNotFoundError:  # also if the repository is gated
        reason = "the hub has no such repository; correct the name, or log in with hf auth login"
    except errors.RevisionNotFoundError:
        reason = f"the repository has no revision {model.revision!r}"
    except errors.LocalEntryNotFoundError:
        reason = (
            "the hub cannot be reached, and the model is not in the local cache; download the model on a "
            f"machine with network access (hf download {model.name}), or use a directory"
        )
    except Exception as error:  # any fault of the network, the disk or the cache
        reason = f"the model cannot be downloaded from the hub ({one_line(error)})"
    raise ConfigError(f"{key}: {full_name} is not a directory here, and {reason}") from None


def check_model(config: RunConfig) -> None:
    """Check that config.json, weights, tokenizer and chat template exist, that config.json is of these
    weights, that a reference has the policy's vocabulary, that the context is long enough, and that
    `trainer.sequence_parallel` divides the attention heads. Raises ConfigError."""
    path = Path(config.model.path)
    model_settings = read_json(path / "config.json")
    weight_paths = weight_files(config.model.path)
    if not weight_paths:
        raise ConfigError(f"{path}: no model.safetensors; save the weights with save_pretrained(...)")
    if missing_names := sorted(file.name for file in weight_paths if not file.is_file()):
        raise ConfigError(
            f"{path}: weight files are missing ({len(missing_names)} of {len(weight_paths)}, starting with "
            f"{missing_names[0]}); download or save the model again"
        )

    _check_width(path, model_settings)

    if config.kl.reference:
        from asyncrl.engines.sglang.server import check_vocabulary

        check_vocabulary(config, "kl.reference", config.kl.reference)

    if not (path / "tokenizer.json").is_file():
        has_processor = (path / "preprocessor_config.json").is_file()
        processor_text = " next to its preprocessor_config.json" if has_processor else ""
        raise ConfigError(
            f"{path}: no tokenizer.json{processor_text}; save a fast tokenizer with "
            "tokenizer.save_pretrained(...)"
        )

    if not chat_template(config):
        raise ConfigError(
            f"{path}: no chat template; set model.template to a Jinja file, or to chatml_tools if the "
            "tokenizer has <|im_start|> and <|im_end|>"
        )

    text_settings = model_settings.get("text_config") or model_settings  # of a composite model
    context_length = text_settings.get("max_position_embeddings", text_settings.get("n_positions"))  # GPT-2
    if isinstance(context_length, int) and context_length < config.rollout.max_tokens:
        raise ConfigError(
            f"rollout.max_tokens ({config.rollout.max_tokens}) exceeds the model's context length "
            f"({context_length}); lower rollout.max_tokens"
        )

    if config.model.train_vision:
        advice = "or set model.train_vision=false"
        with ConfigError.instead_of(ConfigError, text="model.train_vision=true", advice=advice):
            read_image_layout(config.model.path)

    head_count = text_settings.get("num_attention_heads", text_settings.get("n_head"))  # GPT-2
    sequence_ranks = config.trainer.sequence_parallel
    if isinstance(head_count, int) and head_count % sequence_ranks:
        raise ConfigError(
            f"trainer.sequence_parallel ({sequence_ranks}) does not divide the model's {head_count} "
            f"attention heads; set it to one of {divisors(gcd(head_count, config.trainer.ranks))}, "
            "which divide both the heads and trainer.ranks"
        )


def check_not_quantized(config: RunConfig) -> None:
    """Check that the models that trainer ranks read are not quantized; servers of scorers may read quantized
    models. Raises ConfigError."""
    paths = {
        "model.path": config.model.path,
        "kl.reference": config.kl.reference,
        "critic.path": config.critic.path,
    }
    for key, path in paths.items():
        method = quantization_method(path) if path else ""
        if method:
            advice = DEQUANTIZED_BY_TRANSFORMERS.get(method, "")
            raise ConfigError(
                f"{key} {path}: the weights are quantized ({method}), so they cannot be trained or "
                f"published; use a bfloat16 version of the model{advice}"
            )


def _check_width(path: Path, model_settings: dict[str, Any]) -> None:
    """Check that the width of the embedding is one of the sizes in config.json, whatever its name."""
    sizes = dict(leaves(model_settings))
    vocabulary = sizes.get("vocab_size", sizes.get("text_config.vocab_size"))
    matrices = (shape for shape in weight_shapes(str(path)).values() if len(shape) == 2)
    widths = {width for rows, width in matrices if rows == vocabulary}

    if widths and not any(value in widths for value in sizes.values() if isinstance(value, int)):
        hidden_size = sizes.get("hidden_size", sizes.get("text_config.hidden_size", "another size"))
        raise ConfigError(
            f"{path}: hidden_size is {hidden_size} in config.json, but the embedding in the weights is "
            f"{vocabulary} × {min(widths)}, so config.json and the weights belong to different models; "
            "download or save the model again"
        )


def chat_template(config: RunConfig) -> str:
    """Return the text of the chat template: `model.template`, or the model's own; '' if there is none."""
    if config.model.template:
        return config.model.template
    path = Path(config.model.path)
    template_file = path / "chat_template.jinja"
    tokenizer_config = path / "tokenizer_config.json"
    if template_file.is_file():
        return template_file.read_text()
    return str((read_json(tokenizer_config) if tokenizer_config.is_file() else {}).get("chat_template") or "")
