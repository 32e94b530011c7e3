"""docs/operations.md says what the code does."""

from pathlib import Path

from grpo_rl.errors import EXIT_CODES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The table under a heading, without its head."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_every_exit_code_with_its_meaning() -> None:
    assert rows("Exit codes") == [[str(code), *texts] for code, texts in EXIT_CODES.items()]
