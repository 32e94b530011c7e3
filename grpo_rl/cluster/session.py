"""The Ray session of a run: local, or on a cluster that is already there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_rl.config.schema import RayInitConfig
from grpo_rl.errors import ClusterError

# Weights travel through shared memory two buckets at a time; batches are small beside them.
OBJECT_STORE_BYTES = 2 * 2**30


@contextmanager
def ray_session(config: RayInitConfig, num_cpus: int) -> Iterator[None]:
    """Connect to Ray, and leave it again. Raises ClusterError when that does not work.

    A local Ray has no dashboard, and its workers' output stays in log files.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "ignore_reinit_error": False}
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address:
        options["address"] = address
    else:
        options |= {
            "num_cpus": config.num_cpus or num_cpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    try:
        ray.init(**options)
    except Exception as error:
        where = f"the cluster at {address}" if address else "a local Ray"
        raise ClusterError(f"cannot connect to {where}: {type(error).__name__}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
