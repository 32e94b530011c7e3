"""Options `reward.*`."""

# ruff: noqa: F403, F405

from __future__ import annotations

from typing import Literal

from grpo_rl.config.schema.kinds import *
from grpo_rl.config.schema.model import HeadOptimConfig

_HAS_FUNCTIONS = "functions or audit or custom_reward_function.path"


@frozen
class CustomRewardConfig:
    path: str | None = None
    """A file with your own reward function; short for reward.functions=[path:name]."""
    name: str = field("compute_score", needs="path")
    """Its function: (data_source, solution_str, ground_truth, extra_info) -> float or {score: float, ...}."""
    reward_kwargs: Options = field(dict, needs="path")
    """Further keyword arguments for the function."""


@frozen
class OverlongBufferConfig:
    enable: bool = True
    """false: no penalty, whatever `len` is."""
    len: Length | None = None
    """Last tokens of the longest response over which a soft penalty grows in training (DAPO); null: none."""
    penalty_factor: Positive = 1.0
    """Penalty of a response of the full length."""

    @property
    def tokens(self) -> int | None:
        return self.len if self.enable else None


@frozen
class RewardModelTrainConfig:
    loss: Literal["bradley_terry", "steps"] = "bradley_terry"
    """bradley_terry: pairs, -log sigmoid(r_chosen - r_rejected - margin); steps: rated steps, cross-entropy
    of "this step is good" at each step's last token."""
    center_coef: Coefficient = field(0.0, needs="loss=bradley_terry")
    """bradley_terry: weight of (r_chosen + r_rejected)², which centres the scores; 0.01 is usual."""
    optim: HeadOptimConfig = field(HeadOptimConfig)
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about 30 % more work."""
    optimizer_offload: bool = field(False, needs=ON_GPUS, harmless=True)
    """GPU: keep the optimizer state in host memory between updates."""


@frozen
class RewardModelConfig:
    enable: bool = False
    """Add the score of a reward model to the reward; it has worker processes of its own (docs/rewards.md)."""
    model_path: str | None = None
    """Folder of a decoder with a sequence- or token-classification head of one label."""
    tokenizer_path: str | None = None
    """Folder of the reward model's tokenizer; null: model_path."""
    trust_remote_code: bool = False
    """Run Python code that lies in its folder."""
    weight: Factor = 1.0
    """Factor of the model's score in the reward."""
    step_separator: str | None = None
    """Cut responses at this text (`\\n` is a line break) and score the end of each step, for
    adv_estimator=grpo_process; null: one score per response."""
    rerender: Literal["auto", "always", "never"] = "auto"
    """Render prompts with its own chat template and tokenizer; auto: if they differ from the policy's."""
    max_token_len_per_gpu: Tokens = 16384
    """Most tokens in one forward pass of a rank, and in one rollout."""
    enable_resource_pool: bool = False
    """Give it its own devices; false: it shares the actor's."""
    nnodes: NodesOrNone = field(0, needs="enable_resource_pool=true")
    """Nodes of the reward model's own pool."""
    n_gpus_per_node: Devices | None = field(None, needs="enable_resource_pool=true")
    """Ranks per node of the reward model's own pool; null: as trainer.n_gpus_per_node."""
    dtype: Dtype = "auto"
    """Compute type of the layers; auto: bfloat16 on GPUs, float32 on CPUs. Scores are float32."""
    param_offload: bool = field(False, needs=ON_GPUS, harmless=True)
    """Keep its weights in host memory between scorings."""
    train: RewardModelTrainConfig = field(RewardModelTrainConfig)


