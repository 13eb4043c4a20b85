"""Weights of models that several torch processes share: streamed under checkpoint names, and sent to others."""

from pathlib import Path

import forked
import pytest
from engines import several_processes

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("stream_process.py")


def start(size, *arguments):
    (port,) = several_processes.free_ports(1)
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        forked.start(WORKER, [*map(str, arguments)], common | {"RANK": str(number)}) for number in range(size)
    ]


def assert_well(processes):
    ended = forked.wait_for_all(processes)
    assert all(each.stdout.endswith("all is well\n") for each in ended), [
        each.stderr[-3000:] for each in ended
    ]


@pytest.mark.parametrize(
    ("size", "dims"), [(2, "model=2"), pytest.param(4, "batch=2,model=2", marks=pytest.mark.long)]
)
def test_all_processes_or_the_first_get_what_transformers_saves(size, dims, tmp_path):
    """Bit for bit, for stacked experts, tied weights, and adapters alone."""
    assert_well(start(size, "iterate", tmp_path, dims))


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [("model=2", "model=2,batch=1"), pytest.param("model=4", "model=2", marks=pytest.mark.long)],
)
def test_a_program_receives_what_another_one_sends(sender, receiver, tmp_path):
    """Over a folder and over a socket, in other layouts, with the same bits; and neither waits if one refuses."""
    (port,) = several_processes.free_ports(1)
    senders = start(int(sender[6]), "exchange", tmp_path, sender, "send", port)
    receivers = start(int(receiver[6]), "exchange", tmp_path, receiver, "receive", port)
    assert_well(senders + receivers)
