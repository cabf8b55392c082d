"""Rewrites of an imported graph into the calls torch has fast kernels for."""

from __future__ import annotations

from torch import fx, nn


def fuse(graph: fx.Graph, root: nn.Module) -> None:
    """Apply every rewrite."""
