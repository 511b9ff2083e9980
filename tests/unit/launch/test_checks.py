"""Spoils the inputs of a good run in one way at a time; the check that is responsible says so."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from asyncrl.launch import run_directory
from asyncrl.rewards import RewardInput, needs_truth
from asyncrl.runtime.process import MainMemory
from asyncrl.weights import disk
from tests.fakes.checked import (
    Given,
    Keys,
    Spoil,
    assert_found,
    gpus,
    patched,
    questions,
    rows,
    with_an_earlier_run,
    write_header,
)

SGLANG: Keys = {"engine.name": "sglang"}
COLOCATED: Keys = {"engine.colocated": 1}
RAY: Keys = {"launch.kind": "ray"}
CALCULATOR: Keys = {"rollout.tools": ["calculator"]}
BROADCAST: Keys = SGLANG | {"weights.transport": "collective"}
THREE: Keys = {"rollout.workers": 3}
SHARED: Keys = {"trainer.ranks": 6, "trainer.sequence_parallel": 2}
SAID = [{"role": "assistant", "content": "a"}]
JUDGE: Keys = {"llm_judge": {"url": "http://x", "model": "m"}}
FILTERED: Keys = {"data.filter_overlong": True}
GAE: Keys = {"algorithm.advantage": "gae", "buffer.filter_zero_variance": False}
SFT: Keys = {
    "algorithm.loss": "sft",
    "algorithm.advantage": "constant",
    "buffer.episodes_per_group": 1,
    "buffer.filter_zero_variance": False,
}


def own(given: RewardInput) -> float:
    return 1.0


@needs_truth()
def comparing(given: RewardInput) -> float:
    return 1.0


def run_with(file: str, text: str = "{}", **keys: str) -> Spoil:
    """A run of the same name, with this file."""

    def spoil(given: Given) -> Keys:
        (given.runs / "x").mkdir(parents=True, exist_ok=True)
        (given.runs / "x" / file).write_text(text)
        return keys

    return spoil


def mounted(kind: str, below: str) -> Spoil:
    def spoil(given: Given) -> None:
        mounts = {"/": kind, str(given.folder.resolve()): below}
        mount_points = [SimpleNamespace(mountpoint=point, fstype=each) for point, each in mounts.items()]
        given.patch.setattr(run_directory.psutil, "disk_partitions", lambda all: mount_points)

    return spoil


def file(name: str, text: str | None, *keys: str) -> Spoil:
    """A file of this text, or none; keys that have its path as their value, before what follows an =."""

    def spoil(given: Given) -> Keys:
        path = given.folder / name
        path.unlink() if text is None else path.write_text(text)
        return {key: f"{path}{more}" for key, _, more in (each.partition("=") for each in keys)}

    return spoil


def copied_model(given: Given) -> Keys:
    return {"model.path": str(shutil.copytree(given.model, given.folder / "other"))}


def lacking(module: str) -> Spoil:
    return lambda given: given.patch.setitem(sys.modules, module, None)


def edit(**values: Any) -> Spoil:
    return lambda given: given.edit(**values)


def large(given: Given) -> Keys:
    """100,000,001 parameters, of which only the headers are there."""
    write_header(given.model / "model.safetensors", a=[1000, 50_000], b=[50_000_000], scalar=[])
    return {"trainer.lr": 2e-5}


def half_a_model(given: Given) -> None:
    index = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (given.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def stored(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], key: str = "") -> Spoil:
    """The tensors in the model's file are changed; or those of a copy of the model, which `key` names."""

    def spoil(given: Given) -> Keys:
        directory = given.model
        if key:
            directory = given.folder / "other"
            shutil.copytree(given.model, directory)
        file = directory / "model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})
        return {key: str(directory)} if key else {}

    return spoil


def renamed(old: str, new: str, key: str = "") -> Spoil:
    return stored(lambda tensors: {re.sub(old, new, name): t for name, t in tensors.items()}, key)


def without(ending: str, key: str = "") -> Spoil:
    return stored(lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(ending)}, key)


def added(name: str, *shape: int, key: str = "") -> Spoil:
    return stored(lambda tensors: tensors | {name: torch.zeros(shape)}, key)


def narrower(ending: str) -> Spoil:
    return stored(lambda ts: {n: t[:-1].clone() if n.endswith(ending) else t for n, t in ts.items()})


