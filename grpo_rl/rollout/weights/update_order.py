"""The order of calls in a weight update, checked the same way for every engine."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_rl.rollout.weights.buckets import WeightBucket, WeightTransferError, first_names


class WeightUpdate:
    """The version of the live weights, and the tensors of the next one that have arrived; `expected` are the names and
    shapes of all tensors.

    With `in_flight` an update may start while requests are unfinished. It moves no data. Every method either accepts
    the call or raises WeightTransferError and changes nothing.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], in_flight: bool = False) -> None:
        self._in_flight = in_flight
        self._expected = dict(expected)
        self._arrived: set[str] = set()
        self._next: int | None = None
        self._lost = False
        self.version = 0

    @property
    def active(self) -> bool:
        return self._next is not None

    def check_can_sample(self) -> None:
        """Raise WeightTransferError unless complete weights are live."""
        if self.active:
            raise WeightTransferError(f"requests cannot be submitted while weights {self._next} arrive: finish the update")
        if self._lost:
            raise WeightTransferError("the engine gave its weights up when it slept: update them before submitting requests")

    def lose(self) -> None:
        """Note that the live weights are gone until an update is finished."""
        if self.active:
            raise WeightTransferError(f"the engine cannot sleep while weights {self._next} arrive")
        self._lost = True

    def start(self, version: int, num_unfinished: int) -> None:
        if self.active:
            raise WeightTransferError(f"weights {version} cannot start: weights {self._next} have not been finished")
        if num_unfinished and not self._in_flight:
            raise WeightTransferError(
                f"weights {version} cannot start: {num_unfinished} requests are unfinished; wait for them or abort them"
            )
        if version < self.version:
            raise WeightTransferError(f"weights {version} are older than those the engine has ({self.version})")
        self._next = version
        self._arrived = set()

    def receive(self, bucket: WeightBucket) -> None:
        if not self.active:
            raise WeightTransferError("tensors arrived outside a weight update: start one first")
        unknown = [name for name in bucket.names if name not in self._expected]
        if unknown:
            raise WeightTransferError(f"the model has no tensors named {first_names(unknown)}")
        again = [name for name in bucket.names if name in self._arrived]
        if again:
            raise WeightTransferError(f"tensors arrived twice in one update: {first_names(again)}")
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            if shape != self._expected[name]:
                raise WeightTransferError(f"{name} arrived with shape {shape}; the model has {self._expected[name]}")
        self._arrived.update(bucket.names)

    def check_complete(self) -> None:
        if not self.active:
            raise WeightTransferError("there is no weight update to finish")
        missing = [name for name in self._expected if name not in self._arrived]
        if missing:
            raise WeightTransferError(
                f"weights {self._next} are incomplete: {len(missing)} of {len(self._expected)} tensors are missing: "
                f"{first_names(missing)}"
            )

    def finish(self) -> None:
        self.check_complete()
        assert self._next is not None
        self.version, self._next, self._lost = self._next, None, False
