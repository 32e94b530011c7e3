"""A benchmark of a whole training step against its bare parts, measured in one run on the same tokens.

    .venv/bin/python scripts/bench_step.py                # 10 M parameters, 16 x 8 x 128 tokens, equal lengths and ragged
    .venv/bin/python scripts/bench_step.py --cases shared                        # prompts of 128 tokens instead of 8
    .venv/bin/python scripts/bench_step.py --steps 7 --cases equal --model 1m
    .venv/bin/python scripts/bench_step.py --cases ragged --model FOLDER --prompts 8 --tokens 48 --micro-batch 16 \
        --rows task:json_extraction                              # any Hugging Face model, on a job's prompts
    .venv/bin/python scripts/bench_step.py --cases equal --trl trl/bin/python    # in turns with bench_trl.py

(a) is the program: Ray, a vLLM worker, a reference worker, an FSDP2 actor, GRPO with its KL term. (b) is
the bare parts: one vLLM engine that generates the same responses, and one plain PyTorch loop that does
the same forward and backward passes (reference and policy) with padded batches and whole logits. (a) and
(b) take turns step by step, so that a slow moment of the machine hits both. The bars are in `CASES`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

CASES = {
    "equal": (False, 8, 1.05),
    "shared": (False, 128, 0.85),
    "ragged": (True, 8, 0.75),
}
"""The cases: True if responses end at a stop token, the tokens of a prompt, and the most that (a) may take of (b)."""
BAR_OF_A_FOLDER = 1.05
TEXTS = "texts.json"
LONGEST_OF_ROWS = 512
NUM_EOS = 64
VOCABULARY = 2048


SIZES: dict[str, dict[str, Any]] = {
    "10m": {
        "hidden_size": 320,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 64,
    },
    "1m": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}
"""Two Qwen3 models: 11.8 M and 1.1 M parameters with their tied embedding."""


def make_model(folder: Path, size: str) -> Path:
    """A random Qwen3 of that size, 64 of whose 2048 tokens end a response: geometric lengths with mean 32. Or a link to a model's folder."""
    if size not in SIZES:
        folder.symlink_to(Path(size).expanduser().resolve(strict=True), target_is_directory=True)
        return folder
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **SIZES[size],
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=list(range(NUM_EOS)), pad_token_id=0)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0", unk_token="w0").save_pretrained(folder)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    return folder


def make_prompts(model: Path, num_prompts: int, prompt_tokens: int) -> list[str]:
    """Texts of so many tokens each, of words that are one token alone and behind others."""
    import random

    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(0)
    texts = (str(tokenizer.decode([token])) for token in range(NUM_EOS, len(tokenizer)))
    words = [text.strip() for text in texts if text.strip().isalnum() and text.isascii()]
    words = [word for word in words if len(tokenizer(f"{words[0]} {word}").input_ids) == 2][:VOCABULARY]
    return [" ".join([words[0], *rng.choices(words, k=prompt_tokens - 1)]) for _ in range(num_prompts)]


def prompts_of_rows(rows: str, model: Path, num_prompts: int) -> list[str]:
    """The texts of the first prompts of a file or a task, by the model's chat template."""
    from grpo_rl.config.compose import compose
    from grpo_rl.data.dataset import PromptDataset
    from grpo_rl.models.load import load_tokenizer

    config = compose([f"data.train_files={rows}", f"actor_rollout_ref.model.path={model}"]).config
    dataset = PromptDataset(config.data.train_files, config.data, load_tokenizer(str(model))).checked()
    return [dataset.prompt(row, str(row)).text for row in range(num_prompts)]


def make_data(folder: Path, prompts: Sequence[str]) -> Path:
    """A file with these prompts, and the file of a reward."""
    path = folder / "prompts.jsonl"
    rows = [
        {
            "prompt": prompt,
            "data_source": "bench",
            "reward_model": {"ground_truth": ""},
        }
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 7 / 7\n"
    )
    return path


