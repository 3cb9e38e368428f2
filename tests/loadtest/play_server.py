"""Plays a server's start: ``python play_server.py PART [ARGUMENT] ... --port PORT``, with what SGLang would print.

late SECONDS   listens after so long
hangs          takes connections and answers none
robbed         another socket has its port by the time it binds, on the first try; like SGLang it lives on
deaf           says that it has started and does not listen, on the first try
dies           ends with code 1, on the first try
refuses        ends with code 2
"""

from __future__ import annotations

import http.server
import os
import socket
import sys
import time
from pathlib import Path


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the name that the standard library wants
        self.send_response(200)
        self.end_headers()


def main(part: str, argument: str, port: int) -> None:
    print(f"pid {os.getpid()} arguments {sys.argv[1:]}", flush=True)
    once = Path(f"{argument}.tried")
    first = not once.exists()
    if part in ("robbed", "deaf", "dies"):
        once.touch()
    if part == "refuses":
        print("This drafter does not fit.", flush=True)
        sys.exit(2)
    if part == "dies" and first:
        sys.exit(1)
    if part == "late":
        time.sleep(float(argument))
    if part == "deaf" and first:
        print("INFO:     Application startup complete.", flush=True)
        time.sleep(60)
    if part == "robbed" and first:
        robber = socket.create_server(("127.0.0.1", port))
        try:
            http.server.HTTPServer(("127.0.0.1", port), Health)
        except OSError as error:
            print(f"ERROR:    {error} while attempting to bind on address ('127.0.0.1', {port})", flush=True)
            time.sleep(60)
        robber.close()
    if part == "hangs":
        with socket.create_server(("127.0.0.1", port)):
            time.sleep(60)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[sys.argv.index("--port") + 1]))
