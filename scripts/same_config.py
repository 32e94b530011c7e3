"""Compare what the recipes and the tests' commands of verl's compose here and in another revision: same_config.py REVISION

Prints each key whose value differs, and ends with 1 if there is one. Keys that one of the two does not have count as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = """
import json, sys
from config_tools import verls_commands
from grpo_rl.config import recipes
from grpo_rl.config.compose import compose
from grpo_rl.config.schema.fields import flat
from grpo_rl.errors import ConfigError
commands = {name: [f"recipe={name}"] for name in recipes.known_recipes()}
for name, words in verls_commands().items():
    commands[name] = ["-cn", "ppo_trainer", *(f"{key}={value}" for key, value in words.items())]
composed = {}
for name, words in commands.items():
    try:
        result = compose(words)
        composed[name] = flat(result.resolved) | {"notes": result.notes}
    except ConfigError as error:
        composed[name] = {"refused": error.problems}
json.dump(composed, sys.stdout)
"""


def composed_in(root: Path) -> dict[str, dict[str, object]]:
    """Return the configuration of each recipe and command as the package in `root` composes it, by dotted keys."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests" / "unit" / "config")])}
    output = subprocess.run([sys.executable, "-c", COMPOSE], cwd=root, env=environment, stdout=subprocess.PIPE, check=True)
    # The paths of a checkout are part of some values.
    composed: dict[str, dict[str, object]] = json.loads(output.stdout.decode().replace(str(root), "ROOT"))
    return composed


def main(revision: str) -> int:
    """Compare this checkout with a revision; 0 if everything is the same."""
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder).resolve() / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, revision], cwd=ROOT, check=True)
        try:
            old, new = composed_in(other), composed_in(ROOT)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    differences = [
        f"{name}: {key}: {old.get(name, {}).get(key)} -> {new.get(name, {}).get(key)}"
        for name in {**old, **new}
        for key in {**old.get(name, {}), **new.get(name, {})}
        if old.get(name, {}).get(key, "none") != new.get(name, {}).get(key, "none")
    ]
    print("\n".join([*differences, f"{len(new)} configurations, {len(differences)} differing values"]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
