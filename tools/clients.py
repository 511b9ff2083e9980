"""Run clients of OpenAI's and Anthropic's API as they are, and print what became of each:
`docs/dev/agents.md`.

    python tools/clients.py [--only openai_python aider …] [--jobs 2] [--python312 python3.12] [--to .clients]

Each library gets an environment of its own, with the versions below, by pip or npm. Each of its cases is a
process that leads one real episode, over the gateway and a scripted engine, with a home of its own and no
variables but those that name the endpoint; all of it, where Linux lets us, in a network namespace with
nothing but loopback. Coding agents are tested by tests/integration/test_harnesses.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.fakes

from asyncrl.gateway import Endpoint, load_untrained
from asyncrl.rewards import RewardInput
from asyncrl.types import Sample
from asyncrl.wire.messages.worker import Finished
from tests.fakes import episodes
from tests.fakes.agents import AgentBench
from tests.fakes.chat import call

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tools/clients"
STAMP = "packages"  # in an environment: what was installed
SECONDS = 180.0  # seconds that a case may take
ANSWER = "it is 3"  # last line of every client
INSIDE = "ASYNCRL_CLIENTS_INSIDE"  # set within the namespace
LOOPBACK = 'ip link set lo up && exec "$@"'

Script = Callable[[str], str]  # the text of a turn, from its prompt's


# -- what the model says -----------------------------------------------------------------------------------


ADD = call("add", '{"a": 1, "b": 2}')


def says(text: str) -> Script:
    return lambda prompt: text


def adder(prompt: str) -> str:
    """Calls the tool once, then answers with what it said."""
    _, bracket, reply = prompt.rstrip().rpartition("[")
    return f"it is {float(reply.rstrip(']')):g}" if bracket and reply.endswith("]") else ADD


def fields(**texts: str) -> str:
    """Write fields as DSPy reads them."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in {**texts, "completed": ""}.items())


def react(prompt: str) -> str:
    """Play DSPy's ReAct: a call in text, the end of calls, and the answer from the replies."""
    if "starting with the field `[[ ## reasoning ## ]]`" in prompt:
        return fields(reasoning="I added.", answer=ANSWER)
    if "observation_0" in prompt:
        return fields(next_thought="I go on.", next_tool_name="finish", next_tool_args="{}")
    return fields(next_thought="I go on.", next_tool_name="add", next_tool_args='{"a": 1, "b": 2}')


def aider(prompt: str) -> str:
    if "commit message" in prompt:
        return "feat: say the sum"
    return f"said.txt\n```\n{ANSWER}\n```"


def shell(prompt: str) -> str:
    """OpenHands' tools."""
    if f"echo {ANSWER}" in prompt:
        return call("finish", '{"message": "done"}')
    return call("terminal", json.dumps({"command": f"echo {ANSWER} > said.txt"}))


def qwen(prompt: str) -> str:
    """Calls are text of Qwen-Agent's own, without `tools`, in lines as Qwen's models write them."""
    return ANSWER if "<tool_response>" in prompt else ADD.replace(">{", ">\n{").replace("}</", "}\n</")


TEXT = says(ANSWER)
JSON = says(json.dumps({"text": ANSWER}))
CALLED = says(call("Sum", json.dumps({"text": ANSWER})))


