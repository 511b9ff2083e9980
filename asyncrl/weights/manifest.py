"""The name of a published policy version, and the manifest that describes the version."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from asyncrl.errors import AsyncrlError
from asyncrl.types import PolicyVersion

_DTYPES_BY_SIZE = {
    8: "float64 int64 uint64 complex64",
    4: "float32 int32 uint32",
    2: "bfloat16 float16 int16 uint16",
}
_DTYPES_BY_SIZE[1] = "bool int8 uint8 float8_e4m3fn float8_e5m2"
ITEM_BYTES = {kind: size for size, kinds in _DTYPES_BY_SIZE.items() for kind in kinds.split()}
# safetensors' names of types: those that are not a letter and the number of bits.
_DTYPE_CODES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
Gap = Annotated[float, Meta(ge=0)]  # infinite if a compared value is no number
_LABEL = re.compile(r"e(\d+)-v(\d+)")


class WeightsError(AsyncrlError):
    """Published weights are missing, damaged or not this model's."""


class Unreachable(WeightsError):
    """Nobody delivers the version, which may be undamaged."""


class Postponed(WeightsError):
    """The version is not available now, without a fault of the reader, who may ask again."""


class Superseded(Postponed):
    """Only a newer version is available."""


class WeightsRef(msgspec.Struct, frozen=True):
    """The version and the path of published weights."""

    version: PolicyVersion
    path: str

    @property
    def label(self) -> str:
        return self.version.label


def version_of(label: str) -> PolicyVersion | None:
    """Return the version of a `PolicyVersion.label`; None for a label of another form."""
    match = _LABEL.fullmatch(label)
    return PolicyVersion(int(match[1]), int(match[2])) if match else None


class TensorSpec(NamedTuple):
    """The name, shape and type of a whole tensor; `dtype` is a key of ITEM_BYTES."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def dtype_code(self) -> str:
        """Return safetensors' name of the type: F32 for float32."""
        return _DTYPE_CODES.get(self.dtype) or f"{self.dtype[0].upper()}{8 * ITEM_BYTES[self.dtype]}"


class RawTensorSpec(NamedTuple):
    """The name, shape and size of a whole tensor that is copied as bytes. `dtype_code`: safetensors' name of
    the type, which torch may not have."""

    name: str
    shape: tuple[int, ...]
    dtype_code: str
    nbytes: int


Layout = tuple[TensorSpec, ...]


def split_buckets(layout: Sequence[TensorSpec | RawTensorSpec], bucket_bytes: int) -> Iterator[slice]:
    """Yield slices of consecutive tensors of at most `bucket_bytes` together; a larger tensor alone."""
    start = 0
    bucket_size = 0
    for index, spec in enumerate(layout):
        if index > start and bucket_size + spec.nbytes > bucket_bytes:
            yield slice(start, index)
            start = index
            bucket_size = 0
        bucket_size += spec.nbytes

    if layout:
        yield slice(start, len(layout))


class TensorEntry(msgspec.Struct, frozen=True):
    """Describes one tensor of a version, with the checksum of its bytes (weights/ranges.py)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    xxh3: str

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape, self.dtype)


class LogprobGaps(msgspec.Struct, frozen=True):
    """The differences between two computations of the same log-probs, in nats, >= 0; infinite if a log-prob
    is not finite. `median`: with several adapters, the largest of their medians."""

    largest: Gap
    mean: Gap
    median: Gap


class Probe(msgspec.Struct, frozen=True):
    """Random texts with the trainer's scores under a version. An engine must agree, before its first token
    and at every later probe.

    Args:
        sequences: texts of equal length.
        logprobs: for each text those of sequence[1:] at temperature 1, with each adapter in turn.
        rounding: the differences between these log-probs and those of a more exact forward.
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    rounding: LogprobGaps = LogprobGaps(0.0, 0.0, 0.0)

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the ids of all texts."""
        return tuple(chain.from_iterable(self.sequences))

    def compare(self, logprobs: Sequence[Sequence[float]]) -> LogprobGaps:
        """Compare log-probs of the same texts with the trainer's."""
        gaps = [
            abs(logprob - expected)
            for text_logprobs, expected_logprobs in zip(logprobs, self.logprobs, strict=True)
            for logprob, expected in zip(text_logprobs, expected_logprobs, strict=True)
        ]
        if not all(map(math.isfinite, gaps)):
            return LogprobGaps(math.inf, math.inf, math.inf)

        text_tokens = len(self.sequences[0]) - 1
        adapter_count = len(self.logprobs[0]) // text_tokens
        adapter_medians = [
            median(
                gap
                for start in range(adapter * text_tokens, len(gaps), adapter_count * text_tokens)
                for gap in gaps[start : start + text_tokens]
            )
            for adapter in range(adapter_count)
        ]
        return LogprobGaps(largest=max(gaps), mean=fmean(gaps), median=max(adapter_medians))


class Delta(msgspec.Struct, frozen=True):
    """The base version of a delta. `ranges`: for each tensor its consecutive byte ranges, as (bytes of the
    range, bytes of the delta that belong to the range)."""

    version: PolicyVersion
    checksum: str
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def size(self) -> int:
        """Return the bytes of the delta's file."""
        return sum(size for ranges in self.ranges for _, size in ranges)


class AdapterSpec(msgspec.Struct, frozen=True):
    """Describes low-rank adapters: for these `layers` of the model, whose weights are stored `transposed` in
    models like GPT-2; alpha / rank scales the update."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    transposed: bool = False

    def peft(self, base: str) -> dict[str, Any]:
        """Return PEFT's adapter_config.json for adapters of the model `base`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": self.layers,
            "fan_in_fan_out": self.transposed,
            "inference_mode": True,
        }


_AGENT_TENSOR = re.compile(r"(.*?\.lora_[AB])(?:\.([\w-]+))?\.weight")


def agent_tensor_name(name: str, agent: str) -> str:
    """Name a tensor of an agent's adapter as in a file for this agent alone; '': a tensor of another
    agent."""
    match = _AGENT_TENSOR.fullmatch(name)
    return f"{match[1]}.weight" if match and (match[2] or "") == agent else ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors of a version, in file order. `checksum` is the xxh3 of all entries: the same whether a
    version is published whole or as a `delta`. `adapters`: descriptions by agent, if the tensors belong to
    adapters; '': the adapter of all agents without an entry."""

    version: PolicyVersion
    tensors: tuple[TensorEntry, ...]
    checksum: str
    delta: Delta | None = None
    adapters: dict[str, AdapterSpec] = {}

    @property
    def layout(self) -> Layout:
        return tuple(entry.spec for entry in self.tensors)


def build_manifest(
    version: PolicyVersion,
    tensors: tuple[TensorEntry, ...],
    delta: Delta | None = None,
    adapters: dict[str, AdapterSpec] | None = None,
) -> Manifest:
    """Return the manifest of a version, its checksum included."""
    return Manifest(version, tensors, overall_checksum(tensors), delta, adapters or {})


def overall_checksum(tensors: Iterable[TensorEntry]) -> str:
    """Compute one checksum over the names, shapes, types and checksums of all tensors, in order."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(tuple(tensors)))
