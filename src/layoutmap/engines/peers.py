"""Connections between the processes of one program, by which each hears at once that another one has ended.

A collective waits for ever for a process that is gone. The system closes the connections of a process that ends, be it
killed or out of memory, and keeps those of one that computes or compiles for hours: nothing is sent while all are well.
Each process has a connection to the first one, which passes on what it hears. One that ends in order says so, and how
many computations it began: the others go on as long as they begin no further one. See docs/decisions/0119.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing.util
import os
import secrets
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from layoutmap.core.errors import EngineError, LayoutMapWarning, listed
from layoutmap.core.users_line import level_of_user

_GRACE_SECONDS = 5.0
"""How long a process still has when another one has died: for the error that it may get, and for what handles it."""

_CONNECTING_SECONDS, _ANSWER_SECONDS = 10.0, 3.0
_SILENT_HOST = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A host that is gone closes nothing: its connections are lost after a minute without answers of its system."""

_LATE_SECONDS = 0.5
"""How long a process that an error ends waits to hear of another's end, which may have caused it: it is said then."""

_HERE = "here\n"
"""The answer of a process to the first one's welcome: from there on each of them hears the other one."""

_DONE = "it has begun all that it had to do, and this process begins more"


class Peers:
    """The other processes of a program, heard of for as long as this object lives.

    All processes must make one together. Where one of them dies, the others say so on stderr, and end with status 1.

    Args:
        exchange: Returns the texts of all processes for that of this one, in order of the processes.
        grace_seconds: How long this process still has when another one has died; `None`: it goes on, and asks `ended`.
    """

    def __init__(
        self, exchange: Callable[[str], Sequence[str]], grace_seconds: float | None = _GRACE_SECONDS
    ):
        with _server() as server:
            token, host, port = secrets.token_hex(16), socket.gethostname(), server.getsockname()[1]
            own = [token, host, port, os.getpid(), *_addresses(host)]
            texts = exchange(json.dumps(own).ljust(256))  # of one length: JAX compiles for each
            processes = [json.loads(text) for text in texts]
            number = processes.index(own)
            connections = _connected(processes, number) if number else _accepted(server, processes)
        names = [f"pid {pid} on {host}" for _, host, _, pid, *_ in processes]
        self._hearing = _Hearing(number, names, connections, grace_seconds)
        # When nobody computes with these processes any more; and at the end, also that of a process of multiprocessing.
        weakref.finalize(self, self._hearing.close).atexit = False

    def ended(self) -> dict[int, str]:
        """The processes that have died, by number, and what is known of each."""
        return dict(self._hearing.ended)

    def begin(self) -> None:
        """Note that a computation begins that all processes take part in.

        Raises:
            EngineError: Another process has ended, and takes no part in it.
        """
        self._hearing.begin()


class _Hearing:
    """The messages heard from the other processes.

    Args:
        number: The number of this process.
        names: What the processes are called in messages.
        connections: The connections to other processes, by their numbers: in the first process to all, else to that.
        grace_seconds: See `Peers`.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        connections: dict[int, socket.socket],
        grace_seconds: float | None,
    ):
        self._number = number
        self._names = names
        self._connections = connections
        self._grace_seconds = grace_seconds
        self._num_begun = 0
        self._left: dict[int, int] = {}  # how many computations those began that have ended in order
        self.ended: dict[int, str] = {}
        self._is_closed = False
        self._error: EngineError | None = None
        self._has_said = threading.Event()
        _close_in_forks()
        _alive.add(self)
        atexit.register(self.leave)
        self._finalizer = multiprocessing.util.Finalize(None, self.leave, exitpriority=0)
        for process, connection in connections.items():
            threading.Thread(target=self._hear, args=(process, connection), daemon=True).start()

    def begin(self) -> None:
        """See `Peers.begin`."""
        self._num_begun += 1
        for process, num_begun in list(self._left.items()):
            if num_begun < self._num_begun:
                raise self._gone(process, _DONE)
        if self._error is not None:
            raise self._error

    # -- leaving

    def leave(self) -> None:
        """Say that this process ends, and why if that is an error; it goes on hearing of others."""
        error = _uncaught()
        self._say(self._number, self._num_begun, error)
        if error:
            self._has_said.wait(_LATE_SECONDS)

    def close(self) -> None:
        """Leave, and hear nothing any more."""
        atexit.unregister(self.leave)
        self._finalizer.cancel()
        self._is_closed = True
        self._say(self._number, self._num_begun, "")
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the copies of the connections that a forked process has: they would stay open when its parent ends."""
        for connection in self._connections.values():
            with suppress(OSError):  # closed already
                os.close(connection.detach())  # not `close`, which waits for whoever reads
        self._connections.clear()

    def _say(self, process: int, num_begun: int, error: str) -> None:
        line = json.dumps([process, num_begun, error]).encode() + b"\n"
        for number, connection in self._connections.items():
            if number != process:
                with suppress(OSError):
                    connection.sendall(line)

    # -- hearing

    def _hear(self, process: int, connection: socket.socket) -> None:
        listens = process == 0
        with connection, suppress(OSError), connection.makefile("r") as lines:  # an error: its host is silent
            for line in lines:
                if line == _HERE:
                    listens = True
                else:
                    self._told(*json.loads(line))
        # One that did not listen had waited no longer for an answer, and has warned of that: it lives.
        if listens and process not in self._left and not self._is_closed:
            self._end(process, "its connection was closed")

    def _told(self, process: int, num_begun: int, error: str) -> None:
        if self._number == 0:
            self._say(process, num_begun, error)
        if error:
            self._end(process, error)
            return
        self._left[process] = num_begun
        if num_begun < self._num_begun:
            self._end(process, _DONE)

    def _end(self, process: int, reason: str) -> None:
        """End this process, whose computations another one will not take part in."""
        if self._number == 0:
            self._say(process, 0, reason)
        self.ended[process] = f"{self._names[process]}: {reason}"
        if self._grace_seconds is None:
            return
        ends = f"process {self._number}, ends in {self._grace_seconds:g} s"
        self._error = self._gone(process, reason, ends)
        if not _ends.acquire(blocking=False):
            return
        # Past Python's files: the lock of one may be held by a thread that will run no more.
        with suppress(OSError):
            os.write(2, f"layoutmap: {self._error}\n".encode())
        self._has_said.set()
        time.sleep(self._grace_seconds)
        self._say(self._number, 0, f"it ended since process {process} did")
        os._exit(1)

    def _gone(self, process: int, reason: str, this_one: str = "") -> EngineError:
        return EngineError(
            f"process {process} of this program has ended",
            facts={f"process {process}": f"{self._names[process]}: {reason}", "this one": this_one},
            why="computing on the mesh needs all of its processes, and waits forever for one that is gone",
            fix=f"read what process {process} printed last, and start all of them again",
        )


