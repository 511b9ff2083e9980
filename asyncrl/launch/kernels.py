"""Checks the packages with kernels that transformers would call for the layers of a model: their versions,
and whether there is a GPU for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.estimates import sees_gpu, uses_gpu
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import Note, ok, preflight_check
from asyncrl.layer_kernels import KernelPackage, kernels_of, model_file_of
from asyncrl.trainer.footprint import needs_critic
from asyncrl.weights.model_files import read_json

PROBE_SECONDS = 60.0  # enough for a busy machine with a cold disk
# Program that prints the packages whose kernels a module of transformers calls, one in a line.
BOUND_PROBE = """
import sys
from importlib import import_module
from asyncrl.layer_kernels import kernel_binding
for function in vars(import_module(sys.argv[1])).values():
    cells = kernel_binding(function)
    if cells and cells["is_new_implementation"].cell_contents:
        print(cells["package"].cell_contents)
"""


@preflight_check("kernels", requires=("model",))
def check_kernels(inputs: Inputs) -> Iterator[Note]:
    """Check that installed kernels for the models' layers are of a supported version and have a GPU. Kernels
    that transformers does not bind, since they cannot be imported, do no harm without a GPU."""
    packages = dict[str, str]()
    for key, path in trained_models(inputs.config):
        for package, model_file, model_type in called_packages(path):
            packages[package.module] = package.installed_version or "not installed"
            check_package(package, model_file, f"{key} ({model_type})", inputs.config)

    if not packages:
        yield ok("not needed: the model has no layers that carry a state")
        return
    listed = ", ".join(f"{module} {version}" for module, version in packages.items())
    yield ok(f"packages for layers that carry a state: {listed} (torch computes everything else)")


def trained_models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the models that trainer ranks compute: the key and the directory."""
    yield "model.path", config.model.path
    if config.kl.reference:
        yield "kl.reference", config.kl.reference
    if needs_critic(config) and config.critic.path:
        yield "critic.path", config.critic.path


def called_packages(model_path: str) -> Iterator[tuple[KernelPackage, str, str]]:
    """Yield each package that transformers calls for this model where it is installed, the module of
    transformers that does so, and the type of the model's text part."""
    settings = read_json(Path(model_path) / "config.json")
    text_settings = settings.get("text_config") or settings
    model_type = str(text_settings.get("model_type") or settings.get("model_type", ""))
    if model_file := model_file_of(model_type):
        for package in kernels_of(model_file):
            yield package, model_file, model_type


def check_package(package: KernelPackage, model_file: str, model_name: str, config: RunConfig) -> None:
    """Raise ConfigError if transformers would call kernels of this package that are too old, or that need a
    GPU which the run does not use."""
    installed_version = package.installed_version
    if installed_version is None:
        return

    name = f"{package.module} {installed_version}".strip()
    removal = f"pip uninstall {' '.join(package.distributions)}"
    calls = f"and transformers would use its kernels for layers of {model_name}"
    if not package.is_supported:
        described = (
            f"{name} is installed"
            if installed_version
            else f"a module named {name}, which has no version, can be imported"
        )
        supported = f"{package.distributions[-1]}>={package.oldest_version}"
        raise ConfigError(
            f"{described}, {calls}, but the kernels need {supported}; run pip install '{supported}' (with a "
            f"GPU), or {removal}"
        )

    has_gpu = uses_gpu(config, sees_gpu(config))
    if has_gpu is False and package.module in bound_packages(model_file):
        raise ConfigError(
            f"{name} is installed, {calls}, but the kernels need a GPU, which this run does not use; run "
            f"{removal}, and torch will compute these layers"
        )


def bound_packages(model_file: str) -> set[str]:
    """Return the packages whose kernels a module of transformers calls, found by importing the module in a
    child process; empty if it cannot be imported."""
    command = [sys.executable, "-c", BOUND_PROBE, model_file]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return set()
    return set(completed.stdout.split())
