"""Changes that a save makes to the disk: few calls, each a fault point."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from grpo_rl.errors import CheckpointError
from grpo_rl.faults import fault_point

Entry = tuple[int, str]
"""Size and SHA-256 of a file."""
Files = dict[str, Entry]

_PIECE_BYTES = 16 << 20


def make_folder(path: Path) -> None:
    _point("mkdir", path)
    os.mkdir(path)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Entry:
    """Write a new file, on the disk when this returns; the entry is of what was to be written."""
    _point("open", path)
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for view in (memoryview(piece).cast("B") for piece in pieces):
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                digest.update(piece)
                size += len(piece)
                _point("write", path)
                while piece:
                    piece = piece[file.write(piece) :]
        _point("fsync", path)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def flush(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    _point("fsync", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """To survive a power cut, flush the parent folder afterwards."""
    _point("rename", target)
    os.rename(source, target)


def remove_tree(folder: Path) -> None:
    """Links are removed and not followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            _point("unlink", path)
            path.unlink()
    _point("rmdir", folder)
    folder.rmdir()


def entry_of(path: Path) -> Entry:
    """OSError for anything but a regular file: a device or pipe is never opened."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path.name} is a link or not a regular file")
    with path.open("rb", buffering=0) as file:
        return status.st_size, hashlib.file_digest(file, "sha256").hexdigest()


def walk(folder: Path) -> Iterator[tuple[str, bool]]:
    """Relative names of all that is in the folder, and whether each is a folder; links are not followed."""
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        yield path.name, is_folder
        if is_folder:
            for name, inner in walk(path):
                yield f"{path.name}/{name}", inner


def merge(parts: Sequence[Files], folder: str = "") -> Files:
    """The files that several ranks wrote into `folder`, by their names from outside of it."""
    prefix = f"{folder}/" if folder else ""
    return {f"{prefix}{name}": entry for part in parts for name, entry in part.items()}


def free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def make_room(folder: Path, needed: int) -> None:
    """Make the folder, if need be. Raises OSError if fewer than `needed` bytes are free in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if free_bytes(folder) < needed:
        raise OSError(errno.ENOSPC, "No space left on device (nothing was written)")


def not_written(target: Path, error: OSError, needed: int) -> CheckpointError:
    """Return the error for a save that the disk refused."""
    reason, needed_mib, free_mib = error.strerror or str(error), needed / 2**20, free_bytes(target) / 2**20
    return CheckpointError(
        f"cannot write {target}: {reason}; it needs {needed_mib:,.1f} MiB, {free_mib:,.1f} MiB are free there. "
        "Earlier checkpoints are untouched. Make room or mend the disk, or set trainer.max_actor_ckpt_to_keep lower"
    )


@contextmanager
def refusals(target: Path, needed: int = 0) -> Iterator[None]:
    """Make a CheckpointError of whatever keeps `target` from being written."""
    try:
        yield
    except ConnectionError:  # another rank's, and none of the disk's
        raise
    except OSError as error:
        raise not_written(target, error, needed) from error
    except (ValueError, TypeError, SafetensorError) as error:
        raise not_written(target, OSError(f"{type(error).__name__}: {error}"), needed) from error


@contextmanager
def whole_folder(target: Path, needed: int = 0) -> Iterator[Path]:
    """Yield a new folder, which replaces `target` when its files are on the disk. Raises CheckpointError."""
    with refusals(target, needed):
        make_room(target.parent, needed)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True)
        with scratch as place:
            fresh = Path(place) / target.name
            make_folder(fresh)
            try:
                yield fresh
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(str(fresh), str(target))) from error
            for name, _ in walk(fresh):
                flush(fresh / name)
            flush(fresh)
            if target.exists():
                rename(target, Path(place) / "replaced")
            rename(fresh, target)
            flush(target.parent)


def _point(call: str, path: Path) -> None:
    fault_point("ckpt.call", call=call, file=path.name)
