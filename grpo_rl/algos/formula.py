"""The formula of a registered function, read from its docstring, for the plan that a run prints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def formula_of(function: Callable[..., Any]) -> str:
    """The text after `Formula:` in the docstring, on one line; the function's name when it has none.

    The text ends at the next blank line. A user's own function is shown in the same way.
    """
    _, found, rest = (inspect.getdoc(function) or "").partition("Formula:")
    text = " ".join(rest.split("\n\n", 1)[0].split()).rstrip(".")
    return text if found and text else getattr(function, "__name__", repr(function))
