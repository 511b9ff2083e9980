"""Models of the hub and templates of one's own: what the configuration names becomes directories and text."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from asyncrl.config import KLConfig, RunConfig, parse
from asyncrl.engines.sglang.process import server_command
from asyncrl.errors import ConfigError
from asyncrl.launch import estimates
from asyncrl.launch.models import check_model, check_not_quantized, resolve_models
from asyncrl.launch.placement import COORDINATOR
from asyncrl.launch.process import BAD_INPUT
from asyncrl.launch.role import run_role
from asyncrl.launch.run_directory import check_resumed, previous_config
from asyncrl.weights.disk import KEPT_VERSIONS, space_needed
from asyncrl.weights.trained_tensors import published_bytes
from asyncrl.wire.sockets import Endpoints
from tests.fakes.tiny_families import build_family

COMMITS = ("1" * 40, "2" * 40)
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"pickled",
    "onnx/config.json": b"{}",
}


class Hub(ThreadingHTTPServer):
    """One repository, o/m, whose newest commit is `commit`. `sent`: the files that were asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.commit = COMMITS[0]
        self.sent = list[str]()


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        commit = self.server.commit
        if path.startswith("/api/models/o/m/tree/"):
            tree = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in FILES.items()]
            return self.send(json.dumps(tree).encode(), body)
        if path.startswith("/api/models/o/m"):
            wanted = path.rpartition("/")[2]
            files = [{"rfilename": name} for name in FILES]
            sha = wanted if wanted in COMMITS else commit
            return self.send(json.dumps({"id": "o/m", "sha": sha, "siblings": files}).encode(), body)
        name = path.removeprefix(f"/o/m/resolve/{path.split('/')[4]}/") if path.count("/") > 4 else ""
        if path.startswith("/o/m/resolve/") and name in FILES:
            self.server.sent += [name] * body
            return self.send(FILES[name], body, ETag=f'"{name}"', **{"X-Repo-Commit": path.split("/")[4]})
        self.send(b"{}", body, 404, **{"X-Error-Code": "RepoNotFound"})
        return None

    def send(self, data: bytes, body: bool, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()


def config(tmp_path: Path, path: str, template: str = "", **keys: Any) -> RunConfig:
    model = {"path": path, "template": template}
    return parse({"name": "x", "run_dir": str(tmp_path), "model": model, "data": {"train": "t"}} | keys)


def begin(given: RunConfig) -> Path:
    run_dir = Path(given.run_dir) / given.name
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(given))
    return run_dir


def test_a_repository_becomes_a_directory_with_the_files_that_a_run_needs(tmp_path: Path, hub: Hub) -> None:
    given = config(tmp_path, "o/m", kl={"reference": "o/m@main"}, critic={"path": "o/m"})
    found = resolve_models(given)
    path = Path(found.model.path)
    assert path == tmp_path / "cache" / "models--o--m" / "snapshots" / COMMITS[0]
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "chat_template.jinja",
    }
    assert found.kl.reference == found.critic.path == str(path)
    assert len(hub.sent) == 3, "each file is sent once"
    assert resolve_models(found) == found, "directories stay as they are"


@pytest.mark.parametrize(("flags", "wanted"), [("fpu avx2 avx512f", "float32"), ("fpu amx_bf16", "bfloat16")])
def test_the_type_is_what_the_machine_multiplies_or_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, wanted: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(estimates, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "m").mkdir()
    given = config(tmp_path, str(tmp_path / "m"))
    given = msgspec.structs.replace(
        given, model=msgspec.structs.replace(given.model, dtype="auto", device="cpu"), resume="auto"
    )
    found = resolve_models(given)
    assert found.model.dtype == wanted and resolve_models(found) == found
    (tmp_path / "cpuinfo").unlink()
    assert resolve_models(given).model.dtype == "float32"
    begin(found)
    assert resolve_models(given, previous_config(given)).model.dtype == wanted, (
        "a run goes on with what it began with"
    )


