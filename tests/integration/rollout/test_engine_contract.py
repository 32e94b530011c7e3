"""The contract of every rollout engine, tried on each of them with a tied and an untied model."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import EOS, perturb, response_logits, sampled
from rank_processes import VOCAB
from torch.distributed import DistNetworkError
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from grpo_rl.rollout.engine import EngineSpec, NcclRendezvous, RolloutEngine
from grpo_rl.rollout.engines import ENGINES
from grpo_rl.rollout.senders import ObjectStoreSender
from grpo_rl.rollout.vllm.vllm_patches import gaps
from grpo_rl.rollout.weights import WeightTransferError, check_digests, pack_buckets
from grpo_rl.types import Completion, Request, Sampling

PROMPTS = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 2), (11,), (20, 21, 22, 23, 24), (40, 30, 20, 10)]
LONG_PROMPT = tuple(2 + (7 * i) % (VOCAB - 2) for i in range(290))
"""More than two blocks of a prefix cache with 128 tokens a block."""
TOKENS: dict[str, list[list[int]]] = {}
"""What vLLM sampled from a model: an engine in this process, and one in a separate process."""


@dataclass
class Replica:
    """An engine, and a transformers model that has the weights the engine should have."""

    engine: RolloutEngine
    model: Qwen3ForCausalLM
    spec: EngineSpec

    def run(self, requests: list[Request]) -> list[Completion]:
        return sampled(self.engine, requests)

    def logprobs(self, request: Request, completion: Completion) -> torch.Tensor:
        """Return the model's log-probs of the sampled tokens, at the request's temperature."""
        logits = response_logits(self.model, request.prompt_ids, completion.response_ids)
        logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(completion.response_ids).long()[:, None])[:, 0]

    def change_model(self) -> None:
        """Give the model other weights; the engine keeps the old ones."""
        perturb(self.model, self.engine.weight_version + 100)

    def update(self, bucket_bytes: int = 1 << 20, keep_cache: bool = False) -> ObjectStoreSender:
        """Bring the engine to the model's weights; no tokens are sampled meanwhile."""
        sender = ObjectStoreSender(bucket_bytes, verify=True)
        self.engine.start_weight_update(self.engine.weight_version + 1)
        for bucket in sender.buckets(self.model.state_dict().items()):
            assert bucket.data is not None
            bucket.data.flags.writeable = False  # as Ray's shared memory is
            self.engine.load_bucket(bucket)
            assert self.engine.step() == []
        self.engine.finish_weight_update(keep_cache)
        return sender


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("vllm-tied", marks=pytest.mark.campaign),
        "vllm-untied",
        "separate-untied",
        "hf-tied",
        pytest.param("hf-untied", marks=pytest.mark.campaign),
    ],
)
def replica(request: pytest.FixtureRequest, tiny_qwen3: Callable[[bool], Path]) -> Iterator[Replica]:
    kind, head = request.param.split("-")
    name = "vllm" if kind == "separate" else kind
    folder = str(tiny_qwen3(head == "tied"))
    # Not two of the longest prompts fit into a pass.
    spec = EngineSpec(
        model_path=folder,
        name=name,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        verify_checksum=True,
        separate_process=kind == "separate",
    )
    engine = ENGINES.get(name)(spec)
    yield Replica(engine, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), spec)
    engine.close()


def requests_for(tag: str, count: int, **sampling: float) -> list[Request]:
    """`count` requests over prompts of different lengths, each with a seed of its own."""
    settings = {"max_tokens": 12, "ignore_eos": True} | sampling
    return [
        Request(f"{tag}-{i}", PROMPTS[i % len(PROMPTS)], Sampling(**settings, seed=1000 + i))  # type: ignore[arg-type]
        for i in range(count)
    ]


def assert_logprobs_match(replica: Replica, requests: list[Request], completions: list[Completion]) -> None:
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.logprobs) == len(completion.response_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), replica.logprobs(request, completion), atol=1e-4, rtol=0)


