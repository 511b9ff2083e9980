"""`asyncrl tools`: to look at tools and to try them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl import cli

MINE = '''
from asyncrl.tools import tool
from asyncrl.types import Sample

@tool(retries=2)
class Diary:
    """Remembers whose it is.

    Args:
        line: what to write
    """

    def open(self, sample: Sample, owner: str = "nobody") -> None:
        self.said = f"{owner} {sample.ground_truth}"

    def call(self, line: str, times: int = 1) -> str:
        return f"{self.said}: {line * times}"

@tool
async def other() -> str:
    raise OSError("no paper")
'''


SHOP = '''
class Shop:
    def reset(self, prices):
        self.prices = prices

    def price(self, item: str) -> int:
        """Return a price."""
        return self.prices[item]

    async def close_shop(self) -> None: ...
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "mine.py").write_text(MINE)
    return path


def test_list_tells_parameters_description_and_options(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tools", "list", str(file.parent)]) == 0
    shown = capsys.readouterr().out
    assert f"diary(line: string, times?: integer)  [{file.parent}]\n    Remembers whose it is.\n" in shown
    assert "    one object per episode, retries=2, replay=reapply\n" in shown
    assert cli.main(["tools", "list", str(file)]) == 0
    assert "diary(line: string, times?: integer)" in (shown := capsys.readouterr().out) and "other(" in shown


def test_list_without_names_shows_what_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tools", "list"]) == 0
    shown = capsys.readouterr().out
    assert "calculator(a: integer, op: minus | plus | times, b: integer)" in shown
    assert "search  [creates tools; options: corpus: str, k: int = 3, " in shown
    assert 'cache: str = "", name: str = "search"' in shown


def test_call_opens_calls_and_prints(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sample is the one of training, with decoded values."""
    row = {
        "reward_model": {"ground_truth": "Pepys"},
        "extra_info": {"tools_kwargs": {"diary": {"create_kwargs": {"owner": "Mr"}}}},
    }
    (sample := file.with_suffix(".json")).write_text(json.dumps(row))
    spec = [f"{file}:Diary", '{"line": "ab", "times": 2}']
    assert cli.main(["tools", "call", *spec, "--sample", str(sample)]) == 0
    assert capsys.readouterr().out.startswith("Mr Pepys: abab\n-- diary: reply after 0.0")


def test_a_class_is_shown_and_called_by_its_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "shop.py").write_text(SHOP)
    (sample := tmp_path / "row.json").write_text('{"extra_info": {"prices": {"tea": 3}}}')
    assert cli.main(["tools", "list", f"{file}:Shop"]) == 0
    printed = capsys.readouterr().out
    assert f"price(item: string)  [{file}:Shop]\n    Return a price.\n    one object per episode" in printed
    call = ["tools", "call", f"{file}:Shop", '{"item": "tea"}', "--name=price"]
    assert cli.main([*call, f"--sample={sample}"]) == 0
    assert capsys.readouterr().out.startswith("3\n-- price: reply after 0.0")
    assert cli.main(call) == 1
    assert "reset (shop.py:3) needs 'prices'; the columns are data_source" in capsys.readouterr().out
    assert cli.main(call[:-1]) == 2
    assert "contains 2 tools; choose one with --name: close_shop, price" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["{file}:other"], 1, "error: OSError: no paper"),
        (["{file}:Diary"], 1, "missing required field `line`"),
        (["{folder}", "--name=other"], 1, "no paper"),
        (["{folder}"], 2, "contains 2 tools; choose one with --name: diary, other"),
        (["{folder}", "--name=both"], 2, "has no tool 'both'; choose one with --name: diary, other"),
        (["xyz"], 2, "unknown tool 'xyz'; available: calculator, expression_calculator, mcp"),
        (["calculater"], 2, "unknown tool 'calculater'; did you mean calculator"),
        (["{file}:Diary", "--option", "a"], 2, "write key=value"),
        (["{file}:Diary", "--option", "a=1"], 2, "takes no arguments"),
        (["{file}:Diary", "--sample={file}"], 2, "not a JSON object with a sample"),
        (["{file}:Dairy"], 2, "did you mean Diary"),
    ],
)
def test_what_goes_wrong_is_reported(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, complaint: str
) -> None:
    given = [argument.format(file=file, folder=file.parent) for argument in arguments]
    assert cli.main(["tools", "call", *given]) == code
    shown = capsys.readouterr()
    assert complaint in shown.out + shown.err


def test_options_reach_the_factory(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["tools", "call", "calculator", "--option", "latency_mean=-1", '{"a": 1, "op": "plus", "b": 2}']
    assert cli.main(call) == 2
    assert "must not be negative" in capsys.readouterr().err


HANGING = """
import subprocess, time
from asyncrl.tools.base import tool

@tool
def hang() -> str:
    "Hangs, as does what it has started."
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
    return ""
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_tool_has_started_does_not_outlive_the_command(tmp_path: Path, number: int) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    code = "import sys; from asyncrl.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "tools", "call", f"{tmp_path}/hanging.py:hang"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(10) == (-number if number == signal.SIGKILL else 128 + number)
        child.wait(10)
