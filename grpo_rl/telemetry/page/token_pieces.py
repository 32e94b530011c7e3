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

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, which together are the response; nothing where the tokenizer does not take the ids.

        A token is decoded behind the one before it, because some tokenizers (SentencePiece) strip the space of the first. Of
        tokens that are a part of a character only, the first has the character and the others are empty. Where the whole reads
        otherwise than its parts, as at an end within a character, the rest is the text of one token.
        """
        with suppress(Exception):  # the file may be no tokenizer, and an id may be one that no vocabulary has
            whole, texts, before, done = self._decoded(ids), [""] * len(ids), 0, 0
            for end in range(1, len(ids) + 1):
                text = self._decoded(ids[before:end])
                if text.endswith(BROKEN) and end - done < LONGEST_CHARACTER and end < len(ids):
                    continue
                piece = text[len(self._decoded(ids[before:done])) :]
                if end == len(ids) or not whole.startswith(piece):
                    piece = whole
                texts[done], whole = piece, whole[len(piece) :]
                before, done = done, end
            return texts
        return []

    def _decoded(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
