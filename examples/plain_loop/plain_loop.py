"""Reinforcement learning of a tool-calling agent in one process, one step at a time. Start reading here.

    sample ──► call tools ──► reward ──► advantage ──► loss ──► optimizer step ──► sample …

asyncrl runs the same algorithm with these arrows in different processes that do not wait for each other.
With `buffer.max_staleness=0` its gradients are those of this file (tests/integration/test_sync_equality.py).

    python examples/plain_loop/plain_loop.py --steps 60
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

CALCULATOR = Path(__file__).parents[1] / "multiturn" / "calculator"
PROMPTS = 8  # per batch
MEMBERS = 8  # episodes of each prompt: a group
MAX_TURNS = 8
MAX_NEW_TOKENS = 48
MAX_TOKENS = 256


# -- the task: a tool, and a reward ----------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Do one operation on two integers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "op": {"enum": ["minus", "plus", "times"]},
                "b": {"type": "integer"},
            },
            "required": ["a", "op", "b"],
        },
    },
}
CALL = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>", re.DOTALL)


def call_tool(request: str) -> str:
    """What the tool answers to `{"name": "calculator", "arguments": {"a": 1, "op": "plus", "b": 2}}`: 3."""
    try:
        arguments = json.loads(request)["arguments"]
        a = int(arguments["a"])
        b = int(arguments["b"])
        return str({"plus": a + b, "minus": a - b, "times": a * b}[arguments["op"]])
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error!r}"  # the model reads it and may try again


def reward(answer: str, truth: str) -> float:
    """1 if the last number of the last turn is the right one, else 0."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == int(truth))


# -- sampling --------------------------------------------------------------------------------------------


@dataclass
class Episode:
    """A conversation as token ids. `by_model` marks the ids that the model wrote: only these are trained."""

    truth: str
    ids: list[int]
    by_model: list[bool] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False

    def append(self, ids: list[int], by_model: bool) -> None:
        self.ids += ids
        self.by_model += [by_model] * len(ids)


def play(model: Any, tokenizer: Any, samples: list[dict], greedy: bool = False) -> list[Episode]:
    """Play one episode per sample, all in parallel. A turn that calls the tool is answered and continued; any
    other turn is the final answer. Ids are appended, and never tokenised again."""
    episodes = []
    for sample in samples:
        rendered = tokenizer.apply_chat_template(
            sample["prompt"], tools=[TOOL], add_generation_prompt=True, return_dict=True
        )
        prompt = rendered["input_ids"]
        episodes.append(Episode(sample["reward_model"]["ground_truth"], prompt, [False] * len(prompt)))
    for _ in range(MAX_TURNS):
        running = [episode for episode in episodes if not episode.done]
        if not running:
            break
        for episode, turn in zip(running, sample_turns(model, tokenizer, running, greedy), strict=True):
            episode.append(turn, by_model=True)
            answer_or_end(tokenizer, episode, turn)
    return episodes


def answer_or_end(tokenizer: Any, episode: Episode, turn: list[int]) -> None:
    """Answer the turn's tool call, or reward it and end the episode."""
    text = tokenizer.decode(turn, skip_special_tokens=True)
    call = CALL.search(text)
    complete = turn[-1] == tokenizer.eos_token_id
    if call is None or not complete or len(episode.ids) > MAX_TOKENS - MAX_NEW_TOKENS:
        episode.reward = reward("" if call else text, episode.truth)
        episode.done = True
        return
    reply = f"<tool_response>\n{call_tool(call[1])}\n</tool_response>"
    # What the chat template writes between the end of this turn and the beginning of the next one. asyncrl
    # derives it from any template; here it is spelled out.
    between = f"\n<|im_start|>tool\n{reply}<|im_end|>\n<|im_start|>assistant\n"
    episode.append(tokenizer.encode(between, add_special_tokens=False), by_model=False)


@torch.no_grad()
def sample_turns(model: Any, tokenizer: Any, episodes: list[Episode], greedy: bool) -> list[list[int]]:
    """The next turn of each episode, with its end-of-turn token."""
    width = max(len(episode.ids) for episode in episodes)
    pad = tokenizer.pad_token_id
    eos = tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(e.ids)) + e.ids for e in episodes])
    real = torch.tensor([[0] * (width - len(e.ids)) + [1] * len(e.ids) for e in episodes])
    choice = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}
    written = model.generate(
        input_ids=ids,
        attention_mask=real,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=eos,
        pad_token_id=pad,
        **choice,
    )
    turns = [row[width:].tolist() for row in written]
    return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in turns]


# -- training --------------------------------------------------------------------------------------------


def advantages(rewards: list[float]) -> list[float]:
    """Return how much better each episode of a group is than the group's mean (Dr. GRPO, arXiv 2503.20783).

    Rewards 1, 0, 0, 1 give 0.5, -0.5, -0.5, 0.5; a group of equal rewards teaches nothing.
    """
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def policy_loss(
    model: Any, episodes: list[Episode], weights: list[float], temperature: float = 1.0
) -> Tensor:
    """-Σ A · log π(token) over all tokens that the model wrote, divided by their number.

    Minimising this loss makes the tokens of episodes with a positive advantage A more likely (REINFORCE).
    """
    width = max(len(episode.ids) for episode in episodes)
    ids = torch.tensor([e.ids + [0] * (width - len(e.ids)) for e in episodes])
    trained = torch.tensor([e.by_model + [False] * (width - len(e.ids)) for e in episodes])[:, 1:]
    logits = model(ids).logits[:, :-1] / temperature  # what follows a token cannot change its logits
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[:, :, 0]
    per_episode = torch.where(trained, log_probs, 0.0).sum(dim=1)
    return -(torch.tensor(weights, dtype=per_episode.dtype) * per_episode).sum() / trained.sum()


def train(steps: int, lr: float, seed: int) -> None:
    """Sample a batch, compare each episode with its group, take one optimizer step; repeat."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(CALCULATOR / "model")
    model = AutoModelForCausalLM.from_pretrained(CALCULATOR / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    samples = pyarrow.parquet.read_table(CALCULATOR / "data" / "train.parquet").to_pylist()
    started = time.monotonic()
    for step in range(steps):
        drawn = rng.sample(samples, PROMPTS)
        episodes = play(model, tokenizer, [sample for sample in drawn for _ in range(MEMBERS)])
        rewards = [episode.reward for episode in episodes]
        weights = [a for g in range(PROMPTS) for a in advantages(rewards[g * MEMBERS : (g + 1) * MEMBERS])]
        optimizer.zero_grad()
        policy_loss(model, episodes, weights).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.step()
        mean = sum(rewards) / len(rewards)
        seconds = time.monotonic() - started
        print(f"step {step + 1:3}  reward {mean:.3f}  {seconds:5.0f} s", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--lr", type=float, default=4e-4)
    options.add_argument("--seed", type=int, default=0)
    train(**vars(options.parse_args()))
