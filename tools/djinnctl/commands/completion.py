"""Completion of the shell: `djinnctl completion`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from djinn_client import Client, DjinnError
from djinnctl.command import EXIT_CODES, Settings, everywhere


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
    known = _known(ctx, lambda client: {model.name: None for model in client.models()}, typed)
    return known or [CompletionItem(typed, type="dir")]


def complete_session(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    return _known(ctx, lambda client: {session.id: session.model for session in client.sessions()}, typed)


def _known(ctx: click.Context, ask: Callable[[Client], dict[str, Any]], typed: str) -> list[CompletionItem]:
    """The names that begin with what was typed, with their explanations; none if no daemon answers."""
    try:
        settings = ctx.ensure_object(Settings)
        with Client(settings.address, token=settings.token) as client:
            return [CompletionItem(name, help=told) for name, told in ask(client).items() if name.startswith(typed)]
    except DjinnError:
        return []
