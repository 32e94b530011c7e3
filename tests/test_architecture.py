"""The house rules that a machine can check: who may import whom, and what is never done."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import yaml

from grpo_rl.config.function_options import CHOICES
from grpo_rl.config.recipes import conf
from grpo_rl.config.schema.fields import flat, leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
PACKAGE = ROOT / "grpo_rl"

FLOORS = {
    "frozen": -1,
    "types": 0,
    "background": 0,
    "columns": 0,
    "control_words": 0,
    "episode": 0,
    "registry": 0,
    "errors": 0,
    "run_files": 0,
    "arguments": 0,
    "hub": 0,
    "installed": 0,
    "faults": 0,
    "processes": 0,
    "machine_memory": 0,
    "gpu_allocator": 0,
    "freed_memory": 0,
    "source_code": 0,
    "config": 0,
    "protocols": 1,
    "algos": 1,
    "data": 1,
    "rewards": 1,
    "telemetry": 1,
    "models": 1,
    "rollout": 1,
    "checkpoint": 1,
    "envs": 2,
    "trainer": 2,
    "schedules": 2,
    "workers": 2,
    "evaluation": 2,
    "run_folder": 2,
    "cluster": 3,
    "plan": 3,
    "sweep": 3,
    "main": 4,
    "commands": 4,
    "__main__": 5,
    "api": 5,
    "testing": 5,
}
NEIGHBOURS = {
    # What a child prints is written down with secrets hidden.
    ("processes", "config"),
    # How much a process keeps depends on how much the machine has.
    ("freed_memory", "machine_memory"),
    # A schedule declares on its function whether it samples while it trains.
    ("config", "registry"),
    # A rollout holds arrays, or views of blocks of them.
    ("types", "columns"),
    # A rollout of several turns contains their record.
    ("types", "episode"),
    # What the plan decides is carried out by the cluster.
    ("cluster", "plan"),
    # Every run of a sweep is planned before the first one starts.
    ("sweep", "plan"),
    # Weights travel to engines by the names that files have, which the trainer's model reads too.
    ("rollout", "models"),
    # A checkpoint holds a sharded model's state.
    ("checkpoint", "models"),
    # What a role says it has written.
    ("protocols", "checkpoint"),
    # A reward function is tried on rows that are read as a run reads them.
    ("rewards", "data"),
    # A schedule is a loop over the verbs of a session.
    ("schedules", "trainer"),
    # The dry run is the command that trains, with one word more.
    ("commands", "main"),
    # A game is one file: its rows and the environment that plays them.
    ("data", "envs"),
    # The answer in an original solution is found as a rule finds it in a response.
    ("data", "rewards"),
}
LIBRARIES = {
    "ray": lambda file: file.startswith("cluster/"),
    "vllm": lambda file: file.startswith("rollout/vllm/"),
    "hydra": lambda file: file.startswith("config/") or file in ("main.py", "sweep/points.py"),
    "omegaconf": lambda file: file.startswith("config/") or file == "main.py",
}


@cache
def names() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@cache
def text_of(file: str) -> str:
    return (PACKAGE / file).read_text(encoding="utf-8")


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(text_of(file))


@cache
def nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(tree(file)))


@cache
def imports(file: str) -> list[tuple[str, int, bool]]:
    """Modules that `file` imports: dotted name, line, and whether only for the type checker."""
    return list(found_imports(file))


def found_imports(file: str) -> Iterator[tuple[str, int, bool]]:
    only_types = {
        id(inner)
        for node in nodes(file)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in only_types
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                # `from grpo_rl import plan` imports a module, `from grpo_rl.plan.decisions import Plan` a name of one.
                dotted = f"{node.module}.{alias.name}"
                yield dotted if is_module(dotted) else node.module, node.lineno, id(node) in only_types


@cache
def is_module(dotted: str) -> bool:
    path = PACKAGE.parent / dotted.replace(".", "/")
    return dotted.startswith("grpo_rl.") and (path.with_suffix(".py").is_file() or path.is_dir())


def room(dotted: str) -> str:
    """`config` for grpo_rl.config.schema.tree, `plan` for grpo_rl.plan.decisions, empty for grpo_rl itself."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def room_of(file: str) -> str:
    """The room that a file lies in."""
    return file.split("/")[0].removesuffix(".py")


def test_every_file_is_on_a_floor() -> None:
    assert {room_of(file) for file in names()} - {"__init__"} <= set(FLOORS)


def every_file(broken: Callable[[str], Iterator[str]]) -> None:
    """Fails with every place in the package if a rule is broken."""
    places = [f"{file}:{place}" for file in names() for place in broken(file)]
    assert not places, "\n" + "\n".join(places)


def test_imports_go_down_only() -> None:
    def broken(file: str) -> Iterator[str]:
        here = room_of(file)
        for module, line, only_types in imports(file):
            there = room(module)
            if here == "__init__" and module.startswith("grpo_rl.") and not only_types:
                yield f"{line}: imports {module}"
            elif module.split(".")[0] != "grpo_rl" or there in ("", "errors", here) or only_types:
                continue
            elif FLOORS[there] >= FLOORS[here] and (here, there) not in NEIGHBOURS:
                yield f"{line}: {here} (floor {FLOORS[here]}) imports {module} (floor {FLOORS[there]})"

    every_file(broken)


