"""Reports on ended requests for the controller, and one block with all their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from grpo_rl.columns import Block, RemoteBlock, TextView, View, encode_text
from grpo_rl.frozen import frozen
from grpo_rl.types import Completion, FinishReason, Support, Versions


@frozen
class Report:
    """A completion without its tokens and its text."""

    request_id: str
    num_tokens: int
    finish_reason: FinishReason
    versions: Versions
    text_bytes: int = 0
    finite: bool = True
    support_size: int | None = None
    cached_tokens: int | None = None


def pack(completions: Sequence[Completion]) -> tuple[list[Report], Block]:
    """Return reports, and tokens back to back. Raises ValueError if tokens and log-probs differ in number."""
    for completion in completions:
        if len(completion.logprobs) != len(completion.response_ids):
            raise ValueError(
                f"completion {completion.request_id} has {completion.num_tokens} tokens and {len(completion.logprobs)} log-probs"
            )
    texts = [encode_text(str(completion.text)) for completion in completions]
    reports = [
        Report(
            completion.request_id,
            completion.num_tokens,
            completion.finish_reason,
            completion.versions,
            len(text),
            bool(np.isfinite(completion.logprobs).all()),
            None if completion.support is None else len(completion.support.token_ids),
            completion.cached_tokens,
        )
        for completion, text in zip(completions, texts, strict=True)
    ]
    supports = [completion.support for completion in completions if completion.support is not None]
    return reports, {
        "token_ids": joined([completion.response_ids for completion in completions], np.int32),
        "logprobs": joined([completion.logprobs for completion in completions], np.float32),
        "support_counts": joined([support.counts for support in supports], np.int32),
        "support_ids": joined([support.token_ids for support in supports], np.int32),
        "text": np.frombuffer(b"".join(texts), dtype=np.uint8),
    }


def unpack(reports: Sequence[Report], block: Block | RemoteBlock) -> Iterator[Completion]:
    """Yield completions with views of the block, which is not read."""
    start = counts = ids = text = 0
    for report in reports:
        length, support = report.num_tokens, None
        if report.support_size is not None:
            support = Support(
                View(block, "support_counts", counts, length), View(block, "support_ids", ids, report.support_size)
            )
            counts, ids = counts + length, ids + report.support_size
        yield Completion(
            report.request_id,
            View(block, "token_ids", start, length),
            View(block, "logprobs", start, length, report.finite),
            report.finish_reason,
            report.versions,
            support,
            TextView(block, "text", text, report.text_bytes),
            report.cached_tokens,
        )
        start, text = start + length, text + report.text_bytes


def joined(arrays: Sequence[ArrayLike], dtype: type[np.int32] | type[np.float32]) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype=dtype)
