"""Prompts that are computed once for all their responses: the values and gradients of sequences that share nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, make_folder, packed_policy
from torch import Tensor, nn

from grpo_rl.models.attention import packed_attention
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.heads import ValueModel
from grpo_rl.models.packing import GatheredKeys, Packing, Sequences
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import sequences_of

CPU = torch.device("cpu")
# Blocks of a family: the prompt's length, then those of what continues it; a family without continuations is a sequence alone.
FAMILIES = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 15), max_size=5)), min_size=1, max_size=5)
# Groups: the prompt's length, then each response's.
GROUPS = st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 12), min_size=1, max_size=5)), min_size=1, max_size=4)


# ---- attention --------------------------------------------------------------------------------------


def blocks_of(families: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    """Lengths of the blocks, and the block that each one continues."""
    lengths: list[int] = []
    continues: list[int] = []
    for prompt, own in families:
        continues += [-1, *[len(lengths)] * len(own)]
        lengths += [prompt, *own]
    return torch.tensor(lengths), torch.tensor(continues)


def written_out(query: Tensor, key: Tensor, value: Tensor, lengths_N: Tensor, continues_N: Tensor, scale: float) -> Tensor:
    """[S, heads, head_dim]: softmax over a mask of all pairs of tokens."""
    starts = (lengths_N.cumsum(0) - lengths_N).tolist()
    sees = torch.zeros(query.shape[1], query.shape[1], dtype=torch.bool)
    for start, length, prompt in zip(starts, lengths_N.tolist(), continues_N.tolist(), strict=True):
        own = slice(start, start + length)
        sees[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
        if prompt >= 0:
            sees[own, starts[prompt] : starts[prompt] + int(lengths_N[prompt])] = True
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(~sees, -math.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


def with_copied_keys(packing: Packing, lengths_N: Tensor, continues_N: Tensor) -> Packing:
    """The packing that other devices than CPUs get."""
    return replace(packing, keys=GatheredKeys.of(lengths_N, continues_N, CPU))


@pytest.mark.parametrize("copied", [False, True], ids=["in two parts", "with copied keys and a mask"])
@settings(max_examples=30, deadline=None)
@given(FAMILIES, st.sampled_from([(4, 4), (4, 2), (4, 1)]))
def test_a_block_attends_to_its_prompt_and_to_itself_and_so_do_its_gradients(copied, families, heads):
    lengths_N, continues_N = blocks_of(families)
    packing = Packing.of(lengths_N, CPU, continues_N)
    if copied:
        packing = with_copied_keys(packing, lengths_N, continues_N)
    generator = torch.Generator().manual_seed(int(lengths_N.sum()))
    query, key, value, weights = (
        torch.randn(count, int(lengths_N.sum()), 8, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    expected = written_out(query, key, value, lengths_N, continues_N, 0.3)
    out, _ = packed_attention(nn.Identity(), query[None], key[None], value[None], None, packing=packing, scaling=0.3)
    torch.testing.assert_close(out[0], expected, atol=1e-12, rtol=0)
    for ours, theirs in zip(
        *(torch.autograd.grad((x * weights.detach().transpose(0, 1)).sum(), (query, key, value)) for x in (out[0], expected)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


# ---- the model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    # Wide enough that each token's state depends on all others, narrow enough that float32 is good to six digits.
    folder = make_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True, initializer_range=0.05)
    return packed_policy(folder, temperature=0.9)


def batch_of(groups: list[tuple[int, list[int]]], seed: int) -> Batch:
    """Random rollouts of these groups, in any order."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for group, (length, responses) in enumerate(groups):
        prompt = torch.randint(2, VOCAB, (length,), generator=generator)
        rows += [(group, prompt, torch.randint(2, VOCAB, (size,), generator=generator)) for size in responses]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    return Batch(
        prompt_lengths_N=torch.tensor([len(prompt) for _, prompt, _ in rows]),
        response_lengths_N=torch.tensor([len(response) for _, _, response in rows]),
        group_N=torch.tensor([group for group, _, _ in rows]),
        token_ids_S=torch.cat([ids for _, prompt, response in rows for ids in (prompt, response)]),
        rewards_N=torch.zeros(len(rows)),
    )


