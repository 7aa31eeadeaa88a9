"""Small files at URLs from settings, without access to a machine's own services (SSRF).

Guarantees:
    - A URL of a link-local address or of a cloud's metadata service is refused, however the address is written.
    - A host name that resolves to such an address is refused.
    - An HTTP redirect is not followed.
    - Over HTTP, the file is read from the address that was checked.

Limits:
    - Other addresses of a private network may be read.
    - Behind a proxy and over other protocols, a name that resolves to another address on opening is not detected.
"""

import io
import ipaddress
import re
import socket
import unicodedata
import urllib.request
from http.client import HTTPConnection, HTTPMessage, HTTPResponse, HTTPSConnection
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from tasks.errors import loggable

SCHEMES = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hdfs", "webhdfs", "ftp", "sftp")
"""Schemes of URLs that name one file on one server; other fsspec schemes follow references or open archives."""

HOST_SCHEMES = ("http", "https", "ftp", "sftp", "hdfs", "webhdfs")
"""Schemes of URLs that name a host; URLs of object stores name a bucket."""

TIMEOUT_SECONDS = 60

_METADATA_NAMES = (
    "metadata",
    "metadata.google.internal",
    "metadata.goog",
    "instance-data",
    "instance-data.ec2.internal",
)
_METADATA_ADDRESSES = tuple(
    map(ipaddress.ip_address, ("100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"))
)
"""Metadata addresses of Alibaba, Oracle, Azure, and of Amazon and Google over IPv6; all others are link-local."""

_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
"""IPv6 networks whose last four bytes are an IPv4 address."""

_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
"""Network with a locally defined translation (RFC 8215): the target of an address is unknown."""

MAX_BYTES = 256 << 20
"""Maximum size of a file over HTTP, which is read into memory: millions of labels."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _parse_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))  # as libraries parse it: 2852039166, 0xa9.254.43518
    except (OSError, UnicodeEncodeError):
        return None


def _is_forbidden(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _EMBEDDING):
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address in _LOCAL_NAT64 or any(each is not None and _is_forbidden(each) for each in inner):
            return True
    return address.is_link_local or address.is_multicast or address in _METADATA_ADDRESSES


def _host(url: str) -> str:
    """Return the host of a URL as libraries parse it, with other digits and dots of Unicode as those of ASCII."""
    authority = url.partition("://")[2]
    for end in "/?#\\":
        authority = authority.partition(end)[0]
    host = unicodedata.normalize("NFKC", unquote(authority.rpartition("@")[2])).replace("\u3002", ".").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def is_url(path: str) -> bool:
    """Return whether a path is the URL of a remote file, or a chained URL of fsspec."""
    return bool(re.match(r"(?!file:)[\w.+-]+(://|::)", path, re.IGNORECASE))


def check_remote_file(url: str) -> str:
    """Return an allowed URL of a file unchanged.

    Raises:
        ValueError: Its scheme is not in SCHEMES, it is a chained URL, or settings may not read from its address.
    """
    scheme, _, rest = url.partition("://")
    if "::" in scheme or "::" in _chain(rest) or not rest:
        raise ValueError(
            f"it is '{loggable(url)}', a chain of several URLs: copy the file itself to a folder, and give its "
            "path or URL"
        )
    if scheme.lower() not in SCHEMES:
        raise ValueError(
            f"it is '{loggable(url)}', whose scheme '{loggable(scheme)}' is not one of {', '.join(SCHEMES)}: use "
            "one of them"
        )
    host = _host(url)
    address = _parse_address(host)
    if host in _METADATA_NAMES or (address is not None and _is_forbidden(address)) or "\\" in rest.split("/")[0]:
        raise ValueError(_forbidden(url))
    return url


def _chain(rest: str) -> str:
    """Return the part of a URL in which `::` marks a chain of fsspec; a bracketed IPv6 address has colons, too."""
    return rest.partition("]")[2] if rest.startswith("[") else rest


def _forbidden(url: str) -> str:
    return (
        f"it is '{loggable(url)}', an address of this machine's own network or of a cloud's metadata, which is not "
        "allowed: give the file's path, or the URL of its server"
    )


def check_resolved(url: str) -> None:
    """Check the addresses that the host name of a URL resolves to.

    Raises:
        ValueError: Settings may not read from one of them.
    """
    if url.partition("://")[0].lower() not in HOST_SCHEMES:
        return
    try:
        found = socket.getaddrinfo(_host(url), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # opening it gives a better error; behind a proxy, names need not resolve here
    for *_, place in found:
        if _is_forbidden(ipaddress.ip_address(str(place[0]).partition("%")[0])):
            raise ValueError(_forbidden(url))


def _connect(
    address: tuple[str, int], timeout: float | None = None, source_address: tuple[str, int] | None = None
) -> socket.socket:
    """Connect as `socket.create_connection` does, to an address that was checked and is not resolved again."""
    host, port = address
    places = [place for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if any(_is_forbidden(ipaddress.ip_address(str(place[0]).partition("%")[0])) for place in places):
        raise OSError(_forbidden(f"http://{host}:{port}"))
    for place in places[:-1]:
        try:
            return socket.create_connection((str(place[0]), port), timeout, source_address)
        except OSError:
            continue
    return socket.create_connection((str(places[-1][0]), port), timeout, source_address)


class _Connection(HTTPConnection):
    """A connection to the address that was checked, since a name may resolve to another one each time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._create_connection = _connect  # the base class connects with this, also to a proxy's tunnel


class _SecureConnection(_Connection, HTTPSConnection):
    """A `_Connection` over TLS; the certificate is verified against the host name."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_SecureConnection, req)


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, which could lead to a forbidden address."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        where = urlsplit(newurl)
        raise OSError(f"it redirects to '{where.scheme}://{where.netloc}{where.path}': give that URL itself")


def open_http(url: str) -> IO[bytes]:
    """Return the content behind an http or https URL, without following redirects, as a file to read.

    Raises:
        OSError: It cannot be opened, redirects, is larger than MAX_BYTES, or has a forbidden address.
    """
    with urllib.request.build_opener(_RefuseRedirects, _Http, _Https).open(url, timeout=TIMEOUT_SECONDS) as answer:
        content = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"it has more than {MAX_BYTES >> 20} MB: copy it to a folder, and give its path or URL")
    return io.BytesIO(content)
