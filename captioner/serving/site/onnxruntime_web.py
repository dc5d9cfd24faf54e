"""Gets the files of onnxruntime-web, which run a model in a browser.

The version is pinned, and so is the content of every file. The package is downloaded once from the
npm registry (33 MB), by npm if it is installed, which reads the user's configuration (registry,
proxy, credentials). A wheel does not contain it: few exports are sites.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
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

DIGESTS = {
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs": (
        "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b"
    ),
    "ort-wasm-simd-threaded.wasm": (
        "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2"
    ),
    "ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
    "ort-wasm-simd-threaded.asyncify.mjs": (
        "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28"
    ),
    "ort-wasm-simd-threaded.asyncify.wasm": (
        "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da"
    ),
}
"""SHA-256 of the files that a site needs, in the package's folder ``dist``."""

_URL = f"https://registry.npmjs.org/{PACKAGE}/-/{PACKAGE}-{VERSION}.tgz"
_SECONDS = 300
"""Time limit of a download."""


def runtime_files(source: str | Path | None = None) -> dict[str, bytes]:
    """The files of ``DIGESTS`` by name, with the content that they must have.

    Args:
        source: Tarball of the package, or its folder, such as ``node_modules/onnxruntime-web``;
            None: from the cache folder, or from the npm registry.

    Raises:
        ConfigError: The source is missing or of another version, or the download fails.
    """
    if source is not None:
        return _read(Path(source))
    cache = cache_folder()
    if all((cache / name).is_file() for name in DIGESTS):
        files = {name: (cache / name).read_bytes() for name in DIGESTS}
        if not _differing(files):
            return files
    files = _unpack(_download(), "the package of the npm registry")
    for name, content in files.items():
        atomic_write(cache / name, content)
    return files


def cache_folder() -> Path:
    """Where the files are kept: below XDG_CACHE_HOME, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "captioner" / f"{PACKAGE}-{VERSION}"


def _read(source: Path) -> dict[str, bytes]:
    try:
        if not source.is_dir():
            return _unpack(source.read_bytes(), str(source))
        folder = source / "dist" if (source / "dist").is_dir() else source
        files = {name: (folder / name).read_bytes() for name in DIGESTS}
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--onnxruntime-web {source}: {reason}{_missing(error, source)}; give the tarball that "
            f"npm pack {PACKAGE}@{VERSION} writes, or the folder of that package"
        ) from error
    return _checked(files, f"--onnxruntime-web {source}")


def _missing(error: OSError, source: Path) -> str:
    name = error.filename
    return f" ({Path(name).name})" if name and Path(name) != source else ""


def _unpack(tarball: bytes, what: str) -> dict[str, bytes]:
    digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    if f"sha512-{digest}" != INTEGRITY:
        raise ConfigError(
            f"{what} is not {PACKAGE} {VERSION} (its SHA-512 differs); give the tarball that "
            f"npm pack {PACKAGE}@{VERSION} writes"
        )
    files = {}
    with tarfile.open(fileobj=io.BytesIO(tarball)) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in DIGESTS and (content := archive.extractfile(member)) is not None:
                files[name] = content.read()
    return _checked(files, what)


def _checked(files: Mapping[str, bytes], what: str) -> dict[str, bytes]:
    if wrong := _differing(files):
        raise ConfigError(f"{what}: {wrong[0]} is not that of {PACKAGE} {VERSION}; give {VERSION}")
    return dict(files)


def _differing(files: Mapping[str, bytes]) -> list[str]:
    return [
        name
        for name, digest in DIGESTS.items()
        if name not in files or hashlib.sha256(files[name]).hexdigest() != digest
    ]


def _download() -> bytes:
    """The package from the npm registry."""
    problems = []
    for method in (_by_npm, _by_https):
        try:
            return method()
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            problems.append(_reason(error))
    raise ConfigError(
        f"cannot download {PACKAGE} {VERSION} (npm: {problems[0]}; {_URL}: {problems[1]}); run npm "
        f"pack {PACKAGE}@{VERSION} where there is a network, and give --onnxruntime-web "
        f"{PACKAGE}-{VERSION}.tgz"
    )


def _by_npm() -> bytes:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", folder]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        written = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or not written:
            raise ChildProcessError(f"npm pack failed with status {done.returncode}")
        return written[0].read_bytes()


def _by_https() -> bytes:
    with urllib.request.urlopen(_URL, timeout=_SECONDS) as response:
        content: bytes = response.read()
    return content


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return cause if isinstance(cause, str) else first_line(cause)
