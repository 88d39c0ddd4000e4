"""Members found in DNS, by the SRV records that etcd's own clients use.

``etcd+srv://DOMAIN`` asks for ``_etcd-client._tcp.DOMAIN``, ``etcd+tls+srv://DOMAIN`` for
``_etcd-client-ssl._tcp.DOMAIN``. Like etcd's clients it ignores priorities and weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rebalanser.errors import InvalidUrl, MissingExtra, RegistryUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_LOOKUP_S: Final = 5.0
SERVICES: Final = {"etcd+srv": "_etcd-client._tcp", "etcd+tls+srv": "_etcd-client-ssl._tcp"}


def find_members(scheme: str, domain: str, timeout_s: float = LONGEST_LOOKUP_S) -> Sequence[str]:
    """Return the addresses, ``HOST:PORT``, of the members that DNS names, within ``timeout_s`` seconds.

    Raises:
        InvalidUrl: the domain can't be a name in DNS.
        RegistryUnavailable: there is no such record, or no answer.
        MissingExtra: the package for DNS is not installed.
    """
    found = _records(SERVICES[scheme], domain, timeout_s)
    if found:
        return found
    missing = f"DNS has no SRV record {SERVICES[scheme]}.{domain}"
    for other, service in SERVICES.items():
        if other != scheme and _records(service, domain, timeout_s):
            missing += f", but {service}.{domain}: use {other}://"
    raise RegistryUnavailable(missing)


def _records(service: str, domain: str, timeout_s: float) -> Sequence[str]:
    try:
        import dns.exception  # noqa: PLC0415 - for these URLs only
        import dns.name  # noqa: PLC0415
        import dns.resolver  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra(
            f"SRV records need the package dnspython ({error}); pip install 'rebalanser[etcd]'"
        ) from error
    try:
        name = dns.name.from_text(f"{service}.{domain}")
    except (dns.exception.DNSException, ValueError) as error:
        raise InvalidUrl(f"{domain!r} can't be a name in DNS: {error}") from error
    try:
        resolver = dns.resolver.Resolver()  # read again each time, as /etc/resolv.conf may have changed
        answer = resolver.resolve(name, "SRV", lifetime=timeout_s)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return ()
    except (dns.exception.DNSException, OSError) as error:
        raise RegistryUnavailable(f"DNS gave no answer about {service}.{domain}: {error}") from error
    members = {(each.target.to_text(omit_final_dot=True), each.port) for each in answer}
    return [f"{host}:{port}" for host, port in sorted(members) if host != "."]
