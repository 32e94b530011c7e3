"""The command: `python -m grpo_rl.main recipe=arithmetic/grpo key=value ...`."""

from __future__ import annotations

import errno
import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpo_rl
from grpo_rl import faults
from grpo_rl.config.secrets import redact
from grpo_rl.errors import ConfigError, GrpoRlError, Preempted, StoppedByAlarm, details, exit_code_of, headline
from grpo_rl.telemetry.terminal.standard_streams import make_lasting

if TYPE_CHECKING:
    from grpo_rl.config.schema.tree import TrainerConfig
    from grpo_rl.plan.decisions import Plan

_USAGE = """\
usage: python -m grpo_rl.main [recipe=NAME|FILE.yaml] [key=value ...] [--multirun | --cfg | --help | --version]

Trains a language model with reinforcement learning. Without a recipe, a model and data, the embedded
model learns the embedded task (recipe=arithmetic/grpo).

  actor_rollout_ref.model.path=FOLDER       the model, a Hugging Face folder
  data.train_files=FILE data.val_files=FILE parquet, json or jsonl in verl's row format, task:NAME or reasoning_gym:NAME
  data.train_batch_size=1024                prompts per training step
  actor_rollout_ref.rollout.n=8             responses per prompt
  actor_rollout_ref.actor.optim.lr=1e-6     learning rate
  actor_rollout_ref.actor.kl_loss_coef=0.001  weight of the KL to the reference (use_kl_loss=false: none)
  reward.functions=[auto,0.2*format]        rewards; your own as path/to/file.py:function
  trainer.total_training_steps=100          length of the run
  trainer.n_gpus_per_node=8 trainer.nnodes=1  devices
  trainer.test_freq=10 trainer.save_freq=10 validate and save every so many steps
  trainer.experiment_name=NAME              name the run; the same name resumes it
  trainer.dry_run=true                      print the plan and stop

  ~key        back to the default, whatever the recipe says
  seed=1      all seeds at once: of new weights, of the data's order, of sampling
  --multirun  (-m) a run for each value: seed=1,2,3 actor_rollout_ref.actor.optim.lr=1e-6,1e-5; one after the other, or with
              sweep.halving=true the worse half no further than a quarter of the steps
  --cfg       print the whole configuration as YAML and stop
All keys with their meaning: docs/configuration.md. verl's launch commands work where the meaning exists.
recipes: """


REFUSAL = "this configuration cannot be run"


