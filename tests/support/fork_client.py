"""Stands in for a Python process that a fork of `fork_server.py` is: `fork_client.py SERVER ARGUMENTS`.

It gives the fork its files, folder and environment, hands signals on, and ends as the fork ends. Killed, it takes the
fork with it. Run with -I -S: of Python it needs the core alone.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

LENGTH = struct.Struct("!q")
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def received(connection: socket.socket, count: int) -> bytes:
    """So many bytes; fewer where the server ended."""
    got = b""
    while len(got) < count and (more := connection.recv(count - len(got))):
        got += more
    return got


def main(server: str, *arguments: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{server}")
        received(connection, 1)
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        text = json.dumps(request).encode()
        socket.send_fds(connection, [LENGTH.pack(len(text))], [0, 1, 2])
        connection.sendall(text)
        (pid,) = LENGTH.unpack(received(connection, LENGTH.size))

        def hand_on(number: int, _: object) -> None:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

        for number in HANDED_ON:
            signal.signal(number, hand_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
        (status,) = LENGTH.unpack(received(connection, LENGTH.size))
    end(os.waitstatus_to_exitcode(status))


def end(code: int) -> None:
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
