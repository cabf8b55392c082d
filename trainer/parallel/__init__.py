"""Parallel training: how ranks divide a model and its batches.

`layout.py` decides the division from shapes alone, `rank_model.py` builds the part of the model that one rank
computes, and `planner.py` estimates time, memory and messages of a division without starting ranks. `tensor/` divides
single layers, `pipeline/` divides the graph into stages, `replicas/` sums gradients over replicas and shards state
(ZeRO). The training loop imports `rank_model.py` and `pipeline/engine.py`; the flow imports `plan_record.py`, which
needs no torch. Nothing here reads data files or writes into the run directory.
"""
