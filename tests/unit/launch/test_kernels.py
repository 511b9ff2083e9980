"""Packages with kernels that transformers would call: which models' layers, which versions, and GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch import kernels
from asyncrl.launch.inputs import Inputs
from asyncrl.layer_kernels import kernels_of, model_file_of
from tests.fakes.checked import Given

CHUNK_RULE = (
    "def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens): ..."
)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which this process and its children import packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def install_fla(packages: Path, version: str) -> None:
    """Install a package whose kernel for the gated delta rule transformers binds. Without a version there is
    no distribution."""
    module = packages / "fla/ops/gated_delta_rule"
    module.mkdir(parents=True)
    for folder in (module, module.parent, module.parents[1]):
        (folder / "__init__.py").touch()
    (module / "__init__.py").write_text(CHUNK_RULE)

    if version:
        metadata = packages / f"fla_core-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: fla-core\nVersion: {version}\n")


def checked(given: Given, **settings: object) -> str:
    given.edit(**settings)
    (note,) = kernels.check_kernels(Inputs(given.config()))
    return note.text


@pytest.mark.parametrize(
    ("model_type", "modules"),
    [
        ("qwen3_5_text", ["fla", "causal_conv1d"]),
        ("lfm2", ["causal_conv1d"]),
        ("nemotron_h", ["causal_conv1d", "mamba_ssm"]),
        ("qwen3", []),
    ],
)
def test_kernels_are_those_that_a_model_file_names(model_type: str, modules: list[str]) -> None:
    assert [package.module for package in kernels_of(model_file_of(model_type))] == modules


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.3.2", r"fla 0\.3\.2 is installed, .* need flash-linear-attention>=0\.4\.0; run pip install"),
        ("", r"a module named fla, which has no version, can be imported, .* or pip uninstall fla-core"),
    ],
)
def test_another_version_is_refused(given: Given, packages: Path, version: str, problem: str) -> None:
    install_fla(packages, version)
    assert checked(given) == "not needed: the model has no layers that carry a state"
    with pytest.raises(ConfigError, match=f"^{problem}"):
        checked(given, model_type="qwen3_next")


@pytest.mark.slow
def test_kernels_without_a_gpu_are_refused(given: Given, packages: Path) -> None:
    install_fla(packages, "0.6.0")
    problem = (
        r"fla 0\.6\.0 is installed, .* layers of model\.path \(qwen3_5_text\), but the kernels need a GPU"
    )
    with pytest.raises(ConfigError, match=problem):
        checked(given, model_type="qwen3_5", text_config={"model_type": "qwen3_5_text"})


@pytest.mark.full
def test_kernels_that_cannot_be_imported_do_no_harm(given: Given, packages: Path) -> None:
    install_fla(packages, "0.6.0")
    (packages / "fla/ops/gated_delta_rule/__init__.py").write_text("import a_compiler_that_is_missing")
    listed = "fla 0.6.0, causal_conv1d not installed"
    assert checked(given, model_type="qwen3_next").startswith(
        f"packages for layers that carry a state: {listed}"
    )


def test_a_critic_with_a_model_of_its_own_is_checked(given: Given, packages: Path, tmp_path: Path) -> None:
    install_fla(packages, "0.3.2")
    critic = tmp_path / "critic"
    critic.mkdir()
    (critic / "config.json").write_text('{"model_type": "qwen3_next"}')

    given.keys |= {
        "algorithm.advantage": "gae",
        "buffer.filter_zero_variance": False,
        "critic.path": str(critic),
    }
    with pytest.raises(ConfigError, match=r"for layers of critic\.path \(qwen3_next\)"):
        checked(given)
