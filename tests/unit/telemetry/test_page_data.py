"""What the page shows, as numbers: intervals, changes, configuration, state, and chunks of rollouts."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_folders import group, make_run
from tokenizers import Tokenizer, decoders, models, normalizers

from grpo_rl.__main__ import main
from grpo_rl.config import secrets
from grpo_rl.rewards.validation_metrics import validation_metrics
from grpo_rl.telemetry.diagnosis.run_record import RunRecord
from grpo_rl.telemetry.metrics.metrics_file import MetricsFile
from grpo_rl.telemetry.metrics.validation import validation_score
from grpo_rl.telemetry.page import page_file, rollout_chunks, run_data
from grpo_rl.telemetry.page.beside_run import PageBeside
from grpo_rl.telemetry.page.rollout_chunks import chunks_of, pieces_of, read_chunk, unpack
from grpo_rl.telemetry.report import report_text
from grpo_rl.telemetry.rollout_log import read_rollouts, write_rollouts
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal import step_line
from grpo_rl.types import Prompt, Rollout


def test_the_interval_of_single_answers_is_wilsons() -> None:
    # Wilson 1927, for 8 of 10: 0.8 [0.490, 0.943].
    mean, low, high = run_data.interval([[1.0]] * 8 + [[0.0]] * 2, single=True)
    assert mean == pytest.approx(0.8) and low == pytest.approx(0.4902, abs=1e-4) and high == pytest.approx(0.9433, abs=1e-4)
    assert run_data.interval([[1.0]] * 10, single=True)[1:] == (pytest.approx(0.7225, abs=1e-4), pytest.approx(1.0))


def test_the_interval_takes_prompts_as_independent_and_responses_to_one_prompt_not() -> None:
    prompts = [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
    mean, low, high = run_data.interval(prompts, single=False)
    error = 1.0 / math.sqrt(3)  # the standard deviation of 0, 2 and 1 is 1
    assert (mean, high - mean, mean - low) == pytest.approx((1.0, 1.96 * error, 1.96 * error), rel=1e-3)


def test_the_change_of_a_validation_is_paired_by_prompt(tmp_path: Path) -> None:
    # Every prompt is better by about one half: the change is nearly certain, however different the prompts are.
    index = {
        "sources": ["a"],
        "steps": [
            {"kind": "val", "step": 0, "groups": [[p, 0, [float(p)], [1], [], []] for p in range(5)]},
            {"kind": "val", "step": 8, "groups": [[p, 0, [p + 0.5 + 0.01 * (p % 2)], [1], [], []] for p in reversed(range(5))]},
        ],
    }
    found = run_data.change(index, "a")
    assert found is not None and found["prompts"] == 5
    error = 0.01 * math.sqrt(0.3) / math.sqrt(5)  # differences 0.5, 0.51, 0.5, 0.51, 0.5
    assert (found["mean"], found["high"] - found["low"]) == (pytest.approx(0.504), pytest.approx(2 * 1.96 * error, rel=1e-3))
    index["steps"][1]["groups"] = index["steps"][0]["groups"]
    assert run_data.change(index, "a") == {"mean": 0.0, "low": None, "high": None, "prompts": 5}
    index["steps"][1]["groups"] = []
    assert run_data.change(index, "a") is None


def test_metrics_become_columns_over_steps_tokens_and_seconds() -> None:
    records = [{"step": 0, "val/a": 1.0}, {"step": 1, "perf/total_num_tokens": 5.0, "timing_s/step": 2.0, "x": math.nan}]
    records.append({"step": 2, "perf/total_num_tokens": 7.0, "timing_s/step": 3.0, "x": math.inf, "alarm/kl_runaway": 1.0})
    found = run_data.columns(records)
    assert (found["steps"], found["tokens"], found["seconds"]) == ([0, 1, 2], [0, 5, 12], [0.0, 2.0, 5.0])
    assert found["columns"]["x"] == [None, None, None] and found["columns"]["val/a"] == [1.0, None, None]
    assert run_data.alarms(records) == [[2, "kl_runaway"]] and "alarm/kl_runaway" not in found["columns"]


def test_long_curves_are_thinned_and_keep_every_validation_and_the_last_step() -> None:
    records = [{"step": step, "x": float(step)} | ({"val/a": 1.0} if step % 1001 == 0 else {}) for step in range(9000)]
    found = run_data.columns(records)
    assert found["every"] == 3 and len(found["steps"]) < run_data.MOST_POINTS
    assert {1001, 2002, 8999} <= set(found["steps"])


def test_the_configuration_names_what_differs_and_the_commands_that_repeat_and_resume(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a_run", "trainer.total_training_steps=8", "data.train_batch_size=16")
    record = run_data.RunRecord.of_folder(run)
    found = run_data.configuration(run, record.config)
    by_key = {one["key"]: one for one in found["different"]}
    assert by_key["data.train_batch_size"] == {"key": "data.train_batch_size", "value": "16", "default": "1024", "named": True}
    assert "trainer.default_local_dir" in by_key and "trainer.project_name" not in by_key
    assert not by_key["actor_rollout_ref.model.path"]["named"]  # the recipe's
    place = f"data.train_batch_size=16 trainer.default_local_dir={tmp_path} trainer.experiment_name={run.name}"
    assert found["resume"].endswith(f" {place}") and found["repeat"] == f"{found['resume']}_again"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is small enough to have its rollouts in the page."""
    monkeypatch.setattr(rollout_chunks, "INLINE_BYTES", 0)


