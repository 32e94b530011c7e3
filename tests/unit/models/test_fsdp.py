"""FSDP2 of one rank: layers in bfloat16, and what its reduction does to gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tiny_models import Ragged, make_folder, packed_policy
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_rl.models import fsdp
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.load import recompute_layers


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    return packed_policy(make_folder(tmp_path_factory.mktemp("model"), "qwen3", tied=True))


def gradients(policy: PolicyModel, dtype: torch.dtype, *, recomputed: bool) -> dict[str, torch.Tensor]:
    policy = copy.deepcopy(policy)
    policy.train()
    if recomputed:
        recompute_layers(policy.lm)
    fsdp.shard(policy, fsdp.mesh_of("cpu", -1, 60.0), dtype)
    policy(Ragged([3, 7, 1], [4, 9, 14]).sequences()).logprobs_T.sum().backward()
    return {name: fsdp.full_tensor(parameter.grad) for name, parameter in policy.named_parameters()}


def test_layers_in_bfloat16_are_recomputed_in_bfloat16(one_rank: None, policy: PolicyModel) -> None:
    """Up to torch 2.12 FSDP does not cast the inputs of a layer that is recomputed."""
    recomputed = gradients(policy, torch.bfloat16, recomputed=True)
    for name, gradient in gradients(policy, torch.bfloat16, recomputed=False).items():
        torch.testing.assert_close(recomputed[name], gradient, atol=0, rtol=0, msg=name)
    exact = gradients(policy, torch.float32, recomputed=False)
    error = sum(float((recomputed[name] - exact[name]).norm()) for name in exact)
    assert 0 < error < 0.05 * sum(float(gradient.norm()) for gradient in exact.values())


class Divisions(TorchDispatchMode):
    """Counts the elements that are divided in tensors of the gradients' flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.div.Tensor and out.dim() == 1:
            self.num_elements = max(self.num_elements, out.numel())
        return out


def test_one_rank_does_not_divide_its_gradients(one_rank: None, policy: PolicyModel) -> None:
    with Divisions() as divisions:
        gradients(policy, torch.float32, recomputed=False)
    assert divisions.num_elements < 100
