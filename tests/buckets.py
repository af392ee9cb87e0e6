"""A bucket in a real S3 server of this process; it counts what is read."""

from __future__ import annotations

import contextlib
import logging
import re
import urllib.request
from collections import Counter

import numpy as np
import pytest

import cerebro

REQUEST = re.compile(r'"(GET|PUT) /(\S+) HTTP')


class Requests(logging.Handler):
    """Counts the server's requests for objects, by method."""

    def __init__(self):
        super().__init__()
        self.counts = {"GET": Counter(), "PUT": Counter()}

    def emit(self, record):
        found = REQUEST.search(re.sub(r"\x1b\[\d+m", "", record.getMessage()))
        if found is not None and "?" not in found[2]:
            self.counts[found[1]][found[2]] += 1

    def clear(self):
        for counts in self.counts.values():
            counts.clear()


class Server:
    """The server; `objects` are those of the bucket, and `requests` counts."""

    def __init__(self, url, requests):
        import s3fs

        self.url = url
        self.requests = requests
        self.system = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)

    def read(self):
        """How often each object of the bucket was read."""
        return dict(self.requests.counts["GET"])

    def written(self):
        return dict(self.requests.counts["PUT"])

    def names(self, url):
        return sorted(name.partition("/")[2] for name in self.system.find(url))


@contextlib.contextmanager
def serving(monkeypatch):
    """A server on a free port with the bucket ``bkt``; its address is in the environment."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    requests, log = Requests(), logging.getLogger("werkzeug")
    level, spreads = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(requests)
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        address = f"http://{host}:{port}/moto-api/reset"  # buckets of earlier servers here
        urllib.request.urlopen(urllib.request.Request(address, method="POST")).close()
        found = Server("s3://bkt", requests)
        found.system.mkdir("bkt")
        requests.clear()
        yield found
    finally:
        log.removeHandler(requests)
        log.setLevel(level)
        log.propagate = spreads
        server.stop()
        with contextlib.suppress(ImportError):
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()  # it holds the address of this server


def rows():
    """The columns of a small regression."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(207, 3))
    return {"x": x, "y": x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=207)}


def split(at):
    """Write the training and the validation data below a folder or URL; return their places."""
    whole = rows()
    for name, part in (("train", slice(0, 160)), ("valid", slice(160, 207))):
        cerebro.shard({key: value[part] for key, value in whole.items()}, f"{at}/{name}", shards=4)
    return f"{at}/train", f"{at}/valid"
