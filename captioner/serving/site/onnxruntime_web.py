"""Gets the files of onnxruntime-web, which run a model in a browser.

The package is pinned by version and content. It is downloaded once from the npm registry (33 MB),
by npm if it is installed, which reads the user's configuration (registry, proxy, credentials). A
wheel does not contain it: few exports are sites.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from pathlib import Path, PurePosixPath

from captioner.errors import ConfigError, first_line
from captioner.files import atomic_write

PACKAGE = "onnxruntime-web"
VERSION = "1.30.0"
INTEGRITY = (
    "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZ"
    "ClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)
"""Of the package, as in the registry and in a package-lock.json."""

FILES = (
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
"""What a site needs, in the package's folder ``dist``."""

_URL = f"https://registry.npmjs.org/{PACKAGE}/-/{PACKAGE}-{VERSION}.tgz"
_SECONDS = 300
"""Time limit of a download."""
_HINT = f"give the tarball that npm pack {PACKAGE}@{VERSION} writes, or the folder of that package"


def runtime_files(source: str | Path | None = None) -> dict[str, bytes]:
    """The content of ``FILES`` by name.

    Args:
        source: Tarball of the package, or its folder, such as ``node_modules/onnxruntime-web``;
            None: from the cache folder, or from the npm registry.

    Raises:
        ConfigError: The source is missing or of another version, or the download fails.
    """
    if source is not None:
        try:
            return _read(Path(source))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"--onnxruntime-web {source}: {first_line(error)}; {_HINT}"
            ) from error
    cached = cache_file()
    if cached.is_file() and _is_pinned(tarball := cached.read_bytes()):
        return _unpack(tarball)
    tarball = _download()
    files = _unpack(tarball)
    atomic_write(cached, tarball)
    return files


def cache_file() -> Path:
    """Where the package is kept: below XDG_CACHE_HOME, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "captioner" / f"{PACKAGE}-{VERSION}.tgz"


def _read(source: Path) -> dict[str, bytes]:
    """Read a tarball or the folder of an installed package, whose content npm has checked."""
    if not source.is_dir():
        return _unpack(source.read_bytes())
    version = json.loads((source / "package.json").read_bytes())["version"]
    if version != VERSION:
        raise ConfigError(f"--onnxruntime-web {source} is version {version}; {_HINT}")
    return {name: (source / "dist" / name).read_bytes() for name in FILES}


def _is_pinned(tarball: bytes) -> bool:
    digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    return f"sha512-{digest}" == INTEGRITY


def _unpack(tarball: bytes) -> dict[str, bytes]:
    if not _is_pinned(tarball):
        raise ConfigError(f"this is not {PACKAGE} {VERSION} (its SHA-512 differs); {_HINT}")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(tarball)) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in FILES and (content := archive.extractfile(member)) is not None:
                files[name] = content.read()
    return files


def _download() -> bytes:
    """The package from the npm registry."""
    try:
        if npm := shutil.which("npm"):
            with tempfile.TemporaryDirectory() as folder:
                command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent"]
                subprocess.run(
                    command, cwd=folder, capture_output=True, timeout=_SECONDS, check=True
                )
                return next(Path(folder).glob("*.tgz")).read_bytes()
        with urllib.request.urlopen(_URL, timeout=_SECONDS) as response:
            content: bytes = response.read()
        return content
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        raise ConfigError(
            f"cannot download {PACKAGE} {VERSION} ({first_line(error)}); run npm pack "
            f"{PACKAGE}@{VERSION} where there is a network, and give its file to --onnxruntime-web"
        ) from error
