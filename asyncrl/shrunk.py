"""A small copy of a model's architecture, on which a start checks in a second how the model must be computed.

The copy has the classes and the kinds of layers of the model, but few and narrow layers with random weights
in float32. Windows, chunks and top-k, which matter in the model after thousands of tokens, matter in the copy
after a few. Nothing here knows a model by name: the keys of a configuration are recognized by patterns.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.errors import lacks_memory, one_line
from asyncrl.model_class import auto_class_of, text_part
from asyncrl.user_cache import code_versions, keep_result, read_result

logger = logging.getLogger(__name__)
# Upper bound of the difference between log-probs of a float32 model, computed in two ways.
LOGPROB_TOLERANCE = 1e-3
VOCABULARY_SIZE = 128  # token ids
RESERVED_IDS = 8  # ids of special tokens are below this number, and are not sampled
WINDOW_TOKENS = 8  # length of windows and chunks
MIN_HEAD_SIZE = 8
# Patterns of configuration keys, by the role of the value.
HEAD_COUNT_KEYS = re.compile(r"heads(?!_per_)|groups$|n_head$")
HEAD_SIZE_KEYS = re.compile(
    r"head_?(dim|size)|d_head|dim_head|kv_channels|rotary_dim|qk_\w+_dim|attn_scalar|mrope"
)
REACH_KEYS = re.compile(r"window|chunk|top_?k|block|scale|attention$|distance|extent")
WIDTH_KEYS = re.compile(r"hidden|intermediate|ffn|dff|emb|width|inner|size|dim|model|rank|state|ssm|proj")
TOWER_OUTPUT_KEYS = re.compile(r"^out|output|proj|text|lm_")  # where a vision tower names the text's width
IGNORED_SETTINGS = ("_name_or_path", "transformers_version", "dtype")  # settings without influence on results
# Numbers of layers to try for the copy.
LAYER_COUNTS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)


def is_passing_error(error: Exception) -> bool:
    """Return True if the error concerns the machine now, not the model: no result is kept."""
    return lacks_memory(error) or isinstance(error, OSError) or "new thread" in str(error)


def cached_findings(
    config: PreTrainedConfig, purpose: str, run_check: Callable[[PreTrainedModel], dict[str, str]]
) -> dict[str, str] | None:
    """Run `run_check` on the copy and return findings by name; None where no copy can be made. Findings are
    cached in the user's cache directory, by purpose, architecture and versions of code. Processes may race.
    """
    try:
        narrow_config = narrowed_config(config)
        settings = narrow_config.to_dict() | dict.fromkeys(IGNORED_SETTINGS)
        cache_key = json.dumps(
            [purpose, type(config).__name__, settings, *code_versions()], sort_keys=True, default=str
        )
        if (cached := read_result(cache_key, dict[str, str])) is not None:
            return cached
        logger.info("checking a small copy of %s (only once on this machine)", type(config).__name__)
        findings = run_check(shrunken_model(narrow_config))
    except Exception as error:
        config_class = type(config).__name__
        error_line = one_line(error)
        logger.warning(
            "%s is not checked on a small copy, because the copy cannot be built: %s",
            config_class,
            error_line,
        )
        return None

    keep_result(cache_key, findings)
    return findings


def shrunken_model(narrow_config: PreTrainedConfig) -> PreTrainedModel:
    """Return the copy for a narrowed configuration: as few of the first layers as contain all kinds of
    layers."""
    layer_count = narrow_config.get_text_config().num_hidden_layers
    layer_kinds = _layer_kinds(narrow_config)
    for shallow_layers in (count for count in LAYER_COUNTS if count < layer_count):
        shallow = copy.deepcopy(narrow_config)
        tower_configs = _tower_configs(shallow)
        for nested_config in _nested_configs(shallow):
            if any(nested_config is tower for tower in tower_configs):
                continue
            for name, value in list(vars(nested_config).items()):
                if isinstance(value, list | tuple | str) and len(value) == layer_count:
                    with suppress(StrictDataclassFieldValidationError):  # a word of as many letters as layers
                        setattr(nested_config, name, value[:shallow_layers])

        shallow.get_text_config().num_hidden_layers = shallow_layers
        with suppress(Exception):  # a layer may refer to a layer beyond the cut
            if _layer_kinds(shallow) == layer_kinds:
                return _random_model(shallow)

    return _random_model(narrow_config)


def narrowed_config(config: PreTrainedConfig, min_head_size: int = MIN_HEAD_SIZE) -> PreTrainedConfig:
    """Return a configuration of the same layers, each with few and small heads, small experts, and a short
    reach. Of a composite configuration, the vision and audio parts are narrowed by divisors of their own, and
    their outputs keep the width of the text part."""
    narrow_config = copy.deepcopy(config)
    text_config = narrow_config.get_text_config()
    text_width = text_config.hidden_size
    text_divisors = _width_divisors(text_config, min_head_size)
    tower_configs = _tower_configs(narrow_config)

    for nested_config in _nested_configs(narrow_config):
        if hasattr(nested_config, "quantization_config"):
            del nested_config.quantization_config

        is_tower = any(nested_config is tower for tower in tower_configs)
        count_divisor, size_divisor = (
            _width_divisors(nested_config, min_head_size) if is_tower else text_divisors
        )
        has_rope = getattr(nested_config, "rope_parameters", None)
        position_reach = 4 * WINDOW_TOKENS if has_rope else VOCABULARY_SIZE

        for name, value in list(vars(nested_config).items()):
            if name.startswith("_") or isinstance(value, PreTrainedConfig):
                continue
            small_value = _small_value(name, value, count_divisor, size_divisor, position_reach)
            if is_tower and value == text_width and TOWER_OUTPUT_KEYS.search(name):
                small_value = _small_value("hidden_size", value, *text_divisors, position_reach)
            setattr(nested_config, name, small_value)

    return narrow_config


def _width_divisors(config: PreTrainedConfig, min_head_size: int) -> tuple[int, int]:
    """Return the divisors of the number of heads and of the size of heads, for one part of a model."""
    integer_settings = {
        name: value for name, value in vars(config).items() if type(value) is int and value > 1
    }
    hidden_size: Any = getattr(config, "hidden_size", None) or getattr(config, "embed_dim", 1)
    attention_heads: Any = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", 1)
    head_size = integer_settings.get("head_dim") or hidden_size // attention_heads
    head_sizes = [value for name, value in integer_settings.items() if HEAD_SIZE_KEYS.search(name)]
    head_counts = [value for name, value in integer_settings.items() if HEAD_COUNT_KEYS.search(name)]

    size_divisors = [
        n for n in range(1, max(head_size, *head_counts, 1) + 1) if not gcd(head_size, *head_sizes) % n
    ]
    size_divisor = max(
        n for n in size_divisors if n == 1 or (head_size // n >= min_head_size and head_size // n % 2 == 0)
    )

    # At least eight of many heads are left, because an index over few heads has equal scores.
    narrow_width = hidden_size // size_divisor
    count_divisor = max(
        n
        for n in range(1, max(head_counts, default=1) + 1)
        if n == 1
        or (
            not gcd(*head_counts) % n
            and all(c // n >= min(2 + c // 10, 8) for c in head_counts)
            and narrow_width // n >= 24
            and narrow_width // n % 4 == 0
        )
    )

    return count_divisor, size_divisor


def _nested_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _nested_configs(value)


def _tower_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configurations of the parts beside the text part (vision, audio), which are built but never
    run."""
    text_config = config.get_text_config()
    text_parts = {id(text_part) for text_part in _nested_configs(text_config)}
    return [
        part_config
        for part_config in _nested_configs(config)
        if id(part_config) not in text_parts
        and all(nested_config is not text_config for nested_config in _nested_configs(part_config))
    ]


