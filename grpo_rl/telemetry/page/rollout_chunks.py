"""The rollouts as the page reads them: an index of all groups, and chunks with texts that are loaded on
demand.

A chunk is compressed JSON in base64. Browsers do not fetch files beside a page from disk but run them as
scripts, so a chunk's file is the call `__chunk("name", "...")`. Small runs have their chunks in the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from grpo_rl.errors import DataError, is_panic
from grpo_rl.run_files import read_bytes, write_whole
from grpo_rl.telemetry.metrics.metrics_file import JsonObject, jsonable, number_from_text
from grpo_rl.telemetry.metrics.validation import logged_value
from grpo_rl.telemetry.rollout_log import prompt_key, read_rollouts, step_files

Record = Mapping[str, Any]
Pieces = Callable[[Sequence[int]], list[str]]  # texts of token ids, none if they cannot be told

TOKENIZER = "tokenizer"  # field of status.json: the tokenizer's folder
FILE = "tokenizer.json"
INDEX = "index"
FORMAT = 4  # of the index; files of another format are written anew
INLINE_BYTES = 12 * 2**20  # logged rollouts up to which they are part of the page
CHUNK_BYTES = 2**20  # texts of a chunk: about what a browser unpacks in some hundredths of a second
PREVIEW = 160  # characters of a prompt in the list of groups


def chunks_of(
    run: Path, folder: Path, pieces: Pieces | None = None, *, keep: bool = False
) -> tuple[JsonObject, dict[str, str] | None]:
    """Return the index of a run's rollouts and its chunks by name; None for a large run, whose chunks are
    files in `folder`. `keep` writes new steps only: the page runs these files, so `folder` must hold none but
    this program's own. Files that cannot be read are left out."""
    files = []
    for kind in ("rollouts", "val"):
        for step, path in step_files(run / kind):
            with suppress(OSError):
                stat = path.stat()
                files.append((kind, step, path, [stat.st_size, stat.st_mtime_ns]))
    is_inlined = sum(stamp[0] for *_, stamp in files) <= INLINE_BYTES
    if not is_inlined:
        folder.mkdir(parents=True, exist_ok=True)
    index = _earlier(folder) if keep and not is_inlined else _empty()
    known = {(entry["kind"], entry["step"]): entry for entry in index["steps"]}
    index["steps"] = []
    places = {key: place for place, (key, *_) in enumerate(index["prompts"])}
    inlined: dict[str, str] = {}
    for kind, step, path, stamp in files:
        entry = known.get((kind, step), {})
        if entry.get("stamp") != stamp:
            try:
                records = read_rollouts(path)
            except DataError:
                continue
            entry = {"kind": kind, "step": step, "num": len(records), "groups": [], "chunks": [], "stamp": stamp}
            for groups in _parted(records):
                name = f"{kind}_{step}_{len(entry['chunks'])}"
                entry["chunks"].append([name, len(entry["groups"]), len(groups)])
                entry["groups"] += [_entry(group, kind, index, places) for group in groups]
                packed = pack([_texts(group, pieces) for group in groups])
                if is_inlined:
                    inlined[name] = packed
                else:
                    write_chunk(folder, name, packed)
        index["steps"].append(entry)
    if is_inlined:
        return index, inlined
    write_chunk(folder, INDEX, pack(index))
    names = {name for entry in index["steps"] for name, _, _ in entry["chunks"]}
    for path in folder.glob("*.js"):  # of steps that are no longer there: a resumed run writes them anew
        if re.fullmatch(r"(rollouts|val)_\d+_\d+", path.stem) and path.stem not in names:
            with suppress(OSError):
                path.unlink()
    return index, None


def pack(value: Any) -> str:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)).decode("ascii")


def unpack(packed: str) -> Any:
    """Raises ValueError or OSError for anything but what `pack` made."""
    return json.loads(gzip.decompress(base64.b64decode(packed, validate=True)))


def write_chunk(folder: Path, name: str, packed: str) -> None:
    write_whole(folder / f"{name}.js", f'__chunk("{name}","{packed}")\n')


def read_chunk(folder: Path, name: str) -> Any:
    """Raises DataError, ValueError, LookupError or OSError if there is no such chunk."""
    return unpack(read_bytes(folder / f"{name}.js").decode("ascii").split('"')[3])


