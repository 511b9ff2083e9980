"""From a configuration and a URL to a server: its model and version, checks, and its weight loader."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs
from transformers import AutoConfig

from asyncrl.config import RunConfig
from asyncrl.engines.sglang.adapters import AdapterLoader
from asyncrl.engines.sglang.arguments import check_arguments
from asyncrl.engines.sglang.http import ModelInfo, ServerApi, ServerInfo
from asyncrl.engines.sglang.loader import ServerLoader, shapes_of
from asyncrl.engines.sglang.receiver import Receiver
from asyncrl.engines.sglang.stream import BASE_LABEL
from asyncrl.engines.sglang.version_check import check_behaviour, check_routes
from asyncrl.errors import ConfigError
from asyncrl.weights.disk import cache_directory
from asyncrl.weights.model_files import read_json
from asyncrl.weights.trained_tensors import published_bytes

log = logging.getLogger("asyncrl.server_supervisor")

POLL_SECONDS = 0.2  # between two looks at a server that starts
COMPARED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
FUSED_KINDS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Kinds of layers that a server fuses into one layer. A server that accepts adapters for one of these kinds
accepts adapters for all kinds in the fused layer."""


def vocabulary_size_of(path: str) -> int:
    """Return the vocabulary's size from the model's config.json. Raises ConfigError."""
    size: int = _model_config(path).get_text_config().vocab_size
    return size


@dataclass(frozen=True)
class Attached:
    """A server that can serve this run."""

    api: ServerApi
    info: ServerInfo
    model: ModelInfo

    @property
    def description(self) -> str:
        return f"SGLang {self.info.version}, {self.model.model_type}, tp {self.info.tp_size}"


async def look_at_server(
    config: RunConfig, url: str, api_key: str = "", admin_key: str = "", scorer: str = ""
) -> None:
    """Check whether the server can serve this run, without changing the server, which another run may use or
    have paused. Raises ConfigError if the server never can; other EngineErrors may pass."""
    server = ServerApi(url, api_key, admin_key)
    try:
        await _described_server(config, server, scorer)
    finally:
        await server.close()


async def attach(
    config: RunConfig,
    url: str,
    api_key: str = "",
    admin_key: str = "",
    scorer: str = "",
    started_here: bool = False,
) -> Attached:
    """Return a server for the supervisor of an engine, or of a scorer, once the server is ready: a version of
    SGLang that does what the run needs, and serves the run's model. `started_here`: the server was started
    for this run. Any other server that is not ready may have half of a version, whose loader died: then its
    weights are declared invalid until the next load. Waits without a deadline. Raises ConfigError if the
    server can never serve this run; other EngineErrors may pass."""
    server = ServerApi(url, api_key, admin_key)
    try:
        while not await server.alive():  # noqa: ASYNC110 (another process: there is no event)
            await asyncio.sleep(POLL_SECONDS)

        attached = await _described_server(config, server, scorer)
        if not scorer:  # nobody pauses a scorer
            if not started_here and not await server.ready():
                await server.invalidate()
                attached = replace(attached, model=await server.model_info())
            await server.resume()

        while not await server.ready():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        await check_behaviour(config, server, attached.info.version, scorer)
    except BaseException:
        await server.close()
        raise

    return attached


Loader = ServerLoader | AdapterLoader


def build_loader(config: RunConfig, index: int, server: Attached, attachment: str = "") -> Loader:
    """Return the loader of versions for the server of engine `index`. `attachment`: see `AdapterLoader`.
    Reads files."""
    run_dir = Path(config.run_dir) / config.name
    cache_bytes = published_bytes(config) * max(1, config.versions_held)
    cache = cache_directory(config.weights.directory, run_dir, config.name, cache_bytes, index)
    model_path = config.model.path
    api = server.api
    served_model = server.model

    if config.adapters_apart:
        has_base = (
            served_model.weight_version == BASE_LABEL
            and Path(served_model.model_path).resolve() == Path(model_path).resolve()
        )
        return AdapterLoader(api, config, cache, attachment, has_base)

    model_shapes = shapes_of(
        model_path,
        tied=bool(_model_config(model_path).get_text_config().tie_word_embeddings),
        train_vision=config.model.train_vision,
    )
    receiver = Receiver(api, index, server.info.tp_size)
    weights = structs.replace(config.weights, mode=config.update_mode)

    return ServerLoader(api, weights, cache, receiver, model_shapes)


