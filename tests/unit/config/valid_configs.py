"""Valid configurations, drawn from the schema's ranges and the rules between keys."""

from __future__ import annotations

from typing import Any

from config_tools import CPU, A, R, values_of
from hypothesis import strategies as st

from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.config.schema.fields import leaves
from grpo_rl.registry import needs_of

# Keys that go with any other setting of those below.
_FREE = (
    f"{A}.optim.lr", f"{A}.optim.eps", f"{A}.optim.weight_decay", f"{A}.optim.clip_grad", f"{A}.entropy_coeff", f"{A}.ppo_epochs",
    f"{R}.seed", f"{R}.temperature", f"{R}.ignore_eos", f"{R}.enable_prefix_caching",
    f"{R}.checkpoint_engine.verify_checksum", "trainer.seed", "trainer.total_epochs", "trainer.total_training_steps",
    "trainer.val_before_train", "trainer.export_at_end", "trainer.save_rollouts", "trainer.start_timeout_s",
    "trainer.step_timeout_s", "reward.num_workers", "reward.timeout_s", "data.check_rows", "data.on_bad_row",
    "data.filter_overlong_prompts", "data.truncation", "algorithm.mask_truncated",
    "actor_rollout_ref.model.enable_gradient_checkpointing", "actor_rollout_ref.model.lm_head_chunk_tokens",
)  # fmt: skip
_OF_VLLM = (f"{R}.enable_prefix_caching",)
_NO_GROUP = sorted(name for name in ADVANTAGES if not needs_of(ADVANTAGES.get(name)) & {"group", "values", "steps", "parts"})
_GROUP = sorted(name for name in ADVANTAGES if needs_of(ADVANTAGES.get(name)) == {"group"})


@st.composite
def valid_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Dotted keys with values that fit each other, on top of the embedded task and model."""
    mini = draw(st.integers(1, 64))
    n = draw(st.integers(1, 16))
    # The embedded model has 2,048 positions, and the machine of the tests two cores.
    prompt, response = draw(st.integers(1, 1024)), draw(st.integers(1, 1024))
    keys: dict[str, Any] = {
        "data.train_files": ["task:arithmetic"],
        "actor_rollout_ref.model.path": "builtin:arithmetic",
        f"{A}.ppo_mini_batch_size": mini,
        "data.train_batch_size": mini * draw(st.integers(1, 8)),
        f"{R}.n": n,
        f"{R}.cpu_threads": draw(st.integers(0, 2)),
        f"{R}.name": draw(st.sampled_from(["hf", "vllm"])),
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        "algorithm.adv_estimator": draw(st.sampled_from(_NO_GROUP if n == 1 else _NO_GROUP + _GROUP)),
    }
    free = [key for key in _FREE if keys[f"{R}.name"] == "vllm" or key not in _OF_VLLM]
    for key in draw(st.lists(st.sampled_from(free), unique=True, max_size=8)):
        keys[key] = draw(values_of(leaves()[key].kind))
    if draw(st.booleans()):
        keys[f"{A}.ppo_micro_batch_size_per_gpu"] = draw(st.integers(1, 64))
    else:
        keys[f"{A}.ppo_max_token_len_per_gpu"] = prompt + response + draw(st.integers(0, 9999))
    if draw(st.booleans()):
        # More threads than the machine has cores are refused.
        keys[f"{R}.cpu_threads"] = draw(st.integers(0, CPU.num_cpus))
    kl = draw(st.sampled_from(["none", "loss", "reward"]))
    keys[f"{A}.use_kl_loss"] = kl == "loss"
    if kl == "reward":
        keys["algorithm.use_kl_in_reward"] = True
        keys["algorithm.kl_ctrl.kl_coef"] = draw(st.floats(1e-6, 10))
    shuffles = draw(st.booleans())
    keys["data.shuffle"] = shuffles
    if shuffles:
        keys["data.seed"] = draw(st.integers(0, 2**63 - 1))
    saves = draw(st.sampled_from([-1, 1, 7]))
    keys["trainer.save_freq"] = saves
    if saves > 0:
        keys["trainer.max_actor_ckpt_to_keep"] = draw(st.integers(1, 5))
    return keys
