"""The folder of a run."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from grpo_rl.config.checks.inputs import NAME_RULE, stays_below
from grpo_rl.config.convert import show
from grpo_rl.config.schema.fields import flat, sections
from grpo_rl.errors import ConfigError, DataError, did_you_mean
from grpo_rl.frozen import frozen
from grpo_rl.run_files import parsed, read_text, read_yaml
from grpo_rl.telemetry.metrics.metrics_file import JsonObject

RUNS = Path("runs")  # the default folder of runs, where names are looked for as well
_SUBFOLDERS = ("tensorboard", "rollouts", "val", "plots", "logs", "checkpoints")
_EARLIER = "earlier"
LOCK_FILE = ".lock"
_STARTED = f"{datetime.now():%Y-%m-%d %H:%M:%S}"


class _Place:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run_dir: RunDir, _: type[RunDir] | None = None) -> Path:
        return run_dir.path / self._name


@frozen
class RunDir:
    """`create` also keeps other processes out of it."""

    path: Path
    _lock: RunLock | None = field(default=None, repr=False, compare=False)

    config_file = _Place("config.yaml")
    overrides_file = _Place("overrides.txt")
    plan_file = _Place("plan.txt")
    page_file = _Place("page.html")
    metrics_file = _Place("metrics.jsonl")
    timeline_file = _Place("timeline.jsonl")
    status_file = _Place("status.json")
    engine_orders = _Place("engine_orders.jsonl")  # what `grpo-rl engines` asks for, an order a line
    session_file = _Place("session.json")  # the run's processes: the next run of this name ends leftovers
    report_file = _Place("report.txt")
    tensorboard = _Place("tensorboard")
    rollouts = _Place("rollouts")
    val = _Place("val")
    collected = _Place("collected")  # responses sampled before training
    plots = _Place("plots")
    logs = _Place("logs")
    checkpoints = _Place("checkpoints")
    recovery = _Place("recovery")  # the checkpoint of a run without `trainer.save_freq`, while it lasts
    model = _Place("model")
    reward_model = _Place("reward_model")

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, base: str | Path, experiment_name: str | None = None) -> RunDir:
        """Make, if need be, and lock `<base>/<experiment_name>`; without a name, a new one with the date.
        Raises ConfigError if the name leaves `base`, the folder cannot be made, another process runs in it,
        or links or pipes take the places of files."""
        base = Path(base).expanduser()
        path = base / dated_name() if experiment_name is None else _named_path(base, experiment_name)
        try:
            path.mkdir(parents=True, exist_ok=experiment_name is not None)
            _refuse_prepared(path)
            run_dir = cls(path, RunLock(path))
            run_dir._make_subfolders()
        except OSError as error:
            raise ConfigError(f"the run's folder {path} cannot be made: {error.strerror or error}") from error
        return run_dir

    def written(self) -> list[tuple[str, Path]]:
        places = {
            "page": self.page_file,
            "curves": self.plots / "curves.png",
            "metrics": self.metrics_file,
            "TensorBoard": self.tensorboard,
            "rollouts": self.rollouts,
            "validation": self.val,
            "configuration": self.config_file,
            "checkpoints": self.checkpoints,
            "model": self.model,
            "reward model": self.reward_model,
            "logs": self.logs,
            "report": self.report_file,
        }
        return [(name, path) for name, path in places.items() if (any(path.iterdir()) if path.is_dir() else path.exists())]

    def write_config(self, resolved_yaml: str, overrides: Sequence[str]) -> None:
        """Different files from before a resume stay beside the new ones, numbered."""
        for file, text in ((self.config_file, resolved_yaml), (self.overrides_file, "".join(f"{o}\n" for o in overrides))):
            previous = None
            with suppress(DataError):
                previous = read_text(file)
            if previous != text and file.exists():
                file.rename(_first_free(file.with_name(f"{file.stem}.{{}}{file.suffix}")))
            file.write_text(text, encoding="utf-8")

    def changes(self, resolved_yaml: str, earlier: Path | None = None) -> list[str]:
        """Return `key: old -> new` against the configuration of this run's last start, or of the run
        `earlier` if it had none. To be called before `write_config`. Empty without anything to compare
        with."""
        for folder in filter(None, (self.path, earlier)):
            with suppress(DataError):
                previous = read_yaml(folder / self.config_file.name)
                break
        else:
            return []
        old, new = flat(previous), flat(yaml.safe_load(resolved_yaml))
        texts = {key: [show(values[key]) if key in values else "not set" for values in (old, new)] for key in {**old, **new}}
        return [f"{key}: {old_value} -> {current}" for key, (old_value, current) in texts.items() if old_value != current]

    def start_fresh(self, keep: Sequence[Path] = ()) -> Path | None:
        """Move an earlier run's files to `earlier/N`, and return that folder; None if there were none."""
        untouched = (_EARLIER, LOCK_FILE, *(path.name for path in keep))
        entries = [entry for entry in sorted(self.path.iterdir()) if entry.name not in untouched]
        if not any(entry.is_file() or any(entry.iterdir()) for entry in entries):
            return None
        aside = self.new_aside()
        for entry in entries:
            entry.rename(aside / entry.name)
        self._make_subfolders()
        return aside

    def set_aside(self, folder: Path) -> Path:
        """Move one folder into `earlier/N`, and return its place."""
        return folder.rename(self.new_aside() / folder.name)

    def new_aside(self) -> Path:
        (self.path / _EARLIER).mkdir(exist_ok=True)
        aside = _first_free(self.path / _EARLIER / "{}")
        aside.mkdir()
        return aside

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _make_subfolders(self) -> None:
        for name in _SUBFOLDERS:
            (self.path / name).mkdir(exist_ok=True)


