"""Tasks of agents, with kills in between: what became of each token. Two of the agents do not repeat their
requests: Codex tells its model a new id for each command. Claude Code in a sandbox repeats them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from asyncrl.buffer.payloads import decode_turn
from asyncrl.episodes.recorded import stored_turns
from asyncrl.errors import ProtocolError
from asyncrl.gateway.workspaces import WORKSPACE_PREFIX, WORKSPACES_DIRECTORY
from asyncrl.isolation.sandbox.emptying import lock_directory
from asyncrl.store.reader import RunReader
from asyncrl.store.segments import RECORD_HEADER
from asyncrl.types import Turn
from asyncrl.weights.disk import weights_directory
from tests.fakes.fetched import fetched_tokenizer, harness
from tests.fakes.models import save_small
from tests.fakes.noting import PLACE, TURNS, notes
from tests.integration.runs import Run
from tests.integration.test_harnesses import CLIENTS

Options = tuple[str, ...]
SLOTS = 8


def durable_turns(run_dir: Path) -> list[Turn]:
    """Read all payloads that were ever stored. One is there twice if a coordinator was killed in between."""
    payloads = set[bytes]()
    for path in (run_dir / "segments").iterdir():
        data = path.read_bytes()
        at = 0
        while at < len(data):
            size, _ = RECORD_HEADER.unpack_from(data, at)
            payloads.add(data[at + RECORD_HEADER.size : at + RECORD_HEADER.size + size])
            at += RECORD_HEADER.size + size
    turns = list[Turn]()
    for payload in payloads:
        with suppress(ProtocolError):  # replies
            turns.append(decode_turn(payload))
    return turns


def small_coder(folder: Path) -> str:
    """A model that reads 6,000 tokens of a coding agent in no time."""
    tokenizer = fetched_tokenizer("smollm2")
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "num_attention_heads": 1}
    return save_small(folder, "Qwen2", **sizes)


def as_users_run_it(name: str, folder: Path) -> Options:
    program = harness(CLIENTS[name].program)
    return (
        f"rollout.agent={{{name}: {{program: '{program}', env: {PLACE}}}}}",
        f"model.path={small_coder(folder / 'model')}",
        "model.template=chatml_tools",
        "engine.name=tests.fakes.noting:coding_engine",
        "rollout.max_tokens=32768",  # the experiment has 256
        "rollout.max_new_tokens=256",
    )


def forgetful(folder: Path) -> Options:
    return (
        "rollout.agent=tests.fakes.noting:forgetful",
        "rollout.max_tokens=1024",
        "engine.name=tests.fakes.noting:noting_engine",
    )


def marked(folder: Path) -> list[psutil.Process]:
    """Find the processes that write their notes here, without those that start other runs, too."""
    marked_processes = list[psutil.Process]()
    mark = f"{PLACE}={folder}".encode()
    for process in set(psutil.process_iter()) - set(psutil.Process().children()):
        with suppress(OSError):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                marked_processes.append(process)
    return marked_processes


@pytest.mark.full
@pytest.mark.parametrize(
    ("agent", "tasks", "repeats"),
    [
        (forgetful, 50, False),
        (partial(as_users_run_it, "codex"), 50, False),
        (partial(as_users_run_it, "claude_code"), 20, True),
    ],
    ids=["forgetful", "codex", "claude_code"],
)
def test_every_token_that_was_sampled_is_delivered_or_abandoned(
    agent: Callable[[Path], Options],
    tasks: int,
    repeats: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))
    data = tmp_path / "tasks.jsonl"
    prompts = [{"role": "user", "content": f"Start with {number}, plus 3."} for number in range(tasks)]
    rows = [{"data_source": "t", "prompt": [one], "reward_model": {"ground_truth": "1"}} for one in prompts]
    data.write_text("\n".join(map(json.dumps, rows)))
    more = (f"data.train={data}", "data.test=''", "data.epochs=1", "total_steps=5", "rollout.workers=2")
    more += (f"buffer.groups_per_batch={tasks // 5}", "buffer.episodes_per_group=2")
    more += (f"rollout.slots={SLOTS}", "rollout.tools=[]", *agent(tmp_path))
    seen = set[psutil.Process]()

    def under_way(worker: str) -> bool:
        """Tell if conversations of a worker have durable turns, and go on."""
        process = run.children().get(worker)
        notes_of_process = notes(tmp_path, "heard") if process else []
        newest = {
            session: number for pid, session, number in notes_of_process if process and pid == process.pid
        }
        return sum(number < TURNS - 1 for number in newest.values()) > 1

    def kill(name: str) -> None:
        seen.update(psutil.Process(run.process.pid).children(recursive=True))
        run.kill(name)

    with Run(tmp_path, *more) as run:
        run.until(lambda: under_way("rollout-0"), "conversations of rollout-0")
        kill("rollout-0")
        heard = len(notes(tmp_path, "heard"))
        run.until(lambda: len(notes(tmp_path, "heard")) > heard + 2, "more turns")
        kill("coordinator-0")
        heard = len(notes(tmp_path, "heard"))
        run.until(lambda: len(notes(tmp_path, "heard")) > heard + SLOTS, "turns that another one has stored")
        run.until(lambda: under_way("rollout-1"), "conversations of rollout-1")
        kill("rollout-1")
        summary = run.completed(5, honest_engine=agent is forgetful)
        assert not weights_directory("shm", run.path, run.path.name, 0).exists()
    assert "a request failed" not in run.logs() and "Traceback" not in run.logs()
    _, alive = psutil.wait_procs(seen, timeout=10)
    assert not alive and not marked(tmp_path), "a process is left"
    assert not any(map(lock_directory, map(str, Path(WORKSPACES_DIRECTORY).glob(f"{WORKSPACE_PREFIX}*")))), (
        "a place is left"
    )
    sampled = Counter((tuple(prompt), tuple(ids)) for prompt, ids in notes(tmp_path, "sampled"))
    assert set(sampled.values()) == {1}
    left = set(sampled)
    delivered = 0
    with closing(RunReader.open(run.path)) as reader:
        episodes = [one for group in reader.groups() for one in reader.group_members(group.id)]
        for episode in (one for one in episodes if one.stats.turns):
            turns, missing = stored_turns(reader, episode)
            assert not missing
            shown_ids: dict[int, tuple[int, ...]] = {}
            for turn in turns:
                prompt = shown_ids.get(turn.row, ()) + turn.context
                left.remove((prompt, turn.generation.ids))  # each token once, as the engine wrote it
                shown_ids[turn.row] = prompt + turn.generation.ids
                delivered += len(turn.generation.ids)
    durable = durable_turns(run.path)
    abandoned = summary["tokens_abandoned"] or 0
    assert len(episodes) == summary["flow"]["trained"] == 2 * tasks
    assert repeats == (abandoned == 0) == ("not_repeated" not in summary["attempts_failed"])
    assert all(episode.stats.turns == TURNS for episode in episodes)
    assert sum(len(turn.generation.ids) for turn in durable) == delivered + abandoned
    assert {turn.generation.ids for turn in durable} <= {ids for _, ids in sampled}
    # What the engines sampled beside that was not durable when its worker was killed.
    assert 0 <= len(sampled) - len(durable) <= 2 * SLOTS