def test_without_a_network_the_cache_is_taken(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resolve_models(config(tmp_path, "o/m"))
    hub.server_close()
    hub.shutdown()
    assert resolve_models(config(tmp_path, "o/m")) == before
    with pytest.raises(
        ConfigError, match=r"model\.path: o/other is not a directory here, and the hub cannot"
    ):
        resolve_models(config(tmp_path, "o/other"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_models(config(tmp_path, "o/m")) == before


def test_what_the_hub_does_not_have_is_said_on_one_line(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"path: no/such is not a directory here, and the hub has no such"):
        resolve_models(config(tmp_path, "no/such"))
    for name in ("./models/mine", "mine", "/models/mine", "a/b/c"):
        with pytest.raises(ConfigError, match=rf"path: {name} is not a directory; use a Hugging Face model"):
            resolve_models(config(tmp_path, name))


def test_a_home_directory_is_meant_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "own.jinja").write_text("{{ 1 }}")
    found = resolve_models(config(tmp_path, "~/mine", "~/own.jinja"))
    assert found.model.path == str(tmp_path / "mine") and found.model.template == "{{ 1 }}"


def test_a_run_goes_on_with_the_commit_that_it_was_begun_with(tmp_path: Path, hub: Hub) -> None:
    first = resolve_models(config(tmp_path, "o/m"))
    begin(first)
    hub.commit = COMMITS[1]
    resumed = config(tmp_path, "o/m", resume="auto")
    again = resolve_models(resumed, previous_config(resumed))
    assert again.model.path == first.model.path
    check_resumed(again)
    assert COMMITS[1] in resolve_models(config(tmp_path, "o/m")).model.path, "a new run: the newest"


def test_a_machine_with_another_cache_fetches_the_same_commit(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = resolve_models(config(tmp_path, "o/m"))
    hub.commit = COMMITS[1]
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "here"))
    assert resolve_models(launcher).model.path == str(
        tmp_path / "here" / "models--o--m" / "snapshots" / COMMITS[0]
    )


def started(config: RunConfig, endpoints: Endpoints, incarnation: str) -> int:
    """A role that says whether it sees its model."""
    return 0 if (Path(config.model.path) / "model.safetensors").read_bytes() == b"weights" else 1


def test_a_role_that_lacks_the_directory_fetches_it(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = resolve_models(config(tmp_path, "o/m"))
    where = Endpoints("tcp://c", "tcp://b")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "here"))
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    target = f"{__name__}:started"
    options = Namespace(role=COORDINATOR, target=target, index=0, incarnation="i", rendezvous="")
    assert run_role(options, launcher, where) == 0
    gone = msgspec.structs.replace(launcher, kl=KLConfig(reference="/gone"))
    assert run_role(options, gone, where) == BAD_INPUT
    assert "kl.reference: /gone is not a directory" in caplog.text


def test_the_configuration_holds_the_text_of_the_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ 'ä' }}\n{{ messages }}")
    found = resolve_models(config(tmp_path, str(tmp_path), str(file)))
    assert found.model.template == file.read_text()
    file.unlink()
    assert msgspec.yaml.decode(msgspec.yaml.encode(found), type=RunConfig) == found
    assert resolve_models(found) == found, "on another machine, which lacks the file"
    shipped = resolve_models(config(tmp_path, str(tmp_path), "chatml_tools")).model.template
    assert "<|im_start|>" in shipped and "<tool_call>" in shipped
    for text, says in {
        "": "cannot be read .*FileNotFoundError.* one of these names: chatml_tools",
        "hi": "not a Jinja",
    }.items():
        if text:
            file.write_text(text)
        with pytest.raises(ConfigError, match=rf"model\.template: .*mine\.jinja .*{says}"):
            resolve_models(config(tmp_path, str(tmp_path), str(file)))


def test_a_resumed_run_keeps_its_template(tmp_path: Path) -> None:
    begin(config(tmp_path, "m", "{{ messages }}"))
    check_resumed(config(tmp_path, "m", "{{ messages }}", resume="auto"))
    for other in ("", "{{ messages[0] }}"):
        with pytest.raises(ConfigError, match=r"model\.template: .* started with another chat template"):
            check_resumed(config(tmp_path, "m", other, resume="auto"))


