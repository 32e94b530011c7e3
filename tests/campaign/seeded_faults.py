"""Small wrong changes to the package, and whether a suite of tests finds each of them.

    .venv/bin/python tests/campaign/seeded_faults.py                       every fault, with the tests that guard a commit
    .venv/bin/python tests/campaign/seeded_faults.py --suite campaign      the same with the long tests as well
    .venv/bin/python tests/campaign/seeded_faults.py --only 3 41 --room data

Each fault is one replaced piece of text in one file. It is planted in a copy of the repository, and tests run there until one
fails: first those that `FAULTS` names as likely, then the others of the suite. A fault that no test finds is printed; the exit code
is their number. The list was written before tests were removed, and it is not to be fitted to the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    kind: str
    file: str
    right: str
    wrong: str
    tests: str
    """If to look first: files or folders below tests/, separated by spaces."""


_F = Fault
FAULTS: list[Fault] = [
    # ---- algos
    _F(
        "denominator",
        "algos/aggregate.py",
        "values_T.double().sum() / max(counts.num_tokens, 1)",
        "values_T.double().sum() / max(len(values_T), 1)",
        "unit/algos",
    ),
    _F(
        "denominator",
        "algos/aggregate.py",
        "segments.mean(values_T.double()).sum() / max(counts.num_sequences, 1)",
        "segments.mean(values_T.double()).sum() / max(counts.num_groups, 1)",
        "unit/algos",
    ),
    _F(
        "missing clamp",
        "algos/aggregate.py",
        "segments.sum(values_T.double()) / group_tokens_N.clamp(min=1)",
        "segments.sum(values_T.double()) / group_tokens_N",
        "unit/algos",
    ),
    _F(
        "sign",
        "algos/losses/contract.py",
        "clipped_T = -advantages_T * ratio_T.clamp",
        "clipped_T = advantages_T * ratio_T.clamp",
        "unit/algos",
    ),
    _F(
        "swapped bounds",
        "algos/losses/contract.py",
        "ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)",
        "ratio_T.clamp(1.0 - clip_high, 1.0 + clip_low)",
        "unit/algos",
    ),
    _F(
        "missing bound",
        "algos/losses/clip.py",
        "torch.where(negative_T, torch.minimum(loss_T, bound_T), loss_T)",
        "loss_T",
        "unit/algos",
    ),
    _F(
        "lost stop of gradient",
        "algos/losses/score.py",
        "weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)",
        "weight_T = inputs.log_ratio_T().exp().clamp(1.0 - clip_low, 1.0 + clip_high)",
        "unit/algos",
    ),
    _F("sign", "algos/kl.py", "x_T = -d_T.clamp(-20.0, 20.0)", "x_T = d_T.clamp(-20.0, 20.0)", "unit/algos"),
    _F("wrong gradient", "algos/kl.py", ".detach() + (k2_T - k2_T.detach())", ".detach() + 0.0 * k2_T", "unit/algos"),
    _F(
        "swapped arguments",
        "algos/kl.py",
        "(policy_logprobs_TV.exp() * log_ratio_TV).sum(-1)",
        "(ref_logprobs_TV.exp() * log_ratio_TV).sum(-1)",
        "unit/algos",
    ),
    _F(
        "n instead of n - 1",
        "algos/group_statistics.py",
        "(self.count_N - 1).clamp(min=1)).sqrt()",
        "self.count_N).sqrt()",
        "unit/algos",
    ),
    _F(
        "off by one",
        "algos/advantages/per_token.py",
        "torch.searchsorted(self._token_ends_N, self._ends_K, right=True)",
        "torch.searchsorted(self._token_ends_N, self._ends_K, right=False)",
        "unit/algos",
    ),
    _F(
        "states of other prompts compared",
        "algos/advantages/per_token.py",
        "torch.stack([inp.group_N[steps.rollout_K], states_K], dim=1)",
        "torch.stack([states_K, states_K], dim=1)",
        "unit/algos",
    ),
    _F(
        "wrong decay",
        "algos/advantages/blockwise.py",
        "torch.pow(base, BLOCK - position_B)",
        "torch.pow(base, BLOCK - 1 - position_B)",
        "unit/algos",
    ),
    _F(
        "terms swapped",
        "algos/losses/preference.py",
        "x_N[pairs.chosen_P] - x_N[pairs.rejected_P]",
        "x_N[pairs.rejected_P] - x_N[pairs.chosen_P]",
        "unit/algos",
    ),
    _F(
        "sign",
        "algos/objective.py",
        "loss = loss - (self.entropy_coeff if entropy_coeff is None else entropy_coeff) * entropy",
        "loss = loss + (self.entropy_coeff if entropy_coeff is None else entropy_coeff) * entropy",
        "unit/algos",
    ),
    _F(
        "lost weights",
        "algos/objective.py",
        "loss_T if weights_T is None else loss_T * weights_T.detach().double()",
        "loss_T",
        "unit/algos",
    ),
    _F(
        "wrong boundary",
        "algos/correction.py",
        "(x_T >= lower) & (x_T <= upper)",
        "(x_T >= lower) | (x_T <= upper)",
        "unit/algos",
    ),
    _F(
        "wrong scale",
        "algos/shaping.py",
        "(max_length - buffer - lengths_N.double()) / buffer",
        "(max_length - lengths_N.double()) / buffer",
        "unit/algos unit/trainer",
    ),
    # ---- models
    _F(
        "mask one token off",
        "models/packing.py",
        "_laid_out(token_ids_S, lengths_N, within_T - 1, trained_lengths_N, group_N, device)",
        "_laid_out(token_ids_S, lengths_N, within_T, trained_lengths_N, group_N, device)",
        "unit/models",
    ),
    _F(
        "lost temperature",
        "models/lm_head.py",
        "else hidden_TD / self.temperature",
        "else hidden_TD / 1.0",
        "unit/models",
    ),
    _F(
        "shared one token too many",
        "models/packing.py",
        "shared = int(differs_P[0]) if len(differs_P) else num_common",
        "shared = int(differs_P[0]) + 1 if len(differs_P) else num_common",
        "unit/models",
    ),
    _F(
        "wrong default",
        "models/optim.py",
        '"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0',
        '"params": [p for p in parameters if p.ndim < 2], "weight_decay": config.weight_decay',
        "unit/models unit/workers",
    ),
    _F("off by one", "models/optim.py", "return (step + 1) / (warmup + 1)", "return step / (warmup + 1)", "unit/models"),
    _F(
        "causal mask over the prompt",
        "models/attention.py",
        "value[:, :, prompt], 0.0, False, scale=scaling",
        "value[:, :, prompt], 0.0, True, scale=scaling",
        "unit/models",
    ),
    _F(
        "wrong scale",
        "models/lora.py",
        'return float(layer.scaling["default"])',
        "return 1.0",
        "unit/models integration/test_lora_ranks.py",
    ),
    _F(
        "token of the neighbour",
        "models/packing.py",
        "predict_T=(predict_T[own_T] - rank_slice.begin).to(device)",
        "predict_T=(predict_T[own_T] - rank_slice.begin).clamp(min=1).to(device)",
        "unit/models integration/test_layout_invariance.py",
    ),
    # ---- data
    _F(
        "wrong default",
        "data/collate.py",
        'rollout.finish_reason == "length"',
        'rollout.finish_reason == "stop"',
        "unit/data unit/trainer",
    ),
    _F(
        "uneven ranks",
        "data/balance.py",
        "heapq.heapreplace(queue, (total + sum(_costs(unit, lengths, prompts)), size + len(unit), rank))",
        "heapq.heapreplace(queue, (total, size + len(unit), rank))",
        "unit/data",
    ),
    _F(
        "missing pass",
        "data/balance.py",
        "micro_batches + [[] for _ in range(passes - len(micro_batches))] for",
        "micro_batches for",
        "unit/data",
    ),
    _F(
        "lost epoch",
        "data/draw_order.py",
        "default_rng((seed, epoch))",
        "default_rng((seed,))",
        "unit/data",
    ),
    _F("off by one", "data/draw_order.py", "return usable, number", "return usable, number - 1", "unit/data"),
    _F(
        "lost position",
        "data/draw_order.py",
        'self.seek(state["epoch"], state["position"])',
        'self.seek(state["epoch"], 0)',
        "unit/data unit/trainer",
    ),
    # ---- rewards
    _F(
        "swallowed error",
        "rewards/compose.py",
        "            if isinstance(outcome, RewardFailure):\n                raise outcome.at(place(component.name, rollout))\n",
        "            if isinstance(outcome, RewardFailure):\n                continue\n",
        "unit/rewards",
    ),
    _F(
        "lost factor",
        "rewards/compose.py",
        "reward += component.factor * result.score",
        "reward += result.score",
        "unit/rewards",
    ),
    _F(
        "each number once",
        "rewards/rules/number_rules.py",
        "sorted(map(int, used)) == sorted(numbers)",
        "set(map(int, used)) == set(numbers)",
        "unit/rewards",
    ),
    _F(
        "lenient parser",
        "rewards/rules/number_rules.py",
        'text = solution_str[solution_str.rfind("\\n") + 1 :] if last_line else solution_str',
        "text = solution_str",
        "unit/rewards",
    ),
    # ---- envs
    _F(
        "lost version",
        "rollout/conversation.py",
        "        for version, number in turn.versions:\n            self.versions = extended(self.versions, version, number)\n",
        "        self.versions = turn.versions\n",
        "unit/envs",
    ),
    _F(
        "context trained",
        "rollout/conversation.py",
        "while self.pieces and self.turns and self.length > self.turns[-1].end:",
        "while False:",
        "unit/envs",
    ),
    _F(
        "no room left out",
        "envs/episode_pool.py",
        "min(self.sampling.max_tokens, max_model_len - len(self.prompt.token_ids)) - self.length",
        "self.sampling.max_tokens - self.length",
        "unit/envs",
    ),
    # ---- rollout
    _F(
        "stale noise",
        "rollout/counter_noise.py",
        "_splitmix(_splitmix(seeds_B) ^ np.asarray(positions, dtype=np.uint64))",
        "_splitmix(_splitmix(seeds_B))",
        "unit/rollout integration/rollout",
    ),
    _F(
        "half a key",
        "rollout/counter_noise.py",
        "x_BV = _mixed_(x_BV.bitwise_xor_(halves_B2[:, 1:]))",
        "x_BV = _mixed_(x_BV.bitwise_xor_(halves_B2[:, :1]))",
        "unit/rollout integration/rollout",
    ),
    # ---- trainer
    _F(
        "no update",
        "trainer/session.py",
        "self.actor if self.step > self.config.trainer.critic_warmup else",
        "self.actor if self.step >= self.config.trainer.critic_warmup else",
        "unit/trainer",
    ),
    _F(
        "stale reference",
        "schedules/sync.py",
        "        s.sync_weights()\n",
        "",
        "unit/trainer",
    ),
    _F(
        "lost state",
        "trainer/session.py",
        '            self.advantage.kl_controller.load_state_dict(state["advantage"])',
        "            pass",
        "unit/trainer",
    ),
    _F(
        "bound broken",
        "schedules/asynchronous.py",
        "max(0, bound + 1 - (s.version - s.engine_version))",
        "max(0, bound + 2 - (s.version - s.engine_version))",
        "unit/trainer",
    ),
    _F(
        "off by one",
        "schedules/asynchronous.py",
        "batches_to_come = max(0, deadline - version)",
        "batches_to_come = max(0, deadline - version + 1)",
        "unit/trainer",
    ),
    _F(
        "lost prompt",
        "trainer/in_flight.py",
        "waiting = [[group.batch, group.row, group.prompt.uid] for group in self.groups.values()]",
        "waiting = [[group.batch, group.row, group.prompt.uid] for group in self.groups.values() if not group.missing]",
        "unit/trainer",
    ),
    _F(
        "surplus trained late",
        "trainer/in_flight.py",
        "surplus = self.requested() if self.in_order else []",
        "surplus = []",
        "unit/trainer",
    ),
    _F(
        "replay for ever",
        "trainer/replay.py",
        "groups = [group for group in self.kept if step - group.since <= self.max_age]",
        "groups = list(self.kept)",
        "unit/trainer",
    ),
    _F("swallowed error", "trainer/run.py", "if self._nonfinite_in_a_row > (", "if False and (", "unit/trainer"),
    _F(
        "late save",
        "trainer/run.py",
        "saves = trainer.save_freq > 0 and (last or is_due(self.step, trainer.save_freq))",
        "saves = trainer.save_freq > 0 and is_due(self.step, trainer.save_freq)",
        "unit/trainer",
    ),
    # ---- workers
    _F(
        "lost gradient",
        "workers/trained_rank.py",
        'self.model.set_requires_gradient_sync(last or self.device.type == "cuda")',
        "self.model.set_requires_gradient_sync(number == 0)",
        "unit/workers integration/test_layout_invariance.py",
    ),
    _F(
        "step taken all the same",
        "workers/trained_rank.py",
        "    if finite and counts.num_tokens:\n",
        "    if counts.num_tokens:\n",
        "unit/workers unit/models unit/trainer integration/test_training.py",
    ),
    _F(
        "missing zeroing",
        "workers/trained_rank.py",
        '            self._passes("start")\n            self.optimizer.zero_grad(set_to_none=True)\n',
        '            self._passes("start")\n',
        "unit/workers integration/test_layout_invariance.py integration/test_critic.py",
    ),
    _F(
        "wrong old log-probs",
        "workers/actor.py",
        "batch = batch.replace(old_logprobs_T=batch.rollout_logprobs_T)",
        "pass",
        "unit/workers integration/test_layout_invariance.py integration/test_training.py",
    ),
    _F(
        "statistics of the last step alone",
        "cluster/roles/trained_roles.py",
        'max(of_steps) if prefix == "max" else math.fsum(of_steps) / len(of_steps)',
        'max(of_steps) if prefix == "max" else of_steps[-1]',
        "unit/cluster",
    ),
    # ---- checkpoint
    _F(
        "skipped fsync",
        "checkpoint/files.py",
        '        _point("fsync", path)\n        os.fsync(file.fileno())\n    return size',
        "    return size",
        "unit/checkpoint faults/test_checkpoints.py",
    ),
    _F(
        "skipped flush of the name",
        "checkpoint/store.py",
        "        files.rename(draft.folder, final)\n        files.flush(self.folder)\n",
        "        files.rename(draft.folder, final)\n",
        "unit/checkpoint faults/test_checkpoints.py",
    ),
    _F(
        "digest not compared",
        "checkpoint/manifest.py",
        "path.lstat().st_size != entry[0] or entry_of(path) != entry",
        "path.lstat().st_size != entry[0]",
        "unit/checkpoint faults/test_checkpoints.py",
    ),
    _F(
        "one too few kept",
        "checkpoint/store.py",
        "max(0, len(older) - self.keep + 1)",
        "max(0, len(older) - self.keep + 2)",
        "unit/checkpoint",
    ),
    _F(
        "copied too late",
        "checkpoint/rank_files.py",
        "            training[0].register_step_pre_hook(self.wait_for_copy)",
        "            pass",
        "unit/checkpoint integration/test_policy_checkpoint.py",
    ),
    _F(
        "oldest instead of newest",
        "checkpoint/store.py",
        "for step in reversed(steps):",
        "for step in steps:",
        "unit/checkpoint",
    ),
    # ---- cluster
    _F(
        "wrong rank",
        "cluster/roles/rollout_pool.py",
        "offsets = [0, *(1 + step * i for i in range(len(engines)))]",
        "offsets = [0, *(1 + i for i in range(len(engines)))]",
        "unit/cluster/test_gpu_order.py",
    ),
    _F(
        "bucket left out",
        "cluster/roles/rollout_pool.py",
        "more, buckets = following or self._next()",
        "more, buckets = self._next()",
        "unit/cluster faults/test_recovery_replicas.py",
    ),
    _F(
        "lost request",
        "cluster/roles/rollout_pool.py",
        "        self.waiting.extendleft(reversed(unfinished.values()))\n",
        "",
        "unit/cluster",
    ),
    _F(
        "answered twice",
        "cluster/roles/rollout_pool.py",
        ".pop(request_id, None) is not None",
        ".get(request_id) is not None",
        "unit/cluster",
    ),
    _F(
        "stale shuffle",
        "cluster/roles/trained_roles.py",
        "            self.num_shuffles += self.config.ppo_epochs\n",
        "            pass\n",
        "unit/cluster unit/trainer",
    ),
    _F(
        "lost version",
        "cluster/roles/trained_roles.py",
        "        self.version += 1\n",
        "        pass\n",
        "unit/cluster unit/trainer",
    ),
    _F(
        "pairs torn apart",
        "cluster/roles/trained_roles.py",
        "return batch.group_N.tolist() if self.objective.needs_pairs else None",
        "return None",
        "unit/cluster unit/trainer integration/test_layout_invariance.py",
    ),
    _F(
        "late judgement",
        "cluster/recovery/supervisor.py",
        "        entry.answered()\n        self._judge(entry, activity)\n",
        "        self._judge(entry, activity)\n",
        "unit/cluster faults/test_recovery_replicas.py",
    ),
    # ---- more of rollout, rewards, data
    _F(
        "wrong boundary",
        "rollout/hf/token_sampling.py",
        "order_V, before_V >= p)",
        "order_V, before_V + probs_V >= p)",
        "unit/rollout integration/rollout",
    ),
    _F(
        "lost seed",
        "rollout/hf/token_sampling.py",
        "[positions[row] for row in drawn])",
        "[0 for row in drawn])",
        "unit/rollout integration/rollout",
    ),
    _F(
        "incomplete weights taken",
        "rollout/weights.py",
        "        if missing:\n            raise",
        "        if False:\n            raise",
        "unit/rollout integration/rollout/test_engine_contract.py",
    ),
    _F(
        "bucket cut wrongly",
        "rollout/weights.py",
        "        filled += tensor.nbytes\n    if group",
        "        filled = tensor.nbytes\n    if group",
        "unit/rollout",
    ),
    _F(
        "failed rewards pass",
        "rewards/combined.py",
        'if failures and config.on_failure == "stop":',
        'if failures and config.on_failure == "never":',
        "unit/rewards",
    ),
    _F(
        "a call let through",
        "rewards/sandbox/syscall_filter.py",
        '"ptrace": 101,\n    ',
        "",
        "unit/rewards unit/security integration/test_sandbox_escapes.py",
    ),
    # ---- telemetry, configuration, plan, evaluation
    _F(
        "row lost by a resume",
        "telemetry/metrics/metrics_file.py",
        'if record["step"] <= step]',
        'if record["step"] < step]',
        "unit/telemetry",
    ),
    _F(
        "another process's folder",
        "telemetry/rundir.py",
        "and Path(f\"/proc/{owner.get('pid')}\").exists()",
        "and False",
        "unit/telemetry",
    ),
    _F(
        "secret over a line's end",
        "config/secrets.py",
        "cut = len(done) - _overlap()",
        "cut = len(done)",
        "unit/config unit/security",
    ),
    _F(
        "wrong default",
        "config/schema/algorithm.py",
        "kl_coef: Coefficient = 0.001",
        "kl_coef: Coefficient = 0.01",
        "unit/config unit",
    ),
    _F(
        "overlap not known",
        "config/derived.py",
        "return versions_ahead(config) != 0",
        "return versions_ahead(config) is None",
        "unit/config unit/trainer unit/test_plan.py",
    ),
    _F(
        "pass left out",
        "plan/decisions.py",
        '"actor" if old_readers or has_ratio else "none"',
        '"actor" if old_readers else "none"',
        "unit/test_plan.py",
    ),
    _F(
        "pass left out",
        "plan/decisions.py",
        "config.updates_per_step > 1 and not objective.needs_pairs",
        "config.updates_per_step > 1",
        "unit/test_plan.py unit/config/test_schedule_rules.py",
    ),
    _F(
        "biased estimate",
        "evaluation/estimates.py",
        "1.0 - k / np.arange(n - c + 1, n + 1)",
        "1.0 - k / np.arange(n - c, n)",
        "unit/evaluation",
    ),
    _F(
        "unknown files taken",
        "checkpoint/manifest.py",
        '    if extra:\n        raise CheckpointError(f"{folder}: {extra[0]}',
        '    if False:\n        raise CheckpointError(f"{folder}: {extra[0]}',
        "unit/checkpoint",
    ),
]


def planted(fault: Fault, text: str) -> str:
    """Return the file's text with the fault. Raises ValueError where the right text does not stand there exactly once."""
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.file}: {fault.right!r} stands there {text.count(fault.right)} times, not once; mend the list")
    return text.replace(fault.right, fault.wrong)


