"""How long responses that have ended wait for others, before a replica reports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_rl.cluster.roles.rollout_pool import LONGEST_BATCH_S, MOST_IN_BATCH, PoolOptions, ReplicaPool
from grpo_rl.types import Request, Sampling


def pool(max_num_seqs: int) -> ReplicaPool:
    replicas: Any = SimpleNamespace(serving=[])
    transfer: Any = None
    options = PoolOptions(max_num_seqs=max_num_seqs, sleeps=False, verify_checksum=False, step_timeout_s=60.0)
    return ReplicaPool(replicas, transfer, options)


def request(number: int, conversation: str = "") -> Request:
    return Request(f"r{number}", (1, 2), Sampling(8), conversation)


def test_responses_of_one_turn_travel_in_batches() -> None:
    assert pool(256)._patience([request(0), request(1)]) == (LONGEST_BATCH_S, MOST_IN_BATCH)


def test_a_turn_of_a_conversation_is_reported_at_once() -> None:
    assert pool(256)._patience([request(0), request(1, "game 7")]) == (0.0, 1)


@pytest.mark.parametrize(("max_num_seqs", "enough"), [(256, MOST_IN_BATCH), (64, 8), (8, 1), (1, 1)])
def test_while_requests_wait_a_replica_reports_before_it_has_ended_what_it_was_given_in_advance(
    max_num_seqs: int, enough: int
) -> None:
    some = pool(max_num_seqs)
    some._ledger.add([request(0)])
    assert some._patience([request(1)]) == (LONGEST_BATCH_S, enough)
    assert enough <= max(1, max_num_seqs // 4)
