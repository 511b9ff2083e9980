"""Compares the tensors in a model directory's files with the tensors of its model, before reading any.

    config.json ──► the model on the meta device ┐
                                                 ├──► CheckpointMatch ──► refused, a warning, or nothing
    headers of the files ──► names and shapes ───┘

transformers initialises missing tensors at random, and only logs this. As transformers also knows how names
and tensors are converted in reading, the comparison is a load by transformers, of tensors without data.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.errors import ConfigError, one_line
from asyncrl.user_cache import keep_result, read_result
from asyncrl.weights.model_files import (
    FLOAT_DTYPES,
    Shape,
    StoredTensor,
    TensorsByPart,
    read_json,
    stored_tensors,
    weight_files,
    weight_shapes,
)

if TYPE_CHECKING:  # imports torch
    from asyncrl.model_class import ModelRole

MAX_UNEXPECTED = 0.01  # fraction of the bytes that a model may leave out without a rule of its class
NAMES_SHOWN = 3

# Parts of names that wrappers of a model add, and what to save instead.
WRAPPERS = {
    "_orig_mod.": "the model was saved after torch.compile; save model._orig_mod",
    "_fsdp_wrapped_module.": "the model was saved inside FSDP; save the full state dict",
    "_checkpoint_wrapped_module.": "the model was saved inside a checkpointing wrapper; save the plain model",
    "base_model.model.": "the model was saved as a PEFT model; save model.merge_and_unload()",
    "base_layer.": "the model was saved with unmerged adapters; save model.merge_and_unload()",
    "module.": "the model was saved inside a wrapper, such as DistributedDataParallel; save model.module",
}
_HEAD = re.compile(r"^(lm_head|embed_out|score|classifier|v_head|value_head)\.")
_DRAFT = re.compile(r"(^|[._])(mtp|nextn|eagle|medusa)")
_LAYER = re.compile(r"(?P<layer>.*?\.\d+)\.(?P<suffix>.*)")
_NO_LINEAR_LAYER = re.compile(r"embed|wte|wpe|(?<!shared_)experts?\.|router|\bgate\.|norm|lm_head")
_ADAPTER = re.compile(r"lora_[AB]|lora_embedding")


class CheckpointMatch(msgspec.Struct, frozen=True):
    """How the files of a model directory fit the model that its config.json describes.

    `missing`: tensors of the model that no file has; `unexpected`: tensors of the files that the model does
    not have, by the model's names; `mismatched`: tensors of another shape, as lines. `unexpected_bytes`
    of `total_bytes` are in the files for `unexpected`. `not_compared`: why nothing could be compared.
    `of_transformers`: the class belongs to transformers, not to a user's file, which may change.

    `linear_kinds`: the trained weights of linear layers by their names in the files, each with the last part
    of the layer's name in the model.
    """

    model_class: str = ""
    parts: TensorsByPart = TensorsByPart()
    linear_kinds: dict[str, str] = {}
    missing: list[str] = []
    unexpected: list[str] = []
    mismatched: list[str] = []
    unexpected_bytes: int = 0
    total_bytes: int = 0
    not_compared: str = ""
    of_transformers: bool = False

    @property
    def problem(self) -> str:
        """Describe why the files are unusable, with the likely cause; '' if the files are usable."""
        if self.missing:
            lacking = (
                f"its files lack {_describe_names(self.missing)} of {self.model_class}, which would be "
                "initialized randomly"
            )
            return f"{lacking}; {self._likely_cause()}"

        if self.mismatched:
            return (
                f"{'; '.join(self.mismatched[:NAMES_SHOWN])}: config.json and the files belong to different "
                "models; correct config.json, or download the model again"
            )

        if self.unexpected_bytes > MAX_UNEXPECTED * self.total_bytes:
            percent = 100 * self.unexpected_bytes / self.total_bytes
            return (
                f"its files have {_describe_names(self.unexpected)} that {self.model_class} does not use "
                f"({percent:.0f}% of the bytes), so config.json belongs to another model; correct "
                "config.json, or download the model again"
            )

        return ""

    @property
    def warning(self) -> str:
        """Describe the tensors that are left out of a usable model; '' for none."""
        if self.not_compared:
            return f"its tensors were not compared with the model ({self.not_compared})"
        if self.parts.passed_on:
            return (
                f"its files have {_describe_names([*self.parts.passed_on])} that {self.model_class} does not "
                "use: unused tensors are not trained, and exports contain these tensors unchanged (MTP "
                "layers become stale, because they were trained with the old weights)"
            )
        return ""

    def _likely_cause(self) -> str:
        missing_names = set(self.missing)
        for wrapper, cause in WRAPPERS.items():
            if any(
                wrapper in name and name.replace(wrapper, "") in missing_names for name in self.unexpected
            ):
                return f"names in the files contain {wrapper!r}: {cause}"

        if any(_ADAPTER.search(name) for name in self.unexpected):
            return (
                "the files contain a LoRA adapter; use the adapter's base model, or merge the adapter first"
            )

        for name in self.missing[:NAMES_SHOWN]:  # a model may have ten thousand tensors
            for file_name in self.unexpected:
                if file_name != name and (file_name.endswith(f".{name}") or name.endswith(f".{file_name}")):
                    return (
                        f"names in the files have a different prefix: {file_name} instead of {name}; save "
                        "the model with save_pretrained(...)"
                    )

        if all(map(_HEAD.match, self.missing)) and "Classification" in self.model_class:
            return "the model has no trained head; use a model that was trained for classification"

        if self.unexpected:
            return (
                f"the files have {_describe_names(self.unexpected)} instead; correct config.json or the files"
            )

        return "a file was not saved or not downloaded; download or save the model again"


class UnknownModelError(ConfigError):
    """transformers has no model for a config.json, or cannot build the model here."""


def check_checkpoint(path: str, label: str, role: ModelRole = "language model") -> str:
    """Return a warning about left-out tensors, '' for none. Raises ConfigError where tensors are missing,
    misnamed or of another shape. Warning and error begin with `label`, for example "model.path
    /models/mine"."""
    match = compare_checkpoint(path, label, role)
    if match.problem:
        raise ConfigError(f"{label}: {match.problem}")
    return f"{label}: {match.warning}" if match.warning else ""


