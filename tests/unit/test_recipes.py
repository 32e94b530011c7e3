"""The recipes that come with the package: they can be run, and they say only what differs from the defaults."""

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml

from grpo_rl.config import recipes
from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.recipes import folder, known_recipes
from grpo_rl.config.schema.fields import flat, leaves
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.setup import EpisodeSetup
from grpo_rl.errors import ConfigError
from grpo_rl.models.builtin import build_tokenizer, get_builtin
from grpo_rl.rewards.compose import RewardFunction


@cache
def composed_of(recipe: str) -> Composed:
    return compose([f"recipe={recipe}"])


@pytest.mark.parametrize("recipe", known_recipes())
def test_a_recipe_is_a_valid_configuration(recipe: str) -> None:
    composed = composed_of(recipe)
    assert composed.recipe == recipe
    assert composed.config.data.train_files
    # What the plan builds before anything starts; an environment may give the whole reward.
    if composed.config.reward.functions or not composed.config.plays_episodes:
        RewardFunction.from_config(composed.config.reward)


@pytest.mark.parametrize("recipe", known_recipes())
def test_episodes_of_a_recipe_can_be_rendered_for_its_embedded_model(recipe: str) -> None:
    config = composed_of(recipe).config
    setup, path = EpisodeSetup.of(config), config.actor_rollout_ref.model.path
    if setup is None or not path.startswith("builtin:"):
        return
    tokenizer = build_tokenizer(get_builtin(path.removeprefix("builtin:")).vocab_size)
    setup.check(tokenizer)
    renderer = Renderer(setup.data(tokenizer), tokenizer)
    assert renderer.render([{"role": "user", "content": "1+2="}]).endswith("<|assistant|>")


@pytest.mark.parametrize("recipe", known_recipes())
def test_a_recipe_holds_only_what_differs_from_the_defaults(recipe: str) -> None:
    content = yaml.safe_load((folder() / f"{recipe}.yaml").read_text())
    content.pop("defaults", None)
    same = {key: value for key, value in flat(content).items() if leaves()[key].default == value}
    assert same == {}


def test_every_recipe_has_a_readme_and_is_in_the_list() -> None:
    root = folder()
    table = (root / "README.md").read_text()
    for recipe in known_recipes():
        place = Path(recipe)
        assert re.search(rf"`(?:{place.parent}/)?{re.escape(place.name)}`", table) and f"({place.parent}/" in table
        assert (root / Path(recipe).parent / "README.md").is_file()


def test_keys_in_conf_are_the_defaults_of_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(recipes.conf(), tmp_path / "conf")
    with (tmp_path / "conf" / "config.yaml").open("a") as file:
        file.write("trainer: {save_freq: 7, test_freq: 9, save_frq: 1}\n")
    monkeypatch.setattr(recipes, "conf", lambda: tmp_path / "conf")
    with pytest.raises(ConfigError, match=r"trainer.save_frq: unknown key \(in .*conf/config.yaml\)"):
        compose(["recipe=arithmetic/grpo"])
    (tmp_path / "conf" / "config.yaml").write_text((tmp_path / "conf" / "config.yaml").read_text().replace(", save_frq: 1", ""))
    trainer = compose(["recipe=arithmetic/grpo", "trainer.test_freq=3"]).config.trainer
    assert (trainer.save_freq, trainer.test_freq) == (7, 3)
