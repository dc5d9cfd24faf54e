"""The API as people try it first: curl, requests, fetch and Swagger UI, on a running server."""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from pages import examples, read
from PIL import Image
from running import serve_command

from captioner import load

pytestmark = pytest.mark.slow

DOCS = read("docs/serving.md")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """``url``; ``folder`` with photo.jpg, a.jpg and b.jpg; ``captions`` of these photos."""
    folder = tmp_path_factory.mktemp("first")
    for number, name in enumerate(("photo.jpg", "a.jpg", "b.jpg"), 1):
        Image.open(tiny.photos / f"{number}.png").save(folder / name, "JPEG")
    model = load()
    captions = {name: model.caption(folder / name).text for name in ("photo.jpg", "a.jpg", "b.jpg")}
    with serve_command(folder / "server") as running:
        yield SimpleNamespace(url=running.url, folder=folder, captions=captions)
        _, log = running.stop()
    pattern = r"[-\d]+ [:+\d]+ \w+ (/\S*|other) \d+ \d+ ms \d+ bytes client=\S+ id=\w+"
    # No part of a request is written to disk or logged; matplotlib has a folder for its fonts.
    other = [line for line in log.splitlines() if not re.fullmatch(pattern, line)]
    assert [line for line in other if not re.fullmatch(r"WROTE \S*/matplotlib", line)] == []


def shell(server, line: str) -> bytes:
    """Return the output of a curl command. curl reports failures by its exit status."""
    line = re.sub(r"http://127\.0\.0\.1:8000|URL", server.url, line)
    line = line.replace("curl ", "curl -sS --noproxy '*' ")
    return subprocess.run(
        ["bash", "-c", line], cwd=server.folder, stdout=subprocess.PIPE, check=True, timeout=120
    ).stdout


def texts(body: bytes | str) -> list[str]:
    return [one["text"] for one in json.loads(body)["captions"]]


# --- captions ------------------------------------------------------------------------------------


@needs_curl
@pytest.mark.parametrize(
    "command",
    [
        "curl -F 'image=@photo.jpg;type=image/jpeg' 'URL/v1/captions?beam_size=3'",
        "curl -H 'Transfer-Encoding: chunked' -F image=@photo.jpg URL/v1/captions",
        "curl -H 'Expect: 100-continue' -F image=@photo.jpg URL/v1/captions",
    ],
)
def test_curl(server, command):
    assert texts(shell(server, command)) == [server.captions["photo.jpg"]]


def test_requests(server):
    """Forms of requests and of httpx differ; test_photos.py has the forms of httpx."""
    import requests

    photo = (server.folder / "photo.jpg").read_bytes()
    for more in (
        {"files": {"image": photo}, "data": {"beam_size": 3}},
        {"files": {"image": ("photo.jpg", photo, "image/jpeg")}},
        {"data": photo},
    ):
        answer = requests.post(f"{server.url}/v1/captions", **more, proxies={"http": ""})
        assert texts(answer.text) == [server.captions["photo.jpg"]], more.keys()


@needs_curl
@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("curl -d @photo.jpg URL/v1/captions", "use --data-binary instead of -d"),
        ("curl -d '{\"image\": 3}' URL/v1/captions", "send Content-Type: application/json"),
        ("curl -F image=@photo.jpg URL/captions", "for captions, POST to /v1/captions"),
        ("curl URL/v1/captions", "the path /v1/captions does not support GET; use POST"),
    ],
)
def test_errors_explain_what_to_do(server, command, error):
    body = json.loads(shell(server, command))

    assert list(body) == ["error"]
    assert error in body["error"]
    assert "\n" not in body["error"]


@needs_curl
@pytest.mark.parametrize("name", ["large.png", "large.tif"])
def test_large_photos_as_forms(server, name):
    """curl waits for 100 Continue, and Starlette's parser would store the photo on disk."""
    noise = np.random.default_rng(0).integers(256, size=(900, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(server.folder / name, compression="tiff_lzw")
    assert (server.folder / name).stat().st_size > 2**21

    assert len(texts(shell(server, f"curl -F image=@{name} URL/v1/captions"))) == 1


@needs_curl
def test_commands_in_the_api_description_run(server):
    """The commands run as they are copied from /docs."""
    schema = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    bodies = [item["post"]["requestBody"] for item in schema["paths"].values() if "post" in item]
    texts = [schema["info"]["description"], *(body.get("description", "") for body in bodies)]
    commands = re.findall(r"^    (.*curl.*)$", "\n".join(texts), flags=re.MULTILINE)
    forms = [body for body in bodies if "multipart/form-data" in body["content"]]
    assert len(commands) == 3 + len(forms)  # three ways, and a form for each endpoint

    for command in commands:
        shell(server, command.replace("curl ", "curl --fail-with-body "))


# --- batches -------------------------------------------------------------------------------------


def test_results_come_while_photos_are_sent(server):
    """A client that leaves frees its slot."""
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


@needs_curl
@pytest.mark.parametrize("example", examples(DOCS, "sh"))
def test_shell_examples_run(server, example):
    for command in re.sub(r"(\\|\|)\n\s*", r"\1 ", example).splitlines():
        shell(server, command.replace("curl ", "curl --fail-with-body "))


@pytest.mark.parametrize("example", examples(DOCS, "python"))
def test_python_examples_run(server, example, monkeypatch, capsys):
    monkeypatch.chdir(server.folder)
    monkeypatch.setenv("NO_PROXY", "*")
    source = example.replace("http://127.0.0.1:8000", server.url)
    exec(compile(source, "docs/serving.md", "exec"), {})

    out = capsys.readouterr().out
    assert any(text in out for text in server.captions.values())


@pytest.mark.parametrize("example", examples(DOCS, "js"))
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
