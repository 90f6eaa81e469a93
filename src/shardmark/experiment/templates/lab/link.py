"""A slow link between ranks of one machine: collectives take as long as on a network.

Each rank has one channel, which carries one collective after the other.  A collective takes the
latency, and the time of the bytes that each rank sends where the ranks form a ring.  Its result is
there at the end of that time, and not before.
"""

import functools
import inspect
import os
import queue
import threading
import time

import torch
import torch.distributed as dist

LATENCY_SECONDS = float(os.environ.get("LINK_LATENCY_MS", "5")) / 1e3
BYTES_PER_SECOND = float(os.environ.get("LINK_MB_PER_SECOND", "30")) * 1e6
RING = {  # collective -> (position of the argument whose bytes count, bytes sent for each of them)
    "all_reduce": (0, lambda ranks: 2 * (ranks - 1) / ranks),
    "reduce": (0, lambda ranks: 1),
    "broadcast": (0, lambda ranks: 1),
    "all_gather": (1, lambda ranks: ranks - 1),
    "all_gather_into_tensor": (1, lambda ranks: ranks - 1),
    "reduce_scatter": (1, lambda ranks: (ranks - 1) / ranks),
    "reduce_scatter_tensor": (1, lambda ranks: (ranks - 1) / ranks),
}
LEFT_OUT = "gather scatter all_to_all all_to_all_single send recv isend irecv".split()


def sent_by(collective, data, ranks):
    """Return the bytes that each rank sends for a collective."""
    tensors = data if isinstance(data, list | tuple) else [data]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return size * RING[collective][1](ranks)


def duration(sent_bytes):
    """Return the seconds that the link is busy with a collective."""
    return LATENCY_SECONDS + sent_bytes / BYTES_PER_SECOND


class Work(torch.futures.Future):
    """A collective under way, as torch.distributed returns it for `async_op=True`."""

    def get_future(self):
        return self

    def is_completed(self):
        return self.done()


class Channel:
    """The rank's end of the link, which counts what it carries."""

    def __init__(self):
        self.messages, self.sent_bytes, self._queue, self._thread = 0, 0.0, queue.Queue(), None

    def carry(self, collective, data, sent_bytes):
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self.messages, self.sent_bytes = self.messages + 1, self.sent_bytes + sent_bytes
        work = Work()
        self._queue.put((collective, data, duration(sent_bytes), work))
        return work

    def drain(self):
        """Wait until the channel has carried everything."""
        self._queue.join()

    @torch.no_grad()
    def _run(self):
        while True:
            collective, data, seconds, work = self._queue.get()
            time.sleep(seconds)
            try:
                collective()  # ends when the last rank has come as far
                work.set_result(data if isinstance(data, list) else [data])
            except Exception as error:
                work.set_exception(error)
            self._queue.task_done()


channel = Channel()


def install():
    """Let the collectives of torch.distributed go over the link."""
    for name in RING:
        setattr(dist, name, _over_link(name, getattr(dist, name)))
    for name in LEFT_OUT:
        setattr(dist, name, functools.partial(_refuse, name))


def _over_link(name, original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        ranks = dist.get_world_size(call.arguments["group"])
        if ranks == 1:
            return original(*args, **kwargs)
        returns_work, call.arguments["async_op"] = call.arguments["async_op"], False
        argument = [*call.arguments][RING[name][0]]
        data = call.arguments[argument]
        copies = [t.detach().clone() for t in (data if isinstance(data, list) else [data])]
        sent = copies if isinstance(data, list) else copies[0]
        call.arguments[argument] = sent  # later changes of the data are not sent

        def operation():
            original(*call.args, **call.kwargs)
            if RING[name][0] == 0:  # the result takes the place of the data
                data.copy_(sent)

        work = channel.carry(operation, data, sent_by(name, data, ranks))
        if returns_work:
            return work
        work.wait()
        return None

    return collective


def _refuse(name, *_, **__):
    raise NotImplementedError(f"link.py does not carry {name}; it carries {', '.join(RING)}")
