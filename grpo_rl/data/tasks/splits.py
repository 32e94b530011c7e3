"""Two splits of a procedural task that share no problem, whatever the seeds and numbers of rows."""

from __future__ import annotations

import hashlib
from typing import Literal

VALIDATION_SHARE = 5
"""One problem in so many belongs to the validation split."""


def split_of_text(text: str) -> Literal["train", "val"]:
    """The split that a problem belongs to, by the hash of the text that tells it from others."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return "val" if int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0 else "train"