# ---- sampling ------------------------------------------------------------------------------------------


def test_every_request_is_answered_once_also_where_more_are_asked_than_fit_and_while_others_run(replica: Replica) -> None:
    first, second = requests_for("early", 3), requests_for("late", 21)
    replica.engine.submit(first)
    ended = replica.engine.step()
    replica.engine.submit(second)
    assert replica.engine.num_unfinished == 24
    while replica.engine.num_unfinished:
        ended += replica.engine.step()
    assert sorted(c.request_id for c in ended) == sorted(r.request_id for r in first + second)
    assert replica.engine.step() == []


def test_prompts_with_seeds_that_do_not_fit_into_one_pass_are_sampled_like_others(replica: Replica) -> None:
    # Each takes more than three passes, whose last token alone is kept, while others sample beside it.
    assert len(LONG_PROMPT) > 3 * replica.spec.max_num_batched_tokens
    requests = [Request(f"pass{i}", LONG_PROMPT[i:], Sampling(4, seed=i, ignore_eos=True)) for i in range(5)]
    completions = replica.run(requests)
    assert_logprobs_match(replica, requests, completions)
    for request, together in zip(requests, completions, strict=True):
        alone = replica.run([replace(request, request_id=f"alone-{request.request_id}")])[0]
        assert np.array_equal(alone.response_ids, together.response_ids)


def test_greedy_takes_the_likeliest_token_of_a_plain_forward_pass(replica: Replica) -> None:
    requests = requests_for("greedy", 5, temperature=0.0)
    completions = replica.run(requests)
    for request, completion in zip(requests, completions, strict=True):
        logits = response_logits(replica.model, request.prompt_ids, completion.response_ids)
        assert completion.response_ids.tolist() == logits.argmax(-1).tolist()
    assert_logprobs_match(replica, requests, completions)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass_after_temperature(replica: Replica, temperature: float) -> None:
    requests = requests_for(f"logprobs{temperature}", 10, temperature=temperature)
    assert_logprobs_match(replica, requests, replica.run(requests))


def test_the_same_seed_gives_the_same_tokens_in_any_company_and_others_or_none_give_others(replica: Replica) -> None:
    requests = requests_for("company", 6)
    together = replica.run(requests)
    if replica.spec.name == "vllm" and replica.engine.weight_version == 0:
        tokens = TOKENS.setdefault(replica.spec.model_path, [answer.response_ids.tolist() for answer in together])
        assert tokens == [answer.response_ids.tolist() for answer in together], "the same in a separate process"
    [alone] = replica.run([replace(requests[4], request_id="alone")])
    assert np.array_equal(alone.response_ids, together[4].response_ids)
    for one, other in ((1, 2), (None, None)):
        settings = [Request(f"seed{n}", PROMPTS[0], Sampling(12, seed=s, ignore_eos=True)) for n, s in enumerate((one, other))]
        first, second = replica.run(settings)
        assert not np.array_equal(first.response_ids, second.response_ids)