def _parted(records: Sequence[Record]) -> Iterator[list[list[Record]]]:
    """Yield a step's groups, as many at a time as fill a chunk."""
    by_prompt: dict[Any, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(record.get("uid"), []).append(record)
    groups: list[list[Record]] = []
    size = 0
    for group in by_prompt.values():
        groups.append(group)
        size += sum(len(str(record.get("response", ""))) for record in group) + len(str(group[0].get("prompt", "")))
        if size > CHUNK_BYTES:
            yield groups
            groups, size = [], 0
    if groups:
        yield groups


def _entry(group: Sequence[Record], kind: str, index: JsonObject, places: dict[str, int]) -> list[Any]:
    """Return a group's prompt, source, rewards, lengths, cut samples and failures, as places in tables."""
    row, prompt = prompt_key(group[0])
    key = hashlib.sha1(f"{row}\0{prompt}".encode(errors="replace")).hexdigest()[:12]
    if key not in places:
        places[key] = len(places)
        preview = prompt if len(prompt) <= PREVIEW else "…" + prompt[-PREVIEW:]
        index["prompts"].append([key, preview, row if row.startswith("row ") else ""])
    rewards = [rounded(record.get("reward")) for record in group]
    values = [rounded(logged_value(record)) for record in group]
    return [
        places[key],
        _place(index["sources"], str(group[0].get("data_source", ""))),
        rewards,
        [record.get("response_length") for record in group],
        [at for at, record in enumerate(group) if record.get("finish_reason") == "length"],
        [[at, _place(index["failures"], str(record["failure"]))] for at, record in enumerate(group) if record.get("failure")],
        *([values] if kind == "val" and values != rewards else ()),
    ]


_SHARED = ("prompt", "ground_truth", "data_source", "uid", "prompt_length")


def _texts(group: Sequence[Record], pieces: Pieces | None) -> JsonObject:
    """Return all that is logged of a group, shared fields once."""
    rollouts = []
    for record in group:
        shared = {
            name: jsonable(rounded(value) if isinstance(value, float) else value)
            for name, value in record.items()
            if name not in _SHARED and not name.startswith("token_") and value is not None
        }
        shared["reward_parts"] = {name: rounded(value) for name, value in (record.get("reward_parts") or {}).items()}
        ids, logprobs = record.get("token_ids") or (), record.get("token_logprobs") or ()
        if pieces and len(ids) == len(logprobs) and (texts := pieces(ids)):
            shared |= {"tokens": texts, "logprobs": [rounded(value, 3) for value in logprobs]}
        rollouts.append(shared)
    return {name: jsonable(group[0].get(name)) for name in _SHARED} | {"rollouts": rollouts}


def pieces_of(run: Path, status: Mapping[str, Any], *, trusted: bool = False) -> Pieces | None:
    """Return the function from ids to texts of the run's tokenizer; None without its file.

    Only of a `trusted` run the place that status.json names, anywhere, is read. The texts of all tokens
    together are the response. Of tokens that make up one character, the last has it and the others are empty;
    if the whole decodes otherwise than its parts, as at an end within a character, one token has the rest.
    Without texts if the tokenizer does not take the ids.
    """
    folders = [run / "model", *([Path(str(status.get(TOKENIZER) or run))] if trusted else [])]
    file = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if file is None and trusted:
        file = _of_hub(str(status.get(TOKENIZER)))
    if file is None:
        return None

    @cache
    def tokenizer() -> Any:  # a large one takes a second
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))

    def pieces(ids: Sequence[int]) -> list[str]:
        try:  # the file may be no tokenizer, and an id may be one that no vocabulary has
            from tokenizers.decoders import DecodeStream

            stream = DecodeStream(skip_special_tokens=False)
            texts = [stream.step(tokenizer(), number) or "" for number in ids]
            rest = tokenizer().decode(list(ids), skip_special_tokens=False)
            for place, text in enumerate(texts):
                if place == len(texts) - 1 or not rest.startswith(text):
                    return [*texts[:place], rest, *[""] * (len(texts) - place - 1)]
                rest = rest[len(text) :]
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
        return []

    return pieces


def _of_hub(name: str) -> Path | None:
    """Return the hub file of a model from this machine's cache, None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # a folder that is gone is no name
        path = try_to_load_from_cache(name, FILE)
        return Path(path) if isinstance(path, str) else None
    return None


def rounded(value: Any, digits: int = 6) -> Any:
    """Return a number with so many significant digits, None if it is not finite."""
    value = number_from_text(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _place(table: list[str], name: str) -> int:
    if name not in table:
        table.append(name)
    return table.index(name)


def _empty() -> JsonObject:
    return {"format": FORMAT, "steps": [], "prompts": [], "sources": [], "failures": []}


def _earlier(folder: Path) -> JsonObject:
    """Return an earlier call's index; empty without one of this format."""
    with suppress(DataError, OSError, ValueError, LookupError):
        index = read_chunk(folder, INDEX)
        if isinstance(index, dict) and index.get("format") == FORMAT:
            return _empty() | index
    return _empty()
