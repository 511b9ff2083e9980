"""LoRA adapters on a real server: exact versions while others load, those of several agents in one batch, and
what a supervisor that died leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from asyncrl.config import AgentConfig, ModelConfig, ScorerConfig
from asyncrl.engines.base import EngineLost
from asyncrl.engines.sglang import version_check
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.server import attach, build_loader, look_at_server
from asyncrl.errors import ConfigError
from asyncrl.trainer.model import adapter_shards, load_policy, score_ids
from asyncrl.trainer.world import World
from asyncrl.types import Generation, PolicyVersion, StopReason, VersionSpan
from asyncrl.weights.manifest import WeightsError, WeightsRef
from asyncrl.wire.messages.worker import EngineUse
from tests.fakes.sglang import sglang_config
from tests.fakes.sglang_process import SGLangServer
from tests.fakes.weights import publish
from tests.sglang.conformance import MAX_LEN, VOCABULARY, Versions, ask, in_use, prompt, under_way
from tests.sglang.conftest import Start

pytestmark = pytest.mark.full
# nats
RANK = 4
LONG = 400
CLOSE = 1e-4
KINDS = ("q_proj", "o_proj", "up_proj", "down_proj")
FUSED_KINDS = ("k_proj", "v_proj", "gate_proj")  # computed as one with those
ADAPTERS = ("--enable-lora", f"--max-lora-rank={RANK}", "--lora-target-modules", *KINDS)
ROOM = ("--max-loras-per-batch=7", *ADAPTERS)


class Trained:
    """A model with adapters that do something, of these ranks. `publish`: the next version; `gap`: how far
    log-probs of the last one are from the trainer's, with an agent's adapter, or the model's without one."""

    def __init__(self, model: Path, directory: Path, world: World, ranks: Mapping[str, int]) -> None:
        self.world = world
        self.directory = directory
        self.agents = [*ranks]
        sizes = {agent: (rank, 16.0) for agent, rank in ranks.items()}
        self.policy = load_policy(ModelConfig(path=str(model), dtype="float32"), world, adapters=sizes)

    def publish(self, step: int) -> WeightsRef:
        torch.manual_seed(step)
        adapters = self.policy.adapters
        shards = adapter_shards(self.policy)
        assert adapters is not None
        for shard in shards.values():
            nn.init.normal_(shard.to_local().detach(), std=0.1)
        tensors = {piece.name: shards[piece.parameter].full_tensor() for piece in adapters.published}
        return publish(tensors, self.directory, PolicyVersion(1, step), adapters.specs)

    def gap(self, ids: tuple[int, ...], logprobs: tuple[float, ...], agent: str = "") -> float:
        has_adapter = agent in self.agents
        with nullcontext() if has_adapter else self.policy.without_adapters():
            scores = score_ids(self.policy, ids, self.world.device)
        end = (len(ids) - 1) * (self.agents.index(agent) + 1 if has_adapter else 1)
        own_scores = scores[end - len(logprobs) : end]
        return max(abs(a - b) for a, b in zip(own_scores, logprobs, strict=True))


@pytest.fixture(scope="module")
def server(sglang_server: Start, tiny_models: dict[str, Path]) -> SGLangServer:
    return sglang_server(tiny_models["qwen2"], *ROOM, "--enable-memory-saver")


