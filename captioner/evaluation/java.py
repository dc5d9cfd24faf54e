"""METEOR and SPICE, the metrics of pycocoevalcap that run Java programs.

Captions and references are tokens separated by spaces. METEOR's program returns 23 counts per
caption, such as lengths, matches and chunks. `meteor_from_counts` computes the score of one caption
from its counts, or the score of a set of captions from the sums of their counts.

Note: the METEOR program decodes text with the system encoding. Under a locale such as ``C``, old
versions of Java read non-ASCII letters as question marks. The same happens in pycocoevalcap.

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
"""Number of counts per caption. "Both" means candidate and reference, in this order:

* words of both (2) and function words of both (2);
* for each of four matchers (exact, stem, synonym, paraphrase), the matched content words of both
  and the matched function words of both (16);
* chunks (1);
* matched words of both (2).

A perfect match (one chunk that covers both sides) has 0 chunks here, because the program leaves its
chunk out of the sums.
"""

_CORENLP = "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip"
_TOO_NEW_FOR_SPICE = 16  # it forbids the reflection that the libraries of SPICE use

# METEOR 1.5 for English (option "-l en").
_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75
_MATCHER_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])


def find_java() -> str | None:
    """Return the path of the ``java`` that pycocoevalcap would start, or None."""
    return shutil.which("java")


def unavailable(metric: str) -> str | None:
    """Return why METEOR or SPICE cannot be computed, with a remedy, or None if it can."""
    if not is_installed("pycocoevalcap"):
        return f"{metric} needs pycocoevalcap; run: pip install 'captioner[evaluate]'"
    if find_java() is None:
        version = " 8 or 11" if metric == "SPICE" else ""
        return f"{metric} needs Java, which is not on the PATH; install Java{version}"
    if metric == "SPICE":
        ran = subprocess.run(["java", "-version"], capture_output=True, check=False)
        found = re.search(rb'version "(\d+)', ran.stderr)  # 1 is Java 8 or older
        if found is not None and int(found[1]) >= _TOO_NEW_FOR_SPICE:
            return (
                f"SPICE needs Java 8 or 11, but {find_java()} is Java {int(found[1])}; put Java "
                "8 or 11 first on the PATH"
            )
    return None


def meteor_counts(
    candidates: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Return METEOR's counts (see `METEOR_COUNTS`) for one caption per image, (N, 23).

    The program takes seconds to start and 2 GB of memory.

    Raises:
        ProgramError: The program stopped.
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
            f"METEOR's Java program stopped ({problem or 'no output'}); it needs 2 GB"
        ) from error
    perfect = (counts[:, 21:23] == counts[:, 0:2]).all(axis=1) & (counts[:, 20] == 1)
    counts[perfect, 20] = 0
    return counts


def meteor_from_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute METEOR from the counts of a caption, or from their sums over many captions.

        P, R = weighted matches over weighted words, of candidate and reference
        F = 1 / ((1 - alpha) / P + alpha / R)
        METEOR = F (1 - gamma (chunks / matches) ^ beta)

    Content words have the weight delta, function words 1 - delta. METEOR decides by its own list
    which words are function words. The score is 0 if nothing matches.

    Source: Denkowski & Lavie 2014, section 2, with the parameters of METEOR 1.5 for English.
    Deviation: none; equal to the program up to rounding.

    Args:
        counts: Counts, (..., 23), see `METEOR_COUNTS`.

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
    """Compute SPICE, an F-score, for one caption per image, (N,). NaN where it is undefined.

    pycocoevalcap downloads CoreNLP (some hundred MB) into its own folder if it is missing.

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
            f"SPICE's Java program failed (exit {error.returncode}, output above); it needs Java 8 "
            "or 11 and 8 GB of memory",
        ) from error
    except (OSError, BadZipFile, ValueError, LookupError, TypeError) as error:
        raise ProgramError(
            f"SPICE could not be run ({error!r}); if it cannot download {_CORENLP}, copy the two "
            f"jars into {Path(source.__file__).parent / 'lib'}, which must be writable",
        ) from error


PROGRAMS = {"METEOR": meteor_counts, "SPICE": spice}
"""The function that returns the counts or scores of images for each metric."""
