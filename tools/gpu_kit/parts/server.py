"""What does an SGLang server do beside the trainer on one GPU: how fast does it sample, does it compute the
trainer's log-probs, also after updates, and how soon does it sleep and wake?

A server of Qwen3-0.6B's shape with random weights, in bfloat16, with CUDA graphs where the launcher makes
them. Tokens per second: of 1, 16, 64 and 256 streams of 128 new tokens each, the second time, through the
product's client. An update: the trainer changes all weights and publishes them as in a run, to /dev/shm; the
server loads the files while streams go on. Stall: the longest time in which no stream had a new token. The
noise floor of log-probs is the trainer's own rounding: how far they are from those in float32 with the same
weights. Then the server sleeps and wakes three times in the midst of streams; freed memory is what the driver
counts (as nvidia-smi does), beside the sizes of weights and KV cache. A second server gets a LoRA adapter.
Last, tokens per second of the embedded engine, warm."""

from __future__ import annotations

import asyncio
import math
import queue
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import psutil
import torch
from msgspec import structs
from torch.distributed.tensor import DTensor

from asyncrl.config import RunConfig, parse
from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.process import ServerProcess
from asyncrl.engines.sglang.server import Attached, attach, build_loader
from asyncrl.engines.torch.engine import build
from asyncrl.engines.torch.recorded import RECORD_AFTER
from asyncrl.server_supervisor.supervisor import first_finished
from asyncrl.trainer.model import adapter_shards, load_policy, score_ids
from asyncrl.trainer.publishing import PublisherThread, Publishing
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from asyncrl.types import Generation, PolicyVersion
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.messages.trainer import Published
from parts.bundle import NOT_THERE, has_saver, server_command
from parts.common import (
    EXACT,
    FREED,
    MB,
    Context,
    Finding,
    Timing,
    exact_float32,
    failure,
    release,
    timed,
    used_memory,
)

SECONDS = 270
SMALL_SECONDS = 420.0
GOAL = "10,000 tokens/s at 64; log-probs within twice the trainer's rounding; asleep in 2 s, awake in 3 s"
OPTIONAL = True

READY_S = 45.0
SLEEP_S = 2.0
WAKE_S = 3.0
JUDGED_STREAMS = 64
TOKENS_PER_S = 10_000.0
NOISES = 2.0  # a log-prob in bfloat16 may differ by so many times the trainer's rounding
COPIES = 1.2  # of the same bytes, in the time that the trainer waits for a version
SLEEPS = 3
RANK = 8  # of adapters
ATTACHMENT = "kit"  # with the version it names adapters on the server
PROMPT = 32  # tokens
BEGUN = 40  # tokens of all streams together, when they are paused or updated
START_S = 90.0  # limit for the start of a server
NO_DECODE_GRAPHS = {"cuda-graph-backend-decode": "disabled"}  # server arguments of a second try
ANNOUNCED_S = 20.0  # until a version is written
CLOSE_S = 3.0  # limit for the end of a server, and again for that of publishing
END_S = 2 * CLOSE_S + 2.0  # of a step's time, to end both and give memory back
LEAST_S = 20.0  # that a second server must have
# of the embedded engine
WARM_STEPS = 20
MEASURED_STEPS = 100


class Sizes(NamedTuple):
    """`streams`: at once, one number after another, of `new` tokens each. `held_open`: streams that are under
    way during an update or a sleep, of so many tokens."""

    streams: tuple[int, ...]
    new: int
    held_open: int
    updated_tokens: int
    slept_tokens: int
    sessions: tuple[int, ...]


LARGE = Sizes((1, 16, 64, 256), 128, 16, 1500, 400, (16, 64))
SMALL = Sizes((1, 2, 4), 16, 2, 200, 200, (2, 4))


class Stage(NamedTuple):
    """Something to measure, in at most so many seconds; on a CPU in what the step has left."""

    name: str
    seconds: float
    measure: Callable[[], Awaitable[list[Finding]]]


