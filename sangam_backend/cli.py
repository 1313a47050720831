"""The `sangam` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args, get_type_hints

from sangam_backend.config import ConfigError, EngineConfig
from sangam_backend.reference.loop import Cache


def main() -> None:
    args = _parser().parse_args()
    try:
        sys.exit(args.run(args))
    except (ConfigError, OSError) as error:
        sys.exit(f"sangam: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sangam", description=__doc__)
    commands = parser.add_subparsers(required=True)

    serve = commands.add_parser("serve", help="start a Triton server on a checkpoint")
    serve.set_defaults(run=_serve)
    serve.add_argument("--mode", choices=["colocated"], default="colocated")
    serve.add_argument("--instances", type=int, default=1, metavar="N", help="model processes")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--http-port", type=int, default=8000)
    serve.add_argument("--grpc-port", type=int, default=8001)
    serve.add_argument("--metrics-port", type=int, default=8002)
    serve.add_argument("--startup-timeout", type=float, default=600, metavar="SECONDS")
    serve.add_argument("--grace", type=float, default=30, metavar="SECONDS",
                       help="how long running requests may go on after SIGTERM")  # fmt: skip
    _add_engine_options(serve)

    generate = commands.add_parser("generate", help="run a file of requests without a server")
    generate.set_defaults(run=_generate)
    generate.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    generate.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    generate.add_argument("--engine", choices=["sangam", "reference"], default="sangam")
    generate.add_argument("--cache", choices=get_args(Cache), default="dual",
                          help="of the reference; the engine's is dual")  # fmt: skip
    _add_engine_options(generate)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The fields of EngineConfig that a person sets, under their own names."""
    hints = get_type_hints(EngineConfig)
    for name in (
        "model",
        "device",
        "dtype",
        "load_format",
        "block_length",
        "max_batch_size",
        "max_tokens_per_iteration",
        "queue_order",
        "max_sequence_length",
        "kv_cache_tokens",
        "memory_utilization",
        "attention",
        "cuda_graphs",
        "fused_ops",
        "overlap",
        "backlog",
    ):
        kind = hints[name]
        if kind is bool:
            parser.add_argument(
                "--" + name.replace("_", "-"),
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
            )
            continue
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=kind if kind in (int, float) else str,
            choices=get_args(kind) or None,
            default=argparse.SUPPRESS if name != "model" else None,
            required=name == "model",
        )


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    names = get_type_hints(EngineConfig)
    return EngineConfig(**{name: value for name, value in vars(args).items() if name in names})


def _serve(args: argparse.Namespace) -> int:
    from sangam_backend.launcher import Endpoints, serve

    endpoints = Endpoints(args.host, args.http_port, args.grpc_port, args.metrics_port)
    return serve(
        _engine_config(args),
        endpoints,
        args.mode,
        args.instances,
        startup_timeout=args.startup_timeout,
        grace=args.grace,
    )


def _generate(args: argparse.Namespace) -> int:
    from sangam_backend.generate import run_engine, run_reference

    config = _engine_config(args)
    if args.engine == "reference":
        run_reference(config, args.cache, args.input, args.output)
    else:
        run_engine(config, args.input, args.output)
    return 0


if __name__ == "__main__":
    main()
