"""Weights from a trainer process to vLLM on GPUs: through CUDA IPC (one GPU) and NCCL (two), and sleeping engines.

The engine has a process of its own, as in a run: a device buffer cannot be opened by the process that made it.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.rollout.senders import WeightSender, make_sender
from grpo_rl.rollout.weights import WeightTransferError, check_digests, merge_ranks
from grpo_rl.types import Completion, Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]
TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and there are {torch.cuda.device_count()}"
)

ANSWER_S = 300.0


def serve(spec: EngineSpec, device: int, connection: Connection) -> None:
    """An engine on one GPU that does what the other end of the pipe says."""
    torch.cuda.set_device(device)
    engine = ENGINES.get(spec.name)(spec)
    connection.send(None)
    while (order := connection.recv()) is not None:
        method, arguments = order
        try:
            if method == "generate":
                engine.submit(*arguments)
                answer: Any = []
                while engine.num_unfinished:
                    answer += engine.step()
            else:
                answer = getattr(engine, method)(*arguments)
        except Exception as error:  # the test reads it
            answer = error
        connection.send(answer)
    engine.close()


class RemoteEngine:
    """Calls methods of the engine in the other process; one at a time."""

    def __init__(self, spec: EngineSpec, device: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(spec, device, other))
        self._process.start()
        self._lock = threading.Lock()
        self._receive("start")

    def __call__(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            self._connection.send((method, arguments))
            answer = self._receive(method)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(60)
        self._process.kill()

    def _receive(self, what: str) -> Any:
        assert self._connection.poll(ANSWER_S), f"the engine did not answer {what}"
        return self._connection.recv()


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=512,
        max_position_embeddings=512,
        tie_word_embeddings=request.param == "tied",
        initializer_range=0.1,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config).bfloat16()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    model.cuda()  # type: ignore[call-arg]
    return model


def spec_for(model: Qwen3ForCausalLM, backend: Any, bucket_bytes: int) -> EngineSpec:
    return EngineSpec(
        model_path=str(model.name_or_path),
        max_model_len=256,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=16,
        gpu_memory_utilization=0.2,
        sleep_mode=backend == "ipc",
        weight_backend=backend,
        bucket_bytes=bucket_bytes,
        verify_checksum=True,
    )


@pytest.fixture
def start(model: Qwen3ForCausalLM) -> Iterator[Callable[[EngineSpec, int], RemoteEngine]]:
    engines: list[RemoteEngine] = []

    def start(spec: EngineSpec, device: int) -> RemoteEngine:
        engines.append(RemoteEngine(spec, device))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def perturb(model: Qwen3ForCausalLM, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))


def update(engine: RemoteEngine, sender: WeightSender, model: Qwen3ForCausalLM, version: int) -> None:
    engine("start_weight_update", version)
    for bucket in sender.buckets((name, tensor.bfloat16()) for name, tensor in model.state_dict().items()):
        engine("load_bucket", merge_ranks([bucket]))
    engine("finish_weight_update")
    check_digests(sender.sent_digests(), engine("received_digests"), "engine")


def assert_engine_has_weights_of(engine: RemoteEngine, model: Qwen3ForCausalLM, version: int) -> None:
    requests = [Request(f"{i}", np.array([5 + i, 6, 7], np.int32), Sampling(16, seed=i, ignore_eos=True)) for i in range(4)]
    completions: list[Completion] = engine("generate", requests)
    assert len(completions) == 4
    for completion in completions:
        assert completion.versions == ((version, 16),)
        prompt_ids = requests[int(completion.request_id)].prompt_ids
        ids = torch.tensor([[*prompt_ids, *completion.response_ids]], device="cuda")
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt_ids) - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].cpu()
        # bfloat16 on both sides, with different kernels.
        assert (torch.tensor(completion.logprobs) - expected).abs().mean() < 0.05


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 300_000])
@pytest.mark.parametrize("backend", ["object_store", "ipc", pytest.param("nccl", marks=TWO_GPUS)])
def test_weights_reach_an_engine(
    model: Qwen3ForCausalLM, start: Callable[[EngineSpec, int], RemoteEngine], backend: Any, bucket_bytes: int
) -> None:
    """The engine has a GPU of its own if weights come by NCCL, else the trainer's."""
    engine = start(spec_for(model, backend, bucket_bytes), int(backend == "nccl"))
    sender = make_sender(backend, bucket_bytes, verify=True)
    if backend == "nccl":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rendezvous = NcclRendezvous("127.0.0.1", probe.getsockname()[1], world_size=2)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(engine, "connect", rendezvous)
            sender.connect(rendezvous)
            joined.result(ANSWER_S)
    for version in (1, 2):
        perturb(model, version)
        update(engine, sender, model, version)
        assert_engine_has_weights_of(engine, model, version)
    sender.close()


def test_a_sleeping_engine_frees_its_memory_and_samples_again_after_new_weights(
    model: Qwen3ForCausalLM, start: Callable[[EngineSpec, int], RemoteEngine]
) -> None:
    engine = start(spec_for(model, "ipc", 1 << 26), 0)
    awake = torch.cuda.mem_get_info()[0]
    engine("sleep")
    assert torch.cuda.mem_get_info()[0] > awake + (1 << 30)
    engine("wake_up", "weights")
    with pytest.raises(WeightTransferError, match="gave its weights up"):
        engine("generate", [Request("early", np.array([5], np.int32), Sampling(1))])
    perturb(model, 11)
    update(engine, make_sender("ipc", 1 << 26, verify=True), model, 1)
    engine("wake_up", "kv_cache")
    assert_engine_has_weights_of(engine, model, 1)
