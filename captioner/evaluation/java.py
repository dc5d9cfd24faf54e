"""METEOR and SPICE, the metrics of pycocoevalcap that run Java programs.

This module wraps pycocoevalcap's classes: it checks beforehand that what they need is installed,
closes what they leave open, and turns failures into one-line errors.

METEOR computes 23 counts per caption (lengths, matches, chunks) and scores any set of captions from
their sums. `meteor_from_counts` is that last step in Python.

Note: the METEOR program decodes text with the system encoding. Under a locale such as ``C`` old
versions of Java read non-ASCII letters as question marks, as they do under pycocoevalcap.

Source: Denkowski & Lavie 2014, Meteor Universal (METEOR 1.5); Anderson et al. 2016
(arXiv:1607.08822), SPICE.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from captioner.errors import ConfigError, ProgramError
from captioner.hardware import is_installed

JAVA_METRICS = ("METEOR", "SPICE")

METEOR_COUNTS = 23
"""Counts per caption: words of candidate and reference, function words of both; for each of four
matchers (exact, stem, synonym, paraphrase) the matched content words of both and function words of
both; then chunks, and matched words of both. A perfect match (one chunk that covers both sides) has
0 chunks here, because the program leaves its chunk out of the sums."""

_TOO_NEW_FOR_SPICE = 16  # it forbids the reflection that SPICE's libraries use

# METEOR 1.5 for English (option "-l en").
_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75
_MATCHER_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])


def find_java() -> str | None:
    """Path of the ``java`` that pycocoevalcap would start, or None."""
    return shutil.which("java")


def unavailable(metric: str, download: bool = False) -> str | None:
    """Why a metric cannot be computed, and what to do.

    Args:
        metric: ``METEOR`` or ``SPICE``.
        download: Whether pycocoevalcap may download CoreNLP for SPICE.

    Returns:
        One line, or None if all that can be checked beforehand is installed.
    """
    if not is_installed("pycocoevalcap"):
        return f"{metric} needs pycocoevalcap; run: pip install 'captioner[evaluate]'"
    if find_java() is None:
        return f"{metric} needs Java, which is not on the PATH; install Java 8 or 11"
    try:
        ran = subprocess.run(["java", "-version"], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{metric} needs Java, but {find_java()} cannot be started ({error})"
    if metric != "SPICE":
        return None
    version = re.search(rb'version "(\d+)', ran.stderr)  # 1 is Java 8 or older
    if version is not None and int(version[1]) >= _TOO_NEW_FOR_SPICE:
        return (
            f"SPICE needs Java 8 or 11, but {find_java()} is Java {int(version[1])}; put Java 8 or "
            "11 first on the PATH"
        )
    return _spice_problem(download)


class MeteorScores(NamedTuple):
    """METEOR of N captions."""

    corpus: float
    """Score of all captions from the sums of their counts; not the mean."""
    images: NDArray[np.float64]
    """Score of each caption, (N,)."""
    counts: NDArray[np.float64]
    """(N, 23), see `METEOR_COUNTS`."""


class Meteor:
    """pycocoevalcap's METEOR as a context manager that runs one Java program.

    The program takes seconds to start and 2 GB of memory.

    Raises:
        ConfigError: Java is missing.
    """

    def __init__(self) -> None:
        if reason := unavailable("METEOR"):
            raise ConfigError(reason)
        from pycocoevalcap.meteor.meteor import Meteor as Program

        self._program = Program()
        self._process: subprocess.Popen[bytes] = self._program.meteor_p

    def __enter__(self) -> Meteor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the program and close its pipes; pycocoevalcap leaves two of them open."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):  # unsent data cannot be flushed to a program that has ended
                if pipe is not None:
                    pipe.close()
        self._process.wait()

    def score(self, candidates: Sequence[str], references: Sequence[Sequence[str]]) -> MeteorScores:
        """Score one caption per image.

        Args:
            candidates: N captions, tokens separated by spaces.
            references: Reference captions of each, in the same form.

        Raises:
            ProgramError: The program stopped.
        """
        pairs = list(zip(candidates, references, strict=True))
        # Not pycocoevalcap's compute_score: after an error it keeps a lock for which its own
        # destructor waits forever.
        try:
            lines = [
                self._program._stat(_sendable(candidate), [_sendable(text) for text in texts])
                for candidate, texts in pairs
            ]
            counts = np.array([line.split() for line in lines], dtype=np.float64)
            if counts.shape != (len(lines), METEOR_COUNTS):
                raise self._stopped()
            *images, corpus = self._evaluate(lines)
        except (OSError, ValueError) as error:  # a broken pipe; output that is not a number
            raise self._stopped() from error
        perfect = (counts[:, 21:23] == counts[:, 0:2]).all(axis=1) & (counts[:, 20] == 1)
        counts[perfect, 20] = 0
        return MeteorScores(corpus, np.array(images), counts)

    def _evaluate(self, lines: Sequence[str]) -> list[float]:
        """Scores of each line of counts, followed by that of all lines together."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ValueError("no pipes")
        stdin.write(" ||| ".join(["EVAL", *lines]).encode() + b"\n")
        stdin.flush()
        return [float(stdout.readline()) for _ in range(len(lines) + 1)]

    def _stopped(self) -> ProgramError:
        """An error with the first line of the program's stderr."""
        self._process.kill()  # if it still runs, later output would match no request
        output = b""
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):  # a child may hold the pipe
            output = self._process.communicate(timeout=1)[1]
        first = next(iter(output.decode(errors="replace").strip().splitlines()), "no output")
        return ProgramError("METEOR", f"METEOR's Java program stopped ({first}); it needs 2 GB")


