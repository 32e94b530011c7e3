"""The form `NAME?option=value&option=value`, taken apart."""

from __future__ import annotations

from grpo_rl.errors import ConfigError


def split_spec(spec: str, prefix: str) -> tuple[str, dict[str, str]]:
    """The name and the options of `prefix` NAME?option=value&...; raises ConfigError where the form is another."""
    name, _, query = spec.removeprefix(prefix).partition("?")
    options: dict[str, str] = {}
    for part in query.split("&") if query else []:
        key, equals, text = part.partition("=")
        if not equals or key in options:
            raise ConfigError(f"{prefix}{name}: {part!r} in {query!r} must be option=value, each option once, joined by &")
        options[key] = text
    return name, options


def whole(what: str, text: str, *, at_least: int) -> int:
    """`text` as a whole number. Raises ConfigError otherwise, or when it is smaller than `at_least`."""
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{what}={text} must be a whole number") from None
    if value < at_least:
        raise ConfigError(f"{what}={text} must be at least {at_least}")
    return value


def one_of(what: str, text: str, choices: tuple[str, ...]) -> str:
    """`text`, which must be one of the `choices`; raises ConfigError otherwise."""
    if text not in choices:
        raise ConfigError(f"{what}={text} must be one of {', '.join(choices)}")
    return text
