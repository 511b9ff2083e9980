"""Lists the keys of earlier versions: whoever writes an old key is told what replaces the key, and recorded
configurations with old keys stay readable. docs/reference/run_directory.md says how long an entry stays."""

from __future__ import annotations

from typing import Any

# Old names with new names, for keys whose values mean the same under both names.
RENAMED_KEYS: dict[str, str] = {}

# Keys without a successor, or whose successor takes other values, each with the advice of its refusal.
REMOVED_KEYS = {
    "critic.backbone": "a critic is always a separate model; remove the key",
    "critic.coef": "a critic has its own optimizer, with critic.lr; remove the key",
}

NO_VALUE = object()  # what a tree without a key has for the key


def old_key_advice(key: str) -> str:
    """Return the advice on a dotted key of an earlier version; '' for other keys."""
    if new_key := RENAMED_KEYS.get(key):
        return f"the key is now called {new_key}"
    return REMOVED_KEYS.get(key, "")


def with_current_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Give renamed keys of a recorded configuration their new names, and remove keys that are no more. The
    tree of sections `config` is changed in place, and returned."""
    for old_key in (*RENAMED_KEYS, *REMOVED_KEYS):
        value = _pop_key(config, old_key)
        if value is not NO_VALUE and old_key in RENAMED_KEYS:
            *section_names, name = RENAMED_KEYS[old_key].split(".")
            section = config
            for section_name in section_names:
                section = section.setdefault(section_name, {})
            section[name] = value

    return config


def _pop_key(tree: dict[str, Any], key: str) -> Any:
    """Remove a dotted key from a tree, with the sections that lose their last key; return its value, or
    NO_VALUE if the tree has no such key."""
    section_name, _, inner_key = key.partition(".")
    if not inner_key:
        return tree.pop(key, NO_VALUE)

    section = tree.get(section_name)
    if not isinstance(section, dict):
        return NO_VALUE

    value = _pop_key(section, inner_key)
    if not section:
        del tree[section_name]
    return value
