"""Compute ReLUs in place: in the memory of the value that only they read.

    before    y = conv2d(x, w)    z = relu(y)        two tensors written; y is free after the relu
    after     y = conv2d(x, w)    z = relu_(y)       one

A convolution, a linear layer, a normalisation and a sum save their operands for the backward pass and not their
result, and `relu` saves its own result; so the bits of outputs and gradients are the same. autograd refuses a backward
pass that needs a value which was overwritten.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

OVERWRITABLE = frozenset(
    {
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(F.linear, F.batch_norm, torch.add, operator.add),
    }
)
"""Functions whose result is new memory that no backward pass reads."""


def relu_in_place(module: fx.GraphModule) -> None:
    """Let each ReLU overwrite its operand, where nothing else reads that, in place. Call before compiling."""
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=torch.relu):
        (read,) = node.all_input_nodes
        # another reader would find the value overwritten
        if read.op == "call_function" and read.target in OVERWRITABLE and list(read.users) == [node]:
            node.target = torch.relu_
            changed = True
    if changed:
        module.recompile()
