"""Log-probabilities, entropies and exact KLs of trained tokens: the one shift and the one LM head.

The body of the model runs on a flat axis of all tokens. The LM head runs only where a token is
trained, with float32 logits whatever the layers compute in, chunk by chunk, each chunk recomputed in the backward pass, so that logits of
`[tokens, vocabulary]` never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_rl.models.experts import Routing
from grpo_rl.models.linear import Precision, linear, reduced_linear, rounded, use_fast_linear, use_fast_norms
from grpo_rl.models.lora import Adapters
from grpo_rl.models.packing import Sequences
from grpo_rl.models.sequence_parallel import SequenceGroup, Slice

Columns = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Log-prob, entropy and KL to the reference of each trained token, log-probs and ids of several tokens in its place."""


@dataclass(slots=True)
class TokenOutputs:
    """The policy's quantities of each trained token."""

    logprobs_T: Tensor
    entropy_T: Tensor | None = None
    full_kl_T: Tensor | None = None
    top_logprobs_TK: Tensor | None = None
    top_ids_TK: Tensor | None = None
    hidden_TD: Tensor | None = None

    def whole(self, own: Slice) -> TokenOutputs:
        """Return the quantities of all trained tokens, where these are of a rank's own. A collective of its group."""
        columns = (getattr(self, field.name) for field in fields(self))
        return TokenOutputs(*(None if column is None else own.whole(column) for column in columns))  # type: ignore[arg-type]


class PackedModel(nn.Module):
    """A model from transformers on packed sequences, and a head.

    One module around body and head, so that FSDP's root unit has the head's weight gathered while it
    is used.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        use_fast_linear(lm)
        use_fast_norms(lm)
        self.lm = lm
        self.adapters: Adapters | None = None
        """The adapters that are trained in place of the model's own weights, once these are read."""
        self.routing = Routing.of(lm)
        """The routers of a model with experts; None for any other."""
        self.sequence_group: SequenceGroup | None = None
        """The ranks that compute each pass together, a slice of its tokens each; None: this rank computes all of it."""

    def sliced(self, sequences: Sequences) -> Sequences:
        """Return the part of the input that this rank computes."""
        return sequences if self.sequence_group is None else sequences.sliced(self.sequence_group)

    def hidden_TD(self, sequences: Sequences, *, balance: bool = False, choices: bool = False) -> Tensor:
        """Return the last hidden state before each trained token, which has read what the token was sampled from.

        Of a model with experts `routing.last` shows what its routers did (see `Routing.begin` for `balance` and `choices`).
        """
        if self.routing is not None:
            self.routing.begin(sequences.predict_T, sequences.experts_SLK, balance=balance, choices=choices)
        own, positions_S = sequences.slice, sequences.packing.position_ids_S
        hidden_SD = self.lm.base_model(
            input_ids=sequences.token_ids_S[None],
            position_ids=(positions_S if own is None else own.of(positions_S))[None],
            use_cache=False,
            packing=sequences.packing,
            slice=own,
        ).last_hidden_state[0]
        if self.routing is not None:
            self.routing.end()
        return hidden_SD.index_select(0, sequences.predict_T)


