"""A plan for a machine that is not here: its name, what is refused for it, and what is proposed if it is too small."""

from __future__ import annotations

import dataclasses

import pytest
from compositions import compose

from grpo_rl.errors import ConfigError
from grpo_rl.machine_memory import MachineMemory
from grpo_rl.plan import proposal
from grpo_rl.plan.cost import step_time
from grpo_rl.plan.decisions import Plan, decide
from grpo_rl.plan.machine import DEVICES, named, probe_machine
from grpo_rl.plan.make import make_plan, plan_without_page
from grpo_rl.plan.memory import GIB, Fit, Need, adapter_params, fit_of, gpu_phases, load_of, memory_by_role, resident
from grpo_rl.plan.proposal import propose, propose_faster

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BASE = ["recipe=gsm8k/qwen2.5-7b", "trainer.dry_run=true"]
PPO = ["algorithm.adv_estimator=gae", f"{A}.use_kl_loss=false"]
TOO_SMALL = {
    "7B on consumer GPUs": [f"{M}.path=Qwen/Qwen2.5-7B", "machine=8xRTX4090-24GB"],
    "7B with a critic": [f"{M}.path=Qwen/Qwen2.5-7B", "machine=8xL40S-48GB", *PPO],
    "7B, nothing recomputed": [f"{M}.path=Qwen/Qwen3-8B", "machine=8xH100-80GB", f"{M}.enable_gradient_checkpointing=false"],
    "14B, an engine that stays": [f"{M}.path=Qwen/Qwen2.5-14B", "machine=8xH100-80GB", f"{R}.free_cache_engine=false"],
    "14B by rollouts": [
        f"{M}.path=Qwen/Qwen2.5-14B",
        "machine=8xA100-40GB",
        f"{A}.ppo_micro_batch_size_per_gpu=32",
        f"~{A}.ppo_max_token_len_per_gpu",
    ],
    "32B": [f"{M}.path=Qwen/Qwen2.5-32B", "machine=8xH100-80GB"],
    "72B, which needs more machines": [f"{M}.path=Qwen/Qwen2.5-72B-Instruct", "machine=8xH100-80GB"],
    "a mixture": [f"{M}.path=Qwen/Qwen3-30B-A3B", "machine=8xH100-80GB"],
    "little host memory": [f"{M}.path=Qwen/Qwen2.5-32B", "machine=8xH100-80GB", "trainer.machine_host_gib=300"],
}


def planned(*words: str) -> Plan:
    return make_plan(compose([*BASE, *words]))


def without_page(*words: str) -> Plan:
    return plan_without_page(compose([*BASE, *words]).config)


def decided(*words: str) -> Plan:
    """Return a plan in which nothing follows from the memory."""
    config = compose([*BASE, "machine=8xH100-80GB", *words]).config
    return decide(config, probe_machine(config))


def phases_of(*words: str) -> dict[str, Need]:
    stays = ["actor_rollout_ref.ref.fsdp_config.param_offload=false", f"{R}.gpu_memory_utilization=0.5"]
    return {phase.what: phase for phase in gpu_phases(decided(*stays, *words))}


def judged(plan: Plan) -> Fit:
    fit = fit_of(plan)
    assert fit is not None
    return fit


# ---- the machine ----------------------------------------------------------------------------------------------


def test_a_machine_is_read_from_its_name() -> None:
    assert (named("8xH100-80GB").nodes, named("8xH100-80GB").gpus) == (1, 8)
    assert (named("4x8xh100-80gb").nodes, named("4x8xh100-80gb").gpus) == (4, 8)
    assert named("RTX4090-24GB").device is DEVICES["RTX4090-24GB"] and named("RTX4090-24GB").gpus == 1
    for wrong, hint in {
        "8xH100": "8xH100-80GB",
        "8xH100-90GB": "did you mean H100-80GB",
        "0xH100-80GB": "without GPUs",
        "many": "is written as",
        "8x": "is written as",
    }.items():
        with pytest.raises(ConfigError, match=hint):
            named(wrong)


def test_the_name_sets_gpus_and_nodes_unless_they_are_given_whatever_the_recipe_says() -> None:
    for words, nodes, gpus in (
        (["machine=4x8xH100-80GB"], 4, 8),
        (["machine=8xH100-80GB", "trainer.n_gpus_per_node=2"], 1, 2),
        (["machine=A100-40GB"], 1, 1),
    ):
        config = compose([*BASE, *words, "trainer.machine_host_gib=100"]).config
        assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (nodes, gpus)
        machine = probe_machine(config)
        assert (machine.nodes, machine.cluster, machine.device) == (nodes, nodes > 1, "cuda")
        assert machine.host_memory == 100 * 2**30


