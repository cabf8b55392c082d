"""The model as it is trained: the module that a configuration asks for, its loss and its metrics.

`trainable` makes the module from the ONNX file and turns it back, `adapters` adds and merges LoRA, `loss`,
`chunked_loss` and `vocabulary_loss` compute sums over targets, `metrics` adds up evaluations, `precision` is the
autocast context, `weight_casts` keeps its casts of weights for a step, `compile` applies torch.compile
(`repeated_blocks` finds equal layers), `channels_last` converts images, `summaries` records histograms and norms.
All may be imported from outside.
Nothing here knows how the ranks divide the model, except `vocabulary_loss`, whose logits may be sharded.
"""
