"""Reads chat templates that replace a model's own: templates of this package, and files of users."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import ConfigError, one_line

_SHIPPED = {file.stem: file for file in Path(__file__).parent.glob("*.jinja")}


def read_template(given: str, key: str) -> str:
    """Return the text of the template that `template_spec`, the value of `key`, names: a shipped template, a
    Jinja file, or a text already. '' for ''. Raises ConfigError."""
    if not given or "{{" in given or "{%" in given:
        return given
    try:
        text = _SHIPPED.get(given, Path(given)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        shipped = ", ".join(sorted(_SHIPPED))
        raise ConfigError(
            f"{key}: {given} cannot be read ({one_line(error)}); give a Jinja file, or one of: {shipped}"
        ) from None
    if "{{" not in text and "{%" not in text:
        raise ConfigError(f"{key}: {given} is no Jinja template: nothing in it is in {{{{ }}}} or {{% %}}")
    return text
