"""The site's page of the Python interface documents each public name."""

from __future__ import annotations

import re
from pathlib import Path

import asyncrl

PAGE = (Path(__file__).resolve().parents[2] / "site" / "api.md").read_text()
MEMBERS = re.compile(r"^::: ([\w.]+)\n    options:\n(?:      .*\n)*?      members: \[(.*)\]", re.M)


def test_each_public_name_is_on_the_page() -> None:
    documented = set(re.findall(r"^::: ([\w.]+)$", PAGE, re.M))
    for module, members in MEMBERS.findall(PAGE):
        documented |= {f"{module}.{member}" for member in members.split(", ")}

    public_names = {f"{module}.{name}" for name, module in asyncrl.MODULE_OF_NAME.items()}
    assert public_names - documented == set()
