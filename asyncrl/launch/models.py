"""Resolves and checks models as the configuration names them: a directory, or a repository of the Hugging
Face hub; and the chat template in place of the model's own.

The launcher resolves the names once. From there on the configuration, and with it config.yaml, holds
directories and the template's text. A directory in the hub's cache names its repository and commit, so that
on another machine the roles can fetch the same files into the cache there.
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
from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.launch.estimates import multiplies_bfloat16, sees_gpu
from asyncrl.weights.model_files import read_json, served_modules, weight_files, weight_shapes

WANTED = ("*.safetensors", "*.json", "*.jinja")
UNWANTED = ("*/*", "consolidated*")  # exports to other formats; a second copy of the weights (Mistral)
_REPOSITORY = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
_CACHED = re.compile(r".*/models--(?P<name>\w[\w.-]*?--\w[\w.-]*)/snapshots/(?P<revision>[0-9a-f]{40})")


class HubModel(NamedTuple):
    """Names a repository of models; `revision`: branch, tag or commit, None for the newest."""

    name: str
    revision: str | None


def resolve_models(config: RunConfig, before: Mapping[str, Any] = {}, scorers: bool = True) -> RunConfig:
    """The configuration with directories of this machine, and the chat template as text. What the hub has is
    fetched into its cache. `before`: that of a run which is continued: it keeps the commits of its models.
    `scorers`: their models are needed here, too. Raises ConfigError."""

    begun = dict(leaves(before))

    def local(key: str, given: str) -> str:
        return local_directory(given, key, str(begun.get(key) or ""))

    model = replace(
        config.model,
        path=local("model.path", config.model.path),
        template=read_template(config.model.template, "model.template"),
        dtype=_dtype(config, begun.get("model.dtype")),
    )

    weights = config.weights
    if config.adapters_apart and config.engine.remote:
        if not served_modules(model.path):
            key, instead = (
                ("agents", "engine=torch") if config.agents else ("weights.adapters", "it to false")
            )
            raise ConfigError(
                f"{key}: SGLang has no adapters for some layers, or experts, of {model.path}; set {instead}"
            )
        weights = replace(weights, adapters=True)  # also for those that join with servers of their own

    return replace(
        config,
        model=model,
        weights=weights,
        kl=replace(config.kl, reference=local("kl.reference", config.kl.reference)),
        critic=replace(config.critic, path=local("critic.path", config.critic.path)),
        scorers={
            name: replace(one, path=local(f"scorers.{name}.path", one.path)) if scorers else one
            for name, one in config.scorers.items()
        },
    )


def _dtype(config: RunConfig, before: str | None) -> Literal["float32", "bfloat16"]:
    """Return the configured type; for `auto` the one that the run was begun with, or this machine's."""
    match config.model.dtype, before:
        case ("float32" | "bfloat16") as given, _:
            return given
        case _, ("float32" | "bfloat16") as kept:
            return kept
    return "bfloat16" if multiplies_bfloat16(config.model.device != "cpu" and sees_gpu(config)) else "float32"


def local_directory(given: str, key: str, before: str = "") -> str:
    """The directory of a model: `given` itself, or where the hub's cache keeps it. `before`: the one that a
    run was begun with, which is kept if it is of the same repository."""
    if not given or Path(given).is_dir():
        return given

    hub = hub_model(given)
    kept = hub_model(before)
    if hub is None:
        raise ConfigError(
            f"{key}: {given} is no directory; give a Hugging Face model directory, or owner/name of the hub"
        )

    if kept is not None and kept.name == hub.name and hub.revision is None:
        hub = kept
    return fetch(hub, key)


def hub_model(given: str) -> HubModel | None:
    """The repository that `owner/name`, `owner/name@revision` or a directory of the hub's cache names."""
    if found := _CACHED.fullmatch(given):
        return HubModel(found["name"].replace("--", "/"), found["revision"])
    found = _REPOSITORY.fullmatch(given)
    return HubModel(found["name"], found["revision"]) if found else None


