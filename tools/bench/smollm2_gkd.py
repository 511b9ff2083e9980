"""A pretrained model learns a format from its prompted self: `gkd` on its own samples, SFT on the teacher's.

    python tools/bench/smollm2_gkd.py --out gkd.jsonl --seeds 0 1 2
    python tools/bench/smollm2_gkd.py --out gkd.jsonl --table          # what is there

The teacher is the untrained model with four demonstrations (of sums and differences) in front of its prompt,
as `kl.prompt` shows them to it; students read none, and get no reward. Both SFT arms train what the teacher
wrote, the second only what is right, for as many steps and model tokens as `gkd, forward` of that seed took.
Then all are asked the same held-out questions (products), each once sampled and once greedily. CPU minutes
are those of all processes that train a student; the teacher's, when it writes for SFT, are printed apart.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from common import ROOT, questions, summary, table, train, wilson

from asyncrl.data.rows import Row, read_rows, write_rows
from asyncrl.observe.files import read_lines

DATA = ROOT / "examples/multiturn/smollm2_sft/data"
MODEL = ROOT / ".models/smollm2-135m-instruct"
EXPERIMENT = "smollm2_answer"
OPENING = "<|im_start|>system\n"
STUDENT = "student"
TEACHER = "teacher"
ALL = "sft"
RIGHT = "sft, only right ones"
GKD = {"gkd, forward": "forward", "gkd, js": "js"}
ARMS = [STUDENT, TEACHER, *GKD, ALL, RIGHT]
ROOMY = "rollout.max_tokens=1024"  # as the prompt is longer
HEADER = ["arm", "lr", "seeds", "sampled", "greedy", "tokens trained", "generated", "CPU minutes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="finished arms, which are not run again")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help=str(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-5], help="each of them is an arm")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=32, help="of a step of gkd")
    parser.add_argument("--tests", type=int, default=256)
    parser.add_argument("--table", action="store_true", help="print --out; run nothing")
    parser.add_argument("overrides", nargs="*", help="of every run, behind --")
    args = parser.parse_args()
    if not args.table:
        Bench(args).run()
    print(report(list(read_lines(args.out))))


class Bench:
    """Runs what `--out` does not have. Runs and files lie in a folder beside it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = args.out.resolve().with_suffix("")
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        for seed in self.args.seeds:
            for arm in self.args.arms:
                for lr in self.args.lr if arm not in (STUDENT, TEACHER) else [0.0]:
                    if self.found(arm, seed, lr) is None and (
                        arm not in (STUDENT, TEACHER) or seed == self.args.seeds[0]
                    ):
                        row = {"arm": arm, "seed": seed, "lr": lr, **self.trained(arm, seed, lr)}
                        with self.args.out.open("a") as out:
                            out.write(json.dumps(row) + "\n")
                        print(row, flush=True)

    def found(self, arm: str, seed: int, lr: float | None = None) -> dict[str, Any] | None:
        """Return a row of `--out`, without `lr` the newest."""
        own = [row for row in read_lines(self.args.out) if (row["arm"], row["seed"]) == (arm, seed)]
        return next((row for row in reversed(own) if lr in (None, row["lr"])), None)

    def trained(self, arm: str, seed: int, lr: float) -> dict[str, Any]:
        """Train an arm and ask it. Return the numbers of its row."""
        name = f"{file_name(arm)}-{seed}-{lr:g}"
        model = MODEL
        told = dict[str, Any]()
        keys = [f"seed={seed}", f"trainer.lr={lr}", f"total_steps={self.args.steps}", f"model.path={MODEL}"]
        keys += ["validation.samples=0", "data.test=''"]
        if arm in GKD:
            keys += ["algorithm=gkd", f"kl.estimator={GKD[arm]}", f"kl.prompt='{shots()}'"]
            keys.append("rollout.reward=none")
            keys += [f"buffer.groups_per_batch={self.args.episodes // 2}", "buffer.episodes_per_group=2"]
        elif arm in (ALL, RIGHT):
            answers = self.said(seed)
            told["generated"] = sum(row["tokens"][0] for row in answers)
            keys += ["algorithm=sft", "buffer.episodes_per_group=1", *self.lessons(arm, seed, answers)]
        if lr:
            ran = self.ran(name, keys)
            told = {"tokens": ran["tokens_trained"], "generated": ran["tokens_trained"], **told}
            told["minutes"] = ran["minutes"]
            model = self.folder / name / "checkpoints" / f"step-{self.args.steps}" / "hf"
        told |= self.asked(f"asked-{name}", str(model), arm == TEACHER)
        shutil.rmtree(self.folder / name / "checkpoints", ignore_errors=True)  # 2 GB
        return told

    def asked(self, name: str, model: str, prompt: bool) -> dict[str, Any]:
        """Ask a model the held-out questions."""
        data = [f"data.test={self.prompted('test')}", ROOMY] if prompt else []
        keys = ["total_steps=0", f"model.path={model}", f"validation.samples={self.args.tests}", *data]
        found = self.ran(name, keys)
        count = questions(self.folder / name)
        sampled, greedy = (round(found[f"{key}_before"] * count) for key in ("success", "greedy"))
        return {"tests": count, "sampled": sampled, "greedy": greedy}

    def ran(self, name: str, keys: list[str]) -> dict[str, Any]:
        """Return the summary of a run, which goes on if it was cut off, and its CPU minutes since then."""
        found = summary(self.folder / name)
        used = self.folder / name / "cpu_minutes"
        if found.get("outcome") != "completed":
            before = cpu_minutes()
            found = train(name, self.folder, ["resume=auto", *keys, *self.args.overrides], 7200.0, EXPERIMENT)
            if found["exit_code"]:
                raise SystemExit(1)
            used.write_text(str(cpu_minutes() - before))
        minutes = float(used.read_text()) if used.exists() else math.nan  # nan: the bench was cut off
        return found | {"minutes": minutes}

    def said(self, seed: int) -> list[Row]:
        """Return what the teacher wrote to training questions."""
        out = self.folder / f"said-{seed}.jsonl"
        if not out.exists():
            command = [sys.executable, "-m", "asyncrl.cli", "generate", MODEL, f"experiment={EXPERIMENT}"]
            command += [f"data={self.prompted('train')}", f"samples={self.args.steps * self.args.episodes}"]
            command += [f"run_dir={self.folder}", f"name=said-{seed}", f"seed={seed}", f"out={out}", ROOMY]
            before = cpu_minutes()
            with (self.folder / f"said-{seed}.out").open("wb") as log:
                command += self.args.overrides
                subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
            print(f"{out}: {cpu_minutes() - before:.1f} CPU minutes", flush=True)
        return list(read_rows(out))

    def lessons(self, arm: str, seed: int, answers: list[Row]) -> list[str]:
        """Write what is learned of it, without the teacher's prompt; in batches with the tokens of gkd's."""
        gkd = self.found("gkd, forward", seed)
        path = self.folder / f"learn-{file_name(arm)}-{seed}.jsonl"
        assert gkd is not None, "run the arm `gkd, forward` first: SFT gets its tokens"
        kept = [row for row in answers if row["stop_reasons"] == ["answered"]]  # none that was cut off
        kept = [row for row in kept if arm == ALL or row["rewards"] == [1]]
        each = sum(row["tokens"][0] for row in kept) / len(kept)
        write_rows(path, map(lesson, kept))
        batch = round(gkd["tokens"] / each / self.args.steps)
        return [f"data.train={path}", f"buffer.groups_per_batch={batch}"]

    def prompted(self, split: str) -> Path:
        """Write the data as the teacher reads it."""
        path = self.folder / f"{split}.jsonl"
        write_rows(path, map(with_prompt, read_rows(DATA / f"{split}.parquet")))
        return path