# -- the libraries -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """A client library.

    `packages`: the named ones come first. `cases`: the requests of its program, each with its script.
    `untrained`: see rollout.untrained_agents.
    """

    packages: str
    cases: Mapping[str, Script]
    named: int = 1
    python312: bool = False
    untrained: Sequence[str] = ()


def all_of(names: str, script: Script) -> dict[str, Script]:
    return dict.fromkeys(names.split(", "), script)


TOLD = all_of("generateText", TEXT) | all_of("tools, streamText", adder) | {"generateObject": JSON}
LIBRARIES = {
    "openai_python": Library("openai==3.57.0", all_of("chat, stream, responses", adder)),
    "openai_node": Library(
        "openai@7.57.0 zod@4.6.7",
        all_of("chat, stream", TEXT) | all_of("runTools, responses, responses.stream", adder),
    ),
    "ai_sdk": Library(
        "ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/openai@4.0.118 zod@4.6.7",
        {f"{provider}.{case}": TOLD[case] for provider in ("compatible", "openai") for case in TOLD},
        named=3,
    ),
    "anthropic_python": Library(
        "anthropic==2.14.0", all_of("create, stream, count_tokens", TEXT) | {"tools": adder}
    ),
    "anthropic_node": Library(
        "@anthropic-ai/sdk@1.14.0", all_of("create, stream, count_tokens", TEXT) | {"tools": adder}
    ),
    "langchain_chat": Library(
        "langchain-openai==1.7.4 langchain-anthropic==1.7.10",
        all_of("chat, responses, ChatAnthropic", adder)
        | all_of("chat.function_calling, ChatAnthropic.function_calling", CALLED)
        | all_of("chat.json_mode, chat.json_schema, responses.json_schema", JSON),
        named=2,
    ),
    "litellm_calls": Library(
        "litellm==1.110.2",
        all_of("openai, openai streamed, hosted_vllm, litellm_proxy, anthropic, anthropic streamed", adder)
        | all_of("text_completion, responses", TEXT),
    ),
    "instructor_models": Library(
        "instructor==1.17.0", all_of("TOOLS, TOOLS.partial", CALLED) | all_of("JSON, JSON_SCHEMA", JSON)
    ),
    "llama_index_llms": Library(
        "llama-index-llms-openai-like==0.8.1",
        all_of("default, default streamed, chat", TEXT) | {"FunctionAgent": adder},
    ),
    "autogen_agent": Library(
        "autogen-ext[openai]==0.7.5 autogen-agentchat==0.7.5", all_of("whole, streamed", adder)
    ),
    "dspy_modules": Library(
        "dspy==3.4.1",
        all_of("Predict, Predict.responses, Predict.text", says(fields(answer=ANSWER))) | {"ReAct": react},
    ),
    "crewai_crew": Library("crewai==1.15.30", {"crew": adder}),
    "ag2_agent": Library("ag2[openai]==1.2.1", all_of("chat, responses", adder)),
    "qwen_assistant": Library(
        "qwen-agent==0.0.34 numpy==2.4.6 soundfile==0.14.0 python-dateutil==4.0.0 tqdm==4.70.1",
        {"Assistant": qwen},
    ),
    "aider_task": Library(
        "aider-chat==0.86.2",
        all_of("weak model small, told by a function", aider),
        untrained=("small", f"{PROGRAMS}/side_requests.py:writes_commit_message"),
    ),
    "openhands_sdk": Library(
        "openhands-sdk==1.58.2 openhands-tools==1.58.2", {"task": shell}, python312=True
    ),
}


# -- environments ------------------------------------------------------------------------------------------


def install(name: str, library: Library, directory: Path, python312: str) -> None:
    """Make the environment anew if the packages have changed.

    CalledProcessError, OSError: the installation failed.
    """
    if installed(library, directory):
        return
    print(f"installing {library.packages}", file=sys.stderr)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)

    if program(name).suffix == ".mjs":
        words: list[str | Path] = [
            "npm",
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--prefix",
            directory,
        ]
    else:
        python = python312 if library.python312 else sys.executable
        subprocess.run([python, "-m", "venv", directory], check=True)
        quiet = ("--disable-pip-version-check", "--progress-bar=off", "-qq")
        words = [directory / "bin/python", "-m", "pip", "install", *quiet]

    subprocess.run([*words, *library.packages.split()], check=True)
    (directory / STAMP).write_text(library.packages)


def installed(library: Library, directory: Path) -> bool:
    return (directory / STAMP).is_file() and (directory / STAMP).read_text() == library.packages


def program(name: str) -> Path:
    return next(PROGRAMS.glob(f"{name}.*"))


# -- episodes ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The outcome of a case: turns and rows, or the failure, and the requested paths."""

    text: str
    failed: bool = False
    paths: set[str] = field(default_factory=set)


def run(name: str, library: Library, directory: Path, case: str) -> Outcome:
    """Play an episode that the library's program leads."""
    paths = set[str]()
    answers = list[Any]()

    async def agent(sample: Sample, endpoint: Endpoint) -> dict[str, str]:
        gateway: Any = bench.shared.gateway
        by_key = gateway._episode_of_key

        def noted(request: Any) -> Any:
            paths.add(request.path.removeprefix("/v1/"))
            return by_key(request)

        gateway._episode_of_key = noted
        return {"said": await talk(name, directory, case, endpoint)}

    def reward(reward_input: RewardInput) -> float:
        answers.append(reward_input.result)
        return 1.0

    untrained = load_untrained(library.untrained)
    limits = {"max_tokens": 1 << 20, "max_turns": 16, "max_rows": 16, "episode_timeout": SECONDS}

    bench = AgentBench(agent, library.cases[case], reward, limits=limits, untrained=untrained)
    try:
        end = bench.play()
    except TimeoutError:
        return Outcome(f"not finished within {SECONDS:g} s", True, paths)

    if not isinstance(end, Finished):
        return Outcome(end.detail, True, paths)
    if answers != [{"said": ANSWER}]:
        return Outcome(f"it said {answers}", True, paths)
    stats = end.stats
    side = f" and {stats.untrained_turns} untrained" if stats.untrained_turns else ""
    return Outcome(f"{stats.turns}→{stats.rows}{side}", False, paths)


