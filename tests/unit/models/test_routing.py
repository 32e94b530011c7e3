"""Routers of models with experts: counted, replayed, and kept even, on packed sequences. Against plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Ragged, make_folder, packed_policy, plain_model
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from grpo_rl.models.experts import balance_loss, choice_dtype, nothing_given
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.packing import Sequences
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import sequences_of

FAMILIES = ["qwen3_moe", "olmoe"]
RAGGED = Ragged([3, 5, 1, 4], [7, 2, 9, 1])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), request.param, tied=False)


def sharing(experts_S: Tensor | None = None, *, shares: bool = True) -> tuple[Batch, Sequences]:
    """Three responses to one prompt, and one to another."""
    generator = torch.Generator().manual_seed(1)
    prompt, other = (torch.randint(2, 37, (length,), generator=generator) for length in (9, 4))
    responses = [torch.randint(2, 37, (length,), generator=generator) for length in (5, 1, 8, 6)]
    ids = [torch.cat([begin, end]) for begin, end in zip([prompt] * 3 + [other], responses, strict=True)]
    batch = Batch(
        prompt_lengths_N=torch.tensor([9, 9, 9, 4]),
        response_lengths_N=torch.tensor([5, 1, 8, 6]),
        group_N=torch.tensor([0, 0, 0, 1]),
        token_ids_S=torch.cat(ids),
        rewards_N=torch.zeros(4),
        rollout_logprobs_T=torch.zeros(20),
        experts_S=experts_S,
    )
    return batch, sequences_of(batch, torch.device("cpu"), share_prompts=shares)


@torch.no_grad()
def router_rows(model: Any, ragged: Ragged) -> list[Tensor]:
    """The router logits of each layer before every response token, from one plain pass for each sequence."""
    rows: list[list[Tensor]] = []
    for ids, prompt, response in zip(ragged.ids, ragged.prompt_lengths, ragged.response_lengths, strict=True):
        logits = model(ids[None], output_router_logits=True).router_logits
        rows.append([layer[prompt - 1 : prompt - 1 + response] for layer in logits])
    return [torch.cat(layer) for layer in zip(*rows, strict=True)]


def test_packed_log_probs_and_router_counts_are_those_of_plain_passes(folder: Path) -> None:
    policy, plain = packed_policy(folder), plain_model(folder)
    with torch.no_grad():
        logprobs_T = policy(RAGGED.sequences()).logprobs_T
        expected_T = RAGGED.plain_logprobs_TV(plain).gather(1, RAGGED.targets_T()[:, None])[:, 0]
    torch.testing.assert_close(logprobs_T, expected_T, atol=1e-5, rtol=0)
    assert policy.routing is not None and policy.routing.last is not None
    routed = policy.routing.last
    for layer, logits_TE in enumerate(router_rows(plain, RAGGED)):
        probs_TE = logits_TE.softmax(-1)
        counts_E = torch.bincount(probs_TE.topk(2).indices.flatten(), minlength=6)
        assert routed.counts_LE[layer].tolist() == counts_E.tolist()
        torch.testing.assert_close(float(routed.entropy_L[layer]), float(-(probs_TE * probs_TE.log()).sum()), rtol=1e-5, atol=0)


def test_gradients_are_those_of_plain_passes_and_experts_without_tokens_get_zeros(folder: Path) -> None:
    policy, plain = packed_policy(folder), plain_model(folder)
    policy(RAGGED.sequences()).logprobs_T.sum().backward()
    RAGGED.plain_logprobs_TV(plain).gather(1, RAGGED.targets_T()[:, None]).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in policy.lm.named_parameters():
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * max(1.0, largest), rtol=0, msg=name)
    # One token in each pass: at most two experts of six can have a gradient, and the others' is 0, not missing.
    policy.zero_grad()
    policy(Ragged([1], [1]).sequences()).logprobs_T.sum().backward()
    experts = [p for name, p in policy.lm.named_parameters() if name.endswith("experts.down_proj")]
    for parameter in experts:
        assert parameter.grad is not None
        assert int((parameter.grad.flatten(1).abs().sum(1) > 0).sum()) == 2


def choices_of(policy: PolicyModel, *, shares: bool) -> Tensor:
    """The experts of every token of `sharing`, as a pass notes them."""
    _, sequences = sharing(shares=shares)
    with torch.no_grad():
        policy(sequences, choices=True)
    assert policy.routing is not None and policy.routing.last is not None and sequences.place_S is not None
    chosen = torch.stack(policy.routing.last.chosen, 1).to(choice_dtype(6))[sequences.place_S.clamp(min=0)]
    chosen[sequences.place_S < 0] = nothing_given(chosen.dtype)
    return chosen


@pytest.mark.parametrize("noted_shared", [True, False])
@pytest.mark.parametrize("replayed_shared", [True, False])
def test_replay_with_the_same_weights_is_the_same_to_the_bit_and_survives_other_layouts(
    folder: Path, noted_shared: bool, replayed_shared: bool
) -> None:
    policy = packed_policy(folder)
    choices = choices_of(policy, shares=noted_shared)
    with torch.no_grad():
        own_T = policy(sharing(shares=replayed_shared)[1]).logprobs_T
        replayed_T = policy(sharing(choices, shares=replayed_shared)[1]).logprobs_T
    assert torch.equal(own_T, replayed_T)
    assert policy.routing is not None and policy.routing.last is not None
    assert float(policy.routing.last.changed_L.sum()) == 0


def moved(folder: Path) -> PolicyModel:
    """The policy after an update that turned its routers."""
    policy = packed_policy(folder)
    torch.manual_seed(8)
    with torch.no_grad():
        for name, parameter in policy.lm.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.add_(0.5 * torch.randn_like(parameter))
    return policy


def test_replay_takes_the_old_experts_with_the_routers_new_weights(folder: Path) -> None:
    choices = choices_of(packed_policy(folder), shares=True)
    policy = moved(folder)
    with torch.no_grad():
        free_T = policy(sharing()[1]).logprobs_T
    logprobs_T = policy(sharing(choices)[1]).logprobs_T
    assert policy.routing is not None and policy.routing.last is not None
    routed = policy.routing.last
    assert float(routed.changed_L.sum()) > 0 and float((logprobs_T.detach() - free_T).abs().max()) > 1e-3
    noted_TLK = choices[sharing()[0].positions() - 1].long()
    for layer in range(2):
        counts_E = torch.bincount(noted_TLK[:, layer].flatten(), minlength=6)
        assert routed.counts_LE[layer].tolist() == counts_E.tolist()
    torch.testing.assert_close(logprobs_T, forced_logprobs(folder, policy, choices), atol=1e-5, rtol=0)
    # The routers go on learning through the weights of the experts that were given.
    logprobs_T.sum().backward()
    gates = [p for name, p in policy.lm.named_parameters() if name.endswith("mlp.gate.weight")]
    assert all(gate.grad is not None and float(gate.grad.abs().max()) > 0 for gate in gates)


def forced_logprobs(folder: Path, policy: PolicyModel, choices: Tensor) -> Tensor:
    """Plain passes of transformers with a router that is written anew here: it takes the noted experts of its sequence."""
    plain = plain_model(folder)
    plain.load_state_dict(policy.lm.state_dict())
    batch, _ = sharing(choices)
    at: list[Tensor] = []

    def forced(layer: int) -> Any:
        gate = plain.model.layers[layer].mlp.gate

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            taken = at[-1][:, layer].long()
            weights = logits.softmax(-1).gather(1, taken)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, taken

        return forward

    for layer in range(2):
        plain.model.layers[layer].mlp.gate.forward = forced(layer)
    found = []
    lengths = batch.sequence_lengths_N.tolist()
    for ids, taken, prompt in zip(
        batch.token_ids_S.split(lengths), choices.split(lengths), batch.prompt_lengths_N, strict=True
    ):
        # The last token, whose state nothing reads, may have none noted.
        at.append(torch.where(taken == 255, torch.tensor([0, 1], dtype=torch.uint8), taken))
        with torch.no_grad():
            logprobs = plain(ids[None]).logits[0, int(prompt) - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(1, ids[int(prompt) :, None])[:, 0])
    return torch.cat(found)


def test_recomputed_layers_take_the_given_experts_too(folder: Path) -> None:
    choices = choices_of(packed_policy(folder), shares=True)
    gradients = []
    for recomputed in (False, True):
        policy = moved(folder)
        if recomputed:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
        outputs = policy(sharing(choices)[1], balance=True)
        assert policy.routing is not None and policy.routing.last is not None
        routed = policy.routing.last
        before = routed.counts_LE.clone()
        (outputs.logprobs_T.sum() + balance_loss(routed.probs, routed.counts_LE, 20)).backward()
        assert torch.equal(routed.counts_LE, before), "layers that are computed again are not counted again"
        gradients.append({name: p.grad for name, p in policy.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_the_auxiliary_loss_is_transformers_formula_layer_by_layer(folder: Path) -> None:
    policy, plain = packed_policy(folder), plain_model(folder)
    rows = router_rows(plain, RAGGED)
    expected = sum(float(load_balancing_loss_func((logits_TE,), 6, 2)) for logits_TE in rows) / len(rows)
    policy(RAGGED.sequences(), balance=True)
    assert policy.routing is not None and policy.routing.last is not None
    routed = policy.routing.last
    loss = balance_loss(routed.probs, routed.counts_LE, 19)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    gate = policy.lm.get_parameter("model.layers.0.mlp.gate.weight")
    assert gate.grad is not None and float(gate.grad.abs().max()) > 0
