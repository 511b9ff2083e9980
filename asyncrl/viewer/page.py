"""Makes the page: a single HTML file with all scripts inside, served or written to disk with answers.

The scripts are modules that import each other as `view/NAME.js`; an import map gives the location of each
module: here, as data. So nothing is built, and a page in a file works like a served page.
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
from asyncrl.observe.words import plain_words
from asyncrl.viewer.views import Views

STATIC = files("asyncrl.viewer") / "static"
# Episodes of each run that a page in a file can open.
SHOWN_EPISODES = 30
SHOWN_HELD_OUT = 10

# Nothing is fetched but the answers of the page's own server; text of models and tools is never run.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def build_page(recorded: Mapping[str, Any] | None = None) -> str:
    """Return the page. `recorded`: answers by address, for a page without a server."""
    scripts = (file for file in STATIC.iterdir() if file.name.endswith(".js"))
    modules = {
        f"view/{file.name}": "data:text/javascript;base64," + base64.b64encode(file.read_bytes()).decode()
        for file in scripts
    }
    template_values = {
        "POLICY": CONTENT_POLICY,
        "STYLE": _static_text("vendor/uPlot.min.css") + _static_text("style.css"),
        "UPLOT": _static_text("vendor/uPlot.iife.min.js"),
        "IMPORTS": json.dumps({"imports": modules}),
        # Inside a script element, which an unescaped "<" could end. (json.dumps would write NaN.)
        "WORDS": msgspec.json.encode(plain_words()).decode().replace("<", "\\u003c"),
        "RECORDED": msgspec.json.encode(recorded).decode().replace("<", "\\u003c"),
    }

    return re.sub("{{([A-Z]+)}}", lambda match: template_values[match[1]], _static_text("page.html"))


def write_page(path: Path, views: Views) -> bool:
    """Write a page that opens without a server: the curves of all runs, and the newest episodes of each run.
    The page says which parts cannot be read. Returns whether the accounts of all runs are exact."""
    listed_runs = views.answer("runs", {})
    all_conserved = True
    answers = {"runs": listed_runs, "saved": time.strftime("%Y-%m-%d %H:%M")}

    def answer_or_error(name: str, **query: object) -> Any:
        try:
            return views.answer(name, {key: str(value) for key, value in query.items()})
        except AsyncrlError as error:
            return {"error": str(error)}

    def keep_answer(name: str, **query: object) -> Any:
        answer = answer_or_error(name, **query)
        answers[f"{name}?{urlencode(query)}"] = answer
        return answer

    for run in range(len(listed_runs["runs"])):
        for name in ("rows", "tools", "lanes"):
            keep_answer(name, run=run)
        all_conserved &= keep_answer("overview", run=run).get("conserved", True)

        held_out_condition = '[["kind","=","held out"]]'
        held_out_answer = answer_or_error("episodes", run=run, where=held_out_condition, order="-step")
        held_out = held_out_answer.get("episodes", [])
        episodes_answer = keep_answer("episodes", run=run)
        listed_episodes = episodes_answer.get("episodes", [])
        train_episodes = [episode for episode in listed_episodes if episode["kind"] == "train"]
        if "episodes" in episodes_answer:
            episodes_answer["episodes"] = train_episodes + held_out

        for episode in train_episodes[:SHOWN_EPISODES] + held_out[:SHOWN_HELD_OUT]:
            if episode["end"]:
                keep_answer("episode", run=run, uid=episode["uid"])

    keep_answer("compare", a=0, b=min(1, len(listed_runs["runs"]) - 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(build_page(answers), "utf-8")
    return all_conserved


def _static_text(name: str) -> str:
    return (STATIC / name).read_text("utf-8")
