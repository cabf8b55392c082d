"""Operators of onnxruntime's own domains."""
