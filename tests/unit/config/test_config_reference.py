"""The generated page of all keys."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

from grpo_rl.config.reference_page import meanings, reference
from grpo_rl.config.schema import tree
from grpo_rl.config.schema.fields import leaves

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "python -m grpo_rl.config.reference_page > docs/configuration.md"


def test_every_key_is_on_the_page_with_its_meaning() -> None:
    undocumented = [f"{name}.{field}" for name, fields in meanings().items() for field, text in fields.items() if not text]
    ours = [entry for entry in undocumented if entry.split(".")[0].endswith("Config")]
    # Fields that hold a whole group of keys need no words of their own.
    assert [entry for entry in ours if not _is_group(*entry.split("."))] == []
    text = reference()
    for key in leaves():
        assert f"| `{key.rpartition('.')[2]}` |" in text, key


def _is_group(name: str, field: str) -> bool:
    return is_dataclass(get_type_hints(getattr(tree, name))[field])
