"""The judge's end of the pipes to the program: keeps the time, counts what comes, and notices who is gone."""

import os
import select
import time

from grpo_fn.sandbox.rpc import ChannelClosed

CHUNK = 65536
START_SECONDS = 30.0  # for the program's process to be shut in
START_BYTES = 2**16


class Channel:
    """Requests out, replies and printed text in, all of them pipes; `life` hangs up when the caller outside is gone.

    Every method raises ChannelClosed when the conversation is over, and goes on doing so.
    """

    def __init__(self, requests, replies, output, life):
        self.requests, self.replies, self.output, self.life = requests, replies, output, life
        self.incoming, self.text, self.over = bytearray(), bytearray(), ""
        self.closed = False  # on the program's side
        self.seconds, self.most = START_SECONDS, START_BYTES
        self.left, self.due = START_BYTES, time.monotonic() + START_SECONDS
        self.poll = select.poll()
        for fd in (replies, output, life):
            self.poll.register(fd, select.POLLIN)
        os.set_blocking(requests, False)

    def first(self):
        """The first line that the program's process says, of its own accord."""
        try:
            while b"\n" not in self.incoming:
                self._wait()
        except ChannelClosed as ended:
            return f"the program's process: {ended}"
        line, _, self.incoming = self.incoming.partition(b"\n")
        return line.decode(errors="replace")

    def begin(self, seconds, most):
        """From now on the program has `seconds` of wall clock, and `most` bytes to print and to answer with."""
        self.seconds, self.most = seconds, most
        self.due, self.left = time.monotonic() + seconds, most

    def check(self):
        """Raises ChannelClosed if a wait did: a test may have caught it."""
        if self.over:
            raise ChannelClosed(self.over)

    def read(self, size):
        """So many bytes of the replies."""
        while len(self.incoming) < size:
            self._wait()
        data = bytes(self.incoming[:size])
        del self.incoming[:size]
        return data

    def write(self, data):
        """Send it all."""
        self.check()
        while data:
            try:
                data = data[os.write(self.requests, data) :]
            except BlockingIOError:
                self.poll.register(self.requests, select.POLLOUT)
                self._wait()
                self.poll.unregister(self.requests)
            except BrokenPipeError:
                self.closed = True
                self._end("the program ended")

    def take_output(self):
        """What the program printed, with what may still be in the pipe."""
        if select.select([self.output], [], [], 0)[0]:
            self.text += os.read(self.output, CHUNK)
        return self.text.decode(errors="replace")

    def _wait(self):
        """Take in what has come, as soon as there is something."""
        self.check()
        seconds = self.due - time.monotonic()
        ready = self.poll.poll(1000 * seconds) if seconds > 0 else []
        if not ready:
            self._end(f"over the wall time of {self.seconds:g} s")
        for fd, _ in ready:
            if fd != self.requests:
                self._take(fd)

    def _take(self, fd):
        data = os.read(fd, CHUNK)
        self.left -= len(data)
        if fd == self.life:
            self._end("the parent no longer waits for the verdict")
        if fd == self.replies and not data:
            self.closed = True
            self._end("the program ended")
        if self.left < 0:
            self._end(f"over the output limit of {self.most // 1024} kB, printed and answered together")
        if data:
            target = self.incoming if fd == self.replies else self.text
            target += data
        else:
            self.poll.unregister(fd)

    def _end(self, reason):
        self.over = reason
        raise ChannelClosed(reason)


def read_exactly(fd, size):
    """So many bytes from a descriptor. Raises ChannelClosed when it ends before."""
    data = bytearray()
    while len(data) < size:
        if not (more := os.read(fd, size - len(data))):
            raise ChannelClosed("the judge ended")
        data += more
    return bytes(data)


def write_all(fd, data):
    """Write it all."""
    while data:
        data = data[os.write(fd, data) :]
