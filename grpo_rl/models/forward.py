"""The forward pass: the body on all tokens, the LM head and its per-token quantities on trained ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from grpo_rl.models.experts import Routing
from grpo_rl.models.linear import Precision, use_fast_layers
from grpo_rl.models.lm_head import Columns, Head, Support, chunks_of, head_columns, in_chunks, token_logprobs
from grpo_rl.models.lora import Adapters
from grpo_rl.models.packing import Sequences
from grpo_rl.models.sequence_parallel import SequenceGroup, Slice


@dataclass(slots=True)
class TokenOutputs:
    logprobs_T: Tensor
    entropy_T: Tensor | None = None
    full_kl_T: Tensor | None = None
    top_logprobs_TK: Tensor | None = None
    top_ids_TK: Tensor | None = None
    hidden_TD: Tensor | None = None

    def whole(self, own: Slice) -> TokenOutputs:
        columns = (getattr(self, field.name) for field in fields(self))
        return TokenOutputs(*(None if column is None else own.whole(column) for column in columns))  # type: ignore[arg-type]


class PackedModel(nn.Module):
    """A model from transformers on packed sequences, and a head: one module, whose root unit FSDP gathers."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        use_fast_layers(lm)
        self.lm = lm
        self.adapters: Adapters | None = None
        self.routing = Routing.of(lm)
        self.sequence_group: SequenceGroup | None = None

    def sliced(self, sequences: Sequences) -> Sequences:
        return sequences if self.sequence_group is None else sequences.sliced(self.sequence_group)

    def hidden_TD(self, sequences: Sequences, *, balance: bool = False, choices: bool = False) -> Tensor:
        """`balance` and `choices` are those of `Routing.begin`, for `routing.last`."""
        if self.routing is not None:
            self.routing.begin(sequences.predict_T, sequences.experts_SLK, balance=balance, choices=choices)
        rank_slice, positions_S = sequences.slice, sequences.packing.position_ids_S
        hidden_SD = self.lm.base_model(
            input_ids=sequences.token_ids_S[None],
            position_ids=(positions_S if rank_slice is None else rank_slice.of(positions_S))[None],
            use_cache=False,
            packing=sequences.packing,
            slice=rank_slice,
        ).last_hidden_state[0]
        if self.routing is not None:
            self.routing.end()
        return hidden_SD.index_select(0, sequences.predict_T)


class PolicyModel(PackedModel):
    def __init__(
        self, lm: Any, *, temperature: float = 1.0, chunk_tokens: int = 2048, precision: Precision = "float32"
    ) -> None:
        super().__init__(lm)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.precision = precision

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

        If the sequences say which tokens could be sampled, every distribution is the one over these.

        `ref_hidden_TD` with `ref_head_VD` (and `ref_bias_V`) asks for the exact KL(policy || reference);
        without a head of the reference it is this model's, which adapters leave alone. `top` asks for the so
        many likeliest tokens, of the first so many ids, and `top_ids_TK` for the log-probs of these tokens.
        `balance` and `choices` are those of `hidden_TD`.
        """
        sequences = self.sliced(sequences)
        rank_slice = sequences.slice
        hidden_TD = self.hidden_TD(sequences, balance=balance, choices=choices)
        if rank_slice is not None:
            ref_hidden_TD, top_ids_TK = rank_slice.own(ref_hidden_TD), rank_slice.own(top_ids_TK)
        own_head = self.lm.get_output_embeddings()
        head = Head.of(own_head.weight, own_head.bias, self.temperature, self.precision)
        ref_head = (
            head.detached() if ref_head_VD is None else Head.of(ref_head_VD, ref_bias_V, self.temperature, self.precision)
        )
        chunks = chunks_of(len(sequences.target_T), self.chunk_tokens, sequences.support)
        if want_entropy or ref_hidden_TD is not None or top is not None or top_ids_TK is not None:

            def columns(rows: slice, support: Support | None) -> Columns:
                return head_columns(
                    head,
                    hidden_TD[rows],
                    sequences.target_T[rows],
                    want_entropy=want_entropy,
                    ref_head=ref_head,
                    ref_hidden_TD=None if ref_hidden_TD is None else ref_hidden_TD[rows],
                    top=top,
                    top_ids_TK=None if top_ids_TK is None else top_ids_TK[rows],
                    support=support,
                )

            outputs = TokenOutputs(*in_chunks(columns, chunks))
        else:
            outputs = TokenOutputs(token_logprobs(head, hidden_TD, sequences.target_T, chunks))
        if want_hidden:
            outputs.hidden_TD = hidden_TD.float()
        return outputs if rank_slice is None else outputs.whole(rank_slice)
