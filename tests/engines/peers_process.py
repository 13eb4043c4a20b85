"""Processes that hear of each other, in all cases at once; run by test_peers.py.

Each is forked from one that has no framework and does nothing else: it starts at once, and ends as any other does.
"""

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path

from layoutmap.engines import peers
from layoutmap.engines.peers import Peers

GRACE_SECONDS, LONG_SECONDS = 0.5, 1.5
NUM_PROCESSES = {"killed": 3, "staggered": 3}
kept = []


class Process:
    """One of the processes of a case, which the last of them ends first."""

    def __init__(self, case, number, folder):
        self.case, self.number, self.folder = case, number, folder
        self.count = NUM_PROCESSES.get(case, 2)
        self.is_last = number == self.count - 1

    def run(self):
        getattr(self, self.case.replace(" ", "_"))()
        print("to the end", flush=True)

    # -- cases

    def killed(self):
        self.begun()
        self.die() if self.is_last else self.wait()

    def killed_in_two_scopes(self):
        self.begun()
        self.begun("again")
        self.die() if self.is_last else self.wait()

    def first_killed(self):
        self.begun()
        self.wait() if self.is_last else self.die()

    def killed_with_a_child(self):
        self.begun()
        if not self.is_last:
            self.wait()
        if os.fork():
            self.die()
        time.sleep(5 * GRACE_SECONDS)  # as a worker of a data loader that does not notice
        os._exit(0)

    def raises(self):
        self.begun()
        self.fail() if self.is_last else self.wait()

    def fails_at_once(self):
        """The error that a dead process causes comes before its end is heard of, as that of gloo may."""
        peers._LATE_SECONDS, end = LONG_SECONDS, peers._Hearing._end
        peers._Hearing._end = lambda *args: (time.sleep(0.2), end(*args))
        self.begun()
        if self.is_last:
            self.die()
        time.sleep(0.1)
        self.fail()

    def exits(self):
        others = self.begun()
        if self.is_last:
            self.see("further")
            sys.exit(3)
        others.begin()
        self.show("further")
        self.wait()

    def has_ended(self):
        others = self.begun()
        if not self.is_last:
            time.sleep(GRACE_SECONDS)
            others.begin()

    def staggered(self):
        self.begun()
        if not self.is_last:
            time.sleep(LONG_SECONDS)

    def busy(self):
        self.begun()
        until = time.monotonic() + LONG_SECONDS
        while time.monotonic() < until:
            pow(3, 10**6) if self.is_last else time.sleep(0.1)  # the former holds the lock of the interpreter

    def forgotten(self):
        others = self.begun()
        kept.clear()
        del others
        gc.collect()
        time.sleep(GRACE_SECONDS / 2)
        assert 1 == threading.active_count(), threading.enumerate()
        self.die() if self.is_last else time.sleep(LONG_SECONDS)

    def unreachable(self):
        """The others have another port for the first process; warnings are errors here."""
        peers._CONNECTING_SECONDS = 0.2

        def exchange(text):
            first, *others = self.exchange("first", text)
            token, host, _, *rest = json.loads(first)
            return [json.dumps([token, host, 1, *rest]) if self.is_last else first, *others]

        Peers(exchange)

    def stranger(self):
        """Somebody else connects first."""

        def exchange(text):
            texts = self.exchange("first", text)
            if self.is_last:
                with socket.create_connection(("127.0.0.1", json.loads(texts[0])[2])) as other:
                    other.sendall(b"hello\n")
            return texts

        Peers(exchange).begin()

    def late(self):
        """The first process answers later than a connection takes: it was not given a core."""
        peers._ANSWER_SECONDS = 0.1
        others = Peers(self.exchange_late, GRACE_SECONDS)
        time.sleep(2 * GRACE_SECONDS)
        others.begin()

    def given_up(self):
        """The first process answers when the other one waits no more, and goes on without it."""
        peers._CONNECTING_SECONDS = 0.1 if self.number else 10
        kept.append(Peers(self.exchange_late, GRACE_SECONDS))
        time.sleep(2 * GRACE_SECONDS)

    def spawned(self):
        if self.is_last:
            self.in_multiprocessing(self.begun)
        else:
            self.begun()
            time.sleep(LONG_SECONDS)

    def spawned_raises(self):
        if self.is_last:
            self.in_multiprocessing(lambda: (self.begun(), self.fail()))
        else:
            self.begun()
            self.wait()

    # -- what they do

    def begun(self, scope="first"):
        """The connections, after some computations of all processes."""
        kept.append(others := Peers(lambda text: self.exchange(scope, text), GRACE_SECONDS))
        for _ in range(3):
            others.begin()
        return others

    def exchange(self, scope, text):
        """The texts of all processes, through files."""
        self.show(f"{scope} {self.number}", text)
        return [self.see(f"{scope} {number}") for number in range(self.count)]

    def exchange_late(self, text):
        texts = self.exchange("first", text)
        time.sleep(0 if self.number else 0.5)
        return texts

    def show(self, name, text=""):
        (self.folder / f"{name}.new").write_text(text)
        (self.folder / f"{name}.new").rename(self.folder / f"{name}.text")

    def see(self, name):
        while not (file := self.folder / f"{name}.text").exists():
            time.sleep(0.01)
        return file.read_text()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self):
        raise ValueError("no more disk")

    def wait(self):
        """As in a collective: until the process is ended."""
        time.sleep(60)

    def in_multiprocessing(self, function):
        child = multiprocessing.get_context("fork").Process(target=function)
        child.start()
        child.join()
        sys.exit(child.exitcode)


def main(folder):
    warnings.simplefilter("error")
    peers._LATE_SECONDS = GRACE_SECONDS / 5  # or others that an error ends are said to have ended, too
    cases = [name.replace("_", " ") for name in list(vars(Process))[: list(vars(Process)).index("begun")]]
    started = {}
    for case in cases[cases.index("run") + 1 :]:
        (folder / case).mkdir()
        for number in range(NUM_PROCESSES.get(case, 2)):
            pid = os.fork()
            if not pid:
                for name, file in (("out", 1), ("err", 2)):
                    os.dup2(os.open(folder / case / f"{number}.{name}", os.O_WRONLY | os.O_CREAT), file)
                Process(case, number, folder / case).run()
                sys.exit()
            started[pid] = case, number
    told = {}
    while started:
        pid, status = os.wait()
        case, number = started.pop(pid)
        out, err = ((folder / case / f"{number}.{name}").read_text() for name in ("out", "err"))
        told.setdefault(case, {})[number] = os.waitstatus_to_exitcode(status), out, err
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