def shots() -> str:
    """Return four demonstrations, each a conversation of its own. The template has opened the first message,
    and the prompt that follows is the rest of the last one."""
    messages = [m for row in islice(read_rows(DATA / "demonstrations.jsonl"), 4) for m in row["messages"]]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return (text + OPENING).removeprefix(OPENING).strip()


def with_prompt(row: Row) -> Row:
    first, *others = row["prompt"]
    return {**row, "prompt": [{**first, "content": f"{shots()}\n\n{first['content']}"}, *others]}


def lesson(row: Row) -> Row:
    """Return a conversation without the demonstrations. Calls become text: SmolLM2's template writes none."""
    first, *others = json.loads(row["conversations"][0])
    first["content"] = first["content"].removeprefix(f"{shots()}\n\n")
    return {"messages": [first, *map(as_text, others)]}


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its calls as the model writes them."""
    said = [message["content"]]
    for function in (call["function"] for call in message.pop("tool_calls", [])):
        call = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        said.append(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    return message | {"content": "\n".join(filter(None, said))}


def file_name(arm: str) -> str:
    return arm.replace(", ", "-").replace(" ", "-")


def cpu_minutes() -> float:
    """Return those of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


def report(found: list[dict[str, Any]]) -> str:
    """Put together all seeds of an arm and learning rate together."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["arm"], row["lr"]), []).append(row)
    return table(HEADER, [line(*key, own) for key, own in groups.items()])


def line(arm: str, lr: float, own: list[dict[str, Any]]) -> list[str]:
    tests = sum(row["tests"] for row in own)

    def share(key: str) -> str:
        count = sum(row[key] for row in own)
        low, high = wilson(count, tests)
        return f"{count / tests:.1%} ({low:.0%}–{high:.0%})"

    def mean(key: str, form: str) -> str:
        return format(sum(row[key] for row in own) / len(own), form) if lr else "–"

    seeds = " ".join(str(row["seed"]) for row in own)
    return [arm, f"{lr:g}" if lr else "–", seeds, share("sampled"), share("greedy"), mean("tokens", ",.0f"),
            mean("generated", ",.0f"), mean("minutes", ".1f")]  # fmt: skip


if __name__ == "__main__":
    main()
