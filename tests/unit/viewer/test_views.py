from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl import cli
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.config import read_config
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.files import write_status
from asyncrl.observe.metrics import FILTERED, REWARD
from asyncrl.store.launches import KEY, since
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.types import EpisodeEnd, EpisodeResult, EpisodeStats
from asyncrl.viewer import episodes
from asyncrl.viewer.views import Views
from tests.fakes.viewed import MARKUP, ended, save_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def views(run_dir: Path) -> Views:
    return Views([run_dir], ended)


def uids(views: Views, **query: Any) -> list[str]:
    found = views.answer("episodes", {key: str(value) for key, value in query.items()})
    return [episode["uid"] for episode in found["episodes"]]


def test_filters_and_orders(views: Views) -> None:
    assert uids(views) == ["3.0", "3.1", "2.0", "2.1", "1.0", "1.1", "0.0", "0.1"]
    assert uids(views, state="trained", order="-reward") == ["0.0", "1.0", "1.1", "0.1"]
    assert uids(views, state="trained", reward_from=0.5, reward_to=0.9) == ["1.0", "1.1"]
    assert uids(views, step_from=1, step_to=1, order="reward")[0] == "0.1" and not uids(views, step_from=2)
    assert uids(views, group=0) == ["0.0", "0.1"] and uids(views, end="length") == []
    assert uids(views, end="answered", length_from=10, group=1) == ["1.0", "1.1"]
    assert uids(views, tool="search") == ["0.0"] and len(uids(views, tool="calculator")) == 3
    assert uids(views, reason="group_short") == ["3.0", "3.1"]


def test_what_was_dropped_is_counted_by_reason(views: Views) -> None:
    counts = {(one["state"], one["reason"]): one["count"] for one in views.answer("episodes", {})["counts"]}
    assert counts[("dropped", "group_short")] == 2 and counts[("trained", "")] == 4


def test_a_transcript_says_of_each_token_what_training_took_it_for(views: Views) -> None:
    found = views.answer("episode", {"uid": "0.0"})
    (turn,) = found["turns"]
    assert turn["ids"] == tuple(range(10)) and len(turn["texts"]) == 10
    assert turn["versions"] == [0] * 4 + [1] * 6 and turn["kv_versions"] == [0] * 10
    assert turn["lags"] == [0] * 4 + [1] * 6 and not any(turn["stale"])
    assert turn["ratios"] == [pytest.approx(2.0), None] + [1.0] * 8
    assert turn["dropped"] == [True] + [False] * 9
    assert turn["rewards"] == [0.0] * 9 + [1.0]
    assert turn["replies"][0]["content"] == MARKUP
    assert turn["advantages"][0] > 0 > views.answer("episode", {"uid": "0.1"})["turns"][0]["advantages"][0]
    assert found["sample"]["truth"] == "1" and found["result"]["components"] == {"acc": 1.0}


def test_an_episode_is_shown_as_the_launch_that_trained_it_was_configured(tmp_path: Path) -> None:
    run_dir = save_run(tmp_path / "c")
    config = read_config(run_dir)
    buffer = msgspec.structs.replace(config.buffer, max_staleness=0, target_staleness=0)
    store = RunStore(run_dir)
    launches = since(since([], 0, config), 1, msgspec.structs.replace(config, buffer=buffer))
    store.put_meta(KEY, msgspec.json.encode(launches).decode())
    store.commit()
    store.close()
    trained, running = (Views([run_dir], ended).answer("episode", {"uid": uid}) for uid in ("0.0", "2.0"))
    assert trained["bound"] == config.buffer.max_staleness > running["bound"] == 0
    assert not any(trained["turns"][0]["stale"])


def test_before_any_step_the_page_has_the_score_and_why_nothing_is_learned(tmp_path: Path) -> None:
    gauges = {REWARD: 0.0, FILTERED: 0.98}
    gauges |= {"rollout/score/min": 0.0, "rollout/score/max": 0.0, "rollout/landed": 64.0}
    told = [{"name": "constant reward", "what": "all 64 episodes scored 0"}]
    write_status(tmp_path, {"phase": "running", "alerts": told, "gauges": gauges, "metrics": {}})
    views = Views([tmp_path], lambda run_dir: "")
    assert views._run(tmp_path)["numbers"] == "reward 0.000, filtered 98%"
    assert views._run(tmp_path)["alert"] == "constant reward: all 64 episodes scored 0"
    (found,) = views.answer("rows", {})["alerts"]
    assert (found["name"], found["what"]) == ("constant reward", "all 64 episodes scored 0")


