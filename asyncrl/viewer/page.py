"""Makes the page: one HTML file with its scripts inside, served or written to disk with its answers.

The scripts are modules that import each other as `view/NAME.js`; an import map says where each one is: here,
as data. So nothing is built, and a page in a file works as one that is served.
"""

from __future__ import annotations

import base64
import json
import re
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
# episodes of each run that a page in a file can open
SHOWN = 30
HELD_OUT = 10

# Nothing is fetched but the answers of the page's own server; text of models and tools is never run.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def page(recorded: Mapping[str, Any] | None = None) -> str:
    """Return the page. `recorded`: answers by their address, for a page without a server."""
    scripts = (file for file in STATIC.iterdir() if file.name.endswith(".js"))
    modules = {
        f"view/{file.name}": "data:text/javascript;base64," + base64.b64encode(file.read_bytes()).decode()
        for file in scripts
    }
    parts = {
        "POLICY": POLICY,
        "STYLE": _text("vendor/uPlot.min.css") + _text("style.css"),
        "UPLOT": _text("vendor/uPlot.iife.min.js"),
        "IMPORTS": json.dumps({"imports": modules}),
        # Within a script element, which no text in it can end. (json.dumps would write NaN.)
        "RECORDED": msgspec.json.encode(recorded).decode().replace("<", "\\u003c"),
    }
    return re.sub("{{([A-Z]+)}}", lambda found: parts[found[1]], _text("page.html"))


def write(path: Path, views: Views) -> bool:
    """Write a page that opens without a server: the curves of all runs, and the newest episodes of each. The
    page says what cannot be read. Returns whether the accounts of all runs are exact."""
    listed = views.answer("runs", {})
    exact = True
    found = {"runs": listed, "saved": time.strftime("%Y-%m-%d %H:%M")}

    def ask(name: str, **query: object) -> Any:
        try:
            return views.answer(name, {key: str(value) for key, value in query.items()})
        except AsyncrlError as error:
            return {"error": str(error)}

    def keep(name: str, **query: object) -> Any:
        answer = found[f"{name}?{urlencode(query)}"] = ask(name, **query)
        return answer

    for run in range(len(listed["runs"])):
        for name in ("rows", "tools", "lanes"):
            keep(name, run=run)
        exact &= keep("overview", run=run).get("conserved", True)
        where = '[["kind","=","held out"]]'
        held_out = ask("episodes", run=run, where=where, order="-step").get("episodes", [])
        known = keep("episodes", run=run).get("episodes", [])
        train = [one for one in known if one["kind"] == "train"]
        known[:] = train + held_out
        for one in train[:SHOWN] + held_out[:HELD_OUT]:
            if one["end"]:
                keep("episode", run=run, uid=one["uid"])
    keep("compare", a=0, b=min(1, len(listed["runs"]) - 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found), "utf-8")
    return exact


def _text(name: str) -> str:
    return (STATIC / name).read_text("utf-8")
