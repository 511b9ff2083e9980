"""Checks arguments of calls by the JSON schemas of a server: no schema holds the caller's event loop.

schema ──checked_schema──► refused, or a Checker
arguments ──Checker──┬─► here, where the schema is plain and the work is small
                     └─► a process with a deadline: patterns, references, many comparisons
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.isolation.calls import CallTimeout
from asyncrl.isolation.child import Service
from asyncrl.isolation.pool import ProcessPool
from asyncrl.values import in_short

SECONDS = 5.0  # for a process to check one call
START_SECONDS = 60.0
PROCESSES = 2
MAX_ANSWER = 1 << 16  # bytes
MAX_COMPLAINT = 300  # characters
MOST_STEPS = 50_000  # visits of a node of the arguments by a node of the schema, before a process does it
CHARACTERS_PER_NODE = 64  # characters of a text that count as one node

# Keywords whose work for each node of the arguments is bounded by the size of their own node.
PLAIN = frozenset({
    *("$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "type", "enum", "const", "format", "properties", "required", "additionalProperties"),
    *("items", "anyOf", "oneOf", "allOf", "not", "minimum", "maximum", "exclusiveMinimum", "multipleOf"),
    *("exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties"),
    "maxProperties",
})  # fmt: skip
SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")  # lists of schemas that check the same value again
SAME_VALUE_MAPS = ("dependentSchemas", "dependencies")
SAME_VALUE = ("not", "if", "then", "else", "extends")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class Checker:
    """Checks arguments by schemas, by their names. For one event loop, from the first call to `close`."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        self._schemas = schemas
        self._pool: ProcessPool[dict[str, Any], tuple[str, Any], str] | None = None

    async def complaint(self, name: str, arguments: dict[str, Any]) -> str:
        """Say what is wrong with arguments; '' for nothing. CallTimeout: the check took too long."""
        if self._plain[name] * _size(arguments) <= MOST_STEPS:
            return _complaint(self._here[name], arguments)
        try:
            return await self._processes().call((name, arguments), SECONDS)
        except CallTimeout:
            raise CallTimeout(
                f"checking its arguments took over {SECONDS:g} s; simplify the schema's "
                "patterns and references, or leave the tool out of `allow`"
            ) from None

    async def warm(self) -> None:
        """Wait for a process, which takes longer to start than a call may take, where calls will need one.
        ChildError."""
        if any(nodes > MOST_STEPS for nodes in self._plain.values()):
            await self._processes().warm()

    def _processes(self) -> ProcessPool[dict[str, Any], tuple[str, Any], str]:
        if self._pool is None:
            self._pool = ProcessPool(
                CHECKS,
                self._schemas,
                name="the process that checks arguments",
                size=PROCESSES,
                largest=MAX_ANSWER,
                start_seconds=START_SECONDS,
            )
        return self._pool

    async def close(self) -> None:
        pool = self._pool
        self._pool = None
        if pool is not None:
            await pool.close()

    @cached_property
    def _here(self) -> dict[str, Any]:
        return {name: _validator(schema) for name, schema in self._schemas.items()}

    @cached_property
    def _plain(self) -> dict[str, float]:
        """The number of nodes of each schema; infinity for one with other keywords than PLAIN."""
        return {name: _plain_nodes(schema) for name, schema in self._schemas.items()}


def check_schema(name: str, schema: Any) -> None:
    """ConfigError for what is no JSON schema, or would check a value for ever or by another document."""
    import jsonschema
    from referencing.exceptions import Unresolvable

    where = f"the schema of {name!r}"
    advice = "correct the schema in the server, or list in `allow` the tools you need without this one"
    try:
        _class_of(schema).check_schema(schema)
        _check_references(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{where} is no valid JSON schema: {error.message}; {advice}") from None
    except Unresolvable as error:
        raise ConfigError(f"{where} refers to {error.ref!r}, which is not in it; {advice}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; {advice}") from None
    except ReferenceLoop as error:
        raise ConfigError(f"{where} leads from {error.args[0]!r} back to itself; {advice}") from None


class ReferenceLoop(Exception):
    """A reference that leads back to its own schema without going into the value."""


def _class_of(schema: Any, default: Any = None) -> Any:
    """Return the class of validators for the draft that a schema names; without one, the default."""
    import jsonschema
    from jsonschema.validators import validator_for

    default = default or jsonschema.Draft202012Validator
    names_draft = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
    return validator_for(schema, default=default) if names_draft else default


def _validator(schema: Any) -> Any:
    """A validator that fetches no other document."""
    from jsonschema_specifications import REGISTRY

    return _class_of(schema)(schema, registry=REGISTRY)


def _complaint(validator: Any, arguments: Any) -> str:
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(arguments))
    if error is None:
        return ""
    return f"{in_short(error.message, MAX_COMPLAINT)} - at `{in_short(error.json_path, MAX_COMPLAINT)}`"


