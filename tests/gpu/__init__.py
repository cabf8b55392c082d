"""The examination on a GPU: what it proves and what it measures, in steps that continue where they were interrupted.

make gpu                                   all steps, on the GPU of this machine
make gpu STEPS="operators resume"          two of them
ONWARD_GPU_REHEARSAL=1 make gpu            the CPU in the GPU's place, tiny sizes: about a minute
python -m tests.gpu.report                 docs/gpu.md from the results; needs neither a GPU nor torch

__main__.py -- for each step -> step.py in a process of its own -- one line for each check -> results.jsonl
    |                              | pytest -m gpu tests/gpu/test_X.py, or main() of tests/gpu/measure_X.py
    +-- a limit of time, then the processes of the step are killed                 report.py -> docs/gpu.md
"""
