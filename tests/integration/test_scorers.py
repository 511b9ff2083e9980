"""Servers of frozen models as real processes that are killed; tests/sglang has real models on them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from asyncrl.buffer.payloads import decode_turn
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.rollout.server_pool import ServerPool
from asyncrl.runtime.activity import BusyTimer, Waits
from asyncrl.store.reader import RunReader
from asyncrl.types import TokenScores
from asyncrl.wire.messages.worker import EngineEntry, EngineUse
from tests.fakes import scorer_server
from tests.fakes.audit import trained_uids
from tests.fakes.loop import Intervals, settle
from tests.fakes.servers import entry
from tests.fakes.sglang import sglang_config
from tests.integration.runs import ROOT, Run
from tests.integration.test_train import replayed

MODEL = ROOT / "examples/multiturn/calculator/model"
PROGRAM = [sys.executable, scorer_server.__file__]
HALF = np.full(3, scorer_server.LOGPROB, "<f4").tobytes()


def serve() -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--model-path", str(MODEL), "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline(), "it has ended"
    return process, f"http://127.0.0.1:{port}"


async def test_a_turn_that_a_killed_scorer_was_reading_is_read_by_the_next() -> None:
    def connect(entry: EngineEntry, use: EngineUse) -> SGLangClient:
        return SGLangClient(ServerApi(entry.url), sglang_config(64), 600, use, entry.incarnation)

    lost = asyncio.Event()
    now = 0.0
    began = [serve(), serve()]
    waits = Waits(lambda: now)
    pool = ServerPool("reference", connect, waits, BusyTimer(Intervals()), turn_patience=30.0)

    @contextmanager
    def waiting() -> Iterator[None]:
        lost.set()
        yield

    try:
        (first, url), (_, other) = began
        pool.update_table([entry("scorer reference 0", url=url, lane="reference")])
        assert await pool.read("s", (1, 2, 3, 4, 5), 3) == TokenScores(HALF)
        first.send_signal(signal.SIGSTOP)  # it has the request, and no answer will come
        reading = asyncio.create_task(pool.read("s", (1, 2, 3, 4, 5, 6), 3, while_waiting=waiting))
        await settle()
        now = 2.0
        assert waits.longest_wait().startswith("scorers.reference: reads turns")
        first.kill()
        first.send_signal(signal.SIGCONT)
        async with asyncio.timeout(30):
            await lost.wait()
        await settle()
        now = 4.0
        assert waits.longest_wait().startswith("scorers.reference: no server (1 known, 0 healthy)")
        pool.update_table([entry("scorer reference 0", url=other, incarnation="2", lane="reference")])
        assert await reading == TokenScores(HALF)
        assert pool.usage_by_name["scorer reference 0"].lost == 1
    finally:
        await pool.close()
        for process, _ in began:
            process.kill()
            process.communicate()


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        ["scorers.reference.urls=[engines]", "kl.coef=0.05"],
        [
            "scorers.teacher.urls=[engines]",
            "algorithm=gkd",
            "kl.top_k=8",
            "kl.prompt='It is {ground_truth}.'",
        ],
    ],
    ids=["reference", "teacher"],
)
def test_the_base_of_the_run_s_engines_scores_as_the_trainer_would(tmp_path: Path, keys: list[str]) -> None:
    """A step that is trained again with the reference in the rank has the same loss."""
    given = ["model.lora_rank=8", "trainer.lr=0.006", "kl.where=loss", "data.test=''", "total_steps=4"]
    with Run(tmp_path, *given, *keys, "checkpoint.every=3") as run:
        summary = run.completed(4)
        assert summary["conserved"] and summary["flow"]["failed"] == 0
        rows = [row for row in run.rows() if "actor/ref_kl" in row]
        assert len(rows) == 4 and all(row.get("timing_s/ref", 0.0) < 1e-2 for row in rows)  # no forward
        assert rows[-1]["actor/ref_kl"] > 1e-3
        code, lines = replayed(run, 4, "~scorers")
        assert code == 0, lines
        printed = next(line for line in lines if line.split()[:1] == ["4"])
        _, loss, again, norm, normed = map(float, printed.split())
        print(f"loss {loss:.8g} and {again:.8g}, gradient norm {norm:.8g} and {normed:.8g}")
        assert norm > 1e-3 and again == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert normed == pytest.approx(norm, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["server", "supervisor"])
def test_a_run_waits_for_a_killed_scorer_and_loses_nothing(tmp_path: Path, victim: str) -> None:
    keys = [f"engine.server_command={msgspec.json.encode(PROGRAM).decode()}", "total_steps=8"]
    keys += [f"scorers.reference.path={MODEL}", "kl.where=loss", "kl.coef=0.01", "data.test=''"]
    with Run(tmp_path, *keys) as run:
        run.until_step(2)
        supervisor = run.children()["scorer-0"]
        dying = supervisor.children()[0] if victim == "server" else supervisor
        os.kill(dying.pid, signal.SIGKILL)
        psutil.wait_procs([dying], 30)
        summary = run.completed(8)
        assert summary["conserved"] and set(trained_uids(run.path).values()) == {1}
        assert summary["flow"]["failed"] == 0
        assert any("scorer-0" in line and "restarting" in line for line in run.text().splitlines())
        assert all(row.get("timing_s/ref", 0.0) == 0 for row in run.rows())
        reader = RunReader.open(run.path)
        frames = (
            frame for uid in trained_uids(run.path) for frame in reader.turn_frames(uid, 9, ("generated",))
        )
        turns = [*map(decode_turn, filter(None, frames))]
        assert turns and all(turn.generation.scores is not None for turn in turns)
        reader.close()
