"""The tools and the reward that use the sandbox, through the ways a run uses them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.isolation.sandbox.base import RunEnding, RunResult, SandboxError, SandboxLimits
from asyncrl.isolation.sandbox.detection import Isolation, check_isolation, detect_isolation
from asyncrl.rewards.code import Code, cases_of, last_block, read_code_truth, same_text, same_value
from asyncrl.rewards.loading import load_rewards
from asyncrl.tools import Toolbox, ToolError, load_tools
from asyncrl.tools.base import MAX_REPLY_BYTES
from asyncrl.tools.python import Workspace, reply_text
from asyncrl.types import Sample, ToolCall

SAMPLE = Sample(0, "test", (), "0")


def talk(tool: str, *calls: tuple[str, str], sample: Sample = SAMPLE, **options: Any) -> list[str]:
    """Replies to (name, the one argument) in one episode."""

    async def main() -> list[str]:
        box = Toolbox(load_tools([tool], {tool: {"require": "", **options}}))
        session = box.session(sample)
        keys = {"python": "code", "shell": "command"}
        try:
            await session.open()
            replies = [await session.call(ToolCall(n, json.dumps({keys[n]: text}))) for n, text in calls]
        finally:
            await session.close()
        return [reply.content for reply in replies]

    return asyncio.run(main())


def test_python_keeps_its_variables_for_an_episode() -> None:
    code = ["import math\nx = math.factorial(5)", "x + 1", "print(x)", "y"]
    nothing, value, printed, missing = talk("python", *(("python", c) for c in code))
    assert (nothing, value, printed) == ("[no output]", "121", "120")
    assert missing.endswith("NameError: name 'y' is not defined")
    assert "NameError" in talk("python", ("python", "x"))[0]  # another episode


def test_the_reply_says_how_a_run_ended_and_what_was_lost() -> None:
    slow, ended = talk(
        "python", ("python", "while True: pass"), ("python", "import os; os._exit(1)"), seconds=0.3
    )
    assert slow.endswith("KeyboardInterrupt\n[stopped after 0.3 s]")
    assert ended == "[the interpreter exited]\n[the variables from earlier calls are lost]"
    killed = RunResult(RunEnding.LATE, "a\n", status=-9, lost=True, emptied=True)
    lost = "[the variables and files from earlier calls are lost]"
    assert reply_text(killed, 5.0) == f"a\n[stopped after 5 s]\n{lost}"
    died = RunResult(RunEnding.DIED, "", status=-11)
    assert reply_text(died, 5.0) == "[the interpreter was killed by signal 11]"


def test_long_output_is_cut_once() -> None:
    (reply,) = talk("python", ("python", "print('x' * 10**6)"))
    assert len(reply) < MAX_REPLY_BYTES and reply.count("bytes left out") == 1 and "[...]" not in reply


def test_a_shell_tells_its_status() -> None:
    assert talk("shell", ("shell", "echo a; exit 3"), ("shell", "true")) == [
        "a\n[exit status 3]",
        "[no output]",
    ]


def test_a_workspace_has_one_directory() -> None:
    calls = ("shell", "echo 41 > n"), ("python", "int(open('n').read()) + 1")
    assert talk("workspace", *calls) == ["[no output]", "42"]


def test_a_sample_may_bring_a_setup() -> None:
    extra = {"tools_kwargs": {"python": {"create_kwargs": {"setup": "data = [1, 2, 3]"}}}}
    sample = Sample(0, "test", (), "0", extra_info_json=json.dumps(extra))
    assert talk("python", ("python", "sum(data)"), sample=sample) == ["6"]
    extra["tools_kwargs"]["python"]["create_kwargs"]["setup"] = "data ="
    with pytest.raises(ToolError, match="setup code for sample 0 failed"):
        talk("python", sample=Sample(0, "test", (), "0", extra_info_json=json.dumps(extra)))


def test_a_setup_runs_again_after_a_loss() -> None:
    extra = {"tools_kwargs": {"python": {"create_kwargs": {"setup": "data = [1, 2, 3]"}}}}
    sample = Sample(0, "test", (), "0", extra_info_json=json.dumps(extra))
    ended, again = talk(
        "python", ("python", "import os; os._exit(1)"), ("python", "sum(data)"), sample=sample
    )
    assert ended.endswith("[the variables from earlier calls are lost]") and again == "6"


@pytest.mark.parametrize("setup", ["", "data = [1, 2, 3]"])
async def test_the_call_after_a_cancelled_one_reports_it_and_has_its_setup(setup: str) -> None:
    space = Workspace(SandboxLimits(), frozenset(), 60.0)
    await space.open(SAMPLE, setup)
    try:
        await space.python("n = 7")
        began = asyncio.Event()
        send_request = space._sandbox._send_request
        space._sandbox._send_request = lambda *given: (began.set(), send_request(*given))[1]  # type: ignore
        task = asyncio.create_task(space.python("while True: pass"))
        await asyncio.wait_for(began.wait(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        after = await space.python("'n' in globals(), globals().get('data')")
        data = "[1, 2, 3]" if setup else "None"
        assert after == f"(False, {data})\n[the variables and files from earlier calls are lost]"
        assert await space.python("1") == "1"
    finally:
        await space.close()


async def test_a_loss_is_reported_even_if_the_setup_fails_first() -> None:
    flaky = "import os\nassert not os.path.exists('broken')"
    space = Workspace(SandboxLimits(), frozenset(), 5.0)
    await space.open(SAMPLE, flaky)
    try:
        # a loss that the next cell reports
        space._sandbox.losses = 1
        space._sandbox._emptied = True
        space._setup_code = "1 / 0"
        with pytest.raises(SandboxError, match="setup code for sample 0 failed"):  # no answer of the tool's
            await space.python("1")
        space._setup_code = flaky
        assert await space.python("2") == "2\n[the variables and files from earlier calls are lost]"
        assert await space.python("3") == "3"
    finally:
        await space.close()


def test_schemas() -> None:
    tools_by_name = load_tools(["workspace"], {"workspace": {"require": ""}})
    body = tools_by_name["python"].schema["function"]
    assert body["parameters"]["properties"] == {"code": {"type": "string", "description": "The code to run."}}
    assert tools_by_name["shell"].schema["function"]["parameters"]["required"] == ["command"]


def test_requirements_are_checked_when_tools_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="require contains the unknown word 'wings'; choose from: network files"
    ):
        load_tools(["python"], {"python": {"require": "network wings"}})
    poor = Isolation(frozenset({"files"}), "[Errno 1] Operation not permitted")
    monkeypatch.setattr("asyncrl.isolation.sandbox.detection.detect_isolation", lambda: poor)
    with pytest.raises(
        ConfigError, match=r"tool 'python': this machine does not let .* network.*require less"
    ):
        load_tools(["python"], {"python": {"require": "network, files"}})
    assert check_isolation("files") == {"files"}


def test_abilities_are_looked_up_once() -> None:
    assert detect_isolation() is detect_isolation()


# The reward

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
PAIRS = {"inputs": ["1 2\n", "3 4\n", "5 5"], "outputs": ["3\n", "7\n", "10"]}


def judged(answer: str, truth: Any, **options: Any) -> tuple[float, float, float]:
    found = asyncio.run(Code(require="", **options)("test", answer, truth))
    return found["score"], found["components"]["passed"], found["components"]["tests"]


def fenced(code: str) -> str:
    return f"It is so:\n```python\n{code}\n```\nDone."


TWICE = {"inputs": [[2], [3]], "outputs": [4, [6]], "fn_name": "twice"}
LINES = {"inputs": ['[1]\n"x"'], "outputs": ['[[1], "x"]'], "fn_name": "f"}
SUM = "print(sum(map(int, input().split())))"


ANSWERS: list[tuple[str, Any, float]] = [
    (ADD, PAIRS, 1.0),
    (ADD, json.dumps(PAIRS), 1.0),
    ("a, b = ...", PAIRS, 0.0),
    (fenced("print(3)"), PAIRS, 0.0),
    (fenced(f"import sys\nprint('7', file=sys.stderr)\n{SUM}\nexit()"), PAIRS, 1.0),
    (fenced(f"def main():\n    {SUM}\nif __name__ == '__main__': main()"), PAIRS, 1.0),
    (fenced("def twice(n): return n * 2"), TWICE, 1.0),
    (fenced("class Solution:\n    def twice(self, n): print('noise'); return n + n"), TWICE, 1.0),
    (fenced("def twice(n): return str(n * 2)"), TWICE, 0.0),
    (fenced("def other(n): return n * 2"), TWICE, 0.0),
    (fenced("def f(a, b): return (a, b)"), LINES, 1.0),
    (fenced("def f(x): return x + 1"), {"tests": "assert f(1) == 2"}, 1.0),
    (fenced("def f(x): return x"), {"tests": "assert f(1) == 2"}, 0.0),
    (fenced("import os\ndef f(x): os._exit(0)"), {"tests": "assert f(1) == 2"}, 0.0),
    (fenced("raise SystemExit(0)"), {"tests": "assert False"}, 0.0),
    (fenced("import sys\nsys.exit(0)"), TWICE, 0.0),
    (fenced("print('{}'.format(1))\nx = {'a': '\\n'}"), {"tests": ["assert x['a'] == '\\n'", "x"]}, 1.0),
]  # fmt: skip


def test_answers_are_judged() -> None:
    async def main() -> list[dict[str, Any]]:
        code = Code(require="")
        return await asyncio.gather(*(code("test", answer, truth) for answer, truth, _ in ANSWERS))

    for found, (answer, _, score) in zip(asyncio.run(main()), ANSWERS, strict=True):
        assert found["score"] == score, answer
    assert judged(fenced("while True: pass"), TWICE, seconds=0.3)[0] == 0.0


def test_shares_and_counts() -> None:
    half = fenced("n = sum(map(int, input().split()))\nprint(n if n < 8 else 0)")
    assert judged(half, PAIRS) == (0.0, 2, 3)
    assert judged(half, PAIRS, partial=True) == (2 / 3, 2, 3)
    assert judged(half, PAIRS, max_tests=2) == (1.0, 2, 2)
    assert judged("no code", PAIRS, partial=True) == (0.0, 0, 3)


def test_all_tests_together_have_a_deadline() -> None:
    slow = fenced("import time\nn = input()\ntime.sleep(0.2)\nprint(n)")
    many = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    _, passed, tests = judged(slow, many, partial=True, total_seconds=0.5)
    assert passed <= 2 and tests == 50


NEST = "import sys\nsys.setrecursionlimit(10**6)\ndef f():\n    x = []\n    for _ in range(5000): x = [x]\n"


HOSTILE: list[tuple[str, Any]] = [
    ("def f(): return 10**400", 3.5),
    ("def f(): return 10**4000", 1),
    (NEST + "    return x", [[]]),
    ("import os\ndef f(): return 1\nimport json\njson.dumps = lambda *a, **k: '1' * 9000", 1),
    ("import json\njson.dumps = lambda *a, **k: '[' * 10**6\ndef f(): return 1", 1),
]


def test_no_answer_makes_its_reward_fail() -> None:
    for answer, expected in HOSTILE:
        assert judged(fenced(answer), {"inputs": [[]], "outputs": [expected], "fn_name": "f"})[0] == 0.0


def test_a_result_that_is_too_long_is_not_parsed() -> None:
    (case,) = cases_of(read_code_truth({"inputs": [[]], "outputs": [[1, 2]], "fn_name": "f"}), "")
    match = re.search(r"[0-9a-f]{32}", case.source)
    assert match and case.is_right(f"noise\n{match[0]}[1, 2]\n")
    assert not case.is_right(f"\n{match[0]}[1, 2{' ' * 9999}]\n")
    assert not case.is_right("[1, 2]")


def test_a_test_finds_nothing_of_the_one_before() -> None:
    once = "import os\nos.mkdir('d')\nprint(input())"
    assert judged(fenced(once), {"inputs": ["1", "2"], "outputs": ["1", "2"]})[0] == 1.0


async def test_answers_wait_for_a_sandbox() -> None:
    (code_reward,) = load_rewards({"code": {"require": ""}})
    assert code_reward.own_deadline  # the EpisodeReward's is later
    code = Code(require="", at_once=1)
    async with code._sandbox_slots:
        waits = asyncio.ensure_future(code("test", ADD, PAIRS))
        await asyncio.sleep(0)
        assert not waits.done()
    assert (await waits)["components"]["tests"] == 3


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        ("{}", "contains no tests"),
        ({"inputs": ["1"], "outputs": []}, r"differ in length \(1 and 0\)"),
        ([1], "contains no tests"),
        ("nonsense", "Expecting value"),
    ],
)
def test_a_ground_truth_without_tests_is_an_error(truth: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_code_truth(truth)


def test_it_is_a_reward_of_the_config() -> None:
    (code_reward,) = load_rewards({"code": {"partial": True, "require": "", "weight": 2.0}})
    assert (code_reward.location, code_reward.weight) == ("loop", 2.0)
    with pytest.raises(ConfigError, match="seconds"):
        load_rewards({"code": {"seconds": -1, "require": ""}})


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("none", None),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```Python3\nunclosed", "unclosed"),
    ],
)
def test_last_block(text: str, block: str | None) -> None:
    assert last_block(text) == block


@given(st.lists(st.sampled_from(["`", "```", "\n", "py", "sh", "a b"]), max_size=30).map("".join))
def test_last_block_is_what_its_grammar_says(text: str) -> None:
    blocks = re.findall(r"```([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    python_blocks = [code for language, code in blocks if language in ("", "py")]
    assert last_block(text) == (python_blocks[-1] if python_blocks else None)


@pytest.mark.parametrize("unit", ["`", "```a", "```\n", "```sh\n", "a"])
def test_last_block_is_linear(unit: str) -> None:
    text = "```" + unit * 100_000
    started = time.process_time()
    last_block(text)
    assert time.process_time() - started < 5.0  # it takes 20 ms; squared 20 s and more


@pytest.mark.parametrize(
    ("answer_text", "wanted", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333334", True),
        ("0.34", "0.33", False),
        ("1000001", "1000000", False),
        ("3.0", "3", True),
        ("nan.", "x.", False),
        ("0.33333333333333331 " * 3, "0.3333333 " * 3, True),
        ("1" + " " * 9999 + "2", "1 2", False),
        ("\n" * 9999 + "1 2", "1 2", True),
        ("", "", True),
    ],
)
def test_same_text(answer_text: str, wanted: str, same: bool) -> None:
    assert same_text(answer_text, wanted) is same


@pytest.mark.parametrize(
    ("answer_value", "wanted", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        ([1, 2], [[1, 2]], True),
        ([0.1 + 0.2], [0.3], True),
        ({"a": 1}, {"a": 2}, False),
        ("1", 1, False),
        (None, [None], True),
    ],
)
def test_same_value(answer_value: Any, wanted: Any, same: bool) -> None:
    assert same_value(answer_value, wanted) is same
