"""Move bytes between one socket and its conversation: header, then payload straight into a berth; joined writes out.

State: of each connection, the frame on its way in and the frames waiting to go out. What the bytes mean is decided in
`session`; what requests mean, in the application handed in. Refuses torch, text and dispatch.

Only `asyncio.BufferedProtocol` is subclassed: a class that is an `asyncio.Protocol` too would silently take uvloop's
copying path. A view that is lent is never empty (it would kill the connection): without a berth, reading is paused.
"""

from __future__ import annotations

import asyncio
import socket
from time import perf_counter_ns
from typing import TYPE_CHECKING, cast

from zl.errors import Code, FrameError, RequestError
from zl.net import codec
from zl.net.frames import PING, cut_short, payload_length
from zl.net.host import Berth
from zl.net.peer import peer_of
from zl.net.session import Action, Cancel, Close, Info, Pong, Send, Session, Submit
from zl.shapes import HEADER_BYTES

if TYPE_CHECKING:
    from zl.net.connections import Net

LAST_CALL_S = 1.0
"""How long a peer that has connected or got an answer is taken to be about to ask."""

TOLD_S = 0.25
"""The same of one that has been told of the drain: what it had sent before it knew comes in."""

# Why reading is paused; it resumes when no reason is left.
_NO_BERTH = 1
_PEER_NOT_READING = 2


