"""Adapters on real FSDP2 ranks over gloo: what is trained, checkpoints, the reference, the weights sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from peft import PeftModel
from rank_processes import WHOLE, Layout, RankProcesses, actor_group, assert_equal_bits, make_batch, make_model, state
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_rl.algos.objective import Objective
from grpo_rl.checkpoint.exporting import export_policy
from grpo_rl.checkpoint.store import CheckpointStore
from grpo_rl.cluster.roles.reference_role import BaseReferenceRole
from grpo_rl.columns import values
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.tree import ActorConfig, OptimConfig
from grpo_rl.errors import CheckpointError
from grpo_rl.models import builtin, lora
from grpo_rl.types import Batch
from grpo_rl.workers.specs import ActorSpec

BATCHES = [make_batch(seed, one_prompt=True) for seed in range(5)]
CONFIG = ActorConfig(ppo_mini_batch_size=2, shuffle=True)


SHARING = Layout(share=True)


def spec_for(path: Path, layout: Layout = SHARING, **model: Any) -> ActorSpec:
    # Rank 3 over 2 ranks: their rows of an A are uneven.
    settings = {"lora_rank": 3, "lora_alpha": 6, **model}
    objective = Objective(kl_loss_type="low_var_kl", kl_loss_coef=0.01)
    spec = rank_processes.spec_for(path, layout, objective, **settings)
    return replace(spec, optim=OptimConfig(lr=3e-3, clip_grad=1e6))


def start(processes: RankProcesses, spec: ActorSpec, rule: MicroBatchRule = WHOLE) -> Any:
    processes.build(spec)
    return actor_group(processes, CONFIG, rule, spec.objective, updates_per_step=2)


def update(actor: Any, numbers: range) -> list[dict[str, float]]:
    return [actor.update(actor.old_logprobs(BATCHES[number])) for number in numbers]


def base_of(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in parameters.items() if not lora.is_adapter(name)}


def test_only_adapters_have_moments_and_gradients_and_the_base_stays_what_it_is_through_steps_and_transfers(ranks, path):
    processes = ranks[2]
    actor = start(processes, spec_for(path))
    before = processes.call("parameters")[0]
    for number in range(3):
        update(actor, range(number, number + 1))
        processes.call("sends_weights")
    after = processes.call("parameters")[0]
    assert all(lora.is_adapter(name) for name in processes.call("gradients")[0][-1])
    assert_equal_bits(base_of(before), base_of(after))
    assert {name.partition(":")[2] for name in processes.call("moments")[0]} == {
        name for name in after if lora.is_adapter(name)
    }
    assert all(not torch.equal(before[name], after[name]) for name in after if lora.is_adapter(name))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    named = {name.removeprefix("lm.").replace(".base_layer", ""): value for name, value in base_of(after).items()}
    assert_equal_bits({name: plain[name] for name in named}, named)


def test_a_base_in_bfloat16_stays_so_in_the_blocks_and_changes_no_bit_of_anything(ranks, path, tmp_path):
    """The blocks compute in bfloat16: float32 copies of the same numbers give the same gradients, digests and exports."""
    half, whole = tmp_path / "half", tmp_path / "whole"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(half)
    model.float().save_pretrained(whole)
    processes, found = ranks[2], []
    for folder in (half, whole):
        spec = spec_for(folder)
        actor = start(processes, replace(spec, policy=replace(spec.policy, dtype="bfloat16")), MicroBatchRule(None, 2))
        update(actor, range(2))
        types = {name: value.dtype for name, value in processes.call("parameters")[0].items()}
        wide = {name for name, dtype in types.items() if dtype == torch.float32}
        actor.export(tmp_path / f"from_{folder.name}")
        found.append((processes.call("gradients")[0], load_file(tmp_path / f"from_{folder.name}" / "model.safetensors"), wide))
        (tmp_path / f"saved_{folder.name}").mkdir()
        actor.save(tmp_path / f"saved_{folder.name}")
    (gradients, exported, wide), (expected, also, every) = found
    assert len(gradients) == len(expected) == 4
    for one, other in zip(gradients, expected, strict=True):
        assert_equal_bits(one, other)
    assert_equal_bits(exported, also)
    assert {value.dtype for value in exported.values()} == {torch.float32}
    kept_in_half = every - wide
    assert kept_in_half and all(".layers." in name and not lora.is_adapter(name) for name in kept_in_half)
    assert wide == {name for name in every if lora.is_adapter(name)} | {"lm.model.embed_tokens.weight", "lm.model.norm.weight"}
    actor.load(tmp_path / "saved_half")  # the digest of the base is that of its numbers


# ---- the reference ---------------------------------------------------------------------------------------


def logprobs_of(model: Any, batch: Batch) -> Tensor:
    """The trained tokens' log-probs by a plain model, one sequence after the other, at the temperature of the spec."""
    ids = batch.token_ids_S.long().split(batch.sequence_lengths_N.tolist())
    rows = []
    for sequence, prompt in zip(ids, batch.prompt_lengths_N.tolist(), strict=True):
        logprobs = (model(sequence[None]).logits[0, prompt - 1 : -1] / 0.9).log_softmax(-1)
        rows.append(logprobs.gather(1, sequence[prompt:, None])[:, 0])
    return torch.cat(rows).detach()