async def test_a_server_of_another_version_is_taken_if_it_takes_the_adapters_of_the_run(
    server: SGLangServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(version_check, "TESTED_VERSION", "0.0.1")
    config = sglang_config(MAX_LEN, lora_rank=RANK, model=str(server.model))
    modules = [*KINDS, *FUSED_KINDS]
    config = replace(config, model=replace(config.model, lora_modules=modules))
    async with asyncio.timeout(240), in_use((await attach(config, server.url)).api):
        [line] = [
            record.getMessage() for record in caplog.records if "the tested version is" in record.getMessage()
        ]
        assert line.endswith("sampling a request, relabeling the weights, listing the adapters")

    config = replace(config, model=replace(config.model, lora_modules=[*modules, "kv_b_proj"]))
    with pytest.raises(ConfigError, match=r"start it with --lora-target-modules .* kv_b_proj .*, or"):
        await look_at_server(config, server.url)


async def test_the_base_reads_turns_while_versions_load_and_finds_their_prefixes(
    server: SGLangServer, world: World, tmp_path: Path
) -> None:
    """Beside requests of as many versions as a server holds. Its log-probs are those of the trainer without
    adapters."""
    trained = Trained(server.model, tmp_path / "published", world, {"": RANK})
    config = sglang_config(MAX_LEN, lora_rank=RANK, model=str(server.model))
    config = replace(config, run_dir=str(tmp_path), weights=replace(config.weights, directory="run"))
    config = replace(config, scorers={"reference": ScorerConfig(urls=["engines"])})
    assert config.adapters_held == 7
    read = EngineUse("read")
    gaps = list[float]()
    shares = list[float]()
    sampler, reader = (
        SGLangClient(ServerApi(server.url), config, VOCABULARY, use, "r") for use in (None, read)
    )
    row = prompt(600)
    running = list[asyncio.Task[Generation]]()
    async with (
        asyncio.timeout(240),
        in_use(sampler),
        in_use(reader),
        in_use(build_loader(config, 0, await attach(config, server.url), "r")) as weight_loader,
    ):
        for step in range(1, 7):
            await weight_loader.load(ref := trained.publish(step))
            sampler.mark_version(ref.version)
            running += await under_way(sampler, ask(prompt(9, step), LONG, f"long {step}"))
            row += prompt(20, step)
            row += (sampled := await sampler.generate(ask(row, 40))).ids
            before = read.cached_tokens, read.prompt_tokens
            scores = await reader.read(row, len(sampled.ids), 4)
            shares.append((read.cached_tokens - before[0]) / (read.prompt_tokens - before[1]))
            base_logprobs = tuple(np.frombuffer(scores.logprobs, "<f4").tolist())
            gaps.append(trained.gap(row, base_logprobs, "nobody"))
        ended_turns = [task.result() for task in running if task.done()]
        assert len(ended_turns) < 3, "they were to last"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    print(f"largest difference {max(gaps):.2g} nats; found in the cache {min(shares[1:]):.1%} and more")
    assert max(gaps) < CLOSE and shares[0] == 0 and min(shares[1:]) > 0.9


async def test_requests_of_one_batch_are_computed_with_the_adapter_of_their_agent(
    server: SGLangServer, world: World, tmp_path: Path
) -> None:
    ranks = {"planner": RANK, "coder": RANK // 2}
    version = PolicyVersion(1, 1)
    trained = Trained(server.model, tmp_path / "published", world, ranks)
    config = sglang_config(MAX_LEN, lora_rank=RANK, model=str(server.model))
    config = replace(
        config,
        run_dir=str(tmp_path),
        model=replace(config.model, lora_rank=0),
        agents={agent: AgentConfig(rank) for agent, rank in ranks.items()},
        buffer=replace(config.buffer, max_staleness=0),
        weights=replace(config.weights, directory="run"),
    )
    client = SGLangClient(ServerApi(server.url), config, VOCABULARY, salt="agents")
    agents = (*ranks, "other")
    text = prompt(40)
    async with (
        asyncio.timeout(240),
        in_use(client),
        in_use(build_loader(config, 0, await attach(config, server.url), "agents")) as weight_loader,
    ):
        await weight_loader.load(trained.publish(1))
        client.mark_version(version)
        probe = await weight_loader.score(text)
        assert trained.gap(text, probe[:39], "planner") < CLOSE > trained.gap(text, probe[39:], "coder")
        requests = [(ask(prompt(30, seed), 64, f"{seed}"), agent) for agent in agents for seed in range(2)]
        turns = await under_way(client, *(replace(request, agent=agent) for request, agent in requests))
        assert not any(turn.done() for turn in turns), "all were to run at once"
        for (request, own_agent), turn in zip(requests, turns, strict=True):
            generation = await turn
            assert generation.spans == (VersionSpan(0, 64, 1, 1),)
            row = request.ids + generation.ids
            logprobs = generation.logprobs
            gaps = {agent: trained.gap(row, logprobs, agent) for agent in agents}
            assert {agent for agent, gap in gaps.items() if gap < CLOSE} == {own_agent}


async def test_a_server_that_sleeps_wakes_with_its_base_and_turns_keep_their_adapters(
    server: SGLangServer, world: World, tmp_path: Path
) -> None:
    trained = Trained(server.model, tmp_path / "published", world, {"": RANK})
    config = sglang_config(MAX_LEN, lora_rank=RANK, model=str(server.model))
    weights = replace(config.weights, directory="run")
    engine = replace(config.engine, colocated=1)
    config = replace(config, run_dir=str(tmp_path), weights=weights, engine=engine, total_steps=1)
    used = SGLangClient(ServerApi(server.url), config, VOCABULARY, salt="s")
    async with (
        asyncio.timeout(240),
        in_use(build_loader(config, 0, await attach(config, server.url), "s")) as weight_loader,
        in_use(used),
    ):
        first = trained.publish(1)
        await weight_loader.load(first)
        used.mark_version(first.version)
        running = ask(prompt(30), LONG)
        (task,) = await under_way(used, running)
        await weight_loader.sleep()
        used.set_asleep(True)
        assert not task.done(), "the turn was to last"
        with pytest.raises(WeightsError):  # before anything wakes
            await weight_loader.load(replace(first, path="/nowhere"))
        assert weight_loader.sleeping.asleep
        await weight_loader.load(first)
        used.set_asleep(False)
        generation = await task
        assert generation.spans == (VersionSpan(0, LONG, 1, 1),) and used.use.retracted == 0
        assert trained.gap(running.ids + generation.ids, generation.logprobs) < CLOSE
        await weight_loader.sleep()
        ref = trained.publish(2)
        await weight_loader.load(ref)
        used.mark_version(ref.version)
        new = ask(prompt(20), 16, "new")
        generation = await used.generate(new)
        assert generation.spans == (VersionSpan(0, 16, 2, 2),)
        assert trained.gap(new.ids + generation.ids, generation.logprobs) < CLOSE


async def test_versions_load_beside_running_turns_and_outlive_neither_loader_nor_files(
    server: SGLangServer, versions_of: Callable[[str], Versions], world: World, tmp_path: Path
) -> None:
    trained = Trained(server.model, tmp_path / "published", world, {"": RANK})
    config = sglang_config(MAX_LEN, lora_rank=RANK, model=str(server.model))
    weights = replace(config.weights, directory="run")
    config = replace(config, run_dir=str(tmp_path), weights=weights)
    oldest = config.buffer.usual_staleness
    used = SGLangClient(ServerApi(server.url), config, VOCABULARY, salt="a")
    async with (
        asyncio.timeout(240),
        in_use(build_loader(config, 0, await attach(config, server.url), "a")) as weight_loader,
    ):
        # A merged version was here before: the model's own weights come back.
        await weight_loader.api.update_from_disk(versions_of("qwen2").refs[1].path, "e1-v9")
        first = build_loader(config, 0, await attach(config, server.url), "a")
        await first.load(trained.publish(1))
        text = prompt(40)
        assert trained.gap(text, await first.score(text)) < CLOSE
        used.mark_version(PolicyVersion(1, 1))

        # A turn goes on while version after version loads, and is of its own alone.
        running = ask(prompt(30), LONG)
        (task,) = await under_way(used, running)
        refs = [trained.publish(step) for step in range(2, 2 + oldest)]
        for ref in refs:
            await first.load(ref)
            used.mark_version(ref.version)
        new = ask(prompt(20), 16, "new")
        generation = await used.generate(new)
        assert generation.spans == (VersionSpan(0, 16, 1 + oldest, 1 + oldest),)
        assert trained.gap(new.ids + generation.ids, generation.logprobs) < CLOSE
        again = await used.generate(new)
        assert used.use.cached_tokens > 0 and len(again.ids) == 16
        assert not task.done(), "the turn was to last"
        await first.load(ref := trained.publish(2 + oldest))
        used.mark_version(ref.version)
        part = await task
        assert part.stop is StopReason.ABORT and len(part.ids) > 0
        assert part.spans == (VersionSpan(0, len(part.ids), 1, 1),)

        # Its supervisor dies between a load and its report: the next one knows no name of it.
        await first.load(trained.publish(3 + oldest))
        async with in_use(build_loader(config, 0, await attach(config, server.url), "b")) as second:
            ref = trained.publish(4 + oldest)
            await second.load(ref)
            assert second._unload_task is not None  # type: ignore[union-attr]
            await second._unload_task  # type: ignore[union-attr]
            assert await second.api.adapters() == {f"{ref.label}@b"}
            assert await first.label() == "no adapters from this run"
            with pytest.raises(EngineLost, match="LoRA adapter"):  # nothing is loaded again behind our back
                await used.generate(new)
        await used.close()
        await first.close()
