"""Images, audio and tar files that are wrong: bombs, files that are cut off, headers that lie."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import tarfile
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from onward.trainer.bounds import AUDIO_SAMPLES
from tests.hostile.cases import SPARSE, case, damaged
from tests.hostile.onnx_files import image_model, small_model
from tests.hostile.sandbox import Case

IMAGES = '[data.image]\nsize = 8\nlayout = "nchw"\ncolor = "rgb"\n'


def _png(width: int, height: int) -> bytes:
    """A PNG whose header states a size that its few bytes do not have."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1 << 16))) + chunk(b"IEND", b"")


def _image(rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return _png(*rng.choice(((30_000, 30_000), (2**31 - 1, 2**31 - 1), (13_000, 13_000), (0, 5), (1, 170_000_000))))
    if kind == 1:
        return _large_image() if rng.random() < 0.1 else _png(11_000, 11_000)
    if kind == 2:
        return rng.choice((b"", b"\xff\xd8\xff", b"GIF89a", b"RIFF", b"II*\0" + bytes(100), rng.randbytes(500)))
    file = io.BytesIO()
    image = Image.new(rng.choice(("RGB", "L", "P")), (9, 9), 3)
    image.save(file, rng.choice(("png", "gif", "tiff", "bmp", "webp" if image.mode == "RGB" else "png")))
    return damaged(rng, file.getvalue())


def images(rng: random.Random, folder: Path) -> Case:
    """Image files in folders, in tables and in tar files: bombs, cut off, no images, FIFOs, sparse."""
    kind = rng.randrange(3)
    for number in range(8):
        place = folder / "photos" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(_image(rng) if rng.random() < 0.4 else _good_image())
    if kind == 0:
        return case(rng, folder, "photos", "data.evaluation_fraction=0.5", model=image_model(), table=IMAGES)
    if kind == 1:
        with (folder / "sparse.png").open("wb") as file:
            file.truncate(SPARSE)
        os.mkfifo(folder / "fifo.png")
        names = (
            "fifo.png",
            "sparse.png",
            "/dev/zero",
            "photos",
            "../secret/nothing",
            "a\\u0000b",
            "x" * 300,
            "photos/a/0.png",
        )
        rows = "".join(f'{{"image": "{rng.choice(names)}", "label": {i % 2}}}\n' for i in range(8))
        (folder / "train.jsonl").write_text(rows)
        return case(rng, folder, "train.jsonl", model=image_model(), table=IMAGES)
    return _tar(rng, folder)


def wrong_suffixes(rng: random.Random, folder: Path) -> Case:
    """Files whose suffix is that of another kind: programs of PostScript, documents, audio and archives as images."""
    import soundfile

    sound = io.BytesIO()
    soundfile.write(sound, np.zeros(800, np.int16), 8000, format="wav")
    odd = io.BytesIO()
    Image.new("RGB", (9, 9)).save(odd, rng.choice(("ico", "pcx", "tga", "sgi", "icns", "dds", "eps", "pdf")))
    drawn = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(../secret/x) (w) file\nshowpage\n%%EOF\n"
    contents = (drawn, drawn, odd.getvalue(), sound.getvalue(), gzip.compress(_good_image()), b"<svg/>", b"MZ\0\0")
    suffixes = ("png", "jpg", "gif", "tif", "webp", "bmp", "jp2", "ppm", "eps", "wav", "flac")
    is_audio = rng.random() < 0.25
    for number in range(8):
        place = folder / "photos" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        content = rng.choice(contents) if rng.random() < 0.6 else sound.getvalue() if is_audio else _good_image()
        suffix = rng.choice(suffixes[-2:] if is_audio else suffixes)
        (place / f"{number}.{suffix}").write_bytes(content)
    if is_audio:
        table = "[data.audio]\nsample_rate = 8000\nseconds = 0.0005\n"
        settings = ("data.evaluation_fraction=0.5", "data.inputs={x='audio'}")
        made = case(rng, folder, "photos", *settings, table=table)
    else:
        made = case(rng, folder, "photos", "data.evaluation_fraction=0.5", model=image_model(), table=IMAGES)
    return replace(made, starts_programs=False)


def cells(rng: random.Random, folder: Path) -> Case:
    """Tables whose cells name files outside of the folder of the data."""
    (folder / "photos").mkdir()
    (folder / "photos" / "0.png").write_bytes(_good_image())
    (folder / "photos" / "link.png").symlink_to("../../secret/secret.bin")
    (folder / "link").symlink_to("../secret")
    outside = Path("../secret/secret.bin")
    names = (
        "../secret/secret.bin",
        str(outside.resolve()),
        "link/secret.bin",
        "photos/link.png",
        "photos/../../secret",
    )
    names += ("./../secret/secret.bin", "photos//..//..//secret/secret.bin", "/etc/hostname", "~/../secret/secret.bin")
    rows = [{"image": rng.choice(names) if rng.random() < 0.5 else "photos/0.png", "label": i % 2} for i in range(8)]
    rows.append({"image": rng.choice(names), "label": 0})
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = ("data.evaluation_fraction=0.5", "data.bad_rows=skip")[: rng.choice((1, 2))]
    made = case(rng, folder, "train.jsonl", *settings, model=image_model(), table=IMAGES)
    return replace(made, starts_programs=False)


@cache
def _large_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (10_400, 10_400)).save(file, "png", compress_level=1)
    return file.getvalue()


