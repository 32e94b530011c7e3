"""The frozen models of the training loop: the reference policy and the teachers, over their worker groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from grpo_rl.cluster.roles.trained_roles import ActorRole, Dispatched, SavedRole
from grpo_rl.columns import RemoteColumn
from grpo_rl.config.derived import MicroBatchRule
from grpo_rl.config.schema.algorithm import TeacherConfig
from grpo_rl.data.collate import collate
from grpo_rl.data.prompts import Renderer
from grpo_rl.data.rows import at
from grpo_rl.errors import DataError
from grpo_rl.frozen import frozen
from grpo_rl.types import Batch, Metrics, Prompt, Rollout

if TYPE_CHECKING:
    from grpo_rl.cluster.processes.worker_group import WorkerGroup


@dataclass(eq=False)
class ReferenceRole:
    method: ClassVar[str] = "logprobs"
    worker_group: WorkerGroup
    rule: MicroBatchRule
    want_hidden: bool

    def logprobs(self, batch: Batch) -> Batch:
        names = {"ref_logprobs_T": "logprobs_T"} | ({"ref_hidden_TD": "hidden_TD"} if self.want_hidden else {})
        return batch.replace(**self.dispatched(batch).compute(self.rule, self.method, names, self.want_hidden))

    def dispatched(self, batch: Batch) -> Dispatched:
        return Dispatched.to(self.worker_group, batch, self.rule)


class BaseReferenceRole(ReferenceRole):
    """The base model under the actor's adapters: its ranks compute it, on the shards that they have."""

    method = "reference_logprobs"

    def __init__(self, actor: ActorRole, **options: Any) -> None:
        super().__init__(actor.worker_group, **options)
        self.actor = actor

    def dispatched(self, batch: Batch) -> Dispatched:
        return self.actor.dispatched(batch)


class MovingReferenceRole(SavedRole, ReferenceRole):
    folder = "reference"
    missing_advice = (
        "reference that moves: it was written by a run without a KL term, or of another trainer.schedule; go on with that "
        "configuration"
    )

    def become(self, actor: ActorRole) -> None:
        assert len(actor.worker_group) == len(self.worker_group), "the same number of ranks"
        parts = actor.worker_group.call_for_two("weights", [()] * len(self.worker_group))
        self.worker_group.call_each("update", [(part.ref,) for _, part in parts])


