"""What routing is worth: prefix-cache hits and time of multi-turn episodes, sticky against round-robin.

    python tools/bench/routing.py [--urls http://a:30000 http://b:30000] [--repeats 3] [--episodes 16]

Without URLs it starts two servers on this machine's CPU with tools/sglang_cpu and a small random model. An
episode is 8 turns, each followed by the reply of a tool that takes a moment. "hits" is the share of prompt
tokens that servers did not compute; "possible" what it would be had every turn found all that came before it
in its episode. Caches are emptied before every run. Medians of repeats, with the range of the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from common import ROOT, SINGLE_THREAD, table
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import RunConfig, parse
from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.process import reserve_port
from asyncrl.rollout.server_pool import PooledServer, choose
from asyncrl.types import NO_VERSION
from asyncrl.wire.messages.worker_control import EngineEntry, EngineUse

VOCABULARY = 512
TURNS, PROMPT, NEW, REPLY = 8, 256, 48, 128  # tokens
TOOL_SECONDS = 0.1  # on average
MAX_LEN = PROMPT + TURNS * (NEW + REPLY)
POOL = 65536  # tokens of KV per server: nothing has to be evicted
START_SECONDS = 300.0
LABEL = "e0-v0"
CONFIG: RunConfig = parse(
    {
        "name": "routing",
        "model": {"path": "random"},
        "data": {"train": "none"},
        "rollout": {"max_tokens": MAX_LEN, "max_new_tokens": NEW},
        "engine": {"name": "sglang"},
    }
)


Policy = Callable[[list[PooledServer], str | None, Counter[str]], PooledServer]  # as `choose`


def round_robin() -> Policy:
    """The next request goes to the next server."""
    turn = itertools.count()
    return lambda servers, home, prefixes: servers[next(turn) % len(servers)]


@dataclass(frozen=True)
class Figures:
    """One run. `possible`: hits if each episode's own prefix was always cached. `moves`: share of the turns
    after the first that went to another server than the one before."""

    hits: float
    possible: float
    moves: float
    computed: float  # prompt tokens
    seconds: float


class Run:
    """All episodes at once, once."""

    def __init__(self, policy: Policy, urls: list[str], name: str) -> None:
        self.policy, self.name = policy, name
        self.servers = [self._server(url) for url in urls]
        self.homes: dict[str, str] = {}
        self.moves = self.seen = 0

    def _server(self, url: str) -> PooledServer:
        use = EngineUse(url)
        return PooledServer(
            EngineEntry(url, url, "1", NO_VERSION, True),
            SGLangClient(ServerApi(url), CONFIG, VOCABULARY, use),
            use,
        )

    async def figures(self, episodes: int) -> Figures:
        for server in self.servers:
            api = ServerApi(server.entry.url)
            await api.flush_cache(wait=5.0)
            await api.close()
        began = time.perf_counter()
        await asyncio.gather(*(self._episode(index) for index in range(episodes)))
        seconds = time.perf_counter() - began
        for server in self.servers:
            await server.client.close()
        uses = [server.use for server in self.servers]
        prompt, cached = sum(use.prompt_tokens for use in uses), sum(use.cached_tokens for use in uses)
        later = episodes * (TURNS - 1)
        return Figures(cached / prompt, self.seen / prompt, self.moves / later, prompt - cached, seconds)

    async def _episode(self, index: int) -> None:
        session, tool = f"{self.name} {index}", random.Random(index)
        ids, before = tokens(PROMPT, session), None
        for turn in range(TURNS):
            prefixes = Counter(self.homes.values())
            server = self.policy(self.servers, self.homes.get(session), prefixes)
            self.moves += before not in (None, server)
            before, self.homes[session] = server, server.id
            server.running += 1
            try:
                sampled = await server.client.generate(Request(session, ids, Sampling(NEW, ())))
            finally:
                server.running -= 1
            ids += sampled.ids + tokens(REPLY, f"{session} {turn}")
            if turn < TURNS - 1:
                self.seen += len(ids) - REPLY
                await asyncio.sleep(tool.expovariate(1 / TOOL_SECONDS))
        del self.homes[session]


def tokens(count: int, seed: str) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=count))


def measure(make: Callable[[], Policy], urls: list[str], episodes: int, repeats: int, name: str) -> list[str]:
    """A line of the table; the first run, which warms up, is not counted."""
    runs = [
        asyncio.run(Run(make(), urls, f"{name} {repeat}").figures(episodes)) for repeat in range(repeats + 1)
    ][1:]
    hits, possible, moves, computed, seconds = (
        statistics.median(column) for column in zip(*map(astuple, runs), strict=True)
    )
    spread = f"{min(run.seconds for run in runs):.1f} to {max(run.seconds for run in runs):.1f}"
    return [
        name,
        *(f"{share:.1%}" for share in (hits, possible, moves)),
        f"{computed:.0f}",
        f"{seconds:.1f} ({spread})",
    ]


# -- servers of our own ------------------------------------------------------------------------------


def save_model(directory: Path, hidden: int, layers: int) -> None:
    """Random weights; servers work on ids, so that it needs no tokenizer."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2 * MAX_LEN,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)


