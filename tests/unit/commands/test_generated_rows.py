"""The rows that `generate` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import group

from grpo_rl.commands.generate import _has_ground_truth, rows_of
from grpo_rl.config.schema.tree import DataConfig
from grpo_rl.data.dataset import BarePromptDataset
from grpo_rl.data.sources.tables import write_rows
from grpo_rl.errors import DataError
from grpo_rl.models.builtin import build_tokenizer
from grpo_rl.telemetry.rollout_log import record_of


def test_all_of_them_are_rows_without_what_is_the_commands_own(tmp_path: Path) -> None:
    found = rows_of([[record_of(one) | {"row": row} for one in group(1, row, 4)] for row in range(2)])
    assert len(found) == 8 and {"prompt", "response", "reward", "ground_truth", "finish_reason"} <= found[0].keys()
    assert not {"row", "advantage"} & found[0].keys()
    write_rows(tmp_path / "all.parquet", found)
    mixed = [dict(found[0], ground_truth="2"), dict(found[1], ground_truth={"target": 3})]
    with pytest.raises(DataError, match=r"give a \.jsonl"):
        write_rows(tmp_path / "mixed.parquet", mixed)
    assert not (tmp_path / "mixed.parquet").exists()


def test_rows_with_a_prompt_alone_are_answered_without_a_score(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1="}\n{"prompt": [{"role": "user", "content": "2+2="}]}\n{"prompt": "3+3="}\n')
    assert not _has_ground_truth([str(path)], DataConfig()) and _has_ground_truth(["task:arithmetic?num_rows=2"], DataConfig())
    found = BarePromptDataset([str(path)], DataConfig(), build_tokenizer(128), max_samples=2).checked()
    assert [found.prompt(row, "u").text for row in range(len(found))] == ["1+1=", "<|user|>2+2=<|assistant|>"]
    assert found.prompt(0, "u").data_source == "prompts"
    with pytest.raises(DataError, match=r"more than data\.max_prompt_length=3"):
        BarePromptDataset([str(path)], DataConfig(max_prompt_length=3), build_tokenizer(128)).checked()
