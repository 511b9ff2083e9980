"""Reads chat templates that replace a model's own: templates of this package, and files of users."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import ConfigError, one_line

_SHIPPED_TEMPLATES = {file.stem: file for file in Path(__file__).parent.glob("*.jinja")}


def read_template(template_spec: str, key: str) -> str:
    """Return the text of the template that `template_spec`, the value of `key`, names: a shipped template, a
    Jinja file, or a text already. '' for ''. Raises ConfigError."""
    if not template_spec or "{{" in template_spec or "{%" in template_spec:
        return template_spec

    try:
        text = _SHIPPED_TEMPLATES.get(template_spec, Path(template_spec)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        shipped_names = ", ".join(sorted(_SHIPPED_TEMPLATES))
        raise ConfigError(
            f"{key}: {template_spec} cannot be read ({one_line(error)}); use the path of a Jinja file, or "
            f"one of these names: {shipped_names}"
        ) from None

    if "{{" not in text and "{%" not in text:
        raise ConfigError(
            f"{key}: {template_spec} is not a Jinja template: it contains neither {{{{ }}}} nor {{% %}}"
        )

    return text
