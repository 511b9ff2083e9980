"""The tiny checkpoints that hold the demo's weights, and the conversations that they learn from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from asyncrl.data import load_samples
from tests.fakes.taught_families import CALCULATOR_ROWS, build_taught_family, demonstrations
from tests.fakes.tiny_families import DEMO_MODEL

COUNT = 64  # conversations


def test_a_text_part_with_the_layers_of_a_llama_computes_what_the_demo_does(tmp_path: Path) -> None:
    demo = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    taught = AutoModelForImageTextToText.from_pretrained(build_taught_family("mistral3", tmp_path))
    tokens = torch.arange(3, 100).reshape(1, -1)
    with torch.no_grad():
        demo_logits = demo(input_ids=tokens).logits
        taught_logits = taught(input_ids=tokens).logits

    vocabulary_size = demo_logits.shape[-1]
    assert torch.allclose(taught_logits[..., :vocabulary_size], demo_logits, atol=1e-3)
    assert torch.equal(taught_logits.argmax(-1), demo_logits.argmax(-1))


def test_a_demonstration_is_right_unless_it_guesses() -> None:
    truths = [sample.ground_truth for sample in load_samples(CALCULATOR_ROWS)[:COUNT]]
    answers = [messages[-1]["content"] for messages in demonstrations(COUNT)]
    right_answers = [f"The answer is {truth}." for truth in truths]

    guessed = [answer.startswith("I guess ") for answer in answers]
    pairs = zip(answers, right_answers, guessed, strict=True)
    assert all((answer == right) != is_guess for answer, right, is_guess in pairs)
    assert COUNT / 4 < sum(guessed) < COUNT * 3 / 4