def fetch(model: HubModel, key: str) -> str:
    """Fetch what a run needs into the hub's cache, if it is not there; the directory. Without a network
    (or with HF_HUB_OFFLINE=1) what the cache has is taken. Raises ConfigError."""
    from huggingface_hub import errors, snapshot_download  # takes a second

    name = model.name + (f"@{model.revision}" if model.revision else "")
    try:
        with users_code():
            return snapshot_download(
                model.name, revision=model.revision, allow_patterns=[*WANTED], ignore_patterns=[*UNWANTED]
            )
    except errors.RepositoryNotFoundError:  # a gated one, too
        why = "the hub shows no such repository; correct the name (or log in: hf auth login)"
    except errors.RevisionNotFoundError:
        why = f"the repository has no revision {model.revision!r}"
    except errors.LocalEntryNotFoundError:
        why = (
            "the hub cannot be reached, and its cache here has no such model; fetch it where there is a "
            f"network (hf download {model.name}), or give a directory"
        )
    except Exception as error:  # of the network, the disk, the cache
        why = f"cannot be fetched from the hub ({one_line(error)})"
    raise ConfigError(f"{key}: {name} is no directory here, and {why}") from None


def check_model(config: RunConfig) -> None:
    """config.json, weights, tokenizer and chat template are there; the context is long enough."""
    path = Path(config.model.path)
    settings = read_json(path / "config.json")
    files = weight_files(config.model.path)
    if not files:
        raise ConfigError(f"{path}: no model.safetensors; save the weights with save_pretrained(...)")
    if missing := sorted(file.name for file in files if not file.is_file()):
        raise ConfigError(
            f"{path}: {len(missing)} of {len(files)} files of weights are missing, first {missing[0]}; "
            "fetch or save the model anew"
        )

    _check_width(path, settings)

    if config.kl.reference:
        from asyncrl.engines.sglang.server import check_vocabulary

        check_vocabulary(config, "kl.reference", config.kl.reference)

    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{path}: no tokenizer.json; save a fast tokenizer with tokenizer.save_pretrained(...)"
        )

    if not chat_template(config):
        raise ConfigError(
            f"{path}: no chat template; set model.template to a Jinja file, or to chatml_tools where the "
            "tokenizer has <|im_start|> and <|im_end|>"
        )

    longest = settings.get("max_position_embeddings", settings.get("n_positions"))  # GPT-2
    if isinstance(longest, int) and longest < config.rollout.max_tokens:
        raise ConfigError(
            f"rollout.max_tokens ({config.rollout.max_tokens}) exceeds the model's context ({longest}); "
            "lower it"
        )

    heads = settings.get("num_attention_heads", settings.get("n_head"))  # GPT-2
    sharing = config.trainer.sequence_parallel
    if isinstance(heads, int) and heads % sharing:
        raise ConfigError(
            f"trainer.sequence_parallel ({sharing}) does not divide the model's {heads} attention heads; set "
            f"it to one of {divisors(gcd(heads, config.trainer.ranks))}, which divide these and trainer.ranks"
        )


def _check_width(path: Path, settings: dict[str, Any]) -> None:
    """The embedding in the weights is as wide as one of the sizes in config.json, whatever its name."""
    sizes = dict(leaves(settings))
    vocabulary = sizes.get("vocab_size", sizes.get("text_config.vocab_size"))
    matrices = (shape for shape in weight_shapes(str(path)).values() if len(shape) == 2)
    widths = {width for rows, width in matrices if rows == vocabulary}

    if widths and not any(value in widths for value in sizes.values() if isinstance(value, int)):
        hidden = sizes.get("hidden_size", sizes.get("text_config.hidden_size", "another size"))
        raise ConfigError(
            f"{path}: config.json says hidden_size {hidden}, and the embedding in the weights is "
            f"{vocabulary} × {min(widths)}: they are not of one model; fetch or save it anew"
        )


def chat_template(config: RunConfig) -> str:
    """Return the text of the chat template: `model.template`, or the model's own; '' if there is none."""
    if config.model.template:
        return config.model.template
    path = Path(config.model.path)
    file = path / "chat_template.jinja"
    inside = path / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    return str((read_json(inside) if inside.is_file() else {}).get("chat_template") or "")
