"""How a run will compute its model, said before the start by a small copy in a child process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from asyncrl import cli
from asyncrl.launch.architecture import NOT_YET, CopyFinding, SlotMemory, find_on_copy
from asyncrl.runtime.process import MainMemory
from tests.fakes.checked import Given

pytestmark = pytest.mark.slow
PATIENCE = 300.0  # seconds: the child shares its cores with other tests
NO_SECONDS = 0.0  # no child can answer within this
OWN_ATTENTION = "layers.0.self_attn (StableLmAttention)"
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LINEAR_ATTENTION = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this file: what one test has checked is known to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory := tmp_path_factory.mktemp("cache")))
        yield directory


def save_model(run_inputs: Given, model_type: str) -> str:
    """Replace the weights of `run_inputs` by a tiny model of this type, and return its directory."""
    vocabulary_size = json.loads((run_inputs.model / "config.json").read_text())["vocab_size"]
    text = {"vocab_size": vocabulary_size, **TEXT}
    if model_type == "qwen3_5":
        config: PreTrainedConfig = AutoConfig.for_model(
            model_type, text_config=text | LINEAR_ATTENTION, vision_config=VISION
        )
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **text, num_hidden_layers=2)
        )

    model.save_pretrained(run_inputs.model)
    return str(run_inputs.model)


def engine_of_a_user(run_inputs: Given) -> str:
    """Return the key of an engine that no check tries."""
    file = run_inputs.folder / "mine.py"
    file.write_text("def make(**options):\n    raise NotImplementedError\n")
    return f"engine.name={file}:make"


@pytest.mark.full
def test_attention_of_its_own_is_named_before_the_start(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_model(given, "stablelm")
    findings = find_on_copy(path, ["engine", "trainer"], PATIENCE)
    problems = findings["trainer"].problems
    assert problems is not None and problems["tree"].endswith(OWN_ATTENTION)
    assert find_on_copy(path, ["engine", "trainer"], NO_SECONDS) == findings, "they are remembered"

    assert cli.main(["train", *given.overrides]) == 2, "what is remembered ends a start before any process"
    assert "cannot serve StableLmForCausalLM" in capsys.readouterr().err
    assert not given.runs.exists()

    assert cli.main(["doctor", *given.overrides]) == 2
    lines = {line[9:23].strip(): line for line in capsys.readouterr().out.splitlines() if line[:1].islower()}
    assert lines["engine"].startswith("error") and "cannot serve StableLmForCausalLM" in lines["engine"]
    assert lines["packing"].startswith("ok") and lines["packing"].endswith(OWN_ATTENTION)

    assert cli.main(["train", "--dry-run", *given.overrides, engine_of_a_user(given)]) == 0
    (rows_line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("rows:"))
    assert rows_line.startswith("rows: padded instead of tree (trainer.packing), because StableLmForCausalLM")
    assert rows_line.endswith(OWN_ATTENTION)


def test_a_plain_model_is_packed_and_served_where_its_slots_fit(
    given: Given, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(given, "qwen3")
    findings = find_on_copy(path, ["engine", "trainer"], PATIENCE)
    kv_numbers = 2 * 2 * TEXT["num_key_value_heads"] * TEXT["head_dim"]
    assert findings["engine"] == CopyFinding({"engine": ""}, slot=SlotMemory(kv_numbers, state_bytes=0))

    assert cli.main(["train", "--dry-run", *given.overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "the embedded engine serves Qwen3ForCausalLM: 16 slots take 2.5 MB" in "\n".join(lines)
    assert "rows: tree (trainer.packing)" in lines

    monkeypatch.setattr("asyncrl.launch.memory.main_memory", lambda: MainMemory(total=2**31, available=2**31))
    assert cli.main(["train", "--dry-run", *given.overrides, "rollout.slots=20000"]) == 2
    refusal = capsys.readouterr().err
    assert "rollout.slots: the embedded engine's 20000 slots take 3.1 GB (each 154.1 kB" in refusal


@pytest.mark.full
def test_rows_with_states_are_packed_unless_ranks_share_them(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    find_on_copy(save_model(given, "qwen3_5"), ["engine", "trainer"], PATIENCE)
    assert cli.main(["train", "--dry-run", *given.overrides]) == 0
    assert "rows: tree (trainer.packing)" in capsys.readouterr().out.splitlines()

    shared = ["trainer.ranks=2", "trainer.sequence_parallel=2"]
    assert cli.main(["train", "--dry-run", *given.overrides, *shared]) == 2
    refusal = capsys.readouterr().err
    assert "trainer.sequence_parallel=2 needs packed rows, but Qwen3_5ForConditionalGeneration has" in refusal
    assert "layers.0.linear_attn (Qwen3_5GatedDeltaNet); set trainer.sequence_parallel=1" in refusal


def test_a_check_that_is_late_is_ended_and_said(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(given.folder / "cache"))
    children = set(psutil.Process().children())
    late_finding = CopyFinding(reason=NOT_YET)
    assert find_on_copy(str(given.model), ["engine", "trainer"], NO_SECONDS) == {
        "engine": late_finding,
        "trainer": late_finding,
    }
    assert set(psutil.Process().children()) <= children
    assert not (given.folder / "cache").exists(), "nothing is remembered"


def test_a_child_that_fails_is_a_reason(given: Given) -> None:
    given.edit(model_type="unheard_of")
    finding = find_on_copy(str(given.model), ["trainer"], PATIENCE)["trainer"]
    assert finding.problems is None
    assert finding.reason.startswith("not checked (") and "unheard_of" in finding.reason
