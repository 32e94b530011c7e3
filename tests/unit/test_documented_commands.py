"""Every command and every `key=value` in the README, the documents and the recipes' pages is one that works, tried dry."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from compositions import compose
from safetensors.torch import save_file

import grpo_rl
from grpo_rl.config.convert import value_problem
from grpo_rl.config.derived import Machine
from grpo_rl.config.schema.fields import free_mapping, leaves, sections
from grpo_rl.config.verl.verl_answers import answer_for
from grpo_rl.plan.make import make_plan

ROOT = Path(grpo_rl.__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "recipes").rglob("README.md"))]
CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")
GPUS = Machine(num_gpus=8, num_cpus=64, device="cuda")
CLUSTER = Machine(num_gpus=8, num_cpus=64, device="cuda", cluster=True)

_RUNS = re.compile(r"(?:python -m grpo_rl\.main|bash scripts/submit\.sh)\s(?P<words>.*)")
_MODULE = re.compile(r"python -m (grpo_rl\.[\w.]+)(?P<words>[^`]*)")
_SPAN = re.compile(r"`([^`\n]+)`")
_SETTING = re.compile(r"[+~]*(?P<key>[a-z_]+(?:\.\w+)+)=(?P<value>[^\s|]+)")
_FILE_KEYS = ("data.train_files", "data.val_files", "data.val_prompt_files")


def blocks(page: Path) -> Iterator[str]:
    """Yield the logical lines of the shell blocks of a page, without comments."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def commands() -> dict[tuple[str, ...], list[str]]:
    """Return the pages on which each command stands."""
    pages: dict[tuple[str, ...], list[str]] = {}
    for page in PAGES:
        for line in blocks(page):
            match = _RUNS.search(line)
            if match is not None:
                text = match["words"].partition("; do")[0]
                given = shlex.split(text, comments=True)
                # A job file of a named machine is made, and not run here.
                given += ["trainer.dry_run=true"] if "--slurm" in given else []
                words = [word for word in given if "=" in word or word == "..."]
                # A sweep is planned by the first value of each list.
                swept = [first_value(word) for word in words if not word.startswith("hydra")]
                words = swept if "--multirun" in given else words
                pages.setdefault(tuple(words), []).append(str(page.relative_to(ROOT)))
    return pages


def first_value(word: str) -> str:
    key, _, values = word.partition("=")
    drawn = re.search(r"interval\(([^,]+)", values)
    return f"{key}={drawn[1] if drawn else values.partition(',')[0]}"


def settings() -> list[tuple[str, str, str]]:
    found = []
    for page in PAGES:
        for span in _SPAN.findall(page.read_text()):
            for match in _SETTING.finditer(span):
                if match["key"].partition(".")[0] in {name.partition(".")[0] for name in sections()}:
                    found.append((str(page.relative_to(ROOT)), match["key"], match["value"]))
    return list(dict.fromkeys(found))


def examples() -> dict[str, str]:
    """Return the Python files that the pages show whole, by the name in their first line; one name's functions together."""
    files: dict[str, str] = {}
    for page in PAGES:
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.DOTALL):
            files[name] = files.get(name, "") + code
    return files


COMMANDS, SETTINGS = commands(), settings()