@pytest.mark.parametrize(
    ("weights", "served"),
    [
        (["layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight", "embed_tokens.weight"], True),
        (["h.0.attn.c_attn.weight"], False),  # GPT-2
    ],
    ids=["known", "unknown"],
)
def test_servers_get_adapters_on_demand_and_where_they_know_all_layers(
    tmp_path: Path, weights: list[str], served: bool
) -> None:
    save_file({name: torch.ones(2, 2) for name in weights}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")

    def resolved(adapters: object = "auto", **engine: object) -> RunConfig:
        model = {"path": str(tmp_path), "lora_rank": 2, "dtype": "float32"}
        sections = {"model": model, "engine": engine, "weights": {"adapters": adapters}}
        return resolve_models(parse({"name": "x", "data": {"train": "d"}} | sections))

    assert not resolved(name="sglang").adapters_apart
    assert "--enable-lora" not in server_command(resolved(name="sglang"), 0, "h", 1, gpus=0)
    assert resolved(name="torch").adapters_apart
    if not served:
        with pytest.raises(
            ConfigError,
            match=r"weights\.adapters: SGLang does not support adapters for any .*set weights.adapters=false",
        ):
            resolved(True, name="sglang")
        return
    apart = resolved(True, name="sglang", servers=3)
    command = " ".join(server_command(apart, 0, "h", 1, gpus=0))
    lora = "--enable-lora --max-lora-rank 2 --lora-target-modules down_proj q_proj --max-loras-per-batch 6"
    assert command.endswith(lora)
    size = published_bytes(apart)  # rank 2 on two layers of 2 x 2, in float32
    assert size == 2 * 2 * (2 + 2) * 4
    assert space_needed(apart, size) == size * (KEPT_VERSIONS + 2 + 3 * apart.versions_held)


QUANTIZED = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.mark.parametrize(
    ("model_settings", "method", "advice"),
    [
        (QUANTIZED, "mxfp4", r", or create one .*Mxfp4Config\(dequantize=True\)"),
        (
            {"text_config": {"quantization_config": {"quant_method": "compressed-tensors"}}},
            "compressed-tensors",
            "",
        ),
    ],
)
@pytest.mark.parametrize("key", ["model.path", "kl.reference", "critic.path"])
def test_quantized_models_are_refused_where_ranks_read_them(
    tmp_path: Path, key: str, model_settings: dict[str, Any], method: str, advice: str
) -> None:
    paths = {name: tmp_path / name for name in ("model.path", "kl.reference", "critic.path")}
    for path in paths.values():
        path.mkdir()
        (path / "config.json").write_text("{}")

    config = parse(
        {
            "name": "x",
            "data": {"train": "d"},
            "model": {"path": str(paths["model.path"])},
            "kl": {"where": "loss", "reference": str(paths["kl.reference"])},
            "critic": {"path": str(paths["critic.path"])},
        }
    )
    check_not_quantized(config)

    (paths[key] / "config.json").write_text(json.dumps(model_settings))
    message = rf"^{key} .*: the weights are quantized \({method}\), .* bfloat16 version of the model{advice}"
    with pytest.raises(ConfigError, match=message):
        check_not_quantized(config)


def test_a_scorer_may_be_quantized(tmp_path: Path) -> None:
    """Servers read its model."""
    (tmp_path / "config.json").write_text("{}")
    scorer_path = tmp_path / "scorer"
    scorer_path.mkdir()
    (scorer_path / "config.json").write_text(json.dumps(QUANTIZED))
    scorers = {"reference": {"path": str(scorer_path)}}
    model = {"path": str(tmp_path)}
    check_not_quantized(
        parse(
            {
                "name": "x",
                "data": {"train": "d"},
                "model": model,
                "scorers": scorers,
                "kl": {"where": "loss"},
            }
        )
    )


@pytest.mark.slow
def test_a_processor_does_not_replace_a_tokenizer(tmp_path: Path) -> None:
    model = build_family("qwen3_5", tmp_path)
    (model / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"no tokenizer\.json next to its preprocessor_config\.json; save a"
    ):
        check_model(parse({"name": "x", "data": {"train": "d"}, "model": {"path": str(model)}}))


@pytest.mark.slow
def test_sizes_of_a_composite_model_are_those_of_its_text_part(tmp_path: Path) -> None:
    model = build_family("qwen3_5", tmp_path)
    rollout = {"max_tokens": 5000}
    config = parse({"name": "x", "data": {"train": "d"}, "model": {"path": str(model)}, "rollout": rollout})
    with pytest.raises(
        ConfigError, match=r"rollout\.max_tokens \(5000\) exceeds the model's context length \(4096\)"
    ):
        check_model(config)


def test_a_teacher_in_the_trainer_has_the_policy_s_tokens(tmp_path: Path) -> None:
    model = Path(__file__).parents[3] / "examples" / "multiturn" / "calculator" / "model"
    shutil.copytree(model, tmp_path / "other")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    one, two, *_ = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] |= {
        one: tokenizer["model"]["vocab"][two],
        two: tokenizer["model"]["vocab"][one],
    }
    for reference, refused in ((model, False), (tmp_path / "other", True)):
        (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
        kl = {"where": "loss", "reference": str(reference)}
        config = parse({"name": "t", "model": {"path": str(model)}, "data": {"train": "x"}, "kl": kl})
        config = msgspec.structs.replace(
            config, rollout=msgspec.structs.replace(config.rollout, max_tokens=256)
        )
        if not refused:
            check_model(config)
            continue
        with pytest.raises(ConfigError, match=r"^kl\.reference: .* a different vocabulary"):
            check_model(config)
