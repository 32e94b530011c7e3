"""The functions that a configuration names: how they are found, and their options, needs and formula.

Options are keywords with defaults in the signature, needs are noted by `@needs`, and the formula is the text
after `Formula:` in the docstring. A user's own function in a file has the same rights.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import linecache
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_rl.errors import ConfigError, FunctionError, GrpoRlError, did_you_mean, raised_in, users_line

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """A table from names to functions of one kind, e.g. all advantage estimators.

    `get` also takes `my_pkg.my_module:fn` and `path/to/file.py:fn`. `interface` states in one line how such a
    function is called; with it, a failure of a user's function becomes a FunctionError that repeats the line.
    """

    def __init__(self, kind: str, interface: str = "") -> None:
        self.kind = kind
        self.interface = interface
        self._functions: dict[str, F] = {}
        self._own: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        def add(function: F) -> F:
            for name in names:
                if name in self._functions:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                self._functions[name] = function
            return function

        return add

    def get(self, name: str) -> F:
        """Return the function of this name, or of `module:fn` or `file.py:fn`. Raises ConfigError."""
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            if not self.interface:
                return load_function(name, self.kind)
            if name not in self._own:
                self._own[name] = guarded(load_function(name, self.kind), f"{self.kind} {name}", self.interface)
            return self._own[name]
        raise ConfigError(
            f"unknown {self.kind} {name!r}.{did_you_mean(name, self._functions)} Known: {', '.join(sorted(self._functions))}; "
            f"or your own as my_package.module:function or path/to/file.py:function"
        )

    def check_keywords(self, name: str, options: dict[str, Any]) -> None:
        function = self.get(name)
        parameters = inspect.signature(function).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return
        if problems := out_of_bounds(f"{self.kind} {name!r}", function, options):
            raise ConfigError(problems)
        unknown = [key for key in options if key not in parameters]
        if unknown:
            raise ConfigError(f"{self.kind} {name!r} has no option {', '.join(unknown)}; it takes {', '.join(parameters)}")

    def check_call(self, name: str, *arguments: str, **keywords: Any) -> None:
        signature = inspect.signature(self.get(name))
        try:
            signature.bind(*arguments, **keywords)
        except TypeError as error:
            called = ", ".join([*arguments, *(f"{key}=..." for key in keywords)])
            raise ConfigError(f"{self.kind} {name!r} takes {signature}, and is called as ({called}): {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __contains__(self, name: object) -> bool:
        return name in self._functions


def load_function(spec: str, kind: str = "function") -> Any:
    """Return the object that `module:name` or `file.py:name` names. Raises ConfigError.

    Modules beside the file and in the current folder can be imported, behind all that is installed.
    """
    source, _, name = spec.rpartition(":")
    try:
        if source.endswith(".py"):
            path = Path(source).expanduser()
            if not path.is_file():
                raise ConfigError(f"{kind} {spec!r}: there is no file {path.absolute()}")
            # One module per file, so that two functions of one file share its globals.
            module_name = "grpo_rl_user_" + "".join(c if c.isalnum() else "_" for c in str(path.resolve()))
            module = sys.modules.get(module_name)
            _make_importable(path.resolve().parent)
            if module is None:
                module_spec = importlib.util.spec_from_file_location(module_name, path)
                assert module_spec is not None and module_spec.loader is not None
                module = importlib.util.module_from_spec(module_spec)
                sys.modules[module_name] = module
                try:
                    module_spec.loader.exec_module(module)
                except BaseException:
                    del sys.modules[module_name]
                    raise
        else:
            _make_importable(Path.cwd())
            module = importlib.import_module(source)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{kind} {spec!r}: importing {source} failed: {type(error).__name__}: {error}{raised_in(error)}"
        ) from error
    if not callable(getattr(module, name, None)):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{kind} {spec!r}: {source} has no function {name!r}; it has {', '.join(callables) or 'none'}")
    return getattr(module, name)


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    selection = getattr(function, "selection", None)
    return options if selection is None else options_of(selection) | options


def own_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def check_options(what: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError with all options that the function (`what`) does not take, or of another type."""
    known = options_of(function)
    problems = []
    for name, value in options.items():
        if name not in known:
            hint = did_you_mean(name, known, most=1)
            problems.append(f"{what} has no option {name}.{hint} It takes {', '.join(known) or 'none'}")
        elif not fits(value, known[name]):
            problems.append(f"{what}: {name}={value!r} is not of the type of its default, {known[name]!r}")
    problems += out_of_bounds(what, function, options)
    if problems:
        raise ConfigError(problems)


