"""A run that somebody else sent: looking at it, sampling with its settings and exporting it neither runs code nor leaves its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_folders import make_run

import grpo_rl
from grpo_rl.__main__ import main
from grpo_rl.commands.sampling_plan import data_of_run, nested, settings_of_run
from grpo_rl.commands.targets import run_config
from grpo_rl.config.schema.fields import flat
from grpo_rl.errors import DataError
from grpo_rl.models import builtin
from grpo_rl.telemetry.rundir import links_out

R = "actor_rollout_ref.rollout"
SECRET = "the private text"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'CANARY')!r}).touch()\n")
    (tmp_path / "private.txt").write_text(SECRET)
    run = make_run(tmp_path / "runs", "theirs")
    builtin.build("builtin:arithmetic", run / "model")
    return run


def name_in_file(run: Path, **settings: Any) -> None:
    tree = flat(run_config(run)) | {key.replace("__", "."): value for key, value in settings.items()}
    (run / "config.yaml").write_text(yaml.safe_dump(nested(tree)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.functions", ["auto", "0.5*evil.py:f"]),
        ("reward.custom_reward_function.path", "evil.py"),
        ("reward.function_kwargs", {"evil.py:f": {}}),
        ("reward.judge.base_url", "http://10.0.0.1/v1"),
        ("reward.judge.parser", "evil:f"),
        (f"{R}.multi_turn.tools", {"evil.py:Tool": {}}),
        (f"{R}.multi_turn.tools", {"search": {"folder": "/etc"}}),
        (f"{R}.multi_turn.tool_config_path", "tools.yaml"),
        (f"{R}.multi_turn.environment.name", "evil.Environment"),
        (f"{R}.multi_turn.environment.options", {"load": "evil:f"}),
        (f"{R}.multi_turn.format", "evil.py:f"),
        (f"{R}.name", "evil.py:Engine"),
        ("data.custom_cls.path", "evil.py"),
        ("data.chat_template", "private.txt"),
        ("data.system_prompt", "${oc.env:HOME}"),
        ("data.val_files", ["task:evil.py:f?num_rows=3"]),
    ],
)
def test_what_a_runs_file_names_is_shown_and_not_run(
    run: Path, tmp_path: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name_in_file(run, **{key: value, f"{R}.multi_turn.enable": "multi_turn" in key})
    commands = [["eval", str(run)], ["generate", str(run), "--output", "rows.jsonl"]]
    if key != "data.val_files":
        data = "task:arithmetic?num_rows=1"
        commands.append(["eval", "builtin:arithmetic", str(run), "--settings-of", "theirs", "--data", data, "-n", "1"])
    if not key.startswith(("reward.", f"{R}.multi_turn", "data.val_files")):
        commands.append(["chat", str(run)])
    for words in commands:
        assert main(words) == 2, words
        said = capsys.readouterr().err
        assert f"{key}={value!r}" in said and "--trust-run" in said
    assert not (tmp_path / "CANARY").exists()
    if key == "data.val_files":
        assert data_of_run(run, trusted=True) == value
        return
    assert settings_of_run(run, trusted=True)[key] == value
    assert key not in settings_of_run(run, None, [f"{key}=null"]), "what is typed takes the place of what the file says"


def test_parts_of_a_key_are_no_way_around(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between dots a folder would be a word as harmless as the name of a reward."""
    with (run / "config.yaml").open("a") as file:
        file.write(f"{R}.multi_turn.enable: true\n{R}.multi_turn.tools.search: {{folder: /etc}}\n")
    assert main(["eval", str(run)]) == 2
    assert f"{R}.multi_turn.tools.search.folder='/etc'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "eval", "generate", "chat"])
def test_the_code_of_a_checkpoints_model_is_not_run(
    run: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_rl.checkpoint.exporting.verify", lambda checkpoint: None)
    trap = run / "base"
    trap.mkdir()
    (trap / "evil.py").write_text((tmp_path / "evil.py").read_text())
    (trap / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": {"AutoConfig": "evil.X"}}))
    name_in_file(run, actor_rollout_ref__model__path=str(trap), actor_rollout_ref__model__trust_remote_code="yes")
    (run / "checkpoints" / "step_4").mkdir()
    (run / "checkpoints" / "step_4" / "manifest.json").write_text('{"sha256": "0"}')
    options = {"export": ["--output", "out"], "generate": ["--output", "rows.jsonl"]}.get(command, [])
    assert main([command, f"{run}@4", *options]) == 2
    said = capsys.readouterr().err
    assert "actor_rollout_ref.model.trust_remote_code='yes'" in said and "--trust-run" in said
    assert not (tmp_path / "CANARY").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["model/notes.txt", "metrics.jsonl", "plots/curves.png", "config.yaml", "val", "exports", "page_files"]
)
def test_links_out_of_a_run_are_followed_by_no_command(run: Path, tmp_path: Path, name: str) -> None:
    outside, link = tmp_path / "outside", run / name
    if link.exists():
        link.rename(outside)
    else:
        outside.mkdir()
    link.symlink_to(outside)
    looks = [["page", str(run)], ["doctor", str(run)], ["watch", str(run), "--once"]]
    others = [["export", str(run), "--output", "out"], ["eval", str(run)], ["chat", str(run)]]
    for words in looks + others:
        assert main(words) == 3, words
    with pytest.raises(DataError, match="out of the run's folder"):
        grpo_rl.Run(run)
    (run / "config.json").write_text("{}")  # looks like a model
    assert {main(words) for words in looks} == {3}
    assert not (tmp_path / "out").exists() and not (run / "page.html").exists()


def test_links_beside_a_checkpoint_are_not_copied_into_its_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_rl.checkpoint.exporting.verify", lambda checkpoint: None)
    base = builtin.build("builtin:arithmetic", tmp_path / "snapshots" / "1")
    template = base / "chat_template.jinja"
    template.unlink()
    template.symlink_to(tmp_path / "private.txt")
    name_in_file(run, actor_rollout_ref__model__path=str(base))
    (run / "checkpoints" / "step_4").mkdir()
    (run / "checkpoints" / "step_4" / "manifest.json").write_text('{"sha256": "0"}')
    assert main(["export", f"{run}@4", "--output", "out"]) == 2
    assert "chat_template.jinja: is a link" in capsys.readouterr().err
    (tmp_path / "blobs").mkdir()
    (tmp_path / "private.txt").rename(tmp_path / "blobs" / "ab12")
    template.unlink()
    template.symlink_to("../../blobs/ab12")
    assert list(links_out(base)) == [], "the hub's cache is made of such links"
    (run / "checkpoints").rename(tmp_path / "other")
    (run / "checkpoints").symlink_to(tmp_path / "other")
    assert main(["page", str(run)]) == 0, "a user's own larger disk"
    assert main(["export", f"{run}@4", "--output", "out"]) == 2
    assert "checkpoints: is a link" in capsys.readouterr().err and not (tmp_path / "out").exists()
