"""Make batches of tensors from a position in the sample stream."""