def test_heavy_libraries_stay_in_their_rooms() -> None:
    def broken(file: str) -> Iterator[str]:
        for module, line, only_types in imports(file):
            library = module.split(".")[0]
            if library in LIBRARIES and not only_types and not LIBRARIES[library](file):
                yield f"{line}: imports {library}"

    every_file(broken)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count: a circle that one of them hides is a circle."""
    graph: dict[str, set[str]] = {}
    for file in names():
        module = "grpo_rl." + file.removesuffix(".py").replace("/", ".")
        graph[module.removesuffix(".__init__")] = {name for name, _, only_types in imports(file) if not only_types}
    for start in graph:
        path = cycle_from(start, graph)
        assert not path, " -> ".join(path)


def cycle_from(start: str, graph: dict[str, set[str]]) -> list[str]:
    """A path from `start` back to itself, empty if there is none."""
    paths, seen = [[start]], set()
    while paths:
        path = paths.pop()
        for following in graph.get(path[-1], ()):
            if following == start:
                return [*path, start]
            if following not in seen:
                seen.add(following)
                paths.append([*path, following])
    return []


def test_package_files_are_empty() -> None:
    packages = [file for file in names() if file.endswith("/__init__.py")]
    assert packages and [file for file in packages if (PACKAGE / file).read_text()] == []


RUNS_WHAT_IT_READS = {
    *("eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"),
    *("pickle.load", "pickle.loads", "cloudpickle.loads", "cloudpickle.load"),
}


def test_nothing_runs_what_it_reads() -> None:
    """No eval, no exec, no pickle.load, no torch.load that would run code from a file."""

    def broken(file: str) -> Iterator[str]:
        for node in calls(file):
            called = dotted_name(node.func)
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            shell, trusting = options.get("shell"), options.get("weights_only")
            if called in RUNS_WHAT_IT_READS:
                yield f"{node.lineno}: {called}"
            if isinstance(shell, ast.Constant) and shell.value is True:
                yield f"{node.lineno}: shell=True"
            if isinstance(trusting, ast.Constant) and trusting.value is False:
                yield f"{node.lineno}: weights_only=False"
            if called == "torch.load" and trusting is None:
                yield f"{node.lineno}: torch.load says weights_only=True"

    every_file(broken)


def calls(file: str) -> Iterator[ast.Call]:
    return (node for node in nodes(file) if isinstance(node, ast.Call))


def dotted_name(node: ast.expr) -> str:
    """Return `a.b.c` for a name with dots, by the shortest way, and the source of any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return ast.unparse(node)


