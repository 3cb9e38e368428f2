"""The server process that ``sglang-ext serve`` becomes: SGLang's launch, with refusals that are one sentence.

``python -m sglang_ext.server`` takes SGLang's arguments. Where there is no accelerator the CPU platform is selected and
its defaults fill in what was not given.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from sglang_ext.errors import UsageError, refusal_ends_process

DEFAULT_ADDRESS = ("127.0.0.1", 30000)  # of SGLang's own --host and --port


def main(argv: Sequence[str]) -> int:
    """Run the server until it is told to stop; 2 when the arguments are refused."""
    from sglang_ext import cpu
    from sglang_ext.sglang_version import check_version

    with refusal_ends_process():
        check_version()
        if cpu.activate():
            if wants_gpu(argv):
                raise UsageError(
                    "--device cuda was asked for, but torch finds no usable GPU; check the driver and that the "
                    "container has been given a GPU, or leave the flag out to serve on the CPU for development."
                )
            print(
                "sglang-ext: no accelerator was found, so this serves on the CPU: for development only.",
                file=sys.stderr,
            )
            argv = with_cpu_defaults(argv)
        server_args = resolve(argv)
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    # Until the HTTP server takes the signals over, SIGTERM would end this process without its children.
    signal.signal(signal.SIGTERM, _stop)
    try:
        run_server(server_args)
    except RuntimeError as error:
        # A scheduler that refuses to start has said why and exited with 2 (engine.py:2002).
        if "(exit code: 2)" not in str(error):
            raise
        return 2
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def resolve(argv: Sequence[str]) -> Any:
    """SGLang's resolved ``ServerArgs``; UsageError where SGLang refuses a combination of flags."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    try:
        server_args = prepare_server_args(list(argv))
        server_args.resolve_once()
    except (ValueError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if not reason:
            raise
        raise UsageError(f"SGLang refuses these flags ({reason}); change them as it says.") from None
    if server_args.node_rank == 0:
        check_port(server_args.host, server_args.port)
    return server_args


def with_cpu_defaults(argv: Sequence[str]) -> list[str]:
    """The arguments with those a CPU server needs, where they were not given."""
    from sglang_ext.cpu import SERVER_DEFAULTS

    defaults: list[str] = []
    for name, value in SERVER_DEFAULTS.items():
        if name == "skip_server_warmup":
            # Without the warm-up request SGLang calls its own /freeze_gc before it listens (http_server.py:2589), and
            # prints a traceback; an engine in Python never warms up.
            continue
        if value is not False:
            flag = "--" + name.replace("_", "-")
            defaults += [flag] if value is True else [flag, str(value)]
    return [*argv, *missing(argv, defaults)]


def missing(argv: Sequence[str], defaults: Sequence[str]) -> list[str]:
    """Those of the default flags, with their values, that the arguments do not have.

    >>> missing(["--port=1"], ["--port", "2", "--enable-metrics", "--host", "0.0.0.0"])
    ['--enable-metrics', '--host', '0.0.0.0']
    """
    given, result, wanted = {word.split("=")[0] for word in argv}, [], False
    for word in defaults:
        if word.startswith("--"):
            wanted = word.split("=")[0] not in given
        if wanted:
            result.append(word)
    return result


def wants_gpu(argv: Sequence[str]) -> bool:
    """Whether ``--device cuda`` rules the CPU out."""
    return (take(argv, "--device")[0] or "").startswith("cuda")


def take(argv: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of ``--name value`` or ``--name=value`` (the last one counts) and the other words."""
    value, others, words = None, [], iter(argv)
    for word in words:
        if word == name:
            value = next(words, "")
        elif word.startswith(name + "="):
            value = word[len(name) + 1 :]
        else:
            others.append(word)
    return value, others


def address(argv: Sequence[str]) -> tuple[str, int]:
    """Host and port among SGLang's arguments."""
    host, _ = take(argv, "--host")
    port, _ = take(argv, "--port")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"--port {port} is no port; give a number from 1 to 65535.")
    return host or DEFAULT_ADDRESS[0], int(port) if port else DEFAULT_ADDRESS[1]


def check_port(host: str, port: int) -> None:
    """UsageError when the address cannot be bound."""
    try:
        family, kind, protocol, _, location = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(location)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"Port {port} on {host} is in use; stop what listens there or give another --port."
            ) from None
        raise UsageError(f"The address {host}:{port} cannot be used ({error.strerror}); give another --host.") from None


def _stop(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
