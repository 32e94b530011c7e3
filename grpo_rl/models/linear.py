"""Layers that a CPU computes in fewer passes: linear ones, and RMS norms.

Linear layers go through oneDNN's matrix product, which torch uses for half precision only. With AVX-512 it
needs less time than MKL for float32 `x @ W.T` and the gradient of the input: 1.09 to 1.20 times as fast on
one core of an AMD EPYC (`[2176, 320] x [320, 1024]` and four like it). The gradient of the weight stays with
MKL, and so does everything with AVX2 alone (0.94 to 1.11). Only the order of sums differs.

A norm of transformers is six operations over the whole activation; here it is one function with a backward
pass of its own: both passes of `[2048, 128]` took 0.40 ms instead of 1.24 ms of that core, of `[2048, 320]`
1.3 instead of 3.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Precision = Literal["float32", "tf32", "bfloat16"]
"""How a product's float32 inputs are rounded: not, to 10 bits of mantissa, or to bfloat16's 7."""


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    is_cpu_float32 = x.device.type == "cpu" and x.dtype == weight_OI.dtype == torch.float32
    # Torch's compiler has products of its own: it does not take oneDNN's if the weight may change.
    if is_cpu_float32 and x.numel() and _has_onednn() and not torch.compiler.is_compiling():
        out: Tensor = _OneDnnLinear.apply(x, weight_OI, bias_O)
        return out
    return F.linear(x, weight_OI, bias_O)


def use_fast_layers(model: nn.Module) -> None:
    """Replace linear layers, and Llama's norms, which call their epsilon `variance_epsilon`; Gemma's scale by 1 + weight."""
    for module in model.modules():
        kind: Any = type(module)
        if kind is nn.Linear:
            module.__class__ = FastLinear
        elif kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and not isinstance(module, _FastNorm):
            module.__class__ = _fast_norm(kind)


class FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _FastNorm(nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.device.type == "cpu" and hidden_states.dtype == self.weight.dtype == torch.float32:
            out: Tensor = _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)
            return out
        other: Tensor = super().forward(hidden_states)
        return other


@functools.cache
def _fast_norm(kind: Any) -> Any:
    return type(kind.__name__, (_FastNorm, kind), {})


class _RmsNorm(torch.autograd.Function):
    """y = w x / sqrt(mean(x^2) + epsilon), over the last axis (Zhang and Sennrich 2019, equation 4)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze_(-1)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight_D)
        return normed * weight_D

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        normed, scale, weight_D = ctx.saved_tensors
        products = grad * normed
        # d/dx of x times scale(x): the part of the gradient along x itself is taken away.
        along = (products @ weight_D).div_(normed.shape[-1]).unsqueeze_(-1)
        grad_x = (grad * weight_D).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x, products.reshape(-1, products.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None, None


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.has_bias = bias_O is not None
        return _product(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = _product(grad, weight_OI.t()) if needs_x else None
        grad_weight = flat.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return grad_x, grad_weight, flat.sum(0) if needs_bias and ctx.has_bias else None


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")


def _has_onednn() -> bool:
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return wide and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def rounded(x: Tensor, precision: Precision) -> Tensor:
    return x.detach().bfloat16() if precision == "bfloat16" else x.detach()


def reduced_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, precision: Precision, rounded_OI: Tensor) -> Tensor:
    """Inputs are rounded to `precision`, the gradients' too; `rounded_OI` is `rounded(weight_OI)`."""
    out: Tensor = _ReducedLinear.apply(x, weight_OI, rounded_OI, precision)
    return out if bias_O is None else out + bias_O


class _ReducedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, rounded_OI: Tensor, precision: Precision) -> Tensor:
        ctx.save_for_backward(x, rounded_OI)
        ctx.precision = precision
        return product(x, rounded_OI.t(), precision)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, rounded_OI = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad = rounded(grad, ctx.precision)
        grad_x = product(grad, rounded_OI, ctx.precision) if needs_x else None
        return grad_x, product(grad.t(), x, ctx.precision) if needs_weight else None, None, None


def product(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """`a @ b` in float32 of inputs rounded to `precision`, by tensor cores or, elsewhere, in float32.

    No gradient flows through.
    """
    if precision == "float32":
        return linear(a, b.t())
    if precision == "bfloat16":
        a, b = rounded(a, precision), rounded(b, precision)
        return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
    if not a.is_cuda:
        a, b = _rounded_to_tf32(a), _rounded_to_tf32(b)
    with tf32():
        return a @ b


def add_product(total: Tensor | None, a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    if total is None:
        return a @ b if precision == "float32" else product(a, b, precision)
    if precision == "bfloat16":  # whose sum in float32 only a product has, and not one with something to add to
        return total.add_(product(a, b, precision))
    if precision == "float32":
        return total.addmm_(a, b)
    if not a.is_cuda:
        a, b = _rounded_to_tf32(a), _rounded_to_tf32(b)
    with tf32():
        return total.addmm_(a, b)


@contextmanager
def tf32() -> Iterator[None]:
    previous_precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = previous_precision


def _rounded_to_tf32(x: Tensor) -> Tensor:
    """Round away the last 13 of 23 bits of mantissa, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
