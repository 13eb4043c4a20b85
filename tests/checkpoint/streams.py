"""Exchanges of weights between two ends in one process, and streams that something has happened to on the way."""

import socket
import struct
import threading
import zlib

import layoutmap as lm

SECONDS = 240  # that no test waits for
KINDS = {1: "begin", 2: "file", 3: "data", 4: "end", 5: "failed", 6: "answer"}
HEADER = struct.Struct("<4sBIII")


def exchange(stream, receive, sink):
    """Call `receive` while a thread sends; return what it returns, and the error of the sender."""
    errors = []

    def send():
        try:
            stream.write(sink, timeout_seconds=SECONDS)
        except lm.CheckpointError as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return receive(), errors
    finally:
        sender.join()


def send(stream, model, **options):
    """Send weights to a model over a pair of sockets."""
    here, there = socket.socketpair()
    with here, there:
        received, errors = exchange(
            stream, lambda: lm.receive(model, there, timeout_seconds=SECONDS, **options), here
        )
    assert not errors
    return received


def record(stream):
    """Return the bytes of a stream, and its records as pairs of a kind and a payload."""
    here, there = socket.socketpair()
    with here, there:
        data = bytearray()

        def read():
            while not (found := parse(data)) or found[-1][0] != "end":
                part = there.recv(1 << 20)
                if not part:  # the sender has failed
                    return
                data.extend(part)
            there.sendall(make(6, 0, b'{"token":"","error":""}'))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            stream.write(here, timeout_seconds=SECONDS)
        finally:
            here.shutdown(socket.SHUT_RDWR)
            reader.join()
    return bytes(data), parse(data)


def parse(data):
    """The complete records at the start of some bytes."""
    found, place = [], 0
    while place + HEADER.size + 4 <= len(data):
        _, kind, _, length, _ = HEADER.unpack_from(data, place)
        place += HEADER.size + 4
        if place + length > len(data):
            break
        found.append((KINDS[kind], bytes(data[place : place + length])))
        place += length
    return found


def make(kind, number, payload, length=None):
    header = HEADER.pack(
        b"lmw1", kind, number, len(payload) if length is None else length, zlib.crc32(payload)
    )
    return header + struct.pack("<I", zlib.crc32(header)) + payload


def join(records):
    """The bytes of records, each with the number of its place."""
    numbers = {name: kind for kind, name in KINDS.items()}
    return b"".join(make(numbers[kind], number, payload) for number, (kind, payload) in enumerate(records))


def replay(data, model, **options):
    """Receive bytes after which the sender ends; return its error, and what it has answered."""
    here, there = socket.socketpair()
    answers = bytearray()
    with here, there:

        def feed():
            try:
                here.sendall(data)
                here.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            while part := here.recv(1 << 16):
                answers.extend(part)

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            lm.receive(model, there, timeout_seconds=SECONDS, **options)
            error = None
        except lm.CheckpointError as raised:
            error = raised
        there.shutdown(socket.SHUT_RDWR)
        feeder.join()
    return error, parse(answers)