def run(context: Context) -> Iterator[Finding]:
    command = server_command(context)
    if command is None:
        yield Finding("server", NOT_THERE)
    else:
        yield from measure_server(context, command)
        if context.left() < LEAST_S:
            yield Finding("adapters", "not run: no time left for a second server")
        else:
            yield from measure_adapters(context, command)
    yield from measure_embedded(context)


def visit_unpack(context: Context) -> Iterator[Finding]:
    """Unpack SGLang for the steps that come later, and write its bytecode."""
    began = time.monotonic()
    command = server_command(context)
    value = NOT_THERE if command is None else f"{time.monotonic() - began:.0f} s"
    yield Finding("SGLang unpacked", value, ok=command is not None)


def visit_server(context: Context) -> Iterator[Finding]:
    saved_model(context)  # while the other lane unpacks SGLang
    yield from _visited(context, measure_server)


def visit_adapters(context: Context) -> Iterator[Finding]:
    yield from _visited(context, measure_adapters)


def visit_embedded(context: Context) -> Iterator[Finding]:
    yield from measure_embedded(context)


def _visited(
    context: Context, measure: Callable[[Context, list[str]], Iterator[Finding]]
) -> Iterator[Finding]:
    """On a visit everything is brought along, so a `not run` is a failure."""
    command = server_command(context)
    findings = [Finding("server", NOT_THERE)] if command is None else measure(context, command)
    for finding in findings:
        yield replace(finding, ok=False) if finding.value.startswith("not run") else finding


def served_dtype(context: Context) -> str:
    return "float32" if context.small else "bfloat16"


def saved_model(context: Context) -> Path:
    """A directory with the model that all servers and engines of this part begin with."""
    path = context.random_model("qwen3-0.6b", dtype=served_dtype(context))
    release(context)  # the model is made on the GPU
    return path


# -- servers -----------------------------------------------------------------------------------------------


def measure_server(context: Context, command: list[str]) -> Iterator[Finding]:
    saver = has_saver(context, command)
    yield from _measure(context, command, rank=0, saver=saver)
    if not saver:
        yield Finding("sleep", "not run: the server's environment lacks torch_memory_saver (pip install it)")


def measure_adapters(context: Context, command: list[str]) -> Iterator[Finding]:
    for finding in _measure(context, command, rank=RANK, saver=False):
        yield replace(finding, name=f"adapters: {finding.name}")


def _measure(context: Context, command: list[str], *, rank: int, saver: bool) -> Iterator[Finding]:
    """Start a server, and yield what each stage finds; a stage that fails does not end the next ones."""
    world = join_ranks(0, 1, device=context.kind)
    pair: ServerAndTrainer | None = None
    with asyncio.Runner() as runner:
        try:
            began = time.monotonic()
            pair = ServerAndTrainer(context, world, command, rank, saver)
            yield Finding("trainer's side", f"made in {time.monotonic() - began:.1f} s")
            yield from _start(runner, context, pair)
            for stage in pair.stages:
                try:
                    yield from _finish(runner, context, stage)
                except Exception as error:
                    yield failure(stage.name, error)
        except Exception as error:
            yield failure("start", error)
        finally:
            if pair is not None:
                runner.run(pair.close())
            leave_ranks()
            release(context)


def _start(runner: asyncio.Runner, context: Context, pair: ServerAndTrainer) -> Iterator[Finding]:
    """Start the server. On a GPU, where that fails, try again without CUDA graphs, so that the stages after
    it still have numbers. Raises what the last try did."""
    start = Stage("start", START_S, pair.start)
    try:
        yield from _finish(runner, context, start)
    except Exception as error:
        if context.small or context.left() < LEAST_S + END_S:
            raise
        yield failure(start.name, error)
        runner.run(pair.stop_server())
        pair.leave_out_cuda_graphs()
        yield Finding("second start", "without CUDA graphs: --cuda-graph-backend-decode disabled")
        yield from _finish(runner, context, start)


