"""The files in deploy/: proxies in front of a running server, units and containers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest
import yaml
from pages import ROOT

from captioner.serving.client import Client
from captioner.serving.server import free_address

DEPLOY = ROOT / "deploy"
PHOTOS = sorted((ROOT / "assets" / "examples").glob("*.jpg"))
OPTIONS = ["--root-path", "/captioner", "--allow-host", "photos.example.org"]


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
    name = {"nginx": "nginx.conf", "caddy": "Caddyfile"}[proxy]
    text = (DEPLOY / name).read_text().replace("8080", str(port))
    config = tmp_path / name
    config.write_text(text.replace("127.0.0.1:8000", server.url.removeprefix("http://")))
    command = {
        "nginx": [program, "-p", str(tmp_path), "-c", str(config), "-g", "daemon off;"],
        "caddy": [program, "run", "--config", str(config), "--adapter", "caddyfile"],
    }[proxy]
    log = (tmp_path / "log").open("w")
    running = subprocess.Popen(
        command, cwd=tmp_path, stdout=log, stderr=log, env=os.environ | {"HOME": str(tmp_path)}
    )
    host, small = f"photos.example.org:{port}", (tiny.photos / "1.png").read_bytes()
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Host": host}, trust_env=False, timeout=60
        ) as client:
            for _ in range(300):
                try:
                    page = client.get("/captioner/")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            assert page.status_code == 200, (tmp_path / "log").read_text()
            assert client.get("/captioner").headers["location"].endswith("/captioner/")
            own = {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
            response = client.post("/captioner/v1/captions", content=small, headers=own)
            assert response.status_code == 200, response.text
            other = {"Origin": "http://evil.example"}
            assert client.post("/captioner/v1/captions", headers=other).status_code == 403
            schema = client.get("/captioner/openapi.json").json()
            assert schema["servers"] == [{"url": "/captioner"}]
            claimed = {"X-Forwarded-For": "203.0.113.9"}
            assert client.get("/captioner/healthz", headers=claimed).status_code == 200
            large = client.post("/captioner/v1/captions", content=b"x" * 33_000_000)
            assert large.status_code in (413, 502)
            photo = small + bytes(17 << 20)  # what follows is not read
            files = [("images", ("a.png", photo))] * 2
            batch = client.post(
                "/captioner/v1/batch", files=files, headers={"Accept": "application/x-ndjson"}
            )
            lines = [json.loads(line)["status"] for line in batch.iter_lines()]
            assert (batch.status_code, lines) == (200, [200, 200]), batch.text
            assert client.get("/captioner/metrics").status_code == 404
    finally:
        running.terminate()
        running.wait(30)
        log.close()
    assert server.stop(15)[0] == 0


# --- neighbours, other origins, restarts ---------------------------------------------------------


@pytest.mark.slow
def test_a_restart_under_load_loses_no_photo(serve):
    """The server is replaced while eight clients send photos, which repeat what is refused."""
    port = free_address("127.0.0.1", 0)[1]
    server = serve("--port", str(port))
    photos, results = PHOTOS * 10, []

    with Client(server.url, retry_for=300, trust_env=False) as client:
        alone = [client.caption(photo).text for photo in PHOTOS]
        for result in client.stream(photos, parallel=8):
            results.append(result)
            if len(results) == 10:
                code, _ = server.stop(signal.SIGTERM)
                serve("--port", str(port))

    assert code == 0
    assert [result.error for result in results] == [None] * len(photos)
    assert [result.captions.text for result in results] == alone * 10


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


def test_grace_periods_exceed_the_server_s():
    from captioner.serving.options import Limits

    unit = (DEPLOY / "captioner.service").read_text()
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > Limits().grace + 10
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["captioner"]
    assert int(service["stop_grace_period"].removesuffix("s")) > Limits().grace + 10
    assert service["read_only"] is True


def test_the_container_starts_a_valid_command_without_root():
    from captioner.cli.main import parser_of

    text = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, flags=re.M)[0])
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for more in (["--device", "cuda"], compose["services"]["captioner"]["command"]):
        parser_of("serve").parse([*entry[2:], *more])
    assert "USER 10001" in text
    assert "HEALTHCHECK" in text
