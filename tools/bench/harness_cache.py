"""Share of prompt tokens that a real SGLang server finds in its cache, for coding agents as people run them.

    python tools/bench/harness_cache.py [claude_code codex ...] [--show]

Each harness leads three episodes: of one task, of the same again (a sibling), of another. Their model is a
script, with one or two shell calls a turn. The ids of each prompt, as the tokenizer and the template of Qwen3
write it, are sent to a server with a tiny random model, which says how many it knows; then those of prompt
and answer, which it would know after writing that. A prompt that begins with an earlier one of its episode
"goes on"; others begin a row. `--show` prints where these begin to differ.
Needs `make harnesses-all tokenizers sglang-cpu`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from common import table
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.conversation.chat import Chat
from asyncrl.engines.base import Request
from asyncrl.types import Generation, StopReason, VersionSpan
from tests.fakes import episodes
from tests.fakes.engine import ScriptedEngine
from tests.fakes.fetched import fetched_tokenizer
from tests.integration.test_harnesses import CLIENTS, bench_of, solves
from tests.sglang.server import SGLangServer

TASK = "write fizz.py, run it, show it"
OTHER = "make a file fizz.py, try what it does and print its text"
KINDS = ("goes on", "begins, in a sibling", "begins, in another task")
# tokens of a prompt, and of all
CONTEXT = 65_536
CACHED = 400_000
SECONDS = 580.0  # of an episode


def save_model(path: Path, vocabulary: int) -> None:
    """As little to compute as can be: only the cache counts."""
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


class ServedScript(ScriptedEngine):
    """Writes what the script says, and keeps of each prompt its ids and how many the server knew."""

    def __init__(self, script: Any, url: str, tokenizer: Any) -> None:
        super().__init__(script)
        self.url = url
        self.tokenizer = tokenizer
        self.prompts: list[tuple[tuple[int, ...], int]] = []

    async def generate(self, request: Request) -> Generation:
        self.prompts.append((request.ids, await self.known(request.ids)))
        prompt = self.tokenizer.decode(request.ids)
        # What tools there are stands first for the script; a request without any is for a title.
        text = self.script("{" + prompt if "<tools>" in prompt else prompt)  # type: ignore[arg-type]
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), request.sampling.stop_ids[0])
        await self.known((*request.ids, *ids))
        return Generation(ids, (-0.5,) * len(ids), (VersionSpan(0, len(ids), 0, 0),), StopReason.STOP)

    async def known(self, ids: tuple[int, ...]) -> int:
        """How many of the ids the server has in its cache. Now it has them all."""
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/generate", json=body) as said,
        ):
            return int((await said.json())["meta_info"]["cached_tokens"])


def shares(name: str, url: str, chat: Chat, tokenizer: Any, show: bool) -> list[str]:
    """A row of the table. The server has seen nothing of this harness before."""
    known = Counter[str]()
    sent = Counter[str]()
    longest = 0
    for number, task in enumerate((TASK, TASK, OTHER)):
        bench = bench_of(name, solves(CLIENTS[name]), task, size=CONTEXT)
        bench.context.rules = replace(bench.context.rules, chat=chat)
        bench.engine = engine = ServedScript(bench.text, url, tokenizer)
        bench.finished()
        for at, (ids, found) in enumerate(engine.prompts):
            goes_on = any(ids[: len(earlier)] == earlier for earlier, _ in engine.prompts[:at])
            if not goes_on:
                longest = max(longest, len(ids))
            if not (number or goes_on):
                continue  # what the server cannot know yet
            kind = KINDS[0] if goes_on else KINDS[number]
            known[kind], sent[kind] = known[kind] + found, sent[kind] + len(ids)
            if show and not goes_on:
                before, after = (tokenizer.decode(part) for part in (ids[:found][-20:], ids[found:][:20]))
                print(f"{name}, {kind}: {found} of {len(ids)} known, up to {before!r}; then comes {after!r}")
    return [name, f"{longest:,}", *(f"{known[kind] / sent[kind]:.1%}" for kind in KINDS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("harnesses", nargs="*", default=list(CLIENTS), help="of " + ", ".join(CLIENTS))
    parser.add_argument("--show", action="store_true", help="where first prompts begin to differ")
    options = parser.parse_args()
    episodes.SECONDS = SECONDS
    tokenizer = fetched_tokenizer("qwen3")
    chat = Chat(tokenizer)
    with tempfile.TemporaryDirectory() as work:
        save_model(Path(work, "model"), chat.vocabulary)
        sizes = ("--max-total-tokens", str(CACHED), "--skip-tokenizer-init")
        server = SGLangServer(Path(work, "model"), Path(work, "log"), *sizes)
        try:
            rows = [shares(name, server.url, chat, tokenizer, options.show) for name in options.harnesses]
        finally:
            server.kill()
    print(table(["harness", "tokens of its first prompt", *KINDS], rows))


if __name__ == "__main__":
    main()
