"""A benchmark of the start with a large data set: seconds to the first batch and peak RSS.

python scripts/bench_data.py --rows 1000000 --folder FOLDER [--formats jsonl parquet] [--curriculum none]

Writes the files where they are not there yet, then loads each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCH_SIZE, NUM_BATCHES, WRITTEN_AT_ONCE = 128, 8, 10_000


def row(index: int) -> dict[str, Any]:
    question = f"In box {index} are {index % 97} balls, and {index % 13} are taken out. " + "How many are left? " * 12
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index % 97 - index % 13)},
        "extra_info": {"index": index, "split": "train", "difficulty": index % 1000},
    }


def write(path: Path, num_rows: int) -> None:
    if path.exists():
        return
    started = time.perf_counter()
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for index in range(num_rows):
                file.write(json.dumps(row(index)) + "\n")
    else:
        import pyarrow
        import pyarrow.parquet

        # One row group of a million rows, as pyarrow and pandas write them: the hardest case for drawing single rows.
        parts = [
            pyarrow.Table.from_pylist([row(i) for i in range(start, min(num_rows, start + WRITTEN_AT_ONCE))])
            for start in range(0, num_rows, WRITTEN_AT_ONCE)
        ]
        pyarrow.parquet.write_table(pyarrow.concat_tables(parts), path)
    print(f"written in {time.perf_counter() - started:.1f} s: {path}, {path.stat().st_size / 1e6:.0f} MB", flush=True)


def peak_mb() -> float:
    # Not ru_maxrss, which a process takes over from the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def load(path: Path, curriculum: str, cache_dir: str) -> None:
    from grpo_rl.config.schema.tree import Config, DataConfig
    from grpo_rl.data.dataset import load_dataset
    from grpo_rl.data.draw_order.choose import make_sampler
    from grpo_rl.models.builtin import build_tokenizer

    tokenizer = build_tokenizer(512)
    tokenizer("warm", add_special_tokens=False)
    before = peak_mb()
    started = time.perf_counter()
    config = Config(
        data=DataConfig(train_batch_size=BATCH_SIZE, max_prompt_length=4096, curriculum=curriculum, cache_dir=cache_dir)
    )
    data = load_dataset([str(path)], config.data, tokenizer, max_samples=-1)
    loaded = time.perf_counter() - started
    if curriculum == "difficulty":
        processor = time.process_time()
        data.difficulty()
        print(
            f"{path.name}: the difficulty of every row read in {time.perf_counter() - started - loaded:.2f} s, "
            f"{time.process_time() - processor:.2f} s of processor time"
        )
    sampler = make_sampler(config, data, None)
    for number in range(NUM_BATCHES):
        batch = [data.prompt(index, uid) for index, uid in sampler.next_batch()]
        assert len(batch) == BATCH_SIZE
        if number == 0:
            first = time.perf_counter() - started
    each = (time.perf_counter() - started - first) / (NUM_BATCHES - 1)
    print(
        f"{path.name}: {len(data)} rows, loaded in {loaded:.1f} s, first batch after {first:.1f} s, then {each:.2f} s for "
        f"each of {BATCH_SIZE} prompts; peak RSS {peak_mb():.0f} MB, {before:.0f} MB of it before"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", default=["jsonl", "parquet"], choices=["jsonl", "parquet"])
    parser.add_argument("--curriculum", default="none", choices=["none", "difficulty", "pass_rate"])
    parser.add_argument("--load", type=Path, help="load this file, in this process")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.load is not None:
        load(options.load, options.curriculum, str(options.folder))
        return
    for suffix in options.formats:
        path = options.folder / f"rows_{options.rows}.{suffix}"
        write(path, options.rows)
        words = ["--folder", str(options.folder), "--load", str(path), "--curriculum", options.curriculum]
        subprocess.run([sys.executable, __file__, *words], check=True)


if __name__ == "__main__":
    main()