class Connection(asyncio.BufferedProtocol):
    """One peer's socket. The application calls `queue`, `finished` and `flush`; asyncio calls the rest."""

    def __init__(self, net: Net):
        self._net = net
        self._app = net.app
        self._counters = net.counters
        self._session = Session(net.auth_token, net.decode)
        self._transport: asyncio.Transport | None = None
        self.name = ""  # for the logs: its kind and number
        self.peer = ""  # for the logs: who it is
        self.fd = -1
        self._tls = False
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._target = self._header  # where the next bytes go, never empty
        self._got = 0  # bytes of the current header or payload
        self._want = HEADER_BYTES
        self._berth: Berth | None = None
        self._read_ns = 0  # spent in callbacks on the frame on its way in
        self._begun_at = 0.0  # loop time at which the frame on its way in began
        self._served_at = 0.0  # loop time of the last answer's or refusal's end; before the first, of the connection
        self._turned_away = False  # it has been told that the server drains
        self._frame_timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self._peer_done = False  # nothing more will be read
        self._app_told = False
        self._out: list[bytes] = []
        self._flush_due = False
        self._linger: asyncio.TimerHandle | None = None

    # -- for the application -----------------------------------------------------------------------------------------

    def queue(self, data: bytes) -> None:
        """Put one whole frame in line; `flush` sends. A connection that has ended takes nothing, in silence."""
        if not self._session.ended:
            self._put(data)

    def finished(self, request_id: int) -> None:
        """Free the id of a request whose last frame has been queued."""
        self._served_at = self._net.loop.time()
        self._perform(self._session.finished(request_id))

    def flush(self) -> None:
        """Write everything in line at once; abort a peer that has let too much pile up."""
        transport, out = self._transport, self._out
        if not out or transport is None:
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() + len(data) > self._net.limits.output_cap:
            self._counters.aborted_slow += 1
            self._abort()
            return
        self._counters.bytes_out += len(data)
        transport.write(data)  # wire

    def close(self) -> None:
        """End the conversation after what has been queued; requests still in flight are cancelled."""
        self._perform(self._session.close())

    @property
    def n_in_flight(self) -> int:
        """Count the requests that have no last frame yet."""
        return self._session.n_in_flight

    def is_about_to_ask(self, now: float) -> bool:
        """Say whether the peer is within a frame, or has been active lately and may send another."""
        if self._peer_done or self._session.ended:
            return False
        if self._got or self._berth is not None or self._pauses & _NO_BERTH:
            return True
        return now - max(self._served_at, self._begun_at) < (TOLD_S if self._turned_away else LAST_CALL_S)

    @property
    def is_sending(self) -> bool:
        """Say whether bytes wait for the peer to read those before."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def is_telling(self, now: float) -> bool:
        """Say whether bytes wait to be sent, or the last answer is so new that the peer may still be reading it."""
        return self.is_sending or (self._transport is not None and now - self._served_at < LAST_CALL_S)

    # -- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._tls = transport.get_extra_info("sslcontext") is not None
        sock = transport.get_extra_info("socket")
        self.fd = sock.fileno() if sock is not None else -1
        self._served_at = self._net.loop.time()
        self._net.connected(self)
        self._counters.connections_open += 1
        self._counters.connections_total += 1
        kind = "tls" if self._tls else "unix" if sock is not None and sock.family == socket.AF_UNIX else "tcp"
        self.name = f"{kind}-{self._counters.connections_total}"
        self.peer = peer_of(sock, transport.get_extra_info("peername"))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._target

    def buffer_updated(self, nbytes: int) -> None:
        begun_ns = perf_counter_ns()
        self._counters.bytes_in += nbytes
        if self._session.ended:
            return  # scratch
        if not self._got and self._berth is None:
            self._read_ns = 0
            self._frame_begins()
        self._got += nbytes
        if self._got < self._want:
            self._target = self._target[nbytes:]
        elif self._berth is None:
            self._header_arrived()
        else:
            self._payload_arrived(self._berth, begun_ns)
            return
        self._read_ns += perf_counter_ns() - begun_ns

    def eof_received(self) -> bool:
        self._peer_done = True
        if self._session.ended:
            return False
        if self._berth is not None or self._got:
            self._perform(self._session.broken(cut_short(self._got, self._want)))
            return False
        self._perform(self._session.eof())
        if self._session.ended or self._tls:
            return False  # asyncio cannot keep one direction of TLS open
        if self.fd >= 0:
            self._net.hangups.watch(self.fd, self._hung_up)
        return True

    def pause_writing(self) -> None:
        self._pause(_PEER_NOT_READING)

    def resume_writing(self) -> None:
        self._resume(_PEER_NOT_READING)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._net.hangups.forget(self.fd, self._hung_up)
        self._net.connections.discard(self)
        self._counters.connections_open -= 1
        self._session.lost()
        self._drop_input()
        self._out.clear()
        if self._linger is not None:
            self._linger.cancel()
        self._tell_app()
        self._transport = None

    # -- frames in ---------------------------------------------------------------------------------------------------

    def _header_arrived(self) -> None:
        try:
            length = payload_length(self._header, self._net.limits.max_frame)
        except FrameError as error:
            self._perform(self._session.broken(error))
            return
        if not length:
            self._counters.frames_in += 1
            self._next_frame()
            self._perform(self._session.ping(self._app.accepting and self._app.healthy))
            return
        self._want = length
        self._got = 0
        berth = self._net.arena.acquire()
        if berth is None:
            self._counters.berth_waits += 1
            self._target = self._net.scratch  # not written: reading is paused until a berth is there
            self._pause(_NO_BERTH)
            if self.fd >= 0:
                self._net.hangups.watch(self.fd, self._hung_up)  # who does not read learns of an end by nothing else
            self._net.arena.wait(self, self._berth_granted)
        else:
            self._berth_taken(berth)

    def _berth_taken(self, berth: Berth) -> None:
        self._berth = berth
        self._target = berth.view[: self._want]

    def _berth_granted(self, berth: Berth) -> None:
        self._net.hangups.forget(self.fd, self._hung_up)
        self._berth_taken(berth)
        self._frame_begins()  # the wait was ours, not the peer's
        self._resume(_NO_BERTH)

    def _payload_arrived(self, berth: Berth, begun_ns: int) -> None:
        counters = self._counters
        counters.frames_in += 1
        complete_ns = perf_counter_ns()
        read_ns = self._read_ns + complete_ns - begun_ns
        with berth.view[: self._want] as payload:
            actions = self._session.receive(payload, self._app.accepting)
        parse_ns = perf_counter_ns() - complete_ns
        counters.frame_read.observe(read_ns * 1e-9)
        counters.parse.observe(parse_ns * 1e-9)
        lease = None
        for action in actions:
            if isinstance(action, Submit):
                request = action.request
                request.read_ns, request.parse_ns = read_ns, parse_ns
                if request.in_berth:
                    lease = request.lease = self._net.arena.lend(berth)
                    if lease is None:
                        request.copy_out()
        # What the request says has been taken: the berth is free before anything is done about it, unless the program
        # is to read token ids in it.
        self._next_frame()
        if lease is None:
            self._net.arena.release(berth)
        self._perform(actions)

    def _next_frame(self) -> None:
        self._berth = None
        self._target = self._header
        self._got = 0
        self._want = HEADER_BYTES

    def _drop_input(self) -> None:
        """Give up the frame on its way in: what still comes goes to scratch."""
        berth = self._berth
        self._berth = None
        self._target = self._net.scratch
        if self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None
        self._net.arena.forget(self)
        if berth is not None:
            self._net.arena.release(berth)

    # -- a frame that takes too long ---------------------------------------------------------------------------------

    def _frame_begins(self) -> None:
        # One timer at a time, which looks when it fires how old the frame is: nothing to cancel per frame.
        self._begun_at = self._net.loop.time()
        if self._frame_timer is None:
            self._watch_frame(self._begun_at)

    def _watch_frame(self, begun_at: float) -> None:
        self._frame_timer = self._net.loop.call_at(begun_at + self._net.limits.frame_timeout_s, self._look_at_frame)

    def _look_at_frame(self) -> None:
        self._frame_timer = None
        if self._session.ended or self._peer_done or (self._berth is None and not self._got):
            return  # between frames, or waiting for a berth: the next frame starts the timer again
        if self._pauses & _NO_BERTH:
            self._watch_frame(self._net.loop.time())  # we are not reading, so the peer is not to blame
            return
        late_at = self._begun_at + self._net.limits.frame_timeout_s
        if self._net.loop.time() < late_at:
            self._watch_frame(self._begun_at)
            return
        text = f"{self._got} of {self._want} bytes of a frame arrived within {self._net.limits.frame_timeout_s:g} s"
        if self._pauses:  # it holds a berth that others need
            text += ", and its sender does not read its answers"
        self._perform(self._session.broken(FrameError(text)))

    # -- what the session wants --------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Submit(request):
                    try:
                        self._app.submit(self, request)
                    except RequestError as error:
                        request.give_back()
                        self._perform(self._session.refused(request.request_id, error))
                    except BaseException:  # a bug: the connection will be lost, the berth must not
                        request.give_back()
                        raise
                case Send(data, code, refused):
                    self._counters.errors[code] += 1
                    self._turned_away = self._turned_away or code is Code.DRAINING
                    self._served_at = self._net.loop.time()
                    if refused is not None or code is Code.BAD_FRAME:
                        self._app.refused(self, refused, code)
                    self._put(data)
                    self._flush_soon()
                case Pong():
                    self._put(PING)
                    self._flush_soon()
                case Info(request_id):
                    self._put(codec.encode_server_info(request_id, self._app.server_info()))
                    self._flush_soon()
                case Cancel(request_id):
                    self._app.cancel(self, request_id)
                case Close():
                    self._shut()

    def _put(self, data: bytes) -> None:
        self._counters.frames_out += 1
        self._out.append(data)

    def _flush_soon(self) -> None:
        # A burst of pings or refusals read in one turn of the loop leaves in one write.
        if not self._flush_due:
            self._flush_due = True
            self._net.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_due = False
        begun_ns = perf_counter_ns()
        self.flush()
        self._counters.write.observe((perf_counter_ns() - begun_ns) * 1e-9)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        """Send what is in line, then the end of stream, then wait a little for the peer to do the same.

        Closing at once with bytes unread would send a reset, which takes the last frame out of the peer's hands.
        """
        self._tell_app()
        self.flush()
        self._drop_input()
        self._net.hangups.forget(self.fd, self._hung_up)
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._linger = self._net.loop.call_later(self._net.limits.linger_s, self._abort)
        if self._peer_done or self._tls:
            transport.close()
            return
        transport.write_eof()
        if self._pauses:
            self._pauses = 0
            transport.resume_reading()

    def _hung_up(self) -> None:
        self._counters.hangups += 1
        self._abort()

    def _abort(self) -> None:
        if not self._session.ended:
            self._session.close()  # from here on nothing is queued
        self._tell_app()
        if self._transport is not None:
            self._transport.abort()

    def _tell_app(self) -> None:
        if not self._app_told:
            self._app_told = True
            self._app.closed(self)

    # -- pauses ------------------------------------------------------------------------------------------------------

    def _pause(self, why: int) -> None:
        if not self._pauses and not self._peer_done and not self._session.ended and self._transport is not None:
            self._transport.pause_reading()
        self._pauses |= why

    def _resume(self, why: int) -> None:
        paused = self._pauses
        self._pauses &= ~why
        if not paused or self._pauses or self._peer_done or self._session.ended or self._transport is None:
            return
        self._begun_at = self._net.loop.time()
        self._transport.resume_reading()