@frozen
class Teacher:
    name: str
    settings: TeacherConfig
    worker_group: WorkerGroup
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(eq=False)
class TeacherRole:
    """The `protocols.Teacher`: each rollout has one of the teachers, frozen models or the policy as it is."""

    teachers: Sequence[Teacher]
    rule: MicroBatchRule
    top: tuple[int, int] | None
    """So many likeliest tokens of the teacher are wanted, of the first so many ids; None: none."""
    renderer: Renderer

    def logprobs(self, batch: Batch, rollouts: Sequence[Rollout] = ()) -> tuple[Batch, Metrics]:
        """Return the batch with its teachers' columns, which stay with the ranks, and how far each is from what was sampled."""
        names = {"teacher_logprobs_T": "logprobs_T"}
        if self.top is not None:
            names |= {"teacher_top_logprobs_TK": "top_logprobs_TK", "teacher_top_ids_TK": "top_ids_TK"}
        chosen = [self.teacher_of(rollout.prompt) for rollout in rollouts] or [self.teachers[0]] * batch.num_rollouts
        results: list[dict[str, RemoteColumn]] = []
        order: list[int] = []
        metrics: Metrics = {}
        for teacher in self.teachers:
            rows = [row for row, chosen_teacher in enumerate(chosen) if chosen_teacher is teacher]
            if not rows:
                continue
            seen, rule = self._seen(teacher, batch, rollouts, rows)
            arguments = False, self.top, *teacher.arguments
            dispatched = Dispatched.to(teacher.worker_group, seen, rule)
            results.append(dispatched.compute(rule, teacher.method, names, *arguments))
            order += rows
            sums, counts = zip(*teacher.worker_group.call("distance"), strict=True)
            measure = "cross_entropy" if batch.rollout_logprobs_T is None else "kl"
            metrics[f"distillation/{teacher.name}/{measure}"] = sum(sums) / max(1, sum(counts))
            metrics[f"distillation/{teacher.name}/share"] = len(rows) / batch.num_rollouts
        return batch.replace(**{name: in_order([result[name] for result in results], order) for name in names}), metrics

    def teacher_of(self, prompt: Prompt) -> Teacher:
        """Return the teacher of a prompt: of those of its data_source, else of any, one drawn by their weights and its uid."""
        fitting = [teacher for teacher in self.teachers if teacher.settings.key == prompt.data_source]
        fitting = fitting or [teacher for teacher in self.teachers if teacher.settings.key is None]
        if not fitting:
            keys = ", ".join(str(teacher.settings.key) for teacher in self.teachers)
            raise DataError(
                f"prompt {prompt.uid}: no teacher in distillation.teacher_models has its data_source {prompt.data_source!r} as its "
                f"key; there are {keys}, and one without a key would teach all others"
            )
        share = int.from_bytes(sha256(prompt.uid.encode()).digest()[:8], "big") / 2**64
        draw = share * sum(teacher.settings.weight for teacher in fitting)
        for teacher in fitting:
            draw -= teacher.settings.weight
            if draw < 0:
                return teacher
        return fitting[-1]

    def _seen(
        self, teacher: Teacher, batch: Batch, rollouts: Sequence[Rollout], rows: Sequence[int]
    ) -> tuple[Batch, MicroBatchRule]:
        """Return the rollouts as their teacher reads them, and the rule for its passes: no sequence is too long for it."""
        context, rule = teacher.settings.context, self.rule
        if context is None:
            return (batch if len(rows) == batch.num_rollouts else batch.select(list(rows))), rule
        prompts = {(rollout := rollouts[row]).prompt.uid: self._with_context(context, rollout.prompt) for row in rows}
        teacher_batch = collate(
            [replace(rollout, prompt=prompts[rollout.prompt.uid]) for rollout in (rollouts[row] for row in rows)]
        )
        if rule.max_tokens is not None:
            rule = replace(rule, max_tokens=max(rule.max_tokens, int(teacher_batch.sequence_lengths_N.max())))
        return teacher_batch, rule

    def _with_context(self, context: str, prompt: Prompt) -> Prompt:
        """Return the prompt with the context before it: as its system message, or as text before a plain one."""
        text = re.sub(r"\{(ground_truth|extra_info\.\w+)\}", lambda match: str(_field(prompt, match[1])), context)
        teacher_prompt: Any = text + prompt.text
        if prompt.messages is not None:
            first, *later_messages = prompt.messages
            if first["role"] == "system":
                text = f"{text}\n\n{first['content']}"
            teacher_prompt = [
                {"role": "system", "content": text},
                *(later_messages if first["role"] == "system" else prompt.messages),
            ]
        with at(f"the teacher's context of prompt {prompt.uid}"):
            rendered_text = self.renderer.render(teacher_prompt)
        return replace(
            prompt, token_ids=np.asarray(self.renderer.tokenize([teacher_prompt], [rendered_text])[0], dtype=np.int32)
        )


def _field(prompt: Prompt, name: str) -> Any:
    """Return what a context puts in the place of `{name}`. Raises DataError for a row that does not have it."""
    key = name.partition(".")[2]
    if not key:
        return prompt.ground_truth
    if key not in prompt.extra_info:
        raise DataError(
            f"prompt {prompt.uid}: the context of its teacher reads {name}, and its extra_info has {', '.join(prompt.extra_info)}"
        )
    return prompt.extra_info[key]


def in_order(parts: Sequence[RemoteColumn], order: Sequence[int]) -> RemoteColumn:
    """Return one column of columns of some rollouts each, the numbers of which are `order`."""
    if len(parts) == 1:
        return parts[0]
    block_offsets = np.cumsum([0, *(len(part.blocks) for part in parts)])
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("pieces_N", "start_P", "length_P")}
    blocks = [part.block_P + start for part, start in zip(parts, block_offsets.tolist(), strict=False)]
    column = replace(
        parts[0],
        blocks=tuple(block for part in parts for block in part.blocks),
        block_P=np.concatenate(blocks),
        finite=all(part.finite for part in parts),
        **joined,
    )
    return column.select(np.argsort(np.asarray(order)))