def _finish(runner: asyncio.Runner, context: Context, stage: Stage) -> list[Finding]:
    """Measure the stage. TimeoutError: the stage took longer than it may, or than is left."""
    left = max(1.0, context.left() - END_S)
    seconds = left if context.small else min(stage.seconds, left)

    async def stage_findings() -> list[Finding]:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await stage.measure()
        except TimeoutError as error:
            if not limit.expired():  # a deadline within the stage, which says more
                raise
            raise TimeoutError(f"not over after {seconds:.0f} s") from error

    return runner.run(stage_findings())


class ServerAndTrainer:
    """A server and the trainer's policy, which publishes its weights to it. `rank`: of adapters; then the
    server gets only these. `saver`: the server is to sleep."""

    def __init__(self, context: Context, world: World, command: list[str], rank: int, saver: bool) -> None:
        self.context = context
        self.rank = rank
        self.saver = saver
        self.sizes = SMALL if context.small else LARGE
        self.dtype = served_dtype(context)
        self.config = _configuration(context, command, rank, saver)
        self.world = world
        self.policy = load_policy(self.config.model, world)
        exact = structs.replace(self.config.model, dtype="float32")
        self.exact = None if context.small else load_policy(exact, world)
        self.publisher = PublisherHere(self.config, world, self.policy)
        torch.manual_seed(0)
        self.ids = tuple(torch.randint(10, 300, (64,)).tolist())
        self.process: ServerProcess | None = None
        self.server: Attached | None = None
        self.loader: Any = None
        self.clients: list[SGLangClient] = []
        self.used_before = server_mb(context)

    @property
    def stages(self) -> list[Stage]:
        stages = [Stage("first version", 30.0, self.first_version)]
        if not self.rank:
            stages += [Stage(f"speed, {n} at once", 20.0, partial(self.speed, n)) for n in self.sizes.streams]
        stages.append(Stage("update", 40.0, self.update))
        if self.saver:
            stages.append(Stage("sleep", 60.0, self.sleep_and_wake))
        return stages

    async def start(self) -> list[Finding]:
        """Until the server is ready, as its supervisor waits for it."""
        began = time.monotonic()
        process = self.process = await ServerProcess.start(self.config, 0, "127.0.0.1", self.context.work)

        async def ended() -> Any:
            raise RuntimeError(
                f"the server ended with {await process.wait_ended()}; its output is in the log"
            )

        server = self.server = await first_finished(
            attach(self.config, process.url, started_here=True), ended()
        )
        process.note_ready()
        seconds = time.monotonic() - began
        self.loader = build_loader(self.config, 0, server, ATTACHMENT)

        ready = self.context.judged(seconds <= READY_S)
        description = f"{server.description}, {self.dtype}"
        server_memory = server_mb(self.context) - self.used_before
        tokens = server.info.max_total_num_tokens or 0
        memory = f"{server_memory:,.0f} MB more are used; weights and a KV cache of {tokens:,} tokens take "
        memory += f"{self.estimated_mb():,.0f} MB"
        return [
            Finding("ready", f"{seconds:.0f} s; {description}", f"{READY_S:.0f} s", ready),
            Finding("memory of the server", memory, note="the rest: CUDA's context, graphs, workspaces"),
            await self.logprob_gap("log-probs, as started"),
        ]

    def leave_out_cuda_graphs(self) -> None:
        """Of the server that is started next."""
        engine = self.config.engine
        engine = structs.replace(engine, server_args=engine.server_args | NO_DECODE_GRAPHS)
        self.config = structs.replace(self.config, engine=engine)

    async def stop_server(self) -> None:
        """End the server, then what is connected to it: calls that a hanging server does not answer would
        wait for their own deadlines. What CLOSE_S do not suffice for is left to the end of the part."""
        clients = self.clients
        loader = self.loader
        process = self.process
        self.clients = []
        self.loader = None
        self.process = None
        try:
            async with asyncio.timeout(CLOSE_S):
                if process is not None:
                    await process.stop()
                for client in clients:
                    await client.close()
                if loader is not None:
                    await loader.close()
        except TimeoutError:
            print(f"the server has not ended within {CLOSE_S:.0f} s", flush=True)

    async def close(self) -> None:
        try:
            await self.stop_server()
        finally:
            self.publisher.close()

    def estimated_mb(self) -> float:
        """Weights and KV cache of the server, by their sizes."""
        assert self.server is not None, "the server has started"
        sizes = self.policy.lm.config
        cache = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
        cache *= self.server.info.max_total_num_tokens or 0
        weights = sum(parameter.numel() for parameter in self.policy.lm.parameters())
        return (cache + weights) * (4 if self.dtype == "float32" else 2) / MB

    # -- log-probs -----------------------------------------------------------------------------------------

    def score(self, policy: Any) -> tuple[float, ...]:
        with torch.no_grad(), exact_float32():
            return score_ids(policy, self.ids, self.world.device)

    async def logprob_gap(self, name: str) -> Finding:
        """The largest difference of a log-prob between server and trainer."""
        trainer = self.score(self.policy)
        rounding = 0.0 if self.exact is None else largest_gap(trainer, self.score(self.exact))
        gap = largest_gap(await self.loader.score(self.ids), trainer)
        limit = EXACT if self.exact is None else NOISES * rounding
        value = f"at most {gap:.2g} nats" + (f"; rounding {rounding:.2g}" if rounding else "")
        return Finding(name, value, f"{limit:.2g}", gap <= limit)

    # -- streams -------------------------------------------------------------------------------------------

    def client(self) -> SGLangClient:
        """As workers have it, told of the version that was loaded last."""
        client = SGLangClient(self.loader.api, self.config, self.policy.vocabulary, salt=ATTACHMENT)
        client.mark_version(self.loader.loaded.version)
        self.clients.append(client)
        return client

    def streams(self, client: SGLangClient, tokens: int) -> list[asyncio.Task[Generation]]:
        """Greedy, and the same ones each time; the server ends none of them."""
        requests = (
            Request(f"{k}", self.ids[k : k + PROMPT], Sampling(tokens, (), 0.0))
            for k in range(self.sizes.held_open)
        )
        return [asyncio.create_task(client.generate(request)) for request in requests]

    @asynccontextmanager
    async def open_streams(
        self, client: SGLangClient, tokens: int
    ) -> AsyncIterator[list[asyncio.Task[Generation]]]:
        """Streams that have some tokens. After the block none of them goes on, also when it has failed: they
        would slow down the next stage."""
        before = client.use.tokens
        streams = self.streams(client, tokens)
        try:
            while client.use.tokens < before + BEGUN and not any(stream.done() for stream in streams):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            yield streams
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams, timeout=CLOSE_S)

    # -- what is measured ----------------------------------------------------------------------------------

    async def speed(self, streams: int) -> list[Finding]:
        """Tokens per second of so many streams, once they have run before: the server's work, and that of
        the client, which is one process."""
        client = self.client()
        rates = list[float]()
        busy = 0.0
        prompts = torch.randint(10, 300, (streams, PROMPT), generator=torch.Generator().manual_seed(streams))
        for _ in range(2):
            requests = [
                Request(f"{index}", tuple(ids), Sampling(self.sizes.new, ()))
                for index, ids in enumerate(prompts.tolist())
            ]
            before = client.use.tokens
            began = time.perf_counter()
            cpu = time.process_time()
            await asyncio.gather(*map(client.generate, requests))
            seconds = time.perf_counter() - began
            busy = (time.process_time() - cpu) / seconds
            rates.append((client.use.tokens - before) / seconds)
        value = f"{rates[-1]:,.0f} tokens/s (the first time {rates[0]:,.0f})"
        note = f"{self.sizes.new} new tokens each; the client's process was busy for {busy:.0%} of the time"
        name = f"speed, {streams} at once"
        if streams != JUDGED_STREAMS:
            return [Finding(name, value, note=note)]
        return [Finding(name, value, f"{TOKENS_PER_S:,.0f}", rates[-1] >= TOKENS_PER_S, note)]

    async def first_version(self) -> list[Finding]:
        """Publish the weights as they are, and load them."""
        pushed = await asyncio.to_thread(self.publisher.publish)
        began = time.perf_counter()
        await self.loader.load(pushed.ref)
        loading_s = time.perf_counter() - began
        value = f"the trainer waits {pushed.waited_s:.3f} s, {pushed.write_s:.2f} s to write "
        value += f"{pushed.bytes / MB:,.0f} MB, {loading_s:.2f} s to load them"
        return [
            Finding("push of the first version", value),
            await self.logprob_gap("log-probs, first version"),
        ]

    async def update(self) -> list[Finding]:
        """Change the weights, publish them, and have them loaded while streams go on. Streams of an adapter
        keep theirs to their end."""
        client = self.client()
        await asyncio.to_thread(self.change_weights)
        pushed = await asyncio.to_thread(self.publisher.publish)
        async with self.open_streams(client, self.sizes.updated_tokens) as streams:
            silence = asyncio.create_task(longest_silence(client, streams))
            began = time.perf_counter()
            await self.loader.load(pushed.ref)
            loading_s = time.perf_counter() - began
            opened = sum(not stream.done() for stream in streams)
            label = await self.loader.label()
            turns = await asyncio.gather(*streams)
        gap = await self.logprob_gap("log-probs, updated")

        finished_turns = sum(len(turn.ids) == self.sizes.updated_tokens for turn in turns)
        copied = plain_copy(self.context, pushed.bytes).seconds
        copies = pushed.waited_s / copied
        # An adapter is so small that the calls take longer than its copy.
        judged = None if self.rank else self.context.judged(copies <= COPIES)
        total = pushed.waited_s + pushed.write_s + loading_s
        push = f"{total:.2f} s: the trainer waits {pushed.waited_s:.3f} s, {pushed.write_s:.2f} s to write "
        push += f"{pushed.bytes / MB:,.0f} MB, {loading_s:.2f} s to load them; then {label}"
        waits = f"{copies:.2f} copies of as many bytes in one tensor, {copied:.3f} s each"
        streaming = f"{opened} of {len(streams)} open when the load was over, {finished_turns} came to their "
        streaming += f"end; the longest time without a token {await silence:.2f} s"
        return [
            Finding("push of an update", push, pushed.ref.label, label == pushed.ref.label),
            Finding("the trainer's wait for an update", waits, f"{COPIES} copies", judged),
            Finding("streams during an update", streaming, "all", opened == finished_turns == len(streams)),
            gap,
        ]

    def change_weights(self) -> None:
        """A quite different version, of all weights or of the adapters."""
        adapters = self.policy.adapters
        trained = adapter_shards(self.policy).values() if adapters else self.policy.lm.parameters()
        with torch.no_grad():
            for parameter in trained:
                shard: Any = cast(DTensor, parameter).to_local()
                scale = 1.0 if adapters else shard.std(correction=0)
                shard += 0.05 * scale * torch.randn_like(shard)
            if self.exact is not None:
                self.exact.lm.load_state_dict(self.policy.lm.state_dict())

    async def sleep_and_wake(self) -> list[Finding]:
        """In the midst of streams, several times, with the version that was published last."""
        ref = self.loader.loaded
        await self.loader.load(ref)  # which empties the cache
        client = self.client()
        first_turn = await self.decoded(client)
        expected = await asyncio.gather(*self.streams(client, self.sizes.slept_tokens))
        asleep_s = list[float]()
        awake_s = list[float]()
        freed_mb = list[float]()
        gaps = list[float]()
        opened = silent = exact = 0
        after_waking: list[Finding] = []
        for _ in range(SLEEPS):
            async with self.open_streams(client, self.sizes.slept_tokens) as streams:
                used = server_mb(self.context)
                client.set_asleep(True)
                began = time.perf_counter()
                await self.loader.sleep()
                asleep_s.append(time.perf_counter() - began)
                await asyncio.sleep(0.3)  # for what is on its way
                tokens = client.use.tokens
                freed_mb.append(used - server_mb(self.context))
                await asyncio.sleep(0.3)
                opened += sum(not stream.done() for stream in streams)
                silent += client.use.tokens == tokens
                began = time.perf_counter()
                await self.loader.load(ref)
                awake_s.append(time.perf_counter() - began)
                client.set_asleep(False)
                turns = await asyncio.gather(*streams)
            exact += sum(a.ids == b.ids for a, b in zip(turns, expected, strict=True))
            again = await self.decoded(client)
            same_ids = again.ids == first_turn.ids
            gaps.append(largest_gap(again.logprobs, first_turn.logprobs) if same_ids else math.inf)
            after_waking.append(await self.logprob_gap("log-probs, after waking"))

        count = SLEEPS * self.sizes.held_open
        judged = self.context.judged
        estimated = self.estimated_mb()
        freed = min(freed_mb)
        share = f"{freed:,.0f} of {estimated:,.0f} MB of weights and KV cache"
        streaming = f"{opened} of {count} open; silent in {silent} of {SLEEPS} sleeps; {exact} have the "
        streaming += "tokens of streams without a sleep"
        fine = opened == count and silent == SLEEPS and (exact == count or self.exact is not None)
        failed_findings = [finding for finding in after_waking if not finding.ok]
        return [
            Finding("sleep", seconds(asleep_s), f"{SLEEP_S:.0f} s", judged(max(asleep_s) <= SLEEP_S)),
            Finding("wake", seconds(awake_s), f"{WAKE_S:.0f} s", judged(max(awake_s) <= WAKE_S)),
            Finding("freed by a sleep, at least", share, f"{FREED:.0%}", judged(freed >= FREED * estimated)),
            Finding("streams during sleeps", streaming, "all open", fine, "of bfloat16 rounding may decide"),
            Finding(
                "decoding after waking, as before",
                f"{max(gaps):.1e} nats, {len(first_turn.ids)} tokens",
                f"{EXACT:g}",
                max(gaps) <= EXACT,
                "by CUDA graphs, where the server has some",
            ),
            failed_findings[0] if failed_findings else after_waking[-1],
        ]

    async def decoded(self, client: SGLangClient) -> Generation:
        """One greedy turn of a server whose cache is empty."""
        return await client.generate(Request("decoded", self.ids[::-1][:20], Sampling(64, (), 0.0)))


