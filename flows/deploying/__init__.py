"""Deployments: the work pool, its worker, limits, approval."""
