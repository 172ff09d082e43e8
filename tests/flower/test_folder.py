"""``fedloom flower init`` and ``keys``, and the node that runs no app but its own."""

from __future__ import annotations

import datetime
import importlib.util
import re
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an option of its own")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedloom.errors import ConfigError
from fedloom.flower_app import load_server
from fedloom.flower_cli import init_folder, knock, make_keys, node_command, server_command
from fedloom.runtime.flower_messages import require_flower
from fedloom.runtime.site import load_site


def test_the_written_folder_is_ready(tmp_path: Path) -> None:
    init_folder(tmp_path / "sites", sites=5)
    config = load_server(tmp_path / "sites" / "server.yaml")
    assert (config.sites.expected, config.method.name) == (5, "fedweave")
    assert config.out == str(tmp_path / "sites" / "run")
    assert load_site(tmp_path / "sites" / "node.example.yaml").data == str(tmp_path / "sites" / "rows.jsonl")
    app = tomllib.loads((tmp_path / "sites" / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {"serverapp": "fedloom_sites.server:app", "clientapp": "fedloom_sites.client:app"}
    assert str(tmp_path) not in "".join(p.read_text() for p in (tmp_path / "sites" / "app").rglob("*") if p.is_file())
    with pytest.raises(ConfigError, match="not an empty folder"):
        init_folder(tmp_path / "sites")


def test_the_written_page_shows_no_command_that_the_deploy_page_does_not(tmp_path: Path) -> None:
    """And that one is followed in ``test_deploy_page``."""

    def commands(text: str) -> set[str]:
        return {line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()}

    init_folder(tmp_path / "sites")
    deploy = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
    assert commands((tmp_path / "sites" / "README.md").read_text()) < commands(deploy.read_text())


def test_keys_are_what_tls_and_flower_ask_for(tmp_path: Path) -> None:
    make_keys(tmp_path, ["hospital"], ["server.example.org", "10.0.0.7"])
    keys = tmp_path / "keys"
    ca = x509.load_pem_x509_certificate((keys / "ca.pem").read_bytes())
    server = x509.load_pem_x509_certificate((keys / "server.pem").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "server.example.org"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.7"]
    assert server.not_valid_after_utc - datetime.datetime.now(datetime.UTC) < datetime.timedelta(days=91)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")  # the key belongs to the certificate
    private = serialization.load_ssh_private_key((keys / "hospital").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    public = serialization.load_ssh_public_key((keys / "hospital.pub").read_bytes())
    assert private.public_key() == public
    assert private.curve.name == "secp384r1"
    assert {(keys / name).stat().st_mode & 0o777 for name in ("hospital", "server.key")} == {0o600}
    with pytest.raises(ConfigError, match="exists already"):
        make_keys(tmp_path, ["hospital"], [])
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        make_keys(tmp_path / "other", ["../hospital"], [])


def test_a_node_needs_keys_or_an_explicit_insecure(tmp_path: Path) -> None:
    config = tmp_path / "node.yaml"
    config.write_text("{client: ann, data: rows.jsonl}")
    with pytest.raises(ConfigError, match="needs --key and --ca"):
        node_command(config, "127.0.0.1:8000", None, None, False, 9094)
    with pytest.raises(ConfigError, match="plain text, without keys"):
        node_command(config, "127.0.0.1:8000", tmp_path / "k", tmp_path / "c", True, 9094)
    command, environment = node_command(config, "127.0.0.1:8000", tmp_path / "k", tmp_path / "c", False, 9094)
    assert "--insecure" not in command
    programs = Path(environment["PATH"].split(":")[0])
    assert programs == tmp_path / "memory" / ".programs"
    other = subprocess.run([programs / "flwr-agentapp"], capture_output=True, text=True)
    assert (other.returncode, other.stderr) == (1, "fedloom: this node runs no flwr-agentapp\n")


def test_a_server_needs_keys_or_an_explicit_insecure(tmp_path: Path) -> None:
    init_folder(tmp_path / "sites", port=8123)
    with pytest.raises(ConfigError, match=r"holds no server\.key"):
        server_command(tmp_path / "sites", insecure=False)
    plain = server_command(tmp_path / "sites", insecure=True)
    assert plain[plain.index("--host") + 1] == "127.0.0.1"
    make_keys(tmp_path / "sites", ["hospital"], [])
    command = server_command(tmp_path / "sites", insecure=False)
    assert "--enable-supernode-auth" in command
    assert "--insecure" not in command
    assert command[command.index("--port") + 1] == "8123"
    with pytest.raises(ConfigError, match=r"holds no server\.yaml"):
        server_command(tmp_path, insecure=False)


def test_the_guard_replaces_what_would_import_the_servers_app() -> None:
    """By these two names Flower's client program unpacks and loads an app; and nothing heavy comes first."""
    from fedloom.runtime.flower_guard import REPLACED

    source = Path(importlib.util.find_spec("flwr.supernode.runtime.run_clientapp").origin).read_text()
    for name in REPLACED:
        assert f"{name}(" in source
    light = "import sys, fedloom.runtime.flower_guard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", light]).returncode == 0


def test_without_flower_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedloom\[flower\]'"):
        require_flower()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("method: {name: centralised}", "pools all rows"),
        ("method: {name: fedsa_lora}", "which the server has not"),
        ("federation: {min_replies: 4}", "only 3 sites are expected"),
        ("evaluation: {personalised: 2}", "needs the clients' rows"),
        ("sites: {expected: 3, dead_line: 3}", "unknown key 'sites.dead_line'.*deadline"),
    ],
)
def test_a_server_that_cannot_work_is_refused_at_once(change: str, words: str, tmp_path: Path) -> None:
    plain = {"out: run": "out: run", "sites": "sites: {expected: 3}", change.split(":")[0]: change}
    (tmp_path / "server.yaml").write_text("\n".join(plain.values()))
    with pytest.raises(ConfigError, match=words):
        load_server(tmp_path / "server.yaml")


@contextmanager
def door(context: ssl.SSLContext | None) -> Iterator[str]:
    """A server that takes one connection, with TLS or without."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                if context is None:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                else:
                    context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_a_node_says_what_is_wrong_with_the_servers_door(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        make_keys(tmp_path / name, [], [])
    ca, other = (tmp_path / name / "keys" / "ca.pem" for name in ("mine", "other"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(ca.parent / "server.pem", ca.parent / "server.key")
    with door(tls) as place:
        knock(place, ca)
    with door(None) as place:
        knock(place, None)
    with door(tls) as place, pytest.raises(ConfigError, match=r"certificate is refused: unable to get local issuer"):
        knock(place, other)
    with door(tls) as place, pytest.raises(ConfigError, match="speaks TLS, not plain text"):
        knock(place, None)
    with door(None) as place, pytest.raises(ConfigError, match="speaks no TLS; nothing is sent"):
        knock(place, ca)
    knock(place, ca)  # nobody is there yet: the node waits
    with pytest.raises(ConfigError, match="host:port"):
        knock("127.0.0.1", ca)
