"""`djinnctl trust`: a daemon of another machine gets a name here, and its certificate is remembered, as ssh does."""

from __future__ import annotations

import click

from djinn_client import CertificateNotTrusted, ConnectionLost
from djinn_client.transport.address import hosts_file
from djinn_client.transport.remote.hosts import SCHEME, Host, RemoteAddress, parse, read_hosts, remember
from djinn_client.transport.remote.tls import fingerprint_at
from djinnctl.command import Settings, command


@command()
@click.argument("url")
@click.option("--name", help="The name by which this machine calls it. Default: the host's.")
@click.option("--yes", is_flag=True, help="Trust the certificate without asking.")
def trust(settings: Settings, url: str, name: str | None, yes: bool) -> None:
    """Trust the certificate of the daemon at URL from now on.

    URL is djinns://HOST:PORT, or the line that `djinnctl token add --url` has printed. That line has the fingerprint,
    so nothing is asked; it also has a token, which is remembered.
    """
    address = parse(url if "://" in url else f"{SCHEME}://{url}")
    found = certificate_at(address)
    if address.fingerprint and address.fingerprint != found:
        told = f"{address} has a certificate with the fingerprint {found}, and not {address.fingerprint}"
        raise CertificateNotTrusted(told, found=found, expected=address.fingerprint)
    if not address.fingerprint and not yes:
        click.echo(f"{address} has a certificate with the fingerprint\n  {found}", err=True)
        click.echo("Its administrator sees the same with `djinnctl token add NAME --url HOST` there.", err=True)
        click.confirm("Trust it?", abort=True, err=True)
    file = hosts_file()
    called = name or address.host
    known = read_hosts(file).hosts.get(called)
    token = address.token or (known.token if known else "")
    remember(called, Host(str(address), token, found), file)
    settings.tell({"trusted": called, "fingerprint": found}, f"{called} is trusted: djinnctl --address {called} status")


def certificate_at(address: RemoteAddress) -> str:
    """The fingerprint of its certificate. Raises ConnectionLost."""
    try:
        return fingerprint_at(address)
    except OSError as error:
        raise ConnectionLost(f"no gateway answers at {address}: {error.strerror or error}") from error
