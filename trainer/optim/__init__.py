"""Update weights: optimizers, learning rate schedules, bf16 moments, the loss scaler.

`optimizers` builds the configured optimizer, `schedules` computes the learning rate of a step, `loss_scaler` keeps fp16
gradients in range, and `state` names, saves and loads the optimizer state. `moments` is used by the optimizers only.
This package works on the local tensors of a rank; the one number that needs other ranks, a norm for LAMB, comes from a
function that the caller passes in. It never looks at a graph and reads or writes no file.
"""
