"""`python -m grpo_rl COMMAND`, and the script `grpo-rl COMMAND`: all commands by name. `python -m grpo_rl.main` trains."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from grpo_rl.cluster.session import launcher
from grpo_rl.errors import ConfigError, did_you_mean
from grpo_rl.main import exit_code_after
from grpo_rl.telemetry.terminal.standard_streams import make_lasting

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("grpo_rl.main", "train a model: recipe=NAME key=value ... (the same as python -m grpo_rl.main)"),
    "plan": ("grpo_rl.commands.plan", "check a configuration whole and print what a run would do"),
    "watch": ("grpo_rl.commands.watch_run", "follow a running run from another terminal"),
    "engines": ("grpo_rl.commands.engines", "let rollout engines join or leave a running run"),
    "doctor": ("grpo_rl.commands.doctor", "say what is wrong with a run, why, and what to change"),
    "page": ("grpo_rl.commands.page", "write one HTML file with everything about a run"),
    "eval": ("grpo_rl.commands.evaluate", "measure models on prompts: mean@n, pass@k, maj@n, and whether a difference is real"),
    "generate": ("grpo_rl.commands.generate", "responses for a data file, scored where there is a ground truth"),
    "chat": ("grpo_rl.commands.chat", "talk to a model in the terminal"),
    "export": ("grpo_rl.commands.export", "a Hugging Face folder of a run or of one of its checkpoints, with a model card"),
    "import-gguf": ("grpo_rl.commands.import_gguf", "a Hugging Face folder of a GGUF file, to train it"),
    "prepare": ("grpo_rl.data.prepare", "turn original data files into rows"),
    "check-reward": ("grpo_rl.rewards.check", "try a reward function on rows before any training"),
}
"""The module of each command, with a `main(words)`, and what the command does."""
SAMPLES = ("eval", "generate", "chat")
_COMPLETION = ("--shell-completion", "-sc")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, and return its exit code. Words `key=value` alone train."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        make_lasting()
        launcher.launches = True
    if not words or words[0] in ("--help", "-h", "help"):
        print(_usage())
        return 0
    if words[0] in _COMPLETION and "COMP_LINE" in os.environ:
        # Hydra completes words of the configuration; the command before them is none.
        os.environ["COMP_LINE"] = re.sub(r"^(\S+\s+)(train|plan)\s", r"\1", os.environ["COMP_LINE"])
    name, rest = ("train", words) if _is_setting(words[0]) else (words[0], words[1:])
    if name in ("train", "plan"):
        return exit_code_after(lambda: _run(name, rest))

    def work() -> int:
        return exit_code_after(lambda: _run(name, rest), refusal=f"grpo-rl {name} cannot start")

    return exit_code_after(lambda: launcher.launched(work)) if name in SAMPLES else work()


def _run(name: str, rest: list[str]) -> int:
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS, most=1)
        raise ConfigError(f"there is no command {name!r}.{meant} There are {', '.join(COMMANDS)}: grpo-rl --help")
    try:
        # Each is imported when it is asked for: `doctor` needs no torch.
        return int(import_module(COMMANDS[name][0]).main(rest))
    except SystemExit as ended:  # argparse, after --help
        return ended.code if isinstance(ended.code, int) else 0
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        sys.stdout = io.StringIO()
        return 0


def _is_setting(word: str) -> bool:
    return (
        "=" in word.partition(":")[0]
        or word.startswith("~")
        or word in ("--version", "--cfg", "-c", "--info", "-i", *_COMPLETION)
    )


def _usage() -> str:
    lines = ["usage: grpo-rl COMMAND [argument ...], or python -m grpo_rl COMMAND [argument ...]", ""]
    lines += [f"  {name:<14}{meaning}" for name, (_, meaning) in COMMANDS.items()]
    lines += ["", "grpo-rl COMMAND --help shows what a command takes, with an example.", "docs/commands.md has all of them."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