@contextmanager
def servers(count: int, model: Path) -> Iterator[list[str]]:
    """URLs of servers that end with the context."""
    reserved = [reserve_port("127.0.0.1") for _ in range(count)]
    started = [start(model, port.getsockname()[1]) for port in reserved]
    try:
        for url, process in started:
            asyncio.run(until_ready(url, process, model))
        yield [url for url, _ in started]
    finally:
        for port in reserved:
            port.close()
        for _, process in started:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: all of its processes
            process.wait()


def start(model: Path, port: int) -> tuple[str, subprocess.Popen[bytes]]:
    command = [
        *(str(ROOT / ".venv-sglang/bin/python"), str(ROOT / "tools/sglang_cpu/launch.py")),
        *("--model-path", str(model), "--port", str(port), "--max-total-tokens", str(POOL)),
        *("--weight-version", LABEL, "--skip-tokenizer-init"),
        *("--incremental-streaming-output", "--stream-interval", "8"),
    ]
    with (model / "servers.log").open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | SINGLE_THREAD, start_new_session=True
        )
    return f"http://127.0.0.1:{port}", process


async def until_ready(url: str, process: subprocess.Popen[bytes], model: Path) -> None:
    server = ServerApi(url)
    began = time.monotonic()
    while not (await server.alive() and await server.ready()):
        if process.poll() is not None or time.monotonic() > began + START_SECONDS:
            sys.exit((model / "servers.log").read_text()[-2000:] + f"\n\nserver {url} did not start")
        await asyncio.sleep(0.2)
    await server.close()


def compare(urls: list[str], episodes: int, repeats: int) -> None:
    policies: list[tuple[str, Callable[[], Policy], list[str]]] = [
        (f"sticky, {len(urls)} servers", lambda: choose, urls),
        (f"round-robin, {len(urls)} servers", round_robin, urls),
        ("one server", lambda: choose, urls[:1]),
    ]
    lines = [measure(make, some, episodes, repeats, name) for name, make, some in policies]
    header = ["routing", "hits", "possible", "turns that moved", "prompt tokens computed", "seconds"]
    print(f"{episodes} episodes of {TURNS} turns, median of {repeats} runs\n\n{table(header, lines)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--urls", nargs="+", help=f"running servers with a vocabulary of {VOCABULARY} or more"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=16, help="at once")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    if args.urls:
        compare(args.urls, args.episodes, args.repeats)
        return
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), args.hidden, args.layers)
        with servers(2, Path(directory)) as urls:
            compare(urls, args.episodes, args.repeats)


if __name__ == "__main__":
    main()
