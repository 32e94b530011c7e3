"""A model folder that brings code: nothing of it runs unless the user himself typed that it may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_rl.config.checks.all_rules import check
from grpo_rl.config.compose import compose
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError
from grpo_rl.main import main

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
OWN_CODE = "actor_rollout_ref.model.trust_remote_code"


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    folder = tmp_path / "trap"
    folder.mkdir()
    code = f"from pathlib import Path\nPath({str(tmp_path / 'CANARY')!r}).touch()\n"
    for name in ("configuration_x.py", "modeling_x.py", "tokenization_x.py"):
        (folder / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "critic.model.path"])
def test_a_folder_with_code_is_refused_and_its_code_not_run(
    key: str, trap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=arithmetic/grpo", f"{key}={trap}"]
    assert main([*words, "algorithm.adv_estimator=gae"] if key.startswith("critic") else words) == 2
    said = capsys.readouterr().err
    assert f"{key}={trap}: its " in said and OWN_CODE in said
    assert not (tmp_path / "CANARY").exists()


@pytest.mark.parametrize("key", ["model_path", "tokenizer_path"])
def test_a_reward_model_with_code_is_refused_as_the_policy_is(key: str, trap: Path, tmp_path: Path) -> None:
    own, switch = f"reward.reward_model.{key}", "reward.reward_model.trust_remote_code"
    words = ["recipe=arithmetic/grpo", "reward.reward_model.enable=true", f"{own}={trap}"]
    said = [line for line in check(compose(words).config, CPU) if line.startswith(own) and "auto_map" in line]
    assert len(said) == 2 if key == "model_path" else said
    assert all(f"set {switch}=true on the command line" in line for line in said)
    # What the policy may do is no word for the reward model.
    assert any("auto_map" in line for line in check(compose([*words, f"{OWN_CODE}=true"]).config, CPU))
    assert not any("auto_map" in line for line in check(compose([*words, f"{switch}=true"]).config, CPU))
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(f"reward: {{reward_model: {{enable: true, {key}: {trap}, trust_remote_code: true}}}}")
    with pytest.raises(ConfigError, match=f"{switch}=true: stands in the recipe"):
        compose([f"recipe={recipe}"])
    assert not (tmp_path / "CANARY").exists()


def test_a_recipe_cannot_allow_code_and_the_user_can(trap: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(
        f"actor_rollout_ref: {{model: {{path: {trap}, trust_remote_code: true}}}}\ndata: {{train_files: ['task:arithmetic']}}"
    )
    with pytest.raises(ConfigError, match="has to be typed"):
        compose([f"recipe={recipe}"])
    config = compose([f"recipe={recipe}", f"{OWN_CODE}=true"]).config
    assert config.actor_rollout_ref.model.trust_remote_code
    assert not [problem for problem in check(config, CPU) if "auto_map" in problem]
    assert not (tmp_path / "CANARY").exists()
