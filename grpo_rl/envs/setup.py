from __future__ import annotations

import dataclasses
from typing import Any

from grpo_rl.config.schema.tree import Config, DataConfig, MultiTurnConfig
from grpo_rl.data.chat_deltas import ChatDeltas
from grpo_rl.data.prompts import Renderer
from grpo_rl.envs.environments import TOOLS, Named, class_of, interaction_file, tools_of
from grpo_rl.envs.episode_pool import Environments, EpisodePool, TurnPool
from grpo_rl.envs.runtime.episode_host import EpisodeHost, HostSetup
from grpo_rl.envs.tool_formats import argument_problem, check_format
from grpo_rl.errors import ConfigError
from grpo_rl.frozen import frozen


@frozen
class EpisodeSetup:
    config: Config
    host: HostSetup
    schemas: tuple[dict[str, Any], ...]
    """As the chat template shows them."""

    @staticmethod
    def of(config: Config) -> EpisodeSetup | None:
        """None if the run has no episodes. Raises ConfigError with all problems."""
        if not config.plays_episodes:
            return None
        multi_turn, problems = config.rollout.multi_turn, list[str]()
        try:
            host = _host(multi_turn)
            # Environment and tools are made once here, which shows what is wrong with them.
            schemas = tuple(EpisodeHost(host).schemas.values())
            for schema in schemas:
                argument_problem(schema, {})
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"the schema of a tool: {error}")
        if multi_turn.tools or multi_turn.tool_config_path is not None:
            try:
                check_format(multi_turn.format)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError([f"actor_rollout_ref.rollout.multi_turn: {problem}" for problem in problems])
        tools = tuple(dataclasses.replace(named, schema=schema) for named, schema in zip(host.tools, schemas, strict=True))
        tool_schemas = tuple({"type": "function", "function": schema} for schema in schemas)
        return EpisodeSetup(config, dataclasses.replace(host, tools=tools), tool_schemas)

    def data(self, tokenizer: Any) -> DataConfig:
        """Prompts show the tools, but not those of embedded models, which know them from their warm start."""
        from grpo_rl.models.builtin import CHAT_TEMPLATE

        data = self.config.data
        if not self.schemas or getattr(tokenizer, "chat_template", None) == CHAT_TEMPLATE:
            return data
        kwargs = {"tools": list(self.schemas), **data.apply_chat_template_kwargs}
        return dataclasses.replace(data, apply_chat_template_kwargs=kwargs)

    @property
    def roles(self) -> tuple[str, ...]:
        """Of messages between assistant turns."""
        tool = ("tool",) if self.schemas else ()
        return tool if self.host.environment is None else (*tool, "user")

    def deltas(self, tokenizer: Any, stop_ids: frozenset[int]) -> ChatDeltas:
        return ChatDeltas(Renderer(self.data(tokenizer), tokenizer), tokenizer, stop_ids)

    def check(self, tokenizer: Any) -> list[str]:
        """Notes about the chat template. Raises ConfigError if episodes cannot be played with it."""
        renderer = Renderer(self.data(tokenizer), tokenizer)
        if not renderer.has_template:
            return []
        names = [schema["function"]["name"] for schema in self.schemas]
        return self.deltas(tokenizer, frozenset()).check(self.roles, names)

    @property
    def runs_code(self) -> bool:
        return any(class_of(tool.name, TOOLS, "tool") is class_of("python", TOOLS, "tool") for tool in self.host.tools)

    def pool(
        self, turns: TurnPool, environments: Environments, tokenizer: Any, stop_ids: frozenset[int], max_model_len: int
    ) -> EpisodePool:
        multi_turn = self.config.rollout.multi_turn
        return EpisodePool(
            turns,
            environments,
            self.deltas(tokenizer, stop_ids),
            max_model_len=max_model_len,
            max_turns=max_turns(multi_turn),
            timeout_s=multi_turn.episode_timeout_s,
            retries=multi_turn.environment.retries,
            quiet_s=self.config.trainer.step_timeout_s,
        )


def max_turns(own: MultiTurnConfig) -> int | None:
    """The limit on assistant turns, or one more than that on the answers."""
    limits = [own.max_assistant_turns, None if own.max_user_turns is None else own.max_user_turns + 1]
    return min((limit for limit in limits if limit is not None), default=None)


def _host(own: MultiTurnConfig) -> HostSetup:
    environment = own.environment
    named = None if environment.name is None else Named(environment.name, dict(environment.options))
    if own.interaction_config_path is not None:
        named = interaction_file(own.interaction_config_path)
    return HostSetup(
        environment=named,
        tools=tuple(tools_of(own.tool_config_path, own.tools)),
        format=own.format,
        tool_timeout_s=environment.tool_timeout_s,
        max_parallel_calls=own.max_parallel_calls,
        max_tool_response_length=own.max_tool_response_length,
        truncate_side=own.tool_response_truncate_side,
    )
