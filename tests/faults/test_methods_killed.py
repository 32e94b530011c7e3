"""Every method, by its recipe: killed by kill -9 it goes on, with the same command, to the bits of the undisturbed run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracles
import pytest
from oracles import Training

from grpo_rl.models import builtin
from grpo_rl.models.load import load_tokenizer
from grpo_rl.telemetry.metrics.metrics_file import read_metrics

END_S = 300.0
pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1200)]

POLICY, SCORER = "actor_rollout_ref", "reward.reward_model"
# A random model gets no sum right: these make a difference between its responses, and between their characters.
REWARDS = """\
def variety(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 10


def odd(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)


def variety_of_steps(data_source, solution_str, ground_truth, extra_info):
    new = [float(character not in solution_str[:place]) for place, character in enumerate(solution_str)]
    return {"score": sum(new), "steps": [(place + 1, reward) for place, reward in enumerate(new)]}
"""
SAMPLED = [
    "data.train_files=task:arithmetic?split=train&num_rows=32",
    "data.val_files=[]",
    "data.max_prompt_length=16",
    "data.max_response_length=12",
    f"{POLICY}.rollout.n=4",
    f"{POLICY}.rollout.name=hf",
    f"{POLICY}.rollout.hf.batched=false",
    f"{POLICY}.actor.ppo_mini_batch_size=4",
    "trainer.test_freq=-1",
]
COLLECTED = [
    "data.responses=initial_policy",
    *(word for word in SAMPLED if "mini_batch" not in word and "num_rows" not in word and "val_files" not in word),
    "data.train_files=task:arithmetic?split=train&num_rows=12",
    "data.gen_batch_size=4",
]
PAIRS = "task:arithmetic?carrying=1&forgotten_carries=1"
IN_UPDATE, IN_STEP = "driver.phase:kill9@step=3,phase=update_actor,once", "driver.step:kill9@step=3,once"
IN_COLLECTION = ["collection.part:kill9@number=1,once", IN_UPDATE]


GAME = """
from grpo_rl.envs.contract import Observation

class Digits:
    async def reset(self, start):
        return Observation()

    async def step(self, turn):
        digits = sum(letter.isdigit() for letter in turn.text)
        said = () if turn.index == 2 else ({"role": "user", "content": "and"},)
        return Observation(said, float(digits % 3), turn.index == 2, {"digits": digits})

    async def close(self):
        pass
"""
TURNS = f"{POLICY}.rollout.multi_turn"


@dataclass(frozen=True)
class Method:
    """A method's words, beside those of all, and the faults of which each ends one start of it."""

    words: Sequence[str]
    kills: Sequence[str] = (IN_UPDATE,)
    steps: int = 3
    learns: str = "actor/grad_norm"
    """A metric that is above 0 in some step: a run that learns nothing would compare nothing."""


def sampled(recipe: str, *words: str, reward: str = "variety", **more: Any) -> Method:
    return Method((f"recipe=paradigm/{recipe}", *SAMPLED, f"reward.functions=[REWARDS:{reward}]", *words), **more)


METHODS = {
    "grpo": sampled("grpo"),
    "grpo_process": sampled("grpo_process", reward="variety_of_steps"),
    "online_rft": sampled("online_rft"),
    "online_dpo": sampled("online_dpo", learns="pairs/num_pairs"),
    # The critic has learnt from the step, the policy has not; and both are of one checkpoint afterwards.
    "ppo": sampled("ppo", "trainer.critic_warmup=1", kills=["driver.phase:kill9@step=2,phase=update_critic,once", IN_UPDATE]),
    "episodes": sampled(
        "grpo",
        f"{TURNS}.enable=true",
        f"{TURNS}.environment.name=GAME:Digits",
        f"{TURNS}.environment.num_workers=1",
        "data.max_response_length=80",
        learns="env/digits",
    ),
    # Steps 1 and 3 are the reward model's, each of which begins with the reference; 2 and 4 the policy's.
    "iterate": sampled(
        "iterate",
        f"{SCORER}.model_path=MODEL",
        f"{SCORER}.train.optim.lr=1e-2",
        "trainer.iterate.reward_model_steps=1",
        "trainer.iterate.steps_per_iteration=1",
        kills=[
            "driver.phase:kill9@step=3,phase=refresh_reference,once",
            "driver.phase:kill9@step=3,phase=reward,once",  # the reference is the policy, the reward model is as it was
            "driver.phase:kill9@step=4,phase=ref,once",
            "ckpt.before_rename:kill9@step=4,once",  # all parts are written, and none counts
        ],
        steps=4,
        learns="reward_model/new_pairs",
    ),
    "dpo on rows": Method(
        [
            f"{POLICY}.actor.policy_loss.loss_mode=dpo",
            f"{POLICY}.actor.ppo_mini_batch_size=4",
            "data.responses=rows",
            f"data.train_files={PAIRS}&num_rows=32",
            "data.chosen_key=reward_model.ground_truth",
            "data.rejected_key=extra_info.demonstration",
        ],
        kills=["driver.reference:kill9@part=train,n=2,once", IN_UPDATE],
    ),
    "sft on rows": Method(
        [
            f"{POLICY}.actor.policy_loss.loss_mode=sft",
            "data.responses=rows",
            "data.train_files=task:arithmetic?split=train&num_rows=32",
            "data.response_key=reward_model.ground_truth",
        ],
    ),
    "responses of the initial policy": Method(
        [
            f"{POLICY}.actor.policy_loss.loss_mode=sft",
            *COLLECTED,
            "reward.functions=[REWARDS:odd]",
            "algorithm.rejection.max_per_prompt=2",
        ],
        kills=IN_COLLECTION,
    ),
    "pairs of the initial policy": Method(
        [f"{POLICY}.actor.policy_loss.loss_mode=dpo", *COLLECTED, "reward.functions=[REWARDS:variety]"], kills=IN_COLLECTION
    ),
    "reward model on pairs": Method(
        [
            "recipe=paradigm/reward_model",
            f"{SCORER}.model_path=MODEL",
            f"data.train_files={PAIRS}&num_rows=64",
            f"data.val_files={PAIRS}&split=val&num_rows=32",
            "trainer.n_gpus_per_node=2",
        ],
        kills=[IN_STEP],
        learns="reward_model/loss",
    ),
    "process reward model": Method(
        [
            "recipe=paradigm/process_reward_model",
            f"{SCORER}.model_path=MODEL",
            "data.train_files=task:rated_sums?num_rows=64",
            "data.val_files=task:rated_sums?split=val&num_rows=32",
            "trainer.n_gpus_per_node=2",
        ],
        kills=[IN_STEP],
        learns="reward_model/loss",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model which many tokens end, so that its episodes have several turns."""
    folder = builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")
    ends = [load_tokenizer(str(folder)).eos_token_id, *range(40, 60)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_it_ends_with_the_bits_of_the_undisturbed_run(
    training: Callable[..., Training], model: Path, tmp_path: Path, name: str
) -> None:
    method, files = METHODS[name], {"REWARDS": REWARDS, "GAME": GAME}
    given = [word.replace("MODEL", str(model)) for word in method.words]
    for file, code in files.items():
        (tmp_path / f"{file.lower()}.py").write_text(code)
        given = [word.replace(file, str(tmp_path / f"{file.lower()}.py")) for word in given]
    command = [
        *([] if any(SCORER in word for word in given) and name != "iterate" else [f"{POLICY}.model.path={model}"]),
        "data.train_batch_size=4",
        f"trainer.total_training_steps={method.steps}",
        "trainer.save_freq=1",
        # In the background a checkpoint is committed some phases later: a kill in between goes one further back.
        f"{POLICY}.actor.checkpoint.async_save=false",
        *given,
    ]
    calm, broken = training("calm", command), training("broken", command, ";".join(method.kills))
    assert calm.start().wait(END_S) == 0, calm.describe()
    for number in range(len(method.kills)):
        assert broken.start().wait(END_S) == 137, broken.describe()
        assert [fired["fault"] for fired in broken.fired()] == list(method.kills[: number + 1])
    assert broken.start().wait(END_S) == 0, broken.describe()

    for step in range(1, method.steps + 1):
        assert oracles.state_hash(broken.path, step) == oracles.state_hash(calm.path, step), f"step {step}"
    assert oracles.learnt(broken.path) == oracles.learnt(calm.path)
    exports = [path.relative_to(calm.path) for path in calm.path.glob("*model/model.safetensors")]
    assert exports and all((broken.path / path).read_bytes() == (calm.path / path).read_bytes() for path in exports)
    rows = read_metrics(broken.path / "metrics.jsonl")
    assert any(row.get(method.learns, 0.0) > 0.0 for row in rows)
    if name == "episodes":
        assert all(row["episode/turns"] > 1 and row["episode/failed"] == 0 for row in rows if "actor/loss" in row)
    if name == "iterate":
        history, same = ((run.path / "checkpoints/step_4/replay.jsonl").read_text() for run in (calm, broken))
        assert history == same and len(history.splitlines()) > 1
        folders = [broken.path / "checkpoints" / f"step_{step}" / "reference" for step in (2, 3)]
        before, after = ((folder / "weights_rank0.safetensors").read_bytes() for folder in folders)
        assert before != after, "the reference moved in step 3"
    if name == "responses of the initial policy":
        kept = [(run.path / "collected/train.jsonl").read_text() for run in (calm, broken)]
        assert kept[0] == kept[1] and {json.loads(line)["reward"] for line in kept[0].splitlines()} == {1.0}
