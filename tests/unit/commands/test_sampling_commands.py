"""The commands that sample: settings of a run, rows that generate writes, and the prompts of a conversation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from run_folders import group, make_run

from grpo_rl.commands.chat import Conversation, _lines
from grpo_rl.commands.generate import _has_ground_truth, rows_of
from grpo_rl.commands.sampling_plan import EPISODES, NO_DATA, data_of_run, data_settings, sampling_plan, settings_of_run
from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import BarePromptDataset
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.sources.tables import write_rows
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.evaluation.response_file import settle
from grpo_rl.models import builtin
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.plan.decisions import Plan
from grpo_rl.telemetry.rollout_log import record_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs", "games", "actor_rollout_ref.rollout.name=hf", recipe="agents/word_game")


def planned(run: Path, *words: str) -> tuple[Plan, dict[str, Any]]:
    keys = settings_of_run(run) | {"data.val_files": data_of_run(run), "trainer.device": "cpu"}
    model = builtin.build("builtin:arithmetic", run / "model")
    return sampling_plan(keys, words, str(model), run / "logs" / "settings.yaml")


def test_an_evaluation_plays_the_episodes_of_the_run_with_any_processes(run: Path) -> None:
    plan, settings = planned(run)
    assert plan.plays_episodes and plan.reward.scores
    own = plan.config.actor_rollout_ref.rollout.multi_turn
    assert own.environment.name == "word_game" and own.environment.options == {"turns": 8}
    assert settings_of_run(run, "vllm")[f"{EPISODES}environment.name"] == "word_game", "with any engine"
    assert planned(run, f"{EPISODES}environment.num_workers=1")[1] == settings
    assert planned(run, f"{EPISODES}environment.options={{turns: 3}}")[1] != settings


def test_scores_are_kept_only_while_the_reward_s_file_what_it_imports_and_the_data_are_the_same(tmp_path: Path) -> None:
    reward, helper, rows = tmp_path / "rw.py", tmp_path / "right.py", tmp_path / "rows.jsonl"
    text = "from right import right\n\ndef extract(data_source, solution_str, ground_truth, extra_info=None):\n    return right()\n"
    reward.write_text(text)
    helper.write_text("def right():\n    return 1.0\n")
    row = '{"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}\n'
    rows.write_text(row * 2)
    run = make_run(tmp_path / "runs", "own", "actor_rollout_ref.rollout.name=hf", f"reward.functions=[{reward}:extract]")
    model = str(builtin.build("builtin:arithmetic", run / "model"))
    keys = settings_of_run(run, trusted=True) | {"data.val_files": [str(rows)], "trainer.device": "cpu"}

    def settles() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))
            plan, settings = sampling_plan(keys, [], model, run / "logs" / "settings.yaml")
        settle(tmp_path / "evaluation", settings | data_settings(plan.config.data))

    settles()
    settles()
    for file, content in ((reward, text + "# another\n"), (helper, "def right():\n    return 0.5\n"), (rows, row * 3)):
        before = file.read_text()
        file.write_text(content)
        with pytest.raises(
            ConfigError, match=r"has responses with other settings; give the same again, or another --output"
        ) as refused:
            settles()
        assert file.name in str(refused.value)
        file.write_text(before)
    settles()


def test_in_a_conversation_a_person_is_the_environment(run: Path) -> None:
    found = settings_of_run(run, without=("reward.", EPISODES))
    assert found["actor_rollout_ref.rollout.name"] == "hf"
    assert not any(key.startswith((EPISODES, "reward.")) for key in found)


def test_a_run_with_columns_of_its_own_needs_no_rows_for_a_conversation(tmp_path: Path) -> None:
    """`chat` has no rows, and `generate` looks into its file before it knows whether they have a ground truth."""
    columns = {"data.prompt_key": "question", "data.ground_truth_key": "age", "data.data_source": "people"}
    words = [f"{key}={value}" for key, value in columns.items()]
    run = make_run(tmp_path / "runs", "own", "actor_rollout_ref.rollout.name=hf", "reward.functions=[exact_match]", *words)
    keys = settings_of_run(run, without=("reward.", EPISODES)) | {"trainer.device": "cpu"}
    assert columns.items() <= keys.items()
    model = str(builtin.build("builtin:arithmetic", run / "model"))
    plan, _ = sampling_plan(keys | {"data.val_files": [NO_DATA]}, [], model, run / "logs" / "settings.yaml")
    assert plan.config.data.prompt_key == "question"

    rows = tmp_path / "people.jsonl"
    rows.write_text('{"question": "Ada is 36.", "age": 36}\n')
    assert _has_ground_truth([str(rows)], plan.config.data)
    scored, _ = sampling_plan(settings_of_run(run) | {"data.val_files": [str(rows)]}, [], model, run / "logs" / "settings.yaml")
    assert scored.reward.scores
    rows.write_text('{"query": "Ada is 36.", "age": 36}\n')
    with pytest.raises(DataError, match="question"):
        sampling_plan(settings_of_run(run) | {"data.val_files": [str(rows)]}, [], model, run / "logs" / "settings.yaml")


def test_all_of_them_are_rows_without_what_is_the_commands_own(tmp_path: Path) -> None:
    found = rows_of([[record_of(one) | {"row": row} for one in group(1, row, 4)] for row in range(2)])
    assert len(found) == 8 and {"prompt", "response", "reward", "ground_truth", "finish_reason"} <= found[0].keys()
    assert not {"row", "advantage"} & found[0].keys()
    write_rows(tmp_path / "all.parquet", found)
    mixed = [dict(found[0], ground_truth="2"), dict(found[1], ground_truth={"target": 3})]
    with pytest.raises(DataError, match=r"give a \.jsonl"):
        write_rows(tmp_path / "mixed.parquet", mixed)
    assert not (tmp_path / "mixed.parquet").exists()


def test_rows_with_a_prompt_alone_are_answered_without_a_score(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1="}\n{"prompt": [{"role": "user", "content": "2+2="}]}\n{"prompt": "3+3="}\n')
    assert not _has_ground_truth([str(path)], DataConfig()) and _has_ground_truth(["task:arithmetic?num_rows=2"], DataConfig())
    found = BarePromptDataset([str(path)], DataConfig(), build_tokenizer(128), max_samples=2).checked()
    assert [found.prompt(row, "u").text for row in range(len(found))] == ["1+1=", "<|user|>2+2=<|assistant|>"]
    assert found.prompt(0, "u").data_source == "prompts"
    with pytest.raises(DataError, match=r"more than data\.max_prompt_length=3"):
        BarePromptDataset([str(path)], DataConfig(max_prompt_length=3), build_tokenizer(128)).checked()


def conversation(longest: int = 200, *, template: bool = True) -> Conversation:
    tokenizer = build_tokenizer(128)
    if not template:
        tokenizer.chat_template = None
    return Conversation(Renderer(DataConfig(), tokenizer), longest)


def test_turns_are_rendered_by_the_template() -> None:
    talk = conversation()
    talk.system = "add"
    assert talk.ask("1+1=", "a").text == "<|system|>add<|user|>1+1=<|assistant|>"
    talk.answered("2")
    prompt = talk.ask("2+2=", "b")
    assert prompt.text == "<|system|>add<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>"
    assert len(prompt.token_ids) == 1 + 3 + 1 + 4 + 1 + 1 + 1 + 1 + 4 + 1
    talk.turns.clear()
    assert talk.ask("3+3=", "c").text == "<|system|>add<|user|>3+3=<|assistant|>"


def test_without_a_template_the_text_is_continued() -> None:
    talk = conversation(template=False)
    assert talk.ask("1+1=", "a").text == "1+1="
    talk.answered("2")
    assert talk.ask(" 2+2=", "b").text == "1+1=2 2+2="


def test_a_turn_for_which_there_is_no_room_is_refused_and_forgotten() -> None:
    talk = conversation(longest=16)
    talk.ask("1+1=", "a")
    talk.answered("2")
    with pytest.raises(ConfigError, match=r"room for 1 to 16: /reset"):
        talk.ask("9" * 40, "d")
    assert talk.ask("2+2=", "b").text.startswith("<|user|>1+1=")


def test_a_pipe_is_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n/quit\n"))
    assert list(_lines()) == ["1+1=", "/quit"]