def check_scorer(config: RunConfig, scorer: str, url: str, info: ServerInfo, model: ModelInfo) -> None:
    """Raise ConfigError if the server does not fit the scorer."""
    path = config.scorers[scorer].path
    if path and (differences := _differences(_model_config(path), url, info, model)):
        raise ConfigError(
            f"server {url} serves a different model from scorers.{scorer}.path: {differences[0]}"
        )
    if scorer != "reward":
        _check_room(config, url, info, prompted=True)
        check_vocabulary(config, f"scorers.{scorer}", path or info.model_path)


def check_vocabulary(config: RunConfig, key: str, path: str) -> None:
    """Raise ConfigError if the model that `key` names has other tokens than the policy, by tokenizer.json, or
    else by the sizes in config.json. A model that is not on this machine is not compared."""
    own_tokenizer = Path(config.model.path) / "tokenizer.json"
    other_tokenizer = Path(path) / "tokenizer.json"

    if other_tokenizer.is_file():
        same_vocabulary = _tokens_with_ids(own_tokenizer) == _tokens_with_ids(other_tokenizer)
    elif (Path(path) / "config.json").is_file():
        same_vocabulary = vocabulary_size_of(path) == vocabulary_size_of(config.model.path)
    else:
        log.warning("%s: %s is not on this machine, so its vocabulary was not checked", key, path)
        return

    if not same_vocabulary:
        raise ConfigError(
            f"{key}: {path} has a different vocabulary from the policy, whose token IDs it must "
            "score; use a model with the same tokenizer"
        )


def _tokens_with_ids(path: Path) -> tuple[Any, list[tuple[int, str]]]:
    """Return the tokens of a tokenizer.json with their ids."""
    tokenizer = read_json(path)
    return tokenizer["model"]["vocab"], [
        (token["id"], token["content"]) for token in tokenizer["added_tokens"]
    ]


async def _described_server(config: RunConfig, server: ServerApi, scorer: str) -> Attached:
    """Check the server and the run's keys, and return the server's description. Changes nothing."""
    await server.ready()  # any answer shows that this is an SGLang server
    if not scorer:
        await server.try_admin_key()

    attached = Attached(server, await server.server_info(), await server.model_info())
    await check_routes(config, server, attached.info.version, scorer)
    if scorer:
        await asyncio.to_thread(check_scorer, config, scorer, server.url, attached.info, attached.model)
    else:
        await asyncio.to_thread(check_engine_server, config, server.url, attached.info, attached.model)

    return attached


def check_engine_server(config: RunConfig, url: str, info: ServerInfo, model: ModelInfo) -> None:
    """Raise ConfigError if the server does not fit the run."""
    if config.shifts and not (info.enable_memory_saver and info.max_total_num_tokens):
        missing_feature = (
            "max_total_num_tokens in /server_info" if info.enable_memory_saver else "--enable-memory-saver"
        )
        raise ConfigError(f"engine.colocated: server {url} cannot sleep, because it lacks {missing_feature}")

    if config.weights.transport != "disk" and info.dp_size != 1:
        raise ConfigError(
            f"server {url} has --dp-size {info.dp_size}, but weights.transport={config.weights.transport} "
            "requires 1; start a server for each replica, or set weights.transport=disk"
        )

    if config.trainer.router_replay and not info.enable_return_routed_experts:
        raise ConfigError(
            f"server {url} does not return routed experts; start it with "
            "--enable-return-routed-experts, or set trainer.router_replay=false"
        )

    draft_arguments = {
        "quantization": info.quantization,
        "speculative-algorithm": info.speculative_algorithm,
        "speculative-draft-model-path": info.speculative_draft_model_path,
    }
    check_arguments(config, f"server {url}", draft_arguments)
    if config.adapters_apart:
        _check_adapters(config, url, info)

    lent_scorers = config.scorers_lent
    if lent_scorers and Path(model.model_path).resolve() != Path(config.model.path).resolve():
        raise ConfigError(
            f"server {url} was started with {model.model_path}, and a restart would load those weights "
            f"again; for scorers.{', '.join(lent_scorers)}.urls=[engines], start it with model.path "
            f"({config.model.path})"
        )

    _check_room(config, url, info, prompted=bool(lent_scorers))
    differences = _differences(_model_config(config.model.path), url, info, model)
    if differences:
        raise ConfigError(f"server {url} serves a different model from model.path: {'; '.join(differences)}")


