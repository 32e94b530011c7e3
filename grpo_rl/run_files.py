"""Files in a run's folder: how they are written whole, and read though somebody may have sent them.

Nothing in a file makes a reader wait, or take all memory. A file must be a regular one, and no link. Its size, its nesting and the number of its lists and objects have
bounds. Whole numbers beyond 64 bits become floats, which every reader handles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from grpo_rl.errors import DataError

MOST_BYTES = 2**29
"""The largest log: a step of 16,000 responses of 8,000 tokens has as much."""
MOST_TEXT_BYTES = 2**22
"""The largest file that a person reads as well: configuration, plan, status."""
MOST_DEPTH = 64
"""The deepest nesting; what this program writes has at most 12."""
MOST_PARTS = 2 * 10**7
"""The most lists and objects in a file: each takes 64 bytes and more."""
_LONG_NUMBER = re.compile(r"[0-9]{19}")
_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def opened(path: Path) -> BinaryIO:
    """Return a regular file, open for reading. Raises OSError for everything else, at once."""
    # Without O_NONBLOCK the opening of a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises DataError if that cannot be had."""
    try:
        with opened(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        reason = "it is a link" if path.is_symlink() else error.strerror or error
        raise DataError(f"{path}: cannot be read: {reason}") from error
    if len(data) > most:
        raise DataError(f"{path}: cannot be read: it has more than {most:,} bytes")
    return data


def read_text(path: Path) -> str:
    """Return a text of at most MOST_TEXT_BYTES. Raises DataError if that cannot be had."""
    try:
        return read_bytes(path, MOST_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read: it is no UTF-8 text") from error


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises DataError if there is none."""
    try:
        return parsed(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values in a YAML file without aliases. Raises DataError if there are none."""
    try:
        text, depth = read_text(path), 0
        for event in yaml.parse(text, Loader=_YAML):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        content = _plain(_YAML(text).get_single_data())
    except (ValueError, OverflowError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: cannot be read: it is no mapping of keys")
    return content


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield number and object of each line of a JSON Lines file; None for a line that is no object.

    Raises DataError if the file cannot be read.
    """
    content = read_bytes(path)
    if sum(map(content.count, (b"\n", b"[", b"{"))) > MOST_PARTS:
        raise DataError(f"{path}: cannot be read: it has more than {MOST_PARTS:,} lines, lists and objects")
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        try:
            record = parsed(line.decode("utf-8", errors="replace"))
        except ValueError:
            record = None
        yield number, record if isinstance(record, dict) else None


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file that is complete or not there at all; `durable`, after a power cut too. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_lines(path: Path, lines: Iterable[str], *, durable: bool = False) -> None:
    """Append whole lines to a file. A write that failed, or a process that was killed, may have left half a line: they begin a new one."""
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write("".join(lines).encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())


def parsed(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for another text, and for one that is nested too deeply."""
    try:
        value = json.loads(text, parse_int=_whole) if _LONG_NUMBER.search(text) else json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _refuse_depth(value, MOST_DEPTH)
    return value


def _whole(text: str) -> int | float:
    value = int(text) if len(text) < 20 else float(text)
    return value if abs(value) < 2**63 else float(value)


def _refuse_depth(value: Any, room: int) -> None:
    if isinstance(value, dict | list):
        if room == 0:
            raise ValueError("it is nested too deeply")
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, dict | list):
                _refuse_depth(part, room - 1)


def _plain(value: Any) -> Any:
    """Return a value of YAML as JSON has it: keys are texts, and so are dates."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return float(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# ---- digests of what a run reads -------------------------------------------------------------------------------------

_BLOCK, _BLOCKS = 65_536, 32


def weights_digest(folder: Path) -> str:
    """Return a digest of a model folder: of its config, and of the sizes and of 32 blocks of each file of weights.

    Reading all of a large model takes minutes. One optimizer step changes nearly every number, so blocks that are spread over
    a file show it; a copy of a folder has the same digest.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json"), *folder.glob("tokenizer*.json")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        step = max(_BLOCK, size // _BLOCKS)
        with opened(path.resolve()) as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def model_digests(config: Any) -> dict[str, str]:
    """Return the `weights_digest` of each model folder that stands as a value in a nested configuration, by its path."""
    if isinstance(config, str):
        path = Path(config).expanduser()
        return {config: weights_digest(path)} if len(config) < 4096 and (path / "config.json").is_file() else {}
    entries = config.values() if isinstance(config, Mapping) else config if isinstance(config, list | tuple) else ()
    return {name: of for entry in entries for name, of in model_digests(entry).items()}
