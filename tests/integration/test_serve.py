"""``captioner serve`` as its user starts it, under parallel uploads of good and bad files."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from PIL import Image

from captioner.api import load
from captioner.cli.main import FAILED, INTERRUPTED, OK, USAGE, main

# Put into the server's process: it tells every file that is opened to be written to.
_SPY = """
import os, signal, sys
# Tests that are started in the background have Ctrl-C ignored, and would pass that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
def spy(event, details):
    if event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        os.write(2, f"WROTE {details[0]}\\n".encode())
    elif event == "os.mkdir":
        os.write(2, f"WROTE {details[0]}\\n".encode())
sys.addaudithook(spy)
"""


class Running(NamedTuple):
    """A server's process."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    """Where it runs; its temporary folder too."""

    def stop(self, number: int) -> tuple[int, str]:
        """Send a signal; the exit code, and what it wrote after it was ready."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.fixture
def serve(tiny, tmp_path: Path) -> Iterator[Any]:
    """``serve("--option", ...)``: a running server of the tiny model."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> Running:
        (tmp_path / "spy").mkdir()
        (tmp_path / "spy" / "sitecustomize.py").write_text(_SPY)
        folder = tmp_path / "here"
        folder.mkdir()
        path = os.pathsep.join([str(tmp_path / "spy"), os.environ.get("PYTHONPATH", "")])
        here = {"TMPDIR": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "captioner", "serve", "--port", "0", "--precision", "fp32"]
        process = subprocess.Popen(
            [*command, "--model", str(tiny.model), *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env=os.environ | here | {"PYTHONDONTWRITEBYTECODE": "1"},
        )
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            ready = re.fullmatch(
                r"captioner: serving on (http://\S+) \(press Ctrl-C to stop\)\n", line
            )
            if ready:
                return Running(process, ready[1], folder)
        raise AssertionError(f"it ended with {process.wait()}")

    yield start
    for process in started:
        process.kill()
        process.communicate()


def photo(number: int) -> bytes:
    """A photo with a colour of its own."""
    noise = np.random.default_rng(number).integers(256, size=(48, 64, 3), dtype=np.uint8)
    colour = np.array([number % 2, number // 2 % 2, number // 4 % 2], dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise * colour).save(file, "PNG")
    return file.getvalue()


GOOD = [photo(number) for number in range(1, 31)]
BAD = [
    # body, query, status, what is told
    (b"<html>no photo</html>", {}, 415, "a web page"),
    (b"", {}, 415, "empty"),
    (GOOD[6][:-500], {}, 422, "breaks off"),
    (b"x" * 300_000, {}, 413, "300,000 bytes"),
    (GOOD[0], {"beam_size": 99}, 422, "beam_size is 99; give an integer from 1 to 20"),
    (GOOD[0], {"beem": 1}, 422, "no such parameter"),
    (GOOD[0], {"words": "a zebra"}, 422, "does not know zebra"),
    (GOOD[0], {"words": "a dog", "beam_size": 2}, 422, "one of the two"),
]


@pytest.mark.slow
def test_fifty_parallel_uploads_of_good_and_bad_files(serve, tiny):
    """Each gets its own status and its own caption; nothing is kept; SIGTERM ends it."""
    server = serve("--max-bytes", "200000", "--batch-size", "4")
    asked: list[tuple[Any, ...]] = [(body, {}, 200, None) for body in GOOD]
    asked += [(GOOD[n], {"words": "a dog on grass"}, 200, None) for n in range(4)]
    asked += (BAD * 2)[:16]
    np.random.default_rng(0).shuffle(asked)
    assert len(asked) == 50
    limits = httpx.Limits(max_connections=50)

    with (
        httpx.Client(base_url=server.url, timeout=60, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(50) as threads,
    ):

        def send(one: tuple[Any, ...]) -> httpx.Response:
            return client.post("/v1/captions", content=one[0], params=one[1])

        answers = list(threads.map(send, asked))
        metrics = client.get("/metrics").text
        page = client.get("/")

    model = load(tiny.model, precision="fp32")
    said = set()
    for (body, query, status, told), answer in zip(asked, answers, strict=True):
        assert answer.status_code == status, answer.text
        if status != 200:
            assert told in answer.json()["error"]
            continue
        if query:
            alone = [model.explain(io.BytesIO(body), query["words"])]
        else:
            alone = model.captions(io.BytesIO(body))
        assert [one["text"] for one in answer.json()["captions"]] == [c.text for c in alone]
        said.add(alone[0].text)
    assert len(said) > 3  # mixed-up answers would show
    assert 'captioner_requests_total{route="/v1/captions",status="200"} 34.0' in metrics
    assert "captioner_photos_captioned_total 34.0" in metrics
    assert page.status_code == 200

    code, err = server.stop(signal.SIGTERM)
    assert code == OK
    lines = err.splitlines()
    assert len([line for line in lines if " POST /v1/captions 200 " in line]) == 34
    assert all(re.fullmatch(r"[-\d]+ [:\d]+ \w+ /\S* \d+ \d+ ms \d+ bytes", x) for x in lines), err
    assert "WROTE" not in err
    assert "zebra" not in err
    assert list(server.folder.iterdir()) == []


def test_ctrl_c_ends_it_like_every_command(serve):
    server = serve()
    assert httpx.get(f"{server.url}/healthz", trust_env=False).json() == {"status": "ok"}

    code, err = server.stop(signal.SIGINT)

    assert code == INTERRUPTED
    assert err.endswith("captioner: interrupted\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_who_waits_when_it_stops_is_told(serve):
    """A photo that is still on its way gets 503, and the server does not wait for it."""
    server = serve()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /v1/captions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 100\r\n\r\nx"
        connection.sendall(head.encode())
        while (
            "captioner_held_requests 1.0"
            not in httpx.get(f"{server.url}/metrics", trust_env=False).text
        ):
            pass

        server.process.send_signal(signal.SIGTERM)

        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert "stopping" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert server.process.wait(timeout=60) == OK


def test_a_port_in_use_is_told_before_a_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "missing"]) == FAILED
    err = capsys.readouterr().err
    assert err == (
        f"captioner: port {port} of 127.0.0.1 is in use; give another --port, or --port 0 for any "
        "free port\n"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--host", "nowhere.invalid"], "'nowhere.invalid' is not a known address"),
        (["--max-queue", "0"], "max-queue is 0"),
        (["--timeout", "soon"], "--timeout is soon; give a number"),
        (["photo.jpg"], "photo.jpg"),
    ],
)
def test_what_cannot_be_served_is_one_line(options, told, capsys):
    assert main(["serve", *options]) == USAGE
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
