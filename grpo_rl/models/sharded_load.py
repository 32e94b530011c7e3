"""Weights from safetensors files straight into shards: every rank reads its own rows of each tensor.

No process holds the whole model: 70 billion parameters are 280 GB in float32, for each role that starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from grpo_rl.models.experts import FAMILIES, holds_experts, per_expert

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def name_in_files(name: str) -> str:
    """Return a parameter's name in files, without an adapter's `base_layer`."""
    return name.replace(".base_layer.", ".")


class WeightFiles:
    def __init__(self, file_of: dict[str, Path]) -> None:
        self._file_of = file_of

    @staticmethod
    def find(path: str) -> WeightFiles | None:
        index = _file(path, _INDEX)
        if index is not None:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = {stored: _file(path, stored) for stored in set(names.values())}
            file_of = {name: file for name, stored in names.items() if (file := files[stored]) is not None}
            return WeightFiles(file_of) if len(file_of) == len(names) else None
        single = _file(path, _SINGLE)
        if single is None:
            return None
        with safe_open(single, framework="pt") as opened:
            return WeightFiles(dict.fromkeys(opened.keys(), single))

    def fits(self, lm: Any, new: Sequence[str] = ()) -> bool:
        """But for those in `new`, by name and shape: otherwise transformers has to rearrange tensors."""
        if getattr(lm.config, "quantization_config", None) is not None or is_rearranged(lm):
            return False
        headers = self._headers()
        for names, _, parts in self._stored(lm):
            if not parts and not set(names).intersection(new):
                return False
            if any(name not in headers or headers[name][0] != tuple(part.shape) for name, part, _ in parts):
                return False
        return True

    def _stored(self, lm: Any) -> Iterator[tuple[list[str], Any, list[tuple[str, Tensor, int]]]]:
        """Yield each parameter with its names and the stored tensors that make it, on meta."""
        for names, parameter in _named(lm.named_parameters(remove_duplicate=False)):
            yield names, parameter, self._parts(names, torch.empty(parameter.shape, device="meta"))

    def has_other_head(self) -> bool:
        """Return whether the LM head in the files is another matrix than the embedding, by some rows."""
        heads = [name for name in self._file_of if name.endswith("lm_head.weight")]
        embeddings = [name for name in self._file_of if name.endswith("embed_tokens.weight")]
        if len(heads) != 1 or len(embeddings) != 1:
            return False
        with ExitStack() as stack:
            head, embedding = (
                stack.enter_context(safe_open(self._file_of[name], framework="pt")).get_slice(name)
                for name in heads + embeddings
            )
            if head.get_shape() != embedding.get_shape():
                return True
            count = head.get_shape()[0]
            rows = (slice(start, min(start + 8, count)) for start in range(0, count, max(8, count // 16)))
            return any(not torch.equal(head[part].float(), embedding[part].float()) for part in rows)

    def _parts(self, names: list[str], rows: Tensor, first: int = 0) -> list[tuple[str, Tensor, int]]:
        """Return (name, rows, their begin) of the stored tensors that make the rows from `first` on."""
        stored = next(filter(self._file_of.__contains__, names), None)
        if stored is not None:
            return [(stored, rows, first)]
        return [(name, part, 0) for name, part in per_expert(names[0], rows, first)] if holds_experts(names[0]) else []

    @torch.no_grad()
    def read_into(self, lm: Any) -> None:
        """Fill this rank's rows of every parameter that has storage and is in a file."""
        # Distributed tensors take a third of a controller's imports, and it only looks at the files' heads.
        from grpo_rl.models.shards import local_of, rows_of

        parts_by_file: dict[Path, list[tuple[str, Tensor, int]]] = {}
        for names, parameter in _named(lm.named_parameters(remove_duplicate=False)):
            if parameter.device.type == "meta":
                continue  # a head that the model around `lm` has dropped
            start, stop = rows_of(parameter)
            local = local_of(parameter)[: stop - start]
            for part in self._parts(names, local, start):
                parts_by_file.setdefault(self._file_of[part[0]], []).append(part)
        for path, entries in parts_by_file.items():
            with safe_open(path, framework="pt") as opened:
                for name, rows, first in entries:
                    rows.copy_(opened.get_slice(name)[first : first + len(rows)])

    def whole_tensors(self, lm: Any) -> Iterator[tuple[str, Tensor]]:
        """By their names in files, one read at a time, experts one by one, a tied head under both names."""
        for names, tensor in _named(lm.state_dict(keep_vars=True).items()):
            for stored, _, _ in self._parts(names, tensor):
                with safe_open(self._file_of[stored], framework="pt") as opened:
                    whole_tensor = opened.get_tensor(stored)
                for name in names if stored in names else [stored]:
                    yield from per_expert(name, whole_tensor)

    def stored_as(self, lm: Any, dtype: str) -> list[Any]:
        headers = self._headers()
        return [parameter for _, parameter, parts in self._stored(lm) if {headers[name][1] for name, _, _ in parts} == {dtype}]

    def _headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        headers: dict[str, tuple[tuple[int, ...], str]] = {}
        for path in set(self._file_of.values()):
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    stored = opened.get_slice(name)
                    headers[name] = tuple(stored.get_shape()), stored.get_dtype()
        return headers


def _named(tensors: Iterable[tuple[str, Any]]) -> list[tuple[list[str], Any]]:
    """Return every tensor once, with all its names: a tied head is in files under one of them."""
    by_id: dict[int, tuple[list[str], Any]] = {}
    for name, tensor in tensors:
        by_id.setdefault(id(tensor), ([], tensor))[0].append(name_in_files(name))
    return list(by_id.values())


def is_rearranged(lm: Any) -> bool:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    if getattr(lm.config, "model_type", None) in FAMILIES:
        # Nothing but its experts, which `per_expert` finds in the files.
        return False
    kinds = [type(lm).__name__, str(getattr(lm.config, "model_type", ""))]
    return any(get_checkpoint_conversion_mapping(kind) for kind in kinds)


def _file(path: str, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    cached_path = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if cached_path is None else Path(cached_path)
