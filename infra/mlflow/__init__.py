"""Runs, metrics, checkpoints and models in MLflow."""
