"""The losses: their formulas, and how they are computed where logits are sharded or samples spread over replicas."""
