"""``fedloom flower``: a Flower app folder, development keys, and a node that runs no code from outside."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml

from fedloom.errors import ConfigError
from fedloom.files import write_atomic
from fedloom.version import __version__

#: Development certificates last so long.
DAYS = 90


def template(name: str) -> str:
    return (files("fedloom") / "assets" / "flower" / name).read_text(encoding="utf-8")


def init_folder(folder: Path, sites: int = 3, port: int = 8000) -> None:
    """Write a ready Flower app folder; the server listens at ``port``.

    Only ``app/`` travels to the sites: names of two functions of fedloom, no secrets, no paths.

    Raises:
        ConfigError: the folder holds something already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder. Give another name.")
    for name in ("README.md", "server.yaml", "node.example.yaml", "app/pyproject.toml"):
        text = template(name.replace("/", "-")).replace("{{version}}", __version__).replace("{{sites}}", str(sites))
        write_atomic(folder / name, text.encode())
    for side, module in (("server", "fedloom.flower_app"), ("client", "fedloom.runtime.flower_site")):
        text = f"from {module} import {side}_app\n\napp = {side}_app()\n"
        write_atomic(folder / "app" / "fedloom_sites" / f"{side}.py", text.encode())
    write_atomic(folder / "app" / "fedloom_sites" / "__init__.py", b"")
    connection = f'address = "127.0.0.1:{port}"\n'
    write_atomic(
        folder / "flwr" / "config.toml",
        f'[superlink]\ndefault = "sites"\n\n[superlink.sites]\n{connection}'
        f'root-certificates = "{folder.resolve() / "keys" / "ca.pem"}"\n\n'
        f"[superlink.insecure]\n{connection}insecure = true\n".encode(),
    )


def make_keys(folder: Path, sites: list[str], hosts: list[str]) -> None:
    """Write a development CA, the server's certificate, and a P-384 key pair for each site, to ``folder/keys``.

    Raises:
        ConfigError: there are keys already, or ``cryptography`` (a part of Flower) is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ConfigError("keys need the package 'cryptography': pip install 'fedloom[flower]'") from error
    from fedloom.runtime.memory import check_client_name

    for name in sites:
        check_client_name(name)
    place = folder / "keys"
    if place.exists():
        raise ConfigError(f"{place} exists already. Move it away to make new keys.")
    now = datetime.datetime.now(datetime.UTC)

    def secret(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
        return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())

    def certificate(subject: str, key: Any, issuer: str, signer: Any, extensions: list[tuple[Any, bool]]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority_id = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    ca = certificate(
        "fedloom development CA",
        authority,
        "fedloom development CA",
        authority,
        [(x509.BasicConstraints(ca=True, path_length=0), True), (authority_id, False), (_usage(x509, ca=True), True)],
    )
    own = certificate(
        "fedloom server",
        server,
        "fedloom development CA",
        authority,
        [
            (x509.SubjectAlternativeName([_host(x509, host) for host in ["localhost", "127.0.0.1", *hosts]]), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id), False),
            (_usage(x509, ca=False), True),
            (x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), False),
        ],
    )
    # The CA's private key is not written: what it has not signed here, nobody signs later.
    write_atomic(place / "ca.pem", ca)
    write_atomic(place / "server.pem", own)
    _write_secret(place / "server.key", secret(server, serialization.PrivateFormat.PKCS8))
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())
        _write_secret(place / site, secret(key, serialization.PrivateFormat.OpenSSH))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        write_atomic(place / f"{site}.pub", public + b"\n")


def _host(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(x509: Any, *, ca: bool) -> Any:
    no = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **no)


def _write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def node_command(
    config: Path, superlink: str, key: Path | None, ca: Path | None, insecure: bool, port: int
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a SuperNode whose apps can only be fedloom's own.

    Flower starts an app by a program's name, so a folder of such names goes before all others on its path.

    Raises:
        ConfigError: the configuration is wrong, Flower is missing, or keys are, without ``insecure``.
    """
    from fedloom.runtime.flower_guard import write_programs
    from fedloom.runtime.flower_messages import require_flower
    from fedloom.runtime.site import load_site

    require_flower()
    site = load_site(config)
    command = ["flower-supernode", "--superlink", superlink, "--port", str(port)]
    if insecure:
        if key is not None or ca is not None:
            raise ConfigError("--insecure sends all in plain text, without keys: give either it, or --key and --ca.")
        command.append("--insecure")
    elif key is None or ca is None:
        raise ConfigError("a node needs --key and --ca (fedloom flower keys makes some). Plain text needs --insecure.")
    else:
        command += ["--auth-supernode-private-key", str(key), "--root-certificates", str(ca)]
    command += ["--node-config", f"config={yaml.safe_dump(str(config.resolve()), default_style=chr(34)).strip()}"]
    programs = write_programs(Path(site.folder) / ".programs")
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return command, {**os.environ, "PATH": path, "FLWR_TELEMETRY_ENABLED": "0"}


