"""Prints how many responses a second are scored on one node of a cluster and on all: `scored_per_second.py HEAD FOLDER FUNCTION`.

Nodes that are one machine share its cores: a function that computes shows nothing unless each node has a share of its own.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path

from red_inputs import START_S, answer, living_nodes

from grpo_rl.cluster.session.ray_session import ray_session
from grpo_rl.config.schema.tree import RayInitConfig, RewardConfig, TrainerConfig
from grpo_rl.rewards.compose import RewardFunction
from grpo_rl.rewards.runtime.runner import RewardRunner

NUM_PROCESSES, RESPONSES_OF_A_NODE = 4, 1600


def main(head: str, folder: Path, function: str) -> None:
    with ray_session(RayInitConfig(address=head), 1):
        import ray

        from grpo_rl.cluster.processes.placement import NodeSlot
        from grpo_rl.cluster.processes.worker_group import WorkerGroup, wait_all
        from grpo_rl.cluster.recovery.supervisor import Recoveries, Supervisor
        from grpo_rl.cluster.roles.function_host import FunctionSpec, ScorerSpec
        from grpo_rl.cluster.roles.function_pool import FunctionPool

        nodes = [*living_nodes(ray).values()]
        settings = TrainerConfig()
        supervisor = Supervisor(settings, Recoveries(settings, print))
        config = RewardConfig(functions=[function], num_workers=NUM_PROCESSES, timeout_s=60.0)
        rates = {}
        for num_nodes in (1, len(nodes)):
            slots = [NodeSlot(node, 0.0) for node in nodes[:num_nodes]]
            group = WorkerGroup("functions", slots, log_dir=folder, environment={}, call_timeout_s=600.0)
            pool = FunctionPool(
                group, FunctionSpec({"rules": ScorerSpec(config, ("math",))}, None, False, folder), [2] * num_nodes, supervisor
            )
            refs = pool.start_build()
            group.where(START_S)
            wait_all(group.workers, refs, START_S, "start functions")
            pool.listen()
            runner = RewardRunner(RewardFunction.from_config(config), config, partial(pool.scorer, "rules"))
            runner.wait([answer(f"first-{number}", "1", None) for number in range(NUM_PROCESSES * num_nodes)])
            rollouts = [answer(str(number), "1", None) for number in range(RESPONSES_OF_A_NODE * num_nodes)]
            start = time.monotonic()
            assert all(rollout.reward is not None for rollout in runner.wait(rollouts))
            rates[num_nodes] = len(rollouts) / (time.monotonic() - start)
            pool.close()
        supervisor.close()
        print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
