"""Checks arguments of calls by the JSON schemas of a server, without blocking the caller's event loop.

schema ──check_schema──► refused, or a Checker
arguments ──Checker──┬─► inline, if the schema is plain and the work is small
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
from asyncrl.values import shorten_to_line

CHECK_SECONDS = 5.0  # for a process to check one call
START_SECONDS = 60.0
PROCESS_COUNT = 2
MAX_ANSWER_BYTES = 1 << 16
MAX_COMPLAINT_CHARACTERS = 300
MAX_INLINE_STEPS = 50_000  # pairs of a node of the arguments and a node of the schema; above: in a process
CHARACTERS_PER_NODE = 64  # characters of a text that count as one node

# Keywords whose work for each node of the arguments is bounded by the size of the keyword's node.
PLAIN_KEYWORDS = frozenset({
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
    """Checks arguments by schemas, by tool name, in one event loop from the first call to `close`."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        self._schemas = schemas
        self._process_pool: ProcessPool[dict[str, Any], tuple[str, Any], str] | None = None

    async def complaint(self, name: str, arguments: dict[str, Any]) -> str:
        """Describe a problem of arguments; '' if there is none. CallTimeout: the check took too long."""
        if self._node_counts[name] * _count_nodes(arguments) <= MAX_INLINE_STEPS:
            return _find_complaint(self._validators[name], arguments)

        try:
            return await self._start_pool().call((name, arguments), CHECK_SECONDS)
        except CallTimeout:
            raise CallTimeout(
                f"checking the arguments took more than {CHECK_SECONDS:g} s; simplify the schema's "
                "patterns and references, or leave the tool out of `allow`"
            ) from None

    async def warm(self) -> None:
        """Wait for a process, if calls will need processes: a start takes longer than a call may.
        ChildError."""
        if any(nodes > MAX_INLINE_STEPS for nodes in self._node_counts.values()):
            await self._start_pool().warm()

    def _start_pool(self) -> ProcessPool[dict[str, Any], tuple[str, Any], str]:
        if self._process_pool is None:
            self._process_pool = ProcessPool(
                CHECKS,
                self._schemas,
                name="the process that checks arguments",
                size=PROCESS_COUNT,
                max_answer_bytes=MAX_ANSWER_BYTES,
                start_seconds=START_SECONDS,
            )
        return self._process_pool

    async def close(self) -> None:
        pool = self._process_pool
        self._process_pool = None
        if pool is not None:
            await pool.close()

    @cached_property
    def _validators(self) -> dict[str, Any]:
        return {name: _make_validator(schema) for name, schema in self._schemas.items()}

    @cached_property
    def _node_counts(self) -> dict[str, float]:
        """Return the number of nodes of each schema; infinity for a schema with keywords beyond
        PLAIN_KEYWORDS."""
        return {name: _count_plain_nodes(schema) for name, schema in self._schemas.items()}


def check_schema(name: str, schema: Any) -> None:
    """Check a schema. ConfigError: it is invalid, or would check a value for ever or by another document."""
    import jsonschema
    from referencing.exceptions import Unresolvable

    schema_label = f"the schema of {name!r}"
    advice = "correct the schema in the server, or list only other tools in `allow`"

    try:
        _validator_class(schema).check_schema(schema)
        _check_references(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{schema_label} is not a valid JSON schema: {error.message}; {advice}") from None
    except Unresolvable as error:
        raise ConfigError(
            f"{schema_label} refers to {error.ref!r}, which the schema lacks; {advice}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{schema_label} is nested too deeply; {advice}") from None
    except ReferenceLoop as error:
        raise ConfigError(
            f"{schema_label} contains a reference loop at {error.args[0]!r}; {advice}"
        ) from None


class ReferenceLoop(Exception):
    """A reference leads back to its own schema without going into the value."""


def _validator_class(schema: Any, default_class: Any = None) -> Any:
    """Return the class of validators for the draft that a schema names, or the default."""
    import jsonschema
    from jsonschema.validators import validator_for

    default_class = default_class or jsonschema.Draft202012Validator
    names_draft = isinstance(schema, dict) and isinstance(schema.get("$schema"), str)
    return validator_for(schema, default=default_class) if names_draft else default_class


def _make_validator(schema: Any) -> Any:
    """Make a validator that fetches no other document."""
    from jsonschema_specifications import REGISTRY

    return _validator_class(schema)(schema, registry=REGISTRY)


def _find_complaint(validator: Any, arguments: Any) -> str:
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(arguments))
    if error is None:
        return ""

    message = shorten_to_line(error.message, MAX_COMPLAINT_CHARACTERS)
    json_path = shorten_to_line(error.json_path, MAX_COMPLAINT_CHARACTERS)
    return f"{message} - at `{json_path}`"


