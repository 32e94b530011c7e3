"""Bring the environment to a machine that no registry and no hub can be reached from, and run the main job there on random weights.

    python scripts/bare_machine.py pack --to pieces --python 3.12 -- ray==2.60.0 vllm==0.32.0   # where packages can be downloaded
    python scripts/bare_machine.py install --from pieces --to site       # there; as often as pieces arrive, says which are missing
    PYTHONPATH=site python scripts/bare_machine.py run --out out --rows gsm8k.jsonl --tokenizer FOLDER

`pack` cuts the wheels into pieces of at most 60 MiB, so that they can travel one by one; what the other machine has already can be
left out (`--without NAME`). `run` makes a random model with the sizes of Qwen2.5-0.5B, or with `--tiny` of a model for a CPU, trains
it by `grpo_rl.main` on GSM8K's questions with a reward that random weights can raise (the share of digits in a response), and
fails unless it rose. Before the package is installed only Python itself is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INDEX = "index.json"


def pack(requirements: list[str], to: Path, python: str, without: list[str], mib: float, platform: str) -> None:
    """Download the wheels of these requirements, with all that they need, and cut them into pieces."""
    wheels = to / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    constraints = ["--constraint", str(ROOT / "scripts" / "constraints.txt")]
    where = ["--only-binary=:all:", "--python-version", python, "--platform", platform, "--implementation", "cp"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-d", str(wheels), *where, *constraints, *requirements], check=True
    )
    left_out = tuple(name.lower().replace("-", "_") + "-" for name in without)
    cut([wheel for wheel in sorted(wheels.glob("*.whl")) if not wheel.name.lower().startswith(left_out)], to, mib)


def cut(wheels: list[Path], to: Path, mib: float) -> None:
    """Cut these files, one after the other, into `piece_000` and so on, with an index of names, sizes and digests."""
    size = int(mib * 2**20)
    index: list[dict[str, Any]] = []
    number, room, piece = -1, 0, None
    for wheel in wheels:
        data = wheel.read_bytes()
        index.append({"name": wheel.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        while data:
            if not room:
                number, room = number + 1, size
                if piece is not None:
                    piece.close()
                piece = (to / f"piece_{number:03}").open("wb")
            assert piece is not None
            piece.write(data[:room])
            data, room = data[room:], room - min(room, len(data))
    if piece is not None:
        piece.close()
    (to / INDEX).write_text(json.dumps({"pieces": number + 1, "wheels": index}, indent=1))
    print(f"{len(wheels)} wheels in {number + 1} pieces of at most {mib:g} MiB in {to}; take {INDEX} along with each")


def join(pieces: Path, to: Path) -> list[Path]:
    """Return the wheels of the pieces, written into `to`. Exits with what is missing or not as it was packed."""
    index = json.loads((pieces / INDEX).read_text())
    names = [f"piece_{number:03}" for number in range(index["pieces"])]
    if missing := [name for name in names if not (pieces / name).is_file()]:
        sys.exit(f"{len(names) - len(missing)} of {len(names)} pieces are here; still to come: {' '.join(missing)}")
    to.mkdir(parents=True, exist_ok=True)
    data = b"".join((pieces / name).read_bytes() for name in names)
    wheels, start = [], 0
    for entry in index["wheels"]:
        part, start = data[start : start + entry["size"]], start + entry["size"]
        if hashlib.sha256(part).hexdigest() != entry["sha256"]:
            sys.exit(f"{entry['name']} is not as it was packed: bring its pieces again")
        wheels.append(to / entry["name"])
        wheels[-1].write_bytes(part)
    return wheels


def install(pieces: Path, to: Path) -> None:
    """Install all wheels into the folder `to`, without a registry."""
    wheels = join(pieces, to / ".wheels")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(to)]
    subprocess.run([*command, *map(str, wheels)], check=True)
    print(f"installed {len(wheels)} wheels: export PYTHONPATH={to}")


def digits(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return the share of digits in a response: a reward that a model of random weights gets some of, and learns within a few steps."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def run(out: Path, rows: Path | None, tokenizer: Path | None, words: list[str], *, tiny: bool, steps: int) -> None:
    """Train a random model by the main command, and exit with 1 unless its reward rose."""
    out.mkdir(parents=True, exist_ok=True)
    model = tiny_model(out / "model") if tiny else random_qwen(out / "model", tokenizer)
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
    command += [f"reward.functions=[{Path(__file__).resolve()}:digits]", "actor_rollout_ref.actor.optim.lr=3e-4"]
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
    """Write a model with the sizes of Qwen2.5-0.5B and random weights, with the files of the tokenizer."""
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
    packs.add_argument("--platform", default="manylinux_2_28_x86_64")
    packs.add_argument("--without", nargs="*", default=[], help="packages that are there already")
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
        pack(options.requirements, options.to, options.python, options.without, options.mib, options.platform)
    elif options.part == "install":
        install(options.pieces, options.to)
    else:
        run(options.out, options.rows, options.tokenizer, options.words, tiny=options.tiny, steps=options.steps)


if __name__ == "__main__":
    main()
