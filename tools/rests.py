"""Let an engine sleep in the midst of a turn of real clients, and print what became of it:
`docs/guides/scale.md`.

    python tools/rests.py --rest 720 [--only claude_code codex …] [--clients .clients]

Each case is one episode over the gateway: a coding agent in its sandbox, with its own timeouts or those that
`rollout.agent` sets, or a program of tools/clients. All cases run at once. A script gives the text of each
turn. A tiny model in an embedded engine decides how long the turn takes: that engine is put to sleep in the
midst of the first turn, as in a shift, and woken with the next version. A streamed turn waits before its
first text, or in the middle of it. Cases whose programs are not there (`make harnesses`, `make clients`) are
left out. Exit code 1: a turn was sampled again, or an episode failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import clients
import torch
from aiohttp import web
from fetch_harnesses import PROGRAMS, TARGET
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.fakes and tools

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.engine import build
from asyncrl.gateway import Agent, Endpoint, Gateway, load_agent, load_untrained
from asyncrl.gateway.exchange import Exchange
from asyncrl.types import Generation, PolicyVersion, Sample, StopReason
from asyncrl.weights.manifest import Manifest, WeightsRef
from asyncrl.wire.messages.shared import Loaded
from asyncrl.wire.messages.worker import Finished
from tests.fakes import episodes
from tests.fakes.agents import AgentBench, message
from tests.fakes.chat import call, encode
from tests.fakes.engine import ScriptedEngine, _watched, generation
from tests.fakes.training import save_tiny_qwen
from tests.fakes.weights import publish

SPARE = 300.0  # seconds of an episode beside the rest
# Prompt and length of the turn in which the engine falls asleep.
PROMPT = (1, 2, 3)
TOKENS = 1000
COLUMNS = ("client", "asks", "case", "took", "pings", "asked again after", "the turn", "episode")
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
BEAT = re.compile(rb":\n\n|event: ping\n|event: response\.in_progress\n|\s+$")
SHELLS = {  # the tool that runs a command, with its argument
    "claude_code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "opencode": ("bash", "command"),
    "qwen_code": ("run_shell_command", "command"),
    "mini_swe_agent": ("bash", "command"),
}
ENDS = {"mini_swe_agent": call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')}
IMPATIENT = "aiohttp"
LIBRARIES = {  # cases that are streamed, and others
    "openai_python": (["stream"], ["chat", "responses"]),
    "anthropic_python": (["stream"], ["create"]),
    "openai_node": (["stream", "responses.stream"], ["chat", "responses"]),
    "anthropic_node": (["stream"], ["create"]),
}


@dataclass(frozen=True)
class Case:
    """A client's episode.

    `middle`: the engine rests when half of the first turn is durable, and streamed. `broken`: the first
    stream breaks off, so that the client requests the turn again.
    """

    client: str
    name: str
    agent: Agent
    script: Callable[[str], str]
    middle: bool = False
    broken: bool = False


# -- the engine --------------------------------------------------------------------------------------------


class Resting(ScriptedEngine):
    """Writes the script's turns; each takes as long as a turn of `real` takes, which falls asleep in the
    first: its tokens are then of both versions. `middle`: half of that turn is written, and durable, before.
    A request that comes again with that half gets the other one."""

    def __init__(self, script: Callable[[Request], str], middle: bool, model: str) -> None:
        super().__init__(script)
        self.real = build(model, "float32", 4, 2048)
        self._middle = middle
        self._durable: tuple[int, ...] = ()  # the prompt of the first turn and its half
        self.spans: set[tuple[int, ...]] = set()
        self.went_on = self.anew = 0  # requests that came again

    async def generate(self, request: Request) -> Generation:
        first = self.requests[0] if self.requests else request
        self.anew += request.ids in [earlier_request.ids for earlier_request in self.requests]
        self.requests.append(request)
        half = self._durable[len(first.ids) :] if request.ids == self._durable else ()
        self.went_on += bool(half)

        text = self.script(first if half else request)[len(half) :]
        if request is first and self._middle:
            self._durable = first.ids + encode(text[: len(text) // 2])
            if request.stop_check:
                request.stop_check(encode(text[: len(text) // 2]))
            await request.on_part(generation(text[: len(text) // 2], 0, StopReason.ABORT))

        tokens = TOKENS if not self._version else 1
        session = f"{request.session} {len(self.requests)}"
        slow = await self.real.generate(Request(session, PROMPT, Sampling(tokens, ()), 0))
        self.spans.add(tuple(span.version for span in slow.spans))

        return await _watched(request, generation(text, self._version))

    async def load(self, ref: WeightsRef) -> Manifest:
        await self.real.load(ref)
        return await super().load(ref)

    async def sleep(self) -> None:
        await self.real.sleep()
        await super().sleep()

    async def close(self) -> None:
        await self.real.close()


class RestBench(AgentBench):
    """An episode in whose first turn the engine sleeps for `rest_seconds`."""

    def __init__(self, case: Case, rest_seconds: float, model: str, ref: WeightsRef) -> None:
        names = ("asyncrl.gateway.harnesses:is_tool_of_claude_code",) if case.client == "claude_code" else ()
        limits = {"max_tokens": 1 << 20, "max_turns": 16, "max_rows": 16, "episode_timeout": SPARE}
        super().__init__(case.agent, case.script, limits=limits, is_untrained=load_untrained(names))
        self.engine = self.resting = Resting(self.script, case.middle, model)
        self.gateway = self.noting = NotingGateway(int(case.broken))
        self.rest_seconds = rest_seconds
        self._ref = ref

    async def run(self, frames: Sequence[bytes] = (), **assigned: Any) -> None:
        async def report(loaded: Loaded) -> None: ...

        beside = [asyncio.create_task(self.sampler.run(report)), asyncio.create_task(self._shift())]
        try:
            await super().run(frames, **assigned)
        finally:
            for task in beside:
                task.cancel()
            await self.resting.close()

    async def _shift(self) -> None:
        while not self.resting.real.tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await self.sampler.sleep()
        await asyncio.sleep(self.rest_seconds)
        self.sampler.loads.offer_version(self._ref, False)


# -- the gateway -------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request for a turn: its path, whether the answer is streamed, when the request came, and how many
    notices said that the turn goes on."""

    path: str
    stream: bool
    at: float = field(default_factory=time.monotonic)
    beats: int = 0


