"""Files of a run: how they are written whole, and read though somebody may have sent them.

Reading waits for nothing and takes no more memory than bounds on size, nesting and number of parts allow. A
file must be regular, no link. Whole numbers beyond 64 bits become floats.
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
MOST_DEPTH = 64
"""The deepest nesting; what this program writes has at most 12."""
MOST_PARTS = 2 * 10**7
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
    """Raises DataError if the file cannot be read."""
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
    """Raises DataError if the file cannot be read, or has more than MOST_TEXT_BYTES."""
    try:
        return read_bytes(path, MOST_TEXT_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read: it is no UTF-8 text") from error


def read_json(path: Path) -> Any:
    try:
        return parsed(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values in a YAML file without aliases. Raises DataError."""
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
    """Yield number and object of each line; None for a line that is no object. Raises DataError."""
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
    """Append whole lines to a file, after what a write that failed may have left of one."""
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
    """Raises ValueError for text that is no JSON, or nested too deeply."""
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


_BLOCK, _BLOCKS = 65_536, 32


def weights_digest(folder: Path) -> str:
    """Of config, sizes and 32 blocks per file: one optimizer step changes nearly every number."""
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
    if isinstance(config, str):
        folder = os.path.expanduser(config)
        # Paths of `pathlib` raise for a text that is no file's name, such as a chat template.
        return {config: weights_digest(Path(folder))} if os.path.isfile(os.path.join(folder, "config.json")) else {}
    entries = config.values() if isinstance(config, Mapping) else config if isinstance(config, list | tuple) else ()
    return {name: of for entry in entries for name, of in model_digests(entry).items()}
