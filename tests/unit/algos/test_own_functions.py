"""Functions of a user's own: the examples of the documents, what is refused before a run, and how a failure reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from compositions import compose
from objective_cases import inputs

from grpo_rl.algos import trial
from grpo_rl.algos.advantages.registered import ADVANTAGES
from grpo_rl.algos.losses.registered import POLICY_LOSSES
from grpo_rl.algos.objective import Objective
from grpo_rl.algos.trial import estimator_input
from grpo_rl.config.derived import Machine
from grpo_rl.errors import ConfigError, FunctionError, exit_code_of
from grpo_rl.plan.make import make_plan
from grpo_rl.types import Counts

ROOT = Path(__file__).resolve().parents[3]
A = "actor_rollout_ref.actor"
BASE = ["data.train_files=task:arithmetic?num_rows=64", "actor_rollout_ref.model.path=builtin:arithmetic"]
BASE += ["data.train_batch_size=16", f"{A}.ppo_mini_batch_size=8"]
CPU = Machine(num_gpus=0, num_cpus=2, device="cpu")


def page(*words: str) -> str:
    return " ".join(make_plan(compose([*BASE, *words]), CPU).render().split())


def write(folder: Path, body: str) -> Path:
    file = folder / "mine.py"
    head = "import torch\nfrom grpo_rl.algos.losses.registered import LossInput, TokenLoss, needs\n"
    file.write_text(head + "from grpo_rl.algos.advantages.registered import AdvantageOutput\n" + body)
    return file


def test_the_loss_of_the_first_page_is_short_and_runs_with_its_option(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n# my_loss\.py\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert 1 + len(code.strip().splitlines()) <= 15
    file = tmp_path / "my_loss.py"
    file.write_text(code)
    loss = f"{A}.policy_loss.loss_mode={file}:soft_clip"
    assert "pg = -A 0.3 tanh((r - 1) / 0.3); r = π / π_old" in page(loss)
    assert "-A 0.5 tanh((r - 1) / 0.5)" in page(loss, f"{A}.policy_loss.options={{width: 0.5}}")
    with pytest.raises(ConfigError, match=r"has no option widht\. Did you mean width"):
        page(loss, f"{A}.policy_loss.options={{widht: 0.5}}")
    with pytest.raises(ConfigError, match=r"clip_ratio=0\.1: has no effect with .*which has no option clip_low or clip_high"):
        page(loss, f"{A}.clip_ratio=0.1")

    policy_T = torch.zeros(2, requires_grad=True)
    objective = Objective(f"{file}:soft_clip", loss_options=(("width", 0.5),))
    total, stats = objective(inputs(policy_T, torch.tensor([1.0, -2.0]), [1, 1]), Counts(2, 2, 1))
    total.backward()
    assert policy_T.grad is not None and policy_T.grad.tolist() == [-0.5, 1.0]
    assert stats["max/ratio_max"] == 1.0


def test_a_loss_that_reads_the_reference_starts_it(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "@needs('ref_logprobs')\ndef declared(inputs):\n    return TokenLoss(inputs.policy_logprobs_T - inputs.ref_logprobs_T)\n"
        "def silent(inputs):\n    return TokenLoss(inputs.policy_logprobs_T - inputs.ref_logprobs_T)\n",
    )
    assert "reference 1 rank on the actor's devices, for the loss" in page(
        f"{A}.use_kl_loss=false", f"{A}.policy_loss.loss_mode={file}:declared"
    )
    with pytest.raises(ConfigError, match=r'ref_logprobs_T is None without @needs\("ref_logprobs"\)'):
        page(f"{A}.policy_loss.loss_mode={file}:silent")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def mine(inputs): return inputs.policy_logprobs_T", r"returns a tensor of shape \(192,\), not TokenLoss"),
        ("def mine(inputs): return TokenLoss(inputs.policy_logprobs_T.sum())", "as loss_T of 192 trained tokens"),
        (
            "@needs('refs')\ndef mine(inputs): return TokenLoss(inputs.policy_logprobs_T)",
            "needs 'refs', which nothing supplies",
        ),
        (
            "def mine(inputs):\n    return TokenLoss(inputs.segmentz)",
            r"(?s)no attribute 'segmentz'.*mine.py, line 5, in mine.*LossInput has .*segments",
        ),
    ],
)
def test_a_loss_that_does_not_keep_to_the_interface_is_refused_before_the_run(tmp_path: Path, body: str, why: str) -> None:
    file = write(tmp_path, body + "\n")
    with pytest.raises(ConfigError, match=why):
        page(f"{A}.policy_loss.loss_mode={file}:mine")


def test_a_failure_in_the_run_names_the_file_the_line_and_the_interface(tmp_path: Path) -> None:
    file = write(tmp_path, "def mine(inp):\n    return AdvantageOutput(inp.segments)\n")
    with pytest.raises(FunctionError) as caught:
        ADVANTAGES.get(f"{file}:mine")(estimator_input())
    message = str(caught.value)
    assert f"advantage estimator {file}:mine failed: AttributeError" in message
    assert f"in {file}, line 5, in mine: return AdvantageOutput(inp.segments)" in message
    assert "estimator(inp: AdvantageInput, *, option=default, ...) -> AdvantageOutput" in message
    assert "AdvantageInput has token_rewards_T, of_tokens_T, lengths_N" in message and exit_code_of(caught.value) == 5


def test_what_a_function_prints_while_it_is_tried_does_not_reach_the_screen(tmp_path, capfd):
    (tmp_path / "loud.py").write_text(
        "import os, subprocess\n"
        "from grpo_rl.algos.losses.registered import TokenLoss\n"
        "def loud(inputs):\n"
        "    print('by Python'); os.write(2, b'by the system'); subprocess.run(['echo', 'by a program'])\n"
        "    return TokenLoss(-inputs.advantages_T * inputs.policy_logprobs_T)\n"
    )
    kind = trial.KINDS[POLICY_LOSSES.kind]
    trial.check(kind, f"{tmp_path / 'loud.py'}:loud", {}, kind.run)
    print("afterwards")
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("afterwards\n", "")
