"""The process of an engine, a child of Triton's process of the instance.

An engine may die of a CUDA error or of too little memory; Triton's own process must not, since
Triton 24.10 neither restarts it nor stops sending it requests.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from sangam_backend.config import ConfigError
from sangam_backend.server.channel import (
    Cancel,
    Channel,
    Close,
    Enter,
    Start,
    Started,
)
from sangam_backend.server.entrance import Entrance
from sangam_backend.server.instance import Instance
from sangam_backend.server.open_instance import open_instance
from sangam_backend.server.reply import Reply

WATCH_SECONDS = 0.5


def serve(channel: Channel, instance: Instance) -> None:
    """Takes requests until the host is gone.

    On SIGTERM running requests end with an error; the launcher sends it after the grace time.
    """
    signal.signal(signal.SIGTERM, lambda *_: instance.give_up())
    replies: dict[int, Reply] = {}
    entrance = Entrance(channel, instance, instance.max_queue_size)

    def close() -> None:
        instance.close()
        os._exit(0)

    _start(entrance.run)
    while (message := channel.receive()) is not None:
        if isinstance(message, Enter):
            reply = replies[message.id] = Reply(channel, message.id, replies)
            entrance.put(message, reply)
        elif isinstance(message, Cancel) and message.id in replies:
            replies[message.id].cancel()
        elif isinstance(message, Close):
            _start(close)
    os._exit(1)


def follow_server(start: Start) -> None:
    """Ends the stub and this process after the server.

    The stub cannot look itself: a call into a server that dies never returns, and holds the
    interpreter's lock.
    """
    while start.server.is_running():
        time.sleep(WATCH_SECONDS)
    if os.getppid() == start.stub:
        os.kill(start.stub, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    # The terminal's Ctrl-C is for the server, which drains first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    channel = Channel(Connection(int(sys.argv[1])))
    start: Start = channel.receive()
    _start(lambda: follow_server(start))
    try:
        instance = open_instance(start, channel)
    except (ConfigError, ValueError) as error:
        channel.send(Started(str(error)))
    except Exception as error:
        traceback.print_exc()
        channel.send(Started(repr(error)))
    else:
        channel.send(Started())
        serve(channel, instance)


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True).start()


if __name__ == "__main__":
    main()
