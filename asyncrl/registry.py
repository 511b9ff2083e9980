"""A small registry for everything a user can name in the config."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from asyncrl.errors import ConfigError, describe, one_line, users_code

T = TypeVar("T")
INSIDE_RUN = "ASYNCRL_INSIDE_RUN"
"""Environment variable that is set in the processes of a run."""
_is_loading = ContextVar("is_loading", default=False)  # whether a file or module of a user is being imported
# Packages that asyncrl imports, directly or indirectly.
IMPORTED_PACKAGES = frozenset({
    *("accelerate", "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated_types", "anthropic", "antlr4"),
    *("anyio", "attr", "attrs", "bm25s", "certifi", "cffi", "charset_normalizer", "click", "cloudpickle"),
    *("colorama", "cryptography", "datasets", "dateutil", "dill", "distro", "docstring_parser", "filelock"),
    *("frozenlist", "fsspec", "google", "grpc", "gymnasium", "h11", "httpcore", "httpcore2", "httpx"),
    *("httpx2", "huggingface_hub", "hydra", "idna", "importlib_metadata", "IPython", "jinja2", "jiter"),
    *("jsonschema", "jsonschema_specifications", "latex2sympy2_extended", "markupsafe", "math_verify", "mcp"),
    *("mcp_types", "mpmath", "msgpack", "msgspec", "multidict", "multiprocess", "networkx", "numpy"),
    *("omegaconf", "openai", "opentelemetry", "packaging", "pandas", "PIL", "propcache", "psutil"),
    *("pyarrow", "pydantic", "pydantic_core", "pydantic_settings", "pygments", "python_multipart", "pytz"),
    *("ray", "reasoning_gym", "referencing", "regex", "requests", "rich", "rpds", "safetensors", "scipy"),
    *("setuptools", "sglang", "six", "sniffio", "sse_starlette", "starlette", "swanlab", "sympy"),
    *("tenacity", "tensorboard", "tokenizers", "torch", "torchgen", "tqdm", "transformers", "triton"),
    *("truststore", "typer", "typing_extensions", "typing_inspection", "urllib3", "uvicorn", "verifiers"),
    *("wandb", "wcwidth", "websockets", "xxhash", "yaml", "yarl", "zipp", "zmq", "zstandard"),
})  # fmt: skip
F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """How a plugin is called, and the usage that errors show to the user. The plugin takes the parameters
    `given`, by position or `by_name`; `awaited`: the plugin must be async. `makes`: calling a class makes the
    wanted object; otherwise an instance of the class is called."""

    usage: str
    given: Sequence[str] = ()
    awaited: bool = False
    by_name: bool = False
    makes: bool = False


class Registry(Generic[T]):
    """Maps names to objects of a kind. The error for an unknown name lists the nearest known names.

    An installed package adds to the registry of kind `loss` by an entry point in the group `asyncrl.loss`.
    `entry`: the type of the entries, which decorators make; objects loaded by file or module must have this
    type. `former`: a removed name → the replacement to write. `modules`: a name → the module that registers
    the name, imported when the name is asked for: these modules are slow to import.
    """

    def __init__(
        self,
        kind: str,
        entry: type[T] | None = None,
        former: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self._entry = entry
        self._former = former or {}
        self._modules = modules or {}
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an object. Registering another object under a taken name is an
        error."""

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name")
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry. ConfigError with the nearest names for an unknown name."""
        if name in self._modules:
            importlib.import_module(self._modules[name])
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(f"unknown {self.kind} {name!r}; {self._nearest_names(name)}") from None

    def load(self, plugin: str | Mapping[str, Any], where: str = "") -> T:
        """Return the object of a registered name, an entry point, `module:attribute` or
        `path/to/file.py:attribute`, possibly with options, which are not bound here. ConfigError begins with
        `where`, the plugin's key."""
        try:
            return self._load(name_and_options(plugin)[0])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") if where else error from None

    def make(self, plugin: str | Mapping[str, Any], where: str, call: Call) -> T:
        """Return the plugin with the options bound, as the function `make` does."""
        spec, options = name_and_options(plugin, where)
        plugin_object: T = make_plugin(self.load(spec, where), options, f"{where}.{spec}", call)
        return plugin_object

    def _load(self, spec: str) -> T:
        if spec in self:
            return self.get(spec)
        if ":" in spec:
            return self._load_checked(spec)

        for point in self._entry_points():
            if point.name == spec:
                return self._load_checked(point.value)

        return self.get(spec)

    def names(self) -> list[str]:
        return sorted({*self._entries, *self._modules})

    def all_names(self) -> list[str]:
        """Return all names, including names of installed packages."""
        return sorted({*self.names(), *self._entry_points().names})

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load_checked(self, spec: str) -> T:
        loaded: T = load_object(spec, self.kind)
        if self._entry is not None and not isinstance(loaded, self._entry):
            raise ConfigError(
                f"{self.kind} {spec!r} is of type {type(loaded).__name__}; decorate its function with "
                f'@{self.kind}("name")'
            )
        return loaded

    def _entry_points(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=f"asyncrl.{self.kind}")

    def _nearest_names(self, name: str) -> str:
        if name in self._former:
            return f"write {self._former[name]} instead"
        if name.endswith(".py"):
            return f"add the name of the object in the file: {name}:NAME"

        known_names = self.all_names()
        nearest = difflib.get_close_matches(name, known_names, n=3, cutoff=0.4)
        return (
            f"did you mean {', '.join(nearest)}?"
            if nearest
            else f"available: {', '.join(known_names) or 'none'}"
        )


