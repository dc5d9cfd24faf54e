"""The API as people first try it: curl, httpx, requests, urllib and fetch, at a running server."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import requests
from PIL import Image
from running import serve_command

from captioner import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """``url``; ``folder`` with photo.jpg, a.jpg and b.jpg; ``captions`` of these photos."""
    folder = tmp_path_factory.mktemp("first")
    for number, name in enumerate(("photo.jpg", "a.jpg", "b.jpg"), 1):
        Image.open(tiny.photos / f"{number}.png").save(folder / name, "JPEG")
    (folder / "notes.txt").write_text("hello")
    model = load()
    captions = {name: model.caption(folder / name).text for name in ("photo.jpg", "a.jpg", "b.jpg")}
    with serve_command(folder / "server") as running:
        yield SimpleNamespace(url=running.url, folder=folder, captions=captions)
        _, log = running.stop()
    pattern = r"[-\d]+ [:\d]+ \w+ (/\S*|other) \d+ \d+ ms \d+ bytes client=\S+ id=\w+"
    # No part of a request is written to disk or logged; matplotlib has a folder for its fonts.
    other = [line for line in log.splitlines() if not re.fullmatch(pattern, line)]
    assert [line for line in other if not re.fullmatch(r"WROTE \S*/matplotlib", line)] == []


def curl(server, command: str) -> bytes:
    """The output of a curl command with ``URL`` in place of the server's address."""
    words = shlex.split(command.replace("URL", server.url))
    done = subprocess.run(
        [words[0], "-sS", "--noproxy", "*", *words[1:]],
        cwd=server.folder,
        capture_output=True,
        check=True,
        timeout=120,
    )
    return done.stdout


def texts(body: bytes | str) -> list[str]:
    return [one["text"] for one in json.loads(body)["captions"]]


# --- captions ------------------------------------------------------------------------------------


@needs_curl
@pytest.mark.parametrize(
    "command",
    [
        "curl -F 'image=@photo.jpg;type=image/jpeg' URL/v1/captions",
        "curl -X POST -F image=@photo.jpg 'URL/v1/captions?beam_size=3'",
        "curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg URL/v1/captions",
        "curl -H 'Transfer-Encoding: chunked' -F image=@photo.jpg URL/v1/captions",
        "curl -H 'Expect: 100-continue' -F image=@photo.jpg URL/v1/captions",
        "curl -H 'Content-Type: application/json' -d @request.json URL/v1/captions",
    ],
)
def test_curl(server, command):
    photo = base64.b64encode((server.folder / "photo.jpg").read_bytes()).decode()
    (server.folder / "request.json").write_text(json.dumps({"image": photo}))

    assert texts(curl(server, command)) == [server.captions["photo.jpg"]]


def test_httpx_and_requests(server):
    url, wanted = f"{server.url}/v1/captions", [server.captions["photo.jpg"]]
    path = server.folder / "photo.jpg"
    photo = base64.b64encode(path.read_bytes()).decode()
    for library in (httpx, requests):
        given: Any = {"trust_env": False} if library is httpx else {"proxies": {"http": ""}}
        data = {"content" if library is httpx else "data": path.read_bytes()}
        with path.open("rb") as file:
            assert texts(library.post(url, files={"image": file}, **given).text) == wanted
        for more in (
            {"files": {"image": path.read_bytes()}},
            {"files": {"image": ("photo.jpg", path.read_bytes(), "image/jpeg")}},
            {"files": {"image": path.read_bytes()}, "data": {"beam_size": 3}},
            {"json": {"image": photo}},
            {"json": {"image": f"data:image/jpeg;base64,{photo}", "beam_size": 3}},
            data,
        ):
            assert texts(library.post(url, **more, **given).text) == wanted, more.keys()


@needs_curl
@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("curl -d @photo.jpg URL/v1/captions", "use --data-binary instead of -d"),
        ("curl -d '{\"image\": 3}' URL/v1/captions", "send Content-Type: application/json"),
        ("curl -F image=@photo.jpg URL/captions", "captions are at POST /v1/captions"),
        ("curl URL/v1/captions", "method not allowed; see /docs"),
    ],
)
def test_errors_explain_what_to_do(server, command, error):
    body = json.loads(curl(server, command))

    assert list(body) == ["error"]
    assert error in body["error"]
    assert "\n" not in body["error"]


