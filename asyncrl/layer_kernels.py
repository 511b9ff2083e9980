"""Packages with kernels for layers that carry a state, which transformers calls where they are installed.

transformers binds the kernels when it imports a model's file: any version of a package, on any machine, and
drops arguments that a kernel does not take. So versions and GPUs are checked here. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from importlib.metadata import PackageNotFoundError, version
from types import CellType
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version


class KernelPackage(NamedTuple):
    """A package. `module`: the name that transformers imports. `distributions`: names on an index, that of
    the functions first. `oldest_version`: the first one whose functions take what transformers passes."""

    module: str
    distributions: tuple[str, ...]
    oldest_version: str

    @property
    def installed_version(self) -> str | None:
        """The version that is installed; '' if the module has none, None if there is no such module."""
        if importlib.util.find_spec(self.module) is None:
            return None
        for distribution in self.distributions:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
        return ""

    @property
    def is_supported(self) -> bool:
        """Whether the installed version is one that is supported."""
        try:
            return Version(self.installed_version or "") >= Version(self.oldest_version)
        except InvalidVersion:
            return False


KERNEL_PACKAGES = (
    KernelPackage("fla", ("fla-core", "flash-linear-attention"), "0.4.0"),
    KernelPackage("causal_conv1d", ("causal-conv1d",), "1.2.0"),
    KernelPackage("mamba_ssm", ("mamba-ssm",), "2.0.4"),
)
# Wraps functions of transformers, and can replace them by kernels of the hub.
HUB_PACKAGE = KernelPackage("kernels", ("kernels",), "0")
BINDING = re.compile(r"use_kernel_func_from_hub_with_fallback\(\s*\"\w+\",\s*\"(\w+)\"")


def installed_kernels() -> tuple[str, ...]:
    """Return the installed packages with their versions. Example: ("fla 0.6.0",)."""
    packages = (*KERNEL_PACKAGES, HUB_PACKAGE)
    versions = ((package.module, package.installed_version) for package in packages)
    return tuple(f"{module} {number}" for module, number in versions if number is not None)


def kernel_binding(function: Any) -> dict[str, CellType]:
    """Return the variables of transformers' wrapper around a function of a layer; empty if there is none.
    `is_new_implementation`: a kernel of `package` is bound, which takes `applicable_params`.

    Other wrappers may lie around that one: functions, and modules of the package `kernels`.
    """
    while function is not None:
        wrapper = function if inspect.isfunction(function) else getattr(type(function), "forward", None)
        if not inspect.isfunction(wrapper):
            return {}
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        if "is_new_implementation" in cells:
            return cells
        inner_function = cells["func"].cell_contents if wrapper is not function and "func" in cells else None
        function = inner_function or getattr(function, "__wrapped__", None)
    return {}


def model_file_of(model_type: str) -> str:
    """Return the module of transformers with the layers of a type of model; '' if transformers has none."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    module_name = model_type_to_module_name(model_type).removesuffix("_text")
    model_file = f"transformers.models.{module_name}.modeling_{module_name}"
    try:
        return model_file if importlib.util.find_spec(model_file) else ""
    except ModuleNotFoundError:
        return ""


def kernels_of(model_file: str) -> list[KernelPackage]:
    """Return the packages that a module of transformers calls where they are installed. The module is not
    imported."""
    specification = importlib.util.find_spec(model_file)
    if specification is None or specification.loader is None:
        return []
    source = specification.loader.get_source(model_file)  # type: ignore[attr-defined]
    called_modules = set(BINDING.findall(source or ""))
    return [package for package in KERNEL_PACKAGES if package.module in called_modules]
