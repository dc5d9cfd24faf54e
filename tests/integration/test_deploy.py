"""The files in deploy/: proxies in front of a running server, units and containers."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest
import yaml
from pages import ROOT

from captioner.serving.security import ApiKeys
from captioner.serving.server import free_address
from captioner.serving.service import DECODERS, LARGE_PIXELS

DEPLOY = ROOT / "deploy"
PHOTOS = sorted((ROOT / "assets" / "examples").glob("*.jpg"))
NAME = "photos.example.org"
OPTIONS = ["--root-path", "/captioner", "--allow-host", NAME]


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["nginx", "caddy"])
def test_server_behind_a_proxy_with_a_prefix(serve, proxy, tiny, tmp_path):
    program = shutil.which(proxy, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(f"{proxy} is missing; .ci/run installs it")
        pytest.skip(f"{proxy} is not installed: apt-get install {proxy}")
    server = serve(*OPTIONS, "--trust-proxy", "127.0.0.1")
    port = free_address("127.0.0.1", 0)[1]
    host, small = f"{NAME}:{port}", (tiny.photos / "1.png").read_bytes()
    config = tmp_path / "config"
    config.write_text(proxy_config(proxy, port, server.url, tmp_path))
    command = {
        "nginx": [program, "-p", str(tmp_path), "-c", str(config), "-g", "daemon off;"],
        "caddy": [program, "run", "--config", str(config), "--adapter", "caddyfile"],
    }[proxy]
    log = (tmp_path / "log").open("w")
    running = subprocess.Popen(
        command, cwd=tmp_path, stdout=log, stderr=log, env=os.environ | {"HOME": str(tmp_path)}
    )
    trusted = ssl.create_default_context(cafile=tmp_path / "fullchain.pem")
    try:
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            headers={"Host": host},
            verify=trusted,
            trust_env=False,
            timeout=60,
            event_hooks={"request": [lambda one: one.extensions.update(sni_hostname=NAME)]},
        ) as client:
            for _ in range(300):
                try:
                    page = client.get("/captioner/")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            assert page.status_code == 200, (tmp_path / "log").read_text()
            assert page.headers["strict-transport-security"] == "max-age=31536000"
            assert client.get("/captioner").headers["location"].endswith("/captioner/")
            own = {"Origin": f"https://{host}", "Sec-Fetch-Site": "same-origin"}
            response = client.post("/captioner/v1/captions", content=small, headers=own)
            assert response.status_code == 200, response.text
            other = {"Origin": "http://evil.example"}
            assert client.post("/captioner/v1/captions", headers=other).status_code == 403
            schema = client.get("/captioner/openapi.json").json()
            assert schema["servers"] == [{"url": "/captioner"}]
            claimed = {"X-Forwarded-For": "203.0.113.9"}
            assert client.get("/captioner/healthz", headers=claimed).status_code == 200
            for kind in ("client_body", "proxy"):  # photos are not written to temporary files
                shutil.rmtree(tmp_path / kind, ignore_errors=True)
            # A photo that is nearly as large as --max-bytes, in base64 as every program sends it.
            letters = base64.b64encode(small + bytes(29 << 20)).decode()
            for path, body in (
                ("v1/captions", {"image": letters}),
                ("api/generate", {"images": [letters], "stream": False}),
                ("v1/chat/completions", chat(f"data:image/png;base64,{letters}")),
                ("api/v1/vision/caption", {"images": [letters]}),
            ):
                response = client.post(f"/captioner/{path}", json=body)
                assert response.status_code == 200, (path, response.text[:200])
            for body in (b"x" * 33_000_000, b"x" * 50_000_000, iter([b"x" * 1_000_000] * 50)):
                large = client.post("/captioner/v1/captions", content=body)
                assert large.status_code == 413  # the server's limit is 30 MiB, the proxy's 41 MiB
                assert list(large.json()) == ["error"]
            photo = small + bytes(17 << 20)  # what follows is not read
            files = [("images", ("a.png", photo))] * 2
            batch = client.post(
                "/captioner/v1/batch", files=files, headers={"Accept": "application/x-ndjson"}
            )
            lines = [json.loads(line)["status"] for line in batch.iter_lines()]
            assert (batch.status_code, lines) == (200, [200, 200]), batch.text
            for spelling in METRICS:
                found = raw_get(port, host, spelling, trusted)
                assert "captioner_requests" not in found, spelling
            assert "captioner_requests" in httpx.get(f"{server.url}/metrics", trust_env=False).text
            assert server.stop(15)[0] == 0
            away = client.post("/captioner/v1/captions", content=small)
            assert (away.status_code, away.headers["retry-after"]) == (503, "5")
            assert list(away.json()) == ["error"]
    finally:
        running.terminate()
        running.wait(30)
        log.close()


def proxy_config(proxy: str, port: int, server: str, folder: Path) -> str:
    """Return a configuration in deploy/ for a port of this machine, with a new certificate."""
    request = "req -x509 -newkey rsa:2048 -nodes -days 1 -keyout privkey.pem -out fullchain.pem"
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run(["openssl", *request.split(), *subject], cwd=folder, check=True)
    text = (DEPLOY / {"nginx": "nginx.conf", "caddy": "Caddyfile"}[proxy]).read_text()
    text = text.replace("127.0.0.1:8000", server.removeprefix("http://"))
    if proxy == "caddy":
        local = f"https://{NAME}:{port} {{\n\tbind 127.0.0.1\n\ttls fullchain.pem privkey.pem"
        return "{\n\tadmin off\n\tauto_https off\n}\n" + text.replace(f"{NAME} {{", local)
    text = re.sub(r"listen \[::\].*", "", text).replace(
        f"/etc/letsencrypt/live/{NAME}", str(folder)
    )
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("listen 80;", f"listen 127.0.0.1:{free_address('127.0.0.1', 0)[1]};")
    kinds = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"
    folders = "".join(f"{kind}_temp_path {kind};" for kind in kinds)
    return f"pid pid; error_log stderr; events {{}}\nhttp {{ {folders}\n{text}}}\n"


METRICS = [
    "/captioner/metrics",
    "/captioner/captioner/metrics",
    "/captioner/captioner/captioner/metrics",
    "/captioner//metrics",
    "/captioner//captioner/metrics",
    "/captioner/./metrics",
    "/captioner/x/../metrics",
    "/captioner/%6detrics",
    "/captioner/%2fmetrics",
    "/captioner/captioner%2fmetrics",
    "/captioner%2fmetrics",
    "/captioner/..%2fmetrics",
    "/captioner/metrics/",
    "/captioner/metrics?x=1",
    "/captioner/metrics;x",
    "/captioner/metrics%00",
    "/captioner/METRICS",
    "/metrics",
    "//metrics",
    "/captioner/../metrics",
]
"""How somebody may ask a proxy for the metrics."""


def chat(url: str) -> dict[str, object]:
    """Return a request about a photo in OpenAI's protocol."""
    return {"messages": [{"content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def raw_get(port: int, host: str, path: str, trusted: ssl.SSLContext) -> str:
    """Return the body of the response to a raw GET request that asks to leave out a header."""
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close, x-forwarded-for\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", port), 60) as plain,
        trusted.wrap_socket(plain, server_hostname=NAME) as connection,
    ):
        connection.sendall(head.encode())
        response = HTTPResponse(connection)
        response.begin()
        return response.read().decode(errors="replace")


# --- neighbours, other origins, restarts ---------------------------------------------------------


@pytest.mark.slow
def test_a_restart_under_load_loses_no_photo(serve):
    """The server is replaced while eight clients send photos and repeat rejected requests."""
    port = free_address("127.0.0.1", 0)[1]
    server = serve("--port", str(port))
    photos = [path.read_bytes() for path in PHOTOS]
    texts, end = [], time.monotonic() + 300

    def caption(photo: bytes) -> str:
        """Return the caption of a photo, as soon as the server is neither busy nor away."""
        while time.monotonic() < end:
            try:
                response = client.post("/v1/captions", content=photo)
            except httpx.TransportError:  # it does not listen
                time.sleep(0.1)
                continue
            if response.status_code not in (429, 503):
                return response.raise_for_status().json()["captions"][0]["text"]
            time.sleep(int(response.headers["retry-after"]))
        raise TimeoutError

    with (
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        alone = [caption(photo) for photo in photos]
        for text in pool.map(caption, photos * 10):
            texts.append(text)
            if len(texts) == 10:
                code, _ = server.stop(signal.SIGTERM)
                serve("--port", str(port))

    assert code == 0
    assert texts == alone * 10


# --- systemd and containers ----------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_unit_is_valid(tmp_path):
    unit = tmp_path / "captioner.service"
    text = (DEPLOY / "captioner.service").read_text()
    unit.write_text(text.replace("/opt/captioner/bin/captioner", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_unit_is_confined():
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager"]
    done = subprocess.run(
        [*command, str(DEPLOY / "captioner.service")], capture_output=True, text=True, check=True
    )
    assert float(re.findall(r"exposure level .*: ([\d.]+)", done.stdout)[0]) < 3


def test_grace_periods_exceed_the_server_s():
    from captioner.serving.options import Limits

    unit = (DEPLOY / "captioner.service").read_text()
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > Limits().grace + 10
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["captioner"]
    assert int(service["stop_grace_period"].removesuffix("s")) > Limits().grace + 10
    assert (service["read_only"], service["restart"]) == (True, "unless-stopped")


def test_kubernetes_manifest_fits_the_server(monkeypatch):
    from captioner.cli.main import parser_of

    parts = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    found = {one["kind"]: one for one in parts}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    environment = {one["name"]: one.get("value", "") for one in container["env"]}
    keys = found["Secret"]["stringData"][container["env"][1]["valueFrom"]["secretKeyRef"]["key"]]
    assert environment.pop("CAPTIONER_API_KEYS") == ""
    assert ApiKeys(None, keys).name("replace-this-key-0123456789") == "example"
    parser = parser_of("serve")
    for name, value in environment.items():
        assert name == "OMP_NUM_THREADS" or name[10:].lower() in parser.fields, name
        monkeypatch.setenv(name, value)
    options = parser.parse([])[0]
    service = found["Service"]["metadata"]["name"]
    assert {service, f"{service}.default.svc.cluster.local"} <= {*options.allow_host}
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": options.port, "metrics": options.metrics_port}
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= wait + options.drain_delay + options.grace + 10
    memory = container["resources"]["limits"]["memory"]
    pixels = DECODERS * LARGE_PIXELS + options.max_pixels  # at most 27 bytes each
    most = 700_000_000 + options.max_queue * options.max_bytes + 27 * pixels
    assert int(memory.removesuffix("Gi")) << 30 >= most
    assert f"MemoryMax={memory[:-1]}" in (DEPLOY / "captioner.service").read_text()
    assert f"mem_limit: {memory[:-1].lower()}" in (DEPLOY / "compose.yaml").read_text()
    assert pod["enableServiceLinks"] is False  # otherwise CAPTIONER_PORT is an address
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_the_container_starts_a_valid_command_without_root(monkeypatch):
    from captioner.cli.main import parser_of

    text = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, flags=re.M)[0])
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, value in compose["services"]["captioner"]["environment"].items():
        monkeypatch.setenv(name, value)
    options, _ = parser_of("serve").parse([*entry[2:], "--device", "cuda"])
    assert options.allow_host == ["captioner"]  # by which the neighbour calls it
    assert "USER 10001" in text


def test_the_image_s_packages_are_locked():
    """The file has all packages that the server needs, with digests, and without torch."""
    lock = (DEPLOY / "requirements.txt").read_text()
    blocks = re.findall(r"^([a-z0-9-]+)==[\d.]+(.*?)(?=^[a-z]|\Z)", lock, flags=re.M | re.S)
    names = {name for name, block in blocks if "--hash=sha256:" in block}
    tomllib = pytest.importorskip("tomllib")  # since Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["serve"], "hatchling"]
    assert {re.split("[>=<]", one)[0] for one in needed} <= names
    assert len(names) == len(blocks) == len(re.findall("^[a-z].*==", lock, flags=re.M))
    assert "torch" not in names
