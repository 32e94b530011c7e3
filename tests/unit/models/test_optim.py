"""Schedule values by hand, and which parameters decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from grpo_rl.config.schema.tree import OptimConfig
from grpo_rl.models.optim import averaged, keep_average, lr_factor, make_optimizer, orthogonal


@pytest.mark.parametrize(
    ("total_steps", "settings", "expected"),
    [
        # Warm-up rises in equal steps from above zero.
        (6, {"lr_warmup_steps": 3}, [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1]),
        (2, {"lr_warmup_steps": 0}, [1, 1, 1]),
        (4, {"lr_scheduler_type": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        (4, {"lr_scheduler_type": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        (4, {"lr_scheduler_type": "cosine"}, [1, 0.8535534, 0.5, 0.1464466, 0]),
        # After the last step the rate stays at its end.
        (2, {"lr_scheduler_type": "linear", "min_lr_ratio": 0.1}, [1, 0.55, 0.1, 0.1, 0.1]),
    ],
)
def test_the_rate_at_each_step_by_hand(total_steps: int, settings: dict[str, Any], expected: list[float]) -> None:
    factor = lr_factor(OptimConfig(**settings), total_steps)
    assert [factor(step) for step in range(len(expected))] == pytest.approx(expected)


def test_the_average_moves_with_each_step_and_lends_its_values():
    weights = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))]
    optimizer = make_optimizer(nn.ParameterList(weights), OptimConfig(lr=0.1))
    keep_average(optimizer, 0.8)
    with averaged(optimizer):
        pass  # before the first step there is none
    expected = None
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        own = [weight.detach().clone() for weight in weights]
        expected = own if expected is None else [0.8 * old + 0.2 * new for old, new in zip(expected, own, strict=True)]
    with averaged(optimizer):
        for weight, value in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.detach(), value)
    assert all(torch.equal(weight, value) for weight, value in zip(weights, own, strict=True))


def test_the_optimizer_uses_the_schedule_from_the_first_step():
    weight = nn.Parameter(torch.ones(2, 2))
    model = nn.ParameterList([weight])
    config = OptimConfig(lr=0.1, lr_warmup_steps=1, weight_decay=0.0, eps=1e-12)
    optimizer = make_optimizer(model, config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(config, 10))
    values = []
    for _ in range(3):
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        scheduler.step()
        values.append(float(weight.detach()[0, 0]))
    # With equal gradients AdamW moves by the learning rate: 0.05, then 0.1, 0.1.
    assert values == pytest.approx([0.95, 0.85, 0.75], abs=1e-5)


def test_weight_decay_pulls_matrices_and_leaves_vectors_alone():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Decoupled decay: w <- w (1 - lr * weight_decay).
    torch.testing.assert_close(model[0].weight.detach(), torch.full((2, 3), 0.95))
    for vector in (model[0].bias, model[1].weight, model[1].bias):
        assert torch.equal(vector.detach(), torch.ones(2))


def test_muon_brings_singular_values_near_one_and_moves_hidden_matrices_as_torchs_own_does():
    torch.manual_seed(0)
    stack = torch.randn(3, 20, 8)
    values = torch.linalg.svdvals(orthogonal(stack))
    assert bool(((values > 0.6) & (values < 1.3)).all())
    model = nn.Module()
    model.lm = nn.Module()
    model.lm.base_model = nn.Module()
    model.lm.base_model.layers = nn.ModuleList([nn.Linear(8, 20)])
    model.head = nn.Linear(20, 4, bias=False)
    config = OptimConfig(optimizer="muon", lr=0.02, betas=[0.95, 0.999], weight_decay=0.1)
    inside = model.lm.base_model.layers[0]
    optimizer = make_optimizer(model, config)
    same = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    weight, bias, head = (
        same[f"{name}"] for name in ("lm.base_model.layers.0.weight", "lm.base_model.layers.0.bias", "head.weight")
    )
    muon = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [head], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}], lr=0.02, betas=(0.95, 0.999)
    )
    before = inside.weight.detach().clone()
    for _ in range(3):
        for ours, theirs in ((inside.weight, weight), (inside.bias, bias), (model.head.weight, head)):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    torch.testing.assert_close(model.head.weight, head)
    torch.testing.assert_close(inside.bias, bias)
    # Torch's own iterates in bfloat16.
    difference, moved = (inside.weight - weight).norm(), (weight - before).norm()
    assert float(difference.detach() / moved.detach()) < 0.02
