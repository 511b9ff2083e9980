"""Compares a version's tensors with those of a server's model. The server does not look: it keeps what an
update does not name, and dies of a tensor of another shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import Layout

MAX_NAMES = 3  # names in a message
BUFFERS = ("inv_freq", ".masked_bias", "position_ids")  # computed, and yet in the files of older models


@dataclass(frozen=True)
class Shapes:
    """The tensors of a model by name. `optional` ones share their storage with another (tied weights)."""

    shapes: dict[str, tuple[int, ...]]
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, layout: Layout) -> Shapes:
        return cls({spec.name: tuple(spec.shape) for spec in layout})

    def differences(self, layout: Layout) -> str:
        """Says what is wrong with a version for this model; empty: nothing."""
        given = Shapes.of(layout).shapes
        missing = self.shapes.keys() - given.keys() - self.optional
        unknown = given.keys() - self.shapes.keys() - self.optional
        other = [
            f"{name} has shape {given[name]} instead of {shape}"
            for name, shape in self.shapes.items()
            if given.get(name, shape) != shape
        ]
        parts = [_named("lacks", missing), _named("has unknown", unknown), "; ".join(other[:MAX_NAMES])]
        return "; ".join(part for part in parts if part)


def shapes_of(path: str, tied: bool) -> Shapes | None:
    """Reads the tensors of a model directory from the headers of its files: names as SGLang reads them, which
    a version must use too. None without such files. `tied`: the output embedding is the input's. Raises
    ConfigError."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(Path(path).glob("*.safetensors")):
            with safe_open(file, framework="numpy") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model {path}: unreadable weights ({error})") from error
    optional = {name for name in shapes if name.endswith(BUFFERS)} | ({"lm_head.weight"} if tied else set())
    return Shapes(shapes, frozenset(optional)) if shapes else None


def _named(what: str, names: Iterable[str]) -> str:
    found = sorted(names)
    rest = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return f"{what} {', '.join(found[:MAX_NAMES])}{rest}" if found else ""