def compare_checkpoint(path: str, label: str, role: ModelRole) -> CheckpointMatch:
    """Compare the files of a directory with the model that is read from it for a role.

    The result is kept in the user's cache, since importing torch and the model's class takes seconds.
    Raises ConfigError for files that cannot be read, and UnknownModelError, which begins with `label`.
    """
    tensors = stored_tensors(path)
    if not tensors:
        return CheckpointMatch(not_compared="the directory has no safetensors files")

    model_config = read_json(Path(path) / "config.json")
    tensor_table = sorted((name, *tensor[:3]) for name, tensor in tensors.items())
    source_files = [f"{module}.py" for module in ("checkpoint_match", "names", "model_files")]
    source_files += ["../model_class.py", "../attention_rules.py"]
    source_code = [(Path(__file__).parent / file).read_text() for file in source_files]
    match_inputs = (source_code, version("transformers"), role, model_config, tensor_table)
    digest = hashlib.sha256(msgspec.json.encode(match_inputs, order="sorted")).hexdigest()
    result_key = f"checkpoint match {digest}"
    if (cached_match := read_result(result_key, CheckpointMatch)) is not None:
        return cached_match

    match = _compare(path, label, role, tensors)
    if not match.not_compared and match.of_transformers:
        keep_result(result_key, match)

    return match


def trained_shapes(path: str, *, train_vision: bool = False) -> dict[str, Shape]:
    """Return the shape of each tensor that trains, by its name in the files: of all tensors where
    transformers cannot build the model, which the checks before the start report."""
    parts = language_match(path).parts
    if not train_vision:
        return parts.trained
    return parts.trained | {name: shape for part in parts.frozen.values() for name, shape in part.items()}


def frozen_shapes(path: str, *, train_vision: bool = False) -> dict[str, dict[str, Shape]]:
    """Return the shapes of the tensors of each frozen part, by the part's name in the model and the names in
    the files; {} for a model that trains whole."""
    return {} if train_vision else language_match(path).parts.frozen


