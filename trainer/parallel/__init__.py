"""Parallel training: how ranks divide a model and its batches.

`layout.py` decides the division from shapes alone, and `rank_model.py` builds the part of the model that one rank
computes. `planning/` estimates time, memory and messages of a division without starting ranks. `tensor/` divides
single layers, `pipeline/` divides the graph into stages, `replicas/` sums gradients over replicas and shards state
(ZeRO), `recomputation/` trades activations for time, `observing/` measures. The training loop imports `rank_model.py`;
the flow imports `planning/plan_record.py`, which needs no torch. Nothing here reads data files.
"""