def test_small_runs_have_their_rollouts_in_the_page_and_large_ones_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    index, inlined = chunks_of(run, tmp_path / "files")
    assert inlined is not None and not (tmp_path / "files").exists()
    monkeypatch.setattr(rollout_chunks, "INLINE_BYTES", 0)
    assert chunks_of(run, tmp_path / "files") == (index, None)
    for name, packed in inlined.items():
        assert read_chunk(tmp_path / "files", name) == unpack(packed)
    groups = unpack(inlined["rollouts_8_0"])
    logged = read_rollouts(run / "rollouts/step_8.jsonl")
    assert [one["response"] for entry in groups for one in entry["rollouts"]] == [record["response"] for record in logged]


def test_only_new_steps_are_packed_again_and_steps_that_went_are_removed(
    tmp_path: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = make_run(tmp_path), tmp_path / "files"
    first, _ = chunks_of(run, folder, keep=True)
    read: list[str] = []
    monkeypatch.setattr(rollout_chunks, "read_rollouts", lambda path: read.append(path.name) or read_rollouts(path))
    assert chunks_of(run, folder, keep=True)[0]["steps"] == first["steps"] and read == []
    # A resumed run writes its last step anew, without the one after it.
    (run / "rollouts/step_8.jsonl").unlink()
    records = (run / "rollouts/step_7.jsonl").read_text().splitlines()
    (run / "rollouts/step_7.jsonl").write_text("\n".join(records[:4]) + "\n")
    index, _ = chunks_of(run, folder, keep=True)
    assert read == ["step_7.jsonl"] and not (folder / "rollouts_8_0.js").exists()
    assert [one["num"] for one in index["steps"] if one["kind"] == "rollouts"] == [24] * 6 + [4]


def test_a_damaged_step_and_a_damaged_index_cost_nothing_else(tmp_path: Path, beside: None) -> None:
    run, folder = make_run(tmp_path), tmp_path / "files"
    (run / "rollouts/step_3.jsonl").write_text('{"prompt": "a"')
    chunks_of(run, folder)
    (folder / "index.js").write_text("__chunk(")
    index, _ = chunks_of(run, folder, keep=True)
    assert [one["step"] for one in index["steps"] if one["kind"] == "rollouts"] == [1, 2, 4, 5, 6, 7, 8]


def test_scripts_that_came_with_a_folder_are_written_anew(tmp_path: Path, beside: None) -> None:
    run = make_run(tmp_path, num_steps=2)
    page_file.write_page([run])
    chunks = sorted((run / "page_files").glob("*.js"))
    own = [chunk.read_text() for chunk in chunks]
    assert len(chunks) == 4  # of two steps and a validation, and the index, which has size and time of their logs
    for chunk in chunks[1:]:  # the index stays as it was
        chunk.write_text("alert(1);" + chunk.read_text())
    page_file.write_page([run])
    assert [chunk.read_text() for chunk in chunks] == own
    # A run that goes on in a folder from elsewhere keeps nothing of it either.
    chunks[1].write_text("alert(1);")
    PageBeside(run, every=1)
    page_file.write_page([run], keep=True)
    assert [chunk.read_text() for chunk in chunks] == own


def test_tokens_are_logged_for_the_first_groups_and_shown_with_their_texts(tmp_path: Path) -> None:
    from grpo_rl.models.builtin import build

    run = make_run(tmp_path, num_steps=1)
    build("builtin:arithmetic", run / "model")
    pieces = pieces_of(run, {})
    assert pieces is not None
    ids = Tokenizer.from_file(str(run / "model/tokenizer.json")).encode("12+7", add_special_tokens=False).ids
    assert "".join(pieces(ids)) == "12+7" and len(pieces(ids)) == len(ids)
    rollouts = [one for row in (1, 2, 3) for one in group(1, row, 2)]
    write_rollouts(run / "rollouts/step_1.jsonl", rollouts, token_groups=2)
    assert ["token_ids" in one for one in read_rollouts(run / "rollouts/step_1.jsonl")] == [True] * 4 + [False] * 2
    _, inlined = chunks_of(run, tmp_path / "files", pieces)
    assert inlined is not None
    first, _, last = unpack(inlined["rollouts_1_0"])
    assert len(first["rollouts"][0]["tokens"]) == 3 and first["rollouts"][0]["logprobs"] == [-0.1, -2.0, -0.01]
    assert "tokens" not in last["rollouts"][0]


def sentence_piece() -> Tokenizer:
    """A tokenizer as the files of Llama 2 and Mistral have it: words begin with a space, which the first one loses."""
    words = ["\u2581", *"Theparkt", "\u2581t", "\u2581th", "\u2581the", "\u2581p"]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("\u2581", "p")]
    vocab = {part: place for place, part in enumerate(dict.fromkeys([f"<0x{byte:02X}>" for byte in range(256)] + words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    stripped = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *stripped])
    return tokenizer


def test_pieces_join_to_the_response(tmp_path: Path) -> None:
    tokenizer = sentence_piece()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    pieces = pieces_of(tmp_path, {})
    assert pieces is not None
    text = "The park the  the\n\tpark: 漢字 é 👩\u200d🚀 park"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces(ids)) == text and len(pieces(ids)) == len(ids)
    assert sum(bool(piece) for piece in pieces(ids)) > len(text.split()) and " the" in pieces(ids)
    for end in range(len(ids)):  # a response may be cut within a character
        assert "".join(pieces(ids[:end])) == tokenizer.decode(ids[:end], skip_special_tokens=False)
    assert pieces([-1]) == []


