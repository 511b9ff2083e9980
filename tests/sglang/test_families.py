"""Today's families on real servers: log-probs are transformers' own, as the server was started, after updates
of the text part alone by files and by deltas, with an adapter, and behind images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from asyncrl.config import WeightsConfig
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.images import PromptWriter
from asyncrl.engines.sglang.loader import shapes_of
from asyncrl.engines.sglang.served_layers import kinds_not_served, type_without_adapters
from asyncrl.model_class import auto_class_of
from asyncrl.types import Generation, PolicyVersion, StopReason
from asyncrl.weights.delta import VersionWriter
from asyncrl.weights.manifest import AdapterSpec
from tests.fakes.sglang import loader_of, sglang_config
from tests.fakes.sglang_process import SGLangServer
from tests.fakes.tiny_families import (
    FAMILIES,
    IMAGE_TOKENS,
    VISION_PREFIXES,
    VOCABULARY_SIZE,
    build_family,
)
from tests.fakes.weights import BUCKET_BYTES, snapshot_of
from tests.sglang.conformance import ask, in_use, prompt
from tests.sglang.conftest import Start
from tests.unit.engines.tiny_images import TinyVision

# Nats, in float32. Threads and batches sum in other orders: of gated delta rules gaps of 2e-6 to 1.4e-5 were
# seen, with another sampled text each time. An adapter makes a difference of more than 1e-3, see below.
GAP = 5e-5
RANK = 4
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTERS = ("--enable-lora", f"--max-lora-rank={RANK}", "--lora-target-modules")
TEXT = prompt(60, "families")
IMAGE_START = IMAGE_TOKENS["<|vision_start|>"]
IMAGE_END = IMAGE_TOKENS["<|vision_end|>"]
DEADLINE = 240.0  # seconds of a request: the first ones of a family compile operators


# The families that a CPU server takes; `make test` has the first.
SERVED_FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "gemma3", "ministral3", "mistral3", "qwen3_vl")
FAMILIES_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen2_vl", "qwen2_5_vl")


@dataclass
class FamilyServer:
    """A server that was started with a tiny random model. `adapted_kinds`: of layers for adapters."""

    family: str
    model: Path
    adapted_kinds: list[str]
    server: SGLangServer


def all_but_first_full(families: tuple[str, ...]) -> list[object]:
    return [families[0], *(pytest.param(family, marks=pytest.mark.full) for family in families[1:])]


@pytest.fixture(scope="module")
def family_server(
    request: pytest.FixtureRequest, sglang_server: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FamilyServer]:
    """A server of the family that the parameter names. Tests of one family share it, in their order."""
    family = request.param
    has_mtp = family in FAMILIES and bool(FAMILIES[family].mtp)
    model = build_family(family, tmp_path_factory.mktemp(family) / "model", mtp=has_mtp)
    adapted_kinds: list[str] = []
    if not type_without_adapters(str(model)):
        adapted_kinds = [kind for kind in ADAPTED if kind not in kinds_not_served(str(model))]
    server = sglang_server(model, *((*ADAPTERS, *adapted_kinds) if adapted_kinds else ()))
    yield FamilyServer(family, model, adapted_kinds, server)
    server.kill()


def text_tensors(model: Path) -> dict[str, Tensor]:
    """Return what trains of a checkpoint, under the names of its file."""
    tensors = load_file(model / "model.safetensors")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(("mtp.", *VISION_PREFIXES)) and tensor.is_floating_point()
    }


def changed(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return other weights, far enough for other log-probs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) * _spread(tensor)
        for name, tensor in tensors.items()
    }


def _spread(tensor: Tensor) -> float:
    spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
    return spread or 0.1


def with_tensors(model: Path, tensors: dict[str, Tensor], directory: Path) -> Path:
    """Return a copy of a checkpoint in which these tensors are others."""
    copytree(model, directory)
    all_tensors = load_file(model / "model.safetensors") | tensors
    save_file(all_tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def own_logprobs(model: Path, ids: tuple[int, ...]) -> list[float]:
    """Return transformers' log-probs of ids[1:]."""
    auto_class = auto_class_of(AutoConfig.from_pretrained(model))
    network = auto_class.from_pretrained(model, dtype=torch.float32).eval()
    batch = torch.tensor([ids])
    with torch.inference_mode():
        table = network(input_ids=batch).logits[0, :-1].float().log_softmax(-1)
    chosen: list[float] = table.gather(1, batch[0, 1:, None])[:, 0].tolist()
    return chosen


def largest_gap(logprobs: tuple[float, ...], expected: list[float]) -> float:
    gaps = [abs(logprob - exact) for logprob, exact in zip(logprobs, expected, strict=True)]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def write_adapter(
    model: Path, tensors: dict[str, Tensor], kinds: list[str], directory: Path
) -> dict[str, Tensor]:
    """Write a random adapter of attention layers in PEFT's layout. Returns the adapted weights, merged."""
    generator = torch.Generator().manual_seed(3)
    adapter_tensors: dict[str, Tensor] = {}
    merged_weights: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(tuple(kinds)) or ".self_attn." not in layer:
            continue

        factor_a = torch.randn(RANK, weight.shape[1], generator=generator) / 4
        factor_b = torch.randn(weight.shape[0], RANK, generator=generator) / 4
        merged_weights[name] = weight + factor_b @ factor_a
        for factor, values in (("A", factor_a), ("B", factor_b)):
            adapter_tensors[f"base_model.model.{layer}.lora_{factor}.weight"] = values

    directory.mkdir()
    spec = AdapterSpec(rank=RANK, alpha=RANK, layers=tuple(kinds))
    (directory / "adapter_config.json").write_text(json.dumps(spec.peft(str(model))))
    save_file(adapter_tensors, directory / "adapter_model.safetensors")
    return merged_weights


