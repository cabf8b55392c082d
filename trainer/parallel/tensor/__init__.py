"""Tensor parallelism: single layers of the fx graph divided over the ranks of one process group, as in Megatron-LM.

`regions.find_regions` and `vocabulary.find_vocabulary_sharding` decide, from shapes alone and without ranks, which
weights can be sharded, and give the reason for each weight that stays replicated; `rewrite.shard_regions` and
`vocabulary.shard_vocabulary` change the graph. Import these four and their result types from outside; the rest
(graph_analysis, sharding, propagation and the rules) is internal. Nothing in here starts a collective: the rewritten
graph does when it runs.
"""
