"""The settings of a run, section by section: the tables of a config file.

The docstring under a field is its `--help`, its text in Prefect's form and its entry in the settings
reference. Sections are frozen and refuse unknown keys. Rules that concern several sections are in rules.py.
"""
