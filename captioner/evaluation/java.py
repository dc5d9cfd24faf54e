"""METEOR and SPICE, the metrics that pycocoevalcap computes with Java programs.

Captions and references are passed as tokens separated by spaces. METEOR's program returns 23 counts
per caption, such as lengths, matches and chunks. `meteor_from_counts` computes the score of one
caption from these counts, or the score of many captions from summed counts.

Note: METEOR's program decodes text with the system encoding. Under a locale such as ``C``, old
versions of Java read non-ASCII letters as question marks, also in pycocoevalcap.

Source: Denkowski & Lavie 2014, Meteor Universal (METEOR 1.5); Anderson et al. 2016
(arXiv:1607.08822), SPICE.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from captioner.errors import ProgramError
from captioner.extras import is_installed

METEOR_COUNTS = 23
"""Number of counts that METEOR's program returns per caption.

The counts are listed below in their order. Each count exists twice, for the candidate (the caption)
and for the reference. Only chunks, which are runs of words in the same order in both texts, are
counted once.

* Words (2).
* Function words (2).
* Matched content words (2) and matched function words (2), for each of four matchers: exact, stem,
  synonym and paraphrase (16 in total).
* Chunks (1).
* Matched words (2).

For a perfect match, a single chunk that covers both texts, the number of chunks is set to 0. The
program leaves such a chunk out of its sums.
"""

_CORENLP = "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip"
_TOO_NEW_FOR_SPICE = 16  # Java 16 and later forbids the reflection in SPICE's libraries

# METEOR 1.5 for English (option "-l en").
_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75
_MATCHER_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])


def find_java() -> str | None:
    """Return the path of the ``java`` program on the PATH, or None if Java is not installed."""
    return shutil.which("java")


def unavailable(metric: str) -> str | None:
    """Return why METEOR or SPICE cannot be computed and what to do, or None if it can be computed.

    ``metric`` is ``METEOR`` or ``SPICE``.
    """
    if not is_installed("pycocoevalcap"):
        return f"{metric} needs pycocoevalcap; run: pip install 'captioner[evaluate]'"
    if find_java() is None:
        version = " 8 or 11" if metric == "SPICE" else ""
        return f"{metric} needs Java, but no java program is on the PATH; install Java{version}"
    if metric == "SPICE":
        ran = subprocess.run(["java", "-version"], capture_output=True, check=False)
        found = re.search(rb'version "(\d+)', ran.stderr)  # 1 is Java 8 or older
        if found is not None and int(found[1]) >= _TOO_NEW_FOR_SPICE:
            return (
                f"SPICE needs Java 8 or 11, but {find_java()} is Java {int(found[1])}; put "
                "Java 8 or 11 first on the PATH"
            )
    return None


def meteor_counts(
    candidates: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Run METEOR's program, and return its counts for one caption per image.

    The program is part of pycocoevalcap. It takes several seconds to start and needs 2 GB of
    memory.

    Args:
        candidates: The caption of each image, (N,), as tokens separated by spaces.
        references: The reference captions of each image, in the same form.

    Returns:
        The counts of each image, such as lengths, matches and chunks, (N, 23). `METEOR_COUNTS`
        lists them.

    Raises:
        ProgramError: The program stopped without a result.
    """
    from pycocoevalcap.meteor import meteor as source

    command = ["java", "-jar", "-Xmx2G", source.METEOR_JAR, "-", "-", "-stdio", "-l", "en", "-norm"]
    lines = [
        " ||| ".join(["SCORE", *texts, text.replace("|||", "").replace("  ", " ")])
        for text, texts in zip(candidates, references, strict=True)
    ]
    ran = subprocess.run(
        command,
        cwd=Path(source.__file__).parent,
        input="".join(f"{line}\n" for line in lines).encode(errors="replace"),  # lone surrogates
        capture_output=True,
        check=False,
    )
    try:
        found = [line.split() for line in ran.stdout.splitlines()]
        counts = np.array(found, dtype=np.float64).reshape(len(candidates), METEOR_COUNTS)
    except ValueError as error:  # missing or unexpected output
        problem = ran.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise ProgramError(
            f"METEOR's Java program stopped ({problem or 'no output'}); free 2 GB of memory for it"
        ) from error
    perfect = (counts[:, 21:23] == counts[:, 0:2]).all(axis=1) & (counts[:, 20] == 1)
    counts[perfect, 20] = 0
    return counts


def meteor_from_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute METEOR from the counts of a caption, or from summed counts of many captions.

        P    = weighted matches / weighted words of the candidate
        R    = weighted matches / weighted words of the reference
        F = 1 / ((1 - alpha) / P + alpha / R)
        METEOR = F (1 - gamma (chunks / matches) ^ beta)

    The weight is delta for content words and 1 - delta for function words. METEOR has its own list
    of function words. The score is 0 if nothing matches.

    Source: Denkowski & Lavie 2014, section 2, with the parameters of METEOR 1.5 for English.
    Deviation: none. Up to rounding, the scores are equal to the program's scores.

    Args:
        counts: Counts from `meteor_counts`, (..., 23).

    Returns:
        The scores, (...).
    """
    words, functions = counts[..., 0:2], counts[..., 2:4]  # of candidate and reference
    matchers = counts[..., 4:20].reshape(*counts.shape[:-1], 4, 4)
    chunks, matched = counts[..., 20], counts[..., 21:23]
    weighted = _DELTA * matchers[..., 0:2] + (1 - _DELTA) * matchers[..., 2:4]
    matches = np.einsum("m,...mc->...c", _MATCHER_WEIGHTS, weighted)
    lengths = _DELTA * (words - functions) + (1 - _DELTA) * functions
    with np.errstate(divide="ignore", invalid="ignore"):
        precision, recall = np.moveaxis(matches / lengths, -1, 0)
        mean = 1 / ((1 - _ALPHA) / precision + _ALPHA / recall)
        scores = mean * (1 - _GAMMA * (chunks / matched.mean(axis=-1)) ** _BETA)
    result: NDArray[np.float64] = np.where(np.isnan(scores), 0.0, scores)
    return result


def spice(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Compute SPICE for one caption per image.

    SPICE is an F-score of the facts in a caption: objects, attributes and relations. On first use,
    pycocoevalcap downloads CoreNLP (several hundred MB) into its own folder.

    Args:
        candidates: The caption of each image, (N,), as tokens separated by spaces.
        references: The reference captions of each image, in the same form.

    Returns:
        The scores, (N,), 0 to 1. A score is NaN if SPICE is undefined for the image.

    Raises:
        ProgramError: The program failed, or could not be prepared.
    """
    from pycocoevalcap.spice import spice as source

    truth = {number: list(texts) for number, texts in enumerate(references)}
    result = {number: [text] for number, text in enumerate(candidates)}
    try:
        with redirect_stdout(sys.stderr):  # the download prints its progress
            images = source.Spice().compute_score(truth, result)[1]
        return np.array([float(image["All"]["f"]) for image in images])
    except subprocess.CalledProcessError as error:
        raise ProgramError(
            f"SPICE's Java program failed with exit status {error.returncode} (see its output "
            "above); use Java 8 or 11, and free 8 GB of memory",
        ) from error
    except (OSError, BadZipFile, ValueError, LookupError, TypeError) as error:
        raise ProgramError(
            f"SPICE could not be run ({error!r}); make {Path(source.__file__).parent / 'lib'} "
            f"writable, or copy the two jars from {_CORENLP} into it",
        ) from error


PROGRAMS = {"METEOR": meteor_counts, "SPICE": spice}
"""Function that computes the counts or scores of all images, by the name of the metric."""