def _uncaught() -> str:
    """The error that ends this process; empty if none does."""
    # In a process of multiprocessing it is being handled; in any other Python has noted it.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


_ends = threading.Lock()
_alive: weakref.WeakSet[_Hearing] = weakref.WeakSet()


@functools.cache
def _close_in_forks() -> None:
    """From now on, forked processes close their copies of connections."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: [each.forget() for each in _alive])


# -- connecting


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _addresses(host: str) -> list[str]:
    """Where other hosts may reach this one."""
    found = [host]
    with suppress(OSError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return found


def _accepted(server: socket.socket, processes: Sequence[Any]) -> dict[int, socket.socket]:
    """The connections from all other processes; one that says another word than the first process's is a stranger."""
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + _CONNECTING_SECONDS
    while len(found) < len(processes) - 1 and (seconds := until - time.monotonic()) > 0:
        with suppress(OSError):
            server.settimeout(seconds)
            connection = _kept(server.accept()[0])
            token, _, number = _line(connection).partition(" ")
            if token == processes[0][0]:
                connection.sendall(b"welcome\n")
                connection.settimeout(None)
                found[int(number)] = connection
            else:
                connection.close()
    _warn_of_unheard([each for number, each in enumerate(processes) if number and number not in found])
    return found


def _connected(processes: Sequence[Any], number: int) -> dict[int, socket.socket]:
    """The connection to the first process, at the first of its addresses where it answers."""
    token, host, port, _, *addresses = processes[0]
    here = ["127.0.0.1"] if host == socket.gethostname() else []
    for address in [*here, *addresses]:
        with suppress(OSError):
            connection = _kept(socket.create_connection((address, port), _ANSWER_SECONDS))
            connection.sendall(f"{token} {number}\n".encode())
            connection.settimeout(_CONNECTING_SECONDS)  # the first process may not have a core for a while
            if _line(connection) == "welcome":
                connection.settimeout(None)
                connection.sendall(_HERE.encode())
                return {0: connection}
            connection.close()
    _warn_of_unheard(processes[:1])
    return {}


def _kept(connection: socket.socket) -> socket.socket:
    """A connection that the systems of both ends look after."""
    connection.settimeout(_ANSWER_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, number in _SILENT_HOST.items():
        if hasattr(socket, name):  # each system has names of its own
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)
    return connection


def _line(connection: socket.socket) -> str:
    """The line that comes first, and nothing of what comes next; a part of it if it is long or does not end."""
    said = b""
    with suppress(OSError):
        while len(said) < 80 and (letter := connection.recv(1)) not in (b"", b"\n"):
            said += letter
    return said.decode(errors="replace")


def _warn_of_unheard(processes: Sequence[Any]) -> None:
    if processes:
        warning = LayoutMapWarning(
            "if another process dies, this one may wait for it forever",
            facts={"no connection to": listed([f"pid {pid} on {host}" for _, host, _, pid, *_ in processes])},
            why="each process connects to the first one, so that all notice when one ends",
            fix="make host names resolve on all of them, and allow connections to any port of the first one",
        )
        warnings.warn(warning, stacklevel=level_of_user())
