"""Tool files and interaction files in verl's form, and the tool and the environment that stand in for verl's own of GSM8K."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from grpo_rl.config.compose import compose
from grpo_rl.envs.contract import Start
from grpo_rl.envs.environments import CLASSES, TOOLS, Named, interaction_file, made, schema_of, tools_of
from grpo_rl.envs.setup import EpisodeSetup
from grpo_rl.envs.tools.number_tools import CheckAnswer
from grpo_rl.errors import ConfigError

R = "actor_rollout_ref.rollout"
GSM8K = """
tools:
  - class_name: "{gsm8k}"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Scores an answer: 1.0 where it is right, 0.0 where it is not."
        parameters:
          type: "object"
          properties:
            answer: {{type: "string", description: "the answer in digits"}}
          required: ["answer"]
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    return file


def test_verls_tool_files_are_read_with_their_options_and_schemas_once_the_class_is_ours(tmp_path: Path) -> None:
    (checker,) = tools_of(str(written(tmp_path, GSM8K.format(gsm8k="check_answer"))), {})
    tool = made(checker, TOOLS, "tool")
    assert isinstance(tool, CheckAnswer) and schema_of(checker, tool)["name"] == "calc_gsm8k_reward"


@pytest.mark.parametrize("path", [f"verl.tools.some_module.{name}" for name in CLASSES] + ["recipe.mine.Tool"])
def test_classes_of_verls_are_answered_with_ours(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tools_of(str(written(tmp_path, GSM8K.format(gsm8k=path))), {})
    (problem,) = raised.value.problems
    assert f"tools[0].class_name={path}" in problem and "write class_name: " in problem
    assert CLASSES.get(path.rpartition(".")[2], "file.py:Class") in problem


@pytest.mark.parametrize(
    ("method", "kind", "own"), [("execute", "tool", "begin, call"), ("generate_response", "environment", "reset, step")]
)
def test_a_class_that_was_written_for_verl_is_answered_with_the_contract(
    tmp_path: Path, method: str, kind: str, own: str
) -> None:
    (tmp_path / "theirs.py").write_text(
        f"class Mine:\n    def __init__(self, config, schema=None): ...\n    async def {method}(self): ...\n"
    )
    with pytest.raises(ConfigError, match=own):
        made(Named(f"{tmp_path / 'theirs.py'}:Mine"), {}, kind)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("interaction: []", "has 0 interactions"),
        ("interaction: [{name: a, class_name: gsm8k}, {name: b, class_name: gsm8k}]", "2 interactions: gsm8k, gsm8k"),
        ("interaction: [{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}]", "write class_name: gsm8k"),
        ("interactions: [{class_name: gsm8k}]", "expected `interaction:`"),
    ],
)
def test_an_interaction_file_names_one_environment_of_ours(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="interaction_config_path") as raised:
        interaction_file(str(written(tmp_path, text)))
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("name", "instead"), [("retool", "hermes"), ("llama3", "llama3_json"), ("gpt-oss", "file.py:function")]
)
def test_verls_other_formats_are_answered_with_what_is_here(name: str, instead: str) -> None:
    words = [f"{R}.multi_turn.enable=true", f"{R}.multi_turn.tools={{calculator: {{}}}}"]
    with pytest.raises(ConfigError, match=instead):
        EpisodeSetup.of(compose([*words, f"{R}.multi_turn.format={name}"]).config)
    assert EpisodeSetup.of(compose([*words, f"{R}.multi_turn.format=qwen"]).config) is not None


@pytest.mark.parametrize("schema", ["{type: text}", "{$ref: http://127.0.0.1:9/schema.json}"])
def test_a_tool_whose_schema_is_none_is_refused_before_a_run(tmp_path: Path, schema: str) -> None:
    tool = f"{{class_name: calculator, tool_schema: {{function: {{name: add, parameters: {schema}}}}}}}"
    path = written(tmp_path, f"tools: [{tool}]")
    words = [f"{R}.multi_turn.enable=true", f"{R}.multi_turn.tool_config_path={path}"]
    with pytest.raises(ConfigError, match=r"the schema of a tool: .*(text|127\.0\.0\.1)"):
        EpisodeSetup.of(compose(words).config)


def test_an_answer_costs_unless_it_is_the_first_right_one() -> None:
    async def course() -> list[tuple[str, float | None]]:
        tool = CheckAnswer()
        extra = {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}}
        await tool.begin(Start("r", "openai/gsm8k", (), None, extra))
        return [(one.text, one.reward) for one in [await tool.call({"answer": text}) for text in ("7", "#### 72", "72", "")]]

    assert asyncio.run(course()) == [
        ("7 is wrong.", -0.05),
        ("#### 72 is right.", 0.0),
        ("72 is right.", -0.05),
        (" is wrong.", -0.05),
    ]