def test_the_pages_have_the_commands_that_are_tried() -> None:
    assert len(COMMANDS) > 30 and len(SETTINGS) > 40
    assert {page for pages in COMMANDS.values() for page in pages} >= {
        "README.md",
        "docs/rewards.md",
        "recipes/README.md",
        "recipes/arithmetic/README.md",
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small real files under the names that the pages use: planning only reads them."""
    tmp_path = tmp_path_factory.mktemp("ground")
    row = {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}
    row |= {"response": "2", "chosen": "2", "rejected": "3"}
    rows = pa.Table.from_pylist([row | {"extra_info": {"index": index, "answer": "#### 2"}} for index in range(2048)])
    pyarrow.parquet.write_table(rows, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(2048)))
    (tmp_path / "my.yaml").write_text("defaults: [/recipe/arithmetic/grpo, _self_]\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, code in examples().items():
        (tmp_path / name).write_text(code)
    for page in PAGES:
        for name, content in re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```", page.read_text(), re.DOTALL):
            (tmp_path / name).write_text(content)
    people = {"messages": [{"role": "user", "content": "How old is Ada?"}], "age": 36}
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(people) + "\n" for _ in range(64)))
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    (scorer / "config.json").write_text(json.dumps(config))
    save_file({"score.weight": torch.zeros(1, 8)}, scorer / "model.safetensors")
    (scorer / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def ground(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `files`, which is the current one, and an environment as the pages assume it."""
    monkeypatch.chdir(files)
    monkeypatch.setenv("JUDGE_KEY", "a-key-of-the-test")
    return files


def filled(words: tuple[str, ...], ground: Path) -> list[str]:
    """Replace what a page leaves to the reader by the small files of `ground`."""
    given = ["recipe=arithmetic/grpo" if word == "recipe=..." else word for word in words if word != "..."]
    if "..." in words:
        # The page shows a part of a command only.
        given += ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
        if any("reward_model." in word for word in given) and "reward.reward_model.enable=true" not in given:
            given.append("reward.reward_model.enable=true")
    own_recipe = "recipe=./my.yaml" in given
    config = compose([word for word in given if not own_recipe or not word.startswith("recipe=")]).config
    replaced = {}
    for key in _FILE_KEYS:
        files = getattr(config.data, key.removeprefix("data."))
        lacking = [":" not in file and Path(file).suffix and not Path(file).is_file() for file in files]
        mine = [str(ground / f"rows{Path(file).suffix}") if lacks else file for file, lacks in zip(files, lacking, strict=True)]
        if mine != files:
            replaced[key] = "[" + ",".join(f"'{file}'" for file in mine) + "]"
    if config.trainer.schedule == "reward_model":
        embedded = config.reward.reward_model.model_path.startswith("builtin:")
        replaced |= {} if embedded else {"reward.reward_model.model_path": "builtin:arithmetic"}
    elif not config.actor_rollout_ref.model.path.startswith("builtin:"):
        replaced["actor_rollout_ref.model.path"] = "builtin:arithmetic"
        # The embedded model reads 64 tokens: what is tried is the command, not the model's size.
        short = {"data.max_prompt_length": "24", "data.max_response_length": "24"}
        replaced |= short if config.data.max_length is None else {"data.max_length": "48"}
    if config.reward.reward_model.enable:
        replaced["reward.reward_model.model_path"] = str(ground / "scorer")
    return [*(word for word in given if word.partition("=")[0] not in replaced), *(f"{k}={v}" for k, v in replaced.items())]


@pytest.mark.parametrize(
    "words", COMMANDS, ids=[f"{', '.join(dict.fromkeys(pages))}: {' '.join(words)[:60]}" for words, pages in COMMANDS.items()]
)
def test_a_documented_command_is_planned(words: tuple[str, ...], ground: Path) -> None:
    composed = compose(filled(words, ground))
    trainer = composed.config.trainer
    on_gpus = trainer.device == "cuda" or (trainer.n_gpus_per_node or 1) > 2
    machine = CLUSTER if trainer.nnodes > 1 else GPUS if on_gpus else CPU
    assert make_plan(composed, machine).render()


@pytest.mark.parametrize(("page", "key", "value"), SETTINGS, ids=[f"{page}: {key}={value}" for page, key, value in SETTINGS])
def test_a_documented_setting_is_one_that_a_key_takes(page: str, key: str, value: str) -> None:
    if free_mapping(key) is not None or answer_for(key) is not None:
        return
    assert key in leaves() or key in sections(), "unknown key"
    kind = leaves()[key].kind if key in leaves() else None
    if kind is not None and (kind.choices or kind.base in (int, float, bool)):
        for choice in value.rstrip(",;:").split("|"):
            if not choice.isupper() and choice not in ("...", "N"):
                assert value_problem(key, {"null": None}.get(choice, choice)) is None


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_documented_module_exists_and_has_the_options(page: Path) -> None:
    for match in _MODULE.finditer(page.read_text().replace("\\\n", " ")):
        spec = importlib.util.find_spec(match[1])
        assert spec is not None and spec.origin is not None, match[1]
        origin = Path(spec.origin)
        source = (origin.with_name("__main__.py") if origin.name == "__init__.py" else origin).read_text()
        source += (ROOT / "grpo_rl/config/command_line.py").read_text() if match[1] == "grpo_rl.main" else ""
        for option in re.findall(r"(--[a-z][\w-]+)", match["words"].splitlines()[0] if match["words"] else ""):
            assert f'"{option}"' in source, f"{match[1]} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_documented_script_exists(page: Path) -> None:
    for name in set(re.findall(r"\bscripts/[\w.-]+\.(?:sh|py)\b", page.read_text())):
        assert (ROOT / name).is_file(), name
