"""Packed rows against the same rows one by one, gradients included."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl import shrunk
from asyncrl.attention_rules import Reach, Scoring
from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer import attention, gradient_check, prefix_tree
from asyncrl.trainer.attention import FlexKernel, NodeKernel, SequenceKernel
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.prefix_tree import plant_forest
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import SequenceRanks, World
from tests.fakes.traced import LiveBytes
from tests.fakes.training import full_state

pytestmark = pytest.mark.slow

VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": 8, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": 9},
    "Gemma2": WINDOWS,
    "Gemma3": WINDOWS,
    "Qwen3Moe": EXPERTS,
    "Mixtral": EXPERTS,
}


def make(family: str, **own: Any) -> Any:
    """A small model of the family with random weights."""
    torch.manual_seed(0)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**SMALL, **FAMILIES.get(family, {}), **own)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def rows() -> list[np.ndarray]:
    """A group of three, a fork of one of them, rows of their own, and a row that is another's beginning."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return rng.integers(0, VOCABULARY, count)

    prompt = draw(40)
    group = [np.concatenate([prompt, draw(count)]) for count in (5, 30, 17)]
    return [*group, np.concatenate([group[1][:60], draw(9)]), draw(50), draw(3), prompt]


def select(given: list[np.ndarray], how: Any) -> Selected:
    """All tokens but the first of each row, at several temperatures."""
    row = np.repeat(np.arange(len(given)), [len(one) - 1 for one in given])
    position = np.concatenate([np.arange(1, len(one)) for one in given])
    return Selected.lay_out(given, row, position, torch.linspace(0.7, 1.3, len(row)).double(), how)


def learned(policy: Any, parts: list[Selected]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and the gradients of a loss in which every token has a weight of its own."""
    logp = [policy(part).logp for part in parts]
    flat = torch.cat(logp)
    (flat * torch.linspace(0.1, 1, len(flat), dtype=flat.dtype)).sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return flat.detach(), gradients


def distance(gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference beside that of what is wanted."""
    assert gradients.keys() == wanted.keys()

    def norm(tensors: list[Tensor]) -> float:
        return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())

    return norm([gradients[name] - wanted[name] for name in wanted]) / norm(list(wanted.values()))


def one_by_one(given: list[np.ndarray], how: Any) -> list[Selected]:
    """With the temperatures that the tokens have together."""
    together = select(given, "padded")
    parts = []
    start = 0
    for row in given:
        part = select([row], how)
        end = start + len(row) - 1
        parts.append(Selected(**{**vars(part), "temperature": together.temperature[start:end]}))
        start = end
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_rows_one_by_one(family: str, world: World, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), world)
    logp, wanted = learned(policy, one_by_one(rows(), "padded"))
    assert packing_for([policy], "tree", "float32", world) == "tree"
    _, alone = learned(policy, one_by_one(rows(), "packed"))
    for how in ("packed", "tree"):
        packed_logp, packed_gradients = learned(policy, [select(rows(), how)])
        assert torch.allclose(packed_logp, logp, atol=1e-4), how
        assert distance(packed_gradients, alone) < 1e-6, how
        assert distance(packed_gradients, wanted) < 3e-6, (
            how
        )  # another kernel's, as far from float64's as these


