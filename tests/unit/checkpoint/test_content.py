"""A checkpoint whose digests agree and whose content cannot be used is refused by file and field."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_trials import save_with, write_state

from grpo_rl.checkpoint.files import entry_of
from grpo_rl.checkpoint.manifest import MANIFEST, STATE, read_manifest, verify, write_manifest
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.checkpoint.tensors import Part, write_parts
from grpo_rl.errors import CheckpointError

SAMPLER = {"epoch": 0, "position": 3, "num_rows": 8, "shuffle": True, "seed": 1, "data": [{"rows": 8}]}
GOOD: dict[str, Any] = {
    "sampler": SAMPLER,
    "advantage": {"value": 0.001},
    "num_rows": 8,
    "nonfinite": {"in_a_row": 0},
    "unlogged": None,
}

Harm = Callable[[Path], None]


def save(store: CheckpointStore, step: int) -> Path:
    return save_with(store, step, lambda folder: write_state(folder, step), GOOD | {"step": step})


def resealed(harm: Harm) -> Harm:
    """Do the harm, and write a manifest that agrees with it."""

    def change(folder: Path) -> None:
        manifest = read_manifest(folder)
        harm(folder)
        (folder / MANIFEST).unlink()
        entries = {name: entry_of(folder / name) for name in manifest.files if (folder / name).exists()}
        write_manifest(folder, manifest.step, entries)

    return change


def state(text: str | bytes) -> Harm:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / STATE).write_bytes(content) and None


def weights(value: float, kind: str = "weights") -> Harm:
    def change(folder: Path) -> None:
        tensor = torch.zeros(2, 8)
        tensor[1, 7] = value
        path = folder / f"{kind}_rank1.safetensors"
        path.unlink()
        write_parts(path, {f"layer.{kind}": Part(tensor, 2, (4, 8))})

    return change


def training(content: Any) -> Harm:
    return lambda folder: (folder / "training.json").write_text(json.dumps(content)) and None


HARM: dict[str, tuple[Harm, str]] = {
    "state is broken": (state("{"), STATE),
    "state is a list": (state("[1, 2]"), f"{STATE} cannot be used: it holds a list"),
    "state is nested without end": (state("[" * 100_000), f"{STATE} cannot be used: its nesting is too deep"),
    "state is no UTF-8": (state(b'{"step": "\xff\xfe"}'), STATE),
    "state is of a later step": (
        state(json.dumps(GOOD | {"step": 1_000_000_002})),
        f"{STATE} is of step 1000000002, the checkpoint of step 2",
    ),
    "state's step is a word": (state(json.dumps(GOOD | {"step": "2"})), f"{STATE} is of step '2', the checkpoint of step 2"),
    "no file of rank 1": (lambda f: (f / "weights_rank1.safetensors").unlink(), "weights_rank1.safetensors is missing"),
    "no random state": (lambda f: (f / "rng_rank0.safetensors").unlink(), "rng_rank0.safetensors is missing"),
    "no training.json": (lambda f: (f / "training.json").unlink(), "training.json is missing"),
    "one rank more than there is": (training({"world_size": 3, "num_optimizer_steps": 1}), "_rank2.safetensors is missing"),
    "one rank less than there is": (training({"world_size": 1, "num_optimizer_steps": 1}), "beyond the 1"),
    "a billion ranks": (training({"world_size": 10**9, "num_optimizer_steps": 1}), "is missing"),
    "no number of ranks": (training({"num_optimizer_steps": 1}), "training.json cannot be used: its field world_size"),
    "steps are negative": (training({"world_size": 2, "num_optimizer_steps": -1}), "its field num_optimizer_steps is -1"),
    "weights are not numbers": (weights(float("nan")), "weights_rank1.safetensors cannot be used: layer.weights has values"),
    "moments are infinite": (weights(float("inf"), "optimizer"), "optimizer_rank1.safetensors cannot be used: layer.optimizer"),
    "a pickle": (lambda f: (f / "weights_rank0.safetensors").write_bytes(pickle.dumps([1])) and None, "no safetensors file"),
}


@pytest.mark.parametrize("harm", HARM)
def test_content_that_cannot_be_used_is_named_and_the_checkpoint_before_it_is_taken(tmp_path, harm):
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 1)
    newest = save(store, 2)
    change, message = HARM[harm]
    resealed(change)(newest)
    with pytest.raises(CheckpointError) as caught:
        verify(newest)
    assert message in str(caught.value) and str(newest) in str(caught.value)
    passed_over: list[str] = []
    found = store.latest(passed_over.append)
    assert found is not None and (found.step, found.state) == (1, GOOD | {"step": 1})
    assert passed_over == [str(caught.value)]
