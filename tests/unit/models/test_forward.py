"""Log-probs, entropies and exact KLs of packed sequences against plain transformers, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, Ragged, make_folder, packed_policy, plain_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_rl.algos.losses.contract import LossInput
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.segments import Segments
from grpo_rl.models.forward import PolicyModel
from grpo_rl.models.lm_head import Head, chunks_of, head_columns, in_chunks, token_logprobs
from grpo_rl.models.packing import Sequences
from grpo_rl.types import Batch
from grpo_rl.workers.sharded_policy import sequences_of

RAGGED = Ragged(prompt_lengths=[3, 7, 1, 12, 5], response_lengths=[1, 9, 14, 1, 0], seed=1)
CASES = [(family, tied) for family in FAMILIES for tied in (True, False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    made: dict[tuple[str, bool], Path] = {}

    def get(family: str, tied: bool) -> Path:
        if (family, tied) not in made:
            made[family, tied] = make_folder(tmp_path_factory.mktemp(family), family, tied)
        return made[family, tied]

    return get


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reference"), "qwen3", tied=False, seed=99)


# ---- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_logprobs_and_entropies_are_those_of_a_plain_forward_of_each_sequence(folder, family, tied, temperature):
    path = folder(family, tied)
    out = packed_policy(path, temperature=temperature)(RAGGED.sequences(), want_entropy=True)
    logprobs_TV = RAGGED.plain_logprobs_TV(plain_model(path), temperature)
    expected_T = logprobs_TV.gather(1, RAGGED.targets_T()[:, None])[:, 0]
    torch.testing.assert_close(out.logprobs_T, expected_T, atol=2e-5, rtol=0)
    torch.testing.assert_close(out.entropy_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1), atol=2e-5, rtol=0)
    assert out.full_kl_T is None and out.hidden_TD is None


@pytest.mark.parametrize(("family", "tied"), CASES)
@pytest.mark.parametrize("temperature", [1.0, 1.5])
@torch.no_grad()
def test_the_full_kl_is_the_sum_over_the_vocabulary(folder, reference, family, tied, temperature):
    path = folder(family, tied)
    ref = packed_policy(reference, temperature=temperature)
    hidden_TD = ref(RAGGED.sequences(), want_hidden=True).hidden_TD
    out = packed_policy(path, temperature=temperature)(
        RAGGED.sequences(), ref_hidden_TD=hidden_TD, ref_head_VD=ref.lm.get_output_embeddings().weight
    )
    policy_TV = RAGGED.plain_logprobs_TV(plain_model(path), temperature)
    ref_TV = RAGGED.plain_logprobs_TV(plain_model(reference), temperature)
    expected_T = torch.zeros(len(policy_TV))
    for token in range(VOCAB):
        expected_T += policy_TV[:, token].exp() * (policy_TV[:, token] - ref_TV[:, token])
    torch.testing.assert_close(out.full_kl_T, expected_T, atol=1e-4, rtol=0)
    assert float(expected_T.min()) > 0.1, "the two models must differ, or this test sees nothing"


# ---- gradients and memory --------------------------------------------------------------------------


def gradients(policy: PolicyModel, reference: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum of all three outputs with different weights per token."""
    ref = packed_policy(reference)
    with torch.no_grad():
        hidden_TD = ref(RAGGED.sequences(), want_hidden=True).hidden_TD
    policy.zero_grad()
    out = policy(
        RAGGED.sequences(),
        want_entropy=True,
        ref_hidden_TD=hidden_TD,
        ref_head_VD=ref.lm.get_output_embeddings().weight.detach(),
    )
    weight_T = torch.linspace(-1, 1, len(out.logprobs_T))
    (weight_T * (out.logprobs_T + 0.3 * out.entropy_T + 0.2 * out.full_kl_T)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_gradients_do_not_depend_on_the_chunk_size(folder, reference, family, tied):
    policy = packed_policy(folder(family, tied), chunk_tokens=1000)
    whole = gradients(policy, reference)
    for chunk_tokens in (1, 7, 25):
        policy.chunk_tokens = chunk_tokens
        for name, gradient in gradients(policy, reference).items():
            largest = float(whole[name].abs().max())
            torch.testing.assert_close(gradient, whole[name], atol=1e-5 * largest, rtol=0, msg=name)


def test_gradients_are_those_of_plain_transformers(folder):
    path = folder("qwen3", True)
    policy, plain = packed_policy(path, temperature=0.8, chunk_tokens=4), plain_model(path)
    weight_T = torch.linspace(-1, 1, len(RAGGED.targets_T()))
    (weight_T * policy(RAGGED.sequences()).logprobs_T).sum().backward()
    logprobs_TV = RAGGED.plain_logprobs_TV(plain, 0.8)
    (weight_T * logprobs_TV.gather(1, RAGGED.targets_T()[:, None])[:, 0]).sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        largest = float(expected[name].grad.abs().max())
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5 * largest, rtol=0, msg=name)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest output of any operation, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return out


