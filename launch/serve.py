"""Serves a model as an OpenAI-compatible endpoint, with the rollout engine of this project.

  python -m launch.serve --checkpoint=DIR         # of Hugging Face, or the folder of a run
  python -m launch.serve --checkpoint=MODEL.gguf --tokenizer=TOKENIZER.json
  python -m launch.serve --preset=tiny_mla_moe    # random weights, for trying it

Then point any client at http://127.0.0.1:8000/v1; `/health` says whether the engine runs,
`/metrics` is for Prometheus. There is no authentication: think before you use another --host.

--config.KEY=VALUE sets the sizes, for example --config.engine.slots=32 (sequences at a time),
--config.engine.capacity=8192 (tokens of the longest) or --config.server.max_waiting=64;
--print_config shows all keys. Needs `pip install -e .[serve]`.

Ctrl-C and SIGTERM let running requests end, for --grace_s seconds.

Exit status: 1 failed; 2 bad input; 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import json
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from absl import flags
from rich.console import Console

from c2.config import ConfigError, override, to_dict
from c2.rollout.config import EngineConfig
from c2.rollout.server.config import ServerConfig
from launch import command_line, jax_setup

_MODULE = "launch.serve"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Sizes of the engine and limits of the server."""

    engine: EngineConfig = field(
        default_factory=lambda: EngineConfig(slots=8, prefix_entries=4, training=False)
    )
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A parsed command line."""

    config: ServeConfig
    checkpoint: Path | None
    preset: str | None
    tokenizer: str | None
    dtype: str
    seed: int
    host: str
    port: int
    grace_s: int
    print_config: bool


def parse(argv: Sequence[str]) -> Options:
    """Parses a command line, program name first.

    Raises:
      ConfigError: for whatever is wrong with it.
    """
    values, assignments = command_line.parse(argv, _define, _MODULE, __doc__)
    named = {name: values[name] for name in Options.__dataclass_fields__ if name != "config"}
    if named["checkpoint"]:
        named["checkpoint"] = Path(named["checkpoint"]).expanduser()
    options = Options(config=override(ServeConfig(), assignments), **named)
    if not options.print_config and (options.checkpoint is None) == (options.preset is None):
        raise ConfigError("--checkpoint, --preset: one of them says what is served")
    if options.checkpoint and not options.checkpoint.exists():
        raise ConfigError(f"--checkpoint: there is no {str(options.checkpoint)!r}")
    return options


def _define(values: flags.FlagValues) -> None:
    define = {"flag_values": values, "module_name": _MODULE}
    flags.DEFINE_string(
        "checkpoint",
        None,
        "A folder in Hugging Face's format, a .gguf file, or the folder of a run of "
        "experiments/recipe.py, whose newest checkpoint is taken.",
        **define,
    )
    flags.DEFINE_string("preset", None, "A model with random weights instead.", **define)
    flags.DEFINE_string(
        "tokenizer",
        None,
        'A tokenizer.json, or "bytes". Default: the one beside the checkpoint; bytes for a preset.',
        **define,
    )
    flags.DEFINE_enum(
        "dtype", "float32", ["float32", "bfloat16"], "Of a checkpoint's weights.", **define
    )
    flags.DEFINE_integer("seed", 0, "Of random weights.", **define)
    flags.DEFINE_string("host", "127.0.0.1", "The address to listen at.", **define)
    flags.DEFINE_integer(
        "port", 8000, "The port; 0 for any.", lower_bound=0, upper_bound=65535, **define
    )
    flags.DEFINE_integer(
        "grace_s", 30, "Seconds that requests have when it stops.", lower_bound=1, **define
    )
    flags.DEFINE_bool("print_config", False, "Print the config as JSON.", **define)


def serve(options: Options, console: Console) -> None:
    """Serves until a signal comes.

    Raises:
      ConfigError: if model, tokenizer and sizes do not fit, or the extra `serve` is missing.
      OSError: if it cannot listen.
    """
    try:
        import uvicorn

        from c2.rollout.server.app import create_app
        from launch import serve_model
    except ImportError as error:
        raise ConfigError(f"launch.serve needs `pip install -e .[serve]`: {error}") from error
    from c2.rollout.engine import Engine

    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        jax_setup.enable_compilation_cache()
        served = serve_model.load(
            checkpoint=options.checkpoint,
            preset=options.preset,
            tokenizer=options.tokenizer,
            dtype=options.dtype,
            seed=options.seed,
        )
        engine, began = options.config.engine, time.perf_counter()
        _say(console, "model", f"{served.origin}; {_chat(served)}")
        _say(console, "engine", f"{engine.slots} slots of {engine.capacity} tokens; compiling ...")
        with Engine(served.params, served.cfg, engine) as running:
            server = options.config.server
            app = create_app(running, served.tokenizer, server, chat=served.chat, end=served.end)
            host, port = listener.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _say(console, "ready", f"{url}/v1 after {time.perf_counter() - began:.0f} s")
            _say(console, "try", _example(url, server.model, served.chat is not None))
            config = uvicorn.Config(
                app,
                log_level="warning",
                lifespan="off",
                timeout_graceful_shutdown=options.grace_s,
            )
            uvicorn.Server(config).run([listener])


def _say(console: Console, name: str, text: str) -> None:
    console.print(f"{name:<8} {text}", markup=False, highlight=False, soft_wrap=True)


def _chat(served) -> str:
    if served.chat:
        return "chats in the project's format"
    return f"no chats: a vocabulary of {served.cfg.vocab} has no room for the format's marks"


def _example(url: str, model: str, chat: bool) -> str:
    body = {"model": model, "max_tokens": 32}
    if chat:
        body |= {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        body |= {"prompt": "Hello"}
    path = "chat/completions" if chat else "completions"
    words = ["curl", f"{url}/v1/{path}", "-H", "Content-Type: application/json"]
    return shlex.join([*words, "-d", json.dumps(body)])


def run_main(argv: Sequence[str], console: Console | None = None) -> int:
    """One command line; every failure is one line on stderr. Returns the exit status."""
    try:
        options = parse(argv)
        if options.print_config:
            print(json.dumps(to_dict(options.config), indent=2))
            return 0
        serve(options, console or Console())
    except ConfigError as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def main() -> NoReturn:
    """Starts the process."""
    jax_setup.quiet_logs()
    sys.exit(run_main(sys.argv))


if __name__ == "__main__":
    main()
