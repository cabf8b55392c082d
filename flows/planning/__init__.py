"""What `onward plan` says of a whole run, beside its layout: steps, time, disk, and the settings that were changed.

`whole_run` makes the record, `time_needed` finds the time of a step and adds up, `disk_needed` the sizes, and `shown`
prints. A number that was not measured is said to be guessed.
"""
