"""A small copy of a model's architecture, on which a start checks in a second how the model must be computed.

The copy has the classes and the kinds of layers of the model, few and narrow ones with random weights in
float32. Within some tokens it reaches what the model reaches in thousands: windows, chunks, top-k. Nothing
here knows a model by name: the keys of a configuration are told apart by what their names say.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from asyncrl.errors import lacks_memory, one_line
from asyncrl.user_cache import keep_result, read_result

logger = logging.getLogger(__name__)
AGREE = 1e-3  # log-probs of one model in float32, computed in two ways, differ by less
HARMLESS = {"position_ids", "use_cache", "cache_position", "is_causal"}  # an attention may ignore them
# ids; those of special tokens are below RESERVED, and are not sampled
VOCABULARY = 128
RESERVED = 8
# tokens of windows and chunks; size of a head, at least
REACH = 8
HEAD = 8
COUNT = re.compile(r"heads(?!_per_)|groups$|n_head$")
DIM = re.compile(r"head_?(dim|size)|d_head|dim_head|kv_channels|rotary_dim|qk_\w+_dim|attn_scalar|mrope")
FAR = re.compile(r"window|chunk|top_?k|block|scale|attention$|distance|extent")
WIDTH = re.compile(r"hidden|intermediate|ffn|dff|emb|width|inner|size|dim|model|rank|state|ssm|proj")
UNIMPORTANT = ("_name_or_path", "transformers_version", "dtype")  # settings that decide no result
LAYERS = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)


def unknown(arguments: Mapping[str, Any]) -> list[str]:
    """Names of those that an attention function must not ignore: ignoring them may change little."""
    given = {name: one for name, one in arguments.items() if name not in HARMLESS}
    return sorted(name for name, one in given.items() if isinstance(one, Tensor) or one not in (None, False))


def passes(error: Exception) -> bool:
    """The error says something of the machine now, not of the model: no result is kept."""
    return lacks_memory(error) or isinstance(error, OSError) or "new thread" in str(error)


def remembered(
    config: PreTrainedConfig, purpose: str, check: Callable[[PreTrainedModel], dict[str, str]]
) -> dict[str, str] | None:
    """Run `check` on the copy: findings by name; None where no copy can be made. They are kept in
    the user's cache, for this purpose, architecture, and these versions of code. Processes may race."""
    try:
        narrow = narrowed(config)
        settings = narrow.to_dict() | dict.fromkeys(UNIMPORTANT)
        key = json.dumps([purpose, type(config).__name__, settings, *versions()], sort_keys=True, default=str)
        if (kept := read_result(key, dict[str, str])) is not None:
            return kept
        logger.info("a small copy of %s is checked, once on this machine", type(config).__name__)
        findings = check(shrunk(narrow))
    except Exception as error:
        kind = type(config).__name__
        why = one_line(error)
        logger.warning("%s is not checked on a small copy, since none can be made: %s", kind, why)
        return None

    keep_result(key, findings)
    return findings


@cache
def versions() -> tuple[str, ...]:
    """Return those of torch, transformers, and the code here that computes with models."""
    root = Path(__file__).parent
    files = [Path(__file__), *sorted(root.glob("trainer/*.py")), *sorted(root.glob("engines/**/*.py"))]
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return torch.__version__, transformers.__version__, platform.machine(), code


def shrunk(narrow: PreTrainedConfig) -> PreTrainedModel:
    """The copy for a narrowed configuration: the first layers, as many as are of all its kinds."""
    depth = narrow.get_text_config().num_hidden_layers
    kinds = _kinds(narrow)
    for layers in (count for count in LAYERS if count < depth):
        shallow = copy.deepcopy(narrow)
        for part in _parts(shallow):
            for name, value in list(vars(part).items()):
                if isinstance(value, list | tuple | str) and len(value) == depth:
                    setattr(part, name, value[:layers])
        shallow.get_text_config().num_hidden_layers = layers
        with suppress(Exception):  # a layer that refers to another one may be beyond it
            if _kinds(shallow) == kinds:
                return _filled(shallow)
    return _filled(narrow)


