"""Tries today's families of models on tiny random checkpoints, and prints what this project does with each.

    python tools/model_matrix.py                              # a row for each family, as it ends
    python tools/model_matrix.py --families qwen3_5 gemma3 --json
    python tools/model_matrix.py --columns rows LoRA
    python tools/model_matrix.py --sglang                     # with a real server for each family
    python tools/model_matrix.py --sglang --markdown          # the table of docs/dev/model_matrix.md
    python tools/model_matrix.py --check                      # has docs/dev/model_matrix.md all families and
    columns?

The checkpoints have the layer layouts and tensor names of published models (tests/fakes/tiny_families.py).
Weights are in float32. A family has a process of its own with a deadline: columns not reached in time say so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.fakes

from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

from asyncrl.errors import one_line
from asyncrl.weights.model_files import stored_tensors
from tests.fakes.tiny_families import FAMILIES, build_family

ROOT = Path(__file__).resolve().parents[1]
DOCS_PAGE = ROOT / "docs/dev/model_matrix.md"
BEGIN_MARKER = "<!-- generated: models (tools/model_matrix.py --sglang --markdown) -->"
END_MARKER = "<!-- end -->"

ROW_SECONDS = 600.0
"""Deadline for a family, including the family's server."""
NOT_REACHED = "not reached before the deadline"
NOT_RUN = "not run"
LORA_RANK = 4
SCORED_TOKENS = 24
SAMPLED_TOKENS = 8

# Families whose attention SGLang 0.5.23 computes on GPUs alone.
WITHOUT_CPU_SERVER = ("gemma4", "gemma4_text", "gpt_oss")


@dataclass(frozen=True)
class TinyModel:
    """A family's tiny checkpoint, with an MTP layer where the published files have one."""

    family: str
    directory: Path

    @cached_property
    def config(self) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self.directory)

    @property
    def path(self) -> str:
        return str(self.directory)


# ------------------------------------------------------------------- columns


def model_class(model: TinyModel) -> str:
    """Return the class of transformers that reads the model."""
    from asyncrl.model_class import auto_class_of

    mapping = auto_class_of(model.config)._model_mapping
    return f"`{mapping[type(model.config)].__name__}`"


def trained_part(model: TinyModel) -> str:
    match = checkpoint_match(model)
    part = "text part" if match.parts.frozen else "all"
    return f"{part}: {counted_tensors(model, match.parts.trained)}"


def frozen_parts(model: TinyModel) -> str:
    """Return the parts that the model holds and does not train, and the tensors that it does not hold."""
    match = checkpoint_match(model)
    parts = [f"`{part}`: {counted_tensors(model, names)}" for part, names in match.parts.frozen.items()]
    if match.parts.passed_on:
        parts.append(f"passed on, MTP: {counted_tensors(model, match.parts.passed_on)}")
    return "; ".join(parts) or "–"


def packing(model: TinyModel) -> str:
    """Return how rows can be packed. Where they cannot, the reason is the layer, if the check names one."""
    from asyncrl.trainer.model import architecture_problems

    problems = architecture_problems(model.config)
    if problems is None:
        return "not checked: no small copy can be made"
    if problems["padded"]:
        return f"none: {short_reason(problems['padded'])}"
    if problems["packed"]:
        return f"padded only: {short_reason(problems['packed'])}"
    return "packed" if problems["tree"] else "packed, tree"


def embedded_engine(model: TinyModel) -> str:
    from asyncrl.engines.torch.check import decoding_problem
    from asyncrl.shrunk import cached_findings

    findings = cached_findings(model.config, "engine", lambda copy: {"decoding": decoding_problem(copy)})
    if findings is None:
        return "not checked: no small copy can be made"

    problem = findings["decoding"].removeprefix("the embedded engine ").removesuffix("; use another engine")
    return f"no: {problem}" if problem else "yes"


def sglang_gap(model: TinyModel) -> str:
    """Return the largest difference between a real server's log-probs, of scored and of sampled tokens, and
    those of transformers."""
    from tests.fakes.sglang_process import PYTHON, SGLangServer

    if model.family in WITHOUT_CPU_SERVER:
        return "not run (attention back end has no CPU)"
    if not PYTHON.exists():
        return "not run (no SGLang here: `make sglang-cpu`)"

    # The server's states of convolutions would else be in bfloat16.
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    try:
        server = SGLangServer(model.directory, model.directory / "server.log")
    except RuntimeError as error:
        return f"does not start: {last_error(str(error))}"
    try:
        return f"{server_gap(server.url, model):.1e}"
    finally:
        server.kill()


def lora_modules(model: TinyModel) -> str:
    """Return the kinds of layers that adapters adapt, and which of them SGLang servers get alone."""
    from asyncrl.errors import ConfigError
    from asyncrl.launch.models import resolve_lora_modules

    adapted_kinds = resolve_lora_modules(lora_run(model, engine="torch"))
    if not adapted_kinds:
        adapted_kinds = sorted({layer.rpartition(".")[2] for layer in adapted_layers(model)})
    try:
        served_kinds = resolve_lora_modules(lora_run(model, engine="sglang"))
    except ConfigError as error:
        reason = str(error).replace(model.path, "this model")
        return f"{', '.join(adapted_kinds)}; not alone to servers: {reason}"

    left_out = [kind for kind in adapted_kinds if kind not in served_kinds]
    if not left_out:
        return f"{', '.join(adapted_kinds)}; alone to servers, too"
    return f"{', '.join(adapted_kinds)}; alone to servers without {', '.join(left_out)}"