async def talk(name: str, directory: Path, case: str, endpoint: Endpoint) -> str:
    """Return the last line that the program printed.

    RuntimeError, with the last line of stderr: the program failed.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-client-") as home:
        if program(name).suffix == ".mjs":  # Node looks for packages beside the program
            program_copy = str(directory / program(name).name)
            # Replaced in one step, as other processes may read the copy.
            new_copy = shutil.copy(program(name), directory / Path(home).name)
            os.replace(new_copy, program_copy)
            words = ["node", program_copy]
        else:
            words = [str(directory / "bin/python"), str(program(name))]

        process = await asyncio.create_subprocess_exec(
            *words,
            case,
            cwd=home,
            env={
                "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
                "HOME": home,
                "NO_PROXY": "127.0.0.1",
                "OPENAI_BASE_URL": endpoint.base_url,
                "OPENAI_API_KEY": endpoint.api_key,
                "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
                "ANTHROPIC_API_KEY": endpoint.api_key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks for one
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()

        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines() or ["no message"]
            error_lines = [line for line in lines if "Error" in line and not line.startswith(" ")] or lines
            raise RuntimeError(error_lines[-1].strip()[:300])

        return "".join(out.decode(errors="replace").strip().splitlines()[-1:])


# -- the table ---------------------------------------------------------------------------------------------


def row(name: str, library: Library, outcomes: Mapping[str, Outcome]) -> str:
    packages = library.packages.split()[: library.named]
    named = ", ".join(re.sub(r"(\[.*\])?(==|(?<=.)@)", " ", package) for package in packages)
    named += " (npm)" if program(name).suffix == ".mjs" else ""
    paths = ", ".join(sorted(set().union(*(outcome.paths for outcome in outcomes.values()))))
    outcome_texts = [
        f"{case}: **failed**: {outcome.text}" if outcome.failed else f"{case} {outcome.text}"
        for case, outcome in outcomes.items()
    ]
    return f"| {named} | {paths} | {'; '.join(outcome_texts) or 'not installed'} |".replace("\n", " ")


def enter_namespace() -> None:
    """Go on in a network namespace with loopback only.

    Where no namespace can be made, print a line and go on.
    """
    words = ["unshare", "--net", "--user", "--map-root-user", "sh", "-c", LOOPBACK, "sh"]
    if subprocess.run([*words, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        print(
            "cannot create a network namespace on this machine; clients can reach the network",
            file=sys.stderr,
        )
    else:
        os.execvpe(words[0], [*words, sys.executable, *sys.argv], {**os.environ, INSIDE: "1"})


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), metavar="LIBRARY")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--python312", default="python3.12", help="interpreter for libraries that need Python 3.12"
    )
    parser.add_argument("--to", type=Path, default=ROOT / ".clients")
    options = parser.parse_args()

    chosen = {name: LIBRARIES[name] for name in options.only}
    directories = {name: options.to.resolve() / name for name in chosen}
    if INSIDE not in os.environ:
        for name, library in chosen.items():
            try:
                install(name, library, directories[name], options.python312)
            except (subprocess.CalledProcessError, OSError) as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
        enter_namespace()

    logging.disable(logging.WARNING)  # silences a hundred notices of ignored parameters
    episodes.SECONDS = SECONDS
    failed = False
    print("| client | asks | cases: turns→rows |\n|---|---|---|")

    with ThreadPoolExecutor(options.jobs) as pool:
        for name, library in chosen.items():
            cases = library.cases if installed(library, directories[name]) else ()
            play = partial(run, name, library, directories[name])
            outcomes = dict(zip(cases, pool.map(play, cases), strict=True))
            failed |= not cases or any(outcome.failed for outcome in outcomes.values())
            print(row(name, library, outcomes), flush=True)

    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