ASKED: ContextVar[Asked] = ContextVar("ASKED")


class NotingGateway(Gateway):
    """Records requests.

    `breaks`: the number of streams that are still to break off after their first event.
    """

    def __init__(self, breaks: int) -> None:
        super().__init__()
        self.records: list[Asked] = []
        self.breaks = breaks

    async def _handle_exchange(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super()._handle_exchange(request)
        except StreamBreaks:
            return await broken(request)

    async def _read_exchange(self, request: web.Request, *arguments: Any) -> Exchange:
        exchange = await super()._read_exchange(request, *arguments)
        record = Asked(request.path, bool(exchange.request.stream))
        if record.stream and self.breaks:
            self.breaks -= 1
            raise StreamBreaks
        self.records.append(record)
        ASKED.set(record)
        return exchange


class StreamBreaks(Exception):
    """The stream of this request is to break off."""


async def broken(request: web.Request) -> web.StreamResponse:
    """Stream an answer of Anthropic's API without its end."""
    message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
    usage = {"input_tokens": 1, "output_tokens": 0}
    event = {"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write_eof(b"event: message_start\ndata: " + json.dumps(event).encode() + b"\n\n")
    return response


def note_beats() -> None:
    write = web.StreamResponse.write

    async def noted(response: web.StreamResponse, data: Any) -> None:
        if (record := ASKED.get(None)) is not None and BEAT.match(data):
            record.beats += 1
        await write(response, data)

    web.StreamResponse.write = noted  # type: ignore[assignment]


# -- the cases ---------------------------------------------------------------------------------------------


def cases(only: Sequence[str], directory: Path, rest_seconds: float) -> Iterator[Case]:
    if IMPATIENT in only:
        limit = min(300.0, rest_seconds / 2)  # as aiohttp's clients have
        yield Case(IMPATIENT, f"total {limit:g} s", partial(impatient, limit), adds, middle=True)

    for name in filter(SHELLS.__contains__, only):
        if not (TARGET / PROGRAMS[name]).exists():
            continue
        options: dict[str, Any] = {"program": str(TARGET / PROGRAMS[name]), "setup_seconds": SPARE}
        case = partial(Case, name, agent=load_agent({name: options}), script=partial(looks, name))
        is_whole = name == "mini_swe_agent"
        yield case("whole", middle=True) if is_whole else case("streamed")

        if not is_whole:
            yield case("streamed, middle", middle=True)
        if name == "claude_code":
            yield case("whole", middle=True, broken=True)

    for name in filter(LIBRARIES.__contains__, only):
        library_directory = directory.resolve() / name
        library = clients.LIBRARIES[name]
        if name.endswith("_python"):
            library_directory = Path(sys.prefix)
        elif not clients.installed(library, library_directory):
            continue

        streamed, other_cases = LIBRARIES[name]
        for case_name in (*streamed, *other_cases):
            middle = case_name in other_cases
            yield Case(
                name, case_name, program(name, library_directory, case_name), library.cases[case_name], middle
            )

        for case_name in streamed:
            yield Case(
                name,
                f"{case_name}, middle",
                program(name, library_directory, case_name),
                library.cases[case_name],
                middle=True,
            )


async def impatient(limit: float, sample: Sample, endpoint: Endpoint) -> None:
    """Play a client that gives up, whatever arrives, and sends its request again."""
    answer = None
    while answer is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                answer = await message(endpoint, "q")


def adds(prompt: str) -> str:
    return clients.ANSWER


def looks(name: str, prompt: str) -> str:
    """Runs a command, then answers."""
    if prompt.count("LOOKED") > prompt.count("echo LOOKED"):
        return "all done" + ENDS.get(name, "")
    tool, argument = SHELLS[name]
    line = {argument: "echo LOOKED", "description": "It looks."}
    return "I look around in this directory. " + call(tool, json.dumps(line))


def program(name: str, directory: Path, case: str) -> Agent:
    async def agent(sample: Sample, endpoint: Endpoint) -> dict[str, str]:
        return {"said": await clients.talk(name, directory, case, endpoint)}

    return agent


def play(case: Case, bench: RestBench) -> tuple[str, bool]:
    """Return the line of a case, and whether the case passed."""
    began = time.monotonic()
    try:
        end: Any = bench.play()
    except TimeoutError:
        end = None

    took = time.monotonic() - began
    records = bench.noting.records
    engine = bench.resting
    later = [record.at - records[0].at for record in records[1:]]
    both = any(len(set(versions)) > 1 for versions in engine.spans)
    passed = isinstance(end, Finished) and (both or engine.went_on > 0) and not engine.anew

    cells = (
        case.client,
        f"{records[0].path.removeprefix('/v1/')}, {'streamed' if records[0].stream else 'whole'}"
        if records
        else "",
        case.name,
        f"{took:.0f} s",
        str(sum(record.beats for record in records)),
        ", ".join(f"{after:.0f} s" for after in later if after < bench.rest_seconds) or "no",
        "**sampled anew**" if engine.anew else "went on" if engine.went_on else "as sampled",
        f"{len(bench.turns)} turns"
        if isinstance(end, Finished)
        else f"**failed**: {getattr(end, 'detail', '')}",
    )
    return f"| {' | '.join(cells)} |".replace("\n", " "), passed


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    names = [*SHELLS, *LIBRARIES, IMPATIENT]
    parser.add_argument("--rest", type=float, default=720.0, help="how long the engine sleeps, in seconds")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT")
    parser.add_argument("--clients", type=Path, default=clients.ROOT / ".clients")
    options = parser.parse_args()

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    episodes.SECONDS = options.rest + 2 * SPARE
    note_beats()
    print(HEAD, flush=True)

    chosen = list(cases(options.only, options.clients, options.rest))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(chosen)) as pool:
        model = save_tiny_qwen(Path(folder) / "model")
        weights = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
        ref = publish(weights, Path(folder) / "published", PolicyVersion(0, 1))
        benches = [RestBench(case, options.rest, model, ref) for case in chosen]  # not in threads
        results = list(pool.map(play, chosen, benches))

    print("\n".join(line for line, _ in results), flush=True)
    return int(not all(ok for _, ok in results))


if __name__ == "__main__":
    sys.exit(main())
