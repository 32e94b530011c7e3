"""README's two commands on a minimal Debian 12, by a user without rights: what is missing is said, and with it both pass.

The second one is `scripts/test.sh`, half an hour and more. GRPO_RL_TEST_PART=lint (or types, unit, ...) runs that part of it alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "python3,python3-venv,git,ca-certificates"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(os.geteuid() != 0, reason="making a machine of its own needs root"),
    pytest.mark.skipif(shutil.which("debootstrap") is None, reason="needs the program debootstrap"),
]


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The root folder of the machine, with this repository at /src, and the folders of wheels that pip is told of here."""
    folder = tmp_path_factory.mktemp("debian") / "root"
    made = run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder)
    if made.returncode:
        pytest.skip(f"debootstrap: {made.stdout.splitlines()[-1] if made.stdout else made.stderr[-200:]}")
    places = {Path("/src"): ROOT}
    told = [*os.environ.get("PIP_FIND_LINKS", "").split(), *settings("extra-index-url"), *settings("index-url")]
    places |= {
        path: path for path in (Path(word.removeprefix("file://")) for word in told) if path.is_absolute() and path.is_dir()
    }
    with ExitStack() as stack:
        for inside, outside in places.items():
            target = folder / inside.relative_to("/")
            target.mkdir(parents=True, exist_ok=True)
            run("mount", "--bind", outside, target, check=True)
            stack.callback(run, "umount", "--lazy", target)
        pseudo_terminals = "newinstance,ptmxmode=0666"
        for kind, name, options in (
            ("proc", "proc", "rw"),
            ("sysfs", "sys", "rw"),
            ("tmpfs", "dev/shm", "rw"),
            ("devpts", "dev/pts", pseudo_terminals),
        ):
            (folder / name).mkdir(exist_ok=True)
            run("mount", "-t", kind, "-o", options, kind, folder / name, check=True)
            stack.callback(run, "umount", "--lazy", folder / name)
        for file in ("/etc/resolv.conf", "/etc/hosts", CERTIFICATES):
            shutil.copy(file, folder / file.lstrip("/"))
        run("chroot", folder, "useradd", "-m", "tester", check=True)
        yield folder


def settings(name: str) -> list[str]:
    """Return what pip's own settings on this machine say of a key."""
    return run("python3", "-m", "pip", "config", "get", f"global.{name}").stdout.split()


def typed(debian: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Return what a command typed by the user in a fresh clone ended with."""
    kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    words = " ".join(f"export {key}='{value}';" for key, value in kept.items())
    words += f"export SSL_CERT_FILE={CERTIFICATES} HOME=/home/tester; cd; git config --global --add safe.directory '*';"
    words += f"test -d clone || git clone -q /src clone; cd clone && {command}"
    return run("chroot", debian, "su", "tester", "-c", words, timeout=6600)


def test_the_readmes_first_command_says_what_is_missing_and_then_trains(debian: Path) -> None:
    missing = typed(debian, "bash scripts/quickstart.sh")
    assert missing.returncode == 1 and "libnuma.so.1 is missing" in missing.stderr and "installing" not in missing.stdout
    run("chroot", debian, "apt-get", "install", "-y", "-q", "libnuma1", check=True)
    done = typed(debian, "bash scripts/quickstart.sh")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "this report" in done.stdout


def test_the_readmes_second_command_passes(debian: Path) -> None:
    """After the first one. Tests that want a compiler or user namespaces are skipped, and the last lines say so."""
    part = os.environ.get("GRPO_RL_TEST_PART", "")
    done = typed(debian, f"bash scripts/test.sh {part}")
    print(done.stdout)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    assert done.returncode == 0 and not failed, "\n".join([*failed[-100:], done.stdout[-1500:], done.stderr[-2000:]])
