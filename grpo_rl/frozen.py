"""The decorator of values: a frozen dataclass with slots."""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen(kind: type[T]) -> type[T]:
    return dataclasses.dataclass(frozen=True, slots=True)(kind)
