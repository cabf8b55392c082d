"""Save and load training positions as checkpoint directories: safetensors files and one manifest with digests.

`save` and `load` are for ranks: `save` writes one checkpoint from all ranks, `load` brings it back in any
layout, `consistency.check_copies` compares what several ranks hold. `verification` and `retention` are for processes
without torch, such as the flow and the checkpoint task: which checkpoints there are, whether they are complete, which
may be deleted. `train_state`, `manifest`, `write_plan` and `exchange` are what these are made of. This package stores
named tensors with their placements; it never looks at a graph, an optimizer or a mesh.
"""
