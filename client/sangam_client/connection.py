"""How a command reaches a server: its options, and the client that they make."""

from __future__ import annotations

import argparse
from pathlib import Path

import grpc

from sangam_client.client import Client


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default="localhost:8001",
        metavar="HOST:PORT",
        help="gRPC endpoint of the server, default %(default)s",
    )
    parser.add_argument(
        "--ca", type=_read, metavar="FILE.pem", help="use TLS, and trust these certificates"
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        type=_header,
        metavar="NAME=VALUE",
        help="sent with every call, as triton-grpc-protocol-api-key=SECRET; repeatable",
    )


def connect(args: argparse.Namespace, model: str = "sangam") -> Client:
    """A client for what the options of `add_options` say."""
    credentials = None if args.ca is None else grpc.ssl_channel_credentials(args.ca)
    return Client(args.url, model, credentials=credentials, headers=dict(args.header))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.lower(), value
