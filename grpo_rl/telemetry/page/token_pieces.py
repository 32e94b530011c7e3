"""The texts of single tokens, for responses that are coloured token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_rl.telemetry.page.rollout_chunks import Pieces

TOKENIZER = "tokenizer"
"""The field of status.json with the folder of the tokenizer."""
FILE = "tokenizer.json"
BROKEN = "\ufffd"
LONGEST_CHARACTER = 4
"""The most tokens that a character is spread over: UTF-8 has at most 4 bytes a character."""


def pieces_of(run: Path, status: Mapping[str, Any]) -> Pieces | None:
    """Return the function from ids to texts of the run's tokenizer; None where its file is not there.

    The tokenizer is loaded when the first ids come: a large one takes a second.
    """
    folders = [run / "model", Path(str(status.get(TOKENIZER) or run))]
    file = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if file is None and status.get(TOKENIZER):
        file = _of_hub(str(status[TOKENIZER]))
    return None if file is None else _Tokenizer(file)


def _of_hub(name: str) -> Path | None:
    """Return the file of a model of the hub by its name, from the cache on this machine; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # a folder that is gone is no name
        found = try_to_load_from_cache(name, FILE)
        return Path(found) if isinstance(found, str) else None
    return None


class _Tokenizer:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._tokenizer: Any = None
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, which together are the response.

        Tokens that are a part of a character only are joined with those behind them: the first has the character, the others
        are empty.
        """
        texts = [self._text(token) for token in ids]
        place = 0
        while place < len(ids):
            for num in range(2, LONGEST_CHARACTER + 1) if BROKEN in texts[place] else ():
                joined = self._decoded(ids[place : place + num])
                if joined and BROKEN not in joined:
                    texts[place : place + num] = [joined] + [""] * (len(ids[place : place + num]) - 1)
                    break
            place += 1
        return texts

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decoded([token])
        return self._known[token]

    def _decoded(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        with suppress(OverflowError, TypeError):  # an id that no vocabulary has
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        return BROKEN
