"""A rank's state is copied and written beside the training: what is written is the state of the moment it was asked for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from grpo_rl.checkpoint import rank_files
from grpo_rl.checkpoint.files import entry_of
from grpo_rl.checkpoint.rank_files import RankFiles
from grpo_rl.checkpoint.tensors import HostMemory, Part, write_parts
from grpo_rl.errors import CheckpointError

WAIT_S = 10.0


def part(values: torch.Tensor) -> Part:
    return Part(values, 0, tuple(values.shape))


def mixed() -> dict[str, Part]:
    """Every element size, something empty, something that lies crosswise in memory, and a number."""
    return {
        "a": part(torch.arange(3, dtype=torch.uint8)),
        "b": part(torch.arange(12, dtype=torch.float32).view(3, 4).t()),
        "c": part(torch.tensor(5, dtype=torch.int64)),
        "d": part(torch.empty(0, 4, dtype=torch.bfloat16)),
        "e": part(torch.arange(5, dtype=torch.bfloat16)),
    }


def test_a_copy_holds_what_was_there_and_is_written_as_the_original(tmp_path):
    parts = mixed()
    copies = rank_files.copied(rank_files.Share({"weights": parts}, {}), HostMemory()).parts["weights"]
    assert all(torch.equal(copies[name].tensor, parts[name].tensor) for name in parts)
    expected = write_parts(tmp_path / "original", parts)
    assert write_parts(tmp_path / "copy", copies) == expected == entry_of(tmp_path / "copy")
    assert load_file(tmp_path / "copy")["b"].tolist() == [[0.0, 4.0, 8.0], [1.0, 5.0, 9.0], [2.0, 6.0, 10.0], [3.0, 7.0, 11.0]]


def test_kept_tensors_share_one_block_and_each_has_its_own_place() -> None:
    memory = HostMemory()
    kept = {name: memory.keep(name, torch.full((3, 5), float(name))) for name in range(4)}
    assert [int(one[0, 0]) for one in kept.values()] == [0, 1, 2, 3]
    assert len({one.untyped_storage().data_ptr() for one in kept.values()}) == 1
    again = memory.keep(2, torch.full((3, 5), 7.0))
    assert again.data_ptr() == kept[2].data_ptr() and int(kept[1][2, 4]) == 1 and int(kept[3][0, 0]) == 3
    assert memory.keep(1, torch.ones(5)).tolist() == [1.0] * 5, "another size has a place of its own"


class Rank:
    """One rank with a model of one layer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.files = RankFiles(self.model, (self.optimizer, scheduler), 0, WAIT_S)

    def train(self) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def rank(monkeypatch) -> Rank:
    monkeypatch.setattr(rank_files.dist, "get_world_size", lambda: 1)
    return Rank()


def test_an_optimizer_step_waits_until_the_state_is_copied_and_changes_nothing_of_what_is_written(rank, tmp_path, monkeypatch):
    rank.train()
    expected = {name: value.tolist() for name, value in rank.model.state_dict().items()}
    moment = rank.optimizer.state[rank.model.weight]["exp_avg"].tolist()
    copied, may_copy, stepped = rank_files.copied, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        assert may_copy.wait(WAIT_S)
        assert not stepped.is_set(), "the step did not wait"
        return copied(*arguments)

    monkeypatch.setattr(rank_files, "copied", slow)
    rank.files.save(tmp_path, background=True, texts={"actor.json": "{}"})
    loss = rank.model(torch.ones(1, 3)).sum()  # what only reads does not wait
    loss.backward()
    rank.optimizer.register_step_post_hook(lambda *_: stepped.set())
    training = threading.Thread(target=rank.train)
    training.start()
    may_copy.set()
    training.join(WAIT_S)
    assert stepped.is_set()
    entries = rank.files.saved(WAIT_S)
    assert entries is not None and entries["actor.json"] == entry_of(tmp_path / "actor.json")
    weights = load_file(tmp_path / "weights_rank0.safetensors")
    assert {name: value.tolist() for name, value in weights.items()} == expected
    assert rank.model.weight.tolist() != expected["weight"]
    assert load_file(tmp_path / "optimizer_rank0.safetensors")["exp_avg:weight"].tolist() == moment


def test_an_optimizer_step_waits_until_a_state_too_large_for_a_copy_is_written(rank, tmp_path, monkeypatch):
    rank.train()
    expected = rank.model.weight.tolist()
    written, may_write = rank_files.write_parts, threading.Event()

    def slow(*arguments: Any) -> Any:
        assert may_write.wait(WAIT_S)
        return written(*arguments)

    monkeypatch.setattr(rank_files, "COPIED_BYTES", 0)
    monkeypatch.setattr(rank_files, "copied", lambda *_: pytest.fail("it was copied"))
    monkeypatch.setattr(rank_files, "write_parts", slow)
    rank.files.save(tmp_path, background=True)
    training = threading.Thread(target=rank.train)
    training.start()
    training.join(0.2)
    assert training.is_alive() and rank.model.weight.tolist() == expected, "the step did not wait"
    may_write.set()
    training.join(WAIT_S)
    assert rank.files.saved(WAIT_S) is not None and rank.model.weight.tolist() != expected
    assert load_file(tmp_path / "weights_rank0.safetensors")["weight"].tolist() == expected


def test_a_copy_that_fails_is_told_and_lets_the_training_go_on(rank, tmp_path, monkeypatch):
    def fail(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(rank_files, "copied", fail)
    rank.files.save(tmp_path, background=True)
    rank.train()
    with pytest.raises(CheckpointError, match=r"cannot copy what .* is to hold: MemoryError: no room"):
        rank.files.saved(WAIT_S)
    assert list(Path(tmp_path).iterdir()) == []


def test_a_copy_that_never_ends_is_an_error_and_not_a_wait_for_ever(rank, tmp_path, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(rank_files, "copied", lambda *_: end.wait(WAIT_S))
    rank.files.patience_s = 0.01
    rank.files.save(tmp_path, background=True)
    with pytest.raises(CheckpointError, match="rank 0 was not copied for its checkpoint within 0 s"):
        rank.train()
    end.set()