def eight_bits(ending: str) -> Spoil:
    """Quantized weights, of which config.json says nothing."""
    return stored(
        lambda tensors: {
            name: tensor.to(torch.float8_e4m3fn) if name.endswith(ending) else tensor
            for name, tensor in tensors.items()
        }
    )


def classifier(given: Given) -> Keys:
    """A language model in place of a classifier."""
    return {"rollout.reward": {"classifier": {"path": str(given.model)}}}


def more_tokens(given: Given) -> None:
    """The tokenizer has a token that the embedding has no row for."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(given.model)
    tokenizer.add_tokens(["<|image|>"])
    tokenizer.save_pretrained(given.model)


def cut_in_half(given: Given) -> None:
    file = given.model / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def beyond_shared_memory(given: Given) -> Keys:
    numbers = shutil.disk_usage(disk.SHARED_MEMORY).free // 2 + 1  # of two bytes
    write_header(given.model / "model.safetensors", a=[numbers])
    return {"weights.directory": "shm"}


def data(*rows: dict[str, Any]) -> Spoil:
    return lambda given: {"data.train": given.write(rows)}


def talks(*answers: dict[str, Any]) -> Spoil:
    user_message = {"role": "user", "content": "q"}
    written = data(*({"messages": [user_message, {"role": "assistant"} | answer]} for answer in answers))
    return lambda given: SFT | dict(written(given))  # type: ignore[operator]


def like_gpt2(**values: int) -> Spoil:
    """Its config.json calls the context and the heads otherwise."""
    return edit(max_position_embeddings=None, num_attention_heads=None, **values)


FOUR = questions(4)
UNTRUE = rows(4, ground_truth=None)
WORDS = [{"prompt": "?", "ground_truth": truth} for truth in ("rain", "2 + 3 = 5\n#### 5")]
LONG = {"prompt": "7 plus 8? " * 60, "ground_truth": 1}
YES = [{"content": "yes"}] * 4
LONG_TALK = {"content": 60 * "8 plus 9? "}
OTHER_TOOLS = rows(4, extra_info={"tools": [{"type": "function"}]})
TOOL_CALL = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
MODEL_REWARD = rows(4, reward_model={"style": "model"})
AN_AGENT = "async def f(sample, endpoint): ..."
FORKS: Keys = {"rollout.max_tokens": 1024, "rollout.history": "fork"}
DISK_4GB = patched("shutil.disk_usage", lambda path: SimpleNamespace(free=4e9, total=4e9))
NO_SGLANG = patched("asyncrl.launch.servers.importlib.util.find_spec", lambda name: None)
CORES = {n: patched("os.sched_getaffinity", lambda pid, n=n: range(n)) for n in (2, 4)}
MEMORY = patched("asyncrl.launch.memory.main_memory", lambda: MainMemory(1_500_000_000, 0))
TEMPLATE = "model/chat_template.jinja"
MISTRAL = file(TEMPLATE, "{{ '[TOOL_CALLS]' }}")
PLAIN = file(TEMPLATE, "{{ messages }}")
MINIMAX = file(TEMPLATE, "{% set ns = ']<]minimax[>[' %}{{ ns }}<tool_call>{{ messages }}")
SILENT = file(TEMPLATE, "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}")
NO_PARSER = "rollout.parser is hermes, but no parser reads the calls"
NO_CALLS = "rollout.parser is hermes.*gemma4, glm, harmony, hermes, kimi"
COMPARED: list[Any] = ["final_number", "exact", {"gsm8k": {}, "format": {}}, f"{__name__}:comparing"]
UNCOMPARED: list[Any] = ["none", f"{__name__}:own", {"format": {}, f"{__name__}:own": {}}, JUDGE]
KEPT = {  # what a resumed run keeps, and another value
    "data.train": "other",
    "data.shuffle": False,
    "seed": 1,
    "buffer.groups_per_batch": 3,
    "buffer.episodes_per_group": 2,
    "algorithm.steps_per_batch": 2,
    "model.lora_rank": 8,
    "model.lora_alpha": 32.0,
    "kl.prompt": "Think.",
}
ADDRESSES = [  # of the launcher, of a server
    ("127.0.0.1", "http://10.0.0.5:30000", "launch.host: http://10.0.0.5:30000 cannot reach 127.0.0.1"),
    ("localhost", "http://gpu-7:30000", "launch.host: http://gpu-7:30000 cannot reach localhost"),
    ("127.0.0.1", "http://127.0.0.1:9", "engine.urls: "),
    ("127.0.0.1", "http://localhost:9", "engine.urls: "),
    ("localhost", "http://[::1]:9", "engine.urls: "),
]

# By level and check: what is spoilt, and a pattern of what is said.
SPOILT: dict[str, list[tuple[Spoil | list[Spoil], str]]] = {
    "error: run directory": [
        ({"name": "a/b"}, "name: 'a/b' is not a valid directory name"),
        ({"name": "a\nb"}, "name: "),
        ({"name": 300 * "a"}, "name: a+… has more than 200 bytes"),
        (run_with("config.yaml"), "a run with this name exists; continue that run with resume=auto"),
        (run_with("run.db"), "resume=auto"),
        ({"resume": "must"}, "resume=must, but there is no run"),
        (file("runs", ""), "not a writable directory; set run_dir=…"),
        (mounted("ext4", "nfs"), r"network file system \(nfs\).*write-ahead log.*local disk"),
    ],
    "error: launch": [
        ([lacking("ray"), RAY], r"Ray is not installed; run pip install 'asyncrl\[ray\]'"),
        (
            [RAY, {"launch.gpus": {"engine": 1.5}}],
            r"Ray cannot reserve 1.5 .* \(engine\); use a whole number",
        ),
        ([RAY, {"launch.gpus": {"engine": 0.00001}}], "Ray cannot reserve 1e-05 GPUs"),
        ([lacking("swanlab"), {"observe.trackers": ["swanlab"]}], r"asyncrl\[swanlab\]"),
    ],
    "error: tensors": [
        (renamed("^", "_orig_mod."), "model.path .*its files lack .*'_orig_mod.': .*torch.compile"),
        (renamed("^", "module."), "'module.': .*save model.module"),
        (renamed("^", "policy."), "a different prefix: policy.*save_pretrained"),
        (
            renamed("layers.0.", "layers.0._fsdp_wrapped_module."),
            "'_fsdp_wrapped_module.': .*full state dict",
        ),
        (renamed("q_proj", "q_proj.base_layer"), "unmerged adapters; save model.merge_and_unload"),
        (renamed("q_proj", "query"), r"lack 2 tensors .*the files have 2 tensors .*query\..*instead"),
        (without("layers.0.mlp.up_proj.weight"), "lack 1 tensor .*layers.0.mlp.up_proj.*not downloaded"),
        (narrower("norm.weight"), "in the files and .* in the model.*to different models"),
        (
            eight_bits("up_proj.weight"),
            "up_proj.weight is F8_E4M3 in the files, but .*no quantization_config",
        ),
        (added("draft.fc.weight", 999, 999), r"have 1 tensor \(draft.fc.weight\) .*% of the bytes"),
        (
            [{"kl.where": "loss"}, renamed("^", "_orig_mod.", key="kl.reference")],
            "kl.reference .*torch.compile",
        ),
        (
            [GAE, without("layers.0.mlp.up_proj.weight", key="critic.path")],
            "critic.path .*layers.0.mlp.*not downloaded",
        ),
        (classifier, "rollout.reward.classifier.path .*no trained head"),
        (edit(model_type="mistral5", architectures=None), "model.path .*transformers cannot build the model"),
    ],
    "warning: tensors": [
        (
            added("draft.fc.weight", 2),
            r"have 1 tensor \(draft.fc.weight\) that .* does not use: unused tensors are not trained",
        )
    ],
    "error: template": [
        (
            edit(vocab_size=257),
            "every token that ends a turn has an ID of at least 257, but the embedding .* has 257 rows",
        ),
        (
            [more_tokens, data(*questions(3), {"prompt": "<|image|>?", "ground_truth": 1})],
            "sample 3: .*image",
        ),
    ],
    "error: model": [
        (cut_in_half, "not readable as safetensors .*its header describes.*download or save"),
        ({"model.path": "nowhere"}, "model.path: nowhere is not a directory"),
        ({"model.path": 300 * "a"}, "File name too long.*aaaa"),
        (file("model/config.json", None), "config.json"),
        (file("model/config.json", "{"), "config.json.*JSON"),
        (file("model/model.safetensors", None), "no model.safetensors; save"),
        (half_a_model, r"weight files are missing \(1 of 2, starting with model-2.safetensors\)"),
        (file("model/model.safetensors", "version https"), "not readable as safetensors .*download or save"),
        (file("model/tokenizer.json", None), "no tokenizer.json; save"),
        (file(TEMPLATE, None), "no chat template"),
        (edit(max_position_embeddings=64), r"rollout.max_tokens \(300\) exceeds .* \(64\)"),
        ([edit(num_attention_heads=9), SHARED], r"sequence_parallel \(2\) .* 9 .*one of \[1, 3\]"),
        (like_gpt2(n_positions=64), r"rollout.max_tokens \(300\) exceeds .* \(64\)"),
        ([like_gpt2(n_head=9), SHARED], r"sequence_parallel \(2\) .* 9 .*one of \[1, 3\]"),
        ([with_an_earlier_run, copied_model], "model.path: .*was started with"),
        (
            [with_an_earlier_run, {"algorithm.advantage": "remax"}],
            "advantage: .* 'dr_grpo' .* 'remax', .* greedy",
        ),
        (run_with("config.yaml", "seed: 7", resume="auto"), "seed: .* started with 7 .* with 0; set seed=7"),
        (run_with("config.yaml", "{", resume="auto"), r"config\.yaml: not readable"),
        *(
            ([with_an_earlier_run, {key: new}], f"^{key}: .* started with .* with {new!r}; set {key}=")
            for key, new in KEPT.items()
        ),
    ],
    "error: plug-ins": [
        ({"rollout.tools": ["calculatr"]}, "unknown tool.*calculator"),
        ([CALCULATOR, {"rollout.tool_args": {"calculator": {"speed": 3}}}], "calculator.*speed"),
        ({"rollout.tool_args": {"calculator": {"latency_mean": 1}}}, "rollout.tools"),
        ({"rollout.reward": "final_numbr"}, "unknown reward.*final_number"),
        (file("bad.py", "raise RuntimeError('import fails')", "rollout.reward=:f"), "import fails"),
        ({"rollout.reward": "json:lodas"}, "lodas.*loads"),
        ({"rollout.parser": "hermse"}, "hermes"),
        ({"engine.name": "troch"}, "unknown engine.*torch"),
        (
            COLOCATED | {"engine.name": "builtins:dict"},
            "builtins:dict does not support sleep, which engine.colocated requires",
        ),
        ({"algorithm.advantage": "gprpo"}, "unknown advantage.*grpo"),
        ({"algorithm.loss": "reinforced"}, "unknown loss.*reinforce"),
        ({"algorithm.correction": {}}, "max_staleness=0"),
    ],
    "error: data": [
        ({"data.train": "nowhere.parquet"}, "data.train: .*nowhere.parquet"),
        ({"data.test": "nowhere.parquet"}, "data.test: .*nowhere.parquet"),
        (file("t.parquet", "PAR1 no, not really", "data.train"), "t.parquet.*not readable as parquet"),
        (file("train.jsonl", ""), "empty"),
        (data({"data_source": "d", "text": "q"}), "no prompt column"),
        (rows(4, prompt=[{"role": "bot", "content": "?"}]), "sample 0.*role 'bot'"),
        (rows(4, extra_info={"tools": ["weather"]}), "sample 0.*weather.*rollout.tools"),
        (OTHER_TOOLS, "extra_info"),
        (rows(3), r"too few samples \(3\) for one batch.*groups_per_batch \(4\)"),
        (rows(4, prompt=None), "sample 0: the prompt column is null; provide some text"),
        (
            file("by_level.py", "def f(completions, *, level): return [level[0]]", "rollout.reward=:f"),
            "data.train: rollout.reward .*f needs a 'level' column, but the first sample has .*extra_info",
        ),
        (
            {"data.train": ["t.jsonl", {"path": "t.jsonl", "weight": 2}]},
            "t.jsonl has no weight; set a weight for every source",
        ),
        (data(*4 * [LONG]), "all prompts have more than 284 tokens.*raise rollout.max_tokens"),
        ([data(*4 * [LONG]), FILTERED], "all prompts have more than 284 tokens"),
        ([data(*FOUR[1:], LONG), FILTERED], r"data.train: too few samples \(3\) for one batch"),
        (talks({}, {"content": ""}), "2 conversations have an empty .*and no other samples are left"),
        *(
            ([UNTRUE, {"rollout.reward": reward}], "sample 0: no ground truth for rollout.reward [a-z]")
            for reward in COMPARED
        ),
    ],
    "warning: data": [
        (data(*FOUR, LONG), "at least 1 prompt has more than 284 tokens .*set data.filter_overlong=true"),
        ([data(*FOUR, LONG), FILTERED], r"1 prompt has .* 284 tokens \(the longest has 6\d\d\).*left out"),
        (
            talks(*YES, LONG_TALK),
            "at least 1 conversation has .* 300 tokens.*, so these episodes will fail; set",
        ),
        (
            [talks(*YES, LONG_TALK), FILTERED],
            r"1 conversation has .* 300 tokens .*left out \(data.f",
        ),
        (
            talks(*YES, {"content": " \n"}, {}, TOOL_CALL),
            "2 conversations have an empty .*, and will be left out",
        ),
        (data(*FOUR, *WORDS), 'final_number compares numbers, but 2 of the first 6 ground .* such as "rain"'),
        (rows(4, agent_name="tool_agent"), "4 samples request the agent loop 'tool_agent'"),
        (rows(4, agent_name="my_loop"), "rollout.agent or rollout.environment"),
        (rows(4, reward_manager="prime"), "reward_manager 'prime', but asyncrl"),
        (MODEL_REWARD, "a reward model .*rollout.reward is final_number"),
        (rows(4, extra_info={"interaction_kwargs": {"name": "gsm8k"}}), "'gsm8k' .*set rollout.environment"),
        (
            rows(4, extra_info={"tools_kwargs": {"calc": {"a": 1}}}),
            "'calc', which is not in rollout.tools; ig",
        ),
        (
            rows(4, extro_info={}, level=3, agent_name=None),
            r"columns: extro_info \(did you mean extra_info\?\), level; ",
        ),
        ([data(*4 * [{"messages": SAID, "tools": [], "uid": 1}]), SFT], "unused columns: uid; "),
    ],
    "error: device": [([gpus(0), {"model.device": "cuda"}], "model.device is cuda, but torch sees no GPU")],
    "error: memory": [
        ([large, MEMORY], r"take 1\.6 GB, but only 1\.5 GB is available; .*model\.lora_rank"),
        (
            [large, MEMORY, gpus(1), COLOCATED],
            r"only 1\.5 GB of main memory, to which they are offloaded",
        ),
    ],
    "error: weights": [
        (beyond_shared_memory, "weights.directory=run"),
        (file("f", "", "weights.directory=/weights"), "f is not a writable directory; set weights.directory"),
        ({"weights.directory": "shared"}, "'shared' is invalid; use auto, shm, run or an absolute path"),
    ],
    "error: servers": [
        ([SGLANG, {"engine.api_key_env": "ASYNCRL_NO_KEY"}], "engine.api_key_env: ASYNCRL_NO_KEY is not set"),
        (
            [NO_SGLANG, SGLANG],
            "not installed.*engine.urls.*on a CPU, run make sglang-cpu .*then set engine=sglang_cpu",
        ),
        (
            [SGLANG, {"engine.server_command": ["/nowhere/python"]}],
            "engine.server_command: no such program: '/nowhere/python'",
        ),
        (
            [{"launch.host": "127.0.0.1"}, SGLANG | {"engine.urls": ["http://127.0.0.1:9"]}],
            "engine.urls.*http://127.0.0.1:9",
        ),
        *(
            ([{"launch.host": host}, {"engine.urls": [url]}, BROADCAST], says)
            for host, url, says in ADDRESSES
        ),
    ],
    "warning: settings": [
        (
            {"rollout.slots": 27} | THREE,
            r"at most 80 episodes run at once, so 1 of 81 slots .* plus 4 times as many",
        ),
        (
            [THREE | {"rollout.slots": 11}, {"buffer.target_staleness": 1}],
            r"at most 32 .* 1 of 33 slots .* plus 1 times as many",
        ),
        ({"checkpoint.every": 0, "total_steps": 51}, "checkpoint.every=0.*all turns stay on disk"),
        (
            [edit(max_position_embeddings=2048), FORKS, {"rollout.max_rows": 9}],
            "may have 9216 .*tokens .8192",
        ),
        ([gpus(0), SGLANG], "engine=sglang starts servers on GPUs.*then set engine=sglang_cpu"),
        ([MISTRAL, CALCULATOR], "parser is hermes.*set rollout.parser=mistral"),
        (
            [large, {"trainer.lr": 1e-6}],
            "lr=1e-06 is far from the usual 2e-05 for 100.0 M param.* below 1.5e-06",
        ),
        ([large, {"model.lora_rank": 8, "trainer.lr": 1e-2}], "for adapters on 100.0 M parameters"),
        ([CORES[2], {"launch.threads": 2}], "means 4 busy threads on 2 cores.*set launch.threads=1"),
        ([large, DISK_4GB], "checkpoints need 4.8 GB .*has 4.0 GB free"),
    ],
    "warning: data, settings": [
        ([SILENT, CALCULATOR], NO_CALLS),
        ([PLAIN, CALCULATOR], NO_PARSER),
        ([MINIMAX, CALCULATOR], NO_PARSER),
    ],
}
# By check: what is no mistake, or one that another check reports.
FINE: dict[str, list[Spoil | list[Spoil]]] = {
    "run directory": [
        lambda given: (given.runs / "x").mkdir(parents=True),
        run_with("config.yaml", resume="auto"),
        run_with("config.yaml", resume="must"),
        mounted("nfs", "ext4"),
    ],
    "model": [
        like_gpt2(n_positions=300),
        [edit(num_attention_heads=9), SHARED | {"trainer.sequence_parallel": 3}],
        [with_an_earlier_run, {"algorithm.advantage": "rloo"}],
    ],
    "data": [
        rows(4, note=None),
        [rows(4, ground_truth=None, answer={"value": 1}), {"data.columns": {"ground_truth": "answer.value"}}],
        [OTHER_TOOLS, file("a.py", AN_AGENT, "rollout.agent=:f")],
        [rows(5, ground_truth="rain"), {"rollout.reward": "exact"}],
        [
            with_an_earlier_run,
            run_with("run.db", ""),
            rows(4, data_source="new"),
        ],  # its first coordinator was killed at once
        [rows(4, agent_name="my_loop"), {"rollout.environment": "scripted_user"}],
        rows(4, agent_name="single_turn_agent"),
        [MODEL_REWARD, {"rollout.reward": {**JUDGE, "format": {}}}],
        rows(4, reward_model={"style": "rule"}),
        *([UNTRUE, {"rollout.reward": reward}] for reward in UNCOMPARED),
    ],
    "device": [[gpus(0), RAY, {"model.device": "cuda"}], [gpus(1), {"model.device": "cuda"}]],
    "memory": [
        *([large, MEMORY, {"trainer.optimizer": "sgd"}], [large, MEMORY, RAY], [large, MEMORY, gpus(1)]),
        [large, MEMORY, gpus(1), {"trainer.optimizer": "sgd"}, COLOCATED],
    ],
    "settings": [
        THREE | {"rollout.slots": 26},
        {"checkpoint.every": 0, "total_steps": 50},
        [edit(max_position_embeddings=2048), FORKS, {"rollout.max_rows": 8}],
        SGLANG | {"engine.urls": ["http://127.0.0.1:1"]},
        [SGLANG, {"engine.server_command": ["launch"]}],
        [gpus(1), SGLANG],
        [MISTRAL, CALCULATOR, {"rollout.parser": "mistral"}],
        MISTRAL,  # no tools, no calls
        [CORES[4], {"launch.threads": 2}],
        [large, DISK_4GB, {"checkpoint.keep": 1}],
        [PLAIN, CALCULATOR],  # without data, of which another check says why
    ],
    "template": [more_tokens],
    "tensors": [renamed("^model.", ""), [edit(tie_word_embeddings=True), without("lm_head.weight")]],
    "data, settings": [PLAIN, [PLAIN, CALCULATOR, file("my.py", "def read(t): ...", "rollout.parser=:read")]],
}


@pytest.mark.parametrize(
    ("expected", "spoils", "text"),
    [(key, *case) for key, cases in SPOILT.items() for case in cases],
    ids=[text for cases in SPOILT.values() for _, text in cases],
)
def test_what_is_spoilt_is_said(given: Given, expected: str, spoils: Any, text: str) -> None:
    assert_found(given, expected, spoils, text)


@pytest.mark.parametrize(
    ("check", "spoils"), [(name, each) for name, cases in FINE.items() for each in cases]
)
def test_what_is_fine_is_not_mentioned(given: Given, check: str, spoils: Any) -> None:
    assert_found(given, f"ok: {check}", spoils)