def test_a_plan_is_made_without_model_data_gpu_or_network() -> None:
    # `train.parquet` begins with the letter of `task:`.
    plan = without_page("machine=8xH100-80GB", "data.train_files=train.parquet", "data.val_files=[]", "trainer.test_freq=-1")
    assert plan.machine.device == "cuda" and plan.world_size == 8
    assert plan.model is not None and plan.model.num_params == 7_615_616_512


PRECISE = f"{M}.lm_head_precision=bfloat16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([PRECISE], "this run has none"),
        (["machine=8xH100-80GB", "trainer.n_gpus_per_node=16"], "has 8 GPUs"),
        (["machine=2x8xH100-80GB", "trainer.nnodes=3"], "it has 2"),
        (["machine=8xH100-80GB", f"{R}.tensor_model_parallel_size=3"], "must divide"),
        (["machine=8xH100-80GB", "trainer.dry_run=false"], "can only be planned"),
        *(
            ([f"trainer.{key}"], f"trainer.{key}: describes a run on the machine")
            for key in ("machine_host_gib=8", "mean_response_length=100", "response_length_spread=0.5")
        ),
        (["machine=8xH100-80GB", "data.max_response_length=40000", f"{A}.ppo_max_token_len_per_gpu=65536"], "positions"),
    ],
)
def test_what_depends_on_the_device_is_judged_on_the_machine_that_is_named(words: list[str], said: str) -> None:
    given = ["data.train_files=task:arithmetic", f"{M}.path=Qwen/Qwen2.5-0.5B", "trainer.dry_run=true"]
    with pytest.raises(ConfigError, match=said):
        make_plan(compose([*given, *words]))
    if PRECISE in words:
        make_plan(compose([*given, *words, "machine=1xA100-80GB"]))


# ---- what is proposed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOO_SMALL)
def test_what_is_proposed_fits_when_it_is_planned_again(name) -> None:
    plan = planned(*TOO_SMALL[name])
    assert plan.model is not None and not judged(plan).fits
    found = propose(plan)
    assert found is not None and found.changes
    words = found.words()
    given = [word for word in TOO_SMALL[name] if not (word.startswith("machine=") and words[0].startswith("machine="))]
    again = planned(*given, *words)
    assert judged(again).fits
    page = plan.render()
    assert "does not fit" in page and all(f"\n  {word}\n" in page for word in words)
    assert "fits         yes" in again.render()


def test_a_run_that_fits_is_left_alone() -> None:
    page = planned("machine=8xH100-80GB").render()
    assert "fits         yes" in page and "instead" not in page and "not run" in page


def test_the_proposal_changes_as_little_as_it_can() -> None:
    plan = planned("machine=8xH100-80GB", f"{A}.ppo_max_token_len_per_gpu=131072")
    assert plan.model is not None
    found = propose(plan)
    assert found is not None and set(found.changes) == {f"{A}.ppo_max_token_len_per_gpu"}
    # Twice as many tokens would not have fitted.
    tokens = 2 * found.changes[f"{A}.ppo_max_token_len_per_gpu"]
    assert not judged(without_page("machine=8xH100-80GB", f"{A}.ppo_max_token_len_per_gpu={tokens}")).fits


def test_nothing_is_proposed_where_nothing_fits() -> None:
    page = planned(f"{M}.path=Qwen/Qwen2.5-72B", "machine=1xL4-24GB", "trainer.machine_host_gib=8").render()
    assert "no configuration was found that fits" in page


SMALL = f"{M}.path=Qwen/Qwen2.5-0.5B", "machine=1xH100-80GB", f"{A}.use_kl_loss=false"
LESS = f"{M}.enable_gradient_checkpointing"
SLOW = f"{LESS}=true", f"{M}.lm_head_chunk_tokens=2048"


