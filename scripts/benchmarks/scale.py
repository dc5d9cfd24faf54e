"""Time and peak memory of everything that grows with the number of photos.

    python scripts/benchmarks/scale.py [--photos 28000 57000 113287] [--stages NAME ...]

Photos are not read: the captions, five per photo, are invented (see synthetic_captions.py), with
the lengths and the repetition of COCO's. Each stage reads them and runs in a process of its own.
Its peak memory includes imports (``vocabulary`` needs torch, some hundred megabytes) and the
captions. The seconds are processor time, which other programs change less than the elapsed time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from measuring import Rows, in_child, peak, print_table
from synthetic_captions import CAPTIONS, captions, write_annotations

import captioner
from captioner.data.coco import read_dataset
from captioner.text.tokenizer import caption_tokens


def main() -> None:
    """Measure and print a table."""
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--photos", type=int, nargs="+", default=[28_000, 57_000, 113_287])
    given.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    given.add_argument("--file", type=Path, help="run the first stage only, on this captions file")
    options = given.parse_args()
    if options.file:
        started = time.process_time()
        STAGES[options.stages[0]](options.file)
        print(json.dumps([time.process_time() - started, peak()]))
        return
    rows: Rows = {stage: {} for stage in options.stages}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captions.json"
        for photos in options.photos:
            write_annotations(path, photos)
            for stage, row in rows.items():
                seconds, size = in_child(__file__, "--stages", stage, "--file", path)
                row |= {f"{photos:,} photos: s": seconds, f"{photos:,} photos: MB": size}
                print(f"{stage}, {photos:,} photos: {seconds:.1f} s", file=sys.stderr, flush=True)
    print_table("stage", rows)


def read(path: Path) -> None:
    """A COCO captions file to photos with their captions."""
    read_dataset([path], None)


def vocabulary(path: Path) -> None:
    """Tokenize, count words, captions to word numbers."""
    from captioner.options import DataConfig
    from captioner.training.data import encode_captions, new_vocabulary

    photos = read_dataset([path], None)
    found, words = new_vocabulary(photos, DataConfig())
    encode_captions(photos, words, found, max_words=25)


def frequencies(path: Path) -> None:
    """Count document frequencies, to the bytes stored with a model."""
    from captioner.evaluation.references import count_frequencies

    references = {photo.image_id: photo.captions for photo in read_dataset([path], None)}
    count_frequencies(references).to_bytes()


def rewards(path: Path) -> None:
    """The references and their document frequencies for self-critical training."""
    from captioner.evaluation.reward import CaptionReward
    from captioner.text.vocabulary import Vocabulary

    photos = read_dataset([path], None)
    tokens = {p.image_id: [caption_tokens(text) for text in p.captions] for p in photos}
    CaptionReward({"": tokens}, Vocabulary([]))


def evaluate(path: Path) -> None:
    """Score a caption for one photo in three, with intervals."""
    texts = captions(len(read_dataset([path], None)), seed=1)
    results = dict(enumerate(itertools.islice(texts, 0, None, 3 * CAPTIONS), 1))
    captioner.evaluate(annotations=path, results=results, progress=False)


STAGES = {
    "read captions": read,
    "vocabulary": vocabulary,
    "frequencies": frequencies,
    "rewards": rewards,
    "evaluate": evaluate,
}

if __name__ == "__main__":
    main()
