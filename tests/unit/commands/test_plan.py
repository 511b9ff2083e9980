"""`asyncrl plan` of runs that were written by hand: what it reads, fits, predicts and refuses."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from asyncrl import cli
from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.commands.plan import Measurements, rank_candidates, splits, with_keys
from asyncrl.config import RunConfig, parse
from asyncrl.config.composition import recompose
from asyncrl.launch.process import BAD_INPUT, FAILED, INTERRUPTED
from asyncrl.observe.timeline import Timeline
from asyncrl.planning import devices, forecast
from asyncrl.planning.forecast import Forecast
from asyncrl.planning.simulator import RecordedTurn
from asyncrl.rollout.episode_records import generated
from asyncrl.store.runstore import RunStore
from asyncrl.types import EpisodeStats, Generation, StopReason, Turn, VersionSpan
from asyncrl.wire.messages.shared import Attempt

# seconds of a token, and for each episode beside
BASE = 0.02
SHARE = 0.001
TOKENS = 10
WAIT = 0.5
TRAIN = 1.6
COMMIT = 0.2
ROW = {
    "timing_s/step": 4.0,
    "timing_s/wait_data": 4.0 - TRAIN - COMMIT,
    "timing_s/update_actor": TRAIN,
    "trainer/trajectories": 16.0,
    "trainer/model_tokens": 160.0,
    "perf/computed_tokens": 160.0,
    "async/trainer_idle_frac": 0.55,
    "staleness/lag/mean": 0.25,
}


def make_run(parent: Path, name: str, slots: int) -> Path:
    """Twenty groups of 4 episodes of one turn each, `slots` at once all the time."""
    run_dir = parent / name
    run_dir.mkdir(parents=True)
    groups = {"groups_per_batch": 4, "episodes_per_group": 4, "target_staleness": 0.5}
    sections = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "buffer": groups | {"group_policy": "complete"},
        "rollout": {"slots": slots},
    }
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(parse({"name": name, **sections})))
    rows = ({"training/step": step} | ROW for step in range(1, 9))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seconds = TOKENS * (BASE + SHARE * slots)
    span = (VersionSpan(0, TOKENS, 0, 0),)
    ids = tuple(range(TOKENS))
    turn = Turn(0, (1,), Generation(ids, (0.0,) * TOKENS, span, StopReason.STOP, seconds=seconds))
    with closing(RunStore(run_dir)) as store:
        for group in range(20):
            uids = [f"{group}.{member}" for member in range(4)]
            store.put_groups([GroupRecord(group, group, 0, uids, settled=True)], {})
            stats = EpisodeStats(1, seconds=seconds + WAIT)
            store.put_episodes(
                [
                    EpisodeRecord(uid, group, number, state=State.TRAINED, turns=1, stats=stats)
                    for number, uid in enumerate(uids)
                ]
            )
            for uid in uids:
                store.put_frame(uid, 0, "generated", generated(Attempt(uid, 0), turn)[1])
        store.request_sync()
        store.commit()
    rollout = Timeline(run_dir / "timeline" / "rollout-0.jsonl")
    for start in range(100, 110, 2):
        rollout.record("decode", start, start + 2, calls=9, seconds=2.0 * slots)
    rollout.record("decode", 120, 122, calls=900, seconds=900.0)
    rollout.close()
    coordinator = Timeline(run_dir / "timeline" / "coordinator-0.jsonl")
    coordinator.record("validation", 119, 130)  # what is sampled in it is left out
    coordinator.record("write_weights", 100, 100.25)
    coordinator.record("push", 100.25, 100.75)
    coordinator.close()
    return run_dir


def configured(devices: dict[str, object]) -> RunConfig:
    return parse({"name": "n", "model": {"path": "m"}, "data": {"train": "t"}, **devices})


def test_what_a_run_recorded(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, "one", 16)
    measurements = Measurements.read_run(run_dir, recompose(run_dir, []))
    assert (
        measurements.recorded == (((RecordedTurn(TOKENS, pytest.approx(WAIT)),),) * 4,) * 18
    )  # the newest left out
    assert measurements.engine_load.sampling == pytest.approx(16)
    assert measurements.engine_load.token_s == pytest.approx(BASE + 16 * SHARE)
    assert measurements.publish_s == pytest.approx(0.75) and len(measurements.rows) == 8


def test_two_runs_give_the_law_and_one_a_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six groups are live, 4 of them being trained: so after 1.8 s of training the next batch
    waits for two groups, 0.36 s of sampling and 0.5 s of waits."""
    monkeypatch.setattr(forecast, "MAX_STEPS", 6)
    monkeypatch.setattr(forecast, "MIN_STEPS", 6)
    runs = (("lr=1", 16), ("few", 4))  # a path with =, which is no override
    one, few = (str(make_run(tmp_path, name, slots)) for name, slots in runs)
    assert cli.main(["plan", one, few]) == 0
    text = capsys.readouterr().out
    assert "a token takes 20 ms, plus 1 ms per" in text and "are assumed" not in text
    assert (
        "bottleneck: trainer" in text and "training takes 100 ms per episode on one rank, plus 0.2 s" in text
    )
    seconds = next(line.split() for line in text.splitlines() if line.startswith("seconds per step "))
    assert float(seconds[-2]) == pytest.approx(TRAIN + COMMIT + 0.86, rel=0.02) and seconds[-1] == "4"
    assert "trainer.ranks=1 rollout.slots=" in text.splitlines()[-1]
    monkeypatch.setattr(devices, "MAX_STEPS", 6)
    monkeypatch.setattr(devices, "MIN_STEPS", 6)
    monkeypatch.setattr(forecast, "time_savings", lambda *_: {"trainer": 0.3, "pushes": -0.001})
    assert cli.main(["plan", one, "--tail", "2", "--devices", "3", "rollout.slots=8"]) == 0
    text = capsys.readouterr().out
    assert (
        "  trainer 30%, pushes 0%\n" in text
        and "are assumed" in text
        and "3 devices" in text
        and "measured\n" not in text
    )


