"""The command line: what can be asked. How it is done is in commands/, imported when a command runs.

Nothing heavy is imported here, so that `rollout --help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer

from rollout_engine.commands.entry import enter
from rollout_engine.commands.place import has_run, run_path
from rollout_engine.version import VERSION


def _example(command: str) -> str:
    """The last lines of a command's help, kept as they are."""
    return f"\b\nExample:\n  {command}"


app = typer.Typer(
    name="rollout",
    help="k attempts x m models x n tasks, of any agent in any sandbox, over Ray, into Arrow tables with rewards.",
    epilog="""\b
Try it, without a key, a cluster or a sandbox:
  rollout run tasks.jsonl -m good=scripted:skill=0.8 -m weak=scripted:skill=0.4 -k 8 --ray off

\b
Exit codes: 0 all is well, 1 something failed, 2 bad input, 130 interrupted (resume goes on with it).""",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
tasks_app = typer.Typer(help="Look at a file of tasks before it costs anything.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")

RunPath: TypeAlias = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run directory, or its URI.", show_default=False, parser=run_path),
]
Models: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "-m",
        "--model",
        metavar="NAME=KIND:REST",
        help="A model, strongest first: NAME=openai:MODEL@URL, NAME=replay:FILE, NAME=scripted:skill=0.7,...; "
        "or a field of one: NAME.temperature=0.7. May be repeated.",
        show_default=False,
    ),
]
Config: TypeAlias = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file; flags override it.", show_default=False)
]
Ray: TypeAlias = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto|local|off|ADDRESS", help="Where hosts run; off: in this process."),
]
Slots: TypeAlias = Annotated[
    int | None, typer.Option("--slots", metavar="N", help="Rollouts at once on each host (host.slots).")
]
MaxCost: TypeAlias = Annotated[
    float | None, typer.Option("--max-cost", metavar="USD", help="Start nothing more once this much is spent.")
]
MaxTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help="... once this many tokens are used, by all together.")
]
LogLevel: TypeAlias = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="Of RUN/logs: debug, info, warning, error, off (logs.level)."),
]
MetricsPort: TypeAlias = Annotated[
    int | None,
    typer.Option("--metrics-port", metavar="N", help="Serve Prometheus metrics on this port; 0 takes a free one."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Detach: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--detach", help="Go on after this terminal closes; with --ray http://HEAD:8265, as a job of the cluster."
    ),
]
Tell: TypeAlias = Annotated[int | None, typer.Option("--tell", hidden=True)]
Quiet: TypeAlias = Annotated[bool, typer.Option("-q", "--quiet", help="No progress on stderr, only what is wrong.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollout-engine {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    return None


@app.command(epilog=_example("rollout run tasks.jsonl -m good=scripted:skill=0.8 -m weak=scripted:skill=0.4 -k 8"))
def run(
    tasks: Annotated[
        Path | None,
        typer.Argument(
            metavar="TASKS", help="A JSONL or Parquet file, or a TOML file over a data set.", show_default=False
        ),
    ] = None,
    models: Models = None,
    config: Config = None,
    k: Annotated[int | None, typer.Option("-k", metavar="N", help="Attempts of each task by each model.")] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--out", metavar="RUN", help="The run directory, or s3://BUCKET/PREFIX; default: runs/<UTC time>."
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent",
            metavar="NAME",
            help="single_turn, tool_loop, codex and other programs (docs/agents.md), or module:attribute of your own.",
        ),
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", metavar="auto|namespace|docker|local|none", help="What isolates tasks.")
    ] = None,
    ray: Ray = None,
    slots: Slots = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Only the first N (matching) tasks.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option("--tasks", metavar="PATTERN", help="Only tasks whose id matches, as in 'web-*'.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seeds scripted models.")] = None,
    max_cost: MaxCost = None,
    max_tokens: MaxTokens = None,
    log_level: LogLevel = None,
    metrics_port: MetricsPort = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan and what it may cost, and end.")
    ] = False,
    go_on: Annotated[
        bool, typer.Option("--resume", help="Go on with -o where it is a run already, with its own config.")
    ] = False,
    detach: Detach = False,
    tell: Tell = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run k attempts of every task by every model."""
    if go_on and out is not None and has_run(out):
        given: Any = {"ray": ray, "slots": slots, "max_cost": max_cost, "max_tokens": max_tokens, "tasks_file": tasks}
        return resume(run_path(out), **given, detach=detach, tell=tell, as_json=as_json, quiet=quiet)
    from rollout_engine.commands.run import Mode, Wanted
    from rollout_engine.commands.run import run as command

    flags = {
        "k": k,
        "agent": agent,
        "sandbox": sandbox,
        "ray": ray,
        "seed": seed,
        "max_cost_usd": max_cost,
        "max_tokens": max_tokens,
        "host.slots": slots,
        "logs.level": log_level,
        "metrics.port": metrics_port,
    }
    wanted = Wanted(tasks, config, models or [], flags, out, pattern, limit)
    mode = Mode(detach, tell, sys.argv[1:])
    return command(wanted, mode, dry_run=dry_run, as_json=as_json, quiet=quiet)


@app.command(epilog=_example("rollout resume runs/a --failed"))
def resume(
    path: RunPath,
    failed: Annotated[bool, typer.Option("--failed", help="Also run rollouts again that have no score.")] = False,
    models: Models = None,
    config: Config = None,
    ray: Ray = None,
    slots: Slots = None,
    max_cost: MaxCost = None,
    max_tokens: MaxTokens = None,
    log_level: LogLevel = None,
    metrics_port: MetricsPort = None,
    tasks_file: Annotated[
        Path | None,
        typer.Option("--tasks-file", metavar="FILE", help="The run's own tasks, where their file was moved."),
    ] = None,
    detach: Detach = False,
    tell: Tell = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Go on with a run that was interrupted or killed."""
    from rollout_engine.commands.resume import Wanted
    from rollout_engine.commands.resume import resume as command
    from rollout_engine.commands.run import Mode

    flags = {
        "ray": ray,
        "max_cost_usd": max_cost,
        "max_tokens": max_tokens,
        "host.slots": slots,
        "logs.level": log_level,
        "metrics.port": metrics_port,
    }
    wanted = Wanted(path, config, models or [], flags, tasks_file, failed)
    return command(wanted, Mode(detach, tell, sys.argv[1:]), as_json=as_json, quiet=quiet)