WAITS = {"join", "result", "get", "wait", "wait_for", "recv", "accept", "communicate"}
TIMED_CALLS = {"ray.get", "ray.wait", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
ENDLESS_WAITS = {
    ("envs/endpoint.py", "_next"): "the next request of an agent, or its end: cancelled at environment.step_timeout_s",
    (
        "rewards/runtime/processes.py",
        "_work",
    ): "a daemon thread that has nothing to do: whoever wants its result has a deadline",
    ("rewards/models/judge.py", "_answer"): "a question's turn: each request before it has reward.judge.deadline_s",
    ("processes/child.py", "_exactly"): "a child with nothing to do; it ends when the run's side of the channel closes",
    ("trainer/stopping.py", "_watch"): "a daemon thread that has nothing to do until a signal comes, or `close`",
    ("api.py", "_wait"): "the run has deadlines of its own, and an interrupt ends the wait",
    ("telemetry/metrics/sinks.py", "_run"): "a daemon thread that has nothing to do: `close` waits for it with a deadline",
}
"""File and function that may wait without a deadline, with the reason."""


def endless_waits(module: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the function of each wait without a deadline among a module's nodes.

    Of the methods only those without an argument count: `d.get(key)` and `",".join(names)` wait for nobody.
    """
    functions = [node for node in module if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in module:
        if not isinstance(node, ast.Call):
            continue
        called = dotted_name(node.func)
        timeouts = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "timeout_s")]
        if any(not (isinstance(value, ast.Constant) and value.value is None) for value in timeouts):
            continue
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        waits = method in WAITS and (len(node.args) == (method == "wait_for") or method == "recv")
        inside = [function for function in functions if function.lineno <= node.lineno <= (function.end_lineno or 0)]
        # A socket's deadline is set beside the call and not in it.
        is_timed_socket = method in ("recv", "accept") and any(".settimeout(" in ast.unparse(function) for function in inside)
        if called in TIMED_CALLS or called == "dist.init_process_group" or (waits and not is_timed_socket):
            yield max(inside, key=lambda f: f.lineno).name if inside else ""


def test_every_wait_has_a_deadline_but_for_those_with_a_reason() -> None:
    assert {(file, function) for file in names() for function in endless_waits(nodes(file))} == set(ENDLESS_WAITS)


def test_the_wall_clock_is_read_only_to_be_written_down() -> None:
    # It jumps: deadlines and order go by the monotonic clock and by step numbers.
    stamps = {f"telemetry/metrics/{name}.py" for name in ("metrics_file", "sinks")} | {
        "telemetry/status.py",
        "telemetry/page/page_file.py",
        "envs/chat_format.py",
        "faults.py",
    }
    readers = {path for path in PACKAGE.rglob("*.py") if "time.time()" in path.read_text(encoding="utf-8")}
    assert {str(path.relative_to(PACKAGE)) for path in readers} == stamps


def test_no_pattern_repeats_a_group_possessively_which_python_before_3_11_5_gets_wrong() -> None:
    def broken(file: str) -> Iterator[str]:
        lines = enumerate((PACKAGE / file).read_text().splitlines(), 1)
        return (f"{number}: {line.strip()}" for number, line in lines if re.search(r"\)[+*?]\+|\(\?>", line))

    every_file(broken)


def test_no_except_is_bare() -> None:
    def broken(file: str) -> Iterator[str]:
        handlers = (node for node in nodes(file) if isinstance(node, ast.ExceptHandler))
        return (f"{handler.lineno}: except without a type" for handler in handlers if handler.type is None)

    every_file(broken)


def test_every_key_of_the_configuration_is_read_where_it_has_an_effect() -> None:
    talk = ("config/effects.py", "config/checks/all_rules.py", "plan/text.py", "plan/memory.py")
    declarations = tuple(file for file in names() if file.startswith("config/schema/") and not file.endswith("tree.py"))
    readers = [file for file in names() if file not in (*talk, *declarations) and not file.startswith("config/checks/")]
    read = {node.attr for file in readers for node in nodes(file) if isinstance(node, ast.Attribute)}
    # Options of the algorithm's functions are read by name, through one table; that each of them has an effect is tested by
    # tests/unit/algos/test_no_option_is_silent.py.
    for choice in CHOICES:
        keys = (choice.key, choice.options_key, *choice.fixed)
        read |= {key.rpartition(".")[2] for key in keys}
    unread = [key for key in leaves() if key.rpartition(".")[2] not in read]
    # Both of its values mean FSDP2: the key is there so that verl's commands run.
    assert unread == ["actor_rollout_ref.actor.strategy"]


def test_conf_base_is_the_schema() -> None:
    from conf_base import base_files

    files = {path.name: path.read_text() for path in (conf() / "base").iterdir()}
    assert files == base_files(), "python scripts/conf_base.py"
    defaults = {key: value for text in files.values() for key, value in flat(yaml.safe_load(text)).items()}
    assert defaults == {key: leaf.default for key, leaf in leaves().items()}


def loaded(stages: Sequence[str], modules: set[str]) -> list[list[str]]:
    """Return those of `modules` that are loaded after each stage of a program in a fresh process."""
    print_loaded = f"import sys, json; print('loaded', json.dumps(sorted({modules!r} & set(sys.modules))))"
    program = "\n".join(line for stage in stages for line in (stage, print_loaded))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [json.loads(line.removeprefix("loaded ")) for line in done.stdout.splitlines() if line.startswith("loaded ")]


def test_the_configuration_loads_nothing_heavy() -> None:
    parts = ["schema.tree", "compose", "checks.all_rules", "derived"]
    heavy = loaded([f"import grpo_rl.config.{part}" for part in parts], {"torch", "ray", "vllm", "transformers", "numpy"})
    assert dict(zip(parts, heavy, strict=True)) == {part: [] for part in parts}


def test_a_worker_sets_its_environment_before_torch_is_loaded() -> None:
    assert loaded(["import grpo_rl.cluster.processes.worker_group"], {"torch", "transformers", "vllm"}) == [[]]


def test_the_mathematics_a_replica_the_plan_and_the_controller_load_no_more_than_they_need() -> None:
    modules = [file.removesuffix(".py").replace("/", ".") for file in names() if file.startswith("algos/")]
    mathematics = "import " + ", ".join(f"grpo_rl.{module.removesuffix('.__init__')}" for module in modules)
    rollout = "import grpo_rl.rollout.senders, grpo_rl.rollout.engine_environment, grpo_rl.workers.rollout"
    plan = "from grpo_rl.main import main; main(['trainer.dry_run=true', 'trainer.device=cpu'])"
    started = (
        "cluster.run_session",
        "cluster.inputs",
        "cluster.warm_start",
        "cluster.start_roles",
        "trainer.run",
        "schedules.registered",
    )
    controller = "import transformers.utils.logging, " + ", ".join(f"grpo_rl.{module}" for module in started)
    # vllm and what follows it take seconds, and only workers need them; pyarrow is for runs that read its files.
    heavy = {"torch", "ray", "transformers", "hydra", "omegaconf", "rich", "pyarrow", "vllm"}
    heavy |= {"torch.distributed.fsdp", "torch._dynamo"}
    of_plan = ["hydra", "omegaconf", "torch"]
    of_controller = ["hydra", "omegaconf", "ray", "rich", "torch", "transformers"]
    assert loaded([mathematics, rollout, plan, controller], heavy) == [["torch"], ["torch"], of_plan, of_controller]
