"""Data parallelism: sum gradients over replicas and shard weights over them.

`reducer.Reducer` (ZeRO 0) and `zero.Sharded` (ZeRO 1-3) hold the weights of a rank and have the same methods: begin a
step, reduce, multiply, undo. `adasum` and `transport` are ways to reduce a bucket, `copies` keeps tied and replicated
weights equal, `norms` sums over all ranks. Nothing outside imports more than `Reducer`, `Sharded`, `is_sharded` and
`norms.gradient`. This package runs no forward pass and knows no optimizer.
"""