def write(path: Path, text: str) -> None:
    """Write a module, and remove what was compiled of it: a change of the same length in the same second would not be seen."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def suite_of(name: str, fault: Fault) -> list[list[str]]:
    """Return the calls of pytest to make, one after the other, each with its arguments."""
    marks = {"short": "not gpu and not slow and not campaign", "campaign": "not gpu and not slow"}[name]
    likely = [[f"tests/{place}" for place in fault.tests.split()]]
    rest = [["tests/unit"], ["tests/integration"], ["tests/faults"]]
    return [["-m", marks, *places] for places in likely + rest]


def first_failure(copy: Path, calls: list[list[str]], stages: int, timeout_s: float) -> str | None:
    """Return the name of the first test that fails, None if all pass."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for arguments in calls[:stages]:
        options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-rfE"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"no end within {timeout_s:.0f} s: {' '.join(arguments[2:])}"
        if done.returncode == 1:
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failed[0] if failed else done.stdout[-300:]
        if done.returncode == 4:
            raise ValueError(f"pytest cannot be called so; mend the list: {done.stderr[-300:]}")
        if done.returncode not in (0, 5):
            return f"pytest ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["short", "campaign"], default="short")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults")
    parser.add_argument("--room", help="faults in this folder of the package")
    stages = "1: the likely tests alone; 2: all unit tests too; 3, 4: processes too"
    parser.add_argument("--stages", type=int, default=4, help=stages)
    parser.add_argument("--check", action="store_true", help="only look whether every fault can be planted")
    parser.add_argument("--out", type=Path, help="write what was found as JSON Lines")
    arguments = parser.parse_args()
    chosen = [
        (number, fault)
        for number, fault in enumerate(FAULTS)
        if (not arguments.only or number in arguments.only) and (not arguments.room or fault.file.startswith(arguments.room))
    ]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".mypy_cache", ".hypothesis", "runs", "outputs")
        shutil.copytree(ROOT, copy, ignore=ignored)
        if (ROOT.parent / "shared").is_dir():
            (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
        for number, fault in chosen:
            path = copy / "grpo_rl" / fault.file
            text = path.read_text(encoding="utf-8")
            write(path, planted(fault, text))
            started = time.monotonic()
            found = (
                "planted" if arguments.check else first_failure(copy, suite_of(arguments.suite, fault), arguments.stages, 1200)
            )
            write(path, text)
            missed += found is None
            print(
                f"{number:3} {fault.file}: {fault.kind}: {found or 'NOT FOUND'} ({time.monotonic() - started:.0f} s)",
                flush=True,
            )
            if arguments.out:
                with arguments.out.open("a") as log:
                    log.write(json.dumps({"number": number, "file": fault.file, "kind": fault.kind, "found": found}) + "\n")
    print(
        f"{len(chosen) - missed} of {len(chosen)} faults "
        + ("can be planted" if arguments.check else f"found by the suite {arguments.suite}")
    )
    return missed


if __name__ == "__main__":
    sys.exit(main())
