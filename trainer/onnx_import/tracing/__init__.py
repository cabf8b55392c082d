"""Run converters at two sizes, and keep what depends on the size as nodes of the graph."""
