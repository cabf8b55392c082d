"""Change a graph: cut, new heads, adapters, layouts, forms for training and inference."""
