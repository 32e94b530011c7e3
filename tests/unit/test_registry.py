"""Names in a configuration and the functions behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import grpo_rl
from grpo_rl.errors import ConfigError, users_line
from grpo_rl.registry import Registry, load_function


@pytest.fixture
def colours() -> Registry[Callable[..., str]]:
    registry: Registry[Callable[..., str]] = Registry("colour")

    @registry.register("red", "crimson")
    def red(shade: int, *, bright: bool = False) -> str:
        return f"red {shade} {bright}"

    @registry.register("green")
    def green(**options: int) -> str:
        return f"green {options}"

    return registry


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_function_is_found_under_each_of_its_names(colours):
    assert colours.get("red") is colours.get("crimson")
    assert colours.get("red")(3) == "red 3 False"
    assert list(colours) == ["red", "crimson", "green"]
    assert "crimson" in colours and "blue" not in colours


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all(colours):
    with pytest.raises(ConfigError) as caught:
        colours.get("gren")
    message = str(caught.value)
    assert "unknown colour 'gren'. Did you mean green or red?" in message
    assert "Known: crimson, green, red" in message
    assert "my_package.module:function or path/to/file.py:function" in message
    with pytest.raises(ConfigError, match=r"unknown colour 'xyzzy'\. Known:"):
        colours.get("xyzzy")


def test_options_are_checked_against_the_functions_signature(colours):
    colours.check_keywords("red", {"bright": True})
    colours.check_keywords("green", {"whatever": 1})
    with pytest.raises(ConfigError, match="colour 'red' has no option brihgt; it takes shade, bright"):
        colours.check_keywords("red", {"brihgt": True, "shade": 1})


def test_a_users_file_is_a_module_of_its_own_whatever_others_are_called(colours, tmp_path):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Pair:\n    a: int\n\ndef blue(shade):\n    return f'{NAME} {Pair(shade).a}'\n\ndef _hidden(): ...\n"
    )
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, f"{text}NAME = {name!r}\n")
    assert [colours.get(f"{tmp_path / name / 'mine.py'}:blue")(1) for name in "ab"] == ["a 1", "b 1"]
    with pytest.raises(ConfigError, match=r"has no function 'bleu'; it has dataclass, Pair, blue$"):
        load_function(f"{tmp_path}/a/mine.py:bleu", "reward")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_package_of_mine:f", "importing no_such_package_of_mine failed: ModuleNotFoundError"),
        ("os.path:jion", "os.path has no function 'jion'; it has "),
        ("os.path:sep", "os.path has no function 'sep'"),
        (":f", "importing  failed: ValueError"),
        ("nothing/here.py:f", r"there is no file /.*nothing/here\.py"),
    ],
)
def test_what_cannot_be_loaded_is_explained(spec, message):
    with pytest.raises(ConfigError, match=message):
        load_function(spec, "reward")


def test_an_error_in_a_users_file_is_named_and_the_file_is_read_again_after_mending(tmp_path):
    path = write(tmp_path, "def f(:\n")
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=r"reward .*mine\.py:f': importing .*mine\.py failed: SyntaxError"):
        load_function(f"{path}:f", "reward")
    assert not {name for name in set(sys.modules) - before if name.startswith("grpo_rl_user_")}
    write(tmp_path, "def f():\n    return 1\n")
    assert load_function(f"{path}:f", "reward")() == 1


def test_an_import_that_fails_names_the_line_of_the_users_file(tmp_path):
    file = write(tmp_path, "def made():\n    return [][3]\n\nTABLE = made()\n")
    with pytest.raises(ConfigError, match=rf"failed: IndexError: list index out of range \({file}, line 2, in made\)"):
        load_function(f"{file}:f")


def test_the_users_line_is_found_below_libraries_and_in_folders_whose_name_begins_as_ours():
    ours = str(Path(grpo_rl.__file__).parent)

    def line_of(path: str) -> tuple[str, int, str] | None:
        names: dict[str, Callable[[], None]] = {}
        exec(compile("import json\ndef own():\n    json.loads('{')\n", path, "exec"), names)
        with pytest.raises(ValueError) as caught:
            names["own"]()
        frames = caught.value.__traceback__
        assert frames is not None
        return users_line(caught.value.with_traceback(frames.tb_next))

    assert line_of(f"{ours}_mine/reward.py") == (f"{ours}_mine/reward.py", 3, "own")
    assert line_of(f"{ours}/reward.py") is None
