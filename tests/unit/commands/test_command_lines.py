"""The command lines: help with an example, unknown words refused with the nearest, verl's words, exit codes."""

from __future__ import annotations

import re
import shlex
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

import grpo_rl
from grpo_rl.__main__ import COMMANDS, main
from grpo_rl.arguments import Arguments
from grpo_rl.errors import ConfigError

OWN = [name for name in COMMANDS if name != "train"]
LONG = "x" * 5000


@pytest.mark.parametrize("name", OWN)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: grpo-rl {name}") and f"example:\n  grpo-rl {name} " in out and err == ""
    assert max(map(len, out.splitlines())) <= 128


def test_every_command_is_named_and_can_be_imported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and main([]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    assert all(callable(import_module(module).main) for module, _ in COMMANDS.values())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"grpo_rl {grpo_rl.__version__}\n"


def test_words_without_a_command_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trainer.save_frq=1"]) == 2
    assert "trainer.save_freq" in capsys.readouterr().err
    assert main(["plan", "trainer.device=cpu", "trainer.total_training_steps=3"]) == 0
    assert capsys.readouterr().out.startswith("plan: recipe arithmetic/grpo")
    assert main(["plan", "trainer.device=cpu", "--dry"]) == 2


@pytest.mark.parametrize("name", OWN)
def test_an_unknown_option_is_refused_with_the_nearest(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    near = {
        "plan": "--help",
        "watch": "--once",
        "engines": "--remove",
        "export": "--adapter",
        "doctor": "--strict",
    }
    near |= {"page": "--out", "prepare": "--split", "check-reward": "--batched", "import-gguf": "--dtype"}
    wanted = near.get(name, "--temperature")
    needed = {"prepare": ["--from", "x", "--to", "y"], "check-reward": ["--data", "x"]}
    words = ["gsm8k" if name == "prepare" else "runs/x", *needed.get(name, [])]
    assert main([name, *words, f"{wanted}x", "1"]) == 2
    out, err = capsys.readouterr()
    assert f"there is no option {wanted}x. Did you mean {wanted}?" in " ".join((out + err).split()) and "Traceback" not in err


def test_options_are_not_shortened_and_settings_may_stand_anywhere() -> None:
    parser = Arguments("try", "Try it.", "grpo-rl try")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--data", action="append")
    options, settings = parser.read_with_settings(
        ["a", "data.max_prompt_length=8", "--data", "task:x?split=val&n=2", "b", "~trainer.seed", "+a.b={c: 1}"]
    )
    assert options.names == ["a", "b"] and options.data == ["task:x?split=val&n=2"]
    assert settings == ["data.max_prompt_length=8", "~trainer.seed", "+a.b={c: 1}"]
    with pytest.raises(ConfigError, match="no option --dat"):
        parser.read(["--dat", "x"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["eval"], 2, "needs a model or a run"),
        (["eval", "builtin:arithmetic"], 2, "--data is missing"),
        (["eval", "builtin:arithmetic", "--data", "task:arithmetic", "--temperature", "0"], 2, "-n 1"),
        (["eval", "builtin:arithmetic", "--data", "nowhere.jsonl"], 2, "there is no file"),
        (["eval", "builtin:arithmetic", "--data", "task:arithmetic", "-n", "0"], 2, "must be at least 1"),
        (["generate", "builtin:arithmetic", "--output", "x.csv"], 2, ".jsonl or .parquet"),
        (["generate", "a", "b"], 2, "needs one model"),
        (["export", "builtin:arithmetic"], 2, "belongs to no run"),
        (["chat", "builtin:arithmetic", "--max-tokens", "4000"], 2, "leaves no room"),
        (["eval", "builtin:arithmetic", "--data", "task:arithmetic", "--pass-at", "nan"], 2, "nan is no finite number"),
        (["eval", "builtin:arithmetic", "--data", "task:arithmetic", "--output", "/proc/x"], 2, "--output /proc/x: cannot"),
        *((words, 2, "File name too long") for words in (["export", LONG], ["eval", "builtin:arithmetic", "--data", LONG])),
        (["train", f"data.train_files=[{LONG}.jsonl]"], 2, "there is no file"),
    ],
)
def test_mistakes_end_with_their_exit_code_before_anything_starts(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert main(words) == code
    out, err = capsys.readouterr()
    assert said in err and "Traceback" not in out + err
    assert not [path for path in temporary.iterdir() if path.name.startswith("grpo")]


def documented() -> list[tuple[str, ...]]:
    """Return the words of every command that docs/commands.md shows."""
    page = (Path(grpo_rl.__file__).parents[1] / "docs" / "commands.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    found = [shlex.split(line.partition("| ")[2] or line, comments=True) for line in lines if "grpo-rl" in line]
    return [tuple(words[1:]) for words in found if words[1] in OWN]


@pytest.mark.parametrize("words", documented(), ids=lambda words: " ".join(words)[:60])
def test_a_documented_command_has_the_options(words: tuple[str, ...]) -> None:
    module = import_module(COMMANDS[words[0]][0])
    module._parser().read_with_settings(words[1:])


def test_every_command_is_documented() -> None:
    assert {words[0] for words in documented()} == {"watch", "eval", "generate", "chat", "export", "import-gguf"}
    page = (Path(grpo_rl.__file__).parents[1] / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"| `{name}` |" not in page] == []
