"""Images: from encoded files to the tensors that a model takes.

    image_inputs.py    which inputs are images, and of which size, channels and layout
    image_decoding.py        bytes -> pixels (Pillow)
    geometry.py        pixels of any size -> pixels of one size (Pillow)
    image_computer.py  both for all rows, while shards are written
    augmentation.py    random changes by torchvision, drawn from a sample's own generator
    image_batches.py   the tensors of a micro-batch
    image_sources.py   folders of classes, tar files of WebDataset

What sharding imports needs no torch.
"""