def test_a_response_of_max_tokens_ends_with_length_also_where_prompt_and_response_just_fit(replica: Replica) -> None:
    requests = [Request(f"len{n}", PROMPTS[0], Sampling(n, seed=n, ignore_eos=True)) for n in (1, 2, 7)]
    completions = replica.run([*requests, Request("fits", (5,) * 300, Sampling(20, seed=0, ignore_eos=True))])
    assert [len(completion.response_ids) for completion in completions] == [1, 2, 7, 20]
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_the_end_of_sequence_token_stops_a_response_unless_it_is_ignored_which_changes_no_distribution(
    replica: Replica,
) -> None:
    requests = requests_for("eos", 40, max_tokens=100, ignore_eos=False)
    stopped = [completion for completion in replica.run(requests) if completion.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.response_ids[-1] == EOS and EOS not in completion.response_ids[:-1]
        assert len(completion.logprobs) == len(completion.response_ids)
    requests = requests_for("on", 20, max_tokens=100)
    completions = replica.run(requests)
    assert any(EOS in completion.response_ids[:-1] for completion in completions)
    assert all(len(completion.response_ids) == 100 for completion in completions)
    assert_logprobs_match(replica, requests, completions)


def test_aborted_requests_are_forgotten(replica: Replica) -> None:
    replica.engine.submit(requests_for("aborted", 12))
    replica.engine.step()
    replica.engine.abort_all()
    assert replica.engine.num_unfinished == 0
    # The ids are free again, and nothing of the aborted ones turns up.
    assert len(replica.run(requests_for("aborted", 3))) == 3


def test_requests_that_cannot_be_answered_are_refused_and_none_is_queued(replica: Replica) -> None:
    good = requests_for("good", 1)
    bad = [
        (Request("empty", (), Sampling(1)), "empty prompt"),
        (Request("none", (5,), Sampling(0)), "asks for 0 tokens"),
        (Request("long", (5,) * 300, Sampling(21)), "321, more than the engine's max_model_len of 320"),
        (good[0], "ids must be unique"),
    ]
    for request, message in bad:
        with pytest.raises(ValueError, match=message):
            replica.engine.submit([*good, request])
    assert replica.engine.num_unfinished == 0


# ---- weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 5000])
def test_after_an_update_digests_are_the_senders_and_logprobs_those_of_the_new_weights(
    replica: Replica, bucket_bytes: int
) -> None:
    replica.change_model()
    before = replica.engine.weight_version
    requests = requests_for(f"new{bucket_bytes}", 8)
    assert {completion.versions for completion in replica.run(requests)} == {((before, 12),)}

    sender = replica.update(bucket_bytes)
    received = replica.engine.received_digests()
    assert received.keys() == replica.model.state_dict().keys() and received == sender.sent_digests()
    completions = replica.run(requests)
    assert replica.engine.weight_version == before + 1
    assert {completion.versions for completion in completions} == {((before + 1, 12),)}
    assert_logprobs_match(replica, requests, completions)


def mixed_logprobs(
    old: Qwen3ForCausalLM, new: Qwen3ForCausalLM, request: Request, completion: Completion, keep_cache: bool
) -> torch.Tensor:
    """The log-probs of a response whose first span of tokens the old model sampled, and the rest the new one."""
    prompt, response, (_, first) = request.prompt_ids, completion.response_ids, completion.versions[0]
    logits = torch.cat([response_logits(old, prompt, response)[:first], response_logits(new, prompt, response)[first:]])
    if keep_cache:
        # The last token of the first span is sampled and not yet read when the weights change.
        ids, read = torch.tensor([[*prompt, *response]]), len(prompt) + first - 1
        with torch.no_grad():
            cache = old(ids[:, :read], use_cache=True).past_key_values
            logits[first:] = new(ids[:, read:-1], past_key_values=cache).logits[0]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response).long()[:, None])[:, 0]