def narrowed(config: PreTrainedConfig, head: int = HEAD) -> PreTrainedConfig:
    """The same layers, each with few and small heads, small experts, and a short reach."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    ints = {name: value for name, value in vars(text).items() if type(value) is int and value > 1}
    own = ints.get("head_dim") or text.hidden_size // getattr(text, "num_attention_heads", 1)
    dims, counts = ([v for name, v in ints.items() if kind.search(name)] for kind in (DIM, COUNT))
    divisors = [n for n in range(1, max(own, *counts, 1) + 1) if not gcd(own, *dims) % n]
    narrower = max(n for n in divisors if n == 1 or (own // n >= head and own // n % 2 == 0))
    width = text.hidden_size // narrower
    # Of many heads eight are left: an index over few heads has equal scores.
    fewer = max(
        n
        for n in range(1, max(counts, default=1) + 1)
        if n == 1
        or (
            not gcd(*counts) % n
            and all(c // n >= min(2 + c // 10, 8) for c in counts)
            and width // n >= 24
            and width // n % 4 == 0
        )
    )
    for part in _parts(found):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        reach = 4 * REACH if getattr(part, "rope_parameters", None) else VOCABULARY
        for name, value in list(vars(part).items()):
            if not name.startswith("_") and not isinstance(value, PreTrainedConfig):
                setattr(part, name, _small(name, value, fewer, narrower, reach))
    return found


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _small(name: str, value: Any, fewer: int, narrower: int, reach: int) -> Any:
    """The copy's value of a key. `fewer`, `narrower`: what heads, and their sizes, are divided by, so that
    products of the two stay what they are. `reach`: the positions that there are."""
    if isinstance(value, dict):
        return {key: _small(str(key), one, fewer, narrower, reach) for key, one in value.items()}
    if isinstance(value, list | tuple) and name.endswith("_factor"):  # for each pair of a rope's dimensions
        return value[: max(len(value) // narrower, 1)]
    if isinstance(value, list | tuple):
        return [_small(name, one, fewer, narrower, reach) for one in value]
    if type(value) is not int or value < 2 or "layers" in name:
        return value
    rules: tuple[tuple[str | re.Pattern[str], int], ...] = (
        ("token_id$", value % RESERVED),
        ("vocab", min(value, VOCABULARY)),
        (DIM, max(value // narrower, 1)),
        (COUNT, max(value // fewer, 1)),
        ("original_max_position", 2 * REACH),
        ("position|seq_len|ctx|context|max_length", min(value, reach)),
        (r"experts?(_num)?$", min(value, 16)),
        (r"experts?_per_tok|moe_top_?k", min(value, 8)),
        (FAR, REACH if value > 32 else value),
        (WIDTH, -(-value // (fewer * narrower * 4)) * 4 if value > 32 else value),  # aligned, for experts
    )
    return next((small for pattern, small in rules if re.search(pattern, name)), value)


def _kinds(config: PreTrainedConfig) -> set[Any]:
    """Say how layers differ: in modules, their sizes and settings, and in what the configuration lists."""
    with torch.device("meta"):
        model = _model(config)
    text = config.get_text_config()
    depth = text.num_hidden_layers
    lists = [v for v in vars(text).values() if isinstance(v, list | tuple | str) and len(v) == depth]
    listed = [value for value in lists if len({*map(str, value)}) <= 4]
    return {
        (name, *(str(value[index]) for value in listed), *_settings(layer))
        for name, stack in model.named_modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == depth
        for index, layer in enumerate(stack)
    }


def _settings(layer: nn.Module) -> Iterator[Any]:
    for name, module in layer.named_modules():
        yield name, type(module)
        for key, value in sorted(vars(module).items()):
            if isinstance(value, bool | int | str) and not re.search("layer|idx|index", key):
                yield key, value
        for key, weight in module.named_parameters(recurse=False):
            yield key, weight.shape


def _model(config: PreTrainedConfig) -> PreTrainedModel:
    own = own_attention(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, **own
    )
    return model.eval()


def own_attention(config: PreTrainedConfig) -> dict[str, str]:
    """An argument for a model whose scores are capped, which SDPA ignores."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if capped else {}


@torch.no_grad()
def _filled(config: PreTrainedConfig) -> PreTrainedModel:
    """With random weights, of which small or zero ones become larger: distributions are to be far from
    uniform. Raises what its forward raises."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _model(config)
        for weight in model.parameters():
            if weight.dim() < 2:
                weight.add_(torch.randn_like(weight), alpha=0.1)
            elif weight.std() < (scale := weight.shape[-1] ** -0.5):
                weight.normal_(0, scale)
    model(input_ids=torch.ones(1, 2 * REACH, dtype=torch.int64), use_cache=False)
    return model
