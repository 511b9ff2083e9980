"""Frozen models on real servers: their log-probs are those that a trainer rank would compute, whatever was
killed meanwhile, and what a turn's prefix has cost is not computed again."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.buffer.payloads import decode_turn
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.observe.files import read_status
from asyncrl.store.reader import RunReader
from asyncrl.types import Turn
from tests.fakes.audit import trained_uids
from tests.fakes.sglang import sglang_config
from tests.fakes.sglang_process import LAUNCHER, PYTHON
from tests.integration.runs import ROOT, Run
from tests.sglang.conftest import Pool, Shared

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
DEMO = ROOT / "examples/multiturn/calculator/model"
DEADLINE = 400.0


@cache
def demo() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def differences(turns: Sequence[Turn]) -> list[float]:
    """Between the scores of an episode's turns and the model's own log-probs, in float32."""
    ids = [id for turn in turns for id in (*turn.context, *turn.generation.ids)]
    with torch.inference_mode():
        table = demo()(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    own_logprobs = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    gaps = list[float]()
    end = 0
    for turn in turns:
        end += len(turn.context) + len(turn.generation.ids)
        scored = np.frombuffer(turn.generation.scores.logprobs, "<f4")
        gaps.append(float(np.abs(scored - own_logprobs[end - 1 - len(turn.generation.ids) : end - 1]).max()))
    return gaps


async def test_what_stands_before_a_turn_is_found_in_the_cache(shared_server: Shared) -> None:
    """A prompt of 600 tokens, and turns of 40 that follow 20 of a tool."""
    api = ServerApi(shared_server("qwen2").url)
    config = sglang_config(1024)
    client = SGLangClient(api, config, 258, salt=os.urandom(4).hex())
    row = tuple(3 + at * 7 % 200 for at in range(600))
    cached = list[tuple[int, int]]()
    for turn in range(6):
        row += tuple(5 + (turn * 11 + at * 3) % 200 for at in range(60))
        before = client.use.cached_tokens, client.use.prompt_tokens
        scores = await client.read(row, 40, 4)
        cached.append((client.use.cached_tokens - before[0], client.use.prompt_tokens - before[1]))
        assert len(scores.logprobs) == 160 and len(scores.top) == 640
    assert cached[0][0] == 0 and [cached_tokens for cached_tokens, _ in cached[1:]] == [
        660 + 60 * at for at in range(5)
    ]
    shares = [cached_tokens / prompt_tokens for cached_tokens, prompt_tokens in cached[1:]]
    print(f"found in the cache from the second turn on: {min(shares):.1%} to {max(shares):.1%}")
    assert min(shares) > 0.9 and math.isfinite(sum(np.frombuffer(scores.top, "<f4")))
    await client.close()


def test_a_run_whose_reference_is_killed_trains_on_the_numbers_of_a_rank(tmp_path: Path, pool: Pool) -> None:
    pool.stop()  # a run has a server of its own
    keys = [f"engine.server_command=[{PYTHON},{LAUNCHER}]", "+engine.server_args.max-total-tokens=32768"]
    keys += [f"scorers.reference.path={DEMO}", "kl.where=loss", "kl.coef=0.01", "data.test=''"]
    with Run(tmp_path, *keys, "total_steps=10", "checkpoint.every=50", "launch.start_timeout=300") as run:
        run.until(lambda: run.step >= 3, "step 3", DEADLINE)
        wrapper = run.children()["scorer-0"].children()[0]
        family = [wrapper, *wrapper.children(recursive=True)]
        os.kill(wrapper.pid, signal.SIGKILL)
        psutil.wait_procs(family, 60)
        run.until(lambda: "scorers.reference" in str(read_status(run.path)), "the wait, by name", DEADLINE)
        run.wait(DEADLINE)
        summary = run.completed(10)
        uids = trained_uids(run.path)
        assert summary["flow"]["failed"] == 0 and set(uids.values()) == {1}
        reader = RunReader.open(run.path)
        episodes = [
            [*map(decode_turn, filter(None, reader.turn_frames(uid, 16, ("generated",))))] for uid in uids
        ]
        reader.close()
        gaps = [gap for turns in filter(None, episodes) for gap in differences(turns)]
        print(f"{len(gaps)} turns, largest difference {max(gaps):.2g} nats")
        assert len(gaps) > 100 and max(gaps) < 1e-4
        distances = [row["actor/ref_kl"] for row in run.rows() if "actor/ref_kl" in row]
        assert distances[0] < 1e-6 < distances[-1]
        assert all(row.get("timing_s/ref", 0.0) == 0 for row in run.rows())
