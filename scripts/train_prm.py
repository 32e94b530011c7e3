"""Trains a small process reward model on rated steps of PRM800K and measures how well it separates good steps from bad ones.

    python scripts/train_prm.py --data steps.parquet --tokenizer FOLDER --out prm

The file has the columns instruction, responses (the steps before), next_response and rating (-1, 0, 1). The model is a random
Qwen3 body with a classification head of one label; its score at a step's last token is the logit of "this step is good". Held
out are one in five problems with all of their steps, and one in eight of the other steps: the first measure the
model on problems that it has never seen, the second on other steps of problems that it has. The result is an ordinary
Hugging Face folder for reward.reward_model.model_path.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from grpo_rl.config.schema.tree import OptimConfig
from grpo_rl.data.balance import plan_micro_batches
from grpo_rl.models import attention, builtin
from grpo_rl.models.heads import ScoreModel, scored_sequences
from grpo_rl.models.optim import make_optimizer, make_scheduler

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RatedStep:
    """A step in its place, its tokens last."""

    problem: str
    token_ids: tuple[int, ...]
    step_length: int
    """Characters of the step: what a judge that looks at nothing else would know."""
    good: bool


def read_steps(path: Path, tokenizer: Any, separator: str, max_tokens: int) -> list[RatedStep]:
    """The rated steps that are good or bad (rating 1 or -1) and not longer than `max_tokens` with all before them."""
    wanted = ["instruction", "responses", "next_response", "rating"]
    steps: dict[RatedStep, None] = {}
    for row in pyarrow.parquet.read_table(path, columns=wanted).to_pylist():
        if row["rating"] not in (1, -1) or not row["next_response"]:
            continue
        messages = [{"role": "user", "content": row["instruction"]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # A separator inside a step would cut it in two.
        pieces = [" ".join(step.split(separator)) for step in [*row["responses"], row["next_response"]]]
        text = prompt + "".join(step + separator for step in pieces)
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(token_ids) <= max_tokens:
            # The same step rated twice must not be learnt from and held out.
            steps[RatedStep(row["instruction"], token_ids, len(row["next_response"]), row["rating"] == 1)] = None
    return list(steps)


@dataclass(frozen=True, slots=True)
class Split:
    """The steps that are learnt from, and those that are not."""

    training: list[RatedStep]
    new_steps: list[RatedStep]
    """Steps of problems that training has other steps of."""
    new_problems: list[RatedStep]


def split(steps: Sequence[RatedStep], seed: int) -> Split:
    """One in five problems, and one in eight of the other steps, are held out."""
    draw = random.Random(seed)
    problems = sorted({step.problem for step in steps})
    draw.shuffle(problems)
    held_out = set(problems[: max(1, len(problems) // 5)])
    known = [step for step in steps if step.problem not in held_out]
    draw.shuffle(known)
    cut = len(known) // 8
    return Split(known[cut:], known[:cut], [step for step in steps if step.problem in held_out])


def auc(scores: Sequence[float], good: Sequence[bool]) -> float:
    """Return how often a good step has a higher score than a bad one, ties as half: by the sum of ranks (Mann-Whitney)."""
    scores_N, good_N = torch.tensor(scores, dtype=torch.float64), torch.tensor(good)
    values, inverse_N, counts = scores_N.unique(return_inverse=True, return_counts=True)
    del values
    # The mean rank of equal scores.
    ranks_N = (counts.cumsum(0) - (counts - 1) / 2)[inverse_N]
    num_good, num_bad = int(good_N.sum()), int((~good_N).sum())
    if not num_good or not num_bad:
        raise ValueError("an AUC needs good and bad steps")
    return float((ranks_N[good_N].sum() - num_good * (num_good + 1) / 2) / (num_good * num_bad))


def make_model(tokenizer: Any, hidden: int, layers: int, max_tokens: int, seed: int) -> ScoreModel:
    """A random scorer for this tokenizer's tokens."""
    torch.manual_seed(seed)
    attention.register()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=max(2048, max_tokens),
        initializer_range=0.05,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation=attention.ATTENTION_NAME,
    )
    return ScoreModel(Qwen3ForSequenceClassification(config))