def language_match(path: str) -> CheckpointMatch:
    """Return how the files fit the language model. Where transformers cannot build the model, the match names
    no class, all tensors train, and linear layers are those with such names in the files.

    The files are compared once, as long as they stay the same, since headers of many experts take seconds:
    callers change nothing in the match."""
    files = [Path(path) / "config.json", *sorted(weight_files(path))]
    file_states = [(str(file), file.stat()) for file in files if file.is_file()]
    return _read_language_match(
        path, tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in file_states)
    )


@lru_cache(maxsize=8)
def _read_language_match(path: str, file_states: tuple[tuple[str, int, int], ...]) -> CheckpointMatch:
    with suppress(ConfigError):
        match = compare_checkpoint(path, path, "language model")
        if match.parts.trained:
            return match

    shapes = weight_shapes(path)
    linear_kinds = {
        name: name.split(".")[-2]
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not _NO_LINEAR_LAYER.search(name)
    }
    return CheckpointMatch(parts=TensorsByPart(trained=shapes), linear_kinds=linear_kinds)


def load_pretrained(role: ModelRole, path: str, label: str, **options: Any) -> Any:
    """Return the model of a directory with all of its weights in this process, as transformers reads it.

    `options`: of `from_pretrained`. Raises ConfigError, which begins with `label`, where a tensor is missing
    or holds numbers that are not finite; and what transformers raises.
    """
    from asyncrl.model_class import auto_class_of, read_config

    config = read_config(path, role)
    with _quiet_transformers():
        model, info = auto_class_of(config, role).from_pretrained(
            path, config=config, local_files_only=True, output_loading_info=True, **options
        )

    if missing := sorted(info["missing_keys"]):
        unexpected = sorted(info["unexpected_keys"])
        problem = CheckpointMatch(
            model_class=type(model).__name__, missing=missing, unexpected=unexpected
        ).problem
        raise ConfigError(f"{label}: {problem}")

    for name, tensor in model.state_dict().items():
        check_finite(tensor, name, label)

    return model


