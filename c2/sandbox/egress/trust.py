"""What a sandbox needs to get through the gate: its authority, and where to ask for names."""

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
# Where systems keep the authorities that programs trust. Inside, there is only one.
STORES = (BUNDLE, "/etc/ssl/cert.pem", "/etc/pki/tls/certs/ca-bundle.crt")
ADDRESS = "198.18.0.1"  # of a range that the Internet does not use
NAMES = f"nameserver {ADDRESS}\noptions timeout:2 attempts:2\n"
SOURCES = "hosts: files dns\npasswd: files\ngroup: files\n"
# For programs that look elsewhere. None of them says that there is a gate.
VARIABLES = {
    name: BUNDLE
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
}


def files(certificate: str) -> dict[str, str]:
    """Files of a sandbox, by path."""
    stores = dict.fromkeys(STORES, certificate)
    return {"/etc/resolv.conf": NAMES, "/etc/nsswitch.conf": SOURCES} | stores