@frozen
class JudgeConfig:
    base_url: str | None = None
    """An OpenAI-compatible endpoint (.../v1) whose model judges responses; null: none (docs/rewards.md)."""
    model: str | None = None
    """The judge model's name at base_url."""
    template: str | None = None
    """The prompt, a text or a file (.txt, .md) with {prompt}, {response}, {ground_truth}, and {criteria} of a
    rubric; null: a built-in one that asks for 0 to 10, or for a mark of each criterion."""
    system: str | None = None
    """System message before the judge's prompt."""
    parser: str = field("score", needs="rubric=null | the marks of {rubric} are read from a JSON object")
    """Number in the answer: score (the last `score: x`), json:KEY, or path.py:function(text) -> float."""
    rubric: str | None = None
    """Weighted criteria that are marked: a file (.yaml, .json), its text, or `row` for each row's
    extra_info.rubric; null: one score for the response."""
    rubric_calls: Literal["together", "each"] = field("together", needs="rubric")
    """One request for all criteria of a response, or one for each."""
    rubric_aggregation: Literal["mean", "weighted", "all"] = field("weighted", needs="rubric")
    """The marks' mean, their mean by weight, or 1 if all reach rubric_pass, else 0."""
    rubric_pass: Factor = field(0.5, needs=["rubric", "rubric_aggregation=all"])
    """The least passing mark."""
    min_score: Factor | None = None
    """Lower scores or marks are invalid; null: 0 with the built-in question and rubrics, else none is."""
    max_score: Factor | None = None
    """Higher ones are invalid; null: 10 with the built-in question, 1 with rubrics, else none is."""
    weight: Factor = 1.0
    """Factor of the judge's score in the reward."""
    max_tokens: Length = 512
    """Longest answer of the judge, in tokens."""
    temperature: TemperatureOrGreedy = 0.0
    """Sampling temperature of the judge's answers; 0 is greedy."""
    extra_body: Options = field(dict)
    """Further fields of each request, e.g. {response_format: {type: json_object}}."""
    max_concurrency: Requests = 16
    """Requests at the same time."""
    requests_per_minute: Count | None = None
    """Most requests in a minute, tries again included; null: no limit."""
    timeout_s: Seconds = 60.0
    """Longest time for one request."""
    retries: Tries = 4
    """Further tries after a timeout, a broken connection or answer, and states 408, 425, 429 and 5xx."""
    backoff_s: Seconds = 1.0
    """Wait before the first further try, doubled for each later one, of which half to all is drawn."""
    deadline_s: Seconds = 300.0
    """Longest time for one judgement, all tries and waits included."""
    api_key_env: str | None = None
    """Environment variable that holds the key; the key itself is in no file and no log."""


@frozen
class RewardConfig:
    functions: list[str] = field(lambda: ["auto"])
    """Rewards that are summed: registered names or path.py:function, with an optional factor (`0.2*format`).
    `auto`: the rule of the row's data_source. May be empty beside a reward model or a judge."""
    custom_reward_function: CustomRewardConfig = field(CustomRewardConfig)
    overlong_buffer: OverlongBufferConfig = field(
        OverlongBufferConfig,
        needs=["overlong_buffer.len", "overlong_buffer.enable=true | {overlong_buffer.enable}=false"],
        harmless=True,
    )
    function_kwargs: Options = field(dict, needs=_HAS_FUNCTIONS)
    """Options of functions by name: {my_function: {option: value}}."""
    batched: list[str] = field(list, needs=_HAS_FUNCTIONS)
    """Functions called once with a step's responses: (data_sources, solution_strs, ground_truths,
    extra_infos), lists, -> list."""
    audit: list[str] = field(list, harmless=True)
    """Functions that score some responses for comparison, not training: as `functions`, without factors;
    `judge` takes reward.judge out of the reward (docs/rewards.md)."""
    audit_share: PositiveFraction = field(0.25, needs="audit", harmless=True)
    """Audited share of a step's responses, spread over its prompts."""
    num_workers: Processes | None = field(None, needs=_HAS_FUNCTIONS)
    """Processes per node; null: half of the cores that ranks and engines leave there, at most 32."""
    timeout_s: Seconds = field(10.0, needs=_HAS_FUNCTIONS)
    """Longest time for a response by all functions, and a batched call; then the process is replaced."""
    memory_limit_gb: ProcessGib | None = field(2.0, needs=_HAS_FUNCTIONS)
    """Address space of a process, in GiB; null: no limit, for functions that load large libraries."""
    on_failure: Literal["drop", "value", "stop"] = "drop"
    """After a failed reward (too slow, an error, no number): drop the rollout from its group, take
    failure_value as its value, or stop the run."""
    failure_value: Factor | None = field(None, needs="on_failure=value")
    """Reward of failed ones with on_failure=value."""
    reward_model: RewardModelConfig = field(RewardModelConfig)
    judge: JudgeConfig = field(JudgeConfig, needs="judge.base_url")