def _check_room(config: RunConfig, url: str, info: ServerInfo, *, prompted: bool) -> None:
    """Raise ConfigError if the server's inputs are too short. `prompted`: the server reads sequences behind
    kl.prompt, which has at most as many tokens as bytes."""
    input_limit = info.max_req_input_len
    policy_tokens = config.rollout.max_tokens
    prompt_tokens = len(config.kl.prompt.encode()) if prompted else 0
    if input_limit is not None and input_limit < policy_tokens + prompt_tokens:
        remedy = (
            "lower rollout.max_tokens, or start the server with a larger --context-length or "
            "--max-total-tokens"
        )
        prompt_note = f" and kl.prompt may add {prompt_tokens}" if prompt_tokens else ""
        raise ConfigError(
            f"server {url} has room for {input_limit} tokens, but rollout.max_tokens is {policy_tokens}"
            f"{prompt_note}; {remedy}"
        )


def _check_adapters(config: RunConfig, url: str, info: ServerInfo) -> None:
    """Raise ConfigError with the flags that the server lacks for this run's adapters."""
    kinds = sorted(config.model.lora_modules)
    lacks_kinds = False
    # None: a server takes the kinds of the adapters that it was started with, and does not say which.
    if info.lora_target_modules is not None and info.lora_target_modules != ["all"]:
        server_layers = {FUSED_KINDS.get(kind, kind) for kind in info.lora_target_modules}
        lacks_kinds = not server_layers.issuperset(FUSED_KINDS.get(kind, kind) for kind in kinds)

    rank = max(rank for rank, _ in config.adapters.values())
    adapters_used = config.adapters_held
    adapters_loaded = adapters_used + 1  # and the adapter that is being loaded
    is_lacking = {
        "--enable-lora": not info.enable_lora,
        "--dp-size 1": info.dp_size != 1,
        f"--max-lora-rank {rank}": info.max_lora_rank is not None and info.max_lora_rank < rank,
        f"--lora-target-modules {' '.join(kinds)}": lacks_kinds,
        f"--max-loras-per-batch {adapters_used}": info.max_loras_per_batch < adapters_used,
        f"--max-loaded-loras {adapters_loaded}": info.max_loaded_loras is not None
        and info.max_loaded_loras < adapters_loaded,
    }

    if missing := [argument for argument, lacking in is_lacking.items() if lacking]:
        raise ConfigError(
            f"server {url} cannot load this run's adapters; start it with {' '.join(missing)}, or set "
            "weights.adapters=false"
        )


def _differences(own_config: Any, url: str, info: ServerInfo, model: ModelInfo) -> list[str]:
    """Describe how the server's model differs from `own_config`. Sizes are compared if the server's model can
    be read from here; if not, the first load fails."""
    compared_values: list[tuple[str, object, object]] = [
        ("architecture", ", ".join(own_config.architectures or ()), ", ".join(model.architectures or ()))
    ]
    try:
        their_text_config = _model_config(info.model_path).get_text_config()
    except ConfigError as error:
        log.warning("server %s: cannot compare the dimensions of its model: %s", url, error)
    else:
        own_text_config = own_config.get_text_config()
        compared_values += [
            (size, getattr(own_text_config, size, None), getattr(their_text_config, size, None))
            for size in COMPARED_SIZES
        ]

    return [
        f"{subject} {actual} instead of {expected}"
        for subject, expected, actual in compared_values
        if actual != expected
    ]


def _model_config(path: str) -> Any:
    with ConfigError.instead_of(OSError, ValueError, text=f"model {path} has no usable config.json"):
        return AutoConfig.from_pretrained(path, local_files_only=True)
