"""Bring the environment to a machine that no registry and no hub can be reached from, and run the main job there on random weights.

    pip freeze > there.txt                                                                   # on that machine, or names by hand
    python scripts/bare_machine.py pack --to pieces --there there.txt -- ray==2.60.0 hydra-core==1.3.8    # with a registry
    python scripts/bare_machine.py install --from pieces --to site       # there; as often as pieces arrive, says which are missing
    PYTHONPATH=site python scripts/bare_machine.py run --out out --rows gsm8k.jsonl --tokenizer FOLDER

`pack` needs uv (`scripts/setup.sh` puts it into .venv). It resolves the requirements for the other machine's Python, leaves out
what is installed there (`--there`) or can be done without (`--without PACKAGE`, `--drop GLOB` for files), and cuts the installed
folder, compressed, into pieces of at most 60 MiB. `run` makes a random model with the sizes of Qwen2.5-0.5B, or with `--tiny` of
a model for a CPU, trains it by `grpo_rl.main` on GSM8K's questions with a reward that random weights can raise (the share of
letters in a response), and fails unless it rose. `install` needs only Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INDEX = "index.json"


def canonical(line: str) -> str:
    """Return the normalized package name at the start of a requirement (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s=<>!~;@\[]", line.strip(), maxsplit=1)[0]).lower()


def pack(requirements: list[str], to: Path, python: str, platform: str, absent: set[str], drop: list[str], mib: float) -> None:
    """Install these requirements with their dependencies, without the packages in `absent`, and cut the result into pieces."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if uv is None:
        sys.exit("pack needs uv: pip install uv, or run it with .venv/bin/python")
    target = ["--python-version", python, "--python-platform", platform]
    with tempfile.TemporaryDirectory(dir=to) as scratch:
        constraints, resolved, site = (
            ROOT / "scripts" / "constraints.txt",
            Path(scratch) / "resolved.txt",
            Path(scratch) / "site",
        )
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", *target, "--constraint", str(constraints)]
        lines = subprocess.run(
            [*command, "-"], input="\n".join(requirements), stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        pins = [
            line for line in lines.splitlines() if line and not line.startswith(("#", "-")) and canonical(line) not in absent
        ]
        resolved.write_text("\n".join(pins) + "\n")
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--no-deps", *target, "--target", str(site), "-r", str(resolved)], check=True
        )
        for pattern in drop:
            for path in sorted(site.glob(pattern), reverse=True):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        archive = Path(scratch) / "site.tar.xz"
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            tar.add(site, arcname=".", filter=lambda entry: None if "__pycache__" in entry.name else entry)
        cut(archive, to, mib)
    print(f"{len(pins)} packages: {' '.join(pins)}")


def cut(archive: Path, to: Path, mib: float) -> None:
    """Cut the file into `piece_000` and so on of at most so many MiB, with an index of sizes and digests."""
    digests: list[str] = []
    with archive.open("rb") as file:
        while data := file.read(int(mib * 2**20)):
            (to / f"piece_{len(digests):03}").write_bytes(data)
            digests.append(hashlib.sha256(data).hexdigest())
    (to / INDEX).write_text(json.dumps({"pieces": digests}, indent=1))
    print(
        f"{archive.stat().st_size / 2**20:.1f} MiB in {len(digests)} pieces of at most {mib:g} MiB; take {INDEX} along with each"
    )


def install(pieces: Path, to: Path) -> None:
    """Unpack the pieces into the folder `to`. Exits with the pieces that are missing or not as they were packed."""
    digests = json.loads((pieces / INDEX).read_text())["pieces"]
    paths = [pieces / f"piece_{number:03}" for number in range(len(digests))]
    if missing := [path.name for path in paths if not path.is_file()]:
        sys.exit(f"{len(paths) - len(missing)} of {len(paths)} pieces are here; still to come: {' '.join(missing)}")
    for path, digest in zip(paths, digests, strict=True):
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            sys.exit(f"{path.name} is not as it was packed: bring it again")
    with tempfile.TemporaryFile() as archive:
        for path in paths:
            archive.write(path.read_bytes())
        archive.seek(0)
        with tarfile.open(fileobj=archive, mode="r:xz") as tar:
            tar.extractall(to, filter="data")
    print(f"installed: export PYTHONPATH={to}")


def digits(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return the share of digits in a response: a reward that random weights get some of, and learn, if most tokens are digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def latin(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return the share of ASCII letters in a response, about half with random weights over Qwen2.5's vocabulary."""
    letters = sum(character.isascii() and character.isalpha() for character in solution_str)
    return letters / max(1, len(solution_str))


def run(out: Path, rows: Path | None, tokenizer: Path | None, words: list[str], *, tiny: bool, steps: int) -> None:
    """Train a random model by the main command, and exit with 1 unless its reward rose."""
    out.mkdir(parents=True, exist_ok=True)
    model = tiny_model(out / "model") if tiny else random_qwen(out.parent / "random_qwen", tokenizer)
    data = out / "rows.jsonl"
    questions = ["12+7=", "3+44=", "8+8=", "91+2="] * 8
    if rows is not None:
        questions = [json.loads(line)["question"] for line in rows.read_text().splitlines() if line.strip()][:2048]
    with data.open("w") as file:
        for question in questions:
            row = {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"ground_truth": ""},
            }
            file.write(json.dumps(row) + "\n")
    sizes = ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "data.max_response_length=24"]
    if not tiny:
        sizes = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64", "data.max_response_length=256"]
    command = [sys.executable, "-m", "grpo_rl.main", f"actor_rollout_ref.model.path={model}", f"data.train_files={data}"]
    command += ["data.filter_overlong_prompts=true", "data.max_prompt_length=512", *sizes, "actor_rollout_ref.rollout.n=8"]
    command += [
        f"reward.functions=[{Path(__file__).resolve()}:{'digits' if tiny else 'latin'}]",
        "actor_rollout_ref.actor.optim.lr=3e-4",
    ]
    command += ["actor_rollout_ref.actor.use_kl_loss=false", f"trainer.total_training_steps={steps}"]
    command += ["trainer.experiment_name=bare", f"trainer.default_local_dir={out / 'runs'}", *words]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=False).returncode
    if code:
        sys.exit(code)
    lines = (out / "runs" / "bare" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    few = max(1, len(rewards) // 4)
    before, after = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
    print(f"reward {before:.3f} -> {after:.3f} over {len(rewards)} steps")
    sys.exit(int(after <= before))


def random_qwen(folder: Path, tokenizer: Path | None) -> Path:
    """Write a model with the sizes of Qwen2.5-0.5B and random weights, with the files of the tokenizer, unless it is there."""
    if (folder / "tokenizer_config.json").is_file():
        return folder
    if tokenizer is None:
        sys.exit("--tokenizer: the folder of Qwen2.5's tokenizer, which cannot be made up")
    import torch
    from transformers import AutoTokenizer
    from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 32_768}
    Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def tiny_model(folder: Path) -> Path:
    """Write the random embedded model, with its own tokenizer."""
    sys.path.insert(0, str(ROOT))
    from grpo_rl.models import builtin

    return folder if folder.is_dir() else builtin.build("builtin:arithmetic", folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    packs = parts.add_parser("pack")
    packs.add_argument("--to", type=Path, required=True)
    packs.add_argument("--python", default="3.12", help="version there")
    packs.add_argument("--platform", default="x86_64-manylinux_2_34", help="uv's name of the platform there")
    packs.add_argument("--there", type=Path, help="a file with a package on each line, as pip freeze prints it: left out")
    packs.add_argument("--without", nargs="*", default=[], metavar="PACKAGE", help="further packages to leave out")
    packs.add_argument("--drop", nargs="*", default=[], metavar="GLOB", help="files and folders of packages to leave out")
    packs.add_argument("--mib", type=float, default=60.0)
    packs.add_argument("requirements", nargs="+")
    installs = parts.add_parser("install")
    installs.add_argument("--from", dest="pieces", type=Path, required=True)
    installs.add_argument("--to", type=Path, required=True)
    runs = parts.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--rows", type=Path, help="GSM8K's questions as JSON Lines")
    runs.add_argument("--tokenizer", type=Path)
    runs.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    runs.add_argument("--steps", type=int, default=30)
    runs.add_argument("words", nargs="*", help="further key=value for grpo_rl.main")
    options = parser.parse_args(argv)
    if options.part == "pack":
        options.to.mkdir(parents=True, exist_ok=True)
        there = options.there.read_text().splitlines() if options.there else []
        absent = {canonical(line) for line in [*there, *options.without]}
        pack(options.requirements, options.to, options.python, options.platform, absent, options.drop, options.mib)
    elif options.part == "install":
        install(options.pieces, options.to)
    else:
        run(options.out, options.rows, options.tokenizer, options.words, tiny=options.tiny, steps=options.steps)


if __name__ == "__main__":
    main()
