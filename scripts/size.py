"""The weight of the repository by room: lines, tokens and files of the package, lines of tests and scripts, words of documents.

Tokens are those of Python's `tokenize` without comments, docstrings, newlines and indentation. Nothing is enforced here.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def num_tokens(text: str) -> int:
    """Return the number of tokens of a Python file, without comments, docstrings, newlines and indentation."""
    docstrings = 0
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            docstrings += isinstance(value, ast.Constant) and isinstance(value.value, str)
    counted = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NOT_COUNTED]
    return len(counted) - docstrings


def main() -> None:
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names if name.endswith((".py", ".sh", ".md", ".js"))}
    rooms: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, text in texts.items():
        if name.startswith("grpo_rl/") and name.endswith(".py") and text.strip():
            parts = name.split("/")
            for room in (parts[1] if len(parts) > 2 else "(root)", "package"):
                for place, number in enumerate((len(text.splitlines()), num_tokens(text), 1)):
                    rooms[room][place] += number
    print(f"{'room':<14}{'lines':>8}{'tokens':>9}{'files':>7}")
    for room, (lines, tokens, files) in sorted(rooms.items(), key=lambda item: item[1][0]):
        print(f"{room:<14}{lines:>8}{tokens:>9}{files:>7}")
    for title, start, ends in (
        ("tests", "tests/", ".py"),
        ("scripts", ("scripts/", "bench/"), (".py", ".sh")),
        ("page's JS", "grpo_rl/", ".js"),
    ):
        found = [text for name, text in texts.items() if name.startswith(start) and name.endswith(ends)]
        print(f"{title:<14}{sum(len(text.splitlines()) for text in found):>8}{'':>9}{len(found):>7}")
    words = sum(len(text.split()) for name, text in texts.items() if name.endswith(".md"))
    print(f"{'documents':<14}{words:>8} words")


if __name__ == "__main__":
    main()