def test_the_reference_is_the_base_model_under_the_adapters(ranks, path, tmp_path):
    actor = start(ranks[2], spec_for(path), MicroBatchRule(None, 2))
    reference = BaseReferenceRole(actor, rule=MicroBatchRule(None, 3), want_hidden=True)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    update(actor, range(2))
    batch = actor.old_logprobs(BATCHES[2])
    found = reference.logprobs(batch)
    ref_logprobs_T, old_logprobs_T = values(found.ref_logprobs_T), values(batch.old_logprobs_T)
    torch.testing.assert_close(ref_logprobs_T, logprobs_of(base, batch), atol=1e-5, rtol=1e-6)
    assert values(found.ref_hidden_TD).shape == (batch.num_trained_tokens, 48)
    actor.export(tmp_path)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / lora.FOLDER))
    torch.testing.assert_close(old_logprobs_T, logprobs_of(adapted, batch), atol=1e-5, rtol=1e-6)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(old_logprobs_T, logprobs_of(merged, batch), atol=1e-4, rtol=1e-6)
    assert float((old_logprobs_T - ref_logprobs_T).abs().max()) > 1e-3
    # The ranks still have the share of this batch, and the adapters are on again.
    assert torch.equal(values(actor.old_logprobs(batch).old_logprobs_T), old_logprobs_T)
    actor.update(found)


# ---- checkpoints, and copies in memory -------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(ranks: dict[int, RankProcesses], path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder that 2 ranks wrote after 2 batches, and the state that they had then."""
    folder = tmp_path_factory.mktemp("checkpoint")
    actor = start(ranks[2], spec_for(path))
    update(actor, range(2))
    actor.save(folder)
    return folder, state(ranks[2])


@pytest.mark.parametrize(("world_size", "shard_ranks"), [(1, -1), (2, -1), (2, 1)])
def test_adapters_and_moments_come_back_bit_for_bit_on_any_number_of_ranks(ranks, path, saved, world_size, shard_ranks):
    folder, before = saved
    actor = start(ranks[world_size], spec_for(path, Layout(share=True, shard_ranks=shard_ranks)))
    actor.load(folder)
    assert_equal_bits(before, state(ranks[world_size]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_rank": 0}, "has LoRA adapters and no whole model, and this run trains all weights: set .*lora_rank=3"),
        ({"lora_rank": 4}, "lora_rank=3 and not 4"),
        ({"lora_alpha": 3}, "lora_alpha=6 and not 3"),
        ({"target_modules": ["q_proj"]}, "adapters at 14 layers and not the same 2"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_and_changes_nothing(ranks, path, saved, change, words):
    actor = start(ranks[1], spec_for(path, **change))
    before = ranks[1].call("parameters")[0]
    with pytest.raises(CheckpointError, match=words):
        actor.load(saved[0])
    assert_equal_bits(before, ranks[1].call("parameters")[0])


def test_a_checkpoint_over_another_base_or_of_a_whole_model_is_refused(ranks, path, saved, tmp_path):
    other = make_model(tmp_path / "other", tied=True, seed=6)
    actor = start(ranks[1], spec_for(other))
    with pytest.raises(CheckpointError, match="a base model with other weights"):
        actor.load(saved[0])
    whole = tmp_path / "whole"
    whole.mkdir()
    start(ranks[1], spec_for(path, lora_rank=0)).save(whole)
    actor = start(ranks[1], spec_for(path))
    with pytest.raises(CheckpointError, match=r"has a whole model and no LoRA adapters.*lora_rank=3"):
        actor.load(whole)


def test_an_exported_checkpoint_has_the_bits_of_the_merged_model_and_of_the_adapter(ranks, path, tmp_path):
    builtin.build_tokenizer(builtin.BUILTINS["arithmetic"].vocab_size).save_pretrained(path)
    actor = start(ranks[2], spec_for(path))
    update(actor, range(2))
    store = CheckpointStore(tmp_path / "checkpoints")
    draft = store.begin(2, {"step": 2})
    actor.save(draft.folder)
    store.publish(draft, actor.saved(60.0) or {})
    actor.export(tmp_path / "by_ranks")
    section = {"lora_rank": 3, "lora_alpha": 6, "target_modules": ["all-linear"], "exclude_modules": []}
    found = export_policy(store.folder / "step_2", str(path), section, tmp_path / "exported")
    for name in ("model.safetensors", f"{lora.FOLDER}/{lora.WEIGHTS}"):
        # The ranks multiply fewer rows at a time, which changes the last bit.
        one, other = load_file(found / name), load_file(tmp_path / "by_ranks" / name)
        assert one.keys() == other.keys()
        for key, value in one.items():
            torch.testing.assert_close(value, other[key], atol=1e-7, rtol=1e-6)
    assert (found / lora.FOLDER / lora.SETTINGS).read_text() == (
        tmp_path / "by_ranks" / lora.FOLDER / lora.SETTINGS
    ).read_text()
    with pytest.raises(CheckpointError, match="has LoRA adapters and no whole model"):
        export_policy(store.folder / "step_2", str(path), {}, tmp_path / "wrong")