@pytest.mark.parametrize("keep_cache", [False, True])
def test_requests_live_through_an_update_and_each_token_is_of_the_weights_whose_version_it_carries(
    replica: Replica, keep_cache: bool
) -> None:
    if replica.spec.name == "vllm" and gaps():
        pytest.skip(f"this vLLM has no labels of versions: {gaps()[0]}")
    assert replica.engine.updates_in_flight
    # A separate process does not wait for this one: on a busy machine it may end all requests before the update begins.
    for attempt in range(20 if replica.spec.separate_process else 1):
        old, before = deepcopy(replica.model), replica.engine.weight_version
        # More than run at once: some wait through the update. Two blocks of the long prompt may be shared with later requests.
        tag = f"live{keep_cache}{attempt}"
        long_request = Request(f"{tag}-long", LONG_PROMPT, Sampling(12, seed=1, ignore_eos=True))
        requests = [long_request, *requests_for(tag, 9)]
        replica.change_model()
        replica.engine.submit(requests)
        for _ in range(5):
            assert replica.engine.step() == []
        replica.update(keep_cache=keep_cache)
        late = [Request(f"{tag}-late", LONG_PROMPT, Sampling(4, seed=2, ignore_eos=True))]
        completions: dict[str, Completion] = {}
        replica.engine.submit(late)
        while replica.engine.num_unfinished:
            completions |= {completion.request_id: completion for completion in replica.engine.step()}
        assert completions.keys() == {request.request_id for request in [*requests, *late]}
        mixed = [request for request in requests if len(completions[request.request_id].versions) == 2]
        if long_request in mixed:
            break
    # A separate process is ahead of what was handed over.
    most = 11 if replica.spec.separate_process else 5
    assert long_request in mixed and len(mixed) >= 3
    for request in mixed:
        completion = completions[request.request_id]
        (first_version, first), (second_version, second) = completion.versions
        assert (first_version, second_version, first + second) == (before, before + 1, 12) and 1 <= first <= most
        expected = mixed_logprobs(old, replica.model, request, completion, keep_cache)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        other = mixed_logprobs(old, replica.model, request, completion, not keep_cache)
        assert (expected - other).abs().max() > 1e-3, "what is in the cache shows"
    fresh = [request for request in [*requests, *late] if request not in mixed]
    assert {completions[request.request_id].versions[0][0] for request in fresh} == {before + 1}
    assert_logprobs_match(replica, fresh, [completions[request.request_id] for request in fresh])


def test_the_prefix_cache_of_the_old_weights_is_not_used_with_the_new_ones(replica: Replica) -> None:
    requests = [Request(f"prefix{i}", LONG_PROMPT, Sampling(8, seed=i, ignore_eos=True)) for i in range(3)]
    assert_logprobs_match(replica, requests, replica.run(requests))
    replica.change_model()
    replica.update()
    assert_logprobs_match(replica, requests, replica.run(requests))


