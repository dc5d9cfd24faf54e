"""``captioner serve`` as a process: signals, logs and usage errors."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from pages import ROOT

from captioner.cli.arguments import unknown_variables
from captioner.cli.main import INTERRUPTED, NOT_DONE, OK, main, parser_of
from captioner.cli.serve import open_port
from captioner.errors import ConfigError
from captioner.serving.options import ServeOptions
from captioner.serving.server import free_address

PHOTO = (ROOT / "assets" / "examples" / "photographer.jpg").read_bytes()


@pytest.mark.slow
def test_keys_are_reloaded_on_sighup_and_logs_are_json(serve, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("alice alice-0123456789abcdef\n")
    server = serve(
        "--api-key-file", str(keys), "--log-format", "json", "--trust-proxy", "127.0.0.0/8"
    )

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": "203.0.113.9"}
        url = f"{server.url}/v1/captions"
        response = httpx.post(url, content=PHOTO, headers=headers, timeout=300, trust_env=False)
        return response.status_code

    assert status("alice-0123456789abcdef") == 200
    for text, old, new in (("bob bob-0123456789abcdef", 401, 200), ("bob short", 401, 200)):
        keys.write_text(text)
        server.process.send_signal(signal.SIGHUP)
        while status("alice-0123456789abcdef") != old:
            pass
        assert status("bob-0123456789abcdef") == new
    ready = httpx.get(f"{server.url}/readyz", trust_env=False).json()
    assert re.fullmatch(r"shipped@[0-9a-f]{12}", ready["model"])

    code, err = server.stop(signal.SIGTERM)

    assert code == OK
    lines = [json.loads(line) for line in err.splitlines()]
    first = json.loads(server.log.read_text().splitlines()[0])
    assert first["message"].startswith("serving on http")
    # A request is logged after its response: the message about the keys may come before.
    asked = [line for line in lines if "key" in line]
    assert asked[0]["key"] == "alice"
    assert asked[0]["client"] == "203.0.113.9"
    messages = [line["message"] for line in lines if "message" in line]
    assert messages[0] == "reloaded 1 API keys"
    assert "line 1 is invalid" in messages[1]
    assert messages[1].endswith("the previous 1 API keys stay valid")
    assert "0123456789abcdef" not in err


def test_ctrl_c_exits_like_every_command(serve):
    """It exits at once, without waiting for load balancers."""
    server = serve("--drain-delay", "600")
    server.process.send_signal(signal.SIGHUP)  # without keys, nothing is reloaded
    assert httpx.get(f"{server.url}/healthz", trust_env=False).json() == {"status": "ok"}

    code, err = server.stop(signal.SIGINT)

    assert code == INTERRUPTED
    assert err.endswith("captioner: interrupted\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_grace_ends_the_server_whatever_it_works_on(serve):
    """Until then, a costly request does not make others wait."""
    server = serve("--grace", "1")
    query = {"beam_size": 4, "num_captions": 4, "max_length": 50, "min_length": 49}
    costly = {**query, "attention": True, "method": "occlusion"}
    url, responses = f"{server.url}/v1/captions", []

    def post(**query) -> httpx.Response:
        return httpx.post(url, content=PHOTO, params=query, timeout=300, trust_env=False)

    thread = threading.Thread(target=lambda: responses.append(post(**costly)))
    thread.start()
    while "captioner_held_requests 1.0" not in metrics(server):
        time.sleep(0.05)
    assert post().status_code == 200
    assert not responses
    start = time.monotonic()

    code, err = server.stop(signal.SIGTERM)

    assert time.monotonic() - start < 10
    thread.join()
    assert (code, responses[0].status_code) == (OK, 503)
    assert "shutting down" in responses[0].text
    assert "Traceback" not in err


@pytest.mark.slow
def test_metrics_have_an_address_of_their_own(serve, monkeypatch):
    """The settings come from the environment, as in a container."""
    port = free_address("127.0.0.1", 0)[1]
    monkeypatch.setenv("CAPTIONER_METRICS_PORT", str(port))
    monkeypatch.setenv("CAPTIONER_API_KEYS", "alice alice-0123456789abcdef")
    server = serve()
    found = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
    assert "captioner_held_requests 0.0" in found.text
    assert httpx.get(f"{server.url}/metrics", trust_env=False).status_code == 404
    assert httpx.post(f"{server.url}/v1/captions", trust_env=False).status_code == 401


def test_options_come_from_the_environment(monkeypatch):
    """The command line wins. Addresses that Kubernetes sets for services are not options."""
    for name, value in {
        "PORT": "tcp://10.0.0.1:8000",
        "HOST": "0.0.0.0",
        "TIMEOUT": "7.5",
        "ALLOW_HOST": "captioner, captioner.default",
        "MODEL": "/models/best",
        "LOG_FORMAT": "json",
        "MAX_QUEUE": "",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "KERNELS": "0",
    }.items():
        monkeypatch.setenv(f"CAPTIONER_{name}", value)
    parser = parser_of("serve")
    options, _ = parser.parse(["--timeout", "9", "--allow-host", "x"])
    assert (options.host, options.port, options.log_format) == ("0.0.0.0", 8000, "json")
    assert (options.timeout, options.allow_host) == (9, ["x"])
    assert parser.parse([])[0].allow_host == ["captioner", "captioner.default"]
    assert list(options.model) == ["/models/best"]
    assert parser_of("caption").parse(["x.jpg"])[0].model != options.model
    [kernels] = unknown_variables(ServeOptions)
    assert "CAPTIONER_KERNELS sets no option" in kernels
    monkeypatch.setenv("CAPTIONER_PORT", "http")
    with pytest.raises(ConfigError, match="CAPTIONER_PORT is 'http'; use an integer"):
        parser.parse([])


def test_misspelt_variables_are_reported_but_not_variables_of_kubernetes(monkeypatch):
    for name, value in {
        "PROT": "8001",
        "API_KEYS": "alice alice-0123456789abcdef",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT_80_TCP_ADDR": "10.0.0.1",
        "METRICS_SERVICE_HOST": "10.0.0.2",  # of a service named captioner-metrics
        "METRICS_PORT_53_UDP_PROTO": "udp",
        "PROXY_PORT": "tcp://10.0.0.3:80",
    }.items():
        monkeypatch.setenv(f"CAPTIONER_{name}", value)
    [warning] = unknown_variables(ServeOptions)
    assert "CAPTIONER_PROT sets no option; did you mean CAPTIONER_PORT?" in warning


@pytest.mark.parametrize(
    ("host", "keys", "reported"),
    [
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("192.0.2.1", None, True),
        ("0.0.0.0", "alice alice-0123456789abcdef", False),
        ("127.0.0.1", None, False),
        ("::1", None, False),
    ],
)
def test_an_open_port_without_keys_is_reported(host, keys, reported):
    warning = open_port(ServeOptions(host=host, api_keys=keys), (host, 8001))
    assert ("port 8001" in warning) == reported


def metrics(server: SimpleNamespace) -> str:
    return httpx.get(f"{server.url}/metrics", trust_env=False).text


def test_port_in_use_fails_before_the_model_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "missing"]) == NOT_DONE
    err = capsys.readouterr().err
    assert err.startswith(f"captioner: the server cannot listen on port {port} of 127.0.0.1: ")
    assert main(["serve", "--host", "nowhere.invalid"]) == NOT_DONE
    assert "nowhere.invalid" in capsys.readouterr().err


# --- soaking -------------------------------------------------------------------------------------


@pytest.mark.stress
def test_soak(tiny):
    script = ROOT / "scripts" / "benchmarks" / "soak_serving.py"
    command = [sys.executable, str(script), "--seconds", "60", "--model", str(tiny.model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
