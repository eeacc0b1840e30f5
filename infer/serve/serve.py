"""`omni-infer serve`: the server's process, from its options to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import signal
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from infer.checks import read_adapters
from infer.loading import is_small, serving_dtype, warm_up, why_mute
from infer.options import DEFAULT_MODEL, ServeOptions
from infer.serve.app import create_app
from infer.serve.connections import HttpConnection, SocketConnection, most_connections
from infer.serve.host import EngineHost
from infer.serve.keys import read_keys
from infer.serve.server import Server
from infer.serve.settings import SESSION_KEYWORDS, Answering, ServerLimits, ServeSettings
from infer.serve.telemetry import LOG, write_logs
from omni.engine.process import EngineProcess
from omni.errors import SoundWarning, UserError
from omni.pretrained import NAMES, SHIPPED
from omni.utils.hardware import find_device
from omni.utils.process import say

LARGEST_MESSAGE = 21 * 2**20  # bytes of a WebSocket's message: 15 MiB of sound in base64, and some more
LAST_WORDS = 2.0  # seconds in which sockets that end are told so
DRAIN = 30.0  # seconds that answers under way have after SIGTERM
DRAIN_LOOK = 0.1  # seconds between two looks whether answers are still under way


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C; UserError where the model, a key file, the address or a certificate is bad."""
    model = options.model or DEFAULT_MODEL
    keys = () if options.key_file is None else read_keys(options.key_file)
    listening = listen(options.host, options.port)
    try:
        write_logs()
        warnings.simplefilter("ignore", SoundWarning)  # they tell what was said
        adapters = read_adapters(options.adapter, model)
        say(f"loading {model} in a process of its own, and measuring what a step of it costs")
        host = EngineHost(lambda: start_engine(model, options), adapters)
        mute = why_mute(model) if host.engine.codec is None else ""
        if mute:
            say(f"answers are text alone: {mute}")
        try:
            app = create_app(host, settings_of(model, options), keys)
            gc.collect()
            gc.freeze()  # what is imported is not looked through again while people listen
            uvloop.run(run(app.state.server, app, listening, options))
        finally:
            host.close()
    finally:
        listening.close()


def start_engine(model: str, options: ServeOptions) -> EngineProcess:
    """The engine's process, with the costs of its steps measured."""
    small = is_small(model) and options.device in ("auto", "cpu")
    device = find_device(options.device, options.quantize)
    dtype = serving_dtype(options.dtype, device, model)
    engine = EngineProcess(
        model,
        slots=options.slots,
        context=options.context,
        patience=10.0,
        threads=options.threads or (1 if small else None),
        device=options.device,
        dtype=dtype,
        quantize=options.quantize,
    )
    engine.call("engine.measure")
    warm_up(engine)
    return engine


def settings_of(model: str, options: ServeOptions) -> ServeSettings:
    """The settings that the options give."""
    key_sessions = options.key_sessions or options.sessions
    path = Path(model).resolve()
    if path.name == "model" and path.parent.name:  # a run's folder
        path = path.parent
    return ServeSettings(
        model=options.name or path.name,
        is_shipped=path == (SHIPPED / NAMES[0]).resolve(),
        adapters=tuple(read_adapters(options.adapter, model)),
        origins=options.origins,
        limits=ServerLimits(
            sessions=options.sessions,
            key_sessions=key_sessions,
            connections=most_connections(options.sessions),
            session_seconds=options.session_minutes * 60,
            key_audio_seconds=60 * (options.key_audio_minutes or 60 * key_sessions),
            key_events=ServerLimits.session_events * key_sessions,
        ),
        answering=Answering(
            use_instructions=options.instructions == "use", **{name: getattr(options, name) for name in SESSION_KEYWORDS}
        ),
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; UserError where that cannot be."""
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket_type, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port} cannot be listened on: {error.strerror or error}; choose another"
        ) from error
    return listening


class Uvicorn(uvicorn.Server):
    """Leaves signals to `run`, which lets answers come to their ends first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def configured(app: Any, certificate: str | None = None, private_key: str | None = None) -> uvicorn.Config:
    """The configuration of uvicorn for the application."""
    connections = app.state.server.settings.limits.connections
    return uvicorn.Config(
        app,
        backlog=min(max(connections // 2, 1), 2048),
        log_config=None,
        access_log=False,
        http=HttpConnection,
        ws=SocketConnection,
        ws_max_size=LARGEST_MESSAGE,
        ws_per_message_deflate=False,
        ws_ping_interval=20.0,
        ws_ping_timeout=60.0,
        timeout_graceful_shutdown=5,
        ssl_certfile=certificate,
        ssl_keyfile=private_key,
        server_header=False,
    )


async def run(server: Server, app: object, listening: socket.socket, options: ServeOptions) -> None:
    """Serve, and drain on SIGTERM, SIGHUP or Ctrl-C; a second one ends the answers at once."""
    tls = options.certificate is not None
    web = Uvicorn(configured(app, options.certificate, options.private_key))
    ending, hurry = asyncio.Event(), asyncio.Event()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(name, lambda: (hurry if ending.is_set() else ending).set())
    serving = asyncio.create_task(web.serve([listening]))
    waiting = asyncio.create_task(ending.wait())
    try:
        while not web.started and not serving.done():
            await asyncio.sleep(0.01)
        tell_address(listening, tls)
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await drain(server, hurry)
    finally:
        waiting.cancel()
        web.should_exit = True
        await serving


def tell_address(listening: socket.socket, tls: bool) -> None:
    """Print where the server is reached."""
    host, port = listening.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if not tls and not address.is_loopback:
        say("keys and speech travel unencrypted: give --certificate and --private_key, or put a proxy with TLS before it")
    shown = "localhost" if address.is_unspecified else f"[{host}]" if address.version == 6 else host
    more = ", and at this machine's other names" if address.is_unspecified else ""
    rest = f"{'s' * tls}://{shown}:{port}/"
    print(f"talk to it at http{rest}   (API: ws{rest}v1/realtime){more}", flush=True)


async def drain(server: Server, hurry: asyncio.Event, seconds: float = DRAIN) -> None:
    """Take no new session, wait for the answers under way, for at most that many seconds or until `hurry`, and end sessions."""
    server.draining = True
    under_way = server.answering
    LOG.info("draining", extra={"fields": {"sessions": len(server.sessions), "answers": under_way}})
    if under_way:
        say(f"ending: {under_way} answers may end within {seconds:g} s (once more to end at once)")
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while server.answering and not hurry.is_set() and loop.time() < until:
        await asyncio.sleep(DRAIN_LOOK)
    for session in list(server.sessions.values()):
        session.tell_error("this server ends; connect again", "server_shutting_down")
        session.transport.end("the server ends")
    until = loop.time() + LAST_WORDS
    while server.sessions and loop.time() < until:  # else uvicorn closes their sockets before these were sent
        await asyncio.sleep(0.01)