def test_the_tokens_of_a_response_with_a_secret_are_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", {"hush-hush-4711"})
    rollouts = group(1, 1, 2, lambda step, row, sample: "the key is hush-hush-4711" if sample else "2")
    write_rollouts(tmp_path / "step_1.jsonl", rollouts, token_groups=1)
    first, second = read_rollouts(tmp_path / "step_1.jsonl")
    assert "token_ids" in first and "token_ids" not in second and "hush" not in json.dumps(second)


def test_the_command_writes_the_page_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path, "one", num_steps=2), make_run(tmp_path, "two", num_steps=2)
    assert main(["page", str(one)]) == 0
    assert capsys.readouterr().out == f"page: {one}/page.html\n" and (one / "page.html").stat().st_size > 10_000
    assert main(["page", str(one), str(two), "--out", str(tmp_path / "both.html")]) == 0
    assert '"name":"one"' in (tmp_path / "both.html").read_text() and '"name":"two"' in (tmp_path / "both.html").read_text()
    for out, said in (("page.txt", "ends in .html"), ("/proc/nothing/page.html", "cannot be written")):
        assert main(["page", str(one), "--out", out]) == 2 and said in capsys.readouterr().err


def test_rows_with_one_text_are_different_prompts_on_every_screen(tmp_path: Path) -> None:
    # Games with one opening; the row of a prompt is what its uid ends in, in every epoch and validation.
    def games(step: int, uid: str, rewards: Sequence[float]) -> list[Rollout]:
        return [
            Rollout(
                Prompt(f"{uid}{row}", (1,), "your move", "game", "x"), 0, (2,), (-0.1,), "stop", ((step, 1),), f"{step}/{row}", reward
            )
            for row, reward in enumerate(rewards)
        ]  # fmt: skip

    run_dir = RunDir.create(tmp_path, "r")
    validations = {0: [0.0, 0.5, 0.0, 0.5] * 2, 8: [0.5, 0.0, 0.0, 0.5] * 2}
    file = MetricsFile(run_dir.metrics_file)
    for step in range(9):
        if step in validations:
            write_rollouts(run_dir.val / f"step_{step}.jsonl", games(step, "val-", validations[step]))
        if step:
            write_rollouts(run_dir.rollouts / f"step_{step}.jsonl", games(step, f"e{step}-r", [0.0, 1.0]))
        file.log(step, ({"reward/mean": 0.5} if step else {}) | ({"val/game/mean@1": 0.25} if step in validations else {}))
    file.close()
    index, _ = chunks_of(run_dir.path, tmp_path / "files")
    change = run_data.change(index, "game")
    assert change is not None and (change["mean"], change["prompts"]) == (0.0, 8)
    trained = [{group[0] for group in entry["groups"]} for entry in index["steps"] if entry["kind"] == "rollouts"]
    assert len(trained) == 8 and all(prompts == trained[0] and len(prompts) == 2 for prompts in trained)
    assert [row for _, text, row in index["prompts"] if text == "your move"][-1] == "row 7"
    samples = re.findall(r"(?:before|after) .*\] \d/(\d)", report_text(run_dir))
    assert len(samples) == 8 and samples[::2] == samples[1::2]


