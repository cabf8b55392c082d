"""What `onward plan` says of a whole run, beside its layout: steps, time, disk, and the settings that were changed.

`whole_run` makes the record and adds up the sizes on the disk, `time_needed` finds the time of a step and adds up, and
`shown` prints. A number that was not measured is said to be guessed.
"""