def test_free_memory_is_spent_where_the_configuration_leaves_it_to_the_plan() -> None:
    model = without_page(*SMALL).config.actor_rollout_ref.model
    assert model.enable_gradient_checkpointing is False and model.lm_head_chunk_tokens == 8192
    small = without_page(*SMALL, "machine=1xRTX4090-24GB").config.actor_rollout_ref.model
    assert small.enable_gradient_checkpointing is None
    asked = without_page(*SMALL, *SLOW).config.actor_rollout_ref.model
    assert asked.enable_gradient_checkpointing is True and asked.lm_head_chunk_tokens == 2048


def test_activations_are_kept_on_cpus_that_have_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "recipe=arithmetic/grpo", "trainer.device=cpu", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384"

    def chosen(mib: int, *more: str) -> bool | None:
        memory = MachineMemory(mib * 2.0**20, mib * 2.0**20)
        monkeypatch.setattr(proposal, "machine_memory", lambda: memory)
        return plan_without_page(compose([*words, *more]).config).config.actor_rollout_ref.model.enable_gradient_checkpointing

    assert chosen(32_768) is False and chosen(1_024) is None
    assert chosen(1_024, f"{LESS}=false") is False and chosen(32_768, f"{LESS}=true") is True


def test_free_memory_is_proposed_for_a_faster_update_that_fits() -> None:
    plan = planned(*SMALL, *SLOW)
    assert plan.model is not None
    found = propose_faster(plan)
    assert found is not None and found.fit.fits and found.fit.tightest.used <= 0.9
    keys = {LESS: False, f"{M}.lm_head_chunk_tokens": 16384, f"{A}.fsdp_config.use_torch_compile": True}
    assert found.changes == keys
    page = plan.render()
    assert "faster       free memory can shorten the update" in page and all(f"\n  {word}\n" in page for word in found.words())
    again = planned(*SMALL, *found.words())
    assert "fits         yes" in again.render() and "faster   " not in again.render()
    before, after = (step_time(one) for one in (plan, found.plan))
    assert before is not None and after is not None and after.phases["update"] < 0.8 * before.phases["update"]


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        (["machine=1xRTX4090-24GB"], LESS),
        ([f"{M}.enable_activation_offload=true"], LESS),
        (
            [f"{M}.path=Qwen/Qwen3-30B-A3B", "machine=8x8xH100-80GB", f"{R}.tensor_model_parallel_size=8"],
            f"{A}.fsdp_config.use_torch_compile",
        ),
        (["trainer.total_training_steps=20"], f"{A}.fsdp_config.use_torch_compile"),
    ],
    ids=["no room", "inputs in host memory", "experts", "short"],
)
def test_a_faster_update_is_proposed_by_no_key_that_cannot_be(words, lacking) -> None:
    plan = without_page(*SMALL, *SLOW, *words)
    assert plan.model is not None and judged(plan).fits
    found = propose_faster(plan)
    assert found is None or lacking not in found.changes


def test_nothing_faster_is_proposed_where_the_memory_of_gpus_is_not_known() -> None:
    plan = decided(*SMALL)
    assert propose_faster(dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, gpu_memory=0))) is None


# ---- memory: no GPU has confirmed the estimates -----------------------------------------------------------------

OFFLOAD = [f"{A}.fsdp_config.param_offload=true", f"{A}.fsdp_config.optimizer_offload=true"]


def test_host_memory_counts_what_is_kept_off_the_gpus() -> None:
    fits = [fit_of(decided(*words)) for words in ([], OFFLOAD, ["trainer.machine_host_gib=16"])]
    there = [next(need for need in fit.needs if need.what == "host memory of a machine") for fit in fits]
    # All eight ranks are on the one machine: the whole model's weights and moments.
    assert there[1].needed - there[0].needed == pytest.approx(7_615_616_512 * 12, rel=1e-6)
    assert fits[0].fits and not fits[2].fits and fits[2].tightest is there[2]


def test_the_engine_needs_room_for_its_weights_and_one_sequence_in_its_share() -> None:
    little, fewer, more = (fit_of(decided(f"{R}.gpu_memory_utilization={share}")) for share in (0.15, 0.5, 0.7))
    assert [need.what for need in little.needs if need.needed > need.there] == ["engine, in its share"]
    # 0.2 of 79.1 GiB at 56 KiB a token: 2 x 28 layers x 4 heads x 128 numbers of two bytes.
    assert more.cache_tokens - fewer.cache_tokens == pytest.approx(0.2 * 79.1 * GIB / (2 * 28 * 4 * 128 * 2), rel=1e-3)