def test_the_validation_is_the_same_named_number_on_every_screen(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, "r")
    sources = {"game": "val/my/game", "sums": "val/sums"}
    values: dict[int, dict[str, float]] = {}
    file = MetricsFile(run_dir.metrics_file)
    for step, won in {0: 1, 9: 4}.items():
        # A won game is accurate; one that is lost has half of a reward. Failed rewards count as 0.
        rollouts = [
            Rollout(
                Prompt(f"val-{row}", (1,), f"{row}", source, "x"), 0, (2,), (-0.1,), "stop", ((step, 1),), "x",
                None if row == 7 else 1.0 if row % 8 < won else 0.5, {} if row == 7 else {"acc": float(row % 8 < won)},
                "timeout" if row == 7 else None,
            )
            for row, source in enumerate(["my/game"] * 8 + ["sums"] * 8)
        ]  # fmt: skip
        write_rollouts(run_dir.val / f"step_{step}.jsonl", rollouts)
        values[step] = validation_metrics(rollouts, 1)
        file.log(step, values[step] | ({"reward/mean": 0.5} if step else {}))
    file.close()
    before, after = (values[step][f"{sources['game']}/mean@1"] for step in (0, 9))
    reward = values[9][f"{sources['game']}/reward"]
    assert (before, after, reward) == (0.125, 0.5, (4 + 3 * 0.5) / 8)
    found = {one["name"]: one for one in run_data.run_data(run_dir.path, tmp_path / "files")["results"]}
    shown = found["validation my/game/mean@1"]
    assert (shown["before"]["value"], shown["after"]["value"], shown["change"]["mean"]) == (before, after, after - before)
    assert found["validation my/game/reward"]["after"]["value"] == reward
    table = [line.split() for line in report_text(run_dir).splitlines()]
    assert ["validation", "my/game/mean@1", "0.125", "0.500", "+0.375"] in table
    assert ["validation", "my/game/reward", "0.500", f"{reward:.3f}", "+0.188"] in table
    assert RunRecord.of_folder(run_dir.path).validation_keys == ["val/my/game/mean@1", "val/sums/mean@1"]
    # The console has the mean of the sources, and so has the page.
    mean = found["validation mean of 2 sources, mean@1"]["after"]
    assert f"valid: mean@1  {mean['value']:.3f}, reward" in "".join(text for text, _ in step_line.line(9, 9, values[9]))
    assert mean["value"] == validation_score(values[9])


def test_a_strangers_run_has_nothing_read_outside_of_it_and_a_panic_costs_the_tokens_only(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (run / "model").mkdir(parents=True)
    sentence_piece().save(str(outside / "tokenizer.json"))
    status = {"tokenizer": str(outside)}
    assert pieces_of(run, status) is None and pieces_of(run, status, trusted=True) is not None
    broken = json.loads((outside / "tokenizer.json").read_text())
    # A pattern that the library in Rust panics at.
    broken["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "["}, "behavior": "Isolated", "invert": False}
    (run / "model" / "tokenizer.json").write_text(json.dumps(broken))
    pieces = pieces_of(run, status)
    assert pieces is not None and pieces([1, 2]) == []
