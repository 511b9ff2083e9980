"""Composes a `RunConfig` from files in configs/, the user's own directories and overrides, by Hydra. Only
this module imports Hydra, and only when composing, so that `asyncrl --help` does not wait."""

from __future__ import annotations

import difflib
import functools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

import asyncrl
from asyncrl.config.base import Plugin, leaves, types_of
from asyncrl.config.old_keys import old_key_advice
from asyncrl.config.parsing import parse
from asyncrl.config.run import RunConfig, read_config
from asyncrl.config.training import KLConfig
from asyncrl.errors import ConfigError, MissingKeyError, UnknownKeysError, one_line

MISSING_VALUE = "???"  # OmegaConf's mark of a mandatory value
ROOT_REFERENCE = "${asyncrl_root:}"
RUN_DIRECTORY_MARK = "\0run directory"
"""Placeholder for the run's directory in texts of `values`; only the composed configuration has the path."""
MANY_NAMES_KEY = "rollout.reward"  # takes several names with options; keys of the same type take one
HYDRA_FLAGS = {
    "config-path": "use --config-dir DIR for a directory with your own groups",
    "config-name": "use experiment=NAME, which reads experiment/NAME.yaml, also from the DIR of --config-dir",
    "multirun": "sweeps are not supported; run one command for each value",
    "cfg": "use --dry-run to print the configuration",
}
NOT_TEXT_STARTS = ("[", "{", '"', "'")  # beginnings of lists, mappings and quoted texts


def compose(
    overrides: list[str], config_dir: Path | None = None, values: Mapping[str, Any] = {}
) -> RunConfig:
    """Return the configuration of configs/, `config_dir` and `overrides`. `values`: further keys, by section
    (`{"trainer": {"lr": 1e-5}}`), with values of JSON's types, which replace whatever files and overrides
    say."""
    base = config_root() / "configs"
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such directory")

    own_groups = config_dir or Path("configs")
    search_path: list[str] = []
    if own_groups.is_dir() and own_groups.resolve() != base:
        search_path.append(f"hydra.searchpath=[{_quoted_text(f'file://{own_groups.resolve()}')}]")

    values_by_key = dict(_keys_with_values(RunConfig, values))
    config = _compose_config(
        [*search_path, *_prepared_overrides(overrides)], base, config_dir, values_by_key=values_by_key
    )
    kl = config.kl
    keys = _keys_of(overrides) | values_by_key.keys()
    coef_set = "kl.coef" in keys or kl.coef != KLConfig().coef
    if kl.where == "none" and kl.coef and coef_set and "kl.where" not in keys:
        raise ConfigError(
            f"kl.coef={kl.coef:g} has no effect, because kl.where is none; add kl.where=loss_unweighted (as "
            "in verl and TRL), loss or reward, or remove kl.coef"
        )

    return config


def recompose(run_dir: Path, overrides: list[str], values: Mapping[str, Any] = {}) -> RunConfig:
    """Return the configuration that a run has recorded, with keys overridden, and with `values` as for
    `compose`. Files of configs/ cannot override: rules and options without a mention in the file would stay
    as recorded."""
    recorded = msgspec.to_builtins(read_config(run_dir))
    return _compose_config(
        [*_prepared_overrides(overrides)],
        recorded=_without_interpolation(recorded),
        values_by_key=dict(_keys_with_values(RunConfig, values)),
    )


def override(key: str, text: str | Path) -> str:
    """Return the override that sets a key to exactly this text, whatever its characters."""
    return f"{key}={_quoted_text(_without_interpolation(str(text)))}"


