"""The checks of `scripts/gpu_check.py` on a GPU: packed attention, bf16 layers under FSDP2, the chunked head and the rest."""

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
