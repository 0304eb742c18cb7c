"""Hosts in one machine: a network namespace each, with an address, a host name and a hosts file of its own.

What runs on one reaches the others only over the link between them, which can be cut; all see the same disk.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.launching import PATIENCE, Started

SBIN = "/usr/sbin:/sbin"
NETNS = Path("/etc/netns")


def missing() -> str | None:
    """Why there can be no hosts here; None when there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if not (ip_path() and shutil.which("unshare")):
        return "network namespaces need the programs ip and unshare"
    name = f"try-{os.getpid()}"
    tried = subprocess.run([ip_path() or "", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        ip("netns", "del", name)
    return tried.stderr.strip() or None


def ip_path() -> str | None:
    """The program ip, which is not on everybody's PATH."""
    return shutil.which("ip", path=os.pathsep.join((os.environ.get("PATH", ""), SBIN)))


def ip(*args: str) -> str:
    """Run ip; what it prints."""
    return subprocess.run([ip_path() or "ip", *args], capture_output=True, text=True, check=True, timeout=30).stdout


class Host:
    """One of them; `name` is its host name, `also` a further name that the others know it by."""

    def __init__(self, name: str, also: str, number: int) -> None:
        self.name, self.also = name, also
        self.address = f"10.213.77.{number + 1}"
        self.space, self.link = f"g{os.getpid()}-{number}", f"g{os.getpid()}v{number}"
        ip("netns", "add", self.space)

    def connect(self, hosts: Sequence["Host"]) -> None:
        """Give it its address, a way to the others and their names."""
        ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", self.link)
        for device in ("lo", self.link):
            ip("-n", self.space, "link", "set", device, "up")
        own = NETNS / self.space  # ip netns exec lays what is in here over /etc
        own.mkdir(parents=True)
        names = [f"{host.address} {host.also} {host.name}\n" for host in hosts]
        (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))

    def start(self, argv: Sequence[str | Path], env: Mapping[str, str], log: Path) -> Started:
        """Start a program there."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *argv]
        return Started([ip_path() or "ip", "netns", "exec", self.space, *named], env, log)

    def reach(self, up: bool) -> None:
        """Cut the link, or mend it."""
        ip("-n", self.space, "link", "set", self.link, "up" if up else "down")

    def kill(self) -> int:
        """SIGKILL for everything that runs there, at once; how many processes that were."""
        killed = 0
        end = time.monotonic() + PATIENCE
        while pids := ip("netns", "pids", self.space).split():
            assert time.monotonic() < end, f"processes {pids} do not die"
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        return killed

    def remove(self) -> None:
        """Leave nothing of it."""
        self.kill()
        ip("netns", "del", self.space)
        shutil.rmtree(NETNS / self.space, ignore_errors=True)
        if NETNS.is_dir() and not any(NETNS.iterdir()):
            NETNS.rmdir()


def pair(names: Sequence[tuple[str, str]]) -> list[Host]:
    """Two hosts with a link between them; names are (host name, further name)."""
    hosts: list[Host] = []
    try:
        for number, (name, also) in enumerate(names):
            hosts.append(Host(name, also, number))
        a, b = hosts
        ends = ("type", "veth", "peer", "name", b.link, "netns", b.space)
        ip("link", "add", a.link, "netns", a.space, *ends)
        for host in hosts:
            host.connect(hosts)
        return hosts
    except BaseException:
        for host in hosts:
            host.remove()
        raise
