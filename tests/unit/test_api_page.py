"""The site's page of the Python interface documents each public name."""

from __future__ import annotations

import re
from pathlib import Path

import asyncrl

PAGE = (Path(__file__).resolve().parents[2] / "site" / "api.md").read_text()


def test_each_public_name_is_on_the_page() -> None:
    documented = set(re.findall(r"^::: ([\w.]+)$", PAGE, re.M))
    for module, members in re.findall(
        r"^::: ([\w.]+)\n    options:\n(?:      .*\n)*?      members: \[(.*)\]", PAGE, re.M
    ):
        documented |= {f"{module}.{member}" for member in members.split(", ")}
    assert {f"{module}.{name}" for name, module in asyncrl.MODULE_OF_NAME.items()} - documented == set()
