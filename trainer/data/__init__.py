"""From data sources to batches of tensors.

Sources are read in blocks (`sources`, `tables`, `arrow_files`, `tensorproto_files`), converted to columns of numbers
(`columns`), matched with the graph inputs (`signature`, `input_columns`) and written once as shards (`sharding`).
Ranks read shards (`shards`) and make batches from a position in the sample stream (`batches`, `permutation`). From
outside, import `sharding.make_shards`, `inferred_schema.infer_schema`, `shards`, `signature`, `input_columns` and
`batches`. Only `batches` imports torch, so that a configuration is checked without it. Nothing here is collective.
"""
