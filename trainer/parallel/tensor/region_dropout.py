"""Draw random numbers inside a tensor-parallel region: different ones on each rank, from a generator that is the same.

    torch's generator, equal on all ranks of the group
        outside of regions    dropout draws from it: the same elements are dropped on every rank
        inside, eager         one number is drawn: the seed of the generator while the module runs, plus the rank
        inside, compiled      two numbers a, b are drawn; element i is kept if hash(i, a, b, rank) >= ratio x 2^32

The generator advances alike on all ranks, whatever the sizes of their shards, so that they stay in step. All follows
from its state: a resumed run and a recomputation, which restore that state, drop the same elements again.

The compiled form is plain arithmetic on the position of an element. The compiler fuses it into the operators beside it,
and a CUDA graph can contain it: nothing is computed on the host. Attention then has its weights [.., heads, queries,
keys] in memory, because no fused kernel takes a mask of kept weights; in eager mode the fused kernels draw their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake

from onward.trainer.onnx_import.ops.norm import Dropout
from onward.trainer.onnx_import.ops.random import StochasticDepth
from onward.trainer.onnx_import.passes.fused_attention import Attention

LOW_32 = 0xFFFFFFFF


class RankSeeded(nn.Module):
    """A module inside a region (Dropout, StochasticDepth or Attention) that draws other numbers on each rank."""

    def __init__(self, drawing: nn.Module, tensor_rank: int) -> None:
        super().__init__()
        self.drawing = drawing
        self.tensor_rank = tensor_rank

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._traceable(x, *more) if self.training else self.drawing(x, *more)
        if not self.training or is_fake(x):
            return self.drawing(x, *more)  # type: ignore[no-any-return]
        # the draw advances the generator alike on all ranks; the rank makes the numbers differ
        seed = int(torch.randint(2**62, ())) + self.tensor_rank
        # the one generator that the module draws from; `torch.random.fork_rng` takes ten times as long
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return self.drawing(x, *more)  # type: ignore[no-any-return]
        finally:
            generator.set_state(state)

    def _traceable(self, x: Tensor, *more: Tensor) -> Tensor:
        # two draws however large the shard is, for the same reason as the seed of eager mode
        words = torch.randint(2**31, (2,), device=x.device)
        drawing = self.drawing
        if isinstance(drawing, Dropout):
            return self._drop(x, x, drawing.ratio, words)
        if isinstance(drawing, StochasticDepth):
            # one element for each index of the leading dimensions
            shape = [*x.shape[: drawing.mask_dims], *[1] * (x.ndim - drawing.mask_dims)]
            return self._drop(x, x.new_empty(shape), 1.0 - drawing.keep, words)
        assert isinstance(drawing, Attention), f"nothing is known of the random numbers of {type(drawing).__name__}"
        weights, value = _attention_weights(drawing, x, *more)
        return self._drop(weights, weights, drawing.dropout, words).to(value.dtype) @ value

    def _drop(self, x: Tensor, draws: Tensor, ratio: float, words: Tensor) -> Tensor:
        """Zero x with probability `ratio` and scale up the rest; one number for each element of `draws`, which
        broadcasts to x."""
        # 1 / (1 - ratio) would be infinite
        if ratio >= 1.0:
            return x * 0.0
        # a factor in Python is exact; a tensor of bf16 would round it
        return torch.where(
            _hashed(draws, words, self.tensor_rank) >= int(ratio * 2**32), x * (1.0 / (1.0 - ratio)), 0.0
        )

    def extra_repr(self) -> str:
        return f"tensor_rank={self.tensor_rank}"


def seed_by_rank(module: nn.Module, node: fx.Node, rank: int, ending: str) -> None:
    """Let a call of a module that draws random numbers draw others on each rank, in place."""
    drawing = module.get_submodule(str(node.target))
    target = f"{str(node.target).replace('.', '_')}_{ending}"
    # one module may be called in several places
    while hasattr(module, target):
        target += "_"
    module.add_module(target, RankSeeded(drawing, rank).train(drawing.training))
    node.target = target


def _hashed(like: Tensor, words: Tensor, rank: int) -> Tensor:
    """Return a number in [0, 2^32) for each element of `like`, as int64 in its shape.

    words: two random integers of 31 bits, int64 [2], equal on all ranks of the group.
    """
    # Both keys depend on the rank. With the first alone, ranks would have the same numbers at other positions.
    first, second = (_mix((word + (rank + 1) * 0x9E3779B1) & LOW_32) for word in words.unbind())
    position = torch.arange(like.numel(), device=like.device).view(like.shape)
    return _mix(_mix((position ^ first) & LOW_32) ^ second)


def _mix(x: Tensor) -> Tensor:
    """Return 32 well mixed bits for each 32 bits, as int64: a bijection found by github.com/skeeto/hash-prospector.

    Both factors have 31 bits, so that no product overflows int64.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & LOW_32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & LOW_32
    return x ^ (x >> 15)


def _attention_weights(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights of an attention without dropout [.., heads, queries, keys], fp32, and its values; arguments
    as of `Attention.forward`."""
    if attention.grouped:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = (query * attention.scale) @ key.mT
    if attention.causal:
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    # zeros where all scores of a query are masked, as in torch's attention; fp32, as autocast computes softmax
    return torch.ops.aten._safe_softmax(scores.float(), -1), value