def values_and_gradients(policy: PolicyModel, batch: Batch, share: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """Log-probs and entropies, the gradient of a weighted sum of both, and how many tokens ran through the body."""
    policy.zero_grad(set_to_none=True)
    sequences = sequences_of(batch, CPU, share_prompts=share)
    out = policy(sequences, want_entropy=True)
    assert out.entropy_T is not None
    weight_T = torch.linspace(-1.0, 1.5, len(out.logprobs_T))
    (weight_T * (out.logprobs_T + 0.3 * out.entropy_T)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return torch.cat([out.logprobs_T, out.entropy_T]).detach(), gradients, len(sequences.token_ids_S)


def assert_equal(policy: PolicyModel, batch: Batch) -> tuple[int, int]:
    """Values and gradients to 1e-6 of the largest one, shared and not; return the tokens of either."""
    values, gradients, num_alone = values_and_gradients(policy, batch, False)
    shared_values, shared_gradients, num_shared = values_and_gradients(policy, batch, True)
    torch.testing.assert_close(shared_values, values, atol=1e-6 * max(1.0, float(values.abs().max())), rtol=0)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 1e-2 and gradients.keys() == shared_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, atol=1e-6 * largest, rtol=0, msg=name)
    return num_alone, num_shared


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS.filter(lambda groups: any(any(own) for _, own in groups)), seed=st.integers(0, 99))
def test_shared_prompts_change_no_value_and_no_gradient(policy, groups, seed):
    assert_equal(policy, batch_of(groups, seed))


def test_a_prompt_runs_through_the_body_once_and_the_last_token_of_its_responses_never(policy):
    groups = [(16, [10, 10, 10, 10]), (7, [5])]
    batch = batch_of(groups, 1)
    num_alone, num_shared = assert_equal(policy, batch)
    assert num_alone == 4 * (16 + 10) + 7 + 5
    assert num_shared == 16 + 4 * 9 + 7 + 4


def test_only_what_the_tokens_have_in_common_is_shared(policy):
    """Two conversations of a group that part in their third token, before anything is trained."""
    batch = batch_of([(6, [4, 4])], 3)
    changed = batch.replace(token_ids_S=batch.token_ids_S.clone())
    changed.token_ids_S[12] = 1 + int(batch.token_ids_S[12] != 1)
    num_alone, num_shared = assert_equal(policy, changed)
    assert (num_alone, num_shared) == (20, 2 + 7 + 7)


@torch.no_grad()
def test_values_and_scores_share_prompts_too(policy):
    batch = batch_of([(9, [7, 12, 3]), (5, [8, 8])], 4)
    critic = ValueModel(policy.lm)
    nn.init.normal_(critic.head.weight)
    values = [critic(sequences_of(batch, CPU, share_prompts=share)) for share in (False, True)]
    torch.testing.assert_close(values[1], values[0], atol=1e-5, rtol=0)
    # A score is read at its own position, not before it: at the prompt's end, and at the response's.
    ends_N = batch.sequence_lengths_N.cumsum(0) - 1
    both_P = torch.stack([ends_N - batch.response_lengths_N, ends_N], 1).reshape(-1)
    states = []
    for group_N in (None, batch.group_N):
        sequences = Sequences.scored(batch.token_ids_S, batch.sequence_lengths_N, both_P, CPU, group_N)
        assert len(sequences.token_ids_S) == int(batch.sequence_lengths_N.sum()) - (0 if group_N is None else 2 * 9 + 5)
        states.append(policy.hidden_TD(sequences))
    torch.testing.assert_close(states[1], states[0], atol=1e-5, rtol=0)
