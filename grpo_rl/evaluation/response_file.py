"""The folder of an evaluation.

    OUT/settings.json                        what all responses in the folder depend on, whatever the model
    OUT/models/<name>/model.json             which model it was, with a digest of its weights
    OUT/models/<name>/responses.jsonl        one line per response, as in a run's log of rollouts, and its `row` in the data
    OUT/models/<name>/complete.json          the number of prompts, when all are answered

A process that is killed leaves whole prompts and perhaps a part of one, which is sampled again: a second
start goes on.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rl.config.secrets import hide_known
from grpo_rl.errors import ConfigError, DataError
from grpo_rl.run_files import append_lines, read_json, read_lines, weights_digest, write_whole
from grpo_rl.telemetry.metrics.metrics_file import dump_line, jsonable

Record = dict[str, Any]
SETTINGS, MODEL, RESPONSES, COMPLETE = "settings.json", "model.json", "responses.jsonl", "complete.json"
_NUMBERS = ("row", "sample", "prompt_length", "response_length")
"""A response without these whole numbers is sampled again."""


def settle(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if the folder has other settings."""
    if not (folder / SETTINGS).is_file() and (folder / "models").is_dir():
        raise ConfigError(f"{folder} has responses and no {SETTINGS}: give another --output")
    _note(folder, SETTINGS, settings, f"{folder} has responses with other settings")


def response_file(folder: Path, name: str, identity: Mapping[str, Any]) -> ResponseFile:
    """Raises ConfigError if the name stands for another model there."""
    place = folder / "models" / (re.sub(r"[^\w.@=-]+", "-", name, flags=re.ASCII).strip("-.") or "model")
    _note(place, MODEL, identity, f"{folder} has responses of another model of the name {name}")
    return ResponseFile(place / RESPONSES)


def _note(folder: Path, file: str, found: Mapping[str, Any], problem: str) -> None:
    text = json.dumps(jsonable(found), indent=1, sort_keys=True)
    if (folder / file).is_file():
        try:
            noted = read_json(folder / file)
        except DataError as error:
            raise ConfigError(f"{error}; give another --output") from error
        noted, current_values = noted if isinstance(noted, dict) else {}, json.loads(text)
        keys = [key for key in sorted({*noted, *current_values}) if noted.get(key) != current_values.get(key)]
        changed = [f"{key}: {_short(noted.get(key))} -> {_short(current_values.get(key))}" for key in keys]
        if changed:
            raise ConfigError([f"{problem}; give the same again, or another --output:", *changed])
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / file, text)


class ResponseFile:
    def __init__(self, path: Path) -> None:
        self.path, self._complete = path, path.with_name(COMPLETE)

    def groups(self, n: int) -> dict[int, list[Record]]:
        """Complete prompts only, by row."""
        by_row: dict[int, dict[int, Record]] = defaultdict(dict)
        for _, record in read_lines(self.path) if self.path.is_file() else ():
            # A killed process may leave a part of a line.
            if record is not None and all(type(record.get(name)) is int and record[name] >= 0 for name in _NUMBERS):
                by_row[record["row"]][record["sample"]] = record
        complete = {row: group for row, group in sorted(by_row.items()) if set(group) == set(range(n))}
        return {row: [group[sample] for sample in range(n)] for row, group in complete.items()}

    def is_complete(self, n: int) -> bool:
        try:
            return bool(read_json(self._complete)["num_prompts"] == len(self.groups(n)))
        except (DataError, KeyError, TypeError):
            return False

    def complete(self, num_prompts: int) -> None:
        write_whole(self._complete, json.dumps({"num_prompts": num_prompts}))

    def append(self, records: Sequence[Record]) -> None:
        """The records are on the disk when this returns."""
        append_lines(self.path, (hide_known(dump_line(record)) for record in records), durable=True)


def identity_of(model: str) -> dict[str, Any]:
    """A digest of the model's folder, an embedded one's settings, a name on the hub."""
    if model.startswith("builtin:"):
        from grpo_rl.models.builtin import get_builtin  # which loads torch

        return {"embedded model": model, "digest": get_builtin(model).content_hash()}
    folder = Path(model)
    return {"digest": weights_digest(folder)} if folder.is_dir() else {"name on the hub": model}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
