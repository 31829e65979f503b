"""In place of the `vllm` command: `serve MODEL ... --port P` passes connections on to the stand-in at $STAND_IN_PORT.

What it was started with goes to $STAND_IN_LOG, one JSON object a start. It imports nothing slow. As vLLM does, it
answers a request under /v1 that lacks the key of $VLLM_API_KEY with status 401. A connection whose first line names
/die ends the process, as a crash does; after one that names /hang, none is answered.
"""

import json
import os
import socket
import sys
import threading

HANGS = threading.Event()
KEY = os.environ.get("VLLM_API_KEY", "")
REFUSED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"


def main() -> None:
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "variables": sorted(os.environ)}) + "\n")
    print("loading", os.environ.get("JUDGE_TOKEN", ""), KEY, sys.argv, flush=True)
    if "--broken" in sys.argv:
        sys.exit("no kernel image is available")
    listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
    while "--silent" in sys.argv:
        listening.accept()[0].recv(1)
        threading.Event().wait()
    while True:
        client, _ = listening.accept()
        behind = socket.create_connection(("127.0.0.1", int(os.environ["STAND_IN_PORT"])))
        for source, target in ((client, behind), (behind, client)):
            threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            if data.startswith(b"GET /die"):
                os._exit(9)
            if data.startswith(b"GET /hang"):
                HANGS.set()
            if HANGS.is_set():
                threading.Event().wait()
            if KEY and data.startswith((b"GET /v1", b"POST /v1")) and f"Bearer {KEY}\r\n".encode() not in data:
                source.sendall(REFUSED)
                break
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        target.close()


if __name__ == "__main__":
    main()
