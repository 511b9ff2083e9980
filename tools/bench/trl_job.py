"""The calculator demo in TRL's GRPOTrainer: what trl.py runs, with `python -P` and TRL on PYTHONPATH.

Prints one line of JSON: for each optimizer step the time, the CPU seconds of all threads and child processes,
the seconds slept in tools, and the tokens that the model wrote.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

from asyncrl.data import load_samples
from asyncrl.rewards.answers import final_number
from asyncrl.tools import load_tool

TASK = Path(__file__).resolve().parents[2] / "examples" / "multiturn" / "calculator"
slept = 0.0
delays: Any = None  # a generator of seconds; None: the tool answers at once


def calculator(a: int, op: str, b: int) -> int:
    """Do one operation on two integers.

    Args:
        a: A number.
        op: plus, minus or times.
        b: A number.
    """
    global slept
    if delays is not None:
        slept += (seconds := next(delays))
        time.sleep(seconds)
    return {"plus": a + b, "minus": a - b, "times": a * b}[op]


def reward(completions: list[list[dict[str, Any]]], ground_truth: list[str], **_: Any) -> list[float]:
    pairs = zip(completions, ground_truth, strict=True)
    return [final_number("", turns[-1].get("content") or "", truth)["score"] for turns, truth in pairs]


def demo_tokenizer() -> Any:
    """With the tool shown as in the demo's prompts, whatever schema TRL makes of the function."""
    tokenizer = AutoTokenizer.from_pretrained(TASK / "model", local_files_only=True)
    shown = f"{{{{ '{json.dumps(load_tool('calculator').schema)}' }}}}"
    assert "{{ tool | tojson }}" in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ tool | tojson }}", shown)
    return tokenizer


def log_normal(mu: float, sigma: float, seed: int) -> Any:
    draw = random.Random(seed)
    while True:
        yield draw.lognormvariate(mu, sigma)


class Clock(TrainerCallback):
    """Delays begin after the steps that are left out (`warm`)."""

    def __init__(self, warm: int, delay: Any) -> None:
        self.rows: list[dict[str, float]] = []
        self._warm, self._delay = warm, delay

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        global delays
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(one.ru_utime + one.ru_stime for one in used)
        self.rows.append({"time": time.time(), "cpu": cpu, "slept": slept})
        if state.global_step >= self._warm:
            delays = self._delay


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--generate-for", type=int, default=1, help="steps of one generation")
    parser.add_argument("--delay", type=float, nargs=2, metavar=("MU", "SIGMA"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trl: Any = importlib.import_module("trl")
    templates: Any = importlib.import_module("trl.chat_template_utils")
    datasets: Any = importlib.import_module("datasets")
    tokenizer = demo_tokenizer()
    tokenizer.response_template = templates.qwen3_template  # <tool_call>, JSON, as the demo's model writes
    samples = [
        {
            "prompt": [{"role": message.role, "content": message.content} for message in sample.prompt],
            "ground_truth": json.loads(sample.ground_truth),
        }
        for sample in load_samples(str(TASK / "data" / "train.parquet"))
    ]
    config = trl.GRPOConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        seed=options.seed,
        per_device_train_batch_size=64,  # the demo's batch, in one forward and backward
        steps_per_generation=options.generate_for,
        num_generations=8,
        max_completion_length=224,  # with the prompt, as long as the demo's episodes may be
        generation_kwargs={"max_new_tokens": 48},  # of one turn, as in the demo
        max_tool_calling_iterations=15,
        temperature=1.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        learning_rate=1e-30,  # the same model to the end: the same episodes on average in both programs
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    mu, sigma = options.delay or (0.0, 0.0)
    clock = Clock(options.warm, log_normal(mu, sigma, options.seed) if options.delay else None)
    trainer = trl.GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(samples),
        processing_class=tokenizer,
        tools=[calculator],
        callbacks=[clock],
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    print(json.dumps({"rows": clock.rows, "logs": logs}))


if __name__ == "__main__":
    main()
