"""Log-probabilities, entropies and exact KLs of trained tokens: the one shift and the one LM head.

The body of the model runs on a flat axis of all tokens. The LM head runs only where a token is
trained, in float32, chunk by chunk, each chunk recomputed in the backward pass, so that logits of
`[tokens, vocabulary]` never exist at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_rl.models.attention import Packing
from grpo_rl.models.linear import linear, use_fast_linear


@dataclass(frozen=True, slots=True)
class Sequences:
    """Flat token ids and where their responses are, on one device: the input of a forward pass."""

    token_ids_S: Tensor
    packing: Packing
    predict_T: Tensor
    """Flat position of the token before each trained token: its hidden state predicts the trained one."""
    target_T: Tensor
    """The trained tokens' ids."""

    @staticmethod
    def of(token_ids_S: Tensor, prompt_lengths_N: Tensor, response_lengths_N: Tensor, device: torch.device) -> Sequences:
        """The trained tokens are the responses; every prompt has at least one token."""
        if int(prompt_lengths_N.min()) < 1:
            raise ValueError("a prompt without tokens cannot predict its response's first token")
        lengths_N = prompt_lengths_N + response_lengths_N
        position_S = torch.arange(int(lengths_N.sum()))
        response_start_N = lengths_N.cumsum(0) - response_lengths_N
        first_T = torch.repeat_interleave(response_start_N, response_lengths_N)
        within_T = torch.arange(len(first_T)) - torch.repeat_interleave(
            response_lengths_N.cumsum(0) - response_lengths_N, response_lengths_N
        )
        trained_T = position_S[first_T + within_T]
        return Sequences(
            token_ids_S=token_ids_S.to(device),
            packing=Packing.of(lengths_N, device),
            predict_T=(trained_T - 1).to(device),
            target_T=token_ids_S[trained_T].to(device),
        )


@dataclass(slots=True)
class TokenOutputs:
    """What the policy says of each trained token."""

    logprobs_T: Tensor
    entropy_T: Tensor | None = None
    full_kl_T: Tensor | None = None
    hidden_TD: Tensor | None = None


class PackedModel(nn.Module):
    """A model from transformers on packed sequences, and a head.

    One module around body and head, so that FSDP's root unit has the head's weight gathered while it
    is used.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        use_fast_linear(lm)
        self.lm = lm

    def hidden_TD(self, sequences: Sequences) -> Tensor:
        """The last hidden state before each trained token: all that is known when the token is sampled."""
        hidden_SD = self.lm.base_model(
            input_ids=sequences.token_ids_S[None],
            position_ids=sequences.packing.position_ids_S[None],
            use_cache=False,
            packing=sequences.packing,
        ).last_hidden_state[0]
        return hidden_SD.index_select(0, sequences.predict_T)


class PolicyModel(PackedModel):
    """A causal LM from transformers whose forward pass returns per-token quantities instead of logits."""

    def __init__(self, lm: Any, *, temperature: float = 1.0, chunk_tokens: int = 2048) -> None:
        super().__init__(lm)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(
        self,
        sequences: Sequences,
        *,
        want_entropy: bool = False,
        want_hidden: bool = False,
        ref_hidden_TD: Tensor | None = None,
        ref_head_VD: Tensor | None = None,
        ref_bias_V: Tensor | None = None,
    ) -> TokenOutputs:
        """Outputs for each trained token, at the model's sampling temperature.

        `ref_hidden_TD` with `ref_head_VD` (and `ref_bias_V`, if that head has one) asks for the exact
        KL(policy || reference) as well.
        """
        hidden_TD = self.hidden_TD(sequences)
        head = self.lm.get_output_embeddings()
        columns = _chunked_head(
            hidden_TD,
            head.weight,
            head.bias,
            sequences.target_T,
            self.temperature,
            self.chunk_tokens,
            want_entropy=want_entropy,
            ref_hidden_TD=ref_hidden_TD,
            ref_head_VD=ref_head_VD,
            ref_bias_V=ref_bias_V,
        )
        logprobs_T, entropy_T, full_kl_T = columns
        return TokenOutputs(logprobs_T, entropy_T, full_kl_T, hidden_TD.float() if want_hidden else None)


def _chunked_head(
    hidden_TD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    temperature: float,
    chunk_tokens: int,
    *,
    want_entropy: bool,
    ref_hidden_TD: Tensor | None,
    ref_head_VD: Tensor | None,
    ref_bias_V: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-prob, entropy and KL to the reference of each trained token; None for what is not wanted."""
    chunks = []
    recompute = torch.is_grad_enabled() and len(target_T) > chunk_tokens
    for start in range(0, max(1, len(target_T)), chunk_tokens):
        stop = start + chunk_tokens
        arguments = (
            hidden_TD[start:stop],
            head_VD,
            bias_V,
            target_T[start:stop],
            temperature,
            want_entropy,
            None if ref_hidden_TD is None else ref_hidden_TD[start:stop],
            ref_head_VD,
            ref_bias_V,
        )
        if recompute:
            chunks.append(checkpoint(_head, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_head(*arguments))
    logprobs, entropies, kls = zip(*chunks, strict=True)
    return _join(logprobs), _join(entropies) if want_entropy else None, _join(kls) if ref_hidden_TD is not None else None


def _join(chunks: Sequence[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))


def _head(
    hidden_TD: Tensor,
    head_VD: Tensor,
    bias_V: Tensor | None,
    target_T: Tensor,
    temperature: float,
    want_entropy: bool,
    ref_hidden_TD: Tensor | None,
    ref_head_VD: Tensor | None,
    ref_bias_V: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    logprobs_TV = _head_logprobs(hidden_TD, head_VD, bias_V, temperature)
    # A copy, not a view: FSDP hooks the outputs and cannot hook views.
    logprobs_T = logprobs_TV.gather(1, target_T[:, None]).squeeze(1).clone()
    if not want_entropy and ref_hidden_TD is None:
        return logprobs_T, None, None
    probs_TV = logprobs_TV.exp()
    entropy_T = -(probs_TV * logprobs_TV).sum(-1) if want_entropy else None
    if ref_hidden_TD is None:
        return logprobs_T, entropy_T, None
    assert ref_head_VD is not None
    ref_logprobs_TV = _head_logprobs(ref_hidden_TD, ref_head_VD, ref_bias_V, temperature)
    return logprobs_T, entropy_T, (probs_TV * (logprobs_TV - ref_logprobs_TV)).sum(-1)


def _head_logprobs(hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_TV = linear(hidden_TD.float(), head_VD.float(), None if bias_V is None else bias_V.float())
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    return logits_TV.log_softmax(dim=-1)
