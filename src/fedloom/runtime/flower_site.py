"""The site's end of Flower: the ClientApp, which hands messages to ``runtime.site`` and packs its answers."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from fedloom.errors import ConfigError, FedloomError, SiteRefusal, UpdateRejected
from fedloom.runtime.flower_messages import HELLO, pack, require_flower, unpack
from fedloom.runtime.quarantine import printable
from fedloom.runtime.site import Site, SiteConfig, Terms, load_site
from fedloom.runtime.turns import in_turn
from fedloom.types import Plain

logger = logging.getLogger("flwr")


def client_app() -> Any:
    """Return the ``ClientApp``: it reads its own configuration, whose place the node's ``config`` key names."""
    require_flower()
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def answer(message: Message, context: Context, what: Callable[[Site, Terms, bytes], Any]) -> Message:
        # Hellos have a queue of their own: a server that starts again asks who is there while a site still trains.
        queue = "hello" if message.metadata.message_type == HELLO else "work"
        return Message(_answered(message.content, context.node_config, what, queue), reply_to=message)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return answer(message, context, lambda site, terms, payload: pack({"hello": site.hello(terms)}))

    @app.train("order")
    def order(message: Message, context: Context) -> Message:
        def work(site: Site, terms: Terms, payload: bytes) -> Any:
            reply, kept = site.answer(payload, terms)
            return pack({"kept": kept}, reply)

        return answer(message, context, work)

    @app.train("secure")
    def secure(message: Message, context: Context) -> Message:
        def work(site: Site, terms: Terms, payload: bytes) -> Any:
            reply, kept = site.secure(payload, terms)
            return pack({"kept": kept}, reply)

        return answer(message, context, work)

    return app


def _answered(
    content: Any, node_config: Mapping[str, Any], what: Callable[[Site, Terms, bytes], Any], queue: str = "work"
) -> Any:
    """Return the content of a reply. An error says only what a site may say; the rest stays in its log."""
    try:
        path = str(node_config.get("config", ""))
        config = _config(path)
        with _at_most(config.limits.max_seconds), in_turn(Path(config.folder), queue):
            about, payload = unpack(content, config.limits.max_order_bytes)
            return what(_site(path), _terms(about), payload)
    except (SiteRefusal, UpdateRejected) as refusal:
        logger.error("fedloom refuses: %s", printable(str(refusal)))
        return pack({"refused": str(refusal)})
    except Exception as error:
        logger.error("fedloom: %s", error, exc_info=None if isinstance(error, FedloomError) else error)
        return pack({"refused": f"{type(error).__name__}; the site's own log says more"})


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise a SiteRefusal in what takes longer. Needs a system with timers and the main thread, where Flower calls."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise SiteRefusal(f"this takes longer than {seconds} s, the site's limit (max_seconds)")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _config(path: str) -> SiteConfig:
    if not path:
        raise ConfigError("the node has no configuration: start it with --node-config 'config=\"/path/to/node.yaml\"'")
    return load_site(Path(path))


@cache
def _site(path: str) -> Site:
    return Site(_config(path))


def _terms(about: Mapping[str, Plain]) -> Terms:
    try:
        return Terms.model_validate(about.get("terms"))
    except ValidationError as error:
        raise SiteRefusal(f"the server's terms cannot be understood: {error.error_count()} faults") from error
