from __future__ import annotations

import base64
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import PIL.Image
import pytest

from asyncrl import cli
from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.commands.status import describe_ending
from asyncrl.config import read_config
from asyncrl.data import samples_path
from asyncrl.data.storage import ImageWriter, images_path
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.files import write_status
from asyncrl.observe.metrics import FILTERED, REWARD
from asyncrl.store.launches import LAUNCHES_KEY, with_launch
from asyncrl.store.listing import Listing, episode_page
from asyncrl.store.listing import count_facets as facets_of
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.types import (
    IMAGE_MARK,
    EpisodeEnd,
    EpisodeResult,
    EpisodeStats,
    Message,
    Observation,
    ToolCall,
    ToolReply,
    TurnReply,
)
from asyncrl.viewer.episodes import load_decoder
from asyncrl.viewer.views import Views
from asyncrl.vision.files import prepare_decoded
from asyncrl.vision.image_ids import image_ids
from tests.fakes import planted
from tests.fakes.chat import IMAGE_LAYOUT
from tests.fakes.data import rows, stored
from tests.fakes.planted import MARKUP, MODEL, ended, save_run
from tests.unit.buffer.machine import turn_payload


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def views(run_dir: Path) -> Views:
    return Views([run_dir], ended)


def uids(views: Views, *where: Any, order: str = "", search: str = "") -> list[str]:
    answer = views.answer("episodes", {"where": json.dumps(where), "order": order, "search": search})
    listed = [episode["uid"] for episode in answer["episodes"]]
    assert answer["total"] == len(listed)
    return listed


def facets(views: Views, *where: Any) -> dict[str, dict[Any, int]]:
    answer = views.answer("episodes", {"where": json.dumps(where)})["facets"]
    return {facet["column"]: {str(v["value"]): v["count"] for v in facet["values"]} for facet in answer}


def test_filters_and_orders(views: Views) -> None:
    assert uids(views) == ["3.0", "3.1", "1.0", "1.1", "0.0", "0.1", "2.0", "2.1"]  # never over: the last
    trained = ["state", "=", "trained"]
    assert uids(views, trained, order="-reward") == ["0.0", "1.0", "1.1", "0.1"]
    assert uids(views, trained, ["reward", ">=", 0.5], ["reward", "<=", 0.9]) == ["1.0", "1.1"]
    assert uids(views, ["step", "=", 1], order="reward")[0] == "0.1" and not uids(views, ["step", ">=", 2])
    assert uids(views, ["group", "=", 0]) == ["0.0", "0.1"] and uids(views, ["end", "=", "length"]) == []
    assert uids(views, ["end", "=", "answered"], ["tokens", ">=", 10], ["group", "=", 1]) == ["1.0", "1.1"]
    assert uids(views, ["reason", "=", "group_short"]) == ["3.0", "3.1"]
    assert uids(views, ["uid", "=", "0.0"], ["uid", "=", "2.0"]) == ["0.0", "2.0"]  # one or the other
    assert uids(views, ["components.acc", "=", [0.5, 1]]) == ["1.0", "1.1"]
    assert uids(views, ["end", "begins", "ANS"], ["group", "=", 1]) == ["1.0", "1.1"]
    assert uids(views, ["end", "begins", "answere_"]) == []
    assert uids(views, trained, order="-components.acc")[0] == "0.0"
    assert uids(views, ["step", "=", None], ["lag", "=", None], order="lag") == ["3.0", "3.1", "2.0", "2.1"]


def test_while_a_run_goes_on_what_is_under_way_is_listed_where_it_is_new(run_dir: Path) -> None:
    assert uids(Views([run_dir], lambda _: ""))[2:4] == ["2.0", "2.1"]


