"""Rewrites of the fx graph that keep its results: fusions into torch's fast kernels, and added dropout.

`fuse` applies them in order; `rewriter` is the frame that each of them uses. A pass never changes a weight, and changes
nothing where one of its conditions does not hold.
"""