def batches(steps: Sequence[RatedStep], tokens: int, order: random.Random | None) -> Iterator[list[RatedStep]]:
    """Steps of similar length together, at most so many tokens at a time, in a random order if there is one."""
    cut = plan_micro_batches([len(step.token_ids) for step in steps], 1, max_tokens=tokens)[0]
    if order is not None:
        order.shuffle(cut)
    for rows in cut:
        yield [steps[row] for row in rows]


def scores_of(model: ScoreModel, batch: Sequence[RatedStep]) -> Tensor:
    """The model's score at the end of each step."""
    lengths_N = torch.tensor([len(step.token_ids) for step in batch])
    token_ids_S = torch.tensor([token for step in batch for token in step.token_ids])
    return model(scored_sequences(token_ids_S, lengths_N, lengths_N.cumsum(0) - 1, CPU))


def train(model: ScoreModel, steps: Sequence[RatedStep], options: argparse.Namespace) -> None:
    """Binary cross-entropy of the score against good or bad."""
    order = random.Random(options.seed)
    per_epoch = sum(1 for _ in batches(steps, options.batch_tokens, None))
    optim = OptimConfig(lr=options.lr, lr_warmup_steps=per_epoch // 4, lr_scheduler_type="cosine", weight_decay=0.1)
    optimizer = make_optimizer(model, optim)
    scheduler = make_scheduler(optimizer, optim, options.epochs * per_epoch)
    model.train()
    for epoch in range(options.epochs):
        started, total = time.perf_counter(), 0.0
        for batch in batches(steps, options.batch_tokens, order):
            good_N = torch.tensor([float(step.good) for step in batch])
            loss = F.binary_cross_entropy_with_logits(scores_of(model, batch), good_N)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
            optimizer.step()
            scheduler.step()
            total += float(loss.detach()) * len(batch)
        print(f"epoch {epoch + 1}: loss {total / len(steps):.4f}, {time.perf_counter() - started:.0f} s", flush=True)


@torch.no_grad()
def evaluate(model: ScoreModel, steps: Sequence[RatedStep], tokens: int) -> float:
    """The AUC of good against bad steps."""
    model.eval()
    scores: list[float] = []
    good: list[bool] = []
    for batch in batches(steps, tokens, None):
        scores += scores_of(model, batch).tolist()
        good += [step.good for step in batch]
    return auc(scores, good)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="parquet file of rated steps")
    parser.add_argument("--tokenizer", help="tokenizer folder with a chat template; without: the embedded model's")
    parser.add_argument("--out", type=Path, required=True, help="folder that is written")
    parser.add_argument("--separator", default="\n\n", help="text between steps (reward.reward_model.step_separator)")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--max-tokens", type=int, default=1024, help="longer rows are left out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    if options.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        tokenizer = builtin.build_tokenizer(builtin.get_builtin("arithmetic").vocab_size)
    steps = read_steps(options.data, tokenizer, options.separator, options.max_tokens)
    parts = split(steps, options.seed)
    model = make_model(tokenizer, options.hidden, options.layers, options.max_tokens, options.seed)
    print(
        f"{len(parts.training)} steps to learn from, held out {len(parts.new_steps)} others and {len(parts.new_problems)} of new "
        f"problems; {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    train(model, parts.training, options)
    print("AUC of good against bad steps (in brackets: of a step's shortness alone)")
    for name, some in (("training", parts.training), ("new steps", parts.new_steps), ("new problems", parts.new_problems)):
        shortness = auc([-float(step.step_length) for step in some], [step.good for step in some])
        print(f"  {name:<13} {evaluate(model, some, options.batch_tokens):.3f}  ({shortness:.3f})", flush=True)
    model.lm.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