def exported(model: TinyModel) -> str:
    """Export the model after a change of all that trains; return how the export differs from the input."""
    import torch

    from tests.fakes.training import export

    policy = load_policy(model)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)

    export_directory = Path(export(model.directory / "export", policy, only_rank(), model.path))
    return "; ".join(export_differences(model, export_directory)) or "same names and class, rest bit-equal"


COLUMNS: dict[str, Callable[[TinyModel], str]] = {
    "class": model_class,
    "trains": trained_part,
    "frozen": frozen_parts,
    "rows": packing,
    "embedded engine": embedded_engine,
    "SGLang, nats": sglang_gap,
    "LoRA": lora_modules,
    "export": exported,
}
FAMILY_COLUMN = "family"
SERVER_COLUMN = "SGLang, nats"


# ------------------------------------------------------------------- parts of columns


def checkpoint_match(model: TinyModel) -> Any:
    from asyncrl.weights.checkpoint_match import compare_checkpoint

    match = compare_checkpoint(model.path, model.family, "language model")
    if match.problem:
        raise ValueError(match.problem)
    return match


def counted_tensors(model: TinyModel, names: Iterable[str]) -> str:
    """Return the number of tensors and of their parameters. Example: `60 tensors, 270 k`."""
    shapes = [tensor.shape for name, tensor in stored_tensors(model.path).items() if name in {*names}]
    parameters = sum(map(prod, shapes))
    noun = "tensor" if len(shapes) == 1 else "tensors"
    return f"{len(shapes)} {noun}, {parameters / 1e3:.0f} k"


def short_reason(problem: str) -> str:
    """Return the layer that a problem names, with what the layer does; else the whole problem."""
    layer = re.search(r"[\w.]+ \(\w+\).*$", problem)
    attention = re.match(r"has attention with [\w, ]+", problem)
    return ": ".join(match[0] for match in (attention, layer) if match) or problem


def last_error(log: str) -> str:
    """Return the last line of a log that names an error."""
    errors = re.findall(r"^\S*(?:Error|Exception|NotImplemented)\w*:? .*$", log, re.MULTILINE)
    line: str = errors[-1] if errors else log.strip().splitlines()[-1]
    return line[:160]


@cache
def only_rank() -> Any:
    """Return this process as the only rank of a trainer."""
    from asyncrl.trainer.world import join_ranks

    return join_ranks(0, 1, device="cpu")


def load_policy(model: TinyModel, *, lora_rank: int = 0) -> Any:
    from asyncrl.config import ModelConfig
    from asyncrl.trainer.model import load_policy as load

    model_config = ModelConfig(path=model.path, dtype="float32", lora_rank=lora_rank)
    return load(model_config, only_rank())


def lora_run(model: TinyModel, *, engine: str) -> Any:
    """Return the configuration of a run with adapters, which go alone to its engine."""
    from asyncrl.config import parse

    return parse(
        {
            "name": "matrix",
            "model": {"path": model.path, "dtype": "float32", "lora_rank": LORA_RANK},
            "data": {"train": "none"},
            "rollout": {"max_tokens": 64, "max_new_tokens": 16},
            "engine": {"name": engine},
            "weights": {"adapters": True},
        }
    )


def adapted_layers(model: TinyModel) -> tuple[str, ...]:
    layers: tuple[str, ...] = load_policy(model, lora_rank=LORA_RANK).adapters.specs[""].layers
    return layers


