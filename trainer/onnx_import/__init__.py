"""Import ONNX graphs as torch modules, and write trained weights back into the file.

Begin with `driver` (from the file to the module) and `write_back` (the way back). From outside import `driver`,
`imported_graph`, `train_selection`, `write_back`, the modules in `ops` whose functions appear in imported graphs, and
`passes.rewriter` for further rewrites. `roles/` finds what is trained, `tracing/` keeps what depends on lengths,
`lowering/` turns nodes into calls of torch. To support another operator, add a rule in `ops`. Nothing here trains,
communicates between ranks, or knows the layout of ranks.
"""
