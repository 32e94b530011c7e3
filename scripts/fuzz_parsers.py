"""Look for text that breaks what reads it, guided by coverage: `bash scripts/setup.sh dev data fuzz`, then

    python scripts/fuzz_parsers.py --seconds 600                  all targets, one after the other
    python scripts/fuzz_parsers.py jsonl manifest --seconds 60

The targets and their first inputs are in tests/fuzz_targets.py. Whatever comes in, each either works or raises one of the
package's own errors, within 50 ms of processor time per KiB and 512 MiB of memory more than it began with. The inputs that
reached new code are kept (--corpus) and are where the next run begins. Exit code 1 when something broke: the input is kept
beside the corpus, and `--again FILE` runs it once more.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import fuzz_targets  # noqa: E402

MORE_MIB = 512
LONGEST_INPUT = 4096
END_S = 300.0


def fuzz(name: str, seconds: int, corpus: Path) -> bool:
    """Fuzz one target in a process of its own, and print what came of it; whether nothing broke."""
    folder, broken = corpus / name, corpus / "broken"
    folder.mkdir(parents=True, exist_ok=True)
    broken.mkdir(exist_ok=True)
    for number, seed in enumerate(fuzz_targets.SEEDS[name]):
        (folder / f"seed_{number}").write_bytes(seed)
    flags = [f"-max_total_time={seconds}", f"-max_len={LONGEST_INPUT}", f"-artifact_prefix={broken}/{name}-", "-rss_limit_mb=0"]
    command = [sys.executable, __file__, name, "--inside", *flags, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + END_S)
    runs = re.findall(r"^#(\d+)\s.*?cov: (\d+)", found.stderr, re.MULTILINE)
    number, covered = runs[-1] if runs else ("0", "0")
    print(
        f"{name:12s} {int(number):9,} inputs, {int(covered):6,} places reached, {'ok' if found.returncode == 0 else 'BROKEN'}"
    )
    if found.returncode != 0:
        print("\n".join(found.stderr.splitlines()[-25:]))
    return found.returncode == 0


def inside(name: str, flags: list[str]) -> None:
    """Run in the process of one target until the time is over."""
    import atheris

    with atheris.instrument_imports(include=["grpo_rl"]), tempfile.TemporaryDirectory() as folder:
        for seed in fuzz_targets.SEEDS[name]:
            fuzz_targets.TARGETS[name](seed, Path(folder))
    began_mib = resident_mib()
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))

    def one(data: bytes) -> None:
        fuzz_targets.check(name, data, scratch)
        assert resident_mib() < began_mib + MORE_MIB, f"{resident_mib():.0f} MiB; it began with {began_mib:.0f}"

    atheris.Setup([sys.argv[0], *flags], one)
    atheris.Fuzz()


def resident_mib() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    if "--inside" in sys.argv:
        inside(sys.argv[1], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(fuzz_targets.TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default 600)")
    parser.add_argument("--corpus", type=Path, default=Path("outputs/fuzz"), help="folder of inputs (default outputs/fuzz)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="run this input once, for the one target named")
    given = parser.parse_args()
    unknown = sorted(set(given.targets) - set(fuzz_targets.TARGETS))
    if unknown or (given.again and len(given.targets) != 1):
        parser.error(f"no target {', '.join(unknown)}" if unknown else "--again needs one target")
    if given.again:
        with tempfile.TemporaryDirectory() as folder:
            fuzz_targets.check(given.targets[0], given.again.read_bytes(), Path(folder))
        print("ok")
        return 0
    if importlib.util.find_spec("atheris") is None:
        sys.exit("fuzzing needs the package atheris: bash scripts/setup.sh dev data fuzz")
    good = [fuzz(name, given.seconds, given.corpus.resolve()) for name in given.targets or fuzz_targets.TARGETS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