def _keys_with_values(
    section: type[msgspec.Struct], values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield each key of a tree of sections by its dotted name, with its value. Keys may be unknown."""
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for name, value in values.items():
        kind = fields.get(name)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, Mapping):
            yield from _keys_with_values(kind, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _quoted_text(text: str) -> str:
    """Return a text as Hydra's grammar quotes texts. `${…}` stays an interpolation."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def _without_interpolation(tree: Any) -> Any:
    """Return a text, or a tree with such values, in which OmegaConf sees no interpolation but that of the
    run's directory."""
    if isinstance(tree, str):
        escaped_text = re.sub(r"(\\*)\$\{", r"\1\1\\${", tree)
        return escaped_text.replace(RUN_DIRECTORY_MARK, "${run_dir}/${name}")
    if isinstance(tree, dict):
        return {key: _without_interpolation(value) for key, value in tree.items()}
    return [_without_interpolation(value) for value in tree] if isinstance(tree, list) else tree


def _compose_config(
    overrides: list[str],
    base: Path | None = None,
    config_dir: Path | None = None,
    recorded: dict[str, Any] | None = None,
    values_by_key: Mapping[str, Any] = {},
) -> RunConfig:
    """Compose `config.yaml` of the directory `base`, or the `recorded` tree, with overrides, then set values.
    If `base` has a file for the agent in `agent/`, the file's keys are defaults. The result holds no
    OmegaConf objects."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError

    _accept_byte_order_marks()
    root = str(config_root())
    given_keys = _keys_of(overrides)
    OmegaConf.register_new_resolver("asyncrl_root", lambda: root, replace=True)
    ConfigStore.instance().store(name="schema", node=default_tree(RunConfig))
    ConfigStore.instance().store(name="recorded", node=recorded or {})
    source: AbstractContextManager[None]
    if base is None:
        source = hydra.initialize(None, version_base="1.3", job_name="asyncrl")
    else:
        source = hydra.initialize_config_dir(str(base), version_base="1.3", job_name="asyncrl")

    try:
        with source:
            composed = hydra.compose("config" if base else "recorded", overrides)

            # The agent may be a path, or a value of a wrong type, which is refused later.
            agent = values_by_key.get("rollout.agent", (composed.rollout or {}).get("agent"))
            name = next(iter(agent), "") if isinstance(agent, Mapping) else agent
            has_name = isinstance(name, str) and name.isidentifier() and "agent" not in given_keys
            if base and has_name and (base / "agent" / f"{name}.yaml").is_file():
                composed = hydra.compose("config", [f"agent={name}", *overrides])

            OmegaConf.set_struct(composed, False)  # unknown keys are refused below
            for key, value in values_by_key.items():
                OmegaConf.update(composed, key, _without_interpolation(value), merge=False)

            tree: Any = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain_error(error, given_keys) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark
        problem = error.problem or error.context
        location = f"{mark.name}, line {mark.line + 1}" if mark else "configuration"
        raise ConfigError(f"{location}: not valid YAML ({problem}); correct the file") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{_first_file_not_utf8(config_dir)}: not UTF-8 text; save the file as UTF-8"
        ) from None
    except RecursionError:
        raise ConfigError("configuration: a value is nested too deeply; flatten it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration: {one_line(error)}") from None

    if unknown := list(_find_unknown_keys(RunConfig, tree)):
        raise _unknown_keys_error(unknown)

    for key, value in _dotted_keys(tree):
        if value == MISSING_VALUE:
            raise MissingKeyError(key)

    run_directory = f"{tree['run_dir']}/{tree['name']}"
    return parse(_resolve_keys(tree, {ROOT_REFERENCE: root, RUN_DIRECTORY_MARK: run_directory}))


@functools.cache
def _accept_byte_order_marks() -> None:
    """Let Hydra read the first line of a file that begins with a byte order mark, as YAML does."""
    from hydra.plugins.config_source import ConfigSource

    header = ConfigSource._get_header_dict
    accepting = staticmethod(lambda text: header(text.removeprefix("\ufeff")))
    ConfigSource._get_header_dict = accepting  # type: ignore[method-assign, assignment]


def _keys_of(overrides: Iterable[str]) -> set[str]:
    return {override.partition("=")[0].lstrip("+~") for override in overrides}


def config_root() -> Path:
    """Find the parent of `configs/`: the checkout, or a directory under an installation's prefix."""
    package = Path(asyncrl.__file__).absolute().parent
    for root in (package.parent, *(prefix / "share" / "asyncrl" for prefix in package.parents)):
        if (root / "configs" / "config.yaml").is_file():
            return root.resolve()
    raise ConfigError(
        "configs/config.yaml was not found next to the package; reinstall asyncrl, or run from a checkout"
    )


def default_tree(section: type[msgspec.Struct]) -> dict[str, Any]:
    """Return every key with its default; a key without one is marked as mandatory."""
    tree: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            tree[field.name] = default_tree(field.type)
        elif field.required:
            tree[field.name] = MISSING_VALUE
        else:
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[operator]
            tree[field.name] = msgspec.to_builtins(default)

    return tree


def _resolve_keys(tree: Any, directories: Mapping[str, str]) -> Any:
    """Resolve keys that name a file, as OmegaConf resolves only values. `directories`: by the text that
    stands for each."""
    if not isinstance(tree, dict):
        return tree

    resolved_tree: dict[str, Any] = {}
    for key, value in tree.items():
        resolved_key = str(key)
        for mark, directory in directories.items():
            resolved_key = resolved_key.replace(mark, directory)
        resolved_tree[resolved_key] = _resolve_keys(value, directories)
    return resolved_tree


def _prepared_overrides(overrides: list[str]) -> Iterator[str]:
    """Add Hydra's plus sign to overrides of mappings with keys of the user's choice, and quote texts. A
    mapping for a key that takes one name replaces the mapping of a preset, instead of merging."""
    kinds = dict(_open_keys(RunConfig))
    for argument in map(_quote_text_value, overrides):
        key, _, value = argument.partition("=")
        if kinds.get(key) == Plugin and key != MANY_NAMES_KEY and value.startswith("{"):
            yield f"~{key}"
        is_open = any(f"{key}.".startswith(f"{name}.") for name in kinds)
        yield f"++{argument}" if is_open else argument


def _quote_text_value(argument: str) -> str:
    """Return an override with a quoted value if the value is a text. For a key that takes texts and no
    numbers, all values but `null` and Hydra's escapes (`a\\=b`) are texts; for other keys, values that
    Hydra's grammar refuses."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = argument.partition("=")
    if not value or value.startswith(NOT_TEXT_STARTS):
        return argument

    kinds = types_of(RunConfig, key.lstrip("+~"))
    takes_text = any(kind is str or typing.get_origin(kind) is typing.Literal for kind in kinds)
    only_text = takes_text and not {int, float, bool} & {*kinds}
    if only_text and value != "null" and "\\" not in value:
        return f"{key}={_quoted_text(value)}"

    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return f"{key}={_quoted_text(value)}"

    return argument


def _open_keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys whose values may be mappings, with the keys' types."""
    for field in msgspec.structs.fields(section):
        kind = field.type
        name = f"{prefix}{field.name}"
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _open_keys(kind, f"{name}.")
        elif any(typing.get_origin(part) is dict for part in (kind, *typing.get_args(kind))):
            yield name, kind


def _explain_error(error: Exception, given_keys: Iterable[str]) -> ConfigError:
    """Write Hydra's error on one line; for unknown keys or choices, name all unknown `given_keys`."""
    text = " ".join(str(error).split()).partition(" See https://")[0].partition(" Config search path:")[0]
    if override := getattr(error, "override", None):
        text = (
            f"cannot read the override {override!r}: {text}; close all brackets and quotes, and within "
            "brackets quote values with characters other than letters, digits and /._-+*, such as \"['a=b']\""
        )

    key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    if override or not text.startswith("Could not override") or not key or key in _known_keys():
        return ConfigError(f"configuration: {text}")

    unknown_keys = [name for name in _unknown_keys(given_keys) if not name.startswith("hydra.")]
    return _unknown_keys_error(unknown_keys or [key])


def _unknown_keys_error(keys: list[str]) -> ConfigError:
    """Describe unknown keys: for verl's the equivalent here, for others the nearest known keys."""
    if len(keys) == 1:
        return ConfigError(f"configuration: unknown key {keys[0]}; {_advice_for_key(keys[0])}")
    lines = (f"{key}: {_advice_for_key(key)}" for key in sorted(keys))
    return UnknownKeysError("\n  ".join(("configuration: unknown keys", *lines)))


def refused_flags(flags: Sequence[str]) -> ConfigError:
    """Describe flags (`--name`) that a command does not have: Hydra's flags, and keys with dashes."""
    known_keys = _known_keys()
    answers = []

    for flag in flags:
        key = flag.removeprefix("--")
        answer = HYDRA_FLAGS.get(key) or (f"write {key}=…" if key in known_keys else _advice_for_key(key))
        answers.append(f"{flag}: {answer}")

    if len(answers) == 1:
        return ConfigError(f"no such flag (keys are written KEY=VALUE, without dashes): {answers[0]}")

    head = "no such flags (keys are written KEY=VALUE, without dashes)"
    return UnknownKeysError("\n  ".join((head, *answers)))


def refused_keys(overrides: Sequence[str]) -> ConfigError | None:
    """Describe the unknown keys of overrides; None if all keys are known."""
    unknown_keys = _unknown_keys(_keys_of(overrides))
    return _unknown_keys_error(unknown_keys) if unknown_keys else None


def _unknown_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys that are neither keys of the configuration nor groups of files."""
    known_keys = {*_group_names(), *_known_keys()}
    open_prefixes = tuple(f"{name}." for name, _ in _open_keys(RunConfig))
    return [key for key in keys if key not in known_keys and not key.startswith(open_prefixes)]


def _advice_for_key(key: str) -> str:
    """Return the advice on a key of an earlier version, the equivalent of an unknown key, or the nearest
    known keys."""
    if advice := old_key_advice(key):
        return advice

    groups = _group_names()
    if key in groups:
        return f"the file for {key}=… does not begin with the line `# @package _global_`, or contains no keys"

    verl_keys = {name: row for names, *row in verl_rows() for name in names.split(", ")}
    row = verl_keys.get(key) or verl_keys.get(f"actor_rollout_ref.{key}")
    our_key, note = row or next((row for name, row in verl_keys.items() if fnmatchcase(key, name)), ["", ""])
    note = re.sub(r"\[(.*?)\]\((.*?)\)", r"\1 (docs/\2)", note).replace("`", "")
    if our_key:
        return f"in asyncrl it is {our_key} ({note})" if note else f"in asyncrl it is {our_key}"
    if note:
        return f"asyncrl has no such key: {note}"

    known_names = dict.fromkeys([*groups, *_known_keys()])
    nearest_names = difflib.get_close_matches(key, known_names, n=3, cutoff=0.5)
    if nearest_names:
        return f"did you mean {', '.join(nearest_names)}?"
    return "see docs/reference/configuration.md"


def _known_keys() -> list[str]:
    return [name for name, _ in _dotted_keys(default_tree(RunConfig))]


def _group_names() -> list[str]:
    return [path.name for path in (config_root() / "configs").iterdir() if path.is_dir()]


@functools.cache
def verl_rows() -> list[tuple[str, str, str]]:
    """Read keys of verl (or patterns of keys), the key here ('' for none), and a note in Markdown."""
    text = (config_root() / "configs" / "from_verl.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=list[tuple[str, str, str]])


def _find_unknown_keys(section: type[msgspec.Struct], tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of the user's files that the configuration does not have."""
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for name, value in tree.items():
        kind = fields.get(name)
        if kind is None:
            unknown_tree = {name: None if name in _group_names() else value}
            yield from (key for key, _ in leaves(unknown_tree, prefix))
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            yield from _find_unknown_keys(kind, value, f"{prefix}{name}.")


def _first_file_not_utf8(config_dir: Path | None) -> str:
    """Return the user's first file that is not text in UTF-8."""
    for path in sorted((config_dir or Path("configs")).rglob("*.yaml")):
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError:
            return str(path)
        except OSError:
            continue

    return "configuration: a file"


def _dotted_keys(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every section and key by dotted name, with the value."""
    for name, value in tree.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _dotted_keys(value, f"{prefix}{name}.")
