"""Search in a folder of texts, ranked by BM25 (Robertson and Zaragoza, 2009), by the library bm25s."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_rl.config.schema.kinds import Count
from grpo_rl.envs.contract import SimpleTool, ToolResult, text_tool
from grpo_rl.errors import ConfigError

SUFFIXES = (".txt", ".md")
LARGEST_FILE = 16 << 20


class Index:
    def __init__(self, passages: Mapping[str, str]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ConfigError(
                "tool search: the library bm25s is not installed; python -m pip install 'grpo_rl[agents]'"
            ) from error
        self.names, self.texts = list(passages), list(passages.values())
        self._bm25s = bm25s
        self._scores = bm25s.BM25(method="lucene", backend="numpy")
        self._scores.index(self._words(self.texts), show_progress=False)

    def best(self, query: str, number: int) -> list[tuple[str, str]]:
        """(name, text), best first; none if no word of the query is in any."""
        indices, scores = self._scores.retrieve(
            self._words([query]), k=min(number, len(self.texts)), show_progress=False, backend_selection="numpy"
        )
        return [(self.names[int(n)], self.texts[int(n)]) for n, score in zip(indices[0], scores[0], strict=True) if score > 0]

    def _words(self, texts: list[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False, return_ids=False)


@lru_cache(maxsize=4)
def index_of(folder: str) -> Index:
    """A folder is read once in each process."""
    return Index(passages_of(Path(folder)))


def passages_of(folder: Path) -> dict[str, str]:
    """Paragraphs of all .txt and .md files, by file and number. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"tool search: folder={folder} is no folder")
    passages: dict[str, str] = {}
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        name = file.relative_to(folder).as_posix()
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"tool search: {file} is larger than {LARGEST_FILE >> 20} MiB; split it")
        try:
            paragraphs = [part.strip() for part in file.read_text(encoding="utf-8").split("\n\n") if part.strip()]
        except UnicodeDecodeError as error:
            raise ConfigError(f"tool search: {file} is no UTF-8 text: {error}") from error
        for number, paragraph in enumerate(paragraphs):
            passages[name if len(paragraphs) == 1 else f"{name}#{number + 1}"] = paragraph
    if not passages:
        raise ConfigError(f"tool search: folder={folder} has no {' or '.join(SUFFIXES)} file with text in it")
    return passages


class Search(SimpleTool):
    """The tool `search`: the `top_k` best passages of a `folder` for a query, `max_characters` of each.

    A passage is a paragraph of a .txt or .md file.
    """

    schema = text_tool(
        "search", "Search texts for words. Returns the passages that fit best.", "query", "the words to look for"
    )

    def __init__(self, *, folder: str, top_k: Count = 3, max_characters: Count = 500) -> None:
        self._index, self._top_k, self._max_characters = index_of(folder), top_k, max_characters

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        # verl's schema of this tool has a list of queries.
        several = arguments.get("query_list")
        queries = several if isinstance(several, list) and several else [arguments.get("query")]
        if not all(isinstance(query, str) and query.strip() for query in queries):
            return ToolResult("query must be a string of words to look for", failed=True)
        return ToolResult("\n\n".join(map(self._found, queries)))

    def _found(self, query: str) -> str:
        passages = self._index.best(query, self._top_k)
        if not passages:
            return "No passage has any of these words."
        return "\n\n".join(f"[{name}] {text[: self._max_characters]}" for name, text in passages)
