"""Pipeline parallelism: the graph is cut into stages, and micro-batches run through them in a schedule.

`stage.py` has the types, `cut_points.py` finds where the graph may be cut, `balance.py` chooses the cuts, `split.py`
makes a module of every part, `schedules.py` runs the stages of one rank in torch's pipeline schedules, and `engine.py`
runs one training step or one evaluation. Other packages may import each of these. Nothing here reads files, divides
single layers (parallel/tensor) or reduces gradients over replicas (parallel/replicas).
"""
