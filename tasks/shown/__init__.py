"""What people see of a run in Prefect, MLflow and other reporters, made from its event log and records."""
