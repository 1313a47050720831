"""The `sangam` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

from sangam_backend.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from sangam_backend.deployment import Deployment

HALVES = {"sangam_prefill": "prefill_", "sangam_decode": "decode_"}
POOLS = {"colocated": {"sangam": ""}, "disaggregated": HALVES, "hybrid": HALVES}
"""Of each mode the models with instances, and what their options begin with."""


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
    serve.add_argument("--event-log", default=argparse.SUPPRESS, metavar="DIRECTORY",
                       help="write a row of each iteration and request, as CSV files")  # fmt: skip
    serve.add_argument("--max-queue-size", type=int, default=argparse.SUPPRESS, metavar="N",
                       help="requests that wait for an instance; more are refused")  # fmt: skip
    serve.add_argument("--max-queue-tokens", type=int, default=argparse.SUPPRESS, metavar="N",
                       help="prefill tokens that wait in it; more are refused")  # fmt: skip
    serve.add_argument("--max-request-time", type=float, default=argparse.SUPPRESS, metavar="S",
                       help="the longest time of a request, and the default")  # fmt: skip
    serve.add_argument("triton_options", nargs="*", metavar="-- TRITON_OPTION",
                       help="after --, options of tritonserver, as they are")  # fmt: skip
    _add_engine_options(serve)

    health = commands.add_parser("health", help="ask a server for a token; status 1 if it is ill")
    health.set_defaults(run=_health)
    health.add_argument("--url", default="127.0.0.1:8001", help="its gRPC endpoint")
    health.add_argument("--metrics-url", default="http://127.0.0.1:8002/metrics")
    health.add_argument("--deadline", type=float, default=5, metavar="SECONDS")

    generate = commands.add_parser("generate", help="run a file of requests without a server")
    generate.set_defaults(run=_generate)
    generate.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    generate.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    generate.add_argument("--engine", choices=["sangam", "reference"], default="sangam")
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
        "cache",
        "max_batch_size",
        "max_tokens_per_iteration",
        "queue_order",
        "max_sequence_length",
        "max_prompt_tokens",
        "max_output_tokens",
        "kv_cache_tokens",
        "memory_utilization",
        "attention",
        "cuda_graphs",
        "fused_ops",
        "overlap",
        "tuned_products",
        "backlog",
        "prefill_overflow_tokens",
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

    is_well, reason = check(args.url, args.metrics_url, args.deadline)
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
