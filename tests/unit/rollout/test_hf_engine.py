"""The transformers engine: what a response is does not depend on who else is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grpo_rl.models import builtin
from grpo_rl.rollout.engine import EngineSpec
from grpo_rl.rollout.hf.hf_engine import HfEngine
from grpo_rl.types import Completion, Request, Sampling


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HfEngine:
    model = builtin.build("builtin:arithmetic", tmp_path_factory.mktemp("model") / "random")
    return HfEngine(EngineSpec(str(model), 32, name="hf", max_num_seqs=4))


def answers(engine: HfEngine, *waves: Sequence[Request]) -> dict[str, Completion]:
    """Each wave comes one step after the one before."""
    found: list[Completion] = []
    for wave in waves:
        engine.submit(wave)
        found += engine.step()
    while engine.num_unfinished:
        found += engine.step()
    assert len({completion.request_id for completion in found}) == len(found)
    return {completion.request_id: completion for completion in found}


def test_a_response_is_bit_equal_alone_and_beside_any_others(engine: HfEngine) -> None:
    requests = [
        Request(f"r{i}", tuple(range(5, 8 + 3 * (i % 3))), Sampling(max_tokens=4 + i % 4, seed=100 + i)) for i in range(7)
    ]
    alone = {request.request_id: answers(engine, [request])[request.request_id] for request in requests}
    assert answers(engine, requests) == alone
    assert answers(engine, requests[4:], requests[2:3], [*requests[:2], requests[3]]) == alone
    assert len({completion.response_ids for completion in alone.values()}) > 1