def server_environment(folder: Path) -> dict[str, str]:
    """Return the environment of the SuperLink and of Flower's command line, for an app folder."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"FLWR_HOME": str(folder.resolve() / "flwr"), "FEDLOOM_SERVER": str(folder.resolve() / "server.yaml")}
    return {**os.environ, **own, "FLWR_TELEMETRY_ENABLED": "0", "PATH": programs}


def server_command(folder: Path, insecure: bool) -> list[str]:
    """Return the command of the SuperLink; its port is that of ``flwr/config.toml``.

    Raises:
        ConfigError: a file of the folder is missing or wrong, or Flower is.
    """
    from fedloom.runtime.flower_messages import require_flower

    require_flower()
    if not (folder / "server.yaml").is_file():
        raise ConfigError(f"{folder} holds no server.yaml: fedloom flower init makes such a folder.")
    file, keys = folder / "flwr" / "config.toml", folder.resolve() / "keys"
    try:
        port = tomllib.loads(file.read_text(encoding="utf-8"))["superlink"]["sites"]["address"].rpartition(":")[2]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} does not say where the server listens. fedloom flower init writes one.") from error
    command = ["flower-superlink", "--port", port, "--disable-runtime-dependency-installation"]
    if insecure:
        return [*command, "--host", "127.0.0.1", "--insecure"]
    if not (keys / "server.key").is_file():
        raise ConfigError(f"{keys} holds no server.key: make keys with fedloom flower keys, or give --insecure.")
    # The list of keys is kept in the database, so that it outlives the process.
    command += ["--host", "0.0.0.0", "--database", str(folder.resolve() / "superlink.db"), "--enable-supernode-auth"]
    for option, name in (("ssl-ca-certfile", "ca.pem"), ("ssl-certfile", "server.pem"), ("ssl-keyfile", "server.key")):
        command += [f"--{option}", str(keys / name)]
    return command


def become_flwr(folder: Path, *arguments: str) -> NoReturn:
    """Replace this process by Flower's own command line, for an app folder."""
    os.chdir(folder)
    os.execvpe("flwr", ["flwr", *arguments], server_environment(Path()))


def run_app(folder: Path, insecure: bool) -> None:
    """Start the run and show its log to the end.

    Raises:
        ConfigError: it has not come to a good end, which Flower's exit code does not tell.
    """
    plain = yaml.safe_load((folder / "server.yaml").read_text(encoding="utf-8"))
    finished = folder / plain["out"] / "metrics.json"
    before = finished.stat().st_mtime_ns if finished.is_file() else None
    command = ["flwr", "run", "app", "insecure" if insecure else "sites", "--stream"]
    subprocess.run(command, cwd=folder, env=server_environment(folder), check=False)
    if not finished.is_file() or finished.stat().st_mtime_ns == before:
        raise ConfigError("the run has not finished; the log above says why. The same command goes on with it.")


def knock(superlink: str, ca: Path | None) -> None:
    """Try the server's door, since Flower's own messages do not tell a wrong CA or plain text from a dead server.

    A server that does not answer at all is no mistake: the node waits for it.

    Raises:
        ConfigError: one of both speaks TLS and the other does not, or the CA has not signed the server's certificate.
    """
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--superlink {superlink!r} is not of the form host:port.")
    context = ssl.create_default_context(cafile=str(ca)) if ca else ssl._create_unverified_context()
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=10) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")),
        ):
            found = "TLS"
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"the server's certificate is refused: {error.verify_message}. Is {ca} the server's CA, and is the server "
            f"{host} one of the --host names of its keys?"
        ) from error
    except ssl.SSLError:
        found = "plain text"
    except OSError:
        return
    if ca is None and found == "TLS":
        raise ConfigError(f"the server at {superlink} speaks TLS, not plain text: give --key and --ca, not --insecure.")
    if ca is not None and found == "plain text":
        raise ConfigError(f"what answers at {superlink} speaks no TLS; nothing is sent to it.")


