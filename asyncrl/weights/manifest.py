"""The name of a published policy version, and the manifest that describes the version."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

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


class Probe(msgspec.Struct, frozen=True):
    """A fixed text with the trainer's scores under a version: `logprobs` of ids[1:] at temperature 1, with
    each adapter in turn. An engine must agree, before its first token and at every later probe. `rounding`:
    the mean difference between these log-probs and those of a forward in float32, in nats."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rounding: float = 0.0


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