def name_and_options(
    plugin: str | Mapping[str, Mapping[str, Any]], where: str = ""
) -> tuple[str, Mapping[str, Any]]:
    """Return name and options of a key that takes a name or `{name: {options}}`. ConfigError for no name or
    several names, beginning with `where`."""
    if isinstance(plugin, str):
        return plugin, {}

    if len(plugin) != 1:
        names = ", ".join(plugin) or "none"
        problem = f"expected one name with its options, not {len(plugin)} ({names})"
        raise ConfigError(f"{where}: {problem}" if where else problem)

    ((name, options),) = plugin.items()
    return name, options


def bind_options(function: F, options: Mapping[str, Any], where: str, may_miss: bool = False) -> F:
    """Return the function with keyword-only parameters set from `options`, converted to the annotated types.
    `may_miss`: a parameter without a default and without an option stays unset.

    Raises ConfigError that begins with `where`, the key of the options: an unknown option (the error lists
    the known options), a missing option, or a value of a wrong type or out of bounds.
    """
    parameters = _keyword_only(function, where)
    if unknown_options := sorted(options.keys() - {parameter.name for parameter in parameters}):
        names = ", ".join(parameter.name for parameter in parameters) or "none"
        raise ConfigError(f"{where}: unknown option {unknown_options[0]!r}; options: {names}")

    if may_miss:
        parameters = [
            parameter
            for parameter in parameters
            if parameter.default is not parameter.empty or parameter.name in options
        ]

    annotations = [
        Any if parameter.annotation is parameter.empty else parameter.annotation for parameter in parameters
    ]
    defaults = [
        (parameter.default,) if parameter.default is not parameter.empty else () for parameter in parameters
    ]
    fields = [
        (parameter.name, kind, *default)
        for parameter, kind, default in zip(parameters, annotations, defaults, strict=True)
    ]
    struct = msgspec.defstruct("Options", fields, kw_only=True, frozen=True)  # type: ignore[arg-type]
    if missing_options := [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name not in options
    ]:
        raise ConfigError(
            f"{where}: option {missing_options[0]!r} is missing; set {where}.{missing_options[0]}"
        )

    try:
        bound_options = msgspec.convert(dict(options), struct, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_option_error(str(error), options, parameters, where)) from None

    return functools.partial(function, **msgspec.structs.asdict(bound_options))  # type: ignore[return-value]


