"""Checks a server's arguments against the updates of a run, before the first update.

A server that takes its weights from files loads them into each of its models, the draft of speculative
decoding included, and a load that fails ends the server. By broadcast the draft is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError

# Names of --speculative-algorithm. Drafts with a layout of their own do not take the policy's files. Tried
# was EAGLE3; the others load files in the same way.
OWN_LAYOUT_DRAFTS = frozenset(("EAGLE3", "STANDALONE", "DFLASH", "DSPARK"))
# EAGLE without --speculative-draft-model-path uses the MTP layers in the model's own files.
EAGLE_DRAFTS = frozenset(("EAGLE", "NEXTN"))
ARGUMENT_ALIASES = {"speculative-draft-model": "speculative-draft-model-path"}
MTP_DRAFTS = frozenset(("FROZEN_KV_MTP",))


def check_arguments(config: RunConfig, source: str, arguments: Mapping[str, object]) -> None:
    """Raise ConfigError for arguments with which the server would end at an update of its weights. `source`:
    where the arguments stand. Servers that the run starts, and that do not sleep, keep their weights where
    versions are adapters."""
    if config.adapters_apart and not config.shifts and not config.engine.urls:
        return

    values = _set_arguments(arguments)
    quantization = values.get("quantization")
    if quantization:
        raise ConfigError(
            f"{source}: quantization={quantization} crashes a server at its first update, because the new "
            "tensors are not quantized; remove quantization, and servers will compute in "
            f"model.dtype={config.model.dtype}"
        )

    algorithm = _draft_algorithm(values)
    if algorithm in OWN_LAYOUT_DRAFTS and config.weights.transport == "disk":
        raise ConfigError(
            f"{source}: speculative-algorithm={algorithm} crashes a server at its first update from files, "
            "because the server also loads these files into the draft model; set "
            "weights.transport=collective, or remove speculative-algorithm"
        )


def draft_warning(arguments: Mapping[str, object]) -> str:
    """Describe what becomes of the draft of speculative decoding during a run; "" without a draft."""
    values = _set_arguments(arguments)
    algorithm = _draft_algorithm(values)
    has_own_files = bool(values.get("speculative-draft-model-path"))

    if algorithm in MTP_DRAFTS or (algorithm in EAGLE_DRAFTS and not has_own_files):
        reason = "the model's MTP layers stay frozen"
    elif algorithm in EAGLE_DRAFTS | OWN_LAYOUT_DRAFTS:
        reason = "the draft model is not trained and becomes stale"
    else:
        return ""

    return (
        f"speculative-algorithm={algorithm}: {reason} as the policy changes, so servers accept "
        "fewer draft tokens after each step; sampling stays exact"
    )


def _set_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments by their names on the command line; those that are null, false or "none" are left
    out."""
    set_arguments: dict[str, object] = {}
    for key, value in arguments.items():
        name = key.lstrip("-").replace("_", "-")
        if value not in (None, False, "", "none", "null"):
            set_arguments[ARGUMENT_ALIASES.get(name, name)] = value
    return set_arguments


def _draft_algorithm(values: Mapping[str, object]) -> str:
    return str(values.get("speculative-algorithm", "")).upper()