def out_of_bounds(what: str, function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Return a line for each option outside of the bounds of its annotation."""
    ranges = ranges_of(function)
    problems = []
    for name, value in options.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if name in ranges and isinstance(number, int | float) and (problem := ranges[name].problem(number)):
                problems.append(f"{what}: {name}={number!r} {problem}")
    return problems


def ranges_of(function: Callable[..., Any]) -> dict[str, Any]:
    called = function.__init__ if inspect.isclass(function) else function
    try:
        hints = typing.get_type_hints(called, include_extras=True)
    except Exception:  # a user's annotation that cannot be looked up
        hints = {}
    ranges = {name: bounds for name, hint in hints.items() if (bounds := _range_in(hint)) is not None}
    selection = getattr(function, "selection", None)
    return ranges if selection is None else ranges_of(selection) | ranges


def _range_in(hint: Any) -> Any:
    direct = (entry for entry in getattr(hint, "__metadata__", ()) if hasattr(entry, "problem"))
    inner = (bounds for part in typing.get_args(hint) if (bounds := _range_in(part)) is not None)
    return next(direct, None) or next(inner, None)


def fits(value: Any, default: Any) -> bool:
    """Return whether the value is of the type of the default; anything is if that is None."""
    if default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(default))


def needs(*names: str, unless: str | None = None) -> Callable[[F], F]:
    """Note what a function needs of the run; nothing of it if the option `unless` is true."""

    def note(function: F) -> F:
        function.needs = needs_of(function) | frozenset(names)  # type: ignore[attr-defined]
        if unless is not None:
            spared = getattr(function, "spared", {}) | dict.fromkeys(names, unless)
            function.spared = spared  # type: ignore[attr-defined]
        return function

    return note


def needs_of(function: Callable[..., Any], options: Mapping[str, Any] | None = None) -> frozenset[str]:
    needed: frozenset[str] = getattr(function, "needs", frozenset())
    if options is None:
        return needed
    values = options_of(function) | dict(options)
    return needed - {name for name, switch in getattr(function, "spared", {}).items() if values.get(switch)}


def samples_ahead(versions: int | None = None) -> Callable[[F], F]:
    """Note that a schedule samples while it trains, tokens of at most `versions` versions before.

    None: trainer.asynchronous.max_staleness, and weights may be updated under unfinished responses.
    """

    def note(function: F) -> F:
        function.samples_ahead = versions  # type: ignore[attr-defined]
        return function

    return note


def versions_ahead_of(schedule: Callable[..., Any]) -> int | None:
    """Return what `@samples_ahead` noted; 0 if the schedule samples and trains in turns."""
    versions: int | None = getattr(schedule, "samples_ahead", 0)
    return versions


def formula_of(function: Callable[..., Any]) -> str:
    """Return the docstring's text from `Formula:` to the next blank line; else the function's name."""
    return _passage(function, "Formula:") or getattr(function, "__name__", repr(function))


def coefficient_of(function: Callable[..., Any]) -> str:
    """The text after `Gradient:`, as in DeepSeekMath (arXiv 2402.03300), section 5.2.1."""
    return _passage(function, "Gradient:")


def _passage(function: Callable[..., Any], heading: str) -> str:
    _, _, rest = (inspect.getdoc(function) or "").partition(heading)
    return " ".join(rest.split("\n\n", 1)[0].split()).rstrip(".")


def formula_by(rewrite: Callable[[str, Mapping[str, Any]], str]) -> Callable[[F], F]:
    """`rewrite` makes the formula of the docstring's and all options."""

    def note(function: F) -> F:
        function.rewrite_formula = rewrite  # type: ignore[attr-defined]
        return function

    return note


def shown(
    function: Callable[..., Any],
    options: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    of: Callable[[Callable[..., Any]], str] = formula_of,
) -> str:
    """Return the formula, or coefficient, with its options as numbers, `1 - name` and `1 + name` too."""
    formula, values = of(function), options_of(function) | dict(options)
    if rewrite := getattr(function, "rewrite_formula", None):
        formula = rewrite(formula, values)
    for name, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for pattern, number in ((rf"1 - {name}\b", 1 - value), (rf"1 \+ {name}\b", 1 + value), (rf"\b{name}\b", value)):
                formula = re.sub(pattern, f"{number:.6g}", formula)
    return formula


def guarded(function: F, what: str, interface: str) -> F:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with calling_user_function(what, interface):
            return function(*arguments, **keywords)

    if selection := getattr(function, "selection", None):
        call.selection = guarded(selection, f"selection of {what}", "")  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


@contextmanager
def calling_user_function(what: str, interface: str = "", kind: type[GrpoRlError] = FunctionError) -> Iterator[None]:
    """Turn a user's exceptions in `what` into `kind`, but not our own errors or a want of memory."""
    try:
        yield
    except GrpoRlError:
        raise
    except Exception as error:
        if kind is FunctionError and (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"):
            raise
        raise kind("\n  ".join(_failure(what, error, interface))) from error


def _failure(what: str, error: Exception, interface: str) -> Iterator[str]:
    yield f"{what} failed: {type(error).__name__}: {error}"
    if place := users_line(error):
        file, number, name = place
        yield f"in {file}, line {number}, in {name}: {linecache.getline(file, number).strip()}"
    if interface:
        yield f"it is called as {interface}"
    misused = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and is_dataclass(misused):
        kind = misused if isinstance(misused, type) else type(misused)
        members = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
        values = [
            *(name for name, member in members.items() if isinstance(member, property)),
            *(field.name for field in fields(kind)),
        ]
        methods = [f"{name}()" for name, member in members.items() if callable(member)]
        yield f"{kind.__name__} has {', '.join([*values, *methods])}"
