"""Trainings that end with their test, however it ends; and what is made once for all tests, because it costs seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from oracles import Training

from grpo_rl import faults, testing
from grpo_rl.cluster.session.ray_session import ray_session, set_environment
from grpo_rl.config.schema.tree import RayInitConfig
from grpo_rl.models import builtin
from grpo_rl.schedules import sync

set_environment()  # before a test's file imports Ray

from recovery_ground import Scene  # noqa: E402 it imports Ray

from grpo_rl.cluster.processes.placement import Pool  # noqa: E402


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Makes a training in the test's own folder: its name, its words, its faults."""
    made = []

    def make(*arguments: Any) -> Training:
        made.append(Training(tmp_path, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture(scope="session")
def run_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of the training that whole-run tests break."""
    return tiny_run.words(builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random"))


@pytest.fixture(scope="session")
def undisturbed(run_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that training with nothing but its bad gradient, whose roles are in this process: its bits are those of one over Ray."""
    words = [word for word in run_words if "n_gpus_per_node" not in word]  # how many replicas there are decides no token
    faults.arm(tiny_run.BAD_GRADIENT)
    try:
        with testing.session(*words, folder=tmp_path_factory.mktemp("undisturbed")) as session:
            sync.train(session)
            session.actor.export(session.output.run_dir.model)
            return session.output.run_dir.path
    finally:
        faults.arm("")


@pytest.fixture(scope="session")
def slots() -> Iterator[Pool]:
    """A local Ray for all tests of groups and replicas, whose processes find the modules beside this file."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        stack.enter_context(ray_session(RayInitConfig(allow_insecure=True), 2))
        pool = Pool(1, 2, use_gpu=False, timeout_s=120.0)
        yield pool
        pool.release()


@pytest.fixture(scope="session")
def scene(slots: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(slots, tmp_path_factory.mktemp("logs"))
    yield made
    made.ground.close()
