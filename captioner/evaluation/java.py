"""METEOR and SPICE: pycocoevalcap's metrics that are Java programs.

Both are left to pycocoevalcap's own classes; this module says beforehand what they lack, closes
what they leave open, and gives one line when they fail.

METEOR keeps 23 numbers of each caption (lengths, matches, chunks) and scores any set of captions
from the sums of these. `meteor_from_counts` is this last step without the program.

Note: the program reads text in the encoding of the system. Under a locale such as ``C`` an old
Java sees other letters than those of ASCII as question marks, as it does under pycocoevalcap.

Source: Denkowski & Lavie 2014, Meteor Universal (METEOR 1.5); Anderson et al. 2016
(arXiv:1607.08822), SPICE.
"""

from __future__ import annotations

import os
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

JAVA_METRICS = ("METEOR", "SPICE")

METEOR_COUNTS = 23
"""Numbers that METEOR keeps of a caption: the words of candidate and reference, the function words
of both; for each of four matchers (exact, stem, synonym, paraphrase) the matched content words of
both and function words of both; then chunks, and matched words of both. A perfect caption, one
chunk that is all of both sides, has 0 chunks here: the program leaves its chunk out of the sums."""

# METEOR 1.5 for English, what "-l en" stands for.
_ALPHA, _BETA, _GAMMA, _DELTA = 0.85, 0.2, 0.6, 0.75
_MATCHER_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])


def find_java() -> str | None:
    """The ``java`` that pycocoevalcap would start; None where there is none."""
    return shutil.which("java")


def unavailable(metric: str, download: bool = False) -> str | None:
    """Why a metric cannot be computed here, and what to do.

    Args:
        metric: ``METEOR`` or ``SPICE``.
        download: Whether pycocoevalcap may fetch what SPICE lacks.

    Returns:
        One line; None when all that can be checked beforehand is there.

    Raises:
        ConfigError: It is another metric.
    """
    if metric not in JAVA_METRICS:
        raise ConfigError(f"{metric!r} is no metric of Java; give {' or '.join(JAVA_METRICS)}")
    if find_java() is None:
        return (
            f"{metric} needs Java, and there is no java on the PATH; install Java 8 or 11, "
            "or leave it out: all other metrics do without"
        )
    if reason := _cannot_start():
        return f"{metric} needs Java, and {reason}; install Java 8 or 11, or leave it out"
    return _spice_lacks(download) if metric == "SPICE" else None


def _cannot_start() -> str | None:
    """Why the ``java`` that is there cannot even be started."""
    try:
        subprocess.run(["java", "-version"], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{find_java()} cannot be started ({error})"
    return None


class MeteorScores(NamedTuple):
    """METEOR of N captions."""

    corpus: float
    """Of all of them, from the sums of their counts; not the mean."""
    images: NDArray[np.float64]
    """Of each, (N,)."""
    counts: NDArray[np.float64]
    """(N, 23), see `METEOR_COUNTS`."""


class Meteor:
    """pycocoevalcap's METEOR, one Java program from ``with`` to its end.

    It takes seconds to start and 2 GB of memory.
    """

    def __init__(self) -> None:
        """Start the program.

        Raises:
            ConfigError: There is no Java.
        """
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
        """End the program and close its pipes; pycocoevalcap leaves two of them open."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):  # what was not sent yet cannot be sent to a dead program
                if pipe is not None:
                    pipe.close()
        self._process.wait()

    def score(self, candidates: Sequence[str], references: Sequence[Sequence[str]]) -> MeteorScores:
        """Score one caption an image.

        Args:
            candidates: N captions, their tokens parted by spaces.
            references: The true captions of each, likewise.

        Raises:
            ProgramError: The program stopped.
        """
        pairs = list(zip(candidates, references, strict=True))
        # Not pycocoevalcap's compute_score: after an error it holds a lock on which its own
        # destructor waits for ever.
        try:
            lines = [
                self._program._stat(_sendable(candidate), [_sendable(text) for text in texts])
                for candidate, texts in pairs
            ]
            counts = np.array([line.split() for line in lines], dtype=np.float64)
            if counts.shape != (len(lines), METEOR_COUNTS):
                raise self._stopped()
            *images, corpus = self._evaluate(lines)
        except (OSError, ValueError) as error:  # a broken pipe; an answer that is no number
            raise self._stopped() from error
        perfect = (counts[:, 21:23] == counts[:, 0:2]).all(axis=1) & (counts[:, 20] == 1)
        counts[perfect, 20] = 0
        return MeteorScores(corpus, np.array(images), counts)

    def _evaluate(self, lines: Sequence[str]) -> list[float]:
        """The score of each line of counts and then of all together."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ValueError("no pipes")
        stdin.write(" ||| ".join(["EVAL", *lines]).encode() + b"\n")
        stdin.flush()
        return [float(stdout.readline()) for _ in range(len(lines) + 1)]

    def _stopped(self) -> ProgramError:
        """What the program last said, as an error."""
        self._process.kill()  # if it still runs, what it says next would belong to nothing
        said = b""
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):  # a child may hold the pipe
            said = self._process.communicate(timeout=1)[1]
        first = next(iter(said.decode(errors="replace").strip().splitlines()), "it said nothing")
        return ProgramError(
            "METEOR",
            f"METEOR's Java program stopped ({first}); free 2 GB of memory, or leave METEOR out",
        )


