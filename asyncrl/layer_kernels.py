"""Packages with kernels for layers that carry a state, which transformers calls where they are installed.

transformers binds the kernels when it imports a model's file: any version of a package, on any machine, and
drops arguments that a kernel does not take. So versions and GPUs are checked here. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

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
BINDING = re.compile(r"use_kernel_func_from_hub_with_fallback\(\s*\"\w+\",\s*\"(\w+)\"")


def installed_kernels() -> tuple[str, ...]:
    """Return the installed packages with their versions. Example: ("fla 0.6.0",)."""
    versions = ((package.module, package.installed_version) for package in KERNEL_PACKAGES)
    return tuple(f"{module} {number}" for module, number in versions if number is not None)


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
