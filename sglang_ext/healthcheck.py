"""The image's HEALTHCHECK: ask the server in this container whether it still decodes; exit code 0 or 1.

SGLang's ``/health`` sends a one-token request through the scheduler, answers after a second at the earliest and gives
up after 20 (http_server.py, ``health_generate``), so it needs a time limit above that. Where it listens is read from
the command line of the container's first process, which ``sglang-ext serve`` has become.
"""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.errors import UsageError
from sglang_ext.server import address, missing, take
from sglang_ext.settings import serve_flags

TIMEOUT = 25.0  # seconds; SGLANG_HEALTH_CHECK_TIMEOUT is 20
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def health_url(words: Sequence[str]) -> str:
    """Address of ``/health`` under a server's command line."""
    words = [*words, *missing(words, serve_flags())]
    host, port = address(words)
    host = _ANY_ADDRESS.get(host, host)
    scheme = "https" if take(words, "--ssl-certfile")[0] else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/health"


def check(url: str, timeout: float = TIMEOUT) -> str | None:
    """What is wrong with the server there, None where it answers 200."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is not made for loopback
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=timeout) as response:
            return None if response.status == 200 else f"{url} answers {response.status}"
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except OSError as error:
        return f"{url} does not answer ({getattr(error, 'reason', error)})"


def main(first_process: Path = Path("/proc/1/cmdline")) -> int:
    """Check the container's server; the reason goes to stdout, which `docker inspect` shows."""
    try:
        words = first_process.read_bytes().decode(errors="replace").split("\0")
        problem = check(health_url(words))
    except (OSError, UsageError) as error:
        problem = str(error)
    print(problem or "healthy")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