def meteor_from_counts(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """METEOR's last step: from counts, of a caption or summed over many, to scores.

        P, R = weighted matches over weighted words, of candidate and reference
        F = 1 / ((1 - alpha) / P + alpha / R)
        METEOR = F (1 - gamma (chunks / matches) ^ beta)

    Words weigh delta, function words 1 - delta. Nothing matched scores 0.

    Source: Denkowski & Lavie 2014, section 2, with the numbers of METEOR 1.5 for English.
    Deviation: none; equal to the program to rounding.

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
    """SPICE of one caption an image.

    Args:
        candidates: N captions, their tokens parted by spaces.
        references: The true captions of each, likewise.
        download: Let pycocoevalcap fetch CoreNLP, some hundred MB, when it is not there.

    Returns:
        Mean over the images, and each image's F-score. Where SPICE gives no number it is NaN, and
        then so is the mean, as in pycocoevalcap.

    Raises:
        ConfigError: Java or CoreNLP is missing, or pycocoevalcap's folder cannot be written.
        ProgramError: The program failed.
    """
    if reason := unavailable("SPICE", download):
        raise ConfigError(reason)
    from pycocoevalcap.spice.spice import Spice

    truth = {number: list(texts) for number, texts in enumerate(references)}
    result = {number: [text] for number, text in enumerate(candidates)}
    try:
        with redirect_stdout(sys.stderr):  # the download prints how far it is
            corpus, images = Spice().compute_score(truth, result)
        return float(corpus), [float(image["All"]["f"]) for image in images]
    except subprocess.CalledProcessError as error:
        raise ProgramError(
            "SPICE",
            f"SPICE's Java program failed (exit {error.returncode}); what it said stands above: "
            "it wants Java 8 or 11 (16 and later refuse it) and 8 GB of memory",
        ) from error
    except BadZipFile as error:
        raise ProgramError(
            "SPICE", f"what was downloaded is not CoreNLP ({error}); {_by_hand()}"
        ) from error
    except OSError as error:
        raise ProgramError(
            "SPICE", f"SPICE could not be prepared ({error}); {_by_hand()}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ProgramError(
            "SPICE", f"SPICE's answer cannot be read ({error!r}); leave SPICE out"
        ) from error


def _spice_lacks(download: bool) -> str | None:
    parts = _spice_parts()
    main, models = parts.jars
    # pycocoevalcap looks for the first jar alone: with only this one there it fetches nothing.
    if not (models.is_file() and main.is_file()) and (main.is_file() or not download):
        missing = models if main.is_file() else main
        return f"SPICE needs {missing.name}, which pycocoevalcap does not bring; {_by_hand()}"
    folders = [parts.folder / "tmp", parts.folder / "cache"]
    if not main.is_file():
        folders += [parts.folder, main.parent]
    for folder in folders:
        nearest = folder if folder.exists() else parts.folder
        if not os.access(nearest, os.W_OK):
            return (
                f"SPICE writes into {nearest}, which you may not write to; "
                "install pycocoevalcap into an environment of your own"
            )
    return None


class _SpiceParts(NamedTuple):
    folder: Path
    jars: tuple[Path, Path]
    url: str


def _spice_parts() -> _SpiceParts:
    """Where pycocoevalcap wants what, in its own words."""
    from pycocoevalcap.spice import get_stanford_models as source

    folder = Path(source.SPICEDIR)
    jars = [folder / source.SPICELIB / f"{source.JAR}{end}.jar" for end in ("", "-models")]
    url = f"http://nlp.stanford.edu/software/{source.CORENLP}.zip"
    return _SpiceParts(folder, (jars[0], jars[1]), url)


def _by_hand() -> str:
    parts = _spice_parts()
    names = " and ".join(jar.name for jar in parts.jars)
    return f"put {names} from {parts.url} into {parts.jars[0].parent}"


def _sendable(text: str) -> str:
    """One line that a pipe takes: a second would be a second question to the program."""
    line = text.replace("\n", " ").replace("\r", " ")
    return line.encode(errors="replace").decode()  # half of a surrogate pair
