"""What every engine asks of the requests it takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from grpo_rl.types import Request


def check_requests(requests: Sequence[Request], taken: Collection[str], max_model_len: int) -> None:
    """Raise ValueError for the first request that an engine cannot answer as asked.

    `taken` are the ids that are in use. A prompt and its longest response must fit into `max_model_len`:
    an engine would cut the response short and call it `length`.
    """
    seen = set(taken)
    for request in requests:
        sampling = request.sampling
        where = f"request {request.request_id!r}"
        if request.request_id in seen:
            raise ValueError(f"{where} is already being answered; ids must be unique")
        seen.add(request.request_id)
        if not request.prompt_ids:
            raise ValueError(f"{where} has an empty prompt")
        if sampling.max_tokens < 1:
            raise ValueError(f"{where} asks for {sampling.max_tokens} tokens; at least 1 is needed")
        longest = len(request.prompt_ids) + sampling.max_tokens
        if longest > max_model_len:
            raise ValueError(
                f"{where}: {len(request.prompt_ids)} prompt tokens and up to {sampling.max_tokens} response tokens make "
                f"{longest}, more than the engine's max_model_len of {max_model_len}"
            )
