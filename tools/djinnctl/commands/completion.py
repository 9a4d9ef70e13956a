"""Completion of the shell: `djinnctl completion`."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from djinn_client import Client, DjinnError
from djinnctl.command import EXIT_CODES, everywhere


@click.command(epilog=EXIT_CODES)
@everywhere
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options, models and sessions in SHELL.

    For bash, put `eval "$(djinnctl completion bash)"` into ~/.bashrc.
    """
    script = get_completion_class(shell)
    assert script is not None, shell
    click.echo(script(ctx.find_root().command, {}, "djinnctl", "_DJINNCTL_COMPLETE").source())


def complete_model(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """The models that the daemon knows, and folders."""
    try:
        with Client(_address(ctx)) as client:
            known = [CompletionItem(model.name) for model in client.models() if model.name.startswith(typed)]
    except DjinnError:
        known = []
    return known or [CompletionItem(typed, type="dir")]


def complete_session(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    try:
        with Client(_address(ctx)) as client:
            return [
                CompletionItem(session.id, help=session.model)
                for session in client.sessions()
                if session.id.startswith(typed)
            ]
    except DjinnError:
        return []


def _address(ctx: click.Context) -> str | None:
    return ctx.obj.address if ctx.obj is not None else None