def main(argv: Sequence[str] | None = None, on_error: Callable[[BaseException], None] = lambda error: None) -> int:
    """Run the command line `argv` (this process's, if None), and return the exit code.

    What each code says is in `errors.EXIT_CODES`. A failure is printed on stderr: its cause in one line, details, the logs.
    `on_error` gets the exception too.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        make_lasting()
    # Imports make a million objects that stay, and a collection looks at all of them again and again. `train` enables it.
    gc.disable()
    try:
        return exit_code_after(lambda: _answer(words) if _is_question(words) else _run(words), on_error=on_error)
    finally:
        gc.enable()
        # A run freezes what it has imported. At the interpreter's end libraries complain on the screen of what stays (nanobind).
        gc.unfreeze()


def exit_code_after(
    work: Callable[[], int],
    refusal: str = REFUSAL,
    on_error: Callable[[BaseException], None] = lambda error: None,
) -> int:
    """Do the work of a command, and return its exit code; print a failure on stderr instead of a traceback.

    `refusal` stands before the list of what is wrong with the words. `on_error` gets the exception too.
    """
    try:
        try:
            return work()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            # No name of ours is that long: it was given.
            raise ConfigError(f"{str(error.filename)[:60]}...: {error.strerror}") from error
    except (GrpoRlError, Preempted) as error:
        _explain(error, refusal)
        on_error(error)
        return error.exit_code
    except KeyboardInterrupt as error:
        print("\ninterrupted", file=sys.stderr)
        on_error(error)
        return exit_code_of(error)
    except ModuleNotFoundError as error:
        print(redact(f"error: {headline(error)}"), file=sys.stderr)
        on_error(error)
        return exit_code_of(error)
    except Exception as error:  # the last resort: whatever it is, the user gets a line and a file, not a wall of text
        print(redact(f"unexpected {headline(error)}"), file=sys.stderr)
        place = _traceback_file(error)
        print(f"  the traceback is in {place}", file=sys.stderr)
        error.add_note(f"the traceback is in {place}")
        on_error(error)
        return exit_code_of(error)


def _is_question(words: list[str]) -> bool:
    return bool({"--help", "-h", "--version"} & set(words))


def _answer(words: list[str]) -> int:
    if "--version" in words:
        print(f"grpo_rl {grpo_rl.__version__}")
    else:
        from grpo_rl.config.recipes import known_recipes

        print(_USAGE + ", ".join(known_recipes()))
    return 0


def _run(words: list[str]) -> int:
    # Imported here, as whatever takes time: a Ctrl-C meanwhile ends as any other does.
    from grpo_rl.config.compose import compose
    from grpo_rl.telemetry.rundir import refuse_taken

    only_config, words = _take_cfg(words)
    if {"--multirun", "-m"} & set(words):
        if only_config:
            raise ConfigError(
                "--cfg: a sweep has several configurations; leave out --multirun, and give one value for each key"
            )
        from grpo_rl.sweep.run_all import run_sweep

        faults.arm()
        return run_sweep([word for word in words if word not in ("--multirun", "-m")])
    composed = compose(words)
    faults.arm()
    if only_config:
        print(composed.yaml(), end="")
        return 0
    trainer = composed.config.trainer
    if not trainer.dry_run:
        # At once, and not after the seconds that a plan takes; the folder is locked when the run has one.
        refuse_taken(trainer.default_local_dir, trainer.experiment_name)
    # Imported late: a misspelt key is refused before torch is loaded.
    from grpo_rl.plan.make import make_plan

    plan = make_plan(composed)
    if trainer.dry_run:
        print(redact(plan.render()))
        _print_pace(trainer, plan)
        return 0
    from grpo_rl.cluster.launch import run

    return run(composed, plan)


def _print_pace(trainer: TrainerConfig, plan: Plan) -> None:
    """Print what a run of this name has measured, as an estimate of the one that is planned; nothing without such a run."""
    if trainer.experiment_name is None:
        return
    from grpo_rl.telemetry.report import measured_pace

    pace = measured_pace(Path(trainer.default_local_dir).expanduser() / trainer.experiment_name, plan.sizes.total_steps)
    if pace is not None:
        print(redact(f"estimate\n  time        {pace}"))


def _take_cfg(words: list[str]) -> tuple[bool, list[str]]:
    """Return whether --cfg (or -c, in Hydra's spelling `--cfg job`) is among the words, and the other words."""
    rest: list[str] = []
    found = False
    for word in words:
        if word in ("--cfg", "-c", "--cfg=job"):
            found = True
        elif not (word == "job" and found):
            rest.append(word)
    return found, rest


def _explain(error: GrpoRlError | Preempted, refusal: str = REFUSAL) -> None:
    if not isinstance(error, ConfigError):
        kind = "stopped" if isinstance(error, Preempted | StoppedByAlarm) else "error"
        print(redact(f"{kind}: {headline(error)}"), file=sys.stderr)
        # A worker's last words are in its log; the traceback of this process in its own.
        for line in [*details(error), *getattr(error, "__notes__", [])]:
            print(redact(f"  {line}"), file=sys.stderr)
        return
    count = "1 problem" if len(error.problems) == 1 else f"{len(error.problems)} problems"
    print(f"{refusal}, {count}:", file=sys.stderr)
    for problem in error.problems:
        print(redact(f"  • {problem}"), file=sys.stderr)


def _traceback_file(error: Exception) -> str:
    """Return the file that the traceback is in: it is in the run's logs, or, where the run had none yet, in a file made now."""
    for note in getattr(error, "__notes__", []):
        if note.startswith("log: "):
            return str(note.removeprefix("log: "))
    descriptor, path = tempfile.mkstemp(prefix="grpo_rl-", suffix=".traceback.txt")
    with os.fdopen(descriptor, "w") as file:
        file.write(redact(traceback.format_exc()))
    return path


if __name__ == "__main__":
    sys.exit(main())
