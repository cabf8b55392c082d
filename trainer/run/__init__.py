"""The run directory: its paths (`directory`), its records (`records`) and durable files (`durable_files`).

Flow, tasks and ranks exchange nothing but these files. `history` folds the event log, `outcomes/` says how a run ended,
`recorded/` has the records of single features, `remote/` files of object stores, `timing/` where the time went, and
`machine/` this machine. This package never imports torch or mpi4py, and never decides what is written.
"""
