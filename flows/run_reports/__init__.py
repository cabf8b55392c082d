"""The report of a run: one HTML file, report.html, that needs no network; and one that compares several runs.

    run directory --reported_run.py--> RunFacts --page.py--> report.html      curves.py draws; *.html are its templates
                                    |    --comparison.py--> a page of several runs
                                    +--summary.py--> the rows that Prefect shows, too

`at_the_end.py` writes it when a flow of the run ends, however it ends, and sends it to MLflow and Prefect.
"""