class Pushed(NamedTuple):
    """A version that is written. `waited_s`: until the device was free again; `write_s`: for the files."""

    ref: WeightsRef
    waited_s: float
    write_s: float
    bytes: int


class PublisherHere:
    """A rank's publishing, which announces to this process only."""

    def __init__(self, config: RunConfig, world: World, policy: Any) -> None:
        self._announced: queue.Queue[tuple[WeightsRef, float]] = queue.Queue()
        self._world = world
        self._step = 0
        self._directory: Path | None = None  # of versions, in /dev/shm where that has room
        nobody: Any = None
        self._no_link = mock.patch.object(PublisherThread, "_announce_version", self._announce)
        self._no_link.start()
        self._publishing = Publishing(config, nobody, Path(config.run_dir) / config.name, world, policy)

    def publish(self) -> Pushed:
        """Publish the weights as they are, and wait until the files are there."""
        self._step += 1
        self._synchronize()
        began = time.perf_counter()
        self._publishing.publish(PolicyVersion(1, self._step))
        self._synchronize()
        waited = time.perf_counter() - began
        try:
            ref, write_s = self._announced.get(timeout=ANNOUNCED_S)
        except queue.Empty:
            self._publishing.raise_failure()
            raise TimeoutError(f"a version was not written within {ANNOUNCED_S:.0f} s") from None
        self._directory = Path(ref.path).parent
        size = sum(file.stat().st_size for file in Path(ref.path).iterdir())
        return Pushed(ref, waited, write_s, size)

    def close(self) -> None:
        self._publishing.drain()
        self._no_link.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _announce(self, announcement: Published) -> None:
        self._announced.put((announcement.ref, announcement.write_s))

    def _synchronize(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


async def longest_silence(client: SGLangClient, streams: Sequence[asyncio.Task[Generation]]) -> float:
    """Return the longest time in seconds without a new token of any stream, until the first of them ends."""
    longest = 0.0
    tokens = client.use.tokens
    since = time.perf_counter()
    while not any(stream.done() for stream in streams):
        await asyncio.sleep(0.001)
        if client.use.tokens != tokens:
            now = time.perf_counter()
            longest = max(longest, now - since)
            tokens = client.use.tokens
            since = now
    return longest


def plain_copy(context: Context, size: int) -> Timing:
    """Time the copy of so many bytes of one tensor to main memory, pinned on a GPU."""
    tensor = torch.empty(size, dtype=torch.uint8, device=context.device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not context.small)
    return timed(lambda: host.copy_(tensor, non_blocking=True), context)


def largest_gap(some: Sequence[float], other_values: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, other_values, strict=True))


