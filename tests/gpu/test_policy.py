"""The trainer's forward pass on a GPU: packed attention, bf16 layers under FSDP2, the chunked float32 head."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from gpu_checks import CHECKS  # noqa: E402


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_of_the_gpu_passes(name: str) -> None:
    from gpu_check import rows_of

    rows = rows_of(name, "cuda")
    assert rows and not [row for row in rows if row.state == "failed"], rows


def test_the_chunked_head_needs_memory_for_a_chunk_and_not_for_all_tokens() -> None:
    from grpo_rl.models.forward import Head, head_columns, in_chunks

    tokens, vocabulary, hidden = 16_384, 65_536, 256
    hidden_TD = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
    head_VD = torch.randn(vocabulary, hidden, device="cuda", requires_grad=True)
    target_T = torch.randint(0, vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head = Head(head_VD, None, 1.0, "float32")
    out = in_chunks(lambda _, rows: head_columns(head, hidden_TD[rows], target_T[rows], want_entropy=True), tokens, 1024)
    (out[0].sum() + out[1].sum()).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < tokens * vocabulary * 4 / 2, f"{used / 2**30:.2f} GiB"