@needs_curl
@pytest.mark.parametrize("name", ["large.png", "large.tif"])
def test_large_photos_as_forms(server, name):
    """curl waits for 100 Continue, and the photo would be stored on disk by Starlette's parser."""
    noise = np.random.default_rng(0).integers(256, size=(900, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(server.folder / name, compression="tiff_lzw")
    assert (server.folder / name).stat().st_size > 2**21

    assert len(texts(curl(server, f"curl -F image=@{name} URL/v1/captions"))) == 1


@needs_curl
def test_commands_in_the_api_description_run(server):
    """As they are pasted from /docs."""
    schema = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    bodies = [item["post"]["requestBody"] for item in schema["paths"].values() if "post" in item]
    texts = [schema["info"]["description"], *(body.get("description", "") for body in bodies)]
    commands = re.findall(r"^    (.*curl.*)$", "\n".join(texts), flags=re.MULTILINE)
    assert len(commands) == 3 + 6  # three ways, and a form for each endpoint

    for command in commands:
        line = command.replace("curl ", "curl -sS --fail-with-body --noproxy '*' ")
        done = subprocess.run(
            ["bash", "-c", line], cwd=server.folder, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)


# --- batches -------------------------------------------------------------------------------------


def test_results_come_while_photos_are_sent(server):
    """And a client that leaves frees its slot."""
    photo = (server.folder / "a.jpg").read_bytes()
    head = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    part = head + photo + b"\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/batch HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {9 * len(part)}\r\n"
            "Accept: application/x-ndjson\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\n\r\n".encode()
        )
        with connection.makefile("rb") as answer:
            for index in range(3):
                connection.sendall(part + (head if index == 0 else b""))
                while not (line := answer.readline()).startswith(b'{"index"'):
                    assert line
                assert json.loads(line)["index"] == index
                assert json.loads(line)["status"] == 200
                if index == 0:
                    part = photo + b"\r\n" + head
    metrics = f"{server.url}/metrics"
    while "captioner_held_requests 0.0" not in httpx.get(metrics, trust_env=False).text:
        pass


# --- browsers ------------------------------------------------------------------------------------


def test_swagger_ui_tries_the_api_out(server, visit):
    tab = visit(f"{server.url}/docs", allowed=server.url)
    tab.set_default_timeout(20_000)
    tab.get_by_text("Caption a photo", exact=True).click()
    tab.get_by_label("Request content type").select_option("multipart/form-data")
    tab.get_by_role("button", name="Try it out").click()
    tab.locator("input[type=file]").set_input_files(server.folder / "photo.jpg")

    with tab.expect_response("**/v1/captions*") as found:
        tab.get_by_role("button", name="Execute").click()

    assert texts(found.value.body()) == [server.captions["photo.jpg"]]


def test_redoc_shows_the_api(server, visit):
    tab = visit(f"{server.url}/redoc", allowed=server.url)

    tab.get_by_role("heading", name="Caption many photos").wait_for()


# --- docs/serving.md -----------------------------------------------------------------------------


def examples(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", DOCS, flags=re.DOTALL)
    assert found
    return found


@needs_curl
@pytest.mark.parametrize("example", examples("sh"))
def test_shell_examples_run(server, example):
    for command in re.sub(r"(\\|\|)\n\s*", r"\1 ", example).splitlines():
        line = command.replace("http://127.0.0.1:8000", server.url)
        line = line.replace("curl ", "curl -sS --fail-with-body --noproxy '*' ")
        done = subprocess.run(
            ["bash", "-c", line], cwd=server.folder, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.mark.parametrize("example", examples("python"))
def test_python_examples_run(server, example, monkeypatch, capsys):
    monkeypatch.chdir(server.folder)
    monkeypatch.setenv("NO_PROXY", "*")
    source = example.replace("http://127.0.0.1:8000", server.url)
    exec(compile(source, "docs/serving.md", "exec"), {})

    out = capsys.readouterr().out
    assert any(text in out for text in server.captions.values())


@pytest.mark.parametrize("example", examples("js"))
def test_javascript_examples_run(server, visit, example):
    tab = visit(server.url + "/", allowed=server.url)
    photo = base64.b64encode((server.folder / "photo.jpg").read_bytes()).decode()

    text = tab.evaluate(
        f"""async (text) => {{
          const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
          const photo = new File([bytes], "photo.jpg");
          return await (async () => {{ {example}; return text; }})();
        }}""",
        photo,
    )

    assert text == server.captions["photo.jpg"]
