"""The run directory: its paths (`directory`), its records (`records`) and durable files (`durable_files`).

Flow, tasks and ranks exchange nothing but these files. All three modules may be imported from outside. This package
never imports torch or mpi4py, and never decides what is written.
"""