class BareEngine:
    """vLLM's own LLM class, with the program's settings."""

    def __init__(self, spec: Any, max_tokens: int, ignore_eos: bool) -> None:
        from grpo_rl.rollout.model_info import stop_token_ids
        from grpo_rl.rollout.vllm.vllm_engine import build_llm_engine

        # The engine's settings are the program's; how it is driven is not.
        self.engine = build_llm_engine(spec)
        self.max_tokens, self.ignore_eos, self.stop_ids = max_tokens, ignore_eos, list(stop_token_ids(spec))
        self.count = 0

    def generate(self, prompts: list[tuple[int, ...]], n: int) -> float:
        """Seconds to sample n responses per prompt, without seeds: vLLM's own for one request cannot go on in parts on CPUs."""
        from vllm import SamplingParams

        started = time.perf_counter()
        for prompt in prompts:
            for _ in range(n):
                self.count += 1
                params = SamplingParams(
                    max_tokens=self.max_tokens,
                    ignore_eos=self.ignore_eos,
                    stop_token_ids=None if self.ignore_eos else self.stop_ids,
                    logprobs=0,
                    detokenize=False,
                )
                self.engine.add_request(str(self.count), {"prompt_token_ids": list(prompt)}, params)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - started


class BareLoop:
    """Plain PyTorch: padded micro-batches, whole logits, autograd, AdamW."""

    def __init__(self, path: str, micro_batch: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-6, fused=True)
        self.micro_batch = micro_batch

    def step(self, rows: list[tuple[tuple[int, ...], tuple[int, ...], float]]) -> float:
        """Seconds for the reference's forward pass, the policy's forward and backward pass, and the update."""
        import torch

        started = time.perf_counter()
        total = sum(len(response) for _, response, _ in rows)
        rows = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
        for start in range(0, len(rows), self.micro_batch):
            chunk = rows[start : start + self.micro_batch]
            longest = max(len(prompt) + len(response) for prompt, response, _ in chunk)
            ids = torch.zeros(len(chunk), longest, dtype=torch.long)
            mask = torch.zeros(len(chunk), longest)
            advantages = torch.tensor([advantage for _, _, advantage in chunk])
            for i, (prompt, response, _) in enumerate(chunk):
                ids[i, : len(prompt) + len(response)] = torch.from_numpy(np.concatenate([prompt, response]))
                mask[i, len(prompt) : len(prompt) + len(response)] = 1
            with torch.no_grad():
                ref = self._logprobs(self.reference, ids)
            logprobs = self._logprobs(self.policy, ids)
            difference = ref - logprobs
            kl = difference.exp() - difference - 1
            ratio = (logprobs - logprobs.detach()).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = torch.maximum(-advantages[:, None] * ratio, -advantages[:, None] * clipped) + 0.001 * kl
            ((loss * mask[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started

    @staticmethod
    def _logprobs(model: Any, ids: Any) -> Any:
        logits = model(ids[:, :-1], use_cache=False).logits
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def bench(folder: Path, case: str, work: argparse.Namespace) -> float:
    """One run: program and bare parts in turns, and the table; returns the median seconds of the program's step."""
    from grpo_rl.cluster.session.ray_session import ray_session, set_environment

    set_environment()  # before the import of Ray
    from grpo_rl.cluster.start_roles import Cluster, start_roles
    from grpo_rl.config.compose import compose
    from grpo_rl.config.derived import Machine
    from grpo_rl.data.dataset import PromptDataset
    from grpo_rl.models.load import load_tokenizer
    from grpo_rl.plan.decisions import decide
    from grpo_rl.rewards.compose import RewardFunction
    from grpo_rl.rewards.runtime.runner import RewardRunner
    from grpo_rl.schedules import sync
    from grpo_rl.telemetry.metrics.sinks import Sinks
    from grpo_rl.telemetry.rollout_log import RolloutLog
    from grpo_rl.telemetry.rundir import RunDir
    from grpo_rl.telemetry.terminal.console import Console
    from grpo_rl.trainer.parts import Output
    from grpo_rl.trainer.run import single_step
    from grpo_rl.trainer.session import Session

    ragged, prompt_tokens, _ = CASES[case]
    steps, model = work.steps, folder / "model"
    number = work.prompts * (steps + 2)
    texts = prompts_of_rows(work.rows, model, number) if work.rows else make_prompts(model, number, prompt_tokens)
    (folder / TEXTS).write_text(json.dumps(texts))
    data = make_data(folder, texts)
    # As many tokens in a pass as the rows of the bare loop have.
    per_prompt = statistics.fmean(len(ids) for ids in load_tokenizer(str(model))(texts).input_ids) if work.rows else 8
    tokens_of_a_pass = int(work.micro_batch * (per_prompt + work.tokens))
    composed = compose(
        [
            *(
                f"data.train_files={data}",
                f"data.train_batch_size={work.prompts}",
                f"data.max_prompt_length={LONGEST_OF_ROWS if work.rows else max(16, prompt_tokens)}",
                f"data.max_response_length={work.tokens}",
            ),
            *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.enable_gradient_checkpointing=false"),
            *(
                f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
                f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens_of_a_pass}",
            ),
            *("actor_rollout_ref.rollout.n=8", f"actor_rollout_ref.rollout.ignore_eos={not ragged}"),
            *(f"reward.custom_reward_function.path={folder / 'reward.py'}", f"trainer.total_training_steps={steps}"),
            *(f"trainer.default_local_dir={folder / 'runs'}", "trainer.device=cpu"),
        ]
    )
    config, machine, console = composed.config, Machine(num_gpus=0, num_cpus=os.cpu_count() or 1, device="cpu"), Console()
    with ExitStack() as stack:
        run_dir = RunDir.create(config.trainer.default_local_dir, None)
        tokenizer = load_tokenizer(str(model))
        train = PromptDataset(config.data.train_files, config.data, tokenizer).checked()
        stack.enter_context(ray_session(config.ray_kwargs.ray_init, machine.num_cpus, run_dir.session_file))
        plan = decide(config, machine, num_train_rows=len(train))
        cluster = Cluster(plan, str(model), "", run_dir.logs, console)
        stack.callback(cluster.shutdown)
        roles, _ = start_roles(cluster, plan, tokenizer)
        rollout = roles.rollout
        roles.rewarder = RewardRunner(RewardFunction.from_config(config.reward), config.reward)
        sinks = Sinks(run_dir, config.trainer, composed.resolved)
        output = Output(run_dir, console, sinks, RolloutLog(run_dir))
        session = Session(config, roles, output, train_data=train, total_steps=steps, objective=plan.objective)
        slot = cluster.pool("actor").slots()
        assert plan.engine is not None
        spec = replace(plan.engine, model_path=str(model))
        bare_engine = cluster.worker_group("bare_engine", slot, spec.threads)
        bare_loop = cluster.worker_group("bare_loop", slot, machine.num_cpus)
        cluster.worker_groups += [bare_engine, bare_loop]
        engine_spec = replace(spec, verify_checksum=False)
        cluster.build(
            [
                (bare_engine, bare_engine.start_build(BareEngine, [(engine_spec, work.tokens, not ragged)])),
                (bare_loop, bare_loop.start_build(BareLoop, [(str(model), work.micro_batch)])),
            ]
        )
        rows, captured = [], capture(rollout)
        for step in range(steps + 1):
            started = time.perf_counter()
            metrics = single_step(session, sync.train)
            metrics["whole"] = time.perf_counter() - started
            batch = [(r.prompt.token_ids, np.asarray(r.response_ids), 1.0 - 2.0 * (i % 2)) for i, r in enumerate(captured)]
            prompts = [prompt for prompt, _, _ in batch[::8]]
            metrics["bare_gen"] = bare_engine.call("generate", prompts, 8)[0]
            metrics["bare_train"] = bare_loop.call("step", batch)[0]
            if step > 0:  # the first one warms everything up
                rows.append(metrics)
        sinks.close()
        return report(rows, case, work)


def capture(rollout: Any) -> list[Any]:
    """The rollouts of the latest `generate`, kept for the bare loop."""
    captured: list[Any] = []
    generate = rollout.generate

    def keep(*arguments: Any, **options: Any) -> Any:
        captured[:] = generate(*arguments, **options)
        return list(captured)

    rollout.generate = keep
    return captured


def report(rows: list[dict[str, float]], case: str, work: argparse.Namespace) -> float:
    """Print medians over the steps; return that of the whole step."""

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    bare = statistics.median(row["bare_gen"] + row["bare_train"] for row in rows)
    ratio = statistics.median(row["whole"] / (row["bare_gen"] + row["bare_train"]) for row in rows)
    ragged, prompt_tokens, bar = CASES[case]
    if work.model not in SIZES:
        bar = BAR_OF_A_FOLDER
    kind = f"ragged lengths (of at most {work.tokens})" if ragged else f"equal lengths ({work.tokens})"
    kind += f", prompts of {work.rows}" if work.rows else f", prompts of {prompt_tokens} tokens"
    print(f"\n{kind}: medians of {len(rows)} steps, seconds; {median('perf/total_num_tokens'):.0f} tokens a step")
    print(f"  whole step of the program          {median('whole'):8.3f}")
    for phase in ("gen", "reward", "ref", "old_logprobs", "adv", "update_actor", "sync_weights"):
        print(f"    {phase:<32} {median(f'timing_s/{phase}'):8.3f}")
    print(f"  bare parts together                {bare:8.3f}")
    print(f"    one vLLM engine                  {median('bare_gen'):8.3f}")
    print(f"    one plain PyTorch loop           {median('bare_train'):8.3f}")
    print(f"  whole / bare, step by step         {ratio:8.3f}   (bar: <= {bar})")
    print(f"  tokens per second                  {median('perf/total_num_tokens') / median('whole'):8.0f}")
    return median("whole")


def bench_trl(folder: Path, case: str, work: argparse.Namespace) -> None:
    """The program and TRL's step in turns; TRL runs in an environment of its own."""
    import re
    import subprocess

    script = Path(__file__).with_name("bench_trl.py")
    sizes = ["--steps", str(work.steps), "--prompts", str(work.prompts), "--tokens", str(work.tokens)]
    sizes += ["--micro-batch", str(work.micro_batch), "--texts", str(folder / TEXTS)]
    words = [work.trl, str(script), "--model", work.model, *sizes, *(["--ragged"] if CASES[case][0] else [])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ratios = []
    for _ in range(work.rounds):
        seconds = bench(folder, case, work)
        printed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=1800, env=environment).stdout
        print(printed)
        match = re.search(r"whole step +([0-9.]+)", printed)
        assert match, printed
        ratios.append(float(match[1]) / seconds)
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    bar = (
        (2.5 if CASES[case][0] else 1.2 if work.model == "10m" else 1.0)
        if work.model in SIZES
        else (2.0 if CASES[case][0] else 1.15)
    )
    print(f"TRL / program, {case}, {work.model}: {statistics.median(ratios):.2f} (rounds: {shown}; bar: >= {bar})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one for warming up")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES), help="which lengths and prompts")
    parser.add_argument("--model", default="10m", help="10m or 1m, random models of so many parameters; or a model's folder")
    parser.add_argument("--rows", help="a file or task whose prompts take the place of random ones")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step, with 8 responses each")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response at most")
    parser.add_argument("--micro-batch", type=int, default=32, help="rows of one pass of the bare loop and of TRL")
    parser.add_argument("--trl", metavar="PYTHON", help="the Python of TRL's environment: run in turns with it")
    parser.add_argument("--rounds", type=int, default=2, help="turns of program and TRL")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", arguments.model)
        for case in arguments.cases:
            (bench_trl if arguments.trl else bench)(folder, case, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
