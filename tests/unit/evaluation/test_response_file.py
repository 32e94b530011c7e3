"""The folder of an evaluation: it goes on after an end at any byte, and refuses other settings with the difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grpo_rl.errors import ConfigError
from grpo_rl.evaluation.response_file import ResponseFile, identity_of, response_file, settle
from grpo_rl.run_files import weights_digest


def lines(row: int, n: int = 2) -> list[dict]:
    lengths = {"prompt_length": 2, "response_length": 3}
    return [{"row": row, "sample": sample, "response": f"{row}/{sample} é\n", **lengths} for sample in range(n)]


def test_whole_prompts_are_found_again_wherever_the_process_was_killed(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path / "responses.jsonl")
    file.append(lines(0) + lines(1))
    whole = file.path.read_bytes()
    for end in range(len(whole) + 1):
        file.path.write_bytes(whole[:end])
        there = file.groups(2)
        assert set(there) <= {0, 1} and all(len(group) == 2 for group in there.values())
        missing = [row for row in (0, 1) if row not in there]
        for row in missing:
            file.append(lines(row))
        assert file.groups(2) == {0: lines(0), 1: lines(1)}


@pytest.mark.parametrize("value", [None, -1, 2.0, True, "2"])
def test_a_line_without_whole_lengths_is_sampled_again(tmp_path: Path, value: object) -> None:
    file = ResponseFile(tmp_path / "responses.jsonl")
    file.append([{**lines(0)[0], "prompt_length": value}, lines(0)[1], *lines(1)])
    assert file.groups(2) == {1: lines(1)}


def test_a_prompt_with_another_number_of_responses_is_not_complete(tmp_path: Path) -> None:
    file = ResponseFile(tmp_path / "responses.jsonl")
    file.append(lines(0, n=2))
    assert file.groups(3) == {} and file.groups(1) == {}
    file.complete(1)
    assert file.is_complete(2) and not file.is_complete(3)


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    settle(folder, {"n": 16, "temperature": 1.0, "data": ["a.jsonl"]})
    settle(folder, {"n": 16, "temperature": 1.0, "data": ["a.jsonl"]})
    with pytest.raises(ConfigError) as refused:
        settle(folder, {"n": 8, "temperature": 1.0, "data": ["b.jsonl"]})
    assert refused.value.problems[1:] == ['data: ["a.jsonl"] -> ["b.jsonl"]', "n: 16 -> 8"]


def test_a_name_stands_for_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    first = response_file(folder, "runs/a@4", {"digest": "1"})
    assert response_file(folder, "runs/a@4", {"digest": "1"}).path == first.path
    assert first.path.is_relative_to(tmp_path / "out" / "models") and "/" not in first.path.parent.name
    with pytest.raises(ConfigError, match="another model of the name runs/a@4"):
        response_file(folder, "runs/a@4", {"digest": "2"})
    assert response_file(folder, "../../etc", {}).path.resolve().is_relative_to(tmp_path / "out" / "models")


def test_a_model_is_known_by_its_weights_and_not_by_its_place(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(3_000_000))
    shutil.copytree(model, tmp_path / "copy")
    assert identity_of(str(model)) == identity_of(str(tmp_path / "copy"))
    before = weights_digest(model)
    changed = bytearray(3_000_000)
    changed[1_000_000:1_100_000] = b"\x01" * 100_000
    (model / "model.safetensors").write_bytes(changed)
    assert weights_digest(model) != before
    assert json.dumps(identity_of("builtin:arithmetic")) != json.dumps(identity_of("builtin:countdown"))
    assert identity_of("owner/name") == {"name on the hub": "owner/name"}
