"""A web service with several workers on one model file, and a load test beside ONNX Runtime.

    python recipes/web_service.py

The file is made once, in a process of its own: a process that has run a model on several threads
must not fork. Each worker loads the file and computes on one thread, so that workers do not wait
for one another's. Processes and threads take connections from one socket. Clients send images as
they are decoded, H, W, C in bytes, which is channels last already.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy
import torch
from torch import nn

import nhwc

Answer = Callable[[numpy.ndarray], numpy.ndarray]


@dataclass(frozen=True)
class Setting:
    """Who computes, in how many processes, each with how many threads that take requests."""

    engine: str
    processes: int
    threads: int

    @property
    def workers(self) -> int:
        return self.processes * self.threads


# One file.


def tiny() -> nn.Module:
    """A network for a trial."""
    layers = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()


def prepare(folder: Path, small: bool, side: int) -> None:
    """Write the model for each engine into `folder`."""
    torch.manual_seed(0)
    # As in the workers: what is asked for are the kernels that are fastest on one thread.
    torch.set_num_threads(1)
    model = tiny() if small else nhwc.load_model("mobilenet_v2")
    image = torch.rand(1, 3, side, side)
    fast = nhwc.optimize(model, image)
    nhwc.save(fast, folder / "model.nhwc")
    gain = fast.report.comparison
    print(f"optimize makes the model {gain.ratio:.2f}x as fast, {gain.verdict}", flush=True)
    try:
        torch.onnx.export(model, (image,), folder / "model.onnx", dynamo=True, verbose=False)
    except ImportError as error:
        print(f"no ONNX Runtime beside it: {error}", flush=True)


def nhwc_answer(folder: Path) -> Answer:
    model = nhwc.load(folder / "model.nhwc")

    def answer(image: numpy.ndarray) -> numpy.ndarray:
        with torch.inference_mode():
            return model(torch.from_numpy(image)).numpy()

    return answer


def onnxruntime_answer(folder: Path) -> Answer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", options)
    name = session.get_inputs()[0].name
    return lambda image: session.run(None, {name: numpy.ascontiguousarray(image)})[0]


ENGINES = {"nhwc": nhwc_answer, "onnxruntime": onnxruntime_answer}


# Several workers.


def forked(work: Callable[[], None]) -> int:
    """Do `work` in a process of its own, and return its number."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def handler_of(answer: Answer, side: int) -> type[BaseHTTPRequestHandler]:
    """Return what answers a request: an image in bytes with the class of the highest score."""

    class Classify(BaseHTTPRequestHandler):
        # A head and a short body are two packets; the second must not wait for the first's reply.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if len(body) != side * side * 3:
                self.send_error(400, f"{len(body)} bytes; send {side}x{side}x3, H, W, C")
                return
            pixels = numpy.frombuffer(body, numpy.uint8).reshape(1, side, side, 3)
            image = (pixels / numpy.float32(255)).transpose(0, 3, 1, 2)  # a view: channels last
            reply = json.dumps({"class": int(answer(image).argmax())}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *values: object) -> None:
            """A line for each request would be most of the work."""

    return Classify


def serve(listening: socket.socket, ready: int, setting: Setting, folder: Path, side: int) -> None:
    """Be one process of the service: load the model once, take requests on each thread."""
    torch.set_num_threads(1)
    answer = ENGINES[setting.engine](folder)
    answer(numpy.zeros((1, side, side, 3), numpy.float32).transpose(0, 3, 1, 2))
    os.write(ready, b".")
    handler = handler_of(answer, side)
    threads = []
    for _ in range(setting.threads):
        server = HTTPServer(("", 0), handler, bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        threads.append(threading.Thread(target=server.serve_forever))
        threads[-1].start()
    for thread in threads:
        thread.join()


@contextmanager
def running(setting: Setting, folder: Path, side: int) -> Iterator[int]:
    """Fork the processes of a service, hand out its port once all are ready, and end them."""
    told, ready = os.pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        children = []
        try:
            for _ in range(setting.processes):
                children.append(forked(lambda: serve(listening, ready, setting, folder, side)))
            os.close(ready)
            for _ in children:
                if not os.read(told, 1):
                    raise RuntimeError(f"a process with {setting.engine} ended before it served")
            yield listening.getsockname()[1]
        finally:
            os.close(told)
            for child in children:
                os.kill(child, signal.SIGTERM)
                os.waitpid(child, 0)


# A load test.


def asked(port: int, body: bytes) -> int:
    """Send one image and return the class that is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/", body)
        reply = connection.getresponse()
        said = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"the service answers {reply.status}: {said[:200]!r}")
        return json.loads(said)["class"]
    finally:
        connection.close()


def load(port: int, bodies: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Let clients ask one request after the other; return what each took, in seconds."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        while (start := time.perf_counter()) < end:
            asked(port, bodies[number % len(bodies)])
            took.append(time.perf_counter() - start)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


def measured(setting: Setting, folder: Path, bodies: Sequence[bytes], seconds: float) -> list[int]:
    """Print what one setting does under load; return its answers."""
    side = round((len(bodies[0]) / 3) ** 0.5)
    with running(setting, folder, side) as port:
        classes = [asked(port, body) for body in bodies]
        clients = 2 * setting.workers
        load(port, bodies, clients, seconds / 4)
        took = load(port, bodies, clients, seconds)
    tail = statistics.quantiles(took, n=100)[98] if len(took) > 1 else took[0]
    print(
        f"{setting.engine:12} {setting.processes:9} {setting.threads:8} {clients:8}"
        f" {len(took) / seconds:11.1f} {statistics.median(took) * 1e3:10.1f} {tail * 1e3:8.1f}",
        flush=True,
    )
    return classes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small model, a second of load")
    small = parser.parse_args(argv).small
    side, seconds = (32, 0.3) if small else (224, 10.0)
    cores = 2 if small else len(os.sched_getaffinity(0))
    drawn = numpy.random.default_rng(0)
    bodies = [drawn.integers(0, 256, side * side * 3, numpy.uint8).tobytes() for _ in range(8)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _, status = os.waitpid(forked(lambda: prepare(folder, small, side)), 0)
        if status:
            return 1
        head = "engine       processes  threads  clients  requests/s  median ms   99% ms"
        print(head, flush=True)
        engines = [one for one in ENGINES if one == "nhwc" or (folder / "model.onnx").exists()]
        answers = [
            measured(Setting(engine, *workers), folder, bodies, seconds)
            for workers in ((1, 1), (1, cores), (cores, 1))
            for engine in engines
        ]
    same = all(one == answers[0] for one in answers)
    print(f"all gave the same classes: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
