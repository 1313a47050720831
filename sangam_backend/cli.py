"""The `sangam` command."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from sangam_client import connection

from sangam_backend.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from sangam_backend.deployment import Deployment

HALVES = {"sangam_prefill": "prefill_", "sangam_decode": "decode_"}
POOLS = {"colocated": {"sangam": ""}, "disaggregated": HALVES, "hybrid": HALVES}
"""Of each mode the models with instances, and what their options begin with."""
OPTIONS = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "role"]
SERVE_OPTIONS = (
    *("prefill_overflow_tokens", "max_queue_size", "max_queue_tokens", "max_request_time"),
    *("backlog", "event_log"),
)
"""Those that mean nothing without a server."""


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
    serve.add_argument("--mode", choices=list(POOLS), default="colocated",
                       help="where prefills and decodes run, see README")  # fmt: skip
    for pool, what in (("", "model"), ("prefill-", "prefill"), ("decode-", "decode")):
        serve.add_argument(f"--{pool}instances", type=int, metavar="N", help=f"{what} processes")
        serve.add_argument(f"--{pool}gpus", metavar="0,1",
                           help=f"CUDA devices that the {what} processes take in turn")  # fmt: skip
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--http-port", type=int, default=8000)
    serve.add_argument("--grpc-port", type=int, default=8001)
    serve.add_argument("--metrics-port", type=int, default=8002)
    serve.add_argument("--startup-timeout", type=float, default=600, metavar="SECONDS")
    serve.add_argument("--grace", type=float, default=30, metavar="SECONDS",
                       help="how long running requests may go on after SIGTERM")  # fmt: skip
    serve.add_argument("triton_options", nargs="*", metavar="-- TRITON_OPTION",
                       help="after --, options of tritonserver, as they are")  # fmt: skip
    _add_engine_options(serve, OPTIONS)

    health = commands.add_parser("health", help="ask a server for a token; status 1 if it is ill")
    health.set_defaults(run=_health)
    connection.add_options(health)
    health.add_argument("--metrics-url", default="http://127.0.0.1:8002/metrics")
    health.add_argument("--deadline", type=float, default=5, metavar="SECONDS")

    generate = commands.add_parser("generate", help="run a file of requests without a server")
    generate.set_defaults(run=_generate)
    generate.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    generate.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    generate.add_argument("--engine", choices=["sangam", "reference"], default="sangam")
    _add_engine_options(generate, [name for name in OPTIONS if name not in SERVE_OPTIONS])
    return parser


def _add_engine_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Fields of EngineConfig, under their own names and with their own docstrings."""
    kinds, docs = get_type_hints(EngineConfig), _field_docs()
    for field in dataclasses.fields(EngineConfig):
        if field.name not in names:
            continue
        kind, required = kinds[field.name], field.default is dataclasses.MISSING
        how: dict[str, Any] = {"type": kind if kind in (int, float) else str}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif get_args(kind):
            how = {"choices": get_args(kind)}
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            required=required,
            help=docs[field.name]
            + ("" if required else f" Default: {str(field.default) or 'none'}."),
            **how,
        )


def _field_docs() -> dict[str, str]:
    """The string below each field of EngineConfig."""
    docs = {}
    (config,) = ast.parse(inspect.getsource(EngineConfig)).body
    assert isinstance(config, ast.ClassDef)
    for field, below in pairwise(config.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return docs


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    names = get_type_hints(EngineConfig)
    return EngineConfig(**{name: value for name, value in vars(args).items() if name in names})


def _deployment(args: argparse.Namespace) -> Deployment:
    """The pools of the mode. Raises ConfigError for an option of another mode."""
    from sangam_backend.deployment import Deployment, Pool

    pools = {}
    for name, prefix in POOLS[args.mode].items():
        instances, gpus = (getattr(args, prefix + part) for part in ("instances", "gpus"))
        pools[name] = Pool(1 if instances is None else instances, gpus or "")
    for prefix in {"", "prefill_", "decode_"} - set(POOLS[args.mode].values()):
        for part in ("instances", "gpus"):
            if getattr(args, prefix + part) is not None:
                option = (prefix + part).replace("_", "-")
                raise ConfigError(f"--{option} has no meaning in the mode {args.mode}")
    return Deployment(args.mode, pools)


def _serve(args: argparse.Namespace) -> int:
    from sangam_backend.launcher import serve
    from sangam_backend.supervisor import Endpoints

    endpoints = Endpoints(args.host, args.http_port, args.grpc_port, args.metrics_port)
    return serve(
        _engine_config(args),
        endpoints,
        _deployment(args),
        startup_timeout=args.startup_timeout,
        grace=args.grace,
        triton_options=args.triton_options,
    )


def _health(args: argparse.Namespace) -> int:
    from sangam_backend.health import check

    with connection.connect(args) as client:
        is_well, reason = check(client, args.metrics_url, args.deadline)
    print(f"{'well' if is_well else 'ill'}: {reason}")
    return 0 if is_well else 1


def _generate(args: argparse.Namespace) -> int:
    from sangam_backend.generate import run_engine, run_reference

    config = _engine_config(args)
    if args.engine == "reference":
        run_reference(config, args.input, args.output)
    else:
        run_engine(config, args.input, args.output)
    return 0


if __name__ == "__main__":
    main()
