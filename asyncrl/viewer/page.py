"""The page: one HTML file with its scripts inside, served or written to disk with its answers.

The scripts are modules that import each other as `view/NAME.js`; an import map says where each one is: here,
as data. So nothing is built, and a page in a file works as one that is served.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from asyncrl.errors import AsyncrlError
from asyncrl.viewer.views import Views

STATIC = files("asyncrl.viewer") / "static"
SHOWN, HELD_OUT = 30, 10  # episodes of each run that a page in a file can open

# Nothing is fetched but the answers of the page's own server; text of models and tools is never run.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def page(recorded: Mapping[str, Any] | None = None) -> str:
    """`recorded`: answers by their address, of a page without a server."""
    modules = {
        f"view/{file.name}": "data:text/javascript;base64," + base64.b64encode(file.read_bytes()).decode()
        for file in sorted(STATIC.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".js")
    }
    parts = {
        "POLICY": POLICY,
        "STYLE": _text("vendor/uPlot.min.css") + _text("style.css"),
        "UPLOT": _text("vendor/uPlot.iife.min.js"),
        "IMPORTS": json.dumps({"imports": modules}),
        # Within a script element, which no text in it can end. (json.dumps would write NaN.)
        "RECORDED": msgspec.json.encode(recorded).decode().replace("<", "\\u003c"),
    }
    html = _text("page.html")
    for name, part in parts.items():
        html = html.replace(f"{{{{{name}}}}}", part, 1)
    return html


def write(path: Path, views: Views) -> bool:
    """Write a page that opens without a server: the curves of all runs, and the newest episodes of each. The
    page says what cannot be read. Returns whether the accounts of all runs are exact."""
    found: dict[str, Any] = {
        "runs": msgspec.to_builtins(views.answer("runs", {})),
        "saved": time.strftime("%Y-%m-%d %H:%M"),
    }
    for number in range(len(found["runs"]["runs"])):
        for name in ("rows", "episodes", "tools", "lanes", "overview"):
            found[address(name, run=number)] = _answer(views, name, run=number)
        where = msgspec.json.encode([("kind", "=", kind) for kind in ("held out", "eval")]).decode()
        held_out = _answer(views, "episodes", run=number, where=where, order="-step").get("episodes", [])
        known = found[address("episodes", run=number)].get("episodes", [])
        train = [one for one in known if one["kind"] == "train"]
        known[:] = train + held_out
        for uid in [one["uid"] for one in train[:SHOWN] + held_out[:HELD_OUT] if one["end"]]:
            found[address("episode", run=number, uid=uid)] = _answer(views, "episode", run=number, uid=uid)
    sides = {"a": 0, "b": min(1, len(found["runs"]["runs"]) - 1)}
    found[address("compare", **sides)] = _answer(views, "compare", **sides)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found), "utf-8")
    return all(answer.get("conserved", True) for answer in found.values() if isinstance(answer, dict))


def address(name: str, **query: object) -> str:
    return f"{name}?{urlencode(query)}"


def _answer(views: Views, name: str, **query: object) -> Any:
    try:
        return msgspec.to_builtins(views.answer(name, {key: str(value) for key, value in query.items()}))
    except AsyncrlError as error:
        return {"error": str(error)}


def _text(name: str) -> str:
    return (STATIC / name).read_text("utf-8")
