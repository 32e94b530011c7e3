"""Data files that cannot be used are found by the plan, in less than two seconds and before any process starts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from compositions import compose

from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.plan.decisions import Plan
from grpo_rl.plan.make import make_plan

CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")


def row(number: int = 0, **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{number}+1="}]
    return {"prompt": prompt, "data_source": "arithmetic", "reward_model": {"ground_truth": "1", "style": "rule"}} | columns


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        lines = "".join(json.dumps(one) + "\n" for one in rows).encode()
        path.write_bytes(lines)
    return path


def plan_of(path: Path | str, *words: str, batch_size: int = 8) -> Plan:
    base = [
        f"data.train_files={path}",
        "actor_rollout_ref.model.path=builtin:arithmetic",
        f"data.train_batch_size={batch_size}",
    ]
    started = time.process_time()
    try:
        return make_plan(compose([*base, "actor_rollout_ref.actor.ppo_mini_batch_size=8", *words]), CPU)
    finally:
        assert time.process_time() - started < 4


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet"])
def test_rows_of_every_kind_of_file_are_counted_and_held_against_the_batch(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [row(number) for number in range(256)])
    assert plan_of(path).sizes.num_train_rows == 256
    assert plan_of(tmp_path, "trainer.total_epochs=2").sizes.total_steps == 2 * 256 // 8
    with pytest.raises(ConfigError) as caught:
        plan_of(path, batch_size=1024)
    assert caught.value.problems == [
        "data.train_batch_size=1024: larger than the training data, which has 256 rows; a batch of at most 256, or more data"
    ]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet"])
@pytest.mark.parametrize("key", ["train_files", "val_files"])
def test_a_bad_row_among_the_first_is_named_with_its_place(tmp_path: Path, name: str, key: str) -> None:
    good = write(tmp_path / f"good_{name}", [row(number) for number in range(8)])
    bad = write(tmp_path / name, [row(number) for number in range(7)] + [row(8, prompt=[])])
    with pytest.raises(DataError, match=rf"{name}, (line 8|row 7).*prompt"):
        plan_of(bad) if key == "train_files" else plan_of(good, f"data.val_files={bad}")
    if key == "train_files":
        assert plan_of(bad, "data.on_bad_row=skip").sizes.total_steps is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", b""),
        ("d.jsonl", b'{"prompt": '),
        ("d.json", b'[{"prompt": '),
        ("d.parquet", b"PAR1 and no more"),
        ("d.parquet", b""),
    ],
)
def test_an_empty_cut_or_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        plan_of(tmp_path / name)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "d.parquet")
    with pytest.raises((ConfigError, DataError), match=r"d\.parquet"):
        plan_of(tmp_path / "d.parquet")
