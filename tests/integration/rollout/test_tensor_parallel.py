"""A vLLM engine whose weights are split over two worker processes, each of which receives the whole update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import response_logits
from transformers import AutoModelForCausalLM

from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.rollout.senders import ObjectStoreSender
from grpo_rl.rollout.weights import check_digests
from grpo_rl.types import Completion, Request, Sampling


@pytest.mark.slow
def test_an_update_reaches_both_halves_of_a_tensor_parallel_engine(tiny_qwen3: Callable[[bool], Path]) -> None:
    folder = str(tiny_qwen3(False))
    spec = EngineSpec(folder, 128, max_num_seqs=8, tensor_parallel_size=2, verify_checksum=True)
    engine = ENGINES.get("vllm")(spec)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))

    sender = ObjectStoreSender(20_000, verify=True)
    engine.start_weight_update(1)
    for bucket in sender.buckets(model.state_dict().items()):
        engine.load_bucket(bucket)
    engine.finish_weight_update()
    check_digests(sender.sent_digests(), engine.received_digests(), "engine")

    request = Request("r", (5, 6, 7), Sampling(12, seed=1, ignore_eos=True))
    engine.submit([request])
    ended: list[Completion] = []
    while engine.num_unfinished:
        ended += engine.step()
    engine.close()
    [completion] = ended
    logprobs = response_logits(model, request.prompt_ids, completion.response_ids).log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(completion.response_ids).long()[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
