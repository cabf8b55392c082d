"""The table of architectures and exporters in docs/reference/compatibility.md: `python -m tests.compatibility`.

entries.py    what is examined: every architecture of the zoo by every exporter, and the files of other exporters
checks.py     one file: does it import, does it train, does it come back
__main__.py   the command: a part or all, several processes, continuing where it was; writes results.jsonl
report.py     the page from the results alone
"""
