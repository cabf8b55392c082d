"""The settings of a run: sections, cross-section rules, RunConfig and its loading from TOML.

Import `loading.load_config` to read a file, `run_config.RunConfig` for the type that everything else takes, and the
section types from `sections`. This package never imports torch, mpi4py, prefect or mlflow, and never looks at the
files that a setting names (diagnostics/config_check.py does).
"""
