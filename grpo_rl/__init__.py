"""Reinforcement learning for language models: GRPO on Ray, vLLM and FSDP2.

Shape suffixes used throughout the package (one letter per dimension):

    N   rollouts (one response each)       T   trained tokens, all rollouts back to back
    S   all tokens, prompts included       D   hidden size
    V   vocabulary                         G   groups (the rollouts of one prompt)

A tensor `rewards_N` has one entry per rollout, `policy_logprobs_T` one per trained token.
Entry t always describes token t: the one shift between logits and tokens is in
`grpo_rl/models/forward.py`.
"""

__version__ = "0.1.0"
