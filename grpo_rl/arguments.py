"""Command lines of the commands: strict options, and `key=value` words between them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from grpo_rl.errors import ConfigError, did_you_mean

_SETTING = re.compile(r"(\+\+|\+|~)?[A-Za-z_][\w-]*(\.[\w-]+)*=.*|~[A-Za-z_][\w.-]*", re.DOTALL)


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=110)


class Arguments(argparse.ArgumentParser):
    """A parser without abbreviations that raises ConfigError and names the nearest option."""

    def __init__(self, command: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"grpo-rl {command}",
            description=description,
            epilog=f"example:\n  {example}".replace("\n", "\n  ").replace("\n    ", "\n  "),
            allow_abbrev=False,
            formatter_class=_Help,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help shows what there is")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        options, unknown = self.parse_known_intermixed_args(list(words))
        if unknown:
            # A word behind an unknown option is most likely its value.
            wrong = [word for word in unknown if word.startswith("-")] or unknown
            raise ConfigError([self._unknown(word) for word in wrong])
        return options

    def read_with_settings(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the words `key=value` or `~key` that stand among them."""
        settings = [word for word in words if _SETTING.fullmatch(word)]
        return self.read([word for word in words if not _SETTING.fullmatch(word)]), settings

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{self.prog}: {word!r} is one argument too many; {self.prog} --help shows what there is"
        known = [name for action in self._actions for name in action.option_strings]
        name = word.partition("=")[0]
        return f"{self.prog}: there is no option {name}.{did_you_mean(name, known, most=1)} There are {', '.join(known)}"


@contextmanager
def writing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: cannot be written: {error.strerror or error}") from error


def whole_number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return value


def not_negative(text: str) -> float:
    value = finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of at least 0")
    return value