def _small_value(name: str, value: Any, count_divisor: int, size_divisor: int, position_reach: int) -> Any:
    """Return the copy's value of a key. `count_divisor`, `size_divisor`: divisors of the number of heads and
    of the size of heads, so that products of both stay consistent. `position_reach`: the number of positions.
    """
    if isinstance(value, dict):
        return {
            key: _small_value(str(key), nested, count_divisor, size_divisor, position_reach)
            for key, nested in value.items()
        }

    # Sections of a rope divide the pairs of dimensions, so their sum stays the number of pairs.
    if isinstance(value, list | tuple) and name.endswith("_section"):
        boundaries = [round(boundary / size_divisor) for boundary in accumulate(value, initial=0)]
        return [end - start for start, end in pairwise(boundaries)]
    # Factors of a rope: a value for each pair of dimensions.
    if isinstance(value, list | tuple) and name.endswith("_factor"):
        return value[: max(len(value) // size_divisor, 1)]
    if isinstance(value, list | tuple):
        return [_small_value(name, nested, count_divisor, size_divisor, position_reach) for nested in value]
    if type(value) is not int or value < 2 or "layers" in name:
        return value

    aligned_width = -(-value // (count_divisor * size_divisor * 4)) * 4  # experts need multiples of 4
    rules: tuple[tuple[str | re.Pattern[str], int], ...] = (
        ("token_id$", value % RESERVED_IDS),
        ("vocab", min(value, VOCABULARY_SIZE)),
        (HEAD_SIZE_KEYS, max(value // size_divisor, 1)),
        (HEAD_COUNT_KEYS, max(value // count_divisor, 1)),
        ("original_max_position", 2 * WINDOW_TOKENS),
        ("position|seq_len|ctx|context|max_length", min(value, position_reach)),
        (r"experts?(_num)?$", min(value, 16)),
        (r"experts?_per_tok|moe_top_?k", min(value, 8)),
        (REACH_KEYS, WINDOW_TOKENS if value > 32 else value),
        (WIDTH_KEYS, aligned_width if value > 32 else value),
    )

    return next((small for pattern, small in rules if re.search(pattern, name)), value)


def _layer_kinds(config: PreTrainedConfig) -> set[Any]:
    """Return the kinds of layers: modules, sizes and settings, and the lists of the configuration."""
    with torch.device("meta"):
        text_model = text_part(_model_of(config))
    text_config = config.get_text_config()
    layer_count = text_config.num_hidden_layers
    per_layer_settings = [
        setting
        for setting in vars(text_config).values()
        if isinstance(setting, list | tuple | str) and len(setting) == layer_count
    ]
    varying_settings = [value for value in per_layer_settings if len({*map(str, value)}) <= 4]

    return {
        (name, *(str(value[index]) for value in varying_settings), *_layer_settings(layer))
        for name, stack in text_model.named_modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == layer_count
        for index, layer in enumerate(stack)
    }


def _layer_settings(layer: nn.Module) -> Iterator[Any]:
    for name, module in layer.named_modules():
        yield name, type(module)
        for key, value in sorted(vars(module).items()):
            if isinstance(value, bool | int | str) and not re.search("layer|idx|index", key):
                yield key, value
        for key, weight in module.named_parameters(recurse=False):
            yield key, weight.shape


def _model_of(config: PreTrainedConfig) -> PreTrainedModel:
    attention = attention_arguments(config)
    model: PreTrainedModel = auto_class_of(config).from_config(
        copy.deepcopy(config), dtype=torch.float32, **attention
    )
    return model.eval()


def attention_arguments(config: PreTrainedConfig) -> dict[str, str]:
    """Return the attention argument for a model whose scores are capped, because SDPA ignores the cap."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


@torch.no_grad()
def _random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with random weights; small or zero weights become larger, so that distributions are far
    from uniform. Raises every error of the model's forward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _model_of(config)
        for weight in model.parameters():
            if weight.dim() < 2:
                weight.add_(torch.randn_like(weight), alpha=0.1)
            elif weight.numel() and weight.std() < (weight_scale := weight.shape[-1] ** -0.5):
                weight.normal_(0, weight_scale)

    model(input_ids=torch.ones(1, 2 * WINDOW_TOKENS, dtype=torch.int64), use_cache=False)
    return model
