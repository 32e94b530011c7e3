"""Names in a config become functions here, and nowhere else."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_rl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """A table from names to functions of one kind, e.g. all advantage estimators.

    `get` also takes `my_pkg.my_module:fn` and `path/to/file.py:fn`, so that a user's own function is
    used without touching this package.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator: make the function known under each of `names`."""

        def add(function: F) -> F:
            for name in names:
                if name in self._functions:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                self._functions[name] = function
            return function

        return add

    def get(self, name: str) -> F:
        """The function registered as `name`, or imported from `module:fn` / `file.py:fn`.

        Raises ConfigError, with the known names and the nearest ones, when there is none.
        """
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return load_function(name, self.kind)
        near = difflib.get_close_matches(name, self._functions, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(
            f"unknown {self.kind} {name!r}.{hint} Known: {', '.join(sorted(self._functions))}; "
            f"or your own as my_package.module:function or path/to/file.py:function"
        )

    def check_options(self, name: str, options: dict[str, Any]) -> None:
        """Raise ConfigError when the function has no keyword parameter for one of `options`."""
        function = self.get(name)
        parameters = inspect.signature(function).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return
        unknown = [key for key in options if key not in parameters]
        if unknown:
            raise ConfigError(f"{self.kind} {name!r} has no option {', '.join(unknown)}; it takes {', '.join(parameters)}")

    def check_call(self, name: str, *arguments: str, **keywords: Any) -> None:
        """Raise ConfigError when the function cannot be called with these arguments, named for the message, and keywords."""
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
    """The object that `module:name` or `file.py:name` names.

    Raises ConfigError when the file, the module or the name is not there, or importing it fails.
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
            module = importlib.import_module(source)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{kind} {spec!r}: importing {source} failed: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{kind} {spec!r}: {source} has no function {name!r}; it has {', '.join(callables) or 'none'}")
    return getattr(module, name)