def _keyword_only(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """Return the keyword-only parameters with evaluated annotations. Annotations of further parameters may
    name imports that exist only for type checkers."""
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    try:
        with users_code():
            parameters = inspect.signature(function).parameters.values()
            keyword_parameters = [parameter for parameter in parameters if parameter.kind is keyword_only]
            function_globals = getattr(inspect.unwrap(function), "__globals__", None)
            if function_globals is not None:
                for index, parameter in enumerate(keyword_parameters):
                    if isinstance(parameter.annotation, str):
                        annotation = eval(parameter.annotation, function_globals)
                        keyword_parameters[index] = parameter.replace(annotation=annotation)
            elif any(isinstance(parameter.annotation, str) for parameter in keyword_parameters):
                parameters = inspect.signature(function, eval_str=True).parameters.values()
                keyword_parameters = [parameter for parameter in parameters if parameter.kind is keyword_only]
    except Exception as error:  # an annotation raised, or a builtin has no signature
        raise ConfigError(f"{where}: no usable signature ({one_line(error)})") from error

    return keyword_parameters


def make_plugin(loaded: Any, options: Mapping[str, Any], where: str, call: Call) -> Any:
    """Bind the plugin and check that `call` fits. ConfigError that begins with `where` if it does not."""
    plugin_object = bind_plugin(loaded, options, where, call)
    check_call(plugin_object, where, call)
    return plugin_object


def bind_plugin(
    loaded: Any, options: Mapping[str, Any], where: str, call: Call, may_miss: bool = False
) -> Any:
    """Return a function with the options bound, or an instance of a class made with the options. Raises
    ConfigError that begins with `where`. The arguments of a call are not checked. `may_miss`: see
    `bind_options`."""
    if not callable(loaded):
        raise ConfigError(f"{where} is not a function; write {call.usage}")

    plugin_object = bind_options(loaded, options, where, may_miss)
    if isinstance(loaded, type) and not call.makes:
        plugin_object = make_by_factory(plugin_object, where)
        if not callable(plugin_object):
            raise ConfigError(f"{where}: instances of this class cannot be called; write {call.usage}")

    return plugin_object


def make_by_factory(factory: Callable[[], Any], where: str) -> Any:
    """Return the object that a factory makes. Any error of the factory becomes a ConfigError that begins with
    `where`."""
    try:
        with users_code():
            return factory()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where}: cannot be created ({describe(error)})") from error


def check_call(function: Callable[..., Any], where: str, call: Call) -> None:
    """Raise ConfigError that begins with `where`, and names file and line, unless `call` fits the
    function."""
    # A sync wrapper of a coroutine function counts, because the result can be awaited.
    callables = (function, inspect.unwrap(function), type(function).__call__)
    is_async = any(map(inspect.iscoroutinefunction, callables))
    call_problem = "" if not call.awaited or is_async else "is not async"
    if inspect.isasyncgenfunction(inspect.unwrap(function)):
        call_problem = "yields instead of returning"
    try:
        bind_to = inspect.signature(function).bind
        bind_to(**dict.fromkeys(call.given)) if call.by_name else bind_to(*call.given)
    except TypeError as error:
        call_problem = f"cannot be called with the expected arguments ({error})"
    except ValueError:  # a builtin
        return

    if call_problem:
        raise ConfigError(f"{where}: {_named_with_place(function)} {call_problem}; write {call.usage}")


