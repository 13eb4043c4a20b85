"""One end of a stream that dies after a share of the bytes; run by test_stream.py."""

import os
import signal
import socket
import sys

import torch

import layoutmap as lm


def make_module(seed, width):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))


def main(verb, port, share):
    model = make_module(0, 20_000)
    left = int(share * sum(tensor.nbytes for tensor in model.state_dict().values()))
    own = {"send": os.write, "receive": os.read}[verb]

    def count(descriptor, argument):
        nonlocal left
        result = own(descriptor, argument if verb == "receive" else argument[: max(left, 1)])
        left -= result if verb == "send" else len(result)
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, {"send": "write", "receive": "read"}[verb], count)
    with socket.create_connection(("127.0.0.1", port)) as end:
        lm.stream(model).write(end) if verb == "send" else lm.receive(model, end)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