def seconds(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values) + " s"


def server_mb(context: Context) -> float:
    """Memory of the GPU that is used, by whomever; on a CPU by the processes that this one has started."""
    return used_memory(context, psutil.Process().children(recursive=True)) / MB


def _configuration(context: Context, command: list[str], rank: int, saver: bool) -> RunConfig:
    model = {"path": str(saved_model(context)), "dtype": served_dtype(context), "lora_rank": rank}
    arguments: dict[str, Any] = {"context-length": 2048, "enable-memory-saver": saver}
    if context.small:
        arguments |= {"attention-backend": "torch_native", "max-total-tokens": 8192}
    else:
        arguments |= {"mem-fraction-static": 0.3}  # the trainer's policy is on the same GPU
    return parse(
        {
            "name": "server-adapters" if rank else "server",
            "run_dir": str(context.work),
            "data": {"train": "none"},
            "model": model,
            "engine": {"name": "sglang", "server_command": command, "server_args": arguments},
            "weights": {"mode": "retract", "deadline": 30.0, "adapters": rank > 0},
            "launch": {"stop_timeout": CLOSE_S},  # of publishing, at the end
            "rollout": {"max_tokens": 2000, "max_new_tokens": 1600},
        }
    )


# -- the embedded engine -----------------------------------------------------------------------------------


