"""The update rules, one subject a file: `adam`, `lamb`, `sgd`, `adaptive`, `lion`, `adafactor`, `muon`.

`rule` has what they share, `table` says which is which by name. From outside, import `table` and `rule` only. The
settings that each rule takes are in trainer/config/update_rules.py.

In the formulas: w weight, g gradient (summed, unscaled and clipped by the loop, for every rule and device), t number of
this update (from 1), η learning rate, λ weight decay, α and β decay of the moments m and v, ε epsilon. Everything is
computed element by element or tensor by tensor in a fixed order, so equal gradients give equal bits.

A weight may be a part of a full one, or empty, or one of several copies. Most rules need nothing but the local tensors;
what others need of the full weight, such as norms for LAMB, comes from the ranks that hold its other parts.
"""