@pytest.mark.parametrize("newer", [0, 1], ids=["the present version again", "the next version"])
def test_an_update_without_all_tensors_is_refused_naming_them_and_can_be_completed(replica: Replica, newer: int) -> None:
    weights = replica.model.state_dict()
    late = {name: weights.pop(name) for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight")}
    version = replica.engine.weight_version + newer
    replica.engine.start_weight_update(version)
    for bucket in pack_buckets(weights.items(), 1 << 20):
        replica.engine.load_bucket(bucket)
    with pytest.raises(WeightTransferError, match=r"2 of \d+ tensors are missing: .*up_proj\.weight, lm_head\.weight"):
        replica.engine.finish_weight_update()
    for bucket in pack_buckets(late.items(), 1 << 20):
        replica.engine.load_bucket(bucket)
    replica.engine.finish_weight_update()
    assert replica.engine.weight_version == version
    requests = requests_for("completed", 3)
    assert_logprobs_match(replica, requests, replica.run(requests))


def test_calls_out_of_order_and_foreign_tensors_are_refused_and_change_nothing(replica: Replica) -> None:
    engine, version = replica.engine, replica.engine.weight_version
    [norm] = pack_buckets([("model.norm.weight", replica.model.state_dict()["model.norm.weight"])], 1 << 20)
    [foreign] = pack_buckets([("model.norm.wight", torch.ones(64))], 1 << 20)
    [narrow] = pack_buckets([("model.norm.weight", torch.ones(63))], 1 << 20)

    with pytest.raises(WeightTransferError, match="outside a weight update"):
        engine.load_bucket(norm)
    with pytest.raises(WeightTransferError, match="no weight update to finish"):
        engine.finish_weight_update()
    with pytest.raises(WeightTransferError, match="older than those the engine has"):
        engine.start_weight_update(version - 1)
    with pytest.raises(WeightTransferError, match="nothing to connect"):
        engine.connect(NcclRendezvous("localhost", 1, 2))

    engine.start_weight_update(version + 1)
    with pytest.raises(WeightTransferError, match="have not been finished"):
        engine.start_weight_update(version + 2)
    with pytest.raises(WeightTransferError, match="cannot be submitted while weights"):
        engine.submit(requests_for("during", 1))
    with pytest.raises(WeightTransferError, match=r"no tensors named model\.norm\.wight"):
        engine.load_bucket(foreign)
    with pytest.raises(WeightTransferError, match=r"shape \(63,\); the model has \(64,\)"):
        engine.load_bucket(narrow)
    for bucket in pack_buckets(replica.model.state_dict().items(), 1 << 20):
        engine.load_bucket(bucket)
    with pytest.raises(WeightTransferError, match=r"arrived twice in one update: model\.norm\.weight"):
        engine.load_bucket(norm)
    engine.finish_weight_update()
    requests = requests_for("after", 3)
    assert_logprobs_match(replica, requests, replica.run(requests))


class Group:
    """A stand-in for vLLM's NCCL group, whose sender has put the bytes of its next broadcast into `sent`."""

    sent: torch.Tensor
    alive = True
    available, disabled = True, False

    def broadcast(self, packed: torch.Tensor, src: int) -> None:
        assert self.alive, "members of this group are gone"
        packed.copy_(self.sent)

    def destroy(self) -> None:
        self.alive = False


def test_a_group_is_made_anew_after_an_update_has_begun(tiny_qwen3: Callable[[bool], Path], monkeypatch) -> None:
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine", reason="needs vLLM")
    from vllm.distributed.weight_transfer import packed_tensor

    groups: list[Group] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    folder = str(tiny_qwen3(True))
    spec = EngineSpec(folder, max_model_len=320, max_num_seqs=8, weight_backend="nccl", verify_checksum=True)
    engine = ENGINES.get("vllm")(spec)

    def join(*_: Any) -> Group:
        groups.append(Group())
        return groups[-1]

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: [stream] * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        # vLLM's own group waits for the sender as long as it is told to, and not the 300 s of its store.
        with pytest.raises(DistNetworkError, match="1000ms"):
            engine.connect(NcclRendezvous("127.0.0.1", port, world_size=2, timeout_s=1.0))
        monkeypatch.setattr(nccl_engine, "worker_init_process_group", join)
        replica = Replica(engine, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), spec)
        replica.change_model()
        engine.connect(NcclRendezvous("127.0.0.1", 1, world_size=3))
        engine.start_weight_update(1)
        # A member was lost after that: the others meet again.
        engine.connect(NcclRendezvous("127.0.0.1", 2, world_size=2))
        assert [group.alive for group in groups] == [False, True]
        sender = ObjectStoreSender(1 << 16, verify=True)
        for bucket in sender.buckets(replica.model.state_dict().items()):
            groups[-1].sent = torch.from_numpy(bucket.data)
            engine.load_bucket(replace(bucket, data=None))
        engine.finish_weight_update()
        check_digests(sender.sent_digests(), engine.received_digests(), "the engine")
        requests = requests_for("anew", 3)
        assert_logprobs_match(replica, requests, replica.run(requests))
    finally:
        engine.close()


def test_sleeping_on_cpu_keeps_the_weights(replica: Replica) -> None:
    replica.engine.sleep()
    replica.engine.wake_up("weights")
    replica.engine.wake_up("kv_cache")
    requests = requests_for("awake", 2)
    assert_logprobs_match(replica, requests, replica.run(requests))


def test_a_separate_process_ends_with_the_process_that_started_it(tiny_qwen3: Callable[[bool], Path]) -> None:
    pytest.importorskip("vllm")
    program = (
        "import sys, time; from grpo_rl.rollout.engine import EngineSpec; from grpo_rl.rollout.engines import ENGINES\n"
        "engine = ENGINES.get('vllm')(EngineSpec(sys.argv[1], 64, max_num_seqs=4, separate_process=True))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tiny_qwen3(False))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and any(line == "ready\n" for line in parent.stdout)
        children = psutil.Process(parent.pid).children(recursive=True)
        assert children
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
