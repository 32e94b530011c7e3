"""TRL's GRPO step on the work of bench_step.py: the same model, prompts, response lengths, reference and KL term.

TRL needs an environment of its own; this script runs there and needs nothing of grpo_rl's environment:

    python3 -m venv trl && trl/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.19.0
    trl/bin/python scripts/bench_trl.py --model 10m --steps 4
    .venv/bin/python scripts/bench_step.py --model 10m --steps 4 --cases equal ragged --trl trl/bin/python

A shared machine changes its speed within minutes: the last command runs the two in turns and compares neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_step import SIZES, make_model, make_prompts

NUM_SAMPLES = 8


def bench(model: Path, out: Path, work: argparse.Namespace) -> None:
    """Train for so many steps after one for warming up; print medians."""
    try:
        from datasets import Dataset
        from transformers import GenerationConfig, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ModuleNotFoundError as error:
        sys.exit(
            f"{error.name} is not in the environment of {sys.executable}: TRL needs one of its own, made as {__file__} says"
        )

    steps, num_rollouts = work.steps, work.prompts * NUM_SAMPLES
    texts = json.loads(work.texts.read_text()) if work.texts else make_prompts(model, work.prompts * (steps + 2), 8)
    rows = [{"prompt": text} for text in texts]
    stop_ids = GenerationConfig.from_pretrained(model).eos_token_id
    step_seconds: list[float] = []
    sampling_seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            step_seconds.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_seconds[-1] = time.perf_counter() - step_seconds[-1]

    config = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=num_rollouts // work.micro_batch,
        num_generations=NUM_SAMPLES,
        max_completion_length=work.tokens,
        # Ragged: any of the model's stop tokens ends a response. Else the lengths are forced; masking the end of a response
        # does not change the time.
        generation_kwargs={"eos_token_id": stop_ids} if work.ragged else {"min_new_tokens": work.tokens},
        beta=work.beta,
        learning_rate=1e-6,
        max_steps=steps + 1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda completions, **_: [len(text) % 7 / 7 for text in completions],
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    generate = trainer._generate_and_score_completions

    def timed(*arguments: Any, **keywords: Any) -> Any:
        started = time.perf_counter()
        result = generate(*arguments, **keywords)
        sampling_seconds.append(time.perf_counter() - started)
        tokens = int(result["completion_mask"].sum())
        most = num_rollouts * work.tokens
        assert 0 < tokens < most if work.ragged else tokens == most, f"{tokens} tokens were sampled"
        return result

    trainer._generate_and_score_completions = timed
    trainer.train()
    whole, sampling = statistics.median(step_seconds[1:]), statistics.median(sampling_seconds[1:])
    print(f"TRL, {'ragged' if work.ragged else 'equal'} lengths, beta {work.beta:g}: medians of {steps} steps, seconds")
    print(f"  whole step                         {whole:8.3f}")
    print(f"    sampling and reference           {sampling:8.3f}")
    print(f"    update                           {whole - sampling:8.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="10m", help=f"{', '.join(SIZES)}, or a model's folder")
    parser.add_argument("--texts", type=Path, help="a JSON file with the prompts, as bench_step.py writes it")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step, with 8 responses each")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response at most")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one for warming up")
    parser.add_argument("--beta", type=float, default=0.001, help="weight of the KL term; 0 runs without a reference")
    parser.add_argument("--micro-batch", type=int, default=32, help="rows of one forward and backward pass")
    parser.add_argument("--ragged", action="store_true", help="responses end at a stop token: geometric lengths with mean 32")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", arguments.model)
        bench(model, Path(folder) / "out", arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