def test_with_one_kernel_they_agree_to_rounding(world: World, tmp_path: Path) -> None:
    """GPT-2's norms compute in float64, Llama's in float32 whatever the dtype."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2
    )
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float64"), world)  # type: ignore[arg-type]
    assert packing_for([policy], "tree", "float64", world) == "tree"
    logp, wanted = learned(policy, one_by_one(rows(), "packed"))
    for how in ("packed", "tree"):
        packed_logp, packed_gradients = learned(policy, [select(rows(), how)])
        assert torch.allclose(packed_logp, logp, atol=1e-11), how
        assert distance(packed_gradients, wanted) < 1e-10, how


def test_what_is_shared_is_computed_once(tmp_path: Path) -> None:
    given = rows()
    assert select(given, "packed").ids.shape == (1, sum(map(len, given)))
    assert select(given, "tree").ids.shape == (1, 40 + 5 + 30 + 17 + 9 + 50 + 3)


few_rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=8)


windows = st.sampled_from([None, 1, 3, 25])
chunks = st.sampled_from([None, 1, 4, 9])


@settings(deadline=None, max_examples=40)
@given(few_rows, windows, chunks, st.sampled_from([None, 2.0]), st.booleans())
def test_attention_is_that_under_a_dense_mask(
    given: list[list[int]], window: int | None, chunk: int | None, softcap: float | None, has_sinks: bool
) -> None:
    """Whatever the forest: ancestors and itself, windows and chunks by position, pieces of long nodes; with
    the gradients of queries, keys, values and sinks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", 1)
        forest = plant_forest([np.array(row) for row in given], share_prefixes=True)
    size = len(forest.ids)
    generator = torch.Generator().manual_seed(size)
    query, key, value, sinks, weight = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((4, size, 6), (2, size, 6), (2, size, 6), (4,), (size, 4, 6))
    )
    inputs = (query, key, value, sinks) if has_sinks else (query, key, value)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for path in forest.paths:
        for place, token in enumerate(path):
            first = 0 if window is None else max(0, place + 1 - window)
            first = first if chunk is None else max(first, place // chunk * chunk)
            seen[token, path[first : place + 1]] = True
    scores = 0.4 * query @ key.repeat_interleave(2, 0).transpose(1, 2)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    sink_scores = sinks[:, None, None].expand(-1, size, 1) if has_sinks else scores[..., :0]
    weights = torch.cat([scores.masked_fill(~seen, -torch.inf), sink_scores], -1).softmax(-1)
    wanted = (weights[..., :size] @ value.repeat_interleave(2, 0)).transpose(0, 1)

    reach = Reach(window, chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MAX_QUERIES", 7)
        scoring = Scoring(0.4, reach, softcap, sinks if has_sinks else None)
        attention_output = NodeKernel(forest).attend(query, key, value, scoring)
    torch.testing.assert_close(attention_output, wanted, rtol=0, atol=1e-12)
    for found_gradient, gradient in zip(
        *(torch.autograd.grad((output * weight).sum(), inputs) for output in (attention_output, wanted)),
        strict=True,
    ):
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-11)

    at = torch.arange(size)
    assert torch.equal(FlexKernel(forest, attention.CPU).visible(reach)(at, at, at[:, None], at), seen)


@settings(deadline=None, max_examples=40)
@given(few_rows, windows, chunks)
def test_blocks_of_a_mask_are_those_that_some_query_sees(
    given: list[list[int]], window: int | None, chunk: int | None
) -> None:
    """With a limited reach some that none sees may be among them; blocks taken as whole are whole in any
    case."""
    reach = Reach(window, chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "LEAST_SHARED", 1)
        patch.setattr(attention, "BLOCK_TOKENS", 8)
        forest = plant_forest([np.array(row) for row in given], share_prefixes=True)
        kernel = FlexKernel(forest, torch.device("cpu"))
        block_mask = kernel.block_mask(reach)
        size = len(forest.ids)
        wanted = create_block_mask(kernel.visible(reach), None, None, size, size, "cpu", 8)
    assert block_mask.shape == wanted.shape
    (some, whole), (all_some, all_whole) = (_blocks(block_mask), _blocks(wanted))
    assert not (all_some & ~some).any() and not (whole & ~all_whole).any()
    assert reach != Reach() or (torch.equal(some, all_some) and torch.equal(whole, all_whole))


def _blocks(mask: BlockMask) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, blocks]: seen in part or whole; seen whole."""
    counts = mask.full_kv_num_blocks
    order = mask.full_kv_indices
    assert counts is not None and order is not None
    listed = torch.arange(order.shape[-1]) < counts[0, 0, :, None]
    whole = torch.zeros_like(listed).scatter(1, order[0, 0].long(), listed)
    return mask.to_dense()[0, 0].bool(), whole


@pytest.mark.parametrize(
    ("device", "major", "length", "shared", "kernel"),
    [
        ("cuda", 9, 80, 20, SequenceKernel),
        ("cuda", 9, 79, 20, FlexKernel),  # short
        ("cuda", 9, 80, 40, FlexKernel),  # 160 tokens in rows, of 120
        ("cuda", 8, 80, 20, FlexKernel),
        ("cuda", 10, 80, 20, FlexKernel),
        ("cpu", 9, 80, 20, NodeKernel),
    ],
)
def test_long_rows_that_share_little_are_computed_by_themselves_on_hopper(
    device: str, major: int, length: int, shared: int, kernel: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "LONG_SEQUENCE", 80)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    for name, made in (("FlexKernel", FlexKernel), ("SequenceKernel", SequenceKernel)):  # not on that device
        monkeypatch.setattr(attention, name, lambda forest, device, *other, made=made: made.__new__(made))
    two = [np.array([*range(shared), *range(start, start + length - shared)]) for start in (100, 200)]
    chosen = attention.ForestAttention(plant_forest(two, share_prefixes=True), torch.device(device)).kernel
    assert type(chosen) is kernel


def test_a_kernel_captures_no_numbers() -> None:
    """torch 2.11 fails to compile a captured number of Python with dynamic shapes."""
    kernel = FlexKernel(plant_forest(rows(), share_prefixes=True), torch.device("cpu"))
    capped = attention._softcap_function(torch.tensor(2.0))
    for function in (kernel.visible(Reach()), kernel.visible(Reach(25, 60)), capped):
        assert all(isinstance(cell.cell_contents, torch.Tensor) for cell in function.__closure__)


def test_flex_attention_is_compiled_for_more_kinds_than_torch_allows_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond its limit, 8, torch goes on without compiling: with all scores in memory. So that recomputation
    keeps what it returns, torch is to show it to dispatch modes: that option costs seconds of imports."""
    from torch._dynamo import config

    compiled = mock.Mock()
    monkeypatch.setattr(torch, "compile", compiled)
    with config.patch(recompile_limit=8):
        assert attention._flex_attention.__wrapped__(True) is compiled.return_value
        assert config.recompile_limit >= 64
    options = {"wrap_inductor_compiled_regions": True}
    compiled.assert_called_once_with(attention.flex_attention, dynamic=True, options=options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("reach", "softcap"), [(Reach(), None), (Reach(25), 2.0), (Reach(chunk=16), None), (Reach(7, 16), None)]
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_flex_attention_with_the_mask_is_that_of_the_nodes(
    reach: Reach, softcap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not compiled: a matrix of scores, whose backward torch has on a CPU, too, but does not offer."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    forest = plant_forest(rows(), share_prefixes=True)
    size = len(forest.ids)
    generator = torch.Generator().manual_seed(0)
    query, key, value, sinks, weight = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((4, size, 16), (2, size, 16), (2, size, 16), (4,), (size, 4, 16))
    )
    inputs = (query, key, value, sinks) if has_sinks else (query, key, value)
    scoring = Scoring(0.4, reach, softcap, sinks if has_sinks else None)
    wanted, found = (
        kernel.attend(query, key, value, scoring)
        for kernel in (NodeKernel(forest), FlexKernel(forest, attention.CPU))
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for found_gradient, gradient in zip(
        *(torch.autograd.grad((output * weight).sum(), inputs) for output in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-11)


class Counted(TorchDispatchMode):
    """Counts the slices of so many tokens in a backward: each fills a gradient of all of them."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.slices = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice_backward.default:
            self.slices += self.tokens in args[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shared", [True, False])
def test_rows_one_by_one_are_the_nodes_with_their_gradients(shared: bool) -> None:
    """In bfloat16, as on a GPU; what is not plain goes to the other kernel."""
    forest = plant_forest([*rows(), rows()[0]], share_prefixes=shared)
    generator = torch.Generator().manual_seed(0)
    other = NodeKernel(forest)
    given = [torch.randn(heads, len(forest.ids), 16, generator=generator) for heads in (4, 2, 2)]
    weight = torch.randn(len(forest.ids), 4, 16, generator=generator)
    kernel = SequenceKernel(forest, torch.device("cpu"), other)

    def run(kernel: attention.AttentionKernel) -> list[torch.Tensor]:
        tensors = [tensor.bfloat16().requires_grad_() for tensor in given]
        attention_output = kernel.attend(*tensors, Scoring(0.4))
        (attention_output * weight).sum().backward()
        return [attention_output.detach(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]

    with Counted(len(forest.ids)) as counted:
        attention_output = run(kernel)
    assert not counted.slices
    for a, b in zip(attention_output, run(other), strict=True):
        assert (a - b).norm() < 0.02 * b.norm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other, "attend", lambda *_: "the other's")
        assert kernel.attend(*given, Scoring(0.4)) == "the other's"
        for scoring in (Scoring(0.4, Reach(3)), Scoring(0.4, Reach(chunk=3)), Scoring(0.4, sinks=weight)):
            assert kernel.attend(*(x.bfloat16() for x in given), scoring) == "the other's"


@pytest.mark.parametrize("window", [None, 3000])
def test_of_a_long_row_no_scores_are_kept_and_few_are_held(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward computes them again, a piece at a time. Of four heads they take 67 MB."""
    monkeypatch.setattr(attention, "MAX_QUERIES", 64)
    size = 2048
    kernel = NodeKernel(plant_forest([np.arange(size)], share_prefixes=False))
    scoring = Scoring(0.4, Reach(window))
    kernel.attend(*(torch.randn(heads, size, 8) for heads in (4, 2, 2)), scoring)  # layers share the masks
    given = [torch.randn(heads, size, 8, requires_grad=True) for heads in (4, 2, 2)]
    with LiveBytes() as counted:
        attention_output = kernel.attend(*given, scoring)
        assert counted.now < 4 * 4 * size**2 / 4
        attention_output.sum().backward()
    assert counted.peak < 4 * 4 * size**2 / 4


LINEAR_ATTENTION = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "num_experts": 4}
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "a rope that grows": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "single rows",
    ),
    "another kind of state": (
        "RecurrentGemma",
        {},
        "temporal_block (RecurrentGemmaRecurrentBlock) mixes rows",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_cannot_be_packed_is_padded_with_a_warning(
    case: str, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, own, reason = UNFIT[case]
    make(family, **own).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), world)
    with caplog.at_level(logging.WARNING):
        assert packing_for([policy], "tree", "float32", world) == "padded"
    assert "padded instead of tree" in caplog.text and reason in caplog.text


@pytest.mark.parametrize(
    ("family", "own", "ranks", "reason"),
    [
        ("Llama", {}, 3, "4 attention heads"),
        ("RecurrentGemma", {}, 2, "RecurrentGemmaRecurrentBlock"),
        (
            "Qwen3Next",
            LINEAR_ATTENTION,
            2,
            "whose rows cannot be shared by ranks: layers.0.linear_attn",
        ),
    ],
)
def test_ranks_that_are_to_share_a_sequence_cannot_fall_back_to_padding(
    family: str, own: dict[str, Any], ranks: int, reason: str, world: World, tmp_path: Path
) -> None:
    make(family, **own).save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), world)
    sharing: Any = SequenceRanks(world.group, 0, ranks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"sequence_parallel={ranks} needs packed rows, but .*{reason}"):
        packing_for([policy], "tree", "float32", replace(world, sequence=sharing))


