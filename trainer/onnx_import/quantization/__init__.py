"""Quantized files: trained integers, and the scales of their quantizers."""