@pytest.mark.parametrize("want_all", [False, True])
def test_logits_of_all_tokens_never_exist_at_once(tmp_path, want_all):
    vocabulary, chunk_tokens = 2048, 16
    path = make_folder(tmp_path, "qwen3", tied=True, vocab_size=vocabulary, hidden_size=8, head_dim=4, intermediate_size=16)
    policy = packed_policy(path, chunk_tokens=chunk_tokens)
    ragged = Ragged([4] * 8, [40] * 8)
    num_trained = len(ragged.targets_T())
    sequences = ragged.sequences()
    hidden_TD = torch.randn(num_trained, 8) if want_all else None
    head_VD = torch.randn(vocabulary, 8) if want_all else None
    with LargestTensor() as seen:
        out = policy(sequences, want_entropy=want_all, ref_hidden_TD=hidden_TD, ref_head_VD=head_VD)
        loss = out.logprobs_T.sum() + (out.entropy_T.sum() + out.full_kl_T.sum() if want_all else 0.0)
        loss.backward()
    assert num_trained == 20 * chunk_tokens
    assert seen.num_elements == chunk_tokens * vocabulary


class Casts(TorchDispatchMode):
    """Counts the casts of whole heads to bfloat16."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.number = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16 and out.shape == self.shape:
            self.number += 1
        return out


def test_a_head_in_bfloat16_is_cast_once_in_a_pass(tmp_path):
    policy = packed_policy(make_folder(tmp_path, "qwen3", tied=True), chunk_tokens=4)
    policy.precision = "bfloat16"
    weight_VD = policy.lm.get_output_embeddings().weight
    with Casts(tuple(weight_VD.shape)) as casts:
        policy(RAGGED.sequences()).logprobs_T.sum().backward()
    assert casts.number == 1 and weight_VD.grad is not None


# ---- the shift --------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 2, 3])
def test_a_trained_token_that_no_token_of_its_sequence_comes_before_is_refused(position):
    # Two sequences of two tokens; the first has the trained one.
    with pytest.raises(ValueError, match="no token of its own sequence before it"):
        two, one = torch.tensor([2, 2]), torch.tensor([1, 0])
        Sequences.of(torch.tensor([1, 2, 3, 4]), two, torch.tensor([position]), one, torch.device("cpu"))


# ---- several turns --------------------------------------------------------------------------------------


def test_trained_tokens_with_context_between_them_have_the_plain_logprobs_and_gradients(folder):
    """Two conversations; the loss is the mean of -advantage * log-prob, worked out below from the plain model's logits."""
    batch = Batch(
        prompt_lengths_N=torch.tensor([3, 2]),
        response_lengths_N=torch.tensor([6, 3]),
        group_N=torch.tensor([0, 0]),
        token_ids_S=torch.tensor([5, 9, 2, 7, 7, 1, 30, 8, 4, 11, 3, 6, 2, 14]),
        rewards_N=torch.zeros(2),
        rollout_logprobs_T=torch.zeros(5),
        # Turn, tool output of two tokens, turn; and a context token in front of two trained ones.
        positions_T=torch.tensor([3, 6, 8, 12, 13]),
        trained_lengths_N=torch.tensor([3, 2]),
    )
    advantages = [0.5, -1.0, 2.0, 1.5, -0.25]
    policy, plain = packed_policy(folder("qwen3", False), temperature=0.9), plain_model(folder("qwen3", False))
    logprobs_T = policy(sequences_of(batch, torch.device("cpu"), share_prompts=True)).logprobs_T
    inputs = LossInput(logprobs_T, torch.tensor(advantages), Segments(batch.trained_lengths_N))
    Objective()(inputs, batch.counts())[0].backward()

    terms = []
    for begin, end, trained in ((0, 9, [3, 6, 8]), (9, 14, [3, 4])):
        ids = batch.token_ids_S[begin:end]
        distributions = (plain(ids[None]).logits[0] / 0.9).log_softmax(-1)
        terms += [distributions[place - 1, ids[place]] for place in trained]
    torch.testing.assert_close(logprobs_T.detach(), torch.stack(terms).detach(), atol=2e-5, rtol=0)
    (-sum(a * term for a, term in zip(advantages, terms, strict=True)) / 5).backward()
    expected = dict(plain.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in expected.values())
    for name, parameter in policy.lm.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4 * largest, rtol=0, msg=name)
    # What lies between the turns is read: another tool output gives other log-probs later on, and none before.
    changed = batch.replace(token_ids_S=batch.token_ids_S.clone().index_fill(0, torch.tensor([5]), 13))
    difference_T = policy(sequences_of(changed, torch.device("cpu"), share_prompts=True)).logprobs_T - logprobs_T
    assert difference_T[0] == 0 and difference_T[1:3].abs().min() > 1e-4


