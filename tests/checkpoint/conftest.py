"""Every kind of place that checkpoints are kept in, and an object store of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from layoutmap.checkpoint import writer
from layoutmap.checkpoint.storage import LocalStorage

URLS = ("s3", "memory")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """An S3 server on this machine, with one bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("AWS_ACCESS_KEY_ID", "test")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            boto3.client("s3").create_bucket(Bucket="bucket")
            yield "s3://bucket"
    finally:
        server.stop()


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest) -> str:
    """A folder in an object store that no other test uses."""
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory:/"
    return f"{root}/{os.urandom(8).hex()}"


@pytest.fixture(params=("local", *URLS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder in each kind of place that no other test uses."""
    if request.param == "local":
        return str(tmp_path)
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory:/"
    return f"{root}/{os.urandom(8).hex()}"


@pytest.fixture(params=[1, 3])
def num_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many files a process writes at the same time, however little is in them."""
    monkeypatch.setattr(writer, "FILE_BYTES", 1)
    monkeypatch.setattr(LocalStorage, "write_files", request.param)
    return request.param
