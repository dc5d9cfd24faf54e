"""The files of onnxruntime-web, the npm package that runs a model in the browser.

The version and the content of the package are pinned. The package (33 MB) is downloaded once from
the npm registry. If npm is installed, npm downloads it, so that the user's settings apply
(registry, proxy, credentials). captioner's wheel does not contain the package, because few users
export a site.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from captioner.errors import ConfigError
from captioner.files import atomic_write
from captioner.messages import first_line

VERSION = "1.30.0"
PACKAGE = f"onnxruntime-web@{VERSION}"
INTEGRITY = (
    "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZ"
    "ClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)
"""Digest of the package, in the format of the registry and package-lock.json."""

FILES = (
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
"""The files in the package's folder ``dist`` that a site needs."""

_URL = f"https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"
_SECONDS = 300  # time limit of a download


def runtime_files(source: str | Path | None = None) -> dict[str, bytes]:
    """Return the content of ``FILES`` by name.

    Args:
        source: Tarball or folder of the package, such as ``node_modules/onnxruntime-web``. None:
            use the cache folder, or download the package.

    Raises:
        ConfigError: The source is missing or has a different version, or the download fails.
    """
    if source is None and not cache_file().is_file():
        tarball = _download()
        _unpack(tarball)  # fails if the content is not as expected
        atomic_write(cache_file(), tarball)
    source = Path(source or cache_file())
    try:
        if not source.is_dir():
            return _unpack(source.read_bytes())
        if f'"version": "{VERSION}"' not in (source / "package.json").read_text("utf-8"):
            raise ConfigError(f"the version of the package is not {VERSION}")
        return {name: (source / "dist" / name).read_bytes() for name in FILES}
    except (OSError, ConfigError) as error:
        hint = f"pass the tarball from npm pack {PACKAGE}, or the unpacked folder"
        why = first_line(error)
        raise ConfigError(f"--onnxruntime-web {source} cannot be used ({why}); {hint}") from error


def cache_file() -> Path:
    """Return the path of the cached package, in XDG_CACHE_HOME or else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "captioner" / f"onnxruntime-web-{VERSION}.tgz"


def _unpack(tarball: bytes) -> dict[str, bytes]:
    digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    if f"sha512-{digest}" != INTEGRITY:
        raise ConfigError(f"the file is not {PACKAGE}, because its SHA-512 differs")
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(tarball))) as archive:
        return {
            name: archive.extractfile(f"package/dist/{name}").read()  # type: ignore[union-attr]
            for name in FILES
        }


def _download() -> bytes:
    """Download the package from the npm registry."""
    try:
        if npm := shutil.which("npm"):
            command = [npm, "pack", PACKAGE, "--silent"]
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run(
                    command, cwd=folder, capture_output=True, timeout=_SECONDS, check=True
                )
                return next(Path(folder).glob("*.tgz")).read_bytes()
        with urllib.request.urlopen(_URL, timeout=_SECONDS) as response:
            content: bytes = response.read()
        return content
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{PACKAGE} cannot be downloaded ({first_line(error)}); run npm pack {PACKAGE} "
            "on a machine with a network, and pass the file with --onnxruntime-web"
        ) from error