def measure_embedded(context: Context) -> Iterator[Finding]:
    """Tokens per second of the embedded engine, warm."""
    path = saved_model(context)
    for sessions in (SMALL if context.small else LARGE).sessions:
        try:
            yield asyncio.run(embedded_speed(context, path, sessions))
        except Exception as error:
            yield failure(f"embedded engine, {sessions} sessions", error)
        finally:
            release(context)


async def embedded_speed(context: Context, path: Path, sessions: int) -> Finding:
    began = time.monotonic()
    warm = WARM_STEPS + (RECORD_AFTER if context.small else 0)  # only a CPU records them
    measured = MEASURED_STEPS
    length = PROMPT + warm + 2 * measured
    dtype = served_dtype(context)
    engine = build(str(path), dtype, slots=sessions, max_len=length, device=context.kind)
    loaded = time.monotonic() - began

    async def reached(steps: int) -> float:
        while engine.tokens < steps * sessions:
            if context.left() < END_S or any(turn.done() for turn in turns):
                raise TimeoutError(f"{engine.tokens} tokens were sampled, of {steps * sessions}")
            await asyncio.sleep(0.002)
        return time.perf_counter()

    sampling = Sampling(warm + measured + 20, ())
    prompts = torch.randint(10, 300, (sessions, PROMPT)).tolist()
    turns = [
        asyncio.create_task(engine.generate(Request(f"{index}", tuple(ids), sampling, index)))
        for index, ids in enumerate(prompts)
    ]
    try:
        begin = await reached(warm)
        tokens = engine.tokens
        end = await reached(warm + measured)
        rate = (engine.tokens - tokens) / (end - begin)
        await asyncio.gather(*turns)
    finally:
        for turn in turns:
            turn.cancel()
        await engine.close()
    memory = "" if context.small else f"; {torch.cuda.max_memory_allocated() / MB:,.0f} MB allocated at most"
    note = f"{measured} steps after {warm}; loaded in {loaded:.1f} s{memory}"
    return Finding(f"embedded engine, {sessions} sessions", f"{rate:,.0f} tokens/s", note=note)
