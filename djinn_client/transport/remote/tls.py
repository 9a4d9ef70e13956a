"""How a client knows the gateway: by a certificate authority, or by the fingerprint of its certificate, as ssh does."""

from __future__ import annotations

import functools
import hashlib
import ssl

from djinn_client.errors import CertificateNotTrusted, InvalidRequest
from djinn_client.transport.remote.hosts import RemoteAddress

ALPN = "djinn/1"
_PATIENCE_S = 10.0


@functools.cache
def client_context(is_pinned: bool, ca: str) -> ssl.SSLContext:
    """Raises InvalidRequest for a `ca` that cannot be read. `is_pinned`: the caller checks the fingerprint."""
    if is_pinned:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        try:
            context = ssl.create_default_context(cafile=ca or None)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(f"the certificate authority {ca} cannot be read: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


def fingerprint_at(address: RemoteAddress) -> str:
    """The fingerprint of the certificate with which the gateway answers now, trusted or not. Raises OSError."""
    pem = ssl.get_server_certificate((address.host, address.port), timeout=_PATIENCE_S)
    return fingerprint(ssl.PEM_cert_to_DER_cert(pem))


def fingerprint(certificate: bytes) -> str:
    """`certificate` is in DER."""
    return "sha256:" + hashlib.sha256(certificate).hexdigest()


def expect_pinned(sock: ssl.SSLSocket, address: RemoteAddress) -> None:
    """Raises CertificateNotTrusted."""
    found = fingerprint(sock.getpeercert(binary_form=True) or b"")
    if address.fingerprint and found != address.fingerprint:
        raise CertificateNotTrusted(
            f"the certificate of {address} is not the one that was trusted: its fingerprint is {found}, expected is "
            f"{address.fingerprint}. If its administrator has renewed it, `djinnctl trust {address}` accepts the new "
            "one; otherwise another machine answers in its place",
            found=found,
            expected=address.fingerprint,
        )


def not_certified(address: RemoteAddress, error: ssl.SSLCertVerificationError) -> CertificateNotTrusted:
    return CertificateNotTrusted(
        f"no authority that this machine trusts certifies {address} ({error.verify_message}): `djinnctl trust "
        f"{address}` shows the certificate's fingerprint and trusts it, or name the authority as `ca` in client.toml"
    )