def test_words_are_found_in_questions_answers_and_transcripts(views: Views) -> None:
    assert uids(views, search="ANSWER 1.0") == ["1.0"] and uids(views, search="answer%") == []
    assert len(uids(views, search="onerror=alert")) == 4, "in what a tool replied"
    answer = views.answer("episodes", {"search": "nowhere", "where": '[["state","=","trained"]]'})
    assert answer["searched"] == {"transcripts": 4, "of": 4} and not answer["episodes"]


def test_an_episode_of_the_list_has_its_texts(views: Views) -> None:
    (episode,) = views.answer("episodes", {"where": '[["uid","=","0.0"]]'})["episodes"]
    assert (episode["question"], episode["answer"], episode["truth"]) == ("68?", "the answer of 0.0", "1"), (
        episode
    )
    assert (episode["kind"], episode["step"], episode["components"], episode["lag"]) == (
        "train",
        1,
        {"acc": 1.0},
        1,
    )


def test_a_facet_counts_what_fits_all_conditions_but_its_own(views: Views) -> None:
    counts = facets(views)
    assert counts["state"] == {"trained": 4, "dropped": 2, "running": 1, "pending": 1}
    assert counts["score"] == {"0.0": 1, "0.5": 2, "1.0": 2}, counts
    assert counts["components.acc"] == {"0.0": 1, "0.5": 2, "1.0": 1} and "agent" not in counts
    counts = facets(views, ["state", "=", "trained"], ["score", "=", 0.5])
    assert counts["state"] == {"trained": 2} and counts["score"] == {"0.0": 1, "0.5": 2, "1.0": 1}
    assert counts["components.acc"] == {"0.5": 2}
    assert facets(views, ["group", ">=", 1], ["state", "=", "dropped"])["state"]["trained"] == 2


def test_tools_are_added_up(views: Views) -> None:
    tool_rows = views.answer("tools", {})
    assert [(tool_row["tool"], tool_row["calls"]) for tool_row in tool_rows] == [
        ("calculator", 3),
        ("search", 1),
    ]
    assert views.answer("tools", {"where": '[["group","=",0]]'})[0]["calls"] == 1
    assert uids(views, ["tool", "=", "search"]) == ["0.0"] and uids(views, ["tool", "=", "none"]) == []
    assert len(uids(views, ["tool", "=", "search"], ["tool", "=", "calculator"])) == 4


def test_a_search_finds_calls_and_their_errors(tmp_path: Path) -> None:
    views = Views([planted.broken_tool(tmp_path / "run")], ended)
    assert len(uids(views, search="connection refused")) == len(uids(views, search="search refused")) == 24
    assert uids(views, search="calculator refused") == []


def test_a_transcript_says_of_each_token_what_training_took_it_for(views: Views) -> None:
    transcript = views.answer("episode", {"uid": "0.0"})
    (turn,) = transcript["turns"]
    assert turn["ids"] == tuple(range(18, 28)) and turn["texts"] == [*"0123456789"]
    assert turn["versions"] == [0] * 4 + [1] * 6 and turn["kv_versions"] == [0] * 10
    assert turn["lags"] == [0] * 4 + [1] * 6 and not any(turn["stale"])
    assert turn["ratios"] == [pytest.approx(2.0), None] + [1.0] * 8
    assert turn["dropped"] == [True] + [False] * 9
    assert turn["replies"][0]["content"] == MARKUP
    assert transcript["listed"]["answer"] == "the answer of 0.0" and transcript["no_advantage"] == ""
    assert transcript["listed"]["truth"] == "1" and transcript["result"]["components"] == {"acc": 1.0}


def test_advantages_are_the_trainers(views: Views) -> None:
    (first,), (second,) = (views.answer("episode", {"uid": uid})["turns"] for uid in ("0.0", "0.1"))
    assert first["rewards"] == [0.0] * 9 + [1.0]
    assert (first["advantages"], second["advantages"]) == ([0.5] * 10, [-0.5] * 10)


