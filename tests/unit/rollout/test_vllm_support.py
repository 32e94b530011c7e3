"""Reading what was sampled from out of log-probs of the likeliest tokens."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_rl.rollout.vllm import vllm_patches
from grpo_rl.rollout.vllm.sampling_support import num_logprobs, sampled_logprobs, support_of
from grpo_rl.rollout.vllm.vllm_patches import ReportedArrays
from grpo_rl.types import Sampling
from tests.unit.vllm_sources import digest_of

OUT = -math.inf
HALF, QUARTER = math.log(0.5), math.log(0.25)


def reported(*places: list[tuple[int, float]]) -> SimpleNamespace:
    flat = [entry for place in places for entry in place]
    starts = [sum(len(place) for place in places[:number]) for number in range(len(places))]
    return SimpleNamespace(token_ids=[token for token, _ in flat], logprobs=[value for _, value in flat], start_indices=starts)


def test_tokens_with_a_probability_are_the_support_and_the_sampled_one_counts_once() -> None:
    logprobs = reported(
        [(7, QUARTER), (3, HALF), (7, QUARTER), (9, QUARTER), (1, OUT)],
        [(4, 0.0), (4, 0.0), (2, OUT), (3, OUT)],
        # The sampled token ties with the last one that was reported.
        [(8, QUARTER), (5, HALF), (6, QUARTER)],
    )
    support = support_of(logprobs)
    assert support.counts.tolist() == [3, 1, 3]
    assert support.token_ids.tolist() == [7, 3, 9, 4, 8, 5, 6]
    assert sampled_logprobs(logprobs).tolist() == np.array([QUARTER, 0.0, QUARTER], dtype=np.float32).tolist()


def test_arrays_are_read_as_the_numbers_are_and_wider_rows_are_cut() -> None:
    places = [[(7, QUARTER), (3, HALF), (7, QUARTER), (1, OUT)], [(4, 0.0), (4, 0.0), (2, OUT), (3, OUT)]]
    processor = ReportedArrays(num_logprobs=3)
    assert len(processor.logprobs.start_indices) == 0
    for place in places:
        # Another request of the step asked for one entry more.
        row = [*place, (9, HALF)]
        ids, values = np.array([[token for token, _ in row]]), np.array([[value for _, value in row]], dtype=np.float32)
        processor.update_from_output(SimpleNamespace(new_logprobs=SimpleNamespace(logprob_token_ids=ids, logprobs=values)))
    kept, expected = processor.logprobs, reported(*places)
    assert sampled_logprobs(kept).tolist() == sampled_logprobs(expected).tolist()
    assert kept.token_ids.tolist() == expected.token_ids and kept.start_indices.tolist() == expected.start_indices


def test_rows_of_the_sampled_token_alone_are_kept_as_they_came() -> None:
    processor = ReportedArrays(num_logprobs=0)
    for token, value, others in ((7, -0.5, 0), (3, -1.5, 2), (9, 0.0, 0)):
        # In the second step another request asked for two entries more.
        ids, values = np.full((1, 1 + others), token), np.full((1, 1 + others), value, dtype=np.float32)
        processor.update_from_output(SimpleNamespace(new_logprobs=SimpleNamespace(logprob_token_ids=ids, logprobs=values)))
    processor.update_from_output(SimpleNamespace(new_logprobs=None))
    assert processor.logprobs.token_ids.tolist() == [7, 3, 9]
    assert sampled_logprobs(processor.logprobs).tolist() == [-0.5, -1.5, 0.0]


def test_a_probability_that_was_not_reported_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"0\.25 of the probability is unknown.*fp32_lm_head"):
        support_of(reported([(3, 0.0), (3, 0.0)], [(5, HALF), (5, HALF), (6, QUARTER)]))


def test_as_many_are_asked_for_as_can_be_left_with_room_for_ties() -> None:
    cut = Sampling(1, top_k=5, top_p=0.9, keep_support=True)
    assert num_logprobs(cut, 1000) == 37
    assert num_logprobs(cut, 20) == 20
    assert num_logprobs(Sampling(1, top_p=0.9, keep_support=True), 1000) == 1000
    assert num_logprobs(Sampling(1, top_k=5), 1000) == num_logprobs(Sampling(1, keep_support=True), 1000) == 0


def test_vllm_draws_where_our_sampler_takes_its_place_and_by_seed_and_position_on_gpus() -> None:
    # rollout/vllm/vllm_patches.py repeats the first but for its generators, and leaves GPUs to the second. If
    # one of them changes, read both again.
    assert digest_of("v1/sample/ops/topk_topp_sampler.py", "forward_cpu") == "3255428a9c1d660c"
    assert digest_of("v1/worker/gpu/sample/gumbel.py", "murmur3_hash32") == "e4a19a342c0e6e39"


def test_the_plan_names_what_another_vllm_lacks_and_the_newest_tested_one_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(importlib.util.find_spec("vllm").origin).parent  # type: ignore[union-attr, arg-type]
    assert vllm_patches.gaps() == []
    for file, _ in vllm_patches._GAPS:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((folder / file).read_text())
    (tmp_path / "outputs.py").write_text("")
    (tmp_path / "v1/sample/ops/topk_topp_sampler.py").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    sampler, labels = vllm_patches.gaps()
    assert "do not follow from seeds" in sampler and "responses end before engines take new weights" in labels


def test_a_sampler_of_another_form_stays_in_its_place() -> None:
    sampler = SimpleNamespace(forward_cpu=len, forward=len, use_fp64_gumbel=False)
    batch = SimpleNamespace(num_reqs=0, req_ids=[], num_tokens_no_spec=np.zeros(1), num_prompt_tokens=np.zeros(1))
    runner = SimpleNamespace(sampler=SimpleNamespace(topk_topp_sampler=sampler), requests={}, input_batch=batch)
    assert vllm_patches.CounterSampler(runner).install() and sampler.forward is not len
    sampler.forward = max
    assert not vllm_patches.CounterSampler(runner).install() and sampler.forward is max
    sampler.forward = len
    del batch.num_tokens_no_spec
    assert not vllm_patches.CounterSampler(runner).install() and sampler.forward is len
