"""Rows to try a reward function on: read from a file, each with a response that should be right."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from grpo_rl.errors import DataError

KINDS = (".parquet", ".jsonl", ".json")
MAX_NUMBERS = 5
"""Of a countdown that is solved here: six take seconds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: what a reward function is called with. `response` is None where none could be made."""

    place: int
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    response: str | None


def read_rows(path: str, count: int, column: str | None) -> list[Row]:
    """The first `count` rows of a parquet, JSON Lines or JSON file in verl's format.

    The response is the text in `column`, or in `response` where there is such a column and none is named; else it is made from
    the ground truth. Raises DataError, naming the file, the row and the column, for a file that cannot be read so.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"there is no file {file}")
    if file.suffix not in KINDS:
        raise DataError(f"{file} ends in {file.suffix or 'nothing'}; it must be one of {', '.join(KINDS)}")
    try:
        rows = list(itertools.islice(_records(file), count))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as {file.suffix[1:]}: {error}") from error
    if not rows:
        raise DataError(f"{file} has no rows")
    return [_row(file, place, row, column) for place, row in enumerate(rows)]


def _records(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1_000):
            yield from batch.to_pylist()
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
    else:
        records = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(records, list):
            raise ValueError("it is no list of rows")
        yield from records


def _row(file: Path, place: int, row: Any, column: str | None) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{file}, row {place}: it is a {type(row).__name__}, not a row with columns")
    model = row.get("reward_model")
    if not isinstance(model, Mapping) or "ground_truth" not in model:
        raise DataError(f"{file}, row {place}: reward_model has no ground_truth; the row has {', '.join(map(str, row))}")
    source, gold, extra = str(row.get("data_source", "")), model["ground_truth"], row.get("extra_info")
    extra_info = dict(extra) if isinstance(extra, Mapping) else {}
    name = column or "response"
    if name in row:
        if not isinstance(row[name], str):
            raise DataError(f"{file}, row {place}, column {name}: {row[name]!r} ({type(row[name]).__name__}) is no text")
        return Row(place, source, gold, extra_info, row[name])
    if column is not None:
        raise DataError(f"{file}, row {place}: there is no column {column}; the row has {', '.join(map(str, row))}")
    return Row(place, source, gold, extra_info, gold_response(source, gold, extra_info))


def gold_response(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> str | None:
    """A response with the right answer, in all the forms that the rules know; None where it cannot be made.

    GSM8K's own solution, the sum itself for arithmetic, a solved countdown, the ground truth in a box and after `####`.
    """
    solution = extra_info.get("answer")
    if isinstance(solution, str) and "####" in solution:
        return solution
    if isinstance(ground_truth, Mapping):
        numbers = ground_truth.get("numbers", ground_truth.get("nums"))
        expression = None if numbers is None or "target" not in ground_truth else solve(numbers, ground_truth["target"])
        return None if expression is None else f"<think>\nso\n</think>\n<answer>{expression}</answer>"
    gold = ground_truth[0] if isinstance(ground_truth, list | tuple) and ground_truth else ground_truth
    if not isinstance(gold, str | int | float):
        return None
    return str(gold) if data_source == "arithmetic" else f"The answer is \\boxed{{{gold}}}.\n#### {gold}"


def solve(numbers: list[int], target: int) -> str | None:
    """An expression of all `numbers`, each once, whose value is the `target`; None without one, and for more than 5 numbers."""
    return _solve([(Fraction(n), str(n)) for n in numbers], Fraction(target)) if len(numbers) <= MAX_NUMBERS else None


def _solve(terms: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    if len(terms) == 1:
        return terms[0][1] if terms[0][0] == target else None
    for first, second in itertools.permutations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (first, second)]
        (a, left), (b, right) = terms[first], terms[second]
        values = [("+", a + b), ("*", a * b)] if first < second else []
        values += [("-", a - b), *([("/", a / b)] if b else [])]
        for sign, value in values:
            found = _solve([*rest, (value, f"({left} {sign} {right})")], target)
            if found is not None:
                return found
    return None
