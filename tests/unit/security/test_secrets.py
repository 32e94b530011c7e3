"""A canary in the environment, the command line and errors turns up in nothing that is written."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_rl.config import secrets
from grpo_rl.config.compose import compose
from grpo_rl.config.secrets import is_secret_name, redact
from grpo_rl.main import main
from grpo_rl.telemetry.console import Console
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status

CANARY = "canary-5e0f2c91ab"


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(secrets, "_known", set())
    yield


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "apiKey", "db.password", "AWS_SECRET_ACCESS_KEY", "client-secret"]
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_tokens", "TOKENIZERS_PARALLELISM", "KEYBOARD", "monkey", "HOME", "n"])
def test_other_names_are_left_alone(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pa55word@host/x", "http://<hidden>@host/x"),
        ("hf:a/b?split=train&token=abcdef", "hf:a/b?split=train&token=<hidden>"),
        ("key hf_" + "a" * 30, "key <hidden>"),
        ("Authorization: Bearer abc.def.ghi", "Authorization: Bearer <hidden>"),
        ("task:arithmetic?digits=2", "task:arithmetic?digits=2"),
    ],
)
def test_credentials_inside_a_text_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_no_file_of_a_run_and_no_line_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    typed = "typed-canary-77"
    words = ["recipe=arithmetic/grpo", "trainer.experiment_name=r", "algorithm.adv_options={}"]
    words += ["data.system_prompt=${oc.env:CANARY_TOKEN}", f"+actor_rollout_ref.rollout.engine_kwargs.vllm.api_key={typed}"]
    composed = compose(words)
    run_dir, screen = RunDir.create(tmp_path, "r"), io.StringIO()
    run_dir.write_config(composed.yaml(), composed.overrides)
    console = Console(file=screen)
    console.log_to(run_dir.logs / "console.log")
    console.warn(f"the server said 401 for {CANARY} and {typed}")
    console.table(CANARY, [[typed, CANARY]])
    console.close()
    Status(run_dir.status_file).end(ValueError(f"bad token {CANARY}, {typed}"))
    written = {file: file.read_bytes() for file in run_dir.path.rglob("*") if file.is_file()}
    assert len(written) >= 4
    assert [file for file, data in written.items() if CANARY.encode() in data or typed.encode() in data] == []
    assert CANARY not in screen.getvalue() and typed not in screen.getvalue()
    assert composed.config.data.system_prompt == CANARY


def test_a_refusal_and_a_plan_hide_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    assert main(["recipe=arithmetic/grpo", "data.train_files=[${oc.env:CANARY_TOKEN}]"]) == 2
    assert main(["recipe=arithmetic/grpo", "data.system_prompt=${oc.env:CANARY_TOKEN}", "--cfg"]) == 0
    said = capsys.readouterr()
    assert CANARY not in said.out + said.err
    assert "there is no file" in said.err