def _good_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 9), (1, 2, 3)).save(file, "png")
    return file.getvalue()


def _tar(rng: random.Random, folder: Path) -> Case:
    path = folder / "train.tar"
    with tarfile.open(path, "w:gz" if (packed := rng.random() < 0.3) else "w") as archive:
        for number in range(8):
            for name, content in (("png", _good_image()), ("cls", str(number % 2).encode())):
                if rng.random() < 0.15:
                    content = rng.choice((b"", b"9" * 5000, b"\xff", _image(rng)))
                member = tarfile.TarInfo(f"{rng.choice(('', '../', '/'))}{number}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        if rng.random() < 0.3:
            member = tarfile.TarInfo("9.png")
            member.type, member.linkname = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)), "../secret/secret.bin"
            archive.addfile(member)
    content = path.read_bytes()
    if rng.random() < 0.2:  # an extended header that states, or has, gigabytes
        info = tarfile.TarInfo("x")
        info.type, info.size = rng.choice((tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE)), 1 << 32
        content = (gzip.compress if packed else bytes)(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    path.write_bytes(damaged(rng, content))
    return case(rng, folder, "train.tar", "data.evaluation_fraction=0.5", model=image_model(), table=IMAGES)


@cache
def _hours_of_silence() -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros(AUDIO_SAMPLES.most, np.int16), 8000, format="flac")
    return file.getvalue()


def audio(rng: random.Random, folder: Path) -> Case:
    """Audio files with headers that lie, and silence of hours."""
    import soundfile

    for number in range(6):
        place = folder / "sounds" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{number}.{rng.choice(('wav', 'flac', 'ogg'))}"
        values = np.zeros((800, rng.choice((1, 2))), np.int16)
        soundfile.write(path, values, rng.choice((8000, 8000, 8000, 1, 192_000)))
        if rng.random() < 0.02:
            path.with_suffix(".flac").write_bytes(_hours_of_silence())
        elif rng.random() < 0.3:
            path.write_bytes(damaged(rng, path.read_bytes()))
    (folder / "model.onnx").write_bytes(small_model().SerializeToString())
    (folder / "config.toml").write_text(
        '[model]\npath = "model.onnx"\n[data]\nsource = "sounds"\nevaluation_fraction = 0.5\ninputs = {x = "audio"}\n'
        "[data.audio]\nsample_rate = 8000\n"
        f"seconds = {rng.choice((0.0005, 0, 1e9))}\n[train]\nnum_steps = 2\nglobal_batch_size = 2\n"
    )
    return Case(("run", "config.toml"))
