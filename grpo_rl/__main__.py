"""`python -m grpo_rl COMMAND`: the commands beside training. `python -m grpo_rl.main` trains."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, GrpoRlError
from grpo_rl.telemetry.terminal.text import encodable

Command = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, and return its exit code; see `errors.EXIT_CODES`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("--help", "-h", "help"):
        print(_usage())
        return 0
    try:
        return _command(words[0])(words[1:])
    except GrpoRlError as error:
        print(f"error: {encodable(redact(str(error)), sys.stderr.encoding or 'utf-8')}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        return 0


def _command(name: str) -> Command:
    """Return a command by its name. Each is imported when it is asked for: `doctor` needs no torch."""
    if name not in COMMANDS:
        raise ConfigError(f"there is no command {name!r}; there are {', '.join(COMMANDS)}: python -m grpo_rl --help")
    return COMMANDS[name][0]()


def _train() -> Command:
    from grpo_rl.main import main

    return main


def _doctor() -> Command:
    from grpo_rl.commands.doctor import main

    return main


def _page() -> Command:
    from grpo_rl.commands.page import main

    return main


def _browse() -> Command:
    from grpo_rl.telemetry.browse import main

    return main


def _prepare() -> Command:
    from grpo_rl.data.prepare.__main__ import main

    return main


def _check_reward() -> Command:
    from grpo_rl.rewards.check import main

    return main


COMMANDS: dict[str, tuple[Callable[[], Command], str]] = {
    "train": (_train, "train a model: recipe=NAME key=value ... (the same as python -m grpo_rl.main)"),
    "doctor": (_doctor, "say what is wrong with a run, why, and what to change"),
    "page": (_page, "write or serve one HTML file with everything about a run"),
    "browse": (_browse, "read, filter and sort the responses of a run"),
    "prepare": (_prepare, "turn original data files into rows"),
    "check-reward": (_check_reward, "try a reward function on rows before any training"),
}


def _usage() -> str:
    lines = ["usage: python -m grpo_rl COMMAND [argument ...]", ""]
    lines += [f"  {name:<14}{meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join([*lines, "", "python -m grpo_rl COMMAND --help shows what a command takes."])


if __name__ == "__main__":
    sys.exit(main())