def test_a_loaded_model_is_asked_once_on_a_machine(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every model is on a GPU, and here where no small copy can be made. A restart asks no more, but other
    numbers, other layers or a compiled model do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delattr(shrunk, "shrunken_model")
    gradient_checks = mock.Mock(wraps=gradient_check.check_gradients)
    monkeypatch.setattr(gradient_check, "check_gradients", gradient_checks)

    def questions(dtype: str = "float32", compiled: bool = False, **sizes: Any) -> int:
        """Start a trainer, and return how often its model was asked."""
        gradient_checks.reset_mock()
        make("Llama", **sizes).save_pretrained(tmp_path / "model")
        policy = load_policy(ModelConfig(path=str(tmp_path / "model"), dtype=dtype), world)
        assert packing_for([policy], "packed", dtype, world, compiled) == "packed"
        return int(gradient_checks.call_count)

    assert questions() == 2, "is it cut at its output layer, and may it be packed"
    assert questions() == 0
    assert questions(dtype="bfloat16") == 2
    assert questions(rms_norm_eps=1e-5) == 2
    assert questions(compiled=True) == 1
    assert questions() == 0


@pytest.mark.parametrize("copied", [True, False])
def test_gradients_that_differ_are_found(
    copied: bool,
    world: World,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer that ignores who may attend to whom, as one that bypasses transformers' interface would: by a
    small copy, and by the loaded model where none can be made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not copied:
        monkeypatch.delattr(shrunk, "shrunken_model")
    make("Llama").save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), world)
    attend = NodeKernel.attend

    def wrong(self: Any, query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        return attend(self, query, key.roll(1, dims=1), *rest)

    monkeypatch.setattr(NodeKernel, "attend", wrong)
    shutil.rmtree(tmp_path / "asyncrl", ignore_errors=True)  # what was found before
    before = full_state(policy)
    with caplog.at_level(logging.WARNING):
        assert packing_for([policy], "packed", "float32", world) == "padded"
    assert "that differ from those of single rows" in caplog.text
    assert copied == ("not checked on a small copy" not in caplog.text)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in full_state(policy).items())
    assert policy.lm.config._attn_implementation == "sdpa"