def select_columns(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a function of a user has parameters for, all of them for `**kwargs`. TypeError
    names a required parameter without a column."""
    parameters = inspect.signature(function).parameters.values()
    missing_names = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in columns
    ]
    if missing_names:
        name = missing_names[0]
        raise TypeError(
            f"{_named_with_place(function)} needs {name!r}; the columns are {', '.join(columns)}; "
            f"{missing_column_advice(name)}"
        )

    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(columns)
    return {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}


def missing_column_advice(name: str) -> str:
    """Return how the rows of a data set get a column that a function of a user needs."""
    return (
        f"put {name} into extra_info of the rows, or map its column: "
        f"'data.columns={{extra_info.{name}: {name}}}'"
    )


def _named_with_place(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    location = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    return getattr(inner, "__name__", type(inner).__name__) + location


def _option_error(
    complaint: str, options: Mapping[str, Any], parameters: list[inspect.Parameter], where: str
) -> str:
    """Return msgspec's error under the option's own key, with the wrong value and the allowed values."""
    problem, _, path = complaint.partition(" - at `$.")
    name = path.rstrip("`").partition("[")[0]
    allowed = [typing.get_args(parameter.annotation) for parameter in parameters if parameter.name == name]
    is_literal = bool(allowed) and all(isinstance(value, str) for value in allowed[0])
    choice_text = f"; choose from {', '.join(allowed[0])}" if is_literal and allowed[0] else ""
    value_text = "" if problem.startswith("Invalid enum") else f", not {options.get(name)!r}"
    return f"{where}.{name}: {problem}{value_text}{choice_text}"


def search_working_directory() -> None:
    """Let modules of users be imported from the working directory. The directory comes behind the standard
    library, whose modules no file there may hide, and before installed packages. ConfigError for a file that
    hides a package that asyncrl imports."""
    working_directory = os.getcwd()
    paths = [path for path in sys.path if os.path.realpath(path) != working_directory]
    for name in sorted(IMPORTED_PACKAGES):
        hiding_file = next(
            (
                hiding_file
                for hiding_file in (f"{name}.py", f"{name}/__init__.py")
                if os.path.isfile(hiding_file)
            ),
            "",
        )
        installed_spec = PathFinder.find_spec(name, paths) if hiding_file else None
        if installed_spec and os.path.realpath(str(installed_spec.origin)) != os.path.realpath(hiding_file):
            raise ConfigError(
                f"{working_directory}/{hiding_file} hides the installed package {name}, which asyncrl "
                "imports; rename the file, or work in another directory"
            )

    library = os.path.dirname(os.__file__)
    standard = [index for index, path in enumerate(paths) if path in (library, f"{library}/lib-dynload")]
    paths.insert(max(standard, default=-1) + 1, working_directory)
    sys.path[:] = paths


def load_object(spec: str, kind: str) -> Any:
    """Import `module:attribute` or `file.py:attribute`; ConfigError names the wrong part."""
    source, _, attribute = spec.rpartition(":")
    loading = _is_loading.set(True)
    try:
        with users_code():
            module = _module_from_file(source) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        problem = f"{kind} {spec!r}: cannot import {source!r} ({describe(error)})"
        raise ConfigError(f"{problem}{_stdlib_hint(source)}") from error
    finally:
        _is_loading.reset(loading)

    try:
        return getattr(module, attribute)
    except AttributeError:
        nearest = difflib.get_close_matches(attribute, dir(module), n=3)
        hint = _stdlib_hint(source) or (f"; did you mean {', '.join(nearest)}?" if nearest else "")
        raise ConfigError(f"{kind} {spec!r}: {source} has no {attribute!r}{hint}") from None


def refuse_inside_run(call_text: str) -> None:
    """Raise ConfigError if code calls that a run has loaded: a run would start a run."""
    if _is_loading.get():
        raise ConfigError(
            f"{call_text} was called by code that a run has loaded; in a script, write the call under "
            '`if __name__ == "__main__":`'
        )
    if INSIDE_RUN in os.environ:
        raise ConfigError(
            f"{call_text} was called in a process of a run, for example by a tool, a reward or a program "
            "that they started, but a run cannot start another run; call it in your own script or notebook"
        )


def _stdlib_hint(source: str) -> str:
    """Return a hint that a module of the working directory has the name of a module of the standard library;
    '' if not, and for a file, which is loaded by path."""
    if source.endswith(".py"):
        return ""

    top_module = source.partition(".")[0]
    if top_module not in sys.stdlib_module_names or not (
        os.path.isfile(f"{top_module}.py") or os.path.isdir(top_module)
    ):
        return ""

    return (
        f"; the standard library module {top_module} hides your module; write {top_module}.py:NAME, or "
        "rename your module"
    )


def _module_from_file(source: str) -> Any:
    path = Path(source).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {source}")

    name = f"asyncrl_user_{path.stem}_{abs(hash(str(path))):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module

        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise

    return sys.modules[name]