def test_one_that_has_not_landed_or_has_lost_its_turns_says_so(views: Views) -> None:
    running, dropped = (views.answer("episode", {"uid": uid}) for uid in ("2.0", "3.0"))
    assert running["turns"] == [] and running["no_advantage"] == "it has not landed"
    assert dropped["turns"] == [] and "store.keep_bytes" in dropped["missing"]


@pytest.mark.parametrize(
    ("name", "query", "why"),
    [
        ("episodes", {"reward_from": "x"}, "reward_from"),
        ("episodes", {"colour": "x"}, "colour"),
        ("episodes", {"order": "x"}, "order is one of newest"),
        ("episodes", {"group": "9" * 30}, "group"),
        ("episodes", {"start": "-1"}, "start"),
        ("lanes", {"from": "nan"}, "within"),
        ("lanes", {"to": "x"}, "seconds since the start"),
        ("episodes", {"run": "1"}, "there are 1 runs"),
        ("episode", {"uid": "9.9"}, "no episode 9.9"),
    ],
)
def test_bad_questions_are_named(views: Views, name: str, query: dict[str, str], why: str) -> None:
    with pytest.raises(AsyncrlError, match=why):
        views.answer(name, query)


def test_a_function_of_the_users_is_not_run(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')")
    other = save_run(tmp_path / "b")
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("advantage: ", f"advantage: {tmp_path}/mine.py:", 1))
    found = Views([other], ended).answer("episode", {"uid": "0.0"})
    assert "does not run" in found["no_advantage"] and found["turns"][0]["advantages"] is None
    (differing,) = Views([run_dir, other], ended).answer("runs", {})["differences"]
    assert differing == "algorithm.advantage"


def test_a_page_in_a_file_has_all_inside_and_no_text_ends_its_script(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.html"
    assert cli.main(["view", str(run_dir), "--html", str(out)]) == 0
    page = out.read_text()
    assert page.count("<img") == 0 and "{{" not in page.split("<body>")[1]
    inside = page.split('id="recorded">')[1].split("</script>")[0]
    recorded = json.loads(inside, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert recorded["rows?run=0"]["alerts"][0]["name"] == "skipped optimizer steps"
    assert recorded["episode?run=0&uid=0.0"]["turns"][0]["replies"][0]["content"] == MARKUP
    assert recorded["runs"]["runs"][0]["ended"]


def test_a_hundred_thousand_episodes_are_paged_in_time(tmp_path: Path) -> None:
    """Under two seconds a page on a quiet machine; four here, where tests share two cores."""
    store = RunStore(tmp_path)
    ends = list(EpisodeEnd)
    store.put_episodes(
        EpisodeRecord(
            f"{group}.{member}", group, member, state=State.TRAINED, turns=1, tokens=50, oldest=1, step=2,
            result=EpisodeResult(member / 8, group % 500, end=ends[group % len(ends)]), stats=EpisodeStats(3),
        )
        for group in range(12_500) for member in range(8)
    )  # fmt: skip
    store.commit()
    store.close()
    with closing(RunReader.open(tmp_path)) as reader:
        began = time.process_time()
        found = episodes.page(
            reader, episodes.Filter(end="length", length_from=200, order="-reward", start=200)
        )
        assert time.process_time() - began < 4.0
    assert found["total"] == 8 * sum(
        g % 500 >= 200 and ends[g % len(ends)] == "length" for g in range(12_500)
    )
    assert [one["reward"] for one in found["episodes"]] == [7 / 8] * 100


def test_lanes_of_a_window_and_of_another_run_in_the_same_directory(tmp_path: Path) -> None:
    run_dir = save_run(tmp_path / "what? 50%")
    views = Views([run_dir], ended)
    assert views.answer("episodes", {})["total"] == 8  # the name is none of an address
    assert views.answer("lanes", {}).end == 4000
    window = views.answer("lanes", {"from": "1000", "to": "1002"})
    (row,) = window.processes[0].rows
    assert [span[-1] for span in row.spans] == ["step 999", "step 1000", "step 1001", "step 1002"]
    (run_dir / "timeline" / "trainer-0.jsonl").write_text('{"name":"train","start":1,"end":2}\n')
    (run_dir / "started").write_text("another run")
    assert views.answer("lanes", {}).end == 2


def test_a_store_of_another_version_is_named(tmp_path: Path) -> None:
    other = save_run(tmp_path / "b")
    with closing(sqlite3.connect(other / "run.db")) as db:
        db.execute("PRAGMA user_version=1")
    with pytest.raises(ConfigError, match="an older version"):
        Views([other], ended).answer("episodes", {})
