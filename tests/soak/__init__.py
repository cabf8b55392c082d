"""Soaks: faults injected into a real run, and an account of what was lost.

    undisturbed run -> its weights, its exported file, its points in MLflow
    plan (seed)     -> run, fault, fault, ... ended? resume ... until it has exported      compared with the former
                            |
                            +-> detected? class said? trains again? steps lost? processes left?  -> account.json

plan.py draws which fault comes when; kinds.py is the table of faults; scene.py finds the processes and files of a run;
soak.py starts the commands and injects; results.py reads what a run has left; account.py says whether all is right;
layouts.py has the configurations of the measured soaks; tables.py prints accounts; `python -m tests.soak` starts one.
"""