def test_a_viewer_loads_no_torch(run_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from asyncrl.viewer.views import Views\n"
        "views = Views([Path(sys.argv[1])], lambda path: 'completed')\n"
        "for name in ('runs', 'rows', 'episodes', 'tools', 'lanes'): views.answer(name, {})\n"
        "assert views.answer('episode', {'uid': '0.0'})['turns']\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, str(run_dir)], check=True)


def test_an_episode_is_shown_as_the_launch_that_trained_it_was_configured(tmp_path: Path) -> None:
    run_dir = save_run(tmp_path / "c")
    config = read_config(run_dir)
    buffer = msgspec.structs.replace(config.buffer, max_staleness=0, target_staleness=0)
    store = RunStore(run_dir)
    launches = with_launch(with_launch([], 0, config), 1, msgspec.structs.replace(config, buffer=buffer))
    store.put_meta(LAUNCHES_KEY, msgspec.json.encode(launches).decode())
    store.commit()
    store.close()
    trained, running = (Views([run_dir], ended).answer("episode", {"uid": uid}) for uid in ("0.0", "2.0"))
    assert trained["bound"] == config.buffer.max_staleness > running["bound"] == 0
    assert not any(trained["turns"][0]["stale"])


def test_before_any_step_the_page_has_the_score_and_why_nothing_is_learned(tmp_path: Path) -> None:
    gauges = {REWARD: 0.0, FILTERED: 0.98}
    gauges |= {"rollout/score/min": 0.0, "rollout/score/max": 0.0, "rollout/landed": 64.0}
    alerts = [{"name": "constant reward", "what": "all 64 episodes scored 0"}]
    write_status(tmp_path, {"phase": "running", "alerts": alerts, "gauges": gauges, "metrics": {}})
    views = Views([tmp_path], lambda run_dir: "")
    (alert,) = views.answer("overview", {})["alerts"]
    assert (alert.name, alert.what) == ("constant reward", "all 64 episodes scored 0")


def test_one_that_has_not_landed_or_has_lost_its_turns_says_so(views: Views) -> None:
    running, dropped = (views.answer("episode", {"uid": uid}) for uid in ("2.0", "3.0"))
    assert running["turns"] == [] and running["no_advantage"] == "the episode has not finished"
    assert dropped["turns"] == [] and "store.keep_bytes" in dropped["missing"]


@pytest.mark.parametrize(
    ("name", "query", "why"),
    [
        ("episodes", {"where": '[["reward", "=", NaN]]'}, "where"),
        ("episodes", {"where": '[["colour", "=", "x"]]'}, "unknown column 'colour'"),
        ("episodes", {"where": '[["reward", "<", 1]]'}, "where"),
        ("episodes", {"order": "x; --"}, "unknown column 'x; --'; the columns are uid, "),
        ("episodes", {"where": f'[["group", "=", {"9" * 30}]]'}, "where"),
        ("episodes", {"start": "-1"}, "start"),
        ("lanes", {"from": "nan"}, "from=nan: expected a number"),
        ("lanes", {"to": "x"}, "to=x: expected a number"),
        ("rows", {"from": "1e999"}, "from=1e999: expected a number"),
        ("lanes", {"step": "-1"}, "step=-1: expected a number"),
        ("compare", {"to": "9" * 30}, "to=9"),
        ("episodes", {"run": "1"}, "use a number from 0 to 0"),
        ("episodes", {"run": "9" * 5000}, "use a number from 0 to 0"),
        ("episode", {"uid": "9.9"}, "episode 9.9 is not stored, or is no longer stored"),
    ],
)
def test_bad_questions_are_named(views: Views, name: str, query: dict[str, str], why: str) -> None:
    with pytest.raises(AsyncrlError, match=why):
        views.answer(name, query)


def test_a_held_out_episode_is_read_token_by_token(tmp_path: Path) -> None:
    run_dir = save_run(tmp_path / "a")
    uid = "val4/greedy/3"
    store = RunStore(run_dir)
    store.put_frame(uid, 0, "generated", turn_payload())
    store.put_question(-4, stored(rows(5))[3])
    ended_at = EpisodeRecord(uid, 3, 0, state=State.LANDED, turns=1, stats=EpisodeStats(1))
    store.list_held_out(ended_at, 4, "greedy")
    store.commit()
    store.close()
    stored(rows(5)).save(samples_path(run_dir, "test"))
    views = Views([run_dir], ended)
    assert uids(views, ["kind", "=", "held out"]) == [uid] and facets(views)["kind"] == {
        "train": 8,
        "held out": 1,
    }
    transcript = views.answer("episode", {"uid": uid})
    assert transcript["step"] == 4 and transcript["listed"]["question"] == "3?"
    assert (
        transcript["turns"][0]["texts"]
        and transcript["no_advantage"] == "held-out episodes are not used for training"
    )
    (listed,) = views.answer("episodes", {"where": '[["kind","=","held out"]]'})["episodes"]
    assert (listed["step"], listed["lag"], listed["group"], listed["question"]) == (4, None, None, "3?")


def test_images_are_named_in_texts_and_shown(tmp_path: Path) -> None:
    run_dir = save_run(tmp_path / "a")
    uid = "val4/greedy/3"
    image = prepare_decoded(PIL.Image.new("RGB", (64, 48), "red"), IMAGE_LAYOUT)
    reply = ToolReply(ToolCall("look", "{}"), f"seen {IMAGE_MARK}", images=(image.ref,))
    observation = Observation((Message("user", f"{IMAGE_MARK}!", images=(image.ref,)),))

    store = RunStore(run_dir)
    context = (5, *image_ids(image.ref.digest, 12), 6)
    store.put_frame(uid, 0, "generated", turn_payload(context=context))
    store.put_frame(uid, 0, "replied", msgspec.msgpack.encode(TurnReply((reply,), observation)))
    store.put_image(uid, 0, image.ref.digest, image.file)
    store.put_question(-4, stored(rows(5))[3])
    ended_at = EpisodeRecord(uid, 3, 0, state=State.LANDED, turns=1, stats=EpisodeStats(1))
    store.list_held_out(ended_at, 4, "greedy")
    store.commit()
    store.close()

    views = Views([run_dir], ended)
    episode = views.answer("episode", {"uid": uid})
    (turn,) = episode["turns"]
    before, after = (load_decoder(str(MODEL))([token]) for token in (5, 6))
    assert turn["context"]["text"] == f"{before}[image]{after}"
    assert turn["context"]["images"] == [image.ref.digest]
    assert turn["replies"][0]["content"] == "seen [image 64x48]"
    assert turn["observation"]["messages"][0]["content"] == "[image 64x48]!"

    answer = views.answer("image", {"run": episode["run"], "digest": image.ref.digest})
    assert answer == {"url": f"data:image/png;base64,{base64.b64encode(image.file).decode()}"}
    for digest in ("", "0" * 29, "generated"):
        with pytest.raises(ConfigError, match="is not stored in the run"):
            views.answer("image", {"digest": digest})


def test_the_images_of_the_data_stay_open(tmp_path: Path) -> None:
    run_dirs = [save_run(tmp_path / name) for name in "ab"]
    for run_dir, color in zip(run_dirs, ("red", "blue"), strict=True):
        image = prepare_decoded(PIL.Image.new("RGB", (64, 48), color), IMAGE_LAYOUT)
        with tempfile.TemporaryFile() as file:
            writer = ImageWriter(file)
            writer.add("d", image.file)
            writer.finish(sample_ids=0).save(images_path(run_dir, "train"))

    views = Views(run_dirs, ended)
    answers = [views.answer("image", {"run": number, "digest": "d"}) for number in ("0", "1", "0")]
    assert answers[0] == answers[2] != answers[1]
    images_path(run_dirs[0], "train").unlink()  # a file that is opened again would not be found
    assert views.answer("image", {"run": "0", "digest": "d"}) == answers[0]


def test_a_function_of_the_users_is_not_run(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')")
    second_run = save_run(tmp_path / "b")
    text = (second_run / "config.yaml").read_text()
    (second_run / "config.yaml").write_text(text.replace("advantage: ", f"advantage: {tmp_path}/mine.py:", 1))
    transcript = Views([second_run], ended).answer("episode", {"uid": "0.0"})
    assert "does not run" in transcript["no_advantage"]
    (differing,) = Views([run_dir, second_run], ended).answer("runs", {})["differences"]
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
    assert recorded["overview?run=0"]["alerts"][0]["name"] == "skipped optimizer steps"
    assert recorded["episode?run=0&uid=0.0"]["turns"][0]["replies"][0]["content"] == MARKUP
    assert recorded["runs"]["runs"][0]["ended"]


def test_a_hundred_thousand_episodes_are_paged_in_time(tmp_path: Path) -> None:
    """In less than half a second on a quiet machine; more here, where tests share two cores."""
    store = RunStore(tmp_path)
    ends = list(EpisodeEnd)
    page = [
        EpisodeRecord(
            f"{group}.{member}", group, member, state=State.TRAINED, turns=1, tokens=50, oldest=1, step=2,
            result=EpisodeResult(member / 8, group % 500, end=ends[group % len(ends)]), stats=EpisodeStats(3),
        )
        for group in range(12_500) for member in range(8)
    ]  # fmt: skip
    store.put_episodes(page)
    store.commit()
    store.close()

    with closing(RunReader.open(tmp_path)) as reader:
        began = time.process_time()
        wanted = Listing.of('[["end","=","length"],["tokens",">=",200]]', "-reward", "200", "")
        total, _ = facets_of(reader, wanted)
        page = episode_page(reader, wanted)
        assert time.process_time() - began < 1.5

    assert total == 8 * sum(g % 500 >= 200 and ends[g % len(ends)] == "length" for g in range(12_500))
    assert [episode["reward"] for episode in page] == [7 / 8] * 100


def test_lanes_of_a_window_and_of_another_run_in_the_same_directory(tmp_path: Path) -> None:
    run_dir = save_run(tmp_path / "what? 50%")
    views = Views([run_dir], ended)
    assert views.answer("episodes", {})["total"] == 8  # the name is none of an address
    assert views.answer("lanes", {})["length"] == 4000
    window = views.answer("lanes", {"from": "1000", "to": "1002"})
    (row,) = window["processes"][0]["rows"]
    assert [span[-1] for span in row["spans"]] == ["step 999", "step 1000", "step 1001", "step 1002"]
    (run_dir / "timeline" / "trainer-0.jsonl").write_text('{"name":"train","start":1,"end":2}\n')
    (run_dir / "started").write_text("another run")
    assert views.answer("lanes", {})["length"] == 1


def test_beside_a_run_that_was_deleted_and_one_of_another_version_others_are_shown(tmp_path: Path) -> None:
    runs = [
        save_run(tmp_path / name, lr=lr) for name, lr in (("a", 1e-5), ("b", 1e-5), ("c", 1e-5), ("d", 1e-6))
    ]
    with closing(sqlite3.connect(runs[1] / "run.db")) as db:
        db.execute("PRAGMA user_version=1")
    shutil.rmtree(runs[2])
    views = Views(runs, describe_ending)
    answer = views.answer("runs", {})
    assert answer["differences"] == {"trainer.lr": [1e-5, 1e-5, None, 1e-6]}
    assert answer["runs"][2]["ended"] == "deleted" and views.answer("rows", {"run": "2"})["steps"] == 0
    with pytest.raises(ConfigError, match=r"\(schema 1\), so"):
        views.answer("episodes", {"run": "1"})