@app.command(short_help="Show how a run goes that another process drives.", epilog=_example("rollout attach runs/a"))
def attach(path: RunPath, as_json: Json = False, quiet: Quiet = False) -> int:
    """Show how a run goes that another process or machine drives, until its end. Ctrl-C lets it go on."""
    from rollout_engine.commands.attach import attach as command

    return command(path, as_json=as_json, quiet=quiet)


@app.command(short_help="End a run, wherever it is driven.", epilog=_example("rollout cancel s3://bucket/runs/a"))
def cancel(
    path: RunPath,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait until it has ended.")
    ] = 120.0,
) -> int:
    """End a run, wherever it is driven: what has no row yet gets a cancelled one. `resume --failed` goes on with it."""
    from rollout_engine.commands.cancel import cancel as command

    return command(path, wait)


@app.command("job", hidden=True)
def job(path: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]) -> int:
    """Carry out a run that was handed to a Ray cluster."""
    from rollout_engine.commands.job import carry_out

    return carry_out(path)


@app.command(short_help="Say how a run stands, live or ended.", epilog=_example("rollout status runs/a"))
def status(path: RunPath, as_json: Json = False) -> int:
    """Say how a run stands: hosts, models, phases, slow rollouts, errors; from any machine that sees its directory."""
    from rollout_engine.commands.status import status as command

    return command(path, as_json=as_json)


@app.command(short_help="Watch a run until it ends.", epilog=_example("rollout top runs/a"))
def top(
    path: RunPath,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.2, max=3600, help="How often it is looked at.")
    ] = 1.0,
) -> int:
    """Watch a run until it ends or Ctrl-C, which leaves the run alone. Plain lines where this is no terminal."""
    from rollout_engine.commands.status import top as command

    return command(path, every_s=every)


@app.command(
    short_help="Show learnability, separation and reward of each task.",
    epilog=_example("rollout rewards runs/a --csv > rewards.csv"),
)
def rewards(
    path: RunPath,
    everything: Annotated[bool, typer.Option("--all", help="Show every task, however many there are.")] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print one CSV line per task on stdout.")] = False,
) -> int:
    """Show learnability, separation and reward of each task, of a finished run or of one that goes on."""
    from rollout_engine.commands.rewards import rewards as command

    return command(path, everything=everything, as_json=as_json, as_csv=as_csv)


@app.command(
    short_help="Show a run, a task, or one rollout turn by turn.",
    epilog=_example("rollout show runs/a 'sum-*' --model weak --attempt 0"),
)
def show(
    path: RunPath,
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="A task id, or a pattern as in 'web-*'.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Only this model's.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", metavar="N", help="Only this attempt (from 0).")] = None,
    round_: Annotated[int | None, typer.Option("--round", metavar="N", help="Only this round (from 0).")] = None,
    full: Annotated[bool, typer.Option("--full", help="Clip no text, leave out no line.")] = False,
    as_json: Json = False,
) -> int:
    """Show a run, a task's rollouts, or one rollout as a person reads it."""
    from rollout_engine.commands.show import Chosen
    from rollout_engine.commands.show import show as command

    return command(path, Chosen(task, model, attempt, round_), full=full, as_json=as_json)


@tasks_app.command("check", epilog=_example("rollout tasks check tasks.jsonl"))
def tasks_check(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A JSONL or Parquet file.", show_default=False)],
    config: Config = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Run the verifiers of the first N tasks only.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Also run each verifier on the untouched sandbox and on the task's solution."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Validate every task, and try its verifier on an empty, a very long and a garbage answer."""
    from rollout_engine.commands.tasks import check as command

    return command(path, config, limit, dry_run=dry_run, as_json=as_json)


@app.command(
    "serve-model",
    short_help="Serve scripted or recorded models over HTTP.",
    epilog=_example("rollout serve-model -m good=scripted:skill=0.8 --tasks tasks.jsonl"),
)
def serve_model(
    models: Models = None,
    config: Config = None,
    tasks: Annotated[
        Path | None,
        typer.Option("--tasks", metavar="FILE", help="Whose solutions scripted models give.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of calls that bring none.")] = 0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", metavar="N", min=1, help="More calls at once get a 429.")
    ] = None,
) -> int:
    """Serve scripted or recorded models over HTTP, as an OpenAI-compatible server."""
    from rollout_engine.commands.serve_model import Served, serve

    return serve(Served(models or [], config, tasks, host, port, seed, max_concurrency))


@app.command(short_help="Say what this machine can do.", epilog=_example("rollout doctor"))
def doctor(config: Config = None, as_json: Json = False) -> int:
    """Say what this machine can do: Ray, sandboxes, limits, descriptors, keys."""
    from rollout_engine.commands.doctor import doctor as command

    return command(config, as_json)


def main() -> NoReturn:
    """The console script `rollout`."""
    enter(app)