# ---- distributions over the tokens that could be sampled, against a float64 softmax over them -----------------------

FEW = Ragged(prompt_lengths=[3, 7, 1, 5], response_lengths=[2, 9, 6, 0], seed=4)


def supports() -> list[list[int]]:
    """Return a random set for each trained token, with the token in it; one is the token alone, one is everything."""
    generator = torch.Generator().manual_seed(11)
    sets = []
    for number, target in enumerate(FEW.targets_T().tolist()):
        size = 1 if number == 3 else VOCAB if number == 4 else int(torch.randint(2, 12, (), generator=generator))
        others = [token for token in torch.randperm(VOCAB, generator=generator).tolist() if token != target]
        sets.append([*others[: size - 1], target])
    return sets


@torch.no_grad()
def test_logprobs_entropies_and_kls_are_those_of_a_softmax_over_the_allowed_tokens(folder, reference):
    batch, sets = FEW.batch(), supports()
    batch = batch.replace(
        support_counts_T=torch.tensor([len(each) for each in sets], dtype=torch.int32),
        support_ids_M=torch.tensor([token for each in sets for token in each], dtype=torch.int32),
    )
    given = sequences_of(batch, torch.device("cpu"), share_prompts=False)
    models = [packed_policy(path, temperature=0.8, chunk_tokens=5) for path in (folder("qwen3", False), reference)]
    hidden = [model(given, want_hidden=True).hidden_TD for model in models]
    heads = [model.lm.get_output_embeddings().weight for model in models]
    out = models[0](given, want_entropy=True, ref_hidden_TD=hidden[1], ref_head_VD=heads[1])
    logits = [(x.double() @ head.double().T / 0.8).tolist() for x, head in zip(hidden, heads, strict=True)]
    for row, (allowed, target) in enumerate(zip(sets, FEW.targets_T().tolist(), strict=True)):
        p, q = ({token: math.exp(of[row][token]) for token in allowed} for of in logits)
        p, q = ({token: value / sum(of.values()) for token, value in of.items()} for of in (p, q))
        assert float(out.logprobs_T[row]) == pytest.approx(math.log(p[target]), abs=1e-5)
        assert float(out.entropy_T[row]) == pytest.approx(-sum(x * math.log(x) for x in p.values()), abs=1e-5)
        assert float(out.full_kl_T[row]) == pytest.approx(sum(p[t] * math.log(p[t] / q[t]) for t in allowed), abs=1e-4)
    assert float(out.logprobs_T[3]) == 0.0, "the only token that could be sampled is certain"


@pytest.mark.parametrize("column", [0, 1, 2], ids=["logprob", "entropy", "full_kl"])
def test_gradients_are_those_of_finite_differences_and_pass_nothing_to_other_tokens(column):
    torch.manual_seed(0)
    hidden_TD, ref_TD, head_VD, ref_VD = torch.randn(3, 4), torch.randn(3, 4), torch.randn(7, 4), torch.randn(7, 4)
    target_T = torch.tensor([2, 0, 6])
    allowed = [[2, 5, 1], [0], [6, 3]]
    row_M = torch.tensor([row for row, each in enumerate(allowed) for _ in each], dtype=torch.int32)
    id_M = torch.tensor([token for each in allowed for token in each], dtype=torch.int32)

    def value(head_VD: torch.Tensor) -> torch.Tensor:
        head, ref_head = (Head.of(weight_VD, None, 0.7, "float32") for weight_VD in (head_VD, ref_VD))
        asked = {"want_entropy": True, "ref_head": ref_head, "ref_hidden_TD": ref_TD, "support": (row_M, id_M)}
        found = head_columns(head, hidden_TD, target_T, **asked)[column]
        return (found * torch.tensor([1.0, -2.0, 0.5])).sum()

    parameter = head_VD.clone().requires_grad_()
    value(parameter).backward()
    assert parameter.grad.isfinite().all()
    assert parameter.grad[4].abs().max() == 0, "token 4 could be sampled nowhere"
    for v, d in [(2, 0), (5, 3), (6, 1), (3, 2), (0, 1)]:
        step = torch.zeros_like(head_VD)
        step[v, d] = 1e-2
        slope = float(value(head_VD + step) - value(head_VD - step)) / 2e-2
        assert float(parameter.grad[v, d]) == pytest.approx(slope, abs=2e-3)


