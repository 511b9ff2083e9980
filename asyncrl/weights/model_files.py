"""The files of a model directory: weights, configuration, tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from asyncrl.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MODEL_KEY = "model"  # key in the store's meta: `model_identity` of the run's first model
IDENTITY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
IGNORED_KEYS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path", "use_cache"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}  # bytes of a number, by model.dtype
# safetensors' names of numbers as they are computed with; quantized numbers are smaller, or integers.
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
Shape = tuple[int, ...]
MAX_VALUE_SIZE = 64  # keys, or characters of JSON


def weight_files(path: str) -> list[Path]:
    """Return the files that transformers reads, without a second copy in a publisher's own layout, or
    adapters. Empty without safetensors; a file that an index names may be missing."""
    directory = Path(path)
    if (directory / INDEX_FILE).is_file():
        return [
            directory / name for name in set(read_json(directory / INDEX_FILE).get("weight_map", {}).values())
        ]
    single_file = directory / SINGLE_FILE
    return [single_file] if single_file.is_file() else []


def weight_bytes(path: str) -> int:
    """Return the bytes of the files of weights; 0 without files."""
    return sum(file.stat().st_size for file in weight_files(path) if file.is_file())


class StoredTensor(NamedTuple):
    """One tensor, as the header of its file describes it. `file`: the file's name in the model's directory;
    `offset`: where the tensor's bytes begin in the file."""

    shape: Shape
    dtype: str  # safetensors' name: BF16, F32, I64 …
    nbytes: int
    file: str
    offset: int


class TensorsByPart(msgspec.Struct, frozen=True):
    """The tensors in a model's files by the parts of the model, as shapes by the names in the files.

    `trained`: of the text part. `frozen`: of each part that does not train, by its name in the model.
    `passed_on`: tensors that the model does not hold, which exports take over. The second name of a tied
    tensor is in none.
    """

    trained: dict[str, Shape] = {}
    frozen: dict[str, dict[str, Shape]] = {}
    passed_on: dict[str, Shape] = {}

    @property
    def kept_names(self) -> set[str]:
        """Return the names of the tensors that training leaves as they are in the files."""
        return {*self.passed_on}.union(*self.frozen.values())


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """Return the tensors in the files of weights, by name. Only the headers are read. Raises ConfigError for
    a file that cannot be read, or is not as long as its header says."""
    tensors = {}
    for file in sorted(weight_files(path)):
        header, data_offset = _read_header(file)
        name_in_directory = str(file.relative_to(path))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                tensors[name] = StoredTensor(
                    tuple(tensor["shape"]),
                    tensor["dtype"],
                    end - start,
                    name_in_directory,
                    data_offset + start,
                )

    return tensors


def weight_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by its name, as the headers of the files of weights say."""
    return {name: tensor.shape for name, tensor in stored_tensors(path).items()}


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, {name: {dtype, shape, data_offsets}}, and where the data
    begin. Raises ConfigError without a header, and for a file that is shorter or longer than its header
    says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as header_file:
            (header_length,) = struct.unpack("<Q", header_file.read(8))
            if header_length > size:
                raise ValueError("truncated, or not a safetensors file")
            header: dict[str, Any] = json.loads(header_file.read(header_length))

        data_ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        expected_size = 8 + header_length + max(data_ends, default=0)
        if size != expected_size:
            raise ValueError(f"the file has {size:,} bytes, but its header describes {expected_size:,}")
        return header, 8 + header_length
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(
            f"{file}: not readable as safetensors ({error}); download or save the file again"
        ) from None


def model_identity(path: str) -> dict[str, Any]:
    """Return the values in a model's files, or hashes of long values, that decide beside the weights how the
    model reads, computes and writes. Example: `config.json: rope_theta` → 10000.0."""
    values_by_key: dict[str, Any] = {}
    for file in (Path(path) / name for name in IDENTITY_FILES):
        if file.is_file():
            tree = read_json(file) if file.suffix == ".json" else {"text": file.read_text()}
            values_by_key |= {f"{file.name}: {key}": value for key, value in _leaf_values(tree)}
    return values_by_key


def _leaf_values(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in tree.keys() - IGNORED_KEYS:
        value = tree[name]
        key = f"{prefix}{name}"

        if isinstance(value, dict) and len(value) <= MAX_VALUE_SIZE:
            yield from _leaf_values(value, f"{key}.")
            continue

        text = msgspec.json.encode(value, order="sorted")
        yield key, value if len(text) <= MAX_VALUE_SIZE else xxhash.xxh3_64_hexdigest(text)


def quantization_method(path: str) -> str:
    """Return the method by which a model's weights are quantized, as its config.json says, such as `mxfp4`;
    '' for weights that are not quantized. Raises ConfigError without a config.json."""
    model_settings = read_json(Path(path) / "config.json")
    for settings in (model_settings, model_settings.get("text_config")):
        quantization = settings.get("quantization_config") if isinstance(settings, dict) else None
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            return str(method or "an unnamed method")

    return ""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError, with advice, when there is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; a model directory needs this file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}); correct the file") from None

    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object; correct the file")

    return value
