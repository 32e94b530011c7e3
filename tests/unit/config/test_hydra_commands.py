"""Hydra's command line: options, choices, files of a user's own, verl's form, and what is refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import compositions
import hydra
import pytest
import yaml
from config_tools import A, R, verls_commands
from hydra.core.global_hydra import GlobalHydra

from grpo_rl.config.compose import Composed, compose
from grpo_rl.config.schema.fields import flat
from grpo_rl.errors import ConfigError
from grpo_rl.main import main

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., tuple[int, str, str]]
REFUSAL_CPU_S = 0.7


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run a command line in an empty folder, and return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        said = capsys.readouterr()
        return code, said.out, said.err

    yield run
    root.handlers[:], root.level = handlers, level  # `--info` logs to the screen


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return caught.value.problems


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# ---- refusals ------------------------------------------------------------------------------------------------


def test_three_slips_are_told_at_once_with_near_names_in_little_time_and_nothing_is_made(tmp_path: Path) -> None:
    words = ["trainer.sav_freq=3", "data.trainbatch=4", "actor_rollout_ref.rollout.n=8.5"]
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "grpo_rl.main", *words],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 2 and "3 problems" in done.stderr
    for said in (
        "Did you mean trainer.save_freq",
        "Did you mean data.train_batch_size",
        "n=8.5: is not a whole number; write 8",
    ):
        assert said in done.stderr
    assert list(tmp_path.iterdir()) == []
    # The bound is for a machine that does nothing else; beside other programs the same work takes up to twice as long.
    assert spent < 2 * REFUSAL_CPU_S
    print(f"{spent:.2f} s of CPU")


def test_a_group_a_choice_and_a_recipe_that_are_not_there_are_told_with_the_nearest(run: Run) -> None:
    code, _, err = run("algoritm=dapo", "algorithm=dappo", "recipe=arithmetic/gpro")
    assert code == 2 and "3 problems" in err
    for said in (
        "Did you mean algorithm?",
        "algorithm=dappo: unknown choice. Did you mean dapo?",
        "Did you mean arithmetic/grpo",
    ):
        assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra.job.chdir=true"], "hydra.job.chdir=true: relative paths"),
        (["hydra.mode=MULTIRUN"], "write --multirun"),
        (["hydra.searchpath=[file:///x]"], "--config-dir=FOLDER"),
        (["--cfg", "-m", "seed=1,2"], "a sweep has several configurations"),
        (["--cfg", "job", "-p", "nope"], "package 'nope' not found"),
        (["--package"], "expected one argument"),
        (["-cn", "ppo_trainr"], "Did you mean ppo_trainer?"),
    ],
)
def test_what_of_hydra_has_no_place_is_refused_with_the_reason(run: Run, words: list[str], said: str) -> None:
    code, _, err = run(*words)
    assert code == 2 and said in err


def test_hydras_own_settings_in_a_recipe_are_refused_with_the_file(tmp_path: Path, run: Run) -> None:
    write(tmp_path / "my.yaml", {"hydra": {"callbacks": {"mine": {"_target_": "os.system"}}}, "trainer": {"seed": 2}})
    code, _, err = run("recipe=./my.yaml", "trainer.dry_run=true")
    assert code == 2 and "hydra.callbacks.mine._target_ (in my.yaml): Hydra's own settings are typed" in err
    write(tmp_path / "my.yaml", {"defaults": [{"override /hydra/launcher": "joblib"}], "trainer": {"seed": 2}})
    assert "hydra/launcher" in run("recipe=./my.yaml")[2]


# ---- what Hydra prints -----------------------------------------------------------------------------------------


def test_info_shows_the_order_of_files_and_folders(tmp_path: Path, run: Run) -> None:
    code, out, _ = run("--info", "defaults", "algorithm=dapo", "recipe=gsm8k/grpo")
    files = [line.split()[1] for line in out.splitlines() if line.startswith("| ")]
    order = [files.index(name) for name in ("base/algorithm", "config", "algorithm/dapo", "recipe/gsm8k/qwen2.5-0.5b")]
    assert code == 0 and order == sorted(order) and files[-1] == "recipe/gsm8k/grpo"
    (tmp_path / "mine").mkdir()
    out = run("--info", "searchpath", "-cd", "mine")[1]
    places = [out.index(place) for place in ("recipes://", "/conf", str(tmp_path / "mine"))]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("--cfg job -p algorithm.adv_estimator -cn ppo_trainer", "gae"),
        ("--cfg job -p algorithm.adv_estimator -cn ppo_trainer algorithm=dapo", "grpo"),
        ("--cfg all --resolve -p trainer.default_local_dir trainer.project_name=x", "runs/x"),
        ("algorithm=dapo algorithm.gamma=0.5 --cfg job -p algorithm.gamma", "0.5"),
        ("--cfg=job -p actor_rollout_ref.actor.clip_ratio_high algorithm=dapo recipe=arithmetic/grpo", "0.28"),
    ],
)
def test_a_part_of_the_configuration_is_printed(run: Run, words: str, printed: str) -> None:
    code, out, _ = run(*words.split())
    assert (code, out.strip()) == (0, printed)


def test_an_expression_is_printed_as_it_is_and_its_value_is_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN", "a-plain-value")
    monkeypatch.setenv("MY_TOKEN", "canary-20c1aa")
    asked = ("--cfg", "job", "-p", "trainer.project_name")
    assert run(*asked, "trainer.project_name=${oc.env:PLAIN}")[1].strip() == "a-plain-value"
    whole = run("--cfg", "job", "trainer.project_name=${oc.env:MY_TOKEN}")[1]
    assert "project_name: ${oc.env:MY_TOKEN}" in whole
    resolved = run("--cfg", "job", "--resolve", "trainer.project_name=${oc.env:MY_TOKEN}")[1]
    assert "project_name: <hidden>" in resolved and "canary" not in whole + resolved


def test_a_secret_in_a_recipes_mapping_is_hidden(tmp_path: Path, run: Run) -> None:
    kwargs = {"reward": {"custom_reward_function": {"reward_kwargs": {"server": {"api_key": "canary-77aa31"}}}}}
    write(tmp_path / "my.yaml", kwargs)
    out = run("--cfg", "job", "recipe=./my.yaml")[1]
    assert "api_key: <hidden>" in out and "canary" not in out


def test_help_names_all_groups_and_recipes(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and "algorithm: " in out and "arithmetic/grpo" in out and "base:" not in out


def test_keys_and_recipes_are_completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from grpo_rl.__main__ import main as all_commands

    monkeypatch.setattr(sys, "argv", ["/somewhere/grpo-rl"])
    assert all_commands(["-sc", "install=bash"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion grpo-rl")
    for line, completed in (
        ("grpo-rl train recipe=gsm8k/qw", ["recipe=gsm8k/qwen2.5-0.5b", "recipe=gsm8k/qwen2.5-7b"]),
        ("grpo-rl trainer.save_fr", ["trainer.save_freq="]),
    ):
        monkeypatch.setenv("COMP_LINE", line)
        assert all_commands(["-sc", "query=bash"]) == 0
        assert capsys.readouterr().out.split() == completed


# ---- choices and files of a user's own -------------------------------------------------------------------------


def test_a_choice_of_a_recipe_gives_way_to_one_that_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "grp.yaml", "defaults: [/recipe/arithmetic/grpo, _self_, override /algorithm: dapo]\ntrainer: {seed: 2}\n")
    assert compose(["recipe=./grp.yaml"]).config.algorithm.filter_groups.enable
    typed = compose(["recipe=./grp.yaml", "algorithm=grpo"]).config
    assert not typed.algorithm.filter_groups.enable and typed.actor_rollout_ref.actor.kl_loss_coef == 0.04
    assert not compose(["recipe=./grp.yaml", "algorithm=null"]).config.algorithm.filter_groups.enable


def test_a_recipe_builds_on_a_file_beside_it_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path / "project/base.yaml", {"trainer": {"save_freq": 2, "test_freq": 3}, "data": {"train_files": "rows.parquet"}}
    )
    write(tmp_path / "project/exp.yaml", {"defaults": ["./base.yaml", "_self_"], "trainer": {"save_freq": 5}})
    monkeypatch.chdir(tmp_path)
    config = compose(["recipe=project/exp.yaml"]).config
    assert (config.trainer.save_freq, config.trainer.test_freq) == (5, 3)
    assert config.data.train_files == [f"{tmp_path}/project/rows.parquet"]


def test_a_circle_and_a_base_that_comes_twice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, bases in {"base": [], "a": ["base"], "b": ["base"], "c": ["a", "b"], "d": ["e"], "e": ["d"]}.items():
        write(tmp_path / f"{name}.yaml", {"defaults": [f"./{base}.yaml" for base in bases], "trainer": {"seed": 2}})
    (twice,) = problems("recipe=c.yaml")
    assert "base.yaml comes twice" in twice and "name it once" in twice
    assert any("builds on itself" in problem for problem in problems("recipe=d.yaml"))


def test_a_wrong_key_of_a_choice_is_told_with_the_file(tmp_path: Path, run: Run) -> None:
    file = write(tmp_path / "mine/algorithm/bad.yaml", "adv_estimatr: x\n")
    code, _, err = run("-cd", "mine", "algorithm=bad")
    assert code == 2 and f"adv_estimatr: unknown key (in {file})" in err and "algorithm.adv_estimator" in err
    write(tmp_path / "mine/algorithm/good.yaml", "# @package algorithm\ngamma: 0.7\n")
    assert run("--cfg", "job", "-p", "algorithm.gamma", "-cd", "mine", "algorithm=good")[1].strip() == "0.7"


def test_a_primary_file_needs_no_defaults_list_and_may_be_called_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("seed: 3\n", "defaults: [ppo_trainer, _self_]\nseed: 3\n"):
        write(tmp_path / "mine/config.yaml", text)
        config = compose(["-cp", "mine", "data.train_files=x.parquet"]).config
        assert (config.trainer.seed, config.data.seed, config.trainer.save_freq) == (3, 3, -1)
        assert config.actor_rollout_ref.rollout.n == (1 if "ppo" in text else 8)


def verls_form(folder: Path) -> list[str]:
    words = verls_commands()["agents/gsm8k"]
    return [f"--config-path={folder}", "--config-name=file", *(f"{key}={value}" for key, value in words.items())]


def test_verls_own_file_is_composed(tmp_path: Path) -> None:
    header = "hydra:\n  searchpath:\n    - file://verl/trainer/config\n\ndefaults:\n  - ppo_trainer\n  - _self_\n"
    write(tmp_path / "file.yaml", header + "actor_rollout_ref: {hybrid_engine: True}\ndata: {max_prompt_length: 99}\n")
    words = verls_form(tmp_path)
    composed = compose([word for word in words if not word.startswith("data.max_prompt_length")])
    assert composed.config.data.max_prompt_length == 99
    assert not [note for note in composed.notes if "other defaults" in note]
    with pytest.raises(ConfigError, match="there is no folder"):
        write(tmp_path / "file.yaml", "hydra: {searchpath: [file:///no/such]}\ndata: {max_prompt_length: 99}\n")
        compose(words)


def test_verls_commands_with_verls_defaults_have_no_line_about_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(words: dict[str, str], *more: str) -> Composed:
        given = {key: value for key, value in words.items() if key != "trainer.logger"}
        files = {"REWARD_FILE": __file__, "ADAPTER": "away"}
        return compositions.compose([*more, *(f"{key}={files.get(value, value)}" for key, value in given.items())])

    verls = {"algorithm.adv_estimator": "gae", f"{A}.use_kl_loss": False, f"{R}.n": 1, f"{R}.seed": 42}
    for name, words in verls_commands().items():
        if name.startswith("codapo"):
            continue
        ours, theirs = kept(words), kept(words, "-cn", "ppo_trainer")
        assert not [note for note in theirs.notes if "other defaults" in note], name
        assert {key: value for key, value in theirs_only(ours, theirs).items() if key not in words} == {
            key: value for key, value in verls.items() if key not in words
        }, name


def theirs_only(ours: Composed, theirs: Composed) -> dict[str, object]:
    before = flat(ours.resolved)
    return {key: value for key, value in flat(theirs.resolved).items() if value != before[key]}


# ---- words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["+trainer.save_freq=4", "++trainer.save_freq=4", "trainer.save_freq=4"])
def test_a_sign_before_a_key_changes_nothing(word: str) -> None:
    assert compose([word]).config.trainer.save_freq == 4


@pytest.mark.parametrize("word", ["~trainer.save_freq", "~trainer", "~trainer.machine"])
def test_a_tilde_goes_back_to_the_default(tmp_path: Path, word: str) -> None:
    file = write(tmp_path / "my.yaml", {"trainer": {"save_freq": 5}})
    trainer = compose([f"recipe={file}", word]).config.trainer
    assert trainer.save_freq == (5 if "machine" in word else -1) and trainer.machine is None


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("algorithm.adv_options.std=batch", {"std": "batch"}),
        ("algorithm.adv_options={std: batch}", {"std": "batch"}),
        ("algorithm={adv_options: {a b: [x.py:f, 'c d']}}", {"a b": ["x.py:f", "c d"]}),
        ("algorithm.adv_options={}", {}),
    ],
)
def test_a_free_mapping_is_set_and_emptied(tmp_path: Path, word: str, options: dict[str, object]) -> None:
    if not options:
        file = write(tmp_path / "my.yaml", {"algorithm": {"adv_options": {"std": "group"}}})
        assert compose([f"recipe={file}"]).config.algorithm.adv_options == {"std": "group"}
        assert compose([f"recipe={file}", word]).config.algorithm.adv_options == {}
    else:
        assert compose([word]).config.algorithm.adv_options == options


def test_a_value_is_checked_after_its_expression_is_resolved() -> None:
    word = f"{A}.ppo_mini_batch_size=${{data.train_batch_size}}"
    assert compose([word, "data.train_batch_size=32"]).config.actor_rollout_ref.actor.ppo_mini_batch_size == 32
    assert (
        f"{A}.ppo_mini_batch_size=a.parquet"
        in problems(f"{A}.ppo_mini_batch_size=${{data.prompt_key}}", "data.prompt_key=a.parquet")[0]
    )


def test_hydras_folder_of_a_run_is_the_runs(tmp_path: Path) -> None:
    composed = compose([f"hydra.run.dir={tmp_path}/a/b"])
    trainer = composed.config.trainer
    assert (trainer.default_local_dir, trainer.experiment_name) == (f"{tmp_path}/a", "b")
    assert any("hydra.run.dir" in note for note in composed.notes)


def test_a_configuration_is_composed_within_a_hydra_program_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "app.yaml", "x: 1\n")
    monkeypatch.setattr(sys, "argv", ["app", "x=2"])
    monkeypatch.chdir(tmp_path)
    seeds = []

    @hydra.main(version_base="1.3", config_path=str(tmp_path), config_name="app")
    def app(cfg: object) -> None:
        seeds.append((compose(["seed=4"]).config.trainer.seed, cfg.x, GlobalHydra.instance().is_initialized()))  # type: ignore[attr-defined]

    app()
    assert seeds == [(4, 2, True)]


def test_choices_of_threads_do_not_meet() -> None:
    from concurrent.futures import ThreadPoolExecutor

    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        seeds = list(pool.map(lambda seed: compose([f"seed={seed}"]).config.trainer.seed, range(8)))
    assert seeds == list(range(8)) and time.monotonic() - started < 60
