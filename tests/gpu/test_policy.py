"""The trainer's forward pass on a GPU: packed attention, bf16 layers under FSDP2, the chunked float32 head."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

VOCABULARY = 4096


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lengths() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 60, (24,), generator=generator), torch.randint(1, 200, (24,), generator=generator)


def logprobs(
    folder: Path, device: str, dtype: torch.dtype, *, sharded: bool = False, share_prompts: bool = True
) -> torch.Tensor:
    """Return the log-probs of 24 responses, two to each prompt, which a pass with `share_prompts` computes once."""
    from torch.distributed.device_mesh import init_device_mesh

    from grpo_rl.models import fsdp, load
    from grpo_rl.models.forward import PolicyModel
    from grpo_rl.types import Batch
    from grpo_rl.workers.sharded_policy import sequences_of

    prompts_N, responses_N = lengths()
    prompts_N[1::2] = prompts_N[::2]
    ids_S = torch.randint(0, VOCABULARY, (int((prompts_N + responses_N).sum()),), generator=torch.Generator().manual_seed(2))
    starts = ((prompts_N + responses_N).cumsum(0) - prompts_N - responses_N).tolist()
    for first, second, length in zip(starts[::2], starts[1::2], prompts_N[::2].tolist(), strict=True):
        ids_S[second : second + length] = ids_S[first : first + length]
    policy = PolicyModel(load.load_lm(str(folder), load.load_config(str(folder)))).to(device)
    if sharded:
        fsdp.shard(policy, init_device_mesh("cuda", (1,)), fsdp.Sharding(dtype))
    with torch.no_grad():
        rows = torch.arange(len(prompts_N)) // 2
        batch = Batch(prompts_N, responses_N, rows, ids_S, torch.zeros(len(rows)), torch.zeros(int(responses_N.sum())))
        return policy(sequences_of(batch, torch.device(device), share_prompts=share_prompts)).logprobs_T.float().cpu()


def test_float32_logprobs_on_the_gpu_are_those_of_the_cpu(model_folder: Path) -> None:
    torch.testing.assert_close(
        logprobs(model_folder, "cuda", torch.float32), logprobs(model_folder, "cpu", torch.float32), atol=2e-4, rtol=0
    )


def test_bf16_layers_under_fsdp2_stay_near_float32_and_the_head_stays_float32(model_folder: Path, process_group: None) -> None:
    difference = logprobs(model_folder, "cuda", torch.bfloat16, sharded=True) - logprobs(model_folder, "cpu", torch.float32)
    assert 0 < difference.abs().max() < 0.2  # above 0: the layers did compute in bf16
    assert difference.abs().mean() < 0.02


def test_shared_prompts_have_the_logprobs_of_unshared_ones_in_bf16(model_folder: Path, process_group: None) -> None:
    shared, alone = (
        logprobs(model_folder, "cuda", torch.bfloat16, sharded=True, share_prompts=share) for share in (True, False)
    )
    assert (shared - alone).abs().mean() < 0.02


def test_the_chunked_head_needs_memory_for_a_chunk_and_not_for_all_tokens() -> None:
    from grpo_rl.models.forward import _chunked_head

    tokens, vocabulary, hidden = 16_384, 65_536, 256
    hidden_TD = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
    head_VD = torch.randn(vocabulary, hidden, device="cuda", requires_grad=True)
    target_T = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = _chunked_head(
        hidden_TD, head_VD, None, target_T, 1.0, 1024, want_entropy=True, ref_hidden_TD=None, ref_head_VD=None, ref_bias_V=None
    )
    (out[0].sum() + out[1].sum()).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < tokens * vocabulary * 4 / 2, f"{used / 2**30:.2f} GiB"


def test_the_objective_gives_the_same_loss_and_gradient_as_on_the_cpu() -> None:
    from grpo_rl.algos.losses.contract import LossInput
    from grpo_rl.algos.objective import Objective
    from grpo_rl.algos.segments import Segments
    from grpo_rl.types import Counts

    objective = Objective(loss_agg_mode="seq-mean-token-mean", kl_loss_type="low_var_kl", kl_loss_coef=0.1)
    generator = torch.Generator().manual_seed(3)
    lengths_N = torch.tensor([3, 1, 0, 7])
    columns = [torch.randn(11, generator=generator) - 2 for _ in range(4)]
    results = []
    for device in ("cpu", "cuda"):
        policy_T, old_T, ref_T, advantages_T = (column.detach().clone().to(device) for column in columns)
        policy_T.requires_grad_()
        segments = Segments(lengths_N.to(device))
        inputs = LossInput(policy_T, advantages_T, segments, old_logprobs_T=old_T, ref_logprobs_T=ref_T)
        loss, _ = objective(inputs, Counts(num_tokens=11, num_sequences=3, num_groups=2))
        loss.backward()
        assert policy_T.grad is not None
        results.append((loss.item(), policy_T.grad.cpu()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1])