def test_devices_are_split_or_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes an engine 0.36 s at its 16 slots, and a rank 1.8 s: changes of 9 s are never worth it."""
    monkeypatch.setattr(devices, "MAX_STEPS", 6)
    monkeypatch.setattr(forecast, "time_savings", lambda *_: {"trainer": 0.3})
    run_dir = str(make_run(tmp_path, "one", 16))
    assert cli.main(["plan", run_dir, "--devices", "1"]) == 0
    text = capsys.readouterr().out
    assert (
        "a push plus 0 GB of weights and optimizer state moved in both directions at 10 GB/s per rank" in text
    )
    assert text.splitlines()[-1].startswith(
        "use rollout.workers=1 trainer.ranks=1 engine.colocated=1: the only option with these devices"
    )
    assert cli.main(["plan", run_dir, "--devices", "2", "--shift", "9"]) == 0
    text = capsys.readouterr().out
    assert "switching the devices to the trainer and back takes 9 s (set by --shift)" in text
    assert "use rollout.workers=1 trainer.ranks=1: " in text and "because shifts leave more idle" in text
    assert [line.split()[0] for line in text.splitlines() if line.count("|") == 2] == ["devices", "1", "2"]
    assert cli.main(["plan", run_dir, "engine.colocated=1"]) == 0, "one device, which cannot be split"
    assert "bottleneck: trainer" in capsys.readouterr().out


def test_one_split_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, batch and bound are tried with the split that the table of both ways takes, and no other."""
    for module, name in ((devices, "MAX_STEPS"), (devices, "MIN_STEPS"), (forecast, "MIN_STEPS")):
        monkeypatch.setattr(module, name, 6)
    monkeypatch.setattr(forecast, "MAX_STEPS", 6)
    monkeypatch.setattr(forecast, "time_savings", lambda *_: {"trainer": 0.3})
    assert cli.main(["plan", str(make_run(tmp_path, "one", 16)), "--devices", "3", "--shift", "9"]) == 0
    out, err = capsys.readouterr()
    suggestion = re.search(r"^use (rollout.workers=\d trainer.ranks=\d):", out, re.MULTILINE)
    assert suggestion and out.splitlines()[-1].startswith(f"{suggestion[1]} rollout.slots=")
    assert len({*re.findall(r"workers=\d trainer.ranks=\d", out)}) == 1
    tried = out.partition("tokens/s  s/step")[2].splitlines()[1:-2]
    assert len({tuple(line.split()[:2]) for line in tried}) == 1 and len(tried) > 3
    said = [line for line in err.splitlines() if line.startswith("plan: ")]
    assert len(said) == 4 and said[-1].endswith("with that split …")


def test_what_cannot_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, "one", 4)
    for arguments, expected_error in {
        (str(run_dir), "--tail", "0"): "use a factor above 0",
        (str(run_dir), "--devices", "1", "engine.name=sglang", "engine.tp=2"): "too few for an engine",
        ("nothing", "--run-dir", str(tmp_path)): "no run is named 'nothing'",
    }.items():
        assert cli.main(["plan", *arguments]) == 2
        assert expected_error in capsys.readouterr().err
    (run_dir / "timeline" / "rollout-0.jsonl").unlink()
    assert cli.main(["plan", str(run_dir)]) == 2
    assert "the run has not recorded any sampled turns" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "exits"), [(FAILED, 1), (BAD_INPUT, 1), (INTERRUPTED, 130)])
def test_a_probe_that_fails_keeps_its_directory_and_one_that_is_interrupted_does_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    exits: int,
) -> None:
    def ended(config: RunConfig, show_summary: bool) -> int:
        (Path(config.run_dir) / config.name / "logs").mkdir(parents=True)
        return code

    monkeypatch.setattr("asyncrl.launch.start.train", ended)
    assert cli.main(["plan", f"run_dir={tmp_path}", "name=n", "model.path=m", "data.train=t"]) == exits
    error_output = capsys.readouterr().err
    kept = list(tmp_path.glob("plan-*/all-slots/logs"))
    assert len(kept) == (code != INTERRUPTED) and all(str(path) in error_output for path in kept)
    assert not list(tmp_path.glob("plan-*/few-slots"))


def test_splits_use_the_devices() -> None:
    embedded = configured({})
    servers = configured({"engine": {"name": "sglang", "tp": 4}})
    assert splits(embedded, 3) == [
        {"rollout.workers": 1, "trainer.ranks": 2},
        {"rollout.workers": 2, "trainer.ranks": 1},
    ]
    assert splits(servers, 16) == [{"engine.servers": n, "trainer.ranks": 16 - 4 * n} for n in (1, 2, 3)]
    assert splits(servers, 4) == [] and len(splits(servers, 512)) == 8
    assert with_keys(servers, {"rollout.slots": 0}) is None
    other = with_keys(servers, {"rollout.slots": 7})
    assert other is not None and other.rollout.slots == 7 and other.engine == servers.engine


def test_of_those_that_are_as_fast_the_lowest_lag_is_first() -> None:
    def outcome(step_s: float, lag: float) -> Forecast:
        return Forecast(step_s, lag, 0.0, 0.0, 0.0, tokens=100.0)

    tried = [({"a": 1}, outcome(1.0, 3.0)), ({"a": 2}, outcome(2.0, 0.1)), ({"a": 3}, outcome(1.02, 1.0))]
    assert [keys["a"] for keys, _ in rank_candidates(tried)] == [3, 1, 2]
