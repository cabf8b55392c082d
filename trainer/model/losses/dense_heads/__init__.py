"""Losses of detectors that predict boxes at every cell of a grid: YOLO, SSD, RetinaNet, FCOS, CenterNet."""