class PolicyModel(PackedModel):
    """A causal LM from transformers whose forward pass returns per-token quantities instead of logits."""

    def __init__(
        self,
        lm: Any,
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 2048,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(lm)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.precision = precision
        """The precision of the head's matrix products, whose results are float32."""

    def forward(
        self,
        sequences: Sequences,
        *,
        want_entropy: bool = False,
        want_hidden: bool = False,
        ref_hidden_TD: Tensor | None = None,
        ref_head_VD: Tensor | None = None,
        ref_bias_V: Tensor | None = None,
        top: tuple[int, int] | None = None,
        top_ids_TK: Tensor | None = None,
        balance: bool = False,
        choices: bool = False,
    ) -> TokenOutputs:
        """Return the outputs for each trained token, at the model's sampling temperature.

        Where the sequences say which tokens could be sampled, every distribution is the one over these: log-probs are
        logit - logsumexp of their logits, and entropy and KL are sums over them.

        `ref_hidden_TD` with `ref_head_VD` (and `ref_bias_V`, if that head has one) asks for the exact
        KL(policy || reference) as well; without a head of the reference it is this model's, which adapters leave alone.
        `top` asks for the so many likeliest tokens, of the first so many ids, and `top_ids_TK` for the log-probs of these tokens.
        `balance` and `choices` are those of `hidden_TD`.
        """
        sequences = self.sliced(sequences)
        own, size = sequences.slice, self.chunk_tokens
        hidden_TD = self.hidden_TD(sequences, balance=balance, choices=choices)
        if own is not None:
            ref_hidden_TD, top_ids_TK = own.own(ref_hidden_TD), own.own(top_ids_TK)
        own_head = self.lm.get_output_embeddings()
        head = Head.of(own_head.weight, own_head.bias, self.temperature, self.precision)
        ref_head = (
            head.detached() if ref_head_VD is None else Head.of(ref_head_VD, ref_bias_V, self.temperature, self.precision)
        )
        support = _support_of_chunks(sequences, size)

        def columns(number: int, rows: slice) -> Columns:
            return head_columns(
                head,
                hidden_TD[rows],
                sequences.target_T[rows],
                want_entropy=want_entropy,
                ref_head=ref_head,
                ref_hidden_TD=None if ref_hidden_TD is None else ref_hidden_TD[rows],
                top=top,
                top_ids_TK=None if top_ids_TK is None else top_ids_TK[rows],
                support=None if support is None else support[number],
            )

        found = in_chunks(columns, len(sequences.target_T), size)
        outputs = TokenOutputs(*found, hidden_TD.float() if want_hidden else None)
        return outputs if own is None else outputs.whole(own)


def in_chunks(columns: Callable[[int, slice], Columns], num_tokens: int, chunk_tokens: int) -> Columns:
    """Return the columns of all trained tokens, of which `columns` makes those of a chunk, given its number and its rows.

    With a gradient, each of several chunks is computed again in the backward pass.
    """
    chunks = [
        (number, slice(start, start + chunk_tokens)) for number, start in enumerate(range(0, max(1, num_tokens), chunk_tokens))
    ]
    if torch.is_grad_enabled() and len(chunks) > 1:
        found = [checkpoint(columns, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        found = [columns(*chunk) for chunk in chunks]
    if len(found) == 1:
        return found[0]
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Head:
    """An LM head, with float32 logits whatever the layers compute in."""

    weight_VD: Tensor
    bias_V: Tensor | None
    temperature: float
    precision: Precision
    rounded_VD: Tensor
    """The weight as products of this precision take it, rounded once for all chunks of a pass."""

    @classmethod
    def of(cls, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, precision: Precision) -> Head:
        return cls(weight_VD, bias_V, temperature, precision, rounded(weight_VD.float(), precision))

    def detached(self) -> Head:
        """Return the same head as a constant."""
        return replace(self, weight_VD=self.weight_VD.detach(), bias_V=None if self.bias_V is None else self.bias_V.detach())

    def logprobs_TV(self, hidden_TD: Tensor, left_out_TV: Tensor | None) -> Tensor:
        """Return the log-probs of all tokens but those that are left out, which have -inf."""
        arguments = hidden_TD.float(), self.weight_VD.float(), None if self.bias_V is None else self.bias_V.float()
        if self.precision == "float32":
            logits_TV = linear(*arguments)
        else:
            logits_TV = reduced_linear(*arguments, self.precision, self.rounded_VD)
        if self.temperature != 1.0:
            logits_TV = logits_TV / self.temperature
        if left_out_TV is not None:
            logits_TV = logits_TV.masked_fill(left_out_TV, float("-inf"))
        return logits_TV.log_softmax(dim=-1)


def _support_of_chunks(sequences: Sequences, chunk_tokens: int) -> list[tuple[Tensor, Tensor]] | None:
    """Return, for each chunk of trained tokens, row in the chunk and id of every token that could be sampled there."""
    counts_T, ids_M = sequences.support_counts_T, sequences.support_ids_M
    if counts_T is None or ids_M is None:
        return None
    chunks, begin = [], 0
    for counts_C in counts_T.split(chunk_tokens):
        row_M = torch.repeat_interleave(torch.arange(len(counts_C), dtype=torch.int32), counts_C)
        end = begin + len(row_M)
        chunks.append((row_M.to(ids_M.device), ids_M[begin:end]))
        begin = end
    return chunks


def head_columns(
    head: Head,
    hidden_TD: Tensor,
    target_T: Tensor,
    *,
    want_entropy: bool = False,
    ref_head: Head | None = None,
    ref_hidden_TD: Tensor | None = None,
    top: tuple[int, int] | None = None,
    top_ids_TK: Tensor | None = None,
    support: tuple[Tensor, Tensor] | None = None,
) -> Columns:
    """Return the columns of some trained tokens, None for what is not asked for; see `PolicyModel.forward`."""
    left_out_TV = None
    if support is not None:  # true for the tokens that could not be sampled
        left_out_TV = torch.ones(len(target_T), len(head.weight_VD), dtype=torch.bool, device=support[1].device)
        left_out_TV[support] = False
    logprobs_TV = head.logprobs_TV(hidden_TD, left_out_TV)
    # A copy, not a view: FSDP hooks the outputs and cannot hook views.
    logprobs_T = logprobs_TV.gather(1, target_T[:, None]).squeeze(1).clone()
    top_logprobs_TK = None if top_ids_TK is None else logprobs_TV.gather(1, top_ids_TK)
    if top is not None:
        top_logprobs_TK, top_ids_TK = logprobs_TV[:, : top[1]].topk(min(top), dim=1)
    else:
        top_ids_TK = None  # the caller's own
    entropy_T = kl_T = None
    if want_entropy or ref_hidden_TD is not None:
        probs_TV = logprobs_TV.exp()
        if left_out_TV is not None:
            # 0 log 0 is 0, in the gradient too.
            logprobs_TV = logprobs_TV.masked_fill(left_out_TV, 0.0)
        entropy_T = -(probs_TV * logprobs_TV).sum(-1) if want_entropy else None
        if ref_hidden_TD is not None:
            assert ref_head is not None
            ref_logprobs_TV = ref_head.logprobs_TV(ref_hidden_TD, left_out_TV)
            if left_out_TV is not None:
                ref_logprobs_TV = ref_logprobs_TV.masked_fill(left_out_TV, 0.0)
            kl_T = (probs_TV * (logprobs_TV - ref_logprobs_TV)).sum(-1)
    return logprobs_T, entropy_T, kl_T, top_logprobs_TK, top_ids_TK
