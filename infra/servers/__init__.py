"""Onward's own Prefect and MLflow servers and the worker: who uses them, and who may ask them."""