def server_gap(url: str, model: TinyModel) -> float:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    prompt = list(range(20, 20 + SCORED_TOKENS))
    sampling = {"temperature": 1.0, "max_new_tokens": SAMPLED_TOKENS, "ignore_eos": True}
    request = {
        "input_ids": prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = post(f"{url}/generate", request)["meta_info"]
    scored = [entry[0] for entry in reply["input_token_logprobs"][1:]]
    sampled = [entry[0] for entry in reply["output_token_logprobs"]]
    tokens = prompt + [entry[1] for entry in reply["output_token_logprobs"]]

    auto_class = AutoModelForImageTextToText if FAMILIES[model.family].composite else AutoModelForCausalLM
    reference = auto_class.from_pretrained(model.directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([tokens])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return float((expected - torch.tensor(scored + sampled)).abs().max())


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def export_differences(model: TinyModel, export_directory: Path) -> Iterator[str]:
    """Yield how an export differs from the checkpoint, beyond the weights that were trained, and what
    transformers lacks when it reads the export."""
    from asyncrl.model_class import auto_class_of

    trained_names = {*checkpoint_match(model).parts.trained}
    source_tensors = all_tensors(model.directory)
    exported_tensors = all_tensors(export_directory)
    if source_tensors.keys() != exported_tensors.keys():
        common_count = len(source_tensors.keys() & exported_tensors.keys())
        added_count = len(exported_tensors) - common_count
        yield f"{common_count} of {len(source_tensors)} names, {added_count} others"

    given_class = json.loads((model.directory / "config.json").read_text())["architectures"]
    written_class = json.loads((export_directory / "config.json").read_text()).get("architectures")
    if given_class != written_class:
        yield f"architectures {written_class}"

    unlike_input = Counter[bool]()
    for name in source_tensors.keys() & exported_tensors.keys():
        source_tensor = source_tensors[name]
        exported_tensor = exported_tensors[name]
        if not (source_tensor.shape == exported_tensor.shape and source_tensor.equal(exported_tensor)):
            unlike_input[name in trained_names] += 1
    if unlike_input[False]:
        yield f"{unlike_input[False]} untouched tensors differ"
    if not unlike_input[True]:
        yield "no trained tensor changed"

    auto_class = auto_class_of(AutoConfig.from_pretrained(export_directory))
    reloaded, information = auto_class.from_pretrained(export_directory, output_loading_info=True)
    if information["missing_keys"] or [type(reloaded).__name__] != given_class:
        yield f"reads as {type(reloaded).__name__}, without {len(information['missing_keys'])} tensors"


def all_tensors(directory: Path) -> dict[str, Any]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


# ------------------------------------------------------------------- rows


def print_cells(family: str, columns: list[str], *, with_server: bool) -> None:
    """Print a line of JSON for each of the columns of a family, as soon as the column is known."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        has_mtp = bool(FAMILIES[family].mtp)
        model = TinyModel(family, build_family(family, Path(folder, family), mtp=has_mtp))
        for column in columns:
            if column == SERVER_COLUMN and not with_server:
                text = NOT_RUN
            else:
                try:
                    text = COLUMNS[column](model)
                except Exception as error:
                    text = f"fails with {one_line(error)[:200]}"
            print(json.dumps({column: text}), flush=True)


def family_row(family: str, columns: list[str], *, with_server: bool, seconds: float) -> dict[str, str]:
    """Return a family's cells by column, from a process of its own."""
    command = [sys.executable, __file__, "--row", family, "--columns", *columns]
    if with_server:
        command.append("--sglang")

    try:
        completed = subprocess.run(command, capture_output=True, timeout=seconds)
        output = completed.stdout
        missing = f"the process exited with code {completed.returncode}"
    except subprocess.TimeoutExpired as timeout:
        output = timeout.stdout or b""
        missing = NOT_REACHED

    row = {FAMILY_COLUMN: f"`{family}` ({FAMILIES[family].published})"} | dict.fromkeys(columns, missing)
    for line in output.splitlines():
        if line.startswith(b"{"):
            row |= json.loads(line)
    return row


def markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def check_page(page: str) -> str:
    """Describe which column or family the table of docs/dev/model_matrix.md lacks; '' for none."""
    if BEGIN_MARKER not in page:
        return f"{DOCS_PAGE.name} lacks the line {BEGIN_MARKER}"

    table = page.split(BEGIN_MARKER, 1)[1].split(END_MARKER, 1)[0].strip().splitlines()
    if table[0] != markdown_line((FAMILY_COLUMN, *COLUMNS)):
        return f"the table of {DOCS_PAGE.name} has the columns {table[0]}"

    listed = [re.match(r"\| `(\w+)`", line) for line in table[2:]]
    listed_families = {match[1] for match in listed if match}
    differing = sorted(listed_families ^ FAMILIES.keys())
    return f"the table of {DOCS_PAGE.name} differs in {', '.join(differing)}" if differing else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--sglang", action="store_true", help="start a real server for each family")
    parser.add_argument(
        "--seconds", type=float, default=ROW_SECONDS, help="deadline for a family, in seconds"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one line of JSON for each family")
    output.add_argument("--markdown", action="store_true", help="print the table of docs/dev/model_matrix.md")
    output.add_argument(
        "--check", action="store_true", help="check the columns and families in docs/dev/model_matrix.md"
    )
    output.add_argument("--row", choices=FAMILIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.row:
        print_cells(arguments.row, arguments.columns, with_server=arguments.sglang)
        return 0
    if arguments.check:
        problem = check_page(DOCS_PAGE.read_text())
        print(problem or "docs/dev/model_matrix.md lists all families and columns")
        return 1 if problem else 0

    if arguments.markdown:
        print(BEGIN_MARKER)
        print(markdown_line((FAMILY_COLUMN, *arguments.columns)))
        print("|" + "---|" * (len(arguments.columns) + 1))
    for family in arguments.families:
        row = family_row(family, arguments.columns, with_server=arguments.sglang, seconds=arguments.seconds)
        if arguments.json:
            print(json.dumps(row), flush=True)
        elif arguments.markdown:
            print(markdown_line(row.values()), flush=True)
        else:
            print("\n".join(f"{column:>16}  {text}" for column, text in row.items()), end="\n\n", flush=True)
    if arguments.markdown:
        print(END_MARKER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
