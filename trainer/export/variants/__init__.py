"""Further files made from the exported one: smaller, quantized, optimized."""
