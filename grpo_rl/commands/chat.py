"""`grpo-rl chat RUN[@step]`: talk to a policy in the terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_rl.arguments import Arguments, whole_number
from grpo_rl.commands.sampling_plan import EPISODES, NO_DATA, add_engine_options, option_keys, sampling_plan, settings_of_run
from grpo_rl.commands.targets import find_target, model_folder
from grpo_rl.control_words import unmarked
from grpo_rl.data.rows import at
from grpo_rl.errors import ConfigError
from grpo_rl.telemetry.rundir import RunDir
from grpo_rl.telemetry.terminal.console import Console
from grpo_rl.telemetry.terminal.text import safe_text, say

if TYPE_CHECKING:
    from grpo_rl.cluster.sampling import Sampler
    from grpo_rl.config.schema.tree import Config
    from grpo_rl.data.prompts import Renderer
    from grpo_rl.types import Prompt

WORDS = "/reset forgets the conversation, /quit ends"


@dataclass
class Conversation:
    renderer: Renderer
    longest: int
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, uid: str) -> Prompt:
        """Add a user's turn, and return the prompt for the answer. Raises ConfigError if it is too long."""
        import numpy as np

        from grpo_rl.types import Prompt

        self.turns.append({"role": "user", "content": text})
        rendered, ids = self._rendered()
        if not 0 < len(ids) <= self.longest:
            self.turns.pop()
            raise ConfigError(
                f"with this the conversation has {len(ids)} tokens, and there is room for 1 to {self.longest}: {WORDS}"
            )
        return Prompt(uid, np.asarray(ids), rendered, "chat")

    def answered(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def _rendered(self) -> tuple[str, list[int]]:
        words = self.renderer.words
        if not self.renderer.has_template:
            text = words.marked("".join(turn["content"] for turn in self.turns))
            return unmarked(text), words.ids(text, add_special_tokens=True)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        with at("the conversation"):
            text = self.renderer.text([*system, *self.turns])
        return unmarked(text), words.ids(text)


def main(argv: Sequence[str]) -> int:
    options, words = _parser().read_with_settings(argv)
    target = find_target(options.target, trusted=options.trust_run)
    # Progress is no answer either.
    console = Console(None if sys.stdin.isatty() else sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="grpo-chat-"))
    with ExitStack() as stack:
        stack.callback(console.close)
        stack.push(partial(_remove, folder))
        model = model_folder(target, console, trusted=options.trust_run)
        # A person takes the place of rewards and environments.
        keys = settings_of_run(target.run, options.engine, words, trusted=options.trust_run, without=("reward.", EPISODES))
        keys |= _keys(options, model, words)
        plan, _ = sampling_plan(keys, words, model, folder / "settings.yaml")
        if plan.lacks:
            raise ConfigError(plan.lacks)
        from grpo_rl.cluster.sampling import sampler, sampling_session, unscored

        plan = unscored(plan)
        session = stack.enter_context(sampling_session(plan, RunDir(folder), console))
        started = stack.enter_context(sampler(session, plan))
        session.phase("gen")
        _talk(plan.config, started, options, target.label)
    return 0


def _remove(folder: Path, failure: type[BaseException] | None, *_: object) -> None:
    """Remove a conversation's folder, unless it has logs that an error names."""
    if failure is None or not any(folder.rglob("*.log")):
        shutil.rmtree(folder, ignore_errors=True)


def _talk(config: Config, sampler: Sampler, options: argparse.Namespace, label: str) -> None:
    from grpo_rl.data.prompts import Renderer
    from grpo_rl.trainer.parts import validation_sampling

    sampling = validation_sampling(config)
    renderer = Renderer(config.data, sampler.tokenizer)
    talk = Conversation(renderer, config.data.max_prompt_length, options.system or config.data.system_prompt)
    if talk.system is not None and not renderer.has_template:
        raise ConfigError("--system needs a chat template, which this model does not have")
    _note(f"{label}: {'conversation' if renderer.has_template else 'no chat template: it continues your text'}. {WORDS}.")
    numbers = itertools.count()
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            talk.turns.clear()
            _note("forgotten")
        elif line.startswith("/"):
            _note(f"there is no {line.split(' ')[0]}: {WORDS}")
        elif line:
            try:
                prompt = talk.ask(line, f"chat-{next(numbers)}")
            except ConfigError as error:
                _note(str(error))
                continue
            [rollout] = sampler.rollout.generate([prompt], 1, sampling)
            talk.answered(str(rollout.text))
            say(safe_text(str(rollout.text), keep_newlines=True))
            if rollout.finish_reason == "length":
                _note(f"(cut at {sampling.max_tokens} tokens: --max-tokens)")


def _lines() -> Iterator[str]:
    is_person = sys.stdin.isatty()
    if is_person:
        with suppress(ImportError):
            import readline  # noqa: F401  # editing of the line, and the lines before
    while True:
        try:
            yield input("you> " if is_person else "").strip()
        except EOFError:
            return


def _note(text: str) -> None:
    """From a pipe to the error stream: a script finds answers alone on the standard output."""
    say(text, sys.stdout if sys.stdin.isatty() else sys.stderr)


def _keys(options: argparse.Namespace, model: str, words: Sequence[str]) -> dict[str, Any]:
    """The conversation has the room that the model's positions leave beside the answer."""
    from grpo_rl.cluster.warm_start import unstarted_folder
    from grpo_rl.models.load import load_config

    own_code = any(word.lstrip("+") == "actor_rollout_ref.model.trust_remote_code=true" for word in words)
    config = load_config(unstarted_folder(model), trust_remote_code=own_code)
    positions = getattr(config, "max_position_embeddings", None)
    context = min(options.context, positions) if isinstance(positions, int) else options.context
    if options.max_tokens >= context:
        raise ConfigError(f"--max-tokens {options.max_tokens} leaves no room for a prompt in a context of {context} tokens")
    return option_keys(options, [NO_DATA]) | {
        "data.max_prompt_length": context - options.max_tokens,
        "actor_rollout_ref.rollout.max_num_seqs": 1,
        "trainer.n_gpus_per_node": 1,
    }


def _parser() -> Arguments:
    parser = Arguments(
        "chat",
        f"Talk to a model in the terminal. {WORDS}.\nFrom a pipe each line is one turn.",
        "grpo-rl chat runs/grpo_rl/my_run@40 --temperature 0.7\n  echo '918+9=' | grpo-rl chat builtin:arithmetic --engine hf",
    )
    parser.add_argument("target", metavar="RUN[@step]|MODEL", help="a run, RUN@40, RUN@start, a model's folder, builtin:NAME")
    parser.add_argument("--max-tokens", type=whole_number, default=512, metavar="N", help="longest answer in tokens (512)")
    parser.add_argument(
        "--context", type=whole_number, default=8192, metavar="N", help="tokens of conversation and answer (8192)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt (as the run has it)")
    add_engine_options(parser)
    parser.set_defaults(n=1, top_k=-1, limit=None)
    return parser