# ---- the log-probs' own backward pass -------------------------------------------------------------------------------


def inputs_of_head(num_tokens: int, vocabulary: int, *, bias: bool) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return hidden states, weight and perhaps bias, targets, and a gradient of their log-probs."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(num_tokens, 24), (vocabulary, 24), *([(vocabulary,)] if bias else [])]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    target_T = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return inputs, target_T, torch.randn(num_tokens, generator=generator)


@pytest.mark.parametrize(("precision", "bound"), [("float32", 2e-6), ("tf32", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 50])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("limited", [False, True], ids=["all tokens", "some could be sampled"])
def test_logprobs_and_gradients_are_those_of_autograd_in_float64(precision, bound, chunk_tokens, bias, limited):
    inputs, target_T, grad_T = inputs_of_head(23, 60, bias=bias)
    left_out_TV = torch.rand(23, 60, generator=torch.Generator().manual_seed(1)) < 0.4
    left_out_TV.scatter_(1, target_T[:, None], False)
    if not limited:
        left_out_TV[:] = False
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    logits_TV = torch.nn.functional.linear(exact[0], *exact[1:]) / 0.7
    expected_T = logits_TV.masked_fill(left_out_TV, -math.inf).log_softmax(-1).gather(1, target_T[:, None])[:, 0]
    expected_T.backward(grad_T.double())
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    head = Head.of(ours[1], ours[2] if bias else None, 0.7, precision)
    counts_T, ids_M = (~left_out_TV).sum(1).int(), left_out_TV.logical_not().nonzero()[:, 1]
    chunks = chunks_of(23, chunk_tokens, (counts_T, ids_M) if limited else None)
    logprobs_T = token_logprobs(head, ours[0], target_T, chunks)
    logprobs_T.backward(grad_T)
    assert float((logprobs_T - expected_T).detach().abs().max()) < 20 * bound
    for tensor, correct in zip(ours, exact, strict=True):
        assert float((tensor.grad - correct.grad).norm() / correct.grad.norm()) < bound


def test_no_gradient_is_made_of_what_is_frozen_and_none_of_no_tokens():
    (hidden_TD, weight_VD), target_T, grad_T = inputs_of_head(9, 30, bias=False)
    hidden_TD.requires_grad_()
    token_logprobs(Head.of(weight_VD, None, 1.0, "float32"), hidden_TD, target_T, chunks_of(9, 4)).backward(grad_T)
    assert hidden_TD.grad is not None and weight_VD.grad is None
    weight_VD.requires_grad_()
    empty_TD = torch.zeros(0, 24, requires_grad=True)
    token_logprobs(Head.of(weight_VD, None, 1.0, "float32"), empty_TD, target_T[:0], chunks_of(0, 4)).sum().backward()
    assert empty_TD.grad.shape == (0, 24) and weight_VD.grad.abs().max() == 0


class Traffic(TorchDispatchMode):
    """Adds up the elements that operations read and write in tensors of [chunk, vocabulary]; views move nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.num_elements = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func not in (torch.ops.aten.gather.default, torch.ops.aten.scatter_.src):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            self.num_elements += sum(tensor.numel() for tensor in tensors if tensor.numel() == self.size)
        return out


@pytest.mark.parametrize(("chunk_tokens", "times"), [(16, [8, 14]), (64, [7, 11])], ids=["chunks", "one chunk"])
def test_logprobs_move_less_of_the_logits_than_autograd(chunk_tokens, times):
    (hidden_TD, weight_VD), target_T, grad_T = inputs_of_head(64, 500, bias=False)
    moved, chunks = [], chunks_of(64, chunk_tokens)
    for columns in (False, True):
        inputs = hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_()
        head = Head.of(inputs[1], None, 0.7, "float32")
        with Traffic(chunk_tokens * 500) as traffic:
            if columns:
                logprobs_T = in_chunks(
                    lambda rows, _, head=head, x_TD=inputs[0]: head_columns(head, x_TD[rows], target_T[rows]), chunks
                )[0]
            else:
                logprobs_T = token_logprobs(head, inputs[0], target_T, chunks)
            logprobs_T.backward(grad_T)
        moved.append(traffic.num_elements / (64 * 500))
    assert moved == times, "how often all logits were read or written, in both passes"
