#!/usr/bin/env python
"""Photos per processor second that one reader of shards delivers, from a disk and from S3.

    python scripts/benchmark_shards.py assets/examples --photos 400 --image-size 224

A reader opens a shard, checks it, shuffles, decodes and resizes, as in training. The S3 server
(moto) runs in this machine's memory, so that its network is left out; only processor seconds of the
reader are counted.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import fsspec
from moto.server import ThreadedMotoServer

from captioner.data.batches import EncodedImage, PhotoReader
from captioner.data.coco import CaptionedImage
from captioner.data.shard_stream import ShardStream
from captioner.data.shards import read_manifest, write_shards
from captioner.model.preprocessing import Preprocessing


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="photos")
    parser.add_argument("--photos", type=int, default=400)
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.jpg"))
    images = [CaptionedImage(n, files[n % len(files)], ("a photo",)) for n in range(options.photos)]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(images, Path(folder), photos_per_shard=100).manifest
        total = sum(shard.bytes for shard in shards.shards)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        for path in Path(folder).iterdir():
            with fsspec.open(f"s3://bucket/shards/{path.name}", "wb") as file:
                file.write(path.read_bytes())
        print(f"{total / len(images) / 1000:.0f} kB per photo\n")
        print("| shards | photos per processor second |\n|---|---|")
        for name in (folder, "s3://bucket/shards"):
            read(name, images, options.image_size)  # warm: imports, connections
            seconds = read(name, images, options.image_size)
            where = "disk" if name == folder else "S3"
            print(f"| {where} | {len(images) / seconds:.0f} |", flush=True)
    server.stop()


def read(folder: str, images: list[CaptionedImage], image_size: int) -> float:
    """Processor seconds of a reader that delivers every photo once."""
    pid = os.fork()  # the server's time is not counted
    if pid == 0:
        items = {image.image_id: EncodedImage(image, ((4, 5),)) for image in images}
        stream = ShardStream(
            read_manifest(folder),
            items,
            PhotoReader(Preprocessing(image_size), max_captions=1),
            batch_size=32,
        )
        assert sum(len(batch) for batch in stream) == len(images)
        os._exit(0)
    _, status, used = os.wait4(pid, 0)
    assert status == 0
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
