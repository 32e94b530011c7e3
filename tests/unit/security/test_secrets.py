"""A canary in the environment, the command line and errors turns up in nothing that is written."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_rl.config import secrets
from grpo_rl.config.compose import compose
from grpo_rl.config.secrets import HIDDEN, HiddenLines, HidingStream, is_secret_name, redact, scrub
from grpo_rl.main import main
from grpo_rl.rewards.contract import ERROR, RewardFailure
from grpo_rl.telemetry.rollout_log import write_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.status import Status
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.types import Prompt, Rollout

CANARY = "canary-5e0f2c91ab"


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(secrets, "_known", set())
    yield


def test_names_of_secrets_are_known_and_others_left_alone() -> None:
    secret = ["HF_TOKEN", "WANDB_API_KEY", "apiKey", "db.password", "AWS_SECRET_ACCESS_KEY", "client-secret"]
    others = ["max_tokens", "TOKENIZERS_PARALLELISM", "KEYBOARD", "monkey", "HOME", "n"]
    assert [name for name in [*secret, *others] if is_secret_name(name)] == secret


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


FORMS = ["/ab+cd/efgh==", "<tag>secret", "${half", "184467440737", "hunter2", 'pass"w\\ord', "pässwörd-ß", "it's-mine-7"]


@pytest.mark.parametrize("secret", FORMS)
def test_a_secret_of_any_form_is_in_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("FORM_TOKEN", secret)
    composed = compose(["recipe=arithmetic/grpo", "data.system_prompt=${oc.env:FORM_TOKEN}"])
    run_dir = RunDir.create(tmp_path, "r")
    run_dir.write_config(composed.yaml(), composed.overrides)
    Status(run_dir.status_file).end(ValueError(f"bad token {secret}, again {[secret]}"))
    for file in (run_dir.status_file, run_dir.config_file):
        content = file.read_text()
        assert not any(form in content for form in (secret, json.dumps(secret)[1:-1])), content
        assert HIDDEN in content or file == run_dir.config_file
    assert "bad token" in json.loads(run_dir.status_file.read_text())["error"]["message"]


def test_words_numbers_and_paths_that_only_look_like_secrets_are_left_in_texts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RAY_AUTH_MODE": "token", "USE_AUTH": "true", "KEY": "2024", "SSH_AUTH_SOCK": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIN_KEY", "hunter2")
    secrets.remember_environment()
    text = f"the token is true in 2024 at {tmp_path}/a, huntera, hunter25, step 12024"
    assert redact(text) == text and redact("hunter2: no, 'hunter2'") == f"{HIDDEN}: no, '{HIDDEN}'"


def test_an_escaped_expression_and_secrets_in_lists_stay_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        'data: {system_prompt: "\\\\${oc.env:CANARY_TOKEN}"}\n'
        "reward: {functions: [format], function_kwargs: {format: {keys: [a], servers: [{api_key: typed-in-a-list, n: 1}, "
        '{token: [one-of-two-tokens, "${oc.env:CANARY_TOKEN}"]}], pin: {password: 8675309}}}}\n'
    )
    composed = compose([f"recipe={recipe}"]).yaml()
    for secret in (CANARY, "typed-in-a-list", "one-of-two-tokens", "8675309"):
        assert secret not in composed
    assert "n: 1" in composed and "oc.env:CANARY_TOKEN" in composed
    again = tmp_path / "again.yaml"
    again.write_text(composed)
    assert CANARY not in compose([f"recipe={again}"]).yaml()


def test_a_refusal_and_a_plan_hide_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CANARY_TOKEN", CANARY)
    assert main(["recipe=arithmetic/grpo", "data.train_files=[${oc.env:CANARY_TOKEN}]"]) == 2
    assert main(["recipe=arithmetic/grpo", "data.system_prompt=${oc.env:CANARY_TOKEN}", "--cfg"]) == 0
    said = capsys.readouterr()
    assert CANARY not in said.out + said.err
    assert "there is no file" in said.err


def test_the_judges_key_is_a_secret_whatever_its_variable_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE", CANARY)
    compose(["recipe=arithmetic/grpo", "reward.judge.base_url=http://127.0.0.1:9/v1", "reward.judge.api_key_env=MY_JUDGE"])
    assert redact(f"refused {CANARY}") == f"refused {HIDDEN}"


def test_output_in_pieces_has_no_secret_even_where_one_is_cut_in_two() -> None:
    secrets.remember([CANARY])
    lines = HiddenLines()
    out = lines.feed(f"a {CANARY[:7]}".encode()) + lines.feed(f"{CANARY[7:]} b\nc \xff".encode()) + lines.rest()
    assert out == f"a {HIDDEN} b\nc \xff".encode()
    assert len(lines.feed(b"x" * 100_000)) > 99_000, "a line without an end is not kept for ever"


def test_a_stream_hides_what_is_printed_and_is_the_other_one_for_the_rest() -> None:
    secrets.remember([CANARY])
    screen = io.StringIO()
    stream: Any = HidingStream(screen)
    print("key", CANARY, file=stream)
    stream.writelines([f"{CANARY}\n"])
    assert screen.getvalue() == stream.getvalue() == f"key {HIDDEN}\n{HIDDEN}\n"


def test_files_are_written_anew_without_secrets_and_others_are_not_touched(tmp_path: Path) -> None:
    secrets.remember([CANARY])
    leaking, clean, absent = tmp_path / "a.log", tmp_path / "b.log", tmp_path / "c.log"
    # The secret lies across the pieces in which the file is read.
    leaking.write_bytes(b"x" * (2**20 - 5) + f"{CANARY}\nrest".encode())
    clean.write_text("nothing")
    before = (clean.stat().st_ino, clean.stat().st_mtime_ns)
    assert scrub([leaking, clean, absent]) == [leaking]
    assert leaking.read_bytes() == b"x" * (2**20 - 5) + f"{HIDDEN}\nrest".encode()
    assert (clean.stat().st_ino, clean.stat().st_mtime_ns) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "b.log"]


def test_a_rollout_and_a_failed_reward_hide_secrets_also_where_they_are_cut_short(tmp_path: Path) -> None:
    secret = 'pass"wörd-123'
    secrets.remember([secret])
    # The middle of a long cause is left out: a secret there must not be left in halves.
    failure = RewardFailure(ERROR, "x" * 995 + secret + "y" * 2000)
    prompt = Prompt("u", (1,), f"say {secret}", "test", secret)
    rollout = Rollout(prompt, 0, (1,), (0.0,), "stop", ((1, 1),), text="", failure=failure.kind, failure_cause=failure.cause)
    (line,) = write_rollouts(tmp_path / "r.jsonl", [rollout]).read_text().splitlines()
    record = json.loads(line)
    assert (record["prompt"], record["ground_truth"]) == (f"say {HIDDEN}", HIDDEN)
    assert 'pass"' not in failure.cause and "pass" not in line


@pytest.mark.parametrize("text", ["x" * 80_000, "?" + "a" * 80_000, "://a:" * 16_000, "sk-" * 27_000, "a://" + "b:" * 40_000])
def test_a_long_text_is_searched_in_time_that_grows_with_its_length(text: str) -> None:
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 0.5
