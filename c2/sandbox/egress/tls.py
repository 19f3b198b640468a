"""Certificates that sandboxes trust: of the gate's own authority, made when they are needed."""

import datetime
import ssl
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365  # for which a node may run
KEPT = 256  # certificates


class Named(ssl.SSLContext):
    """The gate's side of connections to one host.

    Attributes:
      host: the name that the sandbox gave and the certificate is for.
    """

    host: str


class Authority:
    """An authority with a key that is never written anywhere.

    Attributes:
      certificate: of the authority, as PEM.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the authority.

        Args:
          folder: takes a file with the key of the servers, for the moment when it is read.
        """
        self._key, self._server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "c2 egress gate")])
        usage = {name: False for name in _USAGE} | {"key_cert_sign": True, "crl_sign": True}
        built = (
            _certificate(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(_key_id(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = built.public_bytes(serialization.Encoding.PEM).decode()
        self._file = folder / "server.pem"
        self._contexts: OrderedDict[str, Named] = OrderedDict()

    def context(self, host: str) -> Named:
        """What a connection to this host goes on with, once its name is known."""
        if host in self._contexts:
            self._contexts.move_to_end(host)
            return self._contexts[host]
        context = Named(ssl.PROTOCOL_TLS_SERVER)
        _restrict(context)
        context.host = host
        self._file.touch(mode=0o600)
        self._file.write_bytes(self._server(host))
        context.load_cert_chain(self._file)  # there is no way to hand it over in memory
        self._file.unlink()
        self._contexts[host] = context
        if len(self._contexts) > KEPT:
            self._contexts.popitem(last=False)
        return context

    def _server(self, host: str) -> bytes:
        usage = {name: False for name in _USAGE} | {"digital_signature": True}
        # The name is too long for the subject if it is longer than 64.
        built = (
            _certificate(x509.Name([]), self._name, self._server_key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_key_id(self._server_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        key = self._server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )  # fmt: skip
        return key + built.public_bytes(serialization.Encoding.PEM)


def entrance(choose: Callable[[str | None], Named | None]) -> ssl.SSLContext:
    """What a connection begins with; `choose` gives the context for a name, or None to refuse."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context)

    def chosen(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        found = choose(name and name.lower())
        if found is None:
            return ssl.ALERT_DESCRIPTION_ACCESS_DENIED
        connection.context = found
        return None

    context.sni_callback = chosen
    return context


def outward(authorities: str | None) -> ssl.SSLContext:
    """For connections to servers, which are checked as usual."""
    context = ssl.create_default_context()
    if authorities:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise ValueError(f"egress.authorities: {authorities} holds no certificates") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


_USAGE = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        subject_name=subject, issuer_name=issuer, public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(days=1),  # clocks differ
        not_valid_after=now + datetime.timedelta(days=DAYS),
    )  # fmt: skip


def _key_id(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _restrict(context: ssl.SSLContext) -> None:
    """One protocol, and no session that goes on under another name."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