def test_adapters_need_neither_a_second_model_nor_moments_of_the_first() -> None:
    whole, adapted = decided(), decided(f"{M}.lora_rank=32")
    size = whole.model
    assert size is not None
    assert adapted.role("reference") is None and adapted.base_reference == "the KL in the loss"
    # By peft's own count for Qwen2.5-7B at rank 32, all linear layers: 80,740,352.
    assert adapter_params(adapted.config.actor_rollout_ref.model, size) == 80_740_352
    loads = [load_of(plan, size, "actor") for plan in (whole, adapted)]
    # Frozen blocks rest in bfloat16 by the type of the published files; embedding and head in float32.
    ends, params = 2 * size.vocab * size.hidden, size.num_params
    frozen = 4 * ends + 2 * (params - ends)
    assert [resident(size, load) for load in loads] == [params * 16 // 8, (frozen + 80_740_352 * 16) // 8]
    before, after = phases_of(), phases_of(f"{M}.lora_rank=32")
    assert list(after) == ["sampling", "weight transfer", "update"]
    for name in after:
        # Moments and the reference's weights, 8 + 4 bytes of each parameter over 8 ranks; in the update gradients besides.
        assert before[name].needed - after[name].needed > params * 11 / 8, name
    page = " ".join(planned("machine=8xH100-80GB", f"{M}.lora_rank=32").render().split())
    assert "the base model under the adapters" in page and "LoRA adapters of rank 32 at all-linear (80.7 M parameters)" in page


def test_every_phase_has_all_processes_of_the_gpu() -> None:
    phases, alone = phases_of(), phases_of(f"{A}.use_kl_loss=false")
    assert list(phases) == ["sampling", "weight transfer", "update", "reference"]
    # The reference's weights, 7.6 billion in float32 over 8 ranks, and its process lie on the GPU while others work.
    for name in ("sampling", "weight transfer", "update"):
        added = phases[name].needed - alone[name].needed
        assert 7.6e9 * 4 / 8 < added < 7.6e9 * 4 / 8 * 1.2 + 2 * GIB, name
    assert phases["sampling"].share == 0.5 and phases["update"].share == 1
    # A sleeping engine's graphs and context, the embedding and head whole, with gradients.
    assert phases["update"].needed > memory_by_role(decided())[0].num_bytes + 2 * 2 * 152064 * 3584 * 4


def test_what_is_kept_in_host_memory_is_on_the_gpu_only_while_it_is_used() -> None:
    there, away = (phases_of(f"{M}.path=Qwen/Qwen2.5-14B", *words) for words in ([], OFFLOAD))
    assert there["update"].needed == away["update"].needed
    # 14.8 billion parameters, 12 bytes each, over 8 ranks.
    assert there["sampling"].needed - away["sampling"].needed > 14.7e9 * 12 / 8
    assert there["sampling"].least > 80 * GIB * 0.5 > away["sampling"].needed


def test_an_engine_that_keeps_its_memory_narrows_every_phase_and_a_cache_of_a_fixed_size_is_no_share_of_the_gpu() -> None:
    kept = phases_of(f"{R}.free_cache_engine=false")
    assert all(phase.share == 0.5 for phase in kept.values())
    assert kept["update"].least == pytest.approx(2 * kept["update"].needed, rel=1e-6)
    size = f"{R}.kv_cache_memory_bytes={10 * GIB}"
    by_share, fixed, awake = phases_of(), phases_of(size), phases_of(size, f"{R}.free_cache_engine=false")
    added = fixed["sampling"].needed - by_share["sampling"].needed
    assert 10 * GIB + 7.6e9 * 2 < added < 10 * GIB + 7.7e9 * 2 + 2 * GIB and fixed["sampling"].share == 1
    assert fixed["update"] == by_share["update"], "the engine sleeps"
    added = awake["update"].needed - fixed["update"].needed
    assert 10 * GIB + 7.6e9 * 2 < added < 10 * GIB + 7.7e9 * 2 and awake["update"].share == 1


def test_engines_that_share_a_gpu_take_its_memory_together_and_its_kernels_in_turn() -> None:
    size = f"{R}.kv_cache_memory_bytes={10 * GIB}"
    alone, shared = phases_of(size), phases_of(size, f"{R}.engines_per_device=2")
    added = shared["sampling"].needed - alone["sampling"].needed
    assert 10 * GIB + 7.6e9 * 2 < added < 10 * GIB + 7.7e9 * 2 + 2 * GIB
