"""HTTP parsing by h11, with limits for requests that are cheap to send and expensive to parse."""

import re

import h11

from server.errors import ApiError, Rejected, malformed

MAX_HEAD_BYTES = 32_768
MAX_HEAD_LINES = 128

FREE_PIECES = 2_000
BYTES_PER_PIECE = 256
"""A body may have `FREE_PIECES` chunks of any size. Further chunks must have `BYTES_PER_PIECE` bytes on average."""

BLANK_LINE = re.compile(rb"\n\r?\n")
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
FOLDED_LINE = re.compile(rb"\n[ \t]")

ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)
"""Matches a request target in absolute form, such as `http://host/path`."""

VERSIONS = (b"1.0", b"1.1")


class BoundedParser(h11.Connection):
    """h11's parser. If it refuses a request, `next_event` raises `h11.RemoteProtocolError` and `refusal` is set."""

    refusal: ApiError | None = None
    """The error to respond with."""

    is_head = False
    """Whether the current request is a HEAD request. The response to it must have no body."""

    _num_checked = 0
    """Bytes of the head that have been checked. A head may arrive byte by byte, so check it only at line ends."""

    _num_pieces = 0
    _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            self.is_head = False
            self._check_head(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_checked = 0
            event = in_origin_form(event)
            self.is_head = event.method == b"HEAD"
            self._check_framing(event)
            self._num_pieces = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._count(len(event.data))
        return event

    def _check_head(self, data: bytes) -> None:
        """Check the head before h11 parses it: h11 is slow for many lines."""
        news, self._num_checked = data[max(0, self._num_checked - 1) :], len(data)
        if b"\n" not in news and len(data) <= MAX_HEAD_BYTES:
            return
        end = BLANK_LINE.search(data)
        head = data[: end.start()] if end else data
        if len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEAD_LINES:
            message = f"the request head exceeds {MAX_HEAD_BYTES:,} bytes or {MAX_HEAD_LINES} lines"
            self._refuse(Rejected("head_too_large", message))
        if BARE_LINE_FEED.search(data[: end.end()] if end else data):
            self._refuse(malformed("header lines must end with CRLF"))
        if FOLDED_LINE.search(head):
            self._refuse(malformed("a header must not continue on a second line"))

    def _check_framing(self, request: h11.Request) -> None:
        """Refuse ambiguous framing: a proxy may have split the requests differently (request smuggling)."""
        if request.http_version not in VERSIONS:
            self._refuse(malformed("only HTTP/1.1 and HTTP/1.0 are supported"))
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names and request.http_version == b"1.0":
            self._refuse(malformed("HTTP/1.0 does not support transfer-encoding"))
        if {b"content-length", b"transfer-encoding"} <= names:
            self._refuse(malformed("content-length and transfer-encoding must not be combined"))

    def _count(self, num_bytes: int) -> None:
        self._num_pieces += 1
        self._num_bytes += num_bytes
        if self._num_pieces > FREE_PIECES + self._num_bytes // BYTES_PER_PIECE:
            self._refuse(malformed("the body's chunks are too small; send larger ones"))

    def _refuse(self, error: ApiError) -> None:
        self.refusal = error
        raise h11.RemoteProtocolError(error.message, error_status_hint=error.status)


def in_origin_form(request: h11.Request) -> h11.Request:
    """Rewrite a target in absolute form to a path. The URL's host replaces `Host` (RFC 9112, 3.2.2)."""
    if not (absolute := ABSOLUTE.fullmatch(request.target)):
        return request
    host, path = absolute.groups()
    headers = [(b"host", host), *((name, value) for name, value in request.headers if name != b"host")]
    target = path if path.startswith(b"/") else b"/" + path
    return h11.Request(method=request.method, headers=headers, target=target, http_version=request.http_version)