def check_finite(tensor: Any, name: str, label: str) -> None:
    """Raise ConfigError, which begins with `label`, where a tensor holds NaN or infinity."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:  # one byte: a quantized model
        return
    if tensor.sum().isfinite():  # costs less than a look at each number, and hides none
        return
    if not tensor.isfinite().all():
        raise ConfigError(f"{label}: {name} contains NaN or infinity; save or download the model again")


def _compare(path: str, label: str, role: ModelRole, tensors: dict[str, StoredTensor]) -> CheckpointMatch:
    import torch

    from asyncrl.attention_rules import empty_reach
    from asyncrl.model_class import auto_class_of, frozen_parts, model_class_for, read_config
    from asyncrl.weights.adapters import linear_layers
    from asyncrl.weights.names import file_pieces, model_names, sort_tensors

    # Build the model without memory.
    try:
        config = read_config(path, role)
        with torch.device("meta"), _quiet_transformers():
            model = auto_class_of(config, role).from_config(config)
            frozen_parts(model)  # raises if its text part is unknown
    except Exception as error:
        reason, _, _ = one_line(error).partition(" Model type should be one of")
        text = f"{label}: transformers cannot build the model ({reason})"
        advice = "correct config.json, or install a version of transformers that supports this model"
        raise UnknownModelError(f"{text}; {advice}") from error

    if reach_problem := empty_reach(config.get_text_config()):
        raise ConfigError(
            f"{label}: config.json: {reach_problem}, so no token would see a key; set this value to the "
            "number of tokens that the model was trained with, or to null if it was trained without this "
            "limit"
        )

    # Let transformers load tensors of the same shapes, and report which of them fit.
    model_class = type(model).__name__
    meta_tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    try:
        with _quiet_transformers():
            _, loading_info = type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=meta_tensors,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # a quantized model, or a conversion without some of its tensors
        missing = sorted({piece.name for piece in file_pieces(model)} - tensors.keys())
        if isinstance(error, RuntimeError) and missing:
            return CheckpointMatch(model_class=model_class, missing=missing)
        return CheckpointMatch(model_class=model_class, not_compared=one_line(error))

    # Find the tensors that the model has no place for.
    unexpected: set[str] = set(loading_info["unexpected_keys"])
    if role == "backbone":  # leaves out heads, and what the language model leaves out
        language_class = model_class_for(auto_class_of(config), config)
        patterns = getattr(language_class, "_keys_to_ignore_on_load_unexpected", None) or ()
        unexpected = {
            name
            for name in unexpected
            if not _HEAD.match(name) and not any(re.search(pattern, name) for pattern in patterns)
        }

    unexpected -= _draft_tensors(unexpected, model.state_dict())

    # Describe and sort the tensors that the model knows by its own names.
    names_in_model = model_names(model, tensors)
    mismatched = [
        f"{name} is {_describe_shape(in_files)} in the files and {_describe_shape(in_model)} in the model"
        for name, in_files, in_model in sorted(loading_info["mismatched_keys"])
    ]

    parts = sort_tensors(model, tensors, names_in_model, frozen_parts(model))
    if role == "backbone":
        passed_on = {name: shape for name, shape in parts.passed_on.items() if not _HEAD.match(name)}
        parts = msgspec.structs.replace(parts, passed_on=passed_on)
    linear_names = linear_layers(model).keys()

    return CheckpointMatch(
        model_class=model_class,
        parts=parts,
        linear_kinds={
            name: names_in_model[name].split(".")[-2]
            for name in parts.trained
            if names_in_model[name] in linear_names
        },
        missing=sorted(loading_info["missing_keys"]),
        unexpected=sorted(unexpected),
        mismatched=[*mismatched, *_describe_undeclared_quantization(model, tensors, names_in_model)],
        unexpected_bytes=sum(
            tensor.nbytes for name, tensor in tensors.items() if {name, names_in_model[name]} & unexpected
        ),
        total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        of_transformers=type(model).__module__.startswith("transformers."),
    )


def _describe_undeclared_quantization(
    model: Any, tensors: dict[str, StoredTensor], renamed: dict[str, str]
) -> Iterator[str]:
    """Yield a line for each tensor that is quantized in the files though config.json does not say so:
    transformers would take the codes for weights."""
    if getattr(model.config, "quantization_config", None):
        return

    state = model.state_dict()
    for name, tensor in sorted(tensors.items()):
        expected = state.get(renamed[name])
        if expected is not None and expected.is_floating_point() and tensor.dtype not in FLOAT_DTYPES:
            yield f"{name} is {tensor.dtype} in the files, but config.json has no quantization_config"


def _draft_tensors(names: Iterable[str], model_names: Iterable[str]) -> set[str]:
    """Return the `names` that belong to layers for drafts (multi-token prediction), which many published
    checkpoints have. Such layers have special names, or come after the model's last layer and hold tensors
    that no layer of the model has. (Copies of layers after the last layer show a wrong config.json.)"""
    layers: set[str] = set()
    suffixes: set[str] = set()
    for name in model_names:
        if parts := _LAYER.match(name):
            layers.add(parts["layer"])
            suffixes.add(parts["suffix"])

    drafts: set[str] = set()
    suffixes_beyond: dict[str, set[str]] = defaultdict(set)
    for name in names:
        parts = _LAYER.match(name)
        if _DRAFT.search(name):
            drafts.add(name)
        elif parts and parts["layer"] not in layers:
            suffixes_beyond[parts["layer"]].add(parts["suffix"])

    for layer, its_suffixes in suffixes_beyond.items():
        if its_suffixes - suffixes:
            drafts |= {f"{layer}.{suffix}" for suffix in its_suffixes}

    return drafts


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from reporting loaded tensors and showing a progress bar, during the body."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level = logger.level
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.CRITICAL)

    try:
        yield
    finally:
        logger.setLevel(level)


def _describe_shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a number"


def _describe_names(names: list[str]) -> str:
    """Return the number of names and the first names: "3 tensors (a, b, c)"."""
    first_names = ", ".join(names[:NAMES_SHOWN])
    if len(names) > NAMES_SHOWN:
        first_names += ", …"
    return f"{len(names)} tensors ({first_names})" if len(names) > 1 else f"1 tensor ({first_names})"
