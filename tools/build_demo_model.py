"""Build the start checkpoint of an example from nothing: a tokenizer and a tiny Llama.

    python tools/build_demo_model.py calculator --out examples/multiturn/calculator/model
    python tools/build_demo_model.py shell --out examples/multiturn/shell_tasks/model

Two supervised stages. First clean demonstrations, from the easiest level to all of them, until the loss says
that copying and counting have formed: they form suddenly and depend on the seed, so an attempt that does not
get there is given up for another seed. Then a short noisy stage in which each decision is, at random,
replaced by a worse one (the calculator: an answer that is guessed instead of calculated): the model stays
able to use its tool but is tempted not to. Undoing that is what is left for reinforcement learning.

The shell has one stage, with the temptations from the start: clean demonstrations are so alike that a model
of them copies by position, and a noisy stage then destroys what it can.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from demo_calculator import CalculatorTask
from demo_shell import ShellTask
from demo_task import IGNORE, DemoTask, Encoder, build_tokenizer
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.conversation.parsers import hermes

STARTED = time.perf_counter()


@dataclass(frozen=True)
class Plan:
    """Sizes and gates of a build. Losses are moving averages over model tokens, in nats."""

    levels: int = 6  # levels of difficulty, at most (the calculator: operations)
    vocabulary: int = 640
    width: int = 64
    layers: int = 3
    heads: int = 4
    batch: int = 32
    rate: float = 2e-3
    advance: float = 0.05  # loss at which the next level comes in
    formed: float = 0.03  # loss with all levels at which the learning rate starts to decay
    settle: int = 2000  # steps of that decay
    patience: int = 6000  # steps without forming after which an attempt is given up
    attempts: int = 4
    clean_success: float = 0.97  # sampled, on every level
    noisy_steps: int = 200  # 0: no such stage, the first one has the temptations
    noisy_rate: float = 1e-3
    least_success: float = 0.2  # under this RL has too little to start from: no model is written
    episodes: int = 600  # episodes of each evaluation

    def of(self, task: DemoTask[Any]) -> list[int]:
        return sorted(task.shares)[: self.levels]


TASKS: dict[str, tuple[Callable[[], DemoTask[Any]], Plan]] = {
    "calculator": (CalculatorTask, Plan()),
    "shell": (ShellTask, Plan(formed=0.2, settle=600, patience=3000, noisy_steps=0, least_success=0.05)),
}


def build_model(plan: Plan, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=plan.width,
            intermediate_size=2 * plan.width,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            num_key_value_heads=plan.heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(
    model: LlamaForCausalLM,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    rates: Iterable[float],
) -> Iterator[float]:
    """Take a step per learning rate; yield each step's loss over the model's tokens."""
    model.train()
    for rate, (ids, labels) in zip(rates, data, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        with_label = labels[:, 1:] != IGNORE  # the head is the widest layer: only where it is needed
        loss = cross_entropy(model.lm_head(hidden[with_label]), labels[:, 1:][with_label])

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


class Average:
    """Moving average of the last ~50 losses."""

    def __init__(self, start: float = 5.0) -> None:
        self.value = start
        self.count = 0

    def add(self, loss: float) -> float:
        self.count += 1
        self.value += (loss - self.value) / min(self.count, 50)
        return self.value


def first_stage(plan: Plan, encoder: Encoder, model: LlamaForCausalLM, seed: int) -> bool:
    """Learn the task. False: the task did not form within the plan's patience."""
    rng = random.Random(seed)
    optimizer = _adam(model)

    step = 0
    levels = plan.of(encoder.task)
    for level in levels:
        data = encoder.batches(rng, levels[:level], not plan.noisy_steps, plan.batch)
        average = Average()

        gate = plan.advance if level < levels[-1] else plan.formed
        rates = (plan.rate * min(1.0, at / 100) for at in itertools.count(step + 1))
        for loss in train(model, data, optimizer, rates):
            step += 1
            average.add(loss)
            if step % 250 == 0:
                log(f"step {step}: levels up to {level}, loss {average.value:.4f}")
            if step >= plan.patience:
                return False
            if average.count >= 50 and average.value < gate:
                break

        log(f"step {step}: levels up to {level} formed, loss {average.value:.4f}")

    for loss in train(model, data, optimizer, _decay(plan.rate, plan.settle)):
        average.add(loss)
    log(f"settled after {plan.settle} more steps, loss {average.value:.5f}")
    return True


def noisy_stage(plan: Plan, encoder: Encoder, model: LlamaForCausalLM, seed: int) -> None:
    """Learn the temptations of the task."""
    data = encoder.batches(random.Random(-seed - 1), plan.of(encoder.task), True, plan.batch)
    losses = list(train(model, data, _adam(model), _decay(plan.noisy_rate, plan.noisy_steps)))
    log(f"noisy stage: {plan.noisy_steps} steps, loss {sum(losses[-50:]) / 50:.3f}")