def _count_nodes(value: Any) -> int:
    """Count the nodes of a JSON value. Keys are nodes, and so are each CHARACTERS_PER_NODE characters of a
    text, as every complaint quotes the value."""
    node_count = 0
    pending_nodes = [value]

    while pending_nodes:
        node = pending_nodes.pop()
        node_count += 1
        if isinstance(node, str):
            node_count += len(node) // CHARACTERS_PER_NODE
        elif isinstance(node, dict):
            pending_nodes.extend(node)
            pending_nodes.extend(node.values())
        elif isinstance(node, list):
            pending_nodes.extend(node)
    return node_count


def _count_plain_nodes(schema: Any) -> float:
    if isinstance(schema, bool):
        return 1
    if not isinstance(schema, dict) or not schema.keys() <= PLAIN_KEYWORDS:
        return float("inf")

    required = schema.get("required", [])
    if not isinstance(required, list):  # a boolean in the third draft
        return float("inf")

    own_size = 1 + len(required) + _count_nodes(schema.get("enum")) + _count_nodes(schema.get("const"))

    parts = [*schema.get("properties", {}).values()]
    parts += [part for key in SAME_VALUE_LISTS for part in schema.get(key, ())]
    parts += [schema[key] for key in ("items", "additionalProperties", "not") if key in schema]

    return own_size + sum(map(_count_plain_nodes, parts))


def _check_references(schema: Any) -> None:
    """Check everything that references of a schema reach, step by step. Raises Unresolvable, ReferenceLoop,
    or SchemaError for a part that is not a schema."""
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    validator_class = _validator_class(schema)
    specification = specification_with(validator_class.META_SCHEMA.get("$schema", ""))
    root_resource = specification.create_resource(schema)
    loop_free: set[int] = set()  # schemas, by their identities, from which no loop can be reached
    open_schemas: set[int] = set()
    visited_resources: set[int] = set()
    reference_targets: list[tuple[Any, Any]] = []  # (schema, resolver) of references
    pending_resources = [(root_resource, REGISTRY.resolver_with_root(root_resource))]

    def find_successors(contents: dict[str, Any], resolver: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield (keyword or reference, schema, resolver) of schemas that check the same value."""
        for keyword in REFERENCES:
            if isinstance(reference := contents.get(keyword), str):
                try:
                    target = resolver.lookup(reference)
                except (TypeError, ValueError):  # the reference leads through a value without parts
                    raise Unresolvable(ref=reference) from None
                reference_targets.append((target.contents, target.resolver))
                yield reference, target.contents, target.resolver
        for keyword in SAME_VALUE_LISTS:
            yield from ((keyword, part, resolver) for part in contents.get(keyword, ()))
        for keyword in SAME_VALUE_MAPS:
            yield from ((keyword, part, resolver) for part in contents.get(keyword, {}).values())
        yield from ((keyword, contents[keyword], resolver) for keyword in SAME_VALUE if keyword in contents)

    def visit_schema(contents: Any, resolver: Any) -> None:
        if not isinstance(contents, dict) or id(contents) in loop_free:
            return
        open_schemas.add(id(contents))
        resolver = resolver.in_subresource(specification.create_resource(contents))

        for name, part, part_resolver in find_successors(contents, resolver):
            if id(part) in open_schemas:
                raise ReferenceLoop(name)
            visit_schema(part, part_resolver)

        open_schemas.discard(id(contents))
        loop_free.add(id(contents))

    while pending_resources or reference_targets:
        if not pending_resources:  # targets at the standard's positions of schemas have been checked by now
            contents, resolver = reference_targets.pop()
            if id(contents) in visited_resources:
                continue
            target_class = _validator_class(contents, default_class=validator_class)
            target_class.check_schema(contents)
            pending_resources.append((Resource.from_contents(contents, specification), resolver))

        resource, resolver = pending_resources.pop()
        visited_resources.add(id(resource.contents))
        visit_schema(resource.contents, resolver)
        inner_resolver = resolver.in_subresource(resource)
        pending_resources += [(part, inner_resolver) for part in resource.subresources()]


# -- in the process ------------------------------------------------------------------------------------


def _load_validators(schemas: dict[str, Any]) -> Callable[[tuple[str, Any]], str]:
    validators = {name: _make_validator(schema) for name, schema in schemas.items()}

    def check_call(call: tuple[str, Any]) -> str:
        name, arguments = call
        return _find_complaint(validators[name], arguments)

    return check_call


CHECKS = Service("asyncrl.tools.checking:CHECKS", _load_validators, dict[str, Any], tuple[str, Any], str)