def meteor_from_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """METEOR scores from the counts of a caption, or from their sums over many captions.

        P, R = weighted matches over weighted words, of candidate and reference
        F = 1 / ((1 - alpha) / P + alpha / R)
        METEOR = F (1 - gamma (chunks / matches) ^ beta)

    Content words weigh delta, function words 1 - delta. The score is 0 if nothing matches.

    Source: Denkowski & Lavie 2014, section 2, with the parameters of METEOR 1.5 for English.
    Deviation: none; equal to the program up to rounding.

    Args:
        counts: (..., 23), see `METEOR_COUNTS`.

    Returns:
        (...).
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


def spice(
    candidates: Sequence[str], references: Sequence[Sequence[str]], download: bool = False
) -> tuple[float, list[float]]:
    """SPICE of one caption per image.

    Args:
        candidates: N captions, tokens separated by spaces.
        references: Reference captions of each, in the same form.
        download: Let pycocoevalcap download CoreNLP (some hundred MB) if it is missing.

    Returns:
        Mean over the images, and the F-score of each image. If SPICE is undefined for an image, it
        is NaN and so is the mean, as in pycocoevalcap.

    Raises:
        ConfigError: Java or CoreNLP is missing, or pycocoevalcap's folder is not writable.
        ProgramError: The program failed.
    """
    if reason := unavailable("SPICE", download):
        raise ConfigError(reason)
    from pycocoevalcap.spice.spice import Spice

    truth = {number: list(texts) for number, texts in enumerate(references)}
    result = {number: [text] for number, text in enumerate(candidates)}
    try:
        with redirect_stdout(sys.stderr):  # the download prints its progress
            corpus, images = Spice().compute_score(truth, result)
        return float(corpus), [float(image["All"]["f"]) for image in images]
    except subprocess.CalledProcessError as error:
        raise ProgramError(
            "SPICE",
            f"SPICE's Java program failed (exit {error.returncode}, output above); it needs Java 8 "
            "or 11 and 8 GB of memory",
        ) from error
    except BadZipFile as error:
        raise ProgramError(
            "SPICE", f"the download is not CoreNLP ({error}); {_install_hint()}"
        ) from error
    except OSError as error:
        raise ProgramError(
            "SPICE", f"SPICE could not be prepared ({error}); {_install_hint()}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ProgramError("SPICE", f"SPICE's output is invalid ({error!r})") from error


def _spice_problem(download: bool) -> str | None:
    """Which of SPICE's requirements is not met, or None."""
    parts = _spice_parts()
    main, models = parts.jars
    # pycocoevalcap checks for the main jar only; if that is present it downloads nothing.
    if not (models.is_file() and main.is_file()) and (main.is_file() or not download):
        missing = models if main.is_file() else main
        return f"SPICE needs {missing.name}, which is not installed; {_install_hint()}"
    folders = [parts.folder / "tmp", parts.folder / "cache"]
    if not main.is_file():
        folders += [parts.folder, main.parent]
    for folder in folders:
        nearest = folder if folder.exists() else parts.folder
        if not os.access(nearest, os.W_OK):
            return (
                f"SPICE needs write access to {nearest}; "
                "install pycocoevalcap in your own environment"
            )
    return None


class _SpiceParts(NamedTuple):
    folder: Path
    jars: tuple[Path, Path]
    url: str


def _spice_parts() -> _SpiceParts:
    """Paths and URL that pycocoevalcap uses."""
    from pycocoevalcap.spice import get_stanford_models as source

    folder = Path(source.SPICEDIR)
    jars = [folder / source.SPICELIB / f"{source.JAR}{end}.jar" for end in ("", "-models")]
    url = f"http://nlp.stanford.edu/software/{source.CORENLP}.zip"
    return _SpiceParts(folder, (jars[0], jars[1]), url)


def _install_hint() -> str:
    parts = _spice_parts()
    names = " and ".join(jar.name for jar in parts.jars)
    return f"put {names} from {parts.url} into {parts.jars[0].parent}"


def _sendable(text: str) -> str:
    """The text as one encodable line; the program reads one request per line."""
    line = text.replace("\n", " ").replace("\r", " ")
    return line.encode(errors="replace").decode()  # lone surrogates