def run_config(run: Path) -> JsonObject:
    """Raises DataError if config.yaml cannot be read, or a group of keys is a value."""
    config = read_yaml(run / "config.yaml")
    for section in sorted(sections()):
        value: Any = config
        for part in section.split("."):
            value = value.get(part, {})
            if not isinstance(value, dict):
                raise DataError(f"{run / 'config.yaml'}: {section} is {type(value).__name__}, expected a group of keys")
    return config


def named_run(text: str) -> Path | None:
    """Return the run that `text` names, by folder or by name below `runs`; None if there is none. Raises
    DataError for links that lead out of it."""
    folders = [Path(text).expanduser()]
    if not Path(text).is_absolute() and ".." not in Path(text).parts:
        folders += [place / text for place in (RUNS, *sorted(RUNS.glob("*/")))]
    for folder in folders:
        # A folder with config.json is a model.
        if os.path.isfile(folder / "config.yaml") and not os.path.isfile(folder / "config.json"):
            refuse_links(folder)
            return folder
    return None


def find_run(text: str) -> Path:
    """As `named_run`, or any other folder: part of a run may be all that there is. Raises ConfigError if
    there is neither."""
    run, folder = named_run(text), Path(text).expanduser()
    if run is not None:
        return run
    if not os.path.isdir(folder):
        raise ConfigError(no_run(text))
    refuse_links(folder)
    return folder


def no_run(text: str, nor: str = "") -> str:
    """Return the message that `text` names no run, nor `nor`; with the nearest run, or those below it."""
    known = [str(folder.parent) for folder in RUNS.glob("**/config.yaml") if len(folder.parts) <= 4]
    hint = did_you_mean(text, [*known, *(Path(name).name for name in known)], most=1)
    if os.path.isdir(text) and (below := sorted(path.parent.name for path in Path(text).glob("*/config.yaml"))):
        rest = f" and {len(below) - 12} more" if len(below) > 12 else ""
        hint = f" The runs below it are {', '.join(below[:12])}{rest}"
    return f"{text!r} is no run (a folder with config.yaml, or its name){nor}.{hint}"


