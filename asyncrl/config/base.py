"""Defines the types and helpers of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]
PATH_MARK = "path"  # marks types of texts that may be a path: `~` at their beginning is the home directory
PathText = Annotated[str, PATH_MARK]
RequiredPath = Annotated[str, Meta(min_length=1), PATH_MARK]
Options = dict[str, str | int | float | bool]
Plugin = PathText | dict[PathText, Options]  # a name, or one name with its options


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every group of keys: immutable, without unknown keys."""


def alternative_types(kind: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each type that a value of this type may have, without bounds, and whether that is a path."""
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        for part, is_path in alternative_types(inner):
            yield part, is_path or PATH_MARK in marks
    elif get_origin(kind) in (Union, UnionType):
        for argument in get_args(kind):
            yield from alternative_types(argument)
    else:
        yield kind, False


def types_of(section: type[msgspec.Struct], key: str) -> list[Any]:
    """Return the types that the value of a dotted key may have; none for an unknown key."""
    kinds: list[Any] = [section]
    for name in key.split("."):
        inner: list[Any] = []
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                inner += [field.type for field in msgspec.structs.fields(kind) if field.name == name]
            elif get_origin(kind) is dict:
                inner.append(get_args(kind)[1])

        kinds = [part for kind in inner for part, _ in alternative_types(kind)]

    return kinds


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, in order."""
    small_divisors = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small_divisors, *(number // n for n in small_divisors)})


def without_defaults(section: Section) -> dict[str, Any]:
    """Return the keys whose values are not the defaults, as a tree."""
    changed_values: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default:
            changed_values[field.name] = without_defaults(value) if isinstance(value, Section) else value
    return changed_values


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree, by dotted name, each with its value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def texts(tree: Any) -> Iterator[str]:
    """Yield all keys and values of a tree that are texts."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for item in [*tree, *tree.values()] if isinstance(tree, dict) else tree:
            yield from texts(item)