@torch.inference_mode()
def evaluate(
    model: LlamaForCausalLM, encoder: Encoder, questions: dict[int, list[Any]], *, greedy: bool, seed: int = 0
) -> dict[int, float]:
    """Return the success by level, in episodes whose text is parsed and whose calls are answered."""
    torch.manual_seed(seed)
    model.eval()
    all_questions = [question for level in questions.values() for question in level]
    texts = [encoder.prompt(question) for question in all_questions]
    episodes = [encoder.task.begin(question) for question in all_questions]

    answers = [""] * len(all_questions)
    live = list(range(len(all_questions)))
    for _ in range(max(encoder.task.decisions(question) for question in all_questions) + 2):
        turns = _generate(model, encoder, [texts[row] for row in live], greedy)
        calling = []
        for row, turn in zip(live, turns, strict=True):
            answers[row] = encoder.chat.decode(turn)
            calls = hermes(answers[row]).calls
            if calls and turn[-1] in encoder.chat.stop_ids:
                texts[row] += [*turn, *encoder.reply(episodes[row].reply(calls[0]), calls[0])]
                calling.append(row)

        live = calling
        if not live:
            break

    scores = [episode.score(answer) for episode, answer in zip(episodes, answers, strict=True)]
    next_score = iter(scores)
    return {
        level: sum(itertools.islice(next_score, len(ones))) / len(ones) for level, ones in questions.items()
    }


def _generate(
    model: LlamaForCausalLM, encoder: Encoder, texts: list[list[int]], greedy: bool
) -> list[list[int]]:
    """Return the model's next turn for each text, at temperature 1, cut after its stop id."""
    width = max(map(len, texts))
    pad = encoder.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=32, pad_token_id=pad, eos_token_id=list(encoder.chat.stop_ids), **sampling
    )
    out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    return [_until(turn, encoder.chat.stop_ids) for turn in out]


def report(title: str, task: DemoTask[Any], success: dict[int, float]) -> float:
    """Print success by level; the mean weighted by the task's shares."""
    weights = [task.shares[level] for level in success]
    mean = sum(s * w for s, w in zip(success.values(), weights, strict=True)) / sum(weights)
    log(f"{title}: {mean:.3f}  " + "  ".join(f"level {level} {s:.3f}" for level, s in success.items()))
    return mean


def attempt(plan: Plan, encoder: Encoder, seed: int) -> LlamaForCausalLM | None:
    """Return a start checkpoint, or None if this seed did not lead to a checkpoint."""
    model = build_model(plan, encoder.tokenizer, seed)
    if not first_stage(plan, encoder, model, seed):
        log(f"seed {seed} did not form within {plan.patience} steps")
        return None

    rng = random.Random(0)
    task = encoder.task
    levels = plan.of(encoder.task)
    count = plan.episodes // len(levels)

    questions = {level: [task.make(rng, level) for _ in range(count)] for level in levels}
    if plan.noisy_steps:
        clean = evaluate(model, encoder, questions, greedy=False)
        report("clean, sampled", task, clean)
        if min(clean.values()) < plan.clean_success:
            log(f"seed {seed}: success under {plan.clean_success} somewhere")
            return None
        noisy_stage(plan, encoder, model, seed)

    sampled = report("start, sampled", task, evaluate(model, encoder, questions, greedy=False))
    report("start, greedy", task, evaluate(model, encoder, questions, greedy=True))

    if sampled < plan.least_success:
        log(f"seed {seed}: sampled success {sampled:.3f} is under {plan.least_success}")
        return None

    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)
    settings = out / "tokenizer_config.json"
    names = json.loads(settings.read_text())
    names["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows too

    settings.write_text(json.dumps(names, indent=2) + "\n")


def log(line: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.0f} s] {line}", flush=True)


def _adam(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)


def _decay(rate: float, steps: int) -> Iterator[float]:
    """Linear, from `rate` to nearly 0."""
    return (rate * (1 - step / steps) for step in range(steps))


def _until(turn: list[int], stops: tuple[int, ...]) -> list[int]:
    ends = [at for at, token in enumerate(turn) if token in stops]
    return turn[: ends[0] + 1] if ends else turn


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the start checkpoint of an example.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first attempt")
    parser.add_argument("--threads", type=int, default=1, help="number of OpenMP threads")

    for field in fields(Plan):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    args = vars(parser.parse_args())

    torch.set_num_threads(args["threads"])
    task, plan = TASKS[args["task"]]
    plan_arguments = {field.name: args[field.name] for field in fields(Plan) if args[field.name] is not None}
    plan = replace(plan, **plan_arguments)
    encoder = Encoder(task(), build_tokenizer(task(), plan.vocabulary))
    log(f"tokenizer: {len(encoder.tokenizer)} tokens")

    for seed in range(args["seed"], args["seed"] + plan.attempts):
        if model := attempt(plan, encoder, seed):
            save(model, encoder.tokenizer, args["out"])
            log(f"wrote {args['out']} ({model.num_parameters():,} parameters, seed {seed})")
            return 0

    print("no attempt succeeded: nothing was written; try other seeds or more patience", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