def refuse_links(run: Path) -> None:
    """Raise DataError for a link that leads out of the run's folder."""
    for link in links_out(run):
        if link != Path(os.path.realpath(run), "checkpoints"):
            raise DataError(
                f"{link}: is a link to {os.path.realpath(link)}, out of the run's folder, and a run is read there alone; "
                "put the file itself there"
            )


def links_out(folder: Path, *, deep: bool = True) -> Iterator[Path]:
    """Yield links that lead out of a folder; with `deep=False` from itself and its direct subfolders only."""
    root = os.path.realpath(folder)
    inside = [root]
    if Path(root).parent.name == "snapshots":
        inside.append(str(Path(root).parents[1] / "blobs"))
    for place, folders, files in os.walk(root):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not any(Path(os.path.realpath(path)).is_relative_to(top) for top in inside):
                yield path
        if not deep and place != root:
            folders.clear()


def dated_name() -> str:
    # For two runs that start in the same second.
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def _named_path(base: Path, name: str) -> Path:
    if not stays_below(name):
        raise ConfigError(f"trainer.experiment_name={name!r}: {NAME_RULE}")
    path = base / name
    # A symbolic link may lead out of base.
    if not path.resolve().is_relative_to(base.resolve()):
        raise ConfigError(f"trainer.experiment_name={name!r} leads to {path.resolve()}: {NAME_RULE}")
    return path


def refuse_taken(base: str | Path, experiment_name: str | None) -> None:
    """Raise ConfigError if another process runs under this name."""
    if experiment_name is None:
        return
    path = _named_path(Path(base).expanduser(), experiment_name)
    if (path / LOCK_FILE).exists():
        with suppress(OSError):
            RunLock(path, claim=False).release()


def _refuse_prepared(run: Path) -> None:
    """Raise ConfigError for links out of the folder, pipes and devices in it."""
    links = [link for link in links_out(run) if link.parent != Path(os.path.realpath(run)) or not link.is_dir()]
    places = (Path(place, name) for place, _, names in os.walk(run) for name in names)
    for path in (*links, *(path for path in places if not (path.is_file() or path.is_symlink()))):
        what = f"a link to {os.path.realpath(path)}" if path.is_symlink() else "no file"
        raise ConfigError(f"{path}: is {what}, and a run reads and writes in its own folder; remove it, or take another name")


def _first_free(pattern: Path) -> Path:
    paths = (pattern.with_name(pattern.name.format(number)) for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


# ---- the lock: one process at a time runs under one name, on one machine or several -----------------------------


class RunLock:
    """Keeps other processes out of a run's folder until `release` or the end of this process. The kernel's
    lock on `.lock` decides, also on network file systems with locks. Without locks the file's text decides:
    an owner on another machine is taken to be alive."""

    def __init__(self, folder: Path, *, claim: bool = True) -> None:
        """Raises ConfigError with the owner if it is taken. Without `claim` only look."""
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        except OSError:  # this file system has no locks
            is_free = not _is_alive(descriptor)
        if not is_free:
            owner = _owner(descriptor)
            os.close(descriptor)
            raise ConfigError(
                f"trainer.experiment_name={folder.name}: another process (pid {owner.get('pid')} on {owner.get('host')}, "
                f"since {owner.get('since')}) is running in {folder}; wait for it, stop it, or choose another name. Remove "
                f"{folder / LOCK_FILE} if that process is gone"
            )
        if claim:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_myself()).encode(), 0)
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                if _owner(descriptor) == _myself():
                    os.truncate(descriptor, 0)
            os.close(descriptor)


def _myself() -> JsonObject:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": _STARTED}


def _owner(descriptor: int) -> JsonObject:
    with suppress(ValueError):
        owner = parsed(os.pread(descriptor, 1000, 0).decode("utf-8", errors="replace"))
        if isinstance(owner, dict):
            return owner
    return {}


def _is_alive(descriptor: int) -> bool:
    """Return whether the owner may still be running, on a file system without locks."""
    owner = _owner(descriptor)
    if owner.get("host") == socket.gethostname():
        return owner.get("pid") != os.getpid() and Path(f"/proc/{owner.get('pid')}").exists()
    return bool(owner)
