"""`tools/fetch_harnesses.py --update` pins a version that passes its tests, and no other one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.scripts import script

ROOT = Path(__file__).resolve().parents[2]
NPM = r"""#!/bin/sh
# npm, as far as it is asked: `npm view PACKAGE version`, `npm pack --silent PACKAGE@VERSION-linux-x64`
if [ "$1" = view ]; then echo 9.9.9; exit; fi
program=package/vendor/x86_64-unknown-linux-musl/bin/codex
mkdir -p "$(dirname $program)"
printf '{"version": "9.9.9"}' > package/package.json
cat > $program <<END
#!/bin/sh
[ "\$1" = --version ] && echo 9.9.9 && exit
exec $PYTHON - <<PY
import os, re, urllib.request
url = re.search('base_url = "(.*)"', open(os.path.expanduser("~/.codex/config.toml")).read())[1]
urllib.request.urlopen(url + "/responses", b"{}")
PY
END
chmod +x $program
tar czf codex.tgz package && echo codex.tgz
"""
tool = script("fetch_harnesses")
MEASURED = f"| measured with Codex {tool.PACKAGES['codex'].version} | 7 ms |"
ENDED = "import os, signal\n    os.kill(os.getppid(), signal.SIGTERM)\n    signal.pause()"


@pytest.mark.full
@pytest.mark.parametrize("passes", [True, False, None], ids=["passes", "fails", "ended"])
def test_a_pin_moves_to_a_version_that_passes_its_tests(tmp_path: Path, passes: bool | None) -> None:
    """In a copy of the repository, with an npm that packs a program of ours, and tests of ours."""
    for part in ("asyncrl", "tools", "configs"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in tool.PINNED_IN:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for path in (
        "integration/test_harnesses.py",
        "integration/test_abandoned.py",
        "unit/conversation/test_real_tokenizers.py",
    ):
        file = tmp_path / "tests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        body = ENDED if passes is None else f"assert {passes}"
        file.write_text(f"def test_codex():\n    {body}\n")
    with (tmp_path / "docs/dev/agents.md").open("a") as page:
        page.write(f"\n{MEASURED}\n")
    for name, text in (("codex/old", "old"), ("requests/codex.jsonl", "old")):
        (tmp_path / ".harnesses" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".harnesses" / name).write_text(text)
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(NPM)
    npm.chmod(0o755)
    before = {path: (tmp_path / path).read_text() for path in tool.PINNED_IN}

    variables = {
        **os.environ,
        "PATH": f"{npm.parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path),
    }
    words = [sys.executable, "tools/fetch_harnesses.py", "--update", "codex"]
    ran = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)

    after = {path: (tmp_path / path).read_text() for path in tool.PINNED_IN}
    assert ran.returncode == (0 if passes else 1), ran.stdout + ran.stderr
    if passes:
        assert all(text.count("9.9.9") == 1 for text in after.values())
        assert MEASURED in after["docs/dev/agents.md"]
        assert (
            (tmp_path / ".harnesses/requests/codex.jsonl").read_text().startswith('{"path": "/v1/responses"')
        )
        assert not (tmp_path / ".harnesses/codex/old").exists()
    else:
        why = "stopped by SIGTERM" if passes is None else "codex 9.9.9 does not pass the tests above"
        assert after == before and why in ran.stderr
        assert (tmp_path / ".harnesses/codex/old").read_text() == "old"
        assert (tmp_path / ".harnesses/requests/codex.jsonl").read_text() == "old"


@pytest.mark.parametrize("version", ["latest", "v1.2.3", "1", "1.2.3-beta.1"])
def test_a_version_that_is_a_word_is_not_pinned(version: str) -> None:
    with pytest.raises(SystemExit, match=f"codex={version}: give a version such as "):
        tool.move_pin("npm", "codex", version)
