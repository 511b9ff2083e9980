"""Names of earlier versions, for users' algorithms: an access raises an error that says the new name."""

from __future__ import annotations

from collections.abc import Mapping


def renamed_attribute(owner: object, name: str, new_names: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that `owner` lacks, and its new name if it was renamed."""
    text = f"'{type(owner).__name__}' has no attribute '{name}'"
    if name in new_names:
        text += f"; it is now called '{new_names[name]}'"
    return AttributeError(text, name=name, obj=owner)