def _size(value: Any) -> int:
    """The number of nodes of a JSON value: keys are nodes, and each CHARACTERS_PER_NODE characters of a text
    are one, as every complaint quotes the value."""
    count = 0
    waiting = [value]
    while waiting:
        node = waiting.pop()
        count += 1
        if isinstance(node, str):
            count += len(node) // CHARACTERS_PER_NODE
        elif isinstance(node, dict):
            waiting.extend(node)
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return count


def _plain_nodes(schema: Any) -> float:
    if isinstance(schema, bool):
        return 1
    if not isinstance(schema, dict) or not schema.keys() <= PLAIN:
        return float("inf")
    required = schema.get("required", [])
    if not isinstance(required, list):  # a boolean in the third draft
        return float("inf")
    size = 1 + len(required) + _size(schema.get("enum")) + _size(schema.get("const"))
    parts = [*schema.get("properties", {}).values()]
    parts += [part for key in SAME_VALUE_LISTS for part in schema.get(key, ())]
    parts += [schema[key] for key in ("items", "additionalProperties", "not") if key in schema]
    return size + sum(map(_plain_nodes, parts))


def _check_references(schema: Any) -> None:
    """Check all that references of a schema reach, step by step. Raises Unresolvable, ReferenceLoop, or
    SchemaError for a part that is no schema."""
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    validator_class = _class_of(schema)
    specification = specification_with(validator_class.META_SCHEMA.get("$schema", ""))
    root = specification.create_resource(schema)
    clean: set[int] = set()  # schemas, by their identities, from which no loop can be reached
    above: set[int] = set()
    visited: set[int] = set()
    targets: list[tuple[Any, Any]] = []  # (schema, resolver) of references
    waiting = [(root, REGISTRY.resolver_with_root(root))]

    def successors(contents: dict[str, Any], resolver: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield (keyword or reference, schema, resolver) of what checks the same value."""
        for keyword in REFERENCES:
            if isinstance(reference := contents.get(keyword), str):
                try:
                    target = resolver.lookup(reference)
                except (TypeError, ValueError):  # it leads through a value that has no parts
                    raise Unresolvable(ref=reference) from None
                targets.append((target.contents, target.resolver))
                yield reference, target.contents, target.resolver
        for keyword in SAME_VALUE_LISTS:
            yield from ((keyword, part, resolver) for part in contents.get(keyword, ()))
        for keyword in SAME_VALUE_MAPS:
            yield from ((keyword, part, resolver) for part in contents.get(keyword, {}).values())
        yield from ((keyword, contents[keyword], resolver) for keyword in SAME_VALUE if keyword in contents)

    def visit(contents: Any, resolver: Any) -> None:
        if not isinstance(contents, dict) or id(contents) in clean:
            return
        above.add(id(contents))
        resolver = resolver.in_subresource(specification.create_resource(contents))
        for name, part, of_part in successors(contents, resolver):
            if id(part) in above:
                raise ReferenceLoop(name)
            visit(part, of_part)
        above.discard(id(contents))
        clean.add(id(contents))

    while waiting or targets:
        if not waiting:  # targets in places where the standard has schemas have been checked by now
            contents, resolver = targets.pop()
            if id(contents) in visited:
                continue
            target_class = _class_of(contents, default=validator_class)
            target_class.check_schema(contents)
            waiting.append((Resource.from_contents(contents, specification), resolver))

        resource, resolver = waiting.pop()
        visited.add(id(resource.contents))
        visit(resource.contents, resolver)
        inside = resolver.in_subresource(resource)
        waiting += [(part, inside) for part in resource.subresources()]


# -- in the process ------------------------------------------------------------------------------------


def _loaded(schemas: dict[str, Any]) -> Callable[[tuple[str, Any]], str]:
    validators = {name: _validator(schema) for name, schema in schemas.items()}

    def check(call: tuple[str, Any]) -> str:
        name, arguments = call
        return _complaint(validators[name], arguments)

    return check


CHECKS = Service("asyncrl.tools.checking:CHECKS", _loaded, dict[str, Any], tuple[str, Any], str)
