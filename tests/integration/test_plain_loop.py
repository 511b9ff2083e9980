"""The example that newcomers read first does what it says: it samples, calls the tool, and learns."""

from __future__ import annotations

import pyarrow.parquet
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.plain_loop import FILE, plain_loop


def test_an_episode_calls_the_tool_and_only_the_models_tokens_are_trained() -> None:
    loop = plain_loop()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(loop.CALCULATOR / "model")
    model = AutoModelForCausalLM.from_pretrained(loop.CALCULATOR / "model", dtype=torch.float32)
    samples = pyarrow.parquet.read_table(loop.CALCULATOR / "data" / "test.parquet").to_pylist()[:32]
    episodes = loop.play(model, tokenizer, samples, greedy=True)
    assert all(episode.done for episode in episodes)
    written = ["".join(tokenizer.decode(trained(e))) for e in episodes]
    called = [text for text in written if "<tool_call>" in text]
    assert len(called) > len(episodes) / 4  # greedy: 41% of the held-out samples are right, by calls alone
    assert not any("<tool_response>" in text for text in written)
    assert any(episode.reward == 1.0 for episode in episodes)
    loss = loop.policy_loss(model, episodes, loop.advantages([episode.reward for episode in episodes]))
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def trained(episode: object) -> list[int]:
    return [i for i, is_trained in zip(episode.ids, episode.by_model, strict=True) if is_trained]  # type: ignore[attr-defined]


def test_it_is_short() -> None:
    assert len(FILE.read_text().splitlines()) <= 210
