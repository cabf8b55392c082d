"""Predict with an exported file from raw rows: all that a machine needs that has no Onward.

    raw rows + preprocessing.json  ->  inputs  ->  onnxruntime  ->  classes, probabilities, numbers

These files are copied into every model that is registered in MLflow. Therefore they import each other relatively,
nothing else of Onward, and of other packages only numpy, pandas and onnxruntime; images take Pillow, texts tokenizers,
audio soundfile and scipy. What they compute is what training's shards hold, bit for bit; a test compares them.
"""
