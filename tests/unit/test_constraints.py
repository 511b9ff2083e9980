"""A GPU machine, where asyncrl shares an environment with SGLang, has the versions that the gate tests, but
for what SGLang decides."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SGLANG = [
    found
    for folder in ROOT.glob(".venv-sglang/lib/python3*/site-packages")
    for found in distributions(name="sglang", path=[str(folder)])
]
# What SGLang 0.5.23 and its packages decide: their metadata has one version, or an upper limit below ours.
SGLANG_DECIDES = {
    "huggingface-hub",  # tokenizers 0.23.2: < 2
    "numpy",  # mistral-common: < 2.4
    "openai",
    "openai-harmony",
    "python-dateutil",  # < 3
    "tokenizers",
    "torch",
}


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    versions_by_package = dict(line.split("==") for line in lines)
    assert len(versions_by_package) == len(lines), f"{name}: a package is named twice"
    return versions_by_package


def test_the_gpu_machine_has_the_tested_versions_of_what_sglang_does_not_decide() -> None:
    ours = pins("constraints.txt")
    theirs = pins("constraints-sglang.txt")
    assert {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]} == SGLANG_DECIDES


@pytest.mark.skipif(not SGLANG, reason="no SGLang 0.5.23: make sglang-cpu")
def test_what_sglang_asks_for_is_pinned_to_a_version_that_it_takes() -> None:
    theirs = pins("constraints-sglang.txt")
    requirements = [Requirement(text) for text in SGLANG[0].requires or []]
    requirements = [
        each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    assert len(requirements) > 50
    wrong = {
        str(each)
        for each in requirements
        if theirs.get(canonicalize_name(each.name), "0") not in each.specifier
    }
    assert not wrong
    assert theirs["sglang"] == SGLANG[0].version