@pytest.mark.parametrize("family_server", all_but_first_full(FAMILIES_WITH_IMAGES), indirect=True)
async def test_images_are_read_as_transformers_reads_them(family_server: FamilyServer) -> None:
    """Three turns: an image in the prompt, the same and another one in a tool's reply. Then the same texts
    with other images, of which the server has the text in its cache."""
    model_path = family_server.model
    network = auto_class_of(AutoConfig.from_pretrained(model_path)).from_pretrained(
        model_path, dtype=torch.float32
    )
    vision = TinyVision(model_path, network.eval())
    config = sglang_config(1024, silence=DEADLINE)
    api = ServerApi(family_server.server.url)
    writer = PromptWriter(vision.layout)
    image_tokens = tuple(IMAGE_TOKENS.values())
    client = SGLangClient(api, config, VOCABULARY_SIZE, salt="images", prompt_writer=writer)

    async with in_use(client):
        await api.relabel(PolicyVersion(0, 0).label)  # or clients refuse the weights of the start
        for seed in (1, 2):
            prompt_image = (IMAGE_START, *vision.picture(2, 3, seed), IMAGE_END)
            reply_image = (IMAGE_START, *vision.picture(4, 2, seed + 10), IMAGE_END)
            ids = (*TEXT[:5], *prompt_image, *TEXT[5:15])
            for added_ids in ((), (*TEXT[15:18], *reply_image, *prompt_image, *TEXT[18:20]), TEXT[20:30]):
                request = vision.ask((*ids, *added_ids), 8, f"conversation {seed}", stop_ids=image_tokens)
                generation = await client.generate(request)
                vision.assert_logprobs(request, generation)
                sampled_text = tuple(token for token in generation.ids if token not in image_tokens)
                ids = (*request.ids, *sampled_text)

            answer = TEXT[30:40]
            scores = await client.read((*ids, *answer), len(answer), 0, vision.files)
            scored_logprobs = tuple(np.frombuffer(scores.logprobs, "<f4").tolist())
            scored = Generation(answer, scored_logprobs, (), StopReason.LENGTH)
            vision.assert_logprobs(vision.ask(ids), scored)


@pytest.mark.parametrize("family_server", all_but_first_full(SERVED_FAMILIES), indirect=True)
async def test_a_family_is_served_as_transformers_computes_it(
    family_server: FamilyServer, tmp_path: Path
) -> None:
    family = family_server.family
    model = family_server.model
    adapted_kinds = family_server.adapted_kinds
    server = family_server.server
    gaps: dict[str, float] = {}

    config = WeightsConfig(mode="in_place", deadline=DEADLINE)
    client = SGLangClient(ServerApi(server.url), sglang_config(1024), VOCABULARY_SIZE, salt=family)
    writer = VersionWriter(tmp_path / "versions", BUCKET_BYTES, full_every=2)
    tied = bool(AutoConfig.from_pretrained(model).get_text_config().tie_word_embeddings)
    model_shapes = shapes_of(
        str(model), tied=tied, train_vision=False
    )  # the check before a push, without MTP layers and towers
    cache = tmp_path / "cache"
    loading = loader_of(ServerApi(server.url), config, cache, model_shapes=model_shapes)
    async with in_use(client), in_use(loading) as loader:
        gaps["at the start"] = largest_gap(await loader.score(TEXT), own_logprobs(model, TEXT))

        tensors = text_tensors(model)
        for version, way in ((1, "a file"), (2, "a delta")):
            tensors = changed(tensors, seed=version)
            ref = writer.write_version(snapshot_of(tensors, PolicyVersion(1, version)))
            manifest = await loader.load(ref)
            assert (manifest.delta is None) == (way == "a file")
            client.mark_version(ref.version)

            generation = await client.generate(ask(TEXT[:20], 40, way))
            ids = (*TEXT[:20], *generation.ids)
            expected = own_logprobs(with_tensors(model, tensors, tmp_path / way), ids)
            gaps[f"after {way}"] = largest_gap(await loader.score(ids), expected)
            gaps[f"sampled after {way}"] = largest_gap(generation.logprobs, expected[19:])

        if adapted_kinds:
            merged_weights = write_adapter(model, tensors, adapted_kinds, tmp_path / "adapter")
            await loader.api.load_adapter("adapter", str(tmp_path / "adapter"))
            expected = own_logprobs(with_tensors(model, tensors | merged_weights, tmp_path / "merged"), TEXT)
            gaps["with an adapter"] = largest_gap(
                await loader.api.score(TEXT, DEADLINE, adapter="adapter"), expected
            )
            assert largest_gap(await loader.score(TEXT), expected) > 20 * GAP  # it is another model

    print(family, {way: f"{gap:.2g}" for way, gap in gaps.items()})
    assert max(gaps.values()) < GAP, gaps