def become_node(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by the SuperNode, and leave a warm copy of it behind for the node's apps."""
    # What the copies need is imported before the fork, and threads are started after it.

    from fedloom.runtime.flower_guard import run_app
    from fedloom.runtime.flower_warm import stay_warm

    os.execvpe(command[0], command, environment | stay_warm(run_app))


Folder = Annotated[Path, typer.Argument(help="The app folder.", show_default=False)]


def flower_commands(spoken: Callable[[Callable[..., None]], Callable[..., None]]) -> typer.Typer:
    """Return the commands; ``spoken`` turns a mistake of the user into one message."""
    flower = typer.Typer(no_args_is_help=True, help="Train across sites on Flower: app folder, keys, node.")

    @flower.command()
    @spoken
    def init(
        folder: Folder,
        sites: Annotated[int, typer.Option(min=1, max=100_000, help="Sites to wait for before round 1.")] = 3,
        port: Annotated[int, typer.Option(min=1, max=65535, help="Where the server listens.")] = 8000,
    ) -> None:
        """Write a ready Flower app folder: app, configurations, one page of instructions."""
        init_folder(folder, sites, port)
        typer.echo(f"{folder / 'README.md'} says what to do next.")

    @flower.command()
    @spoken
    def keys(
        folder: Folder,
        site: Annotated[list[str], typer.Option(help="Name of a site; may be repeated.", show_default=False)],
        host: Annotated[list[str] | None, typer.Option(help="Name or address of the server; may be repeated.")] = None,
    ) -> None:
        """Make a development CA, the server's certificate and a key pair per site."""
        make_keys(folder, site, host or [])
        typer.echo(f"{folder / 'keys'}: give each site its own key and ca.pem, nothing else.")

    @flower.command()
    @spoken
    def server(
        folder: Folder,
        insecure: Annotated[bool, typer.Option("--insecure", help="Plain text on loopback: for tests only.")] = False,
    ) -> None:
        """Run the server: Flower's SuperLink, with TLS and a list of keys."""
        command = server_command(folder, insecure)
        os.execvpe(command[0], command, server_environment(folder))

    @flower.command()
    @spoken
    def admit(
        folder: Folder, site: Annotated[str, typer.Argument(help="Name of the site.", show_default=False)]
    ) -> None:
        """List a site's public key, keys/NAME.pub, at the running server; its node can have that name only."""
        if not (folder / "keys" / f"{site}.pub").is_file():
            raise ConfigError(f"{folder / 'keys' / site}.pub is not there: put the site's public key there first.")
        become_flwr(folder, "supernode", "register", f"keys/{site}.pub", "sites", "--name", site)

    @flower.command()
    @spoken
    def run(
        folder: Folder,
        insecure: Annotated[bool, typer.Option("--insecure", help="The server runs with --insecure.")] = False,
    ) -> None:
        """Start the run at the running server, or go on with it; its log is shown until it ends."""
        run_app(folder, insecure)

    @flower.command()
    @spoken
    def node(
        config: Annotated[Path, typer.Argument(help="The node's configuration.", show_default=False)],
        superlink: Annotated[str, typer.Option(help="The server, as host:port.")] = "127.0.0.1:8000",
        key: Annotated[Path | None, typer.Option(help="This site's private key.")] = None,
        ca: Annotated[Path | None, typer.Option(help="Certificate of the CA that signed the server's.")] = None,
        insecure: Annotated[bool, typer.Option("--insecure", help="Plain text, no keys: for tests only.")] = False,
        port: Annotated[int, typer.Option(min=1, max=65535, help="Local port between node and app.")] = 9094,
    ) -> None:
        """Run this site's node. It runs fedloom as installed here, whatever app the server sends."""
        knock(superlink, ca)
        command, environment = node_command(config, superlink, key, ca, insecure, port)
        become_node(command, environment)

    return flower
