"""`onward gc`: what under Onward's home is no longer needed, by rules, and its removal.

`rules` decides about runs, `found` lists what goes, `removal` deletes it.
"""
