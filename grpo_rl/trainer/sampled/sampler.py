"""Rollouts by a user's function, `actor_rollout_ref.rollout.function=my_rollouts.py:play`, and what it works with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from grpo_rl.control_words import unmarked
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.data.rows import Message, at
from grpo_rl.errors import FunctionError
from grpo_rl.protocols import TurnPool
from grpo_rl.registry import Registry
from grpo_rl.rollout.conversation import Conversation
from grpo_rl.rollout.requests import rollout_id, sampling_of, turn_sampling
from grpo_rl.trainer.parts import training_sampling
from grpo_rl.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from grpo_rl.trainer.session import Session

ROLLOUTS: Registry[Callable[[Sampler, list[Prompt]], list[Rollout]]] = Registry(
    "rollout function", "play(sampler: grpo_rl.trainer.sampled.sampler.Sampler, prompts: list[Prompt]) -> list[Rollout]"
)
"""Users' functions that make the rollouts of a batch of prompts."""
FURTHER = 104_729  # the distance between the seeds of two calls for the same prompt


class Sampler:
    """The engines and the reward, for a function that makes the rollouts of a step's prompts.

    What it returns is scored unless it has been, and trained: rollouts with the same prompt uid are a group.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._config = session, session.config
        self.n = self._config.actor_rollout_ref.rollout.n  # the configured number of responses to a prompt
        self.state: dict[str, Any] = {}  # what the function remembers from step to step, as JSON; a part of every checkpoint
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's calls; the session calls it."""
        self._num_calls, self._num_samples, self._num_prompts = Counter[str](), Counter[str](), Counter[str]()

    @property
    def sampling(self) -> Sampling:
        """The configured sampling of this step; `dataclasses.replace` changes it."""
        return training_sampling(self._config, self._session.step)

    def sample(self, prompts: Sequence[Prompt], n: int | None = None, sampling: Sampling | None = None) -> list[Rollout]:
        """Return n responses to each prompt, ordered by prompt; a prompt that is given again in the step gets further ones."""
        n, uids = self.n if n is None else n, [prompt.uid for prompt in prompts]
        number = max((self._num_calls[uid] for uid in uids), default=0)
        sampling = sampling or self.sampling
        if number and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + number * FURTHER)
        on_finish = self._session.progress.counting(lambda rollout: None, len(prompts) * n)
        rollouts = self._session.rollout.generate(prompts, n, sampling, on_finish)
        for rollout in rollouts:
            rollout.sample_index += self._num_samples[rollout.prompt.uid]
        for uid in uids:
            self._num_calls[uid] = number + 1
            self._num_samples[uid] += n
        return rollouts

    def next_turn(
        self, rollouts: Sequence[Rollout], messages: str | Sequence[str], sampling: Sampling | None = None
    ) -> list[Rollout]:
        """Return each rollout with a user's message, which is not trained, and another turn, as far as there
        is room.

        `messages` is one for all, or one for each. All share data.max_response_length. Raises ConfigError for
        a chat template that rewrites earlier turns.
        """
        texts = [messages] * len(rollouts) if isinstance(messages, str) else list(messages)
        sampling, pool = sampling or self.sampling, cast(TurnPool, self._session.rollout)
        conversations = [Conversation.of(rollout, keeps_support=sampling.returns_support) for rollout in rollouts]
        turns: list[tuple[Prompt, Sampling, str]] = []
        of_turn: dict[str, Conversation] = {}
        for rollout, text, conversation in zip(rollouts, texts, conversations, strict=True):
            prompt, number, name = rollout.prompt, len(conversation.turns), rollout_id(rollout.prompt, rollout.sample_index)
            ended = rollout.finish_reason == "stop"
            message: Message = {"role": "user", "content": text}
            delta = self._deltas.between([message], ended=ended, plain=prompt.messages is None)
            room = self._config.data.max_response_length - conversation.length - len(delta.token_ids)
            if room < 1:
                conversation.finish_reason = "length"
                continue
            conversation.add_context(delta.token_ids)
            conversation.messages.append(message)
            asked = Prompt(f"{name}/turn-{number}", conversation.context(), "", prompt.data_source)
            turns.append((asked, turn_sampling(sampling_of(sampling, prompt.uid, rollout.sample_index), number, room), name))
            of_turn[asked.uid] = conversation
        ids = pool.ask(turns)
        try:
            for turn in pool.completed(only=ids):
                of_turn[turn.prompt.uid].add_turn(turn, str(turn.text))
        except BaseException:
            pool.forget(ids)
            raise
        pool.rest()
        return [
            conversation.joined(rollout.sample_index, "tokens" if conversation.finish_reason == "length" else "done")
            for rollout, conversation in zip(rollouts, conversations, strict=True)
        ]

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with their rewards, which the step then does not ask for again."""
        return self._session.rewarded(rollouts)

    def prompt(self, source: Prompt, content: str | Sequence[Message] | Sequence[int] | np.ndarray) -> Prompt:
        """Return a prompt of the same row with another text, chat messages or token ids. Its rollouts are another group.

        Raises DataError for messages that the chat template refuses, ValueError for more than data.max_prompt_length tokens.
        """
        renderer, messages = self._session.selection.data.renderer, None
        if isinstance(content, str) or (len(content) and isinstance(content[0], dict)):
            asked: Any = content if isinstance(content, str) else list(content)
            with at("a rollout function's prompt"):
                text = renderer.render(asked)
            (token_ids,) = renderer.tokenize([asked], [text])
            text, messages = unmarked(text), renderer.messages(asked)
        else:
            token_ids = [int(cast(int, token)) for token in content]
            text = renderer.tokenizer.decode(token_ids)
        if not 0 < len(token_ids) <= self._config.data.max_prompt_length:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens: from 1 to data.max_prompt_length={self._config.data.max_prompt_length}"
            )
        number = self._num_prompts[source.uid] = self._num_prompts[source.uid] + 1
        uid = f"p{number}.{source.uid}"
        return Prompt(uid, np.array(token_ids), text, source.data_source, source.ground_truth, source.extra_info, messages)

    def played(self, name: str, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Return what a rollout function makes of the prompts. Raises FunctionError if these are no rollouts."""
        answer: Any = ROLLOUTS.get(name)(self, list(prompts))
        if not isinstance(answer, list | tuple) or not answer or not all(isinstance(entry, Rollout) for entry in answer):
            raise FunctionError(f"rollout function {name} returned {str(answer)[:80]}; it returns a list of rollouts")
        numbers = Counter[str]()
        for rollout in answer:
            rollout.sample_index, numbers[rollout.prompt.uid] = numbers[rollout.prompt.uid], numbers[rollout.prompt.uid] + 1
        return list(answer)

    @cached_property
    def _deltas(self) -> ChatDeltas:
        renderer = self._session.selection.data.renderer
        deltas = ChatDeltas(renderer, renderer.tokenizer, frozenset({renderer.turn_end}))
        if renderer.has_template:
            deltas.check(("user",))
        return deltas
